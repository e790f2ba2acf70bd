"""A run moves between the stock Trainer and plans with its weights, its optimizer and its schedule."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

LM = "language_model"
PLANS = {"pp2": (2, {LM: {"pp_size": 2}}), "tp2": (2, {LM: {"tp_size": 2}}), "dp2": (2, {LM: {"dp_size": 2}})}
SAVING = {
    "save_strategy": "steps",
    "save_steps": 1,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "max_steps": 4,
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}


def _stock(folder: Path, resume: Path | None = None, lora: bool = False, **arguments: Any) -> list[dict[str, float]]:
    """Logs of a run of `transformers.Trainer`."""
    model: Any = tiny.FAMILIES["llama_tied"]()
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(**LORA))
        _set_adapters(model)
    data: Any = tiny.make_dataset("llama_tied", runs.SAMPLES)
    args = {**runs.COMMON, **SAVING, "per_device_train_batch_size": runs.GLOBAL_BATCH, **arguments}
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **args),
        train_dataset=data,
        data_collator=tiny.collate("llama_tied"),
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return runs.step_logs(trainer)


def _set_adapters(model: Any) -> None:
    """Adapters that two libraries would draw differently."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def _planned(
    folder: Path, plan: dict[str, Any], resume: Path | None = None, lora: bool = False, **arguments: Any
) -> list[dict[str, float]]:
    """Logs of a run under a plan."""
    if lora:
        plan = {LM: {**plan[LM], "peft_config": LORA}}
    trainer = runs.make_trainer("llama_tied", plan, str(folder), **{**SAVING, **arguments})
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return runs.step_logs(trainer)


def _assert_equal_steps(got: list[dict[str, float]], want: list[dict[str, float]], rtol: float = 1e-4) -> None:
    assert len(got) == len(want) == 4
    for mine, its in zip(got, want, strict=True):
        assert mine == pytest.approx(its, rel=rtol), (got, want)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """A run of the stock Trainer with a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("stock")
    return folder / "checkpoint-2", _stock(folder)


@pytest.mark.parametrize("layout", [deep(name, unless=name == "pp2") for name in PLANS])
def test_a_stock_run_goes_on_under_a_plan_and_back(tmp_path: Path, straight, layout: str):
    checkpoint, want = straight
    size, plan = PLANS[layout]
    planned = run_distributed(_planned, size, tmp_path, plan, checkpoint)[0]
    _assert_equal_steps(planned, want)
    _assert_equal_steps(_stock(tmp_path / "back", tmp_path / "checkpoint-3"), want)
    saved = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)
    stock = torch.load(checkpoint.parent / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert [group["params"] for group in saved["param_groups"]] == [group["params"] for group in stock["param_groups"]]
    assert saved["state"].keys() == stock["state"].keys()
    for index, entries in stock["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(saved["state"][index][key], value, rtol=1e-3, atol=1e-6)


def test_a_run_with_adapters_moves_both_ways(tmp_path: Path):
    want = _stock(tmp_path / "stock", lora=True)
    plan = {LM: {"tp_size": 2}}
    planned = run_distributed(_planned, 2, tmp_path, plan, tmp_path / "stock" / "checkpoint-2", lora=True)[0]
    _assert_equal_steps(planned, want)
    _assert_equal_steps(_stock(tmp_path / "back", tmp_path / "checkpoint-3", lora=True), want)


class _Touches:
    """What a pickle would execute."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _refusals(folders: dict[str, Path], plan: dict[str, Any] | None) -> dict[str, str]:
    """Damage -> why a run does not go on from the checkpoint."""
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
    _planned(tmp_path, PLANS["pp2"][1], max_steps=2, save_steps=2)
    planned = tmp_path / "checkpoint-2"
    whole, schedule = ((planned / name).read_bytes() for name in ("optimizer.pt", "scheduler.pt"))
    saved: Any = {"state": {}, "param_groups": [_Touches(tmp_path / "executed")]}
    contents: dict[str, tuple[str, bytes | None]] = {
        "cut in the middle": ("optimizer.pt", whole[: len(whole) // 2]),
        "without its end": ("optimizer.pt", whole[:-8]),
        "the stock Trainer's, cut": ("optimizer.pt", (stock / "optimizer.pt").read_bytes()[:-4096]),
        "empty": ("optimizer.pt", b""),
        "a text": ("optimizer.pt", b"version https://git-lfs.github.com/spec/v1\nsize 12\n"),
        "a plain pickle that calls": ("optimizer.pt", pickle.dumps(saved)),
        "an archive that calls": ("optimizer.pt", None),
        "a schedule, cut": ("scheduler.pt", schedule[: len(schedule) // 2]),
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
    return folders, _refusals(folders, PLANS["pp2"][1])


def test_state_that_is_damaged_of_another_model_or_executes_code_is_refused(tmp_path: Path, straight):
    """By all ranks of a plan, and, where it is the optimizer's, by one process."""
    (folders, first), (_, second) = run_distributed(_damaged, 2, tmp_path, straight[0])
    assert first == second and first.keys() == folders.keys()
    assert "another model: it has" in first.pop("other frozen parts")
    of_schedules = {name: first.pop(name) for name in ("a schedule, cut", "a schedule that calls")}
    assert all("scheduler.pt" in said for said in of_schedules.values()), of_schedules
    for found in (first, *run_distributed(_refusals, 1, {name: folders[name] for name in first}, None)):
        assert found.keys() == first.keys() and all("optimizer.pt` is no" in said for said in found.values()), found
    assert not (tmp_path / "executed").exists()
