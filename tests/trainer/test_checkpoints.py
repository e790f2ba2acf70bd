"""Saving, resuming and handing over under a plan."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import tiny
from tests.deep_cases import deep
from tests.distributed import RankFailure, run_distributed

from . import runs

pytestmark = pytest.mark.distributed

PLAN = {"vision": {"dp_size": 2}, "language_model": {"pp_size": 2}}
PAIR: dict[str, Any] = {"vision": {}, "language_model": {}}
SAVING = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3}


def _train(
    folder: Path,
    parallel: dict[str, Any] | None,
    resume: str | None = None,
    family: str = "qwen2_vl",
    **arguments: Any,
) -> dict[str, torch.Tensor] | None:
    """Final weights on rank 0."""
    trainer = runs.make_trainer(family, parallel, str(folder), **{**SAVING, **arguments})
    trainer.train(resume_from_checkpoint=resume)
    whole = trainer.gather_model()
    return None if whole is None else dict(whole.state_dict())


def _assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], exact: bool = False) -> None:
    assert got.keys() == want.keys()
    for name in want:
        if exact:
            assert torch.equal(got[name], want[name]), name
        elif not name.endswith("k_proj.bias"):  # its gradient is zero but for rounding, which AdamW amplifies
            torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def _train_twice(folder: Path, checkpoint: Path) -> list[dict[str, torch.Tensor] | None]:
    """A straight run, and one from its second step on."""
    return [_train(folder, PLAN), _train(folder / "again", PLAN, str(checkpoint))]


def test_an_interrupted_and_resumed_run_equals_a_straight_one(tmp_path: Path):
    checkpoint = tmp_path / "checkpoint-2"
    straight, resumed = run_distributed(_train_twice, 4, tmp_path, checkpoint)[0]
    _assert_close(resumed, straight, exact=True)
    other = run_distributed(_train, 3, tmp_path / "other", {"language_model": {"tp_size": 2}}, str(checkpoint))[0]
    _assert_close(other, straight)
    single = run_distributed(_train, 1, tmp_path / "single", None, str(checkpoint))[0]
    _assert_close(single, straight)
    tiny_class = type(tiny.FAMILIES["qwen2_vl"]())
    loaded, info = tiny_class.from_pretrained(tmp_path / "checkpoint-4", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    _assert_close(dict(loaded.state_dict()), straight, exact=True)


def _best_and_limit(folder: Path, parallel: dict[str, Any], async_save: bool) -> dict[str, Any]:
    trainer = runs.make_trainer(
        "llava",
        parallel,
        str(folder),
        async_save=async_save,
        max_steps=6,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        save_total_limit=2,
        learning_rate=2.0,  # diverges, so that the best checkpoint is not the last
    )
    trainer.train()
    whole = trainer.gather_model()
    return {
        "best": trainer.state.best_model_checkpoint,
        "loss": trainer.evaluate()["eval_loss"],
        "best_metric": trainer.state.best_metric,
        "weights": None if whole is None else dict(whole.state_dict()),
    }


@pytest.mark.parametrize(("parallel", "size", "async_save"), [(PAIR, 2, True), deep(PLAN, 4, False)])
def test_the_best_checkpoint_is_loaded_and_old_ones_go(
    tmp_path: Path, parallel: dict[str, Any], size: int, async_save: bool
):
    ranks = run_distributed(_best_and_limit, size, tmp_path, parallel, async_save)
    best = Path(ranks[0]["best"])
    left = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert best.name in left and "checkpoint-6" in left and len(left) <= 2
    for rank in ranks:
        assert rank["best"] == str(best) and rank["loss"] == pytest.approx(rank["best_metric"], rel=1e-5)
    model = type(tiny.FAMILIES["llava"]()).from_pretrained(best)
    _assert_close(ranks[0]["weights"], dict(model.state_dict()), exact=True)


def _killed_while_saving(folder: Path) -> None:
    from hf_mmparallel.runtime import optimizer_checkpoint

    trainer = runs.make_trainer("llava", PLAN, str(folder), **SAVING)
    saved = optimizer_checkpoint.save_optimizer

    def dies_at_the_second(*args: Any, **kwargs: Any) -> Any:
        groups = saved(*args, **kwargs)
        if trainer.state.global_step == 4 and dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return groups

    optimizer_checkpoint.save_optimizer = dies_at_the_second
    trainer.train()


@pytest.mark.deep
def test_a_killed_save_leaves_the_last_checkpoint_loadable(tmp_path: Path):
    with pytest.raises(RankFailure):
        run_distributed(_killed_while_saving, 4, tmp_path)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = run_distributed(_train, 4, tmp_path, PLAN, str(tmp_path / "checkpoint-2"), family="llava")[0]
    assert resumed is not None
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["checkpoint-2", "checkpoint-4"]


def _refusals(folders: dict[str, Path], source: Path, out: Path) -> dict[str, str]:
    """
    What of the checkpoints is damaged or missing -> what is said when a run goes on from it; "model" of another model,
    "source" of a damaged folder to start from.
    """
    said = {}
    for name, folder in folders.items():
        family = "qwen2_vl" if name == "model" else "llava"
        with pytest.raises(Exception) as raised:
            trainer = runs.make_trainer(family, PAIR, str(out), model=str(source) if name == "source" else None)
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        said[name] = str(raised.value)
    return said


DAMAGED = ["model-00002-of-00002.safetensors", "model.safetensors.index.json", "trainer_state.json"]
DAMAGED += ["data_position.json", "rng_state_1.pth"]


def test_what_cannot_be_gone_on_from_is_named_on_every_rank(tmp_path: Path):
    tiny.FAMILIES["llava"]().save_pretrained(tmp_path / "source")
    weights = tmp_path / "source" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    run_distributed(_train, 2, tmp_path / "saved", PAIR, family="llava")
    folders = {name: tmp_path / "copies" / name for name in ("source", "model", "none", *DAMAGED)}
    for name, folder in folders.items():
        shutil.copytree(tmp_path / "saved", folder)
        if name in DAMAGED:
            file = folder / "checkpoint-4" / name
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    (folders["none"] / "checkpoint-4" / "trainer_state.json").unlink()
    for said in run_distributed(_refusals, 2, folders, tmp_path / "source", tmp_path / "out"):
        assert "another model" in said["model"] and "source/model.safetensors" in said["source"]
        assert "no `trainer_state.json`" in said["none"] and "checkpoint-2`" in said["none"]
        for name in DAMAGED:
            assert f"checkpoint-4/{name}`" in said[name] and "checkpoint-2`" in said[name], said[name]
            assert "weights_only" not in said[name]


def _from_folder(source: Path, folder: Path) -> list[dict[str, torch.Tensor] | None]:
    return [_train(folder, PLAN, family="llava", **model) for model in ({}, {"model": str(source)})]


def test_a_model_given_as_a_folder_trains_like_a_live_one(tmp_path: Path):
    tiny.FAMILIES["llava"]().save_pretrained(tmp_path / "source")
    live, read = run_distributed(_from_folder, 4, tmp_path / "source", tmp_path / "out")[0]
    _assert_close(read, live, exact=True)


class _Hub:
    """Stands in for the Hub: keeps what would be uploaded."""

    def __init__(self):
        self.uploads: list[dict[str, Any]] = []

    def upload_folder(self, **request: Any) -> None:
        folder = Path(request["folder_path"])
        self.uploads.append({**request, "files": sorted(path.name for path in folder.iterdir())})


def _save_card_and_push(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Metrics of a run that is saved and pushed, and what is uploaded."""
    import transformers.trainer

    hub = _Hub()
    transformers.trainer.hf_api = lambda: hub
    trainer = runs.make_trainer("llava", PLAN, str(folder), pictures=True, hub_model_id="me/tiny")
    trainer.hub_model_id = "me/tiny"
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(model_name="tiny", tags="test")
    trainer.push_to_hub(tags="test")
    dist.barrier()
    return trainer.evaluate(), hub.uploads


