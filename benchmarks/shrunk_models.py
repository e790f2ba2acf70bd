"""
A tiny random model and a batch of any family of transformers, by rule: the default config with small numbers, and a
batch whose tensors have the shapes that signature and config say. `CHANGES` has what no rule finds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
    (r"^vocab_size|_vocab_size$|vocab_size_per_layer_input", lambda p, v: VOCAB_SIZE),
    (r"codebook_size|num_embeddings$|group_vocab$|ngram_vocab_size_base", lambda p, v: min(64, v)),
    (r"index_kpool", lambda p, v: min(4, v)),
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
WHERE_NONE: dict[str, Callable[[Place], int]] = {
    "head_dim": lambda place: 16 if place.is_text else 8,
    "n_routed_experts": lambda place: 4,
    "num_experts_per_tok": lambda place: 2,
    "n_shared_experts": lambda place: 1,
    "num_key_value_heads": lambda place: 4,
}
"""Settings that no model has by default, and can't be built without."""
RATES = re.compile(r"drop(out)?(_?(rate|prob|path|p))?$|pdrop$|dropout|layerdrop|drop_path|jitter")
TEXT_PARTS = ("encoder", "text_config", "llm_config", "language_config", "decoder", "thinker_config", "talker_config")
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
    config: PreTrainedConfig, is_text: bool, known: dict[str, int], ids: Iterator[int], is_part: bool = False
) -> dict[str, Any]:
    """The settings of a config that are not the default of its class, which the parts of a model may differ from."""
    parts = {name: part for name in config.sub_configs if isinstance(part := _part(config, name), PreTrainedConfig)}
    old = {k: v for k, v in config.to_dict().items() if k not in parts and k not in UNTOUCHED}
    place = Place(WIDTH if is_text else ENCODER_WIDTH, is_text, old)
    layers = _layer_choice(config, old)
    values: dict[str, Any] = {}
    for name, value in old.items():
        new = _shrunk_value(name, value, place, layers, known, ids)
        if new != value or (is_part and value is not None):
            values[name] = new
    for name, part in parts.items():
        of_text = is_text and (name in TEXT_PARTS or "text" in name)
        values[name] = {"model_type": part.model_type, **_shrunk_values(part, of_text, known, ids, is_part=True)}
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
    if value is None and name in WHERE_NONE:
        return WHERE_NONE[name](place)
    if name == "head_dim" and value == place.old.get("qk_rope_head_dim"):
        return 8
    if value is None and re.fullmatch(r"(image|video|audio)_token_(id|index)", name):
        return _token(name, 0, known, ids)
    if isinstance(value, (bool, str)) or value is None:
        return value
    if name == "image_grid_pinpoints":
        return [[SIDE, SIDE]]
    if RATES.search(name) and isinstance(value, (int, float)):
        return type(value)(0)
    if re.search(r"(token_id|token_index|_token|_id)s?$", name) and not name.startswith("num_"):
        return _token(name, value, known, ids)
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _rope(value, place)
    if name == "per_layer_config":  # layers that differ from the others stay so
        of_layer = {int(layer): own for layer, own in value.items()}
        return {
            layers.index(layer): {
                n: 2 * _shrunk_value(n, v, replace(place, old={**place.old, **own}), layers, known, ids)
                for n, v in own.items()
            }
            for layer, own in of_layer.items()
            if layer in layers
        }
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
    if any(isinstance(v, dict) for v in value.values()):  # by type of layer
        return {kind: of_kind if of_kind is None else _rope(of_kind, place) for kind, of_kind in value.items()}
    result = dict(value)
    section = value.get("mrope_section")
    if section:
        share = value.get("partial_rotary_factor") or place.old.get("partial_rotary_factor") or 1
        half = int((16 if place.is_text and not place.old.get("qk_rope_head_dim") else 8) * share) // 2
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


