"""A chart of a run in which ranks were lost or joined: throughput over time, each change, and the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LINE, _BAND, _GREY, _INK, _PAPER = "#2F6DB5", "#C2476B", "#444444", "#222222", "#F3F4F6"
_UNITS = ((86400.0 * 3, 86400.0, "days"), (3600.0 * 3, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "s"))
_MAX_PIECES = 300  # of the line
_MAX_LABELS = 40  # the longest changes have one
_SPACING = 0.022  # between two labels, as a share of the width


@dataclass(frozen=True)
class RecoveryMark:
    """A change of the ranks in a chart."""

    start_s: float  # when a loss was noticed, or others were let in, since the run began
    took_s: float  # until the run went on
    num_ranks: int  # from then on
    label: str  # who was lost or joined


def recovery_png(
    step_ends_s: Sequence[float],  # since the run began
    samples_per_step: int,
    num_ranks: int,  # at the start
    marks: Sequence[RecoveryMark],  # in order
    path: str | Path,
    title: str = "Training while ranks change",
) -> None:
    """Draws samples per second over time with a mark for each change of the ranks, and below it their number."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.9), dpi=140)
    FigureCanvasAgg(figure)
    rate_axis, rank_axis = figure.add_axes((0.07, 0.31, 0.915, 0.45)), figure.add_axes((0.07, 0.09, 0.915, 0.155))
    end_s = max([*step_ends_s, *(mark.start_s + mark.took_s for mark in marks)], default=1.0)
    unit_s, unit = next((size, name) for least, size, name in _UNITS if end_s >= least)
    edges, rates = throughput(step_ends_s, samples_per_step)
    rate_axis.stairs(rates, [edge / unit_s for edge in edges], color=_LINE, linewidth=1.4, baseline=None, zorder=3)
    rate_axis.set_ylim(0, 1.08 * max(rates, default=0.0) or 1.0)
    rate_axis.set_ylabel("samples/s", fontsize=9.5, color=_GREY)
    rate_axis.set_xticklabels([])
    times = [0.0, *(mark.start_s for mark in marks), end_s]
    counts = [num_ranks, *(mark.num_ranks for mark in marks)]
    rank_axis.stairs(counts, [time_s / unit_s for time_s in times], fill=True, color="#B9C0CA", zorder=2)
    rank_axis.set_ylim(0, 1.12 * max(counts))
    rank_axis.locator_params(axis="y", integer=True)
    rank_axis.set_ylabel("ranks", fontsize=9.5, color=_GREY)
    rank_axis.set_xlabel(f"time ({unit})", fontsize=9.5, color=_GREY)
    for axis in (rate_axis, rank_axis):
        axis.set_xlim(0, end_s / unit_s)
        _style_axis(axis)
        for mark in marks:
            start, stop = mark.start_s / unit_s, (mark.start_s + mark.took_s) / unit_s
            axis.axvspan(start, stop, color=_BAND, linewidth=0.8, alpha=0.55, zorder=1)
    _label(rate_axis, marks, end_s)
    lost_s = sum(mark.took_s for mark in marks)
    many = "1 change" if len(marks) == 1 else f"{len(marks)} changes"
    figure.text(0.012, 0.955, title, fontsize=13, fontweight="bold", color=_INK)
    text = f"{many}, {lost_s:,.2f} s from losses and joins until the run went on; {num_ranks} ranks at first, "
    figure.text(0.012, 0.92, text + f"{counts[-1]} at the end", fontsize=9.5, color=_GREY)
    figure.savefig(path)


def _style_axis(axis: Any) -> None:
    """Colors and grid as in the other charts."""
    axis.tick_params(labelsize=8.5, colors=_GREY, length=0)
    axis.set_facecolor(_PAPER)
    axis.grid(axis="both", color="white", linewidth=1.0, zorder=0)
    axis.set_axisbelow(True)
    for side in axis.spines.values():
        side.set_visible(False)


def throughput(step_ends_s: Sequence[float], samples_per_step: int) -> tuple[list[float], list[float]]:
    """Returns times, and samples per second between each two; of several steps at a time in a long run."""
    stride = -(-len(step_ends_s) // _MAX_PIECES) or 1
    counts = [*range(0, len(step_ends_s), stride), len(step_ends_s)]
    edges = [0.0 if count == 0 else step_ends_s[count - 1] for count in counts]
    pieces = zip(counts, counts[1:], edges, edges[1:], strict=False)
    rates = [samples_per_step * (stop - first) / max(end - begin, 1e-9) for first, stop, begin, end in pieces]
    return edges, rates


def _label(axis: Any, marks: Sequence[RecoveryMark], end_s: float) -> None:
    """Names who was lost or joined and for how long it stopped the run, above the marks and apart from each other."""
    longest = sorted(range(len(marks)), key=lambda index: -marks[index].took_s)[:_MAX_LABELS]
    free = 0.95  # from the right, where there is room for the next one
    for index in sorted(longest, reverse=True):
        mark = marks[index]
        x = min(mark.start_s / end_s, free - _SPACING)
        free = x
        axis.annotate(
            f"{mark.label}: {mark.took_s:.2f} s",
            (x, 1.0),
            (2, 4),
            xycoords="axes fraction",
            textcoords="offset points",
            rotation=28,
            ha="left",
            va="bottom",
            fontsize=7.5,
            color=_BAND,
            annotation_clip=False,
        )
