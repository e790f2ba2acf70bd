"""Estimates of time and memory against numbers worked out by hand."""

import pytest

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import HARDWARE, AnalyticCost, flops_per_token, hardware, memory_per_rank
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.schedule import Task, build_program, simulate
from tests.cost.models import HIDDEN, LAYER_MATRICES, LAYERS, VOCABULARY, WIDE, model
from tests.schedule.builders import make_step

SIZES = SampleSizes.uniform({"vision": 7, LANGUAGE_MODEL: 10}, 4)


def cost_of(spec, **plugins):
    plan = resolve_plan(spec, plugins)
    step = contiguous_step(plan, range(4), 2)
    return AnalyticCost(spec, plan, step, SIZES, HARDWARE["h100"])


def test_operations_of_a_token():
    spec = model()
    stage = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2)}).stage(LANGUAGE_MODEL, 0, 1)
    # Two layers, the tied head, and causal attention over 10 tokens.
    expected = 2 * (2 * LAYER_MATRICES + VOCABULARY * HIDDEN) + 2 * 10 * HIDDEN * 2
    assert flops_per_token(spec, LANGUAGE_MODEL, stage, 10) == expected
    first = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2)}).stage(LANGUAGE_MODEL, 0, 0)
    # Reading an embedding multiplies nothing.
    assert flops_per_token(spec, LANGUAGE_MODEL, first, 10) == 2 * 2 * LAYER_MATRICES + 2 * 10 * HIDDEN * 2


def test_backward_costs_what_is_trainable_and_what_lies_behind_it():
    forward, backward = Task("fwd", LANGUAGE_MODEL, 0, 0, 0), Task("bwd", LANGUAGE_MODEL, 0, 0, 0)
    cost = cost_of(model())
    assert cost(backward) == pytest.approx(2 * cost(forward))
    cost = cost_of(model((LANGUAGE_MODEL,)))
    assert cost(backward) == pytest.approx(cost(forward))
    cost = cost_of(model((LANGUAGE_MODEL,)), language_model=ModulePlugin(activation_checkpointing=True))
    assert cost(backward) == pytest.approx(2 * cost(forward))
    # Of a frozen tower only the projector behind it runs backwards, for its weights alone.
    cost = cost_of(model(("vision",)))
    forward, backward = Task("fwd", "vision", 0, 0, 0), Task("bwd", "vision", 0, 0, 0)
    share = HIDDEN * HIDDEN / (LAYERS * LAYER_MATRICES + HIDDEN * HIDDEN)
    assert cost(backward) == pytest.approx(share * cost(forward))


def test_time_follows_samples_ranks_and_device():
    spec = model()
    whole, half = cost_of(spec), cost_of(spec, language_model=ModulePlugin(tp_size=2))
    task = Task("fwd", LANGUAGE_MODEL, 0, 0, 0)
    assert half(task) == pytest.approx(whole(task) / 2)
    flops = flops_per_token(spec, LANGUAGE_MODEL, whole.plan.stage(LANGUAGE_MODEL, 0, 0), 10) * 10 * 2
    assert whole(task) == pytest.approx(flops / (989.4e12 * 0.4) * 1e3)


def test_keys_that_take_longer_than_attention_cost_time():
    spec = model()
    task = Task("fwd", LANGUAGE_MODEL, 0, 0, 0)
    alone, shared = cost_of(spec), cost_of(spec, language_model=ModulePlugin(cp_size=2))
    received = 2 * 2 * HIDDEN * 10 / 2  # two bytes, keys and values, the other half of ten tokens
    attention = 2 * 10 * 10 * HIDDEN / 2 / (989.4e9 * 0.4)
    gather = LAYERS * (received / 450e6 - attention)
    assert gather > 0
    assert shared(task) == pytest.approx(alone(task) / 2 + 2 * gather)
    long = SampleSizes.uniform({"vision": 7, LANGUAGE_MODEL: 10**6}, 4)
    times = [AnalyticCost(spec, cost.plan, cost.step, long, HARDWARE["h100"])(task) for cost in (alone, shared)]
    assert times[1] == pytest.approx(times[0] / 2)  # attention hides it


MIXED = SampleSizes.of_sequences(
    {"vision": [[4, 4], [], [9], [2]], LANGUAGE_MODEL: [[20], [5], [12], [7]]},
)
DEFERRED = make_step({"vision": [[[0, 1], [2, 3]]], LANGUAGE_MODEL: [[[1], [0, 2, 3]]]})


