"""The order of feature tokens in a task, the cp rank that has each, and its index there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..plan import FeatureSpec

Owners = tuple[Tensor, Tensor]


class FeatureOrder:
    """
    The tokens of a task's features: one block for each feature, in it the tokens of each sample in turn.

    Args:
        features (`Sequence[FeatureSpec]`): The features, in order.
        samples (`Sequence[int]`): Batch indices of the samples, in order.
        num_tokens (`Mapping[str, Sequence[int]]`): Modality -> feature tokens of each of these samples.
    """

    def __init__(
        self, features: Sequence[FeatureSpec], samples: Sequence[int], num_tokens: Mapping[str, Sequence[int]]
    ):
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
        """The tokens of some samples, feature by feature: int64 `[num_tokens]`."""
        ranges = [self.starts[number, sample] for number in range(len(self.sizes)) for sample in samples]
        spans = [torch.arange(start, start + count) for start, count in ranges]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)


class FeatureOwners:
    """
    The cp rank that has each token of a task's features, and the index of the token among those of that cp rank, where
    features are concatenated.

    Args:
        order ([`FeatureOrder`]): The tokens of the features, on all cp ranks.
        owners (`Sequence[tuple[torch.Tensor, torch.Tensor]]`, *optional*):
            For each feature, int64 `[tokens]` cp rank of each token and int64 `[tokens]` index among the tokens of the
            feature there; left out if one cp rank has all.
        cp_size (`int`, *optional*, defaults to 1): Number of cp ranks.

    Attributes:
        sizes (`list[list[int]]`): For each cp rank, its tokens of each feature.
    """

    def __init__(self, order: FeatureOrder, owners: Sequence[Owners] | None = None, cp_size: int = 1):
        self.order = order
        self.cp_ranks: Tensor | None = None
        self.indices: Tensor | None = None
        self.sizes: list[list[int]] = [order.sizes]
        if owners is not None:
            counts = torch.stack([ranks.bincount(minlength=cp_size) for ranks, _ in owners])
            starts = counts.cumsum(0) - counts
            self.cp_ranks = torch.cat([ranks for ranks, _ in owners])
            self.indices = torch.cat([starts[i][ranks] + indices for i, (ranks, indices) in enumerate(owners)])
            self.sizes = counts.T.tolist()

    def select(self, samples: Sequence[int]) -> tuple[Tensor | None, Tensor]:
        """
        The tokens of some samples.

        Args:
            samples (`Sequence[int]`): Batch indices of the samples.

        Returns:
            `tuple[torch.Tensor | None, torch.Tensor]`: int64 `[num_tokens]` cp rank of each token, `None` if one
            has all, and int64 `[num_tokens]` index there.
        """
        positions = self.order.positions(samples)
        if self.cp_ranks is None or self.indices is None:
            return None, positions
        return self.cp_ranks[positions], self.indices[positions]
