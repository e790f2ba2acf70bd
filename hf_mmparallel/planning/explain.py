"""Explanations: what bounds the time of a plan, why other plans are slower, and why there is no plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..cost import RankMemory
from ..cost.stage_memory import gib_text
from ..cost.step_planner import Prediction
from .candidates import CandidateSpace
from .problem import PlanningProblem, RankedPlan
from .simulations import AS_FAST, SURE_RATIO, cautious_ms, large_samples, shard_size

_FULL_MEMORY_FRACTION = 0.9  # share of the memory limit above which a plan is called full
_ONE_PERCENT_FRACTION = 0.005  # share that rounds to 1 %


def bound_of(predictions: Sequence[Prediction], memory_bytes: float | None) -> str:
    """Says what bounds a plan: the memory of the fullest rank, its busiest stage, and bubbles."""
    fullest, memory = fullest_rank(predictions)
    limit = "" if memory_bytes is None else f" of {gib_text(memory_bytes)}"
    text = f"{gib_text(memory.total)}{limit} GiB on the fullest rank, {fullest}, most of it {largest_part(memory)}. "
    if memory_bytes is not None and memory.total > memory_bytes:
        text += _large_samples_text(predictions)
    elif memory_bytes is not None and memory.total > _FULL_MEMORY_FRACTION * memory_bytes:
        text += "It leaves no room for larger microbatches. "
    prediction = Prediction.typical(predictions)
    busy, rank = busiest(prediction)
    idle, unlike = prediction.timeline.bubble_fraction, prediction.timeline.unlike_fraction
    text += (
        f"The busiest rank, {rank} ({_stages_text(prediction, rank)}), computes {busy:.0%} of the step; ranks wait "
        f"{idle:.0%} of it on average"
    )
    if unlike >= _ONE_PERCENT_FRACTION:
        text += f", {unlike:.0%} within tasks, for the largest of unlike replicas"
    return f"{text}."


def _stages_text(prediction: Prediction, rank: int) -> str:
    """The stages of a rank: `vision stage 0, language_model stages 0, 4`."""
    stages: dict[str, list[str]] = {}
    for name, _, index in prediction.plan.stages_of_rank(rank):
        stages.setdefault(name, []).append(str(index))
    return ", ".join(f"{name} stage{'s' * (len(own) > 1)} {', '.join(own)}" for name, own in stages.items())


def _large_samples_text(predictions: Sequence[Prediction]) -> str:
    """Describes samples that exceed the microbatch limit, and how they are handled."""
    samples = [sample for prediction in predictions for sample in large_samples(prediction.planned)]
    if not samples:
        return ""
    name, _, tokens, limit = max(samples, key=lambda sample: sample[2] / max(sample[3], 1))
    return (
        f"That is for samples of up to {tokens:,} tokens in `{name}`, where a microbatch may have {limit:,}: each "
        "gets a microbatch of its own, and training warns of them. "
    )


def busiest(prediction: Prediction) -> tuple[float, int]:
    """The share of the step that the busiest rank computes, and the rank."""
    timeline = prediction.timeline
    rank = max(timeline.busy_ms, key=lambda rank: (timeline.busy_ms[rank], -rank))
    return timeline.busy_ms[rank] / timeline.iteration_ms, rank


def fullest_rank(predictions: Sequence[Prediction]) -> tuple[int, RankMemory]:
    """The rank with the highest peak memory over all batches."""
    needs = ((rank, memory) for prediction in predictions for rank, memory in prediction.memory.items())
    return max(needs, key=lambda item: (item[1].total, -item[0]))


def largest_part(memory: RankMemory) -> str:
    """The largest part of a rank's memory."""
    return max(memory.parts, key=memory.parts.__getitem__)


def slower_text(best: RankedPlan, other: RankedPlan) -> str:
    """How much slower a plan is than the best one, or that it is as fast, by the rule of [`in_order`]."""
    slower = other.step_ms / best.step_ms - 1
    if abs(slower) < AS_FAST - 1:
        return "as fast"
    return f"{slower:.1%} slower" if slower > 0 else f"{-slower:.1%} faster"


