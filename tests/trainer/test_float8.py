"""Products in float8 give in any layout what the stock Trainer gives with layers that `torchao` has converted."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from hf_mmparallel.modeling.float8 import check_float8, use_float8
from hf_mmparallel.modeling.spec import layers_of
from hf_mmparallel.plan import ModulePlan, ParallelPlan, Stage, StorageSettings
from tests import tiny
from tests.deep_cases import in_turn
from tests.distributed import run_distributed

from . import runs

VISION, LM = "vision", "language_model"
EXACT = "rowwise_with_gw_hp"  # scales of single tokens and of whole weights: no other than those of one process
STACKS = ("model.vision_tower.encoder.layers", "model.language_model.layers")


def adapted() -> Any:
    """A model with adapters in both modules."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return get_peft_model(tiny.FAMILIES["llava"](), LoraConfig(r=4, target_modules=["q_proj", "o_proj", "fc1"]))


def converted(model: Any, recipe: str) -> Any:
    """A model with the linear layers of `torchao` in its layers."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for stack in STACKS:
        convert_to_float8_training(
            layers_of(base, stack), config=config, module_filter_fn=lambda layer, name: ".lora_" not in name
        )
    return model


def arguments() -> dict[str, Any]:
    """
    Arguments of both Trainers, with four targets a sample: the stock Trainer divides the loss by the number of all,
    ours the gradients, and a power of two changes no rounded value.
    """
    data = tiny.make_dataset("llava", runs.SAMPLES)
    for sample in data:
        labels = torch.as_tensor(sample["labels"])
        sample["labels"] = torch.where(torch.arange(len(labels)) < len(labels) - 4, -100, labels)
    return {"max_steps": 2, "warmup_steps": 0, "data": data}


def both(recipe: str = EXACT, **sizes: Any) -> dict[str, Any]:
    """Both modules with the same sizes on the same ranks."""
    own = {**sizes, "float8": recipe}
    return {VISION: own, LM: {**own, "colocate_with": VISION}}


CASES = in_turn(
    {
        "stages": both(pp_size=2),
        "ZeRO-3, recomputed": both(dp_size=2, zero_stage=3, activation_checkpointing=True),
        "selective": both(pp_size=2, activation_checkpointing="selective"),
        "cp": {VISION: {"dp_size": 2, "float8": EXACT}, LM: {"cp_size": 2, "colocate_with": VISION, "float8": EXACT}},
        "tp": both(tp_size=2),
        "tp, adapters": both(tp_size=2),
        "zero bubble": {"schedule": "zero_bubble", "modules": both(pp_size=2)},
        "compiled": both(pp_size=2),
        "tensorwise": both("tensorwise", dp_size=2),
        "rowwise": both("rowwise", dp_size=2, zero_stage=1),
    },
    "ZeRO-3, recomputed",
    "tp",
)


def model_of(name: str) -> Any:
    return adapted() if "adapters" in name else tiny.FAMILIES["llava"]()


def train() -> dict[str, runs.Run]:
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    return {
        name: runs.parallel_run(
            "llava", layout, model=model_of(name), **arguments(), **(compiled if name == "compiled" else {})
        )
        for name, layout in CASES.items()
    }


@pytest.mark.distributed
def test_runs_equal_the_stock_trainers_with_layers_of_torchao():
    first = run_distributed(train, 2, timeout=280)[0]
    plain = runs.stock("llava", **arguments())
    for name, run in first.items():
        recipe = name if name in ("tensorwise", "rowwise") else EXACT
        stock = runs.stock("llava", model=converted(model_of(name), recipe), **arguments())
        assert abs(run.logs[0]["grad_norm"] - plain.logs[0]["grad_norm"]) > 1e-3
        if recipe != "tensorwise":
            runs.assert_same_run(run, stock)
        for ours, theirs in zip(run.logs, stock.logs, strict=True):  # one scale for all tokens of a microbatch
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-2)


def test_layers_compile_as_they_are_and_narrow_ones_stay():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 24))
    use_float8(layers, EXACT)
    values = torch.randn(3, 7, 32)
    wide, narrow = layers[0](values), layers[2](layers[1](layers[0](values)))
    assert 0.01 < (wide - nn.functional.linear(values, layers[0].weight, layers[0].bias)).norm() / wide.norm() < 0.1
    plain = nn.functional.linear(layers[1](wide), layers[2].weight, layers[2].bias)
    torch.testing.assert_close(narrow, plain, rtol=0, atol=0)
    torch.testing.assert_close(torch.compile(layers, backend="eager", fullgraph=True)(values), narrow, rtol=0, atol=0)


def test_what_can_not_be_had_is_refused(monkeypatch: pytest.MonkeyPatch):
    module = ModulePlan(((Stage((0, 2), ((0,),)),),), storage=StorageSettings(float8=EXACT))
    plan, device = ParallelPlan({LM: module}), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    check_float8(plan, torch.device("cpu"), torch.float32)
    check_float8(ParallelPlan({LM: replace(module, storage=StorageSettings())}), device, torch.float32)
    with pytest.raises(ValueError, match="A100"):
        check_float8(plan, device, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_float8(plan, device, torch.bfloat16)
    with pytest.raises(ValueError, match="float32"):
        check_float8(plan, device, torch.float32)
