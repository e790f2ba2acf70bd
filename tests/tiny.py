"""
Tiny random models of many families, with datasets and collators to match.

`FAMILIES[name]()` builds a seeded model, `make_dataset(name, size)` per-sample dicts with no, one or several images
(or audio clips) each, `collate(name)` the function that pads a list of them to the right.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCAB_SIZE, MEDIA_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN = 120, 100, 101, 104
NUM_LAYERS = 4
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
HEADS = {**TEXT, "head_dim": 16}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
SIGLIP = {**VISION, "vision_use_head": False}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
PATCHES = {"num_heads": 4, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
DEEP_VISION = {"depth": 4, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, **PATCHES}
WINDOWED_VISION = {**DEEP_VISION, "window_size": 32, "fullatt_block_indexes": [1, 3]}
QWEN_TOKENS = {
    "image_token_id": MEDIA_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
}


def _build(prefix: str, of_text: bool = False, **config: Any) -> Callable[[], PreTrainedModel]:
    """A builder of the family whose classes start with `prefix`, always with the same weights."""

    def build() -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            cls = None if of_text else getattr(transformers, f"{prefix}ForConditionalGeneration", None)
            cls = cls or getattr(transformers, f"{prefix}ForCausalLM")
            return cls(getattr(transformers, f"{prefix}TextConfig" if of_text else f"{prefix}Config")(**config))

    return build


def _part(model_type: str, **config: Any) -> dict[str, Any]:
    return {"model_type": model_type, **config}


def _qwen3_vl(levels: int, prefix: str = "Qwen3VL", **text: Any) -> Callable[[], PreTrainedModel]:
    vision = {**DEEP_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": list(range(levels))}
    return _build(prefix, vision_config=vision, text_config={**HEADS, **ROPE, **text}, **QWEN_TOKENS)


CLIP_LLAMA = {
    "vision_config": _part("clip_vision_model", **VISION),
    "text_config": _part("llama", **TEXT),
    "image_token_id": MEDIA_TOKEN,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _build("Llama", **TEXT),
    "llama_tied": _build("Llama", **{**TEXT, "tie_word_embeddings": True}),
    "gemma4_text": _build(
        "Gemma4",
        of_text=True,
        **{**TEXT, "tie_word_embeddings": True, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8},
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    "llava": _build("Llava", **CLIP_LLAMA),
    "llava_next": _build("LlavaNext", **CLIP_LLAMA, image_grid_pinpoints=[[16, 16]]),
    "llava_onevision": _build(
        "LlavaOnevision",
        vision_config=_part("siglip_vision_model", **SIGLIP),
        text_config=_part("qwen2", **TEXT),
        image_token_id=MEDIA_TOKEN,
        video_token_id=VIDEO_TOKEN,
        image_grid_pinpoints=[[16, 16]],
    ),
    "gemma3": _build(
        "Gemma3",
        vision_config=_part("siglip_vision_model", **SIGLIP),
        text_config=_part(
            "gemma3_text",
            **{**HEADS, "tie_word_embeddings": True},
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        image_token_id=MEDIA_TOKEN,
        mm_tokens_per_image=4,
    ),
    "paligemma": _build(
        "PaliGemma",
        vision_config=_part("siglip_vision_model", **SIGLIP),
        text_config=_part("gemma", **{**HEADS, "tie_word_embeddings": True}),
        image_token_id=MEDIA_TOKEN,
        projection_dim=64,
    ),
    "internvl": _build(
        "InternVL",
        vision_config=_part("internvl_vision", **{**VISION, "image_size": [16, 16], "patch_size": [4, 4]}),
        text_config=_part("qwen2", **TEXT),
        image_token_id=MEDIA_TOKEN,
    ),
    "mistral3": _build(
        "Mistral3",
        vision_config=_part("pixtral", **{**VISION, "image_size": 32}),
        text_config=_part("mistral", **HEADS),
        image_token_id=MEDIA_TOKEN,
        image_token_index=MEDIA_TOKEN,
        spatial_merge_size=2,
    ),
    "qwen2_vl": _build(
        "Qwen2VL",
        vision_config={"depth": 4, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, **PATCHES},
        text_config={**TEXT, **ROPE},
        **QWEN_TOKENS,
    ),
    "qwen2_5_vl": _build("Qwen2_5_VL", vision_config=WINDOWED_VISION, text_config={**TEXT, **ROPE}, **QWEN_TOKENS),
    "qwen3_vl": _qwen3_vl(levels=3),
    "qwen3_vl_moe": _qwen3_vl(1, "Qwen3VLMoe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "qwen2_5_omni": _build(
        "Qwen2_5OmniThinker",
        vision_config=WINDOWED_VISION,
        audio_config={
            "d_model": 32,
            "encoder_layers": 4,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
            "n_window": 8,
            "output_dim": 64,
            "max_source_positions": 16,
        },
        text_config={**TEXT, **ROPE},
        **QWEN_TOKENS,
        audio_token_id=AUDIO_TOKEN,
        audio_start_token_id=105,
        audio_end_token_id=106,
    ),
    "voxtral": _build(
        "Voxtral",
        audio_config=_part(
            "voxtral_encoder",
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_mel_bins=16,
            max_source_positions=16,
        ),
        text_config=_part("llama", **TEXT),
        audio_token_id=MEDIA_TOKEN,
    ),
}

FIXED_SIZES = {
    "llava": (4, (3, 16, 16)),
    "llava_next": (10, (2, 3, 16, 16)),
    "llava_onevision": (10, (2, 3, 16, 16)),
    "gemma3": (4, (3, 16, 16)),
    "paligemma": (4, (3, 16, 16)),
    "internvl": (4, (3, 16, 16)),
    "mistral3": (4, (3, 32, 32)),
    "voxtral": (4, (16, 32)),
}
"""Family -> tokens of an item and shape of its pixels (or mel bins and frames)."""
GRIDS = ((1, 4, 4), (1, 4, 2), (1, 6, 4))
"""Grids of the Qwen families, in turn; four patches make a token."""
TEXT_ONLY = ("llama", "llama_tied", "gemma4_text")


def _qwen_media(numbers: list[int], generator: torch.Generator) -> tuple[list[int], dict[str, Tensor]]:
    """Tokens of each image and the pixel entries of a Qwen sample."""
    grids = torch.tensor([GRIDS[number % len(GRIDS)] for number in numbers]).reshape(-1, 3)
    pixels = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 8 * 8, generator=generator)
    return (grids.prod(-1) // 4).tolist(), {"pixel_values": pixels, "image_grid_thw": grids}


def _media(family: str, numbers: list[int], generator: torch.Generator) -> tuple[list[int], dict[str, Tensor]]:
    """Tokens of each item and the entries of a sample that hold the items."""
    if not numbers or family in TEXT_ONLY:
        return [], {}
    if family.startswith("qwen"):
        return _qwen_media(numbers, generator)
    num_tokens, shape = FIXED_SIZES[family]
    name = "input_features" if family == "voxtral" else "pixel_values"
    entries = {name: torch.randn(len(numbers), *shape, generator=generator)}
    if family in ("llava_next", "llava_onevision", "mistral3"):
        entries["image_sizes"] = torch.tensor([shape[-2:]] * len(numbers))
    return [num_tokens] * len(numbers), entries


def _omni_audio(count: int, generator: torch.Generator) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Token runs of each clip and the audio entries of a sample of the omni family, four tokens a clip."""
    if not count:
        return [], {}
    run = torch.tensor([105, *[AUDIO_TOKEN] * 4, 106])
    frames = torch.randn(count, 16, 16, generator=generator)
    return [run] * count, {"input_features": frames, "feature_attention_mask": torch.ones(count, 16).long()}


