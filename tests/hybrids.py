"""Tiny models with layers of several kinds, recurrent ones among them, of transformers' own classes."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from . import tiny

TEXT = {**tiny.TEXT, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 32}
IN_TURNS = {"layer_types": ["linear_attention", "full_attention"] * 2}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
    **IN_TURNS,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
KIMI = {
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_lora_rank", "linear_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("num_key_value_heads", "linear_num_heads"), 4),
    "q_lora_rank": None,
}
JAMBA = {
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    **dict.fromkeys(("mamba_d_state", "mamba_dt_rank"), 8),
    "num_experts": 4,
    "use_mamba_kernels": False,
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 8,
    "n_groups": 1,
    "n_routed_experts": 4,
    **dict.fromkeys(("mamba_head_dim", "ssm_state_size", "head_dim"), 16),
    **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    "chunk_size": 8,
}
ZAMBA = {
    "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],  # which share what attends
    **dict.fromkeys(("num_key_value_heads", "n_mamba_heads", "adapter_rank"), 4),
    "mamba_d_state": 16,
    "chunk_size": 8,
    **dict.fromkeys(("use_mem_rope", "use_shared_attention_adapter", "tie_word_embeddings"), True),
}
CHUNKS = {
    "attention_chunk_size": 8,
    "no_rope_layers": [1, 0, 1, 1],
    "head_dim": 16,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": DELTA_NET,
    "Qwen3_5MoeForCausalLM": {**DELTA_NET, **SHARED},
    "Qwen3NextForCausalLM": {**DELTA_NET, **SHARED},
    "KimiLinearForCausalLM": {**KIMI, **EXPERTS, **LOCAL, **IN_TURNS},
    "OlmoHybridForCausalLM": IN_TURNS,
    "MiniMaxForCausalLM": {**LOCAL, "head_dim": 16, "block_size": 8, **IN_TURNS},
    "BambaForCausalLM": {**MAMBA, "attn_layer_indices": [1, 3]},
    "FalconH1ForCausalLM": {**MAMBA, "mamba_d_ssm": 128, "head_dim": 16},
    "GraniteMoeHybridForCausalLM": {
        **MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        **LOCAL,
        "shared_intermediate_size": 32,
    },
    "JambaForCausalLM": JAMBA,
    "NemotronHForCausalLM": NEMOTRON,
    "Zamba2ForCausalLM": ZAMBA,
    "Llama4ForCausalLM": CHUNKS,
    "Lfm2ForCausalLM": {**CONVOLUTIONS, "block_multiple_of": 16},
    "Lfm2MoeForCausalLM": {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1},
}  # fmt: skip


def build(name: str, **changes: Any) -> PreTrainedModel:
    """The model of a class, always with the same weights, with changes of its configuration."""
    cls: Any = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name in CONFIGS:
            return cls(cls.config_class(**{**TEXT, **CONFIGS[name], **changes}))
        vision = {**tiny.DEEP_VISION, "num_position_embeddings": 16}
        experts = SHARED if "Moe" in name else {}
        text = {**TEXT, **DELTA_NET, **tiny.ROPE, **experts}
        return cls(cls.config_class(vision_config=vision, text_config=text, **tiny.QWEN_TOKENS))
