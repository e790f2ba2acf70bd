"""What an engine does with a layer besides its matrix products, where engines differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .devices import Hardware


@dataclass(frozen=True)
class Engine:
    """
    How an engine runs layers. The defaults are what hf_mmparallel does; the others are there to hold the model of
    costs against the published runs of other engines.

    Args:
        fused (`bool`, *optional*, defaults to `False`):
            Whether norms, rotary embeddings and activation functions are one kernel each, as under `torch.compile` or
            in kernels of their own, and not the steps of the model's code; and products add up gradients themselves.
        fused_loss (`bool`, *optional*, defaults to `False`): The same of the loss.
        merged_sums (`bool`, *optional*, defaults to `False`):
            Whether matrices that read the same input sum the gradient of it once over tensor-parallel ranks, and the
            loss is computed on parts of the vocabulary.
        hidden_sums (`bool`, *optional*, defaults to `False`):
            Whether tensor-parallel sums travel while matrix products run.
        split_norms (`bool`, *optional*, defaults to `False`):
            Whether tensor-parallel ranks share the tokens of norms and residuals (sequence parallelism).
        blocking_messages (`bool`, *optional*, defaults to `False`):
            Whether stages stand still while they send and receive.
        message_gb_per_s (`tuple[float, float]`, *optional*):
            Rates of messages of stages in a node and between nodes, where they are not those of the links.
        sharded_optimizer (`bool`, *optional*, defaults to `False`):
            Whether each replica steps its share of the parameters (ZeRO).
        wide_sums (`bool`, *optional*, defaults to `False`):
            Whether FSDP adds up gradients in float32 (`reduce_dtype`), not in the dtype of the parameters.
    """

    fused: bool = False
    fused_loss: bool = False
    merged_sums: bool = False
    hidden_sums: bool = False
    split_norms: bool = False
    blocking_messages: bool = False
    message_gb_per_s: tuple[float, float] | None = None
    sharded_optimizer: bool = False
    wide_sums: bool = False

    def message_bytes_per_ms(self, device: Hardware, ranks: Sequence[int]) -> float:
        """Of a message between two stages on `ranks`, for each rank of the smaller one."""
        rate = device.message_bytes_per_ms(ranks)
        if self.message_gb_per_s is None:
            return rate
        crosses = len({rank // device.node_size for rank in ranks}) > 1
        return min(rate, 1e6 * self.message_gb_per_s[crosses])


OURS = Engine()
