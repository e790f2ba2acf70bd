"""Trainers without a `data_collator`: the stock Trainer's batches, at size 1 to the bit, and under a plan."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_mmparallel import ChatCollator, MultimodalParallelTrainer, MultimodalTrainingArguments, PackingCollator
from hf_mmparallel.trainer import agreement, evaluation
from tests import tiny
from tests.data.conversations import conversation
from tests.data.processors import PROCESSORS, tokenizer
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs

VISION, LM = "vision", "language_model"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers make their output folder even when they save nothing."""
    monkeypatch.chdir(tmp_path)


# Size 1


class Regression(nn.Module):
    """A model of a user's own, whose forward takes no `attention_mask`."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 4)
        self.head = nn.Linear(4, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def classifier(**settings: Any) -> PreTrainedModel:
    return LlamaForSequenceClassification(LlamaConfig(**{**tiny.TEXT, "num_hidden_layers": 1}, **settings))


def translator() -> PreTrainedModel:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def samples(labels: Callable[[int, list[int]], Any], ragged: bool = False) -> list[dict[str, Any]]:
    """Twelve samples, of one length or of several."""
    found = []
    for index in range(12):
        ids = [(7 * index + 3 * place) % 40 + 1 for place in range(5 + (index % 3 if ragged else 0))]
        found.append({"input_ids": ids, "labels": labels(index, ids)})
    return found


CASES: dict[str, tuple[Callable[[], Any], list[dict[str, Any]]]] = {
    "classes": (classifier, samples(lambda i, ids: i % 2)),
    "ragged classes": (classifier, samples(lambda i, ids: i % 2, ragged=True)),
    "numbers": (lambda: classifier(num_labels=1), samples(lambda i, ids: i / 7)),
    "several classes": (
        lambda: classifier(problem_type="multi_label_classification"),
        samples(lambda i, ids: [float(i % 2), 1.0]),
    ),
    "another length": (translator, samples(lambda i, ids: [*ids, 1, 2])),
    "no mask": (Regression, samples(lambda i, ids: ids)),
}


def _trained(cls: Any, args_cls: Any, name: str, as_rows: bool, resume: bool = False) -> Trainer:
    """A Trainer on a case, trained; or resumed from its second step."""
    make, data = CASES[name]
    set_seed(0)
    arguments = {**runs.COMMON, "remove_unused_columns": True, "save_strategy": "steps", "save_steps": 2}
    args = args_cls(output_dir=cls.__name__, per_device_train_batch_size=4, **{**arguments, "max_steps": 3})
    dataset: Any = Dataset.from_list(data) if as_rows else data
    words = tokenizer() if "ragged" in name else None
    trainer = cls(model=make(), args=args, train_dataset=dataset, eval_dataset=dataset, processing_class=words)
    trainer.train(resume_from_checkpoint=f"{cls.__name__}/checkpoint-2" if resume else None)
    return trainer


@pytest.mark.parametrize(
    "name",
    [deep(name, unless=name not in ("classes", "numbers", "several classes")) for name in CASES],
)
def test_without_a_collator_size_1_is_the_stock_trainer(name: str):
    """Also when it is resumed in the middle of an epoch, which draws the same batches."""
    for as_rows, resume in ((True, False), (False, True)):
        ours = _trained(MultimodalParallelTrainer, MultimodalTrainingArguments, name, as_rows, resume)
        stock = _trained(Trainer, TrainingArguments, name, as_rows, resume)
        assert runs.step_logs(ours) == runs.step_logs(stock) != []
        assert ours.evaluate()["eval_loss"] == stock.evaluate()["eval_loss"]
        for own, wanted in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
            assert torch.equal(own, wanted)


# A plan


def one_image_each(size: int, ragged: bool, listed: bool) -> list[dict[str, Any]]:
    """Samples of Llava with an image, `[3, height, width]` or as a list of one."""
    data = tiny.make_dataset("llava", 3 * size, shapes=[tiny.Shape(1, 0, 6)] * 3 * size)
    data = data[:size] if ragged else data[::3]
    return [{**sample, "pixel_values": sample["pixel_values"][slice(None) if listed else 0]} for sample in data]


def _train(data: list[dict[str, Any]], **arguments: Any) -> runs.Run:
    """Our Trainer without a collator on this rank."""
    torch.set_num_threads(1)
    runs.draw_nothing()
    arguments = {**runs.COMMON, "global_batch_size": 4, "per_device_train_batch_size": 1, "max_steps": 2, **arguments}
    args = MultimodalTrainingArguments(
        output_dir="unused", parallel={VISION: {}}, ddp_backend="gloo", remove_unused_columns=True,
        **{name: value for name, value in arguments.items() if name != "remove_unused_columns"},
    )  # fmt: skip
    trainer = MultimodalParallelTrainer(tiny.FAMILIES["llava"](), args, train_dataset=data)
    return runs.run_of(trainer)


FORMS = {
    "stacked": (False, False, {}),
    "stacked, ragged text": (True, False, {}),
    "stacked, packed": (False, False, {"packing": True}),
    "lists": (False, True, {}),
}


def _all_forms() -> list[runs.Run]:
    return [_train(one_image_each(8, ragged, listed), **extra) for ragged, listed, extra in FORMS.values()]


@pytest.mark.distributed
def test_images_that_the_stock_trainer_stacks_train_alike_under_a_plan(on_ranks: list[dict[str, Any]]):
    found = dict(zip(FORMS, on_ranks[0]["forms"], strict=True))
    args = {**runs.COMMON, "per_device_train_batch_size": 4, "max_steps": 2, "remove_unused_columns": True}
    stock = Trainer(
        tiny.FAMILIES["llava"](),
        TrainingArguments(output_dir="unused", **args),
        train_dataset=one_image_each(8, ragged=False, listed=False),  # type: ignore[arg-type]
    )
    stock.train()
    wanted = runs.Run(runs.step_logs(stock), dict(stock.model.state_dict()))
    for form in ("stacked", "stacked, packed", "lists"):
        runs.assert_same_run(found[form], wanted)
    padded = runs.stock(
        "llava", data=one_image_each(8, ragged=True, listed=True), max_steps=2, per_device_train_batch_size=4
    )
    runs.assert_same_run(found["stacked, ragged text"], padded)


# Columns


def chat_model() -> PreTrainedModel:
    """Llava for the tokens and images of the tiny processor."""
    processor = PROCESSORS["llava"]()
    model = tiny.FAMILIES["llava"]()
    config = model.config
    config.image_token_id = config.image_token_index = processor.tokenizer.convert_tokens_to_ids("<image>")
    config.vision_config.image_size, config.vision_config.patch_size = 28, 14
    config.text_config.vocab_size = len(processor.tokenizer) + 8
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(model)(config)


def chats(count: int, roles: tuple[str, str] = ("user", "assistant")) -> list[dict[str, Any]]:
    """Conversations, some about an image."""
    names = dict(zip(("user", "assistant"), roles, strict=True))
    found = [conversation([(28, 28)] * (index % 2), index) for index in range(count)]
    for sample in found:
        sample["messages"] = [{**message, "role": names[message["role"]]} for message in sample["messages"]]
    return found


def _chat_trainer(parallel: Any, data: Any, **words: Any) -> Any:
    torch.set_num_threads(1)
    runs.draw_nothing()
    keep = words.pop("remove_unused_columns", True)
    settings = {**runs.COMMON, "remove_unused_columns": keep, "max_steps": 2, "save_strategy": "no"}
    settings |= {"global_batch_size": 4, "per_device_train_batch_size": 2 if parallel else 4}
    settings |= {"ddp_backend": "gloo"} if parallel else {}
    args = MultimodalTrainingArguments(output_dir="unused", parallel=parallel, **settings)
    model = words.pop("model", None) or chat_model()
    return MultimodalParallelTrainer(model, args, train_dataset=data, **words)


def refused(parallel: Any, data: Any, **words: Any) -> str:
    """The sentence with which a Trainer is refused, or its training."""
    try:
        _chat_trainer(parallel, data, **words).train()
    except ValueError as error:
        return str(error)
    return "not refused"


def _losses(parallel: Any, data: Any, **words: Any) -> list[float]:
    trainer = _chat_trainer(parallel, data, **words)
    trainer.train()
    return [row["loss"] for row in runs.step_logs(trainer)]


def renamed(data: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [{name if key == "messages" else key: value for key, value in sample.items()} for sample in data]


def llava_format(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Conversations of `from` and `value`."""
    return [{"id": str(i), "conversations": [{"from": "human", "value": "a"}]} for i, _ in enumerate(data)]


