"""Payloads: the tensors that cross an edge between two stages, of a pipeline or of the graph of modules, as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._device import to_device
from ..modeling.stages import activation_dtype, hidden_dtype
from ..plan import FeatureSpec, ModelSpec, ParallelPlan, StageKey
from ..schedule.graph import GradientFlow
from ..schedule.kinds import Message, Task

# The ranks between which each token of a message is sent: the change of layout between two meshes, as pure functions.
#
# A stage runs on a mesh of cp x tp ranks: each cp rank has tokens of its own, which all ranks of its tp group hold. A
# message is a set of routes, one for each pair of a cp rank of the producer and a cp rank of the consumer. Hidden
# states stay on their cp rank; features go where the placeholders are that they replace.
#
# On a route each token crosses once: the tokens are cut into as many equal slices as the consumer's tp group has
# ranks, slice `i` goes from producer rank `i mod a` to consumer rank `i`, and the consumer ranks gather the slices.
# The gradient takes the same way back: consumer rank `i` returns slice `i` (its gradient is replicated too), and the
# producer ranks sum what they received. That is the adjoint, never an average.
#
# Where the ranks of both stages share the rows of hidden states (sequence parallelism), each hands its share to one.

Mesh = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Slice:
    """Consecutive tokens of a route, between one global rank and another."""

    producer: int  # computes them
    consumer: int  # receives them in the forward
    start: int
    stop: int  # one past the last token

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def slice_size(num_tokens: int, num_slices: int) -> int:
    """Tokens of each slice; the last ones may be shorter."""
    return -(-num_tokens // num_slices)


def slices(num_tokens: int, producers: Sequence[int], consumers: Sequence[int]) -> list[Slice]:
    """Cuts `num_tokens` tokens between two tp groups into slices, without the empty ones."""
    size = slice_size(num_tokens, len(consumers))
    result = []
    for index, consumer in enumerate(consumers):
        start, stop = min(index * size, num_tokens), min((index + 1) * size, num_tokens)
        if stop > start:
            result.append(Slice(producers[index % len(producers)], consumer, start, stop))
    return result


@dataclass(frozen=True)
class Route:
    """The tokens of a message between a cp rank of the producer and a cp rank of the consumer."""

    producers: tuple[int, ...]  # global ranks of the tp group
    consumers: tuple[int, ...]
    num_tokens: int
    # int64 `[num_tokens]`, ascending: their indices in the message; `None` for all of them
    tokens: Tensor | None = None

    @cached_property
    def slices(self) -> list[Slice]:
        return slices(self.num_tokens, self.producers, self.consumers)


def hidden_state_routes(num_tokens: int, producer: Mesh, consumer: Mesh) -> list[Route]:
    """Routes hidden states, of which each cp rank has `num_tokens`, from each cp rank to the same one."""
    return [Route(sources, targets, num_tokens) for sources, targets in zip(producer, consumer, strict=True)]


def feature_routes(
    num_tokens: int, producer: Mesh, consumer: Mesh, computed_on: Tensor | None, needed_on: Tensor | None
) -> list[Route]:
    """
    Routes features, in the order of the producer's cp ranks and then the consumer's. `computed_on` and `needed_on` are
    int64 `[num_tokens]`: the cp rank of the producer and the consumer for each token, `None` for a single cp rank.
    """
    if len(producer) == len(consumer) == 1:
        return [Route(producer[0], consumer[0], num_tokens)]
    pair = torch.zeros(num_tokens, dtype=torch.int64)
    if computed_on is not None:
        pair += computed_on * len(consumer)
    if needed_on is not None:
        pair += needed_on
    counts = pair.bincount(minlength=len(producer) * len(consumer)).tolist()
    groups = pair.argsort(stable=True).split(counts)
    ends = [(sources, targets) for sources in producer for targets in consumer]
    return [Route(*end, count, tokens) for end, count, tokens in zip(ends, counts, groups, strict=True)]


def select(tokens: Tensor, index: Tensor | None) -> Tensor:
    """Returns `tokens[index]`, without a copy for all tokens in order: for no index, or one that counts up."""
    if index is None or (len(index) == len(tokens) and torch.equal(index, torch.arange(len(tokens)))):
        return tokens
    return tokens[to_device(index, tokens.device)]


def compose(outer: Tensor | None, inner: Tensor | None) -> Tensor | None:
    """Returns `outer[inner]`, where `None` means all tokens in order."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    return outer[inner]


def num_tokens_of(shape: Sequence[int]) -> int:
    """Counts tokens of a hidden state or a feature, whose last dimension is its width."""
    return math.prod(shape[:-1])


