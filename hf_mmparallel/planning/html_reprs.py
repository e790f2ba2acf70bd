"""Plans, steps and predictions as notebooks show them: tables and pictures, without scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import singledispatch
from io import BytesIO
from typing import Any

from PIL import Image

from ..arrange.balance import step_balance
from ..cost import RankMemory
from ..cost.stage_memory import gib_text
from ..cost.step_planner import Prediction
from ..plan import ModelSpec, ParallelPlan, StepPlan, Workloads
from ..schedule import Timeline
from .answer import Answer
from .files import workloads_of
from .gantt import gantt_png
from .page import render_repr
from .page_data import TextTable
from .text import answer_lines, arranged_text, microbatches_text, ms_text, plan_cells, plural
from .workload_chart import balance_png

STEP = "Predicted schedule of one step"
BALANCE = "Predicted forward of each microbatch of one step"


@singledispatch
def facts_of(value: Any) -> list[tuple[str, str]]:
    """Labels and texts of an `HtmlRepr`."""
    raise NotImplementedError(type(value))


@facts_of.register
def _plan_facts(plan: ParallelPlan) -> list[tuple[str, str]]:
    return [("Plan", arranged_text(plan, plan.microbatch_assignment))]


@facts_of.register
def _step_facts(step: StepPlan) -> list[tuple[str, str]]:
    counts = {name: [len(microbatches) for microbatches in own] for name, own in step.microbatches.items()}
    texts = [f"{name} {microbatches_text(own)} on {plural(len(own), 'replica')}" for name, own in counts.items()]
    return [("Step", f"{len(step.samples):,} samples; {', '.join(texts)}")]


@facts_of.register
def _prediction_facts(prediction: Prediction) -> list[tuple[str, str]]:
    memory = f"{gib_text(prediction.peak_memory_bytes)} GiB on the fullest rank"
    return [*_plan_facts(prediction.plan), ("Step", ms_text(prediction.step_ms)), ("Memory", memory)]


facts_of.register(Answer, answer_lines)


@singledispatch
def html_of(value: Any) -> str:
    """The HTML of an `HtmlRepr`."""
    raise NotImplementedError(type(value))


@html_of.register
def _plan_html(plan: ParallelPlan) -> str:
    return _html(plan, plan)


@html_of.register
def _step_html(step: StepPlan) -> str:
    # it has no sizes of its samples, without which all count the same
    balance = step_balance(step, Workloads.alike(step.microbatches, len(step.samples)))
    panels = {f"{len(step.samples):,} samples": balance}
    pictures = [_picture("Samples of each microbatch", balance_png, panels, unit="samples")]
    return render_repr(_step_facts(step), pictures=pictures)


@html_of.register
def _prediction_html(prediction: Prediction) -> str:
    plan, planned, timeline = prediction.plan, prediction.planned, prediction.timeline
    panels = {"one step": step_balance(planned.step, planned.workloads)}
    pictures = [_picture(STEP, gantt_png, timeline), _picture(BALANCE, balance_png, panels)]
    return _html(prediction, plan, pictures, None, timeline, prediction.memory)


@html_of.register
def _answer_html(answer: Answer) -> str:
    pictures = [_picture(STEP, gantt_png, answer.drawn), _picture(BALANCE, balance_png, workloads_of(answer))]
    numbers = answer.costs.spec, answer.prediction.timeline, answer.memory
    return _html(answer, answer.plan, pictures, *numbers)


def _html(
    value: Any,
    plan: ParallelPlan,
    pictures: Sequence[tuple[str, bytes]] = (),
    spec: ModelSpec | None = None,
    timeline: Timeline | None = None,
    memory: Mapping[int, RankMemory] | None = None,
) -> str:
    """HTML with facts and the table of [`plan_cells`]."""
    cells = plan_cells(plan, spec, timeline, memory)
    table = TextTable(cells.columns, cells.rows, cells.right)
    facts = [(label, text.replace("`", "")) for label, text in facts_of(value)]
    return render_repr(facts, table, pictures, f"Plan for {plan.world_size:,} ranks")


def _picture(title: str, draw: Callable[..., None], *content: Any, **options: Any) -> tuple[str, bytes]:
    """A title with its PNG."""
    file = BytesIO()
    draw(*content, file, title=title, **options)
    return title, with_palette(file.getvalue())


def with_palette(png: bytes) -> bytes:
    """The same picture in less than half of the bytes, which notebooks store."""
    file = BytesIO()
    image = Image.open(BytesIO(png)).convert("RGB")  # palettes of pictures with transparency are coarser
    image.convert("P", palette=Image.Palette.ADAPTIVE).save(file, "PNG", optimize=True)
    return file.getvalue()
