"""
Samples of a row whose tokens are distributed over ranks, for layers that carry a state from token to token.

Each sample goes whole to one rank, which computes it as if it were alone, and its results go back to the ranks of its
tokens: exact for any such layer. Samples are assigned by their tokens, the longest first, and where that costs no
balance to the rank that has most of them already.

Letters of shapes: T tokens of the whole row, R ranks, L tokens of a rank, S samples, N tokens that a rank computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .bitfield_attention.words import decode_words
from .row_exchange import RowExchange, layout_of


@dataclass(frozen=True, eq=False)
class _Exchange:
    """What one rank sends and receives."""

    lengths: list[int]  # of the samples that this rank computes
    token: Tensor  # int64, the tokens of this rank in the order in which they are sent
    sent: list[int]  # numbers of tokens by rank
    received: list[int]
    place: Tensor  # int64 [N], for each token of the samples its index among those that arrive


@dataclass(frozen=True, eq=False)
class SharedSamples:
    """The samples of a row, and the ranks that share its tokens."""

    words: Tensor  # int64 [1, T] mask words of the row
    order: Tensor  # int64 [R, L], index in the row of each token of each rank; -1 for padding
    rank: int
    group: Any  # `torch.distributed.ProcessGroup` of the ranks

    @cached_property
    def exchange(self) -> _Exchange:
        """What this rank sends and receives; computed once for all layers."""
        order, segments = self.order.cpu().numpy(), decode_words(self.words[0]).segment.cpu().numpy()
        begins = np.diff(segments, prepend=-1) != 0
        sample = np.where(order < 0, -1, np.where(segments > 0, begins.cumsum() - 1, -1)[order])  # of each token
        num_samples = int(begins.sum())
        counts = np.stack([np.bincount(own[own >= 0], minlength=num_samples) for own in sample])
        owner = sample_owners(counts)
        targets = np.where(sample < 0, -1, owner[sample])
        rows = [[np.flatnonzero(own == target) for target in range(len(order))] for own in targets]
        token = np.concatenate(rows[self.rank])
        arrived = np.concatenate([order[source][rows[source][self.rank]] for source in range(len(order))])
        lengths = counts.sum(0)[(owner == self.rank) & (counts.sum(0) > 0)].tolist()
        return _Exchange(
            lengths,
            torch.from_numpy(token),
            [len(to) for to in rows[self.rank]],
            [len(of[self.rank]) for of in rows],
            torch.from_numpy(np.argsort(arrived, kind="stable")),
        )

    @torch.compiler.disable(reason="ranks send as many tokens as their samples have, which no graph holds")
    def compute(self, function: Callable[..., Any], values: Any, has_backward: bool) -> Any:
        """
        Calls a function with the tokens of whole samples in place of those of this rank, `[1, N, ...]` for
        `[1, L, ...]`, and their lengths. Collective.

        Args:
            function (`Callable`): Takes the lengths and the values; returns a tensor `[1, N, ...]`, or a tuple that
                begins with one. A rank without samples calls it with one token, whose result has no effect.
            values (*pytree*): Among them tensors of the tokens of this rank.
            has_backward (`bool`): Whether some rank runs a backward, so that all have to.
        """
        exchange, num_tokens = self.exchange, self.order.shape[1]
        leaves, structure = tree_flatten(values)
        places = [i for i, v in enumerate(leaves) if isinstance(v, Tensor) and v.shape[:2] == (1, num_tokens)]
        own, device = [leaves[i][0].flatten(1) if leaves[i].dim() > 2 else leaves[i].T for i in places], None
        device = own[0].device
        token, place = exchange.token.to(device), exchange.place.to(device)
        anchor = torch.zeros(0, device=device, requires_grad=True) if has_backward else None
        sent = [tensor[token] for tensor in own]
        arrived = RowExchange.apply(anchor, self.group, exchange.sent, exchange.received, layout_of(own), *sent)
        for i, tensor in zip(places, arrived, strict=True):  # type: ignore[arg-type]
            whole = tensor[place]
            if not len(place):
                whole = torch.cat([whole, whole.new_zeros(1, whole.shape[1])])
            leaves[i] = whole.unflatten(1, leaves[i].shape[2:])[None] if leaves[i].dim() > 2 else whole.T
        result = function(exchange.lengths or [1], tree_unflatten(leaves, structure))
        rows, others = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
        back = rows[0, : len(place)].flatten(1)
        back = torch.empty_like(back).index_copy(0, place, back)
        (returned,) = RowExchange.apply(None, self.group, exchange.received, exchange.sent, layout_of([back]), back)  # type: ignore[misc]
        whole = returned.new_zeros(num_tokens, returned.shape[1]).index_copy(0, token, returned)
        whole = whole.unflatten(1, rows.shape[2:])[None]
        return whole if others is None else (whole, *others)


def sample_owners(counts: NDArray) -> NDArray:
    """
    The rank of each sample `[S]`, from the tokens of each on each rank `[R, S]`: the longest samples first to the rank
    with the fewest tokens; where no rank gets more than so, to the rank that has most of a sample's tokens.
    """
    lengths = counts.sum(axis=0)
    longest_first = np.argsort(-lengths, kind="stable").tolist()
    loads, even, owner = np.zeros(len(counts), np.int64), *(np.zeros(counts.shape[1], np.int64) for _ in range(2))
    for sample in longest_first:
        even[sample] = loads.argmin()
        loads[even[sample]] += lengths[sample]
    room = np.full(len(counts), loads.max())
    for sample in longest_first:
        held = np.where(room >= lengths[sample], counts[:, sample], -1)
        owner[sample] = np.where(held == held.max(), room, -1).argmax()
        room[owner[sample]] -= lengths[sample]
    return owner if room.min() >= 0 else even
