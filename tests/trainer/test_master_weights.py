"""Float32 copies of 16-bit weights: exact steps, every layout, checkpoints of any layout and of the stock Trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_mmparallel.modeling.dtensors import local
from hf_mmparallel.plan import ModulePlugin, MultimodalParallelPlugin, StorageSettings
from hf_mmparallel.runtime.optimizers import prepare_optimizer
from hf_mmparallel.runtime.updated_copies import copied_from, entries_of
from hf_mmparallel.world import World
from tests import tiny
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-4, "adam_epsilon": 1e-4}
WITHOUT: dict[str, Any] = {"master_weights": False}
LORA = {"peft_config": {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}}


def half(family: str = "llava") -> Any:
    """A tiny model with weights in bfloat16."""
    return tiny.FAMILIES[family]().bfloat16()


def trainer_of(parallel: dict[str, Any] | None, family: str = "llava", **arguments: Any) -> Any:
    return runs.make_trainer(family, parallel, model=half(family), **arguments)


class _Gradients(TrainerCallback):
    """The gradients of each step, clipped, in float32 and before the optimizer takes them."""

    def __init__(self):
        self.steps: list[dict[str, torch.Tensor]] = []
        self.lrs: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = model.named_parameters()
        self.steps.append({name: local(p.grad).clone() for name, p in named if p.grad is not None})
        self.lrs.append(kwargs["lr_scheduler"].get_last_lr()[0])


OPTIMIZERS = {"adamw_torch": ADAMW, "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"}, "adafactor": {}}


def replayed(optim: str) -> bool:
    """Whether a loop with float32 copies makes the same weights of the gradients of a run, to the last bit."""
    callback = _Gradients()
    arguments = {"optim": optim, **OPTIMIZERS[optim]}
    trainer = trainer_of({LM: {"pp_size": 2}}, callbacks=[callback], weight_decay=0.0, **arguments)
    trainable = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    masters = {name: torch.nn.Parameter(local(p).detach().float()) for name, p in trainable.items()}
    trainer.train()
    assert callback.steps[0] and all(g.dtype == torch.float32 for step in callback.steps for g in step.values())
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    known = inspect.signature(type(inner)).parameters
    settings = {key: value for key, value in inner.defaults.items() if key in known}
    optimizer = type(inner)(list(masters.values()), **{**settings, "lr": 0.0, "weight_decay": 0.0})
    for gradients, lr in zip(callback.steps, callback.lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        for name, master in masters.items():
            master.grad = gradients.get(name)
        optimizer.step()
    changed = [name for name, p in trainable.items() if not torch.equal(local(p).detach(), masters[name].bfloat16())]
    assert all(p.dtype == torch.bfloat16 for p in trainable.values())
    return not changed


@pytest.mark.parametrize("optim", runs.deep_but(OPTIMIZERS, "adamw_torch"))
def test_steps_are_those_of_a_loop_with_float32_copies(optim: str):
    assert run_distributed(replayed, 3, optim) == [True] * 3


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dp": ("llava", 3, {LM: {"dp_size": 2}}),
    "zero": ("llava", 4, {VISION: {"dp_size": 2, "zero_stage": 1}, LM: {"dp_size": 2, "zero_stage": 1}}),
    "zero and tp": ("llava", 5, {LM: {"dp_size": 2, "tp_size": 2, "zero_stage": 1}}),
    "tied over stages, frozen tower": ("paligemma", 3, {VISION: {"freeze": "tower"}, LM: {"pp_size": 2}}),
    "on the CPU": ("llava", 3, {LM: {"dp_size": 2, "offload_optimizer": True}}),
}


def masters_of(trainer: Any) -> dict[str, torch.Tensor]:
    """What the optimizer of this rank updates of each parameter, in float32, and by how much it is off the weights."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    result = {}
    for entry in entries_of(inner):
        assert entry.dtype == torch.float32 and copied_from(entry).dtype == torch.bfloat16
        assert torch.equal(local(entry).bfloat16(), local(copied_from(entry)))
        result[names[id(entry.sharded_parameter)]] = local(entry).detach().clone()
    return result


