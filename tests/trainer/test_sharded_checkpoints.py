"""Runs of the stock Trainer under FSDP2 and DeepSpeed go on under plans."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import Tensor

from tests import tiny
from tests.distributed import assert_ranks_raise, run_distributed

from . import engines, runs

pytestmark = pytest.mark.distributed

LM = "language_model"
FAMILY = "llama_tied"
SAMPLES = 4 * runs.GLOBAL_BATCH
"""An epoch of whole global batches: of a smaller last one, several ranks of the stock Trainer repeat samples."""
SAVING = {
    "save_strategy": "steps",
    "save_steps": 2,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "max_steps": 4,
}
FORMS = {
    "FSDP2, full": ("fsdp2", {"state_dict_type": "FULL_STATE_DICT"}),
    "FSDP2, sharded": ("fsdp2", {"state_dict_type": "SHARDED_STATE_DICT"}),
    "DeepSpeed, stage 1": ("zero1", {}),
    "DeepSpeed, stage 2": ("zero2", {}),
    "DeepSpeed, stage 3": ("zero3", {}),
}
TWO: dict[str, Any] = {"dp_size": 2}
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "FSDP2, full": [{**TWO, "zero_stage": 1}],
    "FSDP2, sharded": [{"tp_size": 2}, {**TWO, "zero_stage": 2}, {**TWO, "zero_stage": 3}],
    "DeepSpeed, stage 1": [{**TWO, "zero_stage": 1}],
    "DeepSpeed, stage 2": [{"pp_size": 2}, {**TWO, "zero_stage": 2}],
    "DeepSpeed, stage 3": [{"tp_size": 2}, {**TWO, "zero_stage": 3}],
}
"""Layouts of the language model on two ranks."""


def _stock(folder: Path, engine: str, fsdp_config: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Logs and weights of a run of the stock Trainer on this rank, with a checkpoint in the middle."""
    chosen = dict(engines.arguments_of(engine))
    if engine == "fsdp2":
        chosen["fsdp_config"] = {**chosen["fsdp_config"], **fsdp_config}
    if engine == "zero3":  # its default, with which no file has whole weights
        zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
        chosen["deepspeed"] = {**chosen["deepspeed"], "zero_optimization": zero}
    arguments = {**runs.COMMON, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **chosen, **SAVING}
    trainer = transformers.Trainer(
        model=tiny.FAMILIES[FAMILY](),
        args=transformers.TrainingArguments(output_dir=str(folder), ddp_backend="gloo", **arguments),
        train_dataset=tiny.make_dataset(FAMILY, SAMPLES),
        data_collator=tiny.collate(FAMILY),
    )
    trainer.train()
    if engine != "zero3":
        return runs.step_logs(trainer), engines.whole_weights(trainer)
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
        weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return runs.step_logs(trainer), weights


def _planned(folder: Path, plan: dict[str, Any], checkpoint: Path) -> runs.Run:
    """A run under a plan that goes on from a checkpoint."""
    data = tiny.make_dataset(FAMILY, SAMPLES)
    trainer = runs.make_trainer(FAMILY, plan, str(folder), **{**SAVING, "save_strategy": "no", "data": data})
    return runs.run_of(trainer, checkpoint=str(checkpoint))


def _convert(checkpoint: Path) -> None:
    """Adds the universal form to a checkpoint of DeepSpeed by the command that the refusal names."""
    step = checkpoint / "global_step2"
    words = ["--inject_missing_state", "--input_folder", str(step), "--output_folder", f"{step}_universal"]
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words],
        check=True,
        capture_output=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", FORMS)
def test_a_sharded_run_of_the_stock_trainer_goes_on_under_a_plan(tmp_path: Path, form: str):
    logs, weights = run_distributed(_stock, 2, tmp_path, *FORMS[form])[0]
    checkpoint = tmp_path / "checkpoint-2"
    plans = [{LM: layout} for layout in LAYOUTS[form]]
    if form.startswith("DeepSpeed"):
        match = re.escape("python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder")
        assert_ranks_raise(_planned, 2, tmp_path / "refused", plans[0], checkpoint, match=match)
        _convert(checkpoint)
    shutil.rmtree(tmp_path / "checkpoint-4")
    for index, plan in enumerate(plans):
        run = run_distributed(_planned, 2, tmp_path / f"planned-{index}", plan, checkpoint)[0]
        runs.assert_same_run(run, runs.Run(logs, {**(run.weights or {}), **weights}), rtol=1e-4, atol=2e-5)
        assert weights.keys() >= (run.weights or {}).keys() - {"lm_head.weight"}
