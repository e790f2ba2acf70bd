"""Sizes of samples from each source, without decoding, equal for every form of a dataset, cached and picklable."""

from __future__ import annotations

import functools
import io
import json
import pickle
import random
import re

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, List, Value, load_dataset, load_from_disk
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PILImage
from torch.utils.data import ConcatDataset, Subset

from hf_mmparallel.data import ChatCollator, PretokenizedCollator, sample_sizes, size_measures
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.data.size_measures import TokenMeasure
from hf_mmparallel.data.size_sources import LayerTokens, Ragged
from hf_mmparallel.data.streams import StreamWindow
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.features import count_feature_tokens
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, SampleSizes
from tests.data.test_chat_collator import llava, say
from tests.plan.specs import model_spec
from tests.tiny import FAMILIES, collate, make_dataset

SPEC = ModelSpec(model_spec().modules, placeholders={"image": 100})
IMAGE_ID = llava().tokenizer.convert_tokens_to_ids("<image>")
CHAT_SPEC = ModelSpec(model_spec().modules, placeholders={"image": IMAGE_ID})
MEDIA = ("pixel_values", "input_features")


def lists(sizes: SampleSizes) -> tuple[dict, dict]:
    """Tokens and squares as lists."""
    return (
        {name: values.tolist() for name, values in sizes.tokens.items()},
        {name: values.tolist() for name, values in sizes.squares.items()},
    )


def tokens(source, indices) -> dict[str, list[int]]:
    return lists(source(indices))[0]


class Plain(torch.utils.data.Dataset):
    """A plain torch dataset that counts its reads and draws when it is read."""

    def __init__(self, samples: list[dict]):
        self.samples = samples
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict:
        self.reads.append(index)
        random.random(), np.random.rand(), torch.rand(())
        return self.samples[index]


class Counting(Plain):
    """A dataset that knows its sizes."""

    def token_counts(self, index: int) -> dict[str, int | list[int]]:
        return {LANGUAGE_MODEL: 10 * index + 1, "vision": [index] * 2}


def counts_of(sample: dict) -> dict[str, int | list[int]]:
    return {LANGUAGE_MODEL: len(sample["text"]), "vision": sample["patches"]}


ROWS = [
    {"text": "abc", "length": 3, "patches": [4, 2]},
    {"text": "abcde", "length": 5, "patches": None},
    {"text": "a", "length": 1, "patches": [7]},
]


@pytest.mark.parametrize("as_dataset", [True, False])
def test_columns_hold_numbers_or_a_number_for_each_image(as_dataset):
    data = Dataset.from_list(ROWS) if as_dataset else ROWS
    source = size_source(data, None, SPEC, columns={LANGUAGE_MODEL: "length", "vision": "patches"})
    assert lists(source([2, 0, 1, 0])) == (
        {"vision": [7, 6, 0, 6], LANGUAGE_MODEL: [1, 3, 5, 3]},
        {"vision": [49.0, 20.0, 0.0, 20.0], LANGUAGE_MODEL: [1.0, 9.0, 25.0, 9.0]},
    )
    assert source([0]).known


@pytest.mark.parametrize("as_dataset", [True, False])
def test_encoders_without_a_column_count_alike(as_dataset):
    data = Dataset.from_list(ROWS) if as_dataset else ROWS
    source = size_source(data, None, SPEC, columns="length")
    assert tokens(source, [0, 1]) == {"vision": [1, 1], LANGUAGE_MODEL: [3, 5]}


def test_a_column_is_read_in_the_order_of_a_selection():
    data = Dataset.from_list(ROWS).select([2, 0])
    assert tokens(size_source(data, None, SPEC, columns="length"), [0, 1])[LANGUAGE_MODEL] == [1, 3]


