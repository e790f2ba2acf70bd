"""Predicted steps, and the choice between few copies and a fast step, against all instantiations."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recovery_policies import instantiations

from hf_mmparallel.cost import find_device
from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    Cut,
    ModulePlugin,
    ParameterSpec,
    SampleSizes,
    StorageSettings,
    resolve_plan,
    sync_groups,
)
from hf_mmparallel.resilience import plan_choice
from hf_mmparallel.resilience.model_chain import TypicalMicrobatches, model_chain
from hf_mmparallel.resilience.pipelines import ClusterPlan, PipelinePlans
from hf_mmparallel.resilience.plan_choice import (
    LEAST_GAIN,
    PlanOption,
    StepTimes,
    best_option,
    copy_seconds,
    reason_of_join,
    reason_text,
)
from hf_mmparallel.resilience.resilient_planner import ResilientPlanner
from hf_mmparallel.resilience.state_copies import PlacedPlan, Slice, StateCopies, StateCopy, state_copies, value_bytes
from tests.plan.specs import model_spec
from tests.resilience.models import MODELS, costs_of
from tests.resilience.test_resilient_planner import CLUSTERS, planner_of

SMALL = ("one rank a node", "tied", "frozen parts, tp", "little memory, two encoders")


def option(step_ms: float, copy_s: float, num_bytes: int = 0) -> PlanOption:
    plan = planner_of("llava", 3, 1, 1).first()
    return PlanOption(plan, step_ms, num_bytes, copy_s)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=4), st.integers(1, 600))
def test_most_steps_until_the_next_loss(pairs: list[tuple[int, int]], time_s: int) -> None:
    """Against counting whole steps of seconds, with less than one step of rounding."""
    options = [option(1e3 * step_s, copy_s) for step_s, copy_s in pairs]
    chosen = best_option(options, time_s)
    done = [len(range(copy_s + step_s, time_s + 1, step_s)) for step_s, copy_s in pairs]
    assert chosen.steps_within(time_s) == pytest.approx(max(one.steps_within(time_s) for one in options))
    assert done[options.index(chosen)] > max(done) - 1 - 1e-9


def test_of_equals_the_one_that_copies_less() -> None:
    one, other = option(10.0, 0.0, 5), option(10.0, 0.0, 3)
    assert best_option([one, other], 60.0) is other
    slow, fast = option(10.0, 0.0), option(9.0, 100.0)
    assert best_option([slow, fast], 60.0) is slow, "the copies are not done before the next loss"
    assert best_option([slow, fast], 3600.0) is fast


def test_copies_take_the_time_of_the_slowest_link() -> None:
    """Rank 1 receives twice what each of the others sends."""
    copies = StateCopies(tuple(StateCopy("weight", source, 1, Slice(), 10**9) for source in (0, 2)))
    device = replace(find_device("a100"), message_gb_per_s=None, node_message_gb_per_s=None)
    assert copy_seconds(copies, device, device.node_size) == pytest.approx(2 / device.link_gb_per_s)
    assert copy_seconds(copies, device, device.node_size + 1) == pytest.approx(2 / device.network_gb_per_s)
    assert copy_seconds(StateCopies(()), device, 2) == 0


def best_of_all_ms(planner: ResilientPlanner, num_nodes: int) -> float:
    """The shortest step of all instantiations on a number of nodes."""
    counts = [template.num_nodes for template in planner.templates]
    plans = []
    for numbers in instantiations(num_nodes, counts, planner.failures + 1):
        sizes = [count for count, number in zip(counts, numbers, strict=True) for _ in range(number)]
        if len(sizes) <= planner.plans.num_microbatches:
            plans.append(planner.plans.consecutive([planner.pipeline(size) for size in sizes[::-1]]))
    return min(map(planner.step_ms, plans))


def lost_one_by_one(planner: ResilientPlanner, rng: random.Random) -> Sequence[tuple[ClusterPlan, int]]:
    """Plans and the nodes that they lose, down to the fewest nodes that are guaranteed."""
    result, state = [], planner.first()
    while len(state.nodes) > planner.fewest_guaranteed:
        lost = rng.choice(state.nodes)
        result.append((state, lost))
        state = planner.without(state, [lost])
    return result


@pytest.mark.parametrize("cluster", SMALL)
def test_a_plan_is_nearly_the_best_of_all_where_copies_cost_nothing_and_changes_little_where_losses_are_near(
    cluster: str,
) -> None:
    """Against the simulated steps of all instantiations: the first plan and those after random losses."""
    often, seldom = (
        replace(planner_of(*CLUSTERS[cluster]), mean_time_between_failures_s=time_s) for time_s in (1e-12, 1e12)
    )
    assert seldom.step_ms(seldom.first()) <= 1.01 * best_of_all_ms(seldom, seldom.num_nodes)
    for state, lost in lost_one_by_one(seldom, random.Random(cluster)):
        after = seldom.without(state, [lost])
        assert seldom.step_ms(after) <= (1.01 + LEAST_GAIN) * best_of_all_ms(seldom, len(after.nodes))
        few = often.without(state, [lost])
        assert all(change.op != "divide" for change in few.changes) and few.reason.startswith("Fewest changes")


def test_the_fastest_pipelines_where_they_pay_for_their_copies() -> None:
    """The time between failures after which both do equally many steps follows from both steps and both copies."""
    planner = planner_of(*CLUSTERS["one rank a node"])
    spec, gains = planner.plans.chain.spec, 0
    for state, lost in lost_one_by_one(planner, random.Random(0)):
        few, fast = (
            replace(planner, mean_time_between_failures_s=time_s).without(state, [lost]) for time_s in (1e-12, 1e12)
        )
        if fast.reason.startswith("Fewest changes"):
            assert fast.pipelines == few.pipelines
            continue
        gains += 1
        (few_ms, fast_ms), device = map(planner.step_ms, (few, fast)), planner.plans.chain.costs.device
        assert fast_ms * (1 + LEAST_GAIN) <= few_ms
        few_s, fast_s = (copy_seconds(state_copies(spec, state, one), device, len(one.nodes)) for one in (few, fast))
        equal_s = (few_ms * fast_s - fast_ms * few_s) / (few_ms - fast_ms)
        assert fast_s > few_s and equal_s > 0
        for time_s, expected in ((0.99 * equal_s, few), (1.01 * equal_s, fast)):
            after = replace(planner, mean_time_between_failures_s=time_s).without(state, [lost])
            assert after.pipelines == expected.pipelines
    assert gains, "in a plan of these they are faster"


def test_the_reason_is_one_line_with_its_numbers() -> None:
    few, fast = option(10.0, 0.5, 2**20), option(9.0, 1.5, 3 * 2**20)
    pays, does_not = reason_text(fast, [few, fast], 3600.0), reason_text(few, [few, fast], 60.0)
    assert all(number in pays for number in ("11.1% faster", "3.0 MiB", "1.0 MiB", "1 h"))
    assert "11.1% faster" in does_not and "3.0 MiB" in does_not and "\n" not in pays + does_not
    assert "faster by 1%" in reason_text(few, [few], 60.0)
    joined = [reason_of_join(one, [few, fast], time_s) for one, time_s in ((fast, 3600.0), (few, 60.0))]
    assert f"of {fast.sizes} nodes" in joined[0] and "a step is 11." in joined[1]


@pytest.mark.parametrize("family", MODELS)
def test_a_simulated_step_is_the_predicted_one(family: str) -> None:
    """Of microbatches that are all alike: that of the step planner."""
    costs = costs_of(family)
    tokens = {name: [[256 if name == LANGUAGE_MODEL else 64]] * 2 for name in costs.spec.modules}
    chain = model_chain(costs, {}, TypicalMicrobatches(SampleSizes.of_sequences(tokens), 2, 8))
    planner = ResilientPlanner(PipelinePlans(chain, 1, 24), 7, 1)
    for plan in (planner.first(), planner.fastest(2), planner.without(planner.first(), [0])):
        steps = StepPlanner(costs, plan.plan, sync_groups(costs.spec, plan.plan), 2)
        predicted = steps.predict_batch(chain.microbatches.sizes.take(np.zeros(48, int)))
        assert planner.step_ms(plan) == pytest.approx(predicted.step_ms, rel=1e-3)


def test_other_nodes_of_the_same_pipelines_take_as_long() -> None:
    planner = planner_of("llava", 5, 1, 1)
    first = planner.first()
    moved = [replace(one, nodes=tuple(9 - node for node in one.nodes)) for one in first.pipelines]
    assert planner.step_ms(planner.plans.of(moved[::-1])) == planner.step_ms(first)


def test_what_can_not_be_simulated_has_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of unknown size; and all of several plans if one of them has too many tasks."""
    planner = planner_of("llava", 5, 1, 1)
    first, chain = planner.first(), planner.plans.chain
    assert planner.step_ms(first) > first.step_ms
    microbatches = replace(chain.microbatches, sizes=SampleSizes.uniform(dict.fromkeys(chain.spec.modules, 1), 2))
    plans = PipelinePlans(replace(chain, microbatches=microbatches), 1, 24)
    assert ResilientPlanner(plans, 5, 1).step_ms(first) == first.step_ms
    few = planner.fastest(2)
    tasks = [2 * 24 * sum(len(module.replicas[0]) for module in few.plan.modules.values())]
    monkeypatch.setattr(plan_choice, "MOST_TASKS", tasks[0])
    times = StepTimes(planner.plans)
    assert times.of([few])[0] > few.step_ms
    monkeypatch.setattr(plan_choice, "MOST_TASKS", tasks[0] - 1)
    assert times.of([few]) == [few.step_ms]


