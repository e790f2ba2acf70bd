"""The CPU path against the reference in float64: every mask family with every feature, all gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from hf_mmparallel.kernels.bitfield_attention import (
    BitfieldMask,
    cpu,
    dense_mask,
    encode_words,
    reference_attention,
)
from tests.kernels.bitfield_attention.mask_families import FAMILIES, draw_row, permuted, random_words

SCALE = 0.37
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


@dataclass(frozen=True)
class Case:
    """One call: heads, features, and whether rows are permuted and keys that nobody sees left out."""

    heads: int = 4
    kv_heads: int = 2
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    permuted: bool = False
    batch: int = 1


CASES = {
    "plain": Case(),
    "no_groups": Case(heads=3, kv_heads=3),
    "one_kv_head": Case(heads=4, kv_heads=1),
    "window": Case(window=13),
    "softcap": Case(softcap=1.5),
    "sinks": Case(sinks=True),
    "permuted": Case(permuted=True),
    "batch": Case(batch=3),
    "all": Case(window=29, softcap=2.0, sinks=True, permuted=True, batch=2),
}


def _draw(case: Case, mask: BitfieldMask, dtype: torch.dtype = torch.float64, head_dim: int = 8) -> list[Tensor]:
    """Queries, keys, values and sinks; queries lie as models give them, [batch, length, heads, head_dim]."""
    batch, num_queries, num_keys = *mask.query_words.shape, mask.key_words.shape[1]
    query = torch.randn(batch, num_queries, case.heads, head_dim).transpose(1, 2)
    key, value = torch.randn(2, batch, case.kv_heads, num_keys, head_dim)
    inputs = [query, key, value] + ([torch.randn(case.heads)] if case.sinks else [])
    return [tensor.to(dtype) for tensor in inputs]


def _reference(inputs: list[Tensor], grad: Tensor, mask: BitfieldMask, case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Output, log-sum-exp and gradients of the definition in `dtype`."""
    inputs = [tensor.to(dtype).detach().requires_grad_() for tensor in inputs]
    sinks = inputs[3] if case.sinks else None
    out, lse = reference_attention(*inputs[:3], mask, SCALE, case.softcap, case.window, sinks)
    return [out, lse, *torch.autograd.grad(out, inputs, grad.to(dtype))]


def _ours(inputs: list[Tensor], grad: Tensor, mask: BitfieldMask, case: Case) -> list[Tensor]:
    plan = cpu.compile_mask(mask, case.window)
    options = (plan, SCALE, case.softcap, inputs[3] if case.sinks else None)
    out, lse = cpu.forward(*inputs[:3], *options)
    grads = cpu.backward(grad, *inputs[:3], out, lse, *options)
    assert (grads[3] is None) != case.sinks
    return [out, lse, *(tensor for tensor in grads if tensor is not None)]


def _assert_equal(mask: BitfieldMask, case: Case) -> None:
    inputs = _draw(case, mask)
    grad = torch.randn_like(inputs[0])
    found, expected = _ours(inputs, grad, mask, case), _reference(inputs, grad, mask, case, torch.float64)
    for name, one, other in zip(NAMES, found, expected, strict=False):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    unseen = ~dense_mask(mask, case.window).any(-1)
    for tensor in (found[0], found[2]):
        assert (tensor.transpose(1, 2)[unseen] == 0).all()


def _masks(family: str, case: Case, rng: Random, length: int) -> BitfieldMask:
    words = torch.cat([FAMILIES[family](rng, length) for _ in range(case.batch)])
    mask = BitfieldMask.from_words(words)
    if not case.permuted:
        return mask
    unseen = (~dense_mask(mask, case.window).any(1).any(0)).nonzero()[:, 0].tolist()
    return permuted(mask, rng, length // 2, without_keys=unseen)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks so small that rows of a hundred tokens take many calls of each kind."""
    monkeypatch.setattr(cpu, "CHUNK_ROWS", 16)
    monkeypatch.setattr(cpu, "_FEWEST_ROWS", 5)
    monkeypatch.setattr(cpu, "_CALL_PAIRS", 64)
    monkeypatch.setattr(cpu, "_MOST_SCORES", 2000)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_features(family, case):
    _assert_equal(_masks(family, case, Random(f"{family} {case}"), 131), case)


@pytest.mark.parametrize("family", ["packed", "image_spans", "embedded_modality", "windows"])
def test_chunks_of_the_size_that_runs(family):
    for case in (Case(), Case(sinks=True, window=300, permuted=True)):
        _assert_equal(_masks(family, case, Random(family), 777), case)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 2),
    length=st.integers(1, 90),
    window=st.sampled_from([0, 0, 5]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    sinks=st.booleans(),
    cut=st.booleans(),
)
def test_any_words(seed, batch, length, window, softcap, sinks, cut):
    rng = Random(seed)
    case = Case(window=window, softcap=softcap, sinks=sinks, batch=batch)
    mask = BitfieldMask.from_words(random_words(rng, batch, length))
    _assert_equal(permuted(mask, rng, rng.randrange(1, length + 1)) if cut else mask, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["plain", "softcap", "sinks", "all"])
