"""Printed text of a plan: its table, its prediction, and the plans it was chosen over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from ..cost import CostModel, LayerCosts, RankMemory, predicts_times
from ..cost.calibration import CalibratedLayers
from ..cost.communication import boundaries_of
from ..cost.ledger import TERMS
from ..cost.profile import MeasuredLayers
from ..cost.stage_memory import gib_text
from ..cost.step_planner import Prediction
from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, StepPlan, SyncGroup, stage_parameters
from ..runtime.groups import channels_of_step, collective_groups
from ..schedule import GradientFlow, Timeline
from .answer import Answer
from .explain import slower_text
from .gains import gains_of
from .gantt import gantt_text, rank_ranges
from .problem import ComparedPlan, SearchResult
from .settings import Settings

# The table of a plan: a row per kind of stage, for any number of ranks.

ONLY_LONG = ("stage", "layers", "in flight")
NUMBERS = ("params", "trained", "in flight", "GiB a rank")


@dataclass
class _Row:
    """Stages that look the same: those of all replicas, and neighbors with equal numbers."""

    first: int
    last: int
    layers: tuple[int, int]
    counts: tuple[int, ...]  # parameters and trained ones, or whether there is a backward
    ranks: list[int] = field(default_factory=list)
    in_flight: float = 0.0
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Cells:
    """A table of texts."""

    columns: tuple[str, ...]  # headings
    rows: tuple[tuple[str, ...], ...]  # as many cells as columns
    right: tuple[str, ...] = ()  # headings of numeric columns


def range_text(counts: Sequence[int]) -> str:
    """`8`, or `5 to 11` if numbers differ."""
    lowest, highest = min(counts), max(counts)
    return str(highest) if lowest == highest else f"{lowest} to {highest}"


def plan_table(
    plan: ParallelPlan,
    spec: ModelSpec | None,
    timeline: Timeline,
    memory: Mapping[int, RankMemory] | None,
    is_narrow: bool = False,
    is_short: bool = False,
) -> Table:
    """
    Returns a row for each stage of each module; replicas and equal neighbors are merged. The model gives numbers of
    parameters, the timeline microbatches in flight, and memory is that of the fullest rank. A short table has a row
    for each module.
    """
    cells = plan_cells(plan, spec, timeline, memory, is_short)
    table = Table(title=f"Plan for {plan.world_size:,} ranks", title_justify="left")
    # no lines between columns
    if is_narrow:
        table.box, table.padding, table.show_edge = box.SIMPLE_HEAD, 0, False
    for column in cells.columns:
        table.add_column(
            column.replace(" ", "\n", 1),
            justify="right" if column in cells.right else "left",
            no_wrap=column not in ("layout", "ranks"),
            min_width=11 if column in ("layout", "ranks") else None,
        )
    for number, row in enumerate(cells.rows):
        last = number + 1 == len(cells.rows) or bool(cells.rows[number + 1][0])
        table.add_row(*row, end_section=last)
    return table


def module_layout(plan: ParallelPlan, name: str) -> str:
    """The layout of a module, and the modules before it on the same ranks."""
    ranks = {other: {r for _, _, s in module.stages() for r in s.all_ranks} for other, module in plan.modules.items()}
    before = list(plan.modules)[: list(plan.modules).index(name)]
    shared = [other for other in before if ranks[other] & ranks[name]]
    module = plan.modules[name]
    text = module.layout + (", backward split" if module.splits_backward else "")
    return text + (f", on the ranks of {' and '.join(shared)}" if shared else "")


def plan_text(plan: ParallelPlan) -> str:
    """The layouts of a plan on one line, with the number of microbatches."""
    layouts = [f"{name}: {module_layout(plan, name)}" for name in plan.modules]
    counts = plan.microbatch_counts
    return "; ".join([*layouts, microbatches_text(counts)])


def arranged_text(plan: ParallelPlan, arrangement: str | None) -> str:
    """The same with the schedule and, where it is known, the arrangement of samples."""
    arranged = "" if arrangement is None else f", arranged by `{arrangement}`"
    return f"{plan_text(plan)}, schedule {plan.schedule}{arranged}"


def compared_text(other: ComparedPlan) -> str:
    """The layouts of a baseline on one line."""
    return other.layout if other.plan is None else plan_text(other.plan)


def plan_cells(
    plan: ParallelPlan,
    spec: ModelSpec | None,
    timeline: Timeline | None,
    memory: Mapping[int, RankMemory] | None,
    is_short: bool = False,
) -> Cells:
    """The cells of [`plan_table`]; the first cells are empty in all rows of a module but the first."""
    rows = []
    for name, module in plan.modules.items():
        stages = _stage_rows(plan, name, spec, timeline, memory)
        counts = tuple(map(sum, zip(*(row.counts for row in stages), strict=True)))
        for number, row in enumerate([_joined(stages, counts)] if is_short else _merge(stages)):
            cells = {
                "module": "" if number else name,
                "layout": "" if number else module.layout,
                "stage": str(row.first) if row.first == row.last else f"{row.first}-{row.last}",
                "layers": f"{row.layers[0]}-{row.layers[1] - 1}",
                "ranks": rank_ranges(list(set(row.ranks))),
            }
            if spec is None:
                cells["backward"] = "yes" if row.counts[0] else "no"
            else:
                cells |= zip(("params", "trained"), map(_short_count, row.counts), strict=True)
            if timeline is not None:
                cells["in flight"] = f"{row.in_flight:.3g}"
            if memory is not None:
                cells["GiB a rank"] = gib_text(row.num_bytes)
            rows.append({key: value for key, value in cells.items() if not is_short or key not in ONLY_LONG})
    return Cells(tuple(rows[0]), tuple(tuple(row.values()) for row in rows), NUMBERS)


def _stage_rows(
    plan: ParallelPlan,
    name: str,
    spec: ModelSpec | None,
    timeline: Timeline | None,
    memory: Mapping[int, RankMemory] | None,
) -> list[_Row]:
    """A row for each (stage, layers); numbers are those of the fullest replica."""
    flow = GradientFlow(plan)
    rows: dict[tuple[int, tuple[int, int]], _Row] = {}
    for replica, index, stage in plan.modules[name].stages():
        key = (index, stage.layers)
        if key not in rows:
            counts: tuple[int, ...] = (int(flow.has_backward(name, replica, index)),)
            if spec is not None:
                parameters = stage_parameters(spec, name, stage)
                trainable = sum(p.num_elements for p in parameters if p.trainable)
                counts = (sum(p.num_elements for p in parameters), trainable)
            rows[key] = _Row(index, index, stage.layers, counts)
        row = rows[key]
        row.ranks.extend(stage.all_ranks)
        if timeline is not None:
            row.in_flight = max(row.in_flight, timeline.peak_in_flight.get((name, replica, index), 0.0))
        if memory is not None:
            row.num_bytes = max(row.num_bytes, *(memory[rank].total for rank in stage.all_ranks))
    return [rows[key] for key in sorted(rows)]


def _merge(rows: list[_Row], limit: int = 8) -> list[_Row]:
    """Merges neighboring stages with equal parameters if there are more than `limit`; numbers are the maxima."""
    if len(rows) <= limit:
        return rows
    merged: list[_Row] = []
    for row in rows:
        before = merged[-1] if merged else None
        if before is None or before.counts != row.counts or before.layers[1] != row.layers[0]:
            merged.append(row)
        else:
            merged[-1] = _joined([before, row], row.counts)
    return merged


def _joined(rows: Sequence[_Row], counts: tuple[int, ...]) -> _Row:
    """Stages as one row, with the maxima of their microbatches and memory."""
    return _Row(
        rows[0].first,
        rows[-1].last,
        (rows[0].layers[0], rows[-1].layers[1]),
        counts,
        [rank for row in rows for rank in row.ranks],
        max(row.in_flight for row in rows),
        max(row.num_bytes for row in rows),
    )


def _short_count(number: int) -> str:
    """`1.23 B`, `45.6 M`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


