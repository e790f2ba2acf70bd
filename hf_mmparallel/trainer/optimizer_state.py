"""The state of optimizer and schedule as the stock Trainer would have it for the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._files import readable
from ..runtime.optimizer_loading import load_optimizer, read_state
from ..runtime.optimizer_slices import STATE
from ..runtime.sharded_files import FSDP_OPTIMIZER
from ..world import World

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
    """
    Gives parameters of Adam or AdamW without a gradient yet, as of a layer that no forward reads, their first state.
    """
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
    """
    Whether one process reads a checkpoint by the names of parameters: one that a plan has written, of this very model.
    """
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
    state = world.raise_together(lambda: _read_scheduler(folder / SCHEDULER))
    load_optimizer(optimizer, model, folder, groups, world)
    if not any((folder / name).is_file() for name in (STATE, FSDP_OPTIMIZER)):
        _set_rates(optimizer.param_groups, state)
    scheduler.load_state_dict(_with_groups(state, optimizer.param_groups, scheduler.state_dict()))


def _read_scheduler(path: Path) -> dict[str, Any]:
    with readable(path):
        return torch.load(path, weights_only=True)


def _set_rates(groups: Sequence[dict[str, Any]], state: Mapping[str, Any]) -> None:
    """Gives groups the learning rates of a saved schedule, where the optimizer's file has none that can be read."""
    for setting, name in (("lr", "_last_lr"), ("initial_lr", "base_lrs")):
        rates = state.get(name) or []
        for index, group in enumerate(groups if rates else ()):
            group[setting] = rates[min(index, len(rates) - 1)]


def scheduler_of_groups(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the state of rank 0's schedule with an entry for each group of the whole model, by their settings."""
    return _with_groups(state, groups, {})


def _with_groups(
    state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], own: Mapping[str, Any]
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
