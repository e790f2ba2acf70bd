"""Checkpoints that are written while training goes on."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerState

from hf_mmparallel import MultimodalTrainingArguments
from hf_mmparallel.runtime import optimizer_checkpoint, writes
from hf_mmparallel.trainer import checkpoint_saves
from hf_mmparallel.trainer.argument_table import settings_without_plan
from hf_mmparallel.trainer.checkpoint_saves import BestCheckpoint, CheckpointSaves
from hf_mmparallel.world import World
from tests.deep_cases import deep
from tests.distributed import RankFailure, assert_ranks_raise, run_distributed

from . import runs
from .moments import AfterSteps

PAIR: dict[str, Any] = {"vision": {}, "language_model": {}}
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}
DIVIDED = {"dp_size": 2, "zero_stage": 3}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO-3": (2, {"vision": DIVIDED, "language_model": {**DIVIDED, "colocate_with": "vision"}}),
    "pipeline and replicas": (4, {"vision": {"dp_size": 2}, "language_model": {"pp_size": 2}}),
    "tensor parallel": (3, {"vision": {}, "language_model": {"tp_size": 2}}),
}


def saving_trainer(folder: Path, parallel: dict[str, Any] = PAIR, after_step: Any = None, **arguments: Any) -> Any:
    callbacks = [AfterSteps(after_step)] if after_step else []
    given = {"async_save": True, "save_strategy": "steps", "save_steps": 2, **ADAMW, **arguments}
    return runs.make_trainer("llava", parallel, str(folder), callbacks=callbacks, **given)


class HeldUp:
    """Holds up the threads that write, until it is released."""

    def __init__(self):
        self.go_on = threading.Event()
        run = writes.Writes.run

        def waits(of_rank: writes.Writes) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert self.go_on.wait(30)
            run(of_rank)

        writes.Writes.run = waits


def little_memory(folder: Path, parallel: dict[str, Any]) -> list[int]:
    """Early writes of each save, where host memory has room for a small part of the copies."""
    early: list[int] = []
    leave = writes.FolderSave.__exit__

    def noted(save: writes.FolderSave, *args: Any) -> None:
        early.append(save.writes.num_early)
        assert save.writes.copies is not None and save.writes.copies.num_bytes <= 100_000
        leave(save, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_saves, "available_bytes_per_rank", lambda world: 100_000.0)
        patch.setattr(writes.FolderSave, "__exit__", noted)
        saving_trainer(folder, parallel).train()
    return early


def saves(folder: Path, parallel: dict[str, Any]) -> tuple[list[tuple[int, list[str]]], list[int]]:
    """The checkpoints that are there after each step, while the first one is held up until the third step."""
    saving_trainer(folder / "at_once", parallel, async_save=False).train()
    early = little_memory(folder / "little", parallel)
    writer, seen = HeldUp(), []

    def note(step: int) -> None:
        seen.append((step, sorted(path.name for path in (folder / "held_up").glob("*checkpoint-*"))))
        if step == 3:
            writer.go_on.set()

    saving_trainer(folder / "held_up", parallel, note).train()
    assert not [thread.name for thread in threading.enumerate() if "hf_mmparallel" in thread.name]
    return seen, early


@pytest.mark.distributed
@pytest.mark.parametrize("layout", runs.deep_but(LAYOUTS, "ZeRO-3"))
def test_training_goes_on_and_the_files_are_those_of_a_save_that_it_waits_for(tmp_path: Path, layout: str):
    size, parallel = LAYOUTS[layout]
    ranks = run_distributed(saves, size, tmp_path, parallel)
    assert all(seen[:3] == [(1, []), (2, []), (3, ["_saving-checkpoint-2"])] for seen, _ in ranks)
    assert all(len(early) == 2 for _, early in ranks) and any(min(early) > 0 for _, early in ranks)
    checkpoints = ["checkpoint-2", "checkpoint-4"]
    for out in ("held_up", "little"):
        assert sorted(path.name for path in (tmp_path / out).glob("*checkpoint-*")) == checkpoints
        for name in checkpoints:
            ours, theirs = tmp_path / out / name, tmp_path / "at_once" / name
            files = sorted(path.name for path in theirs.iterdir())
            assert sorted(path.name for path in ours.iterdir()) == files and "optimizer.pt" in files
            for file in files:
                if file not in ("trainer_state.json", "training_args.bin"):  # which have times and the folder
                    assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file


def killed_while_writing(folder: Path) -> None:
    """Rank 1 is killed in the third step, while checkpoint-2 is there and its own checkpoint-3 half written."""
    close = optimizer_checkpoint._Values.close

    def dies(values: Any) -> None:
        if dist.get_rank() == 1 and "checkpoint-3" in str(values.path):
            os.kill(os.getpid(), signal.SIGKILL)
        close(values)

    optimizer_checkpoint._Values.close = dies
    saving_trainer(folder, save_steps=1).train()


def resumed(folder: Path) -> runs.Run:
    return runs.run_of(saving_trainer(folder), checkpoint=str(folder / "checkpoint-2"))


@pytest.mark.distributed
@pytest.mark.deep
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path):
    with pytest.raises(RankFailure):
        run_distributed(killed_while_writing, 2, tmp_path)
    found = {path.name for path in tmp_path.glob("*checkpoint-*")}
    assert found == {"checkpoint-1", "checkpoint-2", "_saving-checkpoint-3"}
    runs.assert_same_run(run_distributed(resumed, 2, tmp_path)[0], runs.stock("llava", **ADAMW))
    assert not list(tmp_path.glob("_saving-*"))


def cant_write(folder: Path, step: int) -> None:
    """Rank 1 can't write the values of the optimizer at a step."""
    write = optimizer_checkpoint._Values.write

    def fails(values: Any, offset: int, tensor: torch.Tensor) -> None:
        if dist.get_rank() == 1 and f"checkpoint-{step}" in str(values.path):
            raise OSError(28, "No space left on device")
        write(values, offset, tensor)

    optimizer_checkpoint._Values.write = fails
    steps: list[int] = []
    try:
        saving_trainer(folder, PAIR, steps.append, max_steps=6).train()
    finally:
        (folder / f"steps-{dist.get_rank()}").write_text(str(steps[-1]))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("step", "last", "left"),
    [pytest.param(2, "4", set(), id="next save"), deep(6, "6", {"checkpoint-2", "checkpoint-4"}, id="end")],
)
def test_what_the_writer_could_not_do_is_raised_by_all_ranks_at_the_next_save_or_the_end(
    tmp_path: Path, step: int, last: str, left: set[str]
):
    zero, one = assert_ranks_raise(cant_write, 2, tmp_path, step, match=rf"checkpoint-{step}`.*No space left")
    assert zero.endswith(f"rank 1: SaveError: {one}")
    assert [(tmp_path / f"steps-{rank}").read_text() for rank in (0, 1)] == [last, last]
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == left


