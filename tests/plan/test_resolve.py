"""From sizes to stages and ranks, and every sentence for what does not fit."""

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ContextSettings,
    Edge,
    FeatureSpec,
    ModulePlan,
    ModulePlugin,
    MultimodalParallelPlugin,
    ParallelPlan,
    Stage,
    check_plan,
    check_world_size,
    plan_for_model,
    resolve_plan,
)
from hf_mmparallel.plan.parallel_plan import ShardingSettings
from hf_mmparallel.plan.resolve import sharding_without_effect
from tests.plan.specs import model_spec

SPEC = model_spec()


def resolve(vision: dict | None = None, language: dict | None = None, spec=SPEC, **options) -> ParallelPlan:
    plugins = {"vision": ModulePlugin(**(vision or {})), LANGUAGE_MODEL: ModulePlugin(**(language or {}))}
    return resolve_plan(spec, plugins, **options)


def rows(plan: ParallelPlan, name: str) -> list[list[tuple]]:
    return [[(stage.layers, stage.mesh) for stage in stages] for stages in plan.modules[name].replicas]


def flags(plan: ParallelPlan, name: str) -> list[bool]:
    return [stage.trainable for stage in plan.modules[name].replicas[0]]


def test_ranks_go_by_module_then_replica_then_stage_then_tensor():
    plan = resolve({"dp_size": 2}, {"dp_size": 2, "pp_size": 2, "tp_size": 2}, world_size=10)
    assert rows(plan, "vision") == [[((0, 6), ((0,),))], [((0, 6), ((1,),))]]
    assert rows(plan, LANGUAGE_MODEL) == [
        [((0, 2), ((2, 3),)), ((2, 4), ((4, 5),))],
        [((0, 2), ((6, 7),)), ((2, 4), ((8, 9),))],
    ]
    assert plan.world_size == 10
    assert plan.stages_of_rank(7) == [(LANGUAGE_MODEL, 1, 0)]
    assert plan.edges == (Edge("vision", LANGUAGE_MODEL, (0,)),)


@pytest.mark.parametrize("members", [(), (("vision", 1),), (("vision", 0), (LANGUAGE_MODEL, 1))])
def test_a_part_of_a_plan_has_the_stages_of_its_replicas_only(members: tuple[tuple[str, int], ...]):
    plan = resolve({"dp_size": 2}, {"dp_size": 2, "pp_size": 2})
    part = plan.part(members)
    for name, module in plan.modules.items():
        for replica, stages in enumerate(module.replicas):
            assert part.modules[name].replicas[replica] == (stages if (name, replica) in members else ())


def test_a_stage_has_a_row_of_ranks_for_each_part_of_the_tokens():
    plan = resolve({}, {"dp_size": 2, "cp_size": 2, "tp_size": 2, "cp_method": "zigzag"}, world_size=9)
    assert rows(plan, LANGUAGE_MODEL) == [[((0, 4), ((1, 2), (3, 4)))], [((0, 4), ((5, 6), (7, 8)))]]
    stage = plan.stage(LANGUAGE_MODEL, 0, 0)
    assert stage.cp_groups == ((1, 3), (2, 4))
    assert [stage.cp_rank_of(rank) for rank in stage.all_ranks] == [0, 0, 1, 1]
    module = plan.modules[LANGUAGE_MODEL]
    assert (module.cp_size, module.tp_size, module.context.method) == (2, 2, "zigzag")
    with pytest.raises(ValueError, match="language_model: dp 2 x pp 1 x cp 2 x tp 2 = 8"):
        resolve({}, {"dp_size": 2, "cp_size": 2, "tp_size": 2}, world_size=8)


def test_a_module_left_out_gets_one_rank():
    plan = resolve_plan(SPEC, {"vision": ModulePlugin(dp_size=3)}, world_size=4)
    assert rows(plan, LANGUAGE_MODEL) == [[((0, 4), ((3,),))]]


