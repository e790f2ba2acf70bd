"""Analytic layer costs: operation and byte counts over the rates of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .._portable import expm1, log
from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, ParameterUse
from .activations import (
    DTYPE_BYTES,
    FULL,
    LayerShape,
    Matrix,
    Norm,
    Precision,
    chain_widths,
    is_attention,
    is_split,
    parameter_shares,
    saved_activations,
    with_trainable,
)
from .collectives import all_gather, all_reduce, all_to_all, longer_ms
from .devices import Hardware
from .layers import BYTES_PER_VALUE, OURS, CostModel, Engine, LayerCost, Polynomial

# Memory traffic of a layer besides its matrix products: norms, rotary embeddings, activation functions, residuals,
# casts and the loss, one PyTorch operation at a time, each of which reads its inputs and writes its output.

_RMS_STEPS = 6
# for queries or keys: two products and their sum, and the rotation of half of the values
_ROTARY_ACCESSES, _ROTARY_STEPS = 11, 10
# sorting and counting tokens by expert, and what `Engine.expert_accesses` has
_EXPERT_STEPS = 10
# of the output of a matrix with an adapter: scaled and added; the adapter itself is two products
_ADAPTER_ACCESSES, _FUSED_ADAPTER_ACCESSES, _ADAPTER_STEPS = 5, 3, 4
# views, checks and calls of a layer that compute next to nothing but take the time of a kernel launch
_LAYER_STEPS = 12
# per token on each rank of a tp group: the highest logit, the sum of exponentials, the target's logit, and the sum
_LOSS_BYTES = 4.0 * FULL
# bytes per token pair and head of eager attention: product, scale, mask, float32 softmax, cast, product
SCORE_BYTES = 32.0
FUSED_SCORE_BYTES = 10.0


@dataclass(frozen=True)
class Elementwise:
    """Bytes read or written per token, and number of kernels, in a forward."""

    token_bytes: float = 0.0
    num_kernels: float = 0.0

    def __add__(self, other: Elementwise) -> Elementwise:
        return Elementwise(self.token_bytes + other.token_bytes, self.num_kernels + other.num_kernels)


def total(parts: Iterable[Elementwise]) -> Elementwise:
    """The sum."""
    return sum(parts, Elementwise())


def layer_elementwise(
    module_spec: ModuleSpec,
    uses: Sequence[ParameterUse],
    index: int,
    precision: Precision,
    shares: Mapping[str, float],
    tp_size: int,
    engine: Engine,
) -> Elementwise:
    """
    Element-wise operations of a layer's forward; its backward moves about twice as many bytes. `shares` are those of
    its parameters on a rank.
    """
    shape = LayerShape.of(module_spec, uses)
    inside = 0 <= index < module_spec.num_layers
    row_shares = module_spec.row_shares(tp_size) if inside else 1
    norms = total(_norm(shape, norm, precision, tp_size, row_shares, engine) for norm in shape.norms)
    if index < 0:
        return norms + _lookups(module_spec, uses, precision)
    if not inside:
        share = min((shares[use.parameter.name] for use in uses if use.multiplies), default=1.0)
        return norms + _after_layers(shape, precision, share, engine)
    result = norms + _attention(shape, precision, tp_size, engine) + Elementwise(0.0, _LAYER_STEPS)
    for group in shape.feed_forwards:
        result += _feed_forward(module_spec, group, precision, tp_size, engine)
        if group[-1].num_experts > 1:
            result += _routed(module_spec, group, precision, tp_size, engine)
    split = tp_size if is_split(shape.attention) else 1
    for group, share in [(shape.attention, split), *((group, tp_size) for group in shape.feed_forwards)]:
        result += total(_adapter(module_spec, group, own, share, precision, engine) for own in group)
    residuals = 2 if shape.attention and shape.feed_forwards else 1
    result += Elementwise(residuals * 3.0 * precision.stream * module_spec.hidden_size / row_shares, residuals)
    if precision.is_cast:
        widths = sum(matrix.width_in(module_spec.hidden_size) for matrix in shape.matrices)
        result += Elementwise((precision.stream + precision.compute) * widths, len(shape.matrices))
    return result


def _norm(
    shape: LayerShape, norm: Norm, precision: Precision, tp_size: int, row_shares: int, engine: Engine
) -> Elementwise:
    """One kernel, or the float32 operations of an RMS norm."""
    module_spec, value_bytes = shape.module_spec, precision.stream
    width = norm.size / row_shares
    if is_attention(norm.name) and norm.size != module_spec.hidden_size:
        heads = module_spec.num_heads if "q" in norm.name.split(".")[-2] else module_spec.num_kv_heads
        width = heads * module_spec.head_width / (tp_size if is_split(shape.attention) else 1)
        value_bytes = precision.compute
    if engine.fused or not norm.is_rms:
        return Elementwise(2.0 * value_bytes * width, 1)
    return Elementwise((4 * value_bytes + 7 * FULL) * width, _RMS_STEPS)


def _attention(shape: LayerShape, precision: Precision, tp_size: int, engine: Engine) -> Elementwise:
    """Rotary embeddings of queries and keys, and the transposition of the output."""
    if not shape.attention:
        return Elementwise()
    module_spec, split = shape.module_spec, tp_size if is_split(shape.attention) else 1
    width = precision.compute * module_spec.head_width / split
    result = Elementwise(2.0 * width * module_spec.num_heads, 1 + len(shape.attention))
    if module_spec.name == LANGUAGE_MODEL:
        accesses, steps = (2, 1) if engine.fused else (_ROTARY_ACCESSES, _ROTARY_STEPS)
        result += Elementwise(accesses * width * (module_spec.num_heads + module_spec.num_kv_heads), steps)
    return result


def _adapter(
    module_spec: ModuleSpec,
    group: Sequence[Matrix],
    matrix: Matrix,
    split: int,
    precision: Precision,
    engine: Engine,
) -> Elementwise:
    """What adds the output of an adapter to that of its matrix, one of a block's whose last one writes whole rows."""
    if not matrix.adapter_rank:
        return Elementwise()
    hidden, is_last = module_spec.hidden_size, matrix is group[-1] and len(group) > 1
    width = matrix.copies * hidden if is_last else matrix.width_out(hidden) / split
    accesses = _FUSED_ADAPTER_ACCESSES if engine.fused else _ADAPTER_ACCESSES
    value_bytes = max(precision.compute, matrix.adapter_bytes)
    return Elementwise(accesses * value_bytes * width, _ADAPTER_STEPS)


