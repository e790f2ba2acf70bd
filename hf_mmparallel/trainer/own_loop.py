"""
A plan in a training loop of the user, without a Trainer: the model, the optimizer and the loader of this rank, for
`accelerate`.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import RandomSampler, SequentialSampler
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import RemoveColumnsCollator, has_length

from ..cost.arrangement_choice import DEFAULT_ARRANGEMENT
from ..data.defaults import DefaultCollator, packing_collator
from ..data.global_batches import FILE as POSITION
from ..data.packing import row_choice
from ..data.step_batch import StepBatch
from ..plan import LANGUAGE_MODEL, MultimodalParallelPlugin, ParallelPlan
from ..plan.resolve import sharding_without_effect
from ..runtime.engine import ParallelEngine
from ..runtime.optimizer_checkpoint import load_optimizer, save_optimizer
from ..runtime.optimizers import prepare_optimizer
from ..runtime.updated_copies import refresh_copies
from ..runtime.writes import FolderSave, Writes, save_errors
from ..world import World, raise_on_all_ranks, refuse_once
from . import build
from .argument_table import check_arguments
from .arguments import MultimodalTrainingArguments, check_own_loop, deepspeed_keys_without_effect
from .auto import find_plan, report_plan, warn_of_other_settings
from .checkpoint_saves import write_beside_weights
from .columns import check_columns, choose_collator, encoder_columns
from .evaluation import Evaluator
from .loaders import StepLoaders
from .loop_settings import check_accelerator, check_settings, loop_arguments, on_one_process, with_optimizer
from .optimizer_groups import (
    SCHEDULER,
    check_optimizer,
    check_schedule,
    check_unscheduled,
    give_part,
    group_names,
    load_optimizer_and_scheduler,
    scheduler_of_groups,
    split_groups,
)
from .start_checks import check_launch, check_trainer
from .start_report import PlanReport
from .training_sizes import RunContext, TrainingSizes
from .training_steps import SampleAgreement, TrainingSteps, check_same_folder, check_trainer_state

logger = get_logger(__name__)

_NOT_HERE = {
    "parameters": "the optimizer has those of this rank, and `model.clip_grad_norm_` clips by the norm over all ranks",
    "state_dict": "`model.gather()` returns the whole model on rank 0, `model.save_pretrained` writes it",
    "forward": "`model.step(step)` trains on a step of the loader, `model.evaluate(dataset)` evaluates",
    "generate": "`model.gather()` returns the whole model on rank 0",
}
_NOT_HERE |= {"named_parameters": _NOT_HERE["parameters"], "load_state_dict": "`model.load_state` reads a folder"}
# which `accelerator.unwrap_model` reads
_NOT_HERE["_modules"] = "there is nothing to unwrap, call its methods on all ranks"


class ParallelModel:
    """
    The part of a model that this rank holds under a plan, in a loop of the user. [`prepare`] makes it. All methods are
    collective: call them on all ranks.

    It has no `parameters()` and no `state_dict()`, which would be those of one rank, so that nothing that expects a
    whole model uses a part of it by mistake.
    """

    def __init__(self, run: _Run):
        self._run = run

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_HERE:
            raise AttributeError(f"A model under a plan has no `{name}`, each rank holds a part: {_NOT_HERE[name]}.")
        raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`.")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"A model under a plan can't be called, each rank holds a part: {_NOT_HERE['forward']}.")

    @property
    def plan(self) -> ParallelPlan:
        """The plan that is followed."""
        return self._run.engine.plan

    @property
    def config(self) -> Any:
        """The configuration of the whole model."""
        return self._run.engine.model.config

    @property
    def engine(self) -> ParallelEngine:
        """This rank's part of the model."""
        return self._run.engine

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        return self._run.steps.global_batch_size

    @property
    def num_steps(self) -> int:
        """Steps that were run, those before a saved state among them."""
        return self._run.num_steps

    def train(self, mode: bool = True) -> ParallelModel:
        """Returns the model as it is: `step` trains, and `evaluate` evaluates."""
        return self

    def eval(self) -> ParallelModel:
        """See [`~ParallelModel.train`]."""
        return self

    def step(self, step: StepBatch) -> torch.Tensor:
        """
        Computes the gradients of a global batch, in place of any that were there. There is no backward to call.

        Args:
            step (`StepBatch`): The one that the loader has yielded last.

        Returns:
            `torch.Tensor`: Mean loss over the target tokens of the global batch, float32, the same on all ranks.

        Raises:
            `ValueError`: For anything but the last step of the loader.
        """
        run = self._run
        with run.block("training step"):
            if step is not run.current or step is None:
                raise ValueError(
                    f"`model.step` runs the step that the loader has yielded last, not this `{type(step).__name__}`. "
                    "Run steps in their order, in a loop over the loader that `prepare` returned."
                )
            run.set_mode("train")
            for parameter in (*self.engine.trained, *self.engine.updated):
                parameter.grad = None
            totals = run.steps.run(run.num_steps)
        run.steps.step_counts()
        run.num_steps += 1
        return totals.mean_loss.to(self.engine.device, torch.float32)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """
        Clips the gradients of all ranks by their norm over the whole model.

        Args:
            max_norm (`float`): Largest norm; `float("inf")` only measures it.
            norm_type (`float`, *optional*, defaults to 2.0): 2.

        Returns:
            `torch.Tensor`: The norm before it was clipped, the same on all ranks.

        Raises:
            `ValueError`: For another `norm_type`.
        """
        if norm_type != 2:
            raise ValueError(f"`norm_type={norm_type}` is not summed over ranks. Use 2.")
        with self._run.block("norm of the gradient"):
            norm = self.engine.gradient_norm()
            self.engine.clip(norm, max_norm)
        return norm

    def evaluate(
        self,
        dataset: Any,
        compute_metrics: Callable | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
    ) -> dict[str, float]:
        """
        Evaluates a dataset in batches of `per_device_eval_batch_size` samples, as `Trainer.evaluate` does.

        Args:
            dataset: As the one to train on.
            compute_metrics (`Callable[[EvalPrediction], dict]`, *optional*): As in `Trainer`; runs on rank 0.
            preprocess_logits_for_metrics (`Callable`, *optional*): As in `Trainer`.

        Returns:
            `dict[str, float]`: `eval_loss` and the metrics, on all ranks.
        """
        run = self._run
        with run.block("evaluation"):
            run.set_mode("eval")
            loader = run.loaders.evaluation(dataset, lambda _: None, "Evaluation")
            samples = SampleAgreement(run.args.on_bad_sample == "skip", self.engine.world, "evaluation dataset")
            evaluator = Evaluator(self.engine, run.args, compute_metrics, preprocess_logits_for_metrics)
            return evaluator.run(samples.batches(loader), compute_metrics is None, "eval").metrics or {}

    def gather(self) -> Any:
        """
        Returns the whole model with the weights of all ranks, on the CPU of rank 0, for `generate` or to hand over;
        `None` on other ranks. With adapters it is a `PeftModel`.
        """
        with self._run.block("gathering the model"):
            return self.engine.sharded.gather_model()

    def save_pretrained(self, folder: str | Path) -> None:
        """
        Writes the model as plain `from_pretrained` reads it, or its adapters, with the processor and the plan. Each
        rank writes its part.

        Args:
            folder (`str` or `Path`): The same on all ranks, which share the file system.
        """
        world = self.engine.world
        with self._run.block("saving the model"):
            check_same_folder(str(folder), "folder", world)
            writes = Writes(folder)
            with save_errors(writes.path):
                self._run.write_model(writes)
            writes.finish(world)

    def save_state(self, folder: str | Path, scheduler: Any = None) -> None:
        """
        Writes a checkpoint of a Trainer: the model, the state of the optimizer and of its schedule, and the position
        in the data. The folder appears whole or not at all.

        Args:
            folder (`str` or `Path`):
                The same on all ranks, which share the file system; an earlier state there is replaced.
            scheduler (`torch.optim.lr_scheduler.LRScheduler`, *optional*): The schedule of the learning rate.

        Raises:
            `ValueError`: For a folder with other files in it.
        """
        run, engine, world, folder = self._run, self.engine, self.engine.world, Path(folder)
        with run.block(f"saving `{folder.name}`"):
            check_schedule(scheduler)
            check_same_folder(str(folder), "folder", world)
            world.from_first_rank(functools.partial(check_state_folder, folder))
            with FolderSave(folder, world) as writes, save_errors(folder):
                run.write_model(writes)
                groups = save_optimizer(run.optimizer, engine.sharded, writes, run.groups)
                if world.is_first:
                    if scheduler is not None:
                        torch.save(scheduler_of_groups(scheduler.state_dict(), groups), writes.folder / SCHEDULER)
                    state = TrainerState(
                        global_step=run.num_steps,
                        train_batch_size=run.args.per_device_train_batch_size,
                        stateful_callbacks=[TrainerControl()],  # type: ignore[list-item]
                    )
                    state.save_to_json(str(writes.folder / TRAINER_STATE_NAME))
                    run.steps.save(writes.folder, run.num_steps)

    def load_state(self, folder: str | Path, scheduler: Any = None) -> None:
        """
        Goes on from a state of [`~ParallelModel.save_state`] or a checkpoint of [`MultimodalParallelTrainer`], also
        under another plan or global batch size: the next step of the loader is the one after the last that was run.

        Args:
            folder (`str` or `Path`): The same on all ranks.
            scheduler (`torch.optim.lr_scheduler.LRScheduler`, *optional*): One like that which was saved.

        Raises:
            `ValueError`: For a folder without a state that can be read, or of another model.
        """
        run, engine, world, folder = self._run, self.engine, self.engine.world, Path(folder)

        def check() -> None:
            steps = run.steps_of_loop()
            if steps is not None and steps.gi_frame is not None:
                raise ValueError("`model.load_state` moves to another place in the data. Call it before the loop.")
            check_trainer_state(folder)
            if not (folder / POSITION).is_file():
                raise ValueError(f"`{folder}` says nothing of a position in the data. Give a folder of `save_state`.")
            if (folder / SCHEDULER).is_file() != (scheduler is not None):
                has, remedy = ("no state", "Leave it out") if scheduler is not None else ("the state", "Give it")
                raise ValueError(f"`{folder}` has {has} of a schedule of the learning rate. {remedy} as `scheduler`.")

        with run.block("loading the state"):
            check_schedule(scheduler)
            world.raise_together(check)
            warn_of_other_settings(str(folder), engine.options.module_settings)
            engine.sharded.load(folder)
            refresh_copies(run.optimizer)
            if scheduler is None:
                load_optimizer(run.optimizer, engine.model, folder, run.groups, world)
            else:
                load_optimizer_and_scheduler(run.optimizer, scheduler, engine.model, folder, run.groups, world)
            run.steps.begin(str(folder))
            run.num_steps = run.steps.progress.position.global_step
            run.open_loader()
            run.current = None
            assert run.loader is not None
            global_batches: Any = run.training.loader.batch_sampler
            num_samples = len(global_batches.sampler) if has_length(run.training.loader) else None
            run.loader.epoch, _ = run.steps.progress.position.resume(global_batches, num_samples)


