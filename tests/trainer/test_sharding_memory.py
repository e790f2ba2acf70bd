"""The bytes of live tensors under ZeRO stages: the peak that was predicted, and state of the theoretical size."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import memory_error
import pytest
import torch.distributed as dist
import transformers
from live_bytes import LiveBytes
from memory_cases import Case
from transformers import TrainerCallback

from hf_mmparallel.cost import analytic_costs
from hf_mmparallel.plan.plugin import ZERO_STAGES
from tests import tiny
from tests.distributed import run_distributed

from . import runs

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]

VISION, LM = "vision", "language_model"
LAYOUTS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "dp": (3, {LM: {"dp_size": 2}}),
    "dp of both": (4, {VISION: {"dp_size": 2}, LM: {"dp_size": 2}}),
    "dp in groups": (5, {LM: {"dp_size": 4, "shard_size": 2}}),
    "dp and tp": (5, {LM: {"dp_size": 2, "tp_size": 2}}),
    "dp and pp": (5, {LM: {"dp_size": 2, "pp_size": 2}}),
    "dp and cp": (5, {LM: {"dp_size": 2, "cp_size": 2}}),
    "shared ranks": (2, {VISION: {"dp_size": 2}, LM: {"colocate_with": VISION}}),
}
CASES = {
    f"{name}, stage {stage}": (stage, *layout) for stage in ZERO_STAGES if stage for name, layout in LAYOUTS.items()
}


class Meter(TrainerCallback):
    """Live bytes right before the optimizer's second step, and the peak of the step."""

    def __init__(self, counter: LiveBytes):
        self.counter = counter
        self.state_bytes = self.peak_bytes = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gc.collect()
        self.state_bytes = self.counter.live_bytes

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.peak_bytes = self.counter.peak_bytes
        self.counter.reset()


def measured(case: Case) -> dict[str, float]:
    """Peak of this rank, predicted and measured."""
    runs.draw_nothing()
    with LiveBytes() as counter:
        trainer = memory_error.make_trainer(case, shrink=False)
        meter = Meter(counter)
        trainer.add_callback(meter)
        trainer.train()
    engine = trainer.engine
    costs = replace(analytic_costs(engine.spec, engine.costs.device, 4), packing=engine.costs.packing)
    predicted, _ = memory_error.predict(trainer, costs)
    return {"peak": meter.peak_bytes, "predicted": predicted[dist.get_rank()]}


def _sharded(modules: dict[str, dict[str, Any]], stage: int) -> dict[str, dict[str, Any]]:
    """The layout with a stage for each module that has copies."""
    with_copies = {"dp_size", "colocate_with"}
    return {
        name: {**settings, "zero_stage": stage} if with_copies & settings.keys() else settings
        for name, settings in modules.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_every_rank_is_the_predicted_one(name: str):
    stage, world_size, modules = CASES[name]
    ranks = run_distributed(measured, world_size, Case(name, world_size, _sharded(modules, stage)))
    errors = [rank["predicted"] / rank["peak"] - 1 for rank in ranks]
    assert max(map(abs, errors)) <= 0.15, ([f"{error:+.1%}" for error in errors], ranks)


def state_of(plan: dict[str, Any]) -> tuple[int, int]:
    """Live bytes of this rank right before the optimizer's second step, and the bytes of all weights."""
    runs.draw_nothing()
    with LiveBytes() as counter:
        config = transformers.LlamaConfig(**{**tiny.TEXT, "hidden_size": 256, "intermediate_size": 512})
        model = transformers.LlamaForCausalLM(config)
        num_bytes = 4 * model.num_parameters()
        trainer = runs.make_trainer("llama", plan, model=model, optim="adamw_torch", max_steps=2)
        meter = Meter(counter)
        trainer.add_callback(meter)
        del model
        trainer.train()
    return meter.state_bytes, num_bytes


@pytest.mark.parametrize("stage", ZERO_STAGES)
@pytest.mark.parametrize("num_copies", [2, 4])
def test_state_has_its_theoretical_size(stage: int, num_copies: int):
    """The moments of AdamW, weights, and gradients, which stage 1 has divided by the optimizer's step, too."""
    weights, others = 1 / num_copies if stage == 3 else 1, 1 / num_copies if stage else 1
    for state, num_bytes in run_distributed(state_of, num_copies, {LM: {"dp_size": num_copies, "zero_stage": stage}}):
        assert state == pytest.approx(num_bytes * (weights + 3 * others), rel=0.05)
