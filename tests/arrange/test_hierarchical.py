"""The hierarchical arrangement as a whole."""

import dataclasses
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange import ARRANGEMENTS, arrange_step, num_microbatches
from hf_mmparallel.arrange.assigned_batch import Batch
from hf_mmparallel.arrange.colocated_modules import ColocatedModules
from hf_mmparallel.arrange.greedy import CapacityError
from hf_mmparallel.arrange.hierarchical import hierarchical, tapered
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlugin, ParallelPlan, StepPlan, Workloads, resolve_plan
from hf_mmparallel.schedule import build_program, simulate
from tests.plan.specs import language_spec, model_spec, vision_spec

LARGEST = 4.0
TWO_ENCODERS = ModelSpec({"audio": vision_spec(), "vision": vision_spec(), LANGUAGE_MODEL: language_spec()})


def make_plan(vision: int, language: int, stages: int = 1) -> ParallelPlan:
    """Replicas of both modules, each of `stages` stages."""
    plugins = {"vision": ModulePlugin(vision, stages), LANGUAGE_MODEL: ModulePlugin(language, stages)}
    return resolve_plan(model_spec(), plugins)


def draw(plan: ParallelPlan, num_samples: int, seed: int = 0, text: float = 0.2, **token_limits: int) -> Workloads:
    """Work with a tail up to `LARGEST`, independent in all modules; a part `text` has none in each encoder."""
    rng = np.random.default_rng(seed)
    forward = {name: np.minimum(rng.lognormal(0, 0.7, num_samples), LARGEST) for name in plan.modules}
    for name in list(forward)[:-1]:
        forward[name][rng.random(num_samples) < text] = 0
    tokens = {name: np.ceil(100 * own).astype(np.int64) for name, own in forward.items()}
    return Workloads(forward, dict.fromkeys(forward, 2.0), tokens, token_limits)


def loads(microbatches, weights) -> np.ndarray:
    """Sums `[replicas, microbatches]`."""
    return np.array([[weights[list(batch_indices)].sum() for batch_indices in replica] for replica in microbatches])


def check(plan: ParallelPlan, work: Workloads, step: StepPlan) -> None:
    """What holds for every step: all samples once where they have work, and nothing later than one microbatch."""
    step.check(plan)
    counts = {len(replica) for replicas in step.microbatches.values() for replica in replicas}
    assert len(counts) == 1
    for name, replicas in step.microbatches.items():
        batch_indices = sorted(batch_index for replica in replicas for own in replica for batch_index in own)
        assert batch_indices == [
            s for s in range(work.num_samples) if name == LANGUAGE_MODEL or work.forward_ms[name][s] > 0
        ]
        for batch_index in batch_indices:
            later = step.location_of[LANGUAGE_MODEL, batch_index][1] - step.location_of[name, batch_index][1]
            assert later in (0, 1)
        if name in work.token_limits:
            assert loads(replicas, work.tokens[name]).max(initial=0) <= work.token_limits[name]


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 40),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
)
def test_any_sizes_of_anything(vision, language, num_samples, microbatch_size, text, whole):
    plan = make_plan(vision, language)
    work = draw(plan, num_samples, num_samples, text)
    if whole:
        work = dataclasses.replace(work, forward_ms={name: np.ceil(own) for name, own in work.forward_ms.items()})
    step = arrange_step(plan, range(num_samples), work, microbatch_size)
    check(plan, work, step)
    assert len(step.microbatches[LANGUAGE_MODEL][0]) <= num_microbatches(num_samples, microbatch_size, language)
    assert tapered(plan, work, microbatch_size) == tapered(plan, work, microbatch_size)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.floats(1.0, 3.0))
def test_limits_hold(seed, vision, language, num_samples, capacity):
    plan = make_plan(vision, language)
    work = draw(plan, num_samples, seed)
    # With fewer replicas than the language model an encoder takes the samples of several.
    several = max(1, -(-language // vision))
    limits = {"vision": several, LANGUAGE_MODEL: 1}
    limits = {name: max(1, int(capacity * several * work.tokens[name].max())) for name, several in limits.items()}
    work = dataclasses.replace(work, token_limits=limits)
    check(plan, work, arrange_step(plan, range(num_samples), work, 4))


def test_limits_make_more_microbatches():
    plan = make_plan(2, 2, 2)
    work = draw(plan, 64)
    limit = int(1.2 * work.tokens[LANGUAGE_MODEL].max())
    step = arrange_step(plan, range(64), dataclasses.replace(work, token_limits={LANGUAGE_MODEL: limit}), 16)
    count = len(step.microbatches[LANGUAGE_MODEL][0])
    assert count > 2 and work.tokens[LANGUAGE_MODEL].sum() / limit / 2 <= count


@settings(max_examples=30)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 3)]),
    st.integers(1, 40),
    st.floats(0.05, 0.9),
    st.booleans(),
)
def test_a_sample_above_the_limit_gets_a_microbatch_of_its_own(seed, replicas, num_samples, share, taper):
    plan = make_plan(*replicas)
    work = draw(plan, num_samples, seed)
    limits = {name: max(1, int(share * tokens.max())) for name, tokens in work.tokens.items()}
    work = dataclasses.replace(work, token_limits=limits)
    microbatches = (tapered if taper else hierarchical)(plan, work, 4)
    shares_encoder = replicas[0] < replicas[1]
    for name, limit in limits.items():
        for batch_indices in (batch_indices for replica in microbatches[name] for batch_indices in replica):
            tokens = work.tokens[name][list(batch_indices)]
            within = tokens.sum() <= limit or (tokens > 0).sum() == 1
            # Where replicas share an encoder, only the limit of the language model may be what can hold.
            assert within or (shares_encoder and name == "vision")


