"""
Questions about handwritten digits: the data of `train_digits_vlm.py`.

A sample shows one to six of scikit-learn's 8x8 digits, or gives digits as text, and asks to read them, to count
them or for the largest one. Prompts are from a word to some sentences long, so that samples differ widely in vision
work and in text work.
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
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

IMAGE_SIZE = 8
LETTERS = "ABCDEF"
MAX_DIGITS = len(LETTERS)
NUM_HELD_OUT_IMAGES = 297
TEXT_ONLY_SHARE = 0.2
IGNORE_INDEX = -100

QUESTIONS = {
    "read": ("read .", "which digits are these ?", "please read them all from left to right ."),
    "count": ("count .", "how many digits are there ?", "please say how many of them were given to you ."),
    "largest": ("largest ?", "which digit is the largest ?", "please give the digit of the highest value ."),
}
SENTENCES = (
    "these digits were written by hand long ago .",
    "some are hard to read even for a person .",
    "check each of them twice .",
    "the answer is one line and nothing else .",
    "many people wrote them on small forms .",
    "each form was scanned and made smaller .",
)


def build_processor(patch_size: int) -> LlavaProcessor:
    """A `LlavaProcessor` for this data: 8x8 images, one token per word."""
    texts = [*SENTENCES, *(text for forms in QUESTIONS.values() for text in forms), "digits :"]
    words = sorted({word for text in texts for word in text.split()})
    numbers = [str(number) for number in range(10)]
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


def build_llava(processor: LlavaProcessor, hidden_size: int) -> LlavaForConditionalGeneration:
    """A small Llava with random weights, for the pictures of a processor of [`build_processor`]."""
    tokenizer = processor.tokenizer
    vision_config = SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE_SIZE,
        patch_size=processor.patch_size,
        vision_use_head=False,
    )
    text_config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=4,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlavaConfig(
        vision_config=vision_config,
        text_config=text_config,
        image_token_id=processor.image_token_id,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return LlavaForConditionalGeneration(config)


class DigitImages:
    """
    The images of one split of scikit-learn's digits, processed once.

    Args:
        processor ([`~transformers.LlavaProcessor`]): From [`build_processor`].
        split (`str`): `"train"` or `"test"`; the two share no image.

    Attributes:
        ids (`np.ndarray`): Their places in scikit-learn's data, of shape `(n,)`.
        digits (`torch.Tensor`): Which digits they are, of shape `(n,)`.
        pixel_values (`torch.Tensor`): Of shape `(n, 3, 8, 8)`.
    """

    def __init__(self, processor: LlavaProcessor, split: str):
        if split not in ("train", "test"):
            raise ValueError(f"`split={split!r}` is not known. Use 'train' or 'test'.")
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        ids = order[:NUM_HELD_OUT_IMAGES] if split == "test" else order[NUM_HELD_OUT_IMAGES:]
        pixels = (digits.images[ids] * 255 / 16).astype(np.uint8)
        images = [Image.fromarray(image).convert("RGB") for image in pixels]
        self.ids = ids
        self.digits = torch.from_numpy(digits.target[ids])
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
        num_digits = min(rng.randint(1, MAX_DIGITS), rng.randint(1, MAX_DIGITS))
        shown = rng.choices(range(len(self.images.digits)), k=num_digits)
        digits = self.images.digits[shown].tolist()
        text_only = rng.random() < TEXT_ONLY_SHARE
        task = rng.choice(list(QUESTIONS))
        sentences = rng.choices(SENTENCES, k=max(0, rng.randint(-8, 4)))
        letters = LETTERS[:num_digits]
        given = "".join(
            f" {letter} {digit if text_only else '<image>'}" for letter, digit in zip(letters, digits, strict=True)
        )
        answers = {
            "read": " ".join(f"{letter} {digit}" for letter, digit in zip(letters, digits, strict=True)),
            "count": str(num_digits),
            "largest": str(max(digits)),
        }
        prompt = " ".join([*sentences, f"digits :{given}", rng.choice(QUESTIONS[task])])
        return prompt, answers[task], [] if text_only else shown

    def token_counts(self, index: int) -> dict[str, int | list[int]]:
        """The sizes that the Trainer plans with and arranges by: tokens of the text, and those of each image."""
        prompt, answer, shown = self.draw(index)
        words = len(prompt.split()) + len(answer.split()) + 2  # `<s>` and `</s>`
        images = [self.tokens_of_image] * len(shown)
        return {"vision": images, "language_model": words - len(images) + sum(images)}

    @property
    def tokens_of_image(self) -> int:
        return (IMAGE_SIZE // self.processor.patch_size) ** 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"Sample {index} of {self.num_samples}.")
        prompt, answer, shown = self.draw(index)
        tokenizer, image_token = self.processor.tokenizer, self.processor.image_token
        prompt_ids = tokenizer("<s> " + prompt.replace(image_token, image_token * self.tokens_of_image)).input_ids
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
