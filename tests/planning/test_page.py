"""A page has all of its plan, needs nothing else, and trusts no name."""

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from IPython.core.formatters import DisplayFormatter
from IPython.lib.pretty import pretty
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlugin,
    MultimodalParallelPlugin,
    ParallelPlan,
    resolve_plan,
    sync_groups,
)
from hf_mmparallel.planning.answer import Answer, Inputs, solve
from hf_mmparallel.planning.gantt import KINDS
from hf_mmparallel.planning.inputs import Samples, read_model
from hf_mmparallel.planning.page import render_page, write_page
from hf_mmparallel.planning.page_data import MemoryCurves, PlanChoice, PlanPage, TextTable, rank_rows, timeline_data
from hf_mmparallel.planning.settings import Settings
from hf_mmparallel.planning.text import plan_cells
from hf_mmparallel.schedule import Span, SumSpan, Task, Timeline, TransferSpan
from tests import tiny
from tests.planning.pages import example_page
from tests.schedule.builders import Case, cases, chain, deferred, make_plan, make_step, module_spec, timeline_of

VOID = {"meta", "br", "path", "link", "img", "input", "hr"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=\"x\"> {{ 7 * 7 }} & 'quoted' \u2028"


class Reader(HTMLParser):
    """The elements, texts and attributes of a page; fails on tags that do not close."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def text_of(self, tag: str) -> list[str]:
        return [text.strip() for inside, text in self.texts if inside == tag and text.strip()]

    @property
    def data(self) -> dict:
        return next(json.loads(text) for text in self.text_of("script") if text.startswith("{"))


@pytest.fixture(scope="module")
def page() -> PlanPage:
    return example_page()


@pytest.fixture(scope="module")
def html(page) -> str:
    return render_page(page)


def run(case: Case, sync_ms: float = 0.0) -> Timeline:
    return timeline_of(case.plan, case.step, case.sync_groups, sync_ms=sync_ms)


def without_samples(case: Case) -> Timeline:
    return timeline_of(case.plan, make_step({name: [[]] for name in case.plan.modules}))


def read_back(plan: ParallelPlan, simulation: Timeline, memory: MemoryCurves | None = None) -> dict:
    """The data of a timeline as the page has it."""
    return json.loads(json.dumps(timeline_data(plan, simulation, rank_rows(simulation), memory)))


def spans_of(data: dict, rows_of_ranks: list[tuple[int, ...]]) -> list[Span]:
    """Reads a timeline back, in milliseconds."""
    spans = []
    for row, ranks in zip(data["rows"], rows_of_ranks, strict=True):
        now = 0
        for index, code in enumerate(row["task"]):
            stage = row["stage"] if isinstance(row["stage"], int) else row["stage"][index]
            module, replica, place = data["stages"][stage]
            number, kind = divmod(code, len(data["kinds"]))
            microbatch, chunk = divmod(number, data["chunks"])
            name = data["modules"][module]["name"]
            task = Task(data["kinds"][kind]["word"], name, replica, place, microbatch, chunk)
            start = now + row["gap"][index]
            now = start + row["duration"][index]
            spans += [Span(rank, task, start / 1e3, now / 1e3) for rank in ranks]
    return sorted(spans, key=lambda span: (span.start_ms, span.rank))


@settings(max_examples=40)
@given(cases())
@example(deferred(2, 2, 4))  # with chunks
def test_the_data_reads_back_to_the_same_tasks(case):
    simulation = run(case)
    rows, data = rank_rows(simulation), read_back(case.plan, simulation)
    assert spans_of(data, [row.ranks for row in rows]) == sorted(simulation.spans, key=lambda s: (s.start_ms, s.rank))
    assert sorted(rank for row in rows for rank in row.ranks) == list(range(simulation.num_ranks))
    assert data["end"] == round(1e3 * simulation.iteration_ms)


def two_copies(pp_size: int) -> Case:
    spec = ModelSpec({LANGUAGE_MODEL: module_spec(LANGUAGE_MODEL)})
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=pp_size)})
    return Case(plan, make_step({LANGUAGE_MODEL: [[[0], [1]], [[2], [3]]]}), sync_groups(spec, plan))


def ends(track: dict) -> list[list[int]]:
    """Start and end of each interval, in microseconds."""
    return np.cumsum(np.stack([track["gap"], track["duration"]], axis=1)).reshape(-1, 2).tolist()


def test_gradient_sums_are_in_the_rows_and_in_the_table_of_ranks():
    case = two_copies(pp_size=2)
    simulation = run(case, sync_ms=2.5)
    data = read_back(case.plan, simulation)
    found = [
        SumSpan(rank, start / 1e3, end / 1e3)
        for row, read in zip(rank_rows(simulation), data["rows"], strict=True)
        for rank in row.ranks
        for start, end in ends(read["sums"])
    ]
    assert simulation.sums and sorted(found) == sorted(simulation.sums)
    assert data["end"] == round(1e3 * max(span.end_ms for span in simulation.sums))
    assert "gradient sums</th>" in render_page(PlanPage("t", case.plan, simulation))


def test_the_communication_of_ranks_is_in_the_rows_and_in_the_table_of_ranks():
    times = [(0.0, 1.0, "gather", False), (1.0, 1.25, "gather", True), (2.0, 5.5, "sum", False)]
    times += [(20.0, 21.0, "update", True), (21.0, 24.0, "gather", True)]
    case = two_copies(pp_size=1)
    simulation = replace(run(case), transfers=lambda rank: [TransferSpan(rank, *own) for own in times])
    rows = rank_rows(simulation)
    assert [[row.communication_us(exposed) for exposed in (False, True)] for row in rows] == 2 * [[4500, 3250]]
    data = read_back(case.plan, simulation)
    found = {kind: ends(lane) for lane, kind in zip(data["rows"][0]["lanes"], KINDS, strict=True)}
    assert found["gather", True] == [[1000, 1250], [21000, 24000]] and found["sum", True] == []
    assert data["end"] == 24000 and [lane["name"] for lane in data["lanes"]] == [name for _, name in KINDS.values()]
    with_lanes, without = (render_page(PlanPage("t", case.plan, own)) for own in (simulation, run(case)))
    assert "communication beside tasks</th>" in with_lanes
    assert "Thin lanes" in with_lanes and "Thin lanes" not in without


def test_times_are_kept_to_a_microsecond(page):
    rows, data = rank_rows(page.timeline), read_back(page.plan, page.timeline)
    found = {(s.rank, s.task): s for s in spans_of(data, [row.ranks for row in rows])}
    assert len(found) == len(page.timeline.spans)
    for span in page.timeline.spans:
        read = found[span.rank, span.task]
        assert (read.start_ms, read.end_ms) == pytest.approx((span.start_ms, span.end_ms), abs=6e-4)


def test_ranks_of_a_grid_share_a_row_and_idle_ranks_have_one(html):
    rows = Reader(html).data["rows"]
    assert [(row["label"], row["ranks"]) for row in rows] == [(f"ranks {2 * i}-{2 * i + 1}", 2) for i in range(8)]
    _, plan = make_plan({LANGUAGE_MODEL: [[(0,)], [(3,)]]})
    simulation = timeline_of(plan, make_step({LANGUAGE_MODEL: [[[0]], [[1]]]}))
    found = [(row.label, len(row.stages)) for row in rank_rows(simulation)]
    assert found == [("rank 0", 1), ("ranks 1-2", 0), ("rank 3", 1)]
    idle = render_page(PlanPage("t", plan, simulation))
    assert "ranks 1-2" in idle and "100.0%" in idle


def test_copies_that_do_the_same_share_a_row_and_of_many_rows_the_extremes_are_kept():
    spec = ModelSpec({LANGUAGE_MODEL: module_spec(LANGUAGE_MODEL)})
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=6, pp_size=2)})
    step = make_step({LANGUAGE_MODEL: [[[replica]] for replica in range(6)]})
    cost = {True: lambda task: 1.0, False: lambda task: 1.0 + task.replica % 3}
    alike, unlike = (timeline_of(plan, step, [], cost[own]) for own in (True, False))
    assert [row.ranks for row in rank_rows(alike, 2)] == [tuple(range(0, 12, 2)), tuple(range(1, 12, 2))]
    assert len(rank_rows(alike)) == 12 and len(rank_rows(unlike, 6)) == 6
    kept = [(row.ranks, row.stages[0][2], row.busy_us) for row in rank_rows(unlike, 5)]
    assert kept == [((0, 6), 0, 2000), ((1, 7), 1, 2000), ((4, 10), 0, 6000), ((5, 11), 1, 6000)]
    page = render_page(PlanPage("t", plan, unlike))
    assert "12 ranks: for each stage" not in page and len(Reader(page).data["rows"]) == 6


def test_nothing_outside_is_named_and_only_the_own_script_may_run(html):
    assert re.search(r"https?:|//[a-z]|\bsrc=|@import|url\(|\bimport\b", html.split("<body>")[0]) is None
    script = html.split("<script>")[1]
    assert re.search(r"https?:|fetch\(|XMLHttp|import\(|\.src\b|sendBeacon|WebSocket", script) is None
    elements = Reader(html).elements
    for tag, attributes in elements:
        assert tag not in {"link", "img", "iframe", "object", "embed"}
        assert not {"src", "href", "srcset", "action"} & set(attributes), tag
        assert not any(name.startswith("on") for name in attributes)
    (policy,) = [a["content"] for _, a in elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and "default-src 'none'" in policy and "script-src 'sha256-" in policy


def test_all_sections_are_there(html, page):
    reader = Reader(html)
    titles = ["One step", "The plan", "Workloads of microbatches", "Runners-up", "Beside other methods", "Use it"]
    assert reader.text_of("h2") == titles
    assert "dp 2 x pp 2 x tp 2" in html.split('id="step"')[0], "the plan comes first"
    for label, value in (*page.numbers, *page.summary):
        assert label in reader.text_of("dt") and value in reader.text_of("dd")
    for choice in (*page.runners_up, *page.comparison):
        assert choice.name in reader.text_of("th") and choice.reason in reader.text_of("td")
    assert {"+2.1%", "+52.0%", "does not fit"} <= set(reader.text_of("td"))
    assert page.bound in " ".join(reader.text_of("p"))
    (command, plan_yaml) = reader.text_of("pre")
    assert command == page.command
    assert ParallelPlan.from_dict(yaml.safe_load(plan_yaml)) == page.plan


def test_what_is_copied_repeats_the_run(page):
    """The plan alone would not say what of a module is frozen, nor what adapters it has."""
    modules = {"vision": ModulePlugin(freeze="tower"), "language_model": ModulePlugin(tp_size=2)}
    _, copied = Reader(render_page(replace(page, modules=modules))).text_of("pre")
    plugin = MultimodalParallelPlugin.from_any(yaml.safe_load(copied))
    assert plugin.plan == page.plan
    assert plugin.modules == {"vision": ModulePlugin(freeze="tower")}


def test_a_bare_page_leaves_sections_out():
    case = chain(2, 3)
    reader = Reader(render_page(PlanPage("bare", case.plan, run(case))))
    assert reader.text_of("h2") == ["One step", "Use it"]
    assert reader.data["memory"] is None and "memory" not in reader.data["rows"][0]
    without_tasks = Reader(render_page(PlanPage("empty", case.plan, without_samples(case)))).data
    assert without_tasks["end"] == 0 and without_tasks["rows"][0]["task"] == []


def test_names_are_escaped(page, tmp_path):
    case = chain(2, 2)
    named = {"vision": f"{HOSTILE}vision", LANGUAGE_MODEL: LANGUAGE_MODEL}
    modules = {named[name]: module for name, module in case.plan.modules.items()}
    plan = ParallelPlan(modules, (), case.plan.schedule, 2)
    rows = {named[name]: own for name, own in case.step.microbatches.items()}
    hostile = PlanPage(
        HOSTILE,
        plan,
        timeline_of(plan, replace(case.step, microbatches=rows, targets={})),
        **dict.fromkeys(("subtitle", "bound", "command"), HOSTILE),
        summary=[(HOSTILE, HOSTILE)],
        table=TextTable([HOSTILE], [[HOSTILE]]),
        workloads={HOSTILE: page.workloads["before, contiguous"]},
        runners_up=[PlanChoice(HOSTILE, HOSTILE, 1.0, HOSTILE)],
        versions={HOSTILE: HOSTILE},
    )
    write_page(tmp_path / "page.html", hostile)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    reader = Reader(text)
    assert [tag for tag, _ in reader.elements].count("script") == 2
    assert not any(tag == "img" for tag, _ in reader.elements)
    assert "49" not in reader.text_of("h1")[0] and reader.text_of("h1")[0].startswith("</script>")
    assert reader.data["modules"][0]["name"] == HOSTILE + "vision"
    assert "\u2028" not in text.split('id="data">')[1].split("</script>")[0]


def test_equal_content_gives_equal_bytes_and_a_large_plan_few(html):
    assert render_page(example_page()) == html
    large = render_page(example_page(ModulePlugin(dp_size=4, pp_size=4), num_microbatches=32))
    assert len(Reader(large).data["rows"]) == 32
    assert len(large.encode()) < 200_000


def test_memory_reads_back(page):
    assert page.memory is not None
    rows, data = rank_rows(page.timeline), read_back(page.plan, page.timeline, page.memory)
    unit = data["memory"]["unit"]
    highest = max(page.memory.peak_bytes(rank) for rank in range(16))
    for row, read in zip(rows, (row["memory"] for row in data["rows"]), strict=True):
        time_ms, num_bytes = page.memory.changing[row.ranks[0]]
        times, values = np.cumsum(read["gap"]) / 1e3, unit * np.cumsum(read["change"])
        middles = (time_ms[1:] + time_ms[:-1])[np.diff(time_ms) > 0.01] / 2
        expected = num_bytes[np.searchsorted(time_ms, middles, "right") - 1]
        found = values[np.searchsorted(times, middles, "right") - 1]
        assert np.abs(found - expected).max() <= 2e-4 * highest
        assert unit * read["static"] == pytest.approx(page.memory.static_bytes[row.ranks[0]], abs=unit)


def test_of_ranks_in_a_row_the_fullest_is_shown():
    case = chain(2, 1)
    simulation = without_samples(case)
    curve = np.array([0.0, 1.0])
    memory = MemoryCurves({0: (curve, np.array([10.0, 0.0])), 1: (curve, np.array([90.0, 20.0]))}, {0: 5.0, 1: 6.0})
    (row,) = read_back(case.plan, simulation, memory)["rows"]
    assert row["memory"] == {"static": 6, "gap": [0, 1000], "change": [90, -70]}


def test_bars_of_workloads_are_on_one_scale(html, page):
    before = page.workloads["before, contiguous"].forward_ms[LANGUAGE_MODEL]
    highest = max(times.max() for b in page.workloads.values() for times in b.forward_ms[LANGUAGE_MODEL])
    paths = [a["d"] or "" for tag, a in Reader(html).elements if tag == "path" and a.get("class") == "bars"]
    heights = [int(h) for h in re.findall(r"h8v(\d+)z", paths[4])]  # after two strips of each arrangement of vision
    assert heights == np.rint(100 * before[0] / highest).astype(int).tolist()


def test_what_does_not_match_is_refused():
    case = chain(2, 2)
    with pytest.raises(ValueError, match="1 cells .* 2 columns"):
        TextTable(["a", "b"], [["1"]])
    with pytest.raises(ValueError, match="rank 3 has 2 times and 1 "):
        MemoryCurves({3: (np.zeros(2), np.zeros(1))}, {})
    with pytest.raises(ValueError, match="rank 0's memory descend"):
        MemoryCurves({0: (np.array([1.0, 0.0]), np.zeros(2))}, {})
    with pytest.raises(ValueError, match="not in the plan"):
        render_page(PlanPage("t", chain(1, 2).plan, run(case)))


def shown(value: Any) -> tuple[Reader, int]:
    """What a notebook shows of a value, and the number of its pictures."""
    formats = DisplayFormatter().format(value)[0]
    assert len(formats["text/plain"]) < 1000  # notebooks store it, too
    reader = Reader(formats["text/html"])
    pictures = [attributes for tag, attributes in reader.elements if tag == "img"]
    for picture in pictures:
        kind, _, data = str(picture["src"]).partition(",")
        assert kind == "data:image/png;base64"
        colors = Image.open(BytesIO(base64.b64decode(data))).convert("RGB").getcolors()
        assert colors is not None and {(255, 255, 255), (243, 244, 246)} <= {color for _, color in colors}  # as drawn
        assert picture["alt"] and 0 < int(str(picture["width"])) < 2000
    assert not {"script", "link", "iframe"} & {tag for tag, _ in reader.elements}
    return reader, len(pictures)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    folder = tmp_path_factory.mktemp("model")
    tiny.FAMILIES["llava"]().config.save_pretrained(folder)
    layout = {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(pp_size=2)}
    settings = Settings(plugin=MultimodalParallelPlugin(layout), global_batch_size=8, gpu_type="h100")
    return solve(settings, Inputs(read_model(str(folder), {}, []), Samples("all samples alike")))


def test_a_plan_is_its_table(answer: Answer):
    reader, num_pictures = shown(answer.plan)
    assert reader.text_of("caption") == ["Plan for 4 ranks"] and num_pictures == 0
    cells = plan_cells(answer.plan, None, None, None)
    assert reader.text_of("th") == [*cells.columns] and "in flight" not in cells.columns
    assert reader.text_of("td") == [cell for row in cells.rows for cell in row if cell]
    assert any("schedule 1f1b, arranged by contiguous" in text for text in reader.text_of("dd"))


def test_a_prediction_has_its_memory_and_pictures_and_an_answer_the_rest(answer: Answer):
    reader, num_pictures = shown(answer.prediction)
    assert num_pictures == 2 and {"in flight", "GiB a rank"} <= {*reader.text_of("th")}
    assert reader.text_of("dt") == ["Plan", "Step", "Memory"]
    assert pretty(answer.prediction).replace("`", "").splitlines()[0] == f"Plan: {reader.text_of('dd')[0]}"
    reader, num_pictures = shown(answer)
    assert num_pictures == 2 and {"params", "in flight", "GiB a rank"} <= {*reader.text_of("th")}
    assert answer.bound in reader.text_of("dd")


def test_a_step_is_the_number_of_samples_of_each_microbatch(monkeypatch: pytest.MonkeyPatch):
    saved, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, file: (saved.append(self), save(self, file)))
    step = make_step({"vision": [[[0, 1, 2], [3]]], LANGUAGE_MODEL: [[[0], [1, 2], [3]]]})
    assert shown(step)[1] == 1
    for axis, (name, (microbatches,)) in zip(saved[0].axes, step.microbatches.items(), strict=True):
        heights = [patch.get_height() for patch in axis.patches if isinstance(patch, Rectangle)]
        assert heights[: len(microbatches)] == list(map(len, microbatches)), name
        assert f"{name}: mean {len(step.samples) / len(microbatches):.3g} samples" in axis.get_title(loc="left")


def test_names_are_escaped_in_tables(answer: Answer):
    modules = {HOSTILE if name == "vision" else name: module for name, module in answer.plan.modules.items()}
    reader, num_pictures = shown(replace(answer.plan, modules=modules, edges=()))
    assert HOSTILE.strip() in reader.text_of("td") and num_pictures == 0
