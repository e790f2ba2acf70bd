"""What can't hold under a plan is refused with a reason, on every rank, before anything is built."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from .._environment import launched_processes

# Argument -> (is it set, why it can't hold, remedy).
_REFUSED = {
    "fp16": (lambda a: a.fp16, "its loss scaler lives in one backward", "Use `bf16=True`."),
    "auto_find_batch_size": (
        lambda a: a.auto_find_batch_size,
        "a smaller batch size changes the plan",
        "Lower `per_device_train_batch_size`; the global batch stays.",
    ),
    "fsdp": (lambda a: bool(a.fsdp), "it shards one model over one mesh", "Use `dp_size` of the modules."),
    "deepspeed": (lambda a: a.deepspeed, "it wraps one model on all ranks", "Use `dp_size` of the modules."),
    "parallelism_config": (
        lambda a: a.parallelism_config is not None and a.parallelism_config.total_size > 1,
        "it is one mesh for the whole model",
        "Give the sizes of each module in `parallel`.",
    ),
    "neftune_noise_alpha": (
        lambda a: a.neftune_noise_alpha is not None,
        "the noise of one process can't be reproduced on several stages",
        "Leave it out.",
    ),
    "torch_compile": (lambda a: a.torch_compile, "stages leave the model's forward early", "Leave it out."),
    "use_liger_kernel": (lambda a: a.use_liger_kernel, "it fuses the head with the loss", "Leave it out."),
    "train_sampling_strategy": (
        lambda a: a.train_sampling_strategy == "batch_rebalance",
        "the plan arranges the samples of a batch itself",
        'Use `"random"`, `"sequential"` or `"group_by_length"`.',
    ),
    "dataloader_in_order": (
        lambda a: not a.dataloader_in_order,
        "each rank would take the steps in an order of its own",
        "Leave it out.",
    ),
    "save_on_each_node": (
        lambda a: a.save_on_each_node,
        "a checkpoint is one folder that all ranks write",
        "Use an `output_dir` that all hosts share.",
    ),
    "batch_eval_metrics": (
        lambda a: a.batch_eval_metrics,
        "predictions reach rank 0 by microbatch",
        "Use `preprocess_logits_for_metrics` to keep predictions small.",
    ),
    "optim": (
        lambda a: a.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO) or "layerwise" in str(a.optim),
        "it updates weights inside the backward, before replicas have summed their gradients",
        'Use `"adamw_torch"` or another optimizer with a step of its own.',
    ),
}


def check_arguments(args: TrainingArguments) -> None:
    """Raises `ValueError` for the first argument that can't hold under a plan."""
    for name, (is_set, reason, remedy) in _REFUSED.items():
        if is_set(args):
            raise ValueError(f"`{name}={getattr(args, name)!r}` can't be used with `parallel`: {reason}. {remedy}")


def check_model(model: nn.Module) -> None:
    """Raises `ValueError` for what is not a sum over samples, so that parts can't be added up."""
    for config in {id(c): c for c in _configs(model)}.values():
        if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
            raise ValueError(
                f"`output_router_logits=True` of `{type(config).__name__}` adds a loss over the experts' load in the "
                "whole batch, which microbatches can't add up. Set it to `False`."
            )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise ValueError(
                f"`{name}` is a `{type(module).__name__}`: it mixes the samples of a batch, which a plan cuts. "
                "Replace it by a norm over features."
            )


def _configs(model: nn.Module) -> Iterator[Any]:
    """The configurations of a model and its parts."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            yield config


def check_trainer(trainer: Trainer, model: Any, given: dict[str, Any]) -> None:
    """Raises `ValueError` for a loss, a model or data that can't hold under a plan."""
    if model is None and given.get("model_init") is None:
        raise ValueError("`model=None` leaves nothing to lay out by `parallel`. Pass a model, an id or a folder.")
    if type(trainer).compute_loss is not Trainer.compute_loss:
        raise ValueError(
            f"`{type(trainer).__name__}.compute_loss` is overridden, but under a plan no rank sees a whole forward: "
            "the loss is the model's own, summed over target tokens. Remove the override, or train without `parallel`."
        )
    if type(trainer).prediction_step is not Trainer.prediction_step:
        raise ValueError(
            f"`{type(trainer).__name__}.prediction_step` is overridden, but under a plan evaluation runs on stages "
            "and never calls it. Use `preprocess_logits_for_metrics` and `compute_metrics`, or train without "
            "`parallel`."
        )
    if given.get("train_dataset") is not None:
        check_dataset(given["train_dataset"])
    if given.get("compute_loss_func") is not None:
        raise ValueError(
            "`compute_loss_func` can't be used with `parallel`: the loss is the model's own, summed over the target "
            "tokens of the global batch. Leave it out."
        )
    if given.get("model_init") is not None:
        raise ValueError(
            "`model_init` can't be used with `parallel`: the plan is made once, for one model. Pass `model`."
        )
    if given.get("optimizers", (None, None)) != (None, None):
        raise ValueError(
            "`optimizers` can't be used with `parallel`: each rank's optimizer holds that rank's parameters. Use "
            "`optimizer_cls_and_kwargs` or `args.optim`."
        )


def check_dataset(dataset: Any) -> None:
    """Raises `ValueError` for a dataset whose samples neither have indices nor come in order."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        if getattr(dataset, "_distributed", None) is not None:
            raise ValueError(
                f"The `{name}` is split by node, but under a plan every rank reads the whole stream and takes what "
                "its modules need. Leave out `split_dataset_by_node`."
            )
        return
    if isinstance(dataset, Mapping):
        raise ValueError(f"A `{name}` holds datasets or columns by name. Pass one of {sorted(map(str, dataset))}.")
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"A `{name}` has neither `__getitem__` and `__len__` nor an order that can be repeated. Use a dataset "
            "with both, or an `IterableDataset`."
        )


def check_output_dir(args: TrainingArguments) -> None:
    """Raises `ValueError` for an output folder that can't be made, or not be written to where something is saved."""
    try:
        os.makedirs(str(args.output_dir), exist_ok=True)
        if args.save_strategy != "no":
            with tempfile.TemporaryFile(dir=args.output_dir):
                pass
    except OSError as error:
        raise ValueError(
            f"`output_dir={args.output_dir!r}` can't be written to: {error.strerror}. Give a folder that can."
        ) from error


def check_launch(args: TrainingArguments) -> None:
    """Raises `ValueError` when several processes were launched and each would train alone."""
    launched, source = launched_processes()
    if launched > 1 and args.world_size == 1:
        raise ValueError(
            f"`{source}` says that {launched} processes were launched, but this one is alone: each would train the "
            "whole model by itself. Start each process through `accelerate launch` with a ready file of "
            "`examples/accelerate_configs`, or through `torchrun`."
        )
