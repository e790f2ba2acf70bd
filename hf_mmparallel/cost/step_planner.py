"""Plans a step: from the samples of a global batch to their arrangement and program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .._html_repr import HtmlRepr
from ..arrange import Arrangement, arrange_step
from ..arrange.rank_batches import arrange_for_ranks, unlike_turn, whole_model_workloads
from ..plan import ModelSpec, ParallelPlan, SampleSizes, StageKey, StepPlan, SyncGroup, Workloads, resolve_plan
from ..plan.step_plan import BatchIndices
from ..schedule import (
    GradientFlow,
    Program,
    Representatives,
    Timeline,
    default_cost,
    find_representatives,
    in_flight_limits,
    program_of_parts,
    simulate,
)
from ..schedule.scheduler import Cost
from . import CostModel, RankMemory, StepCost, batch_workloads, fitting_in_flight, memory_per_rank, model_flops
from .gradient_sums import GradientSumCosts, optimizer_ms
from .stage_times import StageCost, stage_costs

SizeFunction = Callable[[Sequence[int]], SampleSizes]


class SampleBatch(Protocol):
    """Samples of a global batch in the sampler's order."""

    @property
    def samples(self) -> tuple[int, ...]: ...

    @property
    def epoch(self) -> int: ...

    @property
    def sizes(self) -> SampleSizes | None: ...  # if they were measured when they were drawn

    @property
    def token_limits(self) -> Mapping[str, int] | None: ...  # of microbatches, if they differ from the planner's


@dataclass(frozen=True)
class PlannedStep:
    """A step before any of its samples is read."""

    step: StepPlan
    sizes: SampleSizes | None  # if they are known
    workloads: Workloads  # those that the samples were arranged by
    # the actions of all ranks, or of those in the part of the rank that it was planned for; empty if it is arranged
    # only
    program: Program = Program({})


