"""What can't be right is refused with one sentence on every rank, and nothing hangs."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import BertConfig, BertForMaskedLM, BertModel, Trainer

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.plan import MultimodalParallelPlugin
from hf_mmparallel.trainer.argument_table import ARGUMENTS, Refused, check_arguments
from hf_mmparallel.trainer.build import prepare_model
from hf_mmparallel.world import World
from tests import tiny
from tests.distributed import assert_ranks_raise, run_distributed

from . import encoder_decoders, runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
PIPELINE = {LM: {"pp_size": 2}}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers make their output folder even when they save nothing."""
    monkeypatch.chdir(tmp_path)


def refused(call: Callable[[], Any]) -> str:
    """The sentence of the `ValueError` that `call` raises."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "not refused"


def sentences(cases: dict[str, tuple[str, dict, dict]]) -> dict[str, str]:
    """Name -> why a case is refused on this rank."""
    return {
        name: refused(lambda: runs.make_trainer(family, parallel, **arguments))  # noqa: B023
        for name, (family, parallel, arguments) in cases.items()
    }


UNLIKE = {"replicas": [[{"layers": [0, 4], "ranks": [[rank]]}] for rank in (0, 1)]}
LAYOUTS = {
    "other microbatches than the batch has": (
        ("llava", {"modules": {VISION: UNLIKE, LM: UNLIKE}, "replica_microbatches": [3, 2]}, {}),
        r"`replica_microbatches=\[3, 2\]` of the plan are 5 microbatches, but a global batch of 8 samples in "
        r"microbatches of 2 has 4\. Change the batch sizes or these numbers, or leave them out",
    ),
    "too many ranks": (
        ("llava", {LM: {"pp_size": 4}}, {}),
        r"The plan is for 5 ranks \(vision: dp 1 x pp 1 x tp 1 = 1; language_model: dp 1 x pp 4 x tp 1 = 4\), but 2 "
        r"were launched. Launch 5 processes or change the sizes.$",
    ),
    "too few ranks": (
        ("llava", {VISION: {}, LM: {"colocate_with": VISION}}, {}),
        r"The plan is for 1 ranks .*but 2 were launched. Launch 1 processes",
    ),
    "a module that is not there": (
        ("llava", {"vison": {"dp_size": 2}}, {}),
        r"The model has no `vison`. Did you mean `vision`\?",
    ),
    "heads that tp does not divide": (
        ("llava", {LM: {"tp_size": 3}}, {}),
        r"`tp_size=3` does not divide the 4 attention heads of `language_model`. Use a `tp_size` that does, such as 2",
    ),
    "key and value heads that tp does not divide": (
        ("llava", {LM: {"tp_size": 4}}, {}),
        r"`tp_size=4` does not divide the 2 key and value heads of `language_model`",
    ),
    "more stages than layers": (
        ("llava", {LM: {"pp_size": 5}}, {}),
        r"`pp_size=5` needs at least 5 layers; `language_model` has 4. Use `pp_size<=4`",
    ),
    "stages that miss a layer": (
        ("llava", {LM: {"layers_per_stage": [1, 2]}}, {}),
        r"`layers_per_stage=\[1, 2\]` adds up to 3; `language_model` has 4 layers",
    ),
    "stages of a DeepStack tower": (
        ("qwen3_vl", {VISION: {"pp_size": 2}}, {}),
        r"`pp_size=2`: `vision` outputs features of inner layers \(DeepStack\).* Use `pp_size=1`",
    ),
    "ranks shared with a later module": (
        ("llava", {VISION: {"colocate_with": LM}, LM: {"dp_size": 2}}, {}),
        r"`vision` can't be colocated with `language_model`, which must come before",
    ),
    "frozen names that are not there": (
        ("llava", {VISION: {"freeze": "projektor"}}, {}),
        r"`freeze='projektor'` of module `vision` matches none of its .* Use `True`, `'tower'` or a regular",
    ),
    "adapters on layers that are not there": (
        ("llava", {LM: {"peft_config": {"target_modules": ["query"]}}}, {}),
        r"`target_modules=.*query.*` matches no layer of module `language_model`",
    ),
    "batches that contradict": (
        ("llava", {}, {"global_batch_size": 8, "gradient_accumulation_steps": 3}),
        r"`global_batch_size=8` contradicts `per_device_train_batch_size=2` x `gradient_accumulation_steps=3` x 1 "
        r"copies = 6. Leave `gradient_accumulation_steps` out",
    ),
    "fp16": (("llava", {}, {"fp16": True}), r"`fp16=True` can't be used with `parallel`: .* Use `bf16=True`"),
    "fsdp": (("llava", {}, {"fsdp": True}), r"`fsdp=.*can't be used with `parallel`: .* Use `dp_size`"),
    "torch_compile": (("llava", {}, {"torch_compile": True}), r"`torch_compile=True` can't be used .* Leave it out"),
    "neftune": (("llava", {}, {"neftune_noise_alpha": 5.0}), r"`neftune_noise_alpha=5.0` can't be used"),
    "auto_find_batch_size": (
        ("llava", {}, {"auto_find_batch_size": True}),
        r"`auto_find_batch_size=True` can't be used .*Lower `per_device_train_batch_size`",
    ),
    "batch_eval_metrics": (("llava", {}, {"batch_eval_metrics": True}), r"`batch_eval_metrics=True` can't be used"),
    "use_liger_kernel": (("llava", {}, {"use_liger_kernel": True}), r"`use_liger_kernel=True` can't be used"),
    "lomo": (("llava", {}, {"optim": "lomo"}), r"`optim=.*lomo.* can't be used with `parallel`: .*adamw_torch"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two ranks says to each case; one set of ranks for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("layouts"))
        return run_distributed(sentences, 2, {name: case for name, (case, _) in LAYOUTS.items()})


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_does_not_fit_is_refused_with_a_reason(said: list[dict[str, str]], name: str):
    first, second = (rank[name] for rank in said)
    assert first == second
    assert re.search(LAYOUTS[name][1], first), first


class OwnLoss(MultimodalParallelTrainer):
    """A user's subclass."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
        raise AssertionError("never reached")


