"""
A training run that goes on when ranks are lost or join: who is there, what they are done with, and the next plan.

Work of all ranks counts from the moment in which any of them knows that all were done with it: those who are left have
its result, and who did not know yet learns it when they meet. If none knows, all repeat it. Of a step the norm of the
gradient says so: for it every rank had complete sums of gradients. Evaluations, checkpoints and the copies of a new
layout end with a barrier. Ranks that join are let in between two steps, when all others have come there; they hold
nothing, and get what the first rank tells of the run.
"""

from __future__ import annotations

import contextlib
import gc
import json
import pickle
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from .._device import synchronize
from ..resilience.pipelines import ClusterPlan, TooFewNodesError
from ..runtime.held_state import HeldParameter, exchange
from ..world import Generation, Membership, World, failures_left_to, is_lost_connection, track_activity
from ..world.generations import LEFT, Loss, put, take
from ..world.membership import FinishedRunError, NoLossError
from .recovery_plan import NodeLayouts

T = TypeVar("T")
Held = dict[str, HeldParameter]
_POLL_S = 0.02
_NEWS_S = 30.0  # time in which the launcher says who was lost, after a connection was
_ANEW = "meeting anew"  # in place of a line that has raised an exception


class RepeatedFailureError(Exception):
    """What ended a rank ended another one, too, when it did the same work again: it is no failure of a node."""


def place_of(error: BaseException) -> str:
    """The kind of an exception and the line that raised it, by which ranks know it again; none of connections."""
    # two ranks whose connections end or are silent have not failed in the same work, but on the same network
    if isinstance(error, NoLossError | dist.DistError) or is_lost_connection(error):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__


class LostRanksError(RuntimeError):
    """Ranks were lost, and this one has not noticed by a connection of its own."""


@dataclass
class MembershipChange:
    """What became of a run when ranks were lost or joined. Times are in seconds, of this rank."""

    lost: tuple[int, ...] = ()  # members, by their numbers in the launch
    reasons: tuple[str, ...] = ()  # what is known of why; also why ranks met anew of whom none was lost
    joined: tuple[int, ...] = ()  # members, by their numbers in the launch
    step: int = 0  # steps that are done
    world_size: int = 0  # ranks that go on
    lost_at: float = 0.0  # when the first loss was noticed, or others were let in, in seconds since the epoch
    stopped_s: float = 0.0  # from `lost_at` until this rank had stopped its work
    regrouped_s: float = 0.0  # from `lost_at` until the ranks had met, planned and were connected
    planned_s: float = 0.0  # time of that in which the new plan was made
    copied_s: float = 0.0  # in which parameters and their state were copied
    copied_bytes: int = 0  # that all ranks received
    total_s: float = 0.0  # from the loss, or from when others were let in, until the run goes on
    layout: str = ""  # the new one
    reason: str = ""  # why it is this one

    @property
    def sentence(self) -> str:
        """What happened, in one line."""
        changes = []
        if self.lost:
            changes.append(f"lost {_named(self.lost)} ({'; '.join(dict.fromkeys(self.reasons))})")
        if self.joined:
            changes.append(f"{_named(self.joined)} joined")
        change = " and ".join(changes) or f"the ranks met anew ({'; '.join(dict.fromkeys(self.reasons))})"
        return (
            f"{change[0].upper()}{change[1:]} after step {self.step}. {self.world_size} ranks go on as {self.layout}: "
            f"met after {self.regrouped_s:.2f} s, planned in {self.planned_s:.2f} s, copied "
            f"{self.copied_bytes / 2**20:.1f} MiB in {self.copied_s:.2f} s, {self.total_s:.2f} s in all."
            + (f" {self.reason}." if self.reason else "")
        )


def _named(members: Sequence[int]) -> str:
    return f"member{'' if len(members) == 1 else 's'} {', '.join(map(str, members))}"


