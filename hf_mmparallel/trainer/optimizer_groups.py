"""The optimizer's groups, those of modules and of an optimizer of the user, and its state as for the whole model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from .._files import readable
from ..plan import ModelSpec, ModulePlugin
from ..runtime.engine import ParallelEngine
from ..runtime.optimizer_checkpoint import load_optimizer, read_state
from ..runtime.optimizer_slices import MODULE, STATE
from ..runtime.sharded_files import FSDP_OPTIMIZER
from ..world import World


def own_settings(modules: Mapping[str, ModulePlugin]) -> dict[str, dict[str, float]]:
    """Module -> the settings of its groups, of those that have any."""
    settings = {
        name: {"lr": module.learning_rate, "weight_decay": module.weight_decay} for name, module in modules.items()
    }
    given = {name: {key: v for key, v in own.items() if v is not None} for name, own in settings.items()}
    return {name: own for name, own in given.items() if own}


def split_names(
    groups: Sequence[Sequence[str]], spec: ModelSpec, modules: Mapping[str, ModulePlugin]
) -> list[list[str]]:
    """The names of parameters in the groups that [`split_groups`] makes of `groups`."""
    owner = _owners(spec, modules)
    rest = [[name for name in names if name not in owner] for names in groups]
    return [
        *rest,
        *([n for n in names if owner.get(n) == module] for module in own_settings(modules) for names in groups),
    ]


def split_groups(
    optimizer: Any, model: nn.Module, spec: ModelSpec, modules: Mapping[str, ModulePlugin], decayed: Collection[str]
) -> None:
    """
    Moves the parameters of modules with settings of their own to groups behind the others, in place: one of each group
    for each such module, with a weight decay of its own if it is one of parameters that decay. On ranks without any of
    a module the groups are empty, so that all ranks know its learning rate.
    """
    own, owner = own_settings(modules), _owners(spec, modules)
    groups: list[dict[str, Any]] = optimizer.param_groups
    if any(MODULE in group for group in groups):  # made before, as in a second training
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_groups = [[(names[id(parameter)], parameter) for parameter in group["params"]] for group in groups]
    added = []
    for module, settings in own.items():
        for group, members in zip(groups, of_groups, strict=True):
            decays = any(name in decayed for name, _ in members)
            kept = {key: value for key, value in settings.items() if key != "weight_decay" or decays}
            params = [parameter for name, parameter in members if owner.get(name) == module]
            added.append({**group, **kept, "params": params, MODULE: module})
    for group, members in zip(groups, of_groups, strict=True):
        group["params"] = [parameter for name, parameter in members if name not in owner]
    groups += added


def check_given(given: Mapping[str, Any], modules: Mapping[str, ModulePlugin]) -> None:
    """Raises `ValueError` for an optimizer given to a Trainer beside modules with settings of their own."""
    for name, own in own_settings(modules).items():
        if given.get("optimizers", (None, None))[0] is not None:
            settings = " and ".join("`learning_rate`" if key == "lr" else f"`{key}`" for key in own)
            raise ValueError(
                f"{settings} of `{name}` can't be used with `optimizers`, which has groups of its own. Give the "
                "module a group there, or use `optimizer_cls_and_kwargs`."
            )


def check_unscheduled(optimizer: torch.optim.Optimizer, modules: Mapping[str, ModulePlugin]) -> None:
    """Raises `ValueError` for modules with settings of their own beside a schedule that knows no groups of theirs."""
    for name in own_settings(modules):
        if any("initial_lr" in group for group in optimizer.param_groups):
            raise ValueError(
                f"`learning_rate` or `weight_decay` of `{name}` gives the optimizer groups that its schedule does not "
                "know. Make the schedule after `prepare`."
            )


def learning_rates(optimizer: Any) -> dict[str, float]:
    return {f"learning_rate/{g[MODULE]}": float(g["lr"]) for g in optimizer.param_groups if MODULE in g}


def settings_lines(modules: Mapping[str, ModulePlugin]) -> list[str]:
    words = {"lr": "learning rate", "weight_decay": "weight decay"}
    return [
        f"`{name}` has a {' and a '.join(f'{words[key]} of {value:g}' for key, value in own.items())} of its own."
        for name, own in own_settings(modules).items()
    ]


def _owners(spec: ModelSpec, modules: Mapping[str, ModulePlugin]) -> dict[str, str]:
    """Parameter -> its module, of modules with settings of their own."""
    return {parameter.name: name for name in own_settings(modules) for parameter in spec.modules[name].parameters}


# An optimizer that a user has made for the whole model: it gets what this rank holds of each group.


def check_optimizer(optimizer: Any) -> None:
    """Raises `ValueError` for what is no optimizer of torch that has not stepped yet."""
    if isinstance(optimizer, AcceleratedOptimizer):
        raise ValueError("The optimizer has been prepared by `accelerator.prepare`. Give the optimizer itself.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"A `{type(optimizer).__name__}` is no `torch.optim.Optimizer`. Give one of `model.parameters()`, or a "
            "function that makes it from the model."
        )
    if any(optimizer.state.values()):
        raise ValueError(
            f"This `{type(optimizer).__name__}` has state already, which can't be divided among ranks. Give a new one "
            "of an optimizer that makes its state in the first step, and load saved state from a checkpoint."
        )


def given_optimizer(
    given: Mapping[str, Any], args: Any, modules: Mapping[str, ModulePlugin]
) -> torch.optim.Optimizer | None:
    """The optimizer given to a Trainer, if any; raises `ValueError` for one that can't be used with its arguments."""
    check_given(given, modules)
    optimizer = given.get("optimizers", (None, None))[0]
    if optimizer is None:
        return None
    check_optimizer(optimizer)
    if args.resilience is not None:
        raise ValueError(
            "`optimizers` can't be used with `resilience`, which makes the optimizer anew when ranks are lost. Use "
            "`optimizer_cls_and_kwargs`."
        )
    return optimizer


