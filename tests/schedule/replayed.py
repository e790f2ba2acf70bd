"""
A plain simulation of action lists, rank by rank: what timelines are tested against. It reads nothing but the lists.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hf_mmparallel.plan import ParallelPlan, StageKey
from hf_mmparallel.schedule import Action, Message, Program, Span, SumSpan, Task, default_cost
from hf_mmparallel.schedule.scheduler import Cost


@dataclass(frozen=True)
class Replayed:
    """What a replay finds; spans are ordered by their starts."""

    spans: tuple[Span, ...]
    iteration_ms: float
    peak_in_flight: dict[StageKey, float]
    sums: tuple[SumSpan, ...]


def replay(
    plan: ParallelPlan,
    program: Program,
    cost: Cost | None = None,
    comm_ms: float | Callable[[Message], float] = 0.0,
    sync_ms: float | Callable[[int], float] = 0.0,
) -> Replayed:
    """Replays the lists of a program, which has to end."""
    return _Replay(plan, program, cost or default_cost, function(comm_ms), function(sync_ms)).run()


def function(value: float | Callable) -> Callable:
    """A constant as a function."""
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
        self.summed_ms = dict.fromkeys(program.actions, 0.0)  # end of the rank's last gradient sum, beside its tasks
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

    def run(self) -> Replayed:
        """Simulates to the end."""
        ready = list(self.program.actions)
        while ready:
            rank = ready.pop()
            barrier = self._advance(rank, ready)
            if barrier is not None:
                barrier.arrived.append(rank)
                barrier.ready_ms = max(barrier.ready_ms, self.time_ms[rank])
                if self.program.actions[rank][self.position[rank]].task is None:
                    barrier.ready_ms = max(barrier.ready_ms, self.summed_ms[rank])
                self._try_run(barrier, ready)
        assert all(self.position[rank] == len(own) for rank, own in self.program.actions.items()), "ranks wait forever"
        self.spans.sort(key=lambda span: (span.start_ms, span.rank))
        end = max([*self.time_ms.values(), *self.summed_ms.values()], default=0.0)
        sums = sorted(self._sums_beside_nothing(), key=lambda span: (span.start_ms, span.rank))
        return Replayed(tuple(self.spans), end, _peak_in_flight(self.spans), tuple(sums))

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
            (self.summed_ms if task is None else self.time_ms)[rank] = end
            if task is not None:
                self.spans.append(Span(rank, task, barrier.ready_ms, end, barrier.duration_ms - self.own_ms[task]))
            elif barrier.duration_ms:
                self._add_sum(rank, barrier.ready_ms, end)
        ready.extend(barrier.arrived)

    def _sums_beside_nothing(self) -> Iterator[SumSpan]:
        """The parts of gradient sums in which their ranks run no task."""
        for rank, sums in self.sums.items():
            own = [span for span in self.spans if span.rank == rank]
            for span in sums:
                cuts = {span.start_ms, span.end_ms, *(t.start_ms for t in own), *(t.end_ms for t in own)}
                inside = sorted(cut for cut in cuts if span.start_ms <= cut <= span.end_ms)
                free = [
                    (start, end)
                    for start, end in pairwise(inside)
                    if not any(t.start_ms <= start and end <= t.end_ms for t in own)
                ]
                merged: list[SumSpan] = []
                for start, end in free:
                    first = merged.pop().start_ms if merged and merged[-1].end_ms == start else start
                    merged.append(SumSpan(rank, first, end))
                yield from merged

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
