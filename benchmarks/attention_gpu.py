"""
The attention kernels on one CUDA device: correctness first, then speed against FlexAttention and SDPA.

```bash
python benchmarks/attention_gpu.py                  # everything; about half an hour
python benchmarks/attention_gpu.py --sections correctness speed --lengths 8192 16384
python benchmarks/attention_gpu.py --cpu-dry-run    # every line of it once, tiny, in Triton's interpreter
```

Nothing is timed unless all checks of the correctness section hold; the exit code is 1 if one does not. TFLOP/s count
4 * D operations for each visible pair and head (2.5 times that backward); those on the visited blocks count the hidden
pairs of these blocks too. Medians of repeated calls, each point twice, on three sets of inputs in turns. Results
go to `benchmarks/results/attention-<device>.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DRY_RUN = "--cpu-dry-run" in sys.argv
if DRY_RUN:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import common  # noqa: E402
import torch  # noqa: E402
from attention_checks import LARGEST_ERROR, correctness, races  # noqa: E402
from attention_problems import (  # noqa: E402
    MASKS,
    TINY,
    Kernels,
    Peer,
    Problem,
    Settings,
    error_of,
    flex_peer,
    sdpa_peer,
    time_ms,
)

from hf_mmparallel.kernels.bitfield_attention.mask_plan import compile_mask  # noqa: E402
from hf_mmparallel.kernels.bitfield_attention.tuning import Tile, Tuning  # noqa: E402

SECTIONS = ("correctness", "races", "ceilings", "speed", "plans", "sweep")
# What the kernels are held to on an H200 (TFLOP/s), and against FlexAttention on the same device.
H200_GOALS = {"forward": 450, "backward": 300}
FLEX_GOALS = {"forward": 1.2, "backward": 1.1}


def ceilings(settings: Settings) -> dict[str, float]:
    """Attained rates of this device for a square matrix product and for a copy."""
    side = settings.ceiling
    a, b = (torch.randn(side, side, dtype=settings.dtype, device=settings.device) for _ in range(2))
    product_ms = _twice(lambda: a @ b, settings)[0]
    source = torch.empty(side**2 * 64, dtype=torch.int8, device=settings.device)
    target = torch.empty_like(source)
    copy_ms = _twice(lambda: target.copy_(source), settings)[0]
    found = {
        "matmul_tflops": 2 * side**3 / product_ms / 1e9,
        "copy_tb_per_s": 2 * source.numel() / copy_ms / 1e9,
    }
    print(f"  {found}", flush=True)
    return found


def _twice(function: Callable[[], Any], settings: Settings) -> tuple[float, float]:
    """The better and the worse of two medians, in ms."""
    low, high = sorted(time_ms(function, quick=settings.device == "cpu") for _ in range(2))
    return low, high


def speed(settings: Settings) -> list[dict[str, Any]]:
    """Forward and backward of the kernels and of their peers, on each mask and length."""
    rows = []
    for head_dim in settings.head_dims:
        for length in settings.lengths:
            for name in MASKS:
                rows += _speed_of(settings, settings.problem(name, length, head_dim))
                if settings.device == "cuda":
                    torch.cuda.empty_cache()
    return rows


def _speed_of(settings: Settings, problem: Problem) -> Iterator[dict[str, Any]]:
    """A row for each direction and contestant; FlexAttention comes first, the others are compared with it."""
    runs: dict[str, Kernels | Peer] = {"flex": flex_peer(problem, compiled=settings.device == "cuda")[0]}
    runs["bitfield"] = Kernels(problem, settings.tuning(problem.shape.head_dim))
    if problem.name in ("full", "causal"):
        names = ("FLASH_ATTENTION", "CUDNN_ATTENTION") if settings.device == "cuda" else ("MATH",)
        runs |= {f"sdpa {name.lower()}": sdpa_peer(problem, name) for name in names}
    right = runs["flex"].forward(0)[0]
    flex_ms: dict[str, float] = {}
    for contestant, run in runs.items():
        for direction in ("forward", "backward"):
            row = {"mask": problem.name, "length": problem.shape.length, "head_dim": problem.shape.head_dim}
            row |= {"contestant": contestant, "direction": direction}
            try:
                if direction == "forward":
                    row["error_to_flex"] = error_of(run.forward(0)[0], right)
                call = getattr(run, direction)
                low, high = _twice(lambda call=call: call(problem.turn()), settings)
            except (RuntimeError, NotImplementedError) as error:  # a peer without this direction, mask or size
                yield {**row, "failed": f"{type(error).__name__}: {error}"[:300]}
                continue
            backward = direction == "backward"
            row |= {"ms": low, "worse_ms": high, "tflops": problem.tflops(low, backward)}
            if isinstance(run, Kernels):
                row["tflops_visited"] = problem.tflops(low, backward, problem.visited_pairs(run.tuning))
            if contestant == "flex":
                flex_ms[direction] = low
            row["speedup"] = flex_ms[direction] / low if direction in flex_ms else None
            row["ok"] = row.get("error_to_flex", 0.0) < LARGEST_ERROR
            print(f"  {_sentence(row)}", flush=True)
            yield row


def _sentence(row: dict[str, Any]) -> str:
    """A row of the speed section for people."""
    name = f"{row['mask']} {row['length']} D{row['head_dim']} {row['contestant']} {row['direction']}"
    visited = f" ({row['tflops_visited']:.0f} on visited blocks)" if "tflops_visited" in row else ""
    ratio = "" if row["speedup"] is None else f", {row['speedup']:.2f} x flex"
    return f"{name:58} {row['ms']:9.3f} ms {row['tflops']:6.1f} TFLOP/s{visited}{ratio}"


def plans(settings: Settings) -> list[dict[str, Any]]:
    """Time to compile a mask, once for all layers of a microbatch, and FlexAttention's block mask."""
    rows = []
    for length in settings.lengths:
        for name in ("causal", "embedded", "packed"):
            problem = settings.problem(name, length, settings.head_dims[0], rotation=1)
            row: dict[str, Any] = {"mask": name, "length": length}
            for label, build in _builds(settings, problem).items():
                try:
                    row[f"{label}_ms"] = _twice(build, settings)[0]
                except RuntimeError as error:  # the uncompiled block mask holds all pairs of tokens
                    row[f"{label}_failed"] = f"{type(error).__name__}: {error}"[:200]
            rows.append(row)
            print(f"  {row}", flush=True)
    return rows


