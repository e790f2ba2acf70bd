"""The line on how often to save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_mmparallel import MultimodalTrainingArguments
from hf_mmparallel.trainer import checkpoint_saves
from hf_mmparallel.trainer.checkpoint_saves import save_advice
from tests.distributed import run_distributed

from . import runs
from .test_checkpoints import SAVING


def arguments(**values: Any) -> MultimodalTrainingArguments:
    return MultimodalTrainingArguments(output_dir="out", use_cpu=True, report_to=[], **values)


def test_the_line_has_cost_interval_and_what_is_set():
    found = save_advice(2.0, 30.0, 4.0, arguments(save_steps=500))
    assert found == (
        "A checkpoint: training waited 2 s, the files were written in the 30 s after that. With a failure every 24 h "
        "(`mean_time_between_failures_h`), a run is expected to end first if it saves every 147 steps of 4 s, and "
        "then takes 0.68% longer than without failures and saves; this one has `save_steps=500`."
    )


def test_saves_that_take_longer_than_a_step_or_than_the_interval():
    hourly = arguments(save_strategy="epoch", mean_time_between_failures_h=1)
    found = save_advice(0.001, 200.0, 300.0, hourly)
    assert "every 1 h" in found and "saves every step of 300 s" in found and "`save_strategy='epoch'`" in found
    assert "saves every 200 s" in save_advice(0.001, 200.0, None, hourly)
    assert "training waited 40 s. With" in save_advice(40.0, 0.0, 1.0, hourly)
    with pytest.raises(ValueError, match="`mean_time_between_failures_h=0` must be above 0"):
        arguments(mean_time_between_failures_h=0)


def said(folder: Path, async_save: bool) -> list[tuple[float, float, float | None]]:
    """The costs of which the line is made."""
    lines: list[tuple[float, float, float | None]] = []

    def note(blocked_s: float, write_s: float, step_s: float | None, args: Any) -> str:
        lines.append((blocked_s, write_s, step_s))
        return save_advice(blocked_s, write_s, step_s, args)

    checkpoint_saves.save_advice = note
    layout = {"vision": {}, "language_model": {}}
    runs.make_trainer("llava", layout, str(folder), async_save=async_save, **SAVING).train()
    return lines


@pytest.mark.distributed
@pytest.mark.parametrize("async_save", [False, True])
def test_it_is_said_once_by_the_first_rank(tmp_path: Path, async_save: bool):
    zero, one = run_distributed(said, 2, tmp_path, async_save)
    ((blocked_s, write_s, step_s),) = zero
    assert one == [] and blocked_s > 0 and step_s is not None and step_s > 0
    assert (write_s > 0) == async_save
