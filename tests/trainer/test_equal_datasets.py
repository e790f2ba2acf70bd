"""Ranks whose datasets differ in content or order say so before the first step, whatever kind of dataset it is."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from torch.utils.data import random_split
from transformers import TrainerCallback

from tests import tiny
from tests.distributed import run_distributed

from . import runs

VISION, LM = "vision", "language_model"


def alike(size: int = 16) -> list[dict[str, Any]]:
    """Samples of one length with one image each: no size tells them apart."""
    return tiny.make_dataset("llava", size, shapes=[tiny.Shape(1, 0, 6)] * size, seed=5)


def equally_long() -> list[dict[str, Any]]:
    """The same, of one length."""
    return [sample for sample in alike(24) if len(sample["input_ids"]) == len(alike(1)[0]["input_ids"])]


def rows() -> Dataset:
    """The same as a `datasets.Dataset`."""
    return Dataset.from_list([{name: v.tolist() for name, v in sample.items()} for sample in equally_long()])


class Augmented(torch.utils.data.Dataset):
    """Equal samples whose pixels each process draws by a generator of its own."""

    def __init__(self, samples: Any):
        self.samples = samples
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {**sample, "pixel_values": torch.rand(sample["pixel_values"].shape, generator=self.generator)}


class Replacing(torch.utils.data.Dataset):
    """Gives other samples from the second step on, by a generator of its own: each process makes its own choice."""

    def __init__(self, samples: Any):
        self.samples = samples
        self.generator = random.Random(dist.get_rank())
        self.step = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[self.generator.randrange(len(self)) if self.step else index]


class CountSteps(TrainerCallback):
    """Tells a dataset the number of steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        train_dataloader.dataset.reader(LM).dataset.step = state.global_step


def shuffled_list() -> list[dict[str, Any]]:
    data = equally_long()
    return [data[i] for i in np.random.permutation(len(data))]


def mapped_alike() -> Dataset:
    """Equal content with a fingerprint of its own on each rank: the function can't be hashed."""
    noise = torch.Generator()  # what a lambda closes over is not picklable here
    data = rows().map(lambda row: {**row, "attention_mask": [1] * len(row["input_ids"]) if noise else []})
    return data


DIFFERENT: dict[str, Callable[[], Any]] = {
    "a list": shuffled_list,
    "shuffle": lambda: rows().shuffle(),
    "train_test_split": lambda: rows().train_test_split(test_size=0.25)["train"],
    "random_split": lambda: random_split(equally_long(), [0.75, 0.25])[0],  # pyright: ignore[reportArgumentType]
}
EQUAL: dict[str, Callable[[], Any]] = {
    "other fingerprints": mapped_alike,
    "shuffle with a seed": lambda: rows().shuffle(seed=1),
    "augmented pixels": lambda: Augmented(equally_long()),
}


def _said(make: Callable[[], Any], evaluates: bool = False, modules: Any = None, **settings: Any) -> str:
    """What a run with the dataset of this rank says."""
    np.random.seed(dist.get_rank())  # as processes that start by themselves
    torch.manual_seed(dist.get_rank())
    data = make()
    settings = {"global_batch_size": 4, "max_steps": 1, **settings}
    trainer = runs.make_trainer("llava", modules or {VISION: {}}, data=equally_long(), **settings)
    trainer.train_dataset = trainer.train_dataset if evaluates else data
    try:
        if evaluates:
            trainer.evaluate(data)
        else:
            trainer.train()
    except RuntimeError as error:
        return str(error)
    return "trained"


def _all_said() -> dict[str, str]:
    """Name of a case -> what this rank says of it."""
    assert len({len(sample["input_ids"]) for sample in equally_long()}) == 1 and len(equally_long()) == 8
    found = {name: _said(make) for name, make in {**DIFFERENT, **EQUAL}.items()}
    together = {VISION: {"tp_size": 2}, LM: {"tp_size": 2, "colocate_with": VISION}}
    found["augmented pixels, shared"] = _said(EQUAL["augmented pixels"], modules=together)
    found["replaced later"] = _said(lambda: Replacing(equally_long()), max_steps=3, callbacks=[CountSteps()])
    return {**found, "evaluation": _said(DIFFERENT["shuffle"], evaluates=True)}


@pytest.mark.distributed
def test_ranks_with_different_datasets_say_so():
    first, *others = run_distributed(_all_said, 2, timeout=100)
    assert others == [first]
    for name in DIFFERENT:
        assert re.match(r"Sample \d of the training dataset .* rank 0 .*rank 1", first[name]), first[name]
        assert "`shuffle` and `random_split`" in first[name]
    assert re.match("Sample 0 of the evaluation dataset .* rank 0 .*rank 1", first["evaluation"])
    assert {first[name] for name in EQUAL} == {"trained"}
    assert "microbatch 0 of `vision`" in first["augmented pixels, shared"]
    assert re.match(r"Sample \d .*ranks that share it", first["replaced later"]), first["replaced later"]
