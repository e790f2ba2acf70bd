"""Tiny language models and vision-language models, and the words of their padded batches, made by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from hf_mmparallel.kernels.bitfield_attention import encode_words
from tests import tiny

torch.set_num_threads(1)
WINDOW = 6
TWO_LAYERS = {**tiny.TEXT, "num_hidden_layers": 2}
HEADS = {**TWO_LAYERS, "head_dim": 16}
LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN2_MOE = {"use_sliding_window": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN2_MOE |= {"shared_expert_intermediate_size": 32}

TEXT: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny._build("Llama", **TWO_LAYERS),
    "mistral": tiny._build("Mistral", **HEADS, sliding_window=WINDOW),
    "qwen2": tiny._build("Qwen2", **TWO_LAYERS, **LAYER_TYPES, use_sliding_window=True),
    "qwen3": tiny._build("Qwen3", **HEADS),
    "gemma": tiny._build("Gemma", **HEADS),
    "gemma2": tiny._build("Gemma2", **HEADS, **LAYER_TYPES, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    "gemma3_text": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**HEADS, **LAYER_TYPES, query_pre_attn_scalar=8)),
    "phi3": tiny._build("Phi3", **TWO_LAYERS, sliding_window=WINDOW),
    "gpt_oss": tiny._build("GptOss", **HEADS, **LAYER_TYPES, **EXPERTS),
    # its layers do not pass the window that its masks have
    "qwen2_moe": tiny._build("Qwen2Moe", **TWO_LAYERS, **LAYER_TYPES, **QWEN2_MOE),
    "mixtral": tiny._build("Mixtral", **TWO_LAYERS, **EXPERTS),
}
MULTIMODAL = ("llava", "gemma3", "paligemma", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl")


def build(family: str) -> PreTrainedModel:
    """A model whose weights are large enough that attention is far from uniform, in evaluation mode."""
    model = TEXT[family]() if family in TEXT else tiny.FAMILIES[family]()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()
            elif "q_proj" in name or "k_proj" in name or "qkv" in name:
                parameter.mul_(8)
    return model.eval()


def checkpoint(model: PreTrainedModel, use_reentrant: bool) -> None:
    """Computes activations again in the backward pass; older transformers has another name for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def text_batch(rows: int = 3, length: int = 17) -> dict[str, Tensor]:
    """Padded to the right, one full row."""
    input_ids = torch.randint(3, 90, (rows, length))
    lengths = torch.tensor([length, *torch.randint(length // 2, length, (rows - 1,)).tolist()])
    attention_mask = (torch.arange(length) < lengths[:, None]).long()
    input_ids = input_ids * attention_mask
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def multimodal_batch(family: str, size: int = 3) -> dict[str, Tensor]:
    """Padded to the right, with 1, 2 and 0 images."""
    return tiny.collate(family)(tiny.make_dataset(family, size, seed=int(torch.randint(1000, ()))))


def batch_of(family: str) -> dict[str, Tensor]:
    """A padded batch of three rows of any family."""
    return text_batch() if family in TEXT else multimodal_batch(family)


def padded_left(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with its padding before the tokens."""
    padding = (batch["attention_mask"] == 0).sum(-1).tolist()

    def moved(value: Tensor) -> Tensor:
        return torch.stack([row.roll(count) for row, count in zip(value, padding, strict=True)])

    shape = batch["input_ids"].shape
    return {name: moved(value) if value.shape == shape else value for name, value in batch.items()}


def words_of(family: str, batch: dict[str, Tensor]) -> Tensor:
    """The words of a padded batch: spans for Gemma's images and for PaliGemma's prefix, else causal."""
    real = batch["attention_mask"].bool()
    span = torch.zeros_like(batch["input_ids"])
    if family == "gemma3":
        image = batch["token_type_ids"] == 1
        starts = image & ~torch.nn.functional.pad(image, (1, 0))[:, :-1]
        span = starts.cumsum(-1) * image
    elif family == "paligemma":
        span = (batch["token_type_ids"] == 0) & real
    return encode_words(real.long(), span.long())


def run(model: PreTrainedModel, batch: dict[str, Any], attention: str | dict[str, str], **extra: Any):
    """Loss, logits of the real tokens and gradients of a training step under an attention function."""
    model.set_attn_implementation(attention)
    model.train()
    model.zero_grad()
    output = model(**batch, **extra, use_cache=False)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    real = batch["attention_mask"].bool() if "attention_mask" in batch else slice(None)
    return output.loss.detach(), output.logits.detach()[real], gradients


def assert_same(found: tuple, expected: tuple, tolerance: float = 5e-5) -> None:
    """Equal to rounding: each tensor against the largest value of its kind."""
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=tolerance * float(expected[1].abs().max()))
    assert found[2].keys() == expected[2].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[2].values())
    for name, gradient in expected[2].items():
        error = float((found[2][name] - gradient).abs().max())
        assert error <= tolerance * largest, f"{name}: {error:.2e} of {largest:.2e}"
