"""
A tiny random model and a batch of any family of transformers, by rule: the default config with small numbers, and a
batch whose tensors have the shapes that signature and config say. `CHANGES` has what no rule finds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WIDTH, ENCODER_WIDTH, NUM_LAYERS, VOCAB_SIZE, SIDE, MAX_PARAMETERS = 64, 32, 4, 160, 32, 20_000_000
FIRST_SPECIAL = 100
"""The lowest id of a special token; text has lower ones."""
PADDING = 0

MULTIMODAL: Mapping[Any, str] = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
CAUSAL: Mapping[Any, str] = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def families() -> list[str]:
    """All model types with a multimodal or a causal class in this version of transformers, multimodal ones first."""
    return [*MULTIMODAL, *(name for name in CAUSAL if name not in MULTIMODAL)]


# Configs. The first rule whose pattern is found in a setting's name gives its value.


@dataclass(frozen=True)
class Place:
    """Where in a model a config stands."""

    width: int  # of the layers that it describes
    is_text: bool
    old: Mapping[str, Any]


def _heads(place: Place, value: int) -> int:
    return min(4, value)


def _key_heads(place: Place, value: int) -> int:
    """As many as there are heads, or half of them where there were fewer."""
    heads = next((v for n, v in place.old.items() if n.endswith("attention_heads") and isinstance(v, int)), 0)
    return min(4 if value == heads else 2, value)


RULES: tuple[tuple[str, Callable[[Place, Any], Any]], ...] = (
    (r"^vocab_size|_vocab_size$|vocab_size_per_layer_input|^codebook_size", lambda p, v: VOCAB_SIZE),
    (r"max_position|n_positions|max_source_pos|max_target_pos|max_seq|seq_length$|n_ctx", lambda p, v: min(v, 128)),
    (r"(rope|nope)_head_dim", lambda p, v: 8),
    (r"^qk_head_dim$", lambda p, v: 16),
    (r"head_dim|^d_kv$|^dim_head$|kv_channels|head_size$|^d_head$", lambda p, v: 16 if p.is_text else 8),
    (r"num_key_value_heads|num_kv_heads|kv_n_heads|num_key_heads|num_query_groups", _key_heads),
    (r"(attention|att|^n|^num|value|_n|linear_num|mamba|mamba_n|index_n)_heads?$|^n_head$", _heads),
    (r"(^num_experts|_num_experts|local_experts|routed_experts)$", lambda p, v: min(4, v)),
    (r"experts_per_tok(en)?|moe_top_?k|^moe_k$|top_k_experts|num_selected", lambda p, v: min(2, v)),
    (r"^n_group$|^topk_group$|num_expert_group", lambda p, v: min(1, v)),
    (r"first_k_dense|num_dense_layers", lambda p, v: min(1, v)),
    (r"lora_rank|_rank$|lowrank", lambda p, v: min(16, v)),
    (r"(moe|expert).*(intermediate|hidden|ffn)|share_expert_dim", lambda p, v: 32),
    (r"intermediate_size|ffn_dim|ffn_hidden|^d_ff$|^dff$|mlp_dim|n_inner|d_inner|dim_ff|feed_forward_size|mlp_hidden",
     lambda p, v: 2 * p.width),
    (r"text_hidden_size|out_hidden_size|output_dim$|(language|llm|lm)_hidden", lambda p, v: WIDTH),
    (r"vision_hidden_size|encoder_hidden_size|audio_hidden", lambda p, v: ENCODER_WIDTH),
    (r"hidden_size_per_layer_input|ple_embed_dim", lambda p, v: min(16, v)),
    (r"hidden_(size|dim)|^d_model$|^n_embd$|embed_dim$|embedding_size|^emb_dim$|_proj_dim$|projection_dim|embedding_dim"
     r"|lru_width|mamba_d_ssm", lambda p, v: p.width if isinstance(v, int) else v),
    (r"(hidden_layers|^n_layers?|^num_layers|^depth|encoder_layers|decoder_layers|^layers|^num_blocks)$",
     lambda p, v: min(NUM_LAYERS, v)),
    (r"(^|_)sliding_window(_size)?$|attention_chunk_size|attention_window|^local_attention", lambda p, v: min(8, v)),
    (r"image_size$|^resolution$", lambda p, v: [32] * len(v) if isinstance(v, (list, tuple)) else 32),
    (r"^patch_size$", lambda p, v: [8] * len(v) if isinstance(v, (list, tuple)) else min(v, 8)),
    (r"position_embeddings$|position_embedding_size", lambda p, v: 64),
    (r"num_mel_bins|n_mel_bins|input_feat_size|mel_dim", lambda p, v: 16),
    (r"num_query_tokens|n_latents|num_latents|latent_query_num", lambda p, v: min(4, v)),
    (r"index_topk$|index_topk_blocks", lambda p, v: min(8, v)),
    (r"state_size|d_state", lambda p, v: min(16, v)),
    (r"chunk_size$", lambda p, v: min(16, v) if v > 0 else v),
    (r"num_nextn_predict_layers", lambda p, v: 0),
    (r"mm_tokens_per_image|image_seq_length|num_image_tokens", lambda p, v: 4),
    (r"^rotary_dim$", lambda p, v: 8),
    (r"projector_input_dim|merged_hidden_size", lambda p, v: WIDTH),
)  # fmt: skip
RATES = re.compile(r"drop(out)?(_?(rate|prob|path|p))?$|pdrop$|dropout|layerdrop|drop_path")
TEXT_PARTS = ("text_config", "llm_config", "language_config", "decoder", "thinker_config", "talker_config")
UNTOUCHED = ("transformers_version", "_name_or_path", "model_type", "architectures", "id2label", "label2id")


def shrunk(config: PreTrainedConfig, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """The same config with few layers, narrow ones, few words and no dropout; token ids are small and unlike."""
    ids = iter(range(FIRST_SPECIAL, VOCAB_SIZE))
    known: dict[str, int] = {}
    values = _shrunk_values(config, True, known, ids)
    return type(config)(**_merged(values, changes or {}))


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `changes`, whose names may be those of settings of parts: `text_config.num_experts`."""
    result = dict(values)
    for name, value in changes.items():
        head, _, rest = name.partition(".")
        result[head] = _merged(result.get(head) or {}, {rest: value}) if rest else value
    return result


