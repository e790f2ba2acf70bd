"""
The kinds of work that a stage does with a chunk, each a row.

What makes, orders, times, proves, sends, frees, writes down or draws tasks reads these rows. Only the executor has a
function for each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

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
