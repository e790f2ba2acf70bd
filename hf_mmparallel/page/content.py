"""Content of a plan's page, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..arrange.balance import Balance
from ..plan import ModulePlugin, ParallelPlan, PlannedFor
from ..schedule import Simulation


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
    simulation: Simulation  # one step of it
    subtitle: str = ""  # below the heading: dataset, devices, batch
    summary: Sequence[tuple[str, str]] = ()  # labels and values: predicted step, tokens/s, MFU, bubble
    bound: str = ""  # a sentence about what bounds the step
    table: TextTable | None = None  # the plan's stages
    memory: MemoryCurves | None = None  # of each rank over the step
    # arrangement -> its balance; all with the same modules, in the order of the columns
    workloads: Mapping[str, Balance] = field(default_factory=dict)
    runners_up: Sequence[PlanChoice] = ()  # the next best plans
    comparison: Sequence[PlanChoice] = ()  # plans of other methods
    step_ms: float | None = None  # predicted step that others are compared with; that of the simulation when left out
    command: str = ""  # the command line that made the plan
    versions: Mapping[str, str] = field(default_factory=dict)  # of libraries
    modules: Mapping[str, ModulePlugin] = field(default_factory=dict)  # settings of modules, such as frozen parameters
    planned_for: PlannedFor | None = None  # device, batch and samples of the plan

    @property
    def compared_ms(self) -> float:
        """The predicted step that others are compared with."""
        return self.simulation.iteration_ms if self.step_ms is None else self.step_ms
