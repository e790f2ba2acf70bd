"""Who holds what, against the definition written out."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    Cut,
    ModelSpec,
    ModulePlan,
    ModulePlugin,
    ParallelPlan,
    ParameterShards,
    ShardingSettings,
    Stage,
    parameter_shards,
    resolve_plan,
    sync_groups,
    sync_groups_of,
)
from hf_mmparallel.plan.ownership import trainable_stages
from hf_mmparallel.schedule import find_representatives
from tests.plan.specs import model_spec, specs_and_plans, with_experts

SPEC = model_spec()
MLP = "model.language_model.layers.0.mlp.weight"


def copies(spec, plan, name) -> list[tuple]:
    """(stage key, tp group) of every tp group of every stage that uses a parameter, stage by stage."""
    found = []
    for module_name, module in spec.modules.items():
        layers = [p.layer for p in module.parameters if p.name == name]
        layers += [layer for place, layer in spec.tied.get(name, ()) if place == module_name]
        for replica, stages in enumerate(plan.modules[module_name].replicas):
            for index, stage in enumerate(stages):
                inside = [min(max(layer, 0), module.num_layers - 1) in range(*stage.layers) for layer in layers]
                if any(inside):
                    found += [((module_name, replica, index), row) for row in stage.mesh]
    return found


def slices(spec, plan, name) -> dict[tuple[Cut, ...], list[int]]:
    """Each slice of a parameter -> the ranks that hold it, the first of a tp group in front."""
    result: dict[tuple[Cut, ...], list[int]] = {}
    rows = [row for _, row in copies(spec, plan, name)]
    dim = spec.parameters[name].tp_dim
    for t in range(len(rows[0])):
        cuts = () if dim is None or len(rows[0]) == 1 else (Cut("tp", dim, t, len(rows[0])),)
        result.setdefault(cuts, []).extend(sorted({row[t] for row in rows}))
    return {cuts: list(dict.fromkeys(ranks)) for cuts, ranks in result.items()}


def divided(expected, sharding) -> dict[tuple[Cut, ...], tuple[list[int], list[int]]]:
    """Each slice -> the ranks that hold it and those that update it, where the copies divide the optimizer's state."""
    result: dict[tuple[Cut, ...], tuple[list[int], list[int]]] = {}
    for cuts, ranks in expected.items():
        size = sharding.shard_size or len(ranks)
        size = len(ranks) if len(ranks) % size else size
        if not sharding.zero_stage or size == 1:
            result[cuts] = ranks, sorted(ranks)
            continue
        groups = [sorted(ranks)[first : first + size] for first in range(0, len(ranks), size)]
        for index in range(size):
            result[*cuts, Cut("dp", None, index, size)] = sorted(ranks), [group[index] for group in groups]
    return result


