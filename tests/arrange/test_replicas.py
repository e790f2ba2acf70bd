"""Samples to replicas: totals that are close in every module."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mmparallel.arrange.assigned_batch import assign_replicas
from hf_mmparallel.arrange.colocated_modules import ColocatedModules


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


def test_a_replica_that_is_twice_as_fast_gets_twice_the_work():
    rng = np.random.default_rng(0)
    language, encoders = rng.random(600), rng.random((600, 1))
    replica = assign_replicas(language, encoders, np.array([4, 8]))
    for weights in (language, encoders[:, 0]):
        totals = np.bincount(replica, weights)
        assert totals[1] / totals[0] == pytest.approx(2, rel=0.02)


def test_encoder_replicas_share_each_microbatch_and_the_step():
    rng = np.random.default_rng(0)
    work = rng.lognormal(0, 0.5, 240) * (rng.random(240) < 0.9)
    replica, microbatch = rng.integers(0, 4, 240), rng.integers(0, 5, 240)
    copy = ColocatedModules(("vision",), work, 6, 2, 4).copies(replica, microbatch, 5, None)
    assert (copy // 3 == replica // 2).all()
    loads = np.zeros((2, 3, 5))
    np.add.at(loads, (copy // 3, copy % 3, microbatch), work)
    assert (loads.max(axis=1) < 1.15 * loads.mean(axis=1)).all()
    totals = loads.sum(axis=2)
    assert (totals.max(axis=1) < 1.02 * totals.mean(axis=1)).all()
