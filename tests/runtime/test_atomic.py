"""What unfinished saves leave behind, who syncs what, and what is said of a disk that takes no more."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_mmparallel.runtime import writes
from hf_mmparallel.runtime.writes import FolderSave, SaveError, save_errors
from hf_mmparallel.world import World
from tests.distributed import run_distributed


def test_only_what_unfinished_saves_left_is_removed(tmp_path: Path):
    for name in ("_saving-checkpoint-4", "_saving-previous-checkpoint-2", "_saving-previous-checkpoint-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state").touch()
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "_saving-checkpoint-6").touch()  # a file where the new folder is to be written
    kept = ["_saving-checkpoint-best", "_saving-money", "_saving-notes.txt", "checkpoint-2", "checkpoint-3"]
    (tmp_path / "_saving-checkpoint-best").mkdir()
    (tmp_path / "_saving-money").mkdir()
    (tmp_path / "_saving-notes.txt").touch()
    with FolderSave(tmp_path / "checkpoint-6", World()) as writes:
        (writes.folder / "state").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "checkpoint-6"]
    assert (tmp_path / "checkpoint-3" / "state").exists()  # it comes back: its replacement never arrived


def synced(folder: str) -> list[str]:
    """The files that this rank syncs when it saves a model and its random state."""
    from tests.trainer import runs

    files: list[str] = []
    sync = writes.sync_file

    def recording(path: Path) -> None:
        files.append(Path(path).name)
        sync(path)

    from hf_mmparallel.runtime import sharded_model
    from hf_mmparallel.trainer import trainer

    writes.sync_file = sharded_model.sync_file = trainer.sync_file = recording
    runs.make_trainer(
        "llava", {"vision": {}, "language_model": {}}, folder, save_strategy="steps", save_steps=4
    ).train()
    return files


def full_disk(folder: str) -> list[str]:
    """What is said of files that can't grow beyond 4 kB, by each of the libraries that write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    tensor = torch.zeros(9999)
    path = Path(folder, "_saving-checkpoint-4")
    writers = [
        lambda: torch.save(tensor, path / "rng_state_0.pth"),
        lambda: save_file({"a": tensor}, path / "model.safetensors"),
        lambda: (path / "state.json").write_text("a" * 9999),
    ]
    said = []
    for write in writers:
        try:
            with save_errors(Path(folder, "checkpoint-4")):
                write()
        except SaveError as error:
            said.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)  # this rank reports in a file, too
    return said


def on_a_rank(folder: Path) -> tuple[list[str], list[str]]:
    full = folder / f"full-{os.environ['RANK']}"
    for name in ("checkpoint-2", "_saving-checkpoint-4"):
        (full / name).mkdir(parents=True)
    return synced(str(folder / "run")), full_disk(str(full))


@pytest.mark.distributed
def test_files_are_synced_on_the_host_that_wrote_them_and_every_writer_says_that_the_disk_is_full(tmp_path: Path):
    (zero, said), (one, _) = run_distributed(on_a_rank, 2, tmp_path)
    assert {"model-00001-of-00002.safetensors", "rng_state_0.pth", "config.json", "trainer_state.json"} <= set(zero)
    assert {"scheduler.pt", "model.safetensors.index.json", "_saving-checkpoint-4", "run"} <= set(zero)
    assert set(one) == {"model-00002-of-00002.safetensors", "rng_state_1.pth"}
    files = (tmp_path / "run" / "checkpoint-4").rglob("*")
    assert {path.name for path in files if not path.name.startswith("model-")} <= {*zero, *one}
    assert len(said) == 3
    for sentence in said:
        assert f"`{tmp_path / 'full-0' / 'checkpoint-4'}`" in sentence and "GiB are free" in sentence, sentence
        assert f"`{tmp_path / 'full-0' / 'checkpoint-2'}`" in sentence, sentence


def test_the_cause_of_an_error_is_found_and_others_are_left_alone(tmp_path: Path):
    def raised(error: Exception, cause: Exception | None = None) -> str:
        with pytest.raises(Exception) as caught, save_errors(tmp_path / "out"):
            raise error from cause
        assert caught.value is error or isinstance(caught.value, SaveError)
        return f"{type(caught.value).__name__}: {caught.value}"

    read_only = raised(OSError(errno.EROFS, os.strerror(errno.EROFS), "out/x"))
    assert "Read-only file system (`out/x`)" in read_only and "`output_dir`" in read_only
    full = raised(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"))
    assert "SaveError" in full and "Free some space" in full
    wrapped = raised(RuntimeError("wrapped"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert "SaveError" in wrapped and "No space left on device" in wrapped
    elsewhere = raised(OSError("rank 1: [Errno 28] No space left on device"))
    assert "No space left on device. " in elsewhere and "Free some space" in elsewhere
    cut = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    cut.__context__ = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert "File too large" in raised(cut)
    mistake = KeyError("of a callback")  # made while it looked for a file that need not be there
    mistake.__context__ = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "best.json")
    assert raised(mistake) == "KeyError: 'of a callback'"
    assert raised(ValueError("mine")) == "ValueError: mine"
    assert raised(RuntimeError("Connection closed by peer")) == "RuntimeError: Connection closed by peer"
