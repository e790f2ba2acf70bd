"""Virtual stages: the closed form of their bubble, torch's own interleaved schedule, and no deadlock."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, MultimodalParallelPlugin, ParallelPlan, StepPlan
from hf_mmparallel.plan.ownership import sync_groups
from hf_mmparallel.plan.resolve import resolve_plan
from hf_mmparallel.schedule import build_program, find_representatives, simulate
from hf_mmparallel.schedule.in_flight import pipeline_depths
from tests.schedule.builders import make_plan, make_step, module_spec
from tests.schedule.torch_orders import torch_length_ms

VISION, LM = "vision", LANGUAGE_MODEL


def pipeline(num_ranks: int, vp_size: int, num_microbatches: int):
    """A model whose language model has virtual stages, and an encoder on a rank of its own."""
    spec, plan = make_plan({VISION: [[(num_ranks,)]], LM: [[(i % num_ranks,) for i in range(num_ranks * vp_size)]]})
    microbatches = [[index] for index in range(num_microbatches)]
    return spec, plan, make_step({VISION: [microbatches], LM: [microbatches]})


def length_ms(plan: ParallelPlan, step: StepPlan, times_ms: np.ndarray) -> float:
    """A step whose stages of the language model take `times_ms[direction, stage]`."""

    def cost(task) -> float:
        return 0.0 if task.module == VISION else float(times_ms[task.row.direction, task.stage])

    return simulate(find_representatives(plan, ()), step, cost).iteration_ms


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("vp_size", [1, 2, 4])
def test_the_bubble_of_equal_stages_is_that_of_the_closed_form(num_ranks, vp_size):
    for rounds in (1, 2, 4):
        _, plan, step = pipeline(num_ranks, vp_size, num_ranks * rounds)
        times_ms = np.array([[1.0], [2.0]]).repeat(num_ranks * vp_size, axis=1)
        busy = 3 * vp_size * num_ranks * rounds
        # (p - 1) / (v m) of the time that a rank is busy
        assert length_ms(plan, step, times_ms) == pytest.approx(busy * (1 + (num_ranks - 1) / (busy / 3)))
        assert times_ms.shape[1] == len(pipeline_depths(num_ranks, vp_size))


@pytest.mark.parametrize(("num_ranks", "vp_size", "num_microbatches"), [(2, 2, 8), (4, 2, 8), (4, 4, 12), (8, 2, 16)])
def test_unlike_stages_take_no_longer_than_in_the_order_of_torch(num_ranks, vp_size, num_microbatches):
    _, plan, step = pipeline(num_ranks, vp_size, num_microbatches)
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(10):
        times_ms = np.array([[1.0], [2.0]]) * generator.uniform(0.9, 1.1, num_ranks * vp_size)
        ratios.append(
            length_ms(plan, step, times_ms)
            / torch_length_ms(ScheduleInterleaved1F1B, num_ranks, num_microbatches, times_ms)
        )
    assert np.median(ratios) <= 1.02, ratios


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(2, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 9))
def test_any_stages_and_microbatches_end(data, num_ranks, vp_size, copies, encoders, num_samples):
    """Unlike stages and microbatches, samples that are encoded earlier or later, empty microbatches; also proved."""
    first = copies * num_ranks
    replicas = [[(r * num_ranks + i % num_ranks,) for i in range(num_ranks * vp_size)] for r in range(copies)]
    spec, plan = make_plan({VISION: [[(first + e,)] for e in range(encoders)], LM: replicas})

    def divided(count: int) -> list[list[list[int]]]:
        """All samples in microbatches of `count` replicas, in any order."""
        result: list[list[list[int]]] = [[[] for _ in range(data.draw(st.integers(1, 4)))] for _ in range(count)]
        for sample in data.draw(st.permutations(range(num_samples))):
            replica = result[data.draw(st.integers(0, count - 1))]
            replica[data.draw(st.integers(0, len(replica) - 1))].append(sample)
        return result

    step = make_step({VISION: divided(encoders), LM: divided(copies)})
    generator = np.random.default_rng(data.draw(st.integers(0, 9)))
    times = generator.uniform(0.1, 5.0, (2, num_ranks * vp_size))

    def cost(task) -> float:
        return float(times[task.row.direction, task.stage] * (1 + task.microbatch % 3))

    groups = sync_groups(spec, plan)
    timeline = simulate(find_representatives(plan, groups), step, cost)
    assert len(timeline.end_ms) == timeline.graph.num_tasks and np.isfinite(timeline.end_ms).all()
    build_program(plan, step, groups, cost)


def test_stages_come_round_on_the_ranks_of_a_pipeline():
    spec, _ = make_plan({VISION: [[(0,)]], LM: [[(1,)]]})
    plan = resolve_plan(spec, {LM: ModulePlugin(pp_size=2, vp_size=2, tp_size=2)})
    assert [stage.all_ranks for _, _, stage in plan.modules[LM].stages()] == [(1, 2), (3, 4), (1, 2), (3, 4)]
    assert plan.world_size == 5 and plan.modules[LM].layout == "pp 2 x vp 2 x tp 2"
    assert (plan.modules[LM].pp_size, plan.modules[LM].vp_size, plan.modules[VISION].vp_size) == (2, 2, 1)
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    ModulePlugin(pp_size=2, vp_size=2).check_against(LM, plan.modules[LM])
    # by the name of the schedule for pipelines that have the layers for it
    deep, _ = make_plan({VISION: [[(0,)]], LM: [[(1,)]]}, {VISION: spec.modules[VISION], LM: module_spec(LM, 16)})
    named = resolve_plan(deep, {LM: ModulePlugin(pp_size=2)}, schedule="interleaved")
    assert (named.modules[LM].vp_size, named.modules[VISION].vp_size) == (2, 1)
    assert resolve_plan(deep, {LM: ModulePlugin(pp_size=4)}, schedule="interleaved").modules[LM].vp_size == 1
    given = ModulePlugin(pp_size=2, vp_size=2, layers_per_stage=[1, 1, 1, 1])
    assert [stage.num_layers for stage in resolve_plan(spec, {LM: given}).modules[LM].replicas[0]] == [1, 1, 1, 1]


def test_what_virtual_stages_can_not_do_is_refused():
    spec, _ = make_plan({VISION: [[(0,)]], LM: [[(1,)]]})
    with pytest.raises(ValueError, match="needs at least 6 layers"):
        resolve_plan(spec, {LM: ModulePlugin(pp_size=2, vp_size=3)})
    for sizes in ({"pp_size": 2, "layers_per_stage": [2, 2]}, {}):
        with pytest.raises(ValueError, match="vp_size"):
            ModulePlugin(**sizes, vp_size=2)
    with pytest.raises(ValueError, match="vp_size"):
        MultimodalParallelPlugin(modules={LM: {"pp_size": 2, "vp_size": 2}}, auto=True)
    MultimodalParallelPlugin(schedule="interleaved", auto=True)  # which the search keeps
