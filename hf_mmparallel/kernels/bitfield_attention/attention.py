"""
Bitfield attention for models, as operators with a gradient.
They take only tensors and numbers, because `torch.compile` and activation checkpointing handle nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import BACKENDS, attention_backward, attention_forward, default_backend, lse_dtype, whole_rows
from .words import BitfieldMask

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def bitfield_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BitfieldMask | Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """
    Softmax attention of queries over the keys that are visible according to mask words.

    Args:
        query (`torch.Tensor` of shape `[batch, heads, query_length, head_dim]`): Queries.
        key, value (`torch.Tensor` of shape `[batch, kv_heads, key_length, head_dim]`): `kv_heads` divides `heads`.
        mask (`BitfieldMask` or `torch.Tensor` of shape `[batch, length]`):
            The mask, or the int64 mask words of rows in their original order. Pass the same tensors to all layers: a
            mask is compiled only once unless it is modified.
        scale (`float`, *optional*): Factor of the scores; `head_dim ** -0.5` by default.
        softcap (`float`, *optional*, defaults to 0.0): Scores become `softcap * tanh(score / softcap)`; 0 for none.
        window (`int`, *optional*, defaults to 0): The layer's sliding window in tokens; 0 for none.
        sinks (`torch.Tensor` of shape `[heads]`, *optional*): A logit that takes part in the softmax without a value.
        dropout (`float`, *optional*, defaults to 0.0): Must be 0.
        return_lse (`bool`, *optional*, defaults to `False`): Also return the log-sum-exp, which has no gradient.
        backend (`str`, *optional*):
            `"triton"`, `"cpu"` or `"reference"` (dense, for tests); by default Triton on a GPU and `"cpu"` elsewhere.

    Returns:
        `torch.Tensor` or `tuple[torch.Tensor, torch.Tensor]`: The output, of the shape of `query`; the log-sum-exp
        `[batch, heads, query_length]`, natural, with the sink. A query without visible keys gets 0 and `-inf` (the
        sink's logit if there are sinks), and contributes no gradient.

    Raises:
        `ValueError`: If shapes, dtypes or devices do not match, or dropout is not 0.
    """
    if dropout:
        raise ValueError(
            f"`dropout={dropout}`: bitfield attention has no dropout on its weights, since they are never stored and "
            "its backward pass is deterministic. Set `attention_dropout=0.0` in the model's config."
        )
    tensors = mask.tensors if isinstance(mask, BitfieldMask) else (mask, None, None, None)
    backend = default_backend(query) if backend is None else backend
    _check_inputs(query, key, value, tensors, softcap, window, sinks, backend)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    out, lse = _attend(query, key, value, *tensors, sinks, scale, float(softcap), int(window), backend)
    return (out, lse) if return_lse else out


def cast_like_autocast(*tensors: Tensor) -> list[Tensor]:
    """Casts inputs as autocast does for PyTorch's attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


def _mask_of(words: Tensor, *others: Tensor | None) -> BitfieldMask:
    """The mask of an operator's tensors; without positions and keys, that of whole rows in their original order."""
    return whole_rows(words) if others[0] is None else BitfieldMask(words, *others)  # type: ignore[arg-type]


@torch.library.custom_op(
    "hf_mmparallel::bitfield_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor query_words, Tensor? query_positions, Tensor? key_words, "
    "Tensor? key_positions, Tensor? sinks, float scale, float softcap, int window, str backend) -> (Tensor, Tensor)",
)
def _attend(
    query, key, value, query_words, query_positions, key_words, key_positions, sinks, scale, softcap, window, backend
):
    mask = _mask_of(query_words, query_positions, key_words, key_positions)
    out, lse = attention_forward(query, key, value, mask, scale, softcap, window, sinks, backend)
    return _laid_out_like(out, query), lse.contiguous()


@torch.library.custom_op(
    "hf_mmparallel::bitfield_attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor query_words, "
    "Tensor? query_positions, Tensor? key_words, Tensor? key_positions, Tensor? sinks, float scale, float softcap, "
    "int window, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attend_backward(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    query_words,
    query_positions,
    key_words,
    key_positions,
    sinks,
    scale,
    softcap,
    window,
    backend,
):
    mask = _mask_of(query_words, query_positions, key_words, key_positions)
    *grads, grad_sinks = attention_backward(
        grad_out, query, key, value, out, lse, mask, scale, softcap, window, sinks, backend
    )
    grads = [_laid_out_like(grad, tensor) for grad, tensor in zip(grads, (query, key, value), strict=True)]
    return (*grads, query.new_empty(0) if grad_sinks is None else grad_sinks)


@_attend.register_fake
def _(query, key, value, *others):
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=lse_dtype(query))


@_attend_backward.register_fake
def _(grad_out, query, key, value, out, lse, *others):
    sinks = others[4]
    grads = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    return (*grads, query.new_empty(0) if sinks is None else torch.empty_like(sinks))


