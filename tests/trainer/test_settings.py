"""Settings and overrides that a plan honours do what they do in the stock Trainer."""

import copy
import functools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_mmparallel import MultimodalParallelTrainer
from hf_mmparallel.modeling.unowned import is_unowned
from hf_mmparallel.trainer import trainer as trainer_module
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
APART = {LM: {}}
SHARDED = {VISION: {"tp_size": 2}, LM: {"tp_size": 2, "colocate_with": VISION}}


def make(cls: type, parallel: dict[str, Any] | None = None, dtype: Any = torch.float32, **given: Any) -> Any:
    """A Trainer of either kind: the stock one without a layout."""
    model: Any = tiny.FAMILIES["llava"]().to(dtype)
    model.config.keys_to_ignore_at_inference = runs.OTHER_OUTPUTS
    given = {"cls": cls, "model": model, "eval_dataset": tiny.make_dataset("llava", 5), "max_steps": 2, **given}
    return runs.stock_trainer(**given) if parallel is None else runs.make_trainer("llava", parallel, **given)


def logs_of(trainer: Any) -> list[dict[str, float]]:
    trainer.train()
    return runs.step_logs(trainer)


class Overriding:
    """Overrides that hold, for the stock Trainer and for ours."""

    entered = 0

    def compute_loss_context_manager(self) -> Any:
        type(self).entered += 1
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return list(reversed(range(len(eval_dataset))))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        (Path(str(output_dir)) / "mine.txt").write_text("saved")


HALF: dict[str, Any] = {"per_device_eval_batch_size": 1, "max_steps": 1}
UNSEEDED = {"accelerator_config": {"use_seedable_sampler": False}, "max_steps": 4}  # three steps an epoch
BY_LENGTH = {"train_sampling_strategy": "group_by_length", "max_steps": 7, "save_strategy": "steps", "save_steps": 4}
ASKED = {"max_steps": 9, "ddp_timeout": 77, "logging_strategy": "no", "torch_empty_cache_steps": 2}
RECOMPUTING = {"every_n_layers": 2, "offload": True, "use_reentrant": False, "preserve_rng_state": False}


def overriding(cls: type, folder: Path, parallel: dict[str, Any] | None = None) -> dict[str, Any]:
    trainer = make(type("OfAUser", (Overriding, cls), {}), parallel)
    losses, entered = [row["loss"] for row in logs_of(trainer)], trainer.entered > 0
    labels = trainer.predict(tiny.make_dataset("llava", 3)).label_ids
    trainer.save_model(str(folder))
    return {"losses": losses, "entered": entered, "labels": labels, "saved": Path(folder, "mine.txt").is_file()}


def grouped(cls: type, parallel: dict[str, Any] | None = None) -> list[list[int]]:
    """The labels of predictions in an order by length, without what fills them up."""
    trainer = make(cls, parallel, train_sampling_strategy="group_by_length", per_device_eval_batch_size=2)
    labels = trainer.predict(tiny.make_dataset("llava", 9)).label_ids
    return [] if labels is None else [row[row != -100].tolist() for row in labels]


def by_length(folder: Path) -> list[list[dict[str, float]]]:
    """The logs of a run in groups by length, and of one that goes on in the middle of its second epoch."""
    straight = logs_of(make(MultimodalParallelTrainer, APART, output_dir=str(folder), **BY_LENGTH))
    trainer = make(MultimodalParallelTrainer, APART, output_dir=str(folder), **BY_LENGTH)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    return [straight, runs.step_logs(trainer)]


def half_evaluation(cls: type, parallel: dict[str, Any] | None, setting: str) -> tuple[Any, float, set[Any]]:
    """The trainer after an evaluation in half precision, its loss, and what the weights were before."""
    trainer = make(cls, parallel, eval_strategy="steps", eval_steps=1, **{setting: True}, **HALF)
    trainer.train()
    before = {parameter.dtype for parameter in trainer.model.parameters()}
    return trainer, trainer.evaluate()["eval_loss"], before


def half_on_a_rank(parallel: dict[str, Any], setting: str) -> dict[str, Any]:
    trainer, loss, before = half_evaluation(MultimodalParallelTrainer, parallel, setting)
    again = refused(trainer.train)
    unowned = [p.untyped_storage().nbytes() for p in trainer.model.parameters() if is_unowned(p)]
    after = {parameter.dtype for parameter in trainer.model.parameters()}
    return {"loss": loss, "dtypes": (before, after), "unowned": max(unowned, default=0), "again": again}


def bfloat16_logits(cls: type, parallel: dict[str, Any] | None = None, **given: Any) -> Any:
    """Logits of a sample with an image by a model with bfloat16 weights, on the first rank."""
    trainer = make(cls, parallel, torch.bfloat16, **HALF, **given)
    logits = trainer.predict(tiny.make_dataset("llava", 1)).predictions
    return None if logits is None else torch.from_numpy(logits).float()


def dropping(cls: type, parallel: dict[str, Any] | None = None) -> tuple[float, Any]:
    """The loss and the labels of an evaluation that leaves out an incomplete last batch."""
    found = make(cls, parallel, per_device_eval_batch_size=2, dataloader_drop_last=True).predict(
        tiny.make_dataset("llava", 5)
    )
    return found.metrics["test_loss"], found.label_ids


