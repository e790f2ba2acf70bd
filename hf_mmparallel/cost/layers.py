"""What a layer costs, whoever says so: one form for operation counts and for measurements."""

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
    `square * s + token * x + constant`, for a chunk of `x` tokens whose sequences have squared lengths of `s` in sum:
    the form of Entrain, section 4.4.1, which for one sequence is `a x^2 + b x + c`.

    Args:
        square (`float`, *optional*, defaults to 0.0): For each squared token.
        token (`float`, *optional*, defaults to 0.0): For each token.
        constant (`float`, *optional*, defaults to 0.0): For each chunk.
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

    def over(self, num_rows: int) -> Polynomial:
        """On each of `num_rows` rows of ranks that share the tokens of a chunk."""
        return Polynomial(self.square / num_rows, self.token / num_rows, self.constant)

    @classmethod
    def sum(cls, parts: Iterable[Polynomial]) -> Polynomial:
        """The sum, exact to the last bit whatever the order of the parts."""
        found = list(parts)
        return cls(*(math.fsum(getattr(part, name) for part in found) for name in ("square", "token", "constant")))


@dataclass(frozen=True)
class LayerCost:
    """
    One layer on one tensor-parallel rank, whatever of it is trained.

    Args:
        forward (`Polynomial`): Milliseconds.
        data_gradient (`Polynomial`): Milliseconds of the gradient of its input, `B_d` of Cornstarch, section 4.3.
        weight_gradient (`Polynomial`): Milliseconds of the gradients of all of its weights, `B_w`.
        activations (`Polynomial`): Bytes kept for the backward where the weights are trained, without those of a loss.
        frozen_activations (`Polynomial`): Bytes kept where only a gradient of the input is wanted.
        launch_ms (`tuple[float, float]`, *optional*):
            Times in which the host launches the kernels of the forward, and those of the backward, which are more but
            come from autograd. A device that computes longer hides them. 0 where measured times have them in them.
        sums (`tuple[Polynomial, Polynomial]`, *optional*):
            Milliseconds of sums over tensor-parallel ranks, beside the forward and beside the gradient of its input.
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
        """The same with the sums counted in the forward and in the gradient of the input."""
        there, back = self.sums
        sums = (Polynomial(), Polynomial())
        return replace(self, forward=self.forward + there, data_gradient=self.data_gradient + back, sums=sums)


class LayerCosts(Protocol):
    """A source of costs: operation counts ([`AnalyticLayers`]) or a measured profile ([`MeasuredLayers`])."""

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """
        Args:
            module (`str`): A module.
            index (`int`): `-1` for what comes before its layers, such as embeddings, `num_layers` for what comes
                after them, such as a projector or a head.
            tp_size (`int`): Ranks that share the layer's matrices.
        """
        ...

    def starting_at(self, first_rank: int) -> LayerCosts:
        """
        The costs for ranks that share matrices and start there in a node, from which they may cross to the next one.

        Args:
            first_rank (`int`): Of a node's ranks, counted from 0.
        """
        ...


@dataclass(frozen=True)
class LayersWithoutSums:
    """
    Costs of layers as if sums over tensor-parallel ranks took no time; see [`LayerCosts`].

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
"""The attention function that keeps the samples of a packed row apart."""


def can_pack(spec: ModelSpec) -> bool:
    """Whether the language model has the attention function that packed rows need."""
    return spec.language_model.attention == PACKED_ATTENTION


@dataclass(frozen=True, eq=False)
class CostModel:
    """
    What the layers of a model cost on a machine: all that times and memory of plans are derived from.

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        device (`Hardware`): What each rank is.
        layers (`LayerCosts`): The source of its layers' costs.
        value_bytes (`int`, *optional*, defaults to 2): Of a value of an activation.
        engine (`Engine`, *optional*): What runs the layers.
        packing (`bool`, *optional*):
            Whether the samples of a microbatch of the language model are one row without padding; by default where
            its attention function keeps them apart.
    """

    spec: ModelSpec
    device: Hardware
    layers: LayerCosts
    value_bytes: int = BYTES_PER_VALUE
    engine: Engine = OURS
    packing: bool | None = None

    @property
    def packs_rows(self) -> bool:
        """Whether rows of the language model are packed. With context parallelism they are, whatever this says."""
        return can_pack(self.spec) if self.packing is None else self.packing

    def with_spec(self, spec: ModelSpec) -> CostModel:
        """The same costs of layers for the model with something else frozen."""
        return replace(self, spec=spec)
