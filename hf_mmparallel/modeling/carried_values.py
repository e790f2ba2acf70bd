"""
Values beside the hidden state that layers read: arguments of layers that depend on weights, such as embeddings of each
layer, or keys that later layers share. They enter a stage behind its hidden states, in rows of the same width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ..plan import ModuleSpec
from ..plan.model_spec import AXES, CarriedValue
from .features import meta_forward, meta_inputs
from .unowned import Elsewhere, hidden_of, identity_layer, with_hidden

Path = tuple[Any, ...]
# Samples and tokens of each in forwards on the meta device, unlike all sizes of models; far more tokens than an index
# selects.
_SHORT, _LONG = (11, 13), (11, 4099)


def leaves_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What nested arguments of a layer contain, with the keys that lead there."""
    if isinstance(value, Mapping) and value:
        items: Any = value.items()
    elif isinstance(value, (tuple, list)) and value:
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, item in items:
        yield from leaves_of(item, (*path, key))


# Which values a model's layers read, found in forwards on the meta device.


class _Recorded:
    """The arguments and outputs of layers in a forward in which none gets a hidden state that depends on weights."""

    def __init__(self, tower: PreTrainedModel, layers: nn.ModuleList, shape: tuple[int, int], runs_layers: bool):
        self.arguments: list[dict[Path, Any]] = []
        self.hidden: list[Tensor] = []
        self.outputs: list[list[Tensor]] = []
        hooks = [layer.register_forward_pre_hook(self._before, with_kwargs=True) for layer in layers]
        hooks += [layer.register_forward_hook(self._after) for layer in layers]
        kept = dict(layers.named_children())
        if not runs_layers:
            layers._modules.update({index: identity_layer(layer) for index, layer in kept.items()})
        inputs = meta_inputs(tower) or {}
        for name in inputs.keys() & {"input_ids", "attention_mask"}:
            inputs[name] = torch.ones(shape, dtype=torch.int64, device=inputs[name].device)
        try:
            self.output = meta_forward(tower, True, **inputs)
        finally:
            layers._modules.update(kept)
            for hook in hooks:
                hook.remove()

    def _before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = hidden_of(args, kwargs)
        self.hidden.append(hidden)
        self.arguments.append({path: leaf for path, leaf in leaves_of((args, kwargs)) if leaf is not hidden})
        return with_hidden(args, kwargs, hidden.detach())

    def _after(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.outputs.append(_trained(output))

    def readers(self) -> dict[int, int]:
        """The last layer that reads a value that depends on weights, by the id of the value."""
        values = {id(v): v for own in self.arguments for leaf in own.values() for v in (leaf, _base(leaf))}
        values = {key: v for key, v in values.items() if isinstance(v, Tensor) and v.requires_grad}
        result: dict[int, int] = {}
        for index, outputs in enumerate([*self.outputs, _trained(self.output)]):
            if outputs and values:
                total = torch.stack([output.sum().float() for output in outputs]).sum()
                found = torch.autograd.grad(total, [*values.values()], retain_graph=True, allow_unused=True)
                result |= {key: index for key, gradient in zip(values, found, strict=True) if gradient is not None}
        return result


def _trained(output: Any) -> list[Tensor]:
    values = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


def _base(value: Any) -> Any:
    return value._base if isinstance(value, Tensor) and value._is_view() else value


def carried_values(tower: nn.Module, layers: nn.ModuleList) -> tuple[tuple[CarriedValue, ...], ...]:
    """The values that enter a stage that begins with each layer of a decoder; empty if there are none at all."""
    if not isinstance(tower, PreTrainedModel) or len(layers) < 2 or "input_ids" not in (meta_inputs(tower) or {}):
        return ()
    glance = _Recorded(tower, layers, _SHORT, runs_layers=False).arguments
    if not any(map(_may_be_carried, (leaf for own in glance for leaf in own.values()))):
        return ()
    run, long = _Recorded(tower, layers, _SHORT, runs_layers=True), None
    if run.output is None or len(run.arguments) != len(layers):
        return ()
    elsewhere = {(index, path) for index, own in enumerate(glance) for path in own if isinstance(own[path], Elsewhere)}
    readers, result = run.readers(), []
    for index, own in enumerate(run.arguments):
        values: list[CarriedValue | None] = []
        for path, leaf in own.items():
            is_part = _is_part(run, index, path)
            value = _base(leaf) if is_part else leaf
            if readers.get(id(value), -1) >= index:
                values.append(_described(path, value, value.shape, run.hidden[index].dtype, is_part))
            elif (index, path) in elsewhere and isinstance(leaf, Tensor) and not leaf.is_floating_point():
                long = long or _Recorded(tower, layers, _LONG, runs_layers=True)
                values.append(_described(path, leaf, long.arguments[index][path].shape, None, is_part=False))
        result.append(tuple(value for value in values if value is not None))
    return ((), *result[1:]) if any(result[1:]) else ()


def _may_be_carried(leaf: Any) -> bool:
    """Whether an argument may be one that layers fill, that comes from a layer, or that depends on weights."""
    if isinstance(leaf, Tensor):
        return leaf.requires_grad
    return isinstance(leaf, (Elsewhere, MutableMapping))


def _is_part(run: _Recorded, index: int, path: Path) -> bool:
    """Whether a layer reads a part of a tensor of which other layers read others."""
    base = _base(own := run.arguments[index][path])
    others: list[Any] = [arguments.get(path) for arguments in run.arguments]
    return base is not own and any(_base(o) is base and o.storage_offset() != own.storage_offset() for o in others)


def _described(
    path: Path, value: Tensor, far: Sequence[int], hidden: torch.dtype | None, is_part: bool
) -> CarriedValue | None:
    """A value of which each token has its share, by its shapes in two forwards; `None` for any other one."""
    named: dict[int, Any] = dict(zip((*_SHORT, math.prod(_SHORT)), AXES, strict=True))
    axes = [named.get(size, size) for size in value.shape]
    if hidden is None:  # of an index, up to as many as there are tokens
        axes = [
            axis if axis in ("batch", "tokens") or size == _LONG[1] else -size
            for axis, size in zip(axes, far, strict=True)
        ]
    if axes[:1] == [1] and "length" in axes:  # the same for all samples, unless they have positions of their own
        axes[0] = "batch"
    if sorted(axis for axis in axes if isinstance(axis, str)) not in (["batch", "length"], ["tokens"]):
        return None
    dtype = None if value.dtype == hidden else str(value.dtype).removeprefix("torch.")
    return CarriedValue(path, tuple(axes), dtype, is_part)


# Their way from one stage to the next.


def pack(module: ModuleSpec, layer: int, arguments: Any, tokens: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """What a stage that begins with a layer reads among its arguments, as tensors `[batch, length, *token_shape]`."""
    values, rows = module.carried_before(layer), []
    if not values:
        return []
    found = dict(leaves_of(arguments))
    for value in values:
        leaf = found.get(value.path)
        tensor: Any = _base(leaf) if value.is_part else leaf
        wanted, shape = value.shape(*tokens), tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
        if shape[:1] == (1,) and value.axes[0] == "batch":
            shape, tensor = (tokens[0], *shape[1:]), tensor.expand(tokens[0], *shape[1:])
        if shape != wanted:
            raise ValueError(
                f"The layers of `{module.name}` read a value of shape {wanted} of earlier layers, of "
                f"which this rank has {shape}. Use `tp_size=1` or `pp_size=1` for it."
            )
        row = tensor.permute(_order(value)).reshape(math.prod(tokens), -1)
        if not row.is_floating_point():
            row = torch.cat([row >> shift & 255 for shift in (0, 8, 16, 24)], -1)
        row = nn.functional.pad(row, (0, value.width - row.shape[-1]))
        if row.is_floating_point() and torch.promote_types(row.dtype, dtype) != dtype:
            raise ValueError(
                f"The layers of `{module.name}` read a value of {row.dtype} of earlier layers, which does not fit in "
                f"the {dtype} of its weights. Use `pp_size=1` for it."
            )
        rows.append(row.to(dtype))
    width = math.prod(module.token_shape)
    whole = torch.cat(rows, -1)
    whole = nn.functional.pad(whole, (0, -whole.shape[-1] % width))
    return [part.view(*tokens, *module.token_shape) for part in whole.split(width, -1)]


def unpack(values: Sequence[CarriedValue], rows: Sequence[Tensor]) -> dict[CarriedValue, Tensor]:
    """Reads what [`pack`] has written."""
    if not values:
        return {}
    batch, length = rows[0].shape[:2]
    whole = torch.cat([row.reshape(batch * length, -1) for row in rows], -1)
    widths = [value.width for value in values]
    result = {}
    for value, row in zip(values, whole[:, : sum(widths)].split(widths, -1), strict=True):
        shape, order = value.shape(batch, length), _order(value)
        count = math.prod(shape) // (batch * length)
        if value.is_index:
            digits = row[:, : 4 * count].to(torch.int64).view(batch * length, 4, count)
            shifts = torch.tensor([0, 8, 16, 24], device=row.device)[:, None]
            row = (digits << shifts).sum(1).to(getattr(torch, value.dtype or ""))
        ordered = row[:, :count].reshape([shape[axis] for axis in order])
        result[value] = ordered.permute([order.index(axis) for axis in range(len(order))])
    return result


def _order(value: CarriedValue) -> list[int]:
    """The axes of a value, those of tokens first."""
    return sorted(range(len(value.axes)), key=lambda axis: AXES.index(own) if (own := value.axes[axis]) in AXES else 3)


def place(values: Mapping[CarriedValue, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a layer with received values, which later layers find, too, where the model has them."""
    arguments: Any = (args, kwargs)
    dtype = hidden_of(args, kwargs).dtype
    for value, tensor in values.items():
        arguments = _put(arguments, value.path, tensor, value, dtype)
    return arguments


def _put(owner: Any, path: Path, tensor: Tensor, value: CarriedValue, dtype: torch.dtype) -> Any:
    if not path:
        return _overwrite(owner, tensor, value, dtype)
    key, *rest = path
    if isinstance(owner, MutableMapping):
        owner[key] = _put(owner.get(key), tuple(rest), tensor, value, dtype)
        return owner
    items = [*(owner or ())]
    items += [None] * (key + 1 - len(items))
    items[key] = _put(items[key], tuple(rest), tensor, value, dtype)
    return items if isinstance(owner, list) else tuple(items)


def _overwrite(own: Any, tensor: Tensor, value: CarriedValue, dtype: torch.dtype) -> Tensor:
    """Gives a tensor that the model has computed without the weights that it needs the values of a received one."""
    if not isinstance(own, Tensor):
        return tensor if value.is_index else tensor.to(getattr(torch, value.dtype) if value.dtype else dtype)
    target, tensor = _base(own) if value.is_part else own, tensor.to(own.dtype)
    if value.axes[0] == "batch" and own.shape[:1] == (1,):
        tensor = tensor[:1]
    if target.shape != tensor.shape or target._is_view() or not target.is_contiguous():
        return tensor
    target.detach_().copy_(tensor)
    return target if own is target else target.as_strided(own.size(), own.stride(), own.storage_offset())
