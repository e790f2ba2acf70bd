"""Each module's samples: what it needs, the same as of whole samples, and nothing else decoded."""

import pickle
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from PIL import ImageFile
from torch.utils.data import ConcatDataset, Subset
from transformers.trainer_utils import RemoveColumnsCollator

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.data import ChatCollator, PackingCollator, PretokenizedCollator
from hf_mmparallel.data.media import readers
from hf_mmparallel.data.step_dataset import RankInputs, Reader, StepDataset
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan
from tests import tiny
from tests.plan.specs import model_spec, vision_spec

from .conversations import broken, conversation, image_file, undecoded
from .processors import PROCESSORS

VISION = {"vision": frozenset(["pixel_values", "image_grid_thw"])}
BOTH = {**VISION, "audio": frozenset(["input_features"])}
SIZES = [[(40, 30)], [], [(25, 60), (33, 33)], [(50, 50)]]


def spec(inputs):
    """A model with these encoders."""
    base = model_spec()
    encoders = {name: replace(vision_spec(), name=name) for name in inputs}
    return replace(base, modules={**encoders, LANGUAGE_MODEL: base.language_model})


@pytest.fixture
def loads(monkeypatch):
    """The kinds of the files whose pixels are read."""
    kinds, load = [], ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: kinds.append(self.format) or load(self))
    return kinds


def chats(spoil: int | None = None) -> list[dict]:
    """Conversations with images as they are stored."""
    rows = [conversation(sizes) for sizes in SIZES]
    files = [[image_file(size) for size in sizes] for sizes in SIZES]
    if spoil is not None:
        files[spoil] = [broken(file) for file in files[spoil]]
    return [{**row, "images": [undecoded(f) for f in own]} for row, own in zip(rows, files, strict=True)]


def chat_dataset(spoil: int | None = None) -> datasets.Dataset:
    dataset = datasets.Dataset.from_list(chats(spoil))
    return dataset.cast(datasets.Features({**dataset.features, "images": datasets.List(datasets.Image())}))


def batch(reader, indices=range(4)):
    return reader.collator([reader.dataset[index] for index in indices])


def assert_lacks_only(found, whole, *names):
    """Whether a batch is another one without some entries."""
    assert found.keys() == whole.keys() - set(names)
    assert all(torch.equal(found[name], whole[name]) for name in found)


@pytest.fixture(scope="module")
def chat() -> ChatCollator:
    return ChatCollator(PROCESSORS["qwen2_vl"]())


def test_the_language_model_decodes_no_image(chat, loads):
    dataset = chat_dataset()
    whole = chat([dataset[index] for index in range(4)])
    made = readers(dataset, chat, spec(VISION), VISION)
    assert made["vision"].dataset is dataset and made["vision"].collator is chat
    loads.clear()
    found = batch(made[LANGUAGE_MODEL])
    assert not loads
    assert_lacks_only(found, whole, "pixel_values")
    assert "image_grid_thw" in found
    assert_lacks_only(batch(made["vision"]), whole)
    assert loads


def test_a_broken_image_concerns_its_encoder_only(chat):
    made = readers(chat_dataset(spoil=2), chat, spec(VISION), VISION)
    whole = chat([chat_dataset()[index] for index in range(4)])
    assert_lacks_only(batch(made[LANGUAGE_MODEL]), whole, "pixel_values")
    assert_lacks_only(batch(made["vision"], [0, 1, 3]), chat([chat_dataset()[index] for index in (0, 1, 3)]))
    with pytest.raises((OSError, SyntaxError)):
        batch(made["vision"])


def test_images_inside_messages_and_single_images(chat, loads):
    rows = chats()
    for row in rows:
        images = iter(row.pop("images"))
        for message in row["messages"]:
            for part in message["content"]:
                part.setdefault("text", None)
                part["image"] = next(images) if part["type"] == "image" else None
    inside = datasets.Dataset.from_list(rows)
    part = {"type": datasets.Value("string"), "text": datasets.Value("string"), "image": datasets.Image()}
    messages = datasets.List({"role": datasets.Value("string"), "content": datasets.List(part)})
    inside = inside.cast(datasets.Features({"messages": messages}))
    one = [{**row, "images": row["images"][0]} for row in chats() if len(row["images"]) == 1]
    single = datasets.Dataset.from_list(one).cast_column("images", datasets.Image())
    for dataset in (inside, single):
        made = readers(dataset, chat, spec(VISION), VISION)
        loads.clear()
        found = batch(made[LANGUAGE_MODEL], range(len(dataset)))
        assert not loads
        assert_lacks_only(found, batch(made["vision"], range(len(dataset))), "pixel_values")
        assert loads


def test_parts_and_formats_of_a_dataset(chat, loads):
    dataset = chat_dataset()
    whole = chat([dataset[index] for index in (3, 0)])
    views = {
        "selected": (dataset.select([3, 0]), [0, 1]),
        "subset": (Subset(dataset, [3, 0]), [0, 1]),
        "concatenated": (ConcatDataset([dataset, dataset.select([0])]), [3, 4]),
        "formatted": (dataset.with_format(columns=["messages", "images"]), [3, 0]),
    }
    for name, (view, places) in views.items():
        reader = readers(view, chat, spec(VISION), VISION)[LANGUAGE_MODEL]
        loads.clear()
        assert_lacks_only(batch(reader, places), whole, "pixel_values")
        assert not loads, name
        assert len(reader.dataset) == len(view)
    lean = readers(dataset, chat, spec(VISION), VISION)[LANGUAGE_MODEL].dataset
    assert pickle.loads(pickle.dumps(lean))[0] == lean[0]
    assert lean._fingerprint != dataset._fingerprint  # or a `map` of one would be taken for the other's


