"""Which layers are gathered in a pass, and when; `tests/trainer/test_sharding.py` compares gradients and memory."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_mmparallel.plan import SyncGroup
from hf_mmparallel.runtime.joint_passes import GradientSums, StagePasses
from hf_mmparallel.runtime.optimizer_slices import OptimizerSlices
from hf_mmparallel.schedule.kinds import WHOLE_PASSES
from tests.distributed import run_distributed

STAGES = (("m", 0, 0), ("m", 1, 0))


class Stack(nn.Module):
    """An embedding-like matrix, which is in no layer, and three layers, the last of which has an odd shape."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def passes_of(model: Stack, groups: list[SyncGroup], **settings: Any) -> StagePasses:
    """The passes of a stage that is the stack, with its parameters divided."""
    slices = OptimizerSlices(groups, dict(model.named_parameters()), dist.get_rank(), {(0, 1): dist.group.WORLD})
    stage: Any = SimpleNamespace(
        parameters=model.named_parameters, own_layers=dict(enumerate(model.layers)), module_name="m", modality=None
    )
    return StagePasses(stage, slices, GradientSums(), **settings)


def with_memory(model: Stack) -> list[int]:
    """Indices of the layers whose weights have memory."""
    return [i for i, layer in enumerate(model.layers) if layer.weight.untyped_storage().nbytes()]


@contextlib.contextmanager
def one_pass(passes: StagePasses) -> Iterator[None]:
    passes.begin(False)
    passes.compute()
    yield
    passes.end()


def run_frozen() -> tuple[list[int], list[int]]:
    """Layers with memory while the last of three layers runs backwards, the only one with a backward; and after it."""
    model = Stack()
    model.requires_grad_(False)
    model.layers[2].requires_grad_(True)
    groups = [SyncGroup((0, 1), (name,), STAGES, 2, 3) for name, _ in model.named_parameters()]
    passes = passes_of(model, groups, first_backward=2)
    passes.start_step(WHOLE_PASSES, (None,))
    with one_pass(passes):
        output = model(torch.ones(2, 4))
    seen: list[int] = []
    output.register_hook(lambda gradient: seen.extend(with_memory(model)))
    with one_pass(passes):
        output.sum().backward()
    return seen, with_memory(model)


def run_backwards() -> str:
    """What is said when the layers run from the last to the first."""
    model = Stack()
    names = tuple(name for name, _ in model.named_parameters())
    passes = passes_of(model, [SyncGroup((0, 1), names, STAGES, 2, 3)])
    passes.start_step(WHOLE_PASSES[:1], (None,))
    passes.begin(False)
    passes.compute()
    model.layers[2](model.layers[1](torch.ones(1, 4)))
    with pytest.raises(Exception) as raised:
        model.layers[0](torch.ones(1, 4))
    return str(raised.value)


def shared_parameter() -> tuple[int, int]:
    """The number of parameters gathered with layer 1, and of those that are in no layer, when two layers share one."""
    model = Stack()
    model.layers[1].weight = model.layers[0].weight
    names = tuple(name for name, _ in model.named_parameters() if "bias" not in name)
    units = passes_of(model, [SyncGroup((0, 1), names, STAGES[:1], 2, 3)]).units
    return tuple(sum(len(group.members) for group in units[index].groups) for index in (1, -1))


def on_a_rank() -> tuple[Any, Any, str]:
    return run_frozen(), shared_parameter(), run_backwards()


@pytest.mark.distributed
def test_layers_are_gathered_where_they_are_needed_and_in_order():
    for frozen, shared, backwards in run_distributed(on_a_rank, 2):
        assert frozen == ([2], [])  # not for a backward that is none
        assert shared == (0, 2)  # a parameter of two layers comes with what is in no layer
        assert "Layer 0 of a stage of `m`" in backwards
