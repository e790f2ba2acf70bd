"""Times of the stages of a plan: sums over their layers, with backwards only if something is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._portable import on_grid, weighted_sum
from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, ParallelPlan, SampleSizes, Stage, StageKey
from ..plan.ownership import can_put_off
from ..schedule.kinds import KINDS, WHOLE_PASSES, WORK, TaskKind, Work
from .activations import LayerShape, Matrix
from .analytic import ATTENTION_BACKWARD, active_elements, layer_flops
from .layers import CostModel, LayerCost, Polynomial, data_gradients
from .sharded_passes import PassTransfers, TimedTransfer, longer_ms, transfers_in_passes
from .stage_memory import moved_bytes

# Under context parallelism, transfers of keys and values in each part of the work, relative to a forward (for input
# gradients they are gathered again, and their gradients are reduced), and the attention that hides them.
_GATHERS: Mapping[Work, float] = {"forward": 1.0, "inputs": 2.0, "again": 1.0}
_HIDING: Mapping[Work, float] = {"forward": 1.0, "inputs": ATTENTION_BACKWARD}


def trainable_share(spec: ModelSpec, module: str, index: int) -> float:
    """Share of a layer's matrix elements that are trainable, or of its lookups if it has no matrices."""
    active = active_elements(spec, module, index)
    if not any(elements for _, elements in active):
        lookups = [use.parameter.trainable for use, _ in active if use.parameter.is_lookup]
        return sum(lookups) / len(lookups) if lookups else 0.0
    trained = sum(elements for use, elements in active if use.parameter.trainable)
    return trained / sum(elements for _, elements in active) if trained else 0.0


def linear_share(spec: ModelSpec, module: str, index: int) -> float:
    """Share of the trained matrix elements of a layer whose gradients can be put off: those of linear layers."""
    trained = [(use, elements) for use, elements in active_elements(spec, module, index) if use.parameter.trainable]
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


@dataclass(frozen=True)
class LayerTable:
    """Milliseconds of the layers of a module in one layout, each a row, between the parts before and after them."""

    work: Mapping[Work, NDArray]  # part -> (num_layers + 2, 3) per squared token, per token, constant
    # part -> (num_layers + 2,) host times to launch it, which longer device times hide
    launches: Mapping[Work, NDArray]
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
        return sum((self.work[part] for part in kind.work), np.zeros_like(self.work["forward"]))

    def launched_ms(self, kind: TaskKind) -> NDArray:
        """(num_layers + 2,) host times to launch the work of tasks of a kind."""
        return sum((self.launches[part] for part in kind.work), np.zeros(len(self.windows)))

    def chosen(self, rows: NDArray | slice) -> LayerTable:
        """The table of some rows."""
        work: dict[Work, NDArray] = {part: values[rows] for part, values in self.work.items()}
        launches: dict[Work, NDArray] = {part: values[rows] for part, values in self.launches.items()}
        return LayerTable(work, launches, self.windows[rows], self.is_causal)

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

    def stage(self, stage: Stage) -> StageCost:
        """Cost of a stage on each of its ranks."""
        own, cp_size = self.chosen(self.rows(stage)), stage.cp_size
        sizes = np.unique(own.windows[own.windows > 0]).tolist()
        work: dict[Work, Polynomial] = {}
        for part, table in own.work.items():
            whole = np.where(own.windows[:, None] > 0, table * [0.0, 1.0, 1.0], table)
            work[part] = Polynomial(*whole.sum(axis=0).tolist()).over(cp_size)
        windows: list[tuple[float, Mapping[Work, float]]] = []
        for size in sizes:
            has_size = own.windows == size
            windows.append(
                (size, {part: float(table[has_size, 0].sum()) / cp_size for part, table in own.work.items()})
            )
        launches: dict[Work, float] = {part: float(launched.sum()) for part, launched in own.launches.items()}
        return StageCost(work, launch_ms=launches, windows=tuple(windows), is_causal=self.is_causal)


