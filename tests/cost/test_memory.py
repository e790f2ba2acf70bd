"""The bound of a rank's memory, and what it keeps over a step, worked out by hand on a small model in bfloat16."""

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import StepCost, activation_peaks, memory_per_rank, memory_timeline, stage_memory
from hf_mmparallel.cost.activations import Precision, transient_memory
from hf_mmparallel.cost.memory import activation_sizes, sample_features
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.schedule import Task
from tests.cost.models import HIDDEN, LAYER_MATRICES, LAYERS, VOCABULARY, WIDE, h100, model, with_head
from tests.schedule.builders import make_step, timeline_of

SIZES = SampleSizes.uniform({"vision": 7, LANGUAGE_MODEL: 10}, 4)
HEAD = VOCABULARY * HIDDEN
# Of a token in a trained layer, bytes: what queries, keys and values read; these and the output; a float32 value of
# each head; what an RMS norm reads, in float32, and gives; what `up` reads; before and behind the activation function.
LAYER = 2 * HIDDEN + 2 * 4 * HIDDEN + 4 * 4 + (4 + 2) * HIDDEN + 2 * HIDDEN + 2 * 2 * WIDE
FROZEN_LAYER = 2 * 4 * HIDDEN + 4 * 4 + 4 * HIDDEN + 2 * WIDE
LOSS = 4 * VOCABULARY


def memory_of(spec, **plugins):
    """Rank -> its memory in a simulated step of two microbatches."""
    plan = resolve_plan(spec, plugins)
    step = contiguous_step(plan, range(4), 2)
    in_flight = timeline_of(plan, step, sync_groups(spec, plan)).peak_in_flight
    return memory_per_rank(h100(spec), plan, step, SIZES, in_flight)


def stages_of(spec, **plugins):
    """Stage -> its memory."""
    return stage_memories(h100(spec), resolve_plan(spec, plugins))


def test_weights_and_optimizer_state_have_the_type_of_the_weights_and_gradients_float32():
    spec = model(("vision",))
    memory = memory_of(spec, language_model=ModulePlugin(pp_size=2, tp_size=2))
    assert set(memory) == set(range(5))
    frozen, projector = LAYERS * (LAYER_MATRICES + HIDDEN), HIDDEN * HIDDEN
    assert memory[0].weights == 2 * (frozen + projector)
    # Master weights and two moments, all in float32.
    assert memory[0].gradients == 4 * projector and memory[0].optimizer == 12 * projector
    assert memory[0].master == 4 * projector and memory[0].host == 0
    # Each rank has half of the words of tied embeddings, at both ends; their gradients are summed in a bucket.
    half = 2 * LAYER_MATRICES / 2 + 2 * HIDDEN + HEAD / 2
    assert memory[1].weights == 2 * half and memory[1] == memory[2] and memory[3].weights == 2 * half
    assert memory[1].gradients == 4 * half + 4 * HEAD / 2
    assert memory[1].total_gib == memory[1].total / 2**30


def test_memory_of_settings_of_the_optimizer_and_of_frozen_weights():
    spec = model(("vision",))
    projector, frozen_layer = HIDDEN * HIDDEN, 2 * (LAYER_MATRICES + HIDDEN)
    plain, in_place, offloaded, streamed = (
        memory_of(spec, vision=ModulePlugin(**own))[0]
        for own in ({}, {"master_weights": False}, {"offload_optimizer": True}, {"offload_params": True})
    )
    assert in_place.optimizer == 4 * projector  # both moments in the weights' dtype
    assert offloaded.optimizer == 0 and offloaded.host == (12 + 2 * 4) * projector  # and its gradients, twice
    assert streamed.host == LAYERS * frozen_layer
    assert streamed.weights == plain.weights - (LAYERS - 2) * frozen_layer


def test_copies_sum_their_gradients_in_a_bucket(monkeypatch):
    spec = model(tied=False)
    plugins = (ModulePlugin(), ModulePlugin(dp_size=2), ModulePlugin(cp_size=2))
    alone, *copies = (memory_of(spec, language_model=plugin)[1].gradients for plugin in plugins)
    assert copies == [2 * alone, 2 * alone]
    monkeypatch.setattr(stage_memory, "GRADIENT_BUCKET_BYTES", 1000)
    stage_memory._stage_memory.cache_clear()
    assert memory_of(spec, language_model=plugins[1])[1].gradients == alone + 1000
    stage_memory._stage_memory.cache_clear()


