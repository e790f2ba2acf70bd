"""Costs of layers, in one form for analytic and measured sources."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from ..plan import ModelSpec, ParallelPlan
from .devices import Hardware

# Traits of an engine that executes layers, where engines differ.


@dataclass(frozen=True)
class Engine:
    """How layers run. The defaults describe hf_mmparallel; others validate the cost model on published runs."""

    # norms, rotary embeddings and activation functions are one kernel each, norms and activation functions with no
    # more for the backward than what they read (`torch_compile`, `use_liger_kernel`)
    fused: bool = False
    sums_in_place: bool = False  # matrix products add to gradients themselves
    # reads and writes of the hidden state of a token for each of its experts: transformers copies it in their order,
    # multiplies it by its weight, puts it back and sums
    expert_accesses: float = 7.0
    fused_loss: bool = False
    attention_share: float = 1.0  # speed of its attention kernels over those of the device's `attention_efficiency`
    hidden_sums: bool = False  # tensor-parallel collectives overlap with matrix products
    blocking_messages: bool = False  # stages are idle while they send and receive
    # point-to-point, inside a node and between nodes; by default that of the links
    message_gb_per_s: tuple[float, float] | None = None
    wide_sums: bool = True  # ZeRO 2 and 3 reduce gradients in float32 (`reduce_dtype`), not in the parameters' dtype
    early_sums: bool = True  # sums of ZeRO 0 and 1 start bucket by bucket in the last backward, not after it

    def message_bytes_per_ms(self, device: Hardware, ranks: Sequence[int]) -> float:
        """Bandwidth between two stages on `ranks`, for each rank of the smaller stage."""
        rate = device.message_bytes_per_ms(ranks)
        if self.message_gb_per_s is None:
            return rate
        crosses = len({rank // device.node_size for rank in ranks}) > 1
        return min(rate, 1e6 * self.message_gb_per_s[crosses])


OURS = Engine()
OURS_FUSED = Engine(fused=True)  # with `torch_compile` or `use_liger_kernel`


BYTES_PER_VALUE = 2


@dataclass(frozen=True)
class Polynomial:
    """
    `square * s + token * x + constant` for a chunk of `x` tokens with a sum of squared sequence lengths of `s`: the
    form of Entrain, section 4.4.1, which is `a x^2 + b x + c` for a single sequence.
    """

    square: float = 0.0
    token: float = 0.0
    constant: float = 0.0

    def __call__(self, tokens: float, squares: float) -> float:
        return self.square * squares + self.token * tokens + self.constant

    def __add__(self, other: Polynomial) -> Polynomial:
        return Polynomial(self.square + other.square, self.token + other.token, self.constant + other.constant)

    def __mul__(self, factor: float) -> Polynomial:
        return Polynomial(self.square * factor, self.token * factor, self.constant * factor)

    def over(self, cp_size: int) -> Polynomial:
        """The polynomial on each of `cp_size` cp ranks that share the tokens of a chunk."""
        return Polynomial(self.square / cp_size, self.token / cp_size, self.constant)

    @classmethod
    def sum(cls, parts: Iterable[Polynomial]) -> Polynomial:
        """The sum, exact and independent of the order of the terms."""
        polynomials = list(parts)
        return cls(*(math.fsum(getattr(p, name) for p in polynomials) for name in ("square", "token", "constant")))


@dataclass(frozen=True)
class LayerCost:
    """Cost of a layer on one rank of a tp group, for any choice of trained weights; times are milliseconds."""

    forward: Polynomial
    data_gradient: Polynomial  # of its input, `B_d` of Cornstarch, section 4.3
    weight_gradient: Polynomial  # of all of its weights, `B_w`
    activations: Polynomial  # bytes saved for the backward with trained weights, without those of a loss
    frozen_activations: Polynomial  # bytes saved if only the gradient of the input is needed
    # host times to launch the kernels of the forward and, more of them, of the backward, which longer device times
    # hide; 0 if measured times include them
    launch_ms: tuple[float, float] = (0.0, 0.0)
    weight_launch_ms: float = 0.0  # part of the second one for the gradients of its weights
    # tensor-parallel collectives, and journeys of tokens to experts and back, besides the forward and besides the
    # gradient of its input
    sums: tuple[Polynomial, Polynomial] = (Polynomial(), Polynomial())
    travels: tuple[Polynomial, Polynomial] = (Polynomial(), Polynomial())
    # gathers of rows for the gradients of its weights, whichever are trained
    gathers: Polynomial = Polynomial()
    # of the forward, what is neither a product of matrices nor attention that keeps no scores
    elementwise: Polynomial = Polynomial()

    @property
    def with_sums(self) -> LayerCost:
        """The same cost with the first two included in the forward and in the gradient of the input."""
        forward, data_gradient = (
            own + sums + travels
            for own, sums, travels in zip((self.forward, self.data_gradient), self.sums, self.travels, strict=True)
        )
        none = (Polynomial(), Polynomial())
        return replace(self, forward=forward, data_gradient=data_gradient, sums=none, travels=none)

    def without(self, left_out: Iterable[Literal["sums", "travels"]]) -> LayerCost:
        """The same cost where some of what ranks send takes no time; gathers are among the sums."""
        none = dict.fromkeys(left_out, (Polynomial(), Polynomial()))
        return replace(self, **none, gathers=Polynomial() if "sums" in none else self.gathers)


class LayerCosts(Protocol):
    """A source of layer costs: operation counts ([`AnalyticLayers`]) or a measured profile ([`MeasuredLayers`])."""

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """Cost of a layer; -1 is the part before all layers (embeddings), `num_layers` that after them (a head)."""
        ...

    def starting_at(self, first_rank: int) -> LayerCosts:
        """Costs for tp groups from this rank of a node on, counted from 0; they may extend into the next node."""
        ...

    def with_spec(self, spec: ModelSpec) -> LayerCosts:
        """Costs for the model whose modules say which ranks share their experts, and what they multiply in."""
        ...


@dataclass(frozen=True)
class LayersWithout:
    """Layer costs of which some take no time: `"sums"` of tensor parallelism, `"travels"`; see [`LayerCosts`]."""

    layers: LayerCosts
    left_out: tuple[Literal["sums", "travels"], ...]

    def layer(self, module: str, index: int, tp_size: int) -> LayerCost:
        """See [`LayerCosts`]."""
        return self.layers.layer(module, index, tp_size).without(self.left_out)

    def starting_at(self, first_rank: int) -> LayersWithout:
        """See [`LayerCosts`]."""
        return replace(self, layers=self.layers.starting_at(first_rank))

    def with_spec(self, spec: ModelSpec) -> LayersWithout:
        """See [`LayerCosts`]."""
        return replace(self, layers=self.layers.with_spec(spec))


PACKED_ATTENTION = "bitfield"  # the attention function that separates the samples of a packed row


def can_pack(spec: ModelSpec) -> bool:
    """Whether the language model has the attention function that packed rows need."""
    return spec.language_model.attention == PACKED_ATTENTION


@dataclass(frozen=True, eq=False)
class CostModel:
    """Costs of a model's layers on a device: the source of all predicted times and memory of plans."""

    spec: ModelSpec  # with its frozen parameters marked
    device: Hardware
    layers: LayerCosts
    value_bytes: int = BYTES_PER_VALUE  # of an activation value
    engine: Engine = OURS
    # whether the samples of a language model microbatch are one row without padding; by default if its attention
    # function separates them
    packing: bool | None = None

    @property
    def packs_rows(self) -> bool:
        """Whether rows of the language model are packed. With context parallelism they are packed in any case."""
        return can_pack(self.spec) if self.packing is None else self.packing

    def with_spec(self, spec: ModelSpec) -> CostModel:
        """The same layer costs for the model with other frozen parameters."""
        return replace(self, spec=spec)

    def with_expert_peaks(self, peaks: Mapping[str, Mapping[int, float]]) -> CostModel:
        """The costs where, by module, so many times the tokens of the mean rank are the busiest one's of a size."""
        measured = {
            name: replace(self.spec.modules[name], expert_peaks=tuple(sorted(by_size.items())))
            for name, by_size in peaks.items()
        }
        return self.with_spec(replace(self.spec, modules={**self.spec.modules, **measured}))

    def of_plan(self, plan: ParallelPlan) -> CostModel:
        """The costs with the ranks that share experts in a plan, and with its products in float8."""
        return self.in_layout({n: (m.expert_ranks, bool(m.storage.float8)) for n, m in plan.modules.items()})

    def in_layout(self, layouts: Mapping[str, tuple[tuple[int, ...], bool]]) -> CostModel:
        """The costs with the ranks, by module, that share the experts of a layer, and whether it is in float8."""
        key = tuple((name, *of_module) for name, of_module in layouts.items() if any(of_module))
        known = self.__dict__.setdefault("_in_layout", {(): self})  # one object for each, by which others cache
        if key not in known:
            modules = {name: self.spec.modules[name].in_layout(ranks, float8) for name, ranks, float8 in key}
            spec = replace(self.spec, modules={**self.spec.modules, **modules})
            known[key] = replace(self, spec=spec, layers=self.layers.with_spec(spec))
        return known[key]


