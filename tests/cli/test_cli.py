"""The command: help without torch, versions, plans whose sizes are given and their device; `launch`."""

import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import transformers

from hf_mmparallel.cli.launch_command import launch_parser
from hf_mmparallel.cli.main import main
from hf_mmparallel.papers.compare import DISTTRAIN, RATIO, REPLICATED, SHARDED, SINGLE, UNAWARE
from hf_mmparallel.plan import ModulePlugin, MultimodalParallelPlugin, ParallelPlan
from hf_mmparallel.planning.settings import SHORT_NAMES

LAYOUT = ["--module", "vision:dp=2", "--module", "language_model:pp=2,tp=2"]


def test_given_sizes_are_predicted_and_written(model, tmp_path, run):
    files = [tmp_path / name for name in ("plan.yaml", "schedule.png", "trace.json")]
    arguments = ["plan", "--model", model, *LAYOUT, "--gpus", 6, "--global-batch-size", 12, "--microbatch-size", 3]
    out = run(*arguments, "--dry-run", "--output", files[0], "--picture", files[1], "--trace", files[2], "--explain")
    assert "Plan for 6 ranks" in out and "Search none: the sizes are given" in out
    assert "│ vision │ dp 2 │ 0 │ 0-3 │ 0-1 │" in out
    assert "│ language_model │ pp 2 x tp 2 │ 0 │ 0-1 │ 2-3 │" in out
    assert "12 samples, 4 microbatches of up to 3" in out
    # Two tensor-parallel pairs, one sum over the encoder's copies; each pair talks both ways.
    assert "3 besides the world, 6 pairs of ranks that exchange messages" in out
    assert "rank 5 language_model s1 |" in out and "Dry run passed" in out
    assert "fits the 71.2 GiB, 90% of the memory of h100" in out
    plan = ParallelPlan.load(files[0])
    assert plan.world_size == 6 and plan.num_microbatches == 4
    assert files[1].read_bytes().startswith(b"\x89PNG")
    events = json.loads(files[2].read_text())["traceEvents"]
    kinds = Counter(event["cat"] for event in events if event["ph"] == "X")
    assert kinds["sync"] >= 2, "the sum of the gradients of the encoder's two copies"
    assert sum(number for kind, number in kinds.items() if kind.endswith((",fwd", ",bwd"))) == (2 + 4) * 4 * 2
    assert kinds["update"] == 2 + 2, "the optimizer's step of each rank, tensor-parallel pairs once"


def test_the_tokens_of_a_row_can_be_shared(model, tmp_path, run):
    path = tmp_path / "plan.yaml"
    out = run(
        "plan", "--model", model, "--module", "language_model:cp=2,tp=2,cp_block=64", "--output", path, "--explain"
    )
    assert "│ language_model │ cp 2 x tp 2 │" in out
    # Two rows of tensor-parallel ranks, two columns that share tokens and sum gradients, and all four for gradients of
    # what each of them holds whole; vision talks to both rows.
    assert "5 besides the world, 4 pairs of ranks that exchange messages" in out
    assert ParallelPlan.load(path).modules["language_model"].context.block == 64


def test_saved_plans_are_read_again(model, tmp_path, run, fail):
    path = tmp_path / "plan.yaml"
    run("plan", "--model", model, *LAYOUT, "--output", path)
    out = run("plan", "--model", model / "config.json", "--parallel", path, "--gpus", 6)
    assert "Plan for 6 ranks" in out and "microbatches of up to 1" in out
    assert "a forward is 1 ms" in run("simulate", path, "--picture", tmp_path / "again.png")
    assert (tmp_path / "again.png").exists()
    ParallelPlan.save(replace(ParallelPlan.load(path), schedule="eager"), path)
    out = run("simulate", path, "--model", model, "--gpu-type", "a100")
    assert "samples/s" in out and "a100" in out and "schedule eager" in out
    assert "schedule gpipe" in run("simulate", path, "--model", model, "--schedule", "gpipe")
    assert "`--html` has no effect without `--model`" in fail("simulate", path, "--html", tmp_path / "page.html")


