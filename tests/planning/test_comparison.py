"""Steps as predicted beside steps as they ran: what a difference comes from."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from hf_mmparallel.cost import StepCost
from hf_mmparallel.cost.calibration import TimeScale
from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.planning.comparison import (
    BETWEEN,
    DATA,
    IN_STEP,
    RunComparison,
    StepComparer,
    rank_durations,
    times_on_a_rank,
)
from hf_mmparallel.planning.text import boundaries_text
from tests.cost.messages import message_ms
from tests.cost.models import HIDDEN, h100, model
from tests.schedule.replayed import replay

from .measured_steps import SCALES, corrected, counted, measured_step, planner, window

COMPARER = StepComparer(planner(counted()))
KINDS = ("forward", "backward")


def comparison(scales, **changes) -> RunComparison:
    windows = [window(COMPARER, corrected(counted(), scales), index, **changes) for index in range(2)]
    return RunComparison(windows)


def test_causes_add_up_to_a_step_with_tasks_as_measured():
    truth = corrected(counted(), SCALES)
    step = measured_step(COMPARER, truth, 3)
    causes = COMPARER.causes(step)
    assert set(causes) == {f"{name}/{kind}" for name in ("vision", LANGUAGE_MODEL) for kind in KINDS}
    (prediction, own), real = (step.prediction, COMPARER.planner), planner(truth)
    planned, sizes = prediction.planned.step, prediction.sizes
    cost, sends = (StepCost(costs, own.plan, planned, sizes, own.sync_groups) for costs in (real.costs, own.costs))
    after = replay(own.plan, own.program(planned, sizes), cost, partial(message_ms, sends), sends.sync_ms).iteration_ms
    assert after == pytest.approx(prediction.timeline.iteration_ms + sum(causes.values()))
    assert all(abs(ms) < 1e-9 for ms in COMPARER.causes(measured_step(COMPARER, counted(), 3)).values())


@pytest.mark.parametrize("module", ["vision", LANGUAGE_MODEL])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_kind_of_tasks_is_named_with_its_figures(module, kind):
    found = comparison({module: {kind: TimeScale(20.0)}})
    assert found.largest_cause == f"{module}/{kind}"
    groups = [own for w in found.windows for own in w.groups if (own.module, own.kind) == (module, kind)]
    base, again = (sum(getattr(own, field) for own in groups) for field in ("computed_ms", "recomputed_ms"))
    assert (again > 0) == (module == LANGUAGE_MODEL and kind == "backward")  # forwards that take what they did
    times = (20 * base + again) / (base + again)
    assert f"`{module}`, which took {times:.0f} times" in found.sentence
    assert sum(found.causes.values()) == pytest.approx(found.mean("wall_ms") - found.mean("predicted_step_ms"))


def test_what_is_no_task_is_named_too():
    ms = comparison({}).mean("step_ms")
    waits = comparison({}, wall_ms=3 * ms, data_ms=1.5 * ms)
    assert waits.causes[DATA] == pytest.approx(1.5 * ms) and waits.causes[BETWEEN] == pytest.approx(0.5 * ms)
    messages = comparison({}, step_ms=2 * ms, wall_ms=2 * ms)
    assert "(+100%)" in messages.sentence
    optimizer = comparison({}, wall_ms=3 * ms, data_ms=0.5 * ms)
    for found, cause, word in (
        (waits, DATA, "`dataloader_num_workers`"),
        (optimizer, BETWEEN, "optimizer"),
        (messages, IN_STEP, "messages"),
    ):
        assert found.largest_cause == cause and word in found.sentence


def test_a_step_that_took_as_long_as_predicted_needs_no_cause():
    found = comparison({})
    assert found.is_as_predicted and "(+0%)" in found.sentence
    faster = comparison({name: {"forward": TimeScale(0.1)} for name in ("vision", LANGUAGE_MODEL)})
    assert not faster.is_as_predicted and faster.causes[faster.largest_cause] < 0
    assert "difference, -" in faster.sentence


def test_rows_are_times_on_one_of_the_ranks_that_share_them():
    slow, plan = {"vision": {"forward": TimeScale(20.0)}}, COMPARER.planner.plan
    found = comparison(slow)
    predicted, measured = found.task_times["vision/forward"]
    assert measured == pytest.approx(20 * predicted)
    assert [name for name, *_ in found.rows] == [
        "step (ms)",
        *(f"{kind}s of {name} (ms on a rank)" for name in (LANGUAGE_MODEL, "vision") for kind in KINDS),
    ]
    steps = [measured_step(COMPARER, corrected(counted(), slow), index) for index in range(2)]
    times = times_on_a_rank(plan, steps)
    assert times["vision/forward"] == pytest.approx((predicted, measured))
    busy = [step.prediction.timeline.busy_ms for step in steps]
    vision = [rank for _, _, stage in plan.modules["vision"].stages() for rank in stage.all_ranks]
    both = predicted + times["vision/backward"][0]
    assert both == pytest.approx(np.mean([own[rank] for own in busy for rank in vision]))


def test_of_a_task_on_several_ranks_the_slowest_counts():
    own = StepComparer(planner(counted(), {LANGUAGE_MODEL: ModulePlugin(tp_size=2)}))
    step = measured_step(own, counted(), 0)
    ranks = []
    program = own.planner.program(step.prediction.planned.step, step.prediction.sizes)
    for rank, actions in sorted(program.actions.items()):
        tasks = [action.task for action in actions if action.task is not None and action.message is None]
        ranks.append(np.array([rank + step.durations[task] for task in tasks]))
    found = rank_durations(step.prediction, ranks)
    for task, took in found.items():
        slowest = max(own.planner.plan.stage(*task.stage_key).all_ranks)
        assert took == pytest.approx(slowest + step.durations[task])
    with pytest.raises(ValueError, match=r"rank 0 ran \d+ tasks where \d+ were predicted"):
        rank_durations(step.prediction, [ranks[0][:-1], *ranks[1:]])


def text_of(tokens: int, frozen: bool = False) -> str:
    """The text of a step of four samples with so many tokens in each module."""
    spec = model()
    vision = spec.modules["vision"].with_frozen(frozen)
    spec = replace(spec, modules={**spec.modules, "vision": vision})
    plan = resolve_plan(spec, {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(pp_size=2)})
    planner = StepPlanner(h100(spec), plan, sync_groups(spec, plan), 2)
    sizes = SampleSizes.uniform({"vision": tokens, LANGUAGE_MODEL: tokens}, 4)
    return boundaries_text(h100(spec), planner.predict(planner.arrange(range(4), sizes)))


def test_features_messages_and_replicas_of_a_boundary():
    few, many = text_of(1024), text_of(8192)
    assert (
        few.startswith(f"vision to language_model: {4 * 1024 * HIDDEN * 2 / 2**20:.3g} MiB")
        and "2 replicas to 1" in few
    )
    assert all(f"{HIDDEN * 2 / 2**10:.3g} KiB for each token" in text for text in (few, many))
    times = [re.findall(r"([\d.]+) ms", text) for text in (few, many)]  # shortest, longest, all, the step
    for short, long in zip(*(map(float, own) for own in times), strict=True):
        assert 0 < short < long
    assert all(float(own[0]) <= float(own[1]) < float(own[2]) for own in times)
    assert "gradients back" in few and "gradients back" not in text_of(1024, frozen=True)