@pytest.mark.parametrize("as_dataset", [True, False])
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("size", r"no column `size`.*`language_model`; it has \['length', 'patches', 'text'\]"),
        ({LANGUAGE_MODEL: "length", "vison": "patches"}, "no `vison`. Did you mean `vision`"),
        ({"vision": "patches"}, "lengths of `language_model`"),
        ("text", "`text`"),
    ],
)
def test_wrong_columns(as_dataset, columns, words):
    data = Dataset.from_list(ROWS) if as_dataset else ROWS
    with pytest.raises(ValueError, match=words):
        size_source(data, None, SPEC, columns=columns)([0])


@pytest.mark.parametrize("values", [[-1, 2], [1.5, 2.0], [[[1, 2]], [[3]]], [[1, None], [2]]])
@pytest.mark.parametrize("as_dataset", [True, False])
def test_values_that_are_no_lengths(values, as_dataset):
    data = Dataset.from_dict({"n": values}) if as_dataset else [{"n": value} for value in values]
    with pytest.raises(ValueError, match="`n`.*Use numbers|`n`.*Give a number"):
        size_source(data, None, SPEC, columns="n")([0, 1])


def test_whole_floats_are_lengths():
    assert tokens(size_source(Dataset.from_dict({"n": [2.0, 3.0]}), None, SPEC, columns="n"), [1])[LANGUAGE_MODEL] == [
        3
    ]


def test_a_column_and_a_function_contradict_each_other():
    with pytest.raises(ValueError, match="twice"):
        size_source(ROWS, None, SPEC, columns="length", function=counts_of)


@pytest.mark.parametrize("make", [list, Dataset.from_list, Plain], ids=["list", "datasets", "torch"])
def test_a_function_of_a_sample(make):
    source = size_source(make(ROWS), None, SPEC, function=counts_of)
    assert lists(source([1, 2, 0])) == (
        {"vision": [0, 7, 6], LANGUAGE_MODEL: [5, 1, 3]},
        {"vision": [0.0, 49.0, 20.0], LANGUAGE_MODEL: [25.0, 1.0, 9.0]},
    )


def test_an_encoder_that_a_function_leaves_out_has_nothing_to_do():
    source = size_source(ROWS, None, SPEC, function=lambda sample: {LANGUAGE_MODEL: 2})
    assert tokens(source, [0, 1]) == {"vision": [0, 0], LANGUAGE_MODEL: [2, 2]}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (3, "gave 3 for the sizes"),
        ({"vision": 3}, "tokens of each module"),
        ({LANGUAGE_MODEL: 1, "visoin": 3}, "Did you mean `vision`"),
        ({LANGUAGE_MODEL: -1}, "length -1"),
        ({LANGUAGE_MODEL: "long"}, "length 'long'"),
    ],
)
def test_a_function_that_gives_no_sizes(found, words):
    with pytest.raises(ValueError, match=words):
        size_source(ROWS, None, SPEC, function=lambda sample: found)([0])


def test_a_torch_dataset_is_read_once_and_draws_nothing_from_the_training():
    data = Plain(ROWS)
    source = size_source(data, None, SPEC, function=counts_of)
    assert data.reads == []
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for _ in range(2):
        source([2, 0, 2])
    assert data.reads == [0, 2]
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_a_function_sees_images_as_they_are_stored():
    features = Features({"images": List(Image())})
    data = Dataset.from_list([{"images": [broken_png(6, 4), broken_png(2, 2)]}, {"images": []}], features=features)

    def areas(sample: dict) -> dict:
        sizes = [PILImage.open(io.BytesIO(image["bytes"])).size for image in sample["images"]]
        return {LANGUAGE_MODEL: 1, "vision": [width * height for width, height in sizes]}

    assert tokens(size_source(data, None, SPEC, function=areas), [0, 1])["vision"] == [28, 0]


def test_a_dataset_knows_its_sizes():
    data = Counting(ROWS)
    source = size_source(data, PretokenizedCollator(), SPEC)
    assert tokens(source, [2, 1]) == {"vision": [4, 2], LANGUAGE_MODEL: [21, 11]}
    assert data.reads == []


