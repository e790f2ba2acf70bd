"""Plans that keep optimizer state and frozen weights in host memory, for layouts that do not fit otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from ..cost.sharded_passes import GATHERS_IN_PASSES
from ..plan import ModuleSpec
from ..plan.parallel_plan import StorageSettings
from .candidates import diversify
from .problem import Candidate, PlanningProblem
from .simulations import Simulations, key_of
from .slices import state_fits

_LAYOUTS, _SIMULATED = 64, 4  # layouts above the memory limit that are looked at, and that are simulated


def offloaded_problems(problem: PlanningProblem) -> Iterator[PlanningProblem]:
    """
    The problem with what the user leaves open in host memory: frozen weights, which come back beside the computation,
    then the optimizer, then both.
    """
    if problem.memory_bytes is None or problem.host_bytes is None or not problem.offloads:
        return
    possible = {name: _possible(problem, name, module) for name, module in problem.spec.modules.items()}
    for keys in (("offload_params",), ("offload_optimizer",), ("offload_params", "offload_optimizer")):
        chosen = {name: [key for key in keys if key in own] for name, own in possible.items()}
        if all(any(key in own for own in chosen.values()) for key in keys):
            added = {name: dict.fromkeys(own, True) for name, own in chosen.items()}
            fixed = {name: {**problem.fixed.get(name, {}), **own} for name, own in added.items()}
            yield replace(problem, fixed={name: own for name, own in fixed.items() if own})


def _possible(problem: PlanningProblem, name: str, module: ModuleSpec) -> list[str]:
    """What of a module can be put into host memory: frozen layers, and the optimizer of trained parameters."""
    given = problem.fixed.get(name, {})
    in_layers = [p for p in module.parameters if 0 <= p.layer < module.num_layers]
    result = []
    is_frozen = bool(in_layers) and not any(p.trainable for p in in_layers)
    if is_frozen and "offload_params" not in given and given.get("zero_stage") != GATHERS_IN_PASSES:
        result.append("offload_params")
    if any(p.trainable for p in module.parameters) and "offload_optimizer" not in given:
        result.append("offload_optimizer")
    return result


def try_host_memory(simulations: Simulations, share: float) -> None:
    """
    Tries host memory for the layouts above the memory limit that would be faster than the best step, within a share of
    the effort: of each the variant that moves the least.
    """
    space, num_tasks, num_simulated = simulations.space, 0, 0
    problems = list(offloaded_problems(simulations.problem))
    above = islice(diversify(space.above_memory_limit()), _LAYOUTS if problems else 0)
    for estimated in above:
        is_far = max(estimated.step_ms, estimated.min_compute_ms) >= simulations.best_ms
        if is_far or num_simulated >= _SIMULATED or num_tasks > share * simulations.effort:
            return
        candidate = space.candidate(estimated)
        for problem in problems:
            stored = _stored(candidate, problem)
            if stored is None or key_of(stored) in simulations.known or not state_fits(problem, stored):
                continue
            num_simulated += 1
            num_tasks += simulations.screen_one(stored, estimated)
            found = simulations.known.get(key_of(stored))
            if found is not None:
                num_tasks += simulations.simulate_new(stored, estimated) if found.step_ms < simulations.best_ms else 0
                break


def _stored(candidate: Candidate, problem: PlanningProblem) -> Candidate | None:
    """The candidate with a problem's storage; `None` if copies divide weights that would be in host memory."""
    layouts = {}
    for name, layout in candidate.layouts.items():
        storage: StorageSettings = problem.storage_of(name)
        if storage.offload_params and layout.zero_stage >= GATHERS_IN_PASSES:
            return None
        layouts[name] = replace(layout, storage=storage)
    return replace(candidate, layouts=layouts)
