"""Microbatches as large, and as many in flight, as memory allows, and not one more."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS
from hf_mmparallel.arrange import arrange_step, contiguous_step, with_fastest_counts
from hf_mmparallel.arrange.balance import deferred_fraction
from hf_mmparallel.cost import fitting_in_flight, fitting_tokens, memory_per_rank, stage_memory
from hf_mmparallel.cost.limits import batch_workloads, steady_in_flight
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, Stage, resolve_plan
from hf_mmparallel.schedule import in_flight_1f1b
from tests.cost.models import VOCABULARY, h100, model, text_model, with_head
from tests.schedule.builders import timeline_of

BUDGET = 2e8
PLANS = {
    "ranks of their own": {LANGUAGE_MODEL: ModulePlugin(pp_size=2, tp_size=2)},
    "shared ranks": {LANGUAGE_MODEL: ModulePlugin(colocate_with="vision")},
    "copies": {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, cp_size=2)},
}
COPIES = {name: ModulePlugin(dp_size=2) for name in ("vision", LANGUAGE_MODEL)}


def sizes_of(vision: int, language: int, num_samples: int = 16) -> SampleSizes:
    return SampleSizes.uniform({"vision": vision, LANGUAGE_MODEL: language}, num_samples)


def plan_of(name: str, spec=None, **settings):
    return replace(resolve_plan(spec or model(), PLANS[name]), **settings)


def fullest(spec, plan, sizes, step, in_flight) -> float:
    """Bytes of the fullest rank."""
    return max(own.total for own in memory_per_rank(h100(spec), plan, step, sizes, in_flight).values())


def simulated(plan, step, **settings):
    return timeline_of(plan, step, **settings)


def fullest_of_all(spec, plan, sizes, size: int) -> float:
    """Bytes of the fullest rank in a simulated step of all samples, in microbatches of this size."""
    step = contiguous_step(plan, range(sizes.num_samples), size)
    return fullest(spec, plan, sizes, step, simulated(plan, step).peak_in_flight)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("frozen", [(), ("vision",)])
def test_microbatches_of_as_many_tokens_fit_and_no_larger_ones(name, frozen):
    spec, sizes = model(frozen), sizes_of(30, 20, 8192)
    plan = plan_of(name, spec, num_microbatches=8)
    limits, in_flight = fitting_tokens(h100(spec), plan, sizes, BUDGET), steady_in_flight(plan)
    size = min(limits["vision"] / 30, limits[LANGUAGE_MODEL] / 20)
    fits, more = (contiguous_step(plan, range(8192), int(scale * size)) for scale in (1.0, 1.03))
    assert fullest(spec, plan, sizes, fits, in_flight) <= BUDGET < fullest(spec, plan, sizes, more, in_flight)
    plan = replace(plan, num_microbatches=4)
    peaks = simulated(plan, contiguous_step(plan, range(16), 2)).peak_in_flight
    assert all(peaks[key] <= in_flight[key] for key in peaks)
    assert peaks[LANGUAGE_MODEL, 0, 0] == in_flight[LANGUAGE_MODEL, 0, 0]


@pytest.mark.parametrize("heads", [4, 2])
def test_masks_of_padded_rows_are_part_of_the_limit(heads):
    """Rows of unlike lengths have a dense mask under `"sdpa"`, and keys that are repeated for their groups."""
    spec = model(num_kv_heads=heads)
    plan = plan_of("shared ranks", spec)
    sizes = SampleSizes.of_sequences({"vision": [[1]] * 1024, LANGUAGE_MODEL: [[1000], [999]] * 512})
    size = fitting_tokens(h100(spec), plan, sizes, 5e8)[LANGUAGE_MODEL] / 1000
    fits, more = (contiguous_step(plan, range(1024), int(size) + extra) for extra in (0, 2))
    in_flight = steady_in_flight(plan)
    assert size > 4
    assert fullest(spec, plan, sizes, fits, in_flight) <= 5e8 < fullest(spec, plan, sizes, more, in_flight)


def test_modules_on_one_rank_share_it_by_what_they_have_to_do():
    spec, plan = model(), plan_of("shared ranks")
    limits = fitting_tokens(h100(spec), plan, sizes_of(300, 200), BUDGET)
    assert limits["vision"] == pytest.approx(1.5 * limits[LANGUAGE_MODEL], rel=1e-3)
    text_only = fitting_tokens(h100(spec), plan, sizes_of(0, 200), BUDGET)
    assert set(text_only) == {LANGUAGE_MODEL} and text_only[LANGUAGE_MODEL] > limits[LANGUAGE_MODEL]


@pytest.mark.parametrize("schedule", ["gpipe", "encoders_first"])
def test_where_all_forwards_go_first_smaller_microbatches_save_nothing(schedule):
    spec, sizes = model(), sizes_of(300, 200, 64)
    plan = plan_of("shared ranks", schedule=schedule, num_microbatches=4)
    for share in (1.02, 1.3):
        budget = share * fullest_of_all(spec, plan, sizes, 4)
        limits = fitting_tokens(h100(spec), plan, sizes, budget)
        size = int(min(limits["vision"] / 300, limits[LANGUAGE_MODEL] / 200))
        assert size >= 4
        assert fullest_of_all(spec, plan, sizes, max(even for even in (4, 8, 16, 32) if even <= size)) <= budget
    with pytest.raises(ValueError, match=rf'of 0\.\d+ GiB .*`schedule="{schedule}"` keeps .*use `"1f1b"`'):
        fitting_tokens(h100(spec), plan, sizes, 0.9 * fullest_of_all(spec, plan, sizes, 1))


def test_where_all_forwards_go_first_a_replica_keeps_its_own_microbatches():
    """Three quarters of the batch are with the first replica, where equal ones would have half each."""
    spec, sizes = model(), sizes_of(300, 200, 64)
    plan = replace(resolve_plan(spec, COPIES, schedule="gpipe"), replica_microbatches=(6, 2))
    in_flight = simulated(plan, contiguous_step(plan, range(64), 8)).peak_in_flight
    assert in_flight == steady_in_flight(plan) and sorted(in_flight.values()) == [2, 2, 6, 6]
    limits = fitting_tokens(h100(spec), plan, sizes, 1.02 * fullest_of_all(spec, plan, sizes, 8))
    assert min(limits["vision"] / 300, limits[LANGUAGE_MODEL] / 200) >= 8
    with pytest.raises(ValueError, match='`schedule="gpipe"` keeps the activations'):
        fitting_tokens(h100(spec), plan, sizes, 0.9 * fullest_of_all(spec, plan, sizes, 1))


def test_where_all_forwards_go_first_a_faster_replica_keeps_more_microbatches():
    """Without numbers in the plan, those that are predicted count."""
    spec, sizes = model(), sizes_of(300, 200, 64)
    plan = resolve_plan(spec, COPIES, schedule="gpipe")
    cut = (Stage((0, 2), ((2,),)), Stage((2, 4), ((4,),)))
    language = replace(plan.modules[LANGUAGE_MODEL], replicas=(cut, (Stage((0, 4), ((3,),)),)))
    plan = replace(plan, modules={**plan.modules, LANGUAGE_MODEL: language}, num_microbatches=8)
    counts = with_fastest_counts(plan, batch_workloads(h100(spec), plan, sizes)).microbatch_counts
    assert counts[0] > 8 > counts[1]
    explicit = replace(plan, replica_microbatches=counts)
    needed = fullest_of_all(spec, explicit, sizes, 1)
    found = batch_workloads(h100(spec), plan, sizes, memory_bytes=1.02 * needed).token_limits
    assert found == fitting_tokens(h100(spec), explicit, sizes, 1.02 * needed)
    with pytest.raises(ValueError, match='`schedule="gpipe"` keeps the activations'):
        batch_workloads(h100(spec), plan, sizes, memory_bytes=0.98 * needed)
    assert fitting_tokens(h100(spec), plan, sizes, 0.98 * needed)  # as many microbatches each would need less


def test_state_that_does_not_fit_is_refused():
    spec = model()
    plan = resolve_plan(spec, {})
    with pytest.raises(ValueError, match=r"Rank 1 \(language_model\) .* 0\.000931 GiB .*Raise `pp_size` or `tp_size`"):
        fitting_tokens(h100(spec), plan, sizes_of(1, 1), 1e6)
    with pytest.raises(ValueError, match="Rank 1"):
        fitting_in_flight(h100(spec), plan, contiguous_step(plan, range(4), 1), sizes_of(1, 1, 4), 1e6)


@pytest.mark.parametrize("name", PLANS)
def test_eager_fills_the_memory_and_keeps_to_it(name):
    spec, plan, sizes = model(), plan_of(name, schedule="eager"), sizes_of(300, 200)
    step = contiguous_step(plan, range(16), 1)
    least, fitting = in_flight_1f1b(plan, step), fitting_in_flight(h100(spec), plan, step, sizes, BUDGET)
    assert all(fitting[key] >= least[key] for key in least)
    assert any(fitting[key] > least[key] for key in least)
    assert fullest(spec, plan, sizes, step, fitting) <= BUDGET
    for key, limit in fitting.items():
        if limit < len(step.microbatches[key[0]][key[1]]):
            more = memory_per_rank(h100(spec), plan, step, sizes, {**fitting, key: limit + 1})
            assert max(more[rank].total for rank in plan.stage(*key).all_ranks) > BUDGET
    peaks = simulated(plan, step, fitting_in_flight=fitting).peak_in_flight
    assert all(peaks[key] <= fitting[key] for key in fitting)
    if name != "shared ranks":
        assert peaks["vision", 0, 0] > least["vision", 0, 0]


def test_split_backwards_fill_the_memory_the_first_stage_the_most():
    spec, sizes = text_model(), SampleSizes.uniform({LANGUAGE_MODEL: 300}, 16)
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=4)}, schedule="zero_bubble_h2")
    step = contiguous_step(plan, range(16), 1)
    least = in_flight_1f1b(plan, step)
    first = simulated(plan, step, fitting_in_flight=least)
    in_use = max(
        own.total
        for own in memory_per_rank(h100(spec), plan, step, sizes, first.peak_in_flight, first.peak_held).values()
    )
    found = {}
    for share in (1.1, 1.3, 1.5):
        fitting = fitting_in_flight(h100(spec), plan, step, sizes, share * in_use)
        more = [fitting[key] - least[key] for key in sorted(least)]
        found[share] = more[0]
        assert more == sorted(more, reverse=True) and more[-1] == 0
        timeline = simulated(plan, step, fitting_in_flight=fitting)
        memory = memory_per_rank(h100(spec), plan, step, sizes, timeline.peak_in_flight, timeline.peak_held)
        assert share - 0.1 <= max(own.total for own in memory.values()) / in_use <= share
        assert timeline.iteration_ms <= first.iteration_ms
    assert 0 < found[1.1] < found[1.3] < found[1.5] <= 12


def test_encoders_run_ahead_first():
    spec, plan, sizes = model(), plan_of("shared ranks", schedule="eager"), sizes_of(300, 200)
    step = contiguous_step(plan, range(16), 1)
    least = in_flight_1f1b(plan, step)
    in_use = fullest(spec, plan, sizes, step, least)
    found = (fitting_in_flight(h100(spec), plan, step, sizes, (1 + share / 50) * in_use) for share in range(50))
    fitting = next(fitting for fitting in found if fitting["vision", 0, 0] > least["vision", 0, 0])
    assert fitting[LANGUAGE_MODEL, 0, 0] == least[LANGUAGE_MODEL, 0, 0]


def test_without_a_limit_encoders_run_two_forwards_ahead():
    plan = plan_of("ranks of their own")
    fitting = fitting_in_flight(h100(model()), plan, contiguous_step(plan, range(16), 1), sizes_of(300, 200))
    assert fitting == {("vision", 0, 0): 5, (LANGUAGE_MODEL, 0, 0): 2, (LANGUAGE_MODEL, 0, 1): 1}


@pytest.mark.parametrize("arrangement", ["hierarchical", "entrain", "tapered"])
@pytest.mark.parametrize("data_parallel", [(1, 1), (2, 2), (4, 2), (2, 4)])
def test_deferral_keeps_no_more_microbatches_than_the_limit_of_tokens_counts(arrangement, data_parallel):
    """A microbatch counts until its last sample's backward, also where others of its samples are done before."""
    times = PUBLISHED_MODELS["llama3-1b"]
    degrees = {
        name: ModulePlugin(dp_size=dp, pp_size=2) for name, dp in zip(times.spec.modules, data_parallel, strict=True)
    }
    plan = resolve_plan(times.spec, degrees)
    step = arrange_step(plan, range(96), times.workloads(PUBLISHED["synthchartnet"].draw(96, 1)), 4, arrangement)
    assert deferred_fraction(step) > 0
    in_flight = steady_in_flight(plan)
    ends = {key: {} for key in in_flight}
    for span in simulated(plan, step).spans:
        first, last = ends[span.task.stage_key].get(span.task.microbatch, (math.inf, 0.0))
        ends[span.task.stage_key][span.task.microbatch] = (min(first, span.start_ms), max(last, span.end_ms))
    for key, microbatches in ends.items():
        starts, stops = zip(*microbatches.values(), strict=True)
        events = sorted([(start + 1e-6, 1) for start in starts] + [(stop - 1e-6, -1) for stop in stops])
        assert max(np.cumsum([change for _, change in events])) <= in_flight[key], key