def test_the_final_folder_has_model_card_plan_and_picture_and_is_pushed_once(tmp_path: Path):
    ranks = run_distributed(_save_card_and_push, 4, tmp_path)
    assert [len(uploads) for _, uploads in ranks] == [1, 0, 0, 0]
    metrics, (upload,) = ranks[0]
    assert upload["repo_id"] == "me/tiny"
    assert {"README.md", "config.json", "model.safetensors.index.json", "parallel_plan.json", "schedule.png"} <= set(
        upload["files"]
    )
    card = (tmp_path / "README.md").read_text()
    assert card.count("### Parallel plan") == 1 and "schedule.png" in card and "hf_mmparallel" in card
    assert "total_train_batch_size: 8" in card and "tokens per second" in card
    assert (tmp_path / "schedule.png").stat().st_size > 1000
    plan = json.loads((tmp_path / "parallel_plan.json").read_text())
    assert set(plan["modules"]) == {"vision", "language_model"}
    model = type(tiny.FAMILIES["llava"]()).from_pretrained(tmp_path)
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path / "x"), use_cpu=True, report_to=[], disable_tqdm=True)
    data = tiny.make_dataset("llava", 7)
    stock = Trainer(model=model, args=args, eval_dataset=data, data_collator=tiny.collate("llava")).evaluate()
    assert metrics["eval_loss"] == pytest.approx(stock["eval_loss"], rel=1e-4)
