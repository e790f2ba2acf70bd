"""Refusals of models, data and launches that can't be used under a plan, on every rank, before anything is built."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.logging import get_logger
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from .._environment import joins_job, launched_processes
from ..modeling import check_causal, check_router_loss, check_supported, unknown_layers_text
from .argument_table import check_trainer_arguments

logger = get_logger(__name__)


def check_model(model: nn.Module, is_searched: bool = False, compiles: bool = False) -> None:
    """Raises `ValueError` for a whole model that can't be trained under a plan, or predicted for the search of one."""
    if isinstance(model, PreTrainedModel):
        check_router_loss(model, compiles)
        if is_searched:
            check_supported(model)  # layers that are in no module
        check_causal(model)  # a loss other than that of the next token
        text = unknown_layers_text(model)
        if text:
            logger.warning(f"{text} They run with the language model, as parts of it.")
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            raise ValueError(
                f"`{name}` is a `{type(module).__name__}`: it mixes the samples of a batch, which a plan cuts. "
                "Replace it by a norm over features."
            )


def check_trainer(model: Any, given: dict[str, Any]) -> None:
    """Raises `ValueError` for a loss, a model or data that can't be used under a plan."""
    if model is None and given.get("model_init") is None:
        raise ValueError("`model=None` leaves nothing to lay out by `parallel`. Pass a model, an id or a folder.")
    if given.get("train_dataset") is not None:
        check_dataset(given["train_dataset"])
    check_trainer_arguments(given)


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
    if joins_job() and getattr(args, "resilience", None) is None:
        raise ValueError(
            "This process was launched with `--join`, but only training with `resilience` lets others in. Set "
            "`resilience` as in the training that runs, or launch without `--join`."
        )
    launched, source = launched_processes()
    if launched > 1 and args.world_size == 1:
        raise ValueError(
            f"`{source}` says that {launched} processes were launched, but this one is alone: each would train the "
            "whole model by itself. Start each process through `accelerate launch` with a ready file of "
            "`examples/accelerate_configs`, or through `torchrun`."
        )


# Overrides of methods of `Trainer` that a plan would ignore, or that have to call the method that they override.


@dataclass(frozen=True)
class Extends:
    """An override has to call the method that it overrides, whose work a plan needs."""

    reason: str  # the work of the inherited method
    remedy: str  # the alternative to replacing it


@dataclass(frozen=True)
class NeverCalled:
    """Under a plan nothing calls the method, so that an override would be ignored."""

    reason: str
    remedy: str


_WITHOUT = "train without `parallel`"
_CALL_IT = f"Call it with `super()` in the override, or {_WITHOUT}."
_PART = Extends("each rank works on its part of the model", _CALL_IT)
_SHARDS = Extends("all ranks read and write a checkpoint together", _CALL_IT)
_STAGES = Extends("a step is run by the stages of all ranks", _CALL_IT)
_PLACE = Extends("it finds the run's place in its data", _CALL_IT)
_OTHER_MESHES = NeverCalled(
    "it belongs to another way to spread a model over ranks", "Give the sizes of each module in `parallel`."
)
_LOADER = "batches are arranged over the ranks by a loader of its own"
_IN_COLLATOR = "Change the inputs in the `data_collator`."
_OTHER_DATA = "Give a `data_collator` for other batches, and a dataset for other samples."

