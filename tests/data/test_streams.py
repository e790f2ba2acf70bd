"""Streams through a window: the same samples on every rank and in every worker, decoded only where they are read."""

import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from datasets import IterableDataset as StreamedDataset
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hf_mmparallel.data.bad_samples import BadSampleError
from hf_mmparallel.data.global_batches import GlobalBatch, GlobalBatchSampler
from hf_mmparallel.data.sample_sizes import size_source
from hf_mmparallel.data.step_dataset import as_is
from hf_mmparallel.data.streams import StreamSampler, StreamWindow
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan
from tests.data.planned import SPEC, planned_dataset
from tests.streams import Rows

from .conversations import image_file, without_decoding

PLAN = resolve_plan(SPEC, {"vision": ModulePlugin(), LANGUAGE_MODEL: ModulePlugin(dp_size=2)})


class Numbers(IterableDataset):
    """A stream that gives every worker a part, as its documentation advises."""

    def __init__(self, size=40, fails_at=None):
        self.size = size
        self.fails_at = fails_at
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.size, step):
            if number == self.fails_at:
                raise OSError("connection reset")
            noise = (random.random(), np.random.rand(), torch.rand(()).item())
            yield {"number": number + 1000 * self.epochs[-1], "noise": noise}


def collate(samples):
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def make(window, rank=0, collator=collate, **settings):
    return planned_dataset(PLAN, rank, window, collator, window=window, **settings)


def draw(start, size=8, epoch=0):
    return GlobalBatch(tuple(range(start, start + size)), epoch, start + size)


def loader_of(window, size=9, rank=0, num_workers=0, collator=collate, **settings):
    return DataLoader(
        make(window, rank, collator),
        batch_sampler=GlobalBatchSampler(StreamSampler(window), size),  # type: ignore[arg-type]
        collate_fn=as_is,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
        **settings,
    )


def epoch_of(loader, epoch):
    """The batches of an epoch up to the end of the stream."""
    loader.batch_sampler.set_epoch(epoch)
    batches = itertools.takewhile(lambda batch: batch is not None, loader)
    return [batch and (batch.global_batch, batch.step, batch.batches) for batch in batches]


def loaded(stream, num_workers=0, epoch=0, rank=0, **settings):
    return epoch_of(loader_of(StreamWindow(stream, **settings), rank=rank, num_workers=num_workers), epoch)


def test_a_window_has_the_rows_of_its_draw_and_the_stream_ends_with_a_shorter_one():
    stream = Numbers(20)
    window = StreamWindow(stream)
    assert window.fetch(draw(0)) == draw(0)
    assert sorted(window.rows) == list(range(8)) and window[3]["number"] == 3
    assert window.fetch(draw(12, 4)) == draw(12, 4) and sorted(window.rows) == [12, 13, 14, 15]
    assert window.fetch(draw(16)) == draw(16, 4)
    assert window.fetch(draw(24)).samples == () and window.fetch(draw(32)).samples == ()
    assert stream.epochs == [0]  # it is started once
    again = draw(4).without([1])
    assert window.fetch(again) == again and window[7]["number"] == 7


def test_a_draw_that_the_stream_cannot_fill_can_be_dropped():
    window = StreamWindow(Numbers(20), drop_last=True)
    assert window.fetch(draw(8)) == draw(8) and window.fetch(draw(16)).samples == ()
    rest = draw(8).without([0, 3])
    assert window.fetch(draw(8)) and window.fetch(rest) == rest


