"""What a replay counts, by policies whose answers are written down."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.resilience.trace_replay import Pace, Transition, replay_trace
from hf_mmparallel.resilience.traces import SpotMarket, Trace

SAMPLES = 10


@dataclass(eq=False)
class Scripted:
    """A policy with given answers, in order; it remembers what it was asked."""

    answers: list[Transition | None]
    asked: list[tuple[str, frozenset[int]]] = field(default_factory=list)
    num_settled: int = 0

    def join(self, nodes: frozenset[int]) -> Transition | None:
        self.asked.append(("join", nodes))
        return self.answers.pop(0)

    def lose(self, nodes: frozenset[int], waiting: frozenset[int]) -> tuple[Transition | None, bool]:
        self.asked.append(("lose", nodes))
        return self.answers.pop(0), False

    def settle(self) -> None:
        self.num_settled += 1


def trace(*rows: tuple[float, str, str], end_s: float) -> Trace:
    return Trace.of([(1e3 * time_s, action, node) for time_s, action, node in rows], end_s)


START = [(0.0, "add", "a"), (0.0, "add", "b")]


def test_the_running_step_is_lost() -> None:
    """Steps of 3 s: 7 s are two steps and a part; after a pause of 2 s there are 11 s for three steps and a part."""
    policy = Scripted([Transition(Pace(3.0, 2)), Transition(Pace(3.0, 1), (("copying", 2.0),), "step")])
    replay = replay_trace(trace(*START, (7.0, "remove", "b"), end_s=20.0), policy, SAMPLES)
    assert [(span.start_s, span.end_s, span.cause) for span in replay.spans] == [
        (0.0, 6.0, "computing"),
        (6.0, 7.0, "lost"),
        (7.0, 9.0, "copying"),
        (9.0, 18.0, "computing"),
        (18.0, 20.0, "lost"),
    ]
    assert replay.samples == pytest.approx(5 * SAMPLES)
    assert replay.samples_per_second == pytest.approx(2.5)
    assert replay.shares["computing"] == pytest.approx((6 * 2 + 9) / (7 * 2 + 13))
    assert replay.shares["copying"] == pytest.approx(2 / 27)
    assert replay.rates(2) == pytest.approx([(6 + 1) / 3 * SAMPLES / 10, 8 / 3 * SAMPLES / 10])
    assert policy.num_settled == 2


def test_all_since_the_last_checkpoint_is_lost() -> None:
    """A checkpoint of 1 s after every two steps of 2 s: those of 5 and 10 s are done, that of 15 s is not."""
    pace = Pace(2.0, 2, save_every=2, save_s=1.0)
    policy = Scripted([Transition(pace), Transition(pace, (("restarting", 3.0),), "saved")])
    replay = replay_trace(trace(*START, (14.5, "remove", "b"), end_s=22.5), policy, SAMPLES)
    assert [(span.end_s, span.cause) for span in replay.spans] == [
        (4.0, "computing"),
        (5.0, "saving"),
        (9.0, "computing"),
        (10.0, "saving"),
        (14.0, "lost"),
        (14.5, "saving"),
        (17.5, "restarting"),
        (21.5, "computing"),
        (22.5, "saving"),
    ]
    assert replay.samples == pytest.approx(6 * SAMPLES)


def test_nodes_join_at_the_end_of_a_step() -> None:
    policy = Scripted([Transition(Pace(4.0, 2)), Transition(Pace(2.0, 3)), None])
    replay = replay_trace(trace(*START, (5.0, "add", "c"), (13.0, "add", "d"), end_s=16.0), policy, SAMPLES)
    assert policy.asked == [("join", {0, 1}), ("join", {2}), ("join", {3})]
    assert [(span.end_s, span.cause, span.num_nodes) for span in replay.spans] == [
        (5.0, "computing", 2),
        (8.0, "computing", 3),
        (13.0, "computing", 3),
        (16.0, "computing", 4),
    ]
    assert replay.samples == pytest.approx((2 + 4) * SAMPLES)


def test_a_node_that_leaves_before_it_is_taken_in_changes_nothing() -> None:
    policy = Scripted([Transition(Pace(10.0, 2))])
    replay = replay_trace(trace(*START, (2.0, "add", "c"), (4.0, "remove", "c"), end_s=10.0), policy, SAMPLES)
    assert policy.asked == [("join", {0, 1})]
    assert replay.samples == pytest.approx(SAMPLES)


def test_a_job_without_a_pace_is_idle_until_nodes_join() -> None:
    policy = Scripted(
        [Transition(Pace(1.0, 2)), Transition(None, (("saving", 2.0),), "step"), Transition(Pace(1.0, 2))]
    )
    replay = replay_trace(trace(*START, (3.5, "remove", "a"), (9.0, "add", "c"), end_s=10.0), policy, SAMPLES)
    assert [(span.end_s, span.cause) for span in replay.spans] == [
        (3.0, "computing"),
        (3.5, "lost"),
        (5.5, "saving"),
        (9.0, "idle"),
        (10.0, "computing"),
    ]


def test_a_loss_during_a_pause_begins_another_one() -> None:
    again = Transition(Pace(1.0, 1), (("copying", 4.0),), "step")
    policy = Scripted([Transition(Pace(1.0, 3)), again, again])
    rows = (*START, (0.0, "add", "c"), (2.0, "remove", "a"), (3.0, "remove", "b"))
    replay = replay_trace(trace(*rows, end_s=8.0), policy, SAMPLES)
    assert [(span.end_s, span.cause) for span in replay.spans] == [
        (2.0, "computing"),
        (3.0, "copying"),
        (7.0, "copying"),
        (8.0, "computing"),
    ]
    assert policy.num_settled == 2, "the copies of the first loss were not done"


def test_redundant_computation_and_idle_nodes_have_their_share() -> None:
    policy = Scripted([Transition(Pace(1.0, 3, redundant_share=0.25))])
    rows = [(0.0, "add", name) for name in "abcd"]
    shares = replay_trace(trace(*rows, end_s=4.0), policy, SAMPLES).shares
    assert (shares["computing"], shares["redundant"], shares["idle"]) == pytest.approx((9 / 16, 3 / 16, 4 / 16))


@given(st.integers(0, 100), st.floats(0.3, 50.0), st.sampled_from(["step", "saved"]), st.integers(1, 4))
def test_time_is_accounted_for(seed: int, step_s: float, loses: str, save_every: int) -> None:
    """Spans follow each other, shares add up, and what counts are whole steps."""
    market = SpotMarket(6, 40.0, 2, 30.0).trace(400.0, seed)

    class Simple:
        def join(self, nodes):
            return Transition(Pace(step_s, 1, 0.0, save_every, 1.0), (("restarting", 2.0),))

        def lose(self, nodes, waiting):
            pace = Pace(step_s, 1, 0.0, save_every, 1.0)
            return Transition(pace, (("restarting", 3.0),), loses), False  # type: ignore[arg-type]

        def settle(self):
            pass

    replay = replay_trace(market, Simple(), SAMPLES)
    assert replay.spans[0].start_s == 0.0 and replay.spans[-1].end_s == pytest.approx(400.0)
    for before, after in zip(replay.spans, replay.spans[1:], strict=False):
        assert before.end_s == after.start_s and before.seconds > 0
    assert sum(replay.shares.values()) == pytest.approx(1.0)
    assert replay.samples / SAMPLES == pytest.approx(round(replay.samples / SAMPLES), abs=1e-6)
    assert sum(replay.rates(7)) * 400 / 7 == pytest.approx(replay.samples)
