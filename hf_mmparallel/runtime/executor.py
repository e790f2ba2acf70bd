"""Runs the actions of one rank: forwards, backwards, sends, receives and gradient sums, in the program's order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from .._clock import clock_of
from ..data.context_tokens import WORDS
from ..data.loader import StepBatch
from ..kernels.bitfield_attention.context_parallel import SequenceShard
from ..modeling.stages import activation_dtype
from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan
from ..schedule import Program
from ..schedule.actions import Action, Message, Task
from ..schedule.graph import GradientFlow
from ..schedule.lowering import receive_ahead
from ..world import ACTIVITY
from .boundary import Leg, part_size, pick
from .messages import MessageGeometry, StageKey, num_rows_of
from .transport import Handle, Transport
from .work import ModuleWork, counting_layers, language_work

LossFunction = Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class TimedTask:
    """A task as it ran: start and end in ms since the step's start on this rank."""

    task: Task
    start_ms: float
    end_ms: float


@dataclass
class StepResult:
    """
    What one step left on this rank.

    Args:
        losses (`dict[Task, tuple[Tensor, Tensor]]`):
            Forward of the last stage -> (sum over target tokens, number of target tokens).
        timeline (`list[TimedTask]`): The tasks of this rank as they ran.
        duration_ms (`float`): From the first action to the last.
        step_ms (`float`): From the first action to the end of the gradient sums.
        started_s (`float`): When it began, by the host's clock.
        work (`dict[str, ModuleWork]`): Module -> what it computed on, counted on one rank of those that have the same.
    """

    losses: dict[Task, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    timeline: list[TimedTask] = field(default_factory=list)
    duration_ms: float = 0.0
    step_ms: float = 0.0
    started_s: float = field(default_factory=time.time)
    work: dict[str, ModuleWork] = field(default_factory=dict)


@dataclass
class _Running:
    """A task between its forward and its backward."""

    outputs: list[torch.Tensor]
    leaves: dict[str, torch.Tensor]


@dataclass
class _Piece:
    """
    Rows of a message that arrive on this rank from one other.

    Args:
        leg (`Leg`): The leg that they are part of.
        start (`int`): The first of them in the leg.
        places (`torch.Tensor`): int64 `[rows]`: their places among the rows of this rank.
        channel (`tuple[int, int]`): From which rank to which.
        buffer (`torch.Tensor`, *optional*): Where they arrive; `None` for those that stay on a rank.
    """

    leg: Leg
    start: int
    places: torch.Tensor
    channel: tuple[int, int]
    buffer: torch.Tensor | None = None


@dataclass
class _Incoming:
    """What this rank receives of a message, the legs of it that end here, and the transfers as they were started."""

    legs: list[tuple[Leg, torch.Tensor]]
    pieces: list[_Piece] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)


