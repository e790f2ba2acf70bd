"""Ranks that share the experts of a mixture give the stock Trainer's losses, gradient norms and final weights."""

import copy
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

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
TEXT = {**tiny.HEADS, "num_hidden_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
ROUTED |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"head_dim": 8}
# Class -> configuration
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {**TEXT, **EXPERTS},
    "MixtralForCausalLM": {**TEXT, **LOCAL},
    "GptOssForCausalLM": {**TEXT, **LOCAL, "layer_types": ["sliding_attention", "full_attention"]},
    "DeepseekV3ForCausalLM": {**TEXT, **ROUTED, **LATENT, "num_key_value_heads": 4},
    "GraniteMoeForCausalLM": {**TEXT, **LOCAL},
    "Glm4MoeForCausalLM": {**TEXT, **ROUTED},
    "Ernie4_5_MoeForCausalLM": {**TEXT, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "Llama4ForCausalLM": {
        **TEXT,
        **LOCAL,
        "head_dim": 16,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 1,
    },
}


def of_family(name: str, **config: Any) -> dict[str, Any]:
    """A seeded model and its samples."""
    cls = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(cls.config_class(**{**FAMILIES[name], **config}))
    # a batch of one sample is the last: all replicas but one have none
    data = tiny.make_dataset("llama", 2 * runs.GLOBAL_BATCH + 1)
    return {"model": model, "data": data, "max_steps": 3}


def train(cases: list[tuple[str, dict[str, Any]]]) -> list[runs.Run]:
    result = []
    for family, layout in cases:
        trainer = runs.make_trainer("llama", {LM: layout}, **of_family(family))
        check_shares(trainer, layout["ep_size"])
        result.append(runs.run_of(trainer, evaluate=True))
        assert trainer.state.log_history[0]["parallel/expert_imbalance/language_model"] > 0
    return result


def check_shares(trainer: Any, ep_size: int) -> None:
    """This rank has its share of the experts, and no more."""
    experts = [p for name, p in trainer.model.model.named_parameters() if ".experts." in name and p.numel() > 1]
    assert experts and all(p.shape[0] == 4 and p.to_local().shape[0] == 4 // ep_size for p in experts)


def assert_same(family: str, named: dict[str, runs.Run]) -> None:
    reference = runs.stock("llama", evaluate=True, **of_family(family))
    for name, run in named.items():
        runs.assert_same_run(run, reference)
        assert run.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5), name


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
    layouts = in_turn(LAYOUTS[world_size], *CORE[world_size])
    cases = [("Qwen3MoeForCausalLM", layout) for layout in layouts.values()]
    results = run_distributed(train, world_size, cases, timeout=250)[0]
    assert_same("Qwen3MoeForCausalLM", dict(zip(layouts, results, strict=True)))


@pytest.mark.parametrize("family", runs.deep_but(FAMILIES))
def test_families_equal_the_stock_trainer(family: str):
    cases = [(family, LAYOUTS[2][name]) for name in ("within a tp group", "over replicas")]
    results = run_distributed(train, 2, cases, timeout=200)[0]
    assert_same(family, {str(layout): run for (_, layout), run in zip(cases, results, strict=True)})


@pytest.mark.deep
def test_experts_that_take_blocks_of_rows_equal_the_stock_trainer_on_four_ranks():
    family = "Llama4ForCausalLM"
    names = (
        "over tp and replicas",
        "over cp and replicas, recomputed",
        "stages, recomputed",
        "pairs of replicas, ZeRO-3",
    )
    cases = [(family, LAYOUTS[4][name]) for name in names]
    results = run_distributed(train, 4, cases, timeout=250)[0]
    assert_same(family, dict(zip(names, results, strict=True)))


def of_one_rank() -> dict[str, Any]:
    """A model whose routers send all tokens to the first experts."""
    arguments = of_family("GptOssForCausalLM")
    for name, parameter in arguments["model"].named_parameters():
        if name.endswith("router.bias"):
            parameter.data[:2] += 100
    return arguments


def train_on_one_rank() -> list[runs.Run]:
    layouts = (LAYOUTS[2][name] for name in ("within a tp group", "over replicas"))
    return [runs.parallel_run("llama", {LM: layout}, **of_one_rank()) for layout in layouts]


def test_ranks_whose_experts_get_no_token_take_part():
    for run in run_distributed(train_on_one_rank, 2)[0]:
        runs.assert_same_run(run, runs.stock("llama", **of_one_rank()))


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


def train_balanced(family: str, layouts: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[runs.Run]:
    result = []
    for layout, arguments in layouts:
        arguments = {"per_device_eval_batch_size": 2, **of_family(family, **BALANCED), **arguments}
        schedule = {"schedule": arguments.pop("schedule", "1f1b")}
        parallel = {"modules": {LM: layout}, **schedule}
        result.append(runs.parallel_run("llama", parallel, evaluate=True, **arguments))
    return result


def assert_balanced(family: str, world_size: int, names: list[str]) -> None:
    layouts = BALANCED_LAYOUTS[world_size]
    arguments = {"per_device_eval_batch_size": 2, **of_family(family, **BALANCED)}
    reference = runs.stock("llama", evaluate=True, **arguments)
    results = run_distributed(train_balanced, world_size, family, [layouts[name] for name in names], timeout=250)[0]
    for name, run in zip(names, results, strict=True):
        runs.assert_same_run(run, reference)
        assert run.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5), name


