"""The one structure that everything about a layout is derived from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

from .reading import read_count, read_flag, read_list, read_mapping, read_name, reject_unknown_keys
from .schedules import POLICIES, SCHEDULES, Schedule, SchedulePolicy

ASSIGNMENTS = (
    "hierarchical",
    "tapered",
    "entrain",
    "contiguous",
    "batch_rebalance",
    "disttrain",
    "sub_microbatches",
)
CONTEXT_METHODS = ("lpt", "zigzag", "contiguous", "random")
CONTEXT_MODES = ("auto", "row", "segments")
PARTLY = "partly"  # what a file says of a stage of which something is trained and something frozen


@dataclass(frozen=True)
class ContextSettings:
    """
    How a row of tokens is cut over the rows of a grid (context parallelism).

    Args:
        method (`str`, *optional*, defaults to `"lpt"`): How blocks are handed out: by their attention work, the
            heaviest first (`"lpt"`), or as a baseline `"zigzag"`, `"contiguous"` or `"random"`.
        mode (`str`, *optional*, defaults to `"auto"`): `"row"` gathers the keys and values of the whole row,
            `"segments"` keeps samples that fit one rank whole and gathers only those of the others, `"auto"` takes
            what is predicted to be faster.
        block (`int`, *optional*, defaults to 128): Tokens that stay together; 128 is what the kernels are made for.
    """

    method: str = "lpt"
    mode: str = "auto"
    block: int = 128


@dataclass(frozen=True)
class Stage:
    """
    Consecutive layers of a module on one grid of ranks.

    Args:
        layers (`tuple[int, int]`): First layer, and the one after the last.
        ranks (`tuple[tuple[int, ...], ...]`): Global ranks, `cp` rows of `tp` ranks.
        trainable (`bool`, *optional*, defaults to `True`): Whether any parameter of the stage gets a gradient.
        partly_frozen (`bool`, *optional*, defaults to `False`):
            Whether others of its parameters get none; a plan does not say which.
    """

    layers: tuple[int, int]
    ranks: tuple[tuple[int, ...], ...]
    trainable: bool = True
    partly_frozen: bool = False

    @cached_property
    def all_ranks(self) -> tuple[int, ...]:
        return tuple(rank for row in self.ranks for rank in row)

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same shards, one of each row: they share a row of tokens."""
        return tuple(zip(*self.ranks, strict=True))

    def row_of(self, rank: int) -> int:
        """The row of the grid that `rank` is in."""
        return next(index for index, row in enumerate(self.ranks) if rank in row)

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]


