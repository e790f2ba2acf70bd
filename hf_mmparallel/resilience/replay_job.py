"""The job that a trace of failures is replayed on: its layers, its batch, and what events cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .templates import LayerChain, PipelineTemplate, fastest_template, fewest_nodes

NODE_BYTES_PER_S = 1.25e9
"""10 Gbit/s."""


@dataclass(frozen=True, eq=False)
class ReplayJob:
    """
    A job in numbers.

    Args:
        chain ([`LayerChain`]): The layers of one copy of the model.
        state_bytes (`Sequence[float]`): Parameters and optimizer state of each layer of the chain, in bytes.
        node_size (`int`): Ranks of a node.
        num_microbatches (`int`): Microbatches of a step, of all pipelines together.
        samples_per_step (`int`): Samples of a step.
        most_nodes (`int`): Most nodes that it ever runs on.
    """

    chain: LayerChain
    state_bytes: Sequence[float]
    node_size: int
    num_microbatches: int
    samples_per_step: int
    most_nodes: int
    _templates: dict[int, PipelineTemplate | None] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def fewest_nodes(self) -> int | None:
        """Fewest nodes on which one copy fits; `None` if it fits on none."""
        return fewest_nodes(self.chain, self.node_size, self.most_nodes, self.num_microbatches)

    @property
    def total_bytes(self) -> float:
        """Bytes of a checkpoint: parameters and optimizer state."""
        return float(sum(self.state_bytes))

    def template(self, num_nodes: int) -> PipelineTemplate | None:
        """
        The fastest template of exactly this number of nodes, with the share of the step's microbatches that so many
        nodes compute; `None` if there is none.
        """
        if num_nodes not in self._templates:
            share = -(-self.num_microbatches * num_nodes // self.most_nodes)
            self._templates[num_nodes] = fastest_template(self.chain, num_nodes, self.node_size, share)
        return self._templates[num_nodes]

    def templates(self, node_counts: Iterable[int]) -> list[PipelineTemplate]:
        """The templates of these numbers of nodes; those without any are left out."""
        return [found for count in node_counts if (found := self.template(count)) is not None]

    def usable_template(self, num_nodes: int) -> PipelineTemplate | None:
        """The template of most nodes up to this number: with more nodes than layers some have nothing to do."""
        found = (self.template(count) for count in range(num_nodes, 0, -1))
        return next((template for template in found if template is not None), None)

    def layers_of_nodes(self, template: PipelineTemplate) -> list[frozenset[int]]:
        """The layers that each node of a pipeline holds."""
        held: list[set[int]] = [set() for _ in range(template.num_nodes)]
        first_rank = 0
        for stage in template.stages:
            held[first_rank // self.node_size].update(range(*stage.layers))
            first_rank += stage.num_ranks
        return [frozenset(layers) for layers in held]

    def bytes_of(self, layers: Iterable[int]) -> float:
        """Parameters and optimizer state of some layers."""
        return float(sum(self.state_bytes[layer] for layer in layers))

    @cached_property
    def all_layers(self) -> frozenset[int]:
        return frozenset(range(self.chain.num_layers))


@dataclass(frozen=True)
class EventCosts:
    """
    What losses, joins and checkpoints cost: all that a replay assumes besides the times of layers.

    Args:
        detect_s (`float`, *optional*, defaults to 0.5): Seconds from a loss until all other nodes know of it.
        regroup_s (`float`, *optional*, defaults to 1.5):
            Seconds until nodes that go on in the same processes have a new plan and new process groups, without the
            copies of weights.
        copy_bytes_per_s (`float`, *optional*, defaults to 1.25e9):
            What a node sends and receives per second while missing weights are copied.
        save_s (`float`, *optional*, defaults to 10.0): Seconds for which a checkpoint blocks all nodes.
        restart_s (`float`, *optional*, defaults to 90.0):
            Seconds from a loss until new processes have read a checkpoint: detection, end and start of processes,
            imports, process groups, and reading.
        save_every (`int`, *optional*, defaults to 10): Steps between two checkpoints.
    """

    detect_s: float = 0.5
    regroup_s: float = 1.5
    copy_bytes_per_s: float = NODE_BYTES_PER_S
    save_s: float = 10.0
    restart_s: float = 90.0
    save_every: int = 10

    @classmethod
    def of_bandwidths(
        cls,
        job: ReplayJob,
        node_bytes_per_s: float = NODE_BYTES_PER_S,
        storage_bytes_per_s: float = 2e9,
        start_s: float = 60.0,
        save_every: int = 10,
    ) -> EventCosts:
        """
        Costs from bytes.

        Args:
            job ([`ReplayJob`]): The job, whose parameters and optimizer state a checkpoint has.
            node_bytes_per_s (`float`, *optional*): What a node sends or receives per second.
            storage_bytes_per_s (`float`, *optional*): What all nodes together write to storage, or read, per second.
            start_s (`float`, *optional*): Seconds from a loss until new processes begin to read a checkpoint.
            save_every (`int`, *optional*, defaults to 10): Steps between two checkpoints.
        """
        save_s = job.total_bytes / storage_bytes_per_s
        return cls(copy_bytes_per_s=node_bytes_per_s, save_s=save_s, restart_s=start_s + save_s, save_every=save_every)


def copy_seconds(
    needed: dict[int, frozenset[int]], held: dict[int, frozenset[int]], job: ReplayJob, bytes_per_s: float
) -> float:
    """
    Seconds until each node has the layers that it lacks: each layer comes from the holder that has sent least so far,
    and all nodes send and receive at the same time.

    Args:
        needed (`dict[int, frozenset[int]]`): Node -> layers that it should hold.
        held (`dict[int, frozenset[int]]`): Node -> layers that it holds; each layer that is needed is held by some.
        job ([`ReplayJob`]): The job.
        bytes_per_s (`float`): What a node sends and receives per second.
    """
    sent, received = dict.fromkeys(held, 0.0), 0.0
    for node, layers in needed.items():
        missing = sorted(layers - held.get(node, frozenset()))
        for layer in missing:
            source = min((other for other in held if layer in held[other]), key=lambda other: sent[other])
            sent[source] += job.bytes_of([layer])
        received = max(received, job.bytes_of(missing))
    return max([received, *sent.values()]) / bytes_per_s
