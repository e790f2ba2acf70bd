"""The ranks that hold each slice of a parameter; gradient sums, the gradient norm, saving and loading depend on it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from .model_spec import LANGUAGE_MODEL, ModelSpec, ModuleSpec, ParameterSpec, Uses
from .parallel_plan import ParallelPlan, ShardingSettings, Stage, StageKey


def stage_holds(layers: tuple[int, int], num_layers: int, layer: int) -> bool:
    """Whether a stage of `layers` has the parameters of `layer` (-1: before the first one, `num_layers`: after)."""
    first = -1 if layers[0] == 0 else layers[0]
    stop = num_layers + 1 if layers[1] == num_layers else layers[1]
    return first <= layer < stop


def stage_parameters(spec: ModelSpec, module: str, stage: Stage) -> tuple[ParameterSpec, ...]:
    """The parameters of a stage, each once; tied ones belong to the stages of all of their uses."""
    num_layers = spec.modules[module].num_layers
    result = {
        use.parameter.name: use.parameter
        for index in range(-1, num_layers + 1)
        if stage_holds(stage.layers, num_layers, index)
        for use in spec.uses.get((module, index), ())
    }
    return tuple(result.values())


def trainable_stages(module: ModuleSpec, tied: Mapping[str, Uses], ranges: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether each stage of `module` has a parameter that gets a gradient."""
    used_at = {parameter.layer for parameter in module.parameters if parameter.trainable}
    for parameter in module.parameters:
        others = tied.get(parameter.name, ()) if parameter.trainable else ()
        used_at |= {layer for tied_in, layer in others if tied_in == module.name}
    return [any(stage_holds(layers, module.num_layers, layer) for layer in used_at) for layers in ranges]


def partly_frozen_stages(
    module: ModuleSpec, tied: Mapping[str, Uses], ranges: Sequence[tuple[int, int]]
) -> list[bool]:
    """Whether each stage of `module` has parameters that get a gradient, and others that get none."""
    if len({p.trainable for p in module.parameters}) < 2:
        return [False] * len(ranges)
    frozen = replace(module, parameters=tuple(replace(p, trainable=not p.trainable) for p in module.parameters))
    both = zip(trainable_stages(module, tied, ranges), trainable_stages(frozen, tied, ranges), strict=True)
    return [trains and freezes for trains, freezes in both]


MIN_WEIGHT_SHARE = 0.15  # of a backward: less work of weight gradients is not worth a task of its own


def can_put_off(module: ModuleSpec, tied: Mapping[str, Uses], parameter: ParameterSpec, layer: int) -> bool:
    """Whether the gradient of a parameter can be put off: that of the weight of a linear layer."""
    # the loss computes that of a head, and the gradients of several uses are added up
    is_head = module.name == LANGUAGE_MODEL and layer == module.num_layers
    is_matrix = len(parameter.shape) == 2 and not parameter.is_lookup and not parameter.num_experts
    return parameter.trainable and is_matrix and not is_head and parameter.name not in tied


def put_off_share(module: ModuleSpec, tied: Mapping[str, Uses], layers: tuple[int, int]) -> float:
    """Share of the gradients that can be put off of the matrix products in the backward of a stage of `layers`."""
    put_off = whole = 0.0
    for parameter in module.parameters:
        if stage_holds(layers, module.num_layers, parameter.layer) and len(parameter.shape) > 1:
            active = parameter.num_elements * parameter.active_share * (not parameter.is_lookup)
            whole += active * (1 + parameter.trainable)
            put_off += active * can_put_off(module, tied, parameter, parameter.layer)
    return put_off / whole if whole else 0.0


