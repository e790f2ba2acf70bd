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
    ModelSpec,
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
from tests.plan.specs import model_spec, with_experts

SPEC = model_spec()
VISION = SPEC.modules["vision"]


def resolve(vision: dict | None = None, language: dict | None = None, spec=SPEC, **options) -> ParallelPlan:
    plugins = {"vision": ModulePlugin(**(vision or {})), LANGUAGE_MODEL: ModulePlugin(**(language or {}))}
    return resolve_plan(spec, plugins, **options)


def rows(plan: ParallelPlan, name: str) -> list[list[tuple]]:
    return [[(stage.layers, stage.mesh) for stage in stages] for stages in plan.modules[name].replicas]


def with_module(spec: ModelSpec, name: str, **changes: Any) -> ModelSpec:
    module = dataclasses.replace(spec.modules[name], **changes)
    return dataclasses.replace(spec, modules={**spec.modules, name: module})


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
    left_out = resolve_plan(SPEC, {"vision": ModulePlugin(dp_size=3)}, world_size=4)
    assert rows(left_out, LANGUAGE_MODEL) == [[((0, 4), ((3,),))]]


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


@given(
    st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(1, 3), st.booleans()
)
def test_every_layer_and_every_rank_occurs_once(layers, dp, pp, tp, vision_dp, checkpointing):
    pp = min(pp, layers)
    settings = {"dp_size": dp, "pp_size": pp, "tp_size": tp, "activation_checkpointing": checkpointing}
    plan = resolve(
        {"dp_size": vision_dp}, settings, model_spec(language_layers=layers), schedule="gpipe", num_microbatches=5
    )
    used = [rank for module in plan.modules.values() for _, _, s in module.stages() for rank in s.all_ranks]
    assert used == list(range(vision_dp + dp * pp * tp)) == list(range(plan.world_size))
    for stages in plan.modules[LANGUAGE_MODEL].replicas:
        assert [layer for stage in stages for layer in range(*stage.layers)] == list(range(layers))
        sizes = [stage.num_layers for stage in stages]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert plan.modules[LANGUAGE_MODEL].activation_checkpointing == checkpointing
    assert (plan.modules[LANGUAGE_MODEL].dp_size, plan.schedule, plan.num_microbatches) == (dp, "gpipe", 5)


def test_colocation_shares_ranks_stage_by_stage():
    host = {"dp_size": 2, "pp_size": 2}
    plan = resolve(host, {"colocate_with": "vision", "activation_checkpointing": True}, world_size=4)
    assert rows(plan, LANGUAGE_MODEL)[1] == [((0, 2), ((2,),)), ((2, 4), ((3,),))]
    assert [s.all_ranks for _, _, s in plan.modules["vision"].stages()] == [(0,), (1,), (2,), (3,)]
    assert plan.modules[LANGUAGE_MODEL].activation_checkpointing
    assert rows(resolve(host, {"colocate_with": "vision", **host}), LANGUAGE_MODEL) == rows(plan, LANGUAGE_MODEL)
    uneven = resolve(host, {"colocate_with": "vision", "layers_per_stage": [1, 3]})
    assert rows(uneven, LANGUAGE_MODEL)[0] == [((0, 1), ((0,),)), ((1, 4), ((1,),))]
    rounds = resolve(host, {"colocate_with": "vision", "vp_size": 2})
    assert rows(rounds, LANGUAGE_MODEL)[1] == [((i, i + 1), ((2 + i % 2,),)) for i in range(4)]
    with pytest.raises(ValueError, match="`vp_size=2` .* no effect"):
        resolve({"dp_size": 2}, {"colocate_with": "vision", "vp_size": 2})


