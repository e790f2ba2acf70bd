"""Sizes that were measured when samples were drawn are there for the next run."""

from __future__ import annotations

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
from hf_mmparallel.data.measured_batches import MeasuredBatchSampler, MeasuredShare, MeasuringRanks
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.data.size_sources import LayerTokens, LazySizes, SizeCache
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, SampleSizes
from hf_mmparallel.trainer.training_sizes import representative_batch
from tests.data.test_chat_collator import llava, say
from tests.plan.specs import model_spec

SAMPLES = 24
SPEC = ModelSpec(model_spec().modules, placeholders={"image": 100})
UNKNOWN = SampleSizes.uniform({"vision": 7, LANGUAGE_MODEL: 77}, 1)


def doubled(sample: Any) -> dict[str, Any]:
    if sample["length"] == 13:
        raise UnknownSizeError("nothing says it")
    return {LANGUAGE_MODEL: 2 * sample["length"], "vision": [sample["length"], 3]}


def tripled(sample: Any) -> dict[str, Any]:
    return {LANGUAGE_MODEL: 3 * sample["length"], "vision": 1}


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Rows on disk that count as many."""
    monkeypatch.setattr(sample_sizes, "PARALLEL_FROM", 3)
    Dataset.from_list([{"length": 10 + n, "other": n} for n in range(SAMPLES)]).save_to_disk(str(tmp_path / "rows"))
    return load_from_disk(str(tmp_path / "rows"))  # pyright: ignore[reportReturnType]


def sizes_of(dataset: Any, function: Any = doubled, **given: Any) -> Any:
    return size_source(dataset, None, given.pop("spec", SPEC), function=function, **given)


def tokens(sizes: SampleSizes) -> dict[str, list[int]]:
    return {name: own.tolist() for name, own in sizes.tokens.items()}


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Any, indices: Sequence[int]) -> Any:
        raise AssertionError(f"sample {indices[0]} is read again")

    monkeypatch.setattr(sample_sizes._StoredReader, "__call__", read)


def _alone(value: MeasuredShare) -> list[MeasuredShare]:
    return [value]


def draws(source: Any, dataset: Any, keeps: bool = True, order: Sequence[int] = range(SAMPLES)) -> list[Any]:
    ranks = MeasuringRanks(0, 1, _alone, keeps)
    sized = MeasuredBatchSampler(GlobalBatchSampler(order, 8), source, dataset, UNKNOWN, ranks)
    return list(sized)


def test_a_second_run_measures_nothing_that_the_first_one_has(dataset, tmp_path, monkeypatch):
    order = [n for n in range(SAMPLES) if n != 3]  # whose size nothing says
    first = draws(sizes_of(dataset), dataset, order=order)
    forbid(monkeypatch)
    again = load_from_disk(str(tmp_path / "rows"))
    second = draws(sizes_of(again), again, order=order)
    assert [tokens(draw.sizes) for draw in second] == [tokens(draw.sizes) for draw in first]
    assert [draw.sizes.squares["vision"].tolist() for draw in second] == [
        draw.sizes.squares["vision"].tolist() for draw in first
    ]
    with pytest.raises(AssertionError, match="sample 3 is read again"):
        sizes_of(again)([3])


def test_samples_that_stand_for_others_and_bad_ones_are_not_kept(dataset):
    source = sizes_of(dataset)
    drawn = draws(source, dataset)
    assert tokens(drawn[0].sizes)[LANGUAGE_MODEL][3] == 77
    indices, sizes = source.cache.load(list(SPEC.modules))
    assert indices.tolist() == [n for n in range(SAMPLES) if n != 3]
    assert sizes.tokens[LANGUAGE_MODEL].tolist() == [2 * (10 + n) for n in indices.tolist()]


def test_only_the_rank_that_keeps_writes(dataset):
    source = sizes_of(dataset)
    draws(source, dataset, keeps=False)
    assert not source.cache.path.exists()


def test_other_measures_datasets_and_layers_have_files_of_their_own(dataset, tmp_path):
    sources = [sizes_of(dataset), sizes_of(dataset, tripled), sizes_of(dataset.select(range(12)))]
    assert len({source.cache.path for source in sources}) == 3
    assert sizes_of(load_from_disk(str(tmp_path / "rows"))).cache.path == sources[0].cache.path
    cache = sources[0].cache
    layered = [cache.with_layers({"vision": LayerTokens(per_row)}) for per_row in (1.0, 4.0)]
    assert len({own.path for own in (cache, *layered)}) == 3


def test_the_file_of_a_conversation_depends_on_its_processor_and_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_sizes, "PARALLEL_FROM", 3)
    rows = [{"messages": [say("user", "which " * n), say("assistant", "seven")]} for n in range(1, 9)]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "rows"))

    def source(**settings: Any) -> LazySizes:
        found = size_source(load_from_disk(str(tmp_path / "rows")), ChatCollator(llava(), **settings), SPEC)
        assert isinstance(found, LazySizes)
        return found

    own = source()
    wanted = tokens(own(range(8)))
    assert own.keep(np.arange(8), own(range(8)))
    after = source(max_length=400)
    assert own.cache is not None and after.cache is not None
    assert source().cache.path == own.cache.path != after.cache.path  # pyright: ignore[reportOptionalMemberAccess]
    forbid(monkeypatch)
    assert tokens(source()(range(8))) == wanted
    with pytest.raises(AssertionError, match="read again"):
        after([0])


def test_parts_of_datasets_keep_the_sizes_of_what_they_are_made_of(dataset, monkeypatch):
    whole = ConcatDataset([Subset(dataset, list(range(20, 10, -1))), dataset])  # pyright: ignore[reportArgumentType]
    order = [n for n in range(len(whole)) if n != 13]
    first = draws(sizes_of(whole), whole, order=order)
    forbid(monkeypatch)
    assert tokens(sizes_of(dataset)([20, 11, 0])) == {LANGUAGE_MODEL: [60, 42, 20], "vision": [33, 24, 13]}
    second = draws(sizes_of(whole), whole, order=order)
    assert [tokens(draw.sizes) for draw in second] == [tokens(draw.sizes) for draw in first]


@pytest.mark.parametrize("form", [lambda data: data, lambda data: Subset(data, range(SAMPLES))])
def test_what_is_measured_at_the_start_is_not_measured_by_the_next_run(dataset, tmp_path, monkeypatch, form):
    def start(rows: Any) -> tuple[tuple[int, ...], Any]:
        args = MultimodalTrainingArguments(output_dir="unused", use_cpu=True, report_to=[], disable_tqdm=True)
        source = sizes_of(rows)
        return representative_batch(rows, source, 8, args).samples, source

    drawn, source = start(form(dataset))
    assert len(drawn) == 7  # of one of the eight nothing says the size
    forbid(monkeypatch)
    again = sizes_of(form(load_from_disk(str(tmp_path / "rows"))))
    assert tokens(again(drawn)) == tokens(source(drawn))
    with pytest.raises(AssertionError, match="read again"):
        again([next(n for n in range(SAMPLES) if n not in drawn)])


def test_conversations_that_tell_what_layers_see_are_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_sizes, "PARALLEL_FROM", 3)
    rows = [{"messages": [say("user", "which " * n), say("assistant", "seven")]} for n in range(1, 9)]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "rows"))
    read: list[int] = []
    measure = sample_sizes._StoredReader.__call__
    monkeypatch.setattr(
        sample_sizes._StoredReader, "__call__", lambda self, new: read.extend(new) or measure(self, new)
    )

    def start() -> Any:
        source = size_source(load_from_disk(str(tmp_path / "rows")), ChatCollator(llava()), SPEC)
        layers = measure_layers(None, SPEC, None, None, source)  # pyright: ignore[reportArgumentType]
        assert source is not None and layers == {}  # there are no images
        return source

    first = start()
    wanted = tokens(first.with_layers({"vision": LayerTokens(4.0)})(range(8)))
    assert read == list(range(8))  # what the layers see changes no length
    assert tokens(start()(range(8))) == tokens(first(range(8))) == wanted and len(read) == 8


def test_a_dataset_in_memory_has_no_cache(monkeypatch):
    monkeypatch.setattr(sample_sizes, "PARALLEL_FROM", 3)
    source = sizes_of(Dataset.from_list([{"length": n} for n in range(8)]))
    assert source.cache is None and source.keep(np.arange(8), source(range(8)))


def test_a_folder_where_nothing_can_be_written_is_left_alone(dataset, monkeypatch):
    monkeypatch.setattr(size_sources.os, "access", lambda path, mode: False)
    assert sizes_of(dataset).cache is None
    both = concatenate_datasets([dataset, dataset])
    assert sizes_of(both).cache is None


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


def _write(folder: str, first: int, count: int) -> None:
    cache = SizeCache(folder, "key", 1000)
    for index in range(first, first + count):
        assert cache.add(np.array([index]), SampleSizes.uniform({LANGUAGE_MODEL: index}, 1))


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write, args=(str(tmp_path), 100 * n, 25)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    found = SizeCache(tmp_path, "key", 1000).load([LANGUAGE_MODEL])
    assert found is not None
    assert found[0].tolist() == [100 * n + own for n in range(4) for own in range(25)]
    assert found[1].tokens[LANGUAGE_MODEL].tolist() == found[0].tolist()


def test_a_folder_keeps_the_files_that_were_written_last(tmp_path, monkeypatch):
    monkeypatch.setattr(size_sources, "_MAX_FILES", 3)
    now = time.time()
    for number in range(5):
        cache = SizeCache(tmp_path, f"key{number}", 10)
        assert cache.add(np.array([0]), UNKNOWN)
        os.utime(cache.path, (now + number - 100, now + number - 100))
    assert sorted(path.name for path in tmp_path.glob("*.npz")) == [f"sizes-key{n}.npz" for n in (2, 3, 4)]
