"""Pictures show every task, in the right place."""

import json
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from PIL import Image, ImageColor

from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, resolve_plan, sync_groups
from hf_mmparallel.planning.gantt import (
    KINDS,
    SUM_COLOR,
    chrome_trace,
    column_shares,
    gantt_png,
    gantt_text,
    lane_text,
    rank_ranges,
)
from hf_mmparallel.schedule import Span, Task, Timeline, TransferSpan
from tests.schedule.builders import cases, chain, make_step, module_spec, timeline_of


def simulated(num_replicas: int, **more: float) -> Timeline:
    """Replicas of a language model of two stages, with two microbatches each."""
    spec = ModelSpec({LANGUAGE_MODEL: module_spec(LANGUAGE_MODEL)})
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=num_replicas, pp_size=2)})
    step = make_step({LANGUAGE_MODEL: [[[2 * d], [2 * d + 1]] for d in range(num_replicas)]})
    return timeline_of(plan, step, sync_groups(spec, plan), **more)


@pytest.fixture(scope="module")
def simulation() -> Timeline:
    case = chain(3, 4)
    return timeline_of(case.plan, case.step, case.sync_groups)


@pytest.fixture(scope="module")
def with_sums() -> Timeline:
    """Sums of 4 ms at the ends of two stages of two replicas, those of the first stage last."""
    return simulated(2, sync_ms=4.0)


def trace_of(simulation: Timeline, *more) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        chrome_trace(simulation, Path(folder) / "trace.json", *more)
        events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def pixels_of(simulation: Timeline, folder: Path) -> dict:
    """Color -> how many pixels of the picture have it."""
    gantt_png(simulation, folder / "picture.png")
    with Image.open(folder / "picture.png") as picture:
        return {color: count for count, color in picture.convert("RGB").getcolors(10**7) or []}


def test_text(simulation):
    assert simulation.iteration_ms == 18
    head, *rows = gantt_text(simulation, width=18).splitlines()
    assert head.startswith("18 ms without the optimizer's step, bubble 33.3%; 0-9: forward")
    assert rows == [
        "rank 0  vision s0         |012....aa3bb.cc.dd|",
        "rank 1  language_model s0 |.01..aa2bb3cc.dd..|",
        "rank 2  language_model s1 |..0aa1bb2cc3dd....|",
    ]


def test_text_merges_equal_ranks_and_cuts_off_the_rest():
    text = gantt_text(simulated(30), width=20).splitlines()
    assert len(text) == 3 and text[1].startswith("ranks 0, 2, ... (30 ranks)  language_model s0 |")
    spans = [Span(rank, Task("fwd", LANGUAGE_MODEL, 0, 0, 0), rank, rank + 1) for rank in range(40)]
    assert gantt_text(spans, width=40).splitlines()[-1] == "... and 8 more ranks"


def test_both_timelines_are_drawn_and_empty_ones_too(simulation, tmp_path):
    measured = [Span(s.rank, s.task, 2 * s.start_ms, 2 * s.end_ms) for s in simulation.spans]
    heights = []
    for other in (None, measured):
        gantt_png(simulation, tmp_path / "out.png", other)
        with Image.open(tmp_path / "out.png") as picture:
            heights.append(picture.height)
    assert heights[1] > heights[0] * 1.3
    events = trace_of(simulation, measured)
    for process, spans in enumerate((simulation.spans, measured)):
        found = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["pid"] == process]
        assert found == [(s.rank, str(s.task), 1e3 * s.start_ms, 1e3 * (s.end_ms - s.start_ms)) for s in spans]
    gantt_png([], tmp_path / "empty.png")
    assert gantt_text([]).startswith("no tasks")


@settings(max_examples=60)
@given(cases(), st.integers(0, 2**32 - 1), st.floats(0, 5))
def test_events_of_a_track_never_overlap(case, seed, sync_ms):
    rng = np.random.default_rng(seed)
    costs: dict = {}

    def cost(task):
        return costs.setdefault(task, float(rng.uniform(0, 3)))

    simulation = timeline_of(case.plan, case.step, case.sync_groups, cost, 0.1, sync_ms)
    events = trace_of(simulation)
    assert len(events) == len(simulation.spans) + len(simulation.sums)
    # As Chrome reads them, in microseconds, and as Perfetto does, cut to whole nanoseconds.
    for exact in (lambda us: us, lambda us: int(us * 1000.0)):
        tracks: dict = {}
        for event in events:
            start, length = exact(event["ts"]), exact(event["dur"])
            tracks.setdefault(event["tid"], []).append((start, start + length))
        for track in tracks.values():
            assert all(end <= start for (_, end), (start, _) in pairwise(sorted(track)))


