"""What would train on other numbers than one process ends in its first step, with a sentence on all ranks."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from hf_mmparallel.modeling import tensor_parallel
from hf_mmparallel.plan import LANGUAGE_MODEL
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import assert_ranks_raise, run_distributed
from tests.trainer import runs

pytestmark = pytest.mark.distributed

LM = LANGUAGE_MODEL
NORM = "model.language_model.norm.weight"


def unequal_weights(name: str, rank: int) -> None:
    """A rank changes its copy of a weight by 1e-3 after the Trainer was made."""
    trainer = runs.make_trainer("llava", {LM: {"dp_size": 2, "tp_size": 2}})
    if dist.get_rank() == rank:
        parameter = trainer.model.get_parameter(name)
        with torch.no_grad():
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).flatten()[0] += 1e-3
    trainer.train()


@pytest.mark.parametrize(
    ("name", "rank", "ranks"), [deep(NORM, 2, r"\(1, 2\)|\(1, 2, 3, 4\)"), ("lm_head.weight", 4, r"\(2, 4\)")]
)
def test_copies_that_differ_are_named(name, rank, ranks):
    errors = assert_ranks_raise(
        unequal_weights, 5, name, rank, match=rf"1 of the \d+ parameters .*({ranks}) .*`{name}`"
    )
    assert len(set(errors)) == 1


TOWER = "model.vision_tower.encoder.layers.0.layer_norm1.weight"
FROZEN = {
    "decoder": ({"vision": {}, LM: {"dp_size": 2, "freeze": True}}, NORM),
    "tower": ({"vision": {"dp_size": 2, "freeze": "tower"}, LM: {"pp_size": 1}}, TOWER),
}


def unequal_frozen_weights(layout: str) -> None:
    """The last rank that has a frozen weight changes its copy by 1e-3."""
    parallel, name = FROZEN[layout]
    trainer = runs.make_trainer("llava", parallel)
    if dist.get_rank() == trainer.engine.shards[name].shards[-1].holders[-1]:
        with torch.no_grad():
            trainer.model.get_parameter(name).flatten()[0] += 1e-3
    trainer.train()


@pytest.mark.parametrize("layout", ["decoder", deep("tower")])
def test_frozen_copies_that_differ_are_named(layout):
    """They have no sum of gradients, so that they were never compared, and replicas trained on other features."""
    name = FROZEN[layout][1]
    match = rf"1 of the \d+ parameters .*\(\d, \d\) .*`{name}`"
    assert len(set(assert_ranks_raise(unequal_frozen_weights, 3, layout, match=match))) == 1


def claim_share(name: str) -> None:
    """The plan says of a gradient that it is a share, which it is not."""
    found = tensor_parallel._find_styles

    def find(*args):
        styles = found(*args)
        styles.partial.add(name)
        return styles

    tensor_parallel._find_styles = find


def silent_plan(partial: bool) -> None:
    """A plan that does not say which gradients are shares, or that says it of one that is none."""
    if partial:
        claim_share(NORM)
    else:
        tensor_parallel._between = lambda *args: set()
    runs.make_trainer("llava" if partial else "qwen3_vl_moe", {LM: {"tp_size": 2}}).train()


@pytest.mark.parametrize(
    ("partial", "name"), [(False, r"`\S*layers.\d.self_attn.[qk]_norm.weight`"), deep(True, f"`{re.escape(NORM)}`")]
)
def test_gradients_that_are_shares_without_a_word_are_named(partial, name):
    errors = assert_ranks_raise(silent_plan, 3, partial, match=rf"\(1, 2\) .*{name}.*`tp_size=1` for `language_model`")
    assert len(set(errors)) == 1


def silent_plan_of_an_encoder() -> None:
    """The same of the vision tower, which has no image in the first step."""
    claim_share("model.multi_modal_projector.linear_2.bias")
    shapes = [tiny.Shape(int(index >= runs.GLOBAL_BATCH), 0, 6) for index in range(2 * runs.GLOBAL_BATCH)]
    data = tiny.make_dataset("llava", len(shapes), shapes=shapes)
    trainer = runs.make_trainer("llava", {"vision": {"tp_size": 2}}, data=data, train_sampling_strategy="sequential")
    steps: list[int] = []
    trainer.add_callback(Steps(steps))
    try:
        trainer.train()
    finally:
        assert steps == [1]


class Steps(TrainerCallback):
    """Notes the steps that end."""

    def __init__(self, steps: list[int]):
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


@pytest.mark.deep
def test_what_the_first_step_has_no_samples_for_is_compared_in_a_later_one():
    errors = assert_ranks_raise(silent_plan_of_an_encoder, 3, match=r"\(0, 1\) .*`tp_size=1` for `vision`")
    assert len(set(errors)) == 1


class OwnLoss:
    """The loss of the same token, not of the next."""

    def __call__(self, logits, labels, vocab_size, shift_labels=None, num_items_in_batch=None, **kwargs):
        targets = labels if shift_labels is None else shift_labels
        reduction = "mean" if num_items_in_batch is None else "sum"
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def another_loss(layout: dict[str, int], settings: dict[str, Any]) -> None:
    family = "llava" if "pp_size" in layout else "llama"
    model = tiny.FAMILIES[family]()
    model.loss_function = OwnLoss()
    runs.make_trainer(family, {LM: layout}, model=model, **settings).train()


@pytest.mark.parametrize(
    ("layout", "settings"),
    [deep({"pp_size": 2}, {}), ({"pp_size": 2}, {"label_smoothing_factor": 0.1}), deep({"cp_size": 2}, {})],
    ids=["alone", "smoothed", "context"],
)
def test_a_loss_that_is_not_of_the_next_token_is_refused(layout: dict[str, int], settings: dict[str, Any]):
    errors = assert_ranks_raise(
        another_loss,
        3 if "pp_size" in layout else 2,
        layout,
        settings,
        match=r"loss function of `Lla\w+` gives \d+\.\d+ .* gives \d+\.\d+\.",
    )
    assert len(set(errors)) == 1


def another_loss_in_the_forward(settings: dict[str, Any]) -> None:
    """The forward adds to the loss, whatever its loss function is."""
    model = tiny.FAMILIES["llava"]()
    forward = model.forward

    @functools.wraps(forward)
    def added(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 0.1
        return output

    model.forward = added
    runs.make_trainer("llava", {LM: {"pp_size": 2}}, model=model, **settings).train()


@pytest.mark.parametrize("settings", [{}, deep({"label_smoothing_factor": 0.1})], ids=["alone", "smoothed"])
def test_a_forward_with_another_loss_is_refused(settings: dict[str, Any]):
    errors = assert_ranks_raise(
        another_loss_in_the_forward,
        3,
        settings,
        match=r"`LlavaForConditionalGeneration` .* is 4\.\d+\.",
    )
    assert len(set(errors)) == 1


def drifting_gradients() -> list[float]:
    """Each rank's kernels round in another way; the copies of a norm, of an embedding and of a matrix at the end."""
    trainer = runs.make_trainer("llava", {LM: {"dp_size": 2, "tp_size": 2}}, seed=7)
    names = [NORM, "model.language_model.embed_tokens.weight"]
    for name in names:
        noise = torch.Generator().manual_seed(dist.get_rank())
        trainer.model.get_parameter(name).register_hook(
            lambda gradient, noise=noise: gradient * (1 + 1e-3 * torch.rand(gradient.shape, generator=noise))
        ) if dist.get_rank() else None
    trainer.train()
    assert len(runs.step_logs(trainer)) == 4
    return [trainer.model.get_parameter(name).double().sum().item() for name in names] if dist.get_rank() else []


