"""Attention of a row that is cut over ranks equals that of the whole row on one."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from hf_mmparallel.kernels.bitfield_attention import context_parallel
from hf_mmparallel.kernels.bitfield_attention.attention import bitfield_attention
from hf_mmparallel.kernels.bitfield_attention.context_parallel import (
    SequenceShard,
    context_parallel_attention,
    shard_sequence,
)
from tests.deep_cases import deep
from tests.runtime.loopback import ThreadGroup

from ...distributed import run_distributed
from .cut_rows import BLOCK, FAMILIES, Inputs, cut, needed_blocks, one_rank, packed_words
from .simulated_ranks import record, run_simulated

GRADS = ("query", "key", "value")
EXACT = {"rtol": 1e-10, "atol": 1e-11}


def _whole(shards: list[SequenceShard], ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The results of the whole row from those of the ranks."""
    order = shards[0].order.flatten()
    whole = {}
    for name in ("out", *GRADS):
        rows = torch.cat([rank[name] for rank in ranks], dim=2)
        whole[name] = rows.new_zeros(*rows.shape[:2], shards[0].num_tokens, rows.shape[3])
        whole[name][:, :, order[order >= 0]] = rows[:, :, order >= 0]
        assert not rows[:, :, order < 0].any(), f"{name} of padding is not 0"
    if "sinks" in ranks[0]:
        whole["sinks"] = torch.stack([rank["sinks"] for rank in ranks]).sum(0)
    return whole


def _simulate(words: torch.Tensor, inputs: Inputs, num_ranks: int, **how: Any) -> Any:
    """Shards and results of all ranks, and what happened on each."""

    def body(rank: int, group: ThreadGroup) -> tuple[SequenceShard, dict[str, torch.Tensor]]:
        shard = shard_sequence(words, rank=rank, group=group, num_ranks=num_ranks, **how)
        return shard, inputs.of_rank(shard).run(context_parallel_attention, shard)

    values, events = run_simulated(body, num_ranks)
    shards, results = zip(*values, strict=True)
    return list(shards), list(results), events


