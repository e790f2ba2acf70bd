"""16-bit weights: exact steps of their float32 copies, which move to any layout, and gradients that add up exactly."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_mmparallel.modeling.unowned import local
from hf_mmparallel.plan import ModulePlugin, MultimodalParallelPlugin, StorageSettings
from hf_mmparallel.runtime.optimizers import prepare_optimizer
from hf_mmparallel.runtime.updated_copies import entries_of, source_of_copy
from hf_mmparallel.world import World
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs
from .runs import case

VISION, LM = "vision", "language_model"
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-4, "adam_epsilon": 1e-4}
PP2 = {LM: {"pp_size": 2}}
WITHOUT: dict[str, Any] = {"master_weights": False}
LORA = {"peft_config": {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}}


def half(family: str = "llama") -> Any:
    return tiny.FAMILIES[family]().bfloat16()


def trainer_of(parallel: dict[str, Any] | None, family: str = "llama", **arguments: Any) -> Any:
    return runs.make_trainer(family, parallel, model=half(family), **arguments)


class _Gradients(TrainerCallback):
    """The gradients of each step as the optimizer is about to get them."""

    def __init__(self):
        self.steps: list[dict[str, torch.Tensor]] = []
        self.lrs: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = model.named_parameters()
        self.steps.append({name: local(p.grad).clone() for name, p in named if p.grad is not None})
        self.lrs.append(kwargs["lr_scheduler"].get_last_lr()[0])
        assert all(gradient.dtype == torch.float32 for gradient in self.steps[-1].values())


OPTIMIZERS = {"adamw_torch": ADAMW, "sgd": {"optim_args": "momentum=0.9"}, "adafactor": {}}


def replayed(optim: str) -> list[str]:
    """Parameters of which a loop with float32 copies makes other weights, of the gradients of a run."""
    callback = _Gradients()
    arguments = {**OPTIMIZERS[optim], "optim": optim}
    trainer = trainer_of(PP2, callbacks=[callback], weight_decay=0.0, **arguments)
    trainable = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    masters = {name: torch.nn.Parameter(local(p).detach().float()) for name, p in trainable.items()}
    trainer.train()
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    known = inspect.signature(type(inner)).parameters
    settings = {key: value for key, value in inner.defaults.items() if key in known}
    optimizer = type(inner)(list(masters.values()), **{**settings, "lr": 0.0, "weight_decay": 0.0})
    for gradients, lr in zip(callback.steps, callback.lrs, strict=True):
        assert gradients
        optimizer.param_groups[0]["lr"] = lr
        for name, master in masters.items():
            master.grad = gradients.get(name)
        optimizer.step()
    assert all(p.dtype == torch.bfloat16 for p in trainable.values())
    return [name for name, p in trainable.items() if not torch.equal(local(p).detach(), masters[name].bfloat16())]


@pytest.mark.distributed
@pytest.mark.parametrize("optim", runs.deep_but(OPTIMIZERS, "adamw_torch"))
def test_steps_are_those_of_a_loop_with_float32_copies_to_the_bit(optim: str):
    assert run_distributed(replayed, 2, optim) == [[], []]


def masters_of(trainer: Any) -> dict[str, torch.Tensor]:
    """What the optimizer of this rank updates of each parameter, in float32, and by how much it is off the weights."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    result = {}
    for entry in entries_of(inner):
        assert entry.dtype == torch.float32 and source_of_copy(entry).dtype == torch.bfloat16
        assert torch.equal(local(entry).bfloat16(), local(source_of_copy(entry)))
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


LITTLE = {"optim": "adamw_torch", "learning_rate": 5e-6, "adam_epsilon": 1e-2}  # updates below the weights' digits
LAYOUTS = [
    case("llama", {LM: {"dp_size": 2, "tp_size": 2, "zero_stage": 1}}, always=True, **LITTLE),
    case("paligemma", {VISION: {"freeze": "tower"}, LM: {"pp_size": 2}}, **LITTLE),
    case("llava", {LM: {"dp_size": 2, "offload_optimizer": True}}, **LITTLE),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "parallel", "optim"), LAYOUTS)
