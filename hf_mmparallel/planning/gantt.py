"""Charts of a program over time: text, PNG, and a trace for Chrome and Perfetto."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..schedule import Span, SumSpan, Timeline, TransferSpan
from ..schedule.kinds import KINDS as TASK_KINDS
from ..schedule.kinds import Task

# Lanes below the tasks of a rank: communication of weights and gradients over time, as shares of columns.

Kind = tuple[str, bool]  # what is sent, and whether the rank computes nothing beside it

# kind -> its color and its name in the legend
KINDS: dict[Kind, tuple[str, str]] = {
    ("gather", False): ("#9CCFD4", "gathers weights, beside computation"),
    ("gather", True): ("#0E7C86", "gathers weights, exposed"),
    ("sum", False): ("#D3B8C4", "sums gradients, beside computation"),
    ("sum", True): ("#7B2D4E", "sums gradients, exposed"),
    ("update", True): ("#C9CCD1", "optimizer's update"),
}
NUM_COLUMNS = 1500


def column_shares(spans: Sequence[TransferSpan], end_ms: float, num_columns: int = NUM_COLUMNS) -> dict[Kind, NDArray]:
    """Returns kind -> share, `[num_columns]` from 0 to 1, that communication takes of columns from 0 to `end_ms`."""
    edges = np.linspace(0.0, end_ms, num_columns + 1)
    result = {}
    for kind in KINDS:
        times = np.array([(s.start_ms, s.end_ms) for s in spans if (s.op, s.is_exposed) == kind])
        if len(times):
            total_ms = np.cumsum(times[:, 1] - times[:, 0])
            until = np.stack([total_ms - (times[:, 1] - times[:, 0]), total_ms], axis=1)
            result[kind] = np.diff(np.interp(edges, times.ravel(), until.ravel())) * num_columns / end_ms
    return result


def lane_text(spans: Sequence[TransferSpan], end_ms: float, width: int) -> str:
    """A lane as text: `-` where most of a column communicates beside computation, `=` beside none, `.` elsewhere."""
    exposed, hidden = np.zeros(width), np.zeros(width)
    for (_, is_exposed), share in column_shares(spans, end_ms, width).items():
        (exposed if is_exposed else hidden).__iadd__(share)
    idle = 1 - exposed - hidden
    letters = np.where(exposed > np.maximum(hidden, idle), "=", np.where(hidden > idle, "-", "."))
    return "".join(letters.tolist())


def draw_lane(axis: Any, spans: Sequence[TransferSpan], end_ms: float, low: float, high: float) -> None:
    """Draws a lane on a matplotlib axis with the time in ms, from 0 to `end_ms`."""
    edges = np.linspace(0.0, end_ms, NUM_COLUMNS + 1)
    below = np.full(NUM_COLUMNS, low)
    for kind, share in column_shares(spans, end_ms).items():
        above = below + (high - low) * share
        axis.stairs(above, edges, baseline=below, fill=True, color=KINDS[kind][0], linewidth=0, zorder=2)
        below = above


COLORS = ("#2F6DB5", "#E0762B", "#2E9B6B", "#8A5BB8", "#C2476B", "#7A6A53")
SUM_COLOR = "#8C929B"
MAX_ROWS = 64
TICK_MS = 0.125e-3  # resolution of a trace; readers convert times to whole nanoseconds
AnyTimeline = Timeline | Sequence[Span]  # predicted, or measured


@dataclass(frozen=True)
class _Row:
    """One row of a chart: ranks that run the same tasks at the same times."""

    ranks: tuple[int, ...]
    spans: tuple[Span, ...]
    sums: tuple[SumSpan, ...] = ()

    @property
    def label(self) -> str:
        stages = dict.fromkeys((s.task.module, s.task.stage) for s in self.spans)
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {rank_ranges(self.ranks)}"
        return f"{ranks}  " + ", ".join(f"{module} s{stage}" for module, stage in stages) if stages else ranks


def rank_ranges(ranks: Sequence[int]) -> str:
    """`0-3, 8` for consecutive ranks, cut off after the second range."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    if len(texts) > 3:
        texts = [*texts[:2], f"... ({len(ranks)} ranks)"]
    return ", ".join(texts)


