"""
Questions about handwritten digits: the data of `train_digits_vlm.py`.

A sample shows one to twelve of scikit-learn's 8x8 digits, or has the digits as text, and asks to read them, to count them or for
the largest one. Prompts are from two words to some sentences long, so that samples differ widely in vision work and in text work.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import LlavaProcessor, PreTrainedTokenizerFast, SiglipImageProcessorPil


IMAGE_SIZE = 8
LETTERS = "ABCDEFGHIJKL"
MAX_DIGITS = len(LETTERS)
NUM_HELD_OUT_IMAGES = 297
TEXT_ONLY_SHARE = 0.15
IGNORE_INDEX = -100

QUESTIONS = {
    "read": ("read .", "which digits are these ?", "please write down each digit from left to right and leave none out ."),
    "count": ("count .", "how many digits are there ?", "please say in one number how many digits were given to you in all ."),
    "largest": ("largest ?", "which digit is the largest ?", "please find the digit of the highest value and give only that one ."),
}
SENTENCES = (
    "these digits were written by hand a long time ago .",
    "some of them are hard to read even for a person .",
    "take the time that you need and check each of them twice .",
    "the answer is one line and has no other text in it .",
    "many people wrote them on small forms with a pen .",
    "each form was scanned and then made smaller .",
)


def build_processor(patch_size: int) -> LlavaProcessor:
    """A `LlavaProcessor` of its own for this data: 8x8 images, one token a word."""
    texts = [*SENTENCES, *(text for forms in QUESTIONS.values() for text in forms), "digits :"]
    words = sorted({word for text in texts for word in text.split()})
    numbers = [str(number) for number in range(MAX_DIGITS + 1)]
    vocabulary = ["<pad>", "<unk>", "<s>", "</s>", "<image>", *numbers, *LETTERS, *words]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<pad>",
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            extra_special_tokens={"image_token": "<image>"},
        ),
        patch_size=patch_size,
        vision_feature_select_strategy="full",
    )


class DigitImages:
    """The images of one split of scikit-learn's digits, processed once: `pixel_values` `[n, 3, 8, 8]` and `digits` `[n]`."""

    def __init__(self, processor: LlavaProcessor, split: str):
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        ids = order[:NUM_HELD_OUT_IMAGES] if split == "test" else order[NUM_HELD_OUT_IMAGES:]
        images = [Image.fromarray((digits.images[i] * 255 / 16).astype(np.uint8)).convert("RGB") for i in ids]
        self.ids = ids
        self.digits = digits.target[ids]
        self.pixel_values = processor.image_processor(images, return_tensors="pt")["pixel_values"]


class DigitQuestions(Dataset):
    """
    Questions drawn from the images of one split; item `i` is a function of `seed` and `i` alone.

    Args:
        processor ([`~transformers.LlavaProcessor`]): From [`build_processor`].
        split (`str`): `"train"` or `"test"`; the two share no image.
        num_samples (`int`): Length of the dataset.
        seed (`int`, *optional*, defaults to 0): Of the questions.
    """

    def __init__(self, processor: LlavaProcessor, split: str, num_samples: int, seed: int = 0):
        self.processor = processor
        self.images = DigitImages(processor, split)
        self.augment = split == "train"
        self.num_samples = num_samples
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def draw(self, index: int) -> tuple[str, str, list[int]]:
        """Prompt, answer and shown images of a sample; a text-only sample shows none."""
        rng = random.Random(self.seed * 1_000_003 + index)
        shown = rng.choices(range(len(self.images.digits)), k=rng.randint(1, MAX_DIGITS))
        digits = [int(self.images.digits[i]) for i in shown]
        text_only = rng.random() < TEXT_ONLY_SHARE
        task = rng.choice(list(QUESTIONS))
        sentences = rng.choices(SENTENCES, k=max(0, rng.randint(-3, 3)))
        given = " ".join(f"{digit if text_only else '<image>'} {letter}" for letter, digit in zip(LETTERS, digits))
        answer = {"read": " ".join(f"{letter} {digit}" for letter, digit in zip(LETTERS, digits)), "count": str(len(digits)), "largest": str(max(digits))}[task]
        return " ".join([*sentences, "digits :", given, rng.choice(QUESTIONS[task])]), answer, [] if text_only else shown

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"Sample {index} of {self.num_samples}.")
        prompt, answer, shown = self.draw(index)
        tokenizer, image_token = self.processor.tokenizer, self.processor.image_token
        num_tokens = (IMAGE_SIZE // self.processor.patch_size) ** 2
        prompt_ids = tokenizer("<s> " + prompt.replace(image_token, image_token * num_tokens)).input_ids
        answer_ids = tokenizer(f"{answer} </s>").input_ids
        item = {
            "input_ids": torch.tensor(prompt_ids + answer_ids),
            "attention_mask": torch.ones(len(prompt_ids) + len(answer_ids), dtype=torch.long),
            "labels": torch.tensor([IGNORE_INDEX] * len(prompt_ids) + answer_ids),
        }
        if shown:
            pixel_values = self.images.pixel_values[shown]
            if self.augment:
                shifts = np.random.default_rng((self.seed, index)).integers(-1, 2, size=2).tolist()
                pixel_values = torch.roll(pixel_values, shifts, dims=(2, 3))
            item["pixel_values"] = pixel_values
        return item


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads the text to the longest sample and concatenates the images; a batch without images has no `pixel_values`."""
    padding = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE_INDEX}
    batch = {
        name: torch.nn.utils.rnn.pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)
        for name, value in padding.items()
    }
    images = [sample["pixel_values"] for sample in samples if "pixel_values" in sample]
    if images:
        batch["pixel_values"] = torch.cat(images)
    return batch
