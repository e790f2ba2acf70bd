"""Training runs of tiny models: the stock Trainer on one process, and ours on ranks, with what a test compares."""

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel._versions import CACHE
from hf_mmparallel.modeling import build_model_spec, lazy_logits
from hf_mmparallel.plan import MultimodalParallelPlugin, plan_for_model
from hf_mmparallel.runtime import updated_copies
from hf_mmparallel.trainer import start_report as report
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed
from tests.folders import made_once, run_folder

MAX_LOGITS = lazy_logits.MAX_LOGITS
FEW_LOGITS = 10 * tiny.VOCAB_SIZE  # of ten tokens at once
SAMPLES = 22
GLOBAL_BATCH = 8

OTHER_OUTPUTS = [CACHE, "image_hidden_states", "image_outputs"]
"""
What a Llava returns besides loss and logits, for `keys_to_ignore_at_inference`: the stock Trainer collects all outputs
of a forward, and fails for the last one, which transformers 5.24 adds.
"""

COMMON: dict[str, Any] = {
    "max_steps": 4,
    "learning_rate": 1e-2,
    "optim": "sgd",
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
    "remove_unused_columns": False,
}


@dataclass
class Run:
    """What a training run leaves: logs by step, final weights by name, evaluation metrics, predictions."""

    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor] | None
    metrics: dict[str, float] = field(default_factory=dict)
    predictions: Any = None


def deep_but(cases: Iterable[str], *core: str) -> list[Any]:
    """The names of cases for `parametrize`; all but `core` are deep."""
    assert {*core} <= {*cases}
    return [name if name in core else pytest.param(name, marks=pytest.mark.deep) for name in cases]


def case(family: str, parallel: Any, always: bool = False, **arguments: Any) -> Any:
    """A layout of a family, with further arguments, for `parametrize`: a deep test, unless it always runs."""
    return deep(family, parallel, arguments, unless=always, id=f"{family}, {parallel}")


def ranks_of(family: str, parallel: Any) -> int:
    """How many ranks a layout has."""
    plugin = MultimodalParallelPlugin.from_any(parallel)
    return plan_for_model(plugin, build_model_spec(tiny.FAMILIES[family]()), None).world_size


def step_logs(trainer: Trainer) -> list[dict[str, float]]:
    kept = ("loss", "grad_norm", "learning_rate", "num_input_tokens_seen")
    return [{name: row[name] for name in kept if name in row} for row in trainer.state.log_history if "loss" in row]


def frozen(parallel: dict[str, Any]) -> dict[str, Any]:
    """Module -> what of it a layout freezes, which changes the result on one process too."""
    return {name: module["freeze"] for name, module in parallel.get("modules", parallel).items() if "freeze" in module}


def stock(family: str, freeze: dict[str, Any] | None = None, **arguments: Any) -> Run:
    """The stock Trainer on this process; a run that any test of this session has made is read from its folder."""
    arguments.pop("max_logits", None)
    if "output_dir" in arguments:  # its files are wanted, too
        return _stock(family, freeze, arguments)
    key = hashlib.sha256(pickle.dumps((family, freeze, sorted(arguments.items())))).hexdigest()
    return made_once(f"stock-{key}", lambda: _stock(family, freeze, arguments))


def _stock(family: str, freeze: dict[str, Any] | None, arguments: dict[str, Any]) -> Run:
    model = arguments.pop("model", None) or tiny.FAMILIES[family]()
    for name, what in (freeze or {}).items():
        trained = build_model_spec(model).modules[name].with_frozen(what).parameters
        for parameter in trained:
            model.get_parameter(parameter.name).requires_grad_(parameter.trainable)
    evaluate = arguments.pop("evaluate", False)
    trainer = stock_trainer(family, model=model, **arguments)
    trainer.train()
    metrics = trainer.evaluate() if evaluate else {}
    return Run(step_logs(trainer), {k: v.detach().clone() for k, v in model.state_dict().items()}, metrics)


def stock_trainer(family: str = "llava", output_dir: str | None = None, **arguments: Any) -> Any:
    """The stock Trainer, whose batch is the global batch where nothing else is said."""
    words = words_of(family, arguments)
    arguments = {**COMMON, "per_device_train_batch_size": GLOBAL_BATCH, **arguments}
    return Trainer(args=TrainingArguments(output_dir=output_dir or run_folder(), **arguments), **words)


