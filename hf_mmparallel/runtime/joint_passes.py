"""
ZeRO-2 and ZeRO-3: gradients are summed, and weights gathered, layer by layer in each pass over a stage.

A pass runs on all ranks that divide the parameters of its stage at the same time, with an empty task where a replica
has no samples, and every rank issues the same collectives in it, in the order of [`pass_actions`]. Those of a layer
that a rank does not compute, or that has no gradient, are issued when the next one is reached or the pass ends. No
forward or backward can therefore wait for a rank that does not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..data.step_batch import StepBatch
from ..modeling import ModulePart, ModuleStage
from ..modeling.unowned import local
from ..plan import ParallelPlan, StageKey
from ..schedule import REST, Action, PassAction, Task, step_passes
from ..schedule.kinds import BACKWARD, FORWARD, Direction, TaskKind
from ..world import ReduceScatter, World
from .optimizer_slices import (
    FlatSlice,
    Gathering,
    OptimizerSlices,
    SlicedGroup,
    allocate,
    buckets,
    by_slice,
    copy_gathered,
    free,
)

Run = str | None
"""A forward through the layers of a stage: the modality that an encoder encodes, `None` in a language model."""


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    return parameter.grad_dtype or parameter.dtype


def gradients_of(bucket: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Returns the gradients of a bucket on this rank, made of zeros where there is none."""
    for parameter in bucket:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    return [local(parameter.grad) for parameter in bucket if parameter.grad is not None]


@dataclass
class _Unit:
    """Parameters that are gathered, and whose gradients are summed, at once: those of a layer, or of no layer."""

    groups: list[SlicedGroup]  # by the ranks that divide them
    gathering: list[Gathering] = field(default_factory=list)  # the all-gathers in flight


class GradientSums:
    """The sums of gradients over the ranks that divide them, which grow from backward to backward."""

    def __init__(self, before_sum: Callable[[Sequence[nn.Parameter]], None] = lambda parameters: None):
        self.before_sum = before_sum  # called with parameters before each sum
        self.used: set[nn.Parameter] = set()
        self._sums: dict[nn.Parameter, tuple[list[nn.Parameter], torch.Tensor]] = {}  # by the first of a bucket
        self._started: list[tuple[list[nn.Parameter], ReduceScatter]] = []

    @torch.no_grad()
    def add(self, group: SlicedGroup) -> None:
        """Starts to add the gradients of this backward, which the parameters lose. Collective."""
        trained = [member for member in group.members if member.requires_grad]
        if not trained:
            return
        self.before_sum(trained)
        self.used.update(member for member in trained if member.grad is not None)
        for bucket in buckets(trained, gradient_dtype):
            columns = by_slice(gradients_of(bucket), group.flat_slice.num_slices)
            self._started.append((bucket, ReduceScatter(columns, group.flat_slice.group)))
            del columns
            for parameter in bucket:
                parameter.grad = None

    def wait(self) -> None:
        while self._started:
            bucket, started = self._started.pop(0)
            mine = started.wait()
            known = self._sums.get(bucket[0])
            if known is None:
                self._sums[bucket[0]] = bucket, mine
            else:
                known[1].add_(mine)

    def take(self, flat_slice: FlatSlice, parameters: Sequence[nn.Parameter]) -> list[tuple[list[nn.Parameter], Any]]:
        """Takes the sums of some parameters out, by bucket; zeros where there was no backward."""
        self.wait()
        wanted, result = set(parameters), []
        for first in [first for first in self._sums if first in wanted]:
            result.append(self._sums.pop(first))
        known = {parameter for bucket, _ in result for parameter in bucket}
        for bucket in buckets([p for p in parameters if p not in known], gradient_dtype):
            length = sum(flat_slice.length(local(parameter).numel()) for parameter in bucket)
            result.append((bucket, local(bucket[0]).new_zeros(length, dtype=gradient_dtype(bucket[0]))))
        order = {parameter: number for number, parameter in enumerate(parameters)}
        return sorted(result, key=lambda item: order[item[0][0]])


