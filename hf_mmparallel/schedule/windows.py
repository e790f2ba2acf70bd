"""
The simulation of the scheduler for thousands of stages at once: what ends within a window of time is one operation on
arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .graph import TaskCounts, TaskGraph, spread

_FEWEST_TASKS = 16  # of a window, on average, below which the events one by one are faster
_MOST_ELEMENTS = 4_000_000  # of a table of stages and their backwards


class Windows:
    """
    Orders the tasks of stages of which no two share ranks, in one phase, as the events one by one do.

    No task that starts in a window ends in it: it is as long as the shortest task that any stage can start next. So a
    stage ends at most one task in it and starts at most one, and all that can come to it is known.

    Args:
        graph ([`TaskGraph`]): The tasks.
        counts ([`TaskCounts`]): Those of the graph; they stay as they are.
        times_ms (`Sequence[float]`): Of each task.
        caps (`Sequence[float]`): Microbatches in flight on each stage.
        alternate (`bool`): Whether stages wait for a forward after a backward.
    """

    def __init__(
        self, graph: TaskGraph, counts: TaskCounts, times_ms: Sequence[float], caps: Sequence[float], alternate: bool
    ):
        self.graph, self.alternate, self.caps = graph, alternate, np.array(caps, float)
        self.times_ms = np.array(times_ms, float)
        self.could_wait = False
        count, first, size = graph.num_tasks, graph.num_forwards, len(graph.stages)
        self.stage, self.cell, self.opens = graph.columns[0], counts.cell, counts.opens
        self.missing, self.ready_ms = counts.missing.copy(), np.zeros(count)
        self.followers, self.num_followers = counts.followers, counts.num_followers
        self.first_follower = np.cumsum(self.num_followers) - self.num_followers
        self.backwards_left = counts.backwards.copy()
        self.queue = np.append(np.argsort(self.stage[:first], kind="stable"), 0)
        forwards = np.bincount(self.stage[:first], minlength=size)
        self.next, self.stop = np.cumsum(forwards) - forwards, np.cumsum(forwards)
        backwards = np.bincount(self.stage[first:], minlength=size)
        order = first + np.argsort(self.stage[first:], kind="stable")
        self.column = np.zeros(count, np.int64)
        self.column[order] = spread(np.zeros(size, np.int64), backwards)
        self.width = int(backwards.max(initial=0)) + 1
        self.least_ms = np.full(size, math.inf)
        np.minimum.at(self.least_ms, self.stage, self.times_ms)
        self.live, self.due = np.zeros(size, np.int64), np.zeros(size, bool)
        self.free_ms, self.end_of_ms = np.zeros(size), np.full(size, math.inf)
        self.runs = np.zeros(size, np.int64)
        self.start_ms, self.end_ms = np.full(count, math.nan), np.full(count, math.nan)

    def run(self) -> bool:
        """
        Simulates until nothing runs any more. `False` if this would be slow, or where times lie so near each other
        that they count as one instant. (Not all tasks may have run, if stages that alternate wait for each other.)
        """
        size, count = len(self.graph.stages), self.graph.num_tasks
        if not count or size * self.width > _MOST_ELEMENTS or not (self.times_ms > 0).all():
            return False
        # Of each backward that waits for its stage, when it came; its task.
        self.came_ms = np.full((size, self.width), math.inf)
        self.waiting = np.zeros((size, self.width), np.int64)
        self.waiting[self.stage[self.graph.num_forwards :], self.column[self.graph.num_forwards :]] = np.arange(
            self.graph.num_forwards, count
        )
        self._start(np.arange(size))
        for _ in range(1 + count // _FEWEST_TASKS):
            now = self.end_of_ms.min(initial=math.inf)
            if now == math.inf:
                return self._is_apart()
            running = np.where(self.end_of_ms < math.inf, self.end_of_ms, now)
            self._start(self._finish(np.flatnonzero(self.end_of_ms < (running + self.least_ms).min())))
        return False

    def _finish(self, stages: NDArray) -> NDArray:
        """Ends what runs on some stages; gives the stages that could start something."""
        tasks, ends = self.runs[stages], self.end_of_ms[stages]
        self.free_ms[stages], self.end_of_ms[stages] = ends, math.inf
        is_backward = tasks >= self.graph.num_forwards
        cells = self.cell[tasks[is_backward]]
        self.backwards_left[cells] -= 1
        self.live[stages[is_backward]] -= self.backwards_left[cells] == 0
        counts = self.num_followers[tasks]
        followers = self.followers[spread(self.first_follower[tasks], counts)]
        np.subtract.at(self.missing, followers, 1)
        np.maximum.at(self.ready_ms, followers, ends.repeat(counts))
        came = followers[self.missing[followers] == 0]
        backwards = came[came >= self.graph.num_forwards]
        self.came_ms[self.stage[backwards], self.column[backwards]] = self.ready_ms[backwards]
        touched = np.unique(np.concatenate([stages, self.stage[came]]))
        return touched[self.end_of_ms[touched] == math.inf]

    def _start(self, stages: NDArray) -> None:
        """Starts on each of some free stages the task that it runs next, if one has come."""
        forward = self.queue[self.next[stages]]
        due, came_ms = self.due[stages], self.came_ms[stages]
        fits = ~self.opens[forward] | (self.live[stages] < self.caps[stages])
        fits &= self.next[stages] < self.stop[stages]
        forward_ms = np.where(fits & (self.missing[forward] == 0), self.ready_ms[forward], math.inf)
        backward_ms = came_ms.min(axis=1, initial=math.inf)
        if self.alternate:
            backward_ms[due & fits] = math.inf
        start_ms = np.maximum(self.free_ms[stages], np.minimum(forward_ms, backward_ms))
        goes_back = (backward_ms <= start_ms) & ~(due & (forward_ms <= start_ms))
        starts = start_ms < math.inf
        goes_back &= starts
        self.could_wait |= bool((goes_back & due & fits).any())
        column = (came_ms <= start_ms[:, None]).argmax(axis=1)
        tasks = np.where(goes_back, self.waiting[stages, column], forward)[starts]
        self.came_ms[stages[goes_back], column[goes_back]] = math.inf
        ahead = stages[starts & ~goes_back]
        self.next[ahead] += 1
        self.live[ahead] += self.opens[forward[starts & ~goes_back]]
        stages, start_ms = stages[starts], start_ms[starts]
        self.due[stages] = goes_back[starts]
        self.runs[stages] = tasks
        self.start_ms[tasks] = start_ms
        self.end_ms[tasks] = self.end_of_ms[stages] = start_ms + self.times_ms[tasks]

    @property
    def is_done(self) -> bool:
        """Whether every task has run."""
        return not np.isnan(self.end_ms).any()

    def _is_apart(self) -> bool:
        """Whether no two ends are taken for one instant that are not equal."""
        ends = np.sort(self.end_ms[~np.isnan(self.end_ms)])
        return not ((ends[1:] != ends[:-1]) & (ends[1:] <= ends[:-1] * (1 + 1e-12) + 1e-9)).any()

    def events(self) -> tuple[NDArray, NDArray]:
        """The numbers of the events that each task starts, and is done: at one time ends come first."""
        count = self.graph.num_tasks
        times = np.concatenate([self.start_ms, self.end_ms])
        is_end = np.repeat([False, True], count)
        order = np.lexsort((np.concatenate([self.stage, np.arange(count)]), ~is_end, times))
        events = np.empty(2 * count, np.int64)
        events[order] = np.arange(2 * count)
        return events[:count], events[count:]
