"""Attention of a row that is cut over ranks equals that of the whole row on one."""

from __future__ import annotations

import dataclasses
import itertools
import threading
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

from ...distributed import run_distributed
from .cut_rows import BLOCK, FAMILIES, METHODS, Inputs, cut, needed_blocks, one_rank, packed_words
from .simulated_ranks import SimulatedGroup, install, record, run_simulated

GRADS = ("query", "key", "value")
EXACT = {"rtol": 1e-10, "atol": 1e-11}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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


def _simulate(words: torch.Tensor, inputs: Inputs, num_ranks: int, heads_per_gather: int = 2, **how: Any) -> Any:
    """Results of all ranks, their shards, and what happened on each."""

    def body(rank: int, group: SimulatedGroup) -> tuple[SequenceShard, dict[str, torch.Tensor]]:
        shard = shard_sequence(
            words, rank=rank, group=group, num_ranks=num_ranks, heads_per_gather=heads_per_gather, **how
        )
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


@settings(max_examples=40)
@given(
    cut=cuts(),
    heads=st.sampled_from([(2, 1), (6, 3), (4, 4), (5, 5)]),
    heads_per_gather=st.integers(1, 5),
    options=st.fixed_dictionaries(
        {},
        optional={
            "window": st.integers(1, 50),
            "softcap": st.floats(1.0, 9.0),
            "scale": st.floats(0.1, 1.0),
            "sinks": st.just(True),
        },
    ),
    seed=st.integers(0, 2**31),
)
def test_any_cut_equals_the_whole_row(cut, heads, heads_per_gather, options, seed):
    words, num_ranks, how = cut
    inputs = Inputs.draw(_generator(seed), words.shape[1], heads, **options)
    expected = one_rank(inputs, words)
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        shards, results, _ = _simulate(words, inputs, num_ranks, heads_per_gather, **how)
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
    install(monkeypatch)
    for name in ("attention_forward", "attention_backward"):
        kernel = getattr(context_parallel, name)
        monkeypatch.setattr(
            context_parallel,
            name,
            lambda *args, kernel=kernel, name=name: (record(name.removeprefix("attention_")), kernel(*args))[1],
        )
    words = packed_words([30, 34])
    inputs = Inputs.draw(_generator(0), 64, (num_heads, num_heads))
    _, _, events = _simulate(words, inputs, 2, 1, **cut(words, 2))
    assert events[0] == events[1]
    calls = [event.split() for event in events[0]]
    half = next(i for i, call in enumerate(calls) if call == ["wait", "gather", str(num_heads - 1)]) + 2
    for kernel, part in (("forward", calls[:half]), ("backward", calls[half:])):
        starts = [i for i, call in enumerate(part) if call[:2] == ["start", "gather"]]
        waits = [i for i, call in enumerate(part) if call[:2] == ["wait", "gather"]]
        kernels = [i for i, call in enumerate(part) if call[0] == kernel]
        sends = [i for i, call in enumerate(part) if call[:2] == ["start", "exchange"]]
        arrivals = [i for i, call in enumerate(part) if call[:2] == ["wait", "exchange"]]
        assert len(starts) == len(waits) == len(kernels) == num_heads
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
        assert len(sends) == (num_heads if kernel == "backward" else 0)


def test_only_blocks_of_spanning_segments_travel(monkeypatch):
    install(monkeypatch)
    words = packed_words([24, 16, 24])  # the second sample is cut in two
    order = np.arange(64)
    shards, _, events = _simulate(
        words,
        Inputs.draw(_generator(1), 64, (2, 2)),
        2,
        order=order,
        gathered=needed_blocks(words, order, 2),
        block=BLOCK,
    )
    assert [shard.num_sent for shard in shards] == [8, 8]
    assert shards[0].mask.key_words.shape == (1, 32 + 2 * 8)
    assert (shards[0].mask.key_words[0, 32:40] == 0).all(), "a key of this rank counts twice"
    words = packed_words([32, 20, 12])
    _, _, events = _simulate(
        words,
        Inputs.draw(_generator(2), 64, (2, 2)),
        2,
        order=order,
        gathered=needed_blocks(words, order, 2),
        block=BLOCK,
    )
    assert events == [[], []], "nothing spans the ranks and something travels"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_is_that_of_one_rank(monkeypatch, dtype):
    install(monkeypatch)
    words = packed_words([100, 17, 39], "images", padding=3)
    wide = Inputs.draw(_generator(3), words.shape[1], (4, 2)).to(dtype).to(torch.float64)
    exact = one_rank(wide, words)
    single = wide.to(dtype).run(lambda q, k, v, sinks, **options: bitfield_attention(q, k, v, words, **options))
    shards, results, _ = _simulate(words, wide.to(dtype), 4, **cut(words, 4))
    for name, tensor in _whole(shards, results).items():
        norm = exact[name].norm()
        error, allowed = ((t.double() - exact[name]).norm() / norm for t in (tensor, single[name]))
        assert tensor.dtype == dtype
        assert error <= 1.5 * allowed, name


