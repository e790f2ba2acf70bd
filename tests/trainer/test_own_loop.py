"""A plan in a loop of one's own gives the losses, norms and weights of the Trainer, and of the stock one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.optim import AdamW
from transformers import LlavaForConditionalGeneration, Trainer, get_cosine_schedule_with_warmup

from hf_mmparallel import prepare
from tests import tiny
from tests.distributed import run_distributed

from . import runs

LM, VISION = "language_model", "vision"
FAMILY = "llava"
RATE, EPSILON, STEPS = 1e-3, 1e-4, 4
ARGUMENTS: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": RATE, "adam_epsilon": EPSILON}
BATCHES = {"global_batch_size": runs.GLOBAL_BATCH, "per_device_train_batch_size": 2}
TWO = {VISION: {}, LM: {}}
TP_AND_COPIES = {VISION: {"dp_size": 2}, LM: {"tp_size": 2}}
STAGES_AND_SLICES = {VISION: {"dp_size": 2, "zero_stage": 2}, LM: {"pp_size": 2}}


def groups_of(model: Any) -> list[dict[str, Any]]:
    """The groups of the stock Trainer, with weight decay and without."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name in decayed], "weight_decay": runs.COMMON["weight_decay"]},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


class Loop:
    """A loop with the optimizer and the schedule of the Trainer's run."""

    def __init__(self, plan: Any, accelerator: Accelerator | None = None, **settings: Any):
        torch.set_num_threads(1)
        model = tiny.FAMILIES[FAMILY]()
        self.accelerator = accelerator or Accelerator(cpu=True)
        self.data = tiny.make_dataset(FAMILY, runs.SAMPLES)
        optimizer = AdamW(groups_of(model), lr=RATE, eps=EPSILON)
        self.schedule = get_cosine_schedule_with_warmup(optimizer, runs.COMMON["warmup_steps"], STEPS)
        words = {"data_collator": tiny.collate(FAMILY), "seed": runs.COMMON["seed"], **BATCHES, **settings}
        self.model, self.optimizer, self.loader = prepare(self.accelerator, model, optimizer, self.data, plan, **words)
        assert self.optimizer is optimizer
        self.logs: list[dict[str, float]] = []

    def run(self, num_steps: int = STEPS) -> runs.Run:
        """Trains up to a step; the weights on rank 0."""
        while self.model.num_steps < num_steps:
            for step in self.loader:
                rate = self.schedule.get_last_lr()[0]
                loss = self.model.step(step)
                norm = self.model.clip_grad_norm_(runs.COMMON["max_grad_norm"])
                self.optimizer.step()
                self.schedule.step()
                self.logs.append({"loss": float(loss), "grad_norm": float(norm), "learning_rate": rate})
                if self.model.num_steps == num_steps:
                    break
        whole = self.model.gather()
        weights = None if whole is None else {k: v.detach().clone() for k, v in whole.state_dict().items()}
        return runs.Run(self.logs, weights)

    def resumed(self, folder: Path) -> runs.Run:
        """Goes on from a state to the end."""
        self.model.load_state(folder, self.schedule)
        return self.run()


def two_ranks(folder: Path) -> dict[str, Any]:
    trainer = runs.saving_run(FAMILY, folder / "trainer", TWO, **ARGUMENTS)
    loop = Loop(TWO)
    loop.run(2)
    loop.model.save_state(folder / "state", loop.schedule)
    straight = loop.run()
    straight.metrics = loop.model.evaluate(loop.data[:7])
    loop.model.save_pretrained(folder / "model")
    resumed = Loop(TWO).resumed(folder / "trainer" / "checkpoint-2")
    AcceleratorState._reset_state()
    return {
        "Trainer": trainer,
        "straight": straight,
        "from a Trainer's checkpoint": resumed,
        "bf16": Loop(TWO, Accelerator(cpu=True, mixed_precision="bf16")).run(),
        "Trainer, bf16": runs.parallel_run(FAMILY, TWO, bf16=True, **ARGUMENTS),
        "Trainer, from a loop's state": runs.saving_run(FAMILY, folder / "other", TWO, folder / "state", **ARGUMENTS),
    }


