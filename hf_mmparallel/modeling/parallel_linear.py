"""
Linear layers and embeddings that the ranks of a tensor-parallel group share, on plain tensors: column- and
row-parallel products, and lookups of the words of each rank (Shoeybi et al., Megatron-LM, 2019, section 3).

transformers computes these layers on `DTensor`s, which derive the layout of each operation anew for rows of another
length. That takes longer than the products, and batches of multimodal samples have another length in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .lazy_logits import return_lazy_logits
from .products import as_multiplied, multiply
from .tp_collectives import Sum, SumGradients, SumGradientsInGraph, sum_in_graph, sum_rows, summed_product
from .unowned import local

# The columns of a matrix are the features that it returns; its rows are those that it takes.
_ROW_STYLES = ("rowwise",)
LOOKUP_STYLE = "embedding_rowwise"
HEAD_STYLES = ("colwise_gather_output", "colwise_rep")
_COLUMN_STYLES = ("colwise", *HEAD_STYLES)


def has_plain_form(layer: nn.Module, style: str, tp_size: int) -> TypeGuard[nn.Linear | nn.Embedding]:
    """Returns whether `use_plain_tensors` computes a layer of this style: one that all ranks cut alike."""
    if isinstance(layer, nn.Embedding):
        return style == LOOKUP_STYLE and layer.num_embeddings % tp_size == 0
    if type(layer) is not nn.Linear:  # one that is quantized computes its product in another way
        return False
    if style in _COLUMN_STYLES:
        return layer.out_features % tp_size == 0
    return style in _ROW_STYLES and layer.in_features % tp_size == 0


class SharedInput:
    """
    What column-parallel layers of one parent read, such as the projections of an attention layer: the gradients that
    they have for the same input are added up before the ranks sum them, once.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.num_readers = 0
        self._input: Tensor | None = None
        self._copy: Tensor | None = None
        self._num_left = 0  # readers that have not asked for it

    def __call__(self, input: Tensor) -> Tensor:
        """Returns the input with gradients that are summed over the ranks."""
        if self._copy is None or self._input is not input:
            self._input, self._copy, self._num_left = input, SumGradients.apply(input, self.group), self.num_readers
        copy = self._copy
        self._num_left -= 1
        if not self._num_left:
            self._input = self._copy = None  # so that their memory is free when the backward has used them
        return copy  # type: ignore[return-value]


def use_plain_tensors(
    layer: nn.Linear | nn.Embedding,
    style: str,
    mesh: DeviceMesh,
    shared: SharedInput | None = None,
    block: nn.Module | None = None,
) -> None:
    """
    Lets a layer whose parameters are cut compute on plain tensors, in place. A column-parallel one takes all features,
    which are `shared` by those of its parent, and returns those of this rank, or for the styles that gather, which are
    those of a head, lazy ones of all ranks; a row-parallel one takes those of this rank and returns all. An embedding
    takes and returns all.

    In a `block` with split rows (see `sequence_parallel`) the block gathers them, and a row-parallel layer returns
    those of this rank.
    """
    group = mesh.get_group()
    if isinstance(layer, nn.Embedding):
        layer.forward = _vocabulary_parallel(layer, group)  # type: ignore[method-assign]
        return
    layer.graph_inputs = None  # type: ignore[assignment]
    if style in _ROW_STYLES:
        layer.forward = _row_parallel(layer, group, block)  # type: ignore[method-assign]
    elif style == "colwise":
        shared = None if block is not None else shared or SharedInput(group)
        layer.forward = _column_parallel(layer, shared)  # type: ignore[method-assign]
    else:
        return_lazy_logits(layer, group)


