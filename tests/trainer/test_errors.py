"""What can't be right is refused with one sentence on every rank, and nothing hangs."""

import functools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import shrunk_models
import torch
import torch.distributed as dist
import transformers as hf
from shrunk_models import shrunk
from transformers import PreTrainedModel

from hf_mmparallel import MultimodalModel, MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.plan import MultimodalParallelPlugin
from hf_mmparallel.trainer import start_checks as checks
from hf_mmparallel.trainer.build import prepare_model
from hf_mmparallel.trainer.start_checks import check_model
from hf_mmparallel.world import World
from tests import tiny
from tests.deep_cases import deep, in_turn
from tests.distributed import assert_ranks_raise, run_distributed

from . import runs


def small(name: str, config: Any = None) -> Any:
    """A small model of an encoder and a decoder."""
    config = config or getattr(hf, f"{name}Config")()
    return getattr(hf, f"{name}ForConditionalGeneration")(shrunk(config))


ALL: dict[str, Callable[[], Any]] = {name: partial(small, name) for name in ("Florence2", "Whisper", "Bart")}
ALL["Blip2 of T5"] = lambda: small("Blip2", hf.Blip2Config(text_config={"model_type": "t5"}))


def with_whisper() -> PreTrainedModel:
    """The encoder of a Whisper model before a causal language model."""
    encoders = {"audio": hf.WhisperModel(shrunk(hf.WhisperConfig()))}
    return MultimodalModel.from_unimodal(encoders, shrunk_models.build("llama"), token_ids={"audio": 60})


VISION, LM = "vision", "language_model"
PIPELINE = {LM: {"pp_size": 2}}


UNLIKE = {"replicas": [[{"layers": [0, 4], "ranks": [[rank]]}] for rank in (0, 1)]}
COUNTS = {"modules": {VISION: UNLIKE, LM: UNLIKE}, "replica_microbatches": [3, 2]}


class OwnLoss(MultimodalParallelTrainer):
    """A user's subclass."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
        raise AssertionError("never reached")


class Bag:
    """Samples without indices and without a length."""

    def __iter__(self):
        return iter(tiny.make_dataset("llava", 4))


@functools.cache
def arguments() -> MultimodalTrainingArguments:
    return runs.make_trainer("llava", {}).args


def our_trainer(cls: Any = MultimodalParallelTrainer, **changed: Any) -> Any:
    return cls(**{"args": arguments(), **runs.words_of("llava", {}), "eval_dataset": None, **changed})


def different_models() -> None:
    model = tiny.FAMILIES["llava"]()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.get_parameter("lm_head.weight")[0, 0] += 1e-3
    runs.make_trainer("llava", {}, model=model)


def different_plans() -> None:
    shared = {VISION: {"dp_size": 2}, LM: {"colocate_with": VISION}}
    runs.make_trainer("llava", shared if dist.get_rank() else {LM: {}})


def different_batches(**of_rank: Any) -> None:
    """The argument that differs has a value for each rank; the dataset of rank 1 is shorter without one."""
    trainer = runs.make_trainer("llava", {}, max_steps=20, **{k: v[dist.get_rank()] for k, v in of_rank.items()})
    if not of_rank and dist.get_rank() == 1:
        trainer.train_dataset = trainer.train_dataset[:-9]
    trainer.train()


def different_folders(saves_steps: bool) -> None:
    folder = f"run-{dist.get_rank()}"
    if saves_steps:
        runs.make_trainer("llava", {}, folder, save_strategy="steps", save_steps=2)
    runs.make_trainer("llava", {}).save_model(folder)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a loss": (lambda: our_trainer(OwnLoss), "OwnLoss.compute_loss"),
    "optimizers": (
        lambda: our_trainer(optimizers=(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), None)),
        "is not the model's",
    ),
    "no model": (lambda: our_trainer(model=None), "model=None"),
    "a bag": (lambda: our_trainer(train_dataset=Bag()).train(), "`Bag`"),
    "an evaluated bag": (lambda: our_trainer(eval_dataset=Bag()).evaluate(), "`Bag`"),
    "nothing to train on": (lambda: our_trainer(train_dataset=None).train(), "train_dataset"),
    "nothing to evaluate on": (lambda: our_trainer().evaluate(), "eval_dataset"),
    "forward": (lambda: (own := our_trainer())._wrap_model(own.model)(input_ids=None), "gather_model"),
    "counts of microbatches": (lambda: runs.make_trainer("llava", COUNTS), r"replica_microbatches=\[3, 2\]"),
    "ranks": (lambda: runs.make_trainer("llava", {LM: {"pp_size": 4}}), "5 ranks .* but 2 "),
    "fp16": (lambda: runs.make_trainer("llava", {}, fp16=True), "fp16=True"),
    "different models": (different_models, r"`lm_head.weight` is different on .*0.* than on rank.* 1"),
    "different plans": (different_plans, r"different plans \(rank 0: \w+, rank 1: \w+\)"),
    "different datasets": (different_batches, "different global batches"),
    "different batches": (lambda: different_batches(global_batch_size=(7, 8)), "different global batches"),
    "different seeds": (lambda: different_batches(data_seed=(0, 1)), "different global batches"),
    "different checkpoints": (lambda: different_folders(True), "`run-0` on rank 0 and `run-1` on rank 1"),
    "different folders": (lambda: different_folders(False), "`run-0` on rank 0 and `run-1` on rank 1"),
}
"""What differs among ranks, or can't be -> who meets it, and what is said."""