@given(
    st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(1, 3), st.booleans()
)
def test_every_layer_and_every_rank_occurs_once(layers, dp, pp, tp, vision_dp, checkpointing):
    pp = min(pp, layers)
    settings = {"dp_size": dp, "pp_size": pp, "tp_size": tp, "activation_checkpointing": checkpointing}
    plan = resolve({"dp_size": vision_dp}, settings, model_spec(language_layers=layers))
    used = [rank for module in plan.modules.values() for _, _, s in module.stages() for rank in s.all_ranks]
    assert used == list(range(vision_dp + dp * pp * tp)) == list(range(plan.world_size))
    for stages in plan.modules[LANGUAGE_MODEL].replicas:
        assert [layer for stage in stages for layer in range(*stage.layers)] == list(range(layers))
        sizes = [stage.num_layers for stage in stages]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert plan.modules[LANGUAGE_MODEL].activation_checkpointing == checkpointing
    assert plan.modules[LANGUAGE_MODEL].dp_size == dp


def test_uneven_stages_need_no_size():
    plan = resolve({"layers_per_stage": [1, 4, 1]})
    assert [stage.layers for stage in plan.modules["vision"].replicas[0]] == [(0, 1), (1, 5), (5, 6)]
    assert plan.world_size == 4


def test_schedule_and_microbatches_are_kept():
    plan = resolve(schedule="gpipe", num_microbatches=5)
    assert (plan.schedule, plan.num_microbatches) == ("gpipe", 5)


def test_colocation_shares_ranks_stage_by_stage():
    host = {"dp_size": 2, "pp_size": 2}
    plan = resolve(host, {"colocate_with": "vision", "activation_checkpointing": True}, world_size=4)
    assert rows(plan, LANGUAGE_MODEL)[1] == [((0, 2), ((2,),)), ((2, 4), ((3,),))]
    assert [s.all_ranks for _, _, s in plan.modules["vision"].stages()] == [(0,), (1,), (2,), (3,)]
    assert plan.modules[LANGUAGE_MODEL].activation_checkpointing
    assert rows(resolve(host, {"colocate_with": "vision", **host}), LANGUAGE_MODEL) == rows(plan, LANGUAGE_MODEL)
    uneven = resolve(host, {"colocate_with": "vision", "layers_per_stage": [1, 3]})
    assert rows(uneven, LANGUAGE_MODEL)[0] == [((0, 1), ((0,),)), ((1, 4), ((1,),))]


FROZEN = [
    (False, [True, True, True]),
    (True, [False, False, False]),
    ("tower", [False, False, True]),
    (r"layers\.[23]\.", [True, False, True]),
    (["embeddings", r"layers\.[01]\.", "projector"], [False, True, True]),
    (["layers", "projector"], [True, False, False]),
]


@pytest.mark.parametrize(("freeze", "expected"), FROZEN)
def test_a_stage_is_trainable_if_one_of_its_parameters_is(freeze, expected):
    plan = resolve({"pp_size": 3, "freeze": freeze})
    assert flags(plan, "vision") == expected
    assert flags(plan, LANGUAGE_MODEL) == [True]


def test_freezing_is_not_undone():
    module = SPEC.modules["vision"].with_frozen("projector").with_frozen("embeddings")
    assert [p.trainable for p in module.parameters] == [False, *[True] * 6, False]
    assert [p.trainable for p in SPEC.modules["vision"].parameters] == [True] * 8


@pytest.mark.parametrize(("tied", "expected"), [(False, [True, False, False]), (True, [True, False, True])])
def test_tied_embeddings_train_the_last_stage_too(tied, expected):
    settings = {"layers_per_stage": [1, 2, 1], "freeze": ["layers", "norm"]}
    assert flags(resolve(language=settings, spec=model_spec(tied=tied)), LANGUAGE_MODEL) == expected


def test_deepstack_features_enter_at_their_layers():
    spec = model_spec(deepstack=(0, 1, 2))
    plan = resolve({"dp_size": 2}, {"layers_per_stage": [1, 2, 1]}, spec)
    (edge,) = plan.edges
    assert edge.layers == (0, 0, 1, 2)
    assert plan.edge_stages(edge, 0) == {0: (0, 1), 1: (2, 3)}


