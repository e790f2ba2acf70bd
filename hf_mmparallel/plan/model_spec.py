"""The description of a model that a plan needs, as plain data: modules, layers, parameters, features."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

LANGUAGE_MODEL = "language_model"
Uses = tuple[tuple[str, int], ...]  # (module, layer) of each use of a parameter
LayerKind = Literal["attention", "state", "both", "alone"]
# Tokens that a layer with a state computes together, as kernels of Gated DeltaNet and Mamba do: its work is about that
# of attention with such a window.
STATE_CHUNK = 64
_NUMBER = re.compile(r"\d+")
MAX_LOGITS = 2**27  # that a rank computes at once, half a GiB in float32


@dataclass(frozen=True)
class Edge:
    """A boundary: feature `i` of module `source` enters module `target`, its consumer, at layer `layers[i]`."""

    source: str
    target: str
    layers: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the whole model."""

    name: str  # in the state dict of the whole HF model
    shape: tuple[int, ...]  # before any sharding
    layer: int  # layer that uses it: -1 before the first one of its module's stack, `num_layers` after the last one
    dtype: str = "float32"  # name of the torch dtype
    trainable: bool = True  # whether it gets a gradient
    # fraction of its elements that each token is multiplied with: `experts per token / experts` in a mixture of
    # experts
    active_share: float = 1.0
    # the dimension that tensor parallelism shards; `None` where each rank of a tp group has all of it, as of norms
    tp_dim: int | None = 0
    # equal blocks of that dimension that are each sharded, such as gate and up matrices in one tensor
    tp_blocks: int = 1
    # experts, each of which has a slice, that expert parallelism can put on different ranks; 0 if it is not of experts
    num_experts: int = 0
    expert_dim: int = 0  # the dimension of these slices
    expert_blocks: int = 1  # equal blocks of that dimension, each of which has all experts, as of a factor of adapters
    # of experts, `active_share` where they are on different ranks, which compute a token's experts alone
    shared_share: float | None = None
    # of the LoRA adapter that is added to a copy of it in each forward, which has a gradient though it is frozen
    adapter_rank: int = 0

    @property
    def has_gradient(self) -> bool:
        return self.trainable or self.adapter_rank > 0

    @property
    def is_factor(self) -> bool:
        """Whether it is a factor of what is added to the weights of experts, and multiplies no activations."""
        return self.num_experts > 0 and ".lora_" in self.name

    @property
    def replicated(self) -> bool:
        """Whether each rank of a tp group holds all of it."""
        return self.tp_dim is None

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_lookup(self) -> bool:
        """Whether it is read by index, like an embedding, and is not multiplied with activations."""
        return self.layer == -1 and len(self.shape) == 2 and "embed" in self.name


@dataclass(frozen=True)
class ParameterUse:
    """One use of a parameter, which may multiply activations with it; a tied parameter has several."""

    parameter: ParameterSpec
    multiplies: bool

    @property
    def num_active(self) -> float:
        """Elements that each token is multiplied with."""
        return self.parameter.num_elements * self.parameter.active_share if self.multiplies else 0.0


@dataclass(frozen=True)
class FeatureSpec:
    """A feature tensor that an encoder passes to the language model, one feature token per placeholder token."""

    modality: str  # `"image"`, `"video"`, `"audio"`, or the encoder's name in a composed model
    field: str = "pooler_output"  # attribute of the encoder's output with the tensor
    layer: int = 0  # layer of the language model that it enters: 0 for embeddings, `i` for DeepStack features
    index: int | None = None  # index of the tensor if the attribute is a list of several features


AXES = ("batch", "length", "tokens")  # of values: samples, tokens of a sample, tokens of all samples


@dataclass(frozen=True)
class CarriedValue:
    """A value beside the hidden state that layers of a stage read, and that earlier stages have computed."""

    path: tuple[Any, ...]  # the keys that lead to it in `(args, kwargs)` of the first layer that reads it
    axes: tuple[str | int, ...]  # names of `AXES`, or sizes: `n`, or `-n` for the length up to `n`
    dtype: str | None  # name of the torch dtype, `None` for that of the hidden state
    is_part: bool  # layers read parts of it

    @property
    def is_index(self) -> bool:
        return self.dtype is not None and self.dtype.startswith(("int", "uint", "bool"))

    @property
    def width(self) -> int:
        """Values of a token that cross a border; an index crosses as four of eight bits."""
        return (4 if self.is_index else 1) * math.prod(abs(axis) for axis in self.axes if isinstance(axis, int))

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        sizes: dict[Any, int] = dict(zip(AXES, (batch, length, batch * length), strict=True))
        return tuple(sizes[a] if isinstance(a, str) else a if a >= 0 else min(-a, length) for a in self.axes)


