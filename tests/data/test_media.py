"""Each module's samples: what it needs, the same as of whole samples, and nothing else decoded."""

import pickle
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from transformers.trainer_utils import RemoveColumnsCollator

from hf_mmparallel.data import ChatCollator, PackingCollator, PretokenizedCollator
from hf_mmparallel.data.media import readers
from hf_mmparallel.plan import LANGUAGE_MODEL
from tests import tiny
from tests.plan.specs import model_spec, vision_spec

from .conversations import assert_same_batch, conversation, image_file, inside, stored, without_decoding
from .processors import PROCESSORS

VISION = {"vision": frozenset(["pixel_values", "image_grid_thw"])}
MEDIA = ("pixel_values", "input_features")
BOTH = {**VISION, "audio": frozenset(["input_features"])}
SIZES = [[(40, 30)], [], [(25, 60), (33, 33)], [(50, 50)]]


def spec(inputs):
    """A model with these encoders."""
    base = model_spec()
    encoders = {name: replace(vision_spec(), name=name) for name in inputs}
    return replace(base, modules={**encoders, LANGUAGE_MODEL: base.language_model})


def chats() -> list[dict]:
    """Conversations with images as they are stored."""
    return [
        {**conversation(sizes), "images": [without_decoding(image_file(size)) for size in sizes]} for sizes in SIZES
    ]


def single(rows: list[dict]) -> datasets.Dataset:
    """The conversations about one image each."""
    rows = [{**row, "images": row["images"][0]} for row in rows if len(row["images"]) == 1]
    return datasets.Dataset.from_list(rows).cast_column("images", datasets.Image())


def batch(reader, indices=range(4)):
    return reader.collator([reader.dataset[index] for index in indices])


@pytest.fixture(scope="module")
def chat() -> ChatCollator:
    return ChatCollator(PROCESSORS["qwen2_vl"]())


@pytest.fixture(params=[False, True], ids=["padded", "packed"])
def collator(request, chat):
    if not request.param:
        return chat
    model = tiny.attending(tiny.FAMILIES["llava"]())
    plain = PackingCollator(lambda samples: {}, model)
    assert plain.without_media() is plain  # a function that leaves nothing out
    return PackingCollator(ChatCollator(PROCESSORS["llava"]()), model)


@pytest.mark.parametrize("make", [stored, inside, single], ids=["column", "inside", "single"])
def test_the_language_model_decodes_no_image(collator, loads, make):
    dataset = make(chats())
    whole = collator([dataset[index] for index in range(len(dataset))])
    made = readers(dataset, collator, spec(VISION), VISION)
    assert made["vision"].dataset is dataset and made["vision"].collator is collator
    loads.clear()
    assert_same_batch(batch(made[LANGUAGE_MODEL], range(len(dataset))), whole, "pixel_values")
    assert not loads
    assert_same_batch(batch(made["vision"], range(len(dataset))), whole)
    assert loads


def test_parts_and_formats_of_a_dataset(chat, loads):
    dataset = stored(chats())
    whole = chat([dataset[index] for index in (3, 0)])
    for view, places in (
        (dataset.select([3, 0]), [0, 1]),
        (Subset(dataset, [3, 0]), [0, 1]),
        (ConcatDataset([dataset, dataset.select([0])]), [3, 4]),
        (dataset.with_format(columns=["messages", "images"]), [3, 0]),
    ):
        reader = readers(view, chat, spec(VISION), VISION)[LANGUAGE_MODEL]
        loads.clear()
        assert_same_batch(batch(reader, places), whole, "pixel_values")
        assert not loads and len(reader.dataset) == len(view)
    lean = readers(dataset, chat, spec(VISION), VISION)[LANGUAGE_MODEL].dataset
    assert pickle.loads(pickle.dumps(lean))[0] == lean[0]
    assert lean._fingerprint != dataset._fingerprint  # or a `map` of one would be taken for the other's


