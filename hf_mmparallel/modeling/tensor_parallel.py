"""Tensor parallelism inside a module: the model's own plan where it has one, else one read off its layers."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec
from .parallel_linear import HEAD_STYLES, LOOKUP_STYLE, SharedInput, has_plain_form, use_plain_tensors
from .sequence_parallel import SplitRows, find_blocks
from .stacked_adapters import add_own_parts, caller_name
from .unowned import from_shard

PARTIAL_GRADIENT = "replicated_with_grad_allreduce"

# (split by columns, split by rows): linear layers of one parent, between which only element-wise functions stand.
_FEED_FORWARDS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("linear_fc1",), "linear_fc2"),
)
_ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
_ATTENTION_OUTPUTS = ("o_proj", "out_proj", "projection_layer")
# Attributes of an attention layer that its forward may reshape with; each rank has its share of them.
_ATTENTION_WIDTHS = (
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "embed_dim",
    "hidden_size",
)
_ADAPTER_PARTS = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.|$)")


def base_name(name: str) -> str:
    """Returns the name that a module or parameter has before adapters wrap it."""
    return _ADAPTER_PARTS.sub("", name)


def _with_wildcards(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _linear(module: nn.Module) -> nn.Linear | None:
    """Returns the linear layer itself, without an adapter around it; `None` when it is something else."""
    inner = getattr(module, "base_layer", module)
    return inner if isinstance(inner, nn.Linear) else None


def _linears(parent: nn.Module, names: Iterable[str]) -> list[nn.Linear] | None:
    children = dict(parent.named_children())
    found = [_linear(children[name]) if name in children else None for name in names]
    return None if None in found else found  # type: ignore[return-value]


def _feed_forward_plan(parent: nn.Module, tp_size: int) -> dict[str, str]:
    """Maps the feed-forward layers that are direct children of `parent` to styles."""
    for inputs, output in _FEED_FORWARDS:
        layers = _linears(parent, (*inputs, output))
        if layers is None:
            continue
        width = layers[-1].in_features
        between = [
            p
            for name, child in parent.named_children()
            if name not in (*inputs, output)
            for p in child.parameters(recurse=False)
            if p.ndim == 1 and p.shape[0] == width
        ]
        if any(layer.out_features != width for layer in layers[:-1]) or width % tp_size or between:
            return {}
        return {**dict.fromkeys(inputs, "colwise"), output: "rowwise"}
    return {}


def _attention_plan(parent: nn.Module, tp_size: int) -> dict[str, str]:
    """Maps separate projections of an attention layer to styles; empty when its heads can't be told apart."""
    head_size = getattr(parent, "head_dim", None)
    outputs = [name for name in _ATTENTION_OUTPUTS if name in dict(parent.named_children())]
    if head_size is None or len(outputs) != 1:
        return {}
    layers = _linears(parent, (*_ATTENTION_INPUTS, *outputs))
    if layers is None or any(layer.out_features % (head_size * tp_size) for layer in layers[:-1]):
        return {}
    if layers[-1].in_features != layers[0].out_features:
        return {}
    plan = {**dict.fromkeys(_ATTENTION_INPUTS, "colwise"), outputs[0]: "rowwise"}
    for name, child in parent.named_children():
        parameters = list(child.parameters())
        if name in plan or not parameters:
            continue
        # A norm of each head is replicated and sees only this rank's heads; a norm over all heads needs all of them.
        if any(p.shape != (head_size,) for p in parameters) or list(child.children()):
            return {}
        plan[name] = PARTIAL_GRADIENT
    return {} if list(parent.parameters(recurse=False)) else plan