def _routed(
    module_spec: ModuleSpec, group: Sequence[Matrix], precision: Precision, tp_size: int, engine: Engine
) -> Elementwise:
    """What takes tokens to experts and back on a rank, besides communication."""
    copies = group[-1].copies / (tp_size if module_spec.expert_ranks else 1)
    return Elementwise(engine.expert_accesses * precision.compute * copies * module_spec.hidden_size, _EXPERT_STEPS)


def _feed_forward(
    module_spec: ModuleSpec, group: Sequence[Matrix], precision: Precision, tp_size: int, engine: Engine
) -> Elementwise:
    """The activation function, and the product with a gate."""
    *inner, last = group
    if not inner:
        return Elementwise(0.0, len(group))
    wide = precision.compute * last.width_in(module_spec.hidden_size) / tp_size
    gated = sum(matrix.width_out(module_spec.hidden_size) for matrix in inner) >= 2 * last.width_in(
        module_spec.hidden_size
    )
    copies = 1 if engine.fused else module_spec.activation_copies
    if engine.fused:
        return Elementwise((3.0 if gated else 2.0) * wide, 1 + len(group))
    return Elementwise((2.0 * copies + (3.0 if gated else 0.0)) * wide, copies + gated + len(group))


def _lookups(module_spec: ModuleSpec, uses: Sequence[ParameterUse], precision: Precision) -> Elementwise:
    """Embedding lookups."""
    count = sum(use.parameter.is_lookup for use in uses)
    return Elementwise(2.0 * count * precision.stream * module_spec.hidden_size, count)


