"""Bad luck in training: ranks that raise, stand still or run out of memory, losses that are not finite."""

import importlib
import itertools
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.world import World, watcher
from tests.distributed import assert_ranks_raise, meet_at_rank_zero, outcomes, run_distributed

from . import runs
from .moments import AfterSteps, messages

pytestmark = pytest.mark.distributed

PAIR = {"vision": {}, "language_model": {}}
LAYOUT = {"vision": {}, "language_model": {"pp_size": 2}}


def at(step: int, do: Callable[[], Any]) -> AfterSteps:
    """Does something once, at the end of a step."""
    return AfterSteps(lambda number: do() if number == step else None)


class Stumbles(list):
    """A dataset that does something before a sample is read."""

    do: Any = None

    def __getitem__(self, index: Any) -> Any:
        if self.do is not None and not isinstance(index, slice):
            self.do()
        return super().__getitem__(index)


def fails(where: str) -> None:
    raise KeyError(f"a {where} that fails")


def rank_zero_fails() -> None:
    """A run in which rank 0, which keeps the store, raises in its second step."""
    meet_at_rank_zero()
    trainer = runs.make_trainer("llava", PAIR)
    if dist.get_rank() == 0:
        trainer.add_callback(at(1, lambda: fails("callback")))
    try:
        trainer.train()
    except Exception:
        if dist.get_rank() == 0:
            os._exit(7)  # at once, and with it the store
        raise


def test_the_other_ranks_tell_the_failure_of_rank_zero():
    zero, one = outcomes(rank_zero_fails, 2)
    assert zero.kind == "died" and "exit code 7" in zero.details
    assert one.error_type == "RemoteRankError"
    assert "rank 0: " in one.error and "a callback that fails" in one.error


