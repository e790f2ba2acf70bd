"""Memory of a stage on each of its ranks: weights, saved activations of a chunk, and transient memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from .._portable import weighted_sum
from ..plan import (
    LANGUAGE_MODEL,
    MAX_LOGITS,
    ModuleSpec,
    ParallelPlan,
    Stage,
    StageKey,
    StorageSettings,
    stage_holds,
)
from ..plan.checkpointing import SELECTIVE, Checkpointing
from ..plan.ownership import can_put_off
from .activations import (
    DTYPE_BYTES,
    FULL,
    LayerShape,
    Precision,
    chain_widths,
    kept_activations,
    parameter_shares,
    put_off_activations,
    transient_memory,
)
from .devices import HostStep
from .layer_table import layer_table
from .layers import CostModel, Polynomial, data_gradients
from .sharded_passes import GATHERS_IN_PASSES, REDUCES_IN_PASSES, num_shards

GIB = 2**30


def gib_text(num_bytes: float) -> str:
    """Bytes in GiB: `126.3`, `0.0412`; the same digits for a need and for its limit."""
    gib = num_bytes / GIB
    return f"{gib:,.1f}" if gib >= 10 else f"{gib:.3g}"


GRADIENT_BUCKET_BYTES = 25 * 2**20  # size of the buckets of gradient all-reduces
COPY_WINDOW_BYTES = 256 * 2**20  # parameters and state on their way at the same time when a plan changes
OFFLOAD_BUCKET_BYTES = 64 * 2**20  # size of the buckets in which gradients come to an optimizer on the CPU
_TEXT_BYTES = 24  # per token: its id, its label and its entry of the attention mask


@dataclass(frozen=True)
class RankMemory:
    """Estimated bytes of one rank."""

    weights: float = 0.0  # in the dtype of the model
    gradients: float = 0.0  # of trainable parameters, in float32 at least, and the bucket of their all-reduce
    # AdamW state: two values per trainable parameter, in its dtype, or three in float32 with master weights; under
    # ZeRO those of this rank's slices
    optimizer: float = 0.0
    # of the microbatches in flight, transient memory of the running one, and the inputs of the step
    activations: float = 0.0
    master: float = 0.0  # part of `optimizer`: master weights
    host: float = 0.0  # in host memory and in no other number: offloaded optimizer state, weights and activations

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def total_gib(self) -> float:
        return self.total / GIB

    @property
    def parts(self) -> dict[str, float]:
        """What the memory of the device consists of, in words."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "activations": self.activations,
        }

    def __add__(self, other: RankMemory) -> RankMemory:
        return RankMemory(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.activations + other.activations,
            self.master + other.master,
            self.host + other.host,
        )


