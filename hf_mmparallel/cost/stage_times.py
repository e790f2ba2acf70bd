"""Times of the stages of a plan: sums over their layers, with backwards only if something is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._portable import on_grid, weighted_sum
from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, ParallelPlan, SampleSizes, Stage, StageKey
from .activations import LayerShape, Matrix
from .analytic import ATTENTION_BACKWARD, active_elements, layer_flops
from .layers import CostModel, LayerCost, Polynomial, data_gradients
from .sharded_passes import PassTransfers, TimedTransfer, longer_ms, transfers_in_passes

_GATHERS_BACKWARD = 2.0  # keys and values are gathered again, and their gradients are reduced


def trainable_share(spec: ModelSpec, module: str, index: int) -> float:
    """Share of a layer's matrix elements that are trainable, or of its lookups if it has no matrices."""
    active = active_elements(spec, module, index)
    if not any(elements for _, elements in active):
        lookups = [use.parameter.trainable for use, _ in active if use.parameter.is_lookup]
        return sum(lookups) / len(lookups) if lookups else 0.0
    trained = sum(elements for use, elements in active if use.parameter.trainable)
    return trained / sum(elements for _, elements in active) if trained else 0.0


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


@dataclass(frozen=True)
class LayerTable:
    """Milliseconds of the layers of a module in one layout, each a row, between the parts before and after them."""

    forward: NDArray  # (num_layers + 2, 3) per squared token, per token, constant
    backward: NDArray  # (num_layers + 2, 3) the same; zeros without a backward
    launches: NDArray  # (num_layers + 2, 2) host times of a forward and a backward, which longer device times hide
    windows: NDArray  # (num_layers + 2,) size of the attention window in tokens; 0 for none
    is_causal: bool

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

    def times(self, tokens: ArrayLike, squares: ArrayLike, cp_size: int = 1) -> tuple[NDArray, NDArray]:
        """Forward and backward times of a chunk in each row `[num_layers + 2, ...]`, at least the launch times."""
        sizes = self.sizes(tokens, squares, cp_size)
        times = []
        for table, launched in zip((self.forward, self.backward), self.launches.T, strict=True):
            computed = np.einsum("rk,kr...->r...", table, sizes)
            shape = (-1, *([1] * (computed.ndim - 1)))
            times.append(on_grid(np.maximum(computed, launched.reshape(shape) * sizes[2])))
        return times[0], times[1]

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
            for is_backward, compute_ms in enumerate([forward, backward][: 1 + int(self.backward.any())]):
                beside_ms, exposed_ms = transfers.of_pass(len(times), bool(is_backward))
                times += longer_ms(compute_ms, beside_ms, transfers.overlap_efficiency)
                times[0] += exposed_ms
        layers = times[1:-1].copy()
        # the parts before and after the layers are on the same stages as the first and last one
        layers[0] += times[0]
        layers[-1] += times[-1]
        return layers

    def stage(self, stage: Stage) -> StageCost:
        """Cost of a stage on each of its ranks."""
        held = self.rows(stage)
        first, stop = held.start, held.stop
        cp_size = stage.cp_size
        rows = range(first, stop)
        polynomials, windows = [], {}
        for kind, table in enumerate((self.forward, self.backward)):
            whole = table[first:stop].copy()
            for row in rows:
                if self.windows[row]:
                    slopes = windows.setdefault(float(self.windows[row]), [0.0, 0.0])
                    slopes[kind] += float(table[row, 0]) / cp_size
                    whole[row - first, 0] = 0.0
            polynomials.append(Polynomial(*whole.sum(axis=0).tolist()).over(cp_size))
        launches = self.launches[first:stop].sum(axis=0)
        return StageCost(
            *polynomials,
            launch_ms=(float(launches[0]), float(launches[1])),
            windows=tuple((window, *slopes) for window, slopes in sorted(windows.items())),
            is_causal=self.is_causal,
        )


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
    costs: CostModel, module: str, tp_size: int = 1, checkpointing: bool = False, first_rank: int = 0
) -> LayerTable:
    """Times of the layers of a module; `first_rank` is the position of a tp group's first rank in its node."""
    module_spec = costs.spec.modules[module]
    layers = costs.layers.starting_at(first_rank) if first_rank else costs.layers
    forward, backward, launches = [], [], []
    for index, data_gradient in enumerate(data_gradients(costs.spec)[module], start=-1):
        layer = layers.layer(module, index, tp_size).with_sums
        share = trainable_share(costs.spec, module, index)
        inner = (1.0, True) if data_gradient else inner_gradient_share(costs.spec, module, index)
        recompute = checkpointing and 0 <= index < module_spec.num_layers
        forward.append(layer.forward)
        backward.append(backward_of(layer, data_gradient, share, recompute, inner))
        has_backward = data_gradient or share > 0
        forward_launch, backward_launch = layer.launch_ms
        launches.append((forward_launch, has_backward * (backward_launch + recompute * forward_launch)))
    windows = np.array([0, *(module_spec.window(layer) for layer in range(module_spec.num_layers)), 0], float)
    tables = [np.array([(p.square, p.token, p.constant) for p in column]) for column in (forward, backward)]
    return LayerTable(tables[0], tables[1], np.array(launches), windows, module == LANGUAGE_MODEL)


