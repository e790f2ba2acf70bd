"""Whole row or whole segments: the way of cutting a row that takes less time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from numpy.typing import ArrayLike

from .blocks import BLOCK, Method
from .context import ContextAssignment, Mode, assign_rows
from .segments import assign_segments

_BACKWARD_FLOPS = 2.5  # of the forward pass of attention: five products where it has two
_BACKWARD_BYTES = 2.0  # keys and values are gathered again, and their gradients reduced


@dataclass(frozen=True)
class ContextCosts:
    """
    What a layer costs on one rank.

    Args:
        flops_per_pair (`float`): Operations of attention for each pair of a query and a key, forward, all heads.
        flops_per_token (`float`): Operations of the rest of the layer for each token, forward.
        bytes_per_token (`float`): Keys and values of a token.
        flops_per_ms (`float`): Operations that a rank does in a millisecond.
        bytes_per_ms (`float`): Bytes that a rank receives in a millisecond.
    """

    flops_per_pair: float
    flops_per_token: float
    bytes_per_token: float
    flops_per_ms: float
    bytes_per_ms: float

    @classmethod
    def of_layer(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_parameters: int,
        flops_per_ms: float,
        bytes_per_ms: float,
        bytes_per_value: int = 2,
    ) -> ContextCosts:
        """
        The costs of a layer from its sizes.

        Args:
            num_heads (`int`): Query heads of the rank.
            num_kv_heads (`int`): Heads of keys and values of the rank.
            head_dim (`int`): Width of a head.
            num_parameters (`int`): Weights of the layer's matrices that a token is multiplied with, on the rank.
            flops_per_ms (`float`): Operations that a rank does in a millisecond.
            bytes_per_ms (`float`): Bytes that a rank receives in a millisecond.
            bytes_per_value (`int`, *optional*, defaults to 2): Of keys and values.
        """
        kv_bytes = 2.0 * num_kv_heads * head_dim * bytes_per_value
        return cls(4.0 * num_heads * head_dim, 2.0 * num_parameters, kv_bytes, flops_per_ms, bytes_per_ms)

    def layer_ms(self, assignment: ContextAssignment) -> float:
        """
        Predicts the time of one layer, forward and backward, on the heaviest rank.

        What is gathered travels while attention computes, so of the two only the longer counts.
        """
        tokens = assignment.tokens_per_rank
        compute = float(assignment.work.max()) * assignment.block**2 * self.flops_per_pair / self.flops_per_ms
        received = (assignment.num_ranks - 1) * assignment.gathered.shape[1] * assignment.block
        gather = received * self.bytes_per_token / self.bytes_per_ms
        attention = max(compute, gather) + max(_BACKWARD_FLOPS * compute, _BACKWARD_BYTES * gather)
        return attention + 3 * tokens * self.flops_per_token / self.flops_per_ms


def assign_context(
    first: ArrayLike,
    last: ArrayLike,
    num_ranks: int,
    block: int = BLOCK,
    method: Method = "lpt",
    mode: Mode | Literal["auto"] = "row",
    segment_ids: ArrayLike | None = None,
    costs: ContextCosts | None = None,
    seed: int = 0,
) -> ContextAssignment:
    """
    Cuts a row of tokens over the ranks of context parallelism.

    All ranks that call it with the same arguments get the same answer.

    Args:
        first (array of shape `[num_tokens]`, integers): The first place that each token sees. Where a token sees
            places with holes between them, the first and the last one count.
        last (array of shape `[num_tokens]`, integers): The last place that each token sees; less than `first` for a
            token that sees nothing, such as padding.
        num_ranks (`int`): Ranks.
        block (`int`, *optional*, defaults to 128): Tokens of a block.
        method (`str`, *optional*, defaults to `"lpt"`): How the blocks of the row are handed out, see [`distribute`].
        mode (`str`, *optional*, defaults to `"row"`): `"row"` gathers the keys and values of the whole row,
            `"segments"` keeps segments whole where it can ([`assign_segments`]), `"auto"` takes what `costs` predict
            to be faster. Methods other than `"lpt"` concern whole rows only.
        segment_ids (array of shape `[num_tokens]`, integers, *optional*):
            The segment of each token, from 1, 0 for padding; for `"segments"` and `"auto"`.
        costs (`ContextCosts`, *optional*): Of a layer, for `"auto"`.
        seed (`int`, *optional*, defaults to 0): Of the method `"random"`.

    Raises:
        `ValueError`: For arguments that do not go together.
    """
    if mode not in ("row", "segments", "auto"):
        raise ValueError(f"`mode={mode!r}` is no way to cut a row. Use 'row', 'segments' or 'auto'.")
    if mode != "row" and segment_ids is None:
        raise ValueError(f"`mode={mode!r}` may reorder segments and doesn't know them. Pass `segment_ids`.")
    if mode == "auto" and costs is None:
        raise ValueError("`mode='auto'` compares times and has nothing to predict them with. Pass `costs`.")
    if mode == "segments" and method != "lpt":
        raise ValueError(f"`method={method!r}` hands out blocks, and whole segments are none. Use `mode='row'`.")
    if segment_ids is None or mode == "row":
        return assign_rows(first, last, num_ranks, block, method, seed)
    whole = assign_segments(first, last, segment_ids, num_ranks, block)
    if costs is None or mode == "segments":
        return whole
    return choose_faster(costs, assign_rows(first, last, num_ranks, block, method, seed), whole)


def choose_faster(costs: ContextCosts, *assignments: ContextAssignment) -> ContextAssignment:
    """The assignment whose layers are predicted to take least time; the first of equals."""
    return min(assignments, key=costs.layer_ms)