@dataclass(frozen=True, eq=False)
class StageMemory:
    """
    Memory of a stage on each of its ranks. It has one entry for each part that runs in sequence: the part before the
    layers, each layer, the part after the layers, and the loss or the tensors that are sent.
    """

    state: RankMemory  # weights, gradients and optimizer state
    saved: NDArray  # (entries, 3) bytes saved for the backward: per squared token, per token, constant
    forward: NDArray  # (entries, 3) peak bytes in a forward, including saved activations
    backward: NDArray  # (entries, 3) bytes in a backward besides saved activations
    gradients: NDArray  # (entries,) bytes of the gradients that the first backward allocates
    # (entries,) bytes of the largest gradient, which each backward allocates in its own dtype and in the accumulation
    # dtype
    largest: NDArray
    input_bytes: float  # per token
    cp_size: int
    bucket_bytes: float  # of gradient sums
    # sums of the slices that this rank updates under ZeRO, beside the gradients once the last backward is done
    slice_bytes: float
    update_bytes: float  # memory traffic of clipping and of a fused AdamW step
    host_step: HostStep  # what a step on the CPU moves
    kept_bytes: float  # weights that stay gathered from pass to pass
    frees_features: bool  # whether it ends an encoder without a backward, whose features are freed once they are sent
    # (entries, 3) bytes that stay for weight gradients that are put off; zeros if none are
    put_off: NDArray
    moved: NDArray  # (3,) bytes that a chunk has in host memory between its forward and its backward
    max_tokens: float = np.inf  # of a chunk on one cp rank; for a longer one it is `longer`, whose loss is in chunks
    longer: StageMemory | None = None

    def at(self, num_tokens: float) -> StageMemory:
        """The memory of a stage for chunks with some tokens on each cp rank."""
        return self if self.longer is None or num_tokens <= self.max_tokens else self.longer

    def _scaled(self, chunk: NDArray) -> NDArray:
        """`[squared tokens, tokens, 1]` of a chunk on one cp rank."""
        return chunk / np.array([self.cp_size, self.cp_size, 1.0])

    def saved_bytes(self, chunks: NDArray) -> NDArray:
        """Bytes `[...]` that chunks `[..., 3]` save between their forward and their backward."""
        scaled = self._scaled(chunks)
        saved = weighted_sum(scaled, self.saved.sum(axis=0))
        if self.longer is None:
            return saved
        return np.where(scaled[..., 1] > self.max_tokens, self.longer.saved_bytes(chunks), saved)

    def put_off_bytes(self, chunks: NDArray) -> NDArray:
        """Bytes `[...]` of chunks `[..., 3]` that stay from the gradients of inputs to those of weights."""
        return weighted_sum(self._scaled(chunks), self.put_off.sum(axis=0))

    def moved_bytes(self, chunks: NDArray) -> NDArray:
        """Bytes `[...]` of chunks `[..., 3]` in host memory between their forward and their backward."""
        return weighted_sum(self._scaled(chunks), self.moved)

    def most_running_bytes(self, chunks: NDArray, starts: Sequence[int] | NDArray = (0,)) -> NDArray:
        """
        Most bytes of a task besides saved activations and gradients `[groups]`, on groups of chunks `[chunks, 3]` that
        begin at `starts`.
        """
        scaled, most = self._scaled(chunks), np.zeros(len(starts))
        is_longer = scaled[:, 1] > self.max_tokens
        for memory, wanted in ((self, ~is_longer), (self.longer, is_longer)):
            if memory is not None and wanted.any():
                largest = np.maximum.reduceat(np.where(wanted[:, None], scaled, 0.0), starts)
                most = np.maximum(most, weighted_sum(memory.transient, largest[:, None]).max(axis=1, initial=0.0))
        return most

    def forward_bytes(self, chunk: NDArray) -> float:
        """Peak bytes of a forward, including the activations that it saves."""
        at = self._scaled(chunk)
        memory = self.at(at[1])
        saved = weighted_sum(memory.saved, at)
        return float(np.max(np.cumsum(saved) - saved + np.maximum(weighted_sum(memory.forward, at), saved)))

    def backward_bytes(self, chunk: NDArray, is_first: bool) -> float:
        """Peak bytes of a backward, including saved activations and the weight gradients that it allocates."""
        at = self._scaled(chunk)
        memory = self.at(at[1])
        live = np.cumsum(weighted_sum(memory.saved, at)) + weighted_sum(memory.backward, at) + self.largest
        live += np.cumsum(weighted_sum(self.put_off, at)[::-1])[::-1]
        if is_first:
            allocated = np.cumsum(self.gradients[::-1])[::-1]
            live = np.maximum(live + allocated - self.gradients, allocated)
        return float(live.max())

    @cached_property
    def transient(self) -> NDArray:
        """Transient bytes of a task, besides saved activations and gradients `[cases, 3]`; the maximum counts."""
        # what is put off grows from the last entry on, as saved activations are freed
        put_off, saved = (np.cumsum(table[::-1], axis=0)[::-1] for table in (self.put_off, self.saved))
        backward = self.backward + np.maximum(put_off - (saved - self.saved), 0.0)
        backward[:, 2] += self.largest
        return np.unique(np.concatenate([np.maximum(self.forward - self.saved, 0.0), backward]), axis=0)


@dataclass(frozen=True, eq=False)
class _ModuleMemory:
    """The entries of a module at one tensor-parallel size, without logits and the last one of [`StageMemory`]."""

    put_off: NDArray
    saved: NDArray
    forward: NDArray
    backward: NDArray
    moved: NDArray  # of `saved`, what is in host memory in its place
    needed: tuple[bool, ...]  # whether the input of each entry needs a gradient, and last whether the output does


