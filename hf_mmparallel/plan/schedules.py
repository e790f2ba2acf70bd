"""The schedules of a step as data, which code that orders, caps or estimates tasks reads in place of their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["1f1b", "gpipe", "eager", "encoders_first"]


@dataclass(frozen=True)
class SchedulePolicy:
    """
    What tells a schedule from others.

    A step has phases: a rank starts no task of a phase while it has one of an earlier phase left. What a task waits
    for is never in a later phase, so that phases can't deadlock. Within a phase the order comes from a simulation,
    limited by the number of microbatches in flight.

    Args:
        encoders (`tuple[int, int]`, *optional*, defaults to `(0, 0)`):
            The phases of the forwards and of the backwards of encoders.
        others (`tuple[int, int]`, *optional*, defaults to `(0, 0)`):
            Those of the language model and of generators.
        fills_memory (`bool`, *optional*, defaults to `False`):
            Whether as many microbatches are in flight as memory allows, rather than as few as keep all stages busy.
    """

    encoders: tuple[int, int] = (0, 0)
    others: tuple[int, int] = (0, 0)
    fills_memory: bool = False

    def phases(self, is_encoder: bool) -> tuple[int, int]:
        """The phases of the forwards and of the backwards of a module."""
        return self.encoders if is_encoder else self.others

    def keeps_all(self, is_encoder: bool) -> bool:
        """Whether all microbatches of a step are in flight at once in a module: its forwards all go first."""
        forward, backward = self.phases(is_encoder)
        return forward < backward

    @property
    def is_one_phase(self) -> bool:
        """Whether forwards and backwards mix, so that a stage may wait for a forward after each backward."""
        return len({*self.encoders, *self.others}) == 1


POLICIES: Mapping[Schedule, SchedulePolicy] = {
    "1f1b": SchedulePolicy(),
    "gpipe": SchedulePolicy(encoders=(0, 1), others=(0, 1)),
    "eager": SchedulePolicy(fills_memory=True),
    "encoders_first": SchedulePolicy(encoders=(0, 2), others=(1, 1)),
}
"""Name -> policy. `"encoders_first"` is DIP's (Entrain, section 4.7.2)."""

SCHEDULES = tuple(POLICIES)
