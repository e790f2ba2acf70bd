"""The input and the result of a plan search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..arrange import Arrangement
from ..cost import MEMORY_SHARE, CostModel
from ..cost.stage_memory import GIB
from ..cost.step_planner import Prediction
from ..plan import LANGUAGE_MODEL, ModelSpec, ParallelPlan, SampleSizes, typical_batches
from ..plan.checkpointing import Checkpointing
from ..plan.layout import ModuleLayout, plan_from
from ..plan.methods import ARRANGEMENT_CANDIDATES, POLICIES, SCHEDULES, Schedule
from ..plan.parallel_plan import StorageSettings
from ..plan.plugin import STORAGE, ZERO_STAGES

SEARCHED_STAGES = ZERO_STAGES  # the ZeRO stages that a search chooses from


@dataclass(frozen=True)
class Candidate:
    """A candidate plan: the layout of each module, their placement, the schedule and the arrangement."""

    layouts: Mapping[str, ModuleLayout]  # in the order of the model
    colocated_with: Mapping[str, str] = field(default_factory=dict)  # module -> the module whose ranks it shares
    num_microbatches: int = 1  # of each replica of the language model
    schedule: Schedule = "1f1b"
    arrangement: str | Arrangement = "hierarchical"  # of batches
    vp_size: int = 1  # virtual stages of each rank of a pipeline, in modules with enough layers

    @property
    def num_ranks(self) -> int:
        return sum(layout.num_ranks for name, layout in self.layouts.items() if name not in self.colocated_with)

    @property
    def num_tasks(self) -> int:
        """Approximate number of forwards and backwards of a step."""
        stages = sum(layout.dp_size * layout.pp_size for layout in self.layouts.values())
        passes = 3 if POLICIES[self.schedule].splits_backward else 2
        return passes * stages * self.vp_size * self.num_microbatches

    @property
    def placement(self) -> str:
        """Which modules share ranks, as text."""
        shared: dict[str, list[str]] = {}
        for name, host in self.colocated_with.items():
            shared.setdefault(host, []).append(name)
        groups = [" and ".join([*names, host]) for host, names in shared.items()]
        return f"{'; '.join(groups)} on shared ranks" if groups else "each module on its own ranks"

    def __str__(self) -> str:
        layouts = "; ".join(f"{name}: {layout}" for name, layout in self.layouts.items())
        return f"{layouts}; {self.placement}; {self.num_microbatches} microbatches"

    def plan(self, spec: ModelSpec) -> ParallelPlan:
        """Builds the plan; a colocated module has the ranks of the other one in its own order."""
        # Modules with the largest meshes come first, so that meshes do not span nodes.
        by_mesh = sorted(self.layouts.items(), key=lambda item: -item[1].cp_size * item[1].tp_size)
        layouts = {
            name: replace(layout.with_virtual_stages(self.vp_size), host=self.colocated_with.get(name))
            for name, layout in by_mesh
        }
        named = self.arrangement if isinstance(self.arrangement, str) else None  # a plan holds no function
        return plan_from(layouts, spec, self.schedule, self.num_microbatches, named)


@dataclass(frozen=True)
class PlanningProblem:
    """Input of a plan search."""

    costs: CostModel  # with the model, its frozen parameters, and the device
    sizes: SampleSizes  # of samples from the dataset
    num_ranks: int  # all of which the plan uses
    global_batch_size: int  # samples of an optimizer step
    memory_bytes: float | None = None  # of a rank; no limit by default
    microbatch_size: int | None = None  # samples of a microbatch of a language model replica; searched by default
    schedule: Schedule | None = None  # searched by default
    arrangement: str | Arrangement | None = None  # searched by default
    # module -> sizes and settings of ZeRO, master weights and offloading set by the user, such as
    # `{"language_model": {"tp_size": 4}}`
    fixed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # module -> what its layers recompute; all and nothing are tried by default
    checkpointing: Mapping[str, Checkpointing] = field(default_factory=dict)
    zero_stages: tuple[int, ...] = SEARCHED_STAGES  # to choose from
    # optimizer state and frozen weights may be put into host memory where the user leaves that open; the device has to
    # say how large and how fast it is
    offloads: bool = True
    splits: bool = True  # backwards can be split
    effort: int = 192  # simulation budget in tasks per rank: larger values simulate more candidates
    seed: int = 0  # of the batches drawn from `sizes`

    @property
    def spec(self) -> ModelSpec:
        return self.costs.spec

    def zero_stages_of(self, module: str) -> tuple[int, ...]:
        """The ZeRO stages to choose from for a module: the user's, or all of the problem."""
        given = self.fixed.get(module, {})
        return (given["zero_stage"],) if "zero_stage" in given else self.zero_stages

    def storage_of(self, module: str) -> StorageSettings:
        """Precision and place of a module's optimizer and frozen weights, as far as the user says."""
        given = self.fixed.get(module, {})
        return StorageSettings(**{key: given[key] for key in STORAGE if key in given})

    @property
    def host_bytes(self) -> float | None:
        """Memory of a node's host that plans may use; `None` if its size or speed is unknown."""
        device = self.costs.device
        if device.host_memory_gib is None or None in (device.host_link_gb_per_s, device.host_memory_gb_per_s):
            return None
        return MEMORY_SHARE * GIB * device.host_memory_gib

    @cached_property
    def batches(self) -> list[SampleSizes]:
        """The global batches that all candidates are simulated on."""
        return typical_batches(self.sizes, self.global_batch_size, self.seed)

    @property
    def first_schedule(self) -> Schedule:
        """The schedule for the comparison of layouts."""
        return self.schedule or SCHEDULES[0]

    @property
    def first_arrangement(self) -> str | Arrangement:
        """The arrangement for the comparison of layouts."""
        return self.arrangement or self.arrangements[0]

    @property
    def arrangements(self) -> tuple[str | Arrangement, ...]:
        """The arrangements to try."""
        if self.arrangement is not None:
            return (self.arrangement,)
        # A single one if all samples have the same size; the sampler's order, too, where no memory has to suffice.
        equal = all((values == values[0]).all() for values in self.sizes.tokens.values() if len(values))
        if equal:
            return ("contiguous",)
        return ARRANGEMENT_CANDIDATES if self.memory_bytes is not None else (*ARRANGEMENT_CANDIDATES, "contiguous")

    @property
    def schedules(self) -> list[tuple[Schedule, int]]:
        """The schedules to try, each with its numbers of virtual stages; split backwards only where they can be."""
        if self.schedule:
            return [(self.schedule, vp_size) for vp_size in POLICIES[self.schedule].searched or (1,)]
        return [
            (name, vp_size)
            for name, policy in POLICIES.items()
            if self.splits or not policy.splits_backward
            for vp_size in policy.searched
        ]