class Bag:
    """Samples without indices and without a length."""

    def __iter__(self):
        return iter(tiny.make_dataset("llava", 4))


def trainer_parts() -> dict[str, str]:
    """Parts of a Trainer that can't hold under a plan, and parts that are missing."""
    first = runs.make_trainer("llava", {})
    args, data, collator = first.args, first.train_dataset, first.data_collator
    given = {"args": args, "train_dataset": data, "data_collator": collator}
    model = tiny.FAMILIES["llava"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = {}

    def attempt(name: str, cls: Any = MultimodalParallelTrainer, then: Any = lambda trainer: None, **changed: Any):
        words = {"model": tiny.FAMILIES["llava"](), **given, **changed}
        result[name] = refused(lambda: then(cls(**words)))

    attempt("compute_loss", OwnLoss)
    attempt("compute_loss_func", compute_loss_func=lambda outputs, labels, num_items_in_batch=None: 0)
    attempt("optimizers", optimizers=(optimizer, None))
    attempt("model_init", model=None, model_init=tiny.FAMILIES["llava"])
    attempt("no model", model=None)
    attempt("encoder-decoder", model=encoder_decoders.pp_formulanet())
    attempt("a bag", train_dataset=Bag(), then=lambda trainer: trainer.train())
    attempt("an evaluated bag", eval_dataset=Bag(), then=lambda trainer: trainer.evaluate())
    attempt("nothing to train on", train_dataset=None, then=lambda trainer: trainer.train())
    attempt("nothing to evaluate on", then=lambda trainer: trainer.evaluate())
    attempt("forward", then=lambda trainer: refuses_forward(trainer))
    return result


def refuses_forward(trainer: Trainer) -> None:
    """A direct call of the engine, as code for one process does."""
    try:
        trainer._wrap_model(trainer.model)(input_ids=torch.ones(1, 2).long())
    except RuntimeError as error:
        raise ValueError(error) from error


PARTS = {
    "compute_loss": r"`OwnLoss.compute_loss` is overridden, .* Remove the override, or train without `parallel`",
    "compute_loss_func": r"`compute_loss_func` can't be used with `parallel`: .* Leave it out",
    "optimizers": r"`optimizers` can't be used with `parallel`: .* Use `optimizer_cls_and_kwargs` or `args.optim`",
    "model_init": r"`model_init` can't be used with `parallel`: .* Pass `model`",
    "no model": r"`model=None` .* `parallel`.* Pass",
    "encoder-decoder": r"`PPFormulaNetForConditionalGeneration` is an encoder-decoder model: .* without `parallel`",
    "a bag": r"A `Bag` has neither `__getitem__` and `__len__` nor .* Use a dataset with both, or an `Iter",
    "an evaluated bag": r"A `Bag` has neither",
    "nothing to train on": r"training requires a train_dataset",
    "nothing to evaluate on": r"evaluation requires an eval_dataset",
    "forward": r"no forward of its own, each rank holds a part. Use `trainer.gather_model\(\)`",
}


def test_parts_of_a_trainer_that_cannot_hold_are_refused():
    first, second = run_distributed(trainer_parts, 2)
    assert first == second
    assert first.keys() == PARTS.keys()
    for name, pattern in PARTS.items():
        assert re.search(pattern, first[name]), (name, first[name])


def different_models() -> None:
    model = tiny.FAMILIES["llava"]()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.get_parameter("lm_head.weight")[0, 0] += 1e-3
    runs.make_trainer("llava", {}, model=model)


def different_plans() -> None:
    runs.make_trainer("llava", {VISION: {"dp_size": 2}} if dist.get_rank() < 2 else PIPELINE)


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


@pytest.mark.parametrize(
    ("fn", "world_size", "sentence"),
    [
        (
            different_folders_to_save_checkpoints,
            2,
            "`output_dir` is `run-0` on rank 0 and `run-1` on rank 1",
        ),
        (different_folders_to_save_the_model, 2, "`output_dir` is `run-0` on rank 0 and `run-1` on rank 1"),
        (different_models, 2, r"`lm_head.weight` is different on ranks? .*0.* than on rank.* 1"),
        (
            different_plans,
            3,
            r"The ranks were given different plans \(rank 0: \w+, rank 1: \w+, rank 2: \w+\). Give all",
        ),
        (different_batches, 2, r"The ranks drew different global batches"),
        (different_datasets, 2, r"The ranks drew different global batches"),
        (different_seeds, 2, r"The ranks drew different global batches"),
    ],
)
def test_ranks_that_disagree_say_on_what(fn: Any, world_size: int, sentence: str):
    errors = assert_ranks_raise(fn, world_size, match=sentence)
    assert len(set(errors)) == 1


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


@pytest.mark.parametrize(("rank", "workers"), [(0, 0), (2, 0), (None, 1)])
def test_a_sample_that_cannot_be_read_ends_all_ranks(rank: int | None, workers: int):
    errors = assert_ranks_raise(a_sample_cannot_be_read, 3, rank, workers, match=r"images/5.png is truncated")
    if rank is not None:
        assert all(f"It failed on rank {rank}. Remove it" in error for error in errors)
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


@pytest.mark.parametrize("fn", [media_missing, one_image_too_few])
def test_placeholders_without_their_image_are_counted(fn: Any):
    assert_ranks_raise(fn, 3, match=r"have \d+ placeholders of `image`.*`vision` made \d+ features")


def an_evaluation_fails() -> None:
    trainer = runs.make_trainer("llava", PIPELINE, compute_metrics=lambda prediction: {"x": 1 / 0})
    trainer.evaluate()


def test_metrics_that_raise_end_all_ranks():
    errors = assert_ranks_raise(an_evaluation_fails, 3, match="division by zero")
    assert all("rank 0: ZeroDivisionError" in error for error in errors[1:])


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("deepspeed", {"zero_optimization": {"stage": 2}}, r"`deepspeed=.* it wraps one model .* Use `dp_size`"),
        ("parallelism_config", SimpleNamespace(total_size=2), r"`parallelism_config=.* Give the sizes of each module"),
        ("train_sampling_strategy", "batch_rebalance", r'`train_sampling_strategy=.* Use `"random"`'),
        ("save_on_each_node", True, r"`save_on_each_node=True` .* Use an `output_dir` that all hosts share"),
    ],
)
def test_other_ways_to_spread_a_model_are_refused(name: str, value: Any, sentence: str):
    args = MultimodalTrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    check_arguments(args)
    setattr(args, name, value)
    with pytest.raises(ValueError, match=sentence):
        check_arguments(args)


