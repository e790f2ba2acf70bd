"""
What a layer keeps for its backward, and what it holds besides while it runs, read off the shapes of its parameters.

Autograd keeps what the backward of an operation reads. A linear layer keeps its input if its weight is trained, and
nothing of it otherwise; a norm keeps its input, in float32 if it is an RMS norm, and the normalized value if its
weight is trained; attention keeps queries, keys, values and its output; an activation function keeps its input, a
product both factors. Under autocast each linear layer keeps a cast copy of its own input, and its cast weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, ParameterUse
from .layers import PACKED_ATTENTION, Polynomial

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
FULL = 4
"""Bytes of float32, in which RMS norms, softmax and the loss compute whatever the precision is."""
MASKED_ATTENTION = ("sdpa", PACKED_ATTENTION)
"""The attention functions that take a dense mask where rows are padded."""
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_ADAPTER = re.compile(r"\.lora_([AB])\.\w+\.weight$")
_WRAPPED = re.compile(r"(\.base_layer)?\.weight$")


@dataclass(frozen=True)
class Matrix:
    """
    A linear layer, or the experts that a token meets as one.

    Args:
        name (`str`): Without what adapters and `weight` add to it.
        shape (`tuple[int, int]`): Rows and columns.
        copies (`float`): Experts that a token meets.
        num_elements (`int`): Elements of all experts.
        trained (`bool`): Whether the matrix itself gets a gradient.
        value_bytes (`int`): Of an element.
        adapter_bytes (`int`): Of an element of its adapter, 0 without one.
        adapter_rank (`int`): Rank of its adapter.
    """

    name: str
    shape: tuple[int, int]
    copies: float
    num_elements: int
    trained: bool
    value_bytes: int
    adapter_bytes: int = 0
    adapter_rank: int = 0

    def keeps_input(self, precision: Precision) -> bool:
        """Whether it keeps what it takes; an adapter in a wider type than the weights keeps a copy of its own."""
        return self.trained or 0 < self.adapter_bytes <= precision.stream

    def width_out(self, hidden: int) -> float:
        """Values that it gives for a token, if it takes `hidden` of them."""
        rows, columns = self.shape
        return self.copies * (columns if rows == hidden != columns else rows)

    def width_in(self, hidden: int) -> float:
        """Values that it takes of a token, if it gives `hidden` of them."""
        rows, columns = self.shape
        return self.copies * (rows if columns == hidden != rows else columns)


@dataclass(frozen=True)
class Norm:
    """
    A norm.

    Args:
        name (`str`): Its name.
        size (`int`): Values that it normalizes together.
        trained (`bool`): Whether its weight gets a gradient.
        is_rms (`bool`): Whether it has no bias; models compute such norms step by step, in float32.
    """

    name: str
    size: int
    trained: bool
    is_rms: bool

    def kept_bytes(self, width: float, input_bytes: int, output_bytes: int) -> float:
        """Of a token with `width` values that are normalized."""
        if not self.is_rms:
            return width * input_bytes
        return width * (FULL + (output_bytes if self.trained else 0))


@dataclass(frozen=True)
class LayerShape:
    """
    What a layer consists of.

    Args:
        part (`ModuleSpec`): Its module.
        matrices (`tuple[Matrix, ...]`): In the order of their definition.
        norms (`tuple[Norm, ...]`): All norms.
    """

    part: ModuleSpec
    matrices: tuple[Matrix, ...]
    norms: tuple[Norm, ...]

    @classmethod
    def of(cls, part: ModuleSpec, uses: Sequence[ParameterUse]) -> LayerShape:
        """From the parameters that are read in it."""
        names = {use.parameter.name for use in uses}
        found: dict[str, Matrix] = {}
        norms = []
        for use in uses:
            p = use.parameter
            num_bytes = DTYPE_BYTES.get(p.dtype, FULL)
            adapter = _ADAPTER.search(p.name)
            if adapter is not None:
                owner = p.name[: adapter.start()]
                if owner in found and adapter.group(1) == "A":
                    found[owner] = replace(found[owner], adapter_bytes=num_bytes, adapter_rank=p.shape[0])
            elif use.multiplies and len(p.shape) in (2, 3):
                copies = p.shape[0] * p.active_share if len(p.shape) == 3 else 1.0
                name = _WRAPPED.sub("", p.name)
                rows, columns = p.shape[-2:]
                found[name] = Matrix(name, (rows, columns), copies, p.num_elements, p.trainable, num_bytes)
            elif len(p.shape) == 1 and p.name.endswith("weight"):
                bias = p.name.removesuffix("weight") + "bias"
                norms.append(Norm(p.name, p.shape[0], p.trainable, bias not in names))
        return cls(part, tuple(found.values()), tuple(norms))

    @cached_property
    def attention(self) -> tuple[Matrix, ...]:
        """The projections of attention, that of its output last."""
        return tuple(m for m in self.matrices if _ATTENTION.search(m.name))

    @cached_property
    def feed_forwards(self) -> list[tuple[Matrix, ...]]:
        """The matrices of each feed-forward part, those of its experts apart; what narrows last."""
        groups: dict[str, list[Matrix]] = {}
        for matrix in self.matrices:
            if matrix not in self.attention:
                groups.setdefault(matrix.name.rpartition(".")[0], []).append(matrix)
        return [tuple(group) for group in groups.values()]


@dataclass(frozen=True)
class Precision:
    """
    In what values are.

    Args:
        compute (`int`): Bytes of a value that matrices are multiplied with.
        stream (`int`): Bytes of a value between layers, which is the type of the weights.
    """

    compute: int
    stream: int

    @property
    def is_cast(self) -> bool:
        """Whether what a matrix takes is a cast copy (autocast)."""
        return self.compute != self.stream

    @classmethod
    def of(cls, part: ModuleSpec, value_bytes: int) -> Precision:
        """Of a module whose matrices are multiplied with values of so many bytes."""
        inside = (p for p in part.parameters if 0 <= p.layer < part.num_layers and len(p.shape) > 1)
        first = next((p for p in inside if "float" in p.dtype), None)
        stream = FULL if first is None else DTYPE_BYTES.get(first.dtype, FULL)
        return cls(min(value_bytes, stream), stream)


def layer_kept(
    part: ModuleSpec, uses: Sequence[ParameterUse], index: int, precision: Precision, tp_size: int
) -> Polynomial:
    """
    Bytes that a layer keeps for its backward, with what of it is trainable.

    Args:
        part (`ModuleSpec`): The module.
        uses (`Sequence[ParameterUse]`): The parameters that are read in the layer.
        index (`int`): `-1` for what comes before the layers, `num_layers` for what comes after them.
        precision (`Precision`): In what values are.
        tp_size (`int`): Ranks that share the matrices.

    Returns:
        `Polynomial`: In tokens, in squared tokens where attention keeps something for each pair of them, and constant
        for cast weights.
    """
    shape = LayerShape.of(part, uses)
    if not 0 <= index < part.num_layers:
        return _kept_behind(shape, precision) if index >= 0 else _kept_before(shape, uses, precision)
    split = tp_size if is_split(shape.attention) else 1
    kept = _kept_by_attention(shape, precision) * (1 / split) + _kept_mask(shape, precision)
    kept += Polynomial(token=sum(_kept_by_norm(shape, norm, precision, split) for norm in shape.norms))
    for group in [shape.attention, *shape.feed_forwards]:
        kept += Polynomial(token=_kept_inputs(shape.part, group, precision))
    for group in shape.feed_forwards:
        kept += Polynomial(token=_kept_by_feed_forward(part, group, precision) / tp_size)
    return kept + Polynomial(constant=_cast_weights(shape.matrices, precision) / tp_size)


def grouped_copies(part: ModuleSpec, uses: Sequence[ParameterUse] = (), tp_size: int = 1) -> int:
    """
    Values of a token that attention keeps besides where its mask is a dense tensor: keys and values are then repeated
    for each head that shares them. One that all heads of a rank share is a view.

    Args:
        part (`ModuleSpec`): The module.
        uses (`Sequence[ParameterUse]`, *optional*): The parameters that are read in a layer.
        tp_size (`int`, *optional*, defaults to 1): Ranks that share the matrices.
    """
    split = tp_size if is_split(LayerShape.of(part, uses).attention) else 1
    heads, kv_heads = part.num_heads // split, part.num_kv_heads // split
    is_copied = part.attention in MASKED_ATTENTION and 1 < kv_heads < heads
    return 2 * (heads - kv_heads) * part.head_width if is_copied else 0


def with_trainable(uses: Sequence[ParameterUse], trainable: bool) -> list[ParameterUse]:
    """The same parameters, all or none of them trainable."""
    return [replace(use, parameter=replace(use.parameter, trainable=trainable)) for use in uses]


def is_attention(name: str) -> bool:
    """Whether a parameter of this name belongs to attention."""
    return _ATTENTION.search(name) is not None


def is_split(attention: Sequence[Matrix]) -> bool:
    """Whether tensor parallelism cuts these projections: queries, keys and values each have their own."""
    return len(attention) > 3


def held_shares(spec: ModelSpec, module: str, index: int, tp_size: int) -> dict[str, float]:
    """
    The share of each parameter of a layer on a tensor-parallel rank. Vectors, embeddings, projectors and attention
    whose queries, keys and values are one matrix are whole on each.
    """
    part, uses = spec.modules[module], spec.uses.get((module, index), ())
    shape = LayerShape.of(part, uses)
    inside, is_head = 0 <= index < part.num_layers, module == LANGUAGE_MODEL and index == part.num_layers
    whole = () if is_split(shape.attention) else tuple(matrix.name for matrix in shape.attention)
    result = {}
    for use in uses:
        name = use.parameter.name
        is_whole = use.parameter.replicated or len(use.parameter.shape) < 2
        is_whole |= name in spec.tied or name.startswith(whole)
        result[name] = 1.0 / tp_size if (inside or is_head) and not is_whole else 1.0
    return result


def _kept_by_attention(shape: LayerShape, precision: Precision) -> Polynomial:
    """Queries, keys and values, the output with a float32 value of each head, or all scores."""
    part = shape.part
    if not shape.attention:
        return Polynomial()
    *inner, last = shape.attention
    width = last.width_in(part.hidden_size)
    if part.attention == "eager":
        values = 3 * width + (width if last.keeps_input(precision) else 0)  # keys and values of each head
        scores = FULL + (precision.compute if precision.compute != FULL else 0)
        return Polynomial(part.num_heads * scores, values * precision.compute)
    values = sum(matrix.width_out(part.hidden_size) for matrix in inner) + width
    if len(inner) == 1:
        values += 2 / 3 * inner[0].width_out(part.hidden_size)  # rotated queries and keys beside the whole it gave
    return Polynomial(token=values * precision.compute + FULL * part.num_heads)


def _kept_mask(shape: LayerShape, precision: Precision) -> Polynomial:
    """A dense mask, which attention adds to the scores of all heads: each tensor-parallel rank has all of it."""
    takes_mask = shape.attention and shape.part.name == LANGUAGE_MODEL and shape.part.attention in MASKED_ATTENTION
    return Polynomial(float(precision.compute)) if takes_mask else Polynomial()


def _kept_by_norm(shape: LayerShape, norm: Norm, precision: Precision, split: int) -> float:
    """A norm of all values of a token, or of the queries or keys of its heads."""
    part = shape.part
    if not _ATTENTION.search(norm.name) or norm.size == part.hidden_size:
        return norm.kept_bytes(norm.size, precision.stream, precision.stream)
    heads = part.num_heads if "q" in norm.name.split(".")[-2] else part.num_kv_heads
    return norm.kept_bytes(heads * part.head_width, precision.compute, precision.compute) / split


def _kept_inputs(part: ModuleSpec, group: Sequence[Matrix], precision: Precision) -> float:
    """What the matrices that read a layer's hidden state keep of it, and what adapters keep."""
    num_copies = sum(matrix.keeps_input(precision) for matrix in group[:-1])
    if not precision.is_cast:
        num_copies = min(1, num_copies)
    kept = float(num_copies * part.hidden_size * precision.compute)
    for matrix in group:
        kept += matrix.adapter_rank * matrix.adapter_bytes
        if matrix.adapter_bytes > precision.stream:
            width = matrix.width_in(part.hidden_size) if matrix is group[-1] else part.hidden_size
            kept += width * matrix.adapter_bytes
    return kept


