"""Verification of a program with numpy: yes or no; on a no the checker in `program_checks` names the error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, SyncGroup
from .action_lists import PartActions
from .graph import StageRanks, TaskGraph


class Proof:
    """The checks of `program_checks` on the action lists of a part, which must be of the same `graph` object."""

    def __init__(self, plan: ParallelPlan, graph: TaskGraph, sync_groups: Sequence[SyncGroup], lists: PartActions):
        self.graph, self.lists, self.sync_groups, self.num_ranks = graph, lists, sync_groups, plan.world_size
        self.ranks = StageRanks(plan)
        self.num_codes = lists.first_sum + len(sync_groups)
        # Index of the task, message or sum, and the rank, of each expected action.
        self.tasks = self.ranks.of(graph.columns[0])
        self.sends, self.receives = (self.ranks.of(graph.columns[0, ends]) for ends in graph.links)
        number = np.repeat(np.arange(len(sync_groups)), [len(group.ranks) for group in sync_groups])
        self.sums = (
            number,
            np.fromiter(chain.from_iterable(group.ranks for group in sync_groups), np.int64, len(number)),
        )

    def holds(self, order: NDArray, in_order: bool) -> bool:
        """
        Checks everything; `in_order`: gradient sums have to come in the order of their indices.

        `order`, `[tasks + groups]`, has the position of each task, then of each gradient sum, in a valid order of the
        blocking actions, of which joint tasks are one. A deadlock passes for no order, since there is no order for a
        cycle.
        """
        return self._is_complete() and self._is_ordered() and self._keeps_channels() and self._follows(order, in_order)

    def _is_complete(self) -> bool:
        """Whether each rank has each of its actions once, and no others; records their positions."""
        first, lists = self.graph.num_tasks, self.lists
        expected = [
            (self.tasks[1], self.tasks[0]),
            (self.sends[1], first + self.sends[0]),
            (self.receives[1], first + self.graph.num_messages + self.receives[0]),
            (self.sums[1], lists.first_sum + self.sums[0]),
        ]
        wanted = np.sort(np.concatenate([self._key(rank, code) for rank, code in expected]))
        lengths, codes = np.diff(lists.starts), lists.codes
        is_whole = lists.starts[0] == 0 and lists.starts[-1] == len(codes) == len(wanted) and (lengths >= 0).all()
        one_each = lists.sums is None and list(lists.list_of.items()) == [
            (rank, rank) for rank in range(self.num_ranks)
        ]
        if not is_whole or not one_each or len(lengths) != self.num_ranks:
            return False
        if len(codes) and not 0 <= codes.min() <= codes.max() < self.num_codes:
            return False
        self.rank_of = np.repeat(np.arange(self.num_ranks), lengths)
        keys = self._key(self.rank_of, codes)
        self.by_key = np.argsort(keys, kind="stable")
        self.keys = keys[self.by_key]
        return np.array_equal(self.keys, wanted) and bool((np.diff(wanted) > 0).all())

    def _key(self, rank: NDArray, code: NDArray) -> NDArray:
        return rank * self.num_codes + code

    def _at(self, rank: NDArray, code: NDArray) -> NDArray:
        """Position of each action in `codes`, -1 if the rank does not have it."""
        if not len(self.keys):
            return np.full(len(rank), -1)
        key = self._key(rank, code)
        position = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        return np.where(self.keys[position] == key, self.by_key[position], -1)

    def _is_ordered(self) -> bool:
        """Whether each list by itself is in a valid order; records the positions of tasks and sends."""
        graph, first = self.graph, self.graph.num_tasks
        (task, rank), (sent, sender), (received, receiver) = self.tasks, self.sends, self.receives
        self.task_at, self.send_at = self._at(rank, task), self._at(sender, first + sent)
        receive_at = self._at(receiver, first + graph.num_messages + received)
        source, target = graph.links
        forward, needed = graph.forward[task], graph.forward[target[received]]
        back, sized = forward >= 0, needed >= 0
        own_send = self._at(receiver, first + received)  # -1 unless the rank is also in the source
        return bool(
            (self._at(rank[back], forward[back]) < self.task_at[back]).all()
            and (self._at(sender, source[sent]) < self.send_at).all()
            and (receive_at < self._at(receiver, target[received])).all()
            and (self._at(receiver[sized], needed[sized]) < receive_at[sized]).all()
            and (own_send < receive_at).all()
            and self._sums_are_late(task[back], rank[back], self.task_at[back])
        )

    def _sums_are_late(self, task: NDArray, rank: NDArray, at: NDArray) -> bool:
        """Whether every backward comes before the gradient sums of its stage."""
        numbers = {key: number for number, key in enumerate(self.graph.stages)}
        pairs = [
            (n, numbers[key]) for n, group in enumerate(self.sync_groups) for key in group.stages if key in numbers
        ]
        number, stage = np.array(pairs, np.int64).reshape(-1, 2).T
        owner, holder = self.ranks.of(stage)
        sum_at = self._at(holder, self.lists.first_sum + number[owner])
        on_rank = sum_at >= 0
        key = (stage[owner] * self.num_ranks + holder)[on_rank]
        order = np.lexsort((sum_at[on_rank], key))
        key, sum_at = key[order], sum_at[on_rank][order]
        if not len(key):
            return True
        wanted = self.graph.columns[0, task] * self.num_ranks + rank
        position = np.minimum(np.searchsorted(key, wanted), len(key) - 1)  # the first sum of the stage on the rank
        return bool(((key[position] != wanted) | (at < sum_at[position])).all())

    def _keeps_channels(self) -> bool:
        """Whether the receives from one rank to another are in the order of the sends."""
        graph, (sent, sender) = self.graph, self.sends
        owner, receiver = self.ranks.of(graph.columns[0, graph.links[1, sent]])
        receive_at = self._at(receiver, graph.num_tasks + graph.num_messages + sent[owner])
        channel = sender[owner] * self.num_ranks + receiver
        order = np.lexsort((self.send_at[owner], channel))
        same = np.diff(channel[order]) == 0
        return bool((np.diff(receive_at[order])[same] > 0).all())

    def _follows(self, order: NDArray, in_order: bool) -> bool:
        """Whether the blocking actions come in the given order, so that ranks can't deadlock."""
        codes, first = self.lists.codes, self.graph.num_tasks
        is_sum = codes >= self.lists.first_sum
        positions = np.flatnonzero((codes < first) | is_sum)
        nodes = order[np.where(is_sum, codes - self.lists.first_sum + first, codes)[positions]]
        same = np.diff(self.rank_of[positions]) == 0
        # A send comes after the preceding blocking action of its rank.
        before = nodes[np.searchsorted(positions, self.send_at) - 1] if len(positions) else nodes
        sums, joint = order[first:], self.graph.joint
        return bool(
            (joint is None or np.array_equal(order[:first], order[joint]))
            and (np.diff(nodes)[same] > 0).all()
            and (before < order[self.graph.links[1, self.sends[0]]]).all()
            and (not in_order or (np.diff(sums) > 0).all())
        )
