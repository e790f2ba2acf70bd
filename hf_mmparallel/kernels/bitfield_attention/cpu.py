"""
Bitfield attention on a CPU: torch's flash attention over the non-empty rectangles of the mask.
B batch, H query heads, K kv heads, G query heads of a kv head, T queries, S keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .cpu_plan import CpuPlan, Kind, Part, RowPlan, compile_mask
from .mask import BitfieldMask
from .reference import dense_mask, known_weights, last_dim_dense, sink_gradient

__all__ = ["backward", "compile_mask", "forward"]

_MOST_SCORES = 2**22  # scores in memory at once, with a soft cap


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
    count = max(1, _MOST_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
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
