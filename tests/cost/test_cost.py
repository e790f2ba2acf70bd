"""Estimates of time and memory against numbers worked out by hand."""

from dataclasses import replace

import pytest

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import StepCost, find_device, layer_flops
from hf_mmparallel.cost.analytic import ATTENTION_BACKWARD
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.schedule import Task, build_program
from tests.cost.models import HIDDEN, LAYER_MATRICES, LAYERS, VOCABULARY, h100, model
from tests.schedule.builders import make_step

SIZES = SampleSizes.uniform({"vision": 7, LANGUAGE_MODEL: 10}, 4)
H100 = find_device("h100")
READ_MS = 2 / H100.memory_bytes_per_ms  # of an element of a matrix
TOKEN_MS = 2 / H100.flops_per_ms
FORWARD, BACKWARD = Task("fwd", LANGUAGE_MODEL, 0, 0, 0), Task("bwd", LANGUAGE_MODEL, 0, 0, 0)
HEAD = VOCABULARY * HIDDEN
STACK = LAYERS * LAYER_MATRICES
ATTENTION = LAYERS * 2 * HIDDEN / H100.flops_per_ms  # of a squared token


def cost_of(spec, **plugins):
    plan = resolve_plan(spec, plugins)
    step = contiguous_step(plan, range(4), 2)
    return StepCost(h100(spec), plan, step, SIZES, sync_groups(spec, plan))


def test_operations_of_a_token():
    spec = model()
    assert layer_flops(spec, LANGUAGE_MODEL, 0) == (2 * LAYER_MATRICES, 2 * HIDDEN)
    assert layer_flops(spec, "vision", 0) == (2 * LAYER_MATRICES, 4 * HIDDEN)
    # Reading an embedding multiplies nothing; the tied head does.
    assert layer_flops(spec, LANGUAGE_MODEL, -1) == (0, 0)
    assert layer_flops(spec, LANGUAGE_MODEL, LAYERS) == (2 * HEAD, 0)
    assert layer_flops(spec, "vision", LAYERS) == (2 * HIDDEN * HIDDEN, 0)


def test_a_forward_is_operations_attention_and_the_reading_of_weights():
    tokens, squares = 20, 200  # two samples of ten
    expected = (STACK + HEAD) * (tokens * TOKEN_MS + READ_MS) + ATTENTION * squares
    assert cost_of(model())(FORWARD) == pytest.approx(expected)


def test_backward_costs_what_is_trainable_and_what_lies_behind_it():
    tokens, squares = 20, 200
    data = (STACK + HEAD) * (tokens * TOKEN_MS + READ_MS) + ATTENTION_BACKWARD * ATTENTION * squares
    weights = (STACK + HEAD) * (tokens * TOKEN_MS + 2 * READ_MS)  # gradients are written in four bytes
    assert cost_of(model())(BACKWARD) == pytest.approx(data + weights)
    cost = cost_of(model((LANGUAGE_MODEL,)))
    assert cost(BACKWARD) == pytest.approx(data)
    again = cost_of(model((LANGUAGE_MODEL,)), language_model=ModulePlugin(activation_checkpointing=True))
    head = HEAD * (tokens * TOKEN_MS + READ_MS)  # is not computed again
    assert again(BACKWARD) == pytest.approx(data + cost(FORWARD) - head)
    # Of a frozen tower only the projector behind it runs backwards, for its weights alone.
    cost = cost_of(model(("vision",)))
    assert cost(Task("bwd", "vision", 0, 0, 0)) == pytest.approx(HIDDEN * HIDDEN * (14 * TOKEN_MS + 2 * READ_MS))
    # Nothing is trained at all.
    cost = cost_of(model(("vision", LANGUAGE_MODEL)))
    assert cost(Task("bwd", "vision", 0, 0, 0)) > 0 and cost(BACKWARD) == pytest.approx(data)


def test_time_follows_ranks_and_their_sums():
    spec = model(tied=False)
    whole, half = cost_of(spec), cost_of(spec, language_model=ModulePlugin(tp_size=2))
    sums = LAYERS * 2 * 2 * HIDDEN * 20 / H100.link_bytes_per_ms(range(2))  # two rings a layer, two bytes a value
    assert half(FORWARD) == pytest.approx(whole(FORWARD) / 2 + sums)
    head = HEAD * (20 * TOKEN_MS + READ_MS)  # tied to the embeddings, it is whole on both ranks
    tied = [cost_of(model(), language_model=ModulePlugin(tp_size=size))(FORWARD) for size in (1, 2)]
    assert tied[1] - head == pytest.approx((tied[0] - head) / 2 + sums)