# The layers of a model through which gradients flow.


def data_gradients(spec: ModelSpec) -> dict[str, tuple[bool, ...]]:
    """Module -> for each layer from -1 to `num_layers`, whether the gradient of its input is needed."""
    needed: dict[str, tuple[bool, ...]] = {}
    has_gradient: dict[str, bool] = {}
    for name, module in spec.modules.items():
        # the gradient is needed if anything before the layer is trainable, in its module or in a producer whose
        # features enter at or before the layer (Cornstarch, section 4.3)
        enters = [min(edge.layers) for edge in spec.edges if edge.target == name and has_gradient[edge.source]]
        before, flags = False, []
        for index in range(-1, module.num_layers + 1):
            before = before or any(layer <= index for layer in enters)
            flags.append(before)
            before = before or any(use.parameter.trainable for use in spec.uses.get((name, index), ()))
        needed[name], has_gradient[name] = tuple(flags), before
    return needed


def first_backward(spec: ModelSpec, module: str) -> int:
    """The first layer of a module with a backward, which all layers after it have, too; `num_layers` if none has."""
    num_layers, needed = spec.modules[module].num_layers, data_gradients(spec)[module]
    return next(
        (
            layer
            for layer in range(num_layers)
            if needed[1 + layer] or any(use.parameter.trainable for use in spec.uses.get((module, layer), ()))
        ),
        num_layers,
    )
