"""Which layers with a state have heads that ranks can share."""

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.lfm2 import modeling_lfm2

from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.shared_tokens import TokenShare, can_share_tokens, even_parts, own_part
from hf_mmparallel.modeling.spec import find_stack, layers_of, module_parts
from tests import hybrids, tiny
from tests.deep_cases import drawn_cases
from tests.distributed import run_distributed

NEITHER = ("MiniMaxForCausalLM", "Llama4ForCausalLM")  # code of its own along the row; no state


class Shifted(JambaMambaMixer):
    """A mixer whose own code looks at the token before."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return super().forward(hidden_states + before, *args, **kwargs)


def widths_of(model: Any) -> tuple[int | None, ...]:
    return build_model_spec(model).language_model.state_widths


@pytest.mark.parametrize("name", hybrids.CONFIGS)
def test_all_but_layers_with_code_of_their_own_along_the_row_have_heads_to_share(name: str):
    spec = build_model_spec(hybrids.build(name)).language_model
    states = [spec.carries_state(layer) for layer in range(spec.num_layers)]
    assert [width is not None for width in spec.state_widths] == ([] if name in NEITHER else states)
    with torch.device("meta"):
        meta = hybrids.build(name)
    assert widths_of(meta) == spec.state_widths


def test_a_width_is_what_heads_take_and_give():
    # two key heads, and four of values with a decay and a weight each
    assert widths_of(hybrids.build("Qwen3_5ForCausalLM"))[0] == 2 * 2 * 16 + 4 * (16 + 1 + 1 + 16)
    # channels with a step and a gate, and keys and queries of all of them
    assert widths_of(hybrids.build("JambaForCausalLM"))[0] == 128 * (1 + 1 + 1 + 1) + 2 * 8


def test_a_mixer_that_looks_at_other_tokens_by_itself_shares_none():
    model = hybrids.build("JambaForCausalLM")
    for layer in model.get_submodule("model.layers"):  # type: ignore[union-attr]
        if hasattr(layer, "mamba"):
            layer.mamba.__class__ = Shifted
    assert widths_of(model) == ()


def test_quantized_matrices_do_not_matter():
    quantized = pytest.importorskip("bitsandbytes").nn
    model = hybrids.build("BambaForCausalLM")
    widths = widths_of(hybrids.build("BambaForCausalLM"))
    for layer in model.get_submodule("model.layers"):  # type: ignore[union-attr]
        if hasattr(layer, "mamba"):
            given = layer.mamba.in_proj
            layer.mamba.in_proj = quantized.Linear4bit(given.in_features, given.out_features, bias=False)
            layer.mamba.in_proj.weight = quantized.Params4bit(given.weight.data, requires_grad=False)
            layer.mamba.in_proj.to("cpu")
            assert layer.mamba.in_proj.weight.shape != given.weight.shape
    assert widths_of(model) == widths


def test_kernels_that_the_cpu_does_not_have_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    def fails(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        raise RuntimeError("a kernel for GPUs")

    package: Any = ModuleType("kernels_of_gpus")
    package.causal_conv1d_fn = fails
    monkeypatch.setitem(sys.modules, package.__name__, package)
    plain = inspect.unwrap(getattr(modeling_lfm2.causal_conv1d_fn, "function", modeling_lfm2.causal_conv1d_fn))
    function = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", package.__name__)(plain)
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", function)
    model = hybrids.build("Lfm2ForCausalLM")
    assert widths_of(model) == (0, None, 0, None)
    with pytest.raises(RuntimeError, match="a kernel for GPUs"):
        model(input_ids=torch.arange(3, 9)[None])


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
