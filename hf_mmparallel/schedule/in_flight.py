"""Phases of tasks and limits of microbatches in flight, from the policy of a plan's schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..plan import ModulePlan, ParallelPlan, Stage, StageKey, StepPlan
from ..plan.parallel_plan import virtual_stages
from ..plan.step_plan import SampleLocations
from .kinds import KINDS

# Joint tasks: those of several replicas that run at the same time, since their ranks exchange weights or gradients.
#
# They have equal microbatches and chunks, and for the order of tasks their replicas are one, on the ranks of all of
# them. No cycle can arise: what a task waits for is in an earlier module, an earlier stage or, for a backward, a
# forward, which holds for joint tasks as well.


def _is_joint(plan: ParallelPlan) -> bool:
    """Whether a plan has replicas whose tasks run jointly."""
    return any(module.joint_replicas > 1 for module in plan.modules.values())


def _joint_plan(plan: ParallelPlan) -> ParallelPlan:
    """Returns the plan with the first of jointly running replicas on the ranks of all; the others have no stages."""
    return replace(plan, modules={name: _joint_module(module) for name, module in plan.modules.items()})


def _joint_module(module: ModulePlan) -> ModulePlan:
    size = module.joint_replicas
    if size == 1:
        return module
    replicas: list[tuple[Stage, ...]] = [()] * module.dp_size
    for first in range(0, module.dp_size, size):
        replicas[first] = tuple(map(_on_all_ranks, zip(*module.replicas[first : first + size], strict=True)))
    sharding = replace(module.sharding, zero_stage=0, shard_size=None)
    return replace(module, replicas=tuple(replicas), sharding=sharding, ep_size=1)


def _on_all_ranks(stages: tuple[Stage, ...]) -> Stage:
    """The first of some stages, on the ranks of all of them."""
    return replace(stages[0], mesh=(tuple(sorted(chain.from_iterable(stage.all_ranks for stage in stages))),))


def _joint_step(plan: ParallelPlan, step: StepPlan) -> StepPlan:
    """Returns the step for [`_joint_plan`]: each microbatch of the first replica has the samples of all replicas."""
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
    return replace(
        step, microbatches=microbatches, whole=None if step.whole is None else _joint_step(plan, step.whole)
    )


def occupied_ranks(plan: ParallelPlan) -> list[tuple[int, ...]]:
    """The ranks that a task of each stage occupies, in the plan's order: those of all stages that run it jointly."""
    result = []
    for module in plan.modules.values():
        size, known = module.joint_replicas, dict[tuple[int, int], tuple[int, ...]]()
        for replica, index, stage in module.stages():
            group = replica // size * size, index
            if size > 1 and group not in known:
                joint = (stages[index].all_ranks for stages in module.replicas[group[0] :][:size])
                known[group] = tuple(sorted(chain.from_iterable(joint)))
            result.append(known.get(group, stage.all_ranks))
    return result


def task_phases(plan: ParallelPlan) -> dict[tuple[str, str], int]:
    """Returns (module, word of a kind) -> the phase of a step in which such tasks run, see [`SchedulePolicy`]."""
    phases = {name: plan.policy.phases(name in plan.encoders) for name in plan.modules}
    return {(name, kind.word): phases[name][kind.direction] for name in phases for kind in KINDS.values()}


def may_alternate(plan: ParallelPlan) -> bool:
    """Whether a stage may wait for a forward after each backward, see [`order_tasks`]."""
    return plan.policy.is_one_phase