def unfiltered(cls: type, parallel: dict[str, Any] | None = None) -> list[float]:
    """Losses of evaluations in which a sample has no targets: without it, and with it."""
    data = copy.deepcopy(tiny.make_dataset("llava", 5))
    data[2]["labels"][:] = -100
    given = {"eval_dataset": data, "per_device_eval_batch_size": 1}
    each = (make(cls, parallel, logging_nan_inf_filter=filters, **given) for filters in (True, False))
    return [trainer.evaluate()["eval_loss"] for trainer in each]


def noisy(cls: type, parallel: dict[str, Any] | None = None, **given: Any) -> tuple[list[float], list[Any]]:
    """Losses of steps and evaluations with noise that is largest everywhere, and the noise that is drawn otherwise."""
    given = {"neftune_noise_alpha": 5.0, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 5, **given}
    trainer = make(cls, parallel, eval_strategy="steps", eval_steps=1, **given)
    drawing = make(cls, parallel, **{**given, "max_steps": 1})
    uniform, drawn = torch.Tensor.uniform_, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "uniform_", lambda noise, low, high: noise.fill_(high))
        trainer.train()
        patch.setattr(torch.Tensor, "uniform_", lambda *a: drawn.append((uniform(*a).clone(), float(a[2]))) or a[0])
        drawing.train()
    history = trainer.state.log_history
    return [row[name] for row in history for name in ("loss", "eval_loss") if name in row], drawn