def _spans(timeline: AnyTimeline) -> Sequence[Span]:
    return timeline.spans if isinstance(timeline, Timeline) else timeline


def _sums(timeline: AnyTimeline) -> Sequence[SumSpan]:
    return timeline.sums if isinstance(timeline, Timeline) else ()


def _end_ms(timeline: AnyTimeline) -> float:
    """The end of the last task or gradient sum."""
    return max((span.end_ms for span in (*_spans(timeline), *_sums(timeline))), default=0.0)


def _latest_ms(timeline: AnyTimeline, lanes: Sequence[Sequence[TransferSpan]]) -> float:
    """The end of the last task, gradient sum, or communication in a lane."""
    return max([_end_ms(timeline), *(span.end_ms for lane in lanes for span in lane)])


def _lanes(timeline: AnyTimeline, rows: Sequence[_Row]) -> list[Sequence[TransferSpan]]:
    """The communication of the first rank of each row, with its update, if there is any and it is known."""
    empty: list[Sequence[TransferSpan]] = [()] * len(rows)
    if not isinstance(timeline, Timeline) or timeline.transfers is None:
        return empty
    lanes = [timeline.transfers(row.ranks[0]) for row in rows]
    return lanes if any(span.op != "update" for lane in lanes for span in lane) else empty


def _rows(timeline: AnyTimeline, merge_above: int) -> list[_Row]:
    """A row per rank; ranks with equal rows are merged if there are more than `merge_above`."""
    count = timeline.num_ranks if isinstance(timeline, Timeline) else 0
    by_rank: dict[int, list[Span]] = {rank: [] for rank in range(count)}
    for span in _spans(timeline):
        by_rank.setdefault(span.rank, []).append(span)
    sums: dict[int, list[SumSpan]] = {rank: [] for rank in by_rank}
    for span in _sums(timeline):
        sums[span.rank].append(span)
    if len(by_rank) <= merge_above:
        return [_Row((rank,), tuple(by_rank[rank]), tuple(sums[rank])) for rank in sorted(by_rank)]
    merged: dict[tuple, list[int]] = {}
    for rank in sorted(by_rank):
        tasks = tuple(
            (
                s.task.kind,
                s.task.module,
                s.task.stage,
                s.task.microbatch,
                round(s.start_ms, 6),
                round(s.busy_end_ms, 6),
            )
            for s in by_rank[rank]
        )
        key = tasks, tuple((round(s.start_ms, 6), round(s.end_ms, 6)) for s in sums[rank])
        merged.setdefault(key, []).append(rank)
    return [_Row(tuple(ranks), tuple(by_rank[ranks[0]]), tuple(sums[ranks[0]])) for ranks in merged.values()]


def _summary(timeline: AnyTimeline) -> str:
    """Duration and bubble of a timeline, as text."""
    spans = _spans(timeline)
    if isinstance(timeline, Timeline):
        return f"{_ms(timeline.iteration_ms)} without the optimizer's step, bubble {timeline.bubble_fraction:.1%}"
    if not spans:
        return "no tasks"
    length = max(s.end_ms for s in spans) - min(s.start_ms for s in spans)
    ranks = len({s.rank for s in spans})
    busy = sum(s.end_ms - s.start_ms for s in spans)
    return f"{_ms(length)}, bubble {1 - busy / (length * ranks) if length else 0.0:.1%}"


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.4g} ms"


