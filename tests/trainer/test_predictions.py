"""Steps that run, beside what was predicted of them: the log, its file, the model card, a calibration."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset
from transformers import TrainerCallback

from hf_mmparallel.callbacks import PredictionCallback
from hf_mmparallel.cost import StepCost
from hf_mmparallel.cost.calibrate import calibrate_logs
from hf_mmparallel.cost.calibration import uncalibrated
from hf_mmparallel.cost.run_log import RUN_LOG, read_run_log
from hf_mmparallel.runtime import executor
from hf_mmparallel.search.comparison import DATA
from tests import tiny
from tests.distributed import run_distributed

from . import runs

VISION, LM = "vision", "language_model"
PIPELINE = {LM: {"pp_size": 2}}
FACTORS = {(VISION, "fwd"): 300.0, (VISION, "bwd"): 160.0, (LM, "fwd"): 90.0, (LM, "bwd"): 60.0}
TOLD = "from batch to batch, where"


def sleep_in_tasks(trainer: Any) -> None:
    """Lets each task take [`FACTORS`] of what operation counts say, which is longer than computing it."""
    engine, compute = trainer.engine, executor._Step.compute
    costs, known = uncalibrated(engine.costs), {}

    def slow(self: Any, task: Any) -> None:
        start = time.perf_counter()
        if known.get("step") is not engine.current_step:
            known["step"] = engine.current_step
            known["cost"] = StepCost(costs, engine.plan, engine.current_step, engine.current_sizes)
        compute(self, task)
        until = start + 1e-3 * FACTORS[task.module, task.kind] * known["cost"](task)
        time.sleep(max(0.0, until - time.perf_counter()))

    executor._Step.compute = slow


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.texts: list[str] = []
        logger = logging.getLogger("hf_mmparallel.callbacks.prediction")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run(folder: str, sleeps: bool, parallel: dict[str, Any], family: str = "llava", **arguments: Any) -> dict:
    """A run, with what it logs and says."""
    messages = Messages()
    trainer = runs.make_trainer(family, parallel, folder, **arguments)
    if sleeps:
        sleep_in_tasks(trainer)
    trainer.train()
    trainer.create_model_card()
    dist.barrier()
    (callback,) = [own for own in trainer.callback_handler.callbacks if isinstance(own, PredictionCallback)] or [None]
    comparison = None if callback is None else callback.comparison
    return {
        "logs": [row for row in trainer.state.log_history if "loss" in row],
        "told": [text[text.index("A step") :] for text in messages.texts if TOLD in text],
        "cause": None if comparison is None else comparison.largest_cause,
        "as_predicted": None if comparison is None else comparison.is_as_predicted,
    }


@pytest.mark.distributed
@pytest.mark.deep
def test_a_run_is_compared_written_down_and_calibrated_by(tmp_path: Path):
    out = tmp_path / "out"
    ranks = run_distributed(run, 3, str(out), True, PIPELINE, max_steps=10, timeout=110)
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

    (log,) = read_run_log(out / RUN_LOG)
    assert len(log.windows) >= 8 and [window.step for window in log.windows[:8]] == list(range(2, 10))
    for window in log.windows:
        logged = ranks[0]["logs"][window.step - 1]
        assert window.step_ms == pytest.approx(logged["parallel/step_ms"], rel=1e-5)
        assert window.task_ms("predicted_ms", VISION, "forward") == pytest.approx(
            logged["parallel/predicted_forward_ms/vision"], rel=1e-4
        )
        # With tasks as measured little is left, though ranks share cores.
        assert abs(window.replayed_ms / window.step_ms - 1) < 0.5

    result = calibrate_logs([out / RUN_LOG])
    for (module, kind), factor in FACTORS.items():  # of whole tasks; these are so small that launches take part of it
        name = "forward" if kind == "fwd" else "backward"
        predicted, took = (
            sum(w.task_ms(f, module, name) for w in log.windows) for f in ("predicted_ms", "measured_ms")
        )
        assert took / predicted == pytest.approx(factor, rel=0.1), (module, kind)
        assert result.calibration.errors is not None
        assert result.calibration.errors[f"{module}/{name}"]["after"].median < 0.1, (module, kind)
    assert result.calibration.errors is not None
    for errors in result.calibration.errors.values():
        assert errors["after"].median < 0.5 * errors["before"].median

    card = (out / "README.md").read_text()
    assert "| quantity | predicted | measured | measured / predicted |" in card
    assert "| forwards of vision (ms on a rank) |" in card and "predicted forward" not in card
    assert len(ranks[0]["told"]) == 2 and ranks[0]["told"][-1] in card  # early and at the end
    assert ranks[0]["cause"].split("/")[0] in (VISION, LM)

    result.calibration.save(tmp_path / "calibrated.json")
    again = run_distributed(
        run, 3, str(tmp_path / "again"), True, PIPELINE, max_steps=5, layer_profile=str(tmp_path / "calibrated.json")
    )
    for row in again[0]["logs"][1:]:
        assert row["parallel/predicted_forward_ms/vision"] == pytest.approx(row["parallel/forward_ms/vision"], rel=0.3)
        assert row["parallel/predicted_step_ms"] > 0.5 * row["parallel/step_ms"]
    (log,) = read_run_log(tmp_path / "again" / RUN_LOG)
    for group in log.windows[0].groups:  # the costs that a next calibration corrects are those that this one did
        assert group.predicted_ms > 0.8 * min(FACTORS.values()) * group.base_ms


class SlowSamples(list):
    """Samples that take long to read."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            time.sleep(0.08)
        return super().__getitem__(index)


