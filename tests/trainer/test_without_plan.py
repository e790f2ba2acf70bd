"""Without a plan: DDP, FSDP2 and DeepSpeed as the stock Trainer runs them, with arranged batches and packing."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainerCallback

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import assert_ranks_raise, run_distributed

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


def make_trainer(engine: str, family: str = "llava", **arguments: Any) -> Any:
    """Our Trainer on this rank, and the lengths of the samples in each of its batches, in `batches`."""
    # Before the arguments, which make DeepSpeed shard what is built later.
    model: Any = arguments.pop("model", None) or tiny.FAMILIES[family]()
    model._no_split_modules = LAYERS[family] or model._no_split_modules
    chosen = engines.arguments_of(engine)
    size = arguments.pop("size", SAMPLES)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    values = {**runs.COMMON, **sizes, **STEPS, **chosen, **arguments}
    batches: list[list[int]] = []
    collate = tiny.collate(family)

    def collator(samples: list[dict[str, Any]]) -> dict[str, Any]:
        batches.append([len(sample["input_ids"]) for sample in samples])
        return collate(samples)

    args = MultimodalTrainingArguments(
        output_dir=values.pop("output_dir", None) or runs.run_folder(), ddp_backend="gloo", **values
    )
    data = data_of(family, size)
    trainer: Any = MultimodalParallelTrainer(
        model=model, args=args, train_dataset=data, eval_dataset=data[:7], data_collator=collator
    )
    trainer.batches = batches
    trainer.add_callback(Forget(batches))
    return trainer


class Forget(TrainerCallback):
    """Forgets the batches that were made before the first step, to measure samples."""

    def __init__(self, batches: list[list[int]]):
        self.batches = batches

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.batches.clear()


def run(
    engine: str, family: str = "llava", checkpoint: str | None = None, evaluate: bool = False, **arguments: Any
) -> tuple[runs.Run, list]:
    """Trains on this rank; the run with the weights of all ranks, and the lengths of samples by batch."""
    trainer = make_trainer(engine, family, **arguments)
    trainer.train(resume_from_checkpoint=checkpoint)
    batches = trainer.batches.copy()
    metrics = trainer.evaluate() if evaluate else {}
    return runs.Run(runs.step_logs(trainer), engines.whole_weights(trainer), metrics), batches


@cache
def reference(family: str, world_size: int, **arguments: Any) -> runs.Run:
    """The stock Trainer on one process with the same global batches."""
    result = runs.stock(family, data=data_of(family), per_device_train_batch_size=4 * world_size, **STEPS, **arguments)
    assert result.weights is not None
    return result


def assert_trains_alike(outcomes: list[tuple[runs.Run, list]], wanted: runs.Run) -> None:
    """Equal logs and weights; as many batches on each rank, which are no copies of each other."""
    runs.assert_same_run(outcomes[0][0], wanted)
    assert len({len(batches) for _, batches in outcomes}) == 1


@pytest.mark.parametrize(
    ("engine", "world_size"),
    [
        deep(engine, size, unless=size == 2 and engine in ("ddp", "fsdp2", "zero3"))
        for size in (2, 4)
        for engine in engines.ENGINES
    ],
)
def test_arranged_batches_train_as_on_one_process(engine: str, world_size: int):
    outcomes = run_distributed(run, world_size, engine, timeout=150, **ARRANGED)
    assert_trains_alike(outcomes, reference("llava", world_size))
    assert len({len(batch) for _, batches in outcomes for batch in batches}) > 1, "batches have one size"


@pytest.mark.parametrize("engine", ["ddp", deep("fsdp2")])
def test_losses_are_means_over_tokens_for_models_that_do_not_count_them(engine: str):
    # Batches of one sample are those of one process, too. FSDP would need an image in each.
    evaluates = engine == "ddp"
    settings = {"evaluate": evaluates, "per_device_eval_batch_size": 1}
    outcomes = run_distributed(run, 2, engine, "qwen2_5_vl", timeout=150, **settings, **ARRANGED)
    wanted = reference("qwen2_5_vl", 2, **settings)
    assert_trains_alike(outcomes, wanted)
    if evaluates:
        assert outcomes[0][0].metrics["eval_loss"] == pytest.approx(wanted.metrics["eval_loss"], rel=2e-5)


@pytest.mark.deep
@pytest.mark.parametrize("arrangement", ["batch_rebalance", "disttrain", "contiguous"])
def test_other_arrangements_train_alike(arrangement: str):
    outcomes = run_distributed(run, 2, "ddp", timeout=100, microbatch_assignment=arrangement)
    assert_trains_alike(outcomes, reference("llava", 2))


@pytest.mark.deep
def test_an_incomplete_epoch_has_the_batches_of_the_stock_trainer():
    stock = run_distributed(run, 2, "ddp", size=21, timeout=100)
    arranged = run_distributed(run, 2, "ddp", size=21, timeout=100, **ARRANGED)
    assert_trains_alike(arranged, stock[0][0])
    assert all_lengths(arranged) == all_lengths(stock)


def all_lengths(outcomes: list[tuple[runs.Run, list]]) -> list[int]:
    """Lengths of the samples of the five steps, without what is read ahead."""
    return sorted(length for _, batches in outcomes for batch in batches[:10] for length in batch)


@pytest.mark.parametrize("engine", [deep("ddp"), "zero1"])
def test_packed_rows_train_as_padded_ones(engine: str):
    outcomes = run_distributed(run, 2, engine, timeout=150, packing=True, **ARRANGED)
    assert_trains_alike(outcomes, reference("llava", 2))


@pytest.mark.parametrize("family", ["qwen2_5_vl", deep("llava")])
@pytest.mark.parametrize("engine", [deep("ddp"), "fsdp2", deep("zero2")])
def test_a_run_goes_on_in_the_middle_of_an_epoch(engine: str, family: str, tmp_path: Path):
    folder = str(tmp_path / "run")
    # Torch loads no state into FSDP where no parameter has any, as with SGD. Of Llava no forward reads the last layer.
    optimizer = {"optim": "adamw_torch", "learning_rate": 1e-3}
    saving = {"output_dir": folder, "save_strategy": "steps", "save_steps": 2, **optimizer, **ARRANGED}
    straight = run_distributed(run, 2, engine, family, timeout=150, **saving)
    resumed = run_distributed(run, 2, engine, family, timeout=150, checkpoint=f"{folder}/checkpoint-2", **saving)
    runs.assert_same_run(resumed[0][0], straight[0][0])
    for (_, batches), (_, after) in zip(straight, resumed, strict=True):
        assert after[-4:] == batches[-4:]


def gathered(engine: str, folder: str, adapters: bool) -> Any:
    """The whole model before and after training, and what the Trainer saves."""
    trainer = make_trainer(engine, optim="adamw_torch", model=adapted() if adapters else None, **ARRANGED)
    before = whole_state(trainer)
    trainer.train()
    after = whole_state(trainer)
    trainer.save_model(folder)
    return before, after, isinstance(trainer.gather_model(), PeftModel)


def adapted() -> Any:
    """Llava with adapters, the matrices of which are not zero."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "fc1"], init_lora_weights=False)
    return get_peft_model(tiny.FAMILIES["llava"](), config, adapter_name="mine")


