"""What a run says about its plan before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..callbacks.metrics import core_per_rank
from ..cli.table import plan_table
from ..cost import AnalyticCost, RankMemory, memory_per_rank
from ..data.draws import Draw
from ..data.loader import seeded
from ..data.step_planner import PlannedStep
from ..modeling import count_rows
from ..plan import LANGUAGE_MODEL, ModelSpec, SampleSizes
from ..schedule import Simulation, simulate
from ..schedule.draw import gantt_png
from .loaders import training_planner, without_unused_columns
from .model_card import PICTURE

if TYPE_CHECKING:
    from .trainer import MultimodalParallelTrainer

_SAMPLES = 8
_WIDTH = 120  # of the table in a file or a pipe


@dataclass(frozen=True)
class Prediction:
    """What is expected of one full step."""

    planned: PlannedStep
    simulation: Simulation
    memory: Mapping[int, RankMemory] | None


def sample_tokens(dataset: Any, collator: Callable, spec: ModelSpec) -> dict[str, int] | None:
    """Module -> mean tokens of the first samples: sequence length, rows of an encoder. `None` without a dataset."""
    if dataset is None or not len(dataset):
        return None
    samples = min(_SAMPLES, len(dataset))
    batch = collator([dataset[index] for index in range(samples)])
    if "input_ids" not in batch:
        return None
    rows = count_rows(batch, spec) if spec.placeholders else {}
    tokens = {LANGUAGE_MODEL: max(1, batch["input_ids"].numel() // samples)}  # of a packed row the mean
    for name in spec.encoders:
        modalities = {feature.modality for feature in spec.modules[name].features}
        tokens[name] = max(1, round(sum(sum(rows[m]) for m in modalities) / samples))
    return tokens


def predict(trainer: MultimodalParallelTrainer) -> Prediction:
    """Simulates a step with a full global batch, with costs from the first samples of the training set."""
    engine = trainer._engine
    plan, spec, device = engine.plan, engine.spec, engine.hardware
    planner = training_planner(trainer)
    num_samples = trainer.global_batch_size
    if planner.sizes is not None:
        num_samples = min(num_samples, len(trainer.train_dataset))
    planned = planner(Draw(tuple(range(num_samples))))
    sizes = planned.sizes
    if sizes is None:
        tokens = sample_tokens(*without_unused_columns(trainer, trainer.train_dataset, "Training"), spec)
        if tokens is None:
            return Prediction(planned, simulate(plan, planned.program), None)
        sizes = SampleSizes.uniform(tokens, num_samples)
    cost = AnalyticCost(spec, plan, planned.step, sizes, device)
    simulation = simulate(plan, planned.program, cost, cost.message_ms)
    memory = memory_per_rank(spec, plan, planned.step, sizes, simulation.peak_in_flight)
    return Prediction(planned, simulation, memory)


def report_plan(trainer: MultimodalParallelTrainer) -> None:
    """Prints the plan with the predicted bubble, and draws the predicted step into the output folder."""
    engine, args = trainer.engine, trainer.args
    assert engine is not None
    with seeded(args.seed):  # only this rank reads samples here
        prediction = predict(trainer)
    plan, simulation = engine.plan, prediction.simulation
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=_WIDTH)
    console.print(plan_table(plan, engine.spec, simulation, prediction.memory))
    console.print(
        f"Global batch of {trainer.global_batch_size} samples: {plan.num_microbatches} microbatches of up to "
        f"{args.per_device_train_batch_size} samples on each language-model replica, schedule {plan.schedule}.",
        highlight=False,
    )
    measured = "" if core_per_rank(engine.device) else " It is not measured here: the ranks share cores."
    cp_size = plan.modules[LANGUAGE_MODEL].cp_size
    if cp_size > 1:
        console.print(
            f"{cp_size} ranks share the tokens of each microbatch of `{LANGUAGE_MODEL}`: its samples are packed into "
            'one row, and its attention function is "bitfield".',
            highlight=False,
        )
    console.print(f"Predicted bubble: {simulation.bubble_fraction:.1%}.{measured}", highlight=False)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    gantt_png(simulation, folder / PICTURE, title="Predicted schedule of one step")
