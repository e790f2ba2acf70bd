"""
What becomes of every argument under a plan: honoured, refused with a reason, or without effect. Each field of
`TrainingArguments`, each argument of `Trainer`, each setting of `accelerator_config` and each variable of `accelerate
launch` has one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from .._environment import launcher_setting


@dataclass(frozen=True)
class Honoured:
    """An argument that means what it means on one process."""

    read_by: str  # qualified name of a function that reads it under a plan


@dataclass(frozen=True)
class Refused:
    """An argument with values that can't hold under a plan."""

    is_refused: Callable[[Any], bool]  # of a value
    reason: str  # why it can't hold
    remedy: str  # the alternative
    read_by: str | None = None  # qualified name of a function that reads the other values


@dataclass(frozen=True)
class WithoutEffect:
    """An argument that changes nothing under a plan."""

    reason: str


@dataclass(frozen=True)
class ForScripts:
    """An argument that the stock Trainer does not read either: it is there for training scripts and their parsers."""


Entry = Honoured | Refused | WithoutEffect | ForScripts


def _is_given(value: Any) -> bool:
    return value is not None


_LEAVE_OUT = "Leave it out."
_NO_DDP = "gradients are summed without `DistributedDataParallel`"
_ONE_READER = "every rank reads the samples that its modules work on"

