"""What unfinished saves leave behind, who syncs what, and what is said of a disk that takes no more."""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_mmparallel.runtime import sharded_model, writes
from hf_mmparallel.runtime.writes import FolderSave, SaveError, save_errors
from hf_mmparallel.world import World
from tests.distributed import run_distributed


def test_only_what_unfinished_saves_left_is_removed(tmp_path: Path):
    for name in ("_saving-checkpoint-4", "_saving-previous-checkpoint-2", "_saving-previous-checkpoint-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state").touch()
    kept = ["_saving-checkpoint-best", "_saving-money", "_saving-notes.txt", "checkpoint-2", "checkpoint-3"]
    for name in (kept[0], kept[1], kept[3]):
        (tmp_path / name).mkdir()
    (tmp_path / kept[2]).touch()
    (tmp_path / "_saving-checkpoint-6").touch()  # a file where the new folder is to be written
    with FolderSave(tmp_path / "checkpoint-6", World()) as save:
        (save.folder / "state").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "checkpoint-6"]
    assert (tmp_path / "checkpoint-3" / "state").exists()  # it comes back: its replacement never arrived


def synced(folder: str) -> list[str]:
    """The files that this rank syncs when it saves a model and its random state."""
    from hf_mmparallel.trainer import trainer
    from tests.trainer import runs

    files: list[str] = []
    sync = writes.sync_file

    def recording(path: Path) -> None:
        files.append(Path(path).name)
        sync(path)

    writes.sync_file = sharded_model.sync_file = trainer.sync_file = recording
    modules = {"vision": {}, "language_model": {}}
    runs.make_trainer("llava", modules, folder, max_steps=1, save_strategy="steps", save_steps=1).train()
    return files


def full_disk(folder: Path) -> list[str]:
    """What is said of files that can't grow beyond 4 kB, by each of the libraries that write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    tensor = torch.zeros(9999)
    path = folder / "_saving-checkpoint-4"
    said = []
    for write in (
        lambda: torch.save(tensor, path / "rng_state_0.pth"),
        lambda: save_file({"a": tensor}, path / "model.safetensors"),
        lambda: (path / "state.json").write_text("a" * 9999),
    ):
        with pytest.raises(SaveError) as raised, save_errors(folder / "checkpoint-4"):
            write()
        said.append(str(raised.value))
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)  # this rank reports in a file, too
    return said


def on_a_rank(folder: Path) -> tuple[list[str], list[str]]:
    full = folder / f"full-{os.environ['RANK']}"
    for name in ("checkpoint-2", "_saving-checkpoint-4"):
        (full / name).mkdir(parents=True)
    return synced(str(folder / "run")), full_disk(full)


@pytest.mark.distributed
def test_files_are_synced_on_the_host_that_wrote_them_and_every_writer_says_that_the_disk_is_full(tmp_path: Path):
    (zero, said), (one, _) = run_distributed(on_a_rank, 2, tmp_path)
    assert {"model-00001-of-00002.safetensors", "rng_state_0.pth", "config.json", "trainer_state.json"} <= set(zero)
    assert {"scheduler.pt", "model.safetensors.index.json", "_saving-checkpoint-1", "run"} <= set(zero)
    assert set(one) == {"model-00002-of-00002.safetensors", "rng_state_1.pth"}
    files = (tmp_path / "run" / "checkpoint-1").rglob("*")
    assert {path.name for path in files if not path.name.startswith("model-")} <= {*zero, *one}
    for sentence in said:
        assert all(f"`{tmp_path / 'full-0' / name}`" in sentence for name in ("checkpoint-4", "checkpoint-2"))
        assert "GiB are free" in sentence


def of_system(number: int, file: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([file] if file else []))


CUT = "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"
# error, its cause and its context, and what is said; `None` if it is left alone
CAUSES: dict[str, tuple[Exception, Exception | None, Exception | None, str | None]] = {
    "read-only": (of_system(errno.EROFS, "out/x"), None, None, r"Read-only file system \(`out/x`\).*`output_dir`"),
    "cut by torch": (RuntimeError(CUT), None, None, "Free some space"),
    "wrapped": (RuntimeError("wrapped"), of_system(errno.ENOSPC), None, "No space left on device"),
    "of another rank": (OSError("rank 1: [Errno 28] No space"), None, None, r"device\. .*Free some space"),
    "cut by a limit": (RuntimeError(CUT), None, of_system(errno.EFBIG), "File too large"),
    # made while a callback looked for a file that need not be there
    "a mistake": (KeyError("of a callback"), None, of_system(errno.ENOENT, "best.json"), None),
    "a value": (ValueError("mine"), None, None, None),
    "a connection": (RuntimeError("Connection closed by peer"), None, None, None),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_of_an_error_is_found_and_others_are_left_alone(tmp_path: Path, name: str):
    error, cause, context, said = CAUSES[name]
    error.__cause__, error.__context__ = cause, context
    expected = type(error) if said is None else SaveError
    with pytest.raises(expected, match=said) as caught, save_errors(tmp_path / "out"):
        raise error
    assert said is not None or caught.value is error
