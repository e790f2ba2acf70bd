"""Models that are not trained on the next token: refused under a plan, the stock Trainer's own at size 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.plan import LANGUAGE_MODEL
from hf_mmparallel.trainer.start_checks import check_model
from tests import tiny
from tests.trainer import runs

CASES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "tokens": (LlamaForTokenClassification, {"labels": [0, 1, 1, 0]}),
    "sequences": (LlamaForSequenceClassification, {"labels": 1}),
    "answers": (LlamaForQuestionAnswering, {"start_positions": 1, "end_positions": 2}),
    "masked": (BertForMaskedLM, {"labels": [5, 6, 7, 8]}),
}


def model_and_data(case: str) -> tuple[Any, Any]:
    cls, targets = CASES[case]
    bert = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "num_attention_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 120}
    torch.manual_seed(0)
    config = BertConfig(**sizes, **bert) if case == "masked" else LlamaConfig(**tiny.TEXT)
    samples = [{"input_ids": [5 + i, 6, 7, 8], "attention_mask": [1] * 4, **targets} for i in range(16)]
    return cls(config), samples


def arguments(smoothing: float) -> dict[str, Any]:
    return {**runs.COMMON, "max_steps": 2, "label_smoothing_factor": smoothing, "remove_unused_columns": True}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_refuses_them(case: str):
    with pytest.raises(ValueError, match=f"`{CASES[case][0].__name__}`"):
        check_model(model_and_data(case)[0])


@pytest.mark.parametrize(("case", "smoothing"), [(case, 0.0) for case in CASES] + [("tokens", 0.1)])
def test_at_size_1_they_train_as_with_the_stock_trainer(case: str, smoothing: float, tmp_path: Path):
    losses = []
    kinds: Any = (
        (Trainer, TrainingArguments, {}),
        (MultimodalParallelTrainer, MultimodalTrainingArguments, {"parallel": {LANGUAGE_MODEL: {}}}),
    )
    for cls, settings, own in kinds:
        model, data = model_and_data(case)
        args = settings(
            output_dir=str(tmp_path / cls.__name__), per_device_train_batch_size=4, **own, **arguments(smoothing)
        )
        trainer = cls(model, args, train_dataset=data)
        trainer.train()
        losses.append([row["loss"] for row in runs.step_logs(trainer)])
    assert losses[0] == losses[1] and len(losses[0]) == 2
