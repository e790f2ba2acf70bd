"""Layouts of single modules as columns of numbers, and the ways to combine those of several modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .options import Kind, ModuleOptions

_MANY = 4096  # combinations above which only the best of each number of ranks go on to a third module
_FASTEST = 32  # of them
_MOST_PAIRS = 1 << 22


@dataclass(frozen=True)
class Choice:
    """
    Sizes of a module.

    Args:
        kind (`Kind`): Tensor and context parallelism, recomputation.
        dp_size (`int`): Copies.
        pp_size (`int`): Stages.
        num_samples (`float`): Of a microbatch of one copy, on average.
        state_bytes, last_state_bytes (`float`): Of its first and of its last stage beside activations, about.
        running_bytes, last_running_bytes (`float`): What a task on them needs besides, about.
        kept_bytes (`float`): Activations of a microbatch on a stage, about.
    """

    kind: Kind
    dp_size: int
    pp_size: int
    num_samples: float
    state_bytes: float
    last_state_bytes: float
    running_bytes: float
    last_running_bytes: float
    kept_bytes: float

    @property
    def num_ranks(self) -> int:
        return self.dp_size * self.pp_size * self.kind.num_ranks


@dataclass(frozen=True)
class LayoutTable:
    """
    Layouts of a module for one number of microbatches: arrays of shape `[num_layouts]`.

    Args:
        kinds (`Sequence[Kind]`): The kinds that `kind` counts in.
        kind, dp_size, pp_size, num_ranks (`np.ndarray`): Sizes.
        num_samples (`np.ndarray`): Of a microbatch of one copy, on average.
        bottleneck_ms (`np.ndarray`): Forward and backward of a microbatch on the slowest stage.
        fill_ms (`np.ndarray`): The same through all stages one after the other, with the sum of gradients.
        least_ms (`np.ndarray`):
            What the slowest rank computes in a step at least, with perfectly even microbatches without padding.
        mean_ms (`np.ndarray`): What a rank computes in a step on average, without padding.
        state_bytes, last_state_bytes (`np.ndarray`): Of the first and of the last stage beside activations, about.
        running_bytes, last_running_bytes (`np.ndarray`): What a task on them needs besides, about.
        kept_bytes (`np.ndarray`): Activations of a microbatch on a stage, about.
        mean_bytes (`np.ndarray`):
            State and activations of one microbatch without padding, on average over the stages.
    """

    kinds: Sequence[Kind]
    kind: NDArray
    dp_size: NDArray
    pp_size: NDArray
    num_ranks: NDArray
    num_samples: NDArray
    bottleneck_ms: NDArray
    fill_ms: NDArray
    least_ms: NDArray
    mean_ms: NDArray
    state_bytes: NDArray
    last_state_bytes: NDArray
    running_bytes: NDArray
    last_running_bytes: NDArray
    kept_bytes: NDArray
    mean_bytes: NDArray

    def choice(self, row: int) -> Choice:
        """The sizes of a row."""
        values = {f.name: getattr(self, f.name)[row].item() for f in fields(Choice) if f.name != "kind"}
        return Choice(self.kinds[self.kind[row]], **values)


def layout_table(options: ModuleOptions, num_microbatches: int, dp_sizes: Sequence[int]) -> LayoutTable:
    """
    All layouts of a module, whether they fit the memory or not.

    Args:
        options (`ModuleOptions`): Its sizes and costs.
        num_microbatches (`int`): Of each replica of the language model.
        dp_sizes (`Sequence[int]`): Numbers of copies.
    """
    problem = options.problem
    stages = np.arange(1, options.max_stages + 1)
    stages = stages[[options.allows("pp_size", int(count)) for count in stages]]
    blocks = []
    for index, kind in enumerate(options.kinds):
        for dp_size in dp_sizes:
            pp_size = stages[stages <= problem.num_ranks // (dp_size * kind.num_ranks)]
            if len(pp_size):
                blocks.append(_columns(options, num_microbatches, index, dp_size, pp_size))
    names = [f.name for f in fields(LayoutTable) if f.name != "kinds"]
    columns: dict[str, Any] = {
        name: np.concatenate([np.empty(0), *(block[name] for block in blocks)]) for name in names
    }
    for name in ("kind", "dp_size", "pp_size", "num_ranks"):
        columns[name] = columns[name].astype(np.int64)
    return LayoutTable(options.kinds, **columns)


def _columns(
    options: ModuleOptions, num_microbatches: int, kind_index: int, dp_size: int, pp_size: NDArray
) -> dict[str, NDArray]:
    """The columns of layouts that differ in their number of stages."""
    kind, count = options.kinds[kind_index], num_microbatches
    num_samples = options.problem.global_batch_size / dp_size / count
    num_ranks = dp_size * pp_size * kind.num_ranks
    crosses = num_ranks > options.ranks_within_nodes(kind)
    placed = (kind, options.over_nodes(kind))
    bottleneck, slow = (options.bottlenecks_ms(own, num_samples)[pp_size - 1] for own in placed)
    whole, slow_whole = (float(options.layer_ms(own, num_samples).sum()) for own in placed)
    least = options.bottlenecks_ms(kind, num_samples, padded=False)[pp_size - 1]
    least_whole = float(options.layer_ms(kind, num_samples, padded=False).sum())
    slowest, through = np.where(crosses, slow, bottleneck), np.where(crosses, slow_whole, whole)
    uneven, of_replicas = (options.unevenness(parts) for parts in (dp_size * count, dp_size))
    sums = np.array([options.sync_ms(kind, dp_size, int(stages)) for stages in pp_size])
    running = options.running_bytes(kind, num_samples)
    kept, least_kept = (options.kept_bytes(kind, num_samples, padded) / pp_size for padded in (True, False))
    alike = {
        "kind": kind_index,
        "dp_size": dp_size,
        "num_samples": num_samples,
        "running_bytes": running[0],
        "last_running_bytes": running[1],
    }
    columns: dict[str, NDArray] = {name: np.full(len(pp_size), value) for name, value in alike.items()}
    return columns | {
        "pp_size": pp_size,
        "num_ranks": num_ranks,
        "bottleneck_ms": of_replicas * slowest,
        # On the slowest stage a replica has what all of its microbatches have; the other stages wait for the largest.
        "fill_ms": (of_replicas if num_samples >= 1 else uneven) * slowest + uneven * (through - slowest) + sums,
        "least_ms": count * least,
        "mean_ms": count * least_whole / pp_size,
        "state_bytes": options.state_bytes(kind, pp_size),
        "last_state_bytes": options.state_bytes(kind, pp_size, last=True),
        "kept_bytes": uneven * kept,
        "mean_bytes": options.state_bytes(kind, 1) / pp_size + least_kept,
    }


@dataclass(frozen=True)
class Combinations:
    """
    Combined layouts of modules: arrays of shape `[num_combinations]`.

    Args:
        rows (`Mapping[str, np.ndarray]`): Module -> the row in its [`LayoutTable`].
        family (`np.ndarray`): A number for the kinds of all modules, and for which of them have several stages.
        num_ranks (`np.ndarray`): Ranks of all modules together.
        bottleneck_ms (`np.ndarray`): A microbatch on the slowest stage.
        fill_ms (`np.ndarray`): A microbatch through all stages one after the other.
        least_ms (`np.ndarray`): What the slowest rank computes in a step at least.
        mean_ms (`np.ndarray`): What a rank computes in a step on average, of modules beside each other the most.
        mean_bytes (`np.ndarray`): What a rank holds on average at least, of modules beside each other the most.
    """

    rows: Mapping[str, NDArray]
    family: NDArray
    num_ranks: NDArray
    bottleneck_ms: NDArray
    fill_ms: NDArray
    least_ms: NDArray
    mean_ms: NDArray
    mean_bytes: NDArray

    @classmethod
    def of(cls, name: str, table: LayoutTable) -> Combinations:
        """The layouts of one module."""
        family = 2 * table.kind + (table.pp_size > 1)
        times = (table.bottleneck_ms, table.fill_ms, table.least_ms, table.mean_ms)
        return cls({name: np.arange(len(family))}, family, table.num_ranks, *times, table.mean_bytes)

    def __len__(self) -> int:
        return len(self.num_ranks)

    def take(self, places: NDArray) -> Combinations:
        """Some of them."""
        columns = {f.name: getattr(self, f.name)[places] for f in fields(self) if f.name != "rows"}
        return Combinations({name: rows[places] for name, rows in self.rows.items()}, **columns)

    def of_ranks(self, num_ranks: int) -> Combinations:
        """Those that take so many ranks."""
        return self.take(np.flatnonzero(self.num_ranks == num_ranks))

    def sharing(self, other: Combinations) -> Combinations:
        """Both on the same ranks, where times and memory add up."""
        first, second = _equal_pairs(self.num_ranks, other.num_ranks)
        left, right = self.take(first), other.take(second)
        mean = left.mean_ms + right.mean_ms
        return Combinations(
            {**left.rows, **right.rows},
            _joined_family(left, right),
            left.num_ranks,
            left.bottleneck_ms + right.bottleneck_ms,
            left.fill_ms + right.fill_ms,
            np.maximum(np.maximum(left.least_ms, right.least_ms), mean),
            mean,
            left.mean_bytes + right.mean_bytes,
        )

    def beside(self, other: Combinations, num_ranks: int | None, limit: int, in_series: bool) -> Combinations:
        """
        Both on ranks of their own.

        Args:
            other (`Combinations`): The other modules.
            num_ranks (`int`, *optional*): Ranks of both together; any number up to `limit` when `None`.
            limit (`int`): The most ranks of both together.
            in_series (`bool`): Whether one feeds the other, so that fills add up.
        """
        if num_ranks is None:
            first, second = (axis.ravel() for axis in np.indices((len(self), len(other))))
            fits = self.num_ranks[first] + other.num_ranks[second] <= limit
            first, second = first[fits], second[fits]
        else:
            first, second = _equal_pairs(self.num_ranks, num_ranks - other.num_ranks)
        left, right = self.take(first), other.take(second)
        return Combinations(
            {**left.rows, **right.rows},
            _joined_family(left, right),
            left.num_ranks + right.num_ranks,
            np.maximum(left.bottleneck_ms, right.bottleneck_ms),
            left.fill_ms + right.fill_ms if in_series else np.maximum(left.fill_ms, right.fill_ms),
            np.maximum(left.least_ms, right.least_ms),
            np.maximum(left.mean_ms, right.mean_ms),
            np.maximum(left.mean_bytes, right.mean_bytes),
        )

    def thinned(self, weight: float, most: int = _MANY) -> Combinations:
        """
        Of many combinations, for each number of ranks the fastest and the fastest of each family.

        Args:
            weight (`float`): Microbatches but one.
            most (`int`, *optional*): How many are not many.
        """
        if len(self) <= most:
            return self
        score = self.fill_ms + weight * self.bottleneck_ms
        groups = self.num_ranks, self.num_ranks * (self.family.max() + 1) + self.family
        fastest = [first_of_groups(group, score, count) for group, count in zip(groups, (_FASTEST, 1), strict=True)]
        return self.take(np.union1d(*fastest))


def _joined_family(left: Combinations, right: Combinations) -> NDArray:
    return left.family * (right.family.max(initial=0) + 1) + right.family


def _equal_pairs(keys: NDArray, others: NDArray) -> tuple[NDArray, NDArray]:
    """Places of all pairs of equal values."""
    order = np.argsort(others, kind="stable")
    low, high = (np.searchsorted(others[order], keys, side) for side in ("left", "right"))
    counts = high - low
    first = np.repeat(np.arange(len(keys)), counts)
    within = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
    return first, order[low[first] + within]


def first_of_groups(group: NDArray, score: NDArray, count: int) -> NDArray:
    """
    Places of the least scores of each group.

    Args:
        group, score (`np.ndarray` of shape `[n]`): What each place belongs to, and its score.
        count (`int`): How many of each group.
    """
    order = np.lexsort((score, group))
    ordered = group[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    lengths = np.diff(np.append(starts, len(ordered)))
    rank = np.arange(len(ordered)) - np.repeat(starts, lengths)
    return order[rank < count]


def side_by_side(parts: Sequence[Combinations], weight: float, limit: int) -> Combinations:
    """
    Modules that do not feed each other, on ranks of their own.

    Args:
        parts (`Sequence[Combinations]`): The modules.
        weight (`float`): Microbatches but one.
        limit (`int`): The most ranks of all together.
    """
    side, *others = parts
    for other in others:
        side, other = few_enough([side, other], weight)
        side = side.beside(other, None, limit, in_series=False).thinned(weight)
    return side


def few_enough(parts: Sequence[Combinations], weight: float) -> list[Combinations]:
    """Of modules whose ranks are divided in every way, so few layouts that all pairs can be looked at."""
    parts = [part.thinned(weight, _MANY >> 3) for part in parts]
    if np.prod([len(part) for part in parts], dtype=float) <= _MOST_PAIRS:
        return parts
    scores = (part.fill_ms + weight * part.bottleneck_ms for part in parts)
    return [part.take(first_of_groups(part.num_ranks, score, 3)) for part, score in zip(parts, scores, strict=True)]
