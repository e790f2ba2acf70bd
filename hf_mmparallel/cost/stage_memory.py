"""What a stage holds on each of its ranks: weights, what a chunk keeps, and what it needs while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, ParallelPlan, Stage, stage_holds
from ..schedule.actions import StageKey
from .kept import (
    DTYPE_BYTES,
    FULL,
    LayerShape,
    Precision,
    chain_widths,
    held_shares,
    layer_kept,
    layer_working,
    with_trainable,
)
from .layers import CostModel, Polynomial
from .stage_times import data_gradients

GIB = 2**30
GRADIENT_BUCKET_BYTES = 25 * 2**20
"""Gradients are summed over ranks in pieces of this size."""
_TEXT_BYTES = 24  # of a token: its id, its label and its place in the attention mask


@dataclass(frozen=True)
class RankMemory:
    """
    Estimated bytes of one rank.

    Args:
        weights (`float`): Parameters, in the dtype of the model.
        gradients (`float`):
            Of the trainable parameters, in float32 where these are narrower, and the bucket that they are summed in.
        optimizer (`float`): AdamW: two values for each trainable parameter, in its dtype.
        activations (`float`): What the microbatches in flight keep for their backwards, what the one that runs holds
            besides, and the inputs of the step.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def total_gib(self) -> float:
        return self.total / GIB

    def __add__(self, other: RankMemory) -> RankMemory:
        return RankMemory(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.activations + other.activations,
        )


@dataclass(frozen=True, eq=False)
class StageMemory:
    """
    What a stage needs on each of its ranks. Rows are what it computes one after the other: what comes before its
    layers, the layers, what comes after them, the loss or the tensors that it hands on.

    Args:
        state (`RankMemory`): Weights, gradients and optimizer state.
        kept (`np.ndarray` of shape `[rows, 3]`):
            Bytes that a row keeps for its backward: of a squared token, of a token, constant.
        forward (`np.ndarray` of shape `[rows, 3]`): Bytes that it holds at most in a forward, with what it keeps.
        backward (`np.ndarray` of shape `[rows, 3]`): Bytes that it holds in a backward besides what is kept.
        gradients (`np.ndarray` of shape `[rows]`): Bytes of the gradients that its first backward makes.
        largest (`np.ndarray` of shape `[rows]`):
            Bytes of the largest of them, which each backward makes anew, in its own dtype and in that it is kept in.
        input_bytes (`float`): Of the inputs of a token.
        num_rows (`int`): Rows of ranks that share the tokens.
        summed (`float`): Bytes of the bucket in which gradients are summed with those of other ranks.
        hands_on_only (`bool`):
            Whether it ends an encoder and no backward keeps its features, so that they only wait until they are taken.
    """

    state: RankMemory
    kept: NDArray
    forward: NDArray
    backward: NDArray
    gradients: NDArray
    largest: NDArray
    input_bytes: float
    num_rows: int
    summed: float
    hands_on_only: bool

    def _scaled(self, held: NDArray) -> NDArray:
        """`[squared tokens, tokens, 1]` of a chunk on one row of ranks."""
        return held / np.array([self.num_rows, self.num_rows, 1.0])

    def kept_bytes(self, held: NDArray) -> float:
        """What a chunk keeps between its forward and its backward."""
        return float(self.kept.sum(axis=0) @ self._scaled(held))

    def forward_bytes(self, held: NDArray) -> float:
        """The most that a forward holds, with what it keeps."""
        at = self._scaled(held)
        kept = self.kept @ at
        return float(np.max(np.cumsum(kept) - kept + np.maximum(self.forward @ at, kept)))

    def backward_bytes(self, held: NDArray, is_first: bool) -> float:
        """The most that a backward holds, with what its forward kept and the gradients of weights that it makes."""
        at = self._scaled(held)
        live = np.cumsum(self.kept @ at) + self.backward @ at + self.largest
        if is_first:
            made = np.cumsum(self.gradients[::-1])[::-1]
            live = np.maximum(live + made - self.gradients, made)
        return float(live.max())

    @cached_property
    def extras(self) -> NDArray:
        """
        What a task can hold besides what all chunks keep and all gradients, `[cases, 3]`: the largest counts.
        """
        backward = self.backward.copy()
        backward[:, 2] += self.largest
        return np.unique(np.concatenate([np.maximum(self.forward - self.kept, 0.0), backward]), axis=0)


@dataclass(frozen=True, eq=False)
class _Rows:
    """
    The rows of a module in one layout, from what comes before its layers to what comes after; see [`StageMemory`].
    `needed[i]` is whether the input of row `i` needs a gradient, the last entry whether the output does.
    """

    kept: NDArray
    forward: NDArray
    backward: NDArray
    needed: tuple[bool, ...]


