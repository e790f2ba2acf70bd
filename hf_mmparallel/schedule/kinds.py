"""
The kinds of work that a stage does with a chunk, each a row.

What makes, orders, times, proves, sends, frees, writes down or draws tasks reads these rows. Only the executor has a
function for each kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from ..plan import StageKey

# Parts of the work of a layer: its forward, the gradient of its input, those of weights of linear layers, which can be
# put off, and of others, and its repeated forward under activation checkpointing.
Work = Literal["forward", "inputs", "weights", "others", "again"]
WORK: tuple[Work, ...] = get_args(Work)

Direction = Literal[0, 1]
FORWARD: Direction = 0  # from the first layer to the last
BACKWARD: Direction = 1  # their gradients, from the last layer to the first


@dataclass(frozen=True, slots=True)
class TaskKind:
    """A kind of work; what it has to do with other kinds concerns the same chunk on the same stage."""

    name: str  # that of `torch.distributed.pipelining`
    word: str  # in programs
    label: str  # in run logs and sentences
    message: Literal["act", "grad"] | None  # what it receives from other stages, and sends to them
    direction: Direction  # in which it passes through the layers, or in which the kind does that it belongs to
    after: str | None = None  # the word of the kind that it follows; a chunk has one kind that follows none
    work: tuple[Work, ...] = ()  # what of the work of its layers it does, from which its time follows
    runs_layers: bool = True  # whether it passes through the layers, whose weights it needs
    of: Literal["all", "whole", "split"] = "all"  # chunks that run it: all, or those whose backward is whole or split
    # whether the tasks of a stage run in the order of its chunks, not in the order in which they become ready; of one
    # kind at most
    in_order: bool = False
    fills: bool = False  # its tasks run in the order in which they become ready, where nothing else can run
    opens: bool = False  # it saves activations; from its first task on a microbatch is in flight on the stage
    closes: bool = False  # it frees them; after its last task a microbatch is no longer in flight
    # gradients of parameters are summed over ranks after the last task of these kinds, with which all that a
    # microbatch holds is gone, too
    adds_gradients: bool = False
    digits: str = "0123456789"  # of microbatches in charts of characters
    tint: float = 1.0  # of the color of its module in charts
    ink: str = "white"  # of the number on the tint


# word -> kind; the place of a kind is its number in `TaskGraph.kind` and in checksums
KINDS: Mapping[str, TaskKind] = {
    kind.word: kind
    for kind in (
        TaskKind(
            *("F", "fwd", "forward", "act", FORWARD),
            work=("forward",),
            in_order=True,
            opens=True,
            tint=0.38,
            ink="#1B1B1B",
        ),
        TaskKind(
            *("B", "bwd", "backward", "grad", BACKWARD),
            after="fwd",
            work=("inputs", "weights", "others", "again"),
            of="whole",
            closes=True,
            adds_gradients=True,
            digits="abcdefghij",
        ),
        # a backward in two parts (Qi et al. 2023, zero bubble pipeline parallelism, section 2)
        TaskKind(
            *("I", "bwd_input", "input gradient", "grad", BACKWARD),
            after="fwd",
            work=("inputs", "others", "again"),
            of="split",
            closes=True,
            digits="abcdefghij",
        ),
        TaskKind(
            *("W", "bwd_weight", "weight gradient", None, BACKWARD),
            after="bwd_input",
            work=("weights",),
            runs_layers=False,
            of="split",
            fills=True,
            adds_gradients=True,
            digits="ABCDEFGHIJ",
            tint=0.7,
            ink="#1B1B1B",
        ),
    )
}

# The columns of the table, by the number of a kind.
IN_ORDER, FILLS, OPENS, CLOSES, ADDS_GRADIENTS = (
    np.array([getattr(kind, name) for kind in KINDS.values()])
    for name in ("in_order", "fills", "opens", "closes", "adds_gradients")
)
# the kinds that do all work of a forward and of a backward, by direction
WHOLE_PASSES = tuple(kind for kind in KINDS.values() if kind.runs_layers and kind.of != "split")
# the kinds that add gradients of weights, in stages with whole and with split backwards
LAST_PASSES = tuple(next(k for k in KINDS.values() if k.adds_gradients and k.of == of) for of in ("whole", "split"))
SENDS_GRADIENTS = np.array([kind.message == "grad" for kind in KINDS.values()])


# The elements of a program, each with a text form: tasks, messages between tasks, and the actions of a rank.

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