class Executor:
    """
    The interpreter of programs.

    Args:
        plan (`ParallelPlan`): The plan.
        spec (`ModelSpec`): The model.
        stages (`Mapping[StageKey, ModuleStage]`): The stages of this rank.
        transport (`Transport`): Carries the messages.
        groups (`Mapping[tuple[int, ...], ProcessGroup]`):
            Ranks -> group, for each row and column of several ranks in the grids of this rank.
        loss_function (`Callable`):
            (logits, labels, whether they are shifted) -> (sum over target tokens, number of target tokens).
        device (`torch.device`): Where stages compute.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        spec: ModelSpec,
        stages: Mapping[StageKey, Any],
        transport: Transport,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        loss_function: LossFunction,
        device: torch.device,
    ):
        self.plan = plan
        self.spec = spec
        self.stages = stages
        self.transport = transport
        self.rank = transport.rank
        self.groups = groups
        self.loss_function = loss_function
        self.device = device
        self.wire_dtype = wire_dtype(spec)
        self.flow = GradientFlow(plan)
        self.on_sync: Callable[[int], None] = lambda index: None
        self.before_forward: Callable[[Task], None] = lambda task: None
        self.forward_context: Callable[[], AbstractContextManager] = nullcontext
        self.out_of_memory: Callable[[Action, torch.OutOfMemoryError], str] = lambda action, error: str(error)
        self.on_logits: Callable[[Task, torch.Tensor, Mapping[str, Any]], None] | None = None
        self.clock = clock_of(device)
        self._start: Any = None

    def run(self, program: Program, batch: StepBatch) -> StepResult:
        """
        Runs this rank's actions of one step.

        Args:
            program (`Program`): The program of the step.
            batch (`StepBatch`): Its inputs, for the tasks of this rank.
        """
        run = _Step(self, program, batch)
        clock = self.clock
        start = self._start = clock.mark()
        actions: Sequence[Action] = program.actions.get(self.rank, ())
        if self.transport.receives_ahead:
            actions = receive_ahead(actions)
        last_send = {action.message.source: action for action in actions if action.op == "send" and action.message}
        marks: list[tuple[Task, Any, Any]] = []
        for action in actions:
            ACTIVITY.now(action)
            try:
                if action.index is not None:
                    self.on_sync(action.index)
                elif action.message is not None and action.op == "send":
                    run.send(action.message)
                    if last_send[action.message.source] is action:
                        run.release(action.message.source)
                elif action.message is not None:
                    run.receive(action.message)
                elif action.task is not None:
                    ACTIVITY.waits = True
                    run.wait(action.task)
                    ACTIVITY.waits = False
                    ready = clock.mark()
                    run.compute(action.task)
                    marks.append((action.task, ready, clock.mark()))
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(self.out_of_memory(action, error)) from error
        ACTIVITY.now("the last sends", waits=True)
        run.finish()
        end = clock.mark()
        run.result.timeline = [
            TimedTask(task, clock.ms(start, ready), clock.ms(start, done)) for task, ready, done in marks
        ]
        run.result.duration_ms = clock.ms(start, end)
        run.result.work = {module: work.read() for module, work in run.result.work.items()}
        return run.result

    def elapsed_ms(self) -> float:
        """Milliseconds since the last step began, of all that is queued on the device."""
        return self.clock.ms(self._start, self.clock.mark())


class _Step(MessageGeometry):
    """The state of one step on one rank."""

    def __init__(self, executor: Executor, program: Program, batch: StepBatch):
        super().__init__(executor.plan, executor.rank, executor.spec, batch, executor.groups, executor.stages)
        self.executor = executor
        self.program = program
        self.result = StepResult()
        self.running: dict[tuple, _Running] = {}
        self.incoming: dict[Task, dict[Message, _Incoming]] = {}
        self.kept: dict[tuple[Message, tuple[int, int]], torch.Tensor] = {}
        self.sends: dict[tuple, list[Handle]] = {}
        self.gradients: dict[tuple, dict[str, torch.Tensor]] = {}

    # Receiving

    def receive(self, message: Message) -> None:
        """Posts the receives of this rank's parts of a message."""
        task = message.target
        num_hidden, width = self.hidden_size(message, task)
        incoming = _Incoming(self.route(message, task, num_hidden))
        for leg, places in incoming.legs:
            for part in leg.parts:
                source, target = (part.source, part.target) if message.kind == "act" else (part.target, part.source)
                if target != self.rank:
                    continue
                piece = _Piece(leg, part.start, places[part.start : part.stop], (source, target))
                incoming.pieces.append(piece)
                if source != self.rank:
                    piece.buffer = self.empty(part.num_rows, width)
                    incoming.handles.append(self.executor.transport.recv(piece.buffer, source))
        self.incoming.setdefault(task, {})[message] = incoming

    def hidden_size(self, message: Message, task: Task) -> tuple[int, int]:
        """Rows that this rank has of a message of hidden states, at its end `task`, and the width of any message."""
        if message.crosses_boundary:
            return 0, self.spec.language_model.hidden_size
        received = task.key == self.ends(message)[1].key
        shapes = self.shapes(task) if received else [out.shape for out in self.running[task.key].outputs]
        return sum(num_rows_of(shape) for shape in shapes), shapes[0][-1] if shapes else 0

    def empty(self, *shape: int) -> torch.Tensor:
        """Room for rows of a message."""
        return torch.empty(shape, dtype=self.executor.wire_dtype, device=self.executor.device)

    def wait(self, task: Task) -> None:
        """Waits for all that a task takes."""
        for incoming in self.incoming.get(task, {}).values():
            for handle in incoming.handles:
                handle.wait()

    def arrived(self, message: Message, piece: _Piece) -> torch.Tensor:
        """The rows of a piece."""
        return piece.buffer if piece.buffer is not None else self.kept.pop((message, piece.channel))

    def gathered(self, message: Message, incoming: _Incoming) -> tuple[torch.Tensor, torch.Tensor] | None:
        """All rows of an activation message that come to this row of ranks, and their places; `None` without rows."""
        ((leg, places),) = incoming.legs
        if not leg.num_rows:
            return None
        own = [self.arrived(message, piece) for piece in incoming.pieces]
        if len(leg.after) == 1:
            return own[0], places
        size = part_size(leg.num_rows, len(leg.after))
        padded = self.empty(size, self.hidden_size(message, message.target)[1]).zero_()
        for rows in own:
            padded[: len(rows)] = rows
        full = self.empty(size * len(leg.after), padded.shape[1])
        dist.all_gather_single(full, padded, group=self.executor.groups[leg.after])
        return full[: leg.num_rows], places

    # Sending

    def send(self, message: Message) -> None:
        """Sends this rank's parts of a message, or keeps them when they stay on this rank."""
        task = message.source
        rows = self.payload(message)
        for leg, places in self.route(message, task, self.hidden_size(message, task)[0]):
            leg_rows = pick(rows, places).to(self.executor.wire_dtype)
            for part in leg.parts:
                source, target = (part.source, part.target) if message.kind == "act" else (part.target, part.source)
                if source != self.rank:
                    continue
                piece = leg_rows[part.start : part.stop].contiguous()
                if target == self.rank:
                    self.kept[message, (source, target)] = piece
                else:
                    handle = self.executor.transport.send(piece, target)
                    self.sends.setdefault((message.kind, task.key), []).append(handle)
        self.forget_completed()

    def forget_completed(self) -> None:
        """Frees what has been sent: without a backward that waits for it, it would stay until the step ends."""
        for key, handles in list(self.sends.items()):
            self.sends[key] = [handle for handle in handles if not handle.is_completed()]
            if not self.sends[key]:
                del self.sends[key]

    def payload(self, message: Message) -> torch.Tensor:
        """All rows that this rank has at the source of a message, also those that others carry: `[rows, width]`."""
        task = message.source
        if message.kind == "grad":
            name = message.target.module if message.crosses_boundary else "hidden"
            return self.gradients[task.key].get(name, torch.zeros(0, 0))
        pieces = [out.detach().reshape(-1, out.shape[-1]) for out in self.running[task.key].outputs]
        if len(pieces) < 2:
            return pieces[0] if pieces else torch.zeros(0, 0)
        return torch.cat(pieces)

    # Computing

    def compute(self, task: Task) -> None:
        if task.kind == "fwd":
            self.forward(task)
        else:
            self.backward(task)

    def forward(self, task: Task) -> None:
        """Runs a stage's forward on one chunk."""
        key = (task.module, task.replica, task.stage)
        flow = self.executor.flow
        needs_graph = self.program.has_backward(task)
        incoming = self.incoming.pop(task, {})
        leaves: dict[str, torch.Tensor] = {}
        hidden = None
        if task.stage > 0:
            (message,) = (m for m in incoming if not m.crosses_boundary)
            gathered = self.gathered(message, incoming[message])
            hidden = []
            if gathered is not None:
                rows, _ = gathered
                rows.requires_grad_(needs_graph and flow.hidden_needs_grad(*key))
                leaves["hidden"] = rows
                shapes = self.shapes(task)
                pieces = rows.split([num_rows_of(shape) for shape in shapes])
                hidden = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        self.check_encoded(task)
        features = self.features_of(task, incoming, leaves, needs_graph)
        self.executor.before_forward(task)
        stage = self.executor.stages[key]
        with self.executor.forward_context(), torch.set_grad_enabled(needs_graph), self.counted(task, stage):
            outputs = stage(self.inputs(task, leaves), hidden, features)
            if self.is_last(task):
                outputs = self.loss(task, outputs)
        self.check_rows(task, outputs)
        if needs_graph or not self.is_last(task):
            self.running[task.key] = _Running(outputs, leaves)

    def inputs(self, task: Task, leaves: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """The inputs of a task; gradients of features concern the attention of rows of ranks without features too."""
        batch = self.batch(task)
        words = batch.get(WORDS)
        if not isinstance(words, SequenceShard) or not any(leaf.requires_grad for leaf in leaves.values()):
            return batch
        return {**batch, WORDS: replace(words, has_backward=True)}

    def check_rows(self, task: Task, outputs: Sequence[torch.Tensor]) -> None:
        """Raises `ValueError` unless an encoder's last stage made a row for each placeholder of its samples."""
        last = len(self.plan.modules[task.module].replicas[task.replica]) - 1
        if task.module == LANGUAGE_MODEL or task.stage < last:
            return
        for spec, output in zip(self.spec.modules[task.module].features, outputs, strict=True):
            wanted = sum(self.rows(task)[spec.modality])
            if output.shape[0] != wanted:
                samples = [self.step.samples[slot] for slot in self.slots(task)]
                raise ValueError(
                    f"Samples {samples} have {wanted} placeholders of `{spec.modality}` in `input_ids`, but "
                    f"`{task.module}` made {output.shape[0]} features of them. Make the processor's placeholders and "
                    "media agree."
                )

    def counted(self, task: Task, stage: Any) -> AbstractContextManager:
        """Counts what a module works on: at its first stage, and the attention of every stage of an encoder."""
        if self.stage(task).all_ranks[0] != self.rank:
            return nullcontext()
        work = self.result.work.setdefault(task.module, ModuleWork())
        if task.module != LANGUAGE_MODEL:
            return counting_layers(stage.own_layers, self.spec.modules[task.module].num_layers, work)
        if task.stage == 0:
            work.add(*language_work(self.whole_batch(task), self.spec.language_model.windows))
        return nullcontext()

    def features_of(
        self, task: Task, incoming: Mapping[Message, _Incoming], leaves: dict[str, torch.Tensor], needs_graph: bool
    ) -> dict[str, list[torch.Tensor | None]]:
        """The features of each encoder that enter at the stage of `task`; `None` for those that do not."""
        result: dict[str, list[torch.Tensor | None]] = {}
        by_encoder: dict[str, list[Message]] = {}
        for message in sorted(incoming):  # receives are posted in another order on each rank, gathers must not be
            if message.crosses_boundary:
                by_encoder.setdefault(message.source.module, []).append(message)
        for encoder, messages in by_encoder.items():
            sizes = self.placement(messages[0], task).sizes[self.stage(task).row_of(self.rank)]
            leaf = self.empty(sum(sizes), self.spec.language_model.hidden_size).zero_()
            for message in messages:
                gathered = self.gathered(message, incoming[message])
                if gathered is not None:
                    rows, places = gathered
                    leaf.index_copy_(0, places.to(leaf.device), rows)
            leaf.requires_grad_(needs_graph and self.executor.flow.feature_needs_grad(encoder))
            leaves[encoder] = leaf
            tensors: list[torch.Tensor | None] = [None] * len(self.spec.modules[encoder].features)
            with torch.set_grad_enabled(needs_graph):
                pieces = leaf.split(sizes)
            for (index, _), piece in zip(self.features(messages[0]), pieces, strict=True):
                tensors[index] = piece
            result[encoder] = tensors
        return result

    def loss(self, task: Task, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Replaces the logits of the last stage by their loss, and hands them to whoever collects them."""
        batch = self.batch(task)
        (logits,) = outputs
        if self.executor.on_logits is not None:
            self.executor.on_logits(task, self.whole_logits(task, logits.detach()), self.whole_batch(task))
        shifted = batch.get("shift_labels")
        labels = batch.get("labels") if shifted is None else shifted
        if labels is None:
            if self.program.has_backward(task):
                raise ValueError(
                    f"The batch has no `labels` to train on, only {', '.join(f'`{name}`' for name in batch)}. Add a "
                    "column `labels`, or a collator that makes it."
                )
            return []
        loss, count = self.executor.loss_function(logits, labels, shifted is not None)
        self.result.losses[task] = (loss.detach(), count)
        return [loss]

    def whole_logits(self, task: Task, logits: torch.Tensor) -> torch.Tensor:
        """The logits of all tokens of a batch, from those of each row of ranks."""
        words = self.batch(task).get(WORDS)
        return words.gather_tokens(logits) if isinstance(words, SequenceShard) else logits

    def backward(self, task: Task) -> None:
        """Runs the backward of a chunk's forward and keeps the gradients of what it received."""
        running = self.running.pop(task.key)
        incoming = self.incoming.pop(task, {})
        if self.is_last(task):
            # Behind an encoder chunk without rows nothing trainable may have been used.
            torch.autograd.backward([out for out in running.outputs if out.requires_grad])
        else:
            gradients = self.output_gradients(task, running, incoming)
            used = [(out, g) for out, g in zip(running.outputs, gradients, strict=True) if out.requires_grad]
            if used:
                torch.autograd.backward([out for out, _ in used], [g for _, g in used])
        for handle in self.sends.pop(("act", task.key), []):
            handle.wait()
        self.gradients[task.key] = {
            name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            for name, leaf in running.leaves.items()
            if leaf.requires_grad
        }

    def output_gradients(
        self, task: Task, running: _Running, incoming: Mapping[Message, _Incoming]
    ) -> list[torch.Tensor]:
        """The gradient of each output of a task: what its takers sent back, to each row from the one that took it."""
        sizes = [num_rows_of(out.shape) for out in running.outputs]
        if not sum(sizes):
            return [torch.zeros_like(out) for out in running.outputs]
        rows = self.empty(sum(sizes), running.outputs[0].shape[-1]).zero_()
        for message, arriving in incoming.items():
            for piece in arriving.pieces:
                rows.index_copy_(0, piece.places.to(rows.device), self.arrived(message, piece))
        if len(self.row(task)) > 1:
            dist.all_reduce(rows, group=self.executor.groups[self.row(task)])
        pieces = zip(rows.split(sizes), running.outputs, strict=True)
        return [piece.view(out.shape).to(out.dtype) for piece, out in pieces]

    def release(self, task: Task) -> None:
        """Frees what a task held for its messages, once the last one is on its way."""
        if task.kind == "bwd":
            del self.gradients[task.key]
        elif not self.program.has_backward(task):
            del self.running[task.key]

    def finish(self) -> None:
        """Waits for the sends that are still on their way."""
        for handles in self.sends.values():
            for handle in handles:
                handle.wait()


def wire_dtype(spec: ModelSpec) -> torch.dtype:
    """The widest dtype that modules compute in: of hidden states and features between ranks."""
    return activation_dtype(spec, [p for module in spec.modules.values() for p in module.parameters])
