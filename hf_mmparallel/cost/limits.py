"""What the memory of a rank allows: how large microbatches may be, how many of them may be in flight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, SampleSizes, StepPlan
from ..schedule import GradientFlow, in_flight_1f1b, in_flight_eager, stage_depths
from ..schedule.actions import StageKey
from .devices import Hardware
from .kept import grouped_copies
from .layers import CostModel
from .memory import StepUse, sample_features, state_per_rank
from .row_sizes import RowLayout
from .stage_memory import GIB, StageMemory, stage_memories

MEMORY_SHARE = 0.9
"""
Of a device's memory, what the tensors of a plan may fill. The rest is the only allowance for what predictions leave
out: what a caching allocator reserves beyond its tensors (sizes rounded up, free blocks that nothing fits), and what
CUDA and the workspaces of its libraries hold.
"""


def usable_bytes(device: Hardware, limit_gib: float | None = None) -> float | None:
    """
    Memory of a rank that a plan and its microbatches have to fit, wherever that is asked.

    Args:
        device (`Hardware`): What each rank is.
        limit_gib (`float`, *optional*): What the user allows, in GiB; by default 90 % of the device's memory.

    Returns:
        `float` or `None`: Bytes; `None` where the device's memory is not known and nothing is set.
    """
    if limit_gib is not None:
        return GIB * limit_gib
    return None if device.memory_gib is None else MEMORY_SHARE * GIB * device.memory_gib


def fitting_tokens(costs: CostModel, plan: ParallelPlan, sizes: SampleSizes, memory_bytes: float) -> dict[str, int]:
    """
    The most tokens of a microbatch of each module for which the microbatches that 1F1B keeps in flight fit beside
    weights, gradients and optimizer state. Modules that share a rank share its memory by what they have to do.

    Args:
        costs (`CostModel`): What layers keep.
        plan (`ParallelPlan`): The layout.
        sizes (`SampleSizes`): Tokens of the samples.
        memory_bytes (`float`): Memory of a rank.

    Returns:
        `dict[str, int]`: Module -> tokens; without the modules that no sample has tokens for.

    Raises:
        `ValueError`: If the state alone does not fit a rank.
    """
    memories = stage_memories(costs, plan)
    free = free_bytes(plan, memories, memory_bytes)
    in_flight = steady_in_flight(plan)
    rates = _Rates(costs, plan, sizes)
    needed, cases = dict.fromkeys(free, 0.0), {rank: [np.zeros((1, 2))] for rank in free}
    for key, memory in memories.items():
        kept, fixed, running = rates.of_stage(key, memory, in_flight[key])
        for rank in plan.stage(*key).all_ranks:
            needed[rank] += kept
            free[rank] -= fixed
            cases[rank].append(running)
    # Of what a copy of a module has to do, this part is a microbatch that fits each rank.
    parts = {}
    _check_room(plan, free, memory_bytes)
    for rank, left in free.items():
        growing, constant = np.concatenate(cases[rank]).T
        slopes = needed[rank] + growing
        room = np.maximum(left - constant, 0.0)
        parts[rank] = float(np.divide(room, slopes, out=np.full_like(room, np.inf), where=slopes > 0).min())
    result = {}
    for name, module in plan.modules.items():
        if rates.share[name]:
            ranks = {rank for _, _, stage in module.stages() for rank in stage.all_ranks}
            limit = int(min(min(parts[rank] for rank in ranks), 1e18) * rates.share[name])
            block = module.context.block * module.cp_size if module.cp_size > 1 else 1
            result[name] = limit - limit % block if limit >= block else limit  # rows of ranks have whole blocks
    return result


def _check_room(plan: ParallelPlan, free: dict[int, float], memory_bytes: float) -> None:
    """Raises `ValueError` if what stays whatever the size of a microbatch leaves a rank no memory for one."""
    fullest = min(free, key=lambda rank: (free[rank], rank))
    if free[fullest] <= 0:
        names = ", ".join(dict.fromkeys(name for name, _, _ in plan.stages_of_rank(fullest)))
        remedy = (
            "Use fewer samples a step or more memory."
            if plan.policy.is_one_phase
            else f'`schedule="{plan.schedule}"` keeps the activations of all microbatches of a step: use `"1f1b"`, or '
            "fewer samples a step."
        )
        raise ValueError(
            f"Rank {fullest} ({names}) needs {(memory_bytes - free[fullest]) / GIB:.3g} GiB however small "
            f"microbatches are, of {memory_bytes / GIB:.3g} GiB of memory. {remedy}"
        )


class _Rates:
    """What stages need for a microbatch that is a part of all that a copy of each module has to do."""

    def __init__(self, costs: CostModel, plan: ParallelPlan, sizes: SampleSizes):
        self.plan = plan
        self.share = {name: sizes.tokens[name].sum() / module.dp_size for name, module in plan.modules.items()}
        self.squares = {
            name: _stored_pairs(costs, plan, sizes, name) / module.dp_size for name, module in plan.modules.items()
        }
        self.features = {name: float(sample_features(costs, sizes, name).sum()) for name in costs.spec.encoders}

    def of_stage(self, key: StageKey, memory: StageMemory, in_flight: float) -> tuple[float, float, NDArray]:
        """
        Bytes that grow with the microbatch, bytes whatever its size, and for each case of what runs `[cases, 2]` both
        of what it holds besides.
        """
        name, replica, stage = key
        grown = np.array([self.squares[name], self.share[name]]) / memory.num_rows
        kept = memory.kept.sum(axis=0)
        growing, fixed = in_flight * float(kept[:2] @ grown), in_flight * float(kept[2])
        fixed += memory.input_bytes * self.share[name]
        for edge in self.plan.edges:
            if edge.target == name and stage in self.plan.edge_stages(edge, replica) and edge.source in self.features:
                copies = self.plan.modules[name].dp_size * memory.num_rows
                growing += in_flight * self.features[edge.source] / copies
        if name in self.features and memory.hands_on_only:
            fixed += self.features[name] / self.plan.modules[name].dp_size
        if in_flight > 1 and self.plan.policy.keeps_all(name in self.features):
            growing, fixed = 0.0, fixed + growing / in_flight  # all of the step stays, however it is cut
        return growing, fixed, np.stack([memory.extras[:, :2] @ grown, memory.extras[:, 2]], axis=1)


def _stored_pairs(costs: CostModel, plan: ParallelPlan, sizes: SampleSizes, name: str) -> float:
    """Pairs of tokens that all samples store, and values of keys that are repeated for them, see [`held_sizes`]."""
    tokens, module = sizes.tokens[name], plan.modules[name]
    are_even = np.full(len(tokens), len(np.unique(tokens)) <= 1)  # then no row of a microbatch is padded
    layout = replace(RowLayout.of(costs, name, module), block=1)
    pairs = layout.sizes(np.ones_like(tokens), tokens, sizes.squares[name], tokens, are_even)[:, 2]
    copies = grouped_copies(costs.spec.modules[name], costs.spec.uses.get((name, 0), ()), module.tp_size)
    return float(pairs.sum() + copies * tokens[pairs > 0].sum())


def free_bytes(plan: ParallelPlan, memories: dict[StageKey, StageMemory], memory_bytes: float) -> dict[int, float]:
    """Rank -> what is left of its memory for activations. Raises `ValueError` where nothing is."""
    states = state_per_rank(plan, memories)
    least = {rank: state.total for rank, state in states.items()}
    fullest = max(least, key=lambda rank: (least[rank], -rank))
    if least[fullest] >= memory_bytes:
        names = list(dict.fromkeys(name for name, _, _ in plan.stages_of_rank(fullest)))
        raise ValueError(
            f"Rank {fullest} ({', '.join(names)}) needs {least[fullest] / GIB:.3g} GiB for weights, gradients and "
            f"optimizer state alone, of {memory_bytes / GIB:.3g} GiB of memory. Raise `pp_size` or `tp_size` of "
            f"`{names[-1]}`, freeze more of it, or allow more memory."
        )
    return {rank: memory_bytes - state.total for rank, state in states.items()}


def steady_in_flight(plan: ParallelPlan) -> dict[StageKey, float]:
    """
    (module, replica, stage) -> microbatches in flight in the steady state: 1F1B's depth, one more in encoders, whose
    samples may be taken a microbatch later; all where all forwards go first; and only the running one where no
    backward follows.
    """
    flow = GradientFlow(plan)
    encoders = plan.encoders
    depths = {
        key: plan.num_microbatches if plan.policy.keeps_all(key[0] in encoders) else depth + (key[0] in encoders)
        for key, depth in stage_depths(plan).items()
    }
    return {key: float(depth) if flow.has_backward(*key) else 1.0 for key, depth in depths.items()}


def eager_caps(
    costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes, memory_bytes: float | None = None
) -> dict[StageKey, float]:
    """
    How many microbatches may be in flight on each stage under the schedule `"eager"` (Entrain, section 4.5.3): those
    of 1F1B, and more as far as the memory of a rank goes. What 1F1B leaves of it goes to the encoders first, whose
    forwards make the features that wait for nobody, then to the language model, then to generators.

    Args:
        costs (`CostModel`): What layers keep.
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.
        sizes (`SampleSizes`): Tokens of each slot of the step.
        memory_bytes (`float`, *optional*): Memory of a rank; see [`in_flight_eager`] for when it is not known.

    Returns:
        `dict[tuple[str, int, int], float]`: (module, replica, stage) -> microbatches, for [`build_program`].

    Raises:
        `ValueError`: If weights, gradients and optimizer state alone are more than the memory of a rank.
    """
    if memory_bytes is None:
        return in_flight_eager(plan, step)
    memories = stage_memories(costs, plan)
    free = free_bytes(plan, memories, memory_bytes)
    flow = GradientFlow(plan)
    caps = in_flight_1f1b(plan, step)
    use = StepUse(costs, plan, step, sizes)
    needed, running = {}, dict.fromkeys(free, 0.0)
    for key, memory in memories.items():
        fixed, needed[key], extra = use.of_stage(key, memory)
        for rank in plan.stage(*key).all_ranks:
            free[rank] -= fixed
            running[rank] = max(running[rank], extra)
    free = {rank: left - running[rank] for rank, left in free.items()}
    kept = [key for key in caps if flow.has_backward(*key) and needed[key]]
    for key in kept:
        for rank in plan.stage(*key).all_ranks:
            free[rank] -= caps[key] * needed[key]
    modules = list(plan.modules)
    for key in sorted(kept, key=lambda key: (modules.index(key[0]), key)):
        ranks = plan.stage(*key).all_ranks
        all_of_them = len(step.microbatches[key[0]][key[1]])
        more = min(min(free[rank] for rank in ranks) // needed[key], all_of_them - caps[key])
        if more > 0:
            caps[key] += more
            for rank in ranks:
                free[rank] -= more * needed[key]
    return caps
