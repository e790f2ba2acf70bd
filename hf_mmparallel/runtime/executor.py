"""Runs the actions of one rank: forwards, backwards, sends, receives and gradient sums, in the program's order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from .._device import clock_of, to_device
from ..data.step_batch import StepData
from ..modeling import ModuleStage, whole_logits
from ..modeling.host_values import KnownOnHost
from ..modeling.products import WeightGradient, use_products
from ..modeling.router_loss import RouterLoss
from ..modeling.unowned import from_shard, local
from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, StageKey
from ..schedule import Program
from ..schedule.kinds import BACKWARD, Action, Message, Task
from ..world import ACTIVITY
from .groups import channels_of
from .joint_passes import TaskHooks, gradient_dtype
from .message_queues import Incoming, MessageQueues, StepMessages, Transport
from .payloads import Payload, Payloads
from .step_inputs import StepInputs, check_feature_tokens, check_features_computed, check_labels
from .work import StepResult, counting_work

# Weight gradients that are put off, see `modeling.products`, by linear layer and chunk
PutOffGradients = dict[nn.Linear, list[list[WeightGradient]]]


class WeightGradients:
    """The linear layers of a rank whose weight gradients can be put off."""

    def __init__(self, stages: Iterable[ModuleStage]):
        self._collected: list[WeightGradient] | None = None  # `None` while they are not put off
        self._layer_of: dict[nn.Linear, int | None] = {}  # linear layer -> its layer in the module, if it is in one
        for stage in stages:
            self._cover(stage)

    def _cover(self, stage: ModuleStage) -> None:
        """Lets the trained linear layers of a stage give this their weight gradients."""
        users: dict[nn.Parameter, list[nn.Module]] = {}
        for module in stage.model.modules():
            for parameter in module.parameters(recurse=False):
                users.setdefault(parameter, []).append(module)
        inside = {part: index for index, layer in stage.own_layers.items() for part in layer.modules()}
        for _, parameter in stage.parameters():
            # a weight with several users has one gradient of all of them
            layer = users[parameter][0] if parameter.requires_grad and len(users[parameter]) == 1 else None
            if isinstance(layer, nn.Linear) and parameter is layer.weight and _computes_plainly(layer):
                use_products(layer, self)
                self._layer_of[layer] = inside.get(layer)

    @contextmanager
    def put_off(self) -> Iterator[list[WeightGradient]]:
        """A block whose backwards add the weight gradients that they leave out to a list."""
        self._collected = result = []
        try:
            yield result
        finally:
            self._collected = None

    @property
    def is_collecting(self) -> bool:
        return self._collected is not None

    def collect(self, gradient: WeightGradient) -> None:
        assert self._collected is not None
        self._collected.append(gradient)

    @torch.no_grad()
    def add(self, gradients: PutOffGradients, reach: Callable[[int], None]) -> None:
        """
        Adds gradients that were put off to those of the parameters, from the last layer to the first, and frees them.
        `reach` is called with the index of each layer before its first one.
        """
        reached: int | None = None
        while gradients:
            layer, chunks = next(iter(gradients.items()))
            index = self._layer_of[layer]
            if index is not None and index != reached:
                reached = index
                reach(index)
            del gradients[layer]
            for of_layer in (chunks, next(iter(gradients.values()), [])):  # rows of the next one travel beside
                for one in chain.from_iterable(of_layer):
                    one.start()
            while chunks:
                _add(layer.weight, reduce(torch.add, (one.compute() for one in chunks.pop(0))))

    def by_layer(self, chunks: Iterable[list[WeightGradient]]) -> PutOffGradients:
        """Linear layer -> what is put off of it in each chunk; first those in no layer, then from the last one on."""
        found: PutOffGradients = {}
        for chunk in chunks:
            own: dict[nn.Linear, list[WeightGradient]] = {}
            for gradient in chunk:
                own.setdefault(gradient.layer, []).append(gradient)
            for layer, gradients in own.items():
                found.setdefault(layer, []).append(gradients)
        places = {layer: self._layer_of[layer] for layer in found}
        ordered = sorted(found, key=lambda layer: -math.inf if (place := places[layer]) is None else -place)
        return {layer: found[layer] for layer in ordered}


def cut_by_work(gradients: PutOffGradients, count: int) -> list[PutOffGradients]:
    """Consecutive parts of what was put off, of about the same work."""
    sizes = list(accumulate(layer.weight.numel() for layer in gradients))
    result: list[PutOffGradients] = [{} for _ in range(count)]
    for (layer, chunks), size in zip(gradients.items(), sizes, strict=True):
        middle = size - layer.weight.numel() / 2
        result[min(int(count * middle / sizes[-1]), count - 1)][layer] = chunks
    return result


def _computes_plainly(layer: nn.Linear) -> bool:
    """Whether a layer is a product with its weight alone, by the forward of its class or on shards of a tp group."""
    is_own = "forward" not in vars(layer) or hasattr(layer, "multiply") or hasattr(layer, "graph_inputs")
    return type(layer) is nn.Linear and is_own and not is_parametrized(layer) and not hasattr(layer, "float8")


def _add(parameter: Any, gradient: Tensor) -> None:
    """Adds to the gradient of a parameter what this rank has computed, as autograd does."""
    gradient = gradient.to(gradient_dtype(parameter))
    if parameter.grad is not None:
        local(parameter.grad).add_(gradient)
        return
    gradient = gradient.contiguous()
    parameter.grad = from_shard(gradient, parameter) if isinstance(parameter, DTensor) else gradient


LossFunction = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]
LogitsFunction = Callable[[Task, Tensor, Mapping[str, Any]], None]


@dataclass(frozen=True)
class StepFunctions:
    """What an executor calls beside the stages."""

    loss: LossFunction  # (logits, labels, are they shifted) -> (sum over target tokens, their number)
    token_metrics: Callable[[Tensor, Tensor, bool], Tensor] | None = None  # other sums over target tokens, for the log
    start_sum: Callable[[int], None] = lambda index: None  # starts a gradient sum of the plan, by its index
    before_forward: Callable[[Task], None] = lambda task: None  # may seed the forward
    forward_context: Callable[[], AbstractContextManager] = nullcontext  # such as autocast
    passes: TaskHooks = field(default_factory=TaskHooks)  # gathers weights and sums gradients in tasks
    routers: RouterLoss | None = None  # records where the tokens of the language model go
    # called when this rank is about to run backwards, and at the end
    before_backward: Callable[[StepResult], None] = lambda result: None
    # generator -> what its loss is multiplied with to count like the loss of a target token; set for each step
    loss_factors: dict[str, float] = field(default_factory=dict)


@dataclass
class _RunningTask:
    outputs: list[Tensor]  # what other tasks receive
    losses: list[Tensor]  # the loss whose backward starts here, if there is one
    inputs: dict[str, Tensor]  # producer module -> the tokens that the task received, a leaf of its graph


class Executor:
    def __init__(
        self,
        plan: ParallelPlan,
        spec: ModelSpec,
        stages: Mapping[StageKey, Any],
        transport: Transport,
        groups: Mapping[tuple[int, ...], dist.ProcessGroup],
        functions: StepFunctions,
        device: torch.device,
    ):
        self.plan = plan
        self.spec = spec
        self.stages = stages
        self.transport = transport
        self.rank = transport.rank
        # each tp group, and each group of cp ranks in the meshes of this rank
        self.groups = groups
        self.functions = functions
        self.device = device
        self.payloads = Payloads(plan, spec)
        self.weight_gradients = WeightGradients(
            stage for key, stage in stages.items() if plan.stage(*key).splits_backward
        )
        self.clock = clock_of(device)

    def run(
        self,
        program: Program,
        data: StepData,
        # makes the error message for an action that does not fit into memory
        out_of_memory: Callable[[Action, torch.OutOfMemoryError], str] = lambda action, error: str(error),
        # gets the task, logits and inputs of each microbatch with logits, with the tokens of all cp ranks
        on_logits: LogitsFunction | None = None,
    ) -> StepResult:
        run = _Step(self, program, data, on_logits)
        marks, mark = run.result.marks, self.clock.mark
        actions: Sequence[Action] = program.actions.get(self.rank, ())
        self.transport.connect(channels_of(self.plan, self.rank, actions))
        passes = self.functions.passes
        passes.start_step(actions)
        for action in actions:
            ACTIVITY.now(action)
            try:
                if action.index is not None:
                    self.functions.start_sum(action.index)
                elif action.message is not None and action.op == "send":
                    run.send(action.message)
                elif action.message is not None:
                    with self._reads_on_host():  # an encoder's forward says what comes
                        run.receive(action.message)
                elif action.task is not None:
                    if action.task.row.direction == BACKWARD:
                        self.functions.before_backward(run.result)
                    passes.begin(action.task, run.has_nothing(action.task))
                    ACTIVITY.waits = True
                    run.result.arrivals += run.queues.wait(action.task, mark)
                    ACTIVITY.waits = False
                    ready = mark()
                    passes.compute(action.task)
                    with self._reads_on_host():
                        run.compute(action.task)
                    passes.end(action.task)
                    marks.append((action.task, ready, mark()))
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(out_of_memory(action, error)) from error
        ACTIVITY.now("the last sends", waits=True)
        run.queues.finish()
        self.functions.before_backward(run.result)
        run.result.end()
        return run.result

    def _reads_on_host(self) -> AbstractContextManager:
        """A block in which forwards, also those of recomputation, read known values of inputs in host memory."""
        return nullcontext() if self.device.type == "cpu" else KnownOnHost(self.device)


class _Step:
    def __init__(self, executor: Executor, program: Program, data: StepData, on_logits: LogitsFunction | None):
        self.executor = executor
        self.program = program
        self.on_logits = on_logits
        self.inputs = StepInputs(
            executor.plan, executor.rank, executor.spec, executor.stages, executor.groups, data, executor.device
        )
        self.messages = StepMessages(executor.payloads, self.inputs)
        self.queues = MessageQueues(executor.transport, executor.groups, executor.device)
        self.result = StepResult(executor.clock)
        # Kept until the backward, or in a task without one until its last send.
        self.running: dict[tuple, _RunningTask] = {}
        # Task -> producer module -> gradient, kept until the last send of a backward.
        self.gradients: dict[tuple, dict[str, Tensor]] = {}
        # Task -> weight gradients that its input gradient left out.
        self.put_off: dict[tuple, list[WeightGradient]] = {}
        # Stage -> what its last tasks of that kind compute, each of them some layers of all of their chunks, so that
        # the sums over ranks begin in the first of these tasks.
        self.parts: dict[StageKey, list[PutOffGradients]] = {}
        # Task without samples -> what its experts have computed, `[0, D]`, for its backward.
        self.without_tokens: dict[tuple, Tensor] = {}
        own_actions = program.actions.get(executor.rank, ())
        self.unsent = Counter(a.message.source for a in own_actions if a.op == "send" and a.message is not None)

    def receive(self, message: Message) -> None:
        payload, task = self.messages.payloads.of(message), message.target
        if message.kind == "act":
            shapes = self.messages.shapes(payload, task)
        else:
            shapes = [output.shape for output in payload.select_outputs(self.running[task.key].outputs)]
        num_tokens = sum(map(payload.num_tokens, shapes))
        self.queues.receive(message, payload, self.messages.routes(message, task, num_tokens))

    def send(self, message: Message) -> None:
        """Sends outputs of a task to one of its consumers, or the gradient of an input to one of its producers."""
        payload, task = self.messages.payloads.of(message), message.source
        if message.kind == "act":
            outputs = payload.select_outputs(self.running[task.key].outputs)
            tokens = _flat_tokens([output.detach() for output in outputs], payload.width)
        else:
            tokens = self.gradients[task.key][payload.producer[0]]
        self.queues.send(message, payload, self.messages.routes(message, task, len(tokens)), tokens)
        self.unsent[task] -= 1
        if not self.unsent[task]:
            self.release(task)

    def compute(self, task: Task) -> None:
        if not self.inputs.is_empty(task):
            _RUN[task.kind](self, task)
        elif not self.has_nothing(task):
            self.run_experts(task)

    def has_nothing(self, task: Task) -> bool:
        """Returns whether this rank computes nothing in a task, not even experts for the tokens of other ranks."""
        return self.inputs.is_empty(task) and self.executor.plan.modules[task.module].expert_replicas == 1

    def run_experts(self, task: Task) -> None:
        """Runs what other ranks need of the experts of a stage in a task in which this rank has no samples."""
        executor = self.executor
        stage = executor.stages[task.stage_key]
        if task.row.after is None:
            needs_graph = self.program.has_backward(task)
            with executor.functions.forward_context(), torch.set_grad_enabled(needs_graph):
                output = stage.run_without_tokens(executor.device)
            if needs_graph:
                self.without_tokens[task.key] = output
        elif task.row.runs_layers:
            output = self.without_tokens.pop(task.key)
            if output.requires_grad:
                with stage.without_tokens():
                    output.backward(torch.zeros_like(output))

    def forward(self, task: Task) -> None:
        executor = self.executor
        needs_graph = self.program.has_backward(task)
        leaves, received = self.received_tensors(task, needs_graph)
        check_features_computed(self.inputs, task)
        executor.functions.before_forward(task)
        stage = executor.stages[task.stage_key]
        batch = self.inputs.forward_batch(task, any(leaf.requires_grad for leaf in leaves.values()))
        counted, routed = counting_work(self.inputs, task, self.result.work), self.recording_routes(task)
        with executor.functions.forward_context(), torch.set_grad_enabled(needs_graph), counted, routed:
            hidden = received.pop(task.module, None)
            outputs = stage(batch, hidden, received, self.inputs.num_local_tokens(task))
            losses = []
            if self.inputs.makes_logits(task):
                losses = self.losses(task, outputs[0])
                outputs = outputs[1:]
            elif self.inputs.makes_loss(task):
                total, outputs = outputs[0], []
                losses = [total * executor.functions.loss_factors.get(task.module, 1.0)]
                count = stage.num_targets(self.inputs.host_batch(task))
                self.result.losses[task] = (total.detach(), torch.tensor(count))
        check_feature_tokens(self.inputs, task, outputs)
        if needs_graph or self.unsent[task]:  # logits of an evaluation have neither, and are not kept
            self.running[task.key] = _RunningTask(outputs, losses, leaves)
        if not needs_graph:
            self.inputs.release(task)

    def recording_routes(self, task: Task) -> AbstractContextManager:
        """Records where the routers of a forward of the language model send its tokens."""
        routers = self.executor.functions.routers
        if routers is None or not routers.coefficient or task.module != LANGUAGE_MODEL:
            return nullcontext()
        self.result.routed[task] = routers.no_sums()
        return routers.recording(self.result.routed[task], self.inputs.is_real(task))

    def received_tensors(
        self, task: Task, needs_graph: bool
    ) -> tuple[dict[str, Tensor], dict[str, list[Tensor | None]]]:
        """
        Returns producer module -> all tokens that a task received from it, a leaf of its graph; and these as views for
        each tensor of that module, `None` for tensors that enter other stages.
        """
        leaves: dict[str, Tensor] = {}
        received: dict[str, list[Tensor | None]] = {}
        for payload, messages in _by_payload(self.queues.take_arrived(task)):
            shapes = self.messages.shapes(payload, task)
            sizes = list(map(payload.num_tokens, shapes))
            leaf = self.leaf(payload, messages, sum(sizes))
            leaf.requires_grad_(needs_graph and any(incoming.payload.needs_grad for incoming in messages))
            module = payload.producer[0]
            leaves[module] = leaf
            with torch.set_grad_enabled(needs_graph):
                tensors = [piece.view(shape) for piece, shape in zip(leaf.split(sizes), shapes, strict=True)]
            received[module] = payload.among_outputs(tensors)
        return leaves, received

    def leaf(self, payload: Payload, messages: Sequence[Incoming], num_tokens: int) -> Tensor:
        """Collects the tokens `[num_tokens, width]` that a task received from one module."""
        gathered = [pair for incoming in messages for pair in self.queues.gather(incoming)]
        if len(gathered) == 1 and gathered[0][1] is None:
            return gathered[0][0]
        leaf = self.queues.zeros(num_tokens, payload)
        for tokens, index in gathered:
            assert index is not None
            leaf.index_copy_(0, to_device(index, leaf.device), tokens)
        return leaf

    def losses(self, task: Task, logits: Tensor) -> list[Tensor]:
        """Passes a stage's logits to `on_logits`, and returns their loss; empty without labels."""
        batch = self.inputs.host_batch(task)
        if self.on_logits is not None:
            logits = whole_logits(logits)
            whole = self.inputs.gather_tokens(task, logits.detach())
            self.on_logits(task, whole, to_device(dict(self.inputs.whole_batch(task)), self.executor.device))
        if self.program.has_backward(task):
            check_labels(batch)
        shifted = batch.get("shift_labels")
        labels = batch.get("labels") if shifted is None else shifted
        if labels is None:
            return []
        functions = self.executor.functions
        if functions.token_metrics is not None:
            self.result.token_metrics[task] = functions.token_metrics(logits, labels, shifted is not None)
        loss, count = functions.loss(logits, labels, shifted is not None)
        self.result.losses[task] = (loss.detach(), count)
        return [loss]

    def backward(self, task: Task) -> None:
        """Runs the backward of a chunk's forward and stores the gradients of the received tokens."""
        running = self.running.pop(task.key)
        gradients = self.output_gradients(task, running.outputs)
        ends = [(loss, None) for loss in running.losses] + list(zip(running.outputs, gradients, strict=True))
        used = [(tensor, gradient) for tensor, gradient in ends if tensor.requires_grad]
        if used:  # an encoder's chunk without tokens may have used nothing that is trained
            torch.autograd.backward([tensor for tensor, _ in used], [gradient for _, gradient in used])
        self.inputs.release(task)
        self.queues.wait_for_sends(replace(task, kind="fwd"))
        if self.unsent[task]:
            self.gradients[task.key] = {
                module: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
                for module, leaf in running.inputs.items()
                if leaf.requires_grad
            }

    def input_gradient(self, task: Task) -> None:
        """Runs the backward of a chunk without the gradients of the weights that can be put off."""
        with self.executor.weight_gradients.put_off() as gradients:
            self.backward(task)
        self.put_off[task.key] = gradients

    def weight_gradient(self, task: Task) -> None:
        owner, passes, key = self.executor.weight_gradients, self.executor.functions.passes, task.stage_key
        if not self.parts.get(key):
            last = passes.last_weights.get(key, ())
            tasks = last if task in last else (task,)
            self.parts[key] = cut_by_work(owner.by_layer(self.put_off.pop(one.key) for one in tasks), len(tasks))
        owner.add(self.parts[key].pop(0), partial(passes.reach, task))

    def output_gradients(self, task: Task, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Sums the gradients of each output of a task that its consumers returned."""
        result: list[Tensor | None] = [None] * len(outputs)
        for payload, messages in _by_payload(self.queues.take_arrived(task)):
            crossed = payload.select_outputs(outputs)
            sizes = [payload.num_tokens(output.shape) for output in crossed]
            total = self.queues.sum_gradients(messages, sum(sizes))
            pieces = [
                piece.view(output.shape).to(output.dtype)
                for piece, output in zip(total.split(sizes), crossed, strict=True)
            ]
            for number, piece in enumerate(payload.among_outputs(pieces)):
                if piece is not None:
                    known = result[number]
                    result[number] = piece if known is None else known + piece
        return [torch.zeros_like(out) if g is None else g for out, g in zip(outputs, result, strict=True)]

    def release(self, task: Task) -> None:
        """Frees the tensors of a task that only its messages needed, after the last one is sent."""
        if task.row.message == "grad":
            del self.gradients[task.key]
        elif not self.program.has_backward(task):
            del self.running[task.key]


_RUN: dict[str, Callable[[_Step, Task], None]] = {
    "fwd": _Step.forward,
    "bwd": _Step.backward,
    "bwd_input": _Step.input_gradient,
    "bwd_weight": _Step.weight_gradient,
}


def _by_payload(messages: Sequence[Incoming]) -> list[tuple[Payload, list[Incoming]]]:
    """Groups messages with tokens of the same tensors, in one order on all ranks, with one of their payloads."""
    groups: dict[tuple, list[Incoming]] = {}
    for incoming in messages:
        groups.setdefault(incoming.payload.tensors_key, []).append(incoming)
    return [(group[0].payload, group) for group in groups.values()]


def _flat_tokens(outputs: Sequence[Tensor], width: int) -> Tensor:
    """Joins all tokens of some outputs to `[num_tokens, width]`."""
    pieces = [output.reshape(-1, width) for output in outputs]
    if len(pieces) < 2:
        return pieces[0] if pieces else torch.zeros(0, width)
    return torch.cat(pieces)
