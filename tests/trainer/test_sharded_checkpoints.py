"""Runs of the stock Trainer under FSDP2 and DeepSpeed go on under plans."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

from hf_mmparallel.runtime.sharded_files import sharded_files
from tests import tiny
from tests.distributed import run_distributed

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
TP, PP = {"tp_size": 2}, {"pp_size": 2}
ZERO_1, ZERO_2, ZERO_3 = ({"dp_size": 2, "zero_stage": stage} for stage in (1, 2, 3))
FORMS: dict[str, tuple[str, str, list[dict[str, int]]]] = {
    "FSDP2, full": ("fsdp2", "FULL_STATE_DICT", [ZERO_1]),
    "FSDP2, sharded": ("fsdp2", "SHARDED_STATE_DICT", [TP, ZERO_2, ZERO_3]),
    "DeepSpeed, stage 1": ("zero1", "", [ZERO_1]),
    "DeepSpeed, stage 2": ("zero2", "", [PP, ZERO_2]),
    "DeepSpeed, stage 3": ("zero3", "", [TP, ZERO_3]),
}
"""Name -> engine, form of FSDP2's files, and layouts of the language model on two ranks."""


def _stock(folder: Path, engine: str, state_dict_type: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Logs and weights of a run of the stock Trainer on this rank, with a checkpoint in the middle."""
    chosen = dict(engines.arguments_of(engine))
    if engine == "fsdp2":
        chosen["fsdp_config"] = {**chosen["fsdp_config"], "state_dict_type": state_dict_type}
    if engine == "zero3":  # its default, with which no file has whole weights
        zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
        chosen["deepspeed"] = {**chosen["deepspeed"], "zero_optimization": zero}
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **chosen, **SAVING}
    data = tiny.make_dataset(FAMILY, SAMPLES)
    trainer = runs.stock_trainer(FAMILY, str(folder), data=data, ddp_backend="gloo", **arguments)
    trainer.train()
    if engine != "zero3":
        return runs.step_logs(trainer), engines.whole_weights(trainer)
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
        weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return runs.step_logs(trainer), weights


def _planned(layouts: list[dict[str, int]], checkpoint: Path) -> list[runs.Run]:
    """Runs under plans that go on from a checkpoint."""
    given = {**SAVING, "save_strategy": "no", "data": tiny.make_dataset(FAMILY, SAMPLES)}
    trainers = (runs.make_trainer(FAMILY, {LM: layout}, **given) for layout in layouts)
    return [runs.run_of(trainer, checkpoint=str(checkpoint)) for trainer in trainers]


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
@pytest.mark.parametrize("form", runs.deep_but(FORMS, "FSDP2, sharded", "DeepSpeed, stage 2"))
def test_a_sharded_run_of_the_stock_trainer_goes_on_under_a_plan(tmp_path: Path, form: str):
    engine, state_dict_type, layouts = FORMS[form]
    logs, weights = run_distributed(_stock, 2, tmp_path, engine, state_dict_type)[0]
    checkpoint = tmp_path / "checkpoint-2"
    if form.startswith("DeepSpeed"):
        with pytest.raises(ValueError, match="deepspeed.checkpoint.ds_to_universal --inject_missing_state"):
            sharded_files(checkpoint)
        _convert(checkpoint)
    shutil.rmtree(tmp_path / "checkpoint-4")
    for run in run_distributed(_planned, 2, layouts, checkpoint)[0]:
        runs.assert_same_run(run, runs.Run(logs, {**(run.weights or {}), **weights}), rtol=1e-4, atol=2e-5)
        assert weights.keys() >= (run.weights or {}).keys() - {"lm_head.weight"}
