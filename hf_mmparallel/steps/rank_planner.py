"""Plans the batches of ranks that each hold the whole model, as under DDP, FSDP and DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..arrange import Arrangement
from ..arrange.rank_batches import arrange_for_ranks, unlike_turn, whole_model_workloads
from ..cost import CostModel, batch_workloads
from ..plan import ModelSpec, ParallelPlan, SampleSizes, Workloads, resolve_plan
from ..plan.step_plan import BatchIndices
from .step_planner import SampleBatch, SizeFunction


@dataclass(frozen=True)
class RankPlanner:
    """Arranges global batches for data-parallel ranks, with the same result on every rank."""

    costs: CostModel
    num_ranks: int
    microbatch_size: int  # mean samples
    arrangement: str | Arrangement  # a name in `RANK_ARRANGEMENTS`, or a function
    sizes: SizeFunction | None = None  # dataset indices -> their sizes, where global batches have none
    together: Sequence[str] = ()  # encoders that all ranks have to run in the same turn

    def __call__(self, global_batch: SampleBatch) -> Sequence[Sequence[BatchIndices]]:
        """
        Returns rank -> microbatch -> its batch indices.

        Raises `ValueError` on every rank if some ranks would run an encoder of `together` without the others.
        """
        sizes = global_batch.sizes
        if sizes is None and self.sizes is not None:
            sizes = self.sizes(global_batch.samples)
        if sizes is None:
            workloads, has_input = Workloads.alike(self.costs.spec.modules, len(global_batch.samples)), {}
        else:
            workloads, has_input = batch_workloads(self.costs, self._plan, sizes), inputs_of(self.costs.spec, sizes)
        workloads = whole_model_workloads(workloads)
        ranks = arrange_for_ranks(workloads, has_input, self.num_ranks, self.microbatch_size, self.arrangement)
        unlike = unlike_turn(ranks, {name: has for name, has in has_input.items() if name in self.together})
        if unlike is not None:
            raise ValueError(self._refusal(*unlike, has_input[unlike[1]], len(ranks[0])))
        return ranks

    @cached_property
    def _plan(self) -> ParallelPlan:
        """Every module whole on a rank."""
        return resolve_plan(self.costs.spec, {})

    def _refusal(self, turn: int, encoder: str, has: NDArray, count: int) -> str:
        """The error for a turn in which not all ranks would run an encoder."""
        remedy = (
            f"Use `microbatch_assignment='hierarchical'`, which gives the {self.num_ranks} ranks equal turns"
            if self.arrangement == "contiguous" and has.sum() >= self.num_ranks
            else "Use a larger `per_device_train_batch_size`, or a data collator that adds an empty input"
        )
        return (
            f"{int(has.sum())} of the {len(has)} samples of a global batch have inputs for `{encoder}`, and in turn "
            f"{turn + 1} of {count} only some ranks would run it, but sharded weights and gradients need all ranks "
            f"together. {remedy}."
        )


def inputs_of(spec: ModelSpec, sizes: SampleSizes) -> Mapping[str, NDArray]:
    """Encoder -> bool `[samples]`: whether a sample has an input for it."""
    return {name: np.asarray(sizes.tokens[name]) > 0 for name in spec.encoders}
