"""Sizes of samples are the same on all ranks, and a step that is arranged by others is refused before it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from tests import tiny
from tests.distributed import run_distributed
from tests.folders import run_folder

from . import runs

pytestmark = pytest.mark.distributed

PLAN = {"vision": {"dp_size": 2}, "language_model": {"colocate_with": "vision"}}


class Counted:
    """Sizes of samples that are others on each rank, behind the first ones."""

    def __init__(self, num_equal: int):
        self.num_equal = num_equal

    def __call__(self, sample: Any) -> dict[str, int]:
        number = int(sample["number"])
        differs = dist.get_rank() == 1 and number >= self.num_equal
        return {"language_model": 10 + (number * 7 % 11 * 10 if differs else number), "vision": 5}


def collate(samples: list[dict[str, Any]]) -> Any:
    return tiny.collate("llava")([{name: sample[name] for name in sample if name != "number"} for sample in samples])


def make_trainer(num_equal: int, data: Any) -> Any:
    torch.set_num_threads(1)
    runs.draw_nothing()
    arguments = {**runs.COMMON, "global_batch_size": runs.GLOBAL_BATCH, "per_device_train_batch_size": 2}
    arguments |= {"output_dir": run_folder(), "train_sampling_strategy": "sequential"}
    args = MultimodalTrainingArguments(parallel=PLAN, ddp_backend="gloo", **arguments)
    return MultimodalParallelTrainer(
        tiny.FAMILIES["llava"](),
        args,
        sample_tokens=Counted(num_equal),
        train_dataset=data,
        data_collator=collate,
    )


def sizes_of_a_table() -> list[int]:
    trainer = make_trainer(2, Dataset.from_dict({"number": [0, 1, 2, 3]}))
    source = trainer.training_sizes.shared(trainer.train_dataset, trainer.global_batch_size).source
    assert source is not None
    return source([3, 0]).tokens["language_model"].tolist()


def sizes_that_differ_later() -> list[list[int]]:
    samples = [{**sample, "number": number} for number, sample in enumerate(tiny.make_dataset("llava", runs.SAMPLES))]
    trainer = make_trainer(runs.GLOBAL_BATCH, samples)
    steps = []
    run = trainer._engine.executor.run
    trainer._engine.executor.run = lambda *args: steps.append(args) or run(*args)
    trainer.train()
    return [batch.sizes.tokens["language_model"].tolist() for _, batch, *_ in steps]


def both() -> tuple[list[int], list[list[int]]]:
    return sizes_of_a_table(), sizes_that_differ_later()


def test_a_function_that_gives_other_sizes_on_each_rank_is_asked_once_for_a_sample():
    """All ranks have the table of the first; of a draw, they measure parts, and all arrange it by the same sizes."""
    (table, first), (other_table, second) = run_distributed(both, 2)
    assert table == other_table == [13, 10]
    assert first == second and len(first) == runs.COMMON["max_steps"]
