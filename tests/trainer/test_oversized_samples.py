"""Memory that steps are planned for, limits that follow what they allocate, and samples that are above them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.arrange import arrange_step
from hf_mmparallel.cost import RankMemory, analytic_costs, find_device
from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, Workloads, resolve_plan, sync_groups
from hf_mmparallel.planning.answer import check_memory
from hf_mmparallel.planning.settings import Settings
from hf_mmparallel.trainer import loaders, start_report, training_sizes
from hf_mmparallel.trainer.loaders import training_planner
from hf_mmparallel.trainer.training_sizes import LargeSamples, LimitWatch, MemoryRatio, StartSizes, allocated_since
from hf_mmparallel.world import World
from tests import tiny
from tests.distributed import run_distributed
from tests.plan.specs import model_spec
from tests.trainer.contexts import arguments

from . import runs
from .moments import AfterSteps

MIB = 2**20
TYPICAL = SampleSizes.uniform({"vision": 64, LANGUAGE_MODEL: 96}, 8, known=True)
LAYOUT = {"vision": {}, LANGUAGE_MODEL: {"dp_size": 2}}
STEPS: dict[str, Any] = {"max_steps": 6, "warmup_steps": 0}
LIMIT = 60


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged; accelerate's logger needs a process group or its own state."""
    lines: list[str] = []
    monkeypatch.setattr(training_sizes, "logger", SimpleNamespace(info=lines.append, warning=lines.append))
    return lines


def planner(device: str = "cpu", memory_bytes: float | None = 64 * MIB) -> StepPlanner:
    spec = model_spec()
    plan = resolve_plan(spec, {"vision": ModulePlugin(), LANGUAGE_MODEL: ModulePlugin()})
    costs, groups = analytic_costs(spec, find_device(device)), sync_groups(spec, plan)
    return StepPlanner(costs, plan, groups, 2, "hierarchical", memory_bytes=memory_bytes).with_token_limits(TYPICAL)


@pytest.mark.parametrize(
    ("device", "limit", "gib"), [("a100", None, 71.19), ("a100", 10.0, 10.0), ("cpu", None, None)]
)
def test_memory_is_the_users_or_that_of_the_device_that_all_ranks_know(device, limit, gib):
    found = training_planner(planner(device, None), arguments(memory_limit_gib=limit), None).memory_bytes
    assert found == (None if gib is None else gib * 2**30)
    settings = Settings(gpu_type=device, memory_limit_gib=limit)  # of the command line
    assert (settings.memory_bytes, settings.memory_gib) == (found, gib)


def test_a_plan_above_ninety_percent_of_a_device_does_not_pass_a_dry_run():
    answer: Any = SimpleNamespace(
        settings=Settings(gpu_type="a100"), plan=SimpleNamespace(stages_of_rank=lambda rank: [(LANGUAGE_MODEL, 0, 0)])
    )
    answer.memory, answer.peak_bytes = {0: RankMemory(activations=75 * 2**30)}, 75 * 2**30
    with pytest.raises(ValueError, match="75.0 GiB, 3.81 more than the 71.2 GiB"):
        check_memory(answer)
    answer.memory, answer.peak_bytes = {0: RankMemory(activations=71 * 2**30)}, 71 * 2**30
    check_memory(answer)


def see_steps(ratio: MemoryRatio, num_steps: int) -> None:
    account = SimpleNamespace(predict=lambda: RankMemory(activations=100.0))
    for _ in range(num_steps):
        ratio.saw_step(SimpleNamespace(account=account, world=World()))  # type: ignore[arg-type]


def test_limits_follow_the_largest_ratio_of_a_few_steps(said: list[str]):
    own, measured = planner(), iter([9000.0, 110.0, 150.0, 120.0, 1.0])  # the first step is not measured
    ratio = MemoryRatio(own, TYPICAL, lambda: next(measured))
    for position in (8, 16, 24, 32):
        assert ratio.limits_of(GlobalBatch((0,), 0, position)) is None
        see_steps(ratio, 1)
    assert ratio.learned == (1.5, 0, 32)
    assert len(said) == 1 and "1.50 times" in said[0]
    see_steps(ratio, 1)
    limits = ratio.limits_of(GlobalBatch((0,), 0, 40))
    assert limits is not None and own.token_limits is not None
    assert all(limits[name] < own.token_limits[name] for name in own.token_limits)
    again = MemoryRatio(own, TYPICAL, lambda: None, ratio.learned)
    assert again.limits_of(GlobalBatch((0,), 0, 32)) is None
    assert again.limits_of(GlobalBatch((0,), 0, 40)) == again.limits_of(GlobalBatch((0,), 1, 8)) == limits


def test_less_than_predicted_makes_microbatches_larger_within_reason():
    own = planner()
    ratio = MemoryRatio(own, TYPICAL, lambda: 1.0)
    see_steps(ratio, 4)
    limits = ratio.limits_of(GlobalBatch((0,), 0, 8))
    assert ratio.learned is not None and ratio.learned[0] == 0.5
    assert limits is not None and own.token_limits is not None
    assert all(limits[name] > own.token_limits[name] for name in own.token_limits)