def without_media(samples: list[dict]) -> Dataset:
    """Samples as a dataset of integers."""
    return Dataset.from_list([{n: v.tolist() for n, v in s.items() if n not in MEDIA} for s in samples])


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "qwen2_5_omni", "voxtral"])
def test_tokens_are_counted_where_the_batch_is(family):
    spec, samples = build_model_spec(FAMILIES[family]()), make_dataset(family, 7)
    batch = collate(family)(samples)
    rows = count_feature_tokens(batch, spec)
    listed = size_source(samples, collate(family), spec)(range(7))
    assert listed.tokens[LANGUAGE_MODEL].tolist() == batch["attention_mask"].sum(-1).tolist()
    for name in spec.encoders:
        modalities = {feature.modality for feature in spec.modules[name].features}
        assert listed.tokens[name].tolist() == np.sum([rows[m] for m in modalities], axis=0).tolist()
    assert lists(size_source(without_media(samples), None, spec)(range(7))) == lists(listed)


def test_padding_is_no_token():
    data = [{"input_ids": [100, 100, 5, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}]
    assert tokens(size_source(data, None, SPEC), [0]) == {"vision": [2], LANGUAGE_MODEL: [3]}


@pytest.mark.parametrize(
    ("ids", "fields", "expected"),
    [
        ([100] * 3 + [1] + [100] * 2, {}, [3, 2]),
        ([100] * 6, {"image_grid_thw": [[1, 4, 4], [1, 2, 4]]}, [4, 2]),
        ([100] * 6, {"image_grid_thw": [[3, 2, 4]]}, [2, 2, 2]),
        ([100, 100, 1, 100, 100, 1], {"image_sizes": [[32, 32]]}, [4]),
        ([100] * 5, {"image_sizes": [[31, 17], [9, 5]]}, [5]),
        ([100] * 5, {"image_grid_thw": [], "images": [None], "image_flags": [1]}, [5]),
        ([1, 2], {"image_grid_thw": []}, []),
    ],
)
def test_items_share_the_rows_by_their_extents(ids, fields, expected):
    assert TokenMeasure.of(SPEC)({"input_ids": ids, **fields})["vision"] == expected


@given(st.lists(st.lists(st.integers(0, 50), max_size=4), min_size=1, max_size=6))
def test_sums_over_samples(rows):
    found, squares = Ragged.of(rows).sums(LayerTokens(4.0, 2.0))
    assert found.tolist() == [sum(4 * n + 2 for n in row) for row in rows]
    assert squares.tolist() == [sum((4 * n + 2) ** 2 for n in row) for row in rows]
    _, fixed = Ragged.of(rows).sums(LayerTokens(4.0, sequence=8))
    assert fixed.tolist() == [sum(4 * n for n in row) * 8 for row in rows]


def broken_png(width: int, height: int) -> dict:
    """An undecoded image with a header and nothing behind it."""
    buffer = io.BytesIO()
    PILImage.new("RGB", (width, height)).save(buffer, "png")
    data = buffer.getvalue()
    data = data[: data.index(b"IDAT") + 4] + b"nothing"
    with pytest.raises(OSError):
        PILImage.open(io.BytesIO(data)).load()
    return {"bytes": data, "path": None}


def conversation(*images: dict) -> dict:
    return {
        "messages": [say("user", *[None] * len(images), "which digit"), say("assistant", "three")],
        "images": list(images),
    }


CHATS = [conversation(broken_png(8, 8)), conversation(), conversation(broken_png(9, 20), broken_png(8, 8))]
PART = {"type": Value("string"), "text": Value("string")}
CHAT_FEATURES = Features({"messages": List({"role": Value("string"), "content": List(PART)}), "images": List(Image())})


def chats() -> Dataset:
    return Dataset.from_list(CHATS, features=CHAT_FEATURES)


@pytest.mark.parametrize("make", [lambda: CHATS, chats], ids=["list", "datasets"])
def test_conversations_are_measured_without_decoding(make):
    source = size_source(make(), ChatCollator(llava()), CHAT_SPEC)
    good = [
        {**chat, "images": [PILImage.new("RGB", PILImage.open(io.BytesIO(i["bytes"])).size) for i in chat["images"]]}
        for chat in CHATS
    ]
    batch = ChatCollator(llava())(good)
    assert tokens(source, [0, 1, 2]) == {
        "vision": (batch["input_ids"] == IMAGE_ID).sum(-1).tolist(),
        LANGUAGE_MODEL: batch["attention_mask"].sum(-1).tolist(),
    }
    assert tokens(source, [2, 1])["vision"] == [10, 0]


def test_images_inside_of_messages_are_not_decoded():
    messages = [{"role": "user", "content": [{"type": "image", "image": broken_png(8, 8)}]}, say("assistant", "three")]
    features = Features({"messages": List({"role": Value("string"), "content": List({**PART, "image": Image()})})})
    data = Dataset.from_list([{"messages": messages}], features=features)
    assert tokens(size_source(data, ChatCollator(llava()), CHAT_SPEC), [0])["vision"] == [5]


def test_parts_with_unlike_keys_of_a_json_file_are_measured(tmp_path, monkeypatch, caplog):
    """`datasets` stores such parts as strings of JSON."""
    PILImage.new("RGB", (8, 8)).save(tmp_path / "a.png")
    parts = [{"type": "image", "image": str(tmp_path / "a.png")}, {"type": "text", "text": "which digit"}]
    chat = {"messages": [{"role": "user", "content": parts}, say("assistant", "three")]}
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(chat) for _ in range(3)))
    load = functools.partial(
        load_dataset, "json", data_files=str(tmp_path / "train.jsonl"), split="train", cache_dir=str(tmp_path)
    )
    expected = tokens(size_source([chat] * 3, ChatCollator(llava()), CHAT_SPEC), [0, 1, 2])
    assert expected["vision"] == [5] * 3
    assert tokens(size_source(load(), ChatCollator(llava()), CHAT_SPEC), [0, 1, 2]) == expected
    window = StreamWindow(load(streaming=True), 0)
    window.fetch(GlobalBatch((0, 1, 2), 0))
    assert tokens(size_source(window, ChatCollator(llava()), CHAT_SPEC), [0, 1, 2]) == expected
    monkeypatch.setattr(sample_sizes, "PARALLEL_FROM", 2)
    assert tokens(size_source(load(), ChatCollator(llava()), CHAT_SPEC), [0, 1, 2]) == expected
    assert "sizes are unknown" not in caplog.text


