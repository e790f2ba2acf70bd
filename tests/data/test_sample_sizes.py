"""Sizes of samples from each source, without decoding, equal for every form of a dataset, cached and picklable."""

import functools
import io
import itertools
import json
import pickle
import random
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, load_dataset, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from torch.utils.data import ConcatDataset, Subset

from hf_mmparallel.data import ChatCollator, PretokenizedCollator, sample_sizes, size_measures
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.data.size_measures import Ragged, TokenMeasure
from hf_mmparallel.data.size_sources import LayerTokens
from hf_mmparallel.data.streams import StreamWindow
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.features import count_feature_tokens
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, SampleSizes
from tests.data.conversations import broken, image_file, inside, random_image, say, stored, without_decoding
from tests.data.processors import llava
from tests.plan.specs import model_spec
from tests.streams import Opaque
from tests.tiny import FAMILIES, collate, make_dataset

SPEC = ModelSpec(model_spec().modules, placeholders={"image": 100})
IMAGE_ID = llava().tokenizer.convert_tokens_to_ids("<image>")
CHAT_SPEC = ModelSpec(model_spec().modules, placeholders={"image": IMAGE_ID})
MEDIA = ("pixel_values", "input_features")


def lists(sizes: SampleSizes) -> tuple[dict, dict]:
    """Tokens and squares as lists."""
    tokens, squares = ({name: own.tolist() for name, own in of.items()} for of in (sizes.tokens, sizes.squares))
    return tokens, squares


def tokens(source, indices) -> dict[str, list[int]]:
    return lists(source(indices))[0]


class Plain(Opaque):
    """One that draws when it is read."""

    def __getitem__(self, index: int) -> dict:
        random.random(), np.random.rand(), torch.rand(())
        return super().__getitem__(index)


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


@pytest.mark.parametrize("make", [list, Dataset.from_list])
def test_columns_hold_numbers_or_a_number_for_each_image(make):
    columns = {LANGUAGE_MODEL: "length", "vision": "patches"}
    source = size_source(make(ROWS), None, SPEC, columns=columns)
    assert lists(source([2, 0, 1, 0])) == (
        {"vision": [7, 6, 0, 6], LANGUAGE_MODEL: [1, 3, 5, 3]},
        {"vision": [49.0, 20.0, 0.0, 20.0], LANGUAGE_MODEL: [1.0, 9.0, 25.0, 9.0]},
    )
    assert source([0]).known
    alike = size_source(make(ROWS), None, SPEC, columns="length")
    assert tokens(alike, [0, 1]) == {"vision": [1, 1], LANGUAGE_MODEL: [3, 5]}


REFUSED: list[tuple[list[dict], dict[str, Any], str]] = [
    (ROWS, {"columns": "size"}, r"no column `size`.*`language_model`; it has \['length', 'patches', 'text'\]"),
    (ROWS, {"columns": {LANGUAGE_MODEL: "length", "vison": "patches"}}, "Did you mean `vision`"),
    (ROWS, {"columns": {"vision": "patches"}}, "lengths of `language_model`"),
    (ROWS, {"columns": "text"}, "`text`"),
    (ROWS, {"columns": "length", "function": counts_of}, "twice"),
    (ROWS, {"function": lambda sample: 3}, "gave 3 for the sizes"),
    (ROWS, {"function": lambda sample: {"vision": 3}}, "tokens of each module"),
    (ROWS, {"function": lambda sample: {LANGUAGE_MODEL: 1, "visoin": 3}}, "Did you mean `vision`"),
    (ROWS, {"function": lambda sample: {LANGUAGE_MODEL: -1}}, "length -1"),
    (ROWS, {"function": lambda sample: {LANGUAGE_MODEL: "long"}}, "length 'long'"),
    *(
        ([{"n": value} for value in values], {"columns": "n"}, "`n`")  # no lengths
        for values in ([-1, 2], [1.5, 2.0], [[[1, 2]], [[3]]], [[1, None], [2]])
    ),
]


@pytest.mark.parametrize("make", [list, Dataset.from_list])
@pytest.mark.parametrize(("rows", "settings", "words"), REFUSED)
def test_wrong_settings_and_numbers_that_are_no_lengths(make, rows, settings, words):
    with pytest.raises(ValueError, match=words):
        size_source(make(rows), None, SPEC, **settings)(range(len(rows)))


