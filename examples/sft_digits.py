"""
Fine-tunes a small Llava with TRL's data and arguments: packed rows of images, and a layout for each module.

Questions about pictures of handwritten digits are conversations with images, as TRL reads them. On one process
the samples of a batch share a row, which TRL itself refuses for images; on several each module has ranks of its own.

```bash
python examples/sft_digits.py --use_cpu
accelerate launch --num_processes 2 examples/sft_digits.py --parallel '{"vision": {}, "language_model": {}}'
```

With `SFTConfig` and `SFTTrainer` of `trl` in place of the two classes below, the losses are the same, from padded
batches.
"""

import random
from dataclasses import dataclass, field

from datasets import Dataset
from digits import QUESTIONS, build_llava, build_processor
from PIL import Image
from sklearn.datasets import load_digits
from transformers import HfArgumentParser, set_seed

from hf_mmparallel import MultimodalSFTConfig, MultimodalSFTTrainer

DEFAULTS = {
    "output_dir": "out/sft",
    "per_device_train_batch_size": 16,
    "max_length": None,
    "packing": True,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "logging_steps": 10,
    "num_train_epochs": 1,
    "bf16": False,
    "save_strategy": "no",
    "report_to": "none",
}
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ ' <image>' if part.type == 'image' else ' ' + part.text }}"
    "{% endfor %}{{ ' </s>' if message.role == 'assistant' }}{% endfor %}"
)


@dataclass
class ScriptArguments:
    """The model and the amount of data."""

    num_train_samples: int = field(default=1600, metadata={"help": "Questions to train on; each is seen once."})
    hidden_size: int = field(default=96, metadata={"help": "Width of the language model."})


def conversations(num_samples: int) -> Dataset:
    """Pictures of one to twelve digits with the question which ones they are, in the columns that TRL reads."""
    digits = load_digits()
    pictures = [Image.fromarray((image * 15).astype("uint8")).convert("RGB") for image in digits.images]
    rows = []
    for index in range(num_samples):
        rng = random.Random(index)
        shown = rng.choices(range(len(pictures)), k=rng.randint(1, 12))
        question = {"role": "user", "content": rng.choice(QUESTIONS["read"])}
        answer = {"role": "assistant", "content": " ".join(str(digits.target[place]) for place in shown)}
        rows.append({"images": [pictures[place] for place in shown], "messages": [question, answer]})
    return Dataset.from_list(rows)


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, MultimodalSFTConfig))
    parser.set_defaults(**DEFAULTS)
    script_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    processor = build_processor(patch_size=4)
    processor.chat_template = TEMPLATE
    trainer = MultimodalSFTTrainer(
        model=build_llava(processor, script_args.hidden_size),
        args=args,
        train_dataset=conversations(script_args.num_train_samples),
        processing_class=processor,
    )
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"Trained in {result.metrics['train_runtime']:.0f} s to a loss of {result.metrics['train_loss']:.4f}.")


if __name__ == "__main__":
    main()
