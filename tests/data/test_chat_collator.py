"""Conversations become batches: labels on answers only, images in order, nothing cut that an image needs."""

import io

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image as PILImage
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlamaConfig,
    LlavaProcessor,
)

from hf_mmparallel.composed.multimodal_model import MultimodalModel
from hf_mmparallel.data import ChatCollator, PretokenizedCollator, chat_collator
from tests.data.processors import tokenizer

IGNORED = -100
CONTENT = (
    "{%% for part in m['content'] %%}{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}"
    "{%% endif %%}{%% endfor %%}"
)
TURNS = (
    "{{ bos_token }}{%% for m in messages %%}{%% if m['role'] == 'assistant' %%}ASSISTANT:\n{%% generation %%}"
    + CONTENT
    + "{{ eos_token }}{%% endgeneration %%}\n{%% else %%}{{ m['role'] | upper }}: "
    + CONTENT
    + "\n{%% endif %%}{%% endfor %%}{%% if add_generation_prompt %%}ASSISTANT:\n{%% endif %%}"
)
MARKED = {image: TURNS % (image, image) for image in ("<image>", "<start_of_image>")}
UNMARKED = {
    image: template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for image, template in MARKED.items()
}


def llava(template: str | None = MARKED["<image>"]) -> LlavaProcessor:
    return LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
        tokenizer(image_token="<image>"),
        patch_size=4,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def gemma3(template: str = MARKED["<start_of_image>"]) -> Gemma3Processor:
    tokens = {"image_token": "<soft>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    size = {"height": 8, "width": 8}
    return Gemma3Processor(Gemma3ImageProcessor(size=size), tokenizer(**tokens), template, image_seq_length=4)


PROCESSORS = {
    "llava": (llava, "<image>", 5),
    "gemma3": (gemma3, "<start_of_image>", 4),
}


def image(value: int) -> PILImage.Image:
    return PILImage.new("RGB", (8, 8), (value, value, value))


def say(role: str, *parts: str | None) -> dict:
    """A message of text parts; None is an image."""
    content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    return {"role": role, "content": content}


def samples() -> list[dict]:
    """One image; two images in two turns; text only."""
    return [
        {"messages": [say("user", None, "which digit"), say("assistant", "three")], "images": [image(10)]},
        {
            "messages": [
                say("system", "be brief"),
                say("user", "which digits are", None, "this"),
                say("assistant", "seven and three"),
                say("user", None, "?"),
                say("assistant", "four"),
            ],
            "images": [image(20), image(30)],
        },
        {"messages": [say("user", "hello"), say("assistant", "yes?")], "images": []},
    ]


ANSWERS = ["three</s>", "seven and three</s>four</s>", "yes?</s>"]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", PROCESSORS)
def test_labels_are_the_answers(name, marked):
    build, token, rows = PROCESSORS[name]
    processor = build((MARKED if marked else UNMARKED)[token])
    batch = ChatCollator(processor)(samples())
    assert batch["pixel_values"].shape == (3, 3, 8, 8)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    kept = batch["labels"] != IGNORED
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
    for ids, mask, attended, answer in zip(batch["input_ids"], kept, batch["attention_mask"], ANSWERS, strict=True):
        assert processor.tokenizer.decode(ids[mask]) == answer
        assert not mask[attended == 0].any() and set(ids[attended == 0].tolist()) <= {0}
    counts = (batch["input_ids"] == processor.tokenizer.image_token_id).sum(1).tolist()
    assert counts == [rows, 2 * rows, 0]
    order = batch["pixel_values"].flatten(1).mean(1)
    assert order[0] < order[1] < order[2]


@pytest.mark.parametrize("name", PROCESSORS)
def test_equals_the_masks_of_the_processor(name):
    processor = PROCESSORS[name][0]()
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
        if sample["images"]:
            assert torch.equal(encoded["pixel_values"], expected["pixel_values"])
        inside = collator.encode({"messages": messages})
        assert all(torch.equal(inside[key], encoded[key]) for key in encoded)


def test_a_sample_does_not_depend_on_its_batch():
    collator = ChatCollator(llava())
    together = collator(samples())
    for index, sample in enumerate(samples()):
        alone = collator([sample])
        length = alone["input_ids"].shape[1]
        for key in ("input_ids", "labels", "attention_mask"):
            assert torch.equal(alone[key][0], together[key][index, :length])


def test_an_image_in_an_answer_has_no_labels():
    sample = {"messages": [say("user", "draw"), say("assistant", "here", None, "done")], "images": [image(1)]}
    for name, (build, token, rows) in PROCESSORS.items():
        for template in (MARKED[token], UNMARKED[token]):
            processor = build(template)
            batch = ChatCollator(processor)([sample])
            kept = batch["labels"] != IGNORED
            assert (batch["input_ids"] == processor.tokenizer.image_token_id).sum() == rows
            assert processor.tokenizer.decode(batch["input_ids"][kept]) == "heredone</s>", name


def test_content_may_be_a_string():
    texts = [{"role": "user", "content": "which digit"}, {"role": "assistant", "content": "three"}]
    parts = [say("user", "which digit"), say("assistant", "three")]
    strings = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    for template in (MARKED["<image>"], UNMARKED["<image>"], strings + prompt):
        collator = ChatCollator(llava(template))
        first, second = collator([{"messages": texts}]), collator([{"messages": parts}])
        assert torch.equal(first["input_ids"], second["input_ids"]) and torch.equal(first["labels"], second["labels"])
        kept = first["labels"] != IGNORED
        answer = " three</s>" if template.endswith(prompt) else "three</s>"  # a token over the border is trained
        assert collator.tokenizer.decode(first["labels"][kept]) == answer
        assert "pixel_values" not in first


def test_a_template_that_rewrites_history_needs_marks():
    forgetful = UNMARKED["<image>"].replace(
        "{{ part['text'] }}", "{{ part['text'] if loop.last and m is messages[-1] }}"
    )
    forgetful = forgetful.replace("m is messages[-1]", "m == messages[-1]")
    with pytest.raises(ValueError, match="differently if more turns follow"):
        ChatCollator(llava(forgetful))([samples()[1]])


def test_rows_of_a_dataset():
    buffer = io.BytesIO()
    image(10).save(buffer, format="PNG")
    encoded = {"bytes": buffer.getvalue(), "path": None}
    dataset = Dataset.from_list(
        [{"messages": s["messages"], "images": [encoded] * len(s["images"])} for s in samples()]
    )
    collator = ChatCollator(llava())
    batch = collator([dataset[index] for index in range(3)])
    expected = collator([{**s, "images": [image(10)] * len(s["images"])} for s in samples()])
    assert batch.keys() == expected.keys() and all(torch.equal(batch[key], expected[key]) for key in batch)


def test_a_sample_too_long():
    tail = {"messages": [say("user", None, "which"), say("assistant", "three " * 9)], "images": [image(1)]}
    collator = ChatCollator(llava())
    whole = collator([tail])
    length = whole["input_ids"].shape[1]
    assert ChatCollator(llava(), max_length=length)([tail]).keys() == whole.keys()
    with pytest.raises(
        ValueError, match=rf"Sample 1 of the batch has {length} tokens.*max_length={length - 1}`\. Use"
    ):
        ChatCollator(llava(), max_length=length - 1)([samples()[2], tail])
    cut = ChatCollator(llava(), max_length=length - 5, on_too_long="truncate")([tail])
    assert torch.equal(cut["labels"], whole["labels"][:, : length - 5]) and len(cut["pixel_values"]) == 1
    with pytest.raises(ValueError, match="truncation would drop 3 image tokens"):
        ChatCollator(llava(), max_length=6, on_too_long="truncate")([tail])


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ({"conversation": [], "images": []}, r"no column `messages`; it has \['conversation', 'images'\]"),
        ({"messages": [say("user", None)], "images": []}, "1 image parts in `messages` and 0 images"),
        ({"messages": [say("user", None)]}, "1 image parts in `messages` and 0 images"),
        ({"messages": [say("user", "x")], "images": [image(1)]}, "0 image parts in `messages` and 1 images"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "content part of type `audio`"),
        (
            {"messages": [{"from": "human", "value": "x"}]},
            r"sample 0 .* has \['from', 'value'\] and no `role`",
        ),
    ],
)
def test_bad_samples_are_errors(sample, reason):
    with pytest.raises(ValueError, match=reason):
        ChatCollator(llava())([sample])


