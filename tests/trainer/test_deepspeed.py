"""Modules with a DeepSpeed configuration train as the stock Trainer does, and it agrees with the arguments."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.plan import ModulePlugin
from hf_mmparallel.plan.other_configs import KEYS
from hf_mmparallel.trainer import engine_state
from hf_mmparallel.trainer.arguments import check_global_batch, check_optimizer_class
from tests import tiny
from tests.distributed import run_distributed

from . import contexts, runs

VISION, LM = "vision", "language_model"
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}


def config(stage: int, **sections: Any) -> dict[str, Any]:
    """A configuration in which everything that the arguments have is theirs."""
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    return {
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": params},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        **sections,
    }


def noting_logger(texts: list[str]) -> Any:
    """A logger of the Trainer that keeps its warnings."""
    logger: Any = copy.copy(engine_state.logger)
    logger.warning = texts.append
    return logger


def sharded_run() -> tuple[runs.Run, list[str]]:
    """A run whose plan has what the configurations ask for, one of them of a module without copies; its warnings."""
    engine_state.logger = noting_logger(texts := [])  # type: ignore[assignment]
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    copies = {"dp_size": 2, "deepspeed": config(2, zero_optimization=zero)}
    trainer = runs.make_trainer("llava", {VISION: {"deepspeed": config(2)}, LM: copies}, **ADAMW)
    for name, module in trainer.plan.modules.items():
        assert module.sharding.zero_stage == 2 and module.storage.offload_optimizer == (name == LM)
    return runs.run_of(trainer), texts


@pytest.mark.distributed
def test_a_layout_equals_the_stock_trainer_and_tells_what_has_no_effect():
    (run, texts), *others = run_distributed(sharded_run, 3)
    runs.assert_same_run(run, runs.stock("llava", **ADAMW))
    assert all(other.logs == run.logs for other, _ in others)
    assert any(f"`zero_stage=2` of `{VISION}`" in text for text in texts)
    assert any("`zero_optimization.overlap_comm`, `zero_optimization.reduce_bucket_size`." in text for text in texts)


def arguments(deepspeed: dict[str, Any], **given: Any) -> MultimodalTrainingArguments:
    """Arguments with a configuration of the language model."""
    return contexts.arguments(parallel={LM: {"deepspeed": deepspeed}}, **given)


@pytest.mark.parametrize(
    ("deepspeed", "value"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, "per_device_train_batch_size=8"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=1"),
        ({"gradient_clipping": 0.5}, "max_grad_norm=1.0"),
        ({"bf16": {"enabled": True}}, "bf16=False"),
        ({"optimizer": {"params": {"lr": 1e-3}}}, "learning_rate=5e-05"),
        ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, "adam_beta2=.0.9, 0.999."),
        ({"optimizer": {"params": {"eps": 1e-6}}}, "adam_epsilon=1e-08"),
        ({"optimizer": {"params": {"weight_decay": 0.1}}}, "weight_decay=0.0"),
    ],
)
def test_values_of_the_arguments_are_not_contradicted(deepspeed: dict[str, Any], value: str):
    with pytest.raises(ValueError, match=f"`{LM}` .*`{value}`"):
        arguments(deepspeed)


def test_values_that_agree_pass():
    arguments({"gradient_clipping": 1, "optimizer": {"params": {"betas": (0.9, 0.999), "lr": 5e-5}}})
    arguments({"zero_optimization": {"stage": 2}}, optim="sgd")
    with pytest.raises(ValueError, match="`optim='sgd'`"):
        arguments({"optimizer": {"type": "AdamW"}}, optim="sgd")


def test_an_optimizer_class_beside_that_of_the_configuration_is_refused():
    given = {"optimizer_cls_and_kwargs": (object, {})}
    check_optimizer_class({LM: ModulePlugin(deepspeed={})}, given)
    with pytest.raises(ValueError, match="`optimizer_cls_and_kwargs`"):
        check_optimizer_class({LM: ModulePlugin(deepspeed=config(1))}, given)


def test_one_process_checks_the_global_batch():
    check_global_batch({LM: ModulePlugin(deepspeed={"train_batch_size": 8})}, 8)
    args = arguments({"train_batch_size": 16}, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="`train_batch_size=16`.*`global_batch_size=8`"):
        MultimodalParallelTrainer(model=tiny.FAMILIES["llava"](), args=args)


def test_a_stage_without_copies_is_told_of_on_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_state, "logger", noting_logger(texts := []))
    args = MultimodalTrainingArguments(str(tmp_path), parallel={LM: {"zero_stage": 2}}, use_cpu=True, report_to=[])
    MultimodalParallelTrainer(model=tiny.FAMILIES["llava"](), args=args)
    assert len(texts) == 1 and f"`zero_stage=2` of `{LM}`" in texts[0]


def test_every_key_of_deepspeed_is_known():
    """The sections that DeepSpeed describes by classes; one that is new there is honoured, idle or refused here."""
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    precision = importlib.import_module("deepspeed.runtime.precision_config")
    sections = {
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": zero.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": zero.DeepSpeedZeroOffloadParamConfig,
        "bf16": precision.DeepSpeedBF16Config,
        "fp16": precision.DeepSpeedFP16Config,
    }
    for section, described in sections.items():
        there = {field.alias or name for name, field in described.model_fields.items()}
        prefix = f"{section}."
        here = {key.removeprefix(prefix).partition(".")[0] for key in KEYS if key.startswith(prefix)}
        assert there == here, section
