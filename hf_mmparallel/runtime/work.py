"""The work of a step in the units of the cost model: tokens in a module's layers, and squared lengths of sequences."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .._device import Clock, HostCopy
from ..data.context_tokens import WORDS
from ..kernels.bitfield_attention import decode_words
from ..modeling.shared_tokens import SharedTokens
from ..modeling.unowned import hidden_of
from ..plan import LANGUAGE_MODEL
from ..schedule.kinds import Task
from .payloads import num_tokens_of
from .step_inputs import StepInputs


@dataclass
class ModuleWork:
    # Tokens that its layers saw: those of samples in the language model, without padding; those that entered the first
    # layer of an encoder, before anything merges or pools them.
    tokens: float = 0.0
    # Sum of the squared lengths of the sequences that attend to themselves, the mean over the layers; in layers with a
    # window what attention needs of them.
    squares: float = 0.0

    def add(self, tokens: float, squares: float) -> None:
        self.tokens += tokens
        self.squares += squares


@dataclass
class WorkSums:
    """The work of a module in a step that runs. Squares of lengths that only the device knows stay there."""

    known: ModuleWork = field(default_factory=ModuleWork)
    squares: Tensor | None = None
    _copy: HostCopy | None = None

    def add(self, tokens: float, squares: float | Tensor) -> None:
        if isinstance(squares, Tensor) and squares.device.type != "cpu":
            self.squares = squares if self.squares is None else self.squares + squares
            squares = 0.0
        self.known.add(tokens, float(squares))

    def end(self) -> None:
        self._copy = None if self.squares is None else HostCopy(self.squares)

    def read(self) -> ModuleWork:
        """Returns the sums, after [`~WorkSums.end`]."""
        on_device = 0.0 if self._copy is None else self._copy.read()
        return ModuleWork(self.known.tokens, self.known.squares + on_device)


def counting_work(inputs: StepInputs, task: Task, work: dict[str, WorkSums]) -> AbstractContextManager:
    """
    Counts what a module computes on in a forward: at the first stage of the language model or of a generator, on the
    first rank of the mesh, and the attention of every stage of an encoder, on the first of each cp rank, which has
    images of its own.
    """
    firsts = [tp_group[0] for tp_group in inputs.planned_stage(task).mesh]
    if inputs.rank not in firsts:
        return nullcontext()
    sums, spec = work.setdefault(task.module, WorkSums()), inputs.spec.modules[task.module]
    if task.module in inputs.plan.generators:
        for modality in inputs.spec.modalities(task.module) if task.stage == 0 else ():
            rows = inputs.num_feature_tokens(task)[modality]
            sums.add(float(sum(rows)), float(sum(count**2 for count in rows)))
        return nullcontext()
    if task.module != LANGUAGE_MODEL:
        stage = inputs.stages[task.stage_key]
        return counting_layers(stage.own_layers, spec.num_layers, sums, stage.shared_tokens)
    if task.stage == 0 and inputs.rank == firsts[0]:
        sums.add(*language_work(inputs.whole_batch(task), spec.needed_windows))
    return nullcontext()


def language_work(batch: Mapping[str, Any], windows: Sequence[int] = ()) -> tuple[float, float]:
    """Returns tokens and squares of the samples of a batch of the language model in host memory, without padding."""
    # `windows` has the tokens that a token attends to in each layer, 0 for all before it
    ids, words, mask = batch["input_ids"], batch.get(WORDS), batch.get("attention_mask")
    if isinstance(words, Tensor):
        segment = decode_words(words).segment
        counts = segment.new_zeros(segment.shape[0], segment.shape[1] + 1)
        lengths = counts.scatter_add_(1, segment, torch.ones_like(segment))[:, 1:]  # 0 is padding
    elif isinstance(mask, Tensor) and mask.dim() == 2:
        lengths = (mask != 0).sum(-1)
    else:
        return float(ids.numel()), ids.shape[:-1].numel() * _attended(torch.tensor(ids.shape[-1]), windows)
    return float(lengths.sum()), _attended(lengths, windows)


def _attended(lengths: Tensor, windows: Sequence[int]) -> float:
    """Sums the squares of causal sequences that attention needs in the mean layer, see [`attended_squares`]."""
    lengths = lengths.double()
    whole = lengths.square()
    count, total = max(len(windows), 1), torch.zeros_like(whole)
    for window, layers in Counter(windows or [0]).items():
        needed = whole - (lengths - window).clamp(min=0).square() if window else whole
        total += layers / count * needed
    return float(total.sum())


@contextmanager
def counting_layers(
    layers: Mapping[int, nn.Module], num_layers: int, work: WorkSums, shared: SharedTokens
) -> Iterator[None]:
    """Counts what the layers of a stage of an encoder, which has `num_layers`, compute on meanwhile."""

    def count(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = hidden_of(args, kwargs)
        length, part = shared.part_of_rank(index, hidden)
        tokens = num_tokens_of(hidden.shape) / max(hidden.shape[-2], 1) * length
        work.add(part * tokens if index == 0 else 0.0, part / num_layers * _squares(tokens * length, kwargs))

    handles = [
        layer.register_forward_pre_hook(functools.partial(count, index), with_kwargs=True)
        for index, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _squares(of_rows: float, kwargs: Mapping[str, Any]) -> Tensor | float:
    """Sums the squares of sequences that end at the bounds which a layer is given, or else are whole rows."""
    ends = kwargs.get("cu_seqlens")
    return ends.diff().double().square().sum() if isinstance(ends, Tensor) else of_rows


# The results of one step on a rank: losses, times, work.


@dataclass(frozen=True)
class TimedTask:
    """A task as it ran: start and end in ms since the step's start on this rank."""

    task: Task
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Arrival:
    """A message from another module that a task has waited for."""

    ends: tuple[str, str]  # the modules that sent and received it
    num_bytes: int  # that came from other ranks
    started: Any  # marks of the clock, before and after the wait
    ended: Any


