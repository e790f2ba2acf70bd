"""`plan --gpus`: the best plan is found, explained, compared, asked what if, and written."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from hf_mmparallel.cli.main import main
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.loading import build_on_meta
from hf_mmparallel.plan import LANGUAGE_MODEL, MultimodalParallelPlugin, plan_for_model
from hf_mmparallel.plan.methods import ARRANGEMENT_CANDIDATES
from hf_mmparallel.planning.simulations import AS_FAST
from tests.cost.test_profile import profile_of

GENERATOR = "image:layers=4,hidden=64,heads=4,intermediate=128,tokens=256"
SHORT = ["--seq-len", 64, "--image-tokens", 32, "--effort", 1, "--global-batch-size", 8]
FILES = {"output": "plan.yaml", "html": "page.html", "json": "figures.json", "picture": "step.png"}


class Found(NamedTuple):
    """What one command prints and writes that asks for everything."""

    out: str
    folder: Path

    @property
    def figures(self) -> dict:
        return json.loads(self.read("json"))

    @property
    def plugin(self) -> MultimodalParallelPlugin:
        return MultimodalParallelPlugin.from_any(self.folder / FILES["output"])

    def read(self, name: str) -> str:
        return (self.folder / FILES[name]).read_text()


@pytest.fixture(scope="module")
def found(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("everything")
    files = [flag for name in FILES for flag in (f"--{name}", str(folder / FILES[name]))]
    asked = ["--explain", "--compare", "--what-if", "gpus=1,frozen=vision", "--freeze", "vision=tower"]
    sizes = ["--gpus", "2", *map(str, SHORT), "--dataset", "chartqa"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["plan", "--model", str(model), *sizes, *asked, *files]) == 0
    return Found(" ".join(out.getvalue().split()), folder)


def test_figures(found):
    data = found.figures
    assert data["num_ranks"] == 2 and data["global_batch_size"] == 8 and data["gpu_type"] == "h100"
    assert data["step_ms"] == pytest.approx(8e3 / data["samples_per_second"])
    assert all(data["step_ms"] <= AS_FAST * other["step_ms"] and other["reason"] for other in data["runners_up"])
    assert data["search"]["num_candidates"] >= data["search"]["num_simulated"] > 1
    assert len(data["memory_gib"]) == 2 and max(data["memory_gib"]) == pytest.approx(data["peak_memory_gib"])
    assert 0 < data["flops_utilisation"] < 1 and 0 <= data["bubble_fraction"] < 1
    assert data["microbatch_assignment"] in ARRANGEMENT_CANDIDATES and "4,096 samples" in data["samples"]
    plan = MultimodalParallelPlugin.from_any(data["plan"]).plan
    assert plan == found.plugin.plan and plan is not None and plan.world_size == 2
    names = [own["name"] for own in data["comparison"]]
    others = ["frozen-unaware", "single layout", "FSDP-like", "DistTrain", "ratio-based", "encoders replicated"]
    assert names == others
    change = data["what_if"]["gpus=1,frozen=vision"]
    assert change["num_ranks"] == 1 and change["global_batch_size"] == 8


def test_what_is_printed(found):
    data, out = found.figures, found.out
    assert f"MFU {data['flops_utilisation']:.1%}" in out and data["bound"] in out
    assert "mean tokens: vision 5 (5 to 5)" in out  # four patches of 28 x 28 pixels and a class token
    assert "Plan for 2 ranks" in out and "│ vision │" in out and "0-9: forward" in out
    assert "Next best plans" in out and ("% slower │" in out or "as fast │" in out) and "Not simulated" in out
    assert "What if" in out and f"{data['what_if']['gpus=1,frozen=vision']['tokens_per_second']:,.0f}" in out
    assert "Beside other methods" in out and "DistTrain" in out
    assert "frozen-unaware" in out and "nothing is frozen" not in out
    assert "without the optimizer's step, bubble" in out
    assert "the split of" not in out  # two ranks for two modules, or shared by them: there is nothing to split


def test_without_frozen_parameters_only_the_order_of_samples_is_left(model, run, tmp_path):
    """What ignores freezing then has our costs, and is not called by that."""
    files = ["--json", tmp_path / "figures.json", "--html", tmp_path / "page.html"]
    fixed = ["--module", "language_model:tp=1,checkpointing=false"]
    out = run("plan", "--model", model, "--gpus", 2, *fixed, *SHORT, "--compare", "--explain", *files)
    assert "│ sampler's order │" in out and "nothing is frozen: our search and costs" in out and "unaware" not in out
    assert json.loads((tmp_path / "figures.json").read_text())["comparison"][0]["name"] == "frozen-unaware"
    assert "frozen-unaware" not in (tmp_path / "page.html").read_text()


def test_published_sizes_need_one_encoder_of_images(text_model, fail):
    error = fail("plan", "--model", text_model, "--gpus", 2, "--dataset", "chartqa")
    assert "has sizes of images and text; the model has `language_model`" in error


def test_the_page(found):
    page = found.read("html")
    parts = ("Runners-up", "what if gpus=1,frozen=vision", "DistTrain", "before, contiguous", "--gpus 2", "<svg")
    assert [part for part in parts if part not in page] == []
    assert (found.folder / FILES["picture"]).read_bytes().startswith(b"\x89PNG")


def test_the_plan_can_be_edited_and_trained(found, model, run):
    text = found.read("output")
    plan = found.plugin.plan
    assert plan is not None and found.plugin.modules["vision"].freeze == "tower"
    stages = sum(len(stages) for module in plan.modules.values() for stages in module.replicas)
    assert sum("layers: [" in line and "trainable:" in line for line in text.splitlines()) == stages
    assert max(map(len, text.splitlines())) < 120
    assert f"global_batch_size=8, per_device_train_batch_size={found.figures['microbatch_size']}" in text
    # As the Trainer resolves it, which freezes first.
    spec = build_model_spec(build_on_meta(str(model)))
    spec = replace(spec, modules={**spec.modules, "vision": spec.modules["vision"].with_frozen("tower")})
    assert plan_for_model(found.plugin, spec, 2) == plan


def test_a_search_leaves_nothing_to_choose(text_model, run, tmp_path):
    out = run("plan", "--model", text_model, "--gpus", 2, *SHORT[:-2], "--json", tmp_path / "figures.json")
    assert list(json.loads((tmp_path / "figures.json").read_text())["layouts"]) == ["language_model"]
    assert "8 samples" in out and "`--global-batch-size` sets it" in out and "% slower: " not in out
    assert "`--dataset` plans for samples that differ" in out


def test_some_sizes_can_be_fixed(model, figures, fail):
    found = figures("plan", "--model", model, "--gpus", 3, "--module", "language_model:tp=2", *SHORT)
    assert found["layouts"]["language_model"].endswith("tp 2") and found["num_ranks"] == 3
    modules = ["--module", "vision:tp=2,checkpointing=true", "--module", "language_model:dp=1,tp=1"]
    found = figures("plan", "--model", model, "--gpus", 4, *modules, *SHORT)
    data = found["plan"]["plan"]["modules"]
    assert data["vision"]["activation_checkpointing"] and len(data["language_model"]["replicas"]) == 1
    error = fail("plan", "--model", model, "--gpus", 3, "--module", "vision:dp=2", "--module", "language_model:tp=4")
    assert "language_model tp_size=4" in error


def test_too_little_memory_says_how_much_and_what_helps(text_model, fail):
    error = fail("plan", "--model", text_model, "--gpus", 2, *SHORT, "--memory-limit-gib", "0.0001")
    assert "fits" in error and "GiB more than the 0.0001 GiB" in error and error.rstrip().endswith(".")


def test_what_if_refuses_what_it_does_not_know(model, fail):
    arguments = ["plan", "--model", model, "--gpus", 2, *SHORT]
    for change, message in (
        ("gpu=3", "Did you mean `gpus`?"),
        ("gpus", "must look like `frozen=vision,gpus=128`"),
        ("gpus=many", "whole number of at least 1"),
        ("schedule=2f2b", "not one of 1f1b, gpipe, eager"),
        ("frozen=audio", "The model has no `audio`"),
        ("gpu_type=v100", "may be any of `v100-pcie-16gb`"),
    ):
        assert message in fail(*arguments, "--what-if", change)


def test_what_if_keeps_sizes_that_are_given(model, figures):
    layout = ["--module", "vision:dp=1", "--module", "language_model:pp=2"]
    changes = ["--what-if", "frozen=vision", "--what-if", "seq_len=128"]
    found = figures("plan", "--model", model, *layout, *SHORT, *changes)
    frozen, longer = found["what_if"].values()
    assert frozen["step_ms"] < found["step_ms"] < longer["step_ms"]
    assert frozen["layouts"] == found["layouts"] == longer["layouts"]


def test_generators_are_planned_but_not_trained(model, tmp_path, run, figures, fail):
    path, picture = tmp_path / "plan.yaml", tmp_path / "schedule.png"
    one = "dp=1,tp=1,checkpointing=false"
    sizes = ["--module", f"vision:{one}", "--module", f"language_model:{one}", "--microbatch-size", 1]
    arguments = ["plan", "--model", model, "--gpus", 3, "--generator", GENERATOR, *sizes, *SHORT]
    found = figures(*arguments, "--output", path, "--picture", picture)
    assert list(found["layouts"]) == ["vision", "language_model", "image"] and found["num_ranks"] == 3
    assert picture.read_bytes().startswith(b"\x89PNG") and "No Trainer runs it" in path.read_text()
    assert "image" in run("simulate", path, "--model", model, "--generator", GENERATOR)
    # What a Trainer says, which has no generators.
    assert "The model has no `image`" in fail("plan", "--model", model, "--parallel", path)
    for text, message in (
        ("image:layers=4", "lacks `hidden`"),
        (GENERATOR.replace("heads=4", "heads=5"), "`heads=5` does not divide `hidden=64`"),
        (GENERATOR.replace("layers=4", "layers=0"), "whole number of at least 1"),
        (GENERATOR.replace("image", "vision"), "the model has a module of this name"),
        (GENERATOR.replace("heads", "head"), "Did you mean `heads`?"),
    ):
        assert message in fail("plan", "--model", model, "--gpus", 3, "--generator", text)


def test_measured_costs(model, text_model, tmp_path, run, fail):
    path = tmp_path / "profile.json"
    spec = build_model_spec(build_on_meta(str(text_model)))
    measured = profile_of(spec, {(LANGUAGE_MODEL, index): 1.0 for index in range(-1, 5)})
    replace(measured, dtype="float32").save(path)
    arguments = ["plan", "--model", text_model, "--gpus", 2, *SHORT, "--gpu-type", "cpu", "--profile", path]
    out = run(*arguments)
    assert "Costs measured on a device" in out and "in float32; links and memory of cpu" in out
    assert "were measured on one device" in fail(*arguments, "--what-if", "gpu_type=h100")
    assert "another model" in fail("plan", "--model", model, "--gpus", 2, "--profile", path)
    assert "does not exist" in fail("plan", "--model", model, "--gpus", 2, "--profile", tmp_path / "nothing.json")


def test_what_is_left_to_the_allocator_has_a_line(found, run, text_model):
    """One allowance, of which nothing is taken off twice: what must fit is the rest of the device."""
    assert "Allocator 10% of the device, 7.91 of 79.1 GiB, are left to the caching allocator's rounding" in found.out
    assert "of 71.2 GiB on the fullest rank" in found.out
    plan = ("plan", "--model", text_model, "--gpus", 1, *SHORT[:2], "--effort", 1, "--global-batch-size", 2)
    limited = run(*plan, "--memory-limit-gib", 4, "--explain")
    assert "of 4 GiB on the fullest rank" in limited and "Allocator nothing reserved: the limit is for" in limited
    assert "Allocator" not in run(*plan, "--gpu-type", "cpu", "--explain")
