"""`World`: the processes that train together, with their ranks, their groups and the collectives among all ranks."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from .failure import RemoteRankError, check_rank_lives, failure_sentence
from .watcher import ACTIVITY, track_activity

# A count of the ranks that have come to a point, which any thread may add to and read.


class Arrivals:
    """Counts ranks through a store, without a collective: two threads of a rank must not run collectives at once."""

    def __init__(self, store: Any, key: str, size: int):
        self.store = store  # a clone that no other thread uses; `None` for a single rank
        self.key = key
        self.size = size
        self._has_arrived = False

    def arrive(self) -> None:
        self._has_arrived = True
        if self.store is not None:
            self.store.add(self.key, 1)

    def all_here(self) -> bool:
        return self._has_arrived and (self.store is None or self.store.add(self.key, 0) >= self.size)


T = TypeVar("T")
CPU = torch.device("cpu")
_POLL_S = 0.2  # interval between two reads of the store
_POLLS_PER_S = 2048  # of all ranks together
_OPERATIONS = {"sum": (torch.add, dist.ReduceOp.SUM), "max": (torch.maximum, dist.ReduceOp.MAX)}
_REDUCTION_TAG = 1  # of messages in host memory; all others have tag 0


def limit_collectives(timeout: timedelta) -> None:
    """Sets how long collectives of the default group may take, and of the groups that a [`World`] makes after it."""
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(timeout)


class World:
    """
    The processes that train together, as ranks `0` to `size - 1` of a plan. The constructor is collective.

    Objects and tensors in host memory are sent over a CPU group, so that no rank waits for its device; tensors on a
    device over the backend of that device. Without a process group there is one rank, and collectives return their
    argument. `processes` of the default group are in the order of the plan's ranks, all by default; others may make
    another world at the same time.
    """

    def __init__(self, device: torch.device = CPU, processes: Sequence[int] | None = None):
        # accelerate's `cpu:0` is the CPU, but moving to it copies tensors and so unshares shared memory.
        self.device = CPU if device.type == "cpu" else device
        self.processes: tuple[int, ...] = (0,)  # rank -> process of the default group
        self.rank = 0
        # whether tensors are sent from device to device, with one stream per group (NCCL), rather than through host
        # memory, with one connection per pair of ranks (gloo)
        self.on_device = False
        self.group: Any = None
        self.host_group: Any = None
        self._groups: list[Any] = []
        self._timeout: timedelta | None = None
        self._waits = self._counts = 0
        if dist.is_initialized():
            self._join(processes)
            if not self.on_device:
                atexit.register(_leave)

    def _join(self, processes: Sequence[int] | None = None) -> None:
        """Makes the groups of these processes of the default group, all by default. Collective."""
        everyone = tuple(range(dist.get_world_size()))
        self.processes = everyone if processes is None else tuple(processes)
        self.rank = self.processes.index(dist.get_rank())
        default = dist.distributed_c10d._get_default_group()
        backend: Any = default._get_backend(self.device)
        self.on_device = backend.name() != "gloo"
        if self.on_device and self.size > 1 and default.bound_device_id is not None:
            raise ValueError(
                "`init_process_group` was given `device_id`. A group of such a process has one communicator, which "
                "sends its messages one after the other to all ranks, so that ranks of a pipeline wait for each other "
                "forever. Leave `device_id` out, as `accelerate launch` does."
            )
        self._timeout = backend.options._timeout  # set by `ddp_timeout`
        self.group = None if self.processes == everyone else self.new_group(range(self.size))
        self.host_group = self.new_group(range(self.size), "gloo") if self.on_device else self.group
        self._waits = self._counts = 0  # equal on all ranks, of which some may be ahead in a group that was lost
        self._store: Any = dist.distributed_c10d.PrefixStore(f"hf_mmparallel/world/{self._number()}", _default_store())

    def leave(self) -> None:
        """Gives up the default group and all others, whose collectives may have failed. Not collective."""
        self._groups.clear()
        self.group = self.host_group = None
        leave_groups()

    def join(self, store: Any, rank: int, size: int, backend: str, timeout: timedelta | None) -> None:
        """Makes a new default group after [`World.leave`]. Collective among the new ranks."""
        # `store` is shared by the new ranks, without keys of an earlier group; objects that refer to this world go on
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        self._join()

    def _number(self) -> int:
        """Number of worlds made before this one, counted by the first rank."""
        number = _default_store().add("hf_mmparallel/worlds", 1) if self.is_first else 0
        return self.broadcast(number, "counting worlds")

    @property
    def size(self) -> int:
        return len(self.processes)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def backend(self) -> str:
        return dist.get_backend()

    @property
    def timeout(self) -> timedelta | None:
        """Time limit of collectives; `None` without a process group."""
        return self._timeout

    @property
    def _is_alone(self) -> bool:
        return self._timeout is None

    def close(self) -> None:
        """Destroys the groups that this world has made; the default group stays. Collective."""
        for group in reversed(self._groups.copy()):
            self.end_group(group)

    def end_group(self, group: Any) -> None:
        self._groups.remove(group)
        dist.destroy_process_group(group)

    def new_group(self, ranks: Sequence[int], backend: str | None = None) -> Any:
        """Makes a group of these ranks, in this order; others get torch's marker for non-members. Collective."""
        processes = [self.processes[rank] for rank in ranks]
        group = dist.new_group(
            processes,
            timeout=self._timeout,
            backend=backend,
            use_local_synchronization=self.size < dist.get_world_size(),
            sort_ranks=False,  # the shard of a rank is given by its position in the group
        )
        if self.rank in ranks:
            self._groups.append(group)
        return group

    def arrivals(self) -> Arrivals:
        """A new count of ranks. Every rank makes the same calls; they don't wait for each other."""
        self._counts += 1
        return Arrivals(None if self._is_alone else self._store.clone(), f"written/{self._counts}", self.size)

    # Values can be any object that can be pickled. `activity` is the purpose of a collective, which watchers show; the
    # current activity by default.

    def barrier(self, activity: str | None = None) -> None:
        """Waits for the other ranks."""
        if not self._is_alone:
            with _waiting(activity):
                dist.barrier(self.host_group)

    def all_gather(self, value: T, activity: str | None = None) -> list[T]:
        """The value of every rank."""
        values = [value] * self.size
        if self.size > 1:
            with _waiting(activity):
                dist.all_gather_object(values, value, group=self.host_group)
        return values

    def gather(self, value: T, activity: str | None = None) -> list[T] | None:
        """The value of every rank, on the first rank; `None` on the others."""
        if self._is_alone:
            return [value]
        values: Any = [None] * self.size if self.is_first else None
        with _waiting(activity):
            dist.gather_object(value, values, self.processes[0], group=self.host_group)
        return values

    def broadcast(self, value: T, activity: str | None = None) -> T:
        """The value of the first rank, on all ranks. The argument of the other ranks is ignored."""
        if self._is_alone:
            return value
        values = [value]
        with _waiting(activity):
            dist.broadcast_object_list(values, self.processes[0], group=self.host_group, device=CPU)
        return values[0]

    # Tensors

    def all_reduce(
        self, tensor: torch.Tensor, operation: Literal["sum", "max"] = "sum", activity: str | None = None
    ) -> torch.Tensor:
        """Reduces a tensor over all ranks in place, on its device, and returns it: the same bits on every rank."""
        if not self._is_alone:
            combine, of_group = _OPERATIONS[operation]
            with _waiting(activity):
                if tensor.device.type == "cpu":
                    self._all_reduce_on_host(tensor, combine)
                else:
                    dist.all_reduce(tensor, of_group, group=self.group)
        return tensor

    def _all_reduce_on_host(self, tensor: torch.Tensor, combine: Callable[..., torch.Tensor]) -> None:
        """Recursive doubling: each value passes log2 of the ranks, rather than twice all of them as in gloo's ring."""
        whole = 1 << (self.size.bit_length() - 1)  # ranks of the rounds; others add to one of them first
        received = torch.empty_like(tensor)
        if self.rank >= whole:
            self._exchange(self.rank - whole, send=tensor)
            self._exchange(self.rank - whole, receive=tensor)
            return
        has_other = self.rank + whole < self.size
        if has_other:
            self._exchange(self.rank + whole, receive=received)
            combine(tensor, received, out=tensor)
        for number in range(whole.bit_length() - 1):
            self._exchange(self.rank ^ (1 << number), tensor, received)
            combine(tensor, received, out=tensor)
        if has_other:
            self._exchange(self.rank + whole, send=tensor)

    def _exchange(self, other: int, send: torch.Tensor | None = None, receive: torch.Tensor | None = None) -> None:
        """Sends a tensor to a rank and receives one of it, in host memory, apart from other messages."""
        process, group = self.processes[other], self.host_group
        works = []
        if send is not None:
            works.append(dist.isend(send, process, group, tag=_REDUCTION_TAG))
        if receive is not None:
            works.append(dist.irecv(receive, process, group, tag=_REDUCTION_TAG))
        for work in works:
            assert work is not None
            work.wait()

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Sends a tensor, on any device, to a rank that calls [`World.receive`]."""
        if tensor.numel():
            with _waiting(None):
                dist.send(tensor.detach().contiguous().to(self.wire_device), self.processes[target], self.group)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Receives a tensor sent with [`World.send`] into host memory."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.wire_device)
        if tensor.numel():
            with _waiting(None):
                dist.recv(tensor, self.processes[source], self.group)
        return tensor.cpu()

    @property
    def wire_device(self) -> torch.device:
        return self.device if self.on_device else CPU

    def gather_tensors(self, value: Any) -> list[Any]:
        """Returns the values of all ranks on rank 0, with tensors in host memory; an empty list on the others."""
        tensors: list[torch.Tensor] = []

        def describe(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return torch.empty_like(tensor, device="meta")

        def receive(sent: torch.Tensor, source: int) -> torch.Tensor:
            return self.receive(sent.shape, sent.dtype, source)

        outlines = self.gather(None if self.is_first else tree_map_only(torch.Tensor, describe, value))
        # One at a time, so that a rank needs device memory for one of them; `torch.distributed.gather_object`
        # allocates the largest value of any rank once for every rank.
        for tensor in tensors:
            self.send(tensor, 0)
        if outlines is None:
            return []
        received = [
            tree_map_only(torch.Tensor, functools.partial(receive, source=source), outline)
            for source, outline in enumerate(outlines[1:], 1)
        ]
        return [tree_map_only(torch.Tensor, torch.Tensor.cpu, value), *received]

    # Functions that run on one rank, or on each

    def raise_together(self, work: Callable[[], T]) -> T:
        """Runs a function without collectives on each rank; a `ValueError` or `OSError` of any is raised on all."""
        # so that none waits for another; a rank that fails would skip collectives of the function
        result: Any = None
        error: ValueError | OSError | None = None
        try:
            result = work()
        except (ValueError, OSError) as exception:
            error = exception
        if error is not None and self._is_alone:
            raise error
        report = None if error is None else (getattr(error, "errno", None), str(error))
        for rank, rank_report in enumerate(self.all_gather(report)):
            if rank_report is not None:
                number, message = rank_report
                message = f"rank {rank}: {message}"
                raise (ValueError(message) if number is None else OSError(number, message)) from error
        return result

    def raise_first(self, error: Exception | None, activity: str | None = None) -> None:
        """Raises what this rank has caught, or [`RemoteRankError`] for what the first of others has. Collective."""
        sentences = self.all_gather(None if error is None else failure_sentence(self.rank, error), activity)
        if error is not None:
            raise error
        for sentence in sentences:
            if sentence is not None:
                raise RemoteRankError(sentence)

    def from_first_rank(self, find: Callable[[], T]) -> T:
        """
        Runs a function on the first rank and returns its result, which can be pickled, on all ranks, without a time
        limit. Collective. The other ranks raise `ValueError` for its `ValueError` or `OSError`, else
        [`RemoteRankError`].
        """
        if self._is_alone:
            return find()
        outcome: Any = None, None
        failure: Exception | None = None
        if self.is_first:
            try:
                outcome = find(), None
            except Exception as error:
                is_user_error = isinstance(error, (OSError, ValueError))
                failure = error
                remote = ValueError(str(error)) if is_user_error else RemoteRankError(failure_sentence(0, error))
                outcome = None, remote
        self.wait_for_first_rank("a result of rank 0")
        value, remote_error = self.broadcast(outcome, "a result of rank 0")
        if failure is not None:
            raise failure
        if remote_error is not None:
            raise remote_error
        return value

    def wait_for_first_rank(self, activity: str | None = None) -> None:
        """Waits without a time limit until the first rank calls this; raises if it fails or dies. Collective."""
        self._waits += 1
        key = f"arrived/{self._waits}"
        if self.is_first:
            self._store.set(key, "")
            return
        longest = max(_POLL_S, self.size / _POLLS_PER_S)
        pause = _POLL_S / 16
        with _waiting(activity):
            # collectives have a time limit; here ranks poll the store
            while not self._store.check([key]):
                check_rank_lives(self.processes[0])
                time.sleep(pause)
                pause = min(2 * pause, longest)


def _waiting(activity: str | None) -> AbstractContextManager[None]:
    """Sets the activity to waiting, for `activity` or within the current activity."""
    return track_activity(ACTIVITY.doing if activity is None else activity, waits=True)


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def leave_groups() -> None:
    """Destroys all groups, even those made in part, so that names of later ones agree on all ranks. Not collective."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0  # a default group that could not be made has got a name, too


