"""The model's loss as a sum over target tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .._device import to_device
from ..plan import MAX_LOGITS
from .lazy_logits import of_tokens, whole_logits

IGNORE_INDEX = -100
"""Label of tokens that are no targets, as in transformers."""


def num_target_tokens(batch: Mapping[str, Any]) -> int:
    shifted, labels = batch.get("shift_labels"), batch.get("labels")
    if shifted is None and labels is None:
        return 0
    targets = labels[..., 1:] if shifted is None else shifted  # type: ignore[index]
    return int((targets != IGNORE_INDEX).sum())


def token_loss(
    model: PreTrainedModel, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, shifted: bool = False
) -> tuple[Tensor, Tensor]:
    """
    Sums the model's loss over target tokens, for sums over microbatches and replicas: the sum in float32 and the
    number of target tokens in int64, both scalars, of logits `[batch, sequence, vocabulary]` and labels `[batch,
    sequence]`. Labels in host memory are counted there. Of lazy logits those of the targets alone are computed.
    """
    logits, targets = of_targets(logits, labels, shifted)
    num_tokens = torch.tensor(len(targets))
    logits, targets = logits.unsqueeze(0), targets.unsqueeze(0)
    if label_smoothing:  # weight of the uniform distribution in the target
        loss = _smoothed_loss(logits, targets, label_smoothing)
    else:
        loss = model.loss_function(
            logits=logits, labels=None, vocab_size=logits.shape[-1], shift_labels=targets, num_items_in_batch=1
        )
    return loss, num_tokens


def given_loss(function: Callable[..., Tensor], logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """
    The same of a function like `compute_loss_func` of the Trainer, which gets outputs with these logits and labels
    that are not shifted, and divides a sum over target tokens by `num_items_in_batch`.
    """
    (targets,) = to_device((labels,), logits.device)
    loss = function(CausalLMOutput(logits=logits), targets, num_items_in_batch=torch.ones((), device=logits.device))
    return loss.float(), (labels[..., 1:] != IGNORE_INDEX).sum()


def check_given_loss(function: Callable[..., Tensor], num_words: int, device: torch.device | str = "cpu") -> None:
    """Raises `ValueError` unless a function's loss adds up over rows and is divided by `num_items_in_batch`."""
    # on the device of the run, where the function may have tensors of its own, such as weights of words
    logits = torch.randn(2, 4, num_words, generator=torch.Generator().manual_seed(0)).to(device)
    labels = torch.tensor([[IGNORE_INDEX, 0, 1, 1], [IGNORE_INDEX, IGNORE_INDEX, 1, 0]], device=device)

    def loss_of(rows: slice, num_items: int) -> float:
        outputs = CausalLMOutput(logits=logits[rows])
        return float(function(outputs, labels[rows], num_items_in_batch=torch.tensor(num_items, device=device)))

    whole, halved = loss_of(slice(0, 2), 1), loss_of(slice(0, 2), 2)
    by_rows = loss_of(slice(0, 1), 1) + loss_of(slice(1, 2), 1)
    for what, found in (("twice as many items", 2 * halved), ("one row after the other", by_rows)):
        if abs(found - whole) > 1e-4 * abs(whole):
            raise ValueError(
                f"`compute_loss_func` does not sum over target tokens and divide by `num_items_in_batch`: with {what} "
                f"a batch has the loss {found:.5g} in place of {whole:.5g}. Let it do so, since a plan adds up "
                "microbatches."
            )


def of_targets(logits: Tensor, labels: Tensor, shifted: bool) -> tuple[Tensor, Tensor]:
    """The logits `[targets, vocabulary]` and the words `[targets]` of the target tokens."""
    targets = labels if shifted else nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    tokens = (targets.flatten() != IGNORE_INDEX).nonzero().flatten()
    targets, tokens = to_device((targets.flatten()[tokens], tokens), logits.device)
    return of_tokens(logits, tokens), targets


@torch.no_grad()
def accuracy_and_entropy(logits: Tensor, labels: Tensor, shifted: bool = False) -> Tensor:
    """
    Returns float32 sums `[3]` over target tokens: how often the target has the highest logit, the entropy of the
    predictions in nats, and their number. Arguments are those of [`token_loss`]; logits are computed in chunks.
    """
    logits, targets = of_targets(logits.detach(), labels, shifted)
    size = max(1, MAX_LOGITS // logits.shape[-1])
    sums = torch.zeros(3, device=logits.device)
    sums[2] = len(targets)
    for start in range(0, len(targets), size):
        chunk = whole_logits(logits[start : start + size]).float()
        log_probs = chunk.log_softmax(-1)
        sums[0] += (chunk.argmax(-1) == targets[start : start + size]).sum()
        sums[1] -= (log_probs.exp() * log_probs).sum()
    return sums


def _smoothed_loss(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    return nn.functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=label_smoothing,
    ).to(torch.float32)
