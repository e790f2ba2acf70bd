"""A device that runs out of memory says what it computed, what was predicted, and what to set."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import assert_ranks_raise

from . import runs

pytestmark = pytest.mark.distributed

LAYOUT = {"vision": {}, "language_model": {"pp_size": 2}}


def full_at(path: str, rank: int, in_backward: bool, evaluate: bool = False) -> None:
    """Runs out of memory in a module of one rank, in its third call."""
    trainer: Any = runs.make_trainer("llava", LAYOUT, memory_limit_gib=0.5)
    calls = 0

    def full(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == (1 if evaluate else 3):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words.")

    if dist.get_rank() == rank:
        module = trainer.engine.module.get_submodule(path)
        if in_backward:
            module.register_full_backward_hook(full)
        else:
            module.register_forward_pre_hook(full)
    if evaluate:
        trainer.evaluate()
    trainer.train()


@pytest.mark.parametrize(
    ("path", "rank", "in_backward", "where"),
    [
        ("model.vision_tower", 0, False, r"the forward of microbatch 2 of `vision`, stage 0 of 1 \(layers 0-3\)"),
        ("model.language_model.layers.3", 2, True, r"the backward of microbatch 2 of `language_model`, stage 1 of 2"),
    ],
)
def test_the_module_the_microbatch_and_the_prediction_are_said(path: str, rank: int, in_backward: bool, where: str):
    messages = assert_ranks_raise(
        full_at, 3, path, rank, in_backward, match=f"Rank {rank} ran out of memory in {where}"
    )
    own = messages[rank]
    assert re.search(r"with \d samples? and [\d,]+ tokens: CUDA out of memory. Tried to allocate 2.00 GiB\. ", own)
    assert re.search(r"Predicted are [\d.e-]+ GiB \(weights [\d.e-]+, gradients", own)
    assert "where microbatches are made to fit 0.5 GiB" in own and "`memory_limit_gib` below " in own
    assert "`activation_checkpointing` of" in own and "More words" not in own


def test_an_evaluation_says_it_without_a_prediction():
    (message, *_) = assert_ranks_raise(
        full_at, 3, "model.vision_tower", 0, False, True, match="of unknown size: CUDA out of memory"
    )
    assert "Predicted" not in message and "Lower `per_device_train_batch_size`" in message
