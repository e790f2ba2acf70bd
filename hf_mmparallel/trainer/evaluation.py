"""Evaluation and prediction under a plan: forwards on all ranks, predictions and metrics on rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainingArguments
from transformers.trainer_pt_utils import EvalLoopContainer
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from ..data.context_tokens import WORDS
from ..data.packing import unpack
from ..data.step_batch import StepBatch
from ..modeling.loss import IGNORE_INDEX
from ..modeling.router_loss import RouterLoss
from ..plan import LANGUAGE_MODEL
from ..runtime.engine import ParallelEngine
from ..schedule import Task
from ..world import track_activity

logger = get_logger(__name__)

_KINDS = ("predictions", "labels", "inputs", "losses")


class _Collector:
    """Collects predictions, labels and inputs of a step's microbatches, on the ranks that have their last stage."""

    def __init__(self, engine: ParallelEngine, preprocess: Callable | None, with_inputs: bool):
        self.engine = engine
        self.preprocess = preprocess
        self.with_inputs = with_inputs
        self.microbatches: list[tuple[int, dict[str, Any]]] = []

    def __call__(self, task: Task, logits: torch.Tensor, inputs: Mapping[str, Any]) -> None:
        if self.engine.first_rank(task) != self.engine.rank:
            return
        labels, tokens, words = inputs.get("labels"), inputs["input_ids"], inputs.get(WORDS)
        if words is not None:  # samples that share a row get one each
            logits, tokens = unpack(logits, words), unpack(tokens, words)
            labels = None if labels is None else unpack(labels, words)
        if self.preprocess is not None:
            logits = self.preprocess(logits, labels)
        arrays = {"predictions": _on_host(logits), "labels": _on_host(labels)}
        if self.with_inputs:
            arrays["inputs"] = _on_host(tokens)
        self.microbatches.append((self.engine.batch_indices(task)[0], arrays))


def _on_host(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.detach().float().cpu() if value.dtype == torch.bfloat16 else value.detach().cpu()
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(item) for item in value)
    return value


def _mean_losses(
    sums_of_ranks: list[tuple[int, int, float, float]],
    routes_of_ranks: list[tuple[int, int, torch.Tensor]],
    routers: RouterLoss | None,
) -> list[tuple[float, int]]:
    """Returns (mean loss, samples) of each microbatch, in order, from the sums of its parts."""
    sums: dict[tuple[int, int], list[float]] = {}
    for batch_index, samples, loss, count in sums_of_ranks:
        total = sums.setdefault((batch_index, samples), [0.0, 0.0])
        total[0] += loss
        total[1] += count
    routes: dict[tuple[int, int], Any] = {}
    for batch_index, samples, routed in routes_of_ranks:
        routes[batch_index, samples] = routes.get((batch_index, samples), 0) + routed.cpu()
    added = {} if routers is None else {key: routers.coefficient * float(routers.of(routes[key])) for key in routes}
    # NaN where there is no target, as on one process
    return [
        (loss / count + added.get(key, 0.0) if count else math.nan, key[1])
        for key, (loss, count) in sorted(sums.items())
    ]


def cast_for_evaluation(engine: ParallelEngine, args: TrainingArguments) -> None:
    """Casts this rank's part of the model as `fp16_full_eval` and `bf16_full_eval` ask, for good."""
    if args.fp16_full_eval or args.bf16_full_eval:
        engine.cast(torch.float16 if args.fp16_full_eval else torch.bfloat16)


def check_full_precision(engine: ParallelEngine) -> None:
    """Raises `ValueError` if an evaluation has cast the weights that are to be trained."""
    if engine.cast_to is not None:
        setting = "fp16_full_eval" if engine.cast_to == torch.float16 else "bf16_full_eval"
        raise ValueError(
            f"`{setting}=True` has cast the weights to `{engine.cast_to}` in an evaluation before this training. "
            f"Train first, or leave `{setting}` out."
        )