def _setup_context(ctx, inputs, output):
    *tensors, scale, softcap, window, backend = inputs
    out, lse = output
    ctx.save_for_backward(*tensors, out, lse)
    ctx.options = (scale, softcap, window, backend)
    ctx.mark_non_differentiable(lse)


def _differentiate(ctx, grad_out, _):
    query, key, value, *mask, sinks, out, lse = ctx.saved_tensors
    grads = _attend_backward(grad_out, query, key, value, out, lse, *mask, sinks, *ctx.options)
    return (*grads[:3], *[None] * 4, None if sinks is None else grads[3], *[None] * 4)


def _refuse_second_derivatives(ctx, *_):
    raise NotImplementedError(
        "The gradient of bitfield attention was itself differentiated, and it has no second derivative. Use "
        '`attn_implementation="eager"` for what needs one.'
    )


_attend.register_autograd(_differentiate, setup_context=_setup_context)
_attend_backward.register_autograd(_refuse_second_derivatives, setup_context=lambda ctx, inputs, output: None)


def _laid_out_like(result: Tensor, tensor: Tensor) -> Tensor:
    """`result` with the strides of the fake operator's output."""
    promised = torch.empty_like(tensor)
    return result if result.stride() == promised.stride() else promised.copy_(result)


def _check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: tuple[Tensor | None, ...],
    softcap: float,
    window: int,
    sinks: Tensor | None,
    backend: str,
) -> None:
    """Raises `ValueError` for inconsistent arguments."""
    check_states(query, key, value, backend)
    batch, heads, query_length, _ = query.shape
    words, query_positions, key_words, key_positions = mask
    wanted = [("query words", words, torch.int64, query_length)]
    if key_words is None:
        wanted.append(("words", words, torch.int64, key.shape[2]))
    else:
        wanted.append(("query positions", query_positions, torch.int32, query_length))
        wanted.append(("key words", key_words, torch.int64, key.shape[2]))
        wanted.append(("key positions", key_positions, torch.int32, key.shape[2]))
    for name, tensor, dtype, length in wanted:
        if tensor is None or tensor.dtype != dtype or tensor.shape != (batch, length) or tensor.device != query.device:
            raise ValueError(
                f"The {name} of the mask are {_described(tensor)}; these queries and keys need {dtype} "
                f"[{batch}, {length}] on {query.device}. Pass the words of the whole rows, or a `BitfieldMask` with "
                "those of queries and of keys."
            )
    if window < 0 or softcap < 0:
        raise ValueError(f"`window={window}` and `softcap={softcap}` must not be negative. Use 0 for none.")
    if sinks is not None and (sinks.shape != (heads,) or sinks.device != query.device):
        raise ValueError(
            f"`sinks` is {_described(sinks)}; there are {heads} query heads on {query.device}. "
            "Pass one logit per head."
        )


def check_states(query: Tensor, key: Tensor, value: Tensor, backend: str) -> None:
    """Raises `ValueError` unless queries, keys and values, shaped as above, fit each other and the backend."""
    if query.ndim != 4 or key.ndim != 4 or value.shape != key.shape:
        raise ValueError(
            f"Queries {tuple(query.shape)}, keys {tuple(key.shape)} and values {tuple(value.shape)} must be "
            "[batch, heads, length, head_dim], keys and values alike. Pad values whose head_dim is smaller."
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or query.shape[1] % max(key.shape[1], 1):
        raise ValueError(
            f"Queries {tuple(query.shape)} don't match keys {tuple(key.shape)}: batch and head_dim must agree, and "
            f"the {key.shape[1]} heads of keys must divide the {query.shape[1]} of queries."
        )
    if backend not in BACKENDS:
        raise ValueError(f"`backend={backend!r}` is not one of {', '.join(map(repr, BACKENDS))}. Leave it out.")
    if len({query.dtype, key.dtype, value.dtype}) > 1 or len({query.device, key.device, value.device}) > 1:
        raise ValueError(
            f"Queries, keys and values are {_described(query)}, {_described(key)} and {_described(value)}. "
            "Bring them to one dtype and one device."
        )
    if query.dtype not in DTYPES and not (query.dtype == torch.float64 and backend != "triton"):
        raise ValueError(f"Bitfield attention has no kernel for {query.dtype}. Use float32, float16 or bfloat16.")
    if backend == "triton" and query.dtype == torch.bfloat16 and not query.is_cuda:
        raise ValueError(
            '`backend="triton"` on a CPU is Triton\'s interpreter, which multiplies bfloat16 wrongly. Use float32 or '
            "float16 to test kernels, or leave `backend` out."
        )
    if backend == "triton" and query.shape[3] > MAX_HEAD_DIM:
        raise ValueError(
            f"The Triton kernels support a head_dim up to {MAX_HEAD_DIM}, but it is {query.shape[3]}. Use "
            '`attn_implementation="sdpa"`.'
        )
    if backend == "cpu" and query.device.type != "cpu":
        raise ValueError(f"The CPU path does not support tensors on {query.device}. Use a CUDA device or a CPU.")


def _described(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
