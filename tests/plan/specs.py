"""Small model specs and plans without a model, for the tests of plans."""

from dataclasses import replace

from hypothesis import strategies as st

from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ContextSettings,
    Edge,
    FeatureSpec,
    ModelSpec,
    ModulePlan,
    ModuleSpec,
    ParallelPlan,
    ParameterSpec,
    ShardingSettings,
    Stage,
)
from hf_mmparallel.plan.parallel_plan import CONTEXT_METHODS

EMBEDDINGS = "model.language_model.embed_tokens.weight"


def vision_spec(num_layers: int = 6, deepstack: tuple[int, ...] = ()) -> ModuleSpec:
    """A tower with embeddings and a projector; `deepstack` are the decoder layers that take inner features."""
    tower = "model.vision_tower"
    parameters = [ParameterSpec(f"{tower}.embeddings.weight", (8, 8), -1)]
    parameters += [ParameterSpec(f"{tower}.layers.{i}.weight", (8, 8), i) for i in range(num_layers)]
    parameters.append(ParameterSpec("model.projector.weight", (8, 16), num_layers))
    features = [FeatureSpec("image")]
    features += [FeatureSpec("image", "deepstack_features", layer, i) for i, layer in enumerate(deepstack)]
    sizes = (num_layers, 8, 8, 8, 32)
    return ModuleSpec(
        *("vision", f"{tower}.layers", *sizes, tuple(parameters), tuple(features), tower),
        taps=tuple(range(len(deepstack))),
    )


def language_spec(num_layers: int = 4) -> ModuleSpec:
    """A decoder with four heads of which two are for keys and values."""
    prefix = "model.language_model"
    parameters = [ParameterSpec(EMBEDDINGS, (50, 16), -1)]
    for layer in range(num_layers):
        parameters.append(ParameterSpec(f"{prefix}.layers.{layer}.attention.weight", (16, 16), layer))
        parameters.append(ParameterSpec(f"{prefix}.layers.{layer}.mlp.weight", (16, 32), layer))
    parameters.append(ParameterSpec(f"{prefix}.norm.weight", (16,), num_layers))
    sizes = (num_layers, 16, 4, 2, 32)
    return ModuleSpec(LANGUAGE_MODEL, f"{prefix}.layers", *sizes, tuple(parameters), tower=f"{prefix}.layers")


def with_experts(spec: ModelSpec, num_experts: int) -> ModelSpec:
    """The model with experts in each layer of its decoder."""
    language = spec.language_model
    names = [f"{language.stack}.{layer}.mlp.experts.down_proj" for layer in range(language.num_layers)]
    share = 2 / num_experts
    experts = tuple(
        ParameterSpec(
            name, (num_experts, 16, 8), layer, active_share=share, num_experts=num_experts, shared_share=share
        )
        for layer, name in enumerate(names)
    )
    language = replace(language, parameters=language.parameters + experts)
    return replace(spec, modules={**spec.modules, LANGUAGE_MODEL: language})


def model_spec(
    vision_layers: int = 6, language_layers: int = 4, tied: bool = False, deepstack: tuple[int, ...] = ()
) -> ModelSpec:
    """A vision-language model; `tied` uses the embeddings a second time, after the last layer."""
    modules = {"vision": vision_spec(vision_layers, deepstack), LANGUAGE_MODEL: language_spec(language_layers)}
    return ModelSpec(modules, tied={EMBEDDINGS: ((LANGUAGE_MODEL, language_layers),)} if tied else {})


@st.composite
def layer_ranges(draw, num_layers: int) -> list[tuple[int, int]]:
    """Any cut of a stack into consecutive stages."""
    cuts = sorted(draw(st.sets(st.sampled_from(range(1, num_layers)), max_size=3))) if num_layers > 1 else []
    bounds = [0, *cuts, num_layers]
    return list(zip(bounds, bounds[1:], strict=False))


@st.composite
def specs_and_plans(draw) -> tuple[ModelSpec, ParallelPlan]:
    """
    Any frozen parameters, any that tp ranks hold whole, replicas with different numbers of stages, on ranks of their
    own or shared.

    On shared ranks a rank has one place in all grids of a module, as only equal shards of a tensor can be summed.
    """
    spec = model_spec(draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.booleans()))
    pattern = draw(st.sampled_from([False, True, "tower", r"layers\.[02]\.", "weight"]))
    frozen = draw(st.sampled_from(["vision", LANGUAGE_MODEL]))
    dims, modules = st.sampled_from([None, 0, 1]), {}
    for name, module in spec.modules.items():
        if name == frozen and (pattern != "tower" or name == "vision"):
            module = module.with_frozen(pattern)
        modules[name] = replace(module, parameters=tuple(replace(p, tp_dim=draw(dims)) for p in module.parameters))
    spec = ModelSpec(modules, spec.tied)
    shared = draw(st.booleans())
    modules, next_rank = {}, 0
    for name, module in spec.modules.items():
        tp_size = draw(st.sampled_from([1, 2]))
        cp_size = draw(st.integers(1, 1 if name == "vision" else 3))
        replicas = []
        for _ in range(draw(st.integers(1, 3))):
            stages = []
            for layers in draw(layer_ranges(module.num_layers)):
                starts = list(range(next_rank, next_rank + cp_size * tp_size, tp_size))
                if shared:
                    starts = [2 * first for first in draw(st.permutations(range(4)))[:cp_size]]
                else:
                    next_rank += cp_size * tp_size
                grid = tuple(tuple(range(start, start + tp_size)) for start in starts)
                stages.append(Stage(layers, grid, draw(st.booleans())))
            replicas.append(tuple(stages))
        context = ContextSettings(draw(st.sampled_from(CONTEXT_METHODS)), block=draw(st.sampled_from([16, 128])))
        sizes = [n for n in range(1, 10) if len(replicas) * cp_size % n == 0]
        sharding = draw(st.sampled_from([ShardingSettings(), *(ShardingSettings(1, n) for n in (None, *sizes))]))
        modules[name] = ModulePlan(tuple(replicas), draw(st.booleans()), context, sharding)
    schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    edges = (Edge("vision", LANGUAGE_MODEL, (0,)),)
    assignment = draw(st.sampled_from([None, "tapered"]))
    plan = ParallelPlan(modules, edges, schedule, draw(st.integers(1, 9)), microbatch_assignment=assignment)
    return spec, plan
