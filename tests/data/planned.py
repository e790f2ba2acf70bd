"""Datasets of the steps of a rank, planned for a device whose speed is unknown."""

from typing import Any

from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.cost.step_planner import StepPlanner
from hf_mmparallel.data.step_dataset import RankInputs, Reader, StepDataset
from hf_mmparallel.plan import ParallelPlan, sync_groups
from tests.plan.specs import model_spec

SPEC = model_spec()


def planned_dataset(
    plan: ParallelPlan, rank: int, samples: Any, collate: Any, seed: int = 0, window: Any = None, **settings: Any
) -> StepDataset:
    """Microbatches have up to three samples."""
    planner = StepPlanner(analytic_costs(SPEC, find_device("cpu")), plan, sync_groups(SPEC, plan), 3, **settings)
    return StepDataset(Reader(samples, collate), RankInputs(plan, rank), seed, planner, window)
