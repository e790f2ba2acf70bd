"""Pipelines, each with one copy of the model on whole nodes, and the plan of a cluster that they make."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from math import lcm
from typing import Literal

from ..arrange import fastest_counts
from ..plan import ModulePlugin, ParallelPlan, Stage, check_plan, check_world_size
from ..plan.layout import ModuleLayout
from ..plan.methods import POLICIES, Schedule
from ..plan.resolve import as_trained, check_tp_sizes
from .model_chain import ModelChain, mean_stage_ms, stages_on
from .state_copies import PlacedPlan
from .templates import PipelineTemplate, TimedPipeline

Nodes = tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """One step of a reconfiguration."""

    # "reinstantiate": a pipeline goes on with the nodes that it has left; "borrow": it takes a node of another
    # pipeline; "merge": it becomes one with another pipeline; "divide": its nodes, and others that were in no
    # pipeline, are divided among new pipelines
    op: Literal["reinstantiate", "borrow", "merge", "divide"]
    nodes: Nodes  # of the pipeline before
    others: Nodes = ()  # that it takes or is joined with

    def __str__(self) -> str:
        names = {"reinstantiate": "goes on", "borrow": "borrows", "merge": "is merged with", "divide": "is divided"}
        others = f" {_listed(self.others)}" if self.others else ""
        pipeline = f"the pipeline of {_listed(self.nodes)}" if self.nodes else "a new pipeline"
        return f"{pipeline} {names[self.op]}{others}"


class TooFewNodesError(RuntimeError):
    """The nodes that are left can't hold as many copies of the model as are guaranteed."""


@dataclass(frozen=True)
class Pipeline(TimedPipeline):
    """The copies of the model that are on the same nodes."""

    nodes: tuple[int, ...]  # of each place
    # by module: the stages of each copy, on ranks of places, of which place `p` has those from `p * node_size` on
    replicas: Mapping[str, tuple[tuple[Stage, ...], ...]]
    fill_ms: float  # one microbatch of each copy through all stages and back
    slowest_ms: float  # a microbatch on the busiest ranks

    @classmethod
    def of_template(cls, chain: ModelChain, template: PipelineTemplate) -> Pipeline:
        """The pipeline of a template of a chain, on the first nodes."""
        stages: dict[str, list[tuple[Stage, ...]]] = {name: [] for name in chain.spec.modules}
        first = 0
        for stage in template.stages:
            ranks = range(first, first + stage.num_ranks)
            for name, layers in chain.pieces(stage.layers):
                stages[name].append(stages_on(chain.layouts[name], layers, ranks))
            first += stage.num_ranks
        replicas = {name: tuple(zip(*of_module, strict=True)) for name, of_module in stages.items()}
        return cls(tuple(range(template.num_nodes)), replicas, template.fill_ms, template.slowest_ms)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def on(self, nodes: Iterable[int]) -> Pipeline:
        """The same stages on other nodes."""
        return replace(self, nodes=tuple(nodes))