def test_the_docs_list_every_refused_argument():
    page = Path(__file__).parents[2] / "docs" / "differences.md"
    refused = page.read_text().partition("## What a plan refuses")[2]
    names = [name for name, entry in ARGUMENTS.items() if isinstance(entry, Refused)]
    assert [name for name in names if f"`{name}" not in refused] == []


def test_losses_and_norms_over_a_whole_batch_are_refused():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from hf_mmparallel.trainer.start_checks import check_model

    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 2, "vocab_size": 32}
    quiet = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads))
    check_model(quiet)
    quiet.config.output_router_logits = True
    with pytest.raises(ValueError, match=r"`output_router_logits=True` of `Qwen3MoeConfig` .* Set it to `False`"):
        check_model(quiet)
    with pytest.raises(ValueError, match=r"`1` is a `BatchNorm1d`: it mixes the samples .* Replace it"):
        check_model(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))


@pytest.mark.parametrize("make", encoder_decoders.ALL)
def test_encoder_decoder_models_are_refused(make: Callable[[], Any]):
    from hf_mmparallel.trainer.start_checks import check_model

    model = make()
    sentence = f"`{type(model).__name__}` is an encoder-decoder model: .* Train it without `parallel`, or"
    with pytest.raises(ValueError, match=sentence):
        check_model(model)


