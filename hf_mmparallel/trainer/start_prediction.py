"""The predicted first step of a run, for the report before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..arrange.balance import Balance, step_balance
from ..cost import RankMemory
from ..data.bad_samples import BadSample, stored_row
from ..data.global_batches import GlobalBatch
from ..data.streams import StreamWindow, is_stream
from ..modeling import count_feature_tokens
from ..plan import LANGUAGE_MODEL, ModelSpec, PlannedFor, SampleSizes, typical_batches
from ..plan.methods import ARRANGEMENT_CANDIDATES
from ..runtime.engine import ParallelEngine
from ..schedule import Simulation
from ..steps.arrangement_choice import ArrangementChoice, choose_arrangement
from ..steps.communication import with_communication
from ..steps.representatives import iteration_ms, on_all_ranks, predict_arranged, simulate_arranged
from ..steps.step_planner import PlannedStep, Prediction, StepPlanner, most_memory
from .loaders import base_planner, training_planner
from .oversized_samples import LargeSamples
from .run_context import RunContext
from .training_sizes import TrainingSizes, representative_batch

_SAMPLES = 8


@dataclass(frozen=True)
class StepReport:
    """Prediction for steps with full global batches: the typical one, and the mean time."""

    planned: PlannedStep  # the typical step
    simulation: Simulation  # its tasks over time
    memory: Mapping[int, RankMemory] | None  # rank -> the maximum over steps; `None` if sizes are unknown
    step_ms: float  # mean duration of the steps, optimizer included
    # of the typical step in the sampler's order and as arranged, where sizes are known
    balances: tuple[Balance, Balance] | None = None
    before_ms: float | None = None  # mean duration in the sampler's order
    choice: ArrangementChoice | None = None  # and its reason, where the arguments name none
    large: LargeSamples | None = None  # samples above the limits of microbatches, where there are limits

    @classmethod
    def of(cls, planner: StepPlanner, predictions: Sequence[Prediction]) -> StepReport:
        """The report of steps that are predicted on representatives."""
        typical = Prediction.typical(predictions)
        drawn = with_communication(on_all_ranks(typical), planner.costs, planner.sync_groups)
        step_ms = sum(prediction.step_ms for prediction in predictions) / len(predictions)
        return cls(typical.planned, drawn, most_memory(predictions), step_ms)


def sample_tokens(
    dataset: Any, collator: Callable, spec: ModelSpec, indices: Sequence[int] | None = None
) -> dict[str, int] | None:
    """
    Returns module -> mean tokens of the first samples, or of those at `indices`: length of the sequence, features of
    an encoder; `None` without a dataset.
    """
    if dataset is None:
        return None
    indices = range(min(_SAMPLES, len(dataset))) if indices is None else indices
    samples = len(indices)
    if not samples:
        return None
    batch = collator([_sample(dataset, index) for index in indices])
    if "input_ids" not in batch:
        return None
    num_feature_tokens = count_feature_tokens(batch, spec) if spec.placeholders else {}
    tokens = {LANGUAGE_MODEL: max(1, batch["input_ids"].numel() // samples)}  # of a packed row the mean
    for name in spec.encoders:
        modalities = {feature.modality for feature in spec.modules[name].features}
        tokens[name] = max(1, round(sum(sum(num_feature_tokens[m]) for m in modalities) / samples))
    return tokens


def _sample(dataset: Any, index: int) -> Any:
    """A sample, or the error that names it."""
    try:
        return dataset[index]
    except MemoryError:
        raise
    except Exception as error:
        bad = BadSample.of(index, error, stored_row(dataset, index))
    raise bad.error()


def mean_tokens(context: RunContext, dataset: Any) -> dict[str, int] | None:
    """Returns [`sample_tokens`] of a dataset or the window of a stream, in which samples are read."""
    # `None` for a stream, and where samples may be skipped and the first can't be read
    if is_stream(dataset):
        return None
    lean, collator = context.drop_columns(dataset, "Training")
    indices = list(dataset.rows)[:_SAMPLES] if isinstance(dataset, StreamWindow) else None
    try:
        return sample_tokens(lean, collator, context.spec, indices)
    except Exception:
        if context.args.on_bad_sample == "skip":
            return None
        raise


def predict(
    engine: ParallelEngine,
    sizes: TrainingSizes,
    global_batch_size: int,
    request: PlannedFor,
    searched: SampleSizes | None = None,
) -> tuple[StepPlanner, StepReport]:
    """
    Predicts steps with full global batches, as the planner of training steps arranges them: for those that the plan
    was made for, see [`typical_batches`]. `searched` are sizes of the samples that it was searched for with.
    """
    context, args = sizes.context, sizes.context.args
    dataset = context.train_dataset
    if is_stream(dataset):
        dataset = StreamWindow(dataset, args.seed)
    source = start = None
    if dataset is not None:
        source, start = sizes.of_rank(dataset), sizes.at_start(dataset, global_batch_size)
    planner = training_planner(base_planner(engine, args.per_device_train_batch_size), args, source)
    if start is None:
        return _without_sizes(planner, dataset, context, global_batch_size)
    planner = planner.with_token_limits(start.sizes.like_the_mean(global_batch_size))
    pool = start.drawn(request) if searched is None else searched
    batches = typical_batches(pool, global_batch_size, request.seed)
    choice = None
    if args.microbatch_assignment is None:
        choice = choose_arrangement(planner, batches)
        planner = planner.with_arrangement(choice.arrangement)
    predictions = [predict_arranged(planner, _arranged(planner, batch)) for batch in batches]
    report = StepReport.of(planner, predictions)
    in_order = planner.with_arrangement("contiguous")
    before = [_arranged(in_order, batch) for batch in batches]
    before_ms = [iteration_ms(planner, step) + predictions[0].optimizer_ms for step in before]
    planned = report.planned
    typical = next(step for step in before if step.sizes is planned.sizes)
    balances = step_balance(typical.step, planned.workloads), step_balance(planned.step, planned.workloads)
    large = None
    if planner.token_limits and planner.arrangement in ARRANGEMENT_CANDIDATES:
        large = LargeSamples.of(start, planner.token_limits)
    mean_ms = sum(before_ms) / len(before_ms)
    return planner, replace(report, balances=balances, before_ms=mean_ms, choice=choice, large=large)


def _arranged(planner: StepPlanner, batch: SampleSizes) -> PlannedStep:
    """A global batch as it is arranged in training."""
    return planner.arrange(range(batch.num_samples), batch, planner.token_limits)


def _without_sizes(
    planner: StepPlanner, dataset: Any, context: RunContext, global_batch_size: int
) -> tuple[StepPlanner, StepReport]:
    """The prediction of a step whose samples count the same: by mean tokens of the first, if these can be read."""
    global_batch = representative_batch(dataset, planner.sizes, global_batch_size, context.args)
    if not global_batch.samples:
        planner, global_batch = replace(planner, sizes=None), GlobalBatch(tuple(range(global_batch_size)))
    planned = planner.arrange_batch(global_batch)
    tokens = mean_tokens(context, context.train_dataset)
    if tokens is None:
        simulation = simulate_arranged(planner, planned)
        return planner, StepReport(planned, simulation, None, simulation.iteration_ms)
    uniform = SampleSizes.uniform(tokens, len(global_batch.samples))
    return planner, StepReport.of(planner, [predict_arranged(planner, planned, uniform)])
