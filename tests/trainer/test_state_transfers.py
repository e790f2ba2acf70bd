"""Whatever the cuts of two plans, each rank ends with its part of every parameter and of its state."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlan,
    ModuleSpec,
    ParallelPlan,
    ParameterSpec,
    Stage,
    parameter_shards,
)
from hf_mmparallel.resilience.state_copies import LostStateError, PlacedPlan, Slice, recovery_memory
from hf_mmparallel.runtime.held_state import HeldParameter
from hf_mmparallel.trainer.recovery_plan import state_transfers

PARAMETERS = (
    ParameterSpec("rows", (12, 2), 0, tp_dim=0),
    ParameterSpec("columns", (2, 24), 1, tp_dim=1, tp_blocks=2),
    ParameterSpec("experts", (3, 24, 2), 1, tp_dim=1),
    ParameterSpec("norm", (5,), 2, tp_dim=None),
)
SPEC = ModelSpec({LANGUAGE_MODEL: ModuleSpec(LANGUAGE_MODEL, "layers", 3, 12, 12, 12, 24, PARAMETERS)})


@st.composite
def placed_plans(draw: st.DrawFn) -> PlacedPlan:
    """Copies in one or two stages with tp groups of any size, played by the first of 16 processes in some order."""
    first, replicas = 0, []
    while not replicas or (first <= 8 and draw(st.booleans())):
        stages, ranges = [], [(0, 3)] if draw(st.booleans()) else [(0, 1), (1, 3)]
        for layers in ranges:
            size = draw(st.sampled_from([1, 2, 3, 4]))
            stages.append(Stage(layers, (tuple(range(first, first + size)),)))
            first += size
        replicas.append(tuple(stages))
    plan = ParallelPlan({LANGUAGE_MODEL: ModulePlan(tuple(replicas))})
    return PlacedPlan(plan, tuple(draw(st.permutations(range(16)))[:first]))


def part_of(name: str, part: Slice) -> HeldParameter:
    """The values of a part: the number of each element, and twice that as its state."""
    parameter = SPEC.parameters[name]
    values = torch.arange(float(parameter.num_elements)).view(parameter.shape)
    if part.dim is not None:
        values = torch.cat([values.narrow(part.dim, a, b - a) for a, b in part.ranges], part.dim)
    return HeldParameter(values, 1, {"step": torch.tensor(3.0), "exp_avg": 2 * values, "plain": 7})


def parts_of(placed: PlacedPlan) -> dict[int, dict[str, HeldParameter]]:
    """Member -> parameter -> what it has under a plan."""
    return {
        member: {
            name: part_of(name, Slice.on_rank(SPEC.parameters[name], shards, rank))
            for name, shards in parameter_shards(SPEC, placed.plan).items()
            if shards.on_rank(rank)
        }
        for rank, member in enumerate(placed.members)
    }


@settings(max_examples=200)
@given(placed_plans(), placed_plans())
def test_every_member_gets_its_parts_or_somebody_is_missed(before: PlacedPlan, after: PlacedPlan):
    held = parts_of(before)
    pieces: dict[tuple[int, str], list] = {}
    try:
        transfers = state_transfers(SPEC, before, after)
    except LostStateError:
        event("lost")
        assert not set(before.members) <= set(after.members)
        return
    moved = dict.fromkeys(after.members, 0)
    for name, source, target, taken, given_to in transfers:
        part = held[after.members[source]][name].region(name, taken)
        pieces.setdefault((after.members[target], name), []).append((given_to, part))
        for rank in {target, source} if source != target and taken is not None else {target}:
            moved[after.members[rank]] += part.values.numel()
        assert (source == target) <= (taken is not None or given_to is not None), "what does not change stays there"
    memory = [recovery_memory(SPEC, before, after, window_bytes) for window_bytes in (0.0, math.inf)]
    for member, of_member in parts_of(after).items():
        was, will_be = (sum(p.values.numel() for p in parts.values()) for parts in (held.get(member, {}), of_member))
        for peaks, copied in zip(memory, (0, moved[member]), strict=True):  # weights and two moments in float32
            assert peaks[member] == 12 * max(was + copied, will_be)
        for name, wanted in of_member.items():
            found = pieces.get((member, name))
            got = held[member][name] if found is None else HeldParameter.join(found)
            assert torch.equal(got.values, wanted.values)
            assert torch.equal(got.state["exp_avg"], wanted.state["exp_avg"])
            assert (got.group, float(got.state["step"]), got.state["plain"]) == (1, 3.0, 7)


def test_state_that_can_not_be_cut_is_refused():
    held = HeldParameter(torch.zeros(4, 2), 0, {"exp_avg_sq_row": torch.zeros(4)})
    one = PlacedPlan(ParallelPlan({LANGUAGE_MODEL: ModulePlan(((Stage((0, 3), ((0,),)),),))}), (0,))
    two = PlacedPlan(ParallelPlan({LANGUAGE_MODEL: ModulePlan(((Stage((0, 3), ((0, 1),)),),))}), (0, 1))
    taken = {transfer.name: transfer.taken for transfer in state_transfers(SPEC, one, two)}
    assert taken["norm"] is None
    with pytest.raises(ValueError, match="`exp_avg_sq_row` of `rows` has shape .* Use tp groups of one size"):
        held.region("rows", taken["rows"])
