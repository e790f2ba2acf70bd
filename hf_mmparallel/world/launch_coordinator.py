"""Decides who is a member: a pure function of one event after the other. Runs in the launcher of node 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .generations import Generation, Loss, Member


@dataclass(frozen=True)
class End:
    success: bool  # at least one process finished, and none failed that was not lost
    reason: str = ""  # why it failed
    all_are_ending: bool = False  # the processes that still run have reported why they end
    step: int = 0  # the furthest one that processes are known to have come to
    may_restart: bool = False  # all launchers are there, and this is not the same end as before, without a step more


class Coordinator:
    """The state of a job, which starts with `num_nodes` launchers."""

    def __init__(self, num_nodes: int, before: End | None = None):
        self._num_nodes = num_nodes
        self._before = before  # end of the job before it was started again
        self._gone: set[int] = set()  # launchers that would be missing if it was started again
        self._step = 0
        self._nodes: dict[int, list[Member]] = {}
        self._running: set[Member] = set()
        self._registered: set[Member] = set()  # they may be lost, until they finish
        self._finished: set[Member] = set()
        self._stuck: dict[int, str] = {}  # id -> since when a process has waited for others in one activity, in words
        self._anew = ""  # why the members have to meet anew
        self.is_over = False  # a process has trained to the end, and meets the others no more
        self.generation: Generation | None = None  # the newest; `None` until all launchers have reported their workers
        self.end: End | None = None  # `None` while processes run
        self.starting: list[Member] = []  # processes of launchers that join a running job, until they wait
        self.waiting: list[Member] = []  # processes that wait to join
        self._last_reason = ""

    @property
    def joinable(self) -> list[Member]:
        """Processes that wait to join together with all others of their launcher."""
        late = {member.node for member in self.starting}
        return [member for member in self.waiting if member.node not in late]

    def take(self, events: Sequence[Mapping[str, Any]]) -> Generation | None:
        """Takes events that happened at about the same time; returns the next generation if they make one."""
        losses: list[Loss] = []
        joined: list[Member] = []
        # an event has its `kind` and what the method of that name needs
        for event in events:
            handle: Callable[..., Any] = getattr(self, f"_take_{event['kind']}")
            change = handle(**{key: value for key, value in event.items() if key != "kind"})
            losses += [loss for loss in change if isinstance(loss, Loss)]
            joined += [member for member in change if isinstance(member, Member)]
        askers = tuple(event["id"] for event in events if event["kind"] == "accept")
        members = self.generation.members if self.generation else ()
        if members and self._stuck.keys() >= {member.id for member in members}:
            self._anew = f"all processes have waited for each other: {self._stuck[members[0].id]}"
        anew, self._anew = self._anew if self._registered.issuperset(members) else "", ""
        if losses or joined or askers or anew:
            self._stuck.clear()
            return self._next_generation(losses, joined, askers, "" if losses else anew)
        self._look_for_end()
        return None

    def _next_generation(
        self, losses: list[Loss], joined: list[Member], askers: tuple[int, ...], anew: str
    ) -> Generation | None:
        before = self.generation
        lost = {loss.member for loss in losses}
        members = [member for member in (before.members if before else ()) if member not in lost]
        members = sorted(member for member in [*members, *joined] if member in self._running)
        self._look_for_end()
        if not members:
            return None
        number = 0 if before is None else before.number + 1
        newcomers = tuple(joined) if before else ()
        self.generation = Generation(number, tuple(members), tuple(losses), newcomers, askers, anew)
        return self.generation

    def _look_for_end(self) -> None:
        members = self._running.difference(self.starting, self.waiting)
        if self.end is None and self.generation is not None and not members:
            if self._finished:
                self.end = End(True)
            else:
                self._fail(f"All processes were lost, the last one because of: {self._last_reason}", True)

    # Events. Each method returns the losses, or the members that join.

    def _take_node(self, node: int, ids: Sequence[int]) -> list[Member]:
        members = [Member(id, node) for id in ids]
        self._nodes[node] = members
        self._running.update(members)
        if self.generation is not None:
            self.starting += members
            return []
        if len(self._nodes) < self._num_nodes:
            return []
        return [member for members in self._nodes.values() for member in members]

    def _take_registered(self, id: int, node: int) -> list[Loss]:
        """The others go on from now on if this process dies; one that joins waits for them."""
        member = Member(id, node)
        if member in self.starting:
            self.starting.remove(member)
            self.waiting.append(member)
        self._registered.add(member)
        return []

    def _take_finished(self, id: int, node: int) -> list[Loss]:
        """A process has trained to the end. It will not meet the others again, so that no other may be lost."""
        self._registered.clear()
        self.is_over = True
        return []

    def _take_left(self, id: int, node: int, generation: int, reason: str, time: float) -> list[Loss]:
        """A process ends that gives a reason, or that the others do not need in a generation and those after it."""
        member = Member(id, node)
        if reason:
            return self._lose([member], reason, time)
        is_awaited = self.generation is not None and self.generation.number > generation
        # it is lost for a later generation that has it, so that the others do not wait for it
        if is_awaited and member in self._registered:
            return self._lose([member], "it belonged to a node that lost others", time)
        self._registered.discard(member)
        self._running.discard(member)
        return []

    def _take_ended(self, id: int, node: int, exit_code: int, reason: str, time: float, step: int) -> list[Loss]:
        self._step = max(self._step, step)
        member = Member(id, node)
        if exit_code == 0 and member in self._running.difference(self._registered, self.starting):
            self._running.remove(member)
            self._finished.add(member)
            return []
        return self._lose([member], reason, time)

    def _take_reported(self, id: int, node: int, reason: str, time: float, step: int, place: str = "") -> list[Loss]:
        """A process says that it is about to end because of an error, or its launcher that it does not go on."""
        self._step = max(self._step, step)
        return self._lose([Member(id, node)], reason, time, place)

    def _take_silent(self, node: int, reason: str, time: float) -> list[Loss]:
        self._gone.add(node)
        return self._lose(self._nodes.get(node, []), reason, time)

    def _take_leaving(self, node: int) -> list[Loss]:
        self._gone.add(node)
        return []

    def _take_failed(self, reason: str) -> list[Loss]:
        self._fail(reason)
        return []

    def _take_stuck(self, id: int, doing: str) -> list[Loss]:
        """A process has waited for others for longer than any activity may take."""
        self._stuck[id] = doing
        return []

    def _take_moves(self, id: int) -> list[Loss]:
        self._stuck.pop(id, None)
        return []

    def _take_cut(self, id: int, generation: int) -> list[Loss]:
        """A process has lost a connection in a generation none of whose members is known to be lost."""
        if self.generation is not None and self.generation.number == generation:
            self._anew = f"process {id} has lost a connection although all processes are alive"
        return []

    def _take_accept(self, id: int) -> list[Member]:
        """The members let in the processes that wait, and wait for the next generation, with or without them."""
        joined = self.joinable
        self.waiting = [member for member in self.waiting if member not in joined]
        return joined

    def _lose(self, members: Sequence[Member], reason: str, time: float, place: str = "") -> list[Loss]:
        """Takes members as lost, or the job as failed if one of them has not registered."""
        losses = []
        for member in sorted(self._running.intersection(members)):
            self._running.remove(member)
            waits = [members for members in (self.starting, self.waiting) if member in members]
            if waits:
                waits[0].remove(member)
                self._registered.discard(member)
            elif member in self._registered:
                self._registered.remove(member)
                self._last_reason = reason
                losses.append(Loss(member, reason, time, place))
            else:
                self._fail(f"Process {member.id} of node {member.node}: {reason}.")
        return losses

    def _fail(self, reason: str, all_are_ending: bool = False) -> None:
        if self.end is None:
            before, launchers = self._before, range(self._num_nodes)
            is_same = before is not None and _words(reason) == _words(before.reason) and self._step <= before.step
            may_restart = self._gone.isdisjoint(launchers) and not is_same
            self.end = End(False, reason, all_are_ending, self._step, may_restart)


def _words(reason: str) -> str:
    """A reason without numbers, such as that of the process."""
    return re.sub(r"\d+", "", reason)


def _processes(ids: Sequence[int], node: int) -> str:
    return f"process{'es' if len(ids) > 1 else ''} {', '.join(map(str, ids))} of node {node}"


def loss_sentence(generation: Generation) -> str:
    """One line about the losses of a generation."""
    reasons: dict[tuple[int, str], list[int]] = {}
    for loss in generation.losses:
        reasons.setdefault((loss.member.node, loss.reason), []).append(loss.member.id)
    parts = [f"{_processes(ids, node)} ({reason})" for (node, reason), ids in reasons.items()]
    others = f"the other {len(generation.members)} go on" if len(generation.members) > 1 else "the last one goes on"
    return f"lost {', '.join(parts)}; {others}"


def anew_sentence(generation: Generation) -> str:
    return f"{generation.anew}; {len(generation.members)} meet anew and do the last work again"


def join_sentence(generation: Generation) -> str:
    """One line about the members that join in a generation."""
    by_node: dict[int, list[int]] = {}
    for member in generation.joined:
        by_node.setdefault(member.node, []).append(member.id)
    parts = (_processes(ids, node) for node, ids in by_node.items())
    return f"{', '.join(parts)} joined; {len(generation.members)} go on"