def gantt_text(timeline: AnyTimeline, width: int = 100, max_rows: int = 32) -> str:
    """
    Draws a timeline as text: a digit is a microbatch's forward, a letter its backward (`a` for 0) and a capital its
    weight gradients if they are apart, `=` a gradient sum.
    Where it is known, a line below has the communication of weights and gradients: `-` beside tasks, `=` beside none.
    """
    # equal rows are merged above `max_rows`, then rows are cut off
    rows = _rows(timeline, max_rows)
    lanes = _lanes(timeline, rows[:max_rows])
    end = _latest_ms(timeline, lanes)
    words = {span.task.kind for span in _spans(timeline)}
    labels: dict[str, list[str]] = {}  # by the characters of microbatches
    for kind in (kind for word, kind in TASK_KINDS.items() if word in words):
        labels.setdefault(f"{kind.digits[0]}-{kind.digits[-1]}", []).append(kind.label)
    letters = ", ".join(f"{letters}: {' or '.join(own)}" for letters, own in labels.items())
    sums = ", =: gradient sum" if _sums(timeline) else ""
    below = "; below, -: communication beside tasks, =: exposed" if any(lanes) else ""
    lines = [f"{_summary(timeline)}; {letters} of microbatch 0-9{sums}, .: idle{below}"]
    shown = rows[:max_rows]
    indent = max((len(row.label) for row in shown), default=0)
    for row, lane in zip(shown, lanes, strict=True):
        cells = ["."] * width
        bars = [(span.start_ms, span.end_ms, "=") for span in row.sums]  # short tasks may cover these
        bars += [(span.start_ms, span.busy_end_ms, _letter(span.task)) for span in row.spans]
        for start_ms, end_ms, letter in bars:
            first = min(int(start_ms / end * width + 1e-6), width - 1)
            last = max(int(end_ms / end * width + 1e-6), first + 1)
            cells[first:last] = letter * (last - first)
        lines.append(f"{row.label:<{indent}} |{''.join(cells[:width])}|")
        if lane:
            lines.append(f"{'':<{indent}} |{lane_text(lane, end, width)}|")
    if len(rows) > len(shown):
        lines.append(f"... and {sum(len(row.ranks) for row in rows[max_rows:])} more ranks")
    return "\n".join(lines)


def _letter(task: Task) -> str:
    return task.row.digits[task.microbatch % 10]


def tint(color: str, share: float) -> tuple[float, float, float]:
    """The color mixed with white."""
    values = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (1 - (1 - value) * share for value in values)
    return red, green, blue


def _colors(*timelines: AnyTimeline) -> dict[str, str]:
    """Module -> color, in the order of first appearance."""
    modules = dict.fromkeys(span.task.module for timeline in timelines for span in _spans(timeline))
    return {module: COLORS[i % len(COLORS)] for i, module in enumerate(modules)}