class Evaluator:
    """
    Runs evaluations and predictions. The loss is that of the stock Trainer: the mean over samples of the mean over the
    target tokens of their microbatch of `per_device_eval_batch_size` samples. To it are added the weighted mean losses
    of generators over all of their targets.
    """

    def __init__(
        self,
        engine: ParallelEngine,
        args: TrainingArguments,
        compute_metrics: Callable | None = None,
        preprocess_logits_for_metrics: Callable | None = None,
    ):
        self.engine = engine
        self.args = args
        self.compute_metrics = compute_metrics
        self.preprocess_logits = preprocess_logits_for_metrics

    def run(self, batches: Iterable[StepBatch], prediction_loss_only: bool, prefix: str) -> EvalLoopOutput:
        """Evaluates batches; metrics are on all ranks, predictions and labels on rank 0. Collective."""
        world = self.engine.world
        concatenate = self.args.eval_do_concat_batches
        containers = {kind: EvalLoopContainer(concatenate, padding_index=IGNORE_INDEX) for kind in _KINDS}
        with_inputs = "inputs" in self.args.include_for_metrics
        collector = None if prediction_loss_only else _Collector(self.engine, self.preprocess_logits, with_inputs)
        losses: list[tuple[float, int]] = []
        num_samples, num_targets = 0, 0.0
        generated: dict[str, list[float]] = {}  # generator -> its summed loss, and its targets
        for batch in batches:
            num_samples += len(batch.step.samples)
            gathered = self._step(batch, collector)
            if world.is_first:
                sums = [entry for rank_losses, *_ in gathered for entry in rank_losses]
                for name, loss, count in (entry for _, _, of_rank, _ in gathered for entry in of_rank):
                    own = generated.setdefault(name, [0.0, 0.0])
                    own[0], own[1] = own[0] + loss, own[1] + count
                num_targets += sum(count for *_, count in sums)
                routes = [entry for *_, rank_routes in gathered for entry in rank_routes]
                means = _mean_losses(sums, routes, self.engine.router_loss)
                losses += means
                for loss, count in means:
                    containers["losses"].add(torch.full((count,), loss))
                microbatches = (entry for _, of_rank, *_ in gathered for entry in of_rank)
                for _, arrays in sorted(microbatches, key=lambda entry: entry[0]):
                    for kind, value in arrays.items():
                        if value is not None:
                            containers[kind].add(value)
        if losses and not num_targets:
            logger.warning(
                "No token of the evaluation is a target, all `labels` are -100: its loss is NaN. Targets are what the "
                "`assistant` says in conversations, and what has a label of its own otherwise."
            )
        with track_activity("metrics"):
            arrays: dict[str, Any] = {}
            if world.is_first:
                arrays = {kind: container.get_arrays() for kind, container in containers.items()}
            metrics = self._metrics(arrays, losses, prefix, generated) if world.is_first else {}
        metrics = world.broadcast(metrics, "metrics")
        predictions: Any = arrays.get("predictions")
        return EvalLoopOutput(
            predictions=predictions,
            label_ids=arrays.get("labels"),
            metrics=metrics,
            num_samples=num_samples,
        )

    def _step(self, batch: StepBatch, collector: _Collector | None) -> list[tuple[list, list, list, list]]:
        """
        Of each rank what it reports of microbatches, on rank 0: of the language model (first batch index, samples,
        summed loss, target tokens), what was collected, (generator, summed loss, targets), and of forwards (first
        batch index, samples, where its tokens went).
        """
        engine = self.engine
        result = engine.evaluate_step(batch, collector)

        def samples(task: Task) -> tuple[int, int]:
            return engine.batch_indices(task)[0], len(engine.batch_indices(task))

        # of the part of its tokens that this rank has
        led = [
            (task, float(loss), float(count))
            for task, (loss, count) in result.losses.items()
            if engine.leads_cp_rank(task)
        ]
        mine = (
            [(*samples(task), loss, count) for task, loss, count in led if task.module == LANGUAGE_MODEL],
            collector.microbatches if collector else [],
            [(task.module, loss, count) for task, loss, count in led if task.module != LANGUAGE_MODEL],
            [(*samples(task), sums) for task, sums in result.routed.items() if engine.leads_cp_rank(task)],
        )
        with track_activity("gathering predictions"):
            gathered = engine.world.gather_tensors(mine)
        if collector:
            collector.microbatches = []
        return gathered

    def _metrics(
        self,
        arrays: dict[str, Any],
        losses: list[tuple[float, int]],
        prefix: str,
        generated: Mapping[str, Sequence[float]],
    ) -> dict[str, float]:
        metrics: Any = {}
        if self.compute_metrics is not None and arrays["predictions"] is not None and arrays["labels"] is not None:
            wanted = self.args.include_for_metrics
            extra = {kind: arrays[kind] for kind, name in (("inputs", "inputs"), ("losses", "loss")) if name in wanted}
            metrics = self.compute_metrics(
                EvalPrediction(predictions=arrays["predictions"], label_ids=arrays["labels"], **extra)
            )
        metrics = denumpify_detensorize(metrics)
        finite = [pair for pair in losses if math.isfinite(pair[0])]
        if self.args.logging_nan_inf_filter and finite:
            losses = finite
        if losses:
            metrics[f"{prefix}_loss"] = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
        for name, (loss, count) in generated.items():
            generator = self.engine.parts[name].generator
            metrics[f"{prefix}_{name}_loss"] = mean = loss / count if count else math.nan
            metrics[f"{prefix}_loss"] += generator.settings.loss_weight * mean if generator and count else 0.0
        return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": v for name, v in metrics.items()}
