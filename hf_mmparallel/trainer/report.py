"""What a run says about its plan before the first step."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..arrange import contiguous_step
from ..callbacks.metrics import core_per_rank
from ..runtime.engine import ParallelEngine
from ..schedule import Simulation, simulate
from .arguments import MultimodalTrainingArguments
from .model_card import PICTURE, layout_rows


def predict(engine: ParallelEngine, args: MultimodalTrainingArguments, global_batch_size: int) -> Simulation:
    """Simulates a step with a full global batch."""
    step = contiguous_step(engine.plan, range(global_batch_size), args.per_device_train_batch_size)
    return simulate(engine.plan, engine.program(step, training=True))


def print_plan(engine: ParallelEngine, args: MultimodalTrainingArguments, global_batch_size: int) -> None:
    """Prints the plan and the predicted bubble."""
    plan = engine.plan
    table = Table(title=f"Plan for {plan.world_size} ranks")
    rows = layout_rows(plan)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console = Console(stderr=True)
    console.print(table)
    simulation = predict(engine, args, global_batch_size)
    console.print(
        f"{global_batch_size} samples an optimizer step: {plan.num_microbatches} microbatches of "
        f"{args.per_device_train_batch_size} samples on each copy of the language model, schedule {plan.schedule}; "
        f"predicted bubble {simulation.bubble_fraction:.1%}."
    )
    if not core_per_rank(engine.device):
        console.print("Ranks share cores here, so that the measured bubble is not logged.")


def save_schedule_picture(engine: ParallelEngine, args: MultimodalTrainingArguments, global_batch_size: int) -> None:
    """Draws the predicted schedule of one step into the output folder."""
    from ..schedule.draw import gantt_png

    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    gantt_png(predict(engine, args, global_batch_size), folder / PICTURE)
