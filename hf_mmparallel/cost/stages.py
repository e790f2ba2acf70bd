"""What the stages of a plan cost: sums over their layers, with backwards only where something is trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..plan import ModelSpec, ParallelPlan, Stage
from ..schedule.actions import StageKey
from .analytic import ATTENTION_BACKWARD, active_elements, layer_flops
from .layers import CostModel, LayerCost, Polynomial

_GATHERS_BACKWARD = 2.0  # keys and values are gathered again, and their gradients go home


def data_gradients(spec: ModelSpec) -> dict[str, tuple[bool, ...]]:
    """
    Module -> for each layer from -1 to `num_layers`, whether the gradient of its input is needed: something before it
    is trainable, in its module or in one whose features have entered (Cornstarch, section 4.3).
    """
    needed: dict[str, tuple[bool, ...]] = {}
    gives: dict[str, bool] = {}
    for name, module in spec.modules.items():
        enters = [min(edge.layers) for edge in spec.edges if edge.target == name and gives[edge.source]]
        before, found = False, []
        for index in range(-1, module.num_layers + 1):
            before = before or any(layer <= index for layer in enters)
            found.append(before)
            before = before or any(use.parameter.trainable for use in spec.uses.get((name, index), ()))
        needed[name], gives[name] = tuple(found), before
    return needed


def trainable_share(spec: ModelSpec, module: str, index: int) -> float:
    """The share of a layer's matrices whose gradients are wanted."""
    found = active_elements(spec, module, index)
    trained = sum(elements for use, elements in found if use.parameter.trainable)
    return trained / sum(elements for _, elements in found) if trained else 0.0


def training_flops(spec: ModelSpec, module: str) -> tuple[float, float]:
    """
    Operations of a module's forward and backward as the model defines them, nothing computed twice: for each token,
    and for each squared token of a sequence.
    """
    per_token = per_square = 0.0
    for index, needed in zip(
        range(-1, spec.modules[module].num_layers + 1), data_gradients(spec)[module], strict=True
    ):
        tokens, squares = layer_flops(spec, module, index)
        per_token += tokens * (1 + needed + trainable_share(spec, module, index))
        per_square += squares * (1 + 2 * needed)
    return per_token, per_square


@dataclass(frozen=True)
class LayerTable:
    """
    The layers of a module in one layout, the first row what comes before them and the last what comes after.

    Args:
        forward (`np.ndarray` of shape `[num_layers + 2, 3]`): Milliseconds: of a squared token, of a token, constant.
        backward (`np.ndarray` of shape `[num_layers + 2, 3]`): The same; zeros where no backward runs.
    """

    forward: NDArray
    backward: NDArray

    def step_ms(self, tokens: float, squares: float, num_rows: int = 1) -> NDArray:
        """
        Forward and backward of a chunk in each layer `[num_layers]`; what comes before and after the layers counts in
        the first and the last of them, which is where stages hold it.
        """
        sizes = np.array([squares / num_rows, tokens / num_rows, 1.0])
        times = (self.forward + self.backward) @ sizes
        layers = times[1:-1].copy()
        layers[0] += times[0]
        layers[-1] += times[-1]
        return layers

    def stage(self, stage: Stage, num_layers: int) -> tuple[Polynomial, Polynomial]:
        """Forward and backward of a stage, on each of its ranks."""
        first = 0 if stage.layers[0] == 0 else stage.layers[0] + 1
        stop = num_layers + 2 if stage.layers[1] == num_layers else stage.layers[1] + 1
        rows = (table[first:stop].sum(axis=0).tolist() for table in (self.forward, self.backward))
        forward, backward = (Polynomial(*row).over(len(stage.ranks)) for row in rows)
        return forward, backward


