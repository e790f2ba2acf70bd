"""A simulated step as integers for the page's script: rows of ranks, tasks, memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..arrange.balance import Balance
from ..plan import ModulePlugin, ParallelPlan, PlannedFor, StageKey
from ..schedule import Task, Timeline
from ..schedule.kinds import KINDS as TASK_KINDS
from .gantt import COLORS, KINDS, rank_ranges

# Content of a plan's page, as plain data.


@dataclass(frozen=True)
class TextTable:
    """A table of texts; raises `ValueError` if a row has another number of cells than the columns."""

    columns: Sequence[str]  # headings
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()  # headings of numeric columns

    def __post_init__(self):
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"the row {list(row)} has {len(row)} cells and the table {len(self.columns)} columns. "
                    "Give one cell a column."
                )


@dataclass(frozen=True)
class PlanChoice:
    """A plan that was not chosen."""

    name: str  # such as `FSDP-like`
    layouts: str
    step_ms: float | None = None  # predicted; `None` for a plan that does not fit
    reason: str = ""  # why it is slower, or does not fit
    difference: str = ""  # to the chosen plan in words, such as `as fast`; the difference of the steps by default


@dataclass(frozen=True)
class MemoryCurves:
    """The memory of each rank over a step; raises `ValueError` if times and bytes do not match, or times descend."""

    # rank -> ascending ms, and bytes from each of these times to the next, float64 `[num_changes]` both; nothing
    # before the first
    changing: Mapping[int, tuple[np.ndarray, np.ndarray]]
    static_bytes: Mapping[int, float]  # constant: weights, gradients, optimizer state
    capacity_bytes: float | None = None  # of each device; `None` if it has no fixed size

    def __post_init__(self):
        for rank, (time_ms, num_bytes) in self.changing.items():
            if len(time_ms) != len(num_bytes):
                raise ValueError(
                    f"rank {rank} has {len(time_ms)} times and {len(num_bytes)} amounts of memory. "
                    "Give the amount from each time on."
                )
            if len(time_ms) and not (np.diff(time_ms) >= 0).all():
                raise ValueError(f"the times of rank {rank}'s memory descend. Sort them.")

    def peak_bytes(self, rank: int) -> float:
        """Peak bytes of `rank`."""
        _, num_bytes = self.changing.get(rank, (np.zeros(0), np.zeros(0)))
        return self.static_bytes.get(rank, 0.0) + float(np.max(num_bytes, initial=0.0))


@dataclass(frozen=True)
class PlanPage:
    """Content of a plan's page. Sections without data are omitted."""

    title: str
    plan: ParallelPlan  # the page has it as YAML
    timeline: Timeline  # one step of it
    subtitle: str = ""  # below the heading: dataset, devices, batch
    layouts: TextTable | None = None  # of the plan's modules
    numbers: Sequence[tuple[str, str]] = ()  # labels and figures with units: step, tokens/s, MFU, bubble
    summary: Sequence[tuple[str, str]] = ()  # labels and sentences: what was predicted, and from what
    bound: str = ""  # a sentence about what bounds the step
    table: TextTable | None = None  # the plan's stages
    memory: MemoryCurves | None = None  # of each rank over the step
    # arrangement -> its balance; all with the same modules, in the order of the columns
    workloads: Mapping[str, Balance] = field(default_factory=dict)
    runners_up: Sequence[PlanChoice] = ()  # the next best plans
    comparison: Sequence[PlanChoice] = ()  # plans of other methods
    step_ms: float | None = None  # predicted step that others are compared with; that of the timeline when left out
    command: str = ""  # the command line that made the plan
    versions: Mapping[str, str] = field(default_factory=dict)  # of libraries
    modules: Mapping[str, ModulePlugin] = field(default_factory=dict)  # settings of modules, such as frozen parameters
    planned_for: PlannedFor | None = None  # device, batch and samples of the plan

    @property
    def compared_ms(self) -> float:
        """The predicted step that others are compared with."""
        return self.timeline.iteration_ms if self.step_ms is None else self.step_ms


