"""Trainers without a `data_collator`: the stock Trainer's batches, at size 1 to the bit, and under a plan."""

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
    AudioFlamingo3Config,
    AudioFlamingo3EncoderConfig,
    AudioFlamingo3ForConditionalGeneration,
    LlamaConfig,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    default_data_collator,
    set_seed,
)

from hf_mmparallel import ChatCollator, PackingCollator
from hf_mmparallel.trainer import evaluation, training_steps
from hf_mmparallel.trainer.columns import format_sentence
from hf_mmparallel.trainer.start_checks import check_model
from tests import tiny
from tests.data.conversations import conversation, heard, llava_json, sound
from tests.data.processors import PROCESSORS, of_sound, tokenizer
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs

VISION, LM = "vision", "language_model"


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


def classifier(cls: Any = LlamaForSequenceClassification, **settings: Any) -> PreTrainedModel:
    return cls(LlamaConfig(**{**tiny.TEXT, "num_hidden_layers": 1}, **settings))


@pytest.mark.parametrize(
    "cls", [LlamaForSequenceClassification, LlamaForTokenClassification, LlamaForQuestionAnswering]
)
def test_a_plan_refuses_models_that_are_not_trained_on_the_next_token(cls: Any):
    with pytest.raises(ValueError, match=f"`{cls.__name__}`"):
        check_model(classifier(cls))


def samples(labels: Callable[[int, list[int]], Any], ragged: bool = False) -> list[dict[str, Any]]:
    found = []
    for index in range(12):
        ids = [(7 * index + 3 * place) % 40 + 1 for place in range(5 + (index % 3 if ragged else 0))]
        found.append({"input_ids": ids, "labels": labels(index, ids)})
    return found


CASES: dict[str, tuple[Callable[[], Any], list[dict[str, Any]]]] = {
    "ragged classes": (classifier, samples(lambda i, ids: i % 2, ragged=True)),
    "no mask": (Regression, samples(lambda i, ids: ids)),
}
WITHOUT_COLLATOR = {"data_collator": None, "remove_unused_columns": True}


def _trained(make: Any, folder: Path, name: str, as_rows: bool, resume: bool) -> runs.Run:
    """A run of a case, or one that goes on from its second step."""
    model, data = CASES[name]
    set_seed(0)
    dataset: Any = Dataset.from_list(data) if as_rows else data
    words = {"model": model(), "data": dataset, "eval_dataset": dataset, "processing_class": None}
    if "ragged" in name:
        words["processing_class"] = tokenizer()
    steps = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "per_device_train_batch_size": 4}
    trainer = make(output_dir=str(folder), **words, **steps, **WITHOUT_COLLATOR)
    return runs.run_of(trainer, evaluate=True, checkpoint=folder / "checkpoint-2" if resume else None)


@pytest.mark.parametrize("name", runs.deep_but(CASES, "ragged classes"))
def test_without_a_collator_size_1_is_the_stock_trainer(name: str, tmp_path: Path):
    """Also when it is resumed in the middle of an epoch, which draws the same batches."""
    for as_rows, resume in ((True, False), (False, True)):
        makes = {"ours": runs.our_trainer, "stock": runs.stock_trainer}
        ours, stock = (_trained(make, tmp_path / own, name, as_rows, resume) for own, make in makes.items())
        runs.assert_same_run(ours, stock, 0, 0)
        assert ours.metrics["eval_loss"] == stock.metrics["eval_loss"]


# A plan


def on_rank(model: Any, data: Any, parallel: Any = None, words: Any = None, **arguments: Any) -> runs.Run:
    """The run of our Trainer on this rank, or on one process; weights on rank 0."""
    sizes = {"global_batch_size": 4, "per_device_train_batch_size": 1 if parallel else 4, "max_steps": 2}
    given = {"model": model, "data": data, **sizes, **WITHOUT_COLLATOR, **(words or {}), **arguments}
    return runs.run_of(runs.make_trainer("llava", parallel, **given) if parallel else runs.our_trainer(**given))


def one_image_each(size: int, ragged: bool, listed: bool) -> list[dict[str, Any]]:
    """Samples of Llava with an image, `[3, height, width]` or as a list of one."""
    data = tiny.make_dataset("llava", 3 * size, shapes=[tiny.Shape(1, 0, 6)] * 3 * size)
    data = data[:size] if ragged else data[::3]
    return [{**sample, "pixel_values": sample["pixel_values"][slice(None) if listed else 0]} for sample in data]


