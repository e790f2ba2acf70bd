"""Layouts whose copies divide the optimizer's state give the stock Trainer's losses, gradient norms and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import MultimodalParallelPlugin, plan_for_model
from tests import tiny
from tests.distributed import run_distributed

from . import runs
from .test_unlike_copies import copies

pytestmark = pytest.mark.distributed

VISION, LM = "vision", "language_model"
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}
ONE = {"zero_stage": 1}
RECOMPUTED = {"zero_stage": 2, "activation_checkpointing": True}
KEPT = {"zero_stage": 3, "reshard_after_forward": False}


def uneven(zero_stage: int) -> dict[str, Any]:
    """Llava with one copy of the language model in one stage on rank 1, and one in two stages on ranks 2 and 3."""
    module = copies([(0, 4, (1,))], [(0, 2, (2,)), (2, 4, (3,))])
    return {"modules": {VISION: copies([(0, 4, (0,))]), LM: {**module, "sharding": {"zero_stage": zero_stage}}}}


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
    "uneven stages": ("llava", 4, uneven(1), ADAMW),
    "momentum": ("llava", 3, {LM: {"dp_size": 2, **ONE}}, {"optim_args": "momentum=0.9"}),
    "recomputed": (
        "llava",
        6,
        {VISION: {"dp_size": 2, **RECOMPUTED}, LM: {"dp_size": 2, "pp_size": 2, **RECOMPUTED}},
        ADAMW,
    ),
    "gathered through a step": (
        "llava",
        6,
        {VISION: {"dp_size": 2, **KEPT}, LM: {"dp_size": 2, "pp_size": 2, **KEPT}},
        ADAMW,
    ),
}
STAGES = {"uneven stages": (1,), "recomputed": (2, 3), "gathered through a step": (3,)}
"""The ZeRO stages of a layout that doesn't have all three."""


def in_stage(parallel: dict[str, Any], zero_stage: int) -> dict[str, Any]:
    """The settings with another ZeRO stage where they have one."""
    return {
        name: {**module, **({"zero_stage": zero_stage} if "zero_stage" in module else {})}
        for name, module in parallel.items()
    }


CASES = {f"{name}, stage {stage}": (name, stage) for name in LAYOUTS for stage in STAGES.get(name, (1, 2, 3))}
CORE = (
    "dp in groups, stage 2",
    "dp and tp, stage 3",
    "dp and cp, stage 3",
    "shared ranks, stage 2",
    "frozen tower, stage 3",
    "tied, dp and pp, in groups, stage 1",
    "norms of heads and experts, stage 2",
    "uneven stages, stage 1",
    "momentum, stage 1",
    "recomputed, stage 3",
    "gathered through a step, stage 3",
)


@pytest.mark.parametrize("case", runs.deep_but(CASES, *CORE))
def test_a_sharded_layout_equals_the_stock_trainer(case: str):
    name, zero_stage = CASES[case]
    family, world_size, parallel, arguments = LAYOUTS[name]
    parallel = in_stage(parallel, zero_stage)
    reference = runs.stock(family, freeze=runs.frozen(parallel), **arguments)
    ranks = run_distributed(runs.parallel_run, world_size, family, parallel, **arguments)
    runs.assert_same_run(ranks[0], reference)
    for rank in ranks:
        assert rank.logs == ranks[0].logs


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_replicas_with_stages_of_other_layers_can_not_run_jointly(zero_stage: int):
    plugin = MultimodalParallelPlugin.from_any(uneven(zero_stage))
    with pytest.raises(ValueError, match=f"`zero_stage={zero_stage}` of `{LM}`"):
        plan_for_model(plugin, build_model_spec(tiny.FAMILIES["llava"]()), 4)


STAGE_OF_COPIES = [pytest.param(1, marks=pytest.mark.deep), pytest.param(2, marks=pytest.mark.deep), 3]
LORA = {"peft_config": {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}}
UNSHARDED: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    "weights in bfloat16": ({VISION: {"dp_size": 2}, LM: {"dp_size": 2, "tp_size": 2}}, (1e-2, 1e-3)),
    "adapters": (
        {VISION: {"dp_size": 2, "freeze": True}, LM: {"dp_size": 2, "pp_size": 2, **LORA}},
        (2e-5, 2e-6),
    ),
}
"""What -> a layout on six ranks, relative and absolute tolerance."""


def with_and_without(what: str, zero_stage: int) -> list[runs.Run]:
    """Runs of a layout with a ZeRO stage and without."""
    layout, _ = UNSHARDED[what]
    dtype = torch.bfloat16 if what == "weights in bfloat16" else torch.float32
    sharded = {name: {**module, "zero_stage": zero_stage} for name, module in layout.items()}
    result = []
    for parallel in (sharded, layout):
        model: Any = tiny.FAMILIES["llava"]()
        result.append(runs.parallel_run("llava", parallel, model=model.to(dtype), **ADAMW))
    return result


@pytest.mark.parametrize("zero_stage", STAGE_OF_COPIES)
@pytest.mark.parametrize("what", UNSHARDED)
def test_what_is_sharded_trains_as_without_sharding(what: str, zero_stage: int):
    rtol, atol = UNSHARDED[what][1]
    runs.assert_same_run(*run_distributed(with_and_without, 6, what, zero_stage)[0], rtol=rtol, atol=atol)


