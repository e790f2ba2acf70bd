"""Tables of layouts of single modules, and combinations of the layouts of several modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .options import ModuleOptions, ParallelConfig, once

_MAX_COMBINATIONS = 4096  # above which only the best ones per number of ranks are combined with a third module
_MAX_PER_RANK_COUNT = 32  # combinations per number of ranks
_MAX_PAIRS = 1 << 22


@dataclass(frozen=True)
class LayoutEstimate:
    """Sizes of a module, with memory estimates."""

    kind: ParallelConfig
    dp_size: int
    pp_size: int
    num_samples: float  # mean samples per microbatch and replica
    state_bytes: float  # of the first stage, besides activations
    last_state_bytes: float
    running_bytes: float  # transient bytes of a task
    last_running_bytes: float
    saved_bytes: float  # activations of a microbatch on a stage

    @property
    def num_ranks(self) -> int:
        return self.dp_size * self.pp_size * self.kind.num_ranks


BACKWARD_SHARE = 2 / 3  # of a forward and a backward, for estimates


@dataclass(frozen=True)
class LayoutTable:
    """Layouts of a module for one number of microbatches, as arrays of shape `[num_layouts]`."""

    kinds: Sequence[ParallelConfig]
    kind: NDArray  # index into `kinds`
    dp_size: NDArray
    pp_size: NDArray
    num_ranks: NDArray
    num_samples: NDArray  # mean samples per microbatch and replica
    slowest_stage_ms: NDArray  # forward and backward of a microbatch on the slowest stage
    warm_up_ms: NDArray  # the same through all stages, plus gradient sums and the optimizer step
    sums_ms: NDArray  # the gradient sums
    state_bytes: NDArray  # estimate for the first stage, besides activations
    last_state_bytes: NDArray
    running_bytes: NDArray  # estimated transient bytes of a task
    last_running_bytes: NDArray
    saved_bytes: NDArray  # estimated activations of a microbatch on a stage
    mean_bytes: NDArray  # state, and activations of one microbatch without padding, averaged over the stages

    def estimate(self, row: int) -> LayoutEstimate:
        """The sizes of a row."""
        values = {f.name: getattr(self, f.name)[row].item() for f in fields(LayoutEstimate) if f.name != "kind"}
        return LayoutEstimate(self.kinds[self.kind[row]], **values)


def layout_table(options: ModuleOptions, num_microbatches: int, dp_sizes: Sequence[int]) -> LayoutTable:
    """All layouts of a module with these numbers of replicas, regardless of memory."""
    blocks = []
    for index in range(len(options.kinds)):
        for dp_size in dp_sizes:
            fixed = _fixed_columns(options, index, dp_size)
            if len(fixed["pp_size"]):
                blocks.append(_columns(options, num_microbatches, fixed, index, dp_size))
    names = [f.name for f in fields(LayoutTable) if f.name != "kinds"]
    columns: dict[str, Any] = {
        name: np.concatenate([np.empty(0), *(block[name] for block in blocks)]) for name in names
    }
    for name in ("kind", "dp_size", "pp_size", "num_ranks"):
        columns[name] = columns[name].astype(np.int64)
    return LayoutTable(options.kinds, **columns)


@once
def _fixed_columns(options: ModuleOptions, kind_index: int, dp_size: int) -> dict[str, NDArray]:
    """The columns that do not depend on microbatches, of layouts that differ only in their number of stages."""
    kind = options.kinds[kind_index]
    stages = np.arange(1, options.max_stages + 1)
    pp_size = stages[[options.allows("pp_size", int(count)) for count in stages]]
    pp_size = pp_size[pp_size <= options.problem.num_ranks // (dp_size * kind.num_ranks)]
    pp_size = pp_size if options.shares_experts(kind, dp_size) else pp_size[:0]
    pp_size = pp_size[options.sharding_helps(kind, dp_size, pp_size)]
    kind = kind.with_shards(dp_size)
    times = [options.sums_and_update_ms(kind, dp_size, count) for count in pp_size.tolist()]
    sums, updates = np.array(times).reshape(-1, 2).T
    return {
        "pp_size": pp_size,
        "num_ranks": dp_size * pp_size * kind.num_ranks,
        "sums_ms": sums,
        "updates_ms": updates,
        "state_bytes": options.state_bytes(kind, pp_size, dp_size=dp_size),
        "last_state_bytes": options.state_bytes(kind, pp_size, last=True, dp_size=dp_size),
        "mean_bytes": options.state_bytes(kind, 1, dp_size=dp_size) / pp_size,
    }


@once
def _sized_columns(options: ModuleOptions, kind: ParallelConfig, num_samples: float) -> tuple[Any, ...]:
    """Times and bytes of microbatches of a size in a kind of layouts, within nodes and over them."""
    placed = [
        (options.slowest_stages_ms(own, num_samples), float(options.layer_ms(own, num_samples).sum()))
        for own in (kind, options.over_nodes(kind))
    ]
    saved = [options.saved_bytes(kind, num_samples, padded) for padded in (True, False)]
    return *placed, options.running_bytes(kind, num_samples), saved


def _columns(
    options: ModuleOptions, num_microbatches: int, fixed: dict[str, NDArray], kind_index: int, dp_size: int
) -> dict[str, NDArray]:
    """The columns of layouts that differ only in their number of stages."""
    kind, count, pp_size = options.kinds[kind_index].with_shards(dp_size), num_microbatches, fixed["pp_size"]
    num_samples = options.problem.global_batch_size / dp_size / count
    within, over, running, (saved, least_saved) = _sized_columns(options, kind, num_samples)
    crosses = fixed["num_ranks"] > options.ranks_within_nodes(kind)
    slowest = np.where(crosses, over[0][pp_size - 1], within[0][pp_size - 1])
    through = np.where(crosses, over[1], within[1])
    uneven, of_replicas = (options.unevenness(num_shares) for num_shares in (dp_size * count, dp_size))
    alike = {
        "kind": kind_index,
        "dp_size": dp_size,
        "num_samples": num_samples,
        "running_bytes": running[0],
        "last_running_bytes": running[1],
    }
    return (
        {name: np.full(len(pp_size), value) for name, value in alike.items()}
        | fixed
        | {
            "slowest_stage_ms": of_replicas * slowest,
            # A replica's microbatches average out on the slowest stage; the others wait for the largest one.
            "warm_up_ms": (of_replicas if num_samples >= 1 else uneven) * slowest
            + uneven * (through - slowest)
            + fixed["sums_ms"]
            + fixed["updates_ms"],
            "saved_bytes": uneven * saved / pp_size,
            "mean_bytes": fixed["mean_bytes"] + least_saved / pp_size,
        }
    )


@dataclass(frozen=True)
class Combinations:
    """Combined layouts of modules, as arrays of shape `[num_combinations]`."""

    rows: Mapping[str, NDArray]  # module -> index into its `LayoutTable`
    family: NDArray  # id of the configurations of all modules, and of which modules have several stages
    num_ranks: NDArray  # of all modules together
    slowest_stage_ms: NDArray  # a microbatch on the slowest stage
    warm_up_ms: NDArray  # a microbatch through all stages in sequence, with gradient sums and the optimizer step
    sums_ms: NDArray  # the gradient sums
    mean_bytes: NDArray  # lower bound of the mean memory of a rank; the maximum over modules on separate ranks
    is_whole: bool = True  # whether none was left out

    @classmethod
    def of(cls, name: str, table: LayoutTable) -> Combinations:
        """The layouts of one module."""
        family = 2 * table.kind + (table.pp_size > 1)
        times = (table.slowest_stage_ms, table.warm_up_ms, table.sums_ms)
        return cls({name: np.arange(len(family))}, family, table.num_ranks, *times, table.mean_bytes)

    def __len__(self) -> int:
        return len(self.num_ranks)

    def take(self, indices: NDArray) -> Combinations:
        """The combinations at some indices."""
        columns = {f.name: getattr(self, f.name)[indices] for f in fields(self) if f.name not in ("rows", "is_whole")}
        return Combinations(
            {name: rows[indices] for name, rows in self.rows.items()}, **columns, is_whole=self.is_whole
        )

    def keep(self, indices: NDArray) -> Combinations:
        """The combinations at some indices, without others that may be good."""
        return replace(self.take(indices), is_whole=False)

    def with_ranks(self, num_ranks: int) -> Combinations:
        """The combinations with this number of ranks."""
        return self.take(np.flatnonzero(self.num_ranks == num_ranks))

    def colocate(self, other: Combinations) -> Combinations:
        """
        Colocates modules on the same ranks: times and memory add up, but the sums of one run beside the last backward
        of the other.
        """
        first, second = _equal_pairs(self.num_ranks, other.num_ranks)
        left, right = self.take(first), other.take(second)
        hidden = np.minimum(left.sums_ms, BACKWARD_SHARE * right.slowest_stage_ms * (right.sums_ms > 0))
        return Combinations(
            {**left.rows, **right.rows},
            _joined_family(left, right),
            left.num_ranks,
            left.slowest_stage_ms + right.slowest_stage_ms,
            left.warm_up_ms + right.warm_up_ms - hidden,
            left.sums_ms + right.sums_ms - hidden,
            left.mean_bytes + right.mean_bytes,
            left.is_whole and right.is_whole,
        )

    def on_separate_ranks(
        self, other: Combinations, num_ranks: int | None, limit: int, in_series: bool
    ) -> Combinations:
        """
        Places modules on separate ranks, `num_ranks` together or any number up to `limit`. In series one feeds the
        other, so that warm-up times add up.
        """
        if num_ranks is not None:
            return Pairs.of(self, other, num_ranks, in_series).combined()
        fits = np.flatnonzero(np.add.outer(self.num_ranks, other.num_ranks) <= limit)
        return Pairs(self, other, *divmod(fits, len(other)), in_series).combined()

    def best_on_separate_ranks(self, other: Combinations, limit: int, in_series: bool, weight: float) -> Combinations:
        """Places modules on separate ranks, up to `limit` together, and prunes the pairs before it combines them."""
        num_ranks = np.add.outer(self.num_ranks, other.num_ranks).ravel()
        fits = np.flatnonzero(num_ranks <= limit)
        if len(fits) <= _MAX_COMBINATIONS:
            return Pairs(self, other, *divmod(fits, len(other)), in_series).combined()
        score = (np.add if in_series else np.maximum).outer(self.warm_up_ms, other.warm_up_ms)
        score += weight * np.maximum.outer(self.slowest_stage_ms, other.slowest_stage_ms)
        own, others = (np.unique(side.family, return_inverse=True)[1] for side in (self, other))
        family = np.add.outer(own * (others.max() + 1), others)
        kept = fits[_best_of_ranks_and_families(num_ranks[fits], family.ravel()[fits], score.ravel()[fits])]
        return replace(Pairs(self, other, *divmod(kept, len(other)), in_series).combined(), is_whole=False)

    def prune(self, weight: float, most: int = _MAX_COMBINATIONS) -> Combinations:
        """
        Prunes more than `most` combinations to the fastest ones per number of ranks, and the fastest one per family;
        `weight` is the number of microbatches minus one.
        """
        if len(self) <= most:
            return self
        score = self.warm_up_ms + weight * self.slowest_stage_ms
        return self.keep(_best_of_ranks_and_families(self.num_ranks, self.family, score))

    def of_rows(self, name: str, values: NDArray) -> NDArray:
        """The values of a module's layouts in each combination."""
        return values[self.rows[name]]


