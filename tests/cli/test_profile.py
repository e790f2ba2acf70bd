"""`hf-mmparallel profile`: a table, a file that the other commands read, errors in one line."""

import contextlib
import io
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from rich.console import Console

from hf_mmparallel.cli.main import main
from hf_mmparallel.cli.profile_command import constants_text, links_text, misfits, report
from hf_mmparallel.cost import find_device
from hf_mmparallel.cost.profile import LayerProfile, MeasuredLayer, MeasuredPoint, measured_costs
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.loading import build_on_meta
from hf_mmparallel.planning import device_constants, layer_profile, links
from hf_mmparallel.planning.layer_profile import Chunk
from tests.distributed import run_distributed


@pytest.fixture
def steady(monkeypatch, constants):
    """Every forward takes a thousandth of a millisecond a token and a tenth more, backwards three times that."""

    def point(chunk: Chunk) -> MeasuredPoint:
        ms = 0.1 + 1e-3 * chunk.tokens + 1e-6 * chunk.tokens**2 / chunk.sequences
        saved = chunk.saved_bytes[True], chunk.saved_bytes[False]
        return MeasuredPoint(chunk.tokens, chunk.sequences, ms, 2 * ms, ms, *saved)

    monkeypatch.setattr(Chunk, "point", property(point))
    monkeypatch.setattr(Chunk, "seconds", 0.0)
    monkeypatch.setattr(layer_profile._Part, "time", lambda *_: None)


def test_profile_prints_and_writes_what_plan_reads(model, tmp_path, run, steady):
    path = tmp_path / "profile.json"
    lengths = ["--lengths", "8,16,32,64", "--max-tokens", 32, "--dtype", "float32"]
    out = run("profile", "--model", model, *lengths, "--device", "cpu", "--output", path)
    assert f"{model.name} on" in out and "float32, sdpa attention" in out and f"Profile written to {path}" in out
    assert "vision: ms at tokens of a chunk" in out and "CLIPEncoderLayer 0-3" in out
    assert "LlamaDecoderLayer 0-3 │ 1 │ forward │ 0.108 │ 0.116 │ 0.133 │ 0.133 │ 1 │ 1 │ 0.1 │ 0.0% at" in out
    assert "weight grad" in out and "Does not fit" not in out
    assert "attention reaches 50% of its rate with a dense mask, 90% with `bitfield`. Links:" in out
    assert str(model.parent) not in path.read_text()
    profile = LayerProfile.load(path)
    assert profile.model == model.name and profile.dtype == "float32" and len(profile.layers) == 6
    costs = measured_costs(build_model_spec(build_on_meta(model)), find_device("cpu"), profile)
    layer = costs.layers.layer("language_model", 2, 1)
    assert layer.forward(24, 576) == pytest.approx(0.1 + 24e-3 + 576e-6)
    assert layer.weight_gradient.constant == pytest.approx(0.1)


def test_only_some_modules_and_layouts(model, tmp_path, run, steady):
    path = tmp_path / "profile.json"
    chosen = ["--lengths", 8, "--module", "language_model", "--tp", "1,2", "--max-seconds", 1, "--device", "cpu"]
    out = run("profile", "--model", model / "config.json", *chosen, "--output", path)
    profile = LayerProfile.load(path)
    assert {(layer.module, layer.tp_size) for layer in profile.layers} == {
        ("language_model", 1),
        ("language_model", 2),
    }
    assert profile.model == model.name and "vision" not in out


def test_what_does_not_fit_is_said(capsys):
    found = [MeasuredPoint(n, 1, 1e-3 * n, 1e-3 * n, 1e-3 * n, 8.0 * n, 8.0 * n) for n in (64, 256, 1024)]
    found.append(MeasuredPoint(1024, 4, 9.0, 1.024, 1.024, 8192.0, 8192.0))
    layer = MeasuredLayer("vision", "Block", (0, 1, 2, 5), "0" * 12, 2, tuple(found))
    profile = LayerProfile("tiny", "a device", "float32", None, "sdpa", {}, (layer,), ("`audio`: no inputs",))
    (line,) = misfits(profile)
    assert line.startswith("Does not fit: forward of vision, Block 0-2 5, with tp 2 is off by ")
    report(Console(width=200), profile)
    out = " ".join(capsys.readouterr().out.split())
    assert line in out and "Left out: `audio`: no inputs." in out and "4x256" in out


