"""A model under a plan on this rank, which the Trainer has in place of a wrapped model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..cost import CostModel, analytic_costs, find_device
from ..data.context_tokens import WORDS, ContextSharder, layer_costs, layer_windows
from ..data.randomness import stable_seed
from ..data.step_dataset import StepBatch, keys_of_rank
from ..modeling import module_parts, prepare_stages, token_loss
from ..modeling.dtypes import cast_values
from ..modeling.tensor_parallel import apply_module_tp, with_tp_dims
from ..plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlugin,
    ParallelPlan,
    SampleSizes,
    StepPlan,
    Workloads,
    sync_groups,
)
from ..schedule import Program, Task
from ..steps.step_planner import StepPlanner
from ..world import ACTIVITY, World, doing
from .executor import Executor
from .first_step import FirstStepCheck
from .gradients import GradientSync, accumulate_in_float32, clip_gradients, gradient_norm, scale_gradients
from .groups import ProcessGroups
from .optimizer_slices import OptimizerSlices
from .out_of_memory import MemoryAccount
from .replicated import EqualGradients, ReplicatedParameters, replicated_parameters
from .sharded_model import ShardedModel
from .step_check import StepCheck
from .step_result import StepResult
from .transport import DistributedTransport


@dataclass(frozen=True)
class StepTotals:
    """
    Sums over all ranks of one step.

    Args:
        loss (`float`): Sum over the target tokens of the global batch.
        num_targets (`int`): Target tokens.
        num_tokens (`int`): Input tokens with padding.
        num_real_tokens (`int`): Input tokens without padding.
    """

    loss: float
    num_targets: int
    num_tokens: int
    num_real_tokens: int

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.num_targets, 1)


class ParallelEngine(nn.Module):
    """
    Prepares this rank's part of a model and runs steps on it.

    The model is pruned in place: parameters of other ranks lose their memory, names stay those of the whole model.

    Args:
        model (`PreTrainedModel`): The whole model; owned weights may still be on the meta device when `load` is given.
        spec (`ModelSpec`): Its description.
        plan (`ParallelPlan`): The plan.
        world ([`World`]): The ranks of the plan.
        label_smoothing (`float`, *optional*, defaults to 0.0): As in the Trainer.
        seed (`int`, *optional*, defaults to 0): Base of the seeds of dropout.
        load (`Callable[[PreTrainedModel], None]`, *optional*): Fills the owned weights after pruning.
        costs (`CostModel`, *optional*):
            Costs of layers, the same on all ranks; context parallelism cuts tokens by them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        plan: ParallelPlan,
        world: World,
        label_smoothing: float = 0.0,
        seed: int = 0,
        load: Callable[[PreTrainedModel], None] | None = None,
        costs: CostModel | None = None,
    ):
        super().__init__()
        self.spec = with_tp_dims(model, spec, {name: module.tp_size for name, module in plan.modules.items()})
        self.plan = plan
        self.world = world
        self.device = world.device
        self.rank = world.rank
        self.seed = seed
        self.label_smoothing = label_smoothing
        self.costs = costs or analytic_costs(self.spec, find_device("cpu"))
        # Of the whole model, which the next lines take apart.
        self.encoder_inputs = _encoder_inputs(model)
        self.num_compute_parameters = model.num_parameters(exclude_embeddings=True)
        self.sharder = self._context_sharder(model)
        # Groups are made in one order on all ranks, before anything communicates.
        self.sync_groups = sync_groups(self.spec, plan)
        self.sharded = ShardedModel(model, self.spec, plan, world)
        self.shards = self.sharded.shards
        self.groups = ProcessGroups(plan, self.sync_groups, world)
        self.stages = prepare_stages(model, self.spec, plan, self.rank, self.device)
        self.module: Any = model
        self.partial: set[str] = set()  # parameters whose gradients are partial sums on each rank of a tp group
        self._load(load)
        self._prepare_steps()
        self.settings: Mapping[str, ModulePlugin] = {}  # module -> its settings, saved with the plan
        self.cast_to: torch.dtype | None = None  # see `cast`
        self.planner: StepPlanner | None = None  # of the training steps
        # Of the last step, for callbacks.
        self.step_index = 0
        self.last_result: StepResult | None = None
        self.asked_s = 0.0  # when the Trainer asked for its batch
        self.data_ms = 0.0  # how long this rank waited for it
        self.account: MemoryAccount | None = None
        self.current_step: StepPlan | None = None
        self.current_sizes: SampleSizes | None = None
        self.current_workloads: Workloads | None = None

    def _context_sharder(self, model: PreTrainedModel) -> ContextSharder | None:
        """The sharder of the language model's microbatches; `None` without context parallelism."""
        if self.plan.modules[LANGUAGE_MODEL].cp_size == 1:
            return None
        media = frozenset().union(*self.encoder_inputs.values())
        windows = layer_windows(model.config.get_text_config(), self.spec.language_model.num_layers)
        costs = layer_costs(self.costs, self.plan)
        return ContextSharder(self.plan, self.rank, self.spec.placeholders, media, costs, windows)

    def _load(self, load: Callable[[PreTrainedModel], None] | None) -> None:
        """Moves this rank's weights to its device, each sharded over its tp group."""
        if load is None:
            self.module.to(self.device)
            self._shard_layers()
        else:
            self._shard_layers()  # on the meta device, so that a rank reads its shards only
            load(self.module)
            self.module.to(self.device)

    def _prepare_steps(self) -> None:
        """The executor, the gradient sums and the checks of steps, for parameters that stay the same objects."""
        self.executor = Executor(
            self.plan,
            self.spec,
            self.stages,
            DistributedTransport(self.world, self.groups.channels),
            self.groups.by_ranks,
            lambda logits, labels, shifted: token_loss(self.module, logits, labels, self.label_smoothing, shifted),
            self.device,
        )
        named = dict(self.module.named_parameters())
        self.trained = [p for p in named.values() if p.requires_grad]
        self.slices = OptimizerSlices(self.sync_groups, named, self.rank, self.groups.by_ranks)
        self.updated = [self.slices.updated(p) for p in self.trained]
        self.counted = [
            self.slices.updated(named[name])
            for name, shards in self.shards.items()
            if shards.owned_by(self.rank) and named[name].requires_grad
        ]
        replicated = replicated_parameters(self.sharded, self.stages, self.groups, self.partial)
        self._equal_gradients = EqualGradients(replicated)
        self._first_step: FirstStepCheck | None = self._first_step_check(replicated, named)
        self.sync = GradientSync(self.sync_groups, named, self.rank, self.groups.by_ranks, self.slices)
        self.executor.before_forward = self._seed_task
        self.executor.on_sync = self.sync.start
        self.sync.before_sum = self._before_sum
        self._check_step = StepCheck(
            self.world,
            num_replicas=self.plan.modules[LANGUAGE_MODEL].dp_size,
            sums=stable_seed(*((group.ranks, group.stages, group.parameters) for group in self.sync_groups)),
            has_shardings=self.sharder is not None,
        )

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "A model under a plan has no forward of its own, each rank holds a part. Use `trainer.gather_model()` on "
            "all ranks for a whole model."
        )

    def cast(self, dtype: torch.dtype) -> None:
        """Casts this rank's part of the model for good, and widens the dtypes in which tensors are sent if needed."""
        cast_values(self.module, dtype)
        self.cast_to = dtype
        self.executor.payloads.widen(dtype)
        for stage in self.stages.values():
            stage.widen(dtype)

    def _shard_layers(self) -> None:
        """Applies tensor parallelism to the stages of this rank."""
        for module, replica, index in self.stages:
            stage = self.plan.stage(module, replica, index)
            mesh = self.groups.tp_mesh(stage.mesh[stage.cp_rank_of(self.rank)])
            if mesh is not None:
                owned = {name for name, shards in self.shards.items() if (module, replica, index) in shards.stages}
                self.partial |= apply_module_tp(self.module, self.spec.modules[module], mesh, owned)

    @property
    def holds_all_trained(self) -> bool:
        """Whether this rank holds every parameter that is trained."""
        return not any(
            parameter.trainable and not self.sharded.holds(name) for name, parameter in self.spec.parameters.items()
        )

    def _first_step_check(
        self, replicated: Sequence[ReplicatedParameters], named: Mapping[str, nn.Parameter]
    ) -> FirstStepCheck:
        """What compares copies of parameters, their gradients and the loss with the model's own in the first step."""
        copies = [
            (group.ranks, self.groups.by_ranks[group.ranks], {name: named[name] for name in group.parameters})
            for group in self.sync_groups
            if self.rank in group.ranks
        ]
        frozen: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
        for name, shards in self.shards.items():
            for shard in shards.on_rank(self.rank):
                if len(shard.holders) > 1 and not self.spec.parameters[name].trainable:
                    frozen.setdefault(shard.holders, {})[name] = named[name]
        has_loss = "labels" in inspect.signature(self.module.forward).parameters
        stages = {
            key: stage
            for key, stage in self.stages.items()
            if has_loss and stage.module == LANGUAGE_MODEL and stage.is_last
        }
        return FirstStepCheck(replicated, copies, frozen, stages, bool(self.label_smoothing), self.world)

    def _before_sum(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes the gradients of this rank ready to be added to those of others."""
        if self._first_step is not None:
            self._first_step.note_gradients(parameters)
        self._equal_gradients.divide(parameters)

    def _own_randomness(self) -> AbstractContextManager:
        """Keeps the seeds of tasks, which differ by rank, from what the user's code draws after the step."""
        if self.device.type == "cpu":
            return torch.random.fork_rng(devices=())
        return torch.random.fork_rng(devices=(self.device,), device_type=self.device.type)

    def _seed_task(self, task: Task) -> None:
        """Gives dropout a seed that depends on the step, the task and the tokens, equal in a tp group."""
        if self.module.training:
            cp_rank = self.plan.stage(*task.stage_key).cp_rank_of(self.rank)
            seed = stable_seed(self.seed, self.step_index, task.key, *([cp_rank] if cp_rank else []))
            torch.manual_seed(seed)

    @property
    def unused_inputs(self) -> dict[str, frozenset[str]]:
        """Module -> names of entries of a batch that only other modules' encoders read."""
        every = frozenset().union(*self.encoder_inputs.values())
        return {name: every - own for name, own in self.encoder_inputs.items()}

    def keys(self, step: StepPlan) -> Mapping[tuple[str, int, int, int], tuple[int, ...]]:
        """(module, replica, microbatch, chunk) -> batch indices, for the chunks of this rank."""
        return keys_of_rank(self.plan, step, self.rank)

    def batch_indices(self, task: Task) -> tuple[int, ...]:
        """The samples of a task of the step that ran last."""
        assert self.current_step is not None
        return self.current_step.chunks[task.module, task.replica, task.microbatch][task.chunk]

    def first_rank(self, task: Task) -> int:
        """The rank that reports for a task's stage."""
        return self.plan.stage(task.module, task.replica, task.stage).all_ranks[0]

    def leads_cp_rank(self, task: Task) -> bool:
        """Whether this rank is the first of its tp group in a task's stage, and so reports for its cp rank."""
        stage = self.plan.stage(task.module, task.replica, task.stage)
        return stage.mesh[stage.cp_rank_of(self.rank)][0] == self.rank

    def train_step(self, batch: StepBatch, step_index: int) -> StepTotals:
        """
        Computes the gradient of the mean loss over the target tokens of a global batch, summed over all replicas, in
        float32 where parameters are narrower.

        Args:
            batch (`StepBatch`): The inputs of this rank, on its device.
            step_index (`int`): Number of the optimizer step.
        """
        self.step_index = step_index
        ACTIVITY.step = step_index + 1
        self.current_step, self.current_sizes = batch.step, batch.sizes
        self.current_workloads = batch.workloads
        self._account(batch, self.planner)
        program = self._agreed_program(batch)
        self.module.train()
        accumulate_in_float32(self.trained)
        if self._first_step is not None:
            self._first_step.start()
        with self._own_randomness():
            result = self.executor.run(program, batch)
        with doing("sums of gradients", waits=True):
            self.sync.finish()
        result.step_ms = self.executor.elapsed_ms()
        if self._first_step is not None:
            with doing("comparing the copies of parameters", waits=True):
                self._first_step.finish(result)
            self._first_step = None
        self.last_result = result
        totals = self._totals(result, batch)
        scale_gradients(self.updated, 1.0 / max(totals.num_targets, 1))
        return totals

    @torch.no_grad()
    def evaluate_step(self, batch: StepBatch) -> StepResult:
        """Runs the forwards of a batch."""
        self.current_step = batch.step
        self._account(batch, None)
        program = self._agreed_program(batch)
        self.module.eval()
        return self.executor.run(program, batch)

    def _account(self, batch: StepBatch, planner: StepPlanner | None) -> None:
        """Lets the executor say what was predicted for a step that does not fit into memory."""
        self.account = MemoryAccount(self.plan, self.rank, batch.step, batch.sizes, batch.workloads, planner)
        self.executor.out_of_memory = functools.partial(self.account.sentence, device=self.device)

    def _agreed_program(self, batch: StepBatch) -> Program:
        """The program of a batch, after all ranks have compared what they are about to run. Collective."""
        assert batch.program is not None and batch.fingerprint is not None
        with doing("comparing the step", waits=True):
            self._check_step(batch.fingerprint, sum(map(len, batch.step.microbatches[LANGUAGE_MODEL])))
        return batch.program

    def _totals(self, result: StepResult, batch: StepBatch) -> StepTotals:
        """Sums a step's numbers over the ranks."""
        numbers = torch.zeros(4, dtype=torch.float64)
        for task, (loss, count) in result.losses.items():
            if self.leads_cp_rank(task):
                numbers[0] += loss.double().cpu()
                numbers[1] += float(count)
        for (module, replica, _, _), inputs in batch.batches.items():
            if module == LANGUAGE_MODEL and self.plan.stage(module, replica, 0).all_ranks[0] == self.rank:
                ids = inputs["input_ids"]
                numbers[2] += ids.numel()
                words = inputs.get(WORDS)
                mask = inputs.get("attention_mask") if words is None else words != 0
                numbers[3] += ids.numel() if mask is None or mask.dim() != 2 else float(mask.sum())
        loss, targets, tokens, real = self.world.all_reduce(numbers, what="adding up the step").tolist()
        return StepTotals(loss, int(targets), int(tokens), int(real))

    def gradient_norm(self) -> torch.Tensor:
        """The 2-norm of the gradient over all modules."""
        with doing("norm of the gradient", waits=True):
            return gradient_norm(self.counted, self.world)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clips the gradient by its norm over all modules and returns the norm before."""
        norm = self.gradient_norm()
        clip_gradients(self.updated, norm, max_norm)
        return norm


def _encoder_inputs(model: PreTrainedModel) -> dict[str, frozenset[str]]:
    """Module -> names of entries of a batch that its encoders read."""
    return {
        name: frozenset(entry for modality in part.modalities for entry in part.input_names(modality))
        for name, part in module_parts(model).items()
    }
