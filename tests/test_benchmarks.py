"""The benchmarks run and report what they measured; no time is asserted."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import run_script

pytestmark = [pytest.mark.distributed, pytest.mark.deep, pytest.mark.timeout(400)]

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def _run_command(script: Path, arguments: list[str]) -> str:
    """The output of a script that is run by the command of its docstring."""
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _quick(name: str, folder: Path, *arguments: str, run: Any = run_script) -> dict[str, Any]:
    """The JSON line of a quick run, which is also the file that it leaves."""
    output = run(BENCHMARKS / f"{name}.py", ["--quick", "--out", str(folder), *arguments])
    result = json.loads(output.splitlines()[-1])
    assert result == json.loads((folder / f"{name}.json").read_text())
    for key in ("cores", "load_before", "load_after", "torch", "transformers", "accelerate", "commit", "shapes"):
        assert result[key], key
    return result


def test_trainer_overhead_compares_each_variant_with_stock(tmp_path):
    result = _quick("trainer_overhead", tmp_path)
    assert set(result["one_process"]) == {"stock", "ours", "ours, engine"}
    assert set(result["four_processes"]) == {"stock", "ours"}
    for setting in ("one_process", "four_processes"):
        for name, row in result[setting].items():
            assert row["samples_per_second"]["min"] > 0
            assert ("ratio" in row) == (name != "stock")


def test_simulator_error_has_a_prediction_for_each_measured_step(tmp_path):
    result = _quick("simulator_error", tmp_path, run=_run_command)  # that it runs as a command, with ranks
    assert result["real"]["measured ms"]["min"] > 0 < result["real"]["predicted ms"]["min"]
    cases = result["modelled"]["cases"]
    assert len({case["case"] for case in cases}) == len(cases)
    assert sum(case["world_size"] == 8 for case in cases) >= 10
    for case in cases:
        assert case["predicted_ms"] > 0 < case["measured_ms"]
        assert case["measured_ms"] > 0.9 * case["predicted_ms"]  # tasks that did not sleep would be done much sooner


def test_sharded_simulation_predicts_layouts_that_gather_and_sum_layer_by_layer(tmp_path):
    cases = _quick("sharded_simulation", tmp_path)["cases"]
    assert {(case["world_size"], case["zero_stage"]) for case in cases} == {(4, 2), (4, 3), (8, 2), (8, 3)}
    assert len({case["case"] for case in cases}) == len(cases)
    for case in cases:
        assert 0 < case["without_transfers_ms"] < case["predicted_ms"] and case["transfers_a_step"] > 0
        # What did not sleep would be done much sooner. A stage that waits for its input gathers weights meanwhile.
        least = "without_transfers_ms" if "pp" in case["case"] else "predicted_ms"
        assert case["measured_ms"] > 0.9 * case[least]
        assert case["error"] == pytest.approx(abs(case["predicted_ms"] / case["measured_ms"] - 1))


def test_context_parallel_balance_compares_every_way_to_cut_a_row(tmp_path):
    result = _quick("context_parallel_balance", tmp_path)
    assert result["torch's block mask has the same blocks"] is True
    by_method = {case["method"]: case["work"]["worst"] for case in result["row"] if case["kind"] == "packed"}
    assert set(by_method) == {"ours", "capped LPT", "PTRR", "zigzag", "contiguous", "random"}
    assert min(by_method, key=lambda method: by_method[method]) == "ours" and by_method["ours"] <= 1.02
    assert all(case["ours"]["mean"] >= 1 for case in result["small"]) and result["times"]
    papers = {(case["kind"], case["method"]): case["work"]["mean"] for case in result["papers"]}
    for kind in ("EP", "EE", "MP"):
        assert papers[kind, "ours"] <= 1.01 and papers[kind, "zigzag"] > 1.1 < papers[kind, "contiguous"]
    assert set(result["runs"]) == {"rows", "small", "papers", "times"}


def test_attention_is_compared_in_both_passes(tmp_path):
    result = _quick("attention", tmp_path)
    found = [(row["length"], row["pass"]) for row in result["rows"]]
    assert found == list(product(result["shapes"]["lengths"], ("forward", "forward + backward")))
    for row in result["rows"]:
        assert row["times_faster"] > 0 < row["memory_share"]
        assert all(times["min"] > 0 for times in row["time_ms"].values())


def test_sizes_at_scale_times_the_counting_and_the_first_step(tmp_path):
    result = _quick("sizes_at_scale", tmp_path)
    assert result["token_ids"]["seconds"] > 0 < result["one_conversation"]["milliseconds"]
    each = [(row["parallel"], row["again"]) for row in result["first_steps"]]
    assert each == list(product(("auto", "a layout"), (False, True)))
    for row in result["first_steps"]:
        assert 0 < row["constructor_seconds"] < row["first_step_seconds"] < row["third_step_seconds"]


def test_async_save_times_both_ways_in_turns(tmp_path):
    result = _quick("async_save", tmp_path)
    assert set(result["blocked_s"]) == {"waited for", "asynchronous"} == set(result["processor_s"])
    assert all(0 < times["min"] <= times["max"] for times in result["blocked_s"].values())
    assert result["ratio"]["median"] > 0 < result["first_ratio"] and result["written_s"]["min"] > 0
    assert result["checkpoint_bytes"] > 10**6


def test_recovery_times_each_part_and_a_new_start(tmp_path):
    result = _quick("recovery", tmp_path)
    (case,), (restart,), (overhead,) = result["cases"], result["restarts"], result["overhead"]
    seconds = {name: times["median"] for name, times in case["seconds"].items()}
    parts = ("detected", "met", "planned", "copied", "laid out", "first step")
    assert all(seconds[name] > 0 for name in parts) and case["copied_mib"] > 0
    assert sum(seconds[name] for name in parts) == pytest.approx(seconds["total"], abs=1e-3)
    assert 0 < restart["seconds"]["ended"]["min"] < restart["seconds"]["total"]["min"]
    assert restart["case"] == case["case"] and overhead["own_us"] > 0 < overhead["without_ms"]
    memory = json.loads((tmp_path / "recovery_memory.json").read_text())
    assert set(memory["cases"][0]["ranks"]) == {"0", "1", "2"}
    assert 0 < memory["largest_error"] < memory["goal"], "tensors are counted, which takes no time"
    assert all(0 < row["held"] <= row["peak"] for row in memory["cases"][0]["ranks"].values())


def test_chaos_compares_a_run_in_which_processes_die(tmp_path):
    result = _quick("chaos", tmp_path)
    assert result["num_runs"] == 1 and result["died"] == 2 and not result["hangs"] and not result["faults"]
    assert sum(row["deaths"] for row in result["recoveries"]) == 2
    assert all(0 < row["recovered_s"] <= row["next_step_s"] for row in result["recoveries"])


def test_sampler_overhead_times_every_arrangement_and_every_loader(tmp_path):
    result = _quick("sampler_overhead", tmp_path)
    methods = {row["method"] for row in result["arranging"]}
    assert {"hierarchical", "contiguous", "batch_rebalance", "disttrain", "sub_microbatches"} <= methods
    for row in result["arranging"]:
        assert row["arrange_ms"]["min"] > 0 and row["step_ms"]["min"] > 0 and row["program_ms"]["min"] > 0
    assert {(row["method"], row["workers"]) for row in result["hiding"]} == set(product(methods, (0, 1)))
    assert set(result["reading"]) == {"stock", "both", "encoder", "language model"}
    assert all(row["ratio"] > 0 for row in result["reading"].values())


def test_rank_balance_compares_arrangements_without_a_plan(tmp_path):
    rows = _quick("rank_balance", tmp_path)["balance"]
    assert {row["arrangement"] for row in rows} == {"contiguous", "hierarchical", "batch_rebalance", "disttrain"}
    assert all(0 <= row["rank_excess"] <= row["turn_excess"] + 1e-9 for row in rows)


def test_scale_times_what_a_rank_plans(tmp_path):
    result = _quick("scale", tmp_path)
    assert [row["kind"] for row in result["rows"]] == ["ranks", "ranks", "batch", "many", "deep", "unlike"]
    for row in result["rows"]:
        assert row["planned_ranks"] == (10 if row["kind"] in ("ranks", "batch", "many") else row["ranks"])
        assert all(row[f"{part}_ms"]["min"] > 0 for part in ("arrange", "program", "rest", "step", "sync_groups"))


def test_microbatch_balance_compares_every_arrangement_with_the_bounds(tmp_path):
    result = _quick("microbatch_balance", tmp_path)
    (dataset,) = result["simulated"]
    methods = {"contiguous", "batch_rebalance", "disttrain", "sub_microbatches", "hierarchical", "hierarchical, eager"}
    slept = {row["arrangement"] for row in result["slept"]}
    assert methods <= slept < set(dataset["arrangements"])
    for row in dataset["arrangements"].values():
        assert row["iteration_ms"] >= row["bounds_ms"]["busiest"] * (1 - 1e-9)
        assert min(row["peak_gib"]) > 0 < row["num_microbatches"]
    for row in result["slept"]:
        assert row["measured_ms"] > 0.9 * row["predicted_ms"]
    modes = json.loads((tmp_path / "microbatch_balance_modes.json").read_text())["modes"]
    assert {(row["mode"], row["microbatch_size"]) for row in modes} == set(product(("padded", "packed"), (4, 8)))
    for row in modes:
        assert (max(row["padding"].values()) > 1) == (row["mode"] == "padded")
        baselines = min(row["step_ms"][name] for name in ("contiguous", "batch_rebalance", "disttrain"))
        assert row["step_ms"][row["chosen"]] <= 1.01 * baselines


def test_memory_error_has_a_prediction_for_each_rank(tmp_path):
    result = _quick("memory_error", tmp_path)
    assert [len(case["ranks"]) for case in result["cases"]] == [2, 2, 3, 3]
    assert set(result["errors"]) == {"named", "padded", "packed", "shared"}
    for case in result["cases"]:
        for found in case["ranks"]:
            assert found["peak"] > found["weights"] + found["gradients"] + found["optimizer"] > 0
            # Bytes are not noisy: this is the goal, on the few plans of a quick run.
            assert abs(found["predicted"] / found["peak"] - 1) <= result["goal"]
            assert found["bound"] >= found["predicted"] >= (1 - result["goal"]) * found["peak"]


def test_sharding_compares_every_stage_with_those_that_divide_as_much(tmp_path):
    result = _quick("sharding", tmp_path)
    (variants,) = result["ranks"].values()
    assert {"ours, stage 0", "ours, stage 1", "FSDP2", "DeepSpeed, stage 3"} <= set(variants)
    for row in variants.values():
        assert row["losses"] == pytest.approx(variants["FSDP2"]["losses"], rel=1e-5)  # they train the same
        assert row["live_mib"] > 0 < row["sent_mib"] and row["step_ms"]["min"] > 0
    (ratios,) = result["ratios"].values()
    for over in ratios.values():
        assert over.keys() >= result["goals"].keys()


def test_experts_compares_shared_experts_with_those_of_transformers(tmp_path):
    (variants,) = _quick("experts", tmp_path, "--only", "ep")["ranks"].values()
    assert set(variants) == {"dp, ep", "dp, ep, ZeRO-3", "tp, ep", "transformers, ep, FSDP2"}
    for row in variants.values():
        assert row["losses"] == pytest.approx(variants["dp, ep"]["losses"], rel=1e-5)  # they train the same
        assert row["live_mib"] > 0 < row["sent_mib"] and row["step_ms"]["min"] > 0


def test_placements_have_the_best_plan_of_each_kind(tmp_path):
    cases = _quick("placements", tmp_path)["cases"]
    assert len(cases) == 2 and (tmp_path / "placements.png").stat().st_size > 1000
    for row in (row for case in cases for row in case["plans"].values() if row is not None):
        boundary = row["boundary"]
        assert boundary["feature_bytes"] > 0 < boundary["messages"] and 0 <= boundary["exposed_ms"] < row["step_ms"]
    for case in cases:
        one, shared, own = (case["plans"][name] for name in ("one layout", "shared ranks", "own ranks"))
        assert shared["step_ms"] <= one["step_ms"]
        assert all("on shared ranks" in row["plan"] for row in (one, shared)) and "on its own ranks" in own["plan"]
        sizes = [module.split(": ")[1].split(", ")[0] for module in one["plan"].split("; ")[:2]]
        assert sizes[0] == sizes[1]
        assert case["gains"]["own ranks"] == pytest.approx(one["step_ms"] / own["step_ms"] - 1)


def test_disttrain_simulates_all_methods_on_the_same_batches(tmp_path):
    cases = _quick("disttrain", tmp_path)["cases"]
    assert [case["trained"] for case in cases] == ["all", "generator"]
    for case in cases:
        assert set(case["plans"]) == {"ours", "DistTrain", "single layout", "ratio-based"}
        assert all(plan["step_ms"] > 0 and 0 < plan["mfu"] < 1 for plan in case["plans"].values())


def test_calibration_judges_plans_that_were_not_fitted(tmp_path):
    result = _quick("calibration", tmp_path)
    fitted, *judged = result["plans"]
    assert fitted["fitted"] and len(judged) >= 3 and not any(row["fitted"] for row in judged)
    assert len({row["plan"] for row in result["plans"]}) == len(result["plans"])
    assert result["errors"]["plans"] == len(judged)
    assert {"vision", "language_model"} == set(result["calibration"]["scales"]) and result["links"]
    for row in result["plans"]:
        assert all(row["ms"][name] > 0 for name in ("measured", "before", "one_factor", "after", "replayed"))
        assert row["ms"]["one_factor"] == pytest.approx(result["factor"] * row["ms"]["before"])
        assert row["ms"]["before"] != row["ms"]["after"]
        assert len(row["tasks_over_measured"]) >= 3


def test_planner_predicts_the_plans_that_run(tmp_path):
    parts = _quick("planner", tmp_path, "--only", "real", "--only", "slept")["parts"]
    assert set(parts) == {"real", "slept"}
    for row in (parts["real"], parts["slept"]["4"]):
        assert len({plan["plan"] for plan in row["plans"]}) == len(row["plans"]) == 2
        assert all(plan["predicted_ms"] > 0 < plan["measured_ms"] for plan in row["plans"])
    for plan in parts["slept"]["4"]["plans"]:
        assert plan["measured_ms"] > 0.7 * plan["predicted_ms"]  # without sleep they would be done much sooner


def test_planner_plans_for_itself_and_for_others(tmp_path):
    kept = {"parts": {"slept": {}}}
    (tmp_path / "planner.json").write_text(json.dumps(kept))
    parts = _quick("planner", tmp_path, "--only", "frozen", "--only", "speed", "--only", "others")["parts"]
    assert set(parts) == {"frozen", "speed", "others", "slept"}  # what ran before is kept
    (model,) = parts["frozen"]["models"]
    assert model["model"] == "SSS" and model["paper"]["stages"] == {"aware": [4, 2], "unaware": [5, 1]}
    for setting, mean in parts["frozen"]["mean_improvement"].items():
        assert mean == model[setting]["improvement"] > 0.9
    assert parts["speed"]["allocation"]["112"]["s"]["min"] > 0 < parts["speed"]["search"]["8"]["s"]["min"]
    assert parts["speed"]["profiling_batch"]["batch_size"] > 1
    (case,) = parts["others"]["cases"]
    assert {"frozen-unaware", "single layout", "FSDP-like", "DistTrain"} < set(case["others"])


def test_templates_are_compared_with_the_paper(tmp_path):
    result = _quick("templates", tmp_path)
    assert all(row["stages_s"] >= row["nodes"] <= row["stages_limited_s"] for row in result["latency"])
    assert all(0 <= row["mean"] <= row["worst"] < 0.2 for row in result["heuristic"])
    (row,) = result["throughput"]
    assert row["workload"] == "BERT-Large" and row["fewest_nodes"] == 1
    assert row["paper_speed"]["Oobleck"]["6h"]["rate"] == pytest.approx(row["paper"]["Oobleck"]["6h"], rel=0.02)
    for kind in ("table", "simulator", "paper_speed"):
        assert {"Oobleck", "weighed", "Varuna", "Varuna, free checkpoints", "Bamboo"} == set(row[kind])
        for rates in row[kind].values():
            assert rates["6h"]["rate"] >= rates["1h"]["rate"] >= rates["10m"]["rate"] > 0
            for found in rates.values():
                assert sum(found["shares"].values()) == pytest.approx(1.0)
        assert row[kind]["Oobleck"]["10m"]["rate"] > row[kind]["Varuna"]["10m"]["rate"]


def test_schedules_are_compared_on_the_same_batches(tmp_path):
    result = _quick("schedules", tmp_path)
    assert len(result["cases"]) == 8
    means, shared = result["means"]["schedules"], result["means"]["shared"]
    first = {"step": 1.0, "longest": 1.0, "alone": 1.0, "bubble_share": 1.0, "memory": 1.0}
    assert means["1f1b"] == shared["DIP"] == first
    assert means["zero_bubble"]["alone"] < 0.95 and means["zero_bubble"]["memory"] < 1.05
    assert all(row["memory"] >= 0.99 for row in means.values())
    assert shared["zero_bubble"]["step"] < shared["1f1b"]["step"] and shared["zero_bubble"]["step"] < 0.95


def test_schedules_run_on_ranks_that_sleep(tmp_path):
    rows = _quick("schedule_runs", tmp_path)["rows"]
    assert {row["ranks"] for row in rows} == {4, 8} and len(rows) == 16
    # without sleep they would be done much sooner
    assert all(0.7 * row["predicted_ms"] < row["measured_ms"] for row in rows)


def test_split_backward_times_both_parts_and_virtual_stages(tmp_path):
    result = _quick("split_backward", tmp_path)
    assert [row["case"] for row in result["backwards"]] == ["plain", "recomputed", "LoRA", "autocast"]
    plain, recomputed, *_ = result["backwards"]
    assert all(row["kept_mib"] > 0 and row["ratio"]["median"] > 0 for row in result["backwards"])
    # what stays is less than what a forward saves, but for layers that save their inputs only
    assert plain["kept_mib"] < plain["saved_mib"] and recomputed["kept_mib"] > recomputed["saved_mib"]
    assert [row["stages"] for row in result["stages"]] == [4, 2, 1]


@pytest.mark.parametrize(("name", "arguments"), [("gpu_check", ["--only", "qwen3_vl"]), ("gpu_step", [])])
def test_what_runs_on_a_gpu_runs_on_the_cpu_to_be_tried(name, arguments, tmp_path):
    _run_command(BENCHMARKS / f"{name}.py", ["--cpu", "--out", str(tmp_path), *arguments])
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert result["device"] == "cpu" and len(result["rows"]) == {"gpu_check": 1, "gpu_step": 3}[name]
    assert all(row["difference"] < 0.02 for row in result["rows"])


def test_packing_gain_predicts_and_measures_the_same_variants(tmp_path):
    result = _quick("packing_gain", tmp_path)
    variants = ["padded", "packed", "packed, arranged"]
    speeds = {row["variant"]: row["tokens_per_second"] for row in result["predicted"]}
    assert list(speeds) == variants and speeds["packed"] > speeds["padded"]
    measured = {row["variant"]: row for row in result["measured"]}
    assert {*measured} - {"TRL, padded"} == {*variants}
    assert all(row["tokens_per_processor_second"]["min"] > 0 for row in measured.values())


def test_model_plans_are_those_of_the_command(tmp_path):
    (row,) = _quick("model_plans", tmp_path)["plans"]
    assert row["gpus"] == 8 and row["layouts"]["language_model"].startswith("dp 4 x tp 2")
    assert 0 < row["peak_memory_gib"] < 72 and row["step_ms"] > 0
