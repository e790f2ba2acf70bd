"""The order in which the layers of a stage are gathered, computed, freed and summed."""

from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.schedule import REST, step_passes
from hf_mmparallel.schedule.kinds import KINDS, WHOLE_PASSES, TaskKind

FORWARD, BACKWARD = WHOLE_PASSES
INPUT, WEIGHT = (kind for kind in KINDS.values() if kind.of == "split")


def test_a_forward_and_a_backward_of_three_layers():
    forward, backward = step_passes([FORWARD, BACKWARD], 3)
    assert ", ".join(map(str, forward)) == (
        "gather rest, gather 0, gather 1, compute 0, free 0, gather 2, compute 1, compute 2"
    )
    assert ", ".join(map(str, backward)) == (
        "compute 2, free 2, gather 0, sum 2, compute 1, free 1, sum 1, compute 0, free 0, sum 0, sum rest, free rest"
    )


def test_gradients_of_a_split_backward_are_summed_with_those_of_weights():
    passes = step_passes([FORWARD, INPUT, FORWARD, INPUT, WEIGHT, WEIGHT], 3, num_runs=2)
    first, *_, last = ([str(action) for action in actions] for actions in passes[1::2])
    assert not any(action.startswith("sum") for action in first)
    assert last == ["compute 2", "sum 2", "compute 1", "sum 1", "compute 0", "sum 0", "sum rest"]
    frees = [sum(str(action) == "free rest" for action in actions) for actions in passes]
    assert frees == [0, 0, 0, 1, 0, 0]  # weights need no weights


def test_layers_without_a_backward_are_not_gathered_for_it():
    _, backward, forward, last = step_passes([FORWARD, BACKWARD, FORWARD, BACKWARD], 4, first_backward=2)
    assert ", ".join(map(str, backward)) == "compute 3, free 3, sum 3, compute 2, free 2, sum 2, sum rest"
    assert ", ".join(map(str, forward[:6])) == "gather 0, gather 1, compute 0, free 0, gather 2, compute 1"
    nothing = step_passes([FORWARD, BACKWARD], 4, first_backward=4)[1]
    assert ", ".join(map(str, nothing)) == "sum rest, free rest"
    kept = step_passes([FORWARD, BACKWARD], 4, reshards=False, first_backward=3)[1]
    assert ", ".join(map(str, kept)) == "free 0, free 1, free 2, compute 3, free 3, sum 3, sum rest, free rest"


@st.composite
def kinds(draw, backwards: tuple[TaskKind, ...] = (BACKWARD, INPUT)) -> list[TaskKind]:
    """The passes of a stage: each backward after its forward, and each weight gradient after that of the input."""
    result, left = [], [0, 0]
    for _ in range(draw(st.integers(0, 10))):
        place = draw(st.integers(0, 2))
        if place == 1 and left[0]:
            result.append(draw(st.sampled_from(backwards)))
            left = [left[0] - 1, left[1] + (result[-1] is INPUT)]
        elif place == 2 and left[1]:
            result.append(WEIGHT)
            left[1] -= 1
        else:
            result.append(FORWARD)
            left[0] += 1
    return result + left[0] * [BACKWARD] + left[1] * [WEIGHT]


@given(kinds(), st.integers(1, 5), st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 5))
def test_what_is_computed_is_gathered_and_at_most_two_layers_are(
    kinds, num_layers, num_runs, gathers, reshards, first_backward
):
    gathered: set[int] = set()
    count = 0
    passes = step_passes(kinds, num_layers, num_runs, gathers, reshards, first_backward)
    for kind, actions in zip(kinds, passes, strict=True):
        runs = num_runs if kind is not WEIGHT else min(num_runs, 1)
        order = [(run, layer) for run in range(runs) for layer in range(num_layers)]
        computed = [(action.run, action.layer) for action in actions if action.op == "compute"]
        backward = [(run, layer) for run, layer in order[::-1] if layer >= first_backward]
        assert computed == (order if kind is FORWARD else backward)
        summed: list[int] = []
        done: list[int] = []
        for action in actions:
            if action.op == "gather":
                assert action.layer not in gathered
                gathered.add(action.layer)
                count += 1
            elif action.op == "free":
                gathered.remove(action.layer)
            elif action.op == "sum":
                assert action.layer == REST or action.layer in done
                summed.append(action.layer)
            else:
                assert not gathers or kind is WEIGHT or {REST, action.layer} <= gathered
                done.append(action.layer)
            assert len(gathered - {REST}) <= (2 if reshards else num_layers)
        assert summed == ([*(layer for _, layer in computed), REST] if kind.adds_gradients else [])
    assert not gathered
    assert reshards or not gathers or not kinds or count == num_layers * bool(num_runs) + 1


@given(kinds((BACKWARD,)), st.integers(2, 5))
def test_the_two_layers_with_which_the_next_pass_begins_are_gathered_once(kinds, num_layers):
    passes = step_passes(kinds, num_layers)
    count = sum(action.op == "gather" and action.layer != REST for actions in passes for action in actions)
    turns = sum(a != b or num_layers == 2 for a, b in zip(kinds, kinds[1:], strict=False))
    assert count == num_layers * len(kinds) - 2 * turns
