"""Composed models of many families: features as wide as they are, and stages that equal the whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.llama4.modeling_llama4 import Llama4VisionModel
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import (
    Phi4MultimodalAudioConfig,
    Phi4MultimodalAudioModel,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionConfig,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel, Qwen2VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel

from hf_mmparallel.modeling.multimodal_model import MultimodalModel
from hf_mmparallel.modeling.spec import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL
from tests.deep_cases import third
from tests.modeling.test_stages import assert_same, make_plan, run_stages

MEDIA = 119
Inputs = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGES: dict[str, Any] = {**SIZES, "image_size": 16, "patch_size": 8}
INTERNVL: dict[str, Any] = {**SIZES, "image_size": [16, 16], "patch_size": [8, 8]}
PATCHES: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2}
PATCHES |= {"temporal_patch_size": 2}
MERGED: dict[str, Any] = {"hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 64, **PATCHES}
LLAMA4_VISION: dict[str, Any] = {**IMAGES, "patch_size": 4, "intermediate_size": 128, "pixel_shuffle_ratio": 0.5}
LLAMA4_VISION |= {"projector_input_dim": 48, "projector_output_dim": 48, "vision_output_dim": 48}
QWEN2_AUDIO: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4}
QWEN2_AUDIO |= {"encoder_ffn_dim": 64, "num_mel_bins": 16, "max_source_positions": 8}
PHI4: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_blocks": 2, "num_attention_heads": 4}
PHI4 |= {"input_size": 16, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32}
PHI4 |= {"ext_pw_kernel_size": 1, "dropout_rate": 0.0}
LANGUAGE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 120}
TEXT: dict[str, Any] = {**LANGUAGE, "intermediate_size": 128, "num_key_value_heads": 2, "pad_token_id": 0}
OPT: dict[str, Any] = {**LANGUAGE, "ffn_dim": 128, "dropout": 0.0}


def patches(generator: torch.Generator) -> Inputs:
    """Two images of 4 x 4 and 2 x 4 patches, as Qwen's processors make them."""
    rows = torch.randn(24, 3 * 2 * 8 * 8, generator=generator)
    return {"hidden_states": rows, "grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]])}


def images(generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}


def sized_images(generator: torch.Generator) -> Inputs:
    return {**images(generator), "image_sizes": torch.tensor([[16, 16], [8, 16]])}


def sounds(name: str) -> Callable[[torch.Generator], Inputs]:
    return lambda generator: {name: torch.randn(2, 16, 16, generator=generator)}


def _encoder(model: type, config: type, **sizes: Any) -> Callable[[], Any]:
    return lambda: model(config(**sizes))


# Family -> (encoder, its inputs, width of its features, which of its outputs they are)
ENCODERS: dict[str, tuple[Callable[[], Any], Callable[[torch.Generator], Inputs], int, str]] = {
    "qwen2_vl": (
        _encoder(Qwen2VisionTransformerPretrainedModel, Qwen2VLVisionConfig, embed_dim=32, hidden_size=48,
                 mlp_ratio=2, **PATCHES),
        patches, 48, "pooled",
    ),
    "qwen2_5_vl": (
        _encoder(Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLVisionConfig, window_size=32,
                 fullatt_block_indexes=[1], **MERGED),
        patches, 48, "pooled",
    ),
    "qwen3_vl": (
        _encoder(Qwen3VLVisionModel, Qwen3VLVisionConfig, num_position_embeddings=16, deepstack_visual_indexes=[],
                 **MERGED),
        patches, 48, "pooled",
    ),
    "dinov3": (
        _encoder(hf.DINOv3ViTModel, hf.DINOv3ViTConfig, num_register_tokens=1, pos_embed_rescale=None, **IMAGES),
        images, 32, "full",
    ),
    "vit": (_encoder(hf.ViTForImageClassification, hf.ViTConfig, **IMAGES), images, 32, "full"),
    "pixtral": (_encoder(hf.PixtralVisionModel, hf.PixtralVisionConfig, **IMAGES), sized_images, 32, "full"),
    "internvl": (_encoder(hf.InternVLVisionModel, hf.InternVLVisionConfig, **INTERNVL), images, 32, "full"),
    "llama4": (_encoder(Llama4VisionModel, hf.Llama4VisionConfig, **LLAMA4_VISION), images, 48, "full"),
    "qwen2_audio": (
        _encoder(hf.Qwen2AudioEncoder, hf.Qwen2AudioEncoderConfig, **QWEN2_AUDIO), sounds("input_features"), 32, "full"
    ),
    "phi4_audio": (
        _encoder(Phi4MultimodalAudioModel, Phi4MultimodalAudioConfig, **PHI4), sounds("hidden_states"), 32, "full"
    ),
}  # fmt: skip
LANGUAGE_MODELS: dict[str, Callable[[], Any]] = {
    "llama": _encoder(hf.LlamaForCausalLM, hf.LlamaConfig, **TEXT),
    "llama4": _encoder(
        hf.Llama4ForCausalLM, hf.Llama4TextConfig, **TEXT, intermediate_size_mlp=64, num_local_experts=2, head_dim=16
    ),
    "opt": _encoder(hf.OPTForCausalLM, hf.OPTConfig, **OPT, word_embed_proj_dim=64),
    "opt, narrow embeddings": _encoder(
        hf.OPTForCausalLM, hf.OPTConfig, **OPT, word_embed_proj_dim=32, do_layer_norm_before=False
    ),
}


def compose(encoder: str, language_model: str = "llama", **options: Any) -> tuple[MultimodalModel, Inputs]:
    """A composed model and a batch of two samples for it."""
    torch.manual_seed(0)
    make, inputs, *_ = ENCODERS[encoder]
    parts = ({"media": make()}, LANGUAGE_MODELS[language_model](), {"media": MEDIA})
    model = MultimodalModel.from_unimodal(*parts, **options).train()
    generator = torch.Generator().manual_seed(1)
    given = inputs(generator)
    entries = {argument: key for key, (_, argument) in model.model.encoder_inputs.entries.items()}
    with torch.no_grad():
        rows = model.get_features("media", **given).pooler_output.shape[0]
    assert rows % 2 == 0, "the two samples have unlike numbers of rows"
    text = torch.randint(1, MEDIA, (2, 6), generator=generator)
    ids = torch.cat([text[:, :1], torch.full((2, rows // 2), MEDIA), text[:, 1:]], dim=1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids == MEDIA, -100)}
    return model, {**batch, **{entries[name]: value for name, value in given.items()}}


@pytest.mark.parametrize("family", third(ENCODERS))
def test_encoders_have_fitting_projectors_are_saved_and_cut(family: str, tmp_path):
    *_, width, selected = ENCODERS[family]
    model, batch = compose(family)
    assert model.config.settings("media").feature_select == selected
    assert model.model.projectors["media"].linear_1.in_features == width
    model.save_pretrained(tmp_path)
    loaded = MultimodalModel.from_pretrained(tmp_path).train()
    torch.testing.assert_close(loaded(**batch).loss, model(**batch).loss)
    spec = build_model_spec(model)
    if family != "phi4_audio":
        assert_same(model, make_plan(spec, {"media": [1], LANGUAGE_MODEL: [1]}), batch)
        return
    assert_same(model, make_plan(spec, {LANGUAGE_MODEL: [1]}), batch)
    with pytest.raises(ValueError, match="earlier stage.*`pp_size=1`"):  # its layers share a bias
        run_stages(model, make_plan(spec, {"media": [1]}), batch)


@pytest.mark.parametrize("family", [family for family in LANGUAGE_MODELS if family != "llama"])
def test_language_models_are_saved_and_cut(family: str, tmp_path):
    model, batch = compose("vit", family)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(MultimodalModel.from_pretrained(tmp_path).train()(**batch).loss, model(**batch).loss)
    assert_same(model, make_plan(build_model_spec(model), {LANGUAGE_MODEL: [1]}), batch)


def test_what_the_user_sets_is_kept():
    model, batch = compose("qwen2_vl", encoder_settings={"media": {"feature_select": "full"}})
    assert model.config.settings("media").feature_select == "full"
    assert model.model.projectors["media"].linear_1.in_features == 32
    assert model(**batch).loss.isfinite()


def test_features_of_another_width_than_the_projectors_are_a_sentence():
    with pytest.raises(ValueError, match="`media` are 32 wide, .* expects 7.*`feature_size=32`"):
        compose("vit", encoder_settings={"media": {"feature_size": 7}})