@given(specs_and_plans())
def test_shards_sync_groups_and_trainable_stages_are_what_the_words_say(case):
    spec, plan = case
    table = parameter_shards(spec, plan)
    groups = sync_groups(spec, plan)
    assert list(table) == list(spec.parameters)
    for name, parameter in spec.parameters.items():
        keys = {key for key, _ in copies(spec, plan, name)}
        assert set(table[name].stages) == keys and len(table[name].stages) == len(keys)
        expected = slices(spec, plan, name)
        sharding = plan.modules[spec.used_at[name][0][0]].sharding
        by_slice = divided(expected, sharding if parameter.trainable else ShardingSettings())
        assert [(s.cuts, s.holders, s.updaters) for s in table[name].shards] == [
            (cuts, tuple(sorted(ranks)), tuple(updaters)) for cuts, (ranks, updaters) in by_slice.items()
        ]
        assert table[name].owner == min(row[0] for _, row in copies(spec, plan, name))
        for rank in range(plan.world_size):
            held = [cuts for cuts, (ranks, _) in by_slice.items() if rank in ranks]
            assert [s.cuts for s in table[name].on_rank(rank)] == held
            updated = [cuts for cuts, (_, updaters) in by_slice.items() if rank in updaters]
            assert [s.cuts for s in table[name].shards if rank in s.updaters] == updated
            owned = [s.cuts for s in table[name].owned_by(rank)]
            assert owned == [cuts for cuts in updated if by_slice[cuts][1][0] == rank]
        mine = [group for group in groups if name in group.parameters]
        summed = [tuple(sorted(r)) for r in expected.values() if len(r) > 1] if parameter.trainable else []
        assert sorted(group.ranks for group in mine) == sorted(summed)
        assert all(group.parameters.count(name) == 1 for group in mine)
        assert all(set(group.stages) == set(table[name].stages) for group in mine)
        for group in mine:  # each of its slices is summed by the ranks that update it
            ends = {tuple(s.updaters) for s in table[name].shards if s.holders == group.ranks}
            assert ends == set(group.replica_groups or [(r,) for g in group.shard_groups for r in g] or [group.ranks])
    for group in groups:
        assert list(group.parameters) == [name for name in spec.parameters if name in group.parameters]
    assert len({(group.ranks, group.stages) for group in groups}) == len(groups)
    held = {key for name, p in spec.parameters.items() if p.trainable for key, _ in copies(spec, plan, name)}
    for module_name, module in plan.modules.items():
        for replica, stages in enumerate(module.replicas):
            found = trainable_stages(spec.modules[module_name], spec.tied, [stage.layers for stage in stages])
            assert found == [(module_name, replica, index) in held for index in range(len(stages))]


def test_parameters_that_live_alike_share_one_table_of_ranks():
    """Their number follows from the stages, not from the parameters: ranks are put together once for each."""
    plan = resolve_plan(SPEC, {"vision": ModulePlugin(dp_size=4), LANGUAGE_MODEL: ModulePlugin(dp_size=4, pp_size=2)})
    table = parameter_shards(SPEC, plan)
    assert len({id(shards) for shards in table.values()}) == 3 < len(table)
    assert len(sync_groups(SPEC, plan)) == 3


def part(array: np.ndarray, cuts: tuple[Cut, ...]) -> np.ndarray:
    """The elements that cuts leave, as their meaning is written down."""
    for cut in cuts:
        if cut.dim is None:
            array = np.array_split(array.ravel(), cut.num_slices)[cut.index]
        else:
            blocks = np.split(array, cut.num_blocks, cut.dim)
            array = np.concatenate([np.array_split(b, cut.num_slices, cut.dim)[cut.index] for b in blocks], cut.dim)
    return array


def counts(table: dict[str, ParameterShards], shapes: dict[str, tuple[int, ...]], num_ranks: int):
    """Parameter -> the set of how often the norm counts an element of it, over all ranks."""
    result = {}
    for name, shards in table.items():
        elements = np.arange(np.prod(shapes[name])).reshape(shapes[name])
        counted = [part(elements, s.cuts).ravel() for rank in range(num_ranks) for s in shards.owned_by(rank)]
        result[name] = set(np.bincount(np.concatenate(counted), minlength=elements.size).tolist())
    return result


