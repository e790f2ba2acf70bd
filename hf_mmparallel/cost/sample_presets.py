"""Samples with sizes like those of four datasets, for a plan before the data is there: `--dataset chartqa`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, SampleSizes
from .image_tokens import ImageRule

PATCH_PIXELS, MERGE = 14, 2


@dataclass(frozen=True)
class SamplePreset:
    """
    The distribution of the sizes of a dataset's samples, each of one image and a text: areas of images and lengths of
    texts are log-normal and vary independently of each other. They are fitted to what is published of the datasets.

    Args:
        name (`str`): The dataset.
        image_patches (`float`): Median area of an image, in patches of 14 x 14 pixels.
        image_sigma (`float`): Standard deviation of the logarithm of the area.
        template_tokens (`int`): Text tokens that every sample has.
        text_tokens (`float`): Median of the text tokens that differ.
        text_sigma (`float`): Standard deviation of their logarithm.
        aspect_sigma (`float`, *optional*, defaults to 0.2): Standard deviation of the logarithm of width over height.
        patch_limits (`tuple[int, int]`, *optional*, defaults to `(256, 16384)`): To which areas images are resized.
        max_text_tokens (`int`, *optional*, defaults to 4096): Where texts are cut.
    """

    name: str
    image_patches: float
    image_sigma: float
    template_tokens: int
    text_tokens: float
    text_sigma: float
    aspect_sigma: float = 0.2
    patch_limits: tuple[int, int] = (256, 16384)
    max_text_tokens: int = 4096

    def draw_images(self, num_samples: int, seed: int) -> DrawnImages:
        """
        Draws samples before a model makes tokens of their images.

        Args:
            num_samples (`int`): How many.
            seed (`int`): Equal seeds give equal samples.
        """
        rng = np.random.default_rng(seed)
        area, aspect, text = rng.standard_normal((3, num_samples))
        area = np.clip(self.image_patches * np.exp(self.image_sigma * area), *self.patch_limits)
        height = np.sqrt(area * np.exp(self.aspect_sigma * aspect))
        sides = [np.maximum(1, np.rint(side / MERGE)).astype(np.int64) for side in (height, area / height)]
        words = self.template_tokens + np.rint(self.text_tokens * np.exp(self.text_sigma * text)).astype(np.int64)
        heights, widths = (MERGE * PATCH_PIXELS * side for side in sides)
        return DrawnImages(heights, widths, np.minimum(words, self.max_text_tokens))


@dataclass(frozen=True)
class DrawnImages:
    """
    Samples of an image and a text each.

    Args:
        heights (`np.ndarray` of shape `[samples]`): Of the images, in pixels.
        widths (`np.ndarray` of shape `[samples]`): Of the images, in pixels.
        text_tokens (`np.ndarray` of shape `[samples]`): Tokens of the texts.
    """

    heights: NDArray
    widths: NDArray
    text_tokens: NDArray

    def sizes(self, encoder: str, rule: ImageRule) -> SampleSizes:
        """
        Their sizes in a model.

        Args:
            encoder (`str`): The name of its encoder.
            rule (`ImageRule`): What it makes of images.
        """
        images = rule(self.heights, self.widths)
        tokens = images.rows + self.text_tokens
        return SampleSizes(
            {encoder: images.tokens, LANGUAGE_MODEL: tokens},
            {encoder: images.squares, LANGUAGE_MODEL: tokens.astype(float) ** 2},
        )


SAMPLE_PRESETS: Mapping[str, SamplePreset] = {
    preset.name: preset
    for preset in (
        SamplePreset("synthchartnet", 3900, 0.35, 35, 285, 0.76),
        SamplePreset("chartqa", 5000, 0.175, 480, 110, 0.4),
        SamplePreset("cocoqa", 1530, 0.24, 130, 30, 0.5),
        SamplePreset("llava-150k", 1450, 0.155, 165, 110, 0.85),
    )
}
