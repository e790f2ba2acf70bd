"""The chain of a model against the costs and the memory of plans."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from recovery_policies import fastest_template

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.cost import batch_workloads, memory_per_rank, stage_costs
from hf_mmparallel.cost.row_sizes import chunk_sizes
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, StepPlan, check_plan
from hf_mmparallel.resilience.model_chain import ModelChain, model_chain
from hf_mmparallel.resilience.pipelines import Pipeline, PipelineLayout, PipelinePlans
from hf_mmparallel.resilience.templates import PipelineTemplate, TemplateStage
from hf_mmparallel.schedule.in_flight import in_flight_1f1b
from tests.resilience.models import MODELS, chain_of, costs_of, typical
from tests.resilience.test_templates import all_cuts, fits, time_ms

SETTINGS = {
    "plain": {},
    "recomputed": {LANGUAGE_MODEL: ModulePlugin(activation_checkpointing=True)},
    "tp": {name: ModulePlugin(tp_size=2) for name in ("vision", "audio", LANGUAGE_MODEL)},
}


def plan_of(chain: ModelChain, template: PipelineTemplate, copies: int = 1) -> ParallelPlan:
    """A plan of copies of one template."""
    layout, count = PipelineLayout.of_template(chain, template), template.num_nodes
    node_size = sum(stage.num_ranks for stage in template.stages) // count
    pipelines = [Pipeline(tuple(range(first, first + count)), layout) for first in range(0, copies * count, count)]
    return PipelinePlans(chain, node_size, chain.microbatches.most * copies).of(pipelines).plan


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
                    time_ms = cost.forward_ms(size.tokens, size.squares) + cost.backward_ms(size.tokens, size.squares)
                    expected[list(plan.stage(*key).all_ranks)] += time_ms / 2
        assert np.repeat(stage_ms, num_ranks) == pytest.approx(expected, rel=1e-6)


def test_a_frozen_part_has_the_backward_that_it_needs() -> None:
    """A frozen tower has none, the frozen first layers of a language model behind a trained projector one of half."""
    frozen, trained = chain_of("llava"), model_chain(*_trained("llava"))
    times, whole = (np.asarray(one.chain.layer_ms)[0] for one in (frozen, trained))
    assert times[1] == pytest.approx(whole[1] / 3, rel=0.1)
    assert times[-2] == pytest.approx(whole[-2], rel=1e-6)


def _trained(family: str):
    costs = costs_of(family)
    spec = costs.spec
    modules = {
        name: replace(module, parameters=tuple(replace(p, trainable=True) for p in module.parameters))
        for name, module in spec.modules.items()
    }
    return costs.with_spec(replace(spec, modules=modules)), {}, typical(spec)


def test_layers_that_stay_together_are_one_unit() -> None:
    qwen = [unit.layers for unit in chain_of("qwen3_vl").units if unit.module == "vision"]
    assert qwen == [(0, 4)], "features of inner layers"
    costs = costs_of("llava")
    for selected, last in ((0, (0, 4)), (2, (2, 4)), (4, (3, 4))):
        chain = model_chain(costs, {}, typical(costs.spec), selected_layers={"vision": selected})
        layers = [unit.layers for unit in chain.units if unit.module == "vision"]
        assert layers == [(layer, layer + 1) for layer in range(last[0])] + [last]
    assert [unit.layers for unit in chain.units if unit.module == LANGUAGE_MODEL] == [(i, i + 1) for i in range(4)]


def test_sizes_of_modules() -> None:
    """A stage has layers of two modules only if these have as many ranks."""
    assert fastest_template(chain_of("llava").chain, 1, 1, 4) is not None
    modules = {"vision": ModulePlugin(tp_size=1), LANGUAGE_MODEL: ModulePlugin(tp_size=2)}
    chain = chain_of("llava", modules)
    template = fastest_template(chain.chain, 2, 3, 4)
    assert template is not None
    plan = plan_of(chain, template)
    assert plan.modules["vision"].tp_size == 1 and plan.modules[LANGUAGE_MODEL].tp_size == 2
    shared = {"vision": ModulePlugin(tp_size=2), LANGUAGE_MODEL: ModulePlugin(cp_size=2)}
    template = fastest_template(chain_of("llava", shared).chain, 1, 2, 4)
    assert template is not None
    plan = plan_of(chain_of("llava", shared), template)
    assert [plan.stage(name, 0, 0).mesh for name in plan.modules] == [((0, 1),), ((0,), (1,))]


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


@pytest.mark.parametrize("node_size", [2, 3])
@pytest.mark.parametrize("family", MODELS)
def test_templates_have_the_fastest_of_all_cuts_and_sizes(family: str, node_size: int) -> None:
    """With and without a limit of memory, for up to three nodes."""
    found: set[tuple[int, ...]] = set()
    for memory_bytes in (None, 7e6, 8.5e6, 1e7, 1.4e7):
        chain = chain_of(family, {}, memory_bytes, (1, 2)).chain
        for num_nodes in (1, 2, 3):
            cuts = [one for one in all_cuts(chain, num_nodes * node_size, node_size) if fits(chain, one, 8)]
            template = fastest_template(chain, num_nodes, node_size, 8)
            assert (template is not None) == bool(cuts)
            if template is not None:
                best_ms = min(time_ms(chain, one, 8) for one in cuts)
                assert template.step_ms(8) == pytest.approx(best_ms, rel=1e-9)
                found.add(tuple(sorted({stage.num_ranks for stage in template.stages})))
    assert (1, 2) in found, "stages of one template have different sizes"


def test_meshes_have_the_size_of_their_stage() -> None:
    chain = chain_of("llava", {}, None, (1, 2))
    stages = (TemplateStage((0, 5), 2, 1.0), TemplateStage((5, 6), 1, 1.0), TemplateStage((6, 8), 1, 1.0))
    plan = plan_of(chain, PipelineTemplate(2, stages), copies=2)
    language = [stage.mesh for stage in plan.modules[LANGUAGE_MODEL].replicas[1]]
    assert language == [((4, 5),), ((6,),), ((7,),)]
    assert [plan.modules[name].tp_sizes for name in ("vision", LANGUAGE_MODEL)] == [(2,), (1, 2)]
    check_plan(plan, chain.spec)


def test_sizes_that_stages_of_a_module_can_not_have_are_refused() -> None:
    costs = costs_of("llava")
    shared = {LANGUAGE_MODEL: ModulePlugin(cp_size=2)}
    with pytest.raises(ValueError, match=r"`cp_size=2` of `language_model` assigns .* tp groups of one size"):
        model_chain(costs, shared, typical(costs.spec), tp_sizes={LANGUAGE_MODEL: (1, 2)})


@pytest.mark.parametrize("family", ["llava", "llama_tied"])
def test_the_state_is_that_of_the_parameters(family: str) -> None:
    """Weights and two values of AdamW in float32; a tied parameter is in both of its units."""
    costs, frozen, _ = _trained(family)
    chain = model_chain(costs, frozen, typical(costs.spec))
    count = sum(p.num_elements for module in costs.spec.modules.values() for p in module.parameters)
    count += sum(costs.spec.parameters[name].num_elements for name in costs.spec.tied)
    assert len(chain.state_bytes) == chain.chain.num_layers
    assert sum(chain.state_bytes) == 3 * 4 * count


def test_the_state_of_frozen_parameters_is_their_weights() -> None:
    frozen, trained = chain_of("llava"), model_chain(*_trained("llava"))
    assert frozen.state_bytes[1] * 3 == trained.state_bytes[1] and frozen.state_bytes[-1] == trained.state_bytes[-1]


def test_the_state_of_two_stages_needs_more_memory() -> None:
    costs = costs_of("llava")
    roomy, tight, doubled = (
        np.asarray(model_chain(costs, {}, typical(costs.spec), *limit).chain.fits_in_flight)
        for limit in ((1e9,), (3e6,), (3e6, None, 2))
    )
    assert (tight <= roomy).all() and (tight < roomy).any()
    assert (doubled <= tight).all() and (doubled < tight).any()


def test_recomputed_activations_take_time_and_leave_memory() -> None:
    costs = costs_of("llava")
    settings = ({}, dict.fromkeys(costs.spec.modules, ModulePlugin(activation_checkpointing=True)))
    plain, again = (model_chain(costs, own, typical(costs.spec), 1e7).chain for own in settings)
    assert np.asarray(again.layer_ms).sum() > np.asarray(plain.layer_ms).sum()
    large = model_chain(replace(costs, value_bytes=4), {}, typical(costs.spec), 1e7).chain
    fits, recomputed, wide = (np.asarray(one.fits_in_flight) for one in (plain, again, large))
    assert (recomputed >= fits).all() and (recomputed > fits).any()
    assert (wide <= fits).all() and (wide < fits).any()


def test_divided_optimizer_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`zero_stage=1` of `language_model` divides .* Use `zero_stage=0`"):
        chain_of("llava", {LANGUAGE_MODEL: ModulePlugin(zero_stage=1)})


@pytest.mark.parametrize("settings", SETTINGS)
def test_limits_are_those_of_the_memory_of_ranks(settings: str) -> None:
    """Of a language model, for any layers: as many microbatches fit as its memory says, and not one more."""
    costs, modules = costs_of("llama_tied"), {LANGUAGE_MODEL: SETTINGS[settings].get(LANGUAGE_MODEL, ModulePlugin())}
    free = chain_of("llama_tied", modules)
    (num_ranks,) = free.chain.rank_counts
    for first in range(4):
        for stop in range(first + 1, 5):
            bounds = [bound for bound in ((0, first), (first, stop), (stop, 4)) if bound[0] < bound[1]]
            template = PipelineTemplate(len(bounds), tuple(TemplateStage(bound, num_ranks, 1.0) for bound in bounds))
            plan, index = plan_of(free, template, copies=2), bounds.index((first, stop))
            key = (LANGUAGE_MODEL, 0, index)
            step, samples = contiguous(free, plan, 32), free.microbatches.sizes.take(np.arange(32) % 4)
            for count in (1, 3):
                memory = memory_per_rank(costs, plan, step, samples, {key: count})
                needed = memory[plan.stage(*key).all_ranks[0]].total
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
    for limit in np.geomspace(1e5, 1e8, 20).tolist():
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
