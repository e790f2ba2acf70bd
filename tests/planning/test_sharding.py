"""What copies divide as a dimension of the search: chosen where it helps; more to choose from is never slower."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.cost import CostModel, StepCost, analytic_costs, model_flops
from hf_mmparallel.cost.gradient_sums import optimizer_ms
from hf_mmparallel.cost.memory import state_per_rank
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, SampleSizes, sync_groups
from hf_mmparallel.plan.layout import ModuleLayout
from hf_mmparallel.plan.parallel_plan import ShardingSettings
from hf_mmparallel.planning.candidates import CandidateSpace
from hf_mmparallel.planning.options import ModuleOptions
from hf_mmparallel.planning.problem import Candidate, PlanningProblem
from hf_mmparallel.planning.search import search_plans
from hf_mmparallel.planning.simulations import AS_FAST, step_planner
from tests.cost.models import LAYERS, PLAIN
from tests.deep_cases import deep
from tests.plan.specs import model_spec, with_experts

from .test_search import BOTH, NEVER, ONE_ORDER, problem_of

STAGES = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]
SHORT = SampleSizes.uniform(dict.fromkeys(BOTH, 4), 48)
SLOW = replace(PLAIN, node_size=4, link_gb_per_s=2.0, node_link_gb_per_s=0.5, memory_gib=None)
LATE = replace(SLOW, link_latency_us=5.0, node_link_latency_us=12.0)


def question(num_ranks: int = 8, batch: int = 16, **settings):
    return problem_of(num_ranks, batch, zero_stages=STAGES[-1], device=SLOW, **ONE_ORDER, **{"effort": 32, **settings})


def sharded(sharding: ShardingSettings) -> Candidate:
    return Candidate(dict.fromkeys(BOTH, ModuleLayout((LAYERS,), 8, sharding=sharding)), {"vision": LANGUAGE_MODEL}, 1)


def step_ms(problem) -> float:
    try:
        return search_plans(problem).best.step_ms
    except ValueError:
        return float("inf")


@pytest.mark.deep
@settings(max_examples=2)
@given(
    st.sampled_from([2, 3]),
    st.sampled_from([2, 4]),
    st.sampled_from([(), ("vision",)]),
    st.integers(0, 9),
    st.sampled_from([None, 1.2e9]),
    st.sampled_from(STAGES[:-1]),
)
def test_more_zero_stages_are_never_slower(ranks, batch, frozen, seed, memory_bytes, stages):
    asked = problem_of(ranks, batch, frozen, seed, device=LATE, memory_bytes=memory_bytes, effort=2)
    fewer, more = (step_ms(replace(asked, zero_stages=own)) for own in (stages, STAGES[-1]))
    assert more <= AS_FAST * fewer


@pytest.mark.parametrize(("ranks", "batch", "effort"), [(2, 4, 2), deep(6, 24, 32)])
def test_layouts_that_divide_nothing_are_fastest_where_latency_counts(ranks, batch, effort):
    """A search among both stages that looks at the closed form of ZeRO-1 alone is 31 % slower on six ranks."""
    asked = problem_of(ranks, batch, ("vision",), 1, device=LATE, effort=effort, checkpointing=NEVER)
    fewer, more = (step_ms(replace(asked, zero_stages=stages)) for stages in STAGES[:2])
    assert more <= AS_FAST * fewer


def test_a_state_that_fits_only_where_it_is_divided():
    """Too large for a rank as a whole, with one stage and matrices that are not split."""
    sizes = {"dp_size": 8, "pp_size": 1, "tp_size": 1, "cp_size": 1}
    asked = replace(question(fixed=dict.fromkeys(BOTH, sizes), effort=8), sizes=SHORT)
    state_bytes = {}
    for stage in (1, 3):
        plan = sharded(ShardingSettings(stage)).plan(asked.spec)
        states = state_per_rank(plan, stage_memories(asked.costs, plan))
        state_bytes[stage] = max(state.total for state in states.values())
    assert state_bytes[3] < state_bytes[1] / 2
    tight = replace(asked, memory_bytes=0.75 * state_bytes[1])
    with pytest.raises(ValueError, match="fits"):
        search_plans(replace(tight, zero_stages=(0, 1)))
    best = search_plans(tight).best
    assert max(layout.zero_stage for layout in best.candidate.layouts.values()) >= 2
    assert best.peak_memory_bytes <= 0.75 * state_bytes[1]


def test_a_single_copy_divides_nothing():
    fixed = dict.fromkeys(BOTH, {"dp_size": 1, "cp_size": 1})
    best = search_plans(question(2, 4, fixed=fixed, effort=8)).best
    assert {layout.sharding for layout in best.candidate.layouts.values()} == {ShardingSettings()}


def test_passes_communicate_in_modules_with_one_stage():
    """Over a node only if there are several nodes of copies."""
    seen = set()
    for candidate in CandidateSpace(question()):
        for estimate in candidate.estimates.values():
            kind, copies = estimate.kind, estimate.dp_size * estimate.kind.cp_size
            if kind.shares_passes:
                assert estimate.pp_size == 1 and copies > 1
                assert kind.sharding.shard_size is None or copies % kind.sharding.shard_size == 0
            seen.add((kind.sharding.zero_stage, kind.sharding.shard_size))
    assert {(1, None), (3, None), (3, 4)} <= seen


def test_a_state_above_the_limit_is_divided_over_stages_too():
    asked = replace(question(), sizes=SHORT)
    options = ModuleOptions(asked, LANGUAGE_MODEL)
    whole = float(options.state_bytes(options.plain_kinds[0], 2, dp_size=2))
    found = []
    for limit in (0.9 * whole, 2.0**40):
        estimates = [e for c in CandidateSpace(replace(asked, memory_bytes=limit)) for e in c.estimates.values()]
        found.append({estimate.pp_size for estimate in estimates if estimate.kind.shares_passes})
    assert max(found[0]) > 1 and found[1] == {1}


@pytest.mark.parametrize(
    "sharding", [ShardingSettings(), *(ShardingSettings(stage, size) for stage in (1, 2, 3) for size in (None, 4))]
)
def test_state_and_sums_are_those_of_the_plan(sharding):
    asked, candidate = question(), sharded(sharding)
    plan = candidate.plan(asked.spec)
    memories = stage_memories(asked.costs, plan)
    options = {name: ModuleOptions(asked, name) for name in asked.spec.modules}
    kinds = {name: replace(own.plain_kinds[0], sharding=sharding) for name, own in options.items()}
    held = sum(float(options[name].state_bytes(kind, 1, dp_size=8)) for name, kind in kinds.items())
    expected = sum(memories[name, 0, 0].state.total + memories[name, 0, 0].kept_bytes for name in kinds)
    assert held == pytest.approx(expected)
    groups, batch = sync_groups(asked.spec, plan), asked.sizes.take(range(16))
    step = step_planner(asked, candidate).arrange(range(16), batch).step
    cost = StepCost(asked.costs, plan, step, batch, groups)
    expected = sum(map(cost.sync_ms, range(len(groups)))) + optimizer_ms(asked.costs, plan, groups)
    assert sum(options[name].sync_ms(kind, 8, 1) for name, kind in kinds.items()) == pytest.approx(expected, rel=0.02)


def test_experts_are_shared_where_their_copies_do_not_fit():
    """Weights, gradients and state of 8.6 GB of experts, on ranks with 6 GB."""
    spec = with_experts(ModelSpec({LANGUAGE_MODEL: model_spec().language_model}), 8)
    language = spec.language_model
    parameters = tuple(replace(p, shape=(8, 16384, 1024)) if p.num_experts else p for p in language.parameters)
    spec = replace(spec, modules={LANGUAGE_MODEL: replace(language, parameters=parameters)})
    sizes = SampleSizes.uniform({LANGUAGE_MODEL: 8}, 32)
    costs = analytic_costs(spec, PLAIN)
    fixed = {LANGUAGE_MODEL: {"pp_size": 1, "tp_size": 1, "zero_stage": 0}}
    problem = PlanningProblem(costs, sizes, 4, 16, memory_bytes=6e9, fixed=fixed)
    layout = search_plans(problem).best.candidate.layouts[LANGUAGE_MODEL]
    assert layout.ep_size == 4 == layout.dp_size
    kept = {LANGUAGE_MODEL: {**fixed[LANGUAGE_MODEL], "ep_size": 2}}
    for estimated in CandidateSpace(replace(problem, fixed=kept)):
        assert estimated.estimates[LANGUAGE_MODEL].kind.ep_size == 2


def test_a_search_for_a_mixture_tries_all_sharding():
    """One copy of some experts on more rows than there are copies was divided by."""
    spec = with_experts(ModelSpec({LANGUAGE_MODEL: model_spec().language_model}), 8)
    sizes = SampleSizes.uniform({LANGUAGE_MODEL: 8}, 16)
    problem = PlanningProblem(analytic_costs(spec, PLAIN), sizes, 4, 16, zero_stages=(0, 1, 2, 3))
    assert search_plans(problem).best.candidate.layouts[LANGUAGE_MODEL].num_ranks == 4


def costs_of_experts(peak: float | None) -> CostModel:
    """Costs of a model most of whose work is in its experts, of which the busiest of four ranks may have more."""
    spec = with_experts(ModelSpec({LANGUAGE_MODEL: model_spec().language_model}), 8)
    language = spec.language_model
    parameters = tuple(replace(p, shape=(8, 1024, 1024)) if p.num_experts else p for p in language.parameters)
    costs = analytic_costs(replace(spec, modules={LANGUAGE_MODEL: replace(language, parameters=parameters)}), PLAIN)
    return costs if peak is None else costs.with_expert_peaks({LANGUAGE_MODEL: {2: min(peak, 2.0), 4: peak}})


def test_a_rank_with_busy_experts_sets_the_time_and_not_the_model_flops():
    ranks, batch = {LANGUAGE_MODEL: ((0, 1, 2, 3), False)}, SampleSizes.uniform({LANGUAGE_MODEL: 64}, 16)
    even, uneven = (costs_of_experts(peak).in_layout(ranks) for peak in (None, 3.0))
    forward = [costs.layers.layer(LANGUAGE_MODEL, 1, 1).forward.token for costs in (even, uneven)]
    assert 2 < forward[1] / forward[0] < 3  # all but attention
    whole = [costs_of_experts(peak).layers.layer(LANGUAGE_MODEL, 1, 1) for peak in (None, 3.0)]
    assert whole[0] == whole[1]
    flops = [model_flops(costs.spec.with_mean_experts, batch) for costs in (even, uneven)]
    assert flops[1] == pytest.approx(flops[0])


def test_experts_that_tokens_choose_unevenly_are_not_shared():
    sizes, found = SampleSizes.uniform({LANGUAGE_MODEL: 2048}, 16), {}
    fixed = {LANGUAGE_MODEL: {"pp_size": 1, "tp_size": 1, "cp_size": 1, "zero_stage": 0}}
    device = replace(PLAIN, node_size=4, memory_gib=None)
    for peak in (None, 1.1, 2.0):
        costs = replace(costs_of_experts(peak), device=device)
        problem = PlanningProblem(costs, sizes, 4, 16, fixed=fixed)
        found[peak] = search_plans(problem).best.candidate.layouts[LANGUAGE_MODEL].ep_size
    assert found == {None: 4, 1.1: 4, 2.0: 1}
