"""The definition of bitfield attention in plain torch: quadratic in memory, for tests and small inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .words import BitfieldMask, decode_words


def dense_mask(mask: BitfieldMask, window: int = 0) -> Tensor:
    """Returns true for visible pairs, bool `[batch, query_length, key_length]`; `window` is in tokens, 0 for none."""
    q, k = decode_words(mask.query_words[..., :, None]), decode_words(mask.key_words[..., None, :])
    at_q, at_k = mask.query_positions[..., :, None], mask.key_positions[..., None, :]
    same_sample = (q.segment == k.segment) & (q.segment > 0)
    back = q.causal & (at_k <= at_q)
    together = (q.span == k.span) & (q.span > 0)
    seen = same_sample & ((q.sees & k.kinds) != 0) & (back | together | q.sees_all)
    return seen & (at_k > at_q - window) if window else seen


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BitfieldMask,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp over the dense mask, in the dtype of the inputs; these as in `bitfield_attention`."""
    scores, _ = _scores(query, key, mask, scale, softcap, window)
    if sinks is not None:
        sink = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = known_weights(scores, lse)
    return weights[..., : value.shape[-2]] @ _for_each_query_head(value, query), lse


def reference_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: BitfieldMask,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """
    Contribution of these keys to the gradients of [`reference_attention`] (`None` without sinks), without autograd.

    `out` and `lse` may result from more keys than `key` contains; the gradients of several calls with different keys
    then add up. The gradient of the sinks depends on `out` and `lse` only.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores, slope = _scores(query, key, mask, scale, softcap, window)
    weights = known_weights(scores, lse.to(scores.dtype))
    delta = (grad_out * out).sum(-1)
    grad_weights = grad_out @ _for_each_query_head(value, query).transpose(-1, -2)
    grad_scores = weights * (grad_weights - delta[..., None]) * slope * scale
    grad_query = grad_scores @ _for_each_query_head(key, query)
    grad_key, grad_value = (
        (each.transpose(-1, -2) @ other).unflatten(1, (key.shape[1], -1)).sum(2)
        for each, other in ((grad_scores, query), (weights, grad_out))
    )
    if sinks is None:
        return grad_query, grad_key, grad_value, None
    return grad_query, grad_key, grad_value, sink_gradient(delta, lse, sinks)


def sink_gradient(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of the sinks, `[heads]`, of each query's log-sum-exp with the sink and sum of output times gradient."""
    weights = known_weights(sinks.to(lse.dtype)[:, None, None], lse)[..., 0]
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def _scores(
    query: Tensor, key: Tensor, mask: BitfieldMask, scale: float | None, softcap: float, window: int
) -> tuple[Tensor, Tensor | float]:
    """Scores, -inf for invisible pairs, and their derivative with respect to the uncapped scores."""
    key = _for_each_query_head(key, query)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    slope = 1.0
    if softcap:
        ratio = torch.tanh(scores / softcap)
        scores, slope = softcap * ratio, 1 - ratio**2
    return scores.masked_fill(~dense_mask(mask, window)[:, None], float("-inf")), slope


def known_weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Softmax of scores `[..., rows, keys]` of known log-sum-exp `[..., rows]`; 0 for queries without visible keys."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])


def _for_each_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values, repeated for each query head that reads them."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def last_dim_dense(tensor: Tensor) -> Tensor:
    """The tensor with a last stride of 1, as the kernels need it: copied if its columns have gaps or are expanded."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
