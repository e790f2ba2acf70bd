"""Traces of failures: what is read, what is refused, and what a run achieves with the planner's own plans."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_mmparallel.cost import find_device
from hf_mmparallel.resilience.pipelines import ClusterPlan, TooFewNodesError
from hf_mmparallel.resilience.plan_choice import copy_seconds
from hf_mmparallel.resilience.resilient_planner import ResilientPlanner
from hf_mmparallel.resilience.state_copies import LostStateError, state_copies
from hf_mmparallel.resilience.trace_replay import EventCosts, Replay, Trace, read_trace, regular_losses, replay_trace
from tests.resilience.test_resilient_planner import CLUSTERS, planner_of

ROWS = "0,add,a\n0,add,b\n\n1500,remove,a\n1500,add,c\n1500,remove,c\n3000,add,a\n"


@pytest.mark.parametrize("header", ["", "timestamp,event,node\n"])
def test_a_trace_is_read(tmp_path: Path, header: str) -> None:
    (tmp_path / "trace.csv").write_text(header + ROWS)
    trace = read_trace(tmp_path / "trace.csv")
    assert [(event.time_s, set(event.lost), set(event.joined)) for event in trace.events] == [
        (0.0, set(), {0, 1}),
        (1.5, {0}, set()),  # `c` came and went at one time
        (3.0, set(), {0}),
    ]
    assert (trace.end_s, trace.most_nodes, trace.num_losses) == (3.0, 2, 1)
    assert trace.mean_nodes() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,add,a\n5,drop,a\n", "line 2: `drop`"),
        ("0,add,a\n\n5,remove,b\n", "line 3: node `b` .* never added"),
        ("0,add,a\n5,remove,a\n6,remove,a\n", "line 3: node `a` .* removed before"),
        ("0,add,a\n5,add,a\n", "line 2: node `a` .* there already"),
        ("t,e,n\n0,add,a\n9,add,b\n5,remove,a\n", "line 4: 5 ms .* 9 ms"),
        ("0,add,a\nsoon,remove,a\n", "line 2: `soon` is no time"),
        ("-1,add,a\n", "line 1: `-1` is no time"),
        ("0,add\n", "line 1: `0,add` has 2 values"),
        ("x,add,a\n", "line 1: `x` is no time"),
        ("", "there are no rows"),
    ],
)
def test_wrong_rows_are_refused_with_their_line(tmp_path: Path, rows: str, message: str) -> None:
    (tmp_path / "trace.csv").write_text(rows)
    with pytest.raises(ValueError, match=f"trace.csv`, {message}"):
        read_trace(tmp_path / "trace.csv")


def test_regular_losses() -> None:
    trace = regular_losses(30, 600.0, 15)
    assert list(trace.num_present()) == [(600.0 * index, 30 - index) for index in range(16)]
    assert trace.end_s == 9000.0
    assert trace != regular_losses(30, 600.0, 15, seed=1)


COSTS = EventCosts(find_device("a100"), detect_s=0.5, regroup_s=1.5, restart_s=60.0, save_s=7.0)
IN_PLACE_S = COSTS.detect_s + COSTS.regroup_s
SAMPLES = 10


def planner(cluster: str = "little memory") -> ResilientPlanner:
    return planner_of(*CLUSTERS[cluster])


def step_s(own: ResilientPlanner, plan: ClusterPlan) -> float:
    return own.step_ms(plan) / 1e3


def copied_s(own: ResilientPlanner, before: ClusterPlan, after: ClusterPlan) -> float:
    return copy_seconds(state_copies(own.plans.chain.spec, before, after), COSTS.device, after.plan.world_size)


def replayed(own: ResilientPlanner, *events: tuple[float, str, int], end_s: float, **costs: float | None) -> Replay:
    """All nodes of a planner are there at first; then some are lost (`remove`) or join (`add`)."""
    rows = [(0.0, "add", str(node)) for node in range(own.num_nodes)]
    rows += [(1e3 * time_s, action, str(node)) for time_s, action, node in events]
    return replay_trace(Trace.of(rows, end_s), own, replace(COSTS, **costs), SAMPLES)


def test_a_loss_costs_the_running_step_and_what_the_planner_copies() -> None:
    own = planner()
    first = own.first()
    after = own.without(first, [4])
    pause_s, steps_s = IN_PLACE_S + copied_s(own, first, after), (step_s(own, first), step_s(own, after))
    lost_s, end_s = 2.5 * steps_s[0], 2.5 * steps_s[0] + pause_s + 3.5 * steps_s[1]
    replay = replayed(own, (lost_s, "remove", 4), end_s=end_s)
    assert [(run.count, run.num_nodes) for run in replay.steps] == [(2, 9), (3, 8)]
    assert [run.step_s for run in replay.steps] == list(steps_s)
    assert replay.samples == 5 * SAMPLES and replay.samples_per_second == pytest.approx(5 * SAMPLES / end_s)
    total = 9 * lost_s + 8 * (end_s - lost_s)
    assert replay.shares["computing"] == pytest.approx((18 * steps_s[0] + 24 * steps_s[1]) / total)
    assert replay.shares["lost"] == pytest.approx((4.5 * steps_s[0] + 4 * steps_s[1]) / total)
    assert replay.shares["restarting"] + replay.shares["copying"] == pytest.approx(8 * pause_s / total)
    start, change = replay.changes
    assert (start.took_s, change.start_s, change.label, change.num_nodes) == (0.0, lost_s, "lost 4", 8)
    assert change.took_s == pytest.approx(pause_s)
    assert sum(replay.rates(7)) * end_s / 7 == pytest.approx(replay.samples)
    ends = replay.step_ends_s(1)
    assert ends[1] == pytest.approx(2 * steps_s[0]) and ends[-1] == pytest.approx(end_s - 0.5 * steps_s[1])
    assert replay.step_ends_s(2) == ends[1::2] and replay.step_ends_s(3) == ends[2::3]


def test_nodes_join_at_the_end_of_a_step() -> None:
    own = planner()
    first = own.first()
    fewer = own.without(first, [0])
    again = own.with_nodes(fewer, [9])
    start_s = 1.0 + IN_PLACE_S + copied_s(own, first, fewer)
    joined_s = start_s + 1.5 * step_s(own, fewer)
    replay = replayed(own, (1.0, "remove", 0), (joined_s, "add", 9), end_s=joined_s + 10)
    change = replay.changes[-1]
    assert (change.label, change.num_nodes) == ("joined 9", 9)
    assert change.start_s == pytest.approx(start_s + 2 * step_s(own, fewer))
    assert change.took_s == pytest.approx(COSTS.regroup_s + copied_s(own, fewer, again))
    assert replay.shares["idle"] > 0, "until the end of the step"


@pytest.mark.parametrize("save_every", [None, 3])
def test_a_layer_that_nobody_holds_comes_from_the_checkpoint(save_every: int | None) -> None:
    own = planner()
    first = own.first()
    lost = [one.nodes[0] for one in first.pipelines]
    left = own.num_nodes - len(lost)
    assert is_lost(own, first, set(lost)) and left >= own.fewest_guaranteed
    before_s = 3 * step_s(own, first) + COSTS.save_s + 2.5 * step_s(own, first)
    events = [(before_s, "remove", node) for node in lost]
    replay = replayed(own, *events, end_s=before_s + COSTS.restart_s + 1.0, save_every=save_every)
    assert replay.changes[1].took_s == COSTS.restart_s and replay.changes[1].num_nodes == left
    assert [run.count for run in replay.steps if run.start_s < before_s] == ([3] if save_every else [])
    assert (replay.shares["saving"] > 0) == bool(save_every)


def is_lost(own: ResilientPlanner, plan: ClusterPlan, nodes: set[int]) -> bool:
    """Whether the others lack a layer."""
    try:
        state_copies(own.plans.chain.spec, plan, replace(own, failures=0).without(plan, nodes))
    except (LostStateError, TooFewNodesError):
        return True
    return False


def test_too_few_nodes_save_what_is_whole_and_wait() -> None:
    own = planner()
    lost = list(range(9 - own.fewest_guaranteed + 1))
    events = [(10.0 * (node + 1), "remove", node) for node in lost]
    end_s = 10.0 * len(lost) + 50.0
    replay = replayed(own, *events, (end_s, "add", 9), end_s=end_s + 100)
    waits, again = replay.changes[-2:]
    assert (waits.num_nodes, waits.start_s, waits.took_s) == (0, 10.0 * len(lost), 50.0)
    assert (again.label, again.took_s, again.num_nodes) == ("joined 9", COSTS.restart_s, own.fewest_guaranteed)
    assert replay.shares["saving"] > 0 and replay.shares["idle"] > 0
    assert replay.steps[0].start_s == 0.0, "nothing but the running steps is lost"


def test_a_recovery_that_is_interrupted_has_copied_nothing() -> None:
    """What both losses leave counts from the plan before the first one."""
    own = planner()
    first = own.first()
    assert not is_lost(own, first, {0, 1})
    replay = replayed(own, (10.0, "remove", 0), (11.0, "remove", 1), end_s=100.0)
    took_s = IN_PLACE_S + copied_s(own, first, own.without(first, [0, 1]))
    assert [change.took_s for change in replay.changes[1:3]] == pytest.approx([1.0, took_s])


def test_a_node_that_is_lost_while_it_is_taken_in_leaves_the_others_to_be_taken_in() -> None:
    own = planner()
    fewer = own.without(own.first(), [0])
    joined = [(30.0, "add", 9), (30.0, "add", 10)]
    replay = replayed(own, (10.0, "remove", 0), *joined, (31.0, "remove", 9), end_s=100.0)
    assert [change.label for change in replay.changes[1:]] == ["lost 0", "joined 9, 10", "lost 9", "joined 10"]
    assert replay.changes[-2].took_s == pytest.approx(IN_PLACE_S) and replay.changes[-2].num_nodes == 8
    assert replay.steps[-1].step_s == step_s(own, own.with_nodes(fewer, [10])) and replay.steps[-1].num_nodes == 9


@settings(max_examples=15)
@example(487, "little memory", None)  # a node is lost while others are taken in, and too few are left
@given(st.integers(0, 10_000), st.sampled_from(["little memory", "one rank a node"]), st.sampled_from([None, 4]))
def test_time_is_accounted_for(seed: int, cluster: str, save_every: int | None) -> None:
    """In random traces shares add up, steps follow each other, and those that run use all nodes there are."""
    own, rng = planner(cluster), random.Random(seed)
    own = replace(own, mean_time_between_failures_s=rng.choice([1.0, 1e5]))
    present, rows, time_s, unit_s = set(range(own.num_nodes)), [], 0.0, step_s(own, own.first())
    for number in range(rng.randint(1, 12)):
        time_s += unit_s * rng.choice([0.3, 1.0, 10.0, 90.0])
        if len(present) == own.num_nodes or present and rng.random() < 0.6:
            for node in rng.sample(sorted(present), min(len(present), rng.randint(1, 2))):
                rows.append((time_s, "remove", node))
                present.remove(node)
        else:
            rows.append((time_s, "add", 100 + number))
            present.add(100 + number)
    costs = {name: unit_s * getattr(COSTS, name) for name in ("detect_s", "regroup_s", "restart_s", "save_s")}
    replay = replayed(own, *rows, end_s=time_s + 100 * unit_s, save_every=save_every, **costs)
    assert sum(replay.shares.values()) == pytest.approx(1.0) and min(replay.shares.values()) >= -1e-12
    for before, after in zip(replay.steps, replay.steps[1:], strict=False):
        assert before.end_s <= after.start_s + 1e-6 * unit_s
    assert replay.step_ends_s(1) == sorted(replay.step_ends_s(1)) and all(run.count > 0 for run in replay.steps)
    assert len(replay.step_ends_s(1)) * SAMPLES == replay.samples
    assert all(one.took_s >= 0 for one in replay.changes)
    if len(present) >= own.fewest_guaranteed:
        assert replay.steps[-1].num_nodes == len(present) and replay.steps[-1].end_s > time_s
    else:
        assert replay.changes[-1].num_nodes == 0
