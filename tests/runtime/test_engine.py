"""The engine on gloo ranks equals one process: loss, gradient norm and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
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


SIZE = 11
# name -> family, ranks, modules, schedule, what is frozen
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], str, tuple[str, ...]]] = {
    "tp 2 and pp 2": ("llava", 6, {"vision": {"tp_size": 2}, LM: {"tp_size": 2, "pp_size": 2}}, "gpipe", ()),
    "deepstack": (
        "qwen3_vl",
        6,
        {"vision": {"dp_size": 2}, LM: {"tp_size": 2, "layers_per_stage": [1, 3]}},
        "1f1b",
        (),
    ),
    "vision pp 2, decoder dp 2": ("llava", 4, {"vision": {"pp_size": 2}, LM: {"dp_size": 2}}, "1f1b", ()),
    "frozen vision": (
        "llava",
        4,
        {"vision": {"dp_size": 2}, LM: {"pp_size": 2}},
        "1f1b",
        ("vision_tower", "multi_modal_projector"),
    ),
    "two encoders": (
        "two encoders",
        4,
        {"vision": {"dp_size": 4}, "audio": {"colocate_with": "vision"}, LM: {"colocate_with": "vision"}},
        "1f1b",
        (),
    ),
}


def make(name: str) -> tuple[PreTrainedModel, list, Any]:
    """The model of a layout, its samples, and what collates them."""
    family, *_, freeze = LAYOUTS[name]
    if family == "two encoders":
        model, dataset, collator = two_encoders(), mixed_dataset(SIZE), tiny.collate("llava")
    else:
        model, dataset, collator = tiny.FAMILIES[family](), tiny.make_dataset(family, SIZE), tiny.collate(family)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in parameter_name for part in freeze))
    return model.train(), dataset, collator


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def train_rank(name: str) -> dict[str, Any]:
    """One step of this rank's part."""
    _, world_size, modules, schedule, _ = LAYOUTS[name]
    model, dataset, collator = make(name)
    spec = build_model_spec(model)
    plan = plan_for_model(MultimodalParallelPlugin(modules, schedule), spec, world_size)
    engine = ParallelEngine(model, spec, plan, World())
    batch = StepDataset(Reader(dataset, collator), engine.inputs, 0).read(contiguous_step(plan, range(SIZE), 3))
    batch = with_program(engine, batch)
    totals = engine.train_step(batch, 0)
    norm = float(engine.gradient_norm())
    held = {n: p for n, p in engine.model.named_parameters() if n in engine.shards and p.requires_grad}
    mine = {name for name in held if engine.shards[name].on_rank(engine.rank)}
    gradients = {name: whole(p.grad).clone() for name, p in held.items() if name in mine and p.grad is not None}
    engine.clip(torch.tensor(norm), norm / 2)
    return {
        "loss": totals.loss,
        "num_targets": totals.num_targets,
        "norm": norm,
        "norm after": float(engine.gradient_norm()),
        "gradients": gradients,
        "mine": mine,
        "sharded": any(isinstance(p, DTensor) for p in held.values()),
        "tp_sizes": {plan.stage(*key).tp_size for key in plan.stages_of_rank(engine.rank)},
        "messages": {str(a.message) for a in batch.program.actions[engine.rank] if a.message},
        "backwards": [str(t.task) for t in engine.last_result.timeline if t.task.kind == "bwd"],
    }


def train_ranks(names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: train_rank(name) for name in names}


@pytest.fixture(scope="module")
def ran() -> dict[str, list[dict[str, Any]]]:
    """Layout -> what each rank found."""
    found = {}
    for world_size in (4, 6):
        names = [name for name, (_, size, *_) in LAYOUTS.items() if size == world_size]
        ranks = run_distributed(train_ranks, world_size, names)
        found |= {name: [rank[name] for rank in ranks] for name in names}
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_equals_one_process(ran: dict[str, list[dict[str, Any]]], name: str):
    model, dataset, collator = make(name)
    loss, count, gradients = reference(model, collator(dataset))
    gradients = {name: gradient / count for name, gradient in gradients.items()}
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    for found in ran[name]:
        assert found["num_targets"] == count
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert found["norm"] == pytest.approx(norm, rel=1e-5)
        assert found["norm after"] == pytest.approx(norm / 2, rel=1e-4)
        assert found["sharded"] == (found["tp_sizes"] == {2})
        assert_close(found["gradients"], {name: gradients[name] for name in found["mine"] & gradients.keys()})
    assert set().union(*(found["mine"] for found in ran[name])) >= set(gradients)


def test_a_frozen_encoder_gets_no_gradient_and_runs_no_backward(ran: dict[str, list[dict[str, Any]]]):
    ranks = ran["frozen vision"]
    assert [bool(found["backwards"]) for found in ranks] == [False, False, True, True]
    messages = set().union(*(found["messages"] for found in ranks))
    assert any(m.startswith("act fwd vision") for m in messages)
    assert any(m.startswith("grad") for m in messages)
    assert not [m for m in messages if m.startswith("grad") and "vision" in m]
