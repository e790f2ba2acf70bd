"""Models with a generator behind the language model train in any layout as with the stock Trainer on one process."""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from hf_mmparallel import ModulePlugin
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan.resolve import resolve_plan
from tests import any_to_any as cases
from tests.any_to_any import IMAGE, KINDS, LM, VISION
from tests.deep_cases import in_turn
from tests.distributed import assert_ranks_raise, run_distributed

from . import runs

pytestmark = pytest.mark.distributed

SHORT: dict[str, Any] = {"max_steps": 2, "warmup_steps": 0}
ON_VISION, ON_LM = {"colocate_with": VISION}, {"colocate_with": LM}
# Kinds of generators, ranks, layout, further arguments or `layer`: kinds x frozen settings x layouts
LAYOUTS: tuple[tuple[tuple[str, ...], int, dict[str, Any], dict[str, Any]], ...] = (
    (("dit",), 2, {VISION: {**ON_LM, "freeze": "tower"}, LM: {"pp_size": 2}, IMAGE: {"dp_size": 2, **ON_LM}}, {}),
    (("codes",), 4, {VISION: {"tp_size": 2, **ON_LM}, LM: {"tp_size": 2}, IMAGE: {"tp_size": 2}}, {}),
    (("unet",), 2, {IMAGE: ON_VISION}, {}),
    (("codes",), 2, {LM: {"freeze": True}, IMAGE: ON_LM}, {}),
    (
        ("codes", "unet"),
        2,
        {IMAGE: {**ON_VISION, "freeze": "tower"}, "unet": ON_LM},
        {"microbatch_assignment": "batch_rebalance"},
    ),
    (
        ("codes",),
        2,
        {VISION: {"pp_size": 2}, LM: {"pp_size": 2, **ON_VISION}, IMAGE: {"pp_size": 2, **ON_VISION}},
        {"layer": 3},
    ),
    (("codes", "unet"), 3, {LM: {"pp_size": 2}, VISION: {}, IMAGE: ON_LM, "unet": ON_VISION}, {"layer": 0}),
    (
        ("codes",),
        4,
        {VISION: ON_LM, LM: {"pp_size": 2, "tp_size": 2}, IMAGE: ON_LM},
        {"layer": 1},
    ),
    (
        ("codes",),
        4,
        {VISION: ON_LM, LM: {"pp_size": 4}, IMAGE: {"dp_size": 4, **ON_LM}},
        {"layer": 1},
    ),
    (
        ("dit",),
        3,
        {
            "modules": {VISION: {"freeze": "tower"}, LM: {"split_backward": True}, IMAGE: {"split_backward": True}},
            "schedule": "zero_bubble",
        },
        {},
    ),
    (
        ("unet",),
        3,
        {VISION: {"freeze": "tower", **ON_LM}, LM: {"freeze": True, "pp_size": 2}, IMAGE: {"freeze": "tower"}},
        {},
    ),
    (
        ("codes",),
        4,
        {VISION: {"dp_size": 2, **ON_LM}, LM: {"dp_size": 2, "zero_stage": 2}, IMAGE: {"dp_size": 2, "zero_stage": 3}},
        {},
    ),
    (
        ("unet",),
        4,
        {
            VISION: {"freeze": "tower", "dp_size": 2, **ON_LM},
            LM: {"cp_size": 2},
            IMAGE: {"dp_size": 2, "zero_stage": 1},
        },
        {},
    ),
    (
        ("codes",),
        4,
        {
            VISION: ON_LM,
            LM: {"pp_size": 2, "activation_checkpointing": True},
            IMAGE: {"pp_size": 2, "activation_checkpointing": True},
        },
        {},
    ),
)


def words(kinds: tuple[str, ...], layer: int | None = None, **arguments: Any) -> dict[str, Any]:
    return {"model": cases.compose(*kinds, layer=layer), "data": cases.make_dataset(*kinds), **SHORT, **arguments}