def _kept_by_feed_forward(part: ModuleSpec, group: Sequence[Matrix], precision: Precision) -> float:
    """What an activation function keeps, the factors of a gate, and the input of the last matrix."""
    *inner, last = group
    if not inner:
        return 0.0
    wide = last.width_in(part.hidden_size)
    expanded = sum(matrix.width_out(part.hidden_size) for matrix in inner)
    values = expanded + (part.activation_copies - 1) * wide
    if expanded >= 2 * wide:
        values += wide  # the gate behind its activation function
    if last.keeps_input(precision):
        values += wide
    return values * precision.compute


def _cast_weights(matrices: Sequence[Matrix], precision: Precision) -> float:
    """Bytes of the cast copies of matrices that autograd holds until the backward."""
    cast = [matrix for matrix in matrices if matrix.value_bytes > precision.compute]
    return float(precision.compute * sum(matrix.num_elements for matrix in cast))


def _kept_before(shape: LayerShape, uses: Sequence[ParameterUse], precision: Precision) -> Polynomial:
    """
    Norms, and of a chain of convolutions what is before and after the activation function between two of them, of
    which the second halves the places.
    """
    token = sum(norm.kept_bytes(norm.size, precision.stream, precision.stream) for norm in shape.norms)
    chain = [use.parameter.shape for use in uses if use.multiplies and len(use.parameter.shape) > 2]
    for rows, columns, *_ in chain[1:]:
        token += (4 * columns + rows) * precision.compute
    return Polynomial(token=token)


