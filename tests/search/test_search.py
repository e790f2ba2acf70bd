"""The search against exhaustive search, its answers against the rules of the engine, and what changes them."""

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.cost import analytic_costs, find_device, layer_table
from hf_mmparallel.cost.memory import state_per_rank
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes, ShardingSettings, check_plan, sync_groups
from hf_mmparallel.search.candidates import CandidateSpace
from hf_mmparallel.search.explain import reason_for
from hf_mmparallel.search.options import divisors
from hf_mmparallel.search.partition import partition_all
from hf_mmparallel.search.problem import Candidate, Layout, PlanningProblem, RankedPlan
from hf_mmparallel.search.search import search_plans
from hf_mmparallel.search.simulations import AS_FAST, in_order, step_planner
from hf_mmparallel.steps.representatives import on_all_ranks, predict_batch
from tests.cost.models import LAYERS, PLAIN, model, module
from tests.deep_cases import deep

FROZEN = [(), ("vision",), (LANGUAGE_MODEL,), ("vision", LANGUAGE_MODEL)]


def sizes_of(count: int, seed: int, modules=("vision", LANGUAGE_MODEL), spread: float = 0.6) -> SampleSizes:
    rng = np.random.default_rng(seed)
    lengths = {name: np.rint(400 * np.exp(spread * rng.standard_normal(count))) + 1 for name in modules}
    return SampleSizes.of_sequences({name: [[int(n)] for n in own] for name, own in lengths.items()})


def problem_of(num_ranks: int, batch: int, frozen=(), seed: int = 0, device=PLAIN, **settings) -> PlanningProblem:
    spec = settings.pop("spec", None) or model(frozen)
    settings.setdefault("zero_stages", (0,))
    sizes = sizes_of(3 * batch, seed, tuple(spec.modules))
    device = find_device(device) if isinstance(device, str) else device
    return PlanningProblem(analytic_costs(spec, device), sizes, num_ranks, batch, **settings)


def longest_first(times: list[float], parts: int) -> float:
    """The largest part over the mean."""
    loads = [0.0] * parts
    for time in sorted(times, reverse=True):
        loads[loads.index(min(loads))] += time
    return max(loads) * parts / sum(loads)


