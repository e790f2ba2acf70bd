"""What differs between the supported versions of transformers."""

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
from tests.deep_cases import deep
from tests.modeling.test_composed import compose


@torch.no_grad()
def test_a_composed_model_takes_the_cache_as_other_models_do():
    assert _versions.CACHE in inspect.signature(create_masks_for_generate).parameters
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


PEFT = "from transformers.integrations import peft; print(peft.MIN_PEFT_VERSION)"
PACKAGE_FIRST = """
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
"""


@pytest.mark.parametrize(
    "code", [PACKAGE_FIRST, deep("import transformers, hf_mmparallel\nfrom transformers import PreTrainedModel\n")]
)
def test_what_importing_the_package_does(code):
    """Attention is registered, the installed peft accepted, and no kernel imported on a CPU, all in one process."""
    done = subprocess.run([sys.executable, "-c", code + PEFT], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    accepted, installed = (tuple(map(int, text.split("."))) for text in (done.stdout.split()[-1], version("peft")))
    assert accepted <= installed
