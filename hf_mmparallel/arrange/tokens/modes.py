"""The choice between whole-row and whole-segment assignment of a row, by predicted time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from numpy.typing import ArrayLike

from .assignment import ContextAssignment, Mode, assign_rows
from .blocks import BLOCK, Method
from .segments import assign_segments

_BACKWARD_FLOPS = 2.5  # of the forward: five matrix products instead of two
_BACKWARD_BYTES = 2.0  # keys and values are gathered again, and their gradients reduced


@dataclass(frozen=True)
class ContextCosts:
    """Costs of a layer on one rank."""

    flops_per_pair: float  # forward FLOPs of attention per pair of query and key, all heads
    flops_per_token: float  # forward FLOPs of the rest of the layer
    bytes_per_token: float  # of keys and values
    flops_per_ms: float  # of a rank
    bytes_per_ms: float  # that a rank receives

    @classmethod
    def of_layer(
        cls,
        num_heads: int,  # query heads
        num_kv_heads: int,
        head_dim: int,
        num_parameters: int,  # elements of the matrices that a token is multiplied with
        flops_per_ms: float,
        bytes_per_ms: float,
        bytes_per_value: int = 2,  # of keys and values
    ) -> ContextCosts:
        """Computes the costs of a layer from its sizes on the rank."""
        kv_bytes = 2.0 * num_kv_heads * head_dim * bytes_per_value
        return cls(4.0 * num_heads * head_dim, 2.0 * num_parameters, kv_bytes, flops_per_ms, bytes_per_ms)

    def layer_ms(self, assignment: ContextAssignment) -> float:
        """
        Predicts the forward and backward time of one layer on the rank with the most work.

        The gather overlaps with attention, so that only the longer of the two counts.
        """
        tokens = assignment.tokens_per_rank
        compute = float(assignment.work.max()) * assignment.block**2 * self.flops_per_pair / self.flops_per_ms
        received = (assignment.num_ranks - 1) * assignment.gathered.shape[1] * assignment.block
        gather = received * self.bytes_per_token / self.bytes_per_ms
        attention = max(compute, gather) + max(_BACKWARD_FLOPS * compute, _BACKWARD_BYTES * gather)
        return attention + 3 * tokens * self.flops_per_token / self.flops_per_ms


def assign_context(
    first: ArrayLike,  # [num_tokens] the first position that each token sees; gaps up to the last one count as seen
    last: ArrayLike,  # [num_tokens] the last one; less than `first` for a token that sees nothing, such as padding
    num_ranks: int,
    block: int = BLOCK,  # tokens of a block
    method: Method = "lpt",  # see `distribute`; other than "lpt" for whole rows only
    mode: Mode | Literal["auto"] = "row",
    segment_ids: ArrayLike | None = None,  # [num_tokens] from 1, 0 for padding; for "segments" and "auto"
    costs: ContextCosts | None = None,  # for "auto"
    seed: int = 0,  # of the method "random"
) -> ContextAssignment:
    """
    Assigns a row of tokens to context-parallel ranks, with the same result on all ranks for the same arguments.

    Mode `"row"` gathers the keys and values of the whole row, `"segments"` keeps segments whole if possible
    ([`assign_segments`]), `"auto"` uses the faster one by `costs`. Raises `ValueError` for arguments that contradict
    each other.
    """
    if mode not in ("row", "segments", "auto"):
        raise ValueError(f"`mode={mode!r}` is unknown. Use 'row', 'segments' or 'auto'.")
    if mode != "row" and segment_ids is None:
        raise ValueError(f"`mode={mode!r}` may reorder segments and needs to know them. Pass `segment_ids`.")
    if mode == "auto" and costs is None:
        raise ValueError("`mode='auto'` compares times and needs costs to predict them. Pass `costs`.")
    if mode == "segments" and method != "lpt":
        raise ValueError(f"`method={method!r}` distributes blocks, not whole segments. Use `mode='row'`.")
    if segment_ids is None or mode == "row":
        return assign_rows(first, last, num_ranks, block, method, seed)
    whole = assign_segments(first, last, segment_ids, num_ranks, block)
    if costs is None or mode == "segments":
        return whole
    return choose_faster(costs, assign_rows(first, last, num_ranks, block, method, seed), whole)


def choose_faster(costs: ContextCosts, *assignments: ContextAssignment) -> ContextAssignment:
    """The assignment with the fastest predicted layers; the first of equals."""
    return min(assignments, key=costs.layer_ms)