def test_a_transform_gets_every_column_decoded(chat, loads):
    dataset = stored(chats()).with_transform(lambda rows: {**rows, "images": [list(own) for own in rows["images"]]})
    made = readers(dataset, chat, spec(VISION), VISION)
    assert made[LANGUAGE_MODEL].dataset is dataset
    assert_same_batch(batch(made[LANGUAGE_MODEL]), batch(made["vision"]), "pixel_values")


def test_an_encoder_decodes_only_its_own(chat, monkeypatch):
    heard = []
    monkeypatch.setattr(datasets.Audio, "decode_example", lambda self, value, **_: heard.append(value) or "sound")
    dataset = stored([{**row, "sound": without_decoding(b"RIFF")} for row in chats()])
    dataset = dataset.cast_column("sound", datasets.Audio())
    assert dataset[0]["sound"] == "sound" and heard
    heard.clear()
    made = readers(dataset, chat, spec(BOTH), BOTH)
    assert_same_batch(batch(made["audio"]), batch(made["vision"]), "pixel_values")
    assert_same_batch(batch(made[LANGUAGE_MODEL]), batch(made["audio"]))
    assert not heard


def tokens() -> list[dict]:
    """Tokenised samples with media of two encoders."""
    generator = np.random.default_rng(0)
    return [
        {
            "input_ids": list(range(1, length + 1)),
            "labels": list(range(1, length + 1)),
            "pixel_values": generator.random((4 * rows, 6), dtype=np.float32).tolist(),
            "image_grid_thw": [[1, 2, 2 * rows]],
            "input_features": generator.random((rows, 8), dtype=np.float32).tolist(),
            "second_per_grid": [0.5] * rows,
        }
        for length, rows in ((5, 1), (3, 2), (4, 1))
    ]


def test_columns_that_others_read_are_not_read():
    dataset = datasets.Dataset.from_list(tokens())
    array = datasets.Array2D((1, 8), "float32")
    shaped = dataset.filter(lambda row: len(row["input_features"]) == 1).cast_column("input_features", array)
    for source in (dataset, shaped):
        made = readers(source, PretokenizedCollator(), spec(BOTH), BOTH)
        whole = PretokenizedCollator()([source[index] for index in range(len(source))])
        for module, unread in {LANGUAGE_MODEL: MEDIA, "vision": MEDIA[1:], "audio": MEDIA[:1]}.items():
            assert set(made[module].dataset.column_names) == set(source.column_names) - set(unread)
            assert_same_batch(batch(made[module], range(len(source))), whole, *unread)


class Samples(torch.utils.data.Dataset):
    """A torch dataset, with a way to leave out media."""

    def __init__(self):
        self.whole = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.whole += 1
        return tokens()[index]

    def without_media(self, index):
        return {name: value for name, value in tokens()[index].items() if name not in MEDIA}


def test_a_dataset_may_leave_out_media_itself():
    for collator in (PretokenizedCollator(), RemoveColumnsCollator(PretokenizedCollator(), list(tokens()[0]))):
        dataset = Samples()
        made = readers(dataset, collator, spec(BOTH), BOTH)
        found = batch(made[LANGUAGE_MODEL], range(3))
        assert dataset.whole == 0 and len(made[LANGUAGE_MODEL].dataset) == 3
        whole = collator([dataset[index] for index in range(3)])
        assert_same_batch(found, whole, *MEDIA)
        assert_same_batch(batch(made["vision"], range(3)), whole, "input_features")


def test_unknown_collators_get_whole_samples():
    for source in (tokens(), stored(chats()), datasets.Dataset.from_list(tokens())):
        made = readers(source, list, spec(BOTH), BOTH)
        assert all(reader.dataset is source and reader.collator is list for reader in made.values())


def test_modules_that_read_the_same_have_the_same_reader(chat):
    dataset = stored(chats())
    for inputs in ({}, {**VISION, "other": VISION["vision"]}):
        made = readers(dataset, chat, spec(inputs), inputs)
        assert len({id(made[name]) for name in made if name != LANGUAGE_MODEL}) <= 1
        assert len({id(reader) for reader in made.values()}) == 1 + bool(inputs)
    assert readers(dataset, chat, spec({}), {})[LANGUAGE_MODEL].dataset is dataset
