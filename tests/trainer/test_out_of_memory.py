"""A device that runs out of memory says what it computed, what was predicted, and what to set."""

from __future__ import annotations

import importlib
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
        module = trainer.engine.model.get_submodule(path)
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
        pytest.param(
            "model.vision_tower", 0, False, "the forward of microbatch 2 of `vision`, stage 0", marks=pytest.mark.deep
        ),
        ("model.language_model.layers.3", 2, True, "the backward of microbatch 2 of `language_model`, stage 1 of 2"),
    ],
)
def test_the_module_the_microbatch_and_the_prediction_are_said(path: str, rank: int, in_backward: bool, where: str):
    messages = assert_ranks_raise(
        full_at, 3, path, rank, in_backward, match=f"Rank {rank} ran out of memory in {where}"
    )
    own = messages[rank]
    assert re.search(r"\d samples? and [\d,]+ tokens: .* 2.00 GiB.*weights [\d.e-]+, gradients .* 0.5 GiB", own)
    assert "`memory_limit_gib`" in own and "`activation_checkpointing`" in own and "More words" not in own


@pytest.mark.deep
def test_an_evaluation_says_it_without_a_prediction():
    (message, *_) = assert_ranks_raise(
        full_at, 3, "model.vision_tower", 0, False, True, match="of unknown size: CUDA out of memory"
    )
    assert "Predicted" not in message and "Lower `per_device_train_batch_size`" in message


def full_in_optimizer(beside: bool) -> None:
    """Runs out of memory on rank 1 in the optimizer's second step, or right before it."""
    trainer: Any = runs.make_trainer("llava", LAYOUT, max_steps=3, optim="adamw_torch")

    def full() -> None:
        if dist.get_rank() == 1 and trainer.state.global_step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nMore words.")

    place, name = (trainer, "_clip_grad_norm") if beside else (importlib.import_module("torch.optim.adam"), "adam")
    plain = getattr(place, name)

    def checked(*args: Any, **kwargs: Any) -> Any:
        full()
        return plain(*args, **kwargs)

    setattr(place, name, checked)
    trainer.train()


def test_in_the_step_of_an_optimizer_it_says_what_is_there():
    messages = assert_ranks_raise(
        full_in_optimizer, 3, False, match="Rank 1 ran out of memory in the optimizer's step"
    )
    own = messages[1]
    assert "step of `language_model` (layers 0-1): CUDA out of memory. Tried to allocate 3.00 GiB. It has " in own
    found = re.search(r"([\d.e-]+) GiB of trained weights, ([\d.e-]+) GiB of gradients and ([\d.e-]+) GiB of opt", own)
    assert found is not None
    weights, gradients, state = map(float, found.groups())
    assert gradients == weights > 0 and state == pytest.approx(2 * weights, rel=0.01)  # of Adam, after one step
    assert "Predicted are " in own and '"adafactor"' in own and "`pp_size` or `tp_size` of `language_model`" in own
    assert "still lack" not in own and "More words" not in own


@pytest.mark.deep
def test_beside_the_step_of_an_optimizer_it_says_nothing_of_it():
    for message in assert_ranks_raise(full_in_optimizer, 3, True, match="Tried to allocate 3.00 GiB"):
        assert "optimizer's step" not in message
