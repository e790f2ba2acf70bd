"""Modules behind the language model take its microbatches, whatever arranges them."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import ARRANGEMENTS, arrange_step
from hf_mmparallel.arrange.assigned_batch import Batch
from hf_mmparallel.arrange.balance import step_balance
from hf_mmparallel.arrange.colocated_modules import generated
from hf_mmparallel.arrange.estimate import Pipeline
from hf_mmparallel.papers.published_arrangements import _Pipeline
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlugin,
    ParallelPlan,
    StepPlan,
    Workloads,
    resolve_plan,
)
from hf_mmparallel.plan.parallel_plan import Schedule
from tests.arrange.test_estimate import replayed
from tests.arrange.test_hierarchical import draw, loads
from tests.plan.specs import language_spec, vision_spec

IMAGE, AUDIO = "image_generator", "audio_generator"


def model_of(*names: str, num_layers: int = 8) -> ModelSpec:
    """A model of some of: a vision encoder, the language model, generators of images and of audio."""
    modules = {}
    for name in names:
        part = language_spec(num_layers) if name == LANGUAGE_MODEL else vision_spec(num_layers)
        modules[name] = dataclasses.replace(part, name=name, features=part.features if name == "vision" else ())
    return ModelSpec(modules)


def plan_of(schedule: Schedule = "1f1b", **plugins: ModulePlugin) -> ParallelPlan:
    return resolve_plan(model_of(*plugins), plugins, schedule=schedule)


def check(plan: ParallelPlan, work: Workloads, step: StepPlan) -> None:
    """Every sample once in each module that has work for it, in generators with the language model."""
    step.check(plan)
    for name, replicas in step.microbatches.items():
        batch_indices = sorted(batch_index for replica in replicas for own in replica for batch_index in own)
        assert batch_indices == [
            s for s in range(work.num_samples) if name == LANGUAGE_MODEL or work.forward_ms[name][s] > 0
        ]
    language = plan.modules[LANGUAGE_MODEL].dp_size
    for name in plan.generators:
        dp_size = plan.modules[name].dp_size
        groups = np.gcd(language, dp_size)
        counts = [len(own) for own in step.microbatches[LANGUAGE_MODEL]]
        turns = [max(own) for own in np.split(np.array(counts), groups)]
        assert [len(own) for own in step.microbatches[name]] == np.repeat(turns, dp_size // groups).tolist()
        for batch_index in np.flatnonzero(work.forward_ms[name] > 0).tolist():
            replica, index = step.location_of[LANGUAGE_MODEL, batch_index]
            copy, same = step.location_of[name, batch_index]
            group = replica * groups // language
            # The same microbatch, where all replicas of the language model have as many.
            assert same == int((index + 0.5) * turns[group] / counts[replica]) and copy * groups // dp_size == group


def test_a_plan_knows_what_is_in_front_and_what_behind():
    plan = plan_of(
        vision=ModulePlugin(),
        language_model=ModulePlugin(),
        image_generator=ModulePlugin(),
        audio_generator=ModulePlugin(),
    )
    assert plan.encoders == ("vision",) and plan.generators == (IMAGE, AUDIO)
    assert plan_of(language_model=ModulePlugin()).generators == ()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@settings(max_examples=12)
@given(
    st.tuples(*[st.integers(1, 4)] * 4),
    st.integers(0, 30),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.booleans(),
)
def test_generators_take_what_the_language_model_takes(
    arrangement, sizes, num_samples, microbatch_size, empty, together
):
    encoder, language, image, audio = sizes
    other = ModulePlugin(colocate_with=IMAGE) if together else ModulePlugin(audio)
    plan = plan_of(
        vision=ModulePlugin(encoder),
        language_model=ModulePlugin(language),
        image_generator=ModulePlugin(image),
        audio_generator=other,
    )
    work = draw(plan, num_samples, num_samples)
    rng = np.random.default_rng(num_samples)
    for name in plan.generators:
        work.forward_ms[name][rng.random(num_samples) < empty] = 0
    step = arrange_step(plan, range(num_samples), work, microbatch_size, arrangement)
    check(plan, work, step)
    assert step == arrange_step(plan, range(num_samples), work, microbatch_size, arrangement)
    # A microbatch of the language model is one chunk, whatever is generated of it.
    assert all(len(own) <= 1 for key, own in step.chunks.items() if key[0] == LANGUAGE_MODEL)


@pytest.mark.parametrize("arrangement", ["hierarchical", "tapered"])
@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.floats(1.0, 2.0))
@example(42, 1, 4, 18, 1.2)  # one that is hard to divide among copies
def test_limits_of_generators_hold(arrangement, seed, language, generator, num_samples, capacity):
    plan = plan_of(
        vision=ModulePlugin(), language_model=ModulePlugin(language), image_generator=ModulePlugin(generator)
    )
    work = draw(plan, num_samples, seed)
    several = max(1, -(-language // generator))
    limits = {IMAGE: max(1, int(capacity * several * work.tokens[IMAGE].max()))}
    if seed % 2:
        limits[LANGUAGE_MODEL] = int(2 * work.tokens[LANGUAGE_MODEL].max())
    work = dataclasses.replace(work, token_limits=limits)
    step = arrange_step(plan, range(num_samples), work, 8, arrangement)
    check(plan, work, step)
    for name, limit in limits.items():
        assert loads(step.microbatches[name], work.tokens[name]).max() <= limit


def test_deferral_leaves_generators_the_room_that_they_need():
    plan = plan_of(vision=ModulePlugin(), language_model=ModulePlugin(3), image_generator=ModulePlugin(3))
    for seed in range(8):
        work = draw(plan, 32, seed)
        work = dataclasses.replace(work, token_limits={IMAGE: int(2 * work.tokens[IMAGE].max())})
        step = arrange_step(plan, range(32), work, 11)
        # Bins that are filled to the last token take one more.
        assert len(step.microbatches[IMAGE][0]) <= Batch(plan, work, 1).fewest.max() + 1


def test_a_sample_that_no_generator_has_room_for_is_alone():
    plan = plan_of(language_model=ModulePlugin(), image_generator=ModulePlugin())
    work = draw(plan, 8)
    limit = int(work.tokens[IMAGE].max()) - 1
    work = dataclasses.replace(work, token_limits={IMAGE: limit})
    largest = int(work.tokens[IMAGE].argmax())
    (microbatches,) = arrange_step(plan, range(8), work, 8).microbatches[IMAGE]
    for batch_indices in microbatches:
        tokens = work.tokens[IMAGE][list(batch_indices)]
        assert tokens.sum() <= limit or (largest in batch_indices and (tokens > 0).sum() == 1)


def test_the_work_of_a_microbatch_is_even_over_the_copies_of_a_generator():
    plan = plan_of(language_model=ModulePlugin(2), image_generator=ModulePlugin(6))
    rng = np.random.default_rng(0)
    work = Workloads(
        {LANGUAGE_MODEL: np.ones(240), IMAGE: rng.lognormal(0, 0.5, 240)}, dict.fromkeys(plan.modules, 2.0), {}, {}
    )
    language = tuple(tuple(tuple(range(d * 120 + 24 * b, d * 120 + 24 * b + 24)) for b in range(5)) for d in range(2))
    found = loads(generated(plan, work, language)[IMAGE], work.forward_ms[IMAGE]).reshape(2, 3, 5)
    assert (found.max(axis=1) / found.mean(axis=1)).max() < 1.02
    assert (found.sum(axis=2).max(axis=1) / found.sum(axis=2).mean(axis=1)).max() < 1.01


def test_generators_on_the_same_ranks_are_evened_out_together():
    plan = plan_of(
        language_model=ModulePlugin(),
        image_generator=ModulePlugin(2),
        audio_generator=ModulePlugin(colocate_with=IMAGE),
    )
    forward = {LANGUAGE_MODEL: np.ones(4), IMAGE: np.array([3.0, 3, 0, 0]), AUDIO: np.array([0.0, 0, 3, 3])}
    work = Workloads(forward, dict.fromkeys(forward, 2.0), {}, {})
    step = arrange_step(plan, range(4), work, 4, "contiguous")
    for replica in range(2):
        taken = [batch_index for name in (IMAGE, AUDIO) for batch_index in step.microbatches[name][replica][0]]
        assert sum(forward[IMAGE][batch_index] + forward[AUDIO][batch_index] for batch_index in taken) == 6


def test_even_work_of_generators_counts_when_samples_are_divided():
    plan = plan_of(vision=ModulePlugin(2), language_model=ModulePlugin(2), image_generator=ModulePlugin(2, pp_size=2))
    work = draw(plan, 256, text=0.3)
    even = arrange_step(plan, range(256), work, 16)
    plain = arrange_step(plan, range(256), work, 16, "contiguous")
    better, worse = (step_balance(step, work) for step in (even, plain))
    for name in plan.modules:
        assert better.replica_excess(name) < 0.02
        assert better.microbatch_excess(name) < 0.6 * worse.microbatch_excess(name)


def test_the_longest_way_of_disttrain_ends_with_the_generator_of_most_stages():
    plan = plan_of(
        vision=ModulePlugin(pp_size=2),
        language_model=ModulePlugin(2, pp_size=2),
        image_generator=ModulePlugin(pp_size=3),
        audio_generator=ModulePlugin(),
    )
    forward = {name: np.full(2, float(10**place)) for place, name in enumerate(plan.modules)}
    ratios = {name: float(place) for place, name in enumerate(plan.modules)}
    found = _Pipeline.longest(plan, Workloads(forward, ratios, {}, {}))
    assert found.backward_ratio.tolist() == [0, 0, 1, 1, 2, 2, 2]
    # Eight layers over three stages are three, three and two; one generator works for two of the language model.
    assert found.stage_ms[:, 0] == pytest.approx([1, 1, 5, 5, 75, 75, 50])


RATIOS = {"vision": 2.0, LANGUAGE_MODEL: 2.0, IMAGE: 2.0, AUDIO: 1.0}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), [((1, 1, 1), 1), ((2, 2, 4), 8), ((1, 4, 2), 3)])
def test_equal_stages_take_the_closed_form(stages, count, schedule):
    plan = plan_of(
        schedule,
        **{n: ModulePlugin(pp_size=s) for n, s in zip(("vision", LANGUAGE_MODEL, IMAGE), stages, strict=True)},
    )
    pipeline = Pipeline.of(plan, RATIOS)
    own = {name: np.full((1, count), float(size)) for name, size in zip(plan.modules, stages, strict=True)}
    assert pipeline.num_stages == sum(stages)
    assert pipeline.iteration_ms(own) == pytest.approx(3 * (sum(stages) + count - 1))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("frozen", [(), ("vision",), ("vision", LANGUAGE_MODEL)])
def test_generators_side_by_side_start_behind_the_language_model(schedule, frozen):
    plan = plan_of(
        schedule,
        vision=ModulePlugin(),
        language_model=ModulePlugin(pp_size=2),
        image_generator=ModulePlugin(pp_size=3),
        audio_generator=ModulePlugin(),
    )
    pipeline = Pipeline.of(plan, {**RATIOS, **dict.fromkeys(frozen, 0.0)})
    assert pipeline.depth == (1, 2, 0, 3, 4, 5, 3)
    assert pipeline.before == ((2,), (0,), (), (1,), (3,), (4,), (1,))
    rng = np.random.default_rng(0)
    own = {name: rng.lognormal(0, 1, (4, 6)) for name in pipeline.modules}
    expected = [replayed(pipeline, {name: values[row] for name, values in own.items()}) for row in range(4)]
    assert pipeline.iteration_ms(own) == pytest.approx(expected)


def test_a_generator_on_the_ranks_of_the_language_model_adds_to_its_stages():
    plan = plan_of(
        vision=ModulePlugin(),
        language_model=ModulePlugin(pp_size=2),
        image_generator=ModulePlugin(colocate_with=LANGUAGE_MODEL),
    )
    pipeline = Pipeline.of(plan, RATIOS)
    assert pipeline.depth == (1, 2, 0) and pipeline.before == ((2,), (0,), ())
    assert dict(zip(pipeline.modules, pipeline.shares, strict=True))[IMAGE] == (0.5, 0.5, 0.0)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("kind", ["none", "one", "nothing to do", "no text", "giant"])
def test_odd_batches(arrangement, kind):
    for encoder, language, generator in itertools.product((1, 3), (1, 2), (1, 2)):
        plan = plan_of(
            vision=ModulePlugin(encoder),
            language_model=ModulePlugin(language),
            image_generator=ModulePlugin(generator),
        )
        work = draw(plan, {"none": 0, "one": 1}.get(kind, 12))
        for name, own in work.forward_ms.items():
            if kind == "nothing to do" or (kind == "no text" and name == LANGUAGE_MODEL):
                own[:] = 0
        if kind == "giant":
            work.forward_ms[IMAGE][5] = 1e3
        check(plan, work, arrange_step(plan, range(work.num_samples), work, 2, arrangement))
