"""The batches of a rank are those of accelerate's `BatchSamplerShard`, in global batches."""

from __future__ import annotations

import random

import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from hf_mmparallel.data.bad_samples import BadSample, BadSampleError
from hf_mmparallel.data.global_batches import EvenOrder, GlobalBatch, GlobalBatchSampler, RankBatchSampler


@given(
    num_samples=st.integers(1, 60),
    num_ranks=st.integers(1, 5),
    size=st.integers(1, 4),
    count=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_the_samplers_order_gives_the_batches_of_accelerate(
    num_samples: int, num_ranks: int, size: int, count: int, drop_last: bool
):
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
        assert list(ours) == list(shard)
        assert len(ours) == len(shard) == len(list(shard))


def test_epochs_reach_the_sampler():
    epochs: list[int] = []

    class Sampler(list):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    batches = RankBatchSampler(
        GlobalBatchSampler(EvenOrder(Sampler(range(4)), 2, False), 2), lambda _: [[[0, 1]]], 0, 2, 1
    )
    batches.batch_sampler.set_epoch(3)
    assert epochs == [3] and list(batches) == [[0, 1], [2, 3]]


def test_a_sample_that_can_not_be_measured_ends_the_run():
    bad = {1: BadSample(7, "a.png", "OSError: gone")}

    class Batches(GlobalBatchSampler):
        def __iter__(self):
            yield GlobalBatch((3, 7), bad=bad)

    batches = RankBatchSampler(Batches([3, 7], 2), lambda _: [[[0, 1]]], 0, 2, 1)
    with pytest.raises(BadSampleError, match=r"Sample 7 \(a.png\) can't be read: OSError: gone. Remove it from"):
        list(batches)