@pytest.mark.parametrize("make", [list, Dataset.from_list, Plain], ids=["list", "datasets", "torch"])
def test_a_function_of_a_sample(make):
    source = size_source(make(ROWS), None, SPEC, function=counts_of)
    assert lists(source([1, 2, 0])) == (
        {"vision": [0, 7, 6], LANGUAGE_MODEL: [5, 1, 3]},
        {"vision": [0.0, 49.0, 20.0], LANGUAGE_MODEL: [25.0, 1.0, 9.0]},
    )
    text = size_source(make(ROWS), None, SPEC, function=lambda sample: {LANGUAGE_MODEL: 2})
    assert tokens(text, [0, 1]) == {"vision": [0, 0], LANGUAGE_MODEL: [2, 2]}


def test_a_torch_dataset_is_read_once_and_draws_nothing_from_the_training():
    data = Plain(ROWS)
    source = size_source(data, None, SPEC, function=counts_of)
    assert data.reads == []
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for _ in range(2):
        source([2, 0, 2])
    assert data.reads == [0, 2]
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


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
    rows = count_feature_tokens(batch, spec.placeholders)
    listed = size_source(samples, collate(family), spec)(range(7))
    assert listed.tokens[LANGUAGE_MODEL].tolist() == batch["attention_mask"].sum(-1).tolist()
    for name in spec.encoders:
        modalities = {feature.modality for feature in spec.modules[name].features}
        assert listed.tokens[name].tolist() == np.sum([rows[m] for m in modalities], axis=0).tolist()
    assert lists(size_source(without_media(samples), None, spec)(range(7))) == lists(listed)


@pytest.mark.parametrize(
    ("ids", "fields", "expected"),
    [
        ([100] * 6, {"image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]])}, [4, 2]),
        ([[100] * 6], {"image_grid_thw": np.array([[3, 2, 4]])}, [2, 2, 2]),
        ([100] * 5, {"image_grid_thw": [], "images": [None], "image_flags": [1], "image_names": ["a"]}, [5]),
        ([100, 100, 5, 0, 0], {"attention_mask": torch.tensor([1, 1, 1, 0, 0])}, [2]),
    ],
)
def test_a_sample_may_have_tensors_arrays_and_what_is_no_extent(ids, fields, expected):
    num_tokens = int(sum(fields.get("attention_mask", [1] * np.size(ids))))
    assert TokenMeasure.of(SPEC)({"input_ids": ids, **fields}) == {"vision": expected, LANGUAGE_MODEL: [num_tokens]}


@given(st.lists(st.lists(st.integers(0, 50), max_size=4), min_size=1, max_size=6))
def test_sums_over_samples(rows):
    found, squares = LayerTokens(4.0, 2.0).sums(Ragged.of(rows))
    assert found.tolist() == [sum(4 * n + 2 for n in row) for row in rows]
    assert squares.tolist() == [sum((4 * n + 2) ** 2 for n in row) for row in rows]
    _, fixed = LayerTokens(4.0, sequence=8).sums(Ragged.of(rows))
    assert fixed.tolist() == [sum(4 * n for n in row) * 8 for row in rows]


def chat(*images: dict) -> dict:
    messages = [say("user", *[None] * len(images), "which digit"), say("assistant", "three")]
    return {"messages": messages, "images": list(images)}


def png(*size: int) -> dict:
    """An undecoded image with a header and no pixels behind it."""
    return without_decoding(broken(image_file(size)))


CHATS = [chat(png(8, 8)), chat(), chat(png(20, 9), png(8, 8))]
UNREADABLE = chat(without_decoding(b"no image"))
ELSEWHERE = chat({"bytes": None, "path": "http://localhost:1/a.png"})
MISPLACED = {**chat(png(8, 8)), "images": []}


def chat_sizes(data: Any, collator: Any = None) -> Any:
    return size_source(data, collator or ChatCollator(llava()), CHAT_SPEC)


@pytest.mark.parametrize("make", [list, stored, inside])
def test_conversations_are_measured_without_decoding(make):
    sizes = [[(8, 8)], [], [(20, 9), (8, 8)]]
    decoded = [{**chat, "images": [*map(random_image, own)]} for chat, own in zip(CHATS, sizes, strict=True)]
    batch = ChatCollator(llava())(decoded)
    found = tokens(chat_sizes(make(CHATS)), [0, 1, 2])
    assert found["vision"] == (batch["input_ids"] == IMAGE_ID).sum(-1).tolist() == [5, 0, 10]
    assert found[LANGUAGE_MODEL] == batch["attention_mask"].sum(-1).tolist()


def test_a_function_sees_images_as_they_are_stored():
    def areas(sample: dict) -> dict:
        sizes = [PILImage.open(io.BytesIO(image["bytes"])).size for image in sample["images"]]
        return {LANGUAGE_MODEL: 1, "vision": [width * height for width, height in sizes]}

    assert tokens(size_source(stored(CHATS), None, SPEC, function=areas), [0, 1, 2])["vision"] == [64, 0, 244]


def test_parts_with_unlike_keys_of_a_json_file_are_measured(tmp_path, monkeypatch, caplog):
    """`datasets` stores such parts as strings of JSON."""
    (tmp_path / "a.png").write_bytes(image_file((8, 8)))
    parts = [{"type": "image", "image": str(tmp_path / "a.png")}, {"type": "text", "text": "which digit"}]
    row = {"messages": [{"role": "user", "content": parts}, say("assistant", "three")]}
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for _ in range(3)))
    load = functools.partial(
        load_dataset, "json", data_files=str(tmp_path / "train.jsonl"), split="train", cache_dir=str(tmp_path)
    )
    expected = tokens(chat_sizes([row] * 3), [0, 1, 2])
    assert expected["vision"] == [5] * 3
    window = StreamWindow(load(streaming=True), 0)
    window.fetch(GlobalBatch((0, 1, 2), 0))
    assert tokens(chat_sizes(load()), [0, 1, 2]) == tokens(chat_sizes(window), [0, 1, 2]) == expected
    monkeypatch.setattr(sample_sizes, "PARALLEL_FROM", 2)
    assert tokens(chat_sizes(load()), [0, 1, 2]) == expected
    assert "sizes are unknown" not in caplog.text