def test_each_matrix_that_is_cut_by_columns_sums_the_gradient_of_its_input():
    layers = h100(model()).layers
    one, two = (layers.layer(LANGUAGE_MODEL, 1, size) for size in (1, 2))
    ring = 2 * HIDDEN / H100.link_bytes_per_ms(range(2))  # two bytes a value, half of them twice
    assert two.forward.token - one.forward.token / 2 == pytest.approx(2 * ring)
    columns = sum(use.multiplies for use in model().uses[LANGUAGE_MODEL, 1]) - 2  # all but the last of both parts
    assert two.data_gradient.token - one.data_gradient.token / 2 == pytest.approx(columns * ring)


def test_gradient_sums_take_time():
    cost = cost_of(model(), language_model=ModulePlugin(dp_size=2))
    (place,) = [i for i, group in enumerate(cost.groups) if group.stages[0][0] == LANGUAGE_MODEL]
    num_bytes = 4 * (STACK + HEAD + LAYERS * HIDDEN)  # in float32
    assert cost.sync_ms(place) == pytest.approx(num_bytes / 450e6)


def test_links_between_nodes_are_slower():
    assert H100.link_bytes_per_ms([0, 7]) == 450e6 and H100.link_bytes_per_ms([7, 8]) == 50e6


def test_keys_that_take_longer_than_attention_cost_time():
    spec = model()
    alone, shared = cost_of(spec), cost_of(spec, language_model=ModulePlugin(cp_size=2, cp_block=10))
    received = 2 * 2 * HIDDEN * 20 / 2  # two bytes, keys and values, the other half of twenty tokens
    gather = LAYERS * received / 450e6 - ATTENTION * 200 / 2
    assert gather > 0
    read = (STACK + HEAD) * READ_MS  # each rank reads all weights
    assert shared(FORWARD) == pytest.approx((alone(FORWARD) + read) / 2 + gather)
    long = SampleSizes.uniform({"vision": 7, LANGUAGE_MODEL: 10**6}, 4)
    times = [StepCost(cost.costs, cost.plan, cost.step, long)(FORWARD) for cost in (alone, shared)]
    assert times[1] == pytest.approx((times[0] + read) / 2)  # attention hides it


MIXED = SampleSizes.of_sequences(
    {"vision": [[4, 4], [], [9], [2]], LANGUAGE_MODEL: [[20], [5], [12], [7]]},
)
DEFERRED = make_step({"vision": [[[0, 1], [2, 3]]], LANGUAGE_MODEL: [[[1], [0, 2, 3]]]})


def test_a_packed_chunk_costs_the_sum_of_its_samples():
    spec = model()
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2)})
    cost = StepCost(replace(h100(spec), packing=True), plan, DEFERRED, MIXED)
    vision, half = STACK + HIDDEN * HIDDEN, STACK / 2 + HEAD
    for task, lengths, matrices, attention in (
        (Task("fwd", "vision", 0, 0, 0, 0), [], vision, 2 * ATTENTION),
        (Task("fwd", "vision", 0, 0, 0, 1), [4, 4], vision, 2 * ATTENTION),
        (Task("fwd", "vision", 0, 0, 1, 0), [9, 2], vision, 2 * ATTENTION),
        (Task("fwd", LANGUAGE_MODEL, 0, 1, 1), [20, 12, 7], half, ATTENTION / 2),
    ):
        expected = matrices * (sum(lengths) * TOKEN_MS + READ_MS) + attention * sum(n * n for n in lengths)
        assert cost(task) == pytest.approx(expected)
    program = build_program(plan, DEFERRED, [], cost)
    sent = [a.message for a in program.actions[0] if a.op == "send" and a.message is not None]
    # Sample 1 has no image, sample 0 is taken one microbatch later.
    assert [cost.message_ms(m) * 450e6 for m in sent] == pytest.approx([2 * HIDDEN * tokens for tokens in (0, 8, 11)])


def test_messages_take_time():
    cost = cost_of(model())
    program = build_program(cost.plan, cost.step, [], cost)
    message = next(a.message for a in program.actions[0] if a.op == "send" and a.message is not None)
    assert cost.message_ms(message) == pytest.approx(2 * 2 * 7 * HIDDEN / 450e9 * 1e3)


def test_unknown_device_names_the_nearest():
    assert find_device("H100").memory_gib == 79.1
    with pytest.raises(ValueError, match=r"`gpu_type=h10` is not in the table.*`h100`"):
        find_device("h10")