class StagePasses:
    """The passes over one stage on this rank; for `reshards` and `first_backward` see [`pass_actions`]."""

    def __init__(
        self,
        stage: ModuleStage,
        slices: OptimizerSlices,
        sums: GradientSums,
        reshards: bool = True,
        first_backward: int = 0,
    ):
        self.stage, self.slices, self.sums = stage, slices, sums
        self.reshards, self.first_backward = reshards, first_backward
        groups = [group for group in slices.groups if group.zero_stage >= 2]
        parameters = [parameter for _, parameter in stage.parameters()]
        layers = list(stage.own_layers.values())
        layers_of: dict[nn.Parameter, set[int]] = {}
        for index, layer in enumerate(layers):
            for parameter in layer.parameters():
                layers_of.setdefault(parameter, set()).add(index)
        # A parameter that several layers share is gathered with what is in no layer.
        unit_of = {p: min(layers_of[p]) if len(layers_of.get(p, ())) == 1 else REST for p in parameters}
        self.units = {
            index: _Unit(_restricted(groups, {p for p in parameters if unit_of[p] == index}))
            for index in (*range(len(layers)), REST)
        }
        self.gathers = any(group.zero_stage == 3 for unit in self.units.values() for group in unit.groups)
        self._passes: list[tuple[Direction, tuple[PassAction, ...]]] = []  # of the step, the next one last
        self._direction: Direction | None = None  # of the pass that runs
        self._is_empty = False
        self._runs: Sequence[Run] = ()
        self._actions: tuple[PassAction, ...] = ()
        self._done = 0
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._before_forward(index))
            layer.register_forward_hook(lambda layer, args, output, index=index: self._after_forward(index, output))

    def start_step(self, kinds: Sequence[TaskKind], runs: Sequence[Run], keeps_rest: bool = False) -> None:
        """
        Prepares the passes of a step: their kinds, the runs that any rank may have in a pass, and whether what is
        in no layer stays after the last one, for forwards of later virtual stages, which run through it as well.
        """
        num_layers = len(self.units) - 1
        passes = step_passes(kinds, num_layers, len(runs), self.gathers, self.reshards, self.first_backward)
        if keeps_rest:
            passes = [tuple(action for action in own if action != PassAction("free", REST)) for own in passes]
        directions: list[Direction] = [kind.direction for kind in kinds]
        self._passes, self._runs = list(zip(directions, passes, strict=True))[::-1], runs

    def begin(self, is_empty: bool) -> None:
        """Starts to gather what the next pass begins with, which may still wait for its input."""
        self._is_empty = is_empty  # this rank computes nothing in it
        (self._direction, self._actions), self._done = self._passes.pop(), 0
        while self._done < len(self._actions) and self._actions[self._done].op == "gather":
            self._advance()

    def compute(self) -> None:
        if not self._is_empty:
            self._wait(self.units[REST])

    def reach(self, layer: int) -> None:
        """Issues all that comes before the weight gradients of a layer, an index in the module."""
        self._reach(layer - self.stage.layers[0], 0)

    def end(self) -> None:
        while self._done < len(self._actions):
            self._advance()
        self._direction = None

    def _before_forward(self, layer: int) -> None:
        """Reaches a layer before its forward, or before its repetition in a backward."""
        if self._direction == FORWARD:
            self._reach(layer, self._runs.index(self.stage.modality))
        elif self._direction == BACKWARD:
            runs = [
                action.run
                for action in self._actions[self._done :]
                if action.op == "compute" and action.layer == layer
            ]
            if runs and not self._is_computing(layer):
                self._reach(layer, runs[0])

    def _after_forward(self, layer: int, output: Any) -> None:
        """Lets the gradient of a layer's output announce its backward."""
        if self._direction != FORWARD or not torch.is_grad_enabled():
            return
        run = self._runs.index(self.stage.modality)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._reach(layer, run))

    def _is_computing(self, layer: int) -> bool:
        return self._done > 0 and self._actions[self._done - 1] in {
            PassAction("compute", layer, run) for run in range(len(self._runs))
        }

    def _reach(self, layer: int, run: int) -> None:
        """Issues all that comes before the computation of a layer, and waits for its weights."""
        wanted = PassAction("compute", layer, run)
        if self._done and self._actions[self._done - 1] == wanted:
            return
        if wanted not in self._actions[self._done :]:
            raise RuntimeError(
                f"Layer {layer} of a stage of `{self.stage.module_name}` runs after layers that follow it, or "
                "backwards although nothing up to it is trained, and its weights are not there. Use `zero_stage=1` "
                "for this module."
            )
        while self._actions[self._done - 1] != wanted or not self._done:
            self._advance()

    @torch.no_grad()
    def _advance(self) -> None:
        action = self._actions[self._done]
        unit = self.units[action.layer]
        self._done += 1
        if action.op == "gather":
            for group in unit.groups:
                for bucket in buckets(group.divided_weights, lambda parameter: parameter.dtype):
                    unit.gathering.append(self.slices.gather(group.flat_slice, bucket))
        elif action.op == "compute":
            if not self._is_empty:
                self._wait(unit)
        elif action.op == "free":
            self._free(unit)
        else:
            self.sums.wait()  # for those of the layer before
            for group in unit.groups:
                self.sums.add(group)

    def free_rest(self) -> None:
        if self.gathers:
            self._free(self.units[REST])

    def _free(self, unit: _Unit) -> None:
        """Takes the memory of the weights of a unit."""
        for work, *_ in unit.gathering:  # of layers that only others have computed
            work.wait()
        unit.gathering.clear()
        free(member for group in unit.groups for member in group.divided_weights)

    def _wait(self, unit: _Unit) -> None:
        for gathering in unit.gathering:
            allocate(gathering[-1])
            copy_gathered(*gathering)
        unit.gathering.clear()


