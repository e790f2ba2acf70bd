"""The engine on gloo ranks equals one process: loss, gradient norm and every gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from hf_mmparallel.plan import LANGUAGE_MODEL, MultimodalParallelPlugin, ParallelPlan, plan_for_model
from hf_mmparallel.runtime.engine import ParallelEngine
from hf_mmparallel.world import World
from tests import tiny
from tests.deep_cases import deep
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


def make(family: str, size: int, max_items: int, freeze: tuple[str, ...]) -> tuple[PreTrainedModel, list, Callable]:
    if family == "two encoders":
        model, dataset, collator = two_encoders(), mixed_dataset(size), tiny.collate("llava")
    else:
        model, dataset = tiny.FAMILIES[family](), tiny.make_dataset(family, size, max_items=max_items)
        collator = tiny.collate(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in freeze))
    return model.train(), dataset, collator


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def train_rank(
    modules: dict, family: str, size: int, max_items: int, freeze: tuple[str, ...], schedule: str
) -> dict[str, Any]:
    """One step of this rank's part."""
    model, dataset, collator = make(family, size, max_items, freeze)
    spec = build_model_spec(model)
    plan = plan_for_model(MultimodalParallelPlugin(modules, schedule), spec, dist.get_world_size())
    engine = ParallelEngine(model, spec, plan, World())
    batch = StepDataset(Reader(dataset, collator), engine.inputs, 0).read(contiguous_step(plan, range(size), 3))
    batch = with_program(engine, batch)
    totals = engine.train_step(batch, 0)
    norm = float(engine.gradient_norm())
    held = {n: p for n, p in engine.model.named_parameters() if n in engine.shards and p.requires_grad}
    mine = {name for name in held if engine.shards[name].on_rank(engine.rank)}
    gradients = {name: whole(p.grad).clone() for name, p in held.items() if name in mine and p.grad is not None}
    clipped = float(engine.gradient_norm())
    engine.clip(torch.tensor(clipped), norm / 2)
    return {
        "loss": totals.loss,
        "num_targets": totals.num_targets,
        "norm": norm,
        "clipped": clipped,
        "norm after": float(engine.gradient_norm()),
        "gradients": gradients,
        "mine": mine,
        "sharded": sum(isinstance(p, DTensor) for p in held.values()),
        "messages": {str(a.message) for a in batch.program.actions[engine.rank] if a.message},
        "backwards": [str(t.task) for t in engine.last_result.timeline if t.task.kind == "bwd"],
    }


def check(
    modules, family="llava", size=11, max_items=2, freeze=(), schedule="1f1b", timeout=90
) -> list[dict[str, Any]]:
    """Runs a layout and compares each rank with one process."""
    model, dataset, collator = make(family, size, max_items, freeze)
    loss, count, gradients = reference(model, collator(dataset))
    gradients = {name: gradient / count for name, gradient in gradients.items()}
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    world_size = plan_of(modules, family, freeze, schedule).world_size
    ranks = run_distributed(
        train_rank, world_size, modules, family, size, max_items, freeze, schedule, timeout=timeout
    )
    for found in ranks:
        assert found["num_targets"] == count
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert found["norm"] == found["clipped"] == pytest.approx(norm, rel=1e-5)
        assert found["norm after"] == pytest.approx(norm / 2, rel=1e-4)
        expected = {name: gradient for name, gradient in gradients.items() if name in found["mine"]}
        assert_close(found["gradients"], expected)
    assert set().union(*(found["mine"] for found in ranks)) >= set(gradients)
    return ranks


@functools.cache
def spec_of(family: str, freeze: tuple[str, ...]):
    return build_model_spec(make(family, 1, 1, freeze)[0])


def plan_of(modules: dict, family: str, freeze: tuple[str, ...] = (), schedule: str = "1f1b") -> ParallelPlan:
    return plan_for_model(MultimodalParallelPlugin(modules, schedule), spec_of(family, freeze), None)


LAYOUTS = {
    "vision tp 2, decoder tp 1": ({"vision": {"tp_size": 2}}, {}),
    "vision tp 1, decoder tp 2": ({LM: {"tp_size": 2}}, {}),
    "tp 2 and pp 2": ({"vision": {"tp_size": 2}, LM: {"tp_size": 2, "pp_size": 2}}, {"schedule": "gpipe"}),
    "dp 3 and 2": ({"vision": {"dp_size": 3}, LM: {"dp_size": 2}}, {}),
    "vision pp 2, decoder dp 2": ({"vision": {"pp_size": 2}, LM: {"dp_size": 2}}, {}),
    "dp 2 of tp 2, shared": ({"vision": {"dp_size": 2, "tp_size": 2}, LM: {"colocate_with": "vision"}}, {}),
    "tied embeddings": ({LM: {"dp_size": 2, "pp_size": 2}}, {"family": "gemma3"}),
    "deepstack": ({"vision": {"dp_size": 2}, LM: {"tp_size": 2, "layers_per_stage": [1, 3]}}, {"family": "qwen3_vl"}),
}


CORE = ("tp 2 and pp 2", "vision pp 2, decoder dp 2", "deepstack")


@pytest.mark.parametrize("name", [deep(name, unless=name in CORE) for name in LAYOUTS])
def test_a_layout_equals_one_process(name):
    modules, options = LAYOUTS[name]
    ranks = check(modules, **options)
    plan = plan_of(modules, options.get("family", "llava"))
    for rank, found in enumerate(ranks):
        sizes = {plan.stage(*key).tp_size for key in plan.stages_of_rank(rank)}
        assert (found["sharded"] > 0) == (sizes == {2})


ENCODERS = {
    "apart": {"vision": {"dp_size": 2}, "audio": {}, LM: {"pp_size": 2}},
    "shared": {"vision": {"dp_size": 2}, "audio": {"colocate_with": "vision"}, LM: {"colocate_with": "vision"}},
}


@pytest.mark.parametrize("name", [deep("apart"), "shared"])
def test_two_encoders_equal_one_process(name):
    check(ENCODERS[name], "two encoders")


def test_a_frozen_encoder_gets_no_gradient_and_runs_no_backward():
    modules = {"vision": {"dp_size": 2}, LM: {"pp_size": 2}}
    ranks = check(modules, freeze=("vision_tower", "multi_modal_projector"))
    assert [bool(found["backwards"]) for found in ranks] == [False, False, True, True]
    messages = set().union(*(found["messages"] for found in ranks))
    assert any(m.startswith("act fwd vision") for m in messages)
    assert any(m.startswith("grad") for m in messages)
    assert not [m for m in messages if m.startswith("grad") and "vision" in m]


@pytest.mark.deep
def test_a_trained_projector_before_a_frozen_language_model():
    ranks = check({"vision": {"pp_size": 2}, LM: {"tp_size": 2}}, freeze=("vision_tower", "language_model", "lm_head"))
    assert [bool(found["backwards"]) for found in ranks] == [False, True, True, True]


@pytest.mark.deep
def test_parameters_that_no_rank_used_keep_no_gradient():
    ranks = check({"vision": {"dp_size": 2}, LM: {"dp_size": 2}}, max_items=0)
    for found in ranks[:2]:
        assert found["mine"] and found["gradients"] == {}
