"""Evaluation and prediction under a plan: forwards on all ranks, predictions and metrics on rank 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from ..data.context_tokens import WORDS
from ..data.packing import unpack
from ..modeling.dtypes import cast_values
from ..modeling.loss import IGNORE_INDEX
from ..runtime.engine import ParallelEngine
from ..schedule import Task
from ..world import doing

if TYPE_CHECKING:
    from .trainer import MultimodalParallelTrainer

logger = get_logger(__name__)

_KINDS = ("predictions", "labels", "inputs", "losses")


class _Collector:
    """Keeps what the last stage of a replica yields for each microbatch of one step."""

    def __init__(self, trainer: MultimodalParallelTrainer):
        self.trainer = trainer
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def __call__(self, task: Task, logits: torch.Tensor, inputs: Mapping[str, Any]) -> None:
        engine = self.trainer._engine
        if engine.first_rank(task) != engine.rank:
            return
        labels, tokens, words = inputs.get("labels"), inputs["input_ids"], inputs.get(WORDS)
        if words is not None:  # rows of several samples: as if each had a row of its own
            logits, tokens = unpack(logits, words), unpack(tokens, words)
            labels = None if labels is None else unpack(labels, words)
        if self.trainer.preprocess_logits_for_metrics is not None:
            preprocess: Any = self.trainer.preprocess_logits_for_metrics
            logits = preprocess(logits, labels)
        kept = {"predictions": _on_host(logits), "labels": _on_host(labels)}
        if "inputs" in self.trainer.args.include_for_metrics:
            kept["inputs"] = _on_host(tokens)
        self.rows.append((self._first_slot(task), kept))

    def _first_slot(self, task: Task) -> int:
        return self.trainer._engine.slots(task)[0]


def _on_host(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().float().cpu() if value.dtype == torch.bfloat16 else value.detach().cpu()
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item) for item in value)
    return value


def _step_losses(engine: ParallelEngine, losses: dict[Task, Any]) -> list[tuple[int, int, float, float]]:
    """
    (first slot, samples, summed loss, target tokens) of each microbatch whose tokens, or a part of them, this rank
    speaks for.
    """
    return [
        (engine.slots(task)[0], len(engine.slots(task)), float(loss), float(count))
        for task, (loss, count) in losses.items()
        if engine.leads_row(task)
    ]


def _mean_losses(rows: list[tuple[int, int, float, float]]) -> list[tuple[float, int]]:
    """
    (mean loss, samples) of each microbatch, in order, from the sums of its parts; NaN where there is no target, as on
    one process.
    """
    sums: dict[tuple[int, int], list[float]] = {}
    for slot, samples, loss, count in rows:
        total = sums.setdefault((slot, samples), [0.0, 0.0])
        total[0] += loss
        total[1] += count
    return [(loss / count if count else math.nan, samples) for (_, samples), (loss, count) in sorted(sums.items())]


def full_eval_dtype(args: TrainingArguments) -> torch.dtype | None:
    """What an evaluation outside of training casts the model to."""
    if args.fp16_full_eval:
        return torch.float16
    return torch.bfloat16 if args.bf16_full_eval else None


def check_full_precision(engine: ParallelEngine) -> None:
    """Raises `ValueError` if an evaluation has cast the weights that are to be trained."""
    if engine.cast_to is not None:
        setting = "fp16_full_eval" if engine.cast_to == torch.float16 else "bf16_full_eval"
        raise ValueError(
            f"`{setting}=True` has cast the weights to `{engine.cast_to}` in an evaluation before this training. "
            f"Train first, or leave `{setting}` out."
        )


def evaluate(
    trainer: MultimodalParallelTrainer, dataloader: DataLoader, prediction_loss_only: bool, prefix: str
) -> EvalLoopOutput:
    """
    Runs an evaluation or a prediction.

    The loss is that of the stock Trainer: the mean over samples of the mean over the target tokens of their microbatch
    of `per_device_eval_batch_size` samples.

    Returns:
        `EvalLoopOutput`: The metrics on all ranks; predictions and labels on rank 0, `None` elsewhere.
    """
    engine: Any = trainer._engine
    main = trainer.is_world_process_zero()
    dtype = full_eval_dtype(trainer.args)
    if dtype is not None and not trainer.is_in_train:
        cast_values(engine.module, dtype)
        engine.cast_to = dtype
    if callable(getattr(trainer.optimizer, "eval", None)):
        trainer.optimizer.eval()
    handler: Any = trainer.callback_handler
    handler.eval_dataloader = dataloader
    concatenate = trainer.args.eval_do_concat_batches
    containers = {kind: EvalLoopContainer(concatenate, padding_index=IGNORE_INDEX) for kind in _KINDS}
    collector = None if prediction_loss_only else _Collector(trainer)
    losses: list[tuple[float, int]] = []
    num_samples, num_targets = 0, 0.0
    for batch in trainer._evaluation_batches(dataloader):
        engine.executor.on_logits = collector
        try:
            result = engine.evaluate_step(trainer._on_device(batch))
        finally:
            engine.executor.on_logits = None
        num_samples += len(batch.step.samples)
        rows = (_step_losses(engine, result.losses), collector.rows if collector else [])
        with doing("gathering predictions"):
            gathered = engine.world.gather_tensors(rows)
        if collector:
            collector.rows = []
        if main:
            rows = [row for rank in gathered for row in rank[0]]
            means = _mean_losses(rows)
            num_targets += sum(count for *_, count in rows)
            losses += means
            for loss, count in means:
                containers["losses"].add(torch.full((count,), loss))
            for _, kept in sorted((row for rank in gathered for row in rank[1]), key=lambda row: row[0]):
                for kind, value in kept.items():
                    if value is not None:
                        containers[kind].add(value)
        trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
    if losses and not num_targets:
        logger.warning(
            "No token of the evaluation is a target, all `labels` are -100: its loss is NaN. Targets are what the "
            "`assistant` says in conversations, and what has a label of its own otherwise."
        )
    with doing("metrics"):
        metrics, arrays = _metrics(trainer, containers, losses, prefix) if main else ({}, {})
    metrics = engine.world.broadcast(metrics, "metrics")
    predictions: Any = arrays.get("predictions")
    return EvalLoopOutput(
        predictions=predictions,
        label_ids=arrays.get("labels"),
        metrics=metrics,
        num_samples=num_samples,
    )


def _metrics(
    trainer: MultimodalParallelTrainer,
    containers: dict[str, EvalLoopContainer],
    losses: list[tuple[float, int]],
    prefix: str,
) -> tuple[dict[str, float], dict[str, Any]]:
    """The metrics with their prefix, and the collected arrays, on rank 0."""
    arrays: dict[str, Any] = {kind: container.get_arrays() for kind, container in containers.items()}
    metrics: Any = {}
    if trainer.compute_metrics is not None and arrays["predictions"] is not None and arrays["labels"] is not None:
        wanted = trainer.args.include_for_metrics
        extra = {kind: arrays[kind] for kind, name in (("inputs", "inputs"), ("losses", "loss")) if name in wanted}
        metrics = trainer.compute_metrics(
            EvalPrediction(predictions=arrays["predictions"], label_ids=arrays["labels"], **extra)
        )
    metrics = denumpify_detensorize(metrics)
    finite = [pair for pair in losses if math.isfinite(pair[0])]
    if trainer.args.logging_nan_inf_filter and finite:
        losses = finite
    if losses:
        metrics[f"{prefix}_loss"] = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}, arrays
