"""The order of feature tokens in a task, the cp rank that has each, and its index there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..plan import FeatureSpec

Owners = tuple[Tensor, Tensor]


class FeatureOrder:
    """The tokens of a task's features: one block for each feature, in it the tokens of each sample in turn."""

    def __init__(
        self, features: Sequence[FeatureSpec], samples: Sequence[int], num_tokens: Mapping[str, Sequence[int]]
    ):
        # (feature, sample by batch index) -> its first token and number of tokens
        self.starts: dict[tuple[int, int], tuple[int, int]] = {}
        self.sizes: list[int] = []
        token = 0
        for number, feature in enumerate(features):
            first = token
            for sample, count in zip(samples, num_tokens[feature.modality], strict=True):
                self.starts[number, sample] = (token, count)
                token += count
            self.sizes.append(token - first)
        self.num_tokens = token

    def positions(self, samples: Sequence[int]) -> Tensor:
        """Returns the tokens of some samples, feature by feature: int64 `[num_tokens]`."""
        ranges = [self.starts[number, sample] for number in range(len(self.sizes)) for sample in samples]
        spans = [torch.arange(start, start + count) for start, count in ranges]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)


class FeatureOwners:
    """The cp rank that has each token of a task's features, and its index among the tokens there, of all features."""

    def __init__(self, order: FeatureOrder, owners: Sequence[Owners] | None = None, cp_size: int = 1):
        # `owners` has for each feature, int64 `[tokens]`, the cp rank of each token and its index among the feature's
        # tokens there; without it one cp rank has all
        self.order = order
        self.cp_ranks: Tensor | None = None
        self.indices: Tensor | None = None
        self.sizes: list[list[int]] = [order.sizes]  # of each cp rank, its tokens of each feature
        if owners is not None:
            counts = torch.stack([ranks.bincount(minlength=cp_size) for ranks, _ in owners])
            starts = counts.cumsum(0) - counts
            self.cp_ranks = torch.cat([ranks for ranks, _ in owners])
            self.indices = torch.cat([starts[i][ranks] + indices for i, (ranks, indices) in enumerate(owners)])
            self.sizes = counts.T.tolist()

    def select(self, samples: Sequence[int]) -> tuple[Tensor | None, Tensor]:
        """Returns int64 `[num_tokens]` cp ranks of the tokens of samples, `None` if one has all, and indices there."""
        positions = self.order.positions(samples)
        if self.cp_ranks is None or self.indices is None:
            return None, positions
        return self.cp_ranks[positions], self.indices[positions]
