"""TRL's own trainers with `"bitfield"` attention, against `"sdpa"`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import hf_mmparallel  # noqa: F401 (registers "bitfield")
from tests import tiny

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


def losses(attention: str, folder: Path, **settings: Any) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**tiny.TEXT, "pad_token_id": 0, "eos_token_id": 1}))
    model.set_attn_implementation(attention)
    settings = {"per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1, "bf16": False, **settings}
    args = SFTConfig(folder, report_to="none", save_strategy="no", **settings)
    trainer = SFTTrainer(model, args, train_dataset=samples(), processing_class=tokenizer())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("how", PACKED)
def test_supervised_fine_tuning_with_packed_rows(how: str, tmp_path: Path) -> None:
    found, expected = (losses(attention, tmp_path, **PACKED[how]) for attention in ("bitfield", "sdpa"))
    assert len(found) == 3 and found == pytest.approx(expected, rel=1e-5)
