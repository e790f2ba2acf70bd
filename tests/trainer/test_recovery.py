"""What ranks agree on when they meet after a loss, with doubles for the launcher and for the other ranks."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.resilience.pipelines import TooFewNodesError
from hf_mmparallel.runtime.held_state import HeldParameter
from hf_mmparallel.trainer import recovery as module
from hf_mmparallel.trainer.recovery import Recovery, RepeatedFailureError, place_of
from hf_mmparallel.world.generations import Generation, Loss, Member
from hf_mmparallel.world.membership import FinishedRunError, NoLossError


@dataclass
class Layout:
    members: tuple[int, ...]
    plan: Any = None


@dataclass
class Planner:
    """Layouts with one parameter for each member, named after it."""

    fewest: int = 1

    def without(self, layout: Layout, lost: set[int]) -> Layout:
        left = tuple(member for member in layout.members if member not in lost)
        if len(left) < self.fewest:
            raise TooFewNodesError(f"{len(left)} are left")
        return Layout(left)

    def with_members(self, layout: Layout, joined: set[int]) -> Layout:
        return Layout((*layout.members, *sorted(joined)))

    def leaving(self, layout: Layout, asked: set[int]) -> set[int]:
        self.without(layout, asked)
        return asked

    def last(self, layout: Layout, lost: set[int]) -> Layout:
        return Layout(tuple(member for member in layout.members if member not in lost))

    def transfers(self, before: Layout, after: Layout) -> list[Any]:
        return []

    def needed_parameters(self, layout: Layout, rank: int) -> list[str]:
        return ["weight"]


@dataclass
class Launcher:
    """A membership of process 0 whose generations a test makes, with what the others report in each."""

    store: dist.HashStore = field(default_factory=dist.HashStore)
    id: int = 0
    generation: Generation = field(default_factory=lambda: _generation(0, 3))
    newest: Generation = field(default_factory=lambda: _generation(0, 3))
    refuses: set[int] = field(default_factory=set)  # generations whose meeting fails, since another member is lost
    reports: dict[int, tuple[int, int, float]] = field(default_factory=dict)  # by generation
    lossless: set[int] = field(default_factory=set)  # generations that members only join
    place: str = ""  # of the exceptions by which members are lost
    reasons: list[str] = field(default_factory=list)  # of this member, once it has left
    num_asked: int = 0  # how often this member has asked all to meet anew

    @property
    def is_stale(self) -> bool:
        return self.newest.number > self.generation.number

    @property
    def anew(self) -> str:
        return self.newest.anew if self.is_stale else ""

    @property
    def losses(self) -> tuple[Loss, ...]:
        numbers = range(self.generation.number + 1, self.newest.number + 1)
        numbers = [number for number in numbers if number not in self.lossless]
        return tuple(
            Loss(Member(9 - number, 9 - number), "was killed", float(number), self.place) for number in numbers
        )

    def lose(self, report: tuple[int, int, float], refuse: bool = False) -> None:
        """One more of the others is lost, the last one; the rest report this."""
        number = self.newest.number + 1
        self.newest = _generation(number, len(self.newest.members) - 1)
        self.reports[number] = report
        if refuse:
            self.refuses.add(number)

    def meet_anew(self) -> None:
        """All are to meet anew, and nobody knows the last work to be done."""
        number = self.newest.number + 1
        self.newest = Generation(number, self.newest.members, anew="all wait for each other")
        self.lossless.add(number)
        self.reports[number] = (0, 0, 0.0)

    def ask_to_meet_anew(self) -> None:
        self.num_asked += 1
        self.meet_anew()

    def register(self) -> None:
        pass

    def leave(self, reason: str) -> None:
        self.reasons.append(reason)

    def next_generation(self, timeout_s: float) -> Generation:
        return self.newest

    def meet(self, generation: Generation) -> bool:
        if generation.number in self.refuses:
            self.lose(self.reports[generation.number])
            return False
        num_layouts, num_done, value = self.reports[generation.number]
        report = {"num_layouts": num_layouts, "num_done": num_done, "value": value, "raised": {}}
        for member in generation.members[1:]:
            self.store.set(f"report/{generation.number}/{member.id}", json.dumps(report))
        return True

    def enter(self, generation: Generation) -> None:
        self.generation = generation

    def new_store(self) -> Any:
        return None


def _generation(number: int, size: int, joined: Sequence[int] = ()) -> Generation:
    """One that members join, or in which the one after the last is lost, unless it is the first."""
    members = tuple(Member(id, id) for id in range(size))
    losses = (Loss(Member(size, size), "was killed", 0.0),) if number and not joined else ()
    return Generation(number, members, losses, tuple(Member(id, id) for id in joined))


class World(SimpleNamespace):
    """A world of which only this rank is real."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=3, device=torch.device("cpu"), timeout=None, at_barrier=lambda: None)
        self.is_first, self.others_differ = True, False
        self.asked: list[int | None] = []  # what the others say of themselves

    def leave(self) -> None:
        self.size = 0

    def join(self, store: Any, rank: int, size: int, backend: str, timeout: Any) -> None:
        self.rank, self.size = rank, size

    def barrier(self, activity: str | None = None) -> None:
        self.at_barrier()

    def all_gather(self, value: Any, activity: str) -> list[Any]:
        if activity == "comparing the new layout":
            return [value + self.others_differ, *[value] * (self.size - 1)]
        return [value, *self.asked]

    def all_reduce(self, tensor: torch.Tensor, activity: str | None = None) -> torch.Tensor:
        self.at_barrier()
        return tensor


