"""The bound of a rank's memory, worked out by hand on a small model in bfloat16."""

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import StepCost, memory_per_rank, memory_timeline, stage_memory
from hf_mmparallel.cost.activations import Precision, transient_memory
from hf_mmparallel.cost.memory import activation_sizes
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.schedule import build_program, simulate
from tests.cost.models import HIDDEN, LAYER_MATRICES, LAYERS, VOCABULARY, WIDE, h100, model
from tests.schedule.builders import make_step

SIZES = SampleSizes.uniform({"vision": 7, LANGUAGE_MODEL: 10}, 4)
HEAD = VOCABULARY * HIDDEN
# Of a token in a trained layer, bytes: what queries, keys and values read; these and the output; a float32 value of
# each head; what an RMS norm reads, in float32, and gives; what `up` reads; before and behind the activation function.
LAYER = 2 * HIDDEN + 2 * 4 * HIDDEN + 4 * 4 + (4 + 2) * HIDDEN + 2 * HIDDEN + 2 * 2 * WIDE
FROZEN_LAYER = 2 * 4 * HIDDEN + 4 * 4 + 4 * HIDDEN + 2 * WIDE
LOSS = 4 * VOCABULARY


def memory_of(spec, plan, num_microbatches=2):
    step = contiguous_step(plan, range(4), 4 // num_microbatches)
    program = build_program(plan, step, sync_groups(spec, plan))
    in_flight = simulate(plan, program).peak_in_flight
    return memory_per_rank(h100(spec), plan, step, SIZES, in_flight), in_flight


def test_weights_and_optimizer_state_have_the_type_of_the_weights_and_gradients_float32():
    spec = model(("vision",))
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2, tp_size=2)})
    memory, _ = memory_of(spec, plan)
    assert set(memory) == set(range(5))
    frozen, projector = LAYERS * (LAYER_MATRICES + HIDDEN), HIDDEN * HIDDEN
    assert memory[0].weights == 2 * (frozen + projector)
    # Master weights and two moments, all in float32.
    assert memory[0].gradients == 4 * projector and memory[0].optimizer == 12 * projector
    assert memory[0].master == 4 * projector and memory[0].host == 0
    # Tied embeddings are whole on each rank, at both ends; their gradients are summed in a bucket.
    half = 2 * LAYER_MATRICES / 2 + 2 * HIDDEN + HEAD
    assert memory[1].weights == 2 * half and memory[1] == memory[2] and memory[3].weights == 2 * half
    assert memory[1].gradients == 4 * half + 4 * HEAD
    assert memory[1].total_gib == memory[1].total / 2**30


def test_memory_of_settings_of_the_optimizer_and_of_frozen_weights():
    spec = model(("vision",))
    projector, frozen_layer = HIDDEN * HIDDEN, 2 * (LAYER_MATRICES + HIDDEN)
    in_place = resolve_plan(spec, {"vision": ModulePlugin(master_weights=False)})
    assert memory_of(spec, in_place)[0][0].optimizer == 4 * projector  # both moments in the weights' dtype
    offloaded = memory_of(spec, resolve_plan(spec, {"vision": ModulePlugin(offload_optimizer=True)}))[0][0]
    assert offloaded.optimizer == 0 and offloaded.host == (12 + 2 * 4) * projector  # and its gradients, twice
    plain = memory_of(spec, resolve_plan(spec, {}))[0][0]
    streamed = memory_of(spec, resolve_plan(spec, {"vision": ModulePlugin(offload_params=True)}))[0][0]
    assert streamed.host == LAYERS * frozen_layer
    assert streamed.weights == plain.weights - (LAYERS - 2) * frozen_layer


def test_copies_sum_their_gradients_in_a_bucket(monkeypatch):
    spec = model(tied=False)
    gradients = []
    for plugin in (ModulePlugin(), ModulePlugin(dp_size=2), ModulePlugin(cp_size=2)):
        memory, _ = memory_of(spec, resolve_plan(spec, {LANGUAGE_MODEL: plugin}))
        gradients.append(memory[1].gradients)
    assert gradients[1] == gradients[2] == 2 * gradients[0]
    monkeypatch.setattr(stage_memory, "GRADIENT_BUCKET_BYTES", 1000)
    stage_memory._stage_memory.cache_clear()
    memory, _ = memory_of(spec, resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(dp_size=2)}))
    assert memory[1].gradients == gradients[0] + 1000
    stage_memory._stage_memory.cache_clear()