def _after_layers(shape: LayerShape, precision: Precision, share: float, engine: Engine) -> Elementwise:
    """Activation functions between the matrices after the layers, or the loss of a share of a head."""
    result = Elementwise(0.0, len(shape.matrices))
    if not shape.matrices:
        return result
    if shape.module_spec.name == LANGUAGE_MODEL:
        accesses = 2 * precision.compute if engine.fused_loss else precision.compute + 3 * FULL
        return result + Elementwise(accesses * share * shape.matrices[-1].shape[0], 5)
    inner = list(zip(shape.matrices, chain_widths(shape), strict=True))[:-1]
    return result + total(Elementwise(2.0 * precision.compute * share * m.shape[0], 1) for m, (share, _) in inner)


# FLOPs of attention's backward over its forward: five matrix products, with recomputed scores, instead of two
ATTENTION_BACKWARD = 2.5
ELEMENTWISE_BACKWARD = 2.0  # bytes moved by the backward of element-wise operations, over those of the forward


def active_elements(spec: ModelSpec, module: str, index: int) -> list[tuple[ParameterUse, float]]:
    """Parameters that a layer reads, each with the number of elements that one token is multiplied with."""
    module_spec, uses = spec.modules[module], spec.uses.get((module, index), ())
    if index < module_spec.num_layers:
        return [(use, use.num_active) for use in uses]
    shape = LayerShape.of(module_spec, uses)
    # a merger turns several tokens into one, so each of these counts for its share of the matrix
    widths = chain_widths(shape)
    shares = {f"{matrix.name}.": share for matrix, (share, _) in zip(shape.matrices, widths, strict=True)}
    names = [f"{use.parameter.name}." for use in uses]  # an adapter's begins with that of its matrix
    scales = (next((share for prefix, share in shares.items() if name.startswith(prefix)), 1.0) for name in names)
    return [(use, scale * use.num_active) for use, scale in zip(uses, scales, strict=True)]


def layer_flops(spec: ModelSpec, module: str, index: int) -> tuple[float, float]:
    """FLOPs of a layer's forward, per token and per squared sequence length (half of all pairs if causal)."""
    module_spec = spec.modules[module]
    matrices = sum(elements for _, elements in active_elements(spec, module, index))
    # two FLOPs per token and matrix element; `4 n^2` per channel for attention over `n` tokens
    attention = 4.0 * module_spec.attention_width if 0 <= index < module_spec.num_layers else 0.0
    return 2.0 * matrices, attention / 2 if module == LANGUAGE_MODEL else attention


def module_flops(spec: ModelSpec, module: str) -> tuple[float, float]:
    """FLOPs of a module's forward, see [`layer_flops`]."""
    parts = [layer_flops(spec, module, index) for index in range(-1, spec.modules[module].num_layers + 1)]
    return sum(tokens for tokens, _ in parts), sum(squares for _, squares in parts)


