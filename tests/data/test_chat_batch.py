"""Conversations that are measured many at once have the sizes that each has by itself."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ProcessorMixin

from hf_mmparallel.data import ChatCollator, chat_collator
from hf_mmparallel.data.chat_collator import encode_together
from hf_mmparallel.data.image_sizes import UnknownSizeError
from hf_mmparallel.data.size_measures import ChatMeasure, OrOne, TokenMeasure
from hf_mmparallel.plan import LANGUAGE_MODEL
from tests.data.conversations import conversation
from tests.data.processors import PROCESSORS, tokenizer
from tests.data.test_chat_collator import UNMARKED, llava, say

STOCK = {"llava", "llava_next", "llava_onevision", "qwen2_vl", "smolvlm", "glm4v"}
"""Families whose processors have no `__call__` of their own."""
SIDES = st.integers(8, 100)
SIZE = st.tuples(SIDES, SIDES).filter(lambda size: max(size) < 8 * min(size))
TEXTS = st.text("abc é\n日", max_size=12)


def chat(sizes: list[tuple[int, int]], answer: str) -> dict[str, Any]:
    sample = conversation(sizes)
    sample["images"] = [{"height": height, "width": width} for height, width in sizes]
    sample["messages"] = [*sample["messages"], say("user", answer), say("assistant", answer)]
    return sample


def measure_of(collator: ChatCollator) -> ChatMeasure:
    names = ("<image>", "<soft>", "<IMG_CONTEXT>", "[IMG]")
    found = [collator.tokenizer.convert_tokens_to_ids(name) for name in names]
    images = tuple(("image", token) for token in found if token is not None)
    return ChatMeasure(collator, TokenMeasure({"vision": images, LANGUAGE_MODEL: ()}))


def alone(measure: Any, sample: dict) -> Any:
    try:
        return measure(sample)
    except Exception as error:
        return error


def assert_equal_alone(measure: Any, samples: list[Any]) -> list[Any]:
    """Many at once are like each by itself, errors too; returns what they are."""
    together = list(measure.together(samples.__getitem__, range(len(samples))))
    for own, single in zip(together, [alone(measure, sample) for sample in samples], strict=True):
        words, wanted = (re.sub(r"0x\w+", "", str(found)) for found in (own, single))
        assert type(own) is type(single) and words == wanted
    return together


@pytest.fixture(scope="module", params=PROCESSORS)
def family(request: pytest.FixtureRequest) -> tuple[str, ChatMeasure]:
    try:
        return request.param, measure_of(ChatCollator(PROCESSORS[request.param]()))
    except ImportError as error:
        pytest.skip(str(error).strip().splitlines()[0])


@settings(max_examples=8)
@given(samples=st.lists(st.builds(chat, st.lists(SIZE, max_size=3), TEXTS), min_size=1, max_size=6))
def test_sizes_are_those_of_each_by_itself(family: tuple[str, ChatMeasure], samples: list[dict]):
    name, measure = family
    assert_equal_alone(measure, samples)
    encoded = encode_together(measure._bare, samples.__getitem__, range(len(samples)))
    assert all((fields is not None) == (name in STOCK) for fields in encoded)


@pytest.mark.parametrize("settings", [{}, {"max_length": 60}, {"max_length": 40, "on_too_long": "truncate"}])
@pytest.mark.parametrize("template", [None, UNMARKED["<image>"]], ids=["marked", "unmarked"])
def test_samples_that_have_no_size_do_not_spoil_those_beside_them(settings: dict, template: str | None):
    processor = llava() if template is None else llava(template)
    measure = measure_of(ChatCollator(processor, **settings))
    samples: list[Any] = [
        chat([(8, 8)], "three"),
        {"messages": [say("user", None), say("assistant", "three")], "images": ["http://localhost:1/a.png"]},
        {"messages": [say("user", None), say("assistant", "three")], "images": [{"bytes": b"none", "path": None}]},
        {"messages": [say("user", None), say("assistant", "three")], "images": []},
        {"messages": [{"content": "no role"}]},
        {"text": "no conversation"},
        chat([], "seven " * 9),
        chat([(8, 8), (30, 20)], "seven " * 30),
        None,
    ]
    found = assert_equal_alone(measure, samples)
    assert isinstance(found[0], dict) and isinstance(found[1], UnknownSizeError) and isinstance(found[2], OSError)
    assert_equal_alone(OrOne(measure, ("vision", LANGUAGE_MODEL)), samples)


def test_a_tokenizer_without_a_processor():
    words = tokenizer()
    words.chat_template = UNMARKED["<image>"]
    measure = measure_of(ChatCollator(words))  # pyright: ignore[reportArgumentType]
    samples = [chat([], "seven " * n) for n in range(40)]
    assert len({found[LANGUAGE_MODEL][0] for found in assert_equal_alone(measure, samples)}) > 30
    words.chat_template = None


def test_texts_are_tokenised_in_few_calls(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    measure = measure_of(ChatCollator(llava()))
    words = type(measure.collator.tokenizer)
    encode = words.__call__

    def counted(self: Any, text: Any, **options: Any) -> Any:
        calls.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(words, "__call__", counted)
    samples = [chat([(8, 8)] * (n % 3), "three") for n in range(70)]
    assert len(list(measure.together(samples.__getitem__, range(70)))) == 70
    assert calls == [32, 32, 6]


def test_a_tokenizer_that_fails_on_one_text_leaves_each_to_itself(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("Mismatch in `image` token count")

    measure = measure_of(ChatCollator(llava()))
    samples = [chat([(8, 8)], "three"), chat([], "seven")]
    wanted = assert_equal_alone(measure, samples)
    monkeypatch.setattr(ProcessorMixin, "_check_special_mm_tokens", refuse)
    assert chat_collator.encode_together(measure._bare, samples.__getitem__, [0, 1]) == [None, None]
    monkeypatch.undo()
    assert assert_equal_alone(measure, samples) == wanted


def test_a_padding_that_one_text_has_too_is_not_left_out():
    processor = llava()
    processor.text_kwargs = {"padding": "max_length", "max_length": 90}  # pyright: ignore[reportAttributeAccessIssue]
    measure = measure_of(ChatCollator(processor))
    assert_equal_alone(measure, [chat([(8, 8)], "three"), chat([], "seven")])


def test_measuring_draws_nothing_that_the_training_draws():
    class Drawing:
        def __getitem__(self, index: int) -> dict:
            number = random.random() + np.random.rand() + torch.rand(()).item()
            return chat([(8, 8)], f"three {number}")

    from hf_mmparallel.data.sample_sizes import _Reader

    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # pyright: ignore
    assert len(_Reader(Drawing(), measure_of(ChatCollator(llava())))(range(3))) == 3
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # pyright: ignore
    assert after == states