# the fields of `TrainingArguments`
ARGUMENTS: Mapping[str, Entry] = {
    "output_dir": Honoured("Trainer._get_output_dir"),
    "per_device_train_batch_size": Honoured("resolve_batch"),
    "num_train_epochs": Honoured("Trainer.set_initial_training_values"),
    "max_steps": Honoured("Trainer.set_initial_training_values"),
    "learning_rate": Honoured("Trainer.get_optimizer_cls_and_kwargs"),
    "lr_scheduler_type": Honoured("Trainer.create_scheduler"),
    "lr_scheduler_kwargs": Honoured("Trainer.create_scheduler"),
    "warmup_steps": Honoured("TrainingArguments.get_warmup_steps"),
    "optim": Refused(
        lambda value: value in (OptimizerNames.LOMO, OptimizerNames.ADALOMO) or "layerwise" in str(value),
        "it updates weights inside the backward, before replicas have summed their gradients",
        'Use `"adamw_torch"` or another optimizer with a step of its own.',
        read_by="Trainer.get_optimizer_cls_and_kwargs",
    ),
    "optim_args": Honoured("Trainer.get_optimizer_cls_and_kwargs"),
    "weight_decay": Honoured("Trainer.create_optimizer"),
    "adam_beta1": Honoured("Trainer.get_optimizer_cls_and_kwargs"),
    "adam_beta2": Honoured("Trainer.get_optimizer_cls_and_kwargs"),
    "adam_epsilon": Honoured("Trainer.get_optimizer_cls_and_kwargs"),
    "optim_target_modules": Honoured("_setup_low_rank_optimizer"),
    "gradient_accumulation_steps": Honoured("resolve_batch"),
    "average_tokens_across_devices": WithoutEffect(
        "the loss is always the mean over the target tokens of the global batch"
    ),
    "max_grad_norm": Honoured("MultimodalParallelTrainer._clip_grad_norm"),
    "label_smoothing_factor": Honoured("build_engine"),
    "bf16": Honoured("TrainingArguments.__post_init__"),
    "fp16": Refused(bool, "its loss scaler lives in one backward", "Use `bf16=True`."),
    "bf16_full_eval": Honoured("full_eval_dtype"),
    "fp16_full_eval": Honoured("full_eval_dtype"),
    "tf32": Honoured("TrainingArguments.__post_init__"),
    "activation_checkpointing": Honoured("_plan"),
    "activation_checkpointing_kwargs": Refused(
        lambda value: bool((value or {}).get("use_reentrant")),
        "a reentrant recomputation has a backward of its own inside that of a stage",
        "Use `use_reentrant=False`; `every_n_layers` and `offload` hold.",
        read_by="checkpointing_settings",
    ),
    "gradient_checkpointing": Honoured("TrainingArguments.__post_init__"),
    "gradient_checkpointing_kwargs": Honoured("TrainingArguments.__post_init__"),
    "torch_compile": Refused(bool, "stages leave the model's forward early", _LEAVE_OUT),
    "torch_compile_backend": Refused(_is_given, "stages leave the model's forward early", _LEAVE_OUT),
    "torch_compile_mode": Refused(_is_given, "stages leave the model's forward early", _LEAVE_OUT),
    "use_liger_kernel": Refused(bool, "it fuses the head with the loss", _LEAVE_OUT),
    "liger_kernel_config": WithoutEffect("`use_liger_kernel` is refused"),
    "use_cache": Honoured("Trainer.__init__"),
    "neftune_noise_alpha": Refused(
        _is_given, "the noise of one process can't be reproduced on several stages", _LEAVE_OUT
    ),
    "torch_empty_cache_steps": Honoured("MultimodalParallelTrainer.training_step"),
    "auto_find_batch_size": Refused(
        bool,
        "a smaller batch size changes the plan",
        "Lower `per_device_train_batch_size`; the global batch stays.",
    ),
    "logging_strategy": Honoured("DefaultFlowCallback.on_step_end"),
    "logging_steps": Honoured("TrainerState.compute_steps"),
    "logging_first_step": Honoured("DefaultFlowCallback.on_step_end"),
    "log_on_each_node": Honoured("TrainingArguments.should_log"),
    "logging_nan_inf_filter": Honoured("Trainer._run_epoch"),
    "include_num_input_tokens_seen": Honoured("MultimodalParallelTrainer._track_num_input_tokens"),
    "log_level": Honoured("TrainingArguments.get_process_log_level"),
    "log_level_replica": Honoured("TrainingArguments.get_process_log_level"),
    "disable_tqdm": Honoured("Trainer.__init__"),
    "report_to": Honoured("Trainer.__init__"),
    "run_name": Honoured("TrackioCallback.setup"),
    "project": Honoured("TrackioCallback.setup"),
    "trackio_space_id": Honoured("TrackioCallback.setup"),
    "trackio_bucket_id": Honoured("TrackioCallback.setup"),
    "trackio_static_space_id": Honoured("TrackioCallback._freeze_space"),
    "eval_strategy": Honoured("DefaultFlowCallback.on_step_end"),
    "eval_steps": Honoured("TrainerState.compute_steps"),
    "eval_delay": Honoured("DefaultFlowCallback.on_step_end"),
    "per_device_eval_batch_size": Honoured("StepLoaders.evaluation"),
    "prediction_loss_only": Honoured("MultimodalParallelTrainer.evaluation_loop"),
    "eval_on_start": Honoured("Trainer._inner_training_loop"),
    "eval_do_concat_batches": Honoured("Evaluator.run"),
    "eval_use_gather_object": WithoutEffect("predictions of any kind are sent to rank 0 one by one"),
    "eval_accumulation_steps": WithoutEffect("predictions go to host memory after every microbatch"),
    "include_for_metrics": Honoured("Evaluator._metrics"),
    "batch_eval_metrics": Refused(
        bool,
        "predictions reach rank 0 by microbatch",
        "Use `preprocess_logits_for_metrics` to keep predictions small.",
    ),
    "save_only_model": Honoured("MultimodalParallelTrainer._save_checkpoint"),
    "save_strategy": Honoured("DefaultFlowCallback.on_step_end"),
    "save_steps": Honoured("TrainerState.compute_steps"),
    "save_on_each_node": Refused(
        bool,
        "a checkpoint is one folder that all ranks write",
        "Use an `output_dir` that all hosts share.",
    ),
    "save_total_limit": Honoured("CheckpointSaves._rotate"),
    "enable_jit_checkpoint": Refused(
        bool,
        "ranks get the signal at different steps, and a checkpoint is written by all of them together",
        "Use `save_on_preemption=True`.",
    ),
    "push_to_hub": Honoured("EngineTrainer._push_saved"),
    "hub_token": Honoured("Trainer.init_hf_repo"),
    "hub_private_repo": Honoured("Trainer.init_hf_repo"),
    "hub_model_id": Honoured("Trainer.init_hf_repo"),
    "hub_strategy": Honoured("Trainer._push_from_checkpoint"),
    "hub_always_push": Honoured("Trainer._push_from_checkpoint"),
    "hub_revision": Honoured("Trainer._push_from_checkpoint"),
    "load_best_model_at_end": Honoured("Trainer._finalize_training"),
    "metric_for_best_model": Honoured("Trainer._determine_best_metric"),
    "greater_is_better": Honoured("Trainer._determine_best_metric"),
    "ignore_data_skip": Honoured("DataProgress.training_values"),
    "restore_callback_states_from_checkpoint": Honoured("Trainer._load_callback_state"),
    "full_determinism": Honoured("Trainer.__init__"),
    "seed": Honoured("Trainer.__init__"),
    "data_seed": Honoured("StepLoaders._data_seed"),
    "use_cpu": Honoured("TrainingArguments._setup_devices"),
    "accelerator_config.split_batches": Refused(
        bool, "a plan arranges the samples of a global batch itself", "Use `global_batch_size`."
    ),
    "accelerator_config.dispatch_batches": WithoutEffect(_ONE_READER),
    "accelerator_config.even_batches": WithoutEffect(_ONE_READER),
    "accelerator_config.use_seedable_sampler": Honoured("StepLoaders._seeded"),
    "accelerator_config.non_blocking": WithoutEffect("inputs are on the device before a step starts"),
    "accelerator_config.gradient_accumulation_kwargs": Refused(
        _is_given, "microbatches take the place of gradient accumulation", "Use `global_batch_size`."
    ),
    "accelerator_config.use_configured_state": Honoured("TrainingArguments._setup_devices"),
    "parallelism_config": Refused(
        lambda value: value is not None and value.total_size > 1,
        "it is one mesh for the whole model",
        "Give the sizes of each module in `parallel`.",
    ),
    "dataloader_drop_last": Honoured("StepLoaders.training"),
    "dataloader_num_workers": Honoured("StepLoaders._loader"),
    "dataloader_pin_memory": Honoured("StepLoaders._loader"),
    "dataloader_persistent_workers": Honoured("StepLoaders._loader"),
    "dataloader_prefetch_factor": Honoured("StepLoaders._loader"),
    "dataloader_multiprocessing_context": Honoured("StepLoaders._loader"),
    "dataloader_in_order": Refused(
        lambda value: not value, "each rank would take the steps in an order of its own", _LEAVE_OUT
    ),
    "remove_unused_columns": Honoured("Trainer._get_collator_with_removed_columns"),
    "label_names": Refused(
        lambda value: value not in (None, ["labels"]),
        "the loss is computed from `labels`",
        "Rename the column, or let the collator do it, and leave `label_names` out.",
        read_by="Trainer.__init__",
    ),
    "train_sampling_strategy": Refused(
        lambda value: value == "batch_rebalance",
        "the plan arranges the samples of a batch itself",
        'Use `"random"`, `"sequential"` or `"group_by_length"`.',
        read_by="Trainer._get_train_sampler",
    ),
    "length_column_name": Honoured("Trainer._get_train_sampler"),
    "ddp_find_unused_parameters": WithoutEffect(_NO_DDP),
    "ddp_bucket_cap_mb": WithoutEffect(_NO_DDP),
    "ddp_broadcast_buffers": WithoutEffect(_NO_DDP),
    "ddp_static_graph": WithoutEffect(_NO_DDP),
    "ddp_backend": Honoured("TrainingArguments._setup_devices"),
    "ddp_timeout": Honoured("TrainingArguments._setup_devices"),
    "fsdp": Refused(bool, "it shards one model over one mesh", "Use `dp_size` of the modules."),
    "fsdp_config": WithoutEffect("`fsdp` is refused"),
    "deepspeed": Refused(
        bool, "it wraps one model on all ranks", "Use `dp_size` of the modules, and `deepspeed` of a module."
    ),
    "debug": Refused(
        lambda value: any(option == "underflow_overflow" for option in value),
        "what other ranks hold is NaN here, and would be reported",
        "Look for the overflow on one process, without `parallel`.",
        read_by="Trainer.evaluate",
    ),
    "skip_memory_metrics": Honoured("Trainer.__init__"),
    "do_train": ForScripts(),
    "do_eval": ForScripts(),
    "do_predict": ForScripts(),
    "resume_from_checkpoint": ForScripts(),
    "local_rank": ForScripts(),
}

