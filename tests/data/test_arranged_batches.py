"""The arrangement as a batch sampler: each sample once an epoch, evener than in order, alike for all processes."""

from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from hf_mmparallel import ArrangedBatchSampler

SIZES = np.ceil(np.random.default_rng(0).lognormal(5, 1, 96)).tolist()
COUNTS: dict[str, Any] = {"batch_size": 3, "num_replicas": 4, "accumulation_steps": 2}


def batches_of(**settings) -> list[list[list[int]]]:
    """Process -> the batches of an epoch."""
    return [list(ArrangedBatchSampler(SIZES, rank=rank, **{**COUNTS, **settings})) for rank in range(4)]


def waited(ranks: list[list[list[int]]], padded: bool) -> float:
    """The work of an epoch in which the processes wait for the slowest one in each turn."""

    def cost(batch: list[int]) -> float:
        sizes = [SIZES[index] for index in batch]
        return max(sizes) * len(sizes) if padded else sum(sizes)

    return sum(max(cost(batch) for batch in turn) for turn in zip(*ranks, strict=True))


@pytest.mark.parametrize("padded", [False, True])
def test_each_sample_comes_once_an_epoch_in_evener_batches(padded):
    in_order = batches_of(arrangement="contiguous")
    ranks = batches_of(padded=padded)
    assert sorted(index for rank in ranks for batch in rank for index in batch) == list(range(96))
    assert {len(rank) for rank in ranks} == {8} == {len(ArrangedBatchSampler(SIZES, rank=1, **COUNTS))}
    assert waited(ranks, padded) < 0.8 * waited(in_order, padded)
    # the steps have the same samples
    for step in (slice(0, 2), slice(6, 8)):
        first, other = ({i for rank in run for batch in rank[step] for i in batch} for run in (ranks, in_order))
        assert first == other and len(first) == 24


def test_epochs_have_orders_of_their_own_that_a_seed_repeats():
    sampler = ArrangedBatchSampler(SIZES, rank=2, **COUNTS)
    epochs = [list(sampler), list(sampler)]
    assert epochs[0] != epochs[1] and sampler.epoch == 2
    sampler.set_epoch(1)
    next(iter(sampler))  # an epoch that is left early starts again
    assert list(sampler) == epochs[1]
    assert list(ArrangedBatchSampler(SIZES, rank=2, seed=1, **COUNTS)) != epochs[0]
    ordered = [ArrangedBatchSampler(SIZES, 3, shuffle=False, arrangement="contiguous") for _ in range(2)]
    assert [list(one) for one in ordered] == [[list(range(i, i + 3)) for i in range(0, 96, 3)]] * 2


@pytest.mark.parametrize(("drop_last", "count"), [(False, 108), (True, 96)])
def test_all_processes_have_as_many_batches_of_an_epoch_that_does_not_divide(drop_last, count):
    sizes = SIZES + [50.0] * 5
    samplers = [ArrangedBatchSampler(sizes, rank=rank, drop_last=drop_last, **COUNTS) for rank in range(4)]
    ranks = [list(sampler) for sampler in samplers]
    assert {len(rank) for rank in ranks} == {len(samplers[0])} == {count // 12}
    drawn = [index for rank in ranks for batch in rank for index in batch]
    assert len(drawn) == count and (drop_last or set(drawn) == set(range(101)))
    assert [list(sampler) for sampler in samplers] != ranks  # also after an epoch whose end is left out


def test_accelerate_gives_each_process_its_own_batches():
    ranks = batches_of()
    for rank in range(4):
        sampler = ArrangedBatchSampler(SIZES, **COUNTS)
        assert len(sampler) == 32
        loader = DataLoader(range(96), batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
        prepared = prepare_data_loader(loader, num_processes=4, process_index=rank, put_on_device=False)
        assert len(prepared) == 8 and list(prepared) == ranks[rank]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 4}, "rank=4"),
        ({"sizes": [1.0, 0.0]}, "sizes"),
        ({"sizes": [1.0, float("nan")]}, "sizes"),
        ({"arrangement": "tapered"}, "tapered"),
    ],
)
def test_what_can_not_be_arranged_is_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        ArrangedBatchSampler(**{"sizes": SIZES, "rank": 0, **COUNTS, **settings})