@lru_cache(maxsize=256)
def pipeline_depths(num_ranks: int, vp_size: int = 1) -> tuple[int, ...]:
    """
    Most microbatches in flight on each stage of a pipeline under 1F1B.

    That is the number of stages up to the end (Cornstarch, section 4.4: `N - p`). With `vp_size` virtual stages of
    each rank it is the peak of interleaved 1F1B (Narayanan et al. 2021, section 2.2): a rank `r` runs groups of
    `num_ranks` microbatches through one of its stages after the other, `(vp_size - 1) * num_ranks + 2 * (num_ranks - 1
    - r)` forwards before it alternates. A limit for each rank in place of each stage would deadlock for unlike stages.
    """
    result = list(range(num_ranks * vp_size, 0, -1))
    for rank in range(num_ranks if vp_size > 1 else 0):
        in_flight, peaks = [0] * vp_size, [0] * vp_size
        ahead = (vp_size - 1) * num_ranks + 2 * (num_ranks - 1 - rank)
        for turn in range(4 * vp_size * num_ranks):
            stage = turn // num_ranks % vp_size
            in_flight[stage] += 1
            peaks[stage] = max(peaks[stage], in_flight[stage])
            if turn >= ahead:
                in_flight[vp_size - 1 - (turn - ahead) // num_ranks % vp_size] -= 1
        result[rank::num_ranks] = peaks
    return tuple(result)


def _depths(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Most microbatches in flight on each stage of a replica by itself."""
    vp_size = virtual_stages(stages)
    return pipeline_depths(len(stages) // vp_size, vp_size)


def stage_depths(plan: ParallelPlan) -> dict[StageKey, int]:
    """
    Returns (module, replica, stage) -> most microbatches in flight under 1F1B without deferral: those of its pipeline,
    see [`pipeline_depths`], and of the longest path through the modules behind it.
    """
    depths: dict[StageKey, int] = {}
    for name in reversed(list(plan.modules)):
        targets = [edge.target for edge in plan.edges if edge.source == name]
        behind = max((depths[t, d, 0] for t in targets for d in range(plan.modules[t].dp_size)), default=0)
        for replica, stages in enumerate(plan.modules[name].replicas):
            for index, depth in enumerate(_depths(stages)):
                depths[name, replica, index] = depth + behind
    return depths


def in_flight_1f1b(plan: ParallelPlan, step: StepPlan) -> dict[StageKey, float]:
    """
    Returns (module, replica, stage) -> maximum microbatches in flight under 1F1B.

    For generators and the language model this is their depth, see [`stage_depths`]. An encoder must
    hold every microbatch whose features or gradients are still in use downstream: the depth without deferral, one more
    with deferral by one microbatch, and more if it has more microbatches than its consumer.
    """
    if _is_joint(plan):
        limits = in_flight_1f1b(_joint_plan(plan), _joint_step(plan, step))
        return {
            (name, replica, index): limits[name, replica // module.joint_replicas * module.joint_replicas, index]
            for name, module in plan.modules.items()
            for replica, index, _ in module.stages()
        }
    limits: dict[StageKey, float] = {}
    first: dict[str, NDArray] = {}  # module -> limit of the first stage of each replica
    for name in reversed(list(plan.modules)):
        module = plan.modules[name]
        behind = np.zeros(module.dp_size, np.int64)
        given = step.batch_indices_of(name, module.with_stages)
        for target in (edge.target for edge in plan.edges if edge.source == name):
            behind = np.maximum(behind, _ahead(step, given, target, first[target], module.dp_size))
        depths = [_depths(stages) for stages in module.replicas]
        first[name] = behind + np.array([depth[0] if depth else 0 for depth in depths])
        for replica in module.with_stages:
            more = int(behind[replica])
            limits.update({(name, replica, i): depth + more for i, depth in enumerate(depths[replica])})
    return limits


def _ahead(step: StepPlan, given: SampleLocations, target: str, max_in_flight: NDArray, num_replicas: int) -> NDArray:
    """
    Returns, `[num_replicas]`, the most microbatches by which each replica of a module must be ahead of its consumer.

    `given` locates the module's batch indices; `max_in_flight`, int64 `[replicas]`, is of the consumer `target`.
    """
    used, turn, turns = step.turns(given, target)
    replica, consumer = given.replica[used], step.locations[target][0][given.batch_indices[used]]
    counts = np.array(list(map(len, (step.whole or step).microbatches[target])))
    depth = np.zeros(num_replicas, np.int64)  # turns in flight downstream; 0 without a consumer
    np.maximum.at(depth, replica, np.ceil(max_in_flight[consumer] * turns / counts[consumer]).astype(np.int64))
    # Microbatches without samples have no tasks.
    used_microbatches, microbatch = np.unique(given.microbatch_index[used], return_inverse=True)
    owner = np.empty(len(used_microbatches), np.int64)
    owner[microbatch] = replica
    index = np.arange(len(used_microbatches)) - np.searchsorted(owner, owner)
    wanted = np.zeros((num_replicas, int(turn.max(initial=-1)) + 1), np.int64)  # microbatches needed by each turn
    np.maximum.at(wanted, (replica, turn), index[microbatch] + 1)
    wanted = np.maximum.accumulate(wanted, axis=1)
    last = np.zeros(len(used_microbatches), np.int64)  # turn of the last gradient of each microbatch
    np.maximum.at(last, microbatch, turn)
    done = np.zeros_like(wanted)
    np.add.at(done, (owner, last), 1)
    done = np.cumsum(done, axis=1) - done
    columns = np.arange(wanted.shape[1])
    reached = np.clip(columns + depth[:, None] - 1, 0, max(len(columns) - 1, 0))
    ahead = np.take_along_axis(wanted, reached, axis=1) - done
    return np.maximum(depth, ahead.max(axis=1, initial=0))


def in_flight_eager(plan: ParallelPlan, step: StepPlan) -> dict[StageKey, float]:
    """
    Returns the limits under `"eager"` if memory is not known: those of 1F1B, plus two microbatches in encoders. Stages
    with split backwards have about twice as many, see [`further_in_flight`].
    """
    encoders, more = plan.encoders, dict[StageKey, int]()
    for name, module in plan.modules.items():
        for replica in module.with_stages:
            count = len(module.replicas[replica])
            added = further_in_flight(count, count - 1 if module.splits_backward else 0)
            more.update({(name, replica, index): own for index, own in enumerate(added)})
    longest = max(more.values())  # encoders are ahead of what they feed
    more = {key: max(own, 2, longest) if key[0] in encoders else own for key, own in more.items()}
    # With the sample sizes of the published datasets this gives most of the speedup of unlimited memory, for a fifth
    # more activation memory instead of nearly twice as much. Raising the limit of the language model as well gives
    # nothing.
    return {key: limit + more[key] for key, limit in in_flight_1f1b(plan, step).items()}


def further_in_flight(num_stages: int, first: int) -> list[int]:
    """
    Further microbatches in flight on each stage of a pipeline where its first stage has `first` more, which is as many
    as all of them may have waiting for weight gradients. With one less than there are stages in the first it is ZB-H2
    (Qi et al. 2023, section 2.3): `2 (p - i) - 1` on stage `i` of `p`.
    """
    if num_stages == 1:
        return [first]
    return [first * (num_stages - 1 - index) // (num_stages - 1) for index in range(num_stages)]


def in_flight_limits(
    plan: ParallelPlan, step: StepPlan, fitting_in_flight: Mapping[StageKey, float] | None = None
) -> dict[StageKey, float]:
    """
    Returns (module, replica, stage) -> maximum microbatches in flight, without stages that run all forwards first.

    For the schedule `"eager"`, `fitting_in_flight` has what fits into memory, see [`~cost.fitting_in_flight`];
    [`in_flight_eager`] when left out.
    """
    encoders = plan.encoders
    limits = in_flight_1f1b(plan, step)
    limits = {key: limit for key, limit in limits.items() if not plan.policy.keeps_all(key[0] in encoders)}
    if not plan.policy.fills_memory:
        return limits
    wanted = in_flight_eager(plan, step) if fitting_in_flight is None else fitting_in_flight
    result = {}
    for (name, replica, index), limit in limits.items():
        size = plan.modules[name].joint_replicas
        first = replica // size * size
        fits = min(wanted.get((name, member, index), limit) for member in range(first, first + size))
        # below the limits of 1F1B ranks would deadlock
        result[name, replica, index] = max(limit, fits)
    return result
