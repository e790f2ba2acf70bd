"""One call of attention: its inputs, and what the definition gives for them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_mmparallel.kernels.bitfield_attention import BitfieldMask, reference_attention


@dataclass(frozen=True)
class Case:
    """Heads and features of a call."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    window: int = 0
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False

    def inputs(self, mask: BitfieldMask, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Queries, keys, values and sinks, if there are any, laid out as models give them."""
        (batch, num_queries), num_keys = mask.query_words.shape, mask.key_words.shape[1]
        device = mask.query_words.device
        query = torch.randn(batch, num_queries, self.heads, self.head_dim, dtype=dtype, device=device)
        key, value = torch.randn(2, batch, num_keys, self.kv_heads, self.head_dim, dtype=dtype, device=device)
        states = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        return states + ([torch.randn(self.heads, device=device)] if self.sinks else [])

    def definition(self, inputs: list[Tensor], grad: Tensor, mask: BitfieldMask) -> list[Tensor]:
        """Output, log-sum-exp and the gradients of the inputs by the definition, in the dtype of the inputs."""
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        sinks = inputs[3] if self.sinks else None
        out, lse = reference_attention(*inputs[:3], mask, self.scale, self.softcap, self.window, sinks)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad)]

    def exactly(self, inputs: list[Tensor], grad: Tensor, mask: BitfieldMask) -> tuple[list[Tensor], list[Tensor]]:
        """The definition in float64, and by what its parts are measured: the gradient of a sink sums over all rows."""
        exact = self.definition([tensor.double() for tensor in inputs], grad.double(), mask)
        sizes = list(exact)
        if self.sinks:  # rows of either sign
            weights = torch.exp(inputs[3].double()[None, :, None] - exact[1])
            sizes[5] = (weights * (exact[0] * grad).sum(-1).abs()).sum((0, 2))
        return exact, sizes