def test_a_conversation_without_an_answer_is_told_of_once(caplog):
    collator = ChatCollator(llava())
    with caplog.at_level("WARNING", logger=chat_collator.logger.name):
        for _ in range(2):
            batch = collator([{"messages": [say("user", "x"), say("gpt", "three")]}, samples()[0]])
    assert (batch["labels"][0] == IGNORED).all() and not (batch["labels"][1] == IGNORED).all()
    told = [record.getMessage() for record in caplog.records if "has no target" in record.getMessage()]
    assert len(told) == 1 and "it has no message of the role `assistant`; its roles are gpt, user." in told[0]


def test_bad_settings_are_errors():
    with pytest.raises(ValueError, match="`on_too_long='drop'`"):
        ChatCollator(llava(), on_too_long="drop")
    with pytest.raises(ValueError, match="no chat template"):
        ChatCollator(llava(None))
    with pytest.raises(ValueError, match="`padding_side='middle'`"):
        PretokenizedCollator(padding_side="middle")
    with pytest.raises(ValueError, match="`pad_to_multiple_of=0`"):
        PretokenizedCollator(pad_to_multiple_of=0)


def test_a_batch_trains_a_composed_model():
    processor = llava()
    model = MultimodalModel.from_unimodal(
        {
            "vision": CLIPVisionConfig(
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
            )
        },
        LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=330),
        token_ids={"vision": processor.tokenizer.image_token_id},
    )
    loss = model(**ChatCollator(processor)(samples())).loss
    loss.backward()
    assert loss.isfinite() and model.model.projectors["vision"].linear_1.weight.grad.abs().max() > 0


