"""Plans after random failures and joins: all that is guaranteed holds, and little is copied."""

import contextlib
import random
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
    Stage,
    check_plan,
    check_trained,
    parameter_shards,
    resolve_plan,
    stage_parameters,
)
from hf_mmparallel.resilience.model_chain import model_chain
from hf_mmparallel.resilience.pipelines import (
    ClusterPlan,
    PipelinePlans,
    TooFewNodesError,
    layouts_of,
    layouts_of_plan,
    on_ranks,
    tp_sizes_of,
)
from hf_mmparallel.resilience.resilient_planner import ResilientPlanner
from hf_mmparallel.resilience.state_copies import LostStateError, common_holdings, holdings, state_copies
from hf_mmparallel.resilience.templates import fastest_instantiations, fewest_nodes
from tests.deep_cases import deep, third
from tests.resilience.models import MODELS, chain_of, costs_of, typical


@cache
def planner_of(
    family: str,
    num_nodes: int,
    node_size: int,
    failures: int,
    sizes: tuple[int, ...] = (1,),
    limited: bool = False,
    zero_stage: int = 0,
) -> ResilientPlanner:
    """
    A planner; with limited memory a copy of the model needs several nodes; with a `zero_stage` two copies of a
    pipeline share what belongs to the language model.
    """
    modules = {
        LANGUAGE_MODEL: ModulePlugin(tp_size=sizes[0], zero_stage=zero_stage, shard_size=2 if zero_stage else None)
    }
    limit = memory_for_two_nodes(family, modules, node_size, sizes) if limited else None
    return ResilientPlanner(PipelinePlans(chain_of(family, modules, limit, sizes), node_size, 24), num_nodes, failures)


def memory_for_two_nodes(family: str, modules: dict, node_size: int, sizes: tuple[int, ...]) -> float:
    """Memory with which a copy of the model fits two nodes or three, but not one."""
    for limit in np.geomspace(1e8, 1e5, 40).tolist():
        chain = chain_of(family, modules, limit, sizes).chain
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
    "shared state": ("llava", 6, 4, 1, (1,), False, 3),
    "little memory, shared state": ("llama_tied", 7, 2, 1, (1,), True, 3),
}


def members_of(nodes, size: int) -> list[int]:
    return [node * size + index for node in nodes for index in range(size)]