def test_the_first_cause_of_unknown_sizes_is_told(caplog):
    assert size_source(chat_table(CHATS[0], MISPLACED), ChatCollator(llava()), CHAT_SPEC) is not None
    cause = re.search(r"unknown of 1 of 2 samples, the first of which is 1: (.+)", caplog.text)
    assert cause is not None and "can't be measured" in cause[1]


def test_a_wrapped_collator_and_a_default_one_are_found():
    class Wrapper:
        collator = ChatCollator(llava())

    expected = lists(size_source(CHATS, Wrapper.collator, CHAT_SPEC)([0, 1]))
    assert lists(size_source(CHATS, Wrapper(), CHAT_SPEC)([0, 1])) == expected
    assert lists(size_source(CHATS, None, CHAT_SPEC, processor=llava())([0, 1])) == expected


UNREADABLE = conversation({"bytes": b"no image", "path": None})
ELSEWHERE = conversation({"bytes": None, "path": "http://localhost:1/a.png"})
MISPLACED = {**conversation(broken_png(8, 8)), "images": []}


def test_a_file_that_can_not_be_read_is_told_of_and_the_rest_is_measured():
    source = size_source([CHATS[0], UNREADABLE], ChatCollator(llava()), CHAT_SPEC)
    with pytest.raises(OSError, match="cannot identify image"):
        source([0, 1])
    assert tokens(source, [0])["vision"] == [5]


