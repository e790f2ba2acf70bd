"""
Bitfield attention of one row whose tokens are distributed over a group of ranks (context parallelism).

Keys and values are gathered on all ranks, and their gradients returned, a few kv heads at a time, while another group
of heads is computed. The tokens of a shard may be in any order: the kernels read the position of each token from the
mask, so that the concatenated shards of all ranks are only another order of the keys.

Letters of shapes: T tokens of the whole row, R ranks, L tokens of a rank, S tokens that a rank sends, K keys, h kv
heads that are gathered together, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._device import to_device
from ..shared_samples import SharedSamples
from .attention import check_states
from .builders import in_chunks
from .dispatch import attention_backward, attention_forward, default_backend
from .words import BitfieldMask

HEADS_PER_GATHER = 2  # fewer overlap more communication, but the kernel of one head leaves a GPU partly idle


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """One rank's shard of a packed row, built by [`shard_sequence`]."""

    # words and positions of this rank's tokens [1, L], and of the gathered keys [1, K]: the tokens that each rank
    # sends, in the order of the ranks, preceded by this rank's tokens if only some tokens are sent
    mask: BitfieldMask
    order: Tensor  # int64 [R, L], index in the whole row of each token of each rank; -1 for padding
    num_tokens: int  # T, of the whole row
    rank: int  # in `group`
    group: Any  # `torch.distributed.ProcessGroup` of the ranks that share the row
    samples: SharedSamples  # for layers that carry a state along the row
    keys: Tensor  # int64 [K], index in the whole row of each gathered key; -1 for padding, and for what is there twice
    sent: Tensor | None = None  # int64 [S], the tokens that this rank sends to the others; all when left out
    heads_per_gather: int = HEADS_PER_GATHER  # kv heads that are gathered together; the same on every rank
    # Whether some rank runs the backward of attention, although the inputs of this rank may need no gradient; for
    # example if only encoders are trained and some ranks have none of their features. This rank then takes part in it.
    has_backward: bool = False

    @property
    def words(self) -> Tensor:
        """The words of this rank's tokens, int64 `[1, L]`."""
        return self.mask.query_words

    @property
    def positions(self) -> Tensor:
        """The positions of this rank's tokens in the whole row, int32 `[1, L]`."""
        return self.mask.query_positions

    def in_chunks(self, chunk: int) -> SequenceShard:
        """The shard of layers whose tokens see no further back than their chunk of a sample; made once for all."""
        known: dict[int, SequenceShard] = self.__dict__.setdefault("_in_chunks", {})
        if chunk not in known:
            row = in_chunks(self.samples.words, chunk)
            own, keys = (_words_at(row, tokens.to(row.device)) for tokens in (self.order[self.rank], self.keys))
            own, keys = own.to(self.words.device), keys.to(self.words.device)
            known[chunk] = replace(self, mask=replace(self.mask, query_words=own, key_words=keys))
        return known[chunk]

    @property
    def num_ranks(self) -> int:
        """Ranks that share the row."""
        return self.order.shape[0]

    @property
    def num_sent(self) -> int:
        """S, the number of tokens that each rank sends."""
        return self.order.shape[1] if self.sent is None else len(self.sent)

    def to(self, device: torch.device) -> SequenceShard:
        """The shard for attention on a device."""
        mask, order, sent = to_device((self.mask.tensors, self.order, self.sent), device)
        return replace(self, mask=BitfieldMask(*mask), order=order, sent=sent)

    def take(self, tensor: Tensor, dim: int = 1, padding: float = 0) -> Tensor:
        """
        Takes this rank's tokens of a tensor of the whole row.

        Args:
            tensor (`torch.Tensor`): `num_tokens` long along `dim`; the result is L long.
            dim (`int`, *optional*, defaults to 1): The dimension of the tokens.
            padding (`float`, *optional*, defaults to 0): Value for padding, such as -100 for labels.

        Raises:
            `ValueError`: If the tensor has another number of tokens.
        """
        if tensor.shape[dim] != self.num_tokens:
            raise ValueError(
                f"the tensor has {tensor.shape[dim]} tokens along dimension {dim} and the row that was cut has "
                f"{self.num_tokens}. Give a tensor of the whole row, or the right `dim`."
            )
        own = self.order[self.rank].to(tensor.device)
        rows = tensor.index_select(dim, own.clamp_min(0))
        shape = [1] * tensor.dim()
        shape[dim] = -1
        return rows.masked_fill((own < 0).view(shape), padding)

    @torch.no_grad()
    def gather_tokens(self, tensor: Tensor, dim: int = 1, padding: float = 0) -> Tensor:
        """
        Gathers the whole row from all ranks' tokens, without gradients: the inverse of `take`. Collective.
        `padding` is the value for tokens that no rank holds.
        """
        rows = tensor.movedim(dim, 0).contiguous()
        everyone = rows
        if self.num_ranks > 1:
            everyone = rows.new_empty(self.num_ranks * rows.shape[0], *rows.shape[1:])
            _all_gather(everyone, rows, self.group).wait()
        order = self.order.flatten().to(tensor.device)
        whole = rows.new_full((self.num_tokens, *rows.shape[1:]), padding)
        whole[order[order >= 0]] = everyone[order >= 0]
        return whole.movedim(0, dim)


