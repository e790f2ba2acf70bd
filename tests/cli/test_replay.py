"""Traces of failures on a model, from the command line."""

from __future__ import annotations

import json

import pytest

SIZES = ["--global-batch-size", 64, "--microbatch-size", 2, "--gpu-type", "a100"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "failures.csv"
    rows = [f"0,add,node{index}" for index in range(4)]
    path.write_text("\n".join([*rows, "60000,remove,node2", "120000,add,node9", "180000,remove,node0"]) + "\n")
    return path


def test_a_trace_is_replayed(model, trace, tmp_path, run) -> None:
    files = [tmp_path / name for name in ("out.png", "out.json")]
    arguments = ["simulate", "--trace", trace, "--model", model, "--node-size", 2, *SIZES]
    out = run(*arguments, "--picture", files[0], "--json", files[1])
    assert "2 nodes lost, 3.7 nodes on average and at most 4, of 2 ranks each (a100)" in out
    assert "one copy of the model needs 1 node of 2 ranks" in out and "Any node may fail at once" in out
    assert "checkpoints of" in out and "only when too few nodes are left" in out
    assert files[0].read_bytes().startswith(b"\x89PNG")
    figures = json.loads(files[1].read_text())
    assert figures["nodes"] == [[0.0, 4], [60.0, 3], [120.0, 4], [180.0, 3]]
    found = figures["recoveries"]["templates"]
    assert found["samples"] == pytest.approx(180 * found["samples_per_second"]) and found["samples"] % 64 == 0
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert sum(found["rates"]) / len(found["rates"]) == pytest.approx(found["samples_per_second"])


def test_regular_losses_need_no_file(text_model, run) -> None:
    out = run("simulate", "--nodes", 6, "--lose-every", 10, "--model", text_model, "--failures", 2, *SIZES)
    assert "0.50 hours, 3 nodes lost" in out and "Any 2 nodes may fail at once" in out


def test_checkpoints_and_copies_cost_what_the_arguments_say(text_model, trace, figures) -> None:
    def found(*more) -> dict:
        arguments = ["simulate", "--trace", trace, "--model", text_model, *SIZES]
        return figures(*arguments, *more)["recoveries"]["templates"]

    none, fast = found(), found("--save-every", 100, "--storage-gb-per-s", "0.1")
    slow = found("--save-every", 100, "--storage-gb-per-s", "0.01")
    assert none["shares"]["saving"] == 0.0 < fast["shares"]["saving"] < slow["shares"]["saving"]
    assert none["samples"] > fast["samples"] > slow["samples"]
    copies = [found("--copy-gb-per-s", rate)["shares"]["copying"] for rate in ("1", "0.1")]
    assert copies[1] == pytest.approx(10 * copies[0]) and copies[0] > 0, "of the node that joins"


def test_what_can_not_be_replayed_says_so(model, trace, tmp_path, fail) -> None:
    base = ["simulate", "--trace", trace, "--model", model]
    assert "4 simultaneous failures need 5 copies of the model on 1 nodes each, 5 nodes; there are 4" in fail(
        *base, "--failures", 4
    )
    assert "Give `--model`" in fail("simulate", "--trace", trace)
    assert "There is nothing to simulate" in fail("simulate", "--model", model)
    assert "does not exist" in fail("simulate", "--trace", tmp_path / "none.csv", "--model", model)
    assert "`--nodes` has no effect beside `--trace`" in fail(*base, "--nodes", 4)
    assert "`--html` has no effect on a trace" in fail(*base, "--html", tmp_path / "page.html")
    trace.write_text("0,add,a\n9,remove,b\n")
    assert "line 2: node `b` is removed and was never added" in fail(*base)


def test_a_trace_of_failures_is_not_overwritten(model, trace, tmp_path, run, fail) -> None:
    before = trace.read_text()
    run("plan", "--model", model, "--module", "vision:dp=2", "--output", tmp_path / "plan.yaml")
    assert "Leave the plan out" in fail("simulate", tmp_path / "plan.yaml", "--trace", trace)
    assert trace.read_text() == before
