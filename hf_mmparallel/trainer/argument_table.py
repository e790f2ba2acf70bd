"""
What a plan does with each field of `TrainingArguments` and of `accelerator_config`, each argument of `Trainer`, and
variables of `accelerate launch`: those that it refuses, with a reason, and those without effect. All others are
honoured. `docs/arguments.md` is made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from .._environment import launcher_setting


@dataclass(frozen=True)
class Refused:
    """An argument with values that can't hold under a plan."""

    is_refused: Callable[[Any], bool]  # of a value
    reason: str  # why it can't hold
    remedy: str  # the alternative
    values: str | None = None  # those that are refused, in words, unless all but the default are


@dataclass(frozen=True)
class WithoutEffect:
    """An argument that changes nothing under a plan."""

    reason: str


def _is_given(value: Any) -> bool:
    return value is not None


_LEAVE_OUT = "Leave it out."
_NO_DDP = "gradients are summed without `DistributedDataParallel`"
_NO_CUDA_GRAPHS = "a CUDA graph keeps the outputs of one forward, and several microbatches are in flight"
_ONE_READER = "every rank reads the samples that its modules work on"

LIGER_LOSSES = (
    "cross_entropy",
    "fused_linear_cross_entropy",
)  # Liger's kernels of the loss; it has the second by default

# fields of `TrainingArguments`
ARGUMENTS: Mapping[str, Refused | WithoutEffect] = {
    "optim": Refused(
        lambda value: value in (OptimizerNames.LOMO, OptimizerNames.ADALOMO) or "layerwise" in str(value),
        "it updates weights inside the backward, before replicas have summed their gradients",
        'Use `"adamw_torch"` or another optimizer with a step of its own.',
        "`lomo`, `adalomo` and those whose name has `layerwise`",
    ),
    "average_tokens_across_devices": WithoutEffect(
        "the loss is always the mean over the target tokens of the global batch"
    ),
    "fp16": Refused(bool, "its loss scaler lives in one backward", "Use `bf16=True`."),
    "activation_checkpointing_kwargs": Refused(
        lambda value: bool((value or {}).get("use_reentrant")),
        "a reentrant recomputation has a backward of its own inside that of a stage",
        "Use `use_reentrant=False`; `every_n_layers` holds, and `offload` is the default of `offload_activations`.",
        "`use_reentrant=True`",
    ),
    "torch_compile_backend": Refused(
        lambda value: value == "cudagraphs",
        _NO_CUDA_GRAPHS,
        'Use `torch_compile_backend="inductor"`.',
        '`"cudagraphs"`',
    ),
    "torch_compile_mode": Refused(
        lambda value: value in ("reduce-overhead", "max-autotune"),
        _NO_CUDA_GRAPHS,
        'Use `"default"` or `"max-autotune-no-cudagraphs"`.',
        '`"reduce-overhead"` and `"max-autotune"`',
    ),
    "liger_kernel_config": Refused(
        lambda value: any((value or {}).get(name) for name in LIGER_LOSSES),
        "the loss is summed over the target tokens of all microbatches, from the logits of the last stage",
        f"Leave {' and '.join(f'`{name}`' for name in LIGER_LOSSES)} out of it.",
        " and ".join(f"`{name}=True`" for name in LIGER_LOSSES),
    ),
    "auto_find_batch_size": Refused(
        bool,
        "a rank that runs out of memory leaves the others in the middle of a step, and microbatches are limited by "
        "memory before that",
        "Use `memory_limit_gib`, or a lower `per_device_train_batch_size`; the global batch stays.",
    ),
    "eval_use_gather_object": WithoutEffect("predictions of any kind are sent to rank 0 one by one"),
    "eval_accumulation_steps": WithoutEffect("predictions go to host memory after every microbatch"),
    "batch_eval_metrics": Refused(
        bool,
        "predictions reach rank 0 by microbatch",
        "Use `preprocess_logits_for_metrics` to keep predictions small.",
    ),
    "save_on_each_node": Refused(
        bool,
        "a checkpoint is one folder that all ranks write",
        "Use an `output_dir` that all hosts share.",
    ),
    "enable_jit_checkpoint": Refused(
        bool,
        "ranks get the signal at different steps, and a checkpoint is written by all of them together",
        "Use `save_on_preemption=True`.",
    ),
    "accelerator_config.split_batches": Refused(
        bool, "a plan arranges the samples of a global batch itself", "Use `global_batch_size`."
    ),
    "accelerator_config.dispatch_batches": WithoutEffect(_ONE_READER),
    "accelerator_config.even_batches": WithoutEffect(_ONE_READER),
    "accelerator_config.non_blocking": WithoutEffect("inputs are always sent to the device without blocking"),
    "accelerator_config.gradient_accumulation_kwargs": Refused(
        _is_given, "microbatches take the place of gradient accumulation", "Use `global_batch_size`."
    ),
    "parallelism_config": Refused(
        lambda value: value is not None and value.total_size > 1,
        "it is one mesh for the whole model",
        "Give it as `parallel`, or the sizes of each module there.",
    ),
    "dataloader_in_order": Refused(
        lambda value: not value, "each rank would take the steps in an order of its own", _LEAVE_OUT
    ),
    "label_names": Refused(
        lambda value: value not in (None, ["labels"]),
        "the loss is computed from `labels`",
        "Rename the column, or let the collator do it, and leave `label_names` out.",
        'all but `["labels"]`',
    ),
    "train_sampling_strategy": Refused(
        lambda value: value == "batch_rebalance",
        "the plan arranges the samples of a batch itself",
        'Use `"random"`, `"sequential"` or `"group_by_length"`.',
        '`"batch_rebalance"`',
    ),
    "ddp_find_unused_parameters": WithoutEffect(_NO_DDP),
    "ddp_bucket_cap_mb": WithoutEffect(_NO_DDP),
    "ddp_broadcast_buffers": WithoutEffect(_NO_DDP),
    "ddp_static_graph": WithoutEffect(_NO_DDP),
    "fsdp": Refused(bool, "it shards one model over one mesh", "Use `dp_size` of the modules."),
    "fsdp_config": WithoutEffect("`fsdp` is refused"),
    "deepspeed": Refused(
        bool, "it wraps one model on all ranks", "Use `dp_size` of the modules, and `deepspeed` of a module."
    ),
    "debug": Refused(
        lambda value: any(option == "underflow_overflow" for option in value),
        "what other ranks hold is NaN here, and would be reported",
        "Look for the overflow on one process, without `parallel`.",
        '`"underflow_overflow"`',
    ),
}

