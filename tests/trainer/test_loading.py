"""Bad samples, streams, interrupted epochs, and ranks that have other sizes or samples, in training runs."""

import errno
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from datasets import IterableDataset as StreamedDataset
from torch.utils.data import random_split
from transformers import TrainerCallback

from hf_mmparallel.trainer import training_steps
from tests import tiny
from tests.deep_cases import deep, in_turn
from tests.distributed import run_distributed
from tests.folders import made_once
from tests.streams import Rows

from . import runs

pytestmark = pytest.mark.distributed

FAMILY = "llava"
VISION, LM = "vision", "language_model"
PLAN = {VISION: {}, LM: {"dp_size": 2}}
SHARED = {VISION: {"dp_size": 2}, LM: {"colocate_with": VISION}}
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
    return tiny.collate(FAMILY)([{name: v for name, v in sample.items() if name != "number"} for sample in samples])


def make_trainer(dataset: Any, parallel: Any = PLAN, workers: int = 0, **given: Any) -> Any:
    loading = {"dataloader_num_workers": workers, "dataloader_multiprocessing_context": "fork" if workers else None}
    return runs.make_trainer(FAMILY, parallel, data=dataset, data_collator=collate, **loading, **given)


def _losses(steps: list[list[int]]) -> list[float]:
    """The untrained model's loss over the target tokens of each step."""
    model, data = tiny.FAMILIES[FAMILY](), tiny.make_dataset(FAMILY, runs.SAMPLES)
    with torch.no_grad():
        return [float(model(**tiny.collate(FAMILY)([data[i] for i in step])).loss) for step in steps]


def _skipping(bad: dict[int, tuple[int, ...]]) -> dict[str, Any]:
    warnings: list[str] = []
    training_steps.logger.warning = lambda text: warnings.append(text)  # type: ignore[method-assign]
    trainer = make_trainer(Corrupt(bad), on_bad_sample="skip", learning_rate=0.0, max_steps=4, workers=1)
    output = trainer.train()
    prediction = trainer.predict(Corrupt({1: (0,)}, 7))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "losses": [row["loss"] for row in rows],
        "skipped": [row["parallel/skipped_samples"] for row in rows],
        "total": output.metrics["parallel/skipped_samples"],
        "warnings": [text for text in warnings if "left out" in text],
        "predicted": None if prediction.predictions is None else len(prediction.predictions),
    }


def test_a_step_goes_on_without_the_samples_that_a_rank_cannot_read():
    first, second, third = STEPS[0][2], STEPS[0][5], STEPS[2][1]
    bad = {first: (0,), second: (1, 2), third: (0, 2)}  # rank 0 has the encoder, the others the language model
    ranks = run_distributed(_skipping, 3, bad)
    expected = _losses([[index for index in step if index not in bad] for step in STEPS])
    for rank in ranks:
        assert rank["losses"][:3] == pytest.approx(expected, rel=1e-5)
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["skipped"][:3] == [2, 2, 3] and rank["total"] == rank["skipped"][-1]
    assert ranks[0]["predicted"] == 6
    warned = ranks[0]["warnings"]
    assert len(warned) == 4
    for index in (first, second, third, 1):
        assert sum(f"Sample {index} (charts/{index}.png) can't be read: OSError" in text for text in warned) == 1


def rows_of(size: int = runs.SAMPLES, first: int = 0) -> Rows:
    """The tiny samples in order, of which a worker would take a part."""
    return Rows(tiny.make_dataset(FAMILY, size)[first:])


def datasets_stream() -> Any:
    """The same samples, in four shards."""
    samples = tiny.make_dataset(FAMILY, runs.SAMPLES)

    def rows(shards: list[int]) -> Iterator[dict[str, Any]]:
        for shard in shards:
            yield from samples[6 * shard : 6 * shard + 6]

    return StreamedDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]})


STREAMS = {"torch": rows_of, "datasets": datasets_stream}


def tokens_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {LM: len(sample["input_ids"]), "vision": [4] * len(sample.get("pixel_values", ()))}


def _streamed(kind: str, workers: int) -> runs.Run:
    trainer = make_trainer(STREAMS[kind](), sample_tokens=tokens_of, workers=workers)
    run = runs.run_of(trainer)
    metrics, same = (trainer.evaluate(data) for data in (rows_of(7), tiny.make_dataset(FAMILY, 7)))
    assert metrics["eval_loss"] == pytest.approx(same["eval_loss"], rel=1e-6)
    return run


@pytest.mark.parametrize(("kind", "workers"), [("torch", 0), deep("datasets", 2)])
def test_a_stream_is_trained_on_as_by_the_stock_trainer(kind: str, workers: int):
    run, *_ = run_distributed(_streamed, 3, kind, workers)
    # Batches that are dispatched are cut to as many images as samples.
    given = {"data": STREAMS[kind](), "eval_dataset": tiny.make_dataset(FAMILY, 1)}
    stock = runs.stock_trainer(FAMILY, accelerator_config={"dispatch_batches": False}, **given)
    runs.assert_same_run(run, runs.run_of(stock))