class Shape(NamedTuple):
    """Images (or clips, where a family has no images), further clips of the omni family, and words of a sample."""

    num_items: int
    num_clips: int
    num_words: int


def _pieces(family: str, index: int, shape: Shape, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Token ids and media entries of one sample: text, each item with text after it, text."""
    tokens, entries = _media(family, list(range(index, index + shape.num_items)), generator)
    runs = [torch.full((number,), MEDIA_TOKEN) for number in tokens]
    if family == "qwen2_5_omni":
        runs = [torch.cat([torch.tensor([102]), run, torch.tensor([103])]) for run in runs]
        clips, audio = _omni_audio(shape.num_clips, generator)
        runs, entries = runs + clips, {**entries, **audio}
    pieces = [torch.randint(1, 90, (4 + index % 3,), generator=generator)]
    for run in runs:
        pieces += [run, torch.randint(1, 90, (2,), generator=generator)]
    pieces.append(torch.randint(1, 90, (shape.num_words,), generator=generator))
    return torch.cat(pieces), entries


def make_dataset(
    family: str, size: int, seed: int = 0, max_items: int = 2, shapes: Sequence[Shape] | None = None
) -> list[dict[str, Tensor]]:
    """
    Samples of several lengths with 0 to `max_items` images (or clips), or of the given shapes; placeholders and a
    prompt are no targets.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(size):
        shape = Shape((index + 1) % (max_items + 1), index % (max_items + 1), 6 + index % 4)
        input_ids, entries = _pieces(family, index, shape if shapes is None else shapes[index], generator)
        labels = input_ids.masked_fill((input_ids == MEDIA_TOKEN) | (input_ids == AUDIO_TOKEN), -100)
        labels[: 2 + index % 2] = -100
        sample = {"input_ids": input_ids, "labels": labels, "attention_mask": torch.ones_like(input_ids), **entries}
        if family == "gemma3":
            sample["token_type_ids"] = (input_ids == MEDIA_TOKEN).long()
        elif family == "paligemma":
            sample["token_type_ids"] = (torch.arange(len(input_ids)) >= len(input_ids) - 6).long()
        elif family.startswith("qwen") and family != "qwen2_5_omni":
            sample["mm_token_type_ids"] = (input_ids == MEDIA_TOKEN).int()
        samples.append(sample)
    return samples


def attending(model: Any, attention: str = "bitfield") -> Any:
    """The model, whose language model has this attention function; by default one that reads words of packed rows."""
    text = model.config.get_text_config()
    keys = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    model.set_attn_implementation({keys[0] if keys else "": attention})
    return model


def collate(family: str) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """The family's collator: token entries are padded to the right, the items of all samples are concatenated."""

    def collator(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        length = max(len(sample["input_ids"]) for sample in samples)
        batch: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for sample in samples for name in sample):
            values = [torch.as_tensor(sample[name]) for sample in samples if name in sample]
            if name in ("input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids"):
                fill = -100 if name == "labels" else 0
                batch[name] = torch.stack(
                    [torch.nn.functional.pad(value, (0, length - len(value)), value=fill) for value in values]
                )
            else:
                batch[name] = torch.cat(values)
        return batch

    collator.__name__ = f"collate_{family}"
    return collator
