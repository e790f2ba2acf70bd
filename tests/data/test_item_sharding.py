"""Images, frames and clips that cp ranks share: whole ones, by their work, with and without the media themselves."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.data.item_sharding import ItemSharder, ItemSharding, spread
from hf_mmparallel.data.step_dataset import RankInputs, Reader, StepDataset
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.modeling.spec import module_parts
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, resolve_plan
from tests import tiny
from tests.modeling import test_composed as parts

IMAGE, VIDEO = 7, 8
ENTRIES = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


def sharder_of(cp_size: int, **settings: Any) -> ItemSharder:
    return ItemSharder(cp_size, {"image": IMAGE, "video": VIDEO}, ENTRIES, (10, 1), {}, splits_frames=True, **settings)


Grids = list[list[tuple[int, int, int]]]


def packed_media(images: Grids, videos: Grids) -> dict[str, Tensor]:
    """Padded samples whose patches are their own numbers, so that it is seen where each goes; four make a token."""
    rows, entries = [], {}
    for own in zip(images, videos, strict=True):
        ids = [0]
        for token, grids in zip((IMAGE, VIDEO), own, strict=True):
            for frames, height, width in grids:
                ids += [*[token] * (frames * height * width // 4), 0]
        rows.append(torch.tensor(ids))
    for (main, grid), samples in zip(ENTRIES.values(), (images, videos), strict=True):
        table = torch.tensor([extent for sample in samples for extent in sample], dtype=torch.int64).reshape(-1, 3)
        entries |= {main: torch.arange(int(table.prod(-1).sum())).double()[:, None], grid: table}
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), **entries}


def extents(frames: st.SearchStrategy[int]) -> st.SearchStrategy[Grids]:
    side = st.sampled_from([2, 4, 6])
    return st.lists(st.lists(st.tuples(frames, side, side), max_size=3), min_size=3, max_size=3)


@given(extents(st.just(1)), extents(st.integers(1, 3)), st.integers(2, 4))
def test_every_item_is_whole_on_one_rank_and_its_features_are_where_owners_say(images, videos, cp_size):
    batch = packed_media(images, videos)
    bare = {name: value for name, value in batch.items() if not value.is_floating_point()}
    sharding = sharder_of(cp_size)(bare)  # as a rank of the language model sees it
    assert all(map(np.array_equal, sharding.decided, sharder_of(cp_size)(batch).decided))
    for modality, (main, grid) in ENTRIES.items():
        patches: dict[tuple[int, int], list[float]] = {}  # (cp rank, token there) -> its patches
        for cp_rank in range(cp_size):
            local = sharding.local(batch, cp_rank)
            assert (local[grid][:, 0] == 1).all() and len(local[main]) == local[grid].prod(-1).sum()
            for token, own in enumerate(local[main].reshape(-1, 4)):
                patches[cp_rank, token] = own.tolist()
        owners = zip(*(own.tolist() for own in sharding.owners[modality]), strict=True)
        assert [patch for owner in owners for patch in patches.pop(owner)] == batch[main][:, 0].tolist()
        assert not patches
        token = sharder_of(cp_size).placeholders[modality]
        assert sharding.num_tokens[modality] == (batch["input_ids"] == token).sum(-1).tolist()


@pytest.mark.parametrize(
    ("images", "by_tokens"),
    [([(1, 8, 8)], True), ([(1, 8, 8), (1, 2, 2)], True), ([(1, 4, 4)] * 2, False), ([], False)],
)
def test_the_tokens_of_few_items_are_shared(images, by_tokens):
    batch = packed_media([images, [], []], [[], [], []])
    assert not sharder_of(2)(batch).by_tokens  # an encoder that can't
    sharding = sharder_of(2, shares_tokens=True)(batch)
    assert sharding.by_tokens == by_tokens
    ranks, indices = (own.tolist() for own in sharding.owners["image"])
    if by_tokens:
        assert all(sharding.local(batch, rank)["pixel_values"] is batch["pixel_values"] for rank in range(2))
        assert ranks == sorted(ranks) and abs(ranks.count(0) - ranks.count(1)) <= 1
        assert indices == [*range(ranks.count(0)), *range(ranks.count(1))]


@example([1, 1, 2], 2)
@given(st.lists(st.integers(1, 10**12), max_size=12), st.integers(1, 5))
def test_the_busiest_rank_has_at_most_a_third_more_than_it_must(work, num_ranks):
    """Graham 1969: the longest first is within 4/3 of the best, which is at least the mean and the largest."""
    loads = np.bincount(spread(np.array(work, np.int64), num_ranks), np.array(work, float), num_ranks)
    least = max(
        sum(work) / num_ranks, max(work, default=0), sum(sorted(work)[-num_ranks - 1 :][:2]) * (len(work) > num_ranks)
    )
    assert loads.max() <= 4 / 3 * least * (1 + 1e-12)


@pytest.mark.parametrize(
    ("family", "items"),
    [
        ("llava", [4, 4, 4]),
        ("internvl", [4, 4, 4]),
        ("voxtral", [4, 4, 4]),
        ("mistral3", [4, 4, 4]),
        ("qwen2_vl", [4, 2, 6]),
    ],
)
def test_items_of_families_follow_from_tokens_and_whole_numbers(family: str, items: list[int]):
    model = tiny.FAMILIES[family]()
    spec, (name, part) = build_model_spec(model), next(iter(module_parts(model).items()))
    sharder = ItemSharder.of(model, spec, part, name, 2)
    assert sharder.splits_frames == (family == "qwen2_vl")
    batch = tiny.collate(family)(tiny.make_dataset(family, 2))  # with one item, and two
    media = {name for names in sharder.entries.values() for name in names}
    bare = {name: value for name, value in batch.items() if name not in media or not value.is_floating_point()}
    modality = part.modalities[0]
    assert sharder(bare).items[modality].tokens.tolist() == items
    if family in ("llava", "internvl", "voxtral"):  # whose items follow each other without text, too
        joined = {"input_ids": torch.full((1, 8), tiny.MEDIA_TOKEN)}
        assert sharder(joined).items[modality].tokens.tolist() == [4, 4]


def test_a_rank_of_the_language_model_knows_the_cuts_of_what_it_takes():
    model, rows = parts.compose("clip_whisper_llama")
    spec = build_model_spec(model)
    plan = resolve_plan(spec, {"vision": ModulePlugin(cp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2)})
    sharder = ItemSharder.of(model, spec, module_parts(model)["vision"], "vision", 2)
    assert sharder.item_tokens == {"vision": rows}
    samples = parts.make_samples("clip_whisper_llama", rows, images=(1, 2, 0, 3))
    step, found = contiguous_step(plan, range(4), 1), []
    for rank in range(plan.world_size):
        inputs = RankInputs(plan, rank, sharders={"vision": sharder})
        found.append(StepDataset(Reader(samples, tiny.collate("llava")), inputs, 0).read(step).shardings)
    encoder, audio = found[0], found[plan.modules["audio"].replicas[0][0].all_ranks[0]]
    assert all(isinstance(sharding, ItemSharding) for sharding in encoder.values()) and not audio
    assert {step.chunk(*key) for key in encoder} == {step.chunk("vision", 0, i, c) for _, _, i, c in encoder}
    for replica, rank in enumerate(
        sorted({stage.all_ranks[0] for _, _, stage in plan.modules[LANGUAGE_MODEL].stages()})
    ):
        wanted = {index for own in step.microbatches[LANGUAGE_MODEL][replica] for index in own}
        assert found[rank].keys() == {key for key in encoder if wanted & set(step.chunk(*key))}


def test_entries_in_which_items_cannot_be_told_apart_are_refused():
    batch = packed_media([[(1, 2, 2)], [(1, 2, 4)], []], [[], [], []])
    sharding = sharder_of(2)(batch)
    with pytest.raises(ValueError, match=r"`pixel_values` has the shape \(5, 1\)"):
        sharding.local({**batch, "pixel_values": batch["pixel_values"][:5]}, 0)
    ids = torch.where(batch["input_ids"] == IMAGE, IMAGE, 0)
    ids[0, :3] = IMAGE  # three tokens and a run more than items
    with pytest.raises(ValueError, match="2 items of `image`"):
        sharder_of(2)({**batch, "input_ids": torch.cat([ids, torch.tensor([[IMAGE, 0, IMAGE]] * 3)], 1)})
