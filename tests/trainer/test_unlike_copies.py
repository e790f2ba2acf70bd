"""Copies of a module whose stages have tp groups of unlike sizes equal the stock Trainer."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed

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


CHECKPOINTED = {
    "modules": {VISION: copies([(0, 4, (0,))]), LM: copies([(0, 4, (1,))], [(0, 1, (2, 3)), (1, 4, (4, 5))])}
}


@pytest.mark.deep
def test_checkpoints_of_unlike_copies_are_read_under_any_layout(tmp_path: Path):
    run_distributed(runs.saving_run, 6, "llava", tmp_path, CHECKPOINTED, **ADAM)
    checkpoint = tmp_path / "checkpoint-2"
    for size, parallel in ((6, CHECKPOINTED), (3, {LM: {"tp_size": 2}})):
        run = run_distributed(runs.saving_run, size, "llava", tmp_path / str(size), parallel, checkpoint, **ADAM)[0]
        runs.assert_same_run(run, runs.stock("llava", **ADAM))