@st.composite
def cuts(draw: st.DrawFn) -> tuple[torch.Tensor, int, dict[str, Any]]:
    """A packed row, ranks, and any order of its blocks: all gathered, or at least those that must be."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    words = packed_words(lengths, draw(st.sampled_from(FAMILIES)), draw(st.integers(0, 9)))
    num_ranks = draw(st.integers(1, 4))
    num_blocks = -(-words.shape[1] // (BLOCK * num_ranks)) * num_ranks
    blocks = np.array(draw(st.permutations(range(num_blocks))))
    order = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    how: dict[str, Any] = {"order": np.where(order < words.shape[1], order, -1), "block": BLOCK}
    if draw(st.booleans()):
        how["gathered"] = needed_blocks(words, how["order"], num_ranks)
    if draw(st.booleans()):
        how["positions"] = order
    return words, num_ranks, how


OPTIONS = {
    "window": st.integers(1, 50),
    "softcap": st.floats(1.0, 9.0),
    "scale": st.floats(0.1, 1.0),
    "sinks": st.just(True),
}


@settings(max_examples=40)
@given(
    cut=cuts(),
    heads=st.sampled_from([(2, 1), (6, 3), (4, 4), (5, 5)]),
    heads_per_gather=st.integers(1, 5),
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    seed=st.integers(0, 2**31),
)
def test_any_cut_equals_the_whole_row(cut, heads, heads_per_gather, options, seed):
    words, num_ranks, how = cut
    inputs = Inputs.draw(seed, words.shape[1], heads, **options)
    expected = one_rank(inputs, words)
    shards, results, _ = _simulate(words, inputs, num_ranks, heads_per_gather=heads_per_gather, **how)
    found = _whole(shards, results)
    assert found.keys() == expected.keys()
    held = words[0] != 0
    for name, tensor in found.items():
        rows = slice(None) if name == "sinks" else (slice(None), slice(None), held)
        torch.testing.assert_close(tensor[rows], expected[name][rows], **EXACT, msg=lambda m, n=name: f"{n}: {m}")
    # The output is linear in the values, so its backward is the adjoint.
    rows = [inputs.of_rank(shard) for shard in shards]
    forward = sum((result["out"] * of.grad_out).sum() for result, of in zip(results, rows, strict=True))
    backward = sum((result["value"] * of.value).sum() for result, of in zip(results, rows, strict=True))
    torch.testing.assert_close(forward, backward, **EXACT)


@pytest.mark.parametrize("num_heads", [1, 5])
def test_gathers_overlap_kernels_and_never_write_what_one_reads(monkeypatch, num_heads):
    for name in ("forward", "backward"):
        kernel = getattr(context_parallel, f"attention_{name}")
        noted = lambda *args, name=name, kernel=kernel: (record(name), kernel(*args))[1]  # noqa: E731
        monkeypatch.setattr(context_parallel, f"attention_{name}", noted)
    words = packed_words([30, 34])
    inputs = Inputs.draw(0, 64, (num_heads, num_heads))
    _, _, events = _simulate(words, inputs, 2, heads_per_gather=1, **cut(words, 2))
    assert events[0] == events[1]
    calls = [event.split() for event in events[0]]
    half = next(i for i, call in enumerate(calls) if call == ["wait", "gather", str(num_heads - 1)]) + 2
    for kernel, part in (("forward", calls[:half]), ("backward", calls[half:])):
        starts, waits, sends, arrivals = (
            [i for i, call in enumerate(part) if call[:2] == [verb, noun]]
            for noun in ("gather", "exchange")
            for verb in ("start", "wait")
        )
        kernels = [i for i, call in enumerate(part) if call == [kernel]]
        assert len(starts) == len(waits) == len(kernels) == num_heads
        assert len(sends) == (num_heads if kernel == "backward" else 0)
        for i in range(num_heads):
            assert starts[i] < waits[i] < kernels[i]
            if i + 1 < num_heads:
                assert starts[i + 1] < kernels[i], "the next group does not travel while this one is computed"
            if i + 2 < num_heads:
                assert starts[i + 2] > kernels[i], "a gather overwrites what a kernel may still read"
            if kernel == "backward":
                assert kernels[i] < sends[i] < arrivals[i]
                if i + 1 < num_heads:
                    assert kernels[i + 1] < arrivals[i], "gradients are awaited before there is something to do"


def test_only_blocks_of_spanning_segments_travel():
    order = np.arange(64)
    shards, events = {}, {}
    for name, lengths in {"the second is cut": [24, 16, 24], "none is cut": [32, 20, 12]}.items():
        words = packed_words(lengths)
        how = {"order": order, "gathered": needed_blocks(words, order, 2), "block": BLOCK}
        shards[name], _, events[name] = _simulate(words, Inputs.draw(1, 64, (2, 2)), 2, **how)
    cut_shards = shards["the second is cut"]
    assert [shard.num_sent for shard in cut_shards] == [8, 8]
    assert cut_shards[0].mask.key_words.shape == (1, 32 + 2 * 8)
    assert (cut_shards[0].mask.key_words[0, 32:40] == 0).all(), "a key of this rank counts twice"
    assert events["none is cut"] == [[], []], "nothing spans the ranks and something travels"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_is_that_of_one_rank_and_the_same_each_time(dtype):
    words = packed_words([100, 17, 39], "images", padding=3)
    narrow = Inputs.draw(3, words.shape[1], (4, 2)).to(dtype)
    exact = one_rank(narrow.to(torch.float64), words)
    single = narrow.run(lambda q, k, v, sinks, **options: bitfield_attention(q, k, v, words, **options))
    (shards, first, _), (_, second, _) = (_simulate(words, narrow, 4, **cut(words, 4)) for _ in range(2))
    for name, tensor in _whole(shards, first).items():
        norm = exact[name].norm()
        error, allowed = ((t.double() - exact[name]).norm() / norm for t in (tensor, single[name]))
        assert tensor.dtype == dtype
        assert error <= 1.5 * allowed, name
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_rank_without_gradients_takes_part_in_the_backward_pass():
    words = packed_words([20, 12])
    inputs = Inputs.draw(8, 32, (2, 1))
    how = cut(words, 2)

    def body(rank, group):
        shard = shard_sequence(words, rank=rank, group=group, num_ranks=2, **how)
        own = inputs.of_rank(shard)
        if rank == 0:
            return own.run(context_parallel_attention, shard)["key"]
        shard = dataclasses.replace(shard, has_backward=True)
        context_parallel_attention(own.query, own.key, own.value, shard).backward(own.grad_out)

    (found, _), _ = run_simulated(body, 2)
    shard = shard_sequence(words, rank=0, group=None, num_ranks=2, **how)
    torch.testing.assert_close(found, shard.take(one_rank(inputs, words)["key"], 2), **EXACT)


def test_one_rank_needs_no_group_returns_lse_and_is_left_out_of_compiled_code():
    words = packed_words([20, 12])
    shard = shard_sequence(words, np.arange(32), 0, None, num_ranks=1)
    inputs = Inputs.draw(5, 32, (2, 1), softcap=3.0)
    expected, found = one_rank(inputs, words), inputs.run(context_parallel_attention, shard)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **EXACT)
    with torch.no_grad():
        states = (inputs.query, inputs.key, inputs.value)
        again, lse = context_parallel_attention(*states, shard, softcap=3.0, return_lse=True)
    assert torch.equal(again, found["out"]) and lse.shape == (1, 2, 32)

    def layer(query, key, value, *, sinks, **options):
        return context_parallel_attention(2 * query, key, value, shard, **options) + 1

    for name, compiled in inputs.run(torch.compile(layer, backend="eager")).items():
        assert torch.equal(compiled, inputs.run(layer)[name]), name


@settings(max_examples=30)
@given(cut=cuts(), dim=st.integers(-3, 2), seed=st.integers(0, 2**31))
def test_taking_and_gathering_tokens_are_inverse_and_adjoint(cut, dim, seed):
    words, num_ranks, how = cut
    shape = [3, 4, 5]
    shape[dim] = words.shape[1]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    def body(rank, group):
        shard = shard_sequence(words, rank=rank, group=group, num_ranks=num_ranks, **how)
        own = shard.take(x, dim, padding=float("inf"))
        padding = shard.take(torch.ones_like(x), dim) == 0
        assert bool(own[padding].isinf().all()) and bool(own[~padding].isfinite().all())
        y = torch.randn(own.shape, generator=torch.Generator().manual_seed(seed + rank)).masked_fill(padding, 0)
        return own, shard.gather_tokens(own, dim), y, shard.gather_tokens(y, dim)

    values, _ = run_simulated(body, num_ranks)
    for _, whole, _, gathered in values:
        assert torch.equal(whole, x)
        assert torch.equal(gathered, values[0][3])
    inner = sum((own.masked_fill(own.isinf(), 0).double() * y.double()).sum() for own, _, y, _ in values)
    torch.testing.assert_close(inner, (x.double() * values[0][3].double()).sum())


def test_rows_of_padding_get_the_words_and_labels_of_padding():
    order = np.array([8, 9, 10, 11, 12, -1, -1, -1, 0, 1, 2, 3, 4, 5, 6, 7])
    shard = shard_sequence(packed_words([5, 8]), order, 0, None, num_ranks=2)
    assert shard.take(torch.arange(13)[None], padding=-100).tolist() == [[8, 9, 10, 11, 12, -100, -100, -100]]
    assert shard.words[0, 5:].tolist() == [0, 0, 0]
    assert shard.positions.tolist() == [list(range(8, 16))]


@pytest.mark.parametrize(
    "change, salient",
    [
        ({"words": packed_words([8, 8]).expand(2, -1)}, r"\(2, 16\)"),
        ({"order": np.arange(15)}, r"\(15,\)"),
        ({"order": np.r_[np.arange(15), 14]}, "token 14 2 times"),
        ({"order": np.r_[np.arange(15), -1]}, "token 15 0 times"),
        ({"order": np.r_[np.arange(15), 16]}, "Use 0 to 15"),
        ({"gathered": [[2], [0]], "block": 4}, "from 0 to 1"),
        ({"gathered": [[0], [0]], "block": 3}, "whole blocks"),
        ({"heads_per_gather": 0}, "heads_per_gather"),
    ],
)
def test_mistakes_are_named(change, salient):
    arguments = {"words": packed_words([8, 8]), "order": np.arange(16), "rank": 0, "group": None, "num_ranks": 2}
    with pytest.raises(ValueError, match=salient):
        shard_sequence(**{**arguments, **change})


def test_tensors_of_the_whole_row_or_that_do_not_go_together_are_refused():
    """Before anything travels: the buffer of keys would silently round or widen values of another dtype."""
    shard = shard_sequence(packed_words([8, 8]), np.arange(16), 0, None, num_ranks=2)
    query, key = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    whole = torch.randn(1, 2, 16, 16)
    for salient, states in (
        ("this rank's tokens only", (whole, whole, whole)),
        ("one dtype", (query, key, key.bfloat16())),
        ("2 heads of keys must divide the 3", (query[:, :3], key, key)),
    ):
        with pytest.raises(ValueError, match=salient):
            context_parallel_attention(*states, shard)
    with pytest.raises(ValueError, match="8 tokens"):
        shard.take(torch.zeros(1, 8))


# What real ranks of a group do: ways to cut the row, its samples, heads, heads gathered together, options.
CASES = [
    ({"method": "lpt", "mode": "row"}, "kinds", (4, 2), 1, {"window": 23}),
    ({"method": "zigzag", "mode": "row"}, "prefix", (2, 1), 8, {"scale": 0.5}),
    ({"method": "lpt", "mode": "segments"}, "images", (6, 3), 2, {"sinks": True, "softcap": 4.0}),
]


def _checkpointed(query, key, value, shard, reentrant, *, sinks, **options):
    """Attention that is computed again in backward, and so gathers again."""

    def attention(query, key, value, sinks):
        return context_parallel_attention(query, key, value, shard, sinks=sinks, **options)

    return checkpoint(attention, query, key, value, sinks, use_reentrant=reentrant)


def _on_real_ranks() -> None:
    rank, num_ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for seed, (how, family, heads, heads_per_gather, options) in enumerate(CASES):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 20, (24,), generator=generator).tolist()
        if how["mode"] == "segments":  # one sample is too long for a rank, the others find room beside it
            lengths.insert(3, sum(lengths))
        words = packed_words(lengths, family, padding=5)
        inputs = Inputs.draw(seed, words.shape[1], heads, **options)
        where = cut(words, num_ranks, **how)
        shard = shard_sequence(words, rank=rank, group=group, heads_per_gather=heads_per_gather, **where)
        assert (0 < shard.num_sent < shard.words.shape[1]) == (how["mode"] == "segments")
        found = inputs.of_rank(shard).run(context_parallel_attention, shard)
        for reentrant in (True, False):
            again = inputs.of_rank(shard).run(_checkpointed, shard, reentrant)
            assert all(torch.equal(again[name], found[name]) for name in GRADS)
        for name, expected in one_rank(inputs, words).items():
            if name == "sinks":
                dist.all_reduce(found[name])
            whole = found[name] if name == "sinks" else shard.gather_tokens(found[name], 2)
            torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10, msg=name)


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [2, deep(4)])
def test_real_ranks_equal_one(num_ranks):
    run_distributed(_on_real_ranks, num_ranks, timeout=90)