def test_only_the_sample_above_the_limit_is_alone():
    plan = make_plan(1, 1)
    tokens = np.array([10] * 15 + [100])
    work = Workloads(
        dict.fromkeys(plan.modules, tokens / 10),
        dict.fromkeys(plan.modules, 2.0),
        dict.fromkeys(plan.modules, tokens),
        {LANGUAGE_MODEL: 50},
    )
    (microbatches,) = hierarchical(plan, work, 4)[LANGUAGE_MODEL]
    assert (15,) in microbatches
    assert max(tokens[list(batch_indices)].sum() for batch_indices in microbatches if 15 not in batch_indices) <= 50
    assert len(microbatches) <= 6


@pytest.mark.parametrize("arrangement", [hierarchical, tapered])
@pytest.mark.parametrize("capacity", [1.0, 1.5, 2.0])
def test_replicas_that_share_an_encoder_fit_beside_each_other_in_it(capacity, arrangement):
    plan = make_plan(1, 4)
    work = draw(plan, 128)
    limit = int(capacity * work.tokens["vision"].max())
    work = dataclasses.replace(work, token_limits={"vision": limit})
    step = arrange_step(plan, range(128), work, 4, arrangement.__name__)
    check(plan, work, step)
    assert len(step.microbatches["vision"][0]) < 1.5 * work.tokens["vision"].sum() / limit


def test_where_too_many_replicas_share_an_encoder_the_limit_of_the_language_model_holds(monkeypatch):
    copies = ColocatedModules.copies

    def full(self, replica, turn, count, capacity):
        if capacity is not None:
            raise CapacityError
        return copies(self, replica, turn, count, capacity)

    monkeypatch.setattr(ColocatedModules, "copies", full)
    plan = make_plan(1, 4)
    work = draw(plan, 32, text=0.0)
    limit = int(2 * work.tokens[LANGUAGE_MODEL].max())
    work = dataclasses.replace(work, token_limits={"vision": 1000, LANGUAGE_MODEL: limit})
    microbatches = tapered(plan, work, 4)
    assert loads(microbatches[LANGUAGE_MODEL], work.tokens[LANGUAGE_MODEL]).max() <= limit


@pytest.mark.parametrize("seed", range(4))
def test_text_alone_is_spread_evenly(seed):
    plan = make_plan(2, 2)
    work = draw(plan, 120, seed, text=1.0)
    step = arrange_step(plan, range(120), work, 6, "hierarchical")
    sums = loads(step.microbatches[LANGUAGE_MODEL], work.forward_ms[LANGUAGE_MODEL])
    assert sums.shape == (2, 10) and sums.max() < 1.05 * sums.mean()
    assert not any(batch_indices for replica in step.microbatches["vision"] for batch_indices in replica)


