"""Sums of gradients over ranks, what the norm counts, and clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_mmparallel.plan import SyncGroup
from hf_mmparallel.runtime.gradients import GradientSync, clip_gradients, gradient_norm, scale_gradients
from tests.distributed import run_distributed

NAMES = ("a", "half", "unused", "b")


def parameters(rank: int) -> dict[str, nn.Parameter]:
    """`a` has a gradient on all ranks, `b` and `half` on rank 1 only, `unused` on none."""
    result = {name: nn.Parameter(torch.ones(2, 3)) for name in NAMES}
    result["half"] = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    result["a"].grad = torch.full((2, 3), 10.0 ** (rank - 1))
    if rank == 1:
        result["b"].grad = torch.arange(6.0).view(2, 3)
        result["half"].grad = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    return result


def sum_rank() -> tuple[dict[str, Any], list[float]]:
    """Ranks 1 and 2 sum everything, rank 0 is in no group."""
    rank = dist.get_rank()
    own = parameters(rank)
    both = (1, 2)
    groups = [SyncGroup(both, ("a", "half", "unused"), ()), SyncGroup(both, ("b",), ())]
    made = dist.new_group(list(both))
    sync = GradientSync(groups, own, rank, {both: made})
    if rank:
        sync.start(0)
        sync.start(1)
    sync.finish()
    mine = {n: None if p.grad is None else p.grad.flatten().tolist() for n, p in own.items()}
    own["a"].grad.neg_()
    sync.finish()
    again = own["a"].grad.flatten().tolist()
    return mine, again


def norm_rank() -> float:
    """Each rank counts one value; the last rank counts nothing."""
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([3.0 + rank])
    counted = [parameter, nn.Parameter(torch.zeros(1))] if rank < 2 else []
    return float(gradient_norm(counted, torch.device("cpu")))


@pytest.mark.distributed
def test_gradients_are_summed_and_unused_parameters_keep_none():
    (alone, _), *members = run_distributed(sum_rank, 3)
    assert alone == {"a": pytest.approx([0.1] * 6), "half": None, "unused": None, "b": None}
    for mine, again in members:
        assert mine == {"a": [11.0] * 6, "half": [1.0, 2.0], "unused": None, "b": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}
        assert again == [-value for value in mine["a"]]


@pytest.mark.distributed
def test_the_norm_is_over_all_ranks():
    assert run_distributed(norm_rank, 3) == [pytest.approx(5.0)] * 3


def test_the_norm_is_that_of_torch():
    own = parameters(1)
    expected = nn.utils.get_total_norm([p.grad.float() for p in own.values() if p.grad is not None])
    norm = gradient_norm(list(own.values()), torch.device("cpu"))
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected)
    assert gradient_norm([], torch.device("cpu")) == 0


def test_small_gradients_do_not_vanish_in_the_norm():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 1e-25)
    assert float(gradient_norm([parameter], torch.device("cpu"))) == pytest.approx(2**0.5 * 1e-25, rel=1e-5)


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e9])
def test_clipping_is_that_of_torch(max_norm):
    own, other = parameters(1), parameters(1)
    del own["half"], other["half"]  # whose norm torch rounds to bfloat16
    norm = gradient_norm(list(own.values()), torch.device("cpu"))
    clip_gradients(list(own.values()), norm, max_norm)
    nn.utils.clip_grad_norm_(list(other.values()), max_norm, foreach=False)
    for name, parameter in own.items():
        if parameter.grad is None:
            assert other[name].grad is None
        else:
            torch.testing.assert_close(parameter.grad, other[name].grad)


def test_scaling_skips_what_has_no_gradient():
    own = parameters(1)
    scale_gradients(list(own.values()), 0.5)
    assert own["b"].grad.flatten().tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert own["half"].grad.tolist() == [0.5, 1.0]
    assert own["unused"].grad is None
    scale_gradients([own["unused"]], 0.5)
