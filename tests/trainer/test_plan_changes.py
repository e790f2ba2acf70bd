"""A plan that changes during a run, with copies of parameters and optimizer state, gives the stock run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_mmparallel.plan import MultimodalParallelPlugin, ParallelPlan, parameter_shards, plan_for_model
from hf_mmparallel.resilience.state_copies import PlacedPlan
from hf_mmparallel.runtime.held_state import exchange
from hf_mmparallel.trainer import build, engine_state
from hf_mmparallel.trainer.recovery import MembershipChange
from hf_mmparallel.trainer.recovery_plan import state_transfers
from tests.deep_cases import deep
from tests.distributed import run_distributed
from tests.trainer import runs
from tests.trainer.test_unlike_copies import copies

ADAM: dict[str, Any] = {"optim": "adamw_torch", "adam_epsilon": 1e-3, "max_steps": 5}
COPIES = {"vision": {"dp_size": 2}, "language_model": {"dp_size": 2}}
SHARED = {"vision": {"dp_size": 2, "tp_size": 2}, "language_model": {"colocate_with": "vision"}}
OWN = {"vision": {"tp_size": 2}, "language_model": {"tp_size": 2}}
PIPELINE = {"vision": {}, "language_model": {"pp_size": 3}}
UNLIKE = {
    "modules": {
        "vision": copies([(0, 4, (0,))], [(0, 4, (1,))]),
        "language_model": copies([(0, 4, (0,))], [(0, 1, (1,)), (1, 4, (3, 2))]),
    }
}
OTHERWISE = {
    "modules": {
        "vision": copies([(0, 4, (2, 3))], [(0, 4, (0,))]),
        "language_model": copies([(0, 4, (1, 2))], [(0, 2, (3,)), (2, 4, (0,))]),
    }
}


@dataclass
class Layout:
    plan: ParallelPlan
    reason: str = ""


class Changes(TrainerCallback):
    """Changes the plan after some steps, as a recovery does on the ranks that are left; here all are left."""

    def __init__(self, layouts: dict[int, dict[str, Any]]):
        self.layouts = layouts
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step not in self.layouts:
            return
        trainer, engine = self.trainer, self.trainer.engine
        layout = MultimodalParallelPlugin.from_any(self.layouts[state.global_step])
        plan = replace(plan_for_model(layout, engine.spec, trainer.world.size), num_microbatches=2)
        members = tuple(range(trainer.world.size))
        transfers = state_transfers(engine.spec, PlacedPlan(engine.plan, members), PlacedPlan(plan, members))
        held = trainer._survival.held_parameters()
        received, _ = exchange(held, transfers, trainer.world)
        after = parameter_shards(engine.spec, plan)
        rank = trainer.world.rank
        needed = {n: received.get(n) or held[n] for n, shards in after.items() if shards.on_rank(rank)}
        trainer._survival.recovery = SimpleNamespace(local_rank=rank)
        trainer._survival.follow(Layout(plan), needed, MembershipChange())
        trainer._survival.recovery = None


def _changing(start: dict[str, Any], layouts: dict[int, dict[str, Any]], **arguments: Any) -> runs.Run:
    options: Callable = build.EngineOptions
    prepare: Callable = engine_state.prepare_optimizer
    build.EngineOptions = lambda **given: options(**{**given, "can_change_plan": True})  # type: ignore[misc]

    def with_same_groups(optimizer: Any, holds_all: bool, world: Any, *rest: Any) -> None:
        engine_state.give_same_groups(optimizer, world)
        prepare(optimizer, holds_all, world, *rest)

    engine_state.prepare_optimizer = with_same_groups
    changes = Changes(layouts)
    changes.trainer = runs.make_trainer("llava", start, callbacks=[changes], logging_steps=5, **arguments)
    return runs.run_of(changes.trainer)


CHANGES = {
    "copies, a pipeline, copies": (COPIES, {1: PIPELINE, 3: COPIES}),
    "tensor parallel, other modules on each rank": (OWN, {2: SHARED}),
    "tensor parallel, there and back": (SHARED, {1: OWN, 3: SHARED}),
    "copies with unlike numbers of ranks": (UNLIKE, {1: OTHERWISE, 3: UNLIKE}),
    "tp groups of all sizes": (OWN, {1: UNLIKE, 2: PIPELINE, 3: SHARED}),
}
ALWAYS = {
    ("copies, a pipeline, copies", "decay"),
    ("copies with unlike numbers of ranks", "groups with the same settings"),
    ("tp groups of all sizes", "decay"),
}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("start", "layouts", "weight_decay"),
    [
        deep(*change, decay, id=f"{name}-{groups}", unless=(name, groups) in ALWAYS)
        for name, change in CHANGES.items()
        for groups, decay in (("decay", 0.1), ("groups with the same settings", 0.0))
    ],
)
def test_a_run_whose_plan_changes_equals_the_stock_run(start, layouts, weight_decay):
    arguments = {**ADAM, "weight_decay": weight_decay}
    reference = runs.stock("llava", **arguments)
    run = run_distributed(_changing, 4, start, layouts, timeout=240, **arguments)[0]
    assert run.weights is not None and reference.weights is not None
    for name, want in reference.weights.items():
        assert (run.weights[name] - want).abs().max() <= 2e-6, name
