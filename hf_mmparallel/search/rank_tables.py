"""The best layouts of modules for every number of ranks, and of modules together: the lower tier of the search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .options import Kind, ModuleOptions

_FASTEST = 3  # layouts that are kept for each number of ranks whether or not another is better in all
MOST_KEPT = 32
"""Choices of several modules that are kept for each number of ranks."""
_MOST_ORDERED = 512  # divisions of one number of ranks that are looked at
NONE = 1e30
"""Milliseconds where there is no choice."""


@dataclass(frozen=True)
class Choice:
    """
    Sizes of a module.

    Args:
        kind (`Kind`): Tensor and context parallelism, recomputation.
        dp_size (`int`): Copies.
        pp_size (`int`): Stages.
        num_samples (`float`): Of a microbatch of one copy, on average.
        state_bytes (`float`): Of its first stage beside activations, about.
        kept_bytes (`float`): Activations of a microbatch on its first stage, about.
    """

    kind: Kind
    dp_size: int
    pp_size: int
    num_samples: float
    state_bytes: float
    kept_bytes: float

    @property
    def num_ranks(self) -> int:
        return self.dp_size * self.pp_size * self.kind.num_ranks


Choices = Mapping[str, Choice]
_Row = tuple[float, float, Choice]  # bottleneck, fill


@dataclass(frozen=True)
class RankTable:
    """
    The best choices for every number of ranks.

    Args:
        bottleneck_ms (`np.ndarray` of shape `[num_ranks + 1, num_kept]`):
            Forward and backward of a microbatch on the slowest stage; [`NONE`] where there is no choice.
        fill_ms (`np.ndarray` of shape `[num_ranks + 1, num_kept]`): The same through all stages one after the other.
        choices (`Callable[[int, int], Choices]`): (ranks, place) -> the sizes of each module.
    """

    bottleneck_ms: NDArray
    fill_ms: NDArray
    choices: Callable[[int, int], Choices]

    @property
    def num_kept(self) -> int:
        return self.bottleneck_ms.shape[1]

    def together(self, other: RankTable) -> RankTable:
        """Both on the same ranks, where their times add up."""
        bottleneck = self.bottleneck_ms[:, :, None] + other.bottleneck_ms[:, None, :]
        fill = self.fill_ms[:, :, None] + other.fill_ms[:, None, :]
        width = other.num_kept

        def choices(ranks: int, place: int) -> Choices:
            return {**self.choices(ranks, place // width), **other.choices(ranks, place % width)}

        return RankTable(bottleneck.reshape(len(fill), -1), fill.reshape(len(fill), -1), choices)

    def first(self, count: int, weight: float) -> RankTable:
        """The `count` choices with the least `fill_ms + weight * bottleneck_ms`."""
        if self.num_kept <= count:
            return self
        order = np.argsort(self.fill_ms + weight * self.bottleneck_ms, axis=1, kind="stable")[:, :count]
        bottleneck_ms, fill_ms = (np.take_along_axis(own, order, 1) for own in (self.bottleneck_ms, self.fill_ms))
        return RankTable(bottleneck_ms, fill_ms, lambda ranks, place: self.choices(ranks, int(order[ranks, place])))

    def divided(self, other: RankTable, ranks: int, weight: float, in_series: bool = False) -> Division:
        """
        Both on ranks of their own, a number of ranks divided between them in every way.

        Args:
            other (`RankTable`): The other modules.
            ranks (`int`): Ranks of both together.
            weight (`float`): Microbatches but one.
            in_series (`bool`, *optional*, defaults to `False`): Whether one feeds the other, so that fills add up.
        """
        own, rest = slice(0, ranks + 1), slice(ranks, None, -1)
        pairs = self.bottleneck_ms[own, :, None], other.bottleneck_ms[rest, None, :]
        fills = self.fill_ms[own, :, None], other.fill_ms[rest, None, :]
        bottleneck = np.maximum(*pairs).ravel()
        fill = (fills[0] + fills[1] if in_series else np.maximum(*fills)).ravel()
        score = fill + weight * bottleneck
        places = np.flatnonzero(score < NONE)
        if len(places) > _MOST_ORDERED:
            places = places[np.argpartition(score[places], _MOST_ORDERED)[:_MOST_ORDERED]]
        return Division(self, other, ranks, bottleneck, fill, places[np.argsort(score[places], kind="stable")])

    def beside(self, other: RankTable, weight: float, in_series: bool = False) -> RankTable:
        """Both on ranks of their own, divided as is best for every sum of ranks; see [`~RankTable.divided`]."""
        count = len(self.fill_ms)
        bottlenecks, fills = np.full((count, MOST_KEPT), NONE), np.full((count, MOST_KEPT), NONE)
        divisions = []
        for ranks in range(count):
            found = self.divided(other, ranks, weight, in_series)
            best = found.order[:MOST_KEPT]
            bottlenecks[ranks, : len(best)] = found.bottleneck_ms[best]
            fills[ranks, : len(best)] = found.fill_ms[best]
            divisions.append(best)

        def choices(ranks: int, place: int) -> Choices:
            return _divided_choices(self, other, ranks, int(divisions[ranks][place]))

        return RankTable(bottlenecks, fills, choices)


def _divided_choices(table: RankTable, other: RankTable, ranks: int, place: int) -> Choices:
    first, pair = divmod(place, table.num_kept * other.num_kept)
    own, rest = divmod(pair, other.num_kept)
    return {**table.choices(first, own), **other.choices(ranks - first, rest)}


@dataclass(frozen=True)
class Division:
    """
    A number of ranks divided between two tables in every way.

    Args:
        table (`RankTable`): The first.
        other (`RankTable`): The second.
        ranks (`int`): Of both together.
        bottleneck_ms (`np.ndarray`): Of each pair of choices.
        fill_ms (`np.ndarray`): Of each pair of choices.
        order (`np.ndarray`): The pairs that there are, fastest first.
    """

    table: RankTable
    other: RankTable
    ranks: int
    bottleneck_ms: NDArray
    fill_ms: NDArray
    order: NDArray

    def choices(self, place: int) -> Choices:
        """The sizes of each module, of a pair in `order`."""
        return _divided_choices(self.table, self.other, self.ranks, int(place))


def module_table(options: ModuleOptions, num_microbatches: int, dp_sizes: list[int]) -> RankTable:
    """
    The best layouts of a module for every number of ranks.

    Args:
        options (`ModuleOptions`): Its layouts.
        num_microbatches (`int`): Of each replica.
        dp_sizes (`list[int]`): Numbers of copies to look at.
    """
    problem, name = options.problem, options.name
    limit, stages = problem.num_ranks, np.arange(1, options.max_stages + 1)
    given = problem.fixed.get(name, {}).get("pp_size")
    allowed = stages if given is None else stages[stages == given]
    by_ranks: dict[int, list[_Row]] = {}
    for kind in options.kinds:
        for dp_size in dp_sizes:
            replica = problem.global_batch_size / dp_size
            num_samples = replica / num_microbatches
            bottlenecks = options.unevenness(dp_size) * options.bottlenecks_ms(kind, num_samples)
            fill = float(options.layer_ms(kind, num_samples).sum())
            uneven = options.unevenness(dp_size * num_microbatches)
            fill, kept = uneven * fill, uneven * num_samples * options.kept_bytes(kind)
            for pp_size in allowed[allowed <= limit // (dp_size * kind.num_ranks)].tolist():
                state = options.state_bytes(kind, pp_size)
                choice = Choice(kind, dp_size, pp_size, num_samples, state, kept / pp_size)
                total = fill + options.sync_ms(kind, dp_size, pp_size)
                if problem.memory_bytes is None or state + choice.kept_bytes <= problem.memory_bytes:
                    row = (float(bottlenecks[pp_size - 1]), total, choice)
                    by_ranks.setdefault(choice.num_ranks, []).append(row)
    found = {ranks: _worth_keeping(rows, num_microbatches - 1) for ranks, rows in by_ranks.items()}
    width = max((len(rows) for rows in found.values()), default=1)
    bottleneck_ms, fill_ms = np.full((limit + 1, width), NONE), np.full((limit + 1, width), NONE)
    for ranks, rows in found.items():
        for place, (bottleneck, total, _) in enumerate(rows):
            bottleneck_ms[ranks, place], fill_ms[ranks, place] = bottleneck, total
    return RankTable(bottleneck_ms, fill_ms, lambda ranks, place: {name: found[ranks][place][2]})


def _worth_keeping(rows: list[_Row], weight: int) -> list[_Row]:
    """
    Of the layouts with one number of ranks those that none is better than in both times, with and without
    recomputation; the fastest alone; and the one that needs least memory.
    """
    rows = sorted(rows, key=lambda row: row[1] + weight * row[0])
    kept = rows[:_FASTEST]
    for again in (False, True):
        lowest = float("inf")
        for row in sorted((row for row in rows if row[2].kind.checkpointing == again), key=lambda row: row[1::-1]):
            if row[0] < lowest:
                lowest = row[0]
                kept.append(row)
    kept.append(min(rows, key=lambda row: row[2].state_bytes + row[2].kept_bytes * row[2].pp_size))
    return list({id(row): row for row in kept}.values())
