"""
Samples of a packed row in layers that carry a state or a convolution along the row: each sample starts anew.

Such a layer has a *mixer* (Gated DeltaNet, Mamba, a short convolution, lightning attention). Without kernels, its own
code ignores where the samples of a row begin. Here it gets them as a padded batch, which is exact: it looks back only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

from .bitfield_attention.context_parallel import SequenceShard
from .bitfield_attention.words import decode_words
from .shared_heads import SharedHeads, run_by_heads, shares_heads
from .shared_samples import in_batches

_MASKS: Mapping[str, Any] = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
# types of layers with a state along the row, by the mask that transformers gives them
RECURRENT_LAYERS = frozenset(
    kind
    for kind, mask in _MASKS.items()
    if masking_utils.create_recurrent_attention_mask in (mask.values() if isinstance(mask, Mapping) else (mask,))
)
LONE_LAYERS = frozenset(("mlp", "moe"))  # types of layers whose tokens see no other
_CACHES = {"cache", "past_key_values", "cache_params"}  # names of a cache in the forward of a mixer
_ATTENTION = "ALL_ATTENTION_FUNCTIONS"  # in the source of an attention layer, which tells samples apart by itself
_OF_ROW = ("attention_words", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_READY, _LENGTHS = "_starts_anew_at_samples", "_sample_lengths"


def recurrent_kinds(config: Any) -> set[str]:
    """The types of layers of a language model that carry a state along the row."""
    return {str(kind) for kind in getattr(config, "layer_types", None) or ()} & RECURRENT_LAYERS


def start_anew_at_samples(model: nn.Module) -> None:
    """
    Lets the recurrent layers of a model start anew at each sample of a packed row, in place; a model without any stays
    as it is. [`PackingCollator`] does it to its model. `attention_words` say where samples begin, or what other
    packing collators give: `seq_idx`, `cu_seq_lens_q`, or position ids that begin anew.

    Args:
        model (`torch.nn.Module`): The model, or what of it this rank holds.

    Raises:
        `ValueError`: For a recurrent layer in which nothing that carries a state is found.
    """
    check_mixers(model)
    for layer, _, mixers in recurrent_mixers(model):
        if starts_anew(layer):
            continue
        if mixers:
            layer.register_forward_pre_hook(_mask_by_samples, with_kwargs=True)
        for mixer in mixers:
            mixer.forward = functools.partial(_run_by_samples, mixer, mixer.forward)
        for module in layer.modules():
            module.__dict__[_READY] = True


def recurrent_mixers(model: nn.Module) -> list[tuple[nn.Module, str, list[nn.Module]]]:
    """The layers of a model with recurrent ones among them, the type of each, and what carries a state in it."""
    return [(layer, kind, list(_mixers(layer))) for layer, kind in _layers(model)]


def check_mixers(model: nn.Module) -> None:
    """Raises `ValueError` for a recurrent layer of a model in which nothing that carries a state is found."""
    for layer, kind, mixers in recurrent_mixers(model):
        if not mixers and kind in RECURRENT_LAYERS and not getattr(layer, "is_identity_layer", False):
            raise ValueError(
                f"`{type(layer).__name__}` is a layer of type {kind!r}, but no module of it takes a cache: what "
                "carries a state from token to token is unknown. Train it on padded batches, without packing."
            )


def starts_anew(module: nn.Module) -> bool:
    """Whether the recurrent layers around an attention layer start anew at each sample."""
    return module.__dict__.get(_READY, False)


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The layers of a model with recurrent ones among them, and the type of each."""
    for module in model.modules():
        config = getattr(module, "config", None)
        for child in module.children() if recurrent_kinds(config) else ():
            if isinstance(child, nn.ModuleList) and len(child) == len(config.layer_types):
                yield from zip(child, config.layer_types, strict=True)


