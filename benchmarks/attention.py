"""
Bitfield attention against torch's attention with a dense mask.

On a CPU: packed samples of about a thousand tokens whose images see themselves both ways, forward, and forward with
backward. Both run in turns in one process; their memory is what a process of its own takes on top of its inputs. Where
a CUDA device is found, `attention_gpu.py` runs in place of this, with the rest of the command line.

```bash
python benchmarks/attention.py
python benchmarks/attention.py --quick --out out/bench  # seconds; the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, bitfield_attention, encode_words, row_intervals

OURS, PEER = "bitfield", "sdpa, dense mask"
PASSES = ("forward", "forward + backward")
GOALS = {"length": 16384, "forward": 10.0, "forward + backward": 8.0, "memory": 0.10}


@dataclass(frozen=True)
class Shapes:
    """
    One layer's attention.

    Args:
        heads (`int`): Query heads.
        kv_heads (`int`): Heads of keys and values.
        head_dim (`int`): Their size.
        lengths (`tuple[int, ...]`): Tokens of a row.
        sample_tokens (`tuple[int, int]`): The fewest and the most tokens of a sample.
        image_tokens (`int`): Of an image; each stands behind some text, as often as a sample has room for.
        text_tokens (`tuple[int, int]`): Before the first image of a sample, and between two.
    """

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    lengths: tuple[int, ...] = (4096, 16384)
    sample_tokens: tuple[int, int] = (512, 1536)
    image_tokens: int = 576
    text_tokens: tuple[int, int] = (32, 200)


QUICK = Shapes(lengths=(256, 512), sample_tokens=(50, 150), image_tokens=30, text_tokens=(8, 12))


def packed_words(shapes: Shapes, length: int) -> Tensor:
    """Words `[1, length]`, always the same."""
    rng = random.Random(0)
    segment, image = torch.zeros(2, 1, length, dtype=torch.int64)
    begin, sample = 0, 0
    while begin < length:
        sample += 1
        end = min(begin + rng.randint(*shapes.sample_tokens), length)
        segment[:, begin:end] = sample
        at, number = begin + shapes.text_tokens[0], 0
        while at + shapes.image_tokens < end:
            number += 1
            image[:, at : at + shapes.image_tokens] = number
            at += shapes.image_tokens + shapes.text_tokens[1]
        begin = end
    return encode_words(segment, span=image)


def draw(shapes: Shapes, length: int) -> list[Tensor]:
    """Queries, keys and values, which want gradients, and the gradient of the output."""
    heads = (shapes.heads, shapes.kv_heads, shapes.kv_heads, shapes.heads)
    drawn = [torch.randn(1, count, length, shapes.head_dim) for count in heads]
    return [*(tensor.requires_grad_() for tensor in drawn[:3]), drawn[3]]


def contestant(name: str, words: Tensor) -> Callable[..., Any]:
    """Attention with its mask as it wants it, which is not timed."""
    if name == OURS:
        return lambda query, key, value: bitfield_attention(query, key, value, words)
    bounds = row_intervals(BitfieldMask.from_words(words))
    assert bounds is not None
    places = torch.arange(words.shape[1], dtype=torch.int32)
    dense = (places >= bounds.first[0][:, None]) & (places <= bounds.last[0][:, None])
    return lambda query, key, value: scaled_dot_product_attention(query, key, value, attn_mask=dense, enable_gqa=True)


def run(attend: Callable[..., Any], which: str, inputs: list[Tensor]) -> list[Tensor]:
    """One pass: its output, or the gradients."""
    if which == "forward":
        with torch.no_grad():
            return [attend(*inputs[:3])]
    return list(torch.autograd.grad(attend(*inputs[:3]), inputs[:3], inputs[3]))


def check(shapes: Shapes) -> None:
    """Both must compute the same before any is timed."""
    length = shapes.lengths[0]
    words, inputs = packed_words(shapes, length), draw(shapes, length)
    for which in PASSES:
        ours, peers = (run(contestant(name, words), which, inputs) for name in (OURS, PEER))
        for one, other in zip(ours, peers, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def timings(shapes: Shapes, length: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each pass of both, in turns."""
    words, inputs = packed_words(shapes, length), draw(shapes, length)
    attend = {name: contestant(name, words) for name in (OURS, PEER)}
    times = {which: {name: [] for name in attend} for which in PASSES}
    for which in PASSES:
        for turn in range(repeats + 1):
            for name in attend:
                start = time.perf_counter()
                run(attend[name], which, inputs)
                if turn:  # the first one warms up
                    times[which][name].append(1e3 * (time.perf_counter() - start))
    return times


