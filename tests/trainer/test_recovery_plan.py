"""The layouts of a run whose nodes are lost and join, and what a rank that joins is told of it."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState
from transformers.integrations import WandbCallback
from transformers.trainer_callback import CallbackHandler, TrainerCallback

from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, MultimodalParallelPlugin, parameter_shards, resolve_plan
from hf_mmparallel.resilience.pipelines import TooFewNodesError
from hf_mmparallel.trainer.arguments import ResilienceSettings
from hf_mmparallel.trainer.build import PreparedModel
from hf_mmparallel.trainer.metrics_callback import RecoveryCallback
from hf_mmparallel.trainer.recovery_plan import NodeLayouts, node_layouts
from hf_mmparallel.trainer.survival import JoinState, Survival
from tests import tiny
from tests.resilience.test_resilient_planner import planner_of


@pytest.fixture(scope="module")
def layouts() -> NodeLayouts:
    return NodeLayouts(planner_of("llava", 3, 2, 1))


def test_whole_nodes_that_join_get_a_place_and_others_none(layouts):
    first = layouts.planner.first()
    after = layouts.with_members(first, {8, 9, 10})
    assert sorted(after.members) == [0, 1, 2, 3, 4, 5, 8, 9]
    held = {(t.name, t.target) for t in layouts.transfers(first, after)}
    for rank, member in enumerate(after.members):
        if member in (8, 9):
            assert {(name, rank) for name in layouts.needed_parameters(after, rank)} <= held, (
                "they hold nothing before"
            )
    assert layouts.with_members(first, {9, 10}) is first
    assert layouts.with_members(first, range(6, 2 * 10_000)) is first, "no pipelines could use so many"


def test_a_node_that_joins_after_a_loss_takes_its_place(layouts):
    left = layouts.without(layouts.planner.first(), {2})
    assert set(left.members) == {0, 1, 4, 5}, "the node is lost as a whole"
    assert sorted(layouts.with_members(left, {6, 7}).members) == [0, 1, 4, 5, 6, 7]


def test_nodes_leave_as_a_whole_and_as_many_as_leave_all_layers(layouts):
    first = layouts.planner.first()
    assert layouts.leaving(first, {2}) == {2, 3}
    with pytest.raises(TooFewNodesError):
        layouts.leaving(first, {0, 2, 5})
    several = NodeLayouts(planner_of("llava", 7, 1, 1, limited=True))
    copies = several.planner.first()
    asked = {one.nodes[0] for one in copies.pipelines}  # all that have the first layer
    assert len(asked) == 3 <= 7 - several.planner.fewest_guaranteed
    assert several.leaving(copies, asked) == {min(asked)}


def layouts_of(plugin: MultimodalParallelPlugin, **arguments: Any) -> NodeLayouts:
    """Of a small LLaVA on 4 nodes of 2 ranks."""
    model = tiny.FAMILIES["llava"]()
    spec = build_model_spec(model)
    given = {
        "survives": ResilienceSettings.from_dict({"failures": 1, "ranks_per_node": 2}),
        "world_size": 8,
        "per_device_train_batch_size": 1,
        "microbatch_assignment": None,
        "mean_time_between_failures_h": 24.0,
        "memory_limit_gib": None,
        "activation_checkpointing": False,
        "activation_checkpointing_kwargs": None,
    }
    prepared = PreparedModel(model, spec, analytic_costs(spec, find_device("h100"), 4))
    return node_layouts(prepared, plugin, SimpleNamespace(**{**given, **arguments}), (16, None))


def test_stages_have_any_size_that_the_settings_leave_open() -> None:
    """The plan that follows from this is one that the same layouts adopt."""
    settings = {"auto": True, "modules": {"vision": {"tp_size": 1}}}
    layouts = layouts_of(MultimodalParallelPlugin.from_any(settings), activation_checkpointing=True)
    chain = layouts.planner.plans.chain
    assert chain.tp_sizes == {"vision": (1,), LANGUAGE_MODEL: (1, 2)}
    cuts = layouts.tp_cuts()
    assert {sizes for _, sizes in cuts.values()} == {(1, 2)} and not any("vision" in name for name in cuts)
    assert sorted({dim for dim, _ in cuts.values()}) == [0, 1], "rows of some matrices, columns of others"
    first = layouts.planner.first()
    assert all(module.activation_checkpointing for module in first.plan.modules.values())
    adopted = layouts.planner.adopt(first.plan)
    assert adopted.plan == first.plan and adopted.step_ms == pytest.approx(first.step_ms, rel=1e-6)


def test_copies_that_share_optimizer_state_are_on_one_node() -> None:
    settings = {"auto": True, "modules": {LANGUAGE_MODEL: {"zero_stage": 2, "shard_size": 2}}}
    layouts = layouts_of(MultimodalParallelPlugin.from_any(settings))
    assert layouts.planner.plans.chain.tp_sizes == {"vision": (1, 2), LANGUAGE_MODEL: (1,)}
    first = layouts.planner.first()
    shards = parameter_shards(layouts.planner.plans.chain.spec, first.plan)
    cuts = {cut for one in shards.values() for shard in one.shards if (cut := shard.zero_cut) is not None}
    assert {cut.num_slices for cut in cuts} == {2} and len(first.plan.modules["vision"].replicas) == 8
    after = layouts.without(first, {3})
    assert after.members == (0, 1, 4, 5, 6, 7) and not layouts.transfers(first, after)
    assert layouts.planner.adopt(first.plan).plan == first.plan


def test_stages_after_a_plan_of_the_user_have_its_sizes() -> None:
    spec = build_model_spec(tiny.FAMILIES["llava"]())
    two = {"vision": ModulePlugin(dp_size=2, tp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, tp_size=2)}
    plan = resolve_plan(spec, two, num_microbatches=8)
    layouts = layouts_of(MultimodalParallelPlugin(plan=plan))
    assert layouts.planner.plans.chain.tp_sizes == {"vision": (2,), LANGUAGE_MODEL: (2,)}


def test_a_schedule_that_found_plans_do_not_run_is_refused() -> None:
    with pytest.raises(ValueError, match="gpipe"):
        layouts_of(MultimodalParallelPlugin.from_any({"auto": True, "schedule": "gpipe"}))


# What a rank that joins is told


class Steps:
    def save(self, folder: Path, step: int) -> None:
        (folder / "position.json").write_text(f"after step {step}")


def _trainer(num_groups: int) -> Any:
    """A Trainer with what is told; its optimizer has groups of one parameter."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": 0.1 * n} for n in range(num_groups)]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    callbacks, control = [TrainerCallback(), EarlyStoppingCallback(4), RecoveryCallback(8)], TrainerControl()
    stateful: Any = [callbacks[1], control]
    return SimpleNamespace(
        state=TrainerState(
            global_step=3, epoch=0.5, log_history=[{"loss": 2.0, "step": 3}], stateful_callbacks=stateful
        ),
        control=control,
        callback_handler=SimpleNamespace(callbacks=callbacks),
        optimizer=optimizer,
        lr_scheduler=schedule,
        args=SimpleNamespace(device="cpu"),
        _tr_loss=torch.tensor(1.5),
        _total_loss_scalar=6.0,
        _globalstep_last_logged=2,
        current_flos=1e6,
    )