def _mixers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules in a layer that carry a state: they take a cache, and attend to nothing."""
    for child in module.children():
        takes_cache = not _CACHES.isdisjoint(inspect.signature(type(child).forward).parameters)
        is_layer = hasattr(child, "gradient_checkpointing")
        if takes_cache and not is_layer and not attends(child):
            yield child
        else:
            yield from _mixers(child)


def attends(module: nn.Module) -> bool:
    """Whether a module calls an attention function of transformers, itself or in a part."""
    return any(_calls_attention(type(part)) for part in module.modules())


@functools.cache
def _calls_attention(kind: type[nn.Module]) -> bool:
    try:
        return _ATTENTION in inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):  # Python has no source of it
        return False


class _Samples(list[int]):
    """The lengths of the samples of all rows, in place of a mask of padding."""

    shard: SequenceShard | None = None  # of a row whose tokens are on several ranks


def _mask_by_samples(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """
    A hook that gives a layer, in place of the mask of padding that its mixer gets, the lengths of the samples: the
    layer keeps its arguments for the recomputation in the backward, before which no hook runs.
    """
    names = [*inspect.signature(type(layer).forward).parameters][1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    lengths = _sample_lengths(given)
    if lengths is None:
        return None
    masks = {name for name, value in given.items() if name.endswith("attention_mask") and _may_be_padding(value)}
    if not masks:
        raise ValueError(
            f"`{type(layer).__name__}` gets no mask of padding, in place of which it could be told of the samples of "
            "a row. Train it on padded batches, without packing."
        )
    args = tuple(lengths if name in masks else value for name, value in zip(names, args, strict=False))
    return args, {name: lengths if name in masks else value for name, value in kwargs.items()}


def _may_be_padding(mask: Any) -> bool:
    """Whether a mask is one of padding, as recurrent layers get, or none."""
    return mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)


def _sample_lengths(inputs: Mapping[str, Any]) -> _Samples | None:
    """The lengths of the samples of all rows, one after the other; `None` where nothing tells them."""
    words = inputs.get("attention_words")
    words = next(iter(words.values())) if isinstance(words, Mapping) else words
    if isinstance(words, SequenceShard):
        samples = _Samples()
        samples.shard = words
        return samples
    if words is not None:
        return _lengths_of_runs(words, lambda: decode_words(words).segment)
    seq_idx, bounds, positions = (inputs.get(name) for name in ("seq_idx", "cu_seq_lens_q", "position_ids"))
    if isinstance(seq_idx, Tensor):
        return _lengths_of_runs(seq_idx, lambda: seq_idx)
    if isinstance(bounds, Tensor):
        return _on_host(bounds, lambda: bounds.diff())
    masks = [value for name, value in inputs.items() if name.endswith("attention_mask") and value is not None]
    if isinstance(positions, Tensor) and positions.dim() == 2 and not any(map(_may_be_padding, masks)):
        return _lengths_of_runs(positions, lambda: masking_utils.find_packed_sequence_indices(positions))
    return None


def _lengths_of_runs(key: Tensor, samples: Callable[[], Tensor]) -> _Samples:
    """Lengths of the runs of equal numbers in each row of a tensor `[rows, length]`."""

    def of_runs() -> Tensor:
        begins = torch.ones_like(of_tokens := samples(), dtype=torch.bool)
        begins[:, 1:] = of_tokens[:, 1:] != of_tokens[:, :-1]
        ends = begins.flatten().nonzero()[:, 0]
        return torch.cat([ends, ends.new_tensor([begins.numel()])]).diff()

    return _on_host(key, of_runs)


def _on_host(key: Tensor, lengths: Callable[[], Tensor]) -> _Samples:
    """The lengths as numbers, read once for all layers that get the same tensor."""
    known = getattr(key, _LENGTHS, None)
    if known is None:
        known = _Samples(lengths().tolist())
        setattr(key, _LENGTHS, known)
    return known


def _run_by_samples(mixer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a mixer for the samples of its rows."""
    samples = kwargs.get("attention_mask")
    if not isinstance(samples, _Samples):
        return forward(*args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_ROW}
    kwargs["attention_mask"] = None  # padding is a sample of its own
    kwargs |= dict.fromkeys(_CACHES & kwargs.keys())  # what follows a row continues none of its samples
    compute, shard = functools.partial(in_batches, forward), samples.shard
    if shard is None:
        return compute(samples, (args, kwargs))
    has_backward = shard.has_backward and torch.is_grad_enabled()
    if shares_heads(mixer):
        return run_by_heads(forward, SharedHeads(shard.samples, has_backward), *args, **kwargs)
    return shard.samples.compute(compute, (args, kwargs), has_backward)
