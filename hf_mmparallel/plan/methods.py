"""Names of methods that users choose; those of papers are imported on use, and nothing else imports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

# module of `hf_mmparallel.papers` and attribute of each published method
PUBLISHED_ARRANGEMENTS: Mapping[str, str] = {
    "entrain": "published_arrangements:entrain",
    "batch_rebalance": "published_arrangements:batch_rebalance",
    "disttrain": "published_arrangements:disttrain",
    "sub_microbatches": "published_arrangements:sub_microbatches",
}
_PUBLISHED = {
    **PUBLISHED_ARRANGEMENTS,
    "compare": "compare:compare",  # `plan --compare`
    "sample presets": "sample_presets:SAMPLE_PRESETS",  # `--dataset chartqa`
    "stable batch": "stable_batch:stability_lines",  # the split of ranks in the answer of `plan`
}

# Arrangements whose microbatches respect token and memory limits. Where the user names none, these are predicted and
# the fastest is chosen, the first of equal ones.
ARRANGEMENT_CANDIDATES = ("hierarchical", "tapered")
# the values of `microbatch_assignment` besides functions
ARRANGEMENTS = (*ARRANGEMENT_CANDIDATES, "contiguous", *PUBLISHED_ARRANGEMENTS)


def published_method(name: str) -> Any:
    module, _, attribute = _PUBLISHED[name].partition(":")
    return getattr(import_module(f"..papers.{module}", __package__), attribute)


def arrangement_name(arrangement: str | Callable[..., Any]) -> str:
    """Return the name of an arrangement, for text: that of the function where it is one."""
    return arrangement if isinstance(arrangement, str) else getattr(arrangement, "__name__", repr(arrangement))


# The schedules as data: other code reads the fields of a `SchedulePolicy` and never compares schedule names.

Schedule = Literal["1f1b", "gpipe", "eager", "encoders_first", "interleaved", "zero_bubble", "zero_bubble_h2"]


@dataclass(frozen=True)
class SchedulePolicy:
    """
    The properties of a schedule.

    A step has phases: a rank starts no task of a phase before it has finished its tasks of earlier phases. The
    dependencies of a task are never in a later phase, so phases can't deadlock. Within a phase the order comes from a
    simulation that limits the number of microbatches in flight.
    """

    encoders: tuple[int, int] = (0, 0)  # phases of the encoders' forwards and backwards
    others: tuple[int, int] = (0, 0)  # phases of the forwards and backwards of the language model and of generators
    fills_memory: bool = False  # as many microbatches in flight as fit, not the fewest that keep all stages busy
    vp_size: int = 1  # virtual stages of a rank of a pipeline, for modules that don't say how many
    splits_backward: bool = False  # whether weight gradients are put off, in modules that don't say whether
    # numbers of virtual stages with which a search tries it; none where another schedule is never slower
    searched: tuple[int, ...] = (1,)

    @property
    def is_plain(self) -> bool:
        """Whether each rank of a pipeline has one stage of a module, and backwards are whole."""
        return self.vp_size == 1 and not self.splits_backward

    def phases(self, is_encoder: bool) -> tuple[int, int]:
        """Phases of a module's forwards and of its backwards."""
        return self.encoders if is_encoder else self.others

    def keeps_all(self, is_encoder: bool) -> bool:
        """Whether a module runs all forwards of a step before its first backward, with all microbatches in flight."""
        forward, backward = self.phases(is_encoder)
        return forward < backward

    @property
    def is_one_phase(self) -> bool:
        """Whether forwards and backwards are in one phase, so that a stage may alternate between them."""
        return len({*self.encoders, *self.others}) == 1


# Schedule name -> policy. `"encoders_first"` is the schedule of DIP (Entrain, section 4.7.2), `"interleaved"` that of
# virtual stages (Narayanan et al. 2021, section 2.2), `"zero_bubble"` that of split backwards (ZB-H1, Qi et al. 2023),
# both of which any schedule may have, and `"zero_bubble_h2"` the same with more memory.
POLICIES: Mapping[Schedule, SchedulePolicy] = {
    "1f1b": SchedulePolicy(),
    "gpipe": SchedulePolicy(encoders=(0, 1), others=(0, 1), searched=()),
    "eager": SchedulePolicy(fills_memory=True),
    "encoders_first": SchedulePolicy(encoders=(0, 2), others=(1, 1)),
    "interleaved": SchedulePolicy(vp_size=2, searched=(2, 4)),
    "zero_bubble": SchedulePolicy(splits_backward=True, searched=(1, 2)),
    "zero_bubble_h2": SchedulePolicy(splits_backward=True, fills_memory=True),
}

SCHEDULES = tuple(POLICIES)
