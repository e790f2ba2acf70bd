"""The CPU path against the reference in float64: every mask family with every feature, all gradients."""

from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, cpu, dense_mask, encode_words
from tests.deep_cases import deep

from .cases import Case
from .mask_families import FAMILIES, draw_row, masks, permuted

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


@dataclass(frozen=True)
class Call(Case):
    """One call, and whether rows are permuted and keys that nobody sees left out."""

    scale: float = 0.37
    permuted: bool = False
    batch: int = 1


CASES = {
    "plain": Call(),
    "no_groups": Call(heads=3, kv_heads=3),
    "one_kv_head": Call(heads=4, kv_heads=1),
    "window": Call(window=13),
    "softcap": Call(softcap=1.5),
    "sinks": Call(sinks=True),
    "permuted": Call(permuted=True),
    "batch": Call(batch=3),
    "all": Call(window=29, softcap=2.0, sinks=True, permuted=True, batch=2),
}


def _ours(inputs: list[Tensor], grad: Tensor, mask: BitfieldMask, call: Call) -> list[Tensor]:
    plan = cpu.compile_mask(mask, call.window)
    options = (plan, call.scale, call.softcap, inputs[3] if call.sinks else None)
    out, lse = cpu.forward(*inputs[:3], *options)
    grads = cpu.backward(grad, *inputs[:3], out, lse, *options)
    assert (grads[3] is None) != call.sinks
    return [out, lse, *grads[: len(inputs)]]


def _assert_equal(mask: BitfieldMask, call: Call) -> None:
    inputs = [tensor.double() for tensor in call.inputs(mask)]
    grad = torch.randn_like(inputs[0])
    found, expected = _ours(inputs, grad, mask, call), call.definition(inputs, grad, mask)
    for name, one, other in zip(NAMES, found, expected, strict=False):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    unseen = ~dense_mask(mask, call.window).any(-1)
    for tensor in (found[0], found[2]):
        assert (tensor.transpose(1, 2)[unseen] == 0).all()


def _masks(family: str, case: Call, rng: Random, length: int) -> BitfieldMask:
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
    monkeypatch.setattr(cpu, "_MIN_ROWS", 5)
    monkeypatch.setattr(cpu, "_CALL_PAIRS", 64)
    monkeypatch.setattr(cpu, "_MAX_SCORES", 2000)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_features(family, case):
    _assert_equal(_masks(family, case, Random(f"{family} {case}"), 131), case)


@pytest.mark.parametrize("family", ["packed", "image_spans", "embedded_modality", "windows"])
def test_chunks_of_the_size_that_runs(family):
    for case in (Call(), Call(sinks=True, window=300, permuted=True)):
        _assert_equal(_masks(family, case, Random(family), 777), case)


@settings(max_examples=60)
@given(drawn=masks(longest=90), softcap=st.sampled_from([0.0, 0.0, 2.0]), sinks=st.booleans())
def test_any_words(drawn, softcap, sinks):
    mask, window = drawn
    _assert_equal(mask, Call(window=window, softcap=softcap, sinks=sinks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [deep("plain"), deep("softcap"), deep("sinks"), "all"])
def test_no_dtype_is_worse_than_plain_torch(case, dtype):
    """Judged against float64 on the same inputs: at most 1.5 times the error of torch's attention in that dtype."""
    case = replace(CASES[case], heads=16, head_dim=64)
    mask = _masks("image_spans", case, Random(7), 300)
    inputs = [tensor.to(dtype) for tensor in case.inputs(mask)]
    grad = torch.randn_like(inputs[0])
    exact, sizes = case.exactly(inputs, grad, mask)
    plain = case.definition(inputs, grad, mask) if case.softcap else _torchs_own(inputs, grad, mask, case)
    found = _ours(inputs, grad, mask, case)
    for name, ours, theirs, truth, size in zip(NAMES, found, plain, exact, sizes, strict=False):
        if name == "lse":
            continue
        assert ours.dtype == dtype
        error, allowed = ((x.double() - truth).norm() / size.norm() for x in (ours, theirs))
        if name == "dsinks":  # so few numbers that two roundings, of a weight and of a sum, may be unlucky
            allowed = max(allowed, 2 * torch.finfo(dtype).eps)
        assert error <= 1.5 * allowed, f"{name}: {error:.2e} against {allowed:.2e}"


def _torchs_own(inputs: list[Tensor], grad: Tensor, mask: BitfieldMask, case: Call) -> list[Tensor]:
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
    out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=case.scale).masked_fill(~seen, 0.0)
    low = case.definition(inputs, grad, mask)
    return [out.detach(), low[1], *torch.autograd.grad(out, states, grad), *low[5:]]


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


def test_nothing_is_seen():
    case = Call(sinks=True)
    _assert_equal(BitfieldMask.from_words(torch.zeros(2, 9, dtype=torch.int64)), Call(sinks=True, batch=2))
    mask = BitfieldMask.from_words(encode_words(torch.tensor([[1, 1, 1]]), sees=2))
    _assert_equal(mask, case)
