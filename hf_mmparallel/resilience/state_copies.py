"""What live processes copy to each other when the plan of a run changes, and which node has which part in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from ..cost.activations import DTYPE_BYTES, FULL
from ..cost.stage_memory import COPY_WINDOW_BYTES
from ..plan import Cut, ModelSpec, ParallelPlan, ParameterShards, ParameterSpec, StorageSettings, parameter_shards

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class PlacedPlan:
    """A plan, and the processes that play its ranks."""

    plan: ParallelPlan
    members: tuple[int, ...]  # by rank: the number of a process, which never changes


@dataclass(frozen=True)
class Slice:
    dim: int | None = None  # the dimension that is cut; `None` for all elements
    ranges: tuple[tuple[int, int], ...] = ()  # first index in that dimension and one past the last, of each block
    flat: tuple[int, int] | None = None  # of these elements, flattened, those that a rank updates under ZeRO

    @classmethod
    def of(cls, parameter: ParameterSpec, cuts: Sequence[Cut]) -> Slice:
        """The elements of a shard; `cuts` are those of [`Shard`]: one of tensor parallelism at most, one of ZeRO."""
        result = cls()
        for cut in cuts:
            if cut.axis == "dp":
                result = replace(result, flat=cut.bounds(result.num_elements(parameter)))
                continue
            assert cut.axis == "tp" and cut.dim is not None, "experts are not divided"
            bounds = cut.bounds(parameter.shape[cut.dim] // cut.num_blocks)
            result = cls.in_blocks(parameter, cut.dim, cut.num_blocks, bounds)
        return result

    @classmethod
    def in_blocks(cls, parameter: ParameterSpec, dim: int, num_blocks: int, bounds: tuple[int, int]) -> Slice:
        """The same indices of each block of a dimension, from the first of `bounds` to one before the second."""
        size = parameter.shape[dim] // num_blocks
        if bounds == (0, size):
            return cls()
        return cls(dim, tuple((block * size + bounds[0], block * size + bounds[1]) for block in range(num_blocks)))

    @classmethod
    def on_rank(cls, parameter: ParameterSpec, shards: ParameterShards, rank: int) -> Slice:
        """All elements that a rank updates, in one or several shards, which follow each other."""
        held = [cls.of(parameter, shard.cuts) for shard in shards.updated_by(rank)]
        first, last = held[0], held[-1]
        if first == last or first.dim is None:
            return first
        bounds = first.ranges[0][0], last.ranges[0][1]
        return cls.in_blocks(parameter, first.dim, len(first.ranges), bounds)

    def common(self, other: Slice) -> Slice | None:
        """The elements that are in both; `None` if there are none."""
        if self.dim is None or other.dim is None:
            return other if self.dim is None else self
        both = ((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(self.ranges, other.ranges, strict=True))
        ranges = tuple((start, stop) for start, stop in both if start < stop)
        return Slice(self.dim, ranges) if ranges else None

    def divide(self, parameter: ParameterSpec, other: Slice, borders: Sequence[int]) -> list[Slice]:
        """
        The same elements, divided at `borders`, which are indices in the first block in ascending order, with those of
        this slice. `other` is any slice that says which dimension is cut, in how many blocks.
        """
        if other.dim is None:
            return [self]
        start, stop = self.ranges[0] if self.ranges else (0, parameter.shape[other.dim] // len(other.ranges))
        inside = [border for border in borders if start <= border <= stop]
        return [self.in_blocks(parameter, other.dim, len(other.ranges), bounds) for bounds in pairwise(inside)]

    def num_elements(self, parameter: ParameterSpec) -> int:
        if self.flat is not None:
            return self.flat[1] - self.flat[0]
        if self.dim is None:
            return parameter.num_elements
        return parameter.num_elements // parameter.shape[self.dim] * sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True)
class StateCopy:
    """A part of a parameter, with its optimizer state, that a process sends to another."""

    parameter: str
    source: int  # the member that sends it
    target: int  # the member that lacks it
    slice: Slice
    num_bytes: int  # with those of the optimizer's state


@dataclass(frozen=True)
class StateCopies:
    copies: tuple[StateCopy, ...]  # in the order of the model's parameters, then of targets

    @cached_property
    def sent_bytes(self) -> dict[int, int]:
        return _sums((copy.source, copy.num_bytes) for copy in self.copies)

    @cached_property
    def received_bytes(self) -> dict[int, int]:
        return _sums((copy.target, copy.num_bytes) for copy in self.copies)

    @property
    def num_bytes(self) -> int:
        return sum(self.sent_bytes.values())


class LostStateError(RuntimeError):
    """No live process holds a part of the model."""

    def __init__(self, missing: Mapping[str, Sequence[int]], text: str):
        super().__init__(text)
        # module -> its layers that nobody holds, -1 for what is before the first and `num_layers` for what is after
        # the last
        self.missing = dict(missing)


Part = tuple[str, Slice]  # a parameter, and elements of it
Holdings = dict[int, dict[Part, int]]  # member -> part -> bytes with optimizer state


def holdings(spec: ModelSpec, placed: PlacedPlan) -> Holdings:
    """What each process updates under a plan; ranks that share optimizer state gather the rest of their weights."""
    result: Holdings = {member: {} for member in placed.members}
    for name, shards in parameter_shards(spec, placed.plan).items():
        parameter = spec.parameters[name]
        storage = placed.plan.modules[spec.used_at[name][0][0]].storage
        for shard in shards.shards:
            elements = Slice.of(parameter, shard.cuts)
            num_bytes = elements.num_elements(parameter) * value_bytes(parameter, storage)
            for rank in shard.updaters:
                result[placed.members[rank]][name, elements] = num_bytes
    return result


def common_holdings(spec: ModelSpec, before: PlacedPlan, after: PlacedPlan) -> tuple[Holdings, Holdings]:
    """What each process holds under two plans, in parts that do not overlap, divided at the borders of both."""
    held, needed = holdings(spec, before), holdings(spec, after)
    slices: dict[str, set[Slice]] = defaultdict(set)
    for name, elements in {part for of_plan in (held, needed) for parts in of_plan.values() for part in parts}:
        slices[name].add(elements)
    pieces: dict[Part, list[Slice]] = {}
    for name, found in slices.items():
        parameter, other = spec.parameters[name], max(found, key=lambda elements: len(elements.ranges))
        if other.dim is None or other.flat is not None:  # whose shares are the same under all plans
            continue
        ends = {0, parameter.shape[other.dim] // len(other.ranges)}
        borders = sorted(ends.union(*(elements.ranges[0] for elements in found if elements.ranges)))
        pieces.update({(name, elements): elements.divide(parameter, other, borders) for elements in found})

    def divide(parts: Mapping[Part, int]) -> dict[Part, int]:
        result: dict[Part, int] = {}
        for (name, elements), num_bytes in parts.items():
            parameter = spec.parameters[name]
            per_element = num_bytes // max(1, elements.num_elements(parameter))
            for piece in pieces.get((name, elements), (elements,)):
                result[name, piece] = per_element * piece.num_elements(parameter)
        return result

    first, second = ({member: divide(parts) for member, parts in one.items()} for one in (held, needed))
    return first, second


def reused_bytes(held: Holdings, needed: Holdings, nodes: Sequence[int], node_size: int) -> NDArray:
    """
    Bytes `[nodes, nodes]` that each node would have already in each place; its processes keep their order. `needed` is
    what each member needs where each node takes its own place, of which the nodes are to be permuted.
    """
    members = [range(node * node_size, (node + 1) * node_size) for node in nodes]
    rows = _kinds([tuple(frozenset(held.get(member, ())) for member in own) for own in members])
    columns = _kinds([tuple(frozenset(needed[member].items()) for member in own) for own in members])
    result = np.array([[sum(map(_shared_bytes, parts, wanted)) for wanted in columns[0]] for parts in rows[0]], float)
    return result[np.ix_(rows[1], columns[1])]


def _kinds(values: Sequence[T]) -> tuple[list[T], list[int]]:
    """The different ones of some values, and which of these each value is."""
    numbers: dict[T, int] = {}
    indices = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), indices


def _shared_bytes(parts: frozenset[Part], wanted: frozenset[tuple[Part, int]]) -> int:
    return sum(num_bytes for part, num_bytes in wanted if part in parts)


def assign_nodes(kept: NDArray, nodes: Sequence[int]) -> list[int]:
    """The node of each place such that most bytes are kept, of those by node and place in [`reused_bytes`]."""
    rows, columns = linear_sum_assignment(kept, maximize=True)
    return [nodes[row] for row in rows[np.argsort(columns, kind="stable")].tolist()]


def value_bytes(parameter: ParameterSpec, storage: StorageSettings) -> int:
    """Bytes of an element of a parameter with its optimizer state: AdamW's two moments, and a float32 copy if any."""
    num_bytes = DTYPE_BYTES.get(parameter.dtype, FULL)
    if not parameter.trainable:
        return num_bytes
    return num_bytes + (3 * FULL if storage.has_master_weights and num_bytes < FULL else 2 * num_bytes)


