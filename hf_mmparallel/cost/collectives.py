"""Times of collectives: the latency of each step of a tree, and the bandwidth of a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .devices import Hardware
from .layers import Polynomial


def all_reduce(device: Hardware, num_bytes: float, ranks: Sequence[int]) -> Polynomial:
    """
    All-reduce: `2 log2(n)` messages in sequence, and the bytes that a ring sends over each link. NCCL's double binary
    trees have both terms, and the faster of ring and tree comes close to this.

    Args:
        device (`Hardware`): The device of each rank.
        num_bytes (`float`): Bytes of the reduced tensor, per token.
        ranks (`Sequence[int]`): The ranks.

    Returns:
        `Polynomial`: Milliseconds, in tokens.
    """
    half = all_gather(device, num_bytes, ranks)
    return half + half


def all_gather(device: Hardware, num_bytes: float, ranks: Sequence[int]) -> Polynomial:
    """
    All-gather of `num_bytes` in total; a reduce-scatter takes the same time.

    Args:
        device (`Hardware`): The device of each rank.
        num_bytes (`float`): Bytes of all shards together, per token.
        ranks (`Sequence[int]`): The ranks.

    Returns:
        `Polynomial`: Milliseconds, in tokens.
    """
    count = len(ranks)
    if count < 2:
        return Polynomial()
    latency_ms = (count - 1).bit_length() * device.step_latency_us(ranks) / 1e3
    travels = (count - 1) / count * num_bytes / device.link_bytes_per_ms(ranks)
    return Polynomial(0.0, travels, latency_ms)


def slowest(
    collective: Callable[[Hardware, float, Sequence[int]], Polynomial],
    device: Hardware,
    num_bytes: float,
    groups: Iterable[Sequence[int]],
) -> float:
    """Milliseconds of the slowest of several groups of ranks that communicate at the same time; 0 without groups."""
    return max((collective(device, num_bytes, ranks)(1.0, 0.0) for ranks in groups), default=0.0)
