"""Microbatches as large, and as many in flight, as memory allows, and not one more."""

import bisect
import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS
from hf_mmparallel.arrange import arrange_step, contiguous_step, with_fastest_counts
from hf_mmparallel.arrange.balance import deferred_fraction
from hf_mmparallel.cost import fitting_in_flight, fitting_tokens, memory_per_rank
from hf_mmparallel.cost.limits import batch_workloads, steady_in_flight
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, Stage, resolve_plan
from hf_mmparallel.schedule import build_program, in_flight_1f1b, simulate
from tests.cost.models import h100, model

BUDGET = 2e8
PLANS = {
    "ranks of their own": {LANGUAGE_MODEL: ModulePlugin(pp_size=2, tp_size=2)},
    "shared ranks": {LANGUAGE_MODEL: ModulePlugin(colocate_with="vision")},
    "copies": {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, cp_size=2)},
}


def sizes_of(vision: int, language: int, num_samples: int = 16) -> SampleSizes:
    return SampleSizes.uniform({"vision": vision, LANGUAGE_MODEL: language}, num_samples)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("frozen", [(), ("vision",)])
def test_microbatches_of_as_many_tokens_fit_and_no_larger_ones(name, frozen):
    spec = model(frozen)
    plan = replace(resolve_plan(spec, PLANS[name]), num_microbatches=8)
    sizes = sizes_of(30, 20, 8192)
    limits = fitting_tokens(h100(spec), plan, sizes, BUDGET)
    in_flight = steady_in_flight(plan)

    def fullest(scale: float) -> float:
        size = int(scale * min(limits["vision"] / 30, limits[LANGUAGE_MODEL] / 20))
        step = contiguous_step(plan, range(8192), size)
        return max(m.total for m in memory_per_rank(h100(spec), plan, step, sizes, in_flight).values())

    assert fullest(1.0) <= BUDGET < fullest(1.03)
    plan = replace(plan, num_microbatches=4)
    peaks = simulate(plan, build_program(plan, contiguous_step(plan, range(16), 2), [])).peak_in_flight
    assert all(peaks[key] <= in_flight[key] for key in peaks)
    assert peaks[LANGUAGE_MODEL, 0, 0] == in_flight[LANGUAGE_MODEL, 0, 0]


@pytest.mark.parametrize("heads", [4, 2])
def test_masks_of_padded_rows_are_part_of_the_limit(heads):
    """Rows of unlike lengths have a dense mask under `"sdpa"`, and keys that are repeated for their groups."""
    spec = model()
    language = replace(spec.language_model, num_kv_heads=heads)
    spec = replace(spec, modules={**spec.modules, LANGUAGE_MODEL: language})
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(colocate_with="vision")})
    lengths = np.tile([1000, 999], 512)
    sizes = SampleSizes.of_sequences({"vision": [[1]] * 1024, LANGUAGE_MODEL: [[own] for own in lengths.tolist()]})
    costs, budget = h100(spec), 5e8
    in_flight = steady_in_flight(plan)

    def fullest(size: int) -> float:
        step = contiguous_step(plan, range(1024), size)
        return max(m.total for m in memory_per_rank(costs, plan, step, sizes, in_flight).values())

    size = fitting_tokens(costs, plan, sizes, budget)[LANGUAGE_MODEL] / 1000
    assert size > 4 and fullest(int(size)) <= budget < fullest(int(size) + 2)


def test_modules_on_one_rank_share_it_by_what_they_have_to_do():
    spec = model()
    plan = resolve_plan(spec, PLANS["shared ranks"])
    limits = fitting_tokens(h100(spec), plan, sizes_of(300, 200), BUDGET)
    assert limits["vision"] == pytest.approx(1.5 * limits[LANGUAGE_MODEL], rel=1e-3)
    text_only = fitting_tokens(h100(spec), plan, sizes_of(0, 200), BUDGET)
    assert set(text_only) == {LANGUAGE_MODEL} and text_only[LANGUAGE_MODEL] > limits[LANGUAGE_MODEL]


