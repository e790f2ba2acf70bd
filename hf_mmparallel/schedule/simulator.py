"""Simulates a program: its duration, idle times and microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Literal

import numpy as np

from ..plan import ParallelPlan, StageKey
from .action_lists import Program
from .actions import Action, DeadlockError, Message, Task
from .program_checks import waiting_table
from .scheduler import Cost, default_cost


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """A task on a rank, predicted or measured."""

    rank: int
    task: Task
    start_ms: float
    end_ms: float
    # Time in which the rank waits for ranks with more work: those of replicas that run the task jointly. Drawn at its
    # end, though it is spread over the layers. A measured task has it within.
    wait_ms: float = 0.0

    @property
    def busy_end_ms(self) -> float:
        """End of the rank's own work."""
        return self.end_ms - self.wait_ms


@dataclass(frozen=True, order=True, slots=True)
class SumSpan:
    """Consecutive gradient sums on a rank, from the start of the first to the end of the last."""

    rank: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, order=True, slots=True)
class TransferSpan:
    """Communication of weights or gradients on a rank, or the optimizer's update between both."""

    rank: int
    start_ms: float
    end_ms: float
    op: Literal["gather", "sum", "update"]  # of weights, of gradients, of the optimizer
    is_exposed: bool  # whether the rank computes nothing beside it


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation."""

    spans: tuple[Span, ...]  # every task on every rank, by start time
    iteration_ms: float  # from the first start to the end of the last action
    num_ranks: int  # with idle ones
    # (module, replica, stage) -> most microbatches whose forward has started and whose backward has not ended; a chunk
    # counts as its fraction of the microbatch
    peak_in_flight: dict[StageKey, float]
    sums: tuple[SumSpan, ...] = ()  # the time that gradient sums add, by start time
    # for pictures: rank -> its communication beside and between its tasks, by start time; `None` if unknown
    transfers: Callable[[int], Sequence[TransferSpan]] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def busy_ms(self) -> dict[int, float]:
        """Rank -> total time of its own work."""
        busy = dict.fromkeys(range(self.num_ranks), 0.0)
        for span in self.spans:
            busy[span.rank] += span.busy_end_ms - span.start_ms
        return busy

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the time of all ranks in which they do not work."""
        total = self.iteration_ms * self.num_ranks
        return 1 - sum(self.busy_ms.values()) / total if total else 0.0

    @property
    def unlike_fraction(self) -> float:
        """Part of `bubble_fraction` within tasks: waits for the largest of replicas that run jointly."""
        total = self.iteration_ms * self.num_ranks
        return sum(span.wait_ms for span in self.spans) / total if total else 0.0

    @property
    def idle_fraction(self) -> float:
        """Part of `bubble_fraction` outside of tasks, which is what a run measures."""
        return self.bubble_fraction - self.unlike_fraction


def simulate(
    plan: ParallelPlan,
    program: Program,
    cost: Cost | None = None,  # task -> milliseconds; `default_cost` when left out
    comm_ms: float | Callable[[Message], float] = 0.0,  # transfer time of a message
    sync_ms: float | Callable[[int], float] = 0.0,  # of the gradient sum of a group, by its index
) -> Simulation:
    """
    Simulates the action lists of a program; raises `DeadlockError`, with where each rank waits, if ranks wait forever.

    A task starts when all ranks of its stage have reached it and all of its messages have arrived, a gradient sum when
    all of its ranks have reached it. Sends and receives take no time on a rank.
    """
    return _Replay(plan, program, cost or default_cost, _function(comm_ms), _function(sync_ms)).run()


def microbatch_forward_ms(spans: Iterable[Span]) -> dict[tuple[str, int], np.ndarray]:
    """Returns (module, replica) -> forward milliseconds, float64 `[num_microbatches]`, 0 for those without samples."""
    times: dict[Task, float] = {}
    for span in spans:
        if span.task.kind == "fwd":
            # of several ranks the slowest counts
            times[span.task] = max(times.get(span.task, 0.0), span.end_ms - span.start_ms)
    counts: dict[tuple[str, int], int] = {}
    for task in times:
        key = (task.module, task.replica)
        counts[key] = max(counts.get(key, 0), task.microbatch + 1)
    result = {key: np.zeros(count) for key, count in sorted(counts.items())}
    for task in sorted(times):
        # over the stages and chunks of a microbatch
        result[task.module, task.replica][task.microbatch] += times[task]
    return result


