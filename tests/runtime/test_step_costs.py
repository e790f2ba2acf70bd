"""Steps on a device that counts what the host waits for, and groups of plans that nobody can run here."""

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.step_costs import (
    BUCKET_BYTES,
    LAYOUTS,
    SUMMED,
    count_gradients,
    count_groups,
    count_rank,
    measure_loss,
    measure_planning,
    per_step,
)
from hf_mmparallel.runtime.weight_placement import load_nothing
from tests.distributed import run_distributed
from tests.trainer import runs


@pytest.mark.distributed
@pytest.mark.parametrize("name", runs.deep_but(("llava, pp 2", "qwen2_vl, cp 2, packed", "llava, dp 2, ZeRO-2")))
def test_the_host_waits_for_no_device_between_two_logs(name: str, tmp_path: Path):
    layout = LAYOUTS[name]
    found = run_distributed(count_rank, layout.ranks, layout, f"file://{tmp_path}/meet", timeout=200)
    [reference] = {row["loss"] for row in runs.stock(layout.family, max_steps=6, logging_steps=6).logs}
    for rank in found:
        assert rank["waits"] == {}, rank["waits"]
        assert rank["losses"] == [pytest.approx(reference, rel=2e-5)]
        assert per_step(rank["copied_bytes"]) > 0 and rank["python_ms"] > 0


@pytest.mark.deep
def test_groups_are_counted_for_a_rank_of_a_large_plan():
    row = count_groups(64)
    assert row["ranks"] == 64 and row["communicators"] >= row["channels_of_a_rank"] > 0
    assert row["groups"] + row["channels"] > row["communicators"] <= 32 and row["seconds"] >= 0


@pytest.mark.distributed
@pytest.mark.parametrize("name", runs.deep_but(SUMMED))
def test_gradients_take_few_buckets_beside_one_of_each_weight(name: str):
    layout = SUMMED[name]
    for counted in run_distributed(count_gradients, layout.ranks, layout, timeout=200):
        itemsize, whole = layout.dtype.itemsize, counted["gradient_bytes"]
        held = whole * max(4 // itemsize, 1)  # in float32
        slices = held // 2 if "ZeRO-1" in name else 0  # sums of the half that each copy updates
        assert whole > 0 and counted["extra_bytes"] <= held - whole + slices + 3 * BUCKET_BYTES


def test_a_loss_of_few_targets_takes_less_memory():
    rows = {name: measure_loss(name, 256, 64, 1) for name in ("all tokens", "targets", "targets, in chunks")}
    memory = [row["peak_mib"] for row in rows.values()]
    assert memory == sorted(memory, reverse=True) and memory[0] > memory[1] and memory[2] > 0


@pytest.mark.deep
def test_the_plan_of_a_step_is_timed():
    row = measure_planning(64, 1)
    assert (row["ranks"], row["microbatches"]) == (64, 32) and row["step_ms"] > 0


def test_nothing_takes_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(300, 200, dtype=torch.bfloat16), nn.Linear(200, 100))
        model[1].bias.requires_grad_(False)
    before = {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    yielded = [list(names) for names in load_nothing(torch.device("cpu"))(model, [["0.weight", "0.bias"]])]
    assert yielded == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()} == before
    assert all(p.device.type == "cpu" and p.untyped_storage().nbytes() <= 4 for p in model.parameters())