def state_copies(spec: ModelSpec, before: PlacedPlan, after: PlacedPlan) -> StateCopies:
    """
    What processes must copy to each other before they go on under another plan; raises [`LostStateError`] if nobody
    holds a part. Members that are only in `before` are lost, and those that are only in `after` hold nothing.
    """
    held, needed = common_holdings(spec, before, after)
    holders: dict[Part, list[int]] = defaultdict(list)
    for member in sorted(held.keys() & needed.keys()):
        for part in held[member]:
            holders[part].append(member)
    wanted = [
        (num_bytes, part, member)
        for member, parts in sorted(needed.items())
        for part, num_bytes in parts.items()
        if part not in held.get(member, ())
    ]
    lost = {name for _, (name, elements), _ in wanted if (name, elements) not in holders}
    if lost:
        raise _lost_state(spec, lost)
    # Each part comes from a member that holds it and goes on: the largest parts first, each from the holder that has
    # the fewest bytes to send so far.
    sent = dict.fromkeys(after.members, 0)
    copies = []
    for num_bytes, part, target in sorted(wanted, key=lambda one: -one[0]):
        source = min(holders[part], key=lambda member: (sent[member], member))
        sent[source] += num_bytes
        copies.append(StateCopy(part[0], source, target, part[1], num_bytes))
    order = {name: number for number, name in enumerate(spec.parameters)}
    copies.sort(key=lambda copy: (order[copy.parameter], copy.target, copy.slice.ranges))
    return StateCopies(tuple(copies))