WIDTH = 160  # columns of output to a file or a pipe
SHORT_LABELS = ("Global batch", "Samples", "Costs")
NARROW = 100  # columns below which tables have no lines
GANTT_ROWS = 12


def new_console() -> Console:
    """A console as wide as the terminal."""
    return Console(width=None if Console().is_terminal else WIDTH)


def report(console: Console, answer: Answer, explain: bool, more: Sequence[tuple[str, str]] = ()) -> None:
    """Prints a plan and what it was made for; with `explain` its whole prediction, and `more` labels and texts."""
    spec, timeline, narrow = answer.costs.spec, answer.prediction.timeline, console.width < NARROW
    console.print(plan_table(answer.plan, spec, timeline, answer.memory, narrow, is_short=not explain))
    lines = dict([*summary(answer), *origins(answer), *more])
    del lines["Bound"]  # which is among the last lines
    print_labelled(console, [(label, lines[label]) for label in (lines if explain else SHORT_LABELS)])
    if explain and predicts_times(answer.costs):
        console.print(ledger_table(answer), highlight=False)
        console.print(gains_table(answer), highlight=False)


def ledger_table(answer: Answer) -> Table:
    """What keeps the step from the peak of the devices."""
    table = Table(title="Where the step goes", title_justify="left")
    for column in ("", "ms", "of the step"):
        table.add_column(column, justify="right" if column else "left")
    for name, share in answer.ledger.shares.items():
        table.add_row(TERMS[name], ms_text(answer.ledger.terms[name]).removesuffix(" ms"), f"{share:.1%}")
    table.add_section()
    table.add_row("step", ms_text(answer.ledger.step_ms).removesuffix(" ms"), "100.0%")
    return table


