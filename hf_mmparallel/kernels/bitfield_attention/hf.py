"""
`"bitfield"` as an attention function of transformers, for the forward argument `attention_words` of every layer.
A layer without words uses the mask that the model requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils, modeling_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..recurrent_layers import recurrent_kinds, starts_anew
from .attention import bitfield_attention, cast_like_autocast
from .builders import in_chunks
from .words import BitfieldMask, encode_words

NAME = "bitfield"
_CHUNKED = "_words_in_chunks"  # attribute of words

_NEITHER = (
    "`{}` is a layer of a causal language model that got neither `attention_words` nor an `attention_mask`, and "
    "whose `position_ids` never begin anew, so that nothing says which tokens are of one sample. Pass "
    "`attention_words` to the model (int64 `[batch, length]`, as a packing collator makes them), or an "
    "`attention_mask`. A model whose decoder layers keep arguments that they do "
    "not know from their attention (Nemotron, StableLM) can't be packed."
)


# Whether layers of language models attend to tokens of other ranks, which words alone can say.
_NEEDS_WORDS: ContextVar[bool] = ContextVar("needs_words", default=False)


@contextmanager
def needing_words(words: Any) -> Iterator[None]:
    """A forward, whose layers may not go without these words if ranks share them."""
    token = _NEEDS_WORDS.set(words is not None and not isinstance(words, Tensor))
    try:
        yield
    finally:
        _NEEDS_WORDS.reset(token)


@torch.compiler.assume_constant_result
def _needs_words() -> bool:
    return _NEEDS_WORDS.get()  # which the compiler can't trace


# The parts of a mask function of transformers that words and a window express.
_PLAIN_PARTS = {
    "causal_mask_function",
    "and_masks.<locals>.and_mask",
    "sliding_window_overlay.<locals>.inner_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
    "remap_positions_for_packed_sequence.<locals>.inner_mask",
}


def _parts_of(function: Callable) -> Iterator[Callable]:
    """Yields a mask function and the mask functions that it combines."""
    yield function
    for value in getclosurevars(function).nonlocals.values():
        for inner in value if isinstance(value, tuple) else (value,):
            if callable(inner) and not isinstance(inner, Tensor):
                yield from _parts_of(inner)


def register() -> None:
    """Registers `attn_implementation="bitfield"` with transformers."""
    modeling_utils.AttentionInterface.register(NAME, bitfield_attention_forward)
    masking_utils.AttentionMaskInterface.register(NAME, deferred_mask)


class UnbuiltMaskError(ValueError, AttributeError):
    """Raised for a model that computes with a [`DeferredMask`]."""


class DeferredMask:
    """A mask `(batch, 1, query_length, key_length)` that a model requested, built when it is first read."""

    ndim = 4

    # `arguments` are those of `transformers.masking_utils.sdpa_mask`; `causal` is `False` for a bidirectional mask.
    def __init__(self, shape: tuple[int, int, int, int], arguments: dict[str, Any], causal: bool):
        self.shape = shape
        self.arguments = arguments
        self.causal = causal
        self._built: dict[bool, Tensor | None] = {}
        self._words: dict[tuple[int, ...], tuple[Tensor | None, bool, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        raise UnbuiltMaskError(
            f'A mask under "{NAME}" attention is built by the layer that reads it and has no `{name}`; this model '
            'computes with its masks itself. Use `attn_implementation="sdpa"`.'
        )

    def _not_built(self, other: Any = None) -> Any:
        return self.__getattr__("values")

    def __getitem__(self, index: Any) -> Any:
        axes = zip(index, self.shape, strict=False) if isinstance(index, tuple) and len(index) == self.ndim else ()
        whole = [isinstance(part, slice) and part.indices(size) == (0, size, 1) for part, size in axes]
        return self if whole and all(whole) else self._not_built()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnbuiltMaskError(
            f'A layer gives a mask of "{NAME}" attention to `{getattr(function, "__name__", function)}`: some of the '
            'model\'s layers have another attention than the rest. Use `attn_implementation="sdpa"` for all of it.'
        )

    __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __rand__ = __invert__ = __eq__ = __ne__ = __lt__ = _not_built

    @property
    def is_default(self) -> bool:
        """Whether the mask is causal only by default, because no `attention_mask` was given."""
        return self.causal and self.arguments["attention_mask"] is None

    def words(
        self, seq_idx: Tensor | None, cu_seq_lens: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor | None, bool]:
        """
        Returns the words of rows whose samples are told apart by `seq_idx` `[batch, length]`, by the bounds
        `cu_seq_lens` of a single row, or by position ids `[batch, length]` that begin anew, and whether they are; no
        words where more than samples, causality and windows is in the mask.
        """
        if not self.is_default or self.shape[2] != self.shape[3]:
            return None, False
        given = seq_idx, cu_seq_lens, position_ids
        key = tuple(map(id, given))
        if key not in self._words:
            samples = self._samples(*given)
            has_words = samples is not None and self.chunk is None and self._parts <= _PLAIN_PARTS
            words = encode_words(samples.expand(self.shape[0], -1) + 1) if has_words else None  # type: ignore[union-attr]
            self._words[key] = words, samples is not None, given  # which keep their ids
        return self._words[key][:2]

    @property
    def _parts(self) -> set[str]:
        return {part.__qualname__ for part in _parts_of(self.arguments["mask_function"])}

    def _samples(
        self, seq_idx: Tensor | None, cu_seq_lens: Tensor | None, position_ids: Tensor | None
    ) -> Tensor | None:
        """Returns the sample of each token, from 0; `None` where nothing says it."""
        if seq_idx is not None:
            return seq_idx
        if cu_seq_lens is not None and self.shape[0] == 1:
            places = torch.arange(self.shape[2], device=cu_seq_lens.device)
            return torch.bucketize(places, cu_seq_lens[1:], right=True)[None]
        if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != self.shape[2]:
            return None
        return masking_utils.find_packed_sequence_indices(position_ids)

    @property
    def num_seen(self) -> int:
        """Tokens of the row up to the last query, including those in a cache."""
        return self.arguments["q_offset"] + self.shape[2]

    @property
    def chunk(self) -> int | None:
        """The length of the chunks of a layer with chunked attention."""
        chunk = getattr(self.arguments.get("config"), "attention_chunk_size", None)
        return chunk if chunk is not None and chunk == self.arguments.get("local_size") else None

    def build(self, may_skip: bool = False) -> Tensor | None:
        """Returns bool `[batch, 1, query_length, key_length]`; `None` with `may_skip` where none is needed."""
        if torch.compiler.is_compiling():  # a graph may not write to its inputs, and merges equal expressions
            return self._build(may_skip)
        # none is needed for the plain causal mask, or one that is not causal and hides no pair
        if may_skip not in self._built:
            self._built[may_skip] = self._build(may_skip)
        return self._built[may_skip]

    def contiguous(self) -> Tensor:
        """The mask as a contiguous tensor, which generation with a cache of fixed size requires."""
        mask = self.build()
        assert mask is not None
        return mask.contiguous()

    def _build(self, may_skip: bool) -> Tensor | None:
        arguments = dict(self.arguments)
        if not may_skip:
            arguments.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return masking_utils.sdpa_mask(**arguments)


# transformers requests the mask before any layer runs, without access to the words. It is built when a layer without
# words reads it: with words, no tensor that is quadratic in the length of the row is ever allocated.
def deferred_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | DeferredMask | None = None,
    allow_is_bidirectional_skip: bool | None = None,
    **arguments: Any,
) -> DeferredMask | Tensor | None:
    """The mask function of `"bitfield"`, with the arguments of `transformers.masking_utils.sdpa_mask`."""
    if isinstance(attention_mask, DeferredMask):
        # an enclosing model requested it already
        return attention_mask
    arguments.update(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        allow_is_bidirectional_skip=bool(allow_is_bidirectional_skip),
    )
    # only bidirectional masks have this argument
    mask = DeferredMask((batch_size, 1, q_length, kv_length), arguments, causal=allow_is_bidirectional_skip is None)
    # Caches of fixed size count their tokens in a tensor, in place, so that it changes before any layer reads the
    # mask.
    return mask.build() if isinstance(q_offset, Tensor) else mask


def bitfield_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | DeferredMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_words: Any = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    The attention function of `attn_implementation="bitfield"`; other arguments as in [`bitfield_attention`].

    Args:
        module (`torch.nn.Module`): The attention layer.
        attention_mask ([`DeferredMask`] or `torch.Tensor`, *optional*): The mask, if there are no words.
        is_causal (`bool`, *optional*): Whether a layer without mask and words is causal, according to the layer.
        sliding_window (`int`, *optional*): The layer's window in tokens.
        s_aux (`torch.Tensor` of shape `[heads]`, *optional*): The sinks' logits.
        attention_words (*optional*):
            int64 words `[batch, length]` of all tokens up to the last query, a `SequenceShard` for a sequence that is
            sharded over ranks, or a dict of these by layer type. Only the layers of language models use them.
        seq_idx (`torch.Tensor` of shape `[batch, length]`, *optional*):
            The sample of each token of packed rows without words, as other packing collators give it.
        cu_seq_lens_q (`torch.Tensor` of shape `[samples + 1]`, *optional*): The bounds of the samples of one such row.
            Without either, position ids that begin anew tell samples apart.

    Returns:
        `tuple[torch.Tensor, None]`: The output `[batch, query_length, heads, head_dim]`.

    Raises:
        `ValueError`: For arguments that the kernels do not support, for words that do not match the keys, and for a
            language model that trains with neither words nor a mask.
    """
    _refuse(module, dropout, attention_mask, kwargs)
    if attention_words is None and _needs_words() and _layer_kind(module) is not None:
        raise ValueError(_NEITHER.format(type(module).__name__))
    softcap = softcap or 0.0
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_words is None and isinstance(attention_mask, DeferredMask) and not torch.compiler.is_compiling():
        attention_words, is_told = attention_mask.words(seq_idx, cu_seq_lens_q, kwargs.get("position_ids"))
        if is_told:
            module.__dict__["samples_are_told_apart"] = True  # also in rows of one, whose position ids say nothing
    if attention_words is None or _layer_kind(module) is None:
        output = _attend_by_mask(module, query, key, value, attention_mask, scaling, is_causal, softcap, s_aux)
        return output, None
    words = _words_of_layer(module, attention_words, attention_mask)
    window = _window_of_layer(module, sliding_window, attention_mask)
    value_dim = value.shape[-1]
    value = nn.functional.pad(value, (0, key.shape[-1] - value_dim)) if value_dim < key.shape[-1] else value
    query, key, value = cast_like_autocast(query, key, value)
    settings: dict[str, Any] = {"scale": scaling, "softcap": softcap, "window": window, "sinks": s_aux}
    if isinstance(words, Tensor):
        seen = attention_mask.num_seen if isinstance(attention_mask, DeferredMask) else None
        output = bitfield_attention(query, key, value, _mask_of_words(words, query, key, window, seen), **settings)
    else:
        from .context_parallel import context_parallel_attention

        output = context_parallel_attention(query, key, value, words, **settings)
    return output[..., :value_dim].transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, dropout: float, mask: Tensor | DeferredMask | None, others: Mapping[str, Any]) -> None:
    """Raises `ValueError` for unsupported arguments."""
    name = type(module).__name__
    if dropout:
        raise ValueError(
            f'`dropout={dropout}` in `{name}`: "{NAME}" attention has no dropout, because its backward pass computes '
            "the weights again and would have to draw the same numbers. Set `attention_dropout` of the config to 0."
        )
    for argument in ("position_bias", "cache"):
        if others.get(argument) is not None:
            raise ValueError(
                f'`{name}` passes `{argument}`, which "{NAME}" attention does not know. Use '
                '`attn_implementation="sdpa"`.'
            )
    if isinstance(mask, Tensor) and mask.dtype == torch.int64:
        raise ValueError(
            f"`attention_mask` is an int64 tensor of shape {tuple(mask.shape)}; a mask is bool or additive. "
            "Mask words go into `attention_words`, of shape `[batch, length]`."
        )


