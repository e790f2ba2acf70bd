"""Sums of gradients over ranks, what the norm counts, and clipping."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_mmparallel.plan import SyncGroup
from hf_mmparallel.runtime import optimizer_slices
from hf_mmparallel.runtime.gradients import (
    GradientSync,
    accumulate_in_float32,
    clip_gradients,
    gradient_square,
    norm_of_square,
    round_gradients,
    scale_gradients,
)
from hf_mmparallel.runtime.joint_passes import GradientSums
from hf_mmparallel.runtime.optimizer_slices import FlatSlice, OptimizerSlices, Region, by_slice
from hf_mmparallel.world import World
from tests.distributed import run_distributed

NAMES = ("a", "half", "unused", "b")


def gradient_norm(counted: list[nn.Parameter]) -> torch.Tensor:
    world = World()
    return norm_of_square(world.all_reduce(gradient_square(counted, world.device)), counted)


def parameters(rank: int) -> dict[str, nn.Parameter]:
    """`a` has a gradient on all ranks, `b` and `half` on rank 1 only, `unused` on none."""
    result = {name: nn.Parameter(torch.ones(2, 3)) for name in NAMES}
    result["half"] = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    result["a"].grad = torch.full((2, 3), 10.0 ** (rank - 1))
    if rank == 1:
        result["b"].grad = torch.arange(6.0).view(2, 3)
        result["half"].grad = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    return result


def sum_and_norm() -> tuple[dict[str, Any], float]:
    """Ranks 1 and 2 sum everything, rank 0 is in no group; the norm of values of which rank 2 counts none."""
    rank = dist.get_rank()
    own = parameters(rank)
    both = (1, 2)
    groups = [SyncGroup(both, ("a", "half", "unused"), ()), SyncGroup(both, ("b",), ())]
    made = dist.new_group(list(both))
    sync = GradientSync(groups, own, rank, {both: made}, OptimizerSlices(groups, own, rank, {}))
    if rank:
        sync.start(0)
        sync.start(1)
    sync.finish(World().all_reduce(sync.used(), "max"))
    own["a"].grad.neg_()
    sync.finish()  # which has nothing left to do
    counted = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))] if rank < 2 else []
    for parameter in counted[:1]:
        parameter.grad = torch.tensor([3.0 + rank])
    sums = {name: None if p.grad is None else p.grad.flatten().tolist() for name, p in own.items()}
    return sums, float(gradient_norm(counted))


def of_three() -> tuple[dict[str, Any], float, list[Any]]:
    return *sum_and_norm(), unlike_rank()


@pytest.mark.distributed
def test_gradients_are_summed_unused_parameters_keep_none_and_norms_are_over_all_ranks():
    (alone, *members), norms, (first, second, both) = zip(*run_distributed(of_three, 3), strict=True)
    assert norms == (pytest.approx(5.0),) * 3
    assert alone == {"a": pytest.approx([-0.1] * 6), "half": None, "unused": None, "b": None}
    for sums in members:
        assert sums == {"a": [-11.0] * 6, "half": [1.0, 2.0], "unused": None, "b": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}
    # a rank sums each of its shards with the ranks that have it; a parameter of which any rank has a gradient has one
    # on all ranks, as on one process
    assert second == [[2.0] * 4, None]
    assert first == [[0.0] * 4, None] and both == [[0.0] * 4 + [2.0] * 4, None]


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 1e9])
def test_norm_and_clipping_are_those_of_torch(max_norm):
    own, other = parameters(1), parameters(1)
    del own["half"], other["half"]  # whose norm torch rounds to bfloat16
    norm = gradient_norm(list(own.values()))
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(list(other.values()), max_norm, foreach=False))
    clip_gradients(list(own.values()), norm, max_norm)
    clip_gradients([own["unused"]], norm, max_norm)
    assert own["unused"].grad is None
    for name in ("a", "b"):
        torch.testing.assert_close(own[name].grad, other[name].grad)


def test_the_norm_is_in_float32_and_small_gradients_do_not_vanish():
    mixed = list(parameters(1).values())
    expected = nn.utils.get_total_norm([p.grad.float() for p in mixed if p.grad is not None])
    torch.testing.assert_close(gradient_norm(mixed), expected)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 1e-25)
    assert float(gradient_norm([parameter])) == pytest.approx(2**0.5 * 1e-25, rel=1e-5)
    assert gradient_norm([]) == 0


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_element_is_in_one_slice(numel, num_slices):
    tensor = torch.arange(float(numel))
    slices = [FlatSlice(index, num_slices, None).of(tensor) for index in range(num_slices)]
    assert torch.equal(torch.cat(slices), tensor)
    length = FlatSlice(0, num_slices, None).length(numel)
    rows = torch.cat(by_slice([tensor, tensor.view(1, -1)], num_slices), 1)
    assert rows.shape == (num_slices, 2 * length)
    for row, values in zip(rows, slices, strict=True):
        for column in row.split(length):
            assert torch.equal(column[: len(values)], values) and not column[len(values) :].any()


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
    optimizer_slices.GRADIENT_BUCKET_BYTES = 64
    sizes = (3, 5, 40, 16, 1, 2)
    own = {str(i): nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for i, size in enumerate(sizes)}
    own["3"] = nn.Parameter(torch.zeros(4, 4).double())
    accumulate_in_float32(own.values())
    for i, parameter in enumerate(own.values()):
        if i != rank and i != len(own) - 1:
            parameter.grad = torch.full_like(parameter, 10.0**rank * (i + 1), dtype=parameter.grad_dtype)
    groups = [SyncGroup((0, 1), tuple(own), ())]
    slices = OptimizerSlices(groups, own, rank, {})
    sync = GradientSync(groups, own, rank, {(0, 1): dist.group.WORLD}, slices)
    sync.start(0)
    assert sync.num_unused() == 2
    sync.finish(World().all_reduce(sync.used(), "max"))
    scale_gradients(list(own.values()), 0.5)
    return [None if p.grad is None else sorted(set(p.grad.flatten().tolist())) for p in own.values()]


def unlike_rank() -> list[Any]:
    """
    Ranks 0 and 1 have halves of the columns of `a`, in two blocks, of `b` and of `c`, rank 2 has all of them. Only
    rank 1 has a gradient of `b` (as of an expert that no token chose elsewhere), and nobody one of `c`.
    """
    rank, width = dist.get_rank(), 8 if dist.get_rank() == 2 else 4
    own = {name: nn.Parameter(torch.zeros(2, width)) for name in "abc"}
    whole = torch.arange(16.0).view(2, 8)
    halves = [torch.cat([whole[:, half : half + 2], whole[:, half + 4 : half + 6]], 1) for half in (0, 2)]
    own["a"].grad = 100 * whole if rank == 2 else halves[rank].clone()
    if rank == 1:
        own["b"].grad = torch.ones(2, 4)
    both = [(0, 2), (1, 2)]
    regions = {}
    for index, ranks in enumerate(both if rank == 2 else ()):
        regions["a", ranks] = Region(1, 2 * index, 2 * index + 2, 4, 2)
        regions |= {(name, ranks): Region(1, 4 * index, 4 * index + 4, 8) for name in "bc"}
    groups = [SyncGroup(ranks, ("a", "b", "c"), ()) for ranks in both]
    made = {ranks: dist.new_group(list(ranks)) for ranks in both}
    sync = GradientSync(groups, own, rank, made, OptimizerSlices(groups, own, rank, {}), regions=regions)
    for index, ranks in enumerate(both):
        if rank in ranks:
            sync.start(index)
    sync.finish(World().all_reduce(sync.used(), "max"))
    wanted = [101 * half for half in halves] + [101 * whole]
    assert own["a"].grad is not None and torch.equal(own["a"].grad, wanted[rank])
    return [None if parameter.grad is None else parameter.grad.sum(0).tolist() for parameter in own.values()][1:]


def early_sums() -> list[list[str]]:
    """
    The parameters of the buckets that a rank sums, in the order in which it starts them. Rank 0 reaches the layers in
    its last backward, rank 1 has none.
    """
    names = [*(f"layer{index}" for index in range(3)), "head", *(f"norm{index}" for index in range(3))]
    own = {name: nn.Parameter(torch.ones(4)) for name in names}
    for parameter in own.values():
        parameter.grad = torch.full((4,), 1.0 + dist.get_rank())
    stages = (("m", 0, 0), ("m", 1, 0))
    groups = [SyncGroup((0, 1), tuple(part), stages) for part in (names[:4], names[4:])]
    layers = {name: -1 if name == "head" else int(name[-1]) for name in own}
    started: list[list[str]] = []
    sums = GradientSums(
        lambda parameters: started.append([n for n, p in own.items() if any(p is q for q in parameters)])
    )
    rank = dist.get_rank()
    slices = OptimizerSlices(groups, own, rank, {})
    sync = GradientSync(groups, own, rank, {(0, 1): dist.group.WORLD}, slices, sums, layers)
    for layer in (2, 1, 0) if rank == 0 else ():
        sync.reach(stages[0], layer)
        started.append([f"reached {layer}"])
    sync.start(0)
    sync.start(1)
    sync.finish()
    assert all(parameter.grad.tolist() == [3.0] * 4 for parameter in own.values())
    return started


def of_two() -> tuple[list[list[float] | None], list[list[str]]]:
    """The sums of buckets, and [`early_sums`] with a bucket for each parameter."""
    sums = buckets_rank()
    optimizer_slices.GRADIENT_BUCKET_BYTES = 1
    return sums, early_sums()


@pytest.mark.distributed
def test_buckets_have_the_sums_and_start_in_the_last_backward_in_one_order():
    (sums, first), (other, second) = run_distributed(of_two, 2)
    assert sums == other == [[5.0], [1.0], [16.5], [22.0], [27.5], None]
    assert [names for (names,) in first] == [
        *("reached 2", "layer2", "norm2", "reached 1", "layer1", "norm1", "reached 0", "layer0", "norm0", "head")
    ]
    assert second == [names for names in first if not names[0].startswith("reached")]