def test_experts_over_ranks_are_shards_like_others():
    """Four ranks: two groups of ep size 2, the dense part on all of them; one expert matrix is cut by tp as well."""
    stages = ((LANGUAGE_MODEL, 0, 0),)
    dense = ParameterShards.from_copies(stages, [((), (rank,)) for rank in range(4)])
    experts = ParameterShards.from_copies(stages, [((Cut("ep", 0, rank % 2, 2),), (rank,)) for rank in range(4)])
    both = ParameterShards.from_copies(
        stages, [((Cut("ep", 0, r // 2, 2), Cut("tp", 1, r % 2, 2, 2)), (r,)) for r in range(4)]
    )
    table = {"norm": dense, "experts": experts, "gate_up": both}
    assert [(s.holders, s.owner) for s in experts.shards] == [((0, 2), 0), ((1, 3), 1)]
    assert [(s.holders, s.owner) for s in both.shards] == [((rank,), rank) for rank in range(4)]
    groups = {group.ranks: group.parameters for group in sync_groups_of(table, [LANGUAGE_MODEL])}
    assert groups == {(0, 1, 2, 3): ("norm",), (0, 2): ("experts",), (1, 3): ("experts",)}
    assert counts(table, {"norm": (3,), "experts": (4, 2, 3), "gate_up": (4, 8, 3)}, 4) == dict.fromkeys(table, {1})
    assert [len(experts.on_rank(rank)) for rank in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_each_expert_is_on_the_ranks_of_its_place_in_each_group(ep_size: int, zero_stage: int):
    """Of dp 2 x cp 2 x tp 2 on ranks 0 to 7, in which an expert has `8 / ep_size` copies."""
    spec = with_experts(ModelSpec({LANGUAGE_MODEL: SPEC.language_model}), 8)
    sizes = {"dp_size": 2, "cp_size": 2, "tp_size": 2, "ep_size": ep_size, "zero_stage": zero_stage}
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(**sizes)})
    table = parameter_shards(spec, plan)
    shapes = {name: spec.parameters[name].shape for name in table}
    assert counts(table, shapes, 8) == dict.fromkeys(table, {1})
    experts = [name for name in table if ".experts." in name]
    for name in experts:
        held = {shard.cuts[0]: shard.holders for shard in table[name].shards}
        expected = {Cut("ep", 0, i, ep_size): tuple(range(i, 8, ep_size)) for i in range(ep_size)}
        assert held == expected and table[name].axis == "ep"
    sums = {group.ranks for group in sync_groups(spec, plan) if set(group.parameters) & set(experts)}
    assert sums == {tuple(range(i, 8, ep_size)) for i in range(ep_size)} - {(i,) for i in range(8)}
    groups = find_representatives(plan, sync_groups(spec, plan))
    assert groups.plan.modules[LANGUAGE_MODEL].joint_replicas == plan.modules[LANGUAGE_MODEL].joint_replicas


def unlike(*parts: tuple[int, ...], **plugins) -> ParallelPlan:
    """A plan whose copies of the language model are tp groups of these ranks."""
    plan, replicas = resolve_plan(SPEC, plugins), tuple((Stage((0, 4), (ranks,)),) for ranks in parts)
    return dataclasses.replace(plan, modules={**plan.modules, LANGUAGE_MODEL: ModulePlan(replicas)})


def test_tp_groups_of_unlike_sizes_share_the_slices_between_all_of_their_borders():
    plan = unlike((2, 3), (4, 5, 6), (7,), vision=ModulePlugin(dp_size=2))
    shards = parameter_shards(SPEC, plan)[MLP].shards
    assert [(*shard.cuts, shard.holders, shard.owner) for shard in shards] == [
        (Cut("tp", 0, 0, 3), (2, 4, 7), 2),
        (Cut("tp", 0, 2, 6), (2, 5, 7), 2),
        (Cut("tp", 0, 3, 6), (3, 5, 7), 3),
        (Cut("tp", 0, 2, 3), (3, 6, 7), 3),
    ]
    assert [shard.cuts[0].bounds(24) for shard in shards] == [(0, 8), (8, 12), (12, 16), (16, 24)]
    assert [group.ranks for group in sync_groups(SPEC, plan)] == [(2, 4, 7), (2, 5, 7), (3, 5, 7), (3, 6, 7), (0, 1)]


def test_slices_between_the_borders_of_four_and_six_ranks():
    """Two slices of twelve lie side by side on the same ranks: they are one of six."""
    shards = parameter_shards(SPEC, unlike(tuple(range(1, 5)), tuple(range(5, 11))))[MLP].shards
    borders = [0, 2, 3, 4, 6, 8, 9, 10, 12]
    assert [shard.cuts[0].bounds(12) for shard in shards] == list(zip(borders, borders[1:], strict=False))
    assert shards[0].cuts == (Cut("tp", 0, 0, 6),) and shards[1].cuts == (Cut("tp", 0, 2, 12),)