def saved_masters(folder: Path, family: str, parallel: Any, **arguments: Any) -> dict[str, torch.Tensor] | None:
    """The float32 weights in the checkpoint that a run of this rank leaves, by name; on rank 0."""
    trainer = trainer_of(parallel, family, output_dir=str(folder), save_strategy="steps", save_steps=4, **arguments)
    trainer.train()
    masters_of(trainer)
    if not trainer.is_world_process_zero():
        return None
    saved = torch.load(folder / "checkpoint-4" / "optimizer.pt", weights_only=True)
    names = {i: n for g in saved["param_groups"] for i, n in zip(g["params"], g["param_names"], strict=True)}
    return {names[index]: state["master"] for index, state in saved["state"].items()}


def full_precision(family: str, parallel: dict[str, Any], **arguments: Any) -> tuple[dict, dict]:
    """Float32 weights before and after the stock Trainer has trained them, from the values of the 16-bit model."""
    start = {name: p.detach().float() for name, p in half(family).named_parameters()}
    model = half(family).float()
    run = runs.stock(family, freeze=runs.frozen(parallel), model=model, bf16=True, **arguments)
    assert run.weights is not None
    return start, run.weights


@pytest.mark.parametrize("name", runs.deep_but(LAYOUTS, "zero and tp", "tied over stages, frozen tower", "on the CPU"))
def test_the_copies_follow_the_stock_trainer_with_float32_weights(name: str, tmp_path: Path):
    family, world_size, parallel = LAYOUTS[name]
    optim = {"optim": "adamw_torch", "learning_rate": 5e-6, "adam_epsilon": 1e-2}  # updates below the weights' digits
    start, want = full_precision(family, parallel, **optim)
    got = run_distributed(saved_masters, world_size, tmp_path, family, parallel, **optim)[0]
    assert got and all(value.dtype == torch.float32 for value in got.values())
    error = sum(float((got[n] - want[n]).square().sum()) for n in got) ** 0.5
    moved = sum(float((want[n] - start[n]).square().sum()) for n in got) ** 0.5
    lost = sum(float((want[n].bfloat16().float() - want[n]).square().sum()) for n in got) ** 0.5
    assert error < 0.05 * moved, (error, moved)
    assert lost > 0.9 * moved  # which 16-bit weights can't hold


def ends(parallel: dict[str, Any], **arguments: Any) -> runs.Run:
    return runs.run_of(trainer_of(parallel, **arguments))


def test_without_copies_16_bit_weights_train_as_in_the_stock_trainer():
    reference = runs.stock("llava", model=half(), **ADAMW)
    run = run_distributed(ends, 3, {VISION: WITHOUT, LM: {"dp_size": 2, **WITHOUT}}, **ADAMW)[0]
    runs.assert_same_run(run, reference, rtol=2e-2, atol=2e-3)


def adapters_runs() -> list[runs.Run]:
    sizes = {"pp_size": 2, **LORA}
    return [ends({VISION: {"freeze": True}, LM: {**sizes, **settings}}, **ADAMW) for settings in ({}, WITHOUT)]


def test_adapters_have_no_copies():
    with_copies, without = run_distributed(adapters_runs, 3)[0]
    assert with_copies.logs == without.logs


SAVING = {"save_strategy": "steps", "save_steps": 2, **ADAMW}


def continued(folder: Path, parallel: Any, checkpoint: Path | None = None, **arguments: Any) -> tuple[runs.Run, dict]:
    """A run that saves every two steps, and what its optimizer has updated."""
    trainer = trainer_of(parallel, output_dir=str(folder), **{**SAVING, **arguments})
    run = runs.run_of(trainer, checkpoint=None if checkpoint is None else str(checkpoint))
    return run, masters_of(trainer)


ZERO = {VISION: {"dp_size": 2, "zero_stage": 1}, LM: {"dp_size": 2, "tp_size": 2, "zero_stage": 1}}
HOST = {VISION: {"offload_optimizer": True}, LM: {"tp_size": 2, "offload_optimizer": True}}


