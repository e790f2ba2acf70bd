"""TRL's own trainers with `"bitfield"` attention against `"sdpa"`, and plans under them against one process."""

import copy
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from hf_mmparallel import (
    ChatCollator,
    MultimodalSFTConfig,
    MultimodalSFTTrainer,
    MultimodalTrainingArguments,
    PackingCollator,
    parallelize,
)
from tests import tiny
from tests.data import processors
from tests.data.conversations import random_image
from tests.deep_cases import deep, in_turn
from tests.distributed import run_distributed

PACKED = {
    "packing": {"packing": True, "max_length": 24},
    "padding free": {"padding_free": True, "max_length": None},
    "padding free, one sample a row": {"padding_free": True, "max_length": None, "per_device_train_batch_size": 1},
    "padded": {},
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, 90)}}
    model = Tokenizer(WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>")


def samples() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 20, (16,), generator=generator)
    rows = [torch.randint(2, 90, (length,), generator=generator) for length in lengths.tolist()]
    return Dataset.from_list([{"input_ids": row.tolist()} for row in rows])


LOGGED = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens")


def logs(trainer: Any) -> list[dict[str, float]]:
    """What each step of a training logs."""
    trainer.train()
    return [{name: entry[name] for name in LOGGED} for entry in trainer.state.log_history if "loss" in entry]


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in logs(trainer)]


def arguments(folder: Path, **settings: Any) -> SFTConfig:
    """Those of stock TRL, or ours with a plan or `ours=True`."""
    settings = {"per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1, "bf16": False, **settings}
    kind = SFTConfig
    if settings.pop("ours", False) or "parallel" in settings:
        kind = MultimodalSFTConfig
        settings = {"global_batch_size": 4, **settings}
    return kind(folder, report_to="none", save_strategy="no", **settings)


def trainer_of(model: Any, args: SFTConfig, collator: Any = None, **given: Any) -> Any:
    cls: Any = MultimodalSFTTrainer if isinstance(args, MultimodalSFTConfig) else SFTTrainer
    return cls(model, args, collator, **given)


def llama(attention: str, kind: Any = LlamaForCausalLM) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**{**tiny.TEXT, "pad_token_id": 0, "eos_token_id": 1, "num_labels": 1})
    model = kind(config)
    model.set_attn_implementation(attention)
    return model


def of_text(attention: str, folder: Path, peft_config: Any = None, **settings: Any) -> Any:
    args = arguments(folder, **settings)
    return trainer_of(
        llama(attention), args, train_dataset=samples(), processing_class=tokenizer(), peft_config=peft_config
    )


@pytest.mark.parametrize("how", [deep(how, unless=how == "packing") for how in PACKED])
def test_supervised_fine_tuning_with_packed_rows(how: str, tmp_path: Path) -> None:
    found, expected = (losses(of_text(attention, tmp_path, **PACKED[how])) for attention in ("bitfield", "sdpa"))
    assert len(found) == 3 and found == pytest.approx(expected, rel=1e-5)


def of_images(folder: Path, packed: bool, **settings: Any) -> Any:
    """Answers of several lengths to questions about images; `PackingCollator` packs what stock TRL's collator pads."""
    processor = processors.llava()
    ids = {"image_token_id": processor.tokenizer.image_token_id, "vision_feature_select_strategy": "full"}
    vision = CLIPVisionConfig(**{**tiny.VISION, "image_size": 8, "patch_size": 4})
    text = LlamaConfig(**{**tiny.TEXT, "vocab_size": len(processor.tokenizer), "pad_token_id": 0})
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, **ids))
    args = arguments(folder, max_length=None, **settings)
    collator = None
    if packed and not isinstance(args, MultimodalSFTConfig):
        model.set_attn_implementation({"text_config": "bitfield"})
        collator = PackingCollator(DataCollatorForVisionLanguageModeling(processor, max_length=None), model)
    questions = ["which digit is" + index % 5 * " this" for index in range(12)]
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": "three seven"[: 5 + index % 6]}]
        for index, question in enumerate(questions)
    ]
    rows = [{"images": [random_image((8, 8), seed)], "messages": chat} for seed, chat in enumerate(chats)]
    return trainer_of(model, args, collator, train_dataset=Dataset.from_list(rows), processing_class=processor)