def _kept_behind(shape: LayerShape, precision: Precision) -> Polynomial:
    """
    Norms, and the chain of matrices of a projector or a head. These are the same on all tensor-parallel ranks. What
    the loss keeps is not among it.
    """
    token = sum(norm.kept_bytes(norm.size, precision.stream, precision.stream) for norm in shape.norms)
    for matrix, (share, columns) in zip(shape.matrices, chain_widths(shape), strict=True):
        if matrix.keeps_input(precision):
            token += share * columns * precision.compute
        if matrix is not shape.matrices[-1]:
            token += share * matrix.shape[0] * precision.compute
    return Polynomial(token=token, constant=_cast_weights(shape.matrices, precision))


def chain_widths(shape: LayerShape) -> list[tuple[float, int]]:
    """
    For each matrix behind the layers, the share of tokens that is left and the values of each. A matrix that reads
    several times the values of a token merges as many tokens into one; one that does not read what the matrix before
    it gives reads the layers again, as the mergers of DeepStack do.
    """
    width, share, result = shape.part.hidden_size, 1.0, []
    for matrix in shape.matrices:
        rows, columns = matrix.shape
        if columns != width:
            width, share = shape.part.hidden_size, 1.0
        if columns > width and columns % width == 0:
            share *= width / columns
        result.append((share, columns))
        width = rows
    return result


