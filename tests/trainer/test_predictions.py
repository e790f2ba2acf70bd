"""Steps that run, beside what was predicted of them: the log, its file, the model card, a calibration."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hf_mmparallel.cost import StepCost
from hf_mmparallel.cost.calibration import calibrate_logs, without_calibration
from hf_mmparallel.cost.run_log import RUN_LOG, read_run_log
from hf_mmparallel.planning.comparison import DATA
from hf_mmparallel.runtime import executor
from hf_mmparallel.trainer import prediction_callback as prediction
from hf_mmparallel.trainer.prediction_callback import PredictionCallback
from tests import tiny
from tests.distributed import run_distributed
from tests.streams import Rows

from . import runs
from .moments import AfterSteps, messages

VISION, LM = "vision", "language_model"
PIPELINE = {LM: {"pp_size": 2}}
FACTORS = {(VISION, "fwd"): 300.0, (VISION, "bwd"): 160.0, (LM, "fwd"): 90.0, (LM, "bwd"): 60.0}


def sleep_in_tasks(trainer: Any) -> None:
    """Lets each task take [`FACTORS`] of what operation counts say, which is longer than computing it."""
    engine, compute = trainer.engine, executor._Step.compute
    costs, known = without_calibration(engine.costs), {}

    def slow(self: Any, task: Any) -> None:
        start = time.perf_counter()
        if known.get("step") is not engine.current_step:
            known["step"] = engine.current_step
            known["cost"] = StepCost(costs, engine.plan, engine.current_step, engine.current_sizes)
        compute(self, task)
        until = start + 1e-3 * FACTORS[task.module, task.kind] * known["cost"](task)
        time.sleep(max(0.0, until - time.perf_counter()))

    executor._Step.compute = slow


def run(folder: str, sleeps: bool, parallel: dict[str, Any], family: str = "llava", **arguments: Any) -> dict:
    """A run, with what it logs and says."""
    logging.getLogger(prediction.__name__).setLevel(logging.INFO)
    texts = messages(prediction.__name__)
    trainer = runs.make_trainer(family, parallel, folder, **arguments)
    if sleeps:
        sleep_in_tasks(trainer)
    trainer.train()
    trainer.create_model_card()
    dist.barrier()
    callbacks = [own for own in trainer.callback_handler.callbacks if isinstance(own, PredictionCallback)]
    comparison = callbacks[0].comparison if callbacks else None
    return {
        "logs": [row for row in trainer.state.log_history if "loss" in row],
        "told": [text[text.index("A step") :] for text in texts if "from batch to batch, where" in text],
        "cause": None if comparison is None else comparison.largest_cause,
    }


@pytest.mark.distributed
@pytest.mark.deep
def test_a_run_is_compared_written_down_and_calibrated_by(tmp_path: Path):
    ranks = run_distributed(run, 3, str(tmp_path), True, PIPELINE, max_steps=10, timeout=110)
    first, *rows = ranks[0]["logs"]
    assert not any("predicted" in name for name in first)  # the first step is left out
    for rank in ranks[1:]:
        for row, own in zip(rows, rank["logs"][1:], strict=True):
            assert all(own[name] == value for name, value in row.items() if name.startswith("parallel/"))
        assert rank["told"] == []
    for row in rows[:8]:
        assert row["parallel/wall_ms"] > row["parallel/step_ms"] > row["parallel/predicted_step_ms"] > 0
        assert row["parallel/wall_ms"] > row["parallel/step_ms"] + row["parallel/data_ms"]
        assert 0 < row["parallel/predicted_bubble_fraction"] < 1 and row["parallel/predicted_memory_gib"] > 0
        assert "parallel/memory_gib" not in row  # of a CPU
        for module in (VISION, LM):
            for kind in ("forward", "backward"):
                assert row[f"parallel/{kind}_ms/{module}"] > row[f"parallel/predicted_{kind}_ms/{module}"] > 0

    (log,) = read_run_log(tmp_path / RUN_LOG)
    assert [window.step for window in log.windows[:8]] == list(range(2, 10))
    for window in log.windows:
        logged = ranks[0]["logs"][window.step - 1]
        assert window.step_ms == pytest.approx(logged["parallel/step_ms"], rel=1e-5)
        predicted = window.task_ms("predicted_ms", VISION, "forward")
        assert predicted == pytest.approx(logged["parallel/predicted_forward_ms/vision"], rel=1e-4)
        # With tasks as measured little is left, though ranks share cores.
        assert abs(window.replayed_ms / window.step_ms - 1) < 0.5

    errors = calibrate_logs([tmp_path / RUN_LOG]).errors
    for (module, kind), factor in FACTORS.items():  # of whole tasks; these are so small that launches take part of it
        name = "forward" if kind == "fwd" else "backward"
        predicted, took = (
            sum(w.task_ms(f, module, name) for w in log.windows) for f in ("predicted_ms", "measured_ms")
        )
        assert took / predicted == pytest.approx(factor, rel=0.1), (module, kind)
        assert errors[f"{module}/{name}"].after < 0.1, (module, kind)
    assert all(error.after < 0.5 * error.before for error in errors.values())

    card = (tmp_path / "README.md").read_text()
    assert "| quantity | predicted | measured | measured / predicted |" in card
    assert "| forwards of vision (ms on a rank) |" in card and "predicted forward" not in card
    assert len(ranks[0]["told"]) == 1 and card.count("A step took") == 1  # as soon as it is known, and at the end
    assert ranks[0]["cause"].split("/")[0] in (VISION, LM)


class SlowSamples(list):
    """Samples that take long to read."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            time.sleep(0.08)
        return super().__getitem__(index)


