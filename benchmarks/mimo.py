"""
The twelve published ratios of MegatronMIMO: Qwen3.5-VL 27B with its encoder in the first stage of the language
model (16 GPUs), and the same layout of the language model with the encoder on a GPU of its own (17 GPUs).

Published are 27 billion parameters, both layouts, sequences, global batches, and the size of the images of one of the
three datasets (768 x 768 pixels). Sizes of the others are assumed, see `IMAGES`; sequences are padded to their full
length, as pipelines of Megatron-LM need it; the device is taken to be H100. Nothing is fitted.

```bash
python benchmarks/mimo.py
```
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Shapes, machine, report
from rich.table import Table
from transformers import AutoConfig

from hf_mmparallel.cost import CostModel, analytic_costs, find_device
from hf_mmparallel.cost.layers import OURS_FUSED, Engine
from hf_mmparallel.cost.ledger import ledger_of
from hf_mmparallel.cost.step_planner import Prediction, StepPlanner
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.loading import build_on_meta
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlugin,
    ParallelPlan,
    SampleSizes,
    resolve_plan,
    sync_groups,
)

SOURCE = "NVIDIA-NeMo/Megatron-Bridge, tutorials/megatron_mimo/qwen35-vl-non-colocated-sft.md, section 4, at 2243534"
VISION, PATCH = "vision", 16
# pixels of an image: RDR as published; receipts of CORD-v2 and pictures of MedPix vary, and these are assumptions
IMAGES = {"CORD-v2": (864, 1312), "RDR": (768, 768), "MedPix": (640, 640)}
# (sequence, global batch) -> by how much a step is shorter with the encoder on its own GPU
PUBLISHED = {
    (2048, 32): {"CORD-v2": 0.281, "RDR": 0.276, "MedPix": 0.238},
    (2048, 64): {"CORD-v2": 0.305, "RDR": 0.350, "MedPix": 0.327},
    (4096, 32): {"CORD-v2": 0.235, "RDR": 0.237, "MedPix": 0.237},
    (4096, 64): {"CORD-v2": 0.277, "RDR": 0.279, "MedPix": 0.262},
}
MEGATRON = Engine(fused=True, fused_loss=True, hidden_sums=True, sums_in_place=True)
ENGINES = {"Megatron": MEGATRON, "ours": OURS_FUSED}
LANGUAGE = ModulePlugin(dp_size=2, pp_size=2, tp_size=4, zero_stage=1)


def model() -> ModelSpec:
    """Qwen3.5-27B."""
    text = {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 17408,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
    }
    vision = {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "out_hidden_size": 5120}
    config: Any = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision, tie_word_embeddings=False)
    return build_model_spec(build_on_meta(config, torch.bfloat16))


def apart(spec: ModelSpec) -> ParallelPlan:
    """The encoder on the last of 17 GPUs."""
    plan = resolve_plan(spec, {VISION: ModulePlugin(), LANGUAGE_MODEL: LANGUAGE})
    return _moved(plan, lambda name, rank: 16 if name == VISION else rank - 1)


def together(spec: ModelSpec) -> ParallelPlan:
    """The encoder on the GPUs of the language model's first stage, with their tensor parallelism."""
    plan = resolve_plan(spec, {VISION: ModulePlugin(dp_size=2, tp_size=4), LANGUAGE_MODEL: LANGUAGE})
    # a replica of the language model has eight ranks, of which the first four are its first stage
    return _moved(plan, lambda name, rank: rank // 4 * 8 + rank % 4 if name == VISION else rank - 8)


def _moved(plan: ParallelPlan, number) -> ParallelPlan:
    """The plan with other numbers of ranks."""
    modules = {}
    for name, module in plan.modules.items():
        replicas = tuple(
            tuple(
                replace(stage, mesh=tuple(tuple(number(name, rank) for rank in group) for group in stage.mesh))
                for stage in replica
            )
            for replica in module.replicas
        )
        modules[name] = replace(module, replicas=replicas)
    return replace(plan, modules=modules)


def predicted(costs: CostModel, plan: ParallelPlan, sizes: SampleSizes) -> Prediction:
    """A step of a plan with one sample a microbatch."""
    plan = replace(plan, num_microbatches=sizes.num_samples // 2)
    return StepPlanner(costs, plan, sync_groups(costs.spec, plan), 1).predict_batch(sizes)


def compare(spec: ModelSpec, engine: Engine, dataset: str, seq_len: int, batch: int) -> dict[str, Any]:
    """Both layouts on a batch."""
    costs = analytic_costs(spec, find_device("h100"), engine=engine)
    height, width = IMAGES[dataset]
    sizes = SampleSizes.uniform({VISION: height * width // PATCH**2, LANGUAGE_MODEL: seq_len}, batch)
    steps = {name: predicted(costs, plan(spec), sizes) for name, plan in (("one", together), ("apart", apart))}
    one = steps["one"]
    shares = ledger_of([one], costs, sync_groups(spec, one.plan)).shares
    return {
        "one_layout_ms": round(one.step_ms, 1),
        "apart_ms": round(steps["apart"].step_ms, 1),
        "shorter": round(1 - steps["apart"].step_ms / one.step_ms, 4),
        "ledger_of_one_layout": {name: round(share, 4) for name, share in shares.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load, spec = os.getloadavg(), model()
    table = Table(title="by how much a step is shorter with the encoder on its own GPU", title_justify="left")
    for name in ("sequence", "batch", "dataset", "published", *ENGINES):
        table.add_column(name, justify="left" if name == "dataset" else "right")
    rows = []
    for (seq_len, batch), published in PUBLISHED.items():
        for dataset, shorter in published.items():
            found = {name: compare(spec, engine, dataset, seq_len, batch) for name, engine in ENGINES.items()}
            rows.append({"seq_len": seq_len, "batch": batch, "dataset": dataset, "published": shorter, **found})
            shares = [f"{share:.1%}" for share in (shorter, *(own["shorter"] for own in found.values()))]
            table.add_row(str(seq_len), str(batch), dataset, *shares)
    result = {**machine(Shapes(), load), "source": SOURCE, "rows": rows}
    report("mimo", [table], [], result, options.out)


if __name__ == "__main__":
    main()
