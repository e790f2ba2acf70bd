"""TRL's own trainers with `"bitfield"` attention, against `"sdpa"`."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from hf_mmparallel import ChatCollator, PackingCollator
from tests import tiny
from tests.data import processors
from tests.data.conversations import random_image

PACKED = {
    "packing": {"packing": True, "max_length": 24},
    "padding free": {"padding_free": True, "max_length": None},
    "padding free, one sample a row": {"padding_free": True, "max_length": None, "per_device_train_batch_size": 1},
    "padded": {},
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), pad_token="<pad>", eos_token="<eos>")


def samples() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 20, (16,), generator=generator)
    rows = [torch.randint(2, 90, (length,), generator=generator) for length in lengths.tolist()]
    return Dataset.from_list([{"input_ids": row.tolist()} for row in rows])


def losses(trainer: SFTTrainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def arguments(folder: Path, **settings: Any) -> SFTConfig:
    settings = {"per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1, "bf16": False, **settings}
    return SFTConfig(folder, report_to="none", save_strategy="no", **settings)


def of_text(attention: str, folder: Path, **settings: Any) -> SFTTrainer:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**tiny.TEXT, "pad_token_id": 0, "eos_token_id": 1}))
    model.set_attn_implementation(attention)
    args = arguments(folder, **settings)
    return SFTTrainer(model, args, train_dataset=samples(), processing_class=tokenizer())


@pytest.mark.parametrize("how", PACKED)
def test_supervised_fine_tuning_with_packed_rows(how: str, tmp_path: Path) -> None:
    found, expected = (losses(of_text(attention, tmp_path, **PACKED[how])) for attention in ("bitfield", "sdpa"))
    assert len(found) == 3 and found == pytest.approx(expected, rel=1e-5)


def of_images(folder: Path, packed: bool) -> SFTTrainer:
    """Answers of several lengths to questions about images; `PackingCollator` packs what TRL's collator pads."""
    processor = processors.llava()
    ids = {"image_token_id": processor.tokenizer.image_token_id, "vision_feature_select_strategy": "full"}
    vision = CLIPVisionConfig(**{**tiny.VISION, "image_size": 8, "patch_size": 4})
    text = LlamaConfig(**{**tiny.TEXT, "vocab_size": len(processor.tokenizer), "pad_token_id": 0})
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, **ids))
    collator = DataCollatorForVisionLanguageModeling(processor, max_length=None)
    if packed:
        model.set_attn_implementation({"text_config": "bitfield"})
        collator = PackingCollator(collator, model)
    questions = ["which digit is" + index % 5 * " this" for index in range(12)]
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": "three seven"[: 5 + index % 6]}]
        for index, question in enumerate(questions)
    ]
    rows = [{"images": [random_image((8, 8), seed)], "messages": chat} for seed, chat in enumerate(chats)]
    args = arguments(folder, max_length=None)
    return SFTTrainer(model, args, collator, train_dataset=Dataset.from_list(rows), processing_class=processor)


def test_supervised_fine_tuning_with_packed_images(tmp_path: Path) -> None:
    found, expected = (losses(of_images(tmp_path, packed)) for packed in (True, False))
    assert len(found) == 3 and found == pytest.approx(expected, rel=1e-5)


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
    model = LlamaForCausalLM(LlamaConfig(**{**tiny.TEXT, "vocab_size": len(words), "pad_token_id": 0}))
    data = Dataset.from_list(FORMATS[name])
    trainer = SFTTrainer(model, arguments(tmp_path), train_dataset=data, processing_class=words)
    collator = ChatCollator(words)
    for own, wanted in zip(FORMATS[name], trainer.train_dataset, strict=True):
        found = collator.encode(own)
        assert found["input_ids"].tolist() == wanted["input_ids"]
        if name != "ShareGPT":  # TRL's default has loss on all tokens of a conversation
            assert found["labels"].tolist() == wanted["labels"]