def test_a_wrapped_collator_and_a_default_one_are_found():
    expected = lists(chat_sizes(CHATS)([0, 1]))
    assert lists(chat_sizes(CHATS, SimpleNamespace(collator=ChatCollator(llava())))([0, 1])) == expected
    assert lists(size_source(CHATS, None, CHAT_SPEC, processor=llava())([0, 1])) == expected


def test_a_file_that_can_not_be_read_is_told_of_and_the_rest_is_measured():
    source = chat_sizes([CHATS[0], UNREADABLE])
    with pytest.raises(OSError, match="cannot identify image"):
        source([0, 1])
    assert tokens(source, [0])["vision"] == [5]


def test_samples_of_which_nothing_says_the_size_count_one_token():
    found = tokens(chat_sizes([CHATS[0], ELSEWHERE, MISPLACED]), [1, 2])
    assert found == {"vision": [1, 1], LANGUAGE_MODEL: [1, 1]}


def test_rows_without_a_size_have_that_of_the_median_row(caplog):
    known = tokens(chat_sizes(stored(CHATS)), range(3))
    assert not caplog.text
    found = tokens(chat_sizes(stored([CHATS[2], MISPLACED, CHATS[0], UNREADABLE, CHATS[1], ELSEWHERE])), range(6))
    for name, values in found.items():
        assert values == [known[name][place] for place in (2, 0, 0, 0, 1, 0)]
    assert re.search(r"unknown of 3 of 6 samples, the first of which is 1: .*can't be measured", caplog.text)
    assert chat_sizes(stored([ELSEWHERE, ELSEWHERE])) is None


def test_where_nothing_can_be_written_sizes_are_kept_in_memory(tmp_path, monkeypatch):
    Dataset.from_dict({"input_ids": [[1, 100], [2]]}).save_to_disk(tmp_path)
    data = load_from_disk(tmp_path)
    files = sorted(tmp_path.iterdir())
    monkeypatch.setattr(sample_sizes.os, "access", lambda *_: False)
    assert tokens(size_source(data, None, SPEC), [0, 1])[LANGUAGE_MODEL] == [2, 1]
    assert sorted(tmp_path.iterdir()) == files