def test_a_colocated_module_has_sizes_of_its_own():
    plan = resolve({"tp_size": 4}, {"colocate_with": "vision", "pp_size": 2, "cp_size": 2}, world_size=4)
    assert rows(plan, LANGUAGE_MODEL) == [[((0, 2), ((0,), (1,))), ((2, 4), ((2,), (3,)))]]
    # the host comes later in the model, and as many copies fill its ranks as there are
    plan = resolve({"colocate_with": LANGUAGE_MODEL, "tp_size": 2}, {"dp_size": 2, "pp_size": 2}, world_size=4)
    assert rows(plan, "vision") == [[((0, 6), ((0, 1),))], [((0, 6), ((2, 3),))]]
    assert rows(plan, LANGUAGE_MODEL)[1] == [((0, 2), ((2,),)), ((2, 4), ((3,),))]
    one_each = ModulePlugin.from_dict({"colocate_with": "vision", "pp_size": 1, "tp_size": 1, "cp_size": 1})
    plan = resolve_plan(SPEC, {"vision": ModulePlugin(tp_size=2), LANGUAGE_MODEL: one_each}, world_size=2)
    assert rows(plan, LANGUAGE_MODEL) == [[((0, 4), ((0,),))], [((0, 4), ((1,),))]]


def test_freezing_is_not_undone():
    module = VISION.with_frozen("projector").with_frozen("embeddings")
    assert [p.trainable for p in module.parameters] == [False, *[True] * 6, False]
    assert all(p.trainable for p in VISION.parameters)


def test_deepstack_features_enter_at_their_layers_and_leave_the_last_stage():
    spec = model_spec(deepstack=(0, 1, 2))
    plan = resolve({"dp_size": 2}, {"layers_per_stage": [1, 2, 1]}, spec)
    (edge,) = plan.edges
    assert edge.layers == (0, 0, 1, 2)
    assert plan.edge_stages(edge, 0) == {0: (0, 1), 1: (2, 3)}
    cut = resolve({"pp_size": 3}, {"layers_per_stage": [1, 2, 1]}, spec)
    check_plan(cut, spec)
    assert cut.edge_stages(cut.edges[0], 0) == plan.edge_stages(edge, 0)
    # the outputs of layers 0 to 2 pass to the last stage, where they are read; one of them may be the hidden state
    assert [spec.modules["vision"].states_before(layer) for layer in range(1, 6)] == [1, 2, 3, 4, 4]
    assert model_spec().modules["vision"].states_before(4) == 1


@pytest.mark.parametrize(
    ("vision", "language", "message"),
    [
        ({"pp_size": 8}, {}, "`pp_size=8` needs at least 8 layers; `vision` has 6. Use `pp_size<=6`"),
        ({"tp_size": 3}, {}, "`tp_size=3` .* 8 attention heads of `vision`. .* such as 2"),
        ({}, {"tp_size": 4}, "`tp_size=4` .* 2 key and value heads of `language_model`. .* such as 2"),
        ({"layers_per_stage": [2, 3]}, {}, r"`layers_per_stage=\[2, 3\]` adds up to 5; `vision` has 6"),
        ({"colocate_with": LANGUAGE_MODEL}, {"colocate_with": "vision"}, "`vision`, `language_model`: none has ranks"),
        ({}, {"colocate_with": "visoin"}, "`colocate_with` of `language_model` .*`visoin`. Did you mean `vision`"),
        (
            {"dp_size": 3},
            {"colocate_with": "vision", "tp_size": 2},
            "`tp_size=2` of `language_model` does not fill the 3",
        ),
        ({"dp_size": 2}, {"colocate_with": "vision", "pp_size": 4}, "product is 2, or leave them out .*(dp 2)"),
        ({"dp_size": 4, "zero_stage": 1, "shard_size": 3}, {}, "`shard_size=3` does not divide 4, .* one of 2, 4,"),
        ({}, {"zero_stage": 3, "shard_size": 2}, "`shard_size=2` does not divide 1, .* of `language_model`"),
        ({}, {"dp_size": 3, "cp_size": 4, "zero_stage": 2, "shard_size": 6}, "`shard_size=6` .* `cp_size=4`"),
        ({"freeze": "visual"}, {}, "`freeze='visual'` of module `vision` .* 8 parameters, .*embeddings.weight`"),
    ],
)
def test_what_does_not_fit_is_a_sentence(vision, language, message):
    with pytest.raises(ValueError, match=message):
        resolve(vision, language)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"zero_stage": 2}, "`zero_stage=2` of `vision` has no effect: there is one copy"),
        ({"dp_size": 2, "zero_stage": 1, "shard_size": 1}, "`zero_stage=1` of `vision` has no effect with `sh"),
        ({"dp_size": 2, "zero_stage": 3}, None),
        ({"dp_size": 2}, None),
    ],
)
def test_a_zero_stage_that_divides_nothing_is_told_of(settings, sentence):
    told = list(sharding_without_effect(resolve(settings, {"cp_size": 2, "zero_stage": 1}).modules))
    assert [text.startswith(sentence or "") for text in told] == [True] * (sentence is not None)


