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
    for value in (" 2 s", "30 s", "24 h", "147 steps of 4 s", "0.68%", "`save_steps=500`"):
        assert value in found


def test_saves_that_take_longer_than_a_step_or_than_the_interval():
    hourly = arguments(save_strategy="epoch", mean_time_between_failures_h=1)
    found = save_advice(0.001, 200.0, 300.0, hourly)
    assert "every 1 h" in found and "saves every step of 300 s" in found and "`save_strategy='epoch'`" in found
    assert "saves every 200 s" in save_advice(0.001, 200.0, None, hourly)
    assert "training waited 40 s. With" in save_advice(40.0, 0.0, 1.0, hourly)
    with pytest.raises(ValueError, match="mean_time_between_failures_h=0"):
        arguments(mean_time_between_failures_h=0)


def said(folder: Path) -> list[tuple[float, float, float | None]]:
    """The costs of which the line of a run is made, with and without `async_save`."""
    lines: list[tuple[float, float, float | None]] = []

    def note(blocked_s: float, write_s: float, step_s: float | None, args: Any) -> str:
        lines.append((blocked_s, write_s, step_s))
        return save_advice(blocked_s, write_s, step_s, args)

    checkpoint_saves.save_advice = note
    layout = {"vision": {}, "language_model": {}}
    for async_save in (False, True):
        runs.make_trainer("llava", layout, str(folder / str(async_save)), async_save=async_save, **SAVING).train()
    return lines


@pytest.mark.distributed
def test_it_is_said_once_by_the_first_rank(tmp_path: Path):
    zero, one = run_distributed(said, 2, tmp_path)
    assert one == [] and [write_s > 0 for _, write_s, _ in zero] == [False, True]
    assert all(blocked_s > 0 and step_s is not None and step_s > 0 for blocked_s, _, step_s in zero)
