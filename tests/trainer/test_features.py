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
from peft import PeftModel
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from hf_mmparallel import ModulePlugin, MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.modeling.dtensors import local
from tests import tiny
from tests.distributed import run_distributed
from tests.folders import run_folder

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
PIPELINE = {LM: {"pp_size": 2}}


def stock_trainer(family: str = "llava", **given: Any) -> Trainer:
    """The stock Trainer with the arguments that [`runs.make_trainer`] takes."""
    words = {name: given.pop(name) for name in WORDS if name in given}
    given = {"per_device_train_batch_size": runs.GLOBAL_BATCH, **given}
    args = TrainingArguments(output_dir=given.pop("output_dir", None) or run_folder(), **{**runs.COMMON, **given})
    return Trainer(args=args, **_data(family, words))


def our_trainer(parallel: dict[str, Any], family: str = "llava", **given: Any) -> MultimodalParallelTrainer:
    """Our Trainer on this rank."""
    torch.set_num_threads(1)
    runs.draw_nothing()
    words = {name: given.pop(name) for name in WORDS if name in given}
    given = {"global_batch_size": runs.GLOBAL_BATCH, "per_device_train_batch_size": 2, **given}
    args = MultimodalTrainingArguments(
        output_dir=given.pop("output_dir", None) or run_folder(),
        parallel=parallel,
        ddp_backend="gloo",
        **{**runs.COMMON, **given},
    )
    return MultimodalParallelTrainer(args=args, **_data(family, words))


WORDS = (
    "model", "train_dataset", "eval_dataset", "callbacks", "compute_metrics", "data_collator",
    "preprocess_logits_for_metrics",
)  # fmt: skip


def _data(family: str, words: dict[str, Any]) -> dict[str, Any]:
    data = tiny.make_dataset(family, runs.SAMPLES)
    standard = {"train_dataset": data, "eval_dataset": data[:7], "data_collator": tiny.collate(family)}
    if "model" not in words:
        standard["model"] = tiny.FAMILIES[family]()
    return {**standard, **words}


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
    return evaluations(lambda **given: our_trainer({VISION: {"dp_size": 2}, LM: {"pp_size": 2}}, **given))


def test_evaluation_and_prediction_equal_the_stock_trainers():
    stock = evaluations(stock_trainer)
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


# Adapters


def adapted(**sizes: Any) -> dict[str, Any]:
    """A projector and adapters of the language model that are trained."""
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}
    return {VISION: ModulePlugin(freeze="tower"), LM: ModulePlugin(peft_config=lora, **sizes)}


def adapted_alone() -> MultimodalParallelTrainer:
    """Our Trainer on one process, with adapters trained."""
    arguments = {**runs.COMMON, "per_device_train_batch_size": runs.GLOBAL_BATCH}
    args = MultimodalTrainingArguments(output_dir=run_folder(), parallel=adapted(), **arguments)
    trainer = MultimodalParallelTrainer(args=args, **_data("llava", {}))
    trainer.train()
    return trainer


def adapters(folder: Path) -> tuple[list[dict[str, float]], float]:
    """Losses of training adapters and a projector, and of the evaluation after it."""
    torch.rand(dist.get_rank())  # scripts draw numbers of their own before
    trainer = our_trainer(adapted(dp_size=2))
    trainer.train()
    trainer.save_model(str(folder))
    return runs.step_logs(trainer), trainer.evaluate()["eval_loss"]


@pytest.mark.deep
def test_adapters_train_as_on_one_process_and_peft_reads_them(tmp_path: Path):
    ranks, alone = run_distributed(adapters, 3, tmp_path / "adapter"), adapted_alone()
    for logs, eval_loss in ranks:
        assert logs == [pytest.approx(row, rel=2e-5, abs=2e-6) for row in runs.step_logs(alone)]
        assert eval_loss == pytest.approx(alone.evaluate()["eval_loss"], rel=2e-5)
    loaded = PeftModel.from_pretrained(tiny.FAMILIES["llava"](), str(tmp_path / "adapter"))
    assert stock_trainer(model=loaded).evaluate()["eval_loss"] == pytest.approx(ranks[0][1], rel=2e-5)
    alone.save_model(str(tmp_path / "alone"))
    ours, alones = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "alone"))
    assert ours.keys() == alones.keys()


# Data and the training loop


def text_only() -> dict[str, Any]:
    return {"train_dataset": tiny.make_dataset("llava", runs.SAMPLES, max_items=0)}


def images_only_at_times() -> dict[str, Any]:
    """Two global batches without an image between others, so that gradients of vision come and go."""
    plain, media = (tiny.make_dataset("llava", runs.SAMPLES, max_items=count) for count in (0, 2))
    return {"train_dataset": media[:8] + plain[8:22], "train_sampling_strategy": "sequential"}