@pytest.mark.parametrize("unknown", [ELSEWHERE, MISPLACED], ids=["elsewhere", "misplaced"])
def test_samples_of_which_nothing_says_the_size_count_one_token(unknown):
    source = size_source([CHATS[0], unknown], ChatCollator(llava()), CHAT_SPEC)
    assert tokens(source, [1]) == {"vision": [1], LANGUAGE_MODEL: [1]}


def chat_table(*samples: dict) -> Dataset:
    return Dataset.from_list(list(samples), features=CHAT_FEATURES)


def test_rows_without_a_size_have_that_of_the_median_row():
    def measured(*samples: dict) -> dict[str, list[int]]:
        return tokens(size_source(chat_table(*samples), ChatCollator(llava()), CHAT_SPEC), range(len(samples)))

    known = measured(*CHATS)
    found = measured(CHATS[2], ELSEWHERE, CHATS[0], UNREADABLE, CHATS[1], MISPLACED)
    for name, values in found.items():
        assert values == [known[name][place] for place in (2, 0, 0, 0, 1, 0)]


def test_a_table_without_any_size_is_unknown():
    assert size_source(chat_table(ELSEWHERE, ELSEWHERE), ChatCollator(llava()), CHAT_SPEC) is None


def test_measuring_fetches_nothing(monkeypatch):
    def fetch(*args):
        raise AssertionError("fetched")

    monkeypatch.setattr(type(llava()), "fetch_images", fetch, raising=False)
    monkeypatch.setattr(type(llava().image_processor), "fetch_images", fetch)
    chat = {**ELSEWHERE, "images": ["http://localhost:1/a.png"]}
    data = Dataset.from_list([chat])
    assert size_source(data, ChatCollator(llava()), CHAT_SPEC) is None
    assert tokens(size_source([CHATS[0], chat], ChatCollator(llava()), CHAT_SPEC), [1])["vision"] == [1]


def test_where_nothing_can_be_written_sizes_are_kept_in_memory(tmp_path, monkeypatch):
    Dataset.from_dict({"input_ids": [[1, 100], [2]]}).save_to_disk(tmp_path)
    data = load_from_disk(tmp_path)
    files = sorted(tmp_path.iterdir())
    monkeypatch.setattr(sample_sizes.os, "access", lambda *_: False)
    assert tokens(size_source(data, None, SPEC), [0, 1])[LANGUAGE_MODEL] == [2, 1]
    assert sorted(tmp_path.iterdir()) == files


def test_parts_of_datasets():
    column = {"columns": "length"}
    whole = Dataset.from_list(ROWS)
    joined = ConcatDataset([Subset(whole, [2, 1]), ROWS, Subset(Subset(ROWS, [1, 2]), [1])])
    source = size_source(joined, None, SPEC, **column)
    assert tokens(source, [5, 3, 0, 1, 4, 2])[LANGUAGE_MODEL] == [1, 5, 1, 5, 1, 3]
    assert len(source) == len(joined)
    assert tokens(source, [])[LANGUAGE_MODEL] == []


@pytest.mark.parametrize(
    "data",
    [
        Plain([{"input_ids": [1, 2]}]),
        ConcatDataset([[{"input_ids": [1]}], Plain([{"input_ids": [1]}])]),
        Subset(Plain([{"input_ids": [1]}]), [0]),
        [{"text": "a"}],
        [{"messages": []}],
        [],
        Dataset.from_dict({"text": ["a"]}),
        Dataset.from_dict({"input_ids": [[1]]}).with_transform(lambda batch: batch),
        Dataset.from_dict({"input_ids": [[1]]}).to_iterable_dataset(),
        iter([1]),
        None,
    ],
    ids=[
        "torch",
        "concat",
        "subset",
        "texts",
        "chat",
        "empty",
        "datasets",
        "transform",
        "stream",
        "iterator",
        "nothing",
    ],
)
def test_samples_of_which_nothing_is_known(data):
    assert size_source(data, PretokenizedCollator(), SPEC) is None


