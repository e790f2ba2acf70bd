"""Ways to recover from failures, baselines of the benchmarks: what they use and copy, and what a replay counts."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_replay import Pace, SpotMarket, Transition, replay_trace
from recovery_policies import (
    EventCosts,
    GridRestart,
    RedundantStages,
    ReplayJob,
    TemplateRecovery,
    grids,
)

from hf_mmparallel.resilience.templates import LayerChain
from hf_mmparallel.resilience.trace_replay import Trace

pytestmark = pytest.mark.deep
SAMPLES = 10
COSTS = EventCosts(detect_s=0.5, regroup_s=1.5, copy_bytes_per_s=100.0, save_s=7.0, restart_s=60.0, save_every=5)


def job(num_nodes: int, num_layers: int = 6, most_layers: int | None = None, num_microbatches: int = 24) -> ReplayJob:
    """Layers of one second and a hundred bytes, of which a node has memory for some."""
    limits = None
    if most_layers is not None:
        first, stop = np.arange(num_layers)[:, None], np.arange(num_layers + 1)[None]
        limits = np.where(stop - first <= most_layers, 99, 0)[None]
    chain = LayerChain([1], np.full((1, num_layers), 1000.0), limits)
    return ReplayJob(chain, [100.0] * num_layers, 1, num_microbatches, num_microbatches, num_nodes)


def joined(policy, *nodes: int) -> Transition:
    transition = policy.join(frozenset(nodes))
    assert transition is not None
    return transition


def started(policy, num_nodes: int):
    assert not joined(policy, *range(num_nodes)).pauses, "the first start is free"
    policy.settle()
    return policy


def lost(policy, *nodes: int) -> Transition:
    transition, _ = policy.lose(frozenset(nodes), frozenset())
    assert transition is not None
    return transition


RESTART = (("restarting", COSTS.restart_s),)


@settings(max_examples=40)
@given(st.integers(0, 50), st.integers(0, 2), st.sampled_from([None, 1.0, 1e9]))
def test_templates_survive_what_they_guarantee(seed: int, failures: int, between_s: float | None) -> None:
    """In a random market no loss of up to the guaranteed number of nodes goes back to a checkpoint."""
    num_nodes = 9
    own = job(num_nodes, most_layers=3)
    policy = TemplateRecovery(own, COSTS, failures, between_s)
    for event in SpotMarket(num_nodes, 50.0, max(failures, 1), 80.0).trace(4000.0, seed).events:
        members = {node for nodes in policy.pipelines for node in nodes}
        if event.lost:
            transition, _ = policy.lose(event.lost, frozenset())
            if members and len(event.lost) <= failures:
                assert transition is not None and transition.loses == "step"
        if event.joined:
            policy.join(event.joined)
        policy.settle()
        if policy.pipelines:
            held = sorted(node for nodes in policy.pipelines for node in nodes)
            assert held == sorted(policy.alive) and len(policy.pipelines) >= failures + 1
        else:
            assert len(policy.alive) < (failures + 1) * policy.counts[0]


def test_the_fastest_grid_is_used() -> None:
    """Seven nodes: one pipeline of six nodes and one that is idle, or seven copies of the whole model."""
    own = job(7, num_microbatches=14)
    found = {grid.nodes_each: grid for grid in grids(own, 7)}
    assert found[1].num_pipelines == 7 and found[1].step_s == pytest.approx(2 * 6)
    assert found[6].num_pipelines == 1 and found[6].step_s == pytest.approx(6 + 13)
    policy = started(GridRestart(own, COSTS), 7)
    assert policy.grid == found[1]
    transition = lost(policy, 3)
    assert transition.loses == "saved" and transition.pace is not None
    assert transition.pace.save_every == COSTS.save_every and transition.pace.num_nodes == 6


def test_a_spare_of_a_grid_may_go() -> None:
    policy = started(GridRestart(job(5, most_layers=3), COSTS), 5)
    assert policy.grid is not None and policy.grid.num_nodes == 4
    assert policy.lose(frozenset([4]), frozenset())[0] is None
    transition, takes_in = policy.lose(frozenset([0]), frozenset([7]))
    assert takes_in and transition is not None and policy.used == [1, 2, 3, 7]
    assert policy.join(frozenset([8])) is None, "five nodes have no faster grid"
    paces = [lost(policy, node).pace for node in (1, 2, 3, 8)]
    assert paces[2] is not None and paces[3] is None


def test_neighbours_stand_in_until_two_are_lost() -> None:
    """Pipelines of three stages of two seconds, of which each node computes a third of the next one besides."""
    policy = started(RedundantStages(job(6, most_layers=2), COSTS), 6)
    assert policy.pipelines == [[0, 1, 2], [3, 4, 5]] and policy.join(frozenset()) is None
    transition = lost(policy, 1)
    assert transition.loses == "step" and transition.pace is not None
    # Node 0 has stages of 2 + 2 s and a third of 2 s, node 2 its own and a third.
    assert transition.pace.step_s == pytest.approx((4 + 2 / 3) + (2 + 2 / 3) + 11 * (4 + 2 / 3))
    lost(policy, 5)
    transition = lost(policy, 0)
    assert transition.loses == "saved" and transition.pauses == RESTART
    other = started(RedundantStages(job(6, most_layers=2), COSTS), 6)
    assert lost(other, 0, 2).loses == "saved", "the last stage is the neighbour of the first"


def test_redundancy_costs_what_it_computes_twice() -> None:
    pace = joined(RedundantStages(job(6, most_layers=2), COSTS, forward_share=0.5), *range(6)).pace
    assert pace is not None and pace.redundant_share == pytest.approx(1 / 3)


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


START = ((0.0, "add", "a"), (0.0, "add", "b"))
SAVING = Pace(2.0, 2, save_every=2, save_s=1.0)
COPIES = Transition(Pace(1.0, 1), (("copying", 4.0),), "step")
REPLAYS = {
    # Steps of 3 s: 7 s are two steps and a part; after a pause of 2 s there are 11 s for three steps and a part.
    "the running step is lost": (
        [Transition(Pace(3.0, 2)), Transition(Pace(3.0, 1), (("copying", 2.0),), "step")],
        [(7.0, "remove", "b")],
        [(6.0, "computing"), (7.0, "lost"), (9.0, "copying"), (18.0, "computing"), (20.0, "lost")],
        5,
        1,
    ),
    # A checkpoint of 1 s after every two steps of 2 s: those of 5 and 10 s are done, that of 15 s is not.
    "all since the last checkpoint is lost": (
        [Transition(SAVING), Transition(SAVING, (("restarting", 3.0),), "saved")],
        [(14.5, "remove", "b")],
        [
            *((4.0, "computing"), (5.0, "saving"), (9.0, "computing"), (10.0, "saving"), (14.0, "lost")),
            *((14.5, "saving"), (17.5, "restarting"), (21.5, "computing"), (22.5, "saving")),
        ],
        6,
        1,
    ),
    "nodes join at the end of a step": (
        [Transition(Pace(4.0, 2)), Transition(Pace(2.0, 3)), None],
        [(5.0, "add", "c"), (13.0, "add", "d")],
        [(5.0, "computing"), (8.0, "computing"), (13.0, "computing"), (16.0, "computing")],
        2 + 4,
        3,
    ),
    "a node that leaves before it is taken in changes nothing": (
        [Transition(Pace(10.0, 2))],
        [(2.0, "add", "c"), (4.0, "remove", "c")],
        [(2.0, "computing"), (4.0, "computing"), (10.0, "computing")],
        1,
        1,
    ),
    "a job without a pace is idle until nodes join": (
        [Transition(Pace(1.0, 2)), Transition(None, (("saving", 2.0),), "step"), Transition(Pace(1.0, 2))],
        [(3.5, "remove", "a"), (9.0, "add", "c")],
        [(3.0, "computing"), (3.5, "lost"), (5.5, "saving"), (9.0, "idle"), (10.0, "computing")],
        3 + 1,
        2,
    ),
    "a loss during a pause begins another one": (
        [Transition(Pace(1.0, 3)), COPIES, COPIES],
        [(0.0, "add", "c"), (2.0, "remove", "a"), (3.0, "remove", "b")],
        [(2.0, "computing"), (3.0, "copying"), (7.0, "copying"), (8.0, "computing")],
        2 + 1,
        1,
    ),
}


@pytest.mark.parametrize("case", REPLAYS)
def test_what_a_replay_counts(case: str) -> None:
    """Ends and causes of the spans, whole steps, and how often the policy took nodes in."""
    answers, rows, spans, steps, joined = REPLAYS[case]
    policy = Scripted(list(answers))
    replay = replay_trace(trace(*START, *rows, end_s=spans[-1][0]), policy, SAMPLES)
    assert [(span.end_s, span.cause) for span in replay.spans] == spans
    assert replay.samples == pytest.approx(steps * SAMPLES)
    assert [kind for kind, _ in policy.asked].count("join") == joined
    if "during a pause" in case:
        assert policy.num_settled == 2, "the copies of the first loss were not done"


def test_shares_are_of_the_time_of_all_nodes() -> None:
    answers, rows, *_ = REPLAYS["the running step is lost"]
    shares = replay_trace(trace(*START, *rows, end_s=20.0), Scripted(list(answers)), SAMPLES).shares
    assert (shares["computing"], shares["copying"]) == pytest.approx(((6 * 2 + 9) / 27, 2 / 27))
    policy = Scripted([Transition(Pace(1.0, 3, redundant_share=0.25))])
    rows = [(0.0, "add", name) for name in "abcd"]
    shares = replay_trace(trace(*rows, end_s=4.0), policy, SAMPLES).shares
    assert (shares["computing"], shares["redundant"], shares["idle"]) == pytest.approx((9 / 16, 3 / 16, 4 / 16))


def test_a_spot_market_loses_nodes_as_often_as_it_should() -> None:
    market = SpotMarket(num_nodes=30, loss_every_s=460.0, most_at_once=3, replaced_after_s=900.0)
    trace = market.trace(2e6, seed=3)
    assert trace == market.trace(2e6, seed=3) != market.trace(2e6, seed=4)
    losses = [event for event in trace.events if event.lost]
    assert len(losses) == pytest.approx(2e6 / 460, rel=0.05)
    assert trace.num_losses / len(losses) == pytest.approx(2.0, rel=0.05)
    assert trace.most_nodes == 30
    # Little's law: as many nodes are away as are lost in the time until one is replaced.
    assert 30 - trace.mean_nodes() == pytest.approx(900 * 2 / 460, rel=0.1)