def test_no_dtype_is_worse_than_plain_torch(case, dtype):
    """Judged against float64 on the same inputs: at most 1.5 times the error of torch's attention in that dtype."""
    case = replace(CASES[case], heads=16)
    mask = _masks("image_spans", case, Random(7), 300)
    inputs = _draw(case, mask, dtype, head_dim=64)
    grad = torch.randn_like(inputs[0])
    exact = _reference(inputs, grad, mask, case, torch.float64)
    plain = _reference(inputs, grad, mask, case, dtype) if case.softcap else _torchs_own(inputs, grad, mask, case)
    found = dict(zip(NAMES, _ours(inputs, grad, mask, case), strict=False))
    found.pop("lse")
    sizes = {name: truth.norm() for name, truth in zip(NAMES, exact, strict=False)}
    if case.sinks:  # the gradient of a sink sums over all rows, of either sign
        weights = torch.exp(inputs[3].double()[None, :, None] - exact[1])
        sizes["dsinks"] = (weights * (exact[0] * grad).sum(-1).abs()).sum((0, 2)).norm()
    del exact[1]
    if case.softcap:
        del plain[1]
    for (name, ours), theirs, truth in zip(found.items(), plain, exact, strict=True):
        assert ours.dtype == dtype
        error, allowed = ((x.double() - truth).norm() / sizes[name] for x in (ours, theirs))
        if name == "dsinks":  # so few numbers that two roundings, of a weight and of a sum, may be unlucky
            allowed = max(allowed, 2 * torch.finfo(dtype).eps)
        assert error <= 1.5 * allowed, f"{name}: {error:.2e} against {allowed:.2e}"


def _torchs_own(inputs: list[Tensor], grad: Tensor, mask: BitfieldMask, case: Case) -> list[Tensor]:
    """Output and gradients of torch's attention with a dense mask; a sink is one more key, of zeros, with a bias."""
    states = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    query, *keys_values = states
    key, value = (tensor.repeat_interleave(case.heads // case.kv_heads, dim=1) for tensor in keys_values)
    dense = dense_mask(mask, case.window)[:, None]
    seen = dense.any(-1, keepdim=True)
    bias = torch.zeros(dense.shape, dtype=query.dtype).masked_fill_(~(dense | ~seen), float("-inf"))
    bias = bias.expand(-1, case.heads, -1, -1)
    if case.sinks:
        key, value = (pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
        bias = torch.cat([bias, inputs[3][None, :, None, None].expand(*bias.shape[:3], 1)], dim=-1)
    out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=SCALE).masked_fill(~seen, 0.0)
    of_sinks = _reference(inputs, grad, mask, case, query.dtype)[5:]
    return [out.detach(), *torch.autograd.grad(out, states, grad), *of_sinks]


def test_rows_in_order_are_not_copied():
    segment, image = draw_row(Random(1), 200, padding=9)
    row = cpu.compile_mask(BitfieldMask.from_words(encode_words(segment, span=image))).rows[0]
    assert row.query_index == row.key_index == slice(0, 191)


def test_a_causal_sample_is_one_call():
    segment = encode_words(torch.tensor([[1] * 700 + [2] * 300 + [0] * 24]))
    row = cpu.compile_mask(BitfieldMask.from_words(segment)).rows[0]
    assert [(part.kind.value, part.rows, part.keys) for part in row.parts] == [
        ("causal", (0, 700), (0, 700)),
        ("causal", (700, 1000), (700, 1000)),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_calls_cover_each_visible_pair_once(family):
    mask = BitfieldMask.from_words(FAMILIES[family](Random(family), 900))
    row = cpu.compile_mask(mask, 0).rows[0]
    seen = torch.zeros_like(dense_mask(mask)[0], dtype=torch.int64)
    rows, keys = torch.arange(900)[row.query_index], torch.arange(900)[row.key_index]
    for part in row.parts:
        block = torch.ones(part.rows[1] - part.rows[0], part.keys[1] - part.keys[0], dtype=torch.int64)
        if part.kind is cpu.Kind.CAUSAL:
            block = block.tril()
        elif part.kind is cpu.Kind.MASKED:
            block *= cpu._visible(part, row)
        index = (rows[slice(*part.rows)][:, None], keys[slice(*part.keys)][None])
        seen.index_put_(index, block, accumulate=True)
    assert torch.equal(seen, dense_mask(mask)[0].long())


def test_nothing_is_seen():
    case = Case(sinks=True)
    _assert_equal(BitfieldMask.from_words(torch.zeros(2, 9, dtype=torch.int64)), Case(sinks=True, batch=2))
    mask = BitfieldMask.from_words(encode_words(torch.tensor([[1, 1, 1]]), sees=2))
    _assert_equal(mask, case)
