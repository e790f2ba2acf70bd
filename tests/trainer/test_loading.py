"""Bad samples, streams and interrupted epochs in training runs on ranks."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import SeedableRandomSampler
from datasets import IterableDataset as StreamedDataset
from torch.utils.data import IterableDataset, get_worker_info
from transformers import Trainer, TrainingArguments

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import assert_ranks_raise, run_distributed
from tests.folders import run_folder

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
    arguments.setdefault("output_dir", run_folder())
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


@pytest.mark.parametrize("num_workers", [deep(0), 1])
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


def _raising(index: int) -> None:
    make_trainer(Corrupt({index: (0,)})).train()


@pytest.mark.parametrize("index", [deep(STEPS[0][3], id="in a step"), 1])
def test_by_default_a_bad_sample_ends_the_run_on_all_ranks_with_its_index_and_file(index: int):
    _, *others = assert_ranks_raise(_raising, 3, index, match=rf"Sample {index} \(charts/{index}.png\) .*corrupt")
    assert all("rank 0: BadSampleError" in text for text in others)


class Stream(IterableDataset):
    """The tiny samples in order, of which a worker would take a part."""

    def __init__(self, size: int = runs.SAMPLES, first: int = 0):
        self.samples = tiny.make_dataset(FAMILY, size)[first:]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        return iter(self.samples if info is None else self.samples[info.id :: info.num_workers])


def datasets_stream() -> Any:
    """The same samples, in four shards."""
    samples = tiny.make_dataset(FAMILY, runs.SAMPLES)

    def rows(shards: list[int]) -> Iterator[dict[str, Any]]:
        for shard in shards:
            yield from samples[6 * shard : 6 * shard + 6]

    return StreamedDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]})


STREAMS = {"torch": Stream, "datasets": datasets_stream}


def tokens_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"language_model": len(sample["input_ids"]), "vision": [4] * len(sample.get("pixel_values", ()))}


def _streamed(kind: str, num_workers: int) -> runs.Run:
    trainer = make_trainer(
        STREAMS[kind](),
        max_steps=5,
        dataloader_num_workers=num_workers,
        dataloader_multiprocessing_context="fork" if num_workers else None,
    )
    trainer.sample_tokens = tokens_of
    trainer.train()
    whole = trainer.gather_model()
    metrics = trainer.evaluate(Stream(7))
    same = trainer.evaluate(tiny.make_dataset(FAMILY, 7))
    assert metrics["eval_loss"] == pytest.approx(same["eval_loss"], rel=1e-6)
    return runs.Run(runs.step_logs(trainer), None if whole is None else dict(whole.state_dict()))


@pytest.mark.parametrize(("kind", "num_workers"), [("torch", 0), deep("datasets", 2)])
def test_a_stream_is_trained_on_as_by_the_stock_trainer(kind: str, num_workers: int, tmp_path: Path):
    run, *_ = run_distributed(_streamed, 3, kind, num_workers)
    model, arguments = tiny.FAMILIES[FAMILY](), {**runs.COMMON, "per_device_train_batch_size": 8, "max_steps": 5}
    # Batches that are dispatched are cut to as many images as samples.
    args = TrainingArguments(str(tmp_path), accelerator_config={"dispatch_batches": False}, **arguments)
    trainer = Trainer(model, args, train_dataset=STREAMS[kind](), data_collator=collate)
    trainer.train()
    runs.assert_same_run(run, runs.Run(runs.step_logs(trainer), dict(model.state_dict())))


def _refusals() -> list[str]:
    """What is said of a step without a readable sample, of unlike streams, and of a stream without an end."""
    said = []
    for dataset, arguments in (
        (Corrupt(dict.fromkeys(STEPS[1], (1, 2))), {"on_bad_sample": "skip"}),
        (Stream(first=int(dist.get_rank() == 1)), {}),
        (Stream(), {"max_steps": -1}),
    ):
        with pytest.raises(Exception) as raised:
            make_trainer(dataset, **arguments).train()
        said.append(str(raised.value))
    return said


def test_data_that_do_not_do_are_refused_on_all_ranks():
    for unreadable, unlike, endless in run_distributed(_refusals, 3):
        assert "None of the 8 samples" in unreadable and "charts/" in unreadable
        assert "different samples from the stream, 8 to 8" in unlike
        assert "max_steps" in endless


def _drawn(trainer: Any, resume: str | None = None) -> list[tuple[int, ...]]:
    """Trains; the samples of each step."""
    steps, stock = [], trainer.get_batch_samples

    def noting(*arguments: Any) -> Any:
        batches, count = stock(*arguments)
        steps.extend(batch.step.samples for batch in batches)
        return batches, count

    trainer.get_batch_samples = noting
    trainer.train(resume_from_checkpoint=resume)
    return steps


def _interrupted(folder: Path, resume: str | None, parallel: dict[str, Any], size: int) -> tuple[list, dict[str, Any]]:
    trainer = make_trainer(
        Corrupt({}),
        parallel,
        output_dir=str(folder),
        global_batch_size=None,
        per_device_train_batch_size=size,
        max_steps=-1,
        num_train_epochs=1,
        save_strategy="steps",
        save_steps=2,
        dataloader_num_workers=int(resume is not None),
        dataloader_multiprocessing_context="fork" if resume else None,
    )
    steps = _drawn(trainer, resume)
    state = trainer.state
    return steps, {
        "epoch": state.epoch,
        "step": state.global_step,
        "of": state.max_steps,
        "rates": [row["learning_rate"] for row in runs.step_logs(trainer)],
    }


def test_an_epoch_goes_on_with_other_replicas_batches_and_workers_without_losing_or_repeating_a_sample(tmp_path: Path):
    first, _ = run_distributed(_interrupted, 3, tmp_path, None, PLAN, 2)[0]
    checkpoint = str(tmp_path / "checkpoint-2")
    rest, state = run_distributed(_interrupted, 2, tmp_path / "rest", checkpoint, {"vision": {}}, 3)[0]
    assert [len(step) for step in first] == [4, 4, 4, 4, 4, 2] and [len(step) for step in rest] == [3, 3, 3, 3, 2]
    assert [index for step in first[:2] + rest for index in step] == ORDER
    assert (state["epoch"], state["step"], state["of"]) == (1.0, 7, 7)
    assert state["rates"][-1] < 0.2 * max(state["rates"])  # the schedule ends with the run


def _stream_resumed(folder: Path) -> list[tuple[list, dict[str, torch.Tensor] | None]]:
    found = []
    for resume in (None, str(folder / "checkpoint-4")):
        saving = {"save_strategy": "steps", "save_steps": 2}
        trainer = make_trainer(Stream(), output_dir=str(folder), max_steps=6, **saving)
        steps = _drawn(trainer, resume)
        whole = trainer.gather_model()
        found.append((steps, None if whole is None else dict(whole.state_dict())))
    return found


def test_a_stream_goes_on_in_the_middle_of_a_later_epoch(tmp_path: Path):
    (steps, straight), (rest, resumed) = run_distributed(_stream_resumed, 3, tmp_path)[0]
    assert rest == steps[4:] == [tuple(range(8, 16)), tuple(range(16, 22))]
    assert straight is not None and resumed is not None
    assert all(torch.equal(resumed[name], weight) for name, weight in straight.items())