def test_the_copies_follow_the_stock_trainer_with_float32_weights(
    family: str, parallel: Any, optim: Any, tmp_path: Path
):
    start = {name: p.detach().float() for name, p in half(family).named_parameters()}
    model = half(family).float()
    want = runs.stock(family, freeze=runs.frozen(parallel), model=model, bf16=True, **optim).weights
    got = run_distributed(saved_masters, runs.ranks_of(family, parallel), tmp_path, family, parallel, **optim)[0]
    assert got and want and all(value.dtype == torch.float32 for value in got.values())
    error = sum(float((got[n] - want[n]).square().sum()) for n in got) ** 0.5
    moved = sum(float((want[n] - start[n]).square().sum()) for n in got) ** 0.5
    lost = sum(float((want[n].bfloat16().float() - want[n]).square().sum()) for n in got) ** 0.5
    assert error < 0.05 * moved, (error, moved)
    assert lost > 0.9 * moved  # which 16-bit weights can't hold


def runs_of(*layouts: dict[str, Any]) -> list[runs.Run]:
    return [runs.run_of(trainer_of({LM: layout}, **ADAMW)) for layout in layouts]


@pytest.mark.distributed
def test_without_copies_16_bit_weights_train_as_in_the_stock_trainer():
    (plain,) = run_distributed(runs_of, 2, {"dp_size": 2, **WITHOUT})[0]
    runs.assert_same_run(plain, runs.stock("llama", model=half(), **ADAMW), rtol=2e-2, atol=2e-3)


@pytest.mark.deep
@pytest.mark.distributed
def test_adapters_have_no_copies():
    adapted = {"pp_size": 2, **LORA}
    with_copies, without = run_distributed(runs_of, 2, adapted, {**adapted, **WITHOUT})[0]
    assert with_copies.logs == without.logs


# Checkpoints

SAVING = {"save_strategy": "steps", "save_steps": 2, **ADAMW}
ZERO = {LM: {"dp_size": 2, "zero_stage": 1}}
HOST = {LM: {"tp_size": 2, "offload_optimizer": True}}


def continued(folder: Path, parallel: Any, checkpoint: Path | None = None) -> tuple[runs.Run, dict]:
    """A run that saves every two steps, and what its optimizer has updated."""
    trainer = trainer_of(parallel, output_dir=str(folder), **SAVING)
    run = runs.run_of(trainer, checkpoint=None if checkpoint is None else str(checkpoint))
    return run, masters_of(trainer)


def moved(folder: Path) -> list[tuple[runs.Run, dict]]:
    """Runs on shards: straight, from there, by way of the host's memory and from there; then one in that memory."""
    middle = folder / "zero" / "checkpoint-2"
    straight = continued(folder / "zero", ZERO)
    continued(folder / "host", HOST)
    again, back = (continued(folder / "on", ZERO, start) for start in (middle, folder / "host" / "checkpoint-2"))
    return [straight, again, back, continued(folder / "away", HOST, middle)]


@pytest.mark.distributed
@pytest.mark.deep
def test_copies_move_to_any_layout(tmp_path: Path):
    (straight, masters), (again, same), (back, _), (host, _) = run_distributed(moved, 2, tmp_path, timeout=200)[0]
    assert again.logs == straight.logs and all(torch.equal(same[name], masters[name]) for name in masters)
    runs.assert_same_run(host, straight, rtol=1e-2, atol=2e-3)
    runs.assert_same_run(back, straight, rtol=1e-2, atol=2e-3)


class _Start(TrainerCallback):
    trainer: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.masters = masters_of(self.trainer)


def starts(checkpoint: Path, folder: Path | None = None) -> dict[str, torch.Tensor]:
    """The copies of this rank with which a run goes on from a checkpoint, which a run in a folder has to leave."""
    if folder is not None:
        continued(folder, PP2)
    callback = _Start()
    callback.trainer = trainer_of(PP2, callbacks=[callback], **ADAMW)
    callback.trainer.train(resume_from_checkpoint=str(checkpoint))
    return callback.masters


