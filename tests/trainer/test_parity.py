"""Any layout gives the stock Trainer's losses, gradient norms, learning rates and final weights."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from tests.distributed import run_distributed

from . import runs
from .test_unlike_copies import copies

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"

LAYOUTS = {
    "llava, copies of vision, stages of the LM": ("llava", 4, {VISION: {"dp_size": 2}, LM: {"pp_size": 2}}, {}),
    "llava, stages of vision, three copies of the LM": ("llava", 5, {VISION: {"pp_size": 2}, LM: {"dp_size": 3}}, {}),
    "llava, tp 2 to tp 2 with stages": ("llava", 6, {VISION: {"tp_size": 2}, LM: {"tp_size": 2, "pp_size": 2}}, {}),
    "llava, eight ranks": (
        "llava",
        8,
        {VISION: {"dp_size": 2, "tp_size": 2}, LM: {"dp_size": 2, "pp_size": 2}},
        {},
    ),
    "llava_next, gpipe": ("llava_next", 3, {"modules": {LM: {"pp_size": 2}}, "schedule": "gpipe"}, {}),
    "llava_onevision, three copies to two": ("llava_onevision", 5, {VISION: {"dp_size": 3}, LM: {"dp_size": 2}}, {}),
    "gemma3, tied, uneven stages": ("gemma3", 4, {LM: {"layers_per_stage": [1, 2, 1]}}, {}),
    "paligemma, tied, copies and stages": ("paligemma", 5, {LM: {"dp_size": 2, "pp_size": 2}}, {}),
    "internvl, tp 2 to tp 1": ("internvl", 3, {VISION: {"tp_size": 2}}, {}),
    "mistral3, copies of both": ("mistral3", 4, {VISION: {"dp_size": 2}, LM: {"dp_size": 2}}, {}),
    "qwen2_vl, copies and stages": ("qwen2_vl", 4, {VISION: {"dp_size": 2}, LM: {"pp_size": 2}}, {}),
    "qwen2_5_vl, tp 1 to tp 2": ("qwen2_5_vl", 3, {LM: {"tp_size": 2}}, {}),
    "qwen3_vl, cut inside DeepStack": ("qwen3_vl", 4, {VISION: {"dp_size": 2}, LM: {"pp_size": 2}}, {}),
    "qwen3_vl, cut inside DeepStack, recomputed": (
        "qwen3_vl",
        4,
        {VISION: {"activation_checkpointing": True}, LM: {"pp_size": 3, "activation_checkpointing": True}},
        {},
    ),
    "qwen3_vl_moe, experts and norms of heads in tp 2": ("qwen3_vl_moe", 5, {LM: {"dp_size": 2, "tp_size": 2}}, {}),
    "voxtral, audio": ("voxtral", 3, {LM: {"pp_size": 2}}, {}),
    "llama, no encoder": ("llama_tied", 2, {LM: {"pp_size": 2}}, {"label_smoothing_factor": 0.1}),
    "llava, frozen tower": ("llava", 3, {VISION: {"freeze": "tower"}, LM: {"pp_size": 2}}, {}),
    "llava, frozen vision": ("llava", 3, {VISION: {"freeze": True}, LM: {"pp_size": 2}}, {}),
    "llava, frozen LM": ("llava", 4, {VISION: {"pp_size": 2}, LM: {"freeze": True, "pp_size": 2}}, {}),
    "qwen2_vl, activation checkpointing": (
        "qwen2_vl",
        3,
        {VISION: {"activation_checkpointing": True}, LM: {"pp_size": 2, "activation_checkpointing": True}},
        {},
    ),
    "llava, AdamW, linear schedule, tokens counted": (
        "llava",
        3,
        {LM: {"pp_size": 2}},
        {
            "optim": "adamw_torch",
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-4,
            "lr_scheduler_type": "linear",
            "include_num_input_tokens_seen": "non_padding",
        },
    ),
}
SELDOM = {
    "llava, copies of vision, stages of the LM",
    "llava, stages of vision, three copies of the LM",
    "llava, eight ranks",
    "paligemma, tied, copies and stages",
    "qwen2_vl, copies and stages",
    "qwen3_vl, cut inside DeepStack",
    "qwen3_vl_moe, experts and norms of heads in tp 2",
    "llava, frozen tower",
    "llava, frozen vision",
    "qwen2_vl, activation checkpointing",
    "llava, AdamW, linear schedule, tokens counted",
}


@pytest.mark.parametrize("name", runs.deep_but(LAYOUTS, *(LAYOUTS.keys() - SELDOM)))
def test_a_layout_equals_the_stock_trainer(name: str):
    family, world_size, parallel, arguments = LAYOUTS[name]
    runs.assert_a_layout_equals_the_stock_trainer(family, world_size, parallel, **arguments)


@pytest.mark.deep
def test_rows_of_ranks_in_any_order_equal_the_stock_trainer():
    modules = {VISION: copies([(0, 4, (0,))]), LM: copies([(0, 4, (2, 1))], [(0, 4, (3, 4))])}
    runs.assert_a_layout_equals_the_stock_trainer("llava", 5, {"modules": modules})


def test_gradient_accumulation_of_the_stock_trainer_is_microbatches_here():
    reference = runs.stock("llava", per_device_train_batch_size=2, gradient_accumulation_steps=4)
    ranks = run_distributed(
        runs.parallel_run,
        3,
        "llava",
        {LM: {"pp_size": 2}},
        global_batch_size=None,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
    )
    runs.assert_same_run(ranks[0], reference)


def test_bf16_equals_the_stock_trainer_at_its_precision():
    reference = runs.stock("llava", bf16=True)
    ranks = run_distributed(runs.parallel_run, 4, "llava", {VISION: {"dp_size": 2}, LM: {"pp_size": 2}}, bf16=True)
    runs.assert_same_run(ranks[0], reference, rtol=5e-3, atol=5e-4)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, int, dict[str, Any], int]:
    """A family, a layout of at most 8 ranks, and samples of a microbatch."""
    family = draw(st.sampled_from(["llava", "qwen2_vl", "gemma3", "internvl"]))
    sizes = {}
    for module, longest in ((VISION, 2), (LM, 3)):
        dp = draw(st.integers(1, 3))
        pp = draw(st.integers(1, longest))
        tp = draw(st.sampled_from([1, 1, 2]))
        sizes[module] = {"dp_size": dp, "pp_size": pp, "tp_size": tp}
    if draw(st.booleans()):
        shared = draw(st.sampled_from([{"cp_mode": "segments"}, {"cp_method": "random"}, {}]))
        sizes[LM] = {"dp_size": 1, "pp_size": draw(st.integers(1, 2)), "tp_size": draw(st.integers(1, 2))}
        sizes[LM] |= {"cp_size": 2, "cp_block": draw(st.sampled_from([8, 16])), **shared}
    ranks = {name: s["dp_size"] * s["pp_size"] * s["tp_size"] * s.get("cp_size", 1) for name, s in sizes.items()}
    for name in (LM, VISION):
        if sum(ranks.values()) > 8:
            sizes[name]["dp_size"], ranks[name] = 1, ranks[name] // sizes[name]["dp_size"]
    if sum(ranks.values()) > 8:
        sizes[LM]["tp_size"], ranks[LM] = 1, ranks[LM] // sizes[LM]["tp_size"]
    for name in (LM, VISION):
        sizes[name]["zero_stage"] = draw(st.integers(0, 3))
    return family, sum(ranks.values()), sizes, draw(st.integers(1, 5))


@pytest.mark.deep
@pytest.mark.slow
@seed(20260)
@settings(
    max_examples=5,
    derandomize=False,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(layouts())
def test_random_layouts_equal_the_stock_trainer(layout: tuple[str, int, dict[str, Any], int]):
    family, world_size, parallel, microbatch = layout
    note(f"{family} {parallel} microbatches of {microbatch}")
    reference = runs.stock(family, max_steps=2)
    ranks = run_distributed(
        runs.parallel_run, world_size, family, parallel, max_steps=2, per_device_train_batch_size=microbatch
    )
    runs.assert_same_run(ranks[0], reference)