def _told() -> JoinState:
    trainer = _trainer(2)
    for _ in range(3):
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    trainer.callback_handler.callbacks[1].early_stopping_patience_counter = 3
    trainer.callback_handler.callbacks[2]._num_ranks = 5
    states = dict(trainer.state.stateful_callbacks)
    told = pickle.loads(pickle.dumps(JoinState.of(trainer, Steps())))
    assert trainer.state.stateful_callbacks == states, "telling changes nothing"
    return told


def test_the_state_and_the_position_are_a_checkpoint():
    with _told().checkpoint() as folder:
        state = TrainerState.load_from_json(str(Path(folder, "trainer_state.json")))
        assert Path(folder, "position.json").read_text() == "after step 3"
    assert (state.global_step, state.epoch, state.log_history) == (3, 0.5, [{"loss": 2.0, "step": 3}])
    assert not Path(folder).exists()


def test_the_schedule_goes_on_with_the_groups_of_the_others():
    joined = _trainer(1)
    _told().restore_schedule(joined.optimizer, joined.lr_scheduler)
    assert [(g["weight_decay"], g["lr"], g["params"]) for g in joined.optimizer.param_groups] == [
        (0.0, 0.25, []),
        (0.1, 0.25, []),
    ]
    joined.optimizer.step()
    joined.lr_scheduler.step()
    assert joined.lr_scheduler.get_last_lr() == [0.2, 0.2]


