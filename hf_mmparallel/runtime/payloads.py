"""Payloads: the tensors that cross an edge between two stages, of a pipeline or of the graph of modules, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..modeling.dtypes import activation_dtype, hidden_dtype
from ..plan import FeatureSpec, ModelSpec, ParallelPlan, StageKey
from ..schedule.actions import Message, Task
from ..schedule.graph import GradientFlow
from .routes import Mesh


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
        # The planner lets all hidden states of a language model enter a generator; a stage hands over features of
        # placeholder tokens only.
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
        features = outputs = None
        all_features = self.spec.edge_features(source, target)
        assert all_features is not None or source == target, f"`{source}` has no features for `{target}`"
        if all_features is not None:
            outputs = self.plan.edge_stages(self._edges[source, target], consumer[1])[consumer[2]]
            features = tuple(all_features[index] for index in outputs)
        return Payload(
            producer,
            consumer,
            *meshes,
            width=self.spec.edge_width(source, target),
            dtype=self._dtypes[source, target],
            needs_grad=self._flow.has_backward(*producer),
            features=features,
            outputs=outputs,
            num_outputs=len(all_features or ()),
        )


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
