"""The table of a plan: a row per kind of stage, for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from ..cost import RankMemory
from ..drawing.timeline import rank_ranges
from ..plan import ModelSpec, ParallelPlan, stage_parameters
from ..schedule import GradientFlow, Simulation


@dataclass
class _Row:
    """Stages that look the same: those of all replicas, and neighbors with equal numbers."""

    first: int
    last: int
    layers: tuple[int, int]
    cells: tuple[str, ...]
    ranks: list[int] = field(default_factory=list)
    in_flight: float = 0.0
    gib: float = 0.0


@dataclass(frozen=True)
class Cells:
    """A table of texts."""

    columns: tuple[str, ...]  # headings
    rows: tuple[tuple[str, ...], ...]  # as many cells as columns
    right: tuple[str, ...] = ()  # headings of numeric columns


def range_text(counts: Sequence[int]) -> str:
    """`8`, or `5 to 11` if numbers differ."""
    lowest, highest = min(counts), max(counts)
    return str(highest) if lowest == highest else f"{lowest} to {highest}"


def plan_table(
    plan: ParallelPlan,
    spec: ModelSpec | None,
    simulation: Simulation,
    memory: Mapping[int, RankMemory] | None,
    is_narrow: bool = False,
) -> Table:
    """
    Returns a row for each stage of each module; replicas and equal neighbors are merged. The model gives numbers of
    parameters, the simulation microbatches in flight, and memory is that of the fullest rank.
    """
    cells = plan_cells(plan, spec, simulation, memory)
    table = Table(title=f"Plan for {plan.world_size:,} ranks", title_justify="left")
    # no lines between columns
    if is_narrow:
        table.box, table.padding, table.show_edge = box.SIMPLE_HEAD, 0, False
    for column in cells.columns:
        table.add_column(
            column.replace(" ", "\n", 1),
            justify="right" if column in cells.right else "left",
            no_wrap=column != "ranks",
            min_width=11 if column == "ranks" else None,
        )
    for number, row in enumerate(cells.rows):
        last = number + 1 == len(cells.rows) or bool(cells.rows[number + 1][0])
        table.add_row(*row, end_section=last)
    return table


def layout_text(plan: ParallelPlan, name: str) -> str:
    """The sizes of a module that are not 1, and the modules before it on the same ranks."""
    ranks = {other: {r for _, _, s in module.stages() for r in s.all_ranks} for other, module in plan.modules.items()}
    before = list(plan.modules)[: list(plan.modules).index(name)]
    shared = [other for other in before if ranks[other] & ranks[name]]
    module = plan.modules[name]
    sizes = {"dp": module.dp_size, "pp": len(module.replicas[0]), "cp": module.cp_size, "tp": module.tp_size}
    text = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1) or "one rank"
    text += ", recomputed" if module.activation_checkpointing else ""
    return text + (f", with {' and '.join(shared)}" if shared else "")


def plan_cells(
    plan: ParallelPlan,
    spec: ModelSpec | None,
    simulation: Simulation,
    memory: Mapping[int, RankMemory] | None,
) -> Cells:
    """The cells of [`plan_table`]; the first cell is empty in all rows of a module but the first."""
    cut = any(module.cp_size > 1 for module in plan.modules.values())
    columns = ["module", "dp/pp/cp/tp" if cut else "dp/pp/tp", "stage", "layers", "ranks"]
    columns += ["params", "trained"] if spec is not None else ["backward"]
    columns += ["in flight"] + (["GiB a rank"] if memory is not None else [])
    cells = []
    for name, module in plan.modules.items():
        depths = sorted({len(stages) for stages in module.replicas})
        tp_size = "-".join(map(str, module.tp_sizes))
        inner = f"{module.cp_size}/{tp_size}" if cut else tp_size
        sizes = f"{module.dp_size}/{'-'.join(map(str, depths))}/{inner}"
        for number, row in enumerate(_merge(_stage_rows(plan, name, spec, simulation, memory))):
            stage = str(row.first) if row.first == row.last else f"{row.first}-{row.last}"
            layers = f"{row.layers[0]}-{row.layers[1] - 1}"
            head = (name, sizes) if number == 0 else ("", "")
            tail = (f"{row.in_flight:.3g}", *((f"{row.gib:.2f}",) if memory is not None else ()))
            cells.append((*head, stage, layers, rank_ranges(row.ranks), *row.cells, *tail))
    return Cells(tuple(columns), tuple(cells), ("params", "trained", "in flight", "GiB a rank"))


def _stage_rows(
    plan: ParallelPlan,
    name: str,
    spec: ModelSpec | None,
    simulation: Simulation,
    memory: Mapping[int, RankMemory] | None,
) -> list[_Row]:
    """A row for each (stage, layers); numbers are those of the fullest replica."""
    flow = GradientFlow(plan)
    rows: dict[tuple[int, tuple[int, int]], _Row] = {}
    for replica, index, stage in plan.modules[name].stages():
        key = (index, stage.layers)
        if key not in rows:
            cells = ("yes" if flow.has_backward(name, replica, index) else "no",)
            if spec is not None:
                parameters = stage_parameters(spec, name, stage)
                trainable = sum(p.num_elements for p in parameters if p.trainable)
                cells = (_count(sum(p.num_elements for p in parameters)), _count(trainable))
            rows[key] = _Row(index, index, stage.layers, cells)
        row = rows[key]
        row.ranks.extend(stage.all_ranks)
        row.in_flight = max(row.in_flight, simulation.peak_in_flight.get((name, replica, index), 0.0))
        if memory is not None:
            row.gib = max(row.gib, *(memory[rank].total_gib for rank in stage.all_ranks))
    return [rows[key] for key in sorted(rows)]


def _merge(rows: list[_Row], limit: int = 8) -> list[_Row]:
    """Merges neighboring stages with equal parameters if there are more than `limit`; numbers are the maxima."""
    if len(rows) <= limit:
        return rows
    merged: list[_Row] = []
    for row in rows:
        before = merged[-1] if merged else None
        if before is None or before.cells != row.cells or before.layers[1] != row.layers[0]:
            merged.append(row)
            continue
        before.last, before.layers = row.last, (before.layers[0], row.layers[1])
        before.ranks.extend(row.ranks)
        before.in_flight, before.gib = max(before.in_flight, row.in_flight), max(before.gib, row.gib)
    return merged


def _count(number: int) -> str:
    """`1.23 B`, `45.6 M`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