def shard_sequence(
    words: Tensor,
    order: Any,
    rank: int,
    group: Any,
    *,
    positions: Any = None,
    gathered: Any = None,
    block: int = 128,
    num_ranks: int | None = None,
    heads_per_gather: int = HEADS_PER_GATHER,
) -> SequenceShard:
    """
    Returns the shard of a packed row that one rank holds, for [`context_parallel_attention`].

    Args:
        words (`torch.Tensor` of shape `[1, T]`): int64 mask words of the whole row; the shard is on their device.
        order (array of `R * L` integers):
            Index of each token in the whole row, rank by rank; -1 for padding. The same on every rank.
        rank (`int`): This rank in `group`.
        group (`torch.distributed.ProcessGroup`): The ranks that share the row.
        positions (array of `R * L` integers, *optional*):
            The positions of the tokens of `order`, if the samples were rearranged within the row; distances within a
            sample do not change, and no two tokens have the same position. By default the positions in the row.
        gathered (array of shape `[R, n]`, *optional*):
            The blocks of each rank's tokens, from the rank's first token, that the other ranks need; every rank sends
            equally many. All by default.
        block (`int`, *optional*, defaults to 128): Tokens of a block of `gathered`.
        num_ranks (`int`, *optional*): R; by default the size of `group`.
        heads_per_gather (`int`, *optional*, defaults to 2): Kv heads gathered together; the same on every rank.

    Raises:
        `ValueError`: If the words are not one row, or the order does not contain each of their tokens once, in shards
            of equal length.
    """
    if words.dim() != 2 or words.shape[0] != 1:
        raise ValueError(
            f"`words` has shape {tuple(words.shape)}; one row `[1, length]` is cut over the ranks. Pack the samples "
            "into one row."
        )
    if heads_per_gather < 1:
        raise ValueError(f"`heads_per_gather` is {heads_per_gather}; it must be at least 1. Use 2.")
    num_ranks = dist.get_world_size(group) if num_ranks is None else num_ranks
    order = torch.as_tensor(order, dtype=torch.int64, device=words.device)
    _check_order(order, words, num_ranks)
    order = order.view(num_ranks, -1)
    if positions is None:
        row_positions = _places(order)
    else:
        row_positions = torch.as_tensor(positions, device=words.device).to(torch.int32).view_as(order)
    sent, keys, key_positions = None, order.flatten(), row_positions.flatten()
    if gathered is not None or num_ranks == 1:
        rows = order.new_empty(1, 0) if num_ranks == 1 else _rows_of_blocks(gathered, block, order)
        if rows.shape[1] < order.shape[1]:
            sent = rows[rank]
            of_ranks = order.gather(1, rows)
            of_ranks[rank] = -1  # a key counts once: this rank's own tokens are in front already
            keys = torch.cat([order[rank], of_ranks.flatten()])
            key_positions = torch.cat([row_positions[rank], row_positions.gather(1, rows).flatten()])
    own_words, key_words = (_words_at(words, tokens) for tokens in (order[rank], keys))
    mask = BitfieldMask(own_words, row_positions[rank][None], key_words, key_positions[None])
    samples = SharedSamples(words, order, rank, group)
    return SequenceShard(mask, order, words.shape[1], rank, group, samples, keys, sent, heads_per_gather)


