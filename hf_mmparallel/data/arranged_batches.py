"""The arrangement of samples by their sizes as a batch sampler, for any data loader and any number of processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import Sampler, SequentialSampler

from ..arrange.arrangements import Arrangement
from ..arrange.rank_batches import RANK_ARRANGEMENTS, arrange_for_ranks
from ..plan import LANGUAGE_MODEL, Workloads
from ..plan.reading import reject_unknown_keys
from .global_batches import EvenOrder, GlobalBatch, GlobalBatchSampler, RankBatchSampler


class ArrangedBatchSampler(RankBatchSampler, Sampler[list[int]]):
    """
    Batches of data-parallel processes in which samples of unlike sizes are arranged such that all take about as long:
    a `batch_sampler` for the `DataLoader` of any training loop. It communicates with nobody.

    The samples of an optimizer step are those of torch's `DistributedSampler` with `BatchSampler`, with others in each
    batch; `batch_size` is the mean number of them. A process gets as many batches as any other.

    The order of samples is that of a Trainer with the same seed; the next epoch has another one.

    Args:
        sizes (`Sequence[float]`): Work of each sample of the dataset, such as its number of tokens.
        batch_size (`int`): Mean samples of a batch of one process.
        num_replicas (`int`, *optional*, defaults to 1): Number of processes.
        rank (`int`, *optional*):
            The process whose batches are yielded. By default those of all, one of each process in turn, which is what
            `accelerator.prepare` takes: it gives each process its own.
        accumulation_steps (`int`, *optional*, defaults to 1): Batches of a process in an optimizer step.
        padded (`bool`, *optional*, defaults to `False`):
            Whether the samples of a batch are padded to its longest one, so that those of like sizes belong together.
        shuffle (`bool`, *optional*, defaults to `True`): Draws a random order in each epoch.
        seed (`int`, *optional*, defaults to 0): Of the random order, the same on all processes.
        drop_last (`bool`, *optional*, defaults to `False`):
            Leaves out the samples that don't fill a batch of every process; otherwise the first ones of the epoch are
            repeated to fill it.
        arrangement (`str` or `Callable`, *optional*, defaults to `"hierarchical"`):
            As `microbatch_assignment` without a plan: "hierarchical", "batch_rebalance", "disttrain", "contiguous", or
            a function.

    Raises:
        `ValueError`: For sizes that are not positive numbers, and counts or an arrangement that can't be.

    Example:

    ```python
    >>> from torch.utils.data import DataLoader
    >>> sizes = [9, 1, 2, 8, 3, 7, 4, 6]  # such as numbers of tokens
    >>> sampler = ArrangedBatchSampler(sizes, batch_size=4, num_replicas=2)
    >>> [sum(sizes[index] for index in batch) for batch in sampler]
    [20, 20]
    >>> loader = DataLoader(dataset[:8], batch_sampler=sampler, collate_fn=collator)
    ```
    """

    def __init__(
        self,
        sizes: Sequence[float],
        batch_size: int,
        num_replicas: int = 1,
        rank: int | None = None,
        accumulation_steps: int = 1,
        padded: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        arrangement: str | Arrangement = "hierarchical",
    ):
        counts = {"batch_size": batch_size, "num_replicas": num_replicas, "accumulation_steps": accumulation_steps}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"`{name}={count}` is no count. Use 1 or more.")
        if rank is not None and not 0 <= rank < num_replicas:
            raise ValueError(f"`rank={rank}` is none of {num_replicas} processes. Use 0 to {num_replicas - 1}.")
        if not callable(arrangement):
            reject_unknown_keys("`arrangement`", [arrangement], RANK_ARRANGEMENTS)
        self.sizes = np.asarray(sizes, dtype=np.float64)
        if self.sizes.ndim != 1 or not np.all(self.sizes > 0) or not np.all(np.isfinite(self.sizes)):
            raise ValueError(
                f"`sizes` of shape {self.sizes.shape} are no positive numbers, one for each sample. Give the "
                "work of each, such as its tokens."
            )
        self.padded, self.arrangement = padded, arrangement
        order: Any = SequentialSampler(self.sizes)
        if shuffle:
            order = SeedableRandomSampler(self.sizes, generator=torch.Generator(), data_seed=seed)
        size = batch_size * num_replicas
        even = EvenOrder(order, size, drop_last, fills=num_replicas > 1)
        super().__init__(
            GlobalBatchSampler(even, size * accumulation_steps), self._arrange, rank, batch_size, num_replicas
        )

    @property
    def epoch(self) -> int:
        return self.global_batches.epoch

    def set_epoch(self, epoch: int) -> None:
        """
        Sets the epoch that is drawn next, by default the one after the last.

        Args:
            epoch (`int`): Its number, from 0.
        """
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        self.set_epoch(epoch)  # the order of one that was left early, too
        yield from super().__iter__()
        self.set_epoch(epoch + 1)

    def _arrange(self, global_batch: GlobalBatch) -> Sequence[Sequence[Sequence[int]]]:
        times = self.sizes[list(global_batch.samples)]
        tokens = np.ceil(times).astype(np.int64)
        rows = times if self.padded else None
        workloads = Workloads({LANGUAGE_MODEL: times}, {LANGUAGE_MODEL: 0.0}, {LANGUAGE_MODEL: tokens}, {}, rows)
        return arrange_for_ranks(workloads, {}, self.num_ranks, self.mean_size, self.arrangement)
