"""Saving, resuming and handing over under a plan."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.trainer_callback import TrainerState

from hf_mmparallel.trainer import checkpoint_saves
from hf_mmparallel.trainer.checkpoint_saves import save_advice
from tests import tiny
from tests.any_to_any import IMAGE
from tests.distributed import run_distributed

from . import runs
from .contexts import arguments
from .test_generators import words as generator_words
from .test_unlike_copies import copies

VISION, LM = "vision", "language_model"
PLAN, OTHER = {VISION: {"dp_size": 2}, LM: {"pp_size": 2}}, {VISION: {"dp_size": 2}, LM: {"tp_size": 2}}
PAIR: dict[str, Any] = {VISION: {}, LM: {}}
SAVING = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3}


def _train(
    folder: Path,
    parallel: dict[str, Any] | None,
    resume: str | None = None,
    family: str = "qwen2_vl",
    **arguments: Any,
) -> dict[str, torch.Tensor] | None:
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


def on_both(**sizes: Any) -> dict[str, Any]:
    """Both modules on the same ranks."""
    return {VISION: sizes, LM: {**sizes, "colocate_with": VISION}}


def _train_and_resume(folder: Path) -> list[dict[str, torch.Tensor] | None]:
    """A straight run, and one from its second step on."""
    return [_train(folder, PLAN), _train(folder / "again", PLAN, str(folder / "checkpoint-2"))]


@pytest.mark.distributed
def test_an_interrupted_and_resumed_run_equals_a_straight_one(tmp_path: Path):
    straight, resumed = run_distributed(_train_and_resume, 4, tmp_path, timeout=200)[0]
    _assert_close(resumed, straight, exact=True)
    single = run_distributed(_train, 1, tmp_path / "single", None, str(tmp_path / "checkpoint-2"))[0]
    _assert_close(single, straight)


ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}
CP = {"cp_size": 2, "cp_block": 16}
HOST, SAVED = {"offload_optimizer": True}, {"offload_activations": True}
AGAIN = {"activation_checkpointing": True, **SAVED}
SAVED_ON_HOST = {VISION: {"tp_size": 2, **SAVED}, LM: {"tp_size": 2, "colocate_with": VISION, **AGAIN}}
STAGES_ON_HOST = {VISION: {"dp_size": 2, **AGAIN}, LM: {"pp_size": 2, "colocate_with": VISION, **SAVED, **HOST}}
ON_HOST, IN_SLICES = on_both(tp_size=2, **HOST), {VISION: {"dp_size": 2}, LM: on_both(dp_size=2, zero_stage=1)[LM]}
UNLIKE_COPIES = {
    "modules": {VISION: copies([(0, 4, (0,))]), LM: copies([(0, 4, (1,))], [(0, 1, (2, 3)), (1, 4, (4, 5))])}
}
DRAWS = {IMAGE: {"dp_size": 2, "colocate_with": LM}, VISION: {"colocate_with": LM}, LM: {"pp_size": 2}}
RESUMED: dict[str, tuple[str, Any, list[Any], Callable[[], dict[str, Any]]]] = {
    "tensor parallelism": ("qwen2_vl", PLAN, [OTHER], dict),
    "shared tokens": ("llava", {LM: {**CP, "dp_size": 2}}, [{LM: {**CP, "cp_size": 4}}], dict),
    "an optimizer on the host": ("llava", ON_HOST, [IN_SLICES], dict),
    "an optimizer in slices": ("llava", IN_SLICES, [ON_HOST], dict),
    "activations on the host": ("llava", SAVED_ON_HOST, [STAGES_ON_HOST], dict),
    "stages on the host": ("llava", STAGES_ON_HOST, [IN_SLICES], dict),
    "ZeRO-1": ("llava", on_both(dp_size=2, tp_size=2, zero_stage=1), [None, OTHER], dict),
    "ZeRO-3": ("llava", on_both(dp_size=2, tp_size=2, zero_stage=3), [None, OTHER], dict),
    "ZeRO-2 in groups": (
        "llava",
        on_both(dp_size=4, shard_size=2, zero_stage=2),
        [on_both(dp_size=2, tp_size=2, zero_stage=stage) for stage in (1, 3)],
        dict,
    ),
    "unlike copies": (
        "llava",
        UNLIKE_COPIES,
        [None, {VISION: {"dp_size": 2}, LM: {"pp_size": 2, "tp_size": 2}}],
        dict,
    ),
    "a generator": ("llava", DRAWS, [None], partial(generator_words, ("dit",), max_steps=4)),
}
"""Of a family, a layout, those that a run goes on under from its second step, and words; `None` is the same layout."""


def resumptions(folder: Path, name: str) -> list[runs.Run]:
    family, source, targets, words = RESUMED[name]
    straight = runs.saving_run(family, folder, source, **ADAMW, **words())
    rest = [(source if target is None else target, folder / str(place)) for place, target in enumerate(targets)]
    checkpoint = folder / "checkpoint-2"
    return [straight, *(runs.saving_run(family, out, own, checkpoint, **ADAMW, **words()) for own, out in rest)]


@pytest.mark.distributed
@pytest.mark.deep
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_as_it_was_and_under_any_layout(name: str, tmp_path: Path):
    family, source, targets, words = RESUMED[name]
    straight, *rest = run_distributed(
        resumptions, runs.ranks_of(family, source, **words()), tmp_path, name, timeout=250
    )[0]
    stock = runs.stock(family, **ADAMW, **words())
    runs.assert_same_run(straight, stock)
    for target, run in zip(targets, rest, strict=True):
        if target is None:
            runs.assert_same_run(run, straight, rtol=0, atol=0)
        else:
            runs.assert_same_run(run, stock)


def _best_and_limit(folder: Path, async_save: bool) -> dict[str, Any]:
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 2}
    trainer = runs.make_trainer(
        "llava",
        PAIR,
        str(folder),
        async_save=async_save,
        max_steps=6,
        save_strategy="steps",
        save_steps=2,
        learning_rate=2.0,  # diverges, so that the best checkpoint is not the last
        **evaluated,
    )
    trainer.train()
    whole = trainer.gather_model()
    return {
        "best": trainer.state.best_model_checkpoint,
        "loss": trainer.evaluate()["eval_loss"],
        "best_metric": trainer.state.best_metric,
        "weights": None if whole is None else dict(whole.state_dict()),
    }


Costs = tuple[float, float, float]


def _both_ways(folder: Path) -> tuple[list[dict[str, Any]], list[Costs]]:
    """Runs without and with `async_save`, and the costs of which their lines on how often to save are made."""
    lines: list[Costs] = []

    def note(blocked_s: float, write_s: float, step_s: float, state: TrainerState, args: Any) -> str:
        assert state.global_step and state.max_steps
        lines.append((blocked_s, write_s, step_s))
        return save_advice(blocked_s, write_s, step_s, state, args)

    checkpoint_saves.save_advice = note
    return [_best_and_limit(folder / str(async_save), async_save) for async_save in (False, True)], lines


@pytest.mark.distributed
def test_the_best_checkpoint_is_loaded_old_ones_go_and_the_first_rank_says_once_what_saves_cost(tmp_path: Path):
    (found, costs), (others, unsaid) = run_distributed(_both_ways, 2, tmp_path, timeout=200)
    for run, other in zip(found, others, strict=True):
        best = Path(run["best"])
        left = sorted(path.name for path in best.parent.glob("checkpoint-*"))
        assert best.name in left and "checkpoint-6" in left and len(left) <= 2
        for rank in (run, other):
            assert rank["best"] == str(best) and rank["loss"] == pytest.approx(rank["best_metric"], rel=1e-5)
        model = type(tiny.FAMILIES["llava"]()).from_pretrained(best)
        _assert_close(run["weights"], dict(model.state_dict()), exact=True)
    assert unsaid == [] and [write_s > 0 for _, write_s, _ in costs] == [False, True]
    assert all(blocked_s > 0 and step_s > 0 for blocked_s, _, step_s in costs)


@pytest.mark.parametrize(
    ("costs", "own", "steps", "strategy", "values"),
    [
        ((2.0, 30.0, 4.0), 20, 10_000, "steps", ("147 steps", "every 24 h", "every 20,", "1.9%")),
        ((40.0, 0.0, 1.0), 10_000, 20_000, "epoch", ("2,602 steps", "every 10,000,")),
        ((2.0, 30.0, 4.0), 500, 10_000, "steps", ()),  # 0.6% longer
        ((0.3, 0.0, 0.7), 3, 20, "steps", ()),  # a run of seconds
    ],
)
def test_a_long_run_is_told_of_an_interval_of_saves_that_costs_it_much_less(costs, own, steps, strategy, values):
    state = TrainerState(max_steps=steps, save_steps=own, global_step=own)
    found = save_advice(*costs, state, arguments(save_strategy=strategy))
    assert bool(found) == bool(values) and all(value in found for value in values)


def test_a_time_between_failures_is_not_zero():
    with pytest.raises(ValueError, match="mean_time_between_failures_h=0"):
        arguments(mean_time_between_failures_h=0)


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


@pytest.mark.distributed
@pytest.mark.deep
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
    for said in run_distributed(_refusals, 2, folders, tmp_path / "source", tmp_path / "out", timeout=200):
        assert "another model" in said["model"] and "source/model.safetensors" in said["source"]
        assert "no `trainer_state.json`" in said["none"] and "checkpoint-2`" in said["none"]
        for name in DAMAGED:
            assert f"checkpoint-4/{name}`" in said[name] and "checkpoint-2`" in said[name], said[name]
            assert "weights_only" not in said[name]


class _Hub:
    def __init__(self):
        self.uploads: list[dict[str, Any]] = []

    def upload_folder(self, **request: Any) -> None:
        folder = Path(request["folder_path"])
        self.uploads.append({**request, "files": sorted(path.name for path in folder.iterdir())})


def _save_card_and_push(source: Path, folder: Path) -> dict[str, Any]:
    """What is uploaded of a run that is saved and pushed, and its weights with those of a live model."""
    import transformers.trainer

    hub = _Hub()
    transformers.trainer.hf_api = lambda: hub
    trainer = runs.make_trainer("llava", PAIR, str(folder), model=str(source), pictures=True, hub_model_id="me/tiny")
    trainer.hub_model_id = "me/tiny"
    weights = runs.run_of(trainer).weights
    trainer.save_model()
    trainer.create_model_card(model_name="tiny", tags="test")
    trainer.push_to_hub(tags="test")
    dist.barrier()
    live = runs.parallel_run("llava", PAIR).weights
    return {"uploads": hub.uploads, "weights": (weights, live)}


@pytest.mark.distributed
def test_a_folder_trains_like_a_live_model_and_the_final_one_has_card_plan_and_picture_and_is_pushed_once(
    tmp_path: Path,
):
    tiny.FAMILIES["llava"]().save_pretrained(tmp_path / "source")
    out = tmp_path / "out"
    first, second = run_distributed(_save_card_and_push, 2, tmp_path / "source", out)
    _assert_close(*first["weights"], exact=True)
    (upload,) = first["uploads"]
    assert second["uploads"] == [] and upload["repo_id"] == "me/tiny"
    files = {"README.md", "config.json", "parallel_plan.json", "schedule.png"}
    assert files | {"model.safetensors.index.json"} <= set(upload["files"])
    card = (out / "README.md").read_text()
    assert card.count("### Parallel plan") == 1 and "schedule.png" in card and "hf_mmparallel" in card
    assert "total_train_batch_size: 8" in card and "tokens per second" in card
    assert (out / "schedule.png").stat().st_size > 1000
    plan = json.loads((out / "parallel_plan.json").read_text())
    assert set(plan["modules"]) == {"vision", "language_model"}
