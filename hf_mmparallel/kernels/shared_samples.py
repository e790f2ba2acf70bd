"""
Samples of a packed row in layers that carry a state from token to token: as padded batches of whole samples, and over
the ranks that share the tokens of the row.

Letters of shapes: T tokens of the whole row, R ranks, L tokens of a rank, S samples, N tokens that a rank computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .._device import to_device
from .bitfield_attention.words import decode_words
from .row_exchange import RowExchange, layout_of


@dataclass(frozen=True, eq=False)
class _Exchange:
    """What one rank sends and receives of whole samples."""

    lengths: list[int]  # of the samples that this rank computes
    token: Tensor  # int64, the tokens of this rank in the order in which they are sent
    sent: list[int]  # numbers of tokens by rank
    received: list[int]
    place: Tensor  # int64 [N], for each token of the samples its index among those that arrive


@dataclass(frozen=True, eq=False)
class _Spread:
    """What of a row is whole on this rank, and what is on several ranks."""

    own: Tensor  # int64, the tokens of this rank of samples that no other has a part of, in the order of the row
    own_lengths: list[int]  # of these samples
    sent: Tensor  # int64, the tokens of this rank of samples on several ranks, in the order of the row
    counts: list[int]  # of such tokens by rank
    place: Tensor  # int64 [N], for each token of the samples on several ranks its index among those of all ranks
    lengths: list[int]  # of these samples


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of tokens that follow each other in a sample on this rank, each behind the tokens before it."""

    token: Tensor  # int64, the tokens of this rank that are in samples, in the order of the row
    row: Tensor  # int64, what the runs consist of: this rank's L tokens, then those that arrive, then a zero
    place: Tensor  # int64, for each of `token` its index in the runs
    wanted: Tensor  # int64, the tokens of this rank that are sent, in the order of the ranks
    sent: list[int]  # numbers of tokens by rank
    received: list[int]
    is_complete: bool  # whether no rank needs a token of another


_Indices = TypeVar("_Indices", _Exchange, _Spread, _Runs)


