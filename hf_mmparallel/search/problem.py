"""What a search for a plan is given, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..cost import CostModel
from ..plan import LANGUAGE_MODEL, ModelSpec, ModulePlan, ParallelPlan, SampleSizes, Stage
from ..plan.ownership import partly_frozen_stages, trainable_stages
from ..plan.schedules import SCHEDULES, Schedule
from ..steps.method_choice import CHOICES, KEEPING_LIMITS
from ..steps.step_planner import Prediction


@dataclass(frozen=True)
class Layout:
    """
    The sizes of one module.

    Args:
        dp_size (`int`, *optional*, defaults to 1): Copies.
        cp_size (`int`, *optional*, defaults to 1): Ranks that share the tokens of a microbatch.
        tp_size (`int`, *optional*, defaults to 1): Ranks that share each matrix.
        layers (`tuple[int, ...]`): Layers of each stage.
        activation_checkpointing (`bool`, *optional*, defaults to `False`): Whether activations are recomputed.
    """

    layers: tuple[int, ...]
    dp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    activation_checkpointing: bool = False

    @property
    def pp_size(self) -> int:
        return len(self.layers)

    @property
    def num_ranks(self) -> int:
        return self.dp_size * self.pp_size * self.cp_size * self.tp_size

    def __str__(self) -> str:
        sizes = (("dp", self.dp_size), ("pp", self.pp_size), ("cp", self.cp_size), ("tp", self.tp_size))
        words = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"
        return f"{words}, recomputed" if self.activation_checkpointing else words


@dataclass(frozen=True)
class Candidate:
    """
    One way to lay a model out.

    Args:
        layouts (`Mapping[str, Layout]`): By module, in the order of the model.
        hosts (`Mapping[str, str]`, *optional*): Module -> the earlier or later module whose ranks it shares.
        num_microbatches (`int`, *optional*, defaults to 1): Of each replica of the language model.
        schedule (`str`, *optional*, defaults to `"1f1b"`): The schedule's name.
        method (`str`, *optional*, defaults to `"hierarchical"`): How batches are arranged, see [`ARRANGEMENTS`].
    """

    layouts: Mapping[str, Layout]
    hosts: Mapping[str, str] = field(default_factory=dict)
    num_microbatches: int = 1
    schedule: Schedule = "1f1b"
    method: str = "hierarchical"

    @property
    def num_ranks(self) -> int:
        return sum(layout.num_ranks for name, layout in self.layouts.items() if name not in self.hosts)

    @property
    def num_tasks(self) -> int:
        """Forwards and backwards of a step, about."""
        stages = sum(layout.dp_size * layout.pp_size for layout in self.layouts.values())
        return 2 * stages * self.num_microbatches

    @property
    def placement(self) -> str:
        """In words: which modules share ranks."""
        shared: dict[str, list[str]] = {}
        for name, host in self.hosts.items():
            shared.setdefault(host, []).append(name)
        groups = [" and ".join([*names, host]) for host, names in shared.items()]
        return f"{'; '.join(groups)} on shared ranks" if groups else "each module on its own ranks"

    def __str__(self) -> str:
        layouts = "; ".join(f"{name}: {layout}" for name, layout in self.layouts.items())
        return f"{layouts}; {self.placement}; {self.num_microbatches} microbatches"

    def plan(self, spec: ModelSpec) -> ParallelPlan:
        """
        The plan. Modules with the largest grids of ranks come first, so that grids do not cross nodes; within a module
        the replica varies slowest, then the stage, then the part of the row of tokens. A module on another's ranks
        takes the same ranks in its own order.

        Args:
            spec (`ModelSpec`): The model.
        """
        first, starts = 0, {}
        by_grid = sorted(self.layouts.items(), key=lambda item: -item[1].cp_size * item[1].tp_size)
        for name, layout in by_grid:
            if name not in self.hosts:
                starts[name] = first
                first += layout.num_ranks
        modules = {}
        for name, layout in self.layouts.items():
            start = starts[self.hosts.get(name, name)]
            modules[name] = _module_plan(spec, name, layout, start)
        return ParallelPlan(modules, spec.edges, self.schedule, self.num_microbatches, self.method)


def _module_plan(spec: ModelSpec, name: str, layout: Layout, first: int) -> ModulePlan:
    stops = [sum(layout.layers[: index + 1]) for index in range(layout.pp_size)]
    ranges = [(stop - count, stop) for stop, count in zip(stops, layout.layers, strict=True)]
    trainable = trainable_stages(spec.modules[name], spec.tied, ranges)
    partly = partly_frozen_stages(spec.modules[name], spec.tied, ranges)
    grid = layout.cp_size * layout.tp_size
    replicas = []
    for replica in range(layout.dp_size):
        stages = []
        for index, layers in enumerate(ranges):
            start = first + (replica * layout.pp_size + index) * grid
            rows = range(start, start + grid, layout.tp_size)
            ranks = tuple(tuple(range(row, row + layout.tp_size)) for row in rows)
            stages.append(Stage(layers, ranks, trainable[index], partly[index]))
        replicas.append(tuple(stages))
    return ModulePlan(tuple(replicas), layout.activation_checkpointing)


@dataclass(frozen=True)
class PlanningProblem:
    """
    What is planned.

    Args:
        costs (`CostModel`): The model, what is frozen, the device, and what layers cost.
        sizes (`SampleSizes`): Of samples drawn from the dataset, at least one global batch.
        num_ranks (`int`): Devices; the plan takes all of them.
        global_batch_size (`int`): Samples of an optimizer step.
        memory_bytes (`float`, *optional*): Of a rank, that a plan has to fit; no limit when left out.
        microbatch_size (`int`, *optional*): Samples of a microbatch of a language-model replica; chosen when left out.
        schedule (`str`, *optional*): The schedule's name; chosen when left out.
        method (`str`, *optional*): How batches are arranged, see [`ARRANGEMENTS`]; chosen when left out.
        fixed (`Mapping[str, Mapping[str, int]]`, *optional*):
            Module -> sizes that the user has set, such as `{"language_model": {"tp_size": 4}}`.
        checkpointing (`Mapping[str, bool]`, *optional*):
            Module -> whether its activations are recomputed; tried both ways where left out.
        effort (`int`, *optional*, defaults to 384):
            Tasks of steps that are simulated for each rank: more candidates are simulated with more of it.
        seed (`int`, *optional*, defaults to 0): Of the batches that are drawn from `sizes`.
    """

    costs: CostModel
    sizes: SampleSizes
    num_ranks: int
    global_batch_size: int
    memory_bytes: float | None = None
    microbatch_size: int | None = None
    schedule: Schedule | None = None
    method: str | None = None
    fixed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    checkpointing: Mapping[str, bool] = field(default_factory=dict)
    effort: int = 384
    seed: int = 0

    @property
    def spec(self) -> ModelSpec:
        return self.costs.spec

    @property
    def first_schedule(self) -> Schedule:
        """The schedule that layouts are compared with."""
        return self.schedule or SCHEDULES[0]

    @property
    def first_method(self) -> str:
        """The arrangement that layouts are compared with."""
        return self.method or self.methods[0]

    @property
    def methods(self) -> tuple[str, ...]:
        """
        The arrangements that are tried: where samples are alike, they differ in nothing; with a limit of memory those
        that keep to it for every batch.
        """
        if self.method is not None:
            return (self.method,)
        alike = all((values == values[0]).all() for values in self.sizes.tokens.values() if len(values))
        return ("contiguous",) if alike else CHOICES if self.memory_bytes is None else KEEPING_LIMITS

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules that are tried."""
        return SCHEDULES if self.schedule is None else (self.schedule,)


