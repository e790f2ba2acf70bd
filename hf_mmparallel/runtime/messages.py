"""The messages of one step: which tokens of a task they carry between this rank and others."""

from __future__ import annotations

import torch

from ..plan import FeatureSpec
from ..schedule.actions import Message, Task
from .payloads import Payload, Payloads, ends_of
from .routes import Route, compose, feature_routes, hidden_state_routes
from .step_inputs import StepInputs

IndexedRoute = tuple[Route, torch.Tensor | None]


class StepMessages:
    """
    Layouts of the messages of one step on one rank, derived from the payloads and this rank's inputs.

    Args:
        payloads ([`Payloads`]): What crosses each edge.
        inputs ([`StepInputs`]): The inputs of the step.
    """

    def __init__(self, payloads: Payloads, inputs: StepInputs):
        self.payloads = payloads
        self.inputs = inputs

    def payload(self, message: Message) -> Payload:
        return self.payloads.of(message)

    def routes(self, message: Message, task: Task, num_tokens: int) -> list[IndexedRoute]:
        """
        The routes of a message that begin or end on this rank.

        Args:
            message (`Message`): The message.
            task (`Task`): The end of the message whose task this rank runs.
            num_tokens (`int`): Tokens that the task has of the payload on this rank.

        Returns:
            `list[tuple[Route, torch.Tensor | None]]`: The routes, each with the places of its tokens among those that
            the task has on this rank, `None` for all of them in order.
        """
        payload, rank = self.payload(message), self.inputs.rank
        is_producer = task.key == ends_of(message)[0].key
        if payload.features is None:
            places, routes = None, hidden_state_routes(num_tokens, payload.producer_mesh, payload.consumer_mesh)
        else:
            places, routes = self._feature_routes(message, payload.features, is_producer)
        return [
            (route, compose(places, route.tokens))
            for route in routes
            if rank in (route.producers if is_producer else route.consumers)
        ]

    def _feature_routes(
        self, message: Message, features: tuple[FeatureSpec, ...], is_producer: bool
    ) -> tuple[torch.Tensor, list[Route]]:
        """
        All routes of features, and the place of each token of the message at the end that this rank runs.

        The other end may be a task of other ranks only: of it nothing has to be known if it has a single cp rank, and
        otherwise this rank knows how its tokens are cut.
        """
        payload, (producer, consumer) = self.payload(message), ends_of(message)
        here, there = (producer, consumer) if is_producer else (consumer, producer)
        shared = set(self.inputs.samples(consumer))
        samples = [sample for sample in self.inputs.samples(producer) if sample in shared]
        own, places = self.inputs.feature_owners(here, features).select(samples)
        other = None
        if len(self.inputs.stage(there).ranks) > 1:
            other, _ = self.inputs.feature_owners(there, features).select(samples)
        computed_on, needed_on = (own, other) if is_producer else (other, own)
        meshes = payload.producer_mesh, payload.consumer_mesh
        return places, feature_routes(len(places), *meshes, computed_on, needed_on)

    def shapes(self, payload: Payload, task: Task) -> list[torch.Size]:
        """Shapes of the tensors of a payload that enter a task on this rank."""
        if payload.features is None:
            return self.inputs.hidden_shapes(task)
        owners = self.inputs.feature_owners(task, payload.features)
        return [torch.Size((count, payload.width)) for count in owners.sizes[self.inputs.cp_rank(task)]]
