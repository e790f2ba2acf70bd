"""Each rank gets the sum of its row, and sends no more than a ring would, over every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_bytes import LiveBytes

from hf_mmparallel.world import ReduceScatter
from tests.distributed import run_distributed

pytestmark = pytest.mark.distributed
WIDTHS = (5, 1, 0)


class Other:
    """Stands for a backend with a reduce-scatter of its own."""

    def name(self) -> str:
        return "other"


def scattered(ranks: tuple[int, ...], is_gloo: bool) -> tuple[torch.Tensor, torch.Tensor, float, set[str]]:
    """The sum that this rank gets, the expected one, the bytes that it sent, and the collectives."""
    group: Any = dist.new_group(ranks)
    inputs = torch.Generator().manual_seed(7)
    by_rank = [[torch.randn(len(ranks), width, generator=inputs) for width in WIDTHS] for _ in range(4)]
    if dist.get_rank() not in ranks:
        return torch.empty(0), torch.empty(0), 0.0, set()
    if not is_gloo:
        type(group)._get_backend = lambda *_: Other()
    with LiveBytes() as counter:
        sums = ReduceScatter(by_rank[dist.get_rank()], group).wait()
    row = ranks.index(dist.get_rank())
    expected = torch.cat([sum(by_rank[rank][column][row] for rank in ranks) for column in range(len(WIDTHS))])  # type: ignore[misc]
    return sums, expected, sum(counter.sent_bytes.values()), set(counter.num_calls)


CASES = [(ranks, is_gloo) for is_gloo in (True, False) for ranks in ((0, 1, 2, 3), (1, 3), (2,))]


def all_scattered() -> list[tuple[torch.Tensor, torch.Tensor, float, set[str]]]:
    return [scattered(*case) for case in CASES]


def test_each_rank_gets_the_sum_of_its_row():
    results = run_distributed(all_scattered, 4)
    for number, (ranks, is_gloo) in enumerate(CASES):
        for rank in ranks:
            sums, expected, sent_bytes, collectives = results[rank][number]
            torch.testing.assert_close(sums, expected)
            assert sent_bytes == pytest.approx(4 * sum(WIDTHS) * (len(ranks) - 1))
            assert collectives == {"alltoall_base_" if is_gloo else "_reduce_scatter_base_"}
