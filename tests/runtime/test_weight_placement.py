"""Parameters that a rank gets later."""

from __future__ import annotations

import torch
from torch import nn

from hf_mmparallel.runtime.weight_placement import load_nothing


def test_nothing_takes_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(300, 200, dtype=torch.bfloat16), nn.Linear(200, 100))
        model[1].bias.requires_grad_(False)
    shapes = {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}
    layers = [["0.weight", "0.bias"]]
    yielded = [list(names) for names in load_nothing(torch.device("cpu"))(model, layers)]
    assert yielded == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    parameters = dict(model.named_parameters())
    assert {name: (parameter.shape, parameter.dtype) for name, parameter in parameters.items()} == shapes
    assert all(p.device.type == "cpu" and p.untyped_storage().nbytes() <= 4 for p in parameters.values())
    assert [name for name, parameter in parameters.items() if not parameter.requires_grad] == ["1.bias"]
