"""Models that `get_peft_model` made train and are saved as with the stock Trainer; `test_saved_folders` opens them."""

import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import set_seed

from hf_mmparallel.modeling import adapter
from hf_mmparallel.modeling.adapter import base_model_of, is_peft_model, unwrap_peft_model, with_adapters_of
from hf_mmparallel.plan import ModulePlugin, MultimodalParallelPlugin
from hf_mmparallel.trainer.build import adapter_configs
from tests import tiny
from tests.deep_cases import in_turn
from tests.distributed import run_distributed
from tests.trainer import runs

VISION, LM = "vision", "language_model"
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {VISION: {}, LM: {"pp_size": 2}},
    "tensor": {VISION: {}, LM: {"tp_size": 2}},
    "context": {VISION: {}, LM: {"cp_size": 2, "attn_implementation": "bitfield"}},
    "data": {VISION: {}, LM: {"dp_size": 2}},
}
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "fc1"]}
PARTS = ["multi_modal_projector"]
THREE_STEPS = {"max_steps": 3, "warmup_steps": 0}
BIASED = {**THREE_STEPS, "learning_rate": 0.1}


def test_models_without_adapters_need_no_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    model, blank = tiny.FAMILIES["llama"](), tiny.FAMILIES["llama"]()
    monkeypatch.setattr(adapter, "is_peft_available", lambda: False)
    monkeypatch.setitem(sys.modules, "peft", None)  # an import fails
    assert not is_peft_model(model) and base_model_of(model) is model
    assert with_adapters_of(model, blank) is blank


def adapted(name: str = "default", **settings: Any) -> Any:
    """A model with adapters in both modules and a projector that is trained whole."""
    set_seed(7)
    model = tiny.FAMILIES["llava"]()
    return get_peft_model(model, LoraConfig(**{**LORA, "modules_to_save": PARTS, **settings}), adapter_name=name)


def trained(model: Any) -> dict[str, torch.Tensor]:
    """What is trained in a `PeftModel`, by the keys of its file."""
    assert isinstance(model, PeftModel)
    (name,) = model.peft_config
    return {k: v.detach().clone() for k, v in peft.get_peft_model_state_dict(model, adapter_name=name).items()}


Trained = tuple[list[dict[str, float]], Any]


def trained_run(trainer: Any, checkpoint: str | None = None) -> Trained:
    """Logs and trained weights, these on rank 0."""
    trainer.train(resume_from_checkpoint=checkpoint)
    whole = trainer.gather_model()
    return runs.step_logs(trainer), None if whole is None else trained(whole)


def stock_run(model: Any, **arguments: Any) -> tuple[Any, Trained]:
    """The stock Trainer after its run, and what it leaves."""
    stock = runs.stock_trainer(model=model, **arguments)
    stock.train()
    return stock, (runs.step_logs(stock), trained(stock.model))


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float = 2e-5) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=rtol, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def assert_same(run: Trained, stock: Trained) -> None:
    assert run[0] == [pytest.approx(row, rel=2e-5, abs=2e-6) for row in stock[0]]
    assert_close(run[1], stock[1])


def train_layouts(folder: Path, layouts: dict[str, dict[str, Any]]) -> dict[str, Trained]:
    """Logs and weights of layouts; the adapter of the pipeline has another name."""
    result = {}
    for layout, sizes in layouts.items():
        model = adapted("mine" if layout == "pipeline" else "default")
        trainer = runs.make_trainer("llava", sizes, model=model, **THREE_STEPS)
        result[layout] = trained_run(trainer)
        trainer.save_model(str(folder / layout))
    return result


@pytest.mark.distributed
def test_every_layout_trains_and_saves_as_the_stock_trainer(tmp_path: Path):
    stock, wanted = stock_run(adapted(), **THREE_STEPS)
    stock.save_model(str(tmp_path / "stock"))
    expected = json.loads((tmp_path / "stock" / "adapter_config.json").read_text())
    layouts = in_turn(LAYOUTS, "pipeline", "tensor")
    for layout, run in run_distributed(train_layouts, 3, tmp_path, layouts, timeout=200)[0].items():
        assert_same(run, wanted)
        folder = tmp_path / layout / ("mine" if layout == "pipeline" else "")
        assert_close(*(load_file(own / "adapter_model.safetensors") for own in (folder, tmp_path / "stock")))
        config = json.loads((folder / "adapter_config.json").read_text())
        for setting in set(expected) - {"modules_to_save", "target_modules"}:
            assert config[setting] == expected[setting], setting
        assert set(config["target_modules"]) == set(expected["target_modules"])


CHECKPOINTS = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3}


def biased() -> Any:
    return adapted(target_modules=["q_proj", "o_proj", "fc1"], lora_bias=True)


def more_runs(folder: str, before: str) -> dict[str, Trained]:
    """
    A run whose first half has a pipeline, and whose second half has tensor parallelism; one that trains on with the
    adapter in a folder; one of biased adapters, with SGD, which hides no scale.
    """

    def made(layout: str) -> Any:
        return runs.make_trainer("llava", LAYOUTS[layout], folder, model=adapted("mine"), **CHECKPOINTS)

    again: Any = PeftModel.from_pretrained(tiny.FAMILIES["llava"](), before, is_trainable=True)
    return {
        "first": trained_run(made("pipeline")),
        "second": trained_run(made("tensor"), f"{folder}/checkpoint-2"),
        "again": trained_run(runs.make_trainer("llava", LAYOUTS["pipeline"], model=again, **THREE_STEPS)),
        "biases": trained_run(runs.make_trainer("llava", LAYOUTS["tensor"], model=biased(), **BIASED)),
    }


