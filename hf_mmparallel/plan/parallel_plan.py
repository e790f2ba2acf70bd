"""`ParallelPlan`: the assignment of modules, replicas and stages to ranks, from which all else is derived."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, compress
from pathlib import Path
from typing import Any

from .._html_repr import HtmlRepr
from .checkpointing import Checkpointing, checkpointing_words, read_checkpointing
from .methods import ARRANGEMENTS, POLICIES, SCHEDULES, Schedule, SchedulePolicy, arrangement_name
from .model_spec import LANGUAGE_MODEL, Edge, sources_first
from .reading import read_count, read_flag, read_list, read_mapping, read_microbatches, read_name, reject_unknown_keys

StageKey = tuple[str, int, int]  # module, replica, stage
CONTEXT_METHODS = ("lpt", "zigzag", "contiguous", "random")
CONTEXT_MODES = ("auto", "row", "segments")
FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
PARTLY = "partly"  # `trainable` in a plan file, for a stage with trained and frozen parameters


@dataclass(frozen=True)
class ContextSettings:
    """How the tokens of a row are distributed over the cp ranks of a mesh, `context` in a plan file."""

    method: str = "lpt"  # how blocks are assigned to ranks, see `cp_method` of `ModulePlugin`
    mode: str = "auto"  # which keys and values are gathered, see `cp_mode` of `ModulePlugin`
    block: int = 128  # tokens per block; the kernels are tuned for 128


@dataclass(frozen=True)
class ShardingSettings:
    """What the data- and context-parallel copies of a module divide (ZeRO), `sharding` in a plan file."""

    zero_stage: int = 0  # 0 divides nothing, 1 the optimizer's state, 2 also the gradients, 3 also the weights
    shard_size: int | None = None  # copies that divide it, such as those of a node; all copies by default
    # whether ZeRO-3 frees the weights of a layer after each pass, see `ModulePlugin`
    reshard_after_forward: bool = True


def _flag(words: str) -> Any:
    """A setting that is off by default, with the words for it in the text of a layout."""
    return field(default=False, metadata={"words": words})


@dataclass(frozen=True)
class StorageSettings:
    """Precision and memory of a module's optimizer, weights and activations, `storage` in a plan file."""

    # whether the optimizer updates float32 copies of trained 16-bit weights; `None`: it does
    master_weights: bool | None = None
    offload_optimizer: bool = _flag("optimizer on the CPU")  # its state and its step
    offload_params: bool = _flag("frozen weights in host memory")  # those of layers
    offload_activations: bool = _flag("activations in host memory")  # what layers save for the backward
    # recipe of `torchao` by which linear layers multiply in float8
    float8: str | None = field(default=None, metadata={"words": "products in float8"})

    @property
    def has_master_weights(self) -> bool:
        """Whether trained 16-bit weights have float32 copies."""
        return self.master_weights is not False

    @property
    def needs_engine(self) -> bool:
        """Whether it asks for something that the stock Trainer does not have."""
        return bool(self.master_weights) or self.keeps_on_host or self.float8 is not None

    @property
    def keeps_on_host(self) -> bool:
        """Whether any of it is in host memory."""
        return self.offload_optimizer or self.offload_params or self.offload_activations

    @property
    def words(self) -> list[str]:
        """The flags that are set, in words."""
        flags = (f for f in fields(self) if getattr(self, f.name))
        return [f.metadata["words"] for f in flags if "words" in f.metadata]


def layout_text(
    sizes: Mapping[str, Any], ep_size: int, sharding: ShardingSettings, storage: StorageSettings, again: Checkpointing
) -> str:
    """The layout of a module in words, without sizes of 1: `dp 2 x tp 4, ep 8, ZeRO-3 over 8, recomputed`."""
    words = [" x ".join(f"{name} {size}" for name, size in sizes.items() if str(size) != "1") or "one rank"]
    words += [f"ep {ep_size}"] * (ep_size > 1)
    if sharding.zero_stage:
        over = "" if sharding.shard_size is None else f" over {sharding.shard_size}"
        words.append(f"ZeRO-{sharding.zero_stage}{over}")
    words += ["weights kept"] * (not sharding.reshard_after_forward)
    return ", ".join([*words, *storage.words, *checkpointing_words(again)])