def runs_of_llama(folder: Path) -> dict[str, dict]:
    """Runs of two stages: samples that are slow to read, windows of six steps, one that writes nothing."""
    slow = SlowSamples(tiny.make_dataset("llama", 16))
    settings: dict[str, dict[str, Any]] = {
        "slow": {"max_steps": 4, "data": slow},
        "windows": {"max_steps": 13, "logging_steps": 6},
        "quiet": {"max_steps": 2, "log_predictions": False},
    }
    return {name: run(str(folder / name), False, PIPELINE, "llama", **given) for name, given in settings.items()}


@pytest.mark.distributed
@pytest.mark.deep
def test_a_slow_loader_is_named_windows_are_means_and_nothing_is_written_where_it_is_not_wanted(tmp_path: Path):
    ranks = run_distributed(runs_of_llama, 2, tmp_path)
    slow = ranks[0]["slow"]
    assert slow["cause"] == DATA and "`dataloader_num_workers`" in slow["told"][-1]
    assert all(row["parallel/data_ms"] > 8 * 80 for row in slow["logs"][1:])
    (log,) = read_run_log(tmp_path / "windows" / RUN_LOG)
    assert [(window.step, window.steps) for window in log.windows] == [(6, 5), (12, 6)]
    assert all(1 <= window.compared <= 4 for window in log.windows)
    assert [bool(rank["windows"]["told"]) for rank in ranks] == [True, False]
    lines = (tmp_path / "windows" / RUN_LOG).read_text().splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["run", "window", "window"]
    for rank in ranks:
        quiet = rank["quiet"]
        assert quiet["told"] == [] and not any("predicted" in name for row in quiet["logs"] for name in row)
    assert not (tmp_path / "quiet" / RUN_LOG).exists()


def tokens_of(sample: Any) -> dict[str, int]:
    images = int((sample["input_ids"] == tiny.MEDIA_TOKEN).sum())
    return {LM: len(sample["input_ids"]), VISION: 4 * images}


def run_of_drawn_sizes(folder: str) -> tuple[list[dict[str, float]], list[int]]:
    """The logged numbers of a run, and the vision tokens of each of its steps."""
    rows = Rows(tiny.make_dataset("llava", runs.SAMPLES))
    given: dict[str, Any] = {"data": rows, "sample_tokens": tokens_of, "max_steps": 3}
    trainer = runs.make_trainer("llava", {VISION: {}, LM: {}}, folder, **given)
    drawn: list[int] = []
    trainer.add_callback(AfterSteps(lambda _: drawn.append(int(trainer.engine.current_sizes.tokens[VISION].sum()))))
    trainer.train()
    dist.barrier()
    return [row for row in trainer.state.log_history if "loss" in row], drawn


@pytest.mark.distributed
def test_sizes_that_are_known_when_samples_are_drawn_are_predicted_by(tmp_path: Path):
    (logged, drawn), (_, also_drawn) = run_distributed(run_of_drawn_sizes, 2, str(tmp_path / "out"))
    samples = tiny.make_dataset("llava", runs.SAMPLES)
    assert len(set(drawn)) > 1 and sum(drawn) == sum(tokens_of(sample)[VISION] for sample in samples)  # one epoch
    assert also_drawn == drawn
    (log,) = read_run_log(tmp_path / "out" / RUN_LOG)
    assert [window.step for window in log.windows] == [2, 3]
    for window in log.windows:
        row = logged[window.step - 1]
        assert row["parallel/predicted_step_ms"] == pytest.approx(window.predicted_step_ms, rel=1e-5)
        for kind in ("forward", "backward"):
            assert window.task_ms("tokens", VISION, kind) == drawn[window.step - 1]
            assert 0 < window.task_ms("predicted_ms", VISION, kind) < window.task_ms("measured_ms", VISION, kind)
