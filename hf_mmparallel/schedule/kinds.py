"""
The kinds of work that a stage does with a chunk, each a row.

What makes, orders, times, proves, sends, frees, writes down or draws tasks reads these rows. Only the executor has a
function for each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

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
    runs_layers: bool = True  # whether it passes through the layers; what does not takes no time
    for_gradients: bool = False  # only what has a gradient runs it; else every chunk in training
    # whether the tasks of a stage run in the order of its chunks, not in the order in which they become ready; of one
    # kind at most
    in_order: bool = False
    opens: bool = False  # it saves activations; from its first task on a microbatch is in flight on the stage
    closes: bool = False  # it frees them; after its last task a microbatch is no longer in flight
    adds_gradients: bool = False  # gradients of parameters are summed over ranks after the last task of these kinds
    digits: str = "0123456789"  # of microbatches in charts of characters
    tint: float = 1.0  # of the color of its module in charts
    ink: str = "white"  # of the number on the tint


# word -> kind; the place of a kind is its number in `TaskGraph.kind` and in checksums
KINDS: Mapping[str, TaskKind] = {
    kind.word: kind
    for kind in (
        TaskKind("F", "fwd", "forward", "act", FORWARD, in_order=True, opens=True, tint=0.38, ink="#1B1B1B"),
        TaskKind(
            *("B", "bwd", "backward", "grad", BACKWARD),
            after="fwd",
            for_gradients=True,
            closes=True,
            adds_gradients=True,
            digits="abcdefghij",
        ),
    )
}

# The columns of the table, by the number of a kind.
IN_ORDER, OPENS, CLOSES, ADDS_GRADIENTS, RUNS_LAYERS, DIRECTION = (
    np.array([getattr(kind, name) for kind in KINDS.values()])
    for name in ("in_order", "opens", "closes", "adds_gradients", "runs_layers", "direction")
)
SENDS_GRADIENTS = np.array([kind.message == "grad" for kind in KINDS.values()])
