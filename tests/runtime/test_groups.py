"""Which ranks talk and which meet, and which numbers they draw, when grids have several rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.runtime.groups import context_groups, talking_pairs
from hf_mmparallel.schedule import Task
from tests.plan.specs import model_spec

PLAN = resolve_plan(
    model_spec(),
    {"vision": ModulePlugin(tp_size=2), LANGUAGE_MODEL: ModulePlugin(pp_size=2, cp_size=2, tp_size=2)},
)


def test_rows_of_a_grid_talk_to_the_same_row_and_encoders_to_all():
    both = {(0, 2), (1, 3), (0, 4), (1, 5)} | {(2, 6), (3, 7), (4, 8), (5, 9)}
    assert talking_pairs(PLAN) == sorted(both | {(target, source) for source, target in both})


def test_ranks_with_equal_shards_share_the_tokens_of_a_stage():
    assert context_groups(PLAN) == [(2, 4), (3, 5), (6, 8), (7, 9)]
    assert context_groups(resolve_plan(model_spec(), {LANGUAGE_MODEL: ModulePlugin(tp_size=2)})) == []


def test_dropout_is_equal_on_ranks_with_the_same_tokens_only():
    seeds = {}
    with torch.random.fork_rng(devices=[]):
        for rank in PLAN.stage(LANGUAGE_MODEL, 0, 0).all_ranks:
            engine: Any = SimpleNamespace(
                plan=PLAN, rank=rank, seed=1, step_index=3, module=SimpleNamespace(training=True)
            )
            ParallelEngine._seed_task(engine, Task("fwd", LANGUAGE_MODEL, 0, 0, 0))
            seeds[rank] = torch.initial_seed()
    assert seeds[2] == seeds[3] != seeds[4] == seeds[5]