def test_the_places_of_a_stream_have_no_end_unless_it_tells_its_length():
    sampler = GlobalBatchSampler(StreamSampler(StreamWindow(Numbers())), 8)
    assert list(itertools.islice(sampler, 3)) == [draw(0), draw(8), draw(16)]
    with pytest.raises(TypeError):
        len(sampler)
    sized = type("Sized", (Numbers,), {"__len__": lambda self: self.size})(20)
    assert len(GlobalBatchSampler(StreamSampler(StreamWindow(sized)), 8)) == 3


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("kind", ["torch", "datasets"])
def test_workers_do_not_split_a_stream_and_read_what_the_main_process_reads(num_workers, kind):
    table = Dataset.from_dict({"number": range(1000, 1040)})
    stream = Numbers() if kind == "torch" else table.to_iterable_dataset(num_shards=4)
    inline = loaded(stream, epoch=1)
    assert [len(d.samples) for d, _, _ in inline] == [9, 9, 9, 9, 4] and inline[-1][0].position == 40
    numbers = [number for _, _, batches in inline for batch in batches.values() for number in batch["number"]]
    assert sorted(numbers) == list(range(1000, 1040))
    assert loaded(stream, num_workers, epoch=1) == inline


def test_workers_that_stay_start_a_stream_anew_each_epoch():
    loader = loader_of(StreamWindow(Numbers()), num_workers=2, persistent_workers=True)
    for epoch in (0, 1, 2):
        found = epoch_of(loader, epoch)
        assert found == loaded(Numbers(), epoch=epoch) and len(found) == 5


def test_every_rank_draws_the_same_from_a_stream_and_leaves_the_generators_alone():
    state = torch.get_rng_state()
    StreamWindow(Numbers()).fetch(draw(0))
    assert torch.equal(torch.get_rng_state(), state)
    first = loaded(Numbers())
    random.seed(7)
    assert loaded(Numbers()) == first != loaded(Numbers(), seed=1)
    draws = [
        {drawn for _, _, batches in loaded(Numbers(), rank=rank) for b in batches.values() for drawn in b["noise"]}
        for rank in range(3)
    ]
    assert len(draws[0]) == 40 and draws[0] == draws[1] | draws[2]


def shuffled():
    def shard(shards):
        for number in shards:
            yield from ({"number": 10 * number + i} for i in range(10))

    return StreamedDataset.from_generator(shard, gen_kwargs={"shards": [0, 1, 2, 3]}).shuffle(seed=5, buffer_size=7)


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("position", [0, 11])
def test_an_epoch_of_a_shuffled_stream_starts_anywhere_in_its_own_order(epoch, position):
    stream = shuffled()
    stream.set_epoch(epoch)
    expected = [row["number"] for row in stream]
    window = StreamWindow(shuffled())
    window.fetch(draw(0, epoch=1))
    window.fetch(draw(position, epoch=epoch))
    assert [window[p]["number"] for p in range(position, position + 8)] == expected[position : position + 8]
    if epoch:
        stream.set_epoch(0)
        assert [row["number"] for row in stream] != expected


def test_the_generator_of_a_torch_stream_is_seeded_by_epoch():
    class Shuffled(IterableDataset):
        generator = torch.Generator()

        def __iter__(self):
            return iter(torch.randperm(8, generator=self.generator).tolist())

    window, orders = StreamWindow(Shuffled()), []
    for epoch in (0, 1, 0):
        window.fetch(draw(0, epoch=epoch))
        orders.append([window[p] for p in range(8)])
    assert orders[0] == orders[2] != orders[1]


def test_a_stream_that_raises_ends_the_run_with_the_place():
    window = StreamWindow(Numbers(fails_at=12))
    window.fetch(draw(0))
    with pytest.raises(BadSampleError, match=r"Sample 12 .*OSError: connection reset"):
        window.fetch(draw(8))


def with_images():
    images = [{**without_decoding(image_file((4, 6))), "path": f"{number}.png"} for number in range(12)]
    images[5] = {"bytes": b"corrupt", "path": "5.png"}
    features = Features({"number": Value("int64"), "image": ImageFeature()})
    return Dataset.from_dict({"number": range(12), "image": images}, features=features).to_iterable_dataset()


def sizes_of_images(samples):
    return {"size": [sample["image"].size for sample in samples]}