def memory_mib(name: str, which: str, shapes: Shapes, length: int) -> float:
    """Peak memory of this process, in MiB above its memory before the mask is made."""
    tiny = Shapes(lengths=(64,), sample_tokens=(20, 40), image_tokens=8, text_tokens=(4, 4))
    run(contestant(name, packed_words(tiny, 64)), which, draw(tiny, 64))  # libraries load and threads start
    words, inputs = packed_words(shapes, length), draw(shapes, length)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status_kib("VmRSS")
    run(contestant(name, words), which, inputs)
    return round((_status_kib("VmHWM") - before) / 1024, 1)


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def compare(shapes: Shapes, length: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each pass at one length."""
    rows = []
    for which, times in timings(shapes, length, repeats).items():
        memory = {name: common.in_processes(memory_mib, [name], [which], [shapes], [length])[0] for name in times}
        spreads = {name: common.spread(values) for name, values in times.items()}
        rows.append(
            {
                "length": length,
                "pass": which,
                "time_ms": spreads,
                "memory_mib": memory,
                "times_faster": round(spreads[PEER]["median"] / spreads[OURS]["median"], 2),
                "memory_share": round(memory[OURS] / max(memory[PEER], 0.1), 3),
            }
        )
    return rows


def as_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Attention of one layer, packed samples with images, median (smallest to largest)")
    for name in ("tokens", "pass", f"{OURS}, ms", f"{PEER}, ms", "faster", "memory MiB", "share"):
        table.add_column(name, justify="left" if name == "pass" else "right")
    for row in rows:
        times = [f"{s['median']:.0f} ({s['min']:.0f} to {s['max']:.0f})" for s in row["time_ms"].values()]
        memory = " / ".join(f"{value:.0f}" for value in row["memory_mib"].values())
        share = f"{row['memory_share']:.1%}"
        table.add_row(str(row["length"]), row["pass"], *times, f"{row['times_faster']:.1f}x", memory, share)
    return table


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """Each goal beside what was measured."""
    found = {row["pass"]: row for row in rows if row["length"] == GOALS["length"]}
    lines = [f"{which}: {row['times_faster']:.1f}x, goal {GOALS[which]:.0f}x." for which, row in found.items()]
    if "forward" in found:
        lines.append(f"forward's memory: {found['forward']['memory_share']:.1%}, goal {GOALS['memory']:.0%}.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each pass")
    parser.add_argument("--cpu", action="store_true", help="the CPU part although there is a CUDA device")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    options, rest = parser.parse_known_args()
    if torch.cuda.is_available() and not options.cpu:
        import attention_gpu

        sys.exit(attention_gpu.main(["--results", str(options.out), *rest]))
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    shapes = QUICK if options.quick else Shapes()
    torch.manual_seed(0)
    load = os.getloadavg()
    check(shapes)
    rows = [row for length in shapes.lengths for row in compare(shapes, length, options.repeats)]
    result = {"rows": rows, "goals": GOALS, "threads": torch.get_num_threads(), **common.machine(shapes, load)}
    common.report("attention", [as_table(rows)], notes(rows), result, options.out)


if __name__ == "__main__":
    main()
