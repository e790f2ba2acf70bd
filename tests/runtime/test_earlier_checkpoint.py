"""Optimizer state as version 0.1 wrote it: still read, by any layout, without executing anything."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from hf_mmparallel.runtime.earlier_optimizer_checkpoint import (
    TABLE,
    TENSORS,
    load_earlier_optimizer,
)
from hf_mmparallel.runtime.tensor_shards import TensorPlanner, TensorReader
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
    assert_ranks_raise(_read, 3, "dp1+pp2", str(tmp_path), match=r"\.metadata` is no table of tensors")
    metadata.write_bytes(good.replace(b"__0_0.distcp", b"../../../x/y"))
    assert_ranks_raise(_read, 3, "dp1+pp2", str(tmp_path), match="outside of its folder")
    metadata.write_bytes(good)
    shard.write_bytes(whole[: len(whole) // 2])
    assert_ranks_raise(_read, 3, "dp1+pp2", str(tmp_path), match=r"__0_0.distcp` has \d+ of \d+ bytes")


def _declare_as_bytes(tensors: Path, name: str, mark: Path) -> None:
    """Lets a table say that a tensor is a pickled value, which touches a file."""
    path = tensors / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    torch.save(_Touches(mark), tensors / "other.bin")
    metadata.storage_data = {key: info for key, info in metadata.storage_data.items() if key.fqn != name}
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo("other.bin", 0, (tensors / "other.bin").stat().st_size)
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.distributed
def test_pickled_values_are_refused_on_every_rank(tmp_path):
    _write(tmp_path)
    name = next(n for n in pickle.loads((tmp_path / TENSORS / ".metadata").read_bytes()).state_dict_metadata)
    _declare_as_bytes(tmp_path / TENSORS, name, tmp_path / "executed")
    assert_ranks_raise(_read, 3, "dp1+pp2", str(tmp_path), match=r"\.metadata` is no table .*is no tensor")
    assert not (tmp_path / "executed").exists()


def test_a_table_that_asks_for_decoding_is_refused(tmp_path):
    _write(tmp_path)
    path = tmp_path / TENSORS / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd/1"]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="would have to be decoded"):
        TensorReader(tmp_path / TENSORS).read_metadata()


@pytest.mark.parametrize(("name", "start", "length"), [("..", 0, 0), ("__0_0.distcp", -8, 8), ("__0_0.distcp", 8, -8)])
def test_a_table_that_leaves_the_folder_or_the_file_is_refused(tmp_path, name, start, length):
    _write(tmp_path)
    path = tmp_path / TENSORS / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_data[next(iter(metadata.storage_data))] = _StorageInfo(name, start, length)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"outside of its folder|bytes of its tensors"):
        TensorReader(tmp_path / TENSORS).read_metadata()


def test_a_table_cannot_change_classes(tmp_path):
    """The `BUILD` of a pickle sets attributes of whatever lies below it, also of a class that is allowed."""
    _write(tmp_path)
    path = tmp_path / TENSORS / ".metadata"
    changing = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nTensorProperties\n(N}X\x07\x00\x00\x00changedK\x01stb."
    )
    path.write_bytes(changing)
    with pytest.raises(ValueError, match="it changes `TensorProperties`"):
        TensorReader(tmp_path / TENSORS).read_metadata()
    assert not hasattr(TensorProperties, "changed")


def test_the_planner_reads_no_pickled_values(tmp_path):
    item = SimpleNamespace(dest_index=MetadataIndex("weight/exp_avg"))
    with pytest.raises(ValueError, match="`weight/exp_avg` is no tensor"):
        TensorPlanner().load_bytes(item, io.BytesIO())
