"""Optimizers and frozen weights in host memory give the stock Trainer's losses, gradient norms and weights."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.unowned import local
from hf_mmparallel.plan import ModulePlugin, resolve_plan
from hf_mmparallel.runtime import host_memory, updated_copies
from hf_mmparallel.runtime.updated_copies import entries_of, is_offloaded
from tests import tiny
from tests.distributed import run_distributed

from . import runs
from .moments import AfterSteps
from .runs import case

VISION, LM = "vision", "language_model"
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}
HOST = {"offload_optimizer": True}
STREAM = {"freeze": True, "offload_params": True}

# The optimizer

SLICES = {VISION: HOST, LM: {"dp_size": 2, "zero_stage": 1, **HOST}}
LAYOUTS = [
    case("llama", {LM: HOST}, **ADAMW),
    case("llava", SLICES, **ADAMW),
    case("llava", {LM: {"dp_size": 2, "tp_size": 2, "zero_stage": 1, **HOST}}, **ADAMW),
    case("paligemma", {VISION: {"freeze": "tower", **HOST}, LM: {"pp_size": 2, **HOST}}, always=True, **ADAMW),
]


def host_run(family: str, parallel: dict[str, Any], **arguments: Any) -> tuple[runs.Run, set[str], int]:
    """A run in buckets of a few kilobytes, the devices of its state, and the number of entries on the host."""
    updated_copies.OFFLOAD_BUCKET_BYTES = 4096  # type: ignore[attr-defined]
    trainer = runs.make_trainer(family, parallel, **arguments)
    run = runs.run_of(trainer)
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    entries = [entry for entry in entries_of(inner) if is_offloaded(entry)]
    assert all(entry.grad is None for entry in entries)
    keys = {key for entry in entries for key in inner.state.get(entry, {})}
    assert inner.state_dict()["param_groups"][0]["lr"] == trainer.lr_scheduler.get_last_lr()[0]
    return run, keys, len(entries)


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "parallel", "arguments"), LAYOUTS)
def test_a_step_on_the_cpu_equals_the_stock_trainer(family: str, parallel: Any, arguments: dict[str, Any]):
    reference = runs.stock(family, freeze=runs.frozen(parallel), **arguments)
    ranks = run_distributed(host_run, runs.ranks_of(family, parallel), family, parallel, **arguments)
    runs.assert_same_run(ranks[0][0], reference)
    offloaded = [keys for _, keys, count in ranks if count]
    assert offloaded and all(keys == {"step", "exp_avg", "exp_avg_sq"} for keys in offloaded)


@pytest.mark.distributed
@pytest.mark.deep
@pytest.mark.timeout(900)
def test_a_step_of_deepspeed_equals_the_stock_trainer():
    builders: Any = pytest.importorskip("deepspeed.ops.op_builder")
    builders.CPUAdamBuilder().load()  # built in this process, as that takes longer than ranks wait for each other
    run, keys, _ = run_distributed(host_run, 3, "llava", SLICES, deepspeed=True, **ADAMW, timeout=100)[0]
    runs.assert_same_run(run, runs.stock("llava", **ADAMW))
    assert keys == {"step", "exp_avg", "exp_avg_sq"}


SAVED = {"offload_activations": True}
AGAIN = {"activation_checkpointing": True, **SAVED}


def test_what_host_memory_can_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch):
    spec = build_model_spec(tiny.FAMILIES["llama"]())
    costs, world = analytic_costs(spec, find_device("cpu"), 4), SimpleNamespace(all_gather=lambda own, what: [own] * 2)

    def check(**settings: Any) -> None:
        plan = resolve_plan(spec, {LM: ModulePlugin(dp_size=2, **settings)})
        host_memory.check_storage(spec, plan)
        host_memory.check_host_memory(costs, plan, world)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=f"`offload_params=True` of `{LM}`"):
        check(offload_params=True)
    check(**HOST)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    with pytest.raises(ValueError, match=r"ranks \[0, 1\], and 9.31e-07 GiB are available"):
        check(**HOST)


# Frozen weights

STREAMED = [
    case("llava", {VISION: {**STREAM, "freeze": "tower"}, LM: {}}, **ADAMW),
    case("llava", {VISION: {}, LM: {"pp_size": 2, **STREAM}}, **ADAMW),
    case("llava", {VISION: {}, LM: {"activation_checkpointing": True, **STREAM}}, **ADAMW),
    case("llava", {VISION: {}, LM: {"tp_size": 2, **STREAM}}, **ADAMW),
]


def streamed_run(family: str, parallel: dict[str, Any], **arguments: Any) -> tuple[runs.Run, dict[str, Any]]:
    """
    A run, and for each module with weights in host memory the bytes of its layers, the most that was on the device,
    and what was left there after each step.
    """
    trainer = runs.make_trainer(family, parallel, **arguments)
    streams, kept = trainer.engine.streamed, []
    trainer.add_callback(AfterSteps(lambda _: kept.extend(own.bytes_on_device for own in streams.values())))
    run = runs.run_of(trainer, evaluate=True)
    found = {}
    for name, streamed in streams.items():
        hosts = {index: host.untyped_storage().data_ptr() for index, host in streamed._host.items()}
        for index, parameters in streamed.parameters.items():
            assert all(local(p).untyped_storage().data_ptr() == hosts[index] for p in parameters)
        found[name] = ([host.numel() for host in streamed._host.values()], streamed.peak_bytes, kept)
    return run, found


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "parallel", "arguments"), STREAMED)
def test_streamed_weights_equal_the_stock_trainer(family: str, parallel: Any, arguments: dict[str, Any]):
    reference = runs.stock(family, freeze=runs.frozen(parallel), evaluate=True, **arguments)
    ranks = run_distributed(streamed_run, runs.ranks_of(family, parallel), family, parallel, **arguments)
    runs.assert_same_run(ranks[0][0], reference)
    found = [value for _, modules in ranks for value in modules.values()]
    assert found
    for sizes, peak, kept in found:
        assert 0 < peak <= 2 * max(sizes) and kept and not any(kept)
        assert len(sizes) < 3 or peak < sum(sizes)


def adapters_runs() -> list[runs.Run]:
    """Runs of adapters on frozen weights, in host memory and on the device."""
    lora = {"peft_config": {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}}
    found = []
    for streams in (True, False):
        modules = {VISION: {"freeze": True, "offload_params": streams}, LM: {**lora, "offload_params": streams}}
        found.append(runs.parallel_run("llava", modules, max_steps=3, **ADAMW))
    return found


@pytest.mark.distributed
@pytest.mark.deep
def test_adapters_train_on_streamed_weights():
    runs.assert_same_run(*run_distributed(adapters_runs, 2)[0])


class RefusingHostMemory(TorchDispatchMode):
    """Groups that take tensors of a device only, as those of NCCL do; moving a weight from host memory copies it."""

    def __init__(self, weights: Sequence[torch.Tensor]):
        super().__init__()
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in weights}
        self.num_moved = 0
        self.move = torch.Tensor.to

    def is_on_host(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.storages

    def moved(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = self.move(tensor, *args, **kwargs)
        if isinstance(tensor, DTensor) or not (args and isinstance(args[0], torch.device) and self.is_on_host(tensor)):
            return result
        self.num_moved += 1
        return result.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if "c10d" in func.namespace and any(map(self.is_on_host, tree_leaves((args, kwargs)))):
            raise RuntimeError("No backend type associated with device type cpu")
        return func(*args, **(kwargs or {}))


def saved_and_gathered(folder: Path) -> tuple[dict[str, torch.Tensor] | None, int]:
    """The weights that rank 0 gathers, and how many weights this rank has moved to its device for it."""
    trainer = runs.make_trainer("llava", {VISION: {}, LM: {"tp_size": 2, **STREAM}})
    trainer.save_model(str(folder))
    hosts = [host for streamed in trainer.engine.streamed.values() for host in streamed._host.values()]
    refusing = RefusingHostMemory(hosts)
    with refusing, mock.patch.object(torch.Tensor, "to", lambda *args, **kwargs: refusing.moved(*args, **kwargs)):
        weights = trainer.engine.sharded.gather_state_dict()
    return weights, refusing.num_moved


@pytest.mark.distributed
@pytest.mark.deep
def test_shards_in_host_memory_are_saved_and_gathered_on_the_device(tmp_path: Path):
    ranks = run_distributed(saved_and_gathered, 3, tmp_path)
    model = tiny.FAMILIES["llava"]()
    want = model.state_dict()
    for got in (ranks[0][0], type(model).from_pretrained(tmp_path).state_dict()):
        assert got is not None and got.keys() == want.keys()
        assert all(torch.equal(got[name], value) for name, value in want.items())
    assert [moved > 0 for _, moved in ranks] == [False, True, True]


# Activations

ACTIVATIONS = [
    case("llava", {VISION: SAVED, LM: {"colocate_with": VISION, **AGAIN}}, **ADAMW),
    case("qwen3_vl", {VISION: AGAIN, LM: {"pp_size": 2, "vp_size": 2, **SAVED}}, **ADAMW),
    case("llava", {VISION: SAVED, LM: {"dp_size": 2, "tp_size": 2, "zero_stage": 3, **SAVED}}, **ADAMW),
    case("llama", {LM: {"tp_size": 2, **SAVED}}, **ADAMW),
    case("llama", {LM: {"pp_size": 2, "split_backward": True, **SAVED}}, **ADAMW),
    case("llava", {VISION: SAVED, LM: {"pp_size": 2, **STREAM, **SAVED}}, always=True, **ADAMW),
    case("llava", {VISION: {}, LM: {**STREAM, **AGAIN}}, **ADAMW),
    case("qwen3_vl_moe", {VISION: SAVED, LM: {"dp_size": 2, "ep_size": 2, **AGAIN}}, **ADAMW),
]


def counted_run(family: str, parallel: dict[str, Any], **arguments: Any) -> tuple[runs.Run, dict[str, int]]:
    """A run, and by module the bytes of activations that this rank has moved to host memory in it."""
    moved: dict[str, int] = {}
    trainer = runs.make_trainer(family, parallel, **arguments)
    for key, stage in trainer.engine.stages.items():
        for layer in stage.own_layers.values():
            offloaded = getattr(layer, "offloaded_activations", None)
            if offloaded is not None:
                offloaded._to_host = partial(counting, offloaded._to_host, moved, key[0])
    return runs.run_of(trainer, evaluate=True), moved


def counting(move: Callable, moved: dict[str, int], module: str, tensor: torch.Tensor) -> Any:
    moved[module] = moved.get(module, 0) + tensor.untyped_storage().nbytes()
    return move(tensor)


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "parallel", "arguments"), ACTIVATIONS)
def test_activations_in_host_memory_equal_the_stock_trainer(family: str, parallel: Any, arguments: dict[str, Any]):
    ranks = run_distributed(counted_run, runs.ranks_of(family, parallel), family, parallel, **arguments)
    reference = runs.stock(family, freeze=runs.frozen(parallel), evaluate=True, **arguments)
    runs.assert_same_run(ranks[0][0], reference)
    assert ranks[0][0].metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)
    asked = {name for name, settings in parallel.items() if "offload_activations" in settings}
    assert {name for _, moved in ranks for name in moved} == asked