@dataclass(frozen=True)
class AnalyticLayers:
    """Layer costs from operation and byte counts, the same whether parameters are frozen or not."""

    spec: ModelSpec
    device: Hardware
    value_bytes: int = BYTES_PER_VALUE  # of an activation value
    engine: Engine = OURS
    first_rank: int = 0  # position in its node of the first rank of a tp group

    def starting_at(self, first_rank: int) -> AnalyticLayers:
        """See [`LayerCosts`]."""
        return replace(self, first_rank=first_rank)

    def with_spec(self, spec: ModelSpec) -> AnalyticLayers:
        """See [`LayerCosts`]."""
        return replace(self, spec=spec)

    @cached_property
    def _known(self) -> dict[tuple[str, int, int], LayerCost]:
        return {}

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """See [`LayerCosts`]."""
        key = module, self.spec.first_alike[module, index], tp_size
        if key not in self._known:
            self._known[key] = self._layer(*key)
        return self._known[key]

    def _layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        module_spec, uses = self.spec.modules[module], self.spec.uses.get((module, index), ())
        inside = 0 <= index < module_spec.num_layers
        shares = parameter_shares(self.spec, module, index, tp_size)
        precision = Precision.of(module_spec, self.value_bytes)
        # each rank computes its share of what its tp group sends to experts, wherever these are
        computed = {**shares, **dict.fromkeys(_shared_experts(module_spec, uses), 1.0 / tp_size)}
        products_ms = self._products_ms(module_spec, uses, index, computed, precision)
        attention_ms = self._attention_ms(module_spec, uses, precision, tp_size) if inside else 0.0
        moved = _weight_bytes(uses, shares, precision, self.engine.sums_in_place)
        work = layer_elementwise(module_spec, uses, index, precision, shares, tp_size, self.engine)
        moved_ms = work.token_bytes / self.device.memory_bytes_per_ms
        read_ms, written_ms = (num_bytes / self.device.memory_bytes_per_ms for num_bytes in moved)
        saved, frozen = (
            saved_activations(module_spec, with_trainable(uses, trained), index, precision, tp_size, self.engine)
            for trained in (True, False)
        )
        cast_ms = _cast_bytes(uses, shares, precision) / self.device.memory_bytes_per_ms
        launch_ms = work.num_kernels * self.device.launch_us / 1e3 if uses else 0.0
        added_ms, of_factors_ms = self._added_ms(uses, shares)
        # the product of each matrix, and the addition to its gradient
        weight_launch_ms = 2 * len(LayerShape.of(module_spec, uses).matrices) * self.device.launch_us / 1e3
        travels = self._travels(module_spec, uses, tp_size) if inside else Polynomial()
        return LayerCost(
            forward=Polynomial(attention_ms, products_ms + moved_ms, read_ms + added_ms),
            data_gradient=Polynomial(
                ATTENTION_BACKWARD * attention_ms,
                products_ms + ELEMENTWISE_BACKWARD * moved_ms,
                read_ms + of_factors_ms,
            ),
            weight_gradient=Polynomial(0.0, products_ms, written_ms),
            activations=saved,
            frozen_activations=frozen,
            launch_ms=(launch_ms, launch_ms),
            weight_launch_ms=min(launch_ms, weight_launch_ms),
            sums=self._sums(module_spec, uses, index, tp_size, products_ms),
            travels=(travels, travels),
            gathers=self._gathers(module_spec, uses, tp_size, products_ms) if inside else Polynomial(),
            elementwise=Polynomial(attention_ms * (module_spec.attention == "eager"), moved_ms, cast_ms + added_ms),
        )

    def _added_ms(self, uses: Sequence[ParameterUse], shares: Mapping[str, float]) -> tuple[float, float]:
        """
        Milliseconds of a chunk in which products of factors are added to copies of weights, and in which the gradients
        of the factors are computed from those of the copies.
        """
        adapted = [use.parameter for use in uses if use.parameter.adapter_rank]
        elements = [(p, shares[p.name] * p.num_elements) for p in adapted]
        product_ms = sum(2.0 * p.adapter_rank * count for p, count in elements) / self.device.flops_per_ms
        moved = sum(2.0 * DTYPE_BYTES.get(p.dtype, FULL) * count for p, count in elements)  # a read for each factor
        moved_ms = moved / self.device.memory_bytes_per_ms
        return product_ms + moved_ms, 2 * product_ms + moved_ms

    def _products_ms(
        self,
        module_spec: ModuleSpec,
        uses: Sequence[ParameterUse],
        index: int,
        shares: Mapping[str, float],
        precision: Precision,
    ) -> float:
        """Milliseconds per token of a layer's matrix products, including reads and writes of their operands."""
        active = active_elements(self.spec, module_spec.name, index)
        in_float8 = module_spec.float8 and 0 <= index < module_spec.num_layers
        times = 0.0
        for use, elements in active:
            is_linear = len(use.parameter.shape) == 2 and not use.parameter.num_experts
            flops = 2.0 * shares[use.parameter.name] * elements
            times += flops / (self.device.float8_flops_per_ms if in_float8 and is_linear else self.device.flops_per_ms)
        width = 0.0
        for use, elements in active:
            rows, columns = _sides(use, elements)
            share = shares[use.parameter.name]
            whole = max((side for side in (rows, columns) if side == module_spec.hidden_size), default=0.0)
            width += whole + share * (rows + columns - whole)
        # added to the compute time instead of the larger one: narrow matrices (a hidden size cut by tensor
        # parallelism) are slower per FLOP than wide ones
        moved = precision.compute * width
        return times + moved / self.device.memory_bytes_per_ms

    def _attention_ms(
        self, module_spec: ModuleSpec, uses: Sequence[ParameterUse], precision: Precision, tp_size: int
    ) -> float:
        """Milliseconds of attention per squared sequence length; causal attention computes half of the pairs."""
        split = tp_size if is_split(LayerShape.of(module_spec, uses).attention) else 1
        share = (0.5 if module_spec.name == LANGUAGE_MODEL else 1.0) / split
        flops = share * 4.0 * module_spec.attention_width
        if module_spec.attention != "eager":
            return flops / self.device.attention_flops_per_ms(module_spec.attention) / self.engine.attention_share
        # eager attention materializes all scores: matrix products and memory traffic for all pairs, see `chunk_sizes`
        scores = (FUSED_SCORE_BYTES if self.engine.fused else SCORE_BYTES) * precision.compute / 2
        moved = share * scores * module_spec.num_heads
        return flops / self.device.flops_per_ms + moved / self.device.memory_bytes_per_ms

    def _sums(
        self, module_spec: ModuleSpec, uses: Sequence[ParameterUse], index: int, tp_size: int, products_ms: float
    ) -> tuple[Polynomial, Polynomial]:
        """Milliseconds of the tensor-parallel collectives of a layer in forward and backward."""
        shape = LayerShape.of(module_spec, uses)
        ranks = range(self.first_rank, self.first_rank + tp_size)
        hidden, inside = module_spec.hidden_size * self.value_bytes, 0 <= index < module_spec.num_layers
        one = all_reduce(self.device, ranks).of_tokens(hidden)
        if tp_size == 1:
            return Polynomial(), Polynomial()
        gather = all_gather(self.device, ranks).of_tokens(hidden)
        if not inside:
            # rows that the ranks share are joined behind the layers, and their gradients before these
            ends = gather if module_spec.sequence_parallel else Polynomial()
            words = [use for use in uses if (use.parameter.is_lookup if index < 0 else use.multiplies)]
            is_cut = bool(words) and module_spec.name == LANGUAGE_MODEL
            if not is_cut or any(use.parameter.replicated for use in words):
                return (Polynomial(), ends) if index < 0 else (ends, Polynomial())
            if index < 0:  # the sum of what the ranks look up
                return one, ends
            # of a head that is split by rows each rank gathers the numbers of the loss from all others
            return ends + all_reduce(self.device, ranks).of_tokens(tp_size * _LOSS_BYTES / 2), one
        if module_spec.sequence_parallel:  # a reduce-scatter, and a gather before the next block
            one = gather * 2.0
        if self.engine.hidden_sums:
            one = Polynomial(0.0, max(0.0, one.token - products_ms / 4), one.constant)
        # outputs of the last matrix of each block, and the gradient of what its other matrices read
        split = sum(len(group) > 1 for group in shape.feed_forwards) + is_split(shape.attention)
        return one * split, one * split

    def _gathers(
        self, module_spec: ModuleSpec, uses: Sequence[ParameterUse], tp_size: int, products_ms: float
    ) -> Polynomial:
        """
        Milliseconds that the gathers of rows for the gradients of weights add to a backward: each is beside the
        gradient of what the last matrix of its block reads.
        """
        if module_spec.row_shares(tp_size) == 1 or module_spec.float8:  # whose layers keep all rows
            return Polynomial()
        shape = LayerShape.of(module_spec, uses)
        ranks = range(self.first_rank, self.first_rank + tp_size)
        gather = all_gather(self.device, ranks).of_tokens(module_spec.hidden_size * self.value_bytes)
        efficiency = 1.0 if self.engine.hidden_sums else self.device.overlap_efficiency
        sizes = {matrix.name: matrix.copies * matrix.shape[0] * matrix.shape[1] for matrix in shape.matrices}
        blocks = [group for group in (shape.attention, *shape.feed_forwards) if len(group) > 1]
        beside = np.array([products_ms * sizes[group[-1].name] / sum(sizes.values()) for group in blocks])
        return Polynomial(token=float(longer_ms(beside, np.full_like(beside, gather.token), efficiency).sum()))

    def _travels(self, module_spec: ModuleSpec, uses: Sequence[ParameterUse], tp_size: int) -> Polynomial:
        """Milliseconds in which tokens travel to experts and back, evenly over these."""
        shared = _shared_experts(module_spec, uses)
        rows = module_spec.expert_ranks[::tp_size]
        if not shared or len(rows) < 2:
            return Polynomial()
        share = next(use.parameter.active_share for use in uses if use.parameter.name in shared)
        # a token goes to a rank of each tp group unless none of its experts is there
        is_sent = -float(expm1(share * module_spec.num_experts * log(1 - 1 / len(module_spec.expert_ranks))))
        sent = len(rows) * is_sent * module_spec.hidden_size * self.value_bytes
        return all_to_all(self.device, rows).of_tokens(sent) * 2.0


