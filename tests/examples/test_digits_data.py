"""The data of the digits example: splits, answers, labels, and how much samples differ."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from digits import LETTERS, QUESTIONS, DigitImages, DigitQuestions, build_processor  # noqa: E402

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


def test_samples_are_functions_of_seed_and_index():
    first, again, other = (DigitQuestions(PROCESSOR, "train", 30, seed=seed) for seed in (5, 5, 6))
    for index in reversed(range(30)):
        left, right = first[index], again[index]
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    assert any(first.draw(index) != other.draw(index) for index in range(30))
