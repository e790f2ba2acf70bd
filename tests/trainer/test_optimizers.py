"""Optimizers of `args.optim` under plans: as on one process, or refused before the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_mmparallel.trainer import recovery_plan
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

LM = "language_model"
TP2, PP2 = {LM: {"tp_size": 2}}, {LM: {"pp_size": 2}}
ADAM_8BIT = {"optim": "adamw_bnb_8bit", "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}


def _train(folder: Path, parallel: dict[str, Any] | None, resume: str | None = None, **arguments: Any) -> runs.Run:
    return runs.run_of(runs.make_trainer("llama", parallel, str(folder), **arguments), checkpoint=resume)


def _losses(run: runs.Run) -> list[float]:
    return [row["loss"] for row in run.logs]


def _refusals(folder: Path, attempts: dict[str, tuple[dict[str, Any], str | None, dict[str, Any]]]) -> dict[str, str]:
    """Name -> what this rank says of a run that can't be: its layout, checkpoint and arguments."""
    said = {}
    for name, (parallel, resume, arguments) in attempts.items():
        with pytest.raises(ValueError) as error:
            _train(folder / name, parallel, resume, **arguments)
        said[name] = str(error.value)
    return said


def _straight_resumed_moved(folder: Path, stock: str) -> tuple[runs.Run, runs.Run, runs.Run, dict[str, str]]:
    """A run on shards, one that goes on from it, one that goes on from the stock Trainer's, and what is refused."""
    straight, own = _train(folder, TP2, **ADAM_8BIT), str(folder / "checkpoint-2")
    resumed = _train(folder / "again", TP2, own, **ADAM_8BIT)
    moved = _train(folder / "moved", PP2, stock, **ADAM_8BIT)
    said = _refusals(folder, {"pp": (PP2, own, ADAM_8BIT), "cut": (TP2, stock, ADAM_8BIT)})
    return straight, resumed, moved, said


@pytest.mark.deep
def test_8_bit_adam_runs_on_shards_and_goes_on(tmp_path: Path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes has the 8-bit optimizers")
    stock = runs.stock("llama", **ADAM_8BIT, output_dir=str(tmp_path / "stock"))
    whole = str(tmp_path / "stock" / "checkpoint-2")
    ranks = run_distributed(_straight_resumed_moved, 2, tmp_path, whole)
    straight, resumed, moved, _ = ranks[0]
    assert _losses(straight) == pytest.approx(_losses(stock), rel=2e-4)  # blocks of 256 values end at the cuts
    checkpoint = tmp_path / "checkpoint-2"
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    assert any(entry["state1"].dtype == torch.uint8 for entry in saved.values())
    runs.assert_same_run(resumed, straight, 0, 0)
    assert all("Resume with the same `tp_size`" in text for *_, said in ranks for text in said.values())
    trainer = runs.stock_trainer("llama", **ADAM_8BIT)
    with pytest.raises(ValueError, match="parameter groups"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert _losses(moved) == pytest.approx(_losses(stock), rel=1e-5)


# Optimizer of bitsandbytes -> the largest share of the way that weights may end elsewhere than on one process
BITSANDBYTES = {"ademamix": 2e-5, "lion_32bit": 2e-5, "paged_adamw_8bit": 2e-2, "adamw_bnb_8bit": 2e-2}
TWO_STEPS = {"learning_rate": 1e-3, "max_steps": 2, "warmup_steps": 0, "lr_scheduler_type": "constant"}


def _train_each(parallel: dict[str, Any]) -> dict[str, runs.Run]:
    return {name: runs.parallel_run("llama", parallel, optim=name, **TWO_STEPS) for name in BITSANDBYTES}


@pytest.mark.deep
def test_optimizers_of_bitsandbytes_move_weights_as_on_one_process():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes has these optimizers")
    start = tiny.FAMILIES["llama"]().state_dict()
    found = run_distributed(_train_each, 2, TP2)[0]
    for name, share in BITSANDBYTES.items():
        want, got = runs.stock("llama", optim=name, **TWO_STEPS), found[name]
        assert got.weights is not None and want.weights is not None
        assert _losses(got) == pytest.approx(_losses(want), rel=2e-4)
        for key, end in want.weights.items():
            moved = float((end - start[key]).abs().sum())
            assert moved > 0, (name, key)
            assert float((got.weights[key] - end).abs().sum()) <= share * moved, (name, key)


BY_MATRIX = {
    "grokadamw.GrokAdamW": {"optim": "grokadamw"},
    "apollo_torch.AdamW": {"optim": "apollo_adamw", "optim_target_modules": "all-linear"},
}


def test_optimizers_by_matrix_are_refused_under_tensor_parallelism(tmp_path: Path):
    for cls in BY_MATRIX:
        pytest.importorskip(cls.partition(".")[0])
    attempts = {cls: (TP2, None, {**arguments, **TWO_STEPS}) for cls, arguments in BY_MATRIX.items()}
    for said in run_distributed(_refusals, 2, tmp_path, attempts):
        assert all(f"`{cls}`" in said[cls] and "`tp_size`" in said[cls] for cls in BY_MATRIX)


def _prepare_for_later_plans(*plans: Any) -> list[dict[str, str]]:
    return [_prepare_for_plans_after(plan) for plan in plans]


def _prepare_for_plans_after(settings: Any) -> dict[str, str]:
    """What each optimizer says on a rank of copies of the whole model, which later plans may cut; empty if nothing."""
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery_plan._environment, "launch_settings", lambda: {"id": 0})
        for name in ("adafactor", "adamw_torch"):
            resilience = {"failures": 1, "ranks_per_node": 2}
            trainer = runs.make_trainer("llama", settings, optim=name, resilience=resilience)
            trainer.create_optimizer_and_scheduler(1)
            try:
                trainer._run.prepare_optimizer(trainer.optimizer)
            except ValueError as error:
                said[name] = str(error)
    return said


@pytest.mark.deep
def test_an_optimizer_that_a_plan_after_a_loss_could_not_use_is_refused_before_the_first_step():
    whole = {"auto": True, "modules": {LM: {"tp_size": 1}}}  # whose templates cut no matrix
    for said, of_whole in run_distributed(_prepare_for_later_plans, 4, "auto", whole):
        assert set(said) == {"adafactor"} and "`tp_size=1`" in said["adafactor"] and of_whole == {}


def _given() -> dict[str, Any]:
    """A model, and an optimizer of three groups with its schedule, all made before the Trainer."""
    model = tiny.FAMILIES["llava"]()
    vision, rest = ([p for n, p in model.named_parameters() if ("vision" in n) == own] for own in (True, False))
    groups = [{"params": vision, "lr": 2e-3}, {"params": rest[::2], "weight_decay": 0.3}, {"params": rest[1::2]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)
    return {"model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4))}


def _train_with_given(checkpoint: str | None) -> runs.Run:
    return runs.run_of(runs.make_trainer("llava", TP2, **_given()), checkpoint=checkpoint)


@pytest.mark.parametrize("resumes", [False, deep(True)])
def test_an_optimizer_made_before_the_trainer_steps_as_on_one_process(tmp_path: Path, resumes: bool):
    saves = {"save_strategy": "steps", "save_steps": 2}
    reference = runs.stock("llava", output_dir=str(tmp_path / "stock"), **saves, **_given())
    checkpoint = str(tmp_path / "stock" / "checkpoint-2") if resumes else None
    run = run_distributed(_train_with_given, 3, checkpoint)[0]
    runs.assert_same_run(run, reference)  # the log of a run that goes on has the steps before it