@dataclass(frozen=True)
class StepPlanner:
    """
    Arranges global batches and plans their programs, with the same result on every rank.

    It does not communicate and can be pickled, so that the workers of a data loader plan steps ahead.
    """

    costs: CostModel
    plan: ParallelPlan
    sync_groups: Sequence[SyncGroup]  # the gradient all-reduces
    microbatch_size: int  # mean samples of a microbatch of one language model replica
    arrangement: str | Arrangement = "contiguous"  # a name in `ARRANGEMENTS`, or a function
    sizes: SizeFunction | None = None  # dataset indices -> their sizes; without it all samples count the same
    max_tokens: int | None = None  # LM tokens per microbatch
    memory_bytes: float | None = None  # memory of a rank that microbatches have to fit
    training: bool = True  # whether there are backwards
    # module -> maximum tokens per microbatch of a run; computed for each batch when left out
    token_limits: Mapping[str, int] | None = None

    def with_arrangement(self, arrangement: str) -> StepPlanner:
        """The same planner with another arrangement; shares cached properties of the layout."""
        return replace(self, arrangement=arrangement).sharing(self, "representatives")

    def sharing(self, other: StepPlanner, *names: str) -> StepPlanner:
        """This planner with the cached properties of one whose plan has the same stages, and with those of `names`."""
        for name in ("stage_costs", "sum_costs", "update_ms", *names):
            self.__dict__[name] = getattr(other, name)
        return self

    def with_token_limits(self, typical: SampleSizes) -> StepPlanner:
        """
        Computes limits of microbatches once from a typical global batch, so that they are known before the first step.

        They can then be reported, and compared with all samples. Raises `ValueError` if a rank's memory is
        insufficient for microbatches of any size.
        """
        workloads = batch_workloads(self.costs, self.plan, typical, self.max_tokens, self.memory_bytes)
        return replace(self, token_limits=workloads.token_limits)

    def __call__(self, global_batch: SampleBatch, rank: int | None = None) -> PlannedStep:
        """
        Plans a step, with the program for all ranks or only for those in the part of `rank`.

        Other ranks only take part in gradient all-reduces, whose order does not depend on the step.
        """
        arranged = self.arrange_batch(global_batch)
        return replace(arranged, program=self.program(arranged.step, arranged.sizes, rank))

    def arrange_batch(self, global_batch: SampleBatch) -> PlannedStep:
        """Arranges the samples of a global batch, without a program."""
        sizes = global_batch.sizes
        if sizes is None and self.sizes is not None:
            sizes = self.sizes(global_batch.samples)
        token_limits = self.token_limits if global_batch.token_limits is None else global_batch.token_limits
        return self.arrange(global_batch.samples, sizes, token_limits, global_batch.epoch)

    def arrange(
        self,
        samples: Sequence[int],
        sizes: SampleSizes | None,  # without them all samples count the same
        # module -> maximum tokens per microbatch; computed for these samples when left out
        token_limits: Mapping[str, int] | None = None,
        epoch: int = 0,
    ) -> PlannedStep:
        """Arranges dataset indices, which are in the sampler's order, without a program."""
        workloads = (
            Workloads.alike(self.plan.modules, len(samples)) if sizes is None else self.workloads(sizes, token_limits)
        )
        return PlannedStep(self.assign_samples(samples, workloads, epoch), sizes, workloads)

    def workloads(self, sizes: SampleSizes, token_limits: Mapping[str, int] | None = None) -> Workloads:
        """The workloads that samples are arranged by, see [`~StepPlanner.arrange`]."""
        memory_bytes = self.memory_bytes if token_limits is None else None
        workloads = batch_workloads(self.costs, self.plan, sizes, self.max_tokens, memory_bytes)
        return workloads if token_limits is None else replace(workloads, token_limits=token_limits)

    def assign_samples(self, samples: Sequence[int], workloads: Workloads, epoch: int = 0) -> StepPlan:
        """The arrangement of samples by their workloads."""
        return arrange_step(self.plan, samples, workloads, self.microbatch_size, self.arrangement, epoch)

    @cached_property
    def representatives(self) -> Representatives:
        """The layout on representatives."""
        return find_representatives(self.plan, self.sync_groups)

    @cached_property
    def stage_costs(self) -> Mapping[StageKey, StageCost]:
        """The costs of the stages, which do not depend on the step."""
        return stage_costs(self.costs, self.plan)

    @cached_property
    def sum_costs(self) -> GradientSumCosts:
        """The costs of the gradient sums of [`~StepPlanner.representatives`]."""
        return GradientSumCosts(self.costs, self.plan, self.representatives.first_represented)

    @cached_property
    def update_ms(self) -> float:
        """Time of clipping and the optimizer step."""
        return optimizer_ms(self.costs, self.plan, self.sync_groups)

    def program(self, step: StepPlan, sizes: SampleSizes | None, rank: int | None = None) -> Program:
        """Plans the program of a step for all ranks, or for those in the part of `rank`."""
        cost = fitting = None
        parts = list(self.representatives.parts(step, rank))
        plan, own_step = (self.plan, step) if rank is None or not parts else (parts[0].whole_plan, parts[0].step)
        if sizes is not None:
            cost = StepCost(self.costs, plan, own_step, sizes, self.sync_groups, self.stage_costs)
            fitting = self._fitting(plan, own_step, sizes)
        program = program_of_parts(parts, cost, self.training, fitting)
        return self.representatives.expand(program)

    def timeline(self, step: StepPlan, known: SampleSizes | None, sizes: SampleSizes | None = None) -> Timeline:
        """
        The tasks of a step over time. `known` are the sizes by which it was planned, `sizes` those that it has, if
        they differ. Without `known` its order is that of tasks which count the same; without both a forward takes
        1 ms, a backward 2 ms.
        """
        sizes = known if sizes is None else sizes
        if sizes is None:
            return simulate(self.representatives, step, training=self.training)
        cost = StepCost(self.costs, self.plan, step, sizes, self.sum_costs, self.stage_costs)
        order_cost: Cost = cost
        if known is None:
            order_cost = default_cost
        elif known is not sizes:
            order_cost = StepCost(self.costs, self.plan, step, known, (), self.stage_costs)
        fitting = None if known is None else self._fitting(self.plan, step, known)
        return simulate(
            self.representatives,
            step,
            cost,
            cost.messages_ms,
            cost.sync_ms,
            order_cost=order_cost,
            training=self.training,
            fitting_in_flight=fitting,
        )

    def _fitting(self, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes) -> Mapping[StageKey, float] | None:
        """The microbatches of each stage that fit into memory, where the schedule fills it."""
        if not plan.policy.fills_memory or not self.training:
            return None
        return fitting_in_flight(self.costs, plan, step, sizes, self.memory_bytes)

    def most_memory(self, planned: PlannedStep) -> dict[int, RankMemory]:
        """The memory of each rank if all stages of a step have as many microbatches in flight as they may."""
        plan, step, sizes = self.plan, planned.step, planned.sizes
        assert sizes is not None
        limits, flow = in_flight_limits(plan, step, self._fitting(plan, step, sizes)), GradientFlow(plan)
        in_flight = {
            (name, replica, index): min(limits.get((name, replica, index), np.inf), len(microbatches))
            if flow.has_backward(name, replica, index)
            else 1.0
            for name, module in plan.modules.items()
            for replica, microbatches in enumerate(step.microbatches[name])
            for index in range(len(module.replicas[replica]))
        }
        return memory_per_rank(self.costs, plan, step, sizes, in_flight)

    def predict(self, planned: PlannedStep, sizes: SampleSizes | None = None) -> Prediction:
        """Predicts the time and memory of a step; `sizes` is for one that was planned without them."""
        timeline = self.timeline(planned.step, planned.sizes, sizes)
        sizes = planned.sizes if sizes is None else sizes
        assert sizes is not None
        memory = memory_per_rank(
            self.costs, self.plan, planned.step, sizes, timeline.peak_in_flight, timeline.peak_held
        )
        update_ms = self.update_ms if self.training else 0.0
        routes_ms = 0.0
        if self.training and self.costs.spec.language_model.balances_experts and not timeline.has_forwards_first:
            forwards = replace(self, training=False).sharing(self, "representatives")
            routes_ms = forwards.timeline(planned.step, planned.sizes, sizes).iteration_ms
        utilisation = self.utilisation(sizes, routes_ms + timeline.iteration_ms + update_ms)
        return Prediction(self.plan, planned, sizes, timeline, memory, utilisation, update_ms, routes_ms)

    def predict_batch(self, sizes: SampleSizes) -> Prediction:
        """Arranges and predicts a batch."""
        return self.predict(self.arrange(range(sizes.num_samples), sizes))

    def utilisation(self, sizes: SampleSizes, step_ms: float) -> float:
        """Model FLOPs of the samples over the peak FLOPs of all ranks in the same time (MFU)."""
        peak_flops = 1e9 * self.costs.device.peak_tflops * self.plan.world_size * step_ms
        return model_flops(self.costs.spec.with_mean_experts, sizes) / peak_flops


