"""Runs image processors on image sizes instead of images, for all of their outputs except pixels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BatchFeature, ProcessorMixin

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
        """The entries for some sizes."""
        known = self._known.get(settings)
        result = None if known is None else self._blank(known.kind, sizes, {**kwargs, **known.options})
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
        """The entries for blank images of some sizes."""
        return dict(self._image_processor(_nested(sizes, BLANK[kind]), **kwargs))


def _nested(value: Any, function: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """A function of what is in nested lists."""
    return [_nested(item, function) for item in value] if isinstance(value, list) else function(value)


def _leaves(value: Any) -> list[Any]:
    """What is in nested lists."""
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