class LastBackward:
    """Tells in the last task of a stage that adds gradients which layer it has reached."""

    def __init__(self, stage: ModuleStage, note: Callable[[int], None]):
        # `note` gets the index in the module of a layer that is about to run backwards; the gradients of all layers
        # after it are complete
        self.stage, self.note = stage, note
        self._kinds: list[TaskKind] = []  # of the passes that are left, the next one last
        self._is_last = False
        for index, layer in stage.own_layers.items():
            layer.register_forward_hook(lambda layer, args, output, index=index: self._after_forward(index, output))

    def start_step(self, kinds: Sequence[TaskKind], runs: Sequence[Run], keeps_rest: bool = False) -> None:
        self._kinds, self._is_last = list(kinds)[::-1], False

    def begin(self, is_empty: bool) -> None:
        kind = self._kinds.pop()
        # the last tasks that fill share the layers of all of their chunks among them
        others = [other for other in self._kinds if not (kind.fills and other.fills)]
        self._is_last = kind.adds_gradients and not any(other.closes or other.adds_gradients for other in others)

    def compute(self) -> None:
        """Does nothing, see [`StagePasses`]."""

    def free_rest(self) -> None:
        """Does nothing, see [`StagePasses`]."""

    def reach(self, layer: int) -> None:
        if self._is_last:
            self.note(layer)

    def end(self) -> None:
        self._is_last = False

    def _after_forward(self, layer: int, output: Any) -> None:
        """Lets the gradient of a layer's output announce its backward, in the run that runs backwards last."""
        hidden = output if isinstance(output, torch.Tensor) else tree_leaves(output)[0]
        if self.stage.is_first_run and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.reach(layer))


def _restricted(groups: Sequence[SlicedGroup], members: Iterable[nn.Parameter]) -> list[SlicedGroup]:
    """Returns the groups with some parameters only, without those that have none of them."""
    wanted = set(members)
    chosen = [SlicedGroup(g.flat_slice, [m for m in g.members if m in wanted], g.zero_stage) for g in groups]
    return [group for group in chosen if group.members]


