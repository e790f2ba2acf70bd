"""Other shardings for the fastest layouts: what else the copies of a module can divide among them."""

from __future__ import annotations

from dataclasses import replace

from ..cost.sharded_passes import REDUCES_IN_PASSES
from ..plan.parallel_plan import ShardingSettings
from .options import ParallelConfig
from .problem import Candidate
from .ranking import distinct_sizes
from .simulations import Simulations, key_of

_LAYOUTS = 3  # fastest layouts with which other shardings are tried
_AS_LONG = 1.01  # ratio of the closed form to that of the current sharding up to which another one is tried


def try_shardings(simulations: Simulations, share: float) -> None:
    """
    Tries what else the copies of modules can divide, for the fastest layouts and within a share of the effort: module
    by module, what is fastest so far with the other ZeRO stages, over all copies and over those of a node.
    """
    num_tasks = 0
    for simulated in distinct_sizes(simulations.whole())[:_LAYOUTS]:
        communicates = any(own.zero_stage >= REDUCES_IN_PASSES for own in simulated.candidate.layouts.values())
        # the computation alone takes longer than the best step
        if not communicates and simulated.busy_ms >= simulations.best_ms:
            continue
        for name in simulated.candidate.layouts:
            best = simulated
            for sharding in _shardings(simulations, simulated.candidate, name):
                candidate = with_sharding(simulated.candidate, name, sharding)
                if num_tasks > share * simulations.effort:
                    return
                num_tasks += simulations.simulate_new(candidate, simulated.estimated)
                found = simulations.known.get(key_of(candidate))
                if found is not None and found.is_whole and found.step_ms < best.step_ms:
                    best = found
            simulated = best


def with_sharding(candidate: Candidate, name: str, sharding: ShardingSettings) -> Candidate:
    """The candidate with another sharding of a module."""
    layout = replace(candidate.layouts[name], sharding=sharding)
    return replace(candidate, layouts={**candidate.layouts, name: layout})


def _shardings(simulations: Simulations, candidate: Candidate, name: str) -> list[ShardingSettings]:
    """Other shardings of a module in a candidate, fastest first by the closed form, which excludes slow passes."""
    options, layout = simulations.space.options[name], candidate.layouts[name]
    num_copies = layout.dp_size * layout.cp_size
    if num_copies == 1:
        return []
    per_node = options.copies_per_node(layout.tp_size) // layout.pp_size
    divides = 1 < per_node < num_copies and num_copies % per_node == 0
    sizes = [None, per_node] if divides else [None]
    given = simulations.problem.fixed.get(name, {})
    sizes = [given["shard_size"]] if "shard_size" in given else sizes
    limit_ms = _AS_LONG * _module_ms(simulations, candidate, name, layout.sharding)
    every = [own for own in options.all_shardings(sizes) if own != layout.sharding]
    times = {own: _module_ms(simulations, candidate, name, own) for own in every}
    # slower sums are tried as well, since other tasks may hide them
    chosen = [own for own in times if times[own] <= limit_ms or own.zero_stage < REDUCES_IN_PASSES]
    return sorted(chosen, key=times.__getitem__)


def _module_ms(simulations: Simulations, candidate: Candidate, name: str, sharding: ShardingSettings) -> float:
    """Closed form of the time of a module in a step with another sharding."""
    options, layout = simulations.space.options[name], candidate.layouts[name]
    kind = ParallelConfig(layout.cp_size, layout.tp_size, layout.activation_checkpointing, sharding=sharding)
    kind = kind.with_shards(layout.dp_size)
    num_samples = simulations.problem.global_batch_size / layout.dp_size / candidate.num_microbatches
    stage_ms = float(options.layer_ms(kind, num_samples).sum()) / layout.pp_size
    return candidate.num_microbatches * stage_ms + options.sync_ms(kind, layout.dp_size, layout.pp_size)
