"""Sizes of images from file headers, and decoding in the way of `datasets`."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps
from torch import Tensor

PNG_TEXT = (b"iTXt", b"tEXt", b"zTXt")
PNG_ORIENTATION = (b"XML:com.adobe.xmp\0", b"Raw profile type exif\0")


class UnknownSizeError(ValueError):
    """The size of a sample can't be determined without reading it."""


def decode_image(value: Any) -> Any:
    """Decodes an image of an undecoded column as `datasets.Image` does, upright by its EXIF data; else keeps it."""
    if not _is_undecoded(value):
        return value
    if _is_elsewhere(value):
        from datasets import Image as StoredImage  # it reads from all that `datasets` knows

        return StoredImage().decode_example({"path": value["path"], "bytes": None})
    image = _opened(value)
    image.load()
    return ImageOps.exif_transpose(image) if _orientation(image) is not None else image


def image_size(
    # an image of Pillow, which may be a file that is just opened; an array; a mapping with `bytes` or a local `path`,
    # or with `height` and `width`; a local path
    value: Any,
) -> tuple[int, int]:
    """
    Height and width in pixels of the image that a processor would see, without decoding it.

    Raises `UnknownSizeError` if more than the header of a local file is needed, and `OSError` if it can't be read.
    """
    if isinstance(value, Image.Image):
        return value.height, value.width
    if isinstance(value, (np.ndarray, Tensor)):
        return _array_size(tuple(value.shape))
    if _is_undecoded(value) and not _is_elsewhere(value):
        with _opened(value) as image:
            return _upright_size(image)
    if isinstance(value, Mapping) and "height" in value and "width" in value:
        return int(value["height"]), int(value["width"])
    if isinstance(value, os.PathLike) or (isinstance(value, str) and _is_local(value)):
        with Image.open(value) as image:
            return _upright_size(image)
    raise UnknownSizeError(
        f"The size of an image of type `{type(value).__name__}` can't be read without decoding it. Give an image, its "
        "bytes, a local path, or `height` and `width`."
    )


def _is_undecoded(value: Any) -> bool:
    """Whether a value is an image as an undecoded column of `datasets` has it."""
    return isinstance(value, Mapping) and (value.get("bytes") is not None or value.get("path") is not None)


def _is_elsewhere(value: Mapping[str, Any]) -> bool:
    """Whether an undecoded image has to be fetched."""
    return value.get("bytes") is None and "://" in str(value["path"])


def _is_local(path: str) -> bool:
    """Whether a string is the path of a file, not a URL or an image in base64, which has no dots."""
    return os.path.isfile(path) or ("." in path and "://" not in path and not path.startswith("data:"))


def _opened(value: Mapping[str, Any]) -> ImageFile.ImageFile:
    """An image file with its header read."""
    data = value.get("bytes")
    return Image.open(value["path"] if data is None else io.BytesIO(data))


def _array_size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Height and width of an array `(height, width)`, or with channels before or after them."""
    if len(shape) == 2:
        return shape[0], shape[1]
    if len(shape) != 3:
        raise ValueError(f"An array of shape {shape} is no image. Give height, width and channels.")
    return (shape[1], shape[2]) if shape[0] in (1, 3) else (shape[0], shape[1])  # as transformers tells them apart


def _orientation(image: Image.Image) -> int | None:
    """The EXIF orientation that the header gives."""
    # A PNG's own `getexif` decodes the image, to see what comes after its pixels.
    return Image.Image.getexif(image).get(ExifTags.Base.Orientation)


def _upright_size(image: ImageFile.ImageFile) -> tuple[int, int]:
    """Height and width after the rotation that EXIF data ask for."""
    if image.format == "TIFF":  # Pillow turns these by itself
        return image.height, image.width
    if image.format == "PNG" and _orientation_may_follow(image.fp):
        image.load()
    turned = (_orientation(image) or 1) >= 5
    return (image.width, image.height) if turned else (image.height, image.width)


def _orientation_may_follow(file: Any) -> bool:
    """Whether a PNG has chunks after its pixels that can turn it."""
    offset = file.tell()
    file.seek(8)
    after_pixels = found = False
    while not found and len(head := file.read(8)) == 8:
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        start = file.read(min(length, 32)) if after_pixels and kind in PNG_TEXT else b""
        found = after_pixels and (kind == b"eXIf" or start.startswith(PNG_ORIENTATION))
        after_pixels |= kind == b"IDAT"
        file.seek(length - len(start) + 4, io.SEEK_CUR)
    file.seek(offset)
    return found
