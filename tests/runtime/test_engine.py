"""The engine on gloo ranks equals one process: loss, clipped gradient norm and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    WhisperConfig,
    WhisperModel,
)

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.composed.multimodal_model import MultimodalModel
from hf_mmparallel.data.step_dataset import Reader, StepDataset
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, MultimodalParallelPlugin, plan_for_model
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.world import World
from tests import tiny
from tests.distributed import run_distributed
from tests.planned_batch import with_program
from tests.runtime.loopback import assert_close, reference

pytestmark = pytest.mark.distributed

IMAGE, AUDIO = 100, 101


def two_encoders() -> PreTrainedModel:
    """A composed model that sees and hears."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vision = CLIPVisionModel(CLIPVisionConfig(**tiny.VISION))
        sizes = {"d_model": 16, "encoder_layers": 2, "encoder_ffn_dim": 32, "encoder_attention_heads": 2}
        sizes |= {"decoder_layers": 1, "decoder_ffn_dim": 32, "decoder_attention_heads": 2, "vocab_size": 50}
        hearing = WhisperModel(WhisperConfig(**sizes, num_mel_bins=8, max_source_positions=6, pad_token_id=0))
        decoder = LlamaForCausalLM(LlamaConfig(**tiny.TEXT))
        tokens = {"vision": IMAGE, "audio": AUDIO}
        return MultimodalModel.from_unimodal({"vision": vision, "audio": hearing}, decoder, token_ids=tokens)


def mixed_dataset(size: int) -> list[dict[str, Tensor]]:
    """Samples with images, clips, both or neither."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(size):
        images, clips = (index + 1) % 3, index % 2
        words = torch.randint(1, 90, (5 + index % 4,), generator=generator)
        ids = torch.cat(
            [words[:2], torch.tensor(([IMAGE] * 5 + [3]) * images + [AUDIO] * 6 * clips), words[2:]]
        ).long()
        sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        sample["labels"] = ids.masked_fill(ids >= IMAGE, -100)
        if images:
            sample["pixel_values"] = torch.randn(images, 3, 16, 16, generator=generator)
        if clips:
            sample["input_features"] = torch.randn(clips, 8, 12, generator=generator)
        samples.append(sample)
    return samples


SIZE = 11
SHARED = {"colocate_with": "vision"}


def inputs() -> tuple[PreTrainedModel, list, Any]:
    return two_encoders().train(), mixed_dataset(SIZE), tiny.collate("llava")


def train_rank() -> dict[str, Any]:
    """One step of this rank's part."""
    model, dataset, collator = inputs()
    spec = build_model_spec(model)
    parallel = MultimodalParallelPlugin({"vision": {"dp_size": 2}, "audio": SHARED, LANGUAGE_MODEL: SHARED})
    plan = plan_for_model(parallel, spec, dist.get_world_size())
    engine = ParallelEngine(model, spec, plan, World())
    batch = StepDataset(Reader(dataset, collator), engine.inputs, 0).read(contiguous_step(plan, range(SIZE), 3))
    totals = engine.train_step(with_program(engine, batch), 0)
    norm = float(engine.gradient_norm())
    gradients = {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}
    engine.clip(torch.tensor(norm), norm / 2)
    return {
        "loss": totals.loss,
        "num_targets": totals.num_targets,
        "norm": norm,
        "norm after": float(engine.gradient_norm()),
        "gradients": gradients,
    }


def test_two_encoders_equal_one_process():
    """Other layouts are in `test_loopback.py` and in `tests/trainer/test_parity.py`."""
    model, dataset, collator = inputs()
    loss, count, gradients = reference(model, collator(dataset))
    gradients = {name: gradient / count for name, gradient in gradients.items()}
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    for found in run_distributed(train_rank, 2):
        assert found["num_targets"] == count
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert found["norm"] == pytest.approx(norm, rel=1e-5)
        assert found["norm after"] == pytest.approx(norm / 2, rel=1e-4)
        assert_close(found["gradients"], gradients)