@lru_cache(maxsize=1024)
def _rows(costs: CostModel, module: str, tp_size: int, checkpointing: bool) -> _Rows:
    part = costs.spec.modules[module]
    needed = data_gradients(costs.spec)[module]
    trained = [
        any(use.parameter.trainable for use in costs.spec.uses.get((module, index), ()))
        for index in range(-1, part.num_layers + 1)
    ]
    found = []
    for row, index in enumerate(range(-1, part.num_layers + 1)):
        runs_back = needed[row] or trained[row]
        kept = _kept(costs, module, index, tp_size) if runs_back else Polynomial()
        inside = 0 <= index < part.num_layers
        shape_row = _layer_row if inside else _outer_row
        found.append(shape_row(costs, part, index, tp_size, kept, checkpointing and runs_back))
    kept, forward, backward = (_array(column) for column in zip(*found, strict=True))
    return _Rows(kept, forward, backward, (*needed, needed[-1] or trained[-1]))


_Row = tuple[Polynomial, Polynomial, Polynomial]


def _layer_row(costs: CostModel, part: ModuleSpec, index: int, tp_size: int, kept: Polynomial, again: bool) -> _Row:
    """A layer: what it keeps, holds in a forward, and holds in a backward besides."""
    precision = Precision.of(part, costs.value_bytes)
    working = layer_working(part, costs.spec.uses.get((part.name, index), ()), precision, tp_size)
    if again:  # its input is kept, and all the rest only while its own backward runs
        return Polynomial(token=float(part.hidden_size * precision.stream)), working.forward, kept + working.backward
    return kept, working.forward, working.backward if kept != Polynomial() else Polynomial()


def _outer_row(costs: CostModel, part: ModuleSpec, index: int, tp_size: int, kept: Polynomial, again: bool) -> _Row:
    """What comes before or after the layers. The loss has a row of its own."""
    head, precision = _head(costs, part, index), Precision.of(part, costs.value_bytes)
    logits = Polynomial(token=float(precision.compute * head))
    gradient = Polynomial(token=float(FULL * head)) + logits * float(precision.compute != FULL)
    # Each tensor-parallel rank has a part of the logits, gathers all parts, and puts them together.
    return kept, logits * (2 + 1 / tp_size if tp_size > 1 else 1.0), gradient


def _array(polynomials: Iterable[Polynomial]) -> NDArray:
    return np.array([(p.square, p.token, p.constant) for p in polynomials])


def _kept(costs: CostModel, module: str, index: int, tp_size: int) -> Polynomial:
    """
    What a layer keeps as it is trained: between what its source says of a trained and of a frozen one, by where the
    shapes of its parameters place it.
    """
    layer, part = costs.layers.layer(module, index, tp_size), costs.spec.modules[module]
    uses = costs.spec.uses.get((module, index), ())
    precision = Precision.of(part, costs.value_bytes)
    frozen, trained, found = (
        layer_kept(part, own, index, precision, tp_size).token
        for own in (with_trainable(uses, False), with_trainable(uses, True), uses)
    )
    share = (found - frozen) / (trained - frozen) if trained > frozen else 1.0
    return layer.frozen_activations * (1 - share) + layer.activations * share


def _head(costs: CostModel, part: ModuleSpec, index: int) -> int:
    """Logits of a token, if a layer ends in them; otherwise 0."""
    if part.name != LANGUAGE_MODEL or index != part.num_layers:
        return 0
    matrices = LayerShape.of(part, costs.spec.uses.get((part.name, index), ())).matrices
    return matrices[-1].shape[0] if matrices else 0


def stage_memory(costs: CostModel, plan: ParallelPlan, module: str, stage: Stage) -> StageMemory:
    """What a stage needs on each of its ranks."""
    grid = (len(stage.ranks), len(stage.ranks[0]))
    planned = plan.modules[module]
    is_copied = planned.dp_size * grid[0] > 1
    return _stage_memory(costs, module, stage.layers, grid, planned.activation_checkpointing, is_copied)


@lru_cache(maxsize=8192)
def _stage_memory(
    costs: CostModel,
    module: str,
    layers: tuple[int, int],
    grid: tuple[int, int],
    checkpointing: bool,
    is_copied: bool,
) -> StageMemory:
    part, (num_rows, tp_size) = costs.spec.modules[module], grid
    rows = _rows(costs, module, tp_size, checkpointing)
    places = [i for i in range(-1, part.num_layers + 1) if stage_holds(layers, part.num_layers, i)]
    last = _last_row(costs, part, layers[1], rows.needed)
    kept, forward, backward = (
        np.concatenate([table[[1 + index for index in places]], _array([own])])
        for table, own in zip((rows.kept, rows.forward, rows.backward), last, strict=True)
    )
    weights = _weights(costs.spec, module, places, tp_size)
    trained = float(weights.gradients.sum())
    return StageMemory(
        RankMemory(weights.held, trained, 2 * weights.trained),
        kept,
        forward,
        backward,
        np.append(weights.gradients, 0.0),
        np.append(weights.largest, 0.0),
        _input_bytes(part),
        num_rows,
        min(trained if is_copied else weights.tied, GRADIENT_BUCKET_BYTES),
        part.is_encoder and layers[1] == part.num_layers and not rows.needed[-1],
    )


