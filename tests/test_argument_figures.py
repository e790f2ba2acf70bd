"""The tables of `docs/arguments.md` have every argument, and say of LoRA what the package does."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import config as lora

from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.adapter import add_adapters, unwrap_peft_model
from tests import tiny

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import argument_figures as figures  # noqa: E402

LM = "language_model"
# A value of each setting that is not its default
VALUES: dict[str, Any] = {
    "r": 4, "target_modules": ["v_proj"], "exclude_modules": ["v_proj"], "lora_alpha": 4, "lora_dropout": 0.1,
    "fan_in_fan_out": True, "bias": "all", "use_rslora": True, "modules_to_save": ["lm_head"],
    "init_lora_weights": "pissa", "layers_to_transform": [0], "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2}, "trainable_token_indices": [1], "use_dora": True, "lora_bias": True,
    "alora_invocation_tokens": [1], "qalora_group_size": 4, "layer_replication": [[0, 2], [1, 2]],
    "target_parameters": ["lm_head.weight"], "ensure_weight_tying": True, "task_type": "CAUSAL_LM",
    "revision": "main", "base_model_name_or_path": "x", "inference_mode": True, "use_qalora": True,
    "eva_config": lora.EvaConfig(), "corda_config": lora.CordaConfig(), "lora_ga_config": lora.LoraGAConfig(),
    "velora_config": lora.VeloraConfig(), "monteclora_config": lora.MontecloraConfig(),
    "kasa_config": lora.KasaConfig(), "runtime_config": lora.LoraRuntimeConfig(ephemeral_gpu_offload=True),
}  # fmt: skip
NOT_BUILT = {
    "peft_type", "auto_mapping", "peft_version", "layers_pattern", "megatron_config", "megatron_core", "loftq_config",
    "use_bdlora", "arrow_config",
}  # fmt: skip
"""Settings that describe a saved adapter, or need other packages, adapters or other settings."""


@pytest.mark.parametrize("name", figures.BLOCKS)
def test_every_argument_has_been_looked_at(name: str, monkeypatch: pytest.MonkeyPatch):
    """One that a new version of transformers or peft adds has to be classified."""
    assert figures.NOT_LOOKED_AT not in figures.BLOCKS[name]()
    monkeypatch.setattr(figures, "LORA_AS_PEFT", set())
    monkeypatch.setattr(figures, "AS_STOCK", set())
    monkeypatch.setattr(figures, "TRAINER_AS_STOCK", set())
    assert name == "adapter_types" or figures.NOT_LOOKED_AT in figures.BLOCKS[name]()


def test_every_setting_of_lora_has_a_value_here():
    assert {*VALUES, *NOT_BUILT} == {field.name for field in fields(LoraConfig)} and not NOT_BUILT & VALUES.keys()


def holds(work: Any) -> bool:
    try:
        work()
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", VALUES)
def test_settings_of_lora_are_refused_where_the_table_says_so(name: str):
    def config() -> LoraConfig:
        return LoraConfig(**{"target_modules": ["q_proj", "v_proj"], name: VALUES[name]})

    model: Any = tiny.FAMILIES["llama"]()
    found = [holds(lambda: add_adapters(model, build_model_spec(model), {LM: config()}))]
    wrapped = get_peft_model(tiny.FAMILIES["llama"](), config())
    found.append(holds(lambda: unwrap_peft_model(wrapped)))
    assert found == ["refused" not in cell.partition(";")[0] for cell in figures.lora_treatment(name)]
