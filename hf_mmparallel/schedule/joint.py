"""
Joint tasks: those of several replicas that run at the same time, since their ranks exchange weights or gradients.

They have equal microbatches and chunks, and for the order of tasks their replicas are one, on the ranks of all of
them. No cycle can arise: what a task waits for is in an earlier module, an earlier stage or, for a backward, a
forward, which holds for joint tasks as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..plan import ModulePlan, ParallelPlan, Stage, StepPlan

if TYPE_CHECKING:
    from .graph import TaskGraph


def is_joint(plan: ParallelPlan) -> bool:
    """Whether a plan has replicas whose tasks run jointly."""
    return any(module.joint_replicas > 1 for module in plan.modules.values())


def joint_plan(plan: ParallelPlan) -> ParallelPlan:
    """Returns the plan with the first of jointly running replicas on the ranks of all; the others have no stages."""
    return replace(plan, modules={name: _joint_module(module) for name, module in plan.modules.items()})


def _joint_module(module: ModulePlan) -> ModulePlan:
    size = module.joint_replicas
    if size == 1:
        return module
    replicas: list[tuple[Stage, ...]] = [()] * module.dp_size
    for first in range(0, module.dp_size, size):
        replicas[first] = tuple(map(_on_all_ranks, zip(*module.replicas[first : first + size], strict=True)))
    return replace(module, replicas=tuple(replicas), sharding=replace(module.sharding, zero_stage=0, shard_size=None))


def _on_all_ranks(stages: tuple[Stage, ...]) -> Stage:
    """The first of some stages, on the ranks of all of them."""
    return replace(stages[0], mesh=(tuple(sorted(chain.from_iterable(stage.all_ranks for stage in stages))),))


def joint_step(plan: ParallelPlan, step: StepPlan) -> StepPlan:
    """Returns the step for [`joint_plan`]: each microbatch of the first replica has the samples of all replicas."""
    microbatches = dict(step.microbatches)
    for name, module in plan.modules.items():
        size, replicas = module.joint_replicas, step.microbatches[name]
        joint: list[tuple[tuple[int, ...], ...]] = [()] * len(replicas)
        for first in range(0, len(replicas), size):
            members = replicas[first : first + size]
            joint[first] = tuple(
                tuple(chain.from_iterable(member[index] for member in members if index < len(member)))
                for index in range(max(map(len, members)))
            )
        microbatches[name] = tuple(joint)
    return replace(step, microbatches=microbatches, whole=None if step.whole is None else joint_step(plan, step.whole))


class JointTasks:
    """A graph in which the first of joint tasks (`joint`, `[tasks]`) stands for all of them."""

    def __init__(self, plan: ParallelPlan, graph: TaskGraph, joint: NDArray):
        self.plan = joint_plan(plan)
        keys = tuple((name, d, index) for name, module in self.plan.modules.items() for d, index, _ in module.stages())
        number = {key: index for index, key in enumerate(graph.stages)}
        # indices in the whole graph: of each stage and of each task of `self.graph`
        self.stages = np.array([number[key] for key in keys], np.int64)
        self.tasks, self._position = np.unique(joint, return_inverse=True)
        columns = graph.columns[:, self.tasks].copy()
        columns[0] = np.searchsorted(self.stages, columns[0])
        forward = graph.forward[self.tasks]
        forward = np.where(forward < 0, -1, self._position[forward])
        self.graph = replace(
            graph, stages=keys, columns=columns, forward=forward, links=self._position[graph.links], joint=None
        )

    @property
    def occupied(self) -> list[tuple[int, ...]]:
        """The ranks that a task of each stage of the whole graph occupies, for the first of joint tasks."""
        result: list[tuple[int, ...]] = [()] * (int(self.stages.max(initial=-1)) + 1)
        stages = (stage for module in self.plan.modules.values() for _, _, stage in module.stages())
        for index, stage in zip(self.stages.tolist(), stages, strict=True):
            result[index] = stage.all_ranks
        return result

    def longest(self, times_ms: Sequence[float]) -> list[float]:
        """The longest time of the tasks that run jointly, in the order of `graph`."""
        result = np.zeros(len(self.tasks))
        np.maximum.at(result, self._position, np.asarray(times_ms))
        return result.tolist()

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """Gives the value of each task of `graph` to all tasks that it stands for."""
        return np.asarray(values)[self._position].tolist()