def test_rows_of_a_window_are_decoded_where_they_are_read():
    window = StreamWindow(with_images())
    window.fetch(draw(0, 12))
    assert window.stored(5)["image"]["bytes"] == b"corrupt"
    assert window[4]["image"].size == (6, 4) and window.stored(4)["image"]["path"] == "4.png"
    with pytest.raises(Exception, match="identify"):
        window[5]
    plain = window.with_features({"number": Value("int64"), "image": ImageFeature(decode=False)})
    assert plain[5] == window.stored(5)
    assert window.with_features({"number": Value("int64")})[5] == {"number": 5}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_sample_of_a_stream_is_left_out_without_reading_the_stream_again(num_workers):
    window = StreamWindow(with_images(), carries_rows=num_workers > 0)
    loader = loader_of(window, 4, num_workers=num_workers, collator=sizes_of_images)
    batches = iter(loader)
    next(batches)
    batch = next(batches)
    assert [(bad.index, bad.file) for bad in batch.bad.values()] == [(5, "5.png")]
    window.stream = None  # what reads again has the rows
    again = loader.dataset.again(batch, list(batch.bad))
    assert not again.bad and again.step.samples == (4, 6, 7) and again.global_batch.position == 8
    assert sum(len(chunk["size"]) for chunk in again.batches.values()) == 3
    assert again.stream.digest == batch.stream.digest


def test_digests_tell_other_rows_apart():
    def digest(stream):
        window = StreamWindow(stream)
        window.fetch(draw(0, 12))
        return window.digest()

    row = {"a": "x" * 5000, "ids": list(range(300)), "t": torch.ones(3), "n": None, "turns": [{"role": "user"}]}
    same = [row] * 12
    other = [*same[:7], {**row, "a": "x" * 4999 + "y"}, *same[8:]]
    changed = [[{**row, **change}] * 12 for change in ({"ids": [1]}, {"turns": [{"role": "system"}]})]
    found = [digest(Rows(rows)) for rows in (same, pickle.loads(pickle.dumps(same)), other, *changed)]
    assert found[0] == found[1] and len(set(found)) == 4
    assert digest(with_images()) == digest(with_images())


def tokens_of(row):
    return {LANGUAGE_MODEL: row["number"] + 1, "vision": [2] * (row["number"] % 3)}


def taken_by_vision(batch):
    return {index for replica in batch.step.microbatches["vision"] for chunk in replica for index in chunk}


def test_samples_of_a_window_have_sizes_by_a_function_a_column_or_their_tokens():
    window = StreamWindow(Dataset.from_dict({"number": range(40)}).to_iterable_dataset())
    batch = make(window, sizes=size_source(window, collate, SPEC, function=tokens_of)).__getitems__(draw(8))
    assert batch.sizes.tokens[LANGUAGE_MODEL].tolist() == list(range(9, 17))
    assert taken_by_vision(batch) == {batch_index for batch_index in range(8) if (batch_index + 8) % 3}
    by_column = size_source(window, collate, SPEC, columns="number")
    assert by_column(range(8, 16)).tokens[LANGUAGE_MODEL].tolist() == list(range(8, 16))
    with pytest.raises(ValueError, match="no column `length`"):
        size_source(window, collate, SPEC, columns="length")([8])
    tokens = StreamWindow(Rows([{"input_ids": [1] * (3 + n), "labels": [1]} for n in range(8)]))
    tokens.fetch(draw(0))
    measured = pickle.loads(pickle.dumps(size_source(tokens, collate, SPEC)))
    measured.window = tokens
    assert measured([0, 5]).tokens[LANGUAGE_MODEL].tolist() == [3, 8]


def test_samples_of_which_nothing_is_known_count_alike():
    window = StreamWindow(Numbers())
    batch = make(window, sizes=size_source(window, collate, SPEC)).__getitems__(draw(0))
    assert not batch.sizes.known and len(batch.step.samples) == 8
    assert taken_by_vision(batch) == set(range(8))
