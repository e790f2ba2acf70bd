"""
Plans of Qwen3.5 and Qwen3-VL-MoE from one GPU to 512, by `hf-mmparallel plan` with the sizes of all modules given.

Samples have the sizes that are published of ChartQA; nothing runs.

```bash
python benchmarks/model_plans.py
python benchmarks/model_plans.py --quick --out out/bench  # seconds: one plan of one model
```
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import vlm_configs
from rich.table import Table

from hf_mmparallel.cli.main import main as hf_mmparallel

DATASET, GPU, SAMPLES = "chartqa", "h100", 1024
TOWER = "checkpointing=true,colocate=language_model"
HOST = "dp=1,checkpointing=true,offload_optimizer=true,offload_activations=true"
ON_ONE = {
    # all of it is trained; only the projector is, and the frozen weights are in host memory
    "dense": (f"dp=1,{TOWER},offload_optimizer=true", HOST, 8),
    "experts": (f"dp=1,{TOWER},freeze=tower", "dp=1,freeze=true,offload_params=true,checkpointing=true", 8),
}
# GPUs -> settings of the tower and of the language model, samples of a global batch
DENSE: dict[int, tuple[str, str, int]] = {
    1: ON_ONE["dense"],
    8: (f"dp=8,zero_stage=1,{TOWER}", "dp=4,tp=2,zero_stage=1,checkpointing=true", 64),
    64: (f"dp=64,zero_stage=1,{TOWER}", "dp=64,zero_stage=3,shard_size=8,checkpointing=true", 512),
    512: (f"dp=512,zero_stage=1,shard_size=8,{TOWER}", "dp=512,zero_stage=3,shard_size=8,checkpointing=true", 4096),
}
EXPERTS: dict[int, tuple[str, str, int]] = {
    1: ON_ONE["experts"],
    8: (f"dp=8,zero_stage=1,{TOWER}", "dp=8,ep=8,zero_stage=1,checkpointing=true,offload_optimizer=true", 64),
    64: (f"dp=64,zero_stage=1,{TOWER}", "dp=64,ep=8,zero_stage=1,checkpointing=true", 512),
    512: (f"dp=512,zero_stage=1,shard_size=64,{TOWER}", "dp=512,ep=8,zero_stage=1,checkpointing=true", 4096),
}
LAYOUTS = {"Qwen3.5-9B": DENSE, "Qwen3.5-35B-A3B": EXPERTS, "Qwen3-VL-30B-A3B": EXPERTS}


def command_of(folder: str, gpus: int, tower: str, language_model: str, batch: int) -> list[str]:
    """The arguments of `hf-mmparallel` for a plan."""
    modules = [
        "--module",
        f"vision:{tower}",
        "--module",
        f"language_model:{language_model},attn_implementation=bitfield",
    ]
    sizes = ["--gpus", str(gpus), "--gpu-type", GPU, "--global-batch-size", str(batch), "--microbatch-size", "2"]
    samples = ["--dataset", DATASET, "--num-samples", str(SAMPLES)]
    return ["plan", "--model", folder, *samples, *sizes, "--microbatch-assignment", "hierarchical", *modules]


def plans(models: list[str], gpus: list[int]) -> Iterator[dict[str, Any]]:
    """What the command writes of each plan."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in models:
            vlm_configs.config_of(name).save_pretrained(name)
            for count in gpus:
                arguments = command_of(name, count, *LAYOUTS[name][count])
                said, told = io.StringIO(), io.StringIO()
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
                    code = hf_mmparallel([*arguments, "--json", "plan.json"])
                if code:
                    raise RuntimeError(f"{name} on {count}: {told.getvalue()}")
                found = json.loads(Path("plan.json").read_text())
                kept = (
                    "layouts",
                    "global_batch_size",
                    "step_ms",
                    "tokens_per_second",
                    "peak_memory_gib",
                    "flops_utilisation",
                )
                yield {"model": name, "gpus": count, "arguments": arguments, **{key: found.get(key) for key in kept}}


def table(rows: list[dict[str, Any]]) -> Table:
    """The plans with their predictions."""
    result = Table(title="Predicted plans")
    for column in ("model", "GPUs", "language model", "step s", "tokens/s/GPU"):
        result.add_column(column)
    for row in rows:
        speed = row["tokens_per_second"] / row["gpus"]
        layout = row["layouts"]["language_model"]
        result.add_row(row["model"], str(row["gpus"]), layout, f"{row['step_ms'] / 1e3:.2f}", f"{speed:,.0f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one plan")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    load_before = os.getloadavg()
    rows = list(plans(list(LAYOUTS)[:1], [8]) if options.quick else plans(list(LAYOUTS), list(DENSE)))
    result = {**common.machine(common.Shapes(), load_before), "plans": rows}
    common.report("model_plans", [table(rows)], [], result, options.out)


if __name__ == "__main__":
    main()
