"""Brings the weights of a rank to its device layer by layer, so that each can be divided before the next one comes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..modeling import ModuleStage, is_unowned
from ..modeling.unowned import from_shard, local
from ..plan import StageKey
from ..world import World

LoadFunction = Callable[[Any, Collection[Collection[str]]], Iterator[Collection[str]]]
"""(model, names of the parameters of each layer) -> names that have been loaded, see [`load_layers`]."""


def layers_of_rank(stages: Mapping[StageKey, ModuleStage]) -> list[nn.Module]:
    """Lists the layers of the stages of a rank, in one order on all ranks that have them."""
    return [layer for stage in stages.values() for layer in stage.own_layers.values()]


def place_weights(
    model: Any,
    layers: Collection[nn.Module],
    device: torch.device,
    load: LoadFunction | None,
    shard: Callable[[Collection[str]], None],
) -> Iterator[Collection[str]]:
    """
    Moves the weights of a pruned model to a device, or loads them there, and shards them over tensor-parallel ranks.
    Yields the names of parameters that are placed, of a layer at a time, and last of all of them; they may lose their
    memory before the next layer is placed.
    """
    # By id, since a reference to a parameter would keep the memory of all of it after it has been cut.
    name_of = {id(parameter): name for name, parameter in model.named_parameters() if not is_unowned(parameter)}
    names = [[name_of[id(p)] for p in layer.parameters() if id(p) in name_of] for layer in layers]
    every = list(name_of.values())
    if load is not None:
        shard(every)  # on the meta device, so that a rank reads its shards only
        yield from load(model, names)
    else:
        for layer, of_layer in zip(layers, names, strict=True):
            layer.to(device)
            shard(of_layer)
            yield of_layer
    model.to(device)
    if load is None:
        in_layers = {name for of_layer in names for name in of_layer}
        shard([name for name in every if name not in in_layers])
    yield every


def load_held(held: Mapping[str, torch.Tensor]) -> LoadFunction:
    """Gives a pruned model on the meta device weights that a rank has; memory to those of which it has a slice."""

    def load(model: Any, layers: Collection[Collection[str]]) -> Iterator[Collection[str]]:
        left = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
        for names in (*layers, list(left)):
            for name in names:
                if name in left:
                    blank, values = left.pop(name), held[name]
                    shape = local(blank).shape
                    _replace(model, blank, values if values.shape == shape else values.new_empty(shape))
            yield names

    return load


def load_nothing(device: torch.device) -> LoadFunction:
    """Makes a function that gives a pruned model parameters without memory: one value in place of all."""

    def load(model: Any, layers: Collection[Collection[str]]) -> Iterator[Collection[str]]:
        left = {name: parameter for name, parameter in model.named_parameters() if not is_unowned(parameter)}
        of_layers = {name for names in layers for name in names}
        for names in (*layers, [name for name in left if name not in of_layers]):
            for name in names:
                if name in left:
                    parameter = left.pop(name)
                    # the rank gets its weights with its place in a plan later
                    value = torch.zeros((), dtype=parameter.dtype, device=device)
                    _replace(model, parameter, value.expand(parameter.shape))
            yield names

    return load


def _replace(model: nn.Module, blank: nn.Parameter, values: torch.Tensor) -> None:
    """Gives a parameter on the meta device, and all that are tied to it, its values."""
    parameter = nn.Parameter(from_shard(values, blank) if isinstance(blank, DTensor) else values, blank.requires_grad)
    for module in model.modules():
        for attribute, other in module._parameters.items():
            if other is blank:
                module._parameters[attribute] = parameter


def share_buffers(blank: nn.Module, model: nn.Module, world: World) -> None:
    """Gives a model without weights the buffers that it lacks, of which each rank may have read some. Collective."""
    lacking = {name for name, buffer in blank.named_buffers() if buffer.is_meta}
    own = {name: buffer.cpu() for name, buffer in model.named_buffers() if name in lacking and not buffer.is_meta}
    for name, buffer in {name: b for of_rank in world.all_gather(own) for name, b in of_rank.items()}.items():
        parent, _, attribute = name.rpartition(".")
        blank.get_submodule(parent)._buffers[attribute] = buffer
