"""Tokens and pairs of tokens that chunks compute, padded and packed, and what samples cost in a module."""

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.arrange import step_balance
from hf_mmparallel.cost import StepCost, analytic_costs, batch_workloads, find_device
from hf_mmparallel.cost.memory import activation_sizes
from hf_mmparallel.cost.row_sizes import chunk_sizes
from hf_mmparallel.data.item_sharding import spread
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan
from hf_mmparallel.schedule import Task
from tests.cost.models import HIDDEN, LAYER_MATRICES, LAYERS, PLAIN, model
from tests.schedule.builders import make_step

SIZES = SampleSizes.of_sequences({"vision": [[4, 4], [], [9], [2]], LANGUAGE_MODEL: [[20], [5], [12], [12]]})
STEP = make_step({"vision": [[[0, 1], [2, 3]]], LANGUAGE_MODEL: [[[1], [0, 2], [3]]]})
EVEN = make_step({"vision": [[[0], [1, 2, 3]]], LANGUAGE_MODEL: [[[0], [1], [2, 3]]]})
UNEVEN = (LANGUAGE_MODEL, 0, 1, 0)


def with_attention(attention: str, packing: bool | None = None, device=PLAIN, **changes):
    return replace(analytic_costs(model(attention=attention, **changes), device), packing=packing)


def chunks_of(costs, step, **plugins):
    return chunk_sizes(costs, resolve_plan(costs.spec, plugins), step, SIZES)


def alike(lengths) -> SampleSizes:
    """Samples of as many tokens in both modules."""
    return SampleSizes.of_sequences({name: [[n] for n in lengths.tolist()] for name in ("vision", LANGUAGE_MODEL)})


@pytest.mark.parametrize(
    ("attention", "packing", "wanted"),
    [
        ("sdpa", None, (40, 2 * 2 * 20**2, 2 * 20**2)),  # a dense mask: all pairs, twice what causal ones cost
        ("eager", None, (40, 2 * 2 * 20**2, 2 * 20**2)),
        ("flash_attention_2", None, (40, 20**2 + 12**2, 0)),  # padding is left out of attention only
        ("bitfield", None, (32, 20**2 + 12**2, 0)),
        ("bitfield", False, (40, 2 * 2 * 20**2, 2 * 20**2)),  # without words it takes the same mask
        ("sdpa", True, (32, 20**2 + 12**2, 0)),
    ],
)
def test_an_uneven_chunk_computes_its_padding_unless_it_is_packed(attention, packing, wanted):
    costs = with_attention(attention, packing)
    plan = resolve_plan(costs.spec, {})
    assert chunk_sizes(costs, plan, STEP, SIZES)[UNEVEN] == wanted
    assert activation_sizes(costs, plan, STEP, SIZES)[UNEVEN].tolist() == [wanted[2], wanted[0], 1]


@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("count", range(1, 10))
def test_the_cp_ranks_of_an_encoder_wait_for_the_one_with_most_images(count, cp_size):
    costs = with_attention("sdpa")
    plan = resolve_plan(costs.spec, {"vision": ModulePlugin(cp_size=cp_size)})
    sizes = SampleSizes.of_sequences({"vision": [[7] * count], LANGUAGE_MODEL: [[20]]})
    step = make_step({"vision": [[[0]]], LANGUAGE_MODEL: [[[0]]]})
    busiest = np.bincount(spread(np.full(count, 5), cp_size)).max()
    found = chunk_sizes(costs, plan, step, sizes)["vision", 0, 0, 0]
    assert np.array(found) / cp_size == pytest.approx([7 * busiest, 7**2 * busiest, 0])
    halves = {**sizes.squares, "vision": sizes.squares["vision"] / 2}  # of windows, which are of two halves
    windows = replace(sizes, squares=halves, items={"vision": np.array([count])})
    in_windows = chunk_sizes(costs, plan, step, windows)["vision", 0, 0, 0]
    assert np.array(in_windows) == pytest.approx(np.array(found) * [1, 0.5, 1])
    # rank by rank, a forward takes as long as that of the images of the busiest one, without a transfer
    alone = SampleSizes.of_sequences({"vision": [[7] * int(busiest)], LANGUAGE_MODEL: [[20]]})
    own = StepCost(costs, resolve_plan(costs.spec, {}), step, alone)(Task("fwd", "vision", 0, 0, 0))
    assert StepCost(costs, plan, step, sizes)(Task("fwd", "vision", 0, 0, 0)) == pytest.approx(own)