def test_copies_stay_equal_whatever_kernels_round():
    _, first, *others = run_distributed(drifting_gradients, 5)
    assert all(sums == first for sums in others)


class HalfLoss(OwnLoss):
    """The loss of the next token in half precision, as some models compute it."""

    def __call__(self, logits, labels, vocab_size, shift_labels=None, num_items_in_batch=None, **kwargs):
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
        return 1.004 * super().__call__(logits, labels, vocab_size, shifted, num_items_in_batch).to(torch.bfloat16)


def first_steps_that_go_on() -> tuple[list[float], list[float]]:
    """Losses of a model that has diverged, and of one whose own loss is rounded."""
    diverged, rounded = tiny.FAMILIES["llava"](), tiny.FAMILIES["llava"]()
    with torch.no_grad():
        diverged.lm_head.weight.fill_(3e38)
    rounded.loss_function = HalfLoss()
    found = []
    for model in (diverged, rounded):
        trainer = runs.make_trainer("llava", {LM: {"pp_size": 2}}, model=model, logging_nan_inf_filter=False)
        trainer.train()
        found.append([row["loss"] for row in runs.step_logs(trainer)])
    return found[0], found[1]


@pytest.mark.deep
def test_a_loss_that_is_not_finite_or_rounded_goes_on():
    diverged, rounded = run_distributed(first_steps_that_go_on, 3)[0]
    assert len(diverged) == len(rounded) == 4
    assert not math.isfinite(diverged[0]) and all(map(math.isfinite, rounded))
