"""Replays a program: how long it takes, who waits, how much is in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from ..plan import ParallelPlan
from .actions import Action, DeadlockError, Message, StageKey, Task
from .program import Program
from .program_checks import waiting_table
from .scheduler import Cost, default_cost


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """
    A task on a rank from `start_ms` to `end_ms`, predicted or measured.

    Args:
        rank (`int`): The rank.
        task (`Task`): The task.
        start_ms (`float`): Its start.
        end_ms (`float`): Its end.
    """

    rank: int
    task: Task
    start_ms: float
    end_ms: float


@dataclass(frozen=True, order=True, slots=True)
class SumSpan:
    """
    Gradient sums on a rank, one right after the other, from `start_ms` to `end_ms`.

    Args:
        rank (`int`): The rank.
        start_ms (`float`): Start of the first one.
        end_ms (`float`): End of the last one.
    """

    rank: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Simulation:
    """
    What a replay of a program gives.

    Args:
        spans (`tuple[Span, ...]`): Every task on every rank, in the order of their starts.
        iteration_ms (`float`): From the first start to the end of the last action.
        num_ranks (`int`): Ranks of the plan, with those that have nothing to do.
        peak_in_flight (`dict[tuple[str, int, int], float]`):
            (module, replica, stage) -> the most microbatches whose forward is done or running and whose backward is
            not done; a chunk counts as its share of the microbatch.
        sums (`tuple[SumSpan, ...]`, *optional*): The gradient sums that take time, in the order of their starts.
    """

    spans: tuple[Span, ...]
    iteration_ms: float
    num_ranks: int
    peak_in_flight: dict[StageKey, float]
    sums: tuple[SumSpan, ...] = ()

    @cached_property
    def busy_ms(self) -> dict[int, float]:
        """Rank -> time in tasks."""
        busy = dict.fromkeys(range(self.num_ranks), 0.0)
        for span in self.spans:
            busy[span.rank] += span.end_ms - span.start_ms
        return busy

    @property
    def bubble_fraction(self) -> float:
        """The share of all ranks' time that is not spent in tasks."""
        total = self.iteration_ms * self.num_ranks
        return 1 - sum(self.busy_ms.values()) / total if total else 0.0


def simulate(
    plan: ParallelPlan,
    program: Program,
    cost: Cost | None = None,
    comm_ms: float | Callable[[Message], float] = 0.0,
    sync_ms: float | Callable[[int], float] = 0.0,
) -> Simulation:
    """
    Replays the lists of a program.

    A task starts when all ranks of its stage have come to it and all messages to it have arrived; a gradient sum when
    all of its ranks have come to it. Sends and receives take no time of a rank.

    Args:
        plan (`ParallelPlan`): The layout.
        program (`Program`): The program.
        cost (`Callable[[Task], float]`, *optional*): Task -> milliseconds; a backward is two forwards when left out.
        comm_ms (`float` or `Callable[[Message], float]`, *optional*, defaults to 0): Time that a message travels.
        sync_ms (`float` or `Callable[[int], float]`, *optional*, defaults to 0): Time of the gradient sum of a group.

    Returns:
        `Simulation`: Times and memory.

    Raises:
        `DeadlockError`: If ranks wait for ever; it names the action that each waits at.
    """
    return _Replay(plan, program, cost or default_cost, _function(comm_ms), _function(sync_ms)).run()


def microbatch_forward_ms(spans: Iterable[Span]) -> dict[tuple[str, int], np.ndarray]:
    """
    How long the forward of each microbatch takes.

    Args:
        spans (`Iterable[Span]`): Tasks as predicted or measured; of one on several ranks the slowest counts.

    Returns:
        `dict[tuple[str, int], np.ndarray]`: (module, replica) -> float64 `[num_microbatches]`: milliseconds, summed
        over the stages and chunks of a microbatch; 0 for one without samples.
    """
    times: dict[Task, float] = {}
    for span in spans:
        if span.task.kind == "fwd":
            times[span.task] = max(times.get(span.task, 0.0), span.end_ms - span.start_ms)
    counts: dict[tuple[str, int], int] = {}
    for task in times:
        key = (task.module, task.replica)
        counts[key] = max(counts.get(key, 0), task.microbatch + 1)
    result = {key: np.zeros(count) for key, count in sorted(counts.items())}
    for task in sorted(times):
        result[task.module, task.replica][task.microbatch] += times[task]
    return result


def _function(value: float | Callable) -> Callable:
    return value if callable(value) else lambda _: value


class _Gate:
    """A blocking action, and what it waits for: ranks to come, messages to arrive."""

    __slots__ = ("action", "arrived", "duration_ms", "messages", "ready_ms", "wanted")

    def __init__(self, action: Action, wanted: int, duration_ms: float):
        self.action = action
        self.wanted = wanted
        self.duration_ms = duration_ms
        self.arrived: list[int] = []
        self.messages = 0
        self.ready_ms = 0.0


