"""
Experts shared by ranks against whole ones, and against transformers' own expert parallelism under the stock Trainer:
time, memory and bytes sent of a step.

All train one Qwen3-MoE, with most of its parameters in experts, on the same global batches with the same AdamW, on
gloo ranks with one thread each, in turns and in fresh processes. Transformers shares experts among ranks that divide
all other weights (FSDP2), which is ZeRO-3 here.

```bash
python benchmarks/experts.py
python benchmarks/experts.py --quick --out out/bench  # the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from rich.table import Table
from sharding import measure, take_turns, trainer_of, value_of
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer

PEER = "transformers, ep, FSDP2"
# Variant -> sizes; n stands for all ranks
OURS: dict[str, dict[str, Any]] = {
    "dp": {"dp_size": "n"},
    "dp, ep": {"dp_size": "n", "ep_size": "n"},
    "dp, ZeRO-3": {"dp_size": "n", "zero_stage": 3},
    "dp, ep, ZeRO-3": {"dp_size": "n", "ep_size": "n", "zero_stage": 3},
    "tp": {"tp_size": "n"},
    "tp, ep": {"tp_size": "n", "ep_size": "n"},
}
WHOLE = {"dp, ep": "dp", "dp, ep, ZeRO-3": PEER, "tp, ep": "tp"}
"""Variant -> the one that it is compared with."""


@dataclass(frozen=True)
class Shapes:
    """A Qwen3-MoE and the length of its rows."""

    width: int = 256  # of hidden states and of each expert
    num_experts: int = 16
    layers: int = 4
    length: int = 96
    vocab_size: int = 1000


SHAPES, QUICK = Shapes(), Shapes(width=32, num_experts=4, layers=2)


def build_model(shapes: Shapes) -> Qwen3MoeForCausalLM:
    """A seeded model."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=shapes.width,
        moe_intermediate_size=shapes.width,
        num_experts=shapes.num_experts,
        num_experts_per_tok=2,
        num_hidden_layers=shapes.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=shapes.width // 4,
        vocab_size=shapes.vocab_size,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3MoeForCausalLM(config)


def make_dataset(shapes: Shapes, size: int) -> list[dict[str, torch.Tensor]]:
    """Rows of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, shapes.vocab_size, (size, shapes.length), generator=generator)
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]


def make_trainer(variant: str, folder: str, shapes: Shapes, num_steps: int) -> Trainer:
    """The Trainer of a variant, with the model of a folder."""
    world_size = int(os.environ["WORLD_SIZE"])
    make_data = functools.partial(make_dataset, shapes)
    if variant == PEER:
        from transformers.distributed import DistributedConfig

        shared = DistributedConfig(tp_size=1, fsdp_size=world_size, ep_size=world_size)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=shared)
        return trainer_of(model, make_data, num_steps)
    sizes = {name: world_size if size == "n" else size for name, size in OURS[variant].items()}
    return trainer_of(folder, make_data, num_steps, {"language_model": sizes})


def run_ranks(options: argparse.Namespace) -> None:
    """The function of the ranks; rank 0 writes the result."""
    make = functools.partial(
        make_trainer, options.variant, str(options.folder), QUICK if options.quick else SHAPES, options.steps
    )
    rows = measure(make, options.counts)
    if dist.get_rank() == 0:
        options.ranks.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def table_of(num_ranks: int, result: dict[str, dict[str, Any]]) -> Table:
    """The figures on a number of ranks."""
    columns = ("variant", "step ms", "CPU ms", "live tensors MiB", "sent MiB", "ratios")
    table = Table(*columns, title=f"{num_ranks} ranks")
    table.title_justify = "left"
    for name, row in result.items():
        other = result.get(WHOLE.get(name, ""))
        keys = ("step_ms", "cpu_ms", "live_mib", "sent_mib")
        ratios = [] if other is None else [f"{key} {value_of(row, key) / value_of(other, key):.2f}" for key in keys]
        step = row["step_ms"]
        table.add_row(
            name,
            f"{step['median']:.0f} ({step['min']:.0f} to {step['max']:.0f})",
            f"{row['cpu_ms']['median']:.0f}",
            f"{row['live_mib']:.1f}",
            f"{row['sent_mib']:.1f}",
            ", ".join(ratios) + (f" of {WHOLE[name]}" if ratios else ""),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes and two ranks, to try the script itself")
    parser.add_argument("--only", default="", help="variants whose names have this in them")
    parser.add_argument("--sizes", type=int, nargs="+", default=(2, 4), help="numbers of ranks")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each variant for time")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of a run")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--counts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks is not None:
        run_ranks(options)
        return
    load, shapes = os.getloadavg(), QUICK if options.quick else SHAPES
    if options.quick:
        options.repeats, options.steps, options.sizes = 1, 1, (2,)
    variants = [name for name in (*OURS, PEER) if options.only in name]
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(shapes)
        model.save_pretrained(folder)
        words = ["--folder", folder]
        results = {size: take_turns(variants, size, options, __file__, words) for size in options.sizes}
    notes = ["Live tensors: the peak on the fullest rank; sent: per step and rank, as on a ring, what is for others."]
    result = {
        "ranks": {str(size): of_size for size, of_size in results.items()},
        "repeats": options.repeats,
        "steps": options.steps,
        "num_parameters": model.num_parameters(),
        **common.machine(shapes, load),
    }
    common.report(
        "experts", [table_of(size, of_size) for size, of_size in results.items()], notes, result, options.out
    )


if __name__ == "__main__":
    main()
