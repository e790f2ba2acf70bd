"""What others would do: their own rules, the true costs, the same batches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.cost import analytic_costs, find_device, layer_table
from hf_mmparallel.cost.analytic import module_flops
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.papers.baseline_layouts import FullyShardedLayouts, RatioLayouts, SingleLayouts, even_layers
from hf_mmparallel.papers.compare import (
    DISTTRAIN,
    RATIO,
    REPLICATED,
    SHARDED,
    SINGLE,
    UNAWARE,
    UnawareOptions,
    all_trained,
    compare,
)
from hf_mmparallel.papers.encoders_replicated import ReplicatedEncoders
from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes, check_plan, sync_groups
from hf_mmparallel.search.candidates import CandidateSpace, EstimatedCandidate
from hf_mmparallel.search.options import ModuleOptions, ParallelConfig
from hf_mmparallel.search.problem import PlanningProblem
from hf_mmparallel.search.search import search_plans
from hf_mmparallel.search.simulations import AS_FAST, step_planner
from hf_mmparallel.steps.representatives import predict_batch
from hf_mmparallel.steps.step_planner import StepPlanner
from tests.cost.models import LAYERS, model

NUM_RANKS, BATCH = 8, 16
NAMES = (UNAWARE, SINGLE, SHARDED, DISTTRAIN, RATIO, REPLICATED)


def problem(frozen: tuple[str, ...] = ("vision",), **settings) -> PlanningProblem:
    """Samples whose encoder has about as much to do as the language model."""
    rng = np.random.default_rng(0)
    lengths = {"vision": rng.integers(40_000, 90_000, 64), LANGUAGE_MODEL: rng.integers(30_000, 70_000, 64)}
    sizes = SampleSizes.of_sequences({name: [[int(n)] for n in values] for name, values in lengths.items()})
    given = {"num_ranks": NUM_RANKS, "global_batch_size": BATCH, "effort": 64, **settings}
    return PlanningProblem(analytic_costs(model(frozen), find_device("a40")), sizes, **given)


def quick_search(question: PlanningProblem):
    """An answer with one layout; those of others are not bound by it."""
    fixed = {name: {"tp_size": 1, "cp_size": 1, "dp_size": 2} for name in question.spec.modules}
    return search_plans(replace(question, fixed=fixed, microbatch_size=1, effort=16))


@pytest.fixture(scope="module")
def answer():
    """A question, our plan, and those of others."""
    question = problem()
    result = quick_search(question)
    return question, result, dict(zip(NAMES, compare(question, result), strict=True))


class TestCompare:
    def test_each_is_there_with_its_figures(self, answer):
        _, _, others = answer
        for name, other in others.items():
            assert other.name == name and other.step_ms > 0 and other.layout and other.note
            assert 0 <= other.bubble_fraction < 1 and 0 < other.flops_utilisation < 1 and other.peak_memory_bytes > 0
            assert (other.plan is None) == (name == REPLICATED)

    def test_figures_are_those_of_the_plan_at_the_true_costs(self, answer):
        """Simulated with all ranks and another planner."""
        question, result, others = answer
        for name, arrangement in (
            (UNAWARE, "contiguous"),
            (SINGLE, "contiguous"),
            (SHARDED, "contiguous"),
            (DISTTRAIN, "disttrain"),
            (RATIO, "contiguous"),
        ):
            plan = others[name].plan
            dp_size = plan.modules[LANGUAGE_MODEL].dp_size
            size = -(-BATCH // (dp_size * plan.num_microbatches))
            groups = sync_groups(question.spec, plan)
            times, peaks = [], []
            for known in result.best.predictions:
                planner = StepPlanner(
                    question.costs, plan, groups, size, arrangement, sizes=lambda _, own=known: own.sizes
                )
                prediction = planner.predict(planner(GlobalBatch(known.planned.step.samples)))
                times.append(prediction.step_ms)
                peaks.append(prediction.peak_memory_bytes)
            assert others[name].step_ms == pytest.approx(np.mean(times))
            assert others[name].peak_memory_bytes == pytest.approx(max(peaks))

    def test_all_have_all_ranks(self, answer):
        _, _, others = answer
        assert others[UNAWARE].plan.world_size == others[SINGLE].plan.world_size == NUM_RANKS
        assert others[DISTTRAIN].plan.world_size <= NUM_RANKS

    @pytest.mark.deep
    def test_too_little_memory_is_told(self):
        """Our own plan is for more memory than the others are then judged by."""
        question = problem()
        for other in compare(replace(question, memory_bytes=2.0**24), quick_search(question)):
            assert "GiB more than a rank has" in other.note
            gib = float(other.note.partition("needs ")[2].split()[0])
            assert gib > 0
            if other.step_ms > 0:
                assert gib == pytest.approx(other.peak_memory_gib - 2**-6, rel=0.01)


class TestUnaware:
    def test_costs_are_those_of_a_trained_model(self):
        question = problem(("vision", LANGUAGE_MODEL))
        assumed = question.costs.with_spec(all_trained(question.spec))
        for name in question.spec.modules:
            aware, unaware = ModuleOptions(question, name), UnawareOptions(question, name, assumed)
            kind = aware.kinds[0]
            table = layer_table(assumed, name)
            alone, padded = ((*aware.microbatches.sizes(1, 2.0, padded)[:2],) for padded in (False, True))
            assert alone[0] == pytest.approx(2 * aware.tokens) and padded[0] >= alone[0]
            assert unaware.layer_ms(kind, 2.0, padded=False) == pytest.approx(table.step_ms(*alone))
            assert unaware.layer_ms(kind, 2.0) == pytest.approx(table.step_ms(*padded))
            assert unaware.layer_ms(kind, 2.0).sum() > aware.layer_ms(kind, 2.0).sum()
            assert unaware.state_bytes(kind, 1) == aware.state_bytes(kind, 1)

    def test_nothing_changes_where_nothing_is_frozen(self):
        question = problem(())
        assert all_trained(question.spec) == question.spec

    def test_a_frozen_encoder_gets_too_many_stages(self):
        """Of six, on which four layers of each module can only be on ranks of their own."""
        never = {"vision": False, LANGUAGE_MODEL: False}
        question = problem(num_ranks=6, global_batch_size=15, microbatch_size=1, checkpointing=never)
        fixed = {name: {"tp_size": 1, "cp_size": 1, "dp_size": 1} for name in question.spec.modules}
        aware = search_plans(replace(question, fixed=fixed)).best.candidate.layouts
        assumed = replace(question, costs=question.costs.with_spec(all_trained(question.spec)), fixed=fixed)
        unaware = search_plans(assumed).best.candidate.layouts
        assert aware["vision"].pp_size < unaware["vision"].pp_size


class TestRatioBased:
    def test_ranks_are_in_proportion_to_operations(self):
        question = problem(())
        layouts = RatioLayouts(question)
        assert set(layouts.work) == set(question.spec.modules)
        for name, work in layouts.work.items():
            per_token, per_square = module_flops(question.spec, name)
            tokens, squares = (float(own[name].mean()) for own in (question.sizes.tokens, question.sizes.squares))
            forward = per_token * tokens + per_square * squares
            assert 2.5 * forward < work <= 3 * forward  # the first layer needs no gradient of its input
        share = layouts.work["vision"] / sum(layouts.work.values())
        for dp_size in (1, 2, 4):
            ranks = layouts.ranks(dp_size)
            assert sum(ranks.values()) == NUM_RANKS and all(count % dp_size == 0 for count in ranks.values())
            nearest = min(range(1, NUM_RANKS // dp_size), key=lambda own: abs(own - share * NUM_RANKS / dp_size))
            assert ranks["vision"] == dp_size * nearest
        assert layouts.ranks(8) == {} and layouts.ranks(3) == {}

    def test_a_frozen_module_has_a_smaller_share(self):
        frozen, trained = (RatioLayouts(problem(names)) for names in (("vision",), ()))
        assert frozen.work["vision"] < trained.work["vision"] / 2.5
        assert frozen.ranks(1)["vision"] < trained.ranks(1)["vision"]

    def test_every_module_has_the_ranks_of_its_share(self):
        layouts = RatioLayouts(problem())
        found = list(layouts)
        assert len(found) > 20
        for own in found:
            candidate = layouts.candidate(own)
            dp_size = candidate.layouts[LANGUAGE_MODEL].dp_size
            assert {n: layout.num_ranks for n, layout in candidate.layouts.items()} == layouts.ranks(dp_size)
            assert not candidate.colocated_with
            for layout in candidate.layouts.values():
                assert layout.layers == even_layers(LAYERS, layout.pp_size)


class TestReplicated:
    @pytest.mark.parametrize("frozen", [("vision",), (), (LANGUAGE_MODEL,)], ids=str)
    def test_each_stage_runs_the_encoder_again(self, frozen):
        """Sixteen samples of one size, each a microbatch: all ranks together run the encoder once for each stage."""
        question = problem(frozen, checkpointing={"vision": False, LANGUAGE_MODEL: False})
        tokens = {"vision": 60_000, LANGUAGE_MODEL: 50_000}
        question = replace(question, sizes=SampleSizes.uniform(tokens, BATCH))
        module_ms = {}
        for name, count in tokens.items():
            table = layer_table(question.costs, name)
            module_ms[name] = float(((table.forward + table.backward) @ [count**2, count, 1.0]).sum())
        layouts = ReplicatedEncoders(question)
        stages = set()
        for own in layouts:
            if own.layout.tp_size == 1 and own.num_microbatches * own.layout.dp_size == BATCH:
                stages.add(own.layout.pp_size)
                found = layouts.step(own, [question.sizes])
                busy_ms = found.step_ms * (1 - found.bubble_fraction) * NUM_RANKS
                again = own.layout.pp_size * module_ms["vision"]
                constants = 0.02  # the reading of weights, which a stage does once and a model once, too
                assert busy_ms == pytest.approx(BATCH * (module_ms[LANGUAGE_MODEL] + again), rel=constants)
                assert found.step_ms >= own.estimate_ms * (1 - constants)
        assert stages == {2, 4}

    def test_its_memory_is_the_language_model_s_and_all_of_the_encoders(self):
        question = problem()
        layouts = ReplicatedEncoders(question)
        batch = question.batches[0]
        for own in itertools.islice(layouts, 0, None, 7):
            kind = ParallelConfig(1, own.layout.tp_size, False)
            least = layouts.options["vision"].state_bytes(kind, 1)
            least += layouts.options[LANGUAGE_MODEL].state_bytes(kind, own.layout.pp_size)
            assert layouts.step(own, [batch]).memory_bytes > 0.9 * least


class TestSingleLayout:
    def test_even_layers(self):
        assert even_layers(10, 4) == (3, 3, 2, 2) and even_layers(4, 4) == (1, 1, 1, 1)

    def test_one_layout_for_all(self):
        layouts = SingleLayouts(problem())
        found = list(layouts)
        assert found
        for own in found:
            candidate = layouts.candidate(own)
            vision, language = candidate.layouts["vision"], candidate.layouts[LANGUAGE_MODEL]
            assert (vision.dp_size, vision.tp_size) == (language.dp_size, language.tp_size)
            assert vision.layers == even_layers(LAYERS, vision.pp_size)
            assert candidate.num_ranks == NUM_RANKS
            assert bool(candidate.colocated_with) == (language.num_ranks == NUM_RANKS)
        recomputed = {tuple(c.kind.checkpointing for c in own.estimates.values()) for own in found}
        assert recomputed == {(False, False), (False, True)}  # a frozen encoder has nothing to recompute for

    def test_the_best_division_is_there(self):
        """Exhaustively: layers cut evenly, every number of stages of the encoder."""
        layouts = SingleLayouts(problem(checkpointing={"vision": False, LANGUAGE_MODEL: False}))
        found = [
            own for own in layouts if own.estimates["vision"].pp_size + own.estimates[LANGUAGE_MODEL].pp_size == 4
        ]
        for key in {(own.estimates["vision"].kind, own.num_microbatches) for own in found}:
            same = [own for own in found if (own.estimates["vision"].kind, own.num_microbatches) == key]
            kind, count = key
            samples = same[0].estimates["vision"].num_samples
            times = {name: layouts.options[name].layer_ms(kind, samples) for name in layouts.options}
            every = []
            for stages in ((1, 3), (2, 2), (3, 1)):
                slowest = 0.0
                for values, number in zip(times.values(), stages, strict=True):
                    ends = list(itertools.accumulate(even_layers(LAYERS, number), initial=0))
                    slowest = max(slowest, *(values[a:b].sum() for a, b in itertools.pairwise(ends)))
                every.append(sum(values.sum() for values in times.values()) + (count - 1) * slowest)
            assert min(own.step_ms for own in same) == pytest.approx(min(every))


class TestFullySharded:
    def test_ways_to_run_it(self):
        """Parameters over a node or all ranks, one or two microbatches, with and without recomputation."""
        question = problem()
        found = list(FullyShardedLayouts(question))
        ways = {(own.layouts["vision"].shard_size, own.num_microbatches, own.layouts[LANGUAGE_MODEL]) for own in found}
        assert len(ways) == len(found) == 8
        for own in found:
            assert own.num_ranks == NUM_RANKS and own.colocated_with == {"vision": LANGUAGE_MODEL}
            assert len({replace(layout, layers=()) for layout in own.layouts.values()}) == 1
            layout = own.layouts[LANGUAGE_MODEL]
            assert (layout.dp_size, layout.zero_stage) == (NUM_RANKS, 3) and layout.shard_size in (None, 4)
            check_plan(own.plan(question.spec), question.spec)
        assert {own.layouts[LANGUAGE_MODEL].activation_checkpointing for own in found} == {False, True}

    def test_ranks_that_do_not_divide_the_batch_have_none(self):
        assert not list(FullyShardedLayouts(problem(num_ranks=6)))
        assert not list(FullyShardedLayouts(problem(num_ranks=1)))

    def test_settings_of_recomputation_hold(self):
        for given in ({"vision": True, LANGUAGE_MODEL: True}, {LANGUAGE_MODEL: False}):
            for own in FullyShardedLayouts(problem(checkpointing=given)):
                for name, recomputed in given.items():
                    assert own.layouts[name].activation_checkpointing == recomputed

    def test_it_is_simulated_like_all_others(self, answer):
        question, result, others = answer
        candidate = others[SHARDED].candidate
        planner = step_planner(question, candidate)
        times = [predict_batch(planner, known.sizes).step_ms for known in result.best.predictions]
        assert candidate.arrangement == "contiguous"
        assert others[SHARDED].step_ms == pytest.approx(np.mean(times))

    def test_slow_links_cost_time_and_no_memory(self):
        slow = replace(find_device("a40"), node_link_gb_per_s=0.001)
        question = problem()
        slower = replace(question, costs=replace(question.costs, device=slow))
        batch = question.batches[0]
        for own in FullyShardedLayouts(question):
            fast, found = (predict_batch(step_planner(asked, own), batch) for asked in (question, slower))
            assert found.step_ms > fast.step_ms and found.peak_memory_bytes == fast.peak_memory_bytes

    def test_fewer_microbatches_gather_less_often(self):
        question = problem()
        batch = question.batches[0]
        steps = {
            (own.layouts[LANGUAGE_MODEL].shard_size, own.num_microbatches): predict_batch(
                step_planner(question, own), batch
            )
            for own in FullyShardedLayouts(replace(question, costs=replace(question.costs, packing=True)))
            if not own.layouts[LANGUAGE_MODEL].activation_checkpointing
        }
        assert steps[None, 2].peak_memory_bytes < steps[4, 2].peak_memory_bytes < steps[4, 1].peak_memory_bytes


def of_search(estimated: EstimatedCandidate) -> tuple:
    """What makes a candidate, but for what copies divide where no pass communicates."""
    sizes = (
        (own.dp_size, own.pp_size, own.kind.cp_size, own.kind.tp_size, own.kind.checkpointing)
        + ((own.kind.sharding,) if own.kind.shares_passes else ())
        for own in estimated.estimates.values()
    )
    return estimated.num_microbatches, tuple(estimated.colocated_with.items()), tuple(sizes)


def test_layouts_of_others_are_candidates_of_the_search():
    """Fully sharded, and one layout for all modules."""
    question = problem((), num_ranks=4, global_batch_size=8, zero_stages=(0, 1, 3))
    candidates = {of_search(own) for own in CandidateSpace(question)}
    assert {of_search(own) for own in SingleLayouts(question)} <= candidates
    sharded = {
        (
            own.num_microbatches,
            tuple(own.colocated_with.items()),
            tuple((own.dp_size, 1, 1, 1, own.activation_checkpointing, own.sharding) for own in own.layouts.values()),
        )
        for own in FullyShardedLayouts(question)
    }
    assert sharded and sharded <= candidates


def assert_none_is_faster(question: PlanningProblem) -> None:
    """The search is as fast as all that it is compared with."""
    result = search_plans(question)
    for other in compare(question, result):
        assert not other.step_ms * AS_FAST < result.best.step_ms, (other, result.best.candidate)


def test_nothing_is_faster_than_the_search():
    assert_none_is_faster(problem(num_ranks=2, global_batch_size=4, microbatch_size=1, zero_stages=(0, 3), effort=8))


@pytest.mark.deep
def test_nothing_is_ahead_of_the_search_by_any_time():
    question = problem((), zero_stages=(0, 1, 2, 3))
    result = search_plans(question)
    for other in compare(question, result):
        assert not other.step_ms < result.best.step_ms, (other, result.best.candidate)


@pytest.mark.deep
@pytest.mark.parametrize("frozen", [(), ("vision",), (LANGUAGE_MODEL,)], ids=str)
@pytest.mark.parametrize("ranks", [6, 8, 16])
@pytest.mark.parametrize("short", [1, 50])
def test_nothing_is_faster_than_the_search_of_other_problems(frozen, ranks, short):
    question = problem(frozen, num_ranks=ranks, global_batch_size=48, zero_stages=(0, 1, 2, 3))
    tokens = {name: [[int(n) // short] for n in own] for name, own in question.sizes.tokens.items()}
    assert_none_is_faster(replace(question, sizes=SampleSizes.of_sequences(tokens)))


@pytest.mark.deep
def test_ratio_of_samples_without_media_is_no_plan():
    question = problem()
    text = question.sizes.tokens[LANGUAGE_MODEL]
    lengths = {"vision": [[] for _ in text], LANGUAGE_MODEL: [[int(n)] for n in text]}
    question = replace(question, sizes=SampleSizes.of_sequences(lengths))
    rows = dict(zip(NAMES, compare(question, quick_search(question)), strict=True))
    assert rows[RATIO].plan is None and rows[RATIO].note == "no sample has work for `vision`"
    assert rows[SINGLE].step_ms > 0
