"""Small plans and steps, fixed and random, for the tests of schedules."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    FeatureSpec,
    ModelSpec,
    ModulePlan,
    ModuleSpec,
    ParallelPlan,
    ParameterSpec,
    ShardingSettings,
    Stage,
    StepPlan,
    SyncGroup,
    sync_groups,
)
from hf_mmparallel.plan.methods import SCHEDULES
from hf_mmparallel.plan.model_spec import Uses
from hf_mmparallel.plan.ownership import trainable_stages
from hf_mmparallel.plan.parallel_plan import Schedule
from hf_mmparallel.schedule import Message, Order, Task, TaskGraph, Timeline, find_representatives, simulate
from hf_mmparallel.schedule.action_lists import PartActions
from hf_mmparallel.schedule.scheduler import Cost
from hf_mmparallel.schedule.timeline import Durations, retime


@dataclass(frozen=True)
class Case:
    plan: ParallelPlan
    step: StepPlan
    sync_groups: list[SyncGroup]


def module_spec(
    name: str, num_layers: int = 4, frozen: frozenset[int] = frozenset(), feature_layers: tuple[int, ...] = ()
) -> ModuleSpec:
    """One matrix a layer, one before and one after the stack; `frozen` are the layers that get no gradient."""
    parameters = tuple(
        ParameterSpec(f"{name}.{layer}.weight", (16, 16), layer, trainable=layer not in frozen)
        for layer in range(-1, num_layers + 1)
    )
    features = tuple(FeatureSpec(name, layer=layer) for layer in feature_layers)
    return ModuleSpec(name, f"{name}.layers", num_layers, 16, 4, 4, 32, parameters, features)


def make_plan(
    modules: dict[str, list[list[tuple[int, ...]]]],
    specs: dict[str, ModuleSpec] | None = None,
    schedule: Schedule = "1f1b",
    tied: dict[str, Uses] | None = None,
    sharding: dict[str, ShardingSettings] | None = None,
) -> tuple[ModelSpec, ParallelPlan]:
    """`modules[name][replica][stage]` are ranks; layers are cut evenly."""
    specs = specs or {
        name: module_spec(name, feature_layers=() if name == LANGUAGE_MODEL else (0,)) for name in modules
    }
    spec = ModelSpec(specs, tied=tied or {})
    plans: dict[str, ModulePlan] = {}
    for name, replicas in modules.items():
        rows = []
        for ranks in replicas:
            ranges = list(pairwise(specs[name].num_layers * i // len(ranks) for i in range(len(ranks) + 1)))
            trainable = trainable_stages(specs[name], spec.tied, ranges)
            rows.append(tuple(Stage(c, (r,), t) for c, r, t in zip(ranges, ranks, trainable, strict=True)))
        plans[name] = ModulePlan(tuple(rows), sharding=(sharding or {}).get(name, ShardingSettings()))
    return spec, ParallelPlan(plans, spec.edges, schedule)


def splitting(plan: ParallelPlan, names: Iterable[str] | None = None) -> ParallelPlan:
    """The plan with split backwards in the trained stages of some modules, or of all."""
    modules = dict(plan.modules)
    for name in plan.modules if names is None else names:
        rows = (tuple(replace(one, splits_backward=one.trainable) for one in row) for row in modules[name].replicas)
        modules[name] = replace(modules[name], replicas=tuple(rows))
    return replace(plan, modules=modules)


def make_step(microbatches: dict[str, list[list[list[int]]]], generators: tuple[str, ...] = ()) -> StepPlan:
    """`microbatches[module][replica][microbatch]` are batch indices; other modules encode."""
    frozen = {
        name: tuple(tuple(tuple(batch_indices) for batch_indices in replica) for replica in replicas)
        for name, replicas in microbatches.items()
    }
    count = sum(len(batch_indices) for replica in frozen[LANGUAGE_MODEL] for batch_indices in replica)
    targets = {name: (LANGUAGE_MODEL,) for name in frozen if name not in (LANGUAGE_MODEL, *generators)}
    return StepPlan(tuple(range(count)), frozen, {**targets, **({LANGUAGE_MODEL: generators} if generators else {})})


def straight(
    stages: dict[str, int],
    count: int,
    schedule: Schedule = "1f1b",
    frozen: tuple[str, ...] = (),
    generated: frozenset[int] | None = None,
) -> Case:
    """
    One replica of each module, in the order of the model, with so many stages; one sample a microbatch. Of the samples
    those in `generated` are generated, all when left out.
    """
    everything = frozenset(range(-1, 9))
    specs = {
        name: module_spec(name, 8, everything if name in frozen else frozenset(), (0,) if name == "vision" else ())
        for name in stages
    }
    ranks = iter(range(sum(stages.values())))
    modules = {name: [[(next(ranks),) for _ in range(own)]] for name, own in stages.items()}
    spec, plan = make_plan(modules, specs, schedule)
    rows = [[index] for index in range(count)]
    taken = [row if generated is None or row[0] in generated else [] for row in rows]
    generators = tuple(name for name in stages if name not in ("vision", LANGUAGE_MODEL))
    step = make_step({name: [taken if name in generators else rows] for name in stages}, generators)
    return Case(plan, step, sync_groups(spec, plan))


def chain(num_stages: int, num_microbatches: int, schedule: Schedule = "1f1b") -> Case:
    """One encoder stage before a pipelined language model, or a language model of one stage."""
    stages = {"vision": 1, LANGUAGE_MODEL: num_stages - 1} if num_stages > 1 else {LANGUAGE_MODEL: 1}
    return straight(stages, num_microbatches, schedule)


def shared(num_microbatches: int = 3) -> Case:
    """A vision encoder and a language model, two replicas each, on the same two ranks, tied embeddings."""
    ranks = [[(0,)], [(1,)]]
    spec, plan = make_plan(
        {"vision": ranks, LANGUAGE_MODEL: ranks}, tied={f"{LANGUAGE_MODEL}.-1.weight": ((LANGUAGE_MODEL, 4),)}
    )
    rows = [[[2 * i + d] for i in range(num_microbatches)] for d in range(2)]
    return Case(plan, make_step({"vision": rows, LANGUAGE_MODEL: rows}), sync_groups(spec, plan))


def deferred(num_encoder_stages: int, num_stages: int, num_microbatches: int, schedule: Schedule = "1f1b") -> Case:
    """
    A pipelined encoder before a pipelined language model, four samples a microbatch. Of every other microbatch one
    sample is taken with the next one.
    """
    case = straight({"vision": num_encoder_stages, LANGUAGE_MODEL: num_stages}, 0, schedule)
    encoded = [list(range(4 * i, 4 * i + 4)) for i in range(num_microbatches)]
    taken = [list(batch_indices) for batch_indices in encoded]
    for index in range(0, num_microbatches - 1, 2):
        taken[index + 1].append(taken[index].pop())
    return replace(case, step=make_step({"vision": [encoded], LANGUAGE_MODEL: [taken]}))


def timeline_of(
    plan: ParallelPlan,
    step: StepPlan,
    sync_groups: Sequence[SyncGroup] = (),
    cost: Cost | None = None,
    comm_ms: float | Callable[[Message], float] = 0.0,
    sync_ms: float | Callable[[int], float] = 0.0,
    **more: Any,
) -> Timeline:
    """A step over time. `sync_ms` takes the index in `sync_groups`."""
    layout = find_representatives(plan, sync_groups)

    def messages_ms(graph: TaskGraph) -> list[float]:
        return [comm_ms(message) if callable(comm_ms) else comm_ms for message in graph.messages]

    def sum_ms(number: int) -> float:
        return sync_ms(layout.represented[number][0]) if callable(sync_ms) else sync_ms

    return simulate(layout, step, cost, messages_ms, sum_ms, **more)


def timed(plan: ParallelPlan, graph: TaskGraph, order: Order, times_ms: Sequence[float]) -> Timeline:
    """An order of a plan's tasks over time, without messages and sums."""
    durations = Durations(np.array(times_ms, float), np.zeros(graph.num_messages), np.zeros(0))
    return retime(find_representatives(plan, ()), graph, order, np.zeros(len(graph.stages), np.int64), durations)


