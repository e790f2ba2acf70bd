"""Charts of the balance of a step's microbatches, for one or more arrangements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..arrange.balance import Balance, Times
from .gantt import COLORS, tint

MAX_REPLICAS = 8
BEFORE, MEASURED = "before, contiguous", "measured"
_DEFERRED = "deferred from the microbatch before"
_GREY, _INK = "#444444", "#222222"


def balance_png(
    panels: Mapping[str, Balance],  # heading of a column -> its balance, all of the same modules
    path: str | Path | BinaryIO,
    title: str = "Workload of each microbatch",
    own_scale: Sequence[str] = (),  # columns that do not share the scale of the others
    unit: str = "ms",
) -> None:
    """Draws a bar per microbatch, a column per arrangement, a strip per replica; deferred is dark, the mean dashed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first = next(iter(panels.values()))
    colors = {name: COLORS[index % len(COLORS)] for index, name in enumerate(first.forward_ms)}
    strips = {name: min(len(times), MAX_REPLICAS) for name, times in first.forward_ms.items()}
    inches = {name: max(0.95, (0.52 if sum(strips.values()) > 6 else 0.8) * count) for name, count in strips.items()}
    head, between = 1.0, 0.62
    height = head + sum(inches.values()) + between * len(inches)
    figure = Figure(figsize=(max(7.0, 5.6 * len(panels)), height), dpi=140)
    FigureCanvasAgg(figure)
    outer = figure.add_gridspec(
        len(strips),
        len(panels),
        height_ratios=list(inches.values()),
        left=0.075 * 2 / len(panels),
        right=0.97,
        top=1 - head / height,
        bottom=0.5 / height,
        hspace=between * len(inches) / sum(inches.values()),
        wspace=0.16,
    )
    for column, (heading, balance) in enumerate(panels.items()):
        for row, name in enumerate(strips):
            grid = outer[row, column].subgridspec(strips[name], 1, hspace=0.12)
            axes = [figure.add_subplot(grid[replica]) for replica in range(strips[name])]
            shared = [heading] if heading in own_scale else [key for key in panels if key not in own_scale]
            limits = (
                max(len(times) for panel in panels.values() for times in panel.forward_ms[name]),
                1.08 * max(times.max(initial=0.0) for key in shared for times in panels[key].forward_ms[name]) or 1.0,
            )
            _draw_module(axes, balance, name, colors[name], limits, unit)
            if row == 0:
                text = _heading(heading, balance)
                axes[0].annotate(
                    text, (0, 1), (0, 26), "axes fraction", "offset points", color=_INK, fontsize=10.5, weight="bold"
                )
            if row == len(strips) - 1:
                axes[-1].set_xlabel("microbatch", fontsize=9, color=_GREY)
    figure.text(0.012, 1 - 0.3 / height, title, fontsize=13, fontweight="bold", color=_INK)
    _draw_legend(figure, [colors[name] for name in first.deferred_ms if _is_deferred(panels.values(), name)])
    figure.savefig(path)


def _heading(heading: str, balance: Balance) -> str:
    share = f", {balance.deferred_fraction:.0%} deferred" if balance.deferred_fraction else ""
    count = balance.num_microbatches
    return f"{heading}: {count} microbatch{'es' if count > 1 else ''}{share}"


def number_text(value: float) -> str:
    """A number with three digits: `1,093`, `2.53`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _is_deferred(balances: Any, name: str) -> bool:
    """Whether any arrangement defers samples to a microbatch of a module."""
    return any(part.any() for balance in balances for part in balance.deferred_ms.get(name, ()))


def _draw_module(
    axes: list[Any], balance: Balance, name: str, color: str, limits: tuple[int, float], unit: str
) -> None:
    """Draws the strips of one module's replicas, for up to `limits[0]` microbatches and times up to `limits[1]`."""
    replicas: Times = balance.forward_ms[name]
    mean = float(np.concatenate(replicas).mean())
    for replica, axis in enumerate(axes):
        times = replicas[replica]
        positions = np.arange(len(times))
        axis.bar(positions, times, 0.84, color=tint(color, 0.45), zorder=2)
        if name in balance.deferred_ms:
            axis.bar(positions, balance.deferred_ms[name][replica], 0.84, color=color, zorder=3)
        axis.axhline(mean, color=_INK, linewidth=0.7, linestyle=(0, (4, 3)), zorder=4)
        _style(axis, limits, last=replica == len(axes) - 1)
        if len(replicas) > 1:
            axis.annotate(
                f"r{replica}",
                (1, 0.5),
                (4, 0),
                "axes fraction",
                "offset points",
                va="center",
                fontsize=7.5,
                color=_GREY,
            )
    largest = "largest replica" if len(replicas) == len(axes) else f"largest of {len(replicas)} replicas"
    spread = f", {largest} +{balance.replica_excess(name):.1%}" if len(replicas) > 1 else ""
    text = f"{name}: mean {number_text(mean)} {unit}, std {number_text(balance.std_ms(name))} {unit}{spread}"
    axes[0].set_title(text, loc="left", fontsize=9, color=_INK, pad=4)


def _style(axis: Any, limits: tuple[int, float], last: bool) -> None:
    """Sets scales, ticks and colors as in the timeline chart."""
    axis.set_xlim(-0.6, limits[0] - 0.4)
    axis.set_ylim(0, limits[1])
    step = max(1, -(-limits[0] // 16))
    axis.set_xticks(range(0, limits[0], step), [str(i) for i in range(0, limits[0], step)] if last else [])
    axis.locator_params(axis="y", nbins=2)
    axis.tick_params(labelsize=7.5, colors=_GREY, length=0)
    axis.set_facecolor("#F3F4F6")
    axis.grid(axis="y", color="white", linewidth=1.0, zorder=0)
    axis.set_axisbelow(True)
    for side in axis.spines.values():
        side.set_visible(False)


def _draw_legend(figure: Any, deferring: list[str]) -> None:
    """Draws the legend of dark bars and the dashed line, in the upper right corner."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=color, label=_DEFERRED) for color in deferring]
    handles.append(Line2D([], [], color=_INK, linewidth=0.9, linestyle=(0, (4, 3)), label="mean"))
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False, fontsize=9, borderaxespad=0.8)