def test_one_large_image_among_small_ones_is_what_its_cp_ranks_wait_for():
    costs = with_attention("sdpa")
    plan = resolve_plan(costs.spec, {"vision": ModulePlugin(cp_size=4)})
    sizes = SampleSizes.of_sequences({"vision": [[900, *[10] * 9]], LANGUAGE_MODEL: [[20]]})
    step = make_step({"vision": [[[0]]], LANGUAGE_MODEL: [[[0]]]})
    assert chunk_sizes(costs, plan, step, sizes)["vision", 0, 0, 0].tokens / 4 == pytest.approx(900, rel=0.1)


def test_ranks_share_the_tokens_of_one_image_where_they_can():
    spec = model()
    vision = replace(spec.modules["vision"], shares_tokens=True)
    spec = replace(spec, modules={**spec.modules, "vision": vision})
    plan = resolve_plan(spec, {"vision": ModulePlugin(cp_size=4)})
    step = make_step({"vision": [[[0]]], LANGUAGE_MODEL: [[[0]]]})

    def tokens_of(*images: int, link_gb_per_s: float = 1e12) -> float:
        costs = analytic_costs(spec, replace(PLAIN, link_gb_per_s=link_gb_per_s))
        sizes = SampleSizes.of_sequences({"vision": [images], LANGUAGE_MODEL: [[20]]})
        return chunk_sizes(costs, plan, step, sizes)["vision", 0, 0, 0].tokens

    # a projector of one matrix, beside four layers of twelve, is computed on each of the four ranks
    around = HIDDEN**2 / (HIDDEN**2 + LAYERS * LAYER_MATRICES)
    assert tokens_of(900) == pytest.approx(900 * (1 + 3 * around))
    assert tokens_of(900, link_gb_per_s=450.0) > tokens_of(900)  # keys and values travel
    assert tokens_of(450, 450) == pytest.approx(tokens_of(900))  # two ranks would wait
    assert tokens_of(*[225] * 4) == 900  # whole ones


def test_rows_of_one_length_need_no_dense_mask():
    found = chunks_of(with_attention("sdpa"), EVEN)
    assert found[LANGUAGE_MODEL, 0, 2, 0] == (24, 2 * 12**2, 0) and found[LANGUAGE_MODEL, 0, 0, 0] == (20, 20**2, 0)
    assert found["vision", 0, 1, 0] == (0, 0, 0)  # encoders compute what they are given
    eager = chunks_of(with_attention("eager"), EVEN)
    assert eager[LANGUAGE_MODEL, 0, 2, 0] == (24, 2 * 2 * 12**2, 2 * 12**2)


@pytest.mark.parametrize(("window", "masked"), [(0, ()), (20, (0,)), (12, (0, 2)), (5, (0, 1, 2)), (21, ())])
def test_rows_as_long_as_a_window_have_a_dense_mask(window, masked):
    found = chunks_of(with_attention("sdpa", windows=(window, 0) * 2), EVEN)
    pairs = {0: 20**2, 1: 5**2, 2: 2 * 12**2}  # rows of 20, of 5, and two of 12 tokens, none of them padded
    for index, expected in pairs.items():
        assert found[LANGUAGE_MODEL, 0, index, 0].scores == (expected if index in masked else 0)


def test_ranks_that_share_rows_have_whole_blocks():
    found = chunks_of(with_attention("sdpa"), STEP, language_model=ModulePlugin(cp_size=2, cp_block=10))
    assert found[UNEVEN] == (40, 20**2 + 12**2, 0)


def test_a_dense_mask_takes_the_slow_kernel():
    slow = with_attention("sdpa", device=replace(PLAIN, masked_attention_share=0.5))
    assert chunks_of(slow, STEP)[UNEVEN].squares == 2 * 2 * 20**2 / 0.5
    assert chunks_of(slow, EVEN)[LANGUAGE_MODEL, 0, 2, 0].squares == 2 * 12**2  # without padding there is no mask