@pytest.mark.parametrize(("dim", "num_blocks"), [(0, 1), (1, 1), (0, 2), (1, 3)])
def test_slices_are_what_a_cut_takes(dim: int, num_blocks: int) -> None:
    """Together they are the parameter, each element once; blocks, as of gate and up matrices, are each cut."""
    parameter = ParameterSpec("weight", (24, 36), 0)
    covered = np.zeros(parameter.shape, int)
    for index in range(4):
        part = Slice.of(parameter, [Cut("tp", dim, index, 4, num_blocks)])
        view, size = np.moveaxis(covered, dim, 0), 0
        for block, (start, stop) in enumerate(part.ranges):
            assert block * len(view) // num_blocks <= start < stop <= (block + 1) * len(view) // num_blocks
            view[start:stop] += 1
            size += view[start:stop].size
        assert part.num_elements(parameter) == size == parameter.num_elements // 4
    assert (covered == 1).all()
    assert Slice.of(parameter, []).num_elements(parameter) == parameter.num_elements


def test_bytes_of_an_element() -> None:
    """Weights, both moments, and a float32 copy of trained 16-bit weights."""
    for dtype, trainable, master_weights, expected in (
        ("float32", True, None, 12),
        ("bfloat16", True, None, 14),
        ("bfloat16", True, False, 6),
        ("bfloat16", False, None, 2),
    ):
        parameter = ParameterSpec("weight", (8,), 0, dtype, trainable)
        assert value_bytes(parameter, StorageSettings(master_weights)) == expected


def test_holders_share_the_sending() -> None:
    """One of four copies is new: the others send a third each, to the size of a parameter."""
    spec = model_spec()
    plan = resolve_plan(spec, {"vision": ModulePlugin(4), LANGUAGE_MODEL: ModulePlugin(colocate_with="vision")})
    copies = state_copies(spec, PlacedPlan(plan, (0, 1, 2, 3)), PlacedPlan(plan, (0, 2, 3, 7)))
    largest = max(copy.num_bytes for copy in copies.copies)
    sent = list(copies.sent_bytes.values())
    assert set(copies.sent_bytes) == {0, 2, 3} and max(sent) - min(sent) <= largest
    assert copies.received_bytes == {7: 12 * spec.num_parameters}
    assert [copy.parameter for copy in copies.copies] == list(spec.parameters)
