"""The layouts of a run that goes on when nodes are lost: what is refused, the first one, and what it becomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .. import _environment
from ..data.streams import is_stream
from ..plan import (
    ModelSpec,
    MultimodalParallelPlugin,
    ParameterSpec,
    SampleSizes,
    StorageSettings,
    parameter_shards,
)
from ..planning.possible_sizes import stage_tp_sizes
from ..resilience.model_chain import TypicalMicrobatches, copies_of, model_chain
from ..resilience.pipelines import ClusterPlan, PipelinePlans, layouts_of, layouts_of_plan, tp_sizes_of
from ..resilience.resilient_planner import ResilientPlanner
from ..resilience.state_copies import LostStateError, PlacedPlan, Slice, state_copies
from ..runtime.held_state import Transfer
from ..runtime.optimizer_slices import Region
from .arguments import AUTO, MultimodalTrainingArguments
from .build import PreparedModel, recomputed
from .training_sizes import allowed_bytes


class NodeLayouts:
    """Decides on layouts of pipelines of nodes when members are lost or join, alike on all ranks."""

    def __init__(self, planner: ResilientPlanner):
        self.planner = planner

    @property
    def _spec(self) -> ModelSpec:
        return self.planner.plans.chain.spec

    def without(self, layout: ClusterPlan, lost: Collection[int]) -> ClusterPlan:
        return self.planner.without(layout, self._nodes(lost))

    def last(self, layout: ClusterPlan, lost: Collection[int]) -> ClusterPlan:
        """A layout of one copy of the model, for a last checkpoint."""
        return self.planner.last(layout, self._nodes(lost))

    def with_members(self, layout: ClusterPlan, joined: Collection[int]) -> ClusterPlan:
        size = self.planner.node_size
        counts = Counter(member // size for member in joined)
        whole = sorted(node for node, count in counts.items() if count == size)  # others are left out
        if not whole:
            return layout
        try:
            return self.planner.with_nodes(layout, whole)
        except ValueError:  # no pipelines could use all nodes
            return layout

    def leaving(self, layout: ClusterPlan, asked: Collection[int]) -> set[int]:
        """
        The members of the nodes of some, or of as many of these nodes as can leave at once, so that all layers stay;
        raises [`TooFewNodesError`] if too few nodes would be left without all of them.
        """
        nodes = sorted(self._nodes(asked))
        after = self.planner.without(layout, nodes)
        while not self._has_all_layers(layout, after):
            nodes = nodes[: len(nodes) // 2]  # one alone always can
            after = self.planner.without(layout, nodes)
        return set(layout.members).difference(after.members)

    def _has_all_layers(self, before: ClusterPlan, after: ClusterPlan) -> bool:
        try:
            state_copies(self._spec, before, after)
        except LostStateError:
            return False
        return True

    def _nodes(self, members: Collection[int]) -> set[int]:
        return {member // self.planner.node_size for member in members}

    def transfers(self, before: ClusterPlan, after: ClusterPlan) -> list[Transfer]:
        return state_transfers(self._spec, before, after)

    def tp_cuts(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Parameter that some plan cuts -> the dimension that is cut, and the sizes of the tp groups of all plans."""
        result = {}
        for name, parameter in self._spec.parameters.items():
            modules = {module for module, _ in self._spec.used_at[name]}
            sizes = sorted(set().union(*(self.planner.plans.chain.tp_sizes[module] for module in modules)))
            if parameter.tp_dim is not None and sizes[-1] > 1:
                result[name] = parameter.tp_dim, tuple(sizes)
        return result

    def needed_parameters(self, layout: ClusterPlan, rank: int) -> list[str]:
        return [name for name, shards in parameter_shards(self._spec, layout.plan).items() if shards.on_rank(rank)]


