"""Bad luck in training: ranks that raise, stand still or can't write, losses that are not finite."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

from hf_mmparallel.world import World, watcher
from tests.deep_cases import deep
from tests.distributed import assert_ranks_raise, meet_at_rank_zero, outcomes, run_distributed

from . import runs

pytestmark = pytest.mark.distributed

PAIR = {"vision": {}, "language_model": {}}
SAVING = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3}


class At(TrainerCallback):
    """Does something once, at the end of a step."""

    def __init__(self, step: int, do: Any):
        self.step = step
        self.do = do

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.do()


class Stumbles(list):
    """A dataset that does something before a sample is read."""

    do: Any = None

    def __getitem__(self, index: Any) -> Any:
        if self.do is not None and not isinstance(index, slice):
            self.do()
        return super().__getitem__(index)


def fails(where: str) -> None:
    raise KeyError(f"a {where} that fails")


def rank_zero_fails(where: str, folder: str) -> None:
    """A run in which rank 0, which keeps the store, raises in its second step or around it."""
    meet_at_rank_zero()
    main = dist.get_rank() == 0
    trainer = runs.make_trainer("llava", PAIR, folder, **SAVING)
    if main and where == "dataset":
        trainer.train_dataset = Stumbles(trainer.train_dataset)
        trainer.add_callback(At(1, lambda: setattr(trainer.train_dataset, "do", lambda: fails(where))))
    elif main and where == "callback":
        trainer.add_callback(At(1, lambda: fails(where)))
    elif main and where == "checkpoint":
        trainer._save_state = lambda folder: fails(where)
    try:
        trainer.train()
    except Exception:
        if main:
            os._exit(7)  # at once, and with it the store
        raise


@pytest.mark.parametrize("where", [deep("dataset"), "callback", deep("checkpoint")])
def test_the_other_ranks_tell_the_failure_of_rank_zero(where: str, tmp_path: Path):
    zero, one = outcomes(rank_zero_fails, 2, where, str(tmp_path))
    assert zero.kind == "died" and "exit code 7" in zero.details
    if where == "dataset":  # rank 0 could tell it with the sizes of the samples
        assert one.error_type == "BadSampleError" and "a dataset that fails" in one.error
    else:
        assert one.error_type == "RemoteRankError"
        assert "rank 0: " in one.error and f"a {where} that fails" in one.error


def stands_still() -> list[str]:
    """Rank 1 is stopped, then rank 0 that keeps the store, then a dataset blocks; the first to say so ends it."""
    meet_at_rank_zero()
    watcher.STALL_S, watcher._INTERVAL_S, watcher._SILENT_S = 1.5, 0.05, 0.6
    rank, pids = dist.get_rank(), [0, 0]
    dist.all_gather_object(pids, os.getpid())
    blocked, said = [False], []

    class Continues(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            blocked[0] = False
            os.kill(pids[1 - rank], signal.SIGCONT)

    logging.getLogger(watcher.__name__).addHandler(Continues())
    trainer = runs.make_trainer("llava", PAIR)

    def stops() -> None:
        time.sleep(0.2)  # so that what it does is known
        os.kill(os.getpid(), signal.SIGSTOP)

    trainer.add_callback(At(1 if rank else 2, stops))

    def waits() -> None:
        while blocked[0]:
            time.sleep(0.05)

    if rank == 0:
        trainer.train_dataset = Stumbles(trainer.train_dataset)
        trainer.train_dataset.do = waits
        trainer.add_callback(At(3, lambda: blocked.__setitem__(0, True)))
    trainer.train()
    assert trainer.state.global_step == 4
    return said


def test_who_is_waited_for_is_said_while_ranks_stand_still():
    zero, one = run_distributed(stands_still, 2)
    stopped = (
        r"wait for rank 1, .*\n  rank 0: `.*, waiting for other ranks`, for \d s\n  rank 1: no sign of life, last at `"
    )
    blocked = (
        r"wait for rank 0:\n  rank 0: `step 4: reading samples`, for \d s\n  rank 1: `step 4: .*, waiting for other"
    )
    store = r"Rank 0 gives no sign of life: the store .* \d\.\d s; rank 0 was last at `"
    assert any(re.search(stopped, said) for said in zero), zero
    assert any(re.search(blocked, said) for said in zero), zero
    assert any(re.search(store, said) for said in one), one


def limit_files() -> None:
    """As on a full disk: a file can't grow beyond 20 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def disk_is_full(folder: str) -> None:
    trainer = runs.make_trainer("llava", PAIR, folder, **SAVING)
    if dist.get_rank() == 1:
        trainer.add_callback(At(3, limit_files))
    trainer.train()


