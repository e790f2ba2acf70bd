"""The definition of bitfield attention in plain torch: quadratic in memory, for tests and small inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from .mask import BitfieldMask
from .words import decode_words


def dense_mask(mask: BitfieldMask, window: int = 0) -> Tensor:
    """
    Which query sees which key: bool `[batch, query_length, key_length]`.

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
        mask (`BitfieldMask`): Who sees whom.
        scale (`float`, *optional*): Of the scores; `head_dim ** -0.5` when left out.
        softcap (`float`, *optional*, defaults to 0.0): Scores become `softcap * tanh(score / softcap)`; 0 for none.
        window (`int`, *optional*, defaults to 0): The layer's sliding window in tokens; 0 for none.
        sinks (`torch.Tensor` of shape `[heads]`, *optional*): One more logit per head that takes weight and gives none.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The output, of the shape of `query`, and the log-sum-exp of each row
        `[batch, heads, query_length]` (natural logarithm, with the sink). A query that sees nothing gets 0 and `-inf`
        (the sink's logit when there are sinks).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~dense_mask(mask, window)[:, None], float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return weights[..., : value.shape[-2]] @ value, lse