@dataclass(frozen=True)
class ClusterPlan(PlacedPlan):
    """
    The pipelines of the nodes that there are, as a plan: those of `c` copies each have `c` consecutive replicas of
    every module. The processes of node `n` are the members from `n * node_size` on; ranks are in the order of members.
    """

    pipelines: tuple[Pipeline, ...]
    changes: tuple[Change, ...] = ()  # how the pipelines came from the ones before
    reason: str = ""  # why they and no others followed those

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted(node for pipeline in self.pipelines for node in pipeline.nodes))

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Microbatches of each copy in a full global batch."""
        return self.plan.microbatch_counts

    @property
    def of_pipelines(self) -> list[tuple[Pipeline, tuple[int, ...]]]:
        """Each pipeline with the microbatches of its copies."""
        size = len(self.microbatches) // len(self.pipelines)
        counts = (self.microbatches[first : first + size] for first in range(0, len(self.microbatches), size))
        return list(zip(self.pipelines, counts, strict=True))

    @property
    def step_ms(self) -> float:
        """Time until the last pipeline has computed its microbatches, in closed form; see [`StepTimes`]."""
        return max(pipeline.step_ms(max(counts)) for pipeline, counts in self.of_pipelines)


@dataclass(frozen=True, eq=False)
class PipelinePlans:
    chain: ModelChain
    node_size: int  # ranks of a node
    num_microbatches: int  # of a global batch, of all pipelines
    schedule: Schedule = "1f1b"
    microbatch_assignment: str | None = None  # name of the arrangement

    def __post_init__(self):
        if not POLICIES[self.schedule].is_plain:
            raise ValueError(
                f"`schedule={self.schedule!r}`: plans after failures have neither virtual stages nor split backwards. "
                'Use another one, such as `"1f1b"`.'
            )

    @property
    def num_turns(self) -> int:
        """Microbatches of a global batch that all copies of a pipeline compute at the same time, as one."""
        return self.num_microbatches // self.chain.copies

    def consecutive(self, pipelines: Sequence[Pipeline], counts: Sequence[int] | None = None) -> ClusterPlan:
        """The plan of pipelines on nodes that follow each other, from node 0 on, see [`~PipelinePlans.of`]."""
        free = count()
        return self.of([one.on(islice(free, one.num_nodes)) for one in pipelines], counts)

    def of(self, pipelines: Sequence[Pipeline], counts: Sequence[int] | None = None) -> ClusterPlan:
        """
        The plan of pipelines with these microbatches of each copy, by default such that the last pipeline is done as
        early as possible; raises `ValueError` if there are fewer microbatches than copies.
        """
        if counts is None:
            copies = [one for one in pipelines for _ in range(self.chain.copies)]
            fill_ms, slowest_ms = [one.fill_ms for one in copies], [one.slowest_ms for one in copies]
            counts = fastest_counts(fill_ms, slowest_ms, self.num_microbatches)
        nodes = sorted(node for pipeline in pipelines for node in pipeline.nodes)
        first_rank = {node: index * self.node_size for index, node in enumerate(nodes)}
        placed = [self._placed(pipeline, first_rank) for pipeline in pipelines]
        modules = {
            name: layout.plan(tuple(stages for replicas in placed for stages in replicas[name]))
            for name, layout in self.chain.layouts.items()
        }
        are_alike = len(set(counts)) == 1 and all(one.replicas == pipelines[0].replicas for one in pipelines)
        plan = ParallelPlan(
            modules,
            self.chain.spec.edges,
            self.schedule,
            -(-sum(counts) // len(counts)),
            None if are_alike else tuple(counts),
            self.microbatch_assignment,
        )
        check_plan(plan, self.chain.spec)
        members = tuple(node * self.node_size + index for node in nodes for index in range(self.node_size))
        return ClusterPlan(as_trained(plan, self.chain.spec), members, tuple(pipelines))

    def _placed(self, pipeline: Pipeline, first_rank: Mapping[int, int]) -> dict[str, tuple[tuple[Stage, ...], ...]]:
        """The stages of each copy of a pipeline on the ranks of its nodes."""
        ranks = [first_rank[node] + index for node in pipeline.nodes for index in range(self.node_size)]
        return {name: on_ranks(replicas, ranks) for name, replicas in pipeline.replicas.items()}


def on_ranks(
    replicas: Sequence[Sequence[Stage]], ranks: Sequence[int] | Mapping[int, int]
) -> tuple[tuple[Stage, ...], ...]:
    """Stages with other ranks: `ranks[r]` in place of `r`."""

    def moved(stage: Stage) -> Stage:
        return replace(stage, mesh=tuple(tuple(ranks[rank] for rank in tp_group) for tp_group in stage.mesh))

    return tuple(tuple(map(moved, stages)) for stages in replicas)


def layouts_of(plugins: Mapping[str, ModulePlugin]) -> dict[str, ModuleLayout]:
    """
    The layouts of modules in each pipeline of templates, for [`model_chain`]: as many copies of all of them as share
    optimizer state, which are on the same nodes.
    """
    layouts = {name: ModuleLayout.of(plugin) for name, plugin in plugins.items()}
    sharing = [max(1, (layout.shard_size or 1) // layout.cp_size) for layout in layouts.values() if layout.zero_stage]
    copies = lcm(*sharing)
    return {name: replace(layout, dp_size=copies) for name, layout in layouts.items()}


def layouts_of_plan(plan: ParallelPlan, node_size: int) -> dict[str, ModuleLayout]:
    """The same of a plan of the user: as many copies of all modules as are on the nodes of the first one."""
    nodes = [{rank // node_size for rank in _ranks_of(plan, replica)} for replica in range(_num_copies(plan))]
    copies = next((number for number, own in enumerate(nodes) if own != nodes[0]), len(nodes))
    return {name: replace(ModuleLayout.of_plan(module), dp_size=copies) for name, module in plan.modules.items()}


def _num_copies(plan: ParallelPlan) -> int:
    return min(module.dp_size for module in plan.modules.values())


def _ranks_of(plan: ParallelPlan, replica: int) -> list[int]:
    stages = (stage for module in plan.modules.values() for stage in module.replicas[replica])
    return sorted({rank for stage in stages for rank in stage.all_ranks})


def tp_sizes_of(plan: ParallelPlan) -> dict[str, tuple[int, ...]]:
    """The tensor-parallel sizes that the stages of each module of a plan have, for [`model_chain`]."""
    return {name: module.tp_sizes for name, module in plan.modules.items()}


def adopt_pipelines(plan: ParallelPlan, plans: PipelinePlans, num_nodes: int) -> list[Pipeline]:
    """
    The pipelines of a plan of the user; raises `ValueError` if it does not consist of copies of the whole model on
    whole nodes, or has other settings than plans after failures.
    """
    check_plan(plan, plans.chain.spec)
    check_world_size(plan, num_nodes * plans.node_size)
    _check_settings(plan, plans)
    for name, module in plan.modules.items():
        if module.vp_size > 1:
            raise ValueError(
                f"`vp_size={module.vp_size}` of `{name}`: plans after failures have no virtual stages. Leave it out."
            )
        if module.splits_backward:
            raise ValueError(
                f"`split_backward=True` of `{name}`: plans after failures have whole backwards. Leave it out."
            )
    sizes = {name: module.dp_size for name, module in plan.modules.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"`{name}` {size}" for name, size in sizes.items())
        raise ValueError(
            f"The modules have different numbers of copies ({listed}). To survive failures each copy of the model has "
            "one of each module on nodes of its own: use the same `dp_size` in all modules."
        )
    times_ms = mean_stage_ms(plans.chain.costs, plan, plans.chain.microbatches)
    result: list[Pipeline] = []
    copies = plans.chain.copies
    if _num_copies(plan) % copies:
        raise ValueError(
            f"The first {copies} copies of the plan are on the same nodes, and its {_num_copies(plan)} copies are no "
            f"multiple of that. Put {copies} copies on the nodes of each pipeline."
        )
    for first in range(0, _num_copies(plan), copies):
        own = range(first, first + copies)
        ranks = sorted({rank for replica in own for rank in _ranks_of(plan, replica)})
        nodes = _whole_nodes(first, ranks, plans.node_size, result)
        ms = [
            (plan.stage(name, replica, index).all_ranks, times_ms[name, replica, index])
            for name, module in plan.modules.items()
            for replica in own
            for index in range(len(module.replicas[replica]))
        ]
        slowest_ms = max(sum(time_ms for on, time_ms in ms if rank in on) for rank in ranks)
        places = {rank: place for place, rank in enumerate(ranks)}
        placed = {
            name: on_ranks(module.replicas[own.start : own.stop], places) for name, module in plan.modules.items()
        }
        result.append(Pipeline(nodes, placed, sum(time_ms for _, time_ms in ms) / len(own), slowest_ms))
    return result


def _check_settings(plan: ParallelPlan, plans: PipelinePlans) -> None:
    if plan.schedule != plans.schedule:
        raise ValueError(
            f"The plan has `schedule={plan.schedule!r}`, and plans after failures {plans.schedule!r}. Use one of them."
        )
    for name, module in plan.modules.items():
        layout = plans.chain.layouts[name]
        if module.cp_size != layout.cp_size:
            raise ValueError(
                f"`{name}` has `cp_size={module.cp_size}` in the plan, and `cp_size={layout.cp_size}` in plans after "
                "failures. Use one of them."
            )
        check_tp_sizes(plans.chain.spec.modules[name], module, sorted({*module.tp_sizes, *plans.chain.tp_sizes[name]}))
        own = replace(ModuleLayout.of_plan(module), dp_size=layout.dp_size, tp_size=layout.tp_size)
        if own != layout:
            raise ValueError(
                f"`{name}` has other settings in the plan than in plans after failures: {own} and {layout}. Use the "
                "same."
            )


def _whole_nodes(replica: int, ranks: Sequence[int], node_size: int, others: Sequence[Pipeline]) -> tuple[int, ...]:
    """The nodes of a copy of the model; raises `ValueError` unless it has all of their ranks for itself."""
    nodes = tuple(dict.fromkeys(rank // node_size for rank in ranks))
    remedy = "Give each copy of the model, which is one copy of each module, whole nodes of its own."
    if len(ranks) != len(nodes) * node_size:
        node = next(node for node in nodes if sum(rank // node_size == node for rank in ranks) != node_size)
        raise ValueError(
            f"Replica {replica} of the plan's modules has some of the {node_size} ranks of node {node} (ranks "
            f"{node * node_size} to {node * node_size + node_size - 1}) and not the others. {remedy}"
        )
    for number, other in enumerate(others):
        shared = sorted(set(nodes) & set(other.nodes))
        if shared:
            raise ValueError(f"Replicas {number} and {replica} of the plan share node {shared[0]}. {remedy}")
    return nodes


# What becomes of pipelines that lose nodes (Oobleck, section 2.5.1): a pure decision that every rank makes alike.


def without_nodes(
    pipelines: Sequence[Nodes], lost: Collection[int], counts: range, failures: int
) -> tuple[list[Nodes], list[Change]]:
    """
    The pipelines of all nodes that are left after a loss, and how they came about, in order, where templates have
    `counts` of nodes ([`node_counts`]) and `failures` are guaranteed again; raises [`TooFewNodesError`] if fewer nodes
    are left than `failures + 1` copies need.

    A pipeline with nodes lost goes on with what it has left if a template has this number of nodes. Otherwise it
    borrows nodes, one by one, of the pipeline that has the most of those above the fewest nodes; if none has more, it
    is merged with the smallest pipeline, until it has enough. Whatever comes of it has a template (theorem 2).
    """
    left = [tuple(node for node in nodes if node not in lost) for nodes in pipelines]
    num_left, needed = sum(map(len, left)), (failures + 1) * counts[0]
    if num_left < needed:
        raise TooFewNodesError(
            f"{num_left} nodes are left; {failures + 1} copies of the model need {needed}, {counts[0]} each. Add "
            f"{needed - num_left} nodes, or go on from a checkpoint with fewer copies."
        )
    whole = [nodes for nodes, before in zip(left, pipelines, strict=True) if len(nodes) == len(before)]
    damaged = [nodes for nodes, before in zip(left, pipelines, strict=True) if 0 < len(nodes) < len(before)]
    changes = list(_mend(whole, damaged, counts[0]))
    # New pipelines, in place of those that lost all nodes, borrow all of theirs, which the paper does not say.
    while len(whole) < failures + 1:
        changes += _mend(whole, [()], counts[0])
    return whole, changes


def _mend(whole: list[Nodes], damaged: list[Nodes], fewest: int) -> Iterator[Change]:
    """Moves damaged pipelines to the whole ones, which change with them; those that can lend nodes first."""
    damaged.sort(key=len, reverse=True)
    while damaged:
        nodes = damaged.pop(0)
        if len(nodes) >= fewest:
            yield Change("reinstantiate", nodes)
        while len(nodes) < fewest:
            lender: Nodes = max(whole, key=len, default=())
            if len(lender) > fewest:
                whole[whole.index(lender)] = lender[:-1]
                yield Change("borrow", nodes, lender[-1:])
                nodes += lender[-1:]
                continue
            others = min([*damaged, *whole], key=len)
            (damaged if others in damaged else whole).remove(others)
            yield Change("merge", nodes, others)
            nodes += others
        whole.append(nodes)


def _listed(nodes: Nodes) -> str:
    return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(map(str, nodes))
