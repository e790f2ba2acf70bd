"""Sharded state dicts of FSDP2 are read without executing anything; `test_sharded_checkpoints` goes on from them."""

import io
import pathlib
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict_saver import save

from hf_mmparallel.runtime.sharded_files import TensorPlanner, TensorReader
from hf_mmparallel.trainer.optimizer_groups import complete_state
from tests.distributed import assert_ranks_raise
from tests.runtime import test_checkpoint as layouts

WEIGHTS, STATE = "pytorch_model_fsdp_0", "optimizer_0"


def _write(folder: Path) -> None:
    """What the stock Trainer writes under FSDP2, with a value that is no tensor."""
    model, optimizer = layouts.trained()
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


class _Touches:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.distributed
def test_pickled_values_are_refused_on_every_rank(tmp_path):
    """A table says that a tensor is a pickled value, which touches a file."""
    _write(tmp_path)
    table = tmp_path / WEIGHTS / ".metadata"
    metadata = pickle.loads(table.read_bytes())
    name = next(iter(metadata.state_dict_metadata))
    other = tmp_path / WEIGHTS / "other.bin"
    torch.save(_Touches(tmp_path / "executed"), other)
    metadata.storage_data = {key: info for key, info in metadata.storage_data.items() if key.fqn != name}
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo("other.bin", 0, other.stat().st_size)
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    table.write_bytes(pickle.dumps(metadata))
    assert_ranks_raise(layouts._load_other, 3, str(tmp_path), match=re.escape(name.removeprefix("model.")))
    assert not (tmp_path / "executed").exists()


CHANGES_CLASSES = (
    b"\x80\x02ctorch.distributed.checkpoint.metadata\nTensorProperties\n(N}X\x07\x00\x00\x00changedK\x01stb."
)


def _with_first(change: Callable[[Any, MetadataIndex], object]) -> Callable[[Path], bytes]:
    """A table in which an entry is changed."""

    def content(path: Path) -> bytes:
        metadata = pickle.loads(path.read_bytes())
        change(metadata, next(index for index in metadata.storage_data if "exp_avg" in index.fqn))
        return pickle.dumps(metadata)

    return content


def _lies_at(*info: Any) -> Callable[[Path], bytes]:
    return _with_first(lambda metadata, index: metadata.storage_data.update({index: _StorageInfo(*info)}))


TABLES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "executes": (lambda path: pickle.dumps(_Touches(path.parents[1] / "executed")), "`pathlib.*Path|getattr"),
    "cut": (lambda path: path.read_bytes()[: path.stat().st_size // 2], r"\.metadata` is no table of tensors"),
    "of a file elsewhere": (
        lambda path: path.read_bytes().replace(b"__0_0.distcp", b"../../../x/y"),
        "outside of its folder",
    ),
    "of the folder above": (_lies_at("..", 0, 0), "outside of its folder"),
    "before the file": (_lies_at("__0_0.distcp", -8, 8), "bytes of its tensors"),
    "of negative length": (_lies_at("__0_0.distcp", 8, -8), "bytes of its tensors"),
    "encoded": (
        _with_first(
            lambda metadata, index: setattr(metadata.storage_data[index], "transform_descriptors", ["stream.zstd/1"])
        ),
        "decoded",
    ),
    # the `BUILD` of a pickle sets attributes of whatever lies below it, also of a class that is allowed
    "changes classes": (lambda path: CHANGES_CLASSES, "`TensorProperties`"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    _write(folder)
    return folder


@pytest.mark.parametrize("name", TABLES)
def test_damaged_and_foreign_tables_are_refused(tmp_path: Path, written: Path, name: str):
    shutil.copytree(written / STATE, tmp_path / STATE)
    content, match = TABLES[name]
    table = tmp_path / STATE / ".metadata"
    table.write_bytes(content(table))
    with pytest.raises(ValueError, match=match):
        TensorReader(tmp_path / STATE).read_metadata()
    assert not (tmp_path / "executed").exists() and not hasattr(TensorProperties, "changed")


def test_a_table_of_python_3_13_is_read(tmp_path: Path, written: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(written / STATE, tmp_path / STATE)
    table = tmp_path / STATE / ".metadata"
    metadata = pickle.loads(table.read_bytes())
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    monkeypatch.setattr(type(tmp_path), "__module__", "pathlib._local")
    table.write_bytes(pickle.dumps(metadata))
    assert b"pathlib._local" in table.read_bytes()
    assert TensorReader(tmp_path / STATE).read_metadata().state_dict_metadata


def test_a_file_that_is_cut_is_refused(tmp_path: Path, written: Path):
    shutil.copytree(written / STATE, tmp_path / STATE)
    shard = tmp_path / STATE / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"__0_0.distcp` has \d+ of \d+ bytes"):
        TensorReader(tmp_path / STATE).read_metadata()


def test_the_planner_reads_no_pickled_values():
    item = SimpleNamespace(dest_index=MetadataIndex("weight/exp_avg"))
    with pytest.raises(ValueError, match="`weight/exp_avg`"):
        TensorPlanner().load_bytes(item, io.BytesIO())
