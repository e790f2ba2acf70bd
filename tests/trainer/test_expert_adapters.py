"""LoRA of the experts themselves (`target_parameters`) trains and is saved as with the stock Trainer."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import set_seed

from tests.deep_cases import in_turn
from tests.distributed import run_distributed
from tests.trainer import runs
from tests.trainer.test_experts import AGAIN, SPREAD, of_family
from tests.trainer.test_peft_models import Trained, assert_close, assert_same, stock_run, trained_run

pytestmark = pytest.mark.distributed

LM, FAMILY = "language_model", "Qwen3MoeForCausalLM"
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
        "ep, split backwards, ZeRO-2": {"dp_size": 2, "pp_size": 2, "ep_size": 2, "split_backward": True, "zero_stage": 2},
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


def reference(family: str, folder: Path | None = None) -> Trained:
    trainer, wanted = stock_run(**adapted(family), **STOCK)
    wanted[0].append({"eval_loss": trainer.evaluate()["eval_loss"]})
    if folder is not None:
        trainer.save_model(str(folder))
    return wanted


STOCK = {"family": "llama"}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_layouts_train_and_save_as_the_stock_trainer(world_size: int, tmp_path: Path):
    wanted = reference(FAMILY, tmp_path / "stock")
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
