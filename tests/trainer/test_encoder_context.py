"""Ranks that share the images, frames and clips of an encoder give the stock Trainer's losses, norms and weights."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from hf_mmparallel.data.item_sharding import ItemSharder, ItemSharding
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import ModulePlugin, resolve_plan
from tests import tiny
from tests.deep_cases import in_turn
from tests.distributed import run_distributed

from . import runs

pytestmark = pytest.mark.distributed

VISION, AUDIO, LM = "vision", "audio", "language_model"
CP2 = {"cp_size": 2}
AGAIN = {"activation_checkpointing": True}
SHORT: dict[str, Any] = {"max_steps": 3, "warmup_steps": 0}
BIG, SMALL, MIDDLE = (1, 16, 12), (1, 2, 2), (1, 4, 6)
# of one sample each: one image, many, images of unlike sizes, none
IMAGES = ([BIG], [SMALL, SMALL, MIDDLE], [], [], [SMALL, BIG, MIDDLE, SMALL, SMALL], [MIDDLE])
VIDEOS = ([], [(3, 4, 4)], [], [], [], [(2, 2, 2), (1, 6, 4)])


def patches(generator: torch.Generator, name: str, grids: list[tuple[int, int, int]]) -> dict[str, torch.Tensor]:
    extents = torch.tensor(grids)
    pixels = torch.randn(int(extents.prod(-1).sum()), 3 * 2 * 8 * 8, generator=generator)
    main = "pixel_values" if name == "image" else "pixel_values_videos"
    return {main: pixels, f"{name}_grid_thw": extents}


def unlike_images(has_videos: bool) -> list[dict[str, Any]]:
    """Samples of the Qwen families with images of very different sizes, and videos."""
    generator, samples = torch.Generator().manual_seed(5), []
    for index in range(runs.SAMPLES):
        images, videos = IMAGES[index % 6], VIDEOS[index % 6] if has_videos else []
        media: list[int] = []
        for token, grids in ((tiny.MEDIA_TOKEN, images), (tiny.VIDEO_TOKEN, videos)):
            for frames, rows, columns in grids:
                media += [102, *[token] * (frames * rows * columns // 4), 103]
        words = torch.randint(1, 90, (6 + index % 4,), generator=generator).tolist()
        ids = torch.tensor([*words[:3], *media, *words[3:]])
        kinds = (ids == tiny.MEDIA_TOKEN).int() + 2 * (ids == tiny.VIDEO_TOKEN).int()
        sample = {
            "input_ids": ids,
            "labels": ids.masked_fill(ids >= 100, -100),
            "attention_mask": torch.ones_like(ids),
        }
        sample["mm_token_type_ids"] = kinds
        for name, grids in (("image", images), ("video", videos)):
            if grids:
                sample |= patches(generator, name, grids)
        samples.append(sample)
    return samples


Case = tuple[str, dict[str, Any], dict[str, Any]]
# whose samples -> family, layout, arguments
ON_THREE: dict[str, Case] = {
    "images and frames of unlike sizes": ("qwen2_vl", {VISION: CP2}, {"data": True}),
    "windows": ("qwen2_5_vl", {VISION: CP2}, {"data": True}),
    "DeepStack, recomputed": ("qwen3_vl", {VISION: {**CP2, **AGAIN}}, {"data": False}),
    "crops of one size": ("internvl", {VISION: CP2}, {}),
    "sizes of pixels": ("mistral3", {VISION: CP2}, {}),
    "clips": ("voxtral", {AUDIO: CP2}, {}),
}
ON_TWO: dict[str, Case] = {
    "experts shared by the same ranks": (
        "qwen3_vl_moe",
        {VISION: CP2, LM: {"dp_size": 2, "ep_size": 2, "colocate_with": VISION}},
        {"data": False},
    ),
}


def stages_on_the_same_ranks(family: str) -> dict[str, Any]:
    """A plan whose two cp ranks have two stages of the encoder each, beside copies of the language model."""
    spec = build_model_spec(tiny.FAMILIES[family]())
    plan = resolve_plan(spec, {VISION: ModulePlugin(**CP2), LM: ModulePlugin(dp_size=2, colocate_with=VISION)})
    ((stage,),) = plan.modules[VISION].replicas
    stages = replace(stage, layers=(0, 2)), replace(stage, layers=(2, stage.layers[1]))
    vision = replace(plan.modules[VISION], replicas=(stages,))
    return replace(plan, modules={**plan.modules, VISION: vision}, schedule="interleaved").to_dict()


ON_TWO |= {
    "stages cut inside DeepStack": ("qwen3_vl", stages_on_the_same_ranks("qwen3_vl"), {"data": False}),
    "stages with windows": ("qwen2_5_vl", stages_on_the_same_ranks("qwen2_5_vl"), {"data": True}),
    "stages, features of an inner layer": ("llava", stages_on_the_same_ranks("llava"), {}),
}
ON_FOUR: dict[str, Case] = {
    "more ranks than images": (
        "qwen2_vl",
        {VISION: {"cp_size": 4}, LM: {"dp_size": 4, "colocate_with": VISION}},
        {"data": True},
    ),
    "with the tokens, on the same ranks": (
        "llava",
        {VISION: {**CP2, "tp_size": 2}, LM: {"colocate_with": VISION, "pp_size": 2, "cp_size": 2, "cp_block": 8}},
        {},
    ),
    "stages of both, ZeRO-3": (
        "qwen2_5_vl",
        {VISION: {**CP2, "pp_size": 2, "zero_stage": 3}, LM: {"colocate_with": VISION, "cp_size": 4, "cp_block": 16}},
        {"data": True},
    ),
    "copies, frozen but for the projector": (
        "gemma3",
        {VISION: {**CP2, "dp_size": 2, "freeze": "tower", "colocate_with": LM}, LM: {"dp_size": 4}},
        {},
    ),
    "stages cut inside DeepStack": (
        "qwen3_vl",
        {VISION: {**CP2, "pp_size": 2, "zero_stage": 1}, LM: {"colocate_with": VISION, "cp_size": 4, "cp_block": 16}},
        {"data": False},
    ),
    "windows, one image or none to four ranks": (
        "qwen2_5_vl",
        {VISION: {"cp_size": 4}, LM: {"cp_size": 4, "cp_block": 8, "colocate_with": VISION}},
        {"data": True, "per_device_train_batch_size": 1},
    ),
    "DeepStack, four ranks": (
        "qwen3_vl",
        {VISION: {"cp_size": 4, **AGAIN}, LM: {"pp_size": 2, "dp_size": 2, "colocate_with": VISION}},
        {"data": False},
    ),
    "crops, four ranks": ("internvl", {VISION: {"cp_size": 4}, LM: {"pp_size": 4, "colocate_with": VISION}}, {}),
    "clips, four ranks": ("voxtral", {AUDIO: {"cp_size": 4}, LM: {"dp_size": 4, "colocate_with": AUDIO}}, {}),
    "ZeRO-2, three ranks to one": ("llava", {VISION: {"cp_size": 3, "zero_stage": 2}}, {}),
    "two encoders": (
        "qwen2_5_omni",
        {VISION: CP2, AUDIO: {"colocate_with": VISION, **CP2}, LM: {"pp_size": 2}},
        {},
    ),
}


def arguments_of(case: Case) -> dict[str, Any]:
    arguments = {**SHORT, **case[2]}
    if "data" in arguments:
        arguments["data"] = unlike_images(arguments["data"])
    return arguments


def train(cases: dict[str, Case]) -> tuple[dict[str, runs.Run], dict[str, set[bool]]]:
    """The runs, and whether ranks shared tokens in their chunks, or whole items."""
    ways: dict[str, set[bool]] = {}
    distribute = ItemSharder.__call__
    result = {}
    for name, case in cases.items():
        ways[name] = set()

        def noted(self: ItemSharder, batch: Any, seen: set[bool] = ways[name]) -> ItemSharding:
            sharding = distribute(self, batch)
            if any(len(items.tokens) for items in sharding.items.values()):
                seen.add(sharding.by_tokens)
            return sharding

        with mock.patch.object(ItemSharder, "__call__", noted):
            result[name] = runs.parallel_run(case[0], case[1], **arguments_of(case))
    return result, ways


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, in_turn(ON_TWO)),
        (3, in_turn(ON_THREE, "images and frames of unlike sizes")),
        (4, in_turn(ON_FOUR, "with the tokens, on the same ranks")),
    ],
    ids=["2", "3", "4"],
)
def test_encoders_that_share_out_their_images_equal_the_stock_trainer(world_size: int, cases: dict[str, Case]):
    first, ways = run_distributed(train, world_size, cases, timeout=280)[0] if cases else ({}, {})
    assert {True, False} in ways.values() or world_size != 3, ways
    for name, case in cases.items():
        whole = {**arguments_of(case), "per_device_train_batch_size": runs.GLOBAL_BATCH}
        reference = runs.stock(case[0], freeze=runs.frozen(case[1]), **whole)
        try:
            runs.assert_same_run(first[name], reference)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


ADAPTED = {"peft_config": {"r": 4, "lora_alpha": 8, "target_modules": ["qkv", "proj"], "init_lora_weights": False}}


def train_adapters(layouts: list[dict[str, Any]]) -> list[runs.Run]:
    arguments = arguments_of(ON_THREE["images and frames of unlike sizes"])
    return [runs.parallel_run("qwen2_vl", layout, **arguments) for layout in layouts]


@pytest.mark.deep
def test_adapters_of_an_encoder_that_shares_out_its_images():
    shared = {VISION: {**CP2, **ADAPTED}, LM: {"dp_size": 2, "colocate_with": VISION}}
    (found,) = run_distributed(train_adapters, 2, [shared])[0]
    (alone,) = run_distributed(train_adapters, 1, [{VISION: ADAPTED, LM: {}}])[0]
    for run in (found, alone):  # copies of what is trained whole are not part of a checkpoint
        run.weights = {name: value for name, value in (run.weights or {}).items() if "original_module" not in name}
    assert any("lora_B" in name for name in alone.weights or ())
    runs.assert_same_run(found, alone)