@dataclass(frozen=True, eq=False)
class SharedSamples:
    """The samples of a row, and the ranks that share its tokens."""

    words: Tensor  # int64 [1, T] mask words of the row
    order: Tensor  # int64 [R, L], index in the row of each token of each rank; -1 for padding
    rank: int
    group: Any  # `torch.distributed.ProcessGroup` of the ranks
    _known: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def _places(self) -> NDArray:
        """[R, L], `order` without the tokens that are in no sample."""
        order = self.order.cpu().numpy()
        return np.where((order >= 0) & (self._segments[order] > 0), order, -1)

    @cached_property
    def _segments(self) -> NDArray:
        return decode_words(self.words[0]).segment.cpu().numpy()

    @cached_property
    def _samples(self) -> NDArray:
        """[T], the sample of each token."""
        return (np.diff(self._segments, prepend=-1) != 0).cumsum() - 1

    @cached_property
    def _counts(self) -> NDArray:
        """[R, S], the tokens of each sample on each rank."""
        num_samples = int(self._samples[-1]) + 1
        return np.stack([np.bincount(self._samples[own[own >= 0]], minlength=num_samples) for own in self._places])

    @cached_property
    def exchange(self) -> _Exchange:
        """What this rank sends and receives where samples are whole; computed once for all layers."""
        places, counts = self._places, self._counts
        owner = sample_owners(counts)
        targets = np.where(places < 0, -1, owner[self._samples[places]])
        rows = [[np.flatnonzero(own == target) for target in range(len(places))] for own in targets]
        arrived = np.concatenate([own[of[self.rank]] for own, of in zip(places, rows, strict=True)])
        return _Exchange(
            counts.sum(0)[(owner == self.rank) & (counts.sum(0) > 0)].tolist(),
            torch.from_numpy(np.concatenate(rows[self.rank])),
            [len(to) for to in rows[self.rank]],
            [len(of[self.rank]) for of in rows],
            torch.from_numpy(np.argsort(arrived, kind="stable")),
        )

    @cached_property
    def spread(self) -> _Spread:
        """What this rank has of samples on several ranks, and of others; computed once for all layers."""
        is_spread = (self._counts > 0).sum(0) > 1

        def tokens(rank: int, chosen: NDArray) -> NDArray:
            places = self._places[rank]
            found = np.flatnonzero((places >= 0) & chosen[self._samples[places]])
            return found[np.argsort(places[found])]

        of_ranks = [tokens(rank, is_spread) for rank in range(len(self._places))]
        arrived = np.concatenate([own[rows] for own, rows in zip(self._places, of_ranks, strict=True)])
        own = self._counts[self.rank]
        return _Spread(
            torch.from_numpy(tokens(self.rank, ~is_spread)),
            own[~is_spread & (own > 0)].tolist(),
            torch.from_numpy(of_ranks[self.rank]),
            [len(rows) for rows in of_ranks],
            torch.from_numpy(np.argsort(arrived)),
            self._counts.sum(0)[is_spread].tolist(),
        )

    def runs(self, num_before: int) -> _Runs:
        """The runs of this rank's tokens, each behind so many tokens before it; computed once for all layers."""
        if num_before not in self._known:
            self._known[num_before] = self._make_runs(num_before)
        return self._known[num_before]

    def on(self, device: torch.device, indices: _Indices) -> _Indices:
        """The indices on a device, to which they are sent once for all layers."""
        key = id(indices), device
        if key not in self._known:
            tensors = {name: value for name, value in vars(indices).items() if isinstance(value, Tensor)}
            self._known[key] = replace(indices, **to_device(tensors, device))
        return self._known[key]

    def _make_runs(self, num_before: int) -> _Runs:
        num_ranks, num_tokens = self._places.shape
        begins = np.flatnonzero(np.diff(self._samples, prepend=-1))  # of samples
        rank_of, index_of = (np.zeros(len(self._samples), np.int64) for _ in range(2))
        for rank, places in enumerate(self._places):
            index = np.flatnonzero(places >= 0)
            rank_of[places[index]], index_of[places[index]] = rank, index
        before, missing = zip(*(self._before(places, begins, num_before) for places in self._places), strict=True)
        by_source = [[np.flatnonzero(rank_of[of] == source) for source in range(num_ranks)] for of in missing]
        wanted = [index_of[of[by[self.rank]]] for of, by in zip(missing, by_source, strict=True)]
        arrival = np.argsort(np.concatenate(by_source[self.rank]))

        own = self._places[self.rank]
        tokens = np.flatnonzero(own >= 0)
        tokens = tokens[np.argsort(own[tokens])]
        starts = self._is_start(own[tokens], begins)
        place = np.arange(len(tokens)) + num_before * starts.cumsum()
        slots = place[starts][:, None] + np.arange(-num_before, 0)
        zero = num_tokens + len(arrival)
        row = np.full(len(tokens) + num_before * int(starts.sum()), zero)
        row[place], row[slots[before[self.rank]]] = tokens, num_tokens + arrival
        return _Runs(
            torch.from_numpy(tokens),
            torch.from_numpy(row if len(row) else np.array([zero])),
            torch.from_numpy(place),
            torch.from_numpy(np.concatenate(wanted)),
            [len(of) for of in wanted],
            [len(of) for of in by_source[self.rank]],
            not any(len(of) for of in missing),
        )

    @staticmethod
    def _is_start(places: NDArray, begins: NDArray) -> NDArray:
        """Whether runs begin at each of some ascending tokens of the row."""
        return (np.diff(places, prepend=-2) != 1) | np.isin(places, begins)

    def _before(self, places: NDArray, begins: NDArray, num_before: int) -> tuple[NDArray, NDArray]:
        """[runs, num_before] whether a run has tokens before it, and these tokens one after the other."""
        places = np.sort(places[places >= 0])
        starts = places[self._is_start(places, begins)]
        first = begins[np.searchsorted(begins, starts, side="right") - 1]
        tokens = starts[:, None] + np.arange(-num_before, 0)
        is_there = tokens >= first[:, None]
        return is_there, tokens[is_there]

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
        num_tokens = self.order.shape[1]
        leaves, structure = tree_flatten(values)
        places = [i for i, v in enumerate(leaves) if isinstance(v, Tensor) and v.shape[:2] == (1, num_tokens)]
        own, device = [leaves[i][0].flatten(1) if leaves[i].dim() > 2 else leaves[i].T for i in places], None
        device = own[0].device
        exchange = self.on(device, self.exchange)
        token, place = exchange.token, exchange.place
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


def in_batches(forward: Callable[..., Any], lengths: Sequence[int], values: tuple[tuple, dict[str, Any]]) -> Any:
    """What a function of rows gives for samples of some lengths, as batches padded at the end to the longest each."""
    args, kwargs = values
    hidden = args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
    shape = hidden.shape[:2]

    def is_of_tokens(value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape[:2] == shape

    def of_samples(value: Any) -> Any:
        return value.flatten(0, 1).split(lengths) if is_of_tokens(value) else value

    def batch_of(value: Any) -> Any:
        is_cut = isinstance(value, tuple) and len(value) == len(lengths) and isinstance(value[0], Tensor)
        return pad_sequence([value[index] for index in some], batch_first=True) if is_cut else value

    results: list[Tensor] = [hidden] * len(lengths)
    others: Any = None
    for some in _of_like_length(lengths):
        batch = tree_map(lambda value: batch_of(of_samples(value)), (args, kwargs))
        result = forward(*batch[0], **batch[1])
        output, others = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
        for place, index in enumerate(some):
            results[index] = output[place, : lengths[index]]
    row = torch.cat(results).unflatten(0, shape)
    return row if others is None else (row, *others)


def _of_like_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups of samples, of which the longest has less than twice the tokens of the shortest."""
    groups: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        groups[length.bit_length()].append(index)
    return [groups[size] for size in sorted(groups)]