@dataclass(frozen=True)
class Pairs:
    """Combinations of modules on separate ranks, whose columns are computed when they are asked for."""

    left: Combinations
    right: Combinations
    first: NDArray  # index in `left`, `[num_pairs]`
    second: NDArray  # index in `right`
    in_series: bool

    @classmethod
    def of(cls, left: Combinations, right: Combinations, num_ranks: int, in_series: bool) -> Pairs:
        """The pairs with this number of ranks together."""
        return cls(left, right, *_equal_pairs(left.num_ranks, num_ranks - right.num_ranks), in_series)

    def __len__(self) -> int:
        return len(self.first)

    def take(self, indices: NDArray) -> Pairs:
        """The pairs at some indices."""
        return replace(self, first=self.first[indices], second=self.second[indices])

    def keep(self, indices: NDArray) -> Combinations:
        """The combinations at some indices, without others that may be good."""
        return replace(self.take(indices).combined(), is_whole=False)

    def combined(self) -> Combinations:
        """The pairs as combinations."""
        rows = {name: rows[self.first] for name, rows in self.left.rows.items()}
        rows |= {name: rows[self.second] for name, rows in self.right.rows.items()}
        columns = (self.family, self.num_ranks, self.slowest_stage_ms, self.warm_up_ms, self.sums_ms, self.mean_bytes)
        return Combinations(rows, *columns, self.is_whole)

    @property
    def is_whole(self) -> bool:
        return self.left.is_whole and self.right.is_whole

    @property
    def family(self) -> NDArray:
        left, right = self.left.family, self.right.family
        return (left * (right.max(initial=0) + 1))[self.first] + right[self.second]

    @property
    def num_ranks(self) -> NDArray:
        return self.left.num_ranks[self.first] + self.right.num_ranks[self.second]

    @property
    def slowest_stage_ms(self) -> NDArray:
        return np.maximum(self.left.slowest_stage_ms[self.first], self.right.slowest_stage_ms[self.second])

    @property
    def warm_up_ms(self) -> NDArray:
        left, right = self.left.warm_up_ms[self.first], self.right.warm_up_ms[self.second]
        return left + right if self.in_series else np.maximum(left, right)

    @property
    def sums_ms(self) -> NDArray:
        return np.maximum(self.left.sums_ms[self.first], self.right.sums_ms[self.second])

    @property
    def mean_bytes(self) -> NDArray:
        return np.maximum(self.left.mean_bytes[self.first], self.right.mean_bytes[self.second])

    def of_rows(self, name: str, values: NDArray) -> NDArray:
        """The values of a module's layouts in each pair."""
        side, index = (self.left, self.first) if name in self.left.rows else (self.right, self.second)
        return side.of_rows(name, values)[index]


