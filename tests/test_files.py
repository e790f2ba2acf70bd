"""Files that can't be read end in a sentence: which, why, and what to use in their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_mmparallel._files import readable
from hf_mmparallel.data.global_batches import FILE, DataPosition


class _Executed:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def _read_torch(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def _read_safetensors(path: Path) -> Any:
    return safe_open(str(path), framework="pt")


@pytest.mark.parametrize("content", [b"", b"{", b"\x00garbage{" * 10])
@pytest.mark.parametrize("read", [_read_json, _read_torch, _read_safetensors])
def test_damaged_files_are_named(tmp_path, read, content):
    path = tmp_path / "state"
    path.write_bytes(content)
    with (
        pytest.raises(ValueError, match=r"state` can't be read \(.+\)\. Copy or download it again\.") as raised,
        readable(path),
    ):
        read(path)
    assert "weights_only" not in str(raised.value) and len(str(raised.value)) < 300 + len(str(path))


def test_torch_is_not_quoted_where_it_advises_to_execute_a_file(tmp_path):
    path = tmp_path / "rng_state_0.pth"
    torch.save(_Executed(tmp_path / "executed"), path)
    said = "it holds other things than tensors and plain values"
    with pytest.raises(ValueError, match=said), readable(path):
        _read_torch(path)
    assert not (tmp_path / "executed").exists()


def test_the_checkpoint_before_is_the_remedy(tmp_path):
    for number in (2, 10, 9, 30):
        (tmp_path / f"checkpoint-{number}").mkdir()
    for number, remedy in ((10, "checkpoint-9`"), (2, "Resume from another checkpoint")):
        path = tmp_path / f"checkpoint-{number}" / "trainer_state.json"
        path.write_text("{")
        with pytest.raises(ValueError, match=remedy), readable(path):
            _read_json(path)


@pytest.mark.parametrize("text", ["[1]", '{"epochs": 1}', '{"epoch": '])
def test_a_damaged_position_is_named(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=rf"{FILE}` can't be read"):
        DataPosition.load(tmp_path)


def test_what_is_whole_is_read(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with readable(tmp_path / "model.safetensors"):
        assert list(_read_safetensors(tmp_path / "model.safetensors").keys()) == ["weight"]
