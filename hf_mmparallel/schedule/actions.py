"""The vocabulary of a program: tasks, messages between tasks, and the actions of a rank, each with a text form."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Kind = Literal["fwd", "bwd"]
Op = Literal["fwd", "bwd", "send", "recv", "sync"]
TaskKey = tuple[str, int, int, int, int]
StageKey = tuple[str, int, int]

_TASK = re.compile(r"(fwd|bwd) (\S+)\.r(\d+)\.s(\d+) mb(\d+)\.c(\d+)")
_TIMES = re.compile(r"(.*) \[(\S+), (\S+)\]")


class ProgramError(ValueError):
    """A program that does not do the work of its step exactly once, in a possible order."""


class DeadlockError(ProgramError):
    """A program whose ranks wait for each other in a circle."""


@dataclass(frozen=True, order=True, slots=True)
class Task:
    """
    The forward or the backward of one chunk on one stage. It occupies all ranks of the stage at once.

    Its text form is `fwd vision.r0.s1 mb3.c0`.

    Args:
        kind (`str`): `"fwd"` or `"bwd"`.
        module (`str`): The module's name.
        replica (`int`): Its data-parallel copy.
        stage (`int`): The pipeline stage.
        microbatch (`int`): Index of the replica's microbatch.
        chunk (`int`, *optional*, defaults to 0): Index of the microbatch's chunk.
    """

    kind: Kind
    module: str
    replica: int
    stage: int
    microbatch: int
    chunk: int = 0

    @property
    def key(self) -> TaskKey:
        """What the forward and the backward of a chunk on a stage have in common."""
        return self.module, self.replica, self.stage, self.microbatch, self.chunk

    @property
    def stage_key(self) -> StageKey:
        return self.module, self.replica, self.stage

    def __str__(self) -> str:
        return f"{self.kind} {self.module}.r{self.replica}.s{self.stage} mb{self.microbatch}.c{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Reads the text form. Raises `ValueError` for anything else."""
        match = _TASK.fullmatch(text)
        if match is None:
            raise ValueError(f"`{text}` is not a task. A task looks like `fwd vision.r0.s1 mb3.c0`.")
        kind, module, *numbers = match.groups()
        return cls(kind, module, *map(int, numbers))  # type: ignore[arg-type]


@dataclass(frozen=True, order=True, slots=True)
class Message:
    """
    What one task hands to another: activations from forward to forward, gradients from backward to backward.

    It goes from the ranks of the source's stage to the ranks of the target's stage; how its rows split over them is
    decided when the program runs. Its text form is `act fwd vision.r0.s0 mb0.c0 -> fwd language_model.r0.s0 mb0.c0`.

    Args:
        kind (`str`): `"act"` or `"grad"`.
        source (`Task`): The task that produces it.
        target (`Task`): The task that needs it.
    """

    kind: Literal["act", "grad"]
    source: Task
    target: Task

    @property
    def crosses_boundary(self) -> bool:
        """Whether it goes from one module to another, rather than between stages of one."""
        return self.source.module != self.target.module

    def __str__(self) -> str:
        return f"{self.kind} {self.source} -> {self.target}"

    @classmethod
    def parse(cls, text: str) -> Message:
        """Reads the text form. Raises `ValueError` for anything else."""
        kind, _, tasks = text.partition(" ")
        source, arrow, target = tasks.partition(" -> ")
        if kind not in ("act", "grad") or not arrow:
            raise ValueError(
                f"`{text}` is not a message. A message looks like "
                "`act fwd vision.r0.s0 mb0.c0 -> fwd language_model.r0.s0 mb0.c0`."
            )
        return cls(kind, Task.parse(source), Task.parse(target))  # type: ignore[arg-type]


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """
    One step of one rank.

    `fwd` and `bwd` run a task, after waiting for the messages to it. `send` and `recv` never block: `send` hands the
    tensor to the transport and `recv` posts the buffer. A rank that is in the source and in the target of a message
    has both actions, `send` first. `sync` sums the gradients of a [`SyncGroup`] over its ranks.

    Args:
        op (`str`): `"fwd"`, `"bwd"`, `"send"`, `"recv"` or `"sync"`.
        task (`Task`, *optional*): Of `fwd` and `bwd`.
        message (`Message`, *optional*): Of `send` and `recv`.
        index (`int`, *optional*): Of `sync`: the group's place in the list of groups.
    """

    op: Op
    task: Task | None = None
    message: Message | None = None
    index: int | None = None

    @classmethod
    def run(cls, task: Task) -> Action:
        return cls(task.kind, task)

    def __str__(self) -> str:
        if self.task is not None:
            return str(self.task)
        return f"{self.op} {self.index if self.message is None else self.message}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads the text form. Raises `ValueError` for anything else."""
        op, _, rest = text.partition(" ")
        if op in ("fwd", "bwd"):
            return cls.run(Task.parse(text))
        if op in ("send", "recv"):
            return cls(op, message=Message.parse(rest))  # type: ignore[arg-type]
        if op == "sync" and rest.isdecimal():
            return cls("sync", index=int(rest))
        raise ValueError(f"`{text}` is not an action. Actions start with `fwd`, `bwd`, `send`, `recv` or `sync`.")