@contextmanager
def shards_as_inputs(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Takes the shards of linear layers out of their `DTensor`s for the graphs that run in this context."""
    for layer in layers:
        layer.graph_inputs = None  # type: ignore[assignment]
        layer.graph_inputs = _shards(layer)  # type: ignore[assignment, arg-type]
    try:
        yield
    finally:
        for layer in layers:
            layer.graph_inputs = None  # type: ignore[assignment]


def _shards(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    given: Any = layer.graph_inputs
    if given is not None:
        return given
    return local(layer.weight), None if layer.bias is None else local(layer.bias)


def _product(layer: nn.Linear) -> Callable[..., Tensor]:
    return getattr(layer, "multiply", None) or partial(multiply, layer=layer)


def _column_parallel(layer: nn.Linear, shared: SharedInput | None) -> Callable[[Tensor], Tensor]:
    if shared is None:
        return lambda input: _product(layer)(input, *_shards(layer))
    name = shared.group.group_name
    shared.num_readers += 1

    def forward(input: Tensor) -> Tensor:
        features = input
        if input.requires_grad and torch.compiler.is_compiling():
            features = SumGradientsInGraph.apply(input, name)
        elif input.requires_grad and torch.is_grad_enabled():
            features = shared(input)
        return _product(layer)(features, *_shards(layer))

    return forward


def _row_parallel(layer: nn.Linear, group: dist.ProcessGroup, block: nn.Module | None) -> Callable[[Tensor], Tensor]:
    name = group.group_name

    def forward(input: Tensor) -> Tensor:
        weight, bias = _shards(layer)
        if weight.dim() == 2 and input.shape[-1] != layer.in_features // group.size():
            raise ValueError(
                f"A `{type(layer).__name__}` gets inputs of width {input.shape[-1]}, but each of the "
                f"{group.size()} ranks has {layer.in_features // group.size()} of its {layer.in_features} inputs: the "
                "model's tensor-parallel plan does not cut the layers before it. Use `tp_size=1` for its module."
            )
        is_compiled, keeps_output = torch.compiler.is_compiling(), getattr(layer, "keeps_output", False)
        if keeps_output and not is_compiled and not hasattr(layer, "multiply"):
            weight = as_multiplied(weight)
            output = summed_product(as_multiplied(input).to(weight.dtype), weight, name, block is not None)
        else:
            stays = is_compiled or keeps_output or hasattr(layer, "float8")  # a view of an autograd function
            output = sum_products(_product(layer)(input, weight, None), stays)
        return output if bias is None else output + bias  # which each rank has whole

    def sum_products(product: Tensor, stays: bool) -> Tensor:
        if block is not None:
            kept = None if torch.compiler.is_compiling() else vars(block).pop("kept_share", None)
            return sum_rows(product, group, kept)
        return sum_in_graph(product, name) if stays else Sum.apply(product, group)  # type: ignore[return-value]

    return forward


class _SharedWords:
    """The matrix of an embedding whose words ranks share, as the code of a model reads it outside of lookups."""

    def __init__(self, layer: nn.Embedding, group: dist.ProcessGroup):
        self.layer, self.group = layer, group

    @property
    def matrix(self) -> Any:
        return self.layer._parameters["weight"]

    def __getitem__(self, index: Any) -> Tensor:
        word, *rest = index if isinstance(index, tuple) else (index,)
        if type(word) is not int or any(part != slice(None) for part in rest):
            return self.matrix[index]
        own = local(self.matrix)
        rank, place = divmod(word % len(self.matrix), len(own))
        is_elsewhere = torch.tensor(rank != self.group.rank(), device=own.device)
        return Sum.apply(own[place].masked_fill(is_elsewhere, 0.0), self.group)  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matrix, name)


@contextmanager
def hiding_weight(layer: nn.Embedding, weight: Any) -> Iterator[None]:
    """Puts something in the place of the parameter `weight`."""
    before = vars(layer).pop("weight", None)
    vars(layer)["weight"] = weight
    try:
        yield
    finally:
        vars(layer).pop("weight") if before is None else vars(layer).update(weight=before)


def _vocabulary_parallel(layer: nn.Embedding, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    num_words, look_up = layer.num_embeddings // group.size(), layer.forward  # which may scale what it looks up
    first, padding = group.rank() * num_words, layer.padding_idx
    own_padding = padding - first if padding is not None and first <= padding < first + num_words else None

    def forward(input: Tensor) -> Tensor:
        word = input - first
        is_elsewhere = (word < 0) | (word >= num_words)
        layer.padding_idx = own_padding
        try:
            with hiding_weight(layer, local(layer._parameters["weight"])):  # type: ignore[arg-type]
                vectors = look_up(word.masked_fill(is_elsewhere, 0))
        finally:
            layer.padding_idx = padding
        return Sum.apply(vectors.masked_fill(is_elsewhere[..., None], 0.0), group)

    forward.words = _SharedWords(layer, group)  # type: ignore[attr-defined]
    return forward
