"""A plan in a loop of one's own gives the losses, norms and weights of the Trainer, and of the stock one."""

import math
from collections.abc import Callable
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
from tests.deep_cases import deep
from tests.distributed import assert_ranks_raise, run_distributed

from . import runs

LM, VISION = "language_model", "vision"
FAMILY = "llava"
RATE, EPSILON, STEPS = 1e-3, 1e-4, 4
ARGUMENTS: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": RATE, "adam_epsilon": EPSILON}
BATCHES = {"global_batch_size": runs.GLOBAL_BATCH, "per_device_train_batch_size": 2}
TWO = {VISION: {}, LM: {}}
TP_AND_COPIES = {VISION: {"dp_size": 2}, LM: {"tp_size": 2}}
STAGES_AND_SLICES = {VISION: {"dp_size": 2, "zero_stage": 2}, LM: {"pp_size": 2}}


def groups_of(model: Any) -> list[dict[str, Any]]:
    """The groups of the stock Trainer, with weight decay and without."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name in decayed], "weight_decay": runs.COMMON["weight_decay"]},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]


def scheduled(optimizer: Any) -> Any:
    return get_cosine_schedule_with_warmup(optimizer, runs.COMMON["warmup_steps"], STEPS)


class Loop:
    """A loop with the optimizer and the schedule of the Trainer's run."""

    def __init__(
        self,
        plan: Any,
        accelerator: Accelerator | None = None,
        foreach: bool | None = None,
        groups: Callable[[Any], list[dict[str, Any]]] = groups_of,
        is_scheduled: bool = True,
        **settings: Any,
    ):
        torch.set_num_threads(1)
        model = tiny.FAMILIES[FAMILY]()
        self.accelerator = accelerator or Accelerator(cpu=True)
        self.data = tiny.make_dataset(FAMILY, runs.SAMPLES)
        optimizer = AdamW(groups(model), lr=RATE, eps=EPSILON, foreach=foreach)
        self.schedule: Any = scheduled(optimizer) if is_scheduled else None
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


def saved_loop(folder: Path, plan: Any, **settings: Any) -> Loop:
    """A loop whose first two steps are in a state."""
    loop = Loop(plan, **settings)
    loop.run(2)
    loop.model.save_state(folder / "state", loop.schedule)
    return loop


def to_and_from_a_trainer(folder: Path) -> tuple[runs.Run, ...]:
    """A loop, a Trainer that goes on from its state, and a loop from the checkpoint of that one."""
    straight = saved_loop(folder, TWO)
    run = straight.run()
    run.metrics = straight.model.evaluate(straight.data[:7])
    straight.model.save_pretrained(folder / "model")
    trainer = runs.make_trainer(FAMILY, TWO, str(folder / "trainer"), save_strategy="epoch", **ARGUMENTS)
    in_trainer = runs.run_of(trainer, checkpoint=str(folder / "state"))
    return run, in_trainer, Loop(TWO).resumed(folder / "trainer" / "checkpoint-3")


def found_and_rounded() -> tuple[runs.Run, ...]:
    """Loops with the plan that a search finds, and pairs of loops and others that are equal to the bit."""
    searched = Loop("auto")
    args = searched.model._run.args
    names = ("per_device_train_batch_size", "microbatch_assignment")
    by_file = Loop(searched.model.plan, **{name: getattr(args, name) for name in names})
    by_auto = searched.run(), by_file.run()
    AcceleratorState._reset_state()
    rounded = Loop(TWO, Accelerator(cpu=True, mixed_precision="bf16")).run()
    return *by_auto, rounded, runs.parallel_run(FAMILY, TWO, bf16=True, **ARGUMENTS)


def from_a_state(folder: Path, plan: Any) -> runs.Run:
    return Loop(plan).resumed(folder / "state")


def four_ranks(folder: Path) -> tuple[runs.Run, ...]:
    straight = saved_loop(folder, TP_AND_COPIES, foreach=True)  # whole and cut parameters in one group
    return straight.run(), from_a_state(folder, STAGES_AND_SLICES)


@pytest.fixture(scope="module")
def reference() -> runs.Run:
    return runs.stock(FAMILY, evaluate=True, per_device_eval_batch_size=8, **ARGUMENTS)


def part(run: runs.Run, first: int) -> runs.Run:
    """The steps from one on."""
    return runs.Run(run.logs[first:], run.weights)


@pytest.mark.distributed
def test_a_loop_on_two_ranks_goes_on_as_a_trainer_and_back(reference: runs.Run, tmp_path: Path):
    ranks = run_distributed(to_and_from_a_trainer, 2, tmp_path, timeout=200)
    straight, trainer, back = ranks[0]
    runs.assert_same_run(straight, reference)
    runs.assert_same_run(back, part(reference, 3))
    saved = LlavaForConditionalGeneration.from_pretrained(tmp_path / "model").state_dict()
    for name, want in (straight.weights or {}).items():
        assert torch.equal(saved[name], want)
        torch.testing.assert_close((trainer.weights or {})[name], want, rtol=2e-5, atol=2e-6)
    for rank in ranks:
        assert rank[0].logs == straight.logs
        assert rank[0].metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=2e-5)


@pytest.mark.deep
@pytest.mark.distributed
def test_a_loop_with_the_plan_of_a_search_or_in_bfloat16_is_the_trainer(reference: runs.Run):
    searched, by_file, rounded, trainer = run_distributed(found_and_rounded, 2, timeout=200)[0]
    runs.assert_same_run(searched, reference)
    assert searched.logs == by_file.logs and rounded.logs == trainer.logs != searched.logs


@pytest.mark.deep
@pytest.mark.distributed
def test_a_loop_goes_on_under_another_plan_on_other_ranks(reference: runs.Run, tmp_path: Path):
    straight, other = run_distributed(four_ranks, 4, tmp_path, timeout=200)[0]
    runs.assert_same_run(straight, reference)
    on_two = run_distributed(from_a_state, 2, tmp_path, TWO, timeout=200)
    for resumed in (other, on_two[0]):
        runs.assert_same_run(resumed, part(reference, 2))
    assert on_two[1].logs == on_two[0].logs


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


@pytest.mark.parametrize(("plan", "packing"), [({}, None), deep({}, True), deep("auto", None)])
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
