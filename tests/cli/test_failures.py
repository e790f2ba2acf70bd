"""`plan --failures`: templates and throughput with fewer nodes; `simulate --trace`: failures one after the other."""

import json
import re

import pytest

from hf_mmparallel.plan import LANGUAGE_MODEL, MultimodalParallelPlugin, ParallelPlan
from hf_mmparallel.resilience.pipelines import ClusterPlan
from hf_mmparallel.resilience.resilient_planner import ResilientPlanner

SHORT = ["--seq-len", 64, "--image-tokens", 32]
SINGLE = ["--module", "vision:tp=1", "--module", "language_model:tp=1"]
FOUR = ["--nodes", 4, "--gpus", 4, "--failures", 1, "--global-batch-size", 12]


def test_templates_and_throughput(model, run, tmp_path):
    path = tmp_path / "plan.yaml"
    out = run("plan", "--model", model, *SHORT, *FOUR, "--freeze", "vision=tower", "--output", path)
    assert "Templates for nodes of 1 rank" in out
    assert "│ 1 │ 1 │ 1 x vision 4 and language_model 4 │" in out
    assert "one copy of the model needs 1 node of 1 rank, by predicted memory, 71.2 GiB" in out
    assert "Any node may fail at once: each layer is on 2 nodes or more" in out and "with 2 nodes or more" in out
    assert "12 samples, 12 microbatches of 1, whatever fails" in out
    assert "│ 4 │ 4 x 1 │ 4 x 3 │" in out and "│ 2 │ 2 x 1 │ 2 x 6 │" in out
    plugin = MultimodalParallelPlugin.from_any(path)
    assert plugin.modules["vision"].freeze == "tower" and plugin.plan is not None
    assert plugin.plan.modules[LANGUAGE_MODEL].dp_size == 4 and plugin.plan.num_microbatches == 3


def test_rates_are_those_of_the_step(model, run):
    """128 samples of the step that is printed beside."""
    out = run("plan", "--model", model, *SHORT, "--nodes", 2, "--gpus", 8, "--failures", 0, "--global-batch-size", 128)
    assert "Templates for nodes of 4 ranks" in out and "No node may fail" in out
    row = next(line for line in out.split("┡")[-1].split("└")[0].split("├")[0].split("│ 2 │ ") if " ms │ " in line)
    step_ms, rate = (cell.strip().replace(",", "") for cell in row.split("│")[2:4])
    assert float(rate) == pytest.approx(128e3 / float(step_ms.removesuffix(" ms")), rel=1e-3)


def test_what_is_reached_by_losses_is_not_faster_than_what_is_best(model, run, monkeypatch):
    """Few plans are simulated of each number of nodes; here the one that is simulated is slow."""

    def two_unlike_pipelines(planner: ResilientPlanner, num_nodes: int) -> ClusterPlan:
        return planner.plans.consecutive([planner.pipeline(num_nodes - 1), planner.pipeline(1)])

    def single_nodes(planner: ResilientPlanner) -> ClusterPlan:
        return planner.plans.consecutive([planner.pipeline(1)] * planner.num_nodes)

    monkeypatch.setattr(ResilientPlanner, "first", single_nodes)
    monkeypatch.setattr(ResilientPlanner, "fastest", two_unlike_pipelines)
    out = run("plan", "--model", model, *SHORT, *FOUR)
    rows = re.findall(r"│ (\d) │ [^│]+ │ [^│]+ │ [^│]+ │ ([\d,.]+) │ [^│]+ │ ([\d,.]+) │", out)
    assert [int(nodes) for nodes, _, _ in rows] == [4, 3, 2]
    assert all(float(best.replace(",", "")) >= float(reached.replace(",", "")) for _, best, reached in rows)


@pytest.mark.parametrize(
    ("sizes", "nodes", "vision"),
    [
        (["--module", "vision:tp=2", "--module", "language_model:tp=2"], ["--nodes", 3, "--gpus", 12], 2),
        (["--module", "vision:tp=1"], ["--nodes", 2, "--gpus", 20], 1),  # more ranks than layers need tp groups
    ],
)
def test_sizes_are_kept_or_chosen(model, run, tmp_path, sizes, nodes, vision):
    path = tmp_path / "plan.json"
    asked = ["plan", "--model", model, *SHORT, "--failures", 1]
    assert "on 2 ranks" in run(*asked, *sizes, *nodes, "--output", path)
    plan = ParallelPlan.load(path)
    assert plan.world_size == nodes[-1]
    assert plan.modules["vision"].tp_sizes == (vision,) and plan.modules[LANGUAGE_MODEL].tp_size == 2
    again = run(*asked, "--parallel", path, *nodes[:2])
    assert "on 2 ranks" in again and "Any node may fail at once" in again


def test_copies_on_a_node_share_what_belongs_to_a_module(model, run, tmp_path):
    path = tmp_path / "plan.yaml"
    asked = ["plan", "--model", model, *SHORT, "--nodes", 3, "--failures", 1, "--global-batch-size", 24]
    sharing = ["--module", "vision:tp=1", "--module", "language_model:zero_stage=3,shard_size=4"]
    out = run(*asked, *sharing, "--gpus", 12, "--output", path)
    assert "4 copies of the model on the same nodes need 1 node of 4 ranks" in out and "2 pipelines of 1" in out
    assert "│ 3 │ 3 x 1 │ 12 x 2 │" in out and "│ 2 │ 2 x 1 │ 8 x 3 │" in out
    plan = ParallelPlan.load(path)
    assert plan.modules[LANGUAGE_MODEL].layout == "dp 12, ZeRO-3 over 4" and plan.modules["vision"].dp_size == 12
    assert "│ 3 │ 3 x 1 │ 12 x 2 │" in run(*asked, "--parallel", path)


def test_layers_that_can_not_be_cut(model, fail, tmp_path):
    """The second hidden state, which the configuration selects, is one of the last stage: three layers are one."""
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_feature_layer": 1}))
    error = fail("plan", "--model", tmp_path, *SHORT, *SINGLE, "--nodes", 2, "--gpus", 16, "--failures", 1)
    assert "A node of 8 ranks can't be divided among the 6 layers" in error


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--nodes", 4, "--gpus", 4, "--failures", 4], "5 copies of the model on 1 nodes each, 5 nodes; there are 4"),
        (["--failures", 1], "Give `--nodes`, `--gpus`, or both"),
        (["--nodes", 3, "--gpus", 4, "--failures", 1], "`--gpus 4` does not make 3 nodes"),
        (["--gpus", 12, "--failures", 1], "`--gpus 12` does not make 1 nodes of 8 ranks"),
        (["--nodes", 3], "`--nodes 3` has no effect without `--failures`"),
        ([*FOUR, "--explain"], "`--explain` has no effect with `--failures`"),
        ([*FOUR, "--module", "language_model:pp=2"], "`pp_size=2` of `language_model`: with `--failures`"),
        ([*FOUR, "--module", "vision:zero_stage=1"], "`zero_stage=1` of `vision` divides"),
        ([*SINGLE, "--nodes", 2, "--failures", 1, "--gpus", 32], "of 16 ranks can't be divided among the 8 layers"),
    ],
)
def test_what_is_refused(model, fail, arguments, error):
    assert error in fail("plan", "--model", model, *SHORT, *arguments)


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
