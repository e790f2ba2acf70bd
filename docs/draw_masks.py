"""
Draws the pictures of `attention_masks.md`, one for each family of masks.

```bash
python docs/draw_masks.py
```
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from matplotlib.colors import ListedColormap
from torch import Tensor

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, builders, decode_words, dense_mask

FOLDER = Path(__file__).parent / "images"
LENGTH = 30
TEXT, IMAGE, OTHER_IMAGE, PADDING = range(4)
COLORS = ["#3b6ea5", "#d98032", "#7a9e3c", "#d8d8d8"]
SEEN, HIDDEN = 4, 5


def families() -> dict[str, tuple[Tensor, Tensor, int]]:
    """Name -> words, image of each token (0 for text), and the layer's window."""
    one = torch.ones(1, LENGTH, dtype=torch.int64)
    two = builders.segments_of_lengths([16, 11], LENGTH)
    plain = torch.zeros_like(one)
    image = plain.clone()
    image[0, 4:10], image[0, 10:16] = 1, 2
    apart = plain.clone()
    apart[0, 4:10], apart[0, 16:22] = 1, 2
    packed = plain.clone()
    packed[0, 3:8], packed[0, 10:13], packed[0, 18:23] = 1, 2, 1
    prefix = plain.clone()
    prefix[0, 0:8] = 1
    prepended = builders.segments_of_lengths([8, 6], LENGTH)
    windows = builders.segments_of_lengths([8, 8, 8, 4], LENGTH)
    causal = builders.causal_words(one)
    return {
        "causal": (causal, apart, 0),
        "packed": (builders.causal_words(two), plain, 0),
        "sliding_window": (causal, plain, 8),
        "image_spans": (builders.image_span_words(one, image), image, 0),
        "prefix": (builders.prefix_words(one, torch.arange(LENGTH)[None] < 13), prefix, 0),
        "prepended": (builders.prepended_words([8, 6], LENGTH - 14), prepended, 0),
        "embedded": (builders.embedded_words(one, apart.clamp(max=1)), apart.clamp(max=1), 0),
        "embedded_images": (builders.embedded_words(one, apart), apart, 0),
        "multimodal_packing": (builders.embedded_words(two, packed), packed, 0),
        "encoder": (builders.bidirectional_words([8, 8, 8, 4], LENGTH), windows, 0),
        "chunked": (builders.chunked_words(builders.causal_words(two), 7), plain, 0),
        "noised": (builders.noised_words(builders.image_span_words(one, apart), apart * (apart == 1)), apart, 0),
    }


def draw(name: str, words: Tensor, image: Tensor, window: int) -> None:
    """Queries from top to bottom, keys from left to right; the strips at both edges say what the tokens are."""
    what = torch.where(image[0] % 2 == 1, IMAGE, torch.where(image[0] > 0, OTHER_IMAGE, TEXT))
    what = torch.where(decode_words(words[0]).segment > 0, what, PADDING)
    seen = dense_mask(BitfieldMask.from_words(words), window)[0]
    body = torch.where(seen, what[None].expand_as(seen), HIDDEN)
    figure, grid = pyplot.subplots(2, 2, figsize=(2.4, 2.4), width_ratios=[1, 18], height_ratios=[1, 18])
    colors = ListedColormap([*COLORS, "#000000", "#f4f4f4"])
    panels = {(0, 1): what[None], (1, 0): what[:, None], (1, 1): body}
    for at, values in panels.items():
        axes = grid[at]
        axes.pcolormesh(values.numpy(), cmap=colors, vmin=0, vmax=HIDDEN, edgecolors="white", linewidth=0.4)
        axes.invert_yaxis()
    for axes in grid.flat:
        axes.set_axis_off()
    figure.subplots_adjust(0, 0, 1, 1, wspace=0.04, hspace=0.04)
    figure.savefig(FOLDER / f"mask_{name}.png", dpi=100)
    pyplot.close(figure)


def main() -> None:
    for name, (words, image, window) in families().items():
        draw(name, words, image, window)


if __name__ == "__main__":
    main()
