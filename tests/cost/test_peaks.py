"""What a rank keeps over a step, followed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.cost import activation_peaks, memory_timeline
from hf_mmparallel.cost.memory import sample_features
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan
from hf_mmparallel.schedule import Span, Task, build_program, simulate
from tests.cost.models import HIDDEN, h100, model
from tests.schedule.builders import make_step

FEATURE = 2 * HIDDEN
TEXT = 24  # bytes of a token's id, label and place in the mask
SIZES = SampleSizes.uniform({"vision": 8, LANGUAGE_MODEL: 10}, 2)
# Sample 1 is encoded with sample 0 and taken a microbatch later.
STEP = make_step({"vision": [[[0, 1]]], LANGUAGE_MODEL: [[[0], [1]]]})


def line(*texts: str) -> list[Task]:
    return [Task.parse(text) for text in texts]


def test_chunks_and_features_are_followed_over_a_step():
    spec = model(("vision",))
    plan = resolve_plan(spec, {})
    memories = stage_memories(h100(spec), plan)
    vision, language = memories["vision", 0, 0], memories[LANGUAGE_MODEL, 0, 0]
    one, pair = np.array([0.0, 8.0, 1.0]), np.array([0.0, 10.0, 1.0])
    order = line("fwd vision.r0.s0 mb0.c0", "fwd vision.r0.s0 mb0.c1")
    later = line(
        "fwd language_model.r0.s0 mb0.c0",
        "bwd language_model.r0.s0 mb0.c0",
        "fwd language_model.r0.s0 mb1.c0",
        "bwd language_model.r0.s0 mb1.c0",
    )
    spans = [Span(0, task, i, i + 1) for i, task in enumerate(order)]
    spans += [Span(1, task, i + 2, i + 3) for i, task in enumerate(later)]
    peaks = activation_peaks(h100(spec), plan, STEP, SIZES, spans)
    # One chunk waits while the other is computed; there is no span for their backwards here.
    assert peaks[0] == vision.forward_bytes(one)
    inputs = TEXT * 20
    assert peaks[1] == language.backward_bytes(pair, False) + 8 * FEATURE + inputs
    backwards = line("bwd vision.r0.s0 mb0.c0", "bwd vision.r0.s0 mb0.c1")
    spans += [Span(0, task, i + 6, i + 7) for i, task in enumerate(backwards)]
    peaks = activation_peaks(h100(spec), plan, STEP, SIZES, spans)
    holds = max(vision.forward_bytes(one), vision.backward_bytes(one, False))
    assert peaks[0] == vision.saved_bytes(one) + holds

    timeline = memory_timeline(h100(spec), plan, STEP, SIZES, spans)
    times, num_bytes = timeline[1]
    state = language.state
    levels = {time: num_bytes[np.searchsorted(times, time, "right") - 1] for time in (0.5, 2.5, 3.5, 4.5, 5.5, 6.5)}
    idle = state.weights + state.optimizer + inputs
    features = 8 * FEATURE
    assert levels == pytest.approx(
        {
            0.5: idle,
            2.5: idle + language.forward_bytes(pair) + features,
            3.5: idle + language.backward_bytes(pair, True) + features,
            4.5: idle + state.gradients + language.forward_bytes(pair) + features,
            5.5: idle + state.gradients + language.backward_bytes(pair, False) + features,
            6.5: idle + state.gradients,
        }
    )


def test_features_without_a_backward_wait_until_they_are_taken():
    spec = model(("vision",))
    spec = replace(spec, modules={**spec.modules, "vision": spec.modules["vision"].with_frozen(True)})
    plan = resolve_plan(spec, {})
    vision = stage_memories(h100(spec), plan)["vision", 0, 0]
    tasks = line(
        "fwd vision.r0.s0 mb0.c0",
        "fwd vision.r0.s0 mb0.c1",
        "fwd language_model.r0.s0 mb0.c0",
        "fwd language_model.r0.s0 mb1.c0",
    )
    spans = [Span(int(i > 1), task, i, i + 1) for i, task in enumerate(tasks)]
    times, num_bytes = memory_timeline(h100(spec), plan, STEP, SIZES, spans)[0]
    one = np.array([0.0, 8.0, 1.0])
    found = [num_bytes[np.searchsorted(times, time, "right") - 1] for time in (0.5, 1.5, 2.5, 3.5)]
    held = [vision.forward_bytes(one), vision.forward_bytes(one) + 8 * FEATURE, 8 * FEATURE, 0]
    assert found == pytest.approx([vision.state.weights + more for more in held])


def test_peaks_grow_with_what_is_in_flight_and_each_rank_of_a_grid_has_them():
    spec = model()
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2, tp_size=2)})
    rows = [[[i] for i in range(6)]]
    step = make_step({"vision": rows, LANGUAGE_MODEL: rows})
    sizes = SampleSizes.uniform({"vision": 8, LANGUAGE_MODEL: 10}, 6)
    simulation = simulate(plan, build_program(plan, step, []))
    peaks = activation_peaks(h100(spec), plan, step, sizes, simulation.spans)
    assert set(peaks) == set(range(5)) and peaks[1] == peaks[2] and peaks[3] == peaks[4]
    memories = stage_memories(h100(spec), plan)
    for key, count in simulation.peak_in_flight.items():
        memory, rank = memories[key], plan.stage(*key).all_ranks[0]
        held = np.array([0.0, float(sizes.tokens[key[0]][0]), 1.0])
        running = memory.backward_bytes(held, False) - memory.saved_bytes(held)
        features = 8 * FEATURE if key == (LANGUAGE_MODEL, 0, 0) else 0
        inputs = memory.input_bytes * 6 * held[1]
        assert peaks[rank] == pytest.approx(count * (memory.saved_bytes(held) + features) + running + inputs)


def test_features_are_no_more_than_the_tokens_that_take_them():
    spec = model()
    sizes = SampleSizes.uniform({"vision": 40, LANGUAGE_MODEL: 10}, 3)
    assert sample_features(h100(spec), sizes, "vision").tolist() == [10 * FEATURE] * 3
    wide = SampleSizes.uniform({"vision": 8, LANGUAGE_MODEL: 10}, 3)
    assert sample_features(h100(spec), wide, "vision").tolist() == [8 * FEATURE] * 3