@dataclass(frozen=True)
class Payload:
    """The tensors that a stage passes to another one in the forward; gradients of the same shapes go the way back."""

    producer: StageKey  # (module, replica, stage)
    consumer: StageKey
    producer_mesh: Mesh
    consumer_mesh: Mesh
    width: int  # values per token
    dtype: torch.dtype  # in which they are sent
    needs_grad: bool  # the producer needs its gradient
    features: tuple[FeatureSpec, ...] | None = None  # that enter the consumer; `None` for hidden states
    outputs: tuple[int, ...] | None = None  # indices of `features` among all of the producer's module
    num_outputs: int = 0  # features of the producer's module

    def num_tokens(self, shape: Sequence[int]) -> int:
        return math.prod(shape) // self.width

    @property
    def tensors_key(self) -> tuple:
        """Equal for payloads with the same tensors of a module for another one, whatever the replicas."""
        return self.producer[0], self.consumer[0], self.outputs

    def select_outputs(self, outputs: Sequence[Any]) -> list[Any]:
        """Picks the outputs of the producer that cross the edge."""
        return list(outputs) if self.outputs is None else [outputs[index] for index in self.outputs]

    def among_outputs(self, tensors: Sequence[Any]) -> list[Any]:
        """Puts the tensors that crossed the edge among all outputs of the producer, `None` for the others."""
        if self.outputs is None:
            return list(tensors)
        crossed = dict(zip(self.outputs, tensors, strict=True))
        return [crossed.get(index) for index in range(self.num_outputs)]


class Payloads:
    """The payloads of a plan, computed on first access. Raises `ValueError` for an edge without features."""

    def __init__(self, plan: ParallelPlan, spec: ModelSpec):
        # The planner lets all hidden states of a language model enter a generator that it knows by its sizes; a stage
        # hands over features of placeholder tokens only.
        for edge in plan.edges:
            if not spec.modules[edge.source].features:
                raise ValueError(
                    f"`{edge.target}` starts from the hidden states of `{edge.source}`, which has no features to hand "
                    f"over: such a plan can be predicted, but not run. Leave `{edge.target}` out."
                )
        self.plan = plan
        self.spec = spec
        self._flow = GradientFlow(plan)
        self._edges = {(edge.source, edge.target): edge for edge in plan.edges}
        self._dtypes = {ends: wire_dtype(spec, *ends) for ends in (*self._edges, *((m, m) for m in plan.modules))}
        self._known: dict[tuple[StageKey, StageKey], Payload] = {}

    def of(self, message: Message) -> Payload:
        """Returns the payload of an activation, or that of which a message has the gradient."""
        producer, consumer = ends_of(message)
        ends = producer.stage_key, consumer.stage_key
        if ends not in self._known:
            self._known[ends] = self._payload(*ends)
        return self._known[ends]

    def widen(self, dtype: torch.dtype) -> None:
        """Makes all payloads also represent the values of `dtype`, to which the model was cast."""
        self._dtypes = {ends: torch.promote_types(known, dtype) for ends, known in self._dtypes.items()}
        self._known.clear()

    def _payload(self, producer: StageKey, consumer: StageKey) -> Payload:
        source, target = producer[0], consumer[0]
        meshes = [self.plan.stage(*key).mesh for key in (producer, consumer)]
        if keeps_rows_split(self.plan, self.spec, producer, consumer):  # each rank hands over its own rows
            meshes = [tuple((rank,) for tp_group in mesh for rank in tp_group) for mesh in meshes]
        features = outputs = None
        all_features = self.spec.edge_features(source, target)
        assert all_features is not None or source == target, f"`{source}` has no features for `{target}`"
        if all_features is not None:
            entering = self.plan.edge_stages(self._edges[source, target], consumer[1])[consumer[2]]
            features = tuple(all_features[index] for index in entering)
            of_module = self.spec.modules[source].features
            outputs = tuple(of_module.index(feature) for feature in features)
        return Payload(
            producer,
            consumer,
            *meshes,
            width=self.spec.edge_width(source, target),
            dtype=self._dtypes[source, target],
            needs_grad=self._flow.has_backward(*producer),
            features=features,
            outputs=outputs,
            num_outputs=0 if all_features is None else len(self.spec.modules[source].features),
        )


def keeps_rows_split(plan: ParallelPlan, spec: ModelSpec, producer: StageKey, consumer: StageKey) -> bool:
    """Returns whether the ranks of two stages share the rows between them as they do between layers."""
    before, after = plan.stage(*producer), plan.stage(*consumer)
    is_shared = producer[0] == consumer[0] and spec.modules[producer[0]].row_shares(before.tp_size) > 1
    return is_shared and before.tp_size == after.tp_size and before.layers[1] - 1 not in spec.layers_with_features


def ends_of(message: Message) -> tuple[Task, Task]:
    """Returns (task of the producer, task of the consumer): a gradient goes from target to source."""
    if message.kind == "act":
        return message.source, message.target
    return message.target, message.source


def wire_dtype(spec: ModelSpec, producer: str, consumer: str) -> torch.dtype:
    """
    Returns the dtype of the values that go from one module to another, or between the stages of one. It represents all
    values that the producer computes and that the consumer computes with, so that nothing is rounded that one process
    does not round; it does not depend on other modules.
    """
    entered = hidden_dtype(spec, consumer)
    if producer == consumer:
        return entered
    return torch.promote_types(activation_dtype(spec, spec.modules[producer].parameters), entered)
