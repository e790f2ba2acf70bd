"""Ranks, microbatches and steps without any image hang nothing and change nothing, with DeepStack, ZeRO-3 and LoRA."""

import functools
from typing import Any

import pytest
import shrunk_batches
import shrunk_models

from tests import tiny
from tests.deep_cases import in_turn
from tests.distributed import run_distributed

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
CORE = {2: ("experts of a tp group",), 3: ()}
WITH_LORA = {2: ("ZeRO-3 beside stages",), 3: ()}
IN_ORDER: dict[str, Any] = {"microbatch_assignment": "contiguous"}  # else one microbatch would get all images


@functools.cache
def samples_of(family: str) -> tuple[list[Any], Any]:
    """The samples of three steps, and their collator where it is not that of the family."""
    numbers = [number for step in IMAGES for number in step]
    if family == DENSE:
        shapes = [tiny.Shape(images, 0, 6 + 3 * (index % 4)) for index, images in enumerate(numbers)]
        return tiny.make_dataset(family, len(shapes), shapes=shapes), None
    samples = shrunk_batches.make_samples(shrunk_models.build(family), family, 2 * len(numbers))
    seen = [[row for row in samples.rows if ("pixel_values" in row) == has_image] for has_image in (False, True)]
    return [seen[number > 0].pop(0) for number in numbers], samples.collate


def words_of(family: str) -> dict[str, Any]:
    rows, collate = samples_of(family)
    own = {} if family == DENSE else {"model": shrunk_models.build(family), "data_collator": collate}
    steps = {"max_steps": len(IMAGES), "warmup_steps": 0, "train_sampling_strategy": "sequential"}
    return {"data": rows, **own, **steps}


def adapted_run(family: str, layout: dict[str, Any], **others: Any) -> runs.Run:
    layout = {**layout, VISION: {**layout[VISION], "peft_config": LORA}}
    return runs.without_originals(runs.parallel_run(family, layout, **words_of(family), **others))


def train(layouts: dict[str, Layout], adapted: dict[str, Layout]) -> dict[str, runs.Run]:
    results = {
        name: runs.parallel_run(family, layout, **words_of(family), **IN_ORDER)
        for name, (family, layout) in layouts.items()
    }
    return results | {f"{name}, LoRA": adapted_run(*layout, **IN_ORDER) for name, layout in adapted.items()}


def alone(families: list[str]) -> dict[str, runs.Run]:
    """The stock Trainer, whose batch is the global batch, with the adapters of the same seed."""
    layout = {VISION: {}, LM: {"colocate_with": VISION}}
    batch = {"per_device_train_batch_size": runs.GLOBAL_BATCH}
    return {family: adapted_run(family, layout, **batch) for family in families}


@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_every_layout_equals_the_stock_trainer_where_images_are_missing(num_ranks: int):
    layouts = in_turn(LAYOUTS[num_ranks], *CORE[num_ranks])
    named = {f"{name}, LoRA": name for name in LAYOUTS[num_ranks]}
    chosen = in_turn(named, *(f"{name}, LoRA" for name in WITH_LORA[num_ranks])).values()
    adapted = {name: LAYOUTS[num_ranks][name] for name in chosen}
    if not layouts and not adapted:
        return
    first = run_distributed(train, num_ranks, layouts, adapted, timeout=290)[0]
    for name, (family, _) in layouts.items():
        runs.assert_same_run(first[name], runs.stock(family, **words_of(family)))
    families = list(dict.fromkeys(family for family, _ in adapted.values()))
    one_process = run_distributed(alone, 1, families, timeout=290)[0]
    for name, (family, _) in adapted.items():
        assert any("lora" in weight for weight in one_process[family].weights or {})
        runs.assert_same_run(first[f"{name}, LoRA"], one_process[family])
