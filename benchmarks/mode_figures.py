"""The figures of padded and packed rows on the pages, see `pages.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from figures import result, spread, table


def arrangement_modes() -> str:
    """Padded and packed rows: each arrangement over the best baseline, the smallest and the largest of all cases."""
    modes = result("microbatch_balance_modes")["modes"]
    header = "| rows | microbatch | chosen | `hierarchical` | `tapered` | `entrain` | computed tokens / real tokens |"
    rows = []
    for mode in ("padded", "packed"):
        for size in (4, 8):
            own = [row for row in modes if (row["mode"], row["microbatch_size"]) == (mode, size)]
            over = [
                spread([_over_best(row, name or row["chosen"]) for row in own], "{:.2f}".format)
                for name in ("", "hierarchical", "tapered", "entrain")
            ]
            padding = spread([row["padding"][row["chosen"]] for row in own], "{:.2f}".format)
            rows.append(f"| {mode} | {size} samples | {' | '.join(over)} | {padding} |")
    return table(header, rows)


def _over_best(row: dict[str, Any], method: str) -> float:
    """The step of an arrangement over that of the best of the baselines."""
    return row["step_ms"][method] / min(
        row["step_ms"][name] for name in ("contiguous", "batch_rebalance", "disttrain")
    )


def quotes_of_modes() -> Iterator[str]:
    """Sentences about padded and packed rows."""
    summary = result("microbatch_balance_modes")["summary"]
    for mode, own in summary.items():
        saved = [1 - own[f"{which}_over_best_baseline"] for which in ("slowest", "fastest")]
        yield f"{100 * saved[0]:.0f} to {100 * saved[1]:.0f} % shorter than the best baseline's with {mode} rows"
    errors = {mode: 100 * own["largest_prediction_error"] for mode, own in summary.items()}
    yield f"at most {errors['padded']:.1f} % off with padded rows and {errors['packed']:.1f} % with packed ones"


BLOCKS = {"arrangement_modes": arrangement_modes}
QUOTES = {"docs/benchmarks.md": quotes_of_modes}
