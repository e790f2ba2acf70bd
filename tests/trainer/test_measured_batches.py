"""Sizes that are only known when a sample is looked at: each rank measures a part of each draw, for all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from transformers import TrainerCallback

from hf_mmparallel.data import measured_batches
from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import assert_ranks_raise, run_distributed

from . import runs

PARALLEL = {"vision": {"dp_size": 1}, LANGUAGE_MODEL: {"dp_size": 2}}
TWO_EPOCHS = {"max_steps": 6, "warmup_steps": 0}


class Plain(TorchDataset):
    """A dataset that only its own code can read."""

    def __init__(self):
        self.samples = tiny.make_dataset("llava", runs.SAMPLES)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.samples[index], "number": index}


class Counting:
    """The sizes of a sample; writes down which were measured, in a file of each rank's process."""

    def __init__(self, folder: str, broken: int | None = None):
        self.folder = folder
        self.broken = broken

    def __call__(self, sample: Any) -> dict[str, int]:
        with open(f"{self.folder}/rank{os.environ['RANK']}-{os.getpid()}", "a") as file:
            file.write(f"{sample['number']}\n")
        if sample["number"] == self.broken:
            raise RuntimeError("no size")
        return {
            LANGUAGE_MODEL: len(sample["input_ids"]),
            "vision": 4 * int((sample["input_ids"] == tiny.MEDIA_TOKEN).sum()),
        }


class Steps(TrainerCallback):
    """The steps of a run."""

    def __init__(self):
        self.engine: Any = None
        self.steps: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, sizes = self.engine.current_step, self.engine.current_sizes
        self.steps.append((step.samples, step.microbatches, sizes.tokens[LANGUAGE_MODEL].tolist()))


def collate(samples: list[dict[str, Any]]) -> Any:
    return tiny.collate("llava")(
        [{name: own for name, own in sample.items() if name != "number"} for sample in samples]
    )


def sized_run(
    folder: str, workers: int, broken: int | None = None, checkpoint: str | None = None, **arguments: Any
) -> tuple[runs.Run, list[Any]]:
    from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments

    torch.set_num_threads(1)
    runs.draw_nothing()
    steps = Steps()
    given = {**runs.COMMON, "global_batch_size": runs.GLOBAL_BATCH, "per_device_train_batch_size": 2, **TWO_EPOCHS}
    given |= {"output_dir": f"{folder}/out", "dataloader_num_workers": workers, **arguments}
    if workers:
        given["dataloader_multiprocessing_context"] = "fork"
    trainer = MultimodalParallelTrainer(
        tiny.FAMILIES["llava"](),
        MultimodalTrainingArguments(parallel=PARALLEL, ddp_backend="gloo", **given),
        sample_tokens=Counting(folder, broken),
        train_dataset=Plain(),
        data_collator=collate,
        callbacks=[steps],
    )
    steps.engine = trainer.engine
    return runs.run_of(trainer, checkpoint=checkpoint), steps.steps


def measured(folder: Path) -> dict[int, list[int]]:
    """Rank -> the samples that it measured, those at the start left out."""
    found: dict[int, list[int]] = {}
    for file in folder.glob("rank*"):
        found.setdefault(int(file.name[4]), []).extend(map(int, file.read_text().split()))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("workers", [deep(0), 1])
def test_each_rank_measures_a_part_and_all_arrange_alike(workers: int, tmp_path: Path, monkeypatch):
    reference = runs.stock("llava", data=tiny.make_dataset("llava", runs.SAMPLES), **TWO_EPOCHS)
    ranks = run_distributed(sized_run, 3, str(tmp_path), workers)
    run, steps = ranks[0]
    runs.assert_same_run(run, reference)
    assert all(others == steps for _, others in ranks)
    data = Plain()
    for samples, microbatches, tokens in steps:
        assert tokens == [len(data[index]["input_ids"]) for index in samples]
        assert len({len(own) for row in microbatches[LANGUAGE_MODEL] for own in row}) > 0
    found = measured(tmp_path)
    # The first rank also measures samples at the start; the others a third of each draw, and nothing twice.
    assert found.keys() == {0, 1, 2}
    for rank in (1, 2):
        assert sorted(found[rank]) == sorted(set(found[rank])) and 0 < len(found[rank]) <= 2 * runs.SAMPLES // 3 + 3
    assert set().union(*found.values()) == set(range(runs.SAMPLES))


@pytest.mark.distributed
def test_a_sample_that_can_not_be_measured_is_left_out_on_all_ranks(tmp_path: Path):
    ranks = run_distributed(sized_run, 3, str(tmp_path), 0, 5, on_bad_sample="skip")
    steps = ranks[0][1]
    assert all(others == steps for _, others in ranks)
    assert all(5 not in samples for samples, _, _ in steps)
    assert min(len(samples) for samples, _, _ in steps[:2]) >= runs.GLOBAL_BATCH - 1


@pytest.mark.deep
@pytest.mark.distributed
def test_a_sample_that_can_not_be_measured_ends_the_run(tmp_path: Path):
    assert_ranks_raise(sized_run, 3, str(tmp_path), 0, 5, match="no size")


def resumed_run(folder: str) -> tuple[runs.Run, list[Any], runs.Run, list[Any]]:
    whole, steps = sized_run(folder, 1, save_strategy="steps", save_steps=4)
    again, rest = sized_run(folder, 1, checkpoint=f"{folder}/out/checkpoint-4")
    return whole, steps, again, rest


@pytest.mark.distributed
def test_a_resumed_run_arranges_as_the_first(tmp_path: Path):
    for whole, steps, again, rest in run_distributed(resumed_run, 3, str(tmp_path)):
        assert rest == steps[4:]
        assert again.logs[-1]["loss"] == whole.logs[-1]["loss"]


def test_the_median_sample():
    sizes = SampleSizes.of_sequences({LANGUAGE_MODEL: [[5], [1], [9], [7]], "vision": [[1], [2], [3], [4]]})
    median = measured_batches.median_of(sizes, LANGUAGE_MODEL)
    assert median.tokens[LANGUAGE_MODEL].tolist() == [7] and median.tokens["vision"].tolist() == [4]