def test_a_plan_says_how_many_microbatches_each_replica_has(model, tmp_path, run, fail):
    path = tmp_path / "plan.yaml"
    run("plan", "--model", model, "--module", "language_model:dp=2", "--output", path)
    plan = ParallelPlan.load(path)
    ParallelPlan.save(replace(plan, replica_microbatches=(5, 2)), path)
    for out in (run("simulate", path, "--microbatch-size", 3), run("simulate", path, "--model", model)):
        assert re.search(r"(21|7) samples, 2 to 5 microbatches of", out)
    error = fail("simulate", path, "--model", model, "--global-batch-size", 12)
    assert "are 7 microbatches, but a global batch of 12 samples in microbatches of 1 has 12" in error


def test_frozen_modules_travel_with_a_plan(model, tmp_path, figures):
    """The Trainer works out what is trained from the settings of modules, which a plan alone does not hold."""
    path = tmp_path / "plan.yaml"
    planned = figures("plan", "--model", model, *LAYOUT, "--freeze", "vision=tower", "--output", path)
    plugin = MultimodalParallelPlugin.from_any(path)
    assert plugin.modules["vision"].freeze == "tower" and plugin.plan is not None
    beside = {"modules": {"vision": {"freeze": "tower"}}, "planned_for": planned["plan"]["planned_for"]}
    assert planned["plan"] == {**beside, "plan": plugin.plan.to_dict()}
    in_module = ["--module", "vision:dp=2,freeze=tower", *LAYOUT[2:]]
    for again in (["simulate", path, "--model", model], ["plan", "--model", model, *in_module]):
        assert figures(*again)["step_ms"] == pytest.approx(planned["step_ms"])
    assert figures("plan", "--model", model, *LAYOUT)["step_ms"] > planned["step_ms"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*LAYOUT[:2], "--module", "language_model:dp=1,pp=2,tp=2", "--gpus", "7"], "No layout"),
        (["--module", "vision:dp=2,pp=1,tp=1", "--module", "language_model:dp=1,pp=2,tp=2", "--gpus", "7"], "7`: the"),
        (["--module", "vison:dp=2"], "Did you mean `vision`"),
        (["--module", "audio"], "must look like `vision:dp=2,tp=2`"),
        (["--module", "vision:dp"], "must look like `vision:dp=2,tp=2`"),
        (["--module", "vision:layers=a/b"], "must be numbers with slashes"),
        (["--module", "vision:tp_sze=2"], "Did you mean `tp_size`"),
        (["--module", "vision:dp=0"], "`dp_size=0`"),
        (["--module", "vision:dp=2", "--module", "vision:tp=2"], "`--module vision` is given twice"),
        (["--gpu-type", "h10"], "Did you mean `h100`"),
        (["--gpu-spec", "nothing.yaml"], "`gpu_spec=nothing.yaml` can't be read"),
        (["--freeze", "visio"], "Did you mean `vision`"),
        (["--freeze", "vision=nothing"], "matches none of its"),
        (["--microbatch-assignment", "tapred"], "Did you mean `tapered`"),
        (["--compare"], "Leave sizes out, and give `--gpus`"),
        (["--token-columns", "length"], "no effect without `--dataset`"),
        (["--gpus", "4", "--module", "vision:layers=1/3"], "is chosen by the search"),
        (["--gpus", "4", "--module", "vision:checkpointing=true,dp=3"], "vision dp_size=3"),
    ],
)
def test_errors_are_one_line(model, fail, arguments, message):
    assert message in fail("plan", "--model", model, *arguments)