def group_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Names the trained parameters in each group; raises `ValueError` for one that is not the whole model's."""
    named = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        strange = next((p for p in group["params"] if id(p) not in named), None)
        if strange is not None:
            raise ValueError(
                f"Group {index} of the optimizer has a parameter of shape {tuple(strange.shape)} that is not the "
                "model's. Make it from `model.parameters()` of the very model that is given; with `peft_config` in "
                "the plan, or a model by its id, use `optimizer_cls_and_kwargs`, or a function of the model in "
                "`prepare`."
            )
    return [
        [named[id(p)][0] for p in group["params"] if named[id(p)][1].requires_grad] for group in optimizer.param_groups
    ]


def give_part(optimizer: torch.optim.Optimizer, groups: list[list[str]], engine: ParallelEngine) -> None:
    """Gives an optimizer, in place, what this rank holds of each group; all ranks have the same groups."""
    named = dict(engine.model.named_parameters())
    optimizer.state.clear()
    for names, group in zip(groups, optimizer.param_groups, strict=True):
        held = [name for name in names if engine.sharded.holds(name)]
        group["params"] = [named[name] for name in held]
        if "param_names" in group:
            group["param_names"] = held


def check_schedule(scheduler: Any) -> None:
    """Raises `ValueError` for a schedule that `accelerator.prepare` has wrapped."""
    if isinstance(scheduler, AcceleratedScheduler):
        raise ValueError(
            "The schedule has been prepared by `accelerator.prepare`, and steps once for each process. Give the "
            "schedule itself, and step it once after each step of the optimizer."
        )


# The state of optimizer and schedule as the stock Trainer would have it for the whole model.

SCHEDULER = "scheduler.pt"


def stock_groups(decayed: Iterable[str], model: nn.Module) -> list[list[str]]:
    """
    Returns the names of trained parameters in the groups of `Trainer.create_optimizer`: with weight decay (`decayed`,
    of `Trainer.get_decay_parameter_names`), and without. The model is whole, maybe on the meta device.
    """
    decayed = set(decayed)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [[name for name in trained if name in decayed], [name for name in trained if name not in decayed]]


def complete_state(optimizer: Any) -> None:
    """Gives parameters of Adam or AdamW without a gradient yet their first state."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    found = next(((p, state) for p, state in optimizer.state.items() if state), None)
    if found is None or not isinstance(optimizer, torch.optim.Adam):
        return
    updated, known = found
    # from a checkpoint of FSDP2 without the state of a parameter torch loads none
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        if not optimizer.state.get(parameter):
            optimizer.state[parameter] = {
                name: torch.zeros_like(parameter if value.shape == updated.shape else value, dtype=value.dtype)
                for name, value in known.items()
            }


def is_by_name(folder: str | None, model: nn.Module) -> bool:
    """Whether one process reads a checkpoint by names: one that a plan has written, of this very model."""
    # without one of the files the stock Trainer leaves both alone
    if folder is None or not all((Path(folder) / name).is_file() for name in (SCHEDULER, STATE)):
        return False
    groups = read_state(Path(folder) / STATE)["param_groups"]
    names = [name for group in groups for name in group.get("param_names", ())]
    # what `peft` has wrapped has other names, but the same order
    return bool(names) and set(names) <= {name for name, _ in model.named_parameters()}


def load_optimizer_and_scheduler(
    optimizer: Any, scheduler: Any, model: nn.Module, folder: Path, groups: Sequence[Sequence[str]], world: World
) -> None:
    """
    Reads the state of a plan's checkpoint or of the stock Trainer's, also under FSDP2 or DeepSpeed, into this rank's
    optimizer and schedule. Called by all ranks, which raise `ValueError` for state that can't be read, or of another
    model.
    """

    def read() -> dict[str, Any]:
        with readable(folder / SCHEDULER):
            return torch.load(folder / SCHEDULER, weights_only=True)

    state = world.raise_together(read)
    load_optimizer(optimizer, model, folder, groups, world)
    if not any((folder / name).is_file() for name in (STATE, FSDP_OPTIMIZER)):
        _set_rates(optimizer.param_groups, state)
    scheduler.load_state_dict(scheduler_of_groups(state, optimizer.param_groups, scheduler.state_dict()))


def _set_rates(groups: Sequence[dict[str, Any]], state: Mapping[str, Any]) -> None:
    """Gives groups the learning rates of a saved schedule, where the optimizer's file has none that can be read."""
    for setting, name in (("lr", "_last_lr"), ("initial_lr", "base_lrs")):
        rates = state.get(name) or []
        for index, group in enumerate(groups if rates else ()):
            group[setting] = rates[min(index, len(rates) - 1)]


def scheduler_of_groups(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], own: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """A schedule's state with lists that have an entry for each group; settings that groups lack come from `own`."""
    result = dict(state)
    settings = {"_last_lr": "lr", "base_lrs": "initial_lr"}
    num_saved = len(state.get("_last_lr") or state.get("base_lrs") or ())  # groups; other lists, as of the schedules
    # in a `SequentialLR`, have nothing to do with them
    for name, value in state.items():
        setting = settings.get(name)
        if setting and all(setting in group for group in groups):
            result[name] = [group[setting] for group in groups]
        elif isinstance(value, list) and len(value) == num_saved != len(groups):
            result[name] = own.get(name, (value[:1] or [None]) * len(groups))
    return result
