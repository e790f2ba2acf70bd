"""The report of a run on its plan, before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accelerate.logging import get_logger
from rich.console import Console

from ..arrange import num_microbatches
from ..callbacks.base import not_worth_a_run
from ..data.randomness import seeded
from ..data.streams import is_stream
from ..drawing.timeline import gantt_png
from ..drawing.workload_chart import BEFORE, balance_png, number_text
from ..plan import LANGUAGE_MODEL, PlannedFor, SampleSizes, StepPlan
from ..plan.methods import ARRANGEMENT_CANDIDATES, arrangement_name
from ..planner.surviving_plans import fewer_nodes_table, guarantee_lines, template_table
from ..planner.tables import plan_table, range_text
from ..planner.text import print_labelled
from ..profiling.device_detection import core_per_rank
from ..resilience.pipelines import ClusterPlan
from ..resilience.resilient_planner import ResilientPlanner
from ..runtime.engine import ParallelEngine
from ..steps.step_planner import StepPlanner
from .arguments import AUTO, MultimodalTrainingArguments
from .model_card import SCHEDULE, WORKLOADS
from .packing_choice import RowChoice
from .run_context import RunContext
from .start_prediction import StepReport, predict
from .training_sizes import TrainingSizes

logger = get_logger(__name__)

_WIDTH = 120  # of the table in a file or a pipe
_MOST_TEMPLATES, _MOST_COUNTS = 4, 8  # rows of tables; `hf-mmparallel plan --failures` prints all


def size_origin(context: RunContext) -> str:
    """The source of the sizes of samples, in words."""
    columns = context.args.token_columns
    if columns is not None:
        names = [columns] if isinstance(columns, str) else list(columns.values())
        return f"the column{'s' if len(names) > 1 else ''} " + ", ".join(f"`{name}`" for name in names)
    if context.sample_tokens is not None:
        return "`sample_tokens`"
    dataset = context.train_dataset
    counts = hasattr(dataset, "token_counts") and not is_stream(dataset)
    return "the dataset's `token_counts`" if counts else "the dataset's metadata"


def arrangement_lines(arrangement: str, origin: str, prediction: StepReport) -> list[str]:
    """The arrangement of samples into microbatches, and how even these are."""
    if prediction.balances is None and arrangement == "contiguous":
        return ["Samples are in the sampler's order, `contiguous`. Their sizes are unknown."]
    if prediction.balances is None:
        return [
            f"Sizes of samples are unknown, all count the same, and `{arrangement}` arranges them by their number. "
            "Give `token_columns`, or `sample_tokens` to the Trainer."
        ]
    old, new = ({name: number_text(b.std_ms(name)) for name in b.forward_ms} for b in prediction.balances)
    step_ms, before_ms = number_text(prediction.step_ms), number_text(prediction.before_ms or 0.0)
    deviation = "standard deviation of a microbatch's forward"
    reason = "" if prediction.choice is None else f": {prediction.choice}"
    if arrangement == "contiguous":
        spread = ", ".join(f"{name} {std} ms" for name, std in new.items())
        return [
            f"Samples are in the sampler's order, `contiguous`{reason}.",
            f"Predicted by sizes from {origin}: a step {step_ms} ms, the optimizer's with it; {deviation} {spread}.",
        ]
    spread = ", ".join(f"{name} {old[name]} -> {std} ms" for name, std in new.items())
    return [
        f"Samples are arranged by `{arrangement}`, with sizes from {origin}{reason}.",
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
    searched: SampleSizes | None = None  # sizes of the samples that the plan was searched for with
    planned_for: PlannedFor | None = None  # what the plan of a file was made for

    def show(self) -> StepReport:
        """
        Prints the plan with the predicted bubble and balance, draws the step into the output folder, and returns it.
        """
        engine, args = self.engine, self.sizes.context.args
        request = PlannedFor(seed=args.seed) if self.planned_for is None else self.planned_for
        with seeded(args.seed):  # only this rank reads samples here
            planner, prediction = predict(engine, self.sizes, self.global_batch_size, request, self.searched)
        console = stderr_console()
        console.print(plan_table(engine.plan, engine.spec, prediction.simulation, prediction.memory))
        for line in self.lines(planner, prediction):
            console.print(line, highlight=False)
        warn_of_few_microbatches(planner, prediction.planned.step)
        if prediction.large is not None and prediction.large.num_over:
            logger.warning(prediction.large.warning)
        with not_worth_a_run("The picture of the predicted step"):
            draw_prediction(Path(str(args.output_dir)), arrangement_name(planner.arrangement), prediction)
        return prediction

    def lines(self, planner: StepPlanner, prediction: StepReport) -> list[str]:
        """The lines below the table of a plan."""
        context, plan, device = self.sizes.context, self.engine.plan, self.engine.device
        args = context.args
        step, cp_size = prediction.planned.step, plan.modules[LANGUAGE_MODEL].cp_size
        counts = [len(microbatches) for microbatches in step.microbatches[LANGUAGE_MODEL]]
        if planner.arrangement == "contiguous":
            per_microbatch = f"up to {args.per_device_train_batch_size}"
        else:
            per_microbatch = f"on average {len(step.samples) / sum(counts):.3g}"
        lines = [
            f"Global batch of {self.global_batch_size} samples: {range_text(counts)} microbatches of {per_microbatch} "
            f"samples on each language-model replica, schedule {plan.schedule}."
        ]
        if cp_size == 1:
            lines.append(str(self.rows))
        lines += arrangement_lines(arrangement_name(planner.arrangement), size_origin(context), prediction)
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
        measured = "" if core_per_rank(context.world) else " It is not measured here: the ranks share cores."
        bubble, unlike = prediction.simulation.bubble_fraction, prediction.simulation.unlike_fraction
        within = f", of it {unlike:.1%} within tasks, for the largest of unlike replicas" if unlike else ""
        lines.append(f"Predicted bubble: {bubble:.1%}{within}.{measured}")
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
    gantt_png(prediction.simulation, folder / SCHEDULE, title="Predicted schedule of one step")
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