def gains_table(answer: Answer) -> Table:
    """What single changes would gain, the largest first."""
    table = Table(title="One change alone, with this plan", title_justify="left")
    for column in ("--what-if", "step", "change", ""):
        table.add_column(column, justify="left" if column in ("--what-if", "") else "right")
    before_ms = answer.prediction.step_ms
    for gain in gains_of(answer):
        change = f"{gain.step_ms / before_ms - 1:+.1%}"
        table.add_row(gain.change, ms_text(gain.step_ms), change, "" if gain.fits else "does not fit into memory")
    return table


def print_answer(console: Console, answer: Answer) -> None:
    """Prints the last lines of a command."""
    print_labelled(console, answer_lines(answer))


def answer_lines(answer: Answer) -> list[tuple[str, str]]:
    """A plan, its step, and what bounds it, as labels and texts."""
    return [
        ("Plan", arranged_text(answer.plan, answer.arrangement)),
        ("Step", f"{ms_text(answer.step_ms)}{_cpu_note(answer)}, {throughput_text(answer)}"),
        ("Bound", answer.bound),
    ]


def print_labelled(console: Console, lines: Sequence[tuple[str, str]]) -> None:
    """Prints labels and texts in two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(label, text)
    console.print(table, highlight=False)


def _cpu_note(answer: Answer) -> str:
    """What is said of a time that is none of a real device."""
    if predicts_times(answer.costs):
        return ""
    return " (no prediction: a CPU has no known speed; measure it with `hf-mmparallel profile`)"


def summary(answer: Answer) -> list[tuple[str, str]]:
    """Returns the prediction of a step as labels and texts."""
    prediction = answer.prediction
    times = [prediction.step_ms for prediction in answer.predictions]
    ends = [ms_text(end) for end in (min(times), max(times))]
    spread = f" ({ends[0]} to {ends[1]} in {len(times)} batches)" if ends[0] != ends[1] else ""
    lines = [
        ("Predicted step", f"{ms_text(answer.step_ms)}{spread}{_cpu_note(answer)}"),
        ("Throughput", throughput_text(answer)),
        ("Bubble", f"{prediction.timeline.bubble_fraction:.1%} of the ranks' time"),
        ("Memory", memory_text(answer)),
    ]
    if answer.settings.allocator_text:
        lines.append(("Allocator", answer.settings.allocator_text))
    return [*lines, ("Bound", answer.bound)]


def throughput_text(answer: Answer) -> str:
    """Samples and tokens of the language model a second, and MFU."""
    return (
        f"{_count(answer.samples_per_second)} samples/s, {_count(answer.tokens_per_second)} tokens/s, "
        f"MFU {answer.flops_utilisation:.1%}"
    )


def numbers(answer: Answer) -> list[tuple[str, str]]:
    """The figures of a step as labels and numbers."""
    limit = answer.settings.memory_bytes
    of = "" if limit is None else f" of {gib_text(limit)}"
    return [
        ("step", ms_text(answer.step_ms)),
        ("samples/s", _count(answer.samples_per_second)),
        ("tokens/s", _count(answer.tokens_per_second)),
        ("MFU", f"{answer.flops_utilisation:.1%}"),
        ("bubble", f"{answer.prediction.timeline.bubble_fraction:.1%}"),
        ("memory, GiB", f"{gib_text(answer.peak_bytes)}{of}"),
    ]


def memory_text(answer: Answer) -> str:
    """The fullest rank, the largest parts of its memory, and the limit."""
    memory = answer.memory
    fullest = max(memory, key=lambda rank: (memory[rank].total, -rank))
    limit = answer.settings.memory_bytes
    of = "" if limit is None else f" of {gib_text(limit)}"
    median = float(np.median([rank.total for rank in memory.values()]))
    text = f"{gib_text(memory[fullest].total)}{of} GiB on the fullest rank, {fullest} ({_parts(memory[fullest])})"
    return text if len(memory) == 1 else f"{text}; {gib_text(median)} GiB on half of them or less"


def _parts(memory: RankMemory) -> str:
    shares = {name: value / memory.total for name, value in memory.parts.items() if memory.total}
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def origins(answer: Answer) -> list[tuple[str, str]]:
    """The basis of a prediction: labels and texts."""
    lines = [
        ("Global batch", batch_text(answer)),
        ("Samples", samples_text(answer)),
        ("Costs", f"{costs_text(answer)}; frozen: {frozen_text(answer.costs.spec)}"),
        ("Groups", groups_text(answer.plan, answer.prediction.planned.step, answer.sync_groups)),
        ("Boundaries", boundaries_text(answer.costs, answer.prediction)),
        *([("Experts", experts_text(answer.costs.spec, answer.plan))] if _num_experts(answer.costs.spec) else []),
    ]
    result = answer.result
    text = "none: the sizes are given"
    if result is not None:
        text = f"{result.num_candidates:,} candidates estimated, {result.num_simulated} simulated"
        text += f", in {result.search_s:.1f} s"
        if result.is_proven:
            text += "; proven: on the first batch no other can be faster"
    return [*lines, ("Search", text)]


def _num_experts(spec: ModelSpec) -> int:
    return max(module.num_experts for module in spec.modules.values())


def experts_text(spec: ModelSpec, plan: ParallelPlan) -> str:
    """How evenly tokens choose the experts that ranks share, and whether that is measured."""
    measured = [(name, module.expert_peaks) for name, module in spec.modules.items() if module.expert_peaks]
    if not measured:
        return 'tokens are taken to choose them evenly; `parallel="auto"` of a model in memory measures how they do'
    parts = []
    for name, peaks in measured:
        size = plan.modules[name].ep_size
        size, peak = (size, dict(peaks)[size]) if size in dict(peaks) else max(peaks)
        parts.append(
            f"the busiest of {size} ranks that share those of `{name}` has {peak:.2f} times the mean one's tokens"
        )
    return f"{', '.join(parts)}, measured on training samples"


def frozen_text(spec: ModelSpec) -> str:
    """What gets no gradient, whoever froze it: `vision (tower), language_model (98 of 100 parameters)`."""
    parts = []
    for name, module in spec.modules.items():
        frozen = [p for p in module.parameters if not p.trainable]
        if len(frozen) == len(module.parameters):
            parts.append(name)
        elif frozen:
            tower = [p for p in module.parameters if p.name.startswith(f"{module.tower}.")]
            counts = [sum(p.num_elements for p in own) for own in (frozen, module.parameters)]
            what = "tower" if frozen == tower else "{:,} of {:,} parameters".format(*counts)
            parts.append(f"{name} ({what})")
    return ", ".join(parts) or "nothing"


def costs_text(answer: Answer) -> str:
    """The source of the times of layers."""
    layers = answer.costs.layers
    if not isinstance(layers, CalibratedLayers):
        return _source_text(answer.settings, layers)
    calibration = layers.calibration
    text = f"{_source_text(answer.settings, layers.base)}; calibrated by {calibration.windows} windows of runs"
    error = calibration.errors.get("step")
    return text if error is None else f"{text}, off by {error.after:.1%} in those not fitted"


def _source_text(settings: Settings, layers: LayerCosts) -> str:
    """The source of the times of layers, without calibration."""
    if not isinstance(layers, MeasuredLayers):
        return f"operation counts, {settings.gpu_type}, {settings.dtype}"
    profile = layers.profile
    text = (
        f"measured on {profile.device} in {profile.autocast or profile.dtype}; links and memory of {settings.gpu_type}"
    )
    misfits = sum(bool(layer.misfits) for layer in profile.layers)
    if misfits:
        text += f"; {misfits} of {len(profile.layers)} kinds of layers do not fit their curves"
    return f"{text}; not measured: {' '.join(layers.missing)}" if layers.missing else text


def batch_text(answer: Answer) -> str:
    """`64 samples, 8 microbatches of ...`."""
    plan, step = answer.plan, answer.prediction.planned.step
    counts = [len(microbatches) for microbatches in step.microbatches[LANGUAGE_MODEL]]
    if answer.arrangement == "contiguous":
        each = f"up to {answer.microbatch_size}"
    else:
        each = f"on average {answer.global_batch_size / sum(counts):.3g}"
    packed = answer.costs.packs_rows or plan.modules[LANGUAGE_MODEL].cp_size > 1
    rows = ", rows packed" if packed else ", rows padded" if not answer.inputs.samples.are_alike else ""
    given = answer.settings.global_batch_size is not None
    chosen = "" if given else "; chosen here, `--global-batch-size` sets it"
    return (
        f"{answer.global_batch_size:,} samples, {microbatches_text(counts)} of {each} on each language-model "
        f"replica{rows}{chosen}"
    )


def microbatches_text(counts: Sequence[int]) -> str:
    """`1 microbatch`, `8 microbatches`, or `5 to 11 microbatches` if replicas differ."""
    return plural(1, "microbatch") if max(counts) == 1 else f"{range_text(counts)} microbatches"


def samples_text(answer: Answer) -> str:
    """The source of sample sizes, and the sizes."""
    samples, sizes = answer.inputs.samples, answer.prediction.sizes
    if samples.are_alike:
        tokens = ", ".join(f"{name} {int(values[0]):,}" for name, values in sizes.tokens.items())
        return f"all equal, of tokens: {tokens}; `--dataset` plans for samples that differ"
    measured = samples.measured
    assert measured is not None
    spread = ", ".join(
        f"{name} {values.mean():,.0f} ({values.min():,} to {values.max():,})"
        for name, values in measured.tokens.items()
    )
    return f"{samples.origin}; mean tokens: {spread}"


def groups_text(plan: ParallelPlan, step: StepPlan, sync_groups: Sequence[SyncGroup]) -> str:
    """Process groups and channels of a step, and the communicators that the fullest rank has over NCCL."""
    groups, channels = collective_groups(plan, sync_groups), channels_of_step(plan, step)
    members = Counter(rank for ranks in chain(groups, channels) for rank in ranks)
    fullest = max(members.values(), default=0)
    return (
        f"{len(groups)} besides the world, {len(channels):,} pairs of ranks that exchange messages; up to {fullest} "
        "of both on a rank"
    )


def boundaries_text(costs: CostModel, prediction: Prediction) -> str:
    """What crosses each boundary between modules in a step, how long a message takes, and which replicas meet."""
    plan, texts = prediction.plan, []
    for boundary in boundaries_of(costs, prediction):
        edge, times_ms = boundary.edge, boundary.message_ms
        parts = ["gradients back"] * boundary.has_gradients
        if boundary.feature_bytes is not None:
            num_bytes = boundary.feature_bytes
            tokens = max(float(prediction.sizes.tokens[LANGUAGE_MODEL].sum()), 1.0)
            per_token = f"{num_bytes / tokens / 2**10:,.3g} KiB for each token of the language model"
            parts.insert(0, f"{num_bytes / 2**20:,.3g} MiB of features in a step, {per_token}")
        if len(times_ms):
            parts.append(f"messages of {ms_text(times_ms.min())} to {ms_text(times_ms.max())}")
            parts.append(f"{ms_text(times_ms.sum())} of them in all, of a step of {ms_text(prediction.step_ms)}")
        parts.append(f"{plural(plan.modules[edge.source].dp_size, 'replica')} to {plan.modules[edge.target].dp_size}")
        texts.append(f"{edge.source} to {edge.target}: {', '.join(parts)}")
    return "; ".join(texts) or "none: the model has one module"


def print_runners_up(console: Console, result: SearchResult) -> None:
    """Prints the next best plans with what speaks against them, and why other candidates were not chosen."""
    if result.runners_up:
        table = Table(title="Next best plans", title_justify="left")
        for column in ("", "plan", "step", "beside 1"):
            numeric = column in ("step", "beside 1")
            table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric)
        reasons = ["", *result.reasons]
        for number, (ranked, reason) in enumerate(zip([result.best, *result.runners_up], reasons, strict=True)):
            text = plan_text(ranked.plan).replace("; ", "\n") + (f"\n{reason}" if reason else "")
            beside = slower_text(result.best, ranked) if number else ""
            table.add_row(str(number + 1), text, ms_text(ranked.step_ms), beside, end_section=True)
        console.print(table, highlight=False)
    lines = [("Left out", f"{count:,} candidates: {reason}") for reason, count in result.rejected.items()]
    why = "a lower bound of their step is above the best one" if result.is_proven else "not expected to be faster"
    lines.append(("Not simulated", f"{result.num_not_simulated:,} candidates: {why}"))
    print_labelled(console, lines)


def print_gantt(console: Console, timeline: Timeline, num_batches: int = 1) -> None:
    """Draws a step as text, that of one batch of several."""
    width = max(40, min(120, console.width - 36))
    text = f"One of {num_batches} batches: " * (num_batches > 1) + gantt_text(timeline, width, GANTT_ROWS)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def plural(count: int, noun: str) -> str:
    """`1 microbatch`, `2 microbatches`, `2 nodes`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def ms_text(value: float) -> str:
    """`812 ms`, `1,234 ms`."""
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.4g} ms"


def _count(value: float) -> str:
    """`1,234`, `12.3`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
