"""Pictures show every task, in the right place."""

import json

import pytest

from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, resolve_plan
from hf_mmparallel.schedule import Simulation, Span, Task, build_program, simulate
from hf_mmparallel.schedule.draw import chrome_trace, gantt_png, gantt_text, rank_ranges
from tests.schedule.builders import chain, make_step, module_spec


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    case = chain(3, 4)
    return simulate(case.plan, build_program(case.plan, case.step, case.groups))


def test_text(simulation):
    assert simulation.iteration_ms == 18
    head, *rows = gantt_text(simulation, width=18).splitlines()
    assert head.startswith("18 ms, bubble 33.3%; digits")
    assert rows == [
        "rank 0  vision s0         |012....aa3bb.cc.dd|",
        "rank 1  language_model s0 |.01..aa2bb3cc.dd..|",
        "rank 2  language_model s1 |..0aa1bb2cc3dd....|",
    ]


def test_text_merges_equal_ranks_and_cuts_off_the_rest():
    spec = ModelSpec({LANGUAGE_MODEL: module_spec(LANGUAGE_MODEL)})
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=30, pp_size=2)})
    rows = [[[2 * d], [2 * d + 1]] for d in range(30)]
    simulation = simulate(plan, build_program(plan, make_step({LANGUAGE_MODEL: rows}), []))
    text = gantt_text(simulation, width=20).splitlines()
    assert len(text) == 3 and text[1].startswith("ranks 0, 2, ... (30 ranks)  language_model s0 |")
    spans = [Span(rank, Task("fwd", LANGUAGE_MODEL, 0, 0, 0), rank, rank + 1) for rank in range(40)]
    assert gantt_text(spans, width=40).splitlines()[-1] == "... and 8 more ranks"


def test_empty_timelines_can_be_drawn(tmp_path):
    gantt_png([], tmp_path / "empty.png")
    assert gantt_text([]).startswith("no tasks")


def test_png_holds_both_timelines(simulation, tmp_path):
    measured = [Span(s.rank, s.task, 2 * s.start_ms, 2 * s.end_ms) for s in simulation.spans]
    sizes = []
    for name, other in (("one.png", None), ("two.png", measured)):
        gantt_png(simulation, tmp_path / name, other)
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(data[20:24], "big"))
    assert sizes[1] > sizes[0] * 1.3


def test_trace_has_every_span_of_both_timelines(simulation, tmp_path):
    measured = [Span(s.rank, s.task, 2 * s.start_ms, 2 * s.end_ms) for s in simulation.spans]
    chrome_trace(simulation, tmp_path / "trace.json", measured)
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for process, spans in enumerate((simulation.spans, measured)):
        found = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["pid"] == process]
        assert found == [(s.rank, str(s.task), 1e3 * s.start_ms, 1e3 * (s.end_ms - s.start_ms)) for s in spans]


def test_rank_ranges():
    assert rank_ranges([3, 0, 1, 2]) == "0-3"
    assert rank_ranges([0, 2, 3, 9]) == "0, 2-3, 9"
    assert rank_ranges(range(0, 20, 2)) == "0, 2, ... (10 ranks)"
