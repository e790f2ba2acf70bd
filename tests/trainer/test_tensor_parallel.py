"""Tensor parallelism of families with experts, norms of heads and latent attention equals the stock Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests import tiny
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, AUDIO, LM = "vision", "audio", "language_model"
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

# Class -> (whose samples it takes, layout, configuration)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ApertusForCausalLM": ("llama", {LM: {"tp_size": 2}}, TEXT),
    "LongcatFlashForCausalLM": (
        "llama",
        {LM: {"tp_size": 2}},
        {
            **TEXT,
            "num_layers": 2,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 4,
            "moe_topk": 4,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "Inkling2ForCausalLM": (
        "llama",
        {LM: {"tp_size": 2}},
        {
            **TEXT,
            "head_dim": 16,
            "unpadded_vocab_size": tiny.VOCAB_SIZE,
            "eos_token_id": 1,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "d_rel": 4,
            "rel_extent": 64,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_layers_per_attn_res_block": 1,
        },
    ),
    "Qwen3OmniMoeThinkerForConditionalGeneration": ("qwen2_5_omni", TOGETHER, OMNI),
}


def _given(name: str) -> dict[str, Any]:
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


def _train_all() -> dict[str, runs.Run]:
    return {name: runs.parallel_run(family, layout, **_given(name)) for name, (family, layout, _) in MODELS.items()}


def test_every_family_equals_the_stock_trainer():
    first = run_distributed(_train_all, 2, timeout=120)[0]
    for name, (family, _, _) in MODELS.items():
        runs.assert_same_run(first[name], runs.stock(family, **_given(name)))
