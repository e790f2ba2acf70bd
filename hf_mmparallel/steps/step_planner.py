"""From the samples of a global batch to their arrangement and the program of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from ..arrange import arrange_step
from ..cost import CostModel, RankMemory, StepCost, batch_workloads, eager_caps, memory_per_rank, model_flops
from ..cost.optimizer import optimizer_ms
from ..cost.stage_times import StageCost, stage_costs
from ..plan import ParallelPlan, SampleSizes, StepPlan, SyncGroup, Workloads
from ..schedule import Condensed, Program, Simulation, condense, condensed_program, simulate
from ..schedule.actions import StageKey

SizeFunction = Callable[[Sequence[int]], SampleSizes]


class Drawn(Protocol):
    """
    Samples of a global batch in the sampler's order, the epoch that they are drawn in, their sizes, if they were
    measured when they were drawn, and limits of microbatches, if they are others than the planner's.
    """

    @property
    def samples(self) -> tuple[int, ...]: ...

    @property
    def epoch(self) -> int: ...

    @property
    def sizes(self) -> SampleSizes | None: ...

    @property
    def limits(self) -> Mapping[str, int] | None: ...


@dataclass(frozen=True)
class PlannedStep:
    """
    A step before any of its samples is read.

    Args:
        step (`StepPlan`): Which sample is where.
        program (`Program`):
            The actions of every rank, or of those in the part of the rank that it was planned for; none if the step is
            arranged only.
        sizes (`SampleSizes`, *optional*): Of the samples, where they are known.
        workloads (`Workloads`): What the samples were arranged by.
    """

    step: StepPlan
    program: Program
    sizes: SampleSizes | None
    workloads: Workloads


@dataclass(frozen=True)
class StepPlanner:
    """
    Arranges global batches and plans their programs, on every rank to the same result. It communicates nothing and can
    be pickled, so that the workers of a data loader plan steps ahead.

    Args:
        costs (`CostModel`): What layers of the model cost.
        plan (`ParallelPlan`): The layout.
        groups (`Sequence[SyncGroup]`): The gradient sums.
        microbatch_size (`int`): Samples of a microbatch of one language-model replica, on average.
        method (`str`, *optional*, defaults to `"contiguous"`): A name in [`ARRANGEMENTS`].
        sizes (`Callable[[Sequence[int]], SampleSizes]`, *optional*):
            Dataset indices -> their sizes; without it all samples count the same.
        max_tokens (`int`, *optional*): Most tokens of a microbatch of the language model.
        memory_bytes (`float`, *optional*): Memory of a rank that microbatches have to fit.
        training (`bool`, *optional*, defaults to `True`): Whether there are backwards.
        limits (`Mapping[str, int]`, *optional*):
            Module -> most tokens of a microbatch, for all steps of a run, see [`~StepPlanner.with_limits`]; without it
            they are found for each batch.
    """

    costs: CostModel
    plan: ParallelPlan
    groups: Sequence[SyncGroup]
    microbatch_size: int
    method: str = "contiguous"
    sizes: SizeFunction | None = None
    max_tokens: int | None = None
    memory_bytes: float | None = None
    training: bool = True
    limits: Mapping[str, int] | None = None

    def with_method(self, method: str) -> StepPlanner:
        """The same with another arrangement, and with all that is known of the layout."""
        result = replace(self, method=method)
        result.__dict__.update(condensed=self.condensed, stage_costs=self.stage_costs)
        return result

    def with_limits(self, typical: SampleSizes) -> StepPlanner:
        """
        The same with limits of microbatches that are found once, so that they can be said, and compared with all
        samples, before the first step.

        Args:
            typical (`SampleSizes`): Of a global batch such as there will be.

        Raises:
            `ValueError`: If the memory of a rank is not enough however small microbatches are.
        """
        workloads = batch_workloads(self.costs, self.plan, typical, self.max_tokens, self.memory_bytes)
        return replace(self, limits=workloads.max_tokens)

    def __call__(self, draw: Drawn, rank: int | None = None) -> PlannedStep:
        """
        Args:
            draw ([`Drawn`]): The samples.
            rank (`int`, *optional*):
                Plan the program for this rank. That it is the same for the ranks of its part, see [`Part`], is all
                that has to be compared: what it exchanges with others are gradient sums, in an order that no step
                changes.
        """
        arranged = self.arrange_draw(draw)
        return replace(arranged, program=self.program(arranged.step, arranged.sizes, rank))

    def arrange_draw(self, draw: Drawn) -> PlannedStep:
        """Samples of a global batch in their microbatches, without a program."""
        sizes = draw.sizes
        if sizes is None and self.sizes is not None:
            sizes = self.sizes(draw.samples)
        limits = self.limits if draw.limits is None else draw.limits
        return self.arrange(draw.samples, sizes, limits, draw.epoch)

    def arrange(
        self,
        samples: Sequence[int],
        sizes: SampleSizes | None,
        limits: Mapping[str, int] | None = None,
        epoch: int = 0,
    ) -> PlannedStep:
        """
        Samples in their microbatches, without a program.

        Args:
            samples (`Sequence[int]`): Dataset indices in the sampler's order.
            sizes (`SampleSizes`, *optional*): Of each; without them all count the same.
            limits (`Mapping[str, int]`, *optional*):
                Module -> most tokens of a microbatch; without them they are found for these samples.
            epoch (`int`, *optional*, defaults to 0): The epoch that they are drawn in.
        """
        if sizes is None:
            workloads = Workloads.alike(self.plan.modules, len(samples))
        else:
            memory_bytes = self.memory_bytes if limits is None else None
            workloads = batch_workloads(self.costs, self.plan, sizes, self.max_tokens, memory_bytes)
            if limits is not None:
                workloads = replace(workloads, max_tokens=limits)
        step = arrange_step(self.plan, samples, workloads, self.microbatch_size, self.method, epoch)
        return PlannedStep(step, Program({}), sizes, workloads)

    @cached_property
    def condensed(self) -> Condensed:
        """The layout with one rank for all that run the same list."""
        return condense(self.plan, self.groups)

    @cached_property
    def stage_costs(self) -> Mapping[StageKey, StageCost]:
        """The costs of the stages, which no step changes."""
        return stage_costs(self.costs, self.plan)

    def program(self, step: StepPlan, sizes: SampleSizes | None, rank: int | None = None) -> Program:
        """
        The program of a step, with costs from the sizes of its samples where they are known; of the ranks in the part
        of `rank` only, if that is given.
        """
        cost = caps = None
        parts = list(self.condensed.parts(step, rank))
        plan, own = (self.plan, step) if rank is None or not parts else (parts[0].whole_plan, parts[0].step)
        if sizes is not None:
            cost = StepCost(self.costs, plan, own, sizes, self.groups, self.stage_costs)
            if plan.policy.fills_memory and self.training:
                caps = eager_caps(self.costs, plan, own, sizes, self.memory_bytes)
        program = condensed_program(parts, cost, self.training, caps)
        return self.condensed.expand(program)

    def predict(self, planned: PlannedStep, sizes: SampleSizes | None = None) -> Prediction:
        """
        What a step takes by its costs.

        Args:
            planned (`PlannedStep`): The step.
            sizes (`SampleSizes`, *optional*): Of its samples, if the step was planned without them.
        """
        sizes = planned.sizes if sizes is None else sizes
        assert sizes is not None
        cost = StepCost(self.costs, self.plan, planned.step, sizes, self.groups)
        simulation = simulate(self.plan, planned.program, cost, cost.message_ms, cost.sync_ms)
        memory = memory_per_rank(self.costs, self.plan, planned.step, sizes, simulation.peak_in_flight)
        update_ms = optimizer_ms(self.costs, self.plan) if self.training else 0.0
        utilisation = self.utilisation(sizes, simulation.iteration_ms + update_ms)
        return Prediction(self.plan, planned, sizes, simulation, memory, utilisation, update_ms)

    def utilisation(self, sizes: SampleSizes, step_ms: float) -> float:
        """Model FLOPs of the samples over what all ranks could do meanwhile."""
        peak_flops = 1e9 * self.costs.device.peak_tflops * self.plan.world_size * step_ms
        return model_flops(self.costs.spec, sizes) / peak_flops


@dataclass(frozen=True)
class Prediction:
    """
    What a step is expected to take.

    Args:
        plan (`ParallelPlan`): The layout.
        planned (`PlannedStep`): Its arrangement and program.
        sizes (`SampleSizes`): Of its samples.
        simulation (`Simulation`): Its replay.
        memory (`dict[int, RankMemory]`): Rank -> its memory.
        flops_utilisation (`float`): Model FLOPs a second over the peak of all ranks (MFU).
        optimizer_ms (`float`, *optional*, defaults to 0.0): Clipping and the optimizer's step, behind the simulation.
    """

    plan: ParallelPlan
    planned: PlannedStep
    sizes: SampleSizes
    simulation: Simulation
    memory: dict[int, RankMemory]
    flops_utilisation: float
    optimizer_ms: float = 0.0

    @property
    def step_ms(self) -> float:
        return self.simulation.iteration_ms + self.optimizer_ms

    @property
    def peak_memory_bytes(self) -> float:
        """Of the fullest rank."""
        return max(memory.total for memory in self.memory.values())

    def tokens_per_second(self, module: str) -> float:
        """Tokens of a module over the time of the step."""
        return 1e3 * float(self.sizes.tokens[module].sum()) / self.step_ms