@lru_cache(maxsize=1024)
def _module_memory(
    costs: CostModel, module: str, tp_size: int, checkpointing: Checkpointing, storage: StorageSettings
) -> _ModuleMemory:
    module_spec = costs.spec.modules[module]
    needed = data_gradients(costs.spec)[module]
    trained = [
        any(use.parameter.trainable for use in costs.spec.uses.get((module, index), ()))
        for index in range(-1, module_spec.num_layers + 1)
    ]
    precision, table = Precision.of(module_spec, costs.value_bytes), layer_table(costs, module, tp_size, checkpointing)
    known: dict[tuple, tuple[Polynomial, ...]] = {}
    rows = []
    for position, index in enumerate(range(-1, module_spec.num_layers + 1)):
        has_backward = needed[position] or trained[position]
        saved_bytes = Polynomial(*table.saved[position].tolist()) if has_backward else Polynomial()
        key = costs.spec.first_alike[module, index], has_backward, saved_bytes
        if key not in known:
            uses = costs.spec.uses.get((module, index), ())
            put_off = put_off_activations(module_spec, uses, index, precision, tp_size, checkpointing)
            entry = saved_bytes, Polynomial(), Polynomial()
            if 0 <= index < module_spec.num_layers:
                again = has_backward and checkpointing
                entry = _layer_entry(costs, module_spec, index, tp_size, saved_bytes, again)
            known[key] = put_off, *entry
        rows.append(known[key])
    put_off, saved, forward, backward = (_array(column) for column in zip(*rows, strict=True))
    moved = np.zeros_like(saved)
    if storage.offload_activations:  # while one layer computes, another one's travels
        moved[1:-1] = saved[1:-1]
        forward, backward, saved = np.maximum(forward, moved) + moved, backward + 2 * moved, saved - moved
    return _ModuleMemory(put_off, saved, forward, backward, moved, (*needed, needed[-1] or trained[-1]))


def layer_kinds(costs: CostModel, module: str, tp_size: int, checkpointing: Checkpointing) -> list[int]:
    """A number for each layer from -1 to one past the last, equal where stages need as much memory for it."""
    memory, uses = (
        _module_memory(costs, module, tp_size, checkpointing, StorageSettings()),
        _uses_of(costs, module, tp_size),
    )
    numbers: dict[tuple, int] = {}
    result = []
    for row, index in enumerate(range(-1, costs.spec.modules[module].num_layers + 1)):
        own = uses.of_layers(range(index, index + 1))
        tables = (memory.saved, memory.forward, memory.backward, memory.put_off)
        parameters = (getattr(own, column.name).tobytes() for column in fields(own)[2:])
        kind = (memory.needed[row], *(table[row].tobytes() for table in tables), *parameters)
        result.append(numbers.setdefault(kind, len(numbers)))
    return result


def moved_bytes(costs: CostModel, name: str, tp_size: int, again: Checkpointing, storage: StorageSettings) -> NDArray:
    """(num_layers, 3) bytes that layers save which are in host memory: per squared token, per token, constant."""
    return _module_memory(costs, name, tp_size, again, storage).moved[1:-1]


_Entry = tuple[Polynomial, Polynomial, Polynomial]


def _layer_entry(
    costs: CostModel, module_spec: ModuleSpec, index: int, tp_size: int, saved: Polynomial, again: Checkpointing
) -> _Entry:
    """A layer: saved bytes, peak of a forward, and transient bytes of a backward."""
    precision, uses = Precision.of(module_spec, costs.value_bytes), costs.spec.uses.get((module_spec.name, index), ())
    transient = transient_memory(module_spec, uses, precision, tp_size)
    if again:  # only its input is saved, and what it keeps; the rest exists while its backward runs
        none = Polynomial(), Polynomial()
        kept, read = kept_activations(module_spec, uses, precision, tp_size) if again == SELECTIVE else none
        own = _hidden(costs, module_spec) * (1 / module_spec.row_shares(tp_size)) + kept
        return own, transient.forward + kept + read * -1.0, saved + transient.recomputed + read * -1.0
    return saved, transient.forward, transient.backward if saved != Polynomial() else Polynomial()


def _hidden(costs: CostModel, module_spec: ModuleSpec) -> Polynomial:
    """Bytes of a hidden state between layers."""
    return Polynomial(token=float(module_spec.hidden_size * Precision.of(module_spec, costs.value_bytes).stream))


def _array(polynomials: Iterable[Polynomial]) -> NDArray:
    return np.array([(p.square, p.token, p.constant) for p in polynomials])


@dataclass(frozen=True)
class _LastMemory:
    """The loss, or the tensors that a stage sends."""

    entry: _Entry
    before_forward: Polynomial = Polynomial()  # logits in the part before it
    before_backward: Polynomial = Polynomial()


