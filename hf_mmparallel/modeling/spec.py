"""Builds the `ModelSpec` of a model: finds its modules, layers, parameters and features, and refuses other models."""

from __future__ import annotations

import functools
import inspect
import math
import statistics
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

from ..kernels.recurrent_layers import LONE_LAYERS, RECURRENT_LAYERS, attends, recurrent_mixers
from ..plan import LANGUAGE_MODEL, FeatureSpec, ModelSpec, ModuleSpec, ParameterSpec
from ..plan.model_spec import LayerKind, Uses
from .carried_values import carried_values
from .expert_parallel import experts_of, gets_every_token
from .features import feature_specs, meta_forward, meta_inputs
from .generators import Generator
from .shared_tokens import can_share_tokens
from .state_heads import state_widths
from .tensor_parallel import with_tp_dims
from .unowned import hidden_of, identity_layer, whole_shape

_MIN_MATRICES = 4  # of an attention, and so of a transformer layer
ENCODER_OF_MODALITY = {"image": "vision", "video": "vision", "audio": "audio"}


@dataclass(frozen=True)
class ModulePart:
    """
    Location of one module in a model, and the methods that compute its features.

    A model can define a method `multimodal_parts() -> dict[str, ModulePart]` that describes its encoders and
    generators; the language model is then `get_decoder()` and everything that belongs to none of them. For other
    models see [`module_parts`].
    """

    tower: str  # name, in the whole model, of the submodule with the layers
    prefixes: tuple[str, ...] = ()  # other submodules and parameters of the module, such as projectors
    # Modality -> bound method that returns the encoder's output, whose `pooler_output` has the projected features in
    # the order of the placeholder tokens. Empty for the language model.
    features: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # Modality -> batch entries that are arguments of the method, by default from its signature; the modality is
    # present if the first one is.
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # modality -> id of its placeholder token in `input_ids`
    placeholders: Mapping[str, int] = field(default_factory=dict)
    first: tuple[str, ...] = ()  # submodules that come before the layers, among the prefixes
    generator: Generator | None = None  # of a module behind the language model, which has no features but a loss

    @property
    def entries(self) -> tuple[str, ...]:
        names = dict.fromkeys((*self.features, *self.inputs))
        return tuple(entry for modality in names for entry in self.input_names(modality))

    @property
    def modalities(self) -> tuple[str, ...]:
        return tuple(self.features)

    def input_names(self, modality: str) -> tuple[str, ...]:
        """Names the batch entries of which the modality's features are computed, the required one first."""
        if modality in self.inputs:
            return self.inputs[modality]
        parameters = inspect.signature(inspect.unwrap(self.features[modality])).parameters.values()
        return tuple(p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD)