@pytest.mark.parametrize(
    ("vision", "language", "message"),
    [
        ({"pp_size": 8}, {}, "`pp_size=8` needs at least 8 layers; `vision` has 6. Use `pp_size<=6`."),
        ({"tp_size": 3}, {}, "`tp_size=3` does not divide the 8 attention heads of `vision`. .* such as 2."),
        (
            {},
            {"tp_size": 4},
            "`tp_size=4` does not divide the 2 key and value heads of `language_model`. .* such as 2.",
        ),
        (
            {"layers_per_stage": [2, 3]},
            {},
            r"`layers_per_stage=\[2, 3\]` adds up to 5; `vision` has 6 layers. Make it add up to 6.",
        ),
        (
            {"colocate_with": LANGUAGE_MODEL},
            {},
            "`vision` can't be colocated with `language_model`, .* earlier modules: none.",
        ),
        ({}, {"colocate_with": "visoin"}, "can't be colocated with `visoin`, .* earlier modules: `vision`."),
        (
            {"dp_size": 2},
            {"colocate_with": "vision", "tp_size": 2},
            r"shares the ranks of `vision` \(dp, pp, tp, cp = \(2, 1, 1, 1\)\) and can't have \(1, 1, 2, 1\). Leave",
        ),
        (
            {"dp_size": 4, "zero_stage": 1, "shard_size": 3},
            {},
            r"`shard_size=3` does not divide 4, the number of copies of each parameter of `vision` \(`dp_size=4` x "
            r"`cp_size=1`\). Use one of 2, 4, or leave it out for all copies.",
        ),
        (
            {},
            {"zero_stage": 3, "shard_size": 2},
            "`shard_size=2` does not divide 1, the number .* of `language_model` .* Leave it out, or use more copies.",
        ),
        (
            {},
            {"dp_size": 3, "cp_size": 4, "zero_stage": 2, "shard_size": 6},
            "`shard_size=6` of `language_model`: with `zero_stage=2` it must divide `cp_size=4` or be a multiple .* "
            "Use another, or `zero_stage=1`.",
        ),
        (
            {"freeze": "visual"},
            {},
            "`freeze='visual'` of module `vision` matches none of its 8 parameters, the first of which is "
            "`model.vision_tower.embeddings.weight`. Use",
        ),
    ],
)
def test_what_does_not_fit_is_a_sentence(vision, language, message):
    with pytest.raises(ValueError, match=message):
        resolve(vision, language)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"zero_stage": 2}, "`zero_stage=2` of `vision` has no effect: there is one copy of each of its"),
        ({"dp_size": 2, "zero_stage": 1, "shard_size": 1}, "`zero_stage=1` of `vision` has no effect with `sh"),
        ({"dp_size": 2, "zero_stage": 3}, None),
        ({"dp_size": 2}, None),
    ],
)
def test_a_zero_stage_that_divides_nothing_is_told_of(settings, sentence):
    told = list(sharding_without_effect(resolve(settings, {"cp_size": 2, "zero_stage": 1}).modules))
    assert [text.startswith(sentence or "") for text in told] == [True] * (sentence is not None)


def test_feed_forward_columns_must_divide():
    module = dataclasses.replace(SPEC.modules["vision"], intermediate_size=30)
    spec = dataclasses.replace(SPEC, modules={**SPEC.modules, "vision": module})
    with pytest.raises(ValueError, match="does not divide the 30 feed-forward columns of `vision`. .* such as 3."):
        resolve({"tp_size": 4}, spec=spec)


def test_a_stack_that_features_leave_from_inside_is_not_cut():
    spec = model_spec(deepstack=(0, 1))
    with pytest.raises(ValueError, match=r"`pp_size=2`: .* \(DeepStack\).* Use `pp_size=1`, with `dp_size`"):
        resolve({"pp_size": 2}, spec=spec)
    cut = dataclasses.replace(resolve({"pp_size": 2}), edges=resolve(spec=spec).edges)
    with pytest.raises(ValueError, match="DeepStack"):
        check_plan(cut, spec)


