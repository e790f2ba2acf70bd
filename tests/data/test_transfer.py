"""Tensors of an object as one on the way to another process."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_mmparallel.data.step_batch import pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float64]
TENSORS = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 9))


def make(dtype, shape, seed):
    values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


@given(st.lists(TENSORS, max_size=6))
def test_every_tensor_comes_back(descriptions):
    tensors = [make(*description) for description in descriptions]
    value = {"nested": [(tensor, index) for index, tensor in enumerate(tensors)], "text": "a"}
    content, buffer = pack(value)
    found = unpack((content, buffer))
    assert found["text"] == "a"
    for (got, index), want in zip(found["nested"], tensors, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want) and tensors[index] is want
        assert not got.numel() or got.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_strides_and_shared_tensors():
    shared = torch.arange(12).view(3, 4)
    content, buffer = pack([shared, shared.T, shared[:, 1], shared, torch.ones(2, 3).expand(4, 2, 3)])
    found = unpack((content, buffer))
    for got, want in zip(found, [shared, shared.T, shared[:, 1], shared, torch.ones(4, 2, 3)], strict=True):
        assert torch.equal(got, want)
    assert found[0].data_ptr() == found[3].data_ptr() != found[1].data_ptr()


def test_tensors_that_are_more_than_bytes_stay_what_they_are():
    leaf = torch.ones(2, requires_grad=True)
    packed = pack([torch.eye(3).to_sparse(), torch.nn.Parameter(torch.ones(2)), leaf, np.ones(3)])
    sparse, parameter, leaf, array = unpack(packed)
    assert torch.equal(sparse.to_dense(), torch.eye(3)) and array.tolist() == [1, 1, 1]
    assert isinstance(parameter, torch.nn.Parameter) and leaf.requires_grad


def test_tensors_of_an_object_share_one_that_is_no_larger_than_needed():
    ones = torch.ones(3)
    assert pack([ones, ones, torch.zeros(5)])[1].shape == (128,)  # two places of 64 bytes


def test_what_cannot_be_pickled_is_an_error():
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pack([lambda: None])
