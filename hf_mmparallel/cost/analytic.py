"""Costs of layers from operation counts and a table of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, ParameterUse
from .collectives import all_reduce
from .devices import Hardware
from .elementwise import FUSED_SCORE_BYTES, SCORE_BYTES, layer_elementwise
from .engine_traits import OURS, Engine
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
ELEMENTWISE_BACKWARD = 2.0
"""Bytes that the backward of element-wise work moves over those of its forward."""


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
    Costs of layers as operations and bytes over what a device reaches: matrix products with what they read and write,
    attention, element-wise work, the reading of the weights, sums over tensor-parallel ranks, and launches.

    Products and bytes are added, not the larger of both taken: what is narrow (a hidden size cut by tensor
    parallelism, say) is so slower for each operation than what is wide.

    Args:
        spec (`ModelSpec`): The model; what of it is frozen does not matter here.
        device (`Hardware`): What each rank is.
        value_bytes (`int`, *optional*, defaults to 2): Of a value of an activation.
        engine (`Engine`, *optional*): What runs the layers.
        first_rank (`int`, *optional*, defaults to 0): Where in a node the ranks that share matrices start.
    """

    spec: ModelSpec
    device: Hardware
    value_bytes: int = BYTES_PER_VALUE
    engine: Engine = OURS
    first_rank: int = 0

    def starting_at(self, first_rank: int) -> AnalyticLayers:
        """See [`LayerCosts`]."""
        return replace(self, first_rank=first_rank)

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """See [`LayerCosts`]."""
        part, uses = self.spec.modules[module], self.spec.uses.get((module, index), ())
        inside = 0 <= index < part.num_layers
        shares = held_shares(self.spec, module, index, tp_size)
        precision = Precision.of(part, self.value_bytes)
        products_ms = self._products_ms(part, uses, index, shares, precision)
        attention_ms = self._attention_ms(part, uses, precision, tp_size) if inside else 0.0
        moved = _weight_bytes(uses, shares, precision, self.engine.fused)
        work = layer_elementwise(part, uses, index, precision, tp_size, self.engine)
        moved_ms = work.token_bytes / self.device.memory_bytes_per_ms
        read_ms, written_ms = (num_bytes / self.device.memory_bytes_per_ms for num_bytes in moved)
        kept, frozen = (
            layer_kept(part, with_trainable(uses, trained), index, precision, tp_size) for trained in (True, False)
        )
        launch_ms = work.num_kernels * self.device.launch_us / 1e3 if uses else 0.0
        return LayerCost(
            forward=Polynomial(attention_ms, products_ms + moved_ms, read_ms),
            data_gradient=Polynomial(
                ATTENTION_BACKWARD * attention_ms, products_ms + ELEMENTWISE_BACKWARD * moved_ms, read_ms
            ),
            weight_gradient=Polynomial(0.0, products_ms, written_ms),
            activations=kept,
            frozen_activations=frozen,
            launch_ms=(launch_ms, launch_ms),
            sums=self._sums(part, uses, index, tp_size, products_ms),
        )

    def _products_ms(
        self,
        part: ModuleSpec,
        uses: Sequence[ParameterUse],
        index: int,
        shares: Mapping[str, float],
        precision: Precision,
    ) -> float:
        """Time for a token of the matrix products of a layer, with the reading and writing of what goes through."""
        found = active_elements(self.spec, part.name, index)
        flops = sum(2.0 * shares[use.parameter.name] * elements for use, elements in found)
        width = 0.0
        for use, elements in found:
            rows, columns = _sides(use, elements)
            share = shares[use.parameter.name]
            whole = max((side for side in (rows, columns) if side == part.hidden_size), default=0.0)
            width += whole + share * (rows + columns - whole)
        moved = precision.compute * width
        return flops / self.device.flops_per_ms + moved / self.device.memory_bytes_per_ms

    def _attention_ms(
        self, part: ModuleSpec, uses: Sequence[ParameterUse], precision: Precision, tp_size: int
    ) -> float:
        """
        Time of attention for a squared token, of which causal attention computes half; where scores are made, as
        products, with what moves them. Then all pairs count, see [`chunk_sizes`].
        """
        split = tp_size if is_split(LayerShape.of(part, uses).attention) else 1
        share = (0.5 if part.name == LANGUAGE_MODEL else 1.0) / split
        flops = share * 4.0 * part.attention_width
        if part.attention != "eager":
            return flops / self.device.attention_flops_per_ms(part.attention)
        scores = (FUSED_SCORE_BYTES if self.engine.fused else SCORE_BYTES) * precision.compute / 2
        moved = share * scores * part.num_heads
        return flops / self.device.flops_per_ms + moved / self.device.memory_bytes_per_ms

    def _sums(
        self, part: ModuleSpec, uses: Sequence[ParameterUse], index: int, tp_size: int, products_ms: float
    ) -> tuple[Polynomial, Polynomial]:
        """
        Time of the sums over tensor-parallel ranks in the forward and in the backward: outputs of the last matrix of
        each part of a layer, and gradients of the input of each of the others, which transformers sums one by one. Of
        a head cut by rows, each rank gathers all logits.
        """
        shape = LayerShape.of(part, uses)
        ranks = range(self.first_rank, self.first_rank + tp_size)
        if tp_size == 1 or index < 0:
            return Polynomial(), Polynomial()
        if index == part.num_layers:
            is_cut = part.name == LANGUAGE_MODEL and shape.matrices and not self.engine.merged_sums
            if not is_cut or any(use.parameter.name in self.spec.tied for use in uses if use.multiplies):
                return Polynomial(), Polynomial()
            logits = self.value_bytes * shape.matrices[-1].shape[0]
            return all_reduce(self.device, logits / 2, ranks), Polynomial()
        hidden = part.hidden_size * self.value_bytes
        one = all_reduce(self.device, hidden, ranks)
        if self.engine.hidden_sums:
            one = Polynomial(0.0, max(0.0, one.token - products_ms / 4), one.constant)
        split = [group for group in shape.feed_forwards if len(group) > 1]
        split += [shape.attention] if is_split(shape.attention) else []
        inputs = len(split) if self.engine.merged_sums else sum(len(group) - 1 for group in split)
        return one * len(split), one * inputs