@pytest.mark.distributed
@pytest.mark.deep
def test_the_stock_trainer_goes_on_from_copies_and_a_plan_from_there(tmp_path: Path):
    checkpoint = tmp_path / "plan" / "checkpoint-2"
    ranks = run_distributed(starts, 2, checkpoint, tmp_path / "plan")
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    names = {n: i for g in saved["param_groups"] for i, n in zip(g["params"], g["param_names"], strict=True)}
    for found in ranks:
        assert found and all(torch.equal(value, saved["state"][names[n]]["master"]) for n, value in found.items())
    model = half()
    stock: Any = runs.stock_trainer("llama", model=model, output_dir=str(tmp_path / "stock"), **SAVING)
    stock.train(resume_from_checkpoint=str(checkpoint))
    state = next(iter(stock.optimizer.state_dict()["state"].values()))
    assert float(state["step"]) == 4 and state["exp_avg"].dtype == torch.bfloat16
    # The stock Trainer has changed the weights, and saves copies that it has not: they must not come back.
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for found in run_distributed(starts, 2, tmp_path / "stock" / "checkpoint-4"):
        assert found and all(torch.equal(value.bfloat16(), weights[name]) for name, value in found.items())


def best_loaded(folder: Path) -> int:
    """The step whose weights `load_best_model_at_end` has read, which are those of the copies."""
    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    worst = {"greater_is_better": True, "metric_for_best_model": "loss"}  # the first one
    arguments = {**SAVING, **settings, **worst, "learning_rate": 1e-2}
    trainer = trainer_of({LM: {"dp_size": 2}}, output_dir=str(folder), **arguments)
    trainer.train()
    masters_of(trainer)
    return trainer.state.best_global_step


@pytest.mark.distributed
def test_copies_follow_weights_that_are_loaded(tmp_path: Path):
    assert run_distributed(best_loaded, 2, tmp_path) == [2, 2]


class ScheduleFree(torch.optim.SGD):
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


# Sums of gradients over microbatches, chunks and replicas


def off_the_sum(parallel: dict[str, Any]) -> float:
    """How far the gradients of 32 microbatches are off the exact sum, relative to the largest of a parameter."""
    callback = _Gradients()
    sizes = {"global_batch_size": 32, "per_device_train_batch_size": 1, "data": tiny.make_dataset("llama", 32)}
    arguments = {"max_steps": 1, "max_grad_norm": 0.0, "warmup_steps": 0, "optim": "adamw_torch"}
    model = half("llama_tied")
    trainer = runs.make_trainer("llama", parallel, model=model, callbacks=[callback], **sizes, **arguments)
    exact = {}
    for name, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            exact[name] = torch.zeros(local(parameter).shape, dtype=torch.float64)

            def add(gradient: torch.Tensor, name: str = name) -> None:
                exact[name] += local(gradient).double()

            parameter.register_hook(add)
    trainer.train()
    engine = trainer.engine
    scale = max(trainer._run.steps.totals.num_targets, 1)
    errors = []
    for name, want in exact.items():
        (shard,) = engine.shards[name].on_rank(engine.rank)
        is_whole = engine.plan.modules[LM].tp_size > 1 and name not in engine.partial
        if len(shard.holders) > 1 and not is_whole:
            dist.all_reduce(want)
        kept = callback.steps[0][name].double() * scale
        errors.append(float((kept - want).abs().max() / want.abs().max()))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    return max(errors)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "sizes", [{"dp_size": 2}, deep({"tp_size": 2}), deep({"pp_size": 2, "activation_checkpointing": True})]
)
def test_gradients_of_bfloat16_weights_add_up_in_float32(sizes: dict[str, Any]):
    assert max(run_distributed(off_the_sum, 2, {LM: sizes})) < 2e-6  # sums in bfloat16 are off by more than 3e-3