@pytest.mark.parametrize(
    "mode, block",
    [
        deep("row", 128),
        deep("row", BLOCK),
        ("segments", BLOCK),
    ],
)
def test_triton_kernels_take_rows_and_keys_as_they_lie(monkeypatch, mode, block):
    install(monkeypatch)
    turn = threading.Lock()  # the interpreter of kernels has one state for all threads
    for name in ("attention_forward", "attention_backward"):
        kernel = getattr(context_parallel, name)

        def on_triton(*args, kernel=kernel):
            with turn:
                return kernel(*args, backend="triton")

        monkeypatch.setattr(context_parallel, name, on_triton)
    words = packed_words([150, 31, 40, 29], "images", padding=3)
    inputs = Inputs.draw(_generator(7), words.shape[1], (6, 3), sinks=True, window=90).to(torch.float32)
    shards, results, _ = _simulate(words, inputs, 2, **cut(words, 2, mode=mode, block=block))
    assert (shards[0].sent is None) == (mode == "row")
    expected = one_rank(inputs.to(torch.float64), words)
    for name, found in _whole(shards, results).items():
        torch.testing.assert_close(found.double(), expected[name], rtol=1e-4, atol=2e-5, msg=name)


def test_runs_are_bitwise_equal(monkeypatch):
    install(monkeypatch)
    words = packed_words([100, 17, 39], "images", padding=3)
    inputs = Inputs.draw(_generator(4), words.shape[1], (4, 2)).to(torch.float32)
    (_, first, _), (_, second, _) = (_simulate(words, inputs, 3, **cut(words, 3)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_rank_without_gradients_takes_part_in_the_backward_pass(monkeypatch):
    install(monkeypatch)
    words = packed_words([20, 12])
    inputs = Inputs.draw(_generator(8), 32, (2, 1))
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


def test_lse_is_returned_and_one_rank_needs_no_group():
    words = packed_words([20, 12])
    shard = shard_sequence(words, np.arange(32), 0, None, num_ranks=1)
    inputs = Inputs.draw(_generator(5), 32, (2, 1))
    expected, found = one_rank(inputs, words), inputs.run(context_parallel_attention, shard)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **EXACT)
    out, lse = context_parallel_attention(inputs.query, inputs.key, inputs.value, shard, return_lse=True)
    assert lse.shape == (1, 2, 32)
    with torch.no_grad():
        again = context_parallel_attention(inputs.query, inputs.key, inputs.value, shard)
    assert torch.equal(again, out)


def test_compiled_code_goes_around_it():
    words = packed_words([20, 12])
    shard = shard_sequence(words, np.arange(32), 0, None, num_ranks=1)
    inputs = Inputs.draw(_generator(6), 32, (2, 1), softcap=3.0)

    def layer(query, key, value, *, sinks, **options):
        return context_parallel_attention(2 * query, key, value, shard, **options) + 1

    compiled = torch.compile(layer, backend="eager")
    for name, found in inputs.run(compiled).items():
        assert torch.equal(found, inputs.run(layer)[name]), name


@settings(max_examples=30)
@given(cut=cuts(), dim=st.integers(-3, 2), seed=st.integers(0, 2**31))
def test_taking_and_gathering_tokens_are_inverse_and_adjoint(cut, dim, seed):
    words, num_ranks, how = cut
    shape = [3, 4, 5]
    shape[dim] = words.shape[1]
    x = torch.randn(shape, generator=_generator(seed))

    def body(rank, group):
        shard = shard_sequence(words, rank=rank, group=group, num_ranks=num_ranks, **how)
        own = shard.take(x, dim, padding=float("inf"))
        padding = shard.take(torch.ones_like(x), dim) == 0
        assert bool(own[padding].isinf().all()) and bool(own[~padding].isfinite().all())
        y = torch.randn(own.shape, generator=_generator(seed + rank)).masked_fill(padding, 0)
        return own, shard.gather_tokens(own, dim), y, shard.gather_tokens(y, dim)

    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        values, _ = run_simulated(body, num_ranks)
    for _, whole, _, gathered in values:
        assert torch.equal(whole, x)
        assert torch.equal(gathered, values[0][3])
    inner = sum((own.masked_fill(own.isinf(), 0).double() * y.double()).sum() for own, _, y, _ in values)
    torch.testing.assert_close(inner, (x.double() * values[0][3].double()).sum())


def test_rows_of_padding_get_the_words_and_labels_of_padding():
    words = packed_words([5, 8])
    order = np.array([8, 9, 10, 11, 12, -1, -1, -1, 0, 1, 2, 3, 4, 5, 6, 7])
    shard = shard_sequence(words, order, 0, None, num_ranks=2)
    assert shard.take(torch.arange(13)[None], padding=-100).tolist() == [[8, 9, 10, 11, 12, -100, -100, -100]]
    assert shard.words[0, 5:].tolist() == [0, 0, 0]
    assert shard.positions.tolist() == [list(range(8, 16))]
    assert shard.mask.key_positions.tolist() == [[*range(8, 16), *range(8)]]
    assert shard.positions.dtype == torch.int32


@pytest.mark.parametrize(
    "change, message",
    [
        ({"words": packed_words([8, 8]).expand(2, -1)}, "Pack the samples into one row"),
        ({"order": np.arange(15)}, "cannot share equally"),
        ({"order": np.r_[np.arange(15), 14]}, "token 14 2 times"),
        ({"order": np.r_[np.arange(15), -1]}, "token 15 0 times"),
        ({"order": np.r_[np.arange(15), 16]}, "Use 0 to 15"),
        ({"gathered": [[2], [0]], "block": 4}, "name those from 0 to 1"),
        ({"gathered": [[0], [0]], "block": 3}, "whole blocks"),
        ({"heads_per_gather": 0}, "it must be at least 1"),
    ],
)
def test_mistakes_are_named(change, message):
    arguments = {"words": packed_words([8, 8]), "order": np.arange(16), "rank": 0, "group": None, "num_ranks": 2}
    shard_sequence(**arguments)
    with pytest.raises(ValueError, match=message):
        shard_sequence(**{**arguments, **change})


def test_tensors_of_the_whole_row_are_refused():
    shard = shard_sequence(packed_words([8, 8]), np.arange(16), 0, None, num_ranks=2)
    whole = torch.randn(1, 2, 16, 4)
    with pytest.raises(ValueError, match="this rank's tokens only"):
        context_parallel_attention(whole, whole, whole, shard)
    with pytest.raises(ValueError, match="a tensor of the whole row"):
        shard.take(torch.zeros(1, 8))


def test_tensors_that_do_not_go_together_are_refused():
    """Before anything travels: the buffer of keys would silently round or widen values of another dtype."""
    shard = shard_sequence(packed_words([8, 8]), np.arange(16), 0, None, num_ranks=2)
    query, key = torch.randn(1, 4, 8, 16), torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match="one dtype and one device"):
        context_parallel_attention(query, key, key.bfloat16(), shard)
    with pytest.raises(ValueError, match="2 heads of keys must divide the 3 of queries"):
        context_parallel_attention(query[:, :3], key, key, shard)


