"""The tables of `docs/arguments.md`, made from the package's tables of arguments, see `pages.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields

from peft import LoraConfig, PeftType
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from hf_mmparallel.modeling import adapter
from hf_mmparallel.trainer import argument_table
from hf_mmparallel.trainer.argument_table import Refused, WithoutEffect

NOT_LOOKED_AT = "not looked at"  # the argument is newer than the tables

# fields of `TrainingArguments` that mean what they mean on one process
AS_STOCK = {
    "output_dir", "num_train_epochs", "max_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_target_modules", "max_grad_norm", "bf16",
    "tf32", "torch_empty_cache_steps", "logging_strategy", "logging_steps", "logging_first_step",
    "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level",
    "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id",
    "trackio_bucket_id", "trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay",
    "prediction_loss_only", "eval_on_start", "eval_do_concat_batches", "include_for_metrics", "save_only_model",
    "save_strategy", "save_steps", "save_total_limit", "push_to_hub", "hub_token", "hub_private_repo",
    "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "restore_callback_states_from_checkpoint", "full_determinism",
    "data_seed", "use_cpu", "dataloader_drop_last", "dataloader_pin_memory", "dataloader_persistent_workers",
    "dataloader_multiprocessing_context", "remove_unused_columns", "length_column_name", "skip_memory_metrics",
    "accelerator_config.use_configured_state",
}  # fmt: skip
# fields that a plan honours in a way of its own
DIFFERS = {
    "learning_rate": "That of modules without a `learning_rate` of their own; all follow one schedule.",
    "weight_decay": "That of modules without a `weight_decay` of their own.",
    "per_device_train_batch_size": "the mean number of samples in a microbatch of one replica of the language model",
    "gradient_accumulation_steps": "microbatches take its place; it multiplies the global batch if "
    "`global_batch_size` is not given",
    "per_device_eval_batch_size": "the samples of a microbatch, as many of which are in flight as fill the "
    "pipeline; losses are those of stock batches",
    "label_smoothing_factor": "smooths the prediction of the next token with every model",
    "activation_checkpointing": "all modules recompute their layers; `activation_checkpointing` of a module is "
    "for one of them",
    "gradient_checkpointing": "an older name of `activation_checkpointing`",
    "gradient_checkpointing_kwargs": "an older name of `activation_checkpointing_kwargs`",
    "torch_compile": "compiles the layers of each rank's stages; refused with `offload_activations` "
    "and with split backwards",
    "use_liger_kernel": "replaces layers of the whole model before it is divided; the loss stays the plan's",
    "neftune_noise_alpha": "noise of each microbatch, seeded as dropout is and scaled by the length of its "
    "rows, padded or packed; refused with `cp_size` of the language model above 1",
    "use_cache": "steps keep no cache; the configuration that is saved has the value",
    "seed": "dropout is seeded by step, module, stage and microbatch, reading and collating by epoch and samples",
    "bf16_full_eval": "as stock, for good: training after an evaluation outside of training is refused",
    "fp16_full_eval": "as stock, for good: training after an evaluation outside of training is refused",
    "ignore_data_skip": "as stock; without it a run goes on after the samples, not the batches, that were used",
    "dataloader_num_workers": "the workers of a rank read the samples of its modules",
    "dataloader_prefetch_factor": "global batches that each worker reads ahead",
    "ddp_backend": "that of the ranks' process groups",
    "ddp_timeout": "that of all collectives, also on the CPU",
    "accelerator_config.use_seedable_sampler": "as stock; with `False` rank 0 draws the order for all ranks",
}
# those that are there for training scripts and their parsers; no Trainer reads them
FOR_SCRIPTS = ("do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank")
# arguments of `Trainer` that mean what they mean on one process
TRAINER_AS_STOCK = {
    "model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "compute_metrics",
    "callbacks", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics",
}  # fmt: skip
# arguments of `Trainer` that a plan honours in a way of its own
TRAINER_DIFFERS = {
    "compute_loss_func": "gets outputs with logits and labels alone, has to sum over target tokens and "
    "divide by `num_items_in_batch`, and is refused with `cp_size` above 1",
}
# Settings of a LoRA adapter that hold in `peft_config` of a module and in a `PeftModel`
LORA_AS_PEFT = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "r",
    "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "lora_bias", "runtime_config",
    "qalora_group_size", "megatron_core",
}  # fmt: skip
_VARIANTS = (
    "alora_invocation_tokens", "use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config",
)  # fmt: skip
_VARIANT = "refused: its layers need more than their input. Use plain LoRA"
# Those with more to say: in `peft_config`, and in a `PeftModel`
LORA_NOTES = {
    "bias": ('refused but `"none"`', 'refused but `"none"`'),
    "use_dora": ("as peft; refused with `tp_size` above 1", "as peft; refused with `tp_size` above 1"),
    "init_lora_weights": (
        'refused but `True`, `False` and `"gaussian"`',
        'as peft, before the plan; `"mica"` refused',
    ),
    "inference_mode": (
        "adapters are trained, whatever it says",
        "refused: nothing is trained. Load with `is_trainable=True`",
    ),
    "revision": ("not saved with the adapter", "as peft"),
    "modules_to_save": ("", "as peft; refused for tied weights"),
    "target_parameters": 2 * ("refused but for weights of experts. Name layers in `target_modules`",),
    "ensure_weight_tying": ("", "as peft, where it ties nothing"),
    "megatron_config": ("", "as peft, which needs `megatron`"),
    "use_qalora": ("", "as peft; on GPTQ weights refused"),
    **dict.fromkeys(_VARIANTS, ("", _VARIANT)),
    **dict.fromkeys(
        ("loftq_config", "eva_config", "corda_config", "lora_ga_config"), ("", "as peft, before the plan")
    ),
}


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Rows under a header."""
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def treatment(name: str, entries: dict, as_stock: Iterable[str], for_scripts: Iterable[str] = ()) -> tuple[str, str]:
    """What is done with an argument, and why, how or what to do instead."""
    entry = entries.get(name)
    if isinstance(entry, Refused):
        which = "refused" if entry.values is None else f"refused: {entry.values}"
        return which, f"{entry.reason[0].upper()}{entry.reason[1:]}. {entry.remedy}"
    if isinstance(entry, WithoutEffect):
        return "no effect; a warning says so", f"{entry.reason[0].upper()}{entry.reason[1:]}."
    if isinstance(entry, str):
        return "in its own way", f"{entry[0].upper()}{entry[1:]}."
    if name in for_scripts:
        return "for scripts", "No Trainer reads it."
    return ("as stock" if name in as_stock else NOT_LOOKED_AT), ""


