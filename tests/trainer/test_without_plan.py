"""Without a plan: DDP, FSDP2 and DeepSpeed as the stock Trainer runs them, with arranged batches and packing."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainerCallback

from tests import tiny
from tests.deep_cases import deep
from tests.distributed import assert_ranks_raise, run_distributed
from tests.streams import Opaque

from . import engines, runs

pytestmark = pytest.mark.distributed

SAMPLES = 24
STEPS = {"max_steps": 5, "weight_decay": 0.0}  # DeepSpeed also decays weights that no forward reads
ARRANGED = {"microbatch_assignment": "hierarchical"}
SHAPES = [tiny.Shape(number % 3 and 1 + number % 2, 0, 3 + 7 * number % 23) for number in range(SAMPLES)]
"""A third of the samples has no image; lengths differ."""
LAYERS = {"llava": ["LlamaDecoderLayer", "CLIPEncoderLayer"], "qwen2_5_vl": None, "llama": None}
"""What FSDP2 wraps; the default of tiny Llava names layers that it hasn't got."""


def data_of(family: str, size: int = SAMPLES) -> list[dict[str, Any]]:
    return tiny.make_dataset(family, size, shapes=SHAPES)


class Collator(TrainerCallback):
    """Pads samples; keeps the lengths of those in each batch, without what is measured before the first step."""

    def __init__(self, family: str):
        self.collate = tiny.collate(family)
        self.batches: list[list[int]] = []

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        self.batches.append([len(sample["input_ids"]) for sample in samples])
        return self.collate(samples)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.batches.clear()


def make_trainer(engine: str, family: str = "llava", size: int = SAMPLES, **arguments: Any) -> Any:
    """Our Trainer on this rank."""
    # Before the arguments, which make DeepSpeed shard what is built later.
    model: Any = arguments.pop("model", None) or tiny.FAMILIES[family]()
    model._no_split_modules = LAYERS[family] or model._no_split_modules
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    collator = Collator(family)
    words = {"model": model, "data": data_of(family, size), "data_collator": collator, "callbacks": [collator]}
    trainer = runs.our_trainer(family, **words, **{**sizes, **STEPS, **engines.arguments_of(engine), **arguments})
    trainer.batches = collator.batches
    return trainer


def run(
    engine: str, family: str = "llava", checkpoint: str | None = None, evaluate: bool = False, **arguments: Any
) -> tuple[runs.Run, list]:
    """Trains on this rank; the run with the weights of all ranks, and the lengths of samples by batch."""
    trainer = make_trainer(engine, family, **arguments)
    trainer.train(resume_from_checkpoint=checkpoint)
    batches = trainer.batches.copy()
    metrics = trainer.evaluate() if evaluate else {}
    return runs.Run(runs.step_logs(trainer), engines.whole_weights(trainer), metrics), batches


def assert_trains_alike(outcomes: list[tuple[runs.Run, list]], family: str = "llava", **arguments: Any) -> None:
    """The logs and weights of the stock Trainer with the same global batches; as many batches on each rank."""
    arguments = {"per_device_train_batch_size": 4 * len(outcomes), **STEPS, **arguments}
    wanted = runs.stock(family, data=data_of(family), **arguments)
    runs.assert_same_run(outcomes[0][0], wanted)
    if wanted.metrics:
        assert outcomes[0][0].metrics["eval_loss"] == pytest.approx(wanted.metrics["eval_loss"], rel=2e-5)
    assert len({len(batches) for _, batches in outcomes}) == 1


@pytest.mark.parametrize(
    ("engine", "world_size"), [("ddp", 2), deep("fsdp2", 2), deep("zero3", 2), deep("fsdp2", 4), deep("zero2", 2)]
)
def test_arranged_batches_train_as_on_one_process(engine: str, world_size: int):
    outcomes = run_distributed(run, world_size, engine, timeout=150, **ARRANGED)
    assert_trains_alike(outcomes)
    assert len({len(batch) for _, batches in outcomes for batch in batches}) > 1, "batches have one size"


@pytest.mark.parametrize(
    ("engine", "evaluation"),
    # Batches of one sample are those of one process, too. FSDP would need an image in each.
    [("ddp", {"evaluate": True, "per_device_eval_batch_size": 1}), deep("fsdp2", {})],
)
def test_losses_are_means_over_tokens_for_models_that_do_not_count_them(engine: str, evaluation: dict[str, Any]):
    outcomes = run_distributed(run, 2, engine, "qwen2_5_vl", timeout=150, **evaluation, **ARRANGED)
    assert_trains_alike(outcomes, "qwen2_5_vl", **evaluation)


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [deep("zero1", {"packing": True, **ARRANGED}), deep("ddp", {"microbatch_assignment": "disttrain"})],
    ids=["packed rows", "another arrangement"],
)
def test_what_else_is_arranged_trains_alike(engine: str, arguments: dict[str, Any]):
    assert_trains_alike(run_distributed(run, 2, engine, timeout=150, **arguments))


