"""
Bitfield attention on a CPU: torch's flash attention over the non-empty rectangles of the mask.
B batch, H query heads, K kv heads, G query heads of a kv head, T queries, S keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from .intervals import row_bounds
from .reference import dense_mask, known_weights, last_dim_dense, sink_gradient
from .words import BitfieldMask

# The calls for a mask on a CPU: the non-empty rectangles of the mask. Queries and keys are sorted by position, so that
# a query that sees an interval of positions sees a slice of the keys.

CHUNK_ROWS = 256
_MIN_ROWS = 32  # shorter runs of queries are not worth a separate call
_CALL_PAIRS = 16384  # a call costs about as much as this many pairs of a query and a key


class Kind(Enum):
    """The kind of mask of a rectangle."""

    FULL = "full"
    CAUSAL = "causal"  # query i sees the keys up to i
    MASKED = "masked"


@dataclass(frozen=True)
class Part:
    """A rectangle of the mask, in queries and keys that are both sorted by position."""

    rows: tuple[int, int]  # the first query and one past the last
    keys: tuple[int, int]  # the first key and one past the last
    kind: Kind


@dataclass(frozen=True)
class RowPlan:
    """The calls of one row of the batch."""

    query_index: slice | Tensor  # the queries with visible keys, sorted by position
    key_index: slice | Tensor  # the keys that are not padding, sorted by position
    parts: tuple[Part, ...]  # each for different queries
    bounds: Tensor  # [2, rows], the first key and one past the last key of each query
    mask: BitfieldMask | None  # in that order, if bounds do not determine the mask
    window: int  # in tokens, used with the words


@dataclass(frozen=True)
class CpuPlan:
    """The plan of each row of the batch, and whether every query has a visible key."""

    rows: tuple[RowPlan, ...]
    complete: bool


def compile_mask(mask: BitfieldMask, window: int = 0) -> CpuPlan:
    """Plans the calls of a mask on the CPU; one plan serves all layers with the same window (tokens, 0 for none)."""
    bounds, holes = row_bounds(mask, window)
    has_holes = bool(holes)
    rows: list[RowPlan] = []
    for index in range(mask.query_words.shape[0]):
        one = BitfieldMask(*(tensor[index] for tensor in mask.tensors))
        if index and all(torch.equal(t[index], t[index - 1]) for t in mask.tensors):
            rows.append(rows[-1])
        else:
            rows.append(_plan_row(one, bounds.first[index], bounds.last[index], has_holes, window))
    return CpuPlan(tuple(rows), bool((bounds.last >= bounds.first).all()))


def _plan_row(mask: BitfieldMask, first: Tensor, last: Tensor, has_holes: bool, window: int) -> RowPlan:
    """The plan of one row of the batch; tensors are 1-D."""
    query_index = _in_order(mask.query_positions, last >= first)
    key_index = _in_order(mask.key_positions, (mask.key_words & 0xFFFF) > 0)
    places = mask.key_positions[key_index].contiguous()
    start = torch.searchsorted(places, first[query_index].contiguous())
    stop = torch.searchsorted(places, last[query_index].contiguous(), right=True)
    ordered = None
    if has_holes:
        ordered = BitfieldMask(
            mask.query_words[query_index], mask.query_positions[query_index], mask.key_words[key_index], places
        )
    return RowPlan(
        query_index, key_index, tuple(_parts(start, stop, has_holes)), torch.stack([start, stop]), ordered, window
    )


def _in_order(positions: Tensor, wanted: Tensor) -> slice | Tensor:
    """Returns the indices of the wanted tokens, sorted by position; a slice where possible, which saves a copy."""
    index = wanted.nonzero()[:, 0]
    at = positions[index]
    if not bool((at[1:] > at[:-1]).all()):
        index = index[at.argsort(stable=True)]
    if not len(index):
        return slice(0, 0)
    begin, end = int(index[0]), int(index[-1]) + 1
    consecutive = end - begin == len(index) and bool((index[1:] > index[:-1]).all())
    return slice(begin, end) if consecutive else index


# Queries that see the same slice are one call without a mask, and so are the queries of a causal sample. All others
# are computed in chunks of few queries over the keys that some of them see, with a mask for the chunk.
def _parts(start: Tensor, stop: Tensor, has_holes: bool) -> Iterator[Part]:
    """The calls for queries with given slices of keys, in the order of the queries."""
    begin = 0  # of the queries that need a mask and are not covered yet
    for part in () if has_holes else _runs(start, stop):
        yield from _masked_parts(start, stop, begin, part.rows[0])
        yield part
        begin = part.rows[1]
    yield from _masked_parts(start, stop, begin, len(start))


def _runs(start: Tensor, stop: Tensor) -> Iterator[Part]:
    """Yields runs of queries that need no mask: all see the same keys, or each one more than the one before."""
    step = torch.where(start[1:] == start[:-1], stop[1:] - stop[:-1], -1)
    steps, lengths = torch.unique_consecutive(step, return_counts=True)
    row, taken = 0, 0
    for growth, length in zip(steps.tolist(), lengths.tolist(), strict=True):
        first, end = max(row, taken), row + length + 1
        row += length
        if growth not in (0, 1) or end - first < _MIN_ROWS:
            continue
        keys = int(start[first]), int(stop[end - 1])
        if growth == 0 or int(stop[first]) == keys[0] + 1:
            yield Part((first, end), keys, Kind.CAUSAL if growth else Kind.FULL)
            taken = end


def _masked_parts(start: Tensor, stop: Tensor, first: int, end: int) -> Iterator[Part]:
    """Yields chunks of queries; those without a common key share one only if that adds little work."""
    if first >= end:
        return
    low, high = start[first:end], stop[first:end]
    apart = low[1:] >= high.cummax(0).values[:-1]
    edges = [0, *(apart.nonzero()[:, 0] + 1).tolist(), end - first]
    chunks: list[list[int]] = []  # first query, end, first key, end
    for edge, following in zip(edges, edges[1:], strict=False):
        for row in range(edge, following, CHUNK_ROWS):
            until = min(row + CHUNK_ROWS, following)
            chunk = [row, until, int(low[row:until].min()), int(high[row:until].max())]
            last = chunks[-1] if chunks else chunk
            joined = [last[0], until, min(last[2], chunk[2]), max(last[3], chunk[3])]
            little = _pairs(joined) - _pairs(last) - _pairs(chunk) <= _CALL_PAIRS
            if chunks and little and until - last[0] <= CHUNK_ROWS:
                chunks[-1] = joined
            else:
                chunks.append(chunk)
    for row, until, key, key_end in chunks:
        yield Part((first + row, first + until), (key, key_end), Kind.MASKED)


def _pairs(chunk: list[int]) -> int:
    return (chunk[1] - chunk[0]) * (chunk[3] - chunk[2])


__all__ = ["backward", "compile_mask", "forward"]

_MAX_SCORES = 2**22  # scores in memory at once, with a soft cap


def forward(
    query: Tensor,  # [batch, heads, query_length, head_dim]
    key: Tensor,  # [batch, kv_heads, key_length, head_dim], like `value`
    value: Tensor,
    plan: CpuPlan,
    scale: float,  # factor of the scores
    softcap: float = 0.0,  # 0 for none
    sinks: Tensor | None = None,  # [heads], an additional logit without a value
) -> tuple[Tensor, Tensor]:
    """Attention, and the log-sum-exp `[batch, heads, query_length]` in float32 (float64 for float64)."""
    out_BHTD = torch.empty_like(query) if plan.complete else torch.zeros_like(query)
    lse_BHT = torch.full(query.shape[:-1], float("-inf"), dtype=_exact(query.dtype))
    for index, row in enumerate(plan.rows):
        heads = _Heads(query[index], key[index], value[index], row)
        out_GKTD, lse_GKT = heads.take(out_BHTD[index]), heads.take(lse_BHT[index])
        for part in row.parts:
            rows = slice(*part.rows)
            out_GKTD[:, :, rows], lse_GKT[:, :, rows] = _part_forward(*heads.operands(part), part, row, scale, softcap)
        heads.put(out_BHTD[index], out_GKTD)
        heads.put(lse_BHT[index], lse_GKT)
    return (out_BHTD, lse_BHT) if sinks is None else _with_sinks(out_BHTD, lse_BHT, sinks)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,  # of the forward pass, like `lse`
    lse: Tensor,
    plan: CpuPlan,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of [`forward`] for queries, keys, values and sinks (`None` without sinks)."""
    exact = _exact(query.dtype)
    grad_query = torch.empty_like(query) if plan.complete else torch.zeros_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    for index, row in enumerate(plan.rows):
        heads = _Heads(query[index], key[index], value[index], row)
        given = [heads.take(last_dim_dense(tensor[index])) for tensor in (grad_out, out, lse)]
        dq_GKTD = heads.take(grad_query[index])
        dkv_2KSD = torch.zeros(2, *heads.key_GKSD.shape[1:], dtype=exact)
        for part in row.parts:
            rows = slice(*part.rows)
            of_rows = [tensor[:, :, rows] for tensor in given]
            dq_GKTD[:, :, rows], *dkv = _part_backward(*of_rows, *heads.operands(part), part, row, scale, softcap)
            for total, grad_GKSD in zip(dkv_2KSD, dkv, strict=True):
                total[:, slice(*part.keys)] += grad_GKSD.sum(0, dtype=exact)
        heads.put(grad_query[index], dq_GKTD)
        grad_key[index][:, row.key_index] = dkv_2KSD[0].to(key.dtype)
        grad_value[index][:, row.key_index] = dkv_2KSD[1].to(value.dtype)
    grad_sinks = None
    if sinks is not None:
        grad_sinks = sink_gradient((grad_out.to(exact) * out.to(exact)).sum(-1), lse, sinks)
    return grad_query, grad_key, grad_value, grad_sinks


