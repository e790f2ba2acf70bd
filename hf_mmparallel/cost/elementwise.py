"""
Memory traffic of a layer besides its matrix products: norms, rotary embeddings, activation functions, residuals, casts
and the loss, one PyTorch operation at a time, each of which reads its inputs and writes its output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..plan import LANGUAGE_MODEL, ModuleSpec, ParameterUse
from .activations import FULL, LayerShape, Matrix, Norm, Precision, chain_widths, is_attention, is_split
from .engine_traits import Engine

_RMS_STEPS = 6
# for queries or keys: two products and their sum, and the rotation of half of the values
_ROTARY_ACCESSES, _ROTARY_STEPS = 11, 10
# views, checks and calls of a layer that compute next to nothing but take the time of a kernel launch
_LAYER_STEPS = 12
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
    tp_size: int,
    engine: Engine,
) -> Elementwise:
    """Element-wise operations of a layer's forward; its backward moves about twice as many bytes."""
    shape = LayerShape.of(module_spec, uses)
    norms = total(_norm(shape, norm, precision, tp_size, engine) for norm in shape.norms)
    if index < 0:
        return norms + _lookups(module_spec, uses, precision)
    if index >= module_spec.num_layers:
        return norms + _after_layers(shape, precision, tp_size, engine)
    result = norms + _attention(shape, precision, tp_size, engine) + Elementwise(0.0, _LAYER_STEPS)
    for group in shape.feed_forwards:
        result += _feed_forward(module_spec, group, precision, tp_size, engine)
    residuals = 2 if shape.attention and shape.feed_forwards else 1
    parts = tp_size if engine.split_norms else 1
    result += Elementwise(residuals * 3.0 * precision.stream * module_spec.hidden_size / parts, residuals)
    if precision.is_cast:
        widths = sum(matrix.width_in(module_spec.hidden_size) for matrix in shape.matrices)
        result += Elementwise((precision.stream + precision.compute) * widths, len(shape.matrices))
    return result


def _norm(shape: LayerShape, norm: Norm, precision: Precision, tp_size: int, engine: Engine) -> Elementwise:
    """One kernel, or the float32 operations of an RMS norm."""
    module_spec, value_bytes = shape.module_spec, precision.stream
    width = norm.size / (tp_size if engine.split_norms else 1)
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


def _after_layers(shape: LayerShape, precision: Precision, tp_size: int, engine: Engine) -> Elementwise:
    """Activation functions between the matrices after the layers, or the loss of a head."""
    result = Elementwise(0.0, len(shape.matrices))
    if not shape.matrices:
        return result
    if shape.module_spec.name == LANGUAGE_MODEL:
        parts = tp_size if engine.merged_sums else 1
        accesses = 2 * precision.compute if engine.fused_loss else precision.compute + 3 * FULL
        return result + Elementwise(accesses * shape.matrices[-1].shape[0] / parts, 5)
    inner = list(zip(shape.matrices, chain_widths(shape), strict=True))[:-1]
    return result + total(Elementwise(2.0 * precision.compute * share * m.shape[0], 1) for m, (share, _) in inner)
