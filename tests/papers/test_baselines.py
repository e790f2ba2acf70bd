"""Arrangements of others: equal to their own code where there is any, to their paper's words where not."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.trainer_pt_utils import BatchRebalanceSampler

from benchmarks.paper_samples import PUBLISHED, PUBLISHED_MODELS
from hf_mmparallel.arrange import arrange_step, find_arrangement, num_microbatches
from hf_mmparallel.arrange.arrangements import couple_encoders
from hf_mmparallel.papers.published_arrangements import batch_rebalance, disttrain, interleaved_order
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, StepPlan, Workloads, resolve_plan
from tests.plan.specs import model_spec

SPEC = model_spec()
BASELINES = ["contiguous", "batch_rebalance", "disttrain", "sub_microbatches"]


def make_plan(vision: tuple[int, int], language: tuple[int, int]) -> ParallelPlan:
    """(data-parallel copies, stages) of both modules."""
    sizes = {"vision": vision, LANGUAGE_MODEL: language}
    plugins = {name: ModulePlugin(dp_size=dp_size, pp_size=pp_size) for name, (dp_size, pp_size) in sizes.items()}
    return resolve_plan(SPEC, plugins)


def make_workloads(vision_ms, language_ms) -> Workloads:
    """As many tokens as tenths of a millisecond."""
    times = {"vision": np.array(vision_ms, dtype=float), LANGUAGE_MODEL: np.array(language_ms, dtype=float)}
    tokens = {name: np.rint(10 * values).astype(np.int64) for name, values in times.items()}
    return Workloads(times, {"vision": 2.0, LANGUAGE_MODEL: 2.0}, tokens, {})


@st.composite
def heavy_tailed(draw, max_size: int = 40, min_size: int = 0) -> Workloads:
    """Times over three decades, some of them alike; some samples have nothing for the encoder."""
    size = draw(st.integers(min_size, max_size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vision, language = np.round(rng.lognormal(1, draw(st.sampled_from([0.1, 1.0, 2.0])), (2, size)), 1) + 0.1
    return make_workloads(np.where(rng.random(size) < draw(st.sampled_from([0.0, 0.3])), 0, vision), language)


def flat(replicas) -> list[int]:
    return [index for microbatches in replicas for batch_indices in microbatches for index in batch_indices]


def arranged(plan: ParallelPlan, workloads: Workloads, size: int, arrangement: str) -> tuple[StepPlan, list[int]]:
    """A step that has every sample once in the language model, and the samples with work for the encoder, once too."""
    step = arrange_step(plan, range(workloads.num_samples), workloads, size, arrangement)
    assert sorted(flat(step.microbatches[LANGUAGE_MODEL])) == list(range(workloads.num_samples))
    busy = np.flatnonzero(workloads.forward_ms["vision"] > 0).tolist()
    assert sorted(flat(step.microbatches["vision"])) == busy
    return step, busy


@pytest.mark.parametrize("arrangement", BASELINES)
@given(heavy_tailed(24), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=40)
def test_every_sample_is_once_in_every_module_and_nothing_is_deferred(arrangement, workloads, vision, language, size):
    step, busy = arranged(make_plan((vision, 1), (language, 2)), workloads, size, arrangement)
    count = num_microbatches(workloads.num_samples, size, language)
    assert {len(replica) for replica in step.microbatches[LANGUAGE_MODEL]} == {count}
    # What an encoder takes at one place, the language model takes at the same place.
    parts = len(step.microbatches["vision"][0]) // count
    assert parts == (2 if arrangement == "sub_microbatches" else 1)
    for batch_index in busy:
        assert step.location_of["vision", batch_index][1] // parts == step.location_of[LANGUAGE_MODEL, batch_index][1]


@pytest.mark.parametrize("arrangement", BASELINES)
def test_with_equal_copies_an_encoder_copy_feeds_one_of_the_language_model(arrangement):
    rng = np.random.default_rng(0)
    workloads = make_workloads(*rng.lognormal(1, 1, (2, 48)))
    found = find_arrangement(arrangement)(make_plan((3, 2), (3, 2)), workloads, 4)
    for mine, theirs in zip(found["vision"], found[LANGUAGE_MODEL], strict=True):
        assert sorted(flat([mine])) == sorted(flat([theirs]))


def test_groups_of_copies_stay_among_themselves():
    plan = make_plan((2, 1), (4, 1))
    language = [((0, 1), (8,)), ((2, 3), (9,)), ((4, 5), (10,)), ((6, 7), (11,))]
    found = couple_encoders(plan, language)
    assert found["vision"] == (((0, 1, 2, 3), (8, 9)), ((4, 5, 6, 7), (10, 11)))
    assert found[LANGUAGE_MODEL] == tuple(language)
    found = couple_encoders(make_plan((4, 1), (2, 1)), [((0, 1, 2), (6, 7, 8)), ((3, 4, 5), (9, 10, 11))])
    assert found["vision"] == (((0, 1), (6,)), ((2,), (7, 8)), ((3, 4), (9,)), ((5,), (10, 11)))


@given(
    st.lists(st.integers(1, 40) | st.integers(1, 5000), min_size=1, max_size=70), st.integers(1, 5), st.integers(1, 6)
)
@settings(max_examples=150)
def test_batch_rebalance_is_that_of_transformers(lengths, dp_size, microbatch_size):
    count = num_microbatches(len(lengths), microbatch_size, dp_size)
    if len(lengths) < dp_size * count:
        lengths = lengths * (dp_size * count)
        microbatch_size = -(-len(lengths) // (dp_size * count))
        count = num_microbatches(len(lengths), microbatch_size, dp_size)
    sampler = BatchRebalanceSampler(lengths, len(lengths), dp_size, count, shuffle=False)
    expected = sampler._assign(list(range(len(lengths))), lengths)
    workloads = make_workloads([0.0] * len(lengths), np.array(lengths) / 10)
    found = batch_rebalance(make_plan((dp_size, 1), (dp_size, 1)), workloads, microbatch_size)
    assert [list(map(list, replica)) for replica in found[LANGUAGE_MODEL]] == expected
    assert found["vision"] == found[LANGUAGE_MODEL]


def test_batch_rebalance_of_fewer_samples_than_microbatches_leaves_the_last_empty():
    found = batch_rebalance(make_plan((1, 1), (2, 1)), make_workloads([1, 1, 1], [1, 3, 2]), 1)
    assert found[LANGUAGE_MODEL] == (((1,), (0,)), ((2,), ()))


def _literal_order(forward_ms, ratios, sizes):
    """DistTrain's algorithm 3 line by line, with the start of every task looked up by recursion."""
    num_microbatches, num_stages = forward_ms.shape
    pending = list(range(num_microbatches))
    order = [min(pending, key=lambda i: (sizes[i], i))]
    pending.remove(order[0])
    rear = sorted(pending, key=lambda i: (sizes[i], i))[: num_stages - 1]
    pending = [i for i in pending if i not in rear]
    interval = 0
    while pending:
        gap = _literal_gap(forward_ms, ratios, order, interval)
        width = min(num_stages - 1 if interval == 0 else 1, len(pending))
        pending.sort(key=lambda i: (forward_ms[i, 0], sizes[i], i))
        runs = [pending[start : start + width] for start in range(len(pending) - width + 1)]
        chosen = min(runs, key=lambda run: abs(sum(forward_ms[i, 0] for i in run) - gap))
        order, pending = order + chosen, [i for i in pending if i not in chosen]
        interval += 1
    return order + rear


