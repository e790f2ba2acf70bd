"""Limits by the memory of a rank: tokens of a microbatch, and microbatches in flight."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .._portable import weighted_sum
from ..arrange.microbatch_counts import with_fastest_counts
from ..plan import LANGUAGE_MODEL, ParallelPlan, SampleSizes, StageKey, StepPlan, Workloads
from ..schedule import GradientFlow, in_flight_1f1b, in_flight_eager, stage_depths
from ..schedule.in_flight import further_in_flight
from .activations import grouped_copies
from .devices import Hardware
from .layer_table import layer_table
from .layers import CostModel
from .memory import sample_features, stage_uses, state_per_rank
from .row_sizes import RowLayout
from .stage_memory import GIB, StageMemory, stage_memories

# Share of a device's memory that the tensors of a plan may fill. The rest is the only allowance for what predictions
# leave out: memory that the caching allocator reserves beyond its tensors (rounding, fragmentation), the CUDA context
# and the workspaces of its libraries.
MEMORY_SHARE = 0.9


def usable_bytes(device: Hardware, limit_gib: float | None = None) -> float | None:
    """Bytes of a rank that plans and microbatches must fit, 90 % of its memory by default; `None` if it is unknown."""
    if limit_gib is not None:
        return GIB * limit_gib
    return None if device.memory_gib is None else MEMORY_SHARE * GIB * device.memory_gib


def fitting_tokens(costs: CostModel, plan: ParallelPlan, sizes: SampleSizes, memory_bytes: float) -> dict[str, int]:
    """
    Maximum tokens of a microbatch of each module such that the microbatches in flight under 1F1B fit besides weights,
    gradients and optimizer state; modules without tokens in any sample are left out.

    Raises:
        `ValueError`: If the state alone does not fit a rank.
    """
    memories = stage_memories(costs, plan)
    free = free_bytes(plan, memories, memory_bytes)
    demands = _MemoryDemands(costs, plan, sizes)
    shares = _fitting_shares(plan, demands, memories, free)
    _check_free(plan, {rank: num_bytes for rank, (num_bytes, _) in shares.items()}, memory_bytes)
    limits = _limits(plan, demands, {rank: share for rank, (_, share) in shares.items()})
    # of a head whose loss is in chunks above so many tokens
    most = min((memory.max_tokens * memory.cp_size for memory in memories.values()), default=np.inf)
    if limits.get(LANGUAGE_MODEL, 0) > most:
        longer = {key: memory.at(np.inf) for key, memory in memories.items()}
        shares = _fitting_shares(plan, demands, longer, free)
        in_chunks = _limits(plan, demands, {rank: share for rank, (_, share) in shares.items()})
        if in_chunks[LANGUAGE_MODEL] > most:
            limits = in_chunks
        else:
            limits = {name: int(limit * most / limits[LANGUAGE_MODEL]) for name, limit in limits.items()}
    return {name: _in_blocks(plan, name, limit) for name, limit in limits.items()}


def _fitting_shares(
    plan: ParallelPlan, demands: _MemoryDemands, memories: dict[StageKey, StageMemory], free: dict[int, float]
) -> dict[int, tuple[float, float]]:
    """Rank -> memory that microbatches of any size leave, and the largest share of a replica's work that fits it."""
    in_flight = steady_in_flight(plan)
    held = _most_of_replicas(in_flight)
    # equal stages of replicas with as much work, and ranks with such stages, are computed once
    found: dict[tuple, tuple[float, float, NDArray]] = {}
    on_rank: dict[int, tuple[tuple, ...]] = dict.fromkeys(free, ())
    for key, memory in memories.items():
        case = (key[0], id(memory), in_flight[key], held[key[:2]], demands.load(*key[:2]))
        if case not in found:
            found[case] = demands.of_stage(key, memory, in_flight[key], held[key[:2]])
        for rank in plan.stage(*key).all_ranks:
            on_rank[rank] += (case,)
    shares: dict[tuple, tuple[float, float]] = {}
    for cases in {(free[rank], *on_rank[rank]) for rank in free}:
        num_bytes, *stages = cases
        # modules on the same rank split its memory in proportion to their work
        growing, running = 0.0, [np.zeros((1, 2))]
        for case in stages:
            per_part, fixed, transient = found[case]
            growing, num_bytes = growing + per_part, num_bytes - fixed
            running.append(transient)
        slopes, constant = np.concatenate(running).T
        slopes = growing + slopes
        available = np.maximum(num_bytes - constant, 0.0)
        least = np.divide(available, slopes, out=np.full_like(available, np.inf), where=slopes > 0).min()
        shares[cases] = num_bytes, float(least)
    return {rank: shares[num_bytes, *on_rank[rank]] for rank, num_bytes in free.items()}


