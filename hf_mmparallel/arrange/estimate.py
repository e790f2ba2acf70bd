"""Estimate of a step's time, fast enough for use while its samples are arranged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ParallelPlan, Stage


def stage_share(plan: ParallelPlan, module: str, stage: Stage) -> float:
    """Time of a stage on its ranks per millisecond of the whole module on one rank."""
    return stage.num_layers / plan.modules[module].num_layers / len(stage.all_ranks)


@dataclass(frozen=True)
class Pipeline:
    """
    The stages that a microbatch passes, with their times; the first replica of each module represents all of them.

    Encoders are parallel chains that end directly before the language model, generators parallel chains that start
    directly after it. A stage on the ranks of another module adds to the time of that module's stage.
    `"encoders_first"` is estimated as 1F1B.
    """

    modules: tuple[str, ...]
    ratios: tuple[float, ...]  # backward over forward time of each module
    # for each module and stage: time of the stage per millisecond of the whole module on one rank
    shares: tuple[tuple[float, ...], ...]
    depth: tuple[int, ...]  # distance of each stage from the start of the longest chain
    before: tuple[tuple[int, ...], ...]  # the stages that send inputs to each stage
    forwards_first: bool  # all forwards run before all backwards

    @classmethod
    def of(cls, plan: ParallelPlan, backward_ratio: Mapping[str, float]) -> Pipeline:
        owner: dict[int, int] = {}
        chains: dict[str, list[int]] = {}
        costs: list[tuple[str, int, float]] = []
        count = 0
        encoders, generators = plan.encoders[::-1], plan.generators
        for name in (LANGUAGE_MODEL, *encoders, *generators):
            stages, chains[name] = plan.modules[name].replicas[0], []
            numbers: list[int] = []
            for stage in stages:
                number = next((owner[rank] for rank in stage.all_ranks if rank in owner), count)
                if number == count:
                    count += 1
                    chains[name].append(number)
                numbers.append(number)
                costs.append((name, number, stage_share(plan, name, stage)))
            for stage, number in zip(stages, numbers, strict=True):
                owner.update(dict.fromkeys(stage.all_ranks, number))
        shares = {name: [0.0] * count for name in plan.modules}
        for name, number, share in costs:
            shares[name][number] += share

        language = chains[LANGUAGE_MODEL]
        fronts = [chains[name] for name in encoders if chains[name]]
        ends = [chains[name] for name in generators if chains[name]]
        longest = max(map(len, fronts), default=0)
        starts = [(longest - len(chain), chain) for chain in fronts]
        starts += [(longest, language), *((longest + len(language), chain) for chain in ends)]
        depth: list[int] = [0] * count
        before: list[tuple[int, ...]] = [()] * count
        for start, chain in starts:
            for position, number in enumerate(chain):
                depth[number] = start + position
                before[number] = tuple(chain[position - 1 : position])
        before[language[0]] = tuple(chain[-1] for chain in fronts)
        for chain in ends:
            before[chain[0]] = (language[-1],)
        return cls(
            tuple(plan.modules),
            tuple(float(backward_ratio[name]) for name in plan.modules),
            tuple(tuple(shares[name]) for name in plan.modules),
            tuple(depth),
            tuple(before),
            plan.policy.keeps_all(is_encoder=False),
        )

    @property
    def num_stages(self) -> int:
        """Number of stages on the longest path through the model."""
        return max(self.depth) + 1

    @cached_property
    def bottleneck(self) -> dict[str, float]:
        """Module -> forward plus backward time of its slowest stage per millisecond of its forward."""
        return {
            name: max(shares) * (1 + ratio)
            for name, shares, ratio in zip(self.modules, self.shares, self.ratios, strict=True)
        }

    @cached_property
    def costs(self) -> NDArray:
        """Forward and backward times `[2, modules, stages]` per millisecond of a module's forward."""
        shares = np.array(self.shares)
        return np.stack([shares, shares * np.array(self.ratios)[:, None]])

    @cached_property
    def backwards(self) -> tuple[bool, ...]:
        """Whether each stage has a backward."""
        return tuple(bool(has_cost) for has_cost in self.costs[1].any(axis=0))

    def time_steps(self, count: int) -> NDArray:
        """
        The time step `[2, count, stages]` of each forward and backward.

        Under 1F1B stage `s` of `S` runs its forward of microbatch `k` in time step `2 k + s` and its backward in time
        step `2 k + 2 S - 1 - s`, so that it never runs two tasks in one time step, and the inputs of both were
        computed one time step before.
        """
        depth, microbatch = np.array(self.depth), np.arange(count)[:, None]
        if self.forwards_first:  # GPipe
            return np.stack([microbatch + depth, count + 2 * self.num_stages - 2 - depth + microbatch])
        return np.stack([2 * microbatch + depth, 2 * microbatch + 2 * self.num_stages - 1 - depth])

    def iteration_ms(
        self,
        # module -> milliseconds [arrangements, microbatches] of the forward of the whole module on one rank
        loads: Mapping[str, NDArray],
    ) -> NDArray:
        """
        Milliseconds `[arrangements]` to the end of the last task, with every stage in the order of
        [`Pipeline.time_steps`].

        Deferred samples count as if their backward were in the encoder's microbatch.
        """
        work = np.stack([loads[name] for name in self.modules])
        costs = np.einsum("wms,mqk->wksq", self.costs, work)
        time_steps, waits = _waits(self, work.shape[2])
        by_time_step = np.zeros((len(waits), len(self.depth), work.shape[1]))
        for direction in range(2):
            by_time_step[time_steps[direction], np.arange(len(self.depth))] += costs[direction]
        done = np.zeros(by_time_step.shape[1:])
        for wait, cost in zip(waits, by_time_step, strict=True):  # all stages of all arrangements together
            done = np.maximum.reduce(done[wait], axis=0) + cost
        return done.max(axis=0)


@lru_cache(maxsize=64)
def _waits(pipeline: Pipeline, count: int) -> tuple[NDArray, NDArray]:
    """The time steps, and the stages that each stage waits for in them `[num_time_steps, num_waits, stages]`."""
    time_steps, stages = pipeline.time_steps(count), np.arange(len(pipeline.depth))
    consumers = np.bincount([source for sources in pipeline.before for source in sources], minlength=1)
    inputs = 1 + max(1, *map(len, pipeline.before), int(consumers.max()))
    # itself, and its neighbors on the path of the microbatch
    waits = np.broadcast_to(stages, (int(time_steps.max()) + 1, inputs, len(stages))).copy()
    known = [0] * len(stages)
    for stage, sources in enumerate(pipeline.before):
        for number, source in enumerate(sources):
            waits[time_steps[0, :, stage], 1 + number, stage] = source
            if pipeline.backwards[source]:
                known[source] += 1
                waits[time_steps[1, :, source], known[source], source] = stage
    return time_steps, waits
