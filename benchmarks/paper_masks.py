"""
The attention masks of Cornstarch (first version, figure 11; chapter 3, figure 3.5) as rows of intervals.

`EP`: outputs of the encoders in front of the text. `EE`: outputs embedded in the text. `MP`: several such samples
packed into one row. Tokens of a modality see that modality of their sample both ways and nothing else; text looks back
at everything of its sample. The papers draw the masks and say that the place of a modality is random. How many tokens
have which modality they say of one sample only, an image and a sound in 3,720 tokens, 1,024 of them text (chapter 3,
section 3.5.1); the image has 1,196 and the sound 1,500 here. `MP` packs such samples, `EP` and `EE` are one sample
with these shares. They are assumed, not fitted to any figure.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask
from hf_mmparallel.kernels.bitfield_attention.builders import embedded_words
from hf_mmparallel.kernels.bitfield_attention.intervals import row_bounds

KINDS = ("EP", "EE", "MP")
IMAGE, SOUND, TEXT = 1196, 1500, 1024  # tokens of a sample
PUBLISHED_MS = {
    # Table 4 of the first version, Llama 3.1 70B's attention on 8 ranks: tokens -> mask -> LPT, random, ring, zigzag.
    16384: {"EP": (3.92, 3.93, 4.24, 3.96), "EE": (4.31, 4.32, 4.86, 4.37), "MP": (3.00, 2.99, 3.12, 3.08)},
    32768: {"EP": (10.01, 10.07, 11.76, 10.21), "EE": (11.12, 11.12, 13.43, 11.60), "MP": (6.09, 6.18, 6.76, 6.57)},
    65536: {
        "EP": (25.43, 25.48, 32.24, 28.17),
        "EE": (36.99, 37.12, 46.67, 37.36),
        "MP": (14.18, 14.15, 16.56, 15.33),
    },
}
PUBLISHED_METHODS = ("ours", "random", "contiguous", "zigzag")


def sample(length: int, prepended: bool, rng: np.random.Generator) -> NDArray:
    """The modality of each token of a sample, 0 for text; `[length]`."""
    whole = IMAGE + SOUND + TEXT
    media = [round(length * IMAGE / whole), round(length * SOUND / whole)]
    num_text = length - sum(media)
    cuts = [0, 0] if prepended else sorted(rng.integers(0, num_text + 1, 2).tolist())
    order = [0, 1] if prepended else rng.permutation(2).tolist()  # which comes first
    texts = np.diff([0, *cuts, num_text]).tolist()
    groups = [0, order[0] + 1, 0, order[1] + 1, 0]
    return np.repeat(groups, [texts[0], media[order[0]], texts[1], media[order[1]], texts[2]])


def paper_row(kind: str, length: int, seed: int) -> tuple[NDArray, NDArray]:
    """First and last place that each token of a row sees, int32 `[length]`."""
    rng = np.random.default_rng(seed)
    size = IMAGE + SOUND + TEXT if kind == "MP" else length
    sizes = [min(size, length - start) for start in range(0, length, size)]
    groups = np.concatenate([sample(own, kind == "EP", rng) for own in sizes])
    segments = np.repeat(np.arange(len(sizes)) + 1, sizes)
    words = embedded_words(torch.from_numpy(segments)[None], torch.from_numpy(groups)[None])
    bounds, holes = row_bounds(BitfieldMask.from_words(words))
    assert not bool(holes), "the counts below are of intervals"
    return bounds.first[0].numpy().astype(np.int32), bounds.last[0].numpy().astype(np.int32)