# the arguments of `Trainer`
TRAINER_ARGUMENTS: Mapping[str, Entry] = {
    "model": Honoured("MultimodalParallelTrainer.__init__"),
    "args": Honoured("MultimodalParallelTrainer.__init__"),
    "data_collator": Honoured("MultimodalParallelTrainer._drop_columns"),
    "train_dataset": Honoured("StepLoaders.training"),
    "eval_dataset": Honoured("MultimodalParallelTrainer.get_eval_dataloader"),
    "processing_class": Honoured("MultimodalParallelTrainer._save"),
    "model_init": Refused(_is_given, "the plan is made once, for one model", "Pass `model`."),
    "compute_loss_func": Refused(
        _is_given, "the loss is the model's own, summed over the target tokens of the global batch", _LEAVE_OUT
    ),
    "compute_metrics": Honoured("Evaluator._metrics"),
    "callbacks": Honoured("Trainer.__init__"),
    "optimizers": Refused(
        lambda value: tuple(value) != (None, None),
        "each rank's optimizer holds that rank's parameters",
        "Use `optimizer_cls_and_kwargs` or `args.optim`.",
    ),
    "optimizer_cls_and_kwargs": Honoured("Trainer.create_optimizer"),
    "preprocess_logits_for_metrics": Honoured("_Collector.__call__"),
}