def _words_at(words: Tensor, tokens: Tensor) -> Tensor:
    """The words `[1, n]` of some tokens of a row, 0 for those that are -1."""
    return torch.where(tokens >= 0, words[0][tokens.clamp_min(0)], 0)[None]


def _check_order(order: Tensor, words: Tensor, num_ranks: int) -> None:
    """Checks that every token that is not padding is in the order once, and that ranks get equally many tokens."""
    if order.dim() != 1 or len(order) % num_ranks:
        raise ValueError(
            f"`order` has shape {tuple(order.shape)}, which {num_ranks} ranks cannot share equally. Pad it with -1."
        )
    length = words.shape[1]
    if len(order) and not (int(order.min()) >= -1 and int(order.max()) < length):
        raise ValueError(
            f"`order` names tokens from {int(order.min())} to {int(order.max())} and the row has {length}. Use 0 to "
            f"{length - 1}, and -1 for padding."
        )
    count = torch.bincount(order[order >= 0], minlength=length)
    wrong = (count > 1) | ((count == 0) & (words[0] != 0))
    if wrong.any():
        token = int(wrong.nonzero()[0])
        raise ValueError(f"`order` holds token {token} {int(count[token])} times. Hold each token once.")


def _places(order: Tensor) -> Tensor:
    """Positions, int32: padding continues from the token before it, so that blocks remain runs of positions."""
    rows = torch.arange(order.shape[1], device=order.device).expand_as(order)
    last = torch.where(order >= 0, rows, -1).cummax(dim=1).values
    start = torch.where(last >= 0, order.gather(1, last.clamp_min(0)) - last, 0)
    return (start + rows).to(torch.int32)


def _rows_of_blocks(blocks: Any, block: int, order: Tensor) -> Tensor:
    """Tokens of the listed blocks of each rank, int64 `[R, S]`."""
    blocks = torch.as_tensor(blocks, dtype=torch.int64, device=order.device).view(order.shape[0], -1)
    num_blocks = order.shape[1] // block
    if order.shape[1] % block or (blocks.numel() and not (int(blocks.min()) >= 0 and int(blocks.max()) < num_blocks)):
        raise ValueError(
            f"`gathered` names blocks {blocks.flatten().tolist()} of shards of {order.shape[1]} rows in blocks of "
            f"{block}. Cut shards into whole blocks and name those from 0 to {num_blocks - 1}."
        )
    return (blocks[..., None] * block + torch.arange(block, device=order.device)).flatten(1)


@torch.compiler.disable(reason="its collectives run while it computes, which no graph holds")
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard: SequenceShard,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """
    Bitfield attention of this rank's queries to the keys of all ranks.

    Collective: all ranks of the group call it, forward and backward, in the same order. Gradients of `query`, `key`
    and `value` are those of the sum of all ranks' losses. The gradient of `sinks` is this rank's partial gradient, as
    for any other parameter.

    Args:
        query (`torch.Tensor` of shape `[1, heads, L, head_dim]`): Queries of this rank's tokens.
        key, value (`torch.Tensor` of shape `[1, kv_heads, L, head_dim]`): Of this rank's tokens.
        shard (`SequenceShard`): This rank's shard of the row.
        scale, softcap, window, sinks, return_lse: See [`bitfield_attention`].

    Returns:
        `torch.Tensor` or `tuple[torch.Tensor, torch.Tensor]`: The output, of the shape of `query`, and if requested
        the log-sum-exp `[1, heads, L]`, which has no gradient.

    Raises:
        `ValueError`: If the tensors do not have the tokens of the shard.
    """
    _check_rows(query, key, value, shard.words.shape[1])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if shard.has_backward and torch.is_grad_enabled() and not query.requires_grad:
        query = query.detach().requires_grad_()
    out, lse = _Attention.apply(query, key, value, sinks, shard, (scale, softcap, window))
    return (out, lse) if return_lse else out