def test_microbatches_for_other_replicas_than_there_are_are_refused():
    plan = resolve({}, {"dp_size": 2})
    check_plan(dataclasses.replace(plan, replica_microbatches=(3, 1)), SPEC)
    with pytest.raises(
        ValueError, match=r"`replica_microbatches=\[3, 1, 1\]` .* are 3 numbers, but .* has 2 replicas"
    ):
        check_plan(dataclasses.replace(plan, replica_microbatches=(3, 1, 1)), SPEC)
    with pytest.raises(ValueError, match=r"`replica_microbatches=\[3, 0\]` .* needs at least one microbatch"):
        check_plan(dataclasses.replace(plan, replica_microbatches=(3, 0)), SPEC)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ContextSettings(method="zigzg"), "`cp_method` has no `zigzg`. Did you mean `zigzag`"),
        (ContextSettings(block=0), "`cp_block=0` must be a whole number"),
        (ContextSettings("zigzag", "segments"), "`cp_mode='segments'` assigns whole samples"),
    ],
)
def test_a_finished_plan_that_cuts_rows_in_no_known_way_is_refused(settings, message):
    plan = resolve({}, {"cp_size": 2})
    check_plan(plan, SPEC)
    module = dataclasses.replace(plan.modules[LANGUAGE_MODEL], context=settings)
    with pytest.raises(ValueError, match=message):
        check_plan(dataclasses.replace(plan, modules={**plan.modules, LANGUAGE_MODEL: module}), SPEC)


@pytest.mark.parametrize(
    ("name", "hint"), [("visions", "Did you mean `vision`?"), ("audio", "Known: `vision`, `language_model`.")]
)
def test_an_unknown_module_names_the_nearest(name, hint):
    with pytest.raises(ValueError, match=re.escape(f"The model has no `{name}`. {hint}")):
        resolve_plan(SPEC, {name: ModulePlugin()})


def test_a_world_of_the_wrong_size_shows_the_sizes():
    with pytest.raises(ValueError) as error:
        resolve({"dp_size": 2}, {"pp_size": 2, "tp_size": 2}, world_size=4)
    assert str(error.value) == (
        "The plan is for 6 ranks (vision: dp 2 x pp 1 x tp 1 = 2; language_model: dp 1 x pp 2 x tp 2 = 4), but 4 were "
        "launched. Launch 6 processes or change the sizes."
    )
    check_world_size(resolve({"dp_size": 2}), 3)


def test_a_world_of_one_names_the_launcher():
    with pytest.raises(ValueError, match="but 1 was launched. .*accelerate launch --cpu.*examples/accelerate_configs"):
        resolve(world_size=1)


def change(plan: ParallelPlan, name: str, *replicas: tuple[Stage, ...]) -> ParallelPlan:
    return dataclasses.replace(plan, modules={**plan.modules, name: ModulePlan(replicas)})


def unlike(plan: ParallelPlan, **settings: Any) -> ParallelPlan:
    """The plan with a copy of `vision` on rank 0, and one on the tp group of ranks 1 and 6."""
    replicas = ((Stage((0, 6), ((0,),)),), (Stage((0, 6), ((1, 6),)),))
    return dataclasses.replace(plan, modules={**plan.modules, "vision": ModulePlan(replicas, **settings)})


