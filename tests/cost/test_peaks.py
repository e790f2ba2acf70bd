"""What a rank keeps over a step, followed by hand."""

import pytest

from hf_mmparallel.cost import activation_peaks
from hf_mmparallel.cost.memory import stage_memories
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan
from hf_mmparallel.schedule import Span, Task, build_program, simulate
from tests.cost.models import HIDDEN, h100, model
from tests.schedule.builders import make_step

FEATURE = 2 * HIDDEN
SIZES = SampleSizes.uniform({"vision": 8, LANGUAGE_MODEL: 10}, 2)
# Sample 1 is encoded with sample 0 and taken a microbatch later.
STEP = make_step({"vision": [[[0, 1]]], LANGUAGE_MODEL: [[[0], [1]]]})


def line(*texts: str) -> list[Task]:
    return [Task.parse(text) for text in texts]


def test_chunks_and_features_are_followed_over_a_step():
    spec = model(("vision",))
    plan = resolve_plan(spec, {})
    memories = stage_memories(h100(spec), plan)
    vision = memories["vision", 0, 0].bytes_per_token
    language = memories[LANGUAGE_MODEL, 0, 0].bytes_per_token
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
    # The projector is trained: both chunks wait for their backwards, for which there is no span here.
    assert peaks[0] == 8 * vision + 8 * FEATURE  # the features of one wait while the other is computed
    assert peaks[1] == 10 * language + 8 * FEATURE
    backwards = line("bwd vision.r0.s0 mb0.c0", "bwd vision.r0.s0 mb0.c1")
    spans += [Span(0, task, i + 6, i + 7) for i, task in enumerate(backwards)]
    peaks = activation_peaks(h100(spec), plan, STEP, SIZES, spans)
    assert peaks[0] == 16 * (vision + FEATURE)


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
        tokens = sizes.tokens[key[0]][0]
        rank = plan.stage(*key).all_ranks[0]
        kept = count * tokens * memories[key].bytes_per_token
        features = 0 if key == (LANGUAGE_MODEL, 0, 1) else count * 8 * FEATURE
        # The last chunk in flight is still running: its features are not there yet.
        assert peaks[rank] == pytest.approx(kept + features, abs=8 * FEATURE)


def test_features_are_no_more_than_the_tokens_that_take_them():
    spec = model()
    plan = resolve_plan(spec, {})
    span = [
        Span(rank, Task.parse(f"fwd {name}.r0.s0 mb0.c0"), rank, rank + 1) for rank, name in enumerate(plan.modules)
    ]
    rows = [[[0]]]
    step = make_step({"vision": rows, LANGUAGE_MODEL: rows})
    peaks = activation_peaks(
        h100(spec),
        plan,
        step,
        SampleSizes.uniform({"vision": 40, LANGUAGE_MODEL: 10}, 1),
        span,
    )
    assert peaks[1] == 10 * (stage_memories(h100(spec), plan)[LANGUAGE_MODEL, 0, 0].bytes_per_token + FEATURE)