@dataclass
class BoundaryTraffic:
    """What a rank received over a boundary in one direction."""

    num_bytes: int = 0  # from other ranks
    wait_ms: float = 0.0  # that tasks waited for it; the rest came beside other tasks


@dataclass(frozen=True)
class StepRecord:
    timeline: Sequence[TimedTask] = ()
    duration_ms: float = 0.0  # from the first action to the last
    step_ms: float = 0.0  # from the first action to the end of the gradient sums
    # by module, counted on one rank of those with the same
    work: Mapping[str, ModuleWork] = field(default_factory=dict)
    # by the modules that sent and received: features one way, their gradients the other
    boundaries: Mapping[tuple[str, str], BoundaryTraffic] = field(default_factory=dict)


@dataclass
class StepResult:
    """The results of one step on this rank, which the device may not have finished."""

    clock: Clock
    # forward of the last stage -> (sum over target tokens, number of target tokens)
    losses: dict[Task, tuple[Tensor, Tensor]] = field(default_factory=dict)
    token_metrics: dict[Task, Tensor] = field(default_factory=dict)  # other sums over target tokens, if asked for
    routed: dict[Task, Tensor] = field(default_factory=dict)  # where routers sent the tokens of a forward
    work: dict[str, WorkSums] = field(default_factory=dict)
    marks: list[tuple[Task, Any, Any]] = field(default_factory=list)  # of the clock: each task's start and end
    arrivals: list[Arrival] = field(default_factory=list)
    started_s: float = field(default_factory=time.time)  # by the host's clock

    def __post_init__(self) -> None:
        self.started = self.ended = self.summed = self.clock.mark()

    def end(self) -> None:
        for work in self.work.values():
            work.end()
        self.ended = self.summed = self.clock.mark()

    def end_sums(self) -> None:
        self.summed = self.clock.mark()

    def is_done(self) -> bool:
        """Whether the device has finished the step, so that `record` is there at once."""
        return self.clock.has_passed(self.summed)

    @cached_property
    def record(self) -> StepRecord:
        """What was measured; waits for the device."""
        to_ms = functools.partial(self.clock.ms, self.started)
        timeline = [TimedTask(task, to_ms(ready), to_ms(done)) for task, ready, done in self.marks]
        self.marks.clear()
        work = {module: work.read() for module, work in self.work.items()}
        boundaries: dict[tuple[str, str], BoundaryTraffic] = {}
        for arrival in self.arrivals:
            traffic = boundaries.setdefault(arrival.ends, BoundaryTraffic())
            traffic.num_bytes += arrival.num_bytes
            traffic.wait_ms += to_ms(arrival.ended) - to_ms(arrival.started)
        self.arrivals.clear()
        return StepRecord(timeline, to_ms(self.ended), to_ms(self.summed), work, boundaries)
