"""What can't be right is refused with one sentence on every rank, and nothing hangs."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import BertConfig, BertForMaskedLM, BertModel

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.plan import MultimodalParallelPlugin
from hf_mmparallel.trainer import start_checks as checks
from hf_mmparallel.trainer.build import prepare_model
from hf_mmparallel.trainer.start_checks import check_model
from hf_mmparallel.world import World
from tests import tiny
from tests.distributed import assert_ranks_raise, run_distributed

from . import encoder_decoders, runs

VISION, LM = "vision", "language_model"
PIPELINE = {LM: {"pp_size": 2}}


UNLIKE = {"replicas": [[{"layers": [0, 4], "ranks": [[rank]]}] for rank in (0, 1)]}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "other microbatches than the batch has": (
        {"modules": {VISION: UNLIKE, LM: UNLIKE}, "replica_microbatches": [3, 2]},
        {},
    ),
    "too many ranks": ({LM: {"pp_size": 4}}, {}),
    "a module that is not there": ({"vison": {"dp_size": 2}}, {}),
    "batches that contradict": ({}, {"global_batch_size": 8, "gradient_accumulation_steps": 3}),
    "fp16": ({}, {"fp16": True}),
}


class OwnLoss(MultimodalParallelTrainer):
    """A user's subclass."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
        raise AssertionError("never reached")


class Bag:
    """Samples without indices and without a length."""

    def __iter__(self):
        return iter(tiny.make_dataset("llava", 4))


def different_models() -> None:
    model = tiny.FAMILIES["llava"]()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.get_parameter("lm_head.weight")[0, 0] += 1e-3
    runs.make_trainer("llava", {}, model=model)


def different_plans() -> None:
    shared = {VISION: {"dp_size": 2}, LM: {"colocate_with": VISION}}
    runs.make_trainer("llava", shared if dist.get_rank() else {LM: {}})


def different_batches() -> None:
    runs.make_trainer("llava", {}, global_batch_size=8 if dist.get_rank() else 7).train()


def different_datasets() -> None:
    trainer = runs.make_trainer("llava", {}, max_steps=20)
    if dist.get_rank() == 1:
        trainer.train_dataset = trainer.train_dataset[:-9]
    trainer.train()


def different_seeds() -> None:
    runs.make_trainer("llava", {}, data_seed=dist.get_rank()).train()


def different_folders_to_save_checkpoints() -> None:
    runs.make_trainer("llava", {}, f"run-{dist.get_rank()}", save_strategy="steps", save_steps=2)


def different_folders_to_save_the_model() -> None:
    runs.make_trainer("llava", {}).save_model(f"run-{dist.get_rank()}")


DISAGREEMENTS = {
    different_folders_to_save_checkpoints: "`run-0` on rank 0 and `run-1` on rank 1",
    different_folders_to_save_the_model: "`run-0` on rank 0 and `run-1` on rank 1",
    different_models: r"`lm_head.weight` is different on .*0.* than on rank.* 1",
    different_plans: r"different plans \(rank 0: \w+, rank 1: \w+\)",
    different_batches: "different global batches",
    different_datasets: "different global batches",
    different_seeds: "different global batches",
}
SAID = {
    "other microbatches than the batch has": r"replica_microbatches=\[3, 2\]",
    "too many ranks": r"5 ranks \(vision: dp 1 x pp 1 x tp 1 = 1; language_model: dp 1 x pp 4 x tp 1 = 4\), but 2 ",
    "a module that is not there": "`vison`",
    "batches that contradict": "gradient_accumulation_steps=3",
    "fp16": "fp16=True",
    "compute_loss": "OwnLoss.compute_loss",
    "optimizers": "`optimizers`",
    "no model": "model=None",
    "a bag": "`Bag`",
    "an evaluated bag": "`Bag`",
    "nothing to train on": "train_dataset",
    "nothing to evaluate on": "eval_dataset",
    "forward": "gather_model",
    **{fn.__name__: pattern for fn, pattern in DISAGREEMENTS.items()},
}
"""Case -> what is in its sentence."""


def refusals() -> dict[str, str]:
    """Case -> why it is refused on this rank."""
    result = {}

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            result[name] = str(error)

    for name, (parallel, arguments) in LAYOUTS.items():
        attempt(name, lambda: runs.make_trainer("llava", parallel, **arguments))  # noqa: B023
    first = runs.make_trainer("llava", {})
    given = {"args": first.args, "train_dataset": first.train_dataset, "data_collator": first.data_collator}

    def trainer(cls: Any = MultimodalParallelTrainer, **changed: Any) -> Any:
        return cls(**{"model": tiny.FAMILIES["llava"](), **given, **changed})

    optimizer = torch.optim.SGD(first.model.parameters(), lr=1.0)
    attempt("compute_loss", lambda: trainer(OwnLoss))
    attempt("optimizers", lambda: trainer(optimizers=(optimizer, None)))
    attempt("no model", lambda: trainer(model=None))
    attempt("a bag", lambda: trainer(train_dataset=Bag()).train())
    attempt("an evaluated bag", lambda: trainer(eval_dataset=Bag()).evaluate())
    attempt("nothing to train on", lambda: trainer(train_dataset=None).train())
    attempt("nothing to evaluate on", lambda: trainer().evaluate())
    attempt("forward", lambda: first._wrap_model(first.model)(input_ids=torch.ones(1, 2).long()))
    for fn in DISAGREEMENTS:
        attempt(fn.__name__, fn)
    return result


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two ranks says to each case; one set of ranks for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("refusals"))
        return run_distributed(refusals, 2)


@pytest.mark.distributed
@pytest.mark.parametrize("name", SAID)
def test_what_cannot_be_right_is_refused_alike_on_all_ranks(said: list[dict[str, str]], name: str):
    first, second = (rank.get(name, "not refused") for rank in said)
    assert first == second and re.search(SAID[name], first), (first, second)