def with_ends(times: NDArray) -> NDArray:
    """`[num_layers]` of `[num_layers + 2]`: the parts before and after the layers are with the first and last one."""
    layers = times[1:-1].copy()
    layers[0] += times[0]
    layers[-1] += times[-1]
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
    costs: CostModel, module: str, tp_size: int = 1, checkpointing: bool = False, first_rank: int = 0
) -> LayerTable:
    """Times of the layers of a module; `first_rank` is the position of a tp group's first rank in its node."""
    module_spec = costs.spec.modules[module]
    layers = costs.layers.starting_at(first_rank) if first_rank else costs.layers
    rows: list[dict[Work, Polynomial]] = []
    launches: list[dict[Work, float]] = []
    for index, data_gradient in enumerate(data_gradients(costs.spec)[module], start=-1):
        layer = layers.layer(module, index, tp_size).with_sums
        share = trainable_share(costs.spec, module, index)
        inner = (1.0, True) if data_gradient else inner_gradient_share(costs.spec, module, index)
        recompute = checkpointing and 0 <= index < module_spec.num_layers and bool(data_gradient or share)
        put_off = linear_share(costs.spec, module, index)
        rows.append(layer_work(layer, data_gradient, share, put_off, recompute, inner))
        forward_launch, backward_launch = layer.launch_ms
        of_weights = layer.weight_launch_ms * put_off * (share > 0)
        rest = backward_launch * (data_gradient or share > 0) - of_weights
        launches.append({"forward": forward_launch, "inputs": rest, "weights": of_weights})
        launches[-1]["again"] = recompute * forward_launch
    windows = np.array([0, *(module_spec.window(layer) for layer in range(module_spec.num_layers)), 0], float)
    work: dict[Work, NDArray] = {}
    launched: dict[Work, NDArray] = {}
    for part in WORK:
        work[part] = np.array([(p.square, p.token, p.constant) for p in (row[part] for row in rows)])
        launched[part] = np.array([row.get(part, 0.0) for row in launches])
    return LayerTable(work, launched, windows, module == LANGUAGE_MODEL)


def layer_work(
    layer: LayerCost,
    data_gradient: bool,
    share: float,
    put_off: float = 0.0,
    recompute: bool = False,
    inner: tuple[float, bool] = (0.0, False),
) -> dict[Work, Polynomial]:
    """
    Times of the parts of a layer's work: its forward; the gradient of its input if that is needed, else the input
    gradients for its own weights (`inner`, see [`inner_gradient_share`]); the gradients of the trained share of its
    weights, of which a share (`put_off`) can come later; and its forward again if recomputed.
    """
    inputs, weights = Polynomial(), layer.weight_gradient * share
    if data_gradient:
        inputs = layer.data_gradient
    elif inner[0] or inner[1]:
        whole = layer.data_gradient
        inputs = Polynomial(whole.square * inner[1], whole.token * inner[0], whole.constant * inner[0])
    return {
        "forward": layer.forward,
        "inputs": inputs,
        "weights": weights * put_off,
        "others": weights * (1 - put_off),
        "again": layer.forward * recompute,
    }


@dataclass(frozen=True)
class StageCost:
    """Milliseconds of a chunk on a stage, as a function of its tokens and its sum of squared sequence lengths."""

    work: Mapping[Work, Polynomial]
    gather_token_ms: float = 0.0  # per token, to gather keys and values from the other cp ranks
    gather_square_ms: float = 0.0  # per squared token, of the attention that overlaps with it
    launch_ms: Mapping[Work, float] = field(default_factory=dict)  # host times to launch the parts
    # of layers: the window in tokens, and ms per squared token in each part
    windows: tuple[tuple[float, Mapping[Work, float]], ...] = ()
    is_causal: bool = True
    _of_kind: dict[str, Polynomial] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of_kind(self, kind: TaskKind) -> Polynomial:
        """The work of a task, but for attention in windows, launches and transfers."""
        if kind.word not in self._of_kind:
            self._of_kind[kind.word] = Polynomial.sum(self.work[part] for part in kind.work)
        return self._of_kind[kind.word]

    def launched_ms(self, kind: TaskKind) -> float:
        """Host time to launch a task."""
        return sum(self.launch_ms.get(part, 0.0) for part in kind.work)

    def task_ms(self, tokens: float, squares: float, kind: TaskKind) -> float:
        """Time of a task of a kind on a chunk, 0 if it has nothing to do."""
        return float(self.times_ms(np.array([tokens]), np.array([squares]), kind)[0])

    def times_ms(self, tokens: NDArray, squares: NDArray, kind: TaskKind) -> NDArray:
        """Times `[chunks]` of tasks of a kind, see [`~StageCost.task_ms`]."""
        polynomial = self.of_kind(kind)
        if polynomial == Polynomial():
            return np.zeros(len(tokens))
        windowed = np.zeros(len(tokens))
        for window, slopes in self.windows:
            slope = sum(slopes[part] for part in kind.work)
            windowed += slope * windowed_squares(tokens, squares, window, self.is_causal)
        computed = polynomial.square * squares + polynomial.token * tokens + polynomial.constant + windowed
        # Only the part of the transfer that attention does not hide takes time.
        gathered = sum(_GATHERS.get(part, 0.0) for part in kind.work if self.work[part] != Polynomial())
        hiding = sum(_HIDING.get(part, 0.0) for part in kind.work)
        exposed = gathered * self.gather_token_ms * tokens - hiding * self.gather_square_ms * squares
        return np.maximum(computed, self.launched_ms(kind)) + np.maximum(0.0, exposed)