def _works_by_columns(parent: nn.Module, styles: Mapping[str, str | None]) -> bool:
    """Whether a feed-forward layer's functions, tried on tiny matrices, mix no columns (Gemma 3n's do)."""
    first = [name for name, style in styles.items() if style == "colwise"]
    last = [name for name, style in styles.items() if style == "rowwise"]
    others = {name: child for name, child in parent.named_children() if name not in (*first, *last)}
    if not first or len(last) != 1 or any([*child.parameters()] for child in others.values()):
        return True
    line = functools.partial(torch.linspace, dtype=torch.float64, device="cpu")
    width, columns = 4, 64

    def reach_last(held: int) -> list[torch.Tensor]:
        """What the last matrix gets of the first `held` columns."""
        found: list[torch.Tensor] = []
        tiny = copy.copy(parent)
        tiny._modules = {name: copy.deepcopy(child).eval() for name, child in others.items()}
        tiny.training = False
        for place, name in enumerate(first):
            tiny._modules[name] = linear = nn.Linear(width, held, bias=False, device="meta")
            values = line(place, 1000 + place, columns * width).cos().view(columns, width)
            linear.weight = nn.Parameter(values[:held], requires_grad=False)
        tiny._modules[last[0]] = end = nn.Identity()
        end.register_forward_pre_hook(lambda _, given: found.append(given[0]))
        with contextlib.suppress(Exception):  # whatever a layer raises that isn't a feed-forward: attention
            tiny.forward(line(-2, 2, 3 * width).sin().view(1, 3, width))
        return found

    whole, share = reach_last(columns), reach_last(columns // 2)
    if not whole or not share or whole[0].shape[-1] != columns:
        return True
    return torch.allclose(whole[0][..., : columns // 2], share[0])


_NO_SETTINGS = {*vars(nn.Module()), "layer_idx"}


def _function_key(layer: nn.Module, styles: Mapping[str, str | None]) -> tuple:
    """What tells layers apart that compute another function: class, styles of children, and settings but the index."""
    settings = vars(layer).keys() - _NO_SETTINGS
    values = ((name, vars(layer)[name]) for name in sorted(settings))
    plain = tuple((n, v if isinstance(v, int | float | str | None) else id(v)) for n, v in values)
    return type(layer), plain, *styles.items(), *(type(child) for _, child in layer.named_children())


def _localize_widths(attention: nn.Module, tp_size: int) -> None:
    """Turns the attributes that an attention forward reshapes with into those of one rank."""
    for name in _ATTENTION_WIDTHS:
        width = getattr(attention, name, None)
        if isinstance(width, int) and width % tp_size == 0:
            setattr(attention, name, width // tp_size)


@dataclass
class _Styles:
    """How a module is laid out over tensor-parallel ranks."""

    plan: dict[str, str] = field(default_factory=dict)  # module or parameter -> style
    # parameters that each rank holds whole and multiplies with its share of the activations
    partial: set[str] = field(default_factory=set)
    attentions: list[nn.Module] = field(default_factory=list)  # attention layers that reshape with widths of their own

    def cut(self, name: str, num_dims: int) -> tuple[int | None, int]:
        """Returns the dimension along which a parameter is cut, `None` for none, and its blocks that are each cut."""
        style = self.plan.get(name, "")
        is_packed, style = style.startswith("packed_"), style.removeprefix("packed_")
        blocks = 2 if is_packed and num_dims > 1 else 1
        if style.startswith("colwise") or style == LOOKUP_STYLE:
            return max(num_dims - 2, 0), blocks
        is_whole = num_dims == 1 if is_packed else name.rpartition(".")[2] == "bias"
        return (num_dims - 1, blocks) if style.startswith("rowwise") and not is_whole else (None, 1)


def _generic_plan(
    stack: nn.Module, prefix: str, held: set[str], tp_size: int
) -> tuple[dict[str, str], list[nn.Module]]:
    """Maps the modules of a stack without a plan of its own to styles, and returns its cut attention layers."""
    plan: dict[str, str] = {}
    attentions = []
    users = Counter(id(parameter) for _, parameter in stack.named_parameters(remove_duplicate=False))
    for name, module in stack.named_modules(prefix=prefix):
        if not any(f"{name}.{child}" in held for child, _ in module.named_children()):
            continue
        if any(users[id(parameter)] > 1 for parameter in module.parameters()):  # of layers that share theirs: Zamba
            continue
        attention = _attention_plan(module, tp_size)
        if attention:
            attentions.append(module)
        for child, style in {**attention, **_feed_forward_plan(module, tp_size)}.items():
            plan[base_name(f"{name}.{child}")] = style
    return plan, attentions


def _between(parent: nn.Module, styles: Mapping[str, str | None]) -> set[str]:
    """
    Finds the children of a layer, without a style of their own, between its column-parallel and row-parallel linear
    layers: norms over a single head, and functions with a scalar for all activations. They see one rank's share of the
    activations, so that the gradients of their parameters are shares.
    """
    found = [style or "" for style in styles.values()]
    if "colwise" not in found or not any(style.startswith("rowwise") for style in found):
        return set()
    children = dict(parent.named_children())
    # A norm may also stand behind a projection that all ranks compute whole, as in multi-head latent attention.
    whole = any(_linear(child) is not None and styles[name] is None for name, child in children.items())
    latent = whole or any(style.startswith("mla") for style in found)
    head = (getattr(parent, "head_dim", None),)
    result = set()
    for name, child in children.items():
        shapes = [tuple(parameter.shape) for parameter in child.parameters()]
        if styles[name] is not None or not shapes or list(child.children()):
            continue
        if all(shape in ((), (1,)) for shape in shapes) or (not latent and all(shape == head for shape in shapes)):
            result.add(name)
    return result


def _mended_style(layer: nn.Module, parameter: str, style: str | None) -> str | None:
    """Returns the style of a layer's own parameter, also if the model's plan cuts two matrices as if they were one."""
    # gate and up matrices that lie one after the other are each cut, so that a rank has as much of both
    if style in ("colwise", "rowwise") and parameter == "gate_up_proj" and getattr(layer, "is_concatenated", False):
        return f"packed_{style}"
    return style


def _adapter_styles(layer: nn.Module, name: str, style: str) -> dict[str, str]:
    """Maps the LoRA matrices around a linear layer that has `style` to theirs."""
    split = "lora_A" if style.startswith("rowwise") else "lora_B"
    return {f"{name}.{split}.{adapter}": style for adapter in getattr(layer, split, {})}


def _factor_styles(adapter: Any, name: str, style: str | None) -> tuple[dict[str, str], set[str]]:
    """
    Maps a factor of an adapter of stacked weights, which is cut with them, to its style; and names those of the other
    one, whose gradients are shares.
    """
    module = adapter.get_base_layer()
    style = _mended_style(module, adapter.parameter_name, style)
    if style is None:
        return {}, set()
    is_transposed, packed = getattr(module, "is_transposed", False), "packed_" * style.startswith("packed_")
    cut, whole, kind = ("A", "B", "rowwise") if ("colwise" in style) == is_transposed else ("B", "A", "colwise")
    named = {part: [f"{name}.lora_{part}.{own}.weight" for own in getattr(adapter, f"lora_{part}")] for part in "AB"}
    return dict.fromkeys(named[cut], packed + kind), {*named[whole]}


def _check_adapter(layer: nn.Module, name: str) -> None:
    if getattr(layer, "lora_magnitude_vector", None):
        raise ValueError(
            f"`{name}` has a DoRA adapter, whose norm needs the whole matrix. Use `use_dora=False` or `tp_size=1`."
        )
    if not hasattr(layer, "lora_A"):
        raise ValueError(
            f"`{name}` is wrapped by `{type(layer).__name__}`, for which no tensor-parallel form is known. "
            f"Use LoRA or `tp_size=1`."
        )


def _check_heads(layer: nn.Module, name: str, styles: Mapping[str, str | None], own: Mapping[str, str | None]) -> None:
    head_size = getattr(layer, "head_dim", None)
    if head_size is None:
        return
    columns = [_linear(layer.get_submodule(child)) for child, style in styles.items() if style == "colwise"]
    num_heads = {linear.out_features // head_size for linear in columns if linear is not None}
    for parameter, style in own.items():
        shape = tuple(layer.get_parameter(parameter).shape)
        if style is None and len(shape) == 1 and shape[0] in num_heads and shape != (head_size,):
            raise ValueError(
                f"`{name}.{parameter}` has an entry for each of {shape[0]} heads, which the model's tensor-parallel "
                f"plan cuts, and is not cut itself. Use `tp_size=1`."
            )


def _model_plan(model: nn.Module, module: ModuleSpec, held: set[str], tp_size: int, styles: _Styles) -> dict[str, str]:
    """Maps modules and parameters, without adapters, to styles: the model's own plan, or one read off its layers."""
    plan = {
        name: style
        for name, style in (getattr(model, "tp_plan", None) or {}).items()
        if not style.startswith("embedding")
    }
    in_stack = {_with_wildcards(name) for name in held if name.startswith(module.stack + ".")}
    if not any(name.startswith(_with_wildcards(module.stack) + ".") for name in plan) and in_stack:
        generic, styles.attentions = _generic_plan(model.get_submodule(module.stack), module.stack, held, tp_size)
        plan.update(generic)
    return plan


def _find_styles(model: nn.Module, module: ModuleSpec, tp_size: int, owned: Collection[str]) -> _Styles:
    """Finds the styles of the parameters of one module that are `owned`, and of the layers around them."""
    names = {parameter.name for parameter in module.parameters}.intersection(owned)
    held = {name.rpartition(".")[0] for name in names}
    around = {"", *(name[: dot.start()] for name in names for dot in re.finditer(r"\.", name))}
    held |= {base_name(name) for name in held}
    result = _Styles()
    given = _model_plan(model, module, held, tp_size, result)

    partial: set[str] = set()  # layers
    uncut: set[str] = set()  # layers whose columns depend on each other
    by_columns: dict[Any, bool] = {}  # of layers that are alike

    def style_of(name: str) -> str | None:
        key = base_name(name)
        return None if key.rpartition(".")[0] in uncut else given.get(key, given.get(_with_wildcards(key)))

    for name, layer in model.named_modules():
        parent = name.rpartition(".")[0]
        if name not in around and parent not in held:
            continue
        style = style_of(name)
        own = [f"{name}.{parameter}" for parameter, _ in layer.named_parameters(recurse=False)]
        if hasattr(layer, "parameter_name"):
            factors, shares = _factor_styles(layer, name, style_of(f"{name}.{layer.parameter_name}"))
            result.plan |= {factor: own for factor, own in factors.items() if factor in names}
            result.partial |= shares & names
            continue
        if style is not None and style != PARTIAL_GRADIENT and hasattr(layer, "base_layer"):
            if tp_size > 1 and name in around:
                _check_adapter(layer, name)
            for adapter, adapter_style in _adapter_styles(layer, name, style).items():
                of_adapter = names.intersection((f"{adapter}.weight", f"{adapter}.bias"))
                if of_adapter:
                    result.plan |= dict.fromkeys((*sorted(of_adapter), adapter), adapter_style)
            continue
        children = {child: style_of(f"{name}.{child}") for child, _ in layer.named_children()}
        if (alike := _function_key(layer, children)) not in by_columns:
            by_columns[alike] = _works_by_columns(layer, children)
        if not by_columns[alike]:
            uncut.add(base_name(name))
            children = dict.fromkeys(children)
        partial.update(f"{name}.{child}" for child in _between(layer, children))
        if tp_size > 1 and names.intersection(own):
            _check_heads(layer, name, children, {p.rpartition(".")[2]: style_of(p) or style for p in own})
        parameters = {p: _mended_style(layer, p.rpartition(".")[2], style_of(p) or style) for p in own if p in names}
        if (style == PARTIAL_GRADIENT or name in partial) and parameters:
            result.partial.update(parameters)
            continue
        result.plan |= {parameter: found for parameter, found in parameters.items() if found is not None}
        # Also layers without parameters in one that has some, such as the experts that hand on what they get.
        inside = not own and (parent in held or name in around)
        if style is not None and (parameters or inside):
            result.plan[name] = style
    result.plan |= _lookup_styles(model, given, names)
    return result


def _lookup_styles(model: nn.Module, given: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Maps embeddings whose words the model's plan shares out, and heads that are tied to them, to styles."""
    wanted = {name for name, style in (getattr(model, "tp_plan", None) or {}).items() if style == LOOKUP_STYLE}
    if not wanted:
        return {}
    layers: dict[int, dict[str, nn.Module]] = {}  # id of a parameter -> the layers that have it
    for name, layer in model.named_modules():
        for parameter in layer.parameters(recurse=False):
            layers.setdefault(id(parameter), {})[name] = layer
    result: dict[str, str] = {}
    for parameter_name, parameter in model.named_parameters():
        users = layers[id(parameter)]
        lookups = {name: layer for name, layer in users.items() if isinstance(layer, nn.Embedding)}
        heads = {name: given.get(name, "") for name in users.keys() - lookups.keys()}
        # what adapters wrap has another name, and is looked up or multiplied by them, too
        is_cut = parameter_name in names and lookups and lookups.keys() <= wanted
        is_cut = is_cut and {*heads.values()} <= {*HEAD_STYLES}
        if is_cut and not any(layer.max_norm or layer.sparse for layer in lookups.values()):
            result |= dict.fromkeys((parameter_name, *lookups), LOOKUP_STYLE) | heads
    return result


def with_tp_dims(model: nn.Module, spec: ModelSpec, tp_sizes: Mapping[str, Sequence[int]] | None = None) -> ModelSpec:
    """
    Returns the description of a model, before any of its modules is sharded, with the dimension along which each
    parameter is cut. `tp_sizes` (module -> sizes of its tp groups) have to divide what they share; without them all
    that can be is cut. Raises `ValueError` for a parameter that tp groups of two sizes cut in different ways.
    """
    modules = {}
    for name, module in spec.modules.items():
        every = {parameter.name for parameter in module.parameters}
        sizes = [size for size in (tp_sizes or {}).get(name, ()) if size > 1] or [1]
        styles = {size: _find_styles(model, module, size, every) for size in sizes}
        by_size = {size: [own.cut(p.name, len(p.shape)) for p in module.parameters] for size, own in styles.items()}
        _check_same_cuts(module, by_size)
        cuts = by_size[sizes[0]]
        parameters = tuple(
            replace(p, tp_dim=dim, tp_blocks=blocks) for p, (dim, blocks) in zip(module.parameters, cuts, strict=True)
        )
        splits_rows = (
            name == LANGUAGE_MODEL
            and not module.hidden_shape
            and not module.carried
            and all(_splits_rows(model, module, own, size) for size, own in styles.items())
        )
        modules[name] = replace(module, parameters=parameters, sequence_parallel=splits_rows)
    return replace(spec, modules=modules)


def _blocks_of(model: nn.Module, stack: str, styles: _Styles) -> dict[str, list[nn.Module] | None]:
    """Name of each layer with a style -> its blocks, see `find_blocks`."""

    def style_of(name: str) -> str:
        return styles.plan.get(name, styles.plan.get(f"{name}.base_layer", ""))

    held = {name[len(stack) + 1 :].partition(".")[0] for name in styles.plan if name.startswith(f"{stack}.")}
    layers = {f"{stack}.{name}": layer for name, layer in model.get_submodule(stack).named_children() if name in held}
    return {name: find_blocks(layer, name, style_of, styles.partial) for name, layer in layers.items()}


def _splits_rows(model: nn.Module, module: ModuleSpec, styles: _Styles, tp_size: int) -> bool:
    """Returns whether the ranks of a tp group can share the rows between the blocks of all layers of a module."""
    blocks, modules = _blocks_of(model, module.stack, styles), dict(model.named_modules())
    matrices = [name for name in styles.plan if name in modules and name.startswith(f"{module.stack}.")]
    is_plain = all(has_plain_form(modules[name], styles.plan[name], tp_size) for name in matrices)
    return is_plain and len(blocks) == module.num_layers and None not in blocks.values()


def _check_same_cuts(module: ModuleSpec, by_size: Mapping[int, Sequence[tuple[int | None, int]]]) -> None:
    for parameter, *cuts in zip(module.parameters, *by_size.values(), strict=True):
        if len(set(cuts)) > 1:
            sizes = " and ".join(map(str, by_size))
            raise ValueError(
                f"Tp groups of {sizes} ranks cut `{parameter.name}` of `{module.name}` in different ways, since not "
                "all of these numbers divide it. Use tp groups of one size."
            )


def apply_module_tp(model: nn.Module, module: ModuleSpec, mesh: DeviceMesh, owned: set[str]) -> set[str]:
    """
    Shards the `owned` parameters of one module over a one-dimensional mesh, in place, and returns the replicated ones
    whose gradients are shares. All ranks of the mesh hold the same weights and call this. Sharded parameters become
    `DTensor`s; activations between layers stay plain tensors, equal on all ranks.

    The decoder, its embedding and the head follow the model's own plan (`model.tp_plan`). In towers without one,
    separate query, key and value projections and the feed-forward layers are split. Fused `qkv` projections,
    projectors, norms, and embeddings with adapters, or tied to a head with some, stay replicated. LoRA matrices follow
    the layer that they adapt; adapters without a tensor-parallel form raise `ValueError`.
    """
    if mesh.size() == 1:
        return set()
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    styles = _find_styles(model, module, mesh.size(), owned)
    for attention in styles.attentions:
        _localize_widths(attention, mesh.size())
    modules = dict(model.named_modules())
    others = {}
    inputs: dict[str, SharedInput] = defaultdict(functools.partial(SharedInput, mesh.get_group()))  # by parent
    blocks = _blocks_of(model, module.stack, styles) if module.sequence_parallel else {}
    block_of = {part: block for of_layer in blocks.values() for block in of_layer or () for part in block.modules()}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, style in styles.plan.items():
        layer = modules.get(name)
        if layer is not None and has_plain_form(layer, style, mesh.size()):
            use_plain_tensors(layer, style, mesh, inputs[base_name(name).rpartition(".")[0]], block_of.get(layer))
        else:
            others[name] = style
    apply_tensor_parallelism(model, mesh, others)
    for name, layer in modules.items():
        if (
            hasattr(layer, "parameter_name")
            and caller_name(name) == name
            and styles.partial.intersection(f"{name}.{parameter}" for parameter, _ in layer.named_parameters())
        ):
            add_own_parts(layer)
    _drop_full_storage(model, styles.plan)
    for name, owner in tied.items():
        if name != owner:
            parent, _, attribute = name.rpartition(".")
            model.get_submodule(parent)._parameters[attribute] = model.get_parameter(owner)
    _check_placements(model, module, styles, owned)
    for name, of_layer in blocks.items():
        assert of_layer is not None
        SplitRows(model.get_submodule(name), of_layer, mesh.get_group())
    # what is whole on each rank meets the rows or the heads of this one
    inside = tuple(f"{layer}." for layer in blocks)
    whole = {
        p.name
        for p in module.parameters
        if p.name in owned and p.name.startswith(inside) and styles.cut(p.name, len(p.shape))[0] is None
    }
    return styles.partial | whole


def _check_placements(model: nn.Module, module: ModuleSpec, styles: _Styles, owned: Collection[str]) -> None:
    parameters = dict(model.named_parameters())
    for entry in module.parameters:
        if entry.name not in owned:
            continue
        dim, blocks = _cut_of(parameters[entry.name])
        if (dim, blocks) != styles.cut(entry.name, len(entry.shape)):
            how = "not cut" if dim is None else f"cut along dimension {dim} in {blocks} block{'s' * (blocks > 1)}"
            raise ValueError(
                f"`{entry.name}` is {how} by the style `{styles.plan.get(entry.name)}`, which this version of "
                f"transformers defines in another way. Use `tp_size=1` for `{module.name}`."
            )


def _cut_of(parameter: torch.Tensor) -> tuple[int | None, int]:
    """Returns the dimension along which a parameter is cut, `None` for none, and the blocks that are each cut."""
    if isinstance(parameter, DTensor):
        for placement in parameter.placements:
            if isinstance(placement, (Shard, _StridedShard)):
                return placement.dim % parameter.ndim, getattr(placement, "split_factor", 1)
    return None, 1


@torch.no_grad()
def _drop_full_storage(model: nn.Module, names: Iterable[str]) -> None:
    """Copies shards that are views of the whole parameter, so that the whole one is freed."""
    parameters = dict(model.named_parameters())
    for name in names:
        parameter = parameters.get(name)
        if not isinstance(parameter, DTensor) or parameter.is_meta:
            continue
        local = parameter.to_local()
        if local.untyped_storage().nbytes() > local.numel() * local.element_size():
            parent, _, attribute = name.rpartition(".")
            copy = nn.Parameter(from_shard(local.clone(), parameter), parameter.requires_grad)
            model.get_submodule(parent)._parameters[attribute] = copy
