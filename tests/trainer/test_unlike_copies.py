"""Copies of a module whose stages have tp groups of unlike sizes equal the stock Trainer."""

from typing import Any

import pytest

from . import runs
from .runs import case

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
ADAM: dict[str, Any] = {"optim": "adamw_torch", "adam_epsilon": 1e-4, "learning_rate": 1e-3}


def copies(*replicas: list[tuple[int, int, tuple[int, ...]]]) -> dict[str, Any]:
    """A module with a replica for each list of stages: first layer, one past the last, and the tp group."""
    written = [[{"layers": [a, b], "ranks": [list(ranks)]} for a, b, ranks in stages] for stages in replicas]
    return {"replicas": written}


ON_SHARED = copies([(0, 4, (0, 1))], [(0, 4, (2,))])
ONE_RANK_OR_TWO = copies([(0, 1, (1, 2)), (1, 4, (3,))], [(0, 2, (4,)), (2, 4, (5, 6))])
LAYOUTS = [
    case("llava", {VISION: copies([(0, 4, (0,))]), LM: copies([(0, 4, (1, 2))], [(0, 4, (3,))])}, always=True, **ADAM),
    case("llama_tied", {LM: copies([(0, 2, (0,)), (2, 4, (1, 2))])}),
    case("qwen3_vl_moe", {VISION: ON_SHARED, LM: ON_SHARED}, **ADAM),
    case("gemma3", {VISION: copies([(0, 4, (0,))]), LM: ONE_RANK_OR_TWO}),
]


@pytest.mark.parametrize(("family", "modules", "arguments"), LAYOUTS)
def test_unlike_copies_equal_the_stock_trainer(family: str, modules: dict[str, Any], arguments: dict[str, Any]):
    runs.assert_a_layout_equals_the_stock_trainer(family, {"modules": modules}, **arguments)
