"""Error messages for a device that runs out of memory: its computation, the prediction, and settings that help."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..cost import RankMemory
from ..cost.stage_memory import GIB
from ..cost.step_planner import PlannedStep, StepPlanner
from ..modeling.unowned import local
from ..plan import ParallelPlan, SampleSizes, StepPlan, Workloads
from ..schedule.kinds import Action, Task
from .optimizer_slices import whole_parameter

_STEPPING = "_hf_mmparallel_stepping"


@dataclass(frozen=True)
class MemoryAccount:
    """The facts about the memory of one rank in a step that an error message needs."""

    plan: ParallelPlan
    rank: int
    step: StepPlan
    sizes: SampleSizes | None = None
    workloads: Workloads | None = None  # by which samples were arranged
    planner: StepPlanner | None = None  # of a training step

    def sentence(self, action: Action, error: BaseException, device: torch.device) -> str:
        """Makes the error message for all ranks, of the action that this rank ran."""
        said = f"Rank {self.rank} ran out of memory in {self._where(action)}: {_reason(error)}."
        predicted = self.predict()
        if predicted is not None:
            said += f" {_prediction(predicted)}{self._limit()}."
        return f"{said}{_allocated(device)} {self._remedy(action.task, predicted)}"

    def optimizer_sentence(self, optimizer: torch.optim.Optimizer, error: BaseException, device: torch.device) -> str:
        held = [f"`{name}` (layers {first}-{stop - 1})" for name, (first, stop) in self._stages()]
        said = (
            f"Rank {self.rank} ran out of memory in the optimizer's step of {' and '.join(held)}: {_reason(error)}. "
            f"It has {_held_text(optimizer)}"
        )
        predicted = self.predict()
        said += f". {_prediction(predicted)}." if predicted is not None else "."
        names = " or ".join(dict.fromkeys(f"`{name}`" for name, _ in self._stages()))
        return (
            f"{said}{_allocated(device)} Use an optimizer with a smaller state or smaller temporary tensors "
            '(`optim="adamw_torch_fused"`, `"adafactor"`, `"adamw_bnb_8bit"`), raise `pp_size` or `tp_size` of '
            f"{names}, or freeze a part of it. Smaller microbatches help only where activations fragment the memory."
        )

    def _stages(self) -> list[tuple[str, tuple[int, int]]]:
        """Lists the modules of this rank, each with the layers of a stage."""
        return [
            (name, (stage.layers[0], stage.layers[1]))
            for name, module in self.plan.modules.items()
            for _, _, stage in module.stages()
            if self.rank in stage.all_ranks
        ]

    def predict(self) -> RankMemory | None:
        """Predicts memory of this rank; `None` where sizes of samples are unknown."""
        if self.planner is None or self.sizes is None or self.workloads is None:
            return None
        with contextlib.suppress(ValueError):  # an estimate that fails must not hide the error that it is about
            planned = PlannedStep(self.step, self.sizes, self.workloads)
            return self.planner.predict(planned).memory[self.rank]
        return None

    def _where(self, action: Action) -> str:
        task = action.task
        if task is None:
            return f"`{action}`"
        module = self.plan.modules[task.module]
        stage = self.plan.stage(task.module, task.replica, task.stage)
        stages = len(module.replicas[task.replica])
        return (
            f"the {task.row.label} of microbatch {task.microbatch} of `{task.module}`, stage {task.stage} of {stages} "
            f"(layers {stage.layers[0]}-{stage.layers[1] - 1}), with {self._size(task)}"
        )

    def _size(self, task: Task) -> str:
        batch_indices = list(self.step.chunk(task.module, task.replica, task.microbatch, task.chunk))
        samples = f"{len(batch_indices)} sample{'' if len(batch_indices) == 1 else 's'}"
        if self.sizes is None:
            return f"{samples} of unknown size"
        return f"{samples} and {int(self.sizes.tokens[task.module][batch_indices].sum()):,} tokens"

    def _limit(self) -> str:
        memory_bytes = None if self.planner is None else self.planner.memory_bytes
        return "" if memory_bytes is None else f", where microbatches are made to fit {memory_bytes / GIB:.4g} GiB"

    def _remedy(self, task: Task | None, predicted: RankMemory | None) -> str:
        smaller = "lower `per_device_train_batch_size` for smaller microbatches"
        if predicted is not None:
            smaller += f' or set `memory_limit_gib` below {predicted.total_gib:.3g} or to "auto"'
        if task is not None and not self.plan.modules[task.module].activation_checkpointing:
            smaller += f", or set `activation_checkpointing` of `{task.module}`"
        return f"{smaller[0].upper()}{smaller[1:]}."


@contextlib.contextmanager
def name_optimizer_in_errors(
    # returns this rank's optimizer, once there is one
    optimizer: Callable[[], torch.optim.Optimizer | None],
    account: Callable[[], MemoryAccount | None],
    device: torch.device,
) -> Iterator[None]:
    """Wraps a block in which an optimizer steps; if the step runs out of memory, the error names the optimizer."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        stepping, facts = optimizer(), account()
        if stepping is None or facts is None or not getattr(stepping, _STEPPING, False):
            raise
        raise torch.OutOfMemoryError(facts.optimizer_sentence(stepping, error, device)) from error


def mark_steps(optimizer: torch.optim.Optimizer) -> None:
    """Lets [`name_optimizer_in_errors`] know when an optimizer steps."""
    optimizer.register_step_pre_hook(lambda optimizer, *_: setattr(optimizer, _STEPPING, True))
    optimizer.register_step_post_hook(lambda optimizer, *_: setattr(optimizer, _STEPPING, False))


def _reason(error: BaseException) -> str:
    """Returns the first sentence of what the allocator says."""
    return str(error).partition("\n")[0].rstrip(". ")


def _held_text(optimizer: torch.optim.Optimizer) -> str:
    """Names the memory of an optimizer's parameters, their gradients and its state on this rank."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shares = [
        f"{sum(map(_num_bytes, tensors)) / GIB:.3g} GiB of {name}"
        for name, tensors in (
            ("trained weights", [whole_parameter(parameter) for parameter in parameters]),
            ("gradients", gradients),
            ("optimizer state", [value for value in states if isinstance(value, torch.Tensor)]),
        )
    ]
    missing = sum(1 for parameter in parameters if not optimizer.state.get(parameter))
    text = f"{shares[0]}, {shares[1]} and {shares[2]}"
    return f"{text}, which {missing} of {len(parameters)} parameters still lack" if missing else text


def _allocated(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f" At most {torch.cuda.max_memory_allocated(device) / GIB:.1f} GiB were allocated."


def _num_bytes(tensor: torch.Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()


def _prediction(memory: RankMemory) -> str:
    shares = ", ".join(f"{name} {value / GIB:.3g}" for name, value in memory.parts.items() if value)
    return f"Predicted are {memory.total_gib:.3g} GiB ({shares})"
