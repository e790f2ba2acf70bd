"""Plans, steps and predictions as notebooks show them: tables and pictures, without scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import singledispatch
from io import BytesIO
from typing import Any

from ..arrange.balance import step_balance
from ..cost import RankMemory
from ..cost.stage_memory import gib_text
from ..drawing.gantt import gantt_png
from ..drawing.workload_chart import balance_png
from ..page import TextTable, render_repr
from ..plan import ModelSpec, ParallelPlan, StepPlan, Workloads
from ..schedule import Timeline
from ..steps.step_planner import Prediction
from .answer import Answer
from .files import workloads_of
from .text import answer_lines, arranged_text, ms_text, plan_cells

STEP = "Predicted schedule of one step"
BALANCE = "Predicted forward of each microbatch of one step"


@singledispatch
def html_of(value: Any) -> str:
    """The HTML of an `HtmlRepr`."""
    raise NotImplementedError(type(value))


@html_of.register
def _plan_html(plan: ParallelPlan) -> str:
    return _html(plan, [("Plan", arranged_text(plan, plan.microbatch_assignment))])


@html_of.register
def _step_html(step: StepPlan) -> str:
    # it has no sizes of its samples, without which all count the same
    balance = step_balance(step, Workloads.alike(step.microbatches, len(step.samples)))
    panels = {f"{len(step.samples):,} samples": balance}
    return render_repr(pictures=[_picture("Samples of each microbatch", balance_png, panels, unit="samples")])


@html_of.register
def _prediction_html(prediction: Prediction) -> str:
    plan, planned, timeline = prediction.plan, prediction.planned, prediction.timeline
    facts = [
        ("Plan", arranged_text(plan, plan.microbatch_assignment)),
        ("Step", ms_text(prediction.step_ms)),
        ("Memory", f"{gib_text(prediction.peak_memory_bytes)} GiB on the fullest rank"),
    ]
    panels = {"one step": step_balance(planned.step, planned.workloads)}
    pictures = [_picture(STEP, gantt_png, timeline), _picture(BALANCE, balance_png, panels)]
    return _html(plan, facts, pictures, None, timeline, prediction.memory)


@html_of.register
def _answer_html(answer: Answer) -> str:
    pictures = [_picture(STEP, gantt_png, answer.drawn), _picture(BALANCE, balance_png, workloads_of(answer))]
    numbers = answer.costs.spec, answer.prediction.timeline, answer.memory
    return _html(answer.plan, answer_lines(answer), pictures, *numbers)


def _html(
    plan: ParallelPlan,
    facts: Sequence[tuple[str, str]],
    pictures: Sequence[tuple[str, bytes]] = (),
    spec: ModelSpec | None = None,
    timeline: Timeline | None = None,
    memory: Mapping[int, RankMemory] | None = None,
) -> str:
    """HTML with the table of [`plan_cells`]."""
    cells = plan_cells(plan, spec, timeline, memory)
    table = TextTable(cells.columns, cells.rows, cells.right)
    facts = [(label, text.replace("`", "")) for label, text in facts]
    return render_repr(facts, table, pictures, f"Plan for {plan.world_size:,} ranks")


def _picture(title: str, draw: Callable[..., None], *content: Any, **options: Any) -> tuple[str, bytes]:
    """A title with its PNG."""
    file = BytesIO()
    draw(*content, file, title=title, **options)
    return title, file.getvalue()
