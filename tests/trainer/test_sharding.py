"""Layouts whose copies divide the optimizer's state give the stock Trainer's losses, gradient norms and weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import ModulePlugin, MultimodalParallelPlugin, ShardingSettings, resolve_plan
from tests import tiny
from tests.distributed import assert_ranks_raise, run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}
ONE = {"zero_stage": 1}


def _uneven() -> MultimodalParallelPlugin:
    """Llava with one copy of the language model in one stage on rank 1, and one in two stages on ranks 2 and 3."""
    spec = build_model_spec(tiny.FAMILIES["llava"]())
    plan = resolve_plan(spec, {VISION: ModulePlugin(), LM: ModulePlugin(dp_size=2)})
    (whole,), (other,) = plan.modules[LM].replicas
    middle = whole.layers[1] // 2
    halves = (replace(other, layers=(0, middle)), replace(other, layers=(middle, whole.layers[1]), mesh=((3,),)))
    module = replace(plan.modules[LM], replicas=((whole,), halves), sharding=ShardingSettings(1))
    return MultimodalParallelPlugin(plan=replace(plan, modules={**plan.modules, LM: module}))


LAYOUTS: dict[str, tuple[str, int, Any, dict[str, Any]]] = {
    "dp": ("llava", 3, {LM: {"dp_size": 2, **ONE}}, ADAMW),
    "dp of both": ("llava", 5, {VISION: {"dp_size": 2, **ONE}, LM: {"dp_size": 3, **ONE}}, ADAMW),
    "dp in groups": ("llava", 5, {LM: {"dp_size": 4, **ONE, "shard_size": 2}}, ADAMW),
    "dp and tp": ("llava", 5, {LM: {"dp_size": 2, "tp_size": 2, **ONE}}, ADAMW),
    "dp and pp": ("llava", 5, {LM: {"dp_size": 2, "pp_size": 2, **ONE}}, ADAMW),
    "dp and cp": ("llava", 5, {LM: {"dp_size": 2, "cp_size": 2, "cp_block": 16, **ONE}}, ADAMW),
    "shared ranks": ("llava", 2, {VISION: {"dp_size": 2, **ONE}, LM: {"colocate_with": VISION, **ONE}}, ADAMW),
    "frozen tower": ("llava", 4, {VISION: {"dp_size": 2, "freeze": "tower", **ONE}, LM: {"dp_size": 2}}, ADAMW),
    "tied, dp and pp": ("paligemma", 5, {LM: {"dp_size": 2, "pp_size": 2, **ONE}}, ADAMW),
    "tied, dp and pp, in groups": ("paligemma", 5, {LM: {"dp_size": 2, "pp_size": 2, **ONE, "shard_size": 2}}, ADAMW),
    "norms of heads and experts": ("qwen3_vl_moe", 5, {LM: {"dp_size": 2, "tp_size": 2, **ONE}}, {}),
    "uneven stages": ("llava", 4, _uneven, ADAMW),
    "momentum": ("llava", 3, {LM: {"dp_size": 2, **ONE}}, {"optim_args": "momentum=0.9"}),
}


def in_stage(parallel: dict[str, Any], zero_stage: int) -> dict[str, Any]:
    """The settings with another ZeRO stage where they have one."""
    return {
        name: {**module, **({"zero_stage": zero_stage} if "zero_stage" in module else {})}
        for name, module in parallel.items()
    }


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sharded_layout_equals_the_stock_trainer(name: str, zero_stage: int):
    family, world_size, parallel, arguments = LAYOUTS[name]
    if name == "uneven stages" and zero_stage > 1:
        pytest.skip("replicas with stages of different layers do not run jointly")
    parallel = parallel() if callable(parallel) else in_stage(parallel, zero_stage)
    freeze = runs.frozen(parallel) if isinstance(parallel, dict) else {}
    reference = runs.stock(family, freeze=freeze, **arguments)
    ranks = run_distributed(runs.parallel_run, world_size, family, parallel, **arguments)
    runs.assert_same_run(ranks[0], reference)
    for rank in ranks:
        assert rank.logs == ranks[0].logs


def in_bfloat16(parallel: dict[str, Any], **arguments: Any) -> runs.Run:
    """A run of weights in bfloat16."""
    return runs.parallel_run("llava", parallel, model=tiny.FAMILIES["llava"]().bfloat16(), **arguments)


def test_weights_in_bfloat16_train_as_without_sharding():
    sizes = {VISION: {"dp_size": 2}, LM: {"dp_size": 2, "tp_size": 2}}
    sharded = {name: {**module, **ONE} for name, module in sizes.items()}
    want = run_distributed(in_bfloat16, 6, sizes, **ADAMW)[0]
    got = run_distributed(in_bfloat16, 6, sharded, **ADAMW)[0]
    runs.assert_same_run(got, want, rtol=1e-2, atol=1e-3)


def test_adapters_train_as_without_sharding():
    lora = {"peft_config": {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}}
    sizes = {VISION: {"dp_size": 2, "freeze": True}, LM: {"dp_size": 2, "pp_size": 2, **lora}}
    sharded = {VISION: sizes[VISION], LM: {**sizes[LM], **ONE}}
    want = run_distributed(runs.parallel_run, 6, "llava", sizes, **ADAMW)[0]
    got = run_distributed(runs.parallel_run, 6, "llava", sharded, **ADAMW)[0]
    runs.assert_same_run(got, want)


def refused(optim: str) -> None:
    """Trains under ZeRO with an optimizer."""
    runs.parallel_run("llama", {LM: {"dp_size": 2, **ONE}}, optim=optim)


def test_an_optimizer_whose_update_depends_on_the_shape_is_refused():
    assert_ranks_raise(
        refused, 2, "adafactor", match="`transformers.Adafactor` can't be used with `zero_stage` above 0"
    )


def state_bytes(family: str, parallel: dict[str, Any], **arguments: Any) -> tuple[int, int]:
    """Bytes of optimizer state on this rank after a step, and of the trained parameters that it holds."""
    trainer = runs.make_trainer(family, parallel, max_steps=1, **arguments)
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    tensors = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    trained = [p for p in trainer.model.parameters() if p.requires_grad and p.untyped_storage().nbytes() > 4]
    return sum(t.nbytes for t in tensors), sum(p.numel() * p.element_size() for p in trained)


def test_state_is_divided_by_the_number_of_copies():
    ranks = run_distributed(state_bytes, 4, "llama", {LM: {"dp_size": 4, **ONE}}, **ADAMW)
    for state, weights in ranks:
        assert state == pytest.approx(2 * weights / 4, rel=0.05)
    assert sum(state for state, _ in ranks) == 2 * ranks[0][1]


SAVING = {"save_strategy": "steps", "save_steps": 2, **ADAMW}


def trained(
    folder: Path, parallel: dict[str, Any] | None, checkpoint: Path | None = None, **arguments: Any
) -> tuple[runs.Run, dict[str, torch.Tensor]]:
    """A run on this rank that saves every two steps, and the weights that it ends with."""
    trainer = runs.make_trainer("qwen2_vl", parallel, str(folder), **{**SAVING, **arguments})
    run = runs.run_of(trainer, checkpoint=None if checkpoint is None else str(checkpoint))
    return run, run.weights or {}


GROUPED = {LM: {"dp_size": 4, "tp_size": 1, **ONE, "shard_size": 2}}
BOTH = {VISION: {"dp_size": 2, **ONE}, LM: {"dp_size": 2, "tp_size": 2, **ONE}}


def test_a_sharded_run_goes_on_under_any_layout_and_any_layout_under_a_sharded_one(tmp_path: Path):
    straight, weights = run_distributed(trained, 6, tmp_path / "both", BOTH)[0]
    checkpoint = tmp_path / "both" / "checkpoint-2"
    again, resumed = run_distributed(trained, 6, tmp_path / "again", BOTH, checkpoint)[0]
    assert again.logs == straight.logs and all(torch.equal(resumed[name], weights[name]) for name in weights)
    others = {"grouped": (5, GROUPED), "unsharded": (3, {LM: {"tp_size": 2}}), "one": (1, None)}
    for name, (world_size, parallel) in others.items():
        other, _ = run_distributed(trained, world_size, tmp_path / name, parallel, checkpoint)[0]
        runs.assert_same_run(other, straight, rtol=1e-4, atol=2e-5)
    # `max_steps` shapes the schedule, so that a run to be continued is one of four steps as well.
    for name, (world_size, parallel) in others.items():
        run_distributed(trained, world_size, tmp_path / f"from {name}", parallel)
        source = tmp_path / f"from {name}" / "checkpoint-2"
        back, _ = run_distributed(trained, 6, tmp_path / f"back from {name}", BOTH, source)[0]
        runs.assert_same_run(back, straight, rtol=1e-4, atol=2e-5)
