"""Steps of pipelines as the engine runs them, simulated with sends, gradient sums and the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..cost import StepCost
from ..cost.optimizer import optimizer_ms
from ..plan import Stage, sync_groups
from ..schedule import Task, simulate_parts
from ..steps.step_planner import StepPlanner
from .model_chain import mean_pass_ms
from .pipelines import ClusterPlan, Pipeline, PipelinePlans

_PipelineKey = tuple[int, tuple[tuple[str, tuple[Stage, ...]], ...], int]
MOST_TASKS = 200_000  # tasks of a step that is simulated at most


@dataclass(frozen=True, eq=False)
class StepTimes:
    """
    Predicted times of steps of pipelines, simulated with microbatches that all take the mean time, on nodes that
    follow each other. Steps of samples of unknown size, or with very many tasks, have the times of the closed form
    ([`ClusterPlan.step_ms`]).
    """

    plans: PipelinePlans
    _known: dict[tuple[_PipelineKey, ...], float] = field(default_factory=dict, init=False)

    def of(self, plans: Sequence[ClusterPlan]) -> list[float]:
        """Times in ms that can be compared with each other: all simulated, or all of the closed form."""
        are_simulated = self.plans.chain.microbatches.sizes.known and max(map(_num_tasks, plans)) <= MOST_TASKS
        return [self._simulated_ms(plan) if are_simulated else plan.step_ms for plan in plans]

    def _simulated_ms(self, plan: ClusterPlan) -> float:
        """The simulated time, once for equal pipelines on whichever nodes."""
        pairs = [(_key(one, count), one.layout) for one, count in zip(plan.pipelines, plan.microbatches, strict=True)]
        pairs.sort(key=lambda pair: (pair[0][0], pair[0][2]), reverse=True)
        key = tuple(key for key, _ in pairs)
        if key not in self._known:
            counts = [count for _, _, count in key]
            self._known[key] = self._run(self.plans.consecutive([layout for _, layout in pairs], counts))
        return self._known[key]

    def _run(self, plan: ClusterPlan) -> float:
        """Simulates a step."""
        chain, layout = self.plans.chain, plan.plan
        size = chain.microbatches.microbatch_size
        sizes = chain.microbatches.sizes.like_the_mean(self.plans.num_microbatches * size)
        planner = StepPlanner(chain.costs, layout, sync_groups(chain.spec, layout), size)
        step = planner.arrange(range(sizes.num_samples), sizes).step
        sends = StepCost(chain.costs, layout, step, sizes, planner.sum_costs, planner.stage_costs)
        passes_ms = mean_pass_ms(chain.costs, layout, chain.microbatches)

        def task_ms(task: Task) -> float:
            return passes_ms[task.stage_key][task.kind == "bwd"]

        replay = simulate_parts(planner.representatives, step, task_ms, sends.messages_ms, sends.sync_ms)
        step_ms = replay.iteration_ms + optimizer_ms(chain.costs, layout, planner.sync_groups)
        # Processors round sums differently, and all ranks have to make the same plans.
        return float(np.float32(step_ms))


def _key(pipeline: Pipeline, count: int) -> _PipelineKey:
    """What the times of a pipeline depend on."""
    return len(pipeline.nodes), tuple((name, stages) for name, stages in pipeline.layout.stages.items()), count


def _num_tasks(plan: ClusterPlan) -> int:
    """Forwards and backwards of a step."""
    stages = [sum(map(len, pipeline.layout.stages.values())) for pipeline in plan.pipelines]
    return 2 * sum(count * number for count, number in zip(stages, plan.microbatches, strict=True))
