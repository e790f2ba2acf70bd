"""
What a known good version makes of 240 random steps and of the cases of `benchmarks/search_quality.py`. Changes of how
steps are ordered, timed and checked leave it as it is. Each input is stored beside its result.

Both files are written anew only for a change that is meant to change them:

```bash
PYTHONPATH=benchmarks python -m tests.golden.recorded
```
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.brute_force import named
from benchmarks.search_quality import Case as Question
from benchmarks.search_quality import multimodal_cases, text_cases
from hf_mmparallel.cost import memory_timeline
from hf_mmparallel.plan import ParallelPlan, StepPlan, SyncGroup
from hf_mmparallel.planning.search import search_plans
from hf_mmparallel.schedule import Message, Task, build_program, find_representatives
from tests.schedule.builders import Case, cases, timeline_of

FOLDER = Path(__file__).parent
STEPS, SEARCHES = FOLDER / "steps.json", FOLDER / "searches.json"
NUM_STEPS, NUM_SPLIT = 200, 40

Row = dict[str, Any]


def row_of(case: Case) -> Row:
    """The input of a random step, as JSON."""
    step = case.step
    return {
        "plan": case.plan.to_dict(),
        "step": {"samples": len(step.samples), "microbatches": step.microbatches, "targets": step.targets},
        "sums": [asdict(group) for group in case.sync_groups],
    }


def case_of(row: Row) -> Case:
    """A random step from its input."""
    step, targets = row["step"], {name: tuple(names) for name, names in row["step"]["targets"].items()}
    microbatches = {
        name: tuple(tuple(map(tuple, replica)) for replica in replicas)
        for name, replicas in step["microbatches"].items()
    }
    sums = [
        SyncGroup(
            tuple(group["ranks"]),
            tuple(group["parameters"]),
            tuple((name, replica, stage) for name, replica, stage in group["stages"]),
            group["shard_size"],
            group["zero_stage"],
        )
        for group in row["sums"]
    ]
    return Case(
        ParallelPlan.from_dict(row["plan"]), StepPlan(tuple(range(step["samples"])), microbatches, targets), sums
    )


def cost_of(number: int) -> Callable[[Task], float]:
    """Durations of tasks: alike in every third step, with many ties in every third, all different in the others."""

    def cost(task: Task) -> float:
        text = f"{number} {task}".encode()
        drawn = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") / 2**32
        alike = 1.0 if task.kind == "fwd" else 2.0
        return (alike, alike + int(3 * drawn) / 3, alike * (0.5 + drawn))[number % 3]

    return cost


def result_of(case: Case, number: int) -> Row:
    """What is made of a random step."""
    plan, step, sums, cost = case.plan, case.step, case.sync_groups, cost_of(number)
    program = build_program(plan, step, sums, cost)
    evaluation = build_program(plan, step, sums, cost, training=False)

    def travel_ms(message: Message) -> float:
        return 0.25 if message.crosses_boundary else 0.125

    layout = find_representatives(plan, sums)

    def sum_ms(index: int) -> float:
        return 0.5 + layout.number_of_sum(index) / 8

    alone = timeline_of(plan, step, sums, cost)
    simulation = timeline_of(plan, step, sums, cost, travel_ms, sum_ms)
    return {
        "checksum": program.checksum,
        "evaluation_checksum": evaluation.checksum,
        "ends_ms": _weighted(alone.task_times),
        "step_ms": simulation.iteration_ms,
        "evaluation_ms": timeline_of(plan, step, sums, cost, training=False).iteration_ms,
        "reordered_ms": timeline_of(plan, step, sums, cost, order_cost=cost_of(number + 1)).iteration_ms,
        "bubble": simulation.bubble_fraction,
        "unlike": simulation.unlike_fraction,
        "spans_ms": _weighted(simulation.task_times),
        "sums_ms": sum(span.end_ms + span.rank * span.start_ms for span in simulation.sums),
        "in_flight": sum(
            peak * (1 + index) for index, (_, peak) in enumerate(sorted(simulation.peak_in_flight.items()))
        ),
    }


def _weighted(times_ms: Any) -> float:
    """A sum of starts and ends in which no two tasks count the same."""
    ordered = [times_ms[task] for task in sorted(times_ms)]
    return float(sum((index + 1) * start + (index + 0.5) * end for index, (start, end) in enumerate(ordered)))


def search_result(question: Question) -> Row:
    """The best layout of a question with its predicted time, bubble and memory."""
    problem = named(question.problem())
    best = search_plans(problem).best
    memory = {rank: own.total for rank, own in best.prediction.memory.items()}
    planned, prediction = best.prediction.planned, best.prediction
    curves = memory_timeline(
        problem.costs, prediction.plan, planned.step, prediction.sizes, prediction.timeline.task_times
    )
    return {
        "question": str(question),
        "plan": str(best.candidate),
        "step_ms": best.step_ms,
        "bubble": prediction.timeline.bubble_fraction,
        "memory": sum((rank + 1) * total for rank, total in memory.items()),
        "memory_peaks": sum((rank + 1) * float(own.max()) for rank, (_, own) in curves.items()),
        "memory_over_time": sum(float(np.trapezoid(own, times)) for times, own in curves.values()),
    }


def questions() -> dict[str, Question]:
    """The cases of the search in bfloat16 by name."""
    cases = (*text_cases(), *multimodal_cases())
    return {str(question): question for question in cases if question.dtype == "bfloat16"}


def drawn_cases() -> list[Case]:
    """Random steps, a third with generators and a third with replicas that run jointly; some with split backwards."""
    drawn = st.one_of(cases(), cases(("image",)), cases(("image",), joint=True))
    return [*_drawn(drawn, NUM_STEPS), *_drawn(cases(split=True), NUM_SPLIT)]


def _drawn(strategy: Any, count: int) -> list[Case]:
    found: list[Case] = []

    @seed(40)
    @settings(max_examples=4 * count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(case: Case) -> None:
        if len(case.step.samples) >= 3 and len(found) < count:
            found.append(replace(case, plan=ParallelPlan.from_dict(case.plan.to_dict())))

    collect()
    return found


def _lines() -> Iterator[str]:
    for number, case in enumerate(drawn_cases()):
        row = row_of(case)
        # what is read is what was written
        yield json.dumps(
            {**row, "result": result_of(case_of(json.loads(json.dumps(row))), number)}, separators=(",", ":")
        )


def main() -> None:
    STEPS.write_text("\n".join(_lines()) + "\n", encoding="utf-8")
    rows = map(search_result, questions().values())
    SEARCHES.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