def _kosmos(row: dict[str, Tensor]) -> None:
    """Four tokens that are replaced by an image, which are told by a mask."""
    row["image_embeds_position_mask"] = (torch.arange(len(row["input_ids"])) // 4 == 0).long()


_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_COMPASS = {
    kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    for kind in ("full_attention", "sliding_attention")
}
_GEMMA_LAYERS = ["sliding_attention", "full_attention"] * 2
_GEMMA_HEADS = {layer: {"head_dim": 32, "num_key_value_heads": 2} for layer in (1, 3)}
_ZAMBA = ["linear_attention", "hybrid"] * 2
_OMNI = {
    "vision_start_token_id": 130,
    "vision_end_token_id": 131,
    "audio_start_token_id": 132,
    "audio_end_token_id": 133,
}
_CODES = range(FIRST_SPECIAL + 40, FIRST_SPECIAL + 56)
_CODES_OF_CHAMELEON = {
    "IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(place)) + "Z": code
    for place, code in enumerate(_CODES)
}
_CODES_OF_EMU = {f"<|visual token {place:06d}|>": code for place, code in enumerate(_CODES)}
_PLACEHOLDER = FIRST_SPECIAL + 30
_SMALL_CODEC = {"base_channels": 32, "channel_multiplier": [1] * 4}
CHANGES: dict[str, Change] = {
    "chameleon": Change(
        {
            "image_token_id": _PLACEHOLDER,
            "vocabulary_map": {"<image>": _PLACEHOLDER, **_CODES_OF_CHAMELEON},
            "vq_config": {**_SMALL_CODEC, "num_embeddings": len(_CODES), "resolution": SIDE},
        }
    ),
    "emu3": Change(
        {
            "image_token_id": _PLACEHOLDER,
            "vocabulary_map": {"<image>": _PLACEHOLDER, "<|extra_200|>": _PLACEHOLDER + 1, **_CODES_OF_EMU},
            "vq_config": {**_SMALL_CODEC, "codebook_size": len(_CODES), "hidden_size": 32, "attn_resolutions": [1]},
        }
    ),
    "qwen2_5_omni": Change({"enable_audio_output": False}),
    "qwen3_omni_moe": Change({"enable_audio_output": False}),
    "aria": Change({"projector_patch_to_query_dict": {16: 4}}),
    "qwen2_vl": Change({"vision_config.hidden_size": WIDTH, "vision_config.embed_dim": ENCODER_WIDTH}),
    "qwen2_5_omni_thinker": Change(_OMNI),
    "qwen3_omni_moe_thinker": Change(_OMNI),
    "llama4": Change({"vision_config.intermediate_size": 4 * ENCODER_WIDTH}),
    "step3p7": Change({"text_config.sliding_window": 8}),
    "xmod": Change({"default_language": "en_XX"}),
    "reformer": Change({"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16]}),
    "mamba2": Change({"num_heads": 8}),
    "bamba": Change({"attn_layer_indices": [1, 3]}),
    "granitemoehybrid": Change({"layer_types": ["linear_attention", "full_attention"] * 2}),
    "jamba": Change({"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "lfm2_moe": Change({"layer_types": ["conv", "full_attention"] * 2}),
    "zamba": Change({"attention_hidden_size": 128, "attention_head_dim": 32, "layers_block_type": _ZAMBA}),
    "zamba2": Change(
        {
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "mamba_headdim": 32,
            "n_mamba_heads": 4,
            "layers_block_type": _ZAMBA,
            "hybrid_layer_ids": [1, 3],
        }
    ),
    "apertus1p5": Change({"audio_config.codebook_dim": ENCODER_WIDTH}),
    "dots3_note_text": Change({"head_dim": 24}),
    "deepseek_vl_hybrid": Change({"high_res_vision_config.image_size": 2 * SIDE}),
    "cohere_compass": Change({"text_config.rope_parameters": _COMPASS}),
    "cohere_compass_text": Change({"rope_parameters": _COMPASS}),
    "dbrx": Change({"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0}),
    "ernie4_5_vl_moe": Change(
        {"text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}}
    ),
    "fun_asr_nano": Change({"adaptor_config.hidden_size": WIDTH, "adaptor_config.intermediate_size": WIDTH // 4}),
    "granite4_vision": Change(
        {
            "vision_config.hidden_size": 64,
            "deepstack_layer_map": [[-2, 1], [-1, 2]],
            "downsample_rate": "1/2",
            "spatial_target_layers": [2, 3],
        }
    ),
    "janus": Change(
        {"vision_config.projection_dim": WIDTH, **{f"vq_config.{name}": v for name, v in _SMALL_CODEC.items()}}
    ),
    "kimi_k25": Change({"projection_hidden_size": ENCODER_WIDTH}),
    "kosmos-2": Change(batch=_kosmos),
    "molmo2": Change({"adapter_config.vision_feature_layer": [3, 1]}),
    "muse_glimmer": Change({"out_hidden_size": 4 * ENCODER_WIDTH}),
    "muse_spark": Change({"out_hidden_size": 4 * ENCODER_WIDTH}),
    "qwen4_exp": Change({f"text_config.{name}": value for name, value in _INDEXER.items()}),
    "qwen4_exp_text": Change(_INDEXER),
    "vibevoice_asr": Change({"acoustic_tokenizer_chunk_size": 3200}),
    "vipllava": Change({"vision_feature_layer": [-2, -3, 1]}),
    # as E2B is released: half of the layers have the keys of others
    "gemma4": Change(
        {
            "audio_config": None,
            "text_config.layer_types": _GEMMA_LAYERS,
            "text_config.per_layer_config": _GEMMA_HEADS,
            "text_config.num_kv_shared_layers": 2,
            "text_config.use_double_wide_mlp": True,
        }
    ),
    # as 26B-A4B is released: no embeddings of layers, keys that are values, experts beside a feed-forward layer
    "gemma4_text": Change(
        {
            "layer_types": _GEMMA_LAYERS,
            "per_layer_config": _GEMMA_HEADS,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": WIDTH // 2,
        }
    ),
    "gemma4_unified": Change(
        {
            "audio_config": None,
            "vision_config.pooling_kernel_size": 1,
            "vision_config.output_proj_dims": WIDTH,
            "vision_config.mm_embed_dim": WIDTH,
        }
    ),
    "gemma3n_text": Change({"num_kv_shared_layers": 2, "layer_types": _GEMMA_LAYERS}),
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