class ParallelLoader:
    """
    The steps of all ranks, an epoch at a time, in the order of a Trainer with the same seed; [`prepare`] makes it.

    An epoch that is left early goes on after the last step that [`ParallelModel.step`] has run.
    """

    def __init__(self, run: _Run):
        self._run = run
        self.epoch = 0  # that the next loop goes through

    def __len__(self) -> int:
        """Steps of an epoch."""
        return len(self._run.training.loader)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next loop goes through, by default the one after the last."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[StepBatch]:
        steps = self._steps()
        self._run.steps_of_loop = weakref.ref(steps)  # they end when the loop drops them
        return steps

    def _steps(self) -> Iterator[StepBatch]:
        epoch, run = self.epoch, self._run
        # one block for all steps: each begins and ends a watcher of the other ranks
        with raise_on_all_ranks("training loop"):
            run.steps.begin_epoch(epoch)
            while (step := run.read()) is not None:
                try:
                    yield step
                except GeneratorExit:  # the user has left the loop, which is no failure
                    return
            run.steps.end_epoch(epoch)
        self.epoch = epoch + 1


@dataclass
class _Run:
    """A run in a loop of the user, on this rank."""

    args: MultimodalTrainingArguments
    engine: ParallelEngine
    steps: TrainingSteps
    loaders: StepLoaders
    sizes: TrainingSizes
    arrangement: str  # if the arguments name none; the value of rank 0 decides
    optimizer: torch.optim.Optimizer
    groups: list[list[str]]  # names of trained parameters, in the groups of the optimizer
    processor: Any
    num_steps: int = 0
    loader: ParallelLoader | None = None
    current: StepBatch | None = None  # the step that was read last
    steps_of_loop: Callable[[], Any] = lambda: None  # the generator of the loop that runs

    @contextmanager
    def block(self, activity: str) -> Iterator[None]:
        """A block of [`raise_on_all_ranks`], also inside of the loop, which does not see the failures of its body."""
        try:
            with raise_on_all_ranks(activity):
                yield
        except Exception as error:
            steps = self.steps_of_loop()
            if steps is not None and self.engine.world.size > 1:
                steps.throw(error)
            raise

    @property
    def training(self) -> Any:
        return self.steps.training

    def open_loader(self) -> None:
        sampler = SequentialSampler if self.args.train_sampling_strategy == "sequential" else RandomSampler
        learned = self.steps.learned_ratio
        self.steps.use(self.loaders.training(sampler, self.sizes, self.arrangement, learned))

    def read(self) -> StepBatch | None:
        self.current = self.steps.read(self.training.dataset, self.num_steps + 1)
        return self.current

    def set_mode(self, mode: str) -> None:
        """Calls `train` or `eval` of an optimizer that has them, such as schedule-free ones."""
        if callable(getattr(self.optimizer, mode, None)):
            getattr(self.optimizer, mode)()

    def write_model(self, writes: Writes) -> None:
        self.engine.sharded.save(writes)
        if self.engine.world.is_first:
            write_beside_weights(writes.folder, self.engine, self.processor)


