"""A plan in a loop of one's own gives the losses, norms and weights of the Trainer, and of the stock one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from transformers import LlavaForConditionalGeneration, Trainer, get_cosine_schedule_with_warmup

from hf_mmparallel import prepare
from tests import tiny
from tests.distributed import assert_ranks_raise, run_distributed

from . import runs

LM, VISION = "language_model", "vision"
FAMILY = "llava"
RATE, EPSILON, STEPS = 1e-3, 1e-4, 4
ARGUMENTS: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": RATE, "adam_epsilon": EPSILON}
BATCHES = {"global_batch_size": runs.GLOBAL_BATCH, "per_device_train_batch_size": 2}
TWO = {VISION: {}, LM: {}}
TP_AND_COPIES = {VISION: {"dp_size": 2}, LM: {"tp_size": 2}}
SHARED_TOKENS = {VISION: {"dp_size": 2}, LM: {"cp_size": 2, "cp_block": 8}}
STAGES_AND_SLICES = {VISION: {"dp_size": 2, "zero_stage": 2}, LM: {"pp_size": 2}}


def groups_of(model: Any) -> list[dict[str, Any]]:
    """The groups of the stock Trainer, with weight decay and without."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name in decayed], "weight_decay": runs.COMMON["weight_decay"]},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


class Loop:
    """A loop with the optimizer and the schedule of the Trainer's run."""

    def __init__(
        self, plan: Any, accelerator: Accelerator | None = None, foreach: bool | None = None, **settings: Any
    ):
        torch.set_num_threads(1)
        model = tiny.FAMILIES[FAMILY]()
        self.accelerator = accelerator or Accelerator(cpu=True)
        self.data = tiny.make_dataset(FAMILY, runs.SAMPLES)
        optimizer = AdamW(groups_of(model), lr=RATE, eps=EPSILON, foreach=foreach)
        self.schedule = get_cosine_schedule_with_warmup(optimizer, runs.COMMON["warmup_steps"], STEPS)
        words = {"data_collator": tiny.collate(FAMILY), "seed": runs.COMMON["seed"], **BATCHES, **settings}
        self.model, self.optimizer, self.loader = prepare(self.accelerator, model, optimizer, self.data, plan, **words)
        assert self.optimizer is optimizer
        self.logs: list[dict[str, float]] = []

    def run(self, num_steps: int = STEPS) -> runs.Run:
        """Trains up to a step; the weights on rank 0."""
        while self.model.num_steps < num_steps:
            for step in self.loader:
                rate = float(self.schedule.get_last_lr()[0])
                loss = self.model.step(step)
                norm = self.model.clip_grad_norm_(runs.COMMON["max_grad_norm"])
                self.optimizer.step()
                self.schedule.step()
                self.logs.append({"loss": float(loss), "grad_norm": float(norm), "learning_rate": rate})
                if self.model.num_steps == num_steps:
                    break
        whole = self.model.gather()
        weights = None if whole is None else {k: v.detach().clone() for k, v in whole.state_dict().items()}
        return runs.Run(self.logs, weights)

    def resumed(self, folder: Path) -> runs.Run:
        """Goes on from a state to the end."""
        self.model.load_state(folder, self.schedule)
        return self.run()


def two_ranks(folder: Path) -> dict[str, Any]:
    trainer = runs.saving_run(FAMILY, folder / "trainer", TWO, **ARGUMENTS)
    loop = Loop(TWO)
    loop.run(2)
    loop.model.save_state(folder / "state", loop.schedule)
    straight = loop.run()
    straight.metrics = loop.model.evaluate(loop.data[:7])
    loop.model.save_pretrained(folder / "model")
    resumed = Loop(TWO).resumed(folder / "trainer" / "checkpoint-2")
    searched = Loop("auto")
    args = searched.model._run.args
    names = ("per_device_train_batch_size", "microbatch_assignment")
    by_file = Loop(searched.model.plan, **{name: getattr(args, name) for name in names})
    by_auto = searched.run(), by_file.run()
    AcceleratorState._reset_state()
    return {
        "auto": by_auto[0],
        "the plan that auto finds": by_auto[1],
        "Trainer": trainer,
        "straight": straight,
        "from a Trainer's checkpoint": resumed,
        "bf16": Loop(TWO, Accelerator(cpu=True, mixed_precision="bf16")).run(),
        "Trainer, bf16": runs.parallel_run(FAMILY, TWO, bf16=True, **ARGUMENTS),
        "Trainer, from a loop's state": runs.saving_run(FAMILY, folder / "other", TWO, folder / "state", **ARGUMENTS),
    }


def four_ranks(folder: Path) -> dict[str, Any]:
    loop = Loop(TP_AND_COPIES, foreach=True)  # whole and cut parameters in one group
    loop.run(2)
    loop.model.save_state(folder / "four", loop.schedule)
    return {
        "straight": loop.run(),
        "another plan": Loop(STAGES_AND_SLICES).resumed(folder / "four"),
        "from two ranks": Loop(SHARED_TOKENS).resumed(folder / "state"),
    }