def _profile_on_two_hosts(arguments: list[str], found: dict[str, float]) -> tuple[int, bool, str]:
    """Profiles on ranks each of which believes to be on a host of its own."""
    rank = dist.get_rank()
    links.socket = SimpleNamespace(gethostname=lambda: f"host{rank}")  # type: ignore[assignment]
    device_constants.measure_constants = lambda *_: found
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(arguments)
    return code, dist.is_initialized(), output.getvalue()


@pytest.mark.distributed
def test_under_torchrun_links_are_measured_and_the_first_rank_writes(model, tmp_path, constants):
    path = tmp_path / "profile.json"
    arguments = ["profile", "--model", str(model), "--lengths", "8", "--module", "vision", "--device", "cpu"]
    ranks = run_distributed(_profile_on_two_hosts, 2, [*arguments, "--output", str(path)], constants)
    assert all(own[:2] == (0, False) for own in ranks)  # layers are measured when no rank waits any more
    out = " ".join(ranks[0][2].split())
    assert "Links: in a node not measured" in out and "; between nodes " in out and ranks[1][2] == ""
    profile = LayerProfile.load(path)
    device = measured_costs(build_model_spec(build_on_meta(model)), find_device("h100"), profile).device
    assert device.node_size == profile.constants["node_size"] == 1
    assert 1e6 * profile.constants["node_message_gb_per_s"] == device.message_bytes_per_ms([0, 1])


def test_constants_are_said():
    shares = {"matmul": 0.76, "attention": 0.31, "memory": 0.8}
    constants = {"launch_us": 4.25, "masked_attention_share": 0.42, "block_attention_share": 1.13}
    assert constants_text(constants | {f"{name}_efficiency": own for name, own in shares.items()}).splitlines()[0] == (
        "Device: a launch takes 4.2 us; shares of the peak: products 76%, attention 31%, element-wise work (of the "
        "memory bandwidth) 80%; attention reaches 42% of its rate with a dense mask, 113% with `bitfield`."
    )
    inside = {"link_gb_per_s": 3.0, "message_gb_per_s": 2.0, "collective_latency_us": 20.0, "link_latency_us": 30.0}
    assert links_text(inside).startswith(
        "Links: in a node 3 GB/s in sums and 2 GB/s in messages, 20.0 us for each step of a sum and 30.0 us for a "
        "message; between nodes not measured, which needs ranks on two nodes"
    )
    assert "in a node not measured, which needs two ranks" in links_text({})
    assert "in a node 9.0 us for a copy; rates are those of the device table" in links_text({"link_latency_us": 9.0})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "./nowhere"], "`--model ./nowhere` does not exist"),
        (["--lengths", "64", "--max-tokens", "32"], "`--max-tokens 32` excludes all lengths"),
        (["--module", "audio"], "no module `audio`. Its modules are ['vision', 'language_model']"),
        (["--device", "cuda"], "torch finds no CUDA device"),
    ],
)
def test_errors_are_one_line(model, tmp_path, capsys, monkeypatch, arguments, complaint):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["profile", "--model", str(model), *arguments, "--output", str(tmp_path / "profile.json")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and complaint in error
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.parametrize("arguments", [["--tp", "1,x"], ["--lengths", "0"], ["--max-seconds", "-1"]])
def test_wrong_numbers_are_refused(capsys, arguments):
    with pytest.raises(SystemExit):
        main(["profile", "--model", "m", "--output", "o", *arguments])
    assert "must be a" in capsys.readouterr().err
