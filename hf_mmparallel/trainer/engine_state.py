"""What a Trainer with an engine has beside the state of `transformers.Trainer`, and does beside its overrides."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_utils import set_zero3_state
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils.import_utils import is_datasets_available

from .. import _environment
from ..cost import CostModel
from ..cost.arrangement_choice import DEFAULT_ARRANGEMENT
from ..data.defaults import packing_collator
from ..data.packing import PackingCollator, row_choice
from ..data.step_batch import StepBatch
from ..modeling import build_model_spec
from ..modeling.adapter import base_model_of, with_adapters_of
from ..modeling.loading import blank_model, check_gatherable, fill
from ..modeling.loss import IGNORE_INDEX
from ..modeling.spec import has_router_loss
from ..plan import LANGUAGE_MODEL, ModulePlugin, MultimodalParallelPlugin, PlannedFor, SampleSizes
from ..plan.resolve import sharding_without_effect
from ..runtime.optimizers import PossibleCuts, give_same_groups, prepare_optimizer
from ..runtime.out_of_memory import mark_steps
from ..world import raise_on_all_ranks
from . import build, model_card
from .argument_table import settings_idle_under_a_plan, settings_without_plan
from .arguments import MultimodalTrainingArguments, deepspeed_keys_without_effect
from .auto import find_plan, report_plan
from .checkpoint_saves import CheckpointSaves
from .engine_callback import EngineCallback, LogLineCallback, LossProgressCallback
from .loaders import StepLoaders, check_arrangement, encoders_run_together, make_rank_loader
from .metrics_callback import ParallelMetricsCallback, RecoveryCallback
from .optimizer_groups import give_part, group_names, own_settings, split_groups, split_names, stock_groups
from .prediction_callback import PredictionCallback
from .preemption_callback import PreemptionCallback, noting_signals
from .recovery_plan import NodeLayouts, check_survivable, node_layouts
from .start_checks import check_model
from .start_report import PlanReport, report_survival
from .training_sizes import RunContext, allowed_bytes
from .training_steps import SampleAgreement, TrainingSteps

logger = get_logger(__name__)

# The whole model of a run without a plan whose ranks hold shares of the weights: FSDP, or DeepSpeed's stage 3.

# what FSDP and accelerate's activation checkpointing add to names, and leave out of a state dict
_WRAPPERS = re.compile(r"\b(_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def has_divided_weights(model: nn.Module) -> bool:
    """Whether this rank holds shares of weights."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return True
    return _is_stage_3(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def gather_divided(model: Any, wrapped: nn.Module, is_first: bool) -> Any:
    """
    Gathers a model of which ranks hold shares, one parameter at a time: in evaluation mode in host memory on the first
    rank, `None` on others. Collective; raises `ValueError` for a model that can't be built from its config.
    """
    base = base_model_of(model)  # `wrapped` is the model with what accelerate adds
    check_gatherable(base)
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"Ranks hold shares of this `{type(base).__name__}`, which no config describes, so that "
            "it can't be built again. Save it with `trainer.save_model(folder)`, and load the weights into a new one."
        )
    state = _gathered_by_deepspeed(model, is_first) if _is_stage_3(model) else _gathered_by_torch(wrapped)
    if not is_first:
        return None
    buffers = {_WRAPPERS.sub("", name): buffer.detach().cpu() for name, buffer in model.named_buffers()}
    with set_zero3_state():  # so that transformers builds it as a model that nothing divides
        whole = with_adapters_of(model, blank_model(base))
        return fill(whole, base, {**buffers, **state}).eval()