def test_a_chunk_costs_the_sum_of_its_samples():
    spec = model()
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2)})
    cost = AnalyticCost(spec, plan, DEFERRED, MIXED, HARDWARE["a100"])
    for task, lengths in (
        (Task("fwd", "vision", 0, 0, 0, 0), []),
        (Task("fwd", "vision", 0, 0, 0, 1), [4, 4]),
        (Task("fwd", "vision", 0, 0, 1, 0), [9, 2]),
        (Task("fwd", LANGUAGE_MODEL, 0, 1, 1), [20, 12, 7]),
    ):
        stage = plan.stage(*task.stage_key)
        flops = sum(n * flops_per_token(spec, task.module, stage, n) for n in lengths)
        assert cost(task) == pytest.approx(flops / HARDWARE["a100"].flops_per_ms)
    program = build_program(plan, DEFERRED, [], cost)
    sent = [a.message for a in program.actions[0] if a.op == "send" and a.message is not None]
    # Sample 1 has no image, sample 0 is taken one microbatch later.
    assert [cost.message_ms(m) * HARDWARE["a100"].link_gb_per_s * 1e6 for m in sent] == pytest.approx(
        [2 * HIDDEN * tokens for tokens in (0, 8, 11)]
    )


def test_messages_take_time():
    cost = cost_of(model())
    program = build_program(cost.plan, cost.step, [], cost)
    message = next(a.message for a in program.actions[0] if a.op == "send" and a.message is not None)
    assert cost.message_ms(message) == pytest.approx(2 * 2 * 7 * HIDDEN / 450e9 * 1e3)


def test_memory_of_a_rank():
    spec = model(("vision",))
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2, tp_size=2)})
    step = contiguous_step(plan, range(4), 2)
    program = build_program(plan, step, sync_groups(spec, plan))
    in_flight = simulate(plan, program).peak_in_flight
    memory = memory_per_rank(spec, plan, step, SIZES, in_flight)
    assert set(memory) == set(range(5))
    frozen = LAYERS * (LAYER_MATRICES + HIDDEN)
    projector = HIDDEN * HIDDEN
    assert memory[0].weights == 2 * (frozen + projector)
    assert memory[0].gradients == 4 * projector and memory[0].optimizer == 8 * projector
    half = (2 * LAYER_MATRICES + VOCABULARY * HIDDEN) / 2 + 2 * HIDDEN
    assert memory[1].weights == 2 * half and memory[1] == memory[2] and memory[3].weights == 2 * half
    kept = 2 * 2 * (8 * HIDDEN + 3 * WIDE) / 2 * 10  # two layers, two bytes, halved by tp, ten tokens
    assert in_flight[LANGUAGE_MODEL, 0, 0] == 2 and in_flight[LANGUAGE_MODEL, 0, 1] == 1
    assert memory[1].activations == 2 * 2 * kept
    assert memory[3].activations == 2 * (kept + 8 * VOCABULARY * 10 / 2)
    assert memory[1].total_gib == memory[1].total / 2**30


def test_the_largest_microbatch_counts():
    spec = model()
    plan = resolve_plan(spec, {})
    in_flight = {("vision", 0, 0): 1.5, (LANGUAGE_MODEL, 0, 0): 1.0}
    memory = memory_per_rank(spec, plan, DEFERRED, MIXED, in_flight)
    kept = 2 * LAYERS * (8 * HIDDEN + 3 * WIDE)
    assert memory[0].activations == 1.5 * 11 * kept
    assert memory[1].activations == 39 * (kept + 8 * VOCABULARY)


def test_ranks_that_share_tokens_keep_their_share_of_them():
    spec = model()
    kept = []
    for plugin in (ModulePlugin(), ModulePlugin(cp_size=2)):
        plan = resolve_plan(spec, {LANGUAGE_MODEL: plugin})
        step = contiguous_step(plan, range(4), 2)
        memory = memory_per_rank(spec, plan, step, SIZES, {(LANGUAGE_MODEL, 0, 0): 1.0})
        kept.append(memory[1])
    assert kept[1].activations == kept[0].activations / 2
    assert kept[1].weights == kept[0].weights


def test_checkpointing_keeps_less():
    totals = []
    for checkpointing in (False, True):
        spec = model()
        plan = resolve_plan(spec, {"vision": ModulePlugin(activation_checkpointing=checkpointing)})
        step = contiguous_step(plan, range(4), 2)
        totals.append(memory_per_rank(spec, plan, step, SIZES, {("vision", 0, 0): 1.0})[0].activations)
    assert totals[1] == 2 * 2 * 7 * (LAYERS * HIDDEN + 8 * HIDDEN + 3 * WIDE)
    assert totals[1] < totals[0]


def test_unknown_device_names_the_nearest():
    assert hardware("H100").memory_gib == 80
    with pytest.raises(ValueError, match=r"`gpu_type=h10` is not in the table.*`h100`"):
        hardware("h10")
