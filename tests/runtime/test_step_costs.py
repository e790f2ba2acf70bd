"""Steps on a device that counts what the host waits for, and groups of plans that nobody can run here."""

from pathlib import Path

import pytest

from benchmarks.step_costs import LAYOUTS, count_groups, count_rank, per_step
from tests.distributed import run_distributed
from tests.trainer import runs


@pytest.mark.distributed
@pytest.mark.parametrize("name", runs.deep_but(LAYOUTS, "llava, pp 2", "qwen2_vl, cp 2, packed"))
def test_the_host_waits_for_no_device_between_two_logs(name: str, tmp_path: Path):
    layout = LAYOUTS[name]
    found = run_distributed(count_rank, layout.ranks, layout, f"file://{tmp_path}/meet", timeout=200)
    [reference] = {row["loss"] for row in runs.stock(layout.family, max_steps=6, logging_steps=6).logs}
    for waits, copied_bytes, losses in found:
        assert waits == {}, waits
        assert losses == [pytest.approx(reference, rel=2e-5)]
        assert per_step(copied_bytes) > 0


@pytest.mark.deep
def test_groups_are_counted_for_a_rank_of_a_large_plan():
    row = count_groups(64)
    assert row["ranks"] == 64 and row["communicators"] >= row["channels_of_a_rank"] > 0
    assert row["groups"] + row["channels"] > row["communicators"] <= 32 and row["seconds"] >= 0