def _most_of_replicas(in_flight: Mapping[StageKey, float]) -> dict[tuple[str, int], float]:
    """(module, replica) -> most microbatches in flight on any of its stages."""
    result: dict[tuple[str, int], float] = {}
    for key, count in in_flight.items():
        result[key[:2]] = max(result.get(key[:2], 0.0), count)
    return result


def _limits(plan: ParallelPlan, demands: _MemoryDemands, shares: dict[int, float]) -> dict[str, int]:
    """Module -> tokens of the largest microbatch that fits its ranks."""
    result = {}
    for name, module in plan.modules.items():
        if demands.tokens[name]:
            ranks = {rank for _, _, stage in module.stages() for rank in stage.all_ranks}
            result[name] = int(min(min(shares[rank] for rank in ranks), 1e18) * demands.tokens[name])
    return result


def _in_blocks(plan: ParallelPlan, name: str, limit: int) -> int:
    """Lowers a limit so that the cp ranks of a language model have whole blocks."""
    module = plan.modules[name]
    block = module.context.block * module.cp_size if module.cp_size > 1 and name == LANGUAGE_MODEL else 1
    return limit - limit % block if limit >= block else limit


def _check_free(plan: ParallelPlan, free: dict[int, float], memory_bytes: float) -> None:
    """Raises `ValueError` if a rank has no memory left for a microbatch of any size."""
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


class _MemoryDemands:
    """Memory demand of stages for a microbatch, relative to one with the mean of the work of all replicas."""

    def __init__(self, costs: CostModel, plan: ParallelPlan, sizes: SampleSizes):
        self.plan = plan
        self.tokens = {name: sizes.tokens[name].sum() / module.dp_size for name, module in plan.modules.items()}
        self.squares = {
            name: _stored_pairs(costs, plan, sizes, name) / module.dp_size for name, module in plan.modules.items()
        }
        # of the busiest rank, if the images of one sample are what cp ranks share
        self.excess = {name: _excess(costs, plan, sizes, name) for name in plan.modules}
        self.features = {name: float(sample_features(costs, sizes, name).sum()) for name in costs.spec.encoders}

    def of_stage(
        self, key: StageKey, memory: StageMemory, in_flight: float, held: float
    ) -> tuple[float, float, NDArray]:
        """
        Bytes that grow with the microbatch, constant bytes, and both `[cases, 2]` for transient memory, with some
        microbatches in flight and others that wait for weight gradients, as many as `held` together.
        """
        name, replica, _ = key
        scale = np.array([self.squares[name], self.tokens[name]]) * self.excess[name] / memory.cp_size
        saved, put_off = memory.saved.sum(axis=0), memory.put_off.sum(axis=0)
        saved = np.maximum(saved, put_off) + put_off * ((held - in_flight) / in_flight)
        growing, fixed = in_flight * float(weighted_sum(saved[:2], scale)), in_flight * float(saved[2])
        load = self.load(name, replica)
        fixed += memory.kept_bytes + memory.input_bytes * load * self.tokens[name]
        for edge in self.plan.edges:
            enters = edge.target == name and any(map(self.plan.stage(*key).has_layer, edge.layers))
            if enters and edge.source in self.features:
                copies = self.plan.modules[name].dp_size * memory.cp_size
                growing += in_flight * self.features[edge.source] / copies
        if name in self.features and memory.frees_features:
            fixed += load * self.features[name] / self.plan.modules[name].dp_size
        if in_flight > 1 and self.plan.policy.keeps_all(name in self.features):
            # All microbatches of the step stay, whatever their size.
            growing, fixed = 0.0, fixed + load * growing / in_flight
        return growing, fixed, np.stack([weighted_sum(memory.transient[:, :2], scale), memory.transient[:, 2]], axis=1)

    def load(self, name: str, replica: int) -> float:
        """Work of a replica relative to the mean of all replicas of its module, by the microbatches of the plan."""
        counts, served = self.plan.microbatch_counts, self.plan.served_replicas(name, replica)
        return sum(counts[index] for index in served) * len(counts) / (len(served) * self.plan.total_microbatches)


