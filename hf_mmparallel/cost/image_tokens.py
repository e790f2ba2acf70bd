"""Number of tokens that a model makes of images of known height and width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ImageTokens(NamedTuple):
    """Token counts `[images]` of images in a model."""

    tokens: NDArray  # in the encoder's layers
    squares: NDArray  # squared sequence lengths, averaged over the encoder's layers
    feature_tokens: NDArray  # in the language model


ImageRule = Callable[[NDArray, NDArray], ImageTokens]  # heights and widths in pixels -> token counts


@dataclass(frozen=True)
class PatchGrid:
    """An encoder with native resolution: an image becomes a grid of patches, and squares of patches are merged."""

    patch_size: int  # side in pixels
    merge_size: int  # side in patches of a square that becomes one token of the language model
    num_layers: int
    global_layers: int  # layers with attention over the whole image
    window_tokens: int = 0  # patches of an attention window of the other layers

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
    """An encoder with crops of a fixed size, one or several per image."""

    tokens: int  # of a crop in the encoder's layers
    feature_tokens: int  # of a crop in the language model
    count: Callable[[int, int], int] | None = None  # height and width of an image -> number of crops; 1 by default

    def __call__(self, heights: NDArray, widths: NDArray) -> ImageTokens:
        """See [`ImageRule`]."""
        crops = np.ones(len(heights), dtype=np.int64)
        if self.count is not None:
            sizes, size_of_image = np.unique(np.stack([heights, widths], axis=1), axis=0, return_inverse=True)
            crops = np.array([self.count(*size) for size in sizes.tolist()], dtype=np.int64)[size_of_image.reshape(-1)]
        return ImageTokens(self.tokens * crops, self.tokens**2.0 * crops, self.feature_tokens * crops)
