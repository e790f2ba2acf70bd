"""
Balance of attention work over the ranks of context parallelism, next to other ways to cut a row, and what it costs.

The work of a rank is counted pair by pair from the rows' intervals, not by the formula that the assignment goes by:
blocks of 128 x 128 pairs with at least one visible pair, and 0.3 more for one with an invisible pair. `PTRR` is
torch's own load balancer for FlexAttention, called with a block mask of these counts; it balances `visited` blocks,
without the 0.3. `capped LPT` is the plain heuristic: longest first, to the rank with least work that has room.

Each part runs alone with `--only`: `rows`, `small` and `papers` (the masks of Cornstarch, see `paper_masks.py`) are
counted and the same on any machine, `times` is measured. The results of the others are kept.

```bash
python benchmarks/context_parallel_balance.py
python benchmarks/context_parallel_balance.py --only papers
python benchmarks/context_parallel_balance.py --quick --out out/bench  # seconds; the numbers mean little
```
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from numpy.typing import NDArray
from paper_masks import KINDS, PUBLISHED_METHODS, PUBLISHED_MS, paper_row
from rich.table import Table
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _PTRRLoadBalancer
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from hf_mmparallel.arrange.token_assignment import BLOCK, assign_rows, block_workloads, distribute
from hf_mmparallel.arrange.token_segments import assign_segments

PARTIAL_COST = 0.3
GOALS = {"row 8k": 1.02, "row 64k": 1.002, "segments 64k": 1.02, "assignment of 1M tokens, ms": 5.0}
METHODS = ("ours", "capped LPT", "PTRR", "zigzag", "contiguous", "random")
MEASURES = ("work", "visited", "pairs")
PARTS = ("rows", "small", "papers", "times")
NAME = "context_parallel_balance"
_ENTRIES = ("torch's block mask has the same blocks", "times", "row", "segments", "small", "papers")


@dataclass(frozen=True)
class Rows:
    """
    The rows that are cut.

    Args:
        lengths (`tuple[int, ...]`): Their tokens.
        num_ranks (`int`): Ranks that they are cut over.
        seeds (`int`): Rows of each kind and length.
        sample_tokens (`tuple[int, int]`): The fewest and the most tokens of a packed sample.
        image_tokens (`int`): Of an image, which sees itself both ways.
        small (`tuple[tuple[int, int], ...]`): Blocks and ranks of the cases with a known optimum.
        timed_length (`int`): Tokens of the row whose assignment is timed.
        repeats (`int`): Of each measurement of time.
        paper_lengths (`tuple[int, ...]`): Tokens of the rows with the papers' masks.
        paper_seeds (`int`): Rows of each of these masks and lengths.
    """

    lengths: tuple[int, ...] = (8192, 65536, 262144)
    num_ranks: int = 8
    seeds: int = 20
    sample_tokens: tuple[int, int] = (512, 1536)
    image_tokens: int = 576
    small: tuple[tuple[int, int], ...] = ((12, 2), (12, 3), (16, 4))
    timed_length: int = 2**20
    repeats: int = 31
    paper_lengths: tuple[int, ...] = (16384, 32768, 65536)
    paper_seeds: int = 50


QUICK = Rows(
    lengths=(8192,),
    seeds=2,
    small=((8, 2),),
    timed_length=2**17,
    repeats=5,
    paper_lengths=(16384,),
    paper_seeds=2,
)


@dataclass(frozen=True)
class Row:
    """First and last visible place and segment of each token, `[length]`; int32 as the mask's positions are."""

    first: NDArray
    last: NDArray
    ids: NDArray


