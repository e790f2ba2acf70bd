"""Runs whose samples are arranged by workload, with deferral, give what the stock Trainer gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from transformers import TrainerCallback

from hf_mmparallel.arrange.arrangements import contiguous
from hf_mmparallel.plan import LANGUAGE_MODEL, ParallelPlan, StepPlan, Workloads
from hf_mmparallel.plan.step_plan import Replicas
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", LANGUAGE_MODEL
NUM_SAMPLES, GLOBAL_BATCH, MICROBATCH = 30, 20, 3
STEPS = {"max_steps": 3, "warmup_steps": 0}  # the second ends an epoch with what is left, half a global batch


def long_tailed() -> list[tiny.Shape]:
    """Samples of which some have no image or clip, some have many, and a few have many words."""
    rng = np.random.default_rng(2)
    items = rng.choice([0, 1, 5], NUM_SAMPLES, p=[0.15, 0.45, 0.4])
    clips = rng.choice([0, 1, 2, 6], NUM_SAMPLES, p=[0.3, 0.4, 0.1, 0.2])
    words = rng.choice([4, 12, 90], NUM_SAMPLES, p=[0.4, 0.35, 0.25]) + rng.integers(0, 4, NUM_SAMPLES)
    return [tiny.Shape(*map(int, shape)) for shape in zip(items, clips, words, strict=True)]


@dataclass(frozen=True)
class Case:
    """A run under a layout."""

    family: str
    world_size: int
    parallel: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    limited: bool = False  # whether microbatches of the language model may only have so many tokens
    defers: bool = True  # whether the language model takes samples of an encoder's microbatch a microbatch later
    unlike: bool = False  # whether one copy of the language model has more microbatches than the other
    counts: list[list[int]] | None = None  # microbatches of each copy in each step, if the plan says them


def stage(first: int, last: int, rank: int) -> dict[str, Any]:
    """A stage of a plan's file."""
    return {"layers": [first, last], "ranks": [[rank]]}


def last_first(plan: ParallelPlan, workloads: Workloads, microbatch_size: int) -> dict[str, Replicas]:
    """A user's arrangement: the sampler's order from its end."""
    last = workloads.num_samples - 1
    return {
        name: tuple(tuple(tuple(last - index for index in indices) for indices in replica) for replica in replicas)
        for name, replicas in contiguous(plan, workloads, microbatch_size).items()
    }


CASES = {
    "a function of the user, in a worker of the loader, copies of the LM": Case(
        "llava",
        3,
        {LM: {"dp_size": 2}},
        {
            "microbatch_assignment": last_first,
            "dataloader_num_workers": 1,
            "dataloader_multiprocessing_context": "fork",
        },
        defers=False,
    ),
    "trained, eager as far as memory goes, copies of vision, stages of the LM": Case(
        "llava",
        4,
        {"modules": {VISION: {"dp_size": 2}, LM: {"pp_size": 2}}, "schedule": "eager"},
        {"memory_limit_gib": 8 / 2**10, "microbatch_assignment": "tapered"},
        limited=True,
    ),
    "a frozen tower, packed to a budget of tokens, copies of the LM": Case(
        "qwen2_vl",
        3,
        {VISION: {"freeze": "tower"}, LM: {"dp_size": 2}},
        {"packing": True, "max_tokens_per_microbatch": 170},
        limited=True,
    ),
    "a frozen LM, two encoders, all forwards first": Case(
        "qwen2_5_omni",
        3,
        {"modules": {LM: {"freeze": True}}, "schedule": "gpipe"},
        {"microbatch_assignment": "hierarchical"},
    ),
    "frozen vision, copies of both, as many ahead as there are": Case(
        "gemma3",
        4,
        {"modules": {VISION: {"freeze": True, "dp_size": 2}, LM: {"dp_size": 2}}, "schedule": "eager"},
        {"microbatch_assignment": "hierarchical"},
    ),
    "two encoders, sub-microbatches, encoders first and last, copies of the LM": Case(
        "qwen2_5_omni",
        4,
        {"modules": {LM: {"dp_size": 2}}, "schedule": "encoders_first"},
        {"microbatch_assignment": "sub_microbatches"},
        defers=False,
    ),
    "Entrain's algorithm 4, copies of the LM": Case(
        "qwen2_vl", 3, {LM: {"dp_size": 2}}, {"microbatch_assignment": "entrain"}, unlike=True
    ),
    "copies of the LM with two stages and with one": Case(
        "llava",
        4,
        {
            "modules": {
                VISION: {"replicas": [[stage(0, 4, 0)]]},
                LM: {"replicas": [[stage(0, 2, 1), stage(2, 4, 2)], [stage(0, 4, 3)]]},
            }
        },
        {"microbatch_assignment": "hierarchical"},
        unlike=True,
    ),
    "counts of the plan, copies of two stages and of one, each with a copy of vision": Case(
        "llava",
        5,
        {
            "replica_microbatches": [3, 1],
            "modules": {
                VISION: {"replicas": [[stage(0, 4, 0)], [stage(0, 4, 1)]]},
                LM: {"replicas": [[stage(0, 2, 2), stage(2, 4, 3)], [stage(0, 4, 4)]]},
            },
        },
        {"microbatch_assignment": "hierarchical", "per_device_train_batch_size": 5},
        unlike=True,
        counts=[[3, 1], [2, 1], [3, 1]],
    ),
    "counts of the plan, all forwards first, vision in the stages of each copy": Case(
        "qwen2_vl",
        5,
        {
            "schedule": "gpipe",
            "replica_microbatches": [5, 2],
            "modules": {
                VISION: {"replicas": [[stage(0, 2, 0), stage(2, 4, 1)], [stage(0, 4, 3)]]},
                LM: {"replicas": [[stage(0, 1, 0), stage(1, 3, 1), stage(3, 4, 2)], [stage(0, 2, 3), stage(2, 4, 4)]]},
            },
        },
        {"microbatch_assignment": "contiguous"},
        defers=False,
        unlike=True,
        counts=[[5, 2], [3, 2], [5, 2]],
    ),
    "counts of the plan, gradients of the LM divided in its backwards, one encoder for all": Case(
        "llava",
        4,
        {
            "replica_microbatches": [4, 1, 2],
            "modules": {
                VISION: {"replicas": [[stage(0, 4, 0)]]},
                LM: {"replicas": [[stage(0, 4, rank)] for rank in (1, 2, 3)], "sharding": {"zero_stage": 2}},
            },
        },
        {"microbatch_assignment": "disttrain"},
        defers=False,
        unlike=True,
        counts=[[4, 1, 2], [3, 1, 2], [4, 1, 2]],
    ),
    "reordered, both modules on the same ranks": Case(
        "llava",
        2,
        {"modules": {VISION: {"dp_size": 2}, LM: {"colocate_with": VISION}}, "schedule": "gpipe"},
        {"microbatch_assignment": "disttrain"},
        defers=False,
    ),
}