def test_feed_forward_columns_must_divide():
    with pytest.raises(ValueError, match="the 30 feed-forward columns of `vision`. .* such as 3"):
        resolve({"tp_size": 4}, spec=with_module(SPEC, "vision", intermediate_size=30))


@pytest.mark.parametrize(("name", "hint"), [("visions", "Did you mean `vision`?"), ("audio", "Known: `vision`,")])
def test_an_unknown_module_names_the_nearest(name, hint):
    with pytest.raises(ValueError, match=re.escape(f"no `{name}`. {hint}")):
        resolve_plan(SPEC, {name: ModulePlugin()})


def test_a_world_of_the_wrong_size_shows_the_sizes():
    sizes = r"6 ranks \(vision: dp 2 = 2; language_model: pp 2 x tp 2 = 4\), but 4 were"
    with pytest.raises(ValueError, match=sizes):
        resolve({"dp_size": 2}, {"pp_size": 2, "tp_size": 2}, world_size=4)
    with pytest.raises(ValueError, match="language_model: dp 2 x cp 2 x tp 2 = 8"):
        resolve({}, {"dp_size": 2, "cp_size": 2, "tp_size": 2}, world_size=8)
    with pytest.raises(ValueError, match="but 1 was launched. .*accelerate launch --cpu.*examples/accelerate_configs"):
        resolve(world_size=1)
    check_world_size(resolve({"dp_size": 2}), 3)


def change(plan: ParallelPlan, name: str, *replicas: tuple[Stage, ...], **settings: Any) -> ParallelPlan:
    return dataclasses.replace(plan, modules={**plan.modules, name: ModulePlan(replicas, **settings)})


def whole(*mesh: tuple[int, ...], layers: int = 6) -> tuple[Stage, ...]:
    """A replica of one stage on this grid of ranks."""
    return (Stage((0, layers), mesh),)


PLAN = resolve({"dp_size": 2}, {"pp_size": 2, "tp_size": 2})
UNLIKE = (whole((0,)), whole((1, 6)))  # of `vision`, on rank 0 and on the tp group of ranks 1 and 6
ROWS, TWO = resolve({"cp_size": 2}, {"cp_size": 2}), resolve({}, {"dp_size": 2})


def vision(*replicas: tuple[Stage, ...], stage: int = 0) -> ParallelPlan:
    return change(PLAN, "vision", *replicas, sharding=ShardingSettings(stage))


def language(*replicas: tuple[Stage, ...]) -> ParallelPlan:
    return change(PLAN, LANGUAGE_MODEL, *replicas)


def on(*mesh: tuple[int, ...]) -> tuple[Stage, ...]:
    """A replica of the language model on this grid of ranks."""
    return whole(*mesh, layers=4)


def in_context(*settings: Any, of: str = LANGUAGE_MODEL, **named: Any) -> ParallelPlan:
    module = dataclasses.replace(ROWS.modules[of], context=ContextSettings(*settings, **named))
    return dataclasses.replace(ROWS, modules={**ROWS.modules, of: module})