def pushes(folder: Path) -> list[tuple[str, list[str]]]:
    """What would be pushed: the message, and the checkpoint's files then."""
    trainer = saving_trainer(folder)
    pushed: list[tuple[str, list[str]]] = []

    def push(checkpoint: str) -> None:
        files = sorted(path.name for path in Path(checkpoint).iterdir())
        pushed.append((f"{Path(checkpoint).name} of step {trainer.state.global_step}", files))

    trainer._push_from_checkpoint = push
    trainer.push_to_hub = lambda **kwargs: None
    trainer.args.push_to_hub = True
    trainer.train()
    return pushed


@pytest.mark.distributed
@pytest.mark.deep
def test_a_checkpoint_is_pushed_when_it_is_there(tmp_path: Path):
    zero, one = run_distributed(pushes, 2, tmp_path)
    assert [message for message, _ in zero] == ["checkpoint-2 of step 2", "checkpoint-4 of step 4"]
    assert all({"model.safetensors.index.json", "optimizer.pt", "trainer_state.json"} <= set(f) for _, f in zero)
    assert one == []


def fails_after_a_save(folder: Path) -> None:
    """The training fails while checkpoint-2 is held up for a moment."""
    writer = HeldUp()

    def fail(step: int) -> None:
        if step == 3:
            threading.Timer(0.5, writer.go_on.set).start()
            raise KeyError("a callback")

    saving_trainer(folder, PAIR, fail).train()


@pytest.mark.distributed
def test_a_training_that_fails_leaves_the_checkpoint_that_was_being_written(tmp_path: Path):
    assert_ranks_raise(fails_after_a_save, 2, tmp_path, match="a callback")
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-2"]


def test_it_is_said_to_have_no_effect_without_a_plan():
    args = MultimodalTrainingArguments(output_dir="out", use_cpu=True, async_save=True, report_to=[])
    assert "`async_save=True`" in "".join(settings_without_plan(args))


@pytest.fixture
def one_save(tmp_path: Path) -> Iterator[tuple[CheckpointSaves, TrainerState, Path]]:
    """A checkpoint that is the best one so far and is being written, by the only rank."""
    saves = CheckpointSaves(SimpleNamespace(async_save=True, save_total_limit=None), World())
    state, folder = TrainerState(), tmp_path / "checkpoint-8"
    BestCheckpoint(0.5, 4, str(tmp_path / "checkpoint-4")).give_to(state)
    saves.note_best_before(state)
    BestCheckpoint(0.4, 8, str(folder)).give_to(state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writes.FolderSave, "_complete", lambda save: None)  # others have not written
        with saves.checkpoint(folder, state):
            pass
        yield saves, state, folder


def test_a_checkpoint_in_whose_wait_ranks_are_lost_is_given_up(one_save, monkeypatch):
    saves, _, _ = one_save

    def lose(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(World, "raise_first", lose)
    with pytest.raises(RuntimeError, match="closed"):
        saves.finish()
    saves.start_anew()
    assert saves.has_given_up, "another one is due"


def test_a_checkpoint_that_is_given_up_is_not_the_best_one(one_save):
    saves, state, folder = one_save
    before, best = BestCheckpoint(0.5, 4, str(folder.with_name("checkpoint-4"))), BestCheckpoint.of(state)
    assert saves.best_left(state) == best
    saves.start_anew()
    assert saves.best_left(state) == before
    BestCheckpoint(0.3, 12, str(folder)).give_to(state)  # a better one is not saved yet
    assert saves.best_left(state) == BestCheckpoint(0.3, 12, before.path)
    folder.mkdir()  # it was there when ranks were lost
    best.give_to(state)
    assert saves.best_left(state) == best
