"""The loop of the example trains the same on any number of ranks, and the code of its page runs as it stands."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlavaForConditionalGeneration

from tests import tiny
from tests.markdown import ROOT, blocks

from ..distributed import run_distributed


def _train(num_steps: int, folder: str, resume: str | None = None) -> list[float]:
    sys.path.insert(0, str(ROOT / "examples"))
    from own_loop import train

    return train(num_steps, None, folder, resume)


def _run_page(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """What the code of the page leaves, with a tiny model and the names that it takes from the reader's script."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.chdir(folder)
    data = tiny.make_dataset("llava", 16)
    names: dict[str, Any] = {"model": tiny.FAMILIES["llava"](), "plan": plan, "collator": tiny.collate("llava")}
    names |= {"dataset": data, "eval_dataset": data[:4]}
    for block in blocks(ROOT / "docs/own_loop.md", "python"):
        exec(compile(block.code, "own_loop.md", "exec"), names)
    return {"steps": names["model"].num_steps, "loss": float(names["loss"]), "batches": list(names["sampler"])}


def _on_four_ranks(folder: Path, plan: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    return _train(4, str(folder / "four")), _run_page(folder, plan)


@pytest.mark.deep
@pytest.mark.distributed
def test_losses_are_those_of_one_process_and_a_state_goes_on_elsewhere(tmp_path: Path):
    alone = _train(4, str(tmp_path / "alone"))
    ranks = run_distributed(_on_four_ranks, 4, tmp_path, {"vision": {"dp_size": 2}, "language_model": {"tp_size": 2}})
    for losses, page in ranks:
        assert losses == pytest.approx(alone, abs=2e-5)
        assert page == ranks[0][1] and page["steps"] == 5 and page["batches"]
    LlavaForConditionalGeneration.from_pretrained(tmp_path / "out" / "model")
    longer = _train(6, str(tmp_path / "longer"), str(tmp_path / "four" / "state"))
    assert len(longer) == 2 and longer[0] < alone[0]
