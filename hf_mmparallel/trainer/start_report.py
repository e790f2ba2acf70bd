"""What a run says about its plan before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from rich.console import Console

from ..arrange import num_microbatches
from ..arrange.balance import Balance, step_balance
from ..callbacks.base import not_worth_a_run
from ..callbacks.metrics import core_per_rank
from ..cost import RankMemory
from ..data.draws import Draw
from ..data.loader import seeded
from ..data.streams import StreamWindow, is_stream
from ..drawing.timeline import gantt_png
from ..drawing.workload_chart import BEFORE, balance_png, number_text
from ..modeling import count_feature_tokens
from ..plan import LANGUAGE_MODEL, ModelSpec, SampleSizes, StepPlan
from ..planner.tables import plan_table, range_text
from ..schedule import Simulation
from ..search.split import split_stability, too_small
from ..steps.condensed import iteration_ms, on_all_ranks, predict_arranged, simulate_arranged
from ..steps.method_choice import KEEPING_LIMITS, MethodChoice, choose_method
from ..steps.step_planner import PlannedStep, StepPlanner
from .arguments import AUTO, MultimodalTrainingArguments
from .loaders import training_planner, without_unused_columns
from .model_card import SCHEDULE, WORKLOADS
from .oversized_samples import LargeSamples
from .training_sizes import representative_draw

if TYPE_CHECKING:
    from .trainer import MultimodalParallelTrainer

logger = get_logger(__name__)

_SAMPLES = 8
_PROFILED = 256  # samples whose sizes say how ranks would be split: every dataset of Entrain is stable from there on
_WIDTH = 120  # of the table in a file or a pipe


@dataclass(frozen=True)
class StepReport:
    """
    What is expected of one full step, and what of it is the optimizer's. Where sizes of samples are known, also its
    balance in the sampler's order and as arranged, what it would take in the sampler's order with the optimizer's
    step, and why it is arranged like this where nobody said; where microbatches have limits, which samples are larger.
    """

    planned: PlannedStep
    simulation: Simulation
    memory: Mapping[int, RankMemory] | None
    balances: tuple[Balance, Balance] | None = None
    before_ms: float | None = None
    choice: MethodChoice | None = None
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
    Module -> mean tokens of the first samples, or of those at `indices`: sequence length, rows of an encoder. `None`
    without a dataset.
    """
    if dataset is None:
        return None
    indices = range(min(_SAMPLES, len(dataset))) if indices is None else indices
    samples = len(indices)
    if not samples:
        return None
    batch = collator([dataset[index] for index in indices])
    if "input_ids" not in batch:
        return None
    rows = count_feature_tokens(batch, spec) if spec.placeholders else {}
    tokens = {LANGUAGE_MODEL: max(1, batch["input_ids"].numel() // samples)}  # of a packed row the mean
    for name in spec.encoders:
        modalities = {feature.modality for feature in spec.modules[name].features}
        tokens[name] = max(1, round(sum(sum(rows[m]) for m in modalities) / samples))
    return tokens


def mean_tokens(trainer: MultimodalParallelTrainer, window: StreamWindow | None = None) -> dict[str, int] | None:
    """
    See [`sample_tokens`]; of the samples in a window, `None` for a stream without one, and where samples may be
    skipped and the first can't be read.
    """
    if is_stream(trainer.train_dataset) and window is None:
        return None
    dataset, collator = without_unused_columns(
        trainer, trainer.train_dataset if window is None else window, "Training"
    )
    indices = None if window is None else list(window.rows)[:_SAMPLES]
    try:
        return sample_tokens(dataset, collator, trainer.model_spec, indices)
    except Exception:
        if trainer.args.on_bad_sample == "skip":
            return None
        raise


def predict(trainer: MultimodalParallelTrainer) -> tuple[StepPlanner, StepReport]:
    """Simulates a step with a full global batch, as the planner of training steps arranges it."""
    stream = is_stream(trainer.train_dataset)
    window = StreamWindow(trainer.train_dataset, trainer.args.seed) if stream else None
    dataset = trainer.train_dataset if window is None else window
    source = start = None
    if dataset is not None:
        source, start = trainer.training_sizes.of_rank(dataset), trainer.training_sizes.at_start(dataset)
    batch = trainer.global_batch_size
    planner = training_planner(trainer, source, None if start is None else start.sizes.like_the_mean(batch))
    draw = representative_draw(trainer, planner.sizes, window)
    if not draw.samples:
        planner, draw = replace(planner, sizes=None), Draw(tuple(range(trainer.global_batch_size)))
    choice, sizes = None, None if planner.sizes is None else planner.sizes(draw.samples)
    if trainer.args.microbatch_assignment is None and sizes is not None and sizes.known:
        choice = trainer.method_choice = choose_method(planner, [sizes])
        planner = planner.with_method(choice.method)
    planned = planner.arrange_draw(draw)
    if sizes is None or not sizes.known:
        tokens = mean_tokens(trainer)
        if tokens is None:
            return planner, StepReport(planned, simulate_arranged(planner, planned), None)
        return planner, _costed(planner, planned, SampleSizes.uniform(tokens, len(draw.samples)))
    before = planner.with_method("contiguous").arrange_draw(draw)
    balances = step_balance(before.step, planned.workloads), step_balance(planned.step, planned.workloads)
    before_ms = iteration_ms(planner, before)
    large = None
    if start is not None and planner.limits and planner.method in KEEPING_LIMITS:
        large = LargeSamples.of(start, planner.limits)
    report = _costed(planner, planned)
    before_ms += report.optimizer_ms
    return planner, replace(report, balances=balances, before_ms=before_ms, choice=choice, large=large)


def _costed(planner: StepPlanner, planned: PlannedStep, sizes: SampleSizes | None = None) -> StepReport:
    """A step with costs from sizes of its samples, or others in their place."""
    prediction = on_all_ranks(predict_arranged(planner, planner.condensed, planned, sizes))
    return StepReport(planned, prediction.simulation, prediction.memory, optimizer_ms=prediction.optimizer_ms)


def size_origin(trainer: MultimodalParallelTrainer) -> str:
    """Where the sizes of samples come from, in words."""
    columns = trainer.args.token_columns
    if columns is not None:
        names = [columns] if isinstance(columns, str) else list(columns.values())
        return f"the column{'s' if len(names) > 1 else ''} " + ", ".join(f"`{name}`" for name in names)
    if trainer.sample_tokens is not None:
        return "`sample_tokens`"
    own = hasattr(trainer.train_dataset, "token_counts") and not is_stream(trainer.train_dataset)
    return "the dataset's `token_counts`" if own else "the dataset's metadata"


def arrangement_lines(method: str, origin: str, prediction: StepReport) -> list[str]:
    """How the samples of a global batch come to microbatches, and how even these are."""
    if prediction.balances is None and method == "contiguous":
        return ["Samples are in the sampler's order, `contiguous`. Their sizes are unknown."]
    if prediction.balances is None:
        return [
            f"Sizes of samples are unknown, all count the same, and `{method}` arranges them by their number. Give "
            "`token_columns`, or `sample_tokens` to the Trainer."
        ]
    old, new = ({name: number_text(own.std_ms(name)) for name in own.forward_ms} for own in prediction.balances)
    step_ms, before_ms = number_text(prediction.step_ms), number_text(prediction.before_ms or 0.0)
    deviation = "standard deviation of a microbatch's forward"
    reason = "" if prediction.choice is None else f": {prediction.choice}"
    if method == "contiguous":
        spread = ", ".join(f"{name} {std} ms" for name, std in new.items())
        return [
            f"Samples are in the sampler's order, `contiguous`{reason}.",
            f"Predicted by sizes from {origin}: a step {step_ms} ms, the optimizer's with it; {deviation} {spread}.",
        ]
    spread = ", ".join(f"{name} {old[name]} -> {std} ms" for name, std in new.items())
    return [
        f"Samples are arranged by `{method}`, with sizes from {origin}{reason}.",
        f"Predicted, in the sampler's order -> arranged: a step {before_ms} -> {step_ms} ms, the optimizer's with it; "
        f"{deviation} {spread}. "
        f"{prediction.balances[1].deferred_fraction:.0%} of samples are deferred.",
    ]


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
        elif args.microbatch_assignment is not None and args.microbatch_assignment not in KEEPING_LIMITS:
            lines.append(
                f"`{name}={value}` does not limit microbatches: `microbatch_assignment={args.microbatch_assignment!r}`"
                f" fixes their number of samples. Use {KEEPING_LIMITS[0]!r}."
            )
    return lines


def stderr_console() -> Console:
    """Where a run says what it does: the terminal, or a file or a pipe of a fixed width."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=_WIDTH)


def report_plan(trainer: MultimodalParallelTrainer) -> None:
    """Prints the plan with the predicted bubble and balance, and draws the predicted step into the output folder."""
    engine, args = trainer.engine, trainer.args
    assert engine is not None
    with seeded(args.seed):  # only this rank reads samples here
        planner, prediction = predict(trainer)
    console = stderr_console()
    console.print(plan_table(engine.plan, engine.spec, prediction.simulation, prediction.memory))
    for line in report_lines(trainer, planner, prediction):
        console.print(line, highlight=False)
    warn_of_small_batch(trainer, planner)
    warn_of_few_microbatches(planner, prediction.planned.step)
    if prediction.large is not None and prediction.large.num_over:
        trainer.limit_watch.told = True
        logger.warning(prediction.large.warning)
    with not_worth_a_run("The picture of the predicted step"):
        draw_prediction(Path(args.output_dir), planner.method, prediction)


def draw_prediction(folder: Path, method: str, prediction: StepReport) -> None:
    """Draws the predicted step into a folder, and where sizes are known its balance."""
    folder.mkdir(parents=True, exist_ok=True)
    gantt_png(prediction.simulation, folder / SCHEDULE, title="Predicted schedule of one step")
    if prediction.balances is not None:
        before, after = prediction.balances
        panels = {BEFORE: before, f"after, {method}": after}
        balance_png(panels, folder / WORKLOADS, title="Predicted forward of each microbatch of one step")


def warn_of_small_batch(trainer: MultimodalParallelTrainer, planner: StepPlanner) -> None:
    """Warns of a global batch below the minimum stable one (Entrain, section 4.4.2), where sizes are known."""
    answer = None if trainer.search is None else trainer.search.answer
    if answer is not None:
        sizes = answer.inputs.samples.measured
    elif planner.sizes is None or is_stream(trainer.train_dataset):  # more of a stream is not read for this
        return
    else:
        with seeded(trainer.args.seed):  # only this rank reads samples here
            draw = representative_draw(trainer, planner.sizes, None, max(trainer.global_batch_size, _PROFILED))
            sizes = planner.sizes(draw.samples) if draw.samples else None
    if sizes is None or not sizes.known:
        return
    stability = split_stability(planner.costs, planner.plan, sizes)
    text = too_small(stability, trainer.global_batch_size, "global_batch_size=")
    if text is not None:
        logger.warning(text)


def warn_of_few_microbatches(planner: StepPlanner, step: StepPlan) -> None:
    """
    Warns of an arrangement with fewer than half of the microbatches that `per_device_train_batch_size` asks for, which
    leaves stages idle and takes more memory.
    """
    replicas = step.microbatches[LANGUAGE_MODEL]
    asked = num_microbatches(len(step.samples), planner.microbatch_size, len(replicas))
    most = max(len(microbatches) for microbatches in replicas)
    if 2 * most < asked:
        logger.warning(
            f"`microbatch_assignment={planner.method!r}` makes {most} microbatches or fewer for each replica of the "
            f"language model, where `per_device_train_batch_size={planner.microbatch_size}` asks for {asked}. It has "
            "at most as many as the encoders' work is times that of the largest sample, few where most samples are "
            'text. Stages then idle, and microbatches take more memory. Use "hierarchical" for such samples.'
        )


def report_lines(trainer: MultimodalParallelTrainer, planner: StepPlanner, prediction: StepReport) -> list[str]:
    """What is said below the table of a plan."""
    args, plan = trainer.args, trainer._engine.plan
    step, cp_size = prediction.planned.step, plan.modules[LANGUAGE_MODEL].cp_size
    counts = [len(microbatches) for microbatches in step.microbatches[LANGUAGE_MODEL]]
    if planner.method == "contiguous":
        per_microbatch = f"up to {args.per_device_train_batch_size}"
    else:
        per_microbatch = f"on average {len(step.samples) / sum(counts):.3g}"
    lines = [
        f"Global batch of {trainer.global_batch_size} samples: {range_text(counts)} microbatches of {per_microbatch} "
        f"samples on each language-model replica, schedule {plan.schedule}."
    ]
    if cp_size == 1:
        lines.append(str(trainer.rows))
    lines += arrangement_lines(planner.method, size_origin(trainer), prediction)
    if prediction.large is not None:
        lines.append(str(prediction.large))
    lines += settings_without_effect(
        args, prediction.balances is not None, str(trainer._engine.device).startswith("cuda")
    )
    if args.activation_checkpointing_kwargs and not any(m.activation_checkpointing for m in plan.modules.values()):
        lines.append("`activation_checkpointing_kwargs` has no effect: no module has `activation_checkpointing`.")
    if cp_size > 1:
        lines.append(
            f"{cp_size} ranks share the tokens of each microbatch of `{LANGUAGE_MODEL}`: its samples are packed into "
            'one row, and its attention function is "bitfield".'
        )
    measured = "" if core_per_rank(trainer.world) else " It is not measured here: the ranks share cores."
    lines.append(f"Predicted bubble: {prediction.simulation.bubble_fraction:.1%}.{measured}")
    return lines