def with_split_backwards(
    plan: ParallelPlan,
    modules: Mapping[str, ModuleSpec],  # with their frozen parameters marked
    tied: Mapping[str, Uses],
    wanted: Mapping[str, bool | None] | None = None,  # module -> whether the user wants it; by default as the schedule
) -> ParallelPlan:
    """
    The plan with the stages marked that put off gradients of weights, which only what sends a gradient does.

    Raises:
        `ValueError`: For a module that is to put off some and has none.
    """
    wanted = wanted or {}
    if not plan.policy.splits_backward and not any(wanted.values()):
        return plan
    planned, sending = {}, set()  # modules that what follows them sends gradients to
    for name, module in plan.modules.items():
        given, spec = wanted.get(name), modules[name]
        shares = {layers: put_off_share(spec, tied, layers) for layers in {s.layers for _, _, s in module.stages()}}
        least = _least_share(plan, name, spec, tied) if given is None else 0.0 if given else math.inf
        is_fed, rows = any(edge.target == name and edge.source in sending for edge in plan.edges), []
        for replica in module.replicas:
            sends, stages = is_fed, []
            for stage in replica:
                stages.append(replace(stage, splits_backward=sends and 0 < shares[stage.layers] >= least))
                sends = sends or stage.trainable
            rows.append(tuple(stages))
            sending |= {name} if sends else set()
        planned[name] = replace(module, replicas=tuple(rows))
        if given and not planned[name].splits_backward:
            raise ValueError(
                f"`split_backward=True` of `{name}` has no effect: none of its stages both sends a gradient and "
                "trains the weight of a linear layer in its layers or projector. Leave it out."
            )
    return replace(plan, modules=planned)


def _least_share(plan: ParallelPlan, name: str, spec: ModuleSpec, tied: Mapping[str, Uses]) -> float:
    """The share of gradients that can be put off from which the stages of a module do so by default."""
    module = plan.modules[name]
    # inputs of linear layers stay, where recomputation or host memory would free them; and whole gradients of other
    # matrices, such as those of experts, where ZeRO would divide them at once; layers in float8 can't put off theirs
    inside = [p for p in spec.parameters if p.trainable and len(p.shape) > 1 and 0 <= p.layer < spec.num_layers]
    divides = module.sharding.zero_stage >= 2 and not all(can_put_off(spec, tied, p, p.layer) for p in inside)
    frees = module.activation_checkpointing or module.storage.offload_activations or module.storage.float8
    pays = plan.policy.splits_backward and not frees and not divides
    return MIN_WEIGHT_SHARE if pays else math.inf