@dataclass
class Case:
    launcher: Launcher
    world: World
    recovery: Recovery
    laid_out: list[tuple[int, ...]]  # members of the layouts that were followed
    tries: list[int] = field(default_factory=list)  # ranks at each try of `work`

    def lose(self, *report: Any, **kwargs: Any) -> Any:
        """Others are lost, which this rank notices by its connections."""
        self.launcher.lose(report, **kwargs)
        raise RuntimeError("Connection closed by peer")

    def lose_at_barrier(self, *report: Any) -> None:
        """They are lost in the next barrier."""

        def barrier() -> None:
            self.world.at_barrier = lambda: None
            self.lose(*report)

        self.world.at_barrier = barrier

    def work(self, **kwargs: Any) -> str:
        """Work in the first try of which others are lost, who knew nothing to be done."""
        self.tries.append(self.world.size)
        return self.lose(0, 0, 0.0, **kwargs) if len(self.tries) == 1 else "done"

    def let_in(self, told: Generation) -> None:
        """The others let in those who join a generation."""
        self.launcher.accept_joining = lambda: setattr(self.launcher, "newest", told)  # type: ignore[attr-defined]
        self.launcher.lossless = {told.number}
        self.recovery._tell = lambda: b"the run"
        self.recovery.take_in()


@pytest.fixture
def case(monkeypatch) -> Case:
    monkeypatch.setattr(module.dist, "get_backend_config", lambda: "gloo")
    received = {"weight": HeldParameter(torch.zeros(1))}
    monkeypatch.setattr(module, "exchange", lambda held, transfers, world: (received, 4))
    laid_out: list[tuple[int, ...]] = []
    launcher, world, layout = Launcher(), World(), Layout((0, 1, 2))

    def follow(layout: Layout, held: Any, event: Any) -> None:
        laid_out.append(layout.members)

    recovery = Recovery(launcher, world, Planner(), layout, dict, follow)  # type: ignore[arg-type]
    return Case(launcher, world, recovery, laid_out)


def test_a_step_that_nobody_knows_to_be_done_is_repeated(case):
    assert case.recovery.commit(lambda: 1.5) == 1.5
    assert case.recovery.commit(lambda: case.lose(0, 1, 1.5)) is None
    assert case.recovery.run(lambda: case.world.size) == 2
    assert case.laid_out == [(0, 1)]
    assert case.recovery.commit(lambda: 2.5) == 2.5


@pytest.mark.parametrize("when", ["own", "sum"])
def test_a_number_that_an_aborted_collective_may_have_left_does_not_count(case, when):
    """NCCL's aborted collectives, and gloo's ended waits, return without an error."""

    def lose() -> None:
        case.world.at_barrier = lambda: None
        case.launcher.lose((0, 0, 0.0))

    def own() -> float:
        if when == "own":
            lose()
        return 1e9

    if when == "sum":
        case.world.at_barrier = lose
    assert case.recovery.commit(own) is None
    case.recovery.run(lambda: None)
    assert case.laid_out == [(0, 1)]