def inside(name: str, prefix: str) -> bool:
    """Returns whether `name` is `prefix` or inside it; every name is inside the empty prefix."""
    return not prefix or name == prefix or name.startswith(prefix + ".")


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The decoder of a model, also where its head has that name (ModernBERT)."""
    decoder = model.get_decoder()
    return model.base_model if decoder is model.get_output_embeddings() else decoder


def module_parts(model: PreTrainedModel) -> dict[str, ModulePart]:
    """Finds the encoders, the language model and the generators of a model."""
    names = {id(module): name for name, module in model.named_modules()}
    decoder = decoder_of(model)
    hook: Callable[[], dict[str, ModulePart]] | None = getattr(model, "multimodal_parts", None)
    parts, embedders = _discover_encoders(model, decoder, names) if hook is None else (dict(hook()), ())
    assigned = [prefix for part in parts.values() for prefix in (part.tower, *part.prefixes)]
    tower = names[id(decoder)]
    rest = dict.fromkeys(
        name
        for name, _ in model.named_parameters()
        if not inside(name, tower) and not any(inside(name, prefix) for prefix in assigned)
    )
    language_model = parts.pop(LANGUAGE_MODEL, ModulePart(tower, tuple(rest), first=embedders))
    encoders = {name: part for name, part in parts.items() if part.generator is None}
    return {**encoders, LANGUAGE_MODEL: language_model, **{k: v for k, v in parts.items() if k not in encoders}}


def _discover_encoders(
    model: PreTrainedModel, decoder: nn.Module, names: dict[int, str]
) -> tuple[dict[str, ModulePart], tuple[str, ...]]:
    """
    Finds the encoders that the model's `get_{modality}_features` methods call, and the submodules without layers by
    which methods embed media themselves (Fuyu), or turn them into words of the vocabulary (Chameleon, Emu3).
    """
    base = model.base_model
    entries: dict[str, dict[str, Any]] = {}
    embedders: list[str] = []
    for modality, name in ENCODER_OF_MODALITY.items():
        owner: Any = next((m for m in (base, model) if hasattr(m, f"get_{modality}_features")), None)
        token_id = placeholder_token(model.config, modality)
        if owner is None or token_id is None:
            continue
        tower = model.get_encoder(modality=modality)
        if tower is None:  # a configuration without this encoder (Gemma 4 without audio)
            continue
        method = getattr(owner, f"get_{modality}_features")
        if tower is model or tower is base or tower is decoder or not _has_layers(tower):
            used = _attributes_used(type(owner), [method.__func__])
            shared = {id(decoder), id(owner.get_input_embeddings())}
            parts = [part for name, part in owner.named_children() if name in used and id(part) not in shared]
            layered = [part for part in parts if "get_input_embeddings" not in used and _has_layers(part)]
            if not layered:
                embedders += [names[id(part)] for part in parts]
                continue
            tower = layered[0]
        entry = entries.setdefault(
            name, {"tower": names[id(tower)], "features": {}, "placeholders": {}, "owner": owner}
        )
        entry["features"][modality] = method
        entry["placeholders"][modality] = token_id
    reserved = {id(decoder), *(id(model.get_submodule(entry["tower"])) for entry in entries.values())}
    assigned: set[str] = set()
    for entry in entries.values():
        owner = entry.pop("owner")
        prefixes = []
        for attribute in sorted(_attributes_used(type(owner), [f.__func__ for f in entry["features"].values()])):
            value = getattr(owner, attribute, None)
            path = ".".join(filter(None, (names[id(owner)], attribute)))
            if isinstance(value, (nn.Module, nn.Parameter)) and id(value) not in reserved and path not in assigned:
                prefixes.append(path)
                assigned.add(path)
        entry["prefixes"] = tuple(prefixes)
    return {name: ModulePart(**entry) for name, entry in entries.items()}, tuple(embedders)


def _attributes_used(cls: type, functions: Sequence[Callable[..., Any]]) -> set[str]:
    """Collects attribute names in the code of methods of `cls`, and in the methods of `cls` that they call."""
    pending, seen, used = list(functions), set(), set()
    while pending:
        function = inspect.unwrap(pending.pop())
        if function in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(function)
        for name in _code_names(function.__code__):
            used.add(name)
            method = getattr(cls, name, None)
            if callable(method) and not hasattr(PreTrainedModel, name):
                pending.append(method)
    return used


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_names(constant)


def placeholder_token(config: Any, modality: str) -> int | None:
    return _setting(config, f"{modality}_token_id", f"{modality}_token_index")


def _setting(config: Any, *names: str, combine: Callable[..., Any] = math.gcd) -> Any:
    """Returns the first of some settings that a config has, or what `combine` makes of those of unlike layers."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except AmbiguousGlobalPerLayerAttributeError:
            value = combine(*(getattr(layer, name) for layer in config.per_layer_config))
        if value is not None:
            return value
    return None


def _rounded_mean(*values: int) -> int:
    return round(statistics.mean(values))


def layers_of(model: nn.Module, stack: str) -> nn.ModuleList:
    layers = model.get_submodule(stack)
    assert isinstance(layers, nn.ModuleList)
    return layers


def are_layers(modules: nn.ModuleList) -> bool:
    """Returns whether a list has at least two modules, of one class with at least the matrices of an attention."""
    kinds = {type(module) for module in modules}
    if len(modules) < 2 or len(kinds) > 1 or nn.Module in kinds:
        return False
    return min(sum(p.dim() == 2 for p in module.parameters()) for module in modules) >= _MIN_MATRICES


def _has_layers(module: nn.Module) -> bool:
    return any(isinstance(part, nn.ModuleList) for part in module.modules())


