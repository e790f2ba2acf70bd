"""Programs of any layout are complete, possible, and read back from their text."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_mmparallel.plan import LANGUAGE_MODEL, sync_groups
from hf_mmparallel.schedule import (
    Action,
    DeadlockError,
    Message,
    Program,
    ProgramError,
    Task,
    build_graph,
    build_program,
    check_program,
    simulate,
)
from tests.schedule.builders import cases, chain, make_plan, make_step, shared

SETTINGS = settings(max_examples=60, suppress_health_check=list(HealthCheck))


def uneven(task: Task) -> float:
    return 1 + (7 * task.microbatch + 3 * task.replica + 5 * len(task.module) + task.chunk) % 4 + (task.kind == "bwd")


def replaced(program: Program, rank: int, actions) -> Program:
    return Program({**program.actions, rank: tuple(actions)}, program.times_ms)


@SETTINGS
@given(cases(), st.booleans())
def test_any_layout_has_a_possible_program(case, training):
    program = build_program(case.plan, case.step, case.sync_groups, uneven, training)
    check_program(case.plan, case.step, case.sync_groups, program, training)
    simulation = simulate(case.plan, program, uneven)
    tasks = build_graph(case.plan, case.step, training).tasks
    assert {span.task for span in simulation.spans} == set(tasks)
    for rank, group in enumerate_ranks(case.sync_groups):
        assert sum(a == Action("sync", index=group) for a in program.actions[rank]) == training


def enumerate_ranks(groups):
    return [(rank, number) for number, group in enumerate(groups) for rank in group.ranks]


@SETTINGS
@given(cases())
def test_replay_keeps_the_predicted_times_without_gradient_sums(case):
    program = build_program(case.plan, case.step, [], uneven)
    simulation = simulate(case.plan, program, uneven)
    predicted = max((end for _, end in program.times_ms.values()), default=0.0)
    assert simulation.iteration_ms <= predicted + 1e-9
    for span in simulation.spans:
        assert span.start_ms <= program.times_ms[span.task][0] + 1e-9


@SETTINGS
@given(cases())
def test_text_reads_back(case):
    program = build_program(case.plan, case.step, case.sync_groups, uneven)
    assert Program.parse(program.dump()) == program


@settings(SETTINGS, max_examples=120)
@given(cases(), st.data())
def test_what_the_checker_accepts_never_deadlocks(case, data):
    program = build_program(case.plan, case.step, case.sync_groups, uneven)
    for _ in range(8):
        rank = data.draw(st.sampled_from(sorted(program.actions)))
        actions = list(program.actions[rank])
        if len(actions) < 2:
            continue
        i, j = data.draw(st.integers(0, len(actions) - 1)), data.draw(st.integers(0, len(actions) - 1))
        change = data.draw(st.sampled_from(["swap", "move", "drop"]))
        if change == "swap":
            actions[i], actions[j] = actions[j], actions[i]
        elif change == "move":
            actions.insert(j, actions.pop(i))
        else:
            actions.pop(i)
        mutant = replaced(program, rank, actions)
        try:
            check_program(case.plan, case.step, case.sync_groups, mutant)
        except ProgramError:
            assert mutant != program
            continue
        assert change != "drop"
        simulate(case.plan, mutant, uneven)


def test_each_missing_or_doubled_action_is_rejected():
    case = shared()
    program = build_program(case.plan, case.step, case.sync_groups)
    for rank, actions in program.actions.items():
        for i, action in enumerate(actions):
            with pytest.raises(ProgramError):
                check_program(
                    case.plan, case.step, case.sync_groups, replaced(program, rank, actions[:i] + actions[i + 1 :])
                )
            with pytest.raises(ProgramError, match="twice"):
                check_program(case.plan, case.step, case.sync_groups, replaced(program, rank, (*actions, action)))


def test_sums_in_opposite_orders_deadlock_and_the_error_names_each_rank():
    case = shared()
    program = build_program(case.plan, case.step, case.sync_groups)
    actions = list(program.actions[1])
    places = [i for i, action in enumerate(actions) if action.op == "sync"][:2]
    first, second = (case.sync_groups[actions[i].index].stages for i in places)
    assert first != second
    bare = [action for action in actions if action.op != "sync"]
    syncs = [action for action in actions if action.op == "sync"]
    mutant = replaced(program, 1, bare + syncs[::-1])
    for attempt in (
        lambda: check_program(case.plan, case.step, case.sync_groups, mutant),
        lambda: simulate(case.plan, mutant),
    ):
        with pytest.raises(DeadlockError, match=r"rank 0 waits at `sync \d`\nrank 1 waits at `sync \d`"):
            attempt()


def test_ranks_of_a_stage_that_disagree_deadlock():
    spec, plan = make_plan({LANGUAGE_MODEL: [[(0, 1)]]})
    step = make_step({LANGUAGE_MODEL: [[[0], [1]]]})
    groups = sync_groups(spec, plan)
    program = build_program(plan, step, groups)
    order = program.actions[0]
    assert [str(action) for action in order] == [
        f"{kind} language_model.r0.s0 mb{i}.c0" for i in range(2) for kind in ("fwd", "bwd")
    ]
    mutant = replaced(program, 1, (order[2], order[3], order[0], order[1]))
    with pytest.raises(DeadlockError):
        check_program(plan, step, groups, mutant)
    with pytest.raises(DeadlockError):
        simulate(plan, mutant)


def test_late_gradients_are_rejected():
    case = chain(2, 2)
    spec, plan = make_plan({LANGUAGE_MODEL: [[(0,)], [(1,)]]})
    step = make_step({LANGUAGE_MODEL: [[[0]], [[1]]]})
    program = build_program(plan, step, sync_groups(spec, plan))
    fwd, bwd, sync = program.actions[0]
    with pytest.raises(ProgramError, match="after the sum"):
        check_program(plan, step, sync_groups(spec, plan), replaced(program, 0, (fwd, sync, bwd)))
    with pytest.raises(ProgramError, match="before its forward"):
        check_program(plan, step, sync_groups(spec, plan), replaced(program, 0, (bwd, fwd, sync)))
    program = build_program(case.plan, case.step, case.sync_groups)
    recvs = [i for i, action in enumerate(program.actions[1]) if action.op == "recv"]
    actions = list(program.actions[1])
    actions[recvs[0]], actions[recvs[1]] = actions[recvs[1]], actions[recvs[0]]
    with pytest.raises(ProgramError, match="after the task that needs it"):
        check_program(case.plan, case.step, case.sync_groups, replaced(program, 1, actions))


def test_receives_follow_the_order_of_the_sends():
    # The encoder's microbatches hold the samples in the opposite order of the language model's.
    spec, plan = make_plan({"vision": [[(0,)]], LANGUAGE_MODEL: [[(1,)]]})
    step = make_step({"vision": [[[2], [1], [0]]], LANGUAGE_MODEL: [[[0], [1], [2]]]})
    program = build_program(plan, step, sync_groups(spec, plan))
    sends = [a.message for a in program.actions[0] if a.op == "send"]
    recvs = [a.message for a in program.actions[1] if a.op == "recv"]
    assert sends == recvs
    assert [message.source.microbatch for message in sends] == [0, 1, 2]
    actions = list(program.actions[1])
    places = [i for i, action in enumerate(actions) if action.op == "recv"]
    assert places == [0, 1, 2]
    actions[0], actions[1] = actions[1], actions[0]
    with pytest.raises(ProgramError, match="Receive in the order of the sends"):
        check_program(plan, step, sync_groups(spec, plan), replaced(program, 1, actions))


def test_idle_ranks_take_part_in_sums():
    spec, plan = make_plan({"vision": [[(0,)], [(1,)]], LANGUAGE_MODEL: [[(2,)]]})
    groups = sync_groups(spec, plan)
    step = make_step({"vision": [[[]], [[]]], LANGUAGE_MODEL: [[[0]]]})
    program = build_program(plan, step, groups)
    assert [str(a) for a in program.actions[0]] == ["sync 0"] == [str(a) for a in program.actions[1]]
    program = build_program(plan, step, groups, training=False)
    assert program.actions[0] == () and [a.op for a in program.actions[2]] == ["fwd"]


def test_text_forms():
    task = Task("fwd", "vision.tower", 0, 1, 3, 2)
    assert str(task) == "fwd vision.tower.r0.s1 mb3.c2"
    message = Message("act", task, Task("fwd", LANGUAGE_MODEL, 0, 0, 3))
    texts = [str(Action.run(task)), f"send {message}", f"recv {message}", "sync 3"]
    for text in texts:
        assert str(Action.parse(text)) == text
    assert message.crosses_boundary
    for wrong in ("fwd vision mb0", "send fwd", "sync x", "jump", "act fwd a.r0.s0 mb0.c0"):
        with pytest.raises(ValueError, match="is not a"):
            Action.parse(wrong)
    assert sorted(map(Action.parse, texts)) == sorted(sorted(map(Action.parse, texts)), reverse=False)
    for a, b in itertools.combinations(map(Action.parse, texts), 2):
        assert (a < b) != (b < a)


def test_sums_start_when_their_slowest_stage_is_done():
    case = shared()
    program = build_program(case.plan, case.step, case.sync_groups)
    (language,) = {i for i, g in enumerate(case.sync_groups) if g.stages[0][0] == LANGUAGE_MODEL}
    (vision,) = {i for i, g in enumerate(case.sync_groups) if g.stages[0][0] == "vision"}
    for rank, actions in program.actions.items():
        texts = [str(action) for action in actions]
        last = {name: texts.index(f"bwd {name}.r{rank}.s0 mb2.c0") for name in ("vision", LANGUAGE_MODEL)}
        assert last[LANGUAGE_MODEL] < texts.index(f"sync {language}") < last["vision"] < texts.index(f"sync {vision}")
