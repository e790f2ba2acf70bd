"""Who holds what, against the definition written out."""

import dataclasses

from hypothesis import given, settings

from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, holdings, resolve_plan, sync_groups
from hf_mmparallel.plan.ownership import trainable_stages
from tests.plan.specs import EMBEDDINGS, model_spec, specs_and_plans


def copies(spec, plan, name) -> list[tuple]:
    """(stage key, row of ranks) of every row of every stage that reads a parameter, stage by stage."""
    found = []
    for module_name, module in spec.modules.items():
        layers = [p.layer for p in module.parameters if p.name == name]
        layers += [layer for tied, (place, layer) in spec.tied.items() if tied == name and place == module_name]
        for replica, stages in enumerate(plan.modules[module_name].replicas):
            for index, stage in enumerate(stages):
                inside = [min(max(layer, 0), module.num_layers - 1) in range(*stage.layers) for layer in layers]
                if any(inside):
                    found += [((module_name, replica, index), row) for row in stage.ranks]
    return found


@settings(deadline=None)
@given(specs_and_plans())
def test_holdings_and_sync_groups_are_what_the_words_say(case):
    spec, plan = case
    table = holdings(spec, plan)
    groups = sync_groups(spec, plan)
    parameters = {p.name: p for module in spec.modules.values() for p in module.parameters}
    assert list(table) == list(parameters)
    for name, parameter in parameters.items():
        found = copies(spec, plan, name)
        assert set(table[name].stages) == {key for key, _ in found}
        assert len(table[name].stages) == len({key for key, _ in found})
        tp_size = len(found[0][1])
        expected = [tuple(sorted({row[t] for _, row in found})) for t in range(tp_size)]
        assert list(table[name].ranks) == expected
        assert table[name].owner == min(row[0] for _, row in found)
        for rank in range(plan.world_size):
            assert table[name].peers(rank) == next((ranks for ranks in expected if rank in ranks), None)
        mine = [group for group in groups if name in group.parameters]
        summed = [ranks for ranks in expected if len(ranks) > 1] if parameter.trainable else []
        assert sorted(group.ranks for group in mine) == sorted(summed)
        assert all(group.parameters.count(name) == 1 for group in mine)
        assert all(set(group.stages) == set(table[name].stages) for group in mine)
    for group in groups:
        assert set(group.parameters) <= set(parameters)
        assert list(group.parameters) == [name for name in parameters if name in group.parameters]
    assert len({(group.ranks, group.stages) for group in groups}) == len(groups)


@settings(deadline=None)
@given(specs_and_plans())
def test_a_stage_is_trainable_when_it_holds_a_trainable_parameter(case):
    spec, plan = case
    parameters = {p.name: p for module in spec.modules.values() for p in module.parameters}
    held = {key for name, p in parameters.items() if p.trainable for key, _ in copies(spec, plan, name)}
    for module_name, module in plan.modules.items():
        for replica, stages in enumerate(module.replicas):
            ranges = [stage.layers for stage in stages]
            found = trainable_stages(spec.modules[module_name], spec.tied, ranges)
            assert found == [(module_name, replica, index) in held for index in range(len(stages))]


def test_ranks_that_share_tokens_sum_the_gradients_of_equal_shards():
    spec = model_spec()
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=2, cp_size=2, tp_size=2)})
    groups = {group.ranks for group in sync_groups(spec, plan)}
    assert groups == {(1, 3, 5, 7), (2, 4, 6, 8)}


def test_tied_embeddings_are_summed_over_the_pipeline_and_the_copies():
    spec = model_spec(tied=True)
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=2, tp_size=2)})
    assert holdings(spec, plan)[EMBEDDINGS].ranks == ((1, 3, 5, 7), (2, 4, 6, 8))
    groups = {group.ranks: group for group in sync_groups(spec, plan)}
    assert groups[1, 3, 5, 7].parameters == (EMBEDDINGS,)
    assert set(groups[1, 3, 5, 7].stages) == {(LANGUAGE_MODEL, d, s) for d in range(2) for s in range(2)}
    assert "model.language_model.norm.weight" in groups[4, 8].parameters
    assert sorted(groups) == [(1, 3, 5, 7), (1, 5), (2, 4, 6, 8), (2, 6), (3, 7), (4, 8)]


def test_copies_with_different_stages_are_summed_layer_by_layer():
    spec = model_spec()
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2)})
    (first, second), module = plan.modules[LANGUAGE_MODEL].replicas[0], plan.modules[LANGUAGE_MODEL]
    whole = dataclasses.replace(first, layers=(0, 4), ranks=((3,),))
    module = dataclasses.replace(module, replicas=((first, second), (whole,)))
    plan = dataclasses.replace(plan, modules={**plan.modules, LANGUAGE_MODEL: module})
    groups = {group.ranks: group.parameters for group in sync_groups(spec, plan)}
    assert set(groups) == {(1, 3), (2, 3)}
    assert {name.split(".")[-3] for name in groups[2, 3] if "mlp" in name} == {"2", "3"}
    assert EMBEDDINGS in groups[1, 3] and EMBEDDINGS not in groups[2, 3]


def test_one_copy_needs_no_sum():
    spec = model_spec(tied=True)
    assert sync_groups(spec, resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(tp_size=2)})) == []


def test_parameters_that_live_alike_share_one_table_of_ranks():
    """Their number follows from the stages, not from the parameters: ranks are put together once for each."""
    spec = model_spec()
    plan = resolve_plan(spec, {"vision": ModulePlugin(dp_size=4), LANGUAGE_MODEL: ModulePlugin(dp_size=4, pp_size=2)})
    table = holdings(spec, plan)
    assert len({id(holding) for holding in table.values()}) == 3 < len(table)
    assert len(sync_groups(spec, plan)) == 3
