"""A page has all of its plan, needs nothing else, and trusts no name."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings

from hf_mmparallel.drawing.timeline import KINDS
from hf_mmparallel.page import MemoryCurves, PlanChoice, PlanPage, TextTable, render_page, write_page
from hf_mmparallel.page.script_data import rank_rows, timeline_data
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlugin,
    MultimodalParallelPlugin,
    ParallelPlan,
    resolve_plan,
    sync_groups,
)
from hf_mmparallel.schedule import Simulation, Span, SumSpan, Task, TransferSpan, build_program, simulate
from tests.page.pages import example_page
from tests.schedule.builders import Case, cases, chain, deferred, make_step, module_spec, shared

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


def run(case: Case, sync_ms: float = 0.0) -> Simulation:
    return simulate(case.plan, build_program(case.plan, case.step, case.sync_groups), sync_ms=sync_ms)


def spans_of(data: dict, rows_of_ranks: list[tuple[int, ...]]) -> list[Span]:
    """Reads a timeline back, in milliseconds."""
    spans = []
    for row, ranks in zip(data["rows"], rows_of_ranks, strict=True):
        now = 0
        for index, code in enumerate(row["task"]):
            stage = row["stage"] if isinstance(row["stage"], int) else row["stage"][index]
            module, replica, place = data["stages"][stage]
            microbatch, chunk = divmod(code // 2, data["chunks"])
            name = data["modules"][module]["name"]
            task = Task("bwd" if code % 2 else "fwd", name, replica, place, microbatch, chunk)
            start = now + row["gap"][index]
            now = start + row["duration"][index]
            spans += [Span(rank, task, start / 1e3, now / 1e3) for rank in ranks]
    return sorted(spans, key=lambda span: (span.start_ms, span.rank))


@settings(max_examples=40)
@given(cases())
@example(deferred(2, 2, 4))  # with chunks
def test_the_data_reads_back_to_the_same_tasks(case):
    simulation = run(case)
    rows = rank_rows(simulation)
    data = json.loads(json.dumps(timeline_data(case.plan, simulation, rows, None)))
    assert spans_of(data, [row.ranks for row in rows]) == sorted(simulation.spans, key=lambda s: (s.start_ms, s.rank))
    assert sorted(rank for row in rows for rank in row.ranks) == list(range(simulation.num_ranks))
    assert data["end"] == round(1e3 * simulation.iteration_ms)


def test_gradient_sums_are_in_the_rows_and_in_the_table_of_ranks():
    spec = ModelSpec({LANGUAGE_MODEL: module_spec(LANGUAGE_MODEL)})
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=2)})
    case = Case(plan, make_step({LANGUAGE_MODEL: [[[0], [1]], [[2], [3]]]}), sync_groups(spec, plan))
    simulation = run(case, sync_ms=2.5)
    data = json.loads(json.dumps(timeline_data(case.plan, simulation, rows := rank_rows(simulation), None)))
    found = []
    for row, ranks in zip(data["rows"], [row.ranks for row in rows], strict=True):
        ends = np.cumsum(np.stack([row["sums"]["gap"], row["sums"]["duration"]], axis=1)).reshape(-1, 2)
        found += [SumSpan(rank, start / 1e3, end / 1e3) for rank in ranks for start, end in ends.tolist()]
    assert simulation.sums and sorted(found) == sorted(simulation.sums)
    assert data["end"] == round(1e3 * max(span.end_ms for span in simulation.sums))
    table = render_page(PlanPage("t", case.plan, simulation))
    assert "gradient sums</th>" in table and "sums of gradients" in table


def test_the_communication_of_ranks_is_in_the_rows_and_in_the_table_of_ranks():
    def transfers(rank: int) -> list[TransferSpan]:
        times = [(0.0, 1.0, "gather", False), (1.0, 1.25, "gather", True), (2.0, 5.5, "sum", False)]
        late = [(20.0, 21.0, "update", True), (21.0, 24.0, "gather", True)]
        return [TransferSpan(rank, start, end, op, exposed) for start, end, op, exposed in (*times, *late)]

    spec = ModelSpec({LANGUAGE_MODEL: module_spec(LANGUAGE_MODEL)})
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=2)})
    case = Case(plan, make_step({LANGUAGE_MODEL: [[[0], [1]], [[2], [3]]]}), sync_groups(spec, plan))
    simulation = replace(run(case), transfers=transfers)
    rows = rank_rows(simulation)
    assert [[row.communication_us(exposed) for exposed in (False, True)] for row in rows] == 2 * [[4500, 3250]]
    data = json.loads(json.dumps(timeline_data(case.plan, simulation, rows, None)))
    found = {}
    for lane, kind in zip(data["rows"][0]["lanes"], KINDS, strict=True):
        ends = np.cumsum(np.stack([lane["gap"], lane["duration"]], axis=1)).reshape(-1, 2).tolist()
        found[kind] = ends
    assert found["gather", True] == [[1000, 1250], [21000, 24000]] and found["sum", True] == []
    assert data["end"] == 24000 and [lane["name"] for lane in data["lanes"]] == [name for _, name in KINDS.values()]
    text = render_page(PlanPage("t", case.plan, simulation))
    assert "communication beside tasks</th>" in text and "Thin lanes below" in text
    assert "Thin lanes below" not in render_page(PlanPage("t", case.plan, run(case)))


def test_times_are_kept_to_a_microsecond(page):
    rows = rank_rows(page.simulation)
    data = timeline_data(page.plan, page.simulation, rows, page.memory)
    found = {(s.rank, s.task): s for s in spans_of(data, [row.ranks for row in rows])}
    assert len(found) == len(page.simulation.spans)
    for span in page.simulation.spans:
        read = found[span.rank, span.task]
        assert read.start_ms == pytest.approx(span.start_ms, abs=6e-4)
        assert read.end_ms == pytest.approx(span.end_ms, abs=6e-4)


def test_ranks_of_a_grid_share_a_row(html, page):
    labels = [row["label"] for row in Reader(html).data["rows"]]
    assert labels == [f"ranks {2 * i}-{2 * i + 1}" for i in range(8)]
    assert [row["ranks"] for row in Reader(html).data["rows"]] == [2] * 8


def test_idle_ranks_and_shared_ranks_have_rows():
    case = shared()
    simulation = replace(run(case), num_ranks=4)
    rows = rank_rows(simulation)
    assert [(row.label, len(row.stages)) for row in rows] == [("rank 0", 2), ("rank 1", 2), ("ranks 2-3", 0)]
    html = render_page(PlanPage("t", case.plan, simulation))
    assert "ranks 2-3" in html and "100.0%" in html


def test_nothing_outside_is_named(html):
    assert re.search(r"https?:|//[a-z]|\bsrc=|@import|url\(|\bimport\b", html.split("<body>")[0]) is None
    script = html.split("<script>")[1]
    assert re.search(r"https?:|fetch\(|XMLHttp|import\(|\.src\b|sendBeacon|WebSocket", script) is None
    for tag, attributes in Reader(html).elements:
        assert tag not in {"link", "img", "iframe", "object", "embed"}
        assert not {"src", "href", "srcset", "action"} & set(attributes), tag


def test_only_the_own_script_may_run(html):
    (policy,) = [a["content"] for t, a in Reader(html).elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and "default-src 'none'" in policy and "script-src 'sha256-" in policy
    assert not any(name.startswith("on") for _, attributes in Reader(html).elements for name in attributes)


def test_all_sections_are_there(html, page):
    reader = Reader(html)
    titles = ["One step", "The plan", "Workloads of microbatches", "Runners-up", "Beside other methods", "Use it"]
    assert reader.text_of("h2") == titles
    for label, value in page.summary:
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


def test_a_step_without_tasks_has_a_page():
    plan = chain(2, 3).plan
    reader = Reader(render_page(PlanPage("empty", plan, Simulation((), 0.0, 2, {}))))
    assert reader.data["end"] == 0 and reader.data["rows"][0]["task"] == []


def test_names_are_escaped(page, tmp_path):
    case = chain(2, 2)
    modules = {f"{HOSTILE}{name}" if name == "vision" else name: m for name, m in case.plan.modules.items()}
    plan = ParallelPlan(modules, (), case.plan.schedule, 2)
    spans = [
        replace(s, task=replace(s.task, module=next(n for n in modules if n.endswith(s.task.module))))
        for s in run(case).spans
    ]
    hostile = replace(
        page,
        title=HOSTILE,
        subtitle=HOSTILE,
        plan=plan,
        simulation=replace(run(case), spans=tuple(spans)),
        summary=[(HOSTILE, HOSTILE)],
        bound=HOSTILE,
        table=TextTable([HOSTILE], [[HOSTILE]]),
        memory=None,
        workloads={HOSTILE: next(iter(page.workloads.values()))},
        runners_up=[PlanChoice(HOSTILE, HOSTILE, 1.0, HOSTILE)],
        comparison=[],
        command=HOSTILE,
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


def test_equal_content_gives_equal_bytes(page, html):
    assert render_page(example_page()) == html


def test_a_large_plan_stays_small():
    sizes = ModulePlugin(dp_size=8, pp_size=4), ModulePlugin(dp_size=8, pp_size=4)
    html = render_page(example_page(*sizes, num_microbatches=32))
    assert len(Reader(html).data["rows"]) == 64
    assert len(html.encode()) < 400_000


def test_memory_reads_back(page):
    assert page.memory is not None
    rows = rank_rows(page.simulation)
    data = timeline_data(page.plan, page.simulation, rows, page.memory)
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
    span = Span(0, Task("fwd", "vision", 0, 0, 0), 0.0, 2.0)
    simulation = Simulation((span, replace(span, rank=1)), 2.0, 2, {})
    curve = np.array([0.0, 1.0])
    memory = MemoryCurves({0: (curve, np.array([10.0, 0.0])), 1: (curve, np.array([90.0, 20.0]))}, {0: 5.0, 1: 6.0})
    (row,) = timeline_data(case.plan, simulation, rank_rows(simulation), memory)["rows"]
    assert row["memory"] == {"static": 6, "gap": [0, 1000], "change": [90, -70]}


def test_bars_of_workloads_are_on_one_scale(html, page):
    before = page.workloads["before, contiguous"].forward_ms[LANGUAGE_MODEL]
    highest = max(times.max() for b in page.workloads.values() for times in b.forward_ms[LANGUAGE_MODEL])
    paths = [a["d"] or "" for tag, a in Reader(html).elements if tag == "path" and a.get("class") == "bars"]
    heights = [int(h) for h in re.findall(r"h8v(\d+)z", paths[4])]  # after two strips of each arrangement of vision
    assert heights == np.rint(100 * before[0] / highest).astype(int).tolist()


def test_what_does_not_match_is_refused():
    case = chain(2, 2)
    with pytest.raises(ValueError, match="1 cells and the table 2 columns. Give one cell"):
        TextTable(["a", "b"], [["1"]])
    with pytest.raises(ValueError, match="rank 3 has 2 times and 1 amounts of memory"):
        MemoryCurves({3: (np.zeros(2), np.zeros(1))}, {})
    with pytest.raises(ValueError, match="times of rank 0's memory descend. Sort them"):
        MemoryCurves({0: (np.array([1.0, 0.0]), np.zeros(2))}, {})
    with pytest.raises(ValueError, match="stage .*, which is not in the plan"):
        render_page(PlanPage("t", chain(1, 2).plan, run(case)))
