"""Values of all ranks on the first, tensor by tensor."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.world import World
from tests.distributed import run_distributed

pytestmark = pytest.mark.distributed


def value(rank: int) -> Any:
    """Nested values of another size on each rank, with more than a message of objects should carry."""
    big = torch.arange(50_000.0) + rank
    return [{"logits": (big, torch.full((rank, 3), rank, dtype=torch.bfloat16)), "rank": rank}] * rank, rank


def gathered() -> tuple[list[Any], list[int]]:
    world, sizes = World(), []
    gather_object = dist.gather_object

    def measured(given: Any, *args: Any, **kwargs: Any) -> None:
        sizes.append(len(pickle.dumps(given)))
        gather_object(given, *args, **kwargs)

    dist.gather_object = measured
    return world.gather_tensors(value(world.rank)), sizes


def test_tensors_are_sent_one_by_one():
    first, *others = run_distributed(gathered, 3)
    for rank, got in enumerate(first[0]):
        torch.testing.assert_close(got, value(rank))
    assert len(first[0]) == 3 and [values for values, _ in others] == [[], []]
    assert all(size < 2_000 for _, sizes in (first, *others) for size in sizes)
    assert World().gather_tensors("alone") == ["alone"]