def whole_state(trainer: Any) -> Any:
    """Weights and buffers of the whole model, and the logits of two samples. Collective."""
    whole = trainer.gather_model()
    if whole is None:
        return None
    batch = tiny.collate("llava")(data_of("llava")[:2])
    with torch.no_grad():
        logits = copy.deepcopy(whole).eval()(**batch).logits
    return whole.state_dict(), dict(whole.named_buffers()), logits


@pytest.mark.parametrize(
    ("engine", "adapters"),
    [
        deep(engine, adapters, unless=(engine, adapters) in (("zero3", False), ("fsdp2", True)))
        for engine in ("ddp", "fsdp2", "zero2", "zero3")
        for adapters in (False, True)
    ],
)
def test_the_gathered_model_is_whole(engine: str, adapters: bool, tmp_path: Path):
    wanted: Any = adapted() if adapters else tiny.FAMILIES["llava"]()
    (before, after, is_peft), *others = run_distributed(gathered, 2, engine, str(tmp_path), adapters, timeout=150)
    assert others == [(None, None, False)] and is_peft is adapters
    state, buffers, logits = before
    assert state.keys() == wanted.state_dict().keys()
    for name, value in wanted.state_dict().items():
        assert torch.equal(state[name], value), name
    assert buffers.keys() == dict(wanted.named_buffers()).keys()
    batch = tiny.collate("llava")(data_of("llava")[:2])
    with torch.no_grad():
        torch.testing.assert_close(logits, wanted.eval()(**batch).logits)
    saved: Any
    if adapters:
        base = tiny.FAMILIES["llava"]()
        saved = PeftModel.from_pretrained(base, str(tmp_path / "mine"), adapter_name="mine")
    else:
        saved = type(wanted).from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(after[2], saved.eval()(**batch).logits)
    assert any(not torch.equal(after[0][name], value) for name, value in state.items())


REFUSED = {
    "tapered": ({"microbatch_assignment": "tapered"}, "tapered"),
    "own tokens": ({"average_tokens_across_devices": False}, "each rank would weigh its tokens"),
    "sampler": ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
    "split": ({"accelerator_config": {"split_batches": True}}, "`split_batches`"),
    "dispatch": ({"accelerator_config": {"dispatch_batches": True}}, "`dispatch_batches`"),
    "uneven": ({"accelerator_config": {"even_batches": False}}, "different numbers of batches"),
    "of unknown size": ({}, "`token_columns`"),
}


class Opaque(torch.utils.data.Dataset):
    """A dataset of which only its own code knows the samples."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return data_of("llava")[index]


def refusals() -> dict[str, str]:
    """Case -> why it is refused on this rank, when the Trainer is made or trains."""
    found = {}
    for name, (arguments, _) in REFUSED.items():
        try:
            trainer = make_trainer("ddp", **{**ARRANGED, **arguments})
            if name == "of unknown size":
                trainer.train_dataset = Opaque()
                trainer.train()
        except ValueError as error:
            found[name] = str(error)
    return found


def test_what_does_not_go_together_is_refused_on_every_rank():
    first, second = run_distributed(refusals, 2)
    assert first == second and first.keys() == REFUSED.keys()
    for name, (_, text) in REFUSED.items():
        assert "microbatch_assignment" in first[name] and text in first[name], first[name]


@pytest.mark.deep
def test_too_few_images_for_the_ranks_of_fsdp_are_refused():
    assert_ranks_raise(one_image, 2, match="1 of the 8 samples .*`vision`")


def one_image() -> None:
    trainer = make_trainer("fsdp2", **ARRANGED)
    trainer.train_dataset = tiny.make_dataset("llava", 8, shapes=[tiny.Shape(not n, 0, 4 + n) for n in range(8)])
    trainer.train()
