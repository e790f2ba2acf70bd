"""
All arrangements of the same global batches: balance of microbatches, time of a step, saved activations.

In the simulator, with packed rows: batches of 512 samples with the sizes of four published datasets, Qwen2.5-VL's
encoder with Llama 3, four replicas with eight stages each, 32 microbatches, task times from operation counts. Each
arrangement runs on the same plan, and DistTrain and DIP also on the plans that Entrain's tables give them, DIP with
its own schedule. Language-model replicas with unlike numbers of stages are simulated with as many microbatches each,
and with numbers by their speed. On gloo ranks: eight processes whose tasks sleep for the times of a small batch, over
the real engine and its messages.

Padded and packed rows, and the arrangement that is chosen where nobody names one: see `arrangement_modes.py`.

A step is compared with that of a batch of like samples that could be divided at will, into equal microbatches (even)
and into the best that there are for that plan (best), and with its busiest stage, the bound that nothing gets below.

```bash
python benchmarks/microbatch_balance.py
python benchmarks/microbatch_balance.py --modes  # padded and packed rows only
python benchmarks/microbatch_balance.py --quick --out out/bench  # seconds; the numbers mean little
```
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.distributed as dist
from arrangement_modes import compare_modes, modes_notes, modes_table, summary
from bounds import StageWork, busiest_ms, divisible_ms, even_ms
from modelled import collate, gathered, message_ms, sleep_instead, timed_step, tiny_model, tiny_samples
from paper_samples import PUBLISHED, PUBLISHED_MODELS, VISION
from rich.table import Table

from hf_mmparallel.arrange import Arrangement, arrange_step
from hf_mmparallel.arrange.assigned_batch import assign_replicas
from hf_mmparallel.arrange.balance import deferred_fraction, step_balance
from hf_mmparallel.arrange.greedy import fill_bins
from hf_mmparallel.cost import activation_peaks, analytic_costs, find_device
from hf_mmparallel.data.step_batch import StepBatch
from hf_mmparallel.data.step_dataset import Reader, StepDataset
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.papers.published_arrangements import entrain
from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModulePlan,
    ModulePlugin,
    ParallelPlan,
    SampleSizes,
    Stage,
    StepPlan,
    Workloads,
    resolve_plan,
)
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.schedule import (
    Durations,
    Span,
    Task,
    build_graph,
    build_program,
    find_representatives,
    in_flight_limits,
    microbatch_forward_ms,
    order_tasks,
    retime,
    simulate,
)
from hf_mmparallel.schedule.in_flight import may_alternate
from hf_mmparallel.world import World

GOAL_STD, GOAL_BOUND = 10.6, 1.03
MICROBATCH = 4
TP_SIZE = 2
GIB = 2**30
BOUNDS = ("even", "best", "busiest")


@dataclass(frozen=True)
class Variant:
    """
    A way to run a batch.

    Args:
        name (`str`): What it is called in the table.
        arrangement (`str` or `Callable`): The arrangement.
        schedule (`str`, *optional*, defaults to `"1f1b"`): The schedule.
        system (`str`, *optional*, defaults to `"entrain"`): Whose stage counts it has.
        one_order (`bool`, *optional*, defaults to `False`):
            Whether the order in which stages wait for a forward after each backward is left out.
    """

    name: str
    arrangement: str | Arrangement
    schedule: str = "1f1b"
    system: str = "entrain"
    one_order: bool = False


SAME_PLAN = (
    Variant("contiguous", "contiguous"),
    Variant("batch_rebalance", "batch_rebalance"),
    Variant("disttrain", "disttrain"),
    Variant("sub_microbatches", "sub_microbatches"),
    Variant("entrain", "entrain"),
    Variant("hierarchical", "hierarchical"),
    Variant("hierarchical, eager", "hierarchical", "eager"),
    Variant("tapered", "tapered"),
    Variant("tapered, eager", "tapered", "eager"),
)
ABLATION = (
    Variant("entrain, no deferral", functools.partial(entrain, deferral=False)),
    Variant("entrain, one order", "entrain", one_order=True),
    Variant("disttrain, its own plan, one order", "disttrain", system="disttrain", one_order=True),
)
OWN_PLAN = (
    Variant("disttrain, its own plan", "disttrain", system="disttrain"),
    Variant("DIP", "sub_microbatches", "encoders_first", system="dip"),
    Variant("sub_microbatches, DIP's own plan", "sub_microbatches", system="dip"),
    Variant("hierarchical, DIP's own plan", "hierarchical", system="dip"),
    Variant("tapered, DIP's own plan", "tapered", system="dip"),
)


@dataclass(frozen=True)
class Sizes:
    """
    Sizes of the simulations and runs.

    Args:
        batch (`int`): Samples of a global batch.
        replicas (`int`): Of both modules.
        num_batches (`int`): Global batches of each dataset.
        num_judged (`int`): Such batches with padded and with packed rows, each with two sizes of microbatches.
        slept (`int`): Samples of the batch whose tasks sleep.
        step_ms (`float`): What such a step takes, about.
        repeats (`int`): Such steps of each arrangement.
    """

    batch: int = 512
    replicas: int = 4
    num_batches: int = 5
    num_judged: int = 2
    slept: int = 64
    step_ms: float = 2000.0
    repeats: int = 5


QUICK = Sizes(batch=64, replicas=2, num_batches=1, num_judged=1, slept=16, step_ms=150.0, repeats=1)


# In the simulator


def make_plan(model: str, stages: tuple[int, int], replicas: int, schedule: str, colocated: bool) -> ParallelPlan:
    """Encoder and language model on disjoint or shared ranks; one rank represents the two of a stage."""
    sizes = {
        VISION: ModulePlugin(dp_size=replicas, pp_size=stages[0]),
        LANGUAGE_MODEL: ModulePlugin(dp_size=replicas, pp_size=stages[1], colocate_with=VISION if colocated else None),
    }
    return resolve_plan(PUBLISHED_MODELS[model].spec, sizes, schedule=schedule)  # type: ignore[arg-type]


class TaskTimes:
    """Task -> ms: its samples' share of the stage, two forwards for a backward, half of it for each of two parts."""

    def __init__(self, plan: ParallelPlan, step: StepPlan, workloads: Workloads, ranks: int = 1):
        self.plan, self.step, self.workloads, self.ranks = plan, step, workloads, ranks

    def __call__(self, task: Task) -> float:
        module = self.plan.modules[task.module]
        share = self.plan.stage(task.module, task.replica, task.stage).num_layers / module.num_layers / self.ranks
        batch_indices = list(self.step.chunks[task.module, task.replica, task.microbatch][task.chunk])
        forward = share * float(self.workloads.forward_ms[task.module][batch_indices].sum())
        parts = sum(part in ("inputs", "weights") for part in task.row.work) / 2
        return self.workloads.backward_ratio[task.module] * forward * parts if parts else forward