def test_the_cpu_counts_nothing():
    assert allocated_since(torch.device("cpu")) is None
    ratio = MemoryRatio(planner(), TYPICAL, lambda: None)
    see_steps(ratio, 4)
    assert ratio.learned is None and ratio.limits_of(GlobalBatch((0,), 0, 8)) is None


def learning_run(folder: str, checkpoint: str | None = None, **arguments: Any) -> tuple[runs.Run, list[Any], Any]:
    """A run whose ranks seem to allocate much more than what is predicted."""
    loaders.allowed_bytes = lambda args, device: 6.0 * MIB  # type: ignore[assignment]
    loaders.allocated_since = lambda device: (4.4 if dist.get_rank() else 1.0) * MIB  # type: ignore[assignment]
    trainer = runs.make_trainer("llava", LAYOUT, folder, memory_limit_gib="auto", **STEPS, **arguments)
    engine, seen = trainer.engine, []

    def note(_: int) -> None:
        seen.append((engine.current_step.microbatches, dict(engine.current_workloads.token_limits)))

    trainer.add_callback(AfterSteps(note))
    run = runs.run_of(trainer, checkpoint=checkpoint)
    return run, seen, trainer._run.steps.memory_ratio.learned


def learned_and_resumed(folder: Path) -> tuple[Any, Any]:
    first = learning_run(str(folder), save_strategy="steps", save_steps=4)
    return first, learning_run(str(folder), str(folder / "checkpoint-4"))


@pytest.mark.distributed
@pytest.mark.deep
def test_ranks_learn_together_and_a_resumed_run_goes_on_as_it_was(tmp_path: Path):
    ranks = run_distributed(learned_and_resumed, 3, tmp_path)
    (run, steps, learned), (_, rest, kept) = ranks[0]
    runs.assert_same_run(run, runs.stock("llava", **STEPS))
    assert all(first[1:] == (steps, learned) for first, _ in ranks)
    assert learned is not None and kept == learned
    limits = [own for _, own in steps]
    assert limits[0] == limits[3] != limits[4] == limits[5]
    assert rest == steps[4:]


def test_samples_are_compared_with_the_limits_before_the_first_step():
    sizes = SampleSizes.of_sequences({"vision": [[5], [30], [5], [5]], LANGUAGE_MODEL: [[10], [10], [25], [10]]})
    found = LargeSamples.of(StartSizes(sizes, True), {"vision": 20, LANGUAGE_MODEL: 24})
    assert "20 tokens in `vision` and 24 tokens in `language_model`; 2 of 4" in str(found)
    assert "30 tokens in `vision` of at most 20" in found.warning and "25 tokens" in found.warning
    fits = LargeSamples.of(StartSizes(sizes, False), {LANGUAGE_MODEL: 25})
    assert "25 tokens in `language_model`; all 4" in str(fits) and not fits.warning


def test_a_sample_above_the_limit_is_told_of_once(said: list[str]):
    plan, watch = planner().plan, LimitWatch()
    alike = Workloads.alike(plan.modules, 4)
    tokens = {**alike.tokens, "vision": np.array([1, 1, 9, 1])}
    for of_vision in ({}, {"vision": 8}, {"vision": 8}):
        assert not said or of_vision
        work = Workloads(alike.forward_ms, alike.backward_ratio, tokens, of_vision)
        watch.saw(arrange_step(plan, [4, 5, 6, 7], work, 2), work)
    assert len(said) == 1 and "Sample 6 has 9 tokens in `vision`" in said[0]


def data() -> Any:
    """Samples of which every other has more tokens than a microbatch may have."""
    shapes = [tiny.Shape(index % 3, 0, 90 if index % 2 else 6) for index in range(runs.SAMPLES)]
    return tiny.make_dataset("llava", runs.SAMPLES, shapes=shapes)


def limited_run() -> tuple[runs.Run, list[str], list[tuple[int, int]]]:
    """A run, what was said, and for each microbatch of the last step its samples and tokens."""
    said: list[str] = []
    for module in (training_sizes, start_report):
        module.logger = SimpleNamespace(warning=said.append)  # type: ignore[assignment]
    trainer = runs.make_trainer("llava", LAYOUT, data=data(), max_tokens_per_microbatch=LIMIT, max_steps=3)
    run = runs.run_of(trainer)
    step, tokens = trainer.engine.current_step, trainer.engine.current_sizes.tokens[LANGUAGE_MODEL]
    found = [(len(own), int(tokens[list(own)].sum())) for row in step.microbatches[LANGUAGE_MODEL] for own in row]
    return run, said, found


@pytest.mark.distributed
def test_a_run_with_samples_above_the_limit_equals_the_stock_trainer():
    run, said, microbatches = run_distributed(limited_run, 3)[0]
    runs.assert_same_run(run, runs.stock("llava", data=data(), max_steps=3))
    assert any(tokens > LIMIT for _, tokens in microbatches)
    assert all(tokens <= LIMIT or count == 1 for count, tokens in microbatches)
    assert len(said) == 1 and "11 of 22" in said[0]
