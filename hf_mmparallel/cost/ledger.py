"""
The ledger of a step: what keeps a plan from the peak of its devices, in terms that add up to the step.

A term is what the step, or the time that ranks spend in tasks, loses when one thing takes no time. All of them come
from the costs and the timeline of the prediction, evaluated again with one thing less after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..plan import ModulePlan, StageKey, SyncGroup
from ..schedule import Timeline
from .analytic import AnalyticLayers
from .gradient_sums import optimizer_times
from .layer_table import PLACES
from .layers import CostModel, Engine, LayersWithout
from .row_sizes import RowLayout
from .stage_times import StageCost, stage_costs
from .step import StepCost
from .step_planner import Prediction

TERMS: Mapping[str, str] = {
    "needed": "the model's operations at the peak",
    "beyond": "operations beyond the model's: attention's scores again, what tp ranks repeat",
    "measured": "layers as measured, below the peak",
    "products": "matrix products below the peak",
    "attention": "attention below the peak",
    "memory": "memory-bound operations",
    "padding": "padding, masked pairs, images unevenly over cp ranks",
    "recomputation": "recomputation",
    "host": "launches of kernels",
    "tp": "exposed: sums of tp ranks",
    "ep": "exposed: tokens to experts and back",
    "cp": "cp",
    "zero": "exposed: weights and gradients of layers (ZeRO-2, ZeRO-3), frozen weights from the host",
    "blocking": "messages for which both ends stand still",
    "sums": "exposed: gradient sums",
    "messages": "exposed: messages between stages and modules",
    "imbalance": "ranks with less work than the busiest one",
    "bubble": "bubble: the busiest rank waits for others",
    "routes": "forwards before the step, for the loss over the experts' load",
    "optimizer": "clipping and the optimizer's step",
    "updated": "exposed: updated weights",
}
"""What a step consists of, in the order in which it is shown."""


@dataclass(frozen=True)
class Ledger:
    """Milliseconds of a step by what takes them, on average over all ranks."""

    terms: Mapping[str, float]  # by the keys of `TERMS`; none is negative, and they add up to the step

    @property
    def step_ms(self) -> float:
        """The sum."""
        return math.fsum(self.terms.values())

    @property
    def shares(self) -> dict[str, float]:
        """The terms that take time, over the step: behind what the model needs, the largest first."""
        order = sorted(self.terms, key=lambda name: (name != "needed", -self.terms[name]))
        return {name: self.terms[name] / self.step_ms for name in order if self.terms[name] > 0}


@dataclass(frozen=True)
class _Costs:
    """What the tasks of a step cost with some things left out."""

    costs: CostModel
    layers: LayersWithout
    of_stage: Callable[[StageCost], StageCost]  # what is left out of the cost of a stage
    rows: RowLayout | None = None  # of all modules, instead of their own

    def without(self, change: Callable[[StageCost], StageCost]) -> _Costs:
        """The same with something less in the cost of a stage."""
        return replace(self, of_stage=lambda cost, before=self.of_stage: change(before(cost)))

    def between_ranks(self, **device: float | None) -> _Costs:
        """The same on a device with other links, for all but the layers."""
        return replace(self, costs=replace(self.costs, device=replace(self.costs.device, **device)))

    def of_layers(self, engine: Engine | None = None, **device: float) -> _Costs:
        """The same with layers on a device with other figures, whose operations are counted."""
        base = self.layers.layers
        assert isinstance(base, AnalyticLayers)
        base = replace(base, device=replace(base.device, **device), engine=engine or base.engine)
        return replace(self, layers=replace(self.layers, layers=base))

    @property
    def of_tasks(self) -> CostModel:
        """The cost model."""
        return replace(self.costs, layers=self.layers)


class _Needed(StepCost):
    """The costs of a step whose chunks have other rows."""

    def __init__(self, rows: RowLayout | None, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rows = rows

    def _rows(self, name: str, module: ModulePlan) -> RowLayout:
        return super()._rows(name, module) if self.rows is None else self.rows


def ledger_of(predictions: Sequence[Prediction], costs: CostModel, sync_groups: Sequence[SyncGroup]) -> Ledger:
    """The mean ledger of predicted steps of a plan, from the costs and gradient sums that predicted them."""
    ledgers = [_ledger(prediction, costs, sync_groups) for prediction in predictions]
    return Ledger({name: math.fsum(own.terms[name] for own in ledgers) / len(ledgers) for name in ledgers[0].terms})


def _ledger(prediction: Prediction, costs: CostModel, sync_groups: Sequence[SyncGroup]) -> Ledger:
    """The ledger of one step."""
    timeline = prediction.timeline
    terms = {**_between_tasks(timeline), **_optimizer(prediction, costs, sync_groups), "routes": prediction.routes_ms}
    left_ms = _mean_ms(timeline, timeline.durations.tasks)
    for name, changed in _chain(costs):
        own_ms = _mean_ms(timeline, _task_ms(prediction, changed))
        terms[name] = left_ms - own_ms
        left_ms = own_ms
    # what is measured may be faster than the peak in the table of devices
    terms["needed"] = min(left_ms, prediction.flops_utilisation * prediction.step_ms)
    terms["beyond" if isinstance(costs.layers, AnalyticLayers) else "measured"] = left_ms - terms["needed"]
    return Ledger({name: terms[name] for name in TERMS if name in terms})


def _chain(costs: CostModel) -> Iterator[tuple[str, _Costs]]:
    """What tasks consist of, each with their costs when it and all before it take no time."""
    now = _Costs(costs, LayersWithout(costs.layers, ()), lambda cost: replace(cost, passes=None))
    yield "zero", now
    now = replace(now, costs=replace(costs, engine=replace(costs.engine, blocking_messages=False)))
    yield "blocking", now
    links = dict.fromkeys(("link_gb_per_s", "node_link_gb_per_s"), math.inf)
    now = now.without(lambda cost: replace(cost, gather_token_ms=0.0))
    now = now.between_ranks(host_link_gb_per_s=None, **links)
    yield "cp", now
    now = replace(now, layers=replace(now.layers, left_out=("travels",)))
    yield "ep", now
    now = replace(now, layers=replace(now.layers, left_out=("travels", "sums")))
    yield "tp", now
    now = now.without(StageCost.without_launches)
    yield "host", now
    now = now.without(_once)
    yield "recomputation", now
    now = replace(now, rows=RowLayout("", padded=False))
    yield "padding", now
    if not isinstance(costs.layers, AnalyticLayers):
        return
    now = now.of_layers(memory_gb_per_s=math.inf)
    yield "memory", now
    whole = {"attention_efficiency": 1.0, "block_attention_share": 1.0}
    now = now.of_layers(replace(costs.engine, attention_share=1.0), **whole)
    yield "attention", now
    yield "products", now.of_layers(matmul_efficiency=1.0)


def _once(cost: StageCost) -> StageCost:
    """A stage that computes nothing again."""
    work = cost.work.copy()
    work[PLACES["again"]] = 0.0
    return replace(cost, work=work)


def _task_ms(prediction: Prediction, changed: _Costs) -> np.ndarray:
    """Times of all tasks of a step."""
    plan, planned = prediction.plan, prediction.planned
    kinds: dict[int, StageCost] = {}
    stages: dict[StageKey, StageCost] = {}
    for key, cost in stage_costs(changed.of_tasks, plan).items():
        stages[key] = kinds.setdefault(id(cost), changed.of_stage(cost))
    cost = _Needed(changed.rows, changed.costs, plan, planned.step, prediction.sizes, (), stages)
    return cost.of_graph(prediction.timeline.graph)


def _mean_ms(timeline: Timeline, task_ms: np.ndarray) -> float:
    """The time of tasks on a rank, averaged over all ranks of the plan."""
    return math.fsum(timeline.busy_of(task_ms).values()) / timeline.num_ranks


def _between_tasks(timeline: Timeline) -> dict[str, float]:
    """What ranks wait for: communication that no task hides, ranks with more work, and the order of a pipeline."""
    durations = timeline.durations
    alone = timeline.with_durations(replace(durations, sums=np.zeros_like(durations.sums)))
    near = timeline.with_durations(
        replace(durations, sums=np.zeros_like(durations.sums), messages=np.zeros_like(durations.messages))
    )
    most_ms = max(timeline.busy_of(timeline.graph.longest(durations.tasks)).values())
    mean_ms = _mean_ms(timeline, durations.tasks)
    return {
        "sums": timeline.iteration_ms - alone.iteration_ms,
        "messages": alone.iteration_ms - near.iteration_ms,
        "imbalance": most_ms - mean_ms,
        "bubble": near.iteration_ms - most_ms,
    }


def _optimizer(prediction: Prediction, costs: CostModel, sync_groups: Sequence[SyncGroup]) -> dict[str, float]:
    """The update of the slowest rank, and its gathering of the updated weights."""
    update_ms, gather_ms = max(optimizer_times(costs, prediction.plan, sync_groups).values(), key=sum)
    return {"optimizer": update_ms, "updated": gather_ms}
