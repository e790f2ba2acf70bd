"""
Shows in arrays that a program is right. It refuses nothing: where it can't show that, the checker says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, SyncGroup
from .action_lists import PartRows
from .graph import StageRanks, TaskGraph


class Proof:
    """
    Looks for all that the checker looks for, in the rows of a part.

    Args:
        plan (`ParallelPlan`): The layout.
        graph ([`TaskGraph`]): The work of the step; the rows are of the same.
        groups (`Sequence[SyncGroup]`): The gradient sums.
        rows ([`PartRows`]): The program.
    """

    def __init__(self, plan: ParallelPlan, graph: TaskGraph, groups: Sequence[SyncGroup], rows: PartRows):
        self.graph, self.rows, self.groups, self.num_ranks = graph, rows, groups, plan.world_size
        self.ranks = StageRanks(plan)
        self.num_codes = rows.first_sum + len(groups)
        # The message, or the task, and the rank of each action, from the graph alone.
        self.tasks = self.ranks.of(graph.columns[0])
        self.sends, self.receives = (self.ranks.of(graph.columns[0, ends]) for ends in graph.links)
        number = np.repeat(np.arange(len(groups)), [len(group.ranks) for group in groups])
        self.sums = number, np.fromiter(chain.from_iterable(group.ranks for group in groups), np.int64, len(number))

    def holds(self, order: NDArray, in_order: bool) -> bool:
        """
        Whether the program passes all checks.

        Args:
            order (`np.ndarray` of shape `[tasks + groups]`):
                Where each task, and each gradient sum behind these, stands in one order in which all of them can be
                done. Whatever it is, no program with a deadlock passes, as no order is one for a circle.
            in_order (`bool`): Whether gradient sums have to come in the order of their numbers.
        """
        return self._is_complete() and self._is_ordered() and self._keeps_channels() and self._ends(order, in_order)

    def _is_complete(self) -> bool:
        """Whether each rank has all of its actions once, and no others; notes where they are."""
        first, rows = self.graph.num_tasks, self.rows
        expected = [
            (self.tasks[1], self.tasks[0]),
            (self.sends[1], first + self.sends[0]),
            (self.receives[1], first + self.graph.num_messages + self.receives[0]),
            (self.sums[1], rows.first_sum + self.sums[0]),
        ]
        wanted = np.sort(np.concatenate([self._key(rank, code) for rank, code in expected]))
        lengths, codes = np.diff(rows.starts), rows.codes
        is_whole = rows.starts[0] == 0 and rows.starts[-1] == len(codes) == len(wanted) and (lengths >= 0).all()
        is_own = rows.sums is None and list(rows.row_of.items()) == [(rank, rank) for rank in range(self.num_ranks)]
        if not is_whole or not is_own or len(lengths) != self.num_ranks:
            return False
        if len(codes) and not 0 <= codes.min() <= codes.max() < self.num_codes:
            return False
        self.row = np.repeat(np.arange(self.num_ranks), lengths)
        keys = self._key(self.row, codes)
        self.by_key = np.argsort(keys)
        self.keys = keys[self.by_key]
        return np.array_equal(self.keys, wanted) and bool((np.diff(wanted) > 0).all())

    def _key(self, rank: NDArray, code: NDArray) -> NDArray:
        return rank * self.num_codes + code

    def _at(self, rank: NDArray, code: NDArray) -> NDArray:
        """Where in the rows each action is, -1 for one that the rank does not have."""
        if not len(self.keys):
            return np.full(len(rank), -1)
        key = self._key(rank, code)
        place = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        return np.where(self.keys[place] == key, self.by_key[place], -1)

    def _is_ordered(self) -> bool:
        """Whether what a list says by itself is possible; notes where tasks, sends and receives are."""
        graph, first = self.graph, self.graph.num_tasks
        (task, rank), (sent, sender), (received, receiver) = self.tasks, self.sends, self.receives
        self.task_at, self.send_at = self._at(rank, task), self._at(sender, first + sent)
        receive_at = self._at(receiver, first + graph.num_messages + received)
        source, target = graph.links
        forward, needed = graph.forward[task], graph.forward[target[received]]
        back, sized = forward >= 0, needed >= 0
        own_send = self._at(receiver, first + received)  # of a rank that is in the source, too
        return bool(
            (self._at(rank[back], forward[back]) < self.task_at[back]).all()
            and (self._at(sender, source[sent]) < self.send_at).all()
            and (receive_at < self._at(receiver, target[received])).all()
            and (self._at(receiver[sized], needed[sized]) < receive_at[sized]).all()
            and (own_send < receive_at).all()
            and self._sums_are_late(task[back], rank[back], self.task_at[back])
        )

    def _sums_are_late(self, task: NDArray, rank: NDArray, at: NDArray) -> bool:
        """Whether no backward comes behind a sum of the gradients of its stage."""
        numbers = {key: number for number, key in enumerate(self.graph.stages)}
        pairs = [(n, numbers[key]) for n, group in enumerate(self.groups) for key in group.stages if key in numbers]
        number, stage = np.array(pairs, np.int64).reshape(-1, 2).T
        owner, holder = self.ranks.of(stage)
        sum_at = self._at(holder, self.rows.first_sum + number[owner])
        on_rank = sum_at >= 0
        key = (stage[owner] * self.num_ranks + holder)[on_rank]
        order = np.lexsort((sum_at[on_rank], key))
        key, sum_at = key[order], sum_at[on_rank][order]
        if not len(key):
            return True
        wanted = self.graph.columns[0, task] * self.num_ranks + rank
        place = np.minimum(np.searchsorted(key, wanted), len(key) - 1)  # the first sum of the stage on the rank
        return bool(((key[place] != wanted) | (at < sum_at[place])).all())

    def _keeps_channels(self) -> bool:
        """Whether what one rank sends another arrives in the order in which it is received."""
        graph, (sent, sender) = self.graph, self.sends
        owner, receiver = self.ranks.of(graph.columns[0, graph.links[1, sent]])
        receive_at = self._at(receiver, graph.num_tasks + graph.num_messages + sent[owner])
        channel = sender[owner] * self.num_ranks + receiver
        order = np.lexsort((self.send_at[owner], channel))
        same = np.diff(channel[order]) == 0
        return bool((np.diff(receive_at[order])[same] > 0).all())

    def _ends(self, order: NDArray, in_order: bool) -> bool:
        """Whether all that blocks comes in the given order, so that no ranks wait for each other in a circle."""
        codes, first = self.rows.codes, self.graph.num_tasks
        is_sum = codes >= self.rows.first_sum
        places = np.flatnonzero((codes < first) | is_sum)
        nodes = order[np.where(is_sum, codes - self.rows.first_sum + first, codes)[places]]
        same = np.diff(self.row[places]) == 0
        # What a rank sends comes behind all that blocks it before.
        before = nodes[np.searchsorted(places, self.send_at) - 1] if len(places) else nodes
        sums = order[first:]
        return bool(
            (np.diff(nodes)[same] > 0).all()
            and (before < order[self.graph.links[1, self.sends[0]]]).all()
            and (not in_order or (np.diff(sums) > 0).all())
        )
