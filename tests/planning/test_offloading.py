"""Host memory as the last resort of a search: where a layout does not fit otherwise, and the host can hold it."""

from dataclasses import replace

import pytest

from hf_mmparallel.cost.memory import state_per_rank
from hf_mmparallel.cost.stage_memory import stage_memories
from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes, check_plan
from hf_mmparallel.plan.checkpointing import SELECTIVE
from hf_mmparallel.plan.layout import ModuleLayout
from hf_mmparallel.plan.parallel_plan import StorageSettings
from hf_mmparallel.planning.problem import Candidate, PlanningProblem
from hf_mmparallel.planning.search import offloading_problems, search_plans
from tests.cost.models import LAYERS, PLAIN

from .test_search import BOTH, ONE_ORDER, answers, problem_of

SIZES = {"dp_size": 2, "pp_size": 1, "tp_size": 1, "cp_size": 1, "zero_stage": 0}
ON_CPU, STREAMED = StorageSettings(offload_optimizer=True), StorageSettings(offload_params=True)


def question(frozen: tuple[str, ...] = (), device=PLAIN, **settings) -> PlanningProblem:
    """Two copies of everything, which divide nothing."""
    settings = {"fixed": dict.fromkeys(BOTH, SIZES), "effort": 16, **ONE_ORDER, **settings}
    asked = problem_of(2, 8, frozen, device=device, **settings)
    return replace(asked, sizes=SampleSizes.uniform(dict.fromkeys(BOTH, 4), 48))


def state_bytes(asked: PlanningProblem, storage: StorageSettings | None = None) -> float:
    layout = ModuleLayout((LAYERS,), 2, storage=storage or StorageSettings())
    plan = Candidate(dict.fromkeys(BOTH, layout), {"vision": LANGUAGE_MODEL}, 4).plan(asked.spec)
    return max(state.total for state in state_per_rank(plan, stage_memories(asked.costs, plan)).values())


def tight(asked: PlanningProblem, storage: StorageSettings = ON_CPU, share: float = 0.5) -> PlanningProblem:
    """With memory for this storage and a share of what it saves, and not for a state on the device."""
    needed, whole = state_bytes(asked, storage), state_bytes(asked)
    assert needed < 0.8 * whole
    return replace(asked, memory_bytes=needed + share * (whole - needed))


def test_the_optimizer_goes_to_the_cpu_where_its_state_does_not_fit():
    asked = tight(question())
    best = search_plans(asked).best
    assert best.peak_memory_bytes <= (asked.memory_bytes or 0)
    assert any(layout.storage.offload_optimizer for layout in best.candidate.layouts.values())
    assert "optimizer on the CPU" in str(best.candidate)
    check_plan(best.plan, asked.spec)
    assert any(module.storage.offload_optimizer for module in best.plan.modules.values())


@pytest.mark.parametrize(
    ("host", "settings"),
    [
        ({"host_memory_gib": None}, {}),
        ({"host_memory_gb_per_s": None}, {}),
        ({"host_memory_gib": 1e-5}, {}),
        ({}, {"offloads": False}),  # such as an optimizer without a step on the CPU
    ],
)
def test_an_unknown_or_small_host_keeps_nothing(host, settings):
    with pytest.raises(ValueError, match="fits"):
        search_plans(tight(question(device=replace(PLAIN, **host), **settings)))


def test_nothing_is_offloaded_where_it_fits():
    for own in answers(search_plans(question(memory_bytes=2.0**36))):
        assert {layout.storage for layout in own.candidate.layouts.values()} == {StorageSettings()}


def test_frozen_weights_are_streamed_before_an_optimizer_is_offloaded():
    best = search_plans(tight(question(BOTH), STREAMED, 0.9)).best
    assert all(layout.storage == STREAMED for layout in best.candidate.layouts.values())


def test_activations_go_to_the_host_where_they_do_not_fit():
    """A microbatch of one long sample, in devices with room for the state and a third of what is saved."""
    asked = question(checkpointing=dict.fromkeys(BOTH, False), microbatch_size=1)
    asked = replace(asked, sizes=SampleSizes.uniform(dict.fromkeys(BOTH, 20_000), 8))
    roomy = search_plans(replace(asked, memory_bytes=2.0**36)).best
    activations = max(own.activations for own in roomy.predictions[0].memory.values())
    asked = replace(asked, memory_bytes=roomy.peak_memory_bytes - 0.5 * activations)
    best = search_plans(asked).best
    assert any(layout.storage.offload_activations for layout in best.candidate.layouts.values())
    assert best.peak_memory_bytes <= (asked.memory_bytes or 0) and "activations in host memory" in str(best.candidate)
    assert all(own.host > 0 for own in best.predictions[0].memory.values())
    small = replace(asked, costs=replace(asked.costs, device=replace(asked.costs.device, host_memory_gib=0.01)))
    with pytest.raises(ValueError, match="fits"):
        search_plans(small)


def test_what_products_gave_stays_on_the_device_where_the_rest_is_recomputed():
    asked = replace(question(checkpointing=dict.fromkeys(BOTH, SELECTIVE)), memory_bytes=2.0**36)
    layouts = search_plans(asked).best.candidate.layouts.values()
    assert {(own.activation_checkpointing, own.cp_size) for own in layouts} == {(SELECTIVE, 1)}
    flags = {key for own in offloading_problems(asked) for given in own.fixed.values() for key in given}
    assert "offload_optimizer" in flags and not flags & {"offload_params", "offload_activations"}


def test_memory_that_forces_a_slower_layout():
    """Recomputation or more stages would fit; the faster layout with its optimizer on the CPU is chosen."""
    fast = replace(PLAIN, host_link_gb_per_s=900.0, host_memory_gb_per_s=40_000.0, link_gb_per_s=0.05)
    asked = question(device=fast, fixed={}, effort=8)
    asked = replace(asked, memory_bytes=0.9 * state_bytes(asked))
    with_host, without = (search_plans(replace(asked, offloads=offloads)).best for offloads in (True, False))
    assert with_host.step_ms <= without.step_ms
