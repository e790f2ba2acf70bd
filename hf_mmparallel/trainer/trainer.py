"""`transformers.Trainer` with a layout for each module."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, rotate_checkpoints

from .._files import readable
from ..callbacks import EngineCallback, LossProgressCallback, ParallelMetricsCallback, PredictionCallback
from ..data.defaults import DefaultCollator
from ..data.loader import StepBatch
from ..data.packing import PackingCollator
from ..modeling.whole import check_gatherable, whole_model
from ..plan import LANGUAGE_MODEL, MultimodalParallelPlugin, ParallelPlan, save_layout
from ..runtime import optimizer_checkpoint
from ..runtime.atomic import atomic_folder, save_errors, sync_file
from ..runtime.engine import ParallelEngine
from ..runtime.optimizers import prepare_optimizer
from ..runtime.out_of_memory import mark_steps, told_in_optimizer
from ..steps.method_choice import KEEPING_LIMITS, MethodChoice
from ..world import ACTIVITY, World, shared_failure
from .agreement import SampleAgreement, TargetCount, check_same_folder
from .argument_table import check_arguments, settings_idle_under_a_plan, settings_without_plan
from .arguments import MultimodalTrainingArguments
from .auto import AutoSearch, find_plan, report_search
from .build import (
    arguments_of_plan,
    build_engine,
    is_single_process,
    load_whole,
    planned_arguments,
    prepare_model,
    prepare_single_process,
    restore_renamed,
    single_process_arguments,
    with_packing,
)
from .columns import check_columns, choose_collator, missing_columns
from .data_progress import DataProgress, check_trainer_state
from .evaluation import check_full_precision, evaluate
from .finite import FiniteCheck
from .loaders import check_loader, eval_loader, train_loader
from .memory_ratio import Mark, MemoryRatio
from .model_card import write_model_card
from .optimizer_state import is_by_name, load_optimizer_and_scheduler, scheduler_of_groups, stock_groups
from .overrides import check_assignment, check_overrides
from .oversized_samples import LimitWatch
from .packing_choice import row_choice
from .saved_plan import SAVED_PLAN, warn_of_other_settings
from .signature import by_name, shows_stock_signature
from .start_checks import check_launch, check_launcher, check_output_dir, check_trainer
from .start_report import report_plan
from .training_sizes import TrainingSizes

logger = get_logger(__name__)


def planned(method: Callable) -> Callable:
    """Makes an override hold under a plan only; without one the stock method runs."""

    @functools.wraps(method)
    def wrapper(self, *args, **kwargs):
        if not self.is_planned:
            return getattr(super(MultimodalParallelTrainer, self), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return wrapper


class MultimodalParallelTrainer(Trainer):
    """
    `transformers.Trainer` for models whose encoders and language model each have a layout of their own.

    Takes the arguments of [`~transformers.Trainer`]. Losses, gradient norms and weights are those of the stock Trainer
    on one process with the same global batch. Without `args.parallel`, or with every size 1 on one process, it is the
    stock Trainer. With `parallel="auto"` the first rank searches for the best plan, prints what it found and writes it
    to `plan.yaml` and `plan.html` in the output folder.

    Args:
        model (`PreTrainedModel`, `PeftModel`, `str` or `Path`):
            A whole model that is equal on all ranks, also one that `get_peft_model` made; or an id or folder, from
            which each rank reads only the weights that it holds.
        args ([`MultimodalTrainingArguments`]): The arguments, with the layout in `parallel`.
        sample_tokens (`Callable[[Any], Mapping[str, int | Sequence[int]]]`, *optional*):
            Sample of the training set -> module -> its tokens there, or the lengths of its images; what samples are
            arranged by where neither their columns nor the processor say it.

    Raises:
        `ValueError`:
            For a plan that does not fit the model or the launch, and for arguments that can't hold under one.
    """

    loss_is_scaled_for_ga: bool | None = True
    args: Any
    model: Any
    optimizer: Any
    train_dataset: Any
    eval_dataset: Any
    lr_scheduler: Any

    @shows_stock_signature
    def __init__(
        self,
        model: PreTrainedModel | nn.Module | str | Path | None = None,
        args: MultimodalTrainingArguments | None = None,
        *positional: Any,
        sample_tokens: Callable[[Any], Mapping[str, int | Sequence[int]]] | None = None,
        **kwargs: Any,
    ):
        given = by_name(self, model, args, *positional, **kwargs)
        model, args = given.pop("model", None), given.pop("args", None)
        args = args if args is not None else MultimodalTrainingArguments(output_dir="tmp_trainer")
        check_launch(args)
        self.sample_tokens = sample_tokens
        self.engine: ParallelEngine | None = None
        self.search: AutoSearch | None = None
        self.method_choice = MethodChoice()  # of rank 0, if the user names no arrangement
        self._prepared_optimizer: Any = None
        plugin = getattr(args, "plugin", None)
        self.is_planned = plugin is not None and not is_single_process(plugin, args.world_size)
        if getattr(args, "packing", None):
            plugin = with_packing(plugin)
        check_columns(given, model, self.is_planned)
        if self.is_planned:
            assert plugin is not None
            self._init_planned(model, args, plugin, given)
        else:
            self._init_stock(model, args, plugin, given)

    def _init_stock(
        self, model: Any, args: Any, plugin: MultimodalParallelPlugin | None, given: dict[str, Any]
    ) -> None:
        """The stock Trainer, with the settings of modules that need no ranks."""
        args = single_process_arguments(args) if isinstance(args, MultimodalTrainingArguments) else args
        whole: Any = load_whole(model)
        if plugin is not None and model is not None:
            whole = prepare_single_process(whole, plugin, args)
        self.loss_is_scaled_for_ga = None
        args = choose_collator(args, given, whole)
        super().__init__(model=whole, args=args, **given)
        self._pack(bool(getattr(args, "packing", None)))
        idle = settings_without_plan(args, {"sample_tokens": self.sample_tokens})
        if idle is not None:
            logger.warning(idle)

    def _init_planned(
        self, model: Any, args: MultimodalTrainingArguments, plugin: MultimodalParallelPlugin, given: dict[str, Any]
    ) -> None:
        """The Trainer of this rank's part of a model. Collective."""
        check_arguments(args)
        check_launcher(args)
        check_overrides(type(self), MultimodalParallelTrainer)
        check_trainer(model, given)
        with shared_failure("preparing the model"):
            self.world = World(args.device)
            if args.save_strategy != "no":
                check_same_folder(str(args.output_dir), "output_dir", self.world)
            self.world.from_first_rank(functools.partial(check_output_dir, args))
            prepared = prepare_model(model, args, plugin, self.world)
            self.model_spec = prepared.spec
            args = choose_collator(args, given, prepared.model)
            super().__init__(model=prepared.model, args=planned_arguments(args), **given)
            self._stock_groups = stock_groups(self, prepared.model)
            self.rows = row_choice(args.packing, prepared.model, prepared.spec, self.data_collator)
            prepared = replace(prepared, costs=replace(prepared.costs, packing=self.rows.packed))
            if plugin.auto:
                found, self.search = find_plan(self, prepared, plugin, args)
                plugin, args = found.applied(plugin, args)
                self.args = planned_arguments(args)
                self._train_batch_size = self.args.train_batch_size
            elif plugin.plan is not None and args.microbatch_assignment is None:
                args = arguments_of_plan(args, plugin.plan)
                self.args = planned_arguments(args)
            self.engine, self.global_batch_size = build_engine(prepared, args, plugin, self.world)
            self._pack(self.rows.packed or self.engine.plan.modules[LANGUAGE_MODEL].cp_size > 1)
        skip = args.on_bad_sample == "skip"
        self._finite = FiniteCheck(args.logging_nan_inf_filter)
        self._readable = SampleAgreement(skip, self.world, "training dataset")
        self._readable_in_evaluation = SampleAgreement(skip, self.world, "evaluation dataset")
        self._targets = TargetCount()
        self.limit_watch = LimitWatch()
        self.memory_ratio: MemoryRatio | None = None
        self.engine.executor.forward_context = self._forward_context
        self.add_callback(ParallelMetricsCallback())
        if args.log_predictions:
            self.add_callback(PredictionCallback())
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(LossProgressCallback())
        for idle in settings_idle_under_a_plan(args):
            logger.warning(idle)
        if self.is_world_process_zero():
            with shared_failure("reporting the plan"):
                report_plan(self)
                if self.search is not None:
                    report_search(self.search, Path(self.args.output_dir))

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("is_planned"):
            check_assignment(type(self), name, value)
        super().__setattr__(name, value)

    @functools.cached_property
    def world(self) -> World:
        """The ranks, which all of them ask for at the same point."""
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

    def _pack(self, wanted: bool) -> None:
        """Wraps the collator in one that packs, if that is wanted."""
        if wanted and isinstance(self.data_collator, DefaultCollator):
            self.data_collator.marks_tokens = True  # so that padding can be told from tokens
        if wanted and not isinstance(self.data_collator, PackingCollator):
            self.data_collator = PackingCollator(self.data_collator, self.model)

    # The model

    @planned
    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if training and optimizer is not self._prepared_optimizer:  # just made, by whatever `create_optimizer`
            with shared_failure("preparing the optimizer"):
                mark_steps(optimizer)  # first, since what the others do to gradients takes memory too
                prepare_optimizer(optimizer, self._engine.holds_all_trained, self.world)
            self._prepared_optimizer = optimizer
        return self._engine

    @planned
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The engine has placed it."""

    def gather_model(self) -> PreTrainedModel | None:
        """
        The whole model with the weights of all ranks, on the CPU of rank 0, for `generate` or to hand over; `None` on
        other ranks. With adapters it is a `PeftModel`. Collective: call it on all ranks.
        """
        if self.engine is None:
            return self.accelerator.unwrap_model(self.model) if self.is_world_process_zero() else None
        engine = self._engine
        check_gatherable(self.model)
        with shared_failure("gathering the model"):
            state = engine.sharded.gather_state_dict(all_buffers=True)
        return None if state is None else whole_model(self.model, engine.spec, state, engine.sharded.adapter)

    # The log

    def add_callback(self, callback: Any) -> None:
        super().add_callback(callback)
        self._attach_callbacks()

    def _attach_callbacks(self) -> None:
        """Gives callbacks that look into the engine their engine."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EngineCallback):
                callback.engine = self.engine

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.engine is not None and "loss" in logs:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, EngineCallback):
                    logs.update(callback.parallel_metrics())
        if self.engine is not None and self._readable.skip and not {"loss", "train_loss"}.isdisjoint(logs):
            logs["parallel/skipped_samples"] = self._readable.num_skipped
        if self.engine is not None:
            self._finite.settle()
        super().log(logs, start_time)

    # Data

    @functools.cached_property
    def training_sizes(self) -> TrainingSizes:
        """Sizes of the training samples."""
        return TrainingSizes(self)

    @property
    def learned_ratio(self) -> Mark | None:
        """What a run that goes on has learned of memory."""
        progress: DataProgress | None = getattr(self, "_progress", None)
        learned = None if progress is None else progress.position.memory_ratio
        return None if learned is None else (learned[0], learned[1], learned[2])

    @planned
    def get_train_dataloader(self) -> DataLoader:
        return train_loader(self)

    @planned
    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        return eval_loader(self, dataset, "Evaluation")

    @planned
    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return eval_loader(self, test_dataset, "test")

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps the columns that composed models route to their encoders, which no forward signature names."""
        known = self._signature_columns
        super()._set_signature_columns_if_needed()
        if known is None and self._signature_columns is not None and hasattr(self.model, "multimodal_parts"):
            for part in self.model.multimodal_parts().values():
                for modality in part.modalities:
                    self._signature_columns.extend(part.input_names(modality))

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """The stock method, with the columns that are expected where it finds none."""
        try:
            return super()._remove_unused_columns(dataset, description)
        except ValueError as error:
            raise ValueError(
                f"Nothing of the {(description or 'given').lower()} dataset can be given to the model: "
                f"{missing_columns(list(dataset.column_names))}"
            ) from error

    @planned
    def get_total_train_batch_size(self, args: MultimodalTrainingArguments) -> int:
        return self.global_batch_size

    @planned
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, None]:
        ACTIVITY.step = self.state.global_step + 1
        engine = self._engine
        with shared_failure("reading samples"):
            engine.asked_s = time.perf_counter()
            read = next(epoch_iterator, None)
            engine.data_ms = 1e3 * (time.perf_counter() - engine.asked_s)
            batch = self._readable.settle(read, self._train_steps)
        if batch is None:
            self.control.should_epoch_stop = True  # a stream tells its end when it is there
            return [], None
        self._progress.step(batch.drawn)
        planner = self._engine.planner
        if planner is not None and planner.method in KEEPING_LIMITS:
            self.limit_watch.saw(batch.step, batch.workloads)
        return [batch], None

    def _evaluation_batches(self, dataloader: Any) -> Iterator[StepBatch]:
        """The batches of a loader, without samples that can't be read."""
        batches = iter(dataloader)
        while (batch := self._readable_in_evaluation.settle(next(batches, None), dataloader.dataset)) is not None:
            yield batch

    @planned
    def train(self, *args: Any, **kwargs: Any) -> Any:
        check_overrides(type(self), MultimodalParallelTrainer)
        engine = self._engine
        steps = told_in_optimizer(lambda: self._prepared_optimizer, lambda: engine.account, engine.device)
        with shared_failure("optimizer, callbacks or log"), steps:
            return super().train(*args, **kwargs)

    @planned
    def _inner_training_loop(self, *args: Any, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        self._progress = self.world.raise_together(
            lambda: DataProgress(self.global_batch_size, resume_from_checkpoint)
        )
        self._readable.num_skipped = self._progress.position.num_skipped
        check_full_precision(self._engine)
        return super()._inner_training_loop(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    @planned
    def set_initial_training_values(self, args: Any, dataloader: DataLoader) -> tuple:
        check_loader(dataloader, "get_train_dataloader")
        self._train_steps: Any = dataloader.dataset
        values = super().set_initial_training_values(args, dataloader)
        return self._progress.training_values(values, args, dataloader)

    @planned
    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        stock = super()._init_training_state(*args)
        return self._progress.resumed_at or stock

    def _on_device(self, batch: StepBatch) -> StepBatch:
        batches: Any = {key: self._prepare_input(inputs) for key, inputs in batch.batches.items()}
        return replace(batch, batches=batches)

    # A step

    @planned
    def training_step(self, model: nn.Module, inputs: StepBatch, num_items_in_batch: Any = None) -> torch.Tensor:
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        with shared_failure("training step"):
            self._totals = self._engine.train_step(self._on_device(inputs), self.state.global_step)
            self._targets.saw(self._totals.num_targets, is_first=not self.state.global_step)
            if self.memory_ratio is not None:
                self.memory_ratio.saw_step(self._engine)
        self._finite.loss(self.state.global_step + 1, self._totals.mean_loss)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return torch.tensor(self._totals.mean_loss, dtype=torch.float32, device=self.args.device)

    @contextlib.contextmanager
    def _forward_context(self) -> Iterator[None]:
        """What forwards run in, of training and of evaluation."""
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            yield

    @planned
    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self._engine.clip(self.args.max_grad_norm)

    @planned
    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        norm = self._engine.gradient_norm() if grad_norm is None else grad_norm
        self._finite.norm(self.state.global_step + 1, norm)
        return norm

    @planned
    def floating_point_ops(self, inputs: StepBatch) -> int:
        if not self.is_world_process_zero():
            return 0  # `store_flos` adds up the ranks
        return 6 * self._totals.num_tokens * self._engine.num_compute_parameters

    @planned
    def _track_num_input_tokens(self, inputs: StepBatch) -> None:
        counted = self.args.include_num_input_tokens_seen
        if counted != "no":
            totals = self._totals
            self.state.num_input_tokens_seen += (
                totals.num_real_tokens if counted == "non_padding" else totals.num_tokens
            )

    # Evaluation

    @planned
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Metrics on all ranks, predictions on rank 0, each sample once and in the sampler's order."""
        check_overrides(type(self), MultimodalParallelTrainer)
        check_loader(dataloader, "get_test_dataloader" if description == "Prediction" else "get_eval_dataloader")
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        logger.info(f"\n***** Running {description} *****")
        with shared_failure("evaluation"):
            return evaluate(self, dataloader, prediction_loss_only, metric_key_prefix)

    # Checkpoints

    @planned
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        output_dir = str(output_dir or self.args.output_dir)
        # The folder of a checkpoint still has another name here; `_save_checkpoint` says the final one.
        said = contextlib.nullcontext() if _internal_call else save_errors(Path(output_dir))
        with shared_failure("saving the model"), said:
            if not _internal_call:
                check_same_folder(output_dir, "output_dir", self.world)
            self._engine.sharded.save(output_dir)
            if self.args.should_save:
                self._save(output_dir)
            self.world.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @planned
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Writes what stands beside the weights: processor, arguments, plan."""
        output_dir = str(output_dir or self.args.output_dir)
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None:
            processor.save_pretrained(output_dir)
        torch.save(self.args, os.path.join(output_dir, "training_args.bin"))
        save_layout(Path(output_dir) / SAVED_PLAN, self._engine.plan, self._engine.settings)

    @planned
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes `checkpoint-N` in a folder of another name first, so that it appears whole or not at all."""
        self.store_flos()
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with shared_failure(f"saving `{folder.name}`"), atomic_folder(folder, self.world) as writing:
            self.save_model(str(writing), _internal_call=True)
            if not self.args.save_only_model:
                self._save_optimizer_and_scheduler(str(writing))
                self._save_rng_state(str(writing))
            if self.state.best_global_step:
                best = folder.parent / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
                if best == folder or best.is_dir():
                    self.state.best_model_checkpoint = str(best)
            if self.args.should_save:
                self._save_state(writing)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(folder.parent),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.world.barrier("removing old checkpoints")

    def _save_state(self, folder: Path) -> None:
        """Writes the Trainer's state with that of its callbacks."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                states: Any = self.state.stateful_callbacks
                if isinstance(states[name], list):
                    states[name].append(callback.state())
                else:
                    states[name] = callback.state()
        self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
        learned = None if self.memory_ratio is None else self.memory_ratio.learned
        self._progress.save(folder, self.state.global_step, self._readable.num_skipped, learned)

    @planned
    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        sync_file(Path(output_dir) / f"rng_state_{self.args.process_index}.pth")

    @planned
    def _load_rng_state(self, checkpoint: str | None) -> None:
        def read() -> None:
            with readable(Path(str(checkpoint)) / f"rng_state_{self.args.process_index}.pth"):
                super(MultimodalParallelTrainer, self)._load_rng_state(checkpoint)

        self.world.raise_together(read)

    @planned
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        sharded = self._engine.sharded
        groups = optimizer_checkpoint.save_optimizer(self.optimizer, sharded, output_dir, self._stock_groups)
        if self.args.should_save:
            state = scheduler_of_groups(self.lr_scheduler.state_dict(), groups)
            torch.save(state, os.path.join(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        if self.engine is None and not is_by_name(folder, self.model):
            super()._load_optimizer_and_scheduler(folder)
        elif folder is not None and os.path.isfile(os.path.join(folder, "scheduler.pt")):
            groups = self._stock_groups if self.engine is not None else []
            with shared_failure("loading the optimizer's state"):
                load_optimizer_and_scheduler(
                    self.optimizer, self.lr_scheduler, self.model, Path(folder), groups, self.world
                )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        engine = self.engine
        if engine is None:
            if model is not None or not restore_renamed(self.model, resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        warn_of_other_settings(resume_from_checkpoint, engine.settings)
        with shared_failure("loading the weights"):
            if not os.path.isdir(resume_from_checkpoint):
                raise ValueError(f"Can't find a valid checkpoint at {resume_from_checkpoint}")
            self.world.raise_together(functools.partial(check_trainer_state, Path(resume_from_checkpoint)))
            engine.sharded.load(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self.engine is None:
            sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
            if sharded or not restore_renamed(self.model, self.state.best_model_checkpoint):
                super()._load_best_model()
            return
        logger.info(f"Loading best model from {self.state.best_model_checkpoint} (score: {self.state.best_metric}).")
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    # The model card

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The stock model card, with the plan, its picture and the measured efficiency under a plan."""
        if self.engine is not None:
            tags = kwargs.get("tags") or []
            kwargs["tags"] = [*([tags] if isinstance(tags, str) else tags), "hf_mmparallel"]
        super().create_model_card(*args, **kwargs)
        if self.engine is not None and self.is_world_process_zero():
            callbacks = self.callback_handler.callbacks
            found = (own.comparison for own in callbacks if isinstance(own, PredictionCallback))
            write_model_card(
                Path(self.args.output_dir),
                self.engine,
                self.global_batch_size,
                self.state.log_history,
                next(found, None),
            )