@dataclass(frozen=True)
class RankedPlan:
    """A plan of a search, with its predictions."""

    candidate: Candidate
    plan: ParallelPlan
    predictions: tuple[Prediction, ...]  # for the simulated batches; the first one is shown in charts
    estimate_ms: float  # closed-form estimate of the step time
    bound: str = ""  # a sentence on what bounds its time

    @property
    def step_ms(self) -> float:
        """Step time, averaged over the simulated batches."""
        return sum(prediction.step_ms for prediction in self.predictions) / len(self.predictions)

    @property
    def peak_memory_bytes(self) -> float:
        """Peak memory of the fullest rank over all batches."""
        return max(prediction.peak_memory_bytes for prediction in self.predictions)

    @property
    def prediction(self) -> Prediction:
        return self.predictions[0]

    @property
    def typical(self) -> Prediction:
        """Prediction of the batch whose step time is closest to the mean."""
        return Prediction.typical(self.predictions)

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch of a language model replica."""
        dp_size = self.candidate.layouts[LANGUAGE_MODEL].dp_size
        num_samples = self.prediction.sizes.num_samples
        return -(-num_samples // (dp_size * self.candidate.num_microbatches))


@dataclass(frozen=True)
class ComparedPlan:
    """The plan of another method, shown beside that of a search."""

    name: str  # of the method
    plan: ParallelPlan | None  # `None` without a plan, or without one that the engine can run
    layout: str  # its sizes as text
    step_ms: float  # on the batches of our plan; NaN without a plan
    bubble_fraction: float  # share of all ranks' time without a task
    peak_memory_bytes: float  # of the fullest rank
    flops_utilisation: float  # model FLOPs per second over the peak of all ranks (MFU)
    note: str = ""  # such as by how much it does not fit
    candidate: Candidate | None = None  # its sizes, if the engine can run it
    label: str = ""  # name in tables if it differs

    @property
    def title(self) -> str:
        return self.label or self.name

    @property
    def peak_memory_gib(self) -> float:
        return self.peak_memory_bytes / GIB


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    problem: PlanningProblem
    best: RankedPlan  # the fastest predicted plan; among equally fast ones, the first of `in_order`
    runners_up: tuple[RankedPlan, ...]  # the next best plans with other sizes or another placement
    reasons: tuple[str, ...]  # for each runner-up, why it is slower
    rejected: Mapping[str, int]  # reason -> number of candidates
    num_candidates: int  # that were estimated
    num_simulated: int
    is_proven: bool  # whether no other candidate can be faster on the first batch
    search_s: float

    @property
    def num_not_simulated(self) -> int:
        """Number of candidates with a slower estimate, or that can't be faster than the best."""
        return self.num_candidates - self.num_simulated - sum(self.rejected.values())
