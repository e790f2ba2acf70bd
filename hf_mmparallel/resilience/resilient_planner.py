"""The plans of a run that survives failures: the first one, and those after losses and joins of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

from ..plan import ParallelPlan
from .adopted_plan import adopted_pipelines
from .instantiation import Instantiation, best_instantiation
from .node_assignment import assigned_nodes, kept_bytes
from .node_counts import check_guarantee, node_counts
from .pipelines import ClusterPlan, Pipeline, PipelineLayout, PipelinePlans
from .reconfiguration import Nodes, without_nodes
from .state_copies import common_holdings
from .templates import PipelineTemplate, fastest_template, fewest_nodes


@dataclass(frozen=True, eq=False)
class ResilientPlanner:
    """
    Plans pipelines for the nodes that there are, such that a number of failures at once leaves a copy of each layer.
    All processes make the same plans from the same arguments.

    Args:
        plans ([`PipelinePlans`]): The model, and the settings that all plans have in common.
        num_nodes (`int`): Nodes at the start.
        failures (`int`): Nodes that may fail at once without the loss of a layer.

    Raises:
        `ValueError`: If this can't be guaranteed, with what can.
    """

    plans: PipelinePlans
    num_nodes: int
    failures: int

    def __post_init__(self):
        check_guarantee(self.num_nodes, self.fewest, self.failures)
        if self.plans.num_microbatches <= self.failures:
            raise ValueError(
                f"{self.plans.num_microbatches} microbatches are too few for {self.failures + 1} pipelines, "
                "each of which needs one. Use a larger global batch or smaller microbatches."
            )
        self._check_sums()

    @property
    def node_size(self) -> int:
        """Ranks of a node."""
        return self.plans.node_size

    @property
    def fewest_guaranteed(self) -> int:
        """Fewest nodes with which training goes on."""
        return (self.failures + 1) * self.fewest

    @cached_property
    def fewest(self) -> int:
        """Fewest nodes on which one copy of the model fits (`n_0`)."""
        chain = self.plans.chain.chain
        deepest = chain.num_layers * max(chain.rank_counts) // self.node_size  # with one layer for each stage
        for most in (self.num_nodes, deepest):
            found = fewest_nodes(chain, self.node_size, most, self.plans.num_microbatches) if most else None
            if found is not None:
                return found
        raise ValueError(self._why_no_copy())

    @cached_property
    def templates(self) -> tuple[PipelineTemplate, ...]:
        """The template of each number of nodes, from the fewest on, without gaps."""
        return self._templates_of(self.num_nodes)

    def instantiation(self, num_nodes: int) -> Instantiation:
        """
        The fastest pipelines that use a number of nodes.

        Raises:
            `ValueError`: If there are none.
        """
        check_guarantee(num_nodes, self.fewest, self.failures)
        templates, total = self._templates_of(num_nodes), self.plans.num_microbatches
        found = best_instantiation(templates, num_nodes, self.failures + 1, total)
        if found is None:
            raise ValueError(self._why_not_all(num_nodes, templates[-1].num_nodes))
        return found

    def after_single_losses(self, first: ClusterPlan | None = None) -> Iterator[Instantiation]:
        """
        The pipelines that there are at first, and those that are left if nodes are lost one after the other, each time
        the node that slows the others most; down to the fewest nodes that are guaranteed.

        Args:
            first ([`ClusterPlan`], *optional*): The plan of all nodes; by default the fastest one.
        """
        first = self.first() if first is None else first
        pipelines = {one.nodes: one.layout for one in first.pipelines}
        yield Instantiation(tuple(pipelines.values()), first.microbatches)
        for _ in range(len(first.nodes) - self.fewest_guaranteed):
            alike = {(one.num_nodes, one.fill_ms, one.slowest_ms): nodes for nodes, one in pipelines.items()}
            left = [self._left(pipelines, nodes[0]) for nodes in alike.values()]
            pipelines = max(left, key=lambda one: self._divided(one).step_ms)
            yield self._divided(pipelines)

    def _left(self, pipelines: Mapping[Nodes, PipelineLayout], lost: int) -> dict[Nodes, PipelineLayout]:
        """The pipelines that are left without a node."""
        counts = range(self.fewest, self.num_nodes + 1)
        after = without_nodes(list(pipelines), [lost], counts, self.failures)
        return {nodes: pipelines.get(nodes) or self._layout(len(nodes)) for nodes in after.pipelines}

    def _divided(self, pipelines: Mapping[Nodes, PipelineLayout]) -> Instantiation:
        """Pipelines with the microbatches of each."""
        return Instantiation.of(list(pipelines.values()), self.plans.num_microbatches)

    def first(self) -> ClusterPlan:
        """The fastest plan of all nodes at the start, whose numbers are 0 to `num_nodes - 1`."""
        pipelines, start = [], 0
        for template in self.instantiation(self.num_nodes).pipelines:
            nodes = tuple(range(start, start + template.num_nodes))
            pipelines.append(Pipeline(nodes, self._layout(template.num_nodes)))
            start += template.num_nodes
        return self.plans.of(pipelines)

    def adopt(self, plan: ParallelPlan) -> ClusterPlan:
        """
        The pipelines of a plan of the user for all nodes at the start, which rank 0 to the last one are on in order.

        Args:
            plan ([`ParallelPlan`]): The plan.

        Raises:
            `ValueError`: If it does not consist of copies of the whole model on whole nodes, or has too few.
        """
        adopted = adopted_pipelines(plan, self.plans, self.num_nodes)
        self._check_adopted(adopted)
        counts = plan.replica_microbatches
        if counts is not None and sum(counts) != self.plans.num_microbatches:
            raise ValueError(
                f"`replica_microbatches` of the plan, {list(counts)}, adds up to {sum(counts)}; a global batch has "
                f"{self.plans.num_microbatches} microbatches. Leave it out, or make it add up to that."
            )
        return self.plans.of(adopted, counts)

    def without(self, state: ClusterPlan, lost: Collection[int]) -> ClusterPlan:
        """
        The plan after a loss of nodes. Pipelines that neither lost a node nor lend one stay as they are.

        Args:
            state ([`ClusterPlan`]): The plan before it.
            lost (`Collection[int]`): The nodes that are lost.

        Raises:
            [`TooFewNodesError`]: If fewer nodes are left than `failures + 1` copies of the model need.
        """
        _check_nodes(lost, state, are_there=True)
        counts = range(self.fewest, max(self.num_nodes, len(state.nodes)) + 1)
        after = without_nodes([one.nodes for one in state.pipelines], lost, counts, self.failures)
        known = {pipeline.nodes: pipeline for pipeline in state.pipelines}
        kept = [known[nodes] for nodes in after.pipelines if nodes in known]
        changed = [[Pipeline(nodes, self._layout(len(nodes)))] for nodes in after.pipelines if nodes not in known]
        return replace(self._placed(state, kept, changed), changes=after.changes)

    def with_nodes(self, state: ClusterPlan, joined: Collection[int]) -> ClusterPlan:
        """
        The fastest plan with more nodes. Pipelines that have as many nodes as one of it stay as they are.

        Args:
            state ([`ClusterPlan`]): The plan before it.
            joined (`Collection[int]`): The nodes that join.

        Raises:
            `ValueError`: If no pipelines use all nodes, or if a node is there already.
        """
        _check_nodes(joined, state, are_there=False)
        found = self.instantiation(len(state.nodes) + len(joined))
        wanted = Counter(template.num_nodes for template in found.pipelines)
        kept = []
        for pipeline in state.pipelines:
            if wanted[len(pipeline.nodes)] > 0:
                wanted[len(pipeline.nodes)] -= 1
                kept.append(pipeline)
        used = {node for pipeline in kept for node in pipeline.nodes}
        free = iter(sorted({*state.nodes, *joined} - used))
        changed = [
            Pipeline(tuple(next(free) for _ in range(count)), self._layout(count)) for count in wanted.elements()
        ]
        return self._placed(state, kept, [changed])

    def _placed(
        self, before: ClusterPlan, kept: Sequence[Pipeline], groups: Sequence[Sequence[Pipeline]]
    ) -> ClusterPlan:
        """
        The plan of pipelines that stay, and of new ones, in each group of which nodes take places such that as little
        as possible is copied.
        """
        spec, changed = self.plans.chain.spec, []
        draft = self.plans.of([*kept, *(pipeline for group in groups for pipeline in group)])
        held, needed = common_holdings(spec, before, draft)
        for group in groups:
            nodes = [node for pipeline in group for node in pipeline.nodes]
            placed = iter(assigned_nodes(kept_bytes(held, needed, nodes, self.node_size), nodes))
            changed += [replace(one, nodes=tuple(next(placed) for _ in one.nodes)) for one in group]
        return self.plans.of([*kept, *changed])

    @cached_property
    def _known(self) -> dict[int, PipelineTemplate | None]:
        """Number of nodes -> its template, as far as it was asked for."""
        return {}

    def _template(self, num_nodes: int) -> PipelineTemplate | None:
        """The template of a number of nodes with their share of the microbatches; `None` if there is none."""
        if num_nodes not in self._known:
            total, chain = self.plans.num_microbatches, self.plans.chain.chain
            share = min(max(1, round(total * num_nodes / self.num_nodes)), total - self.failures)
            # After failures it computes more, and may have as many in flight as it has stages.
            self._known[num_nodes] = fastest_template(chain, num_nodes, self.node_size, share, total)
        return self._known[num_nodes]

    def _templates_of(self, num_nodes: int) -> tuple[PipelineTemplate, ...]:
        """The templates of a cluster, up to the largest with layers for all of its stages."""
        found = map(self._template, node_counts(num_nodes, self.fewest, self.failures))
        return tuple(takewhile(lambda template: template is not None, found))  # type: ignore[arg-type]

    def _template_of(self, num_nodes: int) -> PipelineTemplate:
        """The template of a number of nodes that there is one for."""
        template = self._template(num_nodes)
        assert template is not None, f"there is a template of {num_nodes} nodes by theorem 2"
        return template

    def _layout(self, num_nodes: int) -> PipelineLayout:
        """The stages of a pipeline of a number of nodes."""
        return PipelineLayout.of_template(self.plans.chain, self._template_of(num_nodes))

    def _check_sums(self) -> None:
        """Raises `ValueError` unless all numbers of nodes that failures leave can be used, and merged pipelines."""
        largest = len(self.templates) + self.fewest - 1
        merged = min(2 * self.fewest - 1, self.num_nodes - self.failures * self.fewest)
        if largest < merged:
            raise ValueError(
                f"A pipeline of {self.fewest} nodes that loses some is merged with another to one of up to {merged} "
                f"nodes, but {self._cut_text(largest)}. Use smaller nodes or a larger `tp_size`."
            )
        for num_nodes in range(self.num_nodes, self.fewest_guaranteed - 1, -1):
            most = min(num_nodes // self.fewest, self.plans.num_microbatches)
            if most * largest < num_nodes:
                raise ValueError(self._why_not_all(num_nodes, largest))

    def _check_adopted(self, pipelines: Sequence[Pipeline]) -> None:
        """Raises `ValueError` unless pipelines of a plan of the user can be kept up by templates."""
        if len(pipelines) <= self.failures:
            raise ValueError(
                f"The plan has {len(pipelines)} copies of the model; to survive {self.failures} failures at once it "
                f"needs {self.failures + 1}. Use `dp_size={self.failures + 1}` in all modules, or guarantee "
                f"{len(pipelines) - 1}."
            )
        sizes = [len(pipeline.nodes) for pipeline in pipelines]
        if min(sizes) < self.fewest:
            raise ValueError(
                f"Replica {sizes.index(min(sizes))} of the plan has {min(sizes)} nodes; one copy of the model fits "
                f"{self.fewest} by its predicted memory. Give each copy as many, or allow more memory."
            )
        largest = len(self.templates) + self.fewest - 1
        if max(sizes) - 1 > largest:
            raise ValueError(
                f"Replica {sizes.index(max(sizes))} of the plan has {max(sizes)} nodes and can't go on with one less: "
                f"{self._cut_text(largest)}. Use more copies of fewer nodes."
            )

    def _why_not_all(self, num_nodes: int, largest: int) -> str:
        """Why no pipelines use all nodes."""
        total = self.plans.num_microbatches
        most = min(num_nodes // self.fewest, total)
        return (
            f"{num_nodes} nodes can't all be used. {most} pipelines, each of {self.fewest} nodes or more and with one "
            f"of the {total} microbatches of a global batch or more, have {most * largest} nodes at most, since "
            f"{self._cut_text(largest)}. Use fewer nodes, a larger `tp_size`, or a larger global batch."
        )

    def _cut_text(self, largest: int) -> str:
        """Why pipelines have no more nodes."""
        return (
            f"the {len(self.plans.chain.units)} layers that can be on different stages make no pipeline of more than "
            f"{largest} nodes of {self.node_size} ranks"
        )

    def _why_no_copy(self) -> str:
        """Why no number of nodes has room for a copy of the model."""
        units, counts, size = self.plans.chain.units, self.plans.chain.chain.rank_counts, self.node_size
        if size // max(counts) > len(units) or size % min(counts):
            return (
                f"A node of {size} ranks can't be divided among the {len(units)} layers that can be on different "
                f"stages, with {' or '.join(map(str, counts))} ranks each. Use a larger `tp_size` that divides the "
                "ranks of a node, or smaller nodes."
            )
        return (
            f"One copy of the model does not fit any number of nodes of {size} ranks by its predicted memory. Use a "
            "larger `tp_size`, `activation_checkpointing`, or smaller microbatches."
        )


def _check_nodes(nodes: Collection[int], state: ClusterPlan, are_there: bool) -> None:
    """Raises `ValueError` for the first node that is in a plan, or is not, against expectation."""
    there = set(state.nodes)
    for node in sorted(set(nodes)):
        if (node in there) != are_there:
            what = "joins, but the plan has it already" if node in there else "is lost, but the plan does not have it"
            raise ValueError(f"Node {node} {what}; its nodes are {sorted(there)}. Give the number of another node.")
