"""Links between ranks, as messages and collectives over them take: inside a node, and between nodes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..cost import Hardware
from .collectives import all_gather_values, wire_device
from .timing import synchronize

_BYTES = {"cuda": 2**26, "cpu": 2**22}
"""Of a tensor by which a rate is measured."""
_LARGE = 5  # timed runs of a large tensor
_SMALL = 5  # timed rounds of small ones
_IN_ROUND = 20
_INSIDE = ("link_gb_per_s", "collective_latency_us", "message_gb_per_s", "link_latency_us")
_BETWEEN = ("node_link_gb_per_s", "node_collective_latency_us", "node_message_gb_per_s", "node_link_latency_us")
"""Fields of [`Hardware`], in the order of [`_sums`] and [`_messages`]."""


def link_constants(device: torch.device) -> dict[str, float]:
    """
    Measures the links of the ranks, which are told apart by the names of their hosts. Collective. Of several nodes,
    and of several ranks of a node, the slowest counts.

    Rates of sums are those of a ring (bus bandwidth); between nodes all ranks sum, and a rank has its share. Messages
    go in a ring of the ranks of a node, or of the ranks with the same place in each node, all at once.

    Args:
        device (`torch.device`): Of this rank.

    Returns:
        `dict[str, float]`: Fields of [`Hardware`]. What takes two ranks of a node is left out where none has two, and
        what takes two nodes where there is one.
    """
    hosts = all_gather_values(socket.gethostname(), "comparing the hosts of the ranks")
    if len(hosts) < 2:
        return {}
    nodes = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    rank, node_size = dist.get_rank(), min(map(len, nodes))
    own = next(node for node in nodes if rank in node)
    groups: list[Any] = [dist.new_group(node) for node in nodes] if len(nodes) > 1 else [None]
    group = groups[nodes.index(own)]
    found: dict[str, float | None] = {}
    if len(own) > 1:
        values = *_sums(device, group, len(own)), *_messages(device, own)
        found.update(zip(_INSIDE, values, strict=True))
    if len(nodes) > 1:
        dist.destroy_process_group(group)
        rate, latency_us = _sums(device, None, len(hosts))
        values = rate / node_size, latency_us, *_messages(device, _same_place(nodes, own.index(rank)))
        found.update(zip(_BETWEEN, values, strict=True))
    slowest = _slowest(all_gather_values(found, "comparing measured links"))
    # A sum over all ranks uses the network cards of all devices of a node.
    return slowest if len(nodes) == 1 else slowest | {"node_size": node_size, "network_cards": node_size}


def measured_links(hardware: Hardware, device: torch.device) -> Hardware:
    """
    A device with its links as they were measured. Collective. On one rank links stay what they are.

    Args:
        hardware (`Hardware`): The device, the same on all ranks.
        device (`torch.device`): Of this rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return hardware
    found = link_constants(device)
    inside = found.get("link_gb_per_s", hardware.link_gb_per_s)
    if "node_size" not in found:  # one node, to which no other one is asked for
        count = dist.get_world_size()
        found |= {"node_size": count, "network_cards": count, "node_link_gb_per_s": inside}
    return replace(hardware, **{**found, "link_gb_per_s": max(inside, found["node_link_gb_per_s"])})


def _same_place(nodes: Sequence[Sequence[int]], place: int) -> list[int]:
    """The ranks with a place in their nodes that every node has; none for places that some lack."""
    return [node[place] for node in nodes] if place < min(map(len, nodes)) else []


def _slowest(found: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """The smallest rates and the largest latencies of the ranks, as far as they have measured them."""
    slowest = {}
    for name in (*_INSIDE, *_BETWEEN):
        values = [value for own in found if (value := own.get(name)) is not None]
        if values:
            slowest[name] = max(values) if name.endswith("_us") else min(values)
    return slowest


def _sums(device: torch.device, group: Any, count: int) -> tuple[float, float]:
    """Of sums over a group: the rate of a ring in GB/s, and microseconds of a step of a tree, of which it has two."""
    values = _BYTES.get(device.type, _BYTES["cuda"]) // 4
    large, small = (torch.zeros(size, device=device) for size in (values, 1))
    seconds = min(_seconds(lambda: dist.all_reduce(large, group=group), device, _LARGE, 1))
    rate = 2 * (count - 1) / count * 4 * values / seconds / 1e9
    seconds = median(_seconds(lambda: dist.all_reduce(small, group=group), device, _SMALL, _IN_ROUND))
    return rate, 1e6 * seconds / (2 * (count - 1).bit_length())


def _messages(device: torch.device, ring: Sequence[int]) -> tuple[float | None, float | None]:
    """
    Of messages that each rank of a ring sends to the next one: the rate in GB/s, and the latency in microseconds;
    `None` on ranks that are in no ring.
    """
    if not ring:
        return None, None
    wire, place = wire_device(device), ring.index(dist.get_rank())
    target, source = ring[(place + 1) % len(ring)], ring[place - 1]
    count = _BYTES.get(wire.type, _BYTES["cuda"]) // 4

    def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
        sending = dist.P2POp(dist.isend, sent, target)
        for work in dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, received, source)]):
            work.wait()

    large, small = (torch.zeros(2, size, device=wire) for size in (count, 1))
    seconds = min(_seconds(lambda: exchange(*large), wire, _LARGE, 1))
    latency = median(_seconds(lambda: exchange(*small), wire, _SMALL, _IN_ROUND))
    return 4 * count / seconds / 1e9, 1e6 * latency


def _seconds(run: Callable[[], Any], device: torch.device, rounds: int, count: int) -> list[float]:
    """Seconds of a run in each round of so many, as often on every rank; a first round does not count."""
    times = []
    for _ in range(1 + rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            run()
        synchronize(device)
        times.append((time.perf_counter() - start) / count)
    return times[1:]
