"""What a job achieves under a trace of failures with any way to recover, and random traces of spot markets."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from hf_mmparallel.resilience.trace_replay import Trace

Cause = Literal["computing", "redundant", "lost", "copying", "saving", "restarting", "idle"]
# What the time of nodes goes to: samples that count, computation that is done a second time to survive failures,
# samples that are computed again, copies of missing weights, checkpoints, detection and new groups or processes, and
# nodes that are there and have nothing to do.
CAUSES: tuple[Cause, ...] = ("computing", "redundant", "lost", "copying", "saving", "restarting", "idle")


@dataclass(frozen=True)
class Pace:
    """How a job runs between two events."""

    step_s: float
    num_nodes: int  # that compute
    redundant_share: float = 0.0  # share of the step in which nodes compute what others compute as well
    save_every: int | None = None  # steps between two checkpoints; none by default
    save_s: float = 0.0  # for which a checkpoint blocks the job


@dataclass(frozen=True)
class Transition:
    """What an event does to a job."""

    pace: Pace | None  # how it runs afterwards; `None` if it can't
    pauses: tuple[tuple[Cause, float], ...] = ()  # causes and seconds of what it does before that
    loses: Literal["nothing", "step", "saved"] = "nothing"  # the running step, or all since the last checkpoint


class RecoveryPolicy(Protocol):
    """How a job reacts to nodes that are lost and nodes that join. It has the state of one replay."""

    def lose(self, nodes: frozenset[int], waiting: frozenset[int]) -> tuple[Transition | None, bool]:
        """
        What a loss of nodes does, `None` if the job goes on as before; and whether the nodes that wait to join are
        taken in with it.
        """
        ...

    def join(self, nodes: frozenset[int]) -> Transition | None:
        """What nodes do that join at the end of a step; `None` if the job goes on as before."""
        ...

    def settle(self) -> None:
        """The pauses of the last transition are over."""
        ...


@dataclass(frozen=True)
class ReplaySpan:
    """A time in which a job does one thing."""

    start_s: float
    end_s: float
    cause: Cause  # see `CAUSES`; "redundant" is a part of "computing" here
    num_nodes: int  # that are there
    pace: Pace | None = None  # how it computes

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Replay:
    """A job under a trace of failures."""

    spans: tuple[ReplaySpan, ...]  # in the order of time
    samples_per_step: int

    @property
    def length_s(self) -> float:
        return self.spans[-1].end_s - self.spans[0].start_s if self.spans else 0.0

    @property
    def samples(self) -> float:
        """Samples that were not lost again."""
        return sum(self._rate(span) * span.seconds for span in self.spans)

    @property
    def samples_per_second(self) -> float:
        """Mean throughput."""
        return self.samples / self.length_s if self.length_s else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Cause -> share of the time of all nodes."""
        seconds: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        for span in self.spans:
            if span.pace is None:
                seconds[span.cause] += span.seconds * span.num_nodes
                continue
            used = min(span.pace.num_nodes, span.num_nodes)
            redundant = span.pace.redundant_share if span.cause == "computing" else 0.0
            seconds[span.cause] += span.seconds * used * (1 - redundant)
            seconds["redundant"] += span.seconds * used * redundant
            seconds["idle"] += span.seconds * (span.num_nodes - used)
        total = sum(seconds.values())
        return {cause: value / total if total else 0.0 for cause, value in seconds.items()}

    def _rate(self, span: ReplaySpan) -> float:
        return self.samples_per_step / span.pace.step_s if span.cause == "computing" and span.pace else 0.0


def replay_trace(trace: Trace, policy: RecoveryPolicy, samples_per_step: int) -> Replay:
    """
    Replays a trace with one way to recover, which the replay uses up.

    The job runs in whole steps. A node that joins is taken in at the end of the running step. What a loss takes away,
    the running step or all since the last checkpoint, is computed again and doesn't count; so does a step that runs at
    the end.
    """
    run = _Run(policy)
    for event in trace.events:
        run.until(event.time_s)
        run.change(event.lost, event.joined)
    run.until(trace.end_s)
    run.lose_since(run.step_start_s)
    return Replay(tuple(run.spans), samples_per_step)


