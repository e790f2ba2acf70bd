"""Pipeline templates: the stages of one copy of the model on a number of nodes (Oobleck, section 2.4.1.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, eq=False)
class LayerChain:
    """
    The layers of one copy of a model in the order of its pipeline: those of the encoders, then those of the language
    model.

    Args:
        rank_counts (`Sequence[int]`): Numbers of ranks that a stage may have, in ascending order.
        layer_ms (`ArrayLike` of shape `[counts, layers]`):
            Time of a forward and a backward of one microbatch in each layer on each number of ranks.
        starts (`Sequence[int]`, *optional*): First layers of modules; no stage has layers of two modules.
        fits_in_flight (`ArrayLike` of shape `[counts, layers, layers + 1]`, *optional*):
            By number of ranks, first layer and one past the last: how many microbatches a stage of these layers can
            have in flight within its memory. No limit by default.
    """

    rank_counts: Sequence[int]
    layer_ms: ArrayLike
    starts: Sequence[int] = ()
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
        digits = 12 - int(np.ceil(np.log10(max(float(prefix[:, -1].max()), 1e-300))))
        times = np.round(times, digits)
        first, stop = np.arange(self.num_layers)[:, None], np.arange(self.num_layers + 1)[None, :]
        wrong = stop <= first
        for start in self.starts:
            wrong = wrong | ((first < start) & (stop > start))
        times[:, wrong] = np.inf
        if self.fits_in_flight is not None:
            times[np.asarray(self.fits_in_flight) < 1] = np.inf
        return times


@dataclass(frozen=True)
class TemplateStage:
    """
    A stage of a template.

    Args:
        layers (`tuple[int, int]`): First layer of the chain, and one past the last.
        num_ranks (`int`): Ranks of the stage, all of one node.
        time_ms (`float`): Time of a forward and a backward of one microbatch.
    """

    layers: tuple[int, int]
    num_ranks: int
    time_ms: float


@dataclass(frozen=True)
class PipelineTemplate:
    """
    The stages of one copy of the model on a number of nodes.

    Args:
        num_nodes (`int`): Its nodes.
        stages (`tuple[TemplateStage, ...]`): Its stages, in order.
    """

    num_nodes: int
    stages: tuple[TemplateStage, ...]

    @property
    def fill_ms(self) -> float:
        """Time of one microbatch through all stages and back."""
        return sum(stage.time_ms for stage in self.stages)

    @property
    def slowest_ms(self) -> float:
        """Time of a microbatch in the slowest stage: the pace of the pipeline."""
        return max(stage.time_ms for stage in self.stages)

    def step_ms(self, num_microbatches: int) -> float:
        """Time of a number of microbatches under 1F1B; 0 for none."""
        return step_ms(self.fill_ms, self.slowest_ms, num_microbatches)


def step_ms(fill_ms: float, slowest_ms: float, num_microbatches: int) -> float:
    """Time of a number of microbatches in a pipeline under 1F1B; 0 for none."""
    return fill_ms + (num_microbatches - 1) * slowest_ms if num_microbatches else 0.0


def pipeline_templates(
    chain: LayerChain, node_counts: Iterable[int], node_size: int, num_microbatches: int
) -> list[PipelineTemplate]:
    """
    The fastest template for each number of nodes; those without any are left out.

    The time of a template is `sum(t) + (num_microbatches - 1) * max(t)` with the times `t` of its stages. For a limit
    of `max(t)`, the smallest sum for every suffix of the layers on every number of ranks follows by dynamic
    programming. Limits are tried from above: each solution says how far below its own slowest stage the next limit
    must be, down to the smallest possible one, so that the result is exact. (Oobleck divides and conquers, with four
    microbatches for each stage, so that templates of more stages compute more.)

    Args:
        chain ([`LayerChain`]): The layers.
        node_counts (`Iterable[int]`): Numbers of nodes.
        node_size (`int`): Ranks of a node.
        num_microbatches (`int`): Microbatches of a step in such a pipeline.
    """
    fastest = (fastest_template(chain, count, node_size, num_microbatches) for count in node_counts)
    return [template for template in fastest if template is not None]


def fewest_nodes(chain: LayerChain, node_size: int, most: int, num_microbatches: int) -> int | None:
    """
    The fewest nodes on which one copy of the model fits, up to a limit; `None` if it fits on none.

    Args:
        chain ([`LayerChain`]): The layers.
        node_size (`int`): Ranks of a node.
        most (`int`): Largest number of nodes to try.
        num_microbatches (`int`): Microbatches of a step in such a pipeline.
    """
    fits = np.isfinite(_SuffixTables(chain, node_size, most * node_size, num_microbatches).slowest_ms[::node_size])
    return int(np.argmax(fits)) if fits.any() else None


def fastest_template(
    chain: LayerChain, num_nodes: int, node_size: int, num_microbatches: int, most_in_flight: int | None = None
) -> PipelineTemplate | None:
    """
    The fastest template of a number of nodes, see [`pipeline_templates`]; `None` if there is none.

    Args:
        chain ([`LayerChain`]): The layers.
        num_nodes (`int`): Number of nodes.
        node_size (`int`): Ranks of a node.
        num_microbatches (`int`): Microbatches of a step for which it is the fastest.
        most_in_flight (`int`, *optional*):
            Microbatches of a step that its memory must allow, if these are more than `num_microbatches`.
    """
    tables = _SuffixTables(chain, node_size, num_nodes * node_size, most_in_flight or num_microbatches)
    smallest_slowest = float(tables.slowest_ms[-1])
    if not np.isfinite(smallest_slowest):
        return None
    best = PipelineTemplate(num_nodes, tables.stages(smallest_slowest))
    template = PipelineTemplate(num_nodes, tables.stages(np.inf))
    while True:
        best = min(best, template, key=lambda one: one.step_ms(num_microbatches))
        limit = np.nextafter(template.slowest_ms, 0.0)
        if num_microbatches > 1:  # a slower stage can't pay for itself, since sums only grow
            limit = min(limit, (best.step_ms(num_microbatches) - template.fill_ms) / (num_microbatches - 1))
        if limit < smallest_slowest:
            return best
        template = PipelineTemplate(num_nodes, tables.stages(limit))


@dataclass(eq=False)
class _SuffixTables:
    """
    Smallest sums of stage times of all suffixes of a chain on all numbers of ranks, by limit of the slowest stage.

    A table has the shape `[depth, layers + 1, ranks + 1]`: by the number of stages of the suffix, of which the last
    entry stands for all more, its first layer, and its number of ranks. More stages behind a stage mean more
    microbatches in flight in it; if memory limits them nowhere, there is one entry only. Ranks are counted from the
    end of the pipeline, and no stage has ranks of two nodes.

    Args:
        chain ([`LayerChain`]): The layers.
        node_size (`int`): Ranks of a node.
        num_ranks (`int`): Most ranks of a suffix.
        num_microbatches (`int`): Most microbatches in flight.
    """

    chain: LayerChain
    node_size: int
    num_ranks: int
    num_microbatches: int

    @cached_property
    def _limits(self) -> NDArray | None:
        """Most stages behind a stage `[counts, layers, layers + 1]`; `None` if memory limits them nowhere."""
        if self.chain.fits_in_flight is None:
            return None
        most = min(self.chain.num_layers, self.num_ranks, self.num_microbatches)
        fits = np.asarray(self.chain.fits_in_flight)
        is_limited = np.isfinite(self.chain.stage_ms) & (fits < most)
        return np.where(is_limited, fits - 1, self.chain.num_layers) if is_limited.any() else None

    @cached_property
    def _depth(self) -> int:
        if self._limits is None:
            return 1
        return int(self._limits[self._limits < self.chain.num_layers].max()) + 2

    def _allowed(self, times: NDArray, behind: int) -> NDArray:
        """Stage times, infinite where memory does not allow this number of stages behind a stage."""
        return times if self._limits is None else np.where(self._limits >= behind, times, np.inf)

    def _filled(self, limit: float, joined: np.ufunc) -> NDArray:
        """The table for a limit, from the last stage to the first."""
        num_layers, depth = self.chain.num_layers, self._depth
        times = np.where(self.chain.stage_ms <= limit, self.chain.stage_ms, np.inf)
        by_depth = [self._allowed(times, behind) for behind in range(depth)]
        table = np.full((depth, num_layers + 1, self.num_ranks + 1), np.inf)
        table[0, num_layers, 0] = 0.0
        for used in range(self.num_ranks):
            reached = [behind for behind in range(depth) if np.isfinite(table[behind, :, used]).any()]
            for kind, stage_ranks in self._stages_after(used):
                for behind in reached:
                    joint = joined(by_depth[behind][kind], table[behind, :, used]).min(axis=1)
                    target = table[min(behind + 1, depth - 1), :num_layers, used + stage_ranks]
                    np.minimum(target, joint, out=target)
        return table

    def _stages_after(self, used: int) -> list[tuple[int, int]]:
        """Index and number of ranks of the stages that may stand in front of a number of ranks."""
        left = min(self.node_size - used % self.node_size, self.num_ranks - used)
        return [(kind, ranks) for kind, ranks in enumerate(self.chain.rank_counts) if ranks <= left]

    @cached_property
    def slowest_ms(self) -> NDArray:
        """By number of ranks `[ranks + 1]`: smallest time of the slowest stage of the whole chain."""
        return self._filled(np.inf, np.maximum)[:, 0].min(axis=0)

    def stages(self, limit: float) -> tuple[TemplateStage, ...]:
        """
        The stages of the whole chain on all ranks with the smallest sum of times.

        Args:
            limit (`float`): Largest time of a stage, for which there is a solution.
        """
        table = self._filled(limit, np.add)
        times = np.where(self.chain.stage_ms <= limit, self.chain.stage_ms, np.inf)
        first, used, number = 0, self.num_ranks, int(np.argmin(table[:, 0, -1]))
        result = []
        while first < self.chain.num_layers:
            found = min(
                (float(sums[stop]), behind, kind, ranks, stop)
                for behind in self._behind(number)
                for kind, ranks in enumerate(self.chain.rank_counts)
                if ranks <= used and (kind, ranks) in self._stages_after(used - ranks)
                for sums in [self._allowed(times, behind)[kind, first] + table[behind, :, used - ranks]]
                for stop in [int(np.argmin(sums))]
            )
            _, number, kind, ranks, stop = found
            result.append(TemplateStage((first, stop), ranks, float(times[kind, first, stop])))
            first, used = stop, used - ranks
        return tuple(result)

    def _behind(self, number: int) -> list[int]:
        """Possible entries of the stages behind the first one of a suffix with a number of stages."""
        last = self._depth - 1
        return [behind for behind in {number - 1, last} if behind >= 0 and min(behind + 1, last) == number]