def refusals(names: list[str]) -> dict[str, str]:
    """Case -> why it is refused on this rank."""
    said = {}
    for name in names:
        call, _ = REFUSED[name]
        with pytest.raises((ValueError, RuntimeError)) as raised:
            call()
        said[name] = str(raised.value)
    return said


@pytest.mark.distributed
def test_what_cannot_be_right_is_refused_alike_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    chosen = in_turn(REFUSED, "optimizers", "forward", "ranks", "different models", "different seeds")
    first, second = run_distributed(refusals, 2, [*chosen])
    assert first == second
    for name, (_, text) in chosen.items():
        assert re.search(text, first[name]), (name, first[name])


def image_missing(all_of_them: bool) -> None:
    """Placeholders that ask for more rows than the images of their sample have, or for those of no image."""
    trainer = runs.make_trainer("llava", PIPELINE if all_of_them else {VISION: {"freeze": True}, **PIPELINE})
    for sample in trainer.train_dataset:
        if all_of_them:
            sample.pop("pixel_values", None)
        elif len(sample.get("pixel_values", ())) == 2:
            sample["pixel_values"] = sample["pixel_values"][:1]
    trainer.train()


@pytest.mark.distributed
@pytest.mark.parametrize("all_of_them", [deep(True), False])
def test_placeholders_without_their_image_are_counted(all_of_them: bool):
    assert_ranks_raise(image_missing, 3, all_of_them, match=r"\d+ .*`image`.*`vision` .*\d+")


def an_evaluation_fails() -> None:
    runs.make_trainer("llava", {}, compute_metrics=lambda prediction: {"x": 1 / 0}).evaluate()


@pytest.mark.distributed
def test_metrics_that_raise_end_all_ranks():
    errors = assert_ranks_raise(an_evaluation_fails, 2, match="division by zero")
    assert all("rank 0: ZeroDivisionError" in error for error in errors[1:])


def no_labels() -> None:
    trainer = runs.make_trainer("llava", {})
    for sample in trainer.train_dataset:
        del sample["labels"]
    trainer.train()


@pytest.mark.distributed
def test_a_dataset_without_labels_is_refused_at_its_first_step():
    assert_ranks_raise(no_labels, 2, match="no `labels`")


# Models


def router_losses() -> Any:
    """Doge's loss takes the routes of its product keys."""
    model = hf.DogeForCausalLM(shrunk(hf.DogeConfig(), {"is_moe": True}))
    check_model(model)
    model.config.output_router_logits = True
    return model


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "another loss over the load of experts": (router_losses, "`output_router_logits=True` of `DogeForCausalLM`"),
    "a norm over a whole batch": (lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(2)), "`0` is a `BatchNorm1d`"),
    "masked tokens": (lambda: hf.BertForMaskedLM(shrunk(hf.BertConfig())), "is_decoder=True"),
    "no loss": (lambda: hf.BertModel(shrunk(hf.BertConfig())), "`BertModel`"),
    **{name: (make, "") for name, make in ALL.items()},
}


@pytest.mark.parametrize("name", MODELS)
def test_models_without_the_loss_of_the_next_token_are_refused(name: str):
    make, said = MODELS[name]
    model = make()
    with pytest.raises(ValueError, match=said or f"`{type(model).__name__}`"):
        check_model(model)


@pytest.mark.parametrize("make", [with_whisper, partial(shrunk_models.build, "bart"), tiny.FAMILIES["voxtral"]])
def test_encoders_and_decoders_of_such_models_are_not_refused(make: Callable[[], Any]):
    check_model(make())


def test_layers_in_no_module_are_told_of_and_no_plan_is_searched_for(monkeypatch: pytest.MonkeyPatch):
    """They run as parts of the language model, whose times and layout they then are not."""
    told: list[str] = []
    monkeypatch.setattr(checks.logger, "warning", told.append)
    model = tiny.FAMILIES["voxtral"]()
    check_model(model)
    assert not told
    model.config.audio_token_id = None
    args = MultimodalTrainingArguments(output_dir="unused", use_cpu=True, report_to="none")
    prepare_model(model, args, MultimodalParallelPlugin.from_any({LM: {}}), World())
    (text,) = told
    assert "`model.audio_tower.layers` (4 `Voxtral" in text
    with pytest.raises(ValueError, match=r"model.audio_tower.layers.*`multimodal_parts`"):
        prepare_model(model, args, MultimodalParallelPlugin.from_any("auto"), World())
    assert len(told) == 1
