"""
Models that read and draw, on DistTrain's clusters: its allocation and order of samples, one layout for all modules,
ranks in proportion to operations, and the planner's own, each simulated with our costs on the same drawn batches.

The paper gives the models, 8,192 tokens a sample, the resolutions, the batch and the cluster. It does not give how
many images its samples have: here 1 to 6 by chance, each of which is read, and drawn by the generator. The U-Net of
Stable Diffusion is counted as transformer layers with its parameters (0.87 billion) and as many tokens as give its
operations, 339 billion multiplications for 512 x 512 pixels (Kim et al. 2023, BK-SDM, table 1), and four times as many
for 1024 x 1024.

```bash
python benchmarks/disttrain.py
python benchmarks/disttrain.py --trained all --models MLLM-9B  # some cases; others stay as they are
python benchmarks/disttrain.py --quick --out out/bench  # the numbers mean nothing
```
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
from planner_models import stack_of
from rich.table import Table

from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.cost.stage_memory import GIB
from hf_mmparallel.papers.compare import DISTTRAIN, RATIO, SINGLE, compare
from hf_mmparallel.plan import LANGUAGE_MODEL, FeatureSpec, ModelSpec, ModuleSpec, ParameterSpec, SampleSizes
from hf_mmparallel.planning.problem import PlanningProblem
from hf_mmparallel.planning.search import search_plans

VISION, IMAGE = "vision", "image"
TOKENS, PATCH, MOST_IMAGES = 8192, 16, 6
USABLE = 0.9  # of the memory

# layers, width, width of the feed-forward layers, heads, heads of keys: DistTrain's table 1
LANGUAGE_MODELS = {
    "MLLM-9B": (32, 4096, 11008, 32, 32),
    "MLLM-15B": (40, 5120, 13824, 40, 40),
    "MLLM-72B": (80, 8192, 28672, 64, 8),
}
RESOLUTION = {"MLLM-9B": 512, "MLLM-15B": 512, "MLLM-72B": 1024}
VIT_HUGE, UNET = (32, 1280, 5120, 16), (44, 1280, 5120, 20)
UNET_TOKENS = 400  # of 512 x 512 pixels: 339e9 / 0.87e9, with attention a little less
VOCABULARY = 128256
# setting -> modules that are trained; projectors always are
TRAINED = {
    "all": (VISION, LANGUAGE_MODEL, IMAGE),
    "projectors": (),
    "encoder": (VISION,),
    "language model": (LANGUAGE_MODEL,),
    "generator": (IMAGE,),
}
METHODS = (DISTTRAIN, SINGLE, RATIO)


@dataclass(frozen=True)
class Shapes:
    """What is simulated."""

    models: tuple[str, ...] = tuple(LANGUAGE_MODELS)
    num_ranks: int = 1296
    batch: int = 1920
    frozen_ranks: int = 96  # of the runs with frozen modules
    frozen_batch: int = 128
    settings: tuple[str, ...] = tuple(TRAINED)
    device: str = "a800"
    effort: int = 96


SHAPES = Shapes()
QUICK = Shapes(("MLLM-9B",), 16, 16, 16, 16, ("all", "generator"), "a800", 8)


def transformer(
    name: str, layers: int, width: int, inner: int, heads: int, ends: Sequence[ParameterSpec]
) -> ModuleSpec:
    """An encoder or a generator of plain transformer layers."""
    shapes = {f"attn.{part}_proj": (width, width) for part in "qkvo"}
    shapes |= {"mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    stack = f"{name}.layers"
    parameters = (*ends, *stack_of(stack, shapes, layers))
    features = (FeatureSpec("image"),) if name == VISION else ()
    return ModuleSpec(name, stack, layers, width, heads, heads, inner, parameters, features, stack)


def spec_of(model: str, trained: Sequence[str]) -> ModelSpec:
    """A ViT-Huge, a Llama of the paper's sizes and Stable Diffusion's U-Net."""
    layers, width, inner, heads, key_heads = LANGUAGE_MODELS[model]
    keys = width * key_heads // heads
    shapes = {f"self_attn.{part}_proj": (keys if part in "kv" else width, width) for part in "qkvo"}
    shapes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    stack = "language_model.layers"
    ends = [
        ParameterSpec("language_model.embed_tokens.weight", (VOCABULARY, width), -1, "bfloat16"),
        ParameterSpec("language_model.lm_head.weight", (VOCABULARY, width), layers, "bfloat16"),
    ]
    llama = ModuleSpec(
        LANGUAGE_MODEL,
        stack,
        layers,
        width,
        heads,
        key_heads,
        inner,
        (*ends, *stack_of(stack, shapes, layers)),
        tower=stack,
    )
    reads = ParameterSpec("vision.projector.weight", (width, VIT_HUGE[1]), VIT_HUGE[0], "bfloat16")
    draws = ParameterSpec("image.projector.weight", (UNET[1], width), -1, "bfloat16")
    modules = {
        VISION: transformer(VISION, *VIT_HUGE, [reads]),
        LANGUAGE_MODEL: llama,
        IMAGE: transformer(IMAGE, *UNET, [draws]),
    }
    return ModelSpec(
        {name: m if name in trained else with_frozen_layers(m) for name, m in modules.items()}, {}, {"image": 1}
    )


def with_frozen_layers(module: ModuleSpec) -> ModuleSpec:
    """A module of which only a projector is trained."""
    parameters = tuple(replace(p, trainable="projector" in p.name) for p in module.parameters)
    return replace(module, parameters=parameters)


def sizes_of(model: str, count: int, seed: int = 0) -> SampleSizes:
    """Samples with images to read and to draw."""
    images = np.random.default_rng(seed).integers(1, MOST_IMAGES, count, endpoint=True)
    read, drawn = (512 // PATCH) ** 2, UNET_TOKENS * (RESOLUTION[model] // 512) ** 2
    return SampleSizes.of_sequences(
        {
            VISION: [[read] * own for own in images],
            LANGUAGE_MODEL: [[TOKENS]] * count,
            IMAGE: [[drawn] * own for own in images],
        }
    )


def simulate(model: str, setting: str, shapes: Shapes) -> dict[str, Any]:
    """The planner's plan and those of the baselines, on the same batches."""
    device = find_device(shapes.device)
    large = setting == "all"
    num_ranks, batch = (shapes.num_ranks, shapes.batch) if large else (shapes.frozen_ranks, shapes.frozen_batch)
    problem = PlanningProblem(
        analytic_costs(spec_of(model, TRAINED[setting]), device),
        sizes_of(model, 2 * batch),
        num_ranks,
        batch,
        USABLE * (device.memory_gib or 0.0) * GIB,
        zero_stages=(1,),
        offloads=False,
        effort=shapes.effort,
    )
    start = time.process_time()
    found = search_plans(problem)
    mfu = float(np.mean([prediction.flops_utilisation for prediction in found.best.predictions]))
    plans = {"ours": {"plan": str(found.best.candidate), "step_ms": found.best.step_ms, "mfu": mfu}}
    plans["ours"]["seconds"] = time.process_time() - start
    for other in compare(problem, found):
        if other.name in METHODS and not math.isnan(other.step_ms):
            figures = {"plan": other.layout, "step_ms": other.step_ms, "mfu": other.flops_utilisation}
            plans[other.name] = {**figures, "note": other.note}
    return {"model": model, "trained": setting, "ranks": num_ranks, "batch": batch, "plans": plans}


