"""A Trainer with an engine: the state of a run under a plan, below the overrides of `transformers.Trainer`."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from accelerate.logging import get_logger
from transformers import PreTrainedModel, Trainer
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils.import_utils import is_datasets_available

from ..adapters.peft_models import base_model_of
from ..callbacks import (
    EngineCallback,
    LossProgressCallback,
    ParallelMetricsCallback,
    PredictionCallback,
    PreemptionCallback,
    RecoveryCallback,
)
from ..cost import CostModel
from ..data.defaults import DefaultCollator
from ..data.packing import PackingCollator
from ..data.step_batch import StepBatch
from ..modeling import build_model_spec
from ..modeling.loss import IGNORE_INDEX
from ..modeling.whole import check_gatherable, whole_model
from ..plan import LANGUAGE_MODEL, ModelSpec, MultimodalParallelPlugin, ParallelPlan, SampleSizes
from ..plan.resolve import sharding_without_effect
from ..resilience.adopted_plan import module_settings
from ..runtime.engine import ParallelEngine
from ..steps.arrangement_choice import DEFAULT_ARRANGEMENT
from ..world import World, shared_failure
from . import build
from .agreement import SampleAgreement, check_output_folder
from .argument_table import check_arguments, check_launcher, settings_idle_under_a_plan, settings_without_plan
from .arguments import MultimodalTrainingArguments
from .auto import AutoSearch, find_plan, report_search
from .checkpoint_saves import CheckpointSaves
from .columns import choose_collator
from .deepspeed_arguments import check_optimizer_class, deepspeed_keys_without_effect
from .divided_weights import gather_divided, has_divided_weights
from .loaders import StepLoaders
from .optimizer_state import stock_groups
from .oversized_samples import allowed_bytes
from .packing_choice import RowChoice, row_choice
from .rank_loader import arranged_loader, check_arrangement, encoders_run_together
from .recovery_plan import NodeLayouts, check_survivable, node_layouts
from .run_context import RunContext
from .start_checks import check_model, check_trainer
from .start_report import PlanReport, report_survival
from .training_sizes import MeasuredSizes, TrainingSizes
from .training_steps import TrainingSteps

logger = get_logger(__name__)
T = TypeVar("T")


class EngineTrainer(Trainer):
    """A Trainer that may have an engine. It overrides no method of [`~transformers.Trainer`]."""

    loss_is_scaled_for_ga: bool | None = True
    is_planned: bool
    args: Any
    model: Any
    train_dataset: Any
    data_collator: Any
    engine: ParallelEngine | None  # this rank's part of the model; `None` for the stock Trainer
    search: AutoSearch | None  # for the plan, on rank 0
    sample_tokens: Callable | None  # sample -> module -> its tokens
    model_spec: ModelSpec
    global_batch_size: int  # samples, under a plan
    rows: RowChoice  # whether samples are packed, under a plan
    _steps: TrainingSteps
    _prepared_optimizer: Any
    _saves: CheckpointSaves
    _rank_costs: CostModel | None
    _layouts: tuple[NodeLayouts, Any] | None = None  # with `resilience`
    _joins = False  # whether this process has to be taken in by a training that runs already

    def _init_stock(
        self, model: Any, args: Any, plugin: MultimodalParallelPlugin | None, given: dict[str, Any]
    ) -> None:
        """The stock Trainer, with the settings of modules that need no ranks."""
        args = build.single_process_arguments(args) if isinstance(args, MultimodalTrainingArguments) else args
        whole: Any = build.load_whole(model)
        if plugin is not None and model is not None:
            whole = build.prepare_single_process(whole, plugin, args)
        self.loss_is_scaled_for_ga = None
        args = choose_collator(args, given, whole)
        super().__init__(model=whole, args=args, **given)
        self._pack(bool(getattr(args, "packing", None)))
        if getattr(args, "save_on_preemption", False):
            self.add_callback(PreemptionCallback(self.world))
        if getattr(args, "microbatch_assignment", None) is not None:
            self._prepare_arrangement()
        for idle in settings_without_plan(args, {"sample_tokens": self.sample_tokens}):
            logger.warning(idle)
        if plugin is not None:
            for idle in sharding_without_effect(plugin.modules if plugin.plan is None else plugin.plan.modules):
                logger.warning(idle)

    def _prepare_arrangement(self) -> None:
        """Prepares the arrangement of samples over ranks that each hold the whole model. Collective."""
        check_arrangement(self)
        model = base_model_of(self.model)
        check_model(model)
        self.model_spec = build_model_spec(model)
        costs = build.costs_of(self.model_spec, self.args, self.world)
        self._rank_costs = replace(costs, packing=isinstance(self.data_collator, PackingCollator))

    def _init_planned(
        self, model: Any, args: MultimodalTrainingArguments, plugin: MultimodalParallelPlugin, given: dict[str, Any]
    ) -> None:
        """The Trainer of this rank's part of a model. Collective."""
        check_arguments(args)
        check_launcher(args)
        check_trainer(model, given)
        check_optimizer_class(plugin.modules, given)
        self.args = args  # for `world`; the stock constructor sets those of its own loop
        with shared_failure("preparing the model"):
            check_output_folder(args, self.world)
            prepared = build.prepare_model(model, args, plugin, self.world)
            self.model_spec = prepared.spec
            args = choose_collator(args, given, prepared.model)
            super().__init__(model=prepared.model, args=build.planned_arguments(args), **given)
            decayed = self.get_decay_parameter_names(prepared.model)
            self._stock_groups = stock_groups(decayed, prepared.model)
            self._lay_out(prepared, args, plugin)
        self.add_callback(ParallelMetricsCallback())
        if args.log_predictions:
            self.add_callback(PredictionCallback())
        if args.save_on_preemption:
            self.add_callback(PreemptionCallback(self.world))
        if args.resilience is not None:
            self.add_callback(RecoveryCallback(self.global_batch_size))
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(LossProgressCallback())
        idle = [*settings_idle_under_a_plan(args), *deepspeed_keys_without_effect(plugin.modules)]
        for sentence in (*idle, *sharding_without_effect(self._engine.plan.modules)):
            logger.warning(sentence)
        if self.is_world_process_zero():
            with shared_failure("reporting the plan"):
                self._report()

    def _lay_out(
        self, prepared: build.PreparedModel, args: MultimodalTrainingArguments, plugin: MultimodalParallelPlugin
    ) -> None:
        """Decides on packing and a plan, and makes the engine. Collective."""
        self.rows = row_choice(args.packing, prepared.model, prepared.spec, self.data_collator)
        prepared = replace(prepared, costs=replace(prepared.costs, packing=self.rows.packed))
        if args.resilience is not None:
            modules = plugin.modules if plugin.plan is None else module_settings(plugin.plan)
            check_survivable(args, modules, self.train_dataset)
        layouts = None
        if plugin.auto and args.resilience is not None:
            count = build.resolve_batch(args, args.world_size)
            layouts = node_layouts(prepared, plugin, args, self._typical_batch(count))
            plugin = replace(plugin, auto=False, plan=layouts.planner.first().plan)
            args = copy.copy(args)
            args.global_batch_size, args.gradient_accumulation_steps = count, 1
            self.args = build.planned_arguments(args)
        elif plugin.auto:
            plan, self.search = find_plan(prepared, self.training_sizes, plugin, args)
            plugin, args = plan.applied(plugin, args)
            self.args = build.planned_arguments(args)
            self._train_batch_size = self.args.train_batch_size
        elif plugin.plan is not None and args.microbatch_assignment is None:
            args = build.arguments_of_plan(args, plugin.plan)
            self.args = build.planned_arguments(args)
        if args.resilience is not None:
            plan, count = build.plan_and_batch(plugin, prepared.spec, args)
            if layouts is None:
                layouts = node_layouts(prepared, MultimodalParallelPlugin(plan=plan), args, self._typical_batch(count))
            self._layouts = layouts, layouts.planner.adopt(plan)
        self.engine, self.global_batch_size = build.build_engine(
            prepared, args, plugin, self.world, self._forward_context, self._joins
        )
        if self._joins:
            self.args.eval_on_start = False  # the training has begun
        laid_out = self.engine.plan if self._layouts is None else self._layouts[1].plan
        self._pack(self.rows.packed or laid_out.modules[LANGUAGE_MODEL].cp_size > 1)
        self._steps = TrainingSteps(self.engine, args, self.global_batch_size)
        self._saves = CheckpointSaves(self.args, self.world)
        self._evaluation_samples = SampleAgreement(args.on_bad_sample == "skip", self.world, "evaluation dataset")
        self._planned_for = plugin.planned_for
        self._arrangement = DEFAULT_ARRANGEMENT  # if the arguments name no arrangement; the value of rank 0 decides

    def _typical_batch(self, count: int) -> tuple[int, SampleSizes | None]:
        """Number of samples of a global batch, and sizes of a typical one, the same on all ranks. Collective."""
        return count, self.world.from_first_rank(lambda: self.training_sizes.typical(self.train_dataset, count))

    def _report(self) -> None:
        """Prints the plan and the search for it."""
        answer = None if self.search is None else self.search.answer
        searched = None if answer is None else answer.inputs.samples.measured
        size, made_for = self.global_batch_size, self._planned_for
        report = PlanReport(self._engine, self.training_sizes, size, self.rows, searched, made_for).show()
        self._arrangement = self._arrangement if report.choice is None else report.choice.arrangement
        self._steps.limits.has_warned = report.large is not None and report.large.num_over > 0
        if self.search is not None:
            report_search(self.search, Path(self.args.output_dir))
        if self._layouts is not None:
            layouts, first = self._layouts
            memory_bytes = allowed_bytes(self.args, self._engine.costs.device)
            report_survival(layouts.planner, first, self.global_batch_size, memory_bytes)

    @functools.cached_property
    def world(self) -> World:
        """The ranks. Collective on first access, which under a plan is in the constructor."""
        return World(self.args.device)

    @property
    def _engine(self) -> ParallelEngine:
        """The engine, in methods that run under a plan only."""
        assert self.engine is not None
        return self.engine

    @property
    def plan(self) -> ParallelPlan | None:
        """The plan that this run follows, `None` for the stock Trainer."""
        return None if self.engine is None else self.engine.plan

    @property
    def _context(self) -> RunContext:
        """The run as it is now; users may replace attributes between calls."""
        return RunContext(
            self.args,
            self.world,
            self.model,
            self.model_spec,
            self.train_dataset,
            self.data_collator,
            self.processing_class,
            self.sample_tokens,
            self._drop_columns,
        )

    @functools.cached_property
    def _measured_sizes(self) -> MeasuredSizes:
        return MeasuredSizes()

    @property
    def training_sizes(self) -> TrainingSizes:
        """Sizes of the training samples, under a plan."""
        return TrainingSizes(self._context, self._measured_sizes)

    def _pack(self, wanted: bool) -> None:
        """Wraps the collator in one that packs, if that is wanted."""
        if wanted and isinstance(self.data_collator, DefaultCollator):
            self.data_collator.marks_tokens = True  # so that padding differs from tokens
        if wanted and not isinstance(self.data_collator, PackingCollator):
            self.data_collator = PackingCollator(self.data_collator, self.model)

    def gather_model(self) -> PreTrainedModel | None:
        """
        Returns the whole model with the weights of all ranks, on the CPU of rank 0, for `generate` or to hand over;
        `None` on other ranks. With adapters it is a `PeftModel`. Collective: call it on all ranks.

        Without a plan, too, if FSDP or DeepSpeed's stage 3 divide the weights; where each rank has all of them it is
        the model that is trained, on its device.
        """
        if self.engine is None:
            whole: Any = self.accelerator.unwrap_model(self.model)
            if has_divided_weights(self.model):
                wrapped: Any = self.model_wrapped
                return gather_divided(whole, wrapped, self.is_world_process_zero())
            return whole if self.is_world_process_zero() else None
        sharded = self.engine.sharded
        check_gatherable(self.model)
        with shared_failure("gathering the model"):
            state = sharded.gather_state_dict(all_buffers=True)
        return None if state is None else whole_model(self.model, self.engine.spec, state, sharded.adapter)

    def _write_adapter_card(self, folder: str) -> None:
        """Writes or updates `peft`'s model card of an adapter, by which the Hub links it to its base."""
        if self._engine.sharded.adapter is not None:
            self._engine.sharded.peft_model.create_or_update_model_card(folder)

    def _parallel_metrics(self) -> dict[str, float]:
        """The numbers that callbacks add to a log. Collective."""
        metrics: dict[str, float] = {}
        for callback in self._engine_callbacks():
            metrics.update(callback.parallel_metrics())
        return metrics

    def _engine_callbacks(self) -> list[EngineCallback]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, EngineCallback)]

    def _finish_save(self) -> None:
        """Waits for the checkpoint that is being written. Collective; raises on all ranks what went wrong."""
        self._saves.finish()
        self._push_saved()

    def _push_saved(self) -> None:
        """Pushes a checkpoint once it is there, as of the step that it was saved at."""
        saved = self._saves.take_saved() if self.args.push_to_hub else None
        if saved is not None:
            live, self.state = self.state, saved.state
            try:
                self._push_from_checkpoint(str(saved.path))
            finally:
                self.state = live

    def _note_best(self, folder: Path) -> None:
        """Names the best checkpoint, which may be the one that is being saved."""
        if self.state.best_global_step:
            best = folder.parent / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best == folder or best.is_dir():
                self.state.best_model_checkpoint = str(best)

    @property
    def _preemption(self) -> PreemptionCallback | None:
        return next((c for c in self.callback_handler.callbacks if isinstance(c, PreemptionCallback)), None)

    @property
    def _is_preempted(self) -> bool:
        """Whether a signal has ended the training."""
        return self._preemption is not None and self._preemption.num_asked > 0

    def _listening(self) -> AbstractContextManager:
        """A block in which signals end the training, with `save_on_preemption`."""
        return contextlib.nullcontext() if self._preemption is None else self._preemption.listening()

    @property
    def _rng_file(self) -> str:
        """The file of a checkpoint with the state of this rank's random generators, as the stock Trainer names it."""
        return "rng_state.pth" if self.args.world_size == 1 else f"rng_state_{self.args.process_index}.pth"

    @property
    def _loaders(self) -> StepLoaders:
        return StepLoaders(self._context, self._engine, self.global_batch_size)

    def _arranged(self, loader: Any) -> Any:
        """The batches of the stock Trainer's loader, arranged over ranks and accumulation steps. Collective."""
        assert self._rank_costs is not None
        together = encoders_run_together(self, self.model_spec)
        with shared_failure("arranging samples"):
            return arranged_loader(
                loader,
                self._context,
                self.training_sizes,
                self._rank_costs,
                self._train_batch_size,
                together,
                self.accelerator.prepare,
            )

    @property
    def _weighs_batches(self) -> bool:
        """Whether the losses of arranged batches are weighed here, since the model does not do it."""
        return self._rank_costs is not None and not (self.model_accepts_loss_kwargs or self.compute_loss_func)

    def _num_targets(self, batch: dict[str, Any]) -> int:
        """Target tokens of a batch, counted as the stock Trainer does."""
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"][..., 1:] if self._loss_shifts_labels else batch["labels"]
        return int(labels.ne(IGNORE_INDEX).sum())

    def _drop_columns(self, dataset: Any, description: str) -> tuple[Any, Any]:
        """A dataset and its collator, one of which drops the columns that the model does not read."""
        if is_datasets_available() and hasattr(dataset, "column_names"):
            return self._remove_unused_columns(dataset, description=description), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, description=description)

    def _on_device(self, batch: StepBatch) -> StepBatch:
        batches: Any = {key: self._prepare_input(inputs) for key, inputs in batch.batches.items()}
        return replace(batch, batches=batches)

    @contextlib.contextmanager
    def _forward_context(self) -> Iterator[None]:
        """The context of forwards, in training and in evaluation."""
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            yield

    def _evaluation_batches(self, dataloader: Any) -> Iterator[StepBatch]:
        """The batches of a loader on this rank's device, without samples that can't be read."""
        batches = iter(dataloader)
        while (batch := self._evaluation_samples.agree(next(batches, None), dataloader.dataset)) is not None:
            yield self._on_device(batch)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
