"""Memory under ZeRO stages: the predicted peak, state of the theoretical size, and no layer more at any time."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import memory_error
import pytest
import torch
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

pytestmark = [pytest.mark.distributed, pytest.mark.deep, pytest.mark.timeout(300)]

VISION, LM = "vision", "language_model"
# Ranks, layout
CASES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "dp in groups, stage 2": (5, {LM: {"dp_size": 4, "shard_size": 2, "zero_stage": 2}}),
    "dp and tp, stage 3": (5, {LM: {"dp_size": 2, "tp_size": 2, "zero_stage": 3}}),
    "shared ranks, stage 2": (
        2,
        {VISION: {"dp_size": 2, "zero_stage": 2}, LM: {"colocate_with": VISION, "zero_stage": 2}},
    ),
}


class Meter(TrainerCallback):
    """Live bytes right before the optimizer's last step, and the smallest peak of a step after the first."""

    def __init__(self, counter: LiveBytes):
        self.counter = counter
        self.state_bytes = 0
        self.peaks_bytes: list[int] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gc.collect()
        self.state_bytes = self.counter.live_bytes

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.peaks_bytes.append(self.counter.peak_bytes)
        self.counter.reset()


def measured(case: Case) -> dict[str, float]:
    runs.draw_nothing()
    with LiveBytes() as counter:
        trainer = memory_error.make_trainer(case, shrink=False)
        trainer.args.max_steps = 3
        meter = Meter(counter)
        trainer.add_callback(meter)
        trainer.train()
    engine = trainer.engine
    costs = replace(analytic_costs(engine.spec, engine.costs.device, 4), packing=engine.costs.packing)
    predicted, _ = memory_error.predict(trainer, costs)
    # gloo's threads may hold what they have sent for a moment longer, which only adds
    return {"peak": min(meter.peaks_bytes[1:]), "predicted": predicted[dist.get_rank()]}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_every_rank_is_the_predicted_one(name: str):
    world_size, modules = CASES[name]
    ranks = run_distributed(measured, world_size, Case(name, world_size, modules), timeout=200)
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


def states_of(num_copies: int) -> dict[int, tuple[int, int]]:
    return {stage: state_of({LM: {"dp_size": num_copies, "zero_stage": stage}}) for stage in ZERO_STAGES}


@pytest.mark.parametrize("num_copies", [2, 4])
def test_state_has_its_theoretical_size(num_copies: int):
    """The moments of AdamW, weights, and gradients, which stage 1 has divided by the optimizer's step, too."""
    for found in run_distributed(states_of, num_copies, num_copies, timeout=200):
        for stage, (state, num_bytes) in found.items():
            weights, others = 1 / num_copies if stage == 3 else 1, 1 / num_copies if stage else 1
            assert state == pytest.approx(num_bytes * (weights + 3 * others), rel=0.05)


# A model that is divided while it is laid out

LAYERS = 8


def wide_model() -> transformers.LlamaForCausalLM:
    """A language model whose weights are in layers, but for the thousandth part."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": LAYERS}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**tiny.TEXT, **sizes}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    wide_model().save_pretrained(path)
    return path


def peaks(folder: Path, parallel: dict[str, Any]) -> dict[str, float]:
    """Peaks of live bytes on this rank while a model is laid out, loaded again, and cast, in shares of its weights."""
    runs.draw_nothing()
    found = {}
    with LiveBytes() as counter:
        trainer = runs.make_trainer("llama", parallel, model=str(folder))
        found["laid out"] = counter.peak_bytes
        gc.collect()
        found["kept"] = counter.live_bytes
        counter.reset()
        trainer.engine.sharded.load_model(folder)
        found["loaded"] = counter.peak_bytes
        casts = []
        for _ in range(4):
            counter.reset()
            trainer.engine.cast(torch.bfloat16)
            casts.append(counter.peak_bytes)
            trainer.engine.cast(torch.float32)
        found["cast"] = min(casts)  # gloo's threads may hold for a moment what they have sent, which only adds
    num_bytes = 4 * trainer.engine.spec.num_parameters
    return {name: value / num_bytes for name, value in found.items()}


class SecondMemory(LiveBytes):
    """Counts what comes to a device from a model in host memory, as if the CPU had memory of its own as a device."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self._on_host = {id(parameter): parameter.untyped_storage() for parameter in model.parameters()}
        self._patches.enter_context(mock.patch.object(torch.Tensor, "to", self._moving(torch.Tensor.to)))

    def _moving(self, move: Any) -> Any:
        def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = move(tensor, *args, **kwargs)
            if args and isinstance(args[0], torch.device) and self._on_host.pop(id(tensor), None) is not None:
                return result.detach().clone()
            return result

        return moved

    def _count(self, storage: torch.UntypedStorage) -> None:
        if all(storage._cdata != kept._cdata for kept in self._on_host.values()):
            super()._count(storage)


def moved_peak(parallel: dict[str, Any]) -> float:
    """Peak of the bytes that come to a device on this rank, in shares of the weights of a model in host memory."""
    runs.draw_nothing()
    model = wide_model()
    with SecondMemory(model) as counter:
        trainer = runs.make_trainer("llama", parallel, model=model)
    return counter.peak_bytes / (4 * trainer.engine.spec.num_parameters)


def all_peaks(folder: Path) -> list[dict[str, float]]:
    layouts = [{LM: {"dp_size": 2, axis: 2, "zero_stage": 3}} for axis in ("tp_size", "cp_size")]
    return [{**peaks(folder, layout), "moved": moved_peak(layout)} for layout in layouts]


def test_a_rank_never_has_more_than_its_slices_and_one_layer(folder: Path):
    layer = 1 / LAYERS
    for found in run_distributed(all_peaks, 4, folder, timeout=200):
        for rank in found:
            assert rank["kept"] == pytest.approx(1 / 4, rel=0.02)
            assert 1 / 4 < rank["laid out"] <= 1 / 4 + 1.1 * layer
            assert rank["loaded"] <= 1 / 4 + 2.1 * layer  # the layer, and what is read of it
            assert rank["cast"] <= 1 / 4 + 2.6 * layer  # the layer in both dtypes, and as it is gathered
            assert 1 / 4 < rank["moved"] <= 1 / 4 + 2.1 * layer  # the layer in both memories
