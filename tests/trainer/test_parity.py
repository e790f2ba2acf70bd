"""Any layout gives the stock Trainer's losses, gradient norms, learning rates and final weights."""

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from tests.distributed import run_distributed

from . import runs
from .runs import case
from .test_unlike_copies import copies

pytestmark = pytest.mark.distributed

VISION, AUDIO, LM = "vision", "audio", "language_model"
PP2 = {LM: {"pp_size": 2}}
VP2 = {"pp_size": 2, "vp_size": 2}
SPLIT2 = {"pp_size": 2, "split_backward": True}
AGAIN = {"activation_checkpointing": True}
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4, "lr_scheduler_type": "linear"}
COUNTED = {"include_num_input_tokens_seen": "non_padding"}
ANY_ORDER = {"modules": {VISION: copies([(0, 4, (0,))]), LM: copies([(0, 4, (2, 1))], [(0, 4, (3, 4))])}}

IN_CHUNKS = {"max_logits": runs.FEW_LOGITS}
LAYOUTS = [
    case("llava", {VISION: {"tp_size": 2}, LM: {"tp_size": 2, "pp_size": 2}}, always=True, **IN_CHUNKS),
    case("llava_onevision", {VISION: {"dp_size": 3}, LM: {"dp_size": 2}}),
    case("gemma3", {LM: {"layers_per_stage": [1, 2, 1]}}, always=True),
    case("qwen3_vl", {LM: {"tp_size": 2, "pp_size": 2, **AGAIN}}),
    case("voxtral", PP2),
    case("gemma4_text", {LM: {"pp_size": 3, **AGAIN}}, always=True),
    case("gemma4_text", {LM: {"dp_size": 2, **VP2}}),
    case("gemma4_text", {"modules": {LM: {**SPLIT2, "layers_per_stage": [3, 1]}}, "schedule": "zero_bubble"}),
    case("llama_tied", PP2, label_smoothing_factor=0.1, **IN_CHUNKS),
    case("llava", {VISION: {"pp_size": 2}, LM: {"freeze": True, "pp_size": 2}}),
    case("llava", PP2, always=True, **ADAMW, **COUNTED),
    case("llava", ANY_ORDER),
    case("llava", {"modules": {LM: VP2}, "schedule": "interleaved"}),
    case("llama_tied", {LM: {"tp_size": 2, **VP2, **AGAIN}}, always=True),
    case("qwen3_vl", {VISION: AGAIN, LM: {**VP2, **AGAIN}}),
    case("llava", {LM: {"dp_size": 2, "zero_stage": 3, **VP2}}),
    case("llava", {LM: {"dp_size": 2, "zero_stage": 1, **VP2}}),
    case("llava", {VISION: VP2, LM: {"freeze": True, "offload_params": True, **VP2}}),
    case("gemma3", {"modules": {LM: {"layers_per_stage": [1, 2, 1]}}, "schedule": "zero_bubble"}),
    case("llama_tied", {LM: {"tp_size": 2, **SPLIT2, **AGAIN}}),
    case("qwen3_vl", {VISION: AGAIN, LM: {"pp_size": 3, "split_backward": True, **AGAIN}}),
    case("qwen3_vl", {VISION: {"pp_size": 3, **AGAIN}, LM: {"pp_size": 2, **AGAIN}}, always=True),
    case("qwen3_vl", {VISION: {**VP2, "split_backward": True}, LM: {"colocate_with": VISION, "pp_size": 2}}),
    case("llava", {LM: {"dp_size": 2, "zero_stage": 1, **SPLIT2}}),
    case("llava", {LM: {"dp_size": 2, "zero_stage": 3, **SPLIT2}}),
    case("llava", {VISION: SPLIT2, LM: {**VP2, **SPLIT2}}),
    case(
        "llava",
        {"modules": {VISION: VP2, LM: {"colocate_with": VISION, "vp_size": 2}}, "schedule": "zero_bubble"},
        always=True,
    ),
    case("llava", {VISION: {"tp_size": 4}, LM: {"colocate_with": VISION, "pp_size": 2, "cp_size": 2}}),
    case("qwen2_vl", {VISION: {"dp_size": 4, "colocate_with": LM}, LM: {"pp_size": 2, "tp_size": 2}}),
    case(
        "qwen3_vl", {VISION: {"dp_size": 6, "colocate_with": LM, **AGAIN}, LM: {"dp_size": 2, "pp_size": 3, **AGAIN}}
    ),
    case(
        "llava",
        {
            VISION: {"dp_size": 3, "pp_size": 2, "zero_stage": 1, "colocate_with": LM},
            LM: {"dp_size": 2, "pp_size": 3, "zero_stage": 2},
        },
        always=True,
    ),
    case(
        "llava_onevision",
        {
            "modules": {VISION: {"tp_size": 2, "colocate_with": LM}, LM: {"dp_size": 2, **VP2}},
            "schedule": "zero_bubble",
        },
    ),
    case(
        "llava",
        {VISION: {"tp_size": 2}, LM: {"dp_size": 2, "pp_size": 2}},
        compute_loss_func=runs.with_small_normalizers,
    ),
    case("llama_tied", {LM: {"tp_size": 2}}, always=True, compute_loss_func=runs.with_small_normalizers),
    case("llava", {VISION: {"tp_size": 2, "colocate_with": LM}, LM: {"tp_size": 2, "split_backward": True}}),
    case("llama_tied", {LM: {"tp_size": 2, "freeze": [r"layers\."]}}),
    case("llava", {"modules": PP2, "schedule": "zero_bubble_h2"}),
    case("llava", {"modules": {VISION: {"freeze": "tower"}, **PP2}, "schedule": "zero_bubble"}),
    case("llava", {LM: {"freeze": [r"layers\.0\.", "embed_tokens"], **VP2}}),
]
# An epoch, whose last batch is smaller; the runs of the other tests go on into the next one
THREE_STEPS = {"max_steps": 3, "warmup_steps": 0}


