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
    """
    A table of texts.

    Args:
        columns (`Sequence[str]`): Headings.
        rows (`Sequence[Sequence[str]]`): Cells of each row, as many as columns.
        right (`Sequence[str]`, *optional*): Headings of numeric columns.

    Raises:
        `ValueError`: If a row has another number of cells.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()

    def __post_init__(self):
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"the row {list(row)} has {len(row)} cells and the table {len(self.columns)} columns. "
                    "Give one cell a column."
                )


@dataclass(frozen=True)
class PlanChoice:
    """
    A plan that was not chosen.

    Args:
        name (`str`): Its name, such as `FSDP-like`.
        layouts (`str`): Its layouts as text.
        step_ms (`float`, *optional*): Its predicted step; `None` for a plan that does not fit.
        reason (`str`, *optional*): Why it is slower, or does not fit.
    """

    name: str
    layouts: str
    step_ms: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class MemoryCurves:
    """
    The memory of each rank over a step.

    Args:
        changing (`Mapping[int, tuple[np.ndarray, np.ndarray]]`):
            Rank -> ascending float64 `[num_changes]` of ms, and bytes from each of these times to the next, float64
            `[num_changes]`; nothing before the first.
        static_bytes (`Mapping[int, float]`): Rank -> constant bytes: weights, gradients, optimizer state.
        capacity_bytes (`float`, *optional*): Memory of each device; `None` if it has no fixed size.

    Raises:
        `ValueError`: If the times and bytes of a rank do not match, or times descend.
    """

    changing: Mapping[int, tuple[np.ndarray, np.ndarray]]
    static_bytes: Mapping[int, float]
    capacity_bytes: float | None = None

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
    """
    Content of a plan's page. Sections without data are omitted.

    Args:
        title (`str`): Heading.
        plan (`ParallelPlan`): The plan; the page has it as YAML.
        simulation (`Simulation`): One step of it.
        subtitle (`str`, *optional*): A line below the heading: dataset, devices, batch.
        summary (`Sequence[tuple[str, str]]`, *optional*): Labels and values: predicted step, tokens/s, MFU, bubble.
        bound (`str`, *optional*): A sentence about what bounds the step.
        table (`TextTable`, *optional*): The plan's stages.
        memory (`MemoryCurves`, *optional*): The memory of each rank over the step.
        workloads (`Mapping[str, Balance]`, *optional*): Name of an arrangement -> its balance; all with the same
            modules, in the order of the columns.
        runners_up (`Sequence[PlanChoice]`, *optional*): The next best plans.
        comparison (`Sequence[PlanChoice]`, *optional*): Plans of other methods.
        step_ms (`float`, *optional*): The predicted step that others are compared with; that of the simulation by
            default.
        command (`str`, *optional*): The command line that made the plan.
        versions (`Mapping[str, str]`, *optional*): Versions of libraries.
        modules (`Mapping[str, ModulePlugin]`, *optional*): Settings of modules, such as frozen parameters.
        planned_for (`PlannedFor`, *optional*): Device, batch and samples of the plan.
    """

    title: str
    plan: ParallelPlan
    simulation: Simulation
    subtitle: str = ""
    summary: Sequence[tuple[str, str]] = ()
    bound: str = ""
    table: TextTable | None = None
    memory: MemoryCurves | None = None
    workloads: Mapping[str, Balance] = field(default_factory=dict)
    runners_up: Sequence[PlanChoice] = ()
    comparison: Sequence[PlanChoice] = ()
    step_ms: float | None = None
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, ModulePlugin] = field(default_factory=dict)
    planned_for: PlannedFor | None = None

    @property
    def compared_ms(self) -> float:
        """The predicted step that others are compared with."""
        return self.simulation.iteration_ms if self.step_ms is None else self.step_ms
