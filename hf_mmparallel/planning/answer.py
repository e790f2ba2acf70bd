"""From settings, a model and samples to a plan with its prediction: with given sizes, or by a search."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from .._html_repr import HtmlRepr
from ..arrange import plan_for_batch
from ..cost import CostModel, RankMemory, fitting_tokens
from ..cost.arrangement_choice import choose_arrangement
from ..cost.calibration import costs_from, read_costs
from ..cost.communication import with_communication
from ..cost.layers import OURS, OURS_FUSED
from ..cost.ledger import Ledger, ledger_of
from ..cost.stage_memory import gib_text
from ..cost.step_planner import Prediction, StepPlanner, most_memory
from ..plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ParallelPlan,
    PlannedFor,
    SampleSizes,
    SyncGroup,
    plan_for_model,
    sync_groups,
    typical_batches,
)
from ..plan.checkpointing import Checkpointing
from ..plan.methods import arrangement_name
from ..plan.ownership import with_split_backwards
from ..schedule import Timeline
from .explain import bound_of
from .gantt import rank_ranges
from .inputs import ModelSource, Samples, read_samples
from .problem import PlanningProblem, SearchResult
from .settings import Settings, check_searchable, has_all_sizes

SAMPLES_PER_GPU = 4  # default global batch of a search


@dataclass(frozen=True)
class Inputs:
    """The model and the samples to plan for."""

    source: ModelSource
    samples: Samples
    profile: str | None = None  # file of measured costs
    seed: int = 0  # of the drawn batches
    effort: int | None = None  # budget of a search, see [`PlanningProblem`]
    num_samples: int = PlannedFor.num_samples  # maximum number of measured samples

    @classmethod
    def of(cls, args: argparse.Namespace, source: ModelSource) -> Inputs:
        """The model with the samples of the arguments of a command."""
        effort = getattr(args, "effort", None)
        return cls(source, read_samples(args, source), args.profile, args.seed, effort, args.num_samples)

    def costs(self, settings: Settings) -> CostModel:
        """Costs of layers, with the frozen parameters of the settings."""
        return replace(self._costs(settings), packing=settings.packs_rows)

    def _costs(self, settings: Settings) -> CostModel:
        """The same costs regardless of packing."""
        spec = settings.frozen_spec(self.source.spec)
        if self.profile is not None and not Path(self.profile).is_file():
            raise ValueError(
                f"`--profile {self.profile}` does not exist. Write one with `hf-mmparallel profile --output`."
            )
        source = None if self.profile is None else read_costs(self.profile)
        engine = OURS_FUSED if settings.fused_kernels else OURS
        return costs_from(spec, settings.device, settings.value_bytes, source, engine)


@dataclass(frozen=True)
class Answer(HtmlRepr):
    """A plan with the prediction of its step."""

    settings: Settings  # of the request
    inputs: Inputs
    costs: CostModel  # of the prediction
    predictions: tuple[Prediction, ...]  # of the simulated global batches, on all ranks
    global_batch_size: int  # samples of a step
    microbatch_size: int  # samples of a microbatch of one language model replica
    arrangement: str  # of samples
    result: SearchResult | None = None  # of the search, if there was one

    @cached_property
    def prediction(self) -> Prediction:
        """The prediction of a typical batch, which is drawn."""
        return Prediction.typical(self.predictions)

    @property
    def plan(self) -> ParallelPlan:
        return self.prediction.plan

    @cached_property
    def bound(self) -> str:
        """A sentence on what bounds the step."""
        return bound_of(self.predictions, self.settings.memory_bytes)

    @property
    def planned_for(self) -> PlannedFor:
        """What the plan was made for, to be stored beside it."""
        inputs = self.inputs
        return self.settings.planned_for(self.global_batch_size, self.microbatch_size, inputs.num_samples, inputs.seed)

    @property
    def sync_groups(self) -> list[SyncGroup]:
        """The gradient all-reduces."""
        return sync_groups(self.costs.spec, self.plan)

    @cached_property
    def ledger(self) -> Ledger:
        """What keeps the step from the peak of the devices."""
        return ledger_of(self.predictions, self.costs, self.sync_groups)

    @cached_property
    def drawn(self) -> Timeline:
        """The simulated step for pictures, with its communication."""
        return with_communication(self.prediction, self.costs, self.sync_groups)

    @property
    def step_ms(self) -> float:
        """Step time, averaged over the batches."""
        return sum(prediction.step_ms for prediction in self.predictions) / len(self.predictions)

    @property
    def samples_per_second(self) -> float:
        return 1e3 * self.global_batch_size / self.step_ms

    @property
    def tokens_per_second(self) -> float:
        """Language model tokens per second."""
        tokens = sum(float(prediction.sizes.tokens[LANGUAGE_MODEL].sum()) for prediction in self.predictions)
        return 1e3 * tokens / sum(prediction.step_ms for prediction in self.predictions)

    @property
    def flops_utilisation(self) -> float:
        """Model FLOPs per second over the peak of all ranks (MFU)."""
        flops = sum(prediction.flops_utilisation * prediction.step_ms for prediction in self.predictions)
        return flops / sum(prediction.step_ms for prediction in self.predictions)

    @property
    def memory(self) -> dict[int, RankMemory]:
        """Rank -> its memory, the maximum over the batches."""
        return most_memory(self.predictions)

    @property
    def peak_bytes(self) -> float:
        """Peak memory of the fullest rank."""
        return max(memory.total for memory in self.memory.values())


def solve(settings: Settings, inputs: Inputs, advance: Callable[[float], None] = lambda share: None) -> Answer:
    """
    Predicts the plan if all sizes are given, or searches for one, of which `advance` gets the shares that are done;
    raises `ValueError`, with a remedy, for settings that contradict each other or do not fit.
    """
    costs = inputs.costs(settings)
    draft = _draft(settings, costs)
    if draft is None:
        return _searched(settings, inputs, costs, advance)
    if settings.gpus is not None and settings.gpus != draft.world_size:
        layouts = "; ".join(f"{name}: {module.layout}" for name, module in draft.modules.items())
        raise ValueError(
            f"`--gpus {settings.gpus}`: the plan has {draft.world_size} ranks ({layouts}). Change the sizes, leave "
            f"some of them out to search for them, or use `--gpus {draft.world_size}`."
        )
    return predict_plan(settings, inputs, costs, draft)


def _draft(settings: Settings, costs: CostModel) -> ParallelPlan | None:
    """The plan of the given sizes, if they leave nothing to search for."""
    if not settings.sizes and settings.gpus is not None and settings.plugin.plan is None:
        return None
    try:
        draft = plan_for_model(settings.plugin, costs.spec, None)
    except ValueError:
        if has_all_sizes(settings, costs.spec, 0):
            raise
        return None
    return draft if has_all_sizes(settings, costs.spec, draft.world_size) else None


def _searched(settings: Settings, inputs: Inputs, costs: CostModel, advance: Callable[[float], None]) -> Answer:
    from .search import search_plans

    assert settings.gpus is not None
    check_searchable(settings)
    from .possible_sizes import possible_sizes

    fixed = possible_sizes(inputs.source.model, costs.spec, settings.plugin)
    batch = settings.global_batch_size or SAMPLES_PER_GPU * settings.gpus
    problem = PlanningProblem(
        costs,
        inputs.samples.sizes(inputs.source, settings),
        settings.gpus,
        batch,
        memory_bytes=settings.memory_bytes,
        microbatch_size=settings.microbatch_size,
        schedule=settings.schedule or settings.plugin.named_schedule,
        arrangement=settings.microbatch_assignment,
        fixed=fixed,
        checkpointing={**_recomputed(settings, costs.spec), **settings.checkpointing},
        seed=inputs.seed,
    )
    if inputs.effort is not None:
        problem = replace(problem, effort=inputs.effort)
    result = search_plans(problem, advance)
    best = result.best
    size, arrangement = best.microbatch_size, arrangement_name(best.candidate.arrangement)
    return Answer(settings, inputs, costs, best.predictions, batch, size, arrangement, result)


def predict_plan(settings: Settings, inputs: Inputs, costs: CostModel, plan: ParallelPlan) -> Answer:
    """Predicts the step of a plan, as a search does: the mean of several global batches."""
    size = settings.microbatch_size or 1
    batch = settings.global_batch_size or batch_to_fill(plan, size, settings.plugin.num_microbatches)
    plan = plan_with(settings, costs.spec, plan_for_batch(plan, batch, size))
    pool = inputs.samples.sizes(inputs.source, settings)
    batches = typical_batches(pool, batch, inputs.seed)[: 1 if inputs.samples.are_alike else None]
    limit = _memory_for(settings, costs, plan, batches)
    planner = StepPlanner(costs, plan, sync_groups(costs.spec, plan), size, memory_bytes=limit)
    arrangement = settings.microbatch_assignment or plan.microbatch_assignment
    if arrangement is None:
        alike = inputs.samples.are_alike
        arrangement = "contiguous" if alike else choose_arrangement(planner, batches).arrangement
    planner = replace(planner, plan=replace(plan, microbatch_assignment=arrangement), arrangement=arrangement)
    checked = planner.arrange(range(batch), batches[0])
    planner.program(checked.step, checked.sizes)  # raises for a program that deadlocks
    predictions = tuple(map(planner.predict_batch, batches))
    return Answer(settings, inputs, costs, predictions, batch, size, arrangement)


def _recomputed(settings: Settings, spec: ModelSpec) -> dict[str, Checkpointing]:
    """Module -> what its layers recompute, if that is given for all of them."""
    return {} if settings.recomputed is None else dict.fromkeys(spec.modules, settings.recomputed)


def plan_with(settings: Settings, spec: ModelSpec, plan: ParallelPlan) -> ParallelPlan:
    """The plan with the schedule and the recomputation of the settings, if these are given."""
    recomputed = _recomputed(settings, spec)
    modules = {
        name: replace(module, activation_checkpointing=recomputed.get(name, module.activation_checkpointing))
        for name, module in plan.modules.items()
    }
    plan = replace(plan, modules=modules)
    if settings.schedule in (None, plan.schedule):
        return plan
    return with_split_backwards(replace(plan, schedule=settings.schedule), spec.modules, spec.tied)


def batch_to_fill(plan: ParallelPlan, microbatch_size: int, wanted: int | None = None) -> int:
    """
    Returns the samples of a batch with the wanted number of microbatches for each replica, or with enough to fill the
    pipelines twice; a plan that has a number for each replica keeps it.
    """
    if plan.replica_microbatches is not None:
        return microbatch_size * plan.total_microbatches
    module = plan.modules[LANGUAGE_MODEL]
    depth = max(len(stages) for stages in module.replicas) + (len(plan.modules) > 1)
    return microbatch_size * module.dp_size * (wanted or 2 * depth)


def _memory_for(
    settings: Settings, costs: CostModel, plan: ParallelPlan, batches: Sequence[SampleSizes]
) -> float | None:
    """Memory limit of microbatches; `None` if even the smallest do not fit, which is reported instead."""
    if settings.memory_bytes is not None:
        with suppress(ValueError):
            for sizes in batches:
                fitting_tokens(costs, plan, sizes, settings.memory_bytes)
            return settings.memory_bytes
    return None


def check_memory(answer: Answer) -> None:
    """Raises `ValueError` for the fullest rank if a rank needs more memory than the limit."""
    limit = answer.settings.memory_bytes
    memory = answer.memory
    if limit is None or answer.peak_bytes <= limit:
        return
    over = [rank for rank, need in memory.items() if need.total > limit]
    fullest = max(over, key=lambda rank: memory[rank].total)
    needed = memory[fullest].total
    names = sorted({name for name, _, _ in answer.plan.stages_of_rank(fullest)})
    raise ValueError(
        f"Rank {fullest} ({', '.join(names)}) needs about {gib_text(needed)} GiB, {gib_text(needed - limit)} more "
        f"than the {answer.settings.memory_text}; in total {len(over)} ranks need more: {rank_ranges(over)}. "
        f"Raise `pp` or `tp` of `{names[0]}`, lower `--microbatch-size`, or set `checkpointing=true`."
    )
