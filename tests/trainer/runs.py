"""Training runs of tiny models: the stock Trainer on one process, and ours on ranks, with what a test compares."""

import hashlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import shrunk_batches
import shrunk_models
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


def ranks_of(family: str, parallel: Any, model: Any = None, **_: Any) -> int:
    """How many ranks a layout has."""
    plugin = MultimodalParallelPlugin.from_any(parallel)
    return plan_for_model(plugin, build_model_spec(model or tiny.FAMILIES[family]()), None).world_size


def step_logs(trainer: Trainer) -> list[dict[str, float]]:
    kept = ("loss", "grad_norm", "learning_rate", "num_input_tokens_seen")
    return [{name: row[name] for name in kept if name in row} for row in trainer.state.log_history if "loss" in row]


def frozen(parallel: Any) -> dict[str, Any]:
    """Module -> what of it a layout freezes, which changes the result on one process too."""
    modules = parallel.get("modules", parallel) if isinstance(parallel, dict) else {}
    return {name: module["freeze"] for name, module in modules.items() if "freeze" in module}


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
    return run_of(stock_trainer(family, model=model, **arguments), evaluate)


def stock_trainer(family: str = "llava", output_dir: str | None = None, cls: Any = Trainer, **arguments: Any) -> Any:
    """The stock Trainer, whose batch is the global batch where nothing else is said, or a class of its arguments."""
    words = words_of(family, arguments)
    arguments = {**COMMON, "per_device_train_batch_size": GLOBAL_BATCH, **arguments}
    return cls(args=TrainingArguments(output_dir=output_dir or run_folder(), **arguments), **words)


