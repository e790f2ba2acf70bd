"""Proves that the action lists of a part perform its step and can't deadlock, with numpy; a breach is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..plan import ParallelPlan, SyncGroup
from .action_lists import PartActions
from .actions import Action, ProgramError
from .graph import StageRanks, TaskGraph
from .kinds import ADDS_GRADIENTS

# Whether each of some actions holds, their ranks and codes, and what is wrong where one does not.
Condition = tuple[NDArray, NDArray, NDArray, str]


def prove(
    plan: ParallelPlan, graph: TaskGraph, sync_groups: Sequence[SyncGroup], lists: PartActions, order: NDArray
) -> None:
    """
    Proves the lists of a [`Part`]: each rank has each of its actions once, in a valid order; what two ranks send each
    other is in one order on both; and all blocking actions follow `order`, in which gradient sums are in the order of
    `sync_groups`. Then no program composed of such parts can deadlock: between two sums each part proceeds
    independently of the others, and all parts reach the same sums in the same order.

    `order`, int64 `[tasks + groups]`, has the position of each task, then of each sum; joint tasks share theirs. A
    deadlock is proved by no order, since there is none for a cycle.

    Raises:
        `ProgramError`: For the first breach.
    """
    breach = Proof(plan, graph, sync_groups, lists).breach(order)
    if breach is not None:
        raise ProgramError(
            f"{breach} A schedule has made a program that can't run; `CONTRIBUTING.md` says how to add one."
        )


class Proof:
    """The conditions on the lists of a part, whose tasks and messages are those of `graph`."""

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

    def breach(self, order: NDArray) -> str | None:
        """What is wrong with the lists, or with the order; `None` if they are proved."""
        breach = self._incomplete()
        if breach is not None:
            return breach
        for holds, rank, code, words in chain(self._in_lists(), self._in_channels(), self._in_order(order)):
            if not holds.all():
                first = int(np.argmin(holds))
                return f"Rank {rank[first]} has `{self._action(int(code[first]))}` {words}."
        return None

    def _action(self, code: int) -> Action:
        return self.lists.decode(code)

    def _incomplete(self) -> str | None:
        """An action that a rank lacks, or has for no reason; records the positions of all."""
        first, lists = self.graph.num_tasks, self.lists
        expected = [
            (self.tasks[1], self.tasks[0]),
            (self.sends[1], first + self.sends[0]),
            (self.receives[1], first + self.graph.num_messages + self.receives[0]),
            (self.sums[1], lists.first_sum + self.sums[0]),
        ]
        wanted = np.sort(np.concatenate([self._key(rank, code) for rank, code in expected]))
        lengths, codes = np.diff(lists.starts), lists.codes
        is_whole = lists.starts[0] == 0 and lists.starts[-1] == len(codes) and (lengths >= 0).all()
        one_each = lists.sums is None and list(lists.list_of.items()) == [
            (rank, rank) for rank in range(self.num_ranks)
        ]
        if not is_whole or not one_each or len(lengths) != self.num_ranks:
            return f"The lists are not one for each of {self.num_ranks} ranks."
        if len(codes) and not 0 <= codes.min() <= codes.max() < self.num_codes:
            return "A list has an action that does not exist."
        self.rank_of = np.repeat(np.arange(self.num_ranks), lengths)
        keys = self._key(self.rank_of, codes)
        self.by_key = np.argsort(keys, kind="stable")
        self.keys = keys[self.by_key]
        if np.array_equal(self.keys, wanted) and bool((np.diff(wanted) > 0).all()):
            return None
        for missing in np.setdiff1d(wanted, self.keys).tolist():
            rank, code = divmod(missing, self.num_codes)
            return f"Rank {rank} never runs `{self._action(code)}`."
        is_new = np.diff(self.keys, prepend=-1) > 0
        for spare in self.keys[~is_new | ~np.isin(self.keys, wanted)].tolist():
            rank, code = divmod(spare, self.num_codes)
            return f"Rank {rank} has `{self._action(code)}` twice, or takes no part in it."
        return None

    def _key(self, rank: NDArray, code: NDArray) -> NDArray:
        return rank * self.num_codes + code

    def _at(self, rank: NDArray, code: NDArray) -> NDArray:
        """Position of each action in `codes`, -1 if the rank does not have it."""
        if not len(self.keys):
            return np.full(len(rank), -1)
        key = self._key(rank, code)
        position = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        return np.where(self.keys[position] == key, self.by_key[position], -1)

    def _in_lists(self) -> Iterator[Condition]:
        """Whether each list by itself is in a valid order; records the positions of sends."""
        graph, first = self.graph, self.graph.num_tasks
        (task, rank), (sent, sender), (received, receiver) = self.tasks, self.sends, self.receives
        task_at, self.send_at = self._at(rank, task), self._at(sender, first + sent)
        code = first + graph.num_messages + received
        receive_at = self._at(receiver, code)
        source, target = graph.links
        before, needed = graph.after[task], graph.after[target[received]]
        later, sized = before >= 0, needed >= 0
        in_turn = self._at(rank[later], before[later]) < task_at[later]
        yield in_turn, rank[later], task[later], "before what it follows"
        yield self._at(sender, source[sent]) < self.send_at, sender, first + sent, "before what it sends is computed"
        yield receive_at < self._at(receiver, target[received]), receiver, code, "after the task that needs it"
        is_late = self._at(receiver[sized], needed[sized]) < receive_at[sized]
        yield is_late, receiver[sized], code[sized], "before the forward that gives it its size"
        own_send = self._at(receiver, first + received)  # -1 unless the rank is also in the source
        yield own_send < receive_at, receiver, code, "before its own send of it"
        adds = ADDS_GRADIENTS[graph.kind[task]]
        in_time = self._before_sums(task[adds], rank[adds], task_at[adds])
        yield in_time, rank[adds], task[adds], "after the sum of its gradients"

    def _before_sums(self, task: NDArray, rank: NDArray, at: NDArray) -> NDArray:
        """Whether each backward comes before the gradient sums of its stage."""
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
            return np.ones(len(task), bool)
        wanted = self.graph.columns[0, task] * self.num_ranks + rank
        position = np.minimum(np.searchsorted(key, wanted), len(key) - 1)  # the first sum of the stage on the rank
        return (key[position] != wanted) | (at < sum_at[position])

    def _in_channels(self) -> Iterator[Condition]:
        """Whether what two ranks send each other is in one order on both."""
        graph, (sent, sender), count = self.graph, self.sends, self.num_ranks
        owner, receiver = self.ranks.of(graph.columns[0, graph.links[1, sent]])
        owner, receiver = owner[sender[owner] != receiver], receiver[sender[owner] != receiver]
        sender, sent = sender[owner], sent[owner]
        send, receive = graph.num_tasks + sent, graph.num_tasks + graph.num_messages + sent
        from_at, to_at, own_send = self.send_at[owner], self._at(receiver, receive), self._at(receiver, send)
        own_receive = self._at(sender, receive)
        # Of a message of both ranks to both, the sends of both stand side by side, and so do the receives.
        both = np.flatnonzero((own_send >= 0) & (own_receive >= 0))
        from_at, to_at = np.append(from_at, own_receive[both]), np.append(to_at, to_at[both])
        to_at[both] = own_send[both]
        sender, receiver, sent = (np.append(part, part[both]) for part in (sender, receiver, sent))
        upwards = sender < receiver
        pair = np.where(upwards, sender * count + receiver, receiver * count + sender)
        low_at, high_at = np.where(upwards, (from_at, to_at), (to_at, from_at))
        order = np.lexsort((low_at, pair))
        in_turn = (np.diff(high_at[order]) >= 0) | (np.diff(pair[order]) != 0)
        at = order[1:]
        yield in_turn, sender[at], graph.num_tasks + sent[at], "in another order than the rank that receives it"

    def _in_order(self, order: NDArray) -> Iterator[Condition]:
        """Whether the blocking actions come in the given order, so that ranks can't deadlock."""
        codes, first = self.lists.codes, self.graph.num_tasks
        is_sum = codes >= self.lists.first_sum
        positions = np.flatnonzero((codes < first) | is_sum)
        nodes = order[np.where(is_sum, codes - self.lists.first_sum + first, codes)[positions]]
        later = positions[1:]
        in_turn = (np.diff(nodes) > 0) | (np.diff(self.rank_of[positions]) != 0)
        yield in_turn, self.rank_of[later], codes[later], "where others wait for what comes later"
        # A send comes after the preceding blocking action of its rank.
        before = nodes[np.searchsorted(positions, self.send_at) - 1] if len(positions) else nodes
        sent, sender = self.sends
        yield before < order[self.graph.links[1, sent]], sender, first + sent, "behind what waits for it"
        if self.graph.joint is not None:
            task, rank = self.tasks
            together = order[task] == order[self.graph.joint[task]]
            yield together, rank, task, "apart from the tasks that it runs jointly with"
        number, rank = self.sums
        in_turn = np.append(True, np.diff(order[first:]) > 0)[number]
        yield in_turn, rank, self.lists.first_sum + number, "before an earlier sum"
