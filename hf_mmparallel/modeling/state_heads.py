"""Which layers with a state have heads that ranks can share, which is tried out with each class of mixers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..kernels.bitfield_attention.builders import causal_words, segments_of_lengths
from ..kernels.recurrent_layers import recurrent_mixers
from ..kernels.shared_heads import ScanCall, SharedHeads, run_by_heads, share_heads
from ..kernels.shared_samples import SharedSamples
from .shared_tokens import with_values

_LENGTHS = (4, 5)  # of two samples
_ORDER = (4, 1, 7, 0, 2, 8, 6, 5, 3)  # of their tokens
_ROUNDING = 1e-3  # over the difference between one sample and two
_WIDTH = "_width_of_heads"  # of a mixer that has been tried


def state_widths(model: nn.Module, layers: nn.ModuleList, hidden_size: int) -> tuple[int | None, ...]:
    """
    Returns how many values of a token the heads of each layer take and give; `None` for a layer whose heads ranks
    can't share, which needs whole samples if it carries a state; empty if no layer has such heads.
    """
    of_class: dict[type[nn.Module], int | None] = {}
    known: dict[int, int | None] = {}
    for layer, _, mixers in recurrent_mixers(model):
        for mixer in mixers:
            if type(mixer) not in of_class:
                if _WIDTH not in mixer.__dict__:
                    mixer.__dict__[_WIDTH] = _width_of(mixer, hidden_size)
                of_class[type(mixer)] = mixer.__dict__[_WIDTH]
        widths = [of_class[type(mixer)] for mixer in mixers]
        known[id(layer)] = None if not mixers or None in widths else sum(filter(None, widths))
    result = tuple(known.get(id(layer)) for layer in layers)
    return () if set(result) <= {None} else result


def share_state_heads(model: nn.Module, layers: nn.ModuleList, widths: tuple[int | None, ...]) -> None:
    """Lets ranks that share a row share the heads of layers with such widths, in place."""
    shared = {id(layer) for layer, width in zip(layers, widths, strict=bool(widths)) if width is not None}
    for layer, _, mixers in recurrent_mixers(model):
        for mixer in mixers if id(layer) in shared else ():
            share_heads(mixer)


@dataclass(frozen=True, eq=False)
class _Tried(SharedHeads):
    """Shared heads, by the functions of transformers in place of kernels, which the CPU may not have."""

    widths: list[int] = field(default_factory=list)  # of scans

    def call(self, name: str, function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        return super().call(name, _without_kernels(function), args, kwargs)

    def scan(self, call: ScanCall) -> Tensor:
        output = super().scan(call)
        self.widths.append(sum(value[0].numel() for value in (*call.rows.values(), output)))
        return output


class _Whole(_Tried):
    def call(self, name: str, function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        return _without_kernels(function)(*args, **kwargs)


def _without_kernels(function: Any) -> Callable[..., Any]:
    """The code of transformers that a function runs where it finds no kernel."""
    if not isinstance(function, FunctionType):  # a module of the library of kernels, around the function
        values = inspect.getclosurevars(type(function).forward).nonlocals.values()
        function = next(value for value in values if isinstance(value, FunctionType))
    return inspect.getclosurevars(function).nonlocals["torch_function"]


@torch.no_grad()
def _width_of(mixer: nn.Module, hidden_size: int) -> int | None:
    """Values of a token that the heads of a mixer take and give; `None` if samples in a row would mix."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tried = with_values(mixer).eval()
        for parent in [*tried.modules()]:
            for name, part in parent.named_children():
                if isinstance(part, nn.Linear) and type(part) is not nn.Linear:  # quantized, which needs a device
                    plain = nn.Linear(part.in_features, part.out_features, part.bias is not None, device="meta")
                    setattr(parent, name, with_values(plain))
        for buffer in tried.buffers():
            if buffer.is_floating_point():
                buffer.uniform_()
        row, order = torch.rand(sum(_LENGTHS), hidden_size), torch.tensor([_ORDER])
    words = causal_words(segments_of_lengths(_LENGTHS, len(row)))
    samples = SharedSamples(words, order, 0, None)
    try:
        share_heads(tried)
        whole, shared = _Whole(samples, False), _Tried(samples, False)
        padded = run_by_heads(tried, whole, pad_sequence([row, *row.split(_LENGTHS)], batch_first=True))
        mixed = run_by_heads(tried, shared, row[None, order[0]])[0]
        expected = torch.cat([sample[:length] for sample, length in zip(padded[1:], _LENGTHS, strict=True)])
        wrong, difference = (mixed - expected[order[0]]).norm(), (padded[0] - expected).norm()
    except Exception:  # a mixer may raise anything, and return more than its output
        return None
    return sum(shared.widths) if wrong <= _ROUNDING * difference else None