def bytes_and_casts(zero_stage: int) -> dict[str, Any]:
    """Bytes on one of two ranks after a step, and losses of evaluations before and after the weights are cast."""
    trainer = runs.make_trainer("llama", {LM: {"dp_size": 2, "zero_stage": zero_stage}}, max_steps=1, **ADAMW)
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    before = trainer.evaluate()["eval_loss"]
    trainer.args.bf16_full_eval = True
    after = trainer.evaluate()["eval_loss"]
    return {
        "state": sum(t.nbytes for t in state),
        "weights": 4 * trainer.engine.spec.num_parameters,
        "losses": (before, after),
        "held": sum(p.untyped_storage().nbytes() for p in trainer.model.parameters()),
    }


def bytes_and_casts_of_stages() -> dict[int, dict[str, Any]]:
    return {zero_stage: bytes_and_casts(zero_stage) for zero_stage in (1, 3)}


def test_state_is_divided_by_the_number_of_copies_and_weights_can_be_cast():
    ranks = run_distributed(bytes_and_casts_of_stages, 2)
    for zero_stage in (1, 3):
        found = [rank[zero_stage] for rank in ranks]
        for own in found:
            assert own["state"] == pytest.approx(2 * own["weights"] / 2, rel=0.05)
            before, after = own["losses"]
            assert after != before and after == pytest.approx(before, rel=1e-2)
            assert (own["held"] == 0) == (zero_stage == 3)
        assert sum(own["state"] for own in found) == 2 * found[0]["weights"]


BOTH = {VISION: {"dp_size": 2, **ONE}, LM: {"dp_size": 2, "tp_size": 2, **ONE}}
OTHERS: dict[str, tuple[int, Any]] = {
    "grouped": (5, {LM: {"dp_size": 4, "tp_size": 1, "zero_stage": 2, "shard_size": 2}}),
    "unsharded": (3, {LM: {"tp_size": 2}}),
    "one": (1, None),
}


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.deep), 3])
def straight(request, tmp_path_factory) -> tuple[dict[str, Any], Path, runs.Run]:
    """A sharded layout, the folder of its run of four steps, with a checkpoint of the second, and the run."""
    both, folder = in_stage(BOTH, request.param), tmp_path_factory.mktemp(f"stage{request.param}")
    return both, folder, run_distributed(runs.saving_run, 6, "qwen2_vl", folder, both, **ADAMW)[0]


def test_a_sharded_run_goes_on_as_it_was(straight: tuple[dict[str, Any], Path, runs.Run], tmp_path: Path):
    both, folder, run = straight
    again = run_distributed(runs.saving_run, 6, "qwen2_vl", tmp_path, both, folder / "checkpoint-2", **ADAMW)[0]
    assert again.logs == run.logs and run.weights and again.weights
    assert all(torch.equal(again.weights[name], weight) for name, weight in run.weights.items())


@pytest.mark.parametrize("other", runs.deep_but(OTHERS, "unsharded"))
def test_a_sharded_run_goes_on_under_any_layout(
    straight: tuple[dict[str, Any], Path, runs.Run], other: str, tmp_path: Path
):
    _, folder, run = straight
    world_size, parallel = OTHERS[other]
    elsewhere = run_distributed(
        runs.saving_run, world_size, "qwen2_vl", tmp_path, parallel, folder / "checkpoint-2", **ADAMW
    )[0]
    runs.assert_same_run(elsewhere, run, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("other", runs.deep_but(OTHERS, "grouped"))
def test_any_run_goes_on_under_a_sharded_layout(
    straight: tuple[dict[str, Any], Path, runs.Run], other: str, tmp_path: Path
):
    both, _, run = straight
    # `max_steps` shapes the schedule, so that a run to be continued is one of four steps as well.
    world_size, parallel = OTHERS[other]
    run_distributed(runs.saving_run, world_size, "qwen2_vl", tmp_path / "from", parallel, **ADAMW)
    checkpoint = tmp_path / "from" / "checkpoint-2"
    back = run_distributed(runs.saving_run, 6, "qwen2_vl", tmp_path / "back", both, checkpoint, **ADAMW)[0]
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


def half_frozen() -> Any:
    """A model that trains its encoder and its last layers: the first ones run backwards for images only."""
    model = tiny.FAMILIES["qwen2_vl"]()
    language_model = model.model.language_model
    for part in (language_model.embed_tokens, *language_model.layers[: len(language_model.layers) // 2]):
        part.requires_grad_(False)
    return model


ONLY_OTHERS = "a backward that only other replicas need"
DATA[ONLY_OTHERS] = DATA["images on few replicas"]
UNLIKE = {f"{name}, stage {stage}": (name, stage) for name in DATA for stage in (2, 3)}


def given(name: str) -> dict[str, Any]:
    """Arguments of two steps, with the model where it is not the usual one."""
    model = {"model": half_frozen()} if name == ONLY_OTHERS else {}
    return {**ADAMW, "data": DATA[name], "max_steps": 2, **model}


def unlike_run(name: str, parallel: dict[str, Any]) -> runs.Run:
    """A run in microbatches of one sample."""
    return runs.parallel_run("qwen2_vl", parallel, per_device_train_batch_size=1, **given(name))


@pytest.mark.parametrize(
    "case",
    runs.deep_but(UNLIKE, "a step without images, stage 3", "images and videos, stage 2", f"{ONLY_OTHERS}, stage 3"),
)
def test_replicas_with_other_microbatches_than_others_equal_the_stock_trainer(case: str):
    name, zero_stage = UNLIKE[case]
    sizes, world_size = ({"dp_size": 2, "pp_size": 2}, 6) if name == ONLY_OTHERS else ({"dp_size": 3}, 5)
    parallel = {VISION: {"dp_size": 2, "zero_stage": zero_stage}, LM: {**sizes, "zero_stage": zero_stage}}
    ranks = run_distributed(unlike_run, world_size, name, parallel)
    runs.assert_same_run(ranks[0], runs.stock("qwen2_vl", **given(name)))


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
