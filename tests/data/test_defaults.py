"""Which collator a dataset gets when the user names none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    DataCollatorWithPadding,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    default_data_collator,
)

from hf_mmparallel.data.chat_collator import ChatCollator
from hf_mmparallel.data.defaults import DefaultCollator, default_collator, item_form
from hf_mmparallel.data.token_collator import TOKEN_FIELDS, PretokenizedCollator
from tests import tiny
from tests.data.conversations import assert_same_batch
from tests.data.processors import llava, tokenizer

TOKENS = [{"input_ids": [1, 2], "labels": [1, 2]}]
CHATS = [{"messages": [{"role": "user", "content": "hello"}], "images": []}]


class Sized(list):
    """A map-style dataset of a user's own."""


PADS = [(None, 0), (SimpleNamespace(pad_token_id=7), 7), (SimpleNamespace(pad_token_id=None), 0)]
PADS += [(SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=9)), 9)]


@pytest.mark.parametrize("make", [Sized, Dataset.from_list])
@pytest.mark.parametrize(("processor", "pad"), PADS)
def test_token_ids_are_padded_with_the_processors_token(make, processor, pad):
    collator, raw = default_collator(make(TOKENS), processor)
    assert isinstance(collator, PretokenizedCollator) and not raw
    batch = collator([{"input_ids": ids, "labels": ids} for ids in ([5, 6, 8], [3])])
    assert batch["input_ids"].tolist() == [[5, 6, 8], [3, pad, pad]]
    assert batch["labels"].tolist() == [[5, 6, 8], [3, -100, -100]]


@pytest.mark.parametrize("make", [Sized, Dataset.from_list])
def test_conversations_go_to_the_chat_collator_with_their_columns_and_all_else_to_the_trainer(make):
    collator, raw = default_collator(make(CHATS), llava())
    assert isinstance(collator, ChatCollator) and raw
    for rows in ([{"conversations": [], "image": "a"}], [{"prompt": "a", "completion": "b"}], [{"text": "a"}]):
        assert isinstance(default_collator(make(rows), llava())[0], ChatCollator)
        assert default_collator(make([{**rows[0], "label": 1}]), llava()) == (None, False)
    for dataset in (None, Sized(), Sized([(1, 2)]), make([{"input_ids": [1]}]), make(CHATS), iter(TOKENS)):
        assert default_collator(dataset, SimpleNamespace(pad_token_id=0)) == (None, False)


IDS = [[5, 6, 8], [3, 9, 4]]
TENSORS = [torch.tensor(ids) for ids in IDS]
STOCK: dict[str, list[dict[str, Any]]] = {
    "classes": [{"input_ids": ids, "labels": n} for n, ids in enumerate(IDS)],
    "numbers to predict": [{"input_ids": ids, "labels": n + 0.5} for n, ids in enumerate(IDS)],
    "several classes": [{"input_ids": ids, "labels": [0.0, 1.0]} for ids in IDS],
    "labels of another length": [{"input_ids": ids, "labels": [1, 2, 3, 4, 5]} for ids in IDS],
    "without a mask": [{"input_ids": ids, "labels": ids, "number": n} for n, ids in enumerate(IDS)],
    "with a mask": [{"input_ids": ids, "attention_mask": [1, 1, 0], "labels": ids} for ids in IDS],
    "boxes": [{"input_ids": ids, "labels": ids, "bbox": [[1, 2, 3, 4]] * 3} for ids in IDS],
    "an image each": [{"input_ids": ids, "labels": ids, "pixel_values": torch.rand(3, 4, 4)} for ids in TENSORS],
    "lists of images": [{"input_ids": ids, "labels": ids, "pixel_values": torch.rand(2, 3, 4, 4)} for ids in TENSORS],
}


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("processor", [None, tokenizer()], ids=["alone", "with a tokenizer"])
def test_what_the_stock_collator_can_batch_is_its_batch(name, processor):
    collator, raw = default_collator(Sized(STOCK[name]), processor)
    assert collator is not None and not raw
    stock = default_data_collator if processor is None else DataCollatorWithPadding(processor)
    batch, wanted = collator([dict(sample) for sample in STOCK[name]]), stock([dict(s) for s in STOCK[name]])
    assert_same_batch(batch, wanted)
    if name == "without a mask":
        collator.marks_tokens = True
        mask = collator([dict(sample) for sample in STOCK[name]])["attention_mask"]
        assert mask.tolist() == [[1, 1, 1]] * 2 and ("attention_mask" in wanted) == (processor is not None)