PLAN = resolve({"dp_size": 2}, {"pp_size": 2, "tp_size": 2})
BAD_PLANS = [
    (
        change(PLAN, LANGUAGE_MODEL, (Stage((0, 2), ((2,),)), Stage((3, 4), ((3,),)))),
        r"`language_model` replica 0 have layers \[\(0, 2\), \(3, 4\)\], which do not cover 0 to 4",
    ),
    (change(PLAN, "vision", (Stage((0, 6), ((0,),)),), (Stage((0, 5), ((1,),)),)), "`vision` replica 1 have layers"),
    (change(PLAN, "vision", (Stage((0, 6), ((0,),)),)), "gives rank 1 nothing to do. Number its ranks from 0"),
    (change(PLAN, "visions", (Stage((0, 6), ((0,),)),)), "The model has no `visions`. Did you mean `vision`?"),
    (
        dataclasses.replace(PLAN, modules={LANGUAGE_MODEL: PLAN.modules[LANGUAGE_MODEL]}),
        "The plan has no ranks for module `vision` of the model. Add it under `modules`.",
    ),
    (change(PLAN, "vision", (Stage((0, 6), ((0, 1, 6),)),)), "`tp_size=3` does not divide the 8 attention heads"),
    (
        change(PLAN, LANGUAGE_MODEL, (Stage((0, 4), ((2,), (3, 4))),)),
        "A stage of `language_model` has tp groups of 1 and 2 ranks. Give all tp groups of a stage the same size",
    ),
    (
        change(PLAN, "vision", (Stage((0, 6), ((0, 1),)),), (Stage((0, 6), ((0,),)),)),
        "rank 0 the tp ranks 0 and 0 in `vision`, of 2 and 1 ranks, so that it would need two different shards",
    ),
    (
        unlike(PLAN, sharding=ShardingSettings(1)),
        "`zero_stage=1` of `vision` divides equal shards among copies, and .* tp groups of 1 and 2 ranks",
    ),
    (
        change(PLAN, LANGUAGE_MODEL, (Stage((0, 4), ((2,), (3,))),), (Stage((0, 4), ((4, 5), (6, 7))),)),
        "`cp_size=2` of `language_model` assigns tokens .* tp groups of 1 and 2 ranks, .* Use `cp_size=1`",
    ),
    (
        change(PLAN, "vision", (Stage((0, 6), ((0, 1),)),), (Stage((0, 6), ((1, 0),)),)),
        "rank 1 the tp ranks 1 and 0 in `vision`",
    ),
    (
        change(PLAN, LANGUAGE_MODEL, (Stage((0, 2), ((2, 3), (4, 5))), Stage((2, 4), ((6, 7),)))),
        r"The stages of `language_model` have 1 and 2 tp groups. .* the same `cp_size`",
    ),
    (
        change(PLAN, LANGUAGE_MODEL, (Stage((0, 4), ((2, 3), (3, 4))),)),
        "puts rank 3 twice into a stage of `language_model`",
    ),
    (
        change(PLAN, "vision", (Stage((0, 6), ((0,), (1,))),)),
        "`cp_size=2` of `vision`: context parallelism is only supported for the language model. Use `cp_size=1`",
    ),
    (change(PLAN, "vision"), "The plan gives module `vision` no stages"),
    (
        dataclasses.replace(PLAN, edges=(Edge("vision", LANGUAGE_MODEL, (1,)),)),
        r"The plan's edges are \[.*\(1,\).*\], the model's \[.*'vision'.*\]. Copy the model's",
    ),
    (
        dataclasses.replace(
            PLAN,
            modules={
                **PLAN.modules,
                "vision": ModulePlan(
                    ((Stage((0, 6), ((1,),)),), (Stage((0, 6), ((0,),)),)), sharding=ShardingSettings(2)
                ),
            },
        ),
        r"`zero_stage=2` of `vision`: the ranks \[1, 0\] of its replicas, .*, are not in ascending order. Sort them",
    ),
    (dataclasses.replace(PLAN, schedule="1f2b"), "`schedule` has no `1f2b`. Did you mean `1f1b`?"),
]


@pytest.mark.parametrize(("plan", "message"), BAD_PLANS)
def test_a_plan_from_a_file_is_checked(plan, message):
    with pytest.raises(ValueError, match=message):
        plan_for_model(MultimodalParallelPlugin.from_any(plan), SPEC, None)


