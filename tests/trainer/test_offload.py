"""Optimizers and frozen weights in host memory give the stock Trainer's losses, gradient norms and weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

from hf_mmparallel.modeling.dtensors import local
from hf_mmparallel.runtime import offload
from hf_mmparallel.runtime.updated_copies import entries_of, is_offloaded
from tests import tiny
from tests.distributed import assert_ranks_raise, run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}
HOST = {"offload_optimizer": True}
STREAM = {"freeze": True, "offload_params": True}

# The optimizer

LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one of two modules": ("llava", 3, {LM: {"dp_size": 2, **HOST}}),
    "one process": ("llama", 1, {LM: HOST}),
    "slices": ("llava", 3, {VISION: HOST, LM: {"dp_size": 2, "zero_stage": 1, **HOST}}),
    "dp and tp": ("llava", 5, {VISION: HOST, LM: {"dp_size": 2, "tp_size": 2, "zero_stage": 1, **HOST}}),
    "frozen tower, tied": ("paligemma", 3, {VISION: {"freeze": "tower", **HOST}, LM: {"pp_size": 2, **HOST}}),
}


def host_run(family: str, parallel: dict[str, Any], **arguments: Any) -> tuple[runs.Run, set[str], int]:
    """A run in buckets of a few kilobytes, the devices of its state, and the number of entries on the host."""
    offload.OFFLOAD_BUCKET_BYTES = 4096  # type: ignore[attr-defined]
    trainer = runs.make_trainer(family, parallel, **arguments)
    run = runs.run_of(trainer)
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    entries = [entry for entry in entries_of(inner) if is_offloaded(entry)]
    assert all(entry.grad is None for entry in entries)
    keys = {key for entry in entries for key in inner.state.get(entry, {})}
    assert inner.state_dict()["param_groups"][0]["lr"] == trainer.lr_scheduler.get_last_lr()[0]
    return run, keys, len(entries)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_on_the_cpu_equals_the_stock_trainer(name: str):
    family, world_size, parallel = LAYOUTS[name]
    reference = runs.stock(family, freeze=runs.frozen(parallel), **ADAMW)
    ranks = run_distributed(host_run, world_size, family, parallel, **ADAMW)
    runs.assert_same_run(ranks[0][0], reference)
    offloaded = [keys for _, keys, count in ranks if count]
    assert offloaded and all(keys == {"step", "exp_avg", "exp_avg_sq"} for keys in offloaded)


@pytest.fixture(scope="module")
def cpu_adam() -> None:
    """DeepSpeed's kernel, built in this process, as that takes longer than ranks wait for each other."""
    builders: Any = pytest.importorskip("deepspeed.ops.op_builder")
    builders.CPUAdamBuilder().load()


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("cpu_adam")
def test_a_step_of_deepspeed_equals_the_stock_trainer():
    family, world_size, parallel = LAYOUTS["slices"]
    run, keys, _ = run_distributed(host_run, world_size, family, parallel, deepspeed=True, **ADAMW, timeout=100)[0]
    runs.assert_same_run(run, runs.stock(family, **ADAMW))
    assert keys == {"step", "exp_avg", "exp_avg_sq"}


def refused(parallel: dict[str, Any], **arguments: Any) -> None:
    runs.make_trainer("llama", parallel, **arguments).train()


def test_other_optimizers_are_refused():
    match = "`torch.SGD` can't be used with `offload_optimizer=True`"
    assert_ranks_raise(refused, 2, {LM: {"dp_size": 2, **HOST}}, optim="sgd", match=match)


SAVING = {"save_strategy": "steps", "save_steps": 2, **ADAMW}


def saving(folder: Path, parallel: Any, checkpoint: Path | None = None) -> runs.Run:
    trainer = runs.make_trainer("llava", parallel, str(folder), **SAVING)
    return runs.run_of(trainer, checkpoint=None if checkpoint is None else str(checkpoint))


def test_state_in_host_memory_moves_to_any_layout_and_back(tmp_path: Path):
    layouts = {
        "host": (3, {VISION: HOST, LM: {"tp_size": 2, **HOST}}),
        "slices": (3, {LM: {"dp_size": 2, "zero_stage": 1}}),
        "one": (1, None),
    }
    straight = {name: run_distributed(saving, n, tmp_path / name, p)[0] for name, (n, p) in layouts.items()}
    for source, target in (("host", "slices"), ("slices", "host"), ("host", "one"), ("host", "host")):
        world_size, parallel = layouts[target]
        checkpoint = tmp_path / source / "checkpoint-2"
        run = run_distributed(saving, world_size, tmp_path / f"{source} {target}", parallel, checkpoint)[0]
        runs.assert_same_run(run, straight["host"], rtol=1e-4, atol=2e-5)


def no_memory(parallel: dict[str, Any]) -> None:
    """Lays out a model on a node without memory."""
    from hf_mmparallel.runtime import host_memory

    host_memory.available_bytes = lambda: 1000
    runs.make_trainer("llama", parallel, **ADAMW)


def test_too_little_host_memory_is_refused():
    match = (
        r"The plan needs [0-9.e-]+ GiB of host memory on `.*` for its ranks \[0, 1\], and 9.31e-07 GiB are available: "
        r"[0-9.e-]+ GiB are missing. Use `zero_stage=1`, or leave `offload_optimizer` or `offload_params` out"
    )
    assert_ranks_raise(no_memory, 2, {LM: {"dp_size": 2, **HOST}}, match=match)


