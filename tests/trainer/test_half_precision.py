"""Weights in bfloat16: gradients add up in float32 over microbatches, chunks and replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_mmparallel.modeling.dtensors import local
from tests import tiny
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

LM = "language_model"
# Layouts, and the number of terms that a gradient is the sum of.
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {LM: {"dp_size": 2}},
    "tp2": {LM: {"tp_size": 2}},
    "pp2, recomputed": {LM: {"pp_size": 2, "activation_checkpointing": True}},
}


class _Gradients(TrainerCallback):
    """What the optimizer is about to get, before it is rounded."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        named = dict(model.named_parameters())
        self.found = {name: local(p.grad).double() for name, p in named.items() if p.grad is not None}
        self.dtypes = {p.grad.dtype for p in named.values() if p.grad is not None}


def _step(parallel: dict[str, Any]) -> dict[str, Any]:
    """One step of 32 microbatches, with the exact sum of what each of them gave, and their sum in bfloat16."""
    callback = _Gradients()
    model: Any = tiny.FAMILIES["llama_tied"]().to(torch.bfloat16)
    trainer = runs.make_trainer(
        "llama",
        parallel,
        model=model,
        data=tiny.make_dataset("llama", 32),
        max_steps=1,
        max_grad_norm=0.0,
        global_batch_size=32,
        per_device_train_batch_size=1,
        callbacks=[callback],
        warmup_steps=0,
        optim="adamw_torch",
    )
    exact, narrow = {}, {}
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            exact[name] = torch.zeros(local(parameter).shape, dtype=torch.float64)
            narrow[name] = torch.zeros(local(parameter).shape, dtype=torch.bfloat16)

            def add(gradient: torch.Tensor, name: str = name) -> None:
                exact[name] += local(gradient).double()
                narrow[name] += local(gradient).bfloat16()

            parameter.register_hook(add)
    trainer.train()
    engine = trainer.engine
    for name in exact:
        (shard,) = engine.shards[name].on_rank(engine.rank)
        if len(shard.holders) > 1 and engine.plan.modules[LM].tp_size == 1:  # else each rank has the whole one
            for sums in (exact, narrow):
                dist.all_reduce(sums[name])
    scale = max(trainer._run.steps.totals.num_targets, 1)
    errors = {"kept": 0.0, "narrow": 0.0}
    for name, want in exact.items():
        size = want.abs().max()
        errors["kept"] = max(errors["kept"], float((callback.found[name] * scale - want).abs().max() / size))
        errors["narrow"] = max(errors["narrow"], float((narrow[name].double() - want).abs().max() / size))
    counted = [name for name, p in trainer.model.named_parameters() if any(p is own for own in engine.counted)]
    squares = sum((exact[name].square().sum() for name in counted), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(squares)
    (log,) = runs.step_logs(trainer)
    dtypes = {str(p.dtype) for p in trainer.model.parameters()}
    return {
        **errors,
        "norm": float(squares.sqrt()) / scale,
        "logged": log["grad_norm"],
        "gradients": {str(dtype) for dtype in callback.dtypes},
        "weights": dtypes,
    }


def _steps() -> list[dict[str, Any]]:
    return [_step(parallel) for parallel in LAYOUTS.values()]


def test_gradients_of_bfloat16_weights_add_up_in_float32():
    for of_rank in run_distributed(_steps, 2, timeout=100):
        for found in of_rank:
            assert found["weights"] == {"torch.bfloat16"} and found["gradients"] == {"torch.float32"}
            assert found["kept"] < 2e-6 and found["narrow"] > 3e-3, of_rank
            assert found["logged"] == pytest.approx(found["norm"], rel=1e-5)
