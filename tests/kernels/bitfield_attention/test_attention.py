"""The public entry: operators, compilation, checkpointing, one compilation of a mask, and what is refused."""

import weakref
from random import Random

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_mmparallel.kernels.bitfield_attention import (
    BitfieldMask,
    attention,
    bitfield_attention,
    dispatch,
    encode_words,
    intervals,
    reference_attention,
)
from tests.kernels.bitfield_attention.mask_families import FAMILIES, permuted

LENGTH = 61


def _inputs(batch: int = 2, length: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys, values and sinks, laid out as models give them."""
    query = torch.randn(batch, length, 4, 16, dtype=dtype).transpose(1, 2)
    key, value = torch.randn(2, batch, length, 2, 16, dtype=dtype).transpose(2, 3)
    return [tensor.detach().requires_grad_() for tensor in (query, key, value, torch.randn(4))]


def _words(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.cat([FAMILIES["image_spans"](Random(row), length) for row in range(batch)])


def _call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, words: Tensor) -> Tensor:
    out = bitfield_attention(query * 1.0, key, value, words, sinks=sinks, window=17, softcap=3.0)
    return out.transpose(1, 2).flatten(2)


def _expected(inputs: list[Tensor], words: Tensor) -> Tensor:
    mask = BitfieldMask.from_words(words)
    out, _ = reference_attention(*inputs[:3], mask, softcap=3.0, window=17, sinks=inputs[3])
    return out.transpose(1, 2).flatten(2)


def _assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(out, inputs, grad) for out in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", dispatch.BACKENDS)
@pytest.mark.parametrize("cut", [False, True])
def test_every_backend_is_the_reference(backend, cut):
    words = _words()
    mask = BitfieldMask.from_words(words)
    mask = permuted(mask, Random(0), LENGTH) if cut else mask
    inputs = _inputs()
    options = {"scale": 0.4, "softcap": 3.0, "window": 17}
    out, lse = bitfield_attention(
        *inputs[:3], mask if cut else words, sinks=inputs[3], return_lse=True, backend=backend, **options
    )
    expected, expected_lse = reference_attention(*inputs[:3], mask, sinks=inputs[3], **options)
    torch.testing.assert_close(lse, expected_lse.detach())
    assert not lse.requires_grad
    _assert_same(out, expected, inputs)


@pytest.mark.parametrize(
    ("backend", "softcap"),
    [*((backend, 3.0) for backend in dispatch.BACKENDS if backend != "triton"), ("triton", 0.0)],
)
def test_tensors_may_lie_in_any_way(backend, softcap):
    """Columns with gaps, sinks with gaps or of one number, and gradients of sums."""
    words = _words()
    states = [torch.randn(2, heads, 16, LENGTH).transpose(2, 3) for heads in (4, 2, 2)]
    for sinks in (torch.randn(8)[::2], torch.randn(1).expand(4)):
        inputs = [tensor.detach().requires_grad_() for tensor in (*states, sinks)]
        found = bitfield_attention(*inputs[:3], words, sinks=inputs[3], softcap=softcap, backend=backend)
        mask = BitfieldMask.from_words(words)
        expected, _ = reference_attention(*inputs[:3], mask, softcap=softcap, sinks=inputs[3])
        torch.testing.assert_close(found, expected)
        for grad in (torch.ones(()), torch.randn(16)):
            grads = (
                torch.autograd.grad(out, inputs, grad.expand_as(out), retain_graph=True) for out in (found, expected)
            )
            for one, other in zip(*grads, strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", dispatch.BACKENDS)
def test_autocast_rounds_nothing_inside(backend):
    inputs, words = [tensor.detach() for tensor in _inputs()], _words()
    options = {"softcap": 3.0, "sinks": inputs[3], "return_lse": True, "backend": backend}
    plain = bitfield_attention(*inputs[:3], words, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = bitfield_attention(*inputs[:3], words, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("backend", dispatch.BACKENDS)
@pytest.mark.parametrize("batch, queries, keys", [(0, 5, 5), (1, 0, 0), (1, 5, 0), (1, 0, 5), (1, 1, 1)])
def test_without_tokens(backend, batch, queries, keys):
    words, places = torch.ones(batch, 5, dtype=torch.int64), torch.arange(5, dtype=torch.int32).expand(batch, 5)
    words = encode_words(words)
    mask = BitfieldMask(words[:, :queries], places[:, :queries], words[:, :keys], places[:, :keys])
    query = torch.randn(batch, 4, queries, 16, requires_grad=True)
    key, value = (torch.randn(batch, 2, keys, 16, requires_grad=True) for _ in range(2))
    out, lse = bitfield_attention(query, key, value, mask, return_lse=True, backend=backend)
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in (query, key, value)]
    assert (out.shape, lse.shape) == (query.shape, query.shape[:3])
    if not keys:
        assert not out.any() and (lse == float("-inf")).all()


@pytest.mark.parametrize("backend", dispatch.BACKENDS)
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


def test_compiles_without_a_break():
    inputs, words = _inputs(), _words()
    found = torch.compile(_call, fullgraph=True)(*inputs, words)
    _assert_same(found, _expected(inputs, words), inputs)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    inputs, words = _inputs(), _words()
    weight = torch.ones(64, requires_grad=True)

    def run(function):
        found = function(*inputs, words) * weight
        return torch.autograd.grad(found.square().sum(), inputs) if not use_reentrant else _leaf_grads(found, inputs)

    plain = run(_call)
    again = run(lambda *args: checkpoint(_call, *args, use_reentrant=use_reentrant))
    for one, other in zip(again, plain, strict=True):
        torch.testing.assert_close(one, other)


def _leaf_grads(found: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients through `.backward`, which is all that reentrant checkpoints allow."""
    for tensor in inputs:
        tensor.grad = None
    found.square().sum().backward()
    return [tensor.grad for tensor in inputs if tensor.grad is not None]


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
    """Counts how often intervals are computed, from an empty store."""
    counted = []
    monkeypatch.setattr(dispatch, "_results", type(dispatch._results)())
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


def test_words_live_as_long_as_their_compilation(compilations, monkeypatch):
    """Else others could take their address, and find what was compiled for them."""
    monkeypatch.setattr(dispatch, "_RESULTS_KEPT", 2)
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


def test_the_store_is_bounded(compilations, monkeypatch):
    monkeypatch.setattr(dispatch, "_RESULTS_KEPT", 4)
    inputs = _inputs(batch=1)
    for _ in range(5):
        bitfield_attention(*inputs[:3], _words(batch=1))
    assert len(dispatch._results) == 4 and len(compilations) == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits(dtype):
    inputs, words = _inputs(dtype=dtype), _words()
    out, lse = bitfield_attention(*inputs[:3], words, return_lse=True)
    out.float().sum().backward()
    assert (out.dtype, lse.dtype, inputs[0].grad.dtype) == (dtype, torch.float32, dtype)


def test_results_are_laid_out_as_promised():
    query, key, value, _ = _inputs()
    out = bitfield_attention(query, key, value, _words())
    assert out.stride() == torch.empty_like(query).stride()
    assert out.transpose(1, 2).is_contiguous()


def _refuse(match: str, mask=None, states: dict | None = None, **options) -> None:
    query, key, value, _ = _inputs()
    states = {"query": query, "key": key, "value": value} | (states or {})
    with pytest.raises(ValueError, match=match):
        bitfield_attention(**states, mask=_words() if mask is None else mask, **options)


def test_mistakes_are_named():
    query, key, value, sinks = _inputs()
    _refuse("`dropout=0.1`.*attention_dropout=0.0", dropout=0.1)
    _refuse("`window=-1`", window=-1)
    _refuse("`backend='flash'` is not one of 'triton', 'cpu'", backend="flash")
    _refuse(r"torch.float32 \[3\] on cpu; there are 4 query heads", sinks=sinks[:3])
    _refuse(r"torch.int64 \[1, 61\].*need torch.int64 \[2, 61\]", mask=_words(batch=1))
    _refuse(r"torch.int32 \[2, 61\]", mask=_words().int())
    _refuse(r"torch.bool \[2, 61\]", mask=_words() > 0)
    _refuse("words of the mask are .*60", mask=_words(length=60))
    _refuse("keys and values alike", states={"value": value[..., :8]})
    _refuse("head_dim must agree", states={"query": query[..., :8]})
    _refuse("2 heads of keys must divide the 3 of queries", states={"query": query[:, :3]})
    _refuse("one dtype and one device", states={"query": query.half()})
    _refuse("must be .*head_dim", states={"query": query[0]})
    integers = {name: tensor.detach().int() for name, tensor in (("query", query), ("key", key), ("value", value))}
    _refuse("no kernel for torch.int32", states=integers)
    low = {name: tensor.detach().bfloat16() for name, tensor in (("query", query), ("key", key), ("value", value))}
    _refuse("interpreter, which multiplies bfloat16 wrongly", states=low, backend="triton")
    wide = torch.randn(2, 4, LENGTH, 257)
    _refuse("a head_dim up to 256", states=dict.fromkeys(("query", "key", "value"), wide), backend="triton")
    mask = BitfieldMask.from_words(_words())
    short = BitfieldMask(mask.query_words, mask.query_positions, mask.key_words[:, :9], mask.key_positions[:, :9])
    _refuse(r"key words of the mask are torch.int64 \[2, 9\]", mask=short)
    long = BitfieldMask(*(tensor.long() for tensor in mask.tensors))
    _refuse("query positions of the mask are torch.int64", mask=long)


def test_a_mask_moves_between_devices():
    mask = BitfieldMask.from_words(_words())
    assert all(tensor.device.type == "meta" for tensor in mask.to("meta").tensors)
    assert intervals.row_intervals(mask.to("cpu")) is not None
