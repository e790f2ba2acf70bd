"""Ways to recover from failures, baselines of the benchmarks: what they use and copy, and what a replay counts."""

from __future__ import annotations

from collections.abc import Iterable
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
    copy_seconds,
    grids,
)

from hf_mmparallel.resilience.templates import LayerChain
from hf_mmparallel.resilience.trace_replay import Trace, regular_losses

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


def started(policy, nodes: Iterable[int]):
    transition = policy.join(frozenset(nodes))
    assert transition is not None and not transition.pauses, "the first start is free"
    policy.settle()
    return policy


def lost(policy, *nodes: int) -> Transition | None:
    return policy.lose(frozenset(nodes), frozenset())[0]


def test_pipelines_of_templates_go_on_in_place() -> None:
    """Nodes of two layers: both that are left lack one of those of the lost node, which one other node has."""
    policy = TemplateRecovery(job(6, most_layers=3), COSTS, 1)
    policy.alive, policy.pipelines = set(range(6)), [(0, 1, 2), (3, 4, 5)]
    policy.settle()
    transition = lost(policy, 1)
    assert transition is not None and transition.loses == "step"
    assert sorted(policy.pipelines) == [(0, 2), (3, 4, 5)]
    assert dict(transition.pauses) == pytest.approx({"restarting": 2.0, "copying": 200 / COSTS.copy_bytes_per_s})
    assert transition.pace is not None and transition.pace.num_nodes == 5


@pytest.mark.parametrize(("between_s", "sizes"), [(None, [3, 4]), (10.0, [3, 4]), (1e6, [1] * 7)])
def test_the_fastest_pipelines_have_to_pay_for_copies(between_s: float | None, sizes: list[int]) -> None:
    """Copies of the whole model on each node are 17 % faster than pipelines, and need six seconds of copies."""
    policy = TemplateRecovery(job(8), COSTS, 1, between_s)
    policy.alive, policy.pipelines = set(range(8)), [(0, 1, 2, 3), (4, 5, 6, 7)]
    policy.settle()
    transition = lost(policy, 0)
    assert transition is not None and sorted(map(len, policy.pipelines)) == sizes
    assert transition.pace is not None and transition.pace.step_s == (24.0 if len(sizes) == 7 else 28.0)


def test_a_layer_that_nobody_holds_comes_from_the_checkpoint() -> None:
    policy = TemplateRecovery(job(8, most_layers=3), COSTS, 1)
    policy.alive, policy.pipelines = set(range(8)), [(0, 1, 2, 3), (4, 5, 6, 7)]
    policy.settle()
    transition = lost(policy, 0, 4)
    assert transition is not None and transition.loses == "saved"
    assert dict(transition.pauses) == {"restarting": COSTS.restart_s}
    assert transition.pace is not None


def test_too_few_nodes_save_what_is_whole_and_wait() -> None:
    policy = TemplateRecovery(job(4, most_layers=3), COSTS, 1)
    started(policy, range(4))
    transition = lost(policy, 0)
    assert transition is not None and transition.pace is None
    assert transition.pauses == (("saving", COSTS.save_s),) and transition.loses == "step"
    again = policy.join(frozenset([9]))
    assert again is not None and again.pauses == (("restarting", COSTS.restart_s),)
    other = started(TemplateRecovery(job(4, most_layers=3), COSTS, 1), range(4))
    first, second = other.pipelines
    transition = lost(other, first[0], second[0])
    assert transition is not None and transition.pace is None and transition.loses == "saved"


def test_a_recovery_that_is_interrupted_has_copied_nothing() -> None:
    """The first loss needs copies; before they are done, the only holder of the first layers is lost, too."""
    policy = TemplateRecovery(job(8, most_layers=3), COSTS, 1)
    policy.alive, policy.pipelines = set(range(8)), [(0, 1, 2, 3), (4, 5, 6, 7)]
    policy.settle()
    lost(policy, 0)
    transition = lost(policy, 4)
    assert transition is not None and transition.loses == "saved"


def test_nodes_that_join_copy_what_they_lack() -> None:
    policy = started(TemplateRecovery(job(6, most_layers=3), COSTS, 1), range(4))
    transition = policy.join(frozenset([4, 5]))
    assert transition is not None and transition.loses == "nothing"
    assert dict(transition.pauses)["copying"] > 0 and transition.pace is not None and transition.pace.num_nodes == 6


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


