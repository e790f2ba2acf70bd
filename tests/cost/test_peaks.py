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
ONE, PAIR = np.array([0.0, 8.0, 1.0]), np.array([0.0, 10.0, 1.0])


def spans_of(rank: int, start: int, module: str, *tasks: str) -> list[Span]:
    """Tasks of a rank, one ms each, such as `fwd 0.1` for the forward of the second chunk of the first microbatch."""
    found = []
    for index, text in enumerate(tasks):
        kind, place = text.split()
        task = Task.parse(f"{kind} {module}.r0.s0 mb{place.replace('.', '.c')}")
        found.append(Span(rank, task, start + index, start + index + 1))
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
    spans = spans_of(0, 0, "vision", "fwd 0.0", "fwd 0.1")
    spans += spans_of(1, 2, LANGUAGE_MODEL, "fwd 0.0", "bwd 0.0", "fwd 1.0", "bwd 1.0")
    peaks = activation_peaks(h100(spec), plan, STEP, SIZES, spans)
    inputs, features = TEXT * 20, 8 * FEATURE
    # One chunk waits while the other is computed; there is no span for their backwards here.
    assert peaks[0] == vision.forward_bytes(ONE)
    assert peaks[1] == language.backward_bytes(PAIR, False) + features + inputs
    spans += spans_of(0, 6, "vision", "bwd 0.0", "bwd 0.1")
    holds = max(vision.forward_bytes(ONE), vision.backward_bytes(ONE, False))
    assert activation_peaks(h100(spec), plan, STEP, SIZES, spans)[0] == vision.saved_bytes(ONE) + holds
    timeline = memory_timeline(h100(spec), plan, STEP, SIZES, spans)[1]
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
    spans = spans_of(0, 0, "vision", "fwd 0.0", "fwd 0.1") + spans_of(1, 2, LANGUAGE_MODEL, "fwd 0.0", "fwd 1.0")
    timeline = memory_timeline(h100(spec), plan, STEP, SIZES, spans)[0]
    held = [vision.forward_bytes(ONE), vision.forward_bytes(ONE) + 8 * FEATURE, 8 * FEATURE, 0]
    assert levels(timeline, 0.5, 1.5, 2.5, 3.5) == pytest.approx([vision.state.weights + more for more in held])


def test_peaks_grow_with_what_is_in_flight_and_each_rank_of_a_grid_has_them():
    spec = model()
    plan = resolve_plan(spec, {LANGUAGE_MODEL: ModulePlugin(pp_size=2, tp_size=2)})
    step = make_step({name: [[[i] for i in range(6)]] for name in ("vision", LANGUAGE_MODEL)})
    sizes = SampleSizes.uniform({"vision": 8, LANGUAGE_MODEL: 10}, 6)
    simulation = simulate(plan, build_program(plan, step, []))
    peaks = activation_peaks(h100(spec), plan, step, sizes, simulation.spans)
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