def words_of(family: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the constructor of a Trainer is given besides arguments, taken out of them, or the usual."""
    data = arguments.pop("data", None) or tiny.make_dataset(family, SAMPLES)
    optional = ("optimizers", "callbacks", "compute_metrics", "preprocess_logits_for_metrics", "sample_tokens")
    optional += ("compute_loss_func", "processing_class")
    return {
        "model": arguments.pop("model", None) or tiny.FAMILIES[family](),
        "train_dataset": data,
        "eval_dataset": arguments.pop("eval_dataset", None) or (data[:7] if isinstance(data, list) else None),
        "data_collator": arguments.pop("data_collator", tiny.collate(family)),
        **{name: arguments.pop(name) for name in optional if name in arguments},
    }


@cache
def shrunk_samples(family: str, count: int) -> shrunk_batches.Samples:
    return shrunk_batches.make_samples(shrunk_models.build(family), family, count)


def shrunk(family: str, count: int = 2 * GLOBAL_BATCH, **arguments: Any) -> dict[str, Any]:
    """A tiny model of any family of transformers and its samples, with further words of both Trainers."""
    samples = shrunk_samples(family, count)
    words = {"model": shrunk_models.build(family), "data": samples.rows, "data_collator": samples.collate}
    return {**words, **arguments}


def with_small_normalizers(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of a user: cross entropy, and the squared logarithm of what the softmax divides by (z-loss)."""
    logits, targets = outputs.logits[..., :-1, :].float().flatten(0, 1), labels[..., 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    losses = (losses + 1e-2 * logits.logsumexp(-1) ** 2) * (targets != -100)
    return losses.sum() / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def draw_nothing() -> None:
    """Keeps rank 0 from drawing what is predicted, which takes longer than the steps of a tiny model."""
    report.gantt_png = report.balance_png = lambda *args, **kwargs: None


def our_trainer(
    family: str = "llava", output_dir: str | None = None, cls: Any = MultimodalParallelTrainer, **arguments: Any
) -> Any:
    """Our Trainer, or a subclass, as a user makes it on one process."""
    words = words_of(family, arguments)
    args = MultimodalTrainingArguments(output_dir=output_dir or run_folder(), **{**COMMON, **arguments})
    return cls(args=args, **words)


def make_trainer(
    family: str,
    parallel: Any,
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
    sizes = {"global_batch_size": GLOBAL_BATCH, "per_device_train_batch_size": 2, "ddp_backend": "gloo"}
    return our_trainer(family, output_dir, parallel=parallel, **{**sizes, **arguments})


def parallel_run(
    family: str,
    parallel: Any,
    evaluate: bool = False,
    max_logits: int = MAX_LOGITS,
    check: Callable[[Any], None] | None = None,
    **arguments: Any,
) -> Run:
    """Our Trainer on this rank, checked and trained, with a loss in chunks of `max_logits`; weights on rank 0."""
    lazy_logits.MAX_LOGITS = max_logits
    trainer = make_trainer(family, parallel, **arguments)
    if check is not None:
        check(trainer)
    return run_of(trainer, evaluate)


def run_of(trainer: Any, evaluate: bool = False, checkpoint: Path | str | None = None) -> Run:
    """Trains, from a checkpoint on if one is given; weights on rank 0."""
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    metrics = trainer.evaluate() if evaluate else {}
    whole = trainer.gather_model() if isinstance(trainer, MultimodalParallelTrainer) else trainer.model
    weights = None if whole is None else {k: v.detach().clone() for k, v in whole.state_dict().items()}
    if dist.is_initialized():
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
    return run_of(trainer, checkpoint=checkpoint)


@dataclass(frozen=True)
class Layout:
    """A layout of a family in a launch with several."""

    family: str
    parallel: Any
    words: Callable[[], dict[str, Any]] = dict  # of both Trainers, made anew, on ranks too
    ours: dict[str, Any] = field(default_factory=dict)  # arguments of ours alone
    check: Callable[[Any], None] | None = None  # of our Trainer on each rank, before it trains
    # what makes the adapters of a module on one rank, whose batch is the global batch, where the stock Trainer can't
    alone: Any = None
    rtol: float = 2e-5

    def run(self) -> Run:
        """On this rank."""
        return parallel_run(self.family, self.parallel, check=self.check, **{**self.words(), **self.ours})

    def on_one_rank(self) -> "Layout":
        """The run with the adapters of the same seed."""
        return replace(self, parallel=self.alone, ours={"per_device_train_batch_size": GLOBAL_BATCH}, check=None)


def run_layouts(layouts: Mapping[str, Layout]) -> dict[str, Run]:
    """Our Trainer on this rank under each layout, one after the other."""
    return {name: layout.run() for name, layout in layouts.items()}


def references_of(layouts: Mapping[str, Layout]) -> dict[str, Run]:
    """The runs of one process."""
    alone = {name: layout for name, layout in layouts.items() if layout.alone is not None}
    keys = {name: repr((layout.family, layout.alone, layout.words)) for name, layout in alone.items()}
    each = {key: alone[name].on_one_rank() for name, key in keys.items()}
    found = run_distributed(run_layouts, 1, each, timeout=280)[0] if each else {}
    assert all(any("lora" in weight for weight in run.weights or {}) for run in found.values())
    return {
        name: found[keys[name]] if name in keys else stock(own.family, freeze=frozen(own.parallel), **own.words())
        for name, own in layouts.items()
    }


def assert_layouts_equal_the_stock_trainer(world_size: int, layouts: Mapping[str, Layout]) -> None:
    """Compares layouts of as many ranks, in one launch if there are any, with one process."""
    ranks = run_distributed(run_layouts, world_size, dict(layouts), timeout=290) if layouts else []
    references = references_of(layouts)
    for name, layout in layouts.items():
        own, reference = [rank[name] for rank in ranks], references[name]
        if layout.alone is not None:
            reference, own[0] = map(without_originals, (reference, own[0]))
        with naming(name):
            assert_same_run(own[0], reference, layout.rtol, layout.rtol / 10)
            assert all(run.logs == own[0].logs for run in own)
            for run in own if reference.metrics else ():
                assert run.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)


def assert_a_layout_equals_the_stock_trainer(family: str, parallel: Any, **arguments: Any) -> None:
    """The same of one layout, with the loss of an evaluation."""
    words = partial(dict, **{"evaluate": True, "per_device_eval_batch_size": 2, **arguments})
    layouts = {family: Layout(family, parallel, words)}
    assert_layouts_equal_the_stock_trainer(ranks_of(family, parallel), layouts)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """A block whose failed assertions say which case it is."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


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
