"""Receives are posted one task early, and nothing else moves."""

from hypothesis import given, settings

from hf_mmparallel.schedule import Action, build_program, receive_ahead
from tests.schedule.builders import cases


def _actions(*lines: str) -> list[Action]:
    return [Action.parse(line) for line in lines]


def _act(microbatch: int) -> str:
    return f"recv act fwd lm.r0.s0 mb{microbatch}.c0 -> fwd lm.r0.s1 mb{microbatch}.c0"


def test_a_receive_stands_before_the_task_ahead_of_its_own():
    gradient = "recv grad bwd lm.r0.s2 mb0.c0 -> bwd lm.r0.s1 mb0.c0"
    before = [_act(0), "fwd lm.r0.s1 mb0.c0", _act(1), "fwd lm.r0.s1 mb1.c0", gradient, "bwd lm.r0.s1 mb0.c0"]
    after = [_act(0), _act(1), "fwd lm.r0.s1 mb0.c0", gradient, "fwd lm.r0.s1 mb1.c0", "bwd lm.r0.s1 mb0.c0"]
    assert [str(action) for action in receive_ahead(_actions(*before))] == after


def test_a_gradient_stays_behind_its_forward_and_is_not_overtaken():
    gradient = "recv grad bwd lm.r0.s2 mb0.c0 -> bwd lm.r0.s1 mb0.c0"
    before = [_act(0), "fwd lm.r0.s1 mb0.c0", gradient, _act(1), "bwd lm.r0.s1 mb0.c0", "fwd lm.r0.s1 mb1.c0"]
    assert [str(action) for action in receive_ahead(_actions(*before))] == before


@settings(max_examples=50)
@given(cases())
def test_only_receives_move_and_each_by_one_task_at_most(case):
    program = build_program(case.plan, case.step, case.sync_groups)
    for before in program.actions.values():
        after = receive_ahead(before)
        assert [a for a in after if a.op == "recv"] == [a for a in before if a.op == "recv"]
        assert [a for a in after if a.op != "recv"] == [a for a in before if a.op != "recv"]
        done: list[set] = []
        for row in (before, after):
            tasks = 0
            places = set()
            for action in row:
                tasks += action.task is not None
                if action.op == "recv":
                    places.add((action.message, tasks))
            done.append(places)
        earlier = dict(done[1])
        assert all(0 <= number - earlier[message] <= 1 for message, number in done[0])
        ran = set()
        for action in after:
            ran.add(action.task)
            if action.message is not None and action.op == "recv":
                assert action.message.target not in ran
                if action.message.kind == "grad":
                    assert Action.parse(str(action).split(" -> ")[1].replace("bwd", "fwd", 1)).task in ran