FORMS = {
    "stacked, ragged text": (True, False, {}),
    "stacked, packed": (False, False, {"packing": True}),
    "lists": (False, True, {}),
}


def of_form(name: str) -> runs.Run:
    ragged, listed, extra = FORMS[name]
    return on_rank(tiny.FAMILIES["llava"](), one_image_each(8, ragged, listed), {VISION: {}}, **extra)


@pytest.mark.distributed
@pytest.mark.parametrize("form", runs.deep_but(FORMS, "stacked, packed"))
def test_images_that_the_stock_trainer_stacks_train_alike_under_a_plan(form: str):
    found = run_distributed(of_form, 2, form)[0]
    if FORMS[form][0]:
        data = one_image_each(8, ragged=True, listed=True)
        runs.assert_same_run(found, runs.stock("llava", data=data, max_steps=2, per_device_train_batch_size=4))
        return
    data = one_image_each(8, ragged=False, listed=False)
    stock = runs.stock_trainer(data=data, per_device_train_batch_size=4, max_steps=2, **WITHOUT_COLLATOR)
    runs.assert_same_run(found, runs.run_of(stock))


# Columns


def chat_model(attention: str = "sdpa") -> PreTrainedModel:
    processor = PROCESSORS["llava"]()
    model = tiny.FAMILIES["llava"]()
    config = model.config
    config.image_token_id = config.image_token_index = processor.tokenizer.convert_tokens_to_ids("<image>")
    config.vision_config.image_size, config.vision_config.patch_size = 28, 14
    config.text_config.vocab_size = len(processor.tokenizer) + 8
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny.attending(type(model)(config), attention)


def chats(count: int, column: str = "messages", assistant: str = "assistant") -> list[dict[str, Any]]:
    """Conversations in a column, some about an image."""
    result = []
    for index in range(count):
        sample = conversation([(28, 28)] * (index % 2), index)
        messages = sample.pop("messages")
        roles = {"user": "user", "assistant": assistant}
        result.append({column: [{**message, "role": roles[message["role"]]} for message in messages], **sample})
    return result


UNKNOWN_ROLE, NO_ROLE = [{"from": "someone", "value": "a"}], [{"speaker": "human", "value": "a"}]
SENTENCES = {
    "no processor": "`train_dataset` .*`messages`.*`processing_class`",
    "no template": "`PreTrainedConfig`",
    "wrong name": r"`train_dataset` .*`messages`.*`ChatCollator`.*\['talks', 'images'\]",
    "wrong name, wrapped": "`train_dataset` .*`messages`.*`ChatCollator`",
    "unknown role": "`train_dataset` .*'someone'.*human",
    "no role": r"`train_dataset` .*\['speaker', 'value'\].* `role`",
    "nothing": r"\['question', 'answer'\].*`messages`",
    "no assistant": "`labels` are -100",
}


def chat(column: str | None = "messages") -> ChatCollator:
    return ChatCollator(PROCESSORS["llava"](), max_length=99, messages_column=column)


def refusals(parallel: Any) -> dict[str, str]:
    model, talks = chat_model("bitfield"), chats(4, "talks")
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "no processor": (chats(4), {}),
        "no template": (chats(4), {"processing_class": PreTrainedConfig()}),
        "wrong name": (talks, {"data_collator": chat()}),
        "wrong name, wrapped": (talks, {"data_collator": PackingCollator(chat(), model)}),
        "unknown role": ([{"conversations": UNKNOWN_ROLE}] * 4, {"data_collator": chat(None)}),
        "no role": (Dataset.from_list([{"talks": NO_ROLE}] * 4), {"data_collator": chat("talks")}),
        "nothing": (Dataset.from_list([{"question": "a", "answer": "b"}] * 4), {}),
    }
    if parallel:
        cases["no assistant"] = chats(4, assistant="gpt"), {"data_collator": chat()}
    said = {}
    for name, (data, words) in cases.items():
        with pytest.raises(ValueError) as raised:
            on_rank(model, data, parallel, words)
        said[name] = str(raised.value)
    return said


def of_chats(name: str) -> runs.Run:
    """A run with the default collator, a user's own, or one that packs."""
    model, data = chat_model("bitfield" if name == "packed" else "sdpa"), chats(8)
    words: dict[str, Any] = {"processing_class": PROCESSORS["llava"]()}
    if name == "LLaVA":
        data = [llava_json(sample) for sample in data]
    elif name == "own column":
        data, words = chats(8, "talks"), {"data_collator": chat("talks")}
    elif name == "packed":
        words = {"data_collator": PackingCollator(chat(), model)}
    return on_rank(model, data, {VISION: {}}, words)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["messages", deep("LLaVA"), deep("own column"), deep("packed")])
