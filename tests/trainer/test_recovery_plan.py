"""The layouts of a run whose nodes are lost and join."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, MultimodalParallelPlugin, resolve_plan
from hf_mmparallel.resilience.resilience_settings import ResilienceSettings
from hf_mmparallel.trainer.build import PreparedModel
from hf_mmparallel.trainer.recovery_plan import NodeLayouts, node_layouts
from tests import tiny
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


def layouts_of(plugin: MultimodalParallelPlugin, **arguments: Any) -> NodeLayouts:
    """Of a small LLaVA on 4 nodes of 2 ranks."""
    model = tiny.FAMILIES["llava"]()
    spec = build_model_spec(model)
    given = {
        "survives": ResilienceSettings.from_dict({"failures": 1, "ranks_per_node": 2}),
        "world_size": 8,
        "per_device_train_batch_size": 1,
        "microbatch_assignment": None,
        "mean_time_between_failures_h": 24.0,
        "memory_limit_gib": None,
        "activation_checkpointing": False,
    }
    prepared = PreparedModel(model, spec, analytic_costs(spec, find_device("h100"), 4))
    return node_layouts(prepared, plugin, SimpleNamespace(**{**given, **arguments}), (16, None))


def test_stages_have_any_size_that_the_settings_leave_open() -> None:
    """The plan that follows from this is one that the same layouts adopt."""
    settings = {"auto": True, "modules": {"vision": {"tp_size": 1}}}
    layouts = layouts_of(MultimodalParallelPlugin.from_any(settings), activation_checkpointing=True)
    chain = layouts.planner.plans.chain
    assert chain.tp_sizes == {"vision": (1,), LANGUAGE_MODEL: (1, 2)}
    first = layouts.planner.first()
    assert all(module.activation_checkpointing for module in first.plan.modules.values())
    adopted = layouts.planner.adopt(first.plan)
    assert adopted.plan == first.plan and adopted.step_ms == pytest.approx(first.step_ms, rel=1e-6)


def test_stages_after_a_plan_of_the_user_have_its_sizes() -> None:
    spec = build_model_spec(tiny.FAMILIES["llava"]())
    two = {"vision": ModulePlugin(dp_size=2, tp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, tp_size=2)}
    plan = resolve_plan(spec, two, num_microbatches=8)
    layouts = layouts_of(MultimodalParallelPlugin(plan=plan))
    assert layouts.planner.plans.chain.tp_sizes == {"vision": (2,), LANGUAGE_MODEL: (2,)}
