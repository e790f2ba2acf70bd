"""The chain of a model against the costs and the memory of plans."""

import random
from dataclasses import replace

import numpy as np
import pytest
from recovery_policies import fastest_template

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.cost import batch_workloads, memory_per_rank, stage_costs
from hf_mmparallel.cost.row_sizes import chunk_sizes
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModulePlugin,
    ParallelPlan,
    SampleSizes,
    StepPlan,
    StorageSettings,
    check_plan,
)
from hf_mmparallel.resilience.model_chain import ModelChain, TypicalMicrobatches, model_chain
from hf_mmparallel.resilience.pipelines import Pipeline, PipelinePlans
from hf_mmparallel.resilience.state_copies import recovery_bytes, value_bytes
from hf_mmparallel.resilience.templates import PipelineTemplate, TemplateStage
from hf_mmparallel.schedule.in_flight import in_flight_1f1b
from hf_mmparallel.schedule.kinds import WHOLE_PASSES
from tests.resilience.models import MODELS, chain_of, costs_of, typical
from tests.tiny import FAMILIES

SETTINGS = {
    "plain": {},
    "recomputed": {LANGUAGE_MODEL: ModulePlugin(activation_checkpointing=True)},
    "shared state": {name: ModulePlugin(zero_stage=1, shard_size=2) for name in ("vision", "audio", LANGUAGE_MODEL)},
    "tp": {name: ModulePlugin(tp_size=2) for name in ("vision", "audio", LANGUAGE_MODEL)},
}


def plan_of(chain: ModelChain, template: PipelineTemplate, copies: int = 1) -> ParallelPlan:
    """A plan of copies of one template."""
    pipeline, count = Pipeline.of_template(chain, template), template.num_nodes
    node_size = sum(stage.num_ranks for stage in template.stages) // count
    plans = PipelinePlans(chain, node_size, chain.microbatches.most * copies * chain.copies)
    return plans.consecutive([pipeline] * copies).plan


def contiguous(chain: ModelChain, plan: ParallelPlan, num_samples: int) -> StepPlan:
    workloads = batch_workloads(chain.costs, plan, chain.microbatches.sizes.take(np.arange(num_samples) % 4))
    return arrange_step(plan, range(num_samples), workloads, chain.microbatches.microbatch_size, "contiguous")


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", MODELS)
def test_times_of_stages_are_those_of_the_cost_model(family: str, settings: str) -> None:
    """For random cuts: forwards and backwards of both microbatches on each stage, by the costs of the plan."""
    costs, rng = costs_of(family), random.Random(family)
    modules = {name: SETTINGS[settings][name] for name in costs.spec.modules if name in SETTINGS[settings]}
    chain = chain_of(family, modules)
    (num_ranks,) = chain.chain.rank_counts
    for _ in range(4):
        cuts = [0, *sorted(rng.sample(range(1, len(chain.units)), 3)), len(chain.units)]
        bounds = list(zip(cuts, cuts[1:], strict=False))
        stage_ms = [float(chain.chain.stage_ms[0][bound]) for bound in bounds]
        stages = [TemplateStage(bound, num_ranks, ms) for bound, ms in zip(bounds, stage_ms, strict=True)]
        plan = plan_of(chain, PipelineTemplate(len(stages), tuple(stages)))
        step, sizes = contiguous(chain, plan, 4), chain.microbatches.sizes
        chunks, expected = chunk_sizes(costs, plan, step, sizes), np.zeros(plan.world_size)
        for key, cost in stage_costs(costs, plan).items():
            for chunk, size in chunks.items():
                if chunk[0] == key[0]:
                    time_ms = sum(cost.task_ms(size.tokens, size.squares, kind) for kind in WHOLE_PASSES)
                    expected[list(plan.stage(*key).all_ranks)] += time_ms / 2
        assert np.repeat(stage_ms, num_ranks) == pytest.approx(expected, rel=1e-6)


def test_layers_that_stay_together_are_one_unit() -> None:
    qwen = [unit.layers for unit in chain_of("qwen3_vl").units if unit.module == "vision"]
    assert qwen == [(0, 1), (1, 4)], "features of the first two layers"
    costs = costs_of("llava")
    for selected, last in ((0, (0, 4)), (2, (2, 4)), (4, (3, 4))):
        vision = replace(costs.spec.modules["vision"], num_unread=4 - selected)
        spec = replace(costs.spec, modules={**costs.spec.modules, "vision": vision})
        chain = model_chain(costs.with_spec(spec), {}, typical(spec))
        layers = [unit.layers for unit in chain.units if unit.module == "vision"]
        assert layers == [(layer, layer + 1) for layer in range(last[0])] + [last]
    assert [unit.layers for unit in chain.units if unit.module == LANGUAGE_MODEL] == [(i, i + 1) for i in range(4)]