def test_a_transform_gets_every_column_decoded(chat, loads):
    dataset = chat_dataset().with_transform(lambda rows: {**rows, "images": [list(own) for own in rows["images"]]})
    made = readers(dataset, chat, spec(VISION), VISION)
    assert made[LANGUAGE_MODEL].dataset is dataset
    assert_lacks_only(batch(made[LANGUAGE_MODEL]), batch(made["vision"]), "pixel_values")


def test_an_encoder_decodes_only_its_own(chat, monkeypatch):
    heard = []
    monkeypatch.setattr(datasets.Audio, "decode_example", lambda self, value, **_: heard.append(value) or "sound")
    rows = [{**row, "sound": undecoded(b"RIFF")} for row in chats()]
    dataset = datasets.Dataset.from_list(rows)
    features = {**dataset.features, "images": datasets.List(datasets.Image()), "sound": datasets.Audio()}
    dataset = dataset.cast(datasets.Features(features))
    assert dataset[0]["sound"] == "sound" and heard
    heard.clear()
    made = readers(dataset, chat, spec(BOTH), BOTH)
    assert_lacks_only(batch(made["audio"]), batch(made["vision"]), "pixel_values")
    assert_lacks_only(batch(made[LANGUAGE_MODEL]), batch(made["audio"]))
    assert not heard


def test_packed_conversations(loads):
    model = tiny.FAMILIES["llava"]()
    model.set_attn_implementation({"text_config": "bitfield"})
    collator = PackingCollator(ChatCollator(PROCESSORS["llava"]()), model)
    made = readers(chat_dataset(), collator, spec(VISION), VISION)
    loads.clear()
    found = batch(made[LANGUAGE_MODEL])
    assert not loads
    assert_lacks_only(found, batch(made["vision"]), "pixel_values")
    plain = PackingCollator(lambda samples: {}, model)
    assert plain.without_media() is plain


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
        present = set(source.column_names)
        assert set(made[LANGUAGE_MODEL].dataset.column_names) == present - {"pixel_values", "input_features"}
        assert set(made["vision"].dataset.column_names) == present - {"input_features"}
        assert set(made["audio"].dataset.column_names) == present - {"pixel_values"}
        rows = range(len(source))
        whole = PretokenizedCollator()([source[index] for index in rows])
        assert_lacks_only(batch(made[LANGUAGE_MODEL], rows), whole, "pixel_values", "input_features")
        assert_lacks_only(batch(made["vision"], rows), whole, "input_features")
        assert_lacks_only(batch(made["audio"], rows), whole, "pixel_values")


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
        return {
            name: value for name, value in tokens()[index].items() if name not in ("pixel_values", "input_features")
        }


def test_a_dataset_may_leave_out_media_itself():
    for collator in (PretokenizedCollator(), RemoveColumnsCollator(PretokenizedCollator(), list(tokens()[0]))):
        dataset = Samples()
        made = readers(dataset, collator, spec(BOTH), BOTH)
        found = batch(made[LANGUAGE_MODEL], range(3))
        assert dataset.whole == 0
        whole = collator([dataset[index] for index in range(3)])
        assert_lacks_only(found, whole, "pixel_values", "input_features")
        assert_lacks_only(batch(made["vision"], range(3)), whole, "input_features")
        assert len(made[LANGUAGE_MODEL].dataset) == 3


def test_unknown_collators_get_whole_samples():
    dataset = tokens()
    made = readers(dataset, torch.utils.data.default_collate, spec(BOTH), BOTH)
    assert all(reader.dataset is dataset for reader in made.values())
    assert {reader.collator for reader in made.values()} == {torch.utils.data.default_collate}
    for source in (chat_dataset(), datasets.Dataset.from_list(tokens())):
        made = readers(source, list, spec(BOTH), BOTH)
        assert all(reader.dataset is source for reader in made.values())


def test_modules_that_read_the_same_have_the_same_reader(chat):
    dataset = chat_dataset()
    for inputs in ({}, {**VISION, "other": VISION["vision"]}):
        made = readers(dataset, chat, spec(inputs), inputs)
        assert len({id(made[name]) for name in made if name != LANGUAGE_MODEL}) <= 1
        assert len({id(reader) for reader in made.values()}) == 1 + bool(inputs)
    assert readers(dataset, chat, spec({}), {})[LANGUAGE_MODEL].dataset is dataset


def test_a_step_has_the_same_inputs_as_from_whole_samples(chat):
    dataset = chat_dataset()
    model = spec(VISION)
    plan = resolve_plan(model, {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin()})
    step = contiguous_step(plan, [2, 0, 3, 1], 2)
    unused = {LANGUAGE_MODEL: frozenset(["pixel_values"])}
    for rank in range(plan.world_size):
        inputs = RankInputs(plan, rank, unused)
        whole = StepDataset(Reader(dataset, chat), inputs, 0).read(step)
        found = StepDataset(readers(dataset, chat, model, VISION), inputs, 0).read(step)
        assert found.batches.keys() == whole.batches.keys() != set()
        for key, expected in whole.batches.items():
            assert_lacks_only(found.batches[key], expected)
