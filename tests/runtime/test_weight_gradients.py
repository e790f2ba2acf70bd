"""Gradients of weights that are put off: the bits of whole backwards, and the memory that stays for them."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.cost.stage_memory import stage_memory
from hf_mmparallel.modeling import build_model_spec, prepare_stages
from hf_mmparallel.plan import LANGUAGE_MODEL, resolve_plan
from hf_mmparallel.runtime.executor import WeightGradients, cut_by_work
from tests import tiny
from tests.schedule.builders import splitting

LM = LANGUAGE_MODEL


class Stage:
    """What a stage is for weight gradients: the layers of a model."""

    def __init__(self, model: nn.Module, layers: dict[int, nn.Module]):
        self.model, self.own_layers = model, layers

    def parameters(self):
        return self.model.named_parameters()


class Tangle(nn.Module):
    """Linear layers with and without a bias, one that runs twice, a weight of two layers, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6, bias=False))
        self.twice, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight
        self.norm = nn.LayerNorm(6)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.twice(self.twice(self.first(input)).relu()))
        changed = self.one(hidden)
        changed += hidden  # in place
        return self.other(self.norm(changed).relu())


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_the_gradients_of_several_chunks_are_those_of_whole_backwards(dtype, is_cast, at_once):
    torch.manual_seed(0)
    model, inputs = Tangle().to(dtype), torch.randn(3, 2, 5, 6, dtype=dtype)

    def run(chunk: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if is_cast else nullcontext():
            return model(chunk).float().square().sum()

    def check(found: dict[str, torch.Tensor]) -> None:
        assert found.keys() == expected.keys()
        unlike = [name for name in found if not torch.equal(found[name], expected[name])]
        assert all(name.startswith("twice.") and is_cast for name in unlike)
        for name in unlike:  # autocast adds the gradients of a layer that runs twice in bfloat16, before it casts them
            torch.testing.assert_close(found[name].bfloat16(), expected[name].bfloat16())

    for chunk in inputs:
        run(chunk).backward()
    expected = gradients_of(model)
    model.zero_grad()
    owner = WeightGradients([Stage(model, {0: model.first, 1: model.twice})])
    put_off, reached = [], []
    for chunk in inputs:
        loss = run(chunk)
        with owner.put_off() as gradients:
            loss.backward()
        put_off.append(gradients)
    assert model.twice.weight.grad is None and model.twice.bias.grad is not None
    assert model.one.weight.grad is not None  # that of two layers is not put off
    if at_once:  # two tasks for the layers of all chunks
        parts = cut_by_work(owner.by_layer(put_off), 2)
        assert all(parts) and sum(map(len, parts)) == 3
    else:
        parts = [owner.by_layer([gradients]) for gradients in put_off]
    put_off.clear()
    for gradients in parts:
        owner.add(gradients, reached.append)
        assert not gradients
    check(gradients_of(model))
    assert reached == ([1, 0, 0] if at_once else [1, 0] * 3)
    model.zero_grad()
    for chunk in inputs:  # not put off
        run(chunk).backward()
    check(gradients_of(model))


@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("family", ["llama_tied", "llava", "qwen2_5_vl", "qwen3_vl"])
def test_what_stays_has_the_predicted_size(family, is_cast):
    model = tiny.FAMILIES[family]().train()
    spec = build_model_spec(model)
    plan = splitting(resolve_plan(spec, {}))
    rank = plan.modules[LM].replicas[0][0].all_ranks[0]
    stage = prepare_stages(model, spec, plan, rank)[LM, 0, 0]
    owner = WeightGradients([stage])
    layers = nn.ModuleList(stage.own_layers.values())
    with owner.put_off() as gradients:
        tower = model.get_submodule(spec.language_model.tower)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            hidden = tower(input_ids=torch.arange(24).view(2, 12) % 90 + 1)[0]
        hidden.float().square().sum().backward()
    tensors = [tensor for one in gradients for tensor in (one.input, one.output_gradient)]
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    memory = stage_memory(
        analytic_costs(spec, find_device("h100"), 2 if is_cast else 4), plan, LM, plan.modules[LM].replicas[0][0]
    )
    chunk = torch.tensor([0.0, 24.0, 1.0]).numpy()
    assert len(gradients) == sum(type(m) is nn.Linear for m in layers.modules())
    assert sum(held.values()) == pytest.approx(memory.put_off_bytes(chunk), rel=0.01)