@pytest.mark.parametrize("schedule", ["gpipe", "encoders_first"])
def test_where_all_forwards_go_first_smaller_microbatches_save_nothing(schedule):
    spec, sizes = model(), sizes_of(300, 200, 64)
    plan = replace(resolve_plan(spec, PLANS["shared ranks"], schedule=schedule), num_microbatches=4)

    def fullest(size: int) -> float:
        step = contiguous_step(plan, range(64), size)
        peaks = simulate(plan, build_program(plan, step, [])).peak_in_flight
        return max(m.total for m in memory_per_rank(h100(spec), plan, step, sizes, peaks).values())

    for share in (1.02, 1.3):
        budget = share * fullest(4)
        limits = fitting_tokens(h100(spec), plan, sizes, budget)
        size = int(min(limits["vision"] / 300, limits[LANGUAGE_MODEL] / 200))
        assert size >= 4
        assert fullest(max(even for even in (4, 8, 16, 32) if even <= size)) <= budget
    with pytest.raises(ValueError, match=rf'of 0\.\d+ GiB of memory\. `schedule="{schedule}"` keeps .*use `"1f1b"`'):
        fitting_tokens(h100(spec), plan, sizes, 0.9 * fullest(1))


def test_where_all_forwards_go_first_a_replica_keeps_its_own_microbatches():
    """Three quarters of the batch are with the first replica, where equal ones would have half each."""
    spec, sizes = model(), sizes_of(300, 200, 64)
    plan = resolve_plan(spec, {name: ModulePlugin(dp_size=2) for name in spec.modules}, schedule="gpipe")
    plan = replace(plan, replica_microbatches=(6, 2))

    def fullest(size: int) -> float:
        step = contiguous_step(plan, range(64), size)
        peaks = simulate(plan, build_program(plan, step, [])).peak_in_flight
        assert size < 8 or steady_in_flight(plan) == peaks
        return max(m.total for m in memory_per_rank(h100(spec), plan, step, sizes, peaks).values())

    assert sorted(steady_in_flight(plan).values()) == [2, 2, 6, 6]
    limits = fitting_tokens(h100(spec), plan, sizes, 1.02 * fullest(8))
    assert min(limits["vision"] / 300, limits[LANGUAGE_MODEL] / 200) >= 8
    with pytest.raises(ValueError, match='`schedule="gpipe"` keeps the activations'):
        fitting_tokens(h100(spec), plan, sizes, 0.9 * fullest(1))


def test_where_all_forwards_go_first_a_faster_replica_keeps_more_microbatches():
    """Without numbers in the plan, those that are predicted count."""
    spec, sizes = model(), sizes_of(300, 200, 64)
    plan = resolve_plan(spec, {name: ModulePlugin(dp_size=2) for name in spec.modules}, schedule="gpipe")
    cut = (Stage((0, 2), ((2,),)), Stage((2, 4), ((4,),)))
    language = replace(plan.modules[LANGUAGE_MODEL], replicas=(cut, (Stage((0, 4), ((3,),)),)))
    plan = replace(plan, modules={**plan.modules, LANGUAGE_MODEL: language}, num_microbatches=8)
    counts = with_fastest_counts(plan, batch_workloads(h100(spec), plan, sizes)).microbatch_counts
    assert counts[0] > 8 > counts[1]
    explicit = replace(plan, replica_microbatches=counts)
    budgets = np.geomspace(1e6, 1e12, 2000).tolist()
    budget = budgets[
        bisect.bisect(budgets, False, key=lambda own: _fits(spec, explicit, sizes, own))
    ]  # least that fits
    assert batch_workloads(h100(spec), plan, sizes, memory_bytes=budget).token_limits == fitting_tokens(
        h100(spec), explicit, sizes, budget
    )
    with pytest.raises(ValueError, match='`schedule="gpipe"` keeps the activations'):
        batch_workloads(h100(spec), plan, sizes, memory_bytes=0.98 * budget)
    assert _fits(spec, plan, sizes, 0.98 * budget)  # as many microbatches each would need less


def _fits(spec, plan, sizes: SampleSizes, memory_bytes: float) -> bool:
    with suppress(ValueError):
        fitting_tokens(h100(spec), plan, sizes, memory_bytes)
        return True
    return False


def test_state_that_does_not_fit_is_refused():
    spec = model()
    plan = resolve_plan(spec, {})
    with pytest.raises(ValueError, match=r"Rank 1 \(language_model\) .* 0\.000931 GiB .*Raise `pp_size` or `tp_size`"):
        fitting_tokens(h100(spec), plan, sizes_of(1, 1), 1e6)
    with pytest.raises(ValueError, match="Rank 1"):
        fitting_in_flight(h100(spec), plan, contiguous_step(plan, range(4), 1), sizes_of(1, 1, 4), 1e6)


