"""What each rank reads, with which randomness, and how an epoch goes on after a resume."""

import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_mmparallel.arrange import contiguous_step
from hf_mmparallel.data.global_batches import GlobalBatchSampler
from hf_mmparallel.data.step_batch import StepData, pack, unpack
from hf_mmparallel.data.step_dataset import RankInputs, Reader, StepDataset, as_is, seeded, stable_seed
from hf_mmparallel.plan import LANGUAGE_MODEL, ModulePlugin, SampleSizes, resolve_plan
from tests.data.planned import SPEC, planned_dataset

PLAN = resolve_plan(SPEC, {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(dp_size=2, pp_size=2)})
SHARED = resolve_plan(SPEC, {"vision": ModulePlugin(dp_size=2), LANGUAGE_MODEL: ModulePlugin(colocate_with="vision")})


class Noisy:
    """Samples that draw from every generator when they are read, and count their reads."""

    def __init__(self):
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> dict:
        self.reads.append(index)
        return {"index": index, "noise": (random.random(), np.random.rand(), torch.rand(()).item())}


def collate(samples: list[dict]) -> dict:
    result = {name: [sample[name] for sample in samples] for name in samples[0]}
    for sample in samples:
        sample.clear()
    return {**result, "drawn": torch.rand(()).item()}


def make(plan, rank: int, seed: int = 0) -> StepDataset:
    return planned_dataset(plan, rank, Noisy(), collate, seed)


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
    dataset.readers = Reader(source, lambda s: collated.append(tuple(x["index"] for x in s)) or collate(s))
    batch = dataset.read(contiguous_step(SHARED, range(5, 17), 3))
    assert {key[0] for key in batch.batches} == {"vision", LANGUAGE_MODEL}
    assert sorted(source.reads) == sorted({index for chunk in batch.batches.values() for index in chunk["index"]})
    for (module, replica, index, _), chunk in batch.batches.items():
        batch_indices = batch.step.microbatches[module][replica][index]
        assert chunk["index"] == [batch.step.samples[batch_index] for batch_index in batch_indices]
    assert sorted(collated) == sorted({tuple(chunk["index"]) for chunk in batch.batches.values()})
    assert len(collated) < len(batch.batches)


def test_all_ranks_runs_and_batches_draw_the_same_for_a_sample():
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
    elsewhere = [make(PLAN, rank).read(contiguous_step(PLAN, [9, 3, 7], 1, epoch=2)) for rank in (2, 4)]
    again = noise(elsewhere[0]) | noise(elsewhere[1])
    assert again == {index: decoders[index] for index in (9, 3, 7)}


def states() -> tuple:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_reading_leaves_the_generators_alone_after_an_error_too():
    before = states()
    make(PLAN, 2).read(contiguous_step(PLAN, range(11), 3))
    assert states() == before
    with pytest.raises(KeyError), seeded(3):
        random.random(), np.random.rand(), torch.rand(2)
        raise KeyError
    assert states() == before


def test_seeds_are_the_same_in_every_process():
    assert stable_seed(0, 1, [2, 3]) == 3385566651149826982
    assert stable_seed(0, 12) != stable_seed(0, 1, 2)


def sizes_of(indices) -> SampleSizes:
    return SampleSizes.of_sequences({"vision": [[i % 3] for i in indices], LANGUAGE_MODEL: [[9 + i] for i in indices]})


def collate_tensors(samples: list[dict]) -> dict:
    return {"pixel_values": torch.rand(len(samples), 3), "samples": [tuple(sample.values()) for sample in samples]}


def test_arrangement_program_and_reading_take_place_in_workers_and_equal_the_inline_ones(monkeypatch):
    def steps(num_workers: int):
        dataset = make(PLAN, 1)
        dataset.readers = Reader(Noisy(), collate_tensors)
        dataset.planner = replace(dataset.planner, sizes=sizes_of)
        draws = GlobalBatchSampler(range(40), 9)
        return iter(DataLoader(dataset, batch_sampler=draws, collate_fn=as_is, num_workers=num_workers))  # type: ignore

    inline, ahead = list(steps(0)), steps(2)
    for name in ("hf_mmparallel.cost.step_planner.StepPlanner.__call__", f"{__name__}.Noisy.__getitem__"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("the main process does a worker's work"))
    for here, there in zip(inline, ahead, strict=True):
        assert here.step == there.step and here.global_batch == there.global_batch and here.program == there.program
        assert set(there.program.actions) == {1}
        for module in PLAN.modules:
            assert here.sizes.tokens[module].tolist() == there.sizes.tokens[module].tolist()
            assert here.workloads.forward_ms[module].tolist() == there.workloads.forward_ms[module].tolist()
        assert here.batches.keys() == there.batches.keys() and here.batches
        for key, chunk in here.batches.items():
            assert chunk["samples"] == there.batches[key]["samples"]
            assert torch.equal(chunk["pixel_values"], there.batches[key]["pixel_values"])


def test_pinning_keeps_what_is_no_tensor_and_copies_a_storage_once(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.numel()) or tensor.clone())
    chunks = {"a": torch.arange(6.0).view(2, 3).T, "b": [1]}, {"a": torch.arange(3), "none": torch.empty(0, 4)}
    batch = StepData(contiguous_step(PLAN, range(1), 1), {("vision", 0, i, 0): own for i, own in enumerate(chunks)})
    given = pickle.loads(pickle.dumps(batch))
    first, second = given.pin_memory().batches.values()
    assert torch.equal(first["a"], torch.arange(6.0).view(2, 3).T) and first["b"] == [1]
    assert second["a"].tolist() == [0, 1, 2] and second["none"].shape == (0, 4)
    assert len(pinned) == 1 and given.step == batch.step


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float64]
TENSORS = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3))


@given(st.lists(TENSORS, max_size=6))
def test_every_tensor_comes_back(descriptions):
    tensors = [torch.randint(0, 2, shape).to(dtype) for dtype, shape in descriptions]
    value = {"nested": [(tensor, index) for index, tensor in enumerate(tensors)], "text": "a"}
    content, buffer = pack(value)
    found = unpack((content, buffer))
    assert found["text"] == "a"
    for (got, index), want in zip(found["nested"], tensors, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want) and tensors[index] is want
        assert not got.numel() or got.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_strides_and_shared_tensors():
    shared = torch.arange(12).view(3, 4)
    given = [shared, shared.T, shared[:, 1], shared, torch.ones(2, 3).expand(4, 2, 3)]
    found = unpack(pack(given))
    assert all(torch.equal(got, want) for got, want in zip(found, given, strict=True))
    assert found[0].data_ptr() == found[3].data_ptr() != found[1].data_ptr()
    ones = torch.ones(3)
    assert pack([ones, ones, torch.zeros(5)])[1].shape == (128,)  # two places of 64 bytes


def test_tensors_that_are_more_than_bytes_stay_what_they_are():
    leaf = torch.ones(2, requires_grad=True)
    packed = pack([torch.eye(3).to_sparse(), torch.nn.Parameter(torch.ones(2)), leaf, np.ones(3)])
    sparse, parameter, leaf, array = unpack(packed)
    assert torch.equal(sparse.to_dense(), torch.eye(3)) and array.tolist() == [1, 1, 1]
    assert isinstance(parameter, torch.nn.Parameter) and leaf.requires_grad