@lru_cache(maxsize=1024)
def layer_table(costs: CostModel, module: str, tp_size: int = 1, checkpointing: bool = False) -> LayerTable:
    """
    The layers of a module in one layout.

    Args:
        costs (`CostModel`): What layers cost.
        module (`str`): The module.
        tp_size (`int`, *optional*, defaults to 1): Ranks that share its matrices.
        checkpointing (`bool`, *optional*, defaults to `False`): Whether activations are recomputed.
    """
    num_layers = costs.spec.modules[module].num_layers
    forward, backward = [], []
    for index, data_gradient in enumerate(data_gradients(costs.spec)[module], start=-1):
        layer = costs.layers.layer(module, index, tp_size)
        share = trainable_share(costs.spec, module, index)
        again = checkpointing and 0 <= index < num_layers
        forward.append(layer.forward)
        backward.append(backward_of(layer, data_gradient, share, again))
    rows = [[(p.square, p.token, p.constant) for p in polynomials] for polynomials in (forward, backward)]
    return LayerTable(*(np.array(found) for found in rows))


def backward_of(layer: LayerCost, data_gradient: bool, share: float, again: bool = False) -> Polynomial:
    """
    The backward of a layer: the gradient of its input if that is needed, those of the share of its weights that is
    trained, and its forward once more where activations are recomputed.
    """
    result = layer.weight_gradient * share
    if data_gradient:
        result += layer.data_gradient
    return result + layer.forward if again and (data_gradient or share) else result


@dataclass(frozen=True)
class StageCost:
    """
    What a chunk takes on a stage, as a function of its tokens and of the squares of its sequences.

    Args:
        forward (`Polynomial`): Milliseconds.
        backward (`Polynomial`): Milliseconds; zero without one.
        gather_token_ms (`float`): Time in which the keys and values of a token come from the other rows of ranks.
        gather_square_ms (`float`): Time of the attention that is computed meanwhile, for each squared token.
    """

    forward: Polynomial
    backward: Polynomial
    gather_token_ms: float = 0.0
    gather_square_ms: float = 0.0

    def forward_ms(self, tokens: float, squares: float) -> float:
        """
        Args:
            tokens (`float`): Tokens of the chunk.
            squares (`float`): Sum of the squared lengths of its sequences.
        """
        # What travels costs only the time that attention does not hide.
        exposed = self.gather_token_ms * tokens - self.gather_square_ms * squares
        return self.forward(tokens, squares) + max(0.0, exposed)

    def backward_ms(self, tokens: float, squares: float) -> float:
        """The same of its backward."""
        if self.backward == Polynomial():
            return 0.0
        hidden = ATTENTION_BACKWARD * self.gather_square_ms * squares
        return self.backward(tokens, squares) + max(0.0, _GATHERS_BACKWARD * self.gather_token_ms * tokens - hidden)


def stage_costs(costs: CostModel, plan: ParallelPlan) -> dict[StageKey, StageCost]:
    """
    The cost of every stage of a plan.

    Args:
        costs (`CostModel`): What layers cost.
        plan (`ParallelPlan`): The layout.

    Returns:
        `dict[tuple[str, int, int], StageCost]`: (module, replica, stage) -> its cost.
    """
    known: dict[tuple, StageCost] = {}
    result = {}
    for name, module in plan.modules.items():
        table = layer_table(costs, name, module.tp_size, module.activation_checkpointing)
        for replica, index, stage in module.stages():
            kind = (name, stage.layers, costs.device.link_bytes_per_ms(stage.columns[0]))
            if kind not in known:
                known[kind] = _stage_cost(costs, name, stage, table)
            result[name, replica, index] = known[kind]
    return result


def _stage_cost(costs: CostModel, module: str, stage: Stage, table: LayerTable) -> StageCost:
    part, num_rows, tp_size = costs.spec.modules[module], len(stage.ranks), len(stage.ranks[0])
    forward, backward = table.stage(stage, part.num_layers)
    if num_rows == 1:
        return StageCost(forward, backward)
    width = 2 * part.num_kv_heads * part.head_width / tp_size
    received = costs.value_bytes * width * (num_rows - 1) / num_rows
    gather_ms = received / costs.device.link_bytes_per_ms(stage.columns[0])
    squares = sum(table.forward[1 + layer, 0] for layer in range(*stage.layers)) / num_rows
    return StageCost(forward, backward, stage.num_layers * gather_ms, squares)