@dataclass(frozen=True)
class Stage:
    """
    Consecutive layers of a module on one mesh of ranks.

    Args:
        layers (`tuple[int, int]`): First layer, and one past the last layer.
        mesh (`tuple[tuple[int, ...], ...]`): Its ranks in `cp_size` tp groups of `tp_size`; `ranks` in a plan file.
        trainable (`bool`, *optional*, defaults to `True`): Whether any parameter of the stage gets a gradient.
        partly_frozen (`bool`, *optional*, defaults to `False`): Whether some are frozen; a plan does not say which.
        splits_backward (`bool`, *optional*, defaults to `False`):
            Whether gradients of weights are tasks of their own, which other tasks need not wait for.
    """

    layers: tuple[int, int]
    mesh: tuple[tuple[int, ...], ...]
    trainable: bool = True
    partly_frozen: bool = False
    splits_backward: bool = False

    @property
    def cp_size(self) -> int:
        return len(self.mesh)

    @property
    def tp_size(self) -> int:
        return len(self.mesh[0])

    def has_layer(self, layer: int) -> bool:
        return self.layers[0] <= layer < self.layers[1]

    @cached_property
    def all_ranks(self) -> tuple[int, ...]:
        return tuple(rank for tp_group in self.mesh for rank in tp_group)

    @property
    def cp_groups(self) -> tuple[tuple[int, ...], ...]:
        """The cp groups: ranks with the same tp rank, which have the same shards and share the tokens of a row."""
        return tuple(zip(*self.mesh, strict=True))

    def cp_rank_of(self, rank: int) -> int:
        return next(index for index, tp_group in enumerate(self.mesh) if rank in tp_group)

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]