def test_layers_in_no_module_are_told_of(monkeypatch: pytest.MonkeyPatch):
    """They run as parts of the language model, whose times and layout they then are not."""
    from hf_mmparallel.trainer import start_checks as checks

    told: list[str] = []
    monkeypatch.setattr(checks.logger, "warning", told.append)
    model = tiny.FAMILIES["voxtral"]()
    checks.check_model(model)
    assert not told
    model.config.audio_token_id = None
    checks.check_model(model)
    (text,) = told
    assert "has layers that are in no module of a plan" in text and "`model.audio_tower.layers` (4 `Voxtral" in text
    assert text.endswith("They run with the language model, as parts of it.")
    with pytest.raises(ValueError, match="has layers that are in no module of a plan.*`multimodal_parts`"):
        checks.check_model(model, is_searched=True)
    assert len(told) == 1


def test_models_without_the_loss_of_the_next_token_are_refused():
    from hf_mmparallel.trainer.start_checks import check_model

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=64, num_attention_heads=4, **sizes)
    with torch.device("meta"), pytest.raises(ValueError, match="is a masked language model.*Set `is_decoder=True`"):
        check_model(BertForMaskedLM(config))
    with torch.device("meta"), pytest.raises(ValueError, match="`BertModel` has no language-model head"):
        check_model(BertModel(config))


def test_a_plan_is_not_searched_for_where_its_prediction_would_leave_out_layers(tmp_path: Path):
    model = tiny.FAMILIES["voxtral"]()
    model.config.audio_token_id = None
    args = MultimodalTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    prepare_model(model, args, MultimodalParallelPlugin.from_any({"language_model": {}}), World())
    with pytest.raises(ValueError, match="has layers that are in no module of a plan.* Give the model a method"):
        prepare_model(model, args, MultimodalParallelPlugin.from_any("auto"), World())


@pytest.mark.parametrize(
    "make", [encoder_decoders.with_whisper, encoder_decoders.bart_decoder, tiny.FAMILIES["voxtral"]]
)
def test_encoders_and_decoders_of_such_models_are_not_refused(make: Callable[[], Any]):
    from hf_mmparallel.trainer.start_checks import check_model

    check_model(make())


def no_labels() -> None:
    trainer = runs.make_trainer("llava", PIPELINE)
    for sample in trainer.train_dataset:
        del sample["labels"]
    trainer.train()


def test_a_dataset_without_labels_is_refused_at_its_first_step():
    assert_ranks_raise(no_labels, 3, match="The batch has no `labels` to train on, only .*`input_ids`.* Add a column")
