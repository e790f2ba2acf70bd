"""The models and samples of Cornstarch's second version, from its table 1 and the families that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paper_tables import SECOND_MODULES

from hf_mmparallel.plan import LANGUAGE_MODEL, FeatureSpec, ModelSpec, ModuleSpec, ParameterSpec, SampleSizes

VISION, AUDIO = "vision", "audio"

# What a sample has, by the rules of the families' processors. 1280 x 720 pixels become 1288 x 728, the nearest
# multiples of 28: 92 x 52 patches of 14 x 14 pixels, which the projector merges by four. Two minutes of audio at
# 16 kHz are 11,998 frames of 10 ms, of which the convolutions make one of eight; the encoder attends within 500.
TEXT_TOKENS = 1024
PATCHES, MERGED = 92 * 52, 4
AUDIO_TOKENS, AUDIO_WINDOW = 1500, 500

# What table 1 does not have. Heads, heads of keys and values, width of the feed-forward layers, and whether the head
# is tied: of Llama 3.2 1B, of Llama 3.1 8B, and for "32b" of Qwen2.5 32B, which has as many layers as wide. Heads are
# 80 wide in Qwen2's encoder and 64 in Phi-4's, whose feed-forward layers and convolutions keep their width: so all
# sizes have the numbers of parameters that the table gives.
_LLAMA = {"S": (32, 8, 8192, True), "M": (32, 8, 14336, False), "L": (40, 8, 27648, False)}
_VOCABULARY = 128256
_VISION_HEAD, _AUDIO_HEAD = 80, 64
_AUDIO_INNER, _CHANNELS, _MEL_BINS = 1536, 1024, 80


def cornstarch_model(name: str) -> ModelSpec:
    """
    A model of its table 2, all of it frozen but the projectors.

    Args:
        name (`str`): Sizes of the vision encoder, the audio encoder and the language model, such as `"MML"`.
    """
    llama = _llama(name[2])
    modules = {
        VISION: _vision(name[0], llama.hidden_size).with_frozen("tower"),
        AUDIO: _audio(name[1], llama.hidden_size).with_frozen("tower"),
        LANGUAGE_MODEL: llama.with_frozen(True),
    }
    tied = {"language_model.embed_tokens.weight": ((LANGUAGE_MODEL, llama.num_layers),)}
    return ModelSpec(modules, tied if _LLAMA[name[2]][3] else {}, {"image": 1, "audio": 2})


def all_trained(spec: ModelSpec) -> ModelSpec:
    """The model with nothing frozen."""
    modules = {
        name: replace(module, parameters=tuple(replace(p, trainable=True) for p in module.parameters))
        for name, module in spec.modules.items()
    }
    return replace(spec, modules=modules)


def cornstarch_sizes(num_samples: int) -> SampleSizes:
    """Its samples, which are all alike: text, an image and a clip."""
    audio = [AUDIO_WINDOW] * (AUDIO_TOKENS // AUDIO_WINDOW)
    language = [TEXT_TOKENS + PATCHES // MERGED + AUDIO_TOKENS]
    lengths = {VISION: [PATCHES], AUDIO: audio, LANGUAGE_MODEL: language}
    return SampleSizes.of_sequences({name: [own] * num_samples for name, own in lengths.items()})


def stack_of(prefix: str, shapes: Mapping[str, tuple[int, ...]], num_layers: int) -> list[ParameterSpec]:
    """The matrices of each layer; the vectors beside them cost nothing worth counting."""
    return [
        ParameterSpec(f"{prefix}.{layer}.{name}.weight", shape, layer, "bfloat16")
        for layer in range(num_layers)
        for name, shape in shapes.items()
    ]


def _vision(size: str, language_width: int) -> ModuleSpec:
    """Qwen2-VL's encoder."""
    found = SECOND_MODULES["vision", size]
    width, inner, num_layers = found.hidden_size, 4 * found.hidden_size, found.num_layers
    shapes = {
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.fc1": (inner, width),
        "mlp.fc2": (width, inner),
    }
    merged = MERGED * width
    parameters = [
        ParameterSpec("vision.tower.patch_embed.weight", (width, 3 * 2 * 14 * 14), -1, "bfloat16"),
        *stack_of("vision.tower.blocks", shapes, num_layers),
        # A token of the projector is four of the layers.
        ParameterSpec("vision.projector.0.weight", (merged, merged), num_layers, "bfloat16", True, 1 / MERGED),
        ParameterSpec("vision.projector.2.weight", (language_width, merged), num_layers, "bfloat16", True, 1 / MERGED),
    ]
    num_heads, stack = width // _VISION_HEAD, "vision.tower.blocks"
    features = (FeatureSpec("image"),)
    return ModuleSpec(
        VISION, stack, num_layers, width, num_heads, num_heads, inner, tuple(parameters), features, "vision.tower"
    )


