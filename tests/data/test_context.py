"""A packed row that is cut: every entry follows its tokens, every rank that needs the cut finds the same one."""

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.data.context_tokens import (
    ContextSharder,
    ContextSharding,
    cut_row,
    layer_costs,
    shard_row,
)
from hf_mmparallel.data.step_dataset import RankInputs, Reader, StepDataset
from hf_mmparallel.kernels.bitfield_attention import encode_words
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, ParallelPlan, resolve_plan
from tests.plan.specs import model_spec

IMAGE, VIDEO = 0, 7
SPEC = model_spec()


def plan_of(**settings) -> ParallelPlan:
    return resolve_plan(SPEC, {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(**settings)})


def sharder_of(plan: ParallelPlan) -> ContextSharder:
    costs = layer_costs(analytic_costs(SPEC, find_device("cpu")), plan)
    return ContextSharder(plan, {"image": IMAGE, "video": VIDEO}, frozenset({"grid"}), costs)


def packed(lengths: list[int], padding: int = 0, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths) + padding
    segments = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))
    segments = nn.functional.pad(segments, (0, padding))[None]
    return {
        "input_ids": torch.randint(0, 10, (1, total), generator=generator),
        "labels": torch.randint(1, 1000, (1, total), generator=generator),
        "position_ids": torch.randint(1, 1000, (3, 1, total), generator=generator),
        "vectors": torch.rand(1, total, 2, generator=generator) + 1,
        "attention_words": encode_words(segments),
        "grid": torch.ones(1, total),
        "flag": torch.tensor(3),
    }


@st.composite
def cases(draw) -> tuple[ContextSharding, dict[str, Tensor]]:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    batch = packed(lengths, padding=draw(st.integers(0, 5)), seed=draw(st.integers(0, 9)))
    mode = draw(st.sampled_from(["row", "segments", "auto"]))
    method = "lpt" if mode == "segments" else draw(st.sampled_from(["lpt", "zigzag", "contiguous", "random"]))
    settings = {"cp_method": method, "cp_mode": mode, "cp_block": draw(st.sampled_from([1, 4, 16]))}
    return sharder_of(plan_of(cp_size=draw(st.integers(2, 4)), **settings))(batch), batch


@given(cases())
def test_every_entry_of_a_batch_follows_its_tokens(case):
    cut, batch = case
    locals_ = [cut.local(batch, row) for row in range(len(cut.order))]
    places = {}
    for row, order in enumerate(cut.order.tolist()):
        places.update({token: (row, place) for place, token in enumerate(order) if token >= 0})
    words = batch["attention_words"][0]
    assert {token for token in range(len(words)) if words[token]} <= set(places)
    assert len({len(order) for order in cut.order}) == 1
    for token, (row, place) in places.items():
        local = locals_[row]
        assert local["input_ids"][0, place] == batch["input_ids"][0, token]
        assert torch.equal(local["position_ids"][:, 0, place], batch["position_ids"][:, 0, token])
        assert torch.equal(local["vectors"][0, place], batch["vectors"][0, token])
        following = batch["labels"][0, token + 1] if token + 1 < len(words) else -100
        assert local["shift_labels"][0, place] == following
    for local, order in zip(locals_, cut.order, strict=True):
        empty = order < 0
        assert not local["vectors"][0, empty].any() and not local["position_ids"][:, 0, empty].any()
        assert (local["shift_labels"][0, empty] == -100).all()
        assert not torch.isin(local["input_ids"][0, empty], torch.tensor([IMAGE, VIDEO])).any()
        assert local["grid"] is batch["grid"] and local["flag"] is batch["flag"]
        assert "labels" not in local and "attention_words" not in local


@given(cases())
def test_features_go_where_their_placeholders_are(case):
    cut, batch = case
    ids, words = batch["input_ids"][0], batch["attention_words"][0]
    locals_ = [cut.local(batch, row) for row in range(len(cut.order))]
    for modality, token in (("image", IMAGE), ("video", VIDEO)):
        owners, places = cut.owners[modality]
        wanted = ((ids == token) & (words != 0)).nonzero()[:, 0]
        assert len(owners) == len(places) == len(wanted) == sum(cut.num_tokens[modality])
        seen = {}
        for row, (local, order) in enumerate(zip(locals_, cut.order, strict=True)):
            real = (order >= 0) & (words[order.clamp_min(0)] != 0)
            here = order[(local["input_ids"][0] == token) & real]
            seen.update({(row, place): int(source) for place, source in enumerate(here)})
        found = [seen[row, place] for row, place in zip(owners.tolist(), places.tolist(), strict=True)]
        assert found == wanted.tolist() and len(seen) == len(wanted)
        samples = (words[wanted] & 0xFFFF).tolist()
        assert cut.num_tokens[modality] == [samples.count(i + 1) for i in range(len(cut.num_tokens[modality]))]


def test_labels_that_are_shifted_already_are_not_shifted_again():
    batch = packed([9, 8])
    batch["shift_labels"] = batch.pop("labels")
    cut = sharder_of(plan_of(cp_size=2, cp_block=4))(batch)
    for row, order in enumerate(cut.order):
        labels, real = cut.local(batch, row)["shift_labels"], order >= 0
        assert torch.equal(labels[0, real], batch["shift_labels"][0, order[real]])


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    words = torch.cat([row["attention_words"] + index for index, row in enumerate(rows)], -1)
    ids, labels = (torch.cat([row[name] for row in rows], -1) for name in ("input_ids", "labels"))
    return {"input_ids": ids, "labels": labels, "attention_words": words}