GAP = (Stage((0, 2), ((2,),)), Stage((3, 4), ((3,),)))
UNEVEN_ROWS = (Stage((0, 2), ((2, 3), (4, 5))), Stage((2, 4), ((6, 7),)))
ONLY_LANGUAGE = dataclasses.replace(PLAN, modules={LANGUAGE_MODEL: PLAN.modules[LANGUAGE_MODEL]})
OTHER_EDGE = dataclasses.replace(PLAN, edges=(Edge("vision", LANGUAGE_MODEL, (1,)),))
BAD_PLANS = [
    (language(GAP), r"`language_model` replica 0 have layers \[\(0, 2\), \(3, 4\)\], .* 0 to 4"),
    (vision(whole((0,)), whole((1,), layers=5)), "`vision` replica 1 have layers"),
    (vision(whole((0,))), "gives rank 1 nothing to do"),
    (vision(), "gives module `vision` no stages"),
    (change(PLAN, "visions", whole((0,))), "no `visions`. Did you mean `vision`"),
    (ONLY_LANGUAGE, "no ranks for module `vision`"),
    (vision(whole((0, 1, 6))), "`tp_size=3` does not divide the 8 attention heads"),
    (language(on((2,), (3, 4))), "`language_model` has tp groups of 1 and 2 ranks"),
    (vision(whole((0, 1)), whole((0,))), "rank 0 the tp ranks 0 and 0 in `vision`, of 2 and 1 ranks"),
    (vision(whole((0, 1)), whole((1, 0))), "rank 1 the tp ranks 1 and 0 in `vision`"),
    (vision(*UNLIKE, stage=1), "`zero_stage=1` of `vision` .* tp groups of 1 and 2"),
    (vision(whole((1,)), whole((0,)), stage=2), r"`zero_stage=2` of `vision`: the ranks \[1, 0\]"),
    (language(on((2,), (3,)), on((4, 5), (6, 7))), "`cp_size=2` of `language_model` .* tp groups of 1 and 2"),
    (language(UNEVEN_ROWS), "stages of `language_model` have 1 and 2 tp groups"),
    (language(on((2, 3), (3, 4))), "puts rank 3 twice"),
    (in_context("zigzag", of="vision"), "`cp_method='zigzag'.*` of `vision` .* whole or in"),
    (OTHER_EDGE, r"The plan's edges are \[.*\(1,\).*\], the model's \[.*'vision'.*\]"),
    (dataclasses.replace(PLAN, schedule="1f2b"), "no `1f2b`. Did you mean `1f1b`"),
    (in_context(method="zigzg"), "no `zigzg`. Did you mean `zigzag`"),
    (in_context(block=0), "`cp_block=0`"),
    (in_context("zigzag", "segments"), "`cp_mode='segments'` assigns whole samples"),
    (dataclasses.replace(TWO, replica_microbatches=(3, 1, 1)), r"=\[3, 1, 1\]` .* 3 numbers, but .* 2 replicas"),
    (dataclasses.replace(TWO, replica_microbatches=(3, 0)), r"`replica_microbatches=\[3, 0\]`"),
]


@pytest.mark.parametrize(("plan", "message"), BAD_PLANS)
def test_a_plan_from_a_file_is_checked(plan, message):
    with pytest.raises(ValueError, match=message):
        plan_for_model(MultimodalParallelPlugin.from_any(plan), SPEC, None)


def test_copies_may_have_different_numbers_of_ranks_and_stages():
    plan = change(PLAN, "vision", *UNLIKE)
    check_plan(plan, SPEC)
    vision = plan.modules["vision"]
    assert (vision.tp_sizes, vision.tp_size, vision.layout) == ((1, 2), 2, "dp 2 x tp 1/2")
    uneven = change(PLAN, LANGUAGE_MODEL, whole((2,), layers=4), (Stage((0, 1), ((3,),)), Stage((1, 4), ((4,),))))
    uneven = dataclasses.replace(uneven, replica_microbatches=(3, 1))
    assert plan_for_model(MultimodalParallelPlugin(plan=uneven), SPEC, 5) == uneven
    with pytest.raises(ValueError, match="The plan is for 5 ranks"):
        plan_for_model(MultimodalParallelPlugin(plan=uneven), SPEC, 4)


def test_sizes_that_do_not_cut_a_matrix_alike_are_refused():
    plan = change(PLAN, "vision", whole((0, 1)), whole((6, 7, 8, 9)))
    check_plan(plan, SPEC)
    uneven = dataclasses.replace(VISION.parameters[0], shape=(30, 2), tp_dim=0)
    spec = with_module(SPEC, "vision", parameters=(uneven, *VISION.parameters[1:]))
    with pytest.raises(ValueError, match=f"tp groups of 2 and 4 ranks, .* 30 rows or columns of `{uneven.name}`"):
        check_plan(plan, spec)


