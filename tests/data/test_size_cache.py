"""Sizes that were measured when samples were drawn are there for the next run."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets, load_from_disk
from torch.utils.data import ConcatDataset, Subset

from hf_mmparallel import MultimodalTrainingArguments
from hf_mmparallel.data import ChatCollator, sample_sizes, size_sources
from hf_mmparallel.data.global_batches import GlobalBatchSampler
from hf_mmparallel.data.image_sizes import UnknownSizeError
from hf_mmparallel.data.layer_tokens import measure_layers
from hf_mmparallel.data.measured_batches import MeasuredBatchSampler, MeasuringRanks
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.data.size_sources import LayerTokens, SizeCache
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, SampleSizes
from hf_mmparallel.trainer.training_sizes import representative_batch
from tests.data.conversations import say
from tests.data.processors import llava
from tests.plan.specs import model_spec

SAMPLES = 24
SPEC = ModelSpec(model_spec().modules, placeholders={"image": 100})
UNKNOWN = SampleSizes.uniform({"vision": 7, LANGUAGE_MODEL: 77}, 1)


def doubled(sample: Any) -> dict[str, Any]:
    if sample["length"] == 13:
        raise UnknownSizeError("nothing says it")
    return {LANGUAGE_MODEL: 2 * sample["length"], "vision": [sample["length"], 3]}


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows count as many."""
    monkeypatch.setattr(sample_sizes, "PARALLEL_FROM", 3)