@dataclass(frozen=True)
class ModulePlan:
    """
    The layout of one module: `replicas[d][s]` is stage `s` of data-parallel copy `d`.

    Replicas may have different numbers of stages. Ranks may also occur in other modules (colocation).

    Args:
        replicas (`tuple[tuple[Stage, ...], ...]`): The stages of each replica.
        activation_checkpointing (`bool`, *optional*, defaults to `False`): Recompute activations in the backward.
        context (`ContextSettings`, *optional*): How rows of tokens are cut where grids have several rows.
    """

    replicas: tuple[tuple[Stage, ...], ...]
    activation_checkpointing: bool = False
    context: ContextSettings = ContextSettings()

    @property
    def dp_size(self) -> int:
        return len(self.replicas)

    @property
    def cp_size(self) -> int:
        return len(self._grid)

    @property
    def tp_size(self) -> int:
        return len(self._grid[0])

    @property
    def layout(self) -> str:
        """The sizes in words: `dp 2 x pp 1 x tp 1`."""
        context = f" x cp {self.cp_size}" if self.cp_size > 1 else ""
        return f"dp {self.dp_size} x pp {len(self.replicas[0])}{context} x tp {self.tp_size}"

    @property
    def num_layers(self) -> int:
        return self.replicas[0][-1].layers[1]

    @property
    def _grid(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the first stage; in a part of a plan other replicas, or all of them, have no stages."""
        return self.replicas[self.with_stages[0]][0].ranks if self.with_stages else ((0,),)

    @cached_property
    def with_stages(self) -> tuple[int, ...]:
        """The replicas that have stages: in a part of a plan its own ones only."""
        return tuple(compress(range(self.dp_size), self.replicas))

    def stages(self) -> Iterator[tuple[int, int, Stage]]:
        """Yields (replica, index of the stage, stage)."""
        return iter(self._stages)

    @cached_property
    def _stages(self) -> list[tuple[int, int, Stage]]:
        """What is yielded; a part of a plan has many replicas without stages, and is asked often."""
        return [(d, index, stage) for d in self.with_stages for index, stage in enumerate(self.replicas[d])]


@dataclass(frozen=True)
class Edge:
    """
    Features of module `source` enter module `target` at `layers[i]` (feature `i` of the source's spec).

    Args:
        source (`str`): An encoder.
        target (`str`): The module that takes its features.
        layers (`tuple[int, ...]`, *optional*, defaults to `(0,)`): The layer of `target` at which each feature enters.
    """

    source: str
    target: str
    layers: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class ParallelPlan:
    """
    Which rank holds what. JSON and YAML both ways; see [`resolve_plan`] to make one from a few sizes.

    Args:
        modules (`Mapping[str, ModulePlan]`): In topological order: encoders, then the language model.
        edges (`tuple[Edge, ...]`): The boundaries between modules.
        schedule (`str`, *optional*, defaults to `"1f1b"`):
            `"1f1b"`; `"eager"`, which is 1F1B with as many forwards ahead as memory allows; `"gpipe"`; or
            `"encoders_first"`: all encoder forwards, then the language model under 1F1B, then all encoder backwards.
        num_microbatches (`int`, *optional*, defaults to 1):
            Microbatches of each language-model replica in a full global batch.
        microbatch_assignment (`str`, *optional*):
            How the samples of a global batch are arranged, if a search chose it: what the Trainer's argument of the
            same name is where it is left out.
    """

    modules: Mapping[str, ModulePlan]
    edges: tuple[Edge, ...] = ()
    schedule: Schedule = "1f1b"
    num_microbatches: int = 1
    microbatch_assignment: str | None = None

    @property
    def policy(self) -> SchedulePolicy:
        """What the schedule's name stands for."""
        return POLICIES[self.schedule]

    @cached_property
    def world_size(self) -> int:
        return 1 + max(rank for module in self.modules.values() for _, _, s in module.stages() for rank in s.all_ranks)

    def part(self, members: Collection[tuple[str, int]]) -> ParallelPlan:
        """
        The plan with the stages of some replicas only; numbers of replicas and ranks stay the same.

        Args:
            members (`Collection[tuple[str, int]]`): (module, replica) of those.
        """
        few: dict[str, list[tuple[Stage, ...]]] = {name: [()] * own.dp_size for name, own in self.modules.items()}
        for name, replica in members:
            few[name][replica] = self.modules[name].replicas[replica]
        modules = {name: replace(module, replicas=tuple(few[name])) for name, module in self.modules.items()}
        return replace(self, modules=modules)

    def stage(self, module: str, replica: int, index: int) -> Stage:
        return self.modules[module].replicas[replica][index]

    def stages_of_rank(self, rank: int) -> list[tuple[str, int, int]]:
        """(module, replica, stage) of each stage that `rank` takes part in."""
        return [
            (name, replica, index)
            for name, module in self.modules.items()
            for replica, index, stage in module.stages()
            if rank in stage.all_ranks
        ]

    def edge_stages(self, edge: Edge, replica: int) -> dict[int, tuple[int, ...]]:
        """Stage of `edge.target`'s replica -> which features of `edge.source` enter there."""
        result: dict[int, list[int]] = {}
        for feature, layer in enumerate(edge.layers):
            for index, stage in enumerate(self.modules[edge.target].replicas[replica]):
                if stage.layers[0] <= layer < stage.layers[1]:
                    result.setdefault(index, []).append(feature)
        return {index: tuple(features) for index, features in sorted(result.items())}

    def to_dict(self) -> dict[str, Any]:
        chosen = {} if self.microbatch_assignment is None else {"microbatch_assignment": self.microbatch_assignment}
        return {
            "schedule": self.schedule,
            **chosen,
            "num_microbatches": self.num_microbatches,
            "edges": [{"source": e.source, "target": e.target, "layers": list(e.layers)} for e in self.edges],
            "modules": {
                name: {
                    "activation_checkpointing": module.activation_checkpointing,
                    **({"context": asdict(module.context)} if module.context != ContextSettings() else {}),
                    "replicas": [
                        [
                            {
                                "layers": list(stage.layers),
                                "ranks": [list(row) for row in stage.ranks],
                                "trainable": PARTLY if stage.partly_frozen else stage.trainable,
                            }
                            for stage in stages
                        ]
                        for stages in module.replicas
                    ],
                }
                for name, module in self.modules.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ParallelPlan:
        """
        Reads what [`~ParallelPlan.to_dict`] gives, or a file that has settings of modules beside it. Modules may be in
        any order.

        Raises:
            `ValueError`: For a key that is unknown or missing, and a value of another type.
        """
        if isinstance(data, Mapping) and "plan" in data:
            data = data["plan"]
        data = read_mapping(
            data, "A plan", ["modules"], ["schedule", "microbatch_assignment", "num_microbatches", "edges"]
        )
        modules = {
            read_name(name, "The name of a module"): _read_module(module, name)
            for name, module in read_mapping(data["modules"], "`modules` of the plan").items()
        }
        if not modules:
            raise ValueError("The plan has no modules. Add at least `language_model` under `modules`.")
        edges = tuple(_read_edge(edge, list(modules)) for edge in read_list(data.get("edges", ()), "`edges`"))
        schedule = data.get("schedule", "1f1b")
        reject_unknown_keys("`schedule`", [schedule], SCHEDULES)
        count = read_count(data.get("num_microbatches", 1), "`num_microbatches` of the plan", 1)
        method = data.get("microbatch_assignment")
        if method is not None:
            reject_unknown_keys("`microbatch_assignment`", [method], ASSIGNMENTS)
        return cls(_sources_first(modules, edges), edges, schedule, count, method)

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    def save(self, path: str | Path) -> None:
        """Writes the plan as YAML, or as JSON when the file's name ends so."""
        write_data(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> ParallelPlan:
        """Reads a file with a plan, also one that has settings of modules beside it."""
        import yaml

        return cls.from_dict(yaml.safe_load(Path(path).read_text()))

    @property
    def fingerprint(self) -> str:
        """A short hash that ranks compare."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def write_data(path: str | Path, data: Mapping[str, Any]) -> None:
    """Writes plain data as YAML, or as JSON when the file's name ends so."""
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(data, indent=2) + "\n")
        return
    import yaml

    path.write_text(yaml.safe_dump(dict(data), sort_keys=False, default_flow_style=None))


def _read_module(data: Any, name: str) -> ModulePlan:
    """The layout of one module from plain data."""
    what = f"Module `{name}` of the plan"
    data = read_mapping(data, what, ["replicas"], ["activation_checkpointing", "context"])
    context = read_mapping(data.get("context", {}), f"`context` of `{name}`", (), ["method", "mode", "block"])
    for key, known in (("method", CONTEXT_METHODS), ("mode", CONTEXT_MODES)):
        reject_unknown_keys(f"`{key}` of `{name}`", [context[key]] if key in context else [], known)
    read_count(context.get("block", 1), f"`block` of `{name}`", 1)
    replicas = []
    for d, stages in enumerate(read_list(data["replicas"], f"`replicas` of `{name}`")):
        stages = read_list(stages, f"Replica {d} of `{name}`")
        replicas.append(tuple(_read_stage(s, f"Stage {i} of `{name}` replica {d}") for i, s in enumerate(stages)))
    if not replicas or not all(replicas):
        raise ValueError(f"The plan gives module `{name}` no stages. Add at least one replica with one stage.")
    checkpointing = read_flag(data.get("activation_checkpointing", False), f"`activation_checkpointing` of `{name}`")
    return ModulePlan(tuple(replicas), checkpointing, ContextSettings(**context))


def _read_stage(data: Any, what: str) -> Stage:
    """One stage from plain data."""
    data = read_mapping(data, what, ["layers", "ranks"], ["trainable"])
    layers = tuple(read_count(n, f"A layer of {what}") for n in read_list(data["layers"], f"`layers` of {what}"))
    if len(layers) != 2 or layers[0] >= layers[1]:
        raise ValueError(
            f"`layers` of {what} are {list(layers)}; they must be the first layer and the one after the last."
        )
    rows = read_list(data["ranks"], f"`ranks` of {what}")
    ranks = tuple(
        tuple(read_count(rank, f"A rank of {what}") for rank in read_list(row, f"A row of ranks of {what}"))
        for row in rows
    )
    if not ranks or not all(ranks):
        raise ValueError(f"{what} has no ranks. Give it rows of at least one rank, such as `[[0]]`.")
    trainable = data.get("trainable", True)
    if trainable == PARTLY:
        return Stage((layers[0], layers[1]), ranks, partly_frozen=True)
    if not isinstance(trainable, bool):
        raise ValueError(f"`trainable` of {what} is `{trainable!r}`; it must be `true`, `false` or `{PARTLY}`.")
    return Stage((layers[0], layers[1]), ranks, trainable)


def _read_edge(data: Any, modules: Sequence[str]) -> Edge:
    """One edge between known modules from plain data."""
    data = read_mapping(data, "An edge of the plan", ["source", "target"], ["layers"])
    ends = [read_name(data[key], f"The `{key}` of an edge") for key in ("source", "target")]
    reject_unknown_keys("An edge of the plan names a module, and the plan", ends, modules)
    layers = read_list(data.get("layers", (0,)), f"`layers` of the edge from `{ends[0]}`")
    entered = tuple(read_count(layer, f"A layer of the edge from `{ends[0]}`") for layer in layers)
    return Edge(ends[0], ends[1], entered)


def _sources_first(modules: Mapping[str, ModulePlan], edges: Sequence[Edge]) -> dict[str, ModulePlan]:
    """The modules in topological order; those that could be swapped stay as they are."""
    depth = dict.fromkeys(modules, 0)
    for _ in modules:
        for edge in edges:
            depth[edge.target] = max(depth[edge.target], depth[edge.source] + 1)
    if any(depth[edge.target] <= depth[edge.source] for edge in edges) or max(depth.values(), default=0) >= len(depth):
        raise ValueError(f"The edges of the plan, {list(edges)}, lead in a circle. Copy those of the model.")
    return {name: modules[name] for name in sorted(modules, key=depth.__getitem__)}
