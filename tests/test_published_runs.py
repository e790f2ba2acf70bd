"""Predictions against published runs: who is faster than whom, and how far off the runs are that fitted nothing."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import spearmanr

from hf_mmparallel.cost import find_device

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import mimo  # noqa: E402
from published_ceilings import best_plans, best_run  # noqa: E402
from published_runs import MISSED  # noqa: E402
from published_study import predicted_ms, published_flops, studies  # noqa: E402

KEPT = Path(__file__).parent.parent / "benchmarks" / "results" / "published_runs.json"
MOST_TASKS = 10_000  # simulated in a few seconds
CHECKED = ("original", "copy", "unread")
REACHED = {
    "own_engine": {"llava_a100", "mosaic_a100", "mosaic_h100", "nanotron_1b", "torchtitan_a100", "torchtitan_h100"},
    "ours": {"llava_a100", "megatron_a100_2021", "mosaic_a100", "mosaic_h100", "nanotron_1b"},
}
"""Studies whose best published MFU a plan reaches, by the costs of the study's engine and of hf_mmparallel's."""
STUDIES = {study.key: study for study in studies() if not study.is_unseen}
UNSEEN = {study.key: study for study in studies() if study.is_unseen}


def test_every_run_is_complete_and_every_study_judges():
    for study in studies():
        assert study.data["source"] and study.data["machine"] and study.data["read"]
        assert study.data["checked"] in CHECKED
        assert all(run.step_ms > 0 and run.gpus % (run.tp * run.pp * run.cp) == 0 for run in study.runs)
        assert sum(not run.is_fitted for run in study.runs) >= len(study.runs) / 2


@pytest.mark.deep
@pytest.mark.parametrize("key", [key for key, study in STUDIES.items() if "mfu" in study.data["columns"]])
def test_sizes_and_times_give_the_mfu_that_is_published(key):
    """A wrong size of a model, number of GPUs, batch or time would show."""
    runs = [run for run in STUDIES[key].runs if run.mfu is not None]
    assert len(runs) >= 4
    for run in runs:
        peak_flops = 1e9 * find_device(run.device.name).bf16_tflops * run.gpus * run.step_ms
        assert 100 * published_flops(run) / peak_flops == pytest.approx(run.mfu, rel=0.015), run.name


@pytest.mark.deep
@pytest.mark.parametrize("key", STUDIES)
def test_predictions_rank_runs_as_they_were_measured(key):
    runs = [run for run in STUDIES[key].runs if run.num_tasks <= MOST_TASKS]
    assert len(runs) >= min(6, len(STUDIES[key].runs))
    predicted = [predicted_ms(run) for run in runs]
    found: Any = spearmanr(predicted, [run.step_ms for run in runs])
    assert found[0] >= 0.9
    errors = [abs(ms / run.step_ms - 1) for ms, run in zip(predicted, runs, strict=True) if not run.is_fitted]
    assert statistics.median(errors) <= 0.15 and max(errors) <= 0.4


@pytest.mark.deep
def test_unseen_runs_are_kept_as_they_are_predicted():
    """What is said of them is what the planner says now, and none of them fits a constant."""
    kept = json.loads(KEPT.read_text())["studies"]
    for key, study in UNSEEN.items():
        assert not any(run.is_fitted for run in study.runs)
        for run, record in list(zip(study.runs, kept[key]["runs"], strict=True))[::5]:
            assert record["name"] == run.name
            assert predicted_ms(run) == pytest.approx(record["predicted_ms"], rel=1e-3), run.name


def test_a_ledger_and_a_reason_explain_each_miss():
    for key in UNSEEN:
        for record in json.loads(KEPT.read_text())["studies"][key]["runs"]:
            assert sum(record["ledger"].values()) == pytest.approx(1.0, abs=0.002), record["name"]
            assert (record["why"] is not None) == (abs(record["ratio"] - 1) > MISSED), record["name"]


@pytest.mark.deep
def test_an_encoder_on_its_own_gpu_makes_the_step_shorter_as_published():
    spec = mimo.model()
    kept = json.loads((KEPT.parent / "mimo.json").read_text())["rows"]
    assert len(kept) == 12 and all(row["ours"]["shorter"] > 0 and row["Megatron"]["shorter"] > 0 for row in kept)
    row = next(row for row in kept if row["dataset"] == "RDR")
    found = mimo.compare(spec, mimo.MEGATRON, "RDR", row["seq_len"], row["batch"])
    assert found == row["Megatron"]


def assert_reached(key: str, found: dict[str, dict[str, Any]]) -> None:
    for kind, own in found.items():
        assert (own["mfu"] >= own["measured_mfu"]) == (key in REACHED[kind]), (key, kind)
    assert found["own_engine"]["mfu"] >= 0.94 * found["own_engine"]["measured_mfu"], key


@pytest.mark.deep
def test_kept_plans_reach_the_best_published_mfu_where_it_is_said():
    kept = json.loads(KEPT.read_text())["studies"]
    assert kept.keys() == STUDIES.keys() | UNSEEN.keys()
    for key, own in kept.items():
        if key in UNSEEN:
            continue
        for found in own["best_plans"].values():
            assert found["run"] == best_run(STUDIES[key]).name and found["measured_mfu"] == own["best_mfu"]
        assert_reached(key, own["best_plans"])


@pytest.mark.deep
@pytest.mark.parametrize("key", ["llava_a100", "mosaic_h100", "megatron_a100_2022"])  # both, one and no engine reaches
def test_a_plan_reaches_the_best_published_mfu_where_it_is_said(key):
    assert_reached(key, best_plans(best_run(STUDIES[key])))
