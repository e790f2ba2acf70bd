"""Layouts whose copies divide the optimizer's state give the stock Trainer's losses, gradient norms and weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import ModulePlugin, MultimodalParallelPlugin, ShardingSettings, check_plan, resolve_plan
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


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_replicas_with_stages_of_other_layers_can_not_run_jointly(zero_stage: int):
    plan = _uneven().plan
    assert plan is not None
    module = replace(plan.modules[LM], sharding=ShardingSettings(zero_stage))
    with pytest.raises(ValueError, match="its replicas, which exchange gradients layer by layer, have stages of"):
        check_plan(replace(plan, modules={**plan.modules, LM: module}), build_model_spec(tiny.FAMILIES["llava"]()))


def in_stage(parallel: dict[str, Any], zero_stage: int) -> dict[str, Any]:
    """The settings with another ZeRO stage where they have one."""
    return {
        name: {**module, **({"zero_stage": zero_stage} if "zero_stage" in module else {})}
        for name, module in parallel.items()
    }


@pytest.mark.parametrize(
    ("name", "zero_stage"),
    [(name, stage) for name in LAYOUTS for stage in (1, 2, 3) if stage == 1 or name != "uneven stages"],
)
def test_a_sharded_layout_equals_the_stock_trainer(name: str, zero_stage: int):
    family, world_size, parallel, arguments = LAYOUTS[name]
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


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_weights_in_bfloat16_train_as_without_sharding(zero_stage: int):
    sizes = {VISION: {"dp_size": 2}, LM: {"dp_size": 2, "tp_size": 2}}
    sharded = {name: {**module, "zero_stage": zero_stage} for name, module in sizes.items()}
    want = run_distributed(in_bfloat16, 6, sizes, **ADAMW)[0]
    got = run_distributed(in_bfloat16, 6, sharded, **ADAMW)[0]
    runs.assert_same_run(got, want, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_adapters_train_as_without_sharding(zero_stage: int):
    lora = {"peft_config": {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}}
    sizes = {VISION: {"dp_size": 2, "freeze": True}, LM: {"dp_size": 2, "pp_size": 2, **lora}}
    sharded = {name: {**module, "zero_stage": zero_stage} for name, module in sizes.items()}
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


GROUPED = {LM: {"dp_size": 4, "tp_size": 1, "zero_stage": 2, "shard_size": 2}}
BOTH = {VISION: {"dp_size": 2, **ONE}, LM: {"dp_size": 2, "tp_size": 2, **ONE}}


OTHERS: dict[str, tuple[int, Any]] = {
    "grouped": (5, GROUPED),
    "unsharded": (3, {LM: {"tp_size": 2}}),
    "one": (1, None),
}


@pytest.fixture(scope="module", params=[1, 3])
def straight(request, tmp_path_factory) -> tuple[dict[str, Any], Path, runs.Run]:
    """A sharded layout, the folder of its run of four steps, with a checkpoint of the second, and the run."""
    both, folder = in_stage(BOTH, request.param), tmp_path_factory.mktemp(f"stage{request.param}")
    run, weights = run_distributed(trained, 6, folder, both)[0]
    return both, folder, replace(run, weights=weights)


def test_a_sharded_run_goes_on_as_it_was(straight: tuple[dict[str, Any], Path, runs.Run], tmp_path: Path):
    both, folder, run = straight
    again, resumed = run_distributed(trained, 6, tmp_path, both, folder / "checkpoint-2")[0]
    assert again.logs == run.logs and run.weights
    assert all(torch.equal(resumed[name], weight) for name, weight in run.weights.items())


@pytest.mark.parametrize("other", OTHERS)
def test_a_sharded_run_goes_on_under_any_layout(
    straight: tuple[dict[str, Any], Path, runs.Run], other: str, tmp_path: Path
):
    _, folder, run = straight
    world_size, parallel = OTHERS[other]
    elsewhere, _ = run_distributed(trained, world_size, tmp_path, parallel, folder / "checkpoint-2")[0]
    runs.assert_same_run(elsewhere, run, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("other", OTHERS)
def test_any_run_goes_on_under_a_sharded_layout(
    straight: tuple[dict[str, Any], Path, runs.Run], other: str, tmp_path: Path
):
    both, _, run = straight
    # `max_steps` shapes the schedule, so that a run to be continued is one of four steps as well.
    world_size, parallel = OTHERS[other]
    run_distributed(trained, world_size, tmp_path / "from", parallel)
    back, _ = run_distributed(trained, 6, tmp_path / "back", both, tmp_path / "from" / "checkpoint-2")[0]
    runs.assert_same_run(back, run, rtol=1e-4, atol=2e-5)


def _samples(number_of: list[int]) -> list[dict[str, torch.Tensor]]:
    """Samples of qwen2_vl with a number of images each, of different lengths."""
    shapes = [tiny.Shape(images, 0, 6 + 3 * (index % 4)) for index, images in enumerate(number_of)]
    return tiny.make_dataset("qwen2_vl", len(shapes), shapes=shapes)


def with_videos(samples: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The images of every third sample as videos."""
    result = []
    for index, sample in enumerate(samples):
        if index % 3 == 0 and "pixel_values" in sample:
            is_media = sample["input_ids"] == tiny.MEDIA_TOKEN
            sample = {
                **{name: value for name, value in sample.items() if name not in ("pixel_values", "image_grid_thw")},
                "input_ids": sample["input_ids"].masked_fill(is_media, tiny.VIDEO_TOKEN),
                "mm_token_type_ids": 2 * is_media.int(),
                "pixel_values_videos": sample["pixel_values"],
                "video_grid_thw": sample["image_grid_thw"],
            }
        result.append(sample)
    return result


