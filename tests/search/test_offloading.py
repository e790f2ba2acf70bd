"""Host memory as the last resort of a search: where a layout does not fit otherwise, and the host can hold it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_mmparallel.cost import analytic_costs
from hf_mmparallel.cost.memory import state_per_rank
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes, check_plan
from hf_mmparallel.plan.parallel_plan import StorageSettings
from hf_mmparallel.search.problem import Candidate, Layout, PlanningProblem
from hf_mmparallel.search.search import search_plans
from tests.cost.models import LAYERS, PLAIN

from .test_search import problem_of

SHORT = SampleSizes.uniform({"vision": 4, LANGUAGE_MODEL: 4}, 48)
SIZES = {"dp_size": 2, "pp_size": 1, "tp_size": 1, "cp_size": 1, "zero_stage": 0}
SPEC = ("vision", LANGUAGE_MODEL)
ON_CPU = StorageSettings(offload_optimizer=True)


def question(frozen: tuple[str, ...] = (), device=PLAIN, **settings) -> PlanningProblem:
    """Two copies of everything, which divide nothing."""
    fixed = dict.fromkeys(("vision", LANGUAGE_MODEL), SIZES)
    asked = problem_of(2, 8, frozen, device=device, **{"fixed": fixed, "effort": 16, **settings})
    return replace(asked, sizes=SHORT)


def state_bytes(asked: PlanningProblem, **storages: StorageSettings) -> float:
    layouts = {
        name: Layout((LAYERS,), 2, storage=storages.get(name, StorageSettings()))
        for name in ("vision", LANGUAGE_MODEL)
    }
    plan = Candidate(layouts, {"vision": LANGUAGE_MODEL}, 4).plan(asked.spec)
    return max(state.total for state in state_per_rank(plan, stage_memories(asked.costs, plan)).values())


def tight(asked: PlanningProblem, share: float = 0.5, **storages: StorageSettings) -> PlanningProblem:
    """With memory for this storage and a share of what it saves, and not for a state on the device."""
    needed, whole = state_bytes(asked, **storages), state_bytes(asked)
    assert needed < 0.8 * whole
    return replace(asked, memory_bytes=needed + share * (whole - needed))


def test_the_optimizer_goes_to_the_cpu_where_its_state_does_not_fit():
    asked = tight(question(), vision=ON_CPU, language_model=ON_CPU)
    best = search_plans(asked).best
    assert best.peak_memory_bytes <= (asked.memory_bytes or 0)
    assert any(layout.storage.offload_optimizer for layout in best.candidate.layouts.values())
    assert "optimizer on the CPU" in str(best.candidate)
    check_plan(best.plan, asked.spec)
    assert any(module.storage.offload_optimizer for module in best.plan.modules.values())


@pytest.mark.parametrize(
    "changes", [{"host_memory_gib": None}, {"host_memory_gb_per_s": None}, {"host_memory_gib": 1e-5}]
)
def test_an_unknown_or_small_host_keeps_nothing(changes):
    asked = tight(question(device=replace(PLAIN, **changes)), vision=ON_CPU, language_model=ON_CPU)
    with pytest.raises(ValueError, match="fits"):
        search_plans(asked)


def test_an_optimizer_without_a_step_on_the_cpu_stays():
    asked = tight(question(), vision=ON_CPU, language_model=ON_CPU)
    with pytest.raises(ValueError, match="fits"):
        search_plans(replace(asked, offloads=False))


def test_nothing_is_offloaded_where_it_fits():
    result = search_plans(replace(question(), memory_bytes=2.0**36))
    for own in (result.best, *result.runners_up):
        assert {layout.storage for layout in own.candidate.layouts.values()} == {StorageSettings()}


def test_frozen_weights_are_streamed_before_an_optimizer_is_offloaded():
    streamed = StorageSettings(offload_params=True)
    asked = tight(question(("vision", LANGUAGE_MODEL)), 0.9, vision=streamed, language_model=streamed)
    best = search_plans(asked).best
    assert all(layout.storage == streamed for layout in best.candidate.layouts.values())


def test_what_the_user_names_is_kept():
    named = {"master_weights": False, "offload_optimizer": True}
    fixed = {LANGUAGE_MODEL: {**SIZES, **named}, "vision": SIZES}
    result = search_plans(question(fixed=fixed))
    for own in (result.best, *result.runners_up):
        assert own.candidate.layouts[LANGUAGE_MODEL].storage == StorageSettings(**named)
        assert own.candidate.layouts["vision"].storage == StorageSettings()
        assert own.plan.modules[LANGUAGE_MODEL].storage == StorageSettings(**named)


def test_memory_that_forces_a_slower_layout():
    """Recomputation or more stages would fit; the faster layout with its optimizer on the CPU is chosen."""
    fast = replace(PLAIN, host_link_gb_per_s=900.0, host_memory_gb_per_s=40_000.0, link_gb_per_s=0.05)
    asked = problem_of(2, 8, device=fast, effort=16)
    asked = replace(asked, costs=analytic_costs(asked.spec, fast), sizes=SHORT)
    asked = replace(asked, memory_bytes=0.9 * state_bytes(asked))
    with_host, without = (search_plans(replace(asked, offloads=offloads)).best for offloads in (True, False))
    assert with_host.step_ms <= without.step_ms
