"""Models with a generator behind the language model train in any layout as with the stock Trainer on one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests import any_to_any as cases
from tests.any_to_any import IMAGE, LM, VISION
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

SHORT: dict[str, Any] = {"max_steps": 2, "warmup_steps": 0}
ON_VISION, ON_LM = {"colocate_with": VISION}, {"colocate_with": LM}
# Name -> (kinds of generators, ranks, layout, further arguments), which cover kinds x frozen settings x layouts
LAYOUTS: dict[str, tuple[tuple[str, ...], int, dict[str, Any], dict[str, Any]]] = {
    "U-Net beside vision": (("unet",), 2, {IMAGE: ON_VISION}, {}),
    "codes beside a frozen language model": (("codes",), 2, {LM: {"freeze": True}, IMAGE: ON_LM}, {}),
    "copies of vision and a DiT on stages of the language model": (
        ("dit",),
        2,
        {VISION: {**ON_LM, "freeze": "tower"}, LM: {"pp_size": 2}, IMAGE: {"dp_size": 2, **ON_LM}},
        {},
    ),
    "two generators, the first frozen": (
        ("codes", "unet"),
        2,
        {IMAGE: {**ON_VISION, "freeze": "tower"}, "unet": ON_LM},
        {"microbatch_assignment": "batch_rebalance"},
    ),
    "stages of codes, all shared": (
        ("codes",),
        2,
        {VISION: {"pp_size": 2}, LM: {"pp_size": 2, **ON_VISION}, IMAGE: {"pp_size": 2, **ON_VISION}},
        {},
    ),
    "each on ranks of its own, split backwards": (
        ("dit",),
        3,
        {
            "modules": {VISION: {"freeze": "tower"}, LM: {"split_backward": True}, IMAGE: {"split_backward": True}},
            "schedule": "zero_bubble",
        },
        {},
    ),
    "only the projector of a frozen U-Net": (
        ("unet",),
        3,
        {VISION: {"freeze": "tower", **ON_LM}, LM: {"freeze": True, "pp_size": 2}, IMAGE: {"freeze": "tower"}},
        {},
    ),
    "codes and a language model with tensor parallelism": (
        ("codes",),
        4,
        {VISION: {"tp_size": 2, **ON_LM}, LM: {"tp_size": 2}, IMAGE: {"tp_size": 2}},
        {},
    ),
    "copies of all, ZeRO": (
        ("codes",),
        4,
        {VISION: {"dp_size": 2, **ON_LM}, LM: {"dp_size": 2, "zero_stage": 2}, IMAGE: {"dp_size": 2, "zero_stage": 3}},
        {},
    ),
    "copies of a U-Net behind tokens on two ranks": (
        ("unet",),
        4,
        {
            VISION: {"freeze": "tower", "dp_size": 2, **ON_LM},
            LM: {"cp_size": 2},
            IMAGE: {"dp_size": 2, "zero_stage": 1},
        },
        {},
    ),
    "stages of codes, recomputed": (
        ("codes",),
        4,
        {
            VISION: ON_LM,
            LM: {"pp_size": 2, "activation_checkpointing": True},
            IMAGE: {"pp_size": 2, "activation_checkpointing": True},
        },
        {},
    ),
}


def words(kinds: tuple[str, ...], **settings: Any) -> dict[str, Any]:
    return {"model": cases.compose(*kinds, **settings), "data": cases.make_dataset(*kinds), **SHORT}


def run_all(world_size: int) -> dict[str, runs.Run]:
    """The layouts with so many ranks, one after the other."""
    return {
        name: runs.parallel_run("llava", layout, **words(kinds), **arguments)
        for name, (kinds, size, layout, arguments) in LAYOUTS.items()
        if size == world_size
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_layout_equals_the_stock_trainer(world_size: int):
    found = run_distributed(run_all, world_size, world_size, timeout=280)
    assert len(found[0]) > 1
    for name, run in found[0].items():
        kinds, _, layout, _ = LAYOUTS[name]
        try:
            runs.assert_same_run(run, runs.stock("llava", freeze=runs.frozen(layout), **words(kinds)))
        except AssertionError as error:
            raise AssertionError(name) from error
        assert all(rank[name].logs == run.logs for rank in found)