def test_ranks_that_make_features_know_the_cuts_of_those_who_take_them():
    plan = plan_of(cp_size=2, dp_size=2, cp_block=4)
    samples = [packed([3 + index], seed=index) for index in range(8)]
    step = contiguous_step(plan, range(8), 2)
    batches = []
    for rank in range(plan.world_size):
        sharder = pickle.loads(pickle.dumps(sharder_of(plan)))
        inputs = RankInputs(plan, rank, sharders={LANGUAGE_MODEL: sharder})
        dataset = StepDataset(Reader(samples, collate), inputs, 0)
        batches.append(dataset.read(step))
        assert batches[-1].batches.keys() == inputs.chunks(step).keys()
    every = {key: cut for batch in batches for key, cut in batch.shardings.items()}
    assert every.keys() == {(LANGUAGE_MODEL, replica, index, 0) for replica in range(2) for index in range(2)}
    for rank, batch in enumerate(batches):
        for key, cut in batch.shardings.items():
            assert torch.equal(cut.order, every[key].order)
        for module, replica, _ in plan.stages_of_rank(rank):
            if module == LANGUAGE_MODEL:
                assert batch.shardings.keys() == {key for key in every if key[1] == replica}
            else:
                made = {batch_index for row in step.microbatches[module][replica] for batch_index in row}
                fed = {(LANGUAGE_MODEL, *step.location_of[LANGUAGE_MODEL, index], 0) for index in made}
                assert batch.shardings.keys() == fed


def test_sliding_windows_count_in_the_work_of_a_block():
    words = encode_words(torch.ones(1, 256, dtype=torch.int64))
    every = cut_row(words, 2, 16).work
    windowed = cut_row(words, 2, 16, windows={16: 3}).work
    mixed = cut_row(words, 2, 16, windows={0: 1, 16: 2}).work
    assert mixed.sum() == pytest.approx((every.sum() + 2 * windowed.sum()) / 3, rel=0.15)
    # All blocks but the first see two blocks, both in part, where every layer has the window.
    assert windowed.sum() == pytest.approx(16 * 2 * 1.3 - 1.3)
    alone, same = cut_row(words, 2, 16), cut_row(words, 2, 16, windows={0: 3})
    assert (alone.order == same.order).all() and (alone.work == same.work).all()


def test_costs_of_a_layer_are_those_of_one_rank():
    costs = layer_costs(analytic_costs(SPEC, find_device("h100")), plan_of(cp_size=2, tp_size=2))
    assert costs.flops_per_pair == 4 * (4 // 2) * 4
    assert costs.flops_per_token == 2 * (16 * 16 + 16 * 32) / 2
    assert costs.bytes_per_token == 2 * 1 * 4 * 2  # keys and values of one head of four, two bytes a value
    assert costs.bytes_per_ms == 450e6 and costs.moved_bytes_per_token == 0
    kinds = ("state", "both", "attention", "state")
    hybrid = replace(SPEC.language_model, layer_kinds=kinds, state_widths=(30, None, None, 10))
    mixed = replace(SPEC, modules={**SPEC.modules, LANGUAGE_MODEL: hybrid})
    mean = layer_costs(analytic_costs(mixed, find_device("h100")), plan_of(cp_size=2, tp_size=2))
    assert (mean.flops_per_pair, mean.bytes_per_token) == (costs.flops_per_pair / 2, costs.bytes_per_token / 2)
    assert mean.moved_bytes_per_token == 2 * (30 + 2 * 16 + 10) / 4  # hidden states of 16 values where it has no heads


@pytest.mark.parametrize("mode", ["row", "segments", "auto"])
def test_a_loop_of_ones_own_gets_the_cut_and_the_shards_of_the_loader(mode: str):
    batch = packed([50, 3, 40, 21, 9], padding=4)
    words = batch["attention_words"]
    sharder = sharder_of(plan_of(cp_size=3, cp_mode=mode, cp_block=8))
    loaded = sharder(batch)
    own = cut_row(words, 3, block=8, mode=mode, costs=sharder.costs)  # type: ignore[arg-type]
    assert torch.equal(torch.from_numpy(own.order), loaded.order.flatten())
    for rank in range(3):
        shard = shard_row(words, own, rank, None)
        theirs = loaded.shard(rank, None, torch.device("cpu"))
        assert torch.equal(shard.order, loaded.order)
        assert torch.equal(shard.take(batch["vectors"]), loaded.local(batch, rank)["vectors"])
        for name in ("query_words", "query_positions", "key_words", "key_positions"):
            assert torch.equal(getattr(shard.mask, name), getattr(theirs.mask, name))
    meta = shard_row(words, own, 0, None, torch.device("meta"))
    assert meta.mask.query_words.device.type == meta.order.device.type == "meta"


def test_only_one_packed_row_is_cut():
    with pytest.raises(ValueError, match=r"'input_ids': \(2, 3\).*`PackingCollator`"):
        sharder_of(plan_of(cp_size=2))({"input_ids": torch.ones(2, 3, dtype=torch.int64)})
    batch = packed([5, 4])
    with pytest.raises(ValueError, match=r"`cp_size=2` cuts.* \['pixels'\].*`cp_size=1`"):
        sharder_of(plan_of(cp_size=2))({**batch, "pixels": torch.ones(1, 3, 4, 4)})
    words = batch["attention_words"]
    for several in (words.view(3, 3), words[0]):
        with pytest.raises(ValueError, match=r"`\[1, length\]`"):
            cut_row(several, 2)
    with pytest.raises(ValueError, match="`costs`"):
        cut_row(words, 2, mode="auto")
