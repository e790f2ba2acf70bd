"""
Logits that are computed when something reads their values, and for a loss those of target tokens alone, in chunks if
there are many: the logits of all tokens and words are the largest tensor of a step otherwise.

A model's own forward and loss function see a tensor. It notes element-wise operations with numbers and what leaves the
words of a token together, such as a scale, a soft cap, a cast, `view(-1, vocabulary)` and `logits[:, :-1]`, and
answers `torch.nn.functional.cross_entropy` without logits that exist whole. Any other operation computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from . import vocabulary_loss
from .dtensors import local
from .vocabulary_loss import Head, Step, Targets

_METADATA = {
    *("shape", "size", "dtype", "device", "ndim", "dim", "numel", "nelement", "requires_grad", "layout"),
    *("is_floating_point", "is_complex", "is_cuda", "is_cpu", "is_meta", "is_contiguous", "stride", "__len__"),
}
_WITH_NUMBERS = {"mul", "div", "true_divide", "add", "sub", "__rsub__", "neg", "tanh"}
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"}


def return_lazy_logits(layer: nn.Linear, group: dist.ProcessGroup | None = None) -> None:
    """
    Lets the head of a model return lazy logits, in place. The loss of too many is computed in chunks, and that of a
    group, whose ranks each hold the weights of as many words, by its ranks.
    """

    def forward(input: Tensor) -> Tensor:
        if group is None and isinstance(layer.weight, DTensor):  # which transformers has cut
            return functional.linear(input, layer.weight, layer.bias)
        num_logits = input.shape[:-1].numel() * layer.out_features
        in_chunks = group is not None or num_logits > vocabulary_loss.MAX_LOGITS
        bias = None if layer.bias is None else local(layer.bias)
        return LazyLogits(input, Head(local(layer.weight), bias, group, _product_dtype(input), in_chunks))

    layer.forward = forward  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Cast:
    """A cast of logits."""

    dtype: torch.dtype

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.to(self.dtype)

    @property
    def is_wide(self) -> bool:
        return self.dtype in (torch.float32, torch.float64)


def _product_dtype(input: Tensor) -> torch.dtype:
    """Returns the dtype in which a linear layer multiplies now."""
    kind = input.device.type
    is_cast = torch.is_autocast_enabled(kind) and input.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else input.dtype


def whole_logits(logits: Tensor) -> Tensor:
    """Returns the logits themselves. Collective over the tp group of lazy ones."""
    return logits.computed() if isinstance(logits, LazyLogits) else logits


def of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the logits of some tokens, by their indices `[tokens]` among all, each one once; lazy if they are."""
    if isinstance(logits, LazyLogits) and logits._computed is None:
        return logits._like(rows=logits.rows.flatten(0, -2).index_select(0, tokens))
    return whole_logits(logits).flatten(0, -2).index_select(0, tokens)


def source_of(tensor: Tensor) -> Tensor:
    """Returns the hidden states of lazy logits, which are computed from these alone, and any other tensor itself."""
    return tensor.rows if isinstance(tensor, LazyLogits) else tensor


