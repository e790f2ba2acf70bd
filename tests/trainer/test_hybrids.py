"""Models with layers of several kinds in layouts, with packed rows, equal the stock Trainer on padded ones."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests import hybrids
from tests.deep_cases import in_turn

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
    ("NemotronHForCausalLM", {LM: {"dp_size": 2, "ep_size": 2, **AGAIN}}),
    ("NemotronHForCausalLM", {LM: {"pp_size": 2}}),
    ("NemotronHForCausalLM", {LM: {"tp_size": 2, "ep_size": 2}}),
    ("Zamba2ForCausalLM", {LM: {"dp_size": 2, "zero_stage": 3, **AGAIN}}),
    ("Zamba2ForCausalLM", {LM: {"tp_size": 2}}),
    ("Zamba2ForCausalLM", {LM: {"pp_size": 2, **AGAIN}}),
    ("Llama4ForCausalLM", {LM: {"pp_size": 2, **AGAIN}}),
    ("Llama4ForCausalLM", {LM: {"tp_size": 2}}),
    ("Llama4ForCausalLM", {LM: {"dp_size": 2, "zero_stage": 3}}),
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
    ("NemotronHForCausalLM", {LM: {**CP, "cp_block": 4, "ep_size": 2, **AGAIN}}),
    ("Zamba2ForCausalLM", {LM: {**CP, "cp_block": 4}}),
    ("Llama4ForCausalLM", {LM: {**CP, "cp_block": 4}}),
    ("Llama4ForCausalLM", {LM: {**CP, "cp_mode": "segments", "cp_block": 4, "zero_stage": 3, **AGAIN}}),
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


# (class, layout on three ranks) of microbatches of few samples, some of them longer than a rank's share of the tokens
ON_THREE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("BambaForCausalLM", {LM: {"cp_size": 3, "cp_block": 4, **AGAIN}}),
    ("Qwen3_5ForCausalLM", {LM: {"cp_size": 3, "cp_block": 4, "cp_mode": "segments"}}),
    ("JambaForCausalLM", {LM: {"cp_size": 3, "cp_block": 4, "zero_stage": 3, **AGAIN}}),
    ("KimiLinearForCausalLM", {LM: {"cp_size": 3, "cp_block": 4, "cp_mode": "row"}}),
    ("MiniMaxForCausalLM", {LM: {"cp_size": 3, "cp_block": 4, "cp_mode": "row"}}),
)
# (class, layout on two ranks) of microbatches of one sample, which is longer than a rank's share of the tokens
LONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Qwen3_5ForCausalLM", {LM: {**CP, "cp_block": 4, **AGAIN}}),
    ("BambaForCausalLM", {LM: {**CP, "cp_block": 4, "cp_mode": "segments"}}),
    (MOE_VLM, {VISION: {"cp_size": 2, **BESIDE}, LM: {**CP, "cp_block": 4, "ep_size": 2}}),
)


LORA = {"peft_config": {"r": 2, "target_modules": ["q_proj", "o_proj", "in_proj"], "init_lora_weights": False}}
ADAPTED: tuple[tuple[str, dict[str, Any]], ...] = (  # (class, layout on two ranks with adapters in the language model)
    (VLM, {VISION: {"dp_size": 2, "zero_stage": 3, **BESIDE}, LM: {"pp_size": 2, **LORA}}),
    (MOE_VLM, {VISION: {"cp_size": 2, **BESIDE}, LM: {**CP, "ep_size": 2, "cp_block": 4, **LORA}}),
    ("Qwen3NextForCausalLM", {LM: {"dp_size": 2, "ep_size": 2, **LORA}}),
    ("KimiLinearForCausalLM", {LM: {"pp_size": 2, **AGAIN, **LORA}}),
    ("BambaForCausalLM", {LM: {**CP, "cp_block": 4, **LORA}}),
    ("FalconH1ForCausalLM", {LM: {"tp_size": 2, **LORA}}),
    ("JambaForCausalLM", {LM: {"dp_size": 2, "zero_stage": 3, **LORA}}),
    ("NemotronHForCausalLM", {LM: {"tp_size": 2, "ep_size": 2, **LORA}}),
    ("Zamba2ForCausalLM", {LM: {"dp_size": 2, "zero_stage": 2, **LORA}}),
    ("Llama4ForCausalLM", {LM: {"pp_size": 2, **LORA}}),
)


def family_of(name: str) -> str:
    """Whose samples a class takes."""
    return "qwen3_vl" if "Conditional" in name else "llama"


def words_of(name: str) -> dict[str, Any]:
    return {"model": hybrids.build(name), **TWO_STEPS}


def layout_of(name: str, parallel: dict[str, Any], batch_size: int) -> runs.Layout:
    ours = {"packing": True, "per_device_train_batch_size": batch_size}
    return runs.Layout(family_of(name), parallel, partial(words_of, name), ours)


@pytest.mark.parametrize(
    ("world_size", "layouts", "num_core", "batch_size"),
    [(2, LAYOUTS, 1, 2), (2, SHARED, 1, 2), (2, LONG, 0, 1), (3, ON_THREE, 1, 4), (4, ON_FOUR, 0, 2)],
    ids=["2", "cp 2", "cp 2, long", "cp 3", "4"],
)
def test_packed_rows_in_a_layout_equal_the_stock_trainer(
    world_size: int, layouts: Any, num_core: int, batch_size: int
):
    every = {f"{name}, {own}": layout_of(name, own, batch_size) for name, own in layouts}
    runs.assert_layouts_equal_the_stock_trainer(world_size, in_turn(every, *[*every][:num_core]))


@pytest.mark.deep
def test_adapters_train_alike_in_a_layout_and_on_one_process():
    layouts = {}
    for name, own in ADAPTED:
        alone = {**({VISION: BESIDE} if "Conditional" in name else {}), LM: LORA}
        layouts[f"{name}, {own}"] = replace(layout_of(name, own, 2), alone=alone)
    runs.assert_layouts_equal_the_stock_trainer(2, layouts)
