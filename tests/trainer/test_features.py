"""What users of the Trainer also do, under a plan: each equals the stock Trainer on one process."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import EarlyStoppingCallback

from hf_mmparallel import ModulePlugin, MultimodalParallelTrainer
from hf_mmparallel.modeling.dtensors import local
from tests import tiny
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
PIPELINE = {LM: {"pp_size": 2}}


def weights_of(trainer: Any) -> dict[str, torch.Tensor] | None:
    whole = trainer.gather_model() if isinstance(trainer, MultimodalParallelTrainer) else trainer.model
    return None if whole is None else {k: v.detach().clone() for k, v in whole.state_dict().items()}


def finished(trainer: Any) -> runs.Run:
    """The run of a Trainer, trained."""
    trainer.train()
    return runs.Run(runs.step_logs(trainer), weights_of(trainer))


# Evaluation


def accuracy(prediction: Any) -> dict[str, float]:
    """Of the next token, where there is a target; the predictions are ids already."""
    guessed, wanted = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guessed == wanted)[wanted != -100].mean()), "samples": len(wanted)}


def guesses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


EVALUATED = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": guesses, "per_device_eval_batch_size": 2}


def evaluations(make: Any) -> dict[str, Any]:
    """Metrics of two datasets in a training run, and predictions with and without metrics."""
    data = tiny.make_dataset("llava", 9, seed=4)
    trainer = make(
        eval_dataset={"seen": data[:4], "unseen": data}, eval_strategy="steps", eval_steps=2, max_steps=2, **EVALUATED
    )
    trainer.model.config.keys_to_ignore_at_inference = runs.OTHER_OUTPUTS
    trainer.train()
    history = [
        {name: value for name, value in row.items() if "loss" in name or "accuracy" in name or "samples" in name}
        for row in trainer.state.log_history
        if any(name.startswith("eval") for name in row)
    ]
    history = [{name: v for name, v in row.items() if "per_second" not in name} for row in history]
    predicted = trainer.predict(data)
    trainer.preprocess_logits_for_metrics = trainer.compute_metrics = None
    logits = trainer.predict(data[:5])
    return {
        "history": history,
        "metrics": {k: v for k, v in predicted.metrics.items() if k in ("test_loss", "test_accuracy", "test_samples")},
        "predictions": predicted.predictions,
        "labels": predicted.label_ids,
        "logits": logits.predictions,
    }


def our_evaluations() -> dict[str, Any]:
    return evaluations(functools.partial(runs.make_trainer, "llava", {VISION: {"dp_size": 2}, LM: {"pp_size": 2}}))


def test_evaluation_and_prediction_equal_the_stock_trainers():
    stock = evaluations(runs.stock_trainer)
    assert len(stock["history"]) == 2 and "eval_unseen_accuracy" in stock["history"][1]
    ranks = run_distributed(our_evaluations, 4)
    for rank in ranks:
        assert [pytest.approx(row, rel=2e-5) for row in stock["history"]] == rank["history"]
        assert rank["metrics"] == pytest.approx(stock["metrics"], rel=2e-5)
    first = ranks[0]
    assert (first["predictions"] == stock["predictions"]).all() and (first["labels"] == stock["labels"]).all()
    real = stock["logits"] != -100
    assert first["logits"].shape == stock["logits"].shape
    torch.testing.assert_close(
        torch.tensor(first["logits"][real]), torch.tensor(stock["logits"][real]), rtol=1e-4, atol=1e-5
    )
    assert all(rank["predictions"] is None and rank["labels"] is None for rank in ranks[1:])


# Data and the training loop


def images_only_at_times() -> dict[str, Any]:
    """Two global batches without an image between others, so that gradients of vision come and go."""
    plain, media = (tiny.make_dataset("llava", runs.SAMPLES, max_items=count) for count in (0, 2))
    return {"data": media[:8] + plain[8:22], "train_sampling_strategy": "sequential"}


EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
LOWERS = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0}}
EPOCHS = {"max_steps": -1, "num_train_epochs": 2}
CASES: dict[str, Any] = {
    "text only": lambda: {"data": tiny.make_dataset("llava", runs.SAMPLES, max_items=0)},
    "images at times": images_only_at_times,
    "early stopping": lambda: {"callbacks": [EarlyStoppingCallback(1, 5.0)], "max_steps": 8, **EVALUATES},
    "a lower rate on a plateau": lambda: {**LOWERS, "warmup_steps": 0, **EVALUATES},
    "a last batch that is not full": lambda: EPOCHS,
    "a last batch that is left out": lambda: {**EPOCHS, "dataloader_drop_last": True},
    "workers that stay": lambda: {**EPOCHS, "dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    "no clipping": lambda: {"max_grad_norm": 0.0},
}
CORE = ("images at times", "early stopping", "a lower rate on a plateau", "a last batch that is not full")


def run_cases(names: list[str]) -> dict[str, runs.Run]:
    multiprocessing.set_start_method("fork", force=True)  # what a loader uses outside of the tests' own server
    return {name: finished(runs.make_trainer("llava", {LM: {"dp_size": 2}}, **CASES[name]())) for name in names}


@functools.cache
def cases(is_core: bool) -> dict[str, runs.Run]:
    """The cases of one tier on three ranks."""
    return run_distributed(run_cases, 3, [name for name in CASES if (name in CORE) == is_core])[0]


@pytest.mark.parametrize("name", runs.deep_but(CASES, *CORE))
def test_a_run_equals_the_stock_trainers(name: str):
    run, stock = cases(name in CORE)[name], finished(runs.stock_trainer(**CASES[name]()))
    runs.assert_same_run(run, stock)
    if name == "text only":
        before = tiny.FAMILIES["llava"]().state_dict()
        untouched = [key for key in before if "vision_tower" in key or "projector" in key]
        assert untouched and run.weights and all(torch.equal(run.weights[key], before[key]) for key in untouched)
    if name == "early stopping":
        assert len(stock.logs) == 2
    if name == "a lower rate on a plateau":
        assert stock.logs[-1]["learning_rate"] < stock.logs[0]["learning_rate"]


def repeated(folder: Path) -> dict[str, Any]:
    """Runs that draw numbers, and a run in bf16 that is resumed."""
    torch.manual_seed(dist.get_rank())

    def dropping(seed: int) -> list[dict[str, float]]:
        model = tiny.FAMILIES["llava"]()
        model.config.text_config.attention_dropout = 0.5
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        return finished(runs.make_trainer("llava", PIPELINE, model=model, seed=seed, data_seed=0)).logs

    saving = {"bf16": True, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3}
    straight = finished(runs.make_trainer("llava", PIPELINE, output_dir=str(folder), **saving))
    again = runs.make_trainer("llava", PIPELINE, output_dir=str(folder), **saving)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    trainer = runs.make_trainer("llava", PIPELINE, train_sampling_strategy="group_by_length")
    loader: Any = trainer.get_train_dataloader()
    pickle.dumps(loader.dataset.inputs)  # what a worker is sent
    return {
        "dropping": [dropping(1), dropping(1), dropping(2)],
        "without": finished(runs.make_trainer("llava", PIPELINE, seed=1, data_seed=0)).logs,
        "grouped": [step.samples for step in loader.batch_sampler],
        "straight": straight,
        "resumed": runs.Run(runs.step_logs(again), weights_of(again)),
    }


def test_runs_repeat(tmp_path: Path):
    first, *others = run_distributed(repeated, 3, tmp_path)
    for rank in (first, *others):
        once, twice, other = rank["dropping"]
        assert once == twice != other
        assert once != rank["without"] and once == first["dropping"][0]
        assert rank["grouped"] == first["grouped"]
    lengths = [len(sample["input_ids"]) for sample in tiny.make_dataset("llava", runs.SAMPLES)]
    assert sorted(index for batch in first["grouped"] for index in batch) == list(range(runs.SAMPLES))
    for batch in first["grouped"]:
        assert [lengths[index] for index in batch] == sorted((lengths[index] for index in batch), reverse=True)
    straight, resumed = first["straight"], first["resumed"]
    assert resumed.logs == straight.logs
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in straight.weights.items())


# Several encoders


def omni() -> dict[str, Any]:
    return {"family": "qwen2_5_omni"}


def media_samples(image: int, audio: int, rows: int, clip_rows: int, words: int, media: Any) -> list[dict[str, Any]]:
    """Samples with images and clips, one of them or none, by token ids and numbers of feature tokens."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(runs.SAMPLES):
        images, clips = index % 3, index % 2
        ids = [1, *[image] * rows * images, 3, *[audio] * clip_rows * clips]
        ids = torch.tensor([*ids, *torch.randint(4, words, (4 + index % 3,), generator=generator).tolist()])
        sample = {
            "input_ids": ids,
            "labels": ids.masked_fill(ids >= image, -100),
            "attention_mask": torch.ones_like(ids),
        }
        for name, shape in media(images, clips).items():
            sample[name] = torch.randn(shape, generator=generator) if isinstance(shape, tuple) else shape
        samples.append(sample)
    return samples


