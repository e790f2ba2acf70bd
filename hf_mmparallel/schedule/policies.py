"""What tells schedules apart: which tasks a rank puts first, and how many microbatches a stage keeps in flight."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, StepPlan
from ..plan.step_plan import SlotPlaces
from .actions import StageKey


def task_phases(plan: ParallelPlan) -> dict[tuple[str, str], int]:
    """
    In which phase of a step each kind of task runs, see [`SchedulePolicy`].

    Args:
        plan (`ParallelPlan`): The layout and the name of its schedule.

    Returns:
        `dict[tuple[str, str], int]`: (module, `"fwd"` or `"bwd"`) -> phase.
    """
    encoders = plan.encoders
    return {
        (name, kind): phase
        for name in plan.modules
        for kind, phase in zip(("fwd", "bwd"), plan.policy.phases(name in encoders), strict=True)
    }


def may_alternate(plan: ParallelPlan) -> bool:
    """Whether the order that waits for a forward after each backward is tried."""
    return plan.policy.is_one_phase


def stage_depths(plan: ParallelPlan) -> dict[StageKey, int]:
    """
    The number of stages from each one to the end of the longest way through the model, which is how many microbatches
    1F1B keeps in flight there (Cornstarch, section 4.4: `N - p`).

    Args:
        plan (`ParallelPlan`): The layout.

    Returns:
        `dict[tuple[str, int, int], int]`: (module, replica, stage) -> its depth.
    """
    depths: dict[StageKey, int] = {}
    for name in reversed(list(plan.modules)):
        targets = [edge.target for edge in plan.edges if edge.source == name]
        behind = max((depths[t, d, 0] for t in targets for d in range(plan.modules[t].dp_size)), default=0)
        for replica, stages in enumerate(plan.modules[name].replicas):
            for index in range(len(stages)):
                depths[name, replica, index] = len(stages) - index + behind
    return depths


def live_caps(plan: ParallelPlan, step: StepPlan) -> dict[StageKey, float]:
    """
    How many microbatches may be in flight on each stage under 1F1B.

    In generators and the language model that is the number of stages to the end of the longest way from there. An
    encoder must be ahead by all that the microbatches in flight behind it take, while it keeps all whose last gradient
    comes from them: when every sample is taken in its own microbatch that is the depth again, one more when some are
    taken a microbatch later, and more where an encoder has more microbatches than the module behind it.

    Args:
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.

    Returns:
        `dict[tuple[str, int, int], float]`: (module, replica, stage) -> microbatches.
    """
    caps: dict[StageKey, float] = {}
    first: dict[str, NDArray] = {}  # module -> of each replica the cap of its first stage
    for name in reversed(list(plan.modules)):
        module = plan.modules[name]
        behind = np.zeros(module.dp_size, np.int64)
        given = step.slots_of(name, module.with_stages)
        for target in (edge.target for edge in plan.edges if edge.source == name):
            behind = np.maximum(behind, _ahead(step, given, target, first[target], module.dp_size))
        first[name] = behind + np.array([len(stages) for stages in module.replicas])
        for replica, most in zip(module.with_stages, first[name][list(module.with_stages)].tolist(), strict=True):
            caps.update({(name, replica, i): most - i for i in range(len(module.replicas[replica]))})
    return caps


def _ahead(step: StepPlan, given: SlotPlaces, target: str, caps: NDArray, num_replicas: int) -> NDArray:
    """
    The most microbatches that each replica of a module must be ahead of `target` at any time.

    Args:
        step (`StepPlan`): The arrangement.
        given (`SlotPlaces`): Where the samples of the module are.
        target (`str`): What takes them.
        caps (`np.ndarray`): int64 `[replicas of the target]`: microbatches in flight there.
        num_replicas (`int`): Replicas of the module.
    """
    used, turn, turns = step.turns(given, target)
    replica, taker = given.replica[used], step.locations[target][0][given.slots[used]]
    counts = np.array([len(own) for own in (step.whole or step).microbatches[target]])
    depth = np.zeros(num_replicas, np.int64)  # turns in flight behind each; 0 if nobody waits for what it makes
    np.maximum.at(depth, replica, np.ceil(caps[taker] * turns / counts[taker]).astype(np.int64))
    places, place = np.unique(given.place[used], return_inverse=True)  # microbatches without samples have no tasks
    owner = np.empty(len(places), np.int64)
    owner[place] = replica
    index = np.arange(len(places)) - np.searchsorted(owner, owner)
    wanted = np.zeros((num_replicas, int(turn.max(initial=-1)) + 1), np.int64)  # microbatches that each turn waits for
    np.maximum.at(wanted, (replica, turn), index[place] + 1)
    wanted = np.maximum.accumulate(wanted, axis=1)
    last = np.zeros(len(places), np.int64)  # the turn that the last gradient of each microbatch comes from
    np.maximum.at(last, place, turn)
    done = np.zeros_like(wanted)
    np.add.at(done, (owner, last), 1)
    done = np.cumsum(done, axis=1) - done
    columns = np.arange(wanted.shape[1])
    reached = np.clip(columns + depth[:, None] - 1, 0, max(len(columns) - 1, 0))
    ahead = np.take_along_axis(wanted, reached, axis=1) - done
    return np.maximum(depth, ahead.max(axis=1, initial=0))


def ahead_caps(plan: ParallelPlan, step: StepPlan) -> dict[StageKey, float]:
    """
    The caps of the schedule `"eager"` where no limit of memory is known: those of 1F1B, two more in encoders.

    With the sizes of the published datasets that gives most of what unlimited memory gives, with a fifth more of it
    rather than nearly twice as much. More in the language model gives nothing once encoders have these.

    Args:
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.
    """
    encoders = plan.encoders
    return {key: cap + 2 * (key[0] in encoders) for key, cap in live_caps(plan, step).items()}


def policy_caps(
    plan: ParallelPlan, step: StepPlan, caps: Mapping[StageKey, float] | None = None
) -> dict[StageKey, float]:
    """
    How many microbatches may be in flight on each stage under the plan's schedule.

    Args:
        plan (`ParallelPlan`): The layout and the name of its schedule.
        step (`StepPlan`): The arrangement.
        caps (`Mapping[tuple[str, int, int], float]`, *optional*):
            Of the schedule `"eager"`: what memory allows, see [`eager_caps`]; [`ahead_caps`] when left out. Fewer than
            1F1B has are raised to those, without which ranks would wait for ever.

    Returns:
        `dict[tuple[str, int, int], float]`: (module, replica, stage) -> microbatches; without the stages whose
        forwards all go first.
    """
    encoders = plan.encoders
    least = {k: cap for k, cap in live_caps(plan, step).items() if not plan.policy.keeps_all(k[0] in encoders)}
    if not plan.policy.fills_memory:
        return least
    allowed = ahead_caps(plan, step) if caps is None else caps
    return {key: max(cap, allowed.get(key, cap)) for key, cap in least.items()}
