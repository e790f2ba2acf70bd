"""What a training loop of the user brings: its settings and an accelerator."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from ..plan import ModelSpec, ModulePlugin, MultimodalParallelPlugin
from ..plan.reading import reject_unknown_keys
from .arguments import MultimodalTrainingArguments

# The fields of the arguments that mean the same in a loop of the user; what a Trainer does with the others is done by
# the loop, the optimizer or the accelerator.

SETTINGS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
    "packing",
    "microbatch_assignment",
    "token_columns",
    "max_tokens_per_microbatch",
    "memory_limit_gib",
    "layer_profile",
    "gpu_spec",
    "on_bad_sample",
    "seed",
    "data_seed",
    "label_smoothing_factor",
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "use_liger_kernel",
    "liger_kernel_config",
    "train_sampling_strategy",
    "remove_unused_columns",
    "disable_tqdm",
    "dataloader_drop_last",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context",
)
_REMEDIES = {
    "Set it in the optimizer or in its schedule": (
        *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args"),
        *("optim_target_modules", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    ),
    "Set it in the `Accelerator`": (
        *("bf16", "fp16", "use_cpu", "accelerator_config", "parallelism_config", "ddp_backend", "ddp_timeout"),
        *("fsdp", "fsdp_config", "deepspeed"),
    ),
    "Call `model.clip_grad_norm_` between `model.step` and `optimizer.step`": ("max_grad_norm",),
    "Call `model.save_state` and `model.load_state`": ("resume_from_checkpoint", "output_dir"),
    "It is the argument `plan`": ("parallel",),
}
_REMEDY_OF = {name: remedy for remedy, names in _REMEDIES.items() for name in names}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a keyword that is no setting of a user's own loop."""
    known = [field.name for field in fields(MultimodalTrainingArguments)]
    reject_unknown_keys("`prepare`", list(settings), known)
    for name in settings:
        if name not in SETTINGS:
            remedy = _REMEDY_OF.get(name, "Do what it asks for in the loop, or use `MultimodalParallelTrainer`")
            raise ValueError(f"`{name}={settings[name]!r}` is for the loop of a Trainer. {remedy}.")
    if settings.get("train_sampling_strategy", "random") not in ("random", "sequential"):
        raise ValueError(
            f"`train_sampling_strategy={settings['train_sampling_strategy']!r}` needs a Trainer. Use "
            '`"random"` or `"sequential"`; samples are arranged by their sizes in any case.'
        )


def check_accelerator(accelerator: Accelerator) -> None:
    """Raises `ValueError` for an `Accelerator` whose settings can't hold under a plan."""
    kind, mesh = accelerator.distributed_type, accelerator.parallelism_config
    backend: str = accelerator.state.dynamo_plugin.backend.value  # type: ignore[union-attr]
    refused = (
        (
            kind != DistributedType.NO and not kind.name.startswith("MULTI_"),
            f"distributed_type={kind.value}",
            "it wraps one model on all ranks",
            "Give the sizes of each module in `plan`, and make the `Accelerator` without that plugin",
        ),
        (
            mesh is not None and mesh.total_size > 1,
            "parallelism_config",
            "it is one mesh for the whole model",
            "Give the sizes of each module in `plan`",
        ),
        (
            accelerator.mixed_precision not in ("no", "bf16"),
            f"mixed_precision={accelerator.mixed_precision!r}",
            "the loss scaler of fp16 lives in one backward, and fp8 is a setting of modules",
            'Use "bf16" or "no", and `float8` of modules',
        ),
        (
            backend.lower() != "no",
            f"dynamo_backend={backend!r}",
            "it is for whole models, of which each rank has a part",
            "Use `prepare(..., torch_compile=True)` to compile each layer",
        ),
        (
            accelerator.gradient_accumulation_steps > 1,
            f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps}",
            "`model.step` computes the gradient of a whole global batch",
            "Give `prepare` the `global_batch_size`",
        ),
    )
    for is_refused, setting, reason, remedy in refused:
        if is_refused:
            raise ValueError(f"An `Accelerator` with `{setting}` can't be used with a plan: {reason}. {remedy}.")


def loop_arguments(
    accelerator: Accelerator, plugin: MultimodalParallelPlugin, settings: Mapping[str, Any]
) -> MultimodalTrainingArguments:
    """The settings of a loop as arguments on the ranks of an accelerator, whose state stays as it is."""
    args = MultimodalTrainingArguments(
        output_dir=".",  # nothing is written there
        parallel=plugin.to_dict(),
        use_cpu=accelerator.device.type == "cpu",
        bf16=accelerator.mixed_precision == "bf16",
        accelerator_config={"use_configured_state": True},
        report_to="none",
        save_strategy="no",
        **settings,
    )
    args.mixed_precision = accelerator.mixed_precision  # which counts for more than the launcher's
    return args


# optimizer -> a value of `optim` whose updates depend on the same; others count as "adafactor"
_SEARCHED_AS = {AdamW: "adamw_torch", Adam: "adamw_torch", SGD: "sgd", RMSprop: "rmsprop"}


def with_optimizer(args: MultimodalTrainingArguments, optimizer: Optimizer) -> MultimodalTrainingArguments:
    """A copy of the arguments that tells the search for a plan what the optimizer of a loop allows."""
    args = copy.copy(args)
    args.optim = _SEARCHED_AS.get(type(optimizer), "adafactor")
    return args


def on_one_process(plugin: MultimodalParallelPlugin, spec: ModelSpec) -> MultimodalParallelPlugin:
    """A layout of sizes that are all 1 with all modules on one rank."""
    if plugin.plan is not None:
        return plugin
    first, *others = spec.modules
    modules = {name: plugin.modules.get(name, ModulePlugin()) for name in spec.modules}
    modules |= {name: replace(modules[name], colocate_with=first) for name in others}
    return replace(plugin, auto=False, modules=modules)
