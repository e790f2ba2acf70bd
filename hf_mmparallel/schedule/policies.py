"""What tells schedules apart: which tasks a rank puts first, and how many microbatches a stage keeps in flight."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import numpy as np

from ..plan import ParallelPlan, StepPlan, encoders_of
from .actions import StageKey


def task_phases(plan: ParallelPlan) -> dict[tuple[str, str], int]:
    """
    In which phase of a step each kind of task runs. A rank starts no task of a phase while it has one of an earlier
    phase left.

    Under GPipe all forwards are before all backwards. Under `"encoders_first"` all encoder forwards come first, then
    all of the language model, then all encoder backwards, as in DIP (Entrain, section 4.7.2). Under 1F1B there is one
    phase. What a task waits for is never in a later phase, so that phases can't deadlock.

    Args:
        plan (`ParallelPlan`): The layout and the name of its schedule.

    Returns:
        `dict[tuple[str, str], int]`: (module, `"fwd"` or `"bwd"`) -> phase.
    """
    tasks = [(name, kind) for name in plan.modules for kind in ("fwd", "bwd")]
    if plan.schedule == "gpipe":
        return {(name, kind): int(kind == "bwd") for name, kind in tasks}
    if plan.schedule == "encoders_first":
        encoders = encoders_of(plan)
        return {(name, kind): 1 if name not in encoders else 0 if kind == "fwd" else 2 for name, kind in tasks}
    return dict.fromkeys(tasks, 0)


def may_alternate(plan: ParallelPlan) -> bool:
    """Whether the order that waits for a forward after each backward is tried: where both kinds are in one phase."""
    return plan.schedule in ("1f1b", "eager")


def keeps_all(schedule: str, is_encoder: bool) -> bool:
    """Whether the stages of a module keep all microbatches of a step in flight, since their forwards all go first."""
    return schedule == "gpipe" or (schedule == "encoders_first" and is_encoder)


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
    for name in reversed(list(plan.modules)):
        targets = [edge.target for edge in plan.edges if edge.source == name]
        for replica in plan.modules[name].with_stages:
            stages = plan.modules[name].replicas[replica]
            indices = {slot: i for i, slots in enumerate(step.microbatches[name][replica]) for slot in slots}
            behind = 0
            for target in targets:
                taken = step.takers(name, replica, target)
                if not taken:  # nobody waits for what it makes
                    continue
                depth = _turns_in_flight(step, target, np.unique(step.locations[target][0][list(taken)]), caps)
                own = np.fromiter((indices[slot] for slot in taken), np.int64, len(taken))
                behind = max(behind, _most_ahead(own, np.fromiter(taken.values(), np.int64, len(taken)), depth))
            for index in range(len(stages)):
                caps[name, replica, index] = len(stages) - index + behind
    return caps


def _turns_in_flight(step: StepPlan, target: str, fed: np.ndarray, caps: Mapping[StageKey, float]) -> int:
    """The most turns that some replicas of `target` have in flight at once."""
    counts = {taker: len(step.microbatches[target][taker]) for taker in fed.tolist()}
    turns = max(counts.values())
    return max(ceil(caps[target, taker, 0] * turns / count) for taker, count in counts.items())


def _most_ahead(indices: np.ndarray, takers: np.ndarray, depth: int) -> int:
    """
    The most microbatches that a module must be ahead of `depth` microbatches behind it, at any time.

    Args:
        indices (`np.ndarray`): int64 `[num_slots]`: for each of its samples, the microbatch that it is in.
        takers (`np.ndarray`): int64 `[num_slots]`: the turn in which it is taken.
        depth (`int`): Turns in flight behind it.
    """
    indices = np.unique(indices, return_inverse=True)[1]  # microbatches without samples have no tasks
    wanted = np.zeros(takers.max() + 1, dtype=np.int64)  # how many microbatches each taker waits for
    np.maximum.at(wanted, takers, indices + 1)
    wanted = np.maximum.accumulate(wanted)
    last = np.zeros(indices.max() + 1, dtype=np.int64)  # the taker that the last gradient of each comes from
    np.maximum.at(last, indices, takers)
    first = np.arange(len(wanted))
    done = np.searchsorted(np.sort(last), first)
    ahead = wanted[np.minimum(first + depth - 1, len(wanted) - 1)] - done
    return max(depth, int(ahead.max()))


def ahead_caps(plan: ParallelPlan, step: StepPlan) -> dict[StageKey, float]:
    """
    The caps of the schedule `"eager"` where no limit of memory is known: those of 1F1B, two more in encoders.

    With the sizes of the published datasets that gives most of what unlimited memory gives, with a fifth more of it
    rather than nearly twice as much. More in the language model gives nothing once encoders have these.

    Args:
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.
    """
    encoders = encoders_of(plan)
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
    encoders = encoders_of(plan)
    least = {k: cap for k, cap in live_caps(plan, step).items() if not keeps_all(plan.schedule, k[0] in encoders)}
    if plan.schedule != "eager":
        return least
    allowed = ahead_caps(plan, step) if caps is None else caps
    return {key: max(cap, allowed.get(key, cap)) for key, cap in least.items()}
