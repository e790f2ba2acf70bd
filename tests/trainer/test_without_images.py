"""Ranks, microbatches and steps without any image hang nothing and change nothing, with DeepStack, ZeRO-3 and LoRA."""

import functools
from typing import Any

import pytest

from tests import tiny
from tests.deep_cases import in_turn

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
DENSE, DEEP_MOE = "qwen3_vl", "qwen3_vl_moe"  # whose features enter three layers
AGAIN = {"activation_checkpointing": True}
BESIDE = {"colocate_with": LM}
DIVIDED = {"dp_size": 2, "zero_stage": 3}
# images of each sample of three steps: of one sample only, of none, of those of one replica
IMAGES = (0, 0, 0, 0, 0, 0, 0, 2), (0,) * 8, (1, 2, 0, 0, 0, 0, 0, 0)
LORA = {"r": 2, "target_modules": ["qkv", "proj"], "peft_type": "LORA"}
Layout = tuple[str, dict[str, Any]]  # of a family
LAYOUTS: dict[int, dict[str, Layout]] = {  # by the number of ranks
    2: {
        "ranks of their own": (DENSE, {VISION: {}, LM: {}}),
        "ZeRO-3 of both": (DENSE, {VISION: {**DIVIDED, **AGAIN, **BESIDE}, LM: {**DIVIDED, **AGAIN}}),
        "ZeRO-3 beside stages": (DENSE, {VISION: {**DIVIDED, **BESIDE}, LM: {"pp_size": 2}}),
        "tp 2 of both": (DENSE, {VISION: {"tp_size": 2, **BESIDE}, LM: {"tp_size": 2}}),
        "copies beside tp 2": (DENSE, {VISION: {"dp_size": 2, "zero_stage": 2, **BESIDE}, LM: {"tp_size": 2}}),
        "shared tokens": (DENSE, {VISION: {**DIVIDED, **BESIDE}, LM: {"cp_size": 2, "cp_block": 8}}),
        "experts of copies": (DEEP_MOE, {VISION: {**DIVIDED, **BESIDE}, LM: {"dp_size": 2, "ep_size": 2}}),
        "experts, ZeRO-3 of both": (
            "qwen3_5_moe",
            {VISION: {**DIVIDED, **AGAIN, **BESIDE}, LM: {"ep_size": 2, **DIVIDED, **AGAIN}},
        ),
        "experts of a tp group": ("glm4v_moe", {VISION: {**DIVIDED, **BESIDE}, LM: {"tp_size": 2, "ep_size": 2}}),
        "experts of shared tokens": (
            "qwen3_5_moe",
            {VISION: {**DIVIDED, **BESIDE}, LM: {"cp_size": 2, "ep_size": 2, "cp_block": 8}},
        ),
        "shared images, experts of copies": (
            "glm4v_moe",
            {VISION: {"cp_size": 2, **AGAIN, **BESIDE}, LM: {"dp_size": 2, "ep_size": 2}},
        ),
    },
    3: {"experts beside a tower": (DEEP_MOE, {VISION: AGAIN, LM: {"dp_size": 2, "ep_size": 2, **AGAIN}})},
}
CORE = {2: ("experts of a tp group", "ZeRO-3 beside stages, LoRA"), 3: ()}
IN_ORDER: dict[str, Any] = {"microbatch_assignment": "contiguous"}  # else one microbatch would get all images


def words_of(family: str) -> dict[str, Any]:
    """The samples of three steps."""
    numbers, steps = [number for step in IMAGES for number in step], {"max_steps": len(IMAGES), "warmup_steps": 0}
    arguments = {**steps, "train_sampling_strategy": "sequential"}
    if family == DENSE:
        shapes = [tiny.Shape(images, 0, 6 + 3 * (index % 4)) for index, images in enumerate(numbers)]
        return {"data": tiny.make_dataset(family, len(shapes), shapes=shapes), **arguments}
    words = runs.shrunk(family, 2 * len(numbers), **arguments)
    seen = [[row for row in words["data"] if ("pixel_values" in row) == has_image] for has_image in (False, True)]
    return {**words, "data": [seen[number > 0].pop(0) for number in numbers]}


def cases_of(num_ranks: int) -> dict[str, runs.Layout]:
    """Each layout, and with adapters of the encoder."""
    found = {}
    for name, (family, layout) in LAYOUTS[num_ranks].items():
        words = functools.partial(words_of, family)
        found[name] = runs.Layout(family, layout, words, IN_ORDER)
        adapted = {**layout, VISION: {**layout[VISION], "peft_config": LORA}}
        alone = {VISION: {"peft_config": LORA}, LM: {"colocate_with": VISION}}
        found[f"{name}, LoRA"] = runs.Layout(family, adapted, words, IN_ORDER, alone=alone)
    return found


@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_every_layout_equals_the_stock_trainer_where_images_are_missing(num_ranks: int):
    chosen = in_turn(cases_of(num_ranks), *CORE[num_ranks])
    runs.assert_layouts_equal_the_stock_trainer(num_ranks, chosen)