def _stored_pairs(costs: CostModel, plan: ParallelPlan, sizes: SampleSizes, name: str) -> float:
    """Token pairs stored for all samples, and values of repeated keys and values, see [`activation_sizes`]."""
    tokens, module = sizes.tokens[name], plan.modules[name]
    are_even = np.full(len(tokens), len(np.unique(tokens)) <= 1)  # then no row of a microbatch is padded
    layout = replace(RowLayout.of(costs, name, module), block=1)
    pairs = layout.sizes(np.ones_like(tokens), tokens, sizes.squares[name], tokens, are_even)[:, 2]
    copies = grouped_copies(costs.spec.modules[name], costs.spec.uses.get((name, 0), ()), module.tp_sizes[0])
    return float(pairs.sum() + copies * tokens[pairs > 0].sum())


def _excess(costs: CostModel, plan: ParallelPlan, sizes: SampleSizes, name: str) -> float:
    """Tokens of the busiest cp rank over the mean, of the samples one by one."""
    layout, tokens = RowLayout.of(costs, name, plan.modules[name]), sizes.tokens[name]
    if layout.sharing == 1 or not tokens.sum():
        return 1.0
    return float(weighted_sum(layout.excess(tokens, sizes.whole_squares(name)), tokens) / tokens.sum())


def free_bytes(plan: ParallelPlan, memories: dict[StageKey, StageMemory], memory_bytes: float) -> dict[int, float]:
    """Rank -> memory left for activations; raises `ValueError` if a rank has none left."""
    states = state_per_rank(plan, memories)
    state_bytes = {rank: state.total for rank, state in states.items()}
    fullest = max(state_bytes, key=lambda rank: (state_bytes[rank], -rank))
    if state_bytes[fullest] >= memory_bytes:
        names = list(dict.fromkeys(name for name, _, _ in plan.stages_of_rank(fullest)))
        raise ValueError(
            f"Rank {fullest} ({', '.join(names)}) needs {state_bytes[fullest] / GIB:.3g} GiB for weights, gradients "
            f"and optimizer state alone, of {memory_bytes / GIB:.3g} GiB of memory. Raise `pp_size` or `tp_size` of "
            f"`{names[-1]}`, freeze more of it, or allow more memory."
        )
    return {rank: memory_bytes - state.total for rank, state in states.items()}


def steady_in_flight(plan: ParallelPlan) -> dict[StageKey, float]:
    """(module, replica, stage) -> microbatches in flight in the steady state, one without a backward."""
    flow = GradientFlow(plan)
    encoders = plan.encoders
    turns = {
        (name, replica): max(plan.microbatch_counts[index] for index in plan.served_replicas(name, replica))
        for name, module in plan.modules.items()
        for replica in range(module.dp_size)
    }
    depths = {
        # the depth of 1F1B; one more in encoders, whose samples may be deferred by a microbatch
        key: turns[key[:2]] if plan.policy.keeps_all(key[0] in encoders) else depth + (key[0] in encoders)
        for key, depth in stage_depths(plan).items()
    }
    return {key: float(depth) if flow.has_backward(*key) else 1.0 for key, depth in depths.items()}