def _refusals() -> list[str]:
    """What is said of a step without a readable sample, unlike streams, a stream without an end, and a bad sample."""
    said = []
    for dataset, arguments in (
        (Corrupt(dict.fromkeys(STEPS[1], (1, 2))), {"on_bad_sample": "skip"}),
        (rows_of(first=int(dist.get_rank() == 1)), {}),
        (rows_of(), {"max_steps": -1}),
        (Corrupt({STEPS[0][3]: (0,)}), {}),  # the last one: after it the ranks are at different places
    ):
        with pytest.raises(Exception) as raised:
            make_trainer(dataset, **arguments).train()
        said.append(str(raised.value))
    return said


def test_data_that_do_not_do_are_refused_on_all_ranks():
    bad = STEPS[0][3]
    for rank, (unreadable, unlike, endless, corrupt) in enumerate(run_distributed(_refusals, 3)):
        assert f"Sample {bad} (charts/{bad}.png) " in corrupt and ("rank 0: BadSampleError" in corrupt or rank == 0)
        assert "None of the 8 samples" in unreadable and "charts/" in unreadable
        assert "different samples from the stream, 8 to 8" in unlike
        assert "max_steps" in endless


def _drawn(trainer: Any, resume: str | None = None) -> list[tuple[int, ...]]:
    steps, stock = [], trainer.get_batch_samples

    def noting(*arguments: Any) -> Any:
        batches, count = stock(*arguments)
        steps.extend(batch.step.samples for batch in batches)
        return batches, count

    trainer.get_batch_samples = noting
    trainer.train(resume_from_checkpoint=resume)
    return steps


def _interrupted(folder: Path, resume: str | None, parallel: dict[str, Any], size: int) -> tuple[list, Any, list]:
    an_epoch = {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 2}
    sizes = {"global_batch_size": None, "per_device_train_batch_size": size}
    workers = int(resume is not None)
    trainer = make_trainer(Corrupt({}), parallel, workers=workers, output_dir=str(folder), **an_epoch, **sizes)
    steps = _drawn(trainer, resume)
    state, rates = trainer.state, [row["learning_rate"] for row in runs.step_logs(trainer)]
    return steps, (state.epoch, state.global_step, state.max_steps), rates


def test_an_epoch_goes_on_with_other_replicas_batches_and_workers_without_losing_or_repeating_a_sample(tmp_path: Path):
    first, *_ = run_distributed(_interrupted, 3, tmp_path, None, PLAN, 2)[0]
    checkpoint = str(tmp_path / "checkpoint-2")
    rest, state, rates = run_distributed(_interrupted, 2, tmp_path / "rest", checkpoint, {VISION: {}}, 3)[0]
    assert [len(step) for step in first] == [4, 4, 4, 4, 4, 2] and [len(step) for step in rest] == [3, 3, 3, 3, 2]
    assert [index for step in first[:2] + rest for index in step] == ORDER
    assert state == (1.0, 7, 7)
    assert rates[-1] < 0.2 * max(rates)  # the schedule ends with the run


def _stream_resumed(folder: Path) -> list[tuple[list, dict[str, torch.Tensor] | None]]:
    found = []
    for resume in (None, str(folder / "checkpoint-4")):
        saving = {"save_strategy": "steps", "save_steps": 4}
        trainer = make_trainer(rows_of(), SHARED, output_dir=str(folder), max_steps=6, **saving)
        steps = _drawn(trainer, resume)
        whole = trainer.gather_model()
        found.append((steps, None if whole is None else dict(whole.state_dict())))
    return found


class Counted:
    """Sizes of samples that are others on each rank, behind the first ones."""

    def __init__(self, num_equal: int):
        self.num_equal = num_equal

    def __call__(self, sample: Any) -> dict[str, int]:
        number = int(sample["number"])
        differs = dist.get_rank() == 1 and number >= self.num_equal
        return {LM: 10 + (number * 7 % 11 * 10 if differs else number), "vision": 5}


def _sizes_of_a_table() -> list[int]:
    trainer = make_trainer(Dataset.from_dict({"number": [0, 1, 2, 3]}), SHARED, sample_tokens=Counted(2))
    source = trainer.training_sizes.common_sizes(trainer.train_dataset, trainer.global_batch_size).source
    assert source is not None
    return source([3, 0]).tokens[LM].tolist()


def _sizes_that_differ_later() -> list[list[int]]:
    samples = [{**sample, "number": number} for number, sample in enumerate(tiny.make_dataset("llava", runs.SAMPLES))]
    sequential = {"train_sampling_strategy": "sequential"}
    trainer = make_trainer(samples, SHARED, sample_tokens=Counted(runs.GLOBAL_BATCH), **sequential)
    steps = []
    run = trainer._engine.executor.run
    trainer._engine.executor.run = lambda *args: steps.append(args) or run(*args)
    trainer.train()
    return [batch.sizes.tokens[LM].tolist() for _, batch, *_ in steps]


