"""What a rank that joins a training is told of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState
from transformers.trainer_callback import TrainerCallback

from hf_mmparallel.callbacks import RecoveryCallback
from hf_mmparallel.trainer.survival import ToldRun


class Steps:
    def save(self, folder: Path, step: int) -> None:
        (folder / "position.json").write_text(f"after step {step}")


def _trainer(num_groups: int) -> Any:
    """A Trainer with what is told; its optimizer has groups of one parameter."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": 0.1 * n} for n in range(num_groups)]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    callbacks, control = [TrainerCallback(), EarlyStoppingCallback(4), RecoveryCallback(8)], TrainerControl()
    stateful: Any = [callbacks[1], control]
    return SimpleNamespace(
        state=TrainerState(
            global_step=3, epoch=0.5, log_history=[{"loss": 2.0, "step": 3}], stateful_callbacks=stateful
        ),
        control=control,
        callback_handler=SimpleNamespace(callbacks=callbacks),
        optimizer=optimizer,
        lr_scheduler=schedule,
        args=SimpleNamespace(device="cpu"),
        _tr_loss=torch.tensor(1.5),
        _total_loss_scalar=6.0,
        _globalstep_last_logged=2,
        current_flos=1e6,
    )


def _told() -> ToldRun:
    trainer = _trainer(2)
    for _ in range(3):
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    trainer.callback_handler.callbacks[1].early_stopping_patience_counter = 3
    trainer.callback_handler.callbacks[2]._num_ranks = 5
    states = dict(trainer.state.stateful_callbacks)
    told = ToldRun.from_bytes(ToldRun.of(trainer, Steps()).to_bytes())
    assert trainer.state.stateful_callbacks == states, "telling changes nothing"
    return told


def test_the_state_and_the_position_are_a_checkpoint():
    with _told().checkpoint() as folder:
        state = TrainerState.load_from_json(str(Path(folder, "trainer_state.json")))
        assert Path(folder, "position.json").read_text() == "after step 3"
    assert (state.global_step, state.epoch, state.log_history) == (3, 0.5, [{"loss": 2.0, "step": 3}])
    assert not Path(folder).exists()


def test_the_schedule_goes_on_with_the_groups_of_the_others():
    joined = _trainer(1)
    _told().restore_schedule(joined.optimizer, joined.lr_scheduler)
    assert [group["weight_decay"] for group in joined.optimizer.param_groups] == [0.0, 0.1]
    assert [group["lr"] for group in joined.optimizer.param_groups] == [0.25, 0.25]
    assert not any(group["params"] for group in joined.optimizer.param_groups)
    joined.optimizer.step()
    joined.lr_scheduler.step()
    assert joined.lr_scheduler.get_last_lr() == [0.2, 0.2]


def test_callbacks_decide_as_those_of_the_others():
    joined = _trainer(2)
    plain, stopping, recoveries = joined.callback_handler.callbacks
    _told().restore_callbacks(joined)
    assert joined.callback_handler.callbacks == [plain, stopping, recoveries], "the same objects of the user"
    assert (stopping.early_stopping_patience, stopping.early_stopping_patience_counter) == (4, 3)
    assert recoveries._num_ranks == 5


def test_sums_between_two_logs_go_on():
    joined = _trainer(2)
    joined._tr_loss, joined._total_loss_scalar, joined._globalstep_last_logged = torch.tensor(0.0), 0.0, 0
    _told().restore_sums(joined)
    assert torch.equal(joined._tr_loss, torch.tensor(1.5))
    assert (joined._total_loss_scalar, joined._globalstep_last_logged) == (6.0, 2)
    assert isinstance(joined._globalstep_last_logged, int)
