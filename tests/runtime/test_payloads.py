"""In which dtype tokens cross an edge between two stages, and by which way; `test_module_graphs` has the rest."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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
from hf_mmparallel.runtime.payloads import Mesh, Payloads, feature_routes, select, wire_dtype
from hf_mmparallel.schedule.kinds import Message, Task
from tests import tiny
from tests.plan.specs import model_spec

FEATURES = {
    "vision": (FeatureSpec("image"), FeatureSpec("image", "deepstack_features", 2, 0)),
    LANGUAGE_MODEL: (),
}


def graph_spec(vectors: str | None = None, projector: str | None = None, **dtypes: str) -> ModelSpec:
    """An encoder and a language model, with a dtype each, and those of norms in the first layers and of projectors."""
    modules = {}
    for name, features in FEATURES.items():
        weights = [ParameterSpec(f"{name}.{i}", (1, 1), i, dtypes.get(name, "bfloat16")) for i in range(4)]
        weights += [ParameterSpec(f"{name}.norm", (1,), 0, vectors)] if vectors else []
        weights += [ParameterSpec(f"{name}.projector", (1, 1), 4, projector)] if projector else []
        modules[name] = ModuleSpec(name, name, 4, 8, 1, 1, 1, tuple(weights), features)
    return ModelSpec(modules)


def plan_of(trainable: bool) -> ParallelPlan:
    """An encoder on two stages, trained or not, and a language model on one."""
    stages = [Stage(layers, ((rank,),), trainable) for rank, layers in enumerate([(0, 2), (2, 4)])]
    modules = {"vision": ModulePlan((tuple(stages),)), LANGUAGE_MODEL: ModulePlan(((Stage((0, 4), ((2,),)),),))}
    return ParallelPlan(modules, (Edge("vision", LANGUAGE_MODEL, (0, 2)),))


FIRST, SECOND, DECODER = (Task("fwd", *key, 0) for key in (("vision", 0, 0), ("vision", 0, 1), (LANGUAGE_MODEL, 0, 0)))
STAGE_TO_STAGE, MODULE_TO_MODULE = Message("act", FIRST, SECOND), Message("act", SECOND, DECODER)


@pytest.mark.parametrize("trainable", [True, False])
def test_only_what_is_trained_or_lies_behind_it_needs_a_gradient(trainable):
    payloads = Payloads(plan_of(trainable), graph_spec())
    assert payloads.of(STAGE_TO_STAGE).needs_grad == payloads.of(MODULE_TO_MODULE).needs_grad == trainable


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
    assert wire_dtype(graph_spec(vectors, language_model=matrices), LANGUAGE_MODEL, LANGUAGE_MODEL) == expected


@pytest.mark.parametrize(
    ("producer", "projector", "consumer", "expected"),
    [
        ("bfloat16", None, "float32", torch.float32),
        ("float32", None, "bfloat16", torch.float32),
        ("float16", None, "bfloat16", torch.float32),
        ("float16", None, "float16", torch.float16),
        ("bfloat16", "float32", "bfloat16", torch.float32),
    ],
)
def test_features_travel_in_a_dtype_that_holds_what_both_ends_compute(producer, projector, consumer, expected):
    spec = graph_spec(projector=projector, vision=producer, language_model=consumer)
    assert wire_dtype(spec, "vision", LANGUAGE_MODEL) == expected
    assert wire_dtype(spec, "vision", "vision") == getattr(torch, producer)  # whatever other edges carry


@pytest.mark.parametrize(
    ("weights", "cast_to", "expected"),
    [
        ("bfloat16", torch.float16, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("float32", torch.float16, torch.float32),
    ],
)
def test_payloads_of_a_cast_model_represent_what_it_computes(weights, cast_to, expected):
    payloads = Payloads(plan_of(trainable=True), graph_spec(vision=weights, language_model=weights))
    messages = STAGE_TO_STAGE, MODULE_TO_MODULE
    assert [payloads.of(message).dtype for message in messages] == [getattr(torch, weights)] * 2
    payloads.widen(cast_to)
    assert [payloads.of(message).dtype for message in messages] == [expected] * 2


def test_hidden_states_of_eight_bit_weights_have_the_dtype_of_the_rest():
    spec = model_spec()
    module = spec.modules[LANGUAGE_MODEL]
    parameters = tuple(
        replace(p, dtype="float8_e4m3fn" if len(p.shape) > 1 else "bfloat16") for p in module.parameters
    )
    spec = replace(spec, modules={LANGUAGE_MODEL: replace(module, parameters=parameters)})
    stage = ModuleStage(tiny.FAMILIES["llama"](), spec, LANGUAGE_MODEL, (0, module.num_layers))
    assert stage.input_dtype == torch.bfloat16


def test_a_generator_of_the_planner_is_refused_before_a_step():
    spec = model_spec()
    image = replace(spec.modules[LANGUAGE_MODEL], name="image", features=(), parameters=())
    spec = replace(spec, modules={**spec.modules, "image": image})
    plan = resolve_plan(spec, {})
    assert Edge(LANGUAGE_MODEL, "image") in plan.edges
    with pytest.raises(ValueError, match="`image`"):
        Payloads(plan, spec)


@st.composite
def layouts(draw) -> tuple[Mesh, Mesh, Tensor, Tensor]:
    """Two meshes of any sizes, which may share ranks, and the cp rank of each token in both."""
    meshes, owners = [], []
    num_tokens = draw(st.integers(0, 12))
    for _ in range(2):
        cp_size, tp_size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        ranks = draw(st.permutations(range(9)))[: cp_size * tp_size]
        meshes.append(tuple(tuple(ranks[start : start + tp_size]) for start in range(0, len(ranks), tp_size)))
        owners.append(draw(st.lists(st.integers(0, cp_size - 1), min_size=num_tokens, max_size=num_tokens)))
    return meshes[0], meshes[1], *(torch.tensor(own, dtype=torch.int64) for own in owners)


@given(layouts())
def test_each_token_crosses_once_from_where_it_is_to_where_it_is_needed(layout):
    """That gradients take the way back, `test_module_graphs` shows."""
    producer, consumer, computed_on, needed_on = layout
    owners = None if len(producer) == 1 else computed_on, None if len(consumer) == 1 else needed_on
    crossed = Counter()
    for route in feature_routes(len(computed_on), producer, consumer, *owners):
        assert (route.tokens is None) == (len(producer) == len(consumer) == 1)
        tokens = list(range(route.num_tokens)) if route.tokens is None else route.tokens.tolist()
        ends = [(part.producer, part.consumer) for part in route.slices]
        assert ends == [
            (route.producers[i % len(route.producers)], rank) for i, rank in enumerate(route.consumers[: len(ends)])
        ]
        sizes = [part.num_tokens for part in route.slices]  # equal ones, and a rest
        assert len(set(sizes[:-1])) <= 1 and sizes == sorted(sizes, reverse=True) and 0 not in sizes
        for part in route.slices:
            for token in tokens[part.start : part.stop]:
                assert route.producers == producer[computed_on[token]]
                assert route.consumers == consumer[needed_on[token]]
                crossed[token] += 1
    assert crossed == Counter(range(len(computed_on)))


def test_tokens_that_are_all_in_order_are_not_copied():
    tokens = torch.randn(3, 2)
    assert select(tokens, None) is tokens and select(tokens, torch.arange(3)) is tokens
    assert torch.equal(select(tokens, torch.tensor([1, 0, 2])), tokens[[1, 0, 2]])
