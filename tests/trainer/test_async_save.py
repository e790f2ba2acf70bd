"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_mmparallel import MultimodalTrainingArguments
from hf_mmparallel.runtime import optimizer_checkpoint, writes
from hf_mmparallel.trainer import checkpoint_saves
from hf_mmparallel.trainer.argument_table import settings_without_plan
from tests.deep_cases import deep
from tests.distributed import RankFailure, assert_ranks_raise, run_distributed

from . import runs
from .test_checkpoints import PAIR, PLAN, SAVING

pytestmark = pytest.mark.distributed


def divided(zero_stage: int) -> dict[str, Any]:
    """Two replicas that divide their parameters."""
    settings = {"dp_size": 2, "zero_stage": zero_stage}
    return {"vision": settings, "language_model": {**settings, "colocate_with": "vision"}}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline and replicas": (4, PLAN),
    "tensor parallel": (3, {"vision": {}, "language_model": {"tp_size": 2}}),
    "ZeRO-1": (2, divided(1)),
    "ZeRO-3": (2, divided(3)),
}


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


class Note(TrainerCallback):
    """Calls a function at the end of each step."""

    def __init__(self, call: Any):
        self.call = call

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.call(state.global_step)


def held_up(folder: Path, parallel: dict[str, Any]) -> list[tuple[int, list[str]]]:
    """The checkpoints that are there after each step, while the first one is held up until the third step."""
    writer, seen = HeldUp(), []

    def note(step: int) -> None:
        seen.append((step, sorted(path.name for path in folder.glob("*checkpoint-*"))))
        if step == 3:
            writer.go_on.set()

    trainer = runs.make_trainer("llava", parallel, str(folder), async_save=True, callbacks=[Note(note)], **SAVING)
    trainer.train()
    assert not [thread.name for thread in threading.enumerate() if "hf_mmparallel" in thread.name]
    return seen


def save_at_once(folder: Path, parallel: dict[str, Any]) -> None:
    runs.make_trainer("llava", parallel, str(folder), **SAVING).train()


def both_saves(folder: Path, parallel: dict[str, Any]) -> list[tuple[int, list[str]]]:
    """Saves at once first, so that nothing is held up."""
    save_at_once(folder / "at_once", parallel)
    return held_up(folder / "out", parallel)


