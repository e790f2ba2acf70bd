"""TRL's `SFTTrainer` with a layout for each module: TRL makes the samples, the plan's engine runs the steps."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ..data.defaults import columns_of
from ..modeling import check_router_loss
from ..modeling.loading import build_on_meta
from .argument_table import Refused, check_arguments
from .arguments import MultimodalTrainingArguments, help_from_docstring
from .build import is_single_process
from .parallelize import parallelize
from .trainer import MultimodalParallelTrainer


@help_from_docstring
@dataclass
class MultimodalSFTConfig(SFTConfig, MultimodalTrainingArguments):
    """
    The arguments of [`MultimodalSFTTrainer`]: those of `trl.SFTConfig` and of [`MultimodalTrainingArguments`].

    Args:
        packing (`bool`, *optional*):
            Under a plan, and for samples with images, puts the samples of a microbatch one after the other in one row,
            as [`MultimodalTrainingArguments`] does; so does `padding_free`. Otherwise TRL's own packing.
    """

    _VALID_DICT_FIELDS = [*{*SFTConfig._VALID_DICT_FIELDS, *MultimodalTrainingArguments._VALID_DICT_FIELDS}]

    packing: bool | None = None

    @property
    def row_packing(self) -> bool | None:
        """Whether the samples of a microbatch share a row; `packing` is TRL's."""
        return vars(self).get("packs_microbatches")


_SFT_ARGUMENTS: Mapping[str, Refused] = {
    "loss_type": Refused(
        lambda value: value == "dft", "no rank sees a whole forward", "Give it as a `compute_loss_func`."
    ),
    "activation_offloading": Refused(
        bool, "stages keep their own activations", "Use `offload_activations` of the modules."
    ),
}


class SFTData:
    """Overrides in front of `SFTTrainer`: packed rows of microbatches, and what its `compute_loss` logs."""

    logs_token_metrics = True
    works_with: tuple[type, ...] = ()

    def __init__(
        self, model: Any, args: Any = None, *positional: Any, sample_tokens: Callable | None = None, **kwargs: Any
    ):
        trainer: Any = self
        if sample_tokens is not None:
            trainer.sample_tokens = sample_tokens
        planned = getattr(args, "plugin", None) is not None
        if planned:
            check_arguments(args, _SFT_ARGUMENTS)
        dataset = positional[1] if len(positional) > 1 else kwargs.get("train_dataset")
        if planned or {"image", "images"} & set(columns_of(dataset) or ()):
            args = _with_row_packing(args)
        if planned and not is_single_process(args.plugin, args.world_size):
            given = dict(zip(inspect.signature(SFTTrainer).parameters, (model, args, *positional), strict=False))
            model, args = _on_meta(model, args, {**given, **kwargs})
        super().__init__(model, args, *positional, **kwargs)  # type: ignore[call-arg]
        if trainer.is_planned:
            check_router_loss(trainer.engine.model)  # which TRL has told whether its loss counts

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Counts the tokens of all ranks, as `compute_loss` does without a plan."""
        trainer: Any = self
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if trainer.is_planned:
            trainer._total_train_tokens += trainer._run.steps.totals.num_real_tokens
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds accuracy and entropy of the tokens since the last log. Collective."""
        trainer: Any = self
        if trainer.is_planned:
            found = trainer._survival.complete(trainer.engine.take_token_metrics)
            if found is not None:
                names = ("mean_token_accuracy", "entropy", "num_tokens")
                values = (*found, trainer._total_train_tokens)
                mode = "train" if trainer.model.training else "eval"
                trainer._metrics[mode].update({name: [value] for name, value in zip(names, values, strict=True)})
        super().log(logs, start_time)  # type: ignore[misc]

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Adds the plan and the measured efficiency to TRL's model card."""
        trainer: Any = self
        super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        if trainer.engine is not None and trainer.is_world_process_zero():
            trainer._run.write_model_card()


SFTData.works_with = (SFTData, SFTTrainer, _BaseTrainer)  # their overrides do what a plan needs, or the same as it


class SFTSteps(MultimodalParallelTrainer):
    """[`MultimodalParallelTrainer`] behind `SFTTrainer`, which hands it a whole model and samples."""

    def __init__(self, model: Any, args: Any, **kwargs: Any):
        if getattr(args, "plugin", None) is not None:
            args.ddp_find_unused_parameters = None  # TRL's choice for DDP
        super().__init__(model, args, **kwargs)


def _on_meta(model: Any, args: Any, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """
    The model of an id or folder on the meta device, so that each rank reads only its own weights, and arguments that
    don't say how to read it; both as they are where TRL changes weights: for adapters and new tokens.
    """
    settings = dict(args.model_init_kwargs or {})
    dtype = settings.pop("dtype", "float32")  # TRL's default
    changes = [args.chat_template_path, *(given.get(name) for name in ("peft_config", "quantization_config"))]
    if not isinstance(model, str) or settings or any(change is not None for change in changes):
        return model, args
    args = copy.copy(args)
    args.model_init_kwargs = None
    dtype = None if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    options = {"trust_remote_code": True} if args.trust_remote_code else {}
    return build_on_meta(model, dtype, **options), args


def _with_row_packing(args: Any) -> Any:
    """A copy of the arguments in which TRL packs nothing, and microbatches are packed if it should have been."""
    if not isinstance(args, MultimodalSFTConfig):
        return args
    args = copy.copy(args)
    vars(args)["packs_microbatches"] = True if args.packing or args.padding_free else args.packing
    args.packing = args.padding_free = args.eval_packing = False
    return args


MultimodalSFTTrainer = parallelize(SFTTrainer)
"""
`trl.SFTTrainer` with packed rows of images and, with `parallel` in its [`MultimodalSFTConfig`], a layout for each
module. Without a plan it is TRL's; see [`parallelize`].
"""