def table_of(cases: Sequence[Mapping[str, Any]]) -> Table:
    """MFU of ours, and step times of the others over ours."""
    table = Table("model", "trained", "GPUs", "our MFU", "MFU of DistTrain", *(f"{name} / ours" for name in METHODS))
    for case in cases:
        plans = case["plans"]
        ratios = [plans[n]["step_ms"] / plans["ours"]["step_ms"] if n in plans else None for n in METHODS]
        theirs = f"{plans[DISTTRAIN]['mfu']:.1%}" if DISTTRAIN in plans else "-"
        texts = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        table.add_row(
            case["model"], case["trained"], str(case["ranks"]), f"{plans['ours']['mfu']:.1%}", theirs, *texts
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny questions, to try the script itself")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--trained", nargs="+", choices=TRAINED, help="settings to run; other cases stay as they are")
    parser.add_argument("--models", nargs="+", choices=LANGUAGE_MODELS, help="models to run; other cases stay")
    options = parser.parse_args()
    load, shapes = os.getloadavg(), QUICK if options.quick else SHAPES
    path = options.out / "disttrain.json"
    is_part = bool(options.trained or options.models)
    kept = json.loads(path.read_text())["cases"] if is_part and path.exists() else []
    settings, models = options.trained or shapes.settings, options.models or shapes.models
    chosen = [(model, setting) for setting in settings for model in models]
    cases = [case for case in kept if (case["model"], case["trained"]) not in chosen]
    cases += common.in_processes(simulate, *zip(*chosen, strict=True), [shapes] * len(chosen))
    cases.sort(key=lambda case: (shapes.models.index(case["model"]), list(TRAINED).index(case["trained"])))
    result = {"cases": cases, **common.machine(shapes, load)}
    common.report(
        "disttrain", [table_of(cases)], ["Ratios are of step times on the same batches."], result, options.out
    )


if __name__ == "__main__":
    main()
