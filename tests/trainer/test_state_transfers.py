"""Whatever the cuts of two plans, each rank ends with its part of every parameter and of its state."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from recovery_memory import recovery_memory

from hf_mmparallel.plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlan,
    ModuleSpec,
    ParallelPlan,
    ParameterSpec,
    ShardingSettings,
    Stage,
    parameter_shards,
)
from hf_mmparallel.resilience.state_copies import LostStateError, PlacedPlan, Slice
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
def plans_of_nodes(draw: st.DrawFn) -> PlacedPlan:
    """Pairs of copies in one or two stages of nodes of four ranks, which share optimizer state or weights."""
    stages: list[list[Stage]] = []
    for node in range(draw(st.integers(1, 4))):
        ranks = range(4 * node, 4 * node + 4)
        begins = not stages or len(stages[-1]) == 4 or stages[-1][-1].layers[1] == 3
        layers = draw(st.sampled_from([(0, 3), (0, 1)])) if begins else (1, 3)
        own = [Stage(layers, (tuple(ranks[:2]),)), Stage(layers, (tuple(ranks[2:]),))]
        stages = [*stages, own] if begins else [*stages[:-1], stages[-1] + own]
    if stages[-1][-1].layers[1] == 1:
        stages[-1] = [replace(stage, layers=(0, 3)) for stage in stages[-1]]
    replicas = tuple(tuple(pair[copy::2]) for pair in stages for copy in range(2))
    module = ModulePlan(replicas, sharding=ShardingSettings(draw(st.sampled_from([1, 2, 3])), 2))
    count = sum(len(pair) for pair in stages) // 2
    nodes = draw(st.permutations(range(4)))[:count]
    return PlacedPlan(ParallelPlan({LANGUAGE_MODEL: module}), tuple(4 * node + n for node in nodes for n in range(4)))


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
    if part.flat is not None:
        values = values.reshape(-1)[slice(*part.flat)]
    return HeldParameter(values, 1, {"step": torch.tensor(3.0), "exp_avg": 2 * values, "plain": 7})


def weights_beside(placed: PlacedPlan, member: int) -> int:
    """Bytes of the weights that a member has whole, of which it updates a half."""
    module = placed.plan.modules[LANGUAGE_MODEL]
    if module.sharding.zero_stage not in (1, 2) or member not in placed.members:
        return 0
    rank, count = placed.members.index(member), 0
    for _, _, stage in module.stages():
        for parameter in PARAMETERS if rank in stage.all_ranks else ():
            if stage.has_layer(parameter.layer):
                whole = parameter.num_elements // (1 if parameter.tp_dim is None else 2)
                index = next(s.zero_cut for s in parameter_shards(SPEC, placed.plan)[parameter.name].updated_by(rank))
                assert index is not None
                start, stop = index.bounds(whole)
                count += whole - (stop - start)
    return 4 * count


def parts_of(placed: PlacedPlan) -> dict[int, dict[str, HeldParameter]]:
    """Member -> parameter -> what it has under a plan."""
    return {
        member: {
            name: part_of(name, Slice.on_rank(SPEC.parameters[name], shards, rank))
            for name, shards in parameter_shards(SPEC, placed.plan).items()
            if shards.updated_by(rank)
        }
        for rank, member in enumerate(placed.members)
    }


def pairs(plans: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(plans, plans)


@settings(max_examples=300)
@given(pairs(placed_plans()) | pairs(plans_of_nodes()))
def test_every_member_gets_its_parts_or_somebody_is_missed(plans: tuple[PlacedPlan, PlacedPlan]):
    before, after = plans
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
        beside = [weights_beside(plan, member) for plan in (before, after)]
        for peaks, copied in zip(memory, (0, moved[member]), strict=True):  # weights and two moments in float32
            assert peaks[member] == max(12 * (was + copied) + beside[0], 12 * will_be + beside[1])
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