def _check_rows(query: Tensor, key: Tensor, value: Tensor, num_rows: int) -> None:
    """Raises `ValueError` for tensors that do not match the shard or each other."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4 or tensor.shape[0] != 1 or tensor.shape[2] != num_rows:
            raise ValueError(
                f"`{name}` has shape {tuple(tensor.shape)} and the shard is one row of {num_rows} tokens: "
                f"`[1, heads, {num_rows}, head_dim]`. Give the model this rank's tokens only."
            )
    check_states(query, key, value, default_backend(query))


class _Attention(torch.autograd.Function):
    """Attention of one rank; to save memory, the backward gathers keys and values again."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, shard, options):  # type: ignore[override]
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for heads, key_rows, value_rows in _gather(key, value, shard):
            of = _query_heads(heads, query, key)
            sink = None if sinks is None else sinks[of]
            out[:, of], lse[:, of] = attention_forward(query[:, of], key_rows, value_rows, shard.mask, *options, sink)
        ctx.shard, ctx.options = shard, options
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out, _):  # type: ignore[override]
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        grad_sinks = None if sinks is None else torch.empty_like(sinks)
        returned = _GradientReturn(key, value, ctx.shard)
        for heads, key_rows, value_rows in _gather(key, value, ctx.shard):
            of = _query_heads(heads, query, key)
            saved = (query[:, of], key_rows, value_rows, out[:, of], lse[:, of])
            sink = None if sinks is None else sinks[of]
            grads = attention_backward(grad_out[:, of], *saved, ctx.shard.mask, *ctx.options, sink)
            grad_query[:, of] = grads[0]
            if grad_sinks is not None:
                grad_sinks[of] = grads[3]
            returned.send(heads, grads[1], grads[2])
        return grad_query, *returned.finish(), grad_sinks, None, None


def _query_heads(kv_heads: slice, query: Tensor, key: Tensor) -> slice:
    """The query heads of a range of kv heads."""
    ratio = query.shape[1] // key.shape[1]
    return slice(kv_heads.start * ratio, kv_heads.stop * ratio)


def _head_groups(num_heads: int, shard: SequenceShard) -> list[slice]:
    """Ranges of kv heads that are gathered and computed together; one range without communication."""
    size = shard.heads_per_gather if shard.num_sent else num_heads
    return [slice(start, min(start + size, num_heads)) for start in range(0, num_heads, size)]