@dataclass(frozen=True)
class ModulePlan:
    """
    The layout of one module: `replicas[d][s]` is stage `s` of data-parallel copy `d`.

    Replicas may have different numbers of stages, stages different numbers of ranks. A rank may be in several modules.

    Args:
        replicas (`tuple[tuple[Stage, ...], ...]`): The stages of each replica.
        activation_checkpointing (`bool` or `str`, *optional*, defaults to `False`): See [`ModulePlugin`].
        context (`ContextSettings`, *optional*): How tokens are distributed over cp ranks, if `cp_size` is above 1.
        sharding (`ShardingSettings`, *optional*): What the copies divide among them.
        storage (`StorageSettings`, *optional*): Precision and place of optimizer, frozen weights and activations.
        ep_size (`int`, *optional*, defaults to 1): Ranks that share the experts of each layer, see [`ModulePlugin`].
    """

    replicas: tuple[tuple[Stage, ...], ...]
    activation_checkpointing: Checkpointing = False
    context: ContextSettings = ContextSettings()
    sharding: ShardingSettings = ShardingSettings()
    storage: StorageSettings = StorageSettings()
    ep_size: int = 1

    @property
    def dp_size(self) -> int:
        return len(self.replicas)

    @property
    def pp_size(self) -> int:
        """Pipeline ranks of the first replica, whatever their number of virtual stages."""
        return len(self.replicas[self.with_stages[0]]) // self.vp_size

    @property
    def splits_backward(self) -> bool:
        """Whether any of its stages puts off gradients of weights."""
        return any(stage.splits_backward for _, _, stage in self.stages())

    @property
    def vp_size(self) -> int:
        """Virtual stages of each pipeline rank: stages of a replica that are on the same ranks."""
        return virtual_stages(self.replicas[self.with_stages[0]]) if self.with_stages else 1

    @property
    def cp_size(self) -> int:
        return self._stages[0][2].cp_size if self._stages else 1

    @property
    def tp_size(self) -> int:
        """Ranks of the largest tp group."""
        return self.tp_sizes[-1]

    @cached_property
    def tp_sizes(self) -> tuple[int, ...]:
        """The sizes of tp groups that stages have, in ascending order; a single one where all stages are cut alike."""
        return tuple(sorted({stage.tp_size for _, _, stage in self._stages})) or (1,)

    @property
    def joint_replicas(self) -> int:
        """Number of consecutive replicas whose tasks of equal microbatch and chunk run at the same time."""
        # in ZeRO-2 and ZeRO-3 their ranks exchange gradients or weights in tasks, and those that share experts tokens
        copies = self.dp_size * self.cp_size
        size = self.sharding.shard_size or copies
        dividing = max(1, (copies if copies % size else size) // self.cp_size) if self.sharding.zero_stage >= 2 else 1
        return math.lcm(dividing, self.expert_replicas)

    @property
    def expert_rows(self) -> int:
        """Number of tp groups, with tokens of their own, that share the experts of a layer."""
        return max(1, self.ep_size // self.tp_size)

    @property
    def expert_replicas(self) -> int:
        """Number of consecutive replicas that share the experts of a layer."""
        return max(1, self.expert_rows // self.cp_size)

    @property
    def expert_ranks(self) -> tuple[int, ...]:
        """The first group of ranks that share the experts of a stage, by tp group; empty if none do."""
        return tuple(chain(*self.expert_groups(0)[0])) if self.ep_size > 1 and self.with_stages else ()

    def expert_groups(self, stage: int) -> list[tuple[tuple[int, ...], ...]]:
        """
        The groups of ranks that share the experts of a stage, in the order of these experts, each as its tp groups;
        all cp ranks of a replica come before the next replica.
        """
        rows = [tp_group for replica in self.with_stages for tp_group in self.replicas[replica][stage].mesh]
        return [tuple(rows[first : first + self.expert_rows]) for first in range(0, len(rows), self.expert_rows)]

    @property
    def layout(self) -> str:
        """Sizes, sharding and recomputation, see [`layout_text`]; `pp 2/3` if replicas differ."""
        depths = sorted({len({stage.all_ranks for stage in self.replicas[d]}) for d in self.with_stages})
        sizes = {
            "dp": self.dp_size,
            "pp": "/".join(map(str, depths)),
            "vp": self.vp_size,
            "cp": self.cp_size,
            "tp": "/".join(map(str, self.tp_sizes)),
        }
        return layout_text(sizes, self.ep_size, self.sharding, self.storage, self.activation_checkpointing)

    @property
    def num_layers(self) -> int:
        return self.replicas[0][-1].layers[1]

    @cached_property
    def with_stages(self) -> tuple[int, ...]:
        """Indices of the replicas with stages: all of them, unless the plan is a part of another."""
        return tuple(compress(range(self.dp_size), self.replicas))

    def stages(self) -> Iterator[tuple[int, int, Stage]]:
        """Iterates over (replica, stage index, stage)."""
        return iter(self._stages)

    @cached_property
    def _stages(self) -> list[tuple[int, int, Stage]]:
        """[`~ModulePlan.stages`], cached since parts of a plan skip many replicas without stages."""
        return [(d, index, stage) for d in self.with_stages for index, stage in enumerate(self.replicas[d])]


def settings_of(module: Any) -> dict[str, Any]:
    """What a plan says of a module besides its stages, as its layout or plugin has it."""
    return {f.name: getattr(module, f.name) for f in fields(ModulePlan) if f.name != "replicas"}


def virtual_stages(stages: Sequence[Stage]) -> int:
    """Number of stages of a replica on each of its pipeline ranks; 1 unless they come round in turn."""
    meshes = [frozenset(stage.all_ranks) for stage in stages]
    count = len(set(meshes))
    return len(meshes) // count if count > 1 and meshes == meshes[:count] * (len(meshes) // count) else 1


# by default; a stage runs the model's code around its layers once more, which takes the host as long as a few layers
LAYERS_PER_VIRTUAL_STAGE = 4


def fitting_virtual_stages(vp_size: int, pp_size: int, num_layers: int) -> int:
    """`vp_size` for a pipeline of at least two ranks with enough layers for so many virtual stages, else 1."""
    return vp_size if pp_size > 1 and num_layers >= LAYERS_PER_VIRTUAL_STAGE * pp_size * vp_size else 1


@dataclass(frozen=True)
class ParallelPlan(HtmlRepr):
    """
    The assignment of modules, replicas and stages to ranks. It can be saved as and loaded from JSON and YAML;
    [`resolve_plan`] builds one from the sizes of the modules.

    Args:
        modules (`Mapping[str, ModulePlan]`): In topological order: encoders, then the language model.
        edges (`tuple[Edge, ...]`): The boundaries between modules.
        schedule (`str`, *optional*, defaults to `"1f1b"`): See [`MultimodalParallelPlugin`].
        num_microbatches (`int`, *optional*, defaults to 1):
            Microbatches of each language-model replica in a full global batch; their mean, rounded up, if
            `replica_microbatches` is given, whatever is passed.
        replica_microbatches (`tuple[int, ...]`, *optional*):
            The same for each of these replicas; `num_microbatches` for each by default. Smaller global batches have
            fewer in the same proportions, see [`~ParallelPlan.microbatches_for`].
        microbatch_assignment (`str`, *optional*):
            How the samples of a global batch are assigned to microbatches, if the plan comes from a search: the
            default of the Trainer's argument of the same name.

    Example:

    ```python
    >>> from hf_mmparallel.modeling import build_model_spec
    >>> from hf_mmparallel.plan import resolve_plan
    >>> modules = {"vision": ModulePlugin(dp_size=2), "language_model": ModulePlugin(pp_size=2)}
    >>> plan = resolve_plan(build_model_spec(model), modules)
    >>> [stage.all_ranks for replica in plan.modules["language_model"].replicas for stage in replica]
    [(2,), (3,)]
    >>> plan.save("plan.yaml")
    >>> ParallelPlan.load("plan.yaml") == plan
    True
    ```
    """

    modules: Mapping[str, ModulePlan]
    edges: tuple[Edge, ...] = ()
    schedule: Schedule = "1f1b"
    num_microbatches: int = 1
    replica_microbatches: tuple[int, ...] | None = None
    microbatch_assignment: str | None = None

    def __post_init__(self):
        if self.replica_microbatches is not None:
            counts = tuple(self.replica_microbatches)
            object.__setattr__(self, "replica_microbatches", counts)
            object.__setattr__(self, "num_microbatches", -(-sum(counts) // max(1, len(counts))))

    @cached_property
    def microbatch_counts(self) -> tuple[int, ...]:
        """Microbatches of each language-model replica in a full global batch."""
        if self.replica_microbatches is not None:
            return self.replica_microbatches
        return (self.num_microbatches,) * self.modules[LANGUAGE_MODEL].dp_size

    @cached_property
    def total_microbatches(self) -> int:
        """Microbatches of all language-model replicas together in a full global batch."""
        return sum(self.microbatch_counts)

    def microbatches_for(self, total: int) -> tuple[int, ...]:
        """Microbatches of each language-model replica in a global batch that needs `total` (at least 1) in all."""
        # in the proportions of a full one, at least one each
        return tuple(-(-count * total // self.total_microbatches) for count in self.microbatch_counts)

    def served_replicas(self, module: str, replica: int) -> range:
        """The language-model replicas that a replica of `module` works with, one of the language model alone."""
        num_replicas, dp_size = self.modules[LANGUAGE_MODEL].dp_size, self.modules[module].dp_size
        # replicas form as many groups as divide the numbers of replicas of both
        groups = math.gcd(num_replicas, dp_size)
        served = num_replicas // groups
        first = replica // (dp_size // groups) * served
        return range(first, first + served)

    @property
    def policy(self) -> SchedulePolicy:
        return POLICIES[self.schedule]

    @cached_property
    def world_size(self) -> int:
        return 1 + max(rank for module in self.modules.values() for _, _, s in module.stages() for rank in s.all_ranks)

    @cached_property
    def encoders(self) -> tuple[str, ...]:
        """The modules whose features enter the language model, in the order of the plan."""
        sources = {edge.source for edge in self.edges if edge.target == LANGUAGE_MODEL}
        return tuple(name for name in self.modules if name in sources)

    @cached_property
    def generators(self) -> tuple[str, ...]:
        """The modules that consume hidden states of the language model, in the order of the plan."""
        targets = {edge.target for edge in self.edges if edge.source == LANGUAGE_MODEL}
        return tuple(name for name in self.modules if name in targets)

    def part(self, members: Collection[tuple[str, int]]) -> ParallelPlan:
        """The plan with the stages of some (module, replica) only; replica indices and ranks do not change."""
        replicas: dict[str, list[tuple[Stage, ...]]] = {name: [()] * m.dp_size for name, m in self.modules.items()}
        for name, replica in members:
            replicas[name][replica] = self.modules[name].replicas[replica]
        modules = {name: replace(module, replicas=tuple(replicas[name])) for name, module in self.modules.items()}
        return replace(self, modules=modules)

    def stage(self, module: str, replica: int, index: int) -> Stage:
        return self.modules[module].replicas[replica][index]

    def stages_of_rank(self, rank: int) -> list[StageKey]:
        """(module, replica, stage) of each stage that `rank` belongs to."""
        return [
            (name, replica, index)
            for name, module in self.modules.items()
            for replica, index, stage in module.stages()
            if rank in stage.all_ranks
        ]

    def edge_stages(self, edge: Edge, replica: int) -> dict[int, tuple[int, ...]]:
        """Stage index in a replica of `edge.target` -> indices of the features of `edge.source` that enter there."""
        result: dict[int, list[int]] = {}
        for feature, layer in enumerate(edge.layers):
            for index, stage in enumerate(self.modules[edge.target].replicas[replica]):
                if stage.has_layer(layer):
                    result.setdefault(index, []).append(feature)
        return {index: tuple(features) for index, features in sorted(result.items())}

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain values, as a file of it holds them."""
        arrangement = self.microbatch_assignment
        if callable(arrangement):
            raise ValueError(
                f"`microbatch_assignment={arrangement_name(arrangement)}` of the plan is a function, and a plan file "
                "holds names only. Leave it out of the plan, and give it to `MultimodalTrainingArguments`."
            )
        assignment = {} if arrangement is None else {"microbatch_assignment": arrangement}
        return {
            "schedule": self.schedule,
            **assignment,
            "num_microbatches": self.num_microbatches,
            **({} if self.replica_microbatches is None else {"replica_microbatches": list(self.replica_microbatches)}),
            "edges": [{"source": e.source, "target": e.target, "layers": list(e.layers)} for e in self.edges],
            "modules": {
                name: {
                    "activation_checkpointing": module.activation_checkpointing,
                    **({"context": asdict(module.context)} if module.context != ContextSettings() else {}),
                    **({"sharding": asdict(module.sharding)} if module.sharding != ShardingSettings() else {}),
                    **({"storage": asdict(module.storage)} if module.storage != StorageSettings() else {}),
                    **({"ep_size": module.ep_size} if module.ep_size > 1 else {}),
                    "replicas": list(_replica_data(module.replicas)),
                }
                for name, module in self.modules.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ParallelPlan:
        """
        Reads the output of [`~ParallelPlan.to_dict`], or a mapping with the plan under `plan` and settings of modules
        beside it. Modules may be in any order.

        Raises:
            `ValueError`: For a key that is unknown or missing, and a value of another type.
        """
        if isinstance(data, Mapping) and "plan" in data:
            data = data["plan"]
        data = read_mapping(data, "A plan", ["modules"], [f.name for f in fields(cls) if f.name != "modules"])
        modules = {
            read_name(name, "The name of a module"): _read_module(module, name)
            for name, module in read_mapping(data["modules"], "`modules` of the plan").items()
        }
        if not modules:
            raise ValueError("The plan has no modules. Add at least `language_model` under `modules`.")
        edges = tuple(_read_edge(edge, list(modules)) for edge in read_list(data.get("edges", ()), "`edges`"))
        schedule = data.get("schedule", "1f1b")
        reject_unknown_keys("`schedule`", [schedule], SCHEDULES)
        count, counts = read_microbatches(data)
        arrangement = data.get("microbatch_assignment")
        if arrangement is not None:
            reject_unknown_keys("`microbatch_assignment`", [arrangement], list(ARRANGEMENTS))
        return cls(sources_first(modules, edges), edges, schedule, count, counts, arrangement)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def save(self, path: str | Path) -> None:
        """Writes the plan as YAML, or as JSON if the file name ends in `.json`."""
        write_data(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> ParallelPlan:
        """Reads a plan from a file, which may also contain settings of modules."""
        import yaml

        return cls.from_dict(yaml.safe_load(Path(path).read_text()))

    @property
    def fingerprint(self) -> str:
        """A short hash of the plan, which ranks compare at the start."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def write_data(path: str | Path, data: Mapping[str, Any]) -> None:
    """Writes plain data as YAML, or as JSON if the file name ends in `.json`."""
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(data, indent=2) + "\n")
        return
    import yaml

    path.write_text(yaml.safe_dump(dict(data), sort_keys=False, default_flow_style=None))


LISTED_COPIES = 2  # replicas that differ in their ranks only, and are written one by one


def _replica_data(replicas: Sequence[tuple[Stage, ...]]) -> Iterator[Any]:
    """Yields the stages of each replica, and of copies with ranks at equal distances those of the first."""
    first = 0
    while first < len(replicas):
        stages = replicas[first]
        data = [
            {
                "layers": list(stage.layers),
                "ranks": [list(tp_group) for tp_group in stage.mesh],
                "trainable": PARTLY if stage.partly_frozen else stage.trainable,
                **({"splits_backward": True} if stage.splits_backward else {}),
            }
            for stage in stages
        ]
        apart, count = 0, 1
        if stages and first + 1 < len(replicas) and replicas[first + 1]:
            apart = replicas[first + 1][0].mesh[0][0] - stages[0].mesh[0][0]
        while apart > 0 and replicas[first + count : first + count + 1] == (_shifted(stages, count * apart),):
            count += 1
        if count > LISTED_COPIES:
            yield {"copies": count, "ranks_apart": apart, "stages": data}
            first += count
        else:
            yield data
            first += 1


def _shifted(stages: Sequence[Stage], by: int) -> tuple[Stage, ...]:
    """Stages on ranks that are higher by a number."""
    return tuple(
        replace(stage, mesh=tuple(tuple(rank + by for rank in tp_group) for tp_group in stage.mesh))
        for stage in stages
    )


def _read_replicas(data: Any, name: str, first: int) -> list[tuple[Stage, ...]]:
    """Reads the stages of the replica with this index, or of copies from it on."""
    what = f"Replica {first} of `{name}`"
    copies, apart, stages = 1, 0, data
    if isinstance(data, Mapping):
        data = read_mapping(data, what, ["copies", "ranks_apart", "stages"], ())
        copies, apart = (read_count(data[key], f"`{key}` of {what}", 1) for key in ("copies", "ranks_apart"))
        stages = data["stages"]
    stages = [_read_stage(s, f"Stage {i} of `{name}` replica {first}") for i, s in enumerate(read_list(stages, what))]
    return [_shifted(stages, index * apart) if index else tuple(stages) for index in range(copies)]


def _read_module(data: Any, name: str) -> ModulePlan:
    what = f"Module `{name}` of the plan"
    optional = ["activation_checkpointing", "context", "sharding", "storage", "ep_size"]
    data = read_mapping(data, what, ["replicas"], optional)
    context = read_mapping(data.get("context", {}), f"`context` of `{name}`", (), ["method", "mode", "block"])
    for key, known in (("method", CONTEXT_METHODS), ("mode", CONTEXT_MODES)):
        reject_unknown_keys(f"`{key}` of `{name}`", [context[key]] if key in context else [], known)
    read_count(context.get("block", 1), f"`block` of `{name}`", 1)
    replicas: list[tuple[Stage, ...]] = []
    for entry in read_list(data["replicas"], f"`replicas` of `{name}`"):
        replicas += _read_replicas(entry, name, len(replicas))
    if not replicas or not all(replicas):
        raise ValueError(f"The plan gives module `{name}` no stages. Add at least one replica with one stage.")
    again = read_checkpointing(data.get("activation_checkpointing", False), f"`activation_checkpointing` of `{name}`")
    known = [field.name for field in fields(ShardingSettings)]
    sharding = read_mapping(data.get("sharding", {}), f"`sharding` of `{name}`", (), known)
    storage = read_mapping(
        data.get("storage", {}), f"`storage` of `{name}`", (), [field.name for field in fields(StorageSettings)]
    )
    if storage.get("float8") is not None:
        reject_unknown_keys(f"`float8` of `{name}`", [storage["float8"]], FLOAT8_RECIPES)
    return ModulePlan(
        tuple(replicas),
        again,
        ContextSettings(**context),
        ShardingSettings(**sharding),
        StorageSettings(**storage),
        read_count(data.get("ep_size", 1), f"`ep_size` of `{name}`", 1),
    )


def _read_stage(data: Any, what: str) -> Stage:
    data = read_mapping(data, what, ["layers", "ranks"], ["trainable", "splits_backward"])
    layers = tuple(read_count(n, f"A layer of {what}") for n in read_list(data["layers"], f"`layers` of {what}"))
    if len(layers) != 2 or layers[0] >= layers[1]:
        raise ValueError(f"`layers` of {what} are {list(layers)}; write the first layer and one past the last layer.")
    tp_groups = read_list(data["ranks"], f"`ranks` of {what}")
    mesh = tuple(
        tuple(read_count(rank, f"A rank of {what}") for rank in read_list(tp_group, f"A tp group of {what}"))
        for tp_group in tp_groups
    )
    if not mesh or not all(mesh):
        raise ValueError(f"{what} has no ranks. Give it tp groups of at least one rank, such as `[[0]]`.")
    splits = read_flag(data.get("splits_backward", False), f"`splits_backward` of {what}")
    trainable = data.get("trainable", True)
    is_partly = trainable == PARTLY
    if not is_partly and not isinstance(trainable, bool):
        raise ValueError(f"`trainable` of {what} is `{trainable!r}`; it must be `true`, `false` or `{PARTLY}`.")
    return Stage((layers[0], layers[1]), mesh, is_partly or trainable, is_partly, splits)


def _read_edge(data: Any, modules: Sequence[str]) -> Edge:
    """Reads one edge between two of `modules`."""
    data = read_mapping(data, "An edge of the plan", ["source", "target"], ["layers"])
    ends = [read_name(data[key], f"The `{key}` of an edge") for key in ("source", "target")]
    reject_unknown_keys("An edge of the plan names a module, and the plan", ends, modules)
    layers = read_list(data.get("layers", (0,)), f"`layers` of the edge from `{ends[0]}`")
    entry_layers = tuple(read_count(layer, f"A layer of the edge from `{ends[0]}`") for layer in layers)
    return Edge(ends[0], ends[1], entry_layers)