@pytest.mark.deep
def test_copies_move_to_any_layout(tmp_path: Path):
    straight, masters = run_distributed(continued, 6, tmp_path / "zero", ZERO)[0]
    again, same = run_distributed(continued, 6, tmp_path / "again", ZERO, tmp_path / "zero" / "checkpoint-2")[0]
    assert again.logs == straight.logs and all(torch.equal(same[name], masters[name]) for name in masters)
    host, _ = run_distributed(continued, 3, tmp_path / "host", HOST, tmp_path / "zero" / "checkpoint-2")[0]
    runs.assert_same_run(host, straight, rtol=1e-2, atol=2e-3)
    run_distributed(continued, 3, tmp_path / "from host", HOST)
    back, _ = run_distributed(continued, 6, tmp_path / "back", ZERO, tmp_path / "from host" / "checkpoint-2")[0]
    runs.assert_same_run(back, straight, rtol=1e-2, atol=2e-3)


class _Start(TrainerCallback):
    """The copies that training starts with."""

    trainer: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.masters = masters_of(self.trainer)


def starts(checkpoint: Path, folder: Path | None = None) -> dict[str, torch.Tensor]:
    """The copies of this rank with which a run goes on from a checkpoint, which a run in a folder has to leave."""
    parallel = {LM: {"pp_size": 2}}
    if folder is not None:
        continued(folder, parallel)
    callback = _Start()
    callback.trainer = trainer_of(parallel, callbacks=[callback], **ADAMW)
    callback.trainer.train(resume_from_checkpoint=str(checkpoint))
    return callback.masters


def test_the_stock_trainer_goes_on_from_copies_and_a_plan_from_there(tmp_path: Path):
    checkpoint = tmp_path / "plan" / "checkpoint-2"
    ranks = run_distributed(starts, 3, checkpoint, tmp_path / "plan")
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    names = {n: i for g in saved["param_groups"] for i, n in zip(g["params"], g["param_names"], strict=True)}
    for found in ranks:
        for name, value in found.items():
            state = saved["state"].get(names[name])  # none of a parameter that no rank uses
            assert state is None or torch.equal(value, state["master"])
    model = half()
    stock: Any = runs.stock_trainer(model=model, output_dir=str(tmp_path / "stock"), **SAVING)
    stock.train(resume_from_checkpoint=str(checkpoint))
    state = next(iter(stock.optimizer.state_dict()["state"].values()))
    assert float(state["step"]) == 4 and state["exp_avg"].dtype == torch.bfloat16
    # The stock Trainer has changed the weights, and saves copies that it has not: they must not come back.
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for found in run_distributed(starts, 3, tmp_path / "stock" / "checkpoint-4"):
        assert found and all(torch.equal(value.bfloat16(), weights[name]) for name, value in found.items())


def best_loaded(folder: Path) -> bool:
    """Whether the copies are those of the weights that `load_best_model_at_end` has read."""
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_strategy": "steps"}
    trainer = trainer_of(
        {LM: {"dp_size": 2}},
        output_dir=str(folder),
        load_best_model_at_end=True,
        greater_is_better=True,  # the worst one, which is the first
        metric_for_best_model="loss",
        **{**ADAMW, **settings, "learning_rate": 1e-2},
    )
    trainer.train()
    assert trainer.state.best_global_step == 2
    masters_of(trainer)
    return True


def test_copies_follow_weights_that_are_loaded(tmp_path: Path):
    assert all(run_distributed(best_loaded, 3, tmp_path))


class ScheduleFree(torch.optim.SGD):
    """Changes weights in `eval()`."""

    def eval(self) -> None:
        pass


def test_an_optimizer_that_changes_weights_outside_of_steps_is_refused():
    weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    storage = {weight: StorageSettings(master_weights=True)}
    with pytest.raises(ValueError, match="ScheduleFree`.*`master_weights=True`"):
        prepare_optimizer(ScheduleFree([weight], lr=0.1), holds_all=True, world=World(), storage=storage)


def test_settings_are_part_of_a_plan():
    plugin = ModulePlugin(master_weights=False, offload_optimizer=True)
    assert plugin.to_dict() == {"master_weights": False, "offload_optimizer": True}
    assert not plugin.beside_plan and plugin.storage.has_master_weights is False
    with pytest.raises(ValueError, match="`master_weights`"):
        ModulePlugin(master_weights="yes")  # type: ignore[arg-type]
    assert MultimodalParallelPlugin({LM: ModulePlugin(**WITHOUT)}, auto=True).fixed_storage == {LM: WITHOUT}