def _function(value: float | Callable) -> Callable:
    return value if callable(value) else lambda _: value


class _Barrier:
    """A blocking action or joint tasks: the ranks that have reached it, the number of messages still to arrive."""

    __slots__ = ("arrived", "duration_ms", "messages", "ready_ms", "wanted")

    def __init__(self, wanted: int, duration_ms: float):
        self.wanted = wanted
        self.duration_ms = duration_ms
        self.arrived: list[int] = []
        self.messages = 0
        self.ready_ms = 0.0


class _Transfer:
    """A message, with the number of source ranks that have not sent it, and the barrier that waits for it."""

    __slots__ = ("barrier", "sent_ms", "travel_ms", "unsent")

    def __init__(self, barrier: _Barrier, unsent: int, travel_ms: float):
        self.barrier = barrier
        self.unsent = unsent
        self.travel_ms = travel_ms
        self.sent_ms = 0.0


class _Replay:
    """Advances each rank through its list until it blocks, until all lists are done."""

    def __init__(self, plan: ParallelPlan, program: Program, cost: Cost, comm_ms: Callable, sync_ms: Callable):
        self.plan, self.program = plan, program
        self.cost, self.comm_ms, self.sync_ms = cost, comm_ms, sync_ms
        self.barriers: dict[Action, _Barrier] = {}
        self.joint: dict[Task, _Barrier] = {}  # by the first of joint tasks
        self.own_ms: dict[Task, float] = {}
        self.transfer: dict[Message, _Transfer] = {}
        # Keyed by `id`: ranks of a stage share action objects, and hashing an action is slow.
        self.known: dict[int, _Barrier | _Transfer | None] = {}
        for actions in program.actions.values():
            for action in actions:
                if action.message is None:
                    self._add_barrier(action)
        recvs = {id(a): a.message for actions in program.actions.values() for a in actions if a.op == "recv"}
        for message in set(recvs.values()):
            if message is not None and (barrier := self.barriers.get(Action.run(message.target))) is not None:
                self.transfer[message] = _Transfer(barrier, len(self._ranks(message.source)), comm_ms(message))
                barrier.messages += 1
        self.position = dict.fromkeys(program.actions, 0)
        self.time_ms = dict.fromkeys(program.actions, 0.0)
        self.spans: list[Span] = []
        self.sums: dict[int, list[SumSpan]] = {}

    def _add_barrier(self, action: Action) -> None:
        """Creates the barrier of a blocking action, or adds to that of a gradient sum or of joint tasks."""
        barrier = self.known.get(id(action)) or self.barriers.get(action)
        if barrier is None and action.task is None:
            barrier = self.barriers[action] = _Barrier(0, self.sync_ms(action.index))
        elif barrier is None and action.task is not None:
            size = self.plan.modules[action.task.module].joint_replicas
            first = replace(action.task, replica=action.task.replica // size * size)
            barrier = self.barriers[action] = self.joint.setdefault(first, _Barrier(0, 0.0))
            barrier.wanted += len(self._ranks(action.task))
            if action.task not in self.own_ms:
                self.own_ms[action.task] = self.cost(action.task)
            barrier.duration_ms = max(barrier.duration_ms, self.own_ms[action.task])
        assert isinstance(barrier, _Barrier)
        barrier.wanted += action.op == "sync"
        self.known[id(action)] = barrier

    def _ranks(self, task: Task) -> tuple[int, ...]:
        return self.plan.stage(task.module, task.replica, task.stage).all_ranks

    def run(self) -> Simulation:
        """Simulates to the end."""
        ready = list(self.program.actions)
        while ready:
            rank = ready.pop()
            barrier = self._advance(rank, ready)
            if barrier is not None:
                barrier.arrived.append(rank)
                barrier.ready_ms = max(barrier.ready_ms, self.time_ms[rank])
                self._try_run(barrier, ready)
        stuck = {
            rank: actions[self.position[rank]]
            for rank, actions in self.program.actions.items()
            if self.position[rank] < len(actions)
        }
        if stuck:
            raise DeadlockError(f"The program deadlocks:\n{waiting_table(stuck)}")
        self.spans.sort(key=lambda span: (span.start_ms, span.rank))
        end = max(self.time_ms.values(), default=0.0)
        sums = sorted(chain.from_iterable(self.sums.values()), key=lambda span: (span.start_ms, span.rank))
        return Simulation(tuple(self.spans), end, self.plan.world_size, _peak_in_flight(self.spans), tuple(sums))

    def _advance(self, rank: int, ready: list[int]) -> _Barrier | None:
        """Runs non-blocking actions; returns the barrier at which the rank blocks."""
        actions = self.program.actions[rank]
        while self.position[rank] < len(actions):
            action = actions[self.position[rank]]
            if action.message is None:
                barrier = self.known[id(action)]
                assert isinstance(barrier, _Barrier)
                return barrier
            self.position[rank] += 1
            if action.op == "send":
                if id(action) not in self.known:
                    self.known[id(action)] = self.transfer.get(action.message)
                transfer = self.known[id(action)]
                if isinstance(transfer, _Transfer):
                    self._send(transfer, self.time_ms[rank], ready)
        return None

    def _send(self, transfer: _Transfer, now: float, ready: list[int]) -> None:
        """Records the send of one source rank; after the last one the message is transferred."""
        transfer.unsent -= 1
        transfer.sent_ms = max(transfer.sent_ms, now)
        if transfer.unsent == 0:
            transfer.barrier.messages -= 1
            transfer.barrier.ready_ms = max(transfer.barrier.ready_ms, transfer.sent_ms + transfer.travel_ms)
            self._try_run(transfer.barrier, ready)

    def _try_run(self, barrier: _Barrier, ready: list[int]) -> None:
        """Runs a blocking action if all of its ranks and messages have arrived."""
        if barrier.messages or len(barrier.arrived) < barrier.wanted:
            return
        end = barrier.ready_ms + barrier.duration_ms
        for rank in barrier.arrived:
            task = self.program.actions[rank][self.position[rank]].task
            self.position[rank] += 1
            self.time_ms[rank] = end
            if task is not None:
                self.spans.append(Span(rank, task, barrier.ready_ms, end, barrier.duration_ms - self.own_ms[task]))
            elif barrier.duration_ms:
                self._add_sum(rank, barrier.ready_ms, end)
        ready.extend(barrier.arrived)

    def _add_sum(self, rank: int, start_ms: float, end_ms: float) -> None:
        """Records a gradient sum, merged with the previous one if it follows immediately."""
        sums = self.sums.setdefault(rank, [])
        if sums and sums[-1].end_ms == start_ms:
            start_ms = sums.pop().start_ms
        sums.append(SumSpan(rank, start_ms, end_ms))


def _peak_in_flight(spans: Sequence[Span]) -> dict[StageKey, float]:
    """Maximum number of microbatches between the start of their forward and the end of their backward, by stage."""
    spans_by_task = {id(span.task): span for span in spans}.values()
    times: dict[Task, tuple[float, float]] = {span.task: (span.start_ms, span.end_ms) for span in spans_by_task}
    chunks: dict[tuple[StageKey, int], int] = {}
    for task in times:
        if task.kind == "fwd":
            key = (task.stage_key, task.microbatch)
            chunks[key] = chunks.get(key, 0) + 1
    events: dict[StageKey, list[tuple[float, float]]] = {}
    for task, (start, end) in times.items():
        if task.kind == "fwd":
            share = 1 / chunks[task.stage_key, task.microbatch]
            _, end = times.get(Task("bwd", *task.key), (start, end))
            events.setdefault(task.stage_key, []).extend(((start, share), (end, -share)))
    peaks = {}
    for stage, changes in events.items():
        in_flight = peak = 0.0
        for _, change in sorted(changes):
            in_flight += change
            peak = max(peak, in_flight)
        peaks[stage] = round(peak, 6)
    return peaks