# all other methods of `Trainer` are called as ever
METHODS: Mapping[str, Extends | NeverCalled] = {
    "_wrap_model": _PART,
    "_move_model_to_device": _PART,
    "get_train_dataloader": Extends(
        _LOADER,
        "Override `_get_train_sampler` for another order, give a `data_collator` for other batches, and a dataset for "
        "other samples.",
    ),
    "get_eval_dataloader": Extends(_LOADER, _OTHER_DATA),
    "get_test_dataloader": Extends(_LOADER, _OTHER_DATA),
    "_get_dataloader": NeverCalled(
        _LOADER, "Override `_get_train_sampler` for another order, and give a `data_collator` for other batches."
    ),
    "get_batch_samples": Extends("it takes one arranged step from the loader", _CALL_IT),
    "_get_num_items_in_batch": NeverCalled(
        "no rank holds a whole batch, and the loss is the mean over the target tokens of the global batch",
        "Set the labels that shall not count to -100 in the `data_collator`.",
    ),
    "_prepare_inputs": NeverCalled(
        "a rank holds microbatches, packed or in part, and the target tokens are counted in them", _IN_COLLATOR
    ),
    "_prepare_input": NeverCalled(
        "the inputs of each microbatch are sent to the device for its forward", _IN_COLLATOR
    ),
    "_prepare_context_parallel_inputs": _OTHER_MESHES,
    "_inner_training_loop": _PLACE,
    "_init_training_state": _PLACE,
    "set_initial_training_values": _PLACE,
    "_maybe_log_save_evaluate": Extends("the ranks agree on what their callbacks ask for", _CALL_IT),
    "training_step": _STAGES,
    "compute_loss": NeverCalled(
        "no rank sees a whole forward: the loss is the model's own, summed over target tokens",
        f"Remove the override, or {_WITHOUT}.",
    ),
    "_clip_grad_norm": _PART,
    "_get_grad_norm": _PART,
    "_mixed_mesh_grad_norm": _OTHER_MESHES,
    "_has_mixed_mesh_grads": _OTHER_MESHES,
    "_defer_fsdp_gradient_reduction": _OTHER_MESHES,
    "_sync_replicated_trainable_parameters": _OTHER_MESHES,
    "_track_num_input_tokens": Extends("it counts the tokens of all ranks", _CALL_IT),
    "floating_point_ops": Extends("it counts the operations of all ranks", _CALL_IT),
    "evaluation_loop": _STAGES,
    "prediction_step": NeverCalled(
        "evaluation runs on stages", f"Use `preprocess_logits_for_metrics` and `compute_metrics`, or {_WITHOUT}."
    ),
    "save_model": _SHARDS,
    "_save": Extends("it writes what stands beside the weights, which all ranks have written", _CALL_IT),
    "_save_checkpoint": _SHARDS,
    "_finalize_training": _SHARDS,
    "_save_optimizer_and_scheduler": _SHARDS,
    "_save_scaler": NeverCalled("it is for `fp16`, which is refused", "Use `bf16=True`."),
    "_load_from_checkpoint": _SHARDS,
    "_load_best_model": _SHARDS,
    "_load_optimizer_and_scheduler": _SHARDS,
    "_issue_warnings_after_load": NeverCalled(
        "a checkpoint whose names differ from the model's is refused", "Remove the override."
    ),
}

# of the stock Trainer at import, to tell methods that are replaced in its class
_STOCK = {name: vars(Trainer).get(name) for name in METHODS}


def check_overrides(cls: type, ours: type, assigned: Collection[str] = ()) -> None:
    """
    Raises `ValueError` for the first override that a plan would ignore: in the class of the user's Trainer, which
    derives from `ours`, among the attributes `assigned` to the Trainer, or in the stock class. Warns of overrides that
    have to call the inherited method.
    """
    order = cls.__mro__
    for number, owner in enumerate(order):
        if owner in ours.__mro__ or owner in getattr(cls, "works_with", ()):
            continue
        is_called = number < order.index(ours)
        for name, entry in METHODS.items():
            if name not in vars(owner):
                continue
            remedy = None
            if issubclass(owner, Trainer) and not is_called:
                remedy = f"Use `parallelize({owner.__name__})`, or {_WITHOUT}."
            _check(f"`{owner.__name__}.{name}`", entry, is_called, remedy)
    for name, entry in METHODS.items():
        if name in assigned:
            _check(f"`{name}` of this `{cls.__name__}`", entry, is_called=True)
        if vars(Trainer).get(name) is not _STOCK[name]:
            _check(f"`Trainer.{name}`", entry, is_called=False)


def _check(what: str, entry: Extends | NeverCalled, is_called: bool, remedy: str | None = None) -> None:
    """Refuses an override that a plan does not call, and warns of one that has to call the inherited method."""
    remedy = remedy or entry.remedy
    if isinstance(entry, NeverCalled) or not is_called:
        raise ValueError(f"{what} is overridden, but under a plan it is never called: {entry.reason}. {remedy}")
    logger.warning_once(
        f"{what} is overridden. It has to call the inherited method, which a plan needs: {entry.reason}. {remedy}"
    )
