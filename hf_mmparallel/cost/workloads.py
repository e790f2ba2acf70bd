"""What the samples of a global batch cost in each module, and how many tokens a microbatch may have."""

from __future__ import annotations

import numpy as np

from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, SampleSizes, Stage, Workloads
from ..schedule import GradientFlow, stage_depths
from ..schedule.actions import StageKey
from .analytic import backward_ratio, stage_flops
from .hardware import Hardware
from .memory import GIB, StageMemory, stage_memories, state_per_rank


def batch_workloads(
    spec: ModelSpec,
    plan: ParallelPlan,
    sizes: SampleSizes,
    device: Hardware,
    max_tokens: int | None = None,
    memory_bytes: float | None = None,
) -> Workloads:
    """
    What a global batch is arranged by, from the operations of each sample; see [`stage_flops`].

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        plan (`ParallelPlan`): The layout.
        sizes (`SampleSizes`): Tokens of the samples.
        device (`Hardware`): What each rank is.
        max_tokens (`int`, *optional*): Most tokens of a microbatch of the language model.
        memory_bytes (`float`, *optional*): Memory of a rank; it limits the tokens of a microbatch of every module.

    Returns:
        `Workloads`: With the tighter of the two limits. Times are rounded to float32, so that ranks whose processors
        round differently still arrange alike.

    Raises:
        `ValueError`: If weights, gradients and optimizer state alone are more than the memory of a rank.
    """
    flow = GradientFlow(plan)
    forward_ms, ratios = {}, {}
    for name, module in plan.modules.items():
        whole = Stage((0, spec.modules[name].num_layers), ((0,),))
        per_token, per_square = stage_flops(spec, name, whole)
        flops = per_token * sizes.tokens[name] + per_square * sizes.squares[name]
        forward_ms[name] = (flops / device.flops_per_ms).astype(np.float32).astype(float)
        flops_of = [stage_flops(spec, name, stage)[0] for stage in module.replicas[0]]
        ratio_of = [backward_ratio(spec, plan, flow, (name, 0, index)) for index in range(len(flops_of))]
        ratios[name] = float(np.dot(flops_of, ratio_of) / max(1.0, sum(flops_of)))
    limits = {} if memory_bytes is None else fitting_tokens(spec, plan, sizes, memory_bytes)
    if max_tokens is not None:
        limits[LANGUAGE_MODEL] = min(max_tokens, limits.get(LANGUAGE_MODEL, max_tokens))
    return Workloads(forward_ms, ratios, dict(sizes.tokens), limits)


def fitting_tokens(spec: ModelSpec, plan: ParallelPlan, sizes: SampleSizes, memory_bytes: float) -> dict[str, int]:
    """
    The most tokens of a microbatch of each module for which the microbatches that 1F1B keeps in flight fit beside
    weights, gradients and optimizer state. Modules that share a rank share its memory by what they have to do.

    Args:
        spec (`ModelSpec`): The model, with what is frozen.
        plan (`ParallelPlan`): The layout.
        sizes (`SampleSizes`): Tokens of the samples.
        memory_bytes (`float`): Memory of a rank.

    Returns:
        `dict[str, int]`: Module -> tokens; without the modules that no sample has tokens for.

    Raises:
        `ValueError`: If the state alone does not fit a rank.
    """
    memories = stage_memories(spec, plan)
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
            f"Rank {fullest} ({', '.join(names)}) needs {(memory_bytes - result[fullest]) / GIB:.1f} GiB for weights, "
            f"gradients and optimizer state alone, of {memory_bytes / GIB:.1f} GiB of memory. Raise `pp_size` or "
            f"`tp_size` of `{names[-1]}`, or freeze more of it."
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