# Frozen weights

STREAMED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "encoder without a backward": ("llava", 2, {VISION: {**STREAM, "freeze": "tower"}, LM: {}}),
    "language model behind a trained encoder": ("llava", 3, {VISION: {}, LM: {"pp_size": 2, **STREAM}}),
    "recomputed": ("llava", 2, {VISION: {}, LM: {"activation_checkpointing": True, **STREAM}}),
    "tp": ("llava", 3, {VISION: {}, LM: {"tp_size": 2, **STREAM}}),
}


class _Places(TrainerCallback):
    """Bytes of streamed weights on the device after each step."""

    def __init__(self):
        self.trainer: Any = None
        self.kept: list[int] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.kept += [streamed.bytes_on_device for streamed in self.trainer.engine.streamed.values()]


def streamed_run(family: str, parallel: dict[str, Any], **arguments: Any) -> tuple[runs.Run, dict[str, Any]]:
    """A run, and for each module with weights in host memory what was on the device of them."""
    places = _Places()
    trainer = places.trainer = runs.make_trainer(family, parallel, callbacks=[places], **arguments)
    run = runs.run_of(trainer, evaluate=True)
    found = {}
    for name, streamed in trainer.engine.streamed.items():
        hosts = {index: host.untyped_storage().data_ptr() for index, host in streamed._host.items()}
        for index, parameters in streamed.parameters.items():
            assert all(local(p).untyped_storage().data_ptr() == hosts[index] for p in parameters)
        sizes = [host.numel() for host in streamed._host.values()]
        found[name] = (sizes, streamed.peak_bytes, places.kept)
    return run, found


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_weights_equal_the_stock_trainer(name: str):
    family, world_size, parallel = STREAMED[name]
    reference = runs.stock(family, freeze=runs.frozen(parallel), evaluate=True, **ADAMW)
    ranks = run_distributed(streamed_run, world_size, family, parallel, **ADAMW)
    runs.assert_same_run(ranks[0][0], reference)
    found = [value for _, modules in ranks for value in modules.values()]
    assert found
    for sizes, peak, kept in found:
        assert 0 < peak <= 2 * max(sizes) and kept and not any(kept)
        assert len(sizes) < 3 or peak < sum(sizes)


def test_adapters_train_on_streamed_weights():
    lora = {"peft_config": {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}}
    sizes = {VISION: {"freeze": True}, LM: {"pp_size": 2, **lora}}
    streamed = {VISION: {**STREAM}, LM: {**sizes[LM], "offload_params": True}}
    want = run_distributed(runs.parallel_run, 3, "llava", sizes, **ADAMW)[0]
    got, _ = run_distributed(streamed_run, 3, "llava", streamed, **ADAMW)[0]
    runs.assert_same_run(runs.Run(got.logs, got.weights), want)


def test_trained_layers_are_not_streamed():
    match = "`offload_params=True` of `language_model`, whose layers are trained"
    assert_ranks_raise(refused, 2, {LM: {"dp_size": 2, "offload_params": True}}, match=match)


def saved(folder: Path, parallel: dict[str, Any]) -> None:
    trainer = runs.make_trainer("llava", parallel, str(folder))
    trainer.save_model(str(folder))


def test_streamed_weights_are_saved(tmp_path: Path):
    run_distributed(saved, 3, tmp_path, {VISION: {}, LM: {"tp_size": 2, **STREAM}})
    want = tiny.FAMILIES["llava"]()
    got = type(want).from_pretrained(tmp_path)
    for name, value in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], value), name


class RefusingHostMemory(TorchDispatchMode):
    """
    Process groups that take tensors of a device only, as those of NCCL do, where weights in host memory are not on the
    device: moving them there copies them.

    Args:
        weights (`Sequence[torch.Tensor]`): What is in host memory.
    """

    def __init__(self, weights: Sequence[torch.Tensor]):
        super().__init__()
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in weights}
        self.num_moved = 0
        self.move = torch.Tensor.to

    def is_on_host(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.storages

    def moved(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = self.move(tensor, *args, **kwargs)
        if not isinstance(tensor, DTensor) and self.is_on_host(tensor) and args and isinstance(args[0], torch.device):
            self.num_moved += 1
            return result.clone()
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if "c10d" in func.namespace and any(map(self.is_on_host, tree_leaves((args, kwargs)))):
            raise RuntimeError("No backend type associated with device type cpu")
        return func(*args, **(kwargs or {}))


def gathered_from_host(parallel: dict[str, Any]) -> tuple[dict[str, torch.Tensor] | None, int]:
    """The weights that rank 0 gathers, and how many weights this rank has moved to its device for it."""
    trainer = runs.make_trainer("llava", parallel)
    hosts = [host for streamed in trainer.engine.streamed.values() for host in streamed._host.values()]
    refusing = RefusingHostMemory(hosts)
    with refusing, mock.patch.object(torch.Tensor, "to", lambda *args, **kwargs: refusing.moved(*args, **kwargs)):
        weights = trainer.engine.sharded.gather_state_dict()
    return weights, refusing.num_moved


def test_shards_in_host_memory_are_gathered_on_the_device():
    ranks = run_distributed(gathered_from_host, 3, {VISION: {}, LM: {"tp_size": 2, **STREAM}})
    want, got = tiny.FAMILIES["llava"]().state_dict(), ranks[0][0]
    assert got is not None and got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert [moved > 0 for _, moved in ranks] == [False, True, True]
