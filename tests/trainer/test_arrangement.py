"""Runs whose samples are arranged by workload, with deferral, give what the stock Trainer gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hf_mmparallel.arrange.arrangements import contiguous
from hf_mmparallel.plan import LANGUAGE_MODEL, ParallelPlan, StepPlan, Workloads
from hf_mmparallel.plan.step_plan import Replicas
from tests import tiny
from tests.distributed import run_distributed

from . import runs
from .moments import AfterSteps
from .test_unlike_copies import copies

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
    modules: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)  # what it has beside its modules
    limited: bool = False  # whether microbatches of the language model may only have so many tokens
    defers: bool = True  # whether the language model takes samples of an encoder's microbatch a microbatch later
    unlike: bool = False  # whether one copy of the language model has more microbatches than the other
    counts: list[list[int]] | None = None  # microbatches of each copy in each step, if the plan says them

    @property
    def data(self) -> list[dict[str, Any]]:
        return tiny.make_dataset(self.family, NUM_SAMPLES, shapes=long_tailed())


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
        {VISION: {"dp_size": 2}, LM: {"pp_size": 2}},
        {"microbatch_assignment": "tapered", "memory_limit_gib": 8 / 2**10},
        {"schedule": "eager"},
        limited=True,
    ),
    "a frozen tower, packed to a budget of tokens, copies of the LM": Case(
        "qwen2_vl",
        3,
        {VISION: {"freeze": "tower"}, LM: {"dp_size": 2}},
        {"packing": True, "max_tokens_per_microbatch": 170},
        limited=True,
    ),
    "two encoders, sub-microbatches, encoders first and last, copies of a frozen LM": Case(
        "qwen2_5_omni",
        4,
        {LM: {"dp_size": 2, "freeze": True}},
        {"microbatch_assignment": "sub_microbatches"},
        {"schedule": "encoders_first"},
        defers=False,
    ),
    "copies of the LM with two stages and with one": Case(
        "llava",
        4,
        {VISION: copies([(0, 4, (0,))]), LM: copies([(0, 2, (1,)), (2, 4, (2,))], [(0, 4, (3,))])},
        {"microbatch_assignment": "hierarchical"},
        unlike=True,
    ),
    "counts of the plan, all forwards first, vision in the stages of each copy": Case(
        "qwen2_vl",
        5,
        {
            VISION: copies([(0, 2, (0,)), (2, 4, (1,))], [(0, 4, (3,))]),
            LM: copies([(0, 1, (0,)), (1, 3, (1,)), (3, 4, (2,))], [(0, 2, (3,)), (2, 4, (4,))]),
        },
        {"microbatch_assignment": "contiguous"},
        {"schedule": "gpipe", "replica_microbatches": [5, 2]},
        defers=False,
        unlike=True,
        counts=[[5, 2], [3, 2], [5, 2]],
    ),
    "counts of the plan, gradients of the LM divided in its backwards, one encoder for all": Case(
        "llava",
        4,
        {
            VISION: copies([(0, 4, (0,))]),
            LM: {**copies(*[[(0, 4, (rank,))] for rank in (1, 2, 3)]), "sharding": {"zero_stage": 2}},
        },
        {"microbatch_assignment": "disttrain"},
        {"replica_microbatches": [4, 1, 2]},
        defers=False,
        unlike=True,
        counts=[[4, 1, 2], [3, 1, 2], [4, 1, 2]],
    ),
    "reordered, both modules on the same ranks": Case(
        "llava",
        2,
        {VISION: {"dp_size": 2}, LM: {"colocate_with": VISION}},
        {"microbatch_assignment": "disttrain"},
        {"schedule": "gpipe"},
        defers=False,
    ),
}


@dataclass(frozen=True)
class Arranged:
    """A step."""

    num_chunks: int  # of the microbatch of the encoders that has most
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
        num_chunks = max(len(chunks) for (name, _, _), chunks in step.chunks.items() if name != LM)
        sums = [workloads.tokens[LM][list(own)].sum() for replica in step.microbatches[LM] for own in replica]
        counts = [len(microbatches) for microbatches in step.microbatches[LM]]
        return cls(num_chunks, lags, counts, int(max(sums)), workloads.token_limits.get(LM))


def arranged_run(case: Case) -> tuple[runs.Run, list[Arranged], list[float]]:
    """A run on this rank, its steps, and the share of deferred samples in its log."""
    sizes = {"global_batch_size": GLOBAL_BATCH, "per_device_train_batch_size": MICROBATCH, **STEPS}
    layout = {"modules": case.modules, **case.plan}
    trainer = runs.make_trainer(case.family, layout, data=case.data, **sizes, **case.arguments)
    engine, steps = trainer.engine, []

    def note(step: int) -> None:
        steps.append(Arranged.of(engine.current_step, engine.current_workloads))

    trainer.add_callback(AfterSteps(note))
    run = runs.run_of(trainer, evaluate=case.counts is not None)
    shares = [row["parallel/deferred_fraction"] for row in trainer.state.log_history if "loss" in row]
    return run, steps, shares


CORE = (
    "trained, eager as far as memory goes, copies of vision, stages of the LM",
    "counts of the plan, gradients of the LM divided in its backwards, one encoder for all",
)


@pytest.mark.parametrize("name", runs.deep_but(CASES, *CORE))
def test_an_arranged_run_equals_the_stock_trainer(name: str):
    case = CASES[name]
    evaluate, sizes = case.counts is not None, {"per_device_train_batch_size": GLOBAL_BATCH, **STEPS}
    reference = runs.stock(case.family, runs.frozen(case.modules), data=case.data, evaluate=evaluate, **sizes)
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
        assert sum(shares) > 0 and max(step.num_chunks for step in steps) in ((2, 3) if case.unlike else (2,))
    else:
        assert shares == [0, 0, 0]
    for step in steps:
        assert (step.limit is not None) == case.limited
        assert step.limit is None or step.num_tokens <= step.limit
