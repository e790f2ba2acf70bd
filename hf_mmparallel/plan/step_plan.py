"""Which replica and microbatch of which module takes which sample of one global batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .model_spec import LANGUAGE_MODEL
from .parallel_plan import ParallelPlan

Slots = tuple[int, ...]


def turn_of(index: Any, count: Any, turns: Any) -> Any:
    """In which of `turns` turns microbatch `index` of a replica has its place, if its `count` are spread evenly."""
    return (2 * index + 1) * turns // (2 * count)


@dataclass(frozen=True)
class SlotPlaces:
    """
    Where the slots of a module are.

    Args:
        slots (`np.ndarray` of shape `[samples]`): The slots.
        replica (`np.ndarray` of shape `[samples]`): The replica of each.
        microbatch (`np.ndarray` of shape `[samples]`): Its microbatch.
        place (`np.ndarray` of shape `[samples]`): The place of that among all microbatches.
    """

    slots: NDArray
    replica: NDArray
    microbatch: NDArray
    place: NDArray


@dataclass(frozen=True)
class ChunkCuts:
    """
    Chunks of a module, replica by replica and microbatch by microbatch.

    Args:
        replica (`np.ndarray` of shape `[chunks]`): Of each chunk.
        microbatch (`np.ndarray` of shape `[chunks]`): Of each chunk.
        chunk (`np.ndarray` of shape `[chunks]`): Its index in the microbatch.
        slots (`np.ndarray` of shape `[samples]`): The samples of all chunks.
        of_slot (`np.ndarray` of shape `[samples]`): The place among the chunks of each sample's.
    """

    replica: NDArray
    microbatch: NDArray
    chunk: NDArray
    slots: NDArray
    of_slot: NDArray

    def find(self, replica: NDArray, microbatch: NDArray, chunk: NDArray) -> NDArray:
        """The places of some chunks by replica, microbatch and index, all of which are among them."""
        width, depth = int(self.microbatch.max()) + 1, int(self.chunk.max()) + 1
        own = (self.replica * width + self.microbatch) * depth + self.chunk
        return np.searchsorted(own, (replica * width + microbatch) * depth + chunk)


@dataclass(frozen=True)
class StepPlan:
    """
    The arrangement of one global batch.

    Replicas of a module may have different numbers of microbatches: those of a fast one are more. Where an encoder or
    a generator works for several such replicas, its microbatches are as many as theirs where they are most, and the
    microbatches of the others are spread over these turns, see [`StepPlan.takers`].

    Args:
        samples (`tuple[int, ...]`): Dataset indices in the sampler's order. A sample's *slot* is its place in it.
        microbatches (`Mapping[str, tuple[tuple[tuple[int, ...], ...], ...]]`):
            Module -> replica -> microbatch -> the slots it takes.
        targets (`Mapping[str, tuple[str, ...]]`): Module -> the modules that take its features.
        epoch (`int`, *optional*, defaults to 0): The epoch that the samples are drawn in.
        whole (`StepPlan`, *optional*):
            Of a part ([`~StepPlan.part`]), the step that it belongs to, which knows where its slots are.
    """

    samples: tuple[int, ...]
    microbatches: Mapping[str, tuple[tuple[Slots, ...], ...]]
    targets: Mapping[str, tuple[str, ...]]
    epoch: int = 0
    whole: StepPlan | None = field(default=None, repr=False, compare=False)

    @cached_property
    def _counts(self) -> dict[str, NDArray]:
        """Module -> microbatches of each replica, int64 `[replicas]`."""
        return {name: np.array([len(own) for own in replicas]) for name, replicas in self.microbatches.items()}

    @cached_property
    def locations(self) -> dict[str, tuple[NDArray, NDArray]]:
        """
        Module -> the replica and the microbatch of every slot, int64 `[num_samples]`; -1 where it has none. Of a part,
        those of the whole step.
        """
        if self.whole is not None:
            return self.whole.locations
        return {module: self._locations(replicas) for module, replicas in self.microbatches.items()}

    def _locations(self, replicas: tuple[tuple[Slots, ...], ...]) -> tuple[NDArray, NDArray]:
        """The locations of the slots in one module."""
        microbatches = list(chain.from_iterable(replicas))
        sizes = np.fromiter(map(len, microbatches), np.int64, len(microbatches))
        slots = np.fromiter(chain.from_iterable(microbatches), np.int64, int(sizes.sum()))
        counts = [len(own) for own in replicas]
        found = np.full((2, len(self.samples)), -1)
        found[0, slots] = np.repeat(np.arange(len(counts)), counts).repeat(sizes)
        found[1, slots] = np.fromiter(chain.from_iterable(map(range, counts)), np.int64, len(sizes)).repeat(sizes)
        return found[0], found[1]

    @cached_property
    def places(self) -> Mapping[tuple[str, int], tuple[int, int]]:
        """(module, slot) -> (replica, microbatch)."""
        return _Places(self)

    def takers(self, module: str, replica: int, target: str) -> dict[int, int]:
        """
        When `target` takes what a replica of `module` hands to it.

        Args:
            module (`str`): An encoder, or the language model in front of a generator.
            replica (`int`): Its replica.
            target (`str`): The module that takes its features.

        Returns:
            `dict[int, int]`: Slot -> turn, in the order of the replica's slots. There are as many turns as
            microbatches of that replica of `target`, among those that this replica feeds, which has most of them.
        """
        given = [slot for slots in self.microbatches[module][replica] for slot in slots]
        takers, indices = (found[given] for found in self.locations[target])
        used = takers >= 0
        if not used.any():
            return {}
        counts = (self.whole or self)._counts[target][takers[used]]
        turns = turn_of(indices[used], counts, counts.max())
        return dict(zip(np.array(given)[used].tolist(), turns.tolist(), strict=True))

    @cached_property
    def chunks(self) -> _Chunks:
        """
        (module, replica, microbatch) -> its chunks, each with a forward and a backward of its own.

        An encoder's microbatch is cut by the turn in which its features are taken; a microbatch without samples has
        no chunks. The language model's microbatches are one chunk each. Those of a replica are cut when one of them
        is first asked for.
        """
        return _Chunks(self, {} if self.whole is None else self.whole.chunks.known)

    def cut_chunks(self, module: str, replicas: Sequence[int]) -> ChunkCuts:
        """
        The chunks of some replicas of a module in arrays, which many of them need a fraction of the time for.

        Args:
            module (`str`): The module.
            replicas (`Sequence[int]`): Replicas of it in ascending order.
        """
        found = self.slots_of(module, replicas)
        key = np.full(len(found.slots), -1)
        for target in self.targets.get(module, ()) if module != LANGUAGE_MODEL else ():
            used, turns, _ = self.turns(found, target)
            key[used] = np.maximum(key[used], turns)
        key = np.where(key < 0, found.microbatch, key)
        width = int(key.max(initial=0)) + 1
        cells, of_slot = np.unique(found.place * width + key, return_inverse=True)
        first = np.empty(len(cells), np.int64)
        first[of_slot] = np.arange(len(of_slot))  # any sample of each chunk
        place = cells // width
        chunk = np.arange(len(cells)) - np.searchsorted(place, place)
        return ChunkCuts(found.replica[first], found.microbatch[first], chunk, found.slots, of_slot)

    def slots_of(self, module: str, replicas: Sequence[int]) -> SlotPlaces:
        """
        The slots of some replicas of a module, microbatch by microbatch.

        Args:
            module (`str`): The module.
            replicas (`Sequence[int]`): Replicas of it in ascending order.
        """
        rows = [self.microbatches[module][replica] for replica in replicas]
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        microbatches = list(chain.from_iterable(rows))
        sizes = np.fromiter(map(len, microbatches), np.int64, len(microbatches))
        place = np.repeat(np.arange(len(microbatches)), sizes)
        replica = np.repeat(np.asarray(replicas, np.int64), counts)[place]
        microbatch = (np.arange(len(microbatches)) - np.repeat(np.cumsum(counts) - counts, counts))[place]
        slots = np.fromiter(chain.from_iterable(microbatches), np.int64, len(place))
        return SlotPlaces(slots, replica, microbatch, place)

    def turns(self, given: SlotPlaces, target: str) -> tuple[NDArray, NDArray, NDArray]:
        """
        [`~StepPlan.takers`] of many replicas at once.

        Args:
            given ([`SlotPlaces`]): Of a module in front of `target`.
            target (`str`): The module that takes its features.

        Returns:
            `tuple[np.ndarray, np.ndarray, np.ndarray]`: Which of the slots `target` takes, and for each of these its
            turn and the number of turns.
        """
        takers, indices = (found[given.slots] for found in self.locations[target])
        used = np.flatnonzero(takers >= 0)
        counts = (self.whole or self)._counts[target][takers[used]]
        most = np.zeros(int(given.replica.max(initial=-1)) + 1, np.int64)
        np.maximum.at(most, given.replica[used], counts)
        turns = most[given.replica[used]]
        return used, turn_of(indices[used], counts, turns), turns

    def replicas(self, module: str) -> list[int]:
        """The replicas of a module that have microbatches: of a part its own ones only."""
        own = self.microbatches[module]
        return list(compress(range(len(own)), own))

    def part(self, members: Collection[tuple[str, int]]) -> StepPlan:
        """
        The step with the microbatches of some replicas only; numbers of replicas and slots stay the same.

        Args:
            members (`Collection[tuple[str, int]]`):
                (module, replica) of those, with all that they exchange tensors with.
        """
        few: dict[str, list[tuple[Slots, ...]]] = {name: [()] * len(own) for name, own in self.microbatches.items()}
        for name, replica in members:
            few[name][replica] = self.microbatches[name][replica]
        microbatches = {name: tuple(own) for name, own in few.items()}
        return replace(self, microbatches=microbatches, whole=self.whole or self)

    @property
    def structure(self) -> tuple:
        """All that a program depends on: two steps with equal structure run the same program."""
        links: list[tuple] = []
        for (module, replica, index), chunks in self.chunks.items():
            for number, slots in enumerate(chunks):
                takers = {
                    (target, *self.places[target, slot])
                    for target in self.targets.get(module, ())
                    for slot in slots
                    if (target, slot) in self.places
                }
                links.append((module, replica, index, number, tuple(sorted(takers))))
        return tuple(links)

    def check(self, plan: ParallelPlan) -> None:
        """
        Raises `AssertionError` unless every slot occurs once in the language model, at most once in every other
        module, and the sizes fit.
        """
        for name, replicas in self.microbatches.items():
            assert len(replicas) == plan.modules[name].dp_size, name
            slots = np.fromiter(chain.from_iterable(chain.from_iterable(replicas)), np.int64)
            assert not len(slots) or 0 <= slots.min() <= slots.max() < len(self.samples), (
                f"a slot of {name} is no sample"
            )
            counts = np.bincount(slots, minlength=len(self.samples))
            assert counts.max(initial=0) < 2, f"a sample occurs twice in {name}"
            assert name != LANGUAGE_MODEL or counts.all(), "a sample is lost"


class _Places(Mapping[tuple[str, int], tuple[int, int]]):
    """(module, slot) -> (replica, microbatch) of a step."""

    def __init__(self, step: StepPlan):
        self._lists = {name: [own.tolist() for own in found] for name, found in step.locations.items()}

    def __getitem__(self, key: tuple[str, int]) -> tuple[int, int]:
        module, slot = key
        replicas, microbatches = self._lists[module]
        if replicas[slot] < 0:
            raise KeyError(key)
        return replicas[slot], microbatches[slot]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for module, (replicas, _) in self._lists.items():
            yield from ((module, slot) for slot, replica in enumerate(replicas) if replica >= 0)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Chunks(Mapping[tuple[str, int, int], tuple[Slots, ...]]):
    """(module, replica, microbatch) -> chunks of a step, cut replica by replica as they are asked for."""

    def __init__(self, step: StepPlan, known: dict[tuple[str, int], tuple[tuple[Slots, ...], ...]]):
        self._step = step
        self.known = known

    def __getitem__(self, key: tuple[str, int, int]) -> tuple[Slots, ...]:
        module, replica, index = key
        found = self.of_replica(module, replica)
        if index >= len(found):
            raise KeyError(key)
        return found[index]

    def of_replica(self, module: str, replica: int) -> tuple[tuple[Slots, ...], ...]:
        """The chunks of each microbatch of a replica."""
        if (module, replica) not in self.known:
            self.known[module, replica] = self._cut(module, replica)
        return self.known[module, replica]

    def _cut(self, module: str, replica: int) -> tuple[tuple[Slots, ...], ...]:
        """Cuts the microbatches of a replica."""
        step = self._step
        targets = step.targets.get(module, ()) if module != LANGUAGE_MODEL else ()
        turns = [step.takers(module, replica, target) for target in targets]
        result = []
        for index, slots in enumerate(step.microbatches[module][replica]):
            groups: dict[int, list[int]] = {}
            for slot in slots:
                taken = [own[slot] for own in turns if slot in own]
                groups.setdefault(max(taken, default=index), []).append(slot)
            result.append(tuple(tuple(groups[key]) for key in sorted(groups)))
        return tuple(result)

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        for module, replicas in self._step.microbatches.items():
            for replica in self._step.replicas(module):
                for index in range(len(replicas[replica])):
                    yield module, replica, index

    def __len__(self) -> int:
        return sum(len(microbatches) for replicas in self._step.microbatches.values() for microbatches in replicas)
