"""Sizes are those of the decoded images, and nothing is decoded for them."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from hf_mmparallel.data.image_sizes import UnknownSizeError, decoded_image, image_size

from .conversations import image_file, random_image, turned_at_the_end, undecoded


@pytest.fixture
def loads(monkeypatch):
    """The kinds of the files whose pixels are read."""
    kinds, load = [], ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: kinds.append(self.format) or load(self))
    return kinds


@pytest.mark.parametrize("orientation", [None, 1, 3, 6, 8])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_headers_say_what_decoding_gives(kind, orientation, loads, tmp_path):
    value = undecoded(image_file((5, 9), kind, orientation))
    path = tmp_path / "image"
    path.write_bytes(value["bytes"])
    found = image_size(value), image_size({"bytes": None, "path": str(path)}), image_size(str(path))
    assert not loads
    expected = datasets.Image().decode_example(value)
    assert found == ((expected.height, expected.width),) * 3
    assert np.array_equal(np.asarray(decoded_image(value)), np.asarray(expected))


def test_an_orientation_after_the_pixels(loads):
    turned = turned_at_the_end((5, 9), 6)
    assert image_size(undecoded(image_file((5, 9)))) == (5, 9) and not loads
    assert image_size(undecoded(turned)) == (9, 5) and loads == ["PNG"]
    assert decoded_image(undecoded(turned)).size == (5, 9)


def test_images_that_are_no_files(loads, tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(image_file((5, 9)))
    for value in (
        random_image((5, 9)),
        Image.open(path),
        np.zeros((5, 9)),
        np.zeros((5, 9, 3)),
        torch.zeros(3, 5, 9),
        {"height": 5, "width": 9},
    ):
        assert image_size(value) == (5, 9)
    assert not loads
    image = random_image((5, 9))
    assert decoded_image(image) is image and decoded_image("image.png") == "image.png"


REMOTE = "https://example.org/image.png"


@pytest.mark.parametrize("value", [REMOTE, {"path": REMOTE}, "iVBORw0KGgo", "data:image/png;base64,a.b", None, {}])
def test_sizes_that_take_more_than_a_header_are_unknown(value):
    with pytest.raises(UnknownSizeError, match="can't be read without"):
        image_size(value)


@pytest.mark.parametrize("value", ["no/image.png", {"path": "no/image.png"}])
def test_a_file_that_is_not_there_is_an_error(value):
    with pytest.raises(FileNotFoundError, match="no/image.png"):
        image_size(value)


def test_an_array_of_another_shape_is_no_image():
    with pytest.raises(ValueError, match="is no image"):
        image_size(np.zeros(3))


def test_an_image_elsewhere_is_fetched_as_datasets_does_it(monkeypatch):
    monkeypatch.setattr(datasets.Image, "decode_example", lambda self, value: value)
    assert decoded_image({"path": REMOTE}) == {"path": REMOTE, "bytes": None}
