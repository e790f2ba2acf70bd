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


def _said(code: str) -> str:
    """The last word that a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


@pytest.mark.deep
def test_the_installed_peft_is_accepted_if_transformers_is_imported_first():
    code = (
        "import transformers, hf_mmparallel; from transformers.integrations import peft; print(peft.MIN_PEFT_VERSION)"
    )
    assert _numbers(_said(code)) <= _numbers(version("peft"))


def test_what_importing_the_package_first_does():
    """Attention is registered, the installed peft accepted, and no kernel imported on a CPU, all in one process."""
    code = """
import sys, hf_mmparallel
assert not {"torch", "transformers"} & set(sys.modules)
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
assert "bitfield" in AttentionInterface() and "bitfield" in AttentionMaskInterface()
from hf_mmparallel.kernels.bitfield_attention import bitfield_attention, encode_words
x = torch.ones(1, 1, 4, 8)
bitfield_attention(x, x, x, encode_words(torch.ones(1, 4)))
kernels = [name for name in sys.modules if name.startswith("hf_mmparallel") and ".triton" in name]
assert not torch.cuda.is_initialized() and kernels == [], kernels
from transformers.integrations import peft
print(peft.MIN_PEFT_VERSION)
"""
    assert _numbers(_said(code)) <= _numbers(version("peft"))
