"""What others would do: their own rules, the true costs, the same batches."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.cost import analytic_costs, find_device, layer_table
from hf_mmparallel.cost.analytic import module_flops
from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.papers.baseline_layouts import (
    FullyShardedLayouts,
    RatioLayouts,
    ReplicatedEncoders,
    SingleLayouts,
    even_layers,
)
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
from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes, check_plan, sync_groups
from hf_mmparallel.planning.options import ModuleOptions
from hf_mmparallel.planning.problem import PlanningProblem
from hf_mmparallel.planning.search import search_plans
from hf_mmparallel.planning.simulations import AS_FAST
from tests.cost.models import LAYERS, model
from tests.deep_cases import deep

NUM_RANKS, BATCH = 8, 16
NAMES = (UNAWARE, SINGLE, SHARDED, DISTTRAIN, RATIO, REPLICATED)
NEVER = {"vision": False, LANGUAGE_MODEL: False}


def problem(frozen: tuple[str, ...] = ("vision",), short: int = 1, **settings) -> PlanningProblem:
    """Samples whose encoder has about as much to do as the language model; their lengths may be divided by `short`."""
    rng = np.random.default_rng(0)
    lengths = {"vision": rng.integers(40_000, 90_000, 64), LANGUAGE_MODEL: rng.integers(30_000, 70_000, 64)}
    sizes = SampleSizes.of_sequences({name: [[int(n) // short] for n in values] for name, values in lengths.items()})
    given = {"num_ranks": NUM_RANKS, "global_batch_size": BATCH, "effort": 64, **settings}
    return PlanningProblem(analytic_costs(model(frozen), find_device("a40")), sizes, **given)


def quick_search(question: PlanningProblem):
    """An answer with one layout; those of others are not bound by it."""
    fixed = {name: {"tp_size": 1, "cp_size": 1, "dp_size": 2} for name in question.spec.modules}
    return search_plans(replace(question, fixed=fixed, microbatch_size=1, effort=16))


@pytest.fixture(scope="module")
def answer():
    """A question, our plan, and those of others."""
    question = problem(num_ranks=4, global_batch_size=8, effort=8)
    result = quick_search(question)
    return question, result, dict(zip(NAMES, compare(question, result), strict=True))


def test_each_is_there_with_its_figures_and_all_ranks(answer):
    question, _, others = answer
    for name, other in others.items():
        assert other.name == name and other.step_ms > 0 and other.layout and other.note
        assert 0 <= other.bubble_fraction < 1 and 0 < other.flops_utilisation < 1 and other.peak_memory_bytes > 0
        assert (other.plan is None) == (name == REPLICATED)
    assert others[UNAWARE].plan.world_size == others[SINGLE].plan.world_size == question.num_ranks
    assert others[DISTTRAIN].plan.world_size <= question.num_ranks


@pytest.mark.parametrize("name", [name for name in NAMES if name != REPLICATED])
def test_figures_are_those_of_the_plan_at_the_true_costs(answer, name):
    """Simulated with all ranks and another planner."""
    question, result, others = answer
    plan = others[name].plan
    arrangement = {DISTTRAIN: "disttrain", UNAWARE: result.best.candidate.arrangement}.get(name, "contiguous")
    size = -(-question.global_batch_size // (plan.modules[LANGUAGE_MODEL].dp_size * plan.num_microbatches))
    groups, found = sync_groups(question.spec, plan), []
    for known in result.best.predictions:
        planner = StepPlanner(question.costs, plan, groups, size, arrangement, lambda _, own=known: own.sizes)
        found.append(planner.predict(planner(GlobalBatch(known.planned.step.samples))))
    assert others[name].step_ms == pytest.approx(np.mean([own.step_ms for own in found]))
    assert others[name].peak_memory_bytes == pytest.approx(max(own.peak_memory_bytes for own in found))


@pytest.mark.deep
def test_too_little_memory_is_told():
    """Our own plan is for more memory than the others are then judged by."""
    question = problem()
    for other in compare(replace(question, memory_bytes=2.0**24), quick_search(question)):
        assert "GiB more than a rank has" in other.note
        gib = float(other.note.partition("needs ")[2].split()[0])
        assert gib > 0
        if other.step_ms > 0:
            assert gib == pytest.approx(other.peak_memory_gib - 2**-6, rel=0.01)


def test_unaware_costs_are_those_of_a_trained_model():
    question = problem(("vision", LANGUAGE_MODEL))
    assumed = question.costs.with_spec(all_trained(question.spec))
    for name in question.spec.modules:
        aware, unaware = ModuleOptions(question, name), UnawareOptions(question, name, assumed)
        kind, table = aware.kinds[0], layer_table(assumed, name)
        padded = aware.microbatches.sizes(1, 2.0)[:2]
        assert padded[0] >= 2 * aware.tokens
        assert unaware.layer_ms(kind, 2.0) == pytest.approx(table.step_ms(*padded))
        assert unaware.layer_ms(kind, 2.0).sum() > aware.layer_ms(kind, 2.0).sum()
        assert unaware.state_bytes(kind, 1) == aware.state_bytes(kind, 1)
    nothing_frozen = model(())
    assert all_trained(nothing_frozen) == nothing_frozen


def test_ranks_by_ratio_are_in_proportion_to_operations():
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
    frozen = RatioLayouts(problem())
    assert frozen.work["vision"] < layouts.work["vision"] / 2.5
    assert frozen.ranks(1)["vision"] < layouts.ranks(1)["vision"]


def test_every_module_has_the_ranks_of_its_ratio():
    layouts = RatioLayouts(problem())
    found = [layouts.candidate(own) for own in layouts]
    assert len(found) > 20
    for candidate in found:
        ranks = layouts.ranks(candidate.layouts[LANGUAGE_MODEL].dp_size)
        assert {name: layout.num_ranks for name, layout in candidate.layouts.items()} == ranks
        assert not candidate.colocated_with
        assert all(own.layers == even_layers(LAYERS, own.pp_size) for own in candidate.layouts.values())


@pytest.mark.parametrize("frozen", [("vision",), (), (LANGUAGE_MODEL,)], ids=str)
def test_each_stage_runs_a_replicated_encoder_again(frozen):
    """Sixteen samples of one size, each a microbatch: all ranks together run the encoder once for each stage."""
    tokens = {"vision": 60_000, LANGUAGE_MODEL: 50_000}
    question = replace(problem(frozen, checkpointing=NEVER), sizes=SampleSizes.uniform(tokens, BATCH))
    tables = {name: layer_table(question.costs, name) for name in tokens}
    module_ms = {
        name: float(((tables[name].forward + tables[name].backward) @ [count**2, count, 1.0]).sum())
        for name, count in tokens.items()
    }
    layouts, stages = ReplicatedEncoders(question), set()
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


def test_one_layout_for_all():
    assert even_layers(10, 4) == (3, 3, 2, 2)
    layouts = SingleLayouts(problem())
    found = list(layouts)
    assert found
    for candidate in map(layouts.candidate, found):
        vision, language = candidate.layouts["vision"], candidate.layouts[LANGUAGE_MODEL]
        assert (vision.dp_size, vision.tp_size) == (language.dp_size, language.tp_size)
        assert vision.layers == even_layers(LAYERS, vision.pp_size)
        assert candidate.num_ranks == NUM_RANKS
        assert bool(candidate.colocated_with) == (language.num_ranks == NUM_RANKS)
    recomputed = {tuple(c.kind.activation_checkpointing for c in own.estimates.values()) for own in found}
    assert recomputed == {(False, False), (False, True)}  # a frozen encoder has nothing to recompute for


def test_the_best_division_of_one_layout_is_there():
    """Exhaustively: layers cut evenly, every number of stages of the encoder."""
    layouts = SingleLayouts(problem(checkpointing=NEVER))
    best: dict[tuple, float] = {}
    for own in layouts:
        vision = own.estimates["vision"]
        if vision.pp_size + own.estimates[LANGUAGE_MODEL].pp_size == 4:
            key = (vision.kind, own.num_microbatches, vision.num_samples)
            best[key] = min(own.step_ms, best.get(key, float("inf")))
    assert best
    for (kind, count, samples), found in best.items():
        times = [layouts.options[name].layer_ms(kind, samples) for name in layouts.options]
        every = []
        for stages in ((1, 3), (2, 2), (3, 1)):
            slowest = 0.0
            for values, number in zip(times, stages, strict=True):
                ends = list(itertools.accumulate(even_layers(LAYERS, number), initial=0))
                slowest = max(slowest, *(values[a:b].sum() for a, b in itertools.pairwise(ends)))
            every.append(sum(values.sum() for values in times) + (count - 1) * slowest)
        assert found == pytest.approx(min(every))


def test_ways_to_run_fully_sharded():
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
    for num_ranks in (1, 6):  # 6 do not divide the batch
        assert not list(FullyShardedLayouts(problem(num_ranks=num_ranks)))
    for given in ({"vision": True, LANGUAGE_MODEL: True}, {LANGUAGE_MODEL: False}):
        for own in FullyShardedLayouts(problem(checkpointing=given)):
            assert {name: own.layouts[name].activation_checkpointing for name in given} == given


ALL = (0, 1, 2, 3)
QUESTIONS = [
    (AS_FAST, {"num_ranks": 2, "global_batch_size": 4, "microbatch_size": 1, "zero_stages": (0, 3), "effort": 8}),
    deep(1.0, {"frozen": (), "num_ranks": 4, "global_batch_size": 8, "zero_stages": ALL}),
    deep(AS_FAST, {"num_ranks": 6, "global_batch_size": 12, "zero_stages": ALL}),
    deep(AS_FAST, {"frozen": (LANGUAGE_MODEL,), "num_ranks": 16, "short": 50, "zero_stages": ALL}),
]


@pytest.mark.parametrize(("tolerance", "settings"), QUESTIONS)
def test_nothing_is_faster_than_the_search(tolerance, settings):
    question = problem(**settings)
    result = search_plans(question)
    for other in compare(question, result):
        assert not other.step_ms * tolerance < result.best.step_ms, (other, result.best.candidate)


@pytest.mark.deep
def test_ratio_of_samples_without_media_is_no_plan():
    question = problem()
    tokens = {"vision": 0, LANGUAGE_MODEL: 50_000}
    question = replace(question, sizes=SampleSizes.uniform(tokens, 64))
    rows = dict(zip(NAMES, compare(question, quick_search(question)), strict=True))
    assert rows[RATIO].plan is None and "no sample" in rows[RATIO].note and "`vision`" in rows[RATIO].note
    assert rows[SINGLE].step_ms > 0