def token_samples() -> list[dict]:
    return [
        {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7], "pixel_values": np.ones((2, 3, 4, 4)), "id": "a", "n": 3},
        {"input_ids": [8], "labels": [8], "pixel_values": None, "id": "b", "n": 1},
        {"input_ids": [5, 9], "labels": [5, 9], "pixel_values": torch.zeros(1, 3, 4, 4), "id": "c", "n": 2},
    ]


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


def test_patches_and_three_dimensional_positions():
    rows = [
        {
            "input_ids": torch.arange(n),
            "labels": torch.arange(n),
            "position_ids": torch.arange(n).expand(3, n),
            "pixel_values": torch.randn(4 * n, 12),
            "image_grid_thw": [[1, 2, 2 * n]],
        }
        for n in (3, 2)
    ]
    batch = PretokenizedCollator()(rows)
    assert batch["position_ids"].shape == (3, 2, 3)
    assert torch.equal(batch["position_ids"][:, 1, :2], rows[1]["position_ids"])
    assert torch.equal(batch["pixel_values"], torch.cat([row["pixel_values"] for row in rows]))
    assert batch["image_grid_thw"].tolist() == [[1, 2, 6], [1, 2, 4]]


def test_media_of_different_sizes_are_padded_with_zeros():
    sizes = [(1, 2, 3, 4, 4), (2, 3, 3, 4, 2)]
    batch = PretokenizedCollator()([{"input_ids": [1], "pixel_values": torch.ones(size)} for size in sizes])
    assert batch["pixel_values"].shape == (3, 3, 3, 4, 4)
    assert batch["pixel_values"].sum() == sum(np.prod(size) for size in sizes)
    assert batch["pixel_values"][0, :2].min() == 1 and batch["pixel_values"][1:, ..., 2:].max() == 0
    with pytest.raises(ValueError, match="same number of dimensions"):
        PretokenizedCollator()([{"input_ids": [1], "pixel_values": torch.ones(size)} for size in ((1, 2), (1, 2, 2))])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": [1, 2]}, "Sample 0 of the batch has 3 `input_ids`, but `labels` has 2"),
        ({"labels": None}, "Sample 0 of the batch has 3 `input_ids`, but `labels` is missing"),
        ({"input_ids": None}, "no column `input_ids`"),
    ],
)
def test_fields_of_tokens_must_match(changes, reason):
    first, *rest = token_samples()
    with pytest.raises(ValueError, match=reason):
        PretokenizedCollator()([{**first, **changes}, *rest])


def assert_lacks_pixels(found, whole):
    assert found.keys() == whole.keys() - {"pixel_values"}
    assert all(torch.equal(found[name], whole[name]) for name in found)


@pytest.mark.parametrize("name", PROCESSORS)
def test_without_media_only_pixels_are_missing(name):
    collator = ChatCollator(PROCESSORS[name][0](), pad_to_multiple_of=8)
    lean = collator.without_media()
    assert_lacks_pixels(lean(samples()), collator(samples()))
    assert_lacks_pixels(collator.without_media(["pixel_values"])(samples()), collator(samples()))
    assert lean.decodes == frozenset() and collator.decodes == {"Image"}
    assert collator.without_media(["input_features"]) is collator
    inside = {"messages": [{"role": "user", "content": [{"type": "image", "image": {"height": 9, "width": 7}}]}]}
    assert lean.encode(inside)["input_ids"].shape[0] > 5


def test_without_media_errors_are_the_same():
    lean = ChatCollator(llava(), max_length=12).without_media()
    for sample, reason in (
        ({"messages": [say("user", None)], "images": []}, "1 image parts in `messages` and 0 images"),
        ({"text": "hello"}, "no column `messages`"),
        (samples()[1], r"Sample 0 of the batch has \d+ tokens, more than `max_length=12`"),
        ({"messages": [say("user", None)], "images": [{"bytes": b"no image", "path": None}]}, "cannot identify"),
    ):
        with pytest.raises((ValueError, OSError), match=reason):
            lean([sample])


def test_what_sizes_do_not_tell_is_decoded_and_said_once(monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise RuntimeError("no blank images")

    collator = ChatCollator(llava())
    lean = collator.without_media()
    monkeypatch.setattr(type(lean.processor.image_processor), "__call__", refuse)
    with caplog.at_level("WARNING", logger=chat_collator.logger.name):
        for _ in range(2):
            assert_lacks_pixels(lean(samples()), collator(samples()))
    told = [record.getMessage() for record in caplog.records if "decoded where only text is needed" in record.message]
    assert told == [
        "`LlavaProcessor` can't process an image from its size alone, so images are decoded where only text is "
        "needed: RuntimeError"
    ]


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
    assert_lacks_pixels(collator.without_media(["pixel_values"])(samples()), whole)
    assert "weights" not in collator.without_media()(samples())
