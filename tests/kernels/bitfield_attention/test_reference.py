"""The dense reference against torch's own attention, and its backward pass against autograd."""

from random import Random

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, dense_mask, reference_attention

from .cases import Case
from .mask_families import FAMILIES


def _inputs(mask: BitfieldMask, sinks: bool = False) -> list[torch.Tensor]:
    return [tensor.double().requires_grad_() for tensor in Case(sinks=sinks).inputs(mask)]


def test_it_is_torchs_attention():
    mask = BitfieldMask.from_words(FAMILIES["image_spans"](Random(0), 61))
    query, key, value = _inputs(mask)
    out, lse = reference_attention(query, key, value, mask)
    dense = dense_mask(mask)[:, None]
    seen = dense.any(-1, keepdim=True)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=dense | ~seen, enable_gqa=True)
    torch.testing.assert_close(out, expected.masked_fill(~seen, 0.0))
    assert torch.equal(lse == float("-inf"), ~seen[..., 0].expand_as(lse))


def test_a_sink_is_a_key_without_a_value():
    mask = BitfieldMask.from_words(FAMILIES["packed"](Random(0), 40))
    query, key, value = _inputs(mask)
    sinks = torch.randn(4, dtype=torch.float64)
    out, lse = reference_attention(query, key, value, mask, softcap=2.0, sinks=sinks)
    plain, plain_lse = reference_attention(query, key, value, mask, softcap=2.0)
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks[:, None].expand_as(lse)))
    torch.testing.assert_close(out, plain * torch.exp(plain_lse - lse)[..., None])
    nothing = mask.query_words[0] == 0
    assert nothing.any() and (out[:, :, nothing] == 0).all()
