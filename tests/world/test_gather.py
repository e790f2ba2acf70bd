"""Values of all ranks on the first, tensor by tensor."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_mmparallel.world import World
from tests.distributed import run_distributed


def value(rank: int) -> Any:
    """Nested values of another size on each rank, with more than a message of objects should carry."""
    big = torch.arange(50_000.0) + rank
    return [{"logits": (big, torch.full((rank, 3), rank, dtype=torch.bfloat16)), "rank": rank}] * rank, rank


def gathered() -> list[Any]:
    gather_object = dist.gather_object

    def measured(given: Any, *args: Any, **kwargs: Any) -> None:
        assert len(pickle.dumps(given)) < 2_000
        gather_object(given, *args, **kwargs)

    dist.gather_object = measured
    return World().gather_tensors(value(dist.get_rank()))


@pytest.mark.distributed
def test_tensors_are_sent_one_by_one():
    first, *others = run_distributed(gathered, 3)
    assert len(first) == 3 and others == [[], []]
    for rank, got in enumerate(first):
        torch.testing.assert_close(got, value(rank))
