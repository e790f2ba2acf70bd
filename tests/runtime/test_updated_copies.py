"""Copies that an optimizer updates in place of weights: equal steps, buckets, state, checkpoints."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Adafactor

from hf_mmparallel.plan import StorageSettings
from hf_mmparallel.runtime import updated_copies
from hf_mmparallel.runtime.optimizer_checkpoint import apply_state
from hf_mmparallel.runtime.optimizers import prepare_optimizer
from hf_mmparallel.runtime.updated_copies import entries_of, refresh_copies, source_of_copy
from hf_mmparallel.world import World

SHAPES = ((5, 3), (7,), (2, 2), (40,))
HOST, MASTER = StorageSettings(offload_optimizer=True), StorageSettings()


def weights(dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def step(parameters: list[Any], optimizer: torch.optim.Optimizer, seed: int, skipped: int | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad_dtype = torch.float32
        parameter.grad = None if index == skipped else gradient
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def prepared(cls: Any, parameters: list[Any], storage: StorageSettings, **settings: Any) -> torch.optim.Optimizer:
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]
    optimizer = cls(groups, **{"lr": 0.01, **settings})
    prepare_optimizer(optimizer, holds_all=True, world=World(), storage=dict.fromkeys(parameters, storage))
    return optimizer


@pytest.fixture(autouse=True)
def _torch_on_the_cpu(monkeypatch):
    monkeypatch.setattr(updated_copies, "_deepspeed_adam", lambda optimizer: None)
    monkeypatch.setattr(updated_copies, "OFFLOAD_BUCKET_BYTES", 128)


CLASSES = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (Adafactor, {"relative_step": False, "scale_parameter": False}),
]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


@pytest.mark.parametrize(
    ("cls", "settings", "storage", "dtype"),
    [(*each, MASTER, torch.bfloat16) for each in CLASSES]
    + [(*each, HOST, dtype) for each in CLASSES[:4] for dtype in ROUNDING],
)
def test_copies_are_updated_as_float32_parameters(cls: Any, settings: dict, storage: StorageSettings, dtype: Any):
    own, wide = weights(dtype), [nn.Parameter(p.detach().float()) for p in weights(dtype)]
    optimizer = prepared(cls, own, storage, **settings)
    reference = prepared(cls, wide, StorageSettings(master_weights=False), **settings)
    for seed in range(4):
        for parameters, each in ((own, optimizer), (wide, reference)):
            step(parameters, each, seed, skipped=2)
            for group in each.param_groups:
                group["lr"] /= 2 + seed
    # the device rounds as the CPU but for its kernels, which add in another order
    close = {"rtol": 0.0, "atol": 0.0} if storage is MASTER else {"rtol": 1e-6, "atol": 1e-6}
    for entry, parameter, want in zip(entries_of(optimizer), own, wide, strict=True):
        torch.testing.assert_close(entry, want, **close)
        rounded = close if storage is MASTER else {"rtol": ROUNDING[dtype], "atol": 1e-6}
        torch.testing.assert_close(parameter, want.to(dtype), **rounded)
        assert entry.grad is None and source_of_copy(entry) is parameter
    mine, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert mine.keys() == theirs.keys() >= {0, 1, 3}
    for index, state in theirs.items():
        assert mine[index].keys() == state.keys()
        for key in state.keys() - {"step", "RMS"}:
            torch.testing.assert_close(mine[index][key], state[key], rtol=1e-6, atol=1e-7)


def test_gradients_come_in_buckets(monkeypatch):
    own = weights(torch.float32)
    optimizer = prepared(torch.optim.AdamW, own, HOST)
    steps = []
    update = updated_copies.OffloadedStep._update
    monkeypatch.setattr(
        updated_copies.OffloadedStep,
        "_update",
        lambda self, optimizer, bucket: (steps.append(len(bucket)), update(self, optimizer, bucket)),
    )
    step(own, optimizer, 0)
    assert steps == [2, 1, 1]  # 64 + 64, 64 and 192 bytes, in buckets of 128
    with pytest.raises(ValueError, match="`torch.SGD` can't be used with `offload_optimizer=True`"):
        prepared(torch.optim.SGD, weights(torch.float32), HOST)


def test_saved_copies_count_where_they_round_to_the_weights():
    parameters = weights(torch.bfloat16)
    optimizer = prepared(torch.optim.AdamW, parameters, MASTER, lr=1e-4)
    step(parameters, optimizer, 0)
    entries = list(entries_of(optimizer))
    saved = {
        entry: {"master": entry.detach().clone(), "exp_avg": torch.zeros_like(entry).bfloat16()} for entry in entries
    }
    with torch.no_grad():
        parameters[0][0] += 1
    apply_state(optimizer, saved, [{}, {}])
    for entry, parameter in zip(entries, parameters, strict=True):
        assert torch.equal(entry.bfloat16(), parameter) and optimizer.state[entry]["exp_avg"].dtype == torch.float32
        assert "master" not in optimizer.state[entry]
    assert torch.equal(entries[0][1:], saved[entries[0]]["master"][1:])
    assert torch.equal(entries[0][0], parameters[0][0].float())
    refresh_copies(optimizer)
    assert all(torch.equal(entry, p.float()) for entry, p in zip(entries, parameters, strict=True))
