"""Global batches: those of accelerate on each rank, and every sample once an epoch over any interruptions."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_mmparallel.data.bad_samples import BadSample, BadSampleError
from hf_mmparallel.data.global_batches import (
    DataPosition,
    EvenOrder,
    GlobalBatch,
    GlobalBatchSampler,
    LengthGroups,
    RankBatchSampler,
)
from hf_mmparallel.data.streams import StreamSampler, StreamWindow

SEED = 3


def shuffled(size: int, batch_size: int) -> SeedableRandomSampler:
    return SeedableRandomSampler(range(size), data_seed=SEED)


def grouped(size: int, batch_size: int) -> LengthGroups:
    lengths = [i % 7 for i in range(size)]
    return LengthGroups(LengthGroupedSampler(batch_size, lengths=lengths), batch_size, lambda draw: draw())


def run(make, size, batch_size, position, num_steps):
    """Draws of one part of a run, as the Trainer's loop takes them, and where it ends."""
    draws = GlobalBatchSampler(make(size, batch_size), batch_size)
    epoch, done = position.resume(draws, size) if position.global_step else (0, 0)
    taken: list[GlobalBatch] = []
    while len(taken) < num_steps:
        draws.set_epoch(epoch)
        rest = list(SkipBatchSampler(draws, skip_batches=done))
        assert len(rest) == len(draws) - done
        taken += rest
        epoch, done = epoch + 1, 0
    for draw in taken[:num_steps]:
        position = position.after(draw, batch_size)
    state, count = draws.generator_state(position.epoch), position.global_step + num_steps
    return taken[:num_steps], replace(position, global_step=count, generator_state=state)


parts = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 8)), min_size=1, max_size=5)


@pytest.mark.parametrize("make", [shuffled, grouped])
@given(size=st.integers(1, 40), runs=parts)
@example(size=22, runs=[(8, 1), (5, 1), (9, 2), (2, 8), (8, 2)])
def test_every_sample_is_drawn_once_an_epoch_over_any_interruptions(make, size, runs):
    position, taken = DataPosition(), []
    for batch_size, num_steps in runs:
        draws, position = run(make, size, batch_size, position, num_steps)
        taken += draws
    for epoch, group in itertools.groupby(taken, key=lambda draw: draw.epoch):
        drawn = [index for draw in group for index in draw.samples]
        assert len(set(drawn)) == len(drawn)
        if epoch < taken[-1].epoch:
            assert sorted(drawn) == list(range(size))
    assert position.global_step == len(taken) == sum(steps for _, steps in runs)


@given(size=st.integers(2, 40), batch_size=st.integers(1, 9), steps=st.integers(1, 12))
def test_a_run_that_goes_on_with_the_same_batches_takes_the_steps_of_a_straight_one(size, batch_size, steps):
    straight, _ = run(shuffled, size, batch_size, DataPosition(), steps + 5)
    first, position = run(shuffled, size, batch_size, DataPosition(), steps)
    rest, _ = run(shuffled, size, batch_size, position, 5)
    assert first + rest == straight


def test_a_last_draw_that_is_dropped_stays_dropped():
    draws = GlobalBatchSampler(range(22), 3, drop_last=True)
    assert DataPosition(0, 8, 1, 1, 8).resume(draws, 22) == (0, 3)
    rest = list(SkipBatchSampler(draws, skip_batches=3))
    assert [draw.samples for draw in rest] == [(8, 9, 10), (11, 12, 13), (14, 15, 16), (17, 18, 19)]
    assert DataPosition(0, 20, 7, 7, 3).resume(draws, 22) == (1, 0)