def test_modules_of_one_stage_have_as_many_ranks() -> None:
    plans = []
    for vision, language, *nodes in (
        (ModulePlugin(tp_size=1), ModulePlugin(tp_size=2), 2, 3),
        (ModulePlugin(tp_size=2), ModulePlugin(cp_size=2), 1, 2),
    ):
        chain = chain_of("llava", {"vision": vision, LANGUAGE_MODEL: language})
        template = fastest_template(chain.chain, *nodes, 4)
        assert template is not None
        plans.append(plan_of(chain, template))
    assert [module.tp_size for module in plans[0].modules.values()] == [1, 2]
    assert [plans[1].stage(name, 0, 0).mesh for name in plans[1].modules] == [((0, 1),), ((0,), (1,))]


@pytest.mark.parametrize("memory_bytes", [None, 9e6])
@pytest.mark.parametrize("family", MODELS)
def test_stages_of_each_size_are_those_of_modules_with_this_size(family: str, memory_bytes: float | None) -> None:
    """Also where a module has one size only: stages with its layers have no other."""
    both = chain_of(family, {}, memory_bytes, (1, 2)).chain
    assert both.rank_counts == [1, 2]
    for index, size in enumerate(both.rank_counts):
        alone = chain_of(family, {}, memory_bytes, (size,)).chain
        assert (both.stage_ms[index] == alone.stage_ms[0]).all()
        if memory_bytes is not None:
            assert (np.asarray(both.fits_in_flight)[index] == np.asarray(alone.fits_in_flight)[0]).all()
    costs = costs_of(family)
    sizes = {LANGUAGE_MODEL: (1, 2)}
    some = model_chain(costs, {}, typical(costs.spec), memory_bytes, tp_sizes=sizes)
    of_language = np.array([unit.module == LANGUAGE_MODEL for unit in some.units])
    first = int(np.argmax(of_language))
    assert np.isinf(some.chain.stage_ms[1, :first]).all()
    assert (some.chain.stage_ms[1, first:] == both.stage_ms[1, first:]).all()


def test_meshes_have_the_size_of_their_stage() -> None:
    chain = chain_of("llava", {}, None, (1, 2))
    stages = (TemplateStage((0, 5), 2, 1.0), TemplateStage((5, 6), 1, 1.0), TemplateStage((6, 8), 1, 1.0))
    plan = plan_of(chain, PipelineTemplate(2, stages), copies=2)
    language = [stage.mesh for stage in plan.modules[LANGUAGE_MODEL].replicas[1]]
    assert language == [((4, 5),), ((6,),), ((7,),)]
    assert [plan.modules[name].tp_sizes for name in ("vision", LANGUAGE_MODEL)] == [(2,), (1, 2)]
    check_plan(plan, chain.spec)


@pytest.mark.parametrize("family", ["llava", "llama_tied"])
def test_the_state_is_that_of_the_parameters(family: str) -> None:
    """Weights and two values of AdamW in float32, of frozen ones the weights; a tied one is in both of its units."""
    spec = build_model_spec(FAMILIES[family]())
    chain = model_chain(costs_of(family).with_spec(spec), {}, typical(spec))
    count = sum(p.num_elements for p in spec.parameters.values())
    count += sum(spec.parameters[name].num_elements for name in spec.tied)
    assert len(chain.state_bytes) == chain.chain.num_layers
    assert sum(chain.state_bytes) == 3 * 4 * count
    frozen = chain_of(family).state_bytes
    assert family == "llama_tied" or frozen[1] * 3 == chain.state_bytes[1]
    assert frozen[-1] == chain.state_bytes[-1]


def test_a_stage_without_gradients_leaves_room_for_the_copies_of_a_recovery() -> None:
    """Of what is frozen a step has little beside the weights, and parts of other stages have to come beside them."""
    costs = costs_of("llava")
    frozen = {name: module.with_frozen(True) for name, module in costs.spec.modules.items()}
    costs = costs.with_spec(replace(costs.spec, modules=frozen))
    num_bytes = 4 * sum(parameter.num_elements for parameter in costs.spec.parameters.values())
    small = TypicalMicrobatches(SampleSizes.uniform(dict.fromkeys(frozen, 1), 1))
    on_host = replace(costs, device=replace(costs.device, name="cpu"))
    for limit, fits in ((1.9 * num_bytes, False), (2.1 * num_bytes, True)):
        for one in (costs, on_host):
            chain = model_chain(one, {}, small, limit).chain
            assert (np.asarray(chain.fits_in_flight)[0, 0, -1] > 0) == fits
    # half of the model needs room for the window of the whole, and on the host for a second half
    half = np.asarray(model_chain(costs, {}, small, 1.3 * num_bytes).chain.fits_in_flight)[0]
    half_on_host = np.asarray(model_chain(on_host, {}, small, 1.3 * num_bytes).chain.fits_in_flight)[0]
    assert (half_on_host >= half).all() and half_on_host.sum() > half.sum()


