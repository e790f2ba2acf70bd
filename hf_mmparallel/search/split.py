"""Minimum batch size from which batches agree on the split of a plan's ranks between modules."""

from __future__ import annotations

import numpy as np

from ..cost import CostModel, layer_table
from ..cost.row_sizes import RowLayout
from ..plan import LANGUAGE_MODEL, ParallelPlan, SampleSizes
from .stability import StabilityReport, draw_from, minimum_stable_batch


def split_stability(costs: CostModel, plan: ParallelPlan, sizes: SampleSizes) -> StabilityReport | None:
    """
    Computes the minimum stable batch of a dataset (Entrain, algorithm 2) for the ranks of a replica of a plan; `None`
    if there is no split: modules share ranks, or have one rank each.
    """
    if shares_ranks(plan) or not sizes.num_samples:
        return None
    work = module_work(costs, sizes)
    dp_size = plan.modules[LANGUAGE_MODEL].dp_size
    dp_size = dp_size if plan.world_size % dp_size == 0 else 1
    if len(work) < 2 or plan.world_size // dp_size <= len(work) or not any(values.any() for values in work.values()):
        return None
    return minimum_stable_batch(draw_from(work), None, plan.world_size, dp_size, dataset_size=sizes.num_samples)


def shares_ranks(plan: ParallelPlan) -> bool:
    """Checks that modules share ranks instead of splitting them."""
    ranks = [{rank for _, _, stage in module.stages() for rank in stage.all_ranks} for module in plan.modules.values()]
    return sum(map(len, ranks)) > len(set().union(*ranks))


def module_work(costs: CostModel, sizes: SampleSizes) -> dict[str, np.ndarray]:
    """Module -> float64 `[samples]`: forward plus backward time of each sample on one rank, in ms."""
    work = {}
    for name in costs.spec.modules:
        squares, tokens = RowLayout.of(costs, name).of_samples(sizes, name, even=True)
        work[name] = sum(layer_table(costs, name, 1, False).sample_ms(tokens, squares))
    return work


def too_small(report: StabilityReport | None, global_batch_size: int, setting: str) -> str | None:
    """
    A warning about a global batch below the minimum stable one, if it is; `setting` is the user's setting as a prefix
    of its value, such as `--global-batch-size `.
    """
    if report is None or report.batch_size is None or global_batch_size >= report.batch_size:
        return None
    return (
        f"A global batch of {global_batch_size} samples is smaller than {report.batch_size}, from which on batches "
        f"agree on the split of ranks between modules: some steps need another split than this plan's. Use "
        f"`{setting}{report.batch_size}` or more."
    )