def _builds(settings: Settings, problem: Problem) -> dict[str, Callable[[], Any]]:
    """Functions that compile the mask of a problem, by name."""
    tuning = settings.tuning(problem.shape.head_dim)
    blocks, heads = (tuning.block_q, tuning.block_k), problem.shape.heads
    builds: dict[str, Callable[[], Any]] = {
        "plan": lambda: compile_mask(problem.mask, problem.window, *blocks, num_heads=heads),
        "create_block_mask": flex_peer(problem, compiled=False)[1],
    }
    if settings.device == "cuda":
        builds["create_block_mask, compiled"] = flex_peer(problem, compiled=True)[1]
    return builds


def sweep(settings: Settings) -> list[dict[str, Any]]:
    """Other tiles than those of the table, one kernel at a time; prints the entries of `tuning.py` that won."""
    rows = []
    length = settings.lengths[min(1, len(settings.lengths) - 1)]
    for head_dim in settings.head_dims:
        problems = [settings.problem(name, length, head_dim, rotation=1) for name in ("causal", "packed")]
        best = tuning = settings.tuning(head_dim)
        for kernel in ("forward", "dkdv", "dq"):
            timed = []
            for tile in _tiles(settings, getattr(tuning, kernel)):
                timed.append((_time_tile(settings, problems, tuning, kernel, tile), tile))
                row = {"head_dim": head_dim, "kernel": kernel, "tile": asdict(tile)}
                rows.append({**row, "ms": timed[-1][0]})
            best = replace(best, **{kernel: min(timed, key=lambda pair: pair[0])[1]})
        print(f"  D{head_dim}: {best}", flush=True)
    return rows


def _tiles(settings: Settings, tile: Tile) -> Iterator[Tile]:
    """The tile of the table, then others that divide the blocks of the plan."""
    yield tile
    if settings.block is not None:
        yield replace(tile, block_q=tile.block_q // 2)
        return
    for block_q, block_k in ((32, 128), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128)):
        for num_warps in (4, 8):
            for num_stages in (2, 3):
                other = Tile(block_q, block_k, num_warps, num_stages)
                if other != tile:
                    yield other


