"""The end of a training by a signal: which step, which files, and what it says."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_mmparallel.callbacks import preemption
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs
from .test_checkpoints import PAIR, PLAN

pytestmark = pytest.mark.distributed

LONG = {"max_steps": 8, "optim": "adamw_torch", "learning_rate": 1e-3}


class Signals(TrainerCallback):
    """Sends a signal to this process, or to one of its data workers, at the start of a step or while it is saved."""

    def __init__(self, step: int, number: int, when: str = "begin"):
        self.step, self.number, self.when = step, number, when

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.when == "begin" and state.global_step + 1 == self.step:
            os.kill(os.getpid(), self.number)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.when == "optimizer" and state.global_step + 1 == self.step:
            os.kill(os.getpid(), self.number)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.when == "save":
            os.kill(os.getpid(), self.number)


def preempted(
    folder: Path, parallel: dict[str, Any] | None, signals: dict[int, Signals], **arguments: Any
) -> dict[str, Any]:
    """A run in which some ranks get signals."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(preemption.__name__).addHandler(handler)
    mine = [signals[dist.get_rank()]] if dist.get_rank() in signals else []
    trainer = runs.make_trainer(
        "llava", parallel, str(folder), save_on_preemption=True, callbacks=mine, **{**LONG, **arguments}
    )
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    trainer.train()
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == before
    evaluated = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    return {"step": trainer.state.global_step, "said": said, "evaluated": evaluated}


def assert_goes_on(size: int, folder: Path, parallel: dict[str, Any] | None) -> None:
    """Asserts that the run of `folder`, resumed, ends with the weights of one that nothing stopped."""
    straight, again = run_distributed(straight_and_again, size, folder, parallel)[0]
    assert straight is not None and again is not None
    assert all(torch.equal(again[name], straight[name]) for name in straight)


def straight_and_again(folder: Path, parallel: dict[str, Any] | None) -> list[dict[str, torch.Tensor] | None]:
    found = []
    for name in ("straight", "out"):
        trainer = runs.make_trainer("llava", parallel, str(folder / name), **LONG)
        trainer.train(resume_from_checkpoint=name == "out" or None)
        whole = trainer.gather_model()
        found.append(None if whole is None else {key: value.clone() for key, value in whole.state_dict().items()})
    return found


@pytest.mark.parametrize("async_save", [deep(False), True])
def test_all_ranks_save_the_same_step_and_the_run_goes_on_from_it(tmp_path: Path, async_save: bool):
    signals = {1: Signals(3, signal.SIGTERM), 2: Signals(3, signal.SIGUSR1)}
    ranks = run_distributed(preempted, 4, tmp_path / "out", PLAN, signals, async_save=async_save)
    assert [rank["step"] for rank in ranks] == [3] * 4
    assert [path.name for path in (tmp_path / "out").glob("*checkpoint-*")] == ["checkpoint-3"]
    (said,) = ranks[0]["said"]
    assert "2 ranks" in said and "SIGUSR1" in said and "step 3 of 8" in said and "`checkpoint-3`" in said
    assert all(rank["said"] == [] for rank in ranks[1:])
    assert_goes_on(4, tmp_path, PLAN)


@pytest.mark.parametrize(
    ("when", "arguments", "steps"),
    [
        ("optimizer", {}, 4),  # after the step's numbers were added up: the next one ends it
        deep("save", {"save_strategy": "steps", "save_steps": 2}, 3),
        deep("begin", {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}, 3),
        deep("begin", {"eval_strategy": "epoch", "save_strategy": "epoch"}, 3),  # the last step of an epoch
    ],
)
def test_a_signal_at_any_time_ends_the_step_it_can_be_agreed_in(
    tmp_path: Path, when: str, arguments: dict[str, Any], steps: int
):
    ranks = run_distributed(preempted, 2, tmp_path, PAIR, {1: Signals(3, signal.SIGTERM, when)}, **arguments)
    assert [rank["step"] for rank in ranks] == [steps] * 2
    assert all(steps not in rank["evaluated"] for rank in ranks)
    assert (tmp_path / f"checkpoint-{steps}" / "optimizer.pt").is_file()


def test_the_last_checkpoint_is_kept_beside_the_best(tmp_path: Path):
    best = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
        "learning_rate": 2.0,  # diverges, so that the best checkpoint is not the last
        "optim": "sgd",
    }
    run_distributed(preempted, 2, tmp_path, PAIR, {0: Signals(4, signal.SIGTERM)}, **best)
    left = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert "checkpoint-4" in left and len(left) == 2


def in_another_thread() -> str:
    """Why a run in another thread is refused."""
    trainer = runs.make_trainer("llava", PAIR, save_on_preemption=True)
    errors: list[BaseException] = []

    def train() -> None:
        try:
            trainer.train()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return str(errors[0])


def a_worker_that_gets_signals() -> int:
    """The first signal does nothing; the second one ends the worker, whose exit code comes back."""
    read, write = os.pipe()
    worker = os.fork()
    if worker == 0:
        preemption.leave_signals_to_rank()
        os.kill(os.getpid(), signal.SIGTERM)
        os.write(write, b"alive")
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(5)
    assert os.read(read, 5) == b"alive"
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def signals_to_all_processes(folder: Path) -> tuple[str, int, int]:
    """torchrun and Slurm send the signal to data workers as well."""
    refused = in_another_thread()

    class ToAll(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and dist.get_rank() == 1:
                children = multiprocessing.active_children()
                assert children
                for pid in (*(child.pid for child in children), os.getpid()):
                    os.kill(pid or 0, signal.SIGTERM)

    workers: dict[str, Any] = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork"}
    trainer = runs.make_trainer(
        "llava", PAIR, str(folder), save_on_preemption=True, callbacks=[ToAll()], **workers, **LONG
    )
    trainer.train()
    return refused, trainer.state.global_step, a_worker_that_gets_signals()


def test_data_workers_leave_the_signal_to_their_rank_and_end_by_a_second_one(tmp_path: Path):
    for refused, step, exit_code in run_distributed(signals_to_all_processes, 2, tmp_path):
        assert "main thread" in refused
        assert (step, exit_code) == (3, -signal.SIGTERM)
    assert (tmp_path / "checkpoint-3" / "optimizer.pt").is_file()


@pytest.mark.parametrize("size", [deep(1), 2])
def test_without_a_plan_the_stock_trainer_stops_too(tmp_path: Path, size: int):
    found = run_distributed(preempted, size, tmp_path / "out", None, {size - 1: Signals(3, signal.SIGUSR1)})
    assert [rank["step"] for rank in found] == [3] * size
    assert "1 rank " in found[0]["said"][0]
    assert_goes_on(size, tmp_path, None)