@dataclass(frozen=True)
class Prediction(HtmlRepr):
    """Predicted time and memory of a step."""

    plan: ParallelPlan
    planned: PlannedStep
    sizes: SampleSizes
    timeline: Timeline
    memory: dict[int, RankMemory]  # of each rank
    flops_utilisation: float  # model FLOPs per second over the peak of all ranks (MFU)
    optimizer_ms: float = 0.0  # of clipping and the optimizer step, after the timeline
    # of the forwards that run before the timeline as well, for a loss over where routers send the whole batch
    routes_ms: float = 0.0

    @property
    def step_ms(self) -> float:
        return self.routes_ms + self.timeline.iteration_ms + self.optimizer_ms

    @property
    def peak_memory_bytes(self) -> float:
        """Peak memory of the fullest rank."""
        return max(memory.total for memory in self.memory.values())

    @staticmethod
    def typical(predictions: Sequence[Prediction]) -> Prediction:
        """Returns the prediction whose step time is closest to the mean."""
        mean_ms = sum(prediction.step_ms for prediction in predictions) / len(predictions)
        return min(predictions, key=lambda prediction: abs(prediction.step_ms - mean_ms))

    def tokens_per_second(self, module: str) -> float:
        """Tokens of a module per second of the step."""
        return 1e3 * float(self.sizes.tokens[module].sum()) / self.step_ms


