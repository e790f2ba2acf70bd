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
from functools import cached_property
from types import EllipsisType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from ..plan import MAX_LOGITS
from . import tp_collectives
from .unowned import local

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
        in_chunks = group is not None or num_logits > MAX_LOGITS
        bias = None if layer.bias is None else local(layer.bias)
        return LazyLogits(input, Head(local(layer.weight), bias, group, _product_dtype(input), in_chunks))

    layer.forward = forward  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Cast:
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
        loss = cross_entropy(self.rows, self.head, steps, targets, dtype)
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


# Cross entropy of a head's logits that never exist whole: chunks of tokens, and on each rank of a tensor-parallel
# group the words of its rows of the head (Shoeybi et al., Megatron-LM, 2019, section 3).
#
# The gradients of a chunk are taken in the forward, while its logits are there. The head's product is then computed
# once and needs no weights in the backward, which ZeRO-3 may have freed.

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Head:
    """The last product of a model, or the share of it that a rank of a tensor-parallel group computes."""

    weight: Tensor  # `[words of this rank, hidden]`
    bias: Tensor | None
    group: dist.ProcessGroup | None  # whose ranks have as many words each, in the order of ranks
    dtype: torch.dtype  # of the product
    in_chunks: bool  # whether a loss is computed without all logits

    @cached_property
    def num_words(self) -> int:
        """Words of all ranks."""
        return self.weight.shape[0] * (1 if self.group is None else self.group.size())

    @property
    def first_word(self) -> int:
        return 0 if self.group is None else self.weight.shape[0] * self.group.rank()

    @property
    def cast(self) -> Head:
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return replace(self, weight=self.weight.to(self.dtype), bias=bias)

    def shared(self, rows: Tensor) -> Tensor:
        """Returns hidden states whose gradient is the sum of those of the ranks that share the words."""
        return rows if self.group is None else tp_collectives.SumGradients.apply(rows, self.group)

    def logits(self, rows: Tensor) -> Tensor:
        """Computes the logits of all ranks of hidden states `[..., hidden]`."""
        with torch.autocast(rows.device.type, enabled=False):
            head = self.cast
            own = functional.linear(self.shared(rows).to(self.dtype), head.weight, head.bias)
            return own if self.group is None else tp_collectives.GatherFeatures.apply(own, self.group)


@dataclass(frozen=True)
class Targets:
    """What `torch.nn.functional.cross_entropy` is asked for."""

    words: Tensor  # `[tokens]`
    ignore_index: int
    label_smoothing: float
    is_mean: bool  # over the tokens that are not ignored, otherwise the sum

    @cached_property
    def are_counted(self) -> Tensor:
        return self.words != self.ignore_index

    def scale(self, dtype: torch.dtype) -> Tensor:
        """Returns the factor of each token in the loss."""
        counted = self.are_counted.to(dtype)
        return counted / counted.sum().clamp(min=1.0) if self.is_mean else counted

    def chunk(self, tokens: slice) -> Targets:
        return Targets(self.words[tokens], self.ignore_index, self.label_smoothing, self.is_mean)


def cross_entropy(rows: Tensor, head: Head, steps: Sequence[Step], targets: Targets, dtype: torch.dtype) -> Tensor:
    """
    Computes the loss of hidden states `[tokens, hidden]`, whose logits pass through element-wise `steps`: a scalar, by
    sums in `dtype`. It has one backward.
    """
    rows, has_graph = head.shared(rows), torch.is_grad_enabled()
    return _CrossEntropy.apply(rows, head.weight, head.bias, head, tuple(steps), targets, dtype, has_graph)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        steps: tuple[Step, ...],
        targets: Targets,
        dtype: torch.dtype,
        has_graph: bool,
    ) -> Tensor:
        gradients = _Gradients((rows, weight, bias), [has_graph and needed for needed in ctx.needs_input_grad[:3]])
        with torch.autocast(rows.device.type, enabled=False):
            loss = _sum_chunks(rows, head.cast, steps, targets, dtype, gradients)
        ctx.gradients = gradients.finish()
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        assert ctx.gradients is not None, "the loss of lazy logits has one backward"
        gradients, ctx.gradients = ctx.gradients, None  # which nobody else holds, so that they need not be copied
        return (*(None if own is None else own.mul_(gradient) for own in gradients), *[None] * 5)


