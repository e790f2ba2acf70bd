"""Traits of an engine that executes layers, where engines differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .devices import Hardware


@dataclass(frozen=True)
class Engine:
    """
    How an engine executes layers. The defaults describe hf_mmparallel; other values serve to validate the cost model
    against published runs of other engines.

    Args:
        fused (`bool`, *optional*, defaults to `False`):
            Whether norms, rotary embeddings and activation functions are one kernel each (`torch.compile` or custom
            kernels) instead of the operations of the model's code, and matrix products accumulate gradients in place.
        fused_loss (`bool`, *optional*, defaults to `False`): Whether the loss is a fused kernel.
        merged_sums (`bool`, *optional*, defaults to `False`):
            Whether matrices with the same input all-reduce its gradient once over the tp group, and the loss is
            computed on vocabulary shards.
        hidden_sums (`bool`, *optional*, defaults to `False`):
            Whether tensor-parallel all-reduces overlap with matrix products.
        split_norms (`bool`, *optional*, defaults to `False`):
            Whether the tp group splits the tokens of norms and residuals (sequence parallelism).
        blocking_messages (`bool`, *optional*, defaults to `False`):
            Whether stages are idle while they send and receive.
        message_gb_per_s (`tuple[float, float]`, *optional*):
            Point-to-point bandwidth inside a node and between nodes; `None` for that of the links.
        wide_sums (`bool`, *optional*, defaults to `True`):
            Whether ZeRO 2 and 3 reduce gradients in float32 (`reduce_dtype`) instead of the dtype of the parameters.
        early_sums (`bool`, *optional*, defaults to `True`):
            Whether the gradient sums of ZeRO 0 and 1 start bucket by bucket in the last backward, instead of after it.
    """

    fused: bool = False
    fused_loss: bool = False
    merged_sums: bool = False
    hidden_sums: bool = False
    split_norms: bool = False
    blocking_messages: bool = False
    message_gb_per_s: tuple[float, float] | None = None
    wide_sums: bool = True
    early_sums: bool = True

    def message_bytes_per_ms(self, device: Hardware, ranks: Sequence[int]) -> float:
        """Bandwidth between two stages on `ranks`, for each rank of the smaller stage."""
        rate = device.message_bytes_per_ms(ranks)
        if self.message_gb_per_s is None:
            return rate
        crosses = len({rank // device.node_size for rank in ranks}) > 1
        return min(rate, 1e6 * self.message_gb_per_s[crosses])


OURS = Engine()
