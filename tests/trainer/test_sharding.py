"""Layouts whose copies divide the optimizer's state give the stock Trainer's losses, gradient norms and weights."""

from functools import partial
from typing import Any

import pytest
import torch

from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import MultimodalParallelPlugin, plan_for_model
from tests import tiny
from tests.distributed import run_distributed

from . import runs
from .runs import case
from .test_unlike_copies import copies

VISION, LM = "vision", "language_model"
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4}


def both(zero_stage: int, **sizes: Any) -> dict[str, Any]:
    """Both modules with copies on the same ranks."""
    module = {"dp_size": 2, "zero_stage": zero_stage, **sizes}
    return {VISION: module, LM: {**module, "colocate_with": VISION}}


def uneven(zero_stage: int) -> dict[str, Any]:
    """Llava with one copy of the language model in one stage on rank 1, and one in two stages on ranks 2 and 3."""
    module = copies([(0, 4, (1,))], [(0, 2, (2,)), (2, 4, (3,))])
    return {"modules": {VISION: copies([(0, 4, (0,))]), LM: {**module, "sharding": {"zero_stage": zero_stage}}}}


def of_both(zero_stage: int, **sizes: Any) -> dict[str, Any]:
    """Two copies of vision, and two of the language model in two stages."""
    module = {"dp_size": 2, "zero_stage": zero_stage, **sizes}
    return {VISION: module, LM: {**module, "pp_size": 2}}


def lm(zero_stage: int, **sizes: int) -> dict[str, Any]:
    return {LM: {"dp_size": 2, "zero_stage": zero_stage, **sizes}}


FROZEN = {VISION: {"dp_size": 2, "freeze": "tower", "zero_stage": 3}, LM: {"dp_size": 2}}
LAYOUTS = [
    case("llava", lm(2, dp_size=4, shard_size=2), always=True, **ADAMW),
    case("llava", lm(3, tp_size=2), always=True, **ADAMW, max_logits=runs.FEW_LOGITS),
    case("llava", lm(3, cp_size=2, cp_block=16), **ADAMW),
    case("llava", both(2), **ADAMW),
    case("llava", FROZEN, **ADAMW),
    case("paligemma", lm(1, pp_size=2, shard_size=2), **ADAMW),
    case("qwen3_vl_moe", lm(2, tp_size=2)),
    case("llava", uneven(1), **ADAMW),
    case("llava", lm(1), optim_args="momentum=0.9"),
    case("llava", of_both(3, activation_checkpointing=True), **ADAMW),
    case("llava", of_both(3, reshard_after_forward=False), **ADAMW),
    case("llava", lm(1, tp_size=2), **ADAMW),
    case("llava", lm(2, cp_size=2, cp_block=16), **ADAMW),
    case("paligemma", lm(3, pp_size=2), **ADAMW),
    case("llava", both(3), **ADAMW),
    case("qwen3_vl_moe", lm(3, tp_size=2)),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "parallel", "arguments"), LAYOUTS)
def test_a_sharded_layout_equals_the_stock_trainer(family: str, parallel: Any, arguments: dict[str, Any]):
    runs.assert_a_layout_equals_the_stock_trainer(family, parallel, **arguments)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_replicas_with_stages_of_other_layers_can_not_run_jointly(zero_stage: int):
    plugin = MultimodalParallelPlugin.from_any(uneven(zero_stage))
    with pytest.raises(ValueError, match=f"`zero_stage={zero_stage}` of `{LM}`"):
        plan_for_model(plugin, build_model_spec(tiny.FAMILIES["llava"]()), 4)


LORA = {"peft_config": {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}}


def with_and_without(zero_stage: int) -> list[tuple[runs.Run, runs.Run]]:
    """Runs of weights in bfloat16, and of adapters, with a ZeRO stage and without."""
    pairs = []
    for sizes, dtype in (({"tp_size": 2}, torch.bfloat16), ({"pp_size": 2, **LORA}, torch.float32)):
        found = []
        for stage in (zero_stage, 0):
            model: Any = tiny.FAMILIES["llama"]()
            parallel = {LM: {"dp_size": 2, "zero_stage": stage, **sizes}}
            found.append(runs.parallel_run("llama", parallel, model=model.to(dtype), **ADAMW))
        pairs.append((found[0], found[1]))
    return pairs


@pytest.mark.distributed
@pytest.mark.deep
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_what_is_sharded_trains_as_without_sharding(zero_stage: int):
    half, adapters = run_distributed(with_and_without, 4, zero_stage)[0]
    runs.assert_same_run(*half, rtol=1e-2, atol=1e-3)
    runs.assert_same_run(*adapters)


# Microbatches unlike those of other replicas


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


