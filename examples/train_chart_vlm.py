"""
Trains a small Qwen2.5-VL on charts of many sizes and tables of many lengths, in minutes on two CPU cores.

Work of the vision encoder and work of the language model differ from sample to sample, independently of each other
(`charts.py`). On four processes the encoder has two ranks and the language model two pipeline stages on two more; each
global batch is arranged so that all microbatches take about as long.

```bash
ACCELERATE_USE_CPU=true accelerate launch --config_file examples/accelerate_configs/one_host_4cpu.yaml \
    examples/train_chart_vlm.py --output_dir out/charts
torchrun --nproc-per-node 4 examples/train_chart_vlm.py --output_dir out/charts --use_cpu
python examples/train_chart_vlm.py --output_dir out/charts --use_cpu
```

`--microbatch_assignment contiguous` trains on the sampler's own order: the same losses, other microbatches. `--packing
true` computes each microbatch as one row without padding, to the same losses again.

The output folder gets the checkpoints, the model and its processor for plain transformers
(`Qwen2_5_VLForConditionalGeneration.from_pretrained("out/charts")`), `schedule.png` and a model card.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from charts import SPECIAL_TOKENS, build_processor, chart_dataset
from datasets import Dataset
from transformers import (
    AutoProcessor,
    EvalPrediction,
    HfArgumentParser,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    set_seed,
)
from transformers.utils import logging

from hf_mmparallel import MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.data import ChatCollator

DEFAULTS = {
    "output_dir": "out/charts",
    "global_batch_size": 32,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 16,
    "num_train_epochs": 4,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 30,
    "adam_beta2": 0.98,
    "logging_steps": 20,
    "save_strategy": "no",
    "report_to": "none",
    "remove_unused_columns": False,
}
STD_BEFORE, STD_AFTER = "parallel/workload_std_before/", "parallel/workload_std/"
NUM_SHOWN = 4
MOST_NEW_TOKENS = 40
FOUR_RANKS = {"vision": {"dp_size": 2}, "language_model": {"pp_size": 2}}


@dataclass
class ScriptArguments:
    """The model and the amount of data."""

    num_train_samples: int = field(default=32 * 100, metadata={"help": "Charts to train on."})
    num_eval_samples: int = field(default=300, metadata={"help": "Held-out charts."})
    vision_hidden_size: int = field(default=64, metadata={"help": "Width of the vision encoder."})
    hidden_size: int = field(default=96, metadata={"help": "Width of the language model."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Layers of the language model."})


def build_model(script_args: ScriptArguments, processor: ProcessorMixin) -> Qwen2_5_VLForConditionalGeneration:
    """A Qwen2.5-VL with random weights."""
    tokenizer, images = processor.tokenizer, processor.image_processor
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL_TOKENS.items()}
    num_pairs = script_args.hidden_size // 4 // 2  # of rotated dimensions of a head
    vision_config = {
        "depth": 3,
        "hidden_size": script_args.vision_hidden_size,
        "out_hidden_size": script_args.hidden_size,
        "intermediate_size": 2 * script_args.vision_hidden_size,
        "num_heads": 4,
        "patch_size": images.patch_size,
        "temporal_patch_size": images.temporal_patch_size,
        "spatial_merge_size": images.merge_size,
        "fullatt_block_indexes": [0, 1, 2],
        "initializer_range": 0.05,
    }
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": script_args.hidden_size,
        "intermediate_size": 2 * script_args.hidden_size,
        "num_hidden_layers": script_args.num_hidden_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "initializer_range": 0.05,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "mrope_section": [num_pairs - 2 * (num_pairs // 3), num_pairs // 3, num_pairs // 3],
        },
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = Qwen2_5_VLConfig(
        vision_config=vision_config,
        text_config=text_config,
        tie_word_embeddings=False,
        **{name: ids[name] for name in names},
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def choose_tokens(logits, labels) -> torch.Tensor:
    """The likeliest token at each position, which is all that the metric needs."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


