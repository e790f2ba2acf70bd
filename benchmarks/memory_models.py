"""Small models whose activations weigh as much as their weights, and their data, for `memory_error.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from common import IGNORE_INDEX
from torch.nn.utils.rnn import pad_sequence

from hf_mmparallel import MultimodalModel

VOCABULARY = 1500
IMAGE, CLIP, VIDEO = 1400, 1401, 1402
LANGUAGE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 128,
    "patch_size": 8,
}
AUDIO = {
    "d_model": 192,
    "encoder_layers": 4,
    "encoder_ffn_dim": 512,
    "encoder_attention_heads": 4,
    "num_mel_bins": 16,
    "max_source_positions": 200,
    "decoder_layers": 1,
    "decoder_ffn_dim": 32,
    "decoder_attention_heads": 2,
    "vocab_size": 50,
    "pad_token_id": 0,
}


class Medium(NamedTuple):
    """
    An item of a module's input.

    Args:
        token (`int`): Its placeholder.
        rows (`int`): Rows of features that it gives.
        layer_tokens (`int`): Tokens that the layers see of it.
        entries (`Mapping[str, Any]`): Name in a batch -> shape, or value.
    """

    token: int
    rows: int
    layer_tokens: int
    entries: Mapping[str, Any]


class Family(NamedTuple):
    """
    A model and what an item of its samples is.

    Args:
        build (`Callable[[Mapping[str, Any]], Any]`): Makes it with these settings of its language model.
        media (`Mapping[str, Medium]`): Module -> what an item of it is.
    """

    build: Callable[[Mapping[str, Any]], Any]
    media: Mapping[str, Medium]


def _llava(language: Mapping[str, Any], kind: str = "llama", **more: Any) -> Any:
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION}
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config={"model_type": kind, **language, **more},
        image_token_id=IMAGE,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config)


def _mistral(language: Mapping[str, Any]) -> Any:
    return _llava(language, "mistral", sliding_window=192)


def _mixtral(language: Mapping[str, Any]) -> Any:
    return _llava(language, "mixtral", num_local_experts=4, num_experts_per_tok=2)


def _gemma(language: Mapping[str, Any]) -> Any:
    config = transformers.Gemma3Config(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **VISION},
        text_config={
            "model_type": "gemma3_text",
            **{**language, "tie_word_embeddings": True},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 128,
        },
        image_token_id=IMAGE,
        mm_tokens_per_image=64,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _qwen(language: Mapping[str, Any]) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "depth": 4, "num_heads": 4, "patch_size": 8}
    vision = {**sizes, "out_hidden_size": 256, "spatial_merge_size": 2, "window_size": 64}
    half = language["head_dim"] // 2
    sections = [half // 4, 3 * half // 8, 3 * half // 8]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    config = transformers.Qwen2_5_VLConfig(
        vision_config={**vision, "fullatt_block_indexes": [1, 3]},
        text_config={**language, "rope_parameters": rope, "tie_word_embeddings": True},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _composed(language: Mapping[str, Any]) -> Any:
    vision = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION))  # type: ignore[arg-type]
    hearing = transformers.WhisperModel(transformers.WhisperConfig(**AUDIO))  # type: ignore[arg-type]
    decoder = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**language))  # type: ignore[arg-type]
    towers = {"vision": vision, "audio": hearing}
    return MultimodalModel.from_unimodal(towers, decoder, token_ids={"vision": IMAGE, "audio": CLIP})


_PIXELS = {"pixel_values": (1, 3, 128, 128)}
_PATCHES = {"pixel_values": (256, 3 * 2 * 8 * 8), "image_grid_thw": torch.tensor([[1, 16, 16]])}
FAMILIES = {
    "llava": Family(_llava, {"vision": Medium(IMAGE, 256, 256, _PIXELS)}),
    "mistral": Family(_mistral, {"vision": Medium(IMAGE, 256, 256, _PIXELS)}),
    "mixtral": Family(_mixtral, {"vision": Medium(IMAGE, 256, 256, _PIXELS)}),
    "gemma3": Family(_gemma, {"vision": Medium(IMAGE, 64, 256, _PIXELS)}),
    "qwen2_5_vl": Family(_qwen, {"vision": Medium(IMAGE, 64, 256, _PATCHES)}),
    "composed": Family(
        _composed,
        {
            "vision": Medium(IMAGE, 257, 257, _PIXELS),
            "audio": Medium(CLIP, 200, 200, {"input_features": (1, 16, 400)}),
        },
    ),
}


def build_model(family: str, dtype: torch.dtype, heads: tuple[int, int]) -> Any:
    """The model of a family, always with the same weights, and as many heads of queries, and of keys and values."""
    queries, keys = heads
    shape = {
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": LANGUAGE["hidden_size"] // queries,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FAMILIES[family].build({**LANGUAGE, **shape}).to(dtype)


def make_dataset(family: str, num_items: Sequence[int], text_tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Samples with so many items of each medium and so many text tokens."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for count, length in zip(num_items, text_tokens, strict=True):
        pieces, entries = [], {}
        for medium in FAMILIES[family].media.values():
            item = torch.tensor(
                [medium.token] * medium.rows + [2]
            )  # neighbours are told apart by what is between them
            pieces += [item] * count
            for name, shape in medium.entries.items() if count else ():
                one = shape if torch.is_tensor(shape) else torch.randn(shape, generator=generator)
                entries[name] = torch.cat([one] * count)
        ids = torch.cat([*pieces, torch.randint(2, 1000, (length,), generator=generator)])
        entries |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        samples.append({**entries, "labels": ids.masked_fill(ids >= IMAGE, IGNORE_INDEX)})
        if family == "gemma3":
            samples[-1]["token_type_ids"] = (ids == IMAGE).long()
        elif family == "qwen2_5_vl":
            samples[-1]["mm_token_type_ids"] = (ids == IMAGE).int()
    return samples


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens padded to the right, the items of all samples in a row."""
    batch = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        values = [sample[name] for sample in samples if name in sample]
        per_token = len(values[0]) == len(samples[0]["input_ids"]) and values[0].dim() == 1
        fill = IGNORE_INDEX if name == "labels" else 0
        batch[name] = pad_sequence(values, batch_first=True, padding_value=fill) if per_token else torch.cat(values)
    return batch


def sample_tokens(family: str, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of a sample in the language model, and those of each of its items in the layers of an encoder."""
    ids = sample["input_ids"]
    result: dict[str, Any] = {"language_model": len(ids)}
    for module, medium in FAMILIES[family].media.items():
        result[module] = [medium.layer_tokens] * (int((ids == medium.token).sum()) // medium.rows)
    return result
