"""
One model that reads and draws handwritten digits: a vision encoder, a language model, and a U-Net behind it.

```bash
torchrun --nproc-per-node 4 examples/train_any_to_any.py --output_dir out/any --use_cpu
```

Half of the samples show one of scikit-learn's 8x8 digits and ask what it is, the others ask for a drawing of a digit.
The encoder reads pixels on one rank, the language model runs on a second one, and the U-Net draws on two. At the end
are a picture of drawn digits, `drawn.png`, how many of them a plain classifier recognises, and how many digits of
images that were held out the model reads. On one process the stock Trainer trains the same model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch.utils.data import Dataset
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    set_seed,
)

from hf_mmparallel import MultimodalModel, MultimodalParallelTrainer, MultimodalTrainingArguments
from hf_mmparallel.data import PretokenizedCollator

WORDS = ["<pad>", "<s>", "</s>", "<image>", "<draw>", "draw", "what", "is", *map(str, range(10))]
IDS = {word: place for place, word in enumerate(WORDS)}
NUM_ROWS = 4  # placeholders of a picture that is read (patches), and of one that is drawn
NUM_HELD_OUT = 297
SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
DEFAULTS = {
    "global_batch_size": 64,
    "per_device_train_batch_size": 16,
    "max_steps": 600,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 50,
    "logging_steps": 100,
    "save_strategy": "no",
    "report_to": [],
    "remove_unused_columns": False,
}
LAYOUT = {"vision": {}, "language_model": {}, "image": {"dp_size": 2}}


class DigitTasks(Dataset):
    """Reads and draws of the images of one split; each time a drawing is read it has other noise."""

    def __init__(self, split: str):
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        chosen = order[:NUM_HELD_OUT] if split == "test" else order[NUM_HELD_OUT:]
        self.digits = digits.target[chosen]
        self.pixels = torch.from_numpy(digits.images[chosen] / 8 - 1).float()[:, None]  # -1 to 1

    def __len__(self) -> int:
        return 2 * len(self.digits)

    def __getitem__(self, index: int) -> dict[str, Any]:
        place, draws = divmod(index, 2)
        digit, pixels = str(self.digits[place]), self.pixels[place]
        if draws:
            # under a plan these draws have the same seed on every rank
            seed = torch.randint(2**31, (1,))
            return {**text(["<s>", "draw", digit, *["<draw>"] * NUM_ROWS], ["</s>"]), **drawing(pixels, seed)}
        words = ["<s>", "what", "is", *["<image>"] * NUM_ROWS]
        return {**text(words, [digit, "</s>"]), "pixel_values": pixels.repeat(3, 1, 1)[None]}


def text(prompt: list[str], answer: list[str]) -> dict[str, Any]:
    """Token ids with labels for the answer."""
    ids = [IDS[word] for word in (*prompt, *answer)]
    labels = [-100] * len(prompt) + ids[len(prompt) :]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def drawing(pixels: torch.Tensor, seed: torch.Tensor) -> dict[str, Any]:
    """The target of a drawing, and the seed of its noise and time step."""
    return {"image_latents": pixels[None], "image_seeds": seed}


def build_model() -> MultimodalModel:
    """A SigLIP tower for 8x8 pixels, a Llama, and a U-Net with attention to the rows of a drawing."""
    vision = SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=8,
        patch_size=4,
        vision_use_head=False,
    )
    language = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.05,
        bos_token_id=IDS["<s>"],
        eos_token_id=IDS["</s>"],
        pad_token_id=IDS["<pad>"],
    )
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=16,
        norm_num_groups=8,
    )
    return MultimodalModel.from_unimodal(
        {"vision": SiglipVisionModel(vision)},
        LlamaForCausalLM(language),
        {"vision": IDS["<image>"], "image": IDS["<draw>"]},
        generators={"image": unet},
        generator_settings={"image": {"num_tokens": NUM_ROWS, "scheduler": SCHEDULER}},
    )


@torch.no_grad()
def draw(model: MultimodalModel, digits: list[int], seed: int = 0) -> torch.Tensor:
    """Draws digits, `(digits, 8, 8)` from -1 to 1."""
    prompts = [text(["<s>", "draw", str(digit), *["<draw>"] * NUM_ROWS], ["</s>"])["input_ids"] for digit in digits]
    rows = model(input_ids=torch.stack(prompts), output_rows=True).rows["image"]
    return model.generators["image"].generate(rows, (1, 8, 8), num_steps=25, seed=seed)[:, 0].clamp(-1, 1)


@torch.no_grad()
def share_read(model: MultimodalModel, tasks: DigitTasks) -> float:
    """Share of the images of a split whose digit the model says."""
    items = [tasks[index] for index in range(0, len(tasks), 2)]
    batch = PretokenizedCollator(IDS["<pad>"])(items)
    words = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"]).logits[:, -3].argmax(-1)
    return float((words == batch["input_ids"][:, -2]).float().mean())


class DrawingTrainer(MultimodalParallelTrainer):
    """Its model card shows what the model draws, also on the Hub (`--push_to_hub`)."""

    def create_model_card(self, *args, **kwargs) -> None:
        super().create_model_card(*args, **kwargs)
        folder = Path(self.args.output_dir or ".")
        if self.is_world_process_zero() and (folder / "drawn.png").exists():
            with (folder / "README.md").open("a") as card:
                card.write("\n## Drawn digits\n\n![ten drawings of each digit](drawn.png)\n")


def main() -> MultimodalParallelTrainer:
    """Trains, saves, draws and reads."""
    given = HfArgumentParser(MultimodalTrainingArguments)  # type: ignore[arg-type]
    given.set_defaults(**DEFAULTS)
    (args,) = given.parse_args_into_dataclasses()
    if args.parallel is None and args.world_size > 1:
        args.parallel = LAYOUT
    set_seed(args.seed)
    trainer = DrawingTrainer(
        model=build_model(),
        args=args,
        train_dataset=DigitTasks("train"),
        data_collator=PretokenizedCollator(IDS["<pad>"]),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    model = trainer.gather_model()
    if trainer.is_world_process_zero():
        report(model.eval(), Path(args.output_dir))
    trainer.create_model_card(model_name="digits-any-to-any", dataset="scikit-learn digits")
    if args.push_to_hub:
        trainer.push_to_hub(model_name="digits-any-to-any", dataset="scikit-learn digits")
    return trainer


def report(model: Any, folder: Path) -> None:
    """Writes ten drawings of each digit, and says how many of them and of the held-out images are right."""
    known, unseen = DigitTasks("train"), DigitTasks("test")
    wanted = [digit for digit in range(10) for _ in range(10)]
    drawn = draw(model, wanted)
    classifier = SVC(gamma=0.1).fit(known.pixels.flatten(1).numpy(), known.digits)
    found = classifier.predict(drawn.flatten(1).numpy())
    apart = torch.nn.functional.pad(drawn, (1, 1, 1, 1), value=-1.0)
    grid = apart.view(10, 10, 10, 10).permute(0, 2, 1, 3).reshape(100, 100)
    picture = Image.fromarray(((1 - grid.numpy()) * 127.5).astype(np.uint8))
    picture.resize((500, 500), Image.Resampling.NEAREST).save(folder / "drawn.png")
    held_out = classifier.score(unseen.pixels.flatten(1).numpy(), unseen.digits)
    print(f"drawn digits that the classifier recognises: {np.mean(found == wanted):.0%} ({folder / 'drawn.png'})")
    print(f"held-out digits that the classifier recognises: {held_out:.0%}; that the model reads: ", end="")
    print(f"{share_read(model, unseen):.0%}")


if __name__ == "__main__":
    main()
