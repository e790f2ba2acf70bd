"""`Program`: the ordered actions of all ranks, with a text form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .action_lists import ProgramActions, TaskTimes, checksum
from .actions import Action, Task, TaskKey

_TIMES = re.compile(r"(.*) \[(\S+), (\S+)\]")


@dataclass(frozen=True)
class Program:
    """The ordered actions of every rank for one global batch."""

    actions: Mapping[int, tuple[Action, ...]]
    times_ms: Mapping[Task, tuple[float, float]] = field(default_factory=dict)  # predicted start and end

    @cached_property
    def backward_keys(self) -> frozenset[TaskKey]:
        """The keys of all tasks that have a backward."""
        return frozenset(
            action.task.key
            for actions in self.actions.values()
            for action in actions
            if action.op == "bwd" and action.task is not None
        )

    @cached_property
    def checksum(self) -> int:
        """Checksum of the ordered actions of all ranks, without times; the same in every process."""
        return checksum(self.actions)

    def replicas(self, module: str) -> frozenset[int]:
        """Indices of the replicas of a module with tasks in this program."""
        if isinstance(self.actions, ProgramActions):
            return self.actions.replicas(module)
        lists = {id(actions): actions for actions in self.actions.values()}.values()
        tasks = (action.task for actions in lists for action in actions)
        return frozenset(task.replica for task in tasks if task is not None and task.module == module)

    def has_backward(self, task: Task) -> bool:
        """Returns whether a chunk has a backward on its stage; if not, its forward needs no autograd graph."""
        return task.key in self.backward_keys

    def of_rank(self, rank: int) -> Program:
        """The program of a single rank: its actions, with their times."""
        actions = self.actions.get(rank, ())
        tasks = [action.task for action in actions if action.task is not None]
        if isinstance(self.times_ms, TaskTimes):
            return Program({rank: actions}, self.times_ms.of_tasks(tasks))
        return Program({rank: actions}, {task: self.times_ms[task] for task in tasks if task in self.times_ms})

    def dump(self) -> str:
        """The program as text: a line `rank n` for each rank, followed by one line per action."""
        lines = []
        for rank in sorted(self.actions):
            lines.append(f"rank {rank}")
            for action in self.actions[rank]:
                times = self.times_ms.get(action.task) if action.task is not None else None
                lines.append(f"  {action}" if times is None else f"  {action} [{times[0]!r}, {times[1]!r}]")
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Program:
        """Parses the output of [`~Program.dump`]. Raises `ValueError` for anything else."""
        actions: dict[int, list[Action]] = {}
        times: dict[Task, tuple[float, float]] = {}
        current: list[Action] | None = None
        for line in text.splitlines():
            stripped = line.strip()
            if not stripped:
                continue
            if stripped.startswith("rank "):
                current = actions.setdefault(int(stripped.removeprefix("rank ")), [])
                continue
            if current is None:
                raise ValueError(f"`{stripped}` stands before the first rank. Start the text with a line `rank 0`.")
            match = _TIMES.fullmatch(stripped)
            action = Action.parse(match[1] if match else stripped)
            if match and action.task is not None:
                times[action.task] = (float(match[2]), float(match[3]))
            current.append(action)
        return cls({rank: tuple(rank_actions) for rank, rank_actions in actions.items()}, times)
