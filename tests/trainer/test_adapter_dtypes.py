"""LoRA on weights of every dtype trains as `get_peft_model` with the stock Trainer on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import set_seed

from tests import tiny
from tests.distributed import run_distributed
from tests.trainer import runs

pytestmark = pytest.mark.distributed
VISION, LM = "vision", "language_model"
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {VISION: {}, LM: {"pp_size": 2}},
    "tensor": {VISION: {}, LM: {"tp_size": 2}},
    "data": {VISION: {}, LM: {"dp_size": 2}},
}
# Steps this small are lost in bfloat16, whose spacing is 2**-9 of a value: adapters have to be float32.
STEPS = {"optim": "adamw_torch", "learning_rate": 1e-4, "weight_decay": 0.0, "max_steps": 3, "warmup_steps": 0}


WIDE = ("norm", "projector")
MIXES: dict[str, tuple[torch.dtype, tuple[str, ...], bool, bool]] = {
    "bfloat16": (torch.bfloat16, (), False, True),
    "float16": (torch.float16, (), False, False),  # the stock Trainer makes NaN of a projector in float16
    "float32 norms and projector": (torch.bfloat16, WIDE, True, True),
    "float32 but for the layers": (torch.bfloat16, (*WIDE, "embed_tokens", "lm_head"), True, True),
    "float32": (torch.float32, (), True, True),
}
"""Mix -> dtype, words in the names of what is in float32, autocast to bfloat16, whether the projector is trained."""


def model_of(mix: str) -> Any:
    """A model whose weights have the dtypes of a mix."""
    dtype, widened, _, _ = MIXES[mix]
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


def ranks_run(mix: str) -> dict[str, Result]:
    """The same of our Trainer on every layout; weights on rank 0."""
    result = {}
    _, _, bf16, train_projector = MIXES[mix]
    freeze = "tower" if train_projector else True
    for layout, sizes in LAYOUTS.items():
        parallel = {VISION: {**sizes[VISION], "freeze": freeze}, LM: {**sizes[LM], "peft_config": LORA}}
        trainer = runs.make_trainer("llava", parallel, model=model_of(mix), bf16=bf16, **STEPS)
        trainer.train()
        whole = trainer.gather_model()
        result[layout] = runs.step_logs(trainer), {} if whole is None else _trained(whole)
    return result


def _flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].flatten().double() for name in sorted(weights) if ".lora_" in name])


@pytest.mark.parametrize("mix", runs.deep_but(MIXES, "bfloat16", "float32 norms and projector"))
def test_adapters_train_as_those_of_peft_on_weights_of_any_dtype(mix: str):
    logs, weights = stock_run(mix)
    start = _flat(_trained(_by_hand(mix)))
    moved = (_flat(weights) - start).norm()
    for layout, (got_logs, got) in run_distributed(ranks_run, 3, mix, timeout=200)[0].items():
        assert got_logs == [pytest.approx(row, rel=5e-3) for row in logs], layout
        assert {name: p.dtype for name, p in got.items()} == {name: p.dtype for name, p in weights.items()}
        assert (_flat(got) != start).double().mean() > 0.99, layout  # bfloat16 would move one in ten
        # Microbatches of half precision round otherwise than the batch: by 0.03 to 0.11 of the way here.
        assert (_flat(got) - _flat(weights)).norm() < 0.2 * moved, layout