@dataclass
class _Weights:
    """
    Bytes of weights at some places of a module and of those that are trained, of the gradients that a backward makes
    at each, of the largest of them while it is made, and of gradients that other places share.
    """

    gradients: NDArray
    largest: NDArray
    held: float = 0.0
    trained: float = 0.0
    tied: float = 0.0


def _weights(spec: ModelSpec, module: str, places: Sequence[int], tp_size: int) -> _Weights:
    found = _Weights(np.zeros(len(places)), np.zeros(len(places)))
    seen: set[str] = set()
    for row, index in reversed(list(enumerate(places))):  # a tied gradient is made where the backward comes first
        shares = held_shares(spec, module, index, tp_size)
        for use in spec.uses.get((module, index), ()):
            p, value_bytes = use.parameter, DTYPE_BYTES.get(use.parameter.dtype, FULL)
            num_values = shares[p.name] * p.num_elements
            num_bytes, gradient = num_values * value_bytes, num_values * max(value_bytes, FULL) * p.trainable
            narrow = num_bytes if p.trainable and value_bytes < FULL else 0.0
            found.largest[row] = max(found.largest[row], gradient + narrow)
            over_tp = tp_size > 1 and p.replicated
            if p.name in seen:
                found.tied -= 0.0 if over_tp else gradient  # both of its places are here
                continue
            seen.add(p.name)
            found.held += num_bytes
            found.trained += num_bytes * p.trainable
            found.gradients[row] += gradient
            found.tied += gradient if over_tp or p.name in spec.tied else 0.0
    return found


def _last_row(costs: CostModel, part: ModuleSpec, stop: int, needed: Sequence[bool]) -> _Row:
    """
    The loss, which keeps the logarithms of all probabilities in float32, or the tensors that a stage hands on, whose
    gradients arrive and are put together in its backward.
    """
    precision, is_last = Precision.of(part, costs.value_bytes), stop == part.num_layers
    head = _head(costs, part, stop) if is_last else 0
    if head:
        kept, logits = float(FULL * head), float(precision.compute * head)
        held = Polynomial(token=kept + logits + (kept if precision.compute != FULL else 0.0))
        runs_back = float(needed[-1])
        return Polynomial(token=kept * runs_back), held, Polynomial(token=2 * kept * runs_back)
    handed = feature_bytes(costs, part) if is_last else float(part.hidden_size * precision.stream)
    out, gradient = Polynomial(token=handed), needed[-1] if is_last else needed[stop + 1]
    return (out, out, out * 2.0) if gradient else (Polynomial(), out, Polynomial())


def _input_bytes(part: ModuleSpec) -> float:
    """Bytes of the inputs of a token: the values that the first convolution reads of a patch or of a frame, or ids."""
    if not part.is_encoder:
        return _TEXT_BYTES if part.name == LANGUAGE_MODEL else 0.0
    first = next((p for p in part.parameters if p.layer == -1 and len(p.shape) > 2), None)
    if first is None:
        return 0.0
    return float(FULL * np.prod(first.shape[1:]))


def feature_bytes(costs: CostModel, part: ModuleSpec, merged: bool = True) -> float:
    """Bytes of the features of a token of an encoder's layers, or of a row of them, into which tokens are merged."""
    if not part.is_encoder:
        return 0.0
    shape = LayerShape.of(part, costs.spec.uses.get((part.name, part.num_layers), ()))
    share = min((share for share, _ in chain_widths(shape)), default=1.0) if merged else 1.0
    copies = len(part.features) if part.inner_features else 1
    return share * copies * costs.spec.language_model.hidden_size * Precision.of(part, costs.value_bytes).stream


def stage_memories(costs: CostModel, plan: ParallelPlan) -> dict[StageKey, StageMemory]:
    """
    The memory of every stage of a plan.

    Args:
        costs (`CostModel`): What layers keep.
        plan (`ParallelPlan`): The layout.

    Returns:
        `dict[tuple[str, int, int], StageMemory]`: (module, replica, stage) -> its memory.
    """
    known: dict[tuple, StageMemory] = {}
    result = {}
    for name, module in plan.modules.items():
        for replica, index, stage in module.stages():
            kind = (name, stage.layers, len(stage.ranks), len(stage.ranks[0]))
            if kind not in known:
                known[kind] = stage_memory(costs, plan, name, stage)
            result[name, replica, index] = known[kind]
    return result