def fitting_in_flight(
    costs: CostModel, plan: ParallelPlan, step: StepPlan, sizes: SampleSizes, memory_bytes: float | None = None
) -> dict[StageKey, float]:
    """
    Maximum microbatches in flight on each stage under the schedule `"eager"` (Entrain, section 4.5.3): those of 1F1B,
    and more if memory allows.

    Raises:
        `ValueError`: If weights, gradients and optimizer state alone exceed the memory of a rank.
    """
    if memory_bytes is None:
        return in_flight_eager(plan, step)
    memories = stage_memories(costs, plan)
    free = free_bytes(plan, memories, memory_bytes)
    flow = GradientFlow(plan)
    max_in_flight = in_flight_1f1b(plan, step)
    needed, waiting, running = {}, {}, dict.fromkeys(free, 0.0)
    held = _most_of_replicas(max_in_flight)
    for key, use in stage_uses(costs, plan, step, sizes, memories).items():
        needed[key], waiting[key] = max(use.per_microbatch, use.put_off), use.put_off
        # as many microbatches as any stage of the replica has in flight may wait for weight gradients
        fixed = use.fixed + use.put_off * (held[key[:2]] - max_in_flight[key])
        for rank in plan.stage(*key).all_ranks:
            free[rank] -= fixed
            running[rank] = max(running[rank], use.running)
    free = {rank: num_bytes - running[rank] for rank, num_bytes in free.items()}
    stages = [key for key in max_in_flight if flow.has_backward(*key) and needed[key]]
    for key in stages:
        for rank in plan.stage(*key).all_ranks:
            free[rank] -= max_in_flight[key] * needed[key]
    modules = list(plan.modules)
    # encoders first, whose features wait for no other module, then the language model, then generators
    together: dict[tuple, list[StageKey]] = {}  # stages whose limits are raised together
    for key in sorted(stages, key=lambda key: (modules.index(key[0]), key)):
        together.setdefault(key[:2] if plan.modules[key[0]].splits_backward else key, []).append(key)

    def used_bytes(keys: list[StageKey], more: int) -> dict[int, float]:
        """Rank -> bytes of so many more on the first of some stages, and, with split backwards, waiting on them."""
        used: dict[int, float] = {}
        for key, added in zip(keys, further_in_flight(len(keys), more), strict=True):
            for rank in plan.stage(*key).all_ranks:
                used[rank] = used.get(rank, 0.0) + added * needed[key] + (more - added) * waiting[key]
        return used

    def exceeds(keys: list[StageKey], more: int) -> bool:
        return any(num_bytes > free[rank] for rank, num_bytes in used_bytes(keys, more).items())

    for (name, replica, *_), keys in together.items():
        left = int(len(step.microbatches[name][replica]) - max(max_in_flight[key] for key in keys))
        more = bisect_left(range(1, left + 1), True, key=partial(exceeds, keys))  # the most that fit
        for key, added in zip(keys, further_in_flight(len(keys), more), strict=True):
            max_in_flight[key] += added
        for rank, num_bytes in used_bytes(keys, more).items():
            free[rank] -= num_bytes
    return max_in_flight


# Costs of the samples of a global batch in each module.


def batch_workloads(
    costs: CostModel,
    plan: ParallelPlan,
    sizes: SampleSizes,
    max_tokens: int | None = None,
    memory_bytes: float | None = None,
) -> Workloads:
    """
    Workloads that a global batch is arranged by, from the layer costs of each sample, without constant costs per
    chunk, and with limits of tokens: `max_tokens` of the language model, and what fits the memory of a rank of every
    module.

    Raises:
        `ValueError`: If weights, gradients and optimizer state alone exceed the memory of a rank.
    """
    forward_ms, ratios, row_ms = {}, {}, None
    costs = costs.of_plan(plan)
    for name, module in plan.modules.items():
        table = layer_table(costs, name, module.tp_size, module.activation_checkpointing)
        layout = RowLayout.of(costs, name, module)
        alone, padded = (layout.of_samples(sizes, name, even) for even in (True, False))
        forward, backward = table.sample_ms(alone[1], alone[0])
        # rounded, so that ranks with processors that round differently make the same arrangement
        forward_ms[name] = (module.tp_size * forward).astype(np.float32).astype(float)
        ratios[name] = float(np.float32(backward.sum() / forward.sum())) if forward.sum() else 0.0
        if layout.padded and len(np.unique(sizes.tokens[name])) > 1:
            row, _ = table.sample_ms(padded[1], padded[0])
            row_ms = (module.tp_size * row).astype(np.float32).astype(float)
    workloads = Workloads(forward_ms, ratios, dict(sizes.tokens), {}, row_ms)
    limits = {}
    if memory_bytes is not None:
        limits = fitting_tokens(costs, with_fastest_counts(plan, workloads), sizes, memory_bytes)
    if max_tokens is not None:
        limits[LANGUAGE_MODEL] = min(max_tokens, limits.get(LANGUAGE_MODEL, max_tokens))
    return replace(workloads, token_limits=limits)
