"""The DeepSpeed configurations of modules agree with the arguments of the Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from ..plan import ModulePlugin
from ..plan.deepspeed_config import entries, idle_keys

_ADAMW = (OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED)


def check_deepspeed(args: TrainingArguments, modules: Mapping[str, ModulePlugin]) -> None:
    """Raises `ValueError` for a value of a module's DeepSpeed configuration that contradicts the arguments."""
    values = {
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", args.per_device_train_batch_size),
        "gradient_accumulation_steps": ("gradient_accumulation_steps", args.gradient_accumulation_steps),
        "gradient_clipping": ("max_grad_norm", args.max_grad_norm),
        "bf16.enabled": ("bf16", args.bf16),
        "optimizer.params.lr": ("learning_rate", args.learning_rate),
        "optimizer.params.betas": ("adam_beta1`, `adam_beta2", [args.adam_beta1, args.adam_beta2]),
        "optimizer.params.eps": ("adam_epsilon", args.adam_epsilon),
        "optimizer.params.weight_decay": ("weight_decay", args.weight_decay),
    }
    for name, config in _configs(modules):
        for key, value in entries(config):
            if key in values:
                _check_equal(name, key, value, *values[key])
            elif key == "optimizer.type" and args.optim not in _ADAMW:
                raise ValueError(
                    f"`optimizer.type={value!r}` in `deepspeed` of `{name}` contradicts `optim="
                    f'{OptimizerNames(args.optim).value!r}`. Use `optim="adamw_torch"`, or remove `optimizer`.'
                )


def check_global_batch(modules: Mapping[str, ModulePlugin], global_batch_size: int) -> None:
    """Raises `ValueError` for a `train_batch_size` that is not the size of the global batch."""
    for name, config in _configs(modules):
        if "train_batch_size" in config:
            _check_equal(name, "train_batch_size", config["train_batch_size"], "global_batch_size", global_batch_size)


def check_optimizer_class(modules: Mapping[str, ModulePlugin], given: Mapping[str, Any]) -> None:
    """Raises `ValueError` for an optimizer given to the Trainer beside that of a DeepSpeed configuration."""
    for name, config in _configs(modules):
        if config.get("optimizer") is not None and given.get("optimizer_cls_and_kwargs") is not None:
            raise ValueError(
                f"`optimizer_cls_and_kwargs` contradicts `optimizer` in `deepspeed` of `{name}`. Leave one of them "
                "out."
            )


def deepspeed_keys_without_effect(modules: Mapping[str, ModulePlugin]) -> Iterator[str]:
    """A sentence for each module whose DeepSpeed configuration has keys without effect."""
    for name, config in _configs(modules):
        if idle := idle_keys(config):
            yield (
                f"No effect in `deepspeed` of `{name}`: {', '.join(f'`{key}`' for key in idle)}. They tune or report "
                "what DeepSpeed itself runs."
            )


def _configs(modules: Mapping[str, ModulePlugin]) -> list[tuple[str, Mapping[str, Any]]]:
    """The modules that have a DeepSpeed configuration, with it."""
    return [(name, module.deepspeed) for name, module in modules.items() if isinstance(module.deepspeed, Mapping)]


def _check_equal(name: str, key: str, value: Any, argument: str, given: Any) -> None:
    """Raises `ValueError` unless a value of a configuration is `"auto"` or that of the arguments."""
    value = list(value) if isinstance(value, tuple) else value
    if value not in (None, "auto", given):
        raise ValueError(
            f"`{key}={value!r}` in `deepspeed` of `{name}` contradicts `{argument}={given!r}`. Make them equal, or "
            'write `"auto"`.'
        )