@dataclass(frozen=True)
class _JoinMessage:
    """What ranks that join are told."""

    planner: NodeLayouts
    layout: ClusterPlan  # before they join
    report: _Report  # of the rank that tells them
    run: bytes  # what else they need to know of the run


@dataclass(frozen=True)
class _Report:
    """What a rank says of itself when the ranks meet."""

    num_layouts: int  # before the one that it has all parameters of
    num_done: int  # pieces of work that it knows all ranks to be done with
    value: float  # what it knows of the last of them, such as the norm of the gradient
    # [`place_of`] -> meetings after an exception there, in the piece of work that is not done, and its message
    raised: dict[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: bytes) -> _Report:
        data = json.loads(text)
        return cls(**{**data, "raised": {place: tuple(entry) for place, entry in data["raised"].items()}})


class Recovery:
    """Repeats the work of a run when ranks are lost in it, on those that are left, and lets others in."""

    def __init__(
        self,
        membership: Membership,
        world: World,
        planner: NodeLayouts,
        layout: ClusterPlan,
        holds: Callable[[], Held],
        follow: Callable[[Any, Held, MembershipChange], None],
        tell: Callable[[], bytes] = bytes,
    ):
        self.membership = membership
        self.world = world  # the ranks, which get new numbers
        self.planner = planner
        self.layout: Any = layout  # at the start; of a rank that joins, any
        self.events: list[MembershipChange] = []  # what has happened so far
        self._holds = holds  # returns what this rank holds of the model and its optimizer
        self._follow = follow  # lays the model out, and goes back to the last step that is done; collective
        self._tell = tell  # returns what ranks that join need to know of the run
        self._backend, self._timeout = dist.get_backend_config(), world.timeout
        self._num_layouts = 0
        self._next: Any = None  # layout of the ranks that have met
        self._prepared: tuple[Any, Held] | None = None  # all that this rank needs for the next layout
        self._held: Held | None = None  # what it has while its model is not laid out as `layout`
        self._num_done = 0
        self._value = 0.0
        self._raised: dict[str, tuple[int, str]] = {}
        self._has_met_anew = False  # in the work that is not done
        self._event = MembershipChange()
        self._ends_with: TooFewNodesError | RepeatedFailureError | None = None
        self._is_last = False  # layout is one for a last checkpoint
        self._block: contextlib.ExitStack | None = None  # in which failures are left to this object

    # For the run

    @property
    def has_begun(self) -> bool:
        """Whether the others go on if this rank is lost."""
        return self._block is not None

    @property
    def local_rank(self) -> int:
        """The number of this rank on its host."""
        generation, own = self.membership.generation, self.membership.id
        assert generation is not None
        host = next(member.node for member in generation.members if member.id == own)
        members = [member.id for member in generation.members if member.node == host]
        return [id for id in members if id in self.layout.members].index(own)

    def _begin(self) -> None:
        """Lets the run go on without this rank if it is lost, from the first work that can be repeated on."""
        if self._block is None:
            self._block = contextlib.ExitStack()
            self._block.enter_context(failures_left_to(self.raise_if_stale))
            self.membership.register()

    def end(self) -> None:
        """Leaves failures to what is around the run again."""
        if self._block is not None:
            self._block.close()
            self._block = None

    def run(self, work: Callable[[], T]) -> T:
        """Does work in which ranks communicate; again, if ranks are lost in it, until a `commit` makes it count."""
        self._begin()
        while True:
            try:
                self._settle()
                return work()
            except Exception as error:
                self._meet_after(error)

    def commit(self, own: Callable[[], float]) -> float | None:
        """
        Makes the work since the last call count; `None` if it has to be repeated, since ranks were lost before any
        knew that all were done with it. Else the sum over all ranks of what `own` returns, which waits for the device.
        """
        before = self._num_done
        try:
            value = self._sum(own)
        except Exception as error:
            try:
                self._meet_after(error)
            except FinishedRunError:  # who has finished knew that all were done with the last work
                return 0.0
            return None if self._num_done == before else self._value
        self._count_done(self._num_done + 1, value)
        return value

    def _count_done(self, number: int, value: float) -> None:
        """Notes how many pieces of work are done, and what is known of the last of them."""
        if number > self._num_done:
            self._raised, self._has_met_anew = {}, False
        self._num_done, self._value = number, value

    def complete(self, work: Callable[[], T]) -> T:
        """Does some work in which ranks communicate until all of them have its result."""
        while True:
            result = self.run(work)
            if self.commit(float) is not None:
                return result

    def _sum(self, own: Callable[[], float]) -> float:
        """The sum over all ranks, none of which has computed its number with what an aborted collective left."""
        number = torch.tensor(own(), dtype=torch.float64)
        # A collective that is aborted on a device, and a wait that is ended, leave any number without an error; but no
        # rank aborts one before it knows of a loss.
        self.raise_if_stale()
        total = self.world.all_reduce(number, activity="knowing that all ranks are done")
        self.raise_if_stale()
        return float(total)

    # Ranks that leave and join

    def let_leave(self, is_asked: bool) -> None:
        """
        Goes on without the nodes of ranks that are asked to leave, between two steps; raises [`TooFewNodesError`] if
        too few nodes would be left. Called by all ranks; some may be lost meanwhile.
        """
        own = self.membership.id
        asked = self.complete(lambda: self.world.all_gather(own if is_asked else None, "letting others leave"))
        try:
            leaving = self._leaving({member for member in asked if member is not None})
        except TooFewNodesError:
            self._is_last = True
            raise
        if own in leaving:
            self.membership.leave(LEFT)
            self.world.leave()
            raise SystemExit(0)
        if leaving:
            self._meet_until_done(time.time())

    def _leaving(self, asked: Collection[int]) -> Collection[int]:
        generation = self.membership.generation
        assert generation is not None
        leaving = self.planner.leaving(self.layout, asked) if asked else ()
        on_first = {member.id for member in generation.members if member.node == 0}.intersection(self.layout.members)
        if on_first and on_first.issubset(leaving):
            raise TooFewNodesError("Machine 0 is taken away, whose launcher keeps the job together.")
        # those who are gone already: this rank heard of it before it knew that all agreed, and has met the others then
        return set(leaving).intersection(generation.ids)

    def take_in(self) -> None:
        """Lets in the processes that wait, between two steps. Called by all ranks; some may be lost meanwhile."""
        try:
            self._settle()
            self.world.barrier("letting others join")  # all are between the same steps when others come
        except Exception as error:
            self._meet_after(error)
            return
        if self.world.is_first:
            self.membership.accept_joining()
        self._meet_until_done(time.time())

    def wait_to_join(self) -> bytes:
        """Waits until the ranks of a running job let this one in; returns what they tell of the run."""
        self._begin()
        self._held = {}
        while True:
            generation = self.membership.next_generation(None)
            if self.membership.is_newcomer(generation.ids[0]):
                raise RuntimeError("All ranks that have trained are lost, so that nobody has the model any longer.")
            while generation is self.membership.newest:
                if self.membership.store.check([_join_key(generation)]):
                    return self._read_told(generation)
                time.sleep(_POLL_S)

    def _read_told(self, generation: Generation) -> bytes:
        told: _JoinMessage = pickle.loads(take(self.membership.store, _join_key(generation)))
        self.planner, self.layout = told.planner, told.layout
        self._num_layouts, self._num_done, self._value, self._raised = vars(told.report).values()
        return told.run

    def _send_join_state(self, generation: Generation, report: _Report) -> None:
        """Tells ranks that join what they need to know, if this is the first rank."""
        members = set(self.layout.members)
        if self.membership.id == generation.ids[0] in members and not members.issuperset(generation.ids):
            told = _JoinMessage(self.planner, self.layout, report, self._tell())
            put(self.membership.store, _join_key(generation), pickle.dumps(told))

    # The steps of a recovery

    def raise_if_stale(self) -> None:
        """Raises [`LostRanksError`] if this rank has not yet met the others after ranks were lost."""
        if self.membership.is_stale:
            raise LostRanksError("Ranks were lost.")

    def is_loss(self, error: Exception) -> bool:
        return self.membership.is_stale or is_lost_connection(error)

    def _meet_after(self, error: Exception) -> None:
        """Meets the ranks that are left; raises the error if no rank was lost."""
        if not self.is_loss(error):
            raise error
        stopped_at = time.time()
        traceback.clear_frames(error.__traceback__)  # of tensors and handles of the groups that are lost
        self._meet_until_done(stopped_at)

    def _meet_until_done(self, stopped_at: float) -> None:
        with track_activity("meeting the other ranks", waits=True):
            while not self._meet(stopped_at):
                pass

    def _meet(self, stopped_at: float) -> bool:
        """Whether the ranks that are left could meet, make groups, and agree on what is done."""
        self.world.leave()
        gc.collect()
        generation = self._next_generation()
        losses, anew = self.membership.losses, self.membership.anew
        report = _Report(self._num_layouts, self._num_done, self._value, self._raised_with(losses, anew))
        self._send_join_state(generation, report)
        reports = self._reports(generation, report)
        if reports is None:
            return False
        self.membership.enter(generation)
        self._agree(reports)
        self._has_met_anew |= bool(anew)
        self._event = self._event_of(losses, anew, stopped_at)
        started_s = time.perf_counter()
        self._next = self._layout_of(set(generation.ids))
        if repeated := [message for times, message in self._raised.values() if times > 1]:
            text = f"The same failure came again when ranks repeated their work, so that none can do it: {repeated[0]}"
            self._ends_with = None if self._is_last else RepeatedFailureError(text)
        self._event.planned_s = time.perf_counter() - started_s
        self._event.world_size = len(self._next.members)
        new = {*self._event.joined, *(set(self._next.members) - set(self.layout.members))}
        self._event.joined = tuple(sorted(new.intersection(self._next.members)))
        if self.membership.id not in self._next.members:
            self._leave()
        rank = self._next.members.index(self.membership.id)
        size = len(self._next.members)
        try:
            self.world.join(self.membership.new_store(), rank, size, self._backend, self._timeout)
        except RuntimeError as error:
            if not self.is_loss(error):
                raise
            return False  # another rank may know of the next loss before this one does
        self._event.regrouped_s = time.time() - self._event.lost_at
        return True

    def _next_generation(self) -> Generation:
        """
        The ranks that are left. All meet anew if this one has lost a connection although nobody died; a second time in
        the same work it ends, and the others go on without it.
        """
        try:
            return self.membership.next_generation(_NEWS_S)
        except NoLossError:
            if self._has_met_anew:
                raise
            self.membership.ask_to_meet_anew()
            return self.membership.next_generation(_NEWS_S)

    def _layout_of(self, members: set[int]) -> ClusterPlan:
        lost, joined = set(self.layout.members) - members, members - set(self.layout.members)
        try:
            layout = self.planner.without(self.layout, lost) if lost else self.layout
        except TooFewNodesError as error:
            layout = self.planner.last(self.layout, lost)
            self._ends_with = None if self._is_last else error
        if joined:
            num_left, layout = len(layout.members), self.planner.with_members(layout, joined)
            if len(layout.members) > num_left:  # enough again
                self._ends_with = None
        return layout

    def _leave(self) -> NoReturn:
        """Ends this process, which is alive but has no place: its node is not whole, or is of no use."""
        self.membership.leave()
        raise SystemExit(
            f"Process {self.membership.id} ends: its node has lost others and with them its copy of layers, or no "
            "pipelines could use it beside the other nodes."
        )

    def _event_of(self, losses: Sequence[Loss], anew: str, stopped_at: float) -> MembershipChange:
        before = MembershipChange() if self._next is None else self._event
        lost_at = min((loss.time for loss in losses), default=stopped_at)
        return MembershipChange(
            lost=(*before.lost, *(loss.member.id for loss in losses)),
            reasons=(*before.reasons, *(loss.reason for loss in losses), *([anew] if anew else [])),
            joined=before.joined,
            lost_at=before.lost_at or lost_at,
            stopped_s=stopped_at - lost_at,
        )

    def _reports(self, generation: Generation, mine: _Report) -> list[_Report] | None:
        """What the members of a generation say of themselves; `None` if another is lost before all have come."""
        store, key = self.membership.store, f"report/{generation.number}"
        store.set(f"{key}/{self.membership.id}", json.dumps(vars(mine)))
        if not self.membership.meet(generation):
            return None
        stored = store.multi_get([f"{key}/{member.id}" for member in generation.members])
        return [_Report.from_json(value) for value in stored]

    def _raised_with(self, losses: Sequence[Loss], anew: str = "") -> dict[str, tuple[int, str]]:
        """The exceptions in the work that is not done, with those of a meeting; none of a rank that joins."""
        now = {loss.place: loss.reason for loss in losses if loss.place}
        if anew:  # ranks that wait for each other do so again if that is due to what they do
            now[_ANEW] = anew
        more = {place: (self._raised.get(place, (0, ""))[0] + 1, reason) for place, reason in now.items()}
        return self._raised | more

    def _agree(self, reports: Sequence[_Report]) -> None:
        """Goes on from the last layout and the last work that any rank knows to count."""
        if max(report.num_layouts for report in reports) > self._num_layouts:
            self._take_prepared()
        furthest = max(reports, key=lambda report: report.num_done)
        assert furthest.num_done <= self._num_done + 1
        self._count_done(furthest.num_done, furthest.value)
        for report in reports:
            if report.num_done == self._num_done:
                self._raised.update({k: max(v, self._raised.get(k, v)) for k, v in report.raised.items()})

    def _compare_layouts(self) -> None:
        """Raises `RuntimeError` if ranks have decided on different layouts: they would wait for other copies."""
        text = repr([(layout.plan, layout.members) for layout in (self.layout, self._next)])
        digests = self.world.all_gather(zlib.crc32(text.encode()), "comparing the new layout")
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            raise RuntimeError(
                f"Ranks {others} have planned another layout than rank 0 for the ranks that are left. All plan by the "
                "same arithmetic: compare the versions of Python, torch and NumPy of their hosts. Go on from the last "
                "checkpoint."
            )

    def _take_prepared(self) -> None:
        """From now on this rank has all that it needs for the next layout."""
        assert self._prepared is not None
        self.layout, self._held = self._prepared
        self._num_layouts += 1
        self._prepared = None

    def _settle(self) -> None:
        """Lays the model out for the ranks that have met, if they have since the last time."""
        if self.membership.generation is None:  # was told of the run, and comes to it now
            self._meet_until_done(time.time())
        self.raise_if_stale()
        if self._next is None:
            return
        started_s = time.perf_counter()
        held = self._holds() if self._held is None else self._held
        self._compare_layouts()
        transfers = self.planner.transfers(self.layout, self._next)
        received, self._event.copied_bytes = exchange(held, transfers, self.world)
        needed = self.planner.needed_parameters(self._next, self.world.rank)
        self._prepared = self._next, {name: received.get(name) or held[name] for name in needed}
        synchronize(self.world.device)  # what was sent to it is there
        self._sum(lambda: 0.0)
        self._take_prepared()
        event = self._event
        event.copied_s = time.perf_counter() - started_s
        assert self._held is not None
        del held, received  # what this rank no longer needs is freed before it lays the model out
        self._follow(self.layout, self._held, event)
        self._held = self._next = None
        self.events.append(event)
        if self._ends_with is not None:
            error, self._ends_with, self._is_last = self._ends_with, None, True
            raise error


def _join_key(generation: Generation) -> str:
    """Key of what ranks that join in a generation, or have not joined yet, are told."""
    return f"told/{generation.number}"