def stage_work(plan: ParallelPlan, workloads: Workloads) -> list[StageWork]:
    """Work of the stages of a replica if replicas share a batch evenly."""
    found = []
    for index, (name, module) in enumerate(plan.modules.items()):
        total = float(workloads.forward_ms[name].sum()) / module.dp_size / TP_SIZE
        for stage in module.replicas[0]:
            forward = total * stage.num_layers / module.num_layers
            found.append(StageWork(forward, workloads.backward_ratio[name] * forward, index))
    return found


def simulated(plan: ParallelPlan, variant: Variant, model: str, sizes: SampleSizes) -> dict[str, Any]:
    """One batch in one arrangement."""
    spec = PUBLISHED_MODELS[model].spec
    workloads = PUBLISHED_MODELS[model].workloads(sizes)
    step = arrange_step(plan, range(sizes.num_samples), workloads, MICROBATCH, variant.arrangement)
    cost = TaskTimes(plan, step, workloads, TP_SIZE)
    graph = build_graph(plan, step)
    waits = may_alternate(plan) and not variant.one_order
    order = order_tasks(plan, graph, list(map(cost, graph.tasks)), in_flight_limits(plan, step), waits)
    durations = Durations(np.array(list(map(cost, graph.tasks)), float), np.zeros(graph.num_messages), np.zeros(0))
    layout = find_representatives(plan, ())
    simulation = retime(layout, graph, order, layout.parts_of_stages(step), durations)
    forwards = microbatch_forward_ms(simulation.spans)
    peaks = activation_peaks(analytic_costs(spec, find_device("a40")), plan, step, sizes, simulation.task_times)
    return {
        "iteration_ms": simulation.iteration_ms,
        "bubble_fraction": simulation.bubble_fraction,
        "std_ms": {name: spread_of(forwards, name) for name in plan.modules},
        "replica_excess": max(step_balance(step, workloads).replica_excess(name) for name in plan.modules),
        "deferred_fraction": deferred_fraction(step),
        "num_microbatches": len(step.microbatches[LANGUAGE_MODEL][0]),
        "peak_gib": [peak / TP_SIZE / GIB for _, peak in sorted(peaks.items())],
    }