def draw_batch(problem: PlanningProblem, number: int) -> SampleSizes:
    """Samples of a global batch, at random; the same for all candidates."""
    count, rng = problem.sizes.num_samples, np.random.default_rng((problem.seed, number))
    chosen = rng.choice(count, problem.global_batch_size, replace=count < problem.global_batch_size)
    return problem.sizes.take(np.sort(chosen))


@dataclass(frozen=True)
class RankedPlan:
    """
    A plan that was found, with what it is expected to take.

    Args:
        candidate (`Candidate`): Its sizes.
        plan (`ParallelPlan`): The plan.
        predictions (`tuple[Prediction, ...]`): Of the batches that it was simulated on; the first is for pictures.
        estimate_ms (`float`): A step by the closed form.
        bound (`str`): What its time is bound by, a sentence.
    """

    candidate: Candidate
    plan: ParallelPlan
    predictions: tuple[Prediction, ...]
    estimate_ms: float
    bound: str = ""

    @property
    def step_ms(self) -> float:
        """Mean over the simulated batches."""
        return sum(prediction.step_ms for prediction in self.predictions) / len(self.predictions)

    @property
    def peak_memory_bytes(self) -> float:
        """Of the fullest rank, over the batches."""
        return max(prediction.peak_memory_bytes for prediction in self.predictions)

    @property
    def prediction(self) -> Prediction:
        return self.predictions[0]

    @property
    def typical(self) -> Prediction:
        """Of the batch whose step is nearest to the mean."""
        return min(self.predictions, key=lambda own: abs(own.step_ms - self.step_ms))

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch of a language-model replica."""
        dp_size = self.candidate.layouts[LANGUAGE_MODEL].dp_size
        num_samples = self.prediction.sizes.num_samples
        return -(-num_samples // (dp_size * self.candidate.num_microbatches))


@dataclass(frozen=True)
class SearchResult:
    """
    The answer of a search.

    Args:
        problem (`PlanningProblem`): The question.
        best (`RankedPlan`): The plan that is expected to be fastest, the leanest of those that are as fast.
        runners_up (`tuple[RankedPlan, ...]`): The next best ones, of other sizes or another placement.
        reasons (`tuple[str, ...]`): For each runner-up, why it is slower.
        rejected (`Mapping[str, int]`): Reason -> how many candidates were left out for it.
        num_candidates (`int`): Candidates that were estimated.
        num_simulated (`int`): Candidates that were simulated.
        search_s (`float`): Seconds that it took.
    """

    problem: PlanningProblem
    best: RankedPlan
    runners_up: tuple[RankedPlan, ...]
    reasons: tuple[str, ...]
    rejected: Mapping[str, int]
    num_candidates: int
    num_simulated: int
    search_s: float

    @property
    def num_not_simulated(self) -> int:
        """Candidates that are slower by the closed form, or can't be faster than the best."""
        return self.num_candidates - self.num_simulated - sum(self.rejected.values())
