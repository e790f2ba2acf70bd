"""
The parts of a step: connected components of replicas that exchange tensors, share ranks or run jointly.

Ranks of different parts share gradient sums only, whose order is the same on every rank, so a rank schedules and
verifies its own part only. All ranks of the same stages run the same list: one, the *representative*, stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..plan import ModulePlan, ParallelPlan, Stage, StageKey, StepPlan, SyncGroup
from .action_lists import PartActions, Program, ProgramActions

Member = tuple[str, int]


@dataclass(frozen=True)
class Part:
    """Replicas and their ranks only, which share nothing with other replicas but gradient sums."""

    plan: ParallelPlan  # on the representatives of the ranks, numbered from 0
    whole_plan: ParallelPlan  # on all ranks, with their original numbers
    step: StepPlan
    sync_groups: tuple[SyncGroup, ...]  # with the stages of this part
    representatives: tuple[int, ...]  # the number of each rank of `plan` in `Representatives`
    sync_indices: tuple[int, ...]  # the index of each of `sync_groups` in `Representatives`

    def renumber(self, lists: PartActions) -> PartActions:
        """The lists of this part with ranks and gradient sums numbered as in [`Representatives`]."""
        codes = lists.codes.copy()
        is_sum = codes >= lists.first_sum
        codes[is_sum] = lists.first_sum + np.array(self.sync_indices, np.int64)[codes[is_sum] - lists.first_sum]
        list_of = {self.representatives[rank]: index for rank, index in lists.list_of.items()}
        return PartActions(lists.graph, lists.starts, codes, list_of)


@dataclass(frozen=True)
class Representatives:
    """A plan on representatives: one rank stands for all ranks that run the same list."""

    plan: ParallelPlan  # on representatives, numbered from 0
    sync_groups: tuple[SyncGroup, ...]
    # for each of `sync_groups`, the indices in `whole_sync_groups` that it stands for
    represented: tuple[tuple[int, ...], ...]
    whole_plan: ParallelPlan  # on all ranks
    whole_sync_groups: tuple[SyncGroup, ...]
    numbers: dict[int, int]  # rank of the whole plan -> number of its representative

    @property
    def first_represented(self) -> tuple[SyncGroup, ...]:
        """For each of `sync_groups`, the first gradient sum of the whole plan that it stands for."""
        return tuple(self.whole_sync_groups[indices[0]] for indices in self.represented)

    def number_of_sum(self, index: int) -> int:
        """The index in `sync_groups` of what stands for a gradient sum of the whole plan."""
        return next(number for number, indices in enumerate(self.represented) if index in indices)

    @cached_property
    def _ranks(self) -> list[list[int]]:
        """The ranks of the whole plan that each representative stands for."""
        result: list[list[int]] = [[] for _ in range(self.plan.world_size)]
        for rank, number in self.numbers.items():
            result[number].append(rank)
        return result

    @cached_property
    def _sums_of_whole(self) -> dict[int, dict[int, tuple[int, ...]]]:
        """Rank of the whole plan -> index in `sync_groups` -> indices of its own sums in `whole_sync_groups`."""
        result: dict[int, dict[int, tuple[int, ...]]] = {rank: {} for rank in self.numbers}
        for number, indices in enumerate(self.represented):
            for index in indices:
                for rank in self.whole_sync_groups[index].ranks:
                    result[rank][number] = (*result[rank].get(number, ()), index)
        return result

    # Parts

    @cached_property
    def _members(self) -> tuple[Member, ...]:
        """(module, replica) of all replicas."""
        return tuple((name, d) for name, module in self.plan.modules.items() for d in range(module.dp_size))

    @cached_property
    def _first(self) -> dict[str, int]:
        """Module -> index of its first replica in `_members`."""
        sizes = [module.dp_size for module in self.plan.modules.values()]
        return dict(zip(self.plan.modules, np.cumsum([0, *sizes])[:-1].tolist(), strict=True))

    @cached_property
    def _members_of_rank(self) -> list[list[int]]:
        """The replicas of each representative, as indices of `_members`."""
        result: list[list[int]] = [[] for _ in range(self.plan.world_size)]
        for member, ranks in enumerate(self._ranks_of_member):
            for rank in ranks:
                result[rank].append(member)
        return result

    @cached_property
    def _ranks_of_member(self) -> list[tuple[int, ...]]:
        """The representatives of each replica."""
        return [
            tuple(sorted({rank for stage in self.plan.modules[name].replicas[replica] for rank in stage.all_ranks}))
            for name, replica in self._members
        ]

    @cached_property
    def _neighbours(self) -> np.ndarray:
        """Pairs of replicas that share ranks or run jointly, int64 `[pairs, 2]`."""
        pairs = [pair for members in self._members_of_rank for pair in pairwise(members)]
        for name, module in self.plan.modules.items():
            for replica in range(module.dp_size):
                if replica % module.joint_replicas:
                    pairs.append((self._first[name] + replica - 1, self._first[name] + replica))
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def _sums_of_rank(self) -> list[list[int]]:
        """The gradient sums of each representative."""
        result: list[list[int]] = [[] for _ in range(self.plan.world_size)]
        for number, group in enumerate(self.sync_groups):
            for rank in group.ranks:
                result[rank].append(number)
        return result

    @cached_property
    def _sums_of_stage(self) -> dict[StageKey, list[int]]:
        """The gradient sums that wait for each stage."""
        result: dict[StageKey, list[int]] = {}
        for number, group in enumerate(self.sync_groups):
            for stage in group.stages:
                result.setdefault(stage, []).append(number)
        return result

    def _labels(self, step: StepPlan) -> np.ndarray:
        """The part of each replica, int64 `[replicas]`."""
        links = [self._neighbours]
        for edge in self.plan.edges:
            source, target = (step.locations[name][0] for name in (edge.source, edge.target))
            both = np.flatnonzero((source >= 0) & (target >= 0))
            ends = [self._first[edge.source] + source[both], self._first[edge.target] + target[both]]
            links.append(np.stack(ends, axis=1))
        first, second = np.concatenate(links).T
        size = len(self._members)
        return connected_components(coo_array((np.ones(len(first)), (first, second)), (size, size)), False)[1]

    def parts_of_stages(self, step: StepPlan) -> np.ndarray:
        """The part of each stage, int64 `[stages]`."""
        counts = [len(module.replicas[d]) for module in self.plan.modules.values() for d in range(module.dp_size)]
        return np.repeat(self._labels(step), counts).astype(np.int64)

    def parts(self, step: StepPlan, rank: int | None = None) -> Iterator[Part]:
        """Yields the parts of a step, or only that of a rank of the whole plan, if it has a stage."""
        # a replica without samples is a part by itself
        labels = self._labels(step)
        if rank is None:
            for indices in np.split(np.argsort(labels, kind="stable"), np.cumsum(np.bincount(labels))[:-1]):
                yield self._part(step, indices.tolist())
        elif rank in self.numbers:
            member = self._members_of_rank[self.numbers[rank]][0]
            yield self._part(step, np.flatnonzero(labels == labels[member]).tolist())

    def _part(self, step: StepPlan, indices: Sequence[int]) -> Part:
        """The part with some of the replicas, given as indices of `_members`."""
        members = [self._members[index] for index in indices]
        ranks = sorted(set(chain.from_iterable(self._ranks_of_member[index] for index in indices)))
        number = {rank: local for local, rank in enumerate(ranks)}
        plan = self.plan.part(members)
        stages: dict[int, list[StageKey]] = {}
        modules = {}
        for name, module in plan.modules.items():
            for replica, index, _ in module.stages():
                for group in self._sums_of_stage.get((name, replica, index), ()):
                    stages.setdefault(group, []).append((name, replica, index))
            modules[name] = _renumbered(module, number)
        on_ranks: dict[int, list[int]] = {}
        for rank in ranks:
            for group in self._sums_of_rank[rank]:
                on_ranks.setdefault(group, []).append(number[rank])
        sync_indices = sorted(on_ranks)
        sync_groups = tuple(
            SyncGroup(tuple(on_ranks[group]), (), tuple(stages.get(group, ()))) for group in sync_indices
        )
        return Part(
            replace(plan, modules=modules),
            self.whole_plan.part(members),
            step.part(members),
            sync_groups,
            tuple(ranks),
            tuple(sync_indices),
        )

    # The ranks of the whole plan

    def expand(self, program: Program) -> Program:
        """Expands a program of representatives to all ranks of the whole plan."""
        assert isinstance(program.actions, ProgramActions)
        parts = [
            replace(
                part,
                list_of={rank: index for number, index in part.list_of.items() for rank in self._ranks[number]},
                sums=self._sums_of_whole,
            )
            for part in program.actions.parts
        ]
        return Program(ProgramActions(parts))


def find_representatives(plan: ParallelPlan, sync_groups: Sequence[SyncGroup]) -> Representatives:
    """Puts a plan on representatives, which does not change the predicted time of a step."""
    numbers, count = representative_ranks(plan), 0
    # Ranks of the same stages may be in sums with ranks that differ, as where modules of unlike sizes share ranks.
    while count != (count := len(set(numbers.values()))):
        alike: dict[tuple, list[int]] = {}
        sums_of: dict[int, list[int]] = {rank: [numbers[rank]] for rank in sorted(numbers)}
        for index, group in enumerate(sync_groups):
            same = alike.setdefault((_renumber(group.ranks, numbers), group.stages, group.parameters), [])
            same.append(index)
            for rank in group.ranks:
                sums_of[rank].append(same[0])
        known: dict[tuple, int] = {}
        numbers = {rank: known.setdefault(tuple(own), len(known)) for rank, own in sums_of.items()}
    modules = {name: _renumbered(module, numbers) for name, module in plan.modules.items()}
    # in the order in which ranks run the sums
    own_groups = tuple(SyncGroup(ranks, parameters, stages) for ranks, stages, parameters in alike)
    represented = tuple(map(tuple, alike.values()))
    own_plan = replace(plan, modules=modules)
    return Representatives(own_plan, own_groups, represented, plan, tuple(sync_groups), numbers)


def _renumbered(module: ModulePlan, numbers: dict[int, int]) -> ModulePlan:
    """The module with renumbered ranks; each stage has one tp group of them."""
    replicas: list[tuple[Stage, ...]] = [()] * module.dp_size
    for replica in module.with_stages:
        stages = module.replicas[replica]
        replicas[replica] = tuple(replace(stage, mesh=(_renumber(stage.all_ranks, numbers),)) for stage in stages)
    # `joint_replicas` stays what it is, without the cp ranks.
    sharding = replace(module.sharding, shard_size=module.joint_replicas) if module.sharding.zero_stage else None
    renumbered = replace(module, replicas=tuple(replicas), sharding=sharding or module.sharding)
    count = module.expert_replicas
    return replace(renumbered, ep_size=count * renumbered.tp_size if count > 1 else 1)


def _renumber(ranks: Sequence[int], numbers: dict[int, int]) -> tuple[int, ...]:
    """The new numbers of some ranks, without duplicates."""
    return tuple(sorted({numbers[rank] for rank in ranks}))


def representative_ranks(plan: ParallelPlan) -> dict[int, int]:
    """Rank -> number of the representative of all ranks of the same stages."""
    stages: dict[int, list] = {}
    for name, module in plan.modules.items():
        for replica, index, stage in module.stages():
            for rank in stage.all_ranks:
                stages.setdefault(rank, []).append((name, replica, index))
    numbers: dict[tuple, int] = {}
    return {rank: numbers.setdefault(tuple(stages[rank]), len(numbers)) for rank in sorted(stages)}
