"""Messages in memory and over gloo keep the order of each pair of ranks."""

import itertools
import queue

import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.runtime.message_queues import DistributedTransport, Transport
from hf_mmparallel.world import World
from tests.distributed import run_distributed
from tests.runtime.loopback import LoopbackWorld, run_threads


def exchange(transport: Transport, world_size: int) -> list[list[float]]:
    """Three tensors to every other rank, received in order but waited for from the last; by source."""
    handles, buffers, sent = [], [], []
    for other in range(world_size):
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
    for handle in reversed(handles):
        handle.wait()
    for handle in sent:
        handle.wait()
    return [[buffer.unique().item() for buffer in mine] for mine in buffers]


def expected(rank: int, world_size: int) -> list[list[float]]:
    return [[100.0 * o + 10 * rank + number for number in range(3)] for o in range(world_size) if o != rank]


def over_gloo() -> list[list[list[float]]]:
    """Over the default group, and over a group for each pair."""
    groups = {pair: dist.new_group(list(pair)) for pair in itertools.permutations(range(3), 2)}
    groups = {pair: group for pair, group in groups.items() if dist.get_rank() in pair}
    return [exchange(DistributedTransport(World(), of_pairs), 3) for of_pairs in ({}, groups)]


@pytest.mark.parametrize("repeat", range(5))
def test_loopback_keeps_the_order_of_each_pair(repeat):
    world = LoopbackWorld(5.0)
    found = run_threads(lambda rank: exchange(world.transport(rank), 4), 4)
    assert found == [expected(rank, 4) for rank in range(4)]


def test_both_ends_get_one_channel():
    for _ in range(200):
        world = LoopbackWorld(5.0)
        first, second = run_threads(lambda rank, world=world: world.channel(0, 1), 2)
        assert first is second


def test_loopback_copies_what_is_sent():
    world = LoopbackWorld(1.0)
    tensor, buffer = torch.ones(2, 2), torch.empty(2, 2)
    world.transport(0).send(tensor, 1).wait()
    tensor.zero_()
    world.transport(1).recv(buffer, 0).wait()
    assert buffer.sum() == 4


@pytest.mark.parametrize("buffer", [torch.empty(3, 2), torch.empty(2, 2, dtype=torch.float64)])
def test_loopback_refuses_another_shape_or_type(buffer):
    world = LoopbackWorld(1.0)
    world.transport(0).send(torch.ones(2, 2), 1)
    with pytest.raises(AssertionError, match=r"\(2, 2\) torch.float32"):
        world.transport(1).recv(buffer, 0).wait()


def test_loopback_does_not_wait_for_ever():
    world = LoopbackWorld(0.05)
    with pytest.raises(queue.Empty):
        world.transport(1).recv(torch.empty(1), 0).wait()


@pytest.mark.distributed
def test_gloo_keeps_the_order_of_each_pair():
    assert run_distributed(over_gloo, 3) == [[expected(rank, 3)] * 2 for rank in range(3)]