def gantt_png(
    timeline: AnyTimeline,
    path: str | Path | BinaryIO,
    measured: AnyTimeline | None = None,  # below the first, on the same scale
    title: str = "Schedule of one step",  # duration and bubble follow
) -> None:
    """
    Draws a row per rank: light bars are forwards, dark bars backwards (and medium ones weight gradients that are put
    off), the number is the microbatch.

    Colors are modules, gray bars are what gradient sums add. Where it is known, a lane below the bars has the
    gathering of weights and the sums of gradients, beside tasks or exposed, and ends with the optimizer's step.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[tuple[str, AnyTimeline]] = [("predicted", timeline)]
    if measured is not None:
        panels.append(("measured", measured))
    colors = _colors(*(timeline for _, timeline in panels))
    all_rows = [_rows(timeline, MAX_ROWS) for _, timeline in panels]
    all_lanes = [_lanes(timeline, rows[:MAX_ROWS]) for (_, timeline), rows in zip(panels, all_rows, strict=True)]
    heights = [max(1, min(len(rows), MAX_ROWS)) for rows in all_rows]
    has_lanes = any(lane for lanes in all_lanes for lane in lanes)
    row_inches = (0.42 if sum(heights) <= 24 else 0.26) * (1.4 if has_lanes else 1.0)
    figure = Figure(figsize=(14, 1.55 + row_inches * sum(heights) + 0.75 * (len(panels) - 1)), dpi=140)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    drawn = zip([timeline for _, timeline in panels], all_lanes, strict=True)
    end = max(_latest_ms(timeline, lanes) for timeline, lanes in drawn) or 1.0
    for axis, (name, timeline), rows, lanes in zip(axes, panels, all_rows, all_lanes, strict=True):
        _draw_rows(axis, rows, lanes, colors, end)
        text = f"{title}: {_summary(timeline)}" if len(panels) == 1 else f"{title}, {name}: {_summary(timeline)}"
        axis.set_title(text, loc="left", fontsize=12, fontweight="bold", pad=8, color="#222222")
    axes[-1].set_xlabel("time (ms)", fontsize=10, color="#444444")
    kinds = {(span.op, span.is_exposed) for lanes in all_lanes for lane in lanes for span in lane}
    words = {(span.task.module, span.task.kind) for _, timeline in panels for span in _spans(timeline)}
    labels: dict[tuple[str, float], list[str]] = {}  # of each module by tint
    for module in colors:
        for kind in (kind for word, kind in TASK_KINDS.items() if (module, word) in words):
            labels.setdefault((module, kind.tint), []).append(kind.label)
    bars = {f"{name} {' or '.join(own)}": tint(colors[name], share) for (name, share), own in labels.items()}
    num_lines = _draw_legend(figure, bars, any(_sums(timeline) for _, timeline in panels), kinds)
    inches = figure.get_size_inches()[1]
    figure.tight_layout(rect=(0, 0, 1, 1 - (0.18 + 0.2 * num_lines) / inches))
    figure.savefig(path)


def _draw_rows(
    axis: Any, rows: Sequence[_Row], lanes: Sequence[Sequence[TransferSpan]], colors: Mapping[str, str], end: float
) -> None:
    """Draws the bars, lanes, numbers and labels of one panel."""
    from matplotlib.collections import PolyCollection

    shown = rows[:MAX_ROWS]
    boxes, faces, edges = [], [], []
    for y, (row, lane) in enumerate(zip(shown, lanes, strict=True)):
        bottom = y + (0.12 if lane else 0.40)
        middle, half = (y - 0.40 + bottom) / 2, 0.55 * (bottom - y + 0.40) / 2
        draw_lane(axis, lane, end, y + 0.40, y + 0.17)
        low, high = middle - half, middle + half
        for span in row.sums:
            boxes.append([(span.start_ms, low), (span.end_ms, low), (span.end_ms, high), (span.start_ms, high)])
            faces.append(SUM_COLOR)
            edges.append(SUM_COLOR)
        for span in row.spans:
            low, high, last = y - 0.40, bottom, span.busy_end_ms
            boxes.append([(span.start_ms, low), (last, low), (last, high), (span.start_ms, high)])
            faces.append(tint(colors[span.task.module], span.task.row.tint))
            inches = 11.5 * (last - span.start_ms) / end
            # A white edge would cover a thin bar.
            edges.append((1.0, 1.0, 1.0) if inches > 0.05 else faces[-1])
            text = str(span.task.microbatch)
            if inches > 0.075 * len(text) + 0.03:
                axis.text(
                    (span.start_ms + last) / 2,
                    middle + 0.02,
                    text,
                    ha="center",
                    va="center",
                    fontsize=8 if len(rows) <= 24 else 6.5,
                    color=span.task.row.ink,
                )
    axis.add_collection(PolyCollection(boxes, facecolors=faces, edgecolors=edges, linewidths=0.7, zorder=2))
    axis.set_xlim(0, end)
    axis.set_ylim(max(len(shown), 1) - 0.4, -0.6)
    labels = [row.label for row in shown]
    if len(rows) > len(shown):
        labels[-1] += f"  (and {sum(len(row.ranks) for row in rows[MAX_ROWS:])} more ranks)"
    axis.set_yticks(range(len(shown)), labels, fontsize=9 if len(rows) <= 24 else 7.5)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=9, colors="#444444")
    axis.set_facecolor("#F3F4F6")
    axis.grid(axis="x", color="white", linewidth=1.0, zorder=0)
    axis.set_axisbelow(True)
    for side in axis.spines.values():
        side.set_visible(False)


def _draw_legend(
    figure: Any, bars: Mapping[str, tuple[float, float, float]], has_sums: bool, kinds: Collection[tuple[str, bool]]
) -> int:
    """Draws a box for each kind of bar, in the upper right corner; returns the number of lines."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, label=label) for label, color in bars.items()]
    if has_sums:
        handles.append(Patch(facecolor=SUM_COLOR, label="gradient sum"))
    handles += [Patch(facecolor=color, label=name) for kind, (color, name) in KINDS.items() if kind in kinds]
    handles.append(Patch(facecolor="#F3F4F6", edgecolor="#C9CCD1", label="idle"))
    num_columns = min(len(handles), 5 if kinds else 8)
    figure.legend(
        handles=handles,
        loc="upper right",
        ncols=num_columns,
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.4,
        borderaxespad=0.4,
    )
    return -(-len(handles) // num_columns)


def chrome_trace(
    timeline: AnyTimeline,
    path: str | Path,
    measured: AnyTimeline | None = None,
) -> None:
    """
    Writes a timeline as JSON for `chrome://tracing` and Perfetto: a process each for prediction and measurement.

    Each has a thread per rank with its tasks and gradient sums. Where it is known, another process has the
    communication of weights and gradients, with a thread for one of the ranks with equal tasks, of 64 at most.
    """
    events: list[dict[str, Any]] = []
    panels: list[tuple[str, AnyTimeline]] = [("predicted", timeline)]
    if measured is not None:
        panels.append(("measured", measured))
    for process, (name, timeline) in enumerate(panels):
        spans = _spans(timeline)
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        events.extend(
            {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in sorted({span.rank for span in spans})
        )
        events.extend(
            {
                "ph": "X",
                "name": str(span.task),
                "cat": f"{span.task.module},{span.task.kind}",
                "pid": process,
                "tid": span.rank,
                **_times(span.start_ms, span.busy_end_ms),
            }
            for span in spans
        )
        events.extend(
            {
                "ph": "X",
                "name": "gradient sum",
                "cat": "sync",
                "pid": process,
                "tid": span.rank,
                **_times(span.start_ms, span.end_ms),
            }
            for span in _sums(timeline)
        )
        events.extend(_lane_events(timeline, name, len(panels) + process))
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _lane_events(timeline: AnyTimeline, name: str, process: int) -> Iterator[dict[str, Any]]:
    """The communication in a timeline as events of a process of its own."""
    rows = _rows(timeline, 0)[:MAX_ROWS]
    lanes = _lanes(timeline, rows)
    if any(lanes):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"{name}, communication"}}
    for lane in lanes:
        for span in lane:
            yield {
                "ph": "X",
                "name": KINDS[span.op, span.is_exposed][1],
                "cat": span.op,
                "pid": process,
                "tid": span.rank,
                **_times(span.start_ms, span.end_ms),
            }


def _times(start_ms: float, end_ms: float) -> dict[str, float]:
    """Returns start and duration in microseconds, for consecutive events on one thread."""
    assert math.isfinite(start_ms) and math.isfinite(end_ms), (start_ms, end_ms)
    # Both ends on a grid on which sums of the numbers in the file are exact: rounded separately, an event could seem
    # to end after the start of the next one.
    start, end = round(start_ms / TICK_MS), round(end_ms / TICK_MS)
    tick_us = 1e3 * TICK_MS
    return {"ts": tick_us * start, "dur": tick_us * (end - start)}