def launched(cases: Mapping[str, Any], world_size: int) -> dict[str, runs.Layout]:
    """The cases of so many ranks."""
    found = {}
    for name, (kinds, size, layout, more) in cases.items():
        if size == world_size:
            ours = {key: value for key, value in more.items() if key != "layer"}
            found[name] = runs.Layout("llava", layout, partial(words, kinds, more.get("layer")), ours)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_layout_equals_the_stock_trainer(world_size: int):
    every = {f"{kinds}, {layout}": (kinds, *row, layout, more) for kinds, *row, layout, more in LAYOUTS}
    runs.assert_layouts_equal_the_stock_trainer(world_size, launched(in_turn(every, *[*every][:2]), world_size))


# What is trained besides projectors -> what is frozen
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {VISION: "tower", LM: True, IMAGE: "tower"},
    "the encoder": {LM: True, IMAGE: "tower"},
    "the language model": {VISION: "tower", IMAGE: "tower"},
    "the generator": {VISION: "tower", LM: True},
}
TWO: dict[str, Any] = {"dp_size": 2}
# Ranks -> layout, in turn for the kinds of generators x what is frozen
PLACES: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {VISION: ON_LM, LM: {}, IMAGE: {}}),
    (4, {VISION: {**TWO, **ON_LM}, LM: TWO, IMAGE: TWO}),
    (3, {VISION: {}, LM: {}, IMAGE: {}}),
    (2, {VISION: {}, LM: {}, IMAGE: ON_VISION}),
    (8, {VISION: TWO, LM: {**TWO, "pp_size": 2}, IMAGE: TWO}),
)


def frozen_cases() -> dict[str, tuple[tuple[str, ...], int, dict[str, Any], dict[str, Any]]]:
    cases = {}
    for place, (kind, setting) in enumerate(itertools.product(KINDS, SETTINGS)):
        ranks, layout = PLACES[place % len(PLACES)]
        freeze = SETTINGS[setting]
        modules = {
            name: {**own, **({"freeze": freeze[name]} if name in freeze else {})} for name, own in layout.items()
        }
        cases[f"{kind}, {setting} trained"] = ((kind,), ranks, modules, {})
    return cases


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_any_part_can_be_frozen(world_size: int):
    chosen = in_turn(frozen_cases(), "unet, the generator trained")
    runs.assert_layouts_equal_the_stock_trainer(world_size, launched(chosen, world_size))


def logged(parallel: Any, **arguments: Any) -> list[dict[str, float]]:
    """Losses of modules in training and evaluation."""
    trainer = runs.make_trainer("llava", parallel, **words(("codes",)), **arguments)
    trainer.train()
    trainer.evaluate()
    names = ("loss/language_model", "loss/image", "eval_image_loss")
    return [{name: row[name] for name in names if name in row} for row in trainer.state.log_history]


@pytest.mark.deep
def test_the_losses_of_modules_are_logged_and_batches_are_added_up():
    """Under a plan and on one process with gradient accumulation, where the stock Trainer does not count targets."""
    planned = run_distributed(logged, 2, {IMAGE: ON_VISION})[0]
    assert planned[0].keys() == {"loss/language_model", "loss/image"} and "eval_image_loss" in planned[-1]
    alone = run_distributed(logged, 1, None, global_batch_size=8)[0]
    assert alone[:2] == [pytest.approx(row, rel=2e-5) for row in planned[:2]]
    stock = runs.stock_trainer(**words(("codes",)), per_device_train_batch_size=2, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="num_generator_targets"):
        stock.train()


def without_tokens() -> None:
    """A run in which a sample has targets of a generator, but none of its placeholders."""
    model, data = cases.compose("codes"), cases.make_dataset("codes")
    for sample in data:
        kept = sample["input_ids"] != cases.DRAWN_TOKEN
        sample |= {name: sample[name][kept] for name in ("input_ids", "labels", "attention_mask")}
    runs.make_trainer("llava", {IMAGE: ON_VISION}, model=model, data=data, **SHORT).train()


def test_targets_without_placeholders_are_refused():
    assert_ranks_raise(without_tokens, 2, match="placeholders of generator `image`")


def test_blocks_that_are_no_chain_are_not_cut():
    spec = build_model_spec(cases.compose("unet"))
    for setting, more in {"pp_size": {}, "tp_size": {}, "zero_stage": {"dp_size": 2}}.items():
        with pytest.raises(ValueError, match=f"`{setting}=2` of `image`"):
            resolve_plan(spec, {IMAGE: ModulePlugin(**{setting: 2, **more})})