def four_ranks(folder: Path) -> dict[str, Any]:
    loop = Loop(TP_AND_COPIES)
    loop.run(2)
    loop.model.save_state(folder / "four", loop.schedule)
    return {
        "straight": loop.run(),
        "another plan": Loop(STAGES_AND_SLICES).resumed(folder / "four"),
        "from two ranks": Loop(STAGES_AND_SLICES).resumed(folder / "state"),
    }


@pytest.fixture(scope="module")
def reference() -> runs.Run:
    return runs.stock(FAMILY, evaluate=True, per_device_eval_batch_size=8, **ARGUMENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loops")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, runs.Run]]:
    return run_distributed(two_ranks, 2, folder, timeout=200)


@pytest.fixture(scope="module")
def four(folder: Path, two: Any) -> list[dict[str, runs.Run]]:
    return run_distributed(four_ranks, 4, folder, timeout=200)


def second_half(run: runs.Run) -> runs.Run:
    return runs.Run(run.logs[2:], run.weights)


@pytest.mark.distributed
def test_a_loop_on_two_ranks_is_the_trainer(two: Any, reference: runs.Run, folder: Path):
    ours = two[0]
    assert ours["straight"].logs == ours["Trainer"].logs and ours["bf16"].logs == ours["Trainer, bf16"].logs
    assert ours["bf16"].logs != ours["straight"].logs
    runs.assert_same_run(ours["straight"], reference)
    runs.assert_same_run(ours["from a Trainer's checkpoint"], second_half(reference))
    for rank in two:
        assert rank["straight"].logs == ours["straight"].logs
        assert rank["straight"].metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)
    saved = LlavaForConditionalGeneration.from_pretrained(folder / "model").state_dict()
    for name, want in (ours["straight"].weights or {}).items():
        assert torch.equal(saved[name], want)
        got = (ours["Trainer, from a loop's state"].weights or {})[name]
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.distributed
def test_a_loop_on_four_ranks_goes_on_under_another_plan(four: Any, reference: runs.Run):
    runs.assert_same_run(four[0]["straight"], reference)
    for name in ("another plan", "from two ranks"):
        runs.assert_same_run(four[0][name], second_half(reference))
        assert all(rank[name].logs == four[0][name].logs for rank in four)


# On one process, without a launch.


@pytest.fixture
def loop() -> Loop:
    return Loop({})


def test_one_process_has_the_same_loop(loop: Loop, reference: runs.Run):
    runs.assert_same_run(loop.run(), reference)
    assert loop.accelerator.mixed_precision == "no"  # nothing has reset its state
    assert loop.model.num_steps == STEPS and len(loop.loader) == 3 and loop.loader.epoch == 1


def test_steps_are_run_in_order_and_epochs_left_early_go_on(loop: Loop, tmp_path: Path):
    steps = iter(loop.loader)
    first = next(steps)
    losses = [float(loop.model.step(first)) for _ in range(2)]  # gradients are not added up
    norm = float(loop.model.clip_grad_norm_(math.inf))
    assert losses[0] == losses[1] and norm == pytest.approx(2.2447469, rel=1e-4)
    second = next(steps)
    with pytest.raises(ValueError, match="StepBatch"):
        loop.model.step(first)
    loop.model.save_state(tmp_path / "state", loop.schedule)  # before the second is run
    again = next(iter(loop.loader))
    assert again.global_batch == second.global_batch
    loop.loader.set_epoch(1)
    other = next(iter(loop.loader))
    assert other.global_batch.epoch == 1
    loop.model.load_state(tmp_path / "state", loop.schedule)
    assert loop.model.num_steps == 2 and loop.loader.epoch == 0
    rest = [step.global_batch.samples for step in loop.loader]
    assert rest[0] == second.global_batch.samples and len(rest) == 2 and loop.loader.epoch == 1
