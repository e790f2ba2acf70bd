"""A reduce-scatter that sends no more than it needs to over every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class ReduceScatter:
    """
    A sum over the ranks of a group in flight, of which each rank gets one row. Collective.

    Args:
        columns (`Sequence[torch.Tensor]` of shapes `[ranks of the group, elements]`):
            What this rank adds, which is copied; row `i` of each is for rank `i` of the group.
        group (`ProcessGroup`): The ranks.
    """

    def __init__(self, columns: Sequence[torch.Tensor], group: Any):
        num_rows, rank = len(columns[0]), group.rank()
        # Torch's reduce-scatter over gloo all-reduces a copy of its input, which sends twice as much. Over gloo each
        # rank therefore sends every row to the rank that it is for, and adds what it receives to its own row.
        if group._get_backend(columns[0].device).name() == "gloo":
            self._mine = torch.cat([column[rank] for column in columns])
            others = [row for row in range(num_rows) if row != rank]
            sent = torch.cat([column[row] for row in others for column in columns] or [self._mine[:0]])
            self._received = torch.empty_like(sent).view(len(others), len(self._mine))
            splits = [len(self._mine) * (row != rank) for row in range(num_rows)]
            self._work: Any = dist.all_to_all_single(
                self._received.view(-1), sent, splits, splits, group=group, async_op=True
            )
        else:
            sent = torch.cat(list(columns), 1)
            self._mine = torch.empty_like(sent[0])
            self._received = sent[:0]
            self._work = dist.reduce_scatter_single(self._mine, sent.view(-1), group=group, async_op=True)

    def wait(self) -> torch.Tensor:
        """Waits for the sum of this rank's row, `[elements]`."""
        self._work.wait()
        for row in self._received:
            self._mine += row
        return self._mine
