"""A plan that changes during a run, with copies of parameters and optimizer state, gives the stock run."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_mmparallel.modeling.unowned import local
from hf_mmparallel.plan import MultimodalParallelPlugin, parameter_shards, plan_for_model
from hf_mmparallel.resilience.state_copies import PlacedPlan
from hf_mmparallel.runtime.held_state import exchange
from hf_mmparallel.trainer import build, engine_state
from hf_mmparallel.trainer.recovery import MembershipChange
from hf_mmparallel.trainer.recovery_plan import state_transfers
from tests.deep_cases import deep
from tests.distributed import run_distributed
from tests.trainer import runs
from tests.trainer.moments import AfterSteps
from tests.trainer.test_unlike_copies import copies

ADAM: dict[str, Any] = {"optim": "adamw_torch", "adam_epsilon": 1e-3}
COPIES = {"vision": {"dp_size": 2}, "language_model": {"dp_size": 2}}
SHARED = {"vision": {"dp_size": 2, "tp_size": 2}, "language_model": {"colocate_with": "vision"}}
OWN = {"vision": {"tp_size": 2}, "language_model": {"tp_size": 2}}
PIPELINE = {"vision": {}, "language_model": {"pp_size": 3}}
SAVED = {"offload_activations": True}
AGAIN = {"activation_checkpointing": True, **SAVED}
ON_HOST = {"vision": {"dp_size": 2, **SAVED}, "language_model": {"dp_size": 2, **AGAIN}}
STAGES_ON_HOST = {"vision": AGAIN, "language_model": {"pp_size": 3, **SAVED}}
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


def follow(trainer: Any, layout: dict[str, Any]) -> None:
    """Changes the plan as a recovery does on the ranks that are left; here all are left."""
    engine, world = trainer.engine, trainer.world
    plan = plan_for_model(MultimodalParallelPlugin.from_any(layout), engine.spec, world.size)
    plan = replace(plan, num_microbatches=2)
    members = tuple(range(world.size))
    transfers = state_transfers(engine.spec, PlacedPlan(engine.plan, members), PlacedPlan(plan, members))
    own = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad and parameter.numel()]
    for parameter in own:  # as in an interrupted step
        parameter.grad = torch.zeros_like(parameter)
    held = trainer._survival.held_parameters()
    assert all(parameter.grad is None for parameter in own), "gradients are freed before anything is received"
    received, _ = exchange(held, transfers, world)
    after = parameter_shards(engine.spec, plan)
    needed = {n: received.get(n) or held[n] for n, shards in after.items() if shards.on_rank(world.rank)}
    trainer._survival.recovery = SimpleNamespace(local_rank=world.rank)
    trainer._survival.follow(SimpleNamespace(plan=plan, reason=""), needed, MembershipChange())
    assert not any(local(parameter).numel() for parameter in own), "so is what the plan before has had"
    trainer._survival.recovery = None


def _changing(start: dict[str, Any], layouts: dict[int, dict[str, Any]], **arguments: Any) -> runs.Run:
    options: Callable = build.EngineOptions
    prepare: Callable = engine_state.prepare_optimizer
    build.EngineOptions = lambda **given: options(**{**given, "can_change_plan": True})  # type: ignore[misc]

    def with_same_groups(optimizer: Any, holds_all: bool, world: Any, *rest: Any) -> None:
        engine_state.give_same_groups(optimizer, world)
        prepare(optimizer, holds_all, world, *rest)

    engine_state.prepare_optimizer = with_same_groups
    trainer = runs.make_trainer("llava", start, logging_steps=4, **arguments)
    trainer.add_callback(AfterSteps(lambda step: follow(trainer, layouts[step]) if step in layouts else None))
    return runs.run_of(trainer)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("start", "layouts", "decay"),
    [
        pytest.param(COPIES, {1: PIPELINE, 3: COPIES}, 0.0, id="copies, a pipeline, copies"),
        deep(ON_HOST, {1: STAGES_ON_HOST, 2: COPIES, 3: ON_HOST}, 0.1, id="activations in host memory and on devices"),
        deep(OWN, {1: UNLIKE, 2: PIPELINE, 3: SHARED}, 0.1, id="tp groups of all sizes"),
        deep(UNLIKE, {1: OTHERWISE, 3: UNLIKE}, 0.0, id="copies with unlike numbers of ranks"),
        deep(SHARED, {1: OWN, 3: SHARED}, 0.1, id="tensor parallel, there and back"),
    ],
)
def test_a_run_whose_plan_changes_equals_the_stock_run(start: dict[str, Any], layouts: dict[int, Any], decay: float):
    arguments = {**ADAM, "weight_decay": decay}  # without decay both groups of the optimizer have the same settings
    reference = runs.stock("llava", **arguments)
    run = run_distributed(_changing, 4, start, layouts, timeout=240, **arguments)[0]
    assert run.weights is not None and reference.weights is not None
    for name, want in reference.weights.items():
        assert (run.weights[name] - want).abs().max() <= 2e-6, name