def _sides(use: ParameterUse, elements: float) -> tuple[float, float]:
    """Values that a token has before and behind a matrix, scaled as the elements that it is multiplied with."""
    shape = use.parameter.shape
    if not elements or len(shape) < 2:
        return 0.0, 0.0
    if len(shape) > 3:  # a convolution
        return float(shape[0]), use.parameter.num_elements / shape[0]
    count = elements / (shape[-1] * shape[-2])  # experts that a token meets, or its share of a merged token
    return count * shape[-2], count * shape[-1]


def _weight_bytes(
    uses: Sequence[ParameterUse], shares: Mapping[str, float], precision: Precision, fused: bool
) -> tuple[float, float]:
    """
    Bytes of the matrices that a rank reads, with the casts of those that are wider than what is computed in, and of
    their gradients, which are written in the type of the computation and then added up in float32, or by the product
    itself.
    """
    read = written = 0.0
    for use in uses:
        p = use.parameter
        elements, own = shares[p.name] * p.num_elements, DTYPE_BYTES.get(p.dtype, FULL)
        if use.multiplies:
            read += elements * (own if own <= precision.compute else own + 2 * precision.compute)
        if use.multiplies or p.is_lookup:
            narrow = min(own, precision.compute)
            written += elements * (narrow if fused else 2 * narrow + 2 * FULL)
    return read, written


def analytic_costs(
    spec: ModelSpec, device: Hardware, value_bytes: int = BYTES_PER_VALUE, engine: Engine = OURS
) -> CostModel:
    """
    The cost model of operation counts.

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        device (`Hardware`):
            What each rank is. Where the language model is multiplied in four bytes and the device computes in 16 bits,
            its float32 peak counts.
        value_bytes (`int`, *optional*, defaults to 2): Of a value of an activation.
        engine (`Engine`, *optional*): What runs the layers.
    """
    first = spec.modules.get(LANGUAGE_MODEL) or next(iter(spec.modules.values()))
    if Precision.of(first, value_bytes).compute == FULL and device.dtype not in ("float32", "tf32"):
        device = device.computing_in("float32")
    return CostModel(spec, device, AnalyticLayers(spec, device, value_bytes, engine), value_bytes, engine)
