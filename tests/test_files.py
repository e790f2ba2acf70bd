"""Files that can't be read end in a sentence: which, why, and what to use in their place."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from hf_mmparallel._files import readable
from hf_mmparallel.data.global_batches import FILE, DataPosition


class _Executed:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


READERS = [
    lambda path: json.loads(path.read_text()),
    lambda path: torch.load(path, weights_only=True),
    lambda path: safe_open(str(path), framework="pt"),
]


@pytest.mark.parametrize("content", [b"", b"{", b"\x00garbage{" * 10])
@pytest.mark.parametrize("read", READERS)
def test_damaged_files_are_named(tmp_path, read, content):
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"state` can't be read") as raised, readable(path):
        read(path)
    assert "weights_only" not in str(raised.value) and len(str(raised.value)) < 300 + len(str(path))


def test_torch_is_not_quoted_where_it_advises_to_execute_a_file(tmp_path):
    path = tmp_path / "rng_state_0.pth"
    torch.save(_Executed(tmp_path / "executed"), path)
    with pytest.raises(ValueError, match="tensors and plain values") as raised, readable(path):
        READERS[1](path)
    assert not (tmp_path / "executed").exists() and "weights_only" not in str(raised.value)


def test_the_checkpoint_before_is_the_remedy(tmp_path):
    for number in (2, 10, 9, 30):
        (tmp_path / f"checkpoint-{number}").mkdir()
    for number, remedy in ((10, "checkpoint-9`"), (2, "another checkpoint")):
        path = tmp_path / f"checkpoint-{number}" / "trainer_state.json"
        path.write_text("{")
        with pytest.raises(ValueError, match=remedy), readable(path):
            READERS[0](path)


@pytest.mark.parametrize("text", ["[1]", '{"epochs": 1}', '{"epoch": '])
def test_a_damaged_position_is_named(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=rf"{FILE}` can't be read"):
        DataPosition.load(tmp_path)
