"""Action lists of thousands of ranks as integer codes in numpy arrays; `Action` objects are made on access only."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, dropwhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .graph import TaskGraph, concatenate_ranges
from .kinds import FORWARD, KINDS, Action, Task, TaskKey

_KIND_NUMBERS = {word: number for number, word in enumerate(KINDS)}
_TRANSFERS = {"send": 2, "recv": 3, "sync": 4}  # between the tasks of the first two kinds and those of others
_OPS = _TRANSFERS | {word: n if n < 2 else n + len(_TRANSFERS) for word, n in _KIND_NUMBERS.items()}
_RUNS = np.array([_OPS[word] for word in KINDS])  # the op that runs a task of each kind
_FACTORS = np.random.default_rng(0).integers(1, 2**63, 10, np.uint64) * np.uint64(2) + np.uint64(1)


@dataclass(frozen=True)
class PartActions:
    """The action lists of the ranks of one graph, concatenated."""

    graph: TaskGraph
    starts: NDArray  # [lists + 1], start of each list in `codes`
    # with t tasks and m messages: `i` runs task `i`, `t + i` sends message `i`, `t + m + i` receives it, and
    # `t + 2 m + i` is gradient sum `i`
    codes: NDArray
    list_of: Mapping[int, int]  # rank -> index of its list, which several ranks may share
    # rank -> index of a gradient sum in `codes` -> the sums that replace it in the rank's list; the sum itself when
    # left out
    sums: Mapping[int, Mapping[int, Sequence[int]]] | None = None
    _known: dict[int, Action] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def first_sum(self) -> int:
        """The code of the first gradient sum."""
        return self.graph.num_tasks + 2 * self.graph.num_messages

    def of_rank(self, rank: int) -> tuple[Action, ...]:
        index = self.list_of[rank]
        result: list[Action] = []
        for code in self.codes[self.starts[index] : self.starts[index + 1]].tolist():
            number = code - self.first_sum
            numbers = (number,) if number < 0 or self.sums is None else self.sums[rank].get(number, ())
            result.extend(self._action(self.first_sum + each) for each in numbers)
        return tuple(result)

    def _action(self, code: int) -> Action:
        """The action of a code; all ranks share the object."""
        if code not in self._known:
            self._known[code] = self.decode(code)
        return self._known[code]

    def decode(self, code: int) -> Action:
        """The action of a code, a new object."""
        graph = self.graph
        if code < graph.num_tasks:
            return Action.run(graph.task(code))
        if code >= self.first_sum:
            return Action("sync", index=code - self.first_sum)
        is_received, message = divmod(code - graph.num_tasks, graph.num_messages)
        return Action("recv" if is_received else "send", message=graph.message(message))

    def hashes(self) -> tuple[NDArray, NDArray, NDArray]:
        """The ranks, the lengths of their lists, and the hash of each action, concatenated over the ranks."""
        ranks = np.fromiter(self.list_of, np.int64, len(self.list_of))
        lists = np.fromiter(self.list_of.values(), np.int64, len(self.list_of))
        lengths = np.diff(self.starts)[lists]
        codes = self.codes[concatenate_ranges(self.starts[lists], lengths)]
        hashes = self._code_hashes[np.minimum(codes, self.first_sum)]
        at = np.flatnonzero(codes >= self.first_sum)
        numbers: Iterable[Sequence[int]] = (codes[at, None] - self.first_sum).tolist()
        if self.sums is not None:
            owner = np.repeat(np.arange(len(ranks)), lengths)
            sums = (self.sums[rank] for rank in ranks[owner[at]].tolist())
            numbers = [of_rank.get(number, ()) for of_rank, (number,) in zip(sums, numbers, strict=True)]
            counts = np.ones(len(codes), np.int64)
            counts[at] = list(map(len, numbers))
            lengths = np.bincount(owner, counts, len(ranks)).astype(np.int64)
            hashes, at = np.repeat(hashes, counts), np.flatnonzero(np.repeat(codes >= self.first_sum, counts))
        flat = np.fromiter(chain.from_iterable(numbers), np.int64, len(at))
        hashes[at] = _action_hashes(_OPS["sync"], flat)
        return ranks, lengths, hashes

    @cached_property
    def _code_hashes(self) -> NDArray:
        """The hash of each code below `first_sum`, and a 0 for gradient sums."""
        graph = self.graph
        names = np.array([zlib.crc32(key[0].encode()) for key in graph.stages], np.int64)
        replica_and_stage = np.array([key[1:] for key in graph.stages], np.int64).reshape(-1, 2)
        stage, microbatch, chunk = graph.columns
        kind = graph.kind.astype(np.int64)
        tasks = _task_hashes(np.stack([kind, names[stage], *replica_and_stage[stage].T, microbatch, chunk]))
        source, target = tasks[graph.links]
        transfers = [_action_hashes(_OPS[op], -1, source, target) for op in ("send", "recv")]
        return np.concatenate([_action_hashes(_RUNS[kind], -1, tasks), *transfers, [np.uint64(0)]])


class ProgramActions(Mapping[int, tuple[Action, ...]]):
    """Rank -> its actions, decoded on access; each rank is in one of the parts."""

    def __init__(self, parts: Iterable[PartActions]):
        self.parts = tuple(parts)
        self._part_of = {rank: part for part in self.parts for rank in part.list_of}
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
        if not self.parts:
            return _digest(_EMPTY, _EMPTY, _EMPTY)
        ranks, lengths, hashes = map(np.concatenate, zip(*(part.hashes() for part in self.parts), strict=True))
        order = np.argsort(ranks, kind="stable")
        starts = np.cumsum(lengths) - lengths
        return _digest(ranks[order], lengths[order], hashes[concatenate_ranges(starts[order], lengths[order])])

    def replicas(self, module: str) -> frozenset[int]:
        """Indices of the replicas of a module with tasks."""
        result: set[int] = set()
        for part in self.parts:
            in_module = np.array([key[0] == module for key in part.graph.stages], bool)
            stages = np.unique(part.graph.columns[0])
            result.update(part.graph.stages[stage][1] for stage in stages[in_module[stages]].tolist())
        return frozenset(result)


_EMPTY = np.zeros(0, np.int64)


def checksum(actions: Mapping[int, Sequence[Action]]) -> int:
    """Returns a 63-bit checksum of all ranks' ordered actions, equal in every process and for every kind of lists."""
    if isinstance(actions, ProgramActions):
        return actions.checksum()
    ranks = sorted(actions)
    flat = [action for rank in ranks for action in actions[rank]]
    ends = [(a.task, None) if a.message is None else (a.message.source, a.message.target) for a in flat]
    first, second = (_hashes_of([pair[i] for pair in ends]) for i in range(2))
    ops = np.array([_OPS[action.op] for action in flat], np.int64)
    numbers = np.array([-1 if action.index is None else action.index for action in flat], np.int64)
    lengths = np.array([len(actions[rank]) for rank in ranks], np.int64)
    return _digest(np.array(ranks, np.int64), lengths, _action_hashes(ops, numbers, first, second))