def test_what_stages_keep_of_a_token():
    spec = model(("vision",))
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2)})
    memories = stage_memories(h100(spec), plan)
    vision, first, last = (memories[key].saved.sum(axis=0)[1] for key in memories)
    assert vision == 2 * HIDDEN + 2 * HIDDEN  # what the projector reads, and the features
    assert first == 2 * LAYER + 2 * HIDDEN  # two layers, and what goes to the next stage
    assert last == 2 * LAYER + 2 * HIDDEN + LOSS  # the head reads the last hidden state
    frozen = stage_memories(h100(model(("vision", LANGUAGE_MODEL))), plan)
    assert frozen[LANGUAGE_MODEL, 0, 1].saved.sum(axis=0)[1] == 2 * FROZEN_LAYER + LOSS
    nothing = stage_memories(h100(_all_frozen()), plan)
    assert not any(memory.saved.any() for memory in nothing.values())


def _all_frozen():
    spec = model()
    modules = {name: module.with_frozen(True) for name, module in spec.modules.items()}
    return type(spec)(modules, spec.tied)


def test_checkpointing_keeps_inputs_and_one_layer_while_it_runs():
    spec = model()
    plans = [resolve_plan(spec, {"vision": ModulePlugin(activation_checkpointing=again)}) for again in (False, True)]
    whole, again = (stage_memories(h100(spec), plan)["vision", 0, 0] for plan in plans)
    assert whole.saved[1:-2].sum() == LAYERS * LAYER and again.saved[1:-2].sum() == LAYERS * 2 * HIDDEN
    held = np.array([0.0, 100.0, 1.0])
    more = again.backward_bytes(held, False) - again.saved_bytes(held)
    assert more >= 100 * LAYER and again.backward_bytes(held, False) < whole.backward_bytes(held, False)


def test_a_first_backward_makes_gradients_while_it_frees_activations():
    memory = stage_memories(h100(model()), resolve_plan(model(), {}))[LANGUAGE_MODEL, 0, 0]
    few, many = np.array([0.0, 1.0, 1.0]), np.array([0.0, 1e5, 1.0])
    embedding = (2 + 4) * HEAD  # the second gradient of a tied matrix, before it is cast and added to the first
    assert memory.backward_bytes(few, True) == pytest.approx(memory.state.gradients + embedding, rel=0.01)
    assert memory.backward_bytes(many, True) == pytest.approx(memory.backward_bytes(many, False), rel=0.01)
    logits = 1e5 * 2 * 4 * VOCABULARY  # the gradients of the loss and of its softmax, beside what is kept
    assert memory.backward_bytes(many, False) == pytest.approx(memory.saved_bytes(many) + logits, rel=1e-6)


def test_matrices_are_shared_by_tensor_parallel_ranks_and_tokens_by_rows():
    spec = model()
    alone, tp, cp = (
        stage_memories(h100(spec), resolve_plan(spec, {LANGUAGE_MODEL: plugin}))[LANGUAGE_MODEL, 0, 0]
        for plugin in (ModulePlugin(), ModulePlugin(tp_size=2), ModulePlugin(cp_size=2))
    )
    split = 2 * 4 * HIDDEN + 4 * 4 + 2 * 2 * WIDE
    assert alone.saved[1, 1] - tp.saved[1, 1] == split / 2
    held = np.array([0.0, 100.0, 1.0])
    assert cp.saved_bytes(held) == alone.saved_bytes(held) / 2 and cp.state == alone.state


def with_heads(num_kv_heads, attention="sdpa"):
    spec = model(tied=False)
    language = replace(spec.language_model, num_kv_heads=num_kv_heads, attention=attention)
    return replace(spec, modules={**spec.modules, LANGUAGE_MODEL: language})


@pytest.mark.parametrize(("attention", "whole"), [("sdpa", True), ("bitfield", True), ("eager", False)])
def test_each_tensor_parallel_rank_keeps_a_whole_mask_and_its_own_scores(attention, whole):
    spec = with_heads(4, attention)
    of_pair = 2 if whole else 4 * (4 + 2)  # a mask in bfloat16; scores of four heads in float32, and cast
    for tp_size in (1, 2):
        plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(tp_size=tp_size)})
        kept = stage_memories(h100(spec), plan)[LANGUAGE_MODEL, 0, 0].saved[:, 0].sum()
        assert kept == LAYERS * of_pair / (1 if whole else tp_size)


