"""Memory under ZeRO stages: the predicted peak, state of the theoretical size, and no layer more at any time."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
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
from tests.distributed import assert_ranks_raise, run_distributed

from . import runs

pytestmark = [pytest.mark.distributed, pytest.mark.deep, pytest.mark.timeout(300)]

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
    """Peak of this rank, predicted and measured."""
    runs.draw_nothing()
    with LiveBytes() as counter:
        trainer = memory_error.make_trainer(case, shrink=False)
        trainer.args.max_steps = 4
        meter = Meter(counter)
        trainer.add_callback(meter)
        trainer.train()
    engine = trainer.engine
    costs = replace(analytic_costs(engine.spec, engine.costs.device, 4), packing=engine.costs.packing)
    predicted, _ = memory_error.predict(trainer, costs)
    # gloo's threads may hold what they have sent for a moment longer, which only adds
    return {"peak": min(meter.peaks_bytes[1:]), "predicted": predicted[dist.get_rank()]}


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


# A model that is divided while it is laid out

LAYERS = 8


def wide_model(seed: int = 0) -> transformers.LlamaForCausalLM:
    """A language model whose weights are in layers, but for the thousandth part."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": LAYERS}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**tiny.TEXT, **sizes}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of [`wide_model`]."""
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


DIVIDED: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (4, {"dp_size": 4}),
    "dp and tp": (4, {"dp_size": 2, "tp_size": 2}),
    "dp and cp": (4, {"dp_size": 2, "cp_size": 2}),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_rank_never_has_more_than_its_slices_and_one_layer(folder: Path, name: str):
    world_size, sizes = DIVIDED[name]
    layer = 1 / LAYERS
    for rank in run_distributed(peaks, world_size, folder, {LM: {**sizes, "zero_stage": 3}}):
        assert rank["kept"] == pytest.approx(1 / world_size, rel=0.02)
        assert 1 / world_size < rank["laid out"] <= 1 / world_size + 1.1 * layer
        assert rank["loaded"] <= 1 / world_size + 2.1 * layer  # the layer, and what is read of it
        assert rank["cast"] <= 1 / world_size + 2.6 * layer  # the layer in both dtypes, and as it is gathered


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


@pytest.mark.parametrize("name", DIVIDED)
def test_a_model_in_host_memory_comes_to_the_device_layer_by_layer(name: str):
    world_size, sizes = DIVIDED[name]
    for peak in run_distributed(moved_peak, world_size, {LM: {**sizes, "zero_stage": 3}}):
        assert 1 / world_size < peak <= 1 / world_size + 2.1 / LAYERS  # the layer in both memories


# A limit that the operating system enforces

LIMITED = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}


def data_bytes() -> int:
    """Bytes of this process that count against `RLIMIT_DATA`."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return 1024 * int(line.split()[1])


def limited_run(folder: Path, parallel: dict[str, Any], more_bytes: int) -> runs.Run:
    """A run of a rank that may have so many bytes more than before its model is made."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + more_bytes, hard))
    trainer = runs.make_trainer("llama", parallel, model=str(folder), **LIMITED)
    trainer.train()
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    return runs.Run(runs.step_logs(trainer), None)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts mapped memory on Linux only")
def test_a_model_that_does_not_fit_into_a_rank_trains_at_stage_3(folder: Path):
    """
    State of 16 bytes for each parameter does not fit below the limit. A quarter of it on each rank does, beside the
    mapped file of 4 bytes for each, and what is used for the plan.
    """
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    limit = 15 * model.num_parameters()
    reference = runs.stock("llama", model=model, **LIMITED)
    layout = {"dp_size": 4}
    assert_ranks_raise(limited_run, 4, folder, {LM: layout}, limit, match="can't allocate memory")
    for run in run_distributed(limited_run, 4, folder, {LM: {**layout, "zero_stage": 3}}, limit):
        assert len(run.logs) == len(reference.logs) > 0
        for got, want in zip(run.logs, reference.logs, strict=True):
            assert got == pytest.approx(want, rel=2e-5)