def _digest(ranks: NDArray, lengths: NDArray, hashes: NDArray) -> int:
    digest = hashlib.blake2b(np.stack([ranks, lengths]).tobytes(), digest_size=8)
    digest.update(hashes.tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


def _hashes_of(tasks: Sequence[Task | None]) -> NDArray:
    """The hashes of tasks, 0 for `None`."""
    rows = [
        (0,) * 6 if task is None else (_KIND_NUMBERS[task.kind], zlib.crc32(task.module.encode()), *task.key[1:])
        for task in tasks
    ]
    hashes = _task_hashes(np.array(rows, np.int64).reshape(-1, 6).T)
    hashes[[task is None for task in tasks]] = 0
    return hashes


def _task_hashes(columns: NDArray) -> NDArray:
    """Hashes, uint64 `[n]`, of kind, module, replica, stage, microbatch and chunk, `[6, n]`."""
    return _mixed((columns.astype(np.uint64) * _FACTORS[:6, None]).sum(axis=0, dtype=np.uint64))


def _action_hashes(op: Any, number: Any, first: Any = 0, second: Any = 0) -> NDArray:
    """Hashes, uint64 `[n]`, of the op, the index of a gradient sum or -1, and the hashes of the tasks or 0."""
    columns = np.broadcast_arrays(*(np.asarray(part).astype(np.uint64) for part in (op, number, first, second)))
    return _mixed((np.stack(columns) * _FACTORS[6:, None]).sum(axis=0, dtype=np.uint64))


def _mixed(values: NDArray) -> NDArray:
    values = (values ^ (values >> np.uint64(31))) * _FACTORS[0]
    return values ^ (values >> np.uint64(29))


# `Program`: the ordered actions of all ranks, with a text form.


def _is_forward(action: Action) -> bool:
    if action.task is not None:
        return action.task.row.direction == FORWARD
    return action.message is not None and action.message.kind == "act"


@dataclass(frozen=True)
class Program:
    """The ordered actions of every rank for one global batch."""

    actions: Mapping[int, tuple[Action, ...]]

    @cached_property
    def closed_keys(self) -> frozenset[TaskKey]:
        """The keys of all tasks whose saved activations another task frees."""
        return frozenset(
            action.task.key
            for actions in self.actions.values()
            for action in actions
            if action.task is not None and action.task.row.closes
        )

    @cached_property
    def checksum(self) -> int:
        """Checksum of the ordered actions of all ranks; the same in every process."""
        return checksum(self.actions)

    def replicas(self, module: str) -> frozenset[int]:
        """Indices of the replicas of a module with tasks in this program."""
        if isinstance(self.actions, ProgramActions):
            return self.actions.replicas(module)
        lists = {id(actions): actions for actions in self.actions.values()}.values()
        tasks = (action.task for actions in lists for action in actions)
        return frozenset(task.replica for task in tasks if task is not None and task.module == module)

    def has_backward(self, task: Task) -> bool:
        """Returns whether a chunk has a backward on its stage; if not, its forward needs no autograd graph."""
        return task.key in self.closed_keys

    def forwards(self) -> Program:
        """The same without backwards and what belongs to them, in the same order."""
        return Program({rank: tuple(filter(_is_forward, actions)) for rank, actions in self.actions.items()})

    def has_forwards_first(self, rank: int) -> bool:
        """Returns whether a rank has nothing to do for forwards behind its first backward."""
        actions = self.actions.get(rank, ())
        behind = dropwhile(lambda action: action.task is None or _is_forward(action), actions)
        return not any(map(_is_forward, behind))

    def of_rank(self, rank: int) -> Program:
        return Program({rank: self.actions.get(rank, ())})

    def dump(self) -> str:
        """The program as text: a line `rank n` for each rank, followed by one line per action."""
        lines = []
        for rank in sorted(self.actions):
            lines += [f"rank {rank}", *(f"  {action}" for action in self.actions[rank])]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Program:
        """Parses the output of [`~Program.dump`]. Raises `ValueError` for anything else."""
        actions: dict[int, list[Action]] = {}
        current: list[Action] | None = None
        for line in map(str.strip, text.splitlines()):
            if line.startswith("rank "):
                current = actions.setdefault(int(line.removeprefix("rank ")), [])
            elif line and current is None:
                raise ValueError(f"`{line}` stands before the first rank. Start the text with a line `rank 0`.")
            elif line and current is not None:
                current.append(Action.parse(line))
        return cls({rank: tuple(own) for rank, own in actions.items()})