def composed() -> dict[str, Any]:
    """A model of a CLIP tower, a Whisper encoder and a Llama."""
    from tests.composed import test_composed as parts

    def media(images: int, clips: int) -> dict[str, Any]:
        shapes = {"pixel_values": (images, 3, 8, 8), "input_features": (clips, 8, 12)}
        return {name: shape for name, shape in shapes.items() if shape[0]}

    model, rows = parts.compose("clip_whisper_llama")
    return {"model": model.train(), "data": media_samples(parts.IMAGE, parts.AUDIO, rows, 6, 39, media)}


def merging() -> dict[str, Any]:
    """Qwen2.5-VL's vision encoder, Phi-4's audio encoder and an OPT."""
    from hf_mmparallel import MultimodalModel
    from tests.composed import test_composed_families as parts

    def media(images: int, clips: int) -> dict[str, Any]:
        grids = {"vision_hidden_states": (16 * images, 384), "grid_thw": torch.tensor([[1, 4, 4]] * images)}
        return {**(grids if images else {}), **({"audio_hidden_states": (clips, 16, 16)} if clips else {})}

    torch.manual_seed(0)
    encoders = {VISION: parts.ENCODERS["qwen2_5_vl"][0](), "audio": parts.ENCODERS["phi4_audio"][0]()}
    model = MultimodalModel.from_unimodal(encoders, parts.LANGUAGE_MODELS["opt"](), {VISION: 118, "audio": 119})
    return {"model": model.train(), "data": media_samples(118, 119, 4, 2, 100, media)}