class _Heads:
    """The tensors of one row of the batch in the layout for flash attention."""

    # The query heads of a kv head are along the batch dimension, so that they share keys and values by a stride of 0
    # without copies.
    def __init__(self, query_HTD: Tensor, key_KSD: Tensor, value_KSD: Tensor, plan: RowPlan) -> None:
        self.kv_heads = key_KSD.shape[0]
        self.index = plan.query_index
        self.query_GKTD = self.take(last_dim_dense(query_HTD))
        groups = len(self.query_GKTD)
        self.key_GKSD, self.value_GKSD = (
            last_dim_dense(tensor)[:, plan.key_index].expand(groups, -1, -1, -1) for tensor in (key_KSD, value_KSD)
        )

    def take(self, tensor_HT: Tensor) -> Tensor:
        """The planned queries of `[H, T, ...]` as `[G, K, queries, ...]`; a view if they are a slice."""
        return self._grouped(tensor_HT)[:, :, self.index]

    def put(self, tensor_HT: Tensor, rows_GKT: Tensor) -> None:
        """Writes back the queries that `take` returned, after they were changed."""
        if isinstance(self.index, Tensor):
            self._grouped(tensor_HT)[:, :, self.index] = rows_GKT

    def operands(self, part: Part) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a rectangle."""
        rows, keys = slice(*part.rows), slice(*part.keys)
        return self.query_GKTD[:, :, rows], self.key_GKSD[:, :, keys], self.value_GKSD[:, :, keys]

    def _grouped(self, tensor_HT: Tensor) -> Tensor:
        return tensor_HT.unflatten(0, (self.kv_heads, -1)).transpose(0, 1)


def _part_forward(
    query: Tensor, key: Tensor, value: Tensor, part: Part, row: RowPlan, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the queries of a rectangle over its keys."""
    if softcap:
        results = []
        for rows, visible in _by_hand(query, key, part, row):
            scores, _ = _capped(query[:, :, rows], key, visible, scale, softcap)
            lse = scores.logsumexp(-1)
            results.append((known_weights(scores, lse) @ value.to(scores.dtype), lse))
        out, lse = (torch.cat(tensors, dim=2) for tensors in zip(*results, strict=True))
        return out.to(query.dtype), lse
    bias = _bias(_visible(part, row), query.dtype) if part.kind is Kind.MASKED else None
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, part.kind is Kind.CAUSAL, attn_mask=bias, scale=scale
    )