def stops_early() -> dict[str, Any]:
    stop = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=5.0)
    return {
        "callbacks": [stop], "max_steps": 8, "metric_for_best_model": "loss",
        "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip


def lowers_the_rate() -> dict[str, Any]:
    return {
        "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0},
        "warmup_steps": 0, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss",
    }  # fmt: skip


def whole_epochs(**more: Any) -> dict[str, Any]:
    return {"max_steps": -1, "num_train_epochs": 2, **more}


CASES: dict[str, Any] = {
    "text only": text_only,
    "images at times": images_only_at_times,
    "early stopping": stops_early,
    "a lower rate on a plateau": lowers_the_rate,
    "a last batch that is not full": whole_epochs,
    "a last batch that is left out": lambda: whole_epochs(dataloader_drop_last=True),
    "workers that stay": lambda: whole_epochs(dataloader_num_workers=2, dataloader_persistent_workers=True),
    "no clipping": lambda: {"max_grad_norm": 0.0},
}


CORE = ("images at times", "early stopping", "a lower rate on a plateau", "a last batch that is not full")


def run_cases(names: list[str]) -> dict[str, runs.Run]:
    multiprocessing.set_start_method("fork", force=True)  # what a loader uses outside of the tests' own server
    return {name: finished(our_trainer({LM: {"dp_size": 2}}, **CASES[name]())) for name in names}


@functools.cache
def cases(is_core: bool) -> dict[str, runs.Run]:
    """The cases of one tier on three ranks."""
    return run_distributed(run_cases, 3, [name for name in CASES if (name in CORE) == is_core])[0]


@pytest.mark.parametrize("name", runs.deep_but(CASES, *CORE))
def test_a_run_equals_the_stock_trainers(name: str):
    run, stock = cases(name in CORE)[name], finished(stock_trainer(**CASES[name]()))
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
        return finished(our_trainer(PIPELINE, model=model, seed=seed, data_seed=0)).logs

    saving = {"bf16": True, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3}
    straight = finished(our_trainer(PIPELINE, output_dir=str(folder), **saving))
    again = our_trainer(PIPELINE, output_dir=str(folder), **saving)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    trainer = our_trainer(PIPELINE, train_sampling_strategy="group_by_length")
    loader: Any = trainer.get_train_dataloader()
    pickle.dumps(loader.dataset.inputs)  # what a worker is sent
    return {
        "dropping": [dropping(1), dropping(1), dropping(2)],
        "without": finished(our_trainer(PIPELINE, seed=1, data_seed=0)).logs,
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


def composed() -> dict[str, Any]:
    """A model of a CLIP tower, a Whisper encoder and a Llama, with samples that have both, one or none."""
    from tests.composed import test_composed as parts

    model, rows = parts.compose("clip_whisper_llama")
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(runs.SAMPLES):
        images, clips = index % 3, index % 2
        ids = [1, *[parts.IMAGE] * rows * images, 3, *[parts.AUDIO] * 6 * clips]
        ids = torch.tensor([*ids, *torch.randint(4, 39, (4 + index % 3,), generator=generator).tolist()])
        sample = {"input_ids": ids, "labels": ids.masked_fill(ids >= parts.IMAGE, -100)}
        sample["attention_mask"] = torch.ones_like(ids)
        if images:
            sample["pixel_values"] = torch.randn(images, 3, 8, 8, generator=generator)
        if clips:
            sample["input_features"] = torch.randn(clips, 8, 12, generator=generator)
        samples.append(sample)
    return {"model": model.train(), "train_dataset": samples, "eval_dataset": samples[:7]}


def merging() -> dict[str, Any]:
    """Qwen2.5-VL's vision encoder, Phi-4's audio encoder and an OPT, with samples that have both, one or none."""
    from hf_mmparallel import MultimodalModel
    from tests.composed import test_composed_families as parts

    torch.manual_seed(0)
    encoders = {VISION: parts.ENCODERS["qwen2_5_vl"][0](), "audio": parts.ENCODERS["phi4_audio"][0]()}
    model = MultimodalModel.from_unimodal(encoders, parts.LANGUAGE_MODELS["opt"](), {VISION: 118, "audio": 119})
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(runs.SAMPLES):
        images, clips = index % 3, index % 2
        ids = [1, *[118] * 4 * images, 3, *[119] * 2 * clips]
        ids = torch.tensor([*ids, *torch.randint(4, 100, (4 + index % 3,), generator=generator).tolist()])
        sample = {
            "input_ids": ids,
            "labels": ids.masked_fill(ids >= 118, -100),
            "attention_mask": torch.ones_like(ids),
        }
        if images:
            sample["vision_hidden_states"] = torch.randn(16 * images, 384, generator=generator)
            sample["grid_thw"] = torch.tensor([[1, 4, 4]] * images)
        if clips:
            sample["audio_hidden_states"] = torch.randn(clips, 16, 16, generator=generator)
        samples.append(sample)
    return {"model": model.train(), "train_dataset": samples, "eval_dataset": samples[:7]}


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
    trainer = our_trainer(parallel, **what())
    return finished(trainer), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("name", runs.deep_but(TWO_ENCODERS, "composed, each on its own", "omni, encoders together"))
def test_two_encoders_equal_the_stock_trainer(name: str):
    what, parallel, world_size = TWO_ENCODERS[name]
    trainer = stock_trainer(**what())
    stock = finished(trainer)
    run, eval_loss = run_distributed(evaluated, world_size, what, parallel)[0]
    runs.assert_same_run(run, stock)
    # samples are in microbatches of two on ranks and of eight here, and the loss is a mean of means
    assert eval_loss == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-4)


# The model


def bytes_held(folder: Path) -> int:
    """Bytes that this rank holds of a model in a folder."""
    trainer = our_trainer({VISION: {"tp_size": 2}, LM: {"pp_size": 2}}, model=str(folder))
    storages = [local(parameter).untyped_storage() for parameter in trainer.model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_a_rank_holds_its_share(tmp_path: Path):
    model = tiny.FAMILIES["llava"]()
    model.save_pretrained(tmp_path)
    held = run_distributed(bytes_held, 4, tmp_path)
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert max(held) < 0.4 * total and total <= sum(held) < 1.2 * total  # the projector is on both tp ranks
