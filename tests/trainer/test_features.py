"""What users of the Trainer also do, under a plan: each equals the stock Trainer on one process."""

import copy
import functools
import multiprocessing
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EarlyStoppingCallback

from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
PAIR = {VISION: {}, LM: {}}


# Evaluation


def accuracy(prediction: Any) -> dict[str, float]:
    """Of the next token, where there is a target; the predictions are ids already."""
    guessed, wanted = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guessed == wanted)[wanted != -100].mean()), "samples": len(wanted)}


def guesses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


EVALUATED = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": guesses, "per_device_eval_batch_size": 2}


def evaluations(make: Any) -> dict[str, Any]:
    """Metrics of two datasets in a training run, and predictions with and without metrics."""
    data = tiny.make_dataset("llava", 9, seed=4)
    trainer = make(
        eval_dataset={"seen": data[:4], "unseen": data}, eval_strategy="steps", eval_steps=2, max_steps=2, **EVALUATED
    )
    trainer.model.config.keys_to_ignore_at_inference = runs.OTHER_OUTPUTS
    trainer.train()
    history = [
        {name: row[name] for name in row if name.endswith(("loss", "accuracy", "samples"))}
        for row in trainer.state.log_history
        if any(name.startswith("eval") for name in row)
    ]
    predicted = trainer.predict(data)
    trainer.preprocess_logits_for_metrics = trainer.compute_metrics = None
    logits = trainer.predict(data[:5])
    return {
        "history": history,
        "metrics": {name: predicted.metrics[f"test_{name}"] for name in ("loss", "accuracy", "samples")},
        "predictions": predicted.predictions,
        "labels": predicted.label_ids,
        "logits": logits.predictions,
    }


def assert_same_evaluations(ranks: Sequence[dict[str, Any]], stock: dict[str, Any]) -> None:
    """Equal metrics on all ranks; on the first one equal labels, and predictions and logits but for padding."""
    for rank in ranks:
        assert [pytest.approx(row, rel=2e-5) for row in stock["history"]] == rank["history"]
        assert rank["metrics"] == pytest.approx(stock["metrics"], rel=2e-5)
    first, targets = ranks[0], stock["labels"][:, 1:] != -100
    assert (first["labels"] == stock["labels"]).all()
    assert (first["predictions"][:, :-1] == stock["predictions"][:, :-1])[targets].all()
    logits, expected = (torch.tensor(found["logits"]) for found in (first, stock))
    real = (logits != -100) & (expected != -100)
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits[real], expected[real], rtol=1e-4, atol=1e-5)


def our_evaluations(size: str) -> dict[str, Any]:
    return evaluations(functools.partial(runs.make_trainer, "llava", {VISION: {"dp_size": 2}, LM: {size: 2}}))


@pytest.mark.parametrize("size", ["tp_size", deep("pp_size")])  # of ranks that share the words of the head, of stages
def test_evaluation_and_prediction_equal_the_stock_trainers(size: str):
    stock = evaluations(runs.stock_trainer)
    assert len(stock["history"]) == 2 and "eval_unseen_accuracy" in stock["history"][1]
    ranks = run_distributed(our_evaluations, 4, size)
    assert_same_evaluations(ranks, stock)
    assert (ranks[0]["predictions"] == stock["predictions"]).all()
    assert ((ranks[0]["logits"] != -100) == (stock["logits"] != -100)).all()
    assert all(rank["predictions"] is None and rank["labels"] is None for rank in ranks[1:])


# Data and the training loop


def images_only_at_times() -> dict[str, Any]:
    """Two global batches without an image between others, so that gradients of vision come and go."""
    plain, media = (tiny.make_dataset("llava", runs.SAMPLES, max_items=count) for count in (0, 2))
    return {"data": media[:8] + plain[8:22], "train_sampling_strategy": "sequential"}


EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
LOWERS = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0}}
EPOCHS = {"max_steps": -1, "num_train_epochs": 2}
CASES: dict[str, Any] = {
    "text only": lambda: {"data": tiny.make_dataset("llava", runs.SAMPLES, max_items=0)},
    "images at times": images_only_at_times,
    "early stopping": lambda: {"callbacks": [EarlyStoppingCallback(1, 5.0)], "max_steps": 8, **EVALUATES},
    "a lower rate on a plateau": lambda: {**LOWERS, "warmup_steps": 0, **EVALUATES},
    "a last batch that is not full": lambda: EPOCHS,
    "a last batch that is left out": lambda: {**EPOCHS, "dataloader_drop_last": True},
    "workers that stay": lambda: {**EPOCHS, "dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    "no clipping": lambda: {"max_grad_norm": 0.0},
}
CORE = ("images at times",)


def run_case(name: str) -> runs.Run:
    multiprocessing.set_start_method("fork", force=True)  # what a loader uses outside of the tests' own server
    return runs.run_of(runs.make_trainer("llava", {LM: {"dp_size": 2}}, **CASES[name]()))


@pytest.mark.parametrize("name", runs.deep_but(CASES, *CORE))
def test_a_run_equals_the_stock_trainers(name: str):
    run, stock = run_distributed(run_case, 3, name)[0], runs.run_of(runs.stock_trainer(**CASES[name]()))
    runs.assert_same_run(run, stock)
    if name == "early stopping":
        assert len(stock.logs) == 2
    if name == "a lower rate on a plateau":
        assert stock.logs[-1]["learning_rate"] < stock.logs[0]["learning_rate"]


def dropping(seed: int) -> list[dict[str, float]]:
    """The logs of a run that draws numbers."""
    model = tiny.FAMILIES["llava"]()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    return runs.run_of(runs.make_trainer("llava", PAIR, model=model, seed=seed, data_seed=0, max_steps=2)).logs


def repeated() -> tuple[list[Any], list[list[int]]]:
    """Runs that draw numbers, and the batches of one whose order is by length."""
    torch.manual_seed(dist.get_rank())
    loader: Any = runs.make_trainer("llava", PAIR, train_sampling_strategy="group_by_length").get_train_dataloader()
    pickle.dumps(loader.dataset.inputs)  # what a worker is sent
    return [dropping(seed) for seed in (1, 1, 2)], [step.samples for step in loader.batch_sampler]


@pytest.mark.deep
def test_runs_repeat():
    first, second = run_distributed(repeated, 2)
    (once, twice, other), batches = first
    assert once == twice != other and first == second
    lengths = [len(sample["input_ids"]) for sample in tiny.make_dataset("llava", runs.SAMPLES)]
    assert sorted(index for batch in batches for index in batch) == list(range(runs.SAMPLES))
    for batch in batches:
        assert [lengths[index] for index in batch] == sorted((lengths[index] for index in batch), reverse=True)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({VISION: {"dp_size": 2}, "audio": {"colocate_with": VISION}, LM: {}}, id="together"),
        deep({VISION: {}, "audio": {}, LM: {"pp_size": 2}}, id="each on its own"),
    ],
)
def test_two_encoders_equal_the_stock_trainer(parallel: dict[str, Any]):
    runs.assert_a_layout_equals_the_stock_trainer("qwen2_5_omni", parallel)


# The model


RANDOM = ("normal_", "uniform_", "bernoulli_", "trunc_normal_", "rand")


class Drawn(TorchDispatchMode):
    """Counts the values that are drawn outside the meta device."""

    def __init__(self):
        super().__init__()
        self.num_values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(word in func.__name__ for word in RANDOM) and isinstance(result, torch.Tensor) and not result.is_meta:
            self.num_values += result.numel()
        return result


def custom() -> Any:
    """A composed model with a projector of the user's own class."""
    from tests.modeling import test_composed as parts

    torch.manual_seed(0)
    projector = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 24))
    return parts.compose("clip_llama", projectors=projector)[0]


def built(family: str) -> Any:
    """A model in bfloat16 but for its buffers, one of which is not what its class would compute."""
    model = custom() if family == "custom" else tiny.FAMILIES[family]()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:
            buffer.mul_(1.5)
    return model


def gathered(family: str) -> Any:
    sizes = {VISION: {}, LM: {"pp_size": 2}}
    trainer = runs.make_trainer("llava" if family == "custom" else family, sizes, model=built(family))
    with Drawn() as drawn:
        whole = trainer.gather_model()
    return drawn.num_values, whole if whole is None else (whole.state_dict(), dict(whole.named_buffers()))


@pytest.mark.parametrize("family", ["custom", deep("qwen2_5_vl"), deep("gemma3")])
def test_the_gathered_model_has_all_weights_and_buffers_and_draws_none(family: str):
    expected = built(family)
    num_drawn, (state, buffers) = run_distributed(gathered, 3, family)[0]
    assert num_drawn == 0
    assert all(tensor.dtype == torch.bfloat16 for tensor in expected.state_dict().values())
    wanted = dict(expected.named_buffers())
    assert any("inv_freq" in name for name in wanted)
    for found, tensors in ((state, expected.state_dict()), (buffers, wanted)):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def batch_of_two() -> dict[str, torch.Tensor]:
    batch = tiny.collate("llava")(tiny.make_dataset("llava", 2))
    return {name: value for name, value in batch.items() if name != "labels"}


def generated() -> Any:
    whole: Any = runs.make_trainer("llava", {VISION: {}, LM: {"tp_size": 2}}).gather_model()
    if whole is None:
        return None
    assert whole.config is not None and not whole.training
    batch = batch_of_two()
    with torch.no_grad():
        return whole(**batch).logits, copy.deepcopy(whole).generate(**batch, max_new_tokens=2, do_sample=False)


def test_the_gathered_model_generates():
    model: Any = tiny.FAMILIES["llava"]().eval()
    logits, tokens = run_distributed(generated, 3)[0]
    torch.testing.assert_close(logits, model(**batch_of_two()).logits)
    assert torch.equal(tokens, model.generate(**batch_of_two(), max_new_tokens=2, do_sample=False))
