"""What each rank reads, with which randomness, and how an epoch goes on after a resume."""

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, SequentialSampler

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.data.global_batches import GlobalBatch, GlobalBatchSampler
from hf_mmparallel.data.step_batch import StepData
from hf_mmparallel.data.step_dataset import (
    RankInputs,
    Reader,
    StepDataset,
    as_is,
    seeded,
    stable_seed,
)
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan, sync_groups
from hf_mmparallel.steps.step_planner import StepPlanner
from tests.plan.specs import model_spec

SPEC = model_spec()
PLAN = resolve_plan(SPEC, {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=2)})
SHARED = resolve_plan(SPEC, {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(colocate_with="vision")})


class Noisy:
    """Samples that draw from every generator when they are read, and count their reads."""

    def __init__(self, size: int = 40):
        self.size = size
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        self.reads.append(index)
        return {"index": index, "noise": (random.random(), np.random.rand(), torch.rand(()).item())}


def collate(samples: list[dict]) -> dict:
    result = {name: [sample[name] for sample in samples] for name in samples[0]}
    for sample in samples:
        sample.clear()
    return {**result, "drawn": torch.rand(()).item()}


def make(plan, rank: int, seed: int = 0) -> StepDataset:
    planner = StepPlanner(analytic_costs(SPEC, find_device("cpu")), plan, sync_groups(SPEC, plan), 3)
    return StepDataset(Reader(Noisy(), collate), RankInputs(plan, rank), seed, planner)


def noise(batch: StepData) -> dict[int, tuple]:
    """Dataset index -> what was drawn when it was read."""
    pairs = [zip(b["index"], b["noise"], strict=True) for b in batch.batches.values()]
    return {index: drawn for pair in pairs for index, drawn in pair}


def test_keys_are_the_chunks_of_the_stages_of_a_rank():
    step = contiguous_step(PLAN, range(20, 31), 3)
    keys = [RankInputs(PLAN, rank).chunks(step) for rank in range(PLAN.world_size)]
    assert keys[0] == {("vision", 0, 0, 0): (0, 1, 2), ("vision", 0, 1, 0): (6, 7)}
    assert keys[1] == {("vision", 1, 0, 0): (3, 4, 5), ("vision", 1, 1, 0): (8, 9, 10)}
    assert keys[2] == {(LANGUAGE_MODEL, 0, 0, 0): (0, 1, 2), (LANGUAGE_MODEL, 0, 1, 0): (6, 7, 8)}
    assert keys[3] == keys[2] and keys[4] == keys[5]
    every = {key for rank in keys for key in rank}
    assert every == {(*key, c) for key, chunks in step.chunks.items() for c in range(len(chunks))}


def test_a_shared_rank_reads_a_sample_once_and_collates_it_once_for_modules_that_take_the_same():
    dataset = make(SHARED, 0)
    collated, source = [], Noisy()
    dataset.readers = Reader(source, lambda s: collated.append([x["index"] for x in s]) or collate(s))
    batch = dataset.read(contiguous_step(SHARED, range(5, 17), 3))
    modules = {key[0] for key in batch.batches}
    assert modules == {"vision", LANGUAGE_MODEL}
    seen = {index for chunk in batch.batches.values() for index in chunk["index"]}
    assert sorted(source.reads) == sorted(seen)
    for (module, replica, index, _), chunk in batch.batches.items():
        batch_indices = batch.step.microbatches[module][replica][index]
        assert chunk["index"] == [batch.step.samples[batch_index] for batch_index in batch_indices]
    assert sorted(collated) == sorted(
        {tuple(chunk["index"]): chunk["index"] for chunk in batch.batches.values()}.values()
    )
    assert len(collated) < len(batch.batches)


def test_all_ranks_and_every_run_draw_the_same_for_a_sample():
    step = contiguous_step(PLAN, range(11), 3, epoch=2)
    first = [make(PLAN, rank).read(step) for rank in range(PLAN.world_size)]
    torch.manual_seed(5)
    random.seed(5)
    again = [make(PLAN, rank).read(step) for rank in range(PLAN.world_size)]
    assert [b.batches for b in first] == [b.batches for b in again]
    encoders = noise(first[0]) | noise(first[1])
    decoders = noise(first[2]) | noise(first[4])
    assert encoders == decoders and len(encoders) == 11
    assert len(set(encoders.values())) == 11
    later = make(PLAN, 2).read(contiguous_step(PLAN, range(11), 3, epoch=3))
    other = make(PLAN, 2, seed=1).read(step)
    for changed in (noise(later), noise(other)):
        assert all(drawn != decoders[index] for index, drawn in changed.items())


def test_a_sample_draws_the_same_in_another_batch():
    step = contiguous_step(PLAN, range(8), 2)
    other = contiguous_step(PLAN, [9, 3, 7], 1)
    drawn = noise(make(PLAN, 2).read(step)) | noise(make(PLAN, 4).read(step))
    again = noise(make(PLAN, 2).read(other)) | noise(make(PLAN, 4).read(other))
    assert all(again[index] == drawn[index] for index in (3, 7))


def test_reading_leaves_the_generators_alone():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    make(PLAN, 2).read(contiguous_step(PLAN, range(11), 3))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.get_rng_state().tolist() == states[2]


