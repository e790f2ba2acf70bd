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

from .._device import synchronize
from ..cost import Hardware
from ..world import World

# Times of what runs on a device.


def run_seconds(
    run: Callable[[], Any], device: torch.device, end: float = 0.0, least: int = 2, most: int | None = None
) -> list[float]:
    """
    Returns seconds of consecutive runs, each until the device is done, without a first, which loads libraries.

    No run beyond `least` begins after `end`, a time of `time.perf_counter`.
    """
    times: list[float] = []
    while len(times) < 1 + least or (time.perf_counter() < end and (most is None or len(times) < 1 + most)):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times[1:]


_BYTES = {"cuda": 2**26, "cpu": 2**22}  # of a tensor by which a rate is measured
_LARGE_RUNS = 5  # timed runs of a large tensor
_SMALL_ROUNDS = 5  # timed rounds of small ones
_MESSAGES_PER_ROUND = 20
_NODE_FIELDS = ("link_gb_per_s", "collective_latency_us", "message_gb_per_s", "link_latency_us")
# fields of `Hardware`, in the order of `_sums` and `_messages`
_NETWORK_FIELDS = ("node_link_gb_per_s", "node_collective_latency_us", "node_message_gb_per_s", "node_link_latency_us")


def link_constants(world: World) -> dict[str, float]:
    """
    Measures the links of the ranks in fields of [`Hardware`]. Collective.

    Of several nodes, and of several ranks of a node, the slowest counts. Rates of sums are those of a ring (bus
    bandwidth); between nodes all ranks sum, and a rank has its share. Messages go in a ring of the ranks of a node, or
    of the ranks with the same position in each node, all at once. What takes two ranks of a node is left out where
    none has two, and what takes two nodes where there is one.
    """
    hosts = world.all_gather(socket.gethostname(), "comparing the hosts of the ranks")
    if len(hosts) < 2:
        return {}
    # nodes are told apart by the names of their hosts
    nodes = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    rank, node_size = world.rank, min(map(len, nodes))
    own_node = next(node for node in nodes if rank in node)
    groups: list[Any] = [world.new_group(node) for node in nodes] if len(nodes) > 1 else [world.group]
    group = groups[nodes.index(own_node)]
    constants: dict[str, float | None] = {}
    if len(own_node) > 1:
        values = *_sums(world.device, group, len(own_node)), *_messages(world, own_node)
        constants.update(zip(_NODE_FIELDS, values, strict=True))
    if len(nodes) > 1:
        world.end_group(group)
        rate, latency_us = _sums(world.device, world.group, len(hosts))
        values = rate / node_size, latency_us, *_messages(world, _same_position(nodes, own_node.index(rank)))
        constants.update(zip(_NETWORK_FIELDS, values, strict=True))
    slowest = _slowest(world.all_gather(constants, "comparing measured links"))
    # A sum over all ranks uses the network cards of all devices of a node.
    return slowest if len(nodes) == 1 else slowest | {"node_size": node_size, "network_cards": node_size}


def measure_links(hardware: Hardware, world: World) -> Hardware:
    """Returns a device, the same on all ranks, with its links as measured; on one rank they stay. Collective."""
    if world.size == 1:
        return hardware
    found = link_constants(world)
    inside = found.get("link_gb_per_s", hardware.link_gb_per_s)
    if "node_size" not in found:  # one node: no link to others is needed
        found |= {"node_size": world.size, "network_cards": world.size, "node_link_gb_per_s": inside}
    return replace(hardware, **{**found, "link_gb_per_s": max(inside, found["node_link_gb_per_s"])})


def _same_position(nodes: Sequence[Sequence[int]], position: int) -> list[int]:
    """The ranks with a position in their nodes that every node has; none for positions that some lack."""
    return [node[position] for node in nodes] if position < min(map(len, nodes)) else []


def _slowest(found: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """The smallest rates and the largest latencies of the ranks, as far as they have measured them."""
    slowest = {}
    for name in (*_NODE_FIELDS, *_NETWORK_FIELDS):
        values = [value for own in found if (value := own.get(name)) is not None]
        if values:
            slowest[name] = max(values) if name.endswith("_us") else min(values)
    return slowest


def _sums(device: torch.device, group: Any, count: int) -> tuple[float, float]:
    """Of sums over a group: the rate of a ring in GB/s, and microseconds of a step of a tree, of which it has two."""
    values = _BYTES.get(device.type, _BYTES["cuda"]) // 4
    large, small = (torch.zeros(size, device=device) for size in (values, 1))
    seconds = min(_seconds(lambda: dist.all_reduce(large, group=group), device, _LARGE_RUNS, 1))
    rate = 2 * (count - 1) / count * 4 * values / seconds / 1e9
    seconds = median(_seconds(lambda: dist.all_reduce(small, group=group), device, _SMALL_ROUNDS, _MESSAGES_PER_ROUND))
    return rate, 1e6 * seconds / (2 * (count - 1).bit_length())


def _messages(world: World, ring: Sequence[int]) -> tuple[float | None, float | None]:
    """Measures messages to the next rank of a ring: GB/s, and latency in microseconds; `None` in no ring."""
    if not ring:
        return None, None
    wire, position = world.wire_device, ring.index(world.rank)
    target, source = (world.processes[ring[(position + step) % len(ring)]] for step in (1, -1))
    count = _BYTES.get(wire.type, _BYTES["cuda"]) // 4

    def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
        sending = dist.P2POp(dist.isend, sent, target, world.group)
        for work in dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, received, source, world.group)]):
            work.wait()

    large, small = (torch.zeros(2, size, device=wire) for size in (count, 1))
    seconds = min(_seconds(lambda: exchange(*large), wire, _LARGE_RUNS, 1))
    latency = median(_seconds(lambda: exchange(*small), wire, _SMALL_ROUNDS, _MESSAGES_PER_ROUND))
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