def _audio(size: str, language_width: int) -> ModuleSpec:
    """Phi-4's conformer."""
    found = SECOND_MODULES["audio", size]
    width, num_layers = found.hidden_size, found.num_layers
    shapes = {
        **{f"self_attn.{name}_proj": (width, width) for name in "qkvo"},
        "conv.glu": (2 * width, width),
        "conv.dw_sep_conv_1d.pw_conv": (width, width),
        "conv.ext_pw_conv_1d": (width, width),
        **{f"{name}.gate_up_proj": (2 * _AUDIO_INNER, width) for name in ("feed_forward_in", "feed_forward_out")},
        **{f"{name}.down_proj": (width, _AUDIO_INNER) for name in ("feed_forward_in", "feed_forward_out")},
    }
    # Positions at which each convolution in front of the layers is computed, for a token.
    front = {
        "conv.0": ((_CHANNELS, 1, 3, 3), 4.0 * _MEL_BINS / 2),
        "conv.3": ((_CHANNELS, _CHANNELS, 1, 1), 2.0 * _MEL_BINS / 4),
        "conv.6": ((_CHANNELS, _CHANNELS, 1, 1), 1.0 * _MEL_BINS / 8),
        "out": ((width, _CHANNELS * _MEL_BINS // 8), 1.0),
    }
    parameters = [
        ParameterSpec(f"audio.tower.subsampling.{name}.weight", shape, -1, "bfloat16", True, positions)
        for name, (shape, positions) in front.items()
    ]
    parameters += stack_of("audio.tower.encoders", shapes, num_layers)
    parameters += [
        ParameterSpec("audio.projector.up.weight", (language_width, width), num_layers, "bfloat16"),
        ParameterSpec("audio.projector.down.weight", (language_width, language_width), num_layers, "bfloat16"),
    ]
    num_heads, stack = width // _AUDIO_HEAD, "audio.tower.encoders"
    inner, features = _AUDIO_INNER, (FeatureSpec("audio"),)
    return ModuleSpec(
        AUDIO, stack, num_layers, width, num_heads, num_heads, inner, tuple(parameters), features, "audio.tower"
    )


def _llama(size: str) -> ModuleSpec:
    """Llama 3."""
    found = SECOND_MODULES["llm", size]
    width, num_layers = found.hidden_size, found.num_layers
    num_heads, num_kv_heads, inner, tied = _LLAMA[size]
    key_width = num_kv_heads * width // num_heads
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (key_width, width),
        "self_attn.v_proj": (key_width, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    stack = "language_model.layers"
    parameters = [
        ParameterSpec("language_model.embed_tokens.weight", (_VOCABULARY, width), -1, "bfloat16"),
        *stack_of(stack, shapes, num_layers),
    ]
    if not tied:
        parameters.append(ParameterSpec("language_model.lm_head.weight", (_VOCABULARY, width), num_layers, "bfloat16"))
    return ModuleSpec(
        LANGUAGE_MODEL, stack, num_layers, width, num_heads, num_kv_heads, inner, tuple(parameters), tower=stack
    )