@pytest.mark.parametrize("name", PLANS)
def test_eager_fills_the_memory_and_keeps_to_it(name):
    spec = model()
    plan = replace(resolve_plan(spec, PLANS[name]), schedule="eager")
    step, sizes = contiguous_step(plan, range(16), 1), sizes_of(300, 200)
    least, fitting = in_flight_1f1b(plan, step), fitting_in_flight(h100(spec), plan, step, sizes, BUDGET)
    assert all(fitting[key] >= least[key] for key in least)
    assert any(fitting[key] > least[key] for key in least)
    used = memory_per_rank(h100(spec), plan, step, sizes, fitting)
    assert max(m.total for m in used.values()) <= BUDGET
    for key, limit in fitting.items():
        if limit < len(step.microbatches[key[0]][key[1]]):
            more = memory_per_rank(h100(spec), plan, step, sizes, {**fitting, key: limit + 1})
            assert max(more[rank].total for rank in plan.stage(*key).all_ranks) > BUDGET
    simulation = simulate(plan, build_program(plan, step, [], fitting_in_flight=fitting))
    assert all(simulation.peak_in_flight[key] <= fitting[key] for key in fitting)
    if name != "shared ranks":
        assert simulation.peak_in_flight["vision", 0, 0] > least["vision", 0, 0]


def test_encoders_run_ahead_first():
    spec = model()
    plan = replace(resolve_plan(spec, PLANS["shared ranks"]), schedule="eager")
    step, sizes = contiguous_step(plan, range(16), 1), sizes_of(300, 200)
    least = in_flight_1f1b(plan, step)
    in_use = max(m.total for m in memory_per_rank(h100(spec), plan, step, sizes, least).values())
    found = [fitting_in_flight(h100(spec), plan, step, sizes, (1 + share / 50) * in_use) for share in range(50)]
    fitting = next(fitting for fitting in found if fitting["vision", 0, 0] > least["vision", 0, 0])
    assert fitting[LANGUAGE_MODEL, 0, 0] == least[LANGUAGE_MODEL, 0, 0]


def test_without_a_limit_encoders_run_two_forwards_ahead():
    spec = model()
    plan = resolve_plan(spec, PLANS["ranks of their own"])
    step = contiguous_step(plan, range(16), 1)
    fitting = fitting_in_flight(h100(spec), plan, step, sizes_of(300, 200))
    assert fitting == {("vision", 0, 0): 5, (LANGUAGE_MODEL, 0, 0): 2, (LANGUAGE_MODEL, 0, 1): 1}


@pytest.mark.parametrize("arrangement", ["hierarchical", "entrain", "tapered"])
@pytest.mark.parametrize("data_parallel", [(1, 1), (2, 2), (4, 2), (2, 4)])
def test_deferral_keeps_no_more_microbatches_than_the_limit_of_tokens_counts(arrangement, data_parallel):
    """A microbatch counts until its last sample's backward, also where others of its samples are done before."""
    times = PUBLISHED_MODELS["llama3-1b"]
    names = ("vision", LANGUAGE_MODEL)
    degrees = {name: ModulePlugin(dp_size=dp, pp_size=2) for name, dp in zip(names, data_parallel, strict=True)}
    plan = resolve_plan(times.spec, degrees)
    step = arrange_step(plan, range(96), times.workloads(PUBLISHED["synthchartnet"].draw(96, 1)), 4, arrangement)
    assert deferred_fraction(step) > 0
    spans = simulate(plan, build_program(plan, step, [])).spans
    in_flight = steady_in_flight(plan)
    changes = {key: {} for key in in_flight}
    for span in spans:
        first, last = changes[span.task.stage_key].get(span.task.microbatch, (math.inf, 0.0))
        changes[span.task.stage_key][span.task.microbatch] = (min(first, span.start_ms), max(last, span.end_ms))
    for key, microbatches in changes.items():
        events = sorted(
            event for first, last in microbatches.values() for event in ((first + 1e-6, 1), (last - 1e-6, -1))
        )
        assert max(np.cumsum([change for _, change in events])) <= in_flight[key], key
