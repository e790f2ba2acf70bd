"""The table of layer costs: times of all parts of their work and bytes that they save, in one layout of a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._portable import on_grid
from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, Stage
from ..plan.checkpointing import SELECTIVE, Checkpointing
from ..plan.ownership import can_put_off
from ..schedule.kinds import WHOLE_PASSES, WORK, TaskKind, Work
from .activations import LayerShape, Matrix, Precision, saved_activations, with_trainable
from .analytic import active_elements
from .collectives import longer_ms
from .layers import CostModel, LayerCost, Polynomial, data_gradients
from .sharded_passes import PassTransfers

PLACES: dict[Work, int] = {part: place for place, part in enumerate(WORK)}  # of the parts of work in tables
_DISPATCHED = 2.3  # host time of operations each of which Python is asked whether it is kept, over that of others
SQUARE, TOKEN, _CONSTANT, LAUNCH = range(4)  # columns: per squared token, per token, constant, host time to launch


@lru_cache(maxsize=64)
def places_of(kind: TaskKind) -> list[int]:
    """The places of the parts that tasks of a kind consist of."""
    return [PLACES[part] for part in kind.work]


def trainable_share(spec: ModelSpec, module: str, index: int) -> float:
    """Share of a layer's matrix elements that are trainable, or of its lookups if it has no matrices."""
    active = active_elements(spec, module, index)
    if not any(elements for _, elements in active):
        lookups = [use.parameter.trainable for use, _ in active if use.parameter.is_lookup]
        return sum(lookups) / len(lookups) if lookups else 0.0
    trained = sum(elements for use, elements in active if use.parameter.has_gradient)
    return trained / sum(elements for _, elements in active) if trained else 0.0


def linear_share(spec: ModelSpec, module: str, index: int) -> float:
    """Share of the trained matrix elements of a layer whose gradients can be put off: those of linear layers."""
    trained = [(use, elements) for use, elements in active_elements(spec, module, index) if use.parameter.has_gradient]
    linear = (
        elements for use, elements in trained if can_put_off(spec.modules[module], spec.tied, use.parameter, index)
    )
    whole = sum(elements for _, elements in trained)
    return sum(linear) / whole if whole else 0.0


def inner_gradient_share(spec: ModelSpec, module: str, index: int) -> tuple[float, bool]:
    """
    Input gradients that a layer computes for its own weights if its input needs none: the share of its matrices after
    the first trained one, and whether attention is among them.
    """
    module_spec = spec.modules[module]
    shape = LayerShape.of(module_spec, spec.uses.get((module, index), ()))
    inside = 0 <= index < module_spec.num_layers
    groups: list[Sequence[Matrix]] = [[matrix] for matrix in shape.matrices]
    if inside:
        *inner, last = shape.attention or (None,)
        groups = [inner, [last]] if last is not None else []
        for group in shape.feed_forwards:
            groups += [group[:-1], group[-1:]]
    elements = [sum(matrix.copies * matrix.shape[0] * matrix.shape[1] for matrix in group) for group in groups]
    trained = [any(matrix.trained or matrix.adapter_rank for matrix in group) for group in groups]
    if True not in trained:
        return 0.0, False
    first = trained.index(True)
    return sum(elements[first + 1 :]) / sum(elements), inside and bool(shape.attention) and first == 0


