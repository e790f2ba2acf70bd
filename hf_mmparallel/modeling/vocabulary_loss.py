"""
Cross entropy of a head's logits that never exist whole: chunks of tokens, and on each rank of a tensor-parallel group
the words of its rows of the head (Shoeybi et al., Megatron-LM, 2019, section 3).

The gradients of a chunk are taken in the forward, while its logits are there. The head's product is then computed once
and needs no weights in the backward, which ZeRO-3 may have freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..plan import MAX_LOGITS
from . import tp_collectives

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
        """The same with weights in the dtype of the product."""
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
    """See [`cross_entropy`]."""

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
