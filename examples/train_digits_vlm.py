"""
Trains a small vision-language model to answer questions about handwritten digits, in minutes on two CPU cores.

A SigLIP vision encoder and a Llama are joined by a projector. On several processes `parallel="auto"` searches for the
layout of each of them by the sizes of the samples. `--parallel` takes a layout instead, as JSON or as the path of a
YAML file, and one process trains the same model.

```bash
ACCELERATE_USE_CPU=true accelerate launch --config_file examples/accelerate_configs/one_host_4cpu.yaml \
    examples/train_digits_vlm.py --output_dir out/digits
torchrun --nproc-per-node 4 examples/train_digits_vlm.py --output_dir out/digits --use_cpu
python examples/train_digits_vlm.py --output_dir out/digits --use_cpu
```

The output folder gets the checkpoints, `plan.html`, a model card and, in `llava`, the model for plain transformers:
`LlavaForConditionalGeneration.from_pretrained("out/digits/llava")`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from digits import DigitImages, DigitQuestions, build_processor
from rich.console import Console
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    set_seed,
)
from transformers.utils import logging

from hf_mmparallel import MultimodalModel, MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.data import PretokenizedCollator
from hf_mmparallel.modeling.llava_export import to_llava
from hf_mmparallel.planning.answer import Answer, solve
from hf_mmparallel.planning.settings import Settings
from hf_mmparallel.planning.text import print_gantt

DEFAULTS = {
    "output_dir": "out/digits",
    "global_batch_size": 64,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 16,
    "num_train_epochs": 1,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "adam_beta2": 0.98,
    "logging_steps": 10,
    "save_steps": 200,
    "save_total_limit": 1,
    "report_to": "none",
}


@dataclass
class ScriptArguments:
    """The model and the amount of data."""

    num_train_samples: int = field(default=64 * 400, metadata={"help": "Questions to train on; each is seen once."})
    num_eval_samples: int = field(default=300, metadata={"help": "Questions about held-out images."})
    encoder_warmup_steps: int = field(default=600, metadata={"help": "Steps of the encoder alone, on single digits."})
    encoder_hidden_size: int = field(default=96, metadata={"help": "Width of the vision encoder."})
    hidden_size: int = field(default=96, metadata={"help": "Width of the language model."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Layers of the language model."})


def warm_up_encoder(config: SiglipVisionConfig, processor: LlavaProcessor, num_steps: int) -> SiglipVisionModel:
    """Trains the encoder to tell single digits apart, as a stand-in for a pretrained one."""
    data = DigitImages(processor, "train")
    encoder, head = SiglipVisionModel(config), torch.nn.Linear(config.hidden_size, 10)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=max(num_steps, 1))
    for _ in range(num_steps):
        chosen = torch.randint(len(data.digits), (128,))
        shift = torch.randint(-1, 2, (2,)).tolist()
        features = encoder(torch.roll(data.pixel_values[chosen], shift, dims=(2, 3))).last_hidden_state.mean(1)
        torch.nn.functional.cross_entropy(head(features), data.digits[chosen]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return encoder


def build_model(
    script_args: ScriptArguments, args: MultimodalTrainingArguments, processor: LlavaProcessor
) -> MultimodalModel:
    """The same model on all processes: the first one of each host warms the encoder up, the others read it."""
    set_seed(args.seed)
    vision_config = SiglipVisionConfig(
        hidden_size=script_args.encoder_hidden_size,
        intermediate_size=2 * script_args.encoder_hidden_size,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=processor.image_processor.size["height"],
        patch_size=processor.patch_size,
        vision_use_head=False,
    )
    folder = Path(args.output_dir) / "encoder"
    with args.main_process_first(desc="encoder warm-up"):
        if args.local_process_index == 0:
            warm_up_encoder(vision_config, processor, script_args.encoder_warmup_steps).save_pretrained(folder)
    set_seed(args.seed)
    tokenizer = processor.tokenizer
    language_config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=script_args.hidden_size,
        intermediate_size=2 * script_args.hidden_size,
        num_hidden_layers=script_args.num_hidden_layers,
        num_attention_heads=8,
        max_position_embeddings=256,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="bitfield",  # so that a plan packs samples
    )
    return MultimodalModel.from_unimodal(
        encoders={"vision": str(folder)},
        language_model=language_config,
        token_ids={"vision": processor.image_token_id},
    )


def choose_tokens(logits, labels) -> torch.Tensor:
    """The likeliest token at each position, which is all that the metric needs."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def exact_match(predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Whether all answer tokens of a sample are right, the end of the answer among them."""
    predictions, labels = predictions[:, :-1], labels[:, 1:]
    return ((predictions == labels) | (labels == -100)).all(1)


def compute_metrics(evaluated) -> dict[str, float]:
    return {"exact_match": float(exact_match(evaluated.predictions, evaluated.label_ids).mean())}


