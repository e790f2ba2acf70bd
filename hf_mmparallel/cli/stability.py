"""From which batch size on samples agree on how ranks are split between modules."""

from __future__ import annotations

import numpy as np

from ..cost import CostModel, layer_table
from ..plan import LANGUAGE_MODEL, SampleSizes
from ..search.stability import StabilityReport, draw_from, minimum_stable_batch
from .answer import Answer


def split_stability(answer: Answer) -> StabilityReport | None:
    """
    The minimum stable profiling batch of a dataset (Entrain, algorithm 2), for the ranks of a replica of the plan, or
    of a node where modules share their ranks.

    Args:
        answer (`Answer`): The plan.

    Returns:
        `StabilityReport` or `None`: None without a dataset or without two modules.
    """
    measured, plan = answer.inputs.samples.measured, answer.plan
    if measured is None or len(plan.modules) < 2:
        return None
    sizes = answer.inputs.samples.sizes(answer.inputs.source, answer.settings, 1)
    work = module_work(answer.costs, sizes)
    dp_size = plan.modules[LANGUAGE_MODEL].dp_size
    if shares_ranks(answer) or plan.world_size % dp_size:
        dp_size = max(1, plan.world_size // answer.costs.device.node_size)
        dp_size = dp_size if plan.world_size % dp_size == 0 else 1
    if plan.world_size // dp_size < len(work):
        return None
    return minimum_stable_batch(draw_from(work), None, plan.world_size, dp_size, dataset_size=measured.num_samples)


def shares_ranks(answer: Answer) -> bool:
    """Whether modules share ranks, so that these are not split between them."""
    taken = [{rank for _, _, s in m.stages() for rank in s.all_ranks} for m in answer.plan.modules.values()]
    return sum(map(len, taken)) > len(set().union(*taken))


def module_work(costs: CostModel, sizes: SampleSizes) -> dict[str, np.ndarray]:
    """
    Module -> float64 `[samples]`: the forward and backward of each sample on one rank, in ms.

    Args:
        costs (`CostModel`): What layers cost, with what is frozen.
        sizes (`SampleSizes`): Of the samples.
    """
    work = {}
    for name in costs.spec.modules:
        table = layer_table(costs, name, 1, False)
        values = np.array([sizes.squares[name], sizes.tokens[name]])
        work[name] = (table.forward + table.backward)[:, :2].sum(axis=0) @ values
    return work


def stability_lines(report: StabilityReport | None, global_batch_size: int) -> list[tuple[str, str]]:
    """
    What it says: labels and texts.

    Args:
        report (`StabilityReport`, *optional*): The test; nothing is said without one.
        global_batch_size (`int`): Samples of a step.
    """
    if report is None:
        return []
    test = report.test
    split = " : ".join(f"{name} {ranks}" for name, ranks in zip(report.modules, report.split, strict=True))
    what = f"the split of {sum(report.split)} GPUs by work, {split},"
    if report.batch_size is None:
        return [("Split", f"{what} is not stable. {' '.join(report.notes)}")]
    noun = "sample" if report.batch_size == 1 else "samples"
    text = (
        f"{what} is stable from batches of {report.batch_size} {noun} ({test.confidence:.0%} confidence, error "
        f"{test.error:.0%})"
    )
    lines = [("Split", f"{text}. {' '.join(report.notes)}".rstrip())]
    if global_batch_size < report.batch_size:
        lines.append(
            (
                "Warning",
                f"a global batch of {global_batch_size} samples is smaller than that, so that some steps ask for "
                f"another split than this plan has. Use `--global-batch-size {report.batch_size}` or more.",
            )
        )
    return lines
