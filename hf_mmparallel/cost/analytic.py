"""Costs of layers from operation counts and a table of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, ParameterUse
from .devices import Hardware
from .kept import (
    DTYPE_BYTES,
    FULL,
    LayerShape,
    Precision,
    chain_widths,
    held_shares,
    is_split,
    layer_kept,
    with_trainable,
)
from .layers import BYTES_PER_VALUE, CostModel, LayerCost, Polynomial

ATTENTION_BACKWARD = 2.5
"""Products of the backward of attention over those of its forward: five, with the scores computed again, over two."""


def active_elements(spec: ModelSpec, module: str, index: int) -> list[tuple[ParameterUse, float]]:
    """
    The parameters that are read in a layer, each with the elements of it that a token of the layers is multiplied
    with. Behind the layers a merger makes one token of several, of which each counts with its share.
    """
    part, uses = spec.modules[module], spec.uses.get((module, index), ())
    if index < part.num_layers:
        return [(use, use.num_active) for use in uses]
    shape = LayerShape.of(part, uses)
    widths = chain_widths(shape)
    shares = {f"{matrix.name}.": share for matrix, (share, _) in zip(shape.matrices, widths, strict=True)}
    names = [f"{use.parameter.name}." for use in uses]  # an adapter's begins with that of its matrix
    found = (next((share for own, share in shares.items() if name.startswith(own)), 1.0) for name in names)
    return [(use, share * use.num_active) for use, share in zip(uses, found, strict=True)]


def layer_flops(spec: ModelSpec, module: str, index: int) -> tuple[float, float]:
    """
    Operations of a layer's forward: for each token, and for each squared token of a sequence.

    A token takes two for each element of a matrix that it is multiplied with; attention over `n` tokens takes
    `4 n^2` for each channel, half of it where it is causal.
    """
    part = spec.modules[module]
    matrices = sum(elements for _, elements in active_elements(spec, module, index))
    attention = 4.0 * part.attention_width if 0 <= index < part.num_layers else 0.0
    return 2.0 * matrices, attention / 2 if module == LANGUAGE_MODEL else attention


def module_flops(spec: ModelSpec, module: str) -> tuple[float, float]:
    """Operations of a module's forward, see [`layer_flops`]."""
    parts = [layer_flops(spec, module, index) for index in range(-1, spec.modules[module].num_layers + 1)]
    return sum(tokens for tokens, _ in parts), sum(squares for _, squares in parts)


@dataclass(frozen=True)
class AnalyticLayers:
    """
    Costs of layers as operations over what a device reaches, with the reading of the weights, and the sums over
    tensor-parallel ranks.

    Args:
        spec (`ModelSpec`): The model; what of it is frozen does not matter here.
        device (`Hardware`): What each rank is.
        value_bytes (`int`, *optional*, defaults to 2): Of a value of an activation.
    """

    spec: ModelSpec
    device: Hardware
    value_bytes: int = BYTES_PER_VALUE

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """See [`LayerCosts`]."""
        part, uses = self.spec.modules[module], self.spec.uses.get((module, index), ())
        inside = 0 <= index < part.num_layers
        shares = held_shares(self.spec, module, index, tp_size)
        found = active_elements(self.spec, module, index)
        per_token = sum(2.0 * shares[use.parameter.name] * elements for use, elements in found)
        split = tp_size if is_split(LayerShape.of(part, uses).attention) else 1
        per_square = layer_flops(self.spec, module, index)[1] / split
        per_token, per_square = (flops / self.device.flops_per_ms for flops in (per_token, per_square))
        read_ms, written_ms = (moved / self.device.memory_bytes_per_ms for moved in _moved_bytes(uses, shares))
        forward_sums_ms, backward_sums_ms = self._sums_ms(part, uses, tp_size) if inside else (0.0, 0.0)
        precision = Precision.of(part, self.value_bytes)
        kept, frozen = (
            layer_kept(part, with_trainable(uses, trained), index, precision, tp_size) for trained in (True, False)
        )
        return LayerCost(
            forward=Polynomial(per_square, per_token + forward_sums_ms, read_ms),
            data_gradient=Polynomial(ATTENTION_BACKWARD * per_square, per_token + backward_sums_ms, read_ms),
            weight_gradient=Polynomial(0.0, per_token, written_ms),
            activations=kept,
            frozen_activations=frozen,
        )

    def _sums_ms(self, part: ModuleSpec, uses: Sequence[ParameterUse], tp_size: int) -> tuple[float, float]:
        """
        Time for a token of the sums over tensor-parallel ranks, each a ring's, in the forward and in the backward:
        outputs of the last matrix of each part of a layer, and gradients of the input of each of the others, which
        transformers sums one by one.
        """
        travels = 2.0 * (tp_size - 1) / tp_size * part.hidden_size * self.value_bytes
        sum_ms = travels / self.device.link_bytes_per_ms(range(tp_size))
        shape = LayerShape.of(part, uses)
        split = [group for group in shape.feed_forwards if len(group) > 1]
        split += [shape.attention] if is_split(shape.attention) else []
        return len(split) * sum_ms, sum(len(group) - 1 for group in split) * sum_ms


def _moved_bytes(uses: Sequence[ParameterUse], shares: Mapping[str, float]) -> tuple[float, float]:
    """Bytes of the matrices that a rank reads, and of their gradients that it writes."""
    matrices = [(use.parameter, shares[use.parameter.name]) for use in uses if use.multiplies]
    read = sum(share * p.num_elements * DTYPE_BYTES.get(p.dtype, FULL) for p, share in matrices)
    return read, sum(share * p.num_elements * FULL for p, share in matrices)


def analytic_costs(spec: ModelSpec, device: Hardware, value_bytes: int = BYTES_PER_VALUE) -> CostModel:
    """
    The cost model of operation counts.

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        device (`Hardware`): What each rank is.
        value_bytes (`int`, *optional*, defaults to 2): Of a value of an activation.
    """
    return CostModel(spec, device, AnalyticLayers(spec, device, value_bytes), value_bytes)
