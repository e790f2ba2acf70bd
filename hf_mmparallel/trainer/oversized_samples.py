"""Samples that are larger than the limit of a microbatch: they are reported, and run alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger

from ..cost import Hardware, usable_bytes
from ..cost.step_planner import StepPlanner
from ..data.global_batches import GlobalBatch
from ..plan import SampleSizes, StepPlan, Workloads
from ..runtime.engine import ParallelEngine
from .arguments import AUTO
from .training_sizes import StartSizes

logger = get_logger(__name__)

_UNLIMITED_TOKENS = 10**15  # tokens; the limit of stages that keep no activations
_REMEDY = (
    "Each gets a microbatch of its own, which is predicted to need more memory than a rank may fill. If that is too "
    "much, set `activation_checkpointing`, raise `pp_size`, `tp_size` or `cp_size`, or leave such samples out."
)


def allowed_bytes(args: Any, device: Hardware) -> float | None:
    """Returns the memory of a rank that the estimate of a microbatch may fill, `None` where it is unknown."""
    # the device is the same on all ranks, which have to arrange alike
    return usable_bytes(device, None if args.memory_limit_gib == AUTO else args.memory_limit_gib)


@dataclass(frozen=True)
class LargeSamples:
    """How samples compare with the limits of microbatches."""

    limits: Mapping[str, int]  # module -> maximum tokens of a microbatch
    largest: Mapping[str, int]  # module -> tokens of the largest sample
    num_over: int  # larger than a microbatch in one of the modules
    num_samples: int  # that were compared
    are_all: bool  # whether these are all samples of the dataset

    @classmethod
    def of(cls, start: StartSizes, limits: Mapping[str, int]) -> LargeSamples:
        """Compares the sizes that are known before the first step."""
        over = _over(start.sizes, limits)
        largest = {name: int(start.sizes.tokens[name].max(initial=0)) for name in limits}
        return cls(limits, largest, int(over.sum()), len(over), start.are_all)

    def __str__(self) -> str:
        limits = " and ".join(
            f"{limit:,} tokens in `{name}`" for name, limit in self.limits.items() if limit < _UNLIMITED_TOKENS
        )
        larger = f"{self.num_over:,} of {self._samples} are larger" if self.num_over else f"all {self._samples} fit"
        return f"A microbatch may have {limits or 'any number of tokens'}; {larger}."

    @property
    def _samples(self) -> str:
        return f"{self.num_samples:,} {'' if self.are_all else 'measured '}samples"

    @property
    def warning(self) -> str:
        """A warning if a sample is larger than a limit, otherwise empty."""
        if not self.num_over:
            return ""
        over = ", ".join(
            f"the largest has {self.largest[name]:,} tokens in `{name}` of at most {limit:,}"
            for name, limit in self.limits.items()
            if self.largest[name] > limit
        )
        return f"{self.num_over:,} of {self._samples} are larger than a microbatch may be: {over}. {_REMEDY}"


class LimitWatch:
    """Warns once of samples above the limit of a microbatch, unless the report before the first step has warned."""

    def __init__(self, has_warned: bool = False):
        self.has_warned = has_warned

    def saw(self, step: StepPlan, workloads: Workloads | None) -> None:
        """Compares the tokens of a step's samples with the limits that come with them in `workloads`."""
        if self.has_warned or workloads is None:
            return
        for name, limit in workloads.token_limits.items():
            tokens = workloads.tokens[name]
            largest = int(np.argmax(tokens)) if len(tokens) else 0
            if len(tokens) and tokens[largest] > limit:
                self.has_warned = True
                logger.warning(
                    f"Sample {step.samples[largest]} has {tokens[largest]:,} tokens in `{name}`, where a microbatch "
                    f"may have {limit:,}. {_REMEDY} Further such samples are not reported."
                )
                return


def _over(sizes: SampleSizes, limits: Mapping[str, int]) -> np.ndarray:
    """bool `[samples]`: whether a sample is larger than a microbatch may be in one of the modules."""
    over = np.zeros(sizes.num_samples, dtype=bool)
    for name, limit in limits.items():
        over |= sizes.tokens[name] > limit
    return over


# `memory_limit_gib="auto"`: the memory of the first steps corrects the limits of microbatches.

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
            predicted = engine.account.predict()
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