def _leave() -> None:
    """Destroys the gloo group at exit if the script has not: its threads may outlive the objects they use."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


# A reduce-scatter that sends no more than it needs to over every backend.


class ReduceScatter:
    """
    A sum over the ranks of a group in flight, of which each rank gets one row. What this rank adds, `columns` `[ranks
    of the group, elements]`, is copied; row `i` of each is for rank `i` of the group. Collective.
    """

    def __init__(self, columns: Sequence[torch.Tensor], group: Any):
        num_rows, rank = len(columns[0]), group.rank()
        # Torch's reduce-scatter over gloo all-reduces a copy of its input, which sends twice as much. Over gloo each
        # rank therefore sends every row to the rank that it is for, and adds what it receives to its own row.
        if group._get_backend(columns[0].device).name() == "gloo":
            self._mine = torch.cat([column[rank] for column in columns])
            others = [row for row in range(num_rows) if row != rank]
            sent = torch.cat([column[row] for row in others for column in columns] or [self._mine[:0]])
            self._received = torch.empty_like(sent).view(len(others), len(self._mine))
            splits = [len(self._mine) * (row != rank) for row in range(num_rows)]
            self._work: Any = dist.all_to_all_single(
                self._received.view(-1), sent, splits, splits, group=group, async_op=True
            )
        else:
            sent = torch.cat(list(columns), 1)
            self._mine = torch.empty_like(sent[0])
            self._received = sent[:0]
            self._work = dist.reduce_scatter_single(self._mine, sent.view(-1), group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Waits for the sum of this rank's row, `[elements]`."""
        self._work.wait()
        for row in self._received:
            self._mine += row
        return self._mine