def _shared_experts(module_spec: ModuleSpec, uses: Sequence[ParameterUse]) -> set[str]:
    """The parameters of experts that ranks share."""
    return {use.parameter.name for use in uses if use.parameter.num_experts} if module_spec.expert_ranks else set()


def _sides(use: ParameterUse, elements: float) -> tuple[float, float]:
    """Output and input width of a matrix, scaled by the elements that a token is multiplied with."""
    shape = use.parameter.shape
    if not elements or len(shape) < 2:
        return 0.0, 0.0
    if len(shape) > 3:  # a convolution, and the positions that it computes for a token
        return elements / use.parameter.num_elements * shape[0], elements / shape[0]
    count = elements / (shape[-1] * shape[-2])  # active experts of a token, or its share of a merged token
    return count * shape[-2], count * shape[-1]


def _cast_bytes(uses: Sequence[ParameterUse], shares: Mapping[str, float], precision: Precision) -> float:
    """Bytes read and written to cast the matrices of a rank that are wider than products."""
    stored = ((use.parameter, DTYPE_BYTES.get(use.parameter.dtype, FULL)) for use in uses if use.multiplies)
    wider = ((p, width) for p, width in stored if width > precision.compute)
    return sum(shares[p.name] * p.num_elements * (width + precision.compute) for p, width in wider)


