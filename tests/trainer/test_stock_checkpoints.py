"""A run moves between the stock Trainer and plans with its weights, its optimizer and its schedule."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_mmparallel.runtime.sharded_files import sharded_files
from tests import tiny
from tests.distributed import run_distributed

from . import engines, runs

pytestmark = pytest.mark.distributed

LM = "language_model"
PP2 = {LM: {"pp_size": 2}}
SAVING = {
    "save_strategy": "steps",
    "save_steps": 1,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}


def _stock(folder: Path, resume: Path | None = None, lora: bool = False) -> list[dict[str, float]]:
    model: Any = tiny.FAMILIES["llama_tied"]()
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**LORA))
    trainer = runs.stock_trainer("llama_tied", str(folder), model=model, **SAVING)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return runs.step_logs(trainer)


def _planned(
    folder: Path, plan: dict[str, Any], resume: Path | None = None, **arguments: Any
) -> list[dict[str, float]]:
    trainer = runs.make_trainer("llama_tied", plan, str(folder), **{**SAVING, **arguments})
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return runs.step_logs(trainer)


def _assert_equal_steps(got: list[dict[str, float]], want: list[dict[str, float]]) -> None:
    assert len(got) == len(want) == 4
    for mine, its in zip(got, want, strict=True):
        assert mine == pytest.approx(its, rel=1e-4), (got, want)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """A run of the stock Trainer with a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("stock")
    return folder / "checkpoint-2", _stock(folder)