class TaskHooks:
    def __init__(self, by_stage: Mapping[StageKey, StagePasses | LastBackward] | None = None):
        self.by_stage = by_stage or {}
        self.runs: Mapping[str, Sequence[Run]] = {}  # encoder -> modalities that any rank encodes in this step
        self._last: dict[Task, list[StageKey]] = {}  # last task of a replica on this rank -> its other virtual stages
        # stage whose sums begin in its last tasks -> those of them that fill, after which it has no others
        self.last_weights: dict[StageKey, list[Task]] = {}

    def start_step(self, actions: Sequence[Action]) -> None:
        """Called before the first of this rank's actions in a step."""
        tasks = [action.task for action in actions if action.task is not None and _is_pass(action.task)]
        last = {task.stage_key[:2]: task for task in tasks}
        self.last_weights = {
            key: list(takewhile(lambda task: task.row.fills, (t for t in reversed(tasks) if t.stage_key == key)))[::-1]
            for key, passes in self.by_stage.items()
            if isinstance(passes, LastBackward)
        }
        self._last = {task: [] for task in last.values()}
        for key, passes in self.by_stage.items():
            kinds = [task.row for task in tasks if task.stage_key == key]
            keeps_rest = bool(kinds) and last[key[:2]].stage_key != key
            passes.start_step(kinds, self.runs.get(key[0], (None,)), keeps_rest)
            if keeps_rest:
                self._last[last[key[:2]]].append(key)

    def begin(self, task: Task, is_empty: bool) -> None:
        """Called before a task waits for its input."""
        for passes in self._of(task):
            passes.begin(is_empty)

    def compute(self, task: Task) -> None:
        """Called before a task computes."""
        for passes in self._of(task):
            passes.compute()

    def reach(self, task: Task, layer: int) -> None:
        """Called before a task computes the weight gradients of a layer, an index in the module."""
        for passes in self._of(task):
            passes.reach(layer)

    def end(self, task: Task) -> None:
        """Called after a task has computed."""
        for passes in self._of(task):
            passes.end()
        for key in self._last.pop(task, ()):
            self.by_stage[key].free_rest()

    def _of(self, task: Task) -> list[StagePasses | LastBackward]:
        """The passes that a task is one of, none or those of its stage."""
        has_pass = _is_pass(task) and task.stage_key in self.by_stage
        return [self.by_stage[task.stage_key]] if has_pass else []


def _is_pass(task: Task) -> bool:
    return task.row.runs_layers or task.row.adds_gradients


def agree_on_modalities(
    plan: ParallelPlan,
    parts: Mapping[str, ModulePart],
    stages: Mapping[StageKey, ModuleStage],
    batch: StepBatch,
    world: World,
) -> dict[str, list[str]]:
    """
    Returns, for encoders whose ranks exchange weights or gradients layer by layer, the modalities of which any
    rank has inputs in this step, since each is a run through the layers. Collective if there is such an encoder.
    """
    joint = {
        name: list(parts[name].modalities)
        for name, module in plan.modules.items()
        if module.sharding.zero_stage >= 2 and name in plan.encoders
    }
    several = [
        (name, modality) for name, modalities in joint.items() if len(modalities) > 1 for modality in modalities
    ]
    if not several:
        return joint
    of_module = {key[0]: stage for key, stage in stages.items()}
    own = {
        (key[0], modality) for key, inputs in batch.batches.items() for modality in of_module[key[0]].present(inputs)
    }
    has = world.all_reduce(torch.tensor([pair in own for pair in several], dtype=torch.int64), "max").tolist()
    absent = {pair for pair, count in zip(several, has, strict=True) if not count}
    return {name: [m for m in modalities if (name, m) not in absent] for name, modalities in joint.items()}