class _Run:
    """A job while its trace is replayed; `step_start_s` and `saved_s` are where it would go on after a loss."""

    def __init__(self, policy: RecoveryPolicy):
        self.policy = policy
        self.spans: list[ReplaySpan] = []
        self.now_s = self.step_start_s = self.saved_s = 0.0
        self.num_nodes = self.unsaved_steps = 0
        self.pace: Pace | None = None
        self.pauses: list[tuple[Cause, float]] = []
        self.waiting: frozenset[int] = frozenset()

    def until(self, time_s: float) -> None:
        """Runs up to a time."""
        while self.now_s < time_s:
            if self.pauses:
                self._pause(time_s)
            elif self.waiting and (self.pace is None or self.now_s == self.step_start_s):
                self._take_in()
            elif self.pace is None:
                self._add("idle", time_s)
            else:
                self._compute(self.pace, time_s)

    def change(self, lost: frozenset[int], joined: frozenset[int]) -> None:
        """An event of the trace."""
        self.num_nodes += len(joined) - len(lost)
        members = lost - self.waiting
        self.waiting = (self.waiting - lost) | joined
        if members:
            transition, takes_in = self.policy.lose(members, self.waiting)
            self.waiting = frozenset() if takes_in else self.waiting
            self._apply(transition)

    def lose_since(self, since_s: float) -> None:
        """What was computed since then does not count."""
        kept: list[ReplaySpan] = []
        while self.spans and self.spans[-1].end_s > since_s:
            span = self.spans.pop()
            if span.cause == "computing":
                cut_s = max(since_s, span.start_s)
                kept.append(replace(span, start_s=cut_s, cause="lost"))
                span = replace(span, end_s=cut_s)
            if span.end_s > span.start_s:
                kept.append(span)
        self.spans += reversed(kept)

    def _apply(self, transition: Transition | None) -> None:
        if transition is None:
            return
        if transition.loses == "saved":
            self.lose_since(self.saved_s)
            self.unsaved_steps = 0
        elif transition.loses == "step":
            self.lose_since(self.step_start_s)
        self.pace, self.pauses = transition.pace, [pause for pause in transition.pauses if pause[1] > 0]
        self.step_start_s = self.now_s
        if not self.pauses:
            self.policy.settle()

    def _take_in(self) -> None:
        joined, self.waiting = self.waiting, frozenset()
        self._apply(self.policy.join(joined))

    def _pause(self, time_s: float) -> None:
        cause, left_s = self.pauses[0]
        end_s = self.now_s + left_s
        self._add(cause, min(end_s, time_s))
        self.step_start_s = self.now_s
        if end_s > time_s:
            self.pauses[0] = (cause, end_s - time_s)
            return
        del self.pauses[0]
        if cause == "saving":
            self.saved_s, self.unsaved_steps = self.now_s, 0
        if not self.pauses:
            self.policy.settle()

    def _compute(self, pace: Pace, time_s: float) -> None:
        """Computes whole steps up to the next checkpoint, node that waits or time, or a part of a step."""
        end_s = self.step_start_s + pace.step_s
        if end_s > time_s:
            self._add("computing", time_s, pace)
            return
        count = 1 if self.waiting else 1 + int((time_s - end_s) / pace.step_s)
        if pace.save_every is not None:
            count = min(count, max(pace.save_every - self.unsaved_steps, 1))
        self._add("computing", min(end_s + (count - 1) * pace.step_s, time_s), pace)
        self.step_start_s = self.now_s
        self.unsaved_steps += count
        if pace.save_every is not None and self.unsaved_steps >= pace.save_every:
            if pace.save_s > 0:
                self.pauses = [("saving", pace.save_s)]
            else:
                self.saved_s, self.unsaved_steps = self.now_s, 0

    def _add(self, cause: Cause, end_s: float, pace: Pace | None = None) -> None:
        span = ReplaySpan(self.now_s, end_s, cause, self.num_nodes, pace)
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.cause, last.num_nodes, last.pace) == (cause, self.num_nodes, pace):
            self.spans[-1] = replace(last, end_s=end_s)
        else:
            self.spans.append(span)
        self.now_s = end_s


@dataclass(frozen=True)
class SpotMarket:
    """
    How nodes of spot instances come and go: at random times some are taken away together, and each is replaced after a
    random time.
    """

    num_nodes: int  # that are asked for, all of which are there at the start
    loss_every_s: float  # mean time between two losses
    most_at_once: int  # a loss takes between one and this number of nodes, all equally likely
    replaced_after_s: float  # mean time until a lost node is replaced by another one

    def trace(self, length_s: float, seed: int = 0) -> Trace:
        """Draws a trace of this length."""
        rng = random.Random(seed)
        present, number = list(range(self.num_nodes)), self.num_nodes
        rows = [(0.0, "add", f"node{node}") for node in present]
        joins: list[float] = []
        loss_s = rng.expovariate(1 / self.loss_every_s)
        while min([loss_s, *joins[:1]]) < length_s:
            if joins and joins[0] <= loss_s:
                rows.append((1e3 * heapq.heappop(joins), "add", f"node{number}"))
                present.append(number)
                number += 1
                continue
            for node in rng.sample(present, min(len(present), rng.randint(1, self.most_at_once))):
                present.remove(node)
                rows.append((1e3 * loss_s, "remove", f"node{node}"))
                heapq.heappush(joins, loss_s + rng.expovariate(1 / self.replaced_after_s))
            loss_s += rng.expovariate(1 / self.loss_every_s)
        return Trace.of(rows, length_s)
