"""Published sizes of models with a vision tower that people train, as configurations of transformers' classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}


def _qwen3_vl_moe() -> PreTrainedConfig:
    """As `config.json` of Qwen/Qwen3-VL-30B-A3B-Instruct has them."""
    text = {
        **{"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128},
        **{"num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False},
    }
    return transformers.Qwen3VLMoeConfig(text_config=text, vision_config={**_TOWER, "out_hidden_size": 2048})


def _default(name: str) -> Callable[[], PreTrainedConfig]:
    """The defaults of a class, which transformers says to be those of the model."""

    def make() -> PreTrainedConfig:
        config = getattr(transformers, name)()
        config.vision_config.out_hidden_size = config.get_text_config().hidden_size
        return config

    return make


# Name -> class of the model, its configuration
MODELS: Mapping[str, tuple[str, Callable[[], PreTrainedConfig]]] = {
    "Qwen3.5-9B": ("Qwen3_5ForConditionalGeneration", _default("Qwen3_5Config")),
    "Qwen3.5-35B-A3B": ("Qwen3_5MoeForConditionalGeneration", _default("Qwen3_5MoeConfig")),
    "Qwen3-VL-30B-A3B": ("Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe),
}


def config_of(name: str) -> PreTrainedConfig:
    """The configuration of a model in bfloat16, as a folder of it says."""
    cls, make = MODELS[name]
    config = make()
    config.architectures, config.dtype = [cls], torch.bfloat16
    return config


def model_of(name: str, attention: str) -> PreTrainedModel:
    """A model without memory, whose language model has an attention function."""
    cls: Any = getattr(transformers, MODELS[name][0])
    with torch.device("meta"):
        model = cls(config_of(name)).to(torch.bfloat16)
    model.set_attn_implementation({"text_config": attention})
    return model
