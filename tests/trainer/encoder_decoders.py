"""Tiny encoder-decoder models, and models made of one half of such a model."""

from typing import Any

import transformers as hf
from transformers import PreTrainedModel

from hf_mmparallel import MultimodalModel

TEXT: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": 64,
}
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def florence2() -> PreTrainedModel:
    vision = {
        "embed_dim": [8, 16, 16, 16],
        "num_heads": [2, 2, 2, 2],
        "num_groups": [2, 2, 2, 2],
        "depths": [1, 1, 1, 1],
        "window_size": 4,
        "projection_dim": 32,
    }
    text = {"model_type": "bart", **TEXT}
    return hf.Florence2ForConditionalGeneration(hf.Florence2Config(vision_config=vision, text_config=text))


def _whisper_config() -> hf.WhisperConfig:
    return hf.WhisperConfig(**TEXT, num_mel_bins=8, max_source_positions=10, max_target_positions=16, pad_token_id=0)


def whisper() -> PreTrainedModel:
    return hf.WhisperForConditionalGeneration(_whisper_config())


def bart() -> PreTrainedModel:
    return hf.BartForConditionalGeneration(hf.BartConfig(**TEXT))


def blip2_t5() -> PreTrainedModel:
    """One whose language model is an encoder-decoder."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    text = {"model_type": "t5", **sizes}
    vision = {**SIZES, "image_size": 16, "patch_size": 8}
    former = {**SIZES, "encoder_hidden_size": 32, "vocab_size": 64}
    config = hf.Blip2Config(vision_config=vision, qformer_config=former, text_config=text)
    return hf.Blip2ForConditionalGeneration(config)


ALL = (florence2, whisper, bart, blip2_t5)


def bart_decoder() -> PreTrainedModel:
    return hf.BartForCausalLM(hf.BartConfig(**TEXT))


def with_whisper() -> PreTrainedModel:
    """The encoder of a Whisper model before a causal language model."""
    text = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=64))
    return MultimodalModel.from_unimodal({"audio": hf.WhisperModel(_whisper_config())}, text, token_ids={"audio": 60})