# Memory is quantized to this share of the highest value.
MEMORY_RESOLUTION = 1e-4
TaskTimes = tuple[tuple[Task, int, int], ...]
SumTimes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RankRow:
    """Ranks that run the same tasks at the same times, such as those of one mesh."""

    ranks: tuple[int, ...]
    tasks: TaskTimes  # with start and end in microseconds, in the order of starts
    sums: SumTimes = ()  # starts and ends of gradient sums in microseconds
    # starts and ends of the communication of the first rank, by kind in the order of `KINDS`; none if it is unknown
    lanes: tuple[SumTimes, ...] = ()

    @property
    def label(self) -> str:
        """`ranks 0-7`."""
        return f"rank{'s' if len(self.ranks) > 1 else ''} {rank_ranges(self.ranks)}"

    @property
    def stages(self) -> tuple[StageKey, ...]:
        """The stages of these ranks, in the order of their first tasks."""
        return tuple(dict.fromkeys(task.stage_key for task, _, _ in self.tasks))

    @property
    def busy_us(self) -> int:
        """Time of tasks."""
        return sum(end - start for _, start, end in self.tasks)

    @property
    def sums_us(self) -> int:
        """Time of gradient sums."""
        return sum(end - start for start, end in self.sums)

    def communication_us(self, is_exposed: bool) -> int:
        """Time of communication beside tasks, or exposed."""
        chosen = [
            lane
            for (op, exposed), lane in zip(KINDS, self.lanes, strict=False)
            if op != "update" and exposed == is_exposed
        ]
        return sum(end - start for lane in chosen for start, end in lane)


def rank_rows(timeline: Timeline, most_rows: int | None = None) -> list[RankRow]:
    """
    Returns the rows of a timeline, by their lowest ranks. With `most_rows`, copies that do the same at the same times
    share a row, and of more rows those with the least and with the most to do are kept for each stage.
    """
    by_rank: dict[int, list[tuple[Task, int, int]]] = {rank: [] for rank in range(timeline.num_ranks)}
    for span in timeline.spans:
        by_rank.setdefault(span.rank, []).append((span.task, _us(span.start_ms), _us(span.busy_end_ms)))
    sums: dict[int, list[tuple[int, int]]] = {rank: [] for rank in by_rank}
    for span in timeline.sums:
        sums[span.rank].append((_us(span.start_ms), _us(span.end_ms)))
    merged: dict[Hashable, list[int]] = {}
    for rank in sorted(by_rank):
        tasks = by_rank[rank]
        alike = tasks if most_rows is None else [(replace(task, replica=0), *times) for task, *times in tasks]
        merged.setdefault((tuple(alike), tuple(sums[rank])), []).append(rank)
    rows = [RankRow(tuple(ranks), tuple(by_rank[ranks[0]]), tuple(sums[ranks[0]])) for ranks in merged.values()]
    rows = rows if most_rows is None or len(rows) <= most_rows else _extremes(rows)
    return [replace(row, lanes=_lanes(timeline, row.ranks[0])) for row in rows]


def _extremes(rows: Sequence[RankRow]) -> list[RankRow]:
    """Of the rows with equal stages, the one with the least and the one with the most to do."""
    groups: dict[Hashable, list[RankRow]] = {}
    for row in rows:
        groups.setdefault(tuple((name, stage) for name, _, stage in row.stages), []).append(row)
    kept = [choose(own, key=lambda row: row.busy_us) for own in groups.values() for choose in (min, max)]
    return sorted(dict.fromkeys(kept), key=lambda row: row.ranks[0])


def _lanes(timeline: Timeline, rank: int) -> tuple[SumTimes, ...]:
    """The communication of a rank by kind, see [`RankRow`]."""
    spans = [] if timeline.transfers is None else timeline.transfers(rank)
    lanes: dict[tuple[str, bool], list[tuple[int, int]]] = {kind: [] for kind in KINDS}
    for span in spans:
        lanes[span.op, span.is_exposed].append((_us(span.start_ms), _us(span.end_ms)))
    return tuple(map(tuple, lanes.values())) if spans else ()


def module_colors(plan: ParallelPlan) -> dict[str, str]:
    """Module -> color, in the plan's order."""
    return {name: COLORS[index % len(COLORS)] for index, name in enumerate(plan.modules)}