@pytest.mark.parametrize("attention", ["sdpa", "eager", "bitfield"])
def test_workloads_of_microbatches_are_what_their_tasks_take(attention):
    costs = with_attention(attention, device=replace(PLAIN, memory_gb_per_s=1e30))  # reading weights takes no time
    plan = resolve_plan(costs.spec, {})
    sizes = alike(np.append(np.random.default_rng(0).integers(1, 4000, 28), [700] * 4))
    workloads = batch_workloads(costs, plan, sizes)
    assert (workloads.row_ms is None) == (attention == "bitfield")
    rows = [[list(range(start, start + 4)) for start in range(0, 32, 4)]]
    step = make_step({"vision": rows, LANGUAGE_MODEL: rows})
    cost = StepCost(costs, plan, step, sizes)
    for name, (times,) in step_balance(step, workloads).forward_ms.items():
        assert times == pytest.approx([cost(Task("fwd", name, 0, 0, index)) for index in range(8)], rel=1e-5)


def test_samples_that_are_all_alike_are_not_padded():
    costs = with_attention("sdpa")
    plan = resolve_plan(costs.spec, {})
    assert batch_workloads(costs, plan, SampleSizes.uniform({"vision": 4, LANGUAGE_MODEL: 9}, 8)).row_ms is None


THREE = SampleSizes.of_sequences({"vision": [[40, 40], [], [90]], LANGUAGE_MODEL: [[200], [50], [120]]})
ALONE = make_step({"vision": [[[0], [1], [2]]], LANGUAGE_MODEL: [[[0], [1], [2]]]})


@pytest.mark.parametrize("frozen", [(), ("vision",), (LANGUAGE_MODEL,), ("vision", LANGUAGE_MODEL)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_sample_costs_what_a_task_of_it_alone_does(frozen, checkpointing):
    spec = model(frozen)
    costs = analytic_costs(spec, replace(PLAIN, memory_gb_per_s=1e30))  # reading weights takes no time
    plan = resolve_plan(spec, {"vision": ModulePlugin(activation_checkpointing=checkpointing)})
    cost = StepCost(costs, plan, ALONE, THREE)
    found = batch_workloads(costs, plan, THREE)
    assert found.token_limits == {} and found.tokens["vision"].tolist() == [80, 0, 90]
    assert found.forward_ms["vision"][1] == 0
    for name in plan.modules:
        forward, backward = ([cost(Task(kind, name, 0, 0, index)) for index in range(3)] for kind in ("fwd", "bwd"))
        assert found.forward_ms[name] == pytest.approx(forward)
        assert found.backward_ratio[name] * sum(forward) == pytest.approx(sum(backward))
        assert (found.forward_ms[name] == found.forward_ms[name].astype(np.float32)).all()


def test_stages_and_ranks_do_not_change_what_a_sample_costs():
    spec = model((LANGUAGE_MODEL,), tied=False)
    costs = analytic_costs(spec, replace(PLAIN, link_gb_per_s=1e30, memory_gb_per_s=1e30))
    whole = batch_workloads(costs, resolve_plan(spec, {}), THREE)
    cut = {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(pp_size=4, tp_size=2)}
    parts = batch_workloads(costs, resolve_plan(spec, cut), THREE)
    assert parts.backward_ratio == pytest.approx(whole.backward_ratio)
    assert all((parts.forward_ms[name] == whole.forward_ms[name]).all() for name in whole.forward_ms)


def test_the_tighter_limit_counts():
    spec = model()
    costs = analytic_costs(spec, find_device("h100"))
    plan = resolve_plan(spec, {})
    assert batch_workloads(costs, plan, THREE, 77).token_limits == {LANGUAGE_MODEL: 77}
    fits = batch_workloads(costs, plan, THREE, None, 1e8).token_limits
    assert set(fits) == set(plan.modules)
    less = batch_workloads(costs, plan, THREE, fits[LANGUAGE_MODEL] - 1, 1e8).token_limits
    assert less == {**fits, LANGUAGE_MODEL: fits[LANGUAGE_MODEL] - 1}
    assert batch_workloads(costs, plan, THREE, fits[LANGUAGE_MODEL] + 1, 1e8).token_limits == fits
