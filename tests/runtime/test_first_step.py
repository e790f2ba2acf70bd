"""What would train on other numbers than one process ends in its first step, with a sentence on all ranks."""

import contextlib
import functools
import math
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from hf_mmparallel.modeling import tensor_parallel
from hf_mmparallel.plan import LANGUAGE_MODEL
from tests import tiny
from tests.deep_cases import in_turn
from tests.distributed import run_distributed
from tests.trainer import runs

pytestmark = pytest.mark.distributed

LM = LANGUAGE_MODEL
NORM = "model.language_model.norm.weight"
TOWER = "model.vision_tower.encoder.layers.0.layer_norm1.weight"
SPLIT = {"vision": {"dp_size": 2, "tp_size": 2}, LM: {"colocate_with": "vision"}}


def change(trainer: Any, name: str) -> None:
    """The last rank that has a weight changes its copy by 1e-3."""
    if dist.get_rank() == trainer.engine.shards[name].shards[-1].holders[-1]:
        parameter = trainer.model.get_parameter(name)
        with torch.no_grad():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).flatten()[0] += 1e-3


@contextlib.contextmanager
def silent_plan() -> Iterator[None]:
    """The tensor-parallel plan does not say which gradients are shares."""
    with mock.patch.object(tensor_parallel, "_between", lambda *args: set()):
        yield


@contextlib.contextmanager
def claimed_share(name: str) -> Iterator[None]:
    """The plan says of a gradient that it is a share, which it is not."""
    found = tensor_parallel._find_styles

    def find(*args: Any) -> Any:
        styles = found(*args)
        styles.partial.add(name)
        return styles

    with mock.patch.object(tensor_parallel, "_find_styles", find):
        yield


class OwnLoss:
    """The loss of the same token, not of the next."""

    def __call__(self, logits, labels, vocab_size, shift_labels=None, num_items_in_batch=None, **kwargs):
        targets = labels if shift_labels is None else shift_labels
        reduction = "mean" if num_items_in_batch is None else "sum"
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


class HalfLoss(OwnLoss):
    """The loss of the next token in half precision, as some models compute it."""

    def __call__(self, logits, labels, vocab_size, shift_labels=None, num_items_in_batch=None, **kwargs):
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
        return 1.004 * super().__call__(logits, labels, vocab_size, shifted, num_items_in_batch).to(torch.bfloat16)


def with_loss(loss: Any) -> Any:
    model = tiny.FAMILIES["llava"]()
    model.loss_function = loss()
    return model


