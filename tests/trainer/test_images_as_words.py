"""Models of transformers that generate train as they are, as far as the loss of their class has what they generate."""

from functools import partial
from typing import Any

import pytest
import shrunk_models
import torch
import transformers as hf

from hf_mmparallel.modeling import build_model_spec, check_supported
from hf_mmparallel.trainer.start_checks import check_model
from tests import tiny
from tests.deep_cases import in_turn

from . import runs

LM = "language_model"
SHORT: dict[str, Any] = {"max_steps": 2, "warmup_steps": 0}


def emu3() -> dict[str, Any]:
    """The class that reads and draws images as words, which its tokenizer makes beforehand."""
    config = hf.Emu3TextConfig(**tiny.TEXT, attention_dropout=0.0, bos_token_id=1, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {"model": hf.Emu3ForCausalLM(config), "data": tiny.make_dataset("llama", runs.SAMPLES), **SHORT}


STAGES: dict[str, Any] = {LM: {"pp_size": 2}}
# all on two ranks
LAYOUTS: dict[str, runs.Layout] = {
    "stages of Emu3": runs.Layout("llama", STAGES, emu3),
    "Emu3 with tensor parallelism": runs.Layout("llama", {LM: {"tp_size": 2}}, emu3),
    "stages of Chameleon": runs.Layout("chameleon", STAGES, partial(runs.shrunk, "chameleon", **SHORT)),
    "Janus beside its encoder": runs.Layout("janus", {}, partial(runs.shrunk, "janus", **SHORT)),
}


@pytest.mark.distributed
def test_layouts_equal_the_stock_trainer():
    runs.assert_layouts_equal_the_stock_trainer(2, in_turn(LAYOUTS, "stages of Emu3"))


def test_the_tokenizer_of_images_is_before_the_layers_of_the_language_model():
    for family in ("chameleon", "emu3"):
        model = shrunk_models.build(family)
        spec = build_model_spec(model)
        assert list(spec.modules) == [LM]
        check_supported(model)
        assert {p.layer for p in spec.modules[LM].parameters if "vqmodel" in p.name} == {-1}
    with pytest.raises(ValueError, match="BatchNorm3d"):  # the words of an image depend on the others in the batch
        check_model(shrunk_models.build("emu3"))


def test_a_decoder_of_codebooks_with_a_loss_of_its_own_is_refused():
    with torch.device("meta"):
        model = hf.CsmForConditionalGeneration(hf.CsmConfig())
    with pytest.raises(ValueError, match="`depth_decoder` with a loss of its own"):
        check_model(model)
