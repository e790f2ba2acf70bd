"""Brings the weights of a rank to its device layer by layer, so that each can be divided before the next one comes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..modeling import ModuleStage, is_unowned
from ..plan import StageKey

LoadFunction = Callable[[Any, Collection[Collection[str]]], Iterator[Collection[str]]]
"""(model, names of the parameters of each layer) -> names that have been loaded, see [`load_layers`]."""


def layers_of_rank(stages: Mapping[StageKey, ModuleStage]) -> list[nn.Module]:
    """The layers of the stages of a rank, in one order on all ranks that have them."""
    return [layer for stage in stages.values() for layer in stage.own_layers.values()]


def placed_weights(
    model: Any,
    layers: Collection[nn.Module],
    device: torch.device,
    load: LoadFunction | None,
    shard: Callable[[Collection[str]], None],
) -> Iterator[Collection[str]]:
    """
    Moves the weights of a pruned model to a device, or loads them there, and shards them over tensor-parallel ranks.

    Args:
        model (`PreTrainedModel`): The model; on the meta device if weights are loaded.
        layers (`Collection[nn.Module]`): Its layers.
        device (`torch.device`): The device.
        load (`Callable`, *optional*): See [`LoadFunction`]; without it the model has its weights.
        shard (`Callable[[Collection[str]], None]`): Applies tensor parallelism to some parameters.

    Yields:
        `Collection[str]`:
            The names of parameters that are placed, of a layer at a time, and last of all of them. They may lose their
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
