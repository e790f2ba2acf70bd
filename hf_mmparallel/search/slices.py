"""Slices of candidates, a part of their replicas that stands for all of them, and the state of their ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from ..cost.memory import state_per_rank
from ..cost.sharded_passes import REDUCES_IN_PASSES
from ..cost.stage_memory import stage_memories
from .problem import Candidate, PlanningProblem

SMALL_STEP = 1024  # tasks up to which a step is simulated without a slice


def num_parts(candidate: Candidate) -> int:
    """Number of equal parts that the replicas of a candidate can be split into; one if their passes communicate."""
    if any(layout.zero_stage >= REDUCES_IN_PASSES for layout in candidate.layouts.values()):
        return 1
    return math.gcd(*(layout.dp_size for layout in candidate.layouts.values()))


def state_fits(problem: PlanningProblem, candidate: Candidate) -> bool:
    """Checks that weights, gradients and optimizer state fit into each rank's memory."""
    if not host_fits(problem, candidate):
        return False
    if problem.memory_bytes is None:
        return True
    is_divided = any(layout.zero_stage for layout in candidate.layouts.values())
    small = candidate if is_divided else slice_of(candidate, num_parts(candidate))
    return state_bytes(problem, small) <= problem.memory_bytes


def host_fits(problem: PlanningProblem, candidate: Candidate) -> bool:
    """Checks that each node has room for what is in host memory; on an unknown host only what the user asks for."""
    storages = {name: layout.storage for name, layout in candidate.layouts.items()}
    if not any(own.offload_optimizer or own.offload_params for own in storages.values()):
        return True
    if problem.host_bytes is None:
        return all(own == problem.storage_of(name) for name, own in storages.items())
    plan, nodes = candidate.plan(problem.spec), defaultdict[int, float](float)
    for rank, state in state_per_rank(plan, stage_memories(problem.costs, plan)).items():
        nodes[rank // problem.costs.device.node_size] += state.host
    return max(nodes.values()) <= problem.host_bytes


def state_bytes(problem: PlanningProblem, candidate: Candidate) -> float:
    """Weights, gradients and optimizer state on the rank with most of them."""
    plan = candidate.plan(problem.spec)
    states = state_per_rank(plan, stage_memories(problem.costs, plan))
    return max(state.total for state in states.values())


def slice_of(candidate: Candidate, parts: int) -> Candidate:
    """The candidate with 1/`parts` of its replicas."""
    few = {name: replace(layout, dp_size=layout.dp_size // parts) for name, layout in candidate.layouts.items()}
    return replace(candidate, layouts=few)
