"""Frozen layers in host memory: equal outputs and gradients, freed buffers, one layer ahead."""

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from hf_mmparallel.modeling.streamed_layers import StreamedLayers

WIDTH, DEPTH = 16, 5


class Layer(nn.Module):
    """A product, a norm's weight and a small trained matrix, with recomputation if it is asked for."""

    def __init__(self):
        super().__init__()
        self.gradient_checkpointing = False
        self.matrix, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.requires_grad_(False)
        self.adapter = nn.Parameter(torch.randn(WIDTH, WIDTH) / 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.matrix(hidden * self.scale)) @ self.adapter


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            recompute = layer.gradient_checkpointing and layer.training
            hidden = checkpoint(layer, hidden, use_reentrant=False) if recompute else layer(hidden)
        return hidden


def streamed_stack() -> tuple[Stack, StreamedLayers]:
    model = Stack()
    return model, StreamedLayers(dict(enumerate(model.layers)), torch.device("cpu"))


def gradients(model: Stack, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Outputs of two microbatches, and gradients of inputs and adapters; both forwards run before the backwards."""
    leaves = [part.clone().requires_grad_() for part in hidden]
    outputs = [model(leaf) for leaf in leaves]
    for output in outputs:
        output.square().sum().backward()
    found = [layer.adapter.grad.clone() for layer in model.layers]
    model.zero_grad()
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves), *found]


@pytest.mark.parametrize("recompute", [False, True])
def test_outputs_and_gradients_are_equal(recompute: bool):
    model, hidden = Stack(), torch.randn(2, 3, WIDTH)
    for layer in model.layers:
        layer.gradient_checkpointing = recompute
    want = gradients(copy.deepcopy(model), hidden)
    streamed = StreamedLayers(dict(enumerate(model.layers)), torch.device("cpu"))
    one = streamed._host[0].numel()
    for _ in range(2):
        got = gradients(model, hidden)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert streamed.bytes_on_device == 0 and streamed.peak_bytes == 2 * one
    with torch.no_grad():
        assert torch.equal(model(hidden[0]), want[0]) and streamed.bytes_on_device == 0


def test_nothing_of_frozen_weights_stays_for_the_backward():
    model, streamed = streamed_stack()
    bring, storages = streamed._bring, []

    def noting(index: int):
        buffer = bring(index)
        storages.append(StorageWeakRef(buffer.values.untyped_storage()))
        return buffer

    streamed._bring = noting
    hosts = {host.untyped_storage().data_ptr() for host in streamed._host.values()}
    output = model(torch.randn(3, WIDTH, requires_grad=True))
    places = {p.untyped_storage().data_ptr() for p in model.parameters() if not p.requires_grad}
    assert places == hosts and streamed.bytes_on_device == 0
    assert storages and all(storage.expired() for storage in storages)
    output.sum().backward()
    assert streamed.bytes_on_device == 0


def test_weights_in_host_memory_can_be_read_changed_and_cast():
    (model, streamed), other = streamed_stack(), Stack()
    model.load_state_dict(other.state_dict())
    hidden = torch.randn(3, WIDTH)
    with torch.no_grad():
        assert torch.equal(model(hidden), other(hidden))
        model.bfloat16()
        other.bfloat16()
        streamed.hold()
        assert torch.equal(model(hidden.bfloat16()), other(hidden.bfloat16()))
    assert model.layers[0].matrix.weight.dtype == torch.bfloat16


def test_a_forward_that_fails_leaves_the_weights_in_host_memory():
    model, streamed = streamed_stack()
    with pytest.raises(RuntimeError):
        model(torch.randn(3, WIDTH + 1))
    assert model.layers[0].scale.untyped_storage().data_ptr() == streamed._host[0].untyped_storage().data_ptr()
    with torch.no_grad():
        model(torch.randn(3, WIDTH))
    assert streamed.bytes_on_device == 0
