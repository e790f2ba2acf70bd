"""Pipeline templates: how many nodes they have, their stages, and how often each is used (Oobleck, section 2.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from .._portable import on_grid
from ..arrange import fastest_counts

# times, relative to the shortest step, within which other numbers of pipelines are sought
_NEARLY = (1.0, 1.01, 1.02, 1.05)


def node_counts(num_nodes: int, fewest: int, failures: int) -> range:
    """
    The numbers of nodes of the pipeline templates of a cluster (Oobleck, section 2.4.1.1); raises `ValueError` if the
    nodes are too few for `failures + 1` copies of `fewest` nodes.

    With all counts from `fewest` to what is left when `failures` pipelines have the fewest nodes, every number of
    nodes from `(failures + 1) * fewest` to `num_nodes` is a sum of at least `failures + 1` counts (theorem 1): as many
    pipelines of the fewest nodes as failures, and one of the rest.
    """
    check_guarantee(num_nodes, fewest, failures)
    return range(fewest, num_nodes - failures * fewest + 1)


def check_guarantee(num_nodes: int, fewest: int, failures: int) -> None:
    """Raises `ValueError` if the nodes are too few to survive this many failures, or a number is not possible."""
    if fewest < 1:
        raise ValueError(f"A pipeline of {fewest} nodes does not exist. Give it at least one node.")
    if failures < 0:
        raise ValueError(f"{failures} failures can't be guaranteed. Give a number of at least 0.")
    needed = (failures + 1) * fewest
    if num_nodes >= needed:
        return
    possible = num_nodes // fewest - 1
    advice = f"add {needed - num_nodes} nodes"
    if possible >= 0:
        advice += f", or guarantee {possible} failures"
    raise ValueError(
        f"{failures} simultaneous failures need {failures + 1} copies of the model on {fewest} nodes each, {needed} "
        f"nodes; there are {num_nodes}. To go on, {advice}."
    )


@dataclass(frozen=True, eq=False)
class LayerChain:
    """The layers of one copy of a model in pipeline order: those of the encoders, then of the language model."""

    rank_counts: Sequence[int]  # numbers of ranks that a stage may have, in ascending order
    layer_ms: ArrayLike  # [counts, layers]: forward and backward of one microbatch on each number of ranks
    # [counts, layers, layers + 1], by number of ranks, first layer and one past the last: how many microbatches a
    # stage of these layers can have in flight within its memory; no limit by default
    fits_in_flight: ArrayLike | None = None

    @property
    def num_layers(self) -> int:
        return np.shape(self.layer_ms)[1]

    @cached_property
    def stage_ms(self) -> NDArray:
        """
        Time of a microbatch in a stage `[counts, layers, layers + 1]`, by its number of ranks, its first layer and one
        past its last; infinite where there can be no such stage.
        """
        costs = np.asarray(self.layer_ms, float)
        prefix = np.concatenate([np.zeros((len(costs), 1)), np.cumsum(costs, axis=1)], axis=1)
        times = prefix[:, None, :] - prefix[:, :-1, None]
        # Sums of equal layers in different places differ by rounding.
        times = on_grid(times, float(prefix[:, -1].max()), bits=40)
        first, stop = np.arange(self.num_layers)[:, None], np.arange(self.num_layers + 1)[None, :]
        times[:, stop <= first] = np.inf
        if self.fits_in_flight is not None:
            times[np.asarray(self.fits_in_flight) < 1] = np.inf
        return times


@dataclass(frozen=True)
class TemplateStage:
    layers: tuple[int, int]  # first layer of the chain, and one past the last
    num_ranks: int  # all of one node
    time_ms: float  # a forward and a backward of one microbatch


class TimedPipeline:
    """A template, or other stages of a pipeline, with their predicted times."""

    num_nodes: int
    fill_ms: float  # one microbatch through all stages and back
    slowest_ms: float  # a microbatch in the slowest stage: the pace of the pipeline

    def step_ms(self, num_microbatches: int) -> float:
        return step_ms(self.fill_ms, self.slowest_ms, num_microbatches)


def step_ms(fill_ms: float, slowest_ms: float, num_microbatches: int) -> float:
    """Time of a number of microbatches in a pipeline under 1F1B; 0 for none."""
    return fill_ms + (num_microbatches - 1) * slowest_ms if num_microbatches else 0.0


@dataclass(frozen=True)
class PipelineTemplate(TimedPipeline):
    """The stages of one copy of the model on a number of nodes."""

    num_nodes: int
    stages: tuple[TemplateStage, ...]  # in order

    @property
    def fill_ms(self) -> float:
        return sum(stage.time_ms for stage in self.stages)

    @property
    def slowest_ms(self) -> float:
        return max(stage.time_ms for stage in self.stages)


def fewest_nodes(chain: LayerChain, node_size: int, most: int, num_microbatches: int) -> int | None:
    """The fewest nodes on which one copy of the model fits, up to `most`; `None` if it fits on none."""
    fits = np.isfinite(TemplateSearch(chain, node_size, most, num_microbatches).slowest_ms[::node_size])
    return int(np.argmax(fits)) if fits.any() else None


@dataclass(eq=False)
class TemplateSearch:
    """
    Finds the fastest template of a chain for any number of nodes (Oobleck, section 2.4.1.2).

    The time of a template is `sum(t) + (num_microbatches - 1) * max(t)` with the times `t` of its stages. For a limit
    of `max(t)`, the smallest sum for every suffix of the layers on every number of ranks follows by dynamic
    programming. Limits are tried from above: each solution says how far below its own slowest stage the next limit
    must be, down to the smallest possible one, so that the result is exact. (Oobleck divides and conquers, with four
    microbatches for each stage, so that templates of more stages compute more.) All numbers of nodes share the tables
    without a limit.

    A table has the shape `[depth, ranks + 1, layers + width]`: by the number of stages of the suffix, of which the
    last entry stands for all more, its number of ranks, and its first layer, with infinite entries behind the last
    layer for the most layers that a stage can have within the limit. More stages behind a stage mean more microbatches
    in flight in it; if memory limits them nowhere, there is one entry only. Ranks are counted from the end of the
    pipeline, and no stage has ranks of two nodes.
    """

    chain: LayerChain
    node_size: int  # ranks of a node
    num_nodes: int  # largest number of nodes of a template
    num_microbatches: int  # most in flight

    def fastest(self, num_nodes: int, num_microbatches: int) -> PipelineTemplate | None:
        """The fastest template for a step of `num_microbatches`; `None` if there is none."""
        num_ranks = num_nodes * self.node_size
        if num_ranks > self._num_ranks or not np.isfinite(self.slowest_ms[num_ranks]):
            return None
        smallest_slowest = float(self.slowest_ms[num_ranks])
        best = PipelineTemplate(num_nodes, self._stages(smallest_slowest, num_ranks))
        template = PipelineTemplate(num_nodes, self._stages(np.inf, num_ranks))
        while True:
            best = min(best, template, key=lambda one: one.step_ms(num_microbatches))
            limit = np.nextafter(template.slowest_ms, 0.0)
            if num_microbatches > 1:  # a slower stage can't pay for itself, since sums only grow
                limit = min(limit, (best.step_ms(num_microbatches) - template.fill_ms) / (num_microbatches - 1))
            if limit < smallest_slowest:
                return best
            template = PipelineTemplate(num_nodes, self._stages(limit, num_ranks))

    @cached_property
    def slowest_ms(self) -> NDArray:
        """By number of ranks `[ranks + 1]`: smallest time of the slowest stage of the whole chain."""
        return self._filled(self._stage_times(np.inf), np.maximum, self._num_ranks)[:, :, 0].min(axis=0)

    @cached_property
    def _num_ranks(self) -> int:
        """Ranks of the largest template, of which each layer has some."""
        most = self.chain.num_layers * max(self.chain.rank_counts) // self.node_size
        return min(self.num_nodes, most) * self.node_size

    @cached_property
    def _limits(self) -> NDArray | None:
        """Most stages behind a stage `[counts, layers, layers + 1]`; `None` if memory limits them nowhere."""
        if self.chain.fits_in_flight is None:
            return None
        most = min(self.chain.num_layers, self._num_ranks, self.num_microbatches)
        fits = np.asarray(self.chain.fits_in_flight)
        is_limited = np.isfinite(self.chain.stage_ms) & (fits < most)
        return np.where(is_limited, fits - 1, self.chain.num_layers) if is_limited.any() else None

    @cached_property
    def _depth(self) -> int:
        if self._limits is None:
            return 1
        return int(self._limits[self._limits < self.chain.num_layers].max()) + 2

    def _stage_times(self, limit: float) -> list[NDArray]:
        """
        For each number of ranks the times `[depth, layers, width]` of stages, by the number of stages behind them,
        their first layer, and their number of layers less one; infinite above the limit, and where memory allows no
        such stage.
        """
        num_layers = self.chain.num_layers
        result = []
        for kind, times in enumerate(self.chain.stage_ms):
            first, stop = np.nonzero(times <= limit)
            width = int((stop - first).max(initial=1))
            by_width = np.full((self._depth, num_layers, width), np.inf)
            for behind in range(self._depth):
                fits = ... if self._limits is None else self._limits[kind, first, stop] >= behind
                rows, stops = first[fits].ravel(), stop[fits].ravel()
                by_width[behind, rows, stops - rows - 1] = times[rows, stops]
            result.append(by_width)
        return result

    def _filled(self, stage_times: list[NDArray], joined: np.ufunc, num_ranks: int) -> NDArray:
        """The table for stages of these times, from the last stage to the first."""
        num_layers, depth = self.chain.num_layers, self._depth
        width = max(times.shape[2] for times in stage_times)
        table = np.full((depth, num_ranks + 1, num_layers + width), np.inf)
        table[0, 0, num_layers] = 0.0
        for used in range(num_ranks):
            reached = np.flatnonzero(np.isfinite(table[:, used]).any(axis=1))
            if not len(reached):
                continue
            low, high = int(reached[0]), int(reached[-1]) + 1
            suffixes = sliding_window_view(table[low:high, used, 1:], width, axis=1)
            for kind, stage_ranks in self._stages_after(used, num_ranks):
                times = stage_times[kind][low:high]
                joint = joined(times, suffixes[:, :, : times.shape[2]]).min(axis=2)
                target = table[:, used + stage_ranks, :num_layers]
                last = min(high, depth - 1)
                np.minimum(target[low + 1 : last + 1], joint[: last - low], out=target[low + 1 : last + 1])
                if high == depth:
                    np.minimum(target[-1], joint[-1], out=target[-1])
        return table

    def _stages_after(self, used: int, num_ranks: int) -> list[tuple[int, int]]:
        """Index and number of ranks of the stages that may stand in front of a number of ranks."""
        left = min(self.node_size - used % self.node_size, num_ranks - used)
        return [(kind, ranks) for kind, ranks in enumerate(self.chain.rank_counts) if ranks <= left]

    @cached_property
    def _unlimited(self) -> tuple[list[NDArray], NDArray]:
        """Stage times without a limit, and the table of smallest sums."""
        times = self._stage_times(np.inf)
        return times, self._filled(times, np.add, self._num_ranks)

    def _stages(self, limit: float, num_ranks: int) -> tuple[TemplateStage, ...]:
        """The stages of the whole chain on all ranks with the smallest sum of times within a limit that allows one."""
        if np.isinf(limit):
            stage_times, table = self._unlimited
        else:
            stage_times = self._stage_times(limit)
            table = self._filled(stage_times, np.add, num_ranks)
        first, used, number = 0, num_ranks, int(np.argmin(table[:, num_ranks, 0]))
        result = []
        while first < self.chain.num_layers:
            found = min(
                (float(sums[index]), behind, kind, ranks, first + 1 + index)
                for behind in self._behind(number)
                for kind, ranks in enumerate(self.chain.rank_counts)
                if ranks <= used and (kind, ranks) in self._stages_after(used - ranks, num_ranks)
                for times in [stage_times[kind][behind, first]]
                for sums in [times + table[behind, used - ranks, first + 1 : first + 1 + len(times)]]
                for index in [int(np.argmin(sums))]
            )
            _, number, kind, ranks, stop = found
            result.append(TemplateStage((first, stop), ranks, float(self.chain.stage_ms[kind, first, stop])))
            first, used = stop, used - ranks
        return tuple(result)

    def _behind(self, number: int) -> list[int]:
        """Possible entries of the stages behind the first one of a suffix with a number of stages."""
        last = self._depth - 1
        return [behind for behind in {number - 1, last} if behind >= 0 and min(behind + 1, last) == number]


@dataclass(frozen=True)
class Instantiation:
    pipelines: tuple[TimedPipeline, ...]  # the template or the stages of each
    microbatches: tuple[int, ...]  # of each in a step

    @classmethod
    def of(cls, pipelines: Sequence[TimedPipeline], num_microbatches: int) -> Instantiation:
        """Divides a step to end earliest; raises `ValueError` for fewer microbatches than pipelines."""
        fill_ms, slowest_ms = [one.fill_ms for one in pipelines], [one.slowest_ms for one in pipelines]
        return cls(tuple(pipelines), tuple(fastest_counts(fill_ms, slowest_ms, num_microbatches)))

    @property
    def unevenness(self) -> int:
        """Nodes of the largest pipeline beyond those of the smallest one."""
        sizes = [pipeline.num_nodes for pipeline in self.pipelines]
        return max(sizes) - min(sizes)

    @property
    def step_ms(self) -> float:
        """Time until the last pipeline is done."""
        return max(one.step_ms(count) for one, count in zip(self.pipelines, self.microbatches, strict=True))


def fastest_instantiations(
    templates: Sequence[PipelineTemplate], num_nodes: int, fewest_pipelines: int, num_microbatches: int, most: int
) -> list[Instantiation]:
    """
    The fastest pipelines that use all nodes, and those with other numbers of pipelines that are nearly as fast, the
    fastest first, `most` in all; none if no pipelines use all nodes. Among equally fast ones of as many pipelines no
    two can exchange nodes to be more even.

    Within a time, a pipeline computes a known number of microbatches. The most that pipelines on a number of nodes
    compute within it follow by dynamic programming over nodes and pipelines, and the smallest time in which that is
    the whole step by bisection over the times at which any template ends a microbatch. The first result is exact,
    without a list of all combinations.
    """
    usable = [template for template in templates if template.num_nodes <= num_nodes]
    if not usable:
        return []
    most_pipelines = min(num_nodes // min(template.num_nodes for template in usable), num_microbatches)
    fill_ms = np.array([template.fill_ms for template in usable])
    slowest_ms = np.array([template.slowest_ms for template in usable])

    def within(time_ms: float) -> _Capacities:
        # The times are sums themselves, so that a quotient may be a rounding error below a whole number.
        capacity = np.floor((time_ms - fill_ms) / slowest_ms + 1e-9).astype(int) + 1
        return _most_microbatches(usable, np.where(capacity > 0, capacity, -1), num_nodes, most_pipelines)

    ends = np.unique(fill_ms[:, None] + np.arange(num_microbatches) * slowest_ms[:, None])
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        if within(ends[middle]).counts(fewest_pipelines, num_microbatches):
            high = middle
        else:
            low = middle + 1
    if low == len(ends):
        return []
    found: dict[int, Instantiation] = {}
    for slower in _NEARLY if most > 1 else _NEARLY[:1]:
        capacities = within(slower * ends[low])
        for count in capacities.counts(fewest_pipelines, num_microbatches):
            if count not in found:
                pipelines = capacities.pipelines(count, num_microbatches)
                found[count] = Instantiation.of(pipelines, num_microbatches)
    ranked = sorted(found.values(), key=lambda one: (_rounded(one.step_ms), one.unevenness))
    return ranked[:most]


def _rounded(time_ms: float) -> float:
    """A time without the rounding errors of sums."""
    return float(f"{time_ms:.9g}")


@dataclass(frozen=True, eq=False)
class _Capacities:
    """The most microbatches that pipelines compute within a time."""

    templates: Sequence[PipelineTemplate]
    capacity: NDArray  # [templates]: microbatches of each; those that are negative are not used
    most: NDArray  # [nodes + 1, pipelines + 1]: microbatches; negative infinity where these can't be
    last: NDArray  # [nodes + 1, pipelines + 1]: index of the template of one of these pipelines

    def counts(self, fewest_pipelines: int, num_microbatches: int) -> list[int]:
        """Numbers of pipelines that compute all microbatches on all nodes."""
        enough = np.flatnonzero(self.most[-1, fewest_pipelines:] >= num_microbatches)
        return [fewest_pipelines + index for index in enough.tolist()]

    def pipelines(self, count: int, num_microbatches: int) -> list[PipelineTemplate]:
        """So many pipelines on all nodes that compute all microbatches, the largest first."""
        sizes: Counter[int] = Counter()
        nodes = len(self.most) - 1
        while count:
            template = self.templates[int(self.last[nodes, count])]
            sizes[template.num_nodes] += 1
            nodes, count = nodes - template.num_nodes, count - 1
        while (pairs := self._more_even(sizes, num_microbatches)) is not None:
            before, after = pairs
            sizes.subtract(before)
            sizes.update(after)
        known = {template.num_nodes: template for template in self.templates}
        return [known[size] for size in sorted(sizes.elements(), reverse=True)]

    def _more_even(self, sizes: Counter[int], num_microbatches: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Nodes of two pipelines, and more even ones with which all microbatches are computed; `None` if none are."""
        computed = {
            template.num_nodes: int(number)
            for template, number in zip(self.templates, self.capacity, strict=True)
            if number > 0
        }
        spare = sum(count * computed[size] for size, count in sizes.items() if count) - num_microbatches
        used = sorted(size for size, count in sizes.items() if count)
        for large in reversed(used):
            for small in used:
                for moved in range((large - small) // 2, 0, -1):
                    after = (large - moved, small + moved)
                    if not computed.keys() >= set(after):
                        continue
                    lost = computed[large] + computed[small] - computed[after[0]] - computed[after[1]]
                    if lost <= spare:
                        return (large, small), after
        return None


def _most_microbatches(
    templates: Sequence[PipelineTemplate], capacity: NDArray, num_nodes: int, most_pipelines: int
) -> _Capacities:
    used = np.flatnonzero(capacity > 0)
    sizes = np.array([templates[index].num_nodes for index in used.tolist()])
    most = np.full((num_nodes + 1, most_pipelines + 1), -np.inf)
    last = np.zeros((num_nodes + 1, most_pipelines + 1), int)
    most[0, 0] = 0.0
    for nodes in range(1, num_nodes + 1) if len(used) else ():
        fits = sizes <= nodes
        if not fits.any():
            continue
        totals = most[nodes - sizes[fits], :-1] + capacity[used[fits], None]
        best = totals.argmax(axis=0)
        most[nodes, 1:] = totals[best, np.arange(most_pipelines)]
        last[nodes, 1:] = used[fits][best]
    return _Capacities(templates, capacity, most, last)
