"""Ranks that share the experts of a mixture give the stock Trainer's losses, gradient norms and final weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_mmparallel.modeling.expert_parallel import expert_peaks
from tests import tiny
from tests.deep_cases import in_turn
from tests.distributed import run_distributed

from . import runs
from .moments import AtTheEnd

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "granitemoe", "glm4_moe", "ernie4_5_moe", "llama4_text")


def of_family(name: str, **settings: Any) -> dict[str, Any]:
    """A seeded model and its samples. A batch of one sample is the last: all replicas but one have none."""
    words = runs.shrunk(name, 2 * runs.GLOBAL_BATCH + 1, max_steps=3)
    for name, value in settings.items():
        setattr(words["model"].config, name, value)
        setattr(words["model"], name, value)
    return words


def evaluated(name: str, **config: Any) -> dict[str, Any]:
    return {"evaluate": True, "per_device_eval_batch_size": 2, **of_family(name, **config)}


def check_shares(trainer: Any) -> None:
    """This rank has its share of the experts, and no more; their load is logged."""
    ep_size = trainer.plan.modules[LM].ep_size
    experts = [p for name, p in trainer.model.model.named_parameters() if ".experts." in name and p.numel() > 1]
    assert experts and all(p.shape[0] == 4 and p.to_local().shape[0] == 4 // ep_size for p in experts)

    def check(state: Any) -> None:
        assert state.log_history[0]["parallel/expert_imbalance/language_model"] > 0

    trainer.add_callback(AtTheEnd(check))


def shared(family: str, layout: dict[str, Any]) -> runs.Layout:
    """A layout whose ranks share experts."""
    return runs.Layout("llama", {LM: layout}, partial(evaluated, family), check=check_shares)


AGAIN = {"activation_checkpointing": True}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "within a tp group": {"tp_size": 2, "ep_size": 2},
        "over replicas": {"dp_size": 2, "ep_size": 2},
        "over cp ranks, recomputed": {"cp_size": 2, "ep_size": 2, "cp_block": 8, **AGAIN},
    },
    4: {
        "over tp and replicas": {"dp_size": 2, "tp_size": 2, "ep_size": 4},
        "over cp and replicas, recomputed": {"dp_size": 2, "cp_size": 2, "ep_size": 4, "cp_block": 8, **AGAIN},
        "pairs of replicas, ZeRO-3": {"dp_size": 4, "ep_size": 2, "zero_stage": 3},
        "stages, recomputed": {"dp_size": 2, "pp_size": 2, "ep_size": 2, **AGAIN},
        "replicas, ZeRO-2, recomputed": {"dp_size": 4, "ep_size": 4, "zero_stage": 2, **AGAIN},
        "tp, ZeRO-3": {"dp_size": 2, "tp_size": 2, "ep_size": 2, "zero_stage": 3},
        "cp, ZeRO-1": {"dp_size": 2, "cp_size": 2, "ep_size": 2, "cp_block": 8, "zero_stage": 1},
        "stages with split backwards": {"dp_size": 2, "pp_size": 2, "ep_size": 2, "split_backward": True},
    },
}


CORE = {
    2: ("over cp ranks, recomputed",),
    4: ("over tp and replicas",),
}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_layouts_equal_the_stock_trainer(world_size: int):
    every = {name: shared("qwen3_moe", layout) for name, layout in LAYOUTS[world_size].items()}
    runs.assert_layouts_equal_the_stock_trainer(world_size, in_turn(every, *CORE[world_size]))


@pytest.mark.parametrize("family", runs.deep_but(FAMILIES))
def test_families_equal_the_stock_trainer(family: str):
    layouts = {name: shared(family, LAYOUTS[2][name]) for name in ("within a tp group", "over replicas")}
    runs.assert_layouts_equal_the_stock_trainer(2, layouts)


@pytest.mark.deep
def test_experts_that_take_blocks_of_rows_equal_the_stock_trainer_on_four_ranks():
    names = (
        "over tp and replicas",
        "over cp and replicas, recomputed",
        "stages, recomputed",
        "pairs of replicas, ZeRO-3",
    )
    layouts = {name: shared("llama4_text", LAYOUTS[4][name]) for name in names}
    runs.assert_layouts_equal_the_stock_trainer(4, layouts)


def of_one_rank() -> dict[str, Any]:
    """A model whose routers send all tokens to the first experts."""
    arguments = of_family("gpt_oss")
    for name, parameter in arguments["model"].named_parameters():
        if name.endswith("router.bias"):
            parameter.data[:2] += 100
    return arguments


# The loss over the experts' load

# large enough to be seen in losses and gradients
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
# Layout, arguments
BALANCED_LAYOUTS: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        "tp": ({"tp_size": 2}, {}),
        "experts of a tp group": ({"tp_size": 2, "ep_size": 2}, {}),
        "one microbatch of each replica": ({"dp_size": 2, "ep_size": 2}, {"per_device_train_batch_size": 4}),
        "several microbatches, recomputed": ({"dp_size": 2, **AGAIN}, {}),
        "cp": ({"cp_size": 2, "cp_block": 8}, {}),
        "stages": ({"pp_size": 2}, {}),
        "stages, forwards first": ({"pp_size": 2}, {"schedule": "gpipe"}),
    },
    4: {
        "stages, split backwards": ({"dp_size": 2, "pp_size": 2, "ep_size": 2, "split_backward": True}, {}),
        "ZeRO-3, recomputed": ({"dp_size": 4, "ep_size": 2, "zero_stage": 3, **AGAIN}, {}),
        "cp and tp": ({"cp_size": 2, "tp_size": 2, "ep_size": 4, "cp_block": 8}, {}),
    },
}


def balanced(family: str, world_size: int) -> dict[str, runs.Layout]:
    """Layouts of a family with the loss over the load of its experts."""
    found = {}
    for name, (layout, arguments) in BALANCED_LAYOUTS[world_size].items():
        ours = {**arguments}
        parallel = {"modules": {LM: layout}, "schedule": ours.pop("schedule", "1f1b")}
        found[name] = runs.Layout("llama", parallel, partial(evaluated, family, **BALANCED), ours)
    return found


@pytest.mark.parametrize("world_size", BALANCED_LAYOUTS)
def test_a_loss_over_the_load_of_experts_is_that_of_the_whole_batch(world_size: int):
    core = {2: ("cp",), 4: ("stages, split backwards",)}[world_size]
    chosen = in_turn(balanced("qwen3_moe", world_size), *core)
    runs.assert_layouts_equal_the_stock_trainer(world_size, chosen)


# those that have no such loss, and the one above
UNBALANCED = ("qwen3_moe", "deepseek_v3", "glm4_moe", "llama4_text")


@pytest.mark.parametrize("family", runs.deep_but([family for family in FAMILIES if family not in UNBALANCED]))
def test_losses_over_the_load_of_experts_of_families(family: str):
    names = ("experts of a tp group", "several microbatches, recomputed", "stages")
    runs.assert_layouts_equal_the_stock_trainer(2, {name: balanced(family, 2)[name] for name in names})


# Where tokens go


def of_one_length(family: str) -> dict[str, Any]:
    """A model and samples that need no padding, whose first step is all of them."""
    arguments = of_family(family)
    data = [{name: values[:6] for name, values in sample.items()} for sample in arguments["data"][: runs.GLOBAL_BATCH]]
    return {**arguments, "data": data, "max_steps": 1}


def first_load(family: str) -> float:
    """The excess of the busiest expert over the mean one that a run on shared experts logs of its first step."""
    trainer = runs.make_trainer("llama", {LM: SPREAD}, **of_one_length(family))
    trainer.train()
    return trainer.state.log_history[0]["parallel/expert_imbalance/language_model"]


@pytest.mark.parametrize("family", runs.deep_but(["qwen3_moe", "llama4_text"], "qwen3_moe"))
def test_the_load_of_ranks_that_is_measured_before_a_run_is_that_of_its_steps(family: str):
    arguments = of_one_length(family)
    batch = tiny.collate("llama")(arguments["data"])
    peaks = expert_peaks(arguments["model"], "model.layers", [batch], 60.0)
    assert set(peaks) == {2, 4} and 1 < peaks[2] < peaks[4]
    assert run_distributed(first_load, 2, family)[0] == pytest.approx(peaks[4] - 1, rel=1e-5)


def test_a_router_that_knows_two_experts_leaves_ranks_idle():
    arguments = of_one_rank()
    batch = tiny.collate("llama")(arguments["data"][:4])
    assert expert_peaks(arguments["model"], "model.layers", [batch], 60.0) == {2: 2.0, 4: 2.0}
    assert expert_peaks(arguments["model"], "model.layers", [], 60.0) == {}


# Frozen parts, adapters, a multimodal model

SPREAD = {"dp_size": 2, "ep_size": 2}
WITHIN = {"tp_size": 2, "ep_size": 2}
PLAIN = partial(of_family, "qwen3_moe")
LORA = {"peft_config": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}}
BESIDE = {"colocate_with": VISION}


def with_images(**config: Any) -> dict[str, Any]:
    model = tiny.FAMILIES["qwen3_vl_moe"]()
    for name, value in config.items():
        setattr(model.config.text_config, name, value)
    return {"model": model, "max_steps": 3, "evaluate": True, "per_device_eval_batch_size": 2}


OTHERS: dict[str, runs.Layout] = {
    "a frozen router": runs.Layout("llama", {LM: {**SPREAD, "freeze": r"\.gate\."}}, PLAIN),
    "frozen experts": runs.Layout("llama", {LM: {**SPREAD, "freeze": r"\.experts\.", **AGAIN}}, PLAIN),
    # the experts of the first layer have no backward on any rank
    "frozen first layers": runs.Layout("llama", {LM: {**SPREAD, "freeze": [r"layers\.0\.", "embed_tokens"]}}, PLAIN),
    "adapters, over replicas": runs.Layout("llama", {LM: {**SPREAD, **LORA}}, PLAIN, alone={LM: LORA}),
    "adapters, within a tp group": runs.Layout("llama", {LM: {**WITHIN, **LORA}}, PLAIN, alone={LM: LORA}),
    "no token for the experts of a rank": runs.Layout("llama", {LM: SPREAD}, of_one_rank),
    "no token for the experts of a rank of a tp group": runs.Layout("llama", {LM: WITHIN}, of_one_rank),
    "images": runs.Layout("qwen3_vl_moe", {VISION: {"dp_size": 2}, LM: {**SPREAD, **BESIDE}}, with_images),
    "images, balanced": runs.Layout(
        "qwen3_vl_moe", {VISION: {"dp_size": 2}, LM: {"pp_size": 2, **BESIDE}}, partial(with_images, **BALANCED)
    ),
}
ALWAYS = ("frozen first layers", "images", *(name for name in OTHERS if name.startswith("no token")))


def test_what_else_a_mixture_has_equals_the_stock_trainer():
    runs.assert_layouts_equal_the_stock_trainer(2, in_turn(OTHERS, *ALWAYS))


# Checkpoints

SAVED = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}
RESUMED = {
    "tp": WITHIN,
    "no sharing": {"tp_size": 2},
    "ZeRO": {"dp_size": 2, "ep_size": 2, "zero_stage": 1},
    "from a folder": SPREAD,
}


def save_and_resume(folder: Path, others: dict[str, dict[str, Any]]) -> list[runs.Run]:
    def run(name: str, layout: dict[str, Any], checkpoint: Path | None = None) -> runs.Run:
        # experts of a checkpoint are read by the ranks that have them
        model = {"model": str(checkpoint)} if name == "from a folder" else {}
        return runs.saving_run("llama", folder / name, {LM: layout}, checkpoint, **{**PLAIN(), **SAVED, **model})

    first, checkpoint = run("first", SPREAD), folder / "first" / "checkpoint-2"
    return [first, *(run(name, layout, checkpoint) for name, layout in others.items())]


def test_runs_go_on_under_other_layouts(tmp_path: Path):
    reference = runs.stock("llama", **{**PLAIN(), **SAVED})
    found = run_distributed(save_and_resume, 2, tmp_path, in_turn(RESUMED, "tp"), timeout=200)[0]
    for run in found:
        runs.assert_same_run(run, reference, rtol=1e-4, atol=2e-5)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first" / "checkpoint-4")
    for name, value in saved.state_dict().items():
        torch.testing.assert_close(value, found[0].weights[name])
