"""Predicted steps of plans, and which plan a run goes on with: the one with most steps until the next loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from ..cost import Hardware, StepCost
from ..cost.gradient_sums import optimizer_ms
from ..cost.step_planner import StepPlanner
from ..plan import Stage, sync_groups
from ..schedule import Task, simulate
from .model_chain import mean_pass_ms
from .pipelines import ClusterPlan, Pipeline, PipelinePlans
from .state_copies import StateCopies

DAY_S = 86_400.0
LEAST_GAIN = 0.01  # predicted gain of speed below which pipelines are not divided anew
MOST_TASKS = 200_000  # tasks of a step that is simulated at most
_PipelineKey = tuple[int, tuple[tuple[str, tuple[tuple[Stage, ...], ...]], ...], tuple[int, ...]]


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
        pairs = [(_key(one, counts), one) for one, counts in plan.of_pipelines]
        pairs.sort(key=lambda pair: (pair[0][0], pair[0][2]), reverse=True)
        key = tuple(key for key, _ in pairs)
        if key not in self._known:
            counts = [count for _, _, of_copies in key for count in of_copies]
            self._known[key] = self._run(self.plans.consecutive([pipeline for _, pipeline in pairs], counts))
        return self._known[key]

    def _run(self, plan: ClusterPlan) -> float:
        chain, layout = self.plans.chain, plan.plan
        size = chain.microbatches.microbatch_size
        sizes = chain.microbatches.sizes.like_the_mean(self.plans.num_microbatches * size)
        planner = StepPlanner(chain.costs, layout, sync_groups(chain.spec, layout), size)
        step = planner.arrange(range(sizes.num_samples), sizes).step
        sends = StepCost(chain.costs, layout, step, sizes, planner.sum_costs, planner.stage_costs)
        passes_ms = mean_pass_ms(chain.costs, layout, chain.microbatches)

        def task_ms(task: Task) -> float:
            return passes_ms[task.stage_key][task.row.direction]

        timeline = simulate(planner.representatives, step, task_ms, sends.messages_ms, sends.sync_ms)
        step_ms = timeline.iteration_ms + optimizer_ms(chain.costs, layout, planner.sync_groups)
        # Processors round sums differently, and all ranks have to make the same plans.
        return float(np.float32(step_ms))


def _key(pipeline: Pipeline, counts: tuple[int, ...]) -> _PipelineKey:
    """What the times of a pipeline depend on."""
    return len(pipeline.nodes), tuple(pipeline.replicas.items()), counts


def _num_tasks(plan: ClusterPlan) -> int:
    stages = (
        len(module.replicas[copy]) * n
        for module in plan.plan.modules.values()
        for copy, n in enumerate(plan.microbatches)
    )
    return 2 * sum(stages)


@dataclass(frozen=True)
class PlanOption:
    plan: ClusterPlan
    step_ms: float
    copied_bytes: int = 0  # by ranks before they go on
    copy_s: float = 0.0  # predicted, see `copy_seconds`

    def steps_within(self, time_s: float) -> float:
        """Steps that are done in a time that starts with the copies."""
        return max(time_s - self.copy_s, 0.0) * 1e3 / self.step_ms

    @property
    def sizes(self) -> str:
        """Nodes of its pipelines: `3 x 4, 2`."""
        return runs_text([len(pipeline.nodes) for pipeline in self.plan.pipelines])


def copy_seconds(copies: StateCopies, device: Hardware, num_ranks: int) -> float:
    """
    Predicted time in which ranks copy what they lack: that of the rank which sends or receives most, over its slowest
    link. All send and receive at the same time.
    """
    most_bytes = max([*copies.sent_bytes.values(), *copies.received_bytes.values()], default=0)
    return most_bytes / device.message_bytes_per_ms(range(num_ranks)) / 1e3


def best_option(options: Sequence[PlanOption], time_s: float) -> PlanOption:
    """The option with most steps until the next loss; of equals the one that copies less, then the first."""
    return max(options, key=lambda option: (option.steps_within(time_s), -option.copied_bytes))


def reason_text(chosen: PlanOption, options: Sequence[PlanOption], time_s: float) -> str:
    """Says why an option was chosen; the first of all options changes as few pipelines as possible."""
    mended = options[0]
    within = _within(time_s)
    if chosen is not mended:
        return (
            f"Fastest pipelines, of {chosen.sizes} nodes: a step is {_faster(chosen, mended)} faster than with "
            f"{mended.sizes}, which pays for copies of {_mib(chosen)} instead of {_mib(mended)} {within}"
        )
    fastest = min(options, key=lambda option: option.step_ms)
    what = "; ".join(map(str, mended.plan.changes))
    if fastest.step_ms >= mended.step_ms:
        return f"Fewest changes, and no pipelines are faster by {LEAST_GAIN:.0%}: {what}"
    return f"Fewest changes: {what}. {_does_not_pay(fastest, mended)} {within}"


def reason_of_join(chosen: PlanOption, options: Sequence[PlanOption], time_s: float) -> str:
    """Says in one sentence why an option was chosen when nodes joined."""
    fastest = min(options, key=lambda option: option.step_ms)
    if fastest.step_ms >= chosen.step_ms:
        return f"Fastest pipelines, of {chosen.sizes} nodes"
    return f"Pipelines of {chosen.sizes} nodes. {_does_not_pay(fastest, chosen)} {_within(time_s)}"


def _within(time_s: float) -> str:
    return f"before the next loss, expected in {time_s / 3600:.3g} h"


def _does_not_pay(faster: PlanOption, chosen: PlanOption) -> str:
    return (
        f"With pipelines of {faster.sizes} nodes a step is {_faster(faster, chosen)} faster, which does not pay for "
        f"copies of {_mib(faster)} instead of {_mib(chosen)}"
    )


def _faster(option: PlanOption, other: PlanOption) -> str:
    return f"{other.step_ms / option.step_ms - 1:.1%}"


def _mib(option: PlanOption) -> str:
    return f"{option.copied_bytes / 2**20:,.1f} MiB"


def runs_text(numbers: Sequence[int]) -> str:
    """`3 x 4, 2`: equal numbers together, the largest first."""
    runs = [(number, len(list(run))) for number, run in groupby(sorted(numbers, reverse=True))]
    return ", ".join(f"{count} x {number}" if count > 1 else str(number) for number, count in runs)
