"""LoRA on weights of every dtype, and on quantized ones (QLoRA), trains as `get_peft_model` with the stock Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, set_seed

from hf_mmparallel.data.randomness import seeded
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import ModulePlugin, resolve_plan
from hf_mmparallel.planning.possible_sizes import check_matrices
from tests import tiny
from tests.deep_cases import deep
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
# Steps this small are lost in bfloat16, whose spacing is 2**-9 of a value: adapters have to be float32.
STEPS = {"optim": "adamw_torch", "learning_rate": 1e-4, "weight_decay": 0.0, "max_steps": 3, "warmup_steps": 0}


WIDE = ("norm", "projector")
MIXES: dict[str, tuple[torch.dtype, tuple[str, ...], bool, bool, dict[str, Any]]] = {
    "bfloat16": (torch.bfloat16, (), False, True, {"tp_size": 2}),
    "float16": (torch.float16, (), False, False, {"pp_size": 2}),  # the stock Trainer makes NaN of its projector
    "float32 norms and projector": (torch.bfloat16, WIDE, True, True, {"dp_size": 2}),
    "bfloat16, split backwards": (torch.bfloat16, (), False, True, {"pp_size": 2, "split_backward": True}),
    "float32 but for the layers": (torch.bfloat16, (*WIDE, "embed_tokens", "lm_head"), True, True, {"pp_size": 2}),
}
"""
Mix -> dtype, words in the names of what is in float32, autocast to bfloat16, whether the projector is trained, layout
of the language model.
"""


def model_of(mix: str) -> Any:
    """A model whose weights have the dtypes of a mix."""
    dtype, widened, *_ = MIXES[mix]
    model: Any = tiny.FAMILIES["llava"]().to(dtype)
    for name, parameter in model.named_parameters():
        if any(word in name for word in widened):
            parameter.data = parameter.data.float()
    return model


def _trained(model: Any) -> dict[str, torch.Tensor]:
    """Copies of what is trained in a `PeftModel`, by name."""
    return {
        name: p.detach().clone()
        for name, p in model.named_parameters()
        if ".lora_" in name or ".modules_to_save." in name
    }


def _by_hand(mix: str) -> Any:
    """What a user of `peft` makes."""
    set_seed(runs.COMMON["seed"])
    parts = ["model.multi_modal_projector"] if MIXES[mix][3] else None
    targets = r".*language_model.*\.(q_proj|v_proj|down_proj)"
    return get_peft_model(model_of(mix), LoraConfig(**{**LORA, "target_modules": targets}, modules_to_save=parts))


Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def stock_run(mix: str) -> Result:
    """Logs and trained weights of the stock Trainer with a `PeftModel`."""
    model = _by_hand(mix)
    trainer = runs.stock_trainer(model=model, bf16=MIXES[mix][2], **STEPS)
    trainer.train()
    return runs.step_logs(trainer), _trained(model)


def ranks_run(mix: str) -> Result:
    """The same of our Trainer; weights on rank 0."""
    _, _, bf16, train_projector, layout = MIXES[mix]
    parallel = {VISION: {"freeze": "tower" if train_projector else True}, LM: {**layout, "peft_config": LORA}}
    trainer = runs.make_trainer("llava", parallel, model=model_of(mix), bf16=bf16, **STEPS)
    trainer.train()
    whole = trainer.gather_model()
    return runs.step_logs(trainer), {} if whole is None else _trained(whole)


def _flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].flatten().double() for name in sorted(weights) if ".lora_" in name])


@pytest.mark.parametrize("mix", runs.deep_but(MIXES, "bfloat16"))
def test_adapters_train_as_those_of_peft_on_weights_of_any_dtype(mix: str):
    logs, weights = stock_run(mix)
    start = _flat(_trained(_by_hand(mix)))
    moved = (_flat(weights) - start).norm()
    got_logs, got = run_distributed(ranks_run, 3, mix)[0]
    assert got_logs == [pytest.approx(row, rel=5e-3) for row in logs]
    assert {name: p.dtype for name, p in got.items()} == {name: p.dtype for name, p in weights.items()}
    assert (_flat(got) != start).double().mean() > 0.99  # bfloat16 would move one in ten
    # Microbatches of half precision round otherwise than the batch: by 0.03 to 0.11 of the way here.
    assert (_flat(got) - _flat(weights)).norm() < 0.2 * moved


# Quantized weights


def quantized(folder: str, bits: int) -> Any:
    """A tiny text model in 4 or 8 bits."""
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, bnb_4bit_compute_dtype=torch.float32)
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


@pytest.mark.parametrize(
    ("bits", "divided", "said"), [deep(4, {"tp_size": 2}, "uint8"), deep(8, {"dp_size": 2, "zero_stage": 3}, "int8")]
)
def test_adapters_of_quantized_weights_train_as_with_the_stock_trainer(
    tmp_path: Path, bits: int, divided: dict[str, int], said: str
):
    pytest.importorskip("bitsandbytes")
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
    spec, (setting, value) = build_model_spec(quantized(folder, bits)), list(divided.items())[-1]
    with pytest.raises(ValueError, match=f"`{setting}={value}` of `{LM}`: .* {said}"):
        check_matrices(spec, resolve_plan(spec, {LM: ModulePlugin(**divided)}))