# What real ranks of a group do.

CASES = [
    (method, mode, family, heads, group, options)
    for i, (method, mode) in enumerate([*((m, "row") for m in METHODS), ("lpt", "segments"), ("lpt", "segments")])
    for family, heads, group, options in (
        (FAMILIES[i % 6], (4, 2), 1, {"window": 23}),
        (FAMILIES[(i + 2) % 6], (6, 3), 2, {"sinks": True, "softcap": 4.0}),
        (FAMILIES[(i + 4) % 6], (2, 1), 8, {"scale": 0.5}),
    )
]


def _checkpointed(query, key, value, shard, reentrant, *, sinks, **options):
    """Attention that is computed again in backward, and so gathers again."""

    def attention(query, key, value, sinks):
        return context_parallel_attention(query, key, value, shard, sinks=sinks, **options)

    return checkpoint(attention, query, key, value, sinks, use_reentrant=reentrant)


def _on_real_ranks() -> dict[str, float]:
    """Largest error of each result over all cases; every rank has the same."""
    rank, num_ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    worst = dict.fromkeys(("out", *GRADS, "sinks", "checkpoint"), 0.0)

    def note(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        worst[name] = max(worst[name], float((found - expected).abs().max()))

    for i, (method, mode, family, heads, per_gather, options) in enumerate(CASES):
        lengths = torch.randint(3, 60, (6,), generator=_generator(i)).tolist()
        if mode == "segments":  # one sample is too long for a rank, the others find room beside it
            lengths = torch.randint(3, 20, (24,), generator=_generator(i)).tolist()
            lengths.insert(3, sum(lengths))
        words = packed_words(lengths, family, padding=5)
        inputs = Inputs.draw(_generator(100 + i), words.shape[1], heads, **options)
        expected = one_rank(inputs, words)
        shard = shard_sequence(
            words, rank=rank, group=group, heads_per_gather=per_gather, **cut(words, num_ranks, method, mode, seed=i)
        )
        assert (0 < shard.num_sent < shard.words.shape[1]) == (mode == "segments")
        found = inputs.of_rank(shard).run(context_parallel_attention, shard)
        for name in ("out", *GRADS):
            note(name, shard.gather_tokens(found[name], 2), expected[name])
        if "sinks" in found:
            dist.all_reduce(found["sinks"])
            note("sinks", found["sinks"], expected["sinks"])
        for reentrant in (True, False) if i % 5 == 0 else ():
            again = inputs.of_rank(shard).run(_checkpointed, shard, reentrant)
            for name in GRADS:
                note("checkpoint", again[name], found[name])
    return worst


@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [2, deep(4), deep(8)])
def test_real_ranks_equal_one(num_ranks):
    for worst in run_distributed(_on_real_ranks, num_ranks, timeout=90):
        assert max(worst.values()) < 1e-10, worst
        assert worst["checkpoint"] == 0


def test_cases_cover_every_method_mode_and_family():
    assert {case[:2] for case in CASES} == {*itertools.product(METHODS, ["row"]), ("lpt", "segments")}
    assert {case[2] for case in CASES} == set(FAMILIES)
