"""The plans of a run that survives failures: the first one, and those after losses and joins of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, takewhile

from ..plan import ParallelPlan
from .pipelines import (
    Change,
    ClusterPlan,
    Nodes,
    Pipeline,
    PipelinePlans,
    TooFewNodesError,
    adopt_pipelines,
    without_nodes,
)
from .plan_choice import (
    DAY_S,
    LEAST_GAIN,
    PlanOption,
    StepTimes,
    best_option,
    copy_seconds,
    reason_of_join,
    reason_text,
)
from .state_copies import LostStateError, assign_nodes, common_holdings, reused_bytes, state_copies
from .templates import (
    Instantiation,
    PipelineTemplate,
    TemplateSearch,
    check_guarantee,
    fastest_instantiations,
    fewest_nodes,
    node_counts,
)

NUM_FINALISTS = 3  # instantiations that are simulated at most for a number of nodes


@dataclass(frozen=True, eq=False)
class ResilientPlanner:
    """
    Plans pipelines for the nodes that there are, such that a number of failures at once leaves a copy of each layer;
    if this can't be guaranteed, raises `ValueError` with what can. All processes make the same plans from the same
    arguments.
    """

    plans: PipelinePlans  # with the settings that all plans have in common
    num_nodes: int  # at the start
    failures: int  # nodes that may fail at once without the loss of a layer
    mean_time_between_failures_s: float = DAY_S  # of the whole job

    def __post_init__(self):
        check_guarantee(self.num_nodes, self.fewest, self.failures)
        if self.plans.num_turns <= self.failures:
            copies = self.plans.chain.copies
            each = "one" if copies == 1 else f"one for each of its {copies} copies of the model"
            raise ValueError(
                f"{self.plans.num_microbatches} microbatches are too few for {self.failures + 1} pipelines, "
                f"each of which needs {each}. Use a larger global batch or smaller microbatches."
            )
        self._check_sums()

    @property
    def node_size(self) -> int:
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
        for most in (min(self.num_nodes, deepest), deepest):
            found = fewest_nodes(chain, self.node_size, most, self.plans.num_turns)
            if found is not None:
                return found
        raise ValueError(self._why_no_copy())

    @cached_property
    def templates(self) -> tuple[PipelineTemplate, ...]:
        """The template of each number of nodes, from the fewest on, without gaps."""
        return self._templates_of(self.num_nodes)

    def fastest(self, num_nodes: int) -> ClusterPlan:
        """The plan of nodes from 0 on whose simulated step is shortest, among the fastest by the closed form."""
        finalists = [self.plans.consecutive(list(map(self.pipeline, sizes))) for sizes in self._finalists(num_nodes)]
        if not finalists:
            raise ValueError(self._why_not_all(num_nodes))
        times_ms = self._times.of(finalists)
        return finalists[times_ms.index(min(times_ms))]

    def first(self) -> ClusterPlan:
        """The fastest plan of all nodes at the start, whose numbers are 0 to `num_nodes - 1`."""
        return self.fastest(self.num_nodes)

    def at_best(self, reached: ClusterPlan) -> ClusterPlan:
        """The faster of the fastest finalist, see [`~ResilientPlanner.fastest`], and a plan that losses led to."""
        plans = [self.fastest(len(reached.nodes)), reached]
        return min(plans, key=self.step_ms)

    def step_ms(self, plan: ClusterPlan) -> float:
        """Predicted time of a step of a plan, see [`StepTimes`]."""
        return self._times.of([plan])[0]

    def after_single_losses(self, first: ClusterPlan | None = None) -> Iterator[ClusterPlan]:
        """
        The plan that there is at first, by default the fastest one, and those that follow if nodes are lost one after
        the other, each time the node that slows the others most; down to the fewest nodes that are guaranteed.
        """
        state = self.first() if first is None else first
        yield state
        while len(state.nodes) > self.fewest_guaranteed:
            alike = {(one.num_nodes, one.fill_ms, one.slowest_ms): one for one in state.pipelines}
            lost = max((one.nodes[0] for one in alike.values()), key=partial(self._mended_ms, state))
            state = self.without(state, [lost])
            yield state

    def _mended_ms(self, state: ClusterPlan, lost: int) -> float:
        """Time of a step without a node, in closed form, where as few pipelines change as possible."""
        known = {pipeline.nodes: pipeline for pipeline in state.pipelines}
        left, _ = self._changed(state, [lost])
        pipelines = [known.get(nodes) or self.pipeline(len(nodes)) for nodes in left]
        return Instantiation.of(pipelines, self.plans.num_turns).step_ms

    def adopt(self, plan: ParallelPlan) -> ClusterPlan:
        """
        The pipelines of a plan of the user for all nodes at the start, which rank 0 to the last one are on in order;
        raises `ValueError` if it does not consist of copies of the whole model on whole nodes, or has too few.
        """
        adopted = adopt_pipelines(plan, self.plans, self.num_nodes)
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
        The plan after a loss of nodes: the one with which most steps are done until the next loss is expected, copies
        included. Raises [`TooFewNodesError`] if fewer nodes are left than `failures + 1` copies of the model need.
        """
        _check_nodes(lost, state, are_there=True)
        mended = self._mended(state, lost)
        # Either pipelines that neither lost a node nor lend one stay as they are, or the plan is one of the fastest of
        # all nodes that are left, if its steps are shorter by `LEAST_GAIN` or more.
        plans = [mended, *self._rearranged(state, mended.nodes, _sizes(mended))]
        mended_ms, *others_ms = self._times.of(plans)
        faster = [plan for plan, ms in zip(plans[1:], others_ms, strict=True) if ms * (1 + LEAST_GAIN) <= mended_ms]
        try:
            options = self._options(state, [mended, *faster])
        except LostStateError:  # under any plan; whoever copies says so
            return mended
        chosen = best_option(options, self.mean_time_between_failures_s)
        return replace(chosen.plan, reason=reason_text(chosen, options, self.mean_time_between_failures_s))

    def last(self, state: ClusterPlan, lost: Collection[int]) -> ClusterPlan:
        """
        A plan from which the model can be saved, when too few nodes are left to go on: the smallest pipeline that has
        lost no node, of which there is one after `failures` losses at once, since there were more pipelines. After
        more losses, pipelines of all nodes that are left; raises [`TooFewNodesError`] if these can't be planned.
        """
        whole = [one for one in state.pipelines if not set(one.nodes).intersection(lost)]
        if whole:  # nothing has to be copied
            return self.plans.of([min(whole, key=lambda one: len(one.nodes))])
        try:
            return replace(self, failures=0).without(state, lost)
        except ValueError as error:
            raise TooFewNodesError(f"No pipeline is whole, and the nodes that are left make none: {error}") from error

    def with_nodes(self, state: ClusterPlan, joined: Collection[int]) -> ClusterPlan:
        """
        The plan with more nodes: one of the fastest ones, the one with which most steps are done until the next loss
        is expected. Raises `ValueError` if no pipelines use all nodes, or if a node is there already.
        """
        _check_nodes(joined, state, are_there=False)
        nodes = {*state.nodes, *joined}
        plans = list(self._rearranged(state, nodes))
        if not plans:
            raise ValueError(self._why_not_all(len(nodes)))
        options = self._options(state, plans)
        chosen = best_option(options, self.mean_time_between_failures_s)
        return replace(chosen.plan, reason=reason_of_join(chosen, options, self.mean_time_between_failures_s))

    def _options(self, state: ClusterPlan, plans: Sequence[ClusterPlan]) -> list[PlanOption]:
        """What it takes to go on from one plan with each of others."""
        spec, device = self.plans.chain.spec, self.plans.chain.costs.device
        copies = [state_copies(spec, state, plan) for plan in plans]
        return [
            PlanOption(plan, step_ms, one.num_bytes, copy_seconds(one, device, plan.plan.world_size))
            for plan, step_ms, one in zip(plans, self._times.of(plans), copies, strict=True)
        ]

    def _changed(self, state: ClusterPlan, lost: Collection[int]) -> tuple[list[Nodes], list[Change]]:
        """The pipelines without nodes by the paper's rules, and how they came about."""
        counts = range(self.fewest, max(self.num_nodes, len(state.nodes)) + 1)
        return without_nodes([one.nodes for one in state.pipelines], lost, counts, self.failures)

    def _mended(self, state: ClusterPlan, lost: Collection[int]) -> ClusterPlan:
        """The plan after a loss of nodes in which as few pipelines change as possible."""
        after, changes = self._changed(state, lost)
        known = {pipeline.nodes: pipeline for pipeline in state.pipelines}
        kept = [known[nodes] for nodes in after if nodes in known]
        changed = [[self.pipeline(len(nodes)).on(nodes)] for nodes in after if nodes not in known]
        return replace(self._placed(state, kept, changed), changes=tuple(changes))

    def _rearranged(
        self, state: ClusterPlan, nodes: Collection[int], known: Sequence[int] | None = None
    ) -> Iterator[ClusterPlan]:
        """The fastest plans of nodes, without pipelines of known sizes; pipelines that can stay do."""
        left = set(nodes)
        for sizes in self._finalists(len(left)):
            if sizes == known:
                continue
            wanted, kept = Counter(sizes), []
            for pipeline in state.pipelines:
                # a pipeline stays that has as many nodes as one of the new plan
                if left.issuperset(pipeline.nodes) and wanted[len(pipeline.nodes)] > 0:
                    wanted[len(pipeline.nodes)] -= 1
                    kept.append(pipeline)
            changes = tuple(Change("divide", one.nodes) for one in state.pipelines if one not in kept)
            free = iter(sorted(left - {node for pipeline in kept for node in pipeline.nodes}))
            changed = [self.pipeline(count).on(islice(free, count)) for count in wanted.elements()]
            yield replace(self._placed(state, kept, [changed]), changes=changes)

    def _finalists(self, num_nodes: int) -> list[list[int]]:
        """Nodes of each pipeline of the fastest instantiations by the closed form, the largest pipeline first."""
        check_guarantee(num_nodes, self.fewest, self.failures)
        templates, total = self._templates_of(num_nodes), self.plans.num_turns
        found = fastest_instantiations(templates, num_nodes, self.failures + 1, total, NUM_FINALISTS)
        return [[template.num_nodes for template in one.pipelines] for one in found]

    def _placed(
        self, before: ClusterPlan, kept: Sequence[Pipeline], groups: Sequence[Sequence[Pipeline]]
    ) -> ClusterPlan:
        """The plan of pipelines that stay and of new ones, in whose groups nodes are placed to copy least."""
        spec, changed = self.plans.chain.spec, []
        draft = self.plans.of([*kept, *(pipeline for group in groups for pipeline in group)])
        held, needed = common_holdings(spec, before, draft)
        for group in groups:
            nodes = [node for pipeline in group for node in pipeline.nodes]
            placed = iter(assign_nodes(reused_bytes(held, needed, nodes, self.node_size), nodes))
            changed += [one.on(islice(placed, one.num_nodes)) for one in group]
        return self.plans.of([*kept, *changed])

    @cached_property
    def _times(self) -> StepTimes:
        return StepTimes(self.plans)

    @cached_property
    def _known(self) -> dict[int, PipelineTemplate | None]:
        """Number of nodes -> its template, as far as it was asked for."""
        return {}

    def _found(self, node_counts: Iterable[int]) -> list[PipelineTemplate | None]:
        """The template of each number of nodes, for their share of the microbatches; `None` if there is none."""
        counts = list(node_counts)
        missing = [count for count in counts if count not in self._known]
        total, chain = self.plans.num_turns, self.plans.chain.chain
        # After failures it computes more, and may have as many in flight as it has stages.
        search = TemplateSearch(chain, self.node_size, max(missing, default=0), total)
        for count in missing:
            share = min(max(1, round(total * count / self.num_nodes)), total - self.failures)
            self._known[count] = search.fastest(count, share)
        return [self._known[count] for count in counts]

    def _templates_of(self, num_nodes: int) -> tuple[PipelineTemplate, ...]:
        """The templates of a cluster, up to the largest with layers for all of its stages."""
        found = self._found(node_counts(num_nodes, self.fewest, self.failures))
        return tuple(takewhile(lambda template: template is not None, found))  # type: ignore[arg-type]

    def _template_of(self, num_nodes: int) -> PipelineTemplate:
        """The template of a number of nodes that there is one for."""
        (template,) = self._found([num_nodes])
        assert template is not None, f"there is a template of {num_nodes} nodes by theorem 2"
        return template

    def pipeline(self, num_nodes: int) -> Pipeline:
        return Pipeline.of_template(self.plans.chain, self._template_of(num_nodes))

    def _check_sums(self) -> None:
        largest = len(self.templates) + self.fewest - 1
        merged = min(2 * self.fewest - 1, self.num_nodes - self.failures * self.fewest)
        if largest < merged:
            raise ValueError(
                f"A pipeline of {self.fewest} nodes that loses some is merged with another to one of up to {merged} "
                f"nodes, but {self._cut_text(largest)}. Use smaller nodes or a larger `tp_size`."
            )
        for num_nodes in range(self.num_nodes, self.fewest_guaranteed - 1, -1):
            most = min(num_nodes // self.fewest, self.plans.num_turns)
            if most * largest < num_nodes:
                raise ValueError(self._why_not_all(num_nodes))

    def _check_adopted(self, pipelines: Sequence[Pipeline]) -> None:
        if len(pipelines) <= self.failures:
            raise ValueError(
                f"The plan has {len(pipelines)} copies of the model on nodes of their own; to survive {self.failures} "
                f"failures at once it needs {self.failures + 1}. Use "
                f"`dp_size={(self.failures + 1) * self.plans.chain.copies}` in all modules, or guarantee "
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

    def _why_not_all(self, num_nodes: int) -> str:
        total, largest = self.plans.num_turns, self._templates_of(num_nodes)[-1].num_nodes
        most = min(num_nodes // self.fewest, total)
        return (
            f"{num_nodes} nodes can't all be used. {most} pipelines, each of {self.fewest} nodes or more and with one "
            f"of the {total} microbatches of a global batch or more, have {most * largest} nodes at most, since "
            f"{self._cut_text(largest)}. Use fewer nodes, a larger `tp_size`, or a larger global batch."
        )

    def _cut_text(self, largest: int) -> str:
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


def _sizes(plan: ClusterPlan) -> list[int]:
    return sorted((len(pipeline.nodes) for pipeline in plan.pipelines), reverse=True)


def _check_nodes(nodes: Collection[int], state: ClusterPlan, are_there: bool) -> None:
    there = set(state.nodes)
    for node in sorted(set(nodes)):
        if (node in there) != are_there:
            what = "joins, but the plan has it already" if node in there else "is lost, but the plan does not have it"
            raise ValueError(f"Node {node} {what}; its nodes are {sorted(there)}. Give the number of another node.")