def timeline_data(
    plan: ParallelPlan, timeline: Timeline, rows: Sequence[RankRow], memory: MemoryCurves | None
) -> dict[str, Any]:
    """
    Returns the data of the page's script, for JSON; raises `ValueError` for a stage that the plan does not have.

    Tasks are columns of integers: `gap` is the time in microseconds since the end of the task before, `duration` that
    of the task; `task` is `(microbatch * chunks + chunk) * len(kinds) + kind`; `stage` is an index into `stages`, a
    single number if a row has one stage only. Gradient sums and the lanes of communication have gaps and durations as
    well, if there are any.
    """
    stages = {(name, d, s): i for i, (name, d, s) in enumerate(_stage_keys(plan))}
    unknown = {key for row in rows for key in row.stages if key not in stages}
    if unknown:
        raise ValueError(
            f"the timeline has stage {min(unknown)}, which is not in the plan. Simulate the plan of the page."
        )
    names = list(plan.modules)
    has_lanes = any(row.lanes for row in rows)
    num_chunks = 1 + max((task.chunk for row in rows for task, _, _ in row.tasks), default=0)
    present = {task.kind for row in rows for task, _, _ in row.tasks}
    kinds = [word for word in TASK_KINDS if word in present]
    unit = _memory_unit(memory) if memory is not None else 1
    return {
        "end": max([_us(timeline.iteration_ms), *map(_end_us, rows)]),
        "modules": [{"name": name, "color": color} for name, color in module_colors(plan).items()],
        "lanes": [{"color": color, "name": name} for color, name in KINDS.values()] if has_lanes else [],
        "stages": [[names.index(name), replica, index] for name, replica, index in stages],
        "kinds": [{"word": word, "label": TASK_KINDS[word].label, "tint": TASK_KINDS[word].tint} for word in kinds],
        "chunks": num_chunks,
        "rows": [
            {
                "label": row.label,
                "ranks": len(row.ranks),
                **_columns(row.tasks, stages, num_chunks, kinds),
                **({"sums": _gaps(row.sums)} if row.sums else {}),
                **({"lanes": list(map(_gaps, row.lanes))} if row.lanes else {}),
                **({"memory": _memory(memory, _fullest(memory, row.ranks), unit)} if memory is not None else {}),
            }
            for row in rows
        ],
        "memory": None if memory is None else {"unit": unit, "capacity": memory.capacity_bytes},
    }


def _end_us(row: RankRow) -> int:
    """The end of the last task or communication of a row."""
    lanes = [lane[-1][1] for lane in row.lanes if lane]
    return max([0, *(end for _, _, end in row.tasks[-1:]), *lanes])


def _us(time_ms: float) -> int:
    return round(1e3 * time_ms)


def _stage_keys(plan: ParallelPlan) -> list[StageKey]:
    return [(name, d, s) for name, module in plan.modules.items() for d, s, _ in module.stages()]


def _columns(
    tasks: TaskTimes, stages: Mapping[StageKey, int], num_chunks: int, kinds: Sequence[str]
) -> dict[str, Any]:
    """The tasks of a row, see [`timeline_data`]."""
    indices = [stages[task.stage_key] for task, _, _ in tasks]
    return {
        "stage": indices[0] if len(set(indices)) == 1 else indices,
        "task": [
            (task.microbatch * num_chunks + task.chunk) * len(kinds) + kinds.index(task.kind) for task, _, _ in tasks
        ],
        **_gaps([(start, end) for _, start, end in tasks]),
    }


def _gaps(times: Sequence[tuple[int, int]]) -> dict[str, list[int]]:
    """Gaps before intervals, and their durations."""
    ends = [0, *(end for _, end in times)]
    return {
        "gap": [start - before for (start, _), before in zip(times, ends, strict=False)],
        "duration": [end - start for start, end in times],
    }


def _memory_unit(memory: MemoryCurves) -> int:
    """Unit of memory in bytes."""
    ranks = set(memory.changing) | set(memory.static_bytes)
    return max(1, round(MEMORY_RESOLUTION * max((memory.peak_bytes(rank) for rank in ranks), default=0.0)))


def _fullest(memory: MemoryCurves, ranks: Sequence[int]) -> int:
    """The rank with the highest peak, of ranks that run the same tasks."""
    return max(ranks, key=memory.peak_bytes)


def _memory(memory: MemoryCurves, rank: int, unit: int) -> dict[str, Any]:
    """A rank's memory: gaps between changes in microseconds, and changes in units; equal times are merged."""
    time_ms, num_bytes = memory.changing.get(rank, (np.zeros(0), np.zeros(0)))
    times = np.rint(1e3 * np.asarray(time_ms, float)).astype(np.int64)
    values = np.rint(np.asarray(num_bytes, float) / unit).astype(np.int64)
    last = np.append(np.diff(times) > 0, True)[: len(times)]
    times, values = times[last], values[last]
    changed = np.diff(values, prepend=0) != 0
    times, values = times[changed], values[changed]
    return {
        "static": round(memory.static_bytes.get(rank, 0.0) / unit),
        "gap": np.diff(times, prepend=0).tolist(),
        "change": np.diff(values, prepend=0).tolist(),
    }
