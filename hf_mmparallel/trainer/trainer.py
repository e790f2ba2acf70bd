"""
`transformers.Trainer` with a layout for each module: its overrides, each with the reason why a plan needs it. Their
state is an [`EngineState`], and [`Survival`] repeats what lost ranks have broken off; decisions are made in other
files, which don't know the Trainer.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from .._environment import joins_job
from .._files import readable
from ..data.packing import RowChoice
from ..data.step_batch import StepBatch
from ..plan import ModelSpec, MultimodalParallelPlugin, ParallelPlan
from ..runtime import optimizer_checkpoint
from ..runtime.engine import ParallelEngine
from ..runtime.out_of_memory import name_optimizer_in_errors
from ..runtime.updated_copies import refresh_copies
from ..runtime.writes import sync_file
from ..world import World, raise_on_all_ranks, refuse_once
from . import build
from .argument_table import check_arguments, check_launcher
from .arguments import MultimodalTrainingArguments, check_optimizer_class
from .auto import AutoSearch, warn_of_other_settings
from .checkpoint_saves import write_beside_weights
from .columns import check_columns, choose_collator, encoder_columns, missing_columns
from .engine_state import EngineState
from .evaluation import Evaluator, cast_for_evaluation, check_full_precision
from .loaders import check_loader, follow_plan
from .optimizer_groups import (
    SCHEDULER,
    complete_state,
    given_optimizer,
    is_by_name,
    learning_rates,
    load_optimizer_and_scheduler,
    scheduler_of_groups,
)
from .start_checks import check_launch, check_overrides, check_trainer
from .survival import Survival
from .training_sizes import TrainingSizes
from .training_steps import (
    ModuleLosses,
    check_output_folder,
    check_same_folder,
    check_trainer_state,
    count_generator_targets,
    save_trainer_state,
)

logger = get_logger(__name__)


def under_plan(method: Callable) -> Callable:
    """Makes an override apply under a plan only; without one the stock method runs."""

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
            Sample of the training set -> module -> its tokens there, or the lengths of its images; the sizes that
            samples are arranged by where neither columns nor the processor give them.

    Raises:
        `ValueError`:
            For a plan that does not fit the model or the launch, and for arguments that can't hold under one.

    Example:

    ```python
    >>> args = MultimodalTrainingArguments("out", global_batch_size=8, per_device_train_batch_size=2, max_steps=1)
    >>> trainer = MultimodalParallelTrainer(model, args, data_collator=collator, train_dataset=dataset)
    >>> trainer.train().global_step
    {'train_runtime': ...}
    1
    ```
    """

    loss_is_scaled_for_ga: bool | None = True
    logs_token_metrics = False  # sums accuracy and entropy of the predictions
    is_planned: bool
    args: Any
    model: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    optimizer: Any
    lr_scheduler: Any
    engine: ParallelEngine | None  # this rank's part of the model; `None` for the stock Trainer
    search: AutoSearch | None  # for the plan, on rank 0
    sample_tokens: Callable | None = None  # sample -> module -> its tokens
    model_spec: ModelSpec
    global_batch_size: int  # samples, under a plan
    rows: RowChoice  # whether samples are packed, under a plan

    @refuse_once()
    def __init__(
        self,
        model: PreTrainedModel | nn.Module | str | Path | None = None,
        args: MultimodalTrainingArguments | None = None,
        *positional: Any,
        sample_tokens: Callable[[Any], Mapping[str, int | Sequence[int]]] | None = None,
        **kwargs: Any,
    ):
        given = dict(inspect.signature(Trainer).bind(model, args, *positional, **kwargs).arguments)
        del given["model"], given["args"]
        args = build.with_mesh_of(model, args or MultimodalTrainingArguments(output_dir="tmp_trainer"))
        check_launch(args)
        self._run = EngineState(self, joins_job())
        self._survival = Survival(self, self._run)
        self.sample_tokens = sample_tokens or self.sample_tokens
        self._module_losses = ModuleLosses()
        self.engine = self.search = None
        plugin = getattr(args, "plugin", None)
        self.is_planned = plugin is not None and not build.is_single_process(plugin, args.world_size)
        if getattr(args, "row_packing", None):
            plugin = build.with_packing(plugin)
        check_columns(given, model, self.is_planned)
        if self.is_planned:
            assert plugin is not None
            check_overrides(type(self), MultimodalParallelTrainer, vars(self))
            self._init_planned(model, args, plugin, given)
        else:
            self._init_stock(model, args, plugin, given)

    def _init_stock(
        self, model: Any, args: Any, plugin: MultimodalParallelPlugin | None, given: dict[str, Any]
    ) -> None:
        """The stock Trainer, with the settings of modules that need no ranks."""
        args = build.single_process_arguments(args) if isinstance(args, MultimodalTrainingArguments) else args
        whole = build.whole_model(model, given, plugin, args)
        self.loss_is_scaled_for_ga = None
        args = choose_collator(args, given, whole)
        super().__init__(model=whole, args=args, **given)
        self._run.begin_without_plan(args, plugin)

    def _init_planned(
        self, model: Any, args: MultimodalTrainingArguments, plugin: MultimodalParallelPlugin, given: dict[str, Any]
    ) -> None:
        """The Trainer of this rank's part of a model. Collective."""
        check_arguments(args)
        check_launcher(args)
        check_trainer(model, given)
        check_optimizer_class(plugin.modules, given)
        optimizer = given_optimizer(given, args, plugin.modules)
        self.args = args  # for `world`; the stock constructor sets those of its own loop
        with raise_on_all_ranks("preparing the model"):
            check_output_folder(args, self.world)
            prepared = build.prepare_model(model, args, plugin, self.world)
            self.model_spec = prepared.spec
            args = choose_collator(args, given, prepared.model)
            super().__init__(model=prepared.model, args=build.plan_arguments(args), **given)
            self._run.lay_out(prepared, args, plugin, optimizer)
        self._run.begin_under_plan(args, plugin)

    # The model

    @under_plan
    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Returns the engine in place of DDP, and prepares the optimizer that `create_optimizer` has just made."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if training and optimizer is not self._run.prepared_optimizer:
            self._run.prepare_optimizer(optimizer)
        return self._engine

    @under_plan
    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the engine has placed this rank's part."""

    # The log

    def add_callback(self, callback: Any) -> None:
        """Gives callbacks that look into the engine their engine."""
        super().add_callback(callback)
        for callback in self._run.engine_callbacks():
            callback.engine, callback.complete = self.engine, self._survival.complete

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the losses of single modules, the metrics of callbacks and the number of skipped samples."""
        if "loss" in logs:
            logs.update(self._module_losses.take(self.state.global_step))
        if self.engine is not None:
            if "loss" in logs:
                logs.update(self._survival.complete(self._run.parallel_metrics))
            if self._run.steps.samples.skip and not {"loss", "train_loss"}.isdisjoint(logs):
                logs["parallel/skipped_samples"] = self._run.steps.samples.num_skipped
            self._run.steps.finite.check()
        logs.update(self._run.rates if "learning_rate" in logs else {})
        super().log(logs, start_time)

    # Data

    def get_train_dataloader(self) -> DataLoader:
        """
        Under a plan its items are steps of all ranks, and training steps that follow are planned as this loader does;
        without one they are the stock Trainer's batches, arranged if `microbatch_assignment` says so. Collective,
        since ranks exchange sizes of samples.
        """
        if not self.is_planned:
            loader = super().get_train_dataloader()
            return loader if self._run.rank_costs is None else self._run.arrange_batches(loader)
        training = self._run.loaders.training(
            self._get_train_sampler, self.training_sizes, self._run.arrangement, self._run.steps.learned_ratio
        )
        training.loader.repeated = self._survival.repeat
        self._run.steps.use(training)
        return training.loader

    @under_plan
    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Its items are steps of all ranks."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        return self._run.loaders.evaluation(dataset, self._get_eval_sampler, "Evaluation")

    @under_plan
    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return self._run.loaders.evaluation(test_dataset, self._get_eval_sampler, "test")

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps the columns that composed models route to their encoders, which no forward signature names."""
        known = self._signature_columns
        super()._set_signature_columns_if_needed()
        if known is None and self._signature_columns is not None:
            self._signature_columns.extend(encoder_columns(self.model))

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Names the columns that a model reads in the error for a dataset that has none of them."""
        try:
            return super()._remove_unused_columns(dataset, description)
        except ValueError as error:
            raise ValueError(
                f"Nothing of the {(description or 'given').lower()} dataset can be given to the model: "
                f"{missing_columns(list(dataset.column_names))}"
            ) from error

    @under_plan
    def get_total_train_batch_size(self, args: MultimodalTrainingArguments) -> int:
        """The global batch, which is not a multiple of the number of ranks."""
        return self.global_batch_size

    @under_plan
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list, None]:
        """One global batch; target tokens are counted when it runs."""
        step = self.state.global_step + 1
        self._run.steps.enter_epoch(epoch_iterator)
        self._survival.let_leave()
        self._survival.take_in()
        batch = self._survival.repeat(lambda: self._run.steps.read(self._run.train_steps, step))
        if batch is None:
            self.control.should_epoch_stop = True  # the length of a stream is unknown before its end
            return [], None
        return [batch], None

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | int | None:
        """Counts the target tokens of arranged batches for models, too, that do not ask for them."""
        count_generator_targets(batch_samples, self.model, self.accelerator)
        stock = super()._get_num_items_in_batch(batch_samples, device)
        if stock is not None or not self._run.weighs_batches or not all("labels" in batch for batch in batch_samples):
            return stock
        own = torch.tensor(sum(map(self._run.num_targets, batch_samples)), device=device)
        counts: Any = self.accelerator.gather(own)
        return counts.sum()

    # Training

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Modules with a learning rate or weight decay of their own have groups of their own."""
        return self._run.split_groups(super().create_optimizer(model))

    def _get_learning_rate(self) -> float:
        """Notes those of modules, for the log of the step that they are used in."""
        self._run.rates = learning_rates(self.optimizer)
        return super()._get_learning_rate()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Weighs the mean loss of an arranged batch by its targets, if the model takes no `num_items_in_batch`."""
        if "num_generator_targets" in inputs:
            loss, outputs = result = super().compute_loss(model, inputs, True, num_items_in_batch)
            self._module_losses.add(getattr(outputs, "losses", None) or {})
            return result if return_outputs else loss
        # evaluation has the batches of the stock Trainer; arranged ones have as many targets as the arrangement gives
        if num_items_in_batch is None or not (model.training and self._run.weighs_batches):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        weight = self._run.num_targets(inputs) / num_items_in_batch * self.args.world_size
        weight = weight * self.current_gradient_accumulation_steps  # by which the stock Trainer divides
        result = super().compute_loss(model, inputs, return_outputs)
        return (result[0] * weight, result[1]) if return_outputs else result * weight

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Ends all ranks with one error, or goes on when ranks are lost; signals end it, or let a node leave."""
        with self._run.listening():
            resume_from_checkpoint = self._run.checkpoint_to_resume(resume_from_checkpoint)
            if not self.is_planned:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            check_overrides(type(self), MultimodalParallelTrainer, vars(self))
            engine = self._engine
            steps = name_optimizer_in_errors(
                lambda: self._run.prepared_optimizer, lambda: engine.account, engine.device
            )
            # one that joins goes on from where the others are
            first = None if self._run.joins else resume_from_checkpoint
            failure = raise_on_all_ranks("optimizer, callbacks or log")
            with self._run.saves.leaving(), failure, steps, self._survival.going_on():
                return super().train(first, *args, **kwargs)

    @under_plan
    def _inner_training_loop(self, *args: Any, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        """Reads the position in the data, in samples, which may be in the middle of an epoch."""
        with self._survival.join_checkpoint(resume_from_checkpoint) as checkpoint:
            self._run.steps.begin(checkpoint)
            check_full_precision(self._engine)
            return super()._inner_training_loop(*args, resume_from_checkpoint=checkpoint, **kwargs)

    @under_plan
    def set_initial_training_values(self, args: Any, dataloader: DataLoader) -> tuple:
        """Counts steps from the position in the data."""
        check_loader(dataloader, "get_train_dataloader")
        if args.resilience is not None:
            self._run.steps.check_reads(dataloader)
        self._run.train_steps = dataloader.dataset
        values = super().set_initial_training_values(args, dataloader)
        return self._run.steps.progress.training_values(values, args, dataloader)

    @under_plan
    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        """The epoch and step to go on from, from the position in the data."""
        stock = super()._init_training_state(*args)
        return self._run.steps.progress.resumed_at or stock

    @under_plan
    def training_step(self, model: nn.Module, inputs: StepBatch, num_items_in_batch: Any = None) -> torch.Tensor:
        """Runs a global batch on the stages of all ranks; the loss is the mean over its target tokens."""
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._run.push_saved()
        self._run.saves.note_step()
        loss = self._survival.run_step()
        self._module_losses.add(self._run.steps.totals.losses)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        self.args.logging_nan_inf_filter = False  # else the loop reads each loss; until `floating_point_ops`
        return loss

    @under_plan
    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clips by the norm over the parameters of all ranks."""
        norm = self._survival.gradient_norm()
        self._engine.clip(norm, self.args.max_grad_norm)
        return norm

    @under_plan
    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        norm = self._survival.gradient_norm() if grad_norm is None else grad_norm
        self._run.steps.finite.watch(self.state.global_step + 1, "norm", norm)
        return norm

    @under_plan
    def floating_point_ops(self, inputs: StepBatch) -> int:
        """Operations of all ranks. The loop asks for them right after the loss of a step."""
        self.args.logging_nan_inf_filter = self._run.steps.finite.filtered
        return 6 * self._run.steps.totals.num_tokens * self._engine.num_compute_parameters

    @under_plan
    def _track_num_input_tokens(self, inputs: StepBatch) -> None:
        """Counts the tokens of all ranks, which the step has summed."""
        self.state.num_input_tokens_seen += self._run.steps.num_tokens(self.args.include_num_input_tokens_seen)

    @under_plan
    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """What a callback asks for on one rank, all ranks do: each of it is collective."""
        if self._survival.agree_on_control():
            self._run.saves.note_best_before(self.state)
            super()._maybe_log_save_evaluate(*args, **kwargs)
            self._survival.agree_on_control()  # callbacks of what was done can stop the training

    # Evaluation

    @under_plan
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Metrics on all ranks, predictions on rank 0, each sample once and in the sampler's order."""
        check_overrides(type(self), MultimodalParallelTrainer, vars(self))
        check_loader(dataloader, "get_test_dataloader" if description == "Prediction" else "get_eval_dataloader")
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        logger.info(f"\n***** Running {description} *****")

        def evaluate() -> EvalLoopOutput:
            follow_plan(dataloader, self._engine)
            evaluator = Evaluator(self._engine, self.args, self.compute_metrics, self.preprocess_logits_for_metrics)
            return evaluator.run(self._run.evaluation_batches(dataloader), prediction_loss_only, metric_key_prefix)

        with raise_on_all_ranks("evaluation"):
            if not self.is_in_train:
                cast_for_evaluation(self._engine, self.args)
            if callable(getattr(self.optimizer, "eval", None)):
                self.optimizer.eval()
            handler: Any = self.callback_handler
            handler.eval_dataloader = dataloader
            return self._survival.complete(evaluate)

    # Checkpoints

    @under_plan
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the shards of all ranks into one folder, as `from_pretrained` reads them."""
        output_dir = str(output_dir or self.args.output_dir)
        with raise_on_all_ranks("saving the model"):
            if not _internal_call:
                check_same_folder(output_dir, "output_dir", self.world)
            with self._run.saves.writing(output_dir) as writes:
                self._engine.sharded.save(writes)
                if self.args.should_save:
                    self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @under_plan
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Writes the files beside the weights: processor, arguments, plan, and the model card of an adapter."""
        output_dir = str(output_dir or self.args.output_dir)
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        write_beside_weights(Path(output_dir), self._engine, processor)
        torch.save(self.args, os.path.join(output_dir, "training_args.bin"))

    @under_plan
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes `checkpoint-N` such that it appears whole or not at all; with `async_save` while training goes on."""
        self._survival.complete(lambda: self._write_checkpoint(trial))

    def _write_checkpoint(self, trial: Any) -> None:
        self.store_flos()
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with raise_on_all_ranks(f"saving `{folder.name}`"):
            self._run.finish_save()
            with self._run.saves.checkpoint(folder, self.state) as writes:
                self.save_model(str(writes.folder), _internal_call=True)
                if not self.args.save_only_model:
                    self._save_optimizer_and_scheduler(str(writes.folder))
                    self._save_rng_state(str(writes.folder))
                self._run.note_best(folder)
                if self.args.should_save:
                    save_trainer_state(writes.folder, self.state, [*self.callback_handler.callbacks, self.control])
                    self._run.steps.save(writes.folder, self.state.global_step)
            if not self.args.async_save:
                self._run.finish_save()

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Waits for the last checkpoint first, which may be the best."""
        if self.is_planned:
            self._survival.end_saves()
        best = self.state.best_model_checkpoint
        # the best one is not loaded, and the last one is kept beside it, to go on from
        if self._run.is_preempted:
            self.state.best_model_checkpoint = None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.state.best_model_checkpoint = best

    @under_plan
    def _save_rng_state(self, output_dir: str) -> None:
        """Waits until the file is on disk, before the checkpoint gets its name."""
        super()._save_rng_state(output_dir)
        with self._run.saves.writing(output_dir) as writes:
            writes.add(sync_file, writes.folder / self._run.rng_file)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Under a plan writes the state of all ranks by the names of parameters, so that any layout reads it."""
        if not self.is_planned:
            if self.accelerator.is_fsdp2:
                complete_state(self.optimizer)  # else torch does not load it
            return super()._save_optimizer_and_scheduler(output_dir)
        sharded = self._engine.sharded
        with self._run.saves.writing(output_dir) as writes:
            groups = optimizer_checkpoint.save_optimizer(self.optimizer, sharded, writes, self._run.stock_groups)
            if self.args.should_save:
                state = scheduler_of_groups(self.lr_scheduler.state_dict(), groups)
                torch.save(state, os.path.join(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Reads the state of a plan's checkpoint, also on one process, and the stock Trainer's under a plan."""
        if self._survival.told is not None:
            self._survival.told.restore_schedule(self.optimizer, self.lr_scheduler)
        elif self.engine is None and not is_by_name(checkpoint, self.model):
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None and os.path.isfile(os.path.join(checkpoint, SCHEDULER)):
            groups = self._run.stock_groups if self.engine is not None else []
            with raise_on_all_ranks("loading the optimizer's state"):
                load_optimizer_and_scheduler(
                    self.optimizer, self.lr_scheduler, self.model, Path(checkpoint), groups, self.world
                )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Each rank reads its part; on one process also checkpoints whose keys are named as on the Hub."""
        engine = self.engine
        if engine is None:
            if model is not None or not build.restore_renamed(self.model, resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        warn_of_other_settings(resume_from_checkpoint, engine.options.module_settings)
        with raise_on_all_ranks("loading the weights"):
            if not os.path.isdir(resume_from_checkpoint):
                raise ValueError(f"Can't find a valid checkpoint at {resume_from_checkpoint}")
            self.world.raise_together(functools.partial(check_trainer_state, Path(resume_from_checkpoint)))
            engine.sharded.load(resume_from_checkpoint)
            refresh_copies(self._run.prepared_optimizer)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Ends all ranks with one error if a file can't be read. A rank that joins has none, and does nothing."""
        if self.engine is None:
            return super()._load_rng_state(checkpoint)
        if self._survival.join_folder is not None and checkpoint == self._survival.join_folder:
            return

        def read() -> None:
            with readable(Path(str(checkpoint)) / self._run.rng_file):
                super(MultimodalParallelTrainer, self)._load_rng_state(checkpoint)

        self._survival.complete(lambda: self.world.raise_together(read))

    def _load_best_model(self) -> None:
        if self.engine is None:
            sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
            if sharded or not build.restore_renamed(self.model, self.state.best_model_checkpoint):
                super()._load_best_model()
            return
        logger.info(f"Loading best model from {self.state.best_model_checkpoint} (score: {self.state.best_metric}).")
        self._survival.complete(lambda: self._load_from_checkpoint(str(self.state.best_model_checkpoint)))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        if self.engine is None:
            return super().create_model_card(*args, **kwargs)
        self.model.create_or_update_model_card = self._engine.sharded.write_adapter_card  # called for adapters
        try:
            super().create_model_card(*args, **kwargs)
        finally:
            del self.model.create_or_update_model_card
        if self.is_world_process_zero():
            self._run.write_model_card()

    # For users and callbacks

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
    def training_sizes(self) -> TrainingSizes:
        """Sizes of the training samples, under a plan."""
        return TrainingSizes(self._run.context, self._run.measured_sizes)

    def gather_model(self) -> PreTrainedModel | None:
        """
        Returns the whole model with the weights of all ranks, on the CPU of rank 0, for `generate` or to hand over;
        `None` on other ranks. With adapters it is a `PeftModel`. Collective: call it on all ranks.

        Without a plan, too, if FSDP or DeepSpeed's stage 3 divide the weights; where each rank has all of them it is
        the model that is trained, on its device.
        """
        return self._run.gather_model()
