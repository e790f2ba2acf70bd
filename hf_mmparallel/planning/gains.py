"""What single changes of settings, hardware or the engine would gain, with the plan as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from ..cost.layers import can_pack
from ..cost.step_planner import StepPlanner
from ..plan import LANGUAGE_MODEL, sync_groups
from ..plan.checkpointing import SELECTIVE
from ..plan.methods import POLICIES
from .answer import Answer, plan_with

DEVICE = ("peak_tflops=2x", "memory_gb_per_s=2x", "link_gb_per_s=2x", "node_link_gb_per_s=2x")
FUSED = "fused_kernels=true"
_AS_FAST = 1e-3  # share of the step below which nothing is gained


@dataclass(frozen=True)
class Gain:
    """A single change, and the step with it."""

    change: str  # as `--what-if` takes it
    step_ms: float
    fits: bool  # into the memory of a rank


def gains_of(answer: Answer) -> list[Gain]:
    """The changes that make the plan's typical step shorter, the largest gain first."""
    before_ms, found = answer.prediction.step_ms, []
    for change in _changes(answer):
        with suppress(ValueError):  # the plan can't have it
            gain = _gain(answer, change)
            if gain.step_ms < (1 - _AS_FAST) * before_ms:
                found.append(gain)
    return sorted(found, key=lambda gain: gain.step_ms)


def _changes(answer: Answer) -> Iterator[str]:
    """Changes of settings, the engine and the hardware that the plan may have and has not."""
    plan, settings, costs = answer.plan, answer.settings, answer.costs
    modules = plan.modules.values()
    if any(module.activation_checkpointing for module in modules):
        yield "recomputed=false"
    if any(module.activation_checkpointing is True for module in modules):
        yield f"recomputed={SELECTIVE}"
    if can_pack(costs.spec) and not costs.packs_rows and plan.modules[LANGUAGE_MODEL].cp_size == 1:
        yield "packing=true"
    stages = [len(replica) for module in modules for replica in module.replicas]
    if max(stages) > 1 or len(plan.modules) > 1:
        # the stages are as they are
        for name, policy in POLICIES.items():
            if name != plan.schedule and policy.vp_size == 1 == POLICIES[plan.schedule].vp_size:
                yield f"schedule={name}"
    if answer.inputs.profile is None:
        if not settings.fused_kernels:
            yield FUSED
        for change in DEVICE:
            if change != DEVICE[-1] or plan.world_size > settings.device.node_size:
                yield change


def _gain(answer: Answer, change: str) -> Gain:
    """The typical batch of the answer, predicted with a change."""
    settings = answer.settings.with_changes(change)
    costs = answer.inputs.costs(settings)
    plan = plan_with(settings, costs.spec, answer.plan)
    groups = sync_groups(costs.spec, plan)
    limit = settings.memory_bytes
    planner = StepPlanner(costs, plan, groups, answer.microbatch_size, answer.arrangement, memory_bytes=limit)
    try:
        found = planner.predict_batch(answer.prediction.sizes)
    except ValueError:  # no microbatch fits
        found = replace(planner, memory_bytes=None).predict_batch(answer.prediction.sizes)
    return Gain(change, found.step_ms, limit is None or found.peak_memory_bytes <= limit)
