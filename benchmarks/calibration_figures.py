"""The figures of `calibration.py` in `docs/calibration.md`, see `pages.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np
from figures import ms, percent, result, spread, table
from scipy.stats import rankdata

PLAINER = {
    "a rank for each module": "one rank per module",
    "copies": "replicas",
    "cut by two (tensor parallelism)": "cut by two",
    "cut by two": "with `tp_size=2`",
    "by both logs": "calibrated by both logs",
}
"""Words in the names of stored plans -> words in the table; applied in this order."""


def calibration() -> str:
    """Steps and tasks of the plans, predicted over measured."""
    rows = []
    for row in result("calibration")["plans"]:
        over, tasks = row["over_measured"], row["tasks_over_measured"].values()
        steps = [f"{over[when]:.2f}" for when in ("before", "one_factor", "after")]
        spans = [
            f"{min(own[when] for own in tasks):.2f} to {max(own[when] for own in tasks):.2f}"
            for when in ("before", "after")
        ]
        plan = row["plan"]
        for words, plainer in PLAINER.items():
            plan = plan.replace(words, plainer)
        name = f"{plan} (fitted)" if row["fitted"] else plan
        cells = [name, f"{ms(row['ms']['measured'])} ms", *steps, *spans]
        rows.append("| " + " | ".join(cells) + " |")
    return table(
        "| plan | step, measured | before | one factor | calibrated | tasks before | tasks calibrated |", rows
    )


def quotes_of_calibration() -> Iterator[str]:
    """Sentences about all judged plans together."""
    found = result("calibration")
    errors = found["errors"]
    for name, when in (("before", "before"), ("with one factor", "one_factor"), ("calibrated", "after")):
        own = errors[when]
        yield (
            f"{name}: median {percent(own['median_error'])} %, largest {percent(own['largest_error'])} %, rank "
            f"correlation {own['rank_correlation']:.2f}"
        )
    tasks = [f"{percent(errors[when]['median_task_error'])} %" for when in ("before", "after")]
    yield f"The tasks of a module and kind are off by {tasks[0]} in the median before and {tasks[1]} calibrated."
    left = statistics.median(row["replayed_over_measured"] for row in found["plans"] if not row["fitted"])
    yield f"with tasks as measured a step is predicted {percent(1 - left)} % shorter than it is in the median"

    cut = [row for row in found["plans"] if row["plan"].startswith("both modules cut")]
    alone = next(row["over_measured"]["after"] for row in cut if not row["by_both"])
    both = [row["over_measured"]["after"] for row in cut if row["by_both"]]
    yield f"predicted at {alone:.2f} of its measured time with the log of the other plan"
    yield f"with the log of such a plan as well, others like it are predicted at {spread(both, '{:.2f}'.format)}"
    alike = [row["ms"] for row in found["plans"] if row["same_work"] and row not in cut]
    times = np.array([[own[when] for when in ("before", "after", "measured")] for own in alike])
    order = np.corrcoef(rankdata(times, axis=0).T)[-1]
    yield f"among the {len(alike)} others it is {order[0]:.2f} before and {order[1]:.2f} calibrated"


BLOCKS = {"calibration": calibration}
QUOTES = {"docs/calibration.md": quotes_of_calibration}