def test_missing_files_and_foreign_plans_are_errors(model, tmp_path, monkeypatch, fail):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    settings, broken, torn, bart = (tmp_path / name for name in ("settings.yaml", "broken.yaml", "torn.yaml", "bart"))
    settings.write_text("vision: {dp_size: 2}\n")
    broken.write_text("modules:\n  - vision: [1\n")
    torn.write_text("modules: {vision: {replicas: [[{ranks: [[0]]}]]}}\n")
    transformers.BartConfig(d_model=32, architectures=["BartForConditionalGeneration"]).save_pretrained(bart)
    for arguments, message in (
        (["plan", "--model", bart, "--gpus", 2], "is an encoder-decoder model"),
        (["plan", "--model", tmp_path / "nothing"], "does not exist"),
        (["plan", "--model", "nope", "--gpus", 2], "`--model nope` is not a folder here, and no configuration"),
        (["plan", "--model", tmp_path], "without a config.json"),
        (["plan", "--model", model, "--parallel", tmp_path / "plan.yaml"], "neither a file nor a JSON object"),
        (["simulate", tmp_path / "plan.yaml"], "neither a file nor a JSON object"),
        (["simulate", settings], "has settings of modules, not a plan"),
        (["simulate", broken], "not valid YAML"),
        (["simulate", torn], "Stage 0 of `vision` replica 0 has no `layers`"),
    ):
        assert message in fail(*arguments)


def test_a_dry_run_fails_when_a_rank_is_too_full(model, run, fail):
    arguments = ["plan", "--model", model, "--gpu-type", "a40", "--microbatch-size", "64", "--seq-len", "1000000"]
    assert "Does not fit: Rank 1 (language_model) needs about" in run(*arguments)
    error = fail(*arguments, "--dry-run")
    assert "Rank 1 (language_model) needs about" in error
    assert "more than the 40.0 GiB, 90% of the memory of a40" in error
    assert "more than the 20.0 GiB of the memory limit" in fail(*arguments, "--dry-run", "--memory-limit-gib", "20")


def test_thousands_of_ranks_fit_a_screen_that_ends_with_the_answer(model, capsys):
    arguments = ["--module", "vision:dp=128", "--module", "language_model:dp=256,pp=4,tp=2", "--gpu-type", "cpu"]
    arguments += ["--global-batch-size", "256"]
    assert main(["plan", "--model", str(model), *arguments]) == 0
    out = capsys.readouterr().out
    assert "Plan for 2,176 ranks" in out and "128-2175" in out
    assert len(out.splitlines()) <= 24
    last = [line.split()[0] for line in out.splitlines() if line[0] != " "][-3:]
    assert last == ["Plan", "Step", "Bound"] and "no prediction: a CPU" in out and "in flight" not in out


def test_a_page_is_announced_before_it_is_written(model, tmp_path, capsys):
    path = tmp_path / "page.html"
    assert main(["plan", "--model", str(model), "--module", "language_model:dp=3", "--html", str(path)]) == 0
    printed = capsys.readouterr()
    assert "the page of 4 ranks" in " ".join(printed.err.split()) and "Page written to" in printed.out
    assert "Reading" not in printed.err, "short phases are for terminals"