@pytest.mark.deep
def test_supervised_fine_tuning_with_packed_images(tmp_path: Path) -> None:
    expected = losses(of_images(tmp_path, False))
    assert len(expected) == 3
    for ours in (of_images(tmp_path, True), of_images(tmp_path, True, ours=True, packing=True)):
        assert isinstance(ours.data_collator, PackingCollator) and losses(ours) == pytest.approx(expected, rel=1e-5)


LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "pipeline, packed": ("bitfield", {"parallel": {"language_model": {"pp_size": 2}}, "packing": True}),
    "tensor parallel, padded": ("sdpa", {"parallel": {"language_model": {"tp_size": 2}}}),
    "copies, LoRA": ("sdpa", {"parallel": {"language_model": {"dp_size": 2}}, "peft_config": LORA}),
}


ON_RANK = {"per_device_train_batch_size": 2, "ddp_backend": "gloo"}


def of_experts(folder: Path, parallel: Any = None, **settings: Any) -> Any:
    """A mixture of experts, whose load TRL has a loss over by default."""
    torch.manual_seed(0)
    config = MixtralConfig(**tiny.TEXT, num_local_experts=4, router_aux_loss_coef=0.5, eos_token_id=1)
    settings |= {} if parallel is None else {"parallel": parallel}
    args = arguments(folder, max_length=None, **settings)
    data = {"train_dataset": samples(), "processing_class": tokenizer()}
    return trainer_of(MixtralForCausalLM(config), args, **data)


def of_folder(folder: Path, **settings: Any) -> Any:
    """The text model of a folder, which the Trainer reads."""
    args = arguments(folder, max_length=None, **settings)
    return trainer_of(str(folder / "model"), args, train_dataset=samples(), processing_class=tokenizer())


PP2 = {"parallel": {"language_model": {"pp_size": 2}}}