@pytest.mark.parametrize("world_size", BALANCED_LAYOUTS)
def test_a_loss_over_the_load_of_experts_is_that_of_the_whole_batch(world_size: int):
    core = {2: ("cp",), 4: ("stages, split backwards",)}
    assert_balanced("Qwen3MoeForCausalLM", world_size, [*in_turn(BALANCED_LAYOUTS[world_size], *core[world_size])])


# those that have no such loss, and the one above
UNBALANCED = ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Llama4ForCausalLM")


@pytest.mark.parametrize("family", runs.deep_but([family for family in FAMILIES if family not in UNBALANCED]))
def test_losses_over_the_load_of_experts_of_families(family: str):
    assert_balanced(family, 2, ["experts of a tp group", "several microbatches, recomputed", "stages"])


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


@pytest.mark.parametrize("family", runs.deep_but(["Qwen3MoeForCausalLM", "Llama4ForCausalLM"], "Qwen3MoeForCausalLM"))
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


# Frozen parts, adapters and what is refused

SPREAD = {"dp_size": 2, "ep_size": 2}
FROZEN = {
    "router": {**SPREAD, "freeze": r"\.gate\."},
    "experts": {**SPREAD, "freeze": r"\.experts\.", **AGAIN},
    # the experts of the first layer have no backward on any rank
    "first layers": {**SPREAD, "freeze": [r"layers\.0\.", "embed_tokens"]},
}


def train_frozen(layouts: list[dict[str, Any]]) -> list[runs.Run]:
    return [runs.parallel_run("llama", {LM: layout}, **of_family("Qwen3MoeForCausalLM")) for layout in layouts]


def test_frozen_parts_equal_the_stock_trainer():
    layouts = [*in_turn(FROZEN, "first layers").values()]
    for run, layout in zip(run_distributed(train_frozen, 2, layouts)[0], layouts, strict=True):
        freeze = {LM: layout["freeze"]}
        runs.assert_same_run(run, runs.stock("llama", freeze=freeze, **of_family("Qwen3MoeForCausalLM")))


def train_adapters(layouts: list[dict[str, Any]]) -> list[runs.Run]:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    arguments = of_family("Qwen3MoeForCausalLM")
    result = []
    for layout in layouts:
        model = copy.deepcopy(arguments["model"])
        layout = {LM: {**layout, "peft_config": lora}}
        result.append(runs.parallel_run("llama", layout, **{**arguments, "model": model}))
    return result


@pytest.mark.deep
def test_adapters_beside_shared_experts_equal_those_of_one_rank():
    alone = run_distributed(train_adapters, 1, [{}])[0][0]
    for run in run_distributed(train_adapters, 2, [SPREAD, {"tp_size": 2, "ep_size": 2}])[0]:
        runs.assert_same_run(run, alone)


# A multimodal model


def test_a_multimodal_model_equals_the_stock_trainer():
    layout = {VISION: {"dp_size": 2}, LM: {"dp_size": 2, "ep_size": 2, "colocate_with": VISION}}
    runs.assert_a_layout_equals_the_stock_trainer("qwen3_vl_moe", layout, max_steps=3)


def balanced_images() -> dict[str, Any]:
    model = tiny.FAMILIES["qwen3_vl_moe"]()
    for name, value in BALANCED.items():
        setattr(model.config.text_config, name, value)
    return {"model": model, "max_steps": 3, "evaluate": True, "per_device_eval_batch_size": 2}


def train_balanced_images() -> runs.Run:
    layout = {VISION: {"dp_size": 2}, LM: {"pp_size": 2, "colocate_with": VISION}}
    return runs.parallel_run("qwen3_vl_moe", layout, **balanced_images())


@pytest.mark.deep
def test_a_multimodal_model_balances_its_experts_over_the_whole_batch():
    run, reference = run_distributed(train_balanced_images, 2)[0], runs.stock("qwen3_vl_moe", **balanced_images())
    runs.assert_same_run(run, reference)
    assert run.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)


# Checkpoints

SAVED = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}
OTHERS = {
    "tp": {"tp_size": 2, "ep_size": 2},
    "no sharing": {"tp_size": 2},
    "ZeRO": {"dp_size": 2, "ep_size": 2, "zero_stage": 1},
    "from a folder": SPREAD,
}


def save_and_resume(folder: Path, others: dict[str, dict[str, Any]]) -> list[runs.Run]:
    family = {**of_family("Qwen3MoeForCausalLM"), **SAVED}

    def run(name: str, layout: dict[str, Any], checkpoint: Path | None = None, model: Any = None) -> runs.Run:
        model = copy.deepcopy(family["model"]) if model is None else model
        return runs.saving_run("llama", folder / name, {LM: layout}, checkpoint, **{**family, "model": model})

    results = [run("first", SPREAD)]
    checkpoint = folder / "first" / "checkpoint-2"
    # experts of a checkpoint are read by the ranks that have them
    models = {"from a folder": str(checkpoint)}
    return results + [run(name, layout, checkpoint, models.get(name)) for name, layout in others.items()]


def test_runs_go_on_under_other_layouts(tmp_path: Path):
    family = {**of_family("Qwen3MoeForCausalLM"), **SAVED}
    reference = runs.stock("llama", **family)
    first, *resumed = run_distributed(save_and_resume, 2, tmp_path, in_turn(OTHERS, "tp"), timeout=200)[0]
    runs.assert_same_run(first, reference, rtol=1e-4, atol=2e-5)
    for run in resumed:
        runs.assert_same_run(run, reference, rtol=1e-4, atol=2e-5)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first" / "checkpoint-4")
    for name, value in saved.state_dict().items():
        assert first.weights is not None
        torch.testing.assert_close(value, first.weights[name])
