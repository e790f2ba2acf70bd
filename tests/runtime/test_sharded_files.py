"""Sharded state dicts of FSDP2: read by any layout, without executing anything."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from hf_mmparallel.runtime.optimizer_loading import load_optimizer
from hf_mmparallel.runtime.sharded_files import TensorPlanner, TensorReader
from hf_mmparallel.trainer.optimizer_state import complete_state
from tests.distributed import assert_ranks_raise, run_distributed
from tests.runtime import test_checkpoint as layouts

STEPS = 2
WEIGHTS, STATE = "pytorch_model_fsdp_0", "optimizer_0"


def _write(folder: Path) -> None:
    """What the stock Trainer writes under FSDP2, with a value that is no tensor."""
    model, optimizer = layouts._reference("adamw", STEPS)
    complete_state(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {
        f"optimizer.state.{names[id(parameter)]}.{key}": value
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    save({**state, "optimizer.param_groups": [{"lr": 1.0}]}, checkpoint_id=str(folder / STATE), no_dist=True)
    save(weights, checkpoint_id=str(folder / WEIGHTS), no_dist=True)


def _read(layout: str, folder: str) -> None:
    expected, reference = layouts._reference("adamw", STEPS)
    complete_state(reference)
    model = layouts.tiny_llava(seed=3)
    sharded = layouts.lay_out(model, layout)
    sharded.load_model(folder)
    optimizer = layouts._optimizer(model, "adamw", lr=7.0)
    load_optimizer(optimizer, model, folder, [], sharded.world)
    parameters = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(layouts._full(parameter), parameters[name]), name
            right, found = reference.state.get(parameters[name], {}), optimizer.state.get(parameter, {})
            assert list(found) == list(right), name
            for key, value in right.items():
                assert torch.equal(layouts._full(found[key]), value)
                assert isinstance(found[key], DTensor) == (isinstance(parameter, DTensor) and key != "step")


@pytest.mark.distributed
def test_any_layout_reads_a_sharded_state_dict(tmp_path):
    _write(tmp_path)
    run_distributed(_read, 4, "tp2pp2", str(tmp_path), timeout=90)


class _Touches:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_damaged_and_foreign_tables_end_in_a_sentence(tmp_path):
    _write(tmp_path)
    metadata, shard = tmp_path / STATE / ".metadata", tmp_path / STATE / "__0_0.distcp"
    good, whole = metadata.read_bytes(), shard.read_bytes()
    for content, match in (
        (pickle.dumps(_Touches(tmp_path / "executed")), r"\.metadata` is no table .*`pathlib.*Path|getattr"),
        (good[: len(good) // 2], r"\.metadata` is no table of tensors"),
        (good.replace(b"__0_0.distcp", b"../../../x/y"), "outside of its folder"),
    ):
        metadata.write_bytes(content)
        with pytest.raises(ValueError, match=match):
            TensorReader(tmp_path / STATE).read_metadata()
    assert not (tmp_path / "executed").exists()
    metadata.write_bytes(good)
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"__0_0.distcp` has \d+ of \d+ bytes"):
        TensorReader(tmp_path / STATE).read_metadata()


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
    name = next(iter(pickle.loads((tmp_path / WEIGHTS / ".metadata").read_bytes()).state_dict_metadata))
    _declare_as_bytes(tmp_path / WEIGHTS, name, tmp_path / "executed")
    assert_ranks_raise(_read, 3, "dp1+pp2", str(tmp_path), match=re.escape(name.removeprefix("model.")))
    assert not (tmp_path / "executed").exists()


def _first_tensor(metadata: Any) -> MetadataIndex:
    return next(index for index in metadata.storage_data if "exp_avg" in index.fqn)


def test_a_table_that_asks_for_decoding_is_refused(tmp_path):
    _write(tmp_path)
    path = tmp_path / STATE / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_data[_first_tensor(metadata)].transform_descriptors = ["stream.zstd/1"]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="would have to be decoded"):
        TensorReader(tmp_path / STATE).read_metadata()


@pytest.mark.parametrize(("name", "start", "length"), [("..", 0, 0), ("__0_0.distcp", -8, 8), ("__0_0.distcp", 8, -8)])
def test_a_table_that_leaves_the_folder_or_the_file_is_refused(tmp_path, name, start, length):
    _write(tmp_path)
    path = tmp_path / STATE / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_data[_first_tensor(metadata)] = _StorageInfo(name, start, length)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"outside of its folder|bytes of its tensors"):
        TensorReader(tmp_path / STATE).read_metadata()


def test_a_table_cannot_change_classes(tmp_path):
    """The `BUILD` of a pickle sets attributes of whatever lies below it, also of a class that is allowed."""
    _write(tmp_path)
    path = tmp_path / STATE / ".metadata"
    changing = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nTensorProperties\n(N}X\x07\x00\x00\x00changedK\x01stb."
    )
    path.write_bytes(changing)
    with pytest.raises(ValueError, match="it changes `TensorProperties`"):
        TensorReader(tmp_path / STATE).read_metadata()
    assert not hasattr(TensorProperties, "changed")


def test_the_planner_reads_no_pickled_values(tmp_path):
    item = SimpleNamespace(dest_index=MetadataIndex("weight/exp_avg"))
    with pytest.raises(ValueError, match="`weight/exp_avg` is no tensor"):
        TensorPlanner().load_bytes(item, io.BytesIO())
