"""Checks of the user's data that only a step can make: whether placeholders, media and labels match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..schedule.actions import Task
from .step_inputs import StepInputs


def check_features_computed(inputs: StepInputs, task: Task) -> None:
    """Refuses a sample with placeholders whose features enter a task, but are computed nowhere."""
    samples = inputs.samples(task)
    for edge in inputs.plan.edges:
        if edge.target != task.module or task.stage not in inputs.plan.edge_stages(edge, task.replica):
            continue
        absent = [
            index for index, sample in enumerate(samples) if (edge.source, sample) not in inputs.step.location_of
        ]
        for feature in inputs.spec.modules[edge.source].features:
            for index in absent:
                count = inputs.num_feature_tokens(task)[feature.modality][index]
                if count:
                    raise ValueError(
                        f"Sample {inputs.step.samples[samples[index]]} has {count} placeholders of "
                        f"`{feature.modality}` in `input_ids`, but the sizes of samples give it no tokens in "
                        f"`{edge.source}`, so that nothing computes their features. Correct its size in the "
                        "column or the function that they come from."
                    )


def check_feature_tokens(inputs: StepInputs, task: Task, outputs: Sequence[Tensor]) -> None:
    """Checks that the last stage of a module made a feature token for each placeholder of its samples."""
    features = inputs.spec.modules[task.module].features
    if not features or not inputs.is_last(task):
        return
    sizes = inputs.feature_owners(task, features).sizes[inputs.cp_rank(task)]
    for feature, output, wanted in zip(features, outputs, sizes, strict=True):
        if output.shape[0] != wanted:
            samples = [inputs.step.samples[sample] for sample in inputs.samples(task)]
            raise ValueError(
                f"Samples {samples} have {wanted} placeholders of `{feature.modality}` in `input_ids`, but "
                f"`{task.module}` made {output.shape[0]} features of them. Make the processor's placeholders and "
                "media agree."
            )


def check_labels(batch: Mapping[str, Any]) -> None:
    """Refuses a batch to train on that has no labels."""
    if batch.get("labels") is None and batch.get("shift_labels") is None:
        raise ValueError(
            f"The batch has no `labels` to train on, only {', '.join(f'`{name}`' for name in batch)}. Add a "
            "column `labels`, or a collator that makes it."
        )
