"""The chain of a model by a cost model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hf_mmparallel.cost import analytic_costs, find_device
from hf_mmparallel.cost.stage_times import layer_table
from hf_mmparallel.modeling import build_model_spec
from hf_mmparallel.plan import LANGUAGE_MODEL
from hf_mmparallel.resilience.modelled_chain import modelled_chain
from tests.tiny import FAMILIES

SIZES = {"vision": (64.0, 64.0**2), LANGUAGE_MODEL: (128.0, 128.0**2)}


@pytest.fixture(scope="module")
def costs():
    return analytic_costs(build_model_spec(FAMILIES["llava"]()), find_device("a100"))


def test_layers_and_their_times_are_those_of_the_modules(costs) -> None:
    found = modelled_chain(costs, SIZES, None)
    expected = np.concatenate([layer_table(costs, name).step_ms(*size) for name, size in SIZES.items()])
    np.testing.assert_allclose(np.asarray(found.chain.layer_ms)[0], expected)
    assert list(found.chain.starts) == [costs.spec.modules["vision"].num_layers]
    assert found.chain.fits_in_flight is None


def test_the_state_is_that_of_the_parameters(costs) -> None:
    """Weights and two values of AdamW in float32."""
    found = modelled_chain(costs, SIZES, None)
    num_parameters = sum(
        np.prod(parameter.shape) for module in costs.spec.modules.values() for parameter in module.parameters
    )
    assert len(found.state_bytes) == found.chain.num_layers
    assert sum(found.state_bytes) == pytest.approx(3 * 4 * num_parameters, rel=1e-6)


def test_memory_limits_what_is_in_flight(costs) -> None:
    roomy, tight = (modelled_chain(costs, SIZES, size).chain.fits_in_flight for size in (1e9, 3e6))
    assert roomy is not None and tight is not None
    roomy, tight = np.asarray(roomy), np.asarray(tight)
    assert (tight <= roomy).all() and (tight < roomy).any()
    doubled = np.asarray(modelled_chain(costs, SIZES, 3e6, state_copies=2).chain.fits_in_flight)
    assert (doubled <= tight).all() and (doubled < tight).any()


def test_recomputed_activations_take_time_and_leave_memory(costs) -> None:
    plain, again = (modelled_chain(costs, SIZES, 1e9, checkpointing) for checkpointing in (False, True))
    assert np.asarray(again.chain.layer_ms).sum() > np.asarray(plain.chain.layer_ms).sum()
    large = modelled_chain(replace(costs, value_bytes=4), SIZES, 1e9)
    assert (np.asarray(large.chain.fits_in_flight) <= np.asarray(plain.chain.fits_in_flight)).all()
