"""Datasets that only their own code can read."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Rows(IterableDataset):
    """A stream of rows, which counts those that are read; a worker takes a part, as the documentation advises."""

    def __init__(self, rows: Sequence[Any]):
        self.rows = rows
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for row in self.rows if info is None else self.rows[info.id :: info.num_workers]:
            self.num_read += 1
            yield row


class Opaque(Dataset):
    """A torch dataset that keeps which samples are read."""

    def __init__(self, samples: Sequence[Any]):
        self.samples = samples
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return self.samples[index]