_AS_FILES = "and launch with a ready file of `examples/accelerate_configs`, or with `torchrun`."


def _is_on(value: str) -> bool:
    return value.lower() in ("true", "1", "yes", "on")


def _of_refused(*names: str, switch: str) -> dict[str, Entry]:
    """Variables that are read only if another one is set, which is refused."""
    return dict.fromkeys(names, WithoutEffect(f"`{switch}` is refused"))


# what `accelerate launch` sets for its processes; what it says of FSDP or Megatron-LM has names without its own
LAUNCHER_VARIABLES: Mapping[str, Entry] = {
    "ACCELERATE_USE_CPU": Honoured("TrainingArguments._setup_devices"),
    "ACCELERATE_CPU_AFFINITY": Honoured("PartialState.__init__"),
    "ACCELERATE_DEBUG_MODE": Honoured("PartialState.__init__"),
    "ACCELERATE_USE_FSDP": Refused(
        _is_on, "it shards one model over one mesh", f"Use `dp_size` of the modules, {_AS_FILES}"
    ),
    "ACCELERATE_USE_DEEPSPEED": Refused(
        _is_on, "it wraps one model on all ranks", f"Use `dp_size` of the modules, {_AS_FILES}"
    ),
    "ACCELERATE_USE_MEGATRON_LM": Refused(
        _is_on, "it wraps one model on all ranks", f"Use `tp_size` and `pp_size` of the modules, {_AS_FILES}"
    ),
    "ACCELERATE_USE_PARALLELISM_CONFIG": Refused(
        _is_on, "it is one mesh for the whole model", f"Give the sizes of each module in `parallel`, {_AS_FILES}"
    ),
    "ACCELERATE_MIXED_PRECISION": Refused(
        lambda value: value.lower() in ("fp16", "fp8"),
        "the loss scaler of fp16 lives in one backward, and stages are not converted to fp8",
        "Launch with `--mixed_precision bf16`, or `no`.",
        read_by="TrainingArguments.__post_init__",
    ),
    "ACCELERATE_DYNAMO_BACKEND": Refused(
        lambda value: value.lower() not in ("", "no"),
        "stages leave the model's forward early",
        "Launch with `--dynamo_backend no`.",
    ),
    **_of_refused(
        "ACCELERATE_DYNAMO_MODE",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH",
        "ACCELERATE_DYNAMO_USE_DYNAMIC",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        switch="ACCELERATE_DYNAMO_BACKEND",
    ),
    **_of_refused(
        "ACCELERATE_CONFIG_DS_FIELDS",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "ACCELERATE_GRADIENT_CLIPPING",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE",
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        switch="ACCELERATE_USE_DEEPSPEED",
    ),
    "ACCELERATE_USE_SAGEMAKER": Honoured("AcceleratorState.__init__"),
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": Refused(
        lambda value: value.upper() not in ("", "NO"),
        "it wraps one model on all ranks",
        "Use `distributed_type: 'NO'`, and the sizes of each module in `parallel`.",
    ),
}