def test_parts_of_datasets():
    whole = Dataset.from_list(ROWS)
    joined = ConcatDataset([Subset(whole, [2, 1]), ROWS, Subset(Subset(ROWS, [1, 2]), [1]), whole.select([1, 0])])
    source = size_source(joined, None, SPEC, columns="length")
    assert tokens(source, [5, 3, 0, 1, 4, 2, 6])[LANGUAGE_MODEL] == [1, 5, 1, 5, 1, 3, 5]
    assert len(source) == len(joined)
    assert tokens(source, [])[LANGUAGE_MODEL] == []


ROW = {"input_ids": [1, 2]}
UNMEASURED = {
    "torch": Plain([ROW]),
    "concat": ConcatDataset([[ROW], Plain([ROW])]),
    "subset": Subset(Plain([ROW]), [0]),
    "texts": [{"text": "a"}],
    "chat": [{"messages": []}],
    "empty": [],
    "datasets": Dataset.from_dict({"text": ["a"]}),
    "transform": Dataset.from_list([ROW]).with_transform(lambda batch: batch),
    "stream": Dataset.from_list([ROW]).to_iterable_dataset(),
    "iterator": iter([1]),
    "nothing": None,
}


@pytest.mark.parametrize("kind", UNMEASURED)
def test_samples_of_which_nothing_is_known(kind):
    assert size_source(UNMEASURED[kind], PretokenizedCollator(), SPEC) is None


def test_a_format_changes_nothing_and_a_transform_leaves_columns():
    data = Dataset.from_dict({"input_ids": [[1, 100, 100]], "n": [7.0]})  # whole floats are lengths
    assert tokens(size_source(data.with_format("torch"), None, SPEC), [0])["vision"] == [2]
    transformed = data.with_transform(lambda batch: {"nothing": batch["n"]})
    assert tokens(size_source(transformed, None, SPEC, columns="n"), [0])[LANGUAGE_MODEL] == [7]


@pytest.mark.parametrize(
    "make",
    [list, stored, lambda chats: ConcatDataset([Subset(chats, [0]), chats[1:]])],
    ids=["list", "datasets", "parts"],
)
def test_sources_can_be_pickled(make):
    source = chat_sizes(make(CHATS))
    assert lists(pickle.loads(pickle.dumps(source))([2, 0])) == lists(source([2, 0]))
    assert lists(pickle.loads(pickle.dumps(source))([1, 2])) == lists(source([1, 2]))  # some are measured


def forbid(monkeypatch, measure: str) -> None:
    def fail(*args):
        raise AssertionError("measured again")

    for name in ("__call__", "together"):
        monkeypatch.setattr(getattr(size_measures, measure), name, fail)
    monkeypatch.setattr(size_measures.TokenMeasure, "of_table", fail)


def test_tokens_are_measured_once_for_a_dataset_on_disk(tmp_path, monkeypatch):
    Dataset.from_dict({"input_ids": [[1, 100], [2]], "other": [0, 1]}).save_to_disk(tmp_path)
    first = size_source(load_from_disk(tmp_path), None, SPEC)
    forbid(monkeypatch, "TokenMeasure")
    assert lists(size_source(load_from_disk(tmp_path), None, SPEC)([1, 0])) == lists(first([1, 0]))
    other = ModelSpec(SPEC.modules, placeholders={"image": 2})
    with pytest.raises(AssertionError, match="measured again"):
        size_source(load_from_disk(tmp_path), None, other)


def test_conversations_are_measured_once_for_a_dataset_on_disk(tmp_path, monkeypatch):
    stored(CHATS).save_to_disk(tmp_path)
    collator = ChatCollator(llava())
    first = chat_sizes(load_from_disk(tmp_path), collator)
    collator.tokenizer(["a", "a longer one"], padding=True, truncation=True, max_length=2)
    forbid(monkeypatch, "ChatMeasure")
    for equal in (collator, ChatCollator(llava())):
        assert lists(chat_sizes(load_from_disk(tmp_path), equal)([0, 2])) == lists(first([0, 2]))
    longer = llava()
    longer.patch_size = 2
    for other in (ChatCollator(longer), ChatCollator(llava(), max_length=50)):
        with pytest.raises(AssertionError, match="measured again"):
            chat_sizes(load_from_disk(tmp_path), other)


def test_functions_are_told_apart(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path)
    functions = (counts_of, lambda sample: {LANGUAGE_MODEL: 2 * sample["length"]})
    sources = [size_source(load_from_disk(tmp_path), None, SPEC, function=function) for function in functions]
    assert [tokens(source, [0, 1])[LANGUAGE_MODEL] for source in sources] == [[3, 5], [6, 10]]


