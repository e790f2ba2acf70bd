"""Mixtures of experts with a vision tower in layouts equal the stock Trainer: each class in each way to lay it out."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.deep_cases import in_turn
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "ernie4_5_vl_moe", "kimi_k25", "aria")
AGAIN = {"activation_checkpointing": True}
WAYS: tuple[dict[str, Any], ...] = (  # of the language model on two ranks
    {"pp_size": 2},
    {"tp_size": 2},
    {"cp_size": 2, "cp_block": 8},
    {"dp_size": 2, "zero_stage": 3},
    {"dp_size": 2, "ep_size": 2},
    {"tp_size": 2, "ep_size": 2},
)
TOWERS: tuple[dict[str, Any], ...] = ({"dp_size": 2, "zero_stage": 3}, {"tp_size": 2, **AGAIN}, {"cp_size": 2})
LORA = {"peft_config": {"r": 2, "target_modules": ["q_proj", "o_proj"], "init_lora_weights": False}}
ALONE = {VISION: {}, LM: {"colocate_with": VISION, **LORA}}


def case(family: int, way: int, **more: Any) -> runs.Layout:
    """A layout in which what else can vary does: rows, recomputation, the tower, a router that is frozen."""
    turn = family + way
    model = {**WAYS[way], **(AGAIN if turn % 3 == 0 else {}), **more}
    if turn % 4 == 1 and not more:
        model["freeze"] = r"\.(gate|router)\."
    layout = {VISION: {**TOWERS[turn % 3], "colocate_with": LM}, LM: model}
    packing = turn % 2 == 0 or "cp_size" in model
    words = functools.partial(runs.shrunk, FAMILIES[family], max_steps=2, warmup_steps=0)
    return runs.Layout(FAMILIES[family], layout, words, {"packing": packing}, alone=ALONE if more else None)


def test_layouts_equal_the_stock_trainer():
    every = {f"{name}, {WAYS[way]}": case(i, way) for i, name in enumerate(FAMILIES) for way in range(len(WAYS))}
    runs.assert_layouts_equal_the_stock_trainer(2, in_turn(every, f"glm4v_moe, {WAYS[4]}"))


@pytest.mark.deep
def test_adapters_train_alike_in_stages_and_on_one_process():
    runs.assert_layouts_equal_the_stock_trainer(2, {FAMILIES[i]: case(i, 0, **LORA) for i in range(4)})


def on_from_the_second_step(folder: Path) -> list[runs.Run]:
    """A run with a learning rate for the tower, and one that goes on in another layout from its checkpoint."""
    saved = {"max_steps": 4, "warmup_steps": 0, "optim": "adamw_torch", "adam_epsilon": 1e-4}
    tower = {"learning_rate": 3e-3, "weight_decay": 0.2, "colocate_with": LM}
    source = {VISION: {"dp_size": 4, **tower}, LM: {"dp_size": 2, "pp_size": 2, "zero_stage": 1}}
    target = {VISION: {"cp_size": 4, **tower}, LM: {"cp_size": 2, "dp_size": 2, "ep_size": 4, "cp_block": 8}}
    runs_of = functools.partial(runs.saving_run, "qwen3_5_moe")
    straight = runs_of(folder / "a", source, **runs.shrunk("qwen3_5_moe", **saved))
    checkpoint = folder / "a" / "checkpoint-2"
    return [straight, runs_of(folder / "b", target, checkpoint, **runs.shrunk("qwen3_5_moe", **saved))]


@pytest.mark.deep
def test_learning_rates_of_modules_go_on_in_another_layout(tmp_path: Path):
    straight, moved = run_distributed(on_from_the_second_step, 4, tmp_path, timeout=280)[0]
    runs.assert_same_run(moved, straight, rtol=1e-4, atol=2e-5)