def spread_of(forwards: Mapping[tuple[str, int], np.ndarray], module: str) -> float:
    """Standard deviation of the forward over the microbatches of a replica, the mean over replicas."""
    return float(np.mean([times.std() for (name, _), times in forwards.items() if name == module]))


def mean_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The means of the numbers of several batches."""
    first = rows[0]
    if isinstance(first, dict):
        return {key: mean_of([row[key] for row in rows]) for key in first}
    return np.mean(rows, axis=0).tolist()  # type: ignore[return-value]


def simulate_dataset(name: str, model: str, sizes: Sizes) -> dict[str, Any]:
    """All arrangements of a dataset's batches."""
    shape = PUBLISHED[name]
    batches = [shape.draw(sizes.batch, seed) for seed in range(sizes.num_batches)]
    stages = shape.stated.parallel_sizes[model]
    count = sizes.batch // MICROBATCH // sizes.replicas
    workloads = [PUBLISHED_MODELS[model].workloads(batch) for batch in batches]
    rows = {}
    for variant in (*SAME_PLAN, *ABLATION, *OWN_PLAN):
        colocated = variant.system == "dip"
        plan = make_plan(model, stages[variant.system], sizes.replicas, variant.schedule, colocated)
        row = mean_of([simulated(plan, variant, model, batch) for batch in batches])
        row["bounds_ms"] = mean_of([bounds_of(stage_work(plan, own), count, colocated) for own in workloads])
        rows[variant.name] = row
    return {"dataset": name, "model": model, "stages": dict(stages), "arrangements": rows}


def compare_dataset(name: str, model: str, sizes: Sizes) -> list[dict[str, Any]]:
    """Padded and packed rows of a dataset."""
    return compare_modes(name, model, sizes.batch, sizes.replicas, sizes.num_judged)