def _literal_gap(forward_ms, ratios, order, interval) -> float:
    """What the first stage waits for backward `interval` of 1F1B, when only the forwards in `order` are known."""
    num_stages = forward_ms.shape[1]

    def tasks(stage: int) -> list[tuple[str, int]]:
        listed = [("fwd", i) for i in range(num_stages - stage)]
        for i in range(len(order)):
            listed += [("bwd", i), ("fwd", i + num_stages - stage)]
        return [(kind, i) for kind, i in listed if i < len(order)]

    @cache
    def end(kind: str, i: int, stage: int) -> float:
        listed = tasks(stage)
        place = listed.index((kind, i))
        free = end(*listed[place - 1], stage) if place else 0.0
        if kind == "fwd":
            come, takes = end("fwd", i, stage - 1) if stage else 0.0, forward_ms[order[i], stage]
        else:
            come = end("bwd", i, stage + 1) if stage + 1 < num_stages else 0.0
            takes = ratios[stage] * forward_ms[order[i], stage]
        return max(free, come) + takes

    before = tasks(0)[tasks(0).index(("bwd", interval)) - 1]
    return max(0.0, end("bwd", interval, 1) - end(*before, 0))


@given(st.integers(1, 14), st.integers(2, 5), st.integers(0, 2**32 - 1))
@settings(max_examples=80)
def test_microbatches_are_ordered_as_the_paper_says(count, num_stages, seed):
    rng = np.random.default_rng(seed)
    forward_ms = rng.lognormal(0, 1, (count, num_stages))
    ratios, sizes = rng.uniform(0, 3, num_stages), forward_ms.sum(axis=1)
    order = interleaved_order(forward_ms, ratios, sizes)
    assert order == _literal_order(forward_ms, ratios, sizes)
    ranking = np.argsort(sizes).tolist()
    assert order[0] == ranking[0] and order[max(1, count - num_stages + 1) :] == ranking[1:num_stages]


