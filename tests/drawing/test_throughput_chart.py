"""Charts of jobs under failures: every job has its line, its mean and its shares."""

from __future__ import annotations

import pytest
from matplotlib.patches import Rectangle

from hf_mmparallel.drawing import throughput_chart as draw
from hf_mmparallel.drawing.throughput_chart import ThroughputRow, throughput_png
from hf_mmparallel.resilience.trace_replay import CAUSES

ROWS = [
    ThroughputRow("in place", [10.0, 8.0, 9.0], 9.0, {"computing": 0.9, "lost": 0.1}),
    ThroughputRow("restart", [10.0, 0.0, 2.0], 4.0, {"computing": 0.5, "restarting": 0.3, "idle": 0.2}),
]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list:
    """The figures that are saved."""
    from matplotlib.figure import Figure

    saved, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path: (saved.append(self), save(self, path)))
    return saved


@pytest.mark.parametrize(("end_s", "unit"), [(90.0, "s"), (1800.0, "minutes"), (36000.0, "hours"), (9e5, "days")])
def test_a_chart_has_all_jobs(figures, tmp_path, end_s: float, unit: str) -> None:
    throughput_png(ROWS, [(0.0, 4), (end_s / 2, 3)], [end_s / 2], end_s, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    bars, nodes, rates = figures[0].axes
    assert nodes.get_xlabel() == f"time ({unit})"
    assert [patch.get_data().values.tolist() for patch in rates.patches] == [list(row.rates) for row in ROWS]
    assert rates.get_ylim()[1] > 10.0 and nodes.get_ylim()[1] > 4
    widths = [patch.get_width() for patch in bars.patches if isinstance(patch, Rectangle)]
    assert widths == pytest.approx([row.shares.get(cause, 0.0) for row in ROWS for cause in draw.CAUSE_COLORS])
    texts = [text.get_text() for legend in figures[0].legends for text in legend.get_texts()]
    assert texts[:3] == ["in place: 9 on average", "restart: 4 on average", "nodes lost"]


def test_every_cause_has_a_color() -> None:
    assert tuple(draw.CAUSE_COLORS) == CAUSES


def test_nothing_can_be_drawn(tmp_path) -> None:
    throughput_png([ThroughputRow("none", [0.0], 0.0, {})], [], [], 0.0, tmp_path / "out.png")
