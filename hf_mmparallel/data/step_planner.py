"""From the samples of a global batch to their arrangement and the program of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..arrange import arrange_step
from ..cost import CostModel, StepCost, batch_workloads, eager_caps
from ..plan import ParallelPlan, SampleSizes, StepPlan, SyncGroup, Workloads
from ..schedule import Program, build_program
from .draws import Draw

SizeFunction = Callable[[Sequence[int]], SampleSizes]


@dataclass(frozen=True)
class PlannedStep:
    """
    A step before any of its samples is read.

    Args:
        step (`StepPlan`): Which sample is where.
        program (`Program`): The actions of every rank.
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

    def __call__(self, draw: Draw) -> PlannedStep:
        """
        Args:
            draw (`Draw`): The samples.

        Raises:
            `ValueError`: For a sample that is larger than a microbatch may be.
        """
        if self.sizes is None:
            sizes, workloads = None, Workloads.alike(self.plan.modules, len(draw.samples))
        else:
            sizes = self.sizes(draw.samples)
            workloads = batch_workloads(self.costs, self.plan, sizes, self.max_tokens, self.memory_bytes)
        step = arrange_step(self.plan, draw.samples, workloads, self.microbatch_size, self.method, draw.epoch)
        return PlannedStep(step, self.program(step, sizes), sizes, workloads)

    def program(self, step: StepPlan, sizes: SampleSizes | None) -> Program:
        """The program of a step, with costs from the sizes of its samples where they are known."""
        cost = caps = None
        if sizes is not None:
            cost = StepCost(self.costs, self.plan, step, sizes, self.groups)
            if self.plan.schedule == "eager" and self.training:
                caps = eager_caps(self.costs, self.plan, step, sizes, self.memory_bytes)
        return build_program(self.plan, step, self.groups, cost, self.training, caps)