def test_less_memory_the_state_of_two_stages_and_wider_activations_leave_room_for_fewer() -> None:
    costs = costs_of("llava")
    wide = replace(costs, value_bytes=4)
    roomy, tight, doubled, wider = (
        np.asarray(model_chain(one, {}, typical(costs.spec), *limit).chain.fits_in_flight)
        for one, limit in ((costs, (1e9,)), (costs, (3e6,)), (costs, (3e6, 2)), (wide, (3e6,)))
    )
    for less, more in ((tight, roomy), (doubled, tight), (wider, tight)):
        assert (less <= more).all() and (less < more).any()


@pytest.mark.parametrize(
    ("setting", "sizes", "match"),
    [
        (ModulePlugin(zero_stage=1), (), r"`zero_stage=1` of `language_model`.*`shard_size`, .*`zero_stage=0`"),
        (ModulePlugin(zero_stage=1, shard_size=2), (1, 2), r"`zero_stage=1` of `language_model`.* one size"),
        (ModulePlugin(cp_size=2, zero_stage=1, shard_size=3), (), r"among 3 copies.*`shard_size=2`"),
        (ModulePlugin(cp_size=2), (1, 2), r"`cp_size=2` of `language_model`.* one size"),
    ],
)
def test_divided_states_and_sizes_that_stages_can_not_have_are_refused(setting, sizes, match) -> None:
    with pytest.raises(ValueError, match=match):
        chain_of("llava", {LANGUAGE_MODEL: setting}, None, sizes)


@pytest.mark.parametrize("settings", SETTINGS)
def test_limits_are_those_of_the_memory_of_ranks(settings: str) -> None:
    """
    Of a language model, for any layers: as many microbatches fit as its memory says, and not one more; none where a
    recovery does not fit.
    """
    costs, modules = costs_of("llama_tied"), {LANGUAGE_MODEL: SETTINGS[settings].get(LANGUAGE_MODEL, ModulePlugin())}
    free = chain_of("llama_tied", modules)
    parameters, storage = costs.spec.parameters.values(), StorageSettings()
    model_bytes = sum(parameter.num_elements * value_bytes(parameter, storage) for parameter in parameters)
    (num_ranks,) = free.chain.rank_counts
    for first in range(4):
        for stop in range(first + 1, 5):
            bounds = [bound for bound in ((0, first), (first, stop), (stop, 4)) if bound[0] < bound[1]]
            template = PipelineTemplate(len(bounds), tuple(TemplateStage(bound, num_ranks, 1.0) for bound in bounds))
            plan, index = plan_of(free, template, copies=2), bounds.index((first, stop))
            key = (LANGUAGE_MODEL, 0, index)
            count = 16 * plan.modules[LANGUAGE_MODEL].dp_size
            step, samples = contiguous(free, plan, count), free.microbatches.sizes.take(np.arange(count) % 4)
            for count in (1, 3):
                memory = memory_per_rank(costs, plan, step, samples, {key: count})[plan.stage(*key).all_ranks[0]]
                held = memory.weights + memory.optimizer
                needed = max(memory.total, recovery_bytes(held, model_bytes, held))
                fits = [
                    np.asarray(chain_of("llama_tied", modules, limit).chain.fits_in_flight)[0, first, stop]
                    for limit in (needed + 1, needed - 1)
                ]
                assert fits == [count, count - 1]


@pytest.mark.parametrize("family", MODELS)
def test_templates_fit_the_memory(family: str) -> None:
    """The predicted memory of all ranks of a template under 1F1B is within the limit for which it was made."""
    costs, free = costs_of(family), chain_of(family)
    num_units, most = len(free.units), free.microbatches.most
    found = 0
    for limit in np.geomspace(1e5, 1e8, 10).tolist():
        chain = chain_of(family, {}, limit)
        for count in range(1, num_units + 1):
            template = fastest_template(chain.chain, count, 1, 4, most)
            if template is None:
                continue
            found += 1
            plan = plan_of(chain, template, copies=2)
            step, sizes = contiguous(chain, plan, 4 * most), chain.microbatches.sizes.take(np.arange(4 * most) % 4)
            in_flight = in_flight_1f1b(plan, step)
            memory = memory_per_rank(costs, plan, step, sizes, in_flight)
            assert max(rank.total for rank in memory.values()) <= limit * (1 + 1e-9)
    assert found > num_units
