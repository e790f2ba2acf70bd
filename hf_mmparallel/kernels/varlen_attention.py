"""
Attention of an encoder over the images, windows or clips that follow each other in one row, in one call for all.

Encoders of transformers cut such a row into its sequences, which takes a call for each of them and a read of their
lengths in every layer, unless the name of the attention function has "flash" in it: then they pass the row whole, with
the bounds of its sequences.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import masking_utils, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .bitfield_attention.attention import cast_like_autocast

NAME = "varlen_flash"

_MAX_HEAD_DIM = 256  # of FlashAttention, which takes multiples of 8

# What computes attention of layers whose tokens several ranks share: takes a layer, its queries, keys and values, its
# mask, the bounds of its sequences, the factor of scores and the dropout, and returns `[batch, length, heads, D]`.
SharedAttention = Callable[..., Tensor]
_SHARED: ContextVar[SharedAttention | None] = ContextVar("shared_attention", default=None)


@contextmanager
def attending_by(function: SharedAttention | None) -> Iterator[None]:
    """A block in which `"varlen_flash"` layers attend by another function."""
    token = _SHARED.set(function)
    try:
        yield
    finally:
        _SHARED.reset(token)


def _shared_attention() -> SharedAttention | None:
    return None if torch.compiler.is_compiling() else _SHARED.get()  # no graph has layers that share tokens


def attends_as_here(function: Callable) -> Callable:
    """A function that layers run by again in a backward, with what computes their attention now."""
    shared = _shared_attention()
    if shared is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with attending_by(shared):
            return function(*args, **kwargs)

    return run


def register() -> None:
    """Registers `attn_implementation="varlen_flash"` with transformers."""
    modeling_utils.AttentionInterface.register(NAME, varlen_attention_forward)
    masking_utils.AttentionMaskInterface.register(NAME, masking_utils.sdpa_mask)


def use_varlen_attention(encoder: nn.Module, every: bool = False) -> bool:
    """
    Gives [`varlen_attention_forward`] to the layers of an encoder that know the bounds of their sequences, or to
    `every` layer, where they have the default function, in place; returns whether there are any.
    """
    given: dict[int, Any] = {}  # id of a config -> its copy
    for module in encoder.modules():
        config = getattr(module, "config", None)
        knows_bounds = every or "cu_seqlens" in inspect.signature(module.forward).parameters
        is_default = getattr(config, "_attn_implementation", None) == "sdpa"
        if knows_bounds and is_default and id(config) not in given:
            given[id(config)] = copy.deepcopy(config)
            given[id(config)]._attn_implementation = NAME
    # The model's own config stays: transformers looks for a package of any name with "flash" when it builds a model.
    for module in encoder.modules():
        config = getattr(module, "config", None)
        if id(config) in given:
            module.config = given[id(config)]
    return bool(given)


def varlen_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    The attention function of `attn_implementation="varlen_flash"`: FlashAttention over all sequences of a row on a
    GPU in half precision, and elsewhere `"sdpa"` for each of them, as transformers calls it.

    Args:
        module (`torch.nn.Module`): The attention layer.
        query, key, value (`torch.Tensor` of shape `[1, heads, length, head_dim]`): A row of sequences.
        attention_mask (`torch.Tensor`, *optional*): The mask of a layer that does not give the bounds of sequences.
        dropout (`float`, *optional*, defaults to 0.0): Probability of a weight to be zero.
        scaling (`float`, *optional*): Factor of the scores; `head_dim ** -0.5` by default.
        cu_seq_lens_q (`torch.Tensor` of shape `[sequences + 1]`, *optional*):
            int32 bounds of the sequences, from 0 to `length`. Without them the rows are whole.
        cu_seq_lens_k, max_length_k (*optional*): Those of the keys, which are the same.
        max_length_q (`int`, *optional*): Length of the longest sequence.
        is_causal (`bool`, *optional*): Whether a token sees only itself and earlier ones.

    Returns:
        `tuple[torch.Tensor, None]`: The output `[1, length, heads, head_dim]`.
    """
    shared = _shared_attention()
    if shared is not None:
        return shared(module, query, key, value, attention_mask, cu_seq_lens_q, scaling, dropout), None
    settings: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    cast = cast_like_autocast(query, key, value)
    if not dropout and _takes_flash(*cast):
        rows = [tensor.squeeze(0).transpose(0, 1) for tensor in cast]
        longest = query.shape[2] if max_length_q is None else max_length_q
        bounds = cu_seq_lens_q.to(torch.int32)
        window = (-1, 0) if is_causal else (-1, -1)
        output = varlen_attn(*rows, bounds, bounds, longest, longest, scale=scaling, window_size=window)
        assert isinstance(output, Tensor)
        return output[None], None
    lengths = (cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).tolist()
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, *part, None, **settings)[0] for part in parts], dim=1), None


def _takes_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether FlashAttention takes tensors of this device, dtype and shape."""
    is_half = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    return is_half and query.shape == key.shape == value.shape and width <= _MAX_HEAD_DIM and width % 8 == 0


register()
