"""A model under a plan on this rank, which the Trainer has in place of a wrapped model."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._device import clock_of
from ..cost import CostModel, analytic_costs, find_device
from ..cost.layers import first_backward
from ..cost.step_planner import StepPlanner
from ..data.context_tokens import ContextSharder, layer_costs
from ..data.item_sharding import ItemSharder, Sharder
from ..data.randomness import stable_seed
from ..data.step_batch import StepBatch
from ..data.step_dataset import RankInputs
from ..kernels.varlen_attention import use_varlen_attention
from ..modeling import accuracy_and_entropy, given_loss, module_parts, prepare_stages, token_loss
from ..modeling.adapter import Adapter
from ..modeling.compiled_layers import Compilation, compile_layers
from ..modeling.expert_parallel import ExpertLoad, load_excess, share_experts
from ..modeling.loading import put_parts_of, without_weights
from ..modeling.prepare import Recomputation, inputs_require_gradients
from ..modeling.router_loss import RouterLoss
from ..modeling.sequence_parallel import keep_rows_split
from ..modeling.stacked_adapters import caller_name
from ..modeling.stages import cast_values
from ..modeling.streamed_layers import StreamedLayers
from ..modeling.tensor_parallel import apply_module_tp, with_tp_dims
from ..plan import (
    LANGUAGE_MODEL,
    ModelSpec,
    ModulePlugin,
    ParallelPlan,
    SampleSizes,
    StageKey,
    StepPlan,
    Workloads,
    frozen_groups,
    layer_numbers,
    sync_groups,
)
from ..schedule import Task
from ..world import ACTIVITY, World, track_activity
from .executor import Executor, LogitsFunction, StepFunctions
from .gradients import (
    GradientSync,
    accumulate_in_float32,
    clip_gradients,
    gradient_square,
    norm_of_square,
    scale_gradients,
)
from .groups import ProcessGroups
from .joint_passes import GradientSums, LastBackward, StagePasses, TaskHooks, agree_on_modalities
from .message_queues import DistributedTransport
from .optimizer_slices import OptimizerSlices
from .out_of_memory import MemoryAccount
from .payloads import keeps_rows_split
from .sharded_model import ShardedModel
from .step_check import (
    SIGNS,
    EqualGradients,
    FirstStepCheck,
    LossWeights,
    StepCheck,
    StepTotals,
    add_up,
    replicated_parameters,
)
from .weight_placement import LoadFunction, layers_of_rank, load_held, place_weights, share_buffers
from .work import StepResult

_UNUSED = "unused parameters"  # among the numbers of a step that are summed over the ranks


@dataclass(frozen=True)
class EngineOptions:
    """Settings of an engine beside the plan."""

    label_smoothing: float = 0.0  # as in the Trainer
    loss_function: Callable[..., Tensor] | None = None  # in place of the model's own, see `given_loss`
    seed: int = 0  # base of the seeds of dropout
    load: LoadFunction | None = None  # loads the owned weights after pruning
    costs: CostModel | None = None  # the same on all ranks; context parallelism cuts tokens by them
    adapter: Adapter | None = None  # saved and loaded in place of the model
    recomputation: Recomputation = Recomputation()  # of modules with activation checkpointing
    compilation: Compilation | None = None  # of the layers
    forward_context: Callable[[], AbstractContextManager] = nullcontext  # such as autocast
    module_settings: Mapping[str, ModulePlugin] = field(default_factory=dict)  # by module, saved with the plan
    token_metrics: bool = False  # accuracy and entropy of the predictions are summed for the log
    can_change_plan: bool = False  # a copy of the model without weights is kept, for a new layout


class ParallelEngine(nn.Module):
    """
    Prunes a model in place to this rank's part and runs steps on it: parameters of other ranks lose their memory,
    names stay those of the whole model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        plan: ParallelPlan,
        world: World,
        options: EngineOptions | None = None,
    ):
        super().__init__()
        self.options = options or EngineOptions()
        self.world = world
        self.device = world.device
        self.clock = clock_of(world.device)
        self.costs = self.options.costs or analytic_costs(spec, find_device("cpu"))
        # Of the whole model, which is taken apart below.
        self.parts = module_parts(model)
        # Of each module the entries of a batch that only it reads: media of encoders, targets of generators.
        self.encoder_inputs = {name: frozenset(part.entries) for name, part in self.parts.items()}
        self.num_compute_parameters = model.num_parameters(exclude_embeddings=True)
        # its owned weights may still be on the meta device if the options have a `load`
        self.model: Any = model
        self._blank = without_weights(model) if self.options.can_change_plan else None
        self._lay_out(spec, plan, self.options.load)
        if self._blank is not None:
            share_buffers(self._blank, model, world)
        self.cast_to: torch.dtype | None = None  # of the last `cast`
        self.signs = dict.fromkeys(SIGNS, False)  # what this rank has noticed
        self.num_signs = dict.fromkeys(SIGNS, 0)  # how many ranks have noticed it, after the last training step
        self.step_index = 0
        self._weighed = LossWeights()  # of the losses of the last training step
        self._num_targets = 0  # of its language model, if they were counted
        self._routed: Tensor | None = None  # where its tokens went, over all ranks
        self._token_sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # of `accuracy_and_entropy`
        self.asked: Any = None  # when the last training step was asked for, a mark of the clock
        self.data_ms = 0.0  # how long this rank waited for it

    def change_plan(self, plan: ParallelPlan, held: Mapping[str, Tensor]) -> None:
        """Lays the model out anew for the ranks of the world, with the weights that this one holds. Collective."""
        assert self._blank is not None
        # the model and the engine stay the same objects; the parts of the model are new
        put_parts_of(copy.deepcopy(self._blank), self.model)
        self.parts = module_parts(self.model)
        self._lay_out(self.spec, plan, load_held(held), held)

    def _lay_out(
        self, spec: ModelSpec, plan: ParallelPlan, load: LoadFunction | None, held: Mapping[str, Tensor] | None = None
    ) -> None:
        """Prunes the whole model to this rank's part of a plan, and prepares its steps. Collective."""
        model, world = self.model, self.world
        self.spec = with_tp_dims(model, spec, {name: module.tp_sizes for name, module in plan.modules.items()})
        self.plan = plan
        self.rank = world.rank
        generators = {name: part.generator for name, part in self.parts.items() if part.generator is not None}
        targets = {name: generator.placeholders for name, generator in generators.items()}
        self.inputs = RankInputs(plan, self.rank, self._unused_inputs(), self._sharders(model), targets)
        # Groups are made in one order on all ranks, before anything communicates.
        self.sync_groups = sync_groups(self.spec, plan)  # of all ranks
        self.sharded = ShardedModel(model, self.spec, plan, world, self.options.adapter)
        self.shards = self.sharded.shards
        self.divided_groups = [*self.sync_groups, *frozen_groups(self.spec, plan)]  # also what is frozen and divided
        self.process_groups = ProcessGroups(plan, self.divided_groups, world)
        self.stages = prepare_stages(model, self.spec, plan, self.rank, self.device, self.options.recomputation)
        self.slices = OptimizerSlices(self.divided_groups, {}, self.rank, self.process_groups.by_ranks)
        self.sharded.slices = self.slices
        self.streamed: dict[str, StreamedLayers] = {}  # by module
        self.partial: set[str] = set()  # parameters whose gradients are partial sums on each rank of a tp group
        self._load(load)
        if held is not None:
            self.slices.fill(held)
        self._prepare_steps()
        self.planner: StepPlanner | None = None  # of the training steps that follow, for callbacks and errors
        # Of the last step, for callbacks.
        self.last_result: StepResult | None = None
        self.account: MemoryAccount | None = None
        self.current_step: StepPlan | None = None
        self.current_sizes: SampleSizes | None = None
        self.current_workloads: Workloads | None = None

    def _sharders(self, model: PreTrainedModel) -> dict[str, Sharder]:
        cp_sizes = {name: module.cp_size for name, module in self.plan.modules.items() if module.cp_size > 1}
        return {
            name: self._context_sharder()
            if name == LANGUAGE_MODEL
            else ItemSharder.of(model, self.spec, self.parts[name], name, cp_size)
            for name, cp_size in cp_sizes.items()
        }

    def _context_sharder(self) -> ContextSharder:
        media = frozenset().union(*self.encoder_inputs.values())
        costs, windows = layer_costs(self.costs, self.plan), self.spec.language_model.attention_windows
        return ContextSharder(self.plan, self.spec.placeholders, media, costs, windows)

    def _unused_inputs(self) -> dict[str, frozenset[str]]:
        """Maps modules to the entries of a batch that only other modules' encoders read."""
        every = frozenset().union(*self.encoder_inputs.values())
        return {name: every - own for name, own in self.encoder_inputs.items()}

    def _load(self, load: LoadFunction | None) -> None:
        """Brings this rank's weights to its device, each sharded over its tp group, or back to host memory."""
        layers = layers_of_rank(self.stages)
        for names in place_weights(self.model, layers, self.device, load, self._shard):
            wanted = set(names)
            self.slices.take({name: p for name, p in self.model.named_parameters() if name in wanted})
        self._keep_rows_split()
        self.router_loss = self._make_router_loss()
        self.expert_loads = dict(self._count_experts()) if self.options.compilation is None else {}
        if self.options.compilation is not None:
            compile_layers(layers, self.options.compilation)
        self._share_tokens()
        for name, module in self.plan.modules.items():
            stages = [stage for key, stage in self.stages.items() if key[0] == name]
            if module.storage.offload_params and stages:
                layers = {index: layer for stage in stages for index, layer in stage.own_layers.items()}
                self.streamed[name] = StreamedLayers(dict(sorted(layers.items())), self.device)

    def _prepare_steps(self) -> None:
        """Makes executor, gradient sums and checks of steps, for parameters that stay the same objects."""
        named = dict(self.model.named_parameters())
        self.trained = [p for p in named.values() if p.requires_grad]
        by_ranks = self.process_groups.by_ranks
        self.updated = [self.slices.updated_tensor(p) for p in self.trained]
        self.storage = {
            named[name]: self.plan.modules[self.spec.used_at[name][0][0]].storage
            for name, parameter in self.spec.parameters.items()
            if parameter.trainable and self.sharded.holds(name)
        }
        self.counted = [
            self.slices.updated_tensor(named[name])
            for name, shards in self.shards.items()
            if shards.owned_by(self.rank) and named[name].requires_grad
        ]
        replicated = replicated_parameters(self.sharded, self.stages, self.process_groups, self.partial)
        self._equal_gradients = EqualGradients(replicated)
        has_loss, smooths = self.options.loss_function is None, bool(self.options.label_smoothing)
        self._first_step: FirstStepCheck | None = FirstStepCheck.of(
            self.sharded, self.stages, self.sync_groups, by_ranks, replicated, has_loss, smooths
        )
        sums = GradientSums(self._before_sum)
        layers, regions = layer_numbers(self.spec), self.sharded.regions
        self.gradient_sync = GradientSync(
            self.sync_groups, named, self.rank, by_ranks, self.slices, sums, layers, regions
        )
        passes = {key: self._passes_of(key, sums) for key in self.stages}
        self.passes = TaskHooks({key: of_stage for key, of_stage in passes.items() if of_stage is not None})
        functions = StepFunctions(
            self._loss,
            accuracy_and_entropy if self.options.token_metrics else None,
            self.gradient_sync.start,
            self._seed_task,
            self.options.forward_context,
            self.passes,
            self.router_loss,
            self._share_routes,
        )
        transport = DistributedTransport(self.world)
        self.executor = Executor(self.plan, self.spec, self.stages, transport, by_ranks, functions, self.device)
        self._check_step = StepCheck(
            self.world,
            num_replicas=self.plan.modules[LANGUAGE_MODEL].dp_size,
            sums=stable_seed(
                *((g.ranks, g.stages, g.parameters, g.shard_size, g.zero_stage) for g in self.divided_groups)
            ),
        )

    def _loss(self, logits: Tensor, labels: Tensor, shifted: bool) -> tuple[Tensor, Tensor]:
        if self.options.loss_function is None:
            return token_loss(self.model, logits, labels, self.options.label_smoothing, shifted)
        if shifted:
            raise ValueError(
                "The batch has `shift_labels`, but `compute_loss_func` gets labels that are not shifted. Let the "
                "collator give `labels` in their place."
            )
        return given_loss(self.options.loss_function, logits, labels)

    def _passes_of(self, key: StageKey, sums: GradientSums) -> StagePasses | LastBackward | None:
        """Makes what happens beside the computation in the tasks of a stage."""
        sharding = self.plan.modules[key[0]].sharding
        if sharding.zero_stage >= 2:
            start, stop = self.stages[key].layers
            first = min(max(self._first_backward(key[0]), start), stop) - start
            return StagePasses(self.stages[key], self.slices, sums, sharding.reshard_after_forward, first)
        if sum(other[0] == key[0] for other in self.stages) > 1:  # may add to the same gradients
            return None
        return LastBackward(self.stages[key], functools.partial(self.gradient_sync.reach, key))

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "A model under a plan has no forward of its own, each rank holds a part. Use `trainer.gather_model()` on "
            "all ranks for a whole model."
        )

    def cast(self, dtype: torch.dtype) -> None:
        """Casts this rank's part of the model for good, and widens the dtypes in which tensors are sent if needed."""
        for part in (*layers_of_rank(self.stages), self.model):  # whose layers are cast by then
            parameters = [p for p in part.parameters() if p.dtype != dtype]
            with self.slices.casting(parameters):
                cast_values(part, dtype)
        for streamed in self.streamed.values():
            streamed.hold()
        self.cast_to = dtype
        self.executor.payloads.widen(dtype)
        for stage in self.stages.values():
            stage.widen(dtype)

    def _shard(self, names: Collection[str]) -> None:
        """Applies tensor parallelism to some parameters of this rank."""
        for module, replica, index in self.stages:
            stage = self.plan.stage(module, replica, index)
            mesh = self.process_groups.mesh(stage.mesh[stage.cp_rank_of(self.rank)])
            held = self.shards.keys() & set(names)
            owned = {name for name in held if (module, replica, index) in self.shards[name].stages}
            if self.plan.modules[module].ep_size > 1:
                experts = {name for name in owned if self.spec.parameters[name].num_experts}
                owned -= experts
                self._share_experts(module, index, experts)
            if mesh is not None and owned:
                self.partial |= apply_module_tp(self.model, self.spec.modules[module], mesh, owned)

    def _share_experts(self, module: str, stage: int, names: Collection[str]) -> None:
        groups = self.plan.modules[module].expert_groups(stage)
        group = next(group for group in groups if any(self.rank in tp_group for tp_group in group))
        tp_group = next(tp_group for tp_group in group if self.rank in tp_group)
        row = next(ranks for ranks in zip(*group, strict=True) if self.rank in ranks)
        mesh = self.process_groups.mesh(tuple(chain(*group)))
        assert mesh is not None
        by_ranks = self.process_groups.by_ranks
        first = self._first_backward(module)

        def has_backward(name: str) -> bool:
            return self.spec.parameters[name].layer >= first

        share_experts(self.model, names, mesh, by_ranks.get(tp_group), by_ranks.get(row), has_backward)

    def _make_router_loss(self) -> RouterLoss | None:
        if self.options.loss_function is not None or self.options.label_smoothing:
            return None
        layers = (layer for stage in self.stages.values() for layer in stage.own_layers.values())
        return RouterLoss.of_model(self.model, layers, self.device)

    @property
    def balances_experts(self) -> bool:
        """Whether a loss over the experts' load counts."""
        return self.router_loss is not None and self.router_loss.coefficient != 0

    def _count_experts(self) -> Iterator[tuple[StageKey, ExpertLoad]]:
        """Counts, on the first rank of each tp group, where the tokens of the stages with experts go."""
        for key, stage in self.stages.items():
            module = stage.module_spec
            if module.num_experts and any(self.rank == tp_group[0] for tp_group in self.plan.stage(*key).mesh):
                callers = {
                    caller_name(p.name.rpartition(".")[0]): p.layer
                    for p in module.parameters
                    if p.num_experts and not p.is_factor and p.layer in stage.own_layers
                }
                layers = {self.model.get_submodule(name): layer for name, layer in callers.items()}
                yield key, ExpertLoad(layers, module.num_layers, module.num_experts, self.device)

    def take_expert_imbalance(self) -> dict[str, float]:
        """Module -> excess of the busiest expert over the mean one since the last call. Collective with experts."""
        result = {}
        for name, module in self.spec.modules.items():
            if not module.num_experts or self.options.compilation is not None:
                continue
            counts = torch.zeros(module.num_layers, module.num_experts, device=self.device)
            for key, load in self.expert_loads.items():
                if key[0] == name:
                    counts += load.counts
                    load.counts.zero_()
            excess = load_excess(self.world.all_reduce(counts, activity="load of the experts"))
            result |= {} if excess is None else {name: excess}
        return result

    def _first_backward(self, module: str) -> int:
        """The first layer of a module that may have a backward."""
        return 0 if inputs_require_gradients(self.model) else first_backward(self.spec, module)

    def _share_tokens(self) -> None:
        """Lets the cp ranks of encoders share the tokens of an image where they can."""
        sharing = [
            stage
            for (name, _, _), stage in self.stages.items()
            if self.plan.modules[name].cp_size > 1 and self.spec.modules[name].shares_tokens
        ]
        for stage in sharing:
            stage.share_tokens()
        for stage in sharing:  # whose configs are others then
            use_varlen_attention(self.model.get_submodule(stage.module_spec.tower), every=True)

    def _keep_rows_split(self) -> None:
        """Joins the rows that tp groups share only where something else needs them, see `sequence_parallel`."""
        for (name, replica, index), stage in self.stages.items():
            borders = {(index - 1, index): stage.layers[0] - 1, (index, index + 1): stage.layers[1] - 1}
            num_stages = len(self.plan.modules[name].replicas[replica])
            kept = {
                layer
                for ends, layer in borders.items()
                if 0 <= ends[0] < ends[1] < num_stages
                and keeps_rows_split(self.plan, self.spec, *((name, replica, end) for end in ends))
            }
            if stage.layers[0] - 1 in kept:
                stage.row_shares = self.plan.stage(name, replica, index).tp_size
            read = self.spec.layers_with_features.union(stage.module_spec.taps)
            keep_rows_split(stage.own_layers, read | ({*borders.values()} - kept))

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """A block in which the next training step is read, whose duration callbacks compare with the step's."""
        self.asked = self.clock.mark()
        asked_s = time.perf_counter()
        yield
        self.data_ms = 1e3 * (time.perf_counter() - asked_s)

    @property
    def holds_all_trained(self) -> bool:
        return not any(
            parameter.trainable and not self.sharded.holds(name) for name, parameter in self.spec.parameters.items()
        )

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
        if self.model.training:
            cp_rank = self.plan.stage(*task.stage_key).cp_rank_of(self.rank)
            seed = stable_seed(self.options.seed, self.step_index, task.key, *([cp_rank] if cp_rank else []))
            # without `torch.manual_seed`, which formats a stack for each kind of device that is not there
            torch.default_generator.manual_seed(seed)
            if self.device.type != "cpu":
                torch.get_device_module(self.device).manual_seed(seed)

    def batch_indices(self, task: Task) -> tuple[int, ...]:
        assert self.current_step is not None
        return self.current_step.chunk(task.module, task.replica, task.microbatch, task.chunk)

    def first_rank(self, task: Task) -> int:
        return self.plan.stage(task.module, task.replica, task.stage).all_ranks[0]

    def leads_cp_rank(self, task: Task) -> bool:
        """Returns whether this rank is the first of its tp group in a task's stage, and so reports for its cp rank."""
        stage = self.plan.stage(task.module, task.replica, task.stage)
        return stage.mesh[stage.cp_rank_of(self.rank)][0] == self.rank

    def train_step(self, batch: StepBatch, step_index: int) -> StepTotals:
        """
        Computes the gradient of the mean loss over the target tokens of a global batch, summed over all replicas, in
        float32 where parameters are narrower; `step_index` counts optimizer steps.
        """
        self.step_index = step_index
        ACTIVITY.step = step_index + 1
        self.current_step, self.current_sizes = batch.step, batch.sizes
        self.current_workloads = batch.workloads
        self._compare_steps(batch)
        self.model.train()
        accumulate_in_float32(self.trained)
        self._routed = None
        routes_first = self._weigh_losses(batch)
        with self._own_randomness():
            if routes_first:
                self._run(batch.forwards(), self.planner)
            if self._first_step is not None:
                self._first_step.start()
            result = self._run(batch, self.planner)
        totals, num_unused = self._totals(result, batch)
        with track_activity("sums of gradients", waits=True):
            used = self.world.all_reduce(self.gradient_sync.used(), "max") if num_unused else None
            self.gradient_sync.finish(used)
        result.end_sums()
        if self._first_step is not None:
            with track_activity("comparing the copies of parameters", waits=True):
                if self._first_step.finish(result, {module for module, *_ in batch.batches}):
                    self._first_step = None
        self.last_result = result
        scale_gradients(self.updated, 1.0 / max(totals.num_targets, 1))
        return totals

    @torch.no_grad()
    def evaluate_step(self, batch: StepBatch, on_logits: LogitsFunction | None = None) -> StepResult:
        """Runs the forwards of a batch; `on_logits` is that of [`Executor.run`]."""
        self.current_step = batch.step
        self._compare_steps(batch)
        self.model.eval()
        return self._run(batch, None, on_logits)

    def _weigh_losses(self, batch: StepBatch) -> bool:
        """
        Counts the targets of all losses of a step before it runs; returns whether its forwards have to run once more
        before it, for a loss over where the tokens of the whole batch go. Collective, if the model has such losses.
        """
        if not self.spec.generators and not self.balances_experts:
            return False
        names = (LANGUAGE_MODEL, *self.spec.generators)
        numbers = torch.zeros(len(names) + 1, dtype=torch.int64)
        for (module, replica, *_), inputs in batch.batches.items():
            if module in names and self.plan.stage(module, replica, 0).all_ranks[0] == self.rank:
                numbers[names.index(module)] += self.stages[module, replica, 0].num_targets(inputs)
        numbers[-1] = not batch.program.has_forwards_first(self.rank)
        *counts, others = self.world.all_reduce(numbers, activity="counting targets").tolist()
        self._num_targets = counts[0]
        if self.spec.generators:
            settings = {name: part.generator.settings for name, part in self.parts.items() if part.generator}
            weights = {name: own.loss_weight for name, own in settings.items()}
            self._weighed = LossWeights.of(dict(zip(names, counts, strict=True)), weights)
            self.executor.functions.loss_factors.update(self._weighed.factors)
        return self.balances_experts and others > 0

    def _share_routes(self, result: StepResult) -> None:
        """Adds up where the tokens of a training step go, once all its forwards have run. Collective."""
        if (
            self.router_loss is None
            or not self.balances_experts
            or self._routed is not None
            or not self.model.training
        ):
            return
        own = [sums for task, sums in result.routed.items() if self.leads_cp_rank(task)]
        total = sum(own, self.router_loss.no_sums())
        self._routed = self.world.all_reduce(total, activity="adding up where tokens go")
        self.router_loss.weigh(self._routed, max(self._num_targets, 1))

    def _compare_steps(self, batch: StepBatch) -> None:
        with track_activity("comparing the step", waits=True):
            self._check_step(batch.fingerprint, batch.step)

    def _run(
        self, batch: StepBatch, planner: StepPlanner | None, on_logits: LogitsFunction | None = None
    ) -> StepResult:
        """Runs a batch; an action that does not fit into memory says what was predicted for it."""
        self.account = MemoryAccount(self.plan, self.rank, batch.step, batch.sizes, batch.workloads, planner)
        out_of_memory = functools.partial(self.account.sentence, device=self.device)
        self.passes.runs = agree_on_modalities(self.plan, self.parts, self.stages, batch, self.world)
        # Models check their inputs, such as the number of placeholders, for which the host waits for the device. After
        # the first step only the executor does, in host memory.
        first = self._first_step is not None
        with nullcontext() if first else patch_environment(transformers_disable_torch_check="1"):
            result = self.executor.run(batch.program, batch, out_of_memory, on_logits)
        for task, sums in result.token_metrics.items():
            if self.leads_cp_rank(task):
                self._token_sums += sums
        return result

    def take_token_metrics(self) -> tuple[float, float] | None:
        """Mean accuracy and entropy of all target tokens since the last call, `None` without any. Collective."""
        sums = self.world.all_reduce(self._token_sums, activity="token metrics").tolist()
        self._token_sums.zero_()
        return (sums[0] / sums[2], sums[1] / sums[2]) if sums[2] else None

    def _totals(self, result: StepResult, batch: StepBatch) -> tuple[StepTotals, int]:
        """Sums a step's numbers over the ranks, and how many parameters each has that it did not use."""
        losses = [(task.module, *pair) for task, pair in result.losses.items() if self.leads_cp_rank(task)]
        replicas = {
            key: inputs
            for key, inputs in batch.batches.items()
            if key[0] == LANGUAGE_MODEL and self.plan.stage(key[0], key[1], 0).all_ranks[0] == self.rank
        }
        noticed = {**self.signs, _UNUSED: self.gradient_sync.num_unused()}
        totals, self.num_signs = add_up(self.world, losses, replicas.values(), noticed, self._weighed)
        if self.router_loss is not None and self._routed is not None:
            own = self.router_loss.of(self._routed)
            loss = totals.loss + self.router_loss.coefficient * own * max(totals.num_targets, 1)
            totals = replace(totals, loss=loss, losses={**totals.losses, "router": own})
        return totals, self.num_signs.pop(_UNUSED)

    def gradient_norm(self) -> torch.Tensor:
        return self.norm_of_square(self.world.all_reduce(self.gradient_square(), activity="norm of the gradient"))

    def gradient_square(self) -> torch.Tensor:
        """Returns what this rank adds to the square of the norm."""
        return gradient_square(self.counted, self.world.device)

    def norm_of_square(self, square: torch.Tensor) -> torch.Tensor:
        """Returns the norm of the gradient with this square over all ranks."""
        return norm_of_square(square, self.counted)

    def clip(self, norm: torch.Tensor, max_norm: float) -> None:
        """Clips the gradient, whose norm over all modules is known."""
        clip_gradients(self.updated, norm, max_norm)
