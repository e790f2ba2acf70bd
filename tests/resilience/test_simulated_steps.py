"""Times of steps of pipelines against predictions of their plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes, sync_groups
from hf_mmparallel.resilience import simulated_steps
from hf_mmparallel.resilience.model_chain import model_chain
from hf_mmparallel.resilience.pipelines import PipelinePlans
from hf_mmparallel.resilience.resilient_planner import ResilientPlanner
from hf_mmparallel.resilience.simulated_steps import StepTimes
from hf_mmparallel.resilience.typical_microbatches import TypicalMicrobatches
from hf_mmparallel.steps.representatives import predict_batch
from hf_mmparallel.steps.step_planner import StepPlanner
from tests.resilience.models import MODELS, costs_of
from tests.resilience.test_resilient_planner import CLUSTERS, planner_of


@pytest.mark.parametrize("family", MODELS)
def test_a_simulated_step_is_the_predicted_one(family: str) -> None:
    """Of microbatches that are all alike: that of the step planner."""
    costs = costs_of(family)
    tokens = {name: [[256 if name == LANGUAGE_MODEL else 64]] * 2 for name in costs.spec.modules}
    chain = model_chain(costs, {}, TypicalMicrobatches(SampleSizes.of_sequences(tokens), 2, 8))
    planner = ResilientPlanner(PipelinePlans(chain, 1, 24), 7, 1)
    for plan in (planner.first(), planner.fastest(2), planner.without(planner.first(), [0])):
        steps = StepPlanner(costs, plan.plan, sync_groups(costs.spec, plan.plan), 2)
        predicted = predict_batch(steps, chain.microbatches.sizes.take(np.zeros(48, int)))
        assert planner.step_ms(plan) == pytest.approx(predicted.step_ms, rel=1e-3)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_simulated_step_is_longer_than_its_tasks(cluster: str) -> None:
    planner = planner_of(*CLUSTERS[cluster])
    first = planner.first()
    assert planner.step_ms(first) > 0.999 * first.step_ms


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
    monkeypatch.setattr(simulated_steps, "MOST_TASKS", tasks[0])
    times = StepTimes(planner.plans)
    assert times.of([few])[0] > few.step_ms
    monkeypatch.setattr(simulated_steps, "MOST_TASKS", tasks[0] - 1)
    assert times.of([few]) == [few.step_ms]
