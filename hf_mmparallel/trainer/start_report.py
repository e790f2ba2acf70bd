"""The report of a run on its plan, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from rich.console import Console

from ..arrange import num_microbatches
from ..arrange.balance import Balance, step_balance
from ..cost import RankMemory, predicts_times
from ..cost.arrangement_choice import ArrangementChoice, choose_arrangement
from ..cost.communication import with_communication
from ..cost.step_planner import PlannedStep, Prediction, StepPlanner, most_memory
from ..data.bad_samples import BadSample, stored_row
from ..data.global_batches import GlobalBatch
from ..data.packing import RowChoice
from ..data.randomness import seeded
from ..data.streams import StreamWindow, is_stream
from ..modeling import count_feature_tokens
from ..plan import LANGUAGE_MODEL, ModelSpec, PlannedFor, SampleSizes, StepPlan, typical_batches
from ..plan.methods import ARRANGEMENT_CANDIDATES, arrangement_name
from ..planning.device_detection import core_per_rank
from ..planning.gantt import gantt_png
from ..planning.surviving_plans import fewer_nodes_table, guarantee_lines, template_table
from ..planning.text import NARROW, microbatches_text, plan_table, print_labelled
from ..planning.workload_chart import BEFORE, balance_png, number_text
from ..resilience.pipelines import ClusterPlan
from ..resilience.resilient_planner import ResilientPlanner
from ..runtime.engine import ParallelEngine
from ..schedule import Timeline
from .arguments import AUTO, MultimodalTrainingArguments
from .columns import format_sentence
from .engine_callback import not_worth_a_run
from .loaders import base_planner, training_planner
from .model_card import SCHEDULE, WORKLOADS
from .optimizer_groups import settings_lines
from .training_sizes import LargeSamples, RunContext, TrainingSizes, representative_batch

logger = get_logger(__name__)

# The predicted first step of a run, for the report before it.

_SAMPLES = 8


@dataclass(frozen=True)
class StepReport:
    """Prediction for steps with full global batches: the typical one, and the mean time."""

    planned: PlannedStep  # the typical step
    timeline: Timeline  # its tasks over time
    memory: Mapping[int, RankMemory] | None  # rank -> the maximum over steps; `None` if sizes are unknown
    step_ms: float  # mean duration of the steps, optimizer included
    # of the typical step in the sampler's order and as arranged, where sizes are known
    balances: tuple[Balance, Balance] | None = None
    before_ms: float | None = None  # mean duration in the sampler's order
    choice: ArrangementChoice | None = None  # and its reason, where the arguments name none
    large: LargeSamples | None = None  # samples above the limits of microbatches, where there are limits

    @classmethod
    def of(cls, planner: StepPlanner, predictions: Sequence[Prediction]) -> StepReport:
        typical = Prediction.typical(predictions)
        drawn = with_communication(typical, planner.costs, planner.sync_groups)
        step_ms = sum(prediction.step_ms for prediction in predictions) / len(predictions)
        return cls(typical.planned, drawn, most_memory(predictions), step_ms)


def sample_tokens(
    dataset: Any, collator: Callable, spec: ModelSpec, indices: Sequence[int] | None = None
) -> dict[str, int] | None:
    """
    Returns module -> mean tokens of the first samples, or of those at `indices`: length of the sequence, features of
    an encoder, rows of a generator; `None` without a dataset.
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
    num_feature_tokens = count_feature_tokens(batch, spec.placeholders)
    tokens = {LANGUAGE_MODEL: max(1, batch["input_ids"].numel() // samples)}  # of a packed row the mean
    for name in (*spec.encoders, *spec.generators):
        count = sum(sum(num_feature_tokens[modality]) for modality in spec.modalities(name))
        tokens[name] = max(1, round(count / samples))
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
    pool = start.draw(request) if searched is None else searched
    batches = typical_batches(pool, global_batch_size, request.seed)
    choice = None
    if args.microbatch_assignment is None:
        choice = choose_arrangement(planner, batches)
        planner = planner.with_arrangement(choice.arrangement)
    predictions = [planner.predict(_arranged(planner, batch)) for batch in batches]
    report = StepReport.of(planner, predictions)
    in_order = planner.with_arrangement("contiguous")
    before = [_arranged(in_order, batch) for batch in batches]
    before_ms = [in_order.predict(step).step_ms for step in before]
    planned = report.planned
    typical = next(step for step in before if step.sizes is planned.sizes)
    balances = step_balance(typical.step, planned.workloads), step_balance(planned.step, planned.workloads)
    large = None
    if planner.token_limits and planner.arrangement in ARRANGEMENT_CANDIDATES:
        large = LargeSamples.of(start, planner.token_limits)
    mean_ms = sum(before_ms) / len(before_ms)
    return planner, replace(report, balances=balances, before_ms=mean_ms, choice=choice, large=large)


def _arranged(planner: StepPlanner, batch: SampleSizes) -> PlannedStep:
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
        timeline = planner.timeline(planned.step, planned.sizes)
        return planner, StepReport(planned, timeline, None, timeline.iteration_ms)
    uniform = SampleSizes.uniform(tokens, len(global_batch.samples))
    return planner, StepReport.of(planner, [planner.predict(planned, uniform)])


_WIDTH = 120  # of the table in a file or a pipe
_MOST_TEMPLATES, _MOST_COUNTS = 4, 8  # rows of tables; `hf-mmparallel plan --failures` prints all


def size_origin(context: RunContext) -> str:
    columns = context.args.token_columns
    if columns is not None:
        names = [columns] if isinstance(columns, str) else list(columns.values())
        return f"the column{'s' if len(names) > 1 else ''} " + ", ".join(f"`{name}`" for name in names)
    if context.sample_tokens is not None:
        return "`sample_tokens`"
    dataset = context.train_dataset
    counts = hasattr(dataset, "token_counts") and not is_stream(dataset)
    return "the dataset's `token_counts`" if counts else "the dataset's metadata"


def arrangement_lines(arrangement: str, origin: str, prediction: StepReport, says_times: bool = True) -> list[str]:
    """The arrangement of samples into microbatches, and where times are predicted, how even these are."""
    if prediction.balances is None and arrangement == "contiguous":
        return ["Samples are in the sampler's order, `contiguous`. Their sizes are unknown."]
    if prediction.balances is None:
        return [
            f"Sizes of samples are unknown, all count the same (`{arrangement}`). Give `token_columns`, or "
            "`sample_tokens` to the Trainer."
        ]
    old, new = ({name: number_text(b.std_ms(name)) for name in b.forward_ms} for b in prediction.balances)
    step_ms, before_ms = number_text(prediction.step_ms), number_text(prediction.before_ms or 0.0)
    deviation = "standard deviation of a microbatch's forward"
    reason = "" if prediction.choice is None else f": {prediction.choice}"
    if arrangement == "contiguous":
        chosen = f"Samples are in the sampler's order, `contiguous`{reason}."
        spread = ", ".join(f"{name} {std} ms" for name, std in new.items())
        predicted = f"Predicted by sizes from {origin}: a step {step_ms} ms, the optimizer's with it; "
        deferred = ""
    else:
        chosen = f"Samples are arranged by `{arrangement}`, with sizes from {origin}{reason}."
        spread = ", ".join(f"{name} {old[name]} -> {std} ms" for name, std in new.items())
        predicted = (
            f"Predicted, in the sampler's order -> arranged: a step {before_ms} -> {step_ms} ms, the optimizer's with "
            "it; "
        )
        deferred = f" {prediction.balances[1].deferred_fraction:.0%} of samples are deferred."
    return [chosen, f"{predicted}{deviation} {spread}.{deferred}"] if says_times else [chosen]


def settings_without_effect(args: MultimodalTrainingArguments, sizes_known: bool, on_gpu: bool = False) -> list[str]:
    """A sentence for each setting of the arrangement that changes nothing under a plan."""
    lines = []
    limits = [name for name in ("max_tokens_per_microbatch", "memory_limit_gib") if getattr(args, name) is not None]
    for name in limits:
        value = getattr(args, name)
        if name == "memory_limit_gib" and value == AUTO and not on_gpu:
            lines.append(
                f"`{name}={value!r}` has no effect on the CPU, where nothing counts what a rank allocates. Give a "
                "number."
            )
        elif not sizes_known:
            lines.append(f"`{name}={value}` has no effect: sizes of samples are unknown.")
        elif isinstance(args.microbatch_assignment, str) and args.microbatch_assignment not in ARRANGEMENT_CANDIDATES:
            lines.append(
                f"`{name}={value}` does not limit microbatches: `microbatch_assignment={args.microbatch_assignment!r}`"
                f" fixes their number of samples. Use {ARRANGEMENT_CANDIDATES[0]!r}."
            )
    return lines


def stderr_console() -> Console:
    """The console of reports: stderr, with a fixed width in a file or a pipe."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=_WIDTH)


@dataclass(frozen=True)
class PlanReport:
    """The report of a run on its plan, on rank 0."""

    engine: ParallelEngine
    sizes: TrainingSizes
    global_batch_size: int
    rows: RowChoice  # whether samples are packed
    planned_for: PlannedFor | None = None  # what the plan of a file was made for
    stock_batch_size: int | None = None  # global batch of the stock Trainer with the same arguments, if it takes them

    def show(self, folder: Path | None = None, searched: SampleSizes | None = None) -> StepReport:
        """Prints the plan with the predicted bubble and balance, and draws the step into a folder if one is given."""
        engine, args = self.engine, self.sizes.context.args
        request = PlannedFor(seed=args.seed) if self.planned_for is None else self.planned_for
        with seeded(args.seed):  # only this rank reads samples here
            planner, prediction = predict(engine, self.sizes, self.global_batch_size, request, searched)
        console = stderr_console()
        narrow = console.width < NARROW
        console.print(plan_table(engine.plan, engine.spec, prediction.timeline, prediction.memory, narrow))
        for line in self.lines(planner, prediction):
            console.print(line, highlight=False)
        warn_of_few_microbatches(planner, prediction.planned.step)
        if prediction.large is not None and prediction.large.num_over:
            logger.warning(prediction.large.warning)
        if folder is not None:
            with not_worth_a_run("The picture of the predicted step"):
                draw_prediction(folder, arrangement_name(planner.arrangement), prediction)
        return prediction

    def lines(self, planner: StepPlanner, prediction: StepReport) -> list[str]:
        context, plan, device = self.sizes.context, self.engine.plan, self.engine.device
        args = context.args
        step, cp_size = prediction.planned.step, plan.modules[LANGUAGE_MODEL].cp_size
        counts = [len(microbatches) for microbatches in step.microbatches[LANGUAGE_MODEL]]
        if planner.arrangement == "contiguous":
            per_microbatch = f"up to {args.per_device_train_batch_size}"
        else:
            per_microbatch = f"on average {len(step.samples) / sum(counts):.3g}"
        asked = self.stock_batch_size
        stock = f" (the stock Trainer: {asked:,})" if asked not in (None, self.global_batch_size) else ""
        lines = [
            f"Global batch: {self.global_batch_size:,} samples{stock}, {microbatches_text(counts)} of "
            f"{per_microbatch} on each language-model replica, {plan.schedule}."
        ]
        if sentence := format_sentence("train_dataset", context.train_dataset, context.collator):
            lines.append(sentence)
        if cp_size == 1:
            lines.append(str(self.rows))
        lines += settings_lines(self.engine.options.module_settings)
        says_times = predicts_times(self.engine.costs)
        name = arrangement_name(planner.arrangement)
        lines += arrangement_lines(name, size_origin(context), prediction, says_times)
        if prediction.large is not None:
            lines.append(str(prediction.large))
        lines += settings_without_effect(args, prediction.balances is not None, device.type == "cuda")
        if args.activation_checkpointing_kwargs and not any(m.activation_checkpointing for m in plan.modules.values()):
            lines.append("`activation_checkpointing_kwargs` has no effect: no module has `activation_checkpointing`.")
        if cp_size > 1:
            lines.append(
                f"{cp_size} ranks share the tokens of each microbatch of `{LANGUAGE_MODEL}`: its samples are packed "
                'into one row, and its attention function is "bitfield".'
            )
        lines += [
            f"{module.cp_size} ranks share the images, frames and clips of each microbatch of `{name}`, "
            + (
                "whole ones, or their tokens where one rank would have much more work than the rest."
                if self.engine.spec.modules[name].shares_tokens
                else f"whole ones: the layers of `{self.engine.spec.modules[name].tower}` are not known to leave all "
                "that is between tokens to an attention function of transformers. For single images use `tp_size`."
            )
            for name, module in plan.modules.items()
            if module.cp_size > 1 and name != LANGUAGE_MODEL
        ]
        note = "" if core_per_rank(context.world) else " It is not measured here: the ranks share cores."
        if not says_times:
            note = " It only compares plans: a CPU's speed is unknown, its times are not predicted."
        bubble, unlike = prediction.timeline.bubble_fraction, prediction.timeline.unlike_fraction
        within = f", of it {unlike:.1%} within tasks, for the largest of unlike replicas" if unlike else ""
        lines.append(f"Predicted bubble: {bubble:.1%}{within}.{note}")
        return lines


def report_survival(
    planner: ResilientPlanner, first: ClusterPlan, global_batch_size: int, memory_bytes: float | None
) -> None:
    """Prints what a run with `resilience` survives, and what it is predicted to be like then."""
    memory = "with any memory" if memory_bytes is None else f"by predicted memory, {memory_bytes / 2**30:.4g} GiB"
    console = stderr_console()
    print_labelled(console, guarantee_lines(planner, global_batch_size, memory))
    console.print(template_table(planner, _MOST_TEMPLATES), highlight=False)
    console.print(fewer_nodes_table(planner, first, global_batch_size, _MOST_COUNTS), highlight=False)


def draw_prediction(folder: Path, arrangement: str, prediction: StepReport) -> None:
    """Draws the predicted step into a folder, and where sizes are known its balance."""
    folder.mkdir(parents=True, exist_ok=True)
    gantt_png(prediction.timeline, folder / SCHEDULE, title="Predicted schedule of one step")
    if prediction.balances is not None:
        before, after = prediction.balances
        panels = {BEFORE: before, f"after, {arrangement}": after}
        balance_png(panels, folder / WORKLOADS, title="Predicted forward of each microbatch of one step")


def warn_of_few_microbatches(planner: StepPlanner, step: StepPlan) -> None:
    """Warns of fewer than half of the microbatches that `per_device_train_batch_size` asks for."""
    replicas = step.microbatches[LANGUAGE_MODEL]
    asked = num_microbatches(len(step.samples), planner.microbatch_size, len(replicas))
    max_count = max(len(microbatches) for microbatches in replicas)
    if 2 * max_count < asked:
        logger.warning(
            f"`microbatch_assignment={arrangement_name(planner.arrangement)!r}` makes {max_count} microbatches or "
            "fewer for each replica of the language model, where "
            f"`per_device_train_batch_size={planner.microbatch_size}` asks for {asked}. It "
            "has at most as many as the encoders' work is times that of the largest sample, few where most samples "
            'are text. Stages then idle, and microbatches take more memory. Use "hierarchical" for such samples.'
        )
