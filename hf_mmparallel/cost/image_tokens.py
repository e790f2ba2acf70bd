"""How many tokens a model makes of images whose height and width are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class ImageTokens(NamedTuple):
    """
    What some images are in a model.

    Args:
        tokens (`np.ndarray` of shape `[images]`): Tokens that the encoder's layers see.
        squares (`np.ndarray` of shape `[images]`): Sums of the squared lengths of its sequences, mean over its layers.
        rows (`np.ndarray` of shape `[images]`): Tokens in the language model.
    """

    tokens: NDArray
    squares: NDArray
    rows: NDArray


class ImageRule(Protocol):
    """Heights and widths in pixels -> [`ImageTokens`]."""

    def __call__(self, heights: NDArray, widths: NDArray) -> ImageTokens: ...


@dataclass(frozen=True)
class PatchGrid:
    """
    An encoder that takes an image in its own size, as a grid of patches, and merges squares of them.

    Args:
        patch_size (`int`): Side of a patch in pixels.
        merge_size (`int`): Side in patches of what becomes one token of the language model.
        num_layers (`int`): Layers of the encoder.
        global_layers (`int`): Those of them that attend to the whole image.
        window_tokens (`int`, *optional*, defaults to 0): Patches of a window, in which the other layers attend.
    """

    patch_size: int
    merge_size: int
    num_layers: int
    global_layers: int
    window_tokens: int = 0

    def __call__(self, heights: NDArray, widths: NDArray) -> ImageTokens:
        """See [`ImageRule`]; sides are rounded to whole tokens of the language model."""
        side = self.patch_size * self.merge_size
        rows, columns = (np.maximum(1, np.rint(pixels / side)).astype(np.int64) for pixels in (heights, widths))
        tokens = rows * columns * self.merge_size**2
        windows = self.window_tokens * tokens * (self.num_layers - self.global_layers)
        squares = (windows + self.global_layers * tokens.astype(float) ** 2) / self.num_layers
        return ImageTokens(tokens, squares, rows * columns)


@dataclass(frozen=True)
class Crops:
    """
    An encoder that takes crops of one size, one or several of an image.

    Args:
        tokens (`int`): Tokens that its layers see of a crop.
        rows (`int`): Tokens of a crop in the language model.
        count (`Callable[[int, int], int]`, *optional*): Height and width of an image -> its crops; one when left out.
    """

    tokens: int
    rows: int
    count: Callable[[int, int], int] | None = None

    def __call__(self, heights: NDArray, widths: NDArray) -> ImageTokens:
        """See [`ImageRule`]."""
        crops = np.ones(len(heights), dtype=np.int64)
        if self.count is not None:
            sizes, which = np.unique(np.stack([heights, widths], axis=1), axis=0, return_inverse=True)
            crops = np.array([self.count(*size) for size in sizes.tolist()], dtype=np.int64)[which.reshape(-1)]
        return ImageTokens(self.tokens * crops, self.tokens**2.0 * crops, self.rows * crops)