def test_callbacks_decide_as_those_of_the_others_and_sums_between_two_logs_go_on():
    joined = _trainer(2)
    joined._tr_loss, joined._total_loss_scalar, joined._globalstep_last_logged = torch.tensor(0.0), 0.0, 0
    plain, stopping, recoveries = joined.callback_handler.callbacks
    told = _told()
    told.restore_callbacks(joined)
    told.restore_sums(joined)
    assert joined.callback_handler.callbacks == [plain, stopping, recoveries], "the same objects of the user"
    assert (stopping.early_stopping_patience, stopping.early_stopping_patience_counter) == (4, 3)
    assert recoveries._num_ranks == 5
    assert torch.equal(joined._tr_loss, torch.tensor(1.5)) and joined._total_loss_scalar == 6.0
    assert joined._globalstep_last_logged == 2 and isinstance(joined._globalstep_last_logged, int)


class Tracker(WandbCallback):
    """It has begun on all ranks, as far as it knows."""

    def __init__(self) -> None:
        self._initialized = True
        self.begun = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        assert not self._initialized and model == "the model"
        self.begun += 1


class Broken(Tracker):
    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        raise ConnectionRefusedError("no tracker here")


class Own(TrainerCallback):
    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("the training has begun")


def test_a_rank_that_is_first_now_begins_what_only_the_first_has():
    handler = CallbackHandler([good := Tracker(), Broken(), own := Own()], None, None, None, None)
    made: list[str] = []
    trainer = SimpleNamespace(
        callback_handler=handler,
        remove_callback=handler.remove_callback,
        args=SimpleNamespace(push_to_hub=True),
        init_hf_repo=lambda: made.append("repository"),
        model="the model",
        **dict.fromkeys(("processing_class", "optimizer", "state", "control")),
    )
    PartialState()  # for the log
    survival = Survival(trainer, SimpleNamespace())  # type: ignore[arg-type]
    survival.recovery = SimpleNamespace(is_loss=lambda error: False)  # type: ignore[assignment]
    survival._begin_on_first_rank()
    assert made == ["repository"] and good.begun == 1
    assert own in handler.callbacks and not any(isinstance(one, Broken) for one in handler.callbacks)
    survival.recovery.is_loss = lambda error: True  # type: ignore[method-assign]
    handler.add_callback(Broken())
    with pytest.raises(ConnectionRefusedError):
        survival._begin_on_first_rank()


def test_the_logged_loss_and_the_norm_are_those_of_the_attempt_that_counts():
    engine = SimpleNamespace(
        device="cpu",
        num_signs={"gave_up_save": 0},
        gradient_square=lambda: torch.tensor(4.0),
        norm_of_square=torch.sqrt,
    )
    trainer = SimpleNamespace(_engine=engine, _tr_loss=torch.tensor(5.0))
    survival = Survival(trainer, SimpleNamespace(steps=SimpleNamespace(step_counts=lambda: None)))  # type: ignore
    counts = iter([None, 9.0])
    survival.recovery = SimpleNamespace(  # type: ignore[assignment]
        commit=lambda own: own() and next(counts), run=lambda work: torch.tensor(3.0)
    )
    survival._loss = torch.tensor(2.0)  # of the attempt that was interrupted
    assert survival.gradient_norm() == 3.0
    assert trainer._tr_loss == 6.0
