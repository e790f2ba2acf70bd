"""Replicas of the language model with unlike stages: every arrangement gives the faster ones more microbatches."""

import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS
from hf_mmparallel.arrange import ARRANGEMENTS, arrange_step
from hf_mmparallel.arrange.balance import step_balance
from hf_mmparallel.arrange.microbatch_counts import microbatch_counts
from hf_mmparallel.plan import LANGUAGE_MODEL, ParallelPlan, StepPlan, Workloads
from hf_mmparallel.schedule import build_program, in_flight_1f1b, simulate
from tests.papers.test_baselines import make_workloads
from tests.schedule.builders import make_plan, make_step, module_spec

STAGES = (4, 3, 2)


def unlike(num_encoders: int, num_layers: int = 12) -> ParallelPlan:
    """Language-model replicas with 4, 3 and 2 stages, and encoder replicas of one stage each."""
    ranks = iter(range(100))
    modules = {
        "vision": [[(next(ranks),)] for _ in range(num_encoders)],
        LANGUAGE_MODEL: [[(next(ranks),) for _ in range(count)] for count in STAGES],
    }
    specs = {
        "vision": module_spec("vision", num_layers, feature_layers=(0,)),
        LANGUAGE_MODEL: module_spec(LANGUAGE_MODEL, num_layers),
    }
    return make_plan(modules, specs)[1]


def task_times(plan: ParallelPlan, step: StepPlan, workloads: Workloads):
    def cost(task):
        module = plan.modules[task.module]
        share = plan.stage(task.module, task.replica, task.stage).num_layers / module.num_layers
        batch_indices = list(step.chunks[task.module, task.replica, task.microbatch][task.chunk])
        return (1 if task.kind == "fwd" else 2) * share * float(workloads.forward_ms[task.module][batch_indices].sum())

    return cost


def iteration_ms(plan: ParallelPlan, step: StepPlan, workloads: Workloads) -> float:
    cost = task_times(plan, step, workloads)
    return simulate(plan, build_program(plan, step, [], cost), cost).iteration_ms


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("num_encoders", [1, 3])
def test_every_arrangement_follows_the_counts(arrangement, num_encoders):
    plan = unlike(num_encoders)
    workloads = PUBLISHED_MODELS["llama3-3b"].workloads(PUBLISHED["llava-150k"].draw(96, 0))
    workloads.forward_ms["vision"][:] *= 0.1  # so that encoders of one stage hold nobody up
    workloads.forward_ms["vision"][::7] = 0  # text alone
    counts = microbatch_counts(plan, workloads, 24)
    step = arrange_step(plan, range(96), workloads, 4, arrangement)
    step.check(plan)
    assert counts.sum() == 24 and list(counts) == sorted(counts, reverse=True) and counts[0] > counts[2]
    if arrangement != "entrain":  # which makes fewer where single samples are large
        assert [len(own) for own in step.microbatches[LANGUAGE_MODEL]] == counts.tolist()
    busy = np.flatnonzero(workloads.forward_ms["vision"] > 0).tolist()
    encoded = [
        batch_index
        for replica in step.microbatches["vision"]
        for batch_indices in replica
        for batch_index in batch_indices
    ]
    assert sorted(encoded) == busy
    # No replica is far from its share of the work, and nothing is taken before it is encoded.
    loads = np.array([own.sum() for own in step_balance(step, workloads).forward_ms[LANGUAGE_MODEL]])
    if arrangement not in ("contiguous", "batch_rebalance", "sub_microbatches"):
        assert loads / loads.sum() == pytest.approx(counts / counts.sum(), rel=0.06)
    parts = 2 if arrangement == "sub_microbatches" else 1
    for replica in range(num_encoders):
        for batch_index, turn in step.consumer_turns("vision", replica, LANGUAGE_MODEL).items():
            assert step.location_of["vision", batch_index][1] // parts <= turn
    cost = task_times(plan, step, workloads)
    simulation = simulate(plan, build_program(plan, step, [], cost), cost)
    max_in_flight = in_flight_1f1b(plan, step)
    assert all(peak < max_in_flight[key] + 1 for key, peak in simulation.peak_in_flight.items())


def test_a_step_is_as_long_as_the_closed_form_says():
    plan, workloads = unlike(3), make_workloads([0.0] * 24, [40.0] * 24)
    shared = arrange_step(plan, range(24), workloads, 1, "hierarchical")
    assert [len(own) for own in shared.microbatches[LANGUAGE_MODEL]] == [11, 8, 5]
    assert iteration_ms(plan, shared, workloads) == pytest.approx(420)
    alike = make_step({"vision": [[], [], []], LANGUAGE_MODEL: [[[8 * d + i] for i in range(8)] for d in range(3)]})
    assert iteration_ms(plan, alike, workloads) == pytest.approx(540)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_step_with_the_counts_of_the_plan(arrangement):
    """Of 24 equal microbatches, 11, 7 and 6 take 420 ms, as the predicted 11, 8 and 5 do; eight each take 540 ms."""
    workloads = make_workloads([0.0] * 24, [40.0] * 24)
    plan, step_ms = unlike(3), {}
    for counts in [(11, 7, 6), (8, 8, 8), None]:
        plan = dataclasses.replace(plan, replica_microbatches=counts)
        step = arrange_step(plan, range(24), workloads, 1, arrangement)
        found = tuple(len(own) for own in step.microbatches[LANGUAGE_MODEL])
        assert found == (counts or (11, 8, 5))
        step_ms[counts] = iteration_ms(plan, step, workloads)
    assert step_ms[11, 7, 6] == step_ms[None] == pytest.approx(420)
    assert step_ms[8, 8, 8] == pytest.approx(540)


def test_microbatches_of_a_shared_encoder_come_when_each_replica_needs_them():
    plan, workloads = unlike(1), make_workloads([1.0] * 24, [40.0] * 24)
    step = arrange_step(plan, range(24), workloads, 1, "contiguous")
    counts = [len(own) for own in step.microbatches[LANGUAGE_MODEL]]
    (encoder,) = step.microbatches["vision"]
    assert len(encoder) == max(counts)
    # After any number of turns, each replica has had its share of its microbatches.
    for turns in range(len(encoder) + 1):
        had = [batch_index for batch_indices in encoder[:turns] for batch_index in batch_indices]
        for replica, count in enumerate(counts):
            own = sum(
                batch_index in had
                for batch_indices in step.microbatches[LANGUAGE_MODEL][replica]
                for batch_index in batch_indices
            )
            assert abs(own - turns * count / len(encoder)) <= 0.5 + 1e-9
    batch_indices = list(itertools.chain.from_iterable(encoder))
    assert sorted(batch_indices) == list(range(24)) and batch_indices == sorted(batch_indices)