def backward_of(
    layer: LayerCost,
    data_gradient: bool,
    share: float,
    recompute: bool = False,
    inner: tuple[float, bool] = (0.0, False),
) -> Polynomial:
    """
    Time of a layer's backward: the gradient of its input if that is needed, else the input gradients for its own
    weights (`inner`, see [`inner_gradient_share`]); the gradients of the trained share of its weights; and its forward
    if recomputed.
    """
    result = layer.weight_gradient * share
    if data_gradient:
        result += layer.data_gradient
    elif inner[0] or inner[1]:
        whole = layer.data_gradient
        result += Polynomial(whole.square * inner[1], whole.token * inner[0], whole.constant * inner[0])
    return result + layer.forward if recompute and (data_gradient or share) else result


@dataclass(frozen=True)
class StageCost:
    """Milliseconds of a chunk on a stage, as a function of its tokens and its sum of squared sequence lengths."""

    forward: Polynomial
    backward: Polynomial  # zero without a backward
    gather_token_ms: float = 0.0  # per token, to gather keys and values from the other cp ranks
    gather_square_ms: float = 0.0  # per squared token, of the attention that overlaps with it
    gathers_backward: float = _GATHERS_BACKWARD  # transfers in a backward, relative to a forward
    launch_ms: tuple[float, float] = (0.0, 0.0)  # host times to launch a forward and a backward
    # of layers: the window in tokens, and ms per squared token in forward and backward
    windows: tuple[tuple[float, float, float], ...] = ()
    is_causal: bool = True

    def forward_ms(self, tokens: float, squares: float) -> float:
        """The forward time of a chunk."""
        # Only the part of the transfer that attention does not hide takes time.
        exposed = self.gather_token_ms * tokens - self.gather_square_ms * squares
        computed = self.forward(tokens, squares) + self._windowed_ms(tokens, squares, 1)
        return max(computed, self.launch_ms[0]) + max(0.0, exposed)

    def backward_ms(self, tokens: float, squares: float) -> float:
        """The backward time of the chunk, see [`~StageCost.forward_ms`]."""
        if self.backward == Polynomial():
            return 0.0
        hidden = ATTENTION_BACKWARD * self.gather_square_ms * squares
        computed = self.backward(tokens, squares) + self._windowed_ms(tokens, squares, 2)
        exposed = self.gathers_backward * self.gather_token_ms * tokens - hidden
        return max(computed, self.launch_ms[1]) + max(0.0, exposed)

    def times_ms(self, tokens: NDArray, squares: NDArray, is_backward: bool) -> NDArray:
        """[`~StageCost.forward_ms`] or [`~StageCost.backward_ms`] of many chunks, bitwise equal."""
        if is_backward and self.backward == Polynomial():
            return np.zeros(len(tokens))
        of_token, of_square = self.gather_token_ms, self.gather_square_ms
        if is_backward:
            of_token, of_square = self.gathers_backward * of_token, ATTENTION_BACKWARD * of_square
        polynomial = self.backward if is_backward else self.forward
        windowed = np.zeros(len(tokens))
        for window, *coefficients in self.windows:
            windowed += coefficients[is_backward] * windowed_squares(tokens, squares, window, self.is_causal)
        computed = polynomial.square * squares + polynomial.token * tokens + polynomial.constant + windowed
        exposed = of_token * tokens - of_square * squares
        return np.maximum(computed, self.launch_ms[is_backward]) + np.maximum(0.0, exposed)

    def _windowed_ms(self, tokens: float, squares: float, direction: int) -> float:
        """Time of attention in layers with a window."""
        if not self.windows:
            return 0.0
        return sum(
            entry[direction] * float(windowed_squares(tokens, squares, entry[0], self.is_causal))
            for entry in self.windows
        )