@dataclass(frozen=True)
class Cut:
    """Consecutive ones of the equal slices into which a dimension of a tensor is cut."""

    axis: Literal["tp", "ep", "dp"]  # the axis of parallelism that cuts: experts are `"ep"`, ZeRO is `"dp"`
    dim: int | None  # the dimension that is cut; `None` for the flattened tensor
    index: int  # index of the first of these slices
    num_slices: int  # slices of the whole dimension
    num_blocks: int = 1  # equal blocks of the dimension that are each cut, such as gate and up matrices in one tensor
    count: int = 1  # how many slices these are; more than one where tp groups of unlike sizes hold the parameter

    def bounds(self, size: int) -> tuple[int, int]:
        """First index, and one past the last, in a block of `size` indices; the last slices may be shorter."""
        length = -(-size // self.num_slices)
        return min(self.index * length, size), min((self.index + self.count) * length, size)


@dataclass(frozen=True)
class Shard:
    """A slice of a parameter, and the ranks that hold it."""

    cuts: tuple[Cut, ...]  # each cuts what the ones before leave; empty for the whole parameter
    holders: tuple[int, ...]  # ascending ranks that compute with it and sum their gradients
    owner: int  # the updater that counts the slice in the gradient norm
    # ascending holders whose optimizers update it: all by default, one of each shard group under ZeRO
    updaters: tuple[int, ...] = ()

    def __post_init__(self):
        if not self.updaters:
            object.__setattr__(self, "updaters", self.holders)

    @property
    def zero_cut(self) -> Cut | None:
        """The cut over data-parallel copies, if there is one; it is the last of all cuts."""
        return self.cuts[-1] if self.cuts and self.cuts[-1].axis == "dp" else None

    def is_on(self, rank: int) -> bool:
        """Whether a rank holds a copy."""
        index = bisect_left(self.holders, rank)
        return index < len(self.holders) and self.holders[index] == rank


@dataclass(frozen=True)
class ParameterShards:
    """Where one parameter lives: its shards cover it, and one that all of its ranks hold whole has one."""

    stages: tuple[StageKey, ...]  # (module, replica, stage) of each copy
    shards: tuple[Shard, ...]  # in the order of their slices
    zero_stage: int = 0  # what its copies divide among them, see `ShardingSettings`

    @classmethod
    def from_copies(
        cls,
        stages: tuple[StageKey, ...],
        copies: Iterable[tuple[tuple[Cut, ...], tuple[int, ...]]],
    ) -> ParameterShards:
        """Puts the slices and the ranks that hold them together where slices are equal."""
        by_slice: dict[tuple[Cut, ...], list[tuple[int, ...]]] = {}
        for cuts, ranks in copies:
            by_slice.setdefault(cuts, []).append(ranks)
        shards = []
        for cuts, sets in by_slice.items():
            holders = sets[0] if len(sets) == 1 else tuple(sorted(set().union(*sets)))
            # the ranks of a copy ascend; the first one of the first copy is the owner
            shards.append(Shard(cuts, holders, sets[0][0]))
        return cls(stages, tuple(shards))

    @property
    def axis(self) -> str | None:
        """The axis of parallelism that cuts the parameter first, `None` if it is whole."""
        cuts = self.shards[0].cuts
        return cuts[0].axis if cuts else None

    @property
    def owner(self) -> int:
        """The rank that writes the parameter where it is saved whole."""
        return self.shards[0].owner

    def on_rank(self, rank: int) -> tuple[Shard, ...]:
        """The shards that a rank holds a copy of."""
        return tuple(shard for shard in self.shards if shard.is_on(rank))

    def updated_by(self, rank: int) -> tuple[Shard, ...]:
        """The shards that a rank's optimizer updates."""
        return tuple(shard for shard in self.shards if rank in shard.updaters)

    def owned_by(self, rank: int) -> tuple[Shard, ...]:
        """The shards that a rank writes and counts in the gradient norm."""
        return tuple(shard for shard in self.shards if shard.owner == rank)

    def divide(self, sharding: ShardingSettings, trainable: bool) -> ParameterShards:
        """Divides the optimizer's work on each shard among its holders (ZeRO), in stage 3 its values, too."""
        # what several stages of a pipeline use, such as tied embeddings, is gathered by none of them alone, so only
        # the optimizer's work is divided
        is_in_one_stage = len({replica for _, replica, _ in self.stages}) == len(self.stages)
        zero_stage = sharding.zero_stage if is_in_one_stage else min(sharding.zero_stage, 1)
        # stage 3 divides frozen parameters, too
        if zero_stage < (1 if trainable else 3):
            return self
        result: list[Shard] = []
        for shard in self.shards:
            count = len(shard.holders)
            size = sharding.shard_size or count
            # all holders divide a shard where their number is no multiple of `shard_size`, as may be that of tied
            # parameters
            size = size if count % size == 0 else count
            if size == 1:
                result.append(shard)
                continue
            for index in range(size):
                updaters = shard.holders[index::size]
                cuts = (*shard.cuts, Cut("dp", None, index, size))
                result.append(Shard(cuts, shard.holders, updaters[0], updaters))
        return ParameterShards(self.stages, tuple(result), zero_stage)


def layer_numbers(spec: ModelSpec) -> dict[str, int]:
    """Parameter -> the layer that it is a part of; -1 for those of no layer, or that are used in several places."""
    result = {}
    for name in spec.parameters:
        (module, layer), *others = spec.used_at[name]
        is_inside = not others and name.startswith(f"{spec.modules[module].stack}.{layer}.")
        result[name] = layer if is_inside else -1
    return result


def parameter_shards(spec: ModelSpec, plan: ParallelPlan) -> dict[str, ParameterShards]:
    """Parameter -> where it lives, in the order of the model; parameters that live alike share the object."""
    stage_tables = {name: _stage_tables(spec, plan, name) for name in spec.modules}
    tp_groups: dict[tuple, tuple[tuple[StageKey, ...], list[tuple[int, ...]]]] = {}
    known: dict[tuple, ParameterShards] = {}
    result: dict[str, ParameterShards] = {}
    for parameter in spec.parameters.values():
        uses = [(name, stage_tables[name][layer]) for name, layer in spec.used_at[parameter.name]]
        # By identity: equal tables of a module are one object, and those of many replicas are long.
        layout = tuple(dict.fromkeys((name, id(table)) for name, table in uses))
        module = plan.modules[spec.used_at[parameter.name][0][0]]
        sharding, shares_experts = module.sharding, module.ep_size > 1 and parameter.num_experts > 0
        cut = (parameter.expert_dim, parameter.expert_blocks) if shares_experts else None
        key = (layout, parameter.tp_dim, parameter.tp_blocks, sharding, parameter.trainable, cut)
        if key not in known:
            if layout not in tp_groups:
                tp_groups[layout] = _tp_groups(plan, uses)
            stages, groups = tp_groups[layout]
            copies = _expert_copies(plan, stages, *cut) if cut else _tp_copies(parameter, groups)
            known[key] = ParameterShards.from_copies(stages, copies).divide(sharding, parameter.trainable)
        result[parameter.name] = known[key]
    return result


def _tp_copies(
    parameter: ParameterSpec, tp_groups: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[Cut, ...], tuple[int, ...]]]:
    """The slices of a parameter on the ranks of each tp group."""
    if parameter.tp_dim is None:
        yield from (((), (rank,)) for ranks in tp_groups for rank in ranks)
        return
    # all borders of tp groups of unlike sizes divide it, so that a rank of a smaller one has several slices
    sizes = {len(ranks) for ranks in tp_groups}
    finest = math.lcm(*sizes)
    slices = []
    for start, stop in pairwise(sorted({index * finest // size for size in sizes for index in range(size + 1)})):
        unit = math.gcd(start, stop, finest)
        cut = Cut("tp", parameter.tp_dim, start // unit, finest // unit, parameter.tp_blocks, (stop - start) // unit)
        slices.append((start, (cut,) if finest > 1 else ()))
    for ranks in tp_groups:
        yield from ((cuts, (ranks[start * len(ranks) // finest],)) for start, cuts in slices)


def _expert_copies(
    plan: ParallelPlan, stages: Sequence[StageKey], dim: int, num_blocks: int
) -> Iterator[tuple[tuple[Cut, ...], tuple[int, ...]]]:
    """The experts, on the ranks of each group that shares them."""
    (name, _, stage), size = stages[0], plan.modules[stages[0][0]].ep_size
    for group in plan.modules[name].expert_groups(stage):
        for index, rank in enumerate(rank for tp_group in group for rank in tp_group):
            yield (Cut("ep", dim, index, size, num_blocks),), (rank,)


def _stage_tables(spec: ModelSpec, plan: ParallelPlan, name: str) -> dict[int, tuple[int, ...]]:
    """Layer of a module -> which stage of each replica uses parameters there; equal tuples are one object."""
    num_layers = spec.modules[name].num_layers
    layers = range(-1, num_layers + 1)
    known: dict[tuple, list[int]] = {}
    replicas = []
    for stages in plan.modules[name].replicas:
        ranges = tuple(stage.layers for stage in stages)
        if ranges not in known:
            known[ranges] = [
                next(index for index, range_ in enumerate(ranges) if stage_holds(range_, num_layers, layer))
                for layer in layers
            ]
        replicas.append(known[ranges])
    tables: dict[tuple[int, ...], tuple[int, ...]] = {}
    return {
        layer: tables.setdefault(table, table)
        for layer, table in zip(layers, zip(*replicas, strict=True), strict=True)
    }


def _tp_groups(
    plan: ParallelPlan, uses: Sequence[tuple[str, Sequence[int]]]
) -> tuple[tuple[StageKey, ...], list[tuple[int, ...]]]:
    """The stages that use a parameter, and their tp groups, that of the lowest first rank in front."""
    keys = dict.fromkeys((name, replica, index) for name, table in uses for replica, index in enumerate(table))
    return tuple(keys), sorted({tp_group for key in keys for tp_group in plan.stage(*key).mesh})


@dataclass(frozen=True)
class SyncGroup:
    """Parameters whose gradients the same ranks sum together, or which they divide among them."""

    ranks: tuple[int, ...]
    parameters: tuple[str, ...]  # names, in the order of the model
    stages: tuple[StageKey, ...]  # (module, replica, stage) whose backwards must be done before
    shard_size: int = 1  # consecutive `ranks` that divide the sum of each parameter, since each updates a slice
    # 2 and 3 sum gradients in each backward, and the sum of the step is one between the groups that divide them; in
    # stage 3 the ranks divide the parameters themselves
    zero_stage: int = 0

    @property
    def shard_groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that divide the sums; none where each rank gets all of them."""
        size = self.shard_size
        return tuple(self.ranks[i : i + size] for i in range(0, len(self.ranks), size)) if size > 1 else ()

    @property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks with the same slice of the sums; none where all of them are in one shard group."""
        size = self.shard_size
        return tuple(self.ranks[i::size] for i in range(size)) if 1 < size < len(self.ranks) else ()


def sync_groups(spec: ModelSpec, plan: ParallelPlan) -> list[SyncGroup]:
    """The gradient sums of a step, see [`sync_groups_of`], without frozen parameters and those on one rank."""
    shards = parameter_shards(spec, plan)
    trained = {name: shards[name] for name, parameter in spec.parameters.items() if parameter.trainable}
    return sync_groups_of(trained, list(plan.modules))


def frozen_groups(spec: ModelSpec, plan: ParallelPlan) -> list[SyncGroup]:
    """The frozen parameters that ranks divide among them (ZeRO-3), in one order for all ranks."""
    shards = parameter_shards(spec, plan)
    frozen = {
        name: shards[name]
        for name, parameter in spec.parameters.items()
        if not parameter.trainable and shards[name].zero_stage == 3
    }
    return sync_groups_of(frozen, list(plan.modules))


def sync_groups_of(trained: Mapping[str, ParameterShards], modules: Sequence[str]) -> list[SyncGroup]:
    """
    The gradient sums of trained parameters (in the order of the model) in one order for all ranks: that in which
    backwards end, from the last of `modules` to the first and, in each, from the last stage to the first.
    """
    names: dict[tuple[tuple[StageKey, ...], tuple[int, ...], int, int], list[str]] = {}
    lists: dict[int, list[list[str]]] = {}  # of each object, which many parameters share
    for name, shards in trained.items():
        if id(shards) not in lists:
            # all holders of a shard sum at once, so that all apply the same bits
            summed = dict.fromkeys(
                (shards.stages, shard.holders, shard.zero_cut.num_slices if shard.zero_cut else 1, shards.zero_stage)
                for shard in shards.shards
                if len(shard.holders) > 1
            )
            lists[id(shards)] = [names.setdefault(key, []) for key in summed]
        for members in lists[id(shards)]:
            members.append(name)
    order = {name: number for number, name in enumerate(modules)}

    def first_stage(group: SyncGroup) -> tuple[int, int]:
        return min((order[name], index) for name, _, index in group.stages)

    groups = [
        SyncGroup(ranks, tuple(members), stages, size, zero_stage if size > 1 else 0)
        for (stages, ranks, size, zero_stage), members in names.items()
    ]
    return sorted(groups, key=first_stage, reverse=True)
