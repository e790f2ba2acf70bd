"""The masks that benchmarks count are those that the papers draw."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from paper_masks import paper_row  # noqa: E402

LENGTH, SAMPLE = 7440, 3720


@pytest.mark.parametrize("kind", ["EP", "EE", "MP"])
@pytest.mark.parametrize("seed", range(2))
def test_the_papers_masks_are_those_of_the_figures(kind, seed):
    """Token by token: each modality sees itself both ways and nothing before it, text all before it in its sample."""
    first, last = paper_row(kind, LENGTH, seed)
    places = np.arange(LENGTH)
    assert len(first) == len(last) == LENGTH
    spans = {(int(a), int(b)) for a, b in zip(first[last > places], last[last > places], strict=True)}
    assert sorted(b - a + 1 for a, b in spans) == ([1196, 1196, 1500, 1500] if kind == "MP" else [2392, 3000])
    media = np.zeros(LENGTH, dtype=bool)
    for a, b in spans:
        assert (first[a : b + 1] == a).all() and (last[a : b + 1] == b).all()
        media[a : b + 1] = True
    starts = places // SAMPLE * SAMPLE if kind == "MP" else np.zeros(LENGTH)
    assert (first[~media] == starts[~media]).all() and (last[~media] == places[~media]).all()
    assert media[: 2392 + 3000].all() == (kind == "EP")


def test_places_are_random():
    assert (paper_row("EE", LENGTH, 0)[0] != paper_row("EE", LENGTH, 1)[0]).any()
    assert (paper_row("EE", LENGTH, 1)[0] == paper_row("EE", LENGTH, 1)[0]).all()
