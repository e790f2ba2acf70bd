"""The engine on gloo ranks equals one process: loss, gradient norm and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
LM = LANGUAGE_MODEL


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


SIZE, WORLD_SIZE = 11, 4
SHARED = {"colocate_with": "vision"}
# name -> family, modules, what is frozen; other layouts are in `tests/trainer/test_parity.py`
LAYOUTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "frozen": ("llava", {"vision": {"dp_size": 2}, LM: {"pp_size": 2}}, ("vision_tower", "multi_modal_projector")),
    "two encoders": ("two encoders", {"vision": {"dp_size": 4}, "audio": SHARED, LM: SHARED}, ()),
}


def make(name: str) -> tuple[PreTrainedModel, list, Any]:
    """The model of a layout, its samples, and what collates them."""
    family, _, freeze = LAYOUTS[name]
    if family == "two encoders":
        model, dataset, collator = two_encoders(), mixed_dataset(SIZE), tiny.collate("llava")
    else:
        model, dataset, collator = tiny.FAMILIES[family](), tiny.make_dataset(family, SIZE), tiny.collate(family)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in parameter_name for part in freeze))
    return model.train(), dataset, collator


def train_rank(name: str) -> dict[str, Any]:
    """One step of this rank's part."""
    model, dataset, collator = make(name)
    spec = build_model_spec(model)
    plan = plan_for_model(MultimodalParallelPlugin(LAYOUTS[name][1]), spec, WORLD_SIZE)
    engine = ParallelEngine(model, spec, plan, World())
    batch = StepDataset(Reader(dataset, collator), engine.inputs, 0).read(contiguous_step(plan, range(SIZE), 3))
    batch = with_program(engine, batch)
    totals = engine.train_step(batch, 0)
    norm = float(engine.gradient_norm())
    held = {n: p for n, p in engine.model.named_parameters() if n in engine.shards and p.requires_grad}
    mine = {name for name in held if engine.shards[name].on_rank(engine.rank)}
    gradients = {name: p.grad.clone() for name, p in held.items() if name in mine and p.grad is not None}
    engine.clip(torch.tensor(norm), norm / 2)
    return {
        "loss": totals.loss,
        "num_targets": totals.num_targets,
        "norm": norm,
        "norm after": float(engine.gradient_norm()),
        "gradients": gradients,
        "mine": mine,
        "messages": {str(a.message) for a in batch.program.actions[engine.rank] if a.message},
        "backwards": [str(t.task) for t in engine.last_result.timeline if t.task.kind == "bwd"],
    }


def train_all() -> dict[str, dict[str, Any]]:
    return {name: train_rank(name) for name in LAYOUTS}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    """What each rank found, by layout."""
    return run_distributed(train_all, WORLD_SIZE)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_equals_one_process(ranks: list[dict[str, dict[str, Any]]], name: str):
    model, dataset, collator = make(name)
    loss, count, gradients = reference(model, collator(dataset))
    gradients = {name: gradient / count for name, gradient in gradients.items()}
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    for found in (rank[name] for rank in ranks):
        assert found["num_targets"] == count
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert found["norm"] == pytest.approx(norm, rel=1e-5)
        assert found["norm after"] == pytest.approx(norm / 2, rel=1e-4)
        assert_close(found["gradients"], {name: gradients[name] for name in found["mine"] & gradients.keys()})
    assert set().union(*(rank[name]["mine"] for rank in ranks)) >= set(gradients)


def test_a_frozen_encoder_gets_no_gradient_and_runs_no_backward(ranks: list[dict[str, dict[str, Any]]]):
    assert [bool(rank["frozen"]["backwards"]) for rank in ranks] == [False, False, True, True]
    messages = set().union(*(rank["frozen"]["messages"] for rank in ranks))
    assert any(m.startswith("act fwd vision") for m in messages)
    assert any(m.startswith("grad") for m in messages)
    assert not [m for m in messages if m.startswith("grad") and "vision" in m]
