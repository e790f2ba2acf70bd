"""Sizes of images from file headers, decoding in the way of `datasets`, and processors that run on sizes alone."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageFile, ImageOps
from torch import Tensor
from transformers import BatchFeature, ProcessorMixin

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
    return value.get("bytes") is None and "://" in str(value["path"])


def _is_local(path: str) -> bool:
    """Whether a string is the path of a file, not a URL or an image in base64, which has no dots."""
    return os.path.isfile(path) or ("." in path and "://" not in path and not path.startswith("data:"))


def _opened(value: Mapping[str, Any]) -> ImageFile.ImageFile:
    data = value.get("bytes")
    return Image.open(value["path"] if data is None else io.BytesIO(data))


def _array_size(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) == 2:
        return shape[0], shape[1]
    if len(shape) != 3:
        raise ValueError(f"An array of shape {shape} is no image. Give height, width and channels.")
    return (shape[1], shape[2]) if shape[0] in (1, 3) else (shape[0], shape[1])  # as transformers tells them apart


def _orientation(image: Image.Image) -> int | None:
    # A PNG's own `getexif` decodes the image, to see what comes after its pixels.
    return Image.Image.getexif(image).get(ExifTags.Base.Orientation)


def _upright_size(image: ImageFile.ImageFile) -> tuple[int, int]:
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


# Runs image processors on image sizes instead of images, for all of their outputs except pixels.

MAX_REMEMBERED = 4096  # combinations of sizes
MAX_REMEMBERED_BYTES = 1 << 14  # of the entries of one; masks of pixels are larger
# Steps of image processors that change values and never shapes.
NO_PIXEL_STEPS = {"do_convert_rgb": False, "do_rescale": False, "do_normalize": False, "resample": 0}


# kind -> blank image `(channels, height, width)` of a size `(height, width)`, the cheapest first: a shape only, one
# channel, and three, laid out as Pillow has them
BLANK: dict[str, Callable[[tuple[int, int]], Any]] = {
    "meta": lambda size: torch.empty((3, *size), dtype=torch.uint8, device="meta"),
    "grey": lambda size: np.zeros((*size, 1), dtype=np.uint8).transpose(2, 0, 1),
    "zeros": lambda size: np.zeros((*size, 3), dtype=np.uint8).transpose(2, 0, 1),
}


@dataclass(frozen=True)
class _Known:
    """What a first run has shown of an image processor."""

    kind: str  # the cheapest kind of blank images that gives the same numbers
    options: dict[str, Any]  # arguments of the image processor for them
    names: frozenset[str]  # of all entries
    pixels: frozenset[str]  # those of floating-point numbers


def blank_array(size: tuple[int, int]) -> np.ndarray:
    """Returns an image `(3, height, width)` of a size `(height, width)` that takes no memory: one zero, repeated."""
    return np.broadcast_to(np.uint8(0), (3, *size))


def without_pixels(processor: Any) -> Any:
    """Copies a processor to take [`blank_array`]s as images: same text, tokens and numbers, pixels without memory."""
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        return processor
    processor = copy.copy(processor)
    processor.image_processor = ImageShapes(processor.image_processor)
    return processor


class ImageShapes:
    """
    Stands where a processor has its image processor, and runs it once for each combination of sizes on blank images.

    What it computes besides pixels (grids, numbers of patches) depends on sizes alone, so the cheapest run with the
    same numbers as the first one, which leaves nothing out, will do. Other attributes are the image processor's.
    """

    def __init__(self, image_processor: Any):
        self._image_processor = image_processor
        self._known: dict[str, _Known] = {}
        self._remembered: dict[tuple[str, str], dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_image_processor":
            raise AttributeError(name)  # while a copy is made, nothing is there yet
        return getattr(self._image_processor, name)

    def fetch_images(self, images: Any) -> Any:
        """Images are blank already."""
        return images

    def __call__(self, images: Any, **kwargs: Any) -> BatchFeature:
        """The entries of the image processor for [`blank_array`]s, in nested lists or not."""
        sizes = _nested(images, lambda image: tuple(image.shape[-2:]))
        settings = repr(sorted(kwargs.items(), key=lambda item: item[0]))
        key = settings, repr(sizes)
        entries = self._remembered.get(key) or self._run(sizes, settings, kwargs)
        if key not in self._remembered and _num_bytes(entries) <= MAX_REMEMBERED_BYTES:
            if len(self._remembered) >= MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[key] = entries
        return BatchFeature({name: _nested(value) for name, value in entries.items()})

    preprocess = __call__

    def _run(self, sizes: Any, settings: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        known, result = self._known.get(settings), None
        if known is not None:
            # sizes of another kind, such as of several images, may need more of a blank image
            with suppress(Exception):
                result = self._blank(known.kind, sizes, {**kwargs, **known.options})
        if known is None or result is None or result.keys() != known.names:
            result, known = self._compare(sizes, kwargs)
            self._known[settings] = known
        # Pixels, the floating-point entries, come back as one zero repeated, since processors read their shapes.
        return {name: _nested(v, _without_memory) if name in known.pixels else v for name, v in result.items()}

    def _compare(self, sizes: Any, kwargs: dict[str, Any]) -> tuple[dict[str, Any], _Known]:
        """The entries of a full run on blank images, and the cheapest run with the same result."""
        full = self._blank("zeros", sizes, kwargs)
        names = frozenset(full)
        pixels = frozenset(name for name, value in full.items() if _is_floating(value))
        for kind in BLANK:
            try:
                result = self._blank(kind, sizes, {**kwargs, **NO_PIXEL_STEPS})
                if result.keys() == names and all(_equal(result[name], full[name]) for name in names - pixels):
                    return full, _Known(kind, NO_PIXEL_STEPS, names, pixels)
            except Exception:  # noqa: S112 - a processor that does not run so, for whatever reason
                continue
        return full, _Known("zeros", {}, names, pixels)

    def _blank(self, kind: str, sizes: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(self._image_processor(_nested(sizes, BLANK[kind]), **kwargs))


def _nested(value: Any, function: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """A function of what is in nested lists."""
    return [_nested(item, function) for item in value] if isinstance(value, list) else function(value)


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list) else [value]


def _num_bytes(entries: dict[str, Any]) -> int:
    """Memory of the arrays of some entries, without those that take none."""
    leaves = _leaves(list(entries.values()))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, (np.ndarray, Tensor)) and not _is_floating(leaf))


def _is_floating(value: Any) -> bool:
    """Whether an entry is made of floating-point arrays."""
    arrays = [leaf for leaf in _leaves(value) if isinstance(leaf, (np.ndarray, Tensor))]
    return any(a.is_floating_point() if isinstance(a, Tensor) else a.dtype.kind == "f" for a in arrays)


def _equal(first: Any, second: Any) -> bool:
    """Whether two entries are the same numbers in the same form."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_equal, first, second))
    return type(first) is type(second) and np.array_equal(np.asarray(first), np.asarray(second))


def _without_memory(leaf: Any) -> Any:
    """Zeros in place of an array: floating-point, so that they are told from numbers, and of the smallest kind."""
    if isinstance(leaf, Tensor):
        return torch.zeros((), dtype=torch.float16).expand(leaf.shape)
    return np.broadcast_to(np.float16(0), leaf.shape) if isinstance(leaf, np.ndarray) else leaf
