"""Conversations become batches: labels on answers only, images in order, and their sizes are told many at once."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from transformers import ProcessorMixin

from hf_mmparallel.data import ChatCollator, PretokenizedCollator, chat_collator
from hf_mmparallel.data.chat_collator import encode_together
from hf_mmparallel.data.image_sizes import UnknownSizeError
from hf_mmparallel.data.size_measures import ChatMeasure, TokenMeasure
from hf_mmparallel.plan import LANGUAGE_MODEL

from .conversations import assert_same_batch, conversation, say
from .processors import MARKED, PROCESSORS, llava, tokenizer, unmarked

IGNORED = -100
FAMILIES = {"llava": (llava, 5), "gemma3": (PROCESSORS["gemma3"], 4)}  # with the tokens of an image


def processor_of(family: str, marked: bool = True) -> ProcessorMixin:
    processor = FAMILIES[family][0]()
    processor.chat_template = processor.chat_template if marked else unmarked(processor.chat_template)
    return processor


def image(value: int) -> PILImage.Image:
    return PILImage.new("RGB", (8, 8), (value, value, value))


def samples() -> list[dict]:
    """One image; two images in two turns; text only."""
    turns = [
        say("system", "be brief"),
        say("user", "which digits are", None, "this"),
        say("assistant", "seven and three"),
        say("user", None, "?"),
        say("assistant", "four"),
    ]
    return [
        {"messages": [say("user", None, "which digit"), say("assistant", "three")], "images": [image(10)]},
        {"messages": turns, "images": [image(20), image(30)]},
        {"messages": [say("user", "hello"), say("assistant", "yes?")], "images": []},
    ]


ANSWERS = ["three</s>", "seven and three</s>four</s>", "yes?</s>", "heredone</s>"]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_the_answers_without_images(family, marked):
    processor, rows = processor_of(family, marked), FAMILIES[family][1]
    drawn = {"messages": [say("user", "draw"), say("assistant", "here", None, "done")], "images": [image(40)]}
    batch = ChatCollator(processor)([*samples(), drawn])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    kept = batch["labels"] != IGNORED
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
    for ids, mask, attended, answer in zip(batch["input_ids"], kept, batch["attention_mask"], ANSWERS, strict=True):
        assert processor.tokenizer.decode(ids[mask]) == answer
        assert not mask[attended == 0].any() and set(ids[attended == 0].tolist()) <= {0}
    counts = (batch["input_ids"] == processor.tokenizer.image_token_id).sum(1).tolist()
    assert counts == [rows, 2 * rows, 0, rows]
    order = batch["pixel_values"].flatten(1).mean(1)
    assert len(order) == 4 and (order.diff() > 0).all()


@pytest.mark.parametrize("family", PROCESSORS)
def test_equals_what_the_processor_makes_of_a_conversation(family):
    processor = PROCESSORS[family]()
    collator = ChatCollator(processor)
    for sample in samples():
        images = iter(sample["images"])
        messages = [
            {**m, "content": [{**p, "image": next(images)} if p["type"] == "image" else p for p in m["content"]]}
            for m in sample["messages"]
        ]
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        expected = processor.apply_chat_template(messages, return_tensors="pt", **options)
        encoded = collator.encode(sample)
        assert torch.equal(encoded["input_ids"], expected["input_ids"][0])
        assert torch.equal(encoded["labels"] != IGNORED, torch.as_tensor(expected["assistant_masks"][0]).bool())
        media = expected.keys() - {"input_ids", "assistant_masks", "attention_mask"}
        assert all(torch.equal(torch.atleast_2d(encoded[name]), torch.atleast_2d(expected[name])) for name in media)
        assert ("pixel_values" in media) == bool(sample["images"])
        inside = collator.encode({"messages": messages})
        assert all(torch.equal(inside[key], encoded[key]) for key in encoded)


STRINGS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("template", [MARKED, unmarked(MARKED), STRINGS], ids=["marked", "unmarked", "strings"])
def test_content_may_be_a_string(template):
    texts = [{"role": "user", "content": "which digit"}, {"role": "assistant", "content": "three"}]
    collator = ChatCollator(llava(template))
    first = collator([{"messages": texts}])
    second = collator([{"messages": [say("user", "which digit"), say("assistant", "three")]}])
    assert torch.equal(first["input_ids"], second["input_ids"]) and torch.equal(first["labels"], second["labels"])
    answer = " three</s>" if template == STRINGS else "three</s>"  # a token over the border is trained
    assert collator.tokenizer.decode(first["labels"][first["labels"] != IGNORED]) == answer
    assert "pixel_values" not in first


def test_a_template_that_rewrites_history_needs_marks():
    last = "{{ part['text'] if loop.last and m == messages[-1] }}"
    with pytest.raises(ValueError, match="renders turn 2 of sample 0 "):
        ChatCollator(llava(unmarked(MARKED).replace("{{ part['text'] }}", last)))([samples()[1]])


def test_a_sample_too_long():
    tail = {"messages": [say("user", None, "which"), say("assistant", "three " * 9)], "images": [image(1)]}
    whole = ChatCollator(llava())([tail])
    length = whole["input_ids"].shape[1]
    assert ChatCollator(llava(), max_length=length)([tail]).keys() == whole.keys()
    for collator in (short := ChatCollator(llava(), max_length=length - 1), short.without_media()):
        with pytest.raises(ValueError, match=rf"Sample 1 .* {length} tokens.*max_length={length - 1}`\."):
            collator([samples()[2], tail])
    cut = ChatCollator(llava(), max_length=length - 5, on_too_long="truncate")([tail])
    assert torch.equal(cut["labels"], whole["labels"][:, : length - 5]) and len(cut["pixel_values"]) == 1
    with pytest.raises(ValueError, match="truncation would drop 3 image tokens"):
        ChatCollator(llava(), max_length=6, on_too_long="truncate")([tail])


def messages_with(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def test_a_conversation_without_an_answer_is_told_of_once(caplog):
    collator = ChatCollator(llava())
    with caplog.at_level("WARNING", logger=chat_collator.logger.name):
        for _ in range(2):
            batch = collator([{"messages": [say("user", "x"), say("gpt", "three")]}, samples()[0]])
    assert (batch["labels"][0] == IGNORED).all() and not (batch["labels"][1] == IGNORED).all()
    assert len(messages_with(caplog, "its roles are gpt, user.")) == 1


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: ChatCollator(llava(), on_too_long="drop"), "`on_too_long='drop'`"),
        (lambda: ChatCollator(llava(None)), "no chat template"),
        (lambda: PretokenizedCollator(padding_side="middle"), "`padding_side='middle'`"),
        (lambda: PretokenizedCollator(pad_to_multiple_of=0), "`pad_to_multiple_of=0`"),
        (lambda: PretokenizedCollator()(changed({"labels": [1, 2]})), "Sample 0 .* 3 `input_ids`, but `labels` has 2"),
        (lambda: PretokenizedCollator()(changed({"labels": None})), "`labels` is missing"),
        (lambda: PretokenizedCollator()(changed({"input_ids": None})), "`input_ids`"),
        (lambda: PretokenizedCollator()(ones_of((1, 2), (1, 2, 2))), "same number of dimensions"),
    ],
)
def test_bad_settings_and_samples_that_do_not_match_are_errors(make, value):
    with pytest.raises(ValueError, match=value):
        make()


def token_samples() -> list[dict]:
    return [
        {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7], "pixel_values": np.ones((2, 3, 4, 4)), "id": "a", "n": 3},
        {"input_ids": [8], "labels": [8], "pixel_values": None, "id": "b", "n": 1},
        {"input_ids": [5, 9], "labels": [5, 9], "pixel_values": torch.zeros(1, 3, 4, 4), "id": "c", "n": 2},
    ]


def changed(changes: dict) -> list[dict]:
    first, *rest = token_samples()
    return [{**first, **changes}, *rest]


def ones_of(*sizes: tuple[int, ...]) -> list[dict]:
    return [{"input_ids": [1], "pixel_values": torch.ones(size)} for size in sizes]


def test_tokenised_samples_are_padded_and_media_concatenated():
    batch = PretokenizedCollator(pad_token_id=1)(token_samples())
    assert list(batch) == ["input_ids", "labels", "pixel_values", "attention_mask"]
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1], [5, 9, 1]]
    assert batch["labels"].tolist() == [[IGNORED, 6, 7], [8, IGNORED, IGNORED], [5, 9, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["pixel_values"].flatten(1).mean(1).tolist() == [1, 1, 0]
    assert "pixel_values" not in PretokenizedCollator()(token_samples()[1:2])
    left = PretokenizedCollator(padding_side="left", pad_to_multiple_of=4)(token_samples())
    assert left["input_ids"].tolist() == [[0, 5, 6, 7], [0, 0, 0, 8], [0, 0, 5, 9]]


def test_three_dimensional_positions_are_padded_too():
    rows = [
        {"input_ids": torch.arange(n), "position_ids": torch.arange(n).expand(3, n), "image_grid_thw": [[1, 2, 2 * n]]}
        for n in (3, 2)
    ]
    batch = PretokenizedCollator()(rows)
    assert batch["position_ids"].shape == (3, 2, 3)
    assert torch.equal(batch["position_ids"][:, 1, :2], rows[1]["position_ids"])
    assert batch["image_grid_thw"].tolist() == [[1, 2, 6], [1, 2, 4]]


def test_media_of_different_sizes_are_padded_with_zeros():
    sizes = [(1, 2, 3, 4, 4), (2, 3, 3, 4, 2)]
    batch = PretokenizedCollator()(ones_of(*sizes))
    assert batch["pixel_values"].shape == (3, 3, 3, 4, 4)
    assert batch["pixel_values"].sum() == sum(np.prod(size) for size in sizes)
    assert batch["pixel_values"][0, :2].min() == 1 and batch["pixel_values"][1:, ..., 2:].max() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_without_media_only_pixels_are_missing(family):
    collator = ChatCollator(processor_of(family), pad_to_multiple_of=8)
    lean = collator.without_media()
    assert_same_batch(lean(samples()), collator(samples()), "pixel_values")
    assert_same_batch(collator.without_media(["pixel_values"])(samples()), collator(samples()), "pixel_values")
    assert lean.decodes == frozenset() and collator.decodes == {"Image"}
    assert collator.without_media(["input_features"]) is collator
    inside = {"messages": [{"role": "user", "content": [{"type": "image", "image": {"height": 9, "width": 7}}]}]}
    assert lean.encode(inside)["input_ids"].shape[0] > 5


def test_what_sizes_do_not_tell_is_decoded_and_said_once(monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise RuntimeError("no blank images")

    collator = ChatCollator(llava())
    lean = collator.without_media()
    monkeypatch.setattr(type(lean.processor.image_processor), "__call__", refuse)
    with caplog.at_level("WARNING", logger=chat_collator.logger.name):
        for _ in range(2):
            assert_same_batch(lean(samples()), collator(samples()), "pixel_values")
    (told,) = messages_with(caplog, "decoded where only text is needed")
    assert "`LlavaProcessor`" in told and told.endswith("RuntimeError")


def test_floats_that_are_read_are_those_of_the_images():
    collator = ChatCollator(llava())
    processor = collator.processor.image_processor
    original = type(processor).__call__

    class Weighing(type(processor)):
        def __call__(self, images, **options):
            found = original(self, images, **options)
            found["weights"] = found["pixel_values"].float().flatten(1).mean(1)
            return found

    collator.processor.image_processor = Weighing(**processor.to_dict())
    whole = collator(samples())
    assert_same_batch(collator.without_media(["pixel_values"])(samples()), whole, "pixel_values")
    assert "weights" not in collator.without_media()(samples())


# Families whose processors have no `__call__` of their own.
STOCK = {"llava", "llava_next", "llava_onevision", "qwen2_vl", "glm4v"}
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


@settings(max_examples=8)
@given(samples=st.lists(st.builds(chat, st.lists(SIZE, max_size=3), TEXTS), min_size=1, max_size=6))
def test_sizes_are_those_of_each_by_itself(family: tuple[str, ChatCollator], samples: list[dict]):
    name, collator = family
    assert_equal_alone(measure_of(collator), samples)
    encoded = encode_together(collator.without_media(), samples.__getitem__, range(len(samples)))
    assert all((fields is not None) == (name in STOCK) for fields in encoded)


@pytest.mark.parametrize("settings", [{}, {"max_length": 60}, {"max_length": 40, "on_too_long": "truncate"}])
@pytest.mark.parametrize("template", [MARKED, unmarked(MARKED)], ids=["marked", "unmarked"])
def test_samples_that_have_no_size_do_not_spoil_those_beside_them(settings: dict, template: str):
    measure = measure_of(ChatCollator(llava(template), **settings))
    one_image = [say("user", None), say("assistant", "three")]
    samples: list[Any] = [
        chat([(8, 8)], "three"),
        {"messages": one_image, "images": ["http://localhost:1/a.png"]},
        {"messages": one_image, "images": [{"bytes": b"none", "path": None}]},
        {"messages": one_image, "images": []},
        {"messages": [{"content": "no role"}]},
        {"text": "no conversation"},
        chat([], "seven " * 9),
        chat([(8, 8), (30, 20)], "seven " * 30),
        None,
    ]
    found = assert_equal_alone(measure, samples)
    assert isinstance(found[0], dict) and isinstance(found[1], UnknownSizeError) and isinstance(found[2], OSError)


def test_a_tokenizer_without_a_processor(monkeypatch: pytest.MonkeyPatch):
    words = tokenizer()
    monkeypatch.setattr(words, "chat_template", unmarked(MARKED))
    measure = measure_of(ChatCollator(words))  # pyright: ignore[reportArgumentType]
    samples = [chat([], "seven " * n) for n in range(40)]
    assert len({found[LANGUAGE_MODEL][0] for found in assert_equal_alone(measure, samples)}) > 30


def test_texts_are_tokenised_in_few_calls(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    measure = measure_of(ChatCollator(llava()))
    words = type(measure.collator.tokenizer)
    encode = words.__call__
    monkeypatch.setattr(
        words, "__call__", lambda self, text, **own: calls.append(len(text)) or encode(self, text, **own)
    )
    samples = [chat([(8, 8)] * (n % 3), "three") for n in range(70)]
    assert len(list(measure.together(samples.__getitem__, range(70)))) == 70
    assert calls == [32, 32, 6]


def test_a_tokenizer_that_fails_on_one_text_leaves_each_to_itself(monkeypatch: pytest.MonkeyPatch):
    collator = ChatCollator(llava()).without_media()
    samples = [chat([(8, 8)], "three"), chat([], "seven")]
    assert None not in encode_together(collator, samples.__getitem__, [0, 1])
    monkeypatch.delattr(ProcessorMixin, "_check_special_mm_tokens")  # calling it raises
    assert encode_together(collator, samples.__getitem__, [0, 1]) == [None, None]


def test_a_padding_that_one_text_has_too_is_not_left_out():
    processor = llava()
    processor.text_kwargs = {"padding": "max_length", "max_length": 90}  # pyright: ignore[reportAttributeAccessIssue]
    assert_equal_alone(measure_of(ChatCollator(processor)), [chat([(8, 8)], "three"), chat([], "seven")])