class _Head:
    """The matrix that logits are a product with, on a rank of a tp group."""

    def __init__(self, costs: CostModel, module_spec: ModuleSpec, tp_size: int):
        index = module_spec.num_layers
        uses = costs.spec.uses.get((module_spec.name, index), ())
        matrices = LayerShape.of(module_spec, uses).matrices if module_spec.name == LANGUAGE_MODEL else ()
        self.precision = Precision.of(module_spec, costs.value_bytes)
        self.hidden = _hidden(costs, module_spec)
        self.num_words, self.is_cut, self.trained, self.value_bytes = 0.0, False, 0.0, FULL
        if matrices:
            matrix, shares = matrices[-1], parameter_shares(costs.spec, module_spec.name, index, tp_size)
            share = min(shares[use.parameter.name] for use in uses if use.multiplies)
            self.num_words, self.is_cut = share * matrix.shape[0], share < 1
            self.trained, self.value_bytes = share * matrix.num_elements * matrix.trained, matrix.value_bytes

    @property
    def max_tokens(self) -> float:
        """Tokens of a rank whose logits are computed at once."""
        return MAX_LOGITS / self.num_words if self.num_words else np.inf

    def memory(self, has_backward: bool, is_longer: bool) -> _LastMemory:
        """The logits of a chunk, which has more than `max_tokens` if `is_longer`, see `lazy_logits.py`."""
        compute = self.precision.compute
        copy = float(compute) if compute != FULL else 0.0  # of a value in the dtype of products, beside float32
        if self.is_cut or is_longer:  # the gradients are taken in the forward
            trained = self.trained * has_backward
            # the gradient of the hidden states takes the place of those that the product of a trained head keeps
            kept = Polynomial(constant=trained * self.value_bytes) + self.hidden * float(has_backward and not trained)
            if is_longer:  # the gradient of the weight is summed in float32
                in_loss = MAX_LOGITS * (FULL + copy)
                in_product = MAX_LOGITS * compute + copy * trained
                running = Polynomial(constant=max(in_loss, in_product) + FULL * trained)
            else:
                running = Polynomial(token=(FULL + copy) * self.num_words, constant=compute * trained)
            return _LastMemory((kept, running + self.hidden * float(has_backward), Polynomial()))
        # the loss saves all log-probabilities in float32
        full, product = Polynomial(token=FULL * self.num_words), Polynomial(token=compute * self.num_words)
        saved = full * float(has_backward)
        loss = (saved, full + product + full * float(copy > 0), saved * 2.0)
        return _LastMemory(loss, before_forward=product, before_backward=full + product * float(copy > 0))


def stage_memory(costs: CostModel, plan: ParallelPlan, module: str, stage: Stage) -> StageMemory:
    """Memory of a stage on each of its ranks."""
    grid = (stage.cp_size, stage.tp_size)
    planned, costs = plan.modules[module], costs.of_plan(plan)
    copies, sharding = planned.dp_size * grid[0], planned.sharding
    shards = _Shards(
        sharding.zero_stage, num_shards(planned), sharding.shard_size is None, sharding.reshard_after_forward
    )
    checkpointing, is_copied = planned.activation_checkpointing, copies > 1
    return _stage_memory(
        costs, module, stage.layers, grid, checkpointing, is_copied, shards, planned.storage, stage.splits_backward
    )


@dataclass(frozen=True)
class _Shards:
    """What the copies of a stage divide."""

    zero_stage: int  # 1 divides the optimizer's state, 2 also gradients, 3 also weights
    count: int  # copies that divide it
    # whether these are all copies, so that the ranks of a tp group divide the optimizer's state, too, where they hold
    # a parameter whole
    are_all: bool
    reshards: bool  # whether gathered layers are freed in each pass

    def divides(self, zero_stage: int) -> bool:
        """Whether the copies divide what a ZeRO stage divides first."""
        return self.count > 1 and self.zero_stage >= zero_stage


