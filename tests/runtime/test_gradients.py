"""Sums of gradients over ranks, what the norm counts, and clipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_mmparallel.plan import ParameterShards, SyncGroup
from hf_mmparallel.plan.ownership import Cut, Shard
from hf_mmparallel.runtime import gradients
from hf_mmparallel.runtime.gradients import (
    GradientSync,
    accumulate_in_float32,
    clip_gradients,
    gradient_norm,
    narrow,
    owned_cuts,
    round_gradients,
    scale_gradients,
)
from hf_mmparallel.world import World
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


def whole(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, tuple[Cut, ...]]]:
    """Parameters of which everything is counted."""
    return [(parameter, ()) for parameter in parameters]


def norm_rank() -> float:
    """Each rank counts one value; the last rank counts nothing."""
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([3.0 + rank])
    counted = [parameter, nn.Parameter(torch.zeros(1))] if rank < 2 else []
    return float(gradient_norm(whole(counted), World()))


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
    norm = gradient_norm(whole(own.values()), World())
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected)
    assert gradient_norm([], World()) == 0


def test_small_gradients_do_not_vanish_in_the_norm():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 1e-25)
    assert float(gradient_norm(whole([parameter]), World())) == pytest.approx(2**0.5 * 1e-25, rel=1e-5)


@st.composite
def tables(draw: st.DrawFn) -> tuple[tuple[int, int], ParameterShards]:
    """
    A shape, and where a parameter of it lives: cut by tp or whole, and then on all dp ranks, cut over them, or cut
    with all slices on each of them. Ranks are numbered dp rank by dp rank.
    """
    num_blocks, tp_size, dp_size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = (draw(st.integers(1, 5)), num_blocks * draw(st.integers(1, 5)))
    by_tp = [(Cut("tp", 1, i, tp_size, num_blocks),) for i in range(tp_size)] if draw(st.booleans()) else [()]
    zero, dim = draw(st.sampled_from(["none", "moments", "weights"])), draw(st.sampled_from([None, 0]))
    copies = []
    for index, cuts in enumerate(by_tp):
        columns = range(tp_size) if len(by_tp) == 1 else [index]
        ranks = [tuple(dp * tp_size + column for column in columns) for dp in range(dp_size)]
        holders = tuple(sorted(rank for group in ranks for rank in group))
        if zero == "none":
            copies.append(Shard(cuts, holders, draw(st.sampled_from(holders))))
        else:
            for dp, group in enumerate(ranks):
                on = holders if zero == "moments" else group
                copies.append(Shard((*cuts, Cut("dp", dim, dp, dp_size)), on, draw(st.sampled_from(on))))
    return shape, ParameterShards((), tuple(copies))


@given(tables())
def test_every_element_is_counted_once_whoever_holds_it(table):
    shape, shards = table
    gradient = torch.arange(1, 1 + shape[0] * shape[1]).double().view(shape)
    counted = torch.zeros_like(gradient)
    for rank in range(9):
        held = shards.on_rank(rank)
        indices = torch.arange(gradient.numel()).view(shape)
        for cuts in owned_cuts(shards, rank):
            made = held[0].cuts[: len(held[0].cuts) - len(cuts)]  # before anything is counted: what the rank holds
            assert all(shard.cuts[: len(made)] == made for shard in held)
            assert len(held) == 1 or len(cuts) == 1
            counted.view(-1)[narrow(narrow(indices, made), cuts).reshape(-1)] += 1
    assert torch.equal(counted, torch.ones_like(counted))


def test_the_norm_counts_the_owned_slice_of_what_a_rank_holds_whole():
    parameter = nn.Parameter(torch.zeros(2, 4))
    parameter.grad = torch.arange(8.0).view(2, 4)
    shards = ParameterShards((), tuple(Shard((Cut("dp", None, i, 3),), (0, 1, 2), i) for i in range(3)))
    squares = [
        float(gradient_norm([(parameter, cuts) for cuts in owned_cuts(shards, rank)], World())) ** 2
        for rank in range(3)
    ]
    assert squares == pytest.approx([0 + 1 + 4, 9 + 16 + 25, 36 + 49])


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e9])
def test_clipping_is_that_of_torch(max_norm):
    own, other = parameters(1), parameters(1)
    del own["half"], other["half"]  # whose norm torch rounds to bfloat16
    norm = gradient_norm(whole(own.values()), World())
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


def test_half_precision_gradients_add_up_in_float32_and_are_rounded_once():
    values = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = values.double().sum(0)
    errors = {}
    for name in ("float32", "bfloat16"):
        parameter = nn.Parameter(torch.ones(16, dtype=torch.bfloat16))
        if name == "float32":
            accumulate_in_float32([parameter])
        for row in values:
            (parameter * row).sum().backward()
        assert str(parameter.grad.dtype) == f"torch.{name}"
        round_gradients([parameter])
        assert parameter.grad.dtype == torch.bfloat16
        errors[name] = (parameter.grad.double() - exact).abs().max().item()
    assert errors["float32"] == (exact.bfloat16().double() - exact).abs().max().item()
    assert errors["bfloat16"] > 3 * errors["float32"]
    wide = nn.Parameter(torch.ones(2))
    wide.grad = gradient = torch.ones(2)
    accumulate_in_float32([wide])
    round_gradients([wide])
    assert wide.grad is gradient  # nothing is copied


def buckets_rank() -> list[list[float] | None]:
    """Sums of parameters that are smaller than a bucket, fill one, and are larger; the last is unused."""
    rank = dist.get_rank()
    gradients.GRADIENT_BUCKET_BYTES = 64
    sizes = (3, 5, 40, 16, 1, 2)
    own = {str(i): nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for i, size in enumerate(sizes)}
    own["3"] = nn.Parameter(torch.zeros(4, 4).double())
    accumulate_in_float32(own.values())
    for i, parameter in enumerate(own.values()):
        if i != rank and i != len(own) - 1:
            parameter.grad = torch.full_like(parameter, 10.0**rank * (i + 1), dtype=parameter.grad_dtype)
    sync = GradientSync([SyncGroup((0, 1), tuple(own), ())], own, rank, {(0, 1): dist.group.WORLD})
    sync.start(0)
    sync.finish()
    scale_gradients(list(own.values()), 0.5)
    return [None if p.grad is None else sorted(set(p.grad.flatten().tolist())) for p in own.values()]


@pytest.mark.distributed
def test_buckets_have_the_sums():
    for mine in run_distributed(buckets_rank, 2):
        assert mine == [[5.0], [1.0], [16.5], [22.0], [27.5], None]
