"""What crosses an edge between two stages: its ends, its width, its features and its dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_mmparallel.modeling.stages import ModuleStage
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    Edge,
    FeatureSpec,
    ModelSpec,
    ModulePlan,
    ModuleSpec,
    ParallelPlan,
    ParameterSpec,
    Stage,
    resolve_plan,
)
from hf_mmparallel.runtime.payloads import Payloads, wire_dtype
from hf_mmparallel.schedule.actions import Message, Task
from tests import tiny
from tests.plan.specs import model_spec


def with_dtypes(spec: ModelSpec, matrices: str, vectors: str) -> ModelSpec:
    """The model with matrices and vectors of other dtypes in its language model."""
    module = spec.modules[LANGUAGE_MODEL]
    parameters = tuple(replace(p, dtype=matrices if len(p.shape) > 1 else vectors) for p in module.parameters)
    return replace(spec, modules={LANGUAGE_MODEL: replace(module, parameters=parameters)})


def with_norms(spec: ModelSpec) -> ModelSpec:
    """The model with a norm in the first layer of its language model."""
    module = spec.modules[LANGUAGE_MODEL]
    norm = ParameterSpec("model.language_model.layers.0.norm.weight", (16,), 0)
    return replace(spec, modules={LANGUAGE_MODEL: replace(module, parameters=(*module.parameters, norm))})


@pytest.mark.parametrize(
    ("matrices", "vectors", "expected"),
    [
        ("bfloat16", "float32", torch.float32),
        ("float16", "float16", torch.float16),
        ("float16", "bfloat16", torch.float32),
        ("bfloat16", "bfloat16", torch.bfloat16),
        ("float8_e4m3fn", "bfloat16", torch.bfloat16),
        ("float8_e5m2", "float32", torch.float32),
        ("float8_e4m3fn", "float8_e8m0fnu", torch.bfloat16),
        ("int8", "bfloat16", torch.bfloat16),
    ],
)
def test_hidden_states_travel_in_the_widest_dtype_that_layers_compute_in(matrices, vectors, expected):
    spec = with_dtypes(with_norms(model_spec()), matrices, vectors)
    assert wire_dtype(spec, LANGUAGE_MODEL, LANGUAGE_MODEL) == expected


def test_what_comes_after_the_last_layer_does_not_widen_hidden_states():
    spec = with_dtypes(model_spec(), "bfloat16", "float32")
    assert wire_dtype(spec, LANGUAGE_MODEL, LANGUAGE_MODEL) == torch.bfloat16


def graph_spec(**dtypes: str) -> ModelSpec:
    """Two encoders, of which one also feeds the other, a language model and a generator, each with its own dtype."""
    features = {
        "audio": (FeatureSpec("audio"),),
        "vision": (FeatureSpec("image"), FeatureSpec("image", "deepstack_features", 2, 0), FeatureSpec("video")),
        LANGUAGE_MODEL: (FeatureSpec("speech"),),
    }
    modules = {}
    for width, name in enumerate(("audio", "vision", LANGUAGE_MODEL, "speech"), 8):
        weights = tuple(ParameterSpec(f"{name}.{i}", (1, 1), i, dtypes.get(name, "bfloat16")) for i in range(4))
        modules[name] = ModuleSpec(name, name, 4, width, 1, 1, 1, weights, features.get(name, ()))
    return ModelSpec(modules)


def graph_plan() -> ParallelPlan:
    """Each module on two stages, each with two cp ranks of two tp ranks, but for the vision tower with one of one."""
    modules, first = {}, 0
    for name in ("audio", "vision", LANGUAGE_MODEL, "speech"):
        stages = []
        for layers in ((0, 2), (2, 4)):
            mesh = ((first,),) if name == "vision" else ((first, first + 1), (first + 2, first + 3))
            first += len(mesh) * len(mesh[0])
            stages.append(Stage(layers, mesh, trainable=name != "audio"))
        modules[name] = ModulePlan((tuple(stages),))
    edges = (
        Edge("audio", "vision", (2,)),
        Edge("audio", LANGUAGE_MODEL, (0,)),
        Edge("vision", LANGUAGE_MODEL, (0, 2, 0)),
        Edge(LANGUAGE_MODEL, "speech", (0,)),
    )
    return ParallelPlan(modules, edges)


def act(source: str, source_stage: int, target: str, target_stage: int) -> Message:
    return Message("act", Task("fwd", source, 0, source_stage, 0), Task("fwd", target, 0, target_stage, 0))


def test_a_payload_has_its_ends_its_width_and_the_features_that_enter():
    payloads = Payloads(graph_plan(), graph_spec())
    first, later = (payloads.of(act("vision", 1, LANGUAGE_MODEL, stage)) for stage in (0, 1))
    assert (first.producer, first.consumer) == (("vision", 0, 1), (LANGUAGE_MODEL, 0, 0))
    assert (first.producer_mesh, first.consumer_mesh) == (((9,),), ((10, 11), (12, 13)))
    assert first.outputs == (0, 2) and [feature.modality for feature in first.features or ()] == ["image", "video"]
    assert later.outputs == (1,) and [feature.layer for feature in later.features or ()] == [2]
    assert first.select_outputs("abc") == ["a", "c"] and first.among_outputs(["a", "c"]) == ["a", None, "c"]
    assert first.width == later.width == 10


def test_edges_between_encoders_and_behind_the_language_model_are_payloads_like_others():
    payloads = Payloads(graph_plan(), graph_spec())
    into_tower = payloads.of(act("audio", 1, "vision", 1))
    assert into_tower.outputs == (0,) and into_tower.width == 9
    behind = payloads.of(act(LANGUAGE_MODEL, 1, "speech", 0))
    assert behind.outputs == (0,) and behind.width == 11 and behind.producer_mesh == ((14, 15), (16, 17))


def test_hidden_states_are_all_outputs_in_the_width_of_their_module():
    hidden = Payloads(graph_plan(), graph_spec()).of(act("vision", 0, "vision", 1))
    assert hidden.outputs is None and hidden.features is None and hidden.width == 9
    assert hidden.select_outputs("ab") == hidden.among_outputs("ab") == ["a", "b"]


def test_a_gradient_has_the_payload_of_what_it_is_the_gradient_of():
    payloads = Payloads(graph_plan(), graph_spec())
    message = act("vision", 1, LANGUAGE_MODEL, 0)
    back = Message("grad", replace(message.target, kind="bwd"), replace(message.source, kind="bwd"))
    assert payloads.of(back) is payloads.of(message)


def test_only_what_is_trained_or_lies_behind_it_needs_a_gradient():
    payloads = Payloads(graph_plan(), graph_spec())
    assert not payloads.of(act("audio", 0, "audio", 1)).needs_grad
    assert not payloads.of(act("audio", 1, LANGUAGE_MODEL, 0)).needs_grad
    assert payloads.of(act("vision", 1, LANGUAGE_MODEL, 0)).needs_grad


def test_each_edge_has_a_dtype_of_its_own():
    spec = graph_spec(audio="float32")
    assert wire_dtype(spec, "audio", "audio") == torch.float32
    assert wire_dtype(spec, "audio", LANGUAGE_MODEL) == torch.float32
    assert wire_dtype(spec, "vision", LANGUAGE_MODEL) == torch.bfloat16
    assert wire_dtype(spec, "vision", "vision") == torch.bfloat16
    assert wire_dtype(spec, LANGUAGE_MODEL, LANGUAGE_MODEL) == torch.bfloat16


@pytest.mark.parametrize(
    ("producer", "consumer", "expected"),
    [
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.float32),
        ("float16", "bfloat16", torch.float32),
        ("float16", "float16", torch.float16),
    ],
)
def test_features_travel_in_a_dtype_that_holds_what_both_ends_compute(producer, consumer, expected):
    spec = graph_spec(vision=producer, language_model=consumer)
    assert wire_dtype(spec, "vision", LANGUAGE_MODEL) == expected


def test_a_projector_in_float32_widens_its_features_and_nothing_else():
    spec = graph_spec()
    vision = spec.modules["vision"]
    projector = ParameterSpec("projector", (1, 1), vision.num_layers, "float32")
    modules = {**spec.modules, "vision": replace(vision, parameters=(*vision.parameters, projector))}
    spec = replace(spec, modules=modules)
    assert wire_dtype(spec, "vision", LANGUAGE_MODEL) == torch.float32
    assert wire_dtype(spec, "vision", "vision") == torch.bfloat16


@pytest.mark.parametrize(
    ("weights", "cast_to", "expected"),
    [
        ("bfloat16", torch.float16, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("float32", torch.float16, torch.float32),
    ],
)
def test_payloads_of_a_cast_model_represent_what_it_computes(weights, cast_to, expected):
    payloads = Payloads(graph_plan(), graph_spec(vision=weights, language_model=weights))
    messages = act("vision", 1, LANGUAGE_MODEL, 0), act("vision", 0, "vision", 1)
    before = [payloads.of(message).dtype for message in messages]
    payloads.widen(cast_to)
    assert before == [getattr(torch, weights)] * 2
    assert [payloads.of(message).dtype for message in messages] == [expected] * 2


@pytest.mark.parametrize("matrices", ["float8_e4m3fn", "bfloat16"])
def test_hidden_states_of_eight_bit_weights_have_the_dtype_of_the_rest(matrices):
    spec = with_dtypes(model_spec(), matrices, "bfloat16")
    stage = ModuleStage(tiny.FAMILIES["llama"](), spec, LANGUAGE_MODEL, (0, spec.language_model.num_layers))
    assert stage.input_dtype == torch.bfloat16


def test_a_generator_of_the_planner_is_refused_before_a_step():
    spec = model_spec()
    image = replace(spec.modules[LANGUAGE_MODEL], name="image", features=(), parameters=())
    spec = replace(spec, modules={**spec.modules, "image": image})
    plan = resolve_plan(spec, {})
    assert Edge(LANGUAGE_MODEL, "image") in plan.edges
    with pytest.raises(ValueError, match="`image` starts from the hidden states of `language_model`.*not run"):
        Payloads(plan, spec)
