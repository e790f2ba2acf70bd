"""
Overrides of methods of `Trainer` in a subclass of the user: whether they work under a plan. Each method has one entry;
where none is refused the loop of the stock Trainer calls the override as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import Trainer


@dataclass(frozen=True)
class Holds:
    """An override runs as in the stock Trainer."""


@dataclass(frozen=True)
class Extends:
    """An override holds if it calls the method that it overrides, whose work a plan needs."""

    reason: str  # the work of the inherited method
    remedy: str  # the alternative to replacing it


@dataclass(frozen=True)
class NeverCalled:
    """Under a plan nothing calls the method, so that an override would be ignored."""

    reason: str
    remedy: str


Entry = Holds | Extends | NeverCalled

_WITHOUT = "train without `parallel`"
_CALL_IT = f"Call it with `super()` in the override, or {_WITHOUT}."
_PART = Extends("each rank works on its part of the model", _CALL_IT)
_SHARDS = Extends("all ranks read and write a checkpoint together", _CALL_IT)
_STAGES = Extends("a step is run by the stages of all ranks", _CALL_IT)
_OTHER_MESHES = NeverCalled(
    "it belongs to another way to spread a model over ranks", "Give the sizes of each module in `parallel`."
)


def _loader(remedy: str) -> Extends:
    return Extends("batches are arranged over the ranks by a loader of its own", remedy)


# the methods of `Trainer`
METHODS: Mapping[str, Entry] = {
    # Small helpers, called by the user or by callbacks.
    **dict.fromkeys(
        (
            "get_learning_rates", "get_num_trainable_parameters", "get_optimizer_group", "log_metrics",
            "metrics_format", "save_metrics", "save_state", "end", "hyperparameter_search", "add_callback",
            "pop_callback", "remove_callback", "is_local_process_zero", "is_world_process_zero",
        ),
        Holds(),
    ),
    # Called only for arguments that are refused.
    **dict.fromkeys(("call_model_init", "_tune_save_checkpoint", "_update_auto_batch_size"), Holds()),
    # Construction.
    "__init__": Holds(),
    "_validate_args": Holds(),
    "_build_accelerator_args": Holds(),
    "create_accelerator_and_postprocess": Holds(),
    "_wrap_model": _PART,
    "_move_model_to_device": _PART,
    # Data.
    "get_train_dataloader": _loader(
        "Override `_get_train_sampler` for another order, give a `data_collator` for other batches, and a dataset for "
        "other samples."
    ),
    "get_eval_dataloader": _loader("Give a `data_collator` for other batches, and a dataset for other samples."),
    "get_test_dataloader": _loader("Give a `data_collator` for other batches, and a dataset for other samples."),
    "_get_dataloader": NeverCalled(
        "batches are arranged over the ranks by a loader of its own",
        "Override `_get_train_sampler` for another order, and give a `data_collator` for other batches.",
    ),
    "num_examples": Holds(),
    "_get_train_sampler": Holds(),
    "_get_eval_sampler": Holds(),
    "_set_signature_columns_if_needed": Holds(),
    "_remove_unused_columns": Holds(),
    "_get_collator_with_removed_columns": Holds(),
    "get_batch_samples": Extends("it takes one arranged step from the loader", _CALL_IT),
    "_get_num_items_in_batch": NeverCalled(
        "no rank holds a whole batch, and the loss is the mean over the target tokens of the global batch",
        "Set the labels that shall not count to -100 in the `data_collator`.",
    ),
    "_prepare_input": Holds(),
    "_prepare_inputs": NeverCalled(
        "a rank holds microbatches, packed or in part, and the target tokens are counted in them",
        "Change the inputs in the `data_collator`.",
    ),
    "_prepare_context_parallel_inputs": _OTHER_MESHES,
    # Optimizer and scheduler.
    "create_optimizer_and_scheduler": Holds(),
    "create_optimizer": Holds(),
    "create_scheduler": Holds(),
    "get_optimizer_cls_and_kwargs": Holds(),
    "get_decay_parameter_names": Holds(),
    "_get_learning_rate": Holds(),
    # The loop.
    "train": Holds(),
    "_inner_training_loop": Extends("it finds the run's place in its data", _CALL_IT),
    "_init_training_state": Extends("it finds the run's place in its data", _CALL_IT),
    "set_initial_training_values": Extends("it finds the run's place in its data", _CALL_IT),
    "_prepare_for_training": Holds(),
    "_run_epoch": Holds(),
    "_maybe_log_save_evaluate": Extends("the ranks agree on what their callbacks ask for", _CALL_IT),
    "get_total_train_batch_size": Holds(),
    "get_sp_size": Holds(),
    "get_cp_size": Holds(),
    "get_tp_size": Holds(),
    "_hp_search_setup": Holds(),
    "_report_to_hp_search": Holds(),
    # A step.
    "training_step": _STAGES,
    "compute_loss": NeverCalled(
        "no rank sees a whole forward: the loss is the model's own, summed over target tokens",
        f"Remove the override, or {_WITHOUT}.",
    ),
    "compute_loss_context_manager": Holds(),
    "autocast_smart_context_manager": Holds(),
    "_clip_grad_norm": _PART,
    "_get_grad_norm": _PART,
    "_mixed_mesh_grad_norm": _OTHER_MESHES,
    "_has_mixed_mesh_grads": _OTHER_MESHES,
    "_defer_fsdp_gradient_reduction": _OTHER_MESHES,
    "_sync_replicated_trainable_parameters": _OTHER_MESHES,
    "_track_num_input_tokens": Extends("it counts the tokens of all ranks", _CALL_IT),
    "floating_point_ops": Extends("it counts the operations of all ranks", _CALL_IT),
    "store_flos": Holds(),
    # Evaluation.
    "evaluate": Holds(),
    "_evaluate": Holds(),
    "predict": Holds(),
    "evaluation_loop": _STAGES,
    "prediction_step": NeverCalled(
        "evaluation runs on stages", f"Use `preprocess_logits_for_metrics` and `compute_metrics`, or {_WITHOUT}."
    ),
    "_determine_best_metric": Holds(),
    # Checkpoints.
    "_get_output_dir": Holds(),
    "save_model": _SHARDS,
    "_save": Extends("it writes what stands beside the weights, which all ranks have written", _CALL_IT),
    "_save_checkpoint": _SHARDS,
    "_finalize_training": _SHARDS,
    "_save_rng_state": Holds(),
    "_save_optimizer_and_scheduler": _SHARDS,
    "_save_scaler": NeverCalled("it is for `fp16`, which is refused", "Use `bf16=True`."),
    "_load_from_checkpoint": _SHARDS,
    "_load_best_model": _SHARDS,
    "_load_rng_state": Holds(),
    "_load_optimizer_and_scheduler": _SHARDS,
    "_load_scaler": Holds(),
    "_load_callback_state": Holds(),
    "_issue_warnings_after_load": NeverCalled(
        "a checkpoint whose names differ from the model's is refused", "Remove the override."
    ),
    # The log and the Hub.
    "log": Holds(),
    "init_hf_repo": Holds(),
    "create_model_card": Holds(),
    "push_to_hub": Holds(),
    "_push_from_checkpoint": Holds(),
    "_finish_current_push": Holds(),
}  # fmt: skip


# of the stock Trainer, to tell methods that are replaced in its class later
_AT_IMPORT = {name: vars(Trainer).get(name) for name in METHODS}


def check_overrides(cls: type, ours: type) -> None:
    """
    Raises `ValueError` for the first override that a plan would ignore, or that replaces what it needs, in the class
    of the user's Trainer, which derives from `ours`.
    """
    order = cls.__mro__
    for number, owner in enumerate(order):
        if owner in ours.__mro__:
            continue
        for name, entry in METHODS.items():
            if name not in vars(owner) or isinstance(entry, Holds):
                continue
            reached = number < order.index(ours)
            if isinstance(entry, NeverCalled) or not reached or not _calls(vars(owner)[name], name):
                raise ValueError(_refusal(owner, ours, name, entry))
    for name, entry in METHODS.items():
        method = vars(Trainer).get(name)
        if isinstance(entry, Holds) or method is _AT_IMPORT[name]:
            continue
        reached = name not in vars(ours) or _calls(vars(ours)[name], name)
        if isinstance(entry, NeverCalled) or not reached or not _calls(method, name):
            raise ValueError(f"`Trainer.{name}` {_fate(entry)}. {entry.remedy}")


def check_assignment(cls: type, name: str, method: Any) -> None:
    """Raises `ValueError` as [`check_overrides`] for a method that is set on one Trainer of a class."""
    entry = METHODS.get(name)
    if entry is None or isinstance(entry, Holds):
        return
    if isinstance(entry, NeverCalled) or not _calls(method, name):
        raise ValueError(f"`{name}` of this `{cls.__name__}` {_fate(entry)}. {entry.remedy}")


def _calls(method: Any, name: str) -> bool:
    """Whether the code of an override mentions the method that it overrides, by name or by a variable that has it."""
    function = inspect.unwrap(getattr(method, "__func__", method))
    code = getattr(function, "__code__", None)
    pending = [] if code is None else [code]
    # true where there is no code to read
    calls = code is None
    while pending:
        code = pending.pop()
        used = [function.__globals__.get(variable) for variable in code.co_names]
        calls = calls or name in code.co_names or _has_method(used, name)
        pending += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return calls or _has_method(_closed_over(function), name)


def _closed_over(function: Any) -> list[Any]:
    """The values of the variables that a function has from where it was defined."""
    return list(inspect.getclosurevars(function).nonlocals.values()) if inspect.isfunction(function) else []


def _has_method(values: list[Any], name: str) -> bool:
    """Whether one of the values is a function or method of this name."""
    return any(callable(value) and getattr(value, "__name__", None) == name for value in values)


def _fate(entry: NeverCalled | Extends) -> str:
    """The reason of a refusal, as part of a sentence."""
    if isinstance(entry, NeverCalled):
        return f"is overridden, but under a plan it is never called: {entry.reason}"
    return f"is overridden without a call of the inherited method, which a plan needs: {entry.reason}"


def _refusal(owner: type, ours: type, name: str, entry: NeverCalled | Extends) -> str:
    remedy = entry.remedy
    if issubclass(owner, Trainer) and not issubclass(owner, ours):
        remedy = (
            f"A `{owner.__name__}` can't be mixed in: use `MultimodalParallelTrainer` alone, with the data collator "
            f"of `{owner.__name__}` and `remove_unused_columns=False`, or {_WITHOUT}."
        )
    return f"`{owner.__name__}.{name}` {_fate(entry)}. {remedy}"
