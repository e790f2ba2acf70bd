"""Which replica and microbatch of which module takes which sample of one global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .model_spec import LANGUAGE_MODEL
from .parallel_plan import ParallelPlan

Slots = tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """
    The arrangement of one global batch.

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

    @cached_property
    def chunks(self) -> dict[tuple[str, int, int], tuple[Slots, ...]]:
        """
        (module, replica, microbatch) -> its chunks, each with a forward and a backward of its own.

        An encoder's microbatch is cut by the index of the microbatch that takes the features; a microbatch without
        samples has no chunks. The language model's microbatches are one chunk each.
        """
        result = {}
        for module, replicas in self.microbatches.items():
            for replica, microbatches in enumerate(replicas):
                for index, slots in enumerate(microbatches):
                    groups: dict[int, list[int]] = {}
                    for slot in slots:
                        takers = [
                            self.places[t, slot][1] for t in self.targets.get(module, ()) if (t, slot) in self.places
                        ]
                        groups.setdefault(max(takers, default=index), []).append(slot)
                    result[module, replica, index] = tuple(tuple(groups[key]) for key in sorted(groups))
        return result

    @property
    def structure(self) -> tuple:
        """All that a program depends on: two steps with equal structure run the same program."""
        links = []
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