def test_what_stages_keep_of_a_token():
    two_stages = {LANGUAGE_MODEL: ModulePlugin(pp_size=2)}
    memories = stages_of(model(("vision",)), **two_stages)
    vision, first, last = (memories[key].saved.sum(axis=0)[1] for key in memories)
    assert vision == 2 * HIDDEN + 2 * HIDDEN  # what the projector reads, and the features
    assert first == 2 * LAYER + 2 * HIDDEN  # two layers, and what goes to the next stage
    assert last == 2 * LAYER + 2 * HIDDEN + LOSS  # the head reads the last hidden state
    frozen = stages_of(model(("vision", LANGUAGE_MODEL)), **two_stages)
    assert frozen[LANGUAGE_MODEL, 0, 1].saved.sum(axis=0)[1] == 2 * FROZEN_LAYER + LOSS
    whole = replace(model(), modules={name: own.with_frozen(True) for name, own in model().modules.items()})
    assert not any(memory.saved.any() for memory in stages_of(whole, **two_stages).values())


def test_checkpointing_keeps_inputs_and_one_layer_while_it_runs():
    whole, again = (
        stages_of(model(), vision=ModulePlugin(activation_checkpointing=own))["vision", 0, 0] for own in (False, True)
    )
    assert whole.saved[1:-2].sum() == LAYERS * LAYER and again.saved[1:-2].sum() == LAYERS * 2 * HIDDEN
    held = np.array([0.0, 100.0, 1.0])
    more = again.backward_bytes(held, False) - again.saved_bytes(held)
    assert more >= 100 * LAYER and again.backward_bytes(held, False) < whole.backward_bytes(held, False)


def test_selective_checkpointing_keeps_outputs_of_products_and_of_attention_too():
    vision = stages_of(model(), vision=ModulePlugin(activation_checkpointing="selective"))["vision", 0, 0]
    outputs = 2 * (4 * HIDDEN + WIDE + HIDDEN) + 2 * HIDDEN + 4 * 4  # and of attention, with a sum of each head
    assert vision.saved[1:-2].sum() == LAYERS * (2 * HIDDEN + outputs)
    held = np.array([0.0, 100.0, 1.0])
    more = vision.backward_bytes(held, False) - vision.saved_bytes(held)
    assert more >= 100 * (LAYER - 2 * (WIDE + HIDDEN) - 4 * 4)  # the other values that a backward reads


@pytest.mark.parametrize(("again", "of_layer"), [(False, LAYER), (True, 2 * HIDDEN)])
def test_activations_in_host_memory_are_those_of_all_layers_but_two(again: bool, of_layer: int):
    settings = {"activation_checkpointing": again}
    here, there = (
        stages_of(model(), vision=ModulePlugin(offload_activations=own, **settings))["vision", 0, 0]
        for own in (False, True)
    )
    held = np.array([0.0, 100.0, 1.0])
    assert there.moved_bytes(held) == 100 * LAYERS * of_layer and here.moved_bytes(held) == 0
    assert here.saved_bytes(held) - there.saved_bytes(held) == there.moved_bytes(held)
    # one layer computes, and what the next one needs comes meanwhile
    more = there.backward_bytes(held, False) - there.saved_bytes(held)
    assert more >= 200 * of_layer and there.backward_bytes(held, False) < here.backward_bytes(held, False)
    plugins = {LANGUAGE_MODEL: ModulePlugin(pp_size=2, offload_activations=True, **settings)}
    last = memory_of(model(), **plugins)[2]  # one microbatch of two samples with ten tokens each is in flight
    assert last.host == 2 * 10 * LAYERS / 2 * of_layer


