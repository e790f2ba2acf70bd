"""Overrides of methods of `Trainer` that a plan would ignore, or that have to call the method that they override."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from accelerate.logging import get_logger
from transformers import Trainer

logger = get_logger(__name__)


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
        "a rank holds microbatches, packed or in part, and the target tokens are counted in them",
        "Change the inputs in the `data_collator`.",
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
        if owner in ours.__mro__:
            continue
        for name, entry in METHODS.items():
            if name not in vars(owner):
                continue
            remedy = None
            if issubclass(owner, Trainer) and not issubclass(owner, ours):
                remedy = (
                    f"A `{owner.__name__}` can't be mixed in: use `MultimodalParallelTrainer` alone, with the data "
                    f"collator of `{owner.__name__}` and `remove_unused_columns=False`, or {_WITHOUT}."
                )
            _check(f"`{owner.__name__}.{name}`", entry, number < order.index(ours), remedy)
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