def _layer_kind(module: nn.Module) -> str | None:
    """The type of a layer of a language model, `None` for others, which have no index into a key-value cache."""
    if hasattr(module, "layer_kind"):  # see `note_layer_kinds`
        return module.layer_kind
    # Neither `module.is_causal`, which is `False` in PaliGemma, nor lengths, which may agree by chance, distinguish a
    # tower's layers from those of the language model if a model passes the words to both.
    index, config = getattr(module, "layer_idx", None), getattr(module, "config", None)
    if index is None or not hasattr(config, "use_cache"):
        return None
    types = getattr(config, "layer_types", None)
    return types[index] if types else "full_attention"


def note_layer_kinds(layer: nn.Module) -> None:
    """Notes the type of a layer in its modules: `torch.compile` makes a graph for each index that a forward reads."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.__dict__["layer_kind"] = _layer_kind(module)


def _words_of_layer(module: nn.Module, words: Any, mask: Tensor | DeferredMask | None) -> Any:
    """The words of one layer, from a dict by layer type if there is one."""
    name = type(module).__name__
    if "CrossAttention" in name or getattr(module.config, "is_encoder_decoder", False):
        raise ValueError(
            f"`{name}` attends, or may attend, to another sequence than that of `attention_words`, whose keys have no "
            'words. Use `attn_implementation="sdpa"` for models with cross-attention.'
        )
    if not starts_anew(module) and recurrent_kinds(module.config):
        raise ValueError(
            f"`{name}` stands among layers that carry a state from one sample of a packed row to the next. Give the "
            "model itself to `PackingCollator`, or call `hf_mmparallel.start_anew_at_samples(model)`."
        )
    if isinstance(words, Mapping):
        kind = _layer_kind(module)
        if kind not in words:
            raise ValueError(
                f"`attention_words` has words for {', '.join(map(repr, words))}; layer {module.layer_idx} is of type "
                f"{kind!r}. Add words for it."
            )
        return words[kind]
    chunk = mask.chunk if isinstance(mask, DeferredMask) else None
    if chunk is None:
        return words
    return _in_chunks(words, chunk) if isinstance(words, Tensor) else words.in_chunks(chunk)


def _in_chunks(words: Tensor, chunk: int) -> Tensor:
    """The words of layers with chunks, made once for all that get the same words."""
    if torch.compiler.is_compiling():
        return in_chunks(words, chunk)
    known: dict[int, Tensor] = words.__dict__.setdefault(_CHUNKED, {})
    if chunk not in known:
        known[chunk] = in_chunks(words, chunk)
    return known[chunk]


def _window_of_layer(module: nn.Module, sliding_window: int | None, mask: Tensor | DeferredMask | None) -> int:
    """The window of a layer, which some models pass only to the mask function and not to their layers; 0 for none."""
    if not isinstance(mask, DeferredMask):
        return sliding_window or 0
    size = None if mask.chunk is not None else mask.arguments.get("local_size")
    looks_ahead = not mask.causal or (size is not None and mask.arguments.get("use_vmap"))  # the model extends it
    if looks_ahead and (sliding_window or size):
        raise ValueError(
            f"The window of {sliding_window or size} tokens in layer {module.layer_idx} reaches ahead too; with "
            '`attention_words` a window only bounds how far a token looks back. Use `attn_implementation="sdpa"`.'
        )
    return sliding_window or size or 0


def _mask_of_words(
    words: Tensor, query: Tensor, key: Tensor, window: int, num_seen: int | None
) -> Tensor | BitfieldMask:
    """The words unchanged, or the words of the last queries and of the keys that are still in a cache."""
    if words.dtype != torch.int64 or words.dim() != 2 or words.shape[0] != query.shape[0]:
        raise ValueError(
            f"`attention_words` is {words.dtype} of shape {tuple(words.shape)}; the batch has {query.shape[0]} rows. "
            "Give int64 words of shape `[batch, length]`."
        )
    num_words, num_queries, num_keys = words.shape[1], query.shape[2], key.shape[2]
    last_keys_only = window and num_keys < num_words == num_seen  # a cache drops keys that are outside of the window
    if num_words != num_keys and not last_keys_only:
        raise ValueError(
            f"`attention_words` covers {num_words} tokens; a layer has {num_queries} queries and {num_keys} keys. "
            "Give a word for each token up to the last query, with those in a cache that grows; a cache of fixed size "
            "takes no words."
        )
    if num_words == num_queries:
        return words
    positions = torch.arange(num_words, dtype=torch.int32, device=words.device).expand_as(words)
    of_queries, of_keys = slice(num_words - num_queries, None), slice(num_words - num_keys, None)
    return BitfieldMask(words[:, of_queries], positions[:, of_queries], words[:, of_keys], positions[:, of_keys])


def _attend_by_mask(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | DeferredMask | None,
    scaling: float,
    is_causal: bool | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of a layer without words, `[batch, query_length, heads, head_dim]`."""
    plain = not softcap and sinks is None
    if isinstance(mask, DeferredMask):
        # In training the words of packed rows may be lost on their way; generation of a model in train mode has none.
        is_lost = mask.is_default and not getattr(module, "samples_are_told_apart", False)
        if is_lost and module.training and torch.is_grad_enabled():
            raise ValueError(_NEITHER.format(type(module).__name__))
        is_causal = mask.causal
        mask = mask.build(may_skip=plain)
    elif mask is None and is_causal is None:
        encoder_decoder = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
        if getattr(module, "is_causal", False) or (_layer_kind(module) is not None and not encoder_decoder):
            raise ValueError(_NEITHER.format(type(module).__name__))
        is_causal = False
    if mask is not None:
        mask = mask.to(query.device)
        if mask.shape[-1] != key.shape[2]:
            raise ValueError(
                f"`{type(module).__name__}` attends to {key.shape[2]} keys, but its mask covers {mask.shape[-1]}: it "
                f'has keys of its own, which "{NAME}" attention does not know. Use `attn_implementation="sdpa"`.'
            )
    if plain:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, is_causal=is_causal)[0]
    if mask is None and is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril(key.shape[2] - query.shape[2])
    return _softmax_attention(query, key, value, mask, scaling, softcap, sinks)


def _softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with a soft cap or sinks and a dense mask, which PyTorch's function does not support."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return (weights[..., : value.shape[2]] @ value).transpose(1, 2).contiguous()


register()