def test_a_picture_ends_where_its_title_says(with_sums, tmp_path, monkeypatch):
    assert with_sums.iteration_ms == max(span.end_ms for span in with_sums.sums) == 13
    assert with_sums.iteration_ms > max(span.end_ms for span in with_sums.spans) == 9
    assert sorted({(s.start_ms, s.end_ms) for s in with_sums.sums}) == [(7, 11), (9, 13)]
    head, first, *_ = gantt_text(with_sums, width=13).splitlines()
    assert head.startswith("13 ms without ") and "=: gradient sum" in head
    assert first.endswith("|01..aa.bb====|")
    limits, set_xlim = [], Axes.set_xlim
    monkeypatch.setattr(
        Axes, "set_xlim", lambda self, *args, **more: limits.append(args) or set_xlim(self, *args, **more)
    )
    pixels, without = pixels_of(with_sums, tmp_path), simulated(2)
    assert (0, 13) in limits
    assert max(event["ts"] + event["dur"] for event in trace_of(with_sums)) == 13_000
    grey = ImageColor.getrgb(SUM_COLOR)
    assert pixels[grey] > 2000 > 10 * pixels_of(without, tmp_path).get(grey, 0)


def test_rank_ranges():
    assert rank_ranges([3, 0, 1, 2]) == "0-3"
    assert rank_ranges([0, 2, 3, 9]) == "0, 2-3, 9"
    assert rank_ranges(range(0, 20, 2)) == "0, 2, ... (10 ranks)"


def communication(rank: int) -> list[TransferSpan]:
    """A gather beside the first task and partly exposed, a sum after the last one, and the optimizer."""
    return [
        TransferSpan(rank, 0.0, 1.0, "gather", False),
        TransferSpan(rank, 1.0, 1.5, "gather", True),
        TransferSpan(rank, 9.0, 13.0, "sum", True),
        TransferSpan(rank, 13.0, 14.0, "update", True),
        TransferSpan(rank, 14.0, 16.0, "gather", True),
    ]


def test_columns_have_shares_of_the_communication():
    shares = column_shares(communication(0), 16.0, 16)
    assert shares["gather", False].tolist() == [1.0] + [0.0] * 15
    assert shares["gather", True].tolist() == [0.0, 0.5] + [0.0] * 12 + [1.0, 1.0]
    assert shares["sum", True].tolist() == [0.0] * 9 + [1.0] * 4 + [0.0] * 3
    whole = {kind: 16.0 * share.mean() for kind, share in column_shares(communication(0), 16.0, 7).items()}
    assert whole == pytest.approx(
        {("gather", False): 1.0, ("gather", True): 2.5, ("sum", True): 4.0, ("update", True): 1.0}
    )
    assert lane_text(communication(0), 16.0, 8) == "-....==="


def test_lanes_are_below_the_tasks_in_text_picture_and_trace(with_sums, tmp_path):
    drawn = replace(with_sums, transfers=communication)
    head, first, lane, *_ = gantt_text(drawn, width=16).splitlines()
    assert "-: communication beside tasks" in head
    assert first.endswith("|01..aa.bb====...|") and lane.endswith("|-........=======|")
    pixels = pixels_of(drawn, tmp_path)
    for kind in (("gather", False), ("gather", True), ("sum", True), ("update", True)):
        assert pixels.get(ImageColor.getrgb(KINDS[kind][0]), 0) > 200, kind
    found = [(e["tid"], e["cat"], e["ts"], e["dur"]) for e in trace_of(drawn) if e["pid"] == 1]
    ranks = sorted({rank for rank, *_ in found})
    assert ranks in ([0, 1], [0, 2]), "one of equal ranks"
    assert found == [
        (s.rank, s.op, 1e3 * s.start_ms, 1e3 * (s.end_ms - s.start_ms)) for rank in ranks for s in communication(rank)
    ]
