"""Lowering: from an order of tasks to the actions of every rank, and the proof that these perform the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..plan import ParallelPlan, StageKey, StepPlan, SyncGroup
from .action_lists import PartActions, Program, ProgramActions
from .graph import StageRanks, TaskGraph, build_graph
from .in_flight import in_flight_limits, may_alternate
from .kinds import ADDS_GRADIENTS, Action, ProgramError
from .parts import Part, find_representatives
from .scheduler import Cost, Order, default_cost, order_tasks, task_times

# Position of a task at its start event. There, before it, message `i` in the order of all sends is received at `i`;
# after it, the message is sent at `_RUN + 2 i + 1` and received at `_RUN + 2 i + 2`. Fewer than 2**31 messages fit.
_RUN = 2**62


def build_program(
    plan: ParallelPlan,
    step: StepPlan,
    sync_groups: Sequence[SyncGroup],
    cost: Cost | None = None,  # task -> milliseconds; `default_cost` when left out
    training: bool = True,  # if not, no backwards and no gradient sums
    # microbatches that fit into memory, see `in_flight_limits`
    fitting_in_flight: Mapping[StageKey, float] | None = None,
) -> Program:
    """Plans and proves the actions of every rank; steps of equal `structure` and equal costs have equal programs."""
    representatives = find_representatives(plan, sync_groups)
    parts = representatives.parts(step)
    program = representatives.expand(program_of_parts(parts, cost, training, fitting_in_flight))
    return Program({rank: program.actions.get(rank, ()) for rank in range(plan.world_size)})


def program_of_parts(
    parts: Iterable[Part],
    cost: Cost | None = None,
    training: bool = True,
    fitting_in_flight: Mapping[StageKey, float] | None = None,
) -> Program:
    """Does [`build_program`] for parts, on representatives; the program of a part does not depend on the others."""
    rows = []
    for part in parts:
        sync_groups = part.sync_groups if training else ()
        graph, order = order_part(part, cost or default_cost, training, fitting_in_flight)
        lists = lower(part.plan, graph, order, sync_groups)
        prove(part.plan, graph, sync_groups, lists, blocking_order(graph, order, sync_groups))
        rows.append(part.renumber(lists))
    return Program(ProgramActions(rows))


def order_part(
    part: Part, cost: Cost, training: bool, fitting_in_flight: Mapping[StageKey, float] | None
) -> tuple[TaskGraph, Order]:
    """Returns the tasks of a part and their order."""
    graph = build_graph(part.plan, part.step, training)
    max_in_flight = in_flight_limits(part.plan, part.step, fitting_in_flight)
    alternate = training and may_alternate(part.plan)
    return graph, order_tasks(part.plan, graph, task_times(cost, graph), max_in_flight, alternate)


def lower(plan: ParallelPlan, graph: TaskGraph, order: Order, sync_groups: Sequence[SyncGroup]) -> PartActions:
    """
    Writes the action list of every rank.

    A send comes right after the task that produces the message. A receive comes one task before the one that needs the
    message, so that the transfer runs beside that task, and what two ranks send each other has one order on both: that
    of the sends in the simulation. Gradient sums come in the order of `sync_groups` on every rank, each at the
    same instant of the simulation on all of its ranks: when the slowest of its stages, and of those of earlier sums,
    is done. (With sums after each rank's own last backward, ranks shared by several modules could deadlock.)

    In arrays: the list of a rank is sorted by the event of each action and its position at the event.
    """
    started, finished = order.started, order.finished
    num_tasks, num_messages, source = graph.num_tasks, graph.num_messages, graph.links[0]
    ranks = StageRanks(plan)
    task, rank = ranks.of(graph.columns[0])
    sent = np.empty(num_messages, np.int64)  # place of each message in the order of all sends
    sent[np.lexsort((started[graph.links[1]], finished[source]))] = np.arange(num_messages)
    sends, receives = (ranks.of(graph.columns[0, ends]) for ends in graph.links)
    places = _receive_places(graph, started, ranks, sent, (sends, receives))
    received = sent[receives[0]]
    number = np.repeat(np.arange(len(sync_groups)), [len(group.ranks) for group in sync_groups])
    instants = _sum_events(graph, order, sync_groups)
    members = np.fromiter(chain.from_iterable(group.ranks for group in sync_groups), np.int64, len(number))
    actions = [  # tuples of rank, event, position at the event (see `_RUN`), code
        (rank, started[task], np.full(len(task), _RUN), task),
        (sends[1], started[source[sends[0]]], _RUN + 2 * sent[sends[0]] + 1, num_tasks + sends[0]),
        (
            receives[1],
            places // 2,
            np.where(places % 2, _RUN + 2 * received + 2, received),
            num_tasks + num_messages + receives[0],
        ),
        (members, instants[number], number, num_tasks + 2 * num_messages + number),
    ]
    rank, event, position, code = map(np.concatenate, zip(*actions, strict=True))
    by_event = rank * (2 * num_tasks + 1) + event
    starts = np.cumsum([0, *np.bincount(rank, minlength=plan.world_size).tolist()])
    return PartActions(graph, starts, code[np.lexsort((position, by_event))], {r: r for r in range(plan.world_size)})


def _receive_places(
    graph: TaskGraph,
    started: NDArray,  # [tasks], events
    ranks: StageRanks,
    order: NDArray,  # [messages], position in the order of all sends
    ends: Sequence[tuple[NDArray, NDArray]],  # messages and ranks of the sends, and of the receives
) -> NDArray:
    """
    Returns the place of each receive: `2 e` before the task that starts at event `e`, `2 e + 1` behind it.

    The sends and receives of a rank with others that share messages are a queue, which keeps the order of the sends. A
    receive comes before the task that precedes the one that needs it, or before what follows it in the queue; but
    behind the rank's own sends that precede it, and behind the forward that gives a gradient its size.
    """
    (sends, receives), num_places = ends, 2 * (2 * graph.num_tasks + 1)
    task, rank = ranks.of(graph.columns[0])
    starts = np.sort(rank * num_places + 2 * started[task])
    target = graph.links[1, receives[0]]
    needed = receives[1] * num_places + 2 * started[target]
    before = starts[np.maximum(np.searchsorted(starts, needed) - 1, 0)]
    ahead = np.where(before // num_places == receives[1], before, needed) % num_places
    before_it = graph.after[target]
    sized = np.where(before_it < 0, 0, 2 * started[before_it] + 1)
    sent = 2 * started[graph.links[0, sends[0]]] + 1
    queue, message = _queues(ranks, graph, ends), np.concatenate([sends[0], receives[0]])
    is_receive = np.repeat([False, True], [len(sends[0]), len(receives[0])])
    by_queue = np.lexsort((is_receive, order[message], queue))
    # Running extremes of all queues at once: a queue's places are moved past those of the queues before it.
    shift = queue[by_queue] * num_places
    earliest = np.maximum.accumulate(np.concatenate([sent, sized])[by_queue] + shift)
    latest = np.minimum.accumulate((np.concatenate([sent, ahead])[by_queue] + shift)[::-1])[::-1]
    places = np.empty(len(message), np.int64)
    places[by_queue] = np.maximum(earliest, latest) - shift
    return places[len(sends[0]) :]


def _queues(ranks: StageRanks, graph: TaskGraph, ends: Sequence[tuple[NDArray, NDArray]]) -> NDArray:
    """The queue of each send and receive, as an index: those of a rank with others that share messages."""
    num_ranks = int(ranks.ranks.max(initial=0)) + 1
    rank = np.concatenate([rank for _, rank in ends])
    others = np.concatenate([graph.columns[0, graph.links[1 - end, ends[end][0]]] for end in range(2)])
    owner, other = ranks.of(others)
    channel, number = np.unique(rank[owner] * num_ranks + other, return_inverse=True)
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    links = (np.ones(len(owner)), (number, number[first][owner]))
    return connected_components(coo_array(links, (len(channel), len(channel))), False)[1].astype(np.int64)[
        number[first]
    ]


def sum_instants(
    graph: TaskGraph, order: Order, sync_groups: Sequence[SyncGroup], parts: NDArray | None = None
) -> tuple[NDArray, NDArray, NDArray]:
    """
    Returns the event after which each gradient sum comes in each part that has ranks of it: index of the sum, part and
    event, int64 `[pairs]` each, ordered by part and index. `parts`, `[stages]`, is one part when left out.

    That is when the last backwards of its stages in the part, and of those of earlier sums, are done. A sum without
    backwards comes with the next one.
    """
    count, width = len(sync_groups), 2 * graph.num_tasks + 1
    parts = np.zeros(len(graph.stages), np.int64) if parts is None else parts
    numbers = {key: number for number, key in enumerate(graph.stages)}
    pairs = [
        (index, numbers[key]) for index, group in enumerate(sync_groups) for key in group.stages if key in numbers
    ]
    index, stage = np.array(pairs, np.int64).reshape(-1, 2).T
    keys, place = np.unique(parts[stage] * max(count, 1) + index, return_inverse=True)
    part, number = np.divmod(keys, max(count, 1))
    last = np.full(len(keys), -1)
    np.maximum.at(last, place, last_backwards(graph, order.finished)[stage])
    known = np.where(last >= 0, np.arange(len(keys)), len(keys))
    following = np.append(np.minimum.accumulate(known[::-1])[::-1], len(keys))[: len(keys)]
    is_known = np.append(part, -1)[following] == part
    instant = np.where(is_known, np.append(last, 0)[following], width - 1)
    shift = part * width
    return number, part, np.maximum.accumulate(instant + shift) - shift


def last_backwards(graph: TaskGraph, finished: NDArray) -> NDArray:
    """Event at which the last backward of each stage ends, int64 `[stages]`; -1 without backwards."""
    last, adds = np.full(len(graph.stages), -1), np.flatnonzero(ADDS_GRADIENTS[graph.kind])
    np.maximum.at(last, graph.columns[0, adds], finished[adds])
    return last


def _sum_events(graph: TaskGraph, order: Order, sync_groups: Sequence[SyncGroup]) -> NDArray:
    """The event after which each gradient sum of a part comes, int64 `[groups]`, see [`sum_instants`]."""
    result = np.full(len(sync_groups), 2 * graph.num_tasks)
    index, _, instant = sum_instants(graph, order, sync_groups)
    result[index] = instant
    return result


def blocking_order(graph: TaskGraph, order: Order, sync_groups: Sequence[SyncGroup]) -> NDArray:
    """Returns each task's and sum's position in an order, int64 `[tasks + groups]`; joint tasks share one."""
    events = np.concatenate([order.started, _sum_events(graph, order, sync_groups)])
    position = np.empty(len(events), np.int64)
    position[np.argsort(events, kind="stable")] = np.arange(len(events))
    if graph.joint is not None:
        position[: graph.num_tasks] = position[graph.joint]
    return position


# Proves that the action lists of a part perform its step and can't deadlock, with numpy; a breach is named.

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
