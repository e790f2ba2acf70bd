"""Samples that are larger than the limit of a microbatch: they are reported, and run alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate.logging import get_logger

from ..cost import Hardware, usable_bytes
from ..plan import SampleSizes, StepPlan, Workloads
from .arguments import AUTO
from .training_sizes import StartSizes

logger = get_logger(__name__)

_UNLIMITED = 10**15  # tokens; the limit of stages that keep no activations
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
            f"{limit:,} tokens in `{name}`" for name, limit in self.limits.items() if limit < _UNLIMITED
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
