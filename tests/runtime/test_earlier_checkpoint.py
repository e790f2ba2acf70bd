"""Optimizer state as version 0.1 wrote it: still read, by any layout, without executing anything."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from hf_mmparallel.runtime.earlier_optimizer_checkpoint import TABLE, TENSORS, load_earlier_optimizer
from hf_mmparallel.world import World
from tests.distributed import assert_ranks_raise, run_distributed
from tests.runtime import test_checkpoint as layouts

STEPS = 2


def _write(folder: Path) -> None:
    """What version 0.1 wrote on one process."""
    model, optimizer = layouts._reference("adamw", STEPS)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    table: dict[str, Any] = {"groups": [], "parameters": {}}
    tensors = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        table["groups"].append(settings)
        for parameter in group["params"]:
            name, kinds = names[id(parameter)], {}
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value
                kinds[f"{name}/{key}"] = {"key": key, "shape": list(value.shape), "dtype": "float32"}
            entry = {"shape": list(parameter.shape), "settings": settings, "tensors": kinds, "values": {}}
            table["parameters"][name] = entry
    folder.mkdir(exist_ok=True)
    (folder / TABLE).write_text(json.dumps(table))
    save(tensors, checkpoint_id=str(folder / TENSORS), no_dist=True)


def _read(layout: str, folder: str) -> None:
    expected, reference = layouts._reference("adamw", STEPS)
    model, _ = layouts._reference("adamw", STEPS)
    layouts.lay_out(model, layout)
    optimizer = layouts._optimizer(model, "adamw", lr=7.0)
    load_earlier_optimizer(optimizer, model, folder, World())
    parameters = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            right, found = reference.state.get(parameters[name], {}), optimizer.state.get(parameter, {})
            assert list(found) == list(right), name
            for key, value in right.items():
                assert torch.equal(layouts._full(found[key]), value)
                assert isinstance(found[key], DTensor) == (isinstance(parameter, DTensor) and key != "step")
    assert {group["lr"] for group in optimizer.param_groups} == {group["lr"] for group in reference.param_groups}


@pytest.mark.distributed
def test_any_layout_reads_it(tmp_path):
    _write(tmp_path)
    run_distributed(_read, 4, "tp2pp2", str(tmp_path), timeout=90)


class _Touches:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.distributed
def test_damaged_and_foreign_files_end_in_a_sentence_on_every_rank(tmp_path):
    _write(tmp_path)
    metadata, shard = tmp_path / TENSORS / ".metadata", tmp_path / TENSORS / "__0_0.distcp"
    good, whole = metadata.read_bytes(), shard.read_bytes()
    metadata.write_bytes(pickle.dumps(_Touches(tmp_path / "executed")))
    assert_ranks_raise(_read, 3, "dp1+pp2", str(tmp_path), match=r"\.metadata` is no table .*`pathlib.*Path|getattr")
    assert not (tmp_path / "executed").exists()
    metadata.write_bytes(good[: len(good) // 2])
    assert_ranks_raise(_read, 3, "dp1+pp2", str(tmp_path), match=r"\.metadata` is no table of optimizer state")
    metadata.write_bytes(good.replace(b"__0_0.distcp", b"../../../x/y"))
    assert_ranks_raise(_read, 3, "dp1+pp2", str(tmp_path), match="outside of its folder")
    metadata.write_bytes(good)
    shard.write_bytes(whole[: len(whole) // 2])
    assert_ranks_raise(_read, 3, "dp1+pp2", str(tmp_path), match=r"__0_0.distcp` has \d+ of \d+ bytes")
