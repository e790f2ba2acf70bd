"""The tables of `context_parallel_balance.py` in `docs/benchmarks.md`, and sentences about them, see `pages.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from figures import balance, pair, result, table

WAYS = {
    "ours": "ours, by blocks (`lpt`): LPT in rounds, then exchanges",
    "capped LPT": "plain LPT with a cap",
    "PTRR": "PTRR, torch's balancer for FlexAttention",
    "zigzag": "zigzag",
    "contiguous": "contiguous",
    "random": "random",
}


def context_parallel() -> str:
    rows = []
    for method, words in WAYS.items():
        short, long = (balance("row", "packed", length, method) for length in (8192, 65536))
        few, many = (
            (2, 2)
            if method in ("zigzag", "contiguous", "random")
            else (3, 4 if "LPT" in method or method == "ours" else 3)
        )
        rows.append(
            f"| {words} | {pair(short['work'], few)} | {pair(long['work'], many)} | {pair(long['visited'], few)} |"
        )
    whole = next(
        c for c in result("context_parallel_balance")["segments"] if (c["kind"], c["length"]) == ("packed", 65536)
    )
    rows.append(f"| ours, whole segments | falls back to blocks | {pair(whole['work'], 3)} | |")
    return table("| sharding of the row | 8k tokens | 64k tokens | 64k tokens, without the 0.3 |", rows)


def quotes_of_context() -> Iterator[str]:
    """Sentences of `docs/benchmarks.md` outside of its tables."""
    small = result("context_parallel_balance")["small"]
    over = statistics.mean(case["ours"]["mean"] for case in small) - 1
    worst_of_small = max(case["ours"]["worst"] for case in small) - 1
    yield f"ours is {100 * over:.2f} % above the exact optimum on average and {100 * worst_of_small:.1f} % at worst"
    whole = next(
        c for c in result("context_parallel_balance")["segments"] if (c["kind"], c["length"]) == ("packed", 65536)
    )
    yield f"one more block of padding for each rank ({100 * whole['padding']['mean']:.1f} %)"
    yield f"cost {100 * (1 - whole['total work']['mean']):.1f} % less work"
    times = {name: values["median"] for name, values in result("context_parallel_balance")["times"].items()}
    blocks = [times[f"{kind}: workloads and blocks of each rank"] for kind in ("packed", "causal")]
    index = [times[f"{kind}: and the index of each token"] for kind in ("packed", "causal")]
    yield f"takes {blocks[0]:.1f} ms (packed) to {blocks[1]:.1f} ms (causal)"
    yield f"to the index of each token {index[0]:.1f} and {index[1]:.1f} ms"
    yield f"whole segments of 64k tokens take {times['whole segments, 65536 tokens packed']:.1f} ms"


BLOCKS = {"context_parallel": context_parallel}
QUOTES = {"docs/benchmarks.md": quotes_of_context}
