"""Runs the actions of one rank: forwards, backwards, sends, receives and gradient sums, in the program's order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, StepPlan
from ..schedule.actions import Action, Message, Program, Task
from ..schedule.graph import GradientFlow
from ..schedule.lowering import receive_ahead
from .boundary import part_size, parts
from .messages import BatchKey, MessageGeometry, StageKey, num_rows_of
from .transport import Handle, Transport

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
        started_s (`float`): When it began, by the host's clock.
        num_rows (`dict[str, int]`):
            Module -> input tokens of the language model, feature rows of an encoder; counted on one rank a replica.
    """

    losses: dict[Task, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    timeline: list[TimedTask] = field(default_factory=list)
    duration_ms: float = 0.0
    started_s: float = field(default_factory=time.time)
    num_rows: dict[str, int] = field(default_factory=dict)


@dataclass
class _Running:
    """A task between its forward and its backward."""

    outputs: list[torch.Tensor]
    leaves: dict[str, torch.Tensor]


@dataclass
class _Incoming:
    """The part of a message that this rank receives: its buffers by part, and how they were started."""

    num_rows: int
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    handles: list[Handle] = field(default_factory=list)


class Executor:
    """
    The interpreter of programs.

    Args:
        plan (`ParallelPlan`): The plan.
        spec (`ModelSpec`): The model.
        stages (`Mapping[StageKey, ModuleStage]`): The stages of this rank.
        transport (`Transport`): Carries the messages.
        tp_groups (`Mapping[tuple[int, ...], ProcessGroup]`): Groups of the grids of this rank with several ranks.
        loss_function (`Callable`):
            (logits, labels, whether they are shifted) -> (sum over target tokens, number of target tokens).
        count_rows (`Callable`): (inputs, spec) -> modality -> rows of each sample.
        device (`torch.device`): Where stages compute.
        wire_dtype (`torch.dtype`): Of hidden states, features and their gradients between ranks.
    """

    def __init__(
        self,
        plan: ParallelPlan,
        spec: ModelSpec,
        stages: Mapping[StageKey, Any],
        transport: Transport,
        tp_groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        loss_function: LossFunction,
        count_rows: Callable[[Mapping[str, Any], ModelSpec], dict[str, list[int]]],
        device: torch.device,
        wire_dtype: torch.dtype,
    ):
        self.plan = plan
        self.spec = spec
        self.stages = stages
        self.transport = transport
        self.rank = transport.rank
        self.tp_groups = tp_groups
        self.loss_function = loss_function
        self.count_rows = count_rows
        self.device = device
        self.wire_dtype = wire_dtype
        self.flow = GradientFlow(plan)
        self.on_sync: Callable[[int], None] = lambda index: None
        self.before_forward: Callable[[Task], None] = lambda task: None
        self.forward_context: Callable[[], AbstractContextManager] = nullcontext
        self.on_logits: Callable[[Task, torch.Tensor, Mapping[str, Any]], None] | None = None

    def run(
        self,
        program: Program,
        step: StepPlan,
        batches: Mapping[BatchKey, Mapping[str, Any]],
    ) -> StepResult:
        """
        Runs this rank's actions of one step.

        Args:
            program (`Program`): The program of the step.
            step (`StepPlan`): Which sample is where.
            batches (`Mapping[BatchKey, Mapping[str, Any]]`):
                (module, replica, microbatch, chunk) -> model inputs, for the tasks of this rank.
        """
        run = _Step(self, program, step, batches)
        clock = _Clock(self.device)
        actions: Sequence[Action] = program.actions.get(self.rank, ())
        if self.transport.receives_ahead:
            actions = receive_ahead(actions)
        last_send = {action.message.source: action for action in actions if action.op == "send" and action.message}
        marks = []
        for action in actions:
            if action.index is not None:
                self.on_sync(action.index)
            elif action.message is not None and action.op == "send":
                run.send(action.message)
                if last_send[action.message.source] is action:
                    run.release(action.message.source)
            elif action.message is not None:
                run.receive(action.message)
            elif action.task is not None:
                run.wait(action.task)
                ready = clock.mark()
                run.compute(action.task)
                marks.append((action.task, ready, clock.mark()))
        run.finish()
        end = clock.mark()
        run.result.timeline = [TimedTask(task, clock.ms(ready), clock.ms(done)) for task, ready, done in marks]
        run.result.duration_ms = clock.ms(end)
        return run.result


class _Clock:
    """Marks of time: the host's clock, or events on the stream where work is queued ahead of the device."""

    def __init__(self, device: torch.device):
        self.on_device = device.type == "cuda"
        self.start = self.mark()

    def mark(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, mark: Any) -> float:
        """Milliseconds from the start to a mark."""
        if not self.on_device:
            return 1e3 * (mark - self.start)
        mark.synchronize()
        return self.start.elapsed_time(mark)


class _Step(MessageGeometry):
    """The state of one step on one rank."""

    def __init__(
        self,
        executor: Executor,
        program: Program,
        step: StepPlan,
        batches: Mapping[BatchKey, Mapping[str, Any]],
    ):
        super().__init__(executor.plan, executor.spec, step, batches, executor.stages, executor.count_rows)
        self.executor = executor
        self.rank = executor.rank
        self.program = program
        self.result = StepResult()
        self.running: dict[tuple, _Running] = {}
        self.incoming: dict[Task, dict[Message, _Incoming]] = {}
        self.local: dict[tuple[Message, int], torch.Tensor] = {}
        self.sends: dict[tuple, list[Handle]] = {}
        self.gradients: dict[tuple, dict[str, torch.Tensor]] = {}

    # Receiving

    def receive(self, message: Message) -> None:
        """Posts the receives of this rank's parts of a message."""
        task = message.target
        if message.crosses_boundary:
            num_rows = self.space(message, task).count(self.shared_slots(message))
            width = self.spec.language_model.hidden_size
        elif message.kind == "act":
            shapes = self.shapes(task)
            num_rows, width = sum(num_rows_of(shape) for shape in shapes), shapes[0][-1] if shapes else 0
        else:
            outputs = self.running[task.key].outputs
            num_rows, width = sum(num_rows_of(out.shape) for out in outputs), outputs[0].shape[-1] if outputs else 0
        incoming = _Incoming(num_rows)
        encoder, taker = self.ends(message)
        for part in parts(num_rows, self.grid(encoder), self.grid(taker)):
            source, target = (part.source, part.target) if message.kind == "act" else (part.target, part.source)
            if target != self.rank or source == self.rank:
                continue
            buffer = torch.empty(part.num_rows, width, dtype=self.executor.wire_dtype, device=self.executor.device)
            incoming.buffers[part.index] = buffer
            incoming.handles.append(self.executor.transport.recv(buffer, source))
        self.incoming.setdefault(task, {})[message] = incoming

    def wait(self, task: Task) -> None:
        """Waits for all that a task takes."""
        for incoming in self.incoming.get(task, {}).values():
            for handle in incoming.handles:
                handle.wait()

    def taken(self, message: Message, incoming: _Incoming) -> list[tuple[int, torch.Tensor]]:
        """The parts of a message that this rank has: (index of the part, rows)."""
        result = dict(incoming.buffers)
        for (kept, index), tensor in list(self.local.items()):
            if kept == message:
                result[index] = tensor
                del self.local[kept, index]
        return sorted(result.items())

    def gathered(self, message: Message, incoming: _Incoming) -> torch.Tensor | None:
        """All rows of an activation message, `None` when it has none."""
        if incoming.num_rows == 0:
            return None
        grid = self.grid(message.target)
        mine = self.taken(message, incoming)
        if len(grid) == 1:
            return mine[0][1]
        size = part_size(incoming.num_rows, len(grid))
        own = mine[0][1] if mine else None
        width = own.shape[-1] if own is not None else self.message_width(message)
        padded = torch.zeros(size, width, dtype=self.executor.wire_dtype, device=self.executor.device)
        if own is not None:
            padded[: own.shape[0]] = own
        full = torch.empty(size * len(grid), width, dtype=padded.dtype, device=padded.device)
        dist.all_gather_into_tensor(full, padded, group=self.executor.tp_groups[grid])
        return full[: incoming.num_rows]

    # Sending

    def send(self, message: Message) -> None:
        """Sends this rank's parts of a message, or keeps them when they stay on this rank."""
        task = message.source
        rows = self.payload(message)
        encoder, taker = self.ends(message)
        for part in parts(rows.shape[0], self.grid(encoder), self.grid(taker)):
            source, target = (part.source, part.target) if message.kind == "act" else (part.target, part.source)
            if source != self.rank:
                continue
            piece = rows[part.start : part.stop].contiguous()
            if target == self.rank:
                self.local[message, part.index] = piece
            else:
                handle = self.executor.transport.send(piece, target)
                self.sends.setdefault((message.kind, task.key), []).append(handle)

    def payload(self, message: Message) -> torch.Tensor:
        """All rows of a message, on a rank of its source: `[num_rows, width]`."""
        task = message.source
        if message.kind == "act":
            outputs = self.running[task.key].outputs
            if not message.crosses_boundary:
                pieces = [out.detach().reshape(-1, out.shape[-1]) for out in outputs]
                rows = torch.cat(pieces) if pieces else torch.zeros(0, 0)
            else:
                rows = torch.cat([outputs[index].detach() for index, _ in self.features(message)])
        else:
            name = message.target.module if message.crosses_boundary else "hidden"
            rows = self.gradients[task.key].get(name, torch.zeros(0, 0))
        if message.crosses_boundary:
            slots = self.shared_slots(message)
            if list(self.slots(task)) != slots:
                rows = rows[self.space(message, task).positions(slots).to(rows.device)]
        return rows.to(self.executor.wire_dtype)

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
            rows = self.gathered(message, incoming[message])
            hidden = []
            if rows is not None:
                rows.requires_grad_(needs_graph and flow.hidden_needs_grad(*key))
                leaves["hidden"] = rows
                shapes = self.shapes(task)
                pieces = rows.split([num_rows_of(shape) for shape in shapes])
                hidden = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        features = self.features_of(task, incoming, leaves, needs_graph)
        self.executor.before_forward(task)
        stage = self.executor.stages[key]
        with self.executor.forward_context(), torch.set_grad_enabled(needs_graph):
            outputs = stage(self.batch(task), hidden, features)
            if self.is_last(task):
                outputs = self.loss(task, outputs)
        self.count(task, outputs)
        if needs_graph or not self.is_last(task):
            self.running[task.key] = _Running(outputs, leaves)

    def check_rows(self, task: Task, outputs: Sequence[torch.Tensor]) -> None:
        """Raises `ValueError` unless an encoder made a row for each placeholder token of its samples."""
        for spec, output in zip(self.spec.modules[task.module].features, outputs, strict=True):
            wanted = sum(self.rows(task)[spec.modality])
            if output.shape[0] != wanted:
                samples = [self.step.samples[slot] for slot in self.slots(task)]
                raise ValueError(
                    f"Samples {samples} have {wanted} placeholders of `{spec.modality}` in `input_ids`, but "
                    f"`{task.module}` made {output.shape[0]} features of them. Make the processor's placeholders and "
                    "media agree."
                )

    def count(self, task: Task, outputs: Sequence[torch.Tensor]) -> None:
        """Counts what a module works on, on the first rank of each replica's last encoder or first language stage."""
        replica = self.plan.modules[task.module].replicas[task.replica]
        if task.module != LANGUAGE_MODEL and task.stage == len(replica) - 1:
            self.check_rows(task, outputs)
        if self.grid(task)[0] != self.rank:
            return
        counts = self.result.num_rows
        if task.module == LANGUAGE_MODEL:
            if task.stage == 0:
                counts[task.module] = counts.get(task.module, 0) + self.batch(task)["input_ids"].numel()
        elif task.stage == len(replica) - 1:
            counts[task.module] = counts.get(task.module, 0) + sum(out.shape[0] for out in outputs)
        else:
            counts.setdefault(task.module, 0)

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
            space = self.space(messages[0], task)
            leaf = torch.zeros(
                space.num_rows,
                self.spec.language_model.hidden_size,
                dtype=self.executor.wire_dtype,
                device=self.executor.device,
            )
            for message in messages:
                rows = self.gathered(message, incoming[message])
                if rows is not None:
                    leaf.index_copy_(0, space.positions(self.shared_slots(message)).to(leaf.device), rows)
            leaf.requires_grad_(needs_graph and self.executor.flow.feature_needs_grad(encoder))
            leaves[encoder] = leaf
            tensors: list[torch.Tensor | None] = [None] * len(self.spec.modules[encoder].features)
            with torch.set_grad_enabled(needs_graph):
                pieces = leaf.split(space.sizes)
            for (index, _), piece in zip(self.features(messages[0]), pieces, strict=True):
                tensors[index] = piece
            result[encoder] = tensors
        return result

    def loss(self, task: Task, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Replaces the logits of the last stage by their loss, and hands them to whoever collects them."""
        batch = self.batch(task)
        (logits,) = outputs
        if self.executor.on_logits is not None:
            self.executor.on_logits(task, logits.detach(), batch)
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
        """The gradient of each output of a task: the sum of what its takers sent back."""
        gradients = [torch.zeros_like(out) for out in running.outputs]
        grid = self.grid(task)
        for message in sorted(incoming):  # the same order on all ranks that sum
            arrived = incoming[message]
            if arrived.num_rows == 0:
                continue
            size = part_size(arrived.num_rows, len(self.grid(message.source)))
            width = running.outputs[0].shape[-1]
            rows = torch.zeros(arrived.num_rows, width, dtype=self.executor.wire_dtype, device=self.executor.device)
            for index, part in self.taken(message, arrived):
                rows[index * size : index * size + part.shape[0]] = part
            if len(grid) > 1:
                dist.all_reduce(rows, group=self.executor.tp_groups[grid])
            if message.crosses_boundary:
                chosen = [index for index, _ in self.features(message)]
                space = self.space(message, task)
                full = torch.zeros(space.num_rows, width, dtype=rows.dtype, device=rows.device)
                full.index_copy_(0, space.positions(self.shared_slots(message)).to(full.device), rows)
                pieces: Sequence[torch.Tensor] = full.split(space.sizes)
            else:
                chosen = list(range(len(running.outputs)))
                pieces = rows.split([num_rows_of(out.shape) for out in running.outputs])
            for index, piece in zip(chosen, pieces, strict=True):
                gradients[index] += piece.view_as(gradients[index])
        return gradients

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
