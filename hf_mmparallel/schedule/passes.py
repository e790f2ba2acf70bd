"""
The actions inside the joint tasks of a stage: gathering, computing and freeing layers, and summing their gradients.

A *pass* is a joint task as all ranks see it that divide the parameters of its stage (ZeRO-2 and ZeRO-3). Its actions
depend on nothing but what all of these ranks know, so that each of them issues the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Generic, Literal, TypeVar

from .kinds import BACKWARD, FORWARD, Direction, TaskKind

REST = -1  # parameters that are in no layer: embeddings, the last norm, the head, the projector
# layers at the end of a pass that stay gathered for one in the other direction; while a layer is computed the next one
# is gathered, so that two are there anyway
KEPT_LAYERS = 2


@dataclass(frozen=True, slots=True)
class PassAction:
    """An action on one layer of a stage."""

    # `gather` starts an all-gather of weights, `compute` waits for it and for the layer's input, `free` takes the
    # memory of the weights, `sum` starts a reduce-scatter of gradients
    op: Literal["gather", "compute", "free", "sum"]
    layer: int  # index in the stage, or `REST`
    run: int = 0  # of several forwards through the layers in one task, which one

    def __str__(self) -> str:
        return f"{self.op} {'rest' if self.layer == REST else self.layer}"


@lru_cache(maxsize=1024)
def pass_actions(
    direction: Direction,
    num_layers: int,
    num_runs: int = 1,  # forwards through the layers in one task, one for each modality
    *,
    gathers: bool = True,  # whether weights are divided (ZeRO-3) and needed; if not, gradients only
    sums: bool = True,  # whether gradients are summed, in a backward
    reshards: bool = True,  # whether each pass frees layers; if not, the last one does, and the first gathers
    first_backward: int = 0,  # neither the layers before it nor anything before them is trained
    previous: Direction | None = None,  # of the stage's previous pass in the step; `None` for the first one
    following: Direction | None = None,  # of its next pass; `None` for the last one
) -> tuple[PassAction, ...]:
    """
    Returns the actions of one pass, in the order in which every rank issues them.

    Each layer is gathered while the one before is computed, and freed before the one after the next is gathered, so
    that two layers are gathered at a time; its gradients are summed while the next one is computed. The two layers
    with which a forward ends stay gathered for a backward that follows, and the reverse. What is in no layer stays
    gathered from the first pass of a step to the last. For a forward and then a backward through three layers, the
    first and last of a step:

    - gather rest, gather 0, gather 1, compute 0, free 0, gather 2, compute 1, compute 2
    - compute 2, free 2, gather 0, sum 2, compute 1, free 1, sum 1, compute 0, free 0, sum 0, sum rest, free rest
    """
    walks = _walks(num_layers if num_runs else 0, first_backward)
    staying = partial(_staying, walks, reshards)
    runs = range(num_runs) if direction == FORWARD else range(num_runs)[::-1]
    order = [(layer, run) for run in runs for layer in walks[direction]]
    held = staying(previous, direction)
    result = [PassAction("gather", REST)] if previous is None else []

    def gather(layer: int, run: int) -> None:
        if layer not in held:
            held.add(layer)
            result.append(PassAction("gather", layer, run))

    def free(layer: int, run: int) -> None:
        if layer not in staying(direction, following if run == runs[-1] else direction):
            held.remove(layer)
            result.append(PassAction("free", layer, run))

    for layer in sorted(held - set(walks[direction])):
        free(layer, runs[-1])
    for position, (layer, run) in enumerate(order):
        gather(layer, run)
        if position:
            free(*order[position - 1])
        if position + 1 < len(order):
            gather(*order[position + 1])
        if position:
            result.append(PassAction("sum", *order[position - 1]))
        result.append(PassAction("compute", layer, run))
    if order:
        free(*order[-1])
        result.append(PassAction("sum", *order[-1]))
    result.append(PassAction("sum", REST))
    if following is None:
        result.append(PassAction("free", REST))
    left_out = set() if sums and direction == BACKWARD else {"sum"}
    left_out |= set() if gathers else {"gather", "free"}
    return tuple(action for action in result if action.op not in left_out)


def _walks(num_layers: int, first_backward: int) -> dict[Direction, list[int]]:
    """The layers in the order in which passes reach them."""
    return {FORWARD: list(range(num_layers)), BACKWARD: list(range(first_backward, num_layers))[::-1]}


def _staying(
    walks: dict[Direction, list[int]], reshards: bool, before: Direction | None, after: Direction | None
) -> set[int]:
    """The layers that stay gathered from one walk through the layers to the next."""
    if before is None or after is None:
        return set()
    if not reshards:
        return set(walks[FORWARD])
    if before == after and len(walks[before]) > KEPT_LAYERS:
        return set()
    return set(walks[before][-KEPT_LAYERS:]) & set(walks[after][:KEPT_LAYERS])


def step_passes(
    kinds: Sequence[TaskKind],
    num_layers: int,
    num_runs: int = 1,
    gathers: bool = True,
    reshards: bool = True,
    first_backward: int = 0,
) -> list[tuple[PassAction, ...]]:
    """Returns the actions of all passes of a stage in one step, given their kinds; see [`pass_actions`]."""
    walks = [number for number, kind in enumerate(kinds) if kind.runs_layers]
    previous = dict(zip(walks[1:], walks, strict=False))
    following = dict(zip(walks, walks[1:], strict=False))
    return [
        pass_actions(
            kind.direction,
            num_layers,
            num_runs if kind.runs_layers else min(num_runs, 1),
            gathers=gathers and kind.runs_layers,
            sums=kind.adds_gradients,
            reshards=reshards,
            first_backward=first_backward,
            previous=kinds[previous[number]].direction if number in previous else None,
            following=kinds[following[number]].direction if number in following else None,
        )
        for number, kind in enumerate(kinds)
    ]


# Buckets of gradient sums, in the order in which the last backward of a stage completes them.

Parameter = TypeVar("Parameter")
NO_LAYER = -1  # of parameters that are in no layer, or in several


@dataclass(frozen=True)
class SumBucket(Generic[Parameter]):
    """Parameters of one dtype whose gradients are summed by one collective."""

    index: int  # of the sum in the plan
    parameters: list[Parameter]
    layer: int  # the first of their layers; `NO_LAYER` if there are some in no layer


def in_buckets(
    parameters: Iterable[Parameter],
    dtype_of: Callable[[Parameter], Hashable],  # of what is sent of a parameter
    bytes_of: Callable[[Parameter], float],  # of what is sent of a parameter
    bucket_bytes: float,
) -> Iterator[list[Parameter]]:
    """Yields consecutive parameters whose tensors have one dtype and fit into a bucket; a larger one has its own."""
    by_dtype: dict[Hashable, list[Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(dtype_of(parameter), []).append(parameter)
    for members in by_dtype.values():
        bucket: list[Parameter] = []
        size = 0.0
        for parameter in members:
            num_bytes = bytes_of(parameter)
            if bucket and size + num_bytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0.0
            bucket.append(parameter)
            size += num_bytes
        yield bucket


def sum_buckets(
    sums: Mapping[int, Sequence[Parameter]],  # index of each sum in the plan -> its parameters
    layer_of: Callable[[Parameter], int],
    divide: Callable[[list[Parameter]], Iterable[list[Parameter]]],  # ordered parameters -> buckets, see `in_buckets`
) -> list[SumBucket[Parameter]]:
    """
    Returns the buckets of all sums of the same stages in the order in which a backward completes them.

    That is from the last layer to the first, then those with parameters of no layer. The sum of a bucket starts in the
    last backward of a stage when all of its layers are done.
    """
    result = []
    for index, parameters in sums.items():
        ordered = sorted(parameters, key=lambda parameter: -layer_of(parameter))
        for bucket in divide(ordered):
            result.append(SumBucket(index, bucket, min(map(layer_of, bucket))))
    return sorted(result, key=lambda bucket: -bucket.layer)