@dataclass(frozen=True, eq=False)
class LayerTable:
    """Costs of the layers of a module in one layout, each a row, between the parts before and after them."""

    work: NDArray  # (parts, num_layers + 2, 4) milliseconds; those to launch are hidden by longer ones of the device
    # (num_layers + 2, 3) bytes for the backward: per squared token, per token, constant; whether it has one or not
    saved: NDArray
    windows: NDArray  # (num_layers + 2,) size of the attention window in tokens; 0 for none
    is_causal: bool

    @cached_property
    def forward(self) -> NDArray:
        """(num_layers + 2, 3) of a forward."""
        return self.of_kind(WHOLE_PASSES[0])

    @cached_property
    def backward(self) -> NDArray:
        """(num_layers + 2, 3) of a whole backward; zeros where there is none."""
        return self.of_kind(WHOLE_PASSES[1])

    def of_kind(self, kind: TaskKind) -> NDArray:
        """(num_layers + 2, 3) of the work of tasks of a kind."""
        return self.work[places_of(kind), :, :LAUNCH].sum(axis=0)

    def launched_ms(self, kind: TaskKind) -> NDArray:
        """(num_layers + 2,) host times to launch the work of tasks of a kind."""
        return self.work[places_of(kind), :, LAUNCH].sum(axis=0)

    def chosen(self, rows: NDArray | slice) -> LayerTable:
        """The table of some rows."""
        return LayerTable(self.work[:, rows], self.saved[rows], self.windows[rows], self.is_causal)

    def of_stage(self, stage: Stage) -> LayerTable:
        """The table of the rows of a stage."""
        return self.chosen(self.rows(stage))

    def sizes(self, tokens: ArrayLike, squares: ArrayLike, cp_size: int = 1) -> NDArray:
        """`[3, num_layers + 2, ...]`: squared lengths within the window of each layer, tokens, and ones."""
        attended, every = self._attended(tokens, squares)
        return np.stack([attended / cp_size, every / cp_size, (every > 0).astype(float)])

    def _attended(self, tokens: ArrayLike, squares: ArrayLike) -> tuple[NDArray, NDArray]:
        """The first two entries of `sizes`, without context parallelism."""
        tokens, squares = np.broadcast_arrays(np.asarray(tokens, float), np.asarray(squares, float))
        attended = np.repeat(squares[None], len(self.windows), axis=0)
        for window in set(self.windows[self.windows > 0].tolist()):
            attended[self.windows == window] = windowed_squares(tokens, squares, window, self.is_causal)
        return attended, np.broadcast_to(tokens, attended.shape)

    def rows(self, stage: Stage) -> slice:
        """The rows of a stage."""
        num_layers = len(self.windows) - 2
        first = 0 if stage.layers[0] == 0 else stage.layers[0] + 1
        return slice(first, num_layers + 2 if stage.layers[1] == num_layers else stage.layers[1] + 1)

    def task_ms(self, tokens: ArrayLike, squares: ArrayLike, cp_size: int, kind: TaskKind) -> NDArray:
        """Times of a task of a kind in each row `[num_layers + 2, ...]`, at least those to launch it."""
        sizes = self.sizes(tokens, squares, cp_size)
        computed = np.einsum("rk,kr...->r...", self.of_kind(kind), sizes)
        shape = (-1, *([1] * (computed.ndim - 1)))
        return on_grid(np.maximum(computed, self.launched_ms(kind).reshape(shape) * sizes[2]))

    def times(self, tokens: ArrayLike, squares: ArrayLike, cp_size: int = 1) -> tuple[NDArray, NDArray]:
        """Forward and backward times of a chunk in each row `[num_layers + 2, ...]`, see [`~LayerTable.task_ms`]."""
        forward, backward = (self.task_ms(tokens, squares, cp_size, kind) for kind in WHOLE_PASSES)
        return forward, backward

    def sample_ms(self, tokens: NDArray, squares: NDArray) -> tuple[NDArray, NDArray]:
        """Forward and backward times `[samples]` of samples through all layers, without constants per chunk."""
        sizes, tables = np.stack(self._attended(tokens, squares)), (self.forward, self.backward)
        forward, backward = (on_grid(np.einsum("rk,kr...->...", table[:, :2], sizes)) for table in tables)
        return forward, backward

    def step_ms(
        self, tokens: float, squares: float, cp_size: int = 1, transfers: PassTransfers | None = None
    ) -> NDArray:
        """Forward plus backward time `[num_layers]` of a chunk, with `transfers` of a stage of all layers."""
        forward, backward = self.times(tokens, squares, cp_size)
        times = forward + backward
        if transfers is not None:
            passes = zip(WHOLE_PASSES[: 1 + int(self.backward.any())], (forward, backward), strict=False)
            for kind, compute_ms in passes:
                beside_ms, exposed_ms = transfers.of_pass(len(times), kind)
                times += longer_ms(compute_ms, beside_ms, transfers.overlap_efficiency)
                times[0] += exposed_ms
        return with_ends(times)

    def summed(self, cp_size: int) -> tuple[NDArray, tuple[float, ...]]:
        """
        Sums over rows `(parts, 4 + windows)` on each of the cp ranks that share a chunk, whose last columns are per
        squared token of layers with each window, and the sizes of these.
        """
        windows = np.unique(self.windows[self.windows > 0])
        has_size = np.concatenate([self.windows[None] == 0, self.windows[None] == windows[:, None]])
        squares = (self.work[:, None, :, SQUARE] * has_size).sum(axis=2) / cp_size
        whole = self.work.sum(axis=1)
        whole[:, SQUARE] = squares[:, 0]
        whole[:, TOKEN] /= cp_size
        return np.concatenate([whole, squares[:, 1:]], axis=1), tuple(windows.tolist())


def with_ends(times: NDArray) -> NDArray:
    """`[..., layers]` of `[..., layers + 2]`: what is before and after the layers is with the first and last one."""
    layers = times[..., 1:-1].copy()
    layers[..., 0] += times[..., 0]
    layers[..., -1] += times[..., -1]
    return layers


def windowed_squares(tokens: ArrayLike, squares: ArrayLike, window: float, is_causal: bool) -> NDArray:
    """Sum of squared lengths within an attention window in tokens, computed from the mean sequence length."""
    tokens, squares = np.asarray(tokens, float), np.asarray(squares, float)
    if not is_causal:
        return np.minimum(squares, window * tokens)
    # causal attention's squares count each pair twice
    lengths = np.divide(squares, tokens, out=np.zeros_like(squares), where=tokens > 0)
    inverse = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > window)
    return np.where(lengths > window, tokens * (2 * window - window**2 * inverse), squares)