def training_arguments() -> str:
    """A row for each field of `TrainingArguments`, and of `accelerator_config` in it."""
    names = [field.name for field in fields(TrainingArguments) if field.name != "accelerator_config"]
    names += [f"accelerator_config.{field.name}" for field in fields(AcceleratorConfig)]
    known = {**argument_table.ARGUMENTS, **DIFFERS}, AS_STOCK, FOR_SCRIPTS
    return table(
        ("argument", "under a plan", "why, how, or what instead"),
        ([f"`{name}`", *treatment(name, *known)] for name in sorted(names)),
    )


def trainer_arguments() -> str:
    """A row for each argument of the Trainer."""
    names = list(inspect.signature(Trainer.__init__).parameters)[1:]
    known = {**argument_table.TRAINER_ARGUMENTS, **TRAINER_DIFFERS}, TRAINER_AS_STOCK
    return table(
        ("argument", "under a plan", "why, how, or what instead"),
        ([f"`{name}`", *treatment(name, *known)] for name in names),
    )


def lora_treatment(name: str) -> tuple[str, str]:
    """What is done with a setting of LoRA in `peft_config` of a module, and in a `PeftModel`."""
    default = "as peft" if name in LORA_AS_PEFT else NOT_LOOKED_AT
    in_module, in_model = LORA_NOTES.get(name, ("", ""))
    if name in adapter.REFUSED:
        in_module = f"refused. {adapter.REFUSED[name]}"
    if name in adapter.REFUSED_WHEN_GIVEN:
        reason, remedy = adapter.REFUSED_WHEN_GIVEN[name]
        in_model = f"refused: {reason}. {remedy}"
    return in_module or default, in_model or default


def lora_settings() -> str:
    """A row for each field of `LoraConfig`."""
    return table(
        ("setting", "in `peft_config` of a module", "in a `PeftModel`"),
        ([f"`{field.name}`", *lora_treatment(field.name)] for field in fields(LoraConfig)),
    )


def adapter_types() -> str:
    """The types of adapters that peft has."""
    others = ", ".join(f"`{kind.value}`" for kind in PeftType if kind != PeftType.LORA)
    return f"`LORA` holds, also with DoRA. Others are refused, since only LoRA can be split over ranks: {others}."


BLOCKS: dict[str, Callable[[], str]] = {
    "training_arguments": training_arguments,
    "trainer_arguments": trainer_arguments,
    "lora_settings": lora_settings,
    "adapter_types": adapter_types,
}
