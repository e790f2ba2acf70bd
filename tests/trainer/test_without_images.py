"""Ranks, microbatches and steps without any image hang nothing and change nothing, with DeepStack, ZeRO-3 and LoRA."""

from __future__ import annotations

from typing import Any

import pytest

from tests import tiny
from tests.deep_cases import in_turn
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
FAMILY = "qwen3_vl"  # whose features enter three layers
AGAIN = {"activation_checkpointing": True}
# images of each sample of three steps: of one sample only, of none, of those of one replica
IMAGES = (0, 0, 0, 0, 0, 0, 0, 2), (0,) * 8, (1, 2, 0, 0, 0, 0, 0, 0)
LORA = {"r": 2, "target_modules": ["qkv", "proj"], "peft_type": "LORA"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ranks of their own": {VISION: {}, LM: {}},
    "ZeRO-3 of both": {
        VISION: {"dp_size": 2, "zero_stage": 3, **AGAIN},
        LM: {"dp_size": 2, "zero_stage": 3, "colocate_with": VISION, **AGAIN},
    },
    "ZeRO-3 beside stages": {
        VISION: {"dp_size": 2, "zero_stage": 3},
        LM: {"pp_size": 2, "colocate_with": VISION},
    },
    "tp 2 of both": {VISION: {"tp_size": 2}, LM: {"tp_size": 2, "colocate_with": VISION}},
    "copies beside tp 2": {VISION: {"dp_size": 2, "zero_stage": 2}, LM: {"tp_size": 2, "colocate_with": VISION}},
    "shared tokens": {
        VISION: {"dp_size": 2, "zero_stage": 3},
        LM: {"cp_size": 2, "cp_block": 8, "colocate_with": VISION},
    },
}
ADAPTED = {name: LAYOUTS[name] for name in ("ranks of their own", "ZeRO-3 of both", "copies beside tp 2")}


def arguments() -> dict[str, Any]:
    numbers = [number for step in IMAGES for number in step]
    shapes = [tiny.Shape(images, 0, 6 + 3 * (index % 4)) for index, images in enumerate(numbers)]
    data = tiny.make_dataset(FAMILY, len(shapes), shapes=shapes)
    return {"data": data, "max_steps": len(IMAGES), "warmup_steps": 0, "train_sampling_strategy": "sequential"}


IN_ORDER: dict[str, Any] = {"microbatch_assignment": "contiguous"}  # else one microbatch would get all images


def with_lora(layout: dict[str, Any]) -> dict[str, Any]:
    return {**layout, VISION: {**layout[VISION], "peft_config": LORA}}


def adapted_run(layout: dict[str, Any], **others: Any) -> runs.Run:
    return runs.without_originals(runs.parallel_run(FAMILY, with_lora(layout), **arguments(), **others))


def train(layouts: dict[str, Any], adapted: dict[str, Any]) -> dict[str, runs.Run]:
    results = {name: runs.parallel_run(FAMILY, layout, **arguments(), **IN_ORDER) for name, layout in layouts.items()}
    return results | {f"{name}, LoRA": adapted_run(layout, **IN_ORDER) for name, layout in adapted.items()}


def alone() -> runs.Run:
    """The stock Trainer, whose batch is the global batch, with the adapters of the same seed."""
    layout = {VISION: {}, LM: {"colocate_with": VISION}}
    return adapted_run(layout, per_device_train_batch_size=runs.GLOBAL_BATCH)


def test_every_layout_equals_the_stock_trainer_where_images_are_missing():
    layouts = in_turn(LAYOUTS, "ZeRO-3 beside stages", "shared tokens")
    adapted = in_turn(ADAPTED, "copies beside tp 2")
    first = run_distributed(train, 2, layouts, adapted, timeout=280)[0]
    plain = runs.stock(FAMILY, **arguments())
    for name in layouts:
        runs.assert_same_run(first[name], plain)
    one_process = run_distributed(alone, 1)[0]
    assert any("lora" in name for name in one_process.weights or {})
    for name in adapted:
        runs.assert_same_run(first[f"{name}, LoRA"], one_process)