class Exhaustive:
    """The closed form of every layout of every module, by plain loops."""

    def __init__(self, problem: PlanningProblem):
        self.problem = problem
        self.batch = problem.batches[0]
        self.pads = not problem.costs.packs_rows

    def padding(self, name: str, parts: int) -> tuple[float, float]:
        """Tokens and squared tokens of a batch in so many microbatches, in its order, over those of its samples."""
        lengths = self.batch.tokens[LANGUAGE_MODEL].tolist()
        if name != LANGUAGE_MODEL or not self.pads or parts >= len(lengths):
            return 1.0, 1.0
        tokens = squares = 0.0
        for part in np.array_split(lengths, parts):
            tokens += len(part) * max(part)
            squares += len(part) * max(part) ** 2 * (2 if max(part) > min(part) else 1)  # a dense mask hides nothing
        return tokens / sum(lengths), squares / sum(n * n for n in lengths)

    def module(self, name: str, dp: int, pp: int, tp: int, again: bool, count: int) -> tuple[float, float]:
        """Bottleneck and fill."""
        problem, part = self.problem, self.problem.spec.modules[name]
        samples = problem.global_batch_size / dp / count
        tokens, squares = (float(own[name].mean()) for own in (problem.sizes.tokens, problem.sizes.squares))
        pads, masks = self.padding(name, dp * count)
        layers = layer_table(problem.costs, name, tp, again).step_ms(
            samples * tokens * pads, samples * squares * masks
        )
        whole = layer_table(problem.costs, name)

        def times(parts: int) -> list[float]:
            dense = 2.0 if name == LANGUAGE_MODEL and self.pads and parts < problem.global_batch_size else 1.0
            return np.add(*whole.sample_ms(self.batch.tokens[name], dense * self.batch.squares[name])).tolist()

        device, trained = problem.costs.device, sum(p.num_elements for p in part.parameters if p.trainable)
        link = device.link_bytes_per_ms(range(0, dp * pp * tp, pp * tp))
        sums = 2 * (dp - 1) / dp * 4 * trained / pp / tp / link
        # Master weights and two moments are read and written in four bytes, weights written in two, gradients moved
        # five times in four.
        sums += trained * (3 * 2 * 4 + 2 + 5 * 4) / pp / tp / device.memory_bytes_per_ms
        slowest = partition_all(layers, pp).partition(pp).slowest_stage_ms
        bottleneck = longest_first(times(dp), dp) * slowest
        uneven = longest_first(times(dp * count), dp * count)
        first = bottleneck if samples >= 1 else uneven * slowest
        return bottleneck, first + uneven * (float(layers.sum()) - slowest) + sums

    def best_ms(self) -> float:
        problem, batch = self.problem, self.problem.global_batch_size
        names = [name for name in problem.spec.modules if name != LANGUAGE_MODEL]
        sizes = [
            (dp, pp, tp, again)
            for dp, pp, tp in itertools.product(divisors(batch), range(1, LAYERS + 1), (1, 2, 4))
            for again in (False, True)
            if dp * pp * tp <= problem.num_ranks
        ]
        best = float("inf")
        for own in sizes:
            for count in divisors(batch // own[0]):
                language = self.module(LANGUAGE_MODEL, *own, count)
                fitting = [s for s in sizes if s[0] % own[0] == 0 or own[0] % s[0] == 0]
                for others in itertools.product(fitting, repeat=len(names)):
                    found = [self.module(name, *s, count) for name, s in zip(names, others, strict=True)]
                    ranks = [int(np.prod(s[:3])) for s in others]
                    for time in self.placed(language, int(np.prod(own[:3])), found, ranks, count):
                        best = min(best, time)
        return best

    def placed(self, language, own_ranks, found, ranks, count):
        """The step with each encoder on its own ranks or the language model's, or all encoders together."""
        total = self.problem.num_ranks
        for shared in itertools.product((False, True), repeat=len(found)):
            if any(there and r != own_ranks for there, r in zip(shared, ranks, strict=True)):
                continue
            if own_ranks + sum(r for there, r in zip(shared, ranks, strict=True) if not there) != total:
                continue
            inside = [own for there, own in zip(shared, found, strict=True) if there]
            beside = [own for there, own in zip(shared, found, strict=True) if not there]
            busy = language[0] + sum(own[0] for own in inside)
            fill = language[1] + sum(own[1] for own in inside) + max((own[1] for own in beside), default=0.0)
            yield fill + (count - 1) * max([busy, *(own[0] for own in beside)])
        if len(found) > 1 and len(set(ranks)) == 1 and own_ranks + ranks[0] == total:
            busy, fill = (sum(own[place] for own in found) for place in (0, 1))
            yield language[1] + fill + (count - 1) * max(language[0], busy)


@settings(max_examples=12)
@given(st.integers(1, 6), st.sampled_from([2, 4, 6, 12]), st.sampled_from(FROZEN), st.integers(0, 9), st.booleans())
def test_the_best_estimate_is_that_of_exhaustive_search(ranks, batch, frozen, seed, packing):
    problem = problem_of(ranks, batch, frozen, seed, arrangement="contiguous")
    problem = replace(problem, costs=replace(problem.costs, packing=packing))
    found = min((own.step_ms for own in CandidateSpace(problem)), default=float("inf"))
    assert found == pytest.approx(Exhaustive(problem).best_ms(), rel=1e-9)


def test_two_encoders_are_divided_as_exhaustive_search_does():
    spec = model(("audio",))
    spec = replace(spec, modules={"audio": module("audio", True), **spec.modules})
    problem = problem_of(3, 2, spec=spec, checkpointing=dict.fromkeys(spec.modules, False), arrangement="contiguous")
    exhaustive = Exhaustive(problem)
    whole = exhaustive.module
    exhaustive.module = lambda name, dp, pp, tp, again, count: (
        whole(name, dp, pp, tp, False, count) if not again else (1e9, 1e9)
    )
    found = min(own.step_ms for own in CandidateSpace(problem))
    assert found == pytest.approx(exhaustive.best_ms(), rel=1e-9)


CANDIDATES = [
    Candidate({"vision": Layout((4,), 2), LANGUAGE_MODEL: Layout((1, 3), 2, 1, 2)}, {}, 4),
    Candidate({"vision": Layout((2, 2), 1, 1, 2), LANGUAGE_MODEL: Layout((4,), 1, 2, 2)}, {}, 2),
    Candidate({"vision": Layout((4,), 4), LANGUAGE_MODEL: Layout((2, 2), 1, 1, 2)}, {"vision": LANGUAGE_MODEL}, 4),
    Candidate({"vision": Layout((1, 3), 2, 1, 2, True), LANGUAGE_MODEL: Layout((4,), 4, 1, 2)}, {}, 2),
]


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_one_rank_stands_for_all_that_run_the_same_list(candidate):
    problem = problem_of(candidate.num_ranks, 16)
    planner = step_planner(problem, candidate)
    check_plan(planner.plan, problem.spec)
    batch = problem.batches[1]
    few = predict_batch(planner, batch)
    all_of_them = replace(planner, sizes=lambda _: batch)
    whole = all_of_them.predict(all_of_them(GlobalBatch(tuple(range(16)))))
    assert few.step_ms == pytest.approx(whole.step_ms)
    assert few.memory == whole.memory and few.flops_utilisation == pytest.approx(whole.flops_utilisation)
    assert len(few.simulation.busy_ms) <= len(whole.simulation.busy_ms)
    expanded, simulated = on_all_ranks(few).simulation.sums, whole.simulation.sums
    assert [(s.rank, pytest.approx(s.start_ms), pytest.approx(s.end_ms)) for s in expanded] == [
        (s.rank, s.start_ms, s.end_ms) for s in simulated
    ]


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_which_rank_of_a_node_is_which_does_not_matter(candidate):
    problem = problem_of(candidate.num_ranks, 16)
    one_node = replace(problem.costs.device, node_size=candidate.num_ranks)
    problem = replace(problem, costs=analytic_costs(problem.spec, one_node))
    planner = step_planner(problem, candidate)
    number = np.random.default_rng(5).permutation(candidate.num_ranks).tolist()

    def renumbered(stage):
        return replace(stage, mesh=tuple(tuple(number[rank] for rank in row) for row in stage.mesh))

    modules = {
        name: replace(own, replicas=tuple(tuple(map(renumbered, stages)) for stages in own.replicas))
        for name, own in planner.plan.modules.items()
    }
    plan = replace(planner.plan, modules=modules)
    other = replace(planner, plan=plan, sync_groups=sync_groups(problem.spec, plan))
    batch = problem.batches[1]
    found = [predict_batch(own, batch) for own in (planner, other)]
    assert found[1].step_ms == pytest.approx(found[0].step_ms)
    assert {number[rank]: memory for rank, memory in found[0].memory.items()} == found[1].memory


@pytest.mark.parametrize("frozen", [deep(own, unless=own == ("vision",)) for own in FROZEN])
def test_answers_keep_to_the_rules_of_the_engine(frozen):
    problem = problem_of(6, 6, frozen, memory_bytes=2e9)
    result = search_plans(problem)
    plans = [result.best, *result.runners_up]
    assert len(result.runners_up) == len(result.reasons) <= 3
    assert plans == in_order(plans)
    assert result.best.step_ms <= AS_FAST * min(plan.step_ms for plan in plans)
    for plan in plans:
        check_plan(plan.plan, problem.spec)
        assert plan.plan.world_size == 6
        assert max(own.peak_memory_bytes for own in plan.predictions) <= 2e9
        assert sync_groups(problem.spec, plan.plan) == list(step_planner(problem, plan.candidate).sync_groups)
        assert plan.bound


def test_figures_of_answers_are_those_of_all_ranks():
    problem = problem_of(6, 12, fixed={LANGUAGE_MODEL: {"tp_size": 4}, "vision": {"tp_size": 1}})
    best = search_plans(problem).best
    batch = best.typical.sizes
    planner = replace(step_planner(problem, best.candidate), sizes=lambda _: batch)
    whole = planner.predict(planner(GlobalBatch(tuple(range(12))))).simulation
    found = best.typical.simulation
    assert found.busy_ms == pytest.approx(whole.busy_ms) and found.bubble_fraction == pytest.approx(
        whole.bubble_fraction
    )
    busiest = max(whole.busy_ms.values())
    named = int(re.findall(r"The busiest rank, (\d+)", best.bound)[0])
    assert whole.busy_ms[named] == pytest.approx(busiest)
    assert f"computes {busiest / whole.iteration_ms:.0%} of" in best.bound


def test_plans_that_are_as_fast_differ_in_memory():
    sizes = sizes_of(8, 0)
    tokens, squares = ({**own, "vision": 0 * own["vision"]} for own in (sizes.tokens, sizes.squares))
    result = search_plans(replace(problem_of(4, 8), sizes=SampleSizes(tokens, squares)))
    assert result.reasons and not any(reason.startswith("0.0%") for reason in result.reasons)
    for plan, reason in zip(result.runners_up, result.reasons, strict=True):
        if reason.startswith("As fast"):
            assert plan.prediction.peak_memory_bytes >= result.best.prediction.peak_memory_bytes


@pytest.mark.parametrize("seed", [0, deep(1), deep(2)])
def test_plans_fit_each_of_their_batches(seed):
    roomy = search_plans(problem_of(2, 4, seed=seed)).best
    peaks = sorted(own.peak_memory_bytes for own in roomy.predictions)
    tight = search_plans(problem_of(2, 4, seed=seed, memory_bytes=(peaks[0] + peaks[1]) / 2))
    for plan in (tight.best, *tight.runners_up):
        assert len(plan.predictions) == 3


def test_a_device_that_is_twice_as_slow_gets_the_same_plan():
    problem = problem_of(2, 8)
    device = problem.costs.device
    slow = replace(
        device,
        bf16_tflops=device.bf16_tflops / 2,
        link_gb_per_s=device.link_gb_per_s / 2,
        memory_gb_per_s=device.memory_gb_per_s / 2,
        node_link_gb_per_s=device.node_link_gb_per_s / 2,
    )
    answers = [search_plans(own) for own in (problem, replace(problem, costs=analytic_costs(problem.spec, slow)))]
    assert answers[0].best.plan == answers[1].best.plan
    assert answers[1].best.step_ms == pytest.approx(2 * answers[0].best.step_ms)
    assert answers[1].best.prediction.flops_utilisation == pytest.approx(answers[0].best.prediction.flops_utilisation)


def test_sizes_that_are_set_are_kept():
    fixed = {LANGUAGE_MODEL: {"tp_size": 2, "pp_size": 2}, "vision": {"dp_size": 2}}
    best = search_plans(problem_of(6, 8, fixed=fixed, microbatch_size=1)).best
    assert best.plan.modules[LANGUAGE_MODEL].tp_size == 2 and len(best.plan.modules[LANGUAGE_MODEL].replicas[0]) == 2
    assert best.plan.modules["vision"].dp_size == 2
    assert best.microbatch_size == 1


def test_recomputation_where_memory_asks_for_it():
    roomy = search_plans(problem_of(2, 8)).best
    assert not any(layout.activation_checkpointing for layout in roomy.candidate.layouts.values())
    needed = roomy.prediction.peak_memory_bytes
    tight = search_plans(problem_of(2, 8, memory_bytes=0.5 * needed)).best
    assert tight.prediction.peak_memory_bytes <= 0.5 * needed
    assert tight.step_ms > roomy.step_ms


def test_a_model_that_fits_no_plan_says_by_how_much_and_what_helps():
    with pytest.raises(ValueError, match=r"No plan for 2 x h100 fits: .*GiB more than.*(ranks|checkpointing)"):
        search_plans(problem_of(2, 8, memory_bytes=5e6, offloads=False))
    with pytest.raises(ValueError, match=r"No layout .* 3 x h100 .*language_model tp_size=3"):
        search_plans(problem_of(3, 8, fixed={LANGUAGE_MODEL: {"tp_size": 3}}))


def with_a_large_sample(problem: PlanningProblem) -> PlanningProblem:
    """The problem with one long text in each batch, in memory that all others fit but not this one."""
    tokens, squares = (
        {name: own[:8].copy() for name, own in d.items()} for d in (problem.sizes.tokens, problem.sizes.squares)
    )
    best = search_plans(replace(problem, sizes=SampleSizes(tokens, squares))).best
    tokens[LANGUAGE_MODEL][3], squares[LANGUAGE_MODEL][3] = 40_000, 40_000.0**2
    return replace(problem, sizes=SampleSizes(tokens, squares), memory_bytes=2 * best.peak_memory_bytes)


def test_a_sample_that_no_plan_has_room_for_gets_a_microbatch_of_its_own_and_the_plan_says_so():
    """As training does, which warns and goes on."""
    problem = with_a_large_sample(problem_of(1, 8))
    best = search_plans(problem).best
    assert best.peak_memory_bytes > (problem.memory_bytes or 0)
    assert re.search(
        r"samples of up to 40,000 tokens in `language_model`, where a microbatch may have [\d,]+:", best.bound
    )
    workloads = best.prediction.planned.workloads
    for name, limit in workloads.token_limits.items():
        for replica in best.prediction.planned.step.microbatches[name]:
            for batch_indices in replica:
                assert len(batch_indices) == 1 or workloads.tokens[name][list(batch_indices)].sum() <= limit
    with pytest.raises(ValueError, match="fits"):  # the sampler's order keeps to no limit
        search_plans(replace(problem, arrangement="contiguous", microbatch_size=8))


def test_state_that_does_not_fit_is_refused_however_large_samples_are():
    problem = with_a_large_sample(problem_of(1, 8))
    candidate = search_plans(problem).best.candidate
    plan = candidate.plan(problem.spec)
    state = max(own.total for own in state_per_rank(plan, stage_memories(problem.costs, plan)).values())
    with pytest.raises(ValueError, match="fits"):
        search_plans(replace(problem, memory_bytes=0.98 * state))


def test_a_plan_that_fits_comes_before_one_that_a_large_sample_exceeds():
    problem = with_a_large_sample(problem_of(1, 8))
    leanest = search_plans(problem).best.peak_memory_bytes
    roomy = search_plans(replace(problem, memory_bytes=1.2 * leanest)).best
    assert roomy.peak_memory_bytes <= 1.2 * leanest and "microbatch of its own" not in roomy.bound


def ranked(step_ms: float, peak: float, candidate: Candidate | None = None) -> RankedPlan:
    """A plan with a step and a peak."""
    prediction = SimpleNamespace(step_ms=step_ms, peak_memory_bytes=peak)
    return RankedPlan(candidate or CANDIDATES[0], None, (prediction,), step_ms)  # type: ignore[arg-type]


def test_of_plans_that_are_as_fast_the_leanest_comes_first():
    fat, lean, slow = ranked(1000.0, 71.1), ranked(1004.0, 54.5), ranked(1006.0, 10.0)
    assert in_order([slow, fat, lean]) == [lean, fat, slow]
    assert in_order([ranked(1000.0, 71.1), ranked(1005.1, 54.5)])[0].step_ms == 1000.0
    assert reason_for(lean, ranked(1000.0, 71.1 * 2**30)).startswith("0.4% faster: its fullest rank needs 71.1 GiB")


def test_of_plans_that_are_as_fast_the_one_with_the_smallest_sharding_group_comes_first():
    def sharded(step_ms: float, peak: float, sharding: ShardingSettings) -> RankedPlan:
        layout = Layout((4,), 4096, sharding=sharding)
        return ranked(step_ms, peak, Candidate({"vision": layout, LANGUAGE_MODEL: layout}, {"vision": LANGUAGE_MODEL}))

    everywhere, in_nodes = (sharded(1000.0 + size, 50.0 + size, ShardingSettings(3, size or None)) for size in (0, 4))
    plain = sharded(1000.0, 70.0, ShardingSettings())
    assert in_order([everywhere, plain, in_nodes]) == [in_nodes, everywhere, plain]
    assert reason_for(in_nodes, everywhere) == "0.4% faster: copies are divided among 4,096 ranks instead of 4."
    assert in_order([everywhere, sharded(1006.0, 40.0, ShardingSettings(3, 4))])[0] == everywhere