def _sum_chunks(
    rows: Tensor, head: Head, steps: tuple[Step, ...], targets: Targets, dtype: torch.dtype, gradients: _Gradients
) -> Tensor:
    """Adds up the losses of chunks of tokens, and their gradients."""
    scale, loss = targets.scale(dtype), rows.new_zeros((), dtype=dtype)
    size = max(1, MAX_LOGITS // head.weight.shape[0])
    for start in range(0, len(rows), size):
        tokens = slice(start, start + size)
        hidden = rows[tokens].to(head.dtype)
        outputs, back = _with_steps(functional.linear(hidden, head.weight, head.bias), steps, gradients.are_needed)
        logits = outputs.to(dtype, copy=bool(steps))  # which a step may need for its gradient
        kind = outputs.dtype
        del outputs
        loss += _chunk_loss(logits, head, targets.chunk(tokens), scale[tokens])
        if gradients.are_needed:
            gradient = logits.to(kind)
            del logits
            gradients.add(tokens, back(gradient), hidden, head.weight, is_only=len(rows) <= size)
    return torch.where(targets.are_counted.any(), loss, torch.nan) if targets.is_mean else loss


def _with_steps(product: Tensor, steps: tuple[Step, ...], needs_gradient: bool) -> tuple[Tensor, Step]:
    """Returns what steps make of a product, and the function from its gradient to that of the product."""
    if not steps:
        return product, lambda gradient: gradient
    outputs = product.requires_grad_(needs_gradient)
    with torch.set_grad_enabled(needs_gradient):
        for step in steps:
            outputs = step(outputs)
    return outputs.detach(), lambda gradient: torch.autograd.grad(outputs, product, gradient)[0]


def _chunk_loss(logits: Tensor, head: Head, targets: Targets, scale: Tensor) -> Tensor:
    """Returns the loss of the logits `[tokens, words of this rank]` of a chunk, and puts their gradient into them."""
    smoothing, row = targets.label_smoothing, torch.arange(len(logits), device=logits.device)
    word = targets.words - head.first_word
    is_elsewhere = ((word < 0) | (word >= logits.shape[1])) & (targets.words >= 0) & (targets.words < head.num_words)
    is_absent = is_elsewhere | ~targets.are_counted  # a word of no rank stays, and is refused as an index
    word = word.masked_fill(is_absent, 0)
    highest = logits.amax(1)
    target = logits.gather(1, word[:, None])[:, 0].masked_fill(is_absent, 0.0)
    total = logits.sum(1) if smoothing else torch.zeros_like(target)
    exponentials = logits.sub_(highest[:, None]).exp_()
    numbers = torch.stack([highest, exponentials.sum(1), target, total])
    of_ranks = numbers[None] if head.group is None else tp_collectives.gather(numbers, head.group)
    tops, sums, found, totals = of_ranks.unbind(1)
    top = tops.amax(0)
    log_sum = top + (sums * (tops - top).exp()).sum(0).log()
    losses = log_sum - (1 - smoothing) * found.sum(0) - smoothing / head.num_words * totals.sum(0)
    gradient = exponentials.mul_(((highest - log_sum).exp() * scale)[:, None])
    if smoothing:
        gradient.sub_((smoothing / head.num_words * scale)[:, None])
    gradient[row, word] -= ((1 - smoothing) * scale).masked_fill(is_absent, 0.0)
    return (losses * scale).masked_fill(~targets.are_counted, 0.0).sum()


class _Gradients:
    """The gradients of hidden states, weight and bias, which grow from chunk to chunk; `None` where none is needed."""

    def __init__(self, inputs: Sequence[Tensor | None], are_needed: Sequence[bool]):
        self.are_needed = any(are_needed)
        self._inputs = [tensor if needed else None for tensor, needed in zip(inputs, are_needed, strict=True)]
        rows, self._weight, self._bias = self._inputs
        self._rows = None if rows is None else torch.empty_like(rows)
        self._weight_sum: Tensor | None = None
        self._bias_sum: Tensor | None = None

    def add(self, tokens: slice, gradient: Tensor, hidden: Tensor, weight: Tensor, is_only: bool) -> None:
        """Adds those of a chunk, from the gradient of its product; sums are in float32 unless it is the only one."""
        dtype = gradient.dtype if is_only else torch.promote_types(gradient.dtype, torch.float32)
        if self._rows is not None:
            self._rows[tokens] = gradient @ weight
        if self._weight is not None:
            if self._weight_sum is None:
                self._weight_sum = (gradient.T @ hidden).to(dtype)
            elif dtype == gradient.dtype:
                self._weight_sum.addmm_(gradient.T, hidden)
            else:
                self._weight_sum.add_(gradient.T @ hidden)
        if self._bias is not None:
            of_bias = gradient.sum(0, dtype=dtype)
            self._bias_sum = of_bias if self._bias_sum is None else self._bias_sum.add_(of_bias)

    def finish(self) -> list[Tensor | None]:
        """Returns them, each in the dtype of its tensor."""
        result: list[Tensor | None] = []
        for tensor, total in zip(self._inputs, (self._rows, self._weight_sum, self._bias_sum), strict=True):
            if tensor is not None and total is None:  # there are no tokens
                total = torch.zeros_like(tensor)
            result.append(None if tensor is None or total is None else total.to(tensor.dtype))
        return result