def with_more_loss() -> Any:
    """A model whose forward adds to the loss, whatever its loss function is."""
    model = tiny.FAMILIES["llava"]()
    forward = model.forward

    @functools.wraps(forward)
    def added(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 0.1
        return output

    model.forward = added
    return model


def diverged() -> Any:
    model = tiny.FAMILIES["llava"]()
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    return model


class Steps(TrainerCallback):
    """Notes the steps that end."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended.append(state.global_step)


def later_images() -> list[dict]:
    """Samples of which those of the first step have no image."""
    shapes = [tiny.Shape(int(index >= runs.GLOBAL_BATCH), 0, 6) for index in range(2 * runs.GLOBAL_BATCH)]
    return tiny.make_dataset("llava", len(shapes), shapes=shapes)


SMOOTHED = {"label_smoothing_factor": 0.1}
PIPELINE = {LM: {"pp_size": 2}}
# case of 3 ranks -> layout, maker of the model, settings of the Trainer, weight that a rank changes
TRAINED: dict[str, tuple[dict, Any, dict[str, Any], str]] = {
    "frozen copies of a decoder": ({LM: {"dp_size": 2, "freeze": True}}, None, {}, NORM),
    "frozen copies of a tower": ({"vision": {"dp_size": 2, "freeze": "tower"}, LM: {}}, None, {}, TOWER),
    "own loss": (PIPELINE, lambda: with_loss(OwnLoss), {}, ""),
    "own loss, context": ({LM: {"cp_size": 2}}, lambda: with_loss(OwnLoss), {}, ""),
    "loss of the forward": (PIPELINE, with_more_loss, {}, ""),
    "loss of the forward, smoothed": (PIPELINE, with_more_loss, SMOOTHED, ""),
    "not finite": (PIPELINE, diverged, {"logging_nan_inf_filter": False}, ""),
    "rounded": (PIPELINE, lambda: with_loss(HalfLoss), {}, ""),
}
NAMED = {
    "frozen copies of a decoder": rf"1 of the \d+ parameters .*\(1, 2\) .*`{re.escape(NORM)}`",
    "frozen copies of a tower": rf"1 of the \d+ parameters .*\(0, 1\) .*`{re.escape(TOWER)}`",
    **dict.fromkeys(["own loss", "own loss, context"], r"`Llava\w+` gives \d\S+ .* gives \d"),
    **dict.fromkeys(["loss of the forward", "loss of the forward, smoothed"], r"`Llava\w+` .* is 4\.\d+\."),
    "silent plan": r"\(1, 2\) .*`\S*layers.\d.self_attn.[qk]_norm.weight`.*`tp_size=1` for `language_model`",
    "claimed share": rf"\(1, 2\) .*`{re.escape(NORM)}`.*`tp_size=1` for `language_model`",
    "claimed share of an encoder": r"\(0, 1\) .*`tp_size=1` for `vision`",
}


def train(family: str, layout: dict, weight: str = "", **settings: Any) -> str | list[float]:
    """What is said in the first step, or the losses."""
    trainer = runs.make_trainer(family, layout, **settings)
    if weight:
        change(trainer, weight)
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return [row["loss"] for row in runs.step_logs(trainer)]


def train_case(name: str) -> str | list[float]:
    """What this rank says of a case of three ranks, or its losses."""
    if name in TRAINED:
        layout, make, settings, weight = TRAINED[name]
        return train("llava", layout, weight, model=make() if make else None, **settings)
    if name == "silent plan":
        with silent_plan():
            return train("qwen3_vl_moe", {LM: {"tp_size": 2}})
    if name == "claimed share":
        with claimed_share(NORM):
            return train("llava", {LM: {"tp_size": 2}})
    steps = Steps()
    settings = {"train_sampling_strategy": "sequential", "callbacks": [steps], "data": later_images()}
    with claimed_share("model.multi_modal_projector.linear_2.bias"):
        said = train("llava", {"vision": {"tp_size": 2}}, **settings)
    assert steps.ended == [1]  # which had no image
    return said


def train_cases(names: list[str]) -> dict[str, str | list[float]]:
    return {name: train_case(name) for name in names}


def test_what_is_wrong_is_named_alike_on_all_ranks_and_losses_not_finite_or_rounded_go_on():
    cases = {**NAMED, "not finite": "", "rounded": ""}
    chosen = in_turn(cases, "frozen copies of a decoder", "own loss", "claimed share", "rounded")
    found = run_distributed(train_cases, 3, [*chosen])
    for name, said in chosen.items():
        first, *others = (rank[name] for rank in found)
        if said:
            assert others == [first] * 2 and isinstance(first, str) and re.search(said, first), (name, first)
        else:
            assert len(first) == 4 and math.isfinite(first[0]) == (name == "rounded")


def of_four() -> tuple[str | list[float], str | list[float], list[float]]:
    """
    What is said of copies of a whole weight and of a shard that differ; then the sums of two norms when each rank's
    kernels round in another way.
    """
    said = train("llava", SPLIT, NORM), train("llava", SPLIT, "lm_head.weight")
    trainer = runs.make_trainer("llava", SPLIT, seed=7)
    names = [NORM, TOWER]
    for name in names:
        noise = torch.Generator().manual_seed(dist.get_rank())
        trainer.model.get_parameter(name).register_hook(
            lambda gradient, noise=noise: gradient * (1 + 1e-3 * torch.rand(gradient.shape, generator=noise))
        )
    trainer.train()
    assert len(runs.step_logs(trainer)) == 4
    return *said, [trainer.model.get_parameter(name).double().sum().item() for name in names]


@pytest.mark.deep
def test_copies_that_differ_are_named_and_stay_equal_whatever_kernels_round():
    first, *others = run_distributed(of_four, 4)
    assert others == [first] * 3
    whole, shard, _ = first
    assert re.search(rf"1 of the \d+ parameters .*\([0-3, ]+\) .*`{re.escape(NORM)}`", whole), whole
    assert re.search(r"1 of the \d+ parameters .*\(1, 3\) .*`lm_head.weight`", shard), shard