def test_a_format_changes_nothing_and_a_transform_leaves_columns():
    data = Dataset.from_dict({"input_ids": [[1, 100, 100]], "n": [7]})
    assert tokens(size_source(data.with_format("torch"), None, SPEC), [0])["vision"] == [2]
    transformed = data.with_transform(lambda batch: {"nothing": batch["n"]})
    assert tokens(size_source(transformed, None, SPEC, columns="n"), [0])[LANGUAGE_MODEL] == [7]


@pytest.mark.parametrize(
    "make",
    [
        lambda: size_source(CHATS, ChatCollator(llava()), CHAT_SPEC),
        lambda: size_source(chats(), ChatCollator(llava()), CHAT_SPEC),
        lambda: size_source(ConcatDataset([Subset(CHATS, [0]), CHATS[1:]]), ChatCollator(llava()), CHAT_SPEC),
    ],
    ids=["list", "datasets", "parts"],
)
def test_sources_can_be_pickled(make):
    source = make()
    copy = pickle.loads(pickle.dumps(source))
    assert lists(copy([2, 0])) == lists(source([2, 0]))
    assert lists(pickle.loads(pickle.dumps(source))([1, 2])) == lists(source([1, 2]))


def forbid(monkeypatch, measure: str) -> None:
    def fail(*args):
        raise AssertionError("measured again")

    for name in ("__call__", "together"):
        monkeypatch.setattr(getattr(size_measures, measure), name, fail)
    monkeypatch.setattr(sample_sizes, "token_lengths", fail)


def test_tokens_are_measured_once_for_a_dataset_on_disk(tmp_path, monkeypatch):
    Dataset.from_dict({"input_ids": [[1, 100], [2]], "other": [0, 1]}).save_to_disk(tmp_path)
    first = size_source(load_from_disk(tmp_path), None, SPEC)
    forbid(monkeypatch, "TokenMeasure")
    assert lists(size_source(load_from_disk(tmp_path), None, SPEC)([1, 0])) == lists(first([1, 0]))
    other = ModelSpec(SPEC.modules, placeholders={"image": 2})
    with pytest.raises(AssertionError, match="measured again"):
        size_source(load_from_disk(tmp_path), None, other)


def test_conversations_are_measured_once_for_a_dataset_on_disk(tmp_path, monkeypatch):
    chats().save_to_disk(tmp_path)
    collator = ChatCollator(llava())
    first = size_source(load_from_disk(tmp_path), collator, CHAT_SPEC)
    collator.tokenizer(["a", "a longer one"], padding=True, truncation=True, max_length=2)
    forbid(monkeypatch, "ChatMeasure")
    for equal in (collator, ChatCollator(llava())):
        assert lists(size_source(load_from_disk(tmp_path), equal, CHAT_SPEC)([0, 2])) == lists(first([0, 2]))
    longer = llava()
    longer.patch_size = 2
    for other in (ChatCollator(longer), ChatCollator(llava(), max_length=50)):
        with pytest.raises(AssertionError, match="measured again"):
            size_source(load_from_disk(tmp_path), other, CHAT_SPEC)


def test_functions_are_told_apart(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path)
    found = [
        tokens(size_source(load_from_disk(tmp_path), None, SPEC, function=function), [0, 1])[LANGUAGE_MODEL]
        for function in (counts_of, lambda sample: {LANGUAGE_MODEL: 2 * sample["length"]})
    ]
    assert found == [[3, 5], [6, 10]]
