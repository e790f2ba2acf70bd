"""Gradient sums beside the last backward, and passes that gather and reduce, replayed action by action."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import GRADIENT_BUCKET_BYTES, StepCost, analytic_costs, layer_table
from hf_mmparallel.cost.collectives import all_gather, all_reduce, longer_ms
from hf_mmparallel.cost.gradient_sums import times_beside
from hf_mmparallel.cost.layers import Engine
from hf_mmparallel.cost.sharded_passes import PassTransfers
from hf_mmparallel.cost.step import last_chunks
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlugin,
    ModuleSpec,
    ParameterSpec,
    SampleSizes,
    resolve_plan,
    sync_groups,
)
from hf_mmparallel.schedule import REST, pass_actions
from hf_mmparallel.schedule.kinds import BACKWARD, FORWARD, LAST_PASSES, WHOLE_PASSES
from tests.cost.models import PLAIN
from tests.schedule.builders import make_plan, make_step, splitting, timeline_of

HIDDEN, LAYERS, VOCABULARY = 2048, 4, 1000
EFFICIENCY = 0.6


def queued(rest, transfer, length: float, efficiency: float) -> tuple[list[tuple[float, float]], float]:
    """Start and end of each transfer beside a backward of `length` ms, one event after the other, and the whole."""
    now, left, times = 0.0, length, []
    for rest_ms, transfer_ms in zip(rest, transfer, strict=True):
        wait_ms = max(0.0, left - rest_ms)
        now, left = now + wait_ms, left - wait_ms
        times.append((now, now + transfer_ms))
        now, left = now + transfer_ms, max(0.0, left - efficiency * transfer_ms)
    return times, now + left


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.01, 5)), min_size=1, max_size=8), st.floats(0.1, 1.0))
@example([(3.0, 1.0), (0.0, 2.0)], 0.5)
def test_transfers_queue_up_beside_a_backward(pairs, efficiency):
    rest = np.array(sorted((rest for rest, _ in pairs), reverse=True))
    transfer = np.array([ms for _, ms in pairs])
    found = times_beside(np.arange(len(pairs)), rest, transfer, efficiency)
    times, whole = queued(rest, transfer, 10.0, efficiency)
    assert np.stack([found.start_ms, found.end_ms], axis=1) == pytest.approx(np.array(times) - 10.0)
    assert found.exposed_ms.sum() == pytest.approx(whole - 10.0)
    assert (found.exposed_ms <= transfer + 1e-9).all() and found.computed_ms >= 0


def text_model() -> ModelSpec:
    """Layers of two matrices that have a bucket each, and one that fits into the bucket of the layer's norm."""
    shapes = {"up": (4 * HIDDEN, HIDDEN), "down": (HIDDEN, 4 * HIDDEN), "gate": (HIDDEN, 8), "norm": (HIDDEN,)}
    parameters = [ParameterSpec("embed_tokens.weight", (VOCABULARY, HIDDEN), -1, "bfloat16")]
    for layer, (name, shape) in itertools.product(range(LAYERS), shapes.items()):
        parameters.append(ParameterSpec(f"layers.{layer}.{name}.weight", shape, layer, "bfloat16"))
    module = ModuleSpec(LANGUAGE_MODEL, "layers", LAYERS, HIDDEN, 16, 16, 4 * HIDDEN, tuple(parameters))
    return ModelSpec({LANGUAGE_MODEL: module})