def _time_tile(settings: Settings, problems: list[Problem], tuning: Tuning, kernel: str, tile: Tile) -> float:
    """ms over the problems, of the forward pass or of the whole backward pass; infinite if the tile does not run."""
    tuning = replace(tuning, **{kernel: tile})
    if tuning.block_q % tile.block_q or tuning.block_k % tile.block_k:
        return float("inf")
    total = 0.0
    for problem in problems:
        kernels = Kernels(problem, tuning)
        call = kernels.forward if kernel == "forward" else kernels.backward
        try:
            total += time_ms(lambda call=call: call(0), quick=settings.device == "cpu")
        except Exception:  # more shared memory than there is, or a compiler that gives up
            return float("inf")
    return total


def goals(rows: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """The timed rows compared with the goals."""
    found = []
    for row in rows:
        if row["contestant"] != "bitfield" or "ms" not in row or DRY_RUN:
            continue
        wanted = []
        if row["speedup"] is not None and row["mask"] in ("causal", "embedded", "packed"):
            goal = 1.0 if row["mask"] == "causal" else FLEX_GOALS[row["direction"]]
            wanted.append(("times FlexAttention", row["speedup"], goal))
        if "H200" in device and row["mask"] == "causal" and row["head_dim"] == 128:
            wanted.append(("TFLOP/s", row["tflops"], H200_GOALS[row["direction"]]))
        name = f"{row['mask']} {row['length']} D{row['head_dim']} {row['contestant']} {row['direction']}"
        found += [
            {"name": name, "what": what, "got": got, "goal": goal, "met": got >= goal} for what, got, goal in wanted
        ]
    return found


def conditions(device: str) -> dict[str, Any]:
    """Conditions of a measurement: the device beside those of the machine."""
    import triton

    found = common.machine(common.QUICK, os.getloadavg())
    found.pop("shapes")
    found["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu, interpreter"
    found["triton"] = triton.__version__
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"multiprocessors": properties.multi_processor_count, "memory_gib": properties.total_memory >> 30}
        found["clocks"] = _clocks()
    return found


def _clocks() -> str:
    """Current and largest clocks and the power limit, as the driver tells them."""
    query = "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    try:
        done = subprocess.run(["nvidia-smi", query, "--format=csv"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _save(result: dict[str, Any], folder: Path) -> None:
    """Writes the JSON; what other runs of the same commit found in other sections stays."""
    device = result["device"].replace("NVIDIA ", "").replace(" ", "-").lower()
    file = folder / f"attention-{device}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    if before.get("commit") == result["commit"]:
        result = {**before, **{name: value for name, value in result.items() if value}}
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="What to run.")
    parser.add_argument("--lengths", type=int, nargs="+", help="Lengths of the speed section.")
    parser.add_argument("--head-dims", type=int, nargs="+", help="Head dimensions of the speed section.")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="Folder of the JSON.")
    parser.add_argument("--cpu-dry-run", action="store_true", help="Everything once, tiny, in the interpreter.")
    options = parser.parse_args(arguments)
    if options.cpu_dry_run != DRY_RUN:
        parser.error("`--cpu-dry-run` is read when this file starts; give it on the command line.")
    if not DRY_RUN and not torch.cuda.is_available():
        print("attention_gpu needs a CUDA device; `--cpu-dry-run` tries the script itself.")
        return 2
    settings = TINY if DRY_RUN else Settings()
    settings = replace(settings, lengths=tuple(options.lengths or settings.lengths))
    settings = replace(settings, head_dims=tuple(options.head_dims or settings.head_dims))
    torch.manual_seed(int(datetime.now(UTC).timestamp()))
    result: dict[str, Any] = {"benchmark": "attention-gpu", **conditions(settings.device)}
    print(json.dumps(result, indent=2), flush=True)
    sections = {"correctness": correctness, "races": races, "ceilings": ceilings, "speed": speed}
    sections |= {"plans": plans, "sweep": sweep}
    right = True
    for name, run in sections.items():
        if name in options.sections and (right or name == "races"):
            print(f"{name}:", flush=True)
            result[name] = run(settings)
            right &= all(row.get("ok", True) for row in result[name] if isinstance(row, dict))
    result["goals"] = goals(result.get("speed", []), result["device"])
    for goal in result["goals"]:
        verdict = "yes" if goal["met"] else "NO"
        print(f"  {goal['name']:60} {goal['got']:8.2f} {goal['what']}, goal {goal['goal']}: {verdict}")
    if not DRY_RUN:
        _save(result, options.results)
    print("All checks hold." if right else "WRONG RESULTS: see above; nothing after them was timed.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
