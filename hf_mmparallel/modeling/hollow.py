"""What a rank does not own, without memory: placeholders for layers, hollow parameters for the rest."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .spec import layers_of


def is_hollow(parameter: Tensor) -> bool:
    """Whether a parameter stands for one that another rank holds; it has a shape but no values."""
    return getattr(parameter, "is_hollow", False)


def hollow_parameter(parameter: nn.Parameter, device: torch.device | str | None) -> nn.Parameter:
    """
    A parameter of the same shape and dtype whose elements share one place in memory.

    The value is NaN, so that a model that reads it where it matters gives NaN instead of a wrong number.
    """
    if device is None:
        device = "cpu" if parameter.is_meta else parameter.device
    value = torch.nan if parameter.is_floating_point() else 0
    data = torch.full((), value, dtype=parameter.dtype, device=device).expand(parameter.shape)
    result = nn.Parameter(data, requires_grad=False)
    result.is_hollow = True  # type: ignore[attr-defined]
    return result


def hollow_parameters(
    model: nn.Module, held: Callable[[str], bool], device: torch.device | str | None
) -> dict[str, nn.Parameter]:
    """Replaces the parameters that are not `held` (asked by their first name); ties stay. Returns the hollow ones."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    replaced: dict[str, nn.Parameter] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in names:
                continue
            name = names[id(parameter)]
            if held(name):
                continue
            if name not in replaced:
                replaced[name] = hollow_parameter(parameter, device)
            module._parameters[attribute] = replaced[name]
    return replaced


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden state among the arguments of a layer: the first one."""
    return args[0] if args else kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))


def with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor) -> tuple[tuple[Any, ...], dict]:
    """The same arguments with another hidden state."""
    if args:
        return (hidden, *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: hidden}


@cache
def _returns_tuple(cls: type[nn.Module]) -> bool:
    """Whether a layer's forward ends with a tuple (read off its code: return annotations are often wrong)."""
    try:
        source = inspect.getsource(inspect.unwrap(cls.forward))
    except OSError:
        return False
    tree = ast.parse(textwrap.dedent(source))
    tuples = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return any(isinstance(v, ast.Tuple) or (isinstance(v, ast.Name) and v.id in tuples) for v in returned)


def _pass_through(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    hidden = hidden_of(args, kwargs)
    return (hidden,) if self.returns_tuple else hidden


def placeholder(layer: nn.Module) -> nn.Module:
    """
    A layer without parameters that returns its hidden state.

    Its class derives from the layer's, and it keeps the layer's plain attributes, so that the code around the list of
    layers (masks chosen by layer type, recording of hidden states by class) works on.
    """
    cls = type(layer)
    stand_in = type(f"Placeholder{cls.__name__}", (cls,), {"forward": _pass_through})
    result = stand_in.__new__(stand_in)
    nn.Module.__init__(result)
    plain = set(result.__dict__)
    result.__dict__.update({name: value for name, value in layer.__dict__.items() if name not in plain})
    result.__dict__.update(returns_tuple=_returns_tuple(cls), is_placeholder=True, gradient_checkpointing=False)
    result.train(layer.training)
    return result


def replace_layers(model: nn.Module, stack: str, keep: Iterable[int]) -> None:
    """Puts placeholders for the layers of a stack that are not kept."""
    layers = layers_of(model, stack)
    keep = set(keep)
    for index in range(len(layers)):
        if index not in keep:
            layers[index] = placeholder(layers[index])


def cast_values(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point parameters and buffers in place, without giving hollow ones memory."""

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if is_hollow(tensor):
            return torch.full((), torch.nan, dtype=dtype, device=tensor.device).expand(tensor.shape)
        return tensor.to(dtype)

    model._apply(cast)