def _best_of_ranks_and_families(num_ranks: NDArray, family: NDArray, score: NDArray) -> NDArray:
    """Indices of the fastest combinations per number of ranks, and of the fastest one of each of their families."""
    is_kept = np.zeros(len(score), bool)
    is_kept[best_per_group(num_ranks, score, _MAX_PER_RANK_COUNT)] = True
    is_kept[best_per_group(num_ranks * (family.max() + 1) + family, score, 1)] = True
    return np.flatnonzero(is_kept)


def _joined_family(left: Combinations, right: Combinations) -> NDArray:
    return left.family * (right.family.max(initial=0) + 1) + right.family


def _equal_pairs(keys: NDArray, others: NDArray) -> tuple[NDArray, NDArray]:
    """Indices of all pairs of equal values."""
    order = np.argsort(others, kind="stable")
    low, high = (np.searchsorted(others[order], keys, side) for side in ("left", "right"))
    counts = high - low
    first = np.repeat(np.arange(len(keys)), counts)
    within = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
    return first, order[low[first] + within]


def best_per_group(group: NDArray, score: NDArray, count: int) -> NDArray:
    """Indices of at most `count` smallest scores of each group; both arrays are `[n]`."""
    few = np.arange(len(group))
    num_cells = count * (int(group.max(initial=0)) + 1)
    if num_cells <= len(group):  # else a sort of all takes less
        # A group dealt to `count` parts has a score in each that is at most the largest of the parts' smallest ones.
        part = group if count == 1 else count * group + few % count
        smallest = np.full(num_cells, np.inf)
        np.minimum.at(smallest, part, score)
        few = np.flatnonzero(score <= smallest.reshape(-1, count).max(axis=1)[group])
        if count == 1:
            first = np.full(num_cells, -1)
            first[group[few[::-1]]] = few[::-1]  # of equal scores the first one, which is assigned last
            return first[first >= 0]
    order = few[np.lexsort((score[few], group[few]))]
    ordered = group[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    lengths = np.diff(np.append(starts, len(ordered)))
    rank = np.arange(len(ordered)) - np.repeat(starts, lengths)
    return order[rank < count]


def side_by_side(modules: Sequence[Combinations], weight: float, limit: int) -> Combinations:
    """Places modules that do not feed each other on separate ranks, up to `limit` together."""
    side, *others = modules
    for other in others:
        side, other = limit_pairs([side, other], weight)
        side = side.best_on_separate_ranks(other, limit, in_series=False, weight=weight)
    return side


def limit_pairs(modules: Sequence[Combinations], weight: float) -> list[Combinations]:
    """Prunes the layouts of modules such that all pairs can be evaluated."""
    modules = [layouts.prune(weight, _MAX_COMBINATIONS >> 3) for layouts in modules]
    if np.prod([len(layouts) for layouts in modules], dtype=float) <= _MAX_PAIRS:
        return modules
    scores = (layouts.warm_up_ms + weight * layouts.slowest_stage_ms for layouts in modules)
    return [
        layouts.keep(best_per_group(layouts.num_ranks, score, 3))
        for layouts, score in zip(modules, scores, strict=True)
    ]