def _gather(key: Tensor, value: Tensor, shard: SequenceShard) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields each group of kv heads with all its keys and values `[1, h, K, D]`, while the next group is gathered."""
    groups = _head_groups(key.shape[1], shard)
    if not shard.num_sent:
        yield from ((heads, key[:, heads], value[:, heads]) for heads in groups)
        return
    num_own = 0 if shard.sent is None else key.shape[2]
    num_rows = num_own + shard.num_ranks * shard.num_sent
    first = num_own + shard.rank * shard.num_sent  # all ranks expect the tokens of this rank here
    width = groups[0].stop * key.shape[3]
    buffers = [key.new_empty(num_rows * 2 * width) for _ in groups[:2]]

    # A collective starts after the work launched before it on the current stream, and work launched after `wait`
    # starts after the collective, both on a GPU and on the CPU, so the order of the calls is that of execution. Gather
    # i + 1 starts once keys and values are computed, which it sends, and the kernel of group i - 1 is launched, which
    # reads the buffer to be written; the kernel of group i comes after the wait for gather i, whose buffer it reads.
    def start(i: int) -> tuple[Tensor, Any]:
        num_heads = groups[i].stop - groups[i].start
        shape = (num_rows, 2, num_heads, key.shape[3])
        rows = buffers[i % 2][: num_rows * 2 * num_heads * key.shape[3]].view(shape)
        own = rows[first : first + shard.num_sent]
        for j, tensor in enumerate((key, value)):
            of_rank = tensor[0, groups[i]].transpose(0, 1)
            rows[:num_own, j] = of_rank[:num_own]
            own[:, j] = of_rank if shard.sent is None else of_rank[shard.sent]
        return rows, _all_gather(rows[num_own:], own, shard.group)

    travelling = start(0)
    for i, heads in enumerate(groups):
        rows, work = travelling
        if i + 1 < len(groups):
            # before the kernel of group i, so that they overlap
            travelling = start(i + 1)
        work.wait()
        yield heads, rows[:, 0].transpose(0, 1)[None], rows[:, 1].transpose(0, 1)[None]


class _GradientReturn:
    """Sends gradients of keys and values to their owners, one group of heads at a time, while the next is computed."""

    def __init__(self, key: Tensor, value: Tensor, shard: SequenceShard):
        self.shard = shard
        self.grads = torch.empty_like(key), torch.empty_like(value)
        self.travelling: tuple | None = None

    def send(self, heads: slice, grad_key: Tensor, grad_value: Tensor) -> None:
        """Starts sending the gradients of one group of heads, `[1, h, K, D]` each."""
        num_sent, num_ranks = self.shard.num_sent, self.shard.num_ranks
        num_own = grad_key.shape[2] - num_ranks * num_sent
        own = [grad[:, :, :num_own] for grad in (grad_key, grad_value)]
        parts = received = work = None
        if num_sent:
            parts = grad_key.new_empty(num_ranks * num_sent, 2, *grad_key.shape[1:2], grad_key.shape[3])
            for j, grad in enumerate((grad_key, grad_value)):
                parts[:, j] = grad[0, :, num_own:].transpose(0, 1)
            received = torch.empty_like(parts)
            work = _all_to_all(received, parts, self.shard.group)
        previous, self.travelling = self.travelling, (heads, own, parts, received, work)
        self._receive(previous)

    # In the order of the ranks and in float32 or float64: the sum does not depend on the backend, and half precision
    # is rounded once per partial gradient and once at the end.
    def _receive(self, travelling: tuple | None) -> None:
        """Sums the received gradients of one group of heads."""
        if travelling is None:
            return
        heads, own, _, received, work = travelling
        if received is not None:
            work.wait()
            wide = torch.promote_types(received.dtype, torch.float32)
            sums = received.view(self.shard.num_ranks, -1, *received.shape[1:]).sum(0, dtype=wide)
        for j, grad in enumerate(self.grads):
            target = grad[0, heads].transpose(0, 1)
            if received is None:
                target.copy_(own[j][0].transpose(0, 1))
            elif self.shard.sent is None:
                target.copy_(sums[:, j])
            else:
                target.copy_(own[j][0].transpose(0, 1).to(wide).index_add(0, self.shard.sent, sums[:, j]))

    def finish(self) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's keys and values."""
        self._receive(self.travelling)
        return self.grads


def _all_gather(output: Tensor, own: Tensor, group: Any) -> Any:
    """Starts to gather each rank's `own` `[n, ...]` into `output` `[R * n, ...]`; `own` may be a view of `output`."""
    return dist.all_gather_single(output, own, group=group, async_op=True)


def _all_to_all(output: Tensor, parts: Tensor, group: Any) -> Any:
    """Starts to send slice j of `parts` `[R * n, ...]` to rank j, and to receive slice i of `output` from rank i."""
    return dist.all_to_all_single(output, parts, group=group, async_op=True)
