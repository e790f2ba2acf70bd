"""The data of the digits example: splits, answers, labels, and how much samples differ."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from digits import LETTERS, MAX_DIGITS, QUESTIONS, DigitImages, DigitQuestions, build_processor  # noqa: E402

from hf_mmparallel.data import PretokenizedCollator  # noqa: E402

NUM_SAMPLES = 400


PROCESSOR = build_processor(patch_size=8)


@pytest.fixture(scope="module", params=["train", "test"])
def dataset(request):
    return DigitQuestions(PROCESSOR, request.param, NUM_SAMPLES, seed=3)


def expected_answer(prompt: str, digits: list[int]) -> str:
    """The answer, worked out from the question's words alone."""
    if re.search(r"largest|highest", prompt):
        return str(max(digits))
    if re.search(r"count|how many", prompt):
        return str(len(digits))
    return " ".join(f"{letter} {digit}" for letter, digit in zip(LETTERS, digits, strict=False))


def test_splits_share_no_image_and_hold_all():
    train, test = DigitImages(PROCESSOR, "train"), DigitImages(PROCESSOR, "test")
    assert sorted([*train.ids, *test.ids]) == list(range(1797))
    assert set(test.digits.tolist()) == set(range(10))
    with pytest.raises(ValueError, match="validation"):
        DigitImages(PROCESSOR, "validation")
    with pytest.raises(IndexError, match="5 of 5"):
        DigitQuestions(PROCESSOR, "test", 5)[5]


def test_every_question_has_its_right_answer(dataset):
    seen = set()
    for index in range(NUM_SAMPLES):
        prompt, answer, shown = dataset.draw(index)
        given = re.search(r"digits :((?: [A-L] (?:\d|<image>))+)", prompt).group(1).split()
        assert given[::2] == list(LETTERS[: len(given) // 2])
        if shown:
            assert given[1::2] == ["<image>"] * len(shown)
            digits = dataset.images.digits[shown].tolist()
        else:
            digits = [int(digit) for digit in given[1::2]]
        assert answer == expected_answer(prompt, digits)
        seen |= {task for task, forms in QUESTIONS.items() if prompt.endswith(forms)}
    assert seen == set(QUESTIONS)


def test_labels_are_the_answer_and_its_end(dataset):
    tokenizer = PROCESSOR.tokenizer
    for index in range(100):
        prompt, answer, _ = dataset.draw(index)
        ids, labels = (dataset[index][name] for name in ("input_ids", "labels"))
        target = labels != -100
        assert torch.equal(labels[target], ids[target])
        assert tokenizer.decode(ids[target]) == f"{answer} </s>"
        assert tokenizer.decode(ids[~target]) == f"<s> {prompt}"
        assert tokenizer.unk_token_id not in ids


@pytest.mark.parametrize("patch_size", [8, 4])
def test_each_image_has_its_placeholders_and_sizes_are_known_without_the_sample(patch_size):
    own = build_processor(patch_size)
    questions = DigitQuestions(own, "train", 50)
    for index, item in enumerate(map(questions.__getitem__, range(50))):
        num_images = len(item.get("pixel_values", ()))
        assert (item["input_ids"] == own.image_token_id).sum() == num_images * (8 // patch_size) ** 2
        sizes = {"vision": num_images * [(8 // patch_size) ** 2], "language_model": len(item["input_ids"])}
        assert questions.token_counts(index) == sizes


def test_samples_differ_in_vision_and_in_text_work(dataset):
    items = [dataset[index] for index in range(NUM_SAMPLES)]
    num_images = np.array([len(item.get("pixel_values", ())) for item in items])
    lengths = np.array([len(item["input_ids"]) for item in items])
    num_words = np.array([len(dataset.draw(index)[0].split()) for index in range(NUM_SAMPLES)]) - 2 * num_images
    assert set(num_images) == set(range(MAX_DIGITS + 1))
    assert 0.14 < (num_images == 0).mean() < 0.26
    assert lengths.max() > 6 * lengths.min()
    assert num_words[num_images > 0].max() > 8 * num_words[num_images > 0].min()


def test_samples_are_functions_of_seed_and_index():
    first, again, other = (DigitQuestions(PROCESSOR, "train", 30, seed=seed) for seed in (5, 5, 6))
    for index in reversed(range(30)):
        left, right = first[index], again[index]
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    assert any(first.draw(index) != other.draw(index) for index in range(30))


@pytest.mark.parametrize("split", ["train", "test"])
def test_only_training_images_are_shifted(split):
    dataset = DigitQuestions(PROCESSOR, split, 50)
    shown = {index: dataset.draw(index)[2] for index in range(50)}
    same = [
        torch.equal(dataset[index]["pixel_values"], dataset.images.pixel_values[ids])
        for index, ids in shown.items()
        if ids
    ]
    assert same and all(same) == (split == "test")


def test_the_collator_takes_text_only_batches(dataset):
    items = [dataset[index] for index in range(100)]
    text_only = [item for item in items if "pixel_values" not in item]
    collate = PretokenizedCollator(pad_token_id=PROCESSOR.tokenizer.pad_token_id)
    assert "pixel_values" not in collate(text_only)
    num_images = sum(len(item.get("pixel_values", ())) for item in items)
    assert collate(items)["pixel_values"].shape == (num_images, 3, 8, 8)


def test_a_saved_processor_makes_the_same_inputs(tmp_path):
    PROCESSOR.save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    text = "<s> digits : A <image> B <image> read ."
    images = [np.full((8, 8, 3), value, dtype=np.uint8) for value in (0, 200)]
    ours, theirs = (p(text=text, images=images, return_tensors="pt") for p in (PROCESSOR, loaded))
    assert (ours["input_ids"] == PROCESSOR.image_token_id).sum() == 2
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
