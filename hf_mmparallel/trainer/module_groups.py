"""Modules with a learning rate or weight decay of their own: their parameters are groups of the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..plan import ModelSpec, ModulePlugin
from ..runtime.optimizer_slices import MODULE


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
    """The learning rates of modules with settings of their own, for the log."""
    return {f"learning_rate/{g[MODULE]}": float(g["lr"]) for g in optimizer.param_groups if MODULE in g}


def settings_lines(modules: Mapping[str, ModulePlugin]) -> list[str]:
    """A sentence for each module with settings of its own."""
    words = {"lr": "learning rate", "weight_decay": "weight decay"}
    return [
        f"`{name}` has a {' and a '.join(f'{words[key]} of {value:g}' for key, value in own.items())} of its own."
        for name, own in own_settings(modules).items()
    ]


def _owners(spec: ModelSpec, modules: Mapping[str, ModulePlugin]) -> dict[str, str]:
    """Parameter -> its module, of modules with settings of their own."""
    return {parameter.name: name for name in own_settings(modules) for parameter in spec.modules[name].parameters}