def test_chat_collators_keep_their_columns(name: str):
    wanted = on_rank(chat_model(), chats(8), words={"data_collator": chat()})
    run = run_distributed(of_chats, 2, name)[0]
    assert [row["loss"] for row in run.logs] == pytest.approx([row["loss"] for row in wanted.logs], rel=1e-5)


@pytest.mark.distributed
def test_missing_columns_are_named():
    on_first, on_second = run_distributed(refusals, 2, {VISION: {}})
    assert on_first == on_second
    assert on_first.keys() == SENTENCES.keys()
    for said in (on_first, refusals(None)):
        for name, sentence in said.items():
            assert re.search(SENTENCES[name], sentence), (name, sentence)


def sound_model() -> PreTrainedModel:
    processor = of_sound()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    audio = AudioFlamingo3EncoderConfig(**sizes, num_mel_bins=8, max_source_positions=50)
    text = Qwen2Config(**{**tiny.TEXT, "vocab_size": len(processor.tokenizer) + 8})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AudioFlamingo3ForConditionalGeneration(
            AudioFlamingo3Config(audio_config=audio, text_config=text, audio_token_id=processor.audio_token_id)
        )


def _of_sound(parallel: Any = None) -> runs.Run:
    """A run on sound of some lengths, and on texts."""
    rows = [heard(sound(3000 + 3700 * index)) for index in range(6)]
    rows += [{"prompt": "which", "completion": "seven"}, {"text": "which digit"}]
    return on_rank(sound_model(), rows, parallel, {"processing_class": of_sound()})


@pytest.mark.deep
@pytest.mark.distributed
def test_sound_and_texts_of_several_formats_train_alike_under_a_plan():
    runs.assert_same_run(run_distributed(_of_sound, 2, {"audio": {}})[0], _of_sound())


def test_the_format_of_samples_is_said():
    sentence = format_sentence("train_dataset", [{"conversations": [], "image": "a", "text": "a"}], chat(None))
    assert sentence is not None and re.search(
        r"`train_dataset` .*\['conversations', 'image', 'text'\].* text", sentence
    )
    assert "Llava" in sentence and "ShareGPT" not in sentence
    assert format_sentence("train_dataset", [{"input_ids": [1]}], chat(None)) is None
    assert format_sentence("train_dataset", [{"text": "a"}], default_data_collator) is None


def tokens_of(rows: dict[str, list[Any]]) -> dict[str, Any]:
    """What a transform makes of conversations that a dataset stores."""
    ids = [[5 + len(str(messages)) % 7, 6, 7, 8, 9] for messages in rows["messages"]]
    return {"input_ids": ids, "labels": ids}


def _transformed(parallel: Any = None) -> list[float]:
    """Losses of a dataset whose transform tokenises; nothing but the transform knows the columns of samples."""
    data = Dataset.from_list([{"messages": sample["messages"]} for sample in chats(8)]).with_transform(tokens_of)
    run = on_rank(tiny.FAMILIES["llama_tied"](), data, parallel, remove_unused_columns=False)
    return [row["loss"] for row in run.logs]


@pytest.mark.deep
@pytest.mark.distributed
def test_columns_are_those_that_a_transform_makes():
    assert run_distributed(_transformed, 2, {LM: {"pp_size": 2}})[0] == pytest.approx(_transformed(), rel=1e-5)


def _without_targets() -> tuple[list[str], float]:
    """What is said of a later global batch, and of an evaluation, in which all labels are -100."""
    said: list[str] = []
    training_steps.logger.warning = evaluation.logger.warning = lambda text, **_: said.append(text)
    data = tiny.make_dataset("llava", 12)
    for sample in data[4:]:
        sample["labels"] = torch.full_like(sample["labels"], -100)
    sequential = {"train_sampling_strategy": "sequential", "global_batch_size": 4, "max_steps": 3}
    trainer = runs.make_trainer("llava", {VISION: {}}, data=data, **sequential)
    trainer.train()
    assert [row["loss"] > 0 for row in runs.step_logs(trainer)] == [True, False, False]
    return said, trainer.evaluate(data[4:8])["eval_loss"]


@pytest.mark.deep
@pytest.mark.distributed
def test_batches_without_targets_are_told_of():
    (training, evaluation), loss = run_distributed(_without_targets, 2)[0]
    assert "`labels` are -100" in training and "NaN" in evaluation
    assert math.isnan(loss)
