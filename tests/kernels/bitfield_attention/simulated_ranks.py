"""
Ranks as threads of one process, for property tests of code that talks to the ranks of a group.

What a collective writes is poisoned when it starts and filled when it is waited for, and what it sends is read only
then: code that reads too early, or writes over a buffer that is in use, gets NaN or a wrong result.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_mmparallel.kernels.bitfield_attention import context_parallel
from tests.runtime.loopback import ThreadGroup, run_threads


class _Rank(threading.local):
    """What a thread knows of itself."""

    rank: int = -1
    num_calls: int = 0
    events: list[str]


_this = _Rank()


class _Work:
    """A collective under way, of which nothing has arrived yet."""

    def __init__(self, kind: str, output: Tensor, own: Tensor, group: ThreadGroup):
        self.output, self.own, self.group, self.kind = output, own, group, kind
        self.call = _this.num_calls
        _this.num_calls += 1
        record(f"start {kind} {self.call}")
        kept = own.clone()
        output.fill_(float("nan") if output.is_floating_point() else -7)
        if own.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
            place = output[_this.rank * len(own) : (_this.rank + 1) * len(own)]
            assert own.data_ptr() == place.data_ptr(), "what a rank sends lies in the place of another"
            own.copy_(kept)

    def wait(self) -> None:
        """Meets the other ranks and takes what they sent."""
        record(f"wait {self.kind} {self.call}")
        parts = self.group.exchange(_this.rank, self.own)
        assert len({tuple(part.shape) for part in parts}) == 1
        if self.kind == "exchange":
            parts = [part.view(len(parts), -1, *part.shape[1:])[_this.rank] for part in parts]
        self.output.copy_(torch.cat(parts))


def record(event: str) -> None:
    """Adds an event to those of the rank that calls."""
    _this.events.append(event)


def run_simulated(fn: Callable[[int, ThreadGroup], Any], num_ranks: int) -> tuple[list[Any], list[list[str]]]:
    """What `fn(rank, group)` returns on each rank, and the events of each rank."""
    group, events = ThreadGroup(tuple(range(num_ranks))), [[] for _ in range(num_ranks)]

    def body(rank: int) -> Any:
        _this.rank, _this.num_calls, _this.events = rank, 0, events[rank]
        return fn(rank, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel, "_all_gather", partial(_Work, "gather"))
        patch.setattr(context_parallel, "_all_to_all", partial(_Work, "exchange"))
        values = run_threads(body, num_ranks, after_failure=lambda _: group.barrier.abort())
    for seen in events:
        started, waited = ({e.partition(" ")[2] for e in seen if e.startswith(word)} for word in ("start", "wait"))
        assert started == waited, "a collective was started and nobody waited for it"
    return values, events