@dataclass(frozen=True)
class Working:
    """
    Bytes that a layer holds while it runs, besides what it keeps.

    Args:
        forward (`Polynomial`): In a forward that keeps nothing.
        backward (`Polynomial`): In a backward.
    """

    forward: Polynomial
    backward: Polynomial


def layer_working(part: ModuleSpec, uses: Sequence[ParameterUse], precision: Precision, tp_size: int) -> Working:
    """
    What a layer of the stack holds at most at one time while it runs: in its feed-forward part or in its attention.

    Args:
        part (`ModuleSpec`): The module.
        uses (`Sequence[ParameterUse]`): The parameters that are read in the layer.
        precision (`Precision`): In what values are.
        tp_size (`int`): Ranks that share the matrices.
    """
    shape = LayerShape.of(part, uses)
    hidden = Polynomial(token=float(part.hidden_size * precision.stream))
    forwards, backwards = [Polynomial()], [Polynomial()]
    for group in shape.feed_forwards:
        *inner, last = group
        wide = last.width_in(part.hidden_size) / tp_size * precision.compute
        gated = sum(matrix.width_out(part.hidden_size) for matrix in inner) >= 2 * last.width_in(part.hidden_size)
        forwards.append(Polynomial(token=wide * (3 if gated else 2)))
        # The gradient behind the activation function and those before it; what the last matrix kept is freed by then.
        backwards.append(Polynomial(token=wide * ((3 if gated else 2) - last.keeps_input(precision))))
    if shape.attention:
        split = tp_size if is_split(shape.attention) else 1
        *inner, last = shape.attention
        width = precision.compute * (
            sum(m.width_out(part.hidden_size) for m in inner) + last.width_in(part.hidden_size)
        )
        pairs = part.num_heads * (FULL + precision.compute) if part.attention == "eager" else 0
        forwards.append(Polynomial(pairs / split, 2 * width / split))
        backwards.append(Polynomial(pairs / split, width / split))
    # A forward has the input of the stack and of the layer, the sum behind attention and the norm of it; a backward
    # the gradients before and behind what runs.
    return Working(_largest(forwards) + hidden * 4.0, _largest(backwards) + hidden * 2.0)


def _largest(found: Sequence[Polynomial]) -> Polynomial:
    """A polynomial that is nowhere below any of these."""
    return Polynomial(*(max(getattr(part, name) for part in found) for name in ("square", "token", "constant")))