def test_a_stream_goes_on_in_its_epoch_from_a_file_although_its_end_is_not_known(tmp_path):
    draws = GlobalBatchSampler(StreamSampler(StreamWindow(itertools.count())), 4)
    position = DataPosition(2, 16, 2, 9, 8, 3)
    position.save(tmp_path)
    assert DataPosition.load(tmp_path / "none") is None and DataPosition.load(tmp_path) == position
    assert position.resume(draws, None) == (2, 2)
    draws.set_epoch(2)
    first = next(iter(SkipBatchSampler(draws, skip_batches=2)))
    assert first == GlobalBatch((16, 17, 18, 19), 2, 20)
    draws.set_epoch(3)
    assert next(iter(draws)) == GlobalBatch((0, 1, 2, 3), 3, 4)


def test_groups_of_like_lengths_are_the_stock_trainers_and_go_on_with_the_size_that_their_epoch_began_with(tmp_path):
    def stock_orders(batch_size: int) -> list[list[int]]:
        torch.manual_seed(SEED)
        sampler = LengthGroupedSampler(batch_size, lengths=[i % 7 for i in range(300)])
        return [list(sampler), list(sampler)]

    first, second = stock_orders(5)
    torch.manual_seed(SEED)
    draws = GlobalBatchSampler(grouped(300, 5), 5)
    for epoch, order in ((0, first), (1, second), (0, first)):  # one that is read again is the same
        draws.set_epoch(epoch)
        assert [index for draw in draws for index in draw.samples] == order
    assert first != second and stock_orders(2)[0] != first
    DataPosition(1, 10, 2, 62, 5, generator_state=draws.generator_state(1)).save(tmp_path)
    position = DataPosition.load(tmp_path)
    assert position is not None
    draws = GlobalBatchSampler(grouped(300, 2), 2)
    position.resume(draws, 300)
    draws.set_epoch(1)
    assert [index for draw in draws for index in draw.samples] == second[10:]


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_the_samplers_order_gives_the_batches_of_accelerate(num_samples, num_ranks, size, count, drop_last):
    order = random.Random(num_samples).sample(range(num_samples), num_samples)
    batches = BatchSampler(order, size, drop_last)
    shards = [BatchSamplerShard(batches, num_ranks, rank) for rank in range(num_ranks)] if num_ranks > 1 else [batches]

    def contiguous(global_batch: GlobalBatch) -> list[list[range]]:
        total = len(global_batch.samples)
        parts = [range(start, min(start + size, total)) for start in range(0, total, size)]
        return [parts[rank::num_ranks] for rank in range(num_ranks)]

    even = EvenOrder(order, num_ranks * size, drop_last, fills=num_ranks > 1)
    global_batches = GlobalBatchSampler(even, num_ranks * size * count)
    for rank, shard in enumerate(shards):
        ours = RankBatchSampler(global_batches, contiguous, rank, size, num_ranks)
        assert list(ours) == list(shard) and len(ours) == len(shard) == len(list(shard))


def test_epochs_reach_the_order_if_it_has_any():
    epochs: list[int] = []

    class Sampler(list):
        set_epoch = lambda self, epoch: epochs.append(epoch)  # noqa: E731

    order = EvenOrder(Sampler(range(4)), 2, False)
    batches = RankBatchSampler(GlobalBatchSampler(order, 2), lambda _: [[[0, 1]]], 0, 2, 1)
    batches.batch_sampler.set_epoch(3)
    assert epochs == [3] and list(batches) == [[0, 1], [2, 3]]
    sampler = GlobalBatchSampler(SequentialSampler(range(4)), 2)
    sampler.batch_sampler.set_epoch(4)
    assert list(sampler) == [GlobalBatch((0, 1), 4, 2), GlobalBatch((2, 3), 4, 4)]


def test_a_sample_that_can_not_be_measured_ends_the_run():
    class Batches(GlobalBatchSampler):
        def __iter__(self):
            yield GlobalBatch((3, 7), bad={1: BadSample(7, "a.png", "OSError: gone")})

    with pytest.raises(BadSampleError, match=r"Sample 7 \(a.png\) .*: OSError: gone"):
        list(RankBatchSampler(Batches([3, 7], 2), lambda _: [[[0, 1]]], 0, 2, 1))
