"""What an engine does with a layer besides its matrix products, where engines differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """
    How an engine runs layers. The defaults are what hf_mmparallel does; the others are there to hold the model of
    costs against the published runs of other engines.

    Args:
        fused (`bool`, *optional*, defaults to `False`):
            Whether norms, rotary embeddings, activation functions and the loss are one kernel each, as under
            `torch.compile` or in kernels of their own, and not the steps of the model's code.
        merged_sums (`bool`, *optional*, defaults to `False`):
            Whether matrices that read the same input sum the gradient of it once over tensor-parallel ranks, and the
            loss is computed on parts of the vocabulary.
        hidden_sums (`bool`, *optional*, defaults to `False`):
            Whether tensor-parallel sums travel while matrix products run.
        blocking_messages (`bool`, *optional*, defaults to `False`):
            Whether stages stand still while they send and receive.
        sharded_optimizer (`bool`, *optional*, defaults to `False`):
            Whether each replica steps its share of the parameters (ZeRO).
    """

    fused: bool = False
    merged_sums: bool = False
    hidden_sums: bool = False
    blocking_messages: bool = False
    sharded_optimizer: bool = False


OURS = Engine()