@pytest.mark.distributed
@pytest.mark.deep
def test_runs_are_resumed_under_other_layouts_adapters_trained_on_and_biases_follow_their_layers(tmp_path: Path):
    _, resumed = stock_run(adapted("mine"), **CHECKPOINTS)
    before = str(tmp_path / "before")
    stock_run(adapted(use_dora=True), max_steps=2)[0].save_model(before)
    _, again = stock_run(PeftModel.from_pretrained(tiny.FAMILIES["llava"](), before, is_trainable=True), **THREE_STEPS)
    _, biases = stock_run(biased(), **BIASED)
    found = run_distributed(more_runs, 3, str(tmp_path), before, timeout=200)[0]
    expected = [pytest.approx(row, rel=1e-4, abs=1e-5) for row in resumed[0]]
    assert found["first"][0] == expected and found["second"][0] == expected
    assert_close(found["second"][1], resumed[1], rtol=1e-3)
    assert_same(found["again"], again)
    assert any(name.endswith("lora_B.bias") and tensor.abs().max() > 1e-4 for name, tensor in biases[1].items())
    assert_same(found["biases"], biases)


# What can't hold


PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2, "target_modules": None}
# Kind -> settings of its adapters, what the refusal names
OTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"total_step": 4},
    "IA3Config": {"target_modules": ["down_proj"], "feedforward_modules": ["down_proj"]},
    "VeraConfig": {},
    "OFTConfig": {"oft_block_size": 4},
    "LoHaConfig": {},
    "PrefixTuningConfig": PROMPT,
    "PromptTuningConfig": PROMPT,
}
LORA_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"bias": "lora_only"}, "`bias='none'`"),
    "token rows": ({"trainable_token_indices": [1, 2]}, "`trainable_token_indices="),
    "parameters": ({"target_parameters": ["mlp.down_proj.weight"], "target_modules": []}, "`target_parameters`"),
    "aLoRA": ({"alora_invocation_tokens": [1], "task_type": "CAUSAL_LM"}, "`ALoraLinearVariant`"),
    "tied": ({"modules_to_save": ["lm_head"]}, "`lm_head.weight`"),
    "tied adapters": ({"target_modules": ["lm_head"], "ensure_weight_tying": True}, "`ensure_weight_tying=False`"),
}
REFUSED = {
    **{name: f"`{name}`.*`LoraConfig`" for name in OTHER_CONFIGS},
    **{kind: named for kind, (_, named) in LORA_CONFIGS.items()},
    "PeftMixedModel": "`PeftMixedModel`",
    "several": r"delete_adapter\('second'\)",
    "merged": "`model.unmerge_adapter",
    "base weights": "q_proj.base_layer.weight`",
    "for inference": "is_trainable=True",
}


def with_adapter(kind: str) -> Any:
    """A tiny text model with adapters of a kind that a plan refuses, or plain ones."""
    base: Any = tiny.FAMILIES["llama_tied" if kind.startswith("tied") else "llama"]()
    targets: dict[str, Any] = {"target_modules": ["q_proj"]}
    if kind in OTHER_CONFIGS:
        given = {**targets, **OTHER_CONFIGS[kind]}
        config = getattr(peft, kind)(**{name: value for name, value in given.items() if value is not None})
    else:
        config = LoraConfig(**{**targets, **LORA_CONFIGS.get(kind, ({}, ""))[0]})
    model: Any = get_peft_model(base, config, mixed=kind == "PeftMixedModel")
    if kind == "several":
        model.add_adapter("second", LoraConfig(**targets))
    elif kind == "merged":
        model.merge_adapter()
    elif kind == "base weights":
        model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.requires_grad_(True)
    elif kind == "for inference":
        model.requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_cannot_be_laid_out_are_refused_by_name(kind: str):
    model = with_adapter(kind)
    before = list(model.state_dict())
    assert is_peft_model(model)
    with pytest.raises(ValueError, match=REFUSED[kind]):
        unwrap_peft_model(model)
    assert list(model.state_dict()) == before


def test_adapters_that_transformers_added_are_taken_too():
    model: Any = tiny.FAMILIES["llama"]()
    assert not is_peft_model(model)
    model.add_adapter(LoraConfig(target_modules=["q_proj"]), adapter_name="own")
    assert is_peft_model(model)
    base, adapter = unwrap_peft_model(model)
    assert base is model and adapter.name == "own" and adapter.config.r == 8


def test_a_model_with_adapters_gets_no_more():
    more = MultimodalParallelPlugin({LM: ModulePlugin(peft_config={"r": 2})})
    with pytest.raises(ValueError, match=f"`peft_config` of module `{LM}`"):
        adapter_configs(with_adapter("plain"), more)


@pytest.mark.parametrize("kind", runs.deep_but(("IA3Config", "PrefixTuningConfig", "several", "plain"), "plain"))
def test_all_sizes_one_is_the_stock_trainer_for_every_kind(kind: str):
    logs = []
    arguments = {"per_device_train_batch_size": 4, "max_steps": 2, "data": tiny.make_dataset("llama", 8)}
    for make, own in ((runs.stock_trainer, {}), (runs.our_trainer, {"parallel": {LM: {}}})):
        set_seed(5)
        logs.append(runs.run_of(make("llama", model=with_adapter(kind), **own, **arguments)).logs)
    assert logs[0] == logs[1]