@pytest.mark.deep
def test_an_incomplete_epoch_has_the_batches_of_the_stock_trainer():
    stock = run_distributed(run, 2, "ddp", size=21, timeout=100)
    arranged = run_distributed(run, 2, "ddp", size=21, timeout=100, **ARRANGED)
    runs.assert_same_run(arranged[0][0], stock[0][0])
    assert all_lengths(arranged) == all_lengths(stock)


def all_lengths(outcomes: list[tuple[runs.Run, list]]) -> list[int]:
    """Lengths of the samples of the five steps, without what is read ahead."""
    return sorted(length for _, batches in outcomes for batch in batches[:10] for length in batch)


def straight_and_resumed(engine: str, family: str, folder: str) -> list[tuple[runs.Run, list]]:
    # Torch loads no state into FSDP where no parameter has any, as with SGD. Of Llava no forward reads the last layer.
    optimizer = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 4}
    saving = {"output_dir": folder, "save_strategy": "steps", "save_steps": 2, **optimizer, **ARRANGED}
    return [run(engine, family, checkpoint, **saving) for checkpoint in (None, f"{folder}/checkpoint-2")]


@pytest.mark.deep
@pytest.mark.parametrize(("engine", "family"), [("fsdp2", "qwen2_5_vl"), ("ddp", "llava"), ("zero2", "llava")])
def test_a_run_goes_on_in_the_middle_of_an_epoch(engine: str, family: str, tmp_path: Path):
    ranks = run_distributed(straight_and_resumed, 2, engine, family, str(tmp_path), timeout=150)
    (straight, _), (resumed, _) = ranks[0]
    runs.assert_same_run(resumed, straight)
    for (_, batches), (_, after) in ranks:
        assert after[-4:] == batches[-4:]


def adapted() -> Any:
    """Llava with adapters, the matrices of which are not zero."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False)
    return get_peft_model(tiny.FAMILIES["llava"](), config, adapter_name="mine")


def gathered(engine: str, folder: str, adapters: bool) -> list[dict[str, torch.Tensor] | None]:
    """Weights and buffers of the whole model before and after training, which the Trainer also saves."""
    trainer = make_trainer(engine, optim="adamw_torch", model=adapted() if adapters else None, **ARRANGED)
    found = []
    for trains in (False, True):
        if trains:
            trainer.train()
        whole = trainer.gather_model()
        assert isinstance(whole, PeftModel) is (adapters and whole is not None)
        found.append(whole if whole is None else copy.deepcopy({**whole.state_dict(), **dict(whole.named_buffers())}))
    trainer.save_model(folder)
    return found


@pytest.mark.parametrize(
    ("engine", "adapters"), [deep("zero3", False), deep("fsdp2", True), deep("zero3", True), deep("fsdp2", False)]
)
def test_the_gathered_model_is_whole(engine: str, adapters: bool, tmp_path: Path):
    (before, after), others = run_distributed(gathered, 2, engine, str(tmp_path), adapters, timeout=150)
    assert others == [None, None] and before is not None and after is not None
    made: Any = adapted() if adapters else tiny.FAMILIES["llava"]()
    saved: Any = tiny.FAMILIES["llava"]()
    if adapters:
        saved = PeftModel.from_pretrained(saved, str(tmp_path / "mine"), adapter_name="mine")
    else:
        saved = type(saved).from_pretrained(tmp_path)
    for found, model in ((before, made), (after, saved)):
        wanted = {**model.state_dict(), **dict(model.named_buffers())}
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
    assert any(not torch.equal(after[name], value) for name, value in before.items())


REFUSED = {
    "tapered": ({"microbatch_assignment": "tapered"}, "tapered"),
    "own tokens": ({"average_tokens_across_devices": False}, "each rank would weigh its tokens"),
    "sampler": ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
    "split": ({"accelerator_config": {"split_batches": True}}, "`split_batches`"),
    "dispatch": ({"accelerator_config": {"dispatch_batches": True}}, "`dispatch_batches`"),
    "uneven": ({"accelerator_config": {"even_batches": False}}, "different numbers of batches"),
    "of unknown size": ({}, "`token_columns`"),
}


def refusals() -> dict[str, str]:
    """Case -> why it is refused on this rank, when the Trainer is made or trains."""
    found = {}
    for name, (arguments, _) in REFUSED.items():
        with pytest.raises(ValueError) as refused:
            trainer = make_trainer("ddp", **{**ARRANGED, **arguments})
            trainer.train_dataset = Opaque(data_of("llava", 8))
            trainer.train()
        found[name] = str(refused.value)
    return found


def test_what_does_not_go_together_is_refused_on_every_rank():
    first, second = run_distributed(refusals, 2)
    assert first == second
    for name, (_, text) in REFUSED.items():
        assert "microbatch_assignment" in first[name] and text in first[name], first[name]


def one_image() -> None:
    trainer = make_trainer("fsdp2", **ARRANGED)
    trainer.train_dataset = tiny.make_dataset("llava", 8, shapes=[tiny.Shape(not n, 0, 4 + n) for n in range(8)])
    trainer.train()


@pytest.mark.deep
def test_too_few_images_for_the_ranks_of_fsdp_are_refused():
    assert_ranks_raise(one_image, 2, match="1 of the 8 samples .*`vision`")
