"""Composed models that turn into Llava."""

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

from hf_mmparallel.modeling.llava_export import to_llava
from hf_mmparallel.modeling.multimodal_model import MultimodalModel
from tests.modeling.test_composed import IMAGE, TEXT, VISION, compose, make_batch


@pytest.mark.parametrize(
    ("vision", "patch_size", "changes", "rows"),
    [
        (CLIPVisionConfig, 4, {}, 5),
        (CLIPVisionConfig, 4, {"feature_layer": -2, "feature_select": "default"}, 4),
        (CLIPVisionConfig, 8, {"feature_select": "default"}, 1),
        (SiglipVisionConfig, 4, {}, 4),
        (SiglipVisionConfig, 4, {"feature_layer": -1}, 4),
        (SiglipVisionConfig, 4, {"feature_select": "default"}, 3),
        (SiglipVisionConfig, 8, {}, 1),
    ],
)
def test_llava_gives_the_same_predictions(vision, patch_size, changes, rows, tmp_path):
    torch.manual_seed(0)
    model = MultimodalModel.from_unimodal(
        {"vision": vision(**{**VISION, "patch_size": patch_size})},
        LlamaConfig(**TEXT),
        token_ids={"vision": IMAGE},
        encoder_settings={"vision": changes},
    ).eval()
    batch = make_batch("clip_llama", rows)
    to_llava(model).save_pretrained(tmp_path)
    llava = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert llava.config.image_seq_length == rows
    torch.testing.assert_close(llava(**batch).logits, model(**batch).logits)
    prompt = {key: batch[key][:1, : rows + 4] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 3, "do_sample": False, "pixel_values": batch["pixel_values"][:1]}
    assert torch.equal(llava.generate(**prompt, **options), model.generate(**prompt, **options))


@pytest.mark.parametrize(
    ("kind", "options", "salient"),
    [
        ("dinov2_gpt2", {}, "Dinov2Model"),
        ("clip_whisper_llama", {}, "2 encoders"),
        ("clip_llama", {"projectors": "linear"}, "projector"),
        ("clip_llama", {"encoder_settings": {"vision": {"pooling": "mean"}}}, "pooling"),
    ],
)
def test_llava_needs_a_matching_composition(kind, options, salient):
    with pytest.raises(ValueError, match=salient):
        to_llava(compose(kind, **options)[0])
