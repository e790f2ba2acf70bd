"""Programs of any layout are complete, possible, and read back from their text."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_mmparallel.plan import LANGUAGE_MODEL
from hf_mmparallel.schedule import (
    Action,
    Message,
    Program,
    Task,
    build_graph,
    build_program,
    in_flight_limits,
)
from tests.schedule.builders import Case, cases, chain, uneven
from tests.schedule.checker import check_program
from tests.schedule.replayed import replay

SETTINGS = settings(max_examples=60, suppress_health_check=list(HealthCheck))
CASES = st.one_of(cases(), cases(("image_generator",)), cases(("image_generator", "audio_generator")))


def program_of(case: Case, **options) -> Program:
    return build_program(case.plan, case.step, case.sync_groups, **options)


def least_ms(case: Case, training: bool) -> float:
    """No order of the tasks is faster: the work of the busiest rank, and the longest way through the graph."""
    graph = build_graph(case.plan, case.step, training)
    busy: Counter[int] = Counter()
    end: list[float] = []
    waits: list[list[int]] = [[] if before < 0 else [before] for before in graph.after.tolist()]
    for source, target in graph.ends:
        waits[target].append(source)
    for task, sources in zip(graph.tasks, waits, strict=True):
        for rank in case.plan.stage(*task.stage_key).all_ranks:
            busy[rank] += uneven(task)
        end.append(uneven(task) + max((end[source] for source in sources), default=0.0))
    return max([*busy.values(), *end], default=0.0)


@SETTINGS
@given(CASES, st.booleans())
def test_any_layout_has_a_program_that_loses_nothing_and_reads_back(case, training):
    program = program_of(case, cost=uneven, training=training)
    check_program(case.plan, case.step, case.sync_groups, program, training)
    assert Program.parse(program.dump()) == program
    simulation = replay(case.plan, program, uneven)
    tasks = set(build_graph(case.plan, case.step, training).tasks)
    assert {span.task for span in simulation.spans} == tasks
    assert simulation.iteration_ms >= least_ms(case, training) - 1e-9
    limits = in_flight_limits(case.plan, case.step)
    # A microbatch is let in whole, so that its chunks may go over the limit by less than one; one without a backward,
    # which saves nothing, is let in at any time, and counts while it runs.
    passing = {task.stage_key for task in tasks if task.kind == "fwd" and Task("bwd", *task.key) not in tasks}
    peaks = simulation.peak_in_flight.items()
    assert all(peak < limits.get(key, math.inf) + 1 + (key in passing) for key, peak in peaks)
    assert all(program.has_backward(task) == (Task("bwd", *task.key) in tasks) for task in tasks if task.kind == "fwd")
    for number, group in enumerate(case.sync_groups):
        for rank in group.ranks:
            assert program.actions[rank].count(Action("sync", index=number)) == training


def test_text_forms():
    task = Task("fwd", "vision.tower", 0, 1, 3, 2)
    assert str(task) == "fwd vision.tower.r0.s1 mb3.c2"
    message = Message("act", task, Task("fwd", LANGUAGE_MODEL, 0, 0, 3))
    assert message.crosses_boundary
    texts = [str(Action.run(task)), f"send {message}", f"recv {message}", "sync 3"]
    for text in texts:
        assert str(Action.parse(text)) == text
    for wrong in ("fwd vision mb0", "send fwd", "sync x", "jump", "act fwd a.r0.s0 mb0.c0"):
        with pytest.raises(ValueError, match="is not a"):
            Action.parse(wrong)
    for a, b in itertools.combinations(map(Action.parse, texts), 2):
        assert (a < b) != (b < a)


def test_a_receive_stands_one_task_ahead_of_its_own():
    """But not ahead of what the same ranks have sent each other before."""
    first, last = (
        [str(action).replace(LANGUAGE_MODEL, "lm") for action in actions if action.op != "sync"]
        for actions in program_of(chain(2, 2)).actions.values()
    )
    act, grad = (
        [f"{kind} {task} {ends[0]}.r0.s0 mb{i}.c0 -> {task} {ends[1]}.r0.s0 mb{i}.c0" for i in range(2)]
        for kind, task, ends in (("act", "fwd", ("vision", "lm")), ("grad", "bwd", ("lm", "vision")))
    )
    fwd, bwd, own, back = (
        [f"{task} {name}.r0.s0 mb{i}.c0" for i in range(2)] for name in ("vision", "lm") for task in ("fwd", "bwd")
    )
    sent = [fwd[0], f"send {act[0]}", fwd[1], f"send {act[1]}"]
    assert first == [*sent, f"recv {grad[0]}", f"recv {grad[1]}", *bwd]
    early = [f"recv {act[0]}", own[0], f"recv {act[1]}", back[0], f"send {grad[0]}"]
    assert last == [*early, own[1], back[1], f"send {grad[1]}"]
