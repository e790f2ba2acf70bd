"""The elements of a program, each with a text form: tasks, messages between tasks, and the actions of a rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ..plan import StageKey
from .kinds import KINDS, TaskKind

TaskKey = tuple[str, int, int, int, int]

_TASK = re.compile(rf"({'|'.join(KINDS)}) (\S+)\.r(\d+)\.s(\d+) mb(\d+)\.c(\d+)")


class ProgramError(ValueError):
    """A program that does not perform each action of its step exactly once, in a valid order."""


@dataclass(frozen=True, order=True, slots=True)
class Task:
    """Work of one kind on a chunk on all ranks of a stage at once; as text `fwd vision.r0.s1 mb3.c0`."""

    kind: str  # the word of a row of `KINDS`
    module: str
    replica: int  # data-parallel replica of the module
    stage: int  # pipeline stage of the replica
    microbatch: int  # index in the replica
    chunk: int = 0  # index in the microbatch

    @property
    def key(self) -> TaskKey:
        """Identifier shared by all work on a chunk on a stage."""
        return self.module, self.replica, self.stage, self.microbatch, self.chunk

    @property
    def stage_key(self) -> StageKey:
        return self.module, self.replica, self.stage

    @property
    def row(self) -> TaskKind:
        """The row of its kind."""
        return KINDS[self.kind]

    def __str__(self) -> str:
        return f"{self.kind} {self.module}.r{self.replica}.s{self.stage} mb{self.microbatch}.c{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """Parses the text form. Raises `ValueError` for anything else."""
        match = _TASK.fullmatch(text)
        if match is None:
            raise ValueError(f"`{text}` is not a task. A task looks like `fwd vision.r0.s1 mb3.c0`.")
        kind, module, *numbers = match.groups()
        return cls(kind, module, *map(int, numbers))  # type: ignore[arg-type]


@dataclass(frozen=True, order=True, slots=True)
class Message:
    """
    Activations from forward to forward, or gradients from backward to backward, between the ranks of two stages.

    The tokens that each pair of ranks exchanges are determined when the program runs. Its text form is
    `act fwd vision.r0.s0 mb0.c0 -> fwd language_model.r0.s0 mb0.c0`.
    """

    kind: Literal["act", "grad"]
    source: Task
    target: Task

    @property
    def crosses_boundary(self) -> bool:
        """Whether it goes from one module to another, rather than between stages of one module."""
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

    The word of a kind of task waits for the messages to a task and runs it. `send` and `recv` never block: `send`
    passes the tensor to the transport, and `recv` posts the buffer. A rank in both the source and the target of a
    message has both actions, `send` first. `sync` sums the gradients of a [`SyncGroup`] over its ranks.
    """

    op: str  # the word of a kind of task, or `send`, `recv`, `sync`
    task: Task | None = None  # that is run
    message: Message | None = None  # of `send` and `recv`
    index: int | None = None  # of `sync`: the group's index in the list of gradient sums

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
        if op in KINDS:
            return cls.run(Task.parse(text))
        if op in ("send", "recv"):
            return cls(op, message=Message.parse(rest))  # type: ignore[arg-type]
        if op == "sync" and rest.isdecimal():
            return cls("sync", index=int(rest))
        raise ValueError(
            f"`{text}` is not an action. Actions start with one of: {', '.join([*KINDS, 'send', 'recv', 'sync'])}."
        )
