"""`memory_limit_gib="auto"`: the memory of the first steps corrects the limits of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from accelerate.logging import get_logger

from ..data.global_batches import GlobalBatch
from ..plan import SampleSizes
from ..runtime.engine import ParallelEngine
from ..steps.step_planner import StepPlanner

logger = get_logger(__name__)

FIRST, LAST = 2, 4
"""Steps of a run that are measured: when the first one ends, the optimizer makes its state."""
_LEAST, _MOST = 0.5, 2.0  # range of a plausible ratio; beyond it something else is wrong

# the ratio, and the epoch and position of the last global batch that was planned without it
Mark = tuple[float, int, int]


class MemoryRatio:
    """
    Learns by how much the memory of ranks differs from the estimate, for the limits of global batches.

    The ratio is the largest of all ranks over a few steps. It holds for all global batches after the last one that was
    handed out when it was learned, on all ranks; a checkpoint keeps both, so that a resumed run plans as before.
    """

    def __init__(
        self,
        planner: StepPlanner,
        typical: SampleSizes,
        measure: Callable[[], float | None],
        learned: Mark | None = None,
    ):
        self.planner = planner  # with limits by the estimate
        self.typical = typical  # sizes of a typical global batch
        self.measure = measure  # see [`allocated_since`]
        self.learned: Mark | None = None
        self.limits: Mapping[str, int] | None = None
        self._num_steps = 0
        self._largest = 0.0
        self._last = (0, 0)
        if learned is not None:
            self._learn(*learned)

    def limits_of(self, global_batch: GlobalBatch) -> Mapping[str, int] | None:
        """Module -> maximum tokens of a microbatch of this global batch; `None` for the limits by the estimate."""
        self._last = global_batch.epoch, global_batch.position
        if self.learned is None or self._last <= self.learned[1:]:
            return None
        return self.limits

    def saw_step(self, engine: ParallelEngine) -> None:
        """Measures the step that has just run. Collective for the last of the measured steps."""
        if self.learned is not None:
            return
        self._num_steps += 1
        allocated = self.measure()
        if allocated is not None and self._num_steps >= FIRST and engine.account is not None:
            predicted = engine.account.predicted()
            if predicted is not None:
                self._largest = max(self._largest, allocated / predicted.total)
        if self._num_steps == LAST:
            ratio = max(engine.world.all_gather(self._largest, "comparing memory"))
            if ratio > 0:
                self._learn(min(max(ratio, _LEAST), _MOST), *self._last)

    def _learn(self, ratio: float, epoch: int, position: int) -> None:
        """Finds the limits that allow for a ratio."""
        self.learned = ratio, epoch, position
        assert self.planner.memory_bytes is not None
        corrected = replace(self.planner, memory_bytes=self.planner.memory_bytes / ratio)
        try:
            self.limits = corrected.with_token_limits(self.typical).token_limits
        except ValueError as error:
            logger.warning(
                f"Ranks need {ratio:.2f} times the memory that is predicted, with which no microbatch fits: {error} "
                "Microbatches stay as they are."
            )
            self.limits = self.planner.token_limits
            return
        assert self.limits is not None
        limits = " and ".join(f"{limit:,} tokens in `{name}`" for name, limit in self.limits.items())
        logger.info(f"Ranks need {ratio:.2f} times the memory that is predicted; a microbatch may have {limits}.")


def allocated_since(device: torch.device) -> float | None:
    """Peak of allocated bytes of this rank since the last call; `None` where nothing counts them."""
    if device.type != "cuda":
        return None
    peak = float(torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return peak