def half_frozen() -> Any:
    """A model that trains its encoder and its last layers: the first ones run backwards for images only."""
    model = tiny.FAMILIES["qwen2_vl"]()
    language_model = model.model.language_model
    for part in (language_model.embed_tokens, *language_model.layers[: len(language_model.layers) // 2]):
        part.requires_grad_(False)
    return model


ONLY_OTHERS = "a backward that only other replicas need, stage 3"
# Images of each sample of two steps, the stage
UNLIKE: dict[str, tuple[list[dict[str, torch.Tensor]], int]] = {
    "a step without images, stage 3": (_samples([1, 2, 0, 1, 1, 0, 2, 1] + 8 * [0] + [1, 0, 2, 0, 0, 1]), 3),
    "images and videos, stage 2": (
        with_videos(_samples([1, 2, 0, 1, 1, 0, 2, 1, 1, 1, 2, 0, 1, 2, 1, 1, 0, 0, 1, 1, 1, 1])),
        2,
    ),
    ONLY_OTHERS: (_samples([3] + 7 * [0] + 7 * [0] + [2] + 6 * [0]), 3),
}


def given(name: str) -> dict[str, Any]:
    model = {"model": half_frozen()} if name == ONLY_OTHERS else {}
    return {**ADAMW, "data": UNLIKE[name][0], "max_steps": 2, **model}


@pytest.mark.distributed
@pytest.mark.parametrize("name", runs.deep_but(UNLIKE, "a step without images, stage 3"))
def test_replicas_with_other_microbatches_than_others_equal_the_stock_trainer(name: str):
    zero_stage = UNLIKE[name][1]
    sizes, world_size = ({"pp_size": 2}, 6) if name == ONLY_OTHERS else ({"dp_size": 3}, 5)
    parallel = {VISION: {"dp_size": 2, "zero_stage": zero_stage}, **lm(zero_stage, **sizes)}
    layout = runs.Layout("qwen2_vl", parallel, partial(given, name), {"per_device_train_batch_size": 1})
    runs.assert_layouts_equal_the_stock_trainer(world_size, {name: layout})


# Bytes


def evaluated() -> tuple[runs.Run, int, int]:
    """A run with an evaluation in it and one behind it; bytes of weights between steps, and of the optimizer's."""
    trainer = runs.make_trainer("llava", both(3), eval_strategy="steps", eval_steps=2, **ADAMW)
    run = runs.run_of(trainer, evaluate=True)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in trainer.model.parameters()}
    entries = [entry for group in trainer.optimizer.param_groups for entry in group["params"]]
    return run, sum(storages.values()), sum(entry.nbytes for entry in entries)


def bytes_and_casts(zero_stage: int) -> dict[str, Any]:
    """Bytes on this rank after a step, and losses of evaluations before and after the weights are cast."""
    trainer = runs.make_trainer("llama", lm(zero_stage), max_steps=1, **ADAMW)
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    before = trainer.evaluate()["eval_loss"]
    trainer.args.bf16_full_eval = True
    return {
        "state": sum(t.nbytes for t in state),
        "weights": 4 * trainer.engine.spec.num_parameters,
        "losses": (before, trainer.evaluate()["eval_loss"]),
        "held": sum(p.untyped_storage().nbytes() for p in trainer.model.parameters()),
    }


def measured() -> tuple[tuple[runs.Run, int, int], dict[int, dict[str, Any]]]:
    return evaluated(), {zero_stage: bytes_and_casts(zero_stage) for zero_stage in (1, 3)}


@pytest.mark.distributed
def test_state_is_divided_and_weights_have_memory_in_passes_only_and_can_be_evaluated_and_cast():
    reference = runs.stock("llava", evaluate=True, **ADAMW)
    ranks = run_distributed(measured, 2)
    run = ranks[0][0][0]
    runs.assert_same_run(run, reference)
    assert run.metrics["eval_loss"] == pytest.approx(reference.metrics["eval_loss"], rel=1e-5)
    whole = sum(weight.nbytes for weight in (reference.weights or {}).values())
    for (_, kept, updated), _ in ranks:
        assert kept < 1000  # what is on other ranks, as scalars
        assert updated < 0.6 * whole
    for zero_stage in (1, 3):
        found = [by_stage[zero_stage] for _, by_stage in ranks]
        for own in found:
            assert own["state"] == pytest.approx(2 * own["weights"] / 2, rel=0.05)
            before, after = own["losses"]
            assert after != before and after == pytest.approx(before, rel=1e-2)
            assert (own["held"] == 0) == (zero_stage == 3)
        assert sum(own["state"] for own in found) == 2 * found[0]["weights"]