@torch.no_grad()
def matches_of(model: LlavaForConditionalGeneration, dataset: DigitQuestions) -> np.ndarray:
    """[`exact_match`] of a model that plain transformers has loaded."""
    collate = PretokenizedCollator(dataset.processor.tokenizer.pad_token_id)
    matches = []
    for start in range(0, len(dataset), 50):
        batch = collate([dataset[i] for i in range(start, min(start + 50, len(dataset)))])
        labels = batch.pop("labels")
        matches.append(exact_match(model(**batch).logits.argmax(-1).numpy(), labels.numpy()))
    return np.concatenate(matches)


def show_answer(model: LlavaForConditionalGeneration, dataset: DigitQuestions, index: int) -> None:
    """Prints the digits of a sample, its question, and the answer that the model generates."""
    sample, decode = dataset[index], dataset.processor.tokenizer.decode
    is_prompt = sample["labels"] == -100
    prompt, right = sample["input_ids"][is_prompt], sample["labels"][~is_prompt][:-1]
    shades = ((sample["pixel_values"].mean(1) + 1) / 2 * 4).round().int()  # (images, rows, columns), 0 to 4
    for row in shades.transpose(0, 1).tolist():
        print("  ".join("".join(2 * " ░▒▓█"[shade] for shade in image) for image in row))
    batch = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt)[None]}
    generated = model.generate(**batch, pixel_values=sample["pixel_values"], do_sample=False, max_new_tokens=32)
    print("Question:", decode(prompt, skip_special_tokens=True))
    print("Answer:  ", decode(generated[0, len(prompt) :], skip_special_tokens=True), " right:", decode(right), "\n")


def gpus_text(searched: Answer, num_gpus: int = 8, gpu_type: str = "h100") -> str:
    """What the planner predicts for the same model, samples, global batch and arrangement on GPUs."""
    settings = Settings(
        num_gpus,
        gpu_type,
        global_batch_size=searched.global_batch_size,
        microbatch_size=searched.global_batch_size // num_gpus,
        schedule=searched.plan.schedule,
        microbatch_assignment=searched.arrangement,
        packing=True,
        dtype=searched.settings.dtype,
    )
    answer = solve(settings, searched.inputs)
    layouts = ", ".join(
        f"{name} {module.dp_size} x {module.pp_size} x {module.tp_size}"
        for name, module in answer.plan.modules.items()
    )
    return (
        f"The same script on {num_gpus} {gpu_type.upper()}, as predicted: {layouts} (copies x stages x tp), a step of "
        f"{answer.step_ms:.3g} ms, {answer.tokens_per_second:,.0f} tokens/s."
    )


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, MultimodalTrainingArguments))
    parser.set_defaults(**DEFAULTS)
    script_args, args = parser.parse_args_into_dataclasses()
    if args.parallel is None and args.world_size > 1:
        args.parallel = "auto"
    logging.disable_progress_bar()  # those of loading and saving; the Trainer's own stays

    processor = build_processor(patch_size=8)
    test_dataset = DigitQuestions(processor, "test", script_args.num_eval_samples, seed=1)
    trainer = MultimodalParallelTrainer(
        model=build_model(script_args, args, processor),
        args=args,
        train_dataset=DigitQuestions(processor, "train", script_args.num_train_samples),
        eval_dataset=test_dataset,
        data_collator=PretokenizedCollator(processor.tokenizer.pad_token_id),
        processing_class=processor,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=choose_tokens,
    )
    searched = None if trainer.search is None else trainer.search.answer  # on the first process, with `auto`
    if searched is not None:
        print_gantt(Console(), searched.drawn)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_model()
    trainer.create_model_card(model_name="digits-vlm", tasks="image-text-to-text", dataset="scikit-learn digits")

    predicted = trainer.predict(test_dataset)
    model = trainer.gather_model()
    if trainer.is_world_process_zero():
        folder = Path(args.output_dir) / "llava"
        to_llava(model).save_pretrained(folder)
        processor.save_pretrained(folder)
        loaded = LlavaForConditionalGeneration.from_pretrained(folder).eval()
        few = [i for i in range(len(test_dataset)) if 2 <= len(test_dataset.draw(i)[2]) <= 4]
        for index in few[:2]:
            show_answer(loaded, test_dataset, index)
        trained, reloaded = exact_match(predicted.predictions, predicted.label_ids), matches_of(loaded, test_dataset)
        print(
            f"Exactly right: {trained.mean():.1%} of {len(trained)} answers about held-out images, and "
            f"{reloaded.mean():.1%} after LlavaForConditionalGeneration.from_pretrained('{folder}')."
        )
        if searched is not None:
            print(gpus_text(searched))


if __name__ == "__main__":
    main()
