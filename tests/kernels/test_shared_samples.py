"""Samples of a row that ranks share are whole on one of them, as even as they can be."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.data.context_tokens import cut_row
from hf_mmparallel.kernels.bitfield_attention.builders import causal_words, segments_of_lengths
from hf_mmparallel.kernels.bitfield_attention.context_parallel import shard_sequence
from hf_mmparallel.kernels.shared_samples import sample_owners

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@given(st.lists(st.lists(st.integers(0, 40), min_size=9, max_size=9), min_size=1, max_size=4), st.integers(1, 9))
def test_no_rank_gets_more_tokens_than_by_the_longest_first(counts: list[list[int]], num_samples: int):
    tokens = np.array(counts)[:, :num_samples]
    loads = np.zeros(len(tokens), int)
    for length in sorted(tokens.sum(0).tolist(), reverse=True):
        loads[loads.argmin()] += length
    owner = sample_owners(tokens)
    assert np.bincount(owner, tokens.sum(0), len(tokens)).max() <= loads.max()


def test_whole_samples_stay_where_they_are():
    tokens = np.array([[0, 7, 0, 2], [6, 0, 0, 0], [0, 0, 9, 0]])
    assert sample_owners(tokens).tolist() == [1, 0, 2, 0]


@given(LENGTHS, st.integers(0, 7), st.integers(1, 4), st.sampled_from(["row", "segments"]))
def test_ranks_get_the_tokens_of_their_samples_in_order(lengths: list[int], padding: int, num_ranks: int, mode: str):
    words = causal_words(segments_of_lengths(lengths, sum(lengths) + padding))
    cut = cut_row(words, num_ranks, block=4, mode=mode)  # type: ignore[arg-type]
    shards = [
        shard_sequence(words, cut.order, rank, None, positions=cut.positions, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    found = [shard.samples.exchange for shard in shards]
    computed = []
    for rank, own in enumerate(found):
        assert own.received == [other.sent[rank] for other in found]
        arrived = torch.cat(
            [s.order[r][f.token].split(f.sent)[rank] for r, (s, f) in enumerate(zip(shards, found, strict=True))]
        )
        for sample in arrived[own.place].split(own.lengths):
            assert sample.tolist() == list(range(int(sample[0]), int(sample[0]) + len(sample)))
            computed.append((int(sample[0]), len(sample)))
    begins = np.cumsum([0, *lengths[:-1]]).tolist()
    assert sorted(computed) == list(zip(begins, lengths, strict=True))