SENTENCES = {
    "no processor": "`train_dataset` .*`messages`.*`processing_class`",
    "no template": "`PreTrainedConfig`",
    "wrong name": r"`train_dataset` .*`messages`.*`ChatCollator`.*\['talks', 'images'\]",
    "wrong name, wrapped": "`train_dataset` .*`messages`.*`ChatCollator`",
    "Llava's format": "`train_dataset` .*`conversations`, .* `from` to `role`",
    "Llava's messages": r"`train_dataset` .*\['from', 'value'\].* `role`",
    "nothing": r"\['question', 'answer'\].*`messages`",
}


def sentences(parallel: Any) -> dict[str, str]:
    """Name -> why a case is refused."""
    from transformers import PreTrainedConfig

    processor, data = PROCESSORS["llava"](), chats(4)
    model = chat_model()
    model.set_attn_implementation({"text_config": "bitfield"})
    chat = ChatCollator(processor, max_length=99)
    talks = ChatCollator(processor, messages_column="conversations")
    rows = llava_format(data)
    return {
        "no processor": refused(parallel, data),
        "no template": refused(parallel, data, processing_class=PreTrainedConfig()),
        "wrong name": refused(parallel, renamed(data, "talks"), data_collator=chat),
        "wrong name, wrapped": refused(
            parallel, renamed(data, "talks"), model=model, data_collator=PackingCollator(chat, model)
        ),
        "Llava's format": refused(parallel, rows, processing_class=processor),
        "Llava's messages": refused(parallel, Dataset.from_list(rows), data_collator=talks),
        "nothing": refused(parallel, Dataset.from_list([{"question": "a", "answer": "b"}] * 4)),
        "no assistant": refused(parallel, chats(4, ("user", "gpt")), data_collator=chat),
    }