@pytest.fixture(scope="module")
def reference() -> runs.Run:
    return runs.stock(FAMILY, evaluate=True, per_device_eval_batch_size=8, **ARGUMENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("loops")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, runs.Run]]:
    return run_distributed(two_ranks, 2, folder, timeout=200)


@pytest.fixture(scope="module")
def four(folder: Path, two: Any) -> list[dict[str, runs.Run]]:
    return run_distributed(four_ranks, 4, folder, timeout=200)


def second_half(run: runs.Run) -> runs.Run:
    return runs.Run(run.logs[2:], run.weights)


@pytest.mark.distributed
def test_a_loop_on_two_ranks_is_the_trainer(two: Any, reference: runs.Run, folder: Path):
    ours = two[0]
    assert ours["straight"].logs == ours["Trainer"].logs and ours["bf16"].logs == ours["Trainer, bf16"].logs
    assert ours["bf16"].logs != ours["straight"].logs
    runs.assert_same_run(ours["straight"], reference)
    runs.assert_same_run(ours["auto"], reference)
    assert ours["auto"].logs == ours["the plan that auto finds"].logs
    runs.assert_same_run(ours["from a Trainer's checkpoint"], second_half(reference))
    for rank in two:
        assert rank["straight"].logs == ours["straight"].logs
        assert rank["straight"].metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)
    saved = LlavaForConditionalGeneration.from_pretrained(folder / "model").state_dict()
    for name, want in (ours["straight"].weights or {}).items():
        assert torch.equal(saved[name], want)
        got = (ours["Trainer, from a loop's state"].weights or {})[name]
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.distributed
def test_a_loop_on_four_ranks_goes_on_under_another_plan(four: Any, reference: runs.Run):
    runs.assert_same_run(four[0]["straight"], reference)
    for name in ("another plan", "from two ranks"):
        runs.assert_same_run(four[0][name], second_half(reference))
        assert all(rank[name].logs == four[0][name].logs for rank in four)


def failing_loop() -> None:
    loop = Loop(TWO)
    for step in loop.loader:
        loop.model.step(step if loop.model.engine.rank == 0 else None)  # type: ignore[arg-type]


@pytest.mark.distributed
def test_a_failure_of_one_rank_in_the_loop_is_raised_on_all():
    assert_ranks_raise(failing_loop, 2, match="`model.step` runs the step")


# On one process, without a launch.


@pytest.fixture
def loop() -> Loop:
    return Loop({})


@pytest.mark.parametrize(("plan", "packing"), [({}, None), ({}, True), ("auto", None)])
def test_one_process_has_the_same_loop(reference: runs.Run, plan: Any, packing: bool | None):
    loop = Loop(plan, packing=packing)
    runs.assert_same_run(loop.run(), reference)
    assert loop.accelerator.mixed_precision == "no"  # nothing has reset its state
    assert loop.model.num_steps == STEPS and len(loop.loader) == 3 and loop.loader.epoch == 1
    metrics = loop.model.evaluate(loop.data[:7], lambda evaluated: {"count": len(evaluated.label_ids)})
    assert metrics["eval_count"] == 7 and metrics["eval_loss"] == pytest.approx(
        reference.metrics["eval_loss"], rel=1e-3
    )


def test_steps_are_run_in_order_and_epochs_left_early_go_on(loop: Loop, tmp_path: Path):
    steps = iter(loop.loader)
    first = next(steps)
    losses = [float(loop.model.step(first)) for _ in range(2)]  # gradients are not added up
    norm = float(loop.model.clip_grad_norm_(math.inf))
    assert losses[0] == losses[1] and norm == pytest.approx(2.2447469, rel=1e-4)
    second = next(steps)
    with pytest.raises(ValueError, match="StepBatch"):
        loop.model.step(first)
    loop.model.save_state(tmp_path / "state", loop.schedule)  # before the second is run
    again = next(iter(loop.loader))
    assert again.global_batch == second.global_batch
    loop.loader.set_epoch(1)
    other = next(iter(loop.loader))
    assert other.global_batch.epoch == 1
    loop.model.load_state(tmp_path / "state", loop.schedule)
    assert loop.model.num_steps == 2 and loop.loader.epoch == 0
    rest = [step.global_batch.samples for step in loop.loader]
    assert rest[0] == second.global_batch.samples and len(rest) == 2 and loop.loader.epoch == 1


def warmed_up(optimizer: Any) -> Any:
    """A schedule of two, one after the other."""
    parts = [LinearLR(optimizer, 0.1, total_iters=1), CosineAnnealingLR(optimizer, STEPS)]
    return SequentialLR(optimizer, parts, [1])


