"""
Times of collectives as NCCL runs them: the latency of each step, and the bytes that cross a link.

NCCL all-reduces along a ring or double binary trees, and gathers and scatters along a ring: it has no tree for these
(NCCL, `src/graph/tuning.cc`, with the latencies and shares of bandwidth below).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .devices import Hardware
from .layers import Polynomial

# Simple, LL128 and LL: latency of a step within and between nodes, and bandwidth, relative to the first
_PROTOCOLS = ((1.0, 1.0, 1.0), (0.56, 0.42, 0.92), (0.25, 0.28, 0.25))
# latency of a step of PAT relative to one of a ring, its work for each rank, and its relative bandwidth
_PAT_STEP, _PAT_RANK_US, _PAT_RATE = 1 / 3.5, 2.8, 0.75


@dataclass(frozen=True)
class CollectiveTime:
    """Time of a collective of some ranks: that of the fastest way for a number of bytes."""

    ways: tuple[tuple[float, float], ...] = ((0.0, 0.0),)  # milliseconds per byte, and latency in milliseconds

    def __call__(self, num_bytes: float) -> float:
        """Milliseconds for a number of bytes."""
        return min(rate * num_bytes + latency_ms for rate, latency_ms in self.ways)

    def of_tokens(self, token_bytes: float) -> Polynomial:
        """Milliseconds for bytes per token, in tokens, of the way that is the fastest for many."""
        rate, latency_ms = min(self.ways)
        return Polynomial(0.0, rate * token_bytes, latency_ms)


Collective = Callable[[Hardware, Sequence[int]], CollectiveTime]


def all_reduce(device: Hardware, ranks: Sequence[int]) -> CollectiveTime:
    """All-reduce: `2 log2(n)` messages in sequence, and the bytes that a ring sends over each link."""
    count = len(ranks)
    if count < 2:
        return CollectiveTime()
    # double binary trees have both terms, and the faster of ring and tree comes close to them
    latency_ms = 2 * (count - 1).bit_length() * device.step_latency_us(ranks) / 1e3
    return CollectiveTime(((2 * _byte_ms(device, ranks), latency_ms),))


def all_gather(device: Hardware, ranks: Sequence[int]) -> CollectiveTime:
    """All-gather, of the bytes of all shards together; a reduce-scatter takes the same time."""
    count, members = len(ranks), Counter(rank // device.node_size for rank in ranks)
    if count < 2:
        return CollectiveTime()
    byte_ms, num_nodes = _byte_ms(device, ranks), len(members)
    # a ring has `n - 1` steps, of which as many as there are nodes but one are between nodes
    within_us = (count - num_nodes) * device.step_latency_us(ranks[:1])
    step_us = device.step_latency_us(ranks)
    between_us = (num_nodes - 1) * step_us
    ways = [
        (byte_ms / rate, (within * within_us + between * between_us) / 1e3)
        for within, between, rate in (_PROTOCOLS if device.has_nccl else _PROTOCOLS[:1])
    ]
    # PAT (NCCL 2.23; "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", arXiv 2506.20252)
    # takes a logarithmic number of steps, but only with one rank on each node
    if device.has_nccl and num_nodes == count:
        steps_us = (num_nodes - 1).bit_length() * _PAT_STEP * step_us
        ways.append((byte_ms / _PAT_RATE, (steps_us + count * _PAT_RANK_US) / 1e3))
    return CollectiveTime(tuple(ways))


def all_to_all(device: Hardware, ranks: Sequence[int]) -> CollectiveTime:
    """All-to-all, of the bytes that each rank has for all: it sends those of every other, all at the same time."""
    if len(ranks) < 2:
        return CollectiveTime()
    return CollectiveTime(((_byte_ms(device, ranks), device.step_latency_us(ranks) / 1e3),))


def _byte_ms(device: Hardware, ranks: Sequence[int]) -> float:
    """Milliseconds for each byte of which every rank but one sends its share over a link."""
    return (len(ranks) - 1) / len(ranks) / device.link_bytes_per_ms(ranks)


def slowest(
    collective: Collective,
    device: Hardware,
    num_bytes: float,
    groups: Iterable[Sequence[int]],
) -> float:
    """Milliseconds of the slowest of several groups of ranks that communicate at the same time; 0 without groups."""
    return max((collective(device, ranks)(num_bytes) for ranks in groups), default=0.0)


def longer_ms(compute_ms: NDArray, beside_ms: NDArray, overlap_efficiency: float) -> NDArray:
    """Time that communication adds to the computation beside it."""
    return np.maximum((1 - overlap_efficiency) * beside_ms, beside_ms - compute_ms)
