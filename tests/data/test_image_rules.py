"""Images of known sizes become as many tokens as the model's own code and processor make of them."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset

from benchmarks.paper_samples import PUBLISHED, QWEN_GRID, VISION
from hf_mmparallel.data.image_rules import column_rules, image_rule
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.loading import build_on_meta
from hf_mmparallel.plan import LANGUAGE_MODEL

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT: dict[str, Any] = {**SMALL, "hidden_size": 64, "vocab_size": 200}
QWEN = {"depth": 4, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 4}
SIZES = np.array([448, 900, 250]), np.array([448, 1800, 1000])


def part(model_type, **config):
    return {"model_type": model_type, **config}


def config(name, vision, text="llama", **settings):
    parts = {"vision_config": vision, "text_config": part(text, **TEXT), "image_token_id": 199}
    return getattr(transformers, f"{name}Config")(**parts, **settings)


SIGLIP = part("siglip_vision_model", **SMALL, image_size=896, patch_size=14, vision_use_head=False)
CLIP = part("clip_vision_model", **SMALL, image_size=336, patch_size=14)
INTERN = part("internvl_vision", **SMALL, image_size=[448, 448], patch_size=[14, 14])
SAM = {**SMALL, "image_size": 1024, "patch_size": 16, "output_channels": 32, "global_attn_indexes": [1]}
CONFIGS = {  # the encoders' images, patches and poolings are the published checkpoints'
    "llava": config("Llava", CLIP),
    "llava_next": config("LlavaNext", CLIP),
    "gemma3": config("Gemma3", SIGLIP, "gemma3_text", mm_tokens_per_image=256),
    "internvl": config("InternVL", INTERN, "qwen2"),
    "qwen2_5_vl": config("Qwen2_5_VL", {**QWEN, "fullatt_block_indexes": [3], "window_size": 112}, "qwen2_5_vl_text"),
    "qwen3_vl": config("Qwen3VL", {**QWEN, "patch_size": 16, "deepstack_visual_indexes": []}, "qwen3_vl_text"),
    "idefics3": config("Idefics3", {**SMALL, "image_size": 56, "patch_size": 14}, scale_factor=2),
    "cohere2_vision": config("Cohere2Vision", {**SIGLIP, "image_size": 56}, "cohere2"),
    "got_ocr2": config("GotOcr2", SAM, "qwen2"),
}


def rule_of(family, folder):
    CONFIGS[family].save_pretrained(folder)
    model = build_on_meta(str(folder))
    return image_rule(model, build_model_spec(model), VISION)


@pytest.mark.parametrize(
    ("family", "layers", "rows"),
    [("llava", 577, 576), ("gemma3", 4096, 256), ("got_ocr2", 64 * 64, 256)],  # the last takes rows and columns
)
def test_images_of_one_size(family, layers, rows, tmp_path):
    found = rule_of(family, tmp_path)(*SIZES)
    assert found.tokens.tolist() == [layers] * 3 and found.feature_tokens.tolist() == [rows] * 3
    assert found.squares.tolist() == [layers**2] * 3


def test_tiles_are_those_of_the_processor(tmp_path):
    found = rule_of("internvl", tmp_path)(*SIZES)
    processor = transformers.GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True)
    images = [np.zeros((height, width, 3), dtype=np.uint8) for height, width in zip(*SIZES, strict=True)]
    tiles = [len(processor(image, return_tensors="pt")["pixel_values"]) for image in images]
    assert tiles[0] == 1 and len(set(tiles)) == 3
    assert found.tokens.tolist() == [1025 * count for count in tiles]
    assert found.squares.tolist() == [1025**2 * count for count in tiles]
    assert found.feature_tokens.tolist() == [256 * count for count in tiles]


@pytest.mark.parametrize(
    ("family", "layers"), [("qwen2_5_vl", [32 * 32, 64 * 128, 18 * 72]), ("qwen3_vl", [28 * 28, 56 * 112, 16 * 62])]
)
def test_patches_by_the_model_s_own_sides(family, layers, tmp_path):
    """Squares are those of whole images; the costs of layers know their windows."""
    found = rule_of(family, tmp_path)(*SIZES)
    assert found.tokens.tolist() == layers and found.squares.tolist() == [count**2 for count in layers]
    assert found.feature_tokens.tolist() == [count // 4 for count in layers]


@pytest.mark.parametrize("family", ["llava_next", "idefics3", "cohere2_vision"])
def test_images_that_only_a_processor_can_cut_are_refused(family, tmp_path):
    """Some take `[batch, images, channels, height, width]`, others one tile; all get as many tiles as they cut."""
    with pytest.raises(ValueError, match="by its processor"):
        rule_of(family, tmp_path)


def test_an_encoder_that_fails_is_told_of(tmp_path):
    CONFIGS["llava"].save_pretrained(tmp_path)
    model = build_on_meta(str(tmp_path))
    spec = build_model_spec(model)
    model.config.vision_feature_layer = model.model.config.vision_feature_layer = 7
    with pytest.raises(ValueError, match="336 x 336"):
        image_rule(model, spec, VISION)


SIDES = {LANGUAGE_MODEL: "length+vision", VISION: "width*height"}
ROWS = [
    {"length": 4, "width": 300, "height": 200},
    {"length": 9, "width": None, "height": None},
    {"length": 70, "width": 640, "height": 480},
]


@pytest.mark.parametrize("make", [list, Dataset.from_list])
def test_columns_with_sides_of_images_give_the_grids_of_the_processor(make, tmp_path):
    CONFIGS["qwen2_5_vl"].save_pretrained(tmp_path)
    model = build_on_meta(str(tmp_path))
    spec = build_model_spec(model)
    images = transformers.Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=400 * 300)
    processor = type("Processor", (), {"image_processor": images})()
    for rules in (column_rules(SIDES, model, spec, processor), column_rules(SIDES, model, spec)):
        source = size_source(make(ROWS), None, spec, SIDES, rules=rules)
        assert source is not None
        sizes = source([2, 1, 0])
        blanks = [np.zeros((row["height"], row["width"], 3), np.uint8) for row in (ROWS[2], ROWS[0])]
        grids = images(blanks)["image_grid_thw"]
        patches = [int(np.prod(grid)) for grid in grids]
        if rules[VISION] == image_rule(model, spec, VISION):  # without a processor the larger one is not resized
            patches[0] = 34 * 46
        assert sizes.tokens[VISION].tolist() == [patches[0], 0, patches[1]]
        assert sizes.squares[VISION].tolist() == [patches[0] ** 2, 0, patches[1] ** 2]
        assert sizes.tokens[LANGUAGE_MODEL].tolist() == [70 + patches[0] // 4, 9, 4 + patches[1] // 4]
        with pytest.raises(ValueError, match=r"length\+vision"):  # a text is shorter than the tokens of its image
            whole = size_source(make(ROWS), None, spec, {**SIDES, LANGUAGE_MODEL: "length"}, rules=rules)
            whole([0])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("family", "columns"),
    [
        ("llava", SIDES),  # images of one size
        ("qwen2_5_vl", {LANGUAGE_MODEL: "width*height"}),
        ("qwen2_5_vl", "width*height"),
        ("qwen2_5_vl", {LANGUAGE_MODEL: "length", VISION: "a*b*c"}),
        ("qwen2_5_vl", {LANGUAGE_MODEL: "length", "vison": "width*height"}),
    ],
)
def test_sides_that_say_no_tokens_are_refused(family, columns, tmp_path):
    CONFIGS[family].save_pretrained(tmp_path)
    model = build_on_meta(str(tmp_path))
    with pytest.raises(ValueError, match=r"\*|vison"):
        column_rules(columns, model, build_model_spec(model))


def test_sides_are_of_the_same_images(tmp_path):
    rows = [{"length": 3, "width": [20, 30], "height": [20]}]
    CONFIGS["qwen2_5_vl"].save_pretrained(tmp_path)
    model = build_on_meta(str(tmp_path))
    spec = build_model_spec(model)
    with pytest.raises(ValueError, match="2 and 1"):
        size_source(Dataset.from_list(rows), None, spec, SIDES, rules=column_rules(SIDES, model, spec))


def test_published_samples_keep_their_texts_in_every_model(tmp_path):
    samples = PUBLISHED["chartqa"].preset.draw_images(64, 0)
    qwen, llava = samples.sizes(VISION, QWEN_GRID), samples.sizes(VISION, rule_of("llava", tmp_path))
    texts = qwen.tokens[LANGUAGE_MODEL] - qwen.tokens[VISION] // 4
    assert (llava.tokens[LANGUAGE_MODEL] == texts + 576).all() and (llava.tokens[VISION] == 577).all()
    assert qwen.tokens[VISION].mean() > 4500 and torch.is_grad_enabled()