IMAGE, VIDEO, SOUND = 7, 8, 9
MEASURE = TokenMeasure(
    {"vision": (("image", IMAGE), ("video", VIDEO)), "audio": (("audio", SOUND),), LANGUAGE_MODEL: ()}
)

IDS = st.lists(st.sampled_from([1, 2, IMAGE, IMAGE, VIDEO, SOUND]), max_size=16)
EXTENTS = st.none() | st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=3)


def shares(count: int, extents: Any) -> list[int] | None:
    """Rows of each item, or of each frame of a video, if `extents` share out `count` rows; plain Python."""
    extents = extents or []
    if len({len(own) for own in extents}) != 1 or len(extents[0]) not in (2, 3) or min(map(min, extents)) < 1:
        return None
    frames = [own[0] if len(own) == 3 else 1 for own in extents]
    areas = [own[-1] * own[-2] for own, count_of in zip(extents, frames, strict=True) for _ in range(count_of)]
    total = sum(areas)
    return [count * area // total for area in areas] if all(count * area % total == 0 for area in areas) else None


def lengths_of(row: dict[str, Any]) -> dict[str, list[int]]:
    """What [`TokenMeasure`] is to find in a row, in plain Python."""
    mask = row.get("attention_mask", [1] * len(row["input_ids"]))
    ids = [token for token, kept in zip(row["input_ids"], mask, strict=True) if kept]
    result: dict[str, list[int]] = {LANGUAGE_MODEL: [len(ids)]}
    for module, modality, token in (("vision", "image", IMAGE), ("vision", "video", VIDEO), ("audio", "audio", SOUND)):
        runs = [len(list(run)) for kind, run in itertools.groupby(ids) if kind == token]
        columns = [row[name] for name in row if name.startswith(f"{modality}_") and name != "image_words"]
        found = [own for own in (shares(sum(runs), column) for column in columns) if own is not None]
        result[module] = result.get(module, []) + ((found[0] if found else runs) if runs else [])
    return result


def one_by_one(table: pa.Table) -> dict[str, list[list[int]]]:
    rows = table.to_pylist()
    found = [lengths_of(row) for row in rows]
    assert [MEASURE(row) for row in rows] == MEASURE.count(rows) == found
    return {name: [lengths[name] for lengths in found] for name in MEASURE.placeholders}


def together(table: pa.Table) -> dict[str, list[list[int]]] | None:
    found = MEASURE.of_table(table)
    return found and {name: lengths.lists() for name, lengths in found.items()}


@settings(max_examples=300)
@given(st.lists(st.tuples(IDS, EXTENTS, EXTENTS, st.integers(0, 2**16)), min_size=1, max_size=6), st.booleans())
def test_lengths_of_a_table_and_of_its_rows(rows, masked):
    columns: dict[str, Any] = {
        "input_ids": pa.array([ids for ids, *_ in rows], pa.list_(pa.int32())),
        "image_sizes_hw": pa.array([first for _, first, _, _ in rows], pa.list_(pa.list_(pa.int64()))),
        "image_grid_thw": pa.array([second for _, _, second, _ in rows], pa.list_(pa.list_(pa.int64()))),
        "image_words": pa.array(["no extents"] * len(rows)),
    }
    if masked:
        masks = [[bits >> place & 1 for place in range(len(ids))] for ids, _, _, bits in rows]
        columns["attention_mask"] = pa.array(masks, pa.list_(pa.int8()))
    table = pa.table(columns)
    assert together(table) == one_by_one(table)
    assert together(table.slice(1)) == one_by_one(table.slice(1)) or table.num_rows == 1


def test_lists_of_a_fixed_size_and_what_is_left_to_the_rows():
    ids = pa.FixedSizeListArray.from_arrays(pa.array([1, IMAGE, IMAGE, 1, 1, SOUND]), 3)
    wanted = {"vision": [[2], []], "audio": [[], [1]], LANGUAGE_MODEL: [[3], [3]]}
    assert together(pa.table({"input_ids": ids})) == wanted
    for others in ([[[1, IMAGE]]], ["a string"], [None, [1]], [[1, None]]):
        assert together(pa.table({"input_ids": pa.array(others)})) is None
