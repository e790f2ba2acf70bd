"""The messages of one step: which tokens of a task they carry between this rank and others."""

from __future__ import annotations

import torch

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
        payload = self.payload(message)
        producer, consumer = ends_of(message)
        is_producer = task.key == producer.key
        meshes = payload.producer_mesh, payload.consumer_mesh
        places = None
        if payload.features is None:
            routes = hidden_state_routes(num_tokens, *meshes)
        else:
            shared = set(self.inputs.samples(consumer))
            samples = [sample for sample in self.inputs.samples(producer) if sample in shared]
            ends = [
                self._owners(payload, end, mesh, samples, end.key == task.key)
                for end, mesh in zip((producer, consumer), meshes, strict=True)
            ]
            places = ends[0 if is_producer else 1][1]
            assert places is not None
            routes = feature_routes(len(places), *meshes, *(cp_ranks for cp_ranks, _ in ends))
        return [
            (route, compose(places, route.tokens))
            for route in routes
            if self.inputs.rank in (route.producers if is_producer else route.consumers)
        ]

    def _owners(
        self, payload: Payload, task: Task, mesh: tuple, samples: list[int], is_here: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """
        For each token of some samples at one end of a message, its cp rank and its place there. Nothing has to be
        known of the other end if it has a single cp rank.
        """
        if payload.features is None or (not is_here and len(mesh) == 1):
            return None, None
        return self.inputs.feature_owners(task, payload.features).select(samples)

    def shapes(self, payload: Payload, task: Task) -> list[torch.Size]:
        """Shapes of the tensors of a payload that enter a task on this rank."""
        if payload.features is None:
            return self.inputs.hidden_shapes(task)
        owners = self.inputs.feature_owners(task, payload.features)
        return [torch.Size((count, payload.width)) for count in owners.sizes[self.inputs.cp_rank(task)]]