@dataclass(frozen=True)
class SharedPasses:
    """Layers of a stage with equal times in a pass that gathers weights or reduces gradients, by kind of layer."""

    counts: NDArray  # (kinds,) number of layers
    table: LayerTable  # one row for each kind
    beside_ms: NDArray  # (kinds,) communication beside the computation of such a layer
    exposed_ms: float  # communication beside no computation
    overlap_efficiency: float  # relative compute speed beside communication

    @classmethod
    def of(cls, table: LayerTable, stage: Stage, transfers: PassTransfers, kind: TaskKind) -> SharedPasses:
        """The passes of a stage in tasks of a kind."""
        own = table.chosen(table.rows(stage))
        beside_ms, exposed_ms = transfers.of_pass(len(own.windows), kind)
        columns = np.column_stack([own.of_kind(kind), own.launched_ms(kind), own.windows, beside_ms])
        _, first, counts = np.unique(columns, axis=0, return_index=True, return_counts=True)
        return cls(counts, own.chosen(first), beside_ms[first], exposed_ms, transfers.overlap_efficiency)

    def more_ms(self, tokens: NDArray, squares: NDArray, cp_size: int, kind: TaskKind) -> NDArray:
        """Time that the communication adds to the computation of chunks `[chunks]`."""
        compute_ms = self.table.task_ms(tokens, squares, cp_size, kind)
        added_ms = longer_ms(compute_ms, self.beside_ms[:, None], self.overlap_efficiency)
        return self.exposed_ms + weighted_sum(added_ms.T, self.counts)


@dataclass(frozen=True)
class SharedStageCost(StageCost):
    """A [`StageCost`] whose copies share weights or gradients, so that its passes communicate."""

    passes: Mapping[str, SharedPasses] = field(kw_only=True)  # word of a kind -> the passes of its tasks
    cp_size: int = 1
    table: LayerTable = field(kw_only=True)  # of the layers of the module
    rows: slice = field(kw_only=True)  # those of the stage
    transfers: PassTransfers = field(kw_only=True)

    def times_ms(self, tokens: NDArray, squares: NDArray, kind: TaskKind) -> NDArray:
        """See [`StageCost`]."""
        times_ms = super().times_ms(tokens, squares, kind)
        if kind.word not in self.passes or self.of_kind(kind) == Polynomial():
            return times_ms
        return times_ms + self.passes[kind.word].more_ms(tokens, squares, self.cp_size, kind)

    def timed_transfers(self, tokens: float, squares: float, kind: TaskKind) -> list[TimedTransfer]:
        """Transfers in the task of a chunk, see [`PassTransfers.time_transfers`], relative to `task_ms`."""
        length_ms = self.task_ms(tokens, squares, kind)
        if not length_ms or kind.word not in self.passes:
            return []
        # a pass may have more than its layers: what they wait for
        compute_ms = self.table.task_ms(tokens, squares, self.cp_size, kind)[self.rows]
        found, of_layers_ms = self.transfers.time_transfers(compute_ms, kind)
        return [transfer.scale(length_ms / of_layers_ms) for transfer in found]


def stage_costs(costs: CostModel, plan: ParallelPlan) -> dict[StageKey, StageCost]:
    """(module, replica, stage) -> cost of all stages of a plan."""
    known: dict[tuple, StageCost] = {}
    shared: dict[tuple, PassTransfers | None] = {}
    result = {}
    costs = costs.of_plan(plan)
    for name, module in plan.modules.items():
        for replica, index, stage in module.stages():
            first_rank = _first_rank(costs, stage)
            waits_ms = _blocked_token_ms(costs, name, module.replicas[replica], index)
            alike = (name, stage.layers, stage.tp_size)
            if alike not in shared:
                shared[alike] = transfers_in_passes(costs, plan, name, stage)
            transfers = shared[alike]
            link = costs.device.link_bytes_per_ms(stage.cp_groups[0])
            moves = module.storage.offload_activations
            kind = (name, stage.layers, stage.tp_size, link, first_rank, waits_ms, transfers)
            if kind not in known:
                table = layer_table(costs, name, stage.tp_size, module.activation_checkpointing, first_rank)
                known[kind] = _stage_cost(costs, name, stage, table, waits_ms)
                if moves:
                    moved = moved_bytes(costs, name, stage.tp_size, module.activation_checkpointing)
                    known[kind] = _with_moves(costs, known[kind], stage, table, moved)
                if transfers is not None:
                    known[kind] = _with_transfers(known[kind], stage, table, transfers)
            result[name, replica, index] = known[kind]
    return result


