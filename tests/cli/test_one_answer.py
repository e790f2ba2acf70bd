"""One question has one answer: what two commands print of a plan is the same."""

import html
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
import yaml
from datasets import Dataset, load_from_disk
from rich.console import Console
from transformers import AutoModelForImageTextToText

from hf_mmparallel.cost.stage_memory import GIB, gib_text
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.adapter import add_adapters
from hf_mmparallel.modeling.loading import build_on_meta
from hf_mmparallel.plan import LANGUAGE_MODEL, ParallelPlan
from hf_mmparallel.planning.simulations import AS_FAST
from hf_mmparallel.planning.text import frozen_text, ms_text
from hf_mmparallel.trainer import auto, start_report
from tests import tiny
from tests.distributed import run_distributed
from tests.trainer import runs

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 2}
REQUEST = ["--global-batch-size", 12, "--gpu-type", "a100", "--num-samples", 200, "--seed", 3]
LABELS = ("Predicted step", "Throughput", "Bubble", "Memory", "Allocator", "Bound", "Global batch", "Samples", "Costs")
NOT_ASKED = ("command", "runners_up", "search")
"""Figures that only a search has."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a configuration, large enough for the sizes of samples to count."""
    folder = tmp_path_factory.mktemp("model")
    transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=28, patch_size=14),
        text_config=transformers.LlamaConfig(**SIZES, vocab_size=200, num_key_value_heads=8),
        image_token_index=199,
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def ask(model, tmp_path, run):
    """Runs a command on the model and returns its figures, and the lines of its prediction."""

    def call(*arguments) -> tuple[dict, dict[str, str]]:
        path = tmp_path / "figures.json"
        call.out = out = run(*arguments, "--model", model, "--dataset", "chartqa", "--json", path, "--explain")
        figures = json.loads(path.read_text())
        return {key: value for key, value in figures.items() if key not in NOT_ASKED}, lines_of(out)

    return call


def lines_of(out: str) -> dict[str, str]:
    """Label -> text of a report without line breaks."""
    parts = re.split(rf" ({'|'.join((*LABELS, 'Groups', 'Boundaries', 'Figures', 'Plan', 'Step'))}) ", out)
    return {label: text for label, text in zip(parts[1::2], parts[2::2], strict=True) if label in LABELS}


def test_a_simulated_plan_has_the_step_that_it_was_planned_with(tmp_path, ask):
    path = tmp_path / "plan.json"
    layout = ["--module", "language_model:dp=2", "--microbatch-size", 3, "--freeze", "vision=tower"]
    figures, lines = ask("plan", *layout, *REQUEST, "--output", path)
    assert "in 3 batches" in lines["Predicted step"] and set(lines) == set(LABELS)
    for again in (["simulate", path], ["plan", "--parallel", path]):
        assert ask(*again) == (figures, lines)


def test_the_files_of_a_plan_that_was_searched_say_what_is_printed(tmp_path, ask):
    """The page, the comments of the plan, the figures, and the table of `--explain`."""
    page, plan = tmp_path / "page.html", tmp_path / "plan.yaml"
    layout = ["--gpus", 2, "--effort", 1, "--module", "language_model:tp=1,checkpointing=false"]
    figures, lines = ask("plan", *layout, *REQUEST, "--html", page, "--output", plan)
    explained = json.loads((tmp_path / "figures.json").read_text())["runners_up"]
    printed = ask.out.split("Next best plans")[1]
    assert f"│ {ms_text(figures['step_ms'])} │ │" in printed, "the first row is the plan itself"
    assert explained
    for other in explained:
        slower = other["step_ms"] / figures["step_ms"] - 1
        told = "as fast" if abs(slower) < AS_FAST - 1 else f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
        assert f"│ {ms_text(other['step_ms'])} │ {told} │" in printed
    drawn = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page.read_text())).split())
    notes = " ".join(plan.read_text().replace("# ", " ").split())
    for label, text in lines.items():
        assert text.rstrip(" .") in drawn, label
        assert text.rstrip(" .") in notes or label in ("Global batch", "Costs"), label
    assert lines["Predicted step"].startswith(ms_text(figures["step_ms"]))
    assert f"MFU {figures['flops_utilisation']:.1%}" in lines["Throughput"]
    assert lines["Bubble"].startswith(f"{figures['bubble_fraction']:.1%} of")
    peak, limit = (gib_text(GIB * figures[name]) for name in ("peak_memory_gib", "memory_limit_gib"))
    assert lines["Memory"].startswith(f"{peak} of {limit} GiB") and lines["Bound"] == figures["bound"]
    assert ask("simulate", plan) == (figures, lines)


