"""What the memory of a rank allows: how large microbatches may be, how many of them may be in flight."""

from __future__ import annotations

from ..plan import LANGUAGE_MODEL, ParallelPlan, SampleSizes, StepPlan
from ..schedule import GradientFlow, ahead_caps, live_caps, stage_depths
from ..schedule.actions import StageKey
from .layers import CostModel
from .memory import GIB, StageMemory, largest_microbatches, stage_memories, state_per_rank


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
    share = {name: sizes.tokens[name].sum() / module.dp_size for name, module in plan.modules.items()}
    needed = dict.fromkeys(free, 0.0)
    for key, memory in memories.items():
        for rank in plan.stage(*key).all_ranks:
            needed[rank] += memory.bytes_per_token * in_flight[key] * share[key[0]]
    result = {}
    for name, module in plan.modules.items():
        if share[name]:
            ranks = {rank for _, _, stage in module.stages() for rank in stage.all_ranks}
            result[name] = int(min(free[rank] / needed[rank] for rank in ranks) * share[name])
    return result


def free_bytes(plan: ParallelPlan, memories: dict[StageKey, StageMemory], memory_bytes: float) -> dict[int, float]:
    """Rank -> what is left of its memory for activations. Raises `ValueError` where nothing is."""
    result = {rank: memory_bytes - state.total for rank, state in state_per_rank(plan, memories).items()}
    fullest = min(result, key=lambda rank: (result[rank], rank))
    if result[fullest] <= 0:
        names = list(dict.fromkeys(name for name, _, _ in plan.stages_of_rank(fullest)))
        raise ValueError(
            f"Rank {fullest} ({', '.join(names)}) needs {(memory_bytes - result[fullest]) / GIB:.3g} GiB for weights, "
            f"gradients and optimizer state alone, of {memory_bytes / GIB:.3g} GiB of memory. Raise `pp_size` or "
            f"`tp_size` of `{names[-1]}`, freeze more of it, or allow more memory."
        )
    return result


def steady_in_flight(plan: ParallelPlan) -> dict[StageKey, float]:
    """
    (module, replica, stage) -> microbatches in flight in the steady state: 1F1B's depth, one more in encoders, whose
    samples may be taken a microbatch later; all under GPipe; and only the running one where no backward follows.
    """
    flow = GradientFlow(plan)
    depths = stage_depths(plan)
    if plan.schedule == "gpipe":
        depths = dict.fromkeys(depths, plan.num_microbatches)
    elif plan.edges:
        sources = {edge.source for edge in plan.edges}
        depths = {key: depth + (key[0] in sources) for key, depth in depths.items()}
    return {key: float(depth) if flow.has_backward(*key) else 1.0 for key, depth in depths.items()}


def eager_caps(
    costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes, memory_bytes: float | None = None
) -> dict[StageKey, float]:
    """
    How many microbatches may be in flight on each stage under the schedule `"eager"` (Entrain, section 4.5.3): those
    of 1F1B, and more as far as the memory of a rank goes. What 1F1B leaves of it goes to the encoders first, whose
    forwards make the features that wait for nobody, then to the language model.

    Args:
        costs (`CostModel`): What layers keep.
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement.
        sizes (`SampleSizes`): Tokens of each slot of the step.
        memory_bytes (`float`, *optional*): Memory of a rank; see [`ahead_caps`] for when it is not known.

    Returns:
        `dict[tuple[str, int, int], float]`: (module, replica, stage) -> microbatches, for [`build_program`].

    Raises:
        `ValueError`: If weights, gradients and optimizer state alone are more than the memory of a rank.
    """
    if memory_bytes is None:
        return ahead_caps(plan, step)
    memories = stage_memories(costs, plan)
    free = free_bytes(plan, memories, memory_bytes)
    flow = GradientFlow(plan)
    caps = live_caps(plan, step)
    largest = largest_microbatches(step, sizes)
    needed = {key: memory.bytes_per_token * largest[key[0], key[1]] for key, memory in memories.items()}
    kept = [key for key in caps if flow.has_backward(*key) and needed[key]]
    for key in kept:
        for rank in plan.stage(*key).all_ranks:
            free[rank] -= caps[key] * needed[key]
    for key in sorted(kept, key=lambda key: (key[0] == LANGUAGE_MODEL, key)):
        ranks = plan.stage(*key).all_ranks
        all_of_them = len(step.microbatches[key[0]][key[1]])
        more = min(min(free[rank] for rank in ranks) // needed[key], all_of_them - caps[key])
        if more > 0:
            caps[key] += more
            for rank in ranks:
                free[rank] -= more * needed[key]
    return caps
