"""Bad samples, streams and interrupted epochs in training runs on ranks."""

from __future__ import annotations

import errno
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import SeedableRandomSampler

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from tests import tiny
from tests.distributed import assert_ranks_raise, run_distributed

from . import runs

pytestmark = pytest.mark.distributed

FAMILY = "llava"
PLAN = {"vision": {}, "language_model": {"dp_size": 2}}
ORDER = list(SeedableRandomSampler(range(runs.SAMPLES), data_seed=runs.COMMON["seed"]))
STEPS = [ORDER[start : start + runs.GLOBAL_BATCH] for start in range(0, runs.SAMPLES, runs.GLOBAL_BATCH)]


class Corrupt:
    """The tiny samples, some of which this rank can't read."""

    def __init__(self, bad: dict[int, tuple[int, ...]], size: int = runs.SAMPLES):
        self.samples = tiny.make_dataset(FAMILY, size)
        self.bad = {index for index, ranks in bad.items() if dist.get_rank() in ranks}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise OSError(errno.EIO, "corrupt", f"charts/{index}.png")
        return self.samples[index]


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The family's collator, for a worker."""
    return tiny.collate(FAMILY)(samples)


def make_trainer(dataset: Any, parallel: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """A trainer on data of a test's own."""
    torch.set_num_threads(1)
    arguments = {**runs.COMMON, "global_batch_size": runs.GLOBAL_BATCH, "per_device_train_batch_size": 2, **arguments}
    arguments.setdefault("output_dir", tempfile.mkdtemp(prefix="run-"))
    args = MultimodalTrainingArguments(parallel=parallel or PLAN, ddp_backend="gloo", **arguments)
    return MultimodalParallelTrainer(tiny.FAMILIES[FAMILY](), args, train_dataset=dataset, data_collator=collate)


def _losses(steps: list[list[int]]) -> list[float]:
    """The untrained model's loss over the target tokens of each step."""
    model, data = tiny.FAMILIES[FAMILY](), tiny.make_dataset(FAMILY, runs.SAMPLES)
    with torch.no_grad():
        return [float(model(**tiny.collate(FAMILY)([data[i] for i in step])).loss) for step in steps]


def _skipping(bad: dict[int, tuple[int, ...]], num_workers: int) -> dict[str, Any]:
    warnings: list[str] = []
    from hf_mmparallel.trainer import agreement

    agreement.logger.warning = lambda text: warnings.append(text)  # type: ignore[method-assign]
    trainer = make_trainer(
        Corrupt(bad),
        on_bad_sample="skip",
        learning_rate=0.0,
        max_steps=6,
        dataloader_num_workers=num_workers,
        dataloader_multiprocessing_context="fork" if num_workers else None,
    )
    output = trainer.train()
    prediction = trainer.predict(Corrupt({1: (0,)}, 7))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "losses": [row["loss"] for row in rows],
        "skipped": [row["parallel/skipped_samples"] for row in rows],
        "total": output.metrics["parallel/skipped_samples"],
        "warnings": warnings,
        "predicted": None if prediction.predictions is None else len(prediction.predictions),
    }


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_step_goes_on_without_the_samples_that_a_rank_cannot_read(num_workers: int):
    first, second, third = STEPS[0][2], STEPS[0][5], STEPS[2][1]
    bad = {first: (0,), second: (1, 2), third: (0, 2)}  # rank 0 has the encoder, the others the language model
    ranks = run_distributed(_skipping, 3, bad, num_workers)
    expected = _losses([[index for index in step if index not in bad] for step in STEPS])
    for rank in ranks:
        assert rank["losses"][:3] == pytest.approx(expected, rel=1e-5)
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["skipped"] == [2, 2, 3, *rank["skipped"][3:]] and rank["total"] == rank["skipped"][-1] == 6
    assert ranks[0]["predicted"] == 6
    warned = [text for text in ranks[0]["warnings"] if "left out" in text]
    assert len(warned) == 4
    for index in (first, second, third, 1):
        assert sum(f"Sample {index} (charts/{index}.png) can't be read: OSError" in text for text in warned) == 1


def _raising() -> None:
    make_trainer(Corrupt({STEPS[0][3]: (0,)})).train()


def test_by_default_a_bad_sample_ends_the_run_on_all_ranks_with_its_index_and_file():
    index = STEPS[0][3]
    sentence = rf"Sample {index} \(charts/{index}.png\) can't be read: OSError: \[Errno 5\] corrupt"
    own, *others = assert_ranks_raise(_raising, 3, match=sentence)
    assert own.endswith('Remove it, or use `on_bad_sample="skip"`.')
    assert all("rank 0: BadSampleError" in text for text in others)


def _without_any() -> None:
    make_trainer(Corrupt(dict.fromkeys(STEPS[1], (1, 2))), on_bad_sample="skip").train()


def test_a_step_without_a_readable_sample_is_an_error():
    assert_ranks_raise(_without_any, 3, match="None of the last . samples of a global batch can be read.*charts/")