class AskOnOneRank(TrainerCallback):
    """Sets one flag a step, each on a rank alone."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        asked = {1: ("should_save", 0), 2: ("should_evaluate", 1), 3: ("should_log", 0)}
        name, rank = asked.get(state.global_step, ("", -1))
        if rank == args.process_index:
            setattr(control, name, True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs and args.process_index == 1:
            control.should_training_stop = True


class OtherLoaders(MultimodalParallelTrainer):
    """Overrides that call the inherited method and hand over something else."""

    def get_train_dataloader(self) -> Any:
        super().get_train_dataloader()
        return torch.utils.data.DataLoader(self.train_dataset, collate_fn=self.data_collator)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return list(super().get_eval_dataloader(eval_dataset))


def refused(call: Any) -> str:
    """Why a call is refused."""
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def asked(folder: Path) -> dict[str, Any]:
    cleared: list[int] = []
    trainer = make(MultimodalParallelTrainer, APART, output_dir=str(folder), **ASKED)
    trainer_module.clear_device_cache = lambda: cleared.append(trainer.state.global_step)  # type: ignore[assignment]
    trainer.add_callback(AskOnOneRank())
    trainer.train()
    history = [(row["step"], "eval_loss" in row) for row in trainer.state.log_history if "train_loss" not in row]
    loading = make(OtherLoaders, APART)
    return {
        "asked": (trainer.state.global_step, history, [path.name for path in folder.glob("checkpoint-*")]),
        "cleared": cleared,
        "timeout": trainer.world.timeout,
        "missing": refused(lambda: trainer.train(resume_from_checkpoint=str(folder / "checkpoint-7"))),
        "loaders": [refused(call) for call in (loading.evaluate, loading.train)],
    }


def recomputing() -> tuple[list[bool], list[dict[str, float]], set[bool]]:
    """Which layers are recomputed, the logs, and whether modules offload activations."""
    given = {"activation_checkpointing": True, "activation_checkpointing_kwargs": RECOMPUTING}
    trainer = make(MultimodalParallelTrainer, APART, **given)
    recomputed = [layer.gradient_checkpointing for layer in trainer.model.model.language_model.layers]
    offloads = {own.storage.offload_activations for own in trainer.engine.plan.modules.values()}
    return recomputed, logs_of(trainer), offloads


def unseeded() -> list[dict[str, float]]:
    return logs_of(make(MultimodalParallelTrainer, APART, **UNSEEDED))


on_ranks = functools.partial(run_distributed, world_size=2)
ours = {"cls": MultimodalParallelTrainer, "parallel": APART}


def test_overrides_hold(tmp_path: Path):
    stock, ranks = overriding(Trainer, tmp_path / "stock"), on_ranks(overriding, folder=tmp_path / "ours", **ours)
    for row, plain in zip(stock["losses"], runs.stock("llava", max_steps=2).logs, strict=True):
        assert row != pytest.approx(plain["loss"], rel=2e-5)
    for found in (stock, *ranks):
        assert found["entered"] and found["losses"] == pytest.approx(stock["losses"], rel=2e-5)
    assert stock["saved"] and ranks[0]["saved"]
    assert (ranks[0]["labels"] == stock["labels"]).all()


@pytest.mark.parametrize(
    ("parallel", "setting", "dtype", "rel"),
    [(APART, "bf16_full_eval", torch.bfloat16, 2e-6), deep(SHARDED, "fp16_full_eval", torch.float16, 1e-4)],
)
def test_an_evaluation_in_half_precision(parallel: dict[str, Any], setting: str, dtype: torch.dtype, rel: float):
    _, loss, _ = half_evaluation(Trainer, None, setting)
    full = make(Trainer, **HALF)
    full.train()
    assert loss != pytest.approx(full.evaluate()["eval_loss"], rel=2e-6)
    for found in on_ranks(half_on_a_rank, parallel=parallel, setting=setting):
        assert found["loss"] == pytest.approx(loss, rel=rel)
        assert found["dtypes"] == ({torch.float32}, {dtype}) and found["unowned"] <= 4
        assert f"`{setting}=True`" in found["again"] and f"`{dtype}`" in found["again"]


@pytest.mark.deep
def test_a_bfloat16_model_is_evaluated_in_float16():
    logits = on_ranks(bfloat16_logits, **ours, fp16_full_eval=True)[0]
    wanted, rounded = bfloat16_logits(Trainer, fp16_full_eval=True), bfloat16_logits(Trainer)
    assert logits.shape == wanted.shape
    assert (logits - wanted).abs().max() < 0.1 * (rounded - wanted).abs().max()


def test_what_a_callback_asks_for_on_one_rank_all_ranks_do_and_what_can_not_be_is_refused(tmp_path: Path):
    for rank in on_ranks(asked, folder=tmp_path):
        assert rank["asked"] == (3, [(2, True), (3, False)], ["checkpoint-1"])
        assert (rank["cleared"], rank["timeout"]) == ([0, 2], timedelta(seconds=77))
        assert "checkpoint-7" in rank["missing"]
        evaluation, training = rank["loaders"]
        assert "`get_train_dataloader`" in training and "`DataLoader`" in training
        assert "`get_eval_dataloader`" in evaluation and "`list`" in evaluation


@pytest.mark.deep
def test_every_other_layer_is_recomputed_with_its_inputs_on_the_host():
    (_, logs, offloads), (recomputed, others, _) = on_ranks(recomputing)
    wanted = [pytest.approx(row, rel=2e-5, abs=2e-6) for row in runs.stock("llava", max_steps=2).logs]
    assert logs == others == wanted
    assert recomputed == [True, False, True, False] and offloads == {True}


@pytest.mark.deep
def test_an_order_that_is_not_seeded_is_the_stock_trainers():
    wanted = logs_of(make(Trainer, **UNSEEDED))
    assert wanted != runs.stock("llava").logs
    assert on_ranks(unseeded) == [[pytest.approx(row, rel=2e-5, abs=2e-6) for row in wanted]] * 2


@pytest.mark.deep
def test_noise_on_embeddings_is_the_stock_trainers_and_equal_in_a_tp_group():
    wanted, of_stock = noisy(Trainer, gradient_accumulation_steps=4)
    quiet, _ = noisy(Trainer, gradient_accumulation_steps=4, neftune_noise_alpha=0.0)
    assert len(wanted) == 4 and quiet[0] != pytest.approx(wanted[0], rel=1e-3)
    ranks = on_ranks(noisy, cls=MultimodalParallelTrainer, parallel=SHARDED, microbatch_assignment="contiguous")
    for losses, drawn in ranks:
        assert losses == pytest.approx(wanted, rel=2e-5)
        assert [(noise.shape, largest) for noise, largest in drawn] == [(n.shape, largest) for n, largest in of_stock]
        for (noise, largest), (same, _) in zip(drawn, ranks[0][1], strict=True):
            assert noise.equal(same) and noise.abs().max() <= largest
            assert float(noise.std()) == pytest.approx(largest / 3**0.5, rel=0.1)
        assert not drawn[0][0].flatten()[:24].equal(drawn[1][0].flatten()[:24])


@pytest.mark.deep
def test_groups_by_length_are_those_of_the_stock_trainer(tmp_path: Path):
    wanted = [pytest.approx(row, rel=2e-5, abs=2e-6) for row in logs_of(make(Trainer, **BY_LENGTH))]
    assert on_ranks(by_length, folder=tmp_path) == [[wanted, wanted]] * 2


@pytest.mark.deep
def test_an_evaluation_in_groups_has_the_stock_trainers_order():
    stock = grouped(Trainer)
    assert on_ranks(grouped, **ours)[0] == stock and len(stock) == 9
    data = [sample["labels"] for sample in tiny.make_dataset("llava", 9)]
    assert stock != [labels[labels != -100].tolist() for labels in data]


@pytest.mark.deep
def test_an_incomplete_last_batch_of_an_evaluation_is_left_out():
    loss, labels = dropping(Trainer)
    ranks = on_ranks(dropping, **ours)
    assert len(labels) == 4 and (ranks[0][1] == labels).all()
    assert [found for found, _ in ranks] == [pytest.approx(loss, rel=2e-5)] * 2


@pytest.mark.deep
def test_losses_that_are_no_number_are_left_out_of_an_evaluation():
    wanted = unfiltered(Trainer)
    assert [loss == loss for loss in wanted] == [True, False]
    assert on_ranks(unfiltered, **ours) == [pytest.approx(wanted, rel=2e-5, nan_ok=True)] * 2
