"""Sizes of datasets without a Trainer: files, folders, columns, tokens, conversations, and what can't be measured."""

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from huggingface_hub.errors import RepositoryNotFoundError

from hf_mmparallel.data import ChatCollator
from hf_mmparallel.data.dataset_sizes import check_hub, measure_dataset, open_dataset
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.planning.inputs import read_model

from .. import tiny
from .conversations import conversation, image_file, llava_json
from .processors import llava

NUM_SAMPLES = 50
COLUMNS = {"language_model": "length", "vision": "patches"}


@pytest.fixture(scope="module")
def model():
    return tiny.FAMILIES["llava"]()


@pytest.fixture(scope="module")
def spec(model):
    return build_model_spec(model)


@pytest.fixture(scope="module")
def columns() -> Dataset:
    """Lengths of samples with no, one or two images."""
    rng = np.random.default_rng(0)
    images = [rng.integers(1, 100, size=size).tolist() for size in rng.integers(0, 3, NUM_SAMPLES)]
    return Dataset.from_dict({"length": rng.integers(1, 500, NUM_SAMPLES).tolist(), "patches": images})


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl", "csv", "saved", "folder"])
def test_datasets_are_read_from_files_and_folders(columns, spec, model, tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    dataset = columns.select_columns(["length"]) if kind == "csv" else columns
    if kind == "saved":
        dataset.save_to_disk(str(path))
    elif kind == "folder":
        path.mkdir()
        dataset.to_parquet(str(path / "train.parquet"))
    else:
        getattr(dataset, f"to_{kind.removesuffix('l')}")(str(path))
    names = "length" if kind == "csv" else COLUMNS
    found = measure_dataset(str(path), model, spec, names)
    assert found.num_samples == NUM_SAMPLES and found.split == "train"
    expected = size_source(dataset, None, spec, names)(range(NUM_SAMPLES))  # type: ignore[misc]
    for name, tokens in expected.tokens.items():
        np.testing.assert_array_equal(found.sizes.tokens[name], tokens)
        np.testing.assert_array_equal(found.sizes.squares[name], expected.squares[name])


def test_some_samples_are_drawn_with_a_seed(columns, spec, model, tmp_path):
    columns.save_to_disk(str(tmp_path))
    draws = [measure_dataset(str(tmp_path), model, spec, COLUMNS, num_samples=10, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (draw.sizes.tokens["language_model"].tolist() for draw in draws)
    assert len(first) == 10 and first == again != other and draws[0].num_samples == NUM_SAMPLES
    assert set(first) <= set(columns["length"])


def test_tokenised_samples_are_measured_as_the_trainer_does(spec, model, tmp_path):
    """Rows of features are counted, and the encoder's layers are measured on samples whose other columns don't fit."""
    ids = [[5] * length + [tiny.MEDIA_TOKEN] * 4 for length in range(1, 9)]
    pixels = np.zeros((len(ids), 1, 3, 16, 16), np.float32).tolist()
    samples = {"input_ids": ids, "labels": ids, "pixel_values": pixels, "comment": ["text"] * len(ids)}
    Dataset.from_dict(samples).save_to_disk(str(tmp_path))
    found = measure_dataset(str(tmp_path), model, spec)
    assert found.sizes.tokens["language_model"].tolist() == list(range(5, 13))
    assert set(found.sizes.tokens["vision"].tolist()) == {5}  # four patches and the class token


def test_llava_json_is_measured_with_its_images_in_a_folder(model, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(image_file((8, 8)))
    processor = llava()
    (tmp_path / "data.json").write_text(json.dumps([{**llava_json(conversation([(8, 8)])), "image": "a.png"}] * 3))
    spec = replace(build_model_spec(model), placeholders={"image": processor.tokenizer.image_token_id})
    folder = str(tmp_path / "images")
    found = measure_dataset(str(tmp_path / "data.json"), model, spec, None, lambda: processor, image_folder=folder)
    batch = ChatCollator(processor)([conversation([(8, 8)])])
    assert found.sizes.tokens["language_model"].tolist() == [batch["input_ids"].shape[1]] * 3
    with pytest.raises(ValueError, match="`--token-columns`"):
        measure_dataset(str(tmp_path / "data.json"), model, spec, None, lambda: processor)


def test_splits(columns, tmp_path):
    two = {"train": columns, "test": columns.select(range(3))}
    for name, data in {"two": DatasetDict(two), "one": columns, "others": DatasetDict(a=columns, b=columns)}.items():
        data.save_to_disk(str(tmp_path / name))
    assert open_dataset(str(tmp_path / "two"))[1] == "train"
    dataset, name = open_dataset(str(tmp_path / "two"), "test")
    assert (len(dataset), name) == (3, "test")
    wrong = {
        ("two", "valid"): r"no split `valid`; it has \['train', 'test'\]",
        ("one", "test"): "one split, `train`, and has no `test`",
        ("others", None): "Choose one",
    }
    for (name, split), words in wrong.items():
        with pytest.raises(ValueError, match=words):
            open_dataset(str(tmp_path / name), split)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        *((f"empty.{kind}", "", "has no samples") for kind in ("jsonl", "json", "csv")),
        ("head.csv", "length\n", "has no samples"),
        ("none.parquet", None, "has no samples"),
        ("saved", None, "has no samples"),
        ("data.parquet", "no parquet", "can't be read"),
        ("data.txt", "no parquet", "ends in `.txt`.*.parquet"),
    ],
)
def test_files_without_samples_and_files_that_are_no_datasets(name, text, words, columns, tmp_path):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    elif name == "saved":
        columns.select([]).save_to_disk(str(path))
    else:
        columns.select([]).to_parquet(str(path))
    with pytest.raises(ValueError, match=rf"^Dataset `.*{name}` {words}"):
        open_dataset(str(path))


def missing():
    raise OSError("no preprocessor_config.json")


@pytest.mark.parametrize(
    ("column", "processor", "words"),
    [
        ("other", None, r"\['other'\]. It lacks `input_ids`.*`--token-columns`"),
        ("messages", missing, "no preprocessor_config"),
        ("messages", None, "none is given"),
        ("messages", object, "`object` has no"),
    ],
)
def test_missing_columns_and_processors_of_conversations_are_named(spec, model, tmp_path, column, processor, words):
    messages = [[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]] * 2
    Dataset.from_dict({column: messages}).save_to_disk(str(tmp_path))
    with pytest.raises(ValueError, match=words):
        measure_dataset(str(tmp_path), model, spec, processor=processor)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Sets what the Hub says when it is asked, with nothing in the cache."""

    def says(answer: Any) -> None:
        def ask(self: Any, name: str, timeout: float) -> None:
            raise answer

        for kind in ("model", "dataset"):
            monkeypatch.setattr(huggingface_hub.HfApi, f"{kind}_info", ask)

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    return says


def test_a_hub_that_can_not_be_reached_is_told_of_before_anything_is_read(hub, monkeypatch):
    hub(ConnectionError("no route"))
    monkeypatch.setattr("hf_mmparallel.modeling.loading.build_on_meta", lambda source: pytest.fail("read"))
    for kind in ("model", "dataset"):
        with pytest.raises(ValueError, match=rf"^It is no file .*\(no route\)\. Give one; for a {kind} "):
            check_hub(kind, "someone/something", "It", "Give one")
    with pytest.raises(ValueError, match=r"^`--model nope` .*\(no route\)"):
        read_model("nope", {}, [])
    with pytest.raises(ValueError, match=r"\(no route\)"):
        open_dataset("someone/something")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="nor in the cache"):  # tests run offline
        open_dataset("someone/something")


def test_what_is_in_the_cache_or_on_the_hub_passes_and_no_other_name(hub, monkeypatch):
    response: Any = SimpleNamespace(headers={}, status_code=404, request=None)
    hub(RepositoryNotFoundError("404\nRepository Not Found", response=response))
    with pytest.raises(ValueError, match="of this name: 404 Repository Not Found"):
        check_hub("model", "nope", "It", "Give one")
    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, timeout: asked.append(name))
    check_hub("model", "a/b", "It", "Give one")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{file}")
    check_hub("model", "a/b", "It", "Give one")
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    check_hub("dataset", "a/b", "It", "Give one")
    assert asked == ["a/b"]