class AnswersRight:
    """
    The share of answers that are right from the first token to the last, by task.

    Args:
        tasks (`list[str]`): The task of each sample, in the order of the dataset.
    """

    def __init__(self, tasks: list[str]):
        self.tasks = np.array(tasks)

    def __call__(self, evaluated: EvalPrediction) -> dict[str, float]:
        predictions, labels = np.asarray(evaluated.predictions)[:, :-1], np.asarray(evaluated.label_ids)[:, 1:]
        right = ((predictions == labels) | (labels == -100)).all(1)
        return {f"right/{task}": float(right[self.tasks == task].mean()) for task in sorted(set(self.tasks.tolist()))}


def balance_lines(assignment: str, log_history: list[dict[str, float]]) -> list[str]:
    """Balance of the microbatches of the run, from its log; empty without a plan."""
    logged = [entry for entry in log_history if "parallel/deferred_fraction" in entry]
    if not logged:
        return []
    mean = {name: float(np.mean([entry.get(name, np.nan) for entry in logged])) for name in logged[-1]}
    modules = [name.removeprefix(STD_AFTER) for name in mean if name.startswith(STD_AFTER)]
    return [
        f"Samples arranged by `{assignment}`, {mean['parallel/deferred_fraction']:.1%} of them deferred.",
        *(
            f"Standard deviation of the predicted forward of a microbatch of {module}: "
            f"{mean[STD_BEFORE + module]:.3f} ms in the sampler's order, {mean[STD_AFTER + module]:.3f} ms arranged."
            for module in modules
        ),
    ]


@torch.no_grad()
def answer_some(folder: str, dataset: Dataset) -> None:
    """Asks the saved model about the first held-out charts, with plain transformers."""
    processor = AutoProcessor.from_pretrained(folder)
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
    for index in range(min(NUM_SHOWN, len(dataset))):
        sample: Any = dataset[index]
        question, answer = sample["messages"]
        text = processor.apply_chat_template([question], add_generation_prompt=True)
        inputs = processor(text=[text], images=sample["images"] or None, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        given = model.generate(**inputs, max_new_tokens=MOST_NEW_TOKENS, do_sample=False)[0, length:]
        asked = question["content"][-1]["text"].split("\n")[-1]
        said, right = processor.decode(given, skip_special_tokens=True), answer["content"][0]["text"]
        print(f"{asked} {said!r}, right is {right!r}.")


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, MultimodalTrainingArguments))
    parser.set_defaults(**DEFAULTS)
    script_args, args = parser.parse_args_into_dataclasses()
    if args.parallel is None and args.world_size == 4:
        args.parallel = FOUR_RANKS
    logging.disable_progress_bar()  # those of loading and saving; the Trainer's own stays

    train_dataset = chart_dataset(script_args.num_train_samples)
    eval_dataset = chart_dataset(script_args.num_eval_samples, seed=1)
    processor = build_processor(train_dataset)
    set_seed(args.seed)
    trainer = MultimodalParallelTrainer(
        model=build_model(script_args, processor),
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=ChatCollator(processor),
        processing_class=processor,
        compute_metrics=AnswersRight(eval_dataset["task"]),
        preprocess_logits_for_metrics=choose_tokens,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    # the stock Trainer gathers all outputs, of which batches without images have fewer
    metrics = trainer.evaluate(ignore_keys=["cache", "past_key_values", "image_outputs"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    nowhere: list[str] = []  # the set is not on the Hub
    trainer.create_model_card(
        model_name="chart-vlm", tasks="image-text-to-text", dataset="charts", dataset_tags=nowhere
    )
    if trainer.is_world_process_zero():
        planner = trainer.engine and trainer.engine.planner  # its arrangement was chosen if `args` name none
        print("\n".join(balance_lines(planner.arrangement if planner else "", trainer.state.log_history)))
        answer_some(args.output_dir, eval_dataset)


if __name__ == "__main__":
    main()