@lru_cache(maxsize=8192)
def _stage_memory(
    costs: CostModel,
    module: str,
    layers: tuple[int, int],
    grid: tuple[int, int],
    checkpointing: Checkpointing,
    is_copied: bool,
    shards: _Shards,
    storage: StorageSettings,
    splits_backward: bool,
) -> StageMemory:
    """See [`stage_memory`]."""
    module_spec, (cp_size, tp_size) = costs.spec.modules[module], grid
    entries = _module_memory(costs, module, tp_size, checkpointing, storage)
    if not layers[0] and module_spec.row_shares(tp_size) > 1 and entries.needed[1]:
        saved = entries.saved.copy()
        saved[1] += _array([_hidden(costs, module_spec)])[0]  # all rows, from which the first layer takes its share
        entries = replace(entries, saved=saved)
    if layers[0] and entries.needed[1 + layers[0]]:  # the states of taps that it receives
        saved, received = entries.saved.copy(), module_spec.states_before(layers[0]) - 1
        saved[1 + layers[0]] += _array([_hidden(costs, module_spec) * received])[0]
        entries = replace(entries, saved=saved)
    layer_indices = [
        i for i in range(-1, module_spec.num_layers + 1) if stage_holds(layers, module_spec.num_layers, i)
    ]
    rows = [1 + index for index in layer_indices]
    head = _Head(costs, module_spec, tp_size)
    has_logits = bool(head.num_words) and layers[1] == module_spec.num_layers
    weights = _weights(costs, module, range(layer_indices[0], layer_indices[-1] + 1), tp_size, shards, storage)
    trained = float(weights.gradients.sum())
    is_summed = is_copied and not shards.divides(REDUCES_IN_PASSES)
    is_layer = np.array([0 <= index < module_spec.num_layers for index in layer_indices])
    # A backward allocates the gradients of a layer while those of the layer after it are reduced; those outside of
    # layers are reduced at its end.
    weights.largest += 2 * weights.reduced[is_layer].max() + weights.reduced[~is_layer].sum()
    if splits_backward:  # what is not put off is reduced with what is
        weights.largest += weights.at_once
    # a layer and the next one are gathered through buffers
    buffers = (3 if shards.reshards else 1) * weights.gathered[is_layer].max()
    if has_logits:
        tables, longer_tables = (
            _tables(entries, rows, head.memory(entries.needed[-1], is_longer), buffers) for is_longer in (False, True)
        )
    else:
        sent = _sent_entry(costs, module_spec, layers[1], entries.needed)
        tables = longer_tables = _tables(entries, rows, _LastMemory(sent), buffers)
    result = StageMemory(
        _state(weights, trained, storage),
        *tables,
        np.append(weights.gradients, 0.0),
        np.append(weights.largest, 0.0),
        _input_bytes(module_spec),
        cp_size,
        min(trained if is_summed else weights.tied, GRADIENT_BUCKET_BYTES),
        weights.slices,
        5.0 * weights.updated_gradients if storage.offload_optimizer else weights.update_bytes,
        weights.host_step if storage.offload_optimizer else HostStep(),
        float(weights.gathered[~is_layer].sum() if shards.reshards else weights.gathered.sum()),
        module_spec.is_encoder and layers[1] == module_spec.num_layers and not entries.needed[-1],
        np.concatenate([splits_backward * entries.put_off[rows], np.zeros((1, 3))]),
        entries.moved[rows].sum(axis=0),
    )
    if not has_logits:
        return result
    saved, forward, backward = longer_tables
    longer = replace(result, saved=saved, forward=forward, backward=backward)
    return replace(result, max_tokens=head.max_tokens, longer=longer)


def _tables(
    entries: _ModuleMemory, rows: Sequence[int], last: _LastMemory, buffers: float
) -> tuple[NDArray, NDArray, NDArray]:
    """Returns what [`StageMemory`] has of a stage with some entries of a module."""
    saved, forward, backward = (
        np.concatenate([table[rows], _array([entry])])
        for table, entry in zip((entries.saved, entries.forward, entries.backward), last.entry, strict=True)
    )
    forward[-2:-1] += _array([last.before_forward])
    backward[-2:-1] += _array([last.before_backward])
    forward[:, 2] += buffers
    backward[:, 2] += buffers
    return saved, forward, backward


