"""Run contexts of tests without a Trainer."""

from typing import Any

from hf_mmparallel import MultimodalTrainingArguments
from hf_mmparallel.trainer.training_sizes import RunContext
from hf_mmparallel.world import World
from tests.plan.specs import model_spec


def arguments(**changes: Any) -> MultimodalTrainingArguments:
    return MultimodalTrainingArguments(output_dir="unused", use_cpu=True, report_to=[], **changes)


def context(dataset: Any = None, sample_tokens: Any = None, **changes: Any) -> RunContext:
    """A run with `changes` of its arguments, whose model reads all columns of the dataset."""
    return RunContext(
        arguments(**changes),
        World(),
        model=None,
        spec=model_spec(),
        train_dataset=dataset,
        collator=None,
        processing_class=None,
        sample_tokens=sample_tokens,
        drop_columns=lambda dataset, description: (dataset, None),
    )