@dataclass(frozen=True)
class SharedPasses:
    """Layers of a stage with equal times in a pass that gathers weights or reduces gradients, by kind of layer."""

    counts: NDArray  # (kinds,) number of layers
    table: LayerTable  # one row for each kind
    beside_ms: NDArray  # (kinds,) communication beside the computation of such a layer
    exposed_ms: float  # communication beside no computation
    overlap_efficiency: float  # relative compute speed beside communication

    @classmethod
    def of(cls, table: LayerTable, stage: Stage, transfers: PassTransfers, is_backward: bool) -> SharedPasses:
        """The passes of a stage in one direction."""
        rows = table.rows(stage)
        coefficients = (table.backward if is_backward else table.forward)[rows]
        beside_ms, exposed_ms = transfers.of_pass(len(coefficients), is_backward)
        columns = np.column_stack([coefficients, table.launches[rows], table.windows[rows], beside_ms])
        _, first, counts = np.unique(columns, axis=0, return_index=True, return_counts=True)
        kinds = rows.start + first
        chosen = (table.forward[kinds], table.backward[kinds], table.launches[kinds], table.windows[kinds])
        alike = LayerTable(*chosen, table.is_causal)
        return cls(counts, alike, beside_ms[first], exposed_ms, transfers.overlap_efficiency)

    def more_ms(self, tokens: NDArray, squares: NDArray, cp_size: int, is_backward: bool) -> NDArray:
        """Time that the communication adds to the computation of chunks `[chunks]`."""
        compute_ms = self.table.times(tokens, squares, cp_size)[is_backward]
        added_ms = longer_ms(compute_ms, self.beside_ms[:, None], self.overlap_efficiency)
        return self.exposed_ms + weighted_sum(added_ms.T, self.counts)


@dataclass(frozen=True)
class SharedStageCost(StageCost):
    """A [`StageCost`] whose copies share weights or gradients, so that its passes communicate."""

    passes: tuple[SharedPasses, ...] = ()  # its forward and its backward
    cp_size: int = 1
    table: LayerTable = field(kw_only=True)  # of the layers of the module
    rows: slice = field(kw_only=True)  # those of the stage
    transfers: PassTransfers = field(kw_only=True)

    def forward_ms(self, tokens: float, squares: float) -> float:
        """See [`StageCost`]."""
        return float(self.times_ms(np.array([tokens]), np.array([squares]), False)[0])

    def backward_ms(self, tokens: float, squares: float) -> float:
        """See [`StageCost`]."""
        return float(self.times_ms(np.array([tokens]), np.array([squares]), True)[0])

    def times_ms(self, tokens: NDArray, squares: NDArray, is_backward: bool) -> NDArray:
        """See [`StageCost`]."""
        times_ms = super().times_ms(tokens, squares, is_backward)
        if is_backward and self.backward == Polynomial():
            return times_ms
        return times_ms + self.passes[is_backward].more_ms(tokens, squares, self.cp_size, is_backward)

    def timed_transfers(self, tokens: float, squares: float, is_backward: bool) -> list[TimedTransfer]:
        """Transfers in the pass of a chunk, see [`PassTransfers.time_transfers`], relative to `times_ms`."""
        length_ms = (self.backward_ms if is_backward else self.forward_ms)(tokens, squares)
        if not length_ms:
            return []
        # a pass may have more than its layers: what they wait for
        compute_ms = self.table.times(tokens, squares, self.cp_size)[is_backward][self.rows]
        found, of_layers_ms = self.transfers.time_transfers(compute_ms, is_backward)
        return [transfer.scale(length_ms / of_layers_ms) for transfer in found]


def stage_costs(costs: CostModel, plan: ParallelPlan) -> dict[StageKey, StageCost]:
    """(module, replica, stage) -> cost of all stages of a plan."""
    known: dict[tuple, StageCost] = {}
    shared: dict[tuple[str, int], PassTransfers | None] = {}
    result = {}
    for name, module in plan.modules.items():
        for replica, index, stage in module.stages():
            first_rank = _first_rank(costs, stage)
            waits_ms = _blocked_token_ms(costs, name, module.replicas[replica], index)
            if (name, index) not in shared:
                shared[name, index] = transfers_in_passes(costs, plan, name, index)
            transfers = shared[name, index]
            link = costs.device.link_bytes_per_ms(stage.cp_groups[0])
            kind = (name, stage.layers, stage.tp_size, link, first_rank, waits_ms, transfers)
            if kind not in known:
                recompute = module.activation_checkpointing
                table = layer_table(costs, name, stage.tp_size, recompute, first_rank)
                known[kind] = _stage_cost(costs, name, stage, table, recompute, waits_ms)
                if transfers is not None:
                    known[kind] = _with_transfers(known[kind], stage, table, transfers)
            result[name, replica, index] = known[kind]
    return result


def _with_transfers(cost: StageCost, stage: Stage, table: LayerTable, transfers: PassTransfers) -> StageCost:
    """The cost of a stage with the communication in its passes."""
    passes = tuple(SharedPasses.of(table, stage, transfers, is_backward) for is_backward in (False, True))
    values = {f.name: getattr(cost, f.name) for f in fields(StageCost)}
    held = {"table": table, "rows": table.rows(stage), "transfers": transfers}
    return SharedStageCost(**values, passes=passes, cp_size=stage.cp_size, **held)