def unlike_replicas() -> dict[str, Any]:
    """Three replicas that have 12 layers in 4, 3 and 2 stages, and 24 microbatches of 120 ms to share."""
    stages, microbatches, num_layers = (4, 3, 2), 24, 12
    starts = np.cumsum((0, *stages)).tolist()
    replicas = []
    for count, start in zip(stages, starts, strict=False):
        cuts = [num_layers * index // count for index in range(count + 1)]
        pairs = zip(cuts, cuts[1:], strict=False)
        replicas.append(tuple(Stage(layers, ((start + index,),)) for index, layers in enumerate(pairs)))
    plan = ParallelPlan({LANGUAGE_MODEL: ModulePlan(tuple(replicas))}, num_microbatches=microbatches // len(stages))
    rng = np.random.default_rng(0)
    result: dict[str, Any] = {"stages": stages}
    for name, spread in (("alike", 0.0), ("log-normal", 0.5)):
        work = np.exp(spread * rng.standard_normal(MICROBATCH * microbatches))
        forward = {LANGUAGE_MODEL: 40.0 * microbatches * work / work.sum()}
        tokens = {LANGUAGE_MODEL: np.ones(len(work), np.int64)}
        workloads = Workloads(forward, {LANGUAGE_MODEL: 2.0}, tokens, {})
        step = arrange_step(plan, range(len(work)), workloads, MICROBATCH, "hierarchical")
        rows = {"as many each": _as_many_each(plan, workloads), "by their speed": step}
        result[name] = {}
        for way, own in rows.items():
            cost = TaskTimes(plan, own, workloads)
            found = simulate(find_representatives(plan, ()), own, cost)
            counts = [len(microbatches) for microbatches in own.microbatches[LANGUAGE_MODEL]]
            result[name][way] = {"iteration_ms": found.iteration_ms, "microbatches": counts}
    return result


def _as_many_each(plan: ParallelPlan, workloads: Workloads) -> StepPlan:
    """The same number of microbatches for each replica, with samples by the speed of their slowest stages."""
    stages = [len(replica) for replica in plan.modules[LANGUAGE_MODEL].replicas]
    count = workloads.num_samples // MICROBATCH // len(stages)
    language = workloads.forward_ms[LANGUAGE_MODEL]
    replica = assign_replicas(language, np.zeros((len(language), 0)), np.array(stages))
    rows = []
    for index in range(len(stages)):
        own = np.flatnonzero(replica == index)
        order = np.argsort(-language[own], kind="stable")
        found = fill_bins(np.zeros(len(own), np.int64), language[own, None], order, np.ones(count))
        rows.append(tuple(tuple(own[found == place].tolist()) for place in range(count)))
    return StepPlan(tuple(range(len(language))), {LANGUAGE_MODEL: tuple(rows)}, {})


def bounds_of(works: list[StageWork], num_microbatches: int, colocated: bool) -> dict[str, float]:
    """Bounds of a step; for stages on shared ranks only the work of each rank."""
    if colocated:
        half = len(works) // 2
        pairs = zip(works[:half], works[half:], strict=True)
        return {"busiest": max(encoder.total_ms + language.total_ms for encoder, language in pairs)}
    return {
        "even": even_ms(works, num_microbatches),
        "best": divisible_ms(works, num_microbatches),
        "busiest": busiest_ms(works),
    }


# On ranks whose tasks sleep


def slept_steps(engine: ParallelEngine, variant: Variant, sizes: Sizes) -> dict[str, Any]:
    """Measured and predicted steps of one arrangement."""
    plan = replace(engine.plan, schedule=variant.schedule)
    shape, model = PUBLISHED["synthchartnet"], PUBLISHED_MODELS["llama3-1b"]
    workloads = model.workloads(shape.draw(sizes.slept, seed=0))
    step = arrange_step(plan, range(sizes.slept), workloads, MICROBATCH, variant.arrangement)
    times = TaskTimes(plan, step, workloads)
    scale = sizes.step_ms / even_ms(stage_work(plan, workloads), sizes.slept // MICROBATCH // 2)
    program = build_program(plan, step, engine.sync_groups, times)
    tasks = {action.task for actions in program.actions.values() for action in actions if action.task is not None}
    costs = {task: scale / TP_SIZE * times(task) for task in tasks}
    data = StepDataset(Reader(tiny_samples(sizes.slept, [VISION]), collate), engine.inputs, 0).read(step)
    batch = StepBatch.of(data, program, engine.rank)
    sleep_instead(engine, costs)
    measured, deviations = [], []
    for index in range(1 + sizes.repeats):
        measured.append(timed_step(engine, batch, index))
        assert engine.last_result is not None
        own = gathered({(engine.rank, t.task): t for t in engine.last_result.record.timeline})
        spans = [Span(rank, task, t.start_ms, t.end_ms) for (rank, task), t in own.items()]
        forwards = microbatch_forward_ms(spans)
        deviations.append({name: spread_of(forwards, name) for name in plan.modules})
    predicted = simulate(find_representatives(plan, ()), step, costs.__getitem__, message_ms(16))
    return {
        "arrangement": variant.name,
        "predicted_ms": predicted.iteration_ms,
        "measured_ms": statistics.median(measured[1:]),
        "even_ms": sizes.step_ms,
        "std_ms": mean_of(deviations[1:]),
    }


def run_ranks(options: argparse.Namespace, sizes: Sizes) -> None:
    """The function of the ranks; rank 0 writes the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = tiny_model([VISION]).train()
    spec = build_model_spec(model)
    layout = {name: ModulePlugin(dp_size=2, pp_size=2) for name in spec.modules}
    engine = ParallelEngine(model, spec, resolve_plan(spec, layout), World())
    result = [slept_steps(engine, variant, sizes) for variant in SAME_PLAN]
    if dist.get_rank() == 0:
        options.ranks.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# The script


def dataset_table(result: dict[str, Any]) -> Table:
    """A row for each arrangement of a dataset."""
    table = Table("arrangement", "std vision", "std LM", "step ms", *(f"/ {key}" for key in BOUNDS))
    for title in ("bubble", "deferred", "peak GiB"):
        table.add_column(title)
    bounds = result["arrangements"][SAME_PLAN[0].name]["bounds_ms"]
    table.title = (
        f"{result['dataset']}, {result['model']}: equal microbatches {bounds['even']:.0f} ms, best microbatches "
        f"{bounds['best']:.0f} ms, the busiest stage alone {bounds['busiest']:.0f} ms"
    )
    table.title_justify = "left"
    for name, row in result["arrangements"].items():
        own = row["bounds_ms"]
        table.add_row(
            name,
            *(f"{row['std_ms'][module]:.1f}" for module in (VISION, LANGUAGE_MODEL)),
            f"{row['iteration_ms']:.0f}",
            *(f"{row['iteration_ms'] / own[key]:.3f}" if key in own else "" for key in BOUNDS),
            f"{row['bubble_fraction']:.1%}",
            f"{row['deferred_fraction']:.1%}",
            f"{max(row['peak_gib']):.1f}",
        )
    return table


def unlike_table(result: dict[str, Any]) -> Table:
    """Replicas with 4, 3 and 2 stages."""
    table = Table("samples", "microbatches", "of each replica", "step ms")
    table.title = f"Replicas of the language model with {', '.join(map(str, result['stages']))} stages"
    table.title_justify = "left"
    for samples in ("alike", "log-normal"):
        for way, row in result[samples].items():
            table.add_row(samples, way, "/".join(map(str, row["microbatches"])), f"{row['iteration_ms']:.0f}")
    return table


def slept_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each arrangement of the batch whose tasks sleep."""
    table = Table("arrangement", "predicted ms", "measured ms", "/ even", "std vision", "std LM")
    table.title = "Eight gloo ranks with modelled durations"
    table.title_justify = "left"
    for row in rows:
        numbers = (row["predicted_ms"], row["measured_ms"], row["measured_ms"] / row["even_ms"])
        deviations = [f"{row['std_ms'][module]:.1f}" for module in (VISION, LANGUAGE_MODEL)]
        table.add_row(row["arrangement"], *(f"{n:.0f}" for n in numbers[:2]), f"{numbers[2]:.3f}", *deviations)
    return table


def notes_of(results: Sequence[dict[str, Any]]) -> list[str]:
    """The figures that the goals are compared with."""
    notes = []
    for result in results:
        rows = result["arrangements"]
        fewer = rows["disttrain"]["std_ms"][VISION] / rows["hierarchical"]["std_ms"][VISION]
        notes.append(
            f"{result['dataset']}, {result['model']}: the encoder's deviation is {fewer:.1f}x below DistTrain's."
        )
        for name in ("hierarchical", "tapered, eager"):
            ours = rows[name]
            over = [ours["iteration_ms"] / ours["bounds_ms"][key] for key in BOUNDS]
            faster = [rows[v.name]["iteration_ms"] / ours["iteration_ms"] for v in (SAME_PLAN[2], OWN_PLAN[0])]
            notes.append(
                f"  {name}: {over[0]:.3f} of equal microbatches, {over[1]:.3f} of the best, {over[2]:.3f} of the "
                f"busiest stage; {faster[0]:.2f}x faster than DistTrain's order on the same plan, {faster[1]:.2f}x on "
                "its own."
            )
        steps = {name: row["iteration_ms"] for name, row in rows.items()}
        peaks = {name: max(row["peak_gib"]) for name, row in rows.items()}
        fewer = {
            module: rows["disttrain"]["std_ms"][module] / own for module, own in rows["entrain"]["std_ms"].items()
        }
        notes.append(
            f"  entrain: deviations {fewer[VISION]:.1f}x and {fewer[LANGUAGE_MODEL]:.1f}x below DistTrain's; "
            f"{steps['disttrain'] / steps['entrain']:.2f}x faster on the same plan, "
            f"{steps['disttrain, its own plan'] / steps['entrain']:.2f}x on its own, "
            f"{steps['DIP'] / steps['entrain']:.2f}x than DIP; hierarchical takes "
            f"{steps['hierarchical'] / steps['entrain']:.3f} of its step."
        )
        notes.append(
            f"  Deferral of entrain: a step {1 - steps['entrain'] / steps['entrain, no deferral']:.1%} shorter for "
            f"{peaks['entrain'] / peaks['entrain, no deferral'] - 1:.1%} more memory."
        )
        dip = [steps["DIP"] / steps[v.name] for v in OWN_PLAN[3:]]
        notes.append(
            f"  DIP keeps {peaks['DIP'] - peaks['entrain']:+.1f} GiB more than entrain; on its plan hierarchical is "
            f"{dip[0]:.2f}x faster, tapered {dip[1]:.2f}x."
        )
    goals = f"Goals: {GOAL_STD}x for SynthChartNet, a step within {GOAL_BOUND:.2f} of the bound."
    return [*notes, goals]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few small batches, to try the script itself")
    parser.add_argument("--modes", action="store_true", help="only padded and packed rows, no ranks that sleep")
    parser.add_argument("--out", type=Path, default=common.ROOT / "benchmarks" / "results", help="folder of the JSON")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    if options.ranks is not None:
        run_ranks(options, sizes)
        return
    load = os.getloadavg()
    names = [(name, model) for name in PUBLISHED for model in PUBLISHED_MODELS]
    names = names[:1] if options.quick else names
    # Nothing simulated depends on the machine or its load.
    arguments = (*zip(*names, strict=True), [sizes] * len(names))
    modes = [row for rows in common.in_processes(compare_dataset, *arguments) for row in rows]
    result = {
        "modes": modes,
        "summary": summary(modes),
        "sizes": asdict(sizes),
        **common.machine(common.Shapes(), load),
    }
    common.report("microbatch_balance_modes", [modes_table(modes)], modes_notes(modes), result, options.out)
    if options.modes:
        return
    slept = common.launch(__file__, 8, ["--quick"] * options.quick)
    results = common.in_processes(simulate_dataset, *arguments)
    unlike = unlike_replicas()
    tables = [*map(dataset_table, results), unlike_table(unlike), slept_table(slept)]
    result = {
        "simulated": results,
        "unlike": unlike,
        "slept": slept,
        "sizes": asdict(sizes),
        "goals": [GOAL_STD, GOAL_BOUND],
    }
    result |= common.machine(common.Shapes(), load)
    common.report("microbatch_balance", tables, notes_of(results), result, options.out)


if __name__ == "__main__":
    main()
