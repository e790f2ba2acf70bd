"""The communication that pictures show is that which the simulated step waits for."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from hf_mmparallel.cost import StepCost, analytic_costs
from hf_mmparallel.cost.communication import with_communication
from hf_mmparallel.cost.step_planner import Prediction, StepPlanner
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.schedule import Task, Timeline, TransferSpan
from tests.cost.models import PLAIN
from tests.cost.test_gradient_sums import LAYERS, text_model


def predicted(
    zero_stage: int, efficiency: float = 0.6, tied: bool = False, **sizes
) -> tuple[Prediction, Timeline, StepCost]:
    """Four samples of unequal sizes in two replicas; `tied` embeddings have a gradient sum of their own under pp."""
    spec = replace(text_model(), tied={"embed_tokens.weight": ((LANGUAGE_MODEL, LAYERS),)} if tied else {})
    costs = analytic_costs(spec, replace(PLAIN, overlap_efficiency=efficiency, link_gb_per_s=100.0))
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=2, zero_stage=zero_stage, **sizes)})
    lengths = SampleSizes.of_sequences({LANGUAGE_MODEL: [[4096], [1024], [2048], [3072]]})
    groups = sync_groups(spec, plan)
    planner = StepPlanner(costs, plan, groups, 1, "contiguous", lengths.take)
    prediction = planner.predict(planner.arrange_batch(GlobalBatch((0, 1, 2, 3))))
    cost = StepCost(costs, plan, prediction.planned.step, prediction.sizes, groups)
    return prediction, with_communication(prediction, costs, groups), cost


def of_rank(simulation: Timeline, rank: int) -> list[TransferSpan]:
    return list(simulation.transfers(rank))  # type: ignore[misc]


def total_ms(spans, op: str, exposed: bool | None = None) -> float:
    return sum(span.end_ms - span.start_ms for span in spans if span.op == op and exposed in (None, span.is_exposed))


@pytest.mark.parametrize(("pp_size", "tied"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_rank_has_one_transfer_at_a_time_and_ends_with_the_step(zero_stage, pp_size, tied):
    prediction, simulation, _ = predicted(zero_stage, pp_size=pp_size, tied=tied)
    spans = [of_rank(simulation, rank) for rank in range(simulation.num_ranks)]
    for rank, own in enumerate(spans):
        assert all(a.end_ms <= b.start_ms + 1e-6 for a, b in pairwise(own)), own
        assert {span.rank for span in own} == {rank}
    assert max(own[-1].end_ms for own in spans) == pytest.approx(prediction.step_ms)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_gathers_and_sums_are_in_the_passes(zero_stage):
    prediction, simulation, cost = predicted(zero_stage)
    tasks, inside = defaultdict(list), defaultdict(float)
    for span in simulation.spans:
        tasks[span.rank].append(span)
    (transfers,) = {id(stage.passes.transfers): stage.passes.transfers for stage in cost.stages.values()}.values()
    for rank, own in tasks.items():
        for transfer in of_rank(simulation, rank):
            if transfer.start_ms < prediction.timeline.iteration_ms - 1e-9:
                assert any(t.start_ms - 1e-9 <= transfer.start_ms <= transfer.end_ms <= t.end_ms + 1e-9 for t in own)
                inside[rank, transfer.op] += transfer.end_ms - transfer.start_ms
        backwards = sum(span.task.kind == "bwd" for span in own)
        assert inside[rank, "sum"] == pytest.approx(backwards * (sum(transfers.reduce_ms) + transfers.outer_reduce_ms))
        # The last two layers stay gathered between a forward and its backward, and the first two after it.
        ends = sum(transfers.gather_ms[-2:]) + sum(transfers.gather_ms[:2])
        assert inside[rank, "gather"] == pytest.approx(backwards * (2 * sum(transfers.gather_ms) - ends))


def test_exposed_communication_is_what_tasks_have_beside_computation():
    """At full speed beside communication, a pass is as long as its computation and what it waits for."""
    _, simulation, cost = predicted(3, efficiency=1.0)
    whole = predicted(0, efficiency=1.0)[2]
    before = [span for span in of_rank(simulation, 0) if span.end_ms <= simulation.iteration_ms + 1e-9]
    exposed = total_ms(before, "gather", True) + total_ms(of_rank(simulation, 0), "sum", True)
    tasks = [span.task for span in simulation.spans if span.rank == 0]
    longest = [max((replace(task, replica=replica) for replica in (0, 1)), key=cost) for task in tasks]
    assert exposed == pytest.approx(sum(cost(task) - whole(task) for task in longest)) and exposed > 0


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_sums_start_in_the_last_backward_and_are_drawn_once(zero_stage):
    _, simulation, cost = predicted(zero_stage)
    times = cost.sum_times(0)
    last = max(span.start_ms for span in simulation.spans if span.task.kind == "bwd")
    for rank in (0, 1):
        sums = [span for span in of_rank(simulation, rank) if span.op == "sum"]
        assert sums[0].start_ms > last and not sums[0].is_exposed
        assert total_ms(sums, "sum") == pytest.approx(float((times.end_ms - times.start_ms).sum()))
        assert sums[-1].end_ms == pytest.approx(simulation.iteration_ms) and sums[-1].is_exposed
        added = [span.end_ms - span.start_ms for span in simulation.sums if span.rank == rank]
        assert total_ms(sums, "sum", True) < sum(added) == pytest.approx(cost.sync_ms(0))


def test_the_optimizer_gathers_what_it_updated():
    kept, divided = (predicted(stage)[1] for stage in (0, 1))
    late = [[s for s in of_rank(own, 0) if s.start_ms >= own.iteration_ms - 1e-9] for own in (kept, divided)]
    assert [[span.op for span in spans] for spans in late] == [["update"], ["update", "gather"]]
    assert total_ms(late[1], "update") == pytest.approx(total_ms(late[0], "update") / 2)
    assert LAYERS == 4 and all(span.is_exposed for spans in late for span in spans)


def test_transfers_of_joint_tasks_are_computed_once_for_all_ranks():
    """So that a page of thousands of ranks does not compare all replicas for each of them."""
    _, _, cost = predicted(3)
    for task in (Task(kind, LANGUAGE_MODEL, 0, 0, 1) for kind in ("fwd", "bwd")):
        transfers = cost.timed_transfers(task)
        assert transfers and cost.timed_transfers(replace(task, replica=1)) is transfers
    _, _, alone = predicted(0)
    assert alone.timed_transfers(Task("fwd", LANGUAGE_MODEL, 0, 0, 1)) == []