def _shrunk_values(
    config: PreTrainedConfig, is_text: bool, known: dict[str, int], ids: Iterator[int]
) -> dict[str, Any]:
    parts = {name: part for name in config.sub_configs if isinstance(part := _part(config, name), PreTrainedConfig)}
    old = {k: v for k, v in config.to_dict().items() if k not in parts and k not in UNTOUCHED}
    place = Place(WIDTH if is_text else ENCODER_WIDTH, is_text, old)
    layers = _layer_choice(config, old)
    values: dict[str, Any] = {}
    for name, value in old.items():
        new = _shrunk_value(name, value, place, layers, known, ids)
        if new is not value and new != value:
            values[name] = new
    for name, part in parts.items():
        of_text = is_text and (name in TEXT_PARTS or "text" in name)
        values[name] = {"model_type": part.model_type, **_shrunk_values(part, of_text, known, ids)}
    if "rope_parameters" in old and _names_sections(config):
        rope = values.get("rope_parameters") or old["rope_parameters"] or {}
        values["rope_parameters"] = _rope({"mrope_section": [8, 12, 12], **rope}, place)
    return values


def _names_sections(config: PreTrainedConfig) -> bool:
    """Whether the model of a config's file has rotary settings by axis, which its config may leave to it."""
    module = sys.modules[type(config).__module__]
    path = Path(module.__file__ or "").with_name(Path(module.__file__ or "").name.replace("configuration", "modeling"))
    return path.exists() and 'rope_parameters.get("mrope_section", [' in path.read_text()


def _part(config: PreTrainedConfig, name: str) -> Any:
    """A part of a config, by default where the config has none."""
    found, cls = setting(config, name), config.sub_configs[name]
    return cls() if found is None and cls is not AutoConfig else found


def setting(config: Any, name: str, default: Any = None) -> Any:
    """A setting of a config; the default also for one that differs between layers."""
    try:
        return getattr(config, name, default)
    except AttributeError:
        return default


def _layer_choice(config: Any, old: Mapping[str, Any]) -> list[int]:
    """The layers that a config with fewer of them keeps: as many kinds as there are, in their order."""
    names = (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "depth",
        "encoder_layers",
        "layers",
        "num_blocks",
    )
    count = next((v for n in names if isinstance(v := setting(config, n), int)), 0)
    lists = [v for v in old.values() if isinstance(v, (list, tuple)) and len(v) == count and count > NUM_LAYERS]
    if count <= NUM_LAYERS:
        return list(range(count))
    kinds = [repr([v[layer] for v in lists if not _are_indices(v, count)]) for layer in range(count)]
    chosen = sorted({kinds.index(kind) for kind in dict.fromkeys(kinds)})[:NUM_LAYERS]
    rest = [layer for layer in range(count) if layer not in chosen]
    return sorted(chosen + rest[: NUM_LAYERS - len(chosen)])