def most_memory(predictions: Sequence[Prediction]) -> dict[int, RankMemory]:
    """Rank -> its memory, the maximum over predictions."""
    return {
        rank: max((prediction.memory[rank] for prediction in predictions), key=lambda memory: memory.total)
        for rank in predictions[0].memory
    }


# Plans the batches of ranks that each hold the whole model, as under DDP, FSDP and DeepSpeed.


@dataclass(frozen=True)
class RankPlanner:
    """Arranges global batches for data-parallel ranks, with the same result on every rank."""

    costs: CostModel
    num_ranks: int
    microbatch_size: int  # mean samples
    arrangement: str | Arrangement  # a name in `RANK_ARRANGEMENTS`, or a function
    sizes: SizeFunction | None = None  # dataset indices -> their sizes, where global batches have none
    together: Sequence[str] = ()  # encoders that all ranks have to run in the same turn

    def __call__(self, global_batch: SampleBatch) -> Sequence[Sequence[BatchIndices]]:
        """
        Returns rank -> microbatch -> its batch indices.

        Raises `ValueError` on every rank if some ranks would run an encoder of `together` without the others.
        """
        sizes = global_batch.sizes
        if sizes is None and self.sizes is not None:
            sizes = self.sizes(global_batch.samples)
        if sizes is None:
            workloads, has_input = Workloads.alike(self.costs.spec.modules, len(global_batch.samples)), {}
        else:
            workloads, has_input = batch_workloads(self.costs, self._plan, sizes), inputs_of(self.costs.spec, sizes)
        workloads = whole_model_workloads(workloads)
        ranks = arrange_for_ranks(workloads, has_input, self.num_ranks, self.microbatch_size, self.arrangement)
        unlike = unlike_turn(ranks, {name: has for name, has in has_input.items() if name in self.together})
        if unlike is not None:
            raise ValueError(self._refusal(*unlike, has_input[unlike[1]], len(ranks[0])))
        return ranks

    @cached_property
    def _plan(self) -> ParallelPlan:
        """Every module whole on a rank."""
        return resolve_plan(self.costs.spec, {})

    def _refusal(self, turn: int, encoder: str, has: NDArray, count: int) -> str:
        """The error for a turn in which not all ranks would run an encoder."""
        remedy = (
            f"Use `microbatch_assignment='hierarchical'`, which gives the {self.num_ranks} ranks equal turns"
            if self.arrangement == "contiguous" and has.sum() >= self.num_ranks
            else "Use a larger `per_device_train_batch_size`, or a data collator that adds an empty input"
        )
        return (
            f"{int(has.sum())} of the {len(has)} samples of a global batch have inputs for `{encoder}`, and in turn "
            f"{turn + 1} of {count} only some ranks would run it, but sharded weights and gradients need all ranks "
            f"together. {remedy}."
        )


def inputs_of(spec: ModelSpec, sizes: SampleSizes) -> Mapping[str, NDArray]:
    """Encoder -> bool `[samples]`: whether a sample has an input for it."""
    return {name: np.asarray(sizes.tokens[name]) > 0 for name in spec.encoders}