@dataclass(frozen=True)
class ModuleSpec:
    """A part of the model with a parallel layout of its own: an encoder with its projector, or the language model."""

    name: str  # such as `vision` or `language_model`
    stack: str  # name, in the whole model, of the list of layers that is split into pipeline stages
    num_layers: int
    hidden_size: int  # width of the hidden states between layers
    num_heads: int
    num_kv_heads: int
    intermediate_size: int  # width of the feed-forward layers
    parameters: tuple[ParameterSpec, ...]  # in state-dict order, one entry for tied names
    # passed to the modules behind it, see `ModelSpec.edge_features`; empty for a module that passes its hidden states,
    # and for the last one
    features: tuple[FeatureSpec, ...] = ()
    tower: str = ""  # name of the submodule without the projector
    # layers whose outputs are read again behind the last one (DeepStack, `vision_feature_layer`), to which they pass
    # through all later stages; -1 for the input of the first one
    taps: tuple[int, ...] = ()
    # layers at the end whose outputs nothing reads, so that no stage may begin with or behind the second of them
    num_unread: int = 0
    # whether each block starts from the output of the one before; a U-Net's are no chain, and are not cut in any way
    is_chain: bool = True
    # whether the hidden states between its layers have one width, as those between stages
    has_one_width: bool = True
    # width of an attention head, the mean where layers differ in it; `hidden_size / num_heads` by default
    head_dim: int | None = None
    attention: str = "sdpa"  # the attention function, such as `"eager"`
    # tensors that the activation function saves for its backward: its input, and more if the model computes it in
    # several steps
    activation_copies: int = 1
    # attention window of each layer in tokens, 0 for the whole sequence; empty if no layer has a window
    windows: tuple[int, ...] = ()
    # how the tokens of a sample reach each other in each layer; empty if all layers attend
    layer_kinds: tuple[LayerKind, ...] = ()
    # values of a token that the heads of a layer with a state take and give, `None` where ranks can't share its heads;
    # empty if they can in no layer
    state_widths: tuple[int | None, ...] = ()
    # whether the ranks of a tp group share the rows of norms and residuals in its layers
    sequence_parallel: bool = False
    # whether the ranks of a cp group can share the tokens of an image or a clip, or have whole ones only
    shares_tokens: bool = False
    # whether its loss contains one over where routers send the tokens of the whole batch
    balances_experts: bool = False
    # in costs of a layout, the ranks that share the experts of a layer, by tp group; empty if none do
    expert_ranks: tuple[int, ...] = ()
    # in costs of a layout, whether linear layers in its layers multiply in float8
    float8: bool = False
    # (ranks that share experts, tokens of the busiest of them over those of the mean one); empty if experts are even
    expert_peaks: tuple[tuple[int, float], ...] = ()
    # shape of the hidden state of a token between layers, if it is not `(hidden_size,)`, as of hyper-connections; and
    # the number of its axes that the model has before those of samples and tokens
    hidden_shape: tuple[int, ...] = ()
    leading_axes: int = 0
    # what else enters a stage that begins with each layer; empty if nothing does at any
    carried: tuple[tuple[CarriedValue, ...], ...] = ()

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of the hidden state of a token between layers."""
        return self.hidden_shape or (self.hidden_size,)

    def states_before(self, layer: int) -> int:
        """
        Number of hidden states that enter a stage that begins with a layer: of the layer before it, of taps, and as
        wide as what else enters it.
        """
        width = sum(value.width for value in self.carried_before(layer))
        return 1 + sum(tap < layer - 1 for tap in self.taps) + -(-width // math.prod(self.token_shape))

    def carried_before(self, layer: int) -> tuple[CarriedValue, ...]:
        """What enters a stage that begins with a layer beside hidden states."""
        return self.carried[layer] if layer and layer < len(self.carried) else ()

    def row_shares(self, tp_size: int) -> int:
        """Ranks of a tp group among which the rows of norms and residuals in a layer are divided."""
        return tp_size if self.sequence_parallel else 1

    def attends(self, layer: int) -> bool:
        return not self.layer_kinds or self.layer_kinds[layer] in ("attention", "both")

    def carries_state(self, layer: int) -> bool:
        """Whether a layer carries a state or a convolution from token to token."""
        return bool(self.layer_kinds) and self.layer_kinds[layer] in ("state", "both")

    def moved_values(self, layer: int) -> int:
        """Values of a token that travel to its heads, or with its sample, and back, if ranks share a row."""
        width = self.state_widths[layer] if self.state_widths else None
        return (2 * self.hidden_size if width is None else width) if self.carries_state(layer) else 0

    @property
    def needed_windows(self) -> tuple[int, ...]:
        """Tokens that each one has to reach in each layer, 0 for the whole sequence; empty if all reach that."""
        windows = self.windows or (0,) * self.num_layers if self.layer_kinds else self.windows
        return tuple(own if self.attends(layer) else STATE_CHUNK for layer, own in enumerate(windows))

    @property
    def attention_windows(self) -> dict[int, int]:
        """Attention window in tokens, 0 for the whole sequence -> number of layers that have it."""
        windows = self.windows or (0,) * self.num_layers
        return dict(Counter(own for layer, own in enumerate(windows) if self.attends(layer)))

    def window(self, layer: int) -> int:
        """Attention window of a layer in tokens, 0 for the whole sequence."""
        if not self.attends(layer):
            return STATE_CHUNK
        # a language model's window only saves time if its attention function skips blocks outside of it
        skips = self.is_encoder or any(kind in self.attention for kind in ("bitfield", "flash", "flex"))
        return self.windows[layer] if self.windows and skips else 0

    @property
    def is_encoder(self) -> bool:
        return bool(self.features) and self.name != LANGUAGE_MODEL

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_width

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @cached_property
    def num_experts(self) -> int:
        """Experts of each of its mixtures that ranks can share, 0 without any; a common divisor if they differ."""
        return math.gcd(*(parameter.num_experts for parameter in self.parameters))

    def in_layout(self, expert_ranks: tuple[int, ...], float8: bool = False) -> ModuleSpec:
        """A copy for costs of a layout in which ranks share experts, with those of the busiest, or in float8."""
        parameters = self.parameters
        if expert_ranks:
            peak = dict(self.expert_peaks).get(len(expert_ranks), 1.0)
            shares = [p.active_share if p.shared_share is None else p.shared_share for p in parameters]
            parameters = tuple(
                replace(p, active_share=peak * share) if p.num_experts else p
                for p, share in zip(parameters, shares, strict=True)
            )
        return replace(self, parameters=parameters, expert_ranks=expert_ranks, float8=float8)

    @cached_property
    def int8_weight(self) -> str | None:
        """The first weight in 8 bits, which its layer keeps beside the parameter, so that ZeRO-3 can't divide it."""
        return next((p.name for p in self.parameters if p.dtype == "int8"), None)

    def with_frozen(self, freeze: bool | Literal["tower"] | str | Sequence[str]) -> ModuleSpec:
        """A copy in which all that matches `freeze` is frozen, see [`ModulePlugin`]; `ValueError` if nothing does."""
        if freeze is False:
            return self
        if freeze is True:
            patterns = [""]
        elif freeze == "tower":
            patterns = [re.escape(self.tower + ".")]
        else:
            patterns = [freeze] if isinstance(freeze, str) else list(freeze)
        matchers = [re.compile(pattern) for pattern in patterns]
        hits = [any(matcher.search(p.name) for matcher in matchers) for p in self.parameters]
        if not any(hits):
            raise ValueError(
                f"`freeze={freeze!r}` of module `{self.name}` matches none of its {len(self.parameters)} parameters, "
                f"the first of which is `{self.parameters[0].name}`. Use `True`, `'tower'` or a regular expression."
            )
        parameters = [
            replace(p, trainable=p.trainable and not hit) for p, hit in zip(self.parameters, hits, strict=True)
        ]
        return replace(self, parameters=tuple(parameters))