def of_folder_on_rank(folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("trl.trainer.sft_trainer.create_model_from_path")  # reads whole models
        for dtype in ("bfloat16", "float32"):
            trainer = of_folder(folder, **ON_RANK, **PP2, model_init_kwargs={"dtype": dtype})
            assert {str(p.dtype) for p in trainer.engine.parameters()} == {f"torch.{dtype}"}
    return trainer


def of_plan(folder: Path, name: str) -> Any:
    attention, settings = PLANS[name]
    given = {**ON_RANK, "max_length": None, **settings}
    if "peft_config" in given:
        given["peft_config"] = LoraConfig(**given["peft_config"])
    return of_text(attention, folder, **given)


def of_images_on_rank(folder: Path, packing: bool) -> Any:
    layout = {"parallel": {"vision": {}, "language_model": {}}}
    trainer = of_images(folder, packing, packing=packing, **layout, **ON_RANK)
    assert trainer.training_sizes.of_rank(trainer.train_dataset) is not None  # samples are arranged by sizes
    return trainer


def of_stock(folder: Path, peft_config: Any = None) -> Any:
    return of_text("sdpa", folder, peft_config, max_length=None)


# Trainer under a plan, and the stock one with the same logs
PLANNED: dict[str, tuple[Any, Any]] = {
    "a folder": (of_folder_on_rank, of_folder),
    **{name: (functools.partial(of_plan, name=name), of_stock) for name in PLANS},
    "copies, LoRA": (
        functools.partial(of_plan, name="copies, LoRA"),
        lambda folder: of_stock(folder, LoraConfig(**LORA)),
    ),
    "mixture of experts": (lambda folder: of_experts(folder, **ON_RANK, **PP2), of_experts),
    "images": (functools.partial(of_images_on_rank, packing=False), functools.partial(of_images, packed=False)),
    "packed images": (functools.partial(of_images_on_rank, packing=True), functools.partial(of_images, packed=False)),
}


def on_ranks(folder: Path, names: list[str]) -> dict[str, list[dict[str, float]]]:
    torch.set_num_threads(1)
    return {name: logs(PLANNED[name][0](folder)) for name in names}


@pytest.mark.distributed
def test_plans_give_the_logs_of_stock_trl(tmp_path: Path) -> None:
    llama("sdpa").save_pretrained(tmp_path / "model")
    cases = in_turn(PLANNED, "pipeline, packed", "packed images")
    ranks = run_distributed(on_ranks, 2, tmp_path, [*cases], timeout=240)
    for name, (_, make) in cases.items():
        expected = logs(make(tmp_path))
        assert len(expected) == 3
        for rank in ranks:
            assert rank[name] == [pytest.approx(row, rel=2e-5) for row in expected], name


class OwnLoss(SFTTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@dataclass
class PlannedDPOConfig(DPOConfig, MultimodalTrainingArguments):
    """For a Trainer whose loss no plan can compute."""


def test_what_a_plan_can_not_compute_is_refused(tmp_path: Path) -> None:
    for setting in ({"loss_type": "dft"}, {"activation_offloading": True}):
        with pytest.raises(ValueError, match=next(iter(setting))):
            of_text("sdpa", tmp_path, **PP2, **setting)
    cases = ((OwnLoss, MultimodalSFTConfig, samples()), (DPOTrainer, PlannedDPOConfig, preferences()))
    for trainer, config, data in cases:
        args = config(tmp_path, report_to="none", bf16=False, **PP2)
        with pytest.raises(ValueError, match=f"{trainer.__name__}.compute_loss"):
            parallelize(trainer)(llama("sdpa"), args=args, train_dataset=data, processing_class=tokenizer())


def preferences() -> Dataset:
    """Prompts with an answer that is chosen and one that is rejected, of several lengths."""
    rows = [row["input_ids"] for row in samples()]
    texts = [" ".join(f"w{token}" for token in row) for row in rows]
    keys = ("prompt", "chosen", "rejected")
    return Dataset.from_list([dict(zip(keys, texts[i : i + 3], strict=True)) for i in range(0, 12, 3)])


def preference_losses(trainer_class: Any, config_class: Any, attention: str, folder: Path) -> list[float]:
    """Losses of a trainer whose model has the attention function, for 3 steps."""
    torch.manual_seed(0)
    given: dict[str, Any] = {}
    if config_class is GRPOConfig:  # in effect greedy, so that rounding can't change what is drawn
        given = {"num_generations": 2, "max_completion_length": 6, "temperature": 1e-4}
    args = config_class(
        folder,
        **given,
        per_device_train_batch_size=2,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )
    model = llama(attention, LlamaForSequenceClassification if trainer_class is RewardTrainer else LlamaForCausalLM)
    given = {"train_dataset": preferences(), "processing_class": tokenizer()}
    if trainer_class is GRPOTrainer:
        given["reward_funcs"] = lambda completions, **_: [float(number) for number in range(len(completions))]
    elif trainer_class is DPOTrainer:
        given["ref_model"] = llama(attention)
    trainer = trainer_class(model=model, args=args, **given)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "trainer_class, config_class",
    [(DPOTrainer, DPOConfig), deep(RewardTrainer, RewardConfig), deep(GRPOTrainer, GRPOConfig)],
)
def test_preferences_and_rewards(trainer_class: Any, config_class: Any, tmp_path: Path) -> None:
    found, expected = (
        preference_losses(trainer_class, config_class, attention, tmp_path) for attention in ("bitfield", "sdpa")
    )
    assert len(found) == 3 and found == pytest.approx(expected, rel=1e-4, abs=1e-6)


STRINGS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + eos_token }}\n{% endfor %}"
STRINGS += "{% if add_generation_prompt %}<assistant>{% endif %}"
QUESTION, ANSWER = ([{"role": role, "content": text}] for role, text in (("user", "which"), ("assistant", "seven")))
FORMATS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "which digit"}, {"text": "three</s>"}],
    "strings": [
        {"prompt": "which", "completion": " digit"},
        {"prompt": "wh", "completion": "ich"},  # tokens that merge
        {"prompt": "", "completion": "seven</s>"},
    ],
    "messages": [
        {"prompt": QUESTION, "completion": ANSWER},
        {"prompt": QUESTION + ANSWER, "completion": QUESTION + ANSWER},
    ],
    "ShareGPT": [
        {"conversations": [{"from": "user", "value": "which"}, {"from": "assistant", "value": "seven"}]},
    ],
}


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_and_targets_of_formats(name: str, tmp_path: Path) -> None:
    words = copy.deepcopy(processors.tokenizer())
    words.chat_template = STRINGS
    begin = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", words.bos_token_id)])
    words.backend_tokenizer.post_processor = begin  # of texts; templates write it themselves, or do without
    data = Dataset.from_list(FORMATS[name])
    trainer = SFTTrainer(llama("sdpa"), arguments(tmp_path), train_dataset=data, processing_class=words)
    collator = ChatCollator(words)
    for own, wanted in zip(FORMATS[name], trainer.train_dataset, strict=True):
        found = collator.encode(own)
        assert found["input_ids"].tolist() == wanted["input_ids"]
        if name != "ShareGPT":  # TRL's default has loss on all tokens of a conversation
            assert found["labels"].tolist() == wanted["labels"]