def find_stack(model: nn.Module, tower: str) -> str:
    """Names the list of layers in `tower` that is split into stages. Raises `ValueError` without a `ModuleList`."""
    best, highest, outer = None, (False, False, -1, -1), []
    root = model.get_submodule(tower)
    models = [name for name, module in root.named_modules() if name and isinstance(module, PreTrainedModel)]
    for name, module in root.named_modules():
        if not isinstance(module, nn.ModuleList) or any(inside(name, prefix) for prefix in outer):
            continue
        outer.append(name)
        if any(isinstance(part, nn.ModuleList) for part in module):  # is not called as one layer
            continue
        # Transformer layers rather than convolutions, those of the tower rather than of models in it, such as the
        # encoders of images in Phi-4; the longest list outside of other lists.
        is_own = not any(inside(name, other) for other in models)
        size = sum(parameter.numel() for parameter in module.parameters())
        rank = (are_layers(module), is_own, len(module), size)
        if rank > highest:
            best, highest = name, rank
    if best is None:
        raise ValueError(f"`{tower}` has no list of layers (`nn.ModuleList`). Use a model whose modules have one.")
    return ".".join(filter(None, (tower, best)))


def build_model_spec(model: PreTrainedModel) -> ModelSpec:
    """
    Builds the description of the modules, layers, parameters and features of a whole model, on any device, with or
    without adapters. Raises `ValueError` if a module has no list of layers.
    """
    parts = module_parts(model)
    stacks = {name: find_stack(model, part.tower) for name, part in parts.items()}
    locations = _parameter_locations(model, parts, stacks)
    by_module: dict[str, list[ParameterSpec]] = {name: [] for name in parts}
    experts, adapter_ranks = dict[str, tuple[int, int, int]](), dict[str, int]()
    for name, own in experts_of(model).items():
        experts |= {f"{name}.{attribute}": (own.module.num_experts, *cut) for attribute, cut in own.cuts.items()}
        adapter_ranks |= {f"{name}.{attribute}": rank for attribute, rank in own.adapter_ranks.items()}
    shares = {
        f"{part.tower}.{name}": share
        for part in parts.values()
        if part.generator is not None
        for name, share in part.generator.row_shares().items()
    }
    for name, parameter in model.named_parameters():
        module, layer = locations[name]
        dtype = str(parameter.dtype).removeprefix("torch.")
        shape = tuple(whole_shape(parameter))
        chosen = _chosen_share(model, name, shape)
        every = len(shape) == 3 and gets_every_token(model.get_submodule(name.rpartition(".")[0]))
        num_experts, dim, blocks = experts.get(name, (0, 0, 1))
        entry = ParameterSpec(
            name,
            shape,
            layer,
            dtype,
            bool(parameter.requires_grad),
            shares.get(name, 1.0 if every else chosen),
            num_experts=num_experts,
            expert_dim=dim,
            expert_blocks=blocks,
            shared_share=chosen if num_experts else None,
            adapter_rank=adapter_ranks.get(name, 0),
        )
        by_module[module].append(entry)
    modules = {
        name: _module_spec(model, name, part, stacks[name], tuple(by_module[name])) for name, part in parts.items()
    }
    generators = [name for name, part in parts.items() if part.generator is not None]
    rows = tuple(FeatureSpec(name, "rows") for name in generators)
    modules[LANGUAGE_MODEL] = replace(modules[LANGUAGE_MODEL], features=rows)
    modules = {name: _with_taps(model, module, parts) for name, module in modules.items()}
    placeholders = {modality: token for part in parts.values() for modality, token in part.placeholders.items()}
    return with_tp_dims(model, ModelSpec(modules, _tied(model, locations), placeholders))


def num_experts_of(config: Any) -> int:
    return _setting(config, "num_experts", "num_local_experts", "n_routed_experts") or 0


LOAD_BALANCING_LOSS = "load_balancing_loss_func"  # in the modules of transformers


def router_coefficient(config: Any) -> float | None:
    """The factor of the loss over the experts' load; 0 if it does not count, `None` if a configuration has none."""
    return getattr(config, "router_aux_loss_coef", None) if getattr(config, "output_router_logits", False) else 0.0


def has_router_loss(model: PreTrainedModel) -> bool:
    """Returns whether the forward of a model adds a load-balancing loss to its own."""
    has_function = hasattr(sys.modules[type(model).__module__], LOAD_BALANCING_LOSS)
    return has_function and router_coefficient(model.config.get_text_config()) != 0


def _chosen_share(model: PreTrainedModel, name: str, shape: tuple[int, ...]) -> float:
    """Returns active experts per token / number of experts for a parameter of experts, 1 for others."""
    config: Any = model.config.get_text_config()
    num_experts = num_experts_of(config)
    num_active = _setting(config, "num_experts_per_tok", "moe_topk", "top_k_experts")
    is_expert = ".experts." in name and len(shape) > 1
    if not is_expert or not num_experts or not isinstance(num_active, int):
        return 1.0
    return min(1.0, num_active / num_experts)