@pytest.mark.parametrize(("vision", "language"), [(2, 2), (1, 2), (4, 2), (3, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_microbatches_and_replicas_are_more_even_than_contiguous_ones(vision, language, seed):
    plan = make_plan(vision, language, 2)
    work = draw(plan, 128, seed)
    found = arrange_step(plan, range(128), work, 4, "hierarchical").microbatches
    other = arrange_step(plan, range(128), work, 4, "contiguous").microbatches
    for name in plan.modules:
        mine, theirs = (loads(kind[name], work.forward_ms[name]) for kind in (found, other))
        assert mine.max() <= theirs.max() and mine.std() < 0.5 * theirs.std()
        assert mine.sum(axis=1).max() <= theirs.sum(axis=1).max() * (1 + 1e-9)


def test_deferral_evens_out_what_the_encoder_leaves():
    # Encoder work is equal, so that the strata alone decide; one microbatch has all the long texts.
    plan = make_plan(1, 1)
    work = draw(plan, 12, text=0.0)
    forward = {"vision": np.array([4.0, 4, 2, 2, 2, 2]), LANGUAGE_MODEL: np.array([1.0, 1, 3, 3, 2, 2])}
    tokens = {name: np.ones(6, np.int64) for name in forward}
    work = Workloads(forward, work.backward_ratio, tokens, {})
    step = arrange_step(plan, range(6), work, 3, "hierarchical")
    assert loads(step.microbatches["vision"], forward["vision"]).tolist() == [[8.0, 8.0]]
    assert loads(step.microbatches[LANGUAGE_MODEL], forward[LANGUAGE_MODEL]).tolist() == [[6.0, 6.0]]


def test_deferral_makes_the_language_model_more_even_and_nothing_else_less(monkeypatch):
    plan = make_plan(2, 2)
    work = draw(plan, 128, text=0.0)

    def spreads() -> dict[str, float]:
        found = hierarchical(plan, work, 4)
        return {name: loads(found[name], work.forward_ms[name]).std() for name in found}

    deferred = spreads()
    monkeypatch.setattr(sys.modules[Batch.__module__], "defer", lambda places, weights, late, *_: late)
    without = spreads()
    assert deferred[LANGUAGE_MODEL] < 0.9 * without[LANGUAGE_MODEL]
    assert deferred["vision"] == pytest.approx(without["vision"])


def test_orders_of_pairs_are_tried_where_single_samples_hold_up_the_others(monkeypatch):
    plan = make_plan(2, 2, 2)
    work = draw(plan, 128, text=0.0)
    for name, start in (("vision", 0), (LANGUAGE_MODEL, 4)):
        work.forward_ms[name][start : start + 4] = 30.0

    def estimates(trials: int) -> np.ndarray:
        monkeypatch.setattr(sys.modules[Batch.__module__], "_TRIALS", trials)
        found = hierarchical(plan, work, 4)
        assert found == hierarchical(plan, work, 4)
        own = {name: loads(found[name], work.forward_ms[name]) for name in found}
        return Batch(plan, work, 1).pipeline.iteration_ms(own)

    assert estimates(16).max() < 0.97 * estimates(1).max()


@pytest.mark.parametrize(("vision", "count"), [(4, 2), (2, 4)])
def test_the_fewest_microbatches_are_those_that_all_tokens_need(vision, count):
    plan = make_plan(vision, 4)
    work = Workloads.alike(plan.modules, 16)
    tokens = {name: 10 * own for name, own in work.tokens.items()}
    assert Batch(plan, work, 1).fewest.max() == 1
    assert Batch(plan, dataclasses.replace(work, tokens=tokens, token_limits={"vision": 20}), 1).fewest.max() == count


@pytest.mark.parametrize("merged", [False, True])
def test_several_encoders(merged):
    vision = ModulePlugin(colocate_with="audio") if merged else ModulePlugin(dp_size=3)
    plan = resolve_plan(
        TWO_ENCODERS,
        {"audio": ModulePlugin(dp_size=2), "vision": vision, LANGUAGE_MODEL: ModulePlugin(dp_size=2)},
    )
    work = draw(plan, 128, text=0.3)
    step = arrange_step(plan, range(128), work, 8, "hierarchical")
    check(plan, work, step)
    contiguous = arrange_step(plan, range(128), work, 8, "contiguous")
    names = [("audio", "vision")] if merged else [("audio",), ("vision",)]
    for group in names:
        mine, theirs = (
            np.sum([loads(kind.microbatches[name], work.forward_ms[name]) for name in group], axis=0)
            for kind in (step, contiguous)
        )
        assert mine.std() < 0.5 * theirs.std()
    places = {
        name: [step.location_of.get((name, batch_index)) for batch_index in range(128)] for name in ("audio", "vision")
    }
    both = [(a, v) for a, v in zip(places["audio"], places["vision"], strict=True) if a and v]
    assert all(a == v for a, v in both) or not merged


def test_programs_can_be_built_and_end_sooner_with_smaller_microbatches_at_the_ends():
    plan = make_plan(1, 1, 2)
    work = draw(plan, 96, text=0.0)

    def time_ms(arrangement: str) -> float:
        step = arrange_step(plan, range(96), work, 6, arrangement)
        check(plan, work, step)

        def cost(task) -> float:
            batch_indices = list(step.chunks[task.module, task.replica, task.microbatch][task.chunk])
            return work.forward_ms[task.module][batch_indices].sum() / 2 * (1 if task.kind == "fwd" else 2)

        return simulate(plan, build_program(plan, step, (), cost), cost).iteration_ms

    assert time_ms("tapered") < time_ms("hierarchical") < time_ms("contiguous")


def test_it_is_the_default_and_has_a_tapered_form():
    assert next(iter(ARRANGEMENTS)) == "hierarchical" and "tapered" in ARRANGEMENTS
    plan = make_plan(1, 1, 3)
    work = draw(plan, 128, text=0.0)
    default = arrange_step(plan, range(128), work, 4)
    assert default == arrange_step(plan, range(128), work, 4, "hierarchical")
    step = arrange_step(plan, range(128), work, 4, "tapered")
    sums = loads(step.microbatches["vision"], work.forward_ms["vision"])[0]
    assert sums[0] < 0.7 * sums.mean() and sums[-1] < 0.7 * sums.mean()
