"""A vectorised simulation for thousands of stages: tasks that end within a window of time are one numpy operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .graph import TaskCounts, TaskGraph, concatenate_ranges
from .kinds import CLOSES, FILLS, IN_ORDER

_MIN_TASKS = 16  # per window on average; with fewer the event loop is faster
_MAX_ELEMENTS = 4_000_000  # of the table of stages and their backwards

_ROUNDING = 1e-12  # relative difference of times that rounding makes: of sums of a few thousand durations
_ROUNDING_MS = 1e-9  # the same for times near 0


def latest_equal(time_ms: Any) -> Any:
    """
    Returns the latest time that counts as equal to a time, so that ends that only rounding tells apart are one event.

    With two events, the order of tasks would depend on the order in which durations are added.
    """
    return time_ms * (1 + _ROUNDING) + _ROUNDING_MS


class Windows:
    """
    Orders tasks as the event loop of the scheduler does, for stages that share no ranks and schedules with one phase.

    A window is as long as the shortest task that any stage can start next, so no task both starts and ends in it. A
    stage therefore ends at most one task and starts at most one task per window.
    """

    def __init__(
        self,
        graph: TaskGraph,
        counts: TaskCounts,
        times_ms: Sequence[float],
        max_in_flight: Sequence[float],
        alternate: bool,
    ):
        self.graph, self.alternate, self.max_in_flight = graph, alternate, np.array(max_in_flight, float)
        self.times_ms = np.array(times_ms, float)
        self.could_wait = False
        count, size = graph.num_tasks, len(graph.stages)
        self.stage, self.cell, self.opens = graph.columns[0], counts.cell, counts.opens
        self.in_order, self.closes = IN_ORDER[graph.kind], CLOSES[graph.kind]
        queued, self.others = np.flatnonzero(self.in_order), np.flatnonzero(~self.in_order)
        self.missing, self.ready_ms = counts.missing.copy(), np.zeros(count)
        self.followers, self.num_followers = counts.followers, counts.num_followers
        self.first_follower = np.cumsum(self.num_followers) - self.num_followers
        self.closing_left = counts.closing.copy()
        self.queue = np.append(queued[np.argsort(self.stage[queued], kind="stable")], 0)
        forwards = np.bincount(self.stage[queued], minlength=size)
        self.next, self.stop = np.cumsum(forwards) - forwards, np.cumsum(forwards)
        backwards = np.bincount(self.stage[self.others], minlength=size)
        order = self.others[np.argsort(self.stage[self.others], kind="stable")]
        self.column = np.zeros(count, np.int64)
        self.column[order] = concatenate_ranges(np.zeros(size, np.int64), backwards)
        self.width = int(backwards.max(initial=0)) + 1
        self.least_ms = np.full(size, math.inf)
        np.minimum.at(self.least_ms, self.stage, self.times_ms)
        self.in_flight, self.due = np.zeros(size, np.int64), np.zeros(size, bool)
        self.free_ms, self.end_of_ms = np.zeros(size), np.full(size, math.inf)
        self.runs = np.zeros(size, np.int64)
        self.start_ms, self.end_ms = np.full(count, math.nan), np.full(count, math.nan)

    def run(self) -> bool:
        """
        Simulates until no task runs; `False` if the event loop is faster or would treat two different times as one.

        If alternating stages deadlock, not all tasks run.
        """
        size, count = len(self.graph.stages), self.graph.num_tasks
        is_plain = not FILLS[self.graph.kind].any() and bool((self.times_ms > 0).all())
        if not count or size * self.width > _MAX_ELEMENTS or not is_plain:
            return False
        # Arrival time and task of each backward that waits for its stage.
        self.came_ms = np.full((size, self.width), math.inf)
        self.waiting = np.zeros((size, self.width), np.int64)
        self.waiting[self.stage[self.others], self.column[self.others]] = self.others
        self._start(np.arange(size))
        for _ in range(1 + count // _MIN_TASKS):
            now = self.end_of_ms.min(initial=math.inf)
            if now == math.inf:
                return self._is_apart()
            running = np.where(self.end_of_ms < math.inf, self.end_of_ms, now)
            self._start(self._finish(np.flatnonzero(self.end_of_ms < (running + self.least_ms).min())))
        return False

    def _finish(self, stages: NDArray) -> NDArray:
        """Ends the running tasks of some stages; returns the stages that may be able to start a task."""
        tasks, ends = self.runs[stages], self.end_of_ms[stages]
        self.free_ms[stages], self.end_of_ms[stages] = ends, math.inf
        closes = self.closes[tasks]
        cells = self.cell[tasks[closes]]
        self.closing_left[cells] -= 1
        self.in_flight[stages[closes]] -= self.closing_left[cells] == 0
        counts = self.num_followers[tasks]
        followers = self.followers[concatenate_ranges(self.first_follower[tasks], counts)]
        np.subtract.at(self.missing, followers, 1)
        np.maximum.at(self.ready_ms, followers, ends.repeat(counts))
        came = followers[self.missing[followers] == 0]
        backwards = came[~self.in_order[came]]
        self.came_ms[self.stage[backwards], self.column[backwards]] = self.ready_ms[backwards]
        touched = np.unique(np.concatenate([stages, self.stage[came]]))
        return touched[self.end_of_ms[touched] == math.inf]

    def _start(self, stages: NDArray) -> None:
        """Starts the next task on each of some free stages, if one is ready."""
        forward = self.queue[self.next[stages]]
        due, came_ms = self.due[stages], self.came_ms[stages]
        fits = ~self.opens[forward] | (self.in_flight[stages] < self.max_in_flight[stages])
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
        self.in_flight[ahead] += self.opens[forward[starts & ~goes_back]]
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
        """Whether no two different end times are so close that the event loop treats them as one."""
        ends = np.sort(self.end_ms[~np.isnan(self.end_ms)])
        return not ((ends[1:] != ends[:-1]) & (ends[1:] <= latest_equal(ends[:-1]))).any()

    def events(self) -> tuple[NDArray, NDArray]:
        """Numbers of the start and end events of each task; at equal times ends come first."""
        count = self.graph.num_tasks
        times = np.concatenate([self.start_ms, self.end_ms])
        is_end = np.repeat([False, True], count)
        order = np.lexsort((np.concatenate([self.stage, np.arange(count)]), ~is_end, times))
        events = np.empty(2 * count, np.int64)
        events[order] = np.arange(2 * count)
        return events[:count], events[count:]