def words_of(family: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the constructor of a Trainer is given besides arguments, taken out of them, or the usual."""
    data = arguments.pop("data", None) or tiny.make_dataset(family, SAMPLES)
    optional = ("optimizers", "callbacks", "compute_metrics", "preprocess_logits_for_metrics", "sample_tokens")
    optional += ("compute_loss_func",)
    return {
        "model": arguments.pop("model", None) or tiny.FAMILIES[family](),
        "train_dataset": data,
        "eval_dataset": arguments.pop("eval_dataset", None) or data[:7],
        "data_collator": arguments.pop("data_collator", None) or tiny.collate(family),
        **{name: arguments.pop(name) for name in optional if name in arguments},
    }


def with_small_normalizers(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of a user: cross entropy, and the squared logarithm of what the softmax divides by (z-loss)."""
    logits, targets = outputs.logits[..., :-1, :].float().flatten(0, 1), labels[..., 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    losses = (losses + 1e-2 * logits.logsumexp(-1) ** 2) * (targets != -100)
    return losses.sum() / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def draw_nothing() -> None:
    """Keeps rank 0 from drawing what is predicted, which takes longer than the steps of a tiny model."""
    report.gantt_png = report.balance_png = lambda *args, **kwargs: None


def make_trainer(
    family: str,
    parallel: dict[str, Any] | None,
    output_dir: str | None = None,
    pictures: bool = False,
    deepspeed: bool = False,
    **arguments: Any,
) -> Any:
    """Our Trainer on this rank; with `deepspeed` its kernel, which has to be built before, steps on the CPU."""
    torch.set_num_threads(1)
    if not deepspeed:
        updated_copies._deepspeed_adam = lambda optimizer: None
    if not pictures:
        draw_nothing()
    words = words_of(family, arguments)
    arguments = {**COMMON, "global_batch_size": GLOBAL_BATCH, "per_device_train_batch_size": 2, **arguments}
    output_dir = output_dir or run_folder()
    args = MultimodalTrainingArguments(output_dir=output_dir, parallel=parallel, ddp_backend="gloo", **arguments)
    return MultimodalParallelTrainer(args=args, **words)


def parallel_run(
    family: str, parallel: dict[str, Any], evaluate: bool = False, max_logits: int = MAX_LOGITS, **arguments: Any
) -> Run:
    """Our Trainer on this rank, trained, with a loss in chunks of `max_logits`; weights on rank 0."""
    lazy_logits.MAX_LOGITS = max_logits
    return run_of(make_trainer(family, parallel, **arguments), evaluate)


def run_of(trainer: Any, evaluate: bool = False, checkpoint: str | None = None) -> Run:
    """Trains on this rank, from a checkpoint on if one is given; weights on rank 0."""
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics = trainer.evaluate() if evaluate else {}
    whole = trainer.gather_model()
    weights = None if whole is None else {k: v.detach().clone() for k, v in whole.state_dict().items()}
    dist.barrier()
    return Run(step_logs(trainer), weights, metrics)


def without_originals(run: Run) -> Run:
    """A run without what `peft` keeps of modules that it trains as a copy, which nothing reads."""
    if run.weights is not None:
        named = run.weights.items()
        run.weights = {k.removeprefix("base_model.model."): v for k, v in named if "original_module" not in k}
    return run


def saving_run(
    family: str, folder: Path, parallel: dict[str, Any] | None, checkpoint: Path | None = None, **arguments: Any
) -> Run:
    """A run on this rank that saves every two steps, from a checkpoint on if one is given."""
    trainer = make_trainer(family, parallel, str(folder), save_strategy="steps", save_steps=2, **arguments)
    return run_of(trainer, checkpoint=None if checkpoint is None else str(checkpoint))


def assert_a_layout_equals_the_stock_trainer(family: str, parallel: Any, **arguments: Any) -> None:
    """Compares logs, final weights and the loss of an evaluation, and the logs of all ranks."""
    arguments = {"evaluate": True, "per_device_eval_batch_size": 2, **arguments}
    reference = stock(family, freeze=frozen(parallel) if isinstance(parallel, dict) else {}, **arguments)
    ranks = run_distributed(parallel_run, ranks_of(family, parallel), family, parallel, timeout=240, **arguments)
    assert_same_run(ranks[0], reference)
    for rank in ranks:
        assert rank.logs == ranks[0].logs
        assert rank.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)


Layout = tuple[str, Any, Callable[[], dict[str, Any]], dict[str, Any]]
"""Of a launch with several: a family, a layout, the words of both Trainers made anew, and arguments of ours."""


def run_layouts(layouts: Mapping[str, Layout]) -> dict[str, Run]:
    """Our Trainer on this rank under each layout, one after the other."""
    return {name: parallel_run(family, own, **words(), **ours) for name, (family, own, words, ours) in layouts.items()}


def assert_layouts_equal_the_stock_trainer(world_size: int, layouts: Mapping[str, Layout]) -> None:
    """Compares layouts of as many ranks, in one launch if there are any, with one process."""
    ranks = run_distributed(run_layouts, world_size, dict(layouts), timeout=280) if layouts else []
    for name, (family, parallel, words, _) in layouts.items():
        try:
            assert_same_run(ranks[0][name], stock(family, freeze=frozen(parallel), **words()))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        assert all(rank[name].logs == ranks[0][name].logs for rank in ranks), name


def assert_same_run(run: Run, reference: Run, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Asserts equal logs and final weights at float32 rounding."""
    assert len(run.logs) == len(reference.logs) > 0
    for got, want in zip(run.logs, reference.logs, strict=True):
        assert got.keys() == want.keys()
        for name in want:
            assert abs(got[name] - want[name]) <= atol + rtol * abs(want[name]), (name, got, want)
    assert run.weights is not None and reference.weights is not None
    assert run.weights.keys() == reference.weights.keys()
    for name, want in reference.weights.items():
        torch.testing.assert_close(run.weights[name], want, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
