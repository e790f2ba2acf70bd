"""
The lists of ranks as numbers: those of thousands of ranks are written, checked and compared in arrays, and actions are
made of those only that are looked at.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .actions import Action, Task
from .graph import TaskGraph, spread

_OPS = {op: number for number, op in enumerate(("fwd", "bwd", "send", "recv", "sync"))}
_FACTORS = np.random.default_rng(0).integers(1, 2**63, 10, np.uint64) * np.uint64(2) + np.uint64(1)


@dataclass(frozen=True)
class PartRows:
    """
    The lists of the ranks of one graph. With `t` tasks and `m` messages the code of an action is: below `t` the place
    of a task that runs, then `t` plus the number of a message that is sent, `t + m` plus that of one that is received,
    and `t + 2 m` plus the number of a gradient sum.

    Args:
        graph ([`TaskGraph`]): What is done.
        starts (`np.ndarray` of shape `[rows + 1]`): Where the codes of each row start.
        codes (`np.ndarray`): The codes of all rows, one row after the other.
        row_of (`Mapping[int, int]`): Rank -> its row, which several ranks may share.
        sums (`Mapping[int, Mapping[int, Sequence[int]]]`, *optional*):
            Rank -> number of a gradient sum -> the numbers that stand for it in the rank's list; just the number when
            left out.
    """

    graph: TaskGraph
    starts: NDArray
    codes: NDArray
    row_of: Mapping[int, int]
    sums: Mapping[int, Mapping[int, Sequence[int]]] | None = None
    _known: dict[int, Action] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def first_sum(self) -> int:
        """The code of the first gradient sum."""
        return self.graph.num_tasks + 2 * self.graph.num_messages

    def of_rank(self, rank: int) -> tuple[Action, ...]:
        """The list of a rank."""
        row = self.row_of[rank]
        result: list[Action] = []
        for code in self.codes[self.starts[row] : self.starts[row + 1]].tolist():
            number = code - self.first_sum
            standing = (number,) if number < 0 or self.sums is None else self.sums[rank].get(number, ())
            result.extend(self._action(self.first_sum + each) for each in standing)
        return tuple(result)

    def _action(self, code: int) -> Action:
        """The action of a code; ranks share the object."""
        if code not in self._known:
            self._known[code] = self._made(code)
        return self._known[code]

    def _made(self, code: int) -> Action:
        graph = self.graph
        if code < graph.num_tasks:
            return Action.run(graph.task(code))
        if code >= self.first_sum:
            return Action("sync", index=code - self.first_sum)
        is_received, message = divmod(code - graph.num_tasks, graph.num_messages)
        return Action("recv" if is_received else "send", message=graph.message(message))

    def words(self) -> tuple[NDArray, NDArray, NDArray]:
        """Ranks, the lengths of their lists, and a word for each action of these one after the other."""
        ranks, rows = (np.fromiter(own, np.int64, len(self.row_of)) for own in (self.row_of, self.row_of.values()))
        lengths = np.diff(self.starts)[rows]
        codes = self.codes[spread(self.starts[rows], lengths)]
        words = self._code_words[np.minimum(codes, self.first_sum)]
        at = np.flatnonzero(codes >= self.first_sum)
        numbers: Iterable[Sequence[int]] = (codes[at, None] - self.first_sum).tolist()
        if self.sums is not None:
            owner = np.repeat(np.arange(len(ranks)), lengths)
            of_rank = (self.sums[rank] for rank in ranks[owner[at]].tolist())
            numbers = [own.get(number, ()) for own, (number,) in zip(of_rank, numbers, strict=True)]
            counts = np.ones(len(codes), np.int64)
            counts[at] = list(map(len, numbers))
            lengths = np.bincount(owner, counts, len(ranks)).astype(np.int64)
            words, at = np.repeat(words, counts), np.flatnonzero(np.repeat(codes >= self.first_sum, counts))
        flat = np.fromiter(chain.from_iterable(numbers), np.int64, len(at))
        words[at] = _action_words(_OPS["sync"], flat)
        return ranks, lengths, words

    @cached_property
    def _code_words(self) -> NDArray:
        """The word of each code that is no gradient sum, and one more."""
        graph = self.graph
        names = np.array([zlib.crc32(key[0].encode()) for key in graph.stages], np.int64)
        places = np.array([key[1:] for key in graph.stages], np.int64).reshape(-1, 2)
        stage, microbatch, chunk = graph.columns
        is_backward = (graph.forward >= 0).astype(np.int64)
        tasks = _task_words(np.stack([is_backward, names[stage], *places[stage].T, microbatch, chunk]))
        source, target = tasks[graph.links]
        moved = [_action_words(_OPS[op], -1, source, target) for op in ("send", "recv")]
        return np.concatenate([_action_words(is_backward, -1, tasks), *moved, [np.uint64(0)]])


class ProgramRows(Mapping[int, tuple[Action, ...]]):
    """
    Rank -> its actions, which are made when they are asked for.

    Args:
        parts (`Iterable[PartRows]`): The lists, each rank in one of them.
    """

    def __init__(self, parts: Iterable[PartRows]):
        self.parts = tuple(parts)
        self._part_of = {rank: part for part in self.parts for rank in part.row_of}
        self._made: dict[int, tuple[Action, ...]] = {}

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        if rank not in self._made:
            self._made[rank] = self._part_of[rank].of_rank(rank)
        return self._made[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._part_of))

    def __len__(self) -> int:
        return len(self._part_of)

    def checksum(self) -> int:
        """See [`checksum`]."""
        found = [part.words() for part in self.parts]
        ranks, lengths, words = (np.concatenate([own[i] for own in found]) for i in range(3)) if found else [_NONE] * 3
        order = np.argsort(ranks)
        starts = np.cumsum(lengths) - lengths
        return _digest(ranks[order], lengths[order], words[spread(starts[order], lengths[order])])

    def replicas(self, module: str) -> frozenset[int]:
        """The replicas of a module that have tasks."""
        found: set[int] = set()
        for part in self.parts:
            is_own = np.array([key[0] == module for key in part.graph.stages], bool)
            stages = np.unique(part.graph.columns[0])
            found.update(part.graph.stages[stage][1] for stage in stages[is_own[stages]].tolist())
        return frozenset(found)


class TaskTimes(Mapping[Task, tuple[float, float]]):
    """
    Task -> its start and its end, of the tasks of some graphs.

    Args:
        parts (`Iterable[tuple[TaskGraph, Sequence[float], Sequence[float]]]`): Graphs, and starts and ends of their
            tasks.
    """

    def __init__(self, parts: Iterable[tuple[TaskGraph, Sequence[float], Sequence[float]]]):
        self.parts = tuple(parts)

    @cached_property
    def _all(self) -> dict[Task, tuple[float, float]]:
        return {
            task: times
            for graph, starts, ends in self.parts
            for task, times in zip(graph.tasks, zip(starts, ends, strict=True), strict=True)
        }

    def __getitem__(self, task: Task) -> tuple[float, float]:
        return self._all[task]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._all)

    def __len__(self) -> int:
        return sum(graph.num_tasks for graph, _, _ in self.parts)

    def of_tasks(self, tasks: Iterable[Task]) -> dict[Task, tuple[float, float]]:
        """Those of a few tasks, faster than one by one."""
        found = {}
        for task in tasks:
            for graph, starts, ends in self.parts:
                place = graph.place(task)
                if place is not None:
                    found[task] = (starts[place], ends[place])
        return found


_NONE = np.zeros(0, np.int64)


def checksum(actions: Mapping[int, Sequence[Action]]) -> int:
    """
    Of the actions of all ranks in their order: 63 bits that are the same in every process, and for equal lists however
    they are stored. An action counts by a word of 64 bits.

    Args:
        actions (`Mapping[int, Sequence[Action]]`): Rank -> its actions.
    """
    if isinstance(actions, ProgramRows):
        return actions.checksum()
    ranks = sorted(actions)
    flat = [action for rank in ranks for action in actions[rank]]
    ends = [(a.task, None) if a.message is None else (a.message.source, a.message.target) for a in flat]
    first, second = (_words_of([own[i] for own in ends]) for i in range(2))
    ops = np.array([_OPS[action.op] for action in flat], np.int64)
    numbers = np.array([-1 if action.index is None else action.index for action in flat], np.int64)
    lengths = np.array([len(actions[rank]) for rank in ranks], np.int64)
    return _digest(np.array(ranks, np.int64), lengths, _action_words(ops, numbers, first, second))


def _digest(ranks: NDArray, lengths: NDArray, words: NDArray) -> int:
    digest = hashlib.blake2b(np.stack([ranks, lengths]).tobytes(), digest_size=8)
    digest.update(words.tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


def _words_of(tasks: Sequence[Task | None]) -> NDArray:
    """The words of tasks, 0 for none."""
    rows = [
        (0,) * 6 if task is None else (_OPS[task.kind], zlib.crc32(task.module.encode()), *task.key[1:])
        for task in tasks
    ]
    words = _task_words(np.array(rows, np.int64).reshape(-1, 6).T)
    words[[task is None for task in tasks]] = 0
    return words


def _task_words(columns: NDArray) -> NDArray:
    """uint64 `[n]`: of `[6, n]` kind, module, replica, stage, microbatch and chunk."""
    return _mixed((columns.astype(np.uint64) * _FACTORS[:6, None]).sum(axis=0, dtype=np.uint64))


def _action_words(op: Any, number: Any, first: Any = 0, second: Any = 0) -> NDArray:
    """uint64 `[n]`: of what an action does, the number of a gradient sum or -1, and the words of its tasks or 0."""
    columns = np.broadcast_arrays(*(np.asarray(own).astype(np.uint64) for own in (op, number, first, second)))
    return _mixed((np.stack(columns) * _FACTORS[6:, None]).sum(axis=0, dtype=np.uint64))


def _mixed(values: NDArray) -> NDArray:
    """Spreads the bits of sums."""
    values = (values ^ (values >> np.uint64(31))) * _FACTORS[0]
    return values ^ (values >> np.uint64(29))
