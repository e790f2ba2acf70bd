"""The results of one step on a rank: losses, times, work."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from ..schedule.actions import Task
from .work import ModuleWork


@dataclass(frozen=True)
class TimedTask:
    """A task as it ran: start and end in ms since the step's start on this rank."""

    task: Task
    start_ms: float
    end_ms: float


@dataclass
class StepResult:
    """The results of one step on this rank."""

    # forward of the last stage -> (sum over target tokens, number of target tokens)
    losses: dict[Task, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    timeline: list[TimedTask] = field(default_factory=list)
    duration_ms: float = 0.0  # from the first action to the last
    step_ms: float = 0.0  # from the first action to the end of the gradient sums
    started_s: float = field(default_factory=time.time)  # by the host's clock
    work: dict[str, ModuleWork] = field(default_factory=dict)  # by module, counted on one rank of those with the same
