"""Stages of every family give the loss and the gradients of the whole model."""

import copy
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_mmparallel.modeling import ModuleStage, build_model_spec, is_hollow, prepare_stages, token_loss
from hf_mmparallel.plan import LANGUAGE_MODEL, ModelSpec, ModulePlan, ParallelPlan, Stage
from tests import tiny

torch.set_num_threads(1)


def make_plan(spec: ModelSpec, cuts: Mapping[str, Sequence[int]], **options) -> ParallelPlan:
    """One replica of each module, cut before the given layers, each stage on a rank of its own."""
    modules, rank = {}, 0
    for name, module in spec.modules.items():
        bounds = [0, *cuts.get(name, ()), module.num_layers]
        stages = []
        for first, stop in zip(bounds, bounds[1:]):
            stages.append(Stage((first, stop), ((rank,),)))
            rank += 1
        modules[name] = ModulePlan((tuple(stages),), **options.get(name, {}))
    return ParallelPlan(modules)


def reference(model: PreTrainedModel, batch: dict) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (a sum over target tokens) and gradients of the whole model."""
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
    loss, _ = token_loss(model, logits, batch["labels"])
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def wire(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What arrives on another rank: the values, without the graph."""
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def run_module(stages: Sequence[ModuleStage], batch: dict, features: dict | None = None) -> list[tuple]:
    """(received, features of the stage, returned) of each stage, run in order."""
    done, hidden = [], None
    for stage in stages:
        given = {
            name: [t if stage.layers[0] <= s.layer < stage.layers[1] else None for t, s in zip(tensors, specs)]
            for name, tensors in (features or {}).items()
            for specs in [stage.spec.modules[name].features]
        }
        if not stage.is_first:
            assert [t.shape for t in hidden] == stage.input_shapes(batch)
            assert all(t.dtype == stage.input_dtype for t in hidden)
        output = stage(batch, hidden, given)
        done.append((hidden or [], output))
        hidden = wire(output)
    return done


def push_back(done: list[tuple], gradients: list[Tensor | None]) -> None:
    """Backward through the stages of a module, last first."""
    for received, output in reversed(done):
        pairs = [(o, g) for o, g in zip(output, gradients) if g is not None and o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        gradients = [tensor.grad for tensor in received]


def run_stages(model: PreTrainedModel, plan: ParallelPlan, batch: dict) -> tuple[Tensor, dict[str, Tensor], list]:
    """Loss and summed gradients of a cut model, each rank with a pruned copy of its own; and these copies."""
    spec = build_model_spec(model)
    models = [copy.deepcopy(model) for _ in range(plan.world_size)]
    stages: dict = {}
    for rank, own in enumerate(models):
        stages.update(prepare_stages(own, spec, plan, rank))
    chains = {
        name: [stages[name, 0, index] for index in range(len(module.replicas[0]))]
        for name, module in plan.modules.items()
    }
    encoded = {name: run_module(chains[name], batch) for name in spec.encoders}
    features = {name: wire(done[-1][1]) for name, done in encoded.items()}
    text = {k: v for k, v in batch.items() if not k.startswith(("pixel_values", "input_features"))}
    decoded = run_module(chains[LANGUAGE_MODEL], text, features)
    logits = wire(decoded[-1][1])
    loss, _ = token_loss(model, logits[0], batch["labels"])
    loss.backward()
    push_back(decoded, [logits[0].grad])
    for name, done in encoded.items():
        push_back(done, [tensor.grad for tensor in features[name]])
    grads: dict[str, Tensor] = {}
    for own in models:
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                grads[name] = grads[name] + parameter.grad if name in grads else parameter.grad
    return loss.detach(), grads, models


def assert_same(model: PreTrainedModel, plan: ParallelPlan, batch: dict) -> list[PreTrainedModel]:
    """Compares a cut model with the whole one, bit for bit but for tied weights, whose two gradients are added."""
    loss, grads = reference(copy.deepcopy(model), batch)
    cut_loss, cut_grads, models = run_stages(model, plan, batch)
    tied = build_model_spec(model).tied
    assert torch.equal(loss, cut_loss)
    assert grads.keys() == cut_grads.keys()
    for name, grad in grads.items():
        if name in tied:
            torch.testing.assert_close(cut_grads[name], grad, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(cut_grads[name], grad), name
    return models


def make_batch(family: str, text_only: bool = False, size: int = 4) -> dict[str, Tensor]:
    return tiny.collate(family)(tiny.make_dataset(family, size, max_items=0 if text_only else 2))


def cuts_of(family: str) -> list[dict[str, list[int]]]:
    """The cuts that a family is tested with."""
    cuts: list[dict[str, list[int]]] = [{}, *({LANGUAGE_MODEL: [i]} for i in range(1, tiny.NUM_LAYERS))]
    cuts.append({LANGUAGE_MODEL: [1, 3]})
    if family not in ("llama", "llama_tied", "qwen3_vl"):
        encoder = "audio" if family == "voxtral" else "vision"
        cuts += [{encoder: [1]}, {encoder: [2, 3], LANGUAGE_MODEL: [2]}]
    return cuts


@pytest.mark.parametrize(
    ("family", "cuts"), [pytest.param(f, c, id=f"{f}-{c}") for f in tiny.FAMILIES for c in cuts_of(f)]
)
def test_stages_equal_the_whole_model(family, cuts):
    model = tiny.FAMILIES[family]().train()
    assert_same(model, make_plan(build_model_spec(model), cuts), make_batch(family))