def check(planner: ResilientPlanner, state: ClusterPlan) -> None:
    """What holds for every plan."""
    spec, size = planner.plans.chain.spec, planner.node_size
    check_plan(state.plan, spec)
    check_trained(state.plan, spec)
    assert len(state.pipelines) >= planner.failures + 1
    copies = planner.plans.chain.copies
    assert all(module.dp_size == copies * len(state.pipelines) for module in state.plan.modules.values())
    assert sum(state.microbatches) == planner.plans.num_microbatches and min(state.microbatches) >= 1
    each = [pipeline for pipeline in state.pipelines for _ in range(copies)]
    paces = [one.fill_ms for one in each], [one.slowest_ms for one in each]
    assert list(state.microbatches) == fastest_counts(*paces, planner.plans.num_microbatches)
    assert list(state.members) == members_of(state.nodes, size)
    assert state.plan.world_size == len(state.members)
    used: dict[int, set[int]] = {replica: set() for replica in range(len(state.pipelines))}
    for name, module in state.plan.modules.items():
        for replica, _, stage in module.stages():
            used[replica // copies] |= {state.members[rank] for rank in stage.all_ranks}
            trained = [p.trainable for p in stage_parameters(spec, name, stage)]
            assert (stage.trainable, stage.partly_frozen) == (any(trained), len(set(trained)) == 2)
            for tp_group in stage.mesh:
                assert len({state.members[rank] // size for rank in tp_group}) == 1, "a tp group is on one node"
    for name, shards in parameter_shards(spec, state.plan).items():
        for shard in shards.shards:
            nodes = {state.members[rank] // size for rank in shard.updaters}
            assert len(nodes) >= planner.failures + 1, f"`{name}` is updated on more nodes than may fail"
    for replica, pipeline in enumerate(state.pipelines):
        assert used[replica] == set(members_of(pipeline.nodes, size)), "a pipeline has its nodes for itself"


def stages_of_members(state: ClusterPlan, nodes, size: int) -> dict[int, list]:
    """Of the members of some nodes the modules, layers and tp ranks of their stages."""
    result: dict[int, list] = {member: [] for member in members_of(nodes, size)}
    for member, stages in result.items():
        rank = state.members.index(member)
        for key in state.plan.stages_of_rank(rank):
            stage = state.plan.stage(*key)
            stages.append((key[0], stage.layers, [group.index(rank) for group in stage.mesh if rank in group]))
    return result


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


@pytest.mark.parametrize("cluster", third(CLUSTERS))
@pytest.mark.parametrize("seed", [0, deep(1), deep(2)])
def test_failures_and_joins_at_random(seed: int, cluster: str) -> None:
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
            touched = lost | {node for change in state.changes for node in (*change.nodes, *change.others)}
            for pipeline in before.pipelines:
                if touched.isdisjoint(pipeline.nodes):
                    assert pipeline in state.pipelines
                    own = (pipeline.nodes, planner.node_size)
                    assert stages_of_members(state, *own) == stages_of_members(before, *own)
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
        num_bytes = copied(planner, before, state)
        for index, pipeline in enumerate(state.pipelines):
            if pipeline in before.pipelines or len(pipeline.nodes) > 4:
                continue
            for nodes in permutations(pipeline.nodes):
                others = list(state.pipelines)
                others[index] = replace(pipeline, nodes=nodes)
                assert num_bytes <= copied(planner, before, planner.plans.of(others, state.microbatches))


MISJUDGED = {"qwen2_5_omni": 0.028, "qwen3_vl": 0.016}


@pytest.mark.parametrize("family", third(MODELS))
@pytest.mark.parametrize("memory_bytes", [None, 9.5e6])
def test_plans_with_a_choice_of_sizes_are_never_slower(family: str, memory_bytes: float | None) -> None:
    """Than with any single size, on any number of nodes; with as few nodes for a copy of the model, or with fewer."""
    compared = 0
    for num_nodes, node_size in ((2, 2), (5, 2), (2, 4)):
        found = {}
        for sizes in ((1,), (2,), (1, 2)):
            plans = PipelinePlans(chain_of(family, {}, memory_bytes, sizes), node_size, 24)
            with contextlib.suppress(ValueError):
                found[sizes] = ResilientPlanner(plans, num_nodes, 1)
        for sizes in found:
            chosen, single = found[1, 2], found[sizes]
            assert chosen.fewest <= single.fewest
            for left in range(single.fewest_guaranteed, num_nodes + 1):
                ours, theirs = (
                    min(of.plans.consecutive(list(map(of.pipeline, nodes))).step_ms for nodes in of._finalists(left))
                    for of in (chosen, single)
                )
                assert ours <= theirs * (1 + 1e-9)  # in closed form, which chooses the templates
                plans_ = chosen.fastest(left), single.fastest(left)
                # The closed form is up to 7 % above the simulation, and misjudges one number of nodes of two models.
                is_misjudged = (num_nodes, node_size, sizes, memory_bytes) == (2, 4, (1,), None)
                above = MISJUDGED.get(family, 1e-6) if is_misjudged else 1e-6
                assert chosen.step_ms(plans_[0]) <= single.step_ms(plans_[1]) * (1 + above)
                compared += sizes != (1, 2)
    assert compared


def test_few_nodes_have_larger_tp_groups_where_memory_asks_for_them() -> None:
    """A copy fits one node with tp groups of both of its ranks only; on three nodes most stages have one rank."""
    with pytest.raises(ValueError, match="any number of nodes of 2 ranks"):
        ResilientPlanner(PipelinePlans(chain_of("llama_tied", {}, 9.41e6, (1,)), 2, 24), 4, 1)
    planner = ResilientPlanner(PipelinePlans(chain_of("llama_tied", {}, 9.41e6, (1, 2)), 2, 24), 4, 1)
    assert planner.fewest == 1
    one, _, three = ({stage.num_ranks for stage in template.stages} for template in planner.templates)
    assert (one, three) == ({2}, {1, 2})
    chains = {sizes: chain_of("qwen2_5_omni", {}, 6.5e6, sizes).chain for sizes in ((1,), (2,), (1, 2))}
    fewest = {sizes: fewest_nodes(chain, 2, 6, 24) for sizes, chain in chains.items()}
    assert fewest == {(1,): None, (2,): 3, (1, 2): 2}, "with stages of both sizes"


def plan_of_ranks(replicas, num_microbatches: int = 12) -> ParallelPlan:
    """A plan of a language model alone; `replicas` have the (tp group, layers) of their stages."""
    module = resolve_plan(costs_of("llama_tied").spec, {}).modules[LANGUAGE_MODEL]
    stages = (tuple(replace(module.replicas[0][0], mesh=(r,), layers=own) for r, own in row) for row in replicas)
    return ParallelPlan({LANGUAGE_MODEL: replace(module, replicas=tuple(stages))}, num_microbatches=num_microbatches)


def test_a_plan_of_the_user_is_followed_by_its_own_sizes() -> None:
    costs = costs_of("llama_tied")
    plan = plan_of_ranks([[((n, n + 1), (0, 2)), ((n + 2,), (2, 3)), ((n + 3,), (3, 4))] for n in (0, 4, 8)])
    sizes = tp_sizes_of(plan)
    assert sizes == {LANGUAGE_MODEL: (1, 2)}
    chain = model_chain(costs, layouts_of_plan(plan, 2), typical(costs.spec), tp_sizes=sizes)
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
    spec = planner.plans.chain.spec
    before = planner.adopt(resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(2, pp_size=4)}, None, "1f1b", 12))
    with pytest.raises(LostStateError, match="layer 1 of `language_model`") as error:
        state_copies(spec, before, planner.without(before, [1, 5]))
    assert error.value.missing == {LANGUAGE_MODEL: [1]}
    state_copies(spec, before, planner.without(before, [1, 6]))


@pytest.mark.parametrize("cluster", [("qwen3_vl", 8, 1, 1, 1e7), ("llava", 6, 1, 1, None)])
def test_too_few_nodes_still_have_a_plan_to_save_the_model(cluster: tuple) -> None:
    """In the first one pipelines of all nodes that are left would need more layers than there are."""
    family, num_nodes, node_size, failures, limit = cluster
    planner = ResilientPlanner(PipelinePlans(chain_of(family, {}, limit), node_size, 24), num_nodes, failures)
    spec, state = planner.plans.chain.spec, planner.first()
    while len(state.nodes) > planner.fewest_guaranteed:
        state = planner.without(state, [state.nodes[-1]])
    for lost in state.nodes:
        with pytest.raises(TooFewNodesError):
            planner.without(state, [lost])
        last = planner.last(state, [lost])
        assert lost not in last.nodes and not state_copies(spec, state, last).copies
    # more losses at once than are guaranteed, which leave no pipeline whole
    lost = [pipeline.nodes[0] for pipeline in state.pipelines]
    if limit is None:
        with pytest.raises(TooFewNodesError):
            planner.last(state, lost)


def adopted(vision: ModulePlugin, language: ModulePlugin, node_size: int, failures: int = 1, **more) -> ClusterPlan:
    """Adopts the plan of these sizes, after a `change`."""
    costs = costs_of("llava")
    plan = resolve_plan(costs.spec, {"vision": vision, LANGUAGE_MODEL: language}, None, "1f1b", 12)
    plan = more.pop("change", lambda same: same)(plan)
    modules = more.pop("modules", None)
    layouts = layouts_of_plan(plan, node_size) if modules is None else layouts_of(modules)
    chain = model_chain(costs, layouts, typical(costs.spec))
    total = 12 * plan.modules[LANGUAGE_MODEL].dp_size
    planner = ResilientPlanner(PipelinePlans(chain, node_size, total, **more), plan.world_size // node_size, failures)
    state = planner.adopt(plan)
    check(planner, state)
    return state


def regrouped(plan: ParallelPlan) -> ParallelPlan:
    """The plan of two copies with ranks in the order of copies instead of modules."""
    copies = [[stage for module in plan.modules.values() for stage in module.replicas[copy]] for copy in range(2)]
    order = [rank for stages in copies for stage in stages for rank in stage.all_ranks]

    def moved(stage: Stage) -> Stage:
        return replace(stage, mesh=tuple(tuple(map(order.index, group)) for group in stage.mesh))

    modules = {
        name: replace(module, replicas=tuple(tuple(map(moved, stages)) for stages in module.replicas))
        for name, module in plan.modules.items()
    }
    return replace(plan, modules=modules)


def swapped(plan: ParallelPlan) -> ParallelPlan:
    """The plan with the copies of the encoder in the other order."""
    vision = plan.modules["vision"]
    modules = {**plan.modules, "vision": replace(vision, replicas=vision.replicas[::-1])}
    return replace(plan, modules=modules)


def lopsided(plan: ParallelPlan) -> ParallelPlan:
    """The plan of three copies with two of them on the first two nodes."""
    modules = {
        name: replace(module, replicas=on_ranks(module.replicas, (0, 1, 4, 2, 3, 5)))
        for name, module in plan.modules.items()
    }
    return replace(plan, modules=modules)


TWO, WITH_VISION = ModulePlugin(2), ModulePlugin(colocate_with="vision")


def test_plans_of_the_user_are_adopted() -> None:
    vision = ModulePlugin(2, pp_size=2)
    state = adopted(vision, WITH_VISION, 2)
    assert [pipeline.nodes for pipeline in state.pipelines] == [(0,), (1,)]
    plugins = {"vision": vision, LANGUAGE_MODEL: WITH_VISION}
    assert state.plan == resolve_plan(costs_of("llava").spec, plugins, None, "1f1b", 12)
    state = adopted(ModulePlugin(4), ModulePlugin(4, colocate_with="vision"), 2)
    assert [pipeline.nodes for pipeline in state.pipelines] == [(0,), (1,)], "two copies on each"
    state = adopted(TWO, ModulePlugin(2, pp_size=3), 2, change=regrouped)
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
    planner = ResilientPlanner(PipelinePlans(chain_of("llama_tied", {}), 2, 36), 3, 1)
    before = planner.adopt(plan_of_ranks([[(ranks, (0, 4))] for ranks in ((0, 1), (2, 3), (4, 5))]))
    check(planner, before)
    fewer = planner.without(before, [1])
    after = planner.with_nodes(fewer, [7])
    check(planner, after)
    assert [one.plan.modules[LANGUAGE_MODEL].tp_sizes for one in (fewer, after)] == [(2,), (1, 2)]
    copies = state_copies(planner.plans.chain.spec, fewer, after).copies
    assert {copy.target // 2 for copy in copies} == {7}
    of_matrix = [copy for copy in copies if copy.parameter == "model.layers.0.mlp.up_proj.weight"]
    assert sorted(copy.slice.ranges[0][0] > 0 for copy in of_matrix) == [False, True], "one half from each rank"
    assert len({copy.source % 2 for copy in of_matrix}) == 2


@pytest.mark.parametrize(
    ("vision", "language", "node_size", "more", "match"),
    [
        (TWO, ModulePlugin(3), 1, {}, "`vision` 2, `language_model` 3"),
        (TWO, ModulePlugin(2, pp_size=3), 2, {}, "some of the 2 ranks of node 0"),
        (TWO, TWO, 2, {}, "1 copies of the model on nodes of their own"),
        (ModulePlugin(4, zero_stage=1), ModulePlugin(4, colocate_with="vision"), 2, {}, "all copies .*`shard_size=2`"),
        (
            ModulePlugin(2, zero_stage=1, shard_size=2),
            WITH_VISION,
            1,
            {},
            "2 copies .* `shard_size`, the copies on one",
        ),
        (ModulePlugin(3), WITH_VISION, 1, {"change": swapped}, "Replicas 0 and 2 .* node 0"),
        (ModulePlugin(3), ModulePlugin(3), 2, {"change": lopsided}, "first 2 copies .* 3 copies"),
        (TWO, ModulePlugin(2, 2), 1, {"failures": 2, "change": regrouped}, "to survive 2 failures .* guarantee 1"),
        (TWO, ModulePlugin(2, cp_size=2), 1, {"modules": {}}, "`cp_size=2` in the plan, and `cp_size=1`"),
        (ModulePlugin(2, activation_checkpointing=True), TWO, 1, {"modules": {}}, "`vision` has other settings"),
        (TWO, TWO, 1, {"schedule": "gpipe"}, "`schedule='1f1b'`, .* 'gpipe'"),
        (TWO, TWO, 1, {"schedule": "zero_bubble"}, "`schedule='zero_bubble'`"),
        (TWO, ModulePlugin(2, pp_size=2, split_backward=True), 1, {}, "`split_backward=True` of `language_model`"),
    ],
)
def test_plans_that_do_not_survive_are_refused(vision, language, node_size, more, match) -> None:
    with pytest.raises(ValueError, match=match):
        adopted(vision, language, node_size, **more)


@pytest.mark.parametrize(
    ("node_size", "num_microbatches", "num_nodes", "failures", "match"),
    [
        (1, 24, 2, 2, r"2 simultaneous failures need 3 copies .*; there are 2\..* guarantee 1 fail"),
        (1, 2, 4, 2, "2 microbatches .* 3 pipelines"),
        (16, 24, 4, 1, "16 ranks .* 8 layers"),
        (1, 4, 40, 1, r"40 nodes .* 4 pipelines, .* 32 nodes at most"),
    ],
)
def test_what_can_not_be_guaranteed_is_refused(node_size, num_microbatches, num_nodes, failures, match) -> None:
    with pytest.raises(ValueError, match=match):
        ResilientPlanner(PipelinePlans(chain_of("llava"), node_size, num_microbatches), num_nodes, failures)


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
