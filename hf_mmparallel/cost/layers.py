"""Costs of layers, in one form for analytic and measured sources."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from ..plan import ModelSpec
from .devices import Hardware
from .engine_traits import OURS, Engine

BYTES_PER_VALUE = 2


@dataclass(frozen=True)
class Polynomial:
    """
    `square * s + token * x + constant` for a chunk of `x` tokens with a sum of squared sequence lengths of `s`: the
    form of Entrain, section 4.4.1, which is `a x^2 + b x + c` for a single sequence.

    Args:
        square (`float`, *optional*, defaults to 0.0): Coefficient of the sum of squared sequence lengths.
        token (`float`, *optional*, defaults to 0.0): Coefficient of the number of tokens.
        constant (`float`, *optional*, defaults to 0.0): Constant per chunk.
    """

    square: float = 0.0
    token: float = 0.0
    constant: float = 0.0

    def __call__(self, tokens: float, squares: float) -> float:
        return self.square * squares + self.token * tokens + self.constant

    def __add__(self, other: Polynomial) -> Polynomial:
        return Polynomial(self.square + other.square, self.token + other.token, self.constant + other.constant)

    def __mul__(self, factor: float) -> Polynomial:
        return Polynomial(self.square * factor, self.token * factor, self.constant * factor)

    def over(self, cp_size: int) -> Polynomial:
        """The polynomial on each of `cp_size` cp ranks that share the tokens of a chunk."""
        return Polynomial(self.square / cp_size, self.token / cp_size, self.constant)

    @classmethod
    def sum(cls, parts: Iterable[Polynomial]) -> Polynomial:
        """The sum, exact and independent of the order of the terms."""
        polynomials = list(parts)
        return cls(*(math.fsum(getattr(p, name) for p in polynomials) for name in ("square", "token", "constant")))


@dataclass(frozen=True)
class LayerCost:
    """
    Cost of a layer on one rank of a tp group, for any choice of trained weights.

    Args:
        forward (`Polynomial`): Milliseconds of the forward.
        data_gradient (`Polynomial`): Milliseconds of the gradient of its input, `B_d` of Cornstarch, section 4.3.
        weight_gradient (`Polynomial`): Milliseconds of the gradients of all of its weights, `B_w`.
        activations (`Polynomial`): Bytes saved for the backward with trained weights, without those of a loss.
        frozen_activations (`Polynomial`): Bytes saved if only the gradient of the input is needed.
        launch_ms (`tuple[float, float]`, *optional*):
            Host times to launch the kernels of the forward and of the backward, whose more numerous kernels are
            launched by autograd. Longer device times hide them. 0 if measured times include them.
        sums (`tuple[Polynomial, Polynomial]`, *optional*):
            Milliseconds of tensor-parallel all-reduces, besides the forward and besides the gradient of its input.
    """

    forward: Polynomial
    data_gradient: Polynomial
    weight_gradient: Polynomial
    activations: Polynomial
    frozen_activations: Polynomial
    launch_ms: tuple[float, float] = (0.0, 0.0)
    sums: tuple[Polynomial, Polynomial] = (Polynomial(), Polynomial())

    @property
    def with_sums(self) -> LayerCost:
        """The same cost with all-reduces included in the forward and in the gradient of the input."""
        in_forward, in_backward = self.sums
        forward, data_gradient = self.forward + in_forward, self.data_gradient + in_backward
        return replace(self, forward=forward, data_gradient=data_gradient, sums=(Polynomial(), Polynomial()))


class LayerCosts(Protocol):
    """A source of layer costs: operation counts ([`AnalyticLayers`]) or a measured profile ([`MeasuredLayers`])."""

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """
        Args:
            module (`str`): A module.
            index (`int`): Index of the layer; `-1` for the part before the layers, such as embeddings, `num_layers`
                for the part after them, such as a projector or a head.
            tp_size (`int`): Size of the tp group.
        """
        ...

    def starting_at(self, first_rank: int) -> LayerCosts:
        """
        Costs for tp groups that start at this rank of a node, and may extend into the next node.

        Args:
            first_rank (`int`): Position in the node, from 0.
        """
        ...


@dataclass(frozen=True)
class LayersWithoutSums:
    """
    Layer costs with tensor-parallel all-reduces that take no time; see [`LayerCosts`].

    Args:
        layers (`LayerCosts`): The costs.
    """

    layers: LayerCosts

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """See [`LayerCosts`]."""
        return replace(self.layers.layer(module, index, tp_size), sums=(Polynomial(), Polynomial()))

    def starting_at(self, first_rank: int) -> LayersWithoutSums:
        """See [`LayerCosts`]."""
        return LayersWithoutSums(self.layers.starting_at(first_rank))


PACKED_ATTENTION = "bitfield"
"""The attention function that separates the samples of a packed row."""


def can_pack(spec: ModelSpec) -> bool:
    """Whether the language model has the attention function that packed rows need."""
    return spec.language_model.attention == PACKED_ATTENTION


@dataclass(frozen=True, eq=False)
class CostModel:
    """
    Costs of a model's layers on a device: the source of all predicted times and memory of plans.

    Args:
        spec (`ModelSpec`): The model, with its frozen parameters marked.
        device (`Hardware`): The device of each rank.
        layers (`LayerCosts`): The source of layer costs.
        value_bytes (`int`, *optional*, defaults to 2): Bytes of an activation value.
        engine (`Engine`, *optional*): How layers are executed.
        packing (`bool`, *optional*):
            Whether the samples of a language model microbatch are packed into one row without padding; by default if
            its attention function separates them.
    """

    spec: ModelSpec
    device: Hardware
    layers: LayerCosts
    value_bytes: int = BYTES_PER_VALUE
    engine: Engine = OURS
    packing: bool | None = None

    @property
    def packs_rows(self) -> bool:
        """Whether rows of the language model are packed. With context parallelism they are packed in any case."""
        return can_pack(self.spec) if self.packing is None else self.packing

    def with_spec(self, spec: ModelSpec) -> CostModel:
        """The same layer costs for the model with other frozen parameters."""
        return replace(self, spec=spec)
