"""The messages of one step: the tokens of a task that each exchanges between this rank and others."""

from __future__ import annotations

import torch

from ..plan import FeatureSpec
from ..schedule.actions import Message, Task
from .payloads import Payload, Payloads, ends_of
from .routes import Route, compose, feature_routes, hidden_state_routes
from .step_inputs import StepInputs

IndexedRoute = tuple[Route, torch.Tensor | None]


class StepMessages:
    """Layouts of the messages of one step on one rank, derived from the payloads and this rank's inputs."""

    def __init__(self, payloads: Payloads, inputs: StepInputs):
        self.payloads = payloads
        self.inputs = inputs

    def payload(self, message: Message) -> Payload:
        return self.payloads.of(message)

    def routes(self, message: Message, task: Task, num_tokens: int) -> list[IndexedRoute]:
        """
        Returns the routes of a message that begin or end on this rank, each with the indices of its tokens among the
        `num_tokens` that the task of this rank has here, `None` for all of them in order.
        """
        payload, rank = self.payload(message), self.inputs.rank
        is_producer = task.key == ends_of(message)[0].key
        if payload.features is None:
            indices, routes = None, hidden_state_routes(num_tokens, payload.producer_mesh, payload.consumer_mesh)
        else:
            indices, routes = self._feature_routes(message, payload.features, is_producer)
        return [
            (route, compose(indices, route.tokens))
            for route in routes
            if rank in (route.producers if is_producer else route.consumers)
        ]

    def _feature_routes(
        self, message: Message, features: tuple[FeatureSpec, ...], is_producer: bool
    ) -> tuple[torch.Tensor, list[Route]]:
        """Returns the index of each token of a message at the end that this rank runs, and all of its routes."""
        payload, (producer, consumer) = self.payload(message), ends_of(message)
        here, there = (producer, consumer) if is_producer else (consumer, producer)
        shared = set(self.inputs.samples(consumer))
        samples = [sample for sample in self.inputs.samples(producer) if sample in shared]
        cp_ranks, indices = self.inputs.feature_owners(here, features).select(samples)
        # The other end may be a task of other ranks only. With a single cp rank nothing about it is needed; otherwise
        # this rank has the sharding of its tokens.
        other_cp_ranks = None
        if self.inputs.planned_stage(there).cp_size > 1:
            other_cp_ranks, _ = self.inputs.feature_owners(there, features).select(samples)
        ends = (cp_ranks, other_cp_ranks) if is_producer else (other_cp_ranks, cp_ranks)
        meshes = payload.producer_mesh, payload.consumer_mesh
        return indices, feature_routes(len(indices), *meshes, *ends)

    def shapes(self, payload: Payload, task: Task) -> list[torch.Size]:
        """Returns shapes of the tensors of a payload that enter a task on this rank."""
        if payload.features is None:
            return self.inputs.hidden_shapes(task)
        owners = self.inputs.feature_owners(task, payload.features)
        return [torch.Size((count, payload.width)) for count in owners.sizes[self.inputs.cp_rank(task)]]
