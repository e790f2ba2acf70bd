"""Which ranks talk and which meet, and which numbers they draw, when grids have several rows."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, resolve_plan, sync_groups
from hf_mmparallel.runtime.engine import EngineOptions, ParallelEngine
from hf_mmparallel.runtime.groups import ProcessGroups, channels_of, channels_of_step, context_groups
from hf_mmparallel.schedule import Task, build_program
from hf_mmparallel.world import World
from tests.distributed import GROUP_TIMEOUT_S, run_distributed
from tests.plan.specs import model_spec

PLAN = resolve_plan(
    model_spec(),
    {"vision": ModulePlugin(tp_size=2), LANGUAGE_MODEL: ModulePlugin(pp_size=2, cp_size=2, tp_size=2)},
)


def test_rows_of_a_grid_talk_to_the_same_row_and_encoders_to_all():
    step = contiguous_step(PLAN, range(2), 1)
    channels = [(0, 2), (0, 4), (1, 3), (1, 5), (2, 6), (3, 7), (4, 8), (5, 9)]
    assert channels_of_step(PLAN, step) == channels
    program = build_program(PLAN, step, [])
    for rank, actions in program.actions.items():
        assert list(channels_of(PLAN, rank, actions)) == [ends for ends in channels if rank in ends]


def test_ranks_with_equal_shards_share_the_tokens_of_a_stage():
    assert context_groups(PLAN) == [(2, 4), (3, 5), (6, 8), (7, 9)]


def test_dropout_is_equal_on_ranks_with_the_same_tokens_only():
    seeds = {}
    with torch.random.fork_rng(devices=[]):
        for rank in PLAN.stage(LANGUAGE_MODEL, 0, 0).all_ranks:
            engine: Any = SimpleNamespace(
                plan=PLAN,
                rank=rank,
                device=torch.device("cpu"),
                options=EngineOptions(seed=1),
                step_index=3,
                model=SimpleNamespace(training=True),
            )
            ParallelEngine._seed_task(engine, Task("fwd", LANGUAGE_MODEL, 0, 0, 0))
            seeds[rank] = torch.initial_seed()
    assert seeds[2] == seeds[3] != seeds[4] == seeds[5]


def permuted() -> ParallelPlan:
    """A language model of 2 copies x 2 rows of 2 ranks that are in no order."""
    plan = resolve_plan(model_spec(), {LANGUAGE_MODEL: ModulePlugin(dp_size=2, cp_size=2, tp_size=2)})
    module = plan.modules[LANGUAGE_MODEL]
    grids = (((4, 2), (1, 3)), ((7, 5), (8, 6)))
    replicas = tuple((replace(stages[0], mesh=grid),) for stages, grid in zip(module.replicas, grids, strict=True))
    return replace(plan, modules={**plan.modules, LANGUAGE_MODEL: replace(module, replicas=replicas)})


def groups_of_rank() -> list[tuple[int, ...]]:
    """The groups of this rank, which keep the order of their ranks, and wait as long as the default group."""
    plan, rank = permuted(), dist.get_rank()
    groups = ProcessGroups(plan, sync_groups(model_spec(), plan), World())
    for ranks, group in sorted(groups.by_ranks.items()):
        gathered = torch.empty(len(ranks))
        dist.all_gather_single(gathered, torch.tensor([float(rank)]), group=group)
        assert tuple(dist.get_process_group_ranks(group)) == tuple(gathered.int().tolist()) == ranks
        mesh = groups.mesh(ranks)
        assert (mesh is not None) == (ranks in ((4, 2), (1, 3), (7, 5), (8, 6)))
        if mesh is not None:
            assert mesh.mesh.tolist() == list(ranks)
            assert mesh.get_group() is group and mesh.get_local_rank() == ranks.index(rank)
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == GROUP_TIMEOUT_S
    return list(groups.by_ranks)


@pytest.mark.distributed
def test_groups_keep_the_order_of_their_ranks_and_wait_as_long_as_the_default_group():
    by_rank = run_distributed(groups_of_rank, 9)
    assert set(by_rank[4]) == {(4, 2), (4, 1), (1, 4, 7, 8)}
    assert set(by_rank[6]) == {(8, 6), (5, 6), (2, 3, 5, 6)}
    assert not by_rank[0]