def test_one_stage_has_no_gaps():
    sizes = np.array([3.0, 1.0, 2.0])
    assert interleaved_order(sizes[:, None], np.array([2.0]), sizes) == [1, 2, 0]


def test_disttrain_gives_the_next_larger_sample_to_the_copy_with_the_smallest_sum():
    # Sizes 1 to 8; by hand: 1 | 2, 1 3 | 2, 1 3 | 2 4, 1 3 5 | 2 4, 1 3 5 | 2 4 6, and so on.
    sizes = np.arange(1.0, 9.0)
    found = disttrain(make_plan((2, 1), (2, 1)), make_workloads(sizes * 0.75, sizes * 0.25), 2)
    assert found[LANGUAGE_MODEL] == (((0, 2), (4, 6)), ((1, 3), (5, 7)))


def test_disttrain_varies_as_much_as_entrain_measured_on_the_most_variable_dataset():
    shape, model = PUBLISHED["synthchartnet"], PUBLISHED_MODELS["llama3-3b"]
    plan = resolve_plan(model.spec, {name: ModulePlugin(dp_size=4, pp_size=4) for name in model.spec.modules})
    spread = {"vision": [], "llama3-3b": []}
    for seed in range(4):
        workloads = model.workloads(shape.draw(512, seed))
        found = disttrain(plan, workloads, 4)
        for name, key in (("vision", "vision"), (LANGUAGE_MODEL, "llama3-3b")):
            own = workloads.forward_ms[name]
            times = [own[list(batch_indices)].sum() for replica in found[name] for batch_indices in replica]
            spread[key].append(np.std(times) / 2)  # on pairs of GPUs
    published = shape.stated.forward_std_ms["disttrain"]
    assert all(np.mean(values) == pytest.approx(published[key], rel=0.15) for key, values in spread.items())


def test_sub_microbatches_balance_the_encoder_inside_of_a_microbatch():
    workloads = make_workloads([4, 3, 2, 1, 8, 1, 1, 0], [1] * 8)
    found = find_arrangement("sub_microbatches")(make_plan((1, 1), (1, 1)), workloads, 4)
    assert found[LANGUAGE_MODEL] == (((0, 1, 2, 3), (4, 5, 6, 7)),)
    assert found["vision"] == (((0, 3), (1, 2), (4,), (5, 6, 7)),)