def _weight_bytes(
    uses: Sequence[ParameterUse], shares: Mapping[str, float], precision: Precision, in_place: bool
) -> tuple[float, float]:
    """Bytes of the matrices that a rank reads, casts of wider ones included, and of their gradients that it writes."""
    read, written = _cast_bytes(uses, shares, precision), 0.0
    for use in uses:
        p = use.parameter
        elements, stored = shares[p.name] * p.num_elements, DTYPE_BYTES.get(p.dtype, FULL)
        if use.multiplies:
            read += elements * min(stored, precision.compute)
        if use.multiplies or p.is_lookup:
            narrow = min(stored, precision.compute)
            # written in the compute dtype and then accumulated in float32, or accumulated by the product itself
            written += elements * (narrow if in_place else 2 * narrow + 2 * FULL)
    return read, written


def analytic_costs(
    spec: ModelSpec, device: Hardware, value_bytes: int = BYTES_PER_VALUE, engine: Engine = OURS
) -> CostModel:
    """Cost model from operation and byte counts; `value_bytes` are those of an activation value."""
    first = spec.modules.get(LANGUAGE_MODEL) or next(iter(spec.modules.values()))
    # a model that multiplies in four bytes does not reach the 16-bit peak
    if Precision.of(first, value_bytes).compute == FULL and device.dtype not in ("float32", "tf32"):
        device = device.computing_in("float32")
    return CostModel(spec, device, AnalyticLayers(spec, device, value_bytes, engine), value_bytes, engine)


def predicts_times(costs: CostModel) -> bool:
    """Whether times are those of the device: of a CPU only a measured profile knows the speed."""
    return costs.device.name != "cpu" or not isinstance(costs.layers, AnalyticLayers)