def node_layouts(
    prepared: PreparedModel,
    plugin: MultimodalParallelPlugin,
    args: MultimodalTrainingArguments,
    global_batch: tuple[int, SampleSizes | None],
) -> NodeLayouts:
    """Returns what decides on layouts; raises `ValueError` for failures that can't be guaranteed."""
    survives = args.survives
    assert survives is not None
    costs, plan = prepared.costs, plugin.plan
    spec = costs.spec
    node_size = survives.ranks_per_node or _environment.ranks_per_host(args.world_size)
    if args.world_size % node_size:
        raise ValueError(
            f"`ranks_per_node={node_size}` of `resilience` does not divide the {args.world_size} ranks of the run. "
            "Use the number of ranks of a host, or a divisor of it."
        )
    if plan is None:  # stages have any size that the settings leave open
        layouts = layouts_of(recomputed(plugin, spec, args))
        tp_sizes = stage_tp_sizes(prepared.model, spec, plugin, min(node_size, costs.device.node_size))
    else:
        layouts, tp_sizes = layouts_of_plan(plan, node_size), tp_sizes_of(plan)  # those of the user's plan are kept
    num_samples, sizes = global_batch
    size = args.per_device_train_batch_size
    total = -(-num_samples // size)
    # without sizes of a typical global batch all samples count the same
    sizes = sizes or SampleSizes.uniform(dict.fromkeys(spec.modules, 1), size)
    chain = model_chain(
        costs,
        layouts,
        TypicalMicrobatches(sizes, size, -(-total // copies_of(layouts))),
        allowed_bytes(args, costs.device),
        tp_sizes=tp_sizes,
    )
    schedule = "1f1b" if plan is None else plan.schedule
    if plan is None and plugin.schedule not in (None, schedule):
        raise ValueError(
            f"`schedule={plugin.schedule!r}` can't be used with `resilience` and `auto=True`, whose plans run "
            f"`{schedule!r}`. Leave it out, or give the sizes of all modules."
        )
    named = args.microbatch_assignment if isinstance(args.microbatch_assignment, str) else None
    plans = PipelinePlans(chain, node_size, total, schedule, named)
    between_s = 3600 * args.mean_time_between_failures_h
    return NodeLayouts(ResilientPlanner(plans, args.world_size // node_size, survives.failures, between_s))


def check_survivable(args: MultimodalTrainingArguments, storage: Mapping[str, StorageSettings], dataset: Any) -> None:
    """Raises `ValueError` for the first thing with which a run could not go on when nodes are lost."""
    refused = next(refusals(args, storage, dataset), None)
    if refused is not None:
        raise ValueError(f"`resilience` can't be used with {refused}")


def refusals(
    args: MultimodalTrainingArguments, storage: Mapping[str, StorageSettings], dataset: Any = None
) -> Iterator[str]:
    """Each setting with which a run could not go on, with the reason and a remedy."""
    if _environment.launch_settings() is None:
        yield (
            "this launcher, which ends all processes when one ends. Start the script with `hf-mmparallel launch`, "
            "which takes the flags of `accelerate launch`."
        )
    for name, of_module in storage.items():
        if of_module.offload_params:
            yield f"`offload_params` of `{name}`: its layers can't move to other ranks. Leave it out."
    if args.memory_limit_gib == AUTO:
        yield "`memory_limit_gib='auto'`: limits are learned in the first steps of one plan. Give a number."
    if not args.accelerator_config.use_seedable_sampler:  # type: ignore[union-attr]
        yield (
            "`use_seedable_sampler=False` of `accelerator_config`: the order of an epoch can't be drawn again. Leave "
            "it out."
        )
    if args.train_sampling_strategy == "group_by_length":
        yield (
            "`train_sampling_strategy='group_by_length'`: the order of an epoch can't be drawn again. Use `'random'`."
        )
    if is_stream(dataset):
        yield (
            f"a stream (`{type(dataset).__name__}`): it can't be read again from a position in its middle. Use a "
            "dataset with a length and an index."
        )


def state_transfers(spec: ModelSpec, before: PlacedPlan, after: PlacedPlan) -> list[Transfer]:
    """What ranks send each other when a plan follows another, by their ranks in the new one."""
    held, needed = _parts(spec, before), _parts(spec, after)
    copies = state_copies(spec, before, after).copies
    wanted = [(copy.parameter, copy.source, copy.target, copy.slice) for copy in copies]
    # a rank whose part of a parameter changes keeps what its old part and the new one have in common
    for name, of_members in needed.items():
        for member, part in of_members.items():
            own = held[name].get(member, part)
            common = None if own == part else own.common(part)
            if common is not None:
                wanted.append((name, member, member, common))
    rank_of = {member: rank for rank, member in enumerate(after.members)}
    transfers = []
    for name, source, target, elements in wanted:
        parameter = spec.parameters[name]
        taken, given = (
            _region(parameter, elements, held[name][source]),
            _region(parameter, elements, needed[name][target]),
        )
        transfers.append(Transfer(name, rank_of[source], rank_of[target], taken, given))
    return transfers


def _parts(spec: ModelSpec, placed: PlacedPlan) -> Mapping[str, Mapping[int, Slice]]:
    """Parameter -> member -> all that it updates of it."""
    return {
        name: {
            placed.members[rank]: Slice.on_rank(spec.parameters[name], shards, rank)
            for rank in {rank for shard in shards.shards for rank in shard.updaters}
        }
        for name, shards in parameter_shards(spec, placed.plan).items()
    }


def _region(parameter: ParameterSpec, elements: Slice, part: Slice) -> Region | None:
    """Where elements lie in a part of a parameter; `None` if they are all of it."""
    if elements == part:
        return None
    assert elements.dim is not None
    size = parameter.shape[elements.dim] // len(elements.ranges)
    first, end = part.ranges[0] if part.ranges else (0, size)
    start, stop = elements.ranges[0]
    return Region(elements.dim, start - first, stop - first, end - first, len(elements.ranges))