def goes_on(folder: str) -> int:
    trainer = runs.make_trainer("llava", PAIR, folder, **SAVING)
    trainer.train(resume_from_checkpoint=True)
    return trainer.state.global_step


@pytest.mark.deep
def test_a_full_disk_is_a_sentence_and_the_last_checkpoint_stays(tmp_path: Path):
    last = re.escape(str(tmp_path / "checkpoint-2"))
    match = rf"/checkpoint-4`.*File too large.* `{last}`"
    zero, one = assert_ranks_raise(disk_is_full, 2, str(tmp_path), match=match)
    assert zero.endswith(f"rank 1: SaveError: {one}")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert run_distributed(goes_on, 2, str(tmp_path)) == [4, 4]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["checkpoint-2", "checkpoint-4"]


def at_the_start(folder: str) -> dict[str, Any]:
    """What is said of an output folder that can't be, of rank 0's exception, and of a picture that fails."""
    said: dict[str, Any] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    below_a_file = Path(folder, f"file{dist.get_rank()}")
    below_a_file.touch()
    attempt("folder", lambda: runs.make_trainer("llava", PAIR, str(Path(folder, "file0", "out"))))
    attempt("exception", lambda: World().from_first_rank(lambda: {}["tokens"]))

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("hf_mmparallel").addHandler(handler)
    runs.draw_nothing()
    runs.report.gantt_png = lambda *args, **kwargs: fails("picture")
    draw_nothing, runs.draw_nothing = runs.draw_nothing, lambda: None
    try:
        trainer = runs.make_trainer("llava", PAIR, folder, max_steps=1, learning_rate=1e30)
        trainer.args.max_steps = 12
        trainer.train()
    finally:
        runs.draw_nothing = draw_nothing
    said["warnings"] = records
    said["threads"] = [thread.name for thread in threading.enumerate() if "hf_mmparallel" in thread.name]
    said["losses"] = [row["loss"] for row in runs.step_logs(trainer)]
    return said


def test_what_goes_wrong_at_the_start_and_losses_that_are_not_finite(tmp_path: Path):
    zero, one = run_distributed(at_the_start, 2, str(tmp_path))
    assert zero["folder"] == one["folder"]
    assert re.match(r"ValueError: `output_dir=.*file0/out'`", zero["folder"])
    assert zero["exception"] == "KeyError: 'tokens'"
    assert re.fullmatch("RemoteRankError: .*rank 0: KeyError: 'tokens'", one["exception"])
    assert one["warnings"] == []
    picture, first, tenth = zero["warnings"]
    assert "KeyError: 'a picture that fails'" in picture
    assert re.search(r"of step \d is (nan|inf)", first) and "10th" in tenth
    assert len(zero["losses"]) == 12
    assert zero["threads"] == one["threads"] == []


def interrupts() -> None:
    """A rank that leaves by `sys.exit` is no riddle for the others."""
    trainer = runs.make_trainer("llava", PAIR)
    if dist.get_rank() == 1:
        trainer.add_callback(At(1, lambda: exec("raise SystemExit('enough')")))
    trainer.train()


def test_a_rank_that_exits_says_so():
    zero, _ = outcomes(interrupts, 2)
    assert "rank 1: SystemExit: enough" in zero.error
