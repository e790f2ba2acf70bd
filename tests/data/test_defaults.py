"""Which collator a dataset gets when the user names none."""

from types import SimpleNamespace

import pytest
from datasets import Dataset

from hf_mmparallel.data import defaults
from hf_mmparallel.data.chat_collator import PretokenizedCollator
from hf_mmparallel.data.defaults import default_collator

TOKENS = [{"input_ids": [1, 2], "labels": [1, 2]}]
CHATS = [{"messages": [{"role": "user", "content": "hello"}], "images": []}]


class Sized(list):
    """A map-style dataset of a user's own."""


@pytest.mark.parametrize("make", [Sized, Dataset.from_list])
@pytest.mark.parametrize(
    ("processor", "pad"),
    [
        (None, 0),
        (SimpleNamespace(pad_token_id=7), 7),
        (SimpleNamespace(pad_token_id=None), 0),
        (SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=9)), 9),
    ],
)
def test_token_ids_are_padded_with_the_processors_token(make, processor, pad):
    collator, raw = default_collator(make(TOKENS), processor)
    assert isinstance(collator, PretokenizedCollator) and not raw
    batch = collator([{"input_ids": [5, 6, 8], "labels": [5, 6, 8]}, {"input_ids": [3], "labels": [3]}])
    assert batch["input_ids"].tolist() == [[5, 6, 8], [3, pad, pad]]
    assert batch["labels"].tolist() == [[5, 6, 8], [3, -100, -100]]


@pytest.mark.parametrize("make", [Sized, Dataset.from_list])
def test_conversations_go_to_the_chat_collator_with_their_columns(make, monkeypatch):
    monkeypatch.setattr(defaults, "ChatCollator", lambda processor: ("chat", processor))
    processor = SimpleNamespace(apply_chat_template=print)
    assert default_collator(make(CHATS), processor) == (("chat", processor), True)


@pytest.mark.parametrize(
    ("dataset", "processor"),
    [
        (None, None),
        (Sized(), None),
        (Sized([(1, 2)]), None),
        (Sized([{"input_ids": [1]}]), None),
        (Sized(CHATS), SimpleNamespace(pad_token_id=0)),
        (iter(TOKENS), None),
    ],
)
def test_all_else_is_left_to_the_trainer(dataset, processor):
    assert default_collator(dataset, processor) == (None, False)