@pytest.fixture
def small_chunks(monkeypatch):
    """The loss of more than 6,000 tokens is in chunks."""
    monkeypatch.setattr(stage_memory, "MAX_LOGITS", 6000 * VOCABULARY)
    stage_memory._stage_memory.cache_clear()
    yield
    stage_memory._stage_memory.cache_clear()


@pytest.mark.parametrize("name", PLANS)
def test_a_loss_in_chunks_lets_more_tokens_fit(name, small_chunks):
    spec, sizes = with_head(VOCABULARY), sizes_of(30, 20, 8192)
    plan = plan_of(name, spec, num_microbatches=8)
    in_flight, found = steady_in_flight(plan), []
    state = fullest(spec, plan, sizes, contiguous_step(plan, range(8192), 1), in_flight)
    most = min(memory.max_tokens * memory.cp_size for memory in stage_memories(h100(spec), plan).values())
    for budget in state * np.geomspace(1.05, 30, 24):
        limits = fitting_tokens(h100(spec), plan, sizes, budget)
        size = min(limits["vision"] / 30, limits[LANGUAGE_MODEL] / 20)
        fits, more = (contiguous_step(plan, range(8192), int(scale * size)) for scale in (1.0, 1.05))
        assert fullest(spec, plan, sizes, fits, in_flight) <= budget
        assert limits[LANGUAGE_MODEL] <= most or budget < fullest(spec, plan, sizes, more, in_flight)
        found.append(limits[LANGUAGE_MODEL])
    assert found == sorted(found) and found[0] < most < found[-1]
