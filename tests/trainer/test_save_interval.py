"""How often to save: the formula against the minimum of the expected duration, and against simulated runs."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from hf_mmparallel.trainer.checkpoint_saves import best_save_interval_s, expected_slowdown


@pytest.mark.parametrize("save_s", [0.05, 1.0, 60.0, 600.0])
@pytest.mark.parametrize("hours", [1.0, 24.0, 240.0])
def test_the_interval_is_the_minimum_of_the_expected_duration(save_s: float, hours: float):
    mean_s = 3600 * hours
    found = best_save_interval_s(save_s, mean_s)
    young = math.sqrt(2 * save_s * mean_s)

    def slowdown(interval_s: float) -> float:
        return expected_slowdown(interval_s, save_s, mean_s)

    exact = minimize_scalar(slowdown, bounds=(young / 4, 4 * young), method="bounded").x
    assert found == pytest.approx(exact, rel=2e-3)
    assert abs(found - exact) <= abs(young - exact)


def simulated_slowdown(interval_s: float, save_s: float, mean_s: float) -> float:
    """A long run with failures at random, segment by segment."""
    random, time_s, segments = np.random.default_rng(0), 0.0, 20_000
    for _ in range(segments):
        needed_s = interval_s + save_s
        while (failure_s := random.exponential(mean_s)) < needed_s:
            time_s += failure_s
        time_s += needed_s
    return time_s / (segments * interval_s)


@pytest.mark.parametrize("factor", [0.25, 1, 4])
def test_the_expected_duration_is_that_of_simulated_runs(factor: float):
    save_s, mean_s = 20.0, 1000.0
    run = (factor * best_save_interval_s(save_s, mean_s), save_s, mean_s)
    assert simulated_slowdown(*run) == pytest.approx(expected_slowdown(*run), rel=0.03)


def test_a_save_beside_the_training_is_done_before_the_next():
    assert best_save_interval_s(0.01, 3600.0, write_s=120.0) == 120.0
    assert best_save_interval_s(0.01, 3600.0, write_s=5.0) == best_save_interval_s(0.01, 3600.0) > 8


def test_a_save_that_takes_longer_than_the_time_between_failures():
    assert best_save_interval_s(300.0, 100.0) == 100.0
    assert best_save_interval_s(0.0, 100.0) == 0.0
    for arguments in ((-1.0, 10.0), (1.0, 0.0), (1.0, 1.0, -1.0)):
        with pytest.raises(ValueError, match="must be at least 0"):
            best_save_interval_s(*arguments)
