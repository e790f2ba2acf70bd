"""`"varlen_flash"` in encoders that know the bounds of their sequences, against transformers' own call for each."""

import pytest
import torch

from hf_mmparallel.kernels.varlen_attention import NAME, use_varlen_attention
from hf_mmparallel.modeling import build_model_spec
from tests import tiny

ENCODERS = {"qwen2_vl": "vision", "qwen2_5_vl": "vision", "qwen3_vl": "vision", "qwen2_5_omni": "audio"}
GRID = torch.tensor([[1, 8, 12], [2, 4, 4], [1, 20, 4]])


def _run(encoder, pixels, device, dtype):
    """Outputs and gradients of an encoder, in float32."""
    encoder.zero_grad()
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        output = encoder(pixels.to(device), grid_thw=GRID.to(device)).pooler_output
    (output.float() * torch.linspace(-1, 1, output.numel(), device=device).view_as(output)).sum().backward()
    return [output.detach().float().cpu(), *(p.grad.float().cpu() for p in encoder.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_that_take_it(family):
    model = tiny.FAMILIES[family]()
    encoder = model.get_submodule(build_model_spec(model).modules[ENCODERS[family]].tower)
    assert use_varlen_attention(encoder) and encoder.config._attn_implementation == NAME
    assert build_model_spec(model).language_model.attention == "sdpa"
    assert not use_varlen_attention(encoder)  # what has been chosen stays


def test_others_keep_their_own():
    model = tiny.FAMILIES["llava"]()
    assert not use_varlen_attention(model)
    chosen = tiny.FAMILIES["qwen2_vl"]().model.visual
    chosen.config._attn_implementation = "eager"
    assert not use_varlen_attention(chosen)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_images_and_windows_do_not_see_each_other(family, device, dtype):
    encoder = tiny.FAMILIES[family]().model.visual.to(device)
    config = encoder.config
    pixels = torch.randn(
        int(GRID.prod(-1).sum()), config.in_channels * config.temporal_patch_size * config.patch_size**2
    )
    exact, sdpa = _run(encoder, pixels, device, torch.float32), _run(encoder, pixels, device, dtype)
    assert use_varlen_attention(encoder)
    found = _run(encoder, pixels, device, dtype)
    for mine, theirs, right in zip(found, sdpa, exact, strict=True):
        if dtype == torch.float32:
            assert torch.equal(mine, theirs)
        else:
            assert (mine - right).norm() <= 1.5 * (theirs - right).norm() + 1e-6
