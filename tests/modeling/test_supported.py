"""Models that a plan can't describe are refused with what they have and what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PretrainedConfig

from hf_mmparallel import MultimodalModel
from hf_mmparallel.modeling import build_model_spec, check_supported
from hf_mmparallel.modeling.loading import build_on_meta
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan
from tests import tiny

torch.set_num_threads(1)
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "vocab_size": 64}
IMAGES: dict[str, Any] = {"image_size": 16, "patch_size": 8}
AUDIO: dict[str, Any] = {"d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}


def mllama() -> PretrainedConfig:
    """Its language model attends to images across, and it has no `get_image_features`."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_global_layers": 2, **IMAGES}
    sizes |= {"attention_heads": 4, "intermediate_layers_indices": [0], "vision_output_dim": 64}
    text = hf.models.mllama.MllamaTextConfig(**TEXT, pad_token_id=0, cross_attention_layers=[1])
    vision = hf.models.mllama.MllamaVisionConfig(**sizes)
    return hf.MllamaConfig(vision_config=vision, text_config=text, image_token_index=60)


def qwen2_audio() -> PretrainedConfig:
    parts = {"audio_config": {"model_type": "qwen2_audio_encoder", **AUDIO}}
    return hf.Qwen2AudioConfig(**parts, text_config={"model_type": "qwen2", **TEXT}, audio_token_index=60)


def git() -> PretrainedConfig:
    """Its image encoder is in what `get_decoder` returns, with more layers than the text has."""
    return hf.GitConfig(vision_config={**SIZES, **IMAGES, "num_hidden_layers": 4}, **SIZES, vocab_size=64)


UNKNOWN = {
    mllama: r"`model.vision_model.transformer.layers` \(3 `MllamaVisionEncoderLayer`\), `model.vision_model.global_tr",
    qwen2_audio: r"`model.audio_tower.layers` \(3 `Qwen2AudioEncoderLayer`\); modules: `language_model`",
    git: r"`git.image_encoder.vision_model.encoder.layers` \(4 `GitVisionEncoderLayer`\)",
}


@pytest.mark.parametrize("config", UNKNOWN)
def test_layers_in_no_module_are_named(config: Callable[[], PretrainedConfig]):
    model = build_on_meta(config())
    assert list(build_model_spec(model).modules) == [LANGUAGE_MODEL]
    with pytest.raises(ValueError, match=f"`{type(model).__name__}` .*{UNKNOWN[config]}.*`multimodal_parts`"):
        check_supported(model)


def test_a_placeholder_that_the_configuration_does_not_say_is_asked_for():
    model = tiny.FAMILIES["voxtral"]()
    model.config.audio_token_id = None
    with pytest.raises(ValueError, match="`audio_token_id`"):
        check_supported(model)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_models_that_are_trained_under_plans_are_not_refused(family: str):
    check_supported(tiny.FAMILIES[family]())


def test_parts_beside_the_layers_are_no_stack():
    """Janus has an image tokenizer for generation, Gemma 3n projections beside its layers."""
    vision = {"model_type": "janus_vision_model", **SIZES, **IMAGES, "projection_dim": 32, "depth": 2}
    vq = {"embed_dim": 8, "num_embeddings": 16, "base_channels": 32, "image_token_embed_dim": 32, "projection_dim": 32}
    text = {"model_type": "llama", **TEXT}
    check_supported(build_on_meta(hf.JanusConfig(vision_config=vision, text_config=text, vq_config=vq)))
    text = {**TEXT, "num_hidden_layers": 4, "intermediate_size": [32] * 4, "head_dim": 8}
    check_supported(build_on_meta(hf.Gemma3nTextConfig(**text, vocab_size_per_layer_input=64, num_kv_shared_layers=0)))


def test_encoders_of_any_make_can_be_composed():
    encoder = hf.Qwen2AudioEncoder(qwen2_audio().audio_config)
    text = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT))
    check_supported(MultimodalModel.from_unimodal({"audio": encoder}, text, token_ids={"audio": 60}))


BERT, LLAMA = hf.BertConfig(**SIZES, vocab_size=64), hf.LlamaConfig(**SIZES, vocab_size=64)
OMNI = hf.Qwen2_5OmniConfig(enable_audio_output=False)
DECODER = hf.BertConfig(**SIZES, vocab_size=64, is_decoder=True)


@pytest.mark.parametrize(
    "model, config, salient",
    [
        (hf.BertForMaskedLM, BERT, "is a masked language model.*`is_decoder=True`"),
        (hf.BertLMHeadModel, BERT, "is a masked language model.*`is_decoder=True`"),
        (hf.BertForMaskedLM, DECODER, "the loss `ForMaskedLM`"),
        (hf.BertModel, BERT, "no language-model head"),
        (hf.ViTModel, hf.ViTConfig(**SIZES, **IMAGES), "no language-model head.*`MultimodalModel.from_unimodal`"),
        (hf.LlamaModel, LLAMA, "no language-model head, .* next-token"),
        (hf.LlamaForSequenceClassification, LLAMA, "no language-model head, .* next-token"),
        (hf.Qwen2_5OmniForConditionalGeneration, OMNI, "no forward.*`Qwen2_5OmniThinkerForCond.*from_pretrained`"),
        (hf.BertLMHeadModel, DECODER, None),
    ],
)
def test_models_that_are_not_causal_or_have_no_head_are_refused(model: type, config: PretrainedConfig, salient: str):
    with torch.device("meta"):
        built = model(config)
    if salient is None:
        check_supported(built)
        return
    with pytest.raises(ValueError, match=f"`{model.__name__}` .*{salient}"):
        check_supported(built)


def test_an_encoder_that_a_configuration_leaves_out_is_no_module():
    vision = {"model_type": "gemma4_vision", **SIZES, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4}
    text = {**TEXT, "head_dim": 8, "global_head_dim": 8, "vocab_size_per_layer_input": 64}
    text |= {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    config = hf.Gemma4Config(vision_config=vision, audio_config=None, text_config=text, image_token_id=60)
    model = build_on_meta(config)
    assert model.get_encoder(modality="audio") is None
    check_supported(model)
    assert list(build_model_spec(model).modules) == ["vision", LANGUAGE_MODEL]


def test_layers_of_unlike_widths_are_no_stages_and_those_of_unknown_width_told_of():
    model = build_on_meta(hf.CONFIG_MAPPING["muse_spark"](text_config={"num_hidden_layers": 4}))
    spec = build_model_spec(model)
    assert spec.modules["audio"].hidden_size == 2048
    with pytest.raises(ValueError, match="`pp_size=2` of `audio`.* unlike widths"):
        resolve_plan(spec, {name: ModulePlugin(pp_size=1 + (name == "audio")) for name in spec.modules})
    model.config.audio_config.hidden_sizes = []
    with pytest.raises(ValueError, match="the layers of `audio`.* without `parallel`"):
        build_model_spec(model)


def test_numbers_of_unlike_layers_are_those_that_all_can_be_cut_by():
    full = {"head_dim": 32, "num_key_value_heads": 2}
    config = hf.CONFIG_MAPPING["gemma4_text"](
        **{**TEXT, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16},
        layer_types=["sliding_attention", "full_attention"] * 2,
        per_layer_config={1: full, 3: full},
    )
    module = build_model_spec(build_on_meta(config)).language_model
    assert (module.num_heads, module.num_kv_heads, module.head_width) == (8, 2, 24)
