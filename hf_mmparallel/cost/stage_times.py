"""Times of the stages of a plan: sums over their layers, with backwards only if something is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .._portable import on_grid, weighted_sum
from ..plan import LANGUAGE_MODEL, ModelSpec, ModuleSpec, ParallelPlan, SampleSizes, Stage, StageKey
from ..schedule.kinds import TaskKind, Work
from .analytic import ATTENTION_BACKWARD, layer_flops
from .collectives import longer_ms
from .layer_table import (
    LAUNCH,
    PLACES,
    SQUARE,
    TOKEN,
    LayerTable,
    inner_gradient_share,
    layer_table,
    places_of,
    trainable_share,
    windowed_squares,
)
from .layers import CostModel, data_gradients
from .sharded_passes import PassTransfers, TimedTransfer, transfers_in_passes
from .stage_memory import moved_bytes

# Under context parallelism, transfers of keys and values in each part of the work, relative to a forward (for input
# gradients they are gathered again, and their gradients are reduced), and the attention that hides them.
_GATHERS: Mapping[Work, float] = {"forward": 1.0, "inputs": 2.0, "again": 1.0}
_HIDING: Mapping[Work, float] = {"forward": 1.0, "inputs": ATTENTION_BACKWARD}
_MOVING: frozenset[Work] = frozenset(("forward", "inputs"))  # beside which activations travel


@dataclass(frozen=True, eq=False)
class SharedPasses:
    """Communication beside the layers of a stage whose copies share weights or gradients."""

    table: LayerTable  # of the stage
    transfers: PassTransfers
    cp_size: int
    # word of a kind -> number of equal layers in its tasks, their table, communication beside one, and beside none
    _known: dict[str, tuple[NDArray, LayerTable, NDArray, float]] = field(default_factory=dict, repr=False)

    def _alike(self, kind: TaskKind) -> tuple[NDArray, LayerTable, NDArray, float]:
        if kind.word not in self._known:
            own = self.table
            beside_ms, exposed_ms = self.transfers.of_pass(len(own.windows), kind)
            columns = np.column_stack([own.of_kind(kind), own.launched_ms(kind), own.windows, beside_ms])
            _, first, counts = np.unique(columns, axis=0, return_index=True, return_counts=True)
            self._known[kind.word] = counts, own.chosen(first), beside_ms[first], exposed_ms
        return self._known[kind.word]

    def more_ms(self, tokens: NDArray, squares: NDArray, kind: TaskKind) -> NDArray:
        """Time that the communication adds to the computation of chunks `[chunks]`."""
        counts, table, beside_ms, exposed_ms = self._alike(kind)
        compute_ms = table.task_ms(tokens, squares, self.cp_size, kind)
        added_ms = longer_ms(compute_ms, beside_ms[:, None], self.transfers.overlap_efficiency)
        return exposed_ms + weighted_sum(added_ms.T, counts)

    def timed(self, tokens: float, squares: float, kind: TaskKind, length_ms: float) -> list[TimedTransfer]:
        """Transfers in the task of a chunk that takes `length_ms`, see [`PassTransfers.time_transfers`]."""
        # a pass may have more than its layers: what they wait for
        compute_ms = self.table.task_ms(tokens, squares, self.cp_size, kind)
        found, of_layers_ms = self.transfers.time_transfers(compute_ms, kind)
        return [transfer.scale(length_ms / of_layers_ms) for transfer in found]


@dataclass(frozen=True, eq=False)
class HostMoves:
    """Copies of what layers save, to host memory in forwards and back in backwards."""

    table: LayerTable  # of the layers of the stage
    copy_ms: NDArray  # [layers, 3] of what each saves, per squared token, per token, and constant
    cp_size: int

    def more_ms(self, tokens: NDArray, squares: NDArray, kind: TaskKind) -> NDArray:
        """
        Time that tasks of chunks `[chunks]` wait for copies: that of a layer travels while the one behind it computes,
        in both directions, that of the last layer while none does.
        """
        if _MOVING.isdisjoint(kind.work):
            return np.zeros(len(tokens))
        sizes = np.stack([squares / self.cp_size, tokens / self.cp_size, np.ones(len(tokens))])
        copy_ms = np.einsum("lk,kc->lc", self.copy_ms, sizes)
        hidden_ms = self.table.task_ms(tokens, squares, self.cp_size, kind)[1:]
        return on_grid(np.maximum(copy_ms[:-1] - hidden_ms, 0.0).sum(axis=0) + copy_ms[-1])


@dataclass(frozen=True, eq=False)
class StageCost:
    """Milliseconds of a chunk on a stage, as a function of its tokens and its sum of squared sequence lengths."""

    work: NDArray  # (parts, 4 + windows), see [`LayerTable.summed`]
    windows: tuple[float, ...] = ()
    is_causal: bool = True
    gather_token_ms: float = 0.0  # per token, to gather keys and values from the other cp ranks
    gather_square_ms: float = 0.0  # per squared token, of the attention that overlaps with it
    passes: SharedPasses | None = None
    moves: HostMoves | None = None

    def does(self, part: Work) -> bool:
        """Whether the stage has a part of the work."""
        return bool(self.work[PLACES[part], :LAUNCH].any())

    def plus(self, parts: Sequence[Work], columns: int | slice, more: float | NDArray) -> StageCost:
        """The cost with more of some parts."""
        work = self.work.copy()
        work[[PLACES[part] for part in parts], columns] += more
        return replace(self, work=work)

    def without_launches(self) -> StageCost:
        """The cost of a stage whose kernels need no launches."""
        return replace(self, work=self.work * (np.arange(self.work.shape[1]) != LAUNCH))

    def launched_ms(self, kind: TaskKind) -> float:
        """Host time to launch a task."""
        return float(self.work[places_of(kind), LAUNCH].sum())

    def task_ms(self, tokens: float, squares: float, kind: TaskKind) -> float:
        """Time of a task of a kind on a chunk, 0 if it has nothing to do."""
        return float(self.times_ms(np.array([tokens]), np.array([squares]), kind)[0])

    def times_ms(self, tokens: NDArray, squares: NDArray, kind: TaskKind) -> NDArray:
        """Times `[chunks]` of tasks of a kind, see [`~StageCost.task_ms`]."""
        square, token, constant, launch, *slopes = self.work[places_of(kind)].sum(axis=0).tolist()
        if not (square or token or constant):
            return np.zeros(len(tokens))
        computed = square * squares + token * tokens + constant
        for window, slope in zip(self.windows, slopes, strict=True):
            computed = computed + slope * windowed_squares(tokens, squares, window, self.is_causal)
        # Only the part of the transfer that attention does not hide takes time.
        gathered = sum(_GATHERS.get(part, 0.0) for part in kind.work if self.does(part))
        hiding = sum(_HIDING.get(part, 0.0) for part in kind.work)
        exposed = gathered * self.gather_token_ms * tokens - hiding * self.gather_square_ms * squares
        result = np.maximum(computed, launch) + np.maximum(0.0, exposed)
        beside = (own for own in (self.passes, self.moves) if own is not None)
        return result + sum(own.more_ms(tokens, squares, kind) for own in beside)

    def timed_transfers(self, tokens: float, squares: float, kind: TaskKind) -> list[TimedTransfer]:
        """Transfers in the task of a chunk, relative to its start."""
        length_ms = self.task_ms(tokens, squares, kind)
        return self.passes.timed(tokens, squares, kind, length_ms) if length_ms and self.passes is not None else []


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
            kind = (name, stage.layers, stage.tp_size, link, first_rank, waits_ms, transfers)
            if kind not in known:
                table = layer_table(costs, name, stage.tp_size, module.activation_checkpointing, first_rank)
                cost = _stage_cost(costs, name, stage, table, waits_ms)
                host_link = costs.device.host_link_bytes_per_ms
                if module.storage.offload_activations and host_link is not None:
                    moved = moved_bytes(costs, name, stage.tp_size, module.activation_checkpointing, module.storage)
                    inner = table.chosen(slice(1 + stage.layers[0], 1 + stage.layers[1]))
                    moves = HostMoves(inner, moved[slice(*stage.layers)] / host_link, stage.cp_size)
                    cost = replace(cost, moves=moves)
                if transfers is not None:
                    cost = replace(cost, passes=SharedPasses(table.of_stage(stage), transfers, stage.cp_size))
                known[kind] = cost
            result[name, replica, index] = known[kind]
    return result


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
    """The cost of a stage by itself, and of what its cp ranks exchange."""
    module_spec, cp_size, tp_size = costs.spec.modules[module], stage.cp_size, stage.tp_size
    cost = StageCost(*table.of_stage(stage).summed(cp_size), table.is_causal)
    if waits_ms:
        cost = cost.plus(["forward", "inputs"], TOKEN, waits_ms)
    if cp_size == 1 or module != LANGUAGE_MODEL:  # the cp ranks of an encoder have whole images
        return cost
    layers, link = range(*stage.layers), costs.device.link_bytes_per_ms(stage.cp_groups[0])
    attending = [layer for layer in layers if module_spec.attends(layer)]
    received_ms = costs.value_bytes * (cp_size - 1) / cp_size / link  # of a value of each token from other ranks
    width = 2 * module_spec.num_kv_heads * module_spec.head_width / tp_size
    moved_ms = sum(map(module_spec.moved_values, layers)) * received_ms / cp_size
    moving: tuple[Work, ...] = ("forward", "inputs", "again")
    return replace(
        cost.plus([part for part in moving if part == "forward" or cost.does(part)], TOKEN, moved_ms),
        gather_token_ms=len(attending) * width * received_ms,
        gather_square_ms=sum(table.forward[1 + layer, SQUARE] for layer in attending) / cp_size,
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
