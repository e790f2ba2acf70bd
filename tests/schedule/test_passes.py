"""The order in which the layers of a stage are gathered, computed, freed and summed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.schedule import REST, step_passes


def test_a_forward_and_a_backward_of_three_layers():
    forward, backward = step_passes(["fwd", "bwd"], 3)
    assert ", ".join(map(str, forward)) == (
        "gather rest, gather 0, gather 1, compute 0, free 0, gather 2, compute 1, free 1, compute 2"
    )
    assert ", ".join(map(str, backward)) == (
        "gather 1, compute 2, free 2, gather 0, sum 2, compute 1, free 1, sum 1, compute 0, free 0, sum 0, sum rest, "
        "free rest"
    )


@st.composite
def kinds(draw) -> list[str]:
    """The passes of a stage: each backward after its forward."""
    result, in_flight = [], 0
    for _ in range(draw(st.integers(0, 10))):
        back = bool(in_flight) and draw(st.booleans())
        in_flight += -1 if back else 1
        result.append("bwd" if back else "fwd")
    return result + in_flight * ["bwd"]


@given(kinds(), st.integers(1, 5), st.integers(1, 2), st.booleans(), st.booleans())
def test_what_is_computed_is_gathered_and_at_most_two_layers_are(kinds, num_layers, num_runs, gathers, reshards):
    gathered: set[int] = set()
    count = 0
    for kind, actions in zip(kinds, step_passes(kinds, num_layers, num_runs, gathers, reshards), strict=True):
        order = [(run, layer) for run in range(num_runs) for layer in range(num_layers)]
        computed = [(action.run, action.layer) for action in actions if action.op == "compute"]
        assert computed == (order if kind == "fwd" else order[::-1])
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
                assert not gathers or {REST, action.layer} <= gathered
                done.append(action.layer)
            assert len(gathered - {REST}) <= (2 if reshards else num_layers)
        assert summed == ([] if kind == "fwd" else [*(layer for _, layer in computed), REST])
    assert not gathered
    assert reshards or not gathers or not kinds or count == num_layers + 1


@given(kinds(), st.integers(2, 5))
def test_a_layer_with_which_the_next_pass_begins_is_gathered_once(kinds, num_layers):
    passes = step_passes(kinds, num_layers)
    count = sum(action.op == "gather" and action.layer != REST for actions in passes for action in actions)
    ends = {"fwd": (0, num_layers - 1), "bwd": (num_layers - 1, 0)}
    kept = sum(ends[a][1] == ends[b][0] for a, b in zip(kinds, kinds[1:], strict=False))
    assert count == num_layers * len(kinds) - kept
