"""Modules behind the language model take its microbatches, whatever arranges them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import ARRANGEMENTS, arrange_step
from hf_mmparallel.arrange.assigned_batch import Batch
from hf_mmparallel.arrange.balance import step_balance
from hf_mmparallel.papers.published_arrangements import _Pipeline
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, StepPlan, Workloads
from tests.arrange.builders import AUDIO, IMAGE, check_samples, draw, loads, odd_workloads, plan_of, workloads_of


def check(plan: ParallelPlan, work: Workloads, step: StepPlan) -> None:
    """Every sample once in each module that has work for it, in generators with the language model."""
    check_samples(plan, work, step)
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


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@settings(max_examples=20)
@given(
    st.tuples(*[st.integers(1, 4)] * 4),
    st.integers(0, 30),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.4, 1.0, "none", "one", "nothing to do", "no text", "giant"]),
    st.booleans(),
)
def test_generators_take_what_the_language_model_takes(
    arrangement, sizes, num_samples, microbatch_size, kind, together
):
    encoder, language, image, audio = sizes
    other = ModulePlugin(colocate_with=IMAGE) if together else audio
    plan = plan_of(vision=encoder, language_model=language, image_generator=image, audio_generator=other)
    if isinstance(kind, str):
        work = odd_workloads(plan, kind)
    else:  # so many samples have nothing to be generated
        work, rng = draw(plan, num_samples, num_samples), np.random.default_rng(num_samples)
        for name in plan.generators:
            work.forward_ms[name][rng.random(num_samples) < kind] = 0
    step = arrange_step(plan, range(work.num_samples), work, microbatch_size, arrangement)
    check(plan, work, step)
    assert step == arrange_step(plan, range(work.num_samples), work, microbatch_size, arrangement)
    # A microbatch of the language model is one chunk, whatever is generated of it.
    assert all(len(own) <= 1 for key, own in step.chunks.items() if key[0] == LANGUAGE_MODEL)


@pytest.mark.parametrize("arrangement", ["hierarchical", "tapered"])
@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.floats(1.0, 2.0))
@example(42, 1, 4, 18, 1.2)  # one that is hard to divide among copies
def test_limits_of_generators_hold(arrangement, seed, language, generator, num_samples, capacity):
    plan = plan_of(vision=1, language_model=language, image_generator=generator)
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


@pytest.mark.parametrize("seed", range(8))
def test_deferral_leaves_generators_the_room_that_they_need(seed):
    plan = plan_of(vision=1, language_model=3, image_generator=3)
    work = draw(plan, 32, seed)
    work = dataclasses.replace(work, token_limits={IMAGE: int(2 * work.tokens[IMAGE].max())})
    step = arrange_step(plan, range(32), work, 11)
    # Bins that are filled to the last token take one more.
    assert len(step.microbatches[IMAGE][0]) <= Batch(plan, work, 1).fewest.max() + 1


def test_a_sample_that_no_generator_has_room_for_is_alone():
    plan = plan_of(language_model=1, image_generator=1)
    work = draw(plan, 8)
    limit, largest = int(work.tokens[IMAGE].max()) - 1, int(work.tokens[IMAGE].argmax())
    work = dataclasses.replace(work, token_limits={IMAGE: limit})
    (microbatches,) = arrange_step(plan, range(8), work, 8).microbatches[IMAGE]
    for batch_indices in microbatches:
        tokens = work.tokens[IMAGE][list(batch_indices)]
        assert tokens.sum() <= limit or (largest in batch_indices and (tokens > 0).sum() == 1)


def test_generators_on_the_same_ranks_are_evened_out_together():
    plan = plan_of(language_model=1, image_generator=2, audio_generator=ModulePlugin(colocate_with=IMAGE))
    work = workloads_of(language_model=np.ones(4), image_generator=[3, 3, 0, 0], audio_generator=[0, 0, 3, 3])
    step = arrange_step(plan, range(4), work, 4, "contiguous")
    both = sum(loads(step.microbatches[name], work.forward_ms[name]) for name in (IMAGE, AUDIO))
    assert both.tolist() == [[6], [6]]


def test_even_work_of_generators_counts_when_samples_are_divided():
    plan = plan_of(vision=2, language_model=2, image_generator=ModulePlugin(2, pp_size=2))
    work = draw(plan, 256, text=0.3)
    even, plain = (
        step_balance(arrange_step(plan, range(256), work, 16, arrangement), work)
        for arrangement in ("hierarchical", "contiguous")
    )
    for name in plan.modules:
        assert even.replica_excess(name) < 0.02
        assert even.microbatch_excess(name) < 0.6 * plain.microbatch_excess(name)


def test_the_longest_way_of_disttrain_ends_with_the_generator_of_most_stages():
    plan = plan_of(
        vision=ModulePlugin(pp_size=2),
        language_model=ModulePlugin(2, pp_size=2),
        image_generator=ModulePlugin(pp_size=3),
        audio_generator=1,
    )
    forward = {name: np.full(2, float(10**place)) for place, name in enumerate(plan.modules)}
    ratios = {name: float(place) for place, name in enumerate(plan.modules)}
    found = _Pipeline.longest(plan, Workloads(forward, ratios, {}, {}))
    assert found.backward_ratio.tolist() == [0, 0, 1, 1, 2, 2, 2]
    # Eight layers over three stages are three, three and two; one generator works for two of the language model.
    assert found.stage_ms[:, 0] == pytest.approx([1, 1, 5, 5, 75, 75, 50])
