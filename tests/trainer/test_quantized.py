"""LoRA on quantized weights (QLoRA) trains as with the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_mmparallel.data.randomness import seeded
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import ModulePlugin, resolve_plan
from hf_mmparallel.planner.possible_sizes import check_matrices
from tests import tiny
from tests.distributed import run_distributed
from tests.trainer import runs

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.distributed
LM = "language_model"
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def quantized(folder: str, bits: int) -> Any:
    """A tiny text model in 4 or 8 bits."""
    if bits == 4:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})


def by_hand(folder: str, bits: int) -> Any:
    with seeded(runs.COMMON["seed"]):
        return get_peft_model(quantized(folder, bits), LoraConfig(**LORA))


def train_layouts(folder: str, bits: int) -> list[list[dict[str, float]]]:
    """Logs of a pipeline with adapters by module, saved, and of two replicas with those of `get_peft_model`."""
    first = runs.make_trainer("llama", {LM: {"pp_size": 2, "peft_config": LORA}}, model=quantized(folder, bits))
    first.train()
    first.save_model(f"{folder}/adapter")
    with pytest.raises(ValueError, match=r"PeftModel.from_pretrained\(base, folder\)"):
        first.gather_model()
    second = runs.make_trainer("llama", {LM: {"dp_size": 2}}, model=by_hand(folder, bits))
    second.train()
    return [runs.step_logs(first), runs.step_logs(second)]


DIVIDED: dict[int, tuple[dict[str, Any], str]] = {
    4: ({"tp_size": 2}, f"`tp_size=2` of `{LM}`: .* uint8"),
    8: ({"dp_size": 2, "zero_stage": 3}, f"`zero_stage=3` of `{LM}`: .* int8"),
}
"""Bits -> sizes that divide weights which can't be divided, and what is said."""


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.deep)])
def test_adapters_of_quantized_weights_train_as_with_the_stock_trainer(tmp_path: Path, bits: int):
    folder = str(tmp_path)
    tiny.FAMILIES["llama"]().save_pretrained(folder)
    model = by_hand(folder, bits)
    stock = runs.stock_trainer("llama", model=model)
    stock.train()
    for logs in run_distributed(train_layouts, 2, folder, bits, timeout=120)[0]:
        assert logs == [pytest.approx(row, rel=2e-5, abs=2e-6) for row in runs.step_logs(stock)]
    loaded = PeftModel.from_pretrained(quantized(folder, bits), f"{folder}/adapter").eval()
    batch = tiny.collate("llama")(tiny.make_dataset("llama", 2))
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, model.eval()(**batch).logits, rtol=1e-4, atol=1e-5)
    spec, (sizes, said) = build_model_spec(quantized(folder, bits)), DIVIDED[bits]
    with pytest.raises(ValueError, match=said):
        check_matrices(spec, resolve_plan(spec, {LM: ModulePlugin(**sizes)}))