def _on_two_ranks(folder: Path) -> tuple[Any, list[int], list[list[int]]]:
    return _stream_resumed(folder), _sizes_of_a_table(), _sizes_that_differ_later()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("stream")
    return made_once("loading", lambda: run_distributed(_on_two_ranks, 2, folder, timeout=200))


@pytest.mark.deep
def test_a_stream_goes_on_in_the_middle_of_a_later_epoch(two_ranks: list[Any]):
    (steps, straight), (rest, resumed) = two_ranks[0][0]
    assert rest == steps[4:] == [tuple(range(8, 16)), tuple(range(16, 22))]
    assert straight is not None and resumed is not None
    assert all(torch.equal(resumed[name], weight) for name, weight in straight.items())


@pytest.mark.deep
def test_a_function_that_gives_other_sizes_on_each_rank_is_asked_once_for_a_sample(two_ranks: list[Any]):
    """All ranks have the table of the first; of a draw, they measure parts, and all arrange it by the same sizes."""
    (_, table, first), (_, other_table, second) = two_ranks
    assert table == other_table == [13, 10]
    assert first == second and len(first) == runs.COMMON["max_steps"]


# Datasets that differ


def alike() -> list[dict[str, Any]]:
    """Eight samples of one length with one image each: no size tells them apart."""
    data = tiny.make_dataset("llava", 24, shapes=[tiny.Shape(1, 0, 6)] * 24, seed=5)
    return [sample for sample in data if len(sample["input_ids"]) == len(data[0]["input_ids"])]


def rows() -> Dataset:
    return Dataset.from_list([{name: v.tolist() for name, v in sample.items()} for sample in alike()])


class Augmented(torch.utils.data.Dataset):
    """Equal samples whose pixels each process draws by a generator of its own."""

    def __init__(self):
        self.samples = alike()
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {**sample, "pixel_values": torch.rand(sample["pixel_values"].shape, generator=self.generator)}


class Replacing(Augmented):
    """Gives other samples from the second step on: each process makes its own choice."""

    step = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[torch.randint(len(self), (), generator=self.generator) if self.step else index]


class CountSteps(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        train_dataloader.dataset.reader(LM).dataset.step = state.global_step


def mapped_alike() -> Dataset:
    """Equal content with a fingerprint of its own on each rank: the function can't be hashed."""
    noise = torch.Generator()  # what a lambda closes over is not picklable here
    return rows().map(lambda row: {**row, "attention_mask": [1] * len(row["input_ids"]) if noise else []})


DIFFERENT: dict[str, Callable[[], Any]] = {
    "a list": lambda: [alike()[i] for i in np.random.permutation(len(alike()))],
    "shuffle": lambda: rows().shuffle(),
    "random_split": lambda: random_split(alike(), [0.75, 0.25])[0],  # pyright: ignore[reportArgumentType]
}
EQUAL: dict[str, Callable[[], Any]] = {
    "other fingerprints": mapped_alike,
    "augmented pixels": Augmented,
}


def _said(make: Callable[[], Any], evaluates: bool = False, modules: Any = None, **settings: Any) -> str:
    np.random.seed(dist.get_rank())  # as processes that start by themselves
    torch.manual_seed(dist.get_rank())
    data = make()
    settings = {"global_batch_size": 4, "max_steps": 1, **settings}
    trainer = runs.make_trainer("llava", modules or {VISION: {}}, data=alike(), **settings)
    try:
        if evaluates:
            trainer.evaluate(data)
        else:
            trainer.train_dataset = data
            trainer.train()
    except RuntimeError as error:
        return str(error)
    return "trained"


TOGETHER = {VISION: {"tp_size": 2}, LM: {"tp_size": 2, "colocate_with": VISION}}
UNLIKE = r"Sample \d of the training dataset .* rank 0 .*rank 1.*`shuffle` and `random_split`"
# Case -> what `_said` is given, and what it returns
DATASETS: dict[str, tuple[tuple[Callable[[], Any], dict[str, Any]], str]] = {
    **{name: ((make, {}), UNLIKE) for name, make in DIFFERENT.items()},
    **{name: ((make, {}), "trained$") for name, make in EQUAL.items()},
    "augmented pixels, shared": ((Augmented, {"modules": TOGETHER}), ".*microbatch 0 of `vision`"),
    "replaced later": (
        (Replacing, {"max_steps": 3, "callbacks": [CountSteps()]}),
        r"Sample \d .*ranks that share it",
    ),
    "evaluation": (
        (DIFFERENT["shuffle"], {"evaluates": True}),
        "Sample 0 of the evaluation dataset .* rank 0 .*rank 1",
    ),
}


def _all_said(names: list[str]) -> dict[str, str]:
    assert len(alike()) == 8
    return {name: _said(make, **words) for name in names for (make, words), _ in [DATASETS[name]]}


def test_ranks_with_different_datasets_say_so():
    chosen = in_turn(DATASETS, "shuffle", "other fingerprints")
    first, second = run_distributed(_all_said, 2, [*chosen], timeout=200)
    assert first == second
    for name, (_, said) in chosen.items():
        assert re.match(said, first[name], re.DOTALL), (name, first[name])