def _with_moves(costs: CostModel, cost: StageCost, stage: Stage, table: LayerTable, moved: NDArray) -> StageCost:
    """The cost of a stage whose layers' activations `[num_layers, 3]` are in host memory between its passes."""
    link = costs.device.host_link_bytes_per_ms
    if link is None:
        return cost
    own, rows = moved[slice(*stage.layers)] / link, slice(1 + stage.layers[0], 1 + stage.layers[1])
    work = dict(cost.work)
    parts: tuple[tuple[Work, NDArray], ...] = (("forward", table.forward), ("inputs", table.backward))
    for part, computed in parts:
        # those of a layer travel while another one computes; those of the last layer, while none does
        exposed = np.maximum(own - computed[rows], 0.0).sum(axis=0) + own[-1]
        work[part] += Polynomial(*exposed.tolist()).over(stage.cp_size)
    return replace(cost, work=work)


def _with_transfers(cost: StageCost, stage: Stage, table: LayerTable, transfers: PassTransfers) -> StageCost:
    """The cost of a stage with the communication in its passes."""
    passes = {word: SharedPasses.of(table, stage, transfers, kind) for word, kind in KINDS.items() if kind.work}
    values = {f.name: getattr(cost, f.name) for f in fields(StageCost) if f.init}
    held = {"table": table, "rows": table.rows(stage), "transfers": transfers}
    return SharedStageCost(**values, passes=passes, cp_size=stage.cp_size, **held)


def _first_rank(costs: CostModel, stage: Stage) -> int:
    """Position in its node of the first rank of the slowest tp group; 0 if tp groups are within nodes."""
    size = costs.device.node_size
    crossing = [tp_group for tp_group in stage.mesh if tp_group[0] // size != tp_group[-1] // size]
    return min(crossing, key=costs.device.link_bytes_per_ms)[0] % size if crossing else 0


def _stage_cost(
    costs: CostModel,
    module: str,
    stage: Stage,
    table: LayerTable,
    waits_ms: float,
) -> StageCost:
    module_spec, cp_size, tp_size = costs.spec.modules[module], stage.cp_size, stage.tp_size
    cost = table.stage(stage)
    if waits_ms:
        waits = Polynomial(token=waits_ms)
        cost = replace(cost, work={**cost.work, **{part: cost.work[part] + waits for part in ("forward", "inputs")}})
    if cp_size == 1 or module != LANGUAGE_MODEL:  # the cp ranks of an encoder have whole images
        return cost
    layers, link = range(*stage.layers), costs.device.link_bytes_per_ms(stage.cp_groups[0])
    attending = [layer for layer in layers if module_spec.attends(layer)]
    received_ms = costs.value_bytes * (cp_size - 1) / cp_size / link  # of a value of each token from other ranks
    width = 2 * module_spec.num_kv_heads * module_spec.head_width / tp_size
    # the tokens of a rank go to those of their samples and back
    moved_ms = 2 * module_spec.hidden_size * received_ms / cp_size * sum(map(module_spec.carries_state, layers))
    moved: dict[Work, Polynomial] = {
        part: cost.work[part] + Polynomial(token=moved_ms)
        for part in ("forward", "inputs", "again")
        if part == "forward" or cost.work[part] != Polynomial()
    }
    return replace(
        cost,
        work={**cost.work, **moved},
        gather_token_ms=len(attending) * width * received_ms,
        gather_square_ms=sum(table.forward[1 + layer, 0] for layer in attending) / cp_size,
    )


def _blocked_token_ms(costs: CostModel, module: str, stages: Sequence[Stage], index: int) -> float:
    """Time per token that a stage spends on sends and receives, if its engine can't overlap them."""
    if not costs.engine.blocking_messages:
        return 0.0
    spec, result = costs.spec.modules[module], 0.0
    for other in (index - 1, index + 1):
        if 0 <= other < len(stages):
            grids = [stages[index].all_ranks, stages[other].all_ranks]
            ranks = list(chain(*grids))
            states = spec.states_before(stages[max(index, other)].layers[0])
            num_bytes = costs.value_bytes * spec.hidden_size * states
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
    windows = module_spec.needed_windows
    if not windows:
        return squares
    is_causal = module_spec.name == LANGUAGE_MODEL
    # whether or not the kernel skips the rest
    layers = (windowed_squares(tokens, squares, size, is_causal) if size else squares for size in windows)
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