@dataclass
class _Weights:
    """Weight and gradient bytes of a stage on a rank, by layer where they are arrays."""

    gradients: NDArray  # that the rank keeps
    largest: NDArray  # the largest gradient of each layer
    gathered: NDArray  # weights that passes gather
    reduced: NDArray  # gradients that passes reduce
    streamed: NDArray  # weights in host memory
    total: float = 0.0  # all weights that it keeps on the device
    updated: float = 0.0  # trained weights that its optimizer updates
    updated_gradients: float = 0.0  # gradients of these
    master: float = 0.0  # those of `updated` that are copies of 16-bit weights
    at_once: float = 0.0  # gradients that passes reduce and that can't be put off
    slices: float = 0.0  # those of `updated_gradients` that come beside all gradients when these are summed
    tied: float = 0.0  # gradients of tied weights, and of those that the ranks of a tp group hold whole

    @property
    def host_step(self) -> HostStep:
        """What a step on the CPU moves; under ZeRO-2 and 3 the slices of this rank are all that it has."""
        sent = self.updated - 0.5 * self.master
        # weights and both moments are read and written, gradients arrive and are read, and weights are read once more
        # to be sent
        return HostStep(6.0 * self.updated + 2.0 * self.updated_gradients + sent, self.updated_gradients, sent)

    @property
    def update_bytes(self) -> float:
        """Memory traffic of clipping and of the optimizer."""
        # weights and both moments are read and written, and copies of master weights written; gradients are read for
        # the norm, read and written by clipping, read by the step, and set to zero
        return 6.0 * self.updated + 0.5 * self.master + 5.0 * self.updated_gradients


def _state(weights: _Weights, trained: float, storage: StorageSettings) -> RankMemory:
    """Weights, gradients and optimizer state; of streamed layers two are on the device."""
    optimizer, streamed = 2 * weights.updated + weights.master, float(weights.streamed.sum())
    total = weights.total + 2 * float(weights.streamed.max(initial=0.0))
    if not storage.offload_optimizer:
        return RankMemory(total, trained, optimizer, master=weights.master, host=streamed)
    gradients = 2 * min(weights.updated, OFFLOAD_BUCKET_BYTES)
    return RankMemory(total, trained, host=streamed + 3 * weights.updated + gradients)


@dataclass(frozen=True, eq=False)
class _Uses:
    """The parameters of a module on a rank of a tp group, an entry for each use by a layer, in order `[uses]`."""

    layer: NDArray
    parameter: NDArray  # its number
    values: NDArray  # on the rank
    value_bytes: NDArray
    trained: NDArray
    is_tied: NDArray  # used by several modules or layers
    over_tp: NDArray  # whole on each rank of the group
    is_expert: NDArray  # of experts that ranks share
    is_inner: NDArray  # of a layer
    can_wait: NDArray  # whether its gradient can be put off

    def of_layers(self, layers: range) -> _Uses:
        """The uses by some layers."""
        rows = slice(*np.searchsorted(self.layer, [layers.start, layers.stop]).tolist())
        return _Uses(*(getattr(self, column.name)[rows] for column in fields(self)))


@lru_cache(maxsize=256)
def _uses_of(costs: CostModel, module: str, tp_size: int) -> _Uses:
    spec, module_spec = costs.spec, costs.spec.modules[module]
    rows, numbers = [], dict[str, int]()
    for index in range(-1, module_spec.num_layers + 1):
        shares = parameter_shares(spec, module, index, tp_size)
        for p in (use.parameter for use in spec.uses.get((module, index), ())):
            is_expert = bool(p.num_experts and module_spec.expert_ranks)
            row = (
                *(index, numbers.setdefault(p.name, len(numbers)), shares[p.name] * p.num_elements),
                *(DTYPE_BYTES.get(p.dtype, FULL), p.trainable, p.name in spec.tied),
                *(tp_size > 1 and p.replicated and not is_expert, is_expert),
                *(0 <= index < module_spec.num_layers, can_put_off(module_spec, spec.tied, p, index)),
            )
            rows.append(row)
    columns = zip(*rows, strict=True) if rows else [()] * len(fields(_Uses))
    types = (int, int, float, float, bool, bool, bool, bool, bool, bool)
    return _Uses(*(np.array(column, own) for column, own in zip(columns, types, strict=True)))


