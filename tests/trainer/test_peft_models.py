"""Models that `get_peft_model` made train under a plan as with the stock Trainer and are saved as `peft` saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments, set_seed

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.adapters.peft_models import is_peft_model, unwrap_peft_model
from hf_mmparallel.plan import ModulePlugin, MultimodalParallelPlugin
from hf_mmparallel.trainer.build import adapter_configs
from tests import tiny
from tests.distributed import assert_ranks_raise, run_distributed
from tests.folders import run_folder
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


def adapted(name: str = "default", base: str | None = None, **settings: Any) -> Any:
    """A model with adapters in both modules and a projector that is trained whole."""
    set_seed(7)
    model = tiny.FAMILIES["llava"]()
    if base is not None:
        model = type(model).from_pretrained(base)
    return get_peft_model(model, LoraConfig(**{**LORA, "modules_to_save": PARTS, **settings}), adapter_name=name)


def trained(model: Any) -> dict[str, torch.Tensor]:
    """What is trained in a `PeftModel`, by the keys of its file."""
    assert isinstance(model, PeftModel)
    (name,) = model.peft_config
    return {k: v.detach().clone() for k, v in peft.get_peft_model_state_dict(model, adapter_name=name).items()}


def trained_run(trainer: Any, checkpoint: str | None = None) -> tuple[list[dict[str, float]], Any]:
    """Logs and trained weights, these on rank 0."""
    trainer.train(resume_from_checkpoint=checkpoint)
    whole = trainer.gather_model()
    return runs.step_logs(trainer), None if whole is None else trained(whole)


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float = 2e-5) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=rtol, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def train_layouts(folder: str, base: str) -> dict[str, Any]:
    """Logs and weights of every layout; that of the pipeline has another name and is saved."""
    result = {}
    for layout, sizes in LAYOUTS.items():
        model = adapted("mine" if layout == "pipeline" else "default", base)
        trainer = runs.make_trainer("llava", sizes, model=model)
        result[layout] = trained_run(trainer)
        trainer.save_model(f"{folder}/{layout}")
    return result


@pytest.mark.distributed
def test_every_layout_trains_as_the_stock_trainer_and_peft_reads_what_is_saved(tmp_path: Path):
    base = str(tmp_path / "base")
    tiny.FAMILIES["llava"]().save_pretrained(base)
    stock = runs.stock_trainer(model=adapted(base=base))
    stock.train()
    logs, weights = runs.step_logs(stock), trained(stock.model)
    stock.save_model(str(tmp_path / "stock"))
    for layout, (got_logs, got) in run_distributed(train_layouts, 3, str(tmp_path), base, timeout=200)[0].items():
        assert got_logs == [pytest.approx(row, rel=2e-5, abs=2e-6) for row in logs], layout
        assert_close(got, weights)
        folder = tmp_path / layout / ("mine" if layout == "pipeline" else "")
        assert_close(*(load_file(own / "adapter_model.safetensors") for own in (folder, tmp_path / "stock")))
        config, expected = (
            json.loads((own / "adapter_config.json").read_text()) for own in (folder, tmp_path / "stock")
        )
        for setting in set(expected) - {"modules_to_save", "target_modules"}:
            assert config[setting] == expected[setting], setting
        assert set(config["target_modules"]) == set(expected["target_modules"])
        loaded = PeftModel.from_pretrained(type(stock.model.get_base_model()).from_pretrained(base), str(folder))
        assert_close(trained(loaded), weights)
        batch = tiny.collate("llava")(tiny.make_dataset("llava", 2))
        autos = [AutoModelForImageTextToText.from_pretrained(str(path)) for path in (folder, tmp_path / "stock")]
        with torch.no_grad():
            want = stock.model.eval()(**batch).logits
            torch.testing.assert_close(loaded.eval()(**batch).logits, want, rtol=1e-4, atol=1e-5)
            first, second = (auto.eval()(**batch).logits for auto in autos)
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def train_on(folder: str) -> Any:
    """Goes on with the adapter in a folder."""
    model = PeftModel.from_pretrained(tiny.FAMILIES["llava"](), folder, is_trainable=True)
    return trained_run(runs.make_trainer("llava", LAYOUTS["pipeline"], model=model))


@pytest.mark.distributed
@pytest.mark.deep
def test_an_adapter_that_was_trained_before_is_trained_on(tmp_path: Path):
    first = runs.stock_trainer(model=adapted(use_dora=True), max_steps=2)
    first.train()
    first.save_model(str(tmp_path))
    stock = runs.stock_trainer(
        model=PeftModel.from_pretrained(tiny.FAMILIES["llava"](), str(tmp_path), is_trainable=True)
    )
    stock.train()
    logs, weights = run_distributed(train_on, 3, str(tmp_path))[0]
    assert logs == [pytest.approx(row, rel=2e-5, abs=2e-6) for row in runs.step_logs(stock)]
    assert_close(weights, trained(stock.model))


CHECKPOINTS = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3}


def interrupted(folder: str) -> Any:
    """A run whose first half has a pipeline, and whose second half has tensor parallelism."""

    def made(layout: str) -> Any:
        return runs.make_trainer("llava", LAYOUTS[layout], folder, model=adapted("mine"), **CHECKPOINTS)

    return trained_run(made("pipeline")), trained_run(made("tensor"), f"{folder}/checkpoint-2")


@pytest.mark.distributed
def test_a_run_is_resumed_under_another_layout_and_on_one_process(tmp_path: Path):
    stock = runs.stock_trainer(model=adapted("mine"), **CHECKPOINTS)
    stock.train()
    (first, _), (second, weights) = run_distributed(interrupted, 3, str(tmp_path), timeout=120)[0]
    expected = [pytest.approx(row, rel=1e-4, abs=1e-5) for row in runs.step_logs(stock)]
    assert first == expected and second == expected
    assert_close(weights, trained(stock.model), rtol=1e-3)


# What can't hold


def with_adapter(kind: str) -> Any:
    """A tiny text model with adapters of a kind that a plan refuses."""
    base: Any = tiny.FAMILIES["llama_tied" if kind.startswith("tied") else "llama"]()
    targets: dict[str, Any] = {"target_modules": ["q_proj"]}
    configs: dict[str, Any] = {
        "AdaLoraConfig": lambda: peft.AdaLoraConfig(total_step=4, **targets),
        "IA3Config": lambda: peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"]),
        "VeraConfig": lambda: peft.VeraConfig(**targets),
        "OFTConfig": lambda: peft.OFTConfig(oft_block_size=4, **targets),
        "LoHaConfig": lambda: peft.LoHaConfig(**targets),
        "PrefixTuningConfig": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        "PromptTuningConfig": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        "bias": lambda: LoraConfig(bias="lora_only", **targets),
        "token rows": lambda: LoraConfig(trainable_token_indices=[1, 2], **targets),
        "parameters": lambda: LoraConfig(target_parameters=["mlp.down_proj.weight"], target_modules=[]),
        "aLoRA": lambda: LoraConfig(alora_invocation_tokens=[1], task_type="CAUSAL_LM", **targets),
        "tied": lambda: LoraConfig(modules_to_save=["lm_head"], **targets),
        "tied adapters": lambda: LoraConfig(target_modules=["lm_head"], ensure_weight_tying=True),
    }
    if kind == "PeftMixedModel":
        return get_peft_model(base, LoraConfig(**targets), mixed=True)
    model: Any = get_peft_model(base, configs.get(kind, lambda: LoraConfig(**targets))())
    if kind == "several":
        model.add_adapter("second", LoraConfig(**targets))
    elif kind == "merged":
        model.merge_adapter()
    elif kind == "base weights":
        model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.requires_grad_(True)
    elif kind == "for inference":
        model.requires_grad_(False)
    return model


KINDS = ("AdaLora", "IA3", "Vera", "OFT", "LoHa", "PrefixTuning", "PromptTuning")
REFUSED = {
    **{f"{name}Config": f"`{name}Config`.*`LoraConfig`" for name in KINDS},
    "PeftMixedModel": "`PeftMixedModel`",
    "several": r"delete_adapter\('second'\)",
    "bias": "`bias='none'`",
    "token rows": "`trainable_token_indices=",
    "parameters": "`target_parameters=",
    "aLoRA": "`ALoraLinearVariant`",
    "tied": "`lm_head.weight`",
    "tied adapters": "`ensure_weight_tying=False`",
    "merged": "`model.unmerge_adapter",
    "base weights": "q_proj.base_layer.weight`",
    "for inference": "is_trainable=True",
}


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
    model.add_adapter(LoraConfig(target_modules=["q_proj"]), adapter_name="own")
    assert is_peft_model(model) and not is_peft_model(tiny.FAMILIES["llama"]())
    base, adapter = unwrap_peft_model(model)
    assert base is model and adapter.name == "own" and adapter.config.r == 8


def lay_out(kind: str) -> None:
    runs.make_trainer("llama", {LM: {"pp_size": 2}}, model=with_adapter(kind))


@pytest.mark.distributed
def test_every_rank_refuses_before_anything_is_built():
    assert_ranks_raise(lay_out, 2, "PrefixTuningConfig", match="`PrefixTuningConfig`")


def test_a_model_with_adapters_gets_no_more():
    more = MultimodalParallelPlugin({LM: ModulePlugin(peft_config={"r": 2})})
    with pytest.raises(ValueError, match=f"`peft_config` of module `{LM}`"):
        adapter_configs(with_adapter("plain"), more)


def test_all_sizes_one_is_the_stock_trainer_for_every_kind():
    for kind in ("IA3Config", "PrefixTuningConfig", "several", "plain"):
        logs = []
        for ours in (False, True):
            set_seed(5)
            arguments = {**runs.COMMON, "per_device_train_batch_size": 4, "max_steps": 2}
            given: dict[str, Any] = {
                "model": with_adapter(kind),
                "train_dataset": tiny.make_dataset("llama", 8),
                "data_collator": tiny.collate("llama"),
            }
            folder = run_folder()
            if ours:
                args = MultimodalTrainingArguments(output_dir=folder, parallel={LM: {}}, **arguments)
                trainer: Any = MultimodalParallelTrainer(args=args, **given)
            else:
                trainer = Trainer(args=TrainingArguments(output_dir=folder, **arguments), **given)
            trainer.train()
            logs.append(runs.step_logs(trainer))
        assert logs[0] == logs[1], kind


def train_with_biases() -> Any:
    """Logs and weights of biased adapters of column-parallel and row-parallel layers; SGD, which hides no scale."""
    sizes = {VISION: {"tp_size": 2}, LM: {"tp_size": 2}}
    return trained_run(runs.make_trainer("llava", sizes, model=biased(), learning_rate=0.1))


def biased() -> Any:
    return adapted(target_modules=["q_proj", "o_proj", "fc1"], lora_bias=True)


@pytest.mark.distributed
@pytest.mark.deep
def test_biases_of_adapters_follow_the_layers_that_they_adapt():
    """They were whole tensors beside shards: `aten.addmm.default got mixed torch.Tensor and DTensor`."""
    logs, weights = run_distributed(train_with_biases, 4, timeout=120)[0]
    stock = runs.stock_trainer(model=biased(), learning_rate=0.1)
    stock.train()
    want = trained(stock.model)
    assert any(name.endswith("lora_B.bias") and tensor.abs().max() > 1e-4 for name, tensor in want.items())
    assert_close(weights, want)
    assert [log["loss"] for log in logs] == pytest.approx([log["loss"] for log in runs.step_logs(stock)], rel=2e-5)
