"""
`torch.compile` of the layers of a stage, each structure of a layer once ("regional compilation").

What is compiled is a layer's forward, with its recomputation, as one graph. Hooks on the layer stay outside: those
that cut a stage out of the model's forward leave it by an exception, and those of ZeRO wait for other ranks.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo import exc
from torch.distributed.tensor import DTensor

from ..kernels.bitfield_attention.hf import note_layer_kinds
from .parallel_linear import shards_as_inputs

logger = logging.getLogger(__name__)

# A structure has a graph with gradients and one without, for inputs that are trained and that are not, for rows of one
# sample and of several, for each kind of attention and with recomputation and without.
_MAX_GRAPHS = 16

# What the compiler raises, before anything is computed, for code that is not one graph or needs too many of them.
_NO_ONE_GRAPH = (exc.Unsupported, exc.UserError, exc.UncapturedHigherOrderOpError, exc.FailOnRecompileLimitHit)


@dataclass(frozen=True)
class Compilation:
    backend: str = "inductor"
    mode: str | None = None


@dataclass(frozen=True)
class _Parts:
    modules: list[nn.Module]
    parallel: list[nn.Module]  # linear layers that a tp group shares
    distributed: str | None  # the class of one that computes on `DTensor`s, whose meshes no graph can save

    @classmethod
    def of(cls, layer: nn.Module) -> _Parts:
        modules = list(layer.modules())
        parallel = [module for module in modules if hasattr(module, "graph_inputs")]
        others = [module for module in modules if module not in parallel]
        distributed = (
            type(module).__name__
            for module in others
            if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))
        )
        return cls(modules, parallel, next(distributed, None))


class _CompiledForward:
    """The forward of all layers of one structure, which is compiled when the first of them runs."""

    def __init__(self, compilation: Compilation):
        self._compiled = torch.compile(  # type: ignore[call-overload]
            _forward,
            backend=compilation.backend,
            mode=compilation.mode,
            fullgraph=True,
            dynamic=True,  # the lengths of rows differ from step to step
            recompile_limit=_MAX_GRAPHS,
            isolate_recompiles=True,
        )
        self._is_refused = False
        self._parts: dict[nn.Module, _Parts] = {}  # by layer

    def __call__(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        parts = self._parts.get(layer)
        if parts is None:
            parts = self._parts[layer] = _Parts.of(layer)
            if parts.distributed is not None:
                self._refuse(layer, f"`{parts.distributed}` computes on `DTensor`s.")
        if not self._is_refused:
            _drop_recorders(parts.modules)
            try:
                with shards_as_inputs(parts.parallel):
                    return self._compiled(layer, args, kwargs)
            except _NO_ONE_GRAPH as error:
                self._refuse(layer, str(error).splitlines()[0])
        return _forward(layer, args, kwargs)

    def _refuse(self, layer: nn.Module, reason: str) -> None:
        """Runs layers of this structure without compilation from now on."""
        self._is_refused = True
        name = type(layer).__name__
        logger.warning(f"Layers of `{name}` run without compilation: {reason}")


def compile_layers(layers: Iterable[nn.Module], compilation: Compilation) -> None:
    """Compiles the forward of each layer, in place; layers of one structure share their graphs."""
    forwards: dict[Any, _CompiledForward] = {}
    for layer in layers:
        note_layer_kinds(layer)
        structure = tuple((name, type(module)) for name, module in layer.named_modules())
        forward = forwards.setdefault(structure, _CompiledForward(compilation))
        layer.__dict__.update(is_compiled=True, forward=functools.partial(forward, layer))


def is_compiled(layer: nn.Module) -> bool:
    return getattr(layer, "is_compiled", False)


def _forward(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the forward of a layer's class; the layer is an argument, so that graphs fit other layers too."""
    return type(layer).forward(layer, *args, **kwargs)


def _drop_recorders(modules: Iterable[nn.Module]) -> None:
    """
    Removes the hooks that record attention weights, which no plan asks for. transformers adds them to a model when it
    first records hidden states, and they read a `ContextVar`, which can't be in a graph.
    """
    for module in modules:
        for key, hook in list(module._forward_hooks.items()):
            is_recorder = getattr(hook, "__qualname__", "").startswith("install_output_capuring_hook.")
            if is_recorder and inspect.getclosurevars(hook).nonlocals["key"] == "attentions":
                del module._forward_hooks[key]
