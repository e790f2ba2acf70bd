"""
Trains a small Gemma3 on packed rows with `transformers.Trainer` alone, in about two minutes on two CPU cores.

The questions about handwritten digits of `digits.py` differ widely in length: more than half of a padded batch is
padding. Here each batch is one row without any: `"bitfield"` attention keeps its samples apart, and lets the tokens of
an image see each other both ways, as Gemma3 wants it. Two things make it so, and nothing else differs from any script
with the Trainer: the attention function of the language model, and the collator.

```bash
OMP_NUM_THREADS=2 python examples/train_packed_stock_trainer.py --output_dir out/packed --use_cpu
```

`--packing false` trains the same model on padded batches: the same losses, more time.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from digits import DigitQuestions, build_processor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_mmparallel import PackingCollator
from hf_mmparallel.data import PretokenizedCollator

DEFAULTS = {
    "output_dir": "out/packed",
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 32,
    "num_train_epochs": 1,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "logging_steps": 50,
    "save_strategy": "no",
    "report_to": "none",
    "remove_unused_columns": False,
}


@dataclass
class ScriptArguments:
    """The model and the amount of data."""

    packing: bool = field(default=True, metadata={"help": "One row a batch; otherwise one row a sample, padded."})
    num_train_samples: int = field(default=32 * 600, metadata={"help": "Questions to train on; each is seen once."})
    num_eval_samples: int = field(default=300, metadata={"help": "Questions about held-out images."})
    hidden_size: int = field(default=96, metadata={"help": "Width of the language model."})


class GemmaQuestions(DigitQuestions):
    """The questions with the token types of Gemma3: 1 for the tokens of an image."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        item["token_type_ids"] = (item["input_ids"] == self.processor.image_token_id).long()
        return item


def build_model(processor, hidden_size: int, packing: bool) -> Gemma3ForConditionalGeneration:
    """A Gemma3 whose images are four tokens each."""
    tokenizer = processor.tokenizer
    vision_config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": processor.image_processor.size["height"],
        "patch_size": processor.patch_size,
        "vision_use_head": False,
    }
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "query_pre_attn_scalar": hidden_size // 4,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "initializer_range": 0.05,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Gemma3Config(
        text_config=text_config,
        vision_config=vision_config,
        mm_tokens_per_image=(vision_config["image_size"] // vision_config["patch_size"]) ** 2,
        image_token_id=processor.image_token_id,
        boi_token_id=tokenizer.unk_token_id,
        eoi_token_id=tokenizer.unk_token_id,
    )
    model = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.05)
    if packing:
        model.set_attn_implementation({"text_config": "bitfield"})
    return model


def choose_tokens(logits, labels) -> torch.Tensor:
    """The likeliest token at each position, which is all that the metric needs."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def compute_metrics(evaluated) -> dict[str, float]:
    """The share of answer tokens that are right; the same for packed and padded rows."""
    predictions, labels = evaluated.predictions[:, :-1], evaluated.label_ids[:, 1:]
    return {"token_accuracy": float(np.mean((predictions == labels)[labels != -100]))}


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(**DEFAULTS)
    script_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    processor = build_processor(patch_size=4)
    model = build_model(processor, script_args.hidden_size, script_args.packing)
    collator = PretokenizedCollator(processor.tokenizer.pad_token_id)
    if script_args.packing:
        collator = PackingCollator(collator, model)

    train_dataset = GemmaQuestions(processor, "train", script_args.num_train_samples)
    batch = collator([train_dataset[i] for i in range(args.per_device_train_batch_size)])
    rows, length = batch["input_ids"].shape
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=GemmaQuestions(processor, "test", script_args.num_eval_samples, seed=1),
        data_collator=collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=choose_tokens,
    )
    result = trainer.train()
    metrics = trainer.evaluate()
    print(f"A batch of {args.per_device_train_batch_size} samples is {rows} rows of {length} tokens.")
    print(f"Trained in {result.metrics['train_runtime']:.0f} s to a loss of {result.metrics['train_loss']:.4f}.")
    print(f"Held-out answer tokens right: {metrics['eval_token_accuracy']:.1%}")


if __name__ == "__main__":
    main()
