"""Traits of an engine that executes layers, where engines differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .devices import Hardware


@dataclass(frozen=True)
class Engine:
    """How layers run. The defaults describe hf_mmparallel; others validate the cost model on published runs."""

    # norms, rotary embeddings and activation functions are one kernel each (`torch.compile` or custom kernels), and
    # matrix products accumulate gradients in place
    fused: bool = False
    fused_loss: bool = False
    # matrices with the same input all-reduce its gradient once over the tp group, and the loss is computed on
    # vocabulary shards
    merged_sums: bool = False
    hidden_sums: bool = False  # tensor-parallel all-reduces overlap with matrix products
    split_norms: bool = False  # the tp group splits the tokens of norms and residuals (sequence parallelism)
    blocking_messages: bool = False  # stages are idle while they send and receive
    # point-to-point, inside a node and between nodes; by default that of the links
    message_gb_per_s: tuple[float, float] | None = None
    wide_sums: bool = True  # ZeRO 2 and 3 reduce gradients in float32 (`reduce_dtype`), not in the parameters' dtype
    early_sums: bool = True  # sums of ZeRO 0 and 1 start bucket by bucket in the last backward, not after it

    def message_bytes_per_ms(self, device: Hardware, ranks: Sequence[int]) -> float:
        """Bandwidth between two stages on `ranks`, for each rank of the smaller stage."""
        rate = device.message_bytes_per_ms(ranks)
        if self.message_gb_per_s is None:
            return rate
        crosses = len({rank // device.node_size for rank in ranks}) > 1
        return min(rate, 1e6 * self.message_gb_per_s[crosses])


OURS = Engine()
