"""
Sequence parallelism of the layers of a language model: each rank of a tensor-parallel group has its share of the rows
between attention and feed-forward blocks, where norms and residuals are computed, and all rows inside of the blocks
(Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 4.2.2).

The sum over the ranks at the end of a block becomes a reduce-scatter, and a gather stands before the next one: as many
bytes, while what is saved of norms and of the input of a layer is divided by the number of ranks. So is what a block
reads: its matrices save the share of the rank, and the rows are gathered again for the gradients of weights, beside
the first products of the block's backward. Rows that the ranks can't share evenly are padded with zeros, which reach
no output.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .products import as_multiplied, use_products
from .tp_collectives import gather_rows, join_rows, split_rows
from .unowned import hidden_of, with_hidden

_POSITIONS = "position_embeddings"  # the argument of attention by which the number of all rows is known
_DROPOUTS = ("dropout", "hidden_dropout", "residual_dropout")


@functools.cache
def _arguments_of(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def find_blocks(
    layer: nn.Module, name: str, style_of: Callable[[str], str], partial: Collection[str]
) -> list[nn.Module] | None:
    """
    Finds the attention and feed-forward blocks of the layer `name`; `None` if anything else in it may need more than
    one row. `style_of` maps names of linear layers to tensor-parallel styles; each rank sees its share of what meets
    the parameters in `partial`.
    """
    if _POSITIONS not in _arguments_of(type(layer)) or list(layer.parameters(recurse=False)) or _drops(layer):
        return None
    blocks = []
    for own_name, child in layer.named_children():
        shapes = [parameter.shape for parameter in child.parameters()]
        if not shapes or (len(list(child.modules())) == 1 and all(len(shape) == 1 for shape in shapes)):
            continue  # without weights, or a norm
        if not _is_block(child, f"{name}.{own_name}", style_of, partial):
            return None
        blocks.append(child)
    with_positions = [block for block in blocks if _POSITIONS in _arguments_of(type(block))]
    of_rows = [block for block in blocks if len(_arguments_of(type(block))) == 1]
    return blocks if with_positions and len(with_positions) + len(of_rows) == len(blocks) else None


def _drops(layer: nn.Module) -> bool:
    """Returns whether a layer drops hidden values, other ones on each rank."""
    dropouts = [module.p for module in layer.modules() if isinstance(module, nn.Dropout)]
    return any(dropouts) or any(getattr(layer, name, None) not in (None, 0, 0.0) for name in _DROPOUTS)


def _is_block(block: nn.Module, prefix: str, style_of: Callable[[str], str], partial: Collection[str]) -> bool:
    """Returns whether the first matrices of a block are all cut by columns and the last one by rows."""
    styles = []
    for name, child in block.named_children():
        parameters = [f"{prefix}.{name}.{parameter}" for parameter, _ in child.named_parameters()]
        linear = getattr(child, "base_layer", child)
        if type(linear) is nn.Linear:
            styles.append(style_of(f"{prefix}.{name}"))
        elif not set(partial).issuperset(parameters):
            return False
    is_own = not list(block.parameters(recurse=False))
    return is_own and styles.count("rowwise") == 1 and 1 <= styles.count("colwise") == len(styles) - 1


class SplitRows:
    """The rows of a layer, of which each rank of a tensor-parallel group has a share between the blocks."""

    def __init__(self, layer: nn.Module, blocks: Iterable[nn.Module], group: dist.ProcessGroup):
        self.group = group
        # Whether the layer gets all rows, and returns all; from one layer to the next the ranks may keep their shares.
        self.takes_all = self.returns_all = True
        self._num_rows_without = 0  # rows on all ranks in a layer without rotary embeddings
        self._layer: Any = layer
        self._layer.split_rows = self
        self._hooks = [
            layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True),
            layer.register_forward_hook(self._leave_layer, with_kwargs=True, prepend=True),  # others see all rows
            *(block.register_forward_pre_hook(self._enter_block, with_kwargs=True) for block in blocks),
        ]
        for adapted in (part for block in blocks for part in block.modules() if hasattr(part, "lora_A")):
            _read_rows(adapted)

    def remove(self) -> None:
        """Leaves the rows of the layer as they are from now on."""
        for hook in self._hooks:
            hook.remove()
        del self._layer.split_rows

    def _enter_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get(_POSITIONS) is None:
            self._num_rows_without = _num_rows(kwargs)
        if not self.takes_all or getattr(layer, "is_identity_layer", False):
            return None
        return with_hidden(args, kwargs, split_rows(hidden_of(args, kwargs), self.group))

    def _leave_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not self.returns_all or getattr(layer, "is_identity_layer", False):
            return None
        is_tuple = isinstance(output, tuple)
        hidden = join_rows(output[0] if is_tuple else output, self.group, _num_rows(kwargs))
        return (hidden, *output[1:]) if is_tuple else hidden

    def _enter_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # padding stays in a feed-forward, whose rows do not meet
        num_rows = None
        if _POSITIONS in kwargs:
            num_rows = self._num_rows_without if kwargs[_POSITIONS] is None else _num_rows(kwargs)
        # a layer that runs again in its backward has all rows there
        is_recomputed = getattr(self._layer, "gradient_checkpointing", False) and self._layer.training
        keeps_share = torch.is_grad_enabled() and not is_recomputed
        # cast once, and so that less is gathered
        rows = gather_rows(as_multiplied(hidden_of(args, kwargs)), self.group, num_rows, keeps_share)
        if keeps_share and not torch.compiler.is_compiling():
            block.kept_share = rows.kept_share  # type: ignore[assignment, attr-defined]
        return with_hidden(args, kwargs, rows)


def _read_rows(adapted: Any) -> None:
    """Lets the adapters of a layer that reads the rows of a block save the share of the rank, too, in its dtype."""
    for matrix in adapted.lora_A.values():
        if "forward" not in vars(matrix):  # which those have that take the features of a rank
            use_products(matrix)
            adapted.cast_input_dtype_enabled = False


def _num_rows(kwargs: Mapping[str, Any]) -> int:
    positions = kwargs.get(_POSITIONS)
    return kwargs["position_ids"].shape[-1] if positions is None else positions[0].shape[-2]


def keep_rows_split(layers: Mapping[int, nn.Module], joined_behind: Collection[int]) -> None:
    """
    Lets the ranks keep their shares of the rows from each layer, by index, to the next one but behind `joined_behind`,
    which has -1 for what is before the first layer.
    """
    for index, layer in layers.items():
        rows = getattr(layer, "split_rows", None)
        if rows is not None:
            rows.takes_all, rows.returns_all = index - 1 in joined_behind, index in joined_behind