def test_copies_that_an_aborted_collective_may_have_left_do_not_count(case, monkeypatch):
    """Copies to a device are on their way when the host has sent for them."""
    waits = iter([lambda: case.launcher.lose((0, 0, 0.0)), lambda: None])
    monkeypatch.setattr(module, "synchronize", lambda device: next(waits)())
    case.recovery.run(case.work)
    assert case.laid_out == [(0,)]


def test_a_step_that_another_rank_knows_to_be_done_counts(case):
    assert case.recovery.commit(lambda: case.lose(0, 1, 2.25)) == 2.25
    assert not case.laid_out, "the step is finished on the layout that has its gradients"
    case.recovery.run(lambda: None)
    assert case.laid_out == [(0, 1)]


def test_a_rank_that_is_ahead_keeps_its_step(case):
    assert case.recovery.commit(lambda: 3.0) == 3.0
    assert case.recovery.run(case.work) == "done"
    assert case.tries == [3, 2]
    assert case.recovery.commit(lambda: 4.0) == 4.0


def test_losses_in_a_meeting_are_taken_together(case):
    case.recovery.run(lambda: case.work(refuse=True))
    assert case.tries == [3, 1]
    assert case.laid_out == [(0,)]
    (event,) = case.recovery.events
    assert event.lost == (8, 7) and event.lost_at == 1.0 and event.world_size == 1


def test_a_layout_counts_when_another_rank_knows_that_all_have_their_parameters(case):
    """Here the barrier after the copies fails, which another rank has passed."""
    case.lose_at_barrier(1, 0, 0.0)
    case.recovery.run(case.work)
    assert case.tries == [3, 1]
    assert case.laid_out == [(0,)] and case.recovery.layout.members == (0,)
    (event,) = case.recovery.events
    assert event.lost == (8, 7), "both losses are told, since nothing was laid out between them"


def test_work_beside_steps_is_repeated_unless_another_rank_knows_that_all_are_done(case):
    case.launcher.generation = case.launcher.newest = _generation(0, 4)
    case.recovery.layout = Layout((0, 1, 2, 3))
    tries = itertools.count(1)
    case.lose_at_barrier(0, 0, 0.0)
    assert case.recovery.complete(lambda: next(tries)) == 2
    case.lose_at_barrier(1, 2, 0.0)
    assert case.recovery.complete(lambda: next(tries)) == 3, "its own result is kept"
    assert next(tries) == 4


def test_an_error_of_this_rank_is_no_loss(case):
    with pytest.raises(ValueError, match="own"):
        case.recovery.run(lambda: int("own"))
    assert not case.laid_out


def test_the_last_work_counts_when_another_rank_has_finished(case):
    def finished(timeout_s: float) -> Generation:
        raise FinishedRunError("another process has finished")

    case.lose_at_barrier(0, 0, 0.0)
    case.launcher.next_generation = finished
    assert case.recovery.complete(lambda: "the end") == "the end"
    assert not case.laid_out


def test_ranks_that_plan_unlike_layouts_copy_nothing(case, monkeypatch):
    monkeypatch.setattr(module, "exchange", None)
    case.world.others_differ = True
    with pytest.raises(RuntimeError, match=r"\[1\].* another layout"):
        case.recovery.run(case.work)


def test_too_few_nodes_end_the_run_with_a_layout_for_a_last_checkpoint(case):
    case.recovery.planner.fewest = 3
    with pytest.raises(TooFewNodesError, match="2 are left"):
        case.recovery.run(case.work)
    assert case.laid_out == [(0, 1)]
    assert case.recovery.run(lambda: "saved") == "saved"


def test_an_exception_that_repeats_in_the_same_work_ends_the_run(case):
    case.launcher.place = "ValueError in dataset.py:3"
    with pytest.raises(RepeatedFailureError, match="was killed"):
        case.recovery.run(lambda: case.lose(0, 0, 0.0))
    assert case.laid_out == [(0, 1), (0,)]
    assert case.recovery.run(lambda: "saved") == "saved"