def test_any_schedule_goes_on(loop: Loop, tmp_path: Path):
    loop.schedule = warmed_up(loop.optimizer)
    loop.run(2)
    loop.model.save_state(tmp_path / "state", loop.schedule)
    rates = [row["learning_rate"] for row in loop.run().logs]
    other = Loop({})
    other.schedule = warmed_up(other.optimizer)
    assert [row["learning_rate"] for row in other.resumed(tmp_path / "state").logs] == rates[2:]
    assert len(set(rates)) == STEPS
    plain = Loop({})
    with pytest.raises(ValueError, match="scheduler"):
        plain.model.load_state(tmp_path / "state")
    plain.model.save_state(tmp_path / "plain")
    plain.model.load_state(tmp_path / "plain")
    with pytest.raises(ValueError, match="scheduler"):
        plain.model.load_state(tmp_path / "plain", plain.schedule)


def test_an_optimizer_of_a_function_trains_a_folder_and_the_adapters_of_a_plan(tmp_path: Path):
    tiny.FAMILIES["llama"]().save_pretrained(tmp_path / "base")
    data = tiny.make_dataset("llama", 4)
    plan = {LM: {"peft_config": {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}}}
    model, optimizer, loader = prepare(
        Accelerator(cpu=True),
        tmp_path / "base",
        lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        data,
        plan,
        per_device_train_batch_size=2,
    )
    assert model.global_batch_size == 2 and len(loader) == 2
    for step in loader:
        model.step(step)
        optimizer.step()
    adapted = {name: p for name, p in model.gather().named_parameters() if "lora_B" in name}
    assert len(adapted) == tiny.NUM_LAYERS and all(p.abs().sum() > 0 for p in adapted.values())
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


# Refusals


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"learning_rate": 1.0}, "learning_rate=1.0"),
        ({"max_grad_norm": 1.0}, "clip_grad_norm_"),
        ({"bf16": True}, "Accelerator"),
        ({"logging_steps": 1}, "logging_steps=1"),
        ({"seeed": 1}, "seed"),
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length"),
        ({"global_batch_size": 7, "gradient_accumulation_steps": 2}, "global_batch_size=7"),
    ],
)
def test_settings_of_a_trainers_loop_are_refused(settings: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=named):
        Loop({}, **settings)


def _accelerated(model: Any) -> Any:
    return Accelerator(cpu=True).prepare(AdamW(model.parameters()))


def _stepped(model: Any) -> Any:
    optimizer = AdamW(model.parameters())
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("make", "plan", "named"),
    [
        (_accelerated, {}, "accelerator.prepare"),
        (_stepped, {}, "has state"),
        (lambda model: torch.optim.Adagrad(model.parameters()), {}, "Adagrad"),
        (lambda model: AdamW(tiny.FAMILIES["llama"]().parameters()), {}, "not the model's"),
        (lambda model: list(model.parameters()), {}, "`list`"),
        (
            lambda model: AdamW(model.parameters()),
            {LM: {"peft_config": {"peft_type": "LORA", "target_modules": ["q_proj"]}}},
            "peft_config",
        ),
        (
            lambda model: AdamW(model.parameters()),
            {LM: {"deepspeed": {"gradient_clipping": 1.0}}},
            "gradient_clipping",
        ),
        (lambda model: AdamW(model.parameters()), {LM: {"tp_size": 2}}, "2 ranks"),
    ],
)
def test_optimizers_and_plans_that_can_not_be_used_are_refused(make: Any, plan: Any, named: str):
    model = tiny.FAMILIES["llama"]()
    with pytest.raises(ValueError, match=named):
        prepare(Accelerator(cpu=True), model, make(model), tiny.make_dataset("llama", 4), plan)


def test_accelerators_that_wrap_models_or_split_batches_are_refused():
    model = tiny.FAMILIES["llama"]()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
        prepare(accelerator, model, AdamW(model.parameters()), tiny.make_dataset("llama", 4), {})


def test_what_would_take_a_part_for_the_whole_is_refused(loop: Loop, tmp_path: Path):
    model = loop.model
    for name in ("parameters", "state_dict", "forward", "generate"):
        with pytest.raises(AttributeError, match=name):
            getattr(model, name)
    with pytest.raises(AttributeError, match="unwrap"):
        loop.accelerator.unwrap_model(model)
    with pytest.raises(TypeError, match="model.step"):
        model(input_ids=None)
    with pytest.raises(ValueError, match="norm_type=1"):
        model.clip_grad_norm_(1.0, norm_type=1)
    loss = model.train().step(next(iter(loop.loader)))
    with pytest.raises(RuntimeError, match="does not require grad"):  # a second backward
        loop.accelerator.backward(loss)
    steps = iter(loop.loader)
    loop.model.step(next(steps))
    loop.model.save_state(tmp_path / "state", loop.schedule)
    with pytest.raises(ValueError, match="before the loop"):
        model.load_state(tmp_path / "state", loop.schedule)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="no state"):
        model.save_state(tmp_path, loop.schedule)
    with pytest.raises(ValueError, match="accelerator.prepare"):
        model.save_state(tmp_path / "state", loop.accelerator.prepare(loop.schedule))