DATA = {
    "a step without images": _samples([1, 2, 0, 1, 1, 0, 2, 1] + 8 * [0] + [1, 0, 2, 0, 0, 1]),
    "images on few replicas": _samples([3] + 7 * [0] + 7 * [0] + [2] + 6 * [0]),
    "images and videos": with_videos(_samples([1, 2, 0, 1, 1, 0, 2, 1, 1, 1, 2, 0, 1, 2, 1, 1, 0, 0, 1, 1, 1, 1])),
}


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("name", DATA)
def test_replicas_with_other_microbatches_than_others_equal_the_stock_trainer(name: str, zero_stage: int):
    parallel = {
        VISION: {"dp_size": 2, "zero_stage": zero_stage},
        LM: {"dp_size": 3, "zero_stage": zero_stage},
    }
    arguments = {**ADAMW, "data": DATA[name], "per_device_train_batch_size": 1, "max_steps": 2}
    reference = runs.stock("qwen2_vl", **{**arguments, "per_device_train_batch_size": runs.GLOBAL_BATCH})
    ranks = run_distributed(runs.parallel_run, 5, "qwen2_vl", parallel, **arguments)
    runs.assert_same_run(ranks[0], reference)


def half_frozen() -> Any:
    """A model that trains its encoder and its last layers: the first ones run backwards for images only."""
    model = tiny.FAMILIES["qwen2_vl"]()
    language_model = model.model.language_model
    for part in (language_model.embed_tokens, *language_model.layers[: len(language_model.layers) // 2]):
        part.requires_grad_(False)
    return model


def half_frozen_run(parallel: dict[str, Any], **arguments: Any) -> runs.Run:
    return runs.parallel_run("qwen2_vl", parallel, model=half_frozen(), **arguments)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_backward_that_only_other_replicas_need_equals_the_stock_trainer(zero_stage: int):
    one = {"dp_size": 2, "zero_stage": zero_stage}
    arguments = {**ADAMW, "data": DATA["images on few replicas"], "per_device_train_batch_size": 1, "max_steps": 2}
    whole = {**arguments, "per_device_train_batch_size": runs.GLOBAL_BATCH}
    reference = runs.stock("qwen2_vl", model=half_frozen(), **whole)
    ranks = run_distributed(half_frozen_run, 6, {VISION: one, LM: {**one, "pp_size": 2}}, **arguments)
    runs.assert_same_run(ranks[0], reference)


def evaluated_in_half(parallel: dict[str, Any]) -> tuple[float, float, int]:
    """Losses of evaluations before and after the weights are cast, and bytes of the weights afterwards."""
    trainer = runs.make_trainer("llama", parallel)
    before = trainer.evaluate()["eval_loss"]
    trainer.args.bf16_full_eval = True
    after = trainer.evaluate()["eval_loss"]
    return before, after, sum(p.untyped_storage().nbytes() for p in trainer.model.parameters())


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_divided_weights_can_be_cast(zero_stage: int):
    ranks = run_distributed(evaluated_in_half, 2, {LM: {"dp_size": 2, "zero_stage": zero_stage}})
    for before, after, num_bytes in ranks:
        assert after != before and after == pytest.approx(before, rel=1e-2)
        assert (num_bytes == 0) == (zero_stage == 3)


def test_weights_that_stay_gathered_through_a_step_are_those_of_the_step():
    kept = {"zero_stage": 3, "reshard_after_forward": False}
    parallel = {VISION: {"dp_size": 2, **kept}, LM: {"dp_size": 2, "pp_size": 2, **kept}}
    reference = runs.stock("llava", **ADAMW)
    ranks = run_distributed(runs.parallel_run, 6, "llava", parallel, **ADAMW)
    runs.assert_same_run(ranks[0], reference)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_recomputed_layers_are_gathered_for_their_backward(zero_stage: int):
    one = {"zero_stage": zero_stage, "activation_checkpointing": True}
    parallel = {VISION: {"dp_size": 2, **one}, LM: {"dp_size": 2, "pp_size": 2, **one}}
    reference = runs.stock("llava", **ADAMW)
    ranks = run_distributed(runs.parallel_run, 6, "llava", parallel, **ADAMW)
    runs.assert_same_run(ranks[0], reference)


def evaluated(parallel: dict[str, Any]) -> tuple[runs.Run, int, int]:
    """A run with an evaluation in it and one behind it; bytes of weights between steps, and of the optimizer's."""
    trainer = runs.make_trainer("llava", parallel, eval_strategy="steps", eval_steps=2, **ADAMW)
    run = runs.run_of(trainer, evaluate=True)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in trainer.model.parameters()}
    entries = [entry for group in trainer.optimizer.param_groups for entry in group["params"]]
    return run, sum(storages.values()), sum(entry.nbytes for entry in entries)


def test_weights_have_memory_in_passes_only_and_are_evaluated():
    reference = runs.stock("llava", evaluate=True, **ADAMW)
    parallel = {VISION: {"dp_size": 2, "zero_stage": 3}, LM: {"dp_size": 2, "zero_stage": 3}}
    ranks = run_distributed(evaluated, 4, parallel)
    runs.assert_same_run(ranks[0][0], reference)
    assert ranks[0][0].metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=1e-5)
    whole = sum(weight.nbytes for weight in (reference.weights or {}).values())
    for _, kept, updated in ranks:
        assert kept < 1000  # what is on other ranks, as scalars
        assert updated < 0.6 * whole