@pytest.fixture
def dataset(tmp_path: Path, many: None) -> Any:
    Dataset.from_list([{"length": 10 + n, "other": n} for n in range(SAMPLES)]).save_to_disk(str(tmp_path / "rows"))
    return load_from_disk(str(tmp_path / "rows"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The samples that are measured."""
    found: list[int] = []
    measure = sample_sizes._StoredReader.__call__
    monkeypatch.setattr(
        sample_sizes._StoredReader, "__call__", lambda self, new: found.extend(new) or measure(self, new)
    )
    return found


def sizes_of(dataset: Any, function: Any = doubled) -> Any:
    return size_source(dataset, None, SPEC, function=function)


def tokens(sizes: SampleSizes) -> dict[str, list[int]]:
    return {name: own.tolist() for name, own in sizes.tokens.items()}


def told(draws: list[Any]) -> list[Any]:
    return [(tokens(draw.sizes), draw.sizes.squares["vision"].tolist()) for draw in draws]


def draws(source: Any, dataset: Any, keeps: bool = True, order: Sequence[int] = range(SAMPLES)) -> list[Any]:
    ranks = MeasuringRanks(0, 1, lambda share: [share], keeps)
    return list(MeasuredBatchSampler(GlobalBatchSampler(order, 8), source, dataset, UNKNOWN, ranks))


def test_a_second_run_measures_nothing_that_the_first_one_has(dataset, tmp_path, reads):
    order = [n for n in range(SAMPLES) if n != 3]  # whose size nothing says
    first = draws(sizes_of(dataset), dataset, order=order)
    reads.clear()
    again = load_from_disk(str(tmp_path / "rows"))
    assert told(draws(sizes_of(again), again, order=order)) == told(first) and not reads
    with pytest.raises(UnknownSizeError):
        sizes_of(again)([3])
    assert reads == [3]


def test_samples_that_stand_for_others_are_not_kept_and_only_one_rank_writes(dataset):
    source = sizes_of(dataset)
    assert len(draws(source, dataset, keeps=False)) == 3 and not source.cache.path.exists()
    drawn = draws(source, dataset)
    assert tokens(drawn[0].sizes)[LANGUAGE_MODEL][3] == 77
    indices, sizes = source.cache.load(list(SPEC.modules))
    assert indices.tolist() == [n for n in range(SAMPLES) if n != 3]
    assert sizes.tokens[LANGUAGE_MODEL].tolist() == [2 * (10 + n) for n in indices.tolist()]


def test_other_measures_datasets_and_layers_have_files_of_their_own(dataset, tmp_path):
    sources = [
        sizes_of(dataset),
        sizes_of(dataset, lambda sample: {LANGUAGE_MODEL: 3, "vision": 1}),
        sizes_of(dataset.select(range(12))),
    ]
    layered = [sources[0].cache.with_layers({"vision": LayerTokens(per_row)}) for per_row in (1.0, 4.0)]
    assert len({cache.path for cache in (*(source.cache for source in sources), *layered)}) == 5
    assert sizes_of(load_from_disk(str(tmp_path / "rows"))).cache.path == sources[0].cache.path


def test_conversations_are_measured_once_for_a_processor_with_its_settings(tmp_path, many, reads):
    rows = [{"messages": [say("user", "which " * n), say("assistant", "seven")]} for n in range(1, 9)]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "rows"))

    def start(**settings: Any) -> Any:
        collator = ChatCollator(llava(), **settings)
        source: Any = size_source(load_from_disk(str(tmp_path / "rows")), collator, SPEC)
        assert measure_layers(None, SPEC, None, None, source) == {}  # pyright: ignore[reportArgumentType]
        return source  # there are no images

    first = start()
    wanted = tokens(first(range(8)))
    assert reads == list(range(8)) and first.keep(np.arange(8), first(range(8)))
    assert tokens(first.with_layers({"vision": LayerTokens(4.0)})(range(8))) == wanted  # and changes no length
    assert tokens(start()(range(8))) == wanted and len(reads) == 8
    start(max_length=400)([0])
    assert len(reads) > 8


def test_parts_of_datasets_keep_the_sizes_of_what_they_are_made_of(dataset, reads):
    whole: Any = ConcatDataset([Subset(dataset, list(range(20, 10, -1))), dataset])
    order = [n for n in range(len(whole)) if n != 13]
    first = draws(sizes_of(whole), whole, order=order)
    reads.clear()
    assert tokens(sizes_of(dataset)([20, 11, 0])) == {LANGUAGE_MODEL: [60, 42, 20], "vision": [33, 24, 13]}
    assert told(draws(sizes_of(whole), whole, order=order)) == told(first) and not reads


@pytest.mark.parametrize("form", [lambda data: data, lambda data: Subset(data, range(SAMPLES))])
def test_what_is_measured_at_the_start_is_not_measured_by_the_next_run(dataset, tmp_path, reads, form):
    args = MultimodalTrainingArguments(output_dir="unused", use_cpu=True, report_to=[], disable_tqdm=True)
    source = sizes_of(form(dataset))
    drawn = representative_batch(form(dataset), source, 8, args).samples
    assert len(drawn) == 7  # of one of the eight nothing says the size
    reads.clear()
    again = sizes_of(form(load_from_disk(str(tmp_path / "rows"))))
    assert tokens(again(drawn)) == tokens(source(drawn)) and not reads
    again([next(n for n in range(SAMPLES) if n not in {3, *drawn})])
    assert len(reads) == 1


def test_there_is_no_cache_in_memory_or_where_nothing_can_be_written(dataset, monkeypatch):
    in_memory = sizes_of(Dataset.from_list([{"length": n} for n in range(8)]))
    assert in_memory.cache is None and in_memory.keep(np.arange(8), in_memory(range(8)))
    monkeypatch.setattr(size_sources.os, "access", lambda path, mode: False)
    assert sizes_of(dataset).cache is sizes_of(concatenate_datasets([dataset, dataset])).cache is None


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"text"])
def test_a_broken_file_is_measured_again_and_replaced(dataset, content):
    source = sizes_of(dataset)
    source.cache.path.write_bytes(content)
    assert source.cache.load(list(SPEC.modules)) is None
    draws(sizes_of(dataset), dataset)
    assert source.cache.load(list(SPEC.modules)) is not None


def test_a_file_of_more_samples_is_not_believed(dataset):
    source = sizes_of(dataset)
    assert SizeCache(source.cache.folder, source.cache.key, 100).add(np.array([50]), UNKNOWN)
    assert source.cache.load(list(SPEC.modules)) is None
    assert tokens(source([1])) == {LANGUAGE_MODEL: [22], "vision": [14]}


def test_a_full_disk_ends_no_run(dataset, monkeypatch):
    def refuse(*args: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(size_sources.os, "replace", refuse)
    source = sizes_of(dataset)
    assert len(draws(source, dataset)) == 3
    assert [path.name for path in source.cache.folder.glob("sizes-*.tmp")] == []


def write(folder: str, first: int, count: int) -> None:
    cache = SizeCache(folder, "key", 1000)
    for index in range(first, first + count):
        assert cache.add(np.array([index]), SampleSizes.uniform({LANGUAGE_MODEL: index}, 1))


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write, args=(str(tmp_path), 100 * n, 25)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    found = SizeCache(tmp_path, "key", 1000).load([LANGUAGE_MODEL])
    assert found is not None and found[0].tolist() == [100 * n + own for n in range(4) for own in range(25)]
    assert found[1].tokens[LANGUAGE_MODEL].tolist() == found[0].tolist()


def test_a_folder_keeps_the_files_that_were_written_last(tmp_path, monkeypatch):
    monkeypatch.setattr(size_sources, "_MAX_FILES", 3)
    now = time.time()
    for number in range(5):
        cache = SizeCache(tmp_path, f"key{number}", 10)
        assert cache.add(np.array([0]), UNKNOWN)
        os.utime(cache.path, (now + number - 100, now + number - 100))
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == [f"sizes-key{n}.npz" for n in (2, 3, 4)]