class LazyLogits(Tensor):
    """
    The logits `[..., words]` of hidden states.

    An operation in place changes the logits of this object, not those of others that were made from it.
    """

    rows: Tensor  # `[..., hidden]`
    head: Head
    steps: tuple[Step, ...]  # element-wise operations on the product, in order
    _computed: Tensor | None  # the logits, once something has read them

    def __new__(cls, rows: Tensor, head: Head, steps: Sequence[Step] = (), dtype: torch.dtype | None = None):
        """`dtype` is that of the last step, by default that of the product."""
        inputs = [rows, head.weight, *([] if head.bias is None else [head.bias])]
        result = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            (*rows.shape[:-1], head.num_words),
            dtype=dtype or head.dtype,
            device=rows.device,
            requires_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs),
        )
        result.rows, result.head, result.steps, result._computed = rows, head, tuple(steps), None
        return result

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ):
        kwargs = dict(kwargs or {})
        if "input" in kwargs and not args:
            args = (kwargs.pop("input"),)
        logits = args[0] if args else None
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if isinstance(logits, LazyLogits) and logits._computed is None:
            if name in _METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            answer = logits._answer(func, name, args[1:], kwargs)
            if answer is not None:
                return answer
        whole: Any = tree_map_only(LazyLogits, LazyLogits.computed, (tuple(args), kwargs))
        return func(*whole[0], **whole[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        raise AssertionError(f"{func} reads lazy logits that nothing has computed")

    def computed(self) -> Tensor:
        """Returns the logits as a tensor of its own."""
        if self._computed is None:
            with torch.set_grad_enabled(self.requires_grad):
                logits = self.head.logits(self.rows)
                for step in self.steps:
                    logits = step(logits)
            self._computed = logits
        return self._computed

    def _answer(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a function of these logits that needs no values of them; `None` for another one."""
        if name == "detach":
            bias = None if self.head.bias is None else self.head.bias.detach()
            head = replace(self.head, weight=self.head.weight.detach(), bias=bias)
            return self._like(rows=self.rows.detach(), head=head)
        if name in _WITH_NUMBERS and not kwargs and all(type(value) in (int, float) for value in args):
            return self._like(step=lambda tensor: func(tensor, *args))
        if name in _CASTS or name == "to":
            return self._cast(name, args, kwargs)
        if name in _RESHAPES:
            return self._reshaped(func, args, kwargs)
        if name == "__getitem__" and _keeps_words(args[0], self.ndim):
            return self._like(rows=self.rows[args[0]])
        if func is functional.cross_entropy and self.head.in_chunks:
            return self._cross_entropy(*args, **kwargs)
        return None

    def _like(
        self,
        rows: Tensor | None = None,
        head: Head | None = None,
        step: Step | None = None,
        dtype: torch.dtype | None = None,
    ) -> LazyLogits:
        """Makes logits of which something differs."""
        steps = self.steps if step is None else (*self.steps, step)
        return LazyLogits(self.rows if rows is None else rows, head or self.head, steps, dtype or self.dtype)

    def _cast(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LazyLogits | None:
        """Casts to a floating dtype, or moves to the device where the logits are."""
        options = [*args, *kwargs.values()]
        wanted: Any = None
        if name in _CASTS and not options:
            wanted = _CASTS[name]
        elif name == "to" and len(options) == 1 and kwargs.keys() <= {"dtype", "device"}:
            wanted = options[0]
        if wanted in (self.dtype, self.device):
            return self
        if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
            return None
        return self._like(step=_Cast(wanted), dtype=wanted)

    def _reshaped(self, func: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Applies a function to the shape, if the words of a token stay together."""
        shape = torch.empty(self.shape, dtype=self.dtype, device="meta")
        result = func(shape, *args, **kwargs)
        if result.dtype != self.dtype or result.shape[-1:] != self.shape[-1:]:
            return None
        return self._like(rows=self.rows.reshape(*result.shape[:-1], self.rows.shape[-1]))

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        """See [`torch.nn.functional.cross_entropy`]; only what sums over tokens."""
        is_other = weight is not None or size_average is not None or reduce is not None or reduction == "none"
        if is_other or self.ndim != 2 or target.ndim != 1 or target.is_floating_point():
            return None
        steps, dtype = list(self.steps), torch.promote_types(self.dtype, torch.float32)
        if steps and isinstance(steps[-1], _Cast) and steps[-1].is_wide:
            steps.pop()  # the loss casts a chunk itself
        targets = Targets(target, ignore_index, label_smoothing, reduction == "mean")
        loss = vocabulary_loss.cross_entropy(self.rows, self.head, steps, targets, dtype)
        return loss if torch.is_autocast_enabled(self.device.type) else loss.to(self.dtype)


def _keeps_words(index: Any, num_dims: int) -> bool:
    """Returns whether an index selects tokens only, with all their words."""
    entries = index if isinstance(index, tuple) else (index,)
    used = 0
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, (int, slice, EllipsisType, Tensor)):
            return False
        if isinstance(entry, Tensor):
            used += entry.ndim if entry.dtype == torch.bool else 1
        else:
            used += not isinstance(entry, EllipsisType)
    if used < num_dims and not any(isinstance(entry, EllipsisType) for entry in entries[:-1]):
        return True
    return isinstance(entries[-1], slice) and entries[-1] == slice(None)
