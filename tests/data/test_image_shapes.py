"""Blank images give the numbers, the tokens and the shapes that images give."""

import copy
import pickle

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import BatchFeature

from hf_mmparallel.data.image_sizes import (
    ImageShapes,
    UnknownSizeError,
    blank_array,
    decode_image,
    image_size,
    without_pixels,
)

from .conversations import (
    assert_same_batch,
    conversation,
    image_file,
    random_image,
    turned_at_the_end,
    without_decoding,
)
from .processors import PROCESSORS

SIDES = st.integers(8, 100)


@settings(max_examples=15)
@given(sizes=st.lists(st.tuples(SIDES, SIDES).filter(lambda size: max(size) < 8 * min(size)), max_size=3))
def test_batches_are_equal_but_for_pixels(family, sizes):
    collator = family[1]
    lean = collator.without_media()
    sample = conversation(sizes)
    full, found = collator([sample]), lean([sample])
    pixels = {name for name, value in full.items() if value.is_floating_point()}
    assert bool(pixels) == bool(sizes)
    assert_same_batch(found, full, *pixels)
    for run in lean.processor.image_processor._known.values():
        assert run.options, "the processor runs in full on blank images"


def test_pixels_take_no_memory_and_keep_their_shape():
    processor = PROCESSORS["llava_next"]()
    shapes = ImageShapes(processor.image_processor)
    sizes = [(30, 40), (20, 60)]
    expected = processor.image_processor([random_image(size) for size in sizes], return_tensors="pt")
    found, again = (shapes([blank_array(size) for size in sizes], return_tensors="pt") for _ in range(2))
    assert found["pixel_values"].shape == expected["pixel_values"].shape
    assert found["pixel_values"].untyped_storage().nbytes() <= 4
    assert torch.equal(found["image_sizes"], expected["image_sizes"])
    found.pop("image_sizes")
    assert "image_sizes" in again and shapes.size == processor.image_processor.size


class Counting:
    """An image processor that counts its calls, and whose numbers depend on `do_normalize` if it is told so."""

    def __init__(self, depends: bool = False, mask: int = 1):
        self.calls, self.depends, self.mask = [], depends, mask

    def __call__(self, images, do_normalize=True, **options):
        self.calls.append(do_normalize)
        dtype = np.float32 if do_normalize else np.uint8
        pixels = [np.asarray(image).astype(dtype) for image in images]
        rows = [[image.shape[-2] // 4 + (self.depends and do_normalize)] for image in images]
        masks = [np.ones(self.mask, dtype=np.int64) for _ in images]
        return BatchFeature({"pixel_values": pixels, "rows": rows, "mask": masks})


def test_sizes_are_run_once_and_cheaply():
    processor = Counting()
    shapes = ImageShapes(processor)
    for _ in range(3):
        assert shapes([blank_array((8, 12))])["rows"] == [[2]]
    assert shapes([blank_array((16, 12)), blank_array((8, 12))])["rows"] == [[4], [2]]
    assert processor.calls == [True, False, False, False]  # full, meta (which fails), grey; then grey
    large = Counting(mask=1 << 16)
    shapes = ImageShapes(large)
    for _ in range(3):
        shapes([blank_array((8, 12))])
    assert len(large.calls) == 5, "masks of pixels are kept"


def test_a_processor_whose_numbers_change_runs_in_full():
    shapes = ImageShapes(Counting(depends=True))
    for height in (8, 16):
        found = shapes([blank_array((height, 12))])
        assert found["rows"] == [[height // 4 + 1]] and found["pixel_values"][0].shape == (3, height, 12)


def test_processors_without_pixels_can_be_copied():
    processor = PROCESSORS["llava"]()
    lean = without_pixels(processor)
    assert processor.image_processor is not lean.image_processor and lean.tokenizer is processor.tokenizer
    for other in (copy.deepcopy(lean), pickle.loads(pickle.dumps(lean.image_processor))):
        assert other is not lean
    assert without_pixels(lean.tokenizer) is lean.tokenizer


@pytest.mark.parametrize("orientation", [None, 1, 3, 6, 8])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_headers_say_what_decoding_gives(kind, orientation, loads, tmp_path):
    value = without_decoding(image_file((5, 9), kind, orientation))
    path = tmp_path / "image"
    path.write_bytes(value["bytes"])
    found = image_size(value), image_size({"bytes": None, "path": str(path)}), image_size(str(path))
    assert not loads
    expected = datasets.Image().decode_example(value)
    assert found == ((expected.height, expected.width),) * 3
    assert np.array_equal(np.asarray(decode_image(value)), np.asarray(expected))


def test_an_orientation_after_the_pixels(loads):
    turned = turned_at_the_end((5, 9), 6)
    assert image_size(without_decoding(image_file((5, 9)))) == (5, 9) and not loads
    assert image_size(without_decoding(turned)) == (9, 5) and loads == ["PNG"]
    assert decode_image(without_decoding(turned)).size == (5, 9)


def test_images_that_are_no_files(loads, tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(image_file((5, 9)))
    image, arrays = random_image((5, 9)), (np.zeros((5, 9)), np.zeros((5, 9, 3)), torch.zeros(3, 5, 9))
    for value in (image, Image.open(path), *arrays, {"height": 5, "width": 9}):
        assert image_size(value) == (5, 9)
    assert not loads
    assert decode_image(image) is image and decode_image("image.png") == "image.png"


REMOTE = "https://example.org/image.png"
UNKNOWN = (REMOTE, {"path": REMOTE}, "iVBORw0KGgo", "data:image/png;base64,a.b", None, {})


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        *((value, UnknownSizeError, "can't be read without") for value in UNKNOWN),
        ("no/image.png", FileNotFoundError, "no/image.png"),
        ({"path": "no/image.png"}, FileNotFoundError, "no/image.png"),
        (np.zeros(3), ValueError, "is no image"),
    ],
)
def test_sizes_that_take_more_than_a_header_and_what_is_no_image(value, error, words):
    with pytest.raises(error, match=words):
        image_size(value)


def test_an_image_elsewhere_is_fetched_as_datasets_does_it(monkeypatch):
    monkeypatch.setattr(datasets.Image, "decode_example", lambda self, value: value)
    assert decode_image({"path": REMOTE}) == {"path": REMOTE, "bytes": None}