def test_copies_are_spread_over_holders() -> None:
    own = job(4)
    held = {0: frozenset([0, 1, 2]), 1: frozenset([0, 1, 2]), 2: frozenset([3])}
    needed = {2: frozenset([0, 1]), 3: frozenset([3])}
    assert copy_seconds(needed, held, own, 100.0) == pytest.approx(2.0)  # node 2 receives two layers, each sender one
    needed = {2: frozenset([0]), 3: frozenset([0]), 4: frozenset([0]), 5: frozenset([0])}
    assert copy_seconds(needed, held, own, 100.0) == pytest.approx(2.0)  # two senders of four copies


def test_the_fastest_grid_is_used() -> None:
    """Seven nodes: one pipeline of six nodes and one that is idle, or seven copies of the whole model."""
    own = job(7, num_microbatches=14)
    found = {grid.nodes_each: grid for grid in grids(own, 7)}
    assert found[1].num_pipelines == 7 and found[1].step_s == pytest.approx(2 * 6)
    assert found[6].num_pipelines == 1 and found[6].step_s == pytest.approx(6 + 13)
    policy = started(GridRestart(own, COSTS), range(7))
    assert policy.grid == found[1]
    transition = lost(policy, 3)
    assert transition is not None and transition.loses == "saved" and transition.pace is not None
    assert transition.pace.save_every == COSTS.save_every and transition.pace.num_nodes == 6


def test_a_spare_of_a_grid_may_go() -> None:
    policy = started(GridRestart(job(5, most_layers=3), COSTS), range(5))
    assert policy.grid is not None and policy.grid.num_nodes == 4
    assert lost(policy, 4) is None
    transition, takes_in = policy.lose(frozenset([0]), frozenset([7]))
    assert takes_in and transition is not None and policy.used == [1, 2, 3, 7]
    assert policy.join(frozenset([8])) is None, "five nodes have no faster grid"
    for node in (1, 2, 3):
        transition = lost(policy, node)
    assert transition is not None and transition.pace is not None
    transition = lost(policy, 8)
    assert transition is not None and transition.pace is None


def test_neighbours_stand_in_until_two_are_lost() -> None:
    """Pipelines of three stages of two seconds, of which each node computes a third of the next one besides."""
    policy = started(RedundantStages(job(6, most_layers=2), COSTS), range(6))
    assert policy.pipelines == [[0, 1, 2], [3, 4, 5]]
    start = policy.join(frozenset())
    assert start is None
    transition = lost(policy, 1)
    assert transition is not None and transition.loses == "step" and transition.pace is not None
    # Node 0 has stages of 2 + 2 s and a third of 2 s, node 2 its own and a third.
    assert transition.pace.step_s == pytest.approx((4 + 2 / 3) + (2 + 2 / 3) + 11 * (4 + 2 / 3))
    assert lost(policy, 5) is not None
    transition = lost(policy, 0)
    assert transition is not None and transition.loses == "saved"
    assert transition.pauses == (("restarting", COSTS.restart_s),)


def test_the_last_stage_is_the_neighbour_of_the_first() -> None:
    policy = started(RedundantStages(job(6, most_layers=2), COSTS), range(6))
    transition = lost(policy, 0, 2)
    assert transition is not None and transition.loses == "saved"


def test_redundancy_costs_what_it_computes_twice() -> None:
    policy = RedundantStages(job(6, most_layers=2), COSTS, forward_share=0.5)
    transition = policy.join(frozenset(range(6)))
    assert transition is not None and transition.pace is not None
    assert transition.pace.redundant_share == pytest.approx(1 / 3)


def test_failures_cost_least_in_place() -> None:
    trace = regular_losses(8, 300.0, 4)
    own = job(8, most_layers=3)
    policies = [TemplateRecovery(own, COSTS, 1), GridRestart(own, COSTS), RedundantStages(own, COSTS)]
    ours, grid, redundant = (replay_trace(trace, policy, 24).samples_per_second for policy in policies)
    assert ours > grid > 0 and ours > redundant > 0


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="One copy of the model does not fit on 2 nodes of 1 ranks"):
        TemplateRecovery(job(2, most_layers=1), COSTS, 0)
    with pytest.raises(ValueError, match="2 simultaneous failures need 3 copies"):
        TemplateRecovery(job(5, most_layers=3), COSTS, 2)


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
