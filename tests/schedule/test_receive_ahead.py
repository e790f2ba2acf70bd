"""Receives are posted one task early, and nothing else moves."""

from hypothesis import given, settings

from hf_mmparallel.schedule import Action, Task, build_program, receive_ahead
from tests.schedule.builders import cases


def test_a_receive_stands_before_the_task_ahead_of_its_own():
    first, second = (f"recv act fwd lm.r0.s0 mb{i}.c0 -> fwd lm.r0.s1 mb{i}.c0" for i in range(2))
    gradient = "recv grad bwd lm.r0.s2 mb0.c0 -> bwd lm.r0.s1 mb0.c0"
    before = [first, "fwd lm.r0.s1 mb0.c0", second, "fwd lm.r0.s1 mb1.c0", gradient, "bwd lm.r0.s1 mb0.c0"]
    after = [first, second, "fwd lm.r0.s1 mb0.c0", gradient, "fwd lm.r0.s1 mb1.c0", "bwd lm.r0.s1 mb0.c0"]
    assert [str(action) for action in receive_ahead(list(map(Action.parse, before)))] == after


@settings(max_examples=50)
@given(cases())
def test_only_receives_move_and_each_by_one_task_at_most(case):
    program = build_program(case.plan, case.step, case.sync_groups)
    for before in program.actions.values():
        after = receive_ahead(before)
        assert [a for a in after if a.op == "recv"] == [a for a in before if a.op == "recv"]
        assert [a for a in after if a.op != "recv"] == [a for a in before if a.op != "recv"]
        num_tasks = []  # ahead of each receive
        for row in (before, after):
            places = (index for index, action in enumerate(row) if action.op == "recv")
            num_tasks.append([sum(action.task is not None for action in row[:place]) for place in places])
        assert all(0 <= late - early <= 1 for late, early in zip(*num_tasks, strict=True))
        ran: set[Task | None] = set()
        for action in after:
            ran.add(action.task)
            if action.message is not None and action.op == "recv":
                target = action.message.target
                assert target not in ran
                assert action.message.kind == "act" or Task("fwd", *target.key) in ran, "behind its forward"