@pytest.mark.parametrize(("family", "parallel", "arguments"), LAYOUTS)
def test_a_layout_equals_the_stock_trainer(family: str, parallel: Any, arguments: dict[str, Any]):
    runs.assert_a_layout_equals_the_stock_trainer(family, parallel, **THREE_STEPS, **arguments)


def test_gradient_accumulation_of_the_stock_trainer_is_microbatches_here():
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    run, *_ = run_distributed(runs.parallel_run, 3, "llava", PP2, global_batch_size=None, **accumulated)
    runs.assert_same_run(run, runs.stock("llava", **accumulated))


COPIES = {VISION: {"dp_size": 2}}
BF16 = [
    case("llava", {**COPIES, LM: {"pp_size": 2}}),
    case("llama_tied", {LM: {"tp_size": 2}}, always=True),
    case("llava", {**COPIES, LM: VP2}),
    case("llava", {**COPIES, LM: SPLIT2}),
]


@pytest.mark.parametrize(("family", "parallel", "arguments"), BF16)
def test_bf16_equals_the_stock_trainer_at_its_precision(family, parallel, arguments):
    layout = runs.Layout(family, parallel, partial(dict, bf16=True), arguments, rtol=5e-3)
    runs.assert_layouts_equal_the_stock_trainer(runs.ranks_of(family, parallel), {family: layout})


TP2 = {LM: {"tp_size": 2}}
BESIDE = {"tp_size": 2, "colocate_with": VISION}
# Tensor parallelism of families with experts, norms of heads and latent attention
FAMILIES: dict[str, Any] = {
    "apertus": TP2,
    "longcat_flash": TP2,
    "inkling2_text": TP2,
    "qwen3_omni_moe_thinker": {VISION: {"tp_size": 2}, AUDIO: BESIDE, LM: BESIDE},
}


@pytest.mark.parametrize("family", runs.deep_but(FAMILIES, "qwen3_omni_moe_thinker"))
def test_tensor_parallel_families_equal_the_stock_trainer(family: str):
    layout = runs.Layout(family, FAMILIES[family], partial(runs.shrunk, family, max_steps=3))
    runs.assert_layouts_equal_the_stock_trainer(2, {family: layout})


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
    max_examples=5, derandomize=False, database=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
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
