"""The layouts of a run whose nodes are lost and join."""

from __future__ import annotations

import pytest

from hf_mmparallel.trainer.recovery_plan import NodeLayouts
from tests.resilience.test_resilient_planner import planner_of


@pytest.fixture(scope="module")
def layouts() -> NodeLayouts:
    return NodeLayouts(planner_of("llava", 3, 2, 1))


def test_whole_nodes_that_join_get_a_place(layouts):
    first = layouts.planner.first()
    after = layouts.with_members(first, {8, 9})
    assert sorted(after.members) == [0, 1, 2, 3, 4, 5, 8, 9]
    held = {(t.name, t.target) for t in layouts.transfers(first, after)}
    for rank, member in enumerate(after.members):
        if member in (8, 9):
            assert {(name, rank) for name in layouts.needed(after, rank)} <= held, "they hold nothing before"


def test_members_of_nodes_that_have_not_joined_whole_are_left_out(layouts):
    first = layouts.planner.first()
    assert sorted(layouts.with_members(first, {8, 9, 10}).members) == [0, 1, 2, 3, 4, 5, 8, 9]
    assert layouts.with_members(first, {9, 10}) is first


def test_nodes_that_no_pipelines_could_use_are_left_out(layouts):
    first = layouts.planner.first()
    many = range(6, 2 * 10_000)
    assert layouts.with_members(first, many) is first


def test_a_node_that_joins_after_a_loss_takes_its_place(layouts):
    first = layouts.planner.first()
    left = layouts.without(first, {2})
    assert set(left.members) == {0, 1, 4, 5}, "the node is lost as a whole"
    assert sorted(layouts.with_members(left, {6, 7}).members) == [0, 1, 4, 5, 6, 7]
