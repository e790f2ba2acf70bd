"""Messages in memory and over gloo keep the order of each pair of ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.runtime.message_queues import DistributedTransport, Transport
from hf_mmparallel.world import World
from tests.distributed import run_distributed
from tests.runtime.loopback import LoopbackWorld, run_threads

EXPECTED = [
    [[100.0 * other + 10 * rank + number for number in range(3)] for other in range(3) if other != rank]
    for rank in range(3)
]


def exchange(transport: Transport) -> list[list[float]]:
    """Three tensors to both other ranks, received in order but waited for from the last; by source."""
    handles, buffers, sent = [], [], []
    for other in range(3):
        if other == transport.rank:
            continue
        mine = []
        for number in range(3):
            tensor = torch.full((number + 1, 2), 100.0 * transport.rank + 10 * other + number)
            sent.append(transport.send(tensor, other))
            buffer = torch.empty(number + 1, 2)
            handles.append(transport.recv(buffer, other))
            mine.append(buffer)
        buffers.append(mine)
    for handle in (*reversed(handles), *sent):
        handle.wait()
    return [[buffer.unique().item() for buffer in mine] for mine in buffers]


def over_gloo() -> list[list[list[float]]]:
    """Over the default group, and over a group for each pair."""
    groups = {pair: dist.new_group(list(pair)) for pair in itertools.permutations(range(3), 2)}
    groups = {pair: group for pair, group in groups.items() if dist.get_rank() in pair}
    return [exchange(DistributedTransport(World(), of_pairs)) for of_pairs in ({}, groups)]


def test_loopback_keeps_the_order_of_each_pair():
    world = LoopbackWorld(5.0)
    assert run_threads(lambda rank: exchange(world.transport(rank)), 3) == EXPECTED


@pytest.mark.distributed
def test_gloo_keeps_the_order_of_each_pair():
    assert run_distributed(over_gloo, 3) == [[found] * 2 for found in EXPECTED]
