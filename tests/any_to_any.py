"""Tiny models with a generator behind the language model, of each kind, with samples that have targets for it."""

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from hf_mmparallel import MultimodalModel
from tests import tiny

VISION, LM, IMAGE = "vision", "language_model", "image"
DRAWN_TOKEN, NUM_ROWS = 110, 4
SHAPE = (1, 8, 8)  # of latents
SETTINGS = {"num_tokens": NUM_ROWS, "loss_weight": 0.5}
KINDS = ("unet", "dit", "codes")


def unet() -> nn.Module:
    """A U-Net of two levels, the inner one with attention to the rows."""
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=SHAPE[1],
        in_channels=SHAPE[0],
        out_channels=SHAPE[0],
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def dit() -> nn.Module:
    """A diffusion transformer of three blocks."""
    from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=SHAPE[0],
        out_channels=SHAPE[0],
        num_layers=3,
        sample_size=SHAPE[1],
        patch_size=2,
        cross_attention_dim=24,
        caption_channels=16,
        norm_num_groups=8,
    )


def codes() -> nn.Module:
    """A transformer that predicts codes."""
    return hf.LlamaModel(hf.LlamaConfig(**{**tiny.TEXT, "hidden_size": 32, "intermediate_size": 48}))


TOWERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "unet": (unet, {}),
    "dit": (dit, {"scheduler": {"_class_name": "FlowMatchEulerDiscreteScheduler"}, "projector": "mlp"}),
    "codes": (codes, {"num_codes": 30, "num_codebooks": 2}),
}


def compose(*kinds: str, **settings: Any) -> MultimodalModel:
    """A CLIP tower, a Llama, and generators: the first is called `image`, others by their kind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vision = hf.CLIPVisionModel(hf.CLIPVisionConfig(**tiny.VISION))  # type: ignore[arg-type]
        language_model = hf.LlamaForCausalLM(hf.LlamaConfig(**tiny.TEXT))  # type: ignore[arg-type]
        names = {(kind if place else IMAGE): kind for place, kind in enumerate(kinds)}
        tokens = {name: DRAWN_TOKEN + place for place, name in enumerate(names)}
        return MultimodalModel.from_unimodal(
            {VISION: vision},
            language_model,
            {VISION: tiny.MEDIA_TOKEN, **tokens},
            generators={name: TOWERS[kind][0]() for name, kind in names.items()},
            generator_settings={name: {**SETTINGS, **TOWERS[kind][1], **settings} for name, kind in names.items()},
        ).train()


def targets(name: str, kind: str, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The entries of a sample with so many targets."""
    if kind == "codes":
        drawn = torch.randint(30, (count, NUM_ROWS, 2), generator=generator)
        return {f"{name}_codes": drawn.masked_fill(torch.rand(drawn.shape, generator=generator) < 0.1, -100)}
    seeds = torch.randint(2**31, (count,), generator=generator)
    return {f"{name}_latents": torch.randn(count, *SHAPE, generator=generator), f"{name}_seeds": seeds}


def make_dataset(*kinds: str, size: int = 22) -> list[dict[str, Tensor]]:
    """Samples with no, one or two images to look at and to draw, in all combinations."""
    generator, samples = torch.Generator().manual_seed(1), []
    for index in range(size):
        seen = index % 3
        pieces = [torch.randint(1, 90, (3 + index % 2,), generator=generator)]
        pieces += [torch.tensor([tiny.MEDIA_TOKEN] * 5), torch.randint(1, 90, (2,), generator=generator)] * seen
        sample = {"pixel_values": torch.randn(seen, 3, 16, 16, generator=generator)} if seen else {}
        for place, kind in enumerate(kinds):
            count = (index // 3 + place) % 3
            row = torch.tensor([DRAWN_TOKEN + place] * NUM_ROWS)
            pieces += [row, torch.randint(1, 90, (2,), generator=generator)] * count
            if count:
                sample |= targets(kind if place else IMAGE, kind, count, generator)
        ids = torch.cat([*pieces, torch.randint(1, 90, (4 + index % 3,), generator=generator)])
        labels = ids.masked_fill((ids == tiny.MEDIA_TOKEN) | (ids >= DRAWN_TOKEN), -100)
        samples.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), **sample})
    return samples


def make_batch(*kinds: str, size: int = 6) -> dict[str, Tensor]:
    return tiny.collate("llava")(make_dataset(*kinds, size=size))
