"""Which replica and microbatch of which module takes which sample of one global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .model_spec import LANGUAGE_MODEL
from .parallel_plan import ParallelPlan

Slots = tuple[int, ...]


def turn_of(index: Any, count: Any, turns: Any) -> Any:
    """In which of `turns` turns microbatch `index` of a replica has its place, if its `count` are spread evenly."""
    return (2 * index + 1) * turns // (2 * count)


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
    """

    samples: tuple[int, ...]
    microbatches: Mapping[str, tuple[tuple[Slots, ...], ...]]
    targets: Mapping[str, tuple[str, ...]]
    epoch: int = 0

    @cached_property
    def places(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(module, slot) -> (replica, microbatch)."""
        return {
            (module, slot): (replica, index)
            for module, replicas in self.microbatches.items()
            for replica, microbatches in enumerate(replicas)
            for index, slots in enumerate(microbatches)
            for slot in slots
        }

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
        given = (slot for slots in self.microbatches[module][replica] for slot in slots)
        places = {slot: self.places[target, slot] for slot in given if (target, slot) in self.places}
        counts = {taker: len(self.microbatches[target][taker]) for taker, _ in places.values()}
        turns = max(counts.values(), default=0)
        return {slot: turn_of(index, counts[taker], turns) for slot, (taker, index) in places.items()}

    @cached_property
    def chunks(self) -> dict[tuple[str, int, int], tuple[Slots, ...]]:
        """
        (module, replica, microbatch) -> its chunks, each with a forward and a backward of its own.

        An encoder's microbatch is cut by the turn in which its features are taken; a microbatch without samples has
        no chunks. The language model's microbatches are one chunk each.
        """
        result = {}
        for module, replicas in self.microbatches.items():
            for replica, microbatches in enumerate(replicas):
                targets = self.targets.get(module, ()) if module != LANGUAGE_MODEL else ()
                turns = [self.takers(module, replica, target) for target in targets]
                for index, slots in enumerate(microbatches):
                    groups: dict[int, list[int]] = {}
                    for slot in slots:
                        taken = [own[slot] for own in turns if slot in own]
                        groups.setdefault(max(taken, default=index), []).append(slot)
                    result[module, replica, index] = tuple(tuple(groups[key]) for key in sorted(groups))
        return result

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
            slots = [slot for microbatches in replicas for m in microbatches for slot in m]
            assert len(slots) == len(set(slots)), f"a sample occurs twice in {name}"
            assert set(slots) <= set(range(len(self.samples))), f"a slot of {name} is no sample"
        taken = sum(len(slots) for microbatches in self.microbatches[LANGUAGE_MODEL] for slots in microbatches)
        assert taken == len(self.samples), "a sample is lost"