def test_copies_may_have_different_numbers_of_ranks():
    plan = unlike(PLAN)
    check_plan(plan, SPEC)
    assert plan.modules["vision"].tp_sizes == (1, 2) and plan.modules["vision"].tp_size == 2
    assert plan.modules["vision"].layout == "dp 2 x pp 1 x tp 1/2"
    with pytest.raises(ValueError, match=r"vision: dp 2 x pp 1 x tp 1/2 = 3; .* = 4\), but 4 were launched"):
        check_world_size(plan, 4)


def test_sizes_that_do_not_cut_a_matrix_alike_are_refused():
    replicas = tuple((Stage((0, 6), (ranks,)),) for ranks in ((0, 1), (6, 7, 8, 9)))
    plan = change(PLAN, "vision", *replicas)
    check_plan(plan, SPEC)
    vision = SPEC.modules["vision"]
    uneven = dataclasses.replace(vision.parameters[0], shape=(30, 2), tp_dim=0)
    spec = dataclasses.replace(vision, parameters=(uneven, *vision.parameters[1:]))
    with pytest.raises(ValueError, match=f"tp groups of 2 and 4 ranks, .* the 30 rows or columns of `{uneven.name}`"):
        check_plan(plan, dataclasses.replace(SPEC, modules={**SPEC.modules, "vision": spec}))


def test_a_plan_from_a_file_needs_no_edges_and_no_trainable_flags():
    frozen = dataclasses.replace(SPEC, modules={**SPEC.modules, "vision": SPEC.modules["vision"].with_frozen(True)})
    bare = dataclasses.replace(PLAN, edges=())
    plan = plan_for_model(MultimodalParallelPlugin.from_any(bare), frozen, None)
    assert plan.edges == PLAN.edges
    assert not any(stage.trainable for _, _, stage in plan.modules["vision"].stages())
    assert all(stage.trainable for _, _, stage in plan.modules[LANGUAGE_MODEL].stages())


def test_replicas_of_a_plan_may_have_different_stages():
    uneven = change(PLAN, LANGUAGE_MODEL, (Stage((0, 4), ((2,),)),), (Stage((0, 1), ((3,),)), Stage((1, 4), ((4,),))))
    assert plan_for_model(MultimodalParallelPlugin(plan=uneven), SPEC, 5) == uneven
    with pytest.raises(ValueError, match="The plan is for 5 ranks"):
        plan_for_model(MultimodalParallelPlugin(plan=uneven), SPEC, 4)


def test_microbatches_of_the_plugin_win():
    plugin = MultimodalParallelPlugin({"vision": {"dp_size": 2}}, "gpipe")
    plan = plan_for_model(plugin, SPEC, 3, num_microbatches=4)
    assert (plan.num_microbatches, plan.schedule, plan.modules["vision"].dp_size) == (4, "gpipe", 2)
    plugin.num_microbatches = 7
    assert plan_for_model(plugin, SPEC, 3, num_microbatches=4).num_microbatches == 7


def test_what_crosses_an_edge_is_features_or_hidden_states():
    language, made = SPEC.language_model, dataclasses.replace(SPEC.modules["vision"], name="image", features=())
    made = dataclasses.replace(made, hidden_size=24, parameters=())
    spec = dataclasses.replace(SPEC, modules={**SPEC.modules, "image": made})
    assert spec.generators == ("image",) and spec.edge_features(LANGUAGE_MODEL, "image") is None
    assert spec.edge_width(LANGUAGE_MODEL, "image") == language.hidden_size
    assert spec.edge_features("vision", LANGUAGE_MODEL) == spec.modules["vision"].features
    assert spec.edge_features("vision", "vision") is None
    read = dataclasses.replace(language, features=(FeatureSpec("image"),))
    spec = dataclasses.replace(spec, modules={**spec.modules, LANGUAGE_MODEL: read})
    assert LANGUAGE_MODEL not in spec.encoders and spec.generators == ("image",)
    assert spec.edge_features(LANGUAGE_MODEL, "image") == read.features
    assert spec.edge_width(LANGUAGE_MODEL, "image") == 24
