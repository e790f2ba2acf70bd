"""Ranks that share the images, frames and clips of an encoder give the stock Trainer's losses, norms and weights."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from hf_mmparallel.data.item_sharding import ItemSharder, ItemSharding
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import ModulePlugin, resolve_plan
from tests import tiny
from tests.deep_cases import in_turn

from . import runs
from .moments import AtTheEnd

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


def words(**arguments: Any) -> dict[str, Any]:
    """`unlike` says whether samples of unlike images have videos, too."""
    unlike = arguments.pop("unlike", None)
    return {**SHORT, **({} if unlike is None else {"data": unlike_images(unlike)}), **arguments}


def case(family: str, parallel: dict[str, Any], unlike: bool | None = None, **ours: Any) -> runs.Layout:
    return runs.Layout(family, parallel, partial(words, unlike=unlike), ours)


def shares_both_ways(trainer: Any) -> None:
    """Ranks share the tokens of some chunks, and whole items of others."""
    seen, distribute = set(), ItemSharder.__call__

    def noted(self: ItemSharder, batch: Any) -> ItemSharding:
        sharding = distribute(self, batch)
        if any(len(items.tokens) for items in sharding.items.values()):
            seen.add(sharding.by_tokens)
        return sharding

    def check(state: Any) -> None:
        ItemSharder.__call__ = distribute
        assert seen == {True, False}

    ItemSharder.__call__ = noted
    trainer.add_callback(AtTheEnd(check))


UNLIKE = "images and frames of unlike sizes"
ON_THREE: dict[str, runs.Layout] = {
    UNLIKE: replace(case("qwen2_vl", {VISION: CP2}, True), check=shares_both_ways),
    "windows": case("qwen2_5_vl", {VISION: CP2}, True),
    "DeepStack, recomputed": case("qwen3_vl", {VISION: {**CP2, **AGAIN}}, False),
    "crops of one size": case("internvl", {VISION: CP2}),
    "sizes of pixels": case("mistral3", {VISION: CP2}),
    "clips": case("voxtral", {AUDIO: CP2}),
}


def stages_on_the_same_ranks(family: str) -> dict[str, Any]:
    """A plan whose two cp ranks have two stages of the encoder each, beside copies of the language model."""
    spec = build_model_spec(tiny.FAMILIES[family]())
    plan = resolve_plan(spec, {VISION: ModulePlugin(**CP2), LM: ModulePlugin(dp_size=2, colocate_with=VISION)})
    ((stage,),) = plan.modules[VISION].replicas
    stages = replace(stage, layers=(0, 2)), replace(stage, layers=(2, stage.layers[1]))
    vision = replace(plan.modules[VISION], replicas=(stages,))
    return replace(plan, modules={**plan.modules, VISION: vision}, schedule="interleaved").to_dict()


ADAPTED = {"peft_config": {"r": 4, "lora_alpha": 8, "target_modules": ["qkv", "proj"], "init_lora_weights": False}}
BESIDE = {"colocate_with": VISION}
ON_TWO: dict[str, runs.Layout] = {
    "experts shared by the same ranks": case(
        "qwen3_vl_moe", {VISION: CP2, LM: {"dp_size": 2, "ep_size": 2, **BESIDE}}, False
    ),
    "stages cut inside DeepStack": case("qwen3_vl", stages_on_the_same_ranks("qwen3_vl"), False),
    "stages with windows": case("qwen2_5_vl", stages_on_the_same_ranks("qwen2_5_vl"), True),
    "stages, features of an inner layer": case("llava", stages_on_the_same_ranks("llava")),
    "adapters": replace(
        case("qwen2_vl", {VISION: {**CP2, **ADAPTED}, LM: {"dp_size": 2, **BESIDE}}, True),
        alone={VISION: ADAPTED, LM: {}},
    ),
}
ON_FOUR: dict[str, runs.Layout] = {
    "more ranks than images": case("qwen2_vl", {VISION: {"cp_size": 4}, LM: {"dp_size": 4, **BESIDE}}, True),
    "with the tokens, on the same ranks": case(
        "llava", {VISION: {**CP2, "tp_size": 2}, LM: {**BESIDE, "pp_size": 2, **CP2, "cp_block": 8}}
    ),
    "stages of both, ZeRO-3": case(
        "qwen2_5_vl",
        {VISION: {**CP2, "pp_size": 2, "zero_stage": 3}, LM: {**BESIDE, "cp_size": 4, "cp_block": 16}},
        True,
    ),
    "copies, frozen but for the projector": case(
        "gemma3", {VISION: {**CP2, "dp_size": 2, "freeze": "tower", "colocate_with": LM}, LM: {"dp_size": 4}}
    ),
    "stages cut inside DeepStack": case(
        "qwen3_vl",
        {VISION: {**CP2, "pp_size": 2, "zero_stage": 1}, LM: {**BESIDE, "cp_size": 4, "cp_block": 16}},
        False,
    ),
    "windows, one image or none to four ranks": case(
        "qwen2_5_vl",
        {VISION: {"cp_size": 4}, LM: {"cp_size": 4, "cp_block": 8, **BESIDE}},
        True,
        per_device_train_batch_size=1,
    ),
    "DeepStack, four ranks": case(
        "qwen3_vl", {VISION: {"cp_size": 4, **AGAIN}, LM: {"pp_size": 2, "dp_size": 2, **BESIDE}}, False
    ),
    "crops, four ranks": case("internvl", {VISION: {"cp_size": 4}, LM: {"pp_size": 4, **BESIDE}}),
    "clips, four ranks": case("voxtral", {AUDIO: {"cp_size": 4}, LM: {"dp_size": 4, "colocate_with": AUDIO}}),
    "ZeRO-2, three ranks to one": case("llava", {VISION: {"cp_size": 3, "zero_stage": 2}}),
    "two encoders": case("qwen2_5_omni", {VISION: CP2, AUDIO: {**BESIDE, **CP2}, LM: {"pp_size": 2}}),
}


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        (2, in_turn(ON_TWO)),
        (3, in_turn(ON_THREE, UNLIKE)),
        (4, in_turn(ON_FOUR, "with the tokens, on the same ranks")),
    ],
    ids=["2", "3", "4"],
)
def test_encoders_that_share_out_their_images_equal_the_stock_trainer(world_size: int, layouts: Any):
    runs.assert_layouts_equal_the_stock_trainer(world_size, layouts)
