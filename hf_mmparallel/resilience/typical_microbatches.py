"""The microbatches that pipelines are planned for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cost import CostModel
from ..cost.row_sizes import RowLayout
from ..plan import LANGUAGE_MODEL, ModulePlan, SampleSizes


@dataclass(frozen=True, eq=False)
class TypicalMicrobatches:
    """What pipelines compute in a step."""

    sizes: SampleSizes  # every `microbatch_size` samples in a row are a microbatch
    microbatch_size: int = 1  # samples
    most: int = 1  # the most microbatches of a pipeline in a step

    @property
    def count(self) -> int:
        """Number of microbatches in `sizes`."""
        return -(-self.sizes.num_samples // self.microbatch_size)

    def groups(self, module: str) -> list[NDArray]:
        """Samples of each microbatch that have an input for a module, without microbatches that have none."""
        num_samples, tokens = self.sizes.num_samples, self.sizes.tokens[module]
        whole = np.split(np.arange(num_samples), range(self.microbatch_size, num_samples, self.microbatch_size))
        used = whole if module == LANGUAGE_MODEL else [group[tokens[group] > 0] for group in whole]
        return [group for group in used if len(group)]

    def chunks(self, costs: CostModel, module: str, planned: ModulePlan) -> NDArray:
        """Sizes `[microbatches, 3]` of those with an input for a module: the columns of [`ChunkSize`]."""
        groups = self.groups(module)
        if not groups:
            return np.zeros((0, 3))
        return RowLayout.of(costs, module, planned).of_groups(self.sizes, module, groups)
