"""Which encoders can share the tokens of an image or a clip among ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.shared_tokens import TokenShare, can_share_tokens, even_parts, own_part
from hf_mmparallel.modeling.spec import find_stack, layers_of, module_parts
from tests import tiny
from tests.deep_cases import drawn_cases
from tests.distributed import run_distributed

ENCODERS = [
    *(("vision", family) for family in ("llava", "gemma3", "internvl", "mistral3")),
    *(("vision", family) for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni")),
    ("audio", "voxtral"),
]


def stack_of(family: str, name: str) -> tuple[nn.Module, nn.ModuleList]:
    model = tiny.FAMILIES[family]()
    part = module_parts(model)[name]
    return model.get_submodule(part.tower), layers_of(model, find_stack(model, part.tower))


@pytest.mark.parametrize(("name", "family"), ENCODERS)
def test_encoders_with_attention_of_transformers_share_tokens_and_stay_as_they_are(name: str, family: str):
    encoder, layers = stack_of(family, name)
    before = [getattr(module, "config", None) for module in encoder.modules()]
    assert can_share_tokens(encoder, layers)
    assert [getattr(module, "config", None) for module in encoder.modules()] == before
    assert not any(layer._forward_pre_hooks for layer in layers)
    assert build_model_spec(tiny.FAMILIES[family]()).modules[name].shares_tokens


class Mixing(nn.Module):
    """A part of a layer that passes something from token to token."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden.roll(1, dims=-2)


def test_encoders_with_code_of_their_own_between_tokens_do_not():
    encoder, layers = stack_of("llava", "vision")
    layers[2].mlp = nn.Sequential(layers[2].mlp, Mixing())
    assert can_share_tokens(encoder, layers)  # the first layer of a class stands for all
    layers[0].mlp = nn.Sequential(layers[0].mlp, Mixing())
    assert not can_share_tokens(encoder, layers)
    encoder, layers = stack_of("llava", "vision")
    encoder.config._attn_implementation = "eager"
    assert not can_share_tokens(encoder, layers)
    encoder, layers = stack_of("voxtral", "audio")
    layers[0].self_attn.dropout = 0.1
    assert not can_share_tokens(encoder, layers)


def test_features_are_shared_evenly():
    assert even_parts(7, 3) == [3, 2, 2] and even_parts(1, 2) == [1, 0]
    assert torch.tensor(even_parts(10, 4)).sum() == 10


def whole_numbers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


def gradients_of(shape: tuple[int, int, int], seed: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Those of rows of tokens, and of the weights that tokens meet, with a group that shares the tokens or alone."""
    rows, num_tokens, width = shape
    hidden_BTF, weights = whole_numbers(seed, *shape).requires_grad_(), whole_numbers(9, width, 2).requires_grad_()
    wanted = whole_numbers(seed + 1, rows * num_tokens, 2)
    if group is None:
        features = (hidden_BTF @ weights).flatten(0, 1)
    else:
        share = TokenShare(group, num_tokens)
        features = own_part(share.join(share.cut(hidden_BTF, 1) @ weights).flatten(0, 1), group)
        wanted = own_part(wanted, group)
    (features * wanted).sum().backward()
    assert hidden_BTF.grad is not None and weights.grad is not None
    return hidden_BTF.grad, weights.grad


def on_ranks(drawn: list[tuple[int, int, int]]) -> list[tuple[Tensor, Tensor]]:
    group = dist.group.WORLD
    return [gradients_of(shape, seed, group) for seed, shape in enumerate(drawn)]


@pytest.mark.distributed
def test_parts_of_gradients_of_shared_tokens_add_up_to_those_of_one_process():
    drawn = drawn_cases(st.tuples(st.integers(1, 3), st.integers(1, 11), st.integers(1, 3)), 20)
    for seed, (shape, *parts) in enumerate(zip(drawn, *run_distributed(on_ranks, 3, drawn), strict=True)):
        for found, wanted in zip(zip(*parts, strict=True), gradients_of(shape, seed, None), strict=True):
            assert torch.equal(torch.stack(found).sum(0), wanted), shape
