"""Memory of a layer from its parameters' shapes: what autograd saves, and what exists only while it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, ParameterUse
from ..plan.checkpointing import Checkpointing
from .layers import OURS, PACKED_ATTENTION, Engine, Polynomial

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
INDEX = 8  # bytes of an index
FULL = 4  # bytes of a float32 value; RMS norms, softmax and the loss compute in float32 at any precision
MASKED_ATTENTION = ("sdpa", PACKED_ATTENTION)  # attention functions that read a dense mask if rows are padded
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_ADAPTER = re.compile(r"\.lora_([AB])\.\w+\.weight$")
_WRAPPED = re.compile(r"(\.base_layer)?\.weight$")


@dataclass(frozen=True)
class Matrix:
    """A linear layer, or the active experts of a token as one."""

    name: str  # without suffixes of adapters and without `weight`
    shape: tuple[int, int]  # output and input features, or the reverse if stored transposed
    copies: float  # active experts of a token
    num_experts: int
    num_elements: int  # of all experts
    trained: bool  # whether the matrix itself gets a gradient, or the copy of it with what an adapter adds
    value_bytes: int  # of an element
    adapter_bytes: int = 0  # of an element of its adapter, 0 without one
    adapter_rank: int = 0
    is_copied: bool = False  # with what an adapter adds to it

    def saves_input(self, precision: Precision) -> bool:
        """Returns whether autograd saves its input. (A LoRA adapter in a wider dtype saves a cast copy.)"""
        return self.trained or 0 < self.adapter_bytes <= precision.stream

    def width_out(self, hidden: int) -> float:
        """Output values per token if its input has `hidden` features."""
        rows, columns = self.shape
        return self.copies * (columns if rows == hidden != columns else rows)

    def width_in(self, hidden: int) -> float:
        """Input values per token if its output has `hidden` features."""
        rows, columns = self.shape
        return self.copies * (rows if columns == hidden != rows else columns)


@dataclass(frozen=True)
class Norm:
    """A normalization layer."""

    name: str  # of its weight
    size: int  # values that are normalized together
    trained: bool
    is_rms: bool  # an RMS norm has no bias; models compute it in several float32 operations

    def saved_bytes(self, width: float, input_bytes: int, output_bytes: int, engine: Engine) -> float:
        """Saved bytes per token with `width` normalized values."""
        if engine.fused:  # and a float32 factor for all values that are normalized together
            return width * (input_bytes + FULL / self.size)
        if not self.is_rms:
            return width * input_bytes
        # the input in float32, and the normalized value for the weight's gradient
        return width * (FULL + (output_bytes if self.trained else 0))


@dataclass(frozen=True)
class LayerShape:
    """The matrices and norms of a layer, the matrices in the order of definition."""

    module_spec: ModuleSpec
    matrices: tuple[Matrix, ...]
    norms: tuple[Norm, ...]
    factors: tuple[tuple[int, int], ...] = ()  # elements, and bytes of each, of factors of adapters of experts

    @classmethod
    def of(cls, module_spec: ModuleSpec, uses: Sequence[ParameterUse]) -> LayerShape:
        """Builds it from the parameters that the layer reads."""
        names = {use.parameter.name for use in uses}
        matrices: dict[str, Matrix] = {}
        norms, factors = [], []
        for use in uses:
            p = use.parameter
            num_bytes = DTYPE_BYTES.get(p.dtype, FULL)
            adapter = _ADAPTER.search(p.name)
            if p.is_factor:
                factors.append((p.num_elements, num_bytes))
            elif adapter is not None:
                owner = p.name[: adapter.start()]
                if owner in matrices and adapter.group(1) == "A":
                    matrices[owner] = replace(matrices[owner], adapter_bytes=num_bytes, adapter_rank=p.shape[0])
            elif use.multiplies and len(p.shape) in (2, 3) and not (p.num_experts and len(p.shape) == 2):
                # not the biases of experts, one vector each
                is_depthwise = len(p.shape) == 3 and p.shape[1] == 1  # a convolution of each channel by itself
                count = p.shape[0] if len(p.shape) == 3 and not is_depthwise else 1
                name = _WRAPPED.sub("", p.name)
                rows, columns = (p.shape[0], p.shape[2]) if is_depthwise else p.shape[-2:]
                copies = count * p.active_share
                in_float8 = module_spec.float8 and len(p.shape) == 2 and 0 <= p.layer < module_spec.num_layers
                keeps_input, is_copied = p.has_gradient or in_float8, p.adapter_rank > 0
                matrices[name] = Matrix(
                    name, (rows, columns), copies, count, p.num_elements, keeps_input, num_bytes, is_copied=is_copied
                )
            elif len(p.shape) == 1 and p.name.endswith("weight"):
                bias = p.name.removesuffix("weight") + "bias"
                norms.append(Norm(p.name, p.shape[0], p.trainable, bias not in names))
        return cls(module_spec, tuple(matrices.values()), tuple(norms), tuple(factors))

    @cached_property
    def attention(self) -> tuple[Matrix, ...]:
        """The attention projections, the output projection last."""
        return tuple(m for m in self.matrices if _ATTENTION.search(m.name))

    @cached_property
    def feed_forwards(self) -> list[tuple[Matrix, ...]]:
        """The matrices of each feed-forward block, grouped by submodule; the down projection is last."""
        groups: dict[str, list[Matrix]] = {}
        for matrix in self.matrices:
            if matrix not in self.attention:
                groups.setdefault(matrix.name.rpartition(".")[0], []).append(matrix)
        return [tuple(group) for group in groups.values()]


@dataclass(frozen=True)
class Precision:
    """Compute and storage precision of a module."""

    compute: int  # bytes of a value in matrix products
    stream: int  # bytes of a value between layers, in the dtype of the weights

    @property
    def is_cast(self) -> bool:
        """Whether each linear layer saves cast copies of its input and of its weight (autocast)."""
        return self.compute != self.stream

    @classmethod
    def of(cls, module_spec: ModuleSpec, value_bytes: int) -> Precision:
        """Precision of a module with `value_bytes` per value in matrix products."""
        inside = (p for p in module_spec.parameters if 0 <= p.layer < module_spec.num_layers and len(p.shape) > 1)
        first = next((p for p in inside if "float" in p.dtype), None)
        stream = FULL if first is None else DTYPE_BYTES.get(first.dtype, FULL)
        return cls(min(value_bytes, stream), stream)


def saved_activations(
    module_spec: ModuleSpec,
    uses: Sequence[ParameterUse],
    index: int,
    precision: Precision,
    tp_size: int,
    engine: Engine = OURS,
) -> Polynomial:
    """Bytes that autograd saves in a layer (-1: before all, `num_layers`: after them) for its backward."""
    shape = LayerShape.of(module_spec, uses)
    if index < 0:
        return _saved_before_layers(shape, uses, precision, engine)
    if index >= module_spec.num_layers:
        return _saved_after_layers(shape, precision, engine)
    split = tp_size if is_split(shape.attention) else 1
    # per squared token only if attention saves something for each pair of tokens
    saved = _attention_saved(shape, precision) * (1 / split) + _mask_saved(shape, precision)
    saved += Polynomial(token=sum(_norm_saved(shape, norm, precision, tp_size, engine) for norm in shape.norms))
    for group in filter(None, [shape.attention, *shape.feed_forwards]):  # a block may have no attention
        saved += Polynomial(token=_inputs_saved(shape.module_spec, group, precision, tp_size))
    for group in shape.feed_forwards:
        saved += Polynomial(token=_feed_forward_saved(module_spec, group, precision, engine) / tp_size)
    return saved + Polynomial(constant=_copied_weights(shape, precision, tp_size))


def kept_activations(
    module_spec: ModuleSpec, uses: Sequence[ParameterUse], precision: Precision, tp_size: int
) -> tuple[Polynomial, Polynomial]:
    """
    Bytes of the outputs of products and of attention that one of the repeated layers keeps where it recomputes the
    rest, with sums over a tp group in place of products; and of these, what its backward reads.
    """
    shape, hidden, rows = LayerShape.of(module_spec, uses), module_spec.hidden_size, module_spec.row_shares(tp_size)
    kept = read = 0.0
    split = tp_size if is_split(shape.attention) else 1
    groups: list[tuple[Sequence[Matrix], int]] = [(shape.attention, split)]
    for group, size in groups + [(group, tp_size) for group in shape.feed_forwards]:
        for matrix in group:
            is_last = matrix is group[-1] and len(group) > 1
            width = matrix.copies * hidden / rows if is_last else matrix.width_out(hidden) / size
            kept += width * precision.compute
            if matrix.adapter_rank:
                adapter_bytes = precision.compute if precision.is_cast else matrix.adapter_bytes
                kept += (matrix.adapter_rank + width) * adapter_bytes
            elif not is_last and group is not shape.attention:
                read += width * precision.compute
    if shape.attention and module_spec.attention != "eager":
        width = shape.attention[-1].width_in(hidden) * precision.compute + FULL * module_spec.num_heads
        kept, read = kept + width / split, read + width / split
    return Polynomial(token=kept), Polynomial(token=read)


def put_off_activations(
    module_spec: ModuleSpec,
    uses: Sequence[ParameterUse],
    index: int,
    precision: Precision,
    tp_size: int,
    is_recomputed: Checkpointing,
) -> Polynomial:
    """
    Bytes that stay from the gradients of inputs of a layer to those of its weights: inputs of trained matrices, of
    which several may have the same one, and gradients of their outputs.
    """
    shape, hidden = LayerShape.of(module_spec, uses), module_spec.hidden_size
    values = 0.0
    if 0 <= index < module_spec.num_layers:
        split = tp_size if is_split(shape.attention) else 1
        row_shares = module_spec.row_shares(tp_size)
        # ranks that share rows cast them once, and keep their shares unless a repeated forward has all of them
        is_cast, kept = precision.is_cast and row_shares == 1, 1.0 if is_recomputed else 1 / row_shares
        for group, size in [(shape.attention, split), *((group, tp_size) for group in shape.feed_forwards)]:
            values += _put_off_values(group, hidden, size, kept, is_cast)
    elif index >= 0 and module_spec.name != LANGUAGE_MODEL:
        for matrix, (share, columns) in zip(shape.matrices, chain_widths(shape), strict=True):
            values += share * matrix.trained * (columns + matrix.shape[0])
    return Polynomial(token=values * precision.compute)


def _put_off_values(group: Sequence[Matrix], hidden: int, split: int, kept: float, is_cast: bool) -> float:
    """Values per token that stay for matrices; all but the last read the hidden state, and the last writes it."""
    result = 0.0
    for matrix in group:
        rank, is_last = matrix.adapter_rank, matrix is group[-1]
        width = hidden if is_last else matrix.width_out(hidden) / split
        result += width * (matrix.trained + (rank > 0)) + 2 * rank
        if is_last and len(group) > 1:
            result += matrix.width_in(hidden) / split * (matrix.trained or rank > 0)
    readers = group if len(group) == 1 else group[:-1]
    num_copies = sum(matrix.trained or matrix.adapter_rank > 0 for matrix in readers)
    return result + kept * hidden * (num_copies if is_cast else min(1, num_copies))  # each casts its input


def grouped_copies(module_spec: ModuleSpec, uses: Sequence[ParameterUse] = (), tp_size: int = 1) -> int:
    """Additional values per token that attention saves with a dense mask: keys and values for each query head."""
    split = tp_size if is_split(LayerShape.of(module_spec, uses).attention) else 1
    heads, kv_heads = module_spec.num_heads // split, module_spec.num_kv_heads // split
    # a single kv head is expanded as a view, without a copy
    is_copied = module_spec.attention in MASKED_ATTENTION and 1 < kv_heads < heads
    return 2 * (heads - kv_heads) * module_spec.head_width if is_copied else 0


def with_trainable(uses: Sequence[ParameterUse], trainable: bool) -> list[ParameterUse]:
    """The same parameters, all or none of them trainable."""
    return [replace(use, parameter=replace(use.parameter, trainable=trainable)) for use in uses]


def is_attention(name: str) -> bool:
    """Whether a parameter of this name belongs to attention."""
    return _ATTENTION.search(name) is not None


def is_split(attention: Sequence[Matrix]) -> bool:
    """Whether tensor parallelism splits these projections: queries, keys and values need separate matrices."""
    return len(attention) > 3


def parameter_shares(spec: ModelSpec, module: str, index: int, tp_size: int) -> dict[str, float]:
    """Share of each parameter of a layer on one rank of a tp group, or of those that share experts."""
    module_spec, uses = spec.modules[module], spec.uses.get((module, index), ())
    shape = LayerShape.of(module_spec, uses)
    inside, is_language = 0 <= index < module_spec.num_layers, module == LANGUAGE_MODEL
    # vectors, projectors, positions and attention with a fused qkv matrix are replicated
    whole = () if is_split(shape.attention) else tuple(matrix.name for matrix in shape.attention)
    result = {}
    for use in uses:
        name = use.parameter.name
        is_cut = inside or (is_language and (index == module_spec.num_layers or use.parameter.is_lookup))
        is_whole = use.parameter.replicated or len(use.parameter.shape) < 2 or name.startswith(whole)
        result[name] = 1.0 / tp_size if is_cut and not is_whole else 1.0
        if use.parameter.num_experts and module_spec.expert_ranks:
            result[name] = 1.0 / len(module_spec.expert_ranks)
    return result


def _attention_saved(shape: LayerShape, precision: Precision) -> Polynomial:
    """Queries, keys and values, the output with a float32 log-sum-exp per head, or all scores."""
    module_spec = shape.module_spec
    if not shape.attention:
        return Polynomial()
    *inner, last = shape.attention
    width = last.width_in(module_spec.hidden_size)
    if module_spec.attention == "eager":
        values = 3 * width + (width if last.saves_input(precision) else 0)  # keys and values of each head
        scores = FULL + (precision.compute if precision.compute != FULL else 0)
        return Polynomial(module_spec.num_heads * scores, values * precision.compute)
    values = sum(matrix.width_out(module_spec.hidden_size) for matrix in inner) + width
    if len(inner) == 1:
        values += (
            2 / 3 * inner[0].width_out(module_spec.hidden_size)
        )  # rotated queries and keys, besides the fused output
    return Polynomial(token=values * precision.compute + FULL * module_spec.num_heads)


def _mask_saved(shape: LayerShape, precision: Precision) -> Polynomial:
    """A dense mask, which is added to the scores of all heads; each rank of a tp group has all of it."""
    takes_mask = (
        shape.attention
        and shape.module_spec.name == LANGUAGE_MODEL
        and shape.module_spec.attention in MASKED_ATTENTION
    )
    return Polynomial(float(precision.compute)) if takes_mask else Polynomial()


def _norm_saved(shape: LayerShape, norm: Norm, precision: Precision, tp_size: int, engine: Engine) -> float:
    """Saved bytes per token of a norm over the hidden state, or over queries or keys per head."""
    module_spec = shape.module_spec
    if not _ATTENTION.search(norm.name) or norm.size == module_spec.hidden_size:
        width = norm.size / module_spec.row_shares(tp_size)
        return norm.saved_bytes(width, precision.stream, precision.stream, engine)
    heads = module_spec.num_heads if "q" in norm.name.split(".")[-2] else module_spec.num_kv_heads
    width = heads * module_spec.head_width / (tp_size if is_split(shape.attention) else 1)
    return norm.saved_bytes(width, precision.compute, precision.compute, engine)


def _inputs_saved(module_spec: ModuleSpec, group: Sequence[Matrix], precision: Precision, tp_size: int) -> float:
    """Saved bytes per token for the matrices that read the hidden state, and for adapters."""
    row_shares = module_spec.row_shares(tp_size)
    # tokens are sorted by expert, in a copy of each for every active one
    read = [matrix.copies for matrix in group[:-1] if matrix.saves_input(precision)]
    saved = (sum(read) if precision.is_cast else max(read, default=0.0)) * module_spec.hidden_size * precision.compute
    if row_shares > 1 and not module_spec.float8:  # all have the same copy, of which the rank keeps its share
        saved = gathered_bytes(module_spec, group, precision) / row_shares
    for matrix in group:
        saved += matrix.adapter_rank * matrix.adapter_bytes
        if matrix.adapter_bytes > precision.stream and (matrix is group[-1] or row_shares == 1):
            width = matrix.width_in(module_spec.hidden_size) if matrix is group[-1] else module_spec.hidden_size
            saved += width * matrix.adapter_bytes
    return saved


def gathered_bytes(module_spec: ModuleSpec, group: Sequence[Matrix], precision: Precision) -> float:
    """Bytes per token of the rows that a block gathers, if the gradient of a weight is computed from them."""
    is_read = any(matrix.trained or matrix.adapter_rank for matrix in group[:-1])
    return float(is_read * module_spec.hidden_size * precision.compute)


def _feed_forward_saved(
    module_spec: ModuleSpec, group: Sequence[Matrix], precision: Precision, engine: Engine
) -> float:
    """Saved bytes per token of the activation function, the factors of a gate, and the input of the last matrix."""
    *inner, last = group
    if not inner:
        return 0.0
    wide = last.width_in(module_spec.hidden_size)
    values = expanded = sum(matrix.width_out(module_spec.hidden_size) for matrix in inner)
    if not engine.fused:
        values += (module_spec.activation_copies - 1) * wide
        values += wide if expanded >= 2 * wide else 0.0  # output of the gate's activation function
    if last.saves_input(precision):
        values += wide
    if last.num_experts > 1:  # outputs of experts, which the router's weights multiply, and two permutations of tokens
        values += last.copies * (module_spec.hidden_size + 2 * INDEX / precision.compute)
    return values * precision.compute


def _copied_weights(shape: LayerShape, precision: Precision, tp_size: int) -> float:
    """Bytes of copies of matrices, cast or with adapters, that autograd saves on a rank until the backward."""
    copied = [matrix for matrix in shape.matrices if matrix.is_copied or matrix.value_bytes > precision.compute]
    shared = sum(matrix.num_elements for matrix in copied if matrix.num_experts > 1) * precision.compute
    shared += sum(count for count, num_bytes in shape.factors if num_bytes > precision.stream) * precision.stream
    others = sum(matrix.num_elements for matrix in copied if matrix.num_experts == 1) * precision.compute
    return others / tp_size + shared / (len(shape.module_spec.expert_ranks) or tp_size)


def _saved_before_layers(
    shape: LayerShape, uses: Sequence[ParameterUse], precision: Precision, engine: Engine
) -> Polynomial:
    """Saved bytes of norms and of a chain of convolutions."""
    token = sum(norm.saved_bytes(norm.size, precision.stream, precision.stream, engine) for norm in shape.norms)
    chain = [use.parameter.shape for use in uses if use.multiplies and len(use.parameter.shape) > 2]
    # input and output of the activation function between two of them; the second one halves the positions
    for rows, columns, *_ in chain[1:]:
        token += (4 * columns + rows) * precision.compute
    return Polynomial(token=token)


def _saved_after_layers(shape: LayerShape, precision: Precision, engine: Engine) -> Polynomial:
    """Saved bytes of norms, and of a projector or a head without its loss, the same on all ranks of a tp group."""
    token = sum(norm.saved_bytes(norm.size, precision.stream, precision.stream, engine) for norm in shape.norms)
    for matrix, (share, columns) in zip(shape.matrices, chain_widths(shape), strict=True):
        if matrix.saves_input(precision):
            token += share * columns * precision.compute
        if matrix is not shape.matrices[-1]:
            token += share * matrix.shape[0] * precision.compute
    return Polynomial(token=token, constant=_copied_weights(shape, precision, 1))


def chain_widths(shape: LayerShape) -> list[tuple[float, int]]:
    """For each matrix after the layers, the share of tokens that is left and its input features."""
    width, share, result = shape.module_spec.hidden_size, 1.0, []
    for matrix in shape.matrices:
        rows, columns = matrix.shape
        # the matrix reads the output of the layers again, not that of the matrix before it, like the mergers of
        # DeepStack
        if columns != width:
            width, share = shape.module_spec.hidden_size, 1.0
        # the matrix merges several tokens into one
        if columns > width and columns % width == 0:
            share *= width / columns
        result.append((share, columns))
        width = rows
    return result


@dataclass(frozen=True)
class TransientMemory:
    """Bytes allocated only while a layer runs, besides what autograd saves."""

    forward: Polynomial  # of a forward without saved activations
    backward: Polynomial
    recomputed: Polynomial  # of the backward of a layer whose activations are recomputed


def transient_memory(
    module_spec: ModuleSpec, uses: Sequence[ParameterUse], precision: Precision, tp_size: int
) -> TransientMemory:
    """Peak of the transient memory of one of the repeated layers, in its feed-forward block or its attention."""
    shape = LayerShape.of(module_spec, uses)
    hidden = Polynomial(token=float(module_spec.hidden_size * precision.stream))
    forwards, backwards = [Polynomial()], [Polynomial()]
    for group in shape.feed_forwards:
        *inner, last = group
        wide = last.width_in(module_spec.hidden_size) / tp_size * precision.compute
        gated = sum(matrix.width_out(module_spec.hidden_size) for matrix in inner) >= 2 * last.width_in(
            module_spec.hidden_size
        )
        forwards.append(Polynomial(token=wide * (3 if gated else 2)))
        # The gradients of the activation function's input and output; the input of the last matrix is freed by then.
        backwards.append(Polynomial(token=wide * ((3 if gated else 2) - last.saves_input(precision))))
        # a copy with what an adapter adds, and its gradient
        ranks = len(module_spec.expert_ranks) or tp_size
        copied = [matrix.num_elements / ranks for matrix in group if matrix.is_copied]
        forwards[-1] += Polynomial(constant=sum(copied) * precision.stream)
        backwards[-1] += Polynomial(constant=max(copied, default=0.0) * precision.compute)
    if shape.attention:
        split = tp_size if is_split(shape.attention) else 1
        *inner, last = shape.attention
        width = precision.compute * (
            sum(m.width_out(module_spec.hidden_size) for m in inner) + last.width_in(module_spec.hidden_size)
        )
        pairs = module_spec.num_heads * (FULL + precision.compute) if module_spec.attention == "eager" else 0
        forwards.append(Polynomial(pairs / split, 2 * width / split))
        backwards.append(Polynomial(pairs / split, width / split))
    # A forward has the input of the stack and that of the layer, what the last block reads and what it returns; a
    # backward the gradients of the output and the input.
    in_forward, in_backward, again, recomputed = 4.0, 2.0, 0.0, 0.0
    if module_spec.row_shares(tp_size) > 1:
        # Shares of what is between the blocks. All rows are in the input of the stack, gathered and in the product
        # that is summed, and in the gradient of that.
        share = 1 / tp_size
        in_forward, in_backward = 3.0 + 3.0 * share, 1.0 + 2.0 * share
        # what a block gathers again for its backward; a forward that is recomputed keeps what all of them gather
        gathered = [gathered_bytes(module_spec, group, precision) for group in (shape.attention, *shape.feed_forwards)]
        again, recomputed = max(gathered), sum(gathered) * (1 - share)
    backward = _largest(backwards) + hidden * in_backward
    return TransientMemory(
        _largest(forwards) + hidden * in_forward,
        backward + Polynomial(token=again),
        backward + Polynomial(token=recomputed),
    )


def _largest(polynomials: Sequence[Polynomial]) -> Polynomial:
    """Coefficient-wise maximum (an upper bound)."""
    return Polynomial(*(max(getattr(p, name) for p in polynomials) for name in ("square", "token", "constant")))