APART = {VISION: {}, "audio": {}, LM: {"pp_size": 2}}
TOGETHER = {VISION: {"dp_size": 2}, "audio": ModulePlugin(colocate_with=VISION), LM: {}}


TWO_ENCODERS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "omni, each on its own": (omni, APART, 4),
    "composed, each on its own": (composed, APART, 4),
    "merging": (merging, APART, 4),
    "omni, encoders together": (omni, TOGETHER, 3),
    "composed, together": (composed, TOGETHER, 3),
}


def evaluated(what: Any, parallel: dict[str, Any]) -> tuple[runs.Run, float]:
    """A run, with the loss of the evaluation after it."""
    trainer = runs.make_trainer(parallel=parallel, **{"family": "llava", **what()})
    return finished(trainer), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("name", runs.deep_but(TWO_ENCODERS, "composed, each on its own", "omni, encoders together"))
def test_two_encoders_equal_the_stock_trainer(name: str):
    what, parallel, world_size = TWO_ENCODERS[name]
    trainer = runs.stock_trainer(**what())
    stock = finished(trainer)
    run, eval_loss = run_distributed(evaluated, world_size, what, parallel)[0]
    runs.assert_same_run(run, stock)
    # samples are in microbatches of two on ranks and of eight here, and the loss is a mean of means
    assert eval_loss == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-4)


# The model


def bytes_held(folder: Path) -> int:
    """Bytes that this rank holds of a model in a folder."""
    trainer = runs.make_trainer("llava", {VISION: {"tp_size": 2}, LM: {"pp_size": 2}}, model=str(folder))
    storages = [local(parameter).untyped_storage() for parameter in trainer.model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_a_rank_holds_its_share(tmp_path: Path):
    model = tiny.FAMILIES["llava"]()
    model.save_pretrained(tmp_path)
    held = run_distributed(bytes_held, 4, tmp_path)
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert max(held) < 0.4 * total and total <= sum(held) < 1.2 * total  # the projector is on both tp ranks
