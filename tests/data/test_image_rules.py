"""Images of known sizes become as many tokens as the model's own code and processor make of them."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks.paper_samples import PUBLISHED, QWEN_GRID, VISION
from hf_mmparallel.data.image_rules import image_rule
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.loading import build_on_meta
from hf_mmparallel.plan import LANGUAGE_MODEL

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT: dict[str, Any] = {**SMALL, "hidden_size": 64, "vocab_size": 200}
TOKEN: dict[str, Any] = {"image_token_id": 199}
QWEN = {"depth": 4, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 4}
SIZES = np.array([448, 900, 250]), np.array([448, 1800, 1000])


def part(model_type, **config):
    return {"model_type": model_type, **config}


CONFIGS = {  # the encoders' images, patches and poolings are the published checkpoints'
    "llava": transformers.LlavaConfig(
        vision_config=part("clip_vision_model", **SMALL, image_size=336, patch_size=14),
        text_config=part("llama", **TEXT),
        **TOKEN,
    ),
    "gemma3": transformers.Gemma3Config(
        vision_config=part("siglip_vision_model", **SMALL, image_size=896, patch_size=14, vision_use_head=False),
        text_config=part("gemma3_text", **TEXT, head_dim=16),
        mm_tokens_per_image=256,
        **TOKEN,
    ),
    "internvl": transformers.InternVLConfig(
        vision_config=part("internvl_vision", **SMALL, image_size=[448, 448], patch_size=[14, 14]),
        text_config=part("qwen2", **TEXT),
        **TOKEN,
    ),
    "qwen2_5_vl": transformers.Qwen2_5_VLConfig(
        vision_config={**QWEN, "fullatt_block_indexes": [3], "window_size": 112}, text_config=TEXT, **TOKEN
    ),
    "qwen3_vl": transformers.Qwen3VLConfig(
        vision_config={**QWEN, "patch_size": 16, "deepstack_visual_indexes": []},
        text_config={**TEXT, "head_dim": 16},
        **TOKEN,
    ),
    "llava_next": transformers.LlavaNextConfig(
        vision_config=part("clip_vision_model", **SMALL, image_size=336, patch_size=14),
        text_config=part("llama", **TEXT),
        **TOKEN,
    ),
}

IDEFICS: dict[str, Any] = {
    "vision_config": {**SMALL, "image_size": 56, "patch_size": 14},
    "text_config": part("llama", **TEXT),
    **TOKEN,
}
CUT_BY_PROCESSORS = {
    "idefics2": transformers.Idefics2Config(**IDEFICS),
    "idefics3": transformers.Idefics3Config(**IDEFICS, scale_factor=2),
    "smolvlm": transformers.SmolVLMConfig(**IDEFICS, scale_factor=2),
    "cohere2_vision": transformers.Cohere2VisionConfig(
        vision_config=part("siglip_vision_model", **SMALL, image_size=56, patch_size=14),
        text_config=part("cohere2", **TEXT),
        **TOKEN,
    ),
}
CONFIGS |= CUT_BY_PROCESSORS
CONFIGS["got_ocr2"] = transformers.GotOcr2Config(
    vision_config={**SMALL, "image_size": 1024, "patch_size": 16, "output_channels": 32, "global_attn_indexes": [1]},
    text_config=part("qwen2", **TEXT),
    **TOKEN,
)


def rule_of(family, folder):
    CONFIGS[family].save_pretrained(folder)
    model = build_on_meta(str(folder))
    return image_rule(model, build_model_spec(model), VISION)


@pytest.mark.parametrize(
    "family, layers, rows",
    [("llava", [577] * 3, [576] * 3), ("gemma3", [4096] * 3, [256] * 3)],
)
def test_images_of_one_size(family, layers, rows, tmp_path):
    found = rule_of(family, tmp_path)(*SIZES)
    assert found.tokens.tolist() == layers and found.feature_tokens.tolist() == rows
    assert found.squares.tolist() == [count**2 for count in layers]


def test_tiles_are_those_of_the_processor(tmp_path):
    found = rule_of("internvl", tmp_path)(*SIZES)
    processor = transformers.GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True)
    images = [np.zeros((height, width, 3), dtype=np.uint8) for height, width in zip(*SIZES, strict=True)]
    tiles = [len(processor(image, return_tensors="pt")["pixel_values"]) for image in images]
    assert tiles[0] == 1 and len(set(tiles)) == 3
    assert found.tokens.tolist() == [1025 * count for count in tiles]
    assert found.squares.tolist() == [1025**2 * count for count in tiles]
    assert found.feature_tokens.tolist() == [256 * count for count in tiles]


def test_patches_by_the_model_s_own_sides(tmp_path):
    """Squares are those of whole images; the costs of layers know their windows."""
    found = rule_of("qwen2_5_vl", tmp_path / "2.5")(*SIZES)
    assert found.tokens.tolist() == [32 * 32, 64 * 128, 18 * 72]
    assert found.squares.tolist() == [count**2 for count in found.tokens.tolist()]
    assert found.feature_tokens.tolist() == [256, 32 * 64, 9 * 36]
    found = rule_of("qwen3_vl", tmp_path / "3")(*SIZES)
    assert found.tokens.tolist() == [28 * 28, 56 * 112, 16 * 62]
    assert found.squares.tolist() == [count**2 for count in found.tokens.tolist()]


def test_what_the_configuration_does_not_say_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`LlavaNext.*splits .* by its processor.*fit models with one image size"):
        rule_of("llava_next", tmp_path)


@pytest.mark.parametrize("family", CUT_BY_PROCESSORS)
def test_images_that_only_a_processor_can_cut_are_refused(family, tmp_path):
    """Some take `[batch, images, channels, height, width]`, others one tile; all get as many tiles as they cut."""
    with pytest.raises(ValueError, match="`.*splits images .* by its processor.*`--seq-len` and `--image-tokens`"):
        rule_of(family, tmp_path)


def test_an_encoder_that_fails_is_told_of(tmp_path):
    CONFIGS["llava"].save_pretrained(tmp_path)
    model = build_on_meta(str(tmp_path))
    spec = build_model_spec(model)
    model.config.vision_feature_layer = model.model.config.vision_feature_layer = 7
    with pytest.raises(ValueError, match="can't be run on one image of 336 x 336: .*Published sizes fit"):
        image_rule(model, spec, VISION)


def test_layers_that_see_rows_and_columns(tmp_path):
    """The encoder of GOT-OCR takes `[1, 64, 64, hidden]`."""
    found = rule_of("got_ocr2", tmp_path)(*SIZES)
    assert found.tokens.tolist() == [64 * 64] * 3 and found.feature_tokens.tolist() == [256] * 3


def test_published_samples_keep_their_texts_in_every_model(tmp_path):
    samples = PUBLISHED["chartqa"].preset.draw_images(64, 0)
    qwen, llava = samples.sizes(VISION, QWEN_GRID), samples.sizes(VISION, rule_of("llava", tmp_path))
    texts = qwen.tokens[LANGUAGE_MODEL] - qwen.tokens[VISION] // 4
    assert (llava.tokens[LANGUAGE_MODEL] == texts + 576).all() and (llava.tokens[VISION] == 577).all()
    assert qwen.tokens[VISION].mean() > 4500 and torch.is_grad_enabled()