@dataclass(frozen=True)
class ModelSpec:
    """A multimodal model as a graph of modules."""

    # encoders, then the language model, then generators, which consume its hidden states
    modules: Mapping[str, ModuleSpec]
    # name of each parameter with more than one use (the embedding that is also `lm_head.weight`) -> the others
    tied: Mapping[str, Uses] = None  # type: ignore[assignment]
    # modality -> id of its placeholder token in `input_ids`
    placeholders: Mapping[str, int] = None  # type: ignore[assignment]

    def __post_init__(self):
        object.__setattr__(self, "tied", dict(self.tied or {}))
        object.__setattr__(self, "placeholders", dict(self.placeholders or {}))

    @property
    def encoders(self) -> tuple[str, ...]:
        return tuple(name for name, module in self.modules.items() if module.is_encoder)

    @property
    def generators(self) -> tuple[str, ...]:
        """The modules behind the language model."""
        return tuple(name for name, module in self.modules.items() if name != LANGUAGE_MODEL and not module.is_encoder)

    @property
    def language_model(self) -> ModuleSpec:
        return self.modules[LANGUAGE_MODEL]

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Boundaries between modules: features enter the language model, and its hidden states enter generators."""
        into = (
            Edge(name, LANGUAGE_MODEL, tuple(feature.layer for feature in self.modules[name].features))
            for name in self.encoders
        )
        return (*into, *(Edge(LANGUAGE_MODEL, name) for name in self.generators))

    @cached_property
    def layers_with_features(self) -> frozenset[int]:
        """The layers of the language model behind which it adds features to the hidden states (DeepStack)."""
        features = (feature for name in self.encoders for feature in self.modules[name].features)
        return frozenset(feature.layer for feature in features if feature.index is not None)

    def edge_features(self, source: str, target: str) -> tuple[FeatureSpec, ...] | None:
        """
        The features that go from one module to another, in the order of [`Edge.layers`]; `None` if hidden states do:
        between the stages of a module, and from a language model without features, in a plan that is only predicted.
        """
        features = self.modules[source].features
        if source == target or not features:
            return None
        # of the language model each generator gets those at its own placeholders
        return tuple(f for f in features if f.modality == target) if target in self._row_readers else features

    @cached_property
    def _row_readers(self) -> frozenset[str]:
        """The generators that read hidden states at placeholders of their own."""
        language_model = self.modules.get(LANGUAGE_MODEL)
        rows = () if language_model is None else language_model.features
        return frozenset(feature.modality for feature in rows) & {*self.generators}

    def modalities(self, module: str) -> tuple[str, ...]:
        """The modalities whose placeholders count as tokens of an encoder or a generator."""
        own = tuple(dict.fromkeys(feature.modality for feature in self.modules[module].features))
        return own if module != LANGUAGE_MODEL and own else (module,) if module in self._row_readers else ()

    def edge_width(self, source: str, target: str) -> int:
        """Width of the tensors that go from one module to another, or between the stages of one."""
        # an encoder ends in a projector to the width of its target, others pass hidden states
        return self.modules[target if source != target and self.modules[source].is_encoder else source].hidden_size

    @cached_property
    def parameters(self) -> dict[str, ParameterSpec]:
        return {p.name: p for module in self.modules.values() for p in module.parameters}

    @cached_property
    def used_at(self) -> dict[str, Uses]:
        """Parameter -> (module, layer) of each use; more than one where it is tied."""
        return {
            p.name: ((name, p.layer), *self.tied.get(p.name, ()))
            for name, module in self.modules.items()
            for p in module.parameters
        }

    @cached_property
    def uses(self) -> dict[tuple[str, int], tuple[ParameterUse, ...]]:
        """(module, layer) -> the parameters used there; tied parameters occur at each of their uses."""
        result: dict[tuple[str, int], list[ParameterUse]] = {}
        for name, module in self.modules.items():
            for parameter in module.parameters:
                matrix = len(parameter.shape) > 1
                use = ParameterUse(parameter, matrix and not parameter.is_lookup and not parameter.is_factor)
                result.setdefault((name, parameter.layer), []).append(use)
                for other in self.tied.get(parameter.name, ()):
                    result.setdefault(other, []).append(ParameterUse(parameter, matrix))
        return {key: tuple(uses) for key, uses in result.items()}

    @cached_property
    def first_alike(self) -> dict[tuple[str, int], int]:
        """(module, layer) -> the first layer of the module with parameters like its own, which costs as much."""
        first: dict[tuple, int] = {}
        result = {}
        for name, module in self.modules.items():
            for layer in range(-1, module.num_layers + 1):
                alike = tuple(
                    (
                        replace(use.parameter, name=_NUMBER.sub("", use.parameter.name), layer=0),
                        use.multiplies,
                        len(self.used_at[use.parameter.name]),
                    )
                    for use in self.uses.get((name, layer), ())
                )
                place = min(layer, 0) if layer < module.num_layers else layer  # before, in or behind the layers
                result[name, layer] = first.setdefault((name, place, alike), layer)
        return result

    @cached_property
    def with_mean_experts(self) -> ModelSpec:
        """The model of a layout's costs with what the mean rank computes of experts, in place of the busiest one."""
        if not any(module.expert_peaks and module.expert_ranks for module in self.modules.values()):
            return self
        even = {name: replace(module, expert_peaks=()) for name, module in self.modules.items()}
        modules = {name: module.in_layout(module.expert_ranks, module.float8) for name, module in even.items()}
        return replace(self, modules=modules)

    @property
    def num_parameters(self) -> int:
        return sum(p.num_elements for module in self.modules.values() for p in module.parameters)


def sources_first(modules: Mapping[str, Any], edges: Sequence[Edge]) -> dict[str, Any]:
    """Sorts modules topologically, in a stable way; raises `ValueError` if edges form a cycle."""
    depth = dict.fromkeys(modules, 0)
    for _ in modules:
        for edge in edges:
            depth[edge.target] = max(depth[edge.target], depth[edge.source] + 1)
    if any(depth[edge.target] <= depth[edge.source] for edge in edges) or max(depth.values(), default=0) >= len(depth):
        raise ValueError(f"The edges of the plan, {list(edges)}, form a cycle. Copy the edges of the model.")
    return {name: modules[name] for name in sorted(modules, key=depth.__getitem__)}