def stands_still() -> list[str]:
    """Rank 1 is stopped, then rank 0 that keeps the store, then a dataset blocks; the first to say so ends it."""
    meet_at_rank_zero()
    watcher.STALL_S, watcher._INTERVAL_S, watcher._SILENCE_LIMIT_S = 1.5, 0.05, 0.6
    rank, pids = dist.get_rank(), [0, 0]
    dist.all_gather_object(pids, os.getpid())
    blocked, said = [False], []

    def go_on(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        blocked[0] = False
        os.kill(pids[1 - rank], signal.SIGCONT)

    handler = logging.Handler()
    handler.emit = go_on
    logging.getLogger(watcher.__name__).addHandler(handler)
    trainer = runs.make_trainer("llava", PAIR)

    def stops() -> None:
        time.sleep(0.2)  # so that what it does is known
        os.kill(os.getpid(), signal.SIGSTOP)

    trainer.add_callback(at(1 if rank else 2, stops))

    def waits() -> None:
        while blocked[0]:
            time.sleep(0.05)

    if rank == 0:
        trainer.train_dataset = Stumbles(trainer.train_dataset)
        trainer.train_dataset.do = waits
        trainer.add_callback(at(3, lambda: blocked.__setitem__(0, True)))
    trainer.train()
    assert trainer.state.global_step == 4
    return said


@pytest.mark.deep
def test_who_is_waited_for_is_said_while_ranks_stand_still():
    zero, one = run_distributed(stands_still, 2)
    stopped = r"wait for rank 1, .*\n  rank 0: `.*waiting for other ranks`, for \d s\n  rank 1: no sign of life, last"
    blocked = r"wait for rank 0:\n  rank 0: `step 4: reading samples`, for \d s\n  rank 1: `step 4: .*waiting for"
    assert any(re.search(stopped, said) for said in zero), zero
    assert any(re.search(blocked, said) for said in zero), zero
    assert any(re.search(r"Rank 0 gives no sign of life: .*rank 0 was last at `", said) for said in one), one


def at_the_start(folder: str) -> dict[str, Any]:
    """What is said of an output folder that can't be, of rank 0's exception, and of a picture that fails."""
    said: dict[str, Any] = {}
    Path(folder, f"file{dist.get_rank()}").touch()
    for name, call in (
        ("folder", lambda: runs.make_trainer("llava", PAIR, str(Path(folder, "file0", "out")))),
        ("exception", lambda: World().from_first_rank(lambda: {}["tokens"])),
    ):
        with pytest.raises(Exception) as raised:
            call()
        said[name] = f"{raised.typename}: {raised.value}"

    said["warnings"] = messages("hf_mmparallel")
    runs.draw_nothing()
    runs.report.gantt_png = lambda *args, **kwargs: fails("picture")
    trainer = runs.make_trainer("llava", PAIR, folder, pictures=True, max_steps=1, learning_rate=1e30)
    trainer.args.max_steps = 12  # of which it did not know when it decided what to predict
    trainer.train()
    said["threads"] = [thread.name for thread in threading.enumerate() if "hf_mmparallel" in thread.name]
    said["losses"] = [row["loss"] for row in runs.step_logs(trainer)]
    return said


@pytest.mark.deep
def test_what_goes_wrong_at_the_start_and_losses_that_are_not_finite(tmp_path: Path):
    zero, one = run_distributed(at_the_start, 2, str(tmp_path))
    assert zero["folder"] == one["folder"] and re.match(r"ValueError: `output_dir=.*file0/out'`", zero["folder"])
    assert zero["exception"] == "KeyError: 'tokens'"
    assert re.fullmatch("RemoteRankError: .*rank 0: KeyError: 'tokens'", one["exception"])
    picture, first, tenth = zero["warnings"]
    assert "KeyError: 'a picture that fails'" in picture
    assert re.search(r"of step \d is (nan|inf)", first) and "10th" in tenth
    assert len(zero["losses"]) == 12
    assert one["warnings"] == zero["threads"] == one["threads"] == []


def interrupts() -> None:
    """A rank that leaves by `sys.exit` is no riddle for the others."""
    trainer = runs.make_trainer("llava", PAIR)
    if dist.get_rank() == 1:
        trainer.add_callback(at(1, lambda: sys.exit("enough")))
    trainer.train()


def test_a_rank_that_exits_says_so():
    zero, _ = outcomes(interrupts, 2)
    assert "rank 1: SystemExit: enough" in zero.error


# Memory


def runs_out(where: str, rank: int) -> None:
    """A rank runs out of memory in its third backward, in an evaluation, or in its second step of the optimizer."""
    trainer: Any = runs.make_trainer("llava", LAYOUT, memory_limit_gib=0.5, max_steps=3, optim="adamw_torch")
    model, calls = trainer.engine.model, itertools.count(1)

    def full(*args: Any) -> None:
        is_time = {"backward": next(calls) == 3, "evaluation": True}.get(where, trainer.state.global_step == 1)
        if dist.get_rank() == rank and is_time:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words.")

    if where == "backward":
        model.get_submodule("model.language_model.layers.3").register_full_backward_hook(full)
    elif where == "evaluation":
        model.get_submodule("model.vision_tower").register_forward_pre_hook(full)
        trainer.evaluate()
    else:
        adam: Any = importlib.import_module("torch.optim.adam")
        place, name = (adam, "adam") if where == "optimizer" else (trainer, "_clip_grad_norm")
        plain = getattr(place, name)
        setattr(place, name, lambda *args, **kwargs: full() or plain(*args, **kwargs))
    trainer.train()


def test_the_module_the_microbatch_and_the_prediction_are_said():
    where = "the backward of microbatch 2 of `language_model`, stage 1 of 2"
    own = assert_ranks_raise(runs_out, 3, "backward", 2, match=f"Rank 2 ran out of memory in {where}")[2]
    assert re.search(r"\d samples? and [\d,]+ tokens: .* 2.00 GiB.*weights [\d.e-]+, gradients .* 0.5 GiB", own)
    assert "`memory_limit_gib`" in own and "`activation_checkpointing`" in own and "More words" not in own


@pytest.mark.deep
def test_an_evaluation_says_it_without_a_prediction():
    message, *_ = assert_ranks_raise(runs_out, 3, "evaluation", 0, match="of unknown size: CUDA out of memory")
    assert "Predicted" not in message and "Lower `per_device_train_batch_size`" in message


def test_in_the_step_of_an_optimizer_it_says_what_is_there():
    own = assert_ranks_raise(runs_out, 3, "optimizer", 1, match="Rank 1 ran out of memory in the optimizer's step")[1]
    assert "step of `language_model` (layers 0-1): CUDA out of memory. Tried to allocate 2.00 GiB. It has " in own
    found = re.search(r"([\d.e-]+) GiB of trained weights, ([\d.e-]+) GiB of gradients and ([\d.e-]+) GiB of opt", own)
    assert found is not None
    weights, gradients, state = map(float, found.groups())
    assert gradients == weights > 0 and state == pytest.approx(2 * weights, rel=0.01)  # of Adam, after one step
    assert "Predicted are " in own and '"adafactor"' in own and "`pp_size` or `tp_size` of `language_model`" in own
    assert "still lack" not in own and "More words" not in own


@pytest.mark.deep
def test_beside_the_step_of_an_optimizer_it_says_nothing_of_it():
    for message in assert_ranks_raise(runs_out, 3, "before the optimizer", 1, match="Tried to allocate 2.00 GiB"):
        assert "optimizer's step" not in message