# The same calls as in the forward, with the log-sum-exp over all keys of a query, so that no weights are saved.
def _part_backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    row: RowPlan,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contribution of a rectangle to the gradients of its queries, keys and values."""
    if softcap:
        return _capped_backward(grad_out, out, lse, query, key, value, part, row, scale, softcap)
    if query.dtype == torch.float16:  # torch's float16 kernel is ten times slower
        grad_out, out, query, key, value = (tensor.float() for tensor in (grad_out, out, query, key, value))
    bias = _bias(_visible(part, row), query.dtype) if part.kind is Kind.MASKED else None
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, lse, 0.0, part.kind is Kind.CAUSAL, attn_mask=bias, scale=scale
    )


def _capped_backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Part,
    row: RowPlan,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """[`_part_backward`] for scores with a soft cap."""
    exact = lse.dtype
    key_exact, value_exact = key.to(exact), value.to(exact)
    grad_query = torch.empty_like(query, dtype=exact)
    grad_key, grad_value = torch.zeros_like(key_exact), torch.zeros_like(value_exact)
    for rows, visible in _by_hand(query, key, part, row):
        scores, slope = _capped(query[:, :, rows], key, visible, scale, softcap)
        weights = known_weights(scores, lse[:, :, rows])
        grad = grad_out[:, :, rows].to(exact)
        delta = (grad * out[:, :, rows].to(exact)).sum(-1, keepdim=True)
        grad_scores = weights * (grad @ value_exact.transpose(-1, -2) - delta) * slope * scale
        grad_query[:, :, rows] = grad_scores @ key_exact
        grad_key += grad_scores.transpose(-1, -2) @ query[:, :, rows].to(exact)
        grad_value += weights.transpose(-1, -2) @ grad
    return grad_query, grad_key, grad_value


# Flash attention does not support a soft cap, so its scores are explicit.
def _by_hand(query: Tensor, key: Tensor, part: Part, row: RowPlan) -> Iterator[tuple[slice, Tensor | None]]:
    """The queries of a rectangle, few enough at a time for their scores to fit into memory, and their visible keys."""
    total = query.shape[2]
    count = max(1, _MAX_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    for begin in range(0, total, count):
        end = min(begin + count, total)
        if part.kind is Kind.CAUSAL:
            visible = torch.ones(end - begin, key.shape[2], dtype=torch.bool).tril(begin)
        elif part.kind is Kind.MASKED:
            visible = _visible(Part((part.rows[0] + begin, part.rows[0] + end), part.keys, part.kind), row)
        else:
            visible = None
        yield slice(begin, end), visible


def _capped(query: Tensor, key: Tensor, visible: Tensor | None, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Scores with a soft cap, and their derivative with respect to the uncapped scores."""
    exact = _exact(query.dtype)
    ratio = torch.tanh(query.to(exact) @ key.to(exact).transpose(-1, -2) * (scale / softcap))
    slope = 1 - ratio * ratio
    scores = ratio.mul_(softcap)
    return (scores if visible is None else scores.masked_fill_(~visible, float("-inf"))), slope


def _visible(part: Part, row: RowPlan) -> Tensor:
    """Visible keys of the queries of a rectangle, bool `[queries, keys]`."""
    rows, keys = slice(*part.rows), slice(*part.keys)
    if row.mask is not None:
        words = (row.mask.query_words[rows], row.mask.query_positions[rows])
        return dense_mask(BitfieldMask(*words, row.mask.key_words[keys], row.mask.key_positions[keys]), row.window)
    start, stop = row.bounds[:, rows, None]
    place = torch.arange(*part.keys)
    return (place >= start) & (place < stop)


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask of scores: 0 for visible pairs, -inf for others."""
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))[None, None]


def _with_sinks(out_BHTD: Tensor, lse_BHT: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp including the sinks."""
    lse = torch.logaddexp(lse_BHT, sinks.to(lse_BHT.dtype)[:, None])
    return out_BHTD.mul_(known_weights(lse_BHT[..., None], lse)), lse


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32
