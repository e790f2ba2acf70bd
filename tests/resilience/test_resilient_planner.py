"""Plans after random failures and joins: all that is guaranteed holds, and little is copied."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.arrange import fastest_counts
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModulePlugin,
    ParallelPlan,
    check_plan,
    check_trained,
    resolve_plan,
    stage_parameters,
)
from hf_mmparallel.resilience.model_chain import model_chain
from hf_mmparallel.resilience.pipelines import ClusterPlan, PipelinePlans, module_settings, tp_sizes_of
from hf_mmparallel.resilience.reconfiguration import TooFewNodesError
from hf_mmparallel.resilience.resilient_planner import ResilientPlanner
from hf_mmparallel.resilience.state_copies import LostStateError, common_holdings, holdings, state_copies
from hf_mmparallel.resilience.templates import PipelineTemplate, fastest_instantiations, fewest_nodes
from tests.resilience.models import MODELS, chain_of, costs_of, typical


@cache
def planner_of(
    family: str, num_nodes: int, node_size: int, failures: int, sizes: tuple[int, ...] = (1,), limited: bool = False
) -> ResilientPlanner:
    """A planner; with limited memory a copy of the model needs several nodes."""
    limit = memory_for_two_nodes(family, node_size, sizes) if limited else None
    return ResilientPlanner(PipelinePlans(chain_of(family, {}, limit, sizes), node_size, 24), num_nodes, failures)


def memory_for_two_nodes(family: str, node_size: int, sizes: tuple[int, ...]) -> float:
    """Memory with which a copy of the model fits two nodes or three, but not one."""
    for limit in np.geomspace(1e8, 1e5, 40).tolist():
        chain = chain_of(family, {}, limit, sizes).chain
        if (fewest_nodes(chain, node_size, 3, 24) or 0) > 1:
            return limit
    raise AssertionError("no limit fits")


CLUSTERS = {
    "one rank a node": ("llava", 7, 1, 2),
    "tied": ("llama_tied", 4, 2, 1),
    "inner features": ("qwen3_vl", 6, 1, 1),
    "two encoders": ("qwen2_5_omni", 5, 2, 1),
    "two encoders, tp": ("qwen2_5_omni", 5, 4, 1, (2,)),
    "frozen parts, tp": ("gemma3", 8, 2, 3, (2,)),
    "unlike tp, two encoders": ("qwen2_5_omni", 5, 4, 1, (1, 2)),
    "unlike tp, frozen parts": ("gemma3", 8, 2, 3, (1, 2)),
    "little memory": ("llava", 9, 1, 1, (1,), True),
    "little memory, two encoders": ("qwen2_5_omni", 8, 1, 1, (1,), True),
    "little memory, tp": ("llama_tied", 9, 2, 1, (2,), True),
    "little memory, unlike tp": ("llava", 9, 2, 1, (1, 2), True),
}


def check(planner: ResilientPlanner, state: ClusterPlan) -> None:
    """What holds for every plan."""
    spec, size = planner.plans.chain.spec, planner.node_size
    check_plan(state.plan, spec)
    check_trained(state.plan, spec)
    assert len(state.pipelines) >= planner.failures + 1
    assert all(module.dp_size == len(state.pipelines) for module in state.plan.modules.values())
    assert sum(state.microbatches) == planner.plans.num_microbatches and min(state.microbatches) >= 1
    layouts = [pipeline.layout for pipeline in state.pipelines]
    paces = [one.fill_ms for one in layouts], [one.slowest_ms for one in layouts]
    assert list(state.microbatches) == fastest_counts(*paces, planner.plans.num_microbatches)
    assert list(state.members) == [node * size + index for node in state.nodes for index in range(size)]
    assert state.plan.world_size == len(state.members)
    assert all(state.plan.stages_of_rank(rank) for rank in range(state.plan.world_size))
    for replica, pipeline in enumerate(state.pipelines):
        members = [node * size + index for node in pipeline.nodes for index in range(size)]
        used: set[int] = set()
        for name, module in state.plan.modules.items():
            stages = module.replicas[replica]
            used |= {state.members[rank] for stage in stages for rank in stage.all_ranks}
            for stage in stages:
                trained = [p.trainable for p in stage_parameters(spec, name, stage)]
                assert (stage.trainable, stage.partly_frozen) == (any(trained), len(set(trained)) == 2)
                nodes = [{state.members[rank] // size for rank in tp_group} for tp_group in stage.mesh]
                assert all(len(of_group) == 1 for of_group in nodes), "a tp group is on one node"
        assert used == set(members), "a pipeline has its nodes for itself"


def stages_of_members(state: ClusterPlan) -> dict[int, list]:
    """Member -> module, layers and tp rank of its stages."""
    return {
        member: [
            (
                key[0],
                state.plan.stage(*key).layers,
                [group.index(rank) for group in state.plan.stage(*key).mesh if rank in group],
            )
            for key in state.plan.stages_of_rank(rank)
        ]
        for rank, member in enumerate(state.members)
    }


def copied(planner: ResilientPlanner, before: ClusterPlan, after: ClusterPlan) -> int:
    """Bytes that are copied; fails unless these are all that members lack, and come from live holders."""
    spec = planner.plans.chain.spec
    held, needed = common_holdings(spec, before, after)
    for common, whole in ((held, holdings(spec, before)), (needed, holdings(spec, after))):
        of_members = [{member: sum(parts.values()) for member, parts in one.items()} for one in (common, whole)]
        assert of_members[0] == of_members[1]
    live = {member: dict(held.get(member, {})) for member in after.members}
    copies = state_copies(spec, before, after)
    for copy in copies.copies:
        part = (copy.parameter, copy.slice)
        assert copy.source in after.members and part in held[copy.source], "lost members send nothing"
        assert part not in live[copy.target], "nothing is sent twice, or to who has it"
        live[copy.target][part] = copy.num_bytes
    for member, parts in needed.items():
        assert parts.items() <= live[member].items()
    assert copies.num_bytes == sum(copies.sent_bytes.values()) == sum(copies.received_bytes.values())
    return copies.num_bytes


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("seed", range(3))
def test_failures_and_joins_at_random(cluster: str, seed: int) -> None:
    planner = planner_of(*CLUSTERS[cluster])
    assert (planner.fewest > 1) == cluster.startswith("little memory")
    rng, state, next_node = random.Random(seed), planner.first(), planner.num_nodes
    check(planner, state)
    for _ in range(12):
        before = state
        if len(state.nodes) < planner.num_nodes and rng.random() < 0.4:
            joined = range(next_node, next_node + rng.randint(1, planner.num_nodes - len(state.nodes)))
            next_node = joined.stop
            state = planner.with_nodes(state, joined)
            assert set(state.nodes) == {*before.nodes, *joined}
        else:
            lost = set(rng.sample(before.nodes, rng.randint(1, max(1, planner.failures))))
            if len(before.nodes) - len(lost) < planner.fewest_guaranteed:
                with pytest.raises(TooFewNodesError):
                    planner.without(state, lost)
                continue
            state = planner.without(state, lost)
            assert set(state.nodes) == set(before.nodes) - lost
            lenders = {node for change in state.changes for node in (*change.nodes, *change.others)}
            stages, earlier = stages_of_members(state), stages_of_members(before)
            for pipeline in before.pipelines:
                if not lost & set(pipeline.nodes) and not lenders & set(pipeline.nodes):
                    assert pipeline in state.pipelines
                    for node in pipeline.nodes:
                        for member in range(node * planner.node_size, (node + 1) * planner.node_size):
                            assert stages[member] == earlier[member]
        check(planner, state)
        copied(planner, before, state)


@pytest.mark.parametrize("cluster", ["little memory", "little memory, two encoders", "two encoders"])
def test_nodes_take_the_places_where_least_is_copied(cluster: str) -> None:
    """Against all orders of the nodes of the pipeline that changed."""
    planner, rng = planner_of(*CLUSTERS[cluster]), random.Random(1)
    state = planner.first()
    while len(state.nodes) > planner.fewest_guaranteed:
        before, lost = state, rng.choice(state.nodes)
        state = planner.without(before, [lost])
        for index, pipeline in enumerate(state.pipelines):
            if pipeline in before.pipelines or len(pipeline.nodes) > 5:
                continue
            bytes_ = copied(planner, before, state)
            for nodes in permutations(pipeline.nodes):
                others = list(state.pipelines)
                others[index] = type(pipeline)(nodes, pipeline.layout)
                assert bytes_ <= copied(planner, before, planner.plans.of(others, state.microbatches))


def sizes_of(template: PipelineTemplate) -> set[int]:
    return {stage.num_ranks for stage in template.stages}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("memory_bytes", [None, 9.5e6, 2e7])
def test_plans_with_a_choice_of_sizes_are_never_slower(family: str, memory_bytes: float | None) -> None:
    """Than with any single size, on any number of nodes; with as few nodes for a copy of the model, or with fewer."""
    compared = 0
    for num_nodes, node_size in ((2, 2), (3, 2), (5, 2), (2, 4), (3, 4)):
        found = {}
        for sizes in ((1,), (2,), (1, 2)):
            plans = PipelinePlans(chain_of(family, {}, memory_bytes, sizes), node_size, 24)
            with contextlib.suppress(ValueError):
                found[sizes] = ResilientPlanner(plans, num_nodes, 1)
        for sizes in found:
            chosen, single = found[1, 2], found[sizes]
            assert chosen.fewest <= single.fewest
            for left in range(single.fewest_guaranteed, num_nodes + 1):
                plans_ = chosen.fastest(left), single.fastest(left)
                assert plans_[0].step_ms <= plans_[1].step_ms * (1 + 1e-9)
                assert chosen.step_ms(plans_[0]) <= single.step_ms(plans_[1]) * (1 + 1e-6)
                compared += sizes != (1, 2)
    assert compared


def test_few_nodes_have_larger_tp_groups_where_memory_asks_for_them() -> None:
    """A copy fits one node with tp groups of both of its ranks only; on three nodes most stages have one rank."""
    memory_bytes = 9.41e6
    alone = chain_of("llama_tied", {}, memory_bytes, (1,))
    with pytest.raises(ValueError, match="does not fit any number of nodes of 2 ranks"):
        ResilientPlanner(PipelinePlans(alone, 2, 24), 4, 1)
    planner = ResilientPlanner(PipelinePlans(chain_of("llama_tied", {}, memory_bytes, (1, 2)), 2, 24), 4, 1)
    assert planner.fewest == 1
    one, _, three = planner.templates
    assert sizes_of(one) == {2} and sizes_of(three) == {1, 2}
    mixed = PipelinePlans(chain_of("qwen3_vl", {}, 8.53e6, (1, 2)), 2, 24)
    only = [fewest_nodes(chain_of("qwen3_vl", {}, 8.53e6, sizes).chain, 2, 6, 24) for sizes in ((1,), (2,))]
    assert only == [None, 3] and ResilientPlanner(mixed, 4, 1).fewest == 2, "with stages of both sizes"


def test_a_plan_of_the_user_is_followed_by_its_own_sizes() -> None:
    costs = costs_of("llama_tied")
    stages = (((0, 1), (0, 2)), ((2,), (2, 3)), ((3,), (3, 4)))
    own = resolve_plan(costs.spec, {}).modules[LANGUAGE_MODEL].replicas[0][0]
    replicas = tuple(
        tuple(replace(own, layers=layers, mesh=(tuple(rank + first for rank in ranks),)) for ranks, layers in stages)
        for first in (0, 4, 8)
    )
    module = replace(resolve_plan(costs.spec, {}).modules[LANGUAGE_MODEL], replicas=replicas)
    plan = ParallelPlan({LANGUAGE_MODEL: module}, num_microbatches=12)
    sizes = tp_sizes_of(plan)
    assert sizes == {LANGUAGE_MODEL: (1, 2)}
    chain = model_chain(costs, module_settings(plan), typical(costs.spec), tp_sizes=sizes)
    planner = ResilientPlanner(PipelinePlans(chain, 2, 36), 6, 1)
    state = planner.adopt(plan)
    after = planner.without(state, [1])
    check(planner, after)
    copied(planner, state, after)
    assert set(after.plan.modules[LANGUAGE_MODEL].tp_sizes) <= {1, 2}


def test_more_nodes_than_at_the_start() -> None:
    planner = planner_of("llava", 3, 1, 1)
    state = planner.with_nodes(planner.first(), range(3, 9))
    check(planner, state)
    assert len(state.nodes) == 9
    with pytest.raises(ValueError, match="Node 3 joins, but the plan has it already"):
        planner.with_nodes(state, [3])
    with pytest.raises(ValueError, match="Node 9 is lost, but the plan does not have it"):
        planner.without(state, [9])


def test_a_layer_without_a_holder_is_named() -> None:
    """Of two copies of the language model both lose the node with its first layers."""
    planner = planner_of("llama_tied", 8, 1, 1)
    plan = resolve_plan(
        planner.plans.chain.spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=4)}, None, "1f1b", 12
    )
    before = planner.adopt(plan)
    after = planner.without(before, [1, 5])
    with pytest.raises(LostStateError, match=r"No process that is left holds layer 1 of `language_model`\.") as error:
        state_copies(planner.plans.chain.spec, before, after)
    assert error.value.missing == {LANGUAGE_MODEL: [1]}
    state_copies(planner.plans.chain.spec, before, planner.without(before, [1, 6]))


def adopted(
    family: str, plugins: Mapping[str, ModulePlugin], node_size: int, failures: int = 1, **more
) -> ClusterPlan:
    """Adopts the plan of these sizes."""
    costs = costs_of(family)
    plan = resolve_plan(costs.spec, plugins, None, "1f1b", more.pop("num_microbatches", 12))
    plan = more.pop("change", lambda same: same)(plan)
    chain = model_chain(costs, more.pop("modules", module_settings(plan)), typical(costs.spec))
    total = 12 * plan.modules[LANGUAGE_MODEL].dp_size
    planner = ResilientPlanner(PipelinePlans(chain, node_size, total, **more), plan.world_size // node_size, failures)
    state = planner.adopt(plan)
    check(planner, state)
    return state


def regrouped(plan: ParallelPlan) -> ParallelPlan:
    """The plan of two copies with ranks in the order of copies instead of modules."""
    order = [
        rank
        for replica in range(2)
        for module in plan.modules.values()
        for stage in module.replicas[replica]
        for rank in stage.all_ranks
    ]
    data = plan.to_dict()
    for module in data["modules"].values():
        for stages in module["replicas"]:
            for stage in stages:
                stage["ranks"] = [[order.index(rank) for rank in group] for group in stage["ranks"]]
    return ParallelPlan.from_dict(data)


def swapped(plan: ParallelPlan) -> ParallelPlan:
    """The plan with the copies of the encoder in the other order."""
    vision = plan.modules["vision"]
    modules = {**plan.modules, "vision": replace(vision, replicas=vision.replicas[::-1])}
    return replace(plan, modules=modules)


def test_plans_of_the_user_are_adopted() -> None:
    shared = {"vision": ModulePlugin(dp_size=2, pp_size=2), LANGUAGE_MODEL: ModulePlugin(colocate_with="vision")}
    state = adopted("llava", shared, 2)
    assert [pipeline.nodes for pipeline in state.pipelines] == [(0,), (1,)]
    assert state.plan == resolve_plan(costs_of("llava").spec, shared, None, "1f1b", 12)
    own = {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=3)}
    state = adopted("llava", own, 2, change=regrouped)
    assert [pipeline.nodes for pipeline in state.pipelines] == [(0, 1), (2, 3)]
    assert [stage.all_ranks for stage in state.plan.modules[LANGUAGE_MODEL].replicas[1]] == [(5,), (6,), (7,)]


def test_numbers_of_microbatches_of_the_user_are_kept() -> None:
    planner = planner_of("llama_tied", 2, 1, 1)
    plan = resolve_plan(planner.plans.chain.spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=2)}, None, "1f1b", 12)
    state = planner.adopt(replace(plan, replica_microbatches=(10, 14)))
    assert state.microbatches == state.plan.replica_microbatches == (10, 14)
    assert ParallelPlan.from_dict(state.plan.to_dict()) == state.plan
    with pytest.raises(ValueError, match=r"\[10, 12\], adds up to 22; a global batch has 24 microbatches"):
        planner.adopt(replace(plan, replica_microbatches=(10, 12)))


def test_a_plan_with_other_tp_groups_than_the_templates_is_adopted_and_followed() -> None:
    """What a node that comes needs, which has a stage on each of its ranks, others have in halves."""
    costs = costs_of("llama_tied")
    meshes = [((0, 1),), ((2, 3),), ((4, 5),)]
    module = resolve_plan(costs.spec, {}).modules[LANGUAGE_MODEL]
    replicas = tuple(tuple(replace(stage, mesh=mesh) for stage in module.replicas[0]) for mesh in meshes)
    plan = ParallelPlan({LANGUAGE_MODEL: replace(module, replicas=replicas)}, num_microbatches=12)
    planner = ResilientPlanner(PipelinePlans(chain_of("llama_tied", {}), 2, 36), 3, 1)
    before = planner.adopt(plan)
    check(planner, before)
    fewer = planner.without(before, [1])
    after = planner.with_nodes(fewer, [7])
    assert fewer.plan.modules[LANGUAGE_MODEL].tp_sizes == (2,)
    assert after.plan.modules[LANGUAGE_MODEL].tp_sizes == (1, 2)
    check(planner, after)
    copies = state_copies(costs.spec, fewer, after).copies
    assert {copy.target // 2 for copy in copies} == {7}
    of_matrix = [copy for copy in copies if copy.parameter == "model.layers.0.mlp.up_proj.weight"]
    assert sorted(copy.slice.ranges[0][0] > 0 for copy in of_matrix) == [False, True], "one half from each rank"
    assert len({copy.source % 2 for copy in of_matrix}) == 2


def test_plans_that_do_not_survive_are_refused() -> None:
    two, three = ModulePlugin(dp_size=2), ModulePlugin(dp_size=3)
    with pytest.raises(ValueError, match=r"different numbers of copies \(`vision` 2, `language_model` 3\)"):
        adopted("llava", {"vision": two, LANGUAGE_MODEL: three}, 1)
    with pytest.raises(ValueError, match="Replica 0 of the plan's modules has some of the 2 ranks of node 0"):
        adopted("llava", {"vision": two, LANGUAGE_MODEL: two}, 2)
    with pytest.raises(ValueError, match="Replicas 0 and 1 of the plan share node 0"):
        adopted("llava", {"vision": two, LANGUAGE_MODEL: ModulePlugin(colocate_with="vision")}, 1, change=swapped)
    with pytest.raises(
        ValueError, match=r"The plan has 2 copies of the model; to survive 2 failures .* guarantee 1\."
    ):
        adopted("llava", {"vision": two, LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=2)}, 1, 2, change=regrouped)
    with pytest.raises(ValueError, match=r"`language_model` has `cp_size=2` in the plan, and `cp_size=1`"):
        own = {"vision": two, LANGUAGE_MODEL: ModulePlugin(dp_size=2, cp_size=2)}
        adopted("llava", own, 1, modules={})
    with pytest.raises(ValueError, match="`vision` has other settings in the plan"):
        own = {"vision": ModulePlugin(dp_size=2, activation_checkpointing=True), LANGUAGE_MODEL: two}
        adopted("llava", own, 1, modules={})
    with pytest.raises(ValueError, match="The plan has `schedule='1f1b'`, and plans after failures 'gpipe'"):
        adopted("llava", {"vision": two, LANGUAGE_MODEL: two}, 1, schedule="gpipe")


def test_what_can_not_be_guaranteed_is_refused() -> None:
    chain = chain_of("llava")
    with pytest.raises(
        ValueError, match=r"2 simultaneous failures need 3 copies .*; there are 2\..* guarantee 1 fail"
    ):
        ResilientPlanner(PipelinePlans(chain, 1, 24), 2, 2)
    with pytest.raises(ValueError, match="2 microbatches are too few for 3 pipelines"):
        ResilientPlanner(PipelinePlans(chain, 1, 2), 4, 2)
    with pytest.raises(ValueError, match="A node of 16 ranks can't be divided among the 8 layers"):
        ResilientPlanner(PipelinePlans(chain, 16, 24), 4, 1)
    with pytest.raises(ValueError, match="does not fit any number of nodes of 1 ranks by its predicted memory"):
        ResilientPlanner(PipelinePlans(chain_of("llava", {}, 1e5), 1, 24), 4, 1)
    with pytest.raises(ValueError, match=r"40 nodes can't all be used\. 4 pipelines, .* have 32 nodes at most"):
        ResilientPlanner(PipelinePlans(chain, 1, 4), 40, 1)


@given(st.integers(2, 12), st.integers(0, 2))
def test_the_first_plan_is_the_fastest(num_nodes: int, failures: int) -> None:
    if num_nodes <= failures:
        return
    planner = planner_of("llava", num_nodes, 1, failures)
    best = next(iter(fastest_instantiations(planner.templates, num_nodes, failures + 1, 24, 1)), None)
    first = planner.first()
    assert best is not None and best.step_ms * (1 - 1e-9) <= first.step_ms <= 1.05 * best.step_ms
    assert [template.num_nodes for template in planner.templates] == list(
        range(1, min(num_nodes - failures, 8) + 1)
    ), "one for each number of nodes, as long as there are layers"