# the fields of `MultimodalTrainingArguments` that have no effect without a plan
NEED_A_PLAN = (
    "max_tokens_per_microbatch",
    "memory_limit_gib",
    "log_predictions",
    "on_bad_sample",
    "async_save",
    "resilience",
    "mean_time_between_failures_h",
)

# those that without a plan have an effect with `microbatch_assignment` only
NEED_AN_ARRANGEMENT = ("token_columns", "layer_profile", "gpu_spec")


def value_of(args: Any, name: str) -> Any:
    """The value of an argument, or with a dot in its name of a setting inside one."""
    for part in name.split("."):
        args = getattr(args, part)
    return args


def is_default(args: Any, name: str) -> bool:
    """Whether an argument, or a setting inside one, has its default."""
    parent, _, attribute = name.rpartition(".")
    holder = value_of(args, parent) if parent else args
    assert is_dataclass(holder)
    return getattr(holder, attribute) == next(field.default for field in fields(holder) if field.name == attribute)


def check_arguments(args: TrainingArguments) -> None:
    """Raises `ValueError` for the first argument that can't hold under a plan."""
    for name, entry in ARGUMENTS.items():
        if isinstance(entry, Refused) and entry.is_refused(value_of(args, name)):
            raise _refusal(f"`{name}={value_of(args, name)!r}`", entry)


def check_launcher(args: TrainingArguments) -> None:
    """Raises `ValueError` for the first variable of the launcher that can't hold under a plan."""
    for name, entry in LAUNCHER_VARIABLES.items():
        # An argument for the precision counts for more than the launcher's.
        value = str(args.mixed_precision) if name == "ACCELERATE_MIXED_PRECISION" else launcher_setting(name)
        if isinstance(entry, Refused) and entry.is_refused(value):
            raise _refusal(f"`{name}={value}`, which the launcher sets,", entry)


def check_trainer_arguments(given: Mapping[str, Any]) -> None:
    """Raises `ValueError` for the first argument of `Trainer` that can't hold under a plan."""
    for name, value in given.items():
        entry = TRAINER_ARGUMENTS.get(name)
        if isinstance(entry, Refused) and entry.is_refused(value):
            raise _refusal(f"`{name}`", entry)


def _refusal(what: str, entry: Refused) -> ValueError:
    return ValueError(f"{what} can't be used with `parallel`: {entry.reason}. {entry.remedy}")


def settings_idle_under_a_plan(args: TrainingArguments) -> Iterator[str]:
    """A sentence for each argument that is set but has no effect under a plan."""
    for name, entry in ARGUMENTS.items():
        if isinstance(entry, WithoutEffect) and not is_default(args, name):
            yield f"`{name}={value_of(args, name)!r}` has no effect with `parallel`: {entry.reason}."


def settings_without_plan(args: TrainingArguments, given: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yields sentences about settings without effect in a run without a plan."""
    known = {field.name for field in fields(args)}

    def changed(names: tuple[str, ...]) -> list[str]:
        return [f"`{name}={getattr(args, name)!r}`" for name in names if name in known and not is_default(args, name)]

    planned = changed(NEED_A_PLAN)
    if planned:
        yield f"No effect without a plan: {', '.join(planned)}. Give a layout in `parallel`."
    # `given` are arguments of the Trainer that an arrangement of samples reads
    arranged = changed(NEED_AN_ARRANGEMENT) + [
        f"`{name}`" for name, value in (given or {}).items() if value is not None
    ]
    if arranged and getattr(args, "microbatch_assignment", None) is None:
        yield (
            f"No effect on the batches of the stock Trainer: {', '.join(arranged)}. Give `microbatch_assignment`, or "
            "a layout in `parallel`."
        )
