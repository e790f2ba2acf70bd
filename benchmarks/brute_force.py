"""
The fastest plan by simulating all layouts, to judge the search by. Nothing here is shared with how the search lists
layouts: sizes come from plain loops, times of stages from the table of layers, memory from the simulated step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hf_mmparallel.cost import layer_table
from hf_mmparallel.cost.stage_memory import stage_memory
from hf_mmparallel.cost.step_planner import Prediction
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlan, ParallelPlan, Stage
from hf_mmparallel.plan.layout import ModuleLayout
from hf_mmparallel.planning.bounds import StepBounds
from hf_mmparallel.planning.partition import partition_all
from hf_mmparallel.planning.problem import Candidate, PlanningProblem
from hf_mmparallel.planning.simulations import caution, step_planner

MOST_MICROBATCHES = 256
CUT = 1.3  # times the best: layouts whose closed form is slower are not simulated
NUM_BATCHES = 3
CHECKED = 16  # of the fastest on the first batch, that run all batches
CLOSE = 1.1  # times the best: layouts that are tried with every schedule and arrangement


@dataclass(frozen=True)
class Sizes:
    """The sizes of a module."""

    dp: int
    pp: int
    cp: int
    tp: int
    recomputed: bool

    @property
    def num_ranks(self) -> int:
        return self.dp * self.pp * self.cp * self.tp


@dataclass(frozen=True)
class Listed:
    """A layout of all modules with the closed form of its step, and a lower bound of its slowest rank."""

    closed_form_ms: float
    least_ms: float
    sizes: Mapping[str, Sizes]
    hosts: Mapping[str, str]
    num_microbatches: int


@dataclass(frozen=True)
class BruteForce:
    """
    Result of simulating everything.

    Args:
        candidate (`Candidate`, *optional*): The fastest layout that fits all batches; `None` if none does.
        step_ms (`float`): Its step, the mean over the batches.
        num_listed (`int`): Layouts, those that can't fit left out.
        num_simulated (`int`): Layouts that were simulated.
        least_ratio (`float`): The least simulated over closed form: where it is above 1 / `CUT`, nothing was missed.
        bound_ratio (`float`): Median of the lower bound of the search over what was simulated, without the optimizer.
        is_complete (`bool`): Whether the time sufficed for all that could be faster.
        seconds (`float`): Of the processor.
        close (`tuple[Candidate, ...]`): Layouts that are nearly as fast on the first batch, the fastest first.
    """

    candidate: Candidate | None
    step_ms: float
    num_listed: int
    num_simulated: int
    least_ratio: float
    bound_ratio: float
    is_complete: bool
    seconds: float
    close: tuple[Candidate, ...]


class Layouts:
    """
    All layouts of a model of a language model and at most one encoder.

    Args:
        problem (`PlanningProblem`): The question, with its schedule and arrangement.
    """

    def __init__(self, problem: PlanningProblem):
        self.problem, self.names = problem, list(problem.spec.modules)
        self.times = lru_cache(maxsize=None)(self._times)
        self.mean_bytes = lru_cache(maxsize=None)(self._mean_bytes)

    def sizes(self, name: str) -> Iterator[Sizes]:
        """All sizes of a module."""
        part, ranks = self.problem.spec.modules[name], self.problem.num_ranks
        mean_tokens = self.problem.sizes.tokens[name].mean()
        tensor = [tp for tp in range(1, min(ranks, self.problem.costs.device.node_size) + 1) if _divides(tp, part)]
        context = [cp for cp in (1, 2, 4, 8, 16, 32) if cp == 1 or mean_tokens >= 1024 * cp]
        context = context if name == LANGUAGE_MODEL else [1]
        copies = [dp for dp in range(1, ranks + 1) if self.problem.global_batch_size % dp == 0]
        trained = layer_table(self.problem.costs, name).backward[1:-1].any()
        for dp, cp, tp in itertools.product(copies, context, tensor):
            for pp in range(1, min(part.num_layers, ranks // (dp * cp * tp)) + 1):
                for recomputed in (False, True) if trained else (False,):
                    yield Sizes(dp, pp, cp, tp, recomputed)

    def __iter__(self) -> Iterator[Listed]:
        """All layouts that take all ranks, in no order."""
        ranks = self.problem.num_ranks
        by_ranks: dict[str, dict[int, list[Sizes]]] = {name: {} for name in self.names}
        for name in self.names:
            for sizes in self.sizes(name):
                by_ranks[name].setdefault(sizes.num_ranks, []).append(sizes)
        language, encoders = by_ranks[LANGUAGE_MODEL], [name for name in self.names if name != LANGUAGE_MODEL]
        if not encoders:
            for sizes in language.get(ranks, ()):
                yield from self._counted({LANGUAGE_MODEL: sizes}, {})
            return
        (encoder,) = encoders
        for own_ranks, choices in language.items():
            shared = by_ranks[encoder].get(ranks, ()) if own_ranks == ranks else ()
            beside = by_ranks[encoder].get(ranks - own_ranks, ())
            for sizes, (hosts, others) in itertools.product(
                choices, (({encoder: LANGUAGE_MODEL}, shared), ({}, beside))
            ):
                for other in others:
                    if other.dp % sizes.dp == 0 or sizes.dp % other.dp == 0:
                        yield from self._counted({encoder: other, LANGUAGE_MODEL: sizes}, hosts)

    def _counted(self, sizes: Mapping[str, Sizes], hosts: Mapping[str, str]) -> Iterator[Listed]:
        """A layout with every number of microbatches."""
        replica = self.problem.global_batch_size // sizes[LANGUAGE_MODEL].dp
        for count in range(1, min(replica, MOST_MICROBATCHES) + 1):
            if replica % count == 0:
                listed = self._listed(sizes, hosts, count)
                if listed is not None:
                    yield listed

    def _listed(self, sizes: Mapping[str, Sizes], hosts: Mapping[str, str], count: int) -> Listed | None:
        """The closed form of a layout, `None` if its mean memory over the ranks exceeds the limit."""
        held = [self.mean_bytes(name, own, count) for name, own in sizes.items()]
        limit = self.problem.memory_bytes
        if limit is not None and (sum(held) if hosts else max(held)) > limit:
            return None
        slowest, through, sums = zip(*(self.times(name, own, count) for name, own in sizes.items()), strict=True)
        mean = [whole / own.pp for whole, own in zip(through, sizes.values(), strict=True)]
        slowest_ms = sum(slowest) if hosts else max(slowest)
        least = count * max(*slowest, sum(mean) if hosts else 0.0)
        closed_form = sum(through) + (count - 1) * slowest_ms + (sum(sums) if hosts else max(sums))
        return Listed(closed_form, least, sizes, hosts, count)

    def _layer_ms(self, name: str, sizes: Sizes, count: int) -> np.ndarray:
        """Forward and backward of a mean microbatch in each layer."""
        problem = self.problem
        samples = problem.global_batch_size / sizes.dp / count
        tokens, squares = (samples * float(own[name].mean()) for own in (problem.sizes.tokens, problem.sizes.squares))
        return layer_table(problem.costs, name, sizes.tp, sizes.recomputed).step_ms(tokens, squares, sizes.cp)

    def _times(self, name: str, sizes: Sizes, count: int) -> tuple[float, float, float]:
        """A microbatch on the slowest stage and through all of them, and the sum of gradients."""
        layer_ms = self._layer_ms(name, sizes, count)
        problem, copies = self.problem, sizes.dp * sizes.cp
        trained = sum(4.0 * p.num_elements for p in problem.spec.modules[name].parameters if p.trainable)
        step = sizes.pp * sizes.tp
        link = problem.costs.device.link_bytes_per_ms(range(0, copies * step, step))
        sum_ms = 2 * (copies - 1) / copies * trained / sizes.pp / sizes.tp / link
        return float(partition_all(layer_ms, sizes.pp).slowest_stages_ms[-1]), float(layer_ms.sum()), sum_ms

    def _mean_bytes(self, name: str, sizes: Sizes, count: int) -> float:
        """State and the activations of one mean microbatch, on average over the stages."""
        problem, part = self.problem, self.problem.spec.modules[name]
        rows = tuple(tuple(range(r * sizes.tp, (r + 1) * sizes.tp)) for r in range(sizes.cp))
        stage = Stage((0, part.num_layers), rows)
        plan = ParallelPlan({name: ModulePlan(((stage,),), sizes.recomputed)})
        memory = stage_memory(problem.costs, plan, name, stage)
        tokens = problem.global_batch_size / sizes.dp / count * float(problem.sizes.tokens[name].mean())
        return (memory.state.total + float(memory.saved_bytes(np.array([0.0, tokens, 0.0])))) / sizes.pp

    def candidate(self, listed: Listed) -> Candidate:
        """The layout with its stages cut."""
        layouts = {}
        for name, own in listed.sizes.items():
            layer_ms = self._layer_ms(name, own, listed.num_microbatches)
            cut = partition_all(layer_ms, own.pp).partition(own.pp).layers
            layouts[name] = ModuleLayout(cut, own.dp, own.cp, own.tp, own.recomputed)
        problem = self.problem
        schedule, vp_size = problem.schedules[0]
        return Candidate(layouts, listed.hosts, listed.num_microbatches, schedule, problem.first_arrangement, vp_size)


def _divides(tp: int, part) -> bool:
    return not any(count % tp for count in (part.num_heads, part.num_kv_heads, part.intermediate_size))


def simulated(problem: PlanningProblem, candidate: Candidate, number: int) -> Prediction | None:
    """
    A batch of a problem under a candidate.

    Args:
        problem (`PlanningProblem`): The question.
        candidate (`Candidate`): The layout.
        number (`int`): Which batch.

    Returns:
        `Prediction`, *optional*: `None` for what does not fit the memory.
    """
    planner = step_planner(problem, candidate)
    try:
        found = planner.predict_batch(problem.batches[number])
    except ValueError:  # the state alone is larger than the memory
        return None
    fits = problem.memory_bytes is None or found.peak_memory_bytes <= problem.memory_bytes
    return found if fits else None


def brute_force(problem: PlanningProblem, limit_s: float = float("inf")) -> BruteForce:
    """
    Simulates all layouts that could be the fastest, those with the least closed form first.

    Args:
        problem (`PlanningProblem`): The question, with a schedule and an arrangement.
        limit_s (`float`, *optional*): Seconds of the processor after which it stops.
    """
    start = time.process_time()
    layouts = Layouts(problem)
    listed = sorted(layouts, key=lambda own: own.closed_form_ms)
    times: list[tuple[float, Candidate]] = []
    best_ms, least_ratio, num_simulated, is_complete = float("inf"), float("inf"), 0, True
    bounds, bound_ratios = StepBounds(problem), list[float]()
    for own in listed:
        if own.closed_form_ms > CUT * best_ms:
            break
        if own.least_ms >= best_ms:
            continue
        if time.process_time() - start > limit_s:
            is_complete = False
            break
        candidate = layouts.candidate(own)
        prediction = simulated(problem, candidate, 0)
        num_simulated += 1
        if prediction is None:
            continue
        least_ratio = min(least_ratio, prediction.step_ms / own.closed_form_ms)
        bound_ratios.append(bounds.least_ms(candidate) / prediction.timeline.iteration_ms)
        best_ms = min(best_ms, prediction.step_ms)
        times.append((prediction.step_ms, candidate))
    times.sort(key=lambda pair: pair[0])
    best, step_ms = _over_batches(problem, times)
    close = tuple(own for own_ms, own in times if own_ms <= CLOSE * best_ms)
    seconds = time.process_time() - start
    ratio = float(np.median(bound_ratios))
    return BruteForce(best, step_ms, len(listed), num_simulated, least_ratio, ratio, is_complete, seconds, close)


@dataclass(frozen=True)
class BruteOrders:
    """
    Result of simulating the fastest layouts with every schedule and arrangement.

    Args:
        candidate (`Candidate`, *optional*): The fastest that fits all batches; `None` if none does.
        step_ms (`float`): Its step, the mean over the batches.
        num_simulated (`int`): Layouts, schedules and arrangements that were simulated.
        is_complete (`bool`): Whether the time sufficed for all of them.
        seconds (`float`): Of the processor.
    """

    candidate: Candidate | None
    step_ms: float
    num_simulated: int
    is_complete: bool
    seconds: float

    @property
    def cautious_ms(self) -> float:
        """The step as a search compares it, see [`caution`]."""
        return self.step_ms if self.candidate is None else caution(self.candidate) * self.step_ms


def brute_orders(problem: PlanningProblem, layouts: Sequence[Candidate], limit_s: float = float("inf")) -> BruteOrders:
    """
    Simulates layouts with every schedule and arrangement that the problem leaves open.

    Args:
        problem (`PlanningProblem`): The question.
        layouts (`Sequence[Candidate]`): The layouts, the most promising first.
        limit_s (`float`, *optional*): Seconds of the processor after which it stops.
    """
    start = time.process_time()
    times: list[tuple[float, Candidate]] = []
    all_orders = list(itertools.product(layouts, problem.schedules, problem.arrangements))
    num_simulated = 0
    for layout, (schedule, vp_size), arrangement in all_orders:
        if time.process_time() - start > limit_s:
            break
        candidate = replace(layout, schedule=schedule, vp_size=vp_size, arrangement=arrangement)
        prediction = simulated(problem, candidate, 0)
        num_simulated += 1
        if prediction is not None:
            times.append((prediction.step_ms, candidate))
    times.sort(key=lambda pair: caution(pair[1]) * pair[0])
    best, step_ms = _over_batches(problem, times)
    seconds = time.process_time() - start
    return BruteOrders(best, step_ms, num_simulated, num_simulated == len(all_orders), seconds)


def _over_batches(
    problem: PlanningProblem, times: Sequence[tuple[float, Candidate]]
) -> tuple[Candidate | None, float]:
    """The best over all batches of the fastest that fit them; `times` are those on the first batch."""
    fitting: list[tuple[float, Candidate]] = []
    for first_ms, candidate in times:
        others = [simulated(problem, candidate, number) for number in range(1, NUM_BATCHES)]
        steps = [first_ms, *(own.step_ms for own in others if own is not None)]
        if len(steps) == NUM_BATCHES:
            fitting.append((float(np.mean(steps)), candidate))
        if len(fitting) == CHECKED:
            break
    if not fitting:
        return None, float("inf")
    step_ms, best = min(fitting, key=lambda pair: caution(pair[1]) * pair[0])
    return best, step_ms


def named(problem: PlanningProblem) -> PlanningProblem:
    """The problem with the schedule and the arrangement that are looked at first, where they are left open."""
    return replace(problem, schedule=problem.first_schedule, arrangement=problem.first_arrangement)