def _parameter_locations(
    model: PreTrainedModel, parts: Mapping[str, ModulePart], stacks: Mapping[str, str]
) -> dict[str, tuple[str, int]]:
    """Maps every name, including tied ones, of every parameter to (module, layer) of that use."""
    lengths = {name: len(layers_of(model, stack)) for name, stack in stacks.items()}
    base = next((name for name, module in model.named_modules() if module is model.base_model), "")
    owners = [(prefix, name) for name, part in parts.items() for prefix in (part.tower, *part.prefixes)]
    owners.sort(key=lambda entry: -len(entry[0]))
    locations: dict[str, tuple[str, int]] = {}
    passed: set[str] = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        module = next((module for prefix, module in owners if inside(name, prefix)), LANGUAGE_MODEL)
        stack = stacks[module]
        if inside(name, stack):
            passed.add(module)
            layer = int(name[len(stack) + 1 :].split(".", 1)[0])
        elif any(inside(name, prefix) for prefix in parts[module].first):
            layer = -1
        elif inside(name, parts[module].tower):
            generator = parts[module].generator
            # blocks that are no chain may read what is around them at any time
            is_after = module in passed and (generator is None or generator.is_chain)
            layer = lengths[module] if is_after else -1
        elif module == LANGUAGE_MODEL and base and inside(name, base):
            layer = -1
        else:
            layer = lengths[module]
        locations[name] = (module, layer)
    for module, part in parts.items():
        own = {
            name: layer for name, (owner, layer) in locations.items() if owner == module and inside(name, part.tower)
        }
        ends = {name: layer for name, layer in own.items() if layer in (-1, lengths[module])}
        for name, layer in _order_of_use(model, part.tower, stacks[module], ends).items():
            locations[name] = (module, layer)
    return locations


def _order_of_use(model: PreTrainedModel, tower: str, stack: str, locations: Mapping[str, int]) -> dict[str, int]:
    """
    Maps parameters that are registered on the other side of the layers than they are used on to their location: after
    the layers (OPT's last norm), or before them (GLM-4V's first norm), as all that text does not use (Phi-4's encoders
    of images).
    """
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in locations}
    # embeddings and convolutions are always before the layers
    unsure = {
        name: owner
        for name, owner in owners.items()
        if locations[name] >= 0 or not isinstance(owner, (nn.Embedding, _ConvNd))
    }
    whole: Any = model.get_submodule(tower)
    if not unsure:
        return {}
    inputs = (meta_inputs(whole) if isinstance(whole, PreTrainedModel) else None) or {}
    layers = layers_of(model, stack)
    called, output = _calls(whole, layers, unsure.values(), inputs, first_only=True)
    if output is None:  # the layers hand on more than a hidden state, or not all the same
        called, output = _calls(whole, layers, unsure.values(), inputs, first_only=False)
    if layers[0] not in called:
        return _order_in_code(whole, stack.removeprefix(f"{tower}."), tower, unsure, len(layers))
    start, stop = (called.index(layer) if layer in called else len(called) for layer in (layers[0], layers[-1]))
    before, after = called[:start], called[start:]
    result = {}
    for name, owner in unsure.items():
        if locations[name] < 0 and owner in after and owner not in before:  # or of outputs of inner layers (DeepStack)
            result[name] = len(layers)
        is_first = owner in before and owner not in after
        is_unused = output is not None and "input_ids" in inputs and owner not in called[stop:]
        if locations[name] >= 0 and (is_first or is_unused):
            result[name] = -1
    return result


def _order_in_code(tower: nn.Module, stack: str, prefix: str, names: Iterable[str], num_layers: int) -> dict[str, int]:
    """As [`_order_of_use`], for a forward whose inputs are not known: by the order of names in its code."""
    order = list(_code_names(inspect.unwrap(type(tower).forward).__code__))
    used = {name: name.removeprefix(f"{prefix}.").partition(".")[0] for name in names}
    start = order.index(stack) if stack in order else -1
    known = {name: order.index(own) for name, own in used.items() if start >= 0 and own in order}
    return {name: -1 if place < start else num_layers for name, place in known.items()}