def cost_of(zero_stage: int, tokens: int, link: float, early: bool = True) -> StepCost:
    spec = text_model()
    device = replace(PLAIN, overlap_efficiency=EFFICIENCY, link_gb_per_s=link)
    costs = analytic_costs(spec, device, engine=Engine(early_sums=early))
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=2, zero_stage=zero_stage)})
    sizes = SampleSizes.uniform({LANGUAGE_MODEL: tokens}, 4)
    return StepCost(costs, plan, contiguous_step(plan, range(4), 1), sizes, sync_groups(spec, plan))


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("link", [3.0, 100.0, 1e6])
@pytest.mark.parametrize("tokens", [64, 8192])
def test_complete_layers_are_summed_in_the_last_backward(zero_stage, link, tokens):
    cost = cost_of(zero_stage, tokens, link)
    collective = all_gather if zero_stage else all_reduce
    whole = collective(cost.costs.device, (0, 1))
    _, backward = layer_table(cost.costs, LANGUAGE_MODEL).times(tokens, tokens**2)
    matrix, small = 4 * 4 * HIDDEN * HIDDEN, 4 * (8 * HIDDEN + HIDDEN)
    assert matrix > GRADIENT_BUCKET_BYTES > 4 * VOCABULARY * HIDDEN + small
    rest, sizes = [], []
    for layer in reversed(range(LAYERS)):
        # After a layer come those before it; the end of the first one is that of the backward.
        done = backward[: layer + 1].sum() if layer else 0.0
        rest += [done] * 3
        sizes += [matrix, matrix, small]
    sizes[-1] += 4 * VOCABULARY * HIDDEN  # the embeddings share the last bucket
    times, length = queued(rest, [whole(num_bytes) for num_bytes in sizes], 1e3, EFFICIENCY)
    assert cost.sync_ms(0) == pytest.approx(length - 1e3, abs=1e-9)
    found = cost.sum_times(0)
    assert found.start_ms == pytest.approx(np.array([start - 1e3 for start, _ in times]), abs=1e-6)
    total = 4 * sum(p.num_elements for p in cost.costs.spec.language_model.parameters)
    assert sum(sizes) == total and cost.sync_ms(0) < whole(total)


def test_sums_of_split_backwards_begin_in_the_last_weight_gradients():
    """Of the last stage they begin in two tasks, each of which has half of the layers of both of their chunks."""
    spec, tokens = text_model(), 8192
    device = replace(PLAIN, overlap_efficiency=EFFICIENCY, link_gb_per_s=100.0)
    costs = analytic_costs(spec, device)
    plan = splitting(resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=2)}))
    sizes = SampleSizes.uniform({LANGUAGE_MODEL: tokens}, 4)
    cost = StepCost(costs, plan, contiguous_step(plan, range(4), 1), sizes, sync_groups(spec, plan))
    table = layer_table(costs, LANGUAGE_MODEL)
    weights_ms = table.task_ms(tokens, tokens**2, 1, LAST_PASSES[1])
    for index, group in enumerate(cost.sync_groups):
        (_, _, place), *_ = group.stages
        start, stop = plan.modules[LANGUAGE_MODEL].replicas[0][place].layers
        whole = all_reduce(device, group.ranks)
        rest, buckets = [], []
        for layer in reversed(range(start, stop)):
            rows = weights_ms[0 if start == 0 else start + 1 : layer + 1]
            rest += [(1 + place) * float(rows.sum()) if layer > start else 0.0] * 3
            buckets += [4 * 4 * HIDDEN * HIDDEN] * 2 + [4 * (8 * HIDDEN + HIDDEN)]
        buckets[-1] += 4 * VOCABULARY * HIDDEN * (start == 0)
        _, length = queued(rest, [whole(num_bytes) for num_bytes in buckets], 1e3, EFFICIENCY)
        assert cost.sync_ms(index) == pytest.approx(length - 1e3, abs=1e-9)


def test_engines_that_sum_after_the_backward_hide_nothing():
    early, late = (cost_of(0, 8192, 100.0, early) for early in (True, False))
    whole = all_reduce(late.costs.device, (0, 1))
    total = 4 * sum(p.num_elements for p in late.costs.spec.language_model.parameters)
    assert late.sync_ms(0) == pytest.approx(whole(total)) and early.sync_ms(0) < 0.8 * late.sync_ms(0)
    assert late.sum_times(0).start_ms.tolist() == [0.0]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager"])
