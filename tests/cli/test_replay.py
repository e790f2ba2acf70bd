"""Traces of failures on a model, from the command line."""

from __future__ import annotations

import pytest

SIZES = ["--global-batch-size", 64, "--microbatch-size", 2, "--gpu-type", "a100"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "failures.csv"
    rows = [f"0,add,node{index}" for index in range(4)]
    path.write_text("\n".join([*rows, "60000,remove,node2", "120000,add,node9", "180000,remove,node0"]) + "\n")
    return path


def test_a_trace_is_replayed(model, trace, tmp_path, run, figures) -> None:
    arguments = ["simulate", "--trace", trace, "--model", model, "--node-size", 2, *SIZES]
    out = run(*arguments)
    assert "2 nodes lost, 3.7 nodes on average and at most 4, of 2 ranks each (a100)" in out
    assert "one copy of the model needs 1 node of 2 ranks" in out and "Any node may fail at once" in out
    assert "checkpoints of" in out and "only when too few nodes are left" in out
    told = figures(*arguments, "--picture", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert told["nodes"] == [[0.0, 4], [60.0, 3], [120.0, 4], [180.0, 3]]
    found = told["recoveries"]["templates"]
    assert found["samples"] == pytest.approx(180 * found["samples_per_second"]) and found["samples"] % 64 == 0
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert sum(found["rates"]) / len(found["rates"]) == pytest.approx(found["samples_per_second"])


def test_regular_losses_need_no_file(text_model, run) -> None:
    out = run("simulate", "--nodes", 6, "--lose-every", 10, "--model", text_model, "--failures", 2, *SIZES)
    assert "0.50 hours, 3 nodes lost" in out and "Any 2 nodes may fail at once" in out


def test_checkpoints_and_copies_cost_what_the_arguments_say(text_model, trace, figures) -> None:
    def found(*more) -> dict:
        return figures("simulate", "--trace", trace, "--model", text_model, *SIZES, *more)["recoveries"]["templates"]

    none, *saving = found(), *(found("--save-every", 100, "--storage-gb-per-s", rate) for rate in ("0.1", "0.01"))
    assert none["shares"]["saving"] == 0.0 < saving[0]["shares"]["saving"] < saving[1]["shares"]["saving"]
    assert none["samples"] > saving[0]["samples"] > saving[1]["samples"]
    copies = [found("--copy-gb-per-s", rate)["shares"]["copying"] for rate in ("1", "0.1")]
    assert copies[1] == pytest.approx(10 * copies[0]) and copies[0] > 0, "of the node that joins"


def test_what_can_not_be_replayed_says_so(model, trace, tmp_path, fail) -> None:
    before, plan = trace.read_text(), tmp_path / "plan.yaml"
    base = ["simulate", "--trace", trace, "--model", model]
    plan.write_text("")
    for arguments, message in (
        ([*base, "--failures", 4], "need 5 copies of the model on 1 nodes each, 5 nodes; there are 4"),
        (["simulate", "--trace", trace], "Give `--model`"),
        (["simulate", "--model", model], "There is nothing to simulate"),
        (["simulate", "--trace", tmp_path / "none.csv", "--model", model], "does not exist"),
        ([*base, "--nodes", 4], "`--nodes` has no effect beside `--trace`"),
        ([*base, "--html", tmp_path / "page.html"], "`--html` has no effect on a trace"),
        (["simulate", plan, "--trace", trace], "Leave the plan out"),
    ):
        assert message in fail(*arguments)
    assert trace.read_text() == before
    trace.write_text("0,add,a\n9,remove,b\n")
    assert "line 2: node `b` is removed and was never added" in fail(*base)