def test_help_imports_no_torch_and_names_all_that_can_be_given():
    """Settings of `--module` by their long or short names, and the rows of `--compare`."""
    code = (
        "import sys\nfrom hf_mmparallel.cli.main import main\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    out = " ".join(done.stdout.split())
    assert "--module NAME:KEY=VALUE" in out and "vision:dp=2,freeze=tower" in out
    settings = out.partition("settings of `--module`")[2].partition("settings of `--what-if`")[0]
    short = {name: key for key, name in SHORT_NAMES.items()}
    fields = {field.name for field in dataclasses.fields(ModulePlugin)} - {"named"}
    assert {name for name in fields if not re.search(rf"\b{short.get(name, name)}\b", settings)} == set()
    rows = out.partition("compare with six baselines")[2]
    assert all(name in rows for name in (UNAWARE, SINGLE, SHARDED, DISTTRAIN, RATIO, REPLICATED))


def test_env_names_versions_and_settings(run, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "secret")
    out = run("env")
    assert "hf_mmparallel" in out and transformers.__version__ in out and "gloo" in out
    assert "NCCL_DEBUG INFO" in out and "secret" not in out


def test_the_stability_of_a_split_is_printed_where_there_is_one(model, run):
    arguments = ["plan", "--model", model, "--dataset", "synthchartnet", "--global-batch-size", 4, "--explain"]
    split, shared = (
        run(*arguments, "--module", "vision:pp=2", "--module", f"language_model:{own}")
        for own in ("pp=2", "colocate=vision")
    )
    assert "(95% confidence, error 5%)" in split
    assert "the split of 4 GPUs by work" in split and "the split of" not in shared


ONE_RANK = ["--module", "language_model:dp=1,pp=1,tp=1", "--seq-len", 4096, "--global-batch-size", 4]
# A device whose products are slow.
PRODUCTS = "like: h100\nname: products\nbf16_tflops: 10\nfp16_tflops: 10\ntf32_tflops: 5\nfp32_tflops: 1\n"


@pytest.fixture
def described(tmp_path):
    """The options for a device of this description."""

    def write(text: str) -> list:
        path = tmp_path / "gpu.yaml"
        path.write_text(text)
        return ["--gpu-spec", path]

    return write


def test_each_dtype_takes_its_own_time(text_model, figures, described):
    asked = ["plan", "--model", text_model, *ONE_RANK, *described(PRODUCTS + "memory_gb_per_s: 10000\n"), "--dtype"]
    bfloat16, tf32, float32 = (figures(*asked, dtype)["step_ms"] for dtype in ("bfloat16", "tf32", "float32"))
    assert float32 > 2 * tf32 > 3 * bfloat16


def test_a_described_device_is_planned_for(text_model, tmp_path, run, figures, described):
    device = described("like: a40\nname: fast-a40\nbf16_tflops: 300\nfp16_tflops: 300\nmemory_gib: 20.5\n")
    asked, plan = ["plan", "--model", text_model, *ONE_RANK, *device], tmp_path / "plan.yaml"
    assert figures(*asked, "--output", plan)["gpu_type"] == "fast-a40" and "fast-a40" in plan.read_text()
    assert "fits the 18.4 GiB, 90% of the memory of fast-a40" in run(*asked, "--dry-run")
    assert "fast-a40" in run("simulate", plan, "--model", text_model, *device)


def test_a_what_if_may_name_a_device_of_the_table(text_model, figures, described):
    asked = ["--gpus", 2, "--seq-len", 64, "--effort", 1, "--global-batch-size", 4, "--what-if", "gpu_type=h200"]
    found = figures("plan", "--model", text_model, *asked, *described(PRODUCTS + "memory_gb_per_s: 1000\n"))
    other = found["what_if"]["gpu_type=h200"]
    assert (found["gpu_type"], other["gpu_type"]) == ("products", "h200") and other["step_ms"] < found["step_ms"]


def test_a_device_is_named_or_described_in_its_units(text_model, figures, fail, described, capsys):
    asked = ["plan", "--model", text_model, *ONE_RANK]
    found = figures(*asked, "--gpu-type", "NVIDIA A100-PCIE-40GB")  # as drivers report it
    assert found["gpu_type"] == "a100-pcie-40gb"
    assert "`bf16_tflops=989400`" in fail(*asked, *described("like: h100\nbf16_tflops: 989400\n"))
    with pytest.raises(SystemExit):
        fail(*asked, "--gpu-type", "h200", *described("like: h100\n"))
    assert "--gpu-spec: not allowed with argument --gpu-type" in capsys.readouterr().err


def test_it_takes_the_arguments_of_accelerate():
    given = ["--num_processes", "4", "--hang_timeout", "3", "train.py", "--hang_timeout", "7"]
    args = launch_parser().parse_args(given)
    assert (args.num_processes, args.hang_timeout, args.host_timeout, args.stall_timeout) == (4, 3.0, 30.0, None)
    assert (args.training_script, args.training_script_args) == ("train.py", ["--hang_timeout", "7"])


def test_its_help_says_what_it_adds(capsys):
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    said = capsys.readouterr().out
    assert "In addition to `accelerate launch`" in said
    assert "--num_processes" in said and "--host_timeout SECONDS" in said


def test_limits_are_checked(fail):
    assert "--host_timeout must be above 0" in fail("launch", "--host_timeout", "0", "train.py")