def test_a_first_backward_makes_gradients_while_it_frees_activations():
    memory = stages_of(model())[LANGUAGE_MODEL, 0, 0]
    few, many = np.array([0.0, 1.0, 1.0]), np.array([0.0, 1e5, 1.0])
    embedding = (2 + 4) * HEAD  # the second gradient of a tied matrix, before it is cast and added to the first
    assert memory.backward_bytes(few, True) == pytest.approx(memory.state.gradients + embedding, rel=0.01)
    assert memory.backward_bytes(many, True) == pytest.approx(memory.backward_bytes(many, False), rel=0.01)
    logits = 1e5 * 2 * 4 * VOCABULARY  # the gradients of the loss and of its softmax, beside what is kept
    assert memory.backward_bytes(many, False) == pytest.approx(memory.saved_bytes(many) + logits, rel=1e-6)


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("frozen", [False, True])
def test_many_logits_are_computed_in_chunks_and_those_of_a_cut_head_by_each_rank(tp_size: int, frozen: bool):
    """Squared tokens, tokens and constant bytes of the loss of 152k words, in bfloat16."""
    words, hidden = 151_936, 2 * HIDDEN
    spec = with_head(words, trainable=not frozen)
    plugin = {LANGUAGE_MODEL: ModulePlugin(tp_size=tp_size)}
    memory = stages_of(spec, **plugin)[LANGUAGE_MODEL, 0, 0]
    share, elements = words / tp_size, 0 if frozen else words * HIDDEN / tp_size
    kept = [0, hidden * frozen, 2 * elements]  # gradients of the hidden states, or of the weight and in place of these
    assert memory.max_tokens == 2**27 / share
    longer = memory.at(2**27 / share + 1)
    assert longer.saved[-1].tolist() == kept
    # a chunk in both types, or one in bfloat16 and a product that is added to the sum in float32
    summed = 4 * elements + max(6 * 2**27, 2 * 2**27 + 2 * elements)
    assert longer.forward[-1].tolist() == [0, hidden, summed]
    assert not longer.forward[-2].any() and not longer.backward[-2:].any()
    few = memory.at(2**27 / share)
    if tp_size > 1:
        assert few.saved[-1].tolist() == kept and few.forward[-1].tolist() == [0, 6 * share + hidden, 2 * elements]
    else:
        assert few.saved[-1].tolist() == [0, 4 * words, 0] and few.forward[-1].tolist() == [0, 10 * words, 0]
    size = np.array([0.0, 1e5, 1.0])
    assert memory.saved_bytes(size) == longer.saved_bytes(size)
    assert memory.backward_bytes(size, False) == longer.backward_bytes(size, False)


def test_matrices_are_shared_by_tensor_parallel_ranks_and_tokens_by_rows():
    alone, tp, cp = (
        stages_of(model(), language_model=plugin)[LANGUAGE_MODEL, 0, 0]
        for plugin in (ModulePlugin(), ModulePlugin(tp_size=2), ModulePlugin(cp_size=2))
    )
    split = 2 * 4 * HIDDEN + 4 * 4 + 2 * 2 * WIDE
    assert alone.saved[1, 1] - tp.saved[1, 1] == split / 2
    held = np.array([0.0, 100.0, 1.0])
    assert cp.saved_bytes(held) == alone.saved_bytes(held) / 2 and cp.state == alone.state