# arguments of `Trainer`
TRAINER_ARGUMENTS: Mapping[str, Refused] = {
    "model_init": Refused(
        _is_given,
        "the plan, each rank's part and the optimizer are made once, of one model",
        "Pass `model`, and launch each trial of a search.",
    ),
    "optimizers": Refused(
        lambda value: value[0] is None and value[1] is not None,
        "a schedule without its optimizer says nothing of the groups of ranks",
        "Give both, or `args.lr_scheduler_type`.",
        "`(None, scheduler)`",
    ),
}

_AS_FILES = "and launch with a ready file of `examples/accelerate_configs`, or with `torchrun`."


def _is_on(value: str) -> bool:
    return value.lower() in ("true", "1", "yes", "on")


# what `accelerate launch` sets for its processes; what it says of FSDP or Megatron-LM has names without its own
LAUNCHER_VARIABLES: Mapping[str, Refused] = {
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
        "the loss scaler of fp16 lives in one backward, and fp8 is a setting of modules",
        "Launch with `--mixed_precision bf16`, or `no`, and use `float8` of modules.",
    ),
    "ACCELERATE_DYNAMO_BACKEND": Refused(
        lambda value: value.lower() not in ("", "no"),
        "it is for whole models, of which each rank has a part",
        "Launch with `--dynamo_backend no`, and use `torch_compile=True` to compile each layer.",
    ),
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


def check_arguments(args: TrainingArguments, table: Mapping[str, Refused | WithoutEffect] = ARGUMENTS) -> None:
    """Raises `ValueError` for the first argument of a table that can't hold under a plan."""
    for name, entry in table.items():
        if isinstance(entry, Refused) and entry.is_refused(value_of(args, name)):
            raise _refusal(f"`{name}={value_of(args, name)!r}`", entry)


def check_launcher(args: TrainingArguments) -> None:
    """Raises `ValueError` for the first variable of the launcher that can't hold under a plan."""
    for name, entry in LAUNCHER_VARIABLES.items():
        # An argument for the precision counts for more than the launcher's.
        value = str(args.mixed_precision) if name == "ACCELERATE_MIXED_PRECISION" else launcher_setting(name)
        if entry.is_refused(value):
            raise _refusal(f"`{name}={value}`, which the launcher sets,", entry)


def check_trainer_arguments(given: Mapping[str, Any]) -> None:
    """Raises `ValueError` for the first argument of `Trainer` that can't hold under a plan."""
    for name, value in given.items():
        entry = TRAINER_ARGUMENTS.get(name)
        if entry is not None and entry.is_refused(value):
            raise _refusal(f"`{name}`", entry)


def _refusal(what: str, entry: Refused) -> ValueError:
    return ValueError(f"{what} can't be used with `parallel`: {entry.reason}. {entry.remedy}")


def settings_idle_under_a_plan(args: TrainingArguments) -> Iterator[str]:
    for name, entry in ARGUMENTS.items():
        if isinstance(entry, WithoutEffect) and not is_default(args, name):
            yield f"`{name}={value_of(args, name)!r}` has no effect with `parallel`: {entry.reason}."


def settings_without_plan(args: TrainingArguments, given: Mapping[str, Any] | None = None) -> Iterator[str]:
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