def _weights(
    costs: CostModel, module: str, layers: range, tp_size: int, shards: _Shards, storage: StorageSettings
) -> _Weights:
    uses = _uses_of(costs, module, tp_size).of_layers(layers)
    gradients = uses.values * np.maximum(uses.value_bytes, FULL) * uses.trained
    narrow = uses.values * uses.value_bytes * (uses.trained & (uses.value_bytes < FULL))
    largest = np.zeros(len(layers))
    np.maximum.at(largest, uses.layer - layers.start, gradients + narrow)
    # of a parameter with several uses on this stage the last one counts: the first backward allocates its gradient
    used = np.bincount(uses.parameter, minlength=1)[uses.parameter]
    _, last = np.unique(uses.parameter[::-1], return_index=True)
    counts = np.zeros(len(used), bool)
    counts[len(used) - 1 - last] = True
    tied = gradients[counts & (uses.over_tp | uses.is_tied)].sum() - gradients[~counts & ~uses.over_tp].sum()
    gradients, values, num_bytes = (own * counts for own in (gradients, uses.values, uses.values * uses.value_bytes))
    # copies that divide the values: of experts there are fewer; tied ones are summed over all of their uses
    experts = len(costs.spec.modules[module].expert_ranks)
    copies = np.where(uses.is_expert, max(1, shards.count * tp_size // experts) if experts else 1, shards.count)
    is_whole = uses.is_tied & (used == 1)
    gathers, reduces = (
        (copies > 1) & (shards.zero_stage >= stage) & ~is_whole for stage in (GATHERS_IN_PASSES, REDUCES_IN_PASSES)
    )
    slices = copies * np.where(uses.over_tp & (shards.are_all and shards.zero_stage > 0), tp_size, 1)
    streamed = num_bytes * (uses.is_inner & ~uses.trained & storage.offload_params)
    has_master = (uses.value_bytes < FULL) & storage.has_master_weights
    updated, kept = values * uses.trained / slices, num_bytes - streamed

    def by_layer(own: NDArray) -> NDArray:
        return np.bincount(uses.layer - layers.start, own, len(layers))

    return _Weights(
        by_layer(gradients / np.where(reduces, copies, 1)),
        largest,
        by_layer(kept * gathers),
        by_layer(gradients * reduces),
        by_layer(streamed),
        total=float((kept / np.where(gathers, copies, 1)).sum()),
        updated=float((updated * np.where(has_master, FULL, uses.value_bytes)).sum()),
        updated_gradients=float((gradients / slices).sum()),
        master=float((updated * FULL * has_master).sum()),
        at_once=float(gradients[reduces & ~uses.can_wait].sum()),
        slices=float((gradients / slices)[(slices > 1) & ~reduces].sum()),
        tied=float(tied),
    )


def _sent_entry(costs: CostModel, module_spec: ModuleSpec, stop: int, needed: Sequence[bool]) -> _Entry:
    """The tensors that a stage sends."""
    is_last = stop == module_spec.num_layers
    hidden = _hidden(costs, module_spec) * module_spec.states_before(stop)
    out = Polynomial(token=feature_bytes(costs, module_spec)) if is_last else hidden
    gradient = needed[-1] if is_last else needed[stop + 1]
    # gradients of sent tensors are received and concatenated in a backward
    return (out, out, out * 2.0) if gradient else (Polynomial(), out, Polynomial())


def _input_bytes(module_spec: ModuleSpec) -> float:
    """Bytes of the inputs per token: the input of the first convolution for a patch or frame, or ids."""
    if not module_spec.is_encoder:
        return _TEXT_BYTES if module_spec.name == LANGUAGE_MODEL else 0.0
    first = next((p for p in module_spec.parameters if p.layer == -1 and len(p.shape) > 2), None)
    if first is None:
        return 0.0
    return float(FULL * np.prod(first.shape[1:]))


def feature_bytes(costs: CostModel, module_spec: ModuleSpec, merged: bool = True) -> float:
    """Bytes of features per token of an encoder's layers, or per feature token with `merged=False`."""
    if not module_spec.is_encoder:
        return 0.0
    shape = LayerShape.of(module_spec, costs.spec.uses.get((module_spec.name, module_spec.num_layers), ()))
    share = min((share for share, _ in chain_widths(shape)), default=1.0) if merged else 1.0
    copies = len(module_spec.features) if any(own.index is not None for own in module_spec.features) else 1
    return share * copies * costs.spec.language_model.hidden_size * Precision.of(module_spec, costs.value_bytes).stream


def stage_memories(costs: CostModel, plan: ParallelPlan) -> dict[StageKey, StageMemory]:
    """(module, replica, stage) -> memory of all stages of a plan."""
    known: dict[tuple, StageMemory] = {}
    result = {}
    for name, module in plan.modules.items():
        for replica, index, stage in module.stages():
            kind = (name, stage.layers, stage.cp_size, stage.tp_size, stage.splits_backward)
            if kind not in known:
                known[kind] = stage_memory(costs, plan, name, stage)
            result[name, replica, index] = known[kind]
    return result