@pytest.mark.parametrize(("attention", "whole"), [("sdpa", True), ("bitfield", True), ("eager", False)])
def test_each_tensor_parallel_rank_keeps_a_whole_mask_and_its_own_scores(attention, whole):
    spec = model(tied=False, attention=attention)
    of_pair = 2 if whole else 4 * (4 + 2)  # a mask in bfloat16; scores of four heads in float32, and cast
    for tp_size in (1, 2):
        kept = stages_of(spec, language_model=ModulePlugin(tp_size=tp_size))[LANGUAGE_MODEL, 0, 0].saved[:, 0].sum()
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
    spec = model(tied=False, num_kv_heads=num_kv_heads)
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(tp_size=tp_size)})
    held = activation_sizes(h100(spec), plan, STEP, LENGTHS)[LANGUAGE_MODEL, 0, 1, 0]
    tokens = 3 * 20  # three rows, padded to the longest
    assert held.tolist() == [3 * 20**2 + copied_heads * HIDDEN // 4 * tokens, tokens, 1]


LENGTHS = SampleSizes.of_sequences({"vision": [[4, 4], [], [9], [2]], LANGUAGE_MODEL: [[20], [5], [12], [7]]})
STEP = make_step({"vision": [[[0, 1], [2, 3]]], LANGUAGE_MODEL: [[[1], [0, 2, 3]]]})


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager", "zero_bubble"])
@pytest.mark.parametrize(
    "plugins",
    [
        {},
        {LANGUAGE_MODEL: ModulePlugin(pp_size=2, tp_size=2)},
        {LANGUAGE_MODEL: ModulePlugin(colocate_with="vision")},
        {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, activation_checkpointing=True)},
        {LANGUAGE_MODEL: ModulePlugin(cp_size=2)},
        {LANGUAGE_MODEL: ModulePlugin(pp_size=2, split_backward=True, activation_checkpointing=True)},
    ],
    ids=["apart", "stages", "shared", "copies", "rows", "split"],
)
@pytest.mark.parametrize("frozen", [(), ("vision",), ("vision", LANGUAGE_MODEL)])
def test_the_bound_is_one(schedule, plugins, frozen):
    spec = model(frozen)
    if LANGUAGE_MODEL in frozen:  # which has no gradients to put off
        plugins = {name: replace(own, split_backward=None) for name, own in plugins.items()}
    plan = resolve_plan(spec, plugins, schedule=schedule)
    images, texts = np.random.default_rng(0).integers(0, 300, (2, 16)).tolist()
    sizes = SampleSizes.of_sequences(
        {"vision": [[n] if n > 60 else [] for n in images], LANGUAGE_MODEL: [[n + 1] for n in texts]}
    )
    assert_is_bound(spec, plan, sizes)


def test_the_bound_is_one_where_the_logits_of_the_longest_chunk_alone_come_in_parts():
    spec = with_head(151_936)  # those of more than 883 tokens do
    sizes = SampleSizes.of_sequences({"vision": [[9]] * 16, LANGUAGE_MODEL: [[435], [445]] * 4 + [[435]] * 8})
    for plugin in ({}, {"pp_size": 2}, {"dp_size": 2, "zero_stage": 1}):
        assert_is_bound(spec, resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(**plugin)}), sizes)
    in_parts = SampleSizes.of_sequences({"vision": [[9]] * 16, LANGUAGE_MODEL: [[460]] * 2 + [[435]] * 14})
    assert_is_bound(spec, resolve_plan(spec, {}), in_parts)


def assert_is_bound(spec, plan, sizes):
    """No rank has more than its bound at any time of a step in microbatches of two samples."""
    step = contiguous_step(plan, range(16), 2)
    cost = StepCost(h100(spec), plan, step, sizes)
    simulation = timeline_of(plan, step, [], cost)
    peaks = simulation.peak_in_flight, simulation.peak_held
    bound = memory_per_rank(h100(spec), plan, step, sizes, *peaks)
    for rank, (times, num_bytes) in memory_timeline(h100(spec), plan, step, sizes, simulation.task_times).items():
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


FEATURE = 2 * HIDDEN
TEXT = 24  # bytes of a token's id, label and place in the mask
TWO = SampleSizes.uniform({"vision": 8, LANGUAGE_MODEL: 10}, 2)
# Sample 1 is encoded with sample 0 and taken a microbatch later.
DEFERRED = make_step({"vision": [[[0, 1]]], LANGUAGE_MODEL: [[[0], [1]]]})
ONE, PAIR = np.array([0.0, 8.0, 1.0]), np.array([0.0, 10.0, 1.0])


def times_of(start: int, module: str, *tasks: str) -> dict[Task, tuple[float, float]]:
    """Start and end of tasks, one ms each; `fwd 0.1` is the forward of the second chunk of the first microbatch."""
    found = {}
    for index, text in enumerate(tasks):
        kind, place = text.split()
        task = Task.parse(f"{kind} {module}.r0.s0 mb{place.replace('.', '.c')}")
        found[task] = (start + index, start + index + 1)
    return found


def levels(timeline, *places: float) -> list[float]:
    """Bytes at these times."""
    times, num_bytes = timeline
    return [num_bytes[np.searchsorted(times, place, "right") - 1] for place in places]


