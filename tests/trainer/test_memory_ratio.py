"""`memory_limit_gib="auto"`: limits follow what the first steps allocate, alike on all ranks, resumed or not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.cost import RankMemory, analytic_costs, find_device
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.steps.step_planner import StepPlanner
from hf_mmparallel.trainer import loaders, oversized_samples
from hf_mmparallel.trainer.oversized_samples import MemoryRatio, allocated_since
from hf_mmparallel.world import World
from tests import tiny
from tests.distributed import run_distributed
from tests.plan.specs import model_spec

from . import runs

MIB = 2**20
TYPICAL = SampleSizes.uniform({"vision": 64, LANGUAGE_MODEL: 96}, 8, known=True)
STEPS = {"max_steps": 8, "warmup_steps": 0}
LAYOUT = {"vision": {}, LANGUAGE_MODEL: {"dp_size": 2}}


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged; accelerate's logger needs a process group or its own state."""
    lines: list[str] = []
    monkeypatch.setattr(oversized_samples, "logger", SimpleNamespace(info=lines.append, warning=lines.append))
    return lines


def planner() -> StepPlanner:
    spec = model_spec()
    plan = resolve_plan(spec, {"vision": ModulePlugin(), LANGUAGE_MODEL: ModulePlugin()})
    costs = analytic_costs(spec, find_device("cpu"))
    made = StepPlanner(costs, plan, sync_groups(spec, plan), 2, "hierarchical", memory_bytes=64 * MIB)
    return made.with_token_limits(TYPICAL)


def engine_of(predicted: float) -> Any:
    account = SimpleNamespace(predicted=lambda: RankMemory(activations=predicted))
    return SimpleNamespace(account=account, world=World())


def test_limits_follow_the_largest_ratio_of_a_few_steps(said: list[str]):
    own, measured = planner(), iter([9000.0, 110.0, 150.0, 120.0, 1.0])
    ratio = MemoryRatio(own, TYPICAL, lambda: next(measured))
    for position in (8, 16, 24, 32):
        assert ratio.limits_of(GlobalBatch((0,), 0, position)) is None
        ratio.saw_step(engine_of(100.0))  # the first step is not measured
    assert ratio.learned == (1.5, 0, 32)
    assert len(said) == 1 and "1.50 times" in said[0]
    ratio.saw_step(engine_of(100.0))
    limits = ratio.limits_of(GlobalBatch((0,), 0, 40))
    assert limits is not None and own.token_limits is not None
    assert all(limits[name] < own.token_limits[name] for name in own.token_limits)
    again = MemoryRatio(own, TYPICAL, lambda: None, ratio.learned)
    assert again.limits_of(GlobalBatch((0,), 0, 32)) is None
    assert again.limits_of(GlobalBatch((0,), 0, 40)) == again.limits_of(GlobalBatch((0,), 1, 8)) == limits


def test_less_than_predicted_makes_microbatches_larger_within_reason():
    own = planner()
    ratio = MemoryRatio(own, TYPICAL, lambda: 1.0)
    for _ in range(4):
        ratio.saw_step(engine_of(100.0))
    limits = ratio.limits_of(GlobalBatch((0,), 0, 8))
    assert ratio.learned is not None and ratio.learned[0] == 0.5
    assert limits is not None and own.token_limits is not None
    assert all(limits[name] > own.token_limits[name] for name in own.token_limits)


def test_the_cpu_counts_nothing():
    assert allocated_since(torch.device("cpu")) is None
    ratio = MemoryRatio(planner(), TYPICAL, lambda: None)
    for _ in range(4):
        ratio.saw_step(engine_of(100.0))
    assert ratio.learned is None and ratio.limits_of(GlobalBatch((0,), 0, 8)) is None


def learning_run(folder: str, checkpoint: str | None = None, **arguments: Any) -> tuple[runs.Run, list[Any], Any]:
    """A run whose ranks seem to allocate much more than what is predicted."""
    loaders.allowed_bytes = lambda args, device: 6.0 * MIB  # type: ignore[assignment]
    loaders.allocated_since = lambda device: (4.4 if dist.get_rank() else 1.0) * MIB  # type: ignore[assignment]
    trainer = runs.make_trainer("llava", LAYOUT, folder, memory_limit_gib="auto", **STEPS, **arguments)
    seen: list[Any] = []
    train_step = trainer.engine.train_step

    def recorded(batch: Any, step: int) -> Any:
        seen.append((batch.step.microbatches, dict(batch.workloads.token_limits)))
        return train_step(batch, step)

    trainer.engine.train_step = recorded
    run = runs.run_of(trainer, checkpoint=checkpoint)
    return run, seen, trainer._run.steps.memory_ratio.learned


def learned_and_resumed(folder: str) -> tuple[Any, Any]:
    first = learning_run(folder, save_strategy="steps", save_steps=6)
    return first, learning_run(folder, str(Path(folder) / "checkpoint-6"))


@pytest.mark.distributed
def test_ranks_learn_together_and_a_resumed_run_goes_on_as_it_was(tmp_path: Path):
    reference = runs.stock("llava", data=tiny.make_dataset("llava", runs.SAMPLES), **STEPS)
    ranks = run_distributed(learned_and_resumed, 3, str(tmp_path))
    (run, steps, learned), (_, rest, kept) = ranks[0]
    runs.assert_same_run(run, reference)
    assert all(first[1:] == (steps, learned) for first, _ in ranks)
    assert learned is not None and kept == learned
    limits = [own for _, own in steps]
    assert limits[0] == limits[3] != limits[4] == limits[7]
    assert rest == steps[6:]