@pytest.mark.parametrize(
    ("num_kv_heads", "tp_size", "copied_heads"),
    [
        (2, 1, 2 * (4 - 2)),  # keys and values of two heads, repeated for four
        (2, 2, 0),  # two heads of queries share the only one of keys, which is a view
        (1, 1, 0),
        (4, 2, 0),
    ],
)
def test_each_tensor_parallel_rank_repeats_the_keys_of_its_own_heads(num_kv_heads, tp_size, copied_heads):
    spec = with_heads(num_kv_heads)
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(tp_size=tp_size)})
    held = activation_sizes(h100(spec), plan, STEP, LENGTHS)[LANGUAGE_MODEL, 0, 1, 0]
    tokens = 3 * 20  # three rows, padded to the longest
    assert held.tolist() == [3 * 20**2 + copied_heads * HIDDEN // 4 * tokens, tokens, 1]


LENGTHS = SampleSizes.of_sequences({"vision": [[4, 4], [], [9], [2]], LANGUAGE_MODEL: [[20], [5], [12], [7]]})
STEP = make_step({"vision": [[[0, 1], [2, 3]]], LANGUAGE_MODEL: [[[1], [0, 2, 3]]]})


def test_microbatches_are_padded_unless_rows_are_packed():
    spec, chunk = model(), (LANGUAGE_MODEL, 0, 1, 0)
    plan = resolve_plan(spec, {})
    held = activation_sizes(h100(spec), plan, STEP, LENGTHS)
    assert held[chunk].tolist() == [3 * 20**2, 3 * 20, 1] and held[LANGUAGE_MODEL, 0, 0, 0].tolist() == [0, 5, 1]
    assert held["vision", 0, 1, 0].tolist() == [0, 11, 1] and held["vision", 0, 0, 0].tolist() == [0, 0, 0]
    cut = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(cp_size=2, cp_block=8)})
    assert activation_sizes(h100(spec), cut, STEP, LENGTHS)[chunk].tolist() == [
        0,
        48,
        1,
    ]  # 39 in blocks of two times eight


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager"])
@pytest.mark.parametrize(
    "plugins",
    [
        {},
        {LANGUAGE_MODEL: ModulePlugin(pp_size=2, tp_size=2)},
        {LANGUAGE_MODEL: ModulePlugin(colocate_with="vision")},
        {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, activation_checkpointing=True)},
        {LANGUAGE_MODEL: ModulePlugin(cp_size=2)},
    ],
    ids=["apart", "stages", "shared", "copies", "rows"],
)
@pytest.mark.parametrize("frozen", [(), ("vision",), ("vision", LANGUAGE_MODEL)])
def test_the_bound_is_one(schedule, plugins, frozen):
    spec = model(frozen)
    plan = resolve_plan(spec, plugins, schedule=schedule)
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 300, (2, 16))
    sizes = SampleSizes.of_sequences(
        {
            "vision": [[int(n)] if n > 60 else [] for n in lengths[0]],
            LANGUAGE_MODEL: [[int(n) + 1] for n in lengths[1]],
        }
    )
    step = contiguous_step(plan, range(16), 2)
    cost = StepCost(h100(spec), plan, step, sizes)
    simulation = simulate(plan, build_program(plan, step, [], cost), cost)
    bound = memory_per_rank(h100(spec), plan, step, sizes, simulation.peak_in_flight)
    for rank, (times, num_bytes) in memory_timeline(h100(spec), plan, step, sizes, simulation.spans).items():
        assert (np.diff(times) >= 0).all() and num_bytes.max() <= bound[rank].total * (1 + 1e-9)
        assert num_bytes.max() >= bound[rank].weights + bound[rank].optimizer


@pytest.mark.parametrize("gated", [False, True])
def test_a_frozen_layer_has_nothing_to_free_while_its_activation_function_runs_back(gated):
    found = {}
    for frozen in ((), (LANGUAGE_MODEL,)):
        spec = model(frozen)
        language, uses = spec.language_model, spec.uses[LANGUAGE_MODEL, 0]
        if gated:
            up = next(use for use in uses if "mlp.up" in use.parameter.name)
            gate = replace(up, parameter=replace(up.parameter, name=up.parameter.name.replace("up", "gate")))
            uses = (*uses[: uses.index(up)], gate, *uses[uses.index(up) :])
        found[frozen] = transient_memory(language, uses, Precision(2, 2), 1).backward.token
    # Of a token, in bfloat16: the gradient behind the function and that before it, or those of both factors of a gate.
    # A trained last matrix has freed its input by then, a frozen one had none. Attention needs less: 2 * 4 * HIDDEN.
    gradients = 3 if gated else 2
    outside = 2 * 2 * HIDDEN  # before and behind the layer
    assert found[(LANGUAGE_MODEL,)] == gradients * 2 * WIDE + outside
    assert found[()] == (gradients - 1) * 2 * WIDE + outside