def _calls(
    tower: nn.Module, layers: nn.ModuleList, others: Iterable[nn.Module], inputs: Mapping[str, Any], first_only: bool
) -> tuple[list[nn.Module], Any]:
    """
    Returns in which order a forward on the meta device calls the first and last layer and others, and its output. With
    `first_only` the other layers hand on their hidden state, which takes a fraction of the time.
    """
    called: list[nn.Module] = []
    kept = dict(layers.named_children())
    first, last = layers[0], layers[-1]
    if first_only:
        layers._modules.update({index: identity_layer(layer) for index, layer in kept.items() if layer is not first})
    watched = {owner: owner for owner in others} | {layers[0]: first, layers[-1]: last}
    hooks = [
        module.register_forward_pre_hook(functools.partial(lambda meant, *_: called.append(meant), meant))
        for module, meant in watched.items()
    ]
    try:
        return called, meta_forward(tower, **inputs)
    finally:
        layers._modules.update(kept)
        for hook in hooks:
            hook.remove()


def _tied(model: PreTrainedModel, locations: Mapping[str, tuple[str, int]]) -> dict[str, Uses]:
    """Maps the first name of each parameter with several uses to (module, layer) of the others."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    tied: dict[str, Uses] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, use = first[id(parameter)], locations[name]
        if use != locations[owner] and use not in tied.get(owner, ()):
            tied[owner] = (*tied.get(owner, ()), use)
    return tied


def _module_spec(
    model: PreTrainedModel, name: str, part: ModulePart, stack: str, parameters: tuple[ParameterSpec, ...]
) -> ModuleSpec:
    tower = model.get_submodule(part.tower)
    layers = layers_of(model, stack)
    config = getattr(tower, "config", model.config)
    is_chain = part.generator is None or part.generator.is_chain
    hidden_size = _hidden_size(layers[0], config) if is_chain or part.generator is None else part.generator.width
    widths = {_hidden_size(layer, config) for layer in layers} if part.features else set()
    if hidden_size is None and part.features and (of_layers := _setting(config, "hidden_sizes")):
        widths, hidden_size = {*of_layers, None}, of_layers[-1]  # of convolutions, which merge tokens, too
    if hidden_size is None:
        raise ValueError(
            f"The width of the layers of `{name}` is not known: neither `{type(layers[0]).__name__}` nor "
            f"`{type(config).__name__}` has a `hidden_size`, which a plan needs. Train it without `parallel`."
        )
    num_heads = (
        (_setting(config, "num_attention_heads", "num_heads", "encoder_attention_heads") or 1) if is_chain else 1
    )
    intermediate = _setting(config, "intermediate_size", "encoder_ffn_dim", "ffn_dim")
    if intermediate is None:
        intermediate = int(hidden_size * (_setting(config, "mlp_ratio") or 4))
    features = feature_specs(part.modalities, config)
    return ModuleSpec(
        name=name,
        stack=stack,
        num_layers=len(layers),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_setting(config, "num_key_value_heads") or num_heads,
        intermediate_size=intermediate if isinstance(intermediate, int) else max(intermediate),
        parameters=parameters,
        features=features,
        tower=part.tower,
        is_chain=is_chain,
        has_one_width=len(widths) <= 1,
        # attention of blocks that are no chain is counted with their matrices
        head_dim=_setting(config, "head_dim", combine=_rounded_mean) if is_chain else 0,
        attention=getattr(config, "_attn_implementation", None) or "sdpa",
        activation_copies=activation_copies(
            _setting(config, "hidden_act", "hidden_activation", "activation_function")
        ),
        windows=attention_windows(config, len(layers)),
        layer_kinds=layer_kinds(model, layers),
        state_widths=state_widths(model, layers, hidden_size) if name == LANGUAGE_MODEL else (),
        **({} if features else _hidden_axes(tower, layers[0], hidden_size)),
        carried=carried_values(tower, layers) if name == LANGUAGE_MODEL else (),
        balances_experts=name == LANGUAGE_MODEL and has_router_loss(model),
        shares_tokens=bool(features) and part.generator is None and can_share_tokens(tower, layers),
    )


def _with_taps(model: PreTrainedModel, module: ModuleSpec, parts: Mapping[str, ModulePart]) -> ModuleSpec:
    """The module with the layers whose outputs are read behind all of them."""
    num_states, config = module.num_layers + 1, getattr(model.get_submodule(module.tower), "config", None)
    states: list[int] = []  # state `i + 1` is the output of layer `i`
    num_read = module.num_layers
    if module.name == LANGUAGE_MODEL:
        settings = (part.generator.settings for part in parts.values() if part.generator is not None)
        states += [own.layer for own in settings if own.layer is not None]
    elif config is getattr(model.config, f"{module.name}_config", None):
        selected = getattr(model.config, f"{module.name}_feature_layer", None)
        states += [selected] if isinstance(selected, int) else selected or []
        num_read = max((state % num_states for state in states), default=num_read)
    if any(feature.index is not None for feature in module.features):
        states += [layer + 1 for layer in getattr(config, "deepstack_visual_indexes", ())]
    taps = {state % num_states - 1 for state in states} - {module.num_layers - 1}
    return replace(module, taps=tuple(sorted(taps)), num_unread=module.num_layers - num_read)


def attention_windows(config: Any, num_layers: int) -> tuple[int, ...]:
    """Returns the attention window of each layer in tokens, 0 for the whole sequence; empty if no layer has one."""
    # Qwen2.5-VL's encoder lists the layers without a window
    full_layers = _setting(config, "fullatt_block_indexes")
    if full_layers is not None and _setting(config, "window_size"):
        window = (config.window_size // config.patch_size) ** 2
        return tuple(0 if layer in full_layers else window for layer in range(num_layers))
    # configs of language models list the layers of each type or have one window for all
    window = _setting(config, "sliding_window", combine=lambda *windows: windows)
    if isinstance(window, tuple):
        return tuple(own or 0 for own in window)
    # a chunk counts as a window of half of it: far into a sample, the mean token sees as many
    sizes = {
        "sliding_attention": window or 0,
        "chunked_attention": (_setting(config, "attention_chunk_size") or 0) // 2,
    }
    kinds = _setting(config, "layer_types") or ["sliding_attention"] * num_layers
    windows = tuple(sizes.get(kind, 0) for kind in kinds)
    return windows if len(windows) == num_layers and any(windows) else ()


def layer_kinds(model: nn.Module, layers: nn.ModuleList) -> tuple[LayerKind, ...]:
    """Returns how the tokens of a sample reach each other in each layer; empty if all layers attend."""
    known: dict[int, LayerKind] = {}
    for layer, kind, mixers in recurrent_mixers(model):
        if mixers or kind in RECURRENT_LAYERS - {"hybrid"}:
            known[id(layer)] = "both" if attends(layer) else "state"
        elif kind in LONE_LAYERS:
            known[id(layer)] = "alone"
    kinds: list[LayerKind] = [known.get(id(layer), "attention") for layer in layers]
    return tuple(kinds) if set(kinds) != {"attention"} else ()


def _hidden_axes(tower: nn.Module, first: nn.Module, hidden_size: int) -> dict[str, Any]:
    """The shape of a token's hidden state at the first layer of a decoder, as in a `ModuleSpec`."""
    inputs = meta_inputs(tower) if isinstance(tower, PreTrainedModel) else None
    if inputs is None or "input_ids" not in inputs:
        return {}
    shapes: list[tuple[int, ...]] = []

    def stop(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes.append(tuple(hidden_of(args, kwargs).shape))
        raise StopIteration

    hook = first.register_forward_pre_hook(stop, with_kwargs=True)
    meta_forward(tower, **inputs)
    hook.remove()
    for shape in shapes:
        for place in range(len(shape) - 2):
            own = (*shape[:place], *shape[place + 2 :])
            if shape[place : place + 2] == (1, 4) and own != (hidden_size,):
                return {"hidden_shape": own, "leading_axes": place}
    return {}


@functools.cache
def activation_copies(name: str | None) -> int:
    """Counts the tensors that an activation function saves for its backward."""
    if name not in ACT2FN:
        return 1
    saved: set[int] = set()
    value = torch.zeros(1, device="cpu", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (saved.add(t.untyped_storage().data_ptr()), t)[1], lambda t: t
    ):
        result = ACT2FN[name](value)
    del result
    return max(1, len(saved))


def _hidden_size(layer: nn.Module, config: Any) -> int | None:
    for child in layer.children():
        parameters = list(child.parameters())
        if parameters and all(parameter.dim() == 1 for parameter in parameters):
            return whole_shape(parameters[0])[0]
    return _setting(config, "hidden_size", "embed_dim", "d_model")
