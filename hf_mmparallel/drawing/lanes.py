"""Lanes below the tasks of a rank: communication of weights and gradients over time, as shares of columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schedule import TransferSpan

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