@lru_cache(maxsize=1024)
def layer_table(
    costs: CostModel, module: str, tp_size: int = 1, checkpointing: Checkpointing = False, first_rank: int = 0
) -> LayerTable:
    """The table of a module; `first_rank` is the position of a tp group's first rank in its node."""
    module_spec = costs.spec.modules[module]
    layers = costs.layers.starting_at(first_rank) if first_rank else costs.layers
    known: dict[tuple, tuple[NDArray, list[float]]] = {}
    rows = []
    for index, data_gradient in enumerate(data_gradients(costs.spec)[module], start=-1):
        layer = layers.layer(module, index, tp_size)
        key = costs.spec.first_alike[module, index], data_gradient, layer
        if key not in known:
            known[key] = _row_of(costs, module, index, layer, data_gradient, tp_size, checkpointing)
        rows.append(known[key])
    work, saved = zip(*rows, strict=True)
    windows = np.array([0, *(module_spec.window(layer) for layer in range(module_spec.num_layers)), 0], float)
    return LayerTable(np.stack(work, axis=1), np.array(saved), windows, module == LANGUAGE_MODEL)


def _row_of(
    costs: CostModel,
    module: str,
    index: int,
    layer: LayerCost,
    data_gradient: bool,
    tp_size: int,
    checkpointing: Checkpointing,
) -> tuple[NDArray, list[float]]:
    """A layer's work and saved bytes."""
    module_spec, recomputed = costs.spec.modules[module], Polynomial()
    if checkpointing and 0 <= index < module_spec.num_layers:
        recomputed = _recomputed(layer, module_spec, tp_size, checkpointing)
        if checkpointing == SELECTIVE:
            layer = replace(layer, launch_ms=(_DISPATCHED * layer.launch_ms[0], layer.launch_ms[1]))
    work = _work_of(costs.spec, module, index, layer.with_sums, data_gradient, recomputed)
    return work, _saved_of(costs, module, index, layer, tp_size)


def _recomputed(layer: LayerCost, module_spec: ModuleSpec, tp_size: int, checkpointing: Checkpointing) -> Polynomial:
    """What a backward computes again: a forward, or of it what no outputs of products and of attention are kept of."""
    if checkpointing != SELECTIVE:
        return layer.with_sums.forward
    # sums over ranks are kept with their products; of shared rows all are gathered again, half of a sum
    gathers = layer.sums[0] * (0.5 * (module_spec.row_shares(tp_size) > 1))
    return layer.elementwise + gathers + layer.travels[0]


def _work_of(
    spec: ModelSpec, module: str, index: int, layer: LayerCost, data_gradient: bool, recomputed: Polynomial
) -> NDArray:
    """
    A layer's work `(parts, 4)`: its forward; the gradient of its input if that is needed, else the input gradients for
    its own weights; the gradients of the trained share of its weights, of which those of linear layers can come later;
    and what of its forward is `recomputed`.
    """
    share, put_off = trainable_share(spec, module, index), linear_share(spec, module, index)
    weights, inputs = layer.weight_gradient * share, layer.data_gradient
    if not data_gradient:
        inner, attends = inner_gradient_share(spec, module, index)
        inputs = Polynomial(inputs.square * attends, inputs.token * inner, inputs.constant * inner)
    again = recomputed != Polynomial() and bool(data_gradient or share)
    # what is recomputed has the rows; a gather is beside the first products of a block, or beside those put off before
    gathers = layer.gathers * (share > 0 and not again)
    forward_launch, backward_launch = layer.launch_ms
    of_weights = layer.weight_launch_ms * put_off * (share > 0)
    parts: dict[Work, tuple[Polynomial, float]] = {
        "forward": (layer.forward, forward_launch),
        "inputs": (inputs, backward_launch * (data_gradient or share > 0) - of_weights),
        "weights": (weights * put_off + gathers * (put_off > 0), of_weights),
        "others": (weights * (1 - put_off) + gathers * (put_off == 0), 0.0),
        "again": (recomputed * again, forward_launch * again),
    }
    return np.array([[p.square, p.token, p.constant, launch] for p, launch in (parts[part] for part in WORK)])


def _saved_of(costs: CostModel, module: str, index: int, layer: LayerCost, tp_size: int) -> list[float]:
    """Saved bytes of a layer with its actual trainable parameters."""
    module_spec, uses = costs.spec.modules[module], costs.spec.uses.get((module, index), ())
    precision = Precision.of(module_spec, costs.value_bytes)
    frozen, trained, actual = (
        saved_activations(module_spec, parameters, index, precision, tp_size, costs.engine).token
        for parameters in (with_trainable(uses, False), with_trainable(uses, True), uses)
    )
    # interpolates the source's values for a frozen and a fully trained layer, by the shapes of parameters
    share = (actual - frozen) / (trained - frozen) if trained > frozen else 1.0
    bytes_ = layer.frozen_activations * (1 - share) + layer.activations * share
    return [bytes_.square, bytes_.token, bytes_.constant]
