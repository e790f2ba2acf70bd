"""Samples of all formats become what the same conversation becomes as messages, and are measured alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_mmparallel.data import ChatCollator
from hf_mmparallel.data.sample_formats import find_formats, read_sample
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.plan import LANGUAGE_MODEL

from .conversations import assert_same_batch, image_file, llava_json, random_image, say, without_decoding
from .processors import MARKED, PROCESSORS, llava, unmarked
from .test_sample_sizes import CHAT_SPEC, IMAGE_ID, tokens

FILES = [without_decoding(image_file(size)) for size in ((8, 8), (20, 9))]
ASK, ANSWER = "which digit", "three"
SAMPLE = {"messages": [say("system", "seven"), say("user", None, ASK), say("assistant", ANSWER)], "images": FILES[:1]}
TEXTS = [{"role": "system", "content": "seven"}, {"role": "user", "content": ASK}]
TEXTS += [{"role": "assistant", "content": ANSWER}]
TAGGED = [{**turn, "content": turn["content"].replace(ASK, f"<image>\n{ASK}")} for turn in TEXTS]
SHAREGPT = [{"from": "human", "value": f"<image>{ASK}"}, {"from": "gpt", "value": ANSWER}]

# The same conversation in other formats.
SAME: dict[str, dict[str, Any]] = {
    "image in a part": {
        "messages": [
            SAMPLE["messages"][0],
            {"role": "user", "content": [{"type": "image", "image": FILES[0]}, {"type": "text", "text": ASK}]},
            {**SAMPLE["messages"][2], "tool_calls": None},
        ]
    },
    "string with a tag": {"messages": TAGGED, "images": FILES[:1]},
    "TRL's images without a tag": {"messages": TEXTS, "images": FILES[:1]},
    "one image": {"messages": TEXTS, "image": FILES[0]},
    "Llava": llava_json(SAMPLE),
    "ShareGPT": {"conversations": SHAREGPT, "images": FILES[:1], "system": "seven"},
    "some columns are empty": {**llava_json(SAMPLE), "messages": None, "text": None, "videos": None},
}


@pytest.mark.parametrize("template", [MARKED, unmarked(MARKED)], ids=["marked", "unmarked"])
@pytest.mark.parametrize("name", SAME)
def test_a_conversation_is_the_same_in_all_formats(name: str, template: str):
    collator = ChatCollator(llava(template))
    found, wanted = collator([SAME[name]]), collator([SAMPLE])
    assert (wanted["labels"] != -100).sum() > 1
    assert_same_batch(found, wanted)


LOSSES: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"prompt": TAGGED[:2], "completion": TEXTS[2:], "image": FILES[0]}, "three</s>"),
    "strings": ({"prompt": f"<image>{ASK}", "completion": ANSWER, "image": FILES[0]}, "three</s>"),
    "strings that end": ({"prompt": ASK, "completion": f"{ANSWER}</s>"}, "three</s>"),
    "text": ({"text": f"{ASK}<image>{ANSWER}", "images": FILES[:1]}, "which digitthree</s>"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_completion_and_all_of_a_text_have_loss(name: str):
    sample, wanted = LOSSES[name]
    batch = ChatCollator(llava())([sample])
    kept = batch["labels"] != -100
    assert llava().tokenizer.decode(batch["input_ids"][kept]) == wanted
    assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
    assert (batch["input_ids"] == IMAGE_ID).sum() == 5 * ("image" in str(sample))


SIZED = {**SAME, **{name: sample for name, (sample, _) in LOSSES.items()}}
SIZED["no image"] = {"conversations": SHAREGPT[1:], "image": None}


def table(rows: list[dict[str, Any]]) -> Dataset:
    return Dataset.from_list(rows)


@pytest.mark.parametrize("make", [list, table])
@pytest.mark.parametrize("name", SIZED)
def test_sizes_are_those_that_the_collator_makes(name: str, make: Callable[[Any], Any], loads: list[Any]):
    collator = ChatCollator(llava())
    found = tokens(size_source(make([SIZED[name]] * 2), collator, CHAT_SPEC), [1])
    assert not loads
    batch = collator([SIZED[name]])
    assert found[LANGUAGE_MODEL] == [batch["input_ids"].shape[1]]
    assert found["vision"] == [int((batch["input_ids"] == IMAGE_ID).sum())]


def test_a_line_break_between_media_and_text_is_the_templates():
    def parts(text: str, count: int) -> list[str]:
        sample = {"messages": [{"role": "user", "content": text}], "images": ["a"] * count}
        (message,) = read_sample(sample, 0, ["image"]).messages
        return [part.get("text", "<>") for part in message["content"]]

    assert parts("<image>\n<image>\na\n<image>", 3) == ["<>", "<>", "a", "<>"]
    assert parts("a\n<image>\nb <image>", 2) == ["a\n", "<>", "\nb ", "<>"]
    assert parts("<image>", 1) == ["<>"] and parts("<video>\n", 0) == ["<video>\n"] and parts("", 0) == [""]
    assert parts("<image>\n\na", 1) == ["<>", "\na"]


def test_tools_and_variables_of_the_template_are_passed_to_it():
    template = "{{ tools[0]['name'] if tools }} {{ tone }}" + unmarked(MARKED)
    collator = ChatCollator(llava(template))
    for tools in ([{"name": "this"}], '[{"name": "this"}]'):
        sample = {**SAMPLE, "tools": tools, "chat_template_kwargs": {"tone": "seven"}}
        assert collator.tokenizer.decode(collator([sample])["input_ids"][0]).startswith("this seven")


def test_where_a_template_takes_strings_placeholders_are_the_processors():
    strings = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    collator = ChatCollator(llava(strings))
    assert collator.tokenizer.decode(collator([SAMPLE])["input_ids"][0]).endswith(
        f"user: {'<image>' * 5}which digit</s>assistant: three</s>"
    )


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        (["prompt", "messages", "images"], ["messages"]),
        (["prompt", "completion", "text"], ["prompt and completion", "text"]),
        (["id", "image", "conversations"], ["Llava"]),
        (["conversations", "images"], ["ShareGPT"]),
        (["prompt", "answer"], []),
    ],
)
def test_columns_say_the_format(columns: list[str], names: list[str]):
    assert [one.name for one in find_formats(columns)] == names


@pytest.mark.parametrize("media", [True, False])
@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"question": "a", "answer": "b"}, r"`prompt` with `completion`.*\['answer', 'question'\]"),
        (
            {**llava_json(SAMPLE), "image": FILES, "id": "a7"},
            "1 image parts in `conversations` and 2 images in `image` of sample 0 .*`id` 'a7'",
        ),
        ({"conversations": SHAREGPT, "image": None}, "1 image parts .* 0 images"),
        ({"text": ASK, "image": FILES[0]}, "0 image parts .* 1 images in `image`"),
        ({**SAMPLE, "image": FILES[0]}, r"\['images', 'image'\]"),
        ({"messages": TEXTS, "videos": ["a.mp4"]}, "videos in sample 0 .* text and image"),
        ({"conversations": [{"from": "someone", "value": "a"}]}, "'someone'.*human"),
        ({"prompt": ASK, "completion": TEXTS[2:]}, "text beside messages"),
        ({"messages": {"role": "user"}}, "`dict` is in `messages` of sample 0"),
        ({"conversations": "which digit"}, "`str` is in `conversations`.* messages"),
        ({"text": TEXTS}, "`list` is in `text`.* a string"),
        ({"conversation": [], "images": []}, r"`messages`.*\['conversation', 'images'\]"),
        ({"messages": [say("user", None)], "images": []}, "1 image parts in `messages` and 0 images"),
        ({"messages": [say("user", None)]}, "1 image parts in `messages` and 0 images"),
        ({"messages": [say("user", "x")], "images": FILES[:1]}, "0 image parts in `messages` and 1 images"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "`audio`"),
        ({"messages": [{"speaker": "a", "value": "x"}]}, r"sample 0 .*\['speaker', 'value'\] and no `role`"),
        ({"messages": [say("user", None)], "images": [without_decoding(b"no image")]}, "cannot identify"),
    ],
)
def test_what_no_format_has_is_refused_with_and_without_media(sample: dict[str, Any], words: str, media: bool):
    collator = ChatCollator(llava())
    with pytest.raises((ValueError, OSError), match=words):
        (collator if media else collator.without_media())([sample])


def test_a_named_column_is_the_only_one_that_is_read():
    collator = ChatCollator(llava(), messages_column="talk", images_column="pictures")
    assert len(collator([{"talk": TAGGED, "pictures": [random_image((8, 8))], "image": "a"}])["pixel_values"]) == 1
    with pytest.raises(ValueError, match=r"`talk`.*\['text'\]"):
        collator([{"text": "a"}])


def test_of_a_family_with_wider_placeholders_too():
    collator = ChatCollator(PROCESSORS["gemma3"]())
    assert_same_batch(collator([llava_json(SAMPLE)]), collator([SAMPLE]))