def recovery_bytes(held: Any, moved: Any, needed: Any, window_bytes: float = COPY_WINDOW_BYTES) -> Any:
    """
    Peak bytes of a rank's device while the plan of a run changes. It keeps what it has held until all ranks have their
    parts, which wait in host memory but for a window of them; then it has what it needs.
    """
    return np.maximum(held + np.minimum(moved, window_bytes), needed)


def _lost_state(spec: ModelSpec, parameters: Iterable[str]) -> LostStateError:
    """The error that names the layers of parameters that nobody holds."""
    missing: dict[str, set[int]] = defaultdict(set)
    for name in parameters:
        module, layer = spec.used_at[name][0]
        missing[module].add(layer)
    layers = {name: sorted(missing[name]) for name in spec.modules if name in missing}
    texts = [f"{_layers_text(numbers, spec.modules[name].num_layers)} of `{name}`" for name, numbers in layers.items()]
    return LostStateError(
        layers, f"No process that is left holds {' and '.join(texts)}. Go on from the last checkpoint."
    )


def _layers_text(layers: Sequence[int], num_layers: int) -> str:
    """`what is before the layers, layers 0 to 3 and 5`."""
    inside = [layer for layer in layers if 0 <= layer < num_layers]
    starts = [layer for layer in inside if layer - 1 not in inside]
    stops = [layer for layer in inside if layer + 1 not in inside]
    ranges = [str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, stops, strict=True)]
    parts = ["what is before the first layer"] if -1 in layers else []
    if ranges:
        parts.append(f"layer{'s' if len(inside) > 1 else ''} {', '.join(ranges)}")
    return ", ".join(parts + ["what is after the last layer"] * (num_layers in layers))


def _sums(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    result: dict[int, int] = defaultdict(int)
    for key, value in pairs:
        result[key] += value
    return dict(sorted(result.items()))
