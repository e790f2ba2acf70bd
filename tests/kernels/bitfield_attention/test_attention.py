"""The public entry: operators, compilation, one compilation of a mask, and what is refused."""

import weakref
from random import Random

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_mmparallel.kernels.bitfield_attention import (
    BitfieldMask,
    attention,
    bitfield_attention,
    dense_mask,
    dispatch,
    encode_words,
    reference_attention,
)
from tests.deep_cases import deep

from .cases import Case
from .mask_families import FAMILIES, permuted

LENGTH = 61
backends = pytest.mark.parametrize("backend", dispatch.BACKENDS)


def _inputs(batch: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys, values and sinks, laid out as models give them."""
    query = torch.randn(batch, LENGTH, 4, 16, dtype=dtype).transpose(1, 2)
    key, value = torch.randn(2, batch, LENGTH, 2, 16, dtype=dtype).transpose(2, 3)
    return [tensor.detach().requires_grad_() for tensor in (query, key, value, torch.randn(4))]


def _words(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.cat([FAMILIES["image_spans"](Random(row), length) for row in range(batch)])


def _assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor], grad: Tensor, **tolerance: float) -> None:
    """Equal results with equal gradients."""
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(out, inputs, grad.expand_as(out)) for out in (found, expected))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@backends
@pytest.mark.parametrize("cut", [False, True])
def test_every_backend_is_the_reference(backend, cut):
    words = _words()
    mask = BitfieldMask.from_words(words)
    mask = permuted(mask, Random(0), LENGTH) if cut else mask
    inputs = _inputs()
    options = {"scale": 0.4, "softcap": 3.0, "window": 17, "sinks": inputs[3]}
    given = mask if cut else words
    out, lse = bitfield_attention(*inputs[:3], given, return_lse=True, backend=backend, **options)
    expected, expected_lse = reference_attention(*inputs[:3], mask, **options)
    torch.testing.assert_close(lse, expected_lse.detach())
    assert not lse.requires_grad
    _assert_same(out, expected, inputs, torch.randn_like(expected))


@backends
@pytest.mark.parametrize(
    ("sinks", "grad"), [(torch.randn(8)[::2], torch.ones(())), (torch.randn(1).expand(4), torch.randn(16))]
)
def test_tensors_may_lie_in_any_way(backend, sinks, grad):
    """Columns with gaps, sinks with gaps or of one number, and gradients of sums."""
    words = _words(batch=1)
    states = [torch.randn(1, heads, 16, LENGTH).transpose(2, 3) for heads in (4, 2, 2)]
    inputs = [tensor.detach().requires_grad_() for tensor in (*states, sinks)]
    found = bitfield_attention(*inputs[:3], words, sinks=inputs[3], backend=backend)
    expected, _ = reference_attention(*inputs[:3], BitfieldMask.from_words(words), sinks=inputs[3])
    _assert_same(found, expected, inputs, grad, rtol=1e-4, atol=1e-4)


@backends
def test_autocast_rounds_nothing_inside(backend):
    inputs, words = [tensor.detach() for tensor in _inputs(batch=1)], _words(batch=1)
    options = {"softcap": 3.0, "sinks": inputs[3], "return_lse": True, "backend": backend}
    plain = bitfield_attention(*inputs[:3], words, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = bitfield_attention(*inputs[:3], words, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@backends
@pytest.mark.parametrize("batch, queries, keys", [(0, 5, 5), (1, 0, 0), (1, 5, 0), (1, 0, 5), (1, 1, 1)])
def test_without_tokens(backend, batch, queries, keys):
    words = encode_words(torch.ones(batch, 5, dtype=torch.int64))
    places = torch.arange(5, dtype=torch.int32).expand(batch, 5)
    mask = BitfieldMask(words[:, :queries], places[:, :queries], words[:, :keys], places[:, :keys])
    query = torch.randn(batch, 4, queries, 16, requires_grad=True)
    key, value = (torch.randn(batch, 2, keys, 16, requires_grad=True) for _ in range(2))
    out, lse = bitfield_attention(query, key, value, mask, return_lse=True, backend=backend)
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in (query, key, value)]
    assert (out.shape, lse.shape) == (query.shape, query.shape[:3])
    if not keys:
        assert not out.any() and (lse == float("-inf")).all()


@backends
def test_a_sink_that_takes_nothing(backend):
    """A logit of -inf is no sink, also in rows that see nothing."""
    query, key, value, sinks = _inputs(batch=1)
    words = encode_words((torch.arange(LENGTH) < 40).long()[None])
    grad = torch.randn_like(query)
    expected = bitfield_attention(query, key, value, words, return_lse=True)
    grads = torch.autograd.grad(expected[0], (query, key, value), grad)
    none = torch.full_like(sinks, float("-inf"), requires_grad=True)
    found = bitfield_attention(query, key, value, words, sinks=none, return_lse=True, backend=backend)
    *found_grads, grad_sinks = torch.autograd.grad(found[0], (query, key, value, none), grad)
    for one, other in zip((*found, *found_grads), (*expected, *grads), strict=True):
        torch.testing.assert_close(one, other)
    assert not grad_sinks.any()


@pytest.mark.parametrize(
    ("backend", "with_sinks", "whole"), [("cpu", True, True), ("cpu", False, False), ("reference", True, False)]
)
def test_opcheck(backend, with_sinks, whole):
    words = _words()
    mask = (words, None, None, None) if whole else BitfieldMask.from_words(words).tensors
    *states, sinks = _inputs()
    arguments = (*states, *mask, sinks if with_sinks else None, 0.25, 0.0, 0, backend)
    torch.library.opcheck(attention._attend, arguments)


@pytest.mark.parametrize("compiler", ["aot_eager", deep("inductor")])
def test_compiles_without_a_break(compiler):
    inputs, words = _inputs(), _words()
    options = {"window": 17, "softcap": 3.0}

    def layer(query, key, value, sinks, words):
        return bitfield_attention(query * 1.0, key, value, words, sinks=sinks, **options).transpose(1, 2).flatten(2)

    found = torch.compile(layer, fullgraph=True, backend=compiler)(*inputs, words)
    expected, _ = reference_attention(*inputs[:3], BitfieldMask.from_words(words), sinks=inputs[3], **options)
    expected = expected.transpose(1, 2).flatten(2)
    _assert_same(found, expected, inputs, torch.randn_like(expected))


def test_a_second_derivative_is_refused():
    inputs = _inputs()
    out = bitfield_attention(*inputs[:3], _words())
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


def test_unused_gradients_are_left_out():
    query, key, value, _ = _inputs()
    out = bitfield_attention(query.detach(), key, value.detach(), _words())
    (grad,) = torch.autograd.grad(out.sum(), [key])
    assert grad.shape == key.shape


@pytest.fixture
def compilations(monkeypatch):
    """Counts how often intervals are computed, from an empty store of two."""
    counted = []
    monkeypatch.setattr(dispatch, "_results", type(dispatch._results)())
    monkeypatch.setattr(dispatch, "_RESULTS_KEPT", 2)
    compile_mask = dispatch.cpu.compile_mask

    def count(mask, window):
        counted.append(window)
        return compile_mask(mask, window)

    monkeypatch.setattr(dispatch.cpu, "compile_mask", count)
    return counted


def test_all_layers_share_one_compilation(compilations):
    words = _words()
    for _ in range(3):
        inputs = _inputs()
        bitfield_attention(*inputs[:3], words[:]).sum().backward()
    assert compilations == [0]
    bitfield_attention(*inputs[:3], words, window=5).sum().backward()
    assert compilations == [0, 5]


def test_words_that_were_written_to_are_compiled_again(compilations):
    words = encode_words(torch.ones(1, LENGTH, dtype=torch.int64))
    inputs = _inputs(batch=1)
    bitfield_attention(*inputs[:3], words)
    words[:, 30:] = encode_words(torch.full((31,), 2))
    found = bitfield_attention(*inputs[:3], words)
    torch.testing.assert_close(found, reference_attention(*inputs[:3], BitfieldMask.from_words(words))[0])
    assert len(compilations) == 2


def test_words_live_as_long_as_their_compilation(compilations):
    """Else others could take their address, and find what was compiled for them."""
    query, key, value, _ = (tensor.detach() for tensor in _inputs(batch=1))
    masks = [BitfieldMask.from_words(_words(batch=1)) for _ in range(3)]
    first = weakref.ref(masks[0].key_positions)
    for number in range(3):
        bitfield_attention(query, key, value, masks.pop(0))
        assert (first() is not None) == (number < 2)
    assert len(compilations) == 3


def test_inference_tensors_are_compiled_each_time(compilations):
    inputs = [tensor.detach() for tensor in _inputs(batch=1)]
    with torch.inference_mode():
        words = _words(batch=1)
        bitfield_attention(*inputs[:3], words)
        words.zero_()
        assert bitfield_attention(*inputs[:3], words).count_nonzero() == 0
    assert len(compilations) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_have_the_layout_and_the_dtype_of_queries(dtype):
    query, key, value, _ = _inputs(dtype=dtype)
    out, lse = bitfield_attention(query, key, value, _words(), return_lse=True)
    out.float().sum().backward()
    assert (out.dtype, lse.dtype, query.grad.dtype) == (dtype, torch.float32, dtype)
    assert out.stride() == torch.empty_like(query).stride() and out.transpose(1, 2).is_contiguous()


def test_mistakes_are_named():
    states = dict(zip(("query", "key", "value", "sinks"), _inputs(), strict=True))
    sinks = states.pop("sinks")
    wide = dict.fromkeys(states, torch.randn(2, 4, LENGTH, 257))
    mask = BitfieldMask.from_words(_words())
    short = BitfieldMask(mask.query_words, mask.query_positions, mask.key_words[:, :9], mask.key_positions[:, :9])
    for salient, given in (
        ("dropout=0.1", {"dropout": 0.1}),
        ("window=-1", {"window": -1}),
        ("backend='flash'", {"backend": "flash"}),
        (r"torch.float32 \[3\] on cpu; .* 4 query heads", {"sinks": sinks[:3]}),
        (r"\[1, 61\].*\[2, 61\]", {"mask": _words(batch=1)}),
        (r"torch.int32 \[2, 61\]", {"mask": _words().int()}),
        (r"torch.bool \[2, 61\]", {"mask": _words() > 0}),
        ("words of the mask are .*60", {"mask": _words(length=60)}),
        (r"key words of the mask are torch.int64 \[2, 9\]", {"mask": short}),
        ("query positions of the mask are torch.int64", {"mask": BitfieldMask(*(t.long() for t in mask.tensors))}),
        ("keys and values alike", {"value": states["value"][..., :8]}),
        ("head_dim must agree", {"query": states["query"][..., :8]}),
        ("2 heads of keys must divide the 3", {"query": states["query"][:, :3]}),
        ("one dtype", {"query": states["query"].half()}),
        ("must be .*head_dim", {"query": states["query"][0]}),
        ("torch.int32", {name: tensor.detach().int() for name, tensor in states.items()}),
        ("bfloat16", {name: tensor.bfloat16() for name, tensor in states.items()} | {"backend": "triton"}),
        ("up to 256", wide | {"backend": "triton"}),
    ):
        with pytest.raises(ValueError, match=salient):
            bitfield_attention(**{**states, "mask": _words(), **given})


def _of_reference(mask: BitfieldMask, sinks: bool = False) -> list[torch.Tensor]:
    return [tensor.double().requires_grad_() for tensor in Case(sinks=sinks).inputs(mask)]


def test_it_is_torchs_attention():
    mask = BitfieldMask.from_words(FAMILIES["image_spans"](Random(0), 61))
    query, key, value = _of_reference(mask)
    out, lse = reference_attention(query, key, value, mask)
    dense = dense_mask(mask)[:, None]
    seen = dense.any(-1, keepdim=True)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=dense | ~seen, enable_gqa=True)
    torch.testing.assert_close(out, expected.masked_fill(~seen, 0.0))
    assert torch.equal(lse == float("-inf"), ~seen[..., 0].expand_as(lse))


def test_a_sink_is_a_key_without_a_value():
    mask = BitfieldMask.from_words(FAMILIES["packed"](Random(0), 40))
    query, key, value = _of_reference(mask)
    sinks = torch.randn(4, dtype=torch.float64)
    out, lse = reference_attention(query, key, value, mask, softcap=2.0, sinks=sinks)
    plain, plain_lse = reference_attention(query, key, value, mask, softcap=2.0)
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks[:, None].expand_as(lse)))
    torch.testing.assert_close(out, plain * torch.exp(plain_lse - lse)[..., None])
    nothing = mask.query_words[0] == 0
    assert nothing.any() and (out[:, :, nothing] == 0).all()
