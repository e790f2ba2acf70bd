"""Tensor parallelism inside a module: the model's own plan where it has one, else one read off its layers."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..plan import ModuleSpec

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


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _sum_partial_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Makes each backward through `module` sum the gradient of its own parameters over the mesh."""
    # The style of transformers reduces the accumulated `.grad` after every backward: wrong from the second
    # microbatch on.
    forward, group = module.forward, mesh.get_group()

    def summing_forward(*args, **kwargs):
        own = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
        if not own or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        module._parameters.update({name: _SumGradient.apply(p, group) for name, p in own.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    module.forward = summing_forward


def base_name(name: str) -> str:
    """The name that a module or parameter has before adapters wrap it."""
    return _ADAPTER_PARTS.sub("", name)


def _with_wildcards(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _linear(module: nn.Module) -> nn.Linear | None:
    """The linear layer itself, without an adapter around it, `None` when it is something else."""
    inner = getattr(module, "base_layer", module)
    return inner if isinstance(inner, nn.Linear) else None


def _linears(parent: nn.Module, names: Iterable[str]) -> list[nn.Linear] | None:
    """The linear layers of `parent` with these names, `None` unless all are there."""
    children = dict(parent.named_children())
    found = [_linear(children[name]) if name in children else None for name in names]
    return None if None in found else found  # type: ignore[return-value]


def _feed_forward_plan(parent: nn.Module, tp_size: int) -> dict[str, str]:
    """Styles of the feed-forward layers that are direct children of `parent`."""
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
    """Styles of an attention layer with separate projections; empty when its heads can't be told apart."""
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


def _localize_widths(attention: nn.Module, tp_size: int) -> None:
    """Turns the attributes that an attention forward reshapes with into those of one rank."""
    for name in _ATTENTION_WIDTHS:
        width = getattr(attention, name, None)
        if isinstance(width, int) and width % tp_size == 0:
            setattr(attention, name, width // tp_size)


def _generic_plan(stack: nn.Module, prefix: str, held: set[str], tp_size: int) -> dict[str, str]:
    """Module name -> style for the layers of a stack that has no plan of its own."""
    plan: dict[str, str] = {}
    for name, module in stack.named_modules(prefix=prefix):
        if not any(f"{name}.{child}" in held for child, _ in module.named_children()):
            continue
        attention = _attention_plan(module, tp_size)
        if attention:
            _localize_widths(module, tp_size)
        for child, style in {**attention, **_feed_forward_plan(module, tp_size)}.items():
            plan[base_name(f"{name}.{child}")] = style
    return plan


def _adapter_styles(layer: nn.Module, name: str, style: str) -> dict[str, str]:
    """Styles of the LoRA matrices around a linear layer that has `style`."""
    if getattr(layer, "lora_magnitude_vector", None):
        raise ValueError(
            f"`{name}` has a DoRA adapter, whose norm needs the whole matrix. Use `use_dora=False` or `tp_size=1`."
        )
    if not hasattr(layer, "lora_A"):
        raise ValueError(
            f"`{name}` is wrapped by `{type(layer).__name__}`, for which no tensor-parallel form is known. "
            f"Use LoRA or `tp_size=1`."
        )
    split = "lora_A" if style.startswith("rowwise") else "lora_B"
    return {f"{name}.{split}.{adapter}": style for adapter in getattr(layer, split)}


def apply_module_tp(model: nn.Module, module: ModuleSpec, mesh: DeviceMesh, owned: set[str]) -> None:
    """
    Shards the parameters of one module over a mesh, in place. They become `DTensor`s; activations between layers stay
    plain tensors, equal on all ranks of the mesh.

    The decoder and the head follow the model's own plan (`model.tp_plan`). Towers without one follow the names of
    their linear layers: separate query, key and value projections and the feed-forward layers are split. Fused
    `qkv` projections, projectors, norms and embeddings (also tied ones) stay replicated, with gradients that are equal
    on all ranks. LoRA matrices follow the layer that they adapt.

    Args:
        model (`nn.Module`): The whole model, pruned or not. All ranks of the mesh hold the same weights.
        module (`ModuleSpec`): The module.
        mesh (`DeviceMesh`):
            One dimension. Every rank of the world creates all meshes, in the same order; only the ranks of a mesh call
            this function with it.
        owned (`set[str]`): Names of the parameters that this rank really holds. Others are not touched.

    Raises:
        `ValueError`: For adapters that have no tensor-parallel form.
    """
    if mesh.size() == 1:
        return
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    names = {parameter.name for parameter in module.parameters} & set(owned)
    held = {name.rpartition(".")[0] for name in names}
    held |= {base_name(name) for name in held}
    own_plan = {
        name: style
        for name, style in (getattr(model, "tp_plan", None) or {}).items()
        if not style.startswith("embedding")
    }
    in_stack = {_with_wildcards(name) for name in held if name.startswith(module.stack + ".")}
    if not any(name.startswith(_with_wildcards(module.stack) + ".") for name in own_plan) and in_stack:
        stack = model.get_submodule(module.stack)
        own_plan.update(_generic_plan(stack, module.stack, held, mesh.size()))
    plan: dict[str, str] = {}
    partial: list[nn.Module] = []
    for name, layer in model.named_modules():
        key = base_name(name)
        style = own_plan.get(key, own_plan.get(_with_wildcards(key)))
        own = [f"{name}.{parameter}" for parameter, _ in layer.named_parameters(recurse=False)]
        if style is not None and style != PARTIAL_GRADIENT and hasattr(layer, "base_layer"):
            for adapter, adapter_style in _adapter_styles(layer, name, style).items():
                if adapter + ".weight" in names:
                    plan |= {f"{adapter}.weight": adapter_style, adapter: adapter_style}
            continue
        parameters = {
            parameter: own_plan.get(base_name(parameter), own_plan.get(_with_wildcards(base_name(parameter)), style))
            for parameter in own
            if parameter in names
        }
        if style == PARTIAL_GRADIENT and parameters:
            partial.append(layer)
            continue
        plan |= {parameter: found for parameter, found in parameters.items() if found is not None}
        inside = not own and any(parameter.startswith(name + ".") for parameter in names)
        if style is not None and (parameters or inside):
            plan[name] = style
    apply_tensor_parallelism(model, mesh, plan)
    for layer in partial:
        _sum_partial_gradients(layer, mesh)
    _drop_full_storage(model, plan)


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
            copy = DTensor.from_local(
                local.clone(),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._parameters[attribute] = nn.Parameter(copy, parameter.requires_grad)