def _is_stage_3(model: nn.Module) -> bool:
    """Whether DeepSpeed divides the weights."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def _gathered_by_torch(wrapped: nn.Module) -> dict[str, Any]:
    """The whole state dict in host memory on the first rank; empty on others."""
    return get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _gathered_by_deepspeed(model: nn.Module, is_first: bool) -> dict[str, torch.Tensor]:
    """The whole parameters in host memory on the first rank; empty on others."""
    from deepspeed.runtime.zero import GatheredParameters

    state = {}
    for name, parameter in model.named_parameters():
        with GatheredParameters([parameter]):
            if is_first:
                state[name] = parameter.detach().to("cpu", copy=True)
    return state


class EngineState:
    """The plan, steps, sizes and saves of a run, of one Trainer; most of it exists under a plan only."""

    steps: TrainingSteps
    saves: CheckpointSaves
    evaluation_samples: SampleAgreement
    modules: Mapping[str, ModulePlugin]  # settings
    stock_groups: list[list[str]]  # names of trained parameters, as the optimizer groups them
    planned_for: PlannedFor | None  # the run that the plan was made for
    arrangement: str  # if the arguments name none; the value of rank 0 decides
    train_steps: Any  # the dataset of the loader in use, whose items are steps

    def __init__(self, trainer: Any, joins: bool):
        self.trainer = trainer
        self.joins = joins  # whether this process has to be taken in by a training that runs already
        self.prepared_optimizer: Any = None
        self.rank_costs: CostModel | None = None  # without a plan, to arrange samples by
        self.stock_batch_size: int | None = None  # see [`PlanReport`]
        self.layouts: tuple[NodeLayouts, Any] | None = None  # with `resilience`
        self.rates: dict[str, float] = {}  # of modules with a learning rate of their own
        self.measured_sizes: dict[str, tuple[Any, Any]] = {}  # of `TrainingSizes`

    def begin_without_plan(self, args: Any, plugin: MultimodalParallelPlugin | None) -> None:
        """Prepares the batches of the stock Trainer, and warns of settings without effect. Collective."""
        trainer = self.trainer
        self.modules = {} if plugin is None else plugin.modules
        self.pack(bool(getattr(args, "row_packing", None)))
        if getattr(args, "save_on_preemption", False):
            trainer.add_callback(PreemptionCallback(trainer.world))
        if getattr(args, "microbatch_assignment", None) is not None:
            self._prepare_arrangement()
        idle = list(settings_without_plan(args, {"sample_tokens": trainer.sample_tokens}))
        if plugin is not None:
            idle += sharding_without_effect(plugin.modules if plugin.plan is None else plugin.plan.modules)
        for sentence in idle:
            logger.warning(sentence)

    def _prepare_arrangement(self) -> None:
        """Prepares the arrangement of samples over ranks that each hold the whole model. Collective."""
        trainer = self.trainer
        check_arrangement(trainer)
        model = base_model_of(trainer.model)
        check_model(model)
        if has_router_loss(model):
            raise ValueError(
                f"`output_router_logits=True` of `{type(model).__name__}` adds a loss over the experts' load in a "
                "batch, which `microbatch_assignment` without `parallel` divides among the ranks in another way. Set "
                "it to `False`, or leave `microbatch_assignment` out."
            )
        trainer.model_spec = build_model_spec(model)
        costs = build.costs_of(trainer.model_spec, trainer.args, trainer.world)
        self.rank_costs = replace(costs, packing=isinstance(trainer.data_collator, PackingCollator))

    def lay_out(
        self,
        prepared: build.PreparedModel,
        args: MultimodalTrainingArguments,
        plugin: MultimodalParallelPlugin,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Decides on packing and a plan, makes the engine, and gives an optimizer of the user its part. Collective."""
        trainer = self.trainer
        self.modules = plugin.modules
        if optimizer is None:
            stock = stock_groups(trainer.get_decay_parameter_names(prepared.model), prepared.model)
            self.stock_groups = split_names(stock, prepared.spec, self.modules)
        else:
            self.stock_groups = group_names(optimizer, prepared.model)
        if args.global_batch_size is None:
            self.stock_batch_size = build.resolve_batch(args, args.world_size)
        trainer.rows = row_choice(args.row_packing, prepared.model, prepared.spec, trainer.data_collator)
        prepared = replace(prepared, costs=replace(prepared.costs, packing=trainer.rows.packed))
        if args.resilience is not None:
            settings = plugin.modules if plugin.plan is None else plugin.plan.modules
            storage = {name: module.storage for name, module in settings.items()}
            check_survivable(args, storage, trainer.train_dataset)
        layouts = None
        if plugin.auto and args.resilience is not None:
            count = build.resolve_batch(args, args.world_size)
            layouts = node_layouts(prepared, plugin, args, self._typical_batch(count))
            plugin = replace(plugin, auto=False, plan=layouts.planner.first().plan)
            args = copy.copy(args)
            args.global_batch_size, args.gradient_accumulation_steps = count, 1
            trainer.args = build.plan_arguments(args)
        elif plugin.auto:
            plan, trainer.search = find_plan(prepared, trainer.training_sizes, plugin, args)
            plugin, args = plan.apply(plugin, args)
            trainer.args = build.plan_arguments(args)
            trainer._train_batch_size = trainer.args.train_batch_size
        elif plugin.plan is not None and args.microbatch_assignment is None:
            args = build.arguments_of_plan(args, plugin.plan)
            trainer.args = build.plan_arguments(args)
        if args.resilience is not None:
            plan, count = build.plan_and_batch(plugin, prepared.spec, args)
            if layouts is None:
                layouts = node_layouts(prepared, MultimodalParallelPlugin(plan=plan), args, self._typical_batch(count))
            self.layouts = layouts, layouts.planner.adopt(plan)
        trainer.engine, trainer.global_batch_size = build.build_engine(
            prepared,
            args,
            plugin,
            trainer.world,
            self.forward_context,
            self.joins,
            trainer.logs_token_metrics,
            trainer.compute_loss_func,
        )
        if self.joins:
            trainer.args.eval_on_start = False  # the training has begun
        laid_out = trainer.engine.plan if self.layouts is None else self.layouts[1].plan
        self.pack(trainer.rows.packed or laid_out.modules[LANGUAGE_MODEL].cp_size > 1)
        self.steps = TrainingSteps(trainer.engine, args, trainer.global_batch_size)
        self.saves = CheckpointSaves(trainer.args, trainer.world)
        self.evaluation_samples = SampleAgreement(args.on_bad_sample == "skip", trainer.world, "evaluation dataset")
        self.planned_for = plugin.planned_for
        self.arrangement = DEFAULT_ARRANGEMENT
        if optimizer is not None:
            give_part(optimizer, self.stock_groups, trainer.engine)

    def _typical_batch(self, count: int) -> tuple[int, SampleSizes | None]:
        """Number of samples of a global batch, and sizes of a typical one, the same on all ranks. Collective."""
        trainer = self.trainer
        return count, trainer.world.from_first_rank(
            lambda: trainer.training_sizes.typical(trainer.train_dataset, count)
        )

    def _report(self) -> None:
        trainer = self.trainer
        report = PlanReport(
            trainer._engine,
            trainer.training_sizes,
            trainer.global_batch_size,
            trainer.rows,
            self.planned_for,
            self.stock_batch_size,
        )
        self.arrangement = report_plan(report, trainer.search, self.steps, Path(trainer.args.output_dir))
        if self.layouts is not None:
            layouts, first = self.layouts
            memory_bytes = allowed_bytes(trainer.args, trainer._engine.costs.device)
            report_survival(layouts.planner, first, trainer.global_batch_size, memory_bytes)

    @property
    def context(self) -> RunContext:
        """The run as it is now; users may replace attributes between calls."""
        return RunContext(
            self.trainer.args,
            self.trainer.world,
            self.trainer.model,
            self.trainer.model_spec,
            self.trainer.train_dataset,
            self.trainer.data_collator,
            self.trainer.processing_class,
            self.trainer.sample_tokens,
            self.drop_columns,
        )

    def begin_under_plan(self, args: MultimodalTrainingArguments, plugin: MultimodalParallelPlugin) -> None:
        """Adds the callbacks of a run under a plan, warns of settings without effect, and prints the plan."""
        trainer = self.trainer
        trainer.add_callback(ParallelMetricsCallback())
        if args.log_predictions:
            trainer.add_callback(PredictionCallback())
        if args.save_on_preemption:
            trainer.add_callback(PreemptionCallback(trainer.world))
        if args.resilience is not None:
            trainer.add_callback(RecoveryCallback(trainer.global_batch_size))
        if trainer.pop_callback(ProgressCallback) is not None:
            trainer.add_callback(LossProgressCallback())
        if trainer.pop_callback(PrinterCallback) is not None:
            trainer.add_callback(LogLineCallback())
        idle = [*settings_idle_under_a_plan(args), *deepspeed_keys_without_effect(plugin.modules)]
        for sentence in (*idle, *sharding_without_effect(trainer.engine.plan.modules)):
            logger.warning(sentence)
        if trainer.is_world_process_zero():
            with raise_on_all_ranks("reporting the plan"):
                self._report()

    def pack(self, wanted: bool) -> None:
        """Wraps the collator in one that packs, if that is wanted."""
        trainer = self.trainer
        if wanted:
            trainer.data_collator = packing_collator(trainer.data_collator, trainer.model)

    def split_groups(self, optimizer: Any) -> Any:
        """A new optimizer, in which modules with a learning rate or weight decay of their own have groups."""
        trainer = self.trainer
        base = base_model_of(trainer.model)
        if own_settings(self.modules):
            spec = build_model_spec(base) if trainer.engine is None else trainer.model_spec
            split_groups(optimizer, base, spec, self.modules, trainer.get_decay_parameter_names(base))
        return optimizer

    def prepare_optimizer(self, optimizer: Any) -> None:
        """Gives a new optimizer its parts of the weights and its hooks. Collective."""
        trainer, engine = self.trainer, self.trainer.engine
        with raise_on_all_ranks("preparing the optimizer"):
            mark_steps(optimizer)  # first, since what the others do to gradients takes memory too
            later = None
            if self.layouts is not None:
                give_same_groups(optimizer, trainer.world)
                named = dict(trainer.model.named_parameters())
                cuts = self.layouts[0].tp_cuts().items()
                later = {named[name]: PossibleCuts(name, *of_name) for name, of_name in cuts if name in named}
            prepare_optimizer(optimizer, engine.holds_all_trained, trainer.world, engine.slices, engine.storage, later)
        self.prepared_optimizer = optimizer

    def gather_model(self) -> PreTrainedModel | None:
        trainer, engine = self.trainer, self.trainer.engine
        if engine is None:
            whole = trainer.accelerator.unwrap_model(trainer.model)
            if has_divided_weights(trainer.model):
                return gather_divided(whole, trainer.model_wrapped, trainer.is_world_process_zero())
            return whole if trainer.is_world_process_zero() else None
        with raise_on_all_ranks("gathering the model"):
            return engine.sharded.gather_model()

    def write_model_card(self) -> None:
        """Adds the plan, its picture and the measured efficiency to the stock model card, on one rank."""
        trainer, callbacks = self.trainer, self.trainer.callback_handler.callbacks
        compared = (c.comparison for c in callbacks if isinstance(c, PredictionCallback))
        survived = (c.sentence for c in callbacks if isinstance(c, RecoveryCallback))
        run = model_card.RunSummary(trainer.state.log_history, next(compared, None), next(survived, None))
        folder = Path(trainer.args.output_dir)
        model_card.write_model_card(folder, trainer.engine, trainer.global_batch_size, run)

    def parallel_metrics(self) -> dict[str, float]:
        """The numbers that callbacks add to a log. Collective."""
        metrics: dict[str, float] = {}
        for callback in self.engine_callbacks():
            metrics.update(callback.parallel_metrics())
        return metrics

    def engine_callbacks(self) -> list[EngineCallback]:
        return [
            callback for callback in self.trainer.callback_handler.callbacks if isinstance(callback, EngineCallback)
        ]

    def finish_save(self) -> None:
        """Waits for the checkpoint that is being written. Collective; raises on all ranks what went wrong."""
        self.saves.finish()
        self.push_saved()

    def push_saved(self) -> None:
        """Pushes a checkpoint once it is there, as of the step that it was saved at."""
        trainer = self.trainer
        saved = self.saves.take_saved() if trainer.args.push_to_hub else None
        if saved is not None:
            live, trainer.state = trainer.state, saved.state
            try:
                trainer._push_from_checkpoint(str(saved.path))
            finally:
                trainer.state = live

    def note_best(self, folder: Path) -> None:
        """Names the best checkpoint, which may be the one that is being saved."""
        trainer = self.trainer
        if trainer.state.best_global_step:
            best = folder.parent / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.best_global_step}"
            if best == folder or best.is_dir():
                trainer.state.best_model_checkpoint = str(best)

    @property
    def preemption(self) -> PreemptionCallback | None:
        return next((c for c in self.trainer.callback_handler.callbacks if isinstance(c, PreemptionCallback)), None)

    @property
    def is_preempted(self) -> bool:
        return self.preemption is not None and self.preemption.num_asked > 0

    def listening(self) -> AbstractContextManager:
        """A block in which signals end the training, with `save_on_preemption`, or let a node leave it."""
        if self.preemption is not None:
            return self.preemption.listening()
        if self.layouts is None:
            return contextlib.nullcontext()
        self.trainer._engine.signs["was_asked_to_leave"] = False
        return noting_signals(self.trainer._survival.note_signal)

    @property
    def rng_file(self) -> str:
        """The file of a checkpoint with the state of this rank's random generators, as the stock Trainer names it."""
        trainer = self.trainer
        return "rng_state.pth" if trainer.args.world_size == 1 else f"rng_state_{trainer.args.process_index}.pth"

    @property
    def loaders(self) -> StepLoaders:
        return StepLoaders(self.context, self.trainer._engine, self.trainer.global_batch_size)

    def checkpoint_to_resume(self, given: Any) -> Any:
        """What was given, or the last checkpoint of this launch if it has started the job again. Collective."""
        since = _environment.restarted_since()
        if since is None:
            return given
        newest = self.trainer.world.from_first_rank(lambda: newest_checkpoint(self.trainer.args.output_dir, since))
        return newest or given

    def arrange_batches(self, loader: Any) -> Any:
        """The batches of the stock Trainer's loader, arranged over ranks and accumulation steps. Collective."""
        trainer = self.trainer
        assert self.rank_costs is not None
        together = encoders_run_together(trainer, trainer.model_spec)
        with raise_on_all_ranks("arranging samples"):
            return make_rank_loader(
                loader,
                self.context,
                trainer.training_sizes,
                self.rank_costs,
                trainer._train_batch_size,
                together,
                trainer.accelerator.prepare,
            )

    @property
    def weighs_batches(self) -> bool:
        """Whether the losses of arranged batches are weighed here, since the model does not do it."""
        trainer = self.trainer
        return self.rank_costs is not None and not (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func)

    def num_targets(self, batch: dict[str, Any]) -> int:
        """Target tokens of a batch, counted as the stock Trainer does."""
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"][..., 1:] if self.trainer._loss_shifts_labels else batch["labels"]
        return int(labels.ne(IGNORE_INDEX).sum())

    def drop_columns(self, dataset: Any, description: str) -> tuple[Any, Any]:
        """A dataset and its collator, one of which drops the columns that the model does not read."""
        trainer = self.trainer
        if is_datasets_available() and hasattr(dataset, "column_names"):
            return trainer._remove_unused_columns(dataset, description=description), trainer.data_collator
        return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator, description=description)

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        with self.trainer.compute_loss_context_manager(), self.trainer.accelerator.autocast():
            yield

    def evaluation_batches(self, dataloader: Any) -> Iterator[StepBatch]:
        """The batches of a loader, without samples that can't be read."""
        trainer = self.trainer
        for batch in self.evaluation_samples.batches(dataloader):
            yield batch
            trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)


def newest_checkpoint(folder: str, since: float) -> str | None:
    """The last checkpoint in a folder that was saved since a time; those of runs before it do not count."""
    states = [path / TRAINER_STATE_NAME for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
    saved = [path.parent for path in states if path.is_file() and path.stat().st_mtime >= since]
    newest = max(saved, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return None if newest is None else str(newest)
