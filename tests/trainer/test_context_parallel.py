"""Ranks that share the tokens of a row give the losses, gradient norms and weights of the stock Trainer, unpacked."""

from __future__ import annotations

import pytest

from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
CP = {"cp_size": 2, "cp_block": 16}

LAYOUTS = {
    "llava, two ranks a row": ("llava", 3, {LM: CP}, {}),
    "llava, with tp": ("llava", 5, {LM: {**CP, "tp_size": 2}}, {}),
    "gemma3, with stages": ("gemma3", 5, {LM: {**CP, "pp_size": 2}}, {}),
    "llava, with copies": ("llava", 5, {LM: {**CP, "dp_size": 2}}, {}),
    "llava, whole samples": ("llava", 3, {LM: {**CP, "cp_mode": "segments"}}, {}),
    "gemma3, three ranks a row at random": ("gemma3", 4, {LM: {**CP, "cp_size": 3, "cp_method": "random"}}, {}),
    "qwen2_vl, two copies of vision to one of the LM": ("qwen2_vl", 4, {VISION: {"dp_size": 2}, LM: CP}, {}),
    "qwen3_vl, cut inside DeepStack": ("qwen3_vl", 6, {VISION: {"dp_size": 2}, LM: {**CP, "pp_size": 2}}, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_equals_the_stock_trainer(name: str):
    family, world_size, parallel, arguments = LAYOUTS[name]
    reference = runs.stock(family, evaluate=True, per_device_eval_batch_size=2, **arguments)
    ranks = run_distributed(
        runs.parallel_run, world_size, family, parallel, evaluate=True, per_device_eval_batch_size=2, **arguments
    )
    runs.assert_same_run(ranks[0], reference)
    for rank in ranks:
        assert rank.logs == ranks[0].logs
        assert rank.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)