def runs_of_llama(folder: Path) -> dict[str, dict]:
    """Runs of two stages: samples that are slow to read, windows of eight steps, one that writes nothing."""
    slow = SlowSamples(tiny.make_dataset("llama", 16))
    settings: dict[str, dict[str, Any]] = {
        "slow": {"max_steps": 5, "data": slow},
        "windows": {"max_steps": 17, "logging_steps": 8},
        "quiet": {"max_steps": 3, "log_predictions": False},
    }
    return {name: run(str(folder / name), False, PIPELINE, "llama", **given) for name, given in settings.items()}


@pytest.fixture(scope="module")
def of_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict]]]:
    """The folder of three runs, and what they leave on each rank."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, run_distributed(runs_of_llama, 2, folder)


@pytest.mark.distributed
def test_a_slow_loader_is_named(of_llama: tuple[Path, list[dict[str, dict]]]):
    first = of_llama[1][0]["slow"]
    assert first["cause"] == DATA and "`dataloader_num_workers`" in first["told"][-1]
    assert all(row["parallel/data_ms"] > 8 * 80 for row in first["logs"][1:])


@pytest.mark.distributed
def test_windows_are_means_and_nothing_is_written_where_it_is_not_wanted(
    of_llama: tuple[Path, list[dict[str, dict]]],
):
    folder, ranks = of_llama
    (log,) = read_run_log(folder / "windows" / RUN_LOG)
    assert [(window.step, window.steps) for window in log.windows] == [(8, 7), (16, 8)]
    assert all(1 <= window.compared <= 4 for window in log.windows)
    assert [bool(rank["windows"]["told"]) for rank in ranks] == [True, False]
    lines = (folder / "windows" / RUN_LOG).read_text().splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["run", "window", "window"]
    for rank in ranks:
        quiet = rank["quiet"]
        assert quiet["told"] == [] and not any("predicted" in name for row in quiet["logs"] for name in row)
    assert not (folder / "quiet" / RUN_LOG).exists()


class Rows(IterableDataset):
    """A stream of samples, whose sizes are known when they are drawn."""

    def __init__(self, samples: list[dict[str, Any]]):
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.samples)


def tokens_of(sample: Any) -> dict[str, int]:
    images = int((sample["input_ids"] == tiny.MEDIA_TOKEN).sum())
    return {LM: len(sample["input_ids"]), VISION: 4 * images}


def run_of_drawn_sizes(folder: str, streams: bool) -> tuple[list[dict[str, float]], list[int]]:
    """The logged numbers of a run, and the vision tokens of each of its steps."""
    samples, drawn = tiny.make_dataset("llava", runs.SAMPLES), []
    given: dict[str, Any] = {"data": Rows(samples) if streams else Drawn(samples), "eval_dataset": samples[:7]}
    trainer = runs.make_trainer("llava", PIPELINE, folder, sample_tokens=tokens_of, max_steps=3, **given)
    trainer.add_callback(Noting(trainer.engine, drawn))
    trainer.train()
    dist.barrier()
    return [row for row in trainer.state.log_history if "loss" in row], drawn


class Drawn(Dataset):
    """Samples that only their own code can read, so that no metadata has their sizes."""

    def __init__(self, samples: list[dict[str, Any]]):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


class Noting(TrainerCallback):
    """Notes the vision tokens of the samples of each step."""

    def __init__(self, engine: Any, found: list[int]):
        self.engine, self.found = engine, found

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(int(self.engine.current_sizes.tokens[VISION].sum()))


@pytest.mark.distributed
@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.deep), True])
def test_sizes_that_are_known_when_samples_are_drawn_are_predicted_by(tmp_path: Path, streams: bool):
    (logged, drawn), *others = run_distributed(run_of_drawn_sizes, 3, str(tmp_path / "out"), streams)
    samples = tiny.make_dataset("llava", runs.SAMPLES)
    assert len(set(drawn)) > 1 and sum(drawn) == sum(tokens_of(sample)[VISION] for sample in samples)  # one epoch
    assert all(own[1] == drawn for own in others)
    (log,) = read_run_log(tmp_path / "out" / RUN_LOG)
    assert [window.step for window in log.windows] == [2, 3]
    for window in log.windows:
        row = logged[window.step - 1]
        assert row["parallel/predicted_step_ms"] == pytest.approx(window.predicted_step_ms, rel=1e-5)
        for kind in ("forward", "backward"):
            assert window.task_ms("tokens", VISION, kind) == drawn[window.step - 1]
            assert 0 < window.task_ms("predicted_ms", VISION, kind) < window.task_ms("measured_ms", VISION, kind)
