"""
ZeRO-2 and ZeRO-3: gradients are summed, and weights gathered, layer by layer in each pass over a stage.

A pass is a task as seen by all ranks that divide the parameters of its stage. The scheduler runs it on all of them at
the same time, with an empty task where a replica has no samples, and every rank issues the same collectives in it, in
the same order: those of a layer the stage does not compute, or that has no gradient, are issued when the next one is
reached or the pass ends. No forward or backward can therefore wait for a rank that does not come.

In a pass over layers 0, 1, 2 a rank issues

- forward: gather 0; gather 1, compute 0; free 0, gather 2, compute 1; free 1, compute 2
- backward: gather 1, compute 2; free 2, gather 0, sum 2, compute 1; free 1, sum 1, compute 0; sum 0

and keeps the last layer of a pass if the next one begins with it. What is not in a layer (embeddings, last norm, head)
stays gathered from the first pass of a step to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ..modeling import ModuleStage
from ..modeling.dtensors import local
from ..plan import StageKey
from ..schedule import Action, Task
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
    """The dtype of the gradients of a parameter."""
    return parameter.grad_dtype or parameter.dtype


def gradients_of(bucket: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients of a bucket on this rank, made of zeros where there is none."""
    for parameter in bucket:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    return [local(parameter.grad) for parameter in bucket if parameter.grad is not None]


@dataclass
class _Unit:
    """
    Parameters that are gathered, and whose gradients are summed, at once: those of a layer, or those of no layer.

    Args:
        groups (`list[SlicedGroup]`): The parameters, by the ranks that divide them.
        gathering (`list[Gathering]`): The all-gathers in flight.
        is_gathered (`bool`): Whether the weights have memory, or will have once `gathering` is done.
    """

    groups: list[SlicedGroup]
    gathering: list[Gathering] = field(default_factory=list)
    is_gathered: bool = False

    @property
    def freed(self) -> list[nn.Parameter]:
        """The parameters that are gathered and freed."""
        return [member for group in self.groups if group.zero_stage == 3 for member in group.members]