def check_state_folder(folder: Path) -> None:
    """Raises `ValueError` for a folder that holds anything but an earlier state."""
    if folder.exists() and any(folder.iterdir()) and not (folder / POSITION).is_file():
        raise ValueError(
            f"`{folder}` has files that are no state of a run, and would be replaced. Give a folder that is new, or "
            "that `save_state` has written."
        )


def _drop_columns(collator: Any, model: Any, args: Any) -> Callable[[Any, str], tuple[Any, Any]]:
    """Dataset and its name -> both it and its collator without the columns that the model does not read."""
    known = [*inspect.signature(model.forward).parameters, "labels", "label", "label_ids", *encoder_columns(model)]

    lean = RemoveColumnsCollator(collator, known) if args.remove_unused_columns else collator
    return lambda dataset, _: (dataset, lean)


def _lay_out(
    model: Any,
    optimizer: Any,
    args: MultimodalTrainingArguments,
    plugin: MultimodalParallelPlugin,
    given: dict[str, Any],  # see `choose_collator`
    world: World,
    accelerator: Accelerator,
    sample_tokens: Callable | None,
) -> _Run:
    """Makes the engine, gives the optimizer its part, and reports the plan. Collective."""
    prepared = build.prepare_model(model, args, plugin, world)
    if callable(optimizer):
        optimizer = optimizer(prepared.model)
        check_optimizer(optimizer)
    elif any(module.peft_config is not None for module in plugin.modules.values()):
        raise ValueError(
            "`peft_config` in the plan adds adapters, which the optimizer does not have. Give a function that makes "
            "it from the model, such as `lambda model: AdamW(model.parameters())`."
        )
    check_unscheduled(optimizer, plugin.modules)
    groups = group_names(optimizer, prepared.model)
    decaying = zip(groups, optimizer.param_groups, strict=True)
    decayed = {name for names, group in decaying if group.get("weight_decay") for name in names}
    split_groups(optimizer, prepared.model, prepared.spec, plugin.modules, decayed)
    groups = group_names(optimizer, prepared.model)
    if build.is_single_process(plugin, world.size):
        plugin = on_one_process(plugin, prepared.spec)
    args = choose_collator(args, given, prepared.model)
    processor = given["processing_class"]
    collator = given["data_collator"] or DefaultCollator(processor)  # nothing is known of the columns of a stream
    rows = row_choice(args.packing, prepared.model, prepared.spec, collator)
    prepared = replace(prepared, costs=replace(prepared.costs, packing=rows.packed))
    dataset = given["train_dataset"]
    drop = _drop_columns(collator, prepared.model, args)
    context = RunContext(args, world, prepared.model, prepared.spec, dataset, collator, processor, sample_tokens, drop)
    sizes, search = TrainingSizes(context), None
    if plugin.auto:
        found, search = find_plan(prepared, sizes, plugin, with_optimizer(args, optimizer))
        plugin, args = found.apply(plugin, args)
    engine, global_batch_size = build.build_engine(prepared, args, plugin, world, lambda: accelerator.autocast())
    if rows.packed or engine.plan.modules[LANGUAGE_MODEL].cp_size > 1:
        collator = packing_collator(collator, engine.model)
    give_part(optimizer, groups, engine)
    prepare_optimizer(optimizer, engine.holds_all_trained, world, engine.slices, engine.storage)
    for sentence in (*deepspeed_keys_without_effect(plugin.modules), *sharding_without_effect(engine.plan.modules)):
        logger.warning(sentence)
    drop = _drop_columns(collator, engine.model, args)
    args = build.plan_arguments(args)
    context = replace(context, args=args, model=engine.model, spec=engine.spec, collator=collator, drop_columns=drop)
    sizes = TrainingSizes(context, sizes.measured)
    steps = TrainingSteps(engine, args, global_batch_size)
    arrangement = DEFAULT_ARRANGEMENT
    if world.is_first:
        report = PlanReport(engine, sizes, global_batch_size, rows, plugin.planned_for)
        arrangement = report_plan(report, search, steps)
    loaders = StepLoaders(context, engine, global_batch_size)
    processor = processor or getattr(collator, "tokenizer", None)
    return _Run(args, engine, steps, loaders, sizes, arrangement, optimizer, groups, processor)


