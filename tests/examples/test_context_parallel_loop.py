"""The loop of the example trains the same on any number of ranks."""

import sys
from pathlib import Path

import pytest

from ..distributed import run_distributed

FOLDER = str(Path(__file__).resolve().parents[2] / "examples")


def _train(num_steps: int, mode: str = "row") -> list[float]:
    sys.path.insert(0, FOLDER)
    from context_parallel_loop import train

    return train(num_steps, mode)


@pytest.mark.distributed
def test_losses_are_those_of_one_rank():
    alone = _train(8)
    assert alone[-1] < alone[0] - 0.5
    for mode, num_ranks in (("row", 2), ("segments", 3)):
        for losses in run_distributed(_train, num_ranks, 8, mode, timeout=90):
            assert losses == pytest.approx(alone, abs=2e-5)
