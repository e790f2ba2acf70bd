"""Any layout gives the stock Trainer's losses, gradient norms, learning rates and final weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs
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
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "llava, tp 2 to tp 2 with stages": (
        "llava",
        6,
        {VISION: {"tp_size": 2}, LM: {"tp_size": 2, "pp_size": 2}},
        IN_CHUNKS,
    ),
    "llava_onevision, three copies to two": ("llava_onevision", 5, {VISION: {"dp_size": 3}, LM: {"dp_size": 2}}, {}),
    "gemma3, tied, uneven stages": ("gemma3", 4, {LM: {"layers_per_stage": [1, 2, 1]}}, {}),
    "qwen3_vl, tp 2, cut inside DeepStack, recomputed": (
        "qwen3_vl",
        5,
        {LM: {"tp_size": 2, "pp_size": 2, **AGAIN}},
        {},
    ),
    "voxtral, audio": ("voxtral", 3, PP2, {}),
    "llama, no encoder": ("llama_tied", 2, PP2, {"label_smoothing_factor": 0.1, **IN_CHUNKS}),
    "llava, frozen LM": ("llava", 4, {VISION: {"pp_size": 2}, LM: {"freeze": True, "pp_size": 2}}, {}),
    "llava, AdamW, linear schedule, tokens counted": ("llava", 3, PP2, {**ADAMW, **COUNTED}),
    "llava, rows of ranks in any order": ("llava", 5, ANY_ORDER, {}),
    "llava, interleaved": ("llava", 3, {"modules": {LM: VP2}, "schedule": "interleaved"}, {}),
    "llama, tied, tp 2, virtual stages, recomputed": ("llama_tied", 4, {LM: {"tp_size": 2, **VP2, **AGAIN}}, {}),
    "qwen3_vl, virtual stages inside DeepStack, recomputed": (
        "qwen3_vl",
        3,
        {VISION: AGAIN, LM: {**VP2, **AGAIN}},
        {},
    ),
    "llava, virtual stages of copies, ZeRO-3": ("llava", 5, {LM: {"dp_size": 2, "zero_stage": 3, **VP2}}, {}),
    "llava, virtual stages, ZeRO-1": ("llava", 5, {LM: {"dp_size": 2, "zero_stage": 1, **VP2}}, {}),
    "llava, virtual stages of both, frozen weights in host memory": (
        "llava",
        4,
        {VISION: VP2, LM: {"freeze": True, "offload_params": True, **VP2}},
        {},
    ),
    "gemma3, tied, uneven stages, zero bubble": (
        "gemma3",
        4,
        {"modules": {LM: {"layers_per_stage": [1, 2, 1]}}, "schedule": "zero_bubble"},
        {},
    ),
    "llama, tied, tp 2, split backwards, recomputed": ("llama_tied", 4, {LM: {"tp_size": 2, **SPLIT2, **AGAIN}}, {}),
    "qwen3_vl, split backwards, cut inside DeepStack, recomputed": (
        "qwen3_vl",
        4,
        {VISION: AGAIN, LM: {"pp_size": 3, "split_backward": True, **AGAIN}},
        {},
    ),
    "qwen3_vl, stages of both cut inside DeepStack, recomputed": (
        "qwen3_vl",
        5,
        {VISION: {"pp_size": 3, **AGAIN}, LM: {"pp_size": 2, **AGAIN}},
        {},
    ),
    "qwen3_vl, virtual stages of vision, split backwards": (
        "qwen3_vl",
        2,
        {VISION: {**VP2, "split_backward": True}, LM: {"colocate_with": VISION, "pp_size": 2}},
        {},
    ),
    "llava, split backwards of copies, ZeRO-1": ("llava", 5, {LM: {"dp_size": 2, "zero_stage": 1, **SPLIT2}}, {}),
    "llava, split backwards of copies, ZeRO-3": ("llava", 5, {LM: {"dp_size": 2, "zero_stage": 3, **SPLIT2}}, {}),
    "llava, split backwards of both, virtual stages": (
        "llava",
        4,
        {VISION: SPLIT2, LM: {**VP2, **SPLIT2}},
        {},
    ),
    "llava, zero bubble and virtual stages on shared ranks": (
        "llava",
        2,
        {"modules": {VISION: VP2, LM: {"colocate_with": VISION, "vp_size": 2}}, "schedule": "zero_bubble"},
        {},
    ),
    "llava, tp 4 of vision on the ranks of stages that share tokens": (
        "llava",
        4,
        {VISION: {"tp_size": 4}, LM: {"colocate_with": VISION, "pp_size": 2, "cp_size": 2}},
        {},
    ),
    "qwen2_vl, dp 4 of vision on the ranks of pp 2 x tp 2": (
        "qwen2_vl",
        4,
        {VISION: {"dp_size": 4, "colocate_with": LM}, LM: {"pp_size": 2, "tp_size": 2}},
        {},
    ),
    "qwen3_vl, dp 6 of vision on the ranks of dp 2 x pp 3, recomputed": (
        "qwen3_vl",
        6,
        {VISION: {"dp_size": 6, "colocate_with": LM, **AGAIN}, LM: {"dp_size": 2, "pp_size": 3, **AGAIN}},
        {},
    ),
    "llava, dp 3 x pp 2 of vision on the ranks of dp 2 x pp 3, ZeRO": (
        "llava",
        6,
        {
            VISION: {"dp_size": 3, "pp_size": 2, "zero_stage": 1, "colocate_with": LM},
            LM: {"dp_size": 2, "pp_size": 3, "zero_stage": 2},
        },
        {},
    ),
    "llava_onevision, tp 2 of vision on the ranks of virtual stages": (
        "llava_onevision",
        4,
        {
            "modules": {VISION: {"tp_size": 2, "colocate_with": LM}, LM: {"dp_size": 2, **VP2}},
            "schedule": "zero_bubble",
        },
        {},
    ),
    "llava, a loss of the user, copies, tp 2 with stages": (
        "llava",
        6,
        {VISION: {"tp_size": 2}, LM: {"dp_size": 2, "pp_size": 2}},
        {"compute_loss_func": runs.with_small_normalizers},
    ),
    "llama, tied, a loss of the user, tp 2": (
        "llama_tied",
        2,
        {LM: {"tp_size": 2}},
        {"compute_loss_func": runs.with_small_normalizers},
    ),
    "llava, tp 2 of both on the same ranks, split backwards": (
        "llava",
        2,
        {VISION: {"tp_size": 2, "colocate_with": LM}, LM: {"tp_size": 2, "split_backward": True}},
        {},
    ),
    "llama, tied, tp 2, frozen layers": ("llama_tied", 2, {LM: {"tp_size": 2, "freeze": [r"layers\."]}}, {}),
    "llava, zero bubble with more memory": ("llava", 3, {"modules": PP2, "schedule": "zero_bubble_h2"}, {}),
    "llava, frozen vision, zero bubble": (
        "llava",
        3,
        {"modules": {VISION: {"freeze": "tower"}, **PP2}, "schedule": "zero_bubble"},
        {},
    ),
    "llava, virtual stages, the first frozen": (
        "llava",
        3,
        {LM: {"freeze": [r"layers\.0\.", "embed_tokens"], **VP2}},
        {},
    ),
}
CORE = (
    "qwen3_vl, stages of both cut inside DeepStack, recomputed",
    "llava, tp 2 to tp 2 with stages",
    "gemma3, tied, uneven stages",
    "llava, AdamW, linear schedule, tokens counted",
    "llama, tied, tp 2, virtual stages, recomputed",
    "llava, zero bubble and virtual stages on shared ranks",
    "llama, tied, a loss of the user, tp 2",
    "llava, dp 3 x pp 2 of vision on the ranks of dp 2 x pp 3, ZeRO",
)
# An epoch, whose last batch is smaller; the runs of the other tests go on into the next one
THREE_STEPS = {"max_steps": 3, "warmup_steps": 0}


@pytest.mark.parametrize("name", runs.deep_but(LAYOUTS, *CORE))
def test_a_layout_equals_the_stock_trainer(name: str):
    family, world_size, parallel, arguments = LAYOUTS[name]
    runs.assert_a_layout_equals_the_stock_trainer(family, world_size, parallel, **THREE_STEPS, **arguments)


def test_gradient_accumulation_of_the_stock_trainer_is_microbatches_here():
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    run, *_ = run_distributed(runs.parallel_run, 3, "llava", PP2, global_batch_size=None, **accumulated)
    runs.assert_same_run(run, runs.stock("llava", **accumulated))


COPIES = {VISION: {"dp_size": 2}}
BF16 = [
    deep("llava", 4, {**COPIES, LM: {"pp_size": 2}}),
    ("llama_tied", 2, {LM: {"tp_size": 2}}),
    deep("llava", 4, {**COPIES, LM: VP2}),
    deep("llava", 4, {**COPIES, LM: SPLIT2}),
]


@pytest.mark.parametrize(("family", "world_size", "parallel"), BF16)
def test_bf16_equals_the_stock_trainer_at_its_precision(family, world_size, parallel):
    run, *_ = run_distributed(runs.parallel_run, world_size, family, parallel, bf16=True)
    runs.assert_same_run(run, runs.stock(family, bf16=True), rtol=5e-3, atol=5e-4)


# Tensor parallelism of families with experts, norms of heads and latent attention

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TEXT = {**tiny.TEXT, "num_hidden_layers": 2}
OMNI = {
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        **tiny.PATCHES,
    },
    "audio_config": {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "output_dim": 64,
        "downsample_hidden_size": 8,
    },
    "text_config": {**TEXT, "head_dim": 16, **tiny.ROPE, **EXPERTS},
    **tiny.QWEN_TOKENS,
    "audio_token_id": tiny.AUDIO_TOKEN,
    "audio_start_token_id": 105,
    "audio_end_token_id": 106,
}
TOGETHER = {
    VISION: {"tp_size": 2},
    AUDIO: {"tp_size": 2, "colocate_with": VISION},
    LM: {"tp_size": 2, "colocate_with": VISION},
}

LONGCAT = {
    **TEXT,
    **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("num_key_value_heads", "n_routed_experts", "zero_expert_num", "moe_topk"), 4),
    "num_layers": 2,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 32,
    "v_head_dim": 8,
}
INKLING = {
    **TEXT,
    **dict.fromkeys(("swa_num_attention_heads", "d_rel", "n_routed_experts"), 4),
    **dict.fromkeys(("swa_num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim"), 16),
    "unpadded_vocab_size": tiny.VOCAB_SIZE,
    "eos_token_id": 1,
    "rel_extent": 64,
    "moe_intermediate_size": 32,
    "n_layers_per_attn_res_block": 1,
}
TP2 = {LM: {"tp_size": 2}}
# Class -> (whose samples it takes, layout, configuration)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ApertusForCausalLM": ("llama", TP2, TEXT),
    "LongcatFlashForCausalLM": ("llama", TP2, LONGCAT),
    "Inkling2ForCausalLM": ("llama", TP2, INKLING),
    "Qwen3OmniMoeThinkerForConditionalGeneration": ("qwen2_5_omni", TOGETHER, OMNI),
}


def of_family(name: str) -> dict[str, Any]:
    """A seeded model and its samples; four audio tokens are 32 frames of the newer omni family."""
    family, _, config = MODELS[name]
    cls = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(cls.config_class(**config))
    data = tiny.make_dataset(family, runs.SAMPLES)
    for sample in data:
        if "input_features" in sample:
            sample["input_features"] = sample["input_features"].repeat_interleave(2, -1)
            sample["feature_attention_mask"] = sample["feature_attention_mask"].repeat_interleave(2, -1)
    return {"model": model, "data": data, "max_steps": 3}


def train_family(name: str) -> runs.Run:
    family, layout, _ = MODELS[name]
    return runs.parallel_run(family, layout, **of_family(name))


@pytest.mark.parametrize("name", runs.deep_but(MODELS, "Qwen3OmniMoeThinkerForConditionalGeneration"))
def test_tensor_parallel_families_equal_the_stock_trainer(name: str):
    runs.assert_same_run(run_distributed(train_family, 2, name)[0], runs.stock(MODELS[name][0], **of_family(name)))


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