def test_a_stock_run_goes_on_under_a_plan_and_back(tmp_path: Path, straight):
    checkpoint, want = straight
    _assert_equal_steps(run_distributed(_planned, 2, tmp_path, PP2, checkpoint)[0], want)
    _assert_equal_steps(_stock(tmp_path / "back", tmp_path / "checkpoint-3"), want)
    saved = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)
    stock = torch.load(checkpoint.parent / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert [group["params"] for group in saved["param_groups"]] == [group["params"] for group in stock["param_groups"]]
    assert saved["state"].keys() == stock["state"].keys()
    for index, entries in stock["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(saved["state"][index][key], value, rtol=1e-3, atol=1e-6)


@pytest.mark.deep
def test_a_run_with_adapters_moves_both_ways(tmp_path: Path):
    want = _stock(tmp_path / "stock", lora=True)
    plan = {LM: {"tp_size": 2, "peft_config": LORA}}
    planned = run_distributed(_planned, 2, tmp_path, plan, tmp_path / "stock" / "checkpoint-2")[0]
    _assert_equal_steps(planned, want)
    _assert_equal_steps(_stock(tmp_path / "back", tmp_path / "checkpoint-3", lora=True), want)


class _Touches:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _refusals(folders: dict[str, Path], plan: dict[str, Any] | None) -> dict[str, str]:
    found = {}
    for damage, folder in folders.items():
        frozen = {LM: {"pp_size": 2, "freeze": "embed_tokens"}} if damage == "other frozen parts" else plan
        trainer = runs.make_trainer("llama_tied", frozen, str(folder / "run"), **{**SAVING, "save_strategy": "no"})
        try:
            trainer.train(resume_from_checkpoint=str(folder))
        except ValueError as error:
            found[damage] = str(error)
    return found


def _damaged(tmp_path: Path, stock: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Folders with a file that is damaged or executes code, and what is said of them."""
    _planned(tmp_path, PP2, max_steps=2, save_steps=2)
    planned = tmp_path / "checkpoint-2"
    saved: Any = {"state": {}, "param_groups": [_Touches(tmp_path / "executed")]}
    contents: dict[str, tuple[str, bytes | None]] = {
        "the stock Trainer's, cut": ("optimizer.pt", (stock / "optimizer.pt").read_bytes()[:-4096]),
        "a plain pickle that calls": ("optimizer.pt", pickle.dumps(saved)),
        "an archive that calls": ("optimizer.pt", None),
        "a schedule that calls": ("scheduler.pt", None),
        "other frozen parts": ("optimizer.pt", (stock / "optimizer.pt").read_bytes()),
    }
    folders = {damage: tmp_path / damage.replace(" ", "-") for damage in contents}
    if dist.get_rank() == 0:
        for damage, (name, content) in contents.items():
            shutil.copytree(planned, folders[damage])
            file = folders[damage] / name
            torch.save(saved, file) if content is None else file.write_bytes(content)
    dist.barrier()
    return folders, _refusals(folders, PP2)


@pytest.mark.deep
def test_state_that_is_damaged_of_another_model_or_executes_code_is_refused(tmp_path: Path, straight):
    """By all ranks of a plan, and, where it is the optimizer's, by one process."""
    (folders, first), (_, second) = run_distributed(_damaged, 2, tmp_path, straight[0])
    assert first == second and first.keys() == folders.keys()
    assert "another model: it has" in first.pop("other frozen parts")
    assert "scheduler.pt" in first.pop("a schedule that calls")
    for found in (first, *run_distributed(_refusals, 1, {name: folders[name] for name in first}, None)):
        assert found.keys() == first.keys() and all("optimizer.pt` is no" in said for said in found.values()), found
    assert not (tmp_path / "executed").exists()


# Sharded files of the stock Trainer under FSDP2 and DeepSpeed

EVEN = 4 * runs.GLOBAL_BATCH
"""An epoch of whole global batches: of a smaller last one, several ranks of the stock Trainer repeat samples."""
BY_TWO = {**SAVING, "save_steps": 2}
TP, PP = {"tp_size": 2}, {"pp_size": 2}
ZERO_2, ZERO_3 = ({"dp_size": 2, "zero_stage": stage} for stage in (2, 3))
FORMS: dict[str, tuple[str, str, list[dict[str, int]]]] = {
    "FSDP2, full": ("fsdp2", "FULL_STATE_DICT", [ZERO_2]),
    "FSDP2, sharded": ("fsdp2", "SHARDED_STATE_DICT", [TP, ZERO_3]),
    "DeepSpeed, stage 2": ("zero2", "", [PP]),
    "DeepSpeed, stage 3": ("zero3", "", [ZERO_3]),
}
"""Name -> engine, form of FSDP2's files, and layouts of the language model on two ranks."""


def _sharded_stock(
    folder: Path, engine: str, state_dict_type: str
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Logs and weights of a run of the stock Trainer on this rank, with a checkpoint in the middle."""
    chosen = dict(engines.arguments_of(engine))
    if engine == "fsdp2":
        chosen["fsdp_config"] = {**chosen["fsdp_config"], "state_dict_type": state_dict_type}
    if engine == "zero3":  # its default, with which no file has whole weights
        zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
        chosen["deepspeed"] = {**chosen["deepspeed"], "zero_optimization": zero}
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **chosen, **BY_TWO}
    data = tiny.make_dataset("llama_tied", EVEN)
    trainer = runs.stock_trainer("llama_tied", str(folder), data=data, ddp_backend="gloo", **arguments)
    trainer.train()
    if engine != "zero3":
        return runs.step_logs(trainer), engines.whole_weights(trainer)
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
        weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return runs.step_logs(trainer), weights


def _all_planned(layouts: list[dict[str, int]], checkpoint: Path) -> list[runs.Run]:
    given = {**BY_TWO, "save_strategy": "no", "data": tiny.make_dataset("llama_tied", EVEN)}
    trainers = (runs.make_trainer("llama_tied", {LM: layout}, **given) for layout in layouts)
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
@pytest.mark.parametrize("form", runs.deep_but(FORMS))
def test_a_sharded_run_of_the_stock_trainer_goes_on_under_a_plan(tmp_path: Path, form: str):
    engine, state_dict_type, layouts = FORMS[form]
    logs, weights = run_distributed(_sharded_stock, 2, tmp_path, engine, state_dict_type)[0]
    checkpoint = tmp_path / "checkpoint-2"
    if form.startswith("DeepSpeed"):
        with pytest.raises(ValueError, match="deepspeed.checkpoint.ds_to_universal --inject_missing_state"):
            sharded_files(checkpoint)
        _convert(checkpoint)
    shutil.rmtree(tmp_path / "checkpoint-4")
    for run in run_distributed(_all_planned, 2, layouts, checkpoint)[0]:
        runs.assert_same_run(run, runs.Run(logs, {**(run.weights or {}), **weights}), rtol=1e-4, atol=2e-5)
        assert weights.keys() >= (run.weights or {}).keys() - {"lm_head.weight"}