@dataclass(frozen=True)
class Program:
    """
    The ordered actions of every rank for one global batch.

    Args:
        actions (`Mapping[int, tuple[Action, ...]]`): Rank -> its actions.
        times_ms (`Mapping[Task, tuple[float, float]]`, *optional*): Task -> its predicted start and end.
    """

    actions: Mapping[int, tuple[Action, ...]]
    times_ms: Mapping[Task, tuple[float, float]] = field(default_factory=dict)

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
        """Of the actions of all ranks in their order, without times; the same in every process."""
        numbers: dict[str, int] = {}
        known: dict[int, int] = {}  # ranks share the objects, whose texts take longer than all else
        rows: dict[int, int] = {}
        lists: dict[tuple[int, ...], int] = {}
        places = array("q")
        for rank in sorted(self.actions):
            row = self.actions[rank]
            if id(row) not in rows:
                for action in row:
                    if id(action) not in known:
                        known[id(action)] = numbers.setdefault(str(action), len(numbers))
                rows[id(row)] = lists.setdefault(tuple(known[id(action)] for action in row), len(lists))
            places.extend((rank, rows[id(row)]))
        digest = hashlib.blake2b(places.tobytes(), digest_size=8)
        for row in lists:
            digest.update(array("q", [-1, *row]).tobytes())
        digest.update("\n".join(numbers).encode())
        return int.from_bytes(digest.digest(), "big") >> 1

    def replicas(self, module: str) -> frozenset[int]:
        """The replicas of a module that its ranks work for."""
        rows = {id(row): row for row in self.actions.values()}.values()
        tasks = (action.task for row in rows for action in row)
        return frozenset(task.replica for task in tasks if task is not None and task.module == module)

    def has_backward(self, task: Task) -> bool:
        """
        Whether the chunk of `task` has a backward on its stage. Where it has none the forward needs no graph, and
        what it sends needs no gradient.
        """
        return task.key in self.backward_keys

    def of_rank(self, rank: int) -> Program:
        """The part that one rank needs to run: its own actions, with their times."""
        actions = self.actions.get(rank, ())
        tasks = [action.task for action in actions if action.task is not None]
        return Program({rank: actions}, {task: self.times_ms[task] for task in tasks if task in self.times_ms})

    def dump(self) -> str:
        """The program as text, one action a line under a line for each rank."""
        lines = []
        for rank in sorted(self.actions):
            lines.append(f"rank {rank}")
            for action in self.actions[rank]:
                times = self.times_ms.get(action.task) if action.task is not None else None
                lines.append(f"  {action}" if times is None else f"  {action} [{times[0]!r}, {times[1]!r}]")
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Program:
        """Reads what [`~Program.dump`] writes. Raises `ValueError` for anything else."""
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
        return cls({rank: tuple(row) for rank, row in actions.items()}, times)
