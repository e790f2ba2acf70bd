"""Baselines (Megatron-style, FSDP, DistTrain and others) under our cost model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from numpy.typing import NDArray

from ..arrange import Arrangement
from ..cost import CostModel
from ..cost.stage_memory import GIB
from ..plan import ModelSpec, SampleSizes
from ..plan.checkpointing import Checkpointing
from ..plan.layout import ModuleLayout
from ..plan.parallel_plan import ShardingSettings
from ..planning.candidates import CandidateSpace, diversify
from ..planning.explain import least_memory_bytes
from ..planning.options import ModuleOptions, ParallelConfig
from ..planning.problem import Candidate, ComparedPlan, PlanningProblem, RankedPlan, SearchResult
from ..planning.simulations import step_planner
from .allocation import Allocation, allocate
from .baseline_layouts import FullyShardedLayouts, RatioLayouts, ReplicatedEncoders, SingleLayouts, even_layers
from .strategies import ModuleDemand, Role

UNAWARE, SINGLE, SHARDED, DISTTRAIN = "frozen-unaware", "single layout", "FSDP-like", "DistTrain"
ORDERED = "sampler's order"  # label of the first one if nothing is frozen
RATIO, REPLICATED = "ratio-based", "encoders replicated"
_SIMULATED, _TRIED, _CHECKED = 6, 18, 3  # candidates of a baseline: that fit, in total, and on all batches
_MOST_TASKS = 50_000  # of the evaluated candidates together
_ABOUT = 1.3  # tolerance of memory estimates
_UNLIMITED = float(2**70)
_OPTIMIZER_BYTES = 8


def compare(problem: PlanningProblem, result: SearchResult) -> Iterator[ComparedPlan]:
    """
    Simulates the plan of each baseline, one by one, with the costs of the problem, on the batches of the result.

    Sizes set by the user do not apply to baselines. A plan exceeds the memory only if all of its kind do.

    - `"frozen-unaware"`: our search and partition with the costs of a fully trained model, and the result's
      arrangement. If nothing is frozen its costs are ours, and it has the sampler's order, by which it is labelled.
    - `"single layout"`: one data-, tensor- and pipeline-parallel size for all modules, the encoders as first stages,
      even layers, in the manner of Megatron-LM.
    - `"FSDP-like"`: every rank data-parallel, parameters gathered layer by layer, samples in the sampler's order.
    - `"DistTrain"`: its allocation and its order of samples, see [`allocate`]; even layers.
    - `"ratio-based"`: ranks in proportion to the FLOPs of each module, see [`RatioLayouts`].
    - `"encoders replicated"`: the encoders in every stage of the language model, see [`ReplicatedEncoders`].
    """
    batches = [prediction.sizes for prediction in result.best.predictions]
    judge = _BaselineEvaluator(replace(problem, fixed={}, arrangement="contiguous"), batches)
    yield judge.unaware(result.best.candidate.arrangement)
    yield judge.single_layout()
    yield judge.fully_sharded()
    yield judge.disttrain()
    yield judge.ratio_based()
    yield judge.replicated()


def all_trained(spec: ModelSpec) -> ModelSpec:
    """The model with nothing frozen."""
    modules = {
        name: replace(module, parameters=tuple(replace(p, trainable=True) for p in module.parameters))
        for name, module in spec.modules.items()
    }
    return replace(spec, modules=modules)


class UnawareOptions(ModuleOptions):
    """Layouts of a module with their actual memory, and times by the `assumed` costs."""

    def __init__(self, problem: PlanningProblem, name: str, assumed: CostModel):
        super().__init__(problem, name)
        self.assumed = assumed

    def layer_ms(self, kind: ParallelConfig, num_samples: float) -> NDArray:
        """See [`ModuleOptions`]."""
        return self._layer_ms(self.assumed, kind, num_samples)


class _BaselineEvaluator:
    """Evaluates the plans of baselines on the same batches."""

    def __init__(self, problem: PlanningProblem, batches: Sequence[SampleSizes]):
        self.problem, self.batches = problem, batches

    # The baselines

    def unaware(self, arrangement: str | Arrangement) -> ComparedPlan:
        """The fastest candidate for a fully trained model, with the arrangement if anything is frozen."""
        spec = all_trained(self.problem.spec)
        assumed = replace(self.problem, costs=self.problem.costs.with_spec(spec))
        space = CandidateSpace(self.problem)
        space.options.update({name: UnawareOptions(self.problem, name, assumed.costs) for name in space.options})
        candidates = list(itertools.islice(diversify(space.expected_to_fit()), _TRIED)) or list(
            itertools.islice(space, 1)
        )
        if not candidates:
            return self._none(UNAWARE, self._excess(least_memory_bytes(self.problem) or 0.0))
        is_frozen = any(not p.trainable for module in self.problem.spec.modules.values() for p in module.parameters)
        order = arrangement if is_frozen else "contiguous"
        ranked = self._best(map(space.candidate, candidates), order, assumed)
        if is_frozen:
            return self._compared(UNAWARE, ranked, "stages and ranks as if all was trained")
        note = "nothing is frozen: our search and costs, but samples in the sampler's order"
        return replace(self._compared(UNAWARE, ranked, note), label=ORDERED)

    def single_layout(self) -> ComparedPlan:
        layouts = SingleLayouts(self.problem)
        every = sorted(layouts, key=lambda layout: layout.step_ms)
        if not every:
            return self._none(SINGLE, "no tensor-parallel size divides the heads of all modules and the ranks")
        candidates = [layout for layout in every if layout.memory_bytes(self.problem) <= _ABOUT * self._limit_bytes]
        candidates = candidates or [min(every, key=lambda layout: layout.memory_bytes(self.problem))]
        ranked = self._best(map(layouts.candidate, diversify(candidates)), "contiguous")
        return self._compared(SINGLE, ranked, "one layout for all modules, encoders as first stages, even layers")

    def fully_sharded(self) -> ComparedPlan:
        """The fastest FSDP-like plan."""
        candidates = list(FullyShardedLayouts(self.problem))
        if not candidates:
            return self._none(SHARDED, "the ranks do not divide the global batch")
        ranked = self._best(candidates, "contiguous")
        return self._compared(SHARDED, ranked, "every rank data-parallel, parameters gathered layer by layer")

    def disttrain(self) -> ComparedPlan:
        """The fastest of DistTrain's allocations, one for each microbatch size."""
        candidates = self._allocations(self._limit_bytes)
        note = "its allocation and order of samples, even layers"
        if not candidates:
            candidates = self._allocations(_UNLIMITED)
            note = f"{note}; its own memory model finds nothing that fits"
        if not candidates:
            return self._none(DISTTRAIN, "its allocation finds no plan for so few ranks")
        ranked = self._best(candidates, "disttrain")
        idle = self.problem.num_ranks - ranked.plan.world_size
        return self._compared(DISTTRAIN, ranked, f"{note}; {idle} ranks without work" if idle else note)

    def ratio_based(self) -> ComparedPlan:
        """The fastest plan with ranks in proportion to FLOPs."""
        layouts = RatioLayouts(self.problem)
        if len(layouts.work) == 1:
            return self._none(RATIO, "a single module has all ranks")
        idle = [f"`{name}`" for name, work in layouts.work.items() if not work]
        if idle:
            return self._none(RATIO, f"no sample has work for {', '.join(idle)}")
        candidates = list(itertools.islice(diversify(layouts.expected_to_fit()), _TRIED))
        if not candidates:
            layouts = RatioLayouts(replace(self.problem, memory_bytes=None))
            candidates = sorted(layouts, key=lambda layout: layout.memory_bytes(self.problem))
        if not candidates:
            return self._none(RATIO, "no layout of the modules has the ranks of their share")
        ranked = self._best(map(layouts.candidate, candidates), "contiguous")
        return self._compared(RATIO, ranked, "ranks by the operations of each module, even layers, sampler's order")

    def replicated(self) -> ComparedPlan:
        """The fastest plan with replicated encoders."""
        spec = self.problem.spec
        if not spec.encoders or spec.generators:
            return self._none(REPLICATED, "is for models of encoders and a language model")
        layouts = ReplicatedEncoders(self.problem)
        every = sorted(layouts, key=lambda layout: layout.estimate_ms)
        if not every:
            return self._none(REPLICATED, "no layout of the language model has all ranks")
        steps, num_fitting = [], 0
        smallest = min(every, key=lambda layout: (layout.layout.dp_size, -layout.num_microbatches))
        for layout in [*every[:_TRIED], smallest]:
            steps.append(layouts.step(layout, self.batches))
            num_fitting += steps[-1].memory_bytes <= self._limit_bytes
            if num_fitting == _SIMULATED:
                break
        fitting = [step for step in steps if step.memory_bytes <= self._limit_bytes]
        best = min(fitting, key=lambda s: s.step_ms) if fitting else min(steps, key=lambda s: s.memory_bytes)
        note = "every stage of the language model runs all encoders again; simulated, the engine has no such plan"
        words = "; ".join(text for text in (note, self._excess(best.memory_bytes)) if text)
        figures = (best.step_ms, best.bubble_fraction, best.memory_bytes, best.flops_utilisation)
        return ComparedPlan(REPLICATED, None, str(best.layout), *figures, words)

    # DistTrain

    def _allocations(self, memory_bytes: float) -> list[Candidate]:
        """DistTrain's allocation for each microbatch size, with and without recomputation."""
        candidates = []
        for recompute in (False, True):
            given = self.problem.checkpointing
            recomputed: dict[str, Checkpointing] = {
                name: given.get(name, recompute) for name in self.problem.spec.modules
            }
            for size in self._microbatch_sizes():
                demands = {name: self._demand(name, size, recomputed[name]) for name in recomputed}
                try:
                    allocation = allocate(
                        demands,
                        self.problem.num_ranks,
                        self.problem.global_batch_size,
                        memory_bytes,
                        size,
                        self._tp_sizes,
                    )
                except ValueError:  # nothing fits
                    continue
                candidates.append((allocation.iteration_ms, self._allocated(allocation, recomputed)))
        return [candidate for _, candidate in sorted(candidates, key=lambda pair: pair[0])]

    @property
    def _optimizer_sharding(self) -> ShardingSettings:
        """The optimizer's state is divided over replicas there."""
        return ShardingSettings(1 if 1 in self.problem.zero_stages else 0)

    @property
    def _tp_sizes(self) -> tuple[int, ...]:
        return tuple(size for size in (1, 2, 4, 8) if size <= self.problem.costs.device.node_size)

    def _microbatch_sizes(self) -> list[int]:
        """Powers of two that divide the global batch."""
        if self.problem.microbatch_size is not None:
            return [self.problem.microbatch_size]
        sizes = [1 << power for power in range(6)]
        return [size for size in sizes if self.problem.global_batch_size % size == 0]

    def _demand(self, name: str, microbatch_size: int, checkpointing: Checkpointing) -> ModuleDemand:
        """Demand of a module for a mean sample."""
        spec = self.problem.spec
        module_spec, options = spec.modules[name], ModuleOptions(self.problem, name)
        heads = math.gcd(module_spec.num_heads, module_spec.num_kv_heads, module_spec.intermediate_size)
        sample_ms = {
            size: float(options.layer_ms(ParallelConfig(1, size, checkpointing), microbatch_size).sum())
            / microbatch_size
            for size in self._tp_sizes
            if heads % size == 0
        }
        alone = ParallelConfig(1, 1, checkpointing)
        optimizer = _OPTIMIZER_BYTES * sum(p.num_elements for p in module_spec.parameters if p.trainable)
        role: Role = "generator" if name in spec.generators else "encoder"
        return ModuleDemand(
            sample_ms,
            options.max_stages,
            heads,
            options.state_bytes(alone, 1) - optimizer,
            float(optimizer),
            options.saved_bytes(alone),
            role,
        )

    def _allocated(self, allocation: Allocation, recomputed: Mapping[str, Checkpointing]) -> Candidate:
        layouts = {
            name: ModuleLayout(
                even_layers(self.problem.spec.modules[name].num_layers, module.pp_size),
                module.dp_size,
                tp_size=module.tp_size,
                activation_checkpointing=recomputed[name],
                sharding=self._optimizer_sharding if module.dp_size > 1 else ShardingSettings(),
            )
            for name, module in allocation.modules.items()
        }
        return Candidate(layouts, {}, allocation.num_microbatches, self.problem.first_schedule)

    # Evaluation

    @property
    def _limit_bytes(self) -> float:
        limit = self.problem.memory_bytes
        return _UNLIMITED if limit is None else limit

    def _evaluated(
        self,
        candidate: Candidate,
        arrangement: str | Arrangement,
        count: int | None = None,
        problem: PlanningProblem | None = None,
    ) -> RankedPlan:
        """A candidate on the first `count` batches; on all by default."""
        problem = replace(problem or self.problem, memory_bytes=None)
        planner = step_planner(problem, replace(candidate, arrangement=arrangement))
        predictions = tuple(map(planner.predict_batch, self.batches[:count]))
        return RankedPlan(replace(candidate, arrangement=arrangement), planner.plan, predictions, 0.0)

    def _best(
        self, candidates: Iterable[Candidate], arrangement: str | Arrangement, assumed: PlanningProblem | None = None
    ) -> RankedPlan:
        """The fastest of the first candidates that fit, by the costs of `assumed`; the smallest one if none fits."""
        entries: list[tuple[bool, float, Candidate]] = []
        num_tasks = 0
        for candidate in candidates:
            ranked = self._evaluated(candidate, arrangement, 1)
            believed = ranked if assumed is None else self._evaluated(candidate, arrangement, 1, assumed)
            over = ranked.peak_memory_bytes > self._limit_bytes
            entries.append((over, ranked.peak_memory_bytes if over else believed.step_ms, candidate))
            num_tasks += candidate.num_tasks
            if (
                num_tasks > _MOST_TASKS
                or sum(not over for over, *_ in entries) == _SIMULATED
                or len(entries) == _TRIED
            ):
                break
        tried = []
        for _, _, candidate in sorted(entries, key=lambda entry: entry[:2]):
            ranked = self._evaluated(candidate, arrangement)
            if ranked.peak_memory_bytes <= self._limit_bytes:
                return ranked
            tried.append(ranked)
            if len(tried) == _CHECKED:
                break
        return min(tried, key=lambda plan: plan.peak_memory_bytes)

    def _excess(self, needed_bytes: float) -> str:
        """By how much a plan exceeds the memory, as text; empty if it fits."""
        over = needed_bytes - self._limit_bytes
        return f"needs {over / GIB:.3g} GiB more than a rank has" if over > 0 else ""

    def _compared(self, name: str, ranked: RankedPlan, note: str) -> ComparedPlan:
        """A plan with its figures, relative to all ranks of the problem."""
        share = ranked.plan.world_size / self.problem.num_ranks
        peak = ranked.peak_memory_bytes
        busy = _mean(1 - prediction.timeline.bubble_fraction for prediction in ranked.predictions)
        utilisation = _mean(prediction.flops_utilisation for prediction in ranked.predictions)
        words = "; ".join(text for text in (note, self._excess(peak)) if text)
        figures = (ranked.step_ms, 1 - share * busy, peak, share * utilisation)
        return ComparedPlan(name, ranked.plan, str(ranked.candidate), *figures, words, ranked.candidate)

    def _none(self, name: str, reason: str) -> ComparedPlan:
        return ComparedPlan(name, None, "", math.nan, math.nan, math.nan, math.nan, reason)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