def make_row(kind: str, length: int, seed: int, rows: Rows) -> Row:
    """A row of causal tokens: `packed` samples, `packed images` with spans in them, or one sample (`causal`)."""
    rng, samples = np.random.default_rng(seed), []
    while sum(samples) < length:
        drawn = length if kind == "causal" else int(rng.integers(rows.sample_tokens[0], rows.sample_tokens[1] + 1))
        samples.append(min(drawn, length - sum(samples)))
    start = np.repeat(np.cumsum(samples) - samples, samples)
    last = np.arange(length)
    if kind == "packed images":
        inside = last - start - 32
        image = (inside >= 0) & (inside // (rows.image_tokens + 200) * (rows.image_tokens + 200) <= inside)
        image &= inside % (rows.image_tokens + 200) < rows.image_tokens
        ends = last - inside % (rows.image_tokens + 200) + rows.image_tokens - 1
        size = np.repeat(samples, samples)
        last = np.where(image & (ends < start + size), ends, last)
    return Row(start.astype(np.int32), last.astype(np.int32), np.repeat(np.arange(len(samples)) + 1, samples))


@dataclass(frozen=True)
class Counts:
    """Pairs, blocks with a visible pair, and work of each block of queries, `[num_blocks]`."""

    pairs: NDArray
    visited: NDArray
    work: NDArray


def count(first: NDArray, last: NDArray) -> Counts:
    """Counts the visible pairs of each pair of blocks; a token with `last < first` sees nothing."""
    pairs, visited, partial = [], [], []
    for begin in range(0, len(first), BLOCK):
        low, high = first[begin : begin + BLOCK].astype(np.int64), last[begin : begin + BLOCK].astype(np.int64)
        seeing = high >= low
        if not seeing.any():
            lists = (0, 0, 0)
        else:
            edges = np.arange(low[seeing].min() // BLOCK, high[seeing].max() // BLOCK + 1) * BLOCK
            overlap = np.minimum(high[:, None], edges + BLOCK - 1) - np.maximum(low[:, None], edges) + 1
            found = np.maximum(overlap, 0)[seeing].sum(axis=0)
            lists = (found.sum(), (found > 0).sum(), ((found > 0) & (found < BLOCK * BLOCK)).sum())
        for values, value in zip((pairs, visited, partial), lists, strict=True):
            values.append(int(value))
    return Counts(np.array(pairs), np.array(visited), np.array(visited) + PARTIAL_COST * np.array(partial))


def capped_lpt(work: NDArray, num_ranks: int) -> NDArray:
    """Longest first, to the rank with least work that has room for one more."""
    share = -(-len(work) // num_ranks)
    heap = [(0.0, rank) for rank in range(num_ranks)]
    blocks: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        blocks[rank].append(index)
        if len(blocks[rank]) < share:
            heapq.heappush(heap, (load + float(work[index]), rank))
    return np.array(blocks)


def ptrr(visited: NDArray, num_ranks: int) -> NDArray:
    """Torch's balancer, from a block mask with these numbers of blocks."""
    counts = torch.from_numpy(visited).to(torch.int32)[None, None]
    indices = torch.zeros(1, 1, len(visited), len(visited), dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=BLOCK, compute_q_blocks=False)
    tokens = _PTRRLoadBalancer(mask, num_ranks)._generate_indices()
    return tokens[0, ::BLOCK].numpy().reshape(num_ranks, -1) // BLOCK


def blocks_of(method: str, row: Row, counts: Counts, num_ranks: int, seed: int) -> NDArray:
    """Blocks of each rank."""
    if method == "capped LPT":
        return capped_lpt(block_workloads(row.first, row.last), num_ranks)
    if method == "PTRR":
        return ptrr(counts.visited, num_ranks)
    named: Any = "lpt" if method == "ours" else method
    return assign_rows(row.first, row.last, num_ranks, method=named, seed=seed).blocks


def over_mean(values: NDArray) -> float:
    """The heaviest rank over the mean."""
    return float(values.max() / values.mean())


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean and worst over rows."""
    return {"mean": round(statistics.mean(values), 4), "worst": round(max(values), 4)}


def balance_of_rows(rows: Rows, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The heaviest rank over the mean by each measure, for each kind, length and method."""
    for kind in kinds:
        for length in rows.lengths:
            seeds = range(1 if kind == "causal" else rows.seeds if length < 100_000 else min(rows.seeds, 3))
            found: dict[str, dict[str, list[float]]] = {m: {name: [] for name in MEASURES} for m in METHODS}
            for seed in seeds:
                row = make_row(kind, length, seed, rows)
                counts = count(row.first, row.last)
                for method, values in found.items():
                    blocks = blocks_of(method, row, counts, rows.num_ranks, seed)
                    for name, value in values.items():
                        value.append(over_mean(getattr(counts, name)[blocks].sum(axis=1)))
            for method, values in found.items():
                result = {name: summary(value) for name, value in values.items()}
                yield {"kind": kind, "length": length, "rows": len(seeds), "method": method, **result}


def balance_of_segments(rows: Rows, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The same for whole segments, with gathered and padding tokens as shares of the row."""
    for kind in kinds:
        for length in rows.lengths:
            work, pairs, total, gathered, padding, whole = [], [], [], [], [], 0
            seeds = range(rows.seeds if length < 100_000 else min(rows.seeds, 3))
            for seed in seeds:
                row = make_row(kind, length, seed, rows)
                found = assign_segments(row.first, row.last, row.ids, rows.num_ranks)
                source, used = np.maximum(found.layout, 0), found.layout >= 0
                shift = np.arange(len(source)) - source
                counts = count(
                    np.where(used, row.first[source] + shift, 1), np.where(used, row.last[source] + shift, 0)
                )
                work.append(over_mean(counts.work[found.blocks].sum(axis=1)))
                pairs.append(over_mean(counts.pairs[found.blocks].sum(axis=1)))
                total.append(counts.work.sum() / count(row.first, row.last).work.sum())
                gathered.append(found.gathered.size * BLOCK / length)
                padding.append(found.padded_length / length - 1)
                whole += found.mode == "segments"
            values = {"work": work, "pairs": pairs, "gathered": gathered, "padding": padding, "total work": total}
            result = {name: summary(value) for name, value in values.items()}
            yield {"kind": kind, "length": length, "rows": len(seeds), "whole": whole, **result}


def balance_of_papers(rows: Rows) -> Iterator[dict[str, Any]]:
    """The same for the papers' masks, beside the times that the first version of Cornstarch prints for them."""
    for kind in KINDS:
        for length in rows.paper_lengths:
            found: dict[str, dict[str, list[float]]] = {m: {name: [] for name in MEASURES} for m in METHODS}
            for seed in range(rows.paper_seeds):
                first, last = paper_row(kind, length, seed)
                row = Row(first, last, np.ones(length, dtype=np.int64))
                counts = count(first, last)
                for method, values in found.items():
                    blocks = blocks_of(method, row, counts, rows.num_ranks, seed)
                    for name, value in values.items():
                        value.append(over_mean(getattr(counts, name)[blocks].sum(axis=1)))
            printed = dict(zip(PUBLISHED_METHODS, PUBLISHED_MS[length][kind], strict=True))
            for method, values in found.items():
                result: dict[str, Any] = {name: summary(value) for name, value in values.items()}
                case = {"kind": kind, "length": length, "rows": rows.paper_seeds, "method": method, **result}
                yield {**case, "published_ms": printed[method]} if method in printed else case


def optimum(work: NDArray, num_ranks: int) -> float:
    """The least work of the heaviest rank when all get as many blocks: branch and bound, heaviest block first."""
    share, order = len(work) // num_ranks, np.sort(np.rint(work * 10).astype(int))[::-1].tolist()
    lower = -(-sum(order) // num_ranks)
    first = np.rint(work * 10)[distribute(work, num_ranks)].sum(axis=1).max()
    best, loads, sizes = int(first), [0] * num_ranks, [0] * num_ranks

    def place(index: int) -> None:
        nonlocal best
        if index == len(order):
            best = max(loads)
            return
        tried = set()
        for rank in range(num_ranks):
            state = (loads[rank], sizes[rank])
            if sizes[rank] < share and state not in tried and loads[rank] + order[index] < best and best > lower:
                tried.add(state)
                loads[rank], sizes[rank] = loads[rank] + order[index], sizes[rank] + 1
                place(index + 1)
                loads[rank], sizes[rank] = state

    place(0)
    return best / 10


def small_cases(rows: Rows) -> list[dict[str, Any]]:
    """Each method's heaviest rank over the optimum, on short packed rows."""
    results = []
    for num_blocks, num_ranks in rows.small:
        ratios: dict[str, list[float]] = {method: [] for method in METHODS}
        for seed in range(rows.seeds):
            row = make_row("packed", num_blocks * BLOCK, seed, rows)
            counts = count(row.first, row.last)
            best = optimum(counts.work, num_ranks)
            for method, values in ratios.items():
                blocks = blocks_of(method, row, counts, num_ranks, seed)
                values.append(counts.work[blocks].sum(axis=1).max() / best)
        result = {method: summary(values) for method, values in ratios.items()}
        results.append({"blocks": num_blocks, "ranks": num_ranks, "rows": rows.seeds, **result})
    return results


def measured(function: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Milliseconds of repeated calls; the first is left out."""
    function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1e3)
    return common.spread(times)


def times(rows: Rows) -> dict[str, dict[str, float]]:
    """Milliseconds of assignments, from intervals on."""
    result = {}
    for kind in ("packed", "packed images", "causal"):
        row = make_row(kind, rows.timed_length, 0, rows)
        result[f"{kind}: workloads and blocks of each rank"] = measured(
            lambda row=row: distribute(block_workloads(row.first, row.last), rows.num_ranks), rows.repeats
        )
        result[f"{kind}: and the index of each token"] = measured(
            lambda row=row: assign_rows(row.first, row.last, rows.num_ranks).order, rows.repeats
        )
    length = min(rows.lengths[-1], 65536)
    row = make_row("packed", length, 0, rows)
    result[f"whole segments, {length} tokens packed"] = measured(
        lambda: assign_segments(row.first, row.last, row.ids, rows.num_ranks).order, rows.repeats
    )
    return result


def block_mask_agrees(rows: Rows) -> bool:
    """Whether torch's mask of a packed row has the blocks that are counted here."""
    row = make_row("packed images", 4096, 0, rows)
    first, last = torch.from_numpy(row.first), torch.from_numpy(row.last)
    mask = create_block_mask(lambda b, h, q, k: (first[q] <= k) & (k <= last[q]), 1, 1, 4096, 4096, "cpu", BLOCK)
    torchs = mask.kv_num_blocks + (0 if mask.full_kv_num_blocks is None else mask.full_kv_num_blocks)
    return bool((torchs[0, 0].numpy() == count(row.first, row.last).visited).all())


def tables(result: dict[str, Any]) -> list[Table]:
    """The printed table and notes."""

    def cells(values: dict[str, float]) -> str:
        return f"{values['mean']:.4f} / {values['worst']:.4f}"

    rows = Table("row", "tokens", "by", *METHODS, title="Heaviest rank over the mean, mean / worst of the rows")
    every = [*result.get("row", ()), *result.get("papers", ())]
    for kind, length in dict.fromkeys((case["kind"], case["length"]) for case in every):
        mine = [case for case in every if (case["kind"], case["length"]) == (kind, length)]
        for name in MEASURES[:2]:
            rows.add_row(kind, str(length), name, *(cells(case[name]) for case in mine))
    names = ("work", "pairs", "total work", "gathered", "padding")
    whole = Table(
        "row",
        "tokens",
        "whole",
        *names,
        title="Whole segments: rows cut so, heaviest rank over mean, and shares of the row",
    )
    for case in result.get("segments", ()):
        share = f"{case['whole']}/{case['rows']}"
        whole.add_row(case["kind"], str(case["length"]), share, *(cells(case[name]) for name in names))
    small = Table("blocks", "ranks", *METHODS, title="Work of the heaviest rank over the optimum")
    for case in result.get("small", ()):
        small.add_row(str(case["blocks"]), str(case["ranks"]), *(cells(case[method]) for method in METHODS))
    timed = Table("what", "median ms", "min", "max", title="Time to assign")
    for name, values in result.get("times", {}).items():
        timed.add_row(name, *(f"{values[key]:.2f}" for key in ("median", "min", "max")))
    return [rows, whole, small, timed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short rows, few of them")
    parser.add_argument("--only", action="append", choices=PARTS, help="run this part; repeat for others")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    rows = QUICK if options.quick else Rows()
    torch.set_num_threads(1)
    file = options.out / f"{NAME}.json"
    kept = json.loads(file.read_text()) if options.only and file.exists() else {}
    described: dict[str, Any] = {}
    result: dict[str, Any] = {key: value for key, value in kept.items() if key in (*_ENTRIES, "runs")}
    for part in options.only or PARTS:
        load = os.getloadavg()
        result |= run_part(part, rows)
        described = common.machine(common.QUICK, load)
        described.pop("shapes")
        result["runs"] = {**result.get("runs", {}), part: described}
    result = {"goals": GOALS, **result, **described, "shapes": asdict(rows)}
    common.report(NAME, tables(result), [f"Goals: {GOALS}"], result, options.out)


def run_part(part: str, rows: Rows) -> dict[str, Any]:
    """The entries of the result that a part of [`PARTS`] gives."""
    if part == "times":
        return {"times": times(rows)}
    if part == "small":
        return {"small": small_cases(rows)}
    if part == "papers":
        return {"papers": list(balance_of_papers(rows))}
    return {
        "torch's block mask has the same blocks": block_mask_agrees(rows),
        "row": list(balance_of_rows(rows, ("packed", "packed images", "causal"))),
        "segments": list(balance_of_segments(rows, ("packed", "packed images"))),
    }


if __name__ == "__main__":
    main()