def _first_rank(costs: CostModel, stage: Stage) -> int:
    """Position in its node of the first rank of the slowest tp group; 0 if tp groups are within nodes."""
    size = costs.device.node_size
    crossing = [tp_group for tp_group in stage.mesh if tp_group[0] // size != tp_group[-1] // size]
    return min(crossing, key=costs.device.link_bytes_per_ms)[0] % size if crossing else 0


def _stage_cost(
    costs: CostModel, module: str, stage: Stage, table: LayerTable, checkpointing: bool, waits_ms: float
) -> StageCost:
    module_spec, cp_size, tp_size = costs.spec.modules[module], stage.cp_size, stage.tp_size
    cost = table.stage(stage)
    if waits_ms:
        waits = Polynomial(token=waits_ms)
        cost = replace(cost, forward=cost.forward + waits, backward=cost.backward + waits)
    if cp_size == 1:
        return cost
    width = 2 * module_spec.num_kv_heads * module_spec.head_width / tp_size
    received = costs.value_bytes * width * (cp_size - 1) / cp_size
    gather_ms = received / costs.device.link_bytes_per_ms(stage.cp_groups[0])
    squares = sum(table.forward[1 + layer, 0] for layer in range(*stage.layers)) / cp_size
    return replace(
        cost,
        gather_token_ms=stage.num_layers * gather_ms,
        gather_square_ms=squares,
        gathers_backward=_GATHERS_BACKWARD + checkpointing,
    )


def _blocked_token_ms(costs: CostModel, module: str, stages: Sequence[Stage], index: int) -> float:
    """Time per token that a stage spends on sends and receives, if its engine can't overlap them."""
    if not costs.engine.blocking_messages:
        return 0.0
    num_bytes = costs.value_bytes * costs.spec.modules[module].hidden_size
    result = 0.0
    for other in (index - 1, index + 1):
        if 0 <= other < len(stages):
            grids = [stages[index].all_ranks, stages[other].all_ranks]
            ranks = list(chain(*grids))
            result += num_bytes / min(map(len, grids)) / costs.engine.message_bytes_per_ms(costs.device, ranks)
    return result


# Model FLOPs, as used for MFU.


def training_flops(spec: ModelSpec, module: str) -> tuple[float, float]:
    """FLOPs of a module's forward and backward without recomputation, per token and per attended square."""
    per_token = per_square = 0.0
    for index, needed in zip(
        range(-1, spec.modules[module].num_layers + 1), data_gradients(spec)[module], strict=True
    ):
        tokens, squares = layer_flops(spec, module, index)
        inner, attends = (1.0, True) if needed else inner_gradient_share(spec, module, index)
        per_token += tokens * (1 + inner + trainable_share(spec, module, index))
        per_square += squares * (1 + 2 * attends)
    return per_token, per_square


class _Same:
    """Hashes a model by identity, as a cache key for FLOP counts."""

    def __init__(self, spec: ModelSpec):
        self.spec = spec

    def __hash__(self) -> int:
        return id(self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.spec is other.spec


@lru_cache(maxsize=64)
def _training_flops(model: _Same, module: str) -> tuple[float, float]:
    return training_flops(model.spec, module)


def attended_squares(module_spec: ModuleSpec, tokens: ArrayLike, squares: ArrayLike) -> NDArray:
    """Squared lengths of samples averaged over a module's layers, of those with a window only what is inside."""
    tokens, squares = np.asarray(tokens, float), np.asarray(squares, float)
    if not module_spec.windows:
        return squares
    is_causal = module_spec.name == LANGUAGE_MODEL
    # whether or not the kernel skips the rest
    layers = (windowed_squares(tokens, squares, size, is_causal) if size else squares for size in module_spec.windows)
    return np.mean(np.stack(list(layers)), axis=0)


def module_model_flops(spec: ModelSpec, module: str, tokens: ArrayLike, squares: ArrayLike) -> NDArray:
    """FLOPs of a module's forward and backward of each sample, without recomputation."""
    per_token, per_square = _training_flops(_Same(spec), module)
    tokens = np.asarray(tokens, float)
    return per_token * tokens + per_square * attended_squares(spec.modules[module], tokens, squares)


def model_flops(spec: ModelSpec, sizes: SampleSizes) -> float:
    """Model FLOPs of a step for MFU, without padding, masked pairs, gradients of frozen weights or recomputation."""
    return math.fsum(
        float(module_model_flops(spec, name, sizes.tokens[name], sizes.squares[name]).sum()) for name in spec.modules
    )
