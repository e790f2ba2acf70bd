"""The definition of bitfield attention in plain torch: quadratic in memory, for tests and small inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .mask import BitfieldMask
from .words import decode_words


def dense_mask(mask: BitfieldMask, window: int = 0) -> Tensor:
    """
    The dense mask, true for visible pairs: bool `[batch, query_length, key_length]`.

    Args:
        mask (`BitfieldMask`): The words.
        window (`int`, *optional*, defaults to 0): The layer's sliding window in tokens, 0 for none.
    """
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
    """
    Attention as a softmax over the dense mask, in the dtype of its inputs.

    Args:
        query (`torch.Tensor` of shape `[batch, heads, query_length, head_dim]`): Queries.
        key (`torch.Tensor` of shape `[batch, kv_heads, key_length, head_dim]`): Keys; `kv_heads` divides `heads`.
        value (`torch.Tensor` of shape `[batch, kv_heads, key_length, head_dim]`): Values.
        mask (`BitfieldMask`): The mask.
        scale (`float`, *optional*): Factor of the scores; `head_dim ** -0.5` by default.
        softcap (`float`, *optional*, defaults to 0.0): Scores become `softcap * tanh(score / softcap)`; 0 for none.
        window (`int`, *optional*, defaults to 0): The layer's sliding window in tokens; 0 for none.
        sinks (`torch.Tensor` of shape `[heads]`, *optional*):
            An additional logit per head, which takes part in the softmax but has no value.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The output, of the shape of `query`, and the log-sum-exp of each query
        `[batch, heads, query_length]` (natural logarithm, with the sink). A query without visible keys gets 0 and
        `-inf` (the sink's logit if there are sinks).
    """
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
    Contribution of these keys to the gradients of [`reference_attention`], without autograd.

    `out` and `lse` may result from more keys than `key` contains; the gradients of several calls with different keys
    then add up. The gradient of the sinks depends on `out` and `lse` only.

    Args:
        grad_out (`torch.Tensor` of shape `[batch, heads, query_length, head_dim]`): Gradient of the output.
        out, lse (`torch.Tensor`): Outputs of the forward pass.
        query, key, value, mask, scale, softcap, window, sinks: As in the forward pass.

    Returns:
        `tuple`: Gradients like `query`, `key`, `value` and `sinks` (`None` without sinks).
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
    """
    Gradient of the sinks, which take part in the softmax but have no value.

    Args:
        delta (`torch.Tensor` of shape `[batch, heads, query_length]`): Sum of output times gradient for each query.
        lse (`torch.Tensor` of shape `[batch, heads, query_length]`): Log-sum-exp of each query, with the sink.
        sinks (`torch.Tensor` of shape `[heads]`): The sinks' logits.

    Returns:
        `torch.Tensor`: Like `sinks`.
    """
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
    """
    The softmax of scores whose log-sum-exp is known; 0 for queries without visible keys.

    Args:
        scores (`torch.Tensor` of shape `[..., rows, keys]`): Scores, -inf for invisible pairs.
        lse (`torch.Tensor` of shape `[..., rows]`): Log-sum-exp of each query.

    Returns:
        `torch.Tensor`: Of the shape of `scores`.
    """
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])


def _for_each_query_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values, repeated for each query head that reads them."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def last_dim_dense(tensor: Tensor) -> Tensor:
    """The tensor with a last stride of 1, as the kernels need it: copied if its columns have gaps or are expanded."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
