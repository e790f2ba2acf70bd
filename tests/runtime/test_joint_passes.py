"""Layers are gathered and freed in a pass, and ranks without samples take part in all of its collectives."""

from __future__ import annotations

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
from tests.distributed import run_distributed

pytestmark = pytest.mark.distributed
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


def passes_of(
    model: Stack, groups: list[SyncGroup], sums: GradientSums | None = None, **settings: Any
) -> tuple[StagePasses, OptimizerSlices]:
    """The passes of a stage that is the stack, with its parameters divided."""
    named = dict(model.named_parameters())
    slices = OptimizerSlices(groups, named, dist.get_rank(), {(0, 1): dist.group.WORLD})
    stage: Any = SimpleNamespace(
        parameters=model.named_parameters, own_layers=dict(enumerate(model.layers)), module_name="m", modality=None
    )
    return StagePasses(stage, slices, sums or GradientSums(), **settings), slices


def make(zero_stage: int) -> tuple[Stack, StagePasses, OptimizerSlices, GradientSums]:
    """The stack on this rank, the same on both."""
    torch.manual_seed(0)
    model, sums = Stack(), GradientSums()
    names = tuple(name for name, _ in model.named_parameters())
    return model, *passes_of(model, [SyncGroup((0, 1), names, STAGES, 2, zero_stage)], sums), sums


def with_memory(model: Stack) -> list[int]:
    """Indices of the layers whose weights have memory."""
    return [i for i, layer in enumerate(model.layers) if layer.weight.untyped_storage().nbytes()]


@contextlib.contextmanager
def one_pass(passes: StagePasses, is_empty: bool = False) -> Iterator[None]:
    passes.begin(is_empty)
    passes.compute()
    yield
    passes.end()


def run_step(zero_stage: int) -> tuple[dict[str, torch.Tensor], list[list[int]], list[int], int]:
    """
    Rank 0 has two microbatches, rank 1 one. The sums of gradients of rank 0's and rank 1's slices by name, the layers
    with memory at each forward of a layer, those after the step, and the number of elements that are updated here.
    """
    model, passes, slices, sums = make(zero_stage)
    seen: list[list[int]] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append(with_memory(model)))
    passes.start_step(["fwd", "fwd", "bwd", "bwd"], (None,))
    rank, outputs = dist.get_rank(), []
    for microbatch in range(4):
        is_backward, is_empty = microbatch > 1, rank == microbatch % 2 == 1
        with one_pass(passes, is_empty):
            if is_backward and not is_empty:
                outputs[microbatch % 2].sum().backward()
            elif not is_empty:
                outputs.append(model(torch.full((2, 4), 1.0 + rank + microbatch)))
    assert all(parameter.grad is None for parameter in model.parameters())
    result = {}
    (group,) = slices.groups
    for bucket, mine in sums.take(group.flat_slice, group.members):
        start = 0
        for parameter in bucket:
            length = group.flat_slice.length(parameter.numel())
            whole = group.flat_slice.whole(mine[start : start + length], parameter.numel())
            name = next(n for n, p in model.named_parameters() if p is parameter)
            result[name] = whole.view(parameter.shape)
            start += length
    updated = sum(slices.updated_tensor(parameter).numel() for parameter in model.parameters())
    return result, seen, with_memory(model), updated


def run_frozen() -> tuple[list[int], list[int]]:
    """Layers with memory while the last of three layers runs backwards, the only one with a backward; and after it."""
    model = Stack()
    model.requires_grad_(False)
    model.layers[2].requires_grad_(True)
    groups = [SyncGroup((0, 1), (name,), STAGES, 2, 3) for name, _ in model.named_parameters()]
    passes, _ = passes_of(model, groups, first_backward=2)
    passes.start_step(["fwd", "bwd"], (None,))
    with one_pass(passes):
        output = model(torch.ones(2, 4))
    seen: list[int] = []
    output.register_hook(lambda gradient: seen.extend(with_memory(model)))
    with one_pass(passes):
        output.sum().backward()
    return seen, with_memory(model)


def run_backwards() -> str:
    """What is said when the layers run from the last to the first."""
    model, passes, _, _ = make(3)
    passes.start_step(["fwd"], (None,))
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
    units = passes_of(model, [SyncGroup((0, 1), names, STAGES[:1], 2, 3)])[0].units
    return tuple(sum(len(group.members) for group in units[index].groups) for index in (1, -1))


def on_a_rank() -> dict[Any, Any]:
    steps = {zero_stage: run_step(zero_stage) for zero_stage in (2, 3)}
    return {**steps, "frozen": run_frozen(), "shared": shared_parameter(), "backwards": run_backwards()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_distributed(on_a_rank, 2)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_gradients_are_those_of_all_microbatches(ranks: list[dict[Any, Any]], zero_stage: int):
    torch.manual_seed(0)
    model = Stack()
    for value in (1.0, 2.0, 2.0):
        model(torch.full((2, 4), value)).sum().backward()
    for result, seen, left, updated in (rank[zero_stage] for rank in ranks):
        assert result.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result[name], parameter.grad)
        if zero_stage == 3:
            assert all(layers in ([0], [0, 1], [1], [1, 2], [2]) for layers in seen) and not left
        else:
            assert left == [0, 1, 2]
        assert updated < 0.6 * sum(parameter.numel() for parameter in model.parameters())


def test_layers_are_gathered_where_they_are_needed_and_in_order(ranks: list[dict[Any, Any]]):
    for rank in ranks:
        assert rank["frozen"] == ([2], [])  # not for a backward that is none
        assert rank["shared"] == (0, 2)  # a parameter of two layers comes with what is in no layer
        assert "Layer 0 of a stage of `m`" in rank["backwards"]