def reason_for(best: RankedPlan, other: RankedPlan) -> str:
    """What speaks against a plan beside the best one."""
    if cautious_ms(other) <= AS_FAST * cautious_ms(best):
        groups = [shard_size(plan.candidate) for plan in (best, other)]
        if groups[1] > groups[0]:
            return f"copies are divided among {groups[1]:,} ranks instead of {groups[0]:,}"
        needs = [gib_text(plan.peak_memory_bytes) for plan in (best, other)]
        if needs[0] == needs[1]:
            return f"as much memory on its fullest rank, {needs[0]} GiB"
        return f"its fullest rank needs {needs[1]} GiB instead of {needs[0]}"
    if other.step_ms < best.step_ms:
        return (
            f"`{other.candidate.schedule}` has to be {SURE_RATIO - 1:.0%} faster, since its tasks take a little "
            "longer than predicted"
        )
    computes, waits = zip(*(_mean_busy_and_idle_ms(plan) for plan in (best, other)), strict=True)
    if computes[1] - computes[0] >= waits[1] - waits[0]:
        what = f"ranks compute {computes[1] / computes[0] - 1:.1%} longer"
        recomputed = [
            f"`{name}`"
            for name, layout in other.candidate.layouts.items()
            if layout.activation_checkpointing and not best.candidate.layouts[name].activation_checkpointing
        ]
        if recomputed:
            what += f"; activations of {', '.join(recomputed)} are recomputed"
    else:
        share = [idle / plan.step_ms for idle, plan in zip(waits, (best, other), strict=True)]
        what = f"ranks wait {share[1]:.1%} of the step instead of {share[0]:.1%}"
    return what


def _mean_busy_and_idle_ms(plan: RankedPlan) -> tuple[float, float]:
    """Compute and idle time of a rank in a step, averaged over ranks and batches."""
    timelines = [prediction.timeline for prediction in plan.predictions]
    busy = [sum(timeline.busy_ms.values()) / timeline.num_ranks for timeline in timelines]
    mean = sum(busy) / len(busy)
    return mean, plan.step_ms - mean


def least_memory_bytes(problem: PlanningProblem) -> float | None:
    """Estimated memory of the smallest layout on its fullest rank; `None` if no layout uses all ranks."""
    unlimited = replace(problem, memory_bytes=None)
    return min((candidate.memory_bytes(unlimited) for candidate in CandidateSpace(unlimited)), default=None)


def no_plan_error(problem: PlanningProblem) -> ValueError:
    """The error for a problem without a plan: by how many GiB it fails, and a remedy."""
    what = f"{problem.num_ranks} x {problem.costs.device.name}"
    smallest = least_memory_bytes(problem)
    if smallest is None or problem.memory_bytes is None:
        fixed = "; ".join(
            f"{name} {size}={value}" for name, sizes in problem.fixed.items() for size, value in sizes.items()
        )
        return ValueError(
            f"No layout of the model uses {what} with a global batch of {problem.global_batch_size} samples"
            + (f" and the fixed sizes ({fixed})" if fixed else "")
            + ". Numbers of replicas divide the global batch, and tensor-parallel sizes the heads: change the number "
            "of ranks, the global batch or the sizes."
        )
    missing = smallest - problem.memory_bytes
    if missing <= 0:  # an average microbatch fits
        return ValueError(
            f"No plan for {what} fits every batch: the smallest layout needs about {gib_text(smallest)} of "
            f"{gib_text(problem.memory_bytes)} GiB for an average microbatch, but more than that with the largest "
            "sample and the transient memory of its task. Leave the microbatch size open or make it smaller, shorten "
            "the samples, use more ranks, or devices with more memory."
        )
    return ValueError(
        f"No plan for {what} fits: the smallest layout needs about {gib_text(smallest)} GiB on its fullest rank, "
        f"{gib_text(missing)} GiB more than the {gib_text(problem.memory_bytes)} GiB of a device. "
        f"{_remedy(problem)}"
    )


def _remedy(problem: PlanningProblem) -> str:
    """The first of a few changes that make a plan possible."""
    frozen = {name: module.with_frozen(True) for name, module in problem.spec.modules.items()}
    changes: list[tuple[str, PlanningProblem]] = []
    if not all(problem.checkpointing.values()):
        changes.append(("allow activation checkpointing", replace(problem, checkpointing={})))
    if problem.microbatch_size is not None:
        changes.append(("leave the microbatch size open", replace(problem, microbatch_size=None)))
    if problem.fixed:
        changes.append(("leave the sizes of modules open", replace(problem, fixed={})))
    more = [problem.num_ranks << power for power in range(1, 6)]
    changes += [(f"use {count} ranks", replace(problem, num_ranks=count)) for count in more]
    for name, module in frozen.items():
        spec = replace(problem.spec, modules={**problem.spec.modules, name: module})
        changes.append((f"freeze `{name}`, or train adapters", replace(problem, costs=problem.costs.with_spec(spec))))
    for words, changed in changes:
        if next(iter(CandidateSpace(changed)), None) is not None:
            return f"It is expected to fit if you {words}."
    return "Shorten the samples, or use devices with more memory."