def test_ranks_that_wait_for_a_larger_replica_are_a_bubble(tmp_path, ask):
    """Fully sharded: each task takes as long as the largest of its replicas, wherever that is told."""
    sharded = "dp=4,zero_stage=3"
    layout = ["--module", f"vision:{sharded}", "--module", f"language_model:{sharded},colocate=vision"]
    files = ["--trace", tmp_path / "step.json", "--html", tmp_path / "page.html"]
    request = ["--microbatch-assignment", "contiguous", "--microbatch-size", 3, *REQUEST]
    figures, lines = ask("plan", *layout, *request, *files)
    bubble = figures["bubble_fraction"]
    assert bubble > 0.02 and lines["Bubble"].startswith(f"{bubble:.1%} of")
    assert f"wait {bubble:.0%} of it on average, {bubble:.0%} within tasks" in figures["bound"]
    drawn = [event for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"] if event["ph"] == "X"]
    tasks = [event for event in drawn if event["cat"].endswith(("fwd", "bwd"))]
    length = max(event["ts"] + event["dur"] for event in tasks)
    assert 1 - sum(event["dur"] for event in tasks) / (4 * length) == pytest.approx(bubble, rel=0.02)
    assert f"{bubble:.1%} of the ranks" in (tmp_path / "page.html").read_text()


@pytest.mark.deep
def test_what_is_given_comes_before_what_a_plan_was_made_for(tmp_path, ask, fail):
    path = tmp_path / "plan.yaml"
    (tmp_path / "gpu.yaml").write_text("like: a100\nmemory_gib: 30\n")
    layout = ["--module", "language_model:dp=2,checkpointing=true"]
    described = [*REQUEST[:2], "--gpu-spec", tmp_path / "gpu.yaml", "--packing", "--memory-limit-gib", 20]
    figures, _ = ask("plan", *layout, *described, "--output", path)
    assert figures["gpu_type"] == "gpu" and ask("simulate", path)[0] == figures
    h100, _ = ask("simulate", path, "--gpu-type", "h100", "--global-batch-size", 24, "--microbatch-size", 4)
    same = [*described[:1], 24, "--gpu-type", "h100", *described[4:], "--microbatch-size", 4]
    assert h100["gpu_type"] == "h100" and h100["global_batch_size"] == 24
    assert h100["step_ms"] == ask("plan", *layout, *same)[0]["step_ms"]
    data = yaml.safe_load(path.read_text())
    assert data["planned_for"]["memory_limit_gib"] == 20 and data["planned_for"]["packing"] is True
    for key, value, message in (
        ("gpu_tpye", "h100", "Did you mean `gpu_type`?"),
        ("microbatch_size", 0, "`microbatch_size` of `planned_for` is `0`; it must be a whole number of at least 1"),
        ("packing", "yes", "must be `true` or `false`"),
        ("memory_limit_gib", -1, "must be a number above 0"),
    ):
        path.write_text(yaml.safe_dump({**data, "planned_for": {**data["planned_for"], key: value}}))
        assert message in fail("simulate", path)
    ParallelPlan.from_dict(data["plan"]).save(path)  # which says nothing but its microbatches
    found, _ = ask("simulate", path)
    assert found["num_microbatches"] == figures["num_microbatches"] and found["gpu_type"] == "h100"


def test_all_that_gets_no_gradient_is_named(model, ask):
    """Whoever froze it: an option, or a script that passes a model with adapters."""
    for layout, named in ((["--module", "vision:freeze=tower"], "vision (tower)"), ([], "nothing")):
        _, lines = ask("plan", *layout)
        assert lines["Costs"].partition("frozen: ")[2] == named
    loaded = build_on_meta(str(model))
    spec = build_model_spec(loaded)
    vision = spec.modules["vision"].with_frozen(True)
    assert frozen_text(replace(spec, modules={**spec.modules, "vision": vision})) == "vision"
    add_adapters(loaded, spec, {LANGUAGE_MODEL: {"peft_type": "LORA", "target_modules": ["q_proj"]}})
    spec = build_model_spec(loaded)
    total = sum(p.numel() for p in loaded.model.language_model.parameters()) + loaded.lm_head.weight.numel()
    trained = 2 * 2 * 8 * 1024  # two layers, two matrices, of rank 8
    assert frozen_text(spec) == f"language_model ({total - trained:,} of {total:,} parameters)"


def trainer_reports(folder: str) -> dict[str, str]:
    """On this rank: what `parallel="auto"` prints, and a Trainer with the file that it writes and another seed."""
    printed, output = {}, Path(folder) / "auto"
    data = load_from_disk(str(Path(folder) / "data")).with_format("torch")
    arguments: dict[str, Any] = {"global_batch_size": 8, "gpu_spec": str(Path(folder) / "gpu.yaml")}
    for name, parallel in (("auto", "auto"), ("file", str(output / "plan.yaml"))):
        console = Console(file=io.StringIO(), width=400)
        model = AutoModelForImageTextToText.from_pretrained(Path(folder) / "model")
        stderr = {"stderr_console": lambda console=console: console}
        with mock.patch.multiple(auto, **stderr), mock.patch.multiple(start_report, **stderr):
            trainer = runs.make_trainer("llava", parallel, str(output), data=data, model=model, **arguments)
        arguments |= {"per_device_train_batch_size": trainer.args.per_device_train_batch_size, "seed": 11}
        printed[name] = " ".join(console.file.getvalue().split())
        dist.barrier()  # the first rank writes the file
    return printed


@pytest.mark.distributed
def test_the_trainer_reports_the_step_that_the_commands_predict(tmp_path, run):
    """On ranks described as GPUs: one prediction in the report of the search, that of the plan, and of its file."""
    (tmp_path / "gpu.yaml").write_text("like: h100\n")
    tiny.FAMILIES["llava"]().save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    lengths = [8 + 24 * (index % 5) for index in range(40)]
    ids = [[5] * length + [tiny.MEDIA_TOKEN] * 4 for length in lengths]
    images = torch.randn(len(ids), 1, 3, 16, 16, generator=generator).tolist()
    rows = {"input_ids": ids, "labels": ids, "attention_mask": [[1] * len(own) for own in ids]}
    Dataset.from_dict({**rows, "pixel_values": images}).save_to_disk(str(tmp_path / "data"))
    printed, *_ = run_distributed(trainer_reports, 2, str(tmp_path), timeout=120)
    found, plan = printed["auto"], tmp_path / "auto" / "plan.yaml"
    lines = lines_of(found)
    step_ms = lines["Predicted step"].split(" ms")[0]
    asked = ["--model", tmp_path / "model", "--dataset", tmp_path / "data", "--gpu-spec", tmp_path / "gpu.yaml"]
    simulated = lines_of(run("simulate", plan, *asked, "--explain"))
    for label in ("Predicted step", "Throughput", "Memory", "Bound"):
        assert simulated[label].startswith(lines[label].partition(" Next best")[0]), label
    for report in printed.values():
        told = float(re.findall(r"a step (?:[\d.,]+ -> )?([\d.,]+) ms", report)[0])
        assert told == pytest.approx(float(step_ms), rel=1e-2), report  # three digits
        assert f"Predicted bubble: {simulated['Bubble'].split()[0]}" in report
