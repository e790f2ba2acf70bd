"""Samples with sizes like those of four datasets, to plan before the data is available: `--dataset chartqa`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .._portable import exp
from ..cost.image_tokens import ImageRule, PatchGrid
from ..plan import LANGUAGE_MODEL, SampleSizes

PATCH_PIXELS, MERGE = 14, 2


@dataclass(frozen=True)
class SamplePreset:
    """
    Sample sizes of a dataset with one image and one text per sample, whose image areas and text lengths are
    independent and log-normal, fitted to published statistics of the dataset.
    """

    name: str
    image_patches: float  # median area in patches of 14 x 14 pixels
    image_sigma: float  # standard deviation of the logarithm of the area
    template_tokens: int  # text tokens that all samples share
    text_tokens: float  # median number of other text tokens
    text_sigma: float  # standard deviation of their logarithm
    aspect_sigma: float = 0.2  # standard deviation of the logarithm of width over height
    patch_limits: tuple[int, int] = (256, 16384)  # range that image areas are resized to
    max_text_tokens: int = 4096  # texts are truncated to this length

    def draw_images(self, num_samples: int, seed: int) -> DrawnImages:
        """Draws image and text sizes of samples, independent of a model; equal seeds give equal samples."""
        rng = np.random.default_rng(seed)
        area, aspect, text = rng.standard_normal((3, num_samples))
        area = np.clip(self.image_patches * exp(self.image_sigma * area), *self.patch_limits)
        height = np.sqrt(area * exp(self.aspect_sigma * aspect))
        sides = [np.maximum(1, np.rint(side / MERGE)).astype(np.int64) for side in (height, area / height)]
        words = self.template_tokens + np.rint(self.text_tokens * exp(self.text_sigma * text)).astype(np.int64)
        heights, widths = (MERGE * PATCH_PIXELS * side for side in sides)
        return DrawnImages(heights, widths, np.minimum(words, self.max_text_tokens))


@dataclass(frozen=True)
class DrawnImages:
    """Heights and widths in pixels, and text tokens, `[samples]` each, of samples with one image and one text."""

    heights: NDArray
    widths: NDArray
    text_tokens: NDArray

    def sizes(self, encoder: str, rule: ImageRule) -> SampleSizes:
        """Sample sizes in a model, from the name of its encoder and the rule of its image tokens."""
        images = rule(self.heights, self.widths)
        tokens = images.feature_tokens + self.text_tokens
        return SampleSizes(
            {encoder: images.tokens, LANGUAGE_MODEL: tokens},
            {encoder: images.squares, LANGUAGE_MODEL: tokens.astype(float) ** 2},
            items={encoder: np.ones_like(tokens)} if isinstance(rule, PatchGrid) and rule.window_tokens else {},
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