def _chat_runs() -> tuple[dict[str, str], dict[str, list[float]]]:
    """On this rank: what is refused, and the losses of collators that the user makes."""
    processor, plan = PROCESSORS["llava"](), {VISION: {}}
    packed = chat_model()
    packed.set_attn_implementation({"text_config": "bitfield"})
    chat = ChatCollator(processor, max_length=99)
    losses = {
        "default": _losses(plan, chats(8), processing_class=processor),
        "own": _losses(plan, chats(8), data_collator=chat),
        "renamed": _losses(
            plan, renamed(chats(8), "talks"), data_collator=ChatCollator(processor, messages_column="talks")
        ),
        "packed": _losses(plan, chats(8), model=packed, data_collator=PackingCollator(chat, packed)),
    }
    return sentences(plan), losses


@pytest.mark.distributed
def test_chat_collators_keep_their_columns_and_missing_ones_are_named(on_ranks: list[dict[str, Any]]):
    wanted = _losses(None, chats(8), data_collator=ChatCollator(PROCESSORS["llava"]()))
    alone = sentences(None)
    (on_first, losses_of), (on_second, _) = (rank["chats"] for rank in on_ranks)
    assert on_first == on_second
    for said in (alone, on_first):
        for name, sentence in SENTENCES.items():
            assert re.search(sentence, said[name]), (name, said[name])
    assert "`labels` are -100" in on_first["no assistant"]
    for name, losses in losses_of.items():
        assert losses == pytest.approx(wanted, rel=1e-5), name


def tokens_of(rows: dict[str, list[Any]]) -> dict[str, Any]:
    """What a transform makes of conversations that a dataset stores."""
    ids = [[5 + len(str(messages)) % 7, 6, 7, 8, 9] for messages in rows["messages"]]
    return {"input_ids": ids, "labels": ids}


def _transformed(parallel: Any) -> list[float]:
    """Losses of a dataset whose transform tokenises; nothing but the transform knows the columns of samples."""
    data = Dataset.from_list([{"messages": sample["messages"]} for sample in chats(8)]).with_transform(tokens_of)
    return _losses(parallel, data, model=tiny.FAMILIES["llama_tied"](), remove_unused_columns=False)


@pytest.mark.distributed
def test_columns_are_those_that_a_transform_makes(on_ranks: list[dict[str, Any]]):
    assert on_ranks[0]["transformed"] == pytest.approx(_transformed(None), rel=1e-5)


def _without_targets() -> tuple[list[str], float]:
    """What is said of a later global batch, and of an evaluation, in which all labels are -100."""
    said: list[str] = []
    agreement.logger.warning = evaluation.logger.warning = lambda text, **_: said.append(text)
    data = tiny.make_dataset("llava", 12)
    for sample in data[4:]:
        sample["labels"] = torch.full_like(sample["labels"], -100)
    sequential = {"train_sampling_strategy": "sequential", "global_batch_size": 4, "max_steps": 3}
    trainer = runs.make_trainer("llava", {VISION: {}}, data=data, **sequential)
    trainer.train()
    assert [row["loss"] > 0 for row in runs.step_logs(trainer)] == [True, False, False]
    return said, trainer.evaluate(data[4:8])["eval_loss"]


@pytest.mark.distributed
def test_batches_without_targets_are_told_of(on_ranks: list[dict[str, Any]]):
    """The first one ends a run, see above."""
    (training, evaluation), loss = on_ranks[0]["without targets"]
    assert "`labels` are -100" in training and "NaN" in evaluation
    assert math.isnan(loss)


def _on_a_rank() -> dict[str, Any]:
    """All that this rank has to show."""
    return {
        "forms": _all_forms(),
        "chats": _chat_runs(),
        "transformed": _transformed({LM: {"pp_size": 2}}),
        "without targets": _without_targets(),
    }


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ranks"))
        return run_distributed(_on_a_rank, 2, timeout=250)