def uneven(task: Task) -> float:
    """Times of tasks with few ties."""
    return 1 + (7 * task.microbatch + 3 * task.replica + 5 * len(task.module) + task.chunk) % 4 + (task.kind == "bwd")


def task_times(plan: ParallelPlan, step: StepPlan, forward_ms: Mapping[str, np.ndarray]) -> Callable[[Task], float]:
    """The time of a task: its share of the layers, of what its samples take; a backward takes two forwards."""

    def cost(task: Task) -> float:
        share = plan.stage(*task.stage_key).num_layers / plan.modules[task.module].num_layers
        batch_indices = list(step.chunks[task.module, task.replica, task.microbatch][task.chunk])
        return (1 if task.kind == "fwd" else 2) * share * float(forward_ms[task.module][batch_indices].sum())

    return cost


@st.composite
def cases(draw, generators: tuple[str, ...] = (), joint: bool = False, split: bool = False) -> Case:
    """
    Any small layout: shared and overlapping ranks, unequal replicas, frozen layers, DeepStack, any arrangement. With
    `joint` the replicas of some modules run jointly, whose stages are alike and on different ranks; with `split` some
    modules split their backwards.
    """
    names = draw(
        st.sampled_from([("language_model",), ("vision", "language_model"), ("vision", "audio", "language_model")])
    )
    names += generators
    disjoint = draw(st.booleans())
    specs, modules, next_rank = {}, {}, 0
    sharding: dict[str, ShardingSettings] = {}
    for name in names:
        frozen = draw(
            st.sampled_from([frozenset(), frozenset(range(-1, 5)), frozenset(range(-1, 4)), frozenset({0, 1})])
        )
        layers = () if name in (LANGUAGE_MODEL, *generators) else draw(st.sampled_from([(0,), (0, 2), (3,)]))
        specs[name] = module_spec(name, 4, frozen, layers)
        tp_size = draw(st.integers(1, 2))
        modules[name] = []
        if joint and draw(st.booleans()):
            modules[name], sharding[name] = draw(joint_module(next_rank if disjoint else 0, tp_size))
            next_rank = 1 + max(rank for replica in modules[name] for grid in replica for rank in grid)
            continue
        for _ in range(draw(st.integers(1, 3))):
            grids = []
            for _ in range(draw(st.integers(1, 4))):
                if disjoint:
                    grids.append(tuple(range(next_rank, next_rank + tp_size)))
                    next_rank += tp_size
                else:
                    grids.append(tuple(draw(st.permutations(range(5)))[:tp_size]))
            modules[name].append(grids)
    tied = {f"{LANGUAGE_MODEL}.-1.weight": ((LANGUAGE_MODEL, 4),)} if draw(st.booleans()) else {}
    spec, plan = make_plan(modules, specs, draw(st.sampled_from(SCHEDULES)), tied, sharding)
    if split:
        plan = splitting(plan, [name for name in names if draw(st.booleans())])
    batch_indices = range(draw(st.integers(0, 14)))
    microbatches: dict[str, list[list[list[int]]]] = {}
    for name in names:
        if name in generators:
            microbatches[name] = draw(generated(microbatches[LANGUAGE_MODEL], plan.modules[name].dp_size))
            continue
        sizes = [draw(st.integers(1, 5)) for _ in range(plan.modules[name].dp_size)]
        rows = [[[] for _ in range(size)] for size in sizes]
        for batch_index in batch_indices:
            if name == LANGUAGE_MODEL or draw(st.booleans()):
                replica = draw(st.integers(0, len(rows) - 1))
                rows[replica][draw(st.integers(0, sizes[replica] - 1))].append(batch_index)
        microbatches[name] = rows
    return Case(plan, make_step(microbatches, generators), sync_groups(spec, plan))