def test_the_last_chunk_of_a_replica_runs_backwards_last(schedule):
    _, plan = make_plan({"vision": [[(0,)], [(1,)]], LANGUAGE_MODEL: [[(2,), (3,)], [(4,), (5,)]]}, schedule=schedule)
    microbatches = [[[0], [1], [2]], [[3], [4]]]
    step = make_step({"vision": microbatches, LANGUAGE_MODEL: microbatches})
    spans = timeline_of(plan, step).spans
    last = {span.task.stage_key: span.task for span in spans if span.task.kind == "bwd"}
    assert len(last) == 6
    for (name, replica, _), task in last.items():
        table = step.chunk_table(name, step.replicas(name))
        (index,) = last_chunks(table, np.array([replica]))
        assert (table.microbatch[index], table.chunk[index]) == (task.microbatch, task.chunk)


def replayed(direction, alternates: bool, compute, gather, reduce, outer: float, efficiency: float) -> float:
    """
    Length of a pass without parts outside of its layers, by the rules of the engine: a layer waits for its weights, a
    sum for the sums before it, and transfers run one after the other.
    """
    other = 1 - direction if alternates else direction
    now = free = 0.0
    gathered, summed = {}, 0.0
    for action in pass_actions(direction, len(compute), previous=other, following=other):
        if action.op == "gather":
            free = gathered[action.layer] = max(now, free) + gather[action.layer]
        elif action.op == "sum":
            now = max(now, summed)
            free = summed = max(now, free) + (outer if action.layer == REST else reduce[action.layer])
        elif action.op == "compute":
            now = max(now, gathered.get(action.layer, 0.0))
            beside = max(0.0, free - now)
            own = compute[action.layer]
            now += own / efficiency if efficiency * beside >= own else own + (1 - efficiency) * beside
    return max(now, free)


@given(st.data(), st.integers(1, 6), st.booleans(), st.sampled_from([FORWARD, BACKWARD]), st.floats(0.1, 1.0))
def test_a_pass_is_as_long_as_its_actions(data, num_layers, alternates, direction, efficiency):
    times = st.lists(st.floats(0.01, 9), min_size=num_layers, max_size=num_layers)
    compute, gather, reduce = (np.array(data.draw(times)) for _ in range(3))
    transfers = PassTransfers(tuple(gather), tuple(reduce), 0.0, 2.0, (0, 0), alternates, efficiency)
    timed, length = transfers.time_transfers(compute, WHOLE_PASSES[direction])
    assert length == pytest.approx(replayed(direction, alternates, compute, gather, reduce, 2.0, efficiency))
    beside, exposed = transfers.of_pass(num_layers, WHOLE_PASSES[direction])
    assert length == pytest.approx(compute.sum() + longer_ms(compute, beside, efficiency).sum() + exposed)
    assert all(0 <= a.start_ms <= a.end_ms <= length + 1e-9 for a in timed)
    assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in zip(timed, timed[1:], strict=False))
    other = 1 - direction if alternates else direction
    issued = pass_actions(direction, num_layers, previous=other, following=other)
    assert [transfer.action for transfer in timed] == [a for a in issued if a.op in ("gather", "sum")]


@pytest.mark.parametrize("is_backward", [False, True])
def test_parts_outside_of_layers_hide_the_first_gather(is_backward):
    transfers = PassTransfers((1.0, 2.0, 4.0), (8.0, 16.0, 32.0), 64.0, 128.0, (1, 1), False, 1.0)
    forward = [("gather 0", 0.0, 1.0), ("gather 1", 10.0, 12.0), ("gather 2", 20.0, 24.0)]
    backward = [
        *(("gather 2", 0.0, 4.0), ("gather 1", 10.0, 12.0), ("gather 0", 20.0, 21.0)),
        *(("sum 2", 21.0, 53.0), ("sum 1", 53.0, 69.0), ("sum 0", 79.0, 87.0), ("sum rest", 87.0, 215.0)),
    ]
    compute = np.full(5, 10.0)
    timed, length = transfers.time_transfers(compute, WHOLE_PASSES[is_backward])
    assert [(str(t.action), t.start_ms, t.end_ms) for t in timed] == (backward if is_backward else forward)
    assert length == (215.0 if is_backward else 50.0) and (not is_backward or timed[3].computed_ms == 30.0)
    beside, exposed = transfers.of_pass(5, WHOLE_PASSES[is_backward])
    assert length == compute.sum() + longer_ms(compute, beside, 1.0).sum() + exposed
