"""Ranks that share a row share the heads of samples that are on several of them: each sample as if it were alone."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_mmparallel.data.context_tokens import cut_row
from hf_mmparallel.kernels import row_exchange
from hf_mmparallel.kernels.bitfield_attention.builders import causal_words, segments_of_lengths
from hf_mmparallel.kernels.bitfield_attention.context_parallel import shard_sequence
from hf_mmparallel.kernels.recurrent_layers import recurrent_mixers
from hf_mmparallel.kernels.shared_heads import SharedHeads, head_ranges, run_by_heads, share_heads
from hf_mmparallel.kernels.shared_samples import sample_owners
from tests import hybrids
from tests.runtime.loopback import Membership, ThreadCollectives, ThreadGroup, run_threads

WIDTH = 64


def mixer_of(name: str, **changes: Any) -> nn.Module:
    mixer = next(mixer for _, _, mixers in recurrent_mixers(hybrids.build(name, **changes)) for mixer in mixers)
    share_heads(mixer)
    return mixer


MIXERS = {
    "gated delta rule": mixer_of("Qwen3_5ForCausalLM"),
    "delta rule of channels": mixer_of("KimiLinearForCausalLM"),
    "state space of heads": mixer_of("BambaForCausalLM"),
    "state space of groups": mixer_of("BambaForCausalLM", mamba_n_groups=2),
    "state space of channels": mixer_of("JambaForCausalLM"),
    "convolution": mixer_of("Lfm2ForCausalLM"),
    "two dtypes": mixer_of("Qwen3_5ForCausalLM").bfloat16(),  # decays are in float32
}


def alone(mixer: nn.Module, hidden: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, gradients of inputs, and of weights, sample by sample."""
    mixer, hidden = copy.deepcopy(mixer), hidden.clone().requires_grad_()
    output = torch.cat([mixer(sample)[0] for sample in hidden[None].split(lengths, dim=1)])
    output.square().sum().backward()
    assert hidden.grad is not None
    return output.detach(), hidden.grad, gradients(mixer)


def tokens_of(mixer: nn.Module, lengths: list[int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), WIDTH, generator=generator).to(next(mixer.parameters()).dtype)


def gradients(mixer: nn.Module) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in mixer.parameters()])


def over_ranks(
    mixer: nn.Module, hidden: Tensor, lengths: list[int], num_ranks: int, mode: Any, trained: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The same over ranks, of which without training only the last one needs gradients of its inputs."""
    words = causal_words(segments_of_lengths(lengths, sum(lengths) + 3))
    cut = cut_row(words, num_ranks, block=4, mode=mode)
    group = ThreadGroup(tuple(range(num_ranks)))

    def body(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        member: Any = Membership(group, rank)
        shard = shard_sequence(words, cut.order, rank, member, positions=cut.positions, num_ranks=num_ranks)
        own = copy.deepcopy(mixer).requires_grad_(trained)
        places = shard.order[rank]
        states = torch.cat([hidden, hidden.new_zeros(3, WIDTH)])[places.clamp_min(0)][None]
        states.requires_grad_(trained or rank == num_ranks - 1)
        output = run_by_heads(own, SharedHeads(shard.samples, not trained), states)[0]
        is_own = (places >= 0) & (places < len(hidden))
        output[is_own].square().sum().backward()
        of_states = torch.zeros_like(states) if states.grad is None else states.grad
        return places[is_own], output[is_own].detach(), of_states[0, is_own], gradients(own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_exchange, "_all_to_all", ThreadCollectives.send_rows)
        results = run_threads(body, num_ranks, lambda rank: group.barrier.abort())
    places, *values = (torch.cat(of) for of in zip(*(result[:3] for result in results), strict=True))
    output, of_states = (value[places.argsort()] for value in values)
    return output, of_states, torch.stack([result[3] for result in results]).sum(0)


@pytest.mark.parametrize("name", MIXERS)
@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.integers(1, 5),
    st.sampled_from(["row", "segments"]),
    st.integers(0, 99),
)
def test_each_sample_is_as_if_it_were_alone(name: str, lengths: list[int], num_ranks: int, mode: str, seed: int):
    mixer, hidden = MIXERS[name], tokens_of(MIXERS[name], lengths, seed)
    for got, wanted in zip(
        over_ranks(mixer, hidden, lengths, num_ranks, mode), alone(mixer, hidden, lengths), strict=True
    ):
        assert (got - wanted).norm() <= (1e-5 if hidden.dtype == torch.float32 else 1e-2) * wanted.norm()


@pytest.mark.parametrize("name", MIXERS)
def test_a_poisoned_neighbour_changes_no_other_sample_and_frozen_ranks_take_part(name: str):
    lengths = [26, 5, 9, 21]
    hidden = tokens_of(MIXERS[name], lengths)
    expected = alone(MIXERS[name], hidden, lengths)
    hidden[26:31] = torch.nan
    output, of_states, _ = over_ranks(MIXERS[name], hidden, lengths, 3, "row")
    for got, wanted in zip((output, of_states), expected, strict=False):
        assert got[26:31].isnan().all()
        for part in (slice(0, 26), slice(31, None)):
            tolerance = 1e-5 if hidden.dtype == torch.float32 else 1e-2
            assert (got[part] - wanted[part]).norm() <= tolerance * wanted[part].norm()
    hidden[26:31] = 0.0
    partly = over_ranks(MIXERS[name], hidden, lengths, 3, "row", trained=False)
    assert not partly[2].any() and partly[1].any()


def test_heads_follow_tokens_in_whole_groups_where_there_are_enough():
    def sizes(*arguments: Any) -> list[int]:
        ranges = head_ranges(*arguments)
        assert [of.start for of in ranges] == [0, *(of.stop for of in ranges[:-1])]
        return [of.stop - of.start for of in ranges]

    assert sizes(32, 16, [100, 100]) == [16, 16]
    assert sizes(32, 16, [100, 50, 50, 0]) == [16, 8, 8, 0]
    assert sizes(32, 16, [10, 11, 12]) == [10, 10, 12]  # two heads a group
    assert sizes(32, 1, [10, 11, 12]) == [10, 10, 12]
    assert sizes(8, 2, [10, 10, 10]) == [3, 2, 3]
    assert sizes(2, 2, [10, 10, 10]) == [1, 0, 1]
    assert sizes(8, 8, [0, 0, 0]) == [0, 0, 0]


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
