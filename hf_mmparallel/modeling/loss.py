"""The model's loss as a sum over target tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._device import to_device
from .lazy_logits import of_tokens

IGNORE_INDEX = -100
"""Label of tokens that are no targets, as in transformers."""


def token_loss(
    model: PreTrainedModel, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, shifted: bool = False
) -> tuple[Tensor, Tensor]:
    """
    Sums the model's loss over target tokens, for sums over microbatches and replicas: the sum in float32 and the
    number of target tokens in int64, both scalars, of logits `[batch, sequence, vocabulary]` and labels `[batch,
    sequence]`. Labels in host memory are counted there. Of lazy logits those of the targets alone are computed.
    """
    # with `shifted`, label `i` is already the target of position `i` of `logits` (`shift_labels`)
    targets = labels if shifted else nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    tokens = (targets.flatten() != IGNORE_INDEX).nonzero().flatten()
    num_tokens = torch.tensor(len(tokens))
    targets, tokens = to_device((targets.flatten()[tokens], tokens), logits.device)
    logits, targets = of_tokens(logits, tokens).unsqueeze(0), targets.unsqueeze(0)
    if label_smoothing:  # weight of the uniform distribution in the target
        loss = _smoothed_loss(logits, targets, label_smoothing)
    else:
        loss = model.loss_function(
            logits=logits, labels=None, vocab_size=logits.shape[-1], shift_labels=targets, num_items_in_batch=1
        )
    return loss, num_tokens


def _smoothed_loss(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    return nn.functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=label_smoothing,
    ).to(torch.float32)
