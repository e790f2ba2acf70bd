"""What differs between the supported versions of transformers."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from importlib.metadata import version

import pytest
import torch
from transformers import DynamicCache
from transformers.integrations import peft
from transformers.masking_utils import create_masks_for_generate

from hf_mmparallel import _versions
from tests.composed.test_composed import compose


def test_the_cache_has_the_name_that_transformers_gives_it():
    assert _versions.CACHE in inspect.signature(create_masks_for_generate).parameters


@torch.no_grad()
def test_a_composed_model_takes_the_cache_as_other_models_do():
    model = compose("clip_llama")[0]
    ids = torch.randint(3, 30, (2, 7))
    expected = model(input_ids=ids).logits[:, -1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = model(input_ids=ids[:, :6], **{_versions.CACHE: DynamicCache(config=model.config.text_config)})
        last = model(input_ids=ids[:, 6:], **{_versions.CACHE: getattr(first, _versions.CACHE)})
    torch.testing.assert_close(last.logits[:, -1], expected)


def test_other_demands_on_peft_stay(monkeypatch):
    for demand, accepted in (("0.22.0", "0.21.2"), ("0.20.0", "0.20.0"), ("0.99.0", "0.99.0")):
        monkeypatch.setattr(peft, "MIN_PEFT_VERSION", demand)
        _versions.accept_tested_peft()
        assert accepted == peft.MIN_PEFT_VERSION


@pytest.mark.parametrize("order", ["hf_mmparallel, transformers", "transformers, hf_mmparallel"])
def test_the_installed_peft_is_accepted_in_either_order_of_imports(order):
    code = f"import {order}; transformers.PreTrainedModel; print(transformers.integrations.peft.MIN_PEFT_VERSION)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-1]
    assert tuple(map(int, said.split("."))) <= tuple(map(int, version("peft").split(".")))
