"""Steps of a small model that took what other costs than the predicted ones say, and a log of them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_mmparallel import __version__
from hf_mmparallel.cost import CostModel, StepCost, analytic_costs, find_device
from hf_mmparallel.cost.calibration import CalibratedLayers, Calibration, TimeScale, profile_digest
from hf_mmparallel.cost.run_log import LoggedWindow, MemoryPeak, RunHeader, append_line, module_digests
from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.data.global_batches import GlobalBatch
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.planning.comparison import MeasuredStep, StepComparer, times_on_a_rank
from tests.cost import models

SPEC = models.model()
CPU = replace(find_device("cpu"), launch_us=0.0)
"""Without launches, which hide what small tasks compute."""
PLUGINS = {
    "vision": ModulePlugin(dp_size=2),
    LANGUAGE_MODEL: ModulePlugin(pp_size=2, activation_checkpointing=True),
}
SCALES: dict[str, dict[Any, TimeScale]] = {
    "vision": {"forward": TimeScale(3.0), "backward": TimeScale(0.5)},
    LANGUAGE_MODEL: {"forward": TimeScale(1.5), "backward": TimeScale(2.0)},
}


def counted() -> CostModel:
    return analytic_costs(SPEC, CPU)


def calibration(scales: Mapping[str, Mapping[Any, TimeScale]], **changes: Any) -> Calibration:
    return Calibration(header(counted()), scales, **changes)


def corrected(costs: CostModel, scales: Mapping[str, Mapping[Any, TimeScale]], **changes: Any) -> CostModel:
    """Costs as the machine really has them."""
    return replace(costs, layers=CalibratedLayers(costs.layers, calibration(scales, **changes)))


def planner(costs: CostModel, plugins: dict[str, ModulePlugin] | None = None) -> StepPlanner:
    plan = resolve_plan(SPEC, PLUGINS if plugins is None else plugins)
    return StepPlanner(costs, plan, sync_groups(SPEC, plan), 4, "hierarchical", sizes=sizes_of)


def sizes_of(indices: Any) -> SampleSizes:
    """Sizes that differ from sample to sample."""
    lengths = [np.random.default_rng(index).integers(16, 512, 2).tolist() for index in indices]
    return SampleSizes.of_sequences(
        {"vision": [[image] for image, _ in lengths], LANGUAGE_MODEL: [[text] for _, text in lengths]}
    )


def measured_step(comparer: StepComparer, truth: CostModel, index: int, samples: int = 16) -> MeasuredStep:
    """A step that took what the true costs say."""
    planned = comparer.planner(GlobalBatch(tuple(range(index * samples, (index + 1) * samples))))
    assert planned.sizes is not None
    prediction = comparer.predict(planned.step, planned.sizes, planned.workloads)
    cost = StepCost(truth, comparer.planner.plan, planned.step, planned.sizes)
    tasks = {span.task for span in prediction.timeline.spans}
    return MeasuredStep(prediction, {task: cost(task) for task in tasks})


def window(comparer: StepComparer, truth: CostModel, index: int, **changes: Any) -> LoggedWindow:
    """A window of one step, outside of whose tasks nothing took longer than predicted."""
    step = measured_step(comparer, truth, index)
    causes = comparer.causes(step)
    predicted = step.prediction.timeline.iteration_ms
    measured = predicted + sum(causes.values())
    found = LoggedWindow(
        step=index + 1,
        steps=1,
        compared=1,
        step_ms=measured,
        predicted_step_ms=predicted,
        wall_ms=measured,
        data_ms=0.0,
        predicted_bubble=step.prediction.timeline.bubble_fraction,
        bubble=None,
        task_times=times_on_a_rank(comparer.planner.plan, [step]),
        causes=causes,
        memory=None,
        groups=comparer.task_groups([step]),
    )
    return replace(found, **changes)


def header(costs: CostModel, **changes: Any) -> RunHeader:
    found = RunHeader(
        package=__version__,
        modules=module_digests(costs.spec),
        device=costs.device.name,
        device_name="a CPU",
        dtype=costs.device.dtype,
        value_bytes=costs.value_bytes,
        profile=profile_digest(costs),
        world_size=4,
        plan="0",
        layout={},
        schedule="1f1b",
        method="hierarchical",
    )
    return replace(found, **changes)


def write_log(
    path: Path,
    costs: CostModel,
    truth: CostModel,
    count: int = 8,
    plugins: dict[str, ModulePlugin] | None = None,
    **changes: Any,
) -> Path:
    """The log of a run that was predicted by some costs and took what others say."""
    comparer = StepComparer(planner(costs, plugins))
    append_line(path, header(costs, **changes))
    for index in range(count):
        peak = MemoryPeak(1, 3.0 + 2.0 * 4.0, 3.0 + 4.0, 3.0)
        append_line(path, window(comparer, truth, index, memory=peak))
    return path