@pytest.mark.parametrize("layout", [deep(name, unless=name == "ZeRO-3") for name in LAYOUTS])
def test_training_goes_on_and_the_files_are_those_of_a_save_that_it_waits_for(tmp_path: Path, layout: str):
    size, parallel = LAYOUTS[layout]
    for seen in run_distributed(both_saves, size, tmp_path, parallel):
        assert seen[:3] == [(1, []), (2, []), (3, ["_saving-checkpoint-2"])]
    for name in ("checkpoint-2", "checkpoint-4"):
        ours, theirs = tmp_path / "out" / name, tmp_path / "at_once" / name
        files = sorted(path.name for path in theirs.iterdir())
        assert sorted(path.name for path in ours.iterdir()) == files and "optimizer.pt" in files
        for file in files:
            if file not in ("trainer_state.json", "training_args.bin"):  # which have times and the folder
                assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file
    assert sorted(path.name for path in (tmp_path / "out").glob("*checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


def killed_while_writing(folder: Path) -> None:
    """Rank 1 is killed in the third step, while checkpoint-2 is there and its own checkpoint-3 half written."""
    trainer = runs.make_trainer("llava", PAIR, str(folder), async_save=True, **{**SAVING, "save_steps": 1})
    close = optimizer_checkpoint._Values.close

    def dies(values: Any) -> None:
        if dist.get_rank() == 1 and "checkpoint-3" in str(values.path):
            os.kill(os.getpid(), signal.SIGKILL)
        close(values)

    optimizer_checkpoint._Values.close = dies
    trainer.train()


def straight_and_again(folder: Path) -> list[dict[str, torch.Tensor] | None]:
    """The weights of a run, and of one that goes on from a checkpoint."""
    found = []
    for name, checkpoint in (("straight", None), ("out", str(folder / "out" / "checkpoint-2"))):
        trainer = runs.make_trainer("llava", PAIR, str(folder / name), async_save=True, **SAVING)
        trainer.train(resume_from_checkpoint=checkpoint)
        whole = trainer.gather_model()
        found.append(None if whole is None else {key: value.clone() for key, value in whole.state_dict().items()})
    return found


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path):
    with pytest.raises(RankFailure):
        run_distributed(killed_while_writing, 2, tmp_path / "out")
    whole = sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*"))
    assert whole == ["checkpoint-1", "checkpoint-2"]
    assert (tmp_path / "out" / "_saving-checkpoint-3").is_dir()
    straight, again = run_distributed(straight_and_again, 2, tmp_path)[0]
    assert straight is not None and again is not None
    assert all(torch.equal(again[name], straight[name]) for name in straight)
    assert not list((tmp_path / "out").glob("_saving-*"))


def cant_write(folder: Path, rank: int, step: int) -> None:
    """A rank can't write the values of the optimizer at a step."""
    write = optimizer_checkpoint._Values.write

    def fails(values: Any, offset: int, tensor: torch.Tensor) -> None:
        if dist.get_rank() == rank and f"checkpoint-{step}" in str(values.path):
            raise OSError(28, "No space left on device")
        write(values, offset, tensor)

    optimizer_checkpoint._Values.write = fails
    steps: list[int] = []
    trainer = runs.make_trainer(
        "llava", PAIR, str(folder), async_save=True, callbacks=[Note(steps.append)], **{**SAVING, "max_steps": 6}
    )
    try:
        trainer.train()
    finally:
        (folder / f"steps-{dist.get_rank()}").write_text(str(steps[-1]))


@pytest.mark.parametrize(("rank", "step"), [deep(0, 2), (1, 2), deep(1, 6)])
def test_what_the_writer_could_not_do_is_raised_by_all_ranks_at_the_next_save_or_the_end(
    tmp_path: Path, rank: int, step: int
):
    said = assert_ranks_raise(cant_write, 2, tmp_path, rank, step, match=rf"checkpoint-{step}`.*No space left")
    assert said[1 - rank].endswith(f"rank {rank}: SaveError: {said[rank]}")
    last = {2: "4", 6: "6"}[step]  # the next save, or the end
    assert [(tmp_path / f"steps-{index}").read_text() for index in (0, 1)] == [last, last]
    whole = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert whole == ({"checkpoint-2", "checkpoint-4"} if step == 6 else set())


def pushes(folder: Path) -> list[tuple[str, list[str]]]:
    """What would be pushed: the message, and the checkpoint's files then."""
    trainer = runs.make_trainer("llava", PAIR, str(folder), async_save=True, **SAVING)
    pushed: list[tuple[str, list[str]]] = []

    def push(checkpoint: str) -> None:
        files = sorted(path.name for path in Path(checkpoint).iterdir())
        pushed.append((f"{Path(checkpoint).name} of step {trainer.state.global_step}", files))

    trainer._push_from_checkpoint = push
    trainer.push_to_hub = lambda **kwargs: None
    trainer.args.push_to_hub = True
    trainer.train()
    assert trainer.state.global_step == 4
    return pushed


@pytest.mark.deep
def test_a_checkpoint_is_pushed_when_it_is_there(tmp_path: Path):
    zero, one = run_distributed(pushes, 2, tmp_path)
    assert [message for message, _ in zero] == ["checkpoint-2 of step 2", "checkpoint-4 of step 4"]
    assert all({"model.safetensors.index.json", "optimizer.pt", "trainer_state.json"} <= set(f) for _, f in zero)
    assert one == []


def no_memory(folder: Path) -> tuple[int, int]:
    """Early and late writes where host memory has room for a small part of the copies."""
    save_at_once(folder / "at_once", PAIR)
    checkpoint_saves.available_bytes_per_rank = lambda world: 100_000.0
    early: list[int] = []
    leave = writes.FolderSave.__exit__

    def noted(save: writes.FolderSave, *args: Any) -> None:
        early.append(save.writes.num_early)
        assert save.writes.copies is not None and save.writes.copies.num_bytes <= 100_000
        leave(save, *args)

    writes.FolderSave.__exit__ = noted
    runs.make_trainer("llava", PAIR, str(folder / "little"), async_save=True, **SAVING).train()
    return min(early), len(early)


def test_what_does_not_fit_into_host_memory_is_written_at_once(tmp_path: Path):
    for early, saves in run_distributed(no_memory, 2, tmp_path):
        assert early > 0 and saves == 2
    for file in ("optimizer.pt", "model-00001-of-00002.safetensors"):
        little, at_once = (tmp_path / name / "checkpoint-4" / file for name in ("little", "at_once"))
        assert little.read_bytes() == at_once.read_bytes()


def fails_after_a_save(folder: Path) -> None:
    """The training fails while checkpoint-2 is held up for a moment."""
    writer = HeldUp()

    def fail(step: int) -> None:
        if step == 3:
            threading.Timer(0.5, writer.go_on.set).start()
            raise KeyError("a callback")

    runs.make_trainer("llava", PAIR, str(folder), async_save=True, callbacks=[Note(fail)], **SAVING).train()


def test_a_training_that_fails_leaves_the_checkpoint_that_was_being_written(tmp_path: Path):
    assert_ranks_raise(fails_after_a_save, 2, tmp_path, match="a callback")
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-2"]


def test_it_is_said_to_have_no_effect_without_a_plan():
    args = MultimodalTrainingArguments(output_dir="out", use_cpu=True, async_save=True, report_to=[])
    assert "`async_save=True`" in "".join(settings_without_plan(args))