def test_a_plan_from_a_file_needs_no_edges_and_no_trainable_flags():
    frozen = dataclasses.replace(SPEC, modules={**SPEC.modules, "vision": VISION.with_frozen(True)})
    bare = dataclasses.replace(PLAN, edges=())
    plan = plan_for_model(MultimodalParallelPlugin.from_any(bare), frozen, None)
    assert plan.edges == PLAN.edges
    assert not any(stage.trainable for _, _, stage in plan.modules["vision"].stages())
    assert all(stage.trainable for _, _, stage in plan.modules[LANGUAGE_MODEL].stages())


def test_microbatches_of_the_plugin_win():
    plugin = MultimodalParallelPlugin({"vision": {"dp_size": 2}}, "gpipe")
    plan = plan_for_model(plugin, SPEC, 3, num_microbatches=4)
    assert (plan.num_microbatches, plan.schedule, plan.modules["vision"].dp_size) == (4, "gpipe", 2)
    plugin.num_microbatches = 7
    assert plan_for_model(plugin, SPEC, 3, num_microbatches=4).num_microbatches == 7


def test_what_crosses_an_edge_is_features_or_hidden_states():
    made = dataclasses.replace(VISION, name="image", features=(), hidden_size=24, parameters=())
    spec = dataclasses.replace(SPEC, modules={**SPEC.modules, "image": made})
    assert spec.generators == ("image",) and spec.edge_features(LANGUAGE_MODEL, "image") is None
    assert spec.edge_width(LANGUAGE_MODEL, "image") == SPEC.language_model.hidden_size
    assert spec.edge_features("vision", LANGUAGE_MODEL) == VISION.features
    assert spec.edge_features("vision", "vision") is None
    spec = with_module(spec, LANGUAGE_MODEL, features=(FeatureSpec("image"),))
    assert LANGUAGE_MODEL not in spec.encoders and spec.generators == ("image",)
    assert spec.edge_features(LANGUAGE_MODEL, "image") == spec.language_model.features
    assert spec.edge_width(LANGUAGE_MODEL, "image") == SPEC.language_model.hidden_size  # rows, which it projects
    assert (spec.modalities("image"), spec.modalities(LANGUAGE_MODEL)) == (("image",), ())


EXPERTS = with_experts(SPEC, 12)


@pytest.mark.parametrize(
    ("language", "num_experts", "message"),
    [
        ({"dp_size": 2, "ep_size": 2}, 0, "`ep_size=2` of `language_model`: none of its layers has experts"),
        ({"dp_size": 5, "ep_size": 5}, 12, "can't share 12 experts .* Leave `ep_size` out"),
        ({"dp_size": 4, "ep_size": 3}, 12, "`ep_size=3` .*`dp_size=4` x .* Use one of 2, 4\\."),
        ({"dp_size": 2, "tp_size": 2, "ep_size": 3}, 12, "Use one of 2, 4\\."),
        ({"dp_size": 3, "cp_size": 2, "ep_size": 3}, 12, "Use one of 2, 6\\."),
    ],
)
def test_ranks_that_cannot_share_experts_are_told(language: dict, num_experts: int, message: str):
    spec = EXPERTS if num_experts else SPEC
    with pytest.raises(ValueError, match=message):
        resolve({}, language, spec)
    alone = resolve({}, {key: size for key, size in language.items() if key != "ep_size"}, spec)
    modules = {**alone.modules}
    modules[LANGUAGE_MODEL] = dataclasses.replace(modules[LANGUAGE_MODEL], ep_size=language["ep_size"])
    with pytest.raises(ValueError, match=message):  # also in a finished plan
        check_plan(dataclasses.replace(alone, modules=modules), spec)


def test_a_plan_keeps_the_ranks_that_share_experts(tmp_path):
    plan = resolve({}, {"dp_size": 2, "cp_size": 2, "pp_size": 2, "ep_size": 4, "cp_block": 8}, EXPERTS)
    plan.save(tmp_path / "plan.yaml")
    assert ParallelPlan.load(tmp_path / "plan.yaml") == plan
    module = plan.modules[LANGUAGE_MODEL]
    assert module.layout == "dp 2 x pp 2 x cp 2, ep 4" and module.expert_groups(1) == [((3,), (4,), (7,), (8,))]
    assert module.joint_replicas == 2
    assert resolve({}, {"dp_size": 2, "cp_size": 2, "ep_size": 2}, EXPERTS).modules[LANGUAGE_MODEL].joint_replicas == 1
