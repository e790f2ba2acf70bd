"""Choice of the kernels, and a cache of compiled masks; without autograd, callers define the gradient."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..._device import keep_values, known_values
from . import cpu
from .reference import reference_attention, reference_backward
from .words import BitfieldMask

BACKENDS = ("triton", "cpu", "reference")
_MOST_TOKENS = 2**15  # of a mask that the host compiles; with more it would take longer than the device
# All layers of a microbatch find the mask that the first layer compiled, by the storage of the words.
_RESULTS_KEPT = 64  # compiled masks, enough for all microbatches in flight

_results: OrderedDict[tuple, tuple[tuple[Tensor, ...], Any]] = OrderedDict()


def default_backend(query: Tensor) -> str:
    return "triton" if query.is_cuda else "cpu"


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BitfieldMask,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (float32, or float64) outside of autograd; arguments as in [`bitfield_attention`]."""
    backend = _backend_of(query, key, backend)
    if backend == "reference":
        with _plain(query):
            out, lse = reference_attention(query, key, value, mask, scale, softcap, window, sinks)
        return out, lse.to(lse_dtype(query))
    plan = _plan(backend, query, mask, window)
    with _plain(query):
        if backend == "cpu":
            return cpu.forward(query, key, value, plan, scale, softcap, sinks)
        from . import triton

        return triton.forward(query, key, value, plan, scale, softcap, sinks)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: BitfieldMask,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """
    Gradients of [`attention_forward`] for queries, keys, values and sinks (`None` without sinks).

    `out` and `lse` may result from more keys than `key` contains: the result is then the contribution of these keys.
    """
    backend = _backend_of(query, key, backend)
    if backend == "reference":
        with _plain(query):
            return reference_backward(grad_out, query, key, value, out, lse, mask, scale, softcap, window, sinks)
    plan = _plan(backend, query, mask, window)
    with _plain(query):
        if backend == "cpu":
            return cpu.backward(grad_out, query, key, value, out, lse, plan, scale, softcap, sinks)
        from . import triton

        return triton.backward(grad_out, query, key, value, out, lse, plan, scale, softcap, sinks)


def _backend_of(query: Tensor, key: Tensor, backend: str | None) -> str:
    """The backend of a call; "reference" if there is no pair of a query and a key, so that no kernel is launched."""
    if not (query.numel() and key.numel()):
        return "reference"
    return default_backend(query) if backend is None else backend


@contextmanager
def _plain(query: Tensor) -> Iterator[None]:
    """Disables autograd, and autocast, which would round products inside an operator."""
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        yield


def lse_dtype(query: Tensor) -> torch.dtype:
    """The dtype of the log-sum-exp."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def whole_rows(words: Tensor) -> BitfieldMask:
    """The mask of whole rows in their original order; the same tensors are returned for the same words."""
    return _once(("rows",), (words,), lambda: _rows_of(words))


def _rows_of(words: Tensor) -> BitfieldMask:
    """The mask of whole rows, whose values are known if those of the words are."""
    mask, on_host = BitfieldMask.from_words(words), known_values(words)
    if on_host is not None:
        keep_values(mask.tensors, BitfieldMask.from_words(on_host).tensors)
    return mask


def _plan(backend: str, query: Tensor, mask: BitfieldMask, window: int) -> Any:
    """The mask, compiled for a backend."""
    if backend == "cpu":
        return _once(("cpu", window), mask.tensors, lambda: cpu.compile_mask(mask, window))
    from .mask_plan import compile_mask, programs_at_once
    from .tuning import plan_blocks

    blocks = plan_blocks(_capability(query.device), query.shape[-1], wide=query.element_size() > 2)
    num_heads = query.shape[1]

    def compile_known() -> Any:
        on_host = [known_values(tensor) for tensor in mask.tensors]
        if mask.key_words.numel() > _MOST_TOKENS or any(values is None for values in on_host):
            return compile_mask(mask, window, *blocks, num_heads=num_heads)
        # On the device this waits several times, for sizes that follow from values.
        programs = programs_at_once(query.device)
        plan = compile_mask(BitfieldMask(*on_host), window, *blocks, num_heads=num_heads, num_programs=programs)
        return plan.to(query.device)

    return _once(("triton", window, *blocks, num_heads), mask.tensors, compile_known)


@cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _once(how: tuple, tensors: tuple[Tensor, ...], build: Callable[[], Any]) -> Any:
    """Returns the cached result of `build` for these tensors."""
    if any(tensor.is_inference() for tensor in tensors):  # they have no version counter
        return build()
    key = (*how, *((t.data_ptr(), t.device, t.shape, t.stride(), t._version) for t in tensors))
    if key in _results:
        _results.move_to_end(key)
    else:
        # references to the tensors, so that their addresses are not reused
        _results[key] = (tensors, build())
        while len(_results) > _RESULTS_KEPT:
            _results.popitem(last=False)
    return _results[key][1]
