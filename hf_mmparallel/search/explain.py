"""Why a plan is as fast as it is, why others are slower, and why there may be none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cost import RankMemory
from ..cost.stage_memory import GIB
from .problem import PlanningProblem, RankedPlan

if TYPE_CHECKING:
    from .candidates import CandidateSpace


def bound_of(problem: PlanningProblem, ranked: RankedPlan) -> str:
    """What the time of a plan is bound by: its busiest stage, bubbles, and how full the fullest rank is."""
    busy, rank = busiest(ranked)
    names = ", ".join(f"`{name}` stage {index}" for name, _, index in ranked.plan.stages_of_rank(rank))
    simulation = ranked.prediction.simulation
    idle = simulation.bubble_fraction
    text = (
        f"The busiest rank, {rank} ({names}), computes {busy:.0%} of the step; ranks wait {idle:.0%} of it on average"
    )
    fullest, memory = fullest_rank(ranked)
    limit = "" if problem.memory_bytes is None else f" of {problem.memory_bytes / GIB:.3g}"
    text += (
        f". The fullest, rank {fullest}, needs {memory.total_gib:.3g}{limit} GiB, most of it {largest_part(memory)}."
    )
    if problem.memory_bytes is not None and memory.total > 0.9 * problem.memory_bytes:
        text += " Memory leaves no room for larger microbatches."
    return text


def busiest(ranked: RankedPlan) -> tuple[float, int]:
    """The share of the step that the busiest rank computes, and the rank in the whole plan."""
    simulation = ranked.prediction.simulation
    busy = {}
    for span in simulation.spans:
        busy[span.rank] = busy.get(span.rank, 0.0) + span.end_ms - span.start_ms
    rank = max(busy, key=lambda own: (busy[own], -own))
    task = next(span.task for span in simulation.spans if span.rank == rank)
    places = {span.task.stage_key for span in simulation.spans if span.rank == rank}
    whole = [r for r in ranked.plan.stage(*task.stage_key).all_ranks if set(ranked.plan.stages_of_rank(r)) == places]
    return busy[rank] / simulation.iteration_ms, whole[0] if whole else rank


def fullest_rank(ranked: RankedPlan) -> tuple[int, RankMemory]:
    """The rank that needs most memory, over the batches."""
    needs = ((rank, memory) for prediction in ranked.predictions for rank, memory in prediction.memory.items())
    return max(needs, key=lambda item: (item[1].total, -item[0]))


def largest_part(memory: RankMemory) -> str:
    """What most of a rank's memory is for."""
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
    }
    return max(parts, key=lambda name: parts[name])


def reason_for(problem: PlanningProblem, best: RankedPlan, other: RankedPlan) -> str:
    """Why another plan is slower than the best, a sentence."""
    slower = other.step_ms / best.step_ms - 1
    work = [sum(plan.prediction.simulation.busy_ms.values()) for plan in (best, other)]
    ranks = [len(plan.prediction.simulation.busy_ms) for plan in (best, other)]
    means = [total / count for total, count in zip(work, ranks, strict=True)]
    idle = [plan.step_ms - mean for plan, mean in zip((best, other), means, strict=True)]
    more_work, more_idle = means[1] - means[0], idle[1] - idle[0]
    if more_work >= more_idle:
        what = f"ranks compute {means[1] / means[0] - 1:.1%} longer"
        again = [name for name, layout in other.candidate.layouts.items() if layout.activation_checkpointing]
        if again:
            what += f", since activations of {', '.join(f'`{name}`' for name in again)} are recomputed"
    else:
        bubbles = [plan.prediction.simulation.bubble_fraction for plan in (best, other)]
        what = f"ranks wait {bubbles[1]:.0%} of the step instead of {bubbles[0]:.0%}"
    return f"{slower:.1%} slower: {what}."


def no_plan_error(problem: PlanningProblem, space: CandidateSpace, least_bytes: float | None = None) -> ValueError:
    """Why there is no plan at all, by how many GiB it fails, and which knob helps."""
    what = f"{problem.num_ranks} x {problem.costs.device.name}"
    if space.leanest is None and least_bytes is None:
        fixed = "; ".join(
            f"{name} {size}={value}" for name, sizes in problem.fixed.items() for size, value in sizes.items()
        )
        return ValueError(
            f"No layout of the model takes {what} with a global batch of {problem.global_batch_size} samples"
            + (f" and the sizes that are set ({fixed})" if fixed else "")
            + ". Numbers of copies divide the global batch, and tensor-parallel sizes the heads: change the number "
            "of ranks, the global batch or the sizes."
        )
    needed = space.least_bytes if least_bytes is None else least_bytes
    limit = problem.memory_bytes or 0.0
    return ValueError(
        f"No plan for {what} fits: the leanest needs about {needed / GIB:.1f} GiB on its fullest rank, "
        f"{(needed - limit) / GIB:.1f} GiB more than the {limit / GIB:.1f} GiB that there are. {_knob(problem, space)}"
    )


def _knob(problem: PlanningProblem, space: CandidateSpace) -> str:
    """What helps: fewer states where these are too large, smaller microbatches where activations are."""
    leanest = space.leanest
    state = 0.0 if leanest is None else max(choice.state_bytes for choice in leanest.choices.values())
    limit = problem.memory_bytes or 0.0
    if state > limit / 2:
        factor = max(2, -(-int(space.least_bytes) // max(1, int(limit))))
        return (
            f"Most of it are weights, gradients and optimizer state: use about {factor * problem.num_ranks} ranks, "
            "freeze more, or train adapters."
        )
    if not all(choice.kind.checkpointing for choice in (leanest.choices.values() if leanest else ())):
        return "Most of it are activations: allow activation checkpointing, or set a smaller microbatch size."
    return "Most of it are activations: set a smaller microbatch size, use more ranks, or shorten the samples."
