"""How long a step takes, fast enough to be asked while its samples are arranged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ParallelPlan, Stage


def stage_share(plan: ParallelPlan, module: str, stage: Stage) -> float:
    """What a stage's ranks take for one millisecond of the whole module on one rank."""
    return stage.num_layers / plan.modules[module].num_layers / len(stage.all_ranks)


@dataclass(frozen=True)
class Pipeline:
    """
    The stages that a microbatch passes, and the time that each takes.

    The first replica of each module stands for all of its replicas. Encoders are chains side by side that end right
    before the language model. A stage on ranks that another module uses, too, adds to the time of that module's stage.

    Args:
        depth (`tuple[int, ...]`): How far each stage is from the start of the longest chain.
        before (`tuple[tuple[int, ...], ...]`): The stages that each stage gets its inputs from.
        shares (`Mapping[str, tuple[float, ...]]`):
            Module -> for each stage, what it takes for one millisecond of the whole module on one rank.
        backward_ratio (`Mapping[str, float]`): Module -> time of a backward over that of a forward.
        gpipe (`bool`): Whether all forwards go first.
    """

    depth: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    shares: Mapping[str, tuple[float, ...]]
    backward_ratio: Mapping[str, float]
    gpipe: bool

    @classmethod
    def of(cls, plan: ParallelPlan, backward_ratio: Mapping[str, float]) -> Pipeline:
        """The pipeline of a plan."""
        owner: dict[int, int] = {}
        chains: dict[str, list[int]] = {}
        costs: list[tuple[str, int, float]] = []
        count = 0
        for name in reversed(list(plan.modules)):
            stages, chains[name] = plan.modules[name].replicas[0], []
            places: list[int] = []
            for stage in stages:
                place = next((owner[rank] for rank in stage.all_ranks if rank in owner), count)
                if place == count:
                    count += 1
                    chains[name].append(place)
                places.append(place)
                costs.append((name, place, stage_share(plan, name, stage)))
            for stage, place in zip(stages, places, strict=True):
                owner.update(dict.fromkeys(stage.all_ranks, place))
        shares = {name: [0.0] * count for name in plan.modules}
        for name, place, share in costs:
            shares[name][place] += share

        language = chains.pop(LANGUAGE_MODEL)
        encoders = [chain for chain in chains.values() if chain]
        longest = max(map(len, encoders), default=0)
        depth: list[int] = [0] * count
        before: list[tuple[int, ...]] = [()] * count
        for start, chain in [(longest, language), *((longest - len(chain), chain) for chain in encoders)]:
            for index, place in enumerate(chain):
                depth[place] = start + index
                before[place] = tuple(chain[index - 1 : index])
        before[language[0]] = tuple(chain[-1] for chain in encoders)
        frozen_shares = {name: tuple(values) for name, values in shares.items()}
        return cls(tuple(depth), tuple(before), frozen_shares, dict(backward_ratio), plan.schedule == "gpipe")

    @property
    def num_stages(self) -> int:
        """Stages of the longest way through the model."""
        return max(self.depth) + 1

    @cached_property
    def bottleneck(self) -> dict[str, float]:
        """Module -> what its slowest stage takes, forward and backward, for one millisecond of its forward."""
        return {name: max(shares) * (1 + self.backward_ratio[name]) for name, shares in self.shares.items()}

    def iteration_ms(self, forward: Mapping[str, NDArray], backward: Mapping[str, NDArray] | None = None) -> NDArray:
        """
        The end of the last backward of some arrangements, where every stage does forwards and backwards in the order
        that microbatches of equal size would give it.

        In that order stage `s` does its forward of microbatch `k` in slot `2 k + s` and its backward in slot
        `2 k + 2 S - 1 - s` (1F1B), and what both wait for has been done one slot before. All stages of all
        arrangements therefore go through a slot together.

        Args:
            forward (`Mapping[str, numpy.ndarray]`):
                Module -> milliseconds `[arrangements, microbatches]` of the forward of the whole module on one rank.
            backward (`Mapping[str, numpy.ndarray]`, *optional*): The same of what goes backward with each microbatch
                of the language model; as `forward` when left out.

        Returns:
            `numpy.ndarray`: Milliseconds, float64 `[arrangements]`.
        """
        backward = forward if backward is None else backward
        names = list(self.shares)
        shares = np.array([self.shares[name] for name in names])
        ratio = np.array([self.backward_ratio[name] for name in names])
        costs = np.stack(
            [
                np.einsum("ms,mqk->ksq", shares, np.stack([forward[name] for name in names])),
                np.einsum("ms,mqk->ksq", shares * ratio[:, None], np.stack([backward[name] for name in names])),
            ]
        )
        count, _, width = costs.shape[1:]
        slots, waits = self._slots(count, shares, ratio)
        by_slot = np.zeros((int(slots.max()) + 1, len(self.depth), width))
        for way in range(2):
            by_slot[slots[way], np.arange(len(self.depth))] += costs[way]
        done = np.zeros((len(self.depth), width))
        for wait, cost in zip(waits, by_slot, strict=True):
            done = np.maximum.reduce(done[wait], axis=0) + cost
        return done.max(axis=0)

    def _slots(self, count: int, shares: NDArray, ratio: NDArray) -> tuple[NDArray, NDArray]:
        """
        Slots `[2, count, num_stages]` of forwards and backwards, and for each slot what each stage waits for
        `[num_slots, num_waits, num_stages]`, which is itself where it has nothing to do.
        """
        stages, depth, length = np.arange(len(self.depth)), np.array(self.depth), self.num_stages
        microbatch = np.arange(count)[:, None]
        if self.gpipe:
            slots = np.stack([microbatch + depth, count + 2 * length - 2 - depth + microbatch])
        else:
            slots = np.stack([2 * microbatch + depth, 2 * microbatch + 2 * length - 1 - depth])
        inputs = max(2, 1 + max(map(len, self.before)))
        waits = np.broadcast_to(stages, (int(slots.max()) + 1, inputs, len(stages))).copy()
        backwards = (shares > 0).T @ (ratio > 0)
        for stage, sources in enumerate(self.before):
            for number, source in enumerate(sources):
                waits[slots[0, :, stage], 1 + number, stage] = source
                if backwards[source]:
                    waits[slots[1, :, source], 1, source] = stage
        return slots, waits
