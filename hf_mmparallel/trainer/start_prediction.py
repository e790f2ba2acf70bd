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
from ..plan import LANGUAGE_MODEL, ModelSpec, SampleSizes
from ..plan.arrangement_policies import KEEPING_LIMITS
from ..runtime.engine import ParallelEngine
from ..schedule import Simulation
from ..steps.arrangement_choice import ArrangementChoice, choose_arrangement
from ..steps.communication import with_communication
from ..steps.representatives import iteration_ms, on_all_ranks, predict_arranged, simulate_arranged
from ..steps.step_planner import PlannedStep, StepPlanner
from .loaders import base_planner, training_planner
from .oversized_samples import LargeSamples
from .run_context import RunContext
from .training_sizes import TrainingSizes, representative_batch

_SAMPLES = 8


@dataclass(frozen=True)
class StepReport:
    """
    Prediction for one step with a full global batch.

    Args:
        planned ([`PlannedStep`]): The step.
        simulation ([`Simulation`]): Its tasks over time.
        memory (`Mapping[int, RankMemory]`, *optional*): Rank -> memory; `None` where sizes of samples are unknown.
        balances (`tuple[Balance, Balance]`, *optional*):
            Balance in the sampler's order and as arranged, where sizes are known.
        before_ms (`float`, *optional*): Duration of the step in the sampler's order, optimizer included.
        choice ([`ArrangementChoice`], *optional*): Arrangement and reason, where the arguments name none.
        large ([`LargeSamples`], *optional*): Samples above the limits of microbatches, where there are limits.
        optimizer_ms (`float`, *optional*, defaults to 0.0): Duration of the optimizer's step.
    """

    planned: PlannedStep
    simulation: Simulation
    memory: Mapping[int, RankMemory] | None
    balances: tuple[Balance, Balance] | None = None
    before_ms: float | None = None
    choice: ArrangementChoice | None = None
    large: LargeSamples | None = None
    optimizer_ms: float = 0.0

    @property
    def step_ms(self) -> float:
        """With the optimizer's step, as arrangements and plans are compared."""
        return self.simulation.iteration_ms + self.optimizer_ms


def sample_tokens(
    dataset: Any, collator: Callable, spec: ModelSpec, indices: Sequence[int] | None = None
) -> dict[str, int] | None:
    """
    Module -> mean tokens of the first samples, or of those at `indices`: length of the sequence, features of an
    encoder. `None` without a dataset.
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
    """
    See [`sample_tokens`]; `None` for a stream, and where samples may be skipped and the first can't be read.

    Args:
        context ([`RunContext`]): The run.
        dataset: The training dataset, or the window of a stream, of which the samples in the window are read.
    """
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


def predict(engine: ParallelEngine, sizes: TrainingSizes, global_batch_size: int) -> tuple[StepPlanner, StepReport]:
    """
    Simulates a step with a full global batch, as the planner of training steps arranges it.

    Args:
        engine ([`ParallelEngine`]): This rank's part of the model.
        sizes ([`TrainingSizes`]): Sizes of the training samples.
        global_batch_size (`int`): Samples of a global batch.
    """
    context, args = sizes.context, sizes.context.args
    dataset = context.train_dataset
    if is_stream(dataset):
        dataset = StreamWindow(dataset, args.seed)
    source = start = None
    if dataset is not None:
        source, start = sizes.of_rank(dataset), sizes.at_start(dataset, global_batch_size)
    planner = training_planner(base_planner(engine, args.per_device_train_batch_size), args, source)
    if start is not None:
        planner = planner.with_token_limits(start.sizes.like_the_mean(global_batch_size))
    global_batch = representative_batch(dataset, planner.sizes, global_batch_size, args)
    if not global_batch.samples:
        planner, global_batch = replace(planner, sizes=None), GlobalBatch(tuple(range(global_batch_size)))
    choice, known = None, None if planner.sizes is None else planner.sizes(global_batch.samples)
    if args.microbatch_assignment is None and known is not None and known.known:
        choice = choose_arrangement(planner, [known])
        planner = planner.with_arrangement(choice.arrangement)
    planned = planner.arrange_batch(global_batch)
    if known is None or not known.known:
        tokens = mean_tokens(context, context.train_dataset)
        if tokens is None:
            return planner, StepReport(planned, simulate_arranged(planner, planned), None)
        return planner, _costed(planner, planned, SampleSizes.uniform(tokens, len(global_batch.samples)))
    before = planner.with_arrangement("contiguous").arrange_batch(global_batch)
    balances = step_balance(before.step, planned.workloads), step_balance(planned.step, planned.workloads)
    before_ms = iteration_ms(planner, before)
    large = None
    if start is not None and planner.token_limits and planner.arrangement in KEEPING_LIMITS:
        large = LargeSamples.of(start, planner.token_limits)
    report = _costed(planner, planned)
    before_ms += report.optimizer_ms
    return planner, replace(report, balances=balances, before_ms=before_ms, choice=choice, large=large)


def _costed(planner: StepPlanner, planned: PlannedStep, sizes: SampleSizes | None = None) -> StepReport:
    """The prediction for a step, by the sizes of its samples or by `sizes`."""
    prediction = on_all_ranks(predict_arranged(planner, planned, sizes))
    drawn = with_communication(prediction, planner.costs, planner.sync_groups)
    return StepReport(planned, drawn, prediction.memory, optimizer_ms=prediction.optimizer_ms)