def test_chunks_and_features_are_followed_over_a_step():
    spec = model(("vision",))
    plan = resolve_plan(spec, {})
    memories = stage_memories(h100(spec), plan)
    vision, language = memories["vision", 0, 0], memories[LANGUAGE_MODEL, 0, 0]
    times = times_of(0, "vision", "fwd 0.0", "fwd 0.1")
    times |= times_of(2, LANGUAGE_MODEL, "fwd 0.0", "bwd 0.0", "fwd 1.0", "bwd 1.0")
    peaks = activation_peaks(h100(spec), plan, DEFERRED, TWO, times)
    inputs, features = TEXT * 20, 8 * FEATURE
    # One chunk waits while the other is computed; their backwards are not there yet.
    assert peaks[0] == vision.forward_bytes(ONE)
    assert peaks[1] == language.backward_bytes(PAIR, False) + features + inputs
    times |= times_of(6, "vision", "bwd 0.0", "bwd 0.1")
    holds = max(vision.forward_bytes(ONE), vision.backward_bytes(ONE, False))
    assert activation_peaks(h100(spec), plan, DEFERRED, TWO, times)[0] == vision.saved_bytes(ONE) + holds
    timeline = memory_timeline(h100(spec), plan, DEFERRED, TWO, times)[1]
    gradients, idle = language.state.gradients, language.state.weights + language.state.optimizer + inputs
    above = [
        0,
        language.forward_bytes(PAIR) + features,
        language.backward_bytes(PAIR, True) + features,
        gradients + language.forward_bytes(PAIR) + features,
        gradients + language.backward_bytes(PAIR, False) + features,
        gradients,
    ]
    assert levels(timeline, 0.5, 2.5, 3.5, 4.5, 5.5, 6.5) == pytest.approx([idle + own for own in above])


def test_features_without_a_backward_wait_until_they_are_taken():
    spec = model(("vision",))
    spec = replace(spec, modules={**spec.modules, "vision": spec.modules["vision"].with_frozen(True)})
    plan = resolve_plan(spec, {})
    vision = stage_memories(h100(spec), plan)["vision", 0, 0]
    times = times_of(0, "vision", "fwd 0.0", "fwd 0.1") | times_of(2, LANGUAGE_MODEL, "fwd 0.0", "fwd 1.0")
    timeline = memory_timeline(h100(spec), plan, DEFERRED, TWO, times)[0]
    held = [vision.forward_bytes(ONE), vision.forward_bytes(ONE) + 8 * FEATURE, 8 * FEATURE, 0]
    assert levels(timeline, 0.5, 1.5, 2.5, 3.5) == pytest.approx([vision.state.weights + more for more in held])


def test_peaks_grow_with_what_is_in_flight_and_each_rank_of_a_grid_has_them():
    spec = model()
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2, tp_size=2)})
    step = make_step({name: [[[i] for i in range(6)]] for name in ("vision", LANGUAGE_MODEL)})
    sizes = SampleSizes.uniform({"vision": 8, LANGUAGE_MODEL: 10}, 6)
    simulation = timeline_of(plan, step)
    peaks = activation_peaks(h100(spec), plan, step, sizes, simulation.task_times)
    assert set(peaks) == set(range(5)) and peaks[1] == peaks[2] and peaks[3] == peaks[4]
    memories = stage_memories(h100(spec), plan)
    for key, count in simulation.peak_in_flight.items():
        memory, rank = memories[key], plan.stage(*key).all_ranks[0]
        held = ONE if key[0] == "vision" else PAIR
        running = memory.backward_bytes(held, False) - memory.saved_bytes(held)
        features = 8 * FEATURE if key == (LANGUAGE_MODEL, 0, 0) else 0
        inputs = memory.input_bytes * 6 * held[1]
        assert peaks[rank] == pytest.approx(count * (memory.saved_bytes(held) + features) + running + inputs)


@pytest.mark.parametrize(("tokens", "taken"), [(40, 10), (8, 8)])
def test_features_are_no_more_than_the_tokens_that_take_them(tokens, taken):
    sizes = SampleSizes.uniform({"vision": tokens, LANGUAGE_MODEL: 10}, 3)
    assert sample_features(h100(model()), sizes, "vision").tolist() == [taken * FEATURE] * 3
