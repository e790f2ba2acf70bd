"""Text about the batch size from which samples agree on the split of ranks."""

from __future__ import annotations

from ..search.split import split_stability, too_small
from .answer import Answer


def stability_lines(answer: Answer) -> list[tuple[str, str]]:
    """
    Returns labels and texts about the dataset's minimum stable batch, for a plan that splits ranks between modules;
    none without a dataset.
    """
    if answer.inputs.samples.measured is None:
        return []
    sizes = answer.inputs.samples.sizes(answer.inputs.source, answer.settings)
    report = split_stability(answer.costs, answer.plan, sizes)
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
    warning = too_small(report, answer.global_batch_size, "--global-batch-size ")
    return [*lines, ("Warning", warning)] if warning else lines
