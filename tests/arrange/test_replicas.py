"""Samples to replicas: totals that are close in every module."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange.assigned_batch import assign_replicas


@pytest.mark.parametrize(("num_samples", "num_replicas"), [(512, 4), (1024, 7), (2048, 16)])
def test_totals_are_close_in_all_modules(num_samples, num_replicas):
    rng = np.random.default_rng(0)
    language, encoders = rng.lognormal(0, 1, num_samples), rng.lognormal(0, 1, (num_samples, 2))
    encoders[rng.random(num_samples) < 0.3] = 0
    replica = assign_replicas(language, encoders, np.ones(num_replicas))
    for weights in (language, *encoders.T):
        totals = np.bincount(replica, weights, num_replicas)
        assert totals.max() / totals.mean() < 1.01


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 2), st.integers(0, 10**6))
def test_every_sample_has_a_replica_and_equal_ones_are_dealt_evenly(num_replicas, num_samples, num_encoders, seed):
    rng = np.random.default_rng(seed)
    encoders = rng.random((num_samples, num_encoders)) * (rng.random((num_samples, num_encoders)) < 0.5)
    replica = assign_replicas(rng.random(num_samples), encoders, np.ones(num_replicas))
    assert replica.shape == (num_samples,) and set(replica.tolist()) <= set(range(num_replicas))
    dealt = assign_replicas(np.ones(num_samples), encoders[:, :0], np.ones(num_replicas))
    assert np.ptp(np.bincount(dealt, minlength=num_replicas)) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_text_alone_is_longest_first_or_better(seed):
    language = np.random.default_rng(seed).lognormal(0, 1, 8)
    replica = assign_replicas(language, np.zeros((8, 1)), np.ones(3))
    ways = np.array(list(itertools.product(range(3), repeat=8)))
    best = min(np.bincount(way, language, 3).max() for way in ways)
    assert np.bincount(replica, language, 3).max() <= (4 / 3 - 1 / 9) * best * (1 + 1e-9)
