"""LoRA of the experts themselves (`target_parameters`) trains and is saved as with the stock Trainer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import set_seed

from tests.deep_cases import in_turn
from tests.distributed import run_distributed
from tests.trainer import runs
from tests.trainer.test_experts import AGAIN, SPREAD, of_family
from tests.trainer.test_peft_models import Trained, assert_close, assert_same, stock_run, trained, trained_run

pytestmark = pytest.mark.distributed

LM, FAMILY = "language_model", "qwen3_moe"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
# both factors have gradients from the first step on
LORA: dict[str, Any] = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "init_lora_weights": False}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "replicas": {"dp_size": 2},
        "stages, recomputed": {"pp_size": 2, **AGAIN},
        "tp": {"tp_size": 2},
        "cp": {"cp_size": 2, "cp_block": 8},
        "ZeRO-3": {"dp_size": 2, "zero_stage": 3},
        "ep over replicas": SPREAD,
        "ep within a tp group": {"tp_size": 2, "ep_size": 2},
        "ep over cp ranks, recomputed": {"cp_size": 2, "ep_size": 2, "cp_block": 8, **AGAIN},
    },
    4: {
        "ep over tp and replicas": {"dp_size": 2, "tp_size": 2, "ep_size": 4},
        "ep over pairs of replicas, ZeRO-3": {"dp_size": 4, "ep_size": 2, "zero_stage": 3},
        "ep, split backwards, ZeRO-2": {
            "dp_size": 2,
            "pp_size": 2,
            "ep_size": 2,
            "split_backward": True,
            "zero_stage": 2,
        },
    },
}
CORE = {2: ("tp", "ep over replicas"), 4: ("ep over pairs of replicas, ZeRO-3",)}


def adapted(family: str = FAMILY, parameters: list[str] = EXPERTS, **settings: Any) -> dict[str, Any]:
    """A model with adapters of experts and of layers, and its samples."""
    arguments = of_family(family)
    set_seed(7)
    config = LoraConfig(**{**LORA, "target_parameters": parameters, **settings})
    return {**arguments, "model": get_peft_model(arguments["model"], config)}


def train(family: str, layouts: dict[str, dict[str, Any]], folder: Path | None = None) -> dict[str, Trained]:
    result = {}
    for name, layout in layouts.items():
        trainer = runs.make_trainer("llama", {LM: layout}, **adapted(family))
        result[name] = trained_run(trainer)
        result[name][0].append({"eval_loss": trainer.evaluate()["eval_loss"]})
        if folder is not None:
            trainer.save_model(str(folder / name))
    return result


def reference(family: str = FAMILY, folder: Path | None = None) -> Trained:
    trainer, wanted = stock_run(family="llama", **adapted(family))
    wanted[0].append({"eval_loss": trainer.evaluate()["eval_loss"]})
    if folder is not None:
        trainer.save_model(str(folder))
    return wanted


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_layouts_train_and_save_as_the_stock_trainer(world_size: int, tmp_path: Path):
    wanted = reference(folder=tmp_path / "stock")
    layouts = in_turn(LAYOUTS[world_size], *CORE[world_size])
    for name, run in run_distributed(train, world_size, FAMILY, layouts, tmp_path, timeout=250)[0].items():
        assert_same(run, wanted)
        assert_close(*(load_file(tmp_path / own / "adapter_model.safetensors") for own in (name, "stock")))
        config, expected = (
            json.loads((tmp_path / own / "adapter_config.json").read_text()) for own in (name, "stock")
        )
        assert set(config["target_parameters"]) == set(expected["target_parameters"])
        again = PeftModel.from_pretrained(of_family(FAMILY)["model"], tmp_path / name)
        assert_close({k.replace(".default", ""): v for k, v in again.state_dict().items() if "lora_" in k}, run[1])


# weights with the inputs before the outputs, and experts that take blocks of rows
@pytest.mark.deep
@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "deepseek_v3"])
def test_families_train_as_the_stock_trainer(family: str):
    names = ("tp", "ep over replicas", "ep within a tp group")
    layouts = {name: LAYOUTS[2][name] for name in names}
    wanted = reference(family)
    for run in run_distributed(train, 2, family, layouts, timeout=250)[0].values():
        assert_same(run, wanted)


# Checkpoints

SAVED = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}
OTHERS = {
    "tp": {"tp_size": 2},
    "ep, ZeRO-1": {**SPREAD, "zero_stage": 1},
    "stages": {"pp_size": 2},
}


def save_and_resume(folder: Path, others: dict[str, dict[str, Any]]) -> list[Trained]:
    """A run with shared experts, and others that go on from the middle of it."""

    def run(name: str, layout: dict[str, Any], checkpoint: str | None = None) -> Trained:
        saving = {"save_strategy": "steps", "save_steps": 2, **SAVED}
        trainer = runs.make_trainer("llama", {LM: layout}, str(folder / name), **{**adapted(), **saving})
        return trained_run(trainer, checkpoint)

    first = run("first", SPREAD)
    return [first, *(run(name, layout, f"{folder}/first/checkpoint-2") for name, layout in others.items())]


def test_runs_go_on_under_other_layouts(tmp_path: Path):
    _, wanted = stock_run(family="llama", **{**adapted(), **SAVED})
    for logs, weights in run_distributed(save_and_resume, 2, tmp_path, in_turn(OTHERS, "tp"), timeout=200)[0]:
        assert logs == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in wanted[0]]
        assert_close(weights, wanted[1], rtol=1e-3)


# Narrow weights with float32 adapters, and adapters that a plan asks for


def narrow(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """A model in bfloat16, whose adapters `peft` keeps in float32, or the same weights in another dtype."""
    arguments = of_family(FAMILY)
    set_seed(7)
    model = get_peft_model(arguments["model"].bfloat16(), LoraConfig(**LORA, target_parameters=EXPERTS))
    return {
        **arguments,
        "model": model.to(dtype) if dtype != torch.bfloat16 else model,
        "bf16": dtype == torch.bfloat16,
        "optim": "adamw_torch",
        "learning_rate": 1e-4,
        "warmup_steps": 0,
    }


def train_narrow(layouts: dict[str, dict[str, Any]]) -> dict[str, Trained]:
    return {name: trained_run(runs.make_trainer("llama", {LM: own}, **narrow())) for name, own in layouts.items()}


@pytest.mark.deep
def test_adapters_of_narrow_experts_are_float32():
    start = trained(narrow()["model"])
    _, (logs, wanted) = stock_run(family="llama", **narrow())
    layouts = {name: LAYOUTS[2][name] for name in ("replicas", "ep over replicas")}
    _, (exact, _) = stock_run(family="llama", **narrow(torch.float32))
    for got_logs, got in run_distributed(train_narrow, 2, layouts, timeout=200)[0].values():
        for own, row, true in zip(got_logs, logs, exact, strict=True):  # ours may round less than the stock Trainer
            assert all(abs(own[k] - row[k]) <= max(5e-3 * abs(row[k]), 0.5 * abs(true[k] - row[k])) for k in row)
        for name, value in wanted.items():
            assert got[name].dtype == value.dtype == torch.float32
            # microbatches of half precision round otherwise than the batch
            assert (got[name] - value).norm() < 0.2 * (value - start[name]).norm(), name


def train_planned(layouts: list[dict[str, Any]], folder: str | None = None) -> list[Trained]:
    """Runs with adapters that a plan asks for, of a model or from a folder, where each rank makes its own."""
    config = {"r": 2, "lora_alpha": 8, "target_parameters": EXPERTS, "rank_pattern": {"experts.down_proj": 3}}
    result = []
    for layout in layouts:
        arguments = {**of_family(FAMILY), **({"model": folder} if folder else {})}
        trainer = runs.make_trainer("llama", {LM: {**layout, "peft_config": config}}, **arguments)
        result.append(trained_run(trainer))
    return result


@pytest.mark.deep
def test_a_plan_may_ask_for_adapters_of_experts(tmp_path: Path):
    of_family(FAMILY)["model"].save_pretrained(tmp_path)
    alone = run_distributed(train_planned, 1, [{"pp_size": 1}])[0][0]
    ranks = {tuple(value.shape) for name, value in alone[1].items() if "lora_A" in name and ".experts." in name}
    assert ranks == {(4 * 2, 64), (4 * 3, 32)}
    names = ("stages, recomputed", "ep over replicas", "ep within a tp group")
    layouts = [LAYOUTS[2][name] for name in names]
    for run in run_distributed(train_planned, 2, layouts, timeout=200)[0]:
        assert_same(run, alone)
    first, *others = run_distributed(train_planned, 2, layouts, str(tmp_path), timeout=200)[0]
    for run in others:
        assert_same(run, first)
