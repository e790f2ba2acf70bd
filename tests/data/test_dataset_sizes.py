"""Sizes of datasets without a Trainer: files, folders, columns, tokens, conversations, and what can't be measured."""

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from hf_mmparallel.data.dataset_sizes import measure_dataset, open_dataset
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.modeling import build_model_spec

from .. import tiny

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
    expected = size_source(dataset, None, spec, names)
    assert expected is not None
    for name, tokens in expected(range(NUM_SAMPLES)).tokens.items():
        np.testing.assert_array_equal(found.sizes.tokens[name], tokens)
        np.testing.assert_array_equal(found.sizes.squares[name], expected(range(NUM_SAMPLES)).squares[name])


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


def test_splits(columns, tmp_path):
    DatasetDict({"train": columns, "test": columns.select(range(3))}).save_to_disk(str(tmp_path / "two"))
    assert open_dataset(str(tmp_path / "two"))[1] == "train"
    dataset, name = open_dataset(str(tmp_path / "two"), "test")
    assert (len(dataset), name) == (3, "test")
    with pytest.raises(ValueError, match=r"no split `valid`; it has \['train', 'test'\]"):
        open_dataset(str(tmp_path / "two"), "valid")
    columns.save_to_disk(str(tmp_path / "one"))
    with pytest.raises(ValueError, match="is one split, `train`, and has no `test`"):
        open_dataset(str(tmp_path / "one"), "test")
    DatasetDict({"a": columns, "b": columns}).save_to_disk(str(tmp_path / "others"))
    with pytest.raises(ValueError, match="Choose one of them"):
        open_dataset(str(tmp_path / "others"))


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.json", "empty.csv", "head.csv", "none.parquet", "saved"])
def test_a_dataset_without_samples_is_a_sentence(name, columns, tmp_path):
    path = tmp_path / name
    if name == "saved":
        columns.select([]).save_to_disk(str(path))
    elif name == "none.parquet":
        columns.select([]).to_parquet(str(path))
    else:
        path.write_text("length\n" if name == "head.csv" else "")
    with pytest.raises(ValueError, match=rf"^Dataset `.*{name}` has no samples. Give one with samples, or leave it"):
        open_dataset(str(path))


def test_missing_columns_are_named(columns, spec, model, tmp_path):
    columns.save_to_disk(str(tmp_path / "columns"))
    source = str(tmp_path / "columns")
    with pytest.raises(ValueError, match=r"columns \['length', 'patches'\]. It lacks `input_ids`.*`token_columns`"):
        measure_dataset(source, model, spec)
    with pytest.raises(ValueError, match=r"no column `len` with the lengths of `language_model`; it has \['length'"):
        measure_dataset(source, model, spec, "len")
    with pytest.raises(ValueError, match="The model has no `audio`"):
        measure_dataset(source, model, spec, {"audio": "length"})
    columns.select([]).to_parquet(str(tmp_path / "empty.parquet"))
    with pytest.raises(ValueError, match="has no samples"):
        measure_dataset(str(tmp_path / "empty.parquet"), model, spec, "length")


def test_conversations_need_a_processor(spec, model, tmp_path):
    messages = [[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]] * 2
    Dataset.from_dict({"messages": messages}).save_to_disk(str(tmp_path))

    def missing():
        raise OSError("no preprocessor_config.json")

    with pytest.raises(ValueError, match=r"conversations.*no preprocessor_config.json.*`processor`"):
        measure_dataset(str(tmp_path), model, spec, processor=missing)
    with pytest.raises(ValueError, match="none is given"):
        measure_dataset(str(tmp_path), model, spec)
    with pytest.raises(ValueError, match="`object` has no chat template"):
        measure_dataset(str(tmp_path), model, spec, processor=object)


def test_what_is_not_there_or_can_not_be_reached(tmp_path, monkeypatch):
    broken = tmp_path / "data.parquet"
    broken.write_text("no parquet")
    with pytest.raises(ValueError, match="can't be read"):
        open_dataset(str(broken))
    text = tmp_path / "data.txt"
    text.write_text("")
    with pytest.raises(ValueError, match=r"ends in `.txt`; files end in .parquet"):
        open_dataset(str(text))

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route")

    with pytest.raises(ValueError, match="nor in the cache"):  # tests run offline
        open_dataset("someone/something")
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    with pytest.raises(ValueError, match=r"the Hub, where it may be, can't be reached \(no route\)"):
        open_dataset("someone/something")
