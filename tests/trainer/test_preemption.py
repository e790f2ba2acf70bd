"""The end of a training by a signal: which step, which files, and what it says."""

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

from hf_mmparallel.trainer import preemption_callback as preemption
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs
from .moments import messages

pytestmark = pytest.mark.distributed

PAIR: dict[str, Any] = {"vision": {}, "language_model": {}}
PIPELINE: dict[str, Any] = {"vision": {}, "language_model": {"pp_size": 2}}
LONG = {"max_steps": 5, "optim": "adamw_torch", "learning_rate": 1e-3}


Signals = dict[int, tuple[int, str]]  # rank -> signal and the event of the third step at which the process gets it


def preempted(folder: Path, parallel: dict[str, Any] | None, signals: Signals, **arguments: Any) -> dict[str, Any]:
    """A run in which some ranks get signals."""
    said, sender = messages(preemption.__name__), TrainerCallback()

    def send(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), signals[dist.get_rank()][0])

    if dist.get_rank() in signals:
        setattr(sender, signals[dist.get_rank()][1], send)
    given = {"save_on_preemption": True, "callbacks": [sender], **LONG, **arguments}
    trainer = runs.make_trainer("llava", parallel, str(folder), **given)
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    trainer.train()
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == before
    evaluated = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    return {"step": trainer.state.global_step, "said": said, "evaluated": evaluated}


def preempted_and_resumed(
    folder: Path, parallel: dict[str, Any] | None, signals: Signals, **arguments: Any
) -> tuple[dict[str, Any], list[runs.Run]]:
    """A run in which some ranks get signals, what goes on from it, and a run that nothing stops."""
    found = preempted(folder / "out", parallel, signals, **arguments)
    assert [path.name for path in (folder / "out").glob("*checkpoint-*")] == ["checkpoint-3"]
    trainers = [runs.make_trainer("llava", parallel, str(folder / "out"), **LONG) for _ in range(2)]
    checkpoint = str(folder / "out" / "checkpoint-3")
    return found, [runs.run_of(trainers[0], checkpoint=checkpoint), runs.run_of(trainers[1])]


@pytest.mark.parametrize(
    ("parallel", "signals", "async_save"),
    [
        pytest.param(PIPELINE, {1: signal.SIGTERM, 2: signal.SIGUSR1}, True, id="plan"),
        deep(None, {1: signal.SIGUSR1}, False, id="no plan"),
        deep(PIPELINE, {0: signal.SIGUSR1}, False, id="plan, saved at once"),
    ],
)
def test_all_ranks_save_the_same_step_and_the_run_goes_on_from_it(
    tmp_path: Path, parallel: dict[str, Any] | None, signals: dict[int, int], async_save: bool
):
    size = 3 if parallel else 2
    sent = {rank: (number, "on_step_begin") for rank, number in signals.items()}
    ranks = run_distributed(preempted_and_resumed, size, tmp_path, parallel, sent, async_save=async_save)
    assert [found["step"] for found, _ in ranks] == [3] * size
    (said,) = ranks[0][0]["said"]
    assert f"{len(signals)} rank" in said and "SIGUSR1" in said and "step 3 of 5" in said and "`checkpoint-3`" in said
    assert all(found["said"] == [] for found, _ in ranks[1:])
    runs.assert_same_run(*ranks[0][1], 0, 0)


@pytest.mark.parametrize(
    ("event", "arguments", "steps"),
    [
        ("on_optimizer_step", {}, 4),  # after the step's numbers were added up: the next one ends it
        deep("on_save", {"save_strategy": "steps", "save_steps": 2}, 3),
        deep("on_step_begin", {"eval_strategy": "epoch", "save_strategy": "epoch"}, 3),  # the last step of an epoch
    ],
)
def test_a_signal_at_any_time_ends_the_step_it_can_be_agreed_in(
    tmp_path: Path, event: str, arguments: dict[str, Any], steps: int
):
    ranks = run_distributed(preempted, 2, tmp_path, PAIR, {1: (signal.SIGTERM, event)}, **arguments)
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
    ranks = run_distributed(preempted, 2, tmp_path, PAIR, {0: (signal.SIGTERM, "on_step_begin")}, **best)
    assert all(3 not in rank["evaluated"] for rank in ranks)
    left = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert "checkpoint-3" in left and len(left) == 2


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


class ToAll(TrainerCallback):
    """Sends the signal to the data workers as well, as torchrun and Slurm do."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and dist.get_rank() == 1:
            children = multiprocessing.active_children()
            assert children
            for pid in (*(child.pid for child in children), os.getpid()):
                os.kill(pid or 0, signal.SIGTERM)


def signals_to_all_processes(folder: Path) -> tuple[str, int, int]:
    refused = in_another_thread()
    given = {"save_on_preemption": True, "dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork"}
    trainer = runs.make_trainer("llava", PAIR, str(folder), callbacks=[ToAll()], **given, **LONG)
    trainer.train()
    return refused, trainer.state.global_step, a_worker_that_gets_signals()


@pytest.mark.deep
def test_data_workers_leave_the_signal_to_their_rank_and_end_by_a_second_one(tmp_path: Path):
    for refused, step, exit_code in run_distributed(signals_to_all_processes, 2, tmp_path):
        assert "main thread" in refused
        assert (step, exit_code) == (3, -signal.SIGTERM)
    assert (tmp_path / "checkpoint-3" / "optimizer.pt").is_file()
