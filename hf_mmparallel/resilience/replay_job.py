"""The job that a trace of failures is replayed on: its layers, its batch, and what events cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .templates import LayerChain, PipelineTemplate, fastest_template, fewest_nodes

NODE_BYTES_PER_S = 1.25e9  # 10 Gbit/s


@dataclass(frozen=True, eq=False)
class ReplayJob:
    """A job in numbers."""

    chain: LayerChain  # the layers of one copy of the model
    state_bytes: Sequence[float]  # parameters and optimizer state of each layer of the chain
    node_size: int  # ranks of a node
    num_microbatches: int  # of a step, of all pipelines together
    samples_per_step: int
    most_nodes: int  # that it ever runs on
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
        """The fastest template of exactly this number of nodes; `None` if there is none."""
        if num_nodes not in self._templates:
            # with the share of the microbatches of a step that so many nodes compute
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
    """What losses, joins and checkpoints cost: all that a replay assumes besides the times of layers."""

    detect_s: float = 0.5  # from a loss until all other nodes know of it
    # until nodes that go on in the same processes have a new plan and new process groups, without the copies of
    # weights
    regroup_s: float = 1.5
    copy_bytes_per_s: float = NODE_BYTES_PER_S  # what a node sends and receives while missing weights are copied
    save_s: float = 10.0  # for which a checkpoint blocks all nodes
    # from a loss until new processes have read a checkpoint: detection, end and start of processes, imports, process
    # groups, and reading
    restart_s: float = 90.0
    save_every: int = 10  # steps between two checkpoints

    @classmethod
    def of_bandwidths(
        cls,
        job: ReplayJob,
        node_bytes_per_s: float = NODE_BYTES_PER_S,  # what a node sends or receives
        storage_bytes_per_s: float = 2e9,  # what all nodes together write to storage, or read
        start_s: float = 60.0,  # from a loss until new processes begin to read a checkpoint
        save_every: int = 10,
    ) -> EventCosts:
        """Costs from bytes, of a checkpoint of the job's parameters and optimizer state."""
        save_s = job.total_bytes / storage_bytes_per_s
        return cls(copy_bytes_per_s=node_bytes_per_s, save_s=save_s, restart_s=start_s + save_s, save_every=save_every)


def copy_seconds(
    needed: dict[int, frozenset[int]], held: dict[int, frozenset[int]], job: ReplayJob, bytes_per_s: float
) -> float:
    """
    Seconds until each node has the layers that it lacks and some other holds: each layer comes from the holder that
    has sent least so far, and all nodes send and receive `bytes_per_s` at the same time.
    """
    sent, received = dict.fromkeys(held, 0.0), 0.0
    for node, layers in needed.items():
        missing = sorted(layers - held.get(node, frozenset()))
        for layer in missing:
            source = min((other for other in held if layer in held[other]), key=lambda other: sent[other])
            sent[source] += job.bytes_of([layer])
        received = max(received, job.bytes_of(missing))
    return max([received, *sent.values()]) / bytes_per_s
