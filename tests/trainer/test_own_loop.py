"""A plan in a loop of one's own gives the losses, norms and weights of the Trainer, and of the stock one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, get_cosine_schedule_with_warmup

from hf_mmparallel import prepare
from tests import tiny
from tests.distributed import run_distributed

from . import runs

LM, VISION = "language_model", "vision"
BATCHES = {"global_batch_size": runs.GLOBAL_BATCH, "per_device_train_batch_size": 2}


def groups_of(model: Any) -> list[dict[str, Any]]:
    """The groups of the stock Trainer, with weight decay and without."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name in decayed], "weight_decay": runs.COMMON["weight_decay"]},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


class Loop:
    """A loop with the optimizer and the schedule of the runs of the Trainer."""

    def __init__(self, family: str, plan: Any, cls: Any = torch.optim.SGD, **settings: Any):
        torch.set_num_threads(1)
        whole = tiny.FAMILIES[family]()
        optimizer = cls(groups_of(whole), lr=runs.COMMON["learning_rate"])
        self.schedule = get_cosine_schedule_with_warmup(optimizer, 1, runs.COMMON["max_steps"])
        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer, self.loader = prepare(
            self.accelerator,
            whole,
            optimizer,
            tiny.make_dataset(family, runs.SAMPLES),
            plan,
            data_collator=tiny.collate(family),
            **{**BATCHES, "seed": runs.COMMON["seed"], **settings},
        )
        self.logs: list[dict[str, float]] = []
        assert self.optimizer is optimizer

    def run(self, num_steps: int) -> runs.Run:
        """Trains up to a step; the weights on rank 0."""
        while self.model.num_steps < num_steps:
            for step in self.loader:
                loss = self.model.step(step)
                norm = self.model.clip_grad_norm_(runs.COMMON["max_grad_norm"])
                rate = self.schedule.get_last_lr()[0]
                self.optimizer.step()
                self.schedule.step()
                self.logs.append({"loss": float(loss), "grad_norm": float(norm), "learning_rate": rate})
                if self.model.num_steps == num_steps:
                    break
        whole = self.model.gather()
        weights = None if whole is None else {k: v.detach().clone() for k, v in whole.state_dict().items()}
        return runs.Run(self.logs, weights)


def loop_run(family: str, plan: Any) -> runs.Run:
    return Loop(family, plan).run(4)


@pytest.mark.distributed
def test_two():
    reference = runs.stock("llava")
    ranks = run_distributed(loop_run, 2, "llava", {VISION: {}, LM: {}})
    runs.assert_same_run(ranks[0], reference)
    assert ranks[1].logs == ranks[0].logs
