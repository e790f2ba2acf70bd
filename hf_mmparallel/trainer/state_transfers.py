"""What ranks send each other when a plan follows another, in the form of what each of them holds."""

from __future__ import annotations

from collections.abc import Mapping

from ..plan import ModelSpec, ParameterSpec, parameter_shards
from ..resilience.state_copies import PlacedPlan, Slice, state_copies
from ..runtime.held_state import Transfer
from ..runtime.local_shards import Region


def state_transfers(spec: ModelSpec, before: PlacedPlan, after: PlacedPlan) -> list[Transfer]:
    """
    Returns what ranks send each other when a plan follows another, by their ranks in the new one; raises
    [`LostStateError`] if no process that is left holds a part.
    """
    held, needed = _parts(spec, before), _parts(spec, after)
    copies = state_copies(spec, before, after).copies
    wanted = [(copy.parameter, copy.source, copy.target, copy.slice) for copy in copies]
    # a rank whose part of a parameter changes keeps what its old part and the new one have in common
    for name, of_members in needed.items():
        for member, part in of_members.items():
            own = held[name].get(member, part)
            common = None if own == part else own.common(part)
            if common is not None:
                wanted.append((name, member, member, common))
    rank_of = {member: rank for rank, member in enumerate(after.members)}
    transfers = []
    for name, source, target, elements in wanted:
        parameter = spec.parameters[name]
        taken, given = (
            _region(parameter, elements, held[name][source]),
            _region(parameter, elements, needed[name][target]),
        )
        transfers.append(Transfer(name, rank_of[source], rank_of[target], taken, given))
    return transfers


def _parts(spec: ModelSpec, placed: PlacedPlan) -> Mapping[str, Mapping[int, Slice]]:
    """Parameter -> member -> all that it has of it."""
    return {
        name: {
            placed.members[rank]: Slice.on_rank(spec.parameters[name], shards, rank)
            for rank in {rank for shard in shards.shards for rank in shard.holders}
        }
        for name, shards in parameter_shards(spec, placed.plan).items()
    }


def _region(parameter: ParameterSpec, elements: Slice, part: Slice) -> Region | None:
    """Where elements lie in a part of a parameter; `None` if they are all of it."""
    if elements == part:
        return None
    assert elements.dim is not None
    size = parameter.shape[elements.dim] // len(elements.ranges)
    first, end = part.ranges[0] if part.ranges else (0, size)
    start, stop = elements.ranges[0]
    return Region(elements.dim, start - first, stop - first, end - first, len(elements.ranges))