def test_generators_come_back_after_an_error():
    before = random.getstate(), torch.get_rng_state().tolist()
    with pytest.raises(KeyError), seeded(3):
        torch.rand(2)
        random.random()
        raise KeyError
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_seeds_are_the_same_in_every_process():
    assert stable_seed(0, 1, [2, 3]) == 3385566651149826982
    assert stable_seed(0, 12) != stable_seed(0, 1, 2)


def loader(rank: int, num_workers: int = 0, size: int = 40) -> DataLoader:
    draws = GlobalBatchSampler(SeedableRandomSampler(range(size), data_seed=3), 9)
    return DataLoader(make(PLAN, rank), batch_sampler=draws, collate_fn=as_is, num_workers=num_workers)


def drawn(batches) -> list[tuple]:
    return [(b.step.epoch, b.step.samples, b.batches) for b in batches]


def test_an_epoch_has_every_sample_once_and_epochs_differ():
    source = loader(2)
    assert len(source) == 5
    orders = []
    for epoch in range(2):
        source.batch_sampler.set_epoch(epoch)
        steps = [batch.step for batch in source]
        assert [len(step.samples) for step in steps] == [9, 9, 9, 9, 4]
        assert {step.epoch for step in steps} == {epoch}
        orders.append([index for step in steps for index in step.samples])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(40))
    assert orders[0] != orders[1]


def test_ranks_agree_on_the_steps():
    steps = [[batch.step for batch in loader(rank)] for rank in range(PLAN.world_size)]
    assert all(row == steps[0] for row in steps)


def test_an_epoch_can_be_set_where_the_order_has_none():
    sampler = GlobalBatchSampler(SequentialSampler(range(4)), 2)
    sampler.batch_sampler.set_epoch(4)
    assert list(sampler) == [GlobalBatch((0, 1), 4, 2), GlobalBatch((2, 3), 4, 4)]


def test_workers_draw_what_the_main_process_draws():
    assert drawn(loader(3, num_workers=2)) == drawn(loader(3))


def collate_tensors(samples: list[dict]) -> dict:
    ids = torch.tensor([sample["index"] for sample in samples])
    return {"input_ids": ids, "pixel_values": torch.rand(len(ids), 3), "grids": [tuple(ids.tolist())]}


def sizes_of(indices) -> SampleSizes:
    return SampleSizes.of_sequences({"vision": [[i % 3] for i in indices], LANGUAGE_MODEL: [[9 + i] for i in indices]})


def test_arrangement_program_and_reading_take_place_in_the_worker_and_equal_the_inline_ones(monkeypatch):
    def steps(num_workers: int):
        dataset = make(PLAN, 1)
        dataset.readers = Reader(Noisy(), collate_tensors)
        dataset.planner = replace(dataset.planner, sizes=sizes_of)
        draws = GlobalBatchSampler(range(40), 9)
        return iter(DataLoader(dataset, batch_sampler=draws, collate_fn=as_is, num_workers=num_workers))  # type: ignore

    inline, ahead = list(steps(0)), steps(1)
    for name in ("hf_mmparallel.steps.step_planner.StepPlanner.__call__", f"{__name__}.Noisy.__getitem__"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("the main process does a worker's work"))
    for here, there in zip(inline, ahead, strict=True):
        assert here.step == there.step and here.global_batch == there.global_batch and here.program == there.program
        assert set(there.program.actions) == {1}
        for module in PLAN.modules:
            assert here.sizes.tokens[module].tolist() == there.sizes.tokens[module].tolist()
            assert here.workloads.forward_ms[module].tolist() == there.workloads.forward_ms[module].tolist()
        assert here.batches.keys() == there.batches.keys() and here.batches
        for key, chunk in here.batches.items():
            assert chunk["grids"] == there.batches[key]["grids"]
            assert torch.equal(chunk["pixel_values"], there.batches[key]["pixel_values"])


@pytest.mark.parametrize("skipped", [0, 1, 3])
def test_a_resumed_epoch_goes_on_at_its_step(skipped):
    whole = loader(2)
    whole.batch_sampler.set_epoch(1)
    expected = drawn(whole)[skipped:]
    resumed = loader(2)
    resumed.batch_sampler.set_epoch(1)
    rest = skip_first_batches(resumed, skipped)
    assert drawn(rest) == expected
    assert len(rest) == len(expected)
    assert set(resumed.dataset.readers.dataset.reads) == {
        i for _, _, b in expected for c in b.values() for i in c["index"]
    }


def test_pinning_keeps_what_is_no_tensor_and_copies_a_storage_once(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.numel()) or tensor.clone())
    batch = StepData(
        contiguous_step(PLAN, range(1), 1),
        {
            ("vision", 0, 0, 0): {"a": torch.arange(6.0).view(2, 3).T, "b": [1]},
            ("vision", 0, 1, 0): {"a": torch.arange(3), "none": torch.empty(0, 4)},
        },
    )
    given = pickle.loads(pickle.dumps(batch))
    first, second = given.pin_memory().batches.values()
    assert torch.equal(first["a"], torch.arange(6.0).view(2, 3).T) and first["b"] == [1]
    assert second["a"].tolist() == [0, 1, 2] and second["none"].shape == (0, 4)
    assert len(pinned) == 1
    assert given.step == batch.step
