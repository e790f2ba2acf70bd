"""What a device that runs out of memory was computing, what was predicted for it, and what to set."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from ..cost import RankMemory
from ..cost.stage_memory import GIB
from ..plan import ParallelPlan, SampleSizes, StepPlan, Workloads
from ..schedule.actions import Action, Task
from ..search.steps import PlannedStep, StepPlanner


@dataclass(frozen=True)
class MemoryAccount:
    """
    What is known of the memory of one rank in a step.

    Args:
        plan (`ParallelPlan`): The layout.
        rank (`int`): The rank.
        step (`StepPlan`): The arrangement.
        sizes (`SampleSizes`, *optional*): Of its samples, where they are known.
        workloads (`Workloads`, *optional*): What they were arranged by.
        planner ([`StepPlanner`], *optional*): What planned it, if it is a training step.
    """

    plan: ParallelPlan
    rank: int
    step: StepPlan
    sizes: SampleSizes | None = None
    workloads: Workloads | None = None
    planner: StepPlanner | None = None

    def sentence(self, action: Action, error: BaseException, device: torch.device) -> str:
        """
        What all ranks are told.

        Args:
            action (`Action`): What this rank was doing.
            error (`Exception`): What the allocator raised.
            device (`torch.device`): Where it computes.
        """
        reason = str(error).partition("\n")[0].rstrip(". ")
        said = f"Rank {self.rank} ran out of memory in {self._where(action)}: {reason}."
        predicted = self.predicted()
        if predicted is not None:
            said += f" {_prediction(predicted)}{self._limit()}."
        if device.type == "cuda":
            said += f" At most {torch.cuda.max_memory_allocated(device) / GIB:.1f} GiB were allocated."
        return f"{said} {self._remedy(action.task, predicted)}"

    def predicted(self) -> RankMemory | None:
        """Memory of this rank by estimate; `None` where sizes of samples are unknown."""
        if self.planner is None or self.sizes is None or self.workloads is None:
            return None
        with contextlib.suppress(ValueError):  # an estimate that fails must not hide the error that it is about
            program = self.planner.program(self.step, self.sizes)
            planned = PlannedStep(self.step, program, self.sizes, self.workloads)
            return self.planner.predict(planned).memory[self.rank]
        return None

    def _where(self, action: Action) -> str:
        task = action.task
        if task is None:
            return f"`{action}`"
        module = self.plan.modules[task.module]
        stage = self.plan.stage(task.module, task.replica, task.stage)
        stages = len(module.replicas[task.replica])
        what = "forward" if task.kind == "fwd" else "backward"
        return (
            f"the {what} of microbatch {task.microbatch} of `{task.module}`, stage {task.stage} of {stages} (layers "
            f"{stage.layers[0]}-{stage.layers[1] - 1}), with {self._size(task)}"
        )

    def _size(self, task: Task) -> str:
        """Samples and tokens of a task."""
        slots = list(self.step.chunks[task.module, task.replica, task.microbatch][task.chunk])
        samples = f"{len(slots)} sample{'' if len(slots) == 1 else 's'}"
        if self.sizes is None:
            return f"{samples} of unknown size"
        return f"{samples} and {int(self.sizes.tokens[task.module][slots].sum()):,} tokens"

    def _limit(self) -> str:
        memory_bytes = None if self.planner is None else self.planner.memory_bytes
        return "" if memory_bytes is None else f", where microbatches are made to fit {memory_bytes / GIB:.4g} GiB"

    def _remedy(self, task: Task | None, predicted: RankMemory | None) -> str:
        """What to set."""
        smaller = "lower `per_device_train_batch_size` for smaller microbatches"
        if predicted is not None:
            smaller += f' or set `memory_limit_gib` below {predicted.total_gib:.3g} or to "auto"'
        if task is not None and not self.plan.modules[task.module].activation_checkpointing:
            smaller += f", or set `activation_checkpointing` of `{task.module}`"
        return f"{smaller[0].upper()}{smaller[1:]}."


def _prediction(memory: RankMemory) -> str:
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
    }
    shares = ", ".join(f"{name} {value / GIB:.3g}" for name, value in parts.items() if value)
    return f"Predicted are {memory.total_gib:.3g} GiB ({shares})"
