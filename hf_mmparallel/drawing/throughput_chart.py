"""Charts of jobs under failures: throughput over time, number of nodes, and what the time of nodes goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .timeline import COLORS

CAUSE_COLORS = {
    "computing": "#2E9B6B",
    "redundant": "#A9D6C1",
    "lost": "#C2476B",
    "copying": "#2F6DB5",
    "saving": "#8A5BB8",
    "restarting": "#E0762B",
    "idle": "#D5D8DD",
}
_GREY, _INK, _PAPER = "#444444", "#222222", "#F3F4F6"
_UNITS = ((86400.0 * 3, 86400.0, "days"), (3600.0 * 3, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "s"))


@dataclass(frozen=True)
class ThroughputRow:
    """A job in a chart."""

    name: str
    rates: Sequence[float]  # samples per second in windows of equal length, from 0 to the end
    mean: float  # samples per second
    shares: Mapping[str, float]  # cause -> share of the time of all nodes


def throughput_png(
    rows: Sequence[ThroughputRow],
    nodes: Sequence[tuple[float, int]],  # time in seconds, and the number of nodes from then on
    losses_s: Sequence[float],  # times at which nodes are lost
    end_s: float,  # of the time axis
    path: str | Path,
    title: str = "Throughput under failures",
) -> None:
    """
    Draws throughput with losses of nodes, below it their number and a bar per job with shares of its nodes' time.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars_inches = 0.4 * len(rows)
    height = 6.2 + bars_inches
    figure = Figure(figsize=(12, height), dpi=140)
    FigureCanvasAgg(figure)

    def axis_at(bottom: float, inches: float) -> Any:
        return figure.add_axes((0.125, bottom / height, 0.85, inches / height))

    bar_axis, node_axis = axis_at(0.55, bars_inches), axis_at(bars_inches + 1.6, 0.85)
    rate_axis = axis_at(bars_inches + 2.6, 2.65)
    unit_s, unit = time_unit(end_s)
    times = [end_s / unit_s * index / len(rows[0].rates) for index in range(len(rows[0].rates) + 1)]
    for row, color in zip(rows, COLORS, strict=False):
        label = f"{row.name}: {_rate(row.mean)} on average"
        rate_axis.stairs(row.rates, times, color=color, linewidth=1.6, label=label, baseline=None, zorder=3)
        rate_axis.axhline(row.mean, color=color, linewidth=0.9, linestyle=(0, (4, 3)), zorder=2)
    rate_axis.set_ylim(0, 1.08 * max([rate for row in rows for rate in row.rates], default=0.0) or 1.0)
    rate_axis.set_ylabel("samples/s", fontsize=9.5, color=_GREY)
    steps = [*nodes, (end_s, nodes[-1][1] if nodes else 0)]
    node_axis.fill_between(
        [time_s / unit_s for time_s, _ in steps], [count for _, count in steps], step="post", color="#B9C0CA", zorder=2
    )
    node_axis.set_ylim(0, 1.12 * max([count for _, count in steps], default=0) or 1.0)
    node_axis.set_ylabel("nodes", fontsize=9.5, color=_GREY)
    node_axis.set_xlabel(f"time ({unit})", fontsize=9.5, color=_GREY)
    for axis in (rate_axis, node_axis):
        axis.set_xlim(0, end_s / unit_s or 1.0)
        axis.vlines(
            [time_s / unit_s for time_s in losses_s], *axis.get_ylim(), color="#C2476B", linewidth=0.5, alpha=0.3
        )
    rate_axis.set_xticklabels([])
    _draw_shares(bar_axis, rows)
    for axis in (rate_axis, node_axis, bar_axis):
        style_axis(axis)
    _draw_titles(figure, rate_axis, title, bool(losses_s), bars_inches)
    figure.savefig(path)


def _draw_shares(axis: Any, rows: Sequence[ThroughputRow]) -> None:
    """A bar for each job, with the shares of its nodes' time by cause."""
    for y, row in enumerate(rows):
        left = 0.0
        for cause, color in CAUSE_COLORS.items():
            share = row.shares.get(cause, 0.0)
            axis.barh(y, share, 0.62, left=left, color=color, zorder=2)
            if share > 0.045:
                ink = _INK if cause in ("redundant", "idle") else "white"
                axis.text(left + share / 2, y, f"{share:.0%}", ha="center", va="center", fontsize=8, color=ink)
            left += share
    axis.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_xlabel("time of all nodes", fontsize=9.5, color=_GREY)


def _draw_titles(figure: Any, rate_axis: Any, title: str, has_losses: bool, bars_inches: float) -> None:
    """The title, the names of the lines, and the colors of causes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    inches = figure.get_size_inches()[1]
    figure.text(0.012, 1 - 0.3 / inches, title, fontsize=13, fontweight="bold", color=_INK)
    handles, _ = rate_axis.get_legend_handles_labels()
    if has_losses:
        handles.append(Line2D([], [], color="#C2476B", linewidth=0.8, alpha=0.6, label="nodes lost"))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.115, 1 - 0.42 / inches),
        ncols=4,
        frameon=False,
        fontsize=9,
        columnspacing=1.4,
    )
    figure.legend(
        handles=[Patch(facecolor=color, label=cause) for cause, color in CAUSE_COLORS.items()],
        loc="lower left",
        bbox_to_anchor=(0.115, (0.58 + bars_inches) / inches),
        ncols=len(CAUSE_COLORS),
        frameon=False,
        fontsize=8.5,
        handlelength=1.1,
        columnspacing=1.2,
    )


def time_unit(end_s: float) -> tuple[float, str]:
    """The unit of a time axis, in seconds, and its name."""
    return next((size, name) for least, size, name in _UNITS if end_s >= least)


def style_axis(axis: Any) -> None:
    """Colors and grid as in the other charts."""
    axis.tick_params(labelsize=8.5, colors=_GREY, length=0)
    axis.set_facecolor(_PAPER)
    axis.grid(axis="both", color="white", linewidth=1.0, zorder=0)
    axis.set_axisbelow(True)
    for side in axis.spines.values():
        side.set_visible(False)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