class _Mail:
    """A message on its way: how many of its source ranks have not sent it, and the gate that it opens."""

    __slots__ = ("gate", "sent_ms", "travel_ms", "unsent")

    def __init__(self, gate: _Gate, unsent: int, travel_ms: float):
        self.gate = gate
        self.unsent = unsent
        self.travel_ms = travel_ms
        self.sent_ms = 0.0


class _Replay:
    """Moves each rank through its list as far as it gets, until all are through."""

    def __init__(self, plan: ParallelPlan, program: Program, cost: Cost, comm_ms: Callable, sync_ms: Callable):
        self.plan, self.program = plan, program
        self.cost, self.comm_ms, self.sync_ms = cost, comm_ms, sync_ms
        self.gates: dict[Action, _Gate] = {}
        self.mail: dict[Message, _Mail] = {}
        # Ranks of a stage share action objects, so that most look-ups need no hash of a whole action.
        self.known: dict[int, _Gate | _Mail | None] = {}
        for actions in program.actions.values():
            for action in actions:
                if action.message is None:
                    self._read_gate(action)
        recvs = {id(a): a.message for actions in program.actions.values() for a in actions if a.op == "recv"}
        for message in set(recvs.values()):
            if message is not None and (gate := self.gates.get(Action.run(message.target))) is not None:
                self.mail[message] = _Mail(gate, len(self._ranks(message.source)), comm_ms(message))
                gate.messages += 1
        self.position = dict.fromkeys(program.actions, 0)
        self.time_ms = dict.fromkeys(program.actions, 0.0)
        self.spans: list[Span] = []
        self.sums: dict[int, list[SumSpan]] = {}

    def _read_gate(self, action: Action) -> None:
        """Makes the gate of a blocking action, or notes that a gradient sum has one more rank."""
        gate = self.known.get(id(action)) or self.gates.get(action)
        if gate is None and action.task is None:
            gate = self.gates[action] = _Gate(action, 0, self.sync_ms(action.index))
        elif gate is None and action.task is not None:
            gate = self.gates[action] = _Gate(action, len(self._ranks(action.task)), self.cost(action.task))
        assert isinstance(gate, _Gate)
        gate.wanted += action.op == "sync"
        self.known[id(action)] = gate

    def _ranks(self, task: Task) -> tuple[int, ...]:
        return self.plan.stage(task.module, task.replica, task.stage).all_ranks

    def run(self) -> Simulation:
        """Replays to the end."""
        ready = list(self.program.actions)
        while ready:
            rank = ready.pop()
            gate = self._advance(rank, ready)
            if gate is not None:
                gate.arrived.append(rank)
                gate.ready_ms = max(gate.ready_ms, self.time_ms[rank])
                self._try(gate, ready)
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

    def _advance(self, rank: int, ready: list[int]) -> _Gate | None:
        """Runs what does not block; returns where the rank blocks."""
        actions = self.program.actions[rank]
        while self.position[rank] < len(actions):
            action = actions[self.position[rank]]
            if action.message is None:
                gate = self.known[id(action)]
                assert isinstance(gate, _Gate)
                return gate
            self.position[rank] += 1
            if action.op == "send":
                if id(action) not in self.known:
                    self.known[id(action)] = self.mail.get(action.message)
                mail = self.known[id(action)]
                if isinstance(mail, _Mail):
                    self._send(mail, self.time_ms[rank], ready)
        return None

    def _send(self, mail: _Mail, now: float, ready: list[int]) -> None:
        """Notes that one source rank has sent; with the last one the message travels."""
        mail.unsent -= 1
        mail.sent_ms = max(mail.sent_ms, now)
        if mail.unsent == 0:
            mail.gate.messages -= 1
            mail.gate.ready_ms = max(mail.gate.ready_ms, mail.sent_ms + mail.travel_ms)
            self._try(mail.gate, ready)

    def _try(self, gate: _Gate, ready: list[int]) -> None:
        """Runs a blocking action if nothing is missing any more."""
        if gate.messages or len(gate.arrived) < gate.wanted:
            return
        end = gate.ready_ms + gate.duration_ms
        for rank in gate.arrived:
            self.position[rank] += 1
            self.time_ms[rank] = end
            if gate.action.task is not None:
                self.spans.append(Span(rank, gate.action.task, gate.ready_ms, end))
            elif gate.duration_ms:
                self._add_sum(rank, gate.ready_ms, end)
        ready.extend(gate.arrived)

    def _add_sum(self, rank: int, start_ms: float, end_ms: float) -> None:
        """Notes a gradient sum, as a part of the one before if it follows without a pause."""
        sums = self.sums.setdefault(rank, [])
        if sums and sums[-1].end_ms == start_ms:
            start_ms = sums.pop().start_ms
        sums.append(SumSpan(rank, start_ms, end_ms))


def _peak_in_flight(spans: Sequence[Span]) -> dict[StageKey, float]:
    """The most microbatches between the start of their forward and the end of their backward, for each stage."""
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
        live = peak = 0.0
        for _, change in sorted(changes):
            live += change
            peak = max(peak, live)
        peaks[stage] = round(peak, 6)
    return peaks
