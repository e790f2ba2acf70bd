"""Sizes are those of the decoded images, and nothing is decoded for them."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from hf_mmparallel.data.image_sizes import UnknownSizeError, decode_image, image_size

from .conversations import image_file, random_image, turned_at_the_end, without_decoding


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
