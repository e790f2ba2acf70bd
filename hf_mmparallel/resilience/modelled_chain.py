"""The chain of layers of a model, by a cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..cost import CostModel
from ..cost.stage_memory import stage_memory
from ..cost.stage_times import layer_table
from ..plan import ModulePlugin, MultimodalParallelPlugin, plan_for_model
from .templates import LayerChain


@dataclass(frozen=True, eq=False)
class ModelledChain:
    """
    The layers of a model with what they cost.

    Args:
        chain ([`LayerChain`]): The layers.
        state_bytes (`tuple[float, ...]`): Weights and optimizer state of each layer, in bytes.
    """

    chain: LayerChain
    state_bytes: tuple[float, ...]


def modelled_chain(
    costs: CostModel,
    sizes: Mapping[str, tuple[float, float]],
    memory_bytes: float | None,
    checkpointing: bool = False,
    state_copies: int = 1,
) -> ModelledChain:
    """
    The layers of a model in the order of its pipeline, on one rank a stage.

    Args:
        costs ([`CostModel`]): Costs of layers.
        sizes (`Mapping[str, tuple[float, float]]`):
            Module -> tokens of a microbatch and the sum of its squared sequence lengths.
        memory_bytes (`float`, *optional*): Memory of a rank; no limit by default.
        checkpointing (`bool`, *optional*, defaults to `False`): Whether activations are recomputed.
        state_copies (`int`, *optional*, defaults to 1): How many stages' state a rank holds.
    """
    names = [name for name in costs.spec.modules if name in sizes]
    settings = {name: ModulePlugin(dp_size=2, activation_checkpointing=checkpointing) for name in names}
    plan = plan_for_model(MultimodalParallelPlugin(modules=settings), costs.spec, None)
    layer_ms, starts, state_bytes, first = [], [], [], 0
    num_layers = sum(costs.spec.modules[name].num_layers for name in names)
    limits = np.zeros((1, num_layers, num_layers + 1), int)
    for name in names:
        count = costs.spec.modules[name].num_layers
        layer_ms += layer_table(costs, name, checkpointing=checkpointing).step_ms(*sizes[name]).tolist()
        chunk = np.array([*sizes[name], 1.0])[[1, 0, 2]]
        for start in range(count):
            for stop in range(start + 1, count + 1):
                held = replace(plan.stage(name, 0, 0), layers=(start, stop))
                memory = stage_memory(costs, plan, name, held)
                if stop == start + 1:
                    state_bytes.append(memory.state.weights + memory.state.optimizer)
                in_flight = num_layers
                if memory_bytes is not None:
                    running = float((memory.transient @ chunk).max(initial=0.0))
                    free = memory_bytes - state_copies * memory.state.total - running
                    saved = memory.saved_bytes(chunk)
                    in_flight = int(min(max(free // saved, 0), 10**6)) if saved else 10**6 * (free >= 0)
                limits[0, first + start, first + stop] = in_flight
        first += count
        starts.append(first)
    chain = LayerChain([1], np.array([layer_ms]), starts[:-1], None if memory_bytes is None else limits)
    return ModelledChain(chain, tuple(state_bytes))
