"""What collectives take: latency for each step of a tree, bandwidth of a ring."""

from __future__ import annotations

from collections.abc import Sequence

from .devices import Hardware
from .layers import Polynomial


def all_reduce(device: Hardware, num_bytes: float, ranks: Sequence[int]) -> Polynomial:
    """
    A sum over ranks, which all of them get: `2 log2(n)` messages one after the other, and the bytes that a ring sends
    on each link. NCCL's double binary trees have both, and the faster of ring and tree is near it.

    Args:
        device (`Hardware`): What each rank is.
        num_bytes (`float`): Of what is summed, for a token.
        ranks (`Sequence[int]`): The ranks.

    Returns:
        `Polynomial`: Milliseconds, in tokens.
    """
    half = all_gather(device, num_bytes, ranks)
    return half + half


def all_gather(device: Hardware, num_bytes: float, ranks: Sequence[int]) -> Polynomial:
    """
    The parts that ranks have of `num_bytes`, put together on each of them; or added up, each rank one part.

    Args:
        device (`Hardware`): What each rank is.
        num_bytes (`float`): Of all parts, for a token.
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
