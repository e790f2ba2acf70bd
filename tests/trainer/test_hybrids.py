"""Models with recurrent layers in layouts, with packed rows, equal the stock Trainer on padded ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests import hybrids
from tests.deep_cases import in_turn
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
TWO_STEPS: dict[str, Any] = {"max_steps": 2, "warmup_steps": 0}
AGAIN = {"activation_checkpointing": True}
BESIDE = {"colocate_with": LM}
VLM, MOE_VLM = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
# (class, layout on two ranks), of all the first on each change, the others in turn
LAYOUTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (VLM, {VISION: {"dp_size": 2, "zero_stage": 3, **BESIDE}, LM: {"pp_size": 2, **AGAIN}}),
    ("KimiLinearForCausalLM", {LM: {"pp_size": 2, **AGAIN}}),
    (VLM, {VISION: {}, LM: {}}),
    (VLM, {VISION: {"tp_size": 2, **BESIDE}, LM: {"tp_size": 2}}),
    (MOE_VLM, {VISION: {"dp_size": 2, **BESIDE}, LM: {"dp_size": 2, "zero_stage": 3, **AGAIN}}),
    ("Qwen3NextForCausalLM", {LM: {"dp_size": 2, "zero_stage": 2}}),
    ("BambaForCausalLM", {LM: {"dp_size": 2, "zero_stage": 1}}),
    ("FalconH1ForCausalLM", {"modules": {LM: {"pp_size": 2}}, "schedule": "zero_bubble"}),
    ("JambaForCausalLM", {LM: {"dp_size": 2, "zero_stage": 3}}),
    ("GraniteMoeHybridForCausalLM", {LM: {"pp_size": 2}}),
    ("Lfm2ForCausalLM", {LM: {"tp_size": 2, **AGAIN}}),
)
CP = {"cp_size": 2}
SHARED: tuple[tuple[str, dict[str, Any]], ...] = (
    (VLM, {VISION: {"tp_size": 2, **BESIDE}, LM: {**CP, "cp_block": 4, **AGAIN}}),
    ("BambaForCausalLM", {LM: {**CP, "cp_mode": "row", "cp_block": 4}}),
    ("FalconH1ForCausalLM", {LM: {**CP, "cp_method": "zigzag", "cp_block": 4, **AGAIN}}),
    ("Lfm2ForCausalLM", {LM: {**CP, "cp_block": 4, "zero_stage": 3}}),
    (MOE_VLM, {VISION: {"dp_size": 2, **BESIDE}, LM: {**CP, "zero_stage": 3}}),
    ("Qwen3NextForCausalLM", {LM: {**CP, "cp_mode": "segments", "zero_stage": 1}}),
    ("KimiLinearForCausalLM", {LM: CP}),
    ("JambaForCausalLM", {LM: {**CP, "zero_stage": 2}}),
    ("GraniteMoeHybridForCausalLM", {LM: {**CP, "offload_activations": True}}),
    ("MiniMaxForCausalLM", {LM: {**CP, "cp_mode": "row", "cp_block": 4}}),
)
FROZEN = {"freeze": True}
ON_FOUR: tuple[tuple[str, dict[str, Any]], ...] = (  # (class, layout on four ranks)
    (VLM, {VISION: {"dp_size": 4, "zero_stage": 3, **BESIDE}, LM: {"cp_size": 4, "cp_block": 4}}),
    (VLM, {VISION: {"cp_size": 4, **BESIDE}, LM: {**CP, "pp_size": 2, **FROZEN}}),
    (MOE_VLM, {VISION: {"dp_size": 4, **BESIDE}, LM: {**CP, "dp_size": 2, "ep_size": 4, **AGAIN}}),
    ("Qwen3_5ForCausalLM", {LM: {**CP, "tp_size": 2, "cp_block": 4}}),
    ("JambaForCausalLM", {LM: {"cp_size": 4, **AGAIN}}),
    ("BambaForCausalLM", {LM: {**CP, "dp_size": 2, "zero_stage": 3}}),
    ("Lfm2ForCausalLM", {LM: {**CP, "pp_size": 2}}),
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


def check(world_size: int, layouts: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    first = run_distributed(train, world_size, layouts, timeout=280)[0]
    for (name, layout), run in zip(layouts, first, strict=True):
        family, words = words_of(name)
        runs.assert_same_run(run, runs.stock(family, freeze=runs.frozen(layout), **words))


def named(layouts: tuple[tuple[str, dict[str, Any]], ...]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {f"{name}, {layout}": (name, layout) for name, layout in layouts}


@pytest.mark.parametrize(
    ("world_size", "layouts", "num_core"), [(2, LAYOUTS, 2), (2, SHARED, 2), (4, ON_FOUR, 0)], ids=["2", "cp 2", "4"]
)
def test_packed_rows_in_a_layout_equal_the_stock_trainer(world_size: int, layouts: Any, num_core: int):
    cases = in_turn(named(layouts), *[*named(layouts)][:num_core])
    if cases:
        check(world_size, tuple(cases.values()))
