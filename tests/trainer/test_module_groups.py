"""A learning rate and weight decay of a module is a group of the stock Trainer's optimizer, in every layout."""

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.optim import AdamW
from transformers import Trainer, get_cosine_schedule_with_warmup

from hf_mmparallel import ModulePlugin, prepare
from hf_mmparallel.modeling import build_model_spec
from tests import tiny
from tests.deep_cases import in_turn
from tests.distributed import run_distributed

from . import runs
from .test_own_loop import Loop, scheduled

VISION, LM = "vision", "language_model"
FAMILY = "llava"
RATE, VISION_RATE, VISION_DECAY, EPSILON = 1e-3, 4e-3, 0.5, 1e-4
ARGUMENTS: dict[str, Any] = {
    "optim": "adamw_torch",
    "learning_rate": RATE,
    "adam_epsilon": EPSILON,
    "weight_decay": 0.0,
}
OWN = {"learning_rate": VISION_RATE, "weight_decay": VISION_DECAY}
TWO = {VISION: OWN, LM: {}}
LAYOUTS: dict[str, Any] = {
    "tp 2 of both": {VISION: {"tp_size": 2, **OWN}, LM: {"tp_size": 2, "colocate_with": VISION}},
    "stages beside ZeRO-2": {
        VISION: {"dp_size": 2, "zero_stage": 2, **OWN},
        LM: {"pp_size": 2, "colocate_with": VISION},
    },
    "ZeRO-3, host memory": {
        VISION: {"dp_size": 2, "zero_stage": 3, **OWN},
        LM: {"dp_size": 2, "zero_stage": 1, "offload_optimizer": True, "colocate_with": VISION},
    },
}


def groups_of(model: Any) -> list[dict[str, Any]]:
    """The stock Trainer's groups, and those of the vision module."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    vision = {parameter.name for parameter in build_model_spec(model).modules[VISION].parameters}
    return [
        {
            "params": [p for name, p in model.named_parameters() if (name in vision, name in decayed) == key],
            "lr": VISION_RATE if key[0] else RATE,
            "weight_decay": VISION_DECAY if all(key) else 0.0,
        }
        for key in ((False, True), (False, False), (True, True), (True, False))
    ]


def rates(trainer: Any) -> list[float]:
    return [row["learning_rate/vision"] for row in trainer.state.log_history if "loss" in row]


def groups_before(model: Any) -> list[dict[str, Any]]:
    """Groups that `prepare` gives the rate and decay of the module."""
    first, second, *vision = groups_of(model)
    vision[0]["weight_decay"] = 0.1  # those with any get that of the module
    return [first, second, *({**group, "lr": RATE} for group in vision)]


def own_loop(folder: Path) -> runs.Run:
    """The groups are there before the schedule."""
    loop = Loop(TWO, groups=groups_before, is_scheduled=False)
    loop.schedule = scheduled(loop.optimizer)
    run = loop.resumed(folder / "checkpoint-2")
    AcceleratorState._reset_state()
    return run


def two_ranks(folder: Path, layouts: dict[str, Any]) -> dict[str, Any]:
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = runs.make_trainer(FAMILY, TWO, str(folder), **saving, **ARGUMENTS)
    results = {"straight": (runs.run_of(trainer), rates(trainer))}
    for name, layout in layouts.items():
        trainer = runs.make_trainer(FAMILY, layout, **ARGUMENTS)
        results[name] = runs.run_of(trainer, checkpoint=str(folder / "checkpoint-2")), rates(trainer)
    return results


@pytest.fixture(scope="module")
def reference() -> runs.Run:
    model = tiny.FAMILIES[FAMILY]()
    optimizer = AdamW(groups_of(model), eps=EPSILON)
    return runs.run_of(runs.stock_trainer(FAMILY, model=model, optimizers=(optimizer, None), **ARGUMENTS))


@pytest.mark.distributed
def test_every_layout_equals_the_stock_trainer_with_these_groups(reference: runs.Run, tmp_path: Path):
    layouts = in_turn(LAYOUTS, "stages beside ZeRO-2")
    ranks = run_distributed(two_ranks, 2, tmp_path, layouts, timeout=240)
    expected = [row["learning_rate"] * VISION_RATE / RATE for row in reference.logs]
    for name in ("straight", *layouts):
        runs.assert_same_run(ranks[0][name][0], reference)
        for rank in ranks:  # rank 1 has no parameter of it in the first layout
            assert rank[name][1] == pytest.approx(expected)


def saved_and_continued(folder: Path) -> runs.Run:
    runs.saving_run(FAMILY, folder, TWO, **ARGUMENTS)
    return own_loop(folder)


@pytest.mark.deep
@pytest.mark.distributed
def test_a_loop_of_ones_own_has_the_same_groups(reference: runs.Run, tmp_path: Path):
    run = run_distributed(saved_and_continued, 2, tmp_path, timeout=200)[0]
    runs.assert_same_run(run, runs.Run(reference.logs[2:], reference.weights))


def one_rank() -> tuple[runs.Run, list[float], str]:
    parallel = {**TWO, LM: {"colocate_with": VISION}}
    trainer = runs.make_trainer(FAMILY, parallel, **ARGUMENTS)
    assert not trainer.is_planned
    run = runs.run_of(trainer)
    model = tiny.FAMILIES[FAMILY]()
    with pytest.raises(ValueError) as raised:
        optimizers = (AdamW(model.parameters()), None)
        runs.make_trainer(FAMILY, parallel, model=model, optimizers=optimizers, **ARGUMENTS)
    return run, rates(trainer), str(raised.value)


@pytest.mark.distributed
def test_one_process_has_the_same_groups(reference: runs.Run):
    run, of_vision, refused = run_distributed(one_rank, 1)[0]
    runs.assert_same_run(run, reference)
    assert of_vision == pytest.approx([row["learning_rate"] * VISION_RATE / RATE for row in reference.logs])
    assert "`optimizers`" in refused


def test_a_rate_in_a_file_and_one_without_effect():
    assert ModulePlugin(learning_rate="1e-5").learning_rate == 1e-5  # type: ignore[arg-type]  # as YAML reads it
    for value in (-1, "fast", True, float("nan")):
        with pytest.raises(ValueError, match="learning_rate"):
            ModulePlugin(learning_rate=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="freeze"):
        ModulePlugin(weight_decay=0.1, freeze=True)


@pytest.mark.distributed
def test_a_schedule_of_other_groups_is_refused():
    model = tiny.FAMILIES[FAMILY]()
    optimizer = AdamW(model.parameters())
    get_cosine_schedule_with_warmup(optimizer, 1, 4)
    words = {"data_collator": tiny.collate(FAMILY), "global_batch_size": 8}
    with pytest.raises(ValueError, match="after `prepare`"):
        prepare(Accelerator(cpu=True), model, optimizer, tiny.make_dataset(FAMILY, 8), {VISION: OWN}, **words)
    AcceleratorState._reset_state()