@pytest.mark.parametrize("labels", [1, [1.0, 0.0]], ids=["classes", "several classes"])
def test_what_a_tokenizer_pads_is_padded_by_it(labels):
    samples = [{"input_ids": ids, "labels": labels} for ids in ([5, 6, 8], [3])]
    collator: Any = default_collator(Sized(samples), tokenizer())[0]
    assert_same_batch(collator(samples), DataCollatorWithPadding(tokenizer())([dict(sample) for sample in samples]))
    if labels == 1:
        with pytest.raises(ValueError, match="expected sequence of length 3"):  # the stock collator's own sentence
            default_collator(Sized(samples), None)[0](samples)  # type: ignore[misc]


def test_what_the_stock_collator_would_lose_or_refuse_is_padded():
    """It looks at the first sample only, and would train on the placeholders of the others' images."""
    samples: list[dict[str, Any]] = [{"input_ids": ids, "labels": ids} for ids in ([1, 2], [3], [4, 5, 6])]
    images = torch.rand(2, 3, 16, 16)
    samples[1]["pixel_values"], samples[2]["pixel_values"] = images
    collator: Any = default_collator(Sized(samples), None, tiny.FAMILIES["llava"]())[0]
    batch = collator(samples)
    assert batch["input_ids"].shape == (3, 3) and batch["labels"][1].tolist() == [3, -100, -100]
    assert torch.equal(batch["pixel_values"], images)
    assert batch["attention_mask"].sum(-1).tolist() == [2, 1, 3]


def test_ranks_without_media_make_the_same_batch_but_for_them():
    samples = [{**sample, "pixel_values": torch.rand(3, 16, 16), "image_sizes": [16, 16]} for sample in TOKENS * 2]
    collator, _ = default_collator(Sized(samples), None, tiny.FAMILIES["llava"]())
    assert isinstance(collator, DefaultCollator)
    whole, bare = collator(samples), collator.without_media(frozenset(["pixel_values"]))(samples)
    assert whole.pop("pixel_values").shape == (2, 3, 16, 16)
    assert_same_batch(bare, whole)
    assert set(collator.without_media()([{**sample, "image_sizes": [1.5]} for sample in samples])) == set(TOKENS[0])


@pytest.mark.parametrize("family", [name for name in tiny.FAMILIES if name not in tiny.TEXT_ONLY])
def test_the_model_says_whether_images_are_stacked(family):
    """An image without the dimension of images is stacked, lists of them are concatenated, in every family."""
    model = tiny.FAMILIES[family]()
    listed = tiny.make_dataset(family, 3, shapes=[tiny.Shape(1, 1, 5)] * 3)
    kept = set(TOKEN_FIELDS)
    if family.startswith("qwen"):  # patches of all images in a row; only the grid has a dimension of images
        kept.add("pixel_values")
    one = [{name: value if name in kept else value[0] for name, value in sample.items()} for sample in listed]
    media = set(listed[0]) - set(TOKEN_FIELDS)
    assert media and media <= item_form(model, listed).listed and not item_form(model, listed).stacked
    assert media <= item_form(model, one).stacked
    assert media <= item_form(model, tiny.make_dataset(family, 1)[:0]).listed
    collator: Any = default_collator(Sized(listed), None, model)[0]
    assert_same_batch(collator(listed), tiny.collate(family)(listed))


def test_a_list_of_images_that_a_model_takes_as_such_is_stacked():
    """Idefics3 takes `[batch, images, channels, height, width]`."""
    part = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision, text = {**part, "image_size": 16, "patch_size": 8}, {**part, "model_type": "llama", "vocab_size": 120}
    config = Idefics3Config(vision_config=vision, text_config=text, scale_factor=2, image_token_id=99)
    samples = [{"input_ids": ids, "labels": ids, "pixel_values": torch.rand(2, 3, 16, 16)} for ids in IDS]
    collator: Any = default_collator(Sized(samples), None, Idefics3ForConditionalGeneration(config))[0]
    assert_same_batch(collator(samples), default_data_collator(samples))
    ragged = [*samples, {"input_ids": [1], "labels": [1], "pixel_values": torch.rand(1, 3, 16, 16)}]
    assert collator(ragged)["pixel_values"].shape == (3, 2, 3, 16, 16)
