"""Copies of a module whose stages have tp groups of unlike sizes equal the stock Trainer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
ADAM: dict[str, Any] = {"optim": "adamw_torch", "adam_epsilon": 1e-4, "learning_rate": 1e-3}


def copies(*replicas: list[tuple[int, int, tuple[int, ...]]]) -> dict[str, Any]:
    """A module with a replica for each list of stages: first layer, one past the last, and the tp group."""
    written = [[{"layers": [a, b], "ranks": [list(ranks)]} for a, b, ranks in stages] for stages in replicas]
    return {"replicas": written}


# Family, ranks, modules, further arguments
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "a copy of the LM on two ranks, one on a single rank": (
        "llava",
        4,
        {VISION: copies([(0, 4, (0,))]), LM: copies([(0, 4, (1, 2))], [(0, 4, (3,))])},
        ADAM,
    ),
    "the single rank first, and both encoders unlike": (
        "llava",
        6,
        {VISION: copies([(0, 4, (0,))], [(0, 4, (1, 2))]), LM: copies([(0, 4, (3,))], [(0, 4, (4, 5))])},
        {},
    ),
    "stages with one and two ranks, tied embeddings": (
        "gemma3",
        7,
        {VISION: copies([(0, 4, (0,))]), LM: copies([(0, 1, (1, 2)), (1, 4, (3,))], [(0, 2, (4,)), (2, 4, (5, 6))])},
        {},
    ),
    "experts and norms of heads, on shared ranks": (
        "qwen3_vl_moe",
        3,
        {VISION: copies([(0, 4, (0, 1))], [(0, 4, (2,))]), LM: copies([(0, 4, (0, 1))], [(0, 4, (2,))])},
        ADAM,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_unlike_copies_equal_the_stock_trainer(name: str):
    family, world_size, modules, arguments = LAYOUTS[name]
    reference = runs.stock(family, evaluate=True, per_device_eval_batch_size=2, **arguments)
    ranks = run_distributed(
        runs.parallel_run,
        world_size,
        family,
        {"modules": modules},
        evaluate=True,
        per_device_eval_batch_size=2,
        timeout=240,
        **arguments,
    )
    runs.assert_same_run(ranks[0], reference)
    for rank in ranks:
        assert rank.logs == ranks[0].logs
        assert rank.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)
