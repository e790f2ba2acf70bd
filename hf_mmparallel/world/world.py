"""The processes that train together: their ranks, their groups, and the collectives among all of them."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from .activity import ACTIVITY, doing
from .failure import RemoteRankError, check_rank_lives, failure_sentence

T = TypeVar("T")
CPU = torch.device("cpu")
_POLL_S = 0.2  # between two looks into the store
_POLLS_PER_S = 2048  # of all ranks together
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class World:
    """
    The processes that train together, as ranks `0` to `size - 1` of a plan. Making one is collective.

    Values and tensors in host memory travel over a group of the CPU, so that no rank waits for its device; tensors on
    a device travel over the backend of that device. Watchers see that a rank waits in any of these collectives.
    Without a process group there is one rank, and each collective returns what it is given.

    Args:
        device (`torch.device`, *optional*, defaults to the CPU): Where this process computes.
        processes (`Sequence[int]`, *optional*):
            The processes of the default group that take part, in the order of the plan's ranks; all by default. Others
            may make a world of their own at the same time.

    Attributes:
        rank, size (`int`): This rank, and how many there are.
        processes (`tuple[int, ...]`): Rank -> process of the default group.
        is_first (`bool`): Whether this is rank 0.
        on_device (`bool`):
            Whether tensors travel from device to device, in one stream for each group (NCCL), rather than through host
            memory, each pair of ranks on its own (gloo).
    """

    def __init__(self, device: torch.device = CPU, processes: Sequence[int] | None = None):
        # accelerate's `cpu:0` is the CPU, but a move to it copies, and gives what is shared memory of its own.
        self.device = CPU if device.type == "cpu" else device
        self._groups: list[Any] = []
        if not dist.is_initialized():
            self.processes: tuple[int, ...] = (0,)
            self.rank = 0
            self.on_device = False
            self._timeout: timedelta | None = None
            self.group: Any = None
            self.host_group: Any = None
            return
        everyone = tuple(range(dist.get_world_size()))
        self.processes = everyone if processes is None else tuple(processes)
        self.rank = self.processes.index(dist.get_rank())
        backend: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
        self.on_device = backend.name() != "gloo"
        self._timeout = backend.options._timeout  # which `ddp_timeout` says
        self.group = None if self.processes == everyone else self.new_group(range(self.size))
        self.host_group = self.new_group(range(self.size), "gloo") if self.on_device else self.group
        if not self.on_device:
            atexit.register(_leave)
        self._waits = 0
        self._store: Any = dist.distributed_c10d.PrefixStore(f"hf_mmparallel/world/{self._number()}", _default_store())

    def _number(self) -> int:
        """How many worlds the store had before this one, as the first rank counts."""
        number = _default_store().add("hf_mmparallel/worlds", 1) if self.is_first else 0
        return self.broadcast(number, "counting worlds")

    @property
    def size(self) -> int:
        return len(self.processes)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def _is_alone(self) -> bool:
        return self._timeout is None

    def close(self) -> None:
        """Ends the groups that this world has made; the default group stays. Collective."""
        for group in reversed(self._groups.copy()):
            self.end_group(group)

    def end_group(self, group: Any) -> None:
        """Ends a group that [`World.new_group`] made, on a rank that is in it."""
        self._groups.remove(group)
        dist.destroy_process_group(group)

    def new_group(self, ranks: Sequence[int], backend: str | None = None) -> Any:
        """
        A process group of these ranks in this order, which waits as long as the default group. Collective: every rank
        makes the same calls.

        Args:
            ranks (`Sequence[int]`): Of this world.
            backend (`str`, *optional*): That of the default group if left out.

        Returns:
            `ProcessGroup`: On the ranks that are in it; something else elsewhere.
        """
        processes = [self.processes[rank] for rank in ranks]
        group = dist.new_group(
            processes,
            timeout=self._timeout,
            backend=backend,
            use_local_synchronization=self.size < dist.get_world_size(),
            sort_ranks=False,  # the place of a rank says which shard it has
        )
        if self.rank in ranks:
            self._groups.append(group)
        return group

    # Values: whatever can be pickled. `what` is what a collective is for, as watchers say it; what this rank is doing
    # by default.

    def barrier(self, what: str | None = None) -> None:
        """Waits for the other ranks."""
        if not self._is_alone:
            with _waiting(what):
                dist.barrier(self.host_group)

    def all_gather(self, value: T, what: str | None = None) -> list[T]:
        """The value of every rank."""
        values = [value] * self.size
        if self.size > 1:
            with _waiting(what):
                dist.all_gather_object(values, value, group=self.host_group)
        return values

    def gather(self, value: T, what: str | None = None) -> list[T] | None:
        """The value of every rank on the first one, `None` elsewhere."""
        if self._is_alone:
            return [value]
        values: Any = [None] * self.size if self.is_first else None
        with _waiting(what):
            dist.gather_object(value, values, self.processes[0], group=self.host_group)
        return values

    def broadcast(self, value: T, what: str | None = None) -> T:
        """The value of the first rank, on all ranks; on the others it is not looked at."""
        if self._is_alone:
            return value
        values = [value]
        with _waiting(what):
            dist.broadcast_object_list(values, self.processes[0], group=self.host_group, device=CPU)
        return values[0]

    # Tensors

    def all_reduce(
        self, tensor: torch.Tensor, operation: Literal["sum", "max"] = "sum", what: str | None = None
    ) -> torch.Tensor:
        """Combines a tensor over all ranks, in place, where it is, and returns it."""
        if not self._is_alone:
            group = self.host_group if tensor.device.type == "cpu" else self.group
            with _waiting(what):
                dist.all_reduce(tensor, _OPERATIONS[operation], group=group)
        return tensor

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Sends a tensor that lies anywhere to a rank that calls [`World.receive`]."""
        if tensor.numel():
            with _waiting(None):
                dist.send(tensor.detach().contiguous().to(self.wire_device), self.processes[target], self.group)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """A tensor that a rank sends with [`World.send`], in host memory."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.wire_device)
        if tensor.numel():
            with _waiting(None):
                dist.recv(tensor, self.processes[source], self.group)
        return tensor.cpu()

    @property
    def wire_device(self) -> torch.device:
        """Where tensors of the group of all ranks travel."""
        return self.device if self.on_device else CPU

    def gather_tensors(self, value: Any) -> list[Any]:
        """
        The values of all ranks on rank 0, an empty list elsewhere.

        Tensors come from their owners one after the other, so that a rank needs memory for one of them on its device;
        `torch.distributed.gather_object` takes memory for the largest value of all, once for every rank.

        Args:
            value (`Any`): Lists, tuples and dicts of tensors and of what can be pickled.

        Returns:
            `list`: By rank, with the tensors in host memory.
        """
        tensors: list[torch.Tensor] = []

        def stand_in(tensor: torch.Tensor) -> _Sent:
            tensors.append(tensor)
            return _Sent(tuple(tensor.shape), tensor.dtype)

        def receive(sent: _Sent, source: int) -> torch.Tensor:
            return self.receive(sent.shape, sent.dtype, source)

        outlines = self.gather(None if self.is_first else tree_map_only(torch.Tensor, stand_in, value))
        for tensor in tensors:
            self.send(tensor, 0)
        if outlines is None:
            return []
        received = [
            tree_map_only(_Sent, functools.partial(receive, source=source), outline)
            for source, outline in enumerate(outlines[1:], 1)
        ]
        return [tree_map_only(torch.Tensor, torch.Tensor.cpu, value), *received]

    # Work of one rank, or of each

    def raise_together(self, work: Callable[[], T]) -> T:
        """
        Does what may fail with a `ValueError` or an `OSError` on some ranks only, and raises it on all, so that none
        waits for another. Collective.

        Args:
            work (`Callable`): Holds no collectives that a failing rank would leave out.
        """
        result: Any = None
        error: ValueError | OSError | None = None
        try:
            result = work()
        except (ValueError, OSError) as raised:
            error = raised
        if error is not None and self._is_alone:
            raise error
        told = None if error is None else (getattr(error, "errno", None), str(error))
        for rank, found in enumerate(self.all_gather(told)):
            if found is not None:
                number, message = found
                message = f"rank {rank}: {message}"
                raise (ValueError(message) if number is None else OSError(number, message)) from error
        return result

    def from_first_rank(self, find: Callable[[], T]) -> T:
        """
        What the first rank finds, on all ranks, however long that takes. Collective.

        Args:
            find (`Callable`): Called on the first rank only; what it returns can be pickled.

        Raises:
            `ValueError`: On the other ranks with the sentence of the first, for a `ValueError` or `OSError` there.
            [`RemoteRankError`]: On the other ranks, for any other exception there.
        """
        if self._is_alone:
            return find()
        found: Any = None, None
        failure: Exception | None = None
        if self.is_first:
            try:
                found = find(), None
            except Exception as error:
                plain = isinstance(error, (OSError, ValueError))
                failure = error
                found = None, ValueError(str(error)) if plain else RemoteRankError(failure_sentence(0, error))
        self.wait_for_first_rank("what rank 0 finds out")
        value, told = self.broadcast(found, "what rank 0 finds out")
        if failure is not None:
            raise failure
        if told is not None:
            raise told
        return value

    def wait_for_first_rank(self, what: str | None = None) -> None:
        """
        Lets the other ranks wait until the first one has come here, for however long: collectives have a time limit,
        and this has none. Ranks that wait look into the store, and end if the first rank fails or is gone. Collective.
        """
        self._waits += 1
        key = f"arrived/{self._waits}"
        if self.is_first:
            self._store.set(key, "")
            return
        longest = max(_POLL_S, self.size / _POLLS_PER_S)
        pause = _POLL_S / 16
        with _waiting(what):
            while not self._store.check([key]):
                check_rank_lives(self.processes[0])
                time.sleep(pause)
                pause = min(2 * pause, longest)


@dataclass(frozen=True)
class _Sent:
    """Stands for a tensor that is sent by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _waiting(what: str | None) -> AbstractContextManager[None]:
    """Notes that this rank waits for others, in what it is doing unless that has a name of its own."""
    return doing(ACTIVITY.doing if what is None else what, waits=True)


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _leave() -> None:
    """Ends the gloo group of a script that does not: its threads may otherwise outlive what they use."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
