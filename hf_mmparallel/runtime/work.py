"""The work of a step in the units of the cost model: tokens in a module's layers, and squared lengths of sequences."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..data.context_tokens import WORDS
from ..kernels.bitfield_attention import decode_words
from ..modeling.unowned import hidden_of
from ..plan import LANGUAGE_MODEL
from ..schedule.actions import Task
from .payloads import num_tokens_of
from .step_inputs import StepInputs


@dataclass
class ModuleWork:
    """What a module computed on. Sums may stay on the device until [`~ModuleWork.read`]."""

    # Tokens that its layers saw: those of samples in the language model, without padding; those that entered the first
    # layer of an encoder, before anything merges or pools them.
    tokens: Any = 0.0
    # Sum of the squared lengths of the sequences that attend to themselves, the mean over the layers; in layers with a
    # window what attention needs of them.
    squares: Any = 0.0

    def add(self, tokens: float | Tensor, squares: float | Tensor) -> None:
        """Adds tokens and squares."""
        self.tokens = self.tokens + tokens
        self.squares = self.squares + squares

    def read(self) -> ModuleWork:
        """Returns the same as numbers of the host."""
        return ModuleWork(float(self.tokens), float(self.squares))


def counting_work(inputs: StepInputs, task: Task, work: dict[str, ModuleWork]) -> AbstractContextManager:
    """
    Counts what a module computes on in a forward, on the first rank of the mesh: at the first stage of the language
    model, and the attention of every stage of an encoder.
    """
    if inputs.planned_stage(task).all_ranks[0] != inputs.rank:
        return nullcontext()
    sums, spec = work.setdefault(task.module, ModuleWork()), inputs.spec.modules[task.module]
    if task.module != LANGUAGE_MODEL:
        return counting_layers(inputs.stages[task.stage_key].own_layers, spec.num_layers, sums)
    if task.stage == 0:
        sums.add(*language_work(inputs.whole_batch(task), spec.windows))
    return nullcontext()


def language_work(batch: Mapping[str, Any], windows: Sequence[int] = ()) -> tuple[Tensor | float, Tensor | float]:
    """Returns tokens and squares of the samples of a batch of the language model, without padding."""
    # `windows` has the tokens that a token attends to in each layer, 0 for all before it
    ids, words, mask = batch["input_ids"], batch.get(WORDS), batch.get("attention_mask")
    if isinstance(words, Tensor):
        segment = decode_words(words).segment
        counts = segment.new_zeros(segment.shape[0], segment.shape[1] + 1)
        lengths = counts.scatter_add_(1, segment, torch.ones_like(segment))[:, 1:]  # 0 is padding
    elif isinstance(mask, Tensor) and mask.dim() == 2:
        lengths = (mask != 0).sum(-1)
    else:
        return float(ids.numel()), ids.shape[:-1].numel() * float(_attended(torch.tensor(ids.shape[-1]), windows))
    return lengths.sum(), _attended(lengths, windows)


def _attended(lengths: Tensor, windows: Sequence[int]) -> Tensor:
    """Sums the squares of causal sequences that attention needs in the mean layer, see [`attended_squares`]."""
    lengths = lengths.double()
    whole = lengths.square()
    count, total = max(len(windows), 1), torch.zeros_like(whole)
    for window, layers in Counter(windows or [0]).items():
        needed = whole - (lengths - window).clamp(min=0).square() if window else whole
        total += layers / count * needed
    return total.sum()


@contextmanager
def counting_layers(layers: Mapping[int, nn.Module], num_layers: int, work: ModuleWork) -> Iterator[None]:
    """Counts what the layers of a stage of an encoder, which has `num_layers`, compute on meanwhile."""

    def count(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = hidden_of(args, kwargs)
        tokens = float(num_tokens_of(hidden.shape)) if layer is layers.get(0) else 0.0
        work.add(tokens, _squares(hidden, kwargs.get("cu_seqlens")) / num_layers)

    handles = [layer.register_forward_pre_hook(count, with_kwargs=True) for layer in layers.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _squares(hidden: Tensor, ends: Any) -> Tensor | float:
    """Sums the squares of the sequences of `[..., sequence, width]`, or of those that end at `ends` in one row."""
    if isinstance(ends, Tensor):
        return ends.diff().double().square().sum()
    return float(num_tokens_of(hidden.shape) * hidden.shape[-2])


# The results of one step on a rank: losses, times, work.


@dataclass(frozen=True)
class TimedTask:
    """A task as it ran: start and end in ms since the step's start on this rank."""

    task: Task
    start_ms: float
    end_ms: float


@dataclass
class StepResult:
    """The results of one step on this rank."""

    # forward of the last stage -> (sum over target tokens, number of target tokens)
    losses: dict[Task, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    timeline: list[TimedTask] = field(default_factory=list)
    duration_ms: float = 0.0  # from the first action to the last
    step_ms: float = 0.0  # from the first action to the end of the gradient sums
    started_s: float = field(default_factory=time.time)  # by the host's clock
    work: dict[str, ModuleWork] = field(default_factory=dict)  # by module, counted on one rank of those with the same
