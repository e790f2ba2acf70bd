"""Parameters that a rank gets later."""

import torch
from torch import nn

from hf_mmparallel.runtime.weight_placement import load_nothing


def test_nothing_takes_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(300, 200, dtype=torch.bfloat16), nn.Linear(200, 100))
        model[1].bias.requires_grad_(False)
    before = {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    yielded = [list(names) for names in load_nothing(torch.device("cpu"))(model, [["0.weight", "0.bias"]])]
    assert yielded == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()} == before
    assert all(p.device.type == "cpu" and p.untyped_storage().nbytes() <= 4 for p in model.parameters())
