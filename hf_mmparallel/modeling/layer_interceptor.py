"""Hooks on the layers of a stack that let a forward of the model start and stop at any layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .unowned import hidden_of, with_hidden


class StageExit(Exception):
    """Raised to leave a forward at the entry of a layer, with the hidden state at that point."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden


@dataclass
class StageRun:
    """The range of layers of one forward."""

    first: int  # the received hidden state replaces its input
    stop: int  # the layer at whose entry the forward stops
    hidden: Tensor | None = None  # the received hidden state, `None` in a first stage
    probe: bool = False  # stops at the entry of the first layer
    entered: bool = False
    dtype: torch.dtype | None = None  # of the hidden state that the model itself passes to the first layer


class LayerInterceptor:
    """Hooks on every layer of a stack, by which a forward uses a range of layers only."""

    def __init__(self, layers: nn.ModuleList):
        self.run: StageRun | None = None
        self.checked = False
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._before(index), with_kwargs=True)
            layer.register_forward_hook(self._after(index))

    @classmethod
    def of(cls, layers: nn.ModuleList) -> LayerInterceptor:
        """Returns the interceptor of a stack, which is created on first use."""
        if "interceptor" not in layers.__dict__:
            layers.__dict__["interceptor"] = cls(layers)
        return layers.__dict__["interceptor"]

    def _before(self, index: int):
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
            run = self.run
            if run is None:
                return None
            if index == run.stop:
                raise StageExit(hidden_of(args, kwargs))
            if index == run.first:
                run.dtype = hidden_of(args, kwargs).dtype
            if index != run.first or index == 0:
                return None
            arrived = hidden_of(args, kwargs)
            if run.probe:
                raise StageExit(arrived)
            assert run.hidden is not None
            # the input of the layer, since the stage before has also computed what is between the layers (DeepStack
            # adds features)
            args, kwargs = with_hidden(args, kwargs, run.hidden.to(arrived.dtype))
            if not self.checked:
                _check_arguments(layer, args[1:], kwargs, run.hidden)
                self.checked = True
            run.entered = True
            return args, kwargs

        return hook

    def _after(self, index: int):
        """
        Gives the received hidden state also as the output of layer `first - 1`, for encoders that select outputs of
        layers (`vision_feature_layer=-2`): transformers records them behind each layer, and would find that of an
        identity layer.
        """

        def hook(layer: nn.Module, args: tuple[Any, ...], output: Any):
            run = self.run
            if run is None or run.hidden is None or index != run.first - 1:
                return None
            if isinstance(output, tuple):
                return (run.hidden.to(output[0].dtype), *output[1:])
            return run.hidden.to(output.dtype)

        return hook

    @contextmanager
    def running(self, run: StageRun) -> Iterator[None]:
        """Forwards in this context use the layers of `run`."""
        outer, self.run = self.run, run
        try:
            yield
        finally:
            self.run = outer


def _check_arguments(layer: nn.Module, args: Any, kwargs: Any, hidden: Tensor) -> None:
    """Raises `ValueError` if a layer's argument depends on parameters of other stages, whose values are NaN here."""
    pending = [args, *((value,) for value in kwargs.values() if value is not hidden)]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, (tuple, list)):
            pending += value
        elif isinstance(value, Tensor) and value.is_floating_point() and value is not hidden and value.isnan().any():
            raise ValueError(
                f"The layers of `{type(layer).__name__}` have an argument of shape {tuple(value.shape)} that depends "
                f"on weights of an earlier stage, so the module can't be split. Use `pp_size=1` for it."
            )
