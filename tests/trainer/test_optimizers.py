"""Optimizers of `args.optim` under plans: as on one process, or refused before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import tiny
from tests.distributed import assert_ranks_raise, run_distributed

from . import runs

pytestmark = pytest.mark.distributed

LM = "language_model"
TP2, PP2 = {LM: {"tp_size": 2}}, {LM: {"pp_size": 2}}
ADAM_8BIT = {"optim": "adamw_bnb_8bit", "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}


def _train(folder: Path, parallel: dict[str, Any] | None, resume: str | None = None, **arguments: Any) -> runs.Run:
    trainer = runs.make_trainer("llama", parallel, str(folder), **arguments)
    trainer.train(resume_from_checkpoint=resume)
    whole = trainer.gather_model()
    return runs.Run(runs.step_logs(trainer), None if whole is None else dict(whole.state_dict()))


def test_adafactor_is_refused_under_tensor_parallelism(tmp_path: Path):
    match = "`transformers.Adafactor` can't be used with `tp_size` above 1"
    assert_ranks_raise(_train, 2, tmp_path, TP2, optim="adafactor", match=match)


def test_8_bit_adam_runs_on_shards_and_goes_on(tmp_path: Path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes has the 8-bit optimizers")
    stock = runs.stock("llama", **ADAM_8BIT, output_dir=str(tmp_path / "stock"))
    straight = run_distributed(_train, 2, tmp_path, TP2, **ADAM_8BIT)[0]
    for got, want in zip(straight.logs, stock.logs, strict=True):  # blocks of 256 values end at the cuts
        assert got["loss"] == pytest.approx(want["loss"], rel=2e-4)
    checkpoint = tmp_path / "checkpoint-2"
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    assert any(entry["state1"].dtype == torch.uint8 for entry in saved.values())
    resumed = run_distributed(_train, 2, tmp_path / "again", TP2, str(checkpoint), **ADAM_8BIT)[0]
    assert straight.weights is not None and resumed.weights is not None
    for name, want in straight.weights.items():
        assert torch.equal(resumed.weights[name], want), name
    match = "is a rank's own tensor and can't be cut anew. Resume with the same `tp_size`"
    assert_ranks_raise(_train, 2, tmp_path / "pp", PP2, str(checkpoint), **ADAM_8BIT, match=match)
    whole = str(tmp_path / "stock" / "checkpoint-2")
    assert_ranks_raise(_train, 2, tmp_path / "cut", TP2, whole, **ADAM_8BIT, match=match)
    trainer = transformers.Trainer(
        model=tiny.FAMILIES["llama"](),
        args=transformers.TrainingArguments(str(tmp_path / "s"), **{**runs.COMMON, **ADAM_8BIT}),
        train_dataset=tiny.make_dataset("llama", runs.SAMPLES),  # type: ignore[arg-type]
        data_collator=tiny.collate("llama"),
    )
    with pytest.raises(ValueError, match="different number of parameter groups"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    moved = run_distributed(_train, 2, tmp_path / "moved", PP2, whole, **ADAM_8BIT)[0]
    for got, want in zip(moved.logs, stock.logs, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)


# Optimizer of bitsandbytes -> the largest share of the way that weights may end elsewhere than on one process
BITSANDBYTES = {"ademamix": 2e-5, "lion_32bit": 2e-5, "paged_adamw_8bit": 2e-2, "adamw_bnb_8bit": 2e-2}
TWO_STEPS = {"learning_rate": 1e-3, "max_steps": 2, "warmup_steps": 0, "lr_scheduler_type": "constant"}


def _train_each(parallel: dict[str, Any]) -> dict[str, runs.Run]:
    return {name: runs.parallel_run("llama", parallel, optim=name, **TWO_STEPS) for name in BITSANDBYTES}


def test_optimizers_of_bitsandbytes_move_weights_as_on_one_process():
    pytest.importorskip("bitsandbytes", reason="bitsandbytes has these optimizers")
    start = tiny.FAMILIES["llama"]().state_dict()
    found = run_distributed(_train_each, 2, TP2)[0]
    for name, share in BITSANDBYTES.items():
        want, got = runs.stock("llama", optim=name, **TWO_STEPS), found[name]
        assert got.weights is not None and want.weights is not None
        assert [row["loss"] for row in got.logs] == pytest.approx([row["loss"] for row in want.logs], rel=2e-4)
        for key, end in want.weights.items():
            moved = float((end - start[key]).abs().sum())
            assert moved > 0, (name, key)
            assert float((got.weights[key] - end).abs().sum()) <= share * moved, (name, key)


@pytest.mark.parametrize(
    ("optim", "package", "cls", "arguments"),
    [
        ("grokadamw", "grokadamw", "grokadamw.GrokAdamW", {}),
        ("apollo_adamw", "apollo_torch", "apollo_torch.AdamW", {"optim_target_modules": "all-linear"}),
    ],
)
def test_optimizers_by_matrix_are_refused_under_tensor_parallelism(
    tmp_path: Path, optim: str, package: str, cls: str, arguments: dict[str, Any]
):
    pytest.importorskip(package)
    match = f"`{cls}` can't be used with `tp_size` above 1: .*adamw_torch"
    assert_ranks_raise(_train, 2, tmp_path, TP2, optim=optim, match=match, **TWO_STEPS, **arguments)
