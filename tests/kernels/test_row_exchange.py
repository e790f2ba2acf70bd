"""Rows of several tensors that travel together arrive as they were, and so do their gradients."""

import pytest
import torch

from hf_mmparallel.kernels import row_exchange
from hf_mmparallel.kernels.row_exchange import RowExchange, layout_of


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_rows_of_unlike_dtypes_arrive(num_rows: int, monkeypatch: pytest.MonkeyPatch):
    # a row of all of them is no multiple of the widest dtype
    drawn = torch.Generator().manual_seed(num_rows)
    features = torch.randn(num_rows, 3, generator=drawn).requires_grad_()
    numbers = torch.randint(9, (num_rows, 1), generator=drawn)
    none = torch.empty(num_rows, 0)
    monkeypatch.setattr(row_exchange, "_all_to_all", lambda output, rows, *sizes: output.copy_(rows))
    tensors = (features, numbers, none)
    arrived = RowExchange.apply(None, None, [num_rows], [num_rows], layout_of(tensors), *tensors)
    assert all(torch.equal(*pair) for pair in zip(arrived, tensors, strict=True))
    weights = torch.randn(num_rows, 3, generator=drawn)
    (arrived[0] * weights).sum().backward()
    assert features.grad is not None and torch.equal(features.grad, weights)
