"""Sizes that are only known when a sample is looked at: each rank measures a part of each draw, for all ranks."""

import os
from pathlib import Path
from typing import Any

import pytest

from hf_mmparallel.data import measured_batches
from hf_mmparallel.plan import LANGUAGE_MODEL, SampleSizes
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import assert_ranks_raise, run_distributed
from tests.streams import Opaque

from . import runs
from .moments import AfterSteps

PARALLEL = {"vision": {"dp_size": 1}, LANGUAGE_MODEL: {"dp_size": 2}}
TWO_EPOCHS = {"max_steps": 6, "warmup_steps": 0}
SAMPLES = tiny.make_dataset("llava", runs.SAMPLES)
NUMBERS = {tuple(sample["input_ids"].tolist()): number for number, sample in enumerate(SAMPLES)}


class Counting:
    """The sizes of a sample; writes down which were measured, in a file of each rank's process."""

    def __init__(self, folder: Path, broken: int | None = None):
        self.folder = folder
        self.broken = broken

    def __call__(self, sample: Any) -> dict[str, int]:
        ids = sample["input_ids"]
        number = NUMBERS[tuple(ids.tolist())]
        with open(self.folder / f"rank{os.environ['RANK']}-{os.getpid()}", "a") as file:
            file.write(f"{number}\n")
        if number == self.broken:
            raise RuntimeError("no size")
        return {LANGUAGE_MODEL: len(ids), "vision": int((ids == tiny.MEDIA_TOKEN).sum()) * 4}


def sized_run(
    folder: Path, broken: int | None = None, checkpoint: str | None = None, **arguments: Any
) -> tuple[runs.Run, list[Any]]:
    """A run, and the samples of each step, their arrangement and tokens."""
    words = {"data": Opaque(SAMPLES), "sample_tokens": Counting(folder, broken)}
    trainer = runs.make_trainer("llava", PARALLEL, str(folder / "out"), **words, **TWO_EPOCHS, **arguments)
    engine, steps = trainer.engine, []

    def note(_: int) -> None:
        tokens = engine.current_sizes.tokens[LANGUAGE_MODEL].tolist()
        steps.append((engine.current_step.samples, engine.current_step.microbatches, tokens))

    trainer.add_callback(AfterSteps(note))
    return runs.run_of(trainer, checkpoint=checkpoint), steps


def run_in_workers(folder: Path) -> tuple[runs.Run, list[Any]]:
    workers = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork"}
    return sized_run(folder, save_strategy="steps", save_steps=4, **workers)


def run_on(folder: Path) -> tuple[runs.Run, list[Any]]:
    return sized_run(folder, checkpoint=str(folder / "out" / "checkpoint-4"))


@pytest.mark.distributed
@pytest.mark.parametrize("resumes", [False, deep(True)])
def test_each_rank_measures_a_part_and_all_arrange_alike_resumed_or_not(tmp_path: Path, resumes: bool):
    ranks = run_distributed(run_in_workers, 3, tmp_path)
    run, steps = ranks[0]
    runs.assert_same_run(run, runs.stock("llava", data=SAMPLES, **TWO_EPOCHS))
    assert all(others == steps for _, others in ranks)
    for again, rest in run_distributed(run_on, 3, tmp_path) if resumes else ():
        assert rest == steps[4:] and again.logs[-1]["loss"] == run.logs[-1]["loss"]
    for samples, _, tokens in steps:
        assert tokens == [len(SAMPLES[index]["input_ids"]) for index in samples]
    # The first rank also measures samples at the start; the others a third of each draw, and nothing twice.
    measured: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for file in tmp_path.glob("rank*"):
        measured[int(file.name[4])] += map(int, file.read_text().split())
    for rank in (1, 2) if not resumes else ():
        assert len(measured[rank]) == len(set(measured[rank])) and 0 < len(measured[rank]) <= 2 * runs.SAMPLES // 3 + 3
    assert set().union(*measured.values()) == set(range(runs.SAMPLES))


@pytest.mark.distributed
@pytest.mark.deep
def test_a_sample_that_can_not_be_measured_is_left_out_on_all_ranks(tmp_path: Path):
    ranks = run_distributed(sized_run, 3, tmp_path, 5, on_bad_sample="skip")
    steps = ranks[0][1]
    assert all(others == steps for _, others in ranks)
    assert all(5 not in samples for samples, _, _ in steps)
    assert min(len(samples) for samples, _, _ in steps[:2]) >= runs.GLOBAL_BATCH - 1


@pytest.mark.deep
@pytest.mark.distributed
def test_a_sample_that_can_not_be_measured_ends_the_run(tmp_path: Path):
    assert_ranks_raise(sized_run, 3, tmp_path, 5, match="no size")


def test_the_median_sample():
    sizes = SampleSizes.of_sequences({LANGUAGE_MODEL: [[5], [1], [9], [7]], "vision": [[1], [2], [3], [4]]})
    median = measured_batches.median_of(sizes, LANGUAGE_MODEL)
    assert median.tokens[LANGUAGE_MODEL].tolist() == [7] and median.tokens["vision"].tolist() == [4]
