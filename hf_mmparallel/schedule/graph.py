"""The tasks of a step, what each waits for, and where gradients flow."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import ParallelPlan, StepPlan
from .actions import Message, StageKey, Task


class GradientFlow:
    """
    Which stages of a plan run backwards, and through which of their inputs.

    A stage needs the gradient of an input iff something trainable lies before that input (papers: Cornstarch,
    section 4.3). These are the answers for a stage; a single chunk can need less, such as a sample without images on
    a frozen language model behind a trainable encoder, for which [`Program.has_backward`] is exact.

    Args:
        plan (`ParallelPlan`): The plan.
    """

    def __init__(self, plan: ParallelPlan):
        self._backward: dict[StageKey, bool] = {}
        self._input: dict[StageKey, bool] = {}
        self._features: dict[str, bool] = {}
        for name, module in plan.modules.items():
            replicas = [(replica, module.replicas[replica]) for replica in module.with_stages]
            for replica, stages in replicas:
                taking = {
                    index
                    for edge in plan.edges
                    if edge.target == name and self._features[edge.source]
                    for index in plan.edge_stages(edge, replica)
                }
                before = False
                for index, stage in enumerate(stages):
                    needs = before or index in taking
                    self._input[name, replica, index] = needs
                    before = needs or stage.trainable
                    self._backward[name, replica, index] = before
            self._features[name] = any(self._backward[name, replica, len(stages) - 1] for replica, stages in replicas)

    def input_needs_grad(self, module: str, replica: int, stage: int) -> bool:
        """Whether the stage needs the gradient of its hidden state or of features that enter it."""
        return self._input[module, replica, stage]

    def hidden_needs_grad(self, module: str, replica: int, stage: int) -> bool:
        """Whether the stage sends a gradient to the stage before it."""
        return stage > 0 and self._backward[module, replica, stage - 1]

    def feature_needs_grad(self, module: str) -> bool:
        """Whether what `module` hands to another one, such as the features of an encoder, needs a gradient."""
        return self._features[module]

    def has_backward(self, module: str, replica: int, stage: int) -> bool:
        """Whether the stage runs backwards: it is trainable or an input of it needs a gradient."""
        return self._backward[module, replica, stage]


@dataclass(frozen=True)
class TaskGraph:
    """
    The work of one step.

    Args:
        tasks (`tuple[Task, ...]`):
            Each after those that it waits for; within a stage forwards, and backwards, in the order of their chunks.
        predecessors (`tuple[tuple[int, ...], ...]`): For each task, the places in `tasks` of those that it waits for.
        messages (`tuple[Message, ...]`): All messages.
        ends (`tuple[tuple[int, int], ...]`): For each message, the places in `tasks` of its source and its target.
    """

    tasks: tuple[Task, ...]
    predecessors: tuple[tuple[int, ...], ...]
    messages: tuple[Message, ...]
    ends: tuple[tuple[int, int], ...]


def build_graph(plan: ParallelPlan, step: StepPlan, training: bool = True) -> TaskGraph:
    """
    Lists the tasks and messages of a step. Chunks without samples have none.

    Args:
        plan (`ParallelPlan`): The layout.
        step (`StepPlan`): The arrangement of the global batch.
        training (`bool`, *optional*, defaults to `True`): Whether there are backwards.

    Returns:
        `TaskGraph`: The graph.
    """
    tasks, place = _forwards(plan, step)
    links = [(source, target) for module in plan.modules for source, target in _links(plan, step, place, module)]
    sources: list[list[int]] = [[] for _ in tasks]
    for source, target in links:
        sources[target].append(source)

    backward: dict[int, int] = {}
    if training:
        for index, task in enumerate(tasks):
            trainable = plan.stage(task.module, task.replica, task.stage).trainable
            if trainable or any(source in backward for source in sources[index]):
                backward[index] = -1

    # A backward stands after all that it waits for when the forwards are walked from the last to the first; within a
    # stage the chunks keep their order.
    predecessors = [tuple(found) for found in sources]
    forward_links = list(links)
    grads: list[list[int]] = [[] for _ in tasks]
    for source, target in links:
        if source in backward:
            grads[source].append(target)
    num_forwards = len(tasks)
    for index in _reversed_stages(plan, tasks[:num_forwards]):
        if index not in backward:
            continue
        task = tasks[index]
        backward[index] = len(tasks)
        tasks.append(Task("bwd", *task.key))
        predecessors.append((index, *(backward[target] for target in grads[index])))
    ends = forward_links + [(backward[target], backward[source]) for source, target in links if source in backward]
    messages = tuple(
        Message("act" if source < num_forwards else "grad", tasks[source], tasks[target]) for source, target in ends
    )
    return TaskGraph(tuple(tasks), tuple(predecessors), messages, tuple(ends))


def _forwards(plan: ParallelPlan, step: StepPlan) -> tuple[list[Task], dict[tuple[str, int, int, int, int], int]]:
    """The forwards of every module in turn, and where the forward of each key is in the list."""
    tasks: list[Task] = []
    place: dict[tuple[str, int, int, int, int], int] = {}
    chunks = step.chunks
    for name, module in plan.modules.items():
        for replica in module.with_stages:
            num_stages = len(module.replicas[replica])
            for microbatch, own in enumerate(chunks.of_replica(name, replica)):
                for chunk in range(len(own)):
                    for stage in range(num_stages):
                        task = Task("fwd", name, replica, stage, microbatch, chunk)
                        place[task.key] = len(tasks)
                        tasks.append(task)
    return tasks, place


def _links(
    plan: ParallelPlan, step: StepPlan, place: dict[tuple[str, int, int, int, int], int], name: str
) -> list[tuple[int, int]]:
    """Which forwards of module `name` feed which forwards, in this module and behind its edges."""
    edges = [edge for edge in plan.edges if edge.source == name]
    takers: dict[tuple[str, int], tuple[int, int, int]] = {}
    entries = {}
    for edge in edges:
        for replica in step.replicas(edge.target):
            entries[edge.target, replica] = tuple(plan.edge_stages(edge, replica))
            for microbatch, chunks in enumerate(step.chunks.of_replica(edge.target, replica)):
                for chunk, slots in enumerate(chunks):
                    for slot in slots:
                        takers[edge.target, slot] = (replica, microbatch, chunk)
    links = []
    for replica in plan.modules[name].with_stages:
        last = len(plan.modules[name].replicas[replica]) - 1
        for microbatch, chunks in enumerate(step.chunks.of_replica(name, replica)):
            for chunk, slots in enumerate(chunks):
                first = place[name, replica, 0, microbatch, chunk]
                links.extend((first + stage, first + stage + 1) for stage in range(last))
                for edge in edges:
                    found = {takers[edge.target, slot] for slot in slots if (edge.target, slot) in takers}
                    for target_replica, target_microbatch, target_chunk in sorted(found):
                        start = place[edge.target, target_replica, 0, target_microbatch, target_chunk]
                        links.extend((first + last, start + stage) for stage in entries[edge.target, target_replica])
    return links


def _reversed_stages(plan: ParallelPlan, forwards: list[Task]) -> list[int]:
    """Places of the forwards, modules and stages from the last to the first, chunks of a stage in order."""
    order = {name: index for index, name in enumerate(plan.modules)}
    return sorted(
        range(len(forwards)),
        key=lambda i: (-order[forwards[i].module], forwards[i].replica, -forwards[i].stage, i),
    )
