"""A small model whose operations and bytes are worked out by hand."""

from dataclasses import replace
from typing import Any

from hf_mmparallel.cost import CostModel, analytic_costs, find_device
from hf_mmparallel.plan import LANGUAGE_MODEL, FeatureSpec, ModelSpec, ModuleSpec, ParameterSpec

HIDDEN, WIDE, LAYERS, VOCABULARY = 64, 256, 4, 1000
LAYER_MATRICES = 4 * HIDDEN * HIDDEN + 2 * HIDDEN * WIDE
PRODUCT_BYTES = 2 * (4 * 2 * HIDDEN + 2 * (HIDDEN + WIDE))
"""Of a token in a layer: what its matrices read and write, two bytes a value."""
NORM_BYTES = (4 * 2 + 7 * 4) * HIDDEN  # four passes in two bytes, seven in float32
ROTARY_BYTES = 11 * 2 * 2 * HIDDEN  # of queries and keys
ENCODER_BYTES = NORM_BYTES + 2 * 2 * HIDDEN + 2 * 2 * WIDE + 2 * 3 * 2 * HIDDEN  # output, activation, residuals
LAYER_BYTES = ENCODER_BYTES + ROTARY_BYTES
"""Of a token in a layer: its element-wise work."""
LOSS_BYTES = (2 + 3 * 4) * VOCABULARY
LOOKUP_BYTES = 2 * 2 * HIDDEN
PLAIN = replace(
    find_device("h100"),
    launch_us=0.0,
    link_latency_us=0.0,
    node_link_latency_us=0.0,
    matmul_efficiency=0.4,
    attention_efficiency=0.4,
    masked_attention_share=1.0,
    block_attention_share=1.0,
    memory_efficiency=1.0,
)
"""An H100 without launches and latencies, so that what is worked out by hand is operations and bytes."""


def module(name: str, frozen: bool = False, num_layers: int = LAYERS) -> ModuleSpec:
    parameters = []
    shapes = {f"attn.{letter}_proj": (HIDDEN, HIDDEN) for letter in "qkvo"}
    shapes |= {"mlp.up": (WIDE, HIDDEN), "mlp.down": (HIDDEN, WIDE), "norm": (HIDDEN,)}
    for layer in range(num_layers):
        for part, shape in shapes.items():
            parameters.append(ParameterSpec(f"{name}.{layer}.{part}.weight", shape, layer, "bfloat16", not frozen))
    if name == LANGUAGE_MODEL:
        parameters.insert(0, ParameterSpec("embed_tokens.weight", (VOCABULARY, HIDDEN), -1, "bfloat16", not frozen))
    else:
        parameters.append(ParameterSpec(f"{name}.projector", (HIDDEN, HIDDEN), num_layers, "bfloat16"))
    features = () if name == LANGUAGE_MODEL else (FeatureSpec("image"),)
    return ModuleSpec(name, f"{name}.layers", num_layers, HIDDEN, 4, 4, WIDE, tuple(parameters), features)


def model(frozen: tuple[str, ...] = (), tied: bool = True, **changes: Any) -> ModelSpec:
    """The model; `changes` are fields of its language model."""
    modules = {name: module(name, name in frozen) for name in ("vision", LANGUAGE_MODEL)}
    modules[LANGUAGE_MODEL] = replace(modules[LANGUAGE_MODEL], **changes)
    return ModelSpec(modules, tied={"embed_tokens.weight": ((LANGUAGE_MODEL, LAYERS),)} if tied else {})


def with_head(num_words: int, trainable: bool = True) -> ModelSpec:
    """The model with a head of its own."""
    spec = model(tied=False)
    head = ParameterSpec("lm_head.weight", (num_words, HIDDEN), LAYERS, "bfloat16", trainable)
    language = replace(spec.language_model, parameters=(*spec.language_model.parameters, head))
    return replace(spec, modules={**spec.modules, LANGUAGE_MODEL: language})


def text_model(frozen: tuple[str, ...] = (), tied: bool = True, **changes: Any) -> ModelSpec:
    """Its language model alone."""
    spec = model(frozen, tied, **changes)
    return replace(spec, modules={LANGUAGE_MODEL: spec.language_model})


def h100(spec: ModelSpec) -> CostModel:
    """What its layers cost on an H100 without launches and latencies."""
    return analytic_costs(spec, PLAIN)
