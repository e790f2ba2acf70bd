"""Models with recurrent layers in layouts, with packed rows, equal the stock Trainer on padded ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests import hybrids
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
TWO_STEPS: dict[str, Any] = {"max_steps": 2, "warmup_steps": 0}
AGAIN = {"activation_checkpointing": True}
BESIDE = {"colocate_with": LM}
VLM, MOE_VLM = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
# (class, layout on two ranks)
LAYOUTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (VLM, {VISION: {}, LM: {}}),
    (VLM, {VISION: {"dp_size": 2, "zero_stage": 3, **BESIDE}, LM: {"pp_size": 2, **AGAIN}}),
    (VLM, {VISION: {"tp_size": 2, **BESIDE}, LM: {"tp_size": 2}}),
    (MOE_VLM, {VISION: {"dp_size": 2, **BESIDE}, LM: {"dp_size": 2, "zero_stage": 3, **AGAIN}}),
    ("Qwen3NextForCausalLM", {LM: {"dp_size": 2, "zero_stage": 2}}),
    ("KimiLinearForCausalLM", {LM: {"pp_size": 2, **AGAIN}}),
    ("BambaForCausalLM", {LM: {"dp_size": 2, "zero_stage": 1}}),
    ("FalconH1ForCausalLM", {"modules": {LM: {"pp_size": 2}}, "schedule": "zero_bubble"}),
    ("JambaForCausalLM", {LM: {"dp_size": 2, "zero_stage": 3}}),
    ("GraniteMoeHybridForCausalLM", {LM: {"pp_size": 2}}),
    ("Lfm2ForCausalLM", {LM: {"tp_size": 2, **AGAIN}}),
)


def words_of(name: str) -> tuple[str, dict[str, Any]]:
    """Whose samples a class takes, and the arguments of its runs."""
    return "qwen3_vl" if "Conditional" in name else "llama", {"model": hybrids.build(name), **TWO_STEPS}


def train(layouts: tuple[tuple[str, dict[str, Any]], ...]) -> list[runs.Run]:
    results = []
    for name, layout in layouts:
        family, words = words_of(name)
        results.append(runs.parallel_run(family, layout, packing=True, **words))
    return results


@pytest.mark.parametrize("layouts", [LAYOUTS[:4], LAYOUTS[4:8], LAYOUTS[8:]], ids=["Qwen", "two kinds", "and others"])
def test_packed_rows_in_a_layout_equal_the_stock_trainer(layouts: Any):
    first = run_distributed(train, 2, layouts, timeout=280)[0]
    for (name, _), run in zip(layouts, first, strict=True):
        family, words = words_of(name)
        runs.assert_same_run(run, runs.stock(family, **words))