def test_ranks_that_wait_for_each_other_meet_anew_once_and_the_second_time_end_the_run(case):
    def hang() -> None:
        case.launcher.meet_anew()
        raise RuntimeError("Connection closed by peer")

    tries = itertools.count()
    assert case.recovery.run(lambda: next(tries) or hang()) == 1
    (event,) = case.recovery.events
    assert event.sentence.startswith("The ranks met anew (all wait for each other) after step 0. 3 ranks go on")
    assert not event.lost and case.laid_out == [(0, 1, 2)]
    with pytest.raises(RepeatedFailureError, match="all wait for each other"):
        case.recovery.run(hang)
    assert case.recovery.run(lambda: "saved") == "saved"


def test_a_rank_that_loses_a_connection_although_nobody_died_meets_all_anew_and_ends_the_second_time(case):
    def next_generation(timeout_s: float) -> Generation:
        if not case.launcher.is_stale:
            raise NoLossError("all are alive")
        return case.launcher.newest

    def cut() -> None:
        raise RuntimeError("Connection closed by peer")

    case.launcher.next_generation = next_generation
    tries = itertools.count()
    assert case.recovery.run(lambda: next(tries) or cut()) == 1
    with pytest.raises(NoLossError):
        case.recovery.run(cut)
    assert case.launcher.num_asked == 1 and case.laid_out == [(0, 1, 2)]
    assert case.recovery.commit(float) is not None, "in other work it may ask again"
    assert not case.recovery._has_met_anew


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as raised:
        return raised


def test_connections_that_fail_again_are_no_failure_of_the_work(case):
    """A rank that has lost a connection ends when the launcher knows of no loss, and later another one does."""
    network = (NoLossError("all are alive"), dist.DistStoreError("wait timeout"), RuntimeError("Connection reset"))
    assert {place_of(_raised(error)) for error in network} == {""}
    assert place_of(_raised(TimeoutError("the disk"))).startswith("TimeoutError in "), "that of a dataset may repeat"
    case.launcher.place = place_of(_raised(NoLossError("all are alive")))
    case.recovery.run(lambda: case.world.size > 1 and case.lose(0, 0, 0.0))
    assert case.laid_out == [(0, 1), (0,)]


def test_exceptions_in_other_work_or_of_another_kind_are_those_of_nodes(case):
    case.launcher.generation = case.launcher.newest = _generation(0, 4)
    case.launcher.place = "ValueError in dataset.py:3"
    case.recovery.run(case.work)
    assert case.recovery.commit(float) == 0.0
    case.lose_at_barrier(0, 1, 0.0)
    assert case.recovery.commit(float) is None
    case.launcher.place = "OSError in dataset.py:3"
    tries = itertools.count()
    case.recovery.run(lambda: next(tries) or case.lose(0, 1, 0.0))
    assert case.laid_out[-1] == (0,)


def test_a_rank_that_joins_knows_which_exceptions_there_were(case):
    case.launcher.place = "ValueError in dataset.py:3"
    case.recovery.run(case.work)
    case.launcher.reports[2] = (1, 0, 0.0)
    told = Generation(2, (Member(0, 0), Member(3, 3)), (Loss(Member(1, 1), "failed", 0.0, case.launcher.place),))
    report = case.recovery._raised_with(told.losses)
    assert report == {case.launcher.place: (2, "failed")}
    joins = Joiner(newest=told).recovery()
    joins._count_done(0, 0.0)
    joins._agree([module._Report(0, 0, 0.0), module._Report(0, 0, 0.0, report)])
    assert joins._raised == report


def test_a_member_that_is_asked_to_leave_is_left_out_between_two_steps(case):
    case.world.asked = [None, 2]
    case.launcher.lose((0, 1, 0.0))  # it leaves as soon as it knows that all do
    case.launcher.newest, left = case.launcher.generation, case.launcher.newest
    case.recovery.membership.next_generation = lambda timeout_s: setattr(case.launcher, "newest", left) or left
    case.recovery.let_leave(False)
    assert case.recovery.run(lambda: case.world.size) == 2
    assert case.laid_out == [(0, 1)] and not case.launcher.reasons