class Broken(list):
    """A dataset with one sample that can't be read, on one rank or on all; it has an image, so that all need it."""

    def __init__(self, samples: list, rank: int | None):
        super().__init__(samples)
        self.rank = rank
        with_images = (index for index in range(5, len(samples)) if len(samples[index].get("pixel_values", ())))
        self.broken = next(with_images)  # not among those from which columns are read

    def __getitem__(self, index: Any) -> Any:
        if index == self.broken and self.rank in (None, dist.get_rank()):
            raise OSError("images/5.png is truncated")
        return super().__getitem__(index)


def a_sample_cannot_be_read(rank: int | None, workers: int = 0) -> None:
    if workers:
        multiprocessing.set_start_method("fork", force=True)  # what a loader uses outside of the tests' own server
    trainer = runs.make_trainer("llava", PIPELINE, dataloader_num_workers=workers)
    trainer.train_dataset = Broken(trainer.train_dataset, rank)
    trainer.train()


@pytest.mark.distributed
@pytest.mark.parametrize(("rank", "workers"), [(2, 0), pytest.param(None, 1, marks=pytest.mark.deep)])
def test_a_sample_that_cannot_be_read_ends_all_ranks(rank: int | None, workers: int):
    errors = assert_ranks_raise(a_sample_cannot_be_read, 3, rank, workers, match=r"images/5.png is truncated")
    if rank is not None:
        assert all(f"rank {rank}: BadSampleError" in error for other, error in enumerate(errors) if other != rank)


def media_missing() -> None:
    """Placeholders without an image: no sample has pixels."""
    trainer = runs.make_trainer("llava", PIPELINE)
    trainer.train_dataset = [{k: v for k, v in s.items() if k != "pixel_values"} for s in trainer.train_dataset]
    trainer.train()


def one_image_too_few() -> None:
    """The placeholders of some samples ask for more rows than their images have."""
    trainer = runs.make_trainer("llava", {VISION: {"freeze": True}, **PIPELINE})
    for sample in trainer.train_dataset:
        if len(sample.get("pixel_values", ())) == 2:
            sample["pixel_values"] = sample["pixel_values"][:1]
    trainer.train()


@pytest.mark.distributed
@pytest.mark.parametrize("fn", [pytest.param(media_missing, marks=pytest.mark.deep), one_image_too_few])
def test_placeholders_without_their_image_are_counted(fn: Any):
    assert_ranks_raise(fn, 3, match=r"\d+ .*`image`.*`vision` .*\d+")


def an_evaluation_fails() -> None:
    trainer = runs.make_trainer("llava", {}, compute_metrics=lambda prediction: {"x": 1 / 0})
    trainer.evaluate()


@pytest.mark.distributed
def test_metrics_that_raise_end_all_ranks():
    errors = assert_ranks_raise(an_evaluation_fails, 2, match="division by zero")
    assert all("rank 0: ZeroDivisionError" in error for error in errors[1:])


def test_losses_and_norms_over_a_whole_batch_are_refused():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 2, "vocab_size": 32}
    quiet = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads))
    check_model(quiet)
    quiet.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits=True"):
        check_model(quiet)
    with pytest.raises(ValueError, match="`1` is a `BatchNorm1d`"):
        check_model(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))


@pytest.mark.parametrize("make", encoder_decoders.ALL)
def test_encoder_decoder_models_are_refused(make: Callable[[], Any]):
    model = make()
    with pytest.raises(ValueError, match=f"`{type(model).__name__}`"):
        check_model(model)


def test_layers_in_no_module_are_told_of(monkeypatch: pytest.MonkeyPatch):
    """They run as parts of the language model, whose times and layout they then are not."""
    told: list[str] = []
    monkeypatch.setattr(checks.logger, "warning", told.append)
    model = tiny.FAMILIES["voxtral"]()
    check_model(model)
    assert not told
    model.config.audio_token_id = None
    check_model(model)
    (text,) = told
    assert "`model.audio_tower.layers` (4 `Voxtral" in text
    with pytest.raises(ValueError, match="model.audio_tower.layers.*`multimodal_parts`"):
        check_model(model, is_searched=True)
    assert len(told) == 1


def test_models_without_the_loss_of_the_next_token_are_refused():
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=64, num_attention_heads=4, **sizes)
    with torch.device("meta"), pytest.raises(ValueError, match="is_decoder=True"):
        check_model(BertForMaskedLM(config))
    with torch.device("meta"), pytest.raises(ValueError, match="`BertModel`"):
        check_model(BertModel(config))


def test_a_plan_is_not_searched_for_where_its_prediction_would_leave_out_layers(tmp_path: Path):
    model = tiny.FAMILIES["voxtral"]()
    model.config.audio_token_id = None
    args = MultimodalTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    prepare_model(model, args, MultimodalParallelPlugin.from_any({"language_model": {}}), World())
    with pytest.raises(ValueError, match="model.audio_tower.layers"):
        prepare_model(model, args, MultimodalParallelPlugin.from_any("auto"), World())


@pytest.mark.parametrize(
    "make", [encoder_decoders.with_whisper, encoder_decoders.bart_decoder, tiny.FAMILIES["voxtral"]]
)
def test_encoders_and_decoders_of_such_models_are_not_refused(make: Callable[[], Any]):
    check_model(make())


def no_labels() -> None:
    trainer = runs.make_trainer("llava", {})
    for sample in trainer.train_dataset:
        del sample["labels"]
    trainer.train()


@pytest.mark.distributed
def test_a_dataset_without_labels_is_refused_at_its_first_step():
    assert_ranks_raise(no_labels, 2, match="no `labels`")
