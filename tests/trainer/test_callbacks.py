"""What callbacks tell of a run: efficiency in the log, the progress bar, measured timelines."""

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_mmparallel import ParallelMetricsCallback, TimelineCallback
from hf_mmparallel._device import HostClock
from hf_mmparallel.arrange.balance import Balance
from hf_mmparallel.cost import find_device
from hf_mmparallel.runtime.work import ModuleWork, StepRecord, TimedTask
from hf_mmparallel.schedule import Span, Task
from hf_mmparallel.trainer import metrics_callback as metrics
from hf_mmparallel.trainer.engine_callback import LogLineCallback, LossProgressCallback, log_line
from hf_mmparallel.trainer.metrics_callback import (
    RankWindow,
    RecoveryCallback,
    cost_from,
    efficiency,
    forward_metrics,
    mean_of,
)
from hf_mmparallel.world import World
from tests.cost.models import model
from tests.distributed import run_distributed

from . import runs

VISION, LM = "vision", "language_model"
PIPELINE = {LM: {"pp_size": 2}}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers make their output folder even when they save nothing."""
    monkeypatch.chdir(tmp_path)


def window(duration: float, busy: float, wall: float | None = None, **changes: Any) -> RankWindow:
    wall = duration if wall is None else wall
    return RankWindow(duration, wall, busy, **{"replicas_ms": {}, "work": {}, **changes})


# The numbers


def test_the_bubble_is_the_share_of_time_outside_of_tasks():
    def bubble(*windows: RankWindow) -> float:
        return efficiency(windows, core_per_rank=True)["parallel/bubble_fraction"]

    assert bubble(window(100, 80), window(100, 60), window(100, 100)) == pytest.approx(0.2)
    assert bubble(window(100, 80), window(50, 50)) == pytest.approx(0.35)
    assert efficiency([window(100, 80)], core_per_rank=False) == {}
    assert efficiency([window(0, 0), window(0, 0)], core_per_rank=True) == {}


def test_rows_of_all_ranks_per_second_of_the_slowest_and_replicas_are_compared_by_the_time_in_their_tasks():
    works = {VISION: ModuleWork(30)}, {VISION: ModuleWork(20), LM: ModuleWork(100)}
    windows = [window(300, 1, wall=500, work=works[0]), window(400, 1, work=works[1])]
    found = efficiency(windows, core_per_rank=False)
    assert found == {"parallel/tokens_per_second/vision": 100.0, "parallel/tokens_per_second/language_model": 200.0}
    times = [{(LM, 0): 6.0}, {(LM, 1): 9.0}, {(VISION, 0): 3.0}, {(LM, 1): 9.0}]
    found = efficiency([window(9, 9, replicas_ms=of_rank) for of_rank in times], core_per_rank=False)
    assert found == {"parallel/replica_imbalance/language_model": pytest.approx(0.5)}  # 18 over the mean of 6 and 18


def test_microbatches_are_compared_in_each_step_then_steps_are_averaged():
    steps = [Balance({VISION: (np.array(times),)}, {}) for times in ([1.0, 1.0, 4.0], [2.0, 2.0, 2.0])]
    assert mean_of([forward_metrics(step) for step in steps]) == {
        "parallel/microbatch_imbalance/vision": pytest.approx(0.5),  # the mean of 1.0 and 0.0
        "parallel/forward_ms_std/vision": pytest.approx(2**0.5 / 2),
    }
    before = Balance({LM: (np.array([1.0, 5.0]),)}, {})
    after = Balance({LM: (np.array([3.0, 3.0]),)}, {}, deferred_fraction=0.5)
    assert mean_of([metrics.arrangement_metrics(before, after), {}]) == {
        "parallel/workload_std/language_model": 0.0,
        "parallel/workload_std_before/language_model": 2.0,
        "parallel/deferred_fraction": 0.5,
    }


def test_forwards_of_all_ranks_are_summed_by_microbatch(monkeypatch: pytest.MonkeyPatch):
    forwards = {VISION: (np.arange(2.0), np.array([2.0])), LM: (np.array([3.0, 4.0]),)}
    balances = [Balance(forwards, {}), Balance({LM: (np.array([7.0]),)}, {})]
    monkeypatch.setattr(World, "all_reduce", lambda _, tensor, activity: tensor.mul_(2))  # as of two ranks
    first, second = metrics.measure(balances, World())
    assert [times.tolist() for times in first.forward_ms[VISION]] == [[0, 2], [4]]
    assert [times.tolist() for times in first.forward_ms[LM]] == [[6, 8]]
    assert [times.tolist() for times in second.forward_ms[LM]] == [[14]] and forwards[LM][0][1] == 4


def test_a_window_adds_up_steps():
    def step(duration: float, rows: int, *timed: tuple[Task, float, float]) -> StepRecord:
        tasks = [TimedTask(*task) for task in timed]
        return StepRecord(timeline=tasks, duration_ms=duration, work={LM: ModuleWork(rows)})

    first, second = (Task("fwd", LM, 0, 0, index) for index in range(2))
    back = Task("bwd", LM, 0, 0, 0)
    results = [step(8, 10, (first, 0, 2), (back, 3, 7)), step(6, 5, (first, 0, 1), (second, 1, 4))]
    wanted = RankWindow(14, 20, 10, {(LM, 0): 10}, {LM: ModuleWork(15)})
    assert RankWindow.of(results, wall_ms=20) == wanted
    assert RankWindow.of(results, wall_ms=1).wall_ms == 14  # two clocks may differ a little


@pytest.mark.parametrize(
    ("device", "key"),
    [
        (find_device("cpu"), None),
        (find_device("a40"), "parallel/model_flops_utilisation"),
        (replace(find_device("a40"), source="measured here"), "parallel/model_flops_utilisation_of_measured_peak"),
    ],
)
def test_utilisation_is_of_the_peak_of_a_gpu(monkeypatch, device, key):
    window = RankWindow(10.0, 10.0, 5.0, {(LM, 0): 5.0}, {LM: ModuleWork(8, 32)})
    monkeypatch.setattr(metrics, "core_per_rank", lambda _: True)
    monkeypatch.setattr(metrics, "measure", lambda *_: [])
    monkeypatch.setattr(RankWindow, "of", lambda *_: window)
    callback, spec = ParallelMetricsCallback(), model()
    assert callback.parallel_metrics() == {}  # the stock Trainer has no engine
    costs = SimpleNamespace(device=device)
    engine: Any = SimpleNamespace(costs=costs, world=World(), spec=spec, clock=HostClock(), take_expert_imbalance=dict)
    callback.engine = engine
    callback.steps.append(SimpleNamespace(record=None, balance=None, arrangement={}))  # type: ignore[arg-type]
    callback.ends.extend([0.0, 0.01])
    found = {name: value for name, value in callback.parallel_metrics().items() if "utilisation" in name}
    assert found == ({} if key is None else {key: metrics.flops_utilisation(spec, [window], device.peak_tflops)})


def test_costs_of_a_picture_are_mean_durations():
    spans = [Span(0, Task("fwd", LM, 0, 0, index), start, end) for index, start, end in ((0, 0, 2), (1, 5, 9))]
    cost = cost_from([*spans, Span(0, Task("bwd", LM, 0, 0, 0), 10, 17)])
    assert cost(Task("fwd", LM, 0, 0, 3)) == 3 and cost(Task("bwd", LM, 0, 0, 3)) == 7
    cost = cost_from(spans, lambda task: [1.0, 3.0, 0.0, 2.0][task.microbatch])  # 6 ms for estimates of 1 and 3
    assert [cost(Task("fwd", LM, 0, 0, index)) for index in range(4)] == [1.5, 4.5, 0.0, 3.0]


# The console

LOGS = {
    "loss": 1.23412,
    "grad_norm": 0.98,
    "learning_rate": 3e-4,
    "epoch": 0.5,
    "accuracy": 0.5,
    "parallel/tokens_per_second/language_model": 12345.4,
    "parallel/step_ms": 812.3,
    "parallel/predicted_step_ms": 790.1,
    "parallel/memory_gib": 10.21,
    "parallel/bubble_fraction": 0.25,
}


def test_a_log_is_one_line():
    found = log_line(LOGS, 40, 450)
    assert found == (
        "step 40/450  loss 1.234  grad norm 0.98  lr 3.00e-4  12,345 tokens/s  step 812 ms (predicted 790)  "
        "memory 10.2 GiB  accuracy 0.5"
    )
    assert log_line(LOGS, 40, 450, says_times=False) == found.replace(" (predicted 790)", "")
    logs = {"eval_loss": 4.75, "eval_steps_per_second": 2.0, "epoch": 1.0, "total_flos": 12}
    assert log_line(logs, 40, 450) == "step 40/450  eval_loss 4.75" and log_line(logs, 0, 0) == "eval_loss 4.75"


@pytest.mark.parametrize("callback", [LossProgressCallback(), LogLineCallback()])
def test_the_first_rank_prints_logs_without_a_terminal_too_and_no_bar_there(callback: Any, capsys):
    args = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    control = TrainerControl()
    for is_first in (True, False):
        state = TrainerState(max_steps=2, is_world_process_zero=is_first)
        callback.on_train_begin(args, state, control)
        state.global_step = 1
        callback.on_step_end(args, state, control)
        callback.on_prediction_step(args, state, control, eval_dataloader=[1])
        callback.on_log(args, state, control, logs={"loss": 4.81234})
        callback.on_evaluate(args, state, control)
        callback.on_train_end(args, state, control)
        shown = capsys.readouterr()
        assert shown.out == ("step 1/2  loss 4.812\n" if is_first else "") and not shown.err


# On ranks


class _Draws(TrainerCallback):
    def __init__(self):
        self.drawn: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.drawn.append(torch.rand(1).item())

    on_evaluate = on_step_end


class Late(TimelineCallback):
    def __init__(self):
        super().__init__(steps=[1, 3], folder="elsewhere")


def logs_and_timeline(folder: Path) -> dict[str, Any]:
    """What three steps leave in the log, with timelines, what callbacks draw, and a run without metrics."""
    timeline, draws = TimelineCallback(steps={2}), _Draws()
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 3}
    trainer = runs.make_trainer("llava", PIPELINE, str(folder), callbacks=[timeline, Late(), draws], **evaluated)
    trainer.train()
    bare = runs.make_trainer("llava", PIPELINE, "bare", max_steps=1)
    bare.remove_callback(ParallelMetricsCallback)
    bare.train()
    return {
        "logs": [row for row in trainer.state.log_history if "loss" in row],
        "bare": [name for row in bare.state.log_history for name in row if name.startswith("parallel/")],
        "attached": timeline.engine is trainer.engine is not None,
        "drawn": draws.drawn,
    }


@pytest.mark.distributed
def test_efficiency_is_in_the_log_timelines_on_disk_and_draws_are_equal(tmp_path: Path):
    ranks = run_distributed(logs_and_timeline, 3, tmp_path / "out")
    assert len(set(ranks[0]["drawn"])) == len(ranks[0]["drawn"]) == 5  # steps, evaluations at 2 and 3
    for rank in ranks:
        assert rank["attached"] and rank["bare"] == [] and rank["drawn"] == ranks[0]["drawn"]
        for row, first in zip(rank["logs"], ranks[0]["logs"], strict=True):
            measured = {name: value for name, value in row.items() if name.startswith("parallel/")}
            assert measured == {name: value for name, value in first.items() if name.startswith("parallel/")}
            assert measured["parallel/tokens_per_second/language_model"] > 0
            for module in (VISION, LM):
                assert measured[f"parallel/microbatch_imbalance/{module}"] > 0
                assert measured[f"parallel/forward_ms_std/{module}"] > 0
                assert measured[f"parallel/workload_std/{module}"] >= 0
                assert measured[f"parallel/workload_std_before/{module}"] >= 0
            assert 0 <= measured["parallel/deferred_fraction"] <= 1
            assert not any("replica_imbalance" in name for name in measured)  # one copy of each
    _check_timeline(tmp_path / "out" / "timeline-2")
    files = [f"timeline-{step}.{kind}" for step in (1, 3) for kind in ("json", "png")]
    written = sorted(path.name for path in Path("elsewhere").iterdir())
    boundaries = [f"boundaries-{step}.json" for step in (1, 3)]
    assert written == [*boundaries, *files, "workloads-1.png", "workloads-3.png"]
    back, there = json.loads((tmp_path / "out" / "boundaries-2.json").read_text())
    assert (there["from"], there["to"], back["from"], back["to"]) == (VISION, LM, LM, VISION)
    assert there["tokens"] == back["tokens"] > 0
    # features of 64 float32 values for each placeholder, four an image, and their gradients, each crosses once
    assert there["bytes"] == back["bytes"] > 0 and there["bytes"] % (4 * 64 * 4) == 0
    assert all(row["wait_ms"] >= row["longest_wait_ms"] >= 0 for row in (there, back))
    assert not (tmp_path / "out" / "timeline-1.png").exists()


def test_a_step_in_which_the_layout_changed_has_no_timeline(tmp_path: Path):
    # after the norm of all ranks a step counts, though the engine that ran it is gone
    timeline = TimelineCallback(steps={2}, folder=tmp_path / "out")
    timeline.engine = cast(Any, SimpleNamespace(last_result=None))
    timeline.on_step_end(None, SimpleNamespace(global_step=2, is_world_process_zero=True), None)
    assert not (tmp_path / "out").exists()


def _check_timeline(stem: Path) -> None:
    """The picture is a picture; the trace has every task of every rank, measured and predicted."""
    with Image.open(stem.with_suffix(".png")) as picture:
        assert picture.width > 600 and picture.height > 200
        assert len(picture.convert("RGB").resize((60, 40)).getcolors(60 * 40) or []) > 20
    events = json.loads(stem.with_suffix(".json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    per_rank = {}
    for kind in ("predicted", "measured"):
        (process,) = (pid for pid, name in names.items() if kind in name)
        mine = [event for event in spans if event["pid"] == process]
        assert min(event["ts"] for event in mine) == 0
        per_rank[kind] = [sum(event["tid"] == rank for event in mine) for rank in range(3)]
    # Four microbatches with a forward and a backward each, on every stage of three ranks; where the samples of one are
    # taken in two turns, the encoder has two forwards and two backwards of it.
    assert per_rank["predicted"] == per_rank["measured"]
    vision, *language = per_rank["measured"]
    assert language == [8, 8] and 8 <= vision <= 16


def test_a_run_whose_ranks_changed_is_drawn_by_the_first_rank_at_its_end(tmp_path: Path):
    args, control = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[]), TrainerControl()
    state = TrainerState(is_world_process_zero=False)
    callback = RecoveryCallback(8)
    callback.engine = SimpleNamespace(world=SimpleNamespace(size=4))  # type: ignore[assignment]
    callback.on_train_begin(args, state, control)
    state.is_world_process_zero = True
    callback.on_step_end(args, state, control)
    callback.on_train_end(args, state, control)
    assert callback.sentence is None and not (tmp_path / "recovery.png").exists()
    for lost, joined, left in (((0,), (), 3), ((1, 2), (4,), 2), ((), (5, 6), 4)):
        event = SimpleNamespace(lost=lost, joined=joined, lost_at=time.time(), total_s=0.5, world_size=left)
        callback.on_reconfigure(args, state, control, event=event)
        callback.on_step_end(args, state, control)
    callback.on_train_end(args, state, control)
    assert (tmp_path / "recovery.png").is_file()
    assert [mark.label for mark in callback.marks] == ["lost 0", "lost 1, 2, joined 4", "joined 5, 6"]
    assert "3 times" in str(callback.sentence) and "4 ranks at first, 4 at the end" in str(callback.sentence)
    assert "1.50 s in all" in str(callback.sentence)
    of_a_rank_that_joins = RecoveryCallback(8)
    vars(of_a_rank_that_joins).update(callback.shared_state())
    assert of_a_rank_that_joins.sentence == callback.sentence
