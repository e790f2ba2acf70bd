"""The numbers of ranks that accelerate has."""

from __future__ import annotations

from accelerate.state import AcceleratorState, PartialState


def set_ranks(rank: int, size: int, local_rank: int) -> None:
    """Tells accelerate the numbers of this rank, of all and on its host, which it has read from the launcher."""
    for state in (PartialState, AcceleratorState):
        shared = state._shared_state
        if "num_processes" in shared:
            shared["num_processes"], shared["process_index"] = size, rank
            shared["local_process_index"] = local_rank
