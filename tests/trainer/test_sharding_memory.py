"""The bytes of live tensors under ZeRO stages: the peak that was predicted, and state of the theoretical size."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import memory_error
import pytest
import torch.distributed as dist
from live_bytes import LiveBytes
from memory_cases import Case
from transformers import TrainerCallback

from hf_mmparallel.cost import analytic_costs
from hf_mmparallel.plan.plugin import ZERO_STAGES
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
    """Peak of this rank, predicted and measured, its state before the optimizer's step, and its parameters' bytes."""
    runs.draw_nothing()
    with LiveBytes() as counter:
        trainer = memory_error.make_trainer(case, shrink=False)
        meter = Meter(counter)
        trainer.add_callback(meter)
        trainer.train()
    engine = trainer.engine
    costs = replace(analytic_costs(engine.spec, engine.costs.device, 4), packing=engine.costs.packing)
    predicted, _ = memory_error.predict(trainer, costs)
    sizes = [4 * p.num_elements for module in engine.spec.modules.values() for p in module.parameters]
    return {
        "peak": meter.peak_bytes,
        "predicted": predicted[dist.get_rank()],
        "state": meter.state_bytes,
        "weights": sum(sizes),
    }


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


@pytest.mark.parametrize("stage", ZERO_STAGES)
@pytest.mark.parametrize("num_copies", [2, 4])
def test_state_has_its_theoretical_size(stage: int, num_copies: int):
    """Before the optimizer's step: its two moments, and gradients, which stage 1 divides by then, too."""
    modules = {VISION: {"dp_size": num_copies}, LM: {"colocate_with": VISION}}
    case = Case("state", num_copies, _sharded(modules, stage) if stage else modules)
    for rank in run_distributed(measured, num_copies, case):
        shares = (1 / num_copies if stage == 3 else 1, 1 / num_copies if stage else 1)
        assert rank["state"] == pytest.approx(rank["weights"] * (shares[0] + 3 * shares[1]), rel=0.05)
