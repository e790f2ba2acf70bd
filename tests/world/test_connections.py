"""Ending the collectives of a process from a thread releases its main thread, and touches nothing else."""

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.world.connections import GlooWaits, end_collectives, end_gloo_connections, gloo_loops, shut_down
from tests.deep_cases import deep
from tests.distributed import outcomes, run_distributed

BLOCKED_S = 0.5
REPEAT_S = 0.1
BEGUN_ELEMENTS, BEGUN_S = 1 << 26, 0.05  # a message takes several times as long, unless the machine is busy
RELEASED_S = 5.0  # far below the time limit of the group


def _is_stopped(process: int) -> bool:
    return psutil.Process(process).status() == psutil.STATUS_STOPPED


def _time_to_release(wait: Any, is_ready: Callable[[], bool] = lambda: True) -> float | None:
    """
    Seconds until a main thread that waits raises, after a thread has begun to end the collectives, some time after
    `is_ready`; `None` if a peer that has ended its own released it before. The thread goes on until the main thread
    has noticed, as that of a member: on a busy machine a connection may be made only after it.
    """
    released, begun = threading.Event(), []

    def end() -> None:
        while not is_ready():
            time.sleep(REPEAT_S)
        time.sleep(BLOCKED_S)
        begun.append(time.monotonic())
        end_collectives("gloo")
        waits = GlooWaits()
        while not released.wait(REPEAT_S):
            end_gloo_connections()
            waits.end_stuck()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(RuntimeError):
        wait()
        dist.barrier()  # a wait for a message that has begun just ends
    took = time.monotonic() - begun[0] if begun else None
    released.set()
    ending.join()
    return took


def _blocked(kind: str) -> float | None:
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group([0, 1, 2])
    large = torch.ones(1 << 22)
    if rank == 2:
        store.set("stopped", str(os.getpid()))
        if kind.startswith("begun"):  # the others have sent, or received, a part of a message
            start = dist.irecv if kind == "begun send" else dist.isend
            _started = [start(torch.ones(BEGUN_ELEMENTS), peer) for peer in (0, 1)]
            time.sleep(BEGUN_S)
        os.kill(os.getpid(), signal.SIGSTOP)  # closes no connection
    stopped = int(store.get("stopped"))
    waits: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(large),
        "begun send": lambda: dist.send(torch.ones(BEGUN_ELEMENTS), 2),
        "begun recv": lambda: dist.recv(torch.ones(BEGUN_ELEMENTS), 2),
        "recv": lambda: dist.recv(large, 2),
        "send": lambda: dist.send(large, 2),
        "new_group": lambda: dist.all_reduce(large, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(6), torch.ones(6), group=group),
    }
    took = _time_to_release(waits[kind], lambda: _is_stopped(stopped))
    if store.add("released", 1) == 2:
        os.kill(stopped, signal.SIGKILL)
    return took


# what blocks, and whether gloo connects a pair when it first talks
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "lazy"),
    [
        ("all_reduce", False),
        ("begun send", True),
        ("new_group", True),
        deep("all_reduce", True),
        deep("begun recv", False),
        deep("recv", True),
        deep("send", False),
        deep("all_to_all", True),
    ],
)
def test_a_blocked_collective_raises_although_the_peer_is_stopped(kind, lazy, monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", str(int(lazy)))
    ended = outcomes(_blocked, 3, kind)[:2]
    assert [outcome.kind for outcome in ended] == ["returned"] * 2, ended
    released_s = [outcome.value for outcome in ended if outcome.value is not None]
    assert released_s and max(released_s) < RELEASED_S


def _other_connections() -> list[bytes]:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    ends = socket.socketpair()
    reader, writer = os.pipe()
    with selectors.EpollSelector() as own:  # of the shape of gloo's
        for file in (server, client, reader):
            own.register(file, selectors.EVENT_READ)
        assert len(gloo_loops()) == 1 and own.fileno() not in gloo_loops()
        end_gloo_connections()
    client.sendall(b"a")
    ends[0].sendall(b"b")
    os.write(writer, b"c")
    store = dist.distributed_c10d._get_default_store()
    store.set(f"lives/{dist.get_rank()}", "d")
    with pytest.raises(RuntimeError):
        dist.barrier()
    return [accepted.recv(1), ends[1].recv(1), os.read(reader, 1), store.get(f"lives/{dist.get_rank()}")]


@pytest.mark.distributed
def test_connections_of_others_stay_open():
    assert run_distributed(_other_connections, 2) == [[b"a", b"b", b"c", b"d"]] * 2


def _new_group_afterwards() -> tuple[float, bool]:
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    took_s = _time_to_release(lambda: [dist.barrier() for _ in range(1_000_000)])
    dist.destroy_process_group()
    assert gloo_loops() == []
    dist.init_process_group("gloo", store=dist.distributed_c10d.PrefixStore("again", store), rank=rank, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item(), took_s is not None


@pytest.mark.distributed
def test_a_new_group_works():
    totals, released = zip(*run_distributed(_new_group_afterwards, 2), strict=True)
    assert totals == (2.0, 2.0) and any(released)


def test_descriptors_that_vanish_are_passed_over():
    first, second = socket.socketpair()
    number, inode = first.fileno(), os.fstat(first.fileno()).st_ino
    assert not shut_down(number, inode + 1)  # another file by now
    first.close()
    assert not shut_down(number, inode)
    reader, writer = os.pipe()
    num_open = len(os.listdir("/proc/self/fd"))
    assert not shut_down(reader)
    assert len(os.listdir("/proc/self/fd")) == num_open
    for descriptor in (reader, writer):
        os.close(descriptor)
    second.close()


def test_without_a_group_nothing_is_ended():
    assert gloo_loops() == [] and end_gloo_connections() == 0