def _are_indices(value: Any, count: int) -> bool:
    """Whether a list names layers."""
    is_whole = all(type(v) is int for v in value)
    return bool(value) and is_whole and list(value) == sorted(set(value)) and value[0] >= 0 and value[-1] < count + 1


def _shrunk_value(
    name: str, value: Any, place: Place, layers: list[int], known: dict[str, int], ids: Iterator[int]
) -> Any:
    if value is None and name == "head_dim":
        return 16 if place.is_text else 8
    if value is None and re.fullmatch(r"(image|video|audio)_token_(id|index)", name):
        return _token(name, 0, known, ids)
    if isinstance(value, (bool, str)) or value is None:
        return value
    if name == "image_grid_pinpoints":
        return [[SIDE, SIDE]]
    if RATES.search(name) and isinstance(value, (int, float)):
        return 0.0
    if re.search(r"(token_id|token_index|_token|_id)s?$", name) and re.search("token|im_|_id$|_ids$", name):
        return _token(name, value, known, ids)
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _rope(value, place)
    if isinstance(value, (list, tuple)) and value:
        count = next(
            (v for n, v in place.old.items() if re.search(r"layers?$|^depth$|^layers$", n) and isinstance(v, int)), 0
        )
        if len(value) == count and count > len(layers) and not _are_indices(value, count):
            return [value[layer] for layer in layers]
        if _are_indices(value, count) and re.search(r"index|indices|idx|layer", name):
            return sorted({v * NUM_LAYERS // count for v in value if v < count})
    for pattern, rule in RULES:
        if re.search(pattern, name):
            plain = isinstance(value, int)
            if plain and value > 0:
                return rule(place, value)
            if pattern.startswith(("image_size", "^patch_size")):
                return rule(place, value)
            if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
                return [rule(place, v) if v > 0 else v for v in value]
            return value
    return value


def _token(name: str, value: Any, known: dict[str, int], ids: Iterator[int]) -> Any:
    """A small id for a special token; the same token has the same id in all parts."""
    if isinstance(value, (list, tuple)):
        return [_token(f"{name}.{number}", v, known, ids) for number, v in enumerate(value)]
    if not isinstance(value, int) or value < 0:
        return value
    if "pad" in name and "image" not in name:
        return PADDING
    key = re.sub(r"_(index|id)$", "", name)
    if key not in known:
        known[key] = next(ids)
    return known[key]


def _rope(value: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Rotary settings of narrower heads."""
    result = {k: _rope(v, place) if isinstance(v, dict) else v for k, v in value.items()}
    section = value.get("mrope_section")
    if section:
        share = value.get("partial_rotary_factor") or place.old.get("partial_rotary_factor") or 1
        half = int((16 if place.is_text else 8) * share) // 2
        shares = [max(1, half * part // sum(section)) for part in section]
        shares[-1] += half - sum(shares)
        result["mrope_section"] = shares
    if value.get("original_max_position_embeddings"):
        result["original_max_position_embeddings"] = 64
    for name in ("short_factor", "long_factor"):
        if isinstance(value.get(name), list):
            result[name] = value[name][:8]
    return result


@dataclass(frozen=True)
class Change:
    """What no rule finds of a family."""

    config: Mapping[str, Any] = field(default_factory=dict)  # settings, also `part.setting`
    batch: Callable[[dict[str, Tensor]], None] | None = None  # changes a sample in place


_OMNI = {
    "vision_start_token_id": 130,
    "vision_end_token_id": 131,
    "audio_start_token_id": 132,
    "audio_end_token_id": 133,
}
CHANGES: dict[str, Change] = {
    "aria": Change({"projector_patch_to_query_dict": {16: 4}}),
    "qwen2_vl": Change({"vision_config.hidden_size": WIDTH, "vision_config.embed_dim": ENCODER_WIDTH}),
    "qwen2_5_omni_thinker": Change(_OMNI),
    "qwen3_omni_moe_thinker": Change(_OMNI),
    "llama4": Change({"vision_config.intermediate_size": 4 * ENCODER_WIDTH}),
    "step3p7": Change({"text_config.sliding_window": 8}),
    "xmod": Change({"default_language": "en_XX"}),
    "reformer": Change({"is_decoder": True}),
}


def build(family: str) -> PreTrainedModel:
    """A tiny model in float32, always with the same weights, of which norms and biases are away from 1 and 0."""
    cls = getattr(transformers, MULTIMODAL.get(family) or CAUSAL[family])
    config = shrunk(CONFIG_MAPPING[family](), CHANGES.get(family, Change()).config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.device("meta"):
            count = sum(p.numel() for p in cls(config).parameters())
        if count > MAX_PARAMETERS:
            raise ValueError(f"{count:,} parameters are left of `{family}`.")
        model = cls(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.train()
