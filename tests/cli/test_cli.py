"""The command: tables, files, help without torch, and errors in one line."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import transformers

from hf_mmparallel.cli.main import main
from hf_mmparallel.cli.plan import parse_module
from hf_mmparallel.plan import ModulePlugin, ParallelPlan

LAYOUT = ["--module", "vision:dp=2,freeze=tower", "--module", "language_model:pp=2,tp=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A configuration without weights."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=28, patch_size=14),
        text_config=transformers.LlamaConfig(**sizes, vocab_size=200, num_key_value_heads=4),
        image_token_index=199,
    )
    config.save_pretrained(folder)
    return folder


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_plan_prints_and_writes(model, tmp_path, capsys):
    files = [tmp_path / name for name in ("plan.yaml", "schedule.png", "trace.json")]
    arguments = ["plan", "--model", str(model), *LAYOUT, "--gpus", "6", "--global-batch-size", "12"]
    arguments += ["--microbatch-size", "3", "--schedule", "--dry-run"]
    arguments += ["--output", str(files[0]), "--picture", str(files[1]), "--trace", str(files[2])]
    assert main(arguments) == 0
    out = squeezed(capsys.readouterr().out)
    assert "Plan for 6 ranks" in out
    assert "│ vision │ 2/1/1 │ 0 │ 0-3 │ 0-1 │" in out
    assert "│ language_model │ 1/2/2 │ 0 │ 0-1 │ 2-3 │" in out
    assert "12 samples, 4 microbatches of up to 3" in out
    # Two tensor-parallel pairs, one sum over the encoder's copies; each pair talks both ways.
    assert "Process groups: 3 besides the world; channels between ranks: 12" in out
    assert "rank 5 language_model s1 |" in out and "Dry run passed" in out and "fits the 80 GiB of h100" in out
    plan = ParallelPlan.load(files[0])
    assert plan.world_size == 6 and plan.num_microbatches == 4
    assert files[1].read_bytes().startswith(b"\x89PNG")
    events = json.loads(files[2].read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == (2 + 4) * 4 * 2

    shared = ["--module", "language_model:cp=2,tp=2,cp_block=64", "--output", str(tmp_path / "cut.yaml")]
    assert main(["plan", "--model", str(model), *shared]) == 0
    out = squeezed(capsys.readouterr().out)
    assert "dp/pp/cp/tp" in out and "│ language_model │ 1/1/2/2 │" in out
    # Two rows of tensor-parallel ranks, and two columns that share tokens and sum gradients; vision talks to both.
    assert "Process groups: 4 besides the world; channels between ranks: 8" in out
    assert ParallelPlan.load(tmp_path / "cut.yaml").modules["language_model"].context.block == 64

    assert main(["plan", "--model", str(model / "config.json"), "--parallel", str(files[0]), "--gpus", "6"]) == 0
    assert "4 microbatches of up to 1" in squeezed(capsys.readouterr().out)
    assert main(["simulate", str(files[0]), "--picture", str(tmp_path / "again.png")]) == 0
    out = squeezed(capsys.readouterr().out)
    assert "a forward is 1 ms" in out and (tmp_path / "again.png").exists()
    ParallelPlan.save(replace(plan, schedule="eager"), files[0])
    assert main(["simulate", str(files[0]), "--model", str(model), "--gpu-type", "a100"]) == 0
    out = squeezed(capsys.readouterr().out)
    assert "samples/s on a100" in out and "schedule eager" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "7"], "`--gpus 7`: the plan takes 6 ranks"),
        (["--module", "language_model:cp=2", "--gpus", "4"], "language_model: dp 1 x pp 1 x cp 2 x tp 1)"),
        (["--module", "vison:dp=2"], "The model has no `vison`. Did you mean `vision`?"),
        (["--module", "audio"], "must look like `vision:dp=2,tp=2`"),
        (["--module", "vision:dp"], "must look like `vision:dp=2,tp=2`"),
        (["--module", "vision:layers=a/b"], "must be numbers with slashes"),
        (["--module", "vision:tp_sze=2"], "Did you mean `tp_size`?"),
        (["--module", "vision:dp=0"], "`dp_size=0` must be a whole number of at least 1"),
        (["--gpu-type", "h10"], "Did you mean `h100`?"),
    ],
)
def test_errors_are_one_line(model, capsys, arguments, message):
    layout = [] if "--module" in arguments else LAYOUT
    assert main(["plan", "--model", str(model), *layout, *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_missing_files_and_foreign_plans_are_errors(model, tmp_path, capsys):
    for arguments in (
        ["plan", "--model", str(tmp_path / "nothing")],
        ["plan", "--model", str(tmp_path)],
        ["plan", "--model", str(model), "--parallel", str(tmp_path / "plan.yaml")],
        ["plan", "--model", str(model), "--module", "vision:dp=2", "--module", "vision:tp=2"],
        ["simulate", str(tmp_path / "plan.yaml")],
    ):
        assert main(arguments) == 2
        assert capsys.readouterr().err.startswith("error: `")


def test_a_dry_run_fails_when_a_rank_is_too_full(model, capsys):
    arguments = ["plan", "--model", str(model), "--gpu-type", "a40", "--microbatch-size", "64", "--seq-len", "1000000"]
    assert main([*arguments]) == 0
    capsys.readouterr()
    assert main([*arguments, "--dry-run"]) == 2
    assert "Rank 1 (language_model) needs about" in capsys.readouterr().err


def test_module_settings():
    name, plugin = parse_module("vision:dp=2,pp=2,layers=1/3,checkpointing=true,freeze=tower")
    expected = ModulePlugin(
        dp_size=2, pp_size=2, layers_per_stage=[1, 3], activation_checkpointing=True, freeze="tower"
    )
    assert (name, plugin) == ("vision", expected)
    assert parse_module("audio:colocate=vision,freeze=true")[1] == ModulePlugin(colocate_with="vision", freeze=True)


def test_thousands_of_ranks_fit_a_screen(model, capsys):
    arguments = ["--module", "vision:dp=128", "--module", "language_model:dp=512,pp=4,tp=2", "--gpu-type", "cpu"]
    assert main(["plan", "--model", str(model), *arguments, "--schedule"]) == 0
    out = capsys.readouterr().out
    assert "Plan for 4,224 ranks" in out and "(1024 ranks)" in out
    assert len(out.splitlines()) < 40


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom hf_mmparallel.cli.main import main\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--module NAME:KEY=VALUE" in done.stdout and "vision:dp=2,freeze=tower" in done.stdout


def test_env_names_versions(capsys):
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "hf_mmparallel" in out and transformers.__version__ in out and "gloo" in out