def test_a_rank_that_hears_that_a_member_has_left_before_it_knows_that_all_agreed_meets_the_others_once(case):
    def next_generation(timeout_s: float) -> Generation:
        if not case.launcher.is_stale:
            raise NoLossError("all are alive")
        return case.launcher.newest

    case.launcher.next_generation = next_generation
    case.world.asked = [None, 2]
    case.lose_at_barrier(0, 1, 0.0)
    case.recovery.let_leave(False)
    assert case.recovery.run(lambda: case.world.size) == 2
    assert case.laid_out == [(0, 1)]


def test_a_member_leaves_when_all_know(case):
    case.launcher.generation = case.launcher.newest = Generation(0, tuple(Member(id, 0) for id in range(3)))
    case.world.asked = [None, None]
    with pytest.raises(SystemExit) as ended:
        case.recovery.let_leave(True)
    assert ended.value.code == 0 and len(case.launcher.reasons) == 1


@pytest.mark.parametrize(("fewest", "named"), [(1, "Machine 0"), (3, "2 are left")])
def test_all_save_the_run_if_the_others_could_not_go_on_without_those_that_are_asked_to_leave(case, fewest, named):
    case.recovery.planner.fewest = fewest
    case.world.asked = [None, None]
    with pytest.raises(TooFewNodesError, match=named):
        case.recovery.let_leave(True)
    assert case.recovery.run(lambda: "saved") == "saved" and not case.launcher.reasons


def test_members_join_by_the_path_of_losses(case):
    case.launcher.reports[1] = (0, 0, 0.0)
    case.let_in(_generation(1, 5, (3, 4)))
    assert not case.laid_out, "the model is laid out before the next work"
    assert case.recovery.run(lambda: case.world.size) == 5
    assert case.laid_out == [(0, 1, 2, 3, 4)]
    (event,) = case.recovery.events
    assert event.joined == (3, 4) and event.lost == ()
    assert event.sentence.startswith("Members 3, 4 joined after step 0. 5 ranks go on")
    assert case.launcher.store.check(["told/1"]), "those who join are told of the run"


@dataclass
class Joiner(Launcher):
    """A membership of process 3, which the others let in."""

    id: int = 3
    generation: Any = None

    def next_generation(self, timeout_s: float | None) -> Generation:
        assert timeout_s is None, "it waits as long as it takes"
        return self.newest

    def is_newcomer(self, id: int) -> bool:
        return id not in (0, 1, 2)

    def recovery(self) -> Recovery:
        """That of a planner and a layout of its own, until it is told those of the others."""
        planner, layout = Planner(fewest=99), Layout((7,))
        return Recovery(self, World(), planner, layout, dict, lambda *_: None)  # type: ignore[arg-type]


def test_a_rank_that_joins_goes_on_from_what_the_first_rank_tells(case):
    told = _generation(1, 4, (3,))
    case.launcher.reports[1] = (0, 5, 2.5)
    for value in (1.0, 2.0, 3.0, 4.0, 2.5):
        case.recovery.commit(lambda value=value: value)
    case.let_in(told)
    recovery = Joiner(store=case.launcher.store, newest=told).recovery()
    assert recovery.wait_to_join() == b"the run"
    assert recovery.has_begun, "the others go on if it is lost from now on"
    assert recovery.layout == Layout((0, 1, 2)) and recovery.planner.fewest == 1
    assert (recovery._num_layouts, recovery._num_done, recovery._value) == (0, 5, 2.5)
    recovery.end()


def test_a_rank_that_joins_after_all_others_are_lost_ends(case):
    alone = Generation(2, (Member(3, 3),), (Loss(Member(0, 0), "was killed", 0.0),))
    recovery = Joiner(newest=alone).recovery()
    with pytest.raises(RuntimeError, match="nobody has the model"):
        recovery.wait_to_join()
    recovery.end()


def test_a_rank_that_joins_as_too_few_are_left_saves_the_run(case):
    case.recovery.planner.fewest = 3
    assert case.recovery._layout_of({0, 1, 3}) == Layout((0, 1, 3))
    assert case.recovery._ends_with is None
    assert case.recovery._layout_of({0, 1}) == Layout((0, 1))
    assert isinstance(case.recovery._ends_with, TooFewNodesError)