@refuse_once()
def prepare(
    accelerator: Accelerator,
    model: PreTrainedModel | nn.Module | str | Path,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
    dataset: Any,
    plan: Any,
    *,
    data_collator: Callable | None = None,
    processing_class: Any = None,
    sample_tokens: Callable | None = None,
    **settings: Any,
) -> tuple[ParallelModel, torch.optim.Optimizer, ParallelLoader]:
    """
    Lays a model out by a plan for a training loop of one's own, in place of `accelerator.prepare`. Losses, norms of
    gradients and weights are those of [`MultimodalParallelTrainer`] with the same global batch. Collective.

    Args:
        accelerator (`Accelerator`): Its processes, device and `mixed_precision` ("bf16" or "no") are used.
        model (`PreTrainedModel`, `PeftModel`, `str` or `Path`):
            A whole model that is equal on all ranks and not prepared; or an id or folder, from which each rank reads
            only the weights that it holds.
        optimizer (`torch.optim.Optimizer` or `Callable`):
            One made from `model.parameters()`, without state, or a function that makes it from the model. It stays
            the same object, with this rank's parameters.
        dataset (`Dataset` or `IterableDataset`): What is trained on, the same on all ranks.
        plan (`dict`, `str`, `Path`, [`MultimodalParallelPlugin`] or [`ParallelPlan`]):
            What [`MultimodalTrainingArguments`] take as `parallel`; `model.plan` is what "auto" finds.
        data_collator (`Callable`, *optional*): Makes a batch of samples; by default as in the Trainer.
        processing_class (*optional*): Tokenizer or processor; it is saved beside the model.
        sample_tokens (`Callable`, *optional*): See [`MultimodalParallelTrainer`].
        settings:
            Fields of [`MultimodalTrainingArguments`] that are not for the loop of a Trainer, such as
            `global_batch_size`, `per_device_train_batch_size`, `packing`, `seed` or `dataloader_num_workers`. By
            default `remove_unused_columns` is whether there is no `data_collator`.

    Returns:
        `tuple[ParallelModel, Optimizer, ParallelLoader]`: Model, optimizer and loader of this rank.

    Raises:
        `ValueError`: For a plan that does not fit the model or the launch, and what can't hold under one.

    Example:

    ```python
    >>> from accelerate import Accelerator
    >>> accelerator, optimizer = Accelerator(), torch.optim.AdamW(model.parameters())
    >>> plan = {"vision": {}, "language_model": {"colocate_with": "vision"}}  # on one rank
    >>> model, optimizer, loader = prepare(accelerator, model, optimizer, dataset, plan, data_collator=collator)
    >>> for step in loader:
    ...     loss = model.step(step)
    ...     norm = model.clip_grad_norm_(1.0)
    ...     optimizer.step()
    ```
    """
    check_settings(settings)
    check_accelerator(accelerator)
    plugin = MultimodalParallelPlugin.from_any(plan)
    check_own_loop(plugin.modules)
    settings = {"remove_unused_columns": data_collator is None, **settings}
    args = loop_arguments(accelerator, plugin, settings)
    check_launch(args)
    check_arguments(args)
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        raise ValueError(f"The model is wrapped in `{type(model).__name__}`. Give it before `accelerator.prepare`.")
    given = {"train_dataset": dataset, "data_collator": data_collator, "processing_class": processing_class}
    check_trainer(model, given)
    check_columns(given, model, is_planned=True)
    if not callable(optimizer):
        check_optimizer(optimizer)
    if args.packing:
        plugin = build.with_packing(plugin)
    if plugin.plan is not None and args.microbatch_assignment is None:
        args = build.arguments_of_plan(args, plugin.plan)
    world = World(accelerator.device)
    with raise_on_all_ranks("preparing the model"):
        run = _lay_out(model, optimizer, args, plugin, given, world, accelerator, sample_tokens)
        run.open_loader()
    run.loader = ParallelLoader(run)
    return ParallelModel(run), run.optimizer, run.loader