@dataclass(frozen=True)
class Arranged:
    """A step."""

    num_chunks: list[int]  # of each microbatch of the encoders
    lags: set[int]  # by how many turns the language model takes samples later than their encoders
    counts: list[int]  # microbatches of each copy of the language model
    num_tokens: int  # in the largest microbatch of the language model
    limit: int | None  # what it may have

    @classmethod
    def of(cls, step: StepPlan, workloads: Workloads) -> Arranged:
        lags = {
            turn - step.location_of[name, batch_index][1]
            for name, copies in step.microbatches.items()
            for copy in range(len(copies))
            for batch_index, turn in (step.consumer_turns(name, copy, LM) if name != LM else {}).items()
        }
        num_chunks = [len(chunks) for (name, _, _), chunks in step.chunks.items() if name != LM]
        sums = [
            workloads.tokens[LM][list(batch_indices)].sum()
            for replica in step.microbatches[LM]
            for batch_indices in replica
        ]
        counts = [len(microbatches) for microbatches in step.microbatches[LM]]
        return cls(num_chunks, lags, counts, int(max(sums)), workloads.token_limits.get(LM))


class Recorder(TrainerCallback):
    """Keeps the arrangement of every step."""

    def __init__(self):
        self.engine: Any = None
        self.steps: list[Arranged] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.engine.planner.sizes is not None
        self.steps.append(Arranged.of(self.engine.current_step, self.engine.current_workloads))


def arranged_run(case: Case) -> tuple[runs.Run, list[Arranged], list[float]]:
    """A run on this rank, its steps, and the share of deferred samples in its log."""
    recorder = Recorder()
    sizes = {"global_batch_size": GLOBAL_BATCH, "per_device_train_batch_size": MICROBATCH}
    data = tiny.make_dataset(case.family, NUM_SAMPLES, shapes=long_tailed())
    given = {**sizes, **STEPS, **case.arguments}
    trainer = runs.make_trainer(case.family, case.parallel, data=data, callbacks=[recorder], **given)
    recorder.engine = trainer.engine
    run = runs.run_of(trainer, evaluate=case.counts is not None)
    shares = [row["parallel/deferred_fraction"] for row in trainer.state.log_history if "loss" in row]
    return run, recorder.steps, shares


CORE = [
    "trained, eager as far as memory goes, copies of vision, stages of the LM",
    "a frozen tower, packed to a budget of tokens, copies of the LM",
    "copies of the LM with two stages and with one",
    "counts of the plan, gradients of the LM divided in its backwards, one encoder for all",
    "reordered, both modules on the same ranks",
]


@pytest.mark.parametrize("name", [deep(name, unless=name in CORE) for name in CASES])
def test_an_arranged_run_equals_the_stock_trainer(name: str):
    case = CASES[name]
    data = tiny.make_dataset(case.family, NUM_SAMPLES, shapes=long_tailed())
    freeze = runs.frozen(case.parallel)
    evaluate, sizes = case.counts is not None, {"per_device_train_batch_size": GLOBAL_BATCH, **STEPS}
    reference = runs.stock(case.family, freeze, data=data, evaluate=evaluate, **sizes)
    ranks = run_distributed(arranged_run, case.world_size, case)
    run, steps, shares = ranks[0]
    runs.assert_same_run(run, reference)
    if evaluate:
        assert run.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)
    assert all(other.logs == run.logs for other, _, _ in ranks)
    assert all((others, seen) == (steps, shares) for _, others, seen in ranks)
    assert len(steps) == len(shares) == 3
    assert any(len(set(step.counts)) > 1 for step in steps) == case.unlike
    assert case.counts in (None, [step.counts for step in steps])
    if case.defers:
        # A copy with fewer microbatches than the other has them less than every turn: its next one is two turns later.
        assert {0, 1} <= set().union(*(step.lags for step in steps)) <= ({0, 1, 2} if case.unlike else {0, 1})
        assert sum(shares) > 0 and max(max(step.num_chunks) for step in steps) in ((2, 3) if case.unlike else (2,))
    else:
        assert shares == [0, 0, 0]
    for step in steps:
        assert (step.limit is not None) == case.limited
        assert step.limit is None or step.num_tokens <= step.limit
