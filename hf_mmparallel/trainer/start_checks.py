"""Refusals of models, data and launches that can't be used under a plan, on every rank, before anything is built."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.logging import get_logger
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, TrainingArguments

from .._environment import joins_job, launched_processes
from ..modeling import check_causal, check_supported, unknown_layers_text
from .argument_table import check_trainer_arguments

logger = get_logger(__name__)


def check_model(model: nn.Module, is_searched: bool = False) -> None:
    """Raises `ValueError` for a whole model that can't be trained under a plan, or predicted for the search of one."""
    if isinstance(model, PreTrainedModel):
        if is_searched:
            check_supported(model)  # layers that are in no module
        check_causal(model)  # a loss other than that of the next token
        text = unknown_layers_text(model)
        if text:
            logger.warning(f"{text} They run with the language model, as parts of it.")
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
