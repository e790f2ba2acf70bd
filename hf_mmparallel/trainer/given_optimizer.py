"""An optimizer that a user has made for the whole model: it gets what this rank holds of each group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from ..plan import ModulePlugin
from ..runtime.engine import ParallelEngine
from .module_groups import check_given


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
    """
    Gives an optimizer, in place, the parameters that this rank holds of the named ones of each group; all ranks have
    the same groups, some of them empty.
    """
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