class GradientSums:
    """
    The sums of gradients over the ranks that divide them, which grow from backward to backward.

    Args:
        before_sum (`Callable[[Sequence[nn.Parameter]], None]`, *optional*): Called with parameters before each sum.
    """

    def __init__(self, before_sum: Callable[[Sequence[nn.Parameter]], None] = lambda parameters: None):
        self.before_sum = before_sum
        self.used: set[nn.Parameter] = set()
        self._sums: dict[nn.Parameter, tuple[list[nn.Parameter], torch.Tensor]] = {}  # by the first of a bucket
        self._started: list[tuple[Any, list[nn.Parameter], torch.Tensor]] = []

    @torch.no_grad()
    def add(self, group: SlicedGroup) -> None:
        """Starts to add the gradients of this backward, which the parameters lose. Collective."""
        trained = [member for member in group.members if member.requires_grad]
        if not trained:
            return
        self.before_sum(trained)
        self.used.update(member for member in trained if member.grad is not None)
        for bucket in buckets(trained, gradient_dtype):
            slices = by_slice(gradients_of(bucket), group.flat_slice.num_slices)
            for parameter in bucket:
                parameter.grad = None
            mine = torch.empty_like(slices[0])
            work = dist.reduce_scatter_single(mine, slices.view(-1), group=group.flat_slice.group, async_op=True)
            self._started.append((work, bucket, mine))

    def wait(self) -> None:
        """Waits for the sums that were started."""
        for work, bucket, mine in self._started:
            work.wait()
            known = self._sums.get(bucket[0])
            if known is None:
                self._sums[bucket[0]] = bucket, mine
            else:
                known[1].add_(mine)
        self._started.clear()

    def take(self, flat_slice: FlatSlice, parameters: Sequence[nn.Parameter]) -> list[tuple[list[nn.Parameter], Any]]:
        """
        The sums of some parameters, by bucket, which are then forgotten; zeros where there was no backward.

        Args:
            flat_slice ([`FlatSlice`]): This rank's slice of them.
            parameters (`Sequence[nn.Parameter]`): All parameters of a gradient sum of the plan.
        """
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
    """
    The passes over one stage on this rank.

    Args:
        stage ([`ModuleStage`]): The stage.
        slices ([`OptimizerSlices`]): What this rank has of divided parameters.
        sums ([`GradientSums`]): The sums of gradients.
    """

    def __init__(self, stage: ModuleStage, slices: OptimizerSlices, sums: GradientSums):
        self.stage, self.slices, self.sums = stage, slices, sums
        groups = [group for group in slices.groups if group.zero_stage >= 2]
        own = {parameter for _, parameter in stage.parameters()}
        layers = list(stage.own_layers.values())
        inside = [set(layer.parameters()) & own for layer in layers]
        outside = own.difference(*inside) | {
            p for i, own in enumerate(inside) for other in inside[:i] for p in own & other
        }
        self.layers = [_Unit(_restricted(groups, members - outside)) for members in inside]
        self.rest = _Unit(_restricted(groups, outside))
        self.divides_weights = any(unit.freed for unit in (*self.layers, self.rest))
        self._order: list[tuple[Run, int]] = []  # of the pass that runs
        self._position = 0
        self._kind: str | None = None
        self.kinds: list[str] = []  # of the passes of the step, the next one last
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._before_forward(index))
            layer.register_forward_hook(lambda layer, args, output, index=index: self._after_forward(index, output))

    def begin(self, kind: str, runs: Sequence[Run]) -> None:
        """
        Starts to gather what a pass begins with, which may still wait for its input.

        Args:
            kind (`str`): `"fwd"` or `"bwd"`.
            runs (`Sequence[Run]`): Those that any rank may have.
        """
        assert self._kind is None and self.kinds.pop() == kind
        order = [(run, index) for run in runs for index in range(len(self.layers))]
        self._kind, self._order = kind, order if kind == "fwd" else order[::-1]
        self._position = -1
        self._gather(self.rest)
        self._gather_at(0)

    def compute(self) -> None:
        """Waits for what no layer has; then the pass may compute."""
        self._wait(self.rest)

    def end(self) -> None:
        """Issues what is left of a pass."""
        while self._position + 1 < len(self._order):
            self._advance()
        self._wait(self.rest)  # also if nothing was computed
        last = self._order[-1][1] if self._order else None
        if last is not None:
            starts_there = {"fwd": 0, "bwd": len(self.layers) - 1}
            if not self.kinds or starts_there[self.kinds[-1]] != last:
                self._free(self.layers[last])
            self._sum(self.layers[last])
        self._sum(self.rest)
        if not self.kinds:
            self._free(self.rest)
        self._kind = None

    def _before_forward(self, index: int) -> None:
        """Before the forward of a layer, or its repetition in a backward."""
        if self._kind == "fwd":
            self._reach(self.stage.modality, index)
        elif self._kind == "bwd" and (self._position < 0 or self._order[self._position][1] != index):
            runs = [run for run, layer in self._order[self._position + 1 :] if layer == index]
            self._reach(runs[0] if runs else None, index)

    def _after_forward(self, index: int, output: Any) -> None:
        """Lets the gradient of a layer's output announce its backward."""
        if self._kind != "fwd" or not torch.is_grad_enabled():
            return
        run = self.stage.modality
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._reach(run, index))

    def _reach(self, run: Run, index: int) -> None:
        """Issues all that comes before a layer, and waits for its weights."""
        try:
            position = self._order.index((run, index))
        except ValueError:
            position = -1
        if position < self._position:
            raise RuntimeError(
                f"Layer {index} of this stage of `{self.stage.module_name}` runs after layers that follow it, and its "
                "weights are no longer there. Use `zero_stage=1` for this module."
            )
        while self._position < position:
            self._advance()

    def _advance(self) -> None:
        """From a layer to the next one: frees it, gathers the one after that, and sums the gradients of the first."""
        left = self.layers[self._order[self._position][1]] if self._position >= 0 else None
        self._position += 1
        if left is not None and self.layers[self._order[self._position][1]] is not left:
            self._free(left)
        self._gather_at(self._position + 1)
        if left is not None:
            self._sum(left)
        self._wait(self.layers[self._order[self._position][1]])

    def _gather_at(self, position: int) -> None:
        if position < len(self._order):
            self._gather(self.layers[self._order[position][1]])

    def _gather(self, unit: _Unit) -> None:
        if unit.is_gathered:
            return
        unit.is_gathered = True
        for group in unit.groups:
            if group.zero_stage == 3:
                for bucket in buckets(group.members, lambda parameter: parameter.dtype):
                    unit.gathering.append(self.slices.gather(group.flat_slice, bucket))

    @torch.no_grad()
    def _wait(self, unit: _Unit) -> None:
        """Waits for the weights of a unit; its memory is allocated only now."""
        for gathering in unit.gathering:
            allocate(gathering[-1])
            copy_gathered(*gathering)
        unit.gathering.clear()

    def _free(self, unit: _Unit) -> None:
        self._wait(unit)
        free(unit.freed)
        unit.is_gathered = False

    def _sum(self, unit: _Unit) -> None:
        """In a backward, starts to sum the gradients of a unit, after those of the one before are summed."""
        if self._kind == "bwd":
            self.sums.wait()
            for group in unit.groups:
                self.sums.add(group)


def _restricted(groups: Sequence[SlicedGroup], members: Iterable[nn.Parameter]) -> list[SlicedGroup]:
    """The groups with some parameters only, without those that have none of them."""
    wanted = set(members)
    chosen = [SlicedGroup(g.flat_slice, [m for m in g.members if m in wanted], g.zero_stage) for g in groups]
    return [group for group in chosen if group.members]


class JointPasses:
    """
    The passes over the stages of this rank whose parameters are divided in them.

    Args:
        by_stage (`Mapping[StageKey, StagePasses]`, *optional*): Those stages; none by default.

    Attributes:
        runs (`Mapping[str, Sequence[Run]]`): Encoder -> the modalities that any rank encodes in this step.
    """

    def __init__(self, by_stage: Mapping[StageKey, StagePasses] | None = None):
        self.by_stage = by_stage or {}
        self.runs: Mapping[str, Sequence[Run]] = {}

    def start_step(self, actions: Sequence[Action]) -> None:
        """Before the first of this rank's actions in a step."""
        tasks = [action.task for action in actions if action.task is not None]
        for key, passes in self.by_stage.items():
            passes.kinds = [task.kind for task in reversed(tasks) if task.stage_key == key]

    def begin(self, task: Task) -> None:
        """Before a task waits for its input."""
        if task.stage_key in self.by_stage:
            self.by_stage[task.stage_key].begin(task.kind, self.runs.get(task.module, (None,)))

    def compute(self, task: Task) -> None:
        """Before a task computes."""
        if task.stage_key in self.by_stage:
            self.by_stage[task.stage_key].compute()

    def end(self, task: Task) -> None:
        """After a task has computed."""
        if task.stage_key in self.by_stage:
            self.by_stage[task.stage_key].end()