@st.composite
def joint_module(draw, first_rank: int, tp_size: int) -> tuple[list[list[tuple[int, ...]]], ShardingSettings]:
    """The ranks of a module whose replicas run jointly, all of them or two at a time, and how they share it."""
    dp_size, pp_size = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    ranks = iter(range(first_rank, first_rank + dp_size * pp_size * tp_size))
    replicas = [[tuple(next(ranks) for _ in range(tp_size)) for _ in range(pp_size)] for _ in range(dp_size)]
    shard_size = draw(st.sampled_from([None, 2])) if dp_size == 4 else None
    return replicas, ShardingSettings(draw(st.integers(2, 3)), shard_size)


@st.composite
def generated(draw, language: list[list[list[int]]], dp_size: int) -> list[list[list[int]]]:
    """Some of the samples of the language model, each in its microbatch, on any replica of a generator."""
    rows = [[[] for _ in range(max(map(len, language)))] for _ in range(dp_size)]
    for replica in language:
        for index, batch_indices in enumerate(replica):
            for batch_index in batch_indices:
                if draw(st.booleans()):
                    rows[draw(st.integers(0, dp_size - 1))][index].append(batch_index)
    return rows


CHANGES = ("swap", "move", "double", "drop", "other", "to another rank")


def changed(rows: PartActions, change: str, num_codes: int, generator: random.Random) -> PartActions:
    """The lists, of two actions or more, with one of `CHANGES`."""
    codes, starts = rows.codes.copy(), rows.starts.copy()
    i, j = sorted(generator.sample(range(len(codes)), 2))
    if change == "swap":
        codes[[i, j]] = codes[[j, i]]
    elif change == "move":
        codes[i : j + 1] = np.roll(codes[i : j + 1], 1)
    elif change == "double":
        codes[i] = codes[j]
    elif change == "drop":
        codes, starts = np.delete(codes, i), starts - (starts > i)
    elif change == "to another rank":
        codes, starts = np.insert(np.delete(codes, i), j - 1, codes[i]), starts - ((starts > i) & (starts <= j))
    else:
        codes[i] = generator.randrange(num_codes)
    return PartActions(rows.graph, starts, codes, rows.list_of)
